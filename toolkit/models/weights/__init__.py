"""Pretrained weights: their sources, and the mapping of their tensors."""
