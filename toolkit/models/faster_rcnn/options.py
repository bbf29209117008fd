"""The settings of the Faster R-CNNs, with torchvision's values; `rpn_*` and `box_*` are its names."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from toolkit.models.options import DetectorOptions


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
    rpn_pre_nms_top_n_train: int = 2000
    """Anchors of each level that become candidates for proposals in training, the best ones."""
    rpn_pre_nms_top_n_test: int = 1000
    """Anchors of each level that become candidates for proposals in evaluation, the best ones."""
    rpn_post_nms_top_n_train: int = 2000
    """Largest number of proposals of an image in training."""
    rpn_post_nms_top_n_test: int = 1000
    """Largest number of proposals of an image in evaluation."""
    rpn_nms_thresh: float = 0.7
    """IoU above which a better proposal suppresses another one."""
    rpn_fg_iou_thresh: float = 0.7
    """IoU from which an anchor is trained to find an object."""
    rpn_bg_iou_thresh: float = 0.3
    """IoU below which an anchor is trained as background."""
    rpn_batch_size_per_image: int = 256
    """Anchors of an image that are trained."""
    rpn_positive_fraction: float = 0.5
    """Largest share of the trained anchors that may have an object."""
    rpn_crowd_overlap: float = 0.7
    """Share of its area in a crowd region from which an anchor is not trained."""
    rpn_min_size: float = 1e-3
    """Proposals with a side below this many pixels are left out."""
    rpn_smooth_l1_beta: float = 1 / 9
    """Error of a proposal's box, in its deltas, from which the loss is linear: 1 / sigma^2 of other programs."""
    rpn_score_thresh: float = 0.0
    """Proposals with a probability of an object below this are left out."""
    score_threshold: float = 0.05
    """Detections need a probability of their class above this."""
    nms_threshold: float = 0.5
    """IoU above which a better detection of the same class suppresses another one."""
    detections_per_image: int = 100
    """Largest number of detections of an image."""
    box_fg_iou_thresh: float = 0.5
    """IoU from which a proposal is trained to be classified as its object."""
    box_bg_iou_thresh: float = 0.5
    """IoU below which a proposal is trained as background."""
    box_bg_iou_from: float = 0.0
    """IoU from which a proposal is trained as background, up to `box_bg_iou_thresh`; below it, it is not trained."""
    box_crowd_overlap: float = 0.7
    """Share of its area in a crowd region from which a proposal is not trained."""
    bbox_reg_weights: list[float] = field(default_factory=lambda: [10.0, 10.0, 5.0, 5.0])
    """Factors on the four deltas of a box (x, y, width, height) that the box head predicts."""
    box_smooth_l1_beta: float = 1 / 9
    """Error of a detection's box, in its deltas times `bbox_reg_weights`, from which the loss is linear: 1 / sigma^2 of
    other programs."""
    box_batch_size_per_image: int = 512
    """Proposals of an image that are trained."""
    box_positive_fraction: float = 0.25
    """Largest share of the trained proposals that may have an object."""


@dataclass
class FasterRcnnOptions(TwoStageOptions):
    """A Faster R-CNN with a feature pyramid on a timm backbone (Ren et al. 2015; Lin et al. 2017)."""

    architecture: str = "faster_rcnn"
    """Name of a detector of this toolkit, or `module:Class` of your own; this one is Faster R-CNN on a timm
    backbone."""
    backbone: str = "resnet50"
    """Name of a timm model that gives feature maps."""
    norm: Literal["batch", "frozen", "group", "sync"] = "batch"
    """What the batch norms of the backbone become: batch norms as they are, constants, group norms, or batch norms with
    the statistics of all processes."""
    freeze: Literal["paper", "norms", "none"] = "paper"
    """What of the backbone is not trained: its stem, first stage and batch norms (paper), its batch norms alone
    (norms), or nothing (none)."""
    strides: list[int] = field(default_factory=lambda: [4, 8, 16, 32])
    """Strides in pixels of the feature maps that boxes are pooled from, each twice the one before."""
    fpn_channels: int = 256
    """Channels of the feature pyramid."""
    head_norm: Literal["none", "batch", "group", "sync"] = "none"
    """Norm after the convolutions of the feature pyramid and of the box head."""
    anchor_sizes: list[list[float]] = field(default_factory=lambda: [[32.0], [64.0], [128.0], [256.0], [512.0]])
    """For each level, the lengths in pixels of its anchors, which are square roots of areas. One level more than
    strides is a coarser one for anchors only."""
    aspect_ratios: list[float] = field(default_factory=lambda: [0.5, 1.0, 2.0])
    """Height divided by width of the anchors."""
    rpn_convs: int = 1
    """Number of 3 x 3 convolutions in the head that makes proposals."""
    box_convs: int = 0
    """Number of 3 x 3 convolutions in the box head; without any it has a second linear layer instead."""
    representation_size: int = 1024
    """Width of the linear layers of the box head."""
    norm_eps: float = 1e-5
    """What is added to variances in the batch norms of the backbone where they are constants; 0 in Detectron and
    maskrcnn-benchmark."""
    stride_in_1x1: bool = False
    """Stages of a ResNet halve their maps in the 1 x 1 convolution of the first block, as Caffe2's do, instead of in
    the 3 x 3 one."""
    whole_pixels: bool = False
    """Boxes are pooled as maskrcnn-benchmark does, which takes the last pixel of a box for its end: one pixel less."""
    cell_anchors: list[list[list[float]]] = field(default_factory=list)
    """For each level, anchors around a position as x1, y1, x2, y2 in pixels; an empty list: they are made of
    `anchor_sizes` and `aspect_ratios`."""
    mean: list[float] | None = None
    """Mean of the red, green and blue values in [0, 1]; without a value, that which the backbone was trained with."""
    std: list[float] | None = None
    """Standard deviation of the red, green and blue values in [0, 1]; without a value, that which the backbone was
    trained with."""


@dataclass
class ResNet50Options(TwoStageOptions):
    """torchvision's `fasterrcnn_resnet50_fpn` (Ren et al. 2015; Lin et al. 2017), whose structure is fixed."""

    architecture: str = "fasterrcnn_resnet50_fpn"
    """Name of a detector of this toolkit, or `module:Class` of your own; this one is torchvision's."""
    pretrained_backbone: bool | str = False
    """torchvision's ImageNet weights for the ResNet-50 (downloaded once), or a file of such weights; not used with
    `pretrained`."""
    freeze: Literal["paper", "norms"] = "paper"
    """What of the backbone is not trained: its stem, first stage and batch norms (paper), or its batch norms alone
    (norms)."""
    norm_eps: float = 1e-5
    """What is added to variances in the batch norms, which are constants; torchvision's published detector has 0."""


@dataclass
class ResNet50V2Options(TwoStageOptions):
    """torchvision's `fasterrcnn_resnet50_fpn_v2` (Li et al. 2021), whose structure is fixed."""

    architecture: str = "fasterrcnn_resnet50_fpn_v2"
    """Name of a detector of this toolkit, or `module:Class` of your own; this one is torchvision's."""
    pretrained_backbone: bool | str = False
    """torchvision's ImageNet weights for the ResNet-50 (downloaded once), or a file of such weights; not used with
    `pretrained`."""
    freeze: Literal["paper", "none"] | None = None
    """What of the backbone is not trained: its stem and first stage (paper), or nothing (none). Without a value, paper
    if it starts from pretrained weights, else none."""
