"""Evaluation: COCO numbers by image id, the loop that makes predictions, pictures and the report."""
