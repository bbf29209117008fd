"""The training scripts that `scripts/check_data.py` offers on its command line."""

TRAINING = ("train_detr", "train_faster_rcnn", "train_yolov3", "train_ssd", "train_sgg")
