"""Predicts with trained detectors on pictures, folders, videos and data sets."""
