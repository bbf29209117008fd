"""Trained weights: where they come from, and which tensor takes which."""
