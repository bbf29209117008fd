"""Experiment trackers, a module for each: W&B, TensorBoard, and the others that Accelerate supports."""
