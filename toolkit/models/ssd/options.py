"""The settings of SSD and SSDLite, with CVNets' values; lists have an entry for each level, fine to coarse."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from toolkit.models.options import DetectorOptions


@dataclass
class SsdOptions(DetectorOptions):
    """SSD on a timm backbone (Liu et al. 2016)."""

    inference_only: ClassVar[tuple[str, ...]] = ("score_threshold", "nms_threshold")
    architecture: str = "ssd"
    """Name of a detector of this toolkit, or `module:Class` of your own; ssd has plain convolutions, ssdlite separable
    ones, as CVNets has them."""
    backbone: str = "mobilevit_s"
    """Name of a timm model that gives feature maps."""
    norm: Literal["batch", "frozen", "group", "sync"] = "batch"
    """What the batch norms become: batch norms as they are, constants (in the backbone only), group norms, or batch
    norms with the statistics of all processes."""
    strides: list[int] = field(default_factory=lambda: [16, 32, 64, 128, 256, -1])
    """Strides in pixels of the levels: some that the backbone has, increasing, then each twice the one before; -1 at
    the end is the whole image."""
    channels: list[int] = field(default_factory=lambda: [512, 256, 256, 128, 128, 64])
    """Channels that the feature map of each level is projected to."""
    aspect_ratios: list[list[float]] = field(
        default_factory=lambda: [[2.0, 3.0], [2.0, 3.0], [2.0, 3.0], [2.0, 3.0], [2.0, 3.0], [2.0]]
    )
    """For each level, the aspect ratios of its anchors beside two squares; each counts as width to height and as height
    to width."""
    min_scale: float = 0.1
    """Side of the small square anchors of the finest level, as a fraction of the side of the image."""
    max_scale: float = 1.05
    """Side that the small square anchors of one more, coarsest level would have, as a fraction of the side of the
    image."""
    clip_anchors: bool = True
    """Clamp centres and sides of anchors to the image."""
    iou_threshold: float = 0.5
    """IoU from which an anchor is trained to find a box."""
    center_variance: float = 0.1
    """Unit of the predicted centres, as a fraction of the sides of the anchor."""
    size_variance: float = 0.2
    """Unit of the predicted logarithms of sides."""
    negatives_per_positive: int = 3
    """Background anchors that count in the loss of an image for each anchor with a box, those with the largest loss."""
    label_smoothing: float = 0.0
    """Share of the probability that the targets of the classification spread evenly over all classes."""
    self_weighting_steps: int = 0
    """Optimizer steps over which the loss of boxes is brought to weigh as much as that of classes; 0 leaves both as
    they are."""
    self_weighting_every: int = 200
    """Optimizer steps between two adjustments of the weight of the loss of boxes."""
    score_threshold: float = 0.01
    """Detections need a probability of their class above this."""
    nms_threshold: float = 0.5
    """IoU above which a better detection of the same class suppresses another one."""
    candidates_per_class: int = 400
    """Best detections of each class of an image that enter the suppression."""
    mean: list[float] | None = None
    """Mean of the red, green and blue values in [0, 1]; without a value, that which the backbone was trained with."""
    std: list[float] | None = None
    """Standard deviation of the red, green and blue values in [0, 1]; without a value, that which the backbone was
    trained with."""


@dataclass
class SsdliteOptions(SsdOptions):
    """SSD with depthwise separable convolutions (Sandler et al. 2018), which is what CVNets trains."""

    architecture: str = "ssdlite"
    """Name of a detector of this toolkit, or `module:Class` of your own; ssdlite has separable convolutions, as CVNets
    has them, ssd plain ones."""


@dataclass
class Ssd300Options(DetectorOptions):
    """torchvision's `ssd300_vgg16` (Liu et al. 2016), whose structure is fixed; made for `data.image_size 300`."""

    inference_only: ClassVar[tuple[str, ...]] = ("score_threshold", "nms_threshold")
    architecture: str = "ssd300_vgg16"
    """Name of a detector of this toolkit, or `module:Class` of your own; this one is torchvision's."""
    iou_threshold: float = 0.5
    """IoU from which an anchor is trained to find a box."""
    negatives_per_positive: int = 3
    """Background anchors that count in the loss of an image for each anchor with a box, those with the largest loss."""
    score_threshold: float = 0.01
    """Detections need a probability of their class above this."""
    nms_threshold: float = 0.45
    """IoU above which a better detection of the same class suppresses another one."""
    candidates_per_class: int = 400
    """Best detections of each class of an image that enter the suppression."""


@dataclass
class Ssdlite320Options(Ssd300Options):
    """torchvision's `ssdlite320_mobilenet_v3_large` (Sandler et al. 2018), whose structure is fixed; made for
    `data.image_size 320`."""

    architecture: str = "ssdlite320_mobilenet_v3_large"
    """Name of a detector of this toolkit, or `module:Class` of your own; this one is torchvision's."""
    score_threshold: float = 0.001
    """Detections need a probability of their class above this."""
    nms_threshold: float = 0.55
    """IoU above which a better detection of the same class suppresses another one."""
    candidates_per_class: int = 300
    """Best detections of each class of an image that enter the suppression."""
