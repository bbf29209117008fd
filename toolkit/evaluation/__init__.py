"""Evaluation: COCO metrics by image id, prediction on a data set, drawing, and the report."""
