"""Construction of Faster R-CNNs from their settings: on any timm backbone, and torchvision's own ResNet-50 variants."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import fields

import torch
from timm.layers.norm_act import FrozenBatchNormAct2d
from timm.models.resnet import Bottleneck
from torch import Tensor, nn
from torchvision.models import ResNet50_Weights
from torchvision.models.detection import faster_rcnn, fasterrcnn_resnet50_fpn_v2
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import FeaturePyramidNetwork, FrozenBatchNorm2d, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from toolkit.base.box_ops import moved_ends
from toolkit.base.errors import BadInput
from toolkit.detectors.faster_rcnn.mask_branch import add_mask_branch
from toolkit.detectors.faster_rcnn.model import FasterRCNN
from toolkit.detectors.faster_rcnn.options import FasterRcnnOptions, ResNet50Options, ResNet50V2Options, TwoStageOptions
from toolkit.models import DetectorOptions
from toolkit.models.backbones import (
    FREEZE_CHOICES,
    freeze_backbone,
    image_statistics,
    leaves_stages,
    number_of_groups,
    timm_features,
    wake_frozen_norms,
)
from toolkit.models.weights.backbone_file import load_matching, read_backbone_file

HEAD_NORMS = {
    "none": None,
    "batch": nn.BatchNorm2d,
    "sync": nn.SyncBatchNorm,
    "group": lambda channels: nn.GroupNorm(number_of_groups(channels), channels),
}
# Settings whose names all detectors share, and torchvision's names of them.
TORCHVISION_NAMES = {
    "score_threshold": "box_score_thresh",
    "nms_threshold": "box_nms_thresh",
    "detections_per_image": "box_detections_per_img",
}
# Settings that torchvision has no keyword for; `FasterRCNN` takes them itself.
OWN_SETTINGS = set(
    "rpn_crowd_overlap rpn_min_size rpn_smooth_l1_beta box_bg_iou_from box_crowd_overlap box_smooth_l1_beta".split()
) | {"masks"}


class FeaturePyramid(nn.Module):
    """A backbone (`body`, which returns a list of feature maps) and a feature pyramid (`fpn`) on top, named as in
    torchvision.

    It converts normalised images (B, 3, H, W) to an OrderedDict of maps (B, `out_channels`, H / stride, W / stride)
    named "0", "1", ..., finest first.

    Args:
        in_channels: number of channels of each map of `body`.
        extra_level: adds a last map, "pool", of every second pixel of the coarsest one.
        norm: normalisation layers of the pyramid, a key of `HEAD_NORMS`.
    """

    def __init__(
        self,
        body: nn.Module,
        in_channels: Sequence[int],
        out_channels: int,
        extra_level: bool,
        norm: str = "none",
    ):
        super().__init__()
        self.body = body
        self.out_channels = out_channels
        extra = LastLevelMaxPool() if extra_level else None
        self.fpn = FeaturePyramidNetwork(list(in_channels), out_channels, extra, HEAD_NORMS[norm])

    def forward(self, pixels: Tensor) -> OrderedDict[str, Tensor]:
        maps = OrderedDict()
        for i, features in enumerate(self.body(pixels)):
            maps[str(i)] = features
        return self.fpn(maps)


class GivenAnchors(AnchorGenerator):
    """An anchor generator whose anchors are given as boxes instead of sizes and aspect ratios.

    cells: for each feature level, the boxes x1, y1, x2, y2 in pixels relative to a position.
    """

    def __init__(self, cells: Sequence[Sequence[Sequence[float]]]):
        # Sizes and ratios that make as many anchors at each level; their numbers are not used.
        sizes = tuple((1.0,) * len(level) for level in cells)
        ratios = ((1.0,),) * len(cells)
        super().__init__(sizes, ratios)
        self.cell_anchors = [torch.tensor(level) for level in cells]


class WholePixelPool(nn.Module):
    """RoI pooling that gives maskrcnn-benchmark's features, although boxes here end behind their last pixel, not at it.

    Boxes are shortened by one pixel before pooling, but their pyramid level is chosen by their area before that. The
    `map_levels` of the `pool` given is replaced.
    """

    def __init__(self, pool: MultiScaleRoIAlign):
        super().__init__()
        self.pool = pool
        mapper = pool.map_levels
        pool.map_levels = lambda boxes: mapper([moved_ends(image_boxes, 1) for image_boxes in boxes])

    def forward(
        self,
        maps: dict[str, Tensor],
        boxes: list[Tensor],
        image_shapes: list[tuple[int, int]],
        *boxes_on_host,
    ) -> Tensor:
        """See `LevelPool.forward`."""
        copies = [boxes, *(copy for copy in boxes_on_host if copy is not None)]  # on the device, and perhaps on the CPU
        ends = [[moved_ends(of_image, -1) for of_image in copy] for copy in copies]
        return self.pool(maps, ends[0], image_shapes, *ends[1:])


class FasterRCNNOnTimm(FasterRCNN):
    """A Faster R-CNN with a feature pyramid on a timm backbone; by default torchvision's `fasterrcnn_resnet50_fpn`.

    Settings: see `FasterRcnnOptions`; unless `freeze` is none, the batch norms of the backbone become constants.

    Raises:
        BadInput: a setting has an unknown value, settings do not fit together, or `timm_features` raises it.
    """

    Options = FasterRcnnOptions

    def __init__(self, class_names: Sequence[str], options: FasterRcnnOptions):
        o = options
        _check_options(o)
        norm = "frozen" if o.freeze != "none" else o.norm
        body, channels = timm_features(
            o.backbone,
            strides=o.strides,
            pretrained_backbone=o.pretrained_backbone,
            norm=norm,
        )
        if o.freeze == "paper":
            freeze_backbone(body, o.backbone, o.freeze, o.pretrained_backbone)
        if o.stride_in_1x1:
            _stride_in_1x1(body, o.backbone)
        _set_norm_eps(body, o.norm_eps)
        pyramid = FeaturePyramid(
            body,
            channels,
            o.fpn_channels,
            extra_level=len(o.anchor_sizes) > len(o.strides),
            norm=o.head_norm,
        )
        anchors = AnchorGenerator(
            tuple(map(tuple, o.anchor_sizes)),
            (tuple(o.aspect_ratios),) * len(o.anchor_sizes),
        )
        if o.cell_anchors:
            anchors = GivenAnchors(o.cell_anchors)
        per_position = anchors.num_anchors_per_location()[0]
        levels = [str(i) for i in range(len(o.strides))]
        own_mean, own_std = image_statistics(o.backbone)
        model = faster_rcnn.FasterRCNN(
            pyramid,
            box_head=_box_head(o),
            rpn_anchor_generator=anchors,
            rpn_head=RPNHead(o.fpn_channels, per_position, o.rpn_convs),
            box_roi_pool=MultiScaleRoIAlign(levels, output_size=7, sampling_ratio=2),
            box_predictor=FastRCNNPredictor(o.representation_size, 1 + len(class_names)),
            image_mean=o.mean or own_mean,
            image_std=o.std or own_std,
            **torchvision_settings(o),
        )
        if o.masks:
            heads = (len(class_names) + 1, o.fpn_channels, o.mask_convs, o.mask_channels)
            add_mask_branch(model.roi_heads, *heads, HEAD_NORMS[o.head_norm])
        super().__init__(model, o.strides, o)
        self.leaves_unused = leaves_stages(body)
        if o.whole_pixels:
            self.roi_heads.box_roi_pool = WholePixelPool(self.roi_heads.box_roi_pool)

    def resolved_options(self) -> dict:
        return {
            **super().resolved_options(),
            "mean": list(self.mean),
            "std": list(self.std),
        }


class FasterRCNNResNet50(FasterRCNN):
    """torchvision's `fasterrcnn_resnet50_fpn`, or with masks its `maskrcnn_resnet50_fpn`: the state dict has
    torchvision's names, and equal weights give equal boxes and masks.

    Settings: see `ResNet50Options`.

    Raises:
        BadInput: `freeze` has an unknown value, or the weights of the backbone cannot be loaded.
    """

    Options = ResNet50Options

    def __init__(self, class_names: Sequence[str], options: ResNet50Options):
        if options.freeze not in ("paper", "norms"):
            raise BadInput(f"model.freeze: {options.freeze!r} is not one of paper, norms for fasterrcnn_resnet50_fpn.")
        layers = 3 if options.freeze == "paper" else 5
        backbone = resnet_fpn_backbone(
            backbone_name="resnet50",
            weights=None,
            norm_layer=FrozenBatchNorm2d,
            trainable_layers=layers,
        )
        if options.pretrained_backbone:
            _take_resnet50(
                backbone.body,
                options.pretrained_backbone,
                ResNet50_Weights.IMAGENET1K_V1,
            )
        else:
            wake_frozen_norms(backbone.body)
        _set_norm_eps(backbone.body, options.norm_eps)
        model = faster_rcnn.FasterRCNN(
            backbone,
            1 + len(class_names),
            **torchvision_settings(options),
        )
        if options.masks:
            add_mask_branch(model.roi_heads, 1 + len(class_names), backbone.out_channels)
        super().__init__(model, (4, 8, 16, 32), options)


class FasterRCNNResNet50V2(FasterRCNN):
    """torchvision's `fasterrcnn_resnet50_fpn_v2` (Li et al. 2021), or with masks its `maskrcnn_resnet50_fpn_v2`: the
    state dict has torchvision's names.

    Settings: see `ResNet50V2Options`.

    Raises:
        BadInput: `freeze` has an unknown value, or the weights of the backbone cannot be loaded.
    """

    Options = ResNet50V2Options

    def __init__(self, class_names: Sequence[str], options: ResNet50V2Options):
        weights = options.pretrained_backbone
        freeze = options.freeze
        if freeze not in ("paper", "none", None):
            raise BadInput(f"model.freeze: {freeze!r} is not one of paper, none for fasterrcnn_resnet50_fpn_v2.")
        freeze = freeze or ("paper" if weights else "none")
        model = fasterrcnn_resnet50_fpn_v2(
            weights=None,
            weights_backbone=None,
            num_classes=1 + len(class_names),
            **torchvision_settings(options),
        )
        body = model.backbone.body
        if weights:
            _take_resnet50(body, weights, ResNet50_Weights.DEFAULT)
        if freeze == "paper":
            for module in (body.conv1, body.bn1, body.layer1):
                module.requires_grad_(False)
        if options.masks:
            classes = 1 + len(class_names)
            add_mask_branch(model.roi_heads, classes, model.backbone.out_channels, norm=nn.BatchNorm2d)
        super().__init__(model, (4, 8, 16, 32), options)
        self._freeze = freeze

    def resolved_options(self) -> dict:
        return super().resolved_options() | {"freeze": self._freeze}


def torchvision_settings(options: TwoStageOptions) -> dict:
    """Return the settings of the two stages as keyword arguments of torchvision's `FasterRCNN`, without those that
    torchvision does not have (`OWN_SETTINGS`).

    Raises BadInput for settings that do not fit together.
    """
    _check_together(options)
    names = {field.name for field in fields(TwoStageOptions)}
    names -= {field.name for field in fields(DetectorOptions)}
    names -= OWN_SETTINGS
    settings = {}
    for name in sorted(names):
        keyword = TORCHVISION_NAMES.get(name, name)
        settings[keyword] = getattr(options, name)
    return settings


def _check_together(options: TwoStageOptions) -> None:
    problems = []
    if len(options.bbox_reg_weights) != 4:
        expected = "expected four numbers, for x, y, width and height"
        problems.append(f"model.bbox_reg_weights is {options.bbox_reg_weights}; {expected}")
    for stage in ("rpn", "box"):
        positive = getattr(options, f"{stage}_fg_iou_thresh")
        negative = getattr(options, f"{stage}_bg_iou_thresh")
        if positive < negative:
            names = f"model.{stage}_fg_iou_thresh is {positive} and model.{stage}_bg_iou_thresh {negative}"
            problems.append(f"{names}; expected the first to be at least the second")
    if problems:
        raise BadInput(problems)


def _stride_in_1x1(body: nn.Module, name: str) -> None:
    bottlenecks = [module for module in body.modules() if isinstance(module, Bottleneck)]
    blocks = [block for block in bottlenecks if block.conv2.stride != (1, 1)]
    for block in blocks:
        block.conv1.stride = block.conv2.stride
        block.conv2.stride = (1, 1)
    if not blocks:
        missing = "no blocks with a strided 3 x 3 convolution between two 1 x 1 ones"
        raise BadInput(f"model.stride_in_1x1: {name!r} has {missing}; leave it out, or use a resnet50 or deeper")


def _set_norm_eps(body: nn.Module, eps: float) -> None:
    for module in body.modules():
        if isinstance(module, FrozenBatchNorm2d | FrozenBatchNormAct2d):
            module.eps = eps


def _box_head(o: FasterRcnnOptions) -> nn.Module:
    if not o.box_convs:
        return TwoMLPHead(o.fpn_channels * 7 * 7, o.representation_size)
    size = (o.fpn_channels, 7, 7)
    convs = [o.fpn_channels] * o.box_convs
    return FastRCNNConvFCHead(size, convs, [o.representation_size], HEAD_NORMS[o.head_norm])


def _take_resnet50(body: nn.Module, source: bool | str, published: ResNet50_Weights) -> None:
    wanted = body.state_dict(keep_vars=True)
    if isinstance(source, str):
        weights = read_backbone_file(source)
        offered = {}
        for name, tensor in weights.items():
            if not name.startswith("fc.") and not name.endswith("num_batches_tracked"):
                offered[name] = tensor
        load_matching(wanted, offered, "torchvision's resnet50", source)
        return
    try:
        weights = published.get_state_dict(check_hash=True, progress=False)
    except (OSError, RuntimeError) as error:
        remedy = "give a file, or false."
        raise BadInput(f"model.pretrained_backbone: no weights of ResNet-50 ({error}); {remedy}") from error
    body.load_state_dict({name: tensor for name, tensor in weights.items() if name in wanted})


def _check_options(o: FasterRcnnOptions) -> None:
    strides = list(o.strides)
    sizes = [list(lengths) for lengths in o.anchor_sizes]
    problems = []
    if o.freeze not in FREEZE_CHOICES:
        problems.append(f"model.freeze: {o.freeze!r} is not one of {', '.join(FREEZE_CHOICES)}.")
    elif o.freeze != "none" and o.norm not in ("batch", "frozen"):
        problems.append(
            f"model.freeze: {o.freeze} makes the batch norms constants; with norm {o.norm} use freeze none."
        )
    if o.head_norm not in HEAD_NORMS:
        problems.append(f"model.head_norm: {o.head_norm!r} is not one of {', '.join(HEAD_NORMS)}.")
    doubled = [stride * 2 for stride in strides[:-1]]
    if not strides or strides[1:] != doubled:
        problems.append(f"model.strides: {strides}; expected strides that double, such as 4, 8, 16, 32.")
    different_lengths = {len(lengths) for lengths in sizes}
    if len(sizes) - len(strides) not in (0, 1) or len(different_lengths) != 1:
        problems.append(
            f"model.anchor_sizes: {sizes}; expected a list for each of the {len(strides)} strides, or one more, all of "
            "the same length."
        )
    if not o.aspect_ratios:
        problems.append("model.aspect_ratios: []; expected at least one.")
    cells = o.cell_anchors
    boxes_are_whole = all(len(box) == 4 for level in cells for box in level)
    if cells and not (boxes_are_whole and len(cells) == len(sizes) and len({len(level) for level in cells}) == 1):
        expected = f"a list for each of {len(sizes)} levels, all with the same number of [x1, y1, x2, y2]"
        problems.append(f"model.cell_anchors: {cells}; expected {expected}.")
    if o.masks and o.whole_pixels:
        problems.append("model.masks: masks are not pooled as maskrcnn-benchmark does; leave out model.whole_pixels.")
    if problems:
        raise BadInput(problems)
