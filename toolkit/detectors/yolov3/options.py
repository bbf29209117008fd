"""The settings of YOLOv3, with GluonCV's defaults."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from toolkit.base.number_types import (
    ClosedUnitInterval,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    WidthInt,
)
from toolkit.models import DetectorOptions

# (w, h) in pixels of the network input, deep to shallow; from k-means on COCO at 416 px.
DEFAULT_ANCHORS = (((116, 90), (156, 198), (373, 326)), ((30, 61), (62, 45), (59, 119)), ((10, 13), (16, 30), (33, 23)))


def _default_anchors() -> list[list[list[float]]]:
    return [[[float(width), float(height)] for width, height in level] for level in DEFAULT_ANCHORS]


@dataclass
class Yolov3Options(DetectorOptions):
    """YOLOv3 on timm's Darknet-53 or another timm backbone (Redmon & Farhadi 2018)."""

    inference_only: ClassVar[tuple[str, ...]] = ("score_threshold", "nms_threshold", "nms_topk")
    architecture: str = "yolov3"
    """Detector: a name of this toolkit, or `module:Class` of your own; this one is YOLOv3."""
    backbone: str = "darknet53"
    """timm model that is the backbone, with feature maps of strides 8, 16 and 32."""
    norm: Literal["batch", "frozen", "group", "sync"] = "batch"
    """Normalisation layers: batch (BatchNorm), frozen (BatchNorm with fixed statistics and weights; backbone only),
    group (GroupNorm) or sync (BatchNorm with statistics over all processes)."""
    leaky_slope: NonNegativeFloat | None = None
    """Negative slope of the leaky ReLUs of a Darknet; null: 0.1, as in YOLO. timm's pretrained weights were trained
    with 0.01, which must be given with them."""
    head_channels: list[WidthInt] | None = None
    """Channels of the heads at strides 32, 16 and 8; null: half the channels of the backbone's feature maps."""
    anchors: list[list[list[PositiveFloat]]] = field(default_factory=_default_anchors)
    """Anchors as [width, height] in pixels of the network input: three lists, for strides 32, 16 and 8. `python -m
    toolkit.tools.anchors` computes them for a data set."""
    label_smoothing: bool = False
    """Label smoothing: class targets are s and 1 - s instead of 0 and 1, where s = min(1 / classes, 1 / 40)."""
    ignore_iou: ClosedUnitInterval = 0.7
    """IoU with an object above which a prediction that is not assigned to it is ignored by the objectness loss, instead
    of being a negative."""
    objectness_prior: ClosedUnitInterval = 0.5
    """Initial objectness probability of the heads. 0.01 spares short runs from random weights the steps in which they
    learn that most cells are empty."""
    score_threshold: ClosedUnitInterval = 0.01
    """Minimum score of a detection, objectness times class probability."""
    nms_threshold: ClosedUnitInterval = 0.45
    """IoU above which non-maximum suppression removes the lower-scoring of two detections of the same class."""
    nms_topk: PositiveInt = 400
    """Maximum number of candidates per image, over all classes, before non-maximum suppression."""
    mean: list[float] | None = None
    """Mean RGB values in [0, 1] for normalising images; null: those of the backbone's training."""
    std: list[PositiveFloat] | None = None
    """Standard deviations of RGB values in [0, 1] for normalising images; null: those of the backbone's training."""
