"""A tiny YOLOv3 on a few convolutions, its targets, and random outputs."""

import torch
from plain_training import Taps
from rows import boxes, integers

from toolkit.detectors.yolov3.model import YOLOv3
from toolkit.detectors.yolov3.options import DEFAULT_ANCHORS, Yolov3Options
from toolkit.detectors.yolov3.targets import STRIDES

LOSSES = YOLOv3.loss_names
ANCHORS = torch.tensor(DEFAULT_ANCHORS, dtype=torch.float32)


def tiny(**options) -> YOLOv3:
    torch.manual_seed(0)
    features = Taps(
        [
            [(3, 8), (8, 8), (8, 8)],
            [(8, 12)],
            [(12, 16)],
        ]
    )
    return YOLOv3(["a", "b", "c"], Yolov3Options(**options), features=features)


def target(objects: str, labels: str | None = None, **columns) -> dict:
    """Boxes `"0 0 32 64, ..."`, of class 0 unless labels are given."""
    numbered = boxes(objects)
    of_boxes = torch.zeros(len(numbered), dtype=torch.int64) if labels is None else integers(labels)
    return {"boxes": numbered, "labels": of_boxes, **columns}


def random_outputs(detector: YOLOv3, sizes, canvas_hw=None, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    height, width = canvas_hw or sizes[0]
    channels = detector.predictions[0].out_channels
    outputs = {"sizes": torch.tensor(sizes)}
    for stride in STRIDES:
        shape = (len(sizes), channels, height // stride, width // stride)
        outputs[f"raw_stride{stride}"] = torch.randn(shape, generator=generator)
    return outputs


def losses_of(detector: YOLOv3, outputs: dict, targets: list) -> dict[str, torch.Tensor]:
    return detector.criterion(outputs, targets, {"images": 1.0})[0]
