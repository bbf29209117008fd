"""Faster R-CNNs by their settings: on any timm backbone, and torchvision's own improved ResNet-50."""

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.models import ResNet50_Weights
from torchvision.models.detection import faster_rcnn, fasterrcnn_resnet50_fpn_v2
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from toolkit.errors import BadInput
from toolkit.models.backbones import FREEZE_CHOICES, freeze_backbone, image_statistics
from toolkit.models.faster_rcnn.model import FasterRCNN
from toolkit.models.timm_features import number_of_groups, timm_features

HEAD_NORMS = {
    "none": None,
    "batch": nn.BatchNorm2d,
    "sync": nn.SyncBatchNorm,
    "group": lambda channels: nn.GroupNorm(number_of_groups(channels), channels),
}
# Of torchvision's FasterRCNN, under its names and with its defaults.
SAMPLING_OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(faster_rcnn.FasterRCNN).parameters.items()
    if name.startswith(("rpn_", "box_")) and parameter.default is not None
)


class FeaturePyramid(nn.Module):
    """A backbone (`body`, giving a list of maps) and the pyramid (`fpn`) on top of it, named as in torchvision.

    Normalised images (B, 3, H, W) to an OrderedDict of maps (B, `out_channels`, H / s, W / s) "0", "1", ..., finest
    first, and with `extra_level` "pool", the last one at every second pixel.
    """

    def __init__(
        self, body: nn.Module, in_channels: Sequence[int], out_channels: int, extra_level: bool, norm: str = "none"
    ):
        super().__init__()
        self.body, self.out_channels = body, out_channels
        extra = LastLevelMaxPool() if extra_level else None
        self.fpn = FeaturePyramidNetwork(list(in_channels), out_channels, extra, HEAD_NORMS[norm])

    def forward(self, pixels: Tensor) -> OrderedDict[str, Tensor]:
        return self.fpn(OrderedDict((str(i), features) for i, features in enumerate(self.body(pixels))))


def build_faster_rcnn(
    class_names: Sequence[str],
    *,
    backbone: str = "resnet50",
    pretrained_backbone: bool | str = False,
    norm: str = "batch",
    freeze: str = "paper",
    strides: Sequence[int] = (4, 8, 16, 32),
    fpn_channels: int = 256,
    head_norm: str = "none",
    anchor_sizes: Sequence[Sequence[float]] = ((32,), (64,), (128,), (256,), (512,)),
    aspect_ratios: Sequence[float] = (0.5, 1.0, 2.0),
    rpn_convs: int = 1,
    box_convs: int = 0,
    representation_size: int = 1024,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **options,
) -> FasterRCNN:
    """A Faster R-CNN with a feature pyramid on a timm backbone; torchvision's `fasterrcnn_resnet50_fpn` by default.

    Args:
        backbone, pretrained_backbone, norm: see `timm_features`.
        freeze: "paper" (stem, first stage and batch norms), "norms" (batch norms), "none". The first two turn the
            backbone's batch norms into constants.
        strides: pixels, of the maps that boxes are pooled from, each twice the one before.
        fpn_channels, head_norm: channels of the pyramid; norm of its convolutions and of the box head's: "none",
            "batch", "group", "sync".
        anchor_sizes: per level the lengths in pixels, the square root of the area, of its anchors; one level more than
            strides adds a coarser one for anchors only.
        aspect_ratios: height / width of the anchors.
        rpn_convs, box_convs: 3 x 3 convolutions of the heads. representation_size: width of the box head.
        mean, std: of RGB values in [0, 1]; None: those the backbone was trained with.
        options: `SAMPLING_OPTIONS`, torchvision's.

    Raises:
        BadInput: settings that do not exist or do not fit together; what `timm_features` raises.
    """
    _check(freeze, norm, head_norm, strides, anchor_sizes)
    _check_options("faster_rcnn", options)
    norm = "frozen" if freeze != "none" else norm
    body, channels = timm_features(backbone, strides=strides, pretrained_backbone=pretrained_backbone, norm=norm)
    if freeze == "paper":
        freeze_backbone(body, backbone, freeze, pretrained_backbone)
    pyramid = FeaturePyramid(body, channels, fpn_channels, len(anchor_sizes) > len(strides), head_norm)
    anchors = AnchorGenerator(tuple(map(tuple, anchor_sizes)), (tuple(aspect_ratios),) * len(anchor_sizes))
    if box_convs:
        size, convs = (fpn_channels, 7, 7), [fpn_channels] * box_convs
        box_head = FastRCNNConvFCHead(size, convs, [representation_size], HEAD_NORMS[head_norm])
    else:
        box_head = TwoMLPHead(fpn_channels * 7 * 7, representation_size)
    model = faster_rcnn.FasterRCNN(
        pyramid,
        rpn_anchor_generator=anchors,
        rpn_head=RPNHead(fpn_channels, anchors.num_anchors_per_location()[0], rpn_convs),
        box_roi_pool=MultiScaleRoIAlign([str(i) for i in range(len(strides))], output_size=7, sampling_ratio=2),
        box_head=box_head,
        box_predictor=FastRCNNPredictor(representation_size, 1 + len(class_names)),
        **options,
    )
    own_mean, own_std = image_statistics(backbone)
    return FasterRCNN(model.backbone, model.rpn, model.roi_heads, strides, mean or own_mean, std or own_std)


