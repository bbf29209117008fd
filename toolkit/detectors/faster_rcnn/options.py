"""The settings of the Faster R-CNNs, with torchvision's defaults; the `rpn_*` and `box_*` names are torchvision's."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from toolkit.base.number_types import (
    ClosedUnitInterval,
    FewInt,
    FewOrNoneInt,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    WidthInt,
)
from toolkit.models import DetectorOptions


@dataclass
class TwoStageOptions(DetectorOptions):
    """The two stages of a Faster R-CNN."""

    inference_only: ClassVar[tuple[str, ...]] = (
        "score_threshold",
        "nms_threshold",
        "detections_per_image",
        "rpn_pre_nms_top_n_test",
        "rpn_post_nms_top_n_test",
    )
    rpn_pre_nms_top_n_train: PositiveInt = 2000
    """RPN in training: number of best anchors per level before non-maximum suppression."""
    rpn_pre_nms_top_n_test: PositiveInt = 1000
    """RPN in evaluation: number of best anchors per level before non-maximum suppression."""
    rpn_post_nms_top_n_train: PositiveInt = 2000
    """RPN in training: maximum number of proposals per image after non-maximum suppression."""
    rpn_post_nms_top_n_test: PositiveInt = 1000
    """RPN in evaluation: maximum number of proposals per image after non-maximum suppression."""
    rpn_nms_thresh: ClosedUnitInterval = 0.7
    """RPN: IoU above which non-maximum suppression removes the lower-scoring of two proposals."""
    rpn_fg_iou_thresh: ClosedUnitInterval = 0.7
    """RPN: minimum IoU with an object for an anchor to be a positive training sample."""
    rpn_bg_iou_thresh: ClosedUnitInterval = 0.3
    """RPN: IoU with all objects below which an anchor is a negative training sample."""
    rpn_batch_size_per_image: PositiveInt = 256
    """RPN: number of anchors sampled per image for the losses."""
    rpn_positive_fraction: ClosedUnitInterval = 0.5
    """RPN: maximum fraction of positives among the sampled anchors."""
    rpn_crowd_overlap: ClosedUnitInterval = 0.7
    """RPN: fraction of an anchor's area inside a crowd region from which the anchor is ignored in training."""
    rpn_min_size: NonNegativeFloat = 1e-3
    """RPN: minimum side of a proposal in pixels; smaller proposals are dropped."""
    rpn_smooth_l1_beta: NonNegativeFloat = 1 / 9
    """RPN: transition point from quadratic to linear of the smooth L1 box loss, in box deltas (1 / sigma^2 in other
    programs)."""
    rpn_score_thresh: ClosedUnitInterval = 0.0
    """RPN: minimum objectness probability of a proposal."""
    score_threshold: ClosedUnitInterval = 0.05
    """Minimum class probability of a detection."""
    nms_threshold: ClosedUnitInterval = 0.5
    """IoU above which non-maximum suppression removes the lower-scoring of two detections of the same class."""
    detections_per_image: PositiveInt = 100
    """Maximum number of detections per image."""
    box_fg_iou_thresh: ClosedUnitInterval = 0.5
    """Box head: minimum IoU with an object for a proposal to be a positive training sample of its class."""
    box_bg_iou_thresh: ClosedUnitInterval = 0.5
    """Box head: IoU with all objects below which a proposal is a negative training sample (background)."""
    box_bg_iou_from: ClosedUnitInterval = 0.0
    """Box head: minimum IoU for a negative training sample; proposals below it are ignored in training (see
    `model.box_bg_iou_thresh`)."""
    box_crowd_overlap: ClosedUnitInterval = 0.7
    """Box head: fraction of a proposal's area inside a crowd region from which the proposal is ignored in training."""
    bbox_reg_weights: list[PositiveFloat] = field(default_factory=lambda: [10.0, 10.0, 5.0, 5.0])
    """Box head: scale factors of the four regression targets (x, y, width, height)."""
    box_smooth_l1_beta: NonNegativeFloat = 1 / 9
    """Box head: transition point from quadratic to linear of the smooth L1 box loss, in box deltas times
    `model.bbox_reg_weights` (1 / sigma^2 in other programs)."""
    box_batch_size_per_image: PositiveInt = 512
    """Box head: number of proposals sampled per image for the losses."""
    box_positive_fraction: ClosedUnitInterval = 0.25
    """Box head: maximum fraction of positives among the sampled proposals."""
    masks: bool = False
    """Also predict a mask of each object, as Mask R-CNN; the data need masks."""


