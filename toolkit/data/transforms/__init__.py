"""Augmentations: `(image, target, generator) -> (image, target)` on uint8 images, one file per family."""
