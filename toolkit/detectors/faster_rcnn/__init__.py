"""Faster R-CNN with a feature pyramid: build, model, criterion."""