@dataclass
class FasterRcnnOptions(TwoStageOptions):
    """A Faster R-CNN with a feature pyramid on a timm backbone (Ren et al. 2015; Lin et al. 2017)."""

    architecture: str = "faster_rcnn"
    """Detector: a name of this toolkit, or `module:Class` of your own; this one is Faster R-CNN on a timm backbone."""
    backbone: str = "resnet50"
    """timm model that is the backbone."""
    norm: Literal["batch", "frozen", "group", "sync"] = "batch"
    """Normalisation layers of the backbone: batch (BatchNorm), frozen (BatchNorm with fixed statistics and weights),
    group (GroupNorm) or sync (BatchNorm with statistics over all processes)."""
    freeze: Literal["paper", "norms", "none"] = "paper"
    """Backbone parts to freeze: paper (stem, first stage and batch norms), norms (batch norms only) or none."""
    strides: list[int] = field(default_factory=lambda: [4, 8, 16, 32])
    """Strides in pixels of the feature pyramid levels that boxes are pooled from, each twice the previous one."""
    fpn_channels: WidthInt = 256
    """Number of channels of the feature pyramid."""
    head_norm: Literal["none", "batch", "group", "sync"] = "none"
    """Normalisation layers after the convolutions of the feature pyramid and the box head: none, batch, group or
    sync."""
    anchor_sizes: list[list[PositiveFloat]] = field(default_factory=lambda: [[32.0], [64.0], [128.0], [256.0], [512.0]])
    """Anchor sizes per level in pixels (square roots of areas). One more level than `model.strides` adds a coarser
    level that is used for proposals only."""
    aspect_ratios: list[PositiveFloat] = field(default_factory=lambda: [0.5, 1.0, 2.0])
    """Aspect ratios of the anchors, height divided by width."""
    rpn_convs: FewInt = 1
    """RPN: number of 3 x 3 convolutions in the head."""
    box_convs: FewOrNoneInt = 0
    """Box head: number of 3 x 3 convolutions; 0 uses a second linear layer instead."""
    representation_size: WidthInt = 1024
    """Box head: hidden dimension of the linear layers."""
    mask_convs: FewInt = 4
    """Mask branch (see `model.masks`): number of 3 x 3 convolutions."""
    mask_channels: WidthInt = 256
    """Mask branch: number of channels of its convolutions."""
    norm_eps: NonNegativeFloat = 1e-5
    """Epsilon of the backbone's frozen batch norms; 0 in Detectron and maskrcnn-benchmark."""
    stride_in_1x1: bool = False
    """Put the stride of a ResNet stage into the 1 x 1 convolution of its first block, as in Caffe2 models, instead of
    the 3 x 3 one."""
    whole_pixels: bool = False
    """Pool boxes as maskrcnn-benchmark does, whose boxes end at their last pixel: one pixel less."""
    cell_anchors: list[list[list[float]]] = field(default_factory=list)
    """Explicit anchors per level as [x1, y1, x2, y2] in pixels around a position; empty: made from `model.anchor_sizes`
    and `model.aspect_ratios`."""
    mean: list[float] | None = None
    """Mean RGB values in [0, 1] for normalising images; null: those of the backbone's training."""
    std: list[PositiveFloat] | None = None
    """Standard deviations of RGB values in [0, 1] for normalising images; null: those of the backbone's training."""


@dataclass
class ResNet50Options(TwoStageOptions):
    """torchvision's `fasterrcnn_resnet50_fpn` (Ren et al. 2015; Lin et al. 2017), whose structure is fixed."""

    architecture: str = "fasterrcnn_resnet50_fpn"
    """Detector: a name of this toolkit, or `module:Class` of your own; this one is torchvision's."""
    pretrained_backbone: bool | str = False
    """Start from torchvision's ImageNet weights of the ResNet-50 (downloaded once), or from a file of them; not used
    with `model.pretrained`."""
    freeze: Literal["paper", "norms"] = "paper"
    """Backbone parts to freeze: paper (stem, first stage and batch norms) or norms (batch norms only)."""
    norm_eps: NonNegativeFloat = 1e-5
    """Epsilon of the frozen batch norms; 0 in torchvision's published detector."""


@dataclass
class ResNet50V2Options(TwoStageOptions):
    """torchvision's `fasterrcnn_resnet50_fpn_v2` (Li et al. 2021), whose structure is fixed."""

    architecture: str = "fasterrcnn_resnet50_fpn_v2"
    """Detector: a name of this toolkit, or `module:Class` of your own; this one is torchvision's."""
    pretrained_backbone: bool | str = False
    """Start from torchvision's ImageNet weights of the ResNet-50 (downloaded once), or from a file of them; not used
    with `model.pretrained`."""
    freeze: Literal["paper", "none"] | None = None
    """Backbone parts to freeze: paper (stem and first stage) or none. null: paper with pretrained weights, else
    none."""
