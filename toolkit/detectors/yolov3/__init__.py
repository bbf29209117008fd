"""YOLOv3: model and training targets."""
