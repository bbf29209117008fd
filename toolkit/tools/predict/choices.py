"""The formats and the default threshold that `scripts/predict.py` offers on its command line; it imports nothing."""

GRAPH_SUFFIXES = {"dot": ".dot", "networkx": ".json"}  # of the files of scene graphs
OUTPUT_FORMATS = ("json", "jsonl", "coco", "yolo", "voc", "csv", "label_studio", *GRAPH_SUFFIXES)
DEFAULT_THRESHOLD = 0.3