def build_resnet50_fpn_v2(
    class_names: Sequence[str], *, pretrained_backbone: bool | str = False, freeze: str | None = None, **options
) -> FasterRCNN:
    """torchvision's `fasterrcnn_resnet50_fpn_v2` (Li et al. 2021): its state dict is torchvision's, name by name.

    Args:
        pretrained_backbone: True: torchvision's ImageNet weights (downloaded once); a path: a file of a torchvision
            ResNet-50; False: random ones.
        freeze: "paper" (stem and first stage), "none"; None: torchvision's rule, "paper" for pretrained weights.
        options: `SAMPLING_OPTIONS`, torchvision's.

    Raises:
        BadInput: settings that do not exist, weights that cannot be had.
    """
    _check_options("fasterrcnn_resnet50_fpn_v2", options)
    if freeze not in ("paper", "none", None):
        raise BadInput(f"model.freeze: {freeze!r} is not one of paper, none for fasterrcnn_resnet50_fpn_v2.")
    freeze = freeze or ("paper" if pretrained_backbone else "none")
    classes = 1 + len(class_names)
    model = fasterrcnn_resnet50_fpn_v2(weights=None, weights_backbone=None, num_classes=classes, **options)
    body = model.backbone.body
    if pretrained_backbone:
        body.load_state_dict({k: v for k, v in _resnet50_weights(pretrained_backbone).items() if k[:3] != "fc."})
    if freeze == "paper":
        for module in (body.conv1, body.bn1, body.layer1):
            module.requires_grad_(False)
    mean, std = model.transform.image_mean, model.transform.image_std
    return FasterRCNN(model.backbone, model.rpn, model.roi_heads, (4, 8, 16, 32), mean, std)


def _resnet50_weights(source: bool | str) -> dict[str, Tensor]:
    try:
        if isinstance(source, str):
            return torch.load(Path(source), map_location="cpu", weights_only=True)
        return ResNet50_Weights.DEFAULT.get_state_dict(check_hash=True, progress=False)
    except (OSError, RuntimeError) as error:
        message = f"model.pretrained_backbone: no weights of ResNet-50 ({error}); give a file, or false."
        raise BadInput(message) from error


def _check(
    freeze: str, norm: str, head_norm: str, strides: Sequence[int], anchor_sizes: Sequence[Sequence[float]]
) -> None:
    problems = []
    if freeze not in FREEZE_CHOICES:
        problems.append(f"model.freeze: {freeze!r} is not one of {', '.join(FREEZE_CHOICES)}.")
    elif freeze != "none" and norm not in ("batch", "frozen"):
        problems.append(f"model.freeze: {freeze} makes the batch norms constants; with norm {norm} use freeze none.")
    if head_norm not in HEAD_NORMS:
        problems.append(f"model.head_norm: {head_norm!r} is not one of {', '.join(HEAD_NORMS)}.")
    if not strides or any(fine * 2 != coarse for fine, coarse in zip(strides, strides[1:], strict=False)):
        problems.append(f"model.strides: {list(strides)}; expected strides that double, such as 4, 8, 16, 32.")
    if len(anchor_sizes) - len(strides) not in (0, 1) or len({len(sizes) for sizes in anchor_sizes}) != 1:
        problems.append(
            f"model.anchor_sizes: {[list(sizes) for sizes in anchor_sizes]}; expected a list for each of the "
            f"{len(strides)} strides, or one more, all of the same length."
        )
    if problems:
        raise BadInput(problems)


def _check_options(architecture: str, options: dict) -> None:
    if foreign := [name for name in options if name not in SAMPLING_OPTIONS]:
        raise BadInput(
            f"{architecture} has no setting model.{', model.'.join(foreign)}; beside its own it has those of "
            f"torchvision: {', '.join(SAMPLING_OPTIONS)}."
        )
