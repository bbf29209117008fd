"""The settings of YOLOv3, with GluonCV's values."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from toolkit.models.options import DetectorOptions

# (w, h) in pixels of the network input, deep to shallow; from k-means on COCO at 416 px.
DEFAULT_ANCHORS = (
    ((116, 90), (156, 198), (373, 326)),
    ((30, 61), (62, 45), (59, 119)),
    ((10, 13), (16, 30), (33, 23)),
)


def _default_anchors() -> list[list[list[float]]]:
    return [[[float(width), float(height)] for width, height in level] for level in DEFAULT_ANCHORS]


@dataclass
class Yolov3Options(DetectorOptions):
    """YOLOv3 on timm's Darknet-53 or another timm backbone (Redmon & Farhadi 2018)."""

    inference_only: ClassVar[tuple[str, ...]] = ("score_threshold", "nms_threshold", "nms_topk")
    architecture: str = "yolov3"
    """Name of a detector of this toolkit, or `module:Class` of your own; this one is YOLOv3."""
    backbone: str = "darknet53"
    """Name of a timm model with feature maps of strides 8, 16 and 32."""
    norm: Literal["batch", "frozen", "group", "sync"] = "batch"
    """What the batch norms become: batch norms as they are, constants (in the backbone only), group norms, or batch
    norms with the statistics of all processes."""
    leaky_slope: float | None = None
    """Slope of the leaky ReLUs of a Darknet for negative values; without a value 0.1, which YOLO has. The pretrained
    weights of timm were trained with 0.01: with such weights it must be given."""
    head_channels: list[int] | None = None
    """Channels of the heads at strides 32, 16 and 8; without a value half of those of the backbone's feature maps."""
    anchors: list[list[list[float]]] = field(default_factory=_default_anchors)
    """[width, height] in pixels of the network input of the anchors, three lists for strides 32, 16 and 8;
    `python -m toolkit.use.anchors` computes them for a data set."""
    label_smoothing: bool = False
    """Train class probabilities towards s and 1 - s instead of 0 and 1, where s = min(1 / classes, 1 / 40)."""
    ignore_iou: float = 0.7
    """IoU with a box above which a prediction that is not assigned to it is not trained as background."""
    objectness_prior: float = 0.5
    """Probability of an object that the heads start with; at 0.01 the first steps are not spent on learning that most
    cells are empty, which helps short runs from random weights."""
    score_threshold: float = 0.01
    """Detections need a score, the probability of an object times that of the class, above this."""
    nms_threshold: float = 0.45
    """IoU above which a better detection of the same class suppresses another one."""
    nms_topk: int = 400
    """Best candidates of an image, of all classes together, that enter the suppression."""
    mean: list[float] | None = None
    """Mean of the red, green and blue values in [0, 1]; without a value, that which the backbone was trained with."""
    std: list[float] | None = None
    """Standard deviation of the red, green and blue values in [0, 1]; without a value, that which the backbone was
    trained with."""
