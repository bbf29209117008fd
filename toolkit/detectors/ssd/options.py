"""The settings of SSD and SSDLite, with CVNets' defaults; lists have one entry per level, from fine to coarse."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from toolkit.base.number_types import (
    ClosedUnitInterval,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    WidthInt,
)
from toolkit.models import DetectorOptions


@dataclass
class SsdOptions(DetectorOptions):
    """SSD on a timm backbone (Liu et al. 2016)."""

    inference_only: ClassVar[tuple[str, ...]] = ("score_threshold", "nms_threshold")
    architecture: str = "ssd"
    """Detector: a name of this toolkit, or `module:Class` of your own; ssd has plain convolutions, ssdlite depthwise
    separable ones."""
    backbone: str = "mobilevit_s"
    """timm model that is the backbone."""
    norm: Literal["batch", "frozen", "group", "sync"] = "batch"
    """Normalisation layers: batch (BatchNorm), frozen (BatchNorm with fixed statistics and weights; backbone only),
    group (GroupNorm) or sync (BatchNorm with statistics over all processes)."""
    strides: list[int] = field(default_factory=lambda: [16, 32, 64, 128, 256, -1])
    """Strides in pixels of the feature levels: strides of the backbone in increasing order, then levels of twice the
    previous stride; -1 at the end is one level for the whole image."""
    channels: list[WidthInt] = field(default_factory=lambda: [512, 256, 256, 128, 128, 64])
    """Number of channels that the feature map of each level is projected to."""
    aspect_ratios: list[list[PositiveFloat]] = field(
        default_factory=lambda: [[2.0, 3.0], [2.0, 3.0], [2.0, 3.0], [2.0, 3.0], [2.0, 3.0], [2.0]]
    )
    """Aspect ratios of the anchors of each level, in addition to two squares; each is used as width to height and as
    height to width."""
    min_scale: PositiveFloat = 0.1
    """Side of the small square anchors of the finest level, as a fraction of the image side."""
    max_scale: PositiveFloat = 1.05
    """Side of the small square anchors that a further, coarsest level would have, as a fraction of the image side;
    levels between are spaced evenly."""
    clip_anchors: bool = True
    """Clip centres and sides of anchors to the image."""
    iou_threshold: ClosedUnitInterval = 0.5
    """Minimum IoU with an object for an anchor to be a positive training sample."""
    center_variance: PositiveFloat = 0.1
    """Scale of the regression targets of box centres, as a fraction of the anchor's sides."""
    size_variance: PositiveFloat = 0.2
    """Scale of the regression targets of box sides, which are logarithms."""
    negatives_per_positive: NonNegativeInt = 3
    """Hard negative mining: number of background anchors per positive anchor of an image in the classification loss,
    those with the largest loss."""
    label_smoothing: ClosedUnitInterval = 0.0
    """Label smoothing of the classification loss: probability mass that is spread evenly over all classes."""
    self_weighting_steps: NonNegativeInt = 0
    """Number of optimizer steps during which the box loss is reweighted to the magnitude of the classification loss; 0
    disables it."""
    self_weighting_every: PositiveInt = 200
    """Number of optimizer steps between two updates of that weight (`model.self_weighting_steps`)."""
    score_threshold: ClosedUnitInterval = 0.01
    """Minimum class probability of a detection."""
    nms_threshold: ClosedUnitInterval = 0.5
    """IoU above which non-maximum suppression removes the lower-scoring of two detections of the same class."""
    candidates_per_class: PositiveInt = 400
    """Maximum number of candidates per class and image before non-maximum suppression."""
    mean: list[float] | None = None
    """Mean RGB values in [0, 1] for normalising images; null: those of the backbone's training."""
    std: list[PositiveFloat] | None = None
    """Standard deviations of RGB values in [0, 1] for normalising images; null: those of the backbone's training."""


@dataclass
class SsdliteOptions(SsdOptions):
    """SSD with depthwise separable convolutions (Sandler et al. 2018), which is what CVNets trains."""

    architecture: str = "ssdlite"
    """Detector: a name of this toolkit, or `module:Class` of your own; ssdlite has depthwise separable convolutions,
    ssd plain ones."""


@dataclass
class Ssd300Options(DetectorOptions):
    """torchvision's `ssd300_vgg16` (Liu et al. 2016), whose structure is fixed; made for `data.image_size 300`."""

    inference_only: ClassVar[tuple[str, ...]] = ("score_threshold", "nms_threshold")
    architecture: str = "ssd300_vgg16"
    """Detector: a name of this toolkit, or `module:Class` of your own; this one is torchvision's."""
    iou_threshold: ClosedUnitInterval = 0.5
    """Minimum IoU with an object for an anchor to be a positive training sample."""
    negatives_per_positive: NonNegativeInt = 3
    """Hard negative mining: number of background anchors per positive anchor of an image in the classification loss,
    those with the largest loss."""
    score_threshold: ClosedUnitInterval = 0.01
    """Minimum class probability of a detection."""
    nms_threshold: ClosedUnitInterval = 0.45
    """IoU above which non-maximum suppression removes the lower-scoring of two detections of the same class."""
    candidates_per_class: PositiveInt = 400
    """Maximum number of candidates per class and image before non-maximum suppression."""


@dataclass
class Ssdlite320Options(Ssd300Options):
    """torchvision's `ssdlite320_mobilenet_v3_large` (Sandler et al. 2018), whose structure is fixed; made for
    `data.image_size 320`."""

    architecture: str = "ssdlite320_mobilenet_v3_large"
    """Detector: a name of this toolkit, or `module:Class` of your own; this one is torchvision's."""
    score_threshold: ClosedUnitInterval = 0.001
    """Minimum class probability of a detection."""
    nms_threshold: ClosedUnitInterval = 0.55
    """IoU above which non-maximum suppression removes the lower-scoring of two detections of the same class."""
    candidates_per_class: PositiveInt = 300
    """Maximum number of candidates per class and image before non-maximum suppression."""
