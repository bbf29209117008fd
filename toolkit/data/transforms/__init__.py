"""Augmentation: `(image, target, generator) -> (image, target)` on uint8 images, one file a family."""
