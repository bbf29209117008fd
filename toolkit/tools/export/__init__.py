"""Exports detectors to files that compute boxes from pixels, and verifies the files against PyTorch.

graph: a detector as one function; faster_rcnn: the same for Faster R-CNN. operators: two custom operators.
exported_files: writes and runs files, and their metadata. check: comparison with PyTorch.
"""
