"""Detectors outside PyTorch; one file a detector or format."""
