"""The bottom of the core: batches, boxes, processes, errors, files, signals, texts. It imports nothing above it."""
