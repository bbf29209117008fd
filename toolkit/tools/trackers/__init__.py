"""Programs that show a run, one file each: W&B, TensorBoard, and the others that Accelerate supports."""
