"""Faster R-CNNs by their settings: on any timm backbone, and torchvision's own improved ResNet-50."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import fields
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
from toolkit.models.faster_rcnn.options import FasterRcnnOptions, ResNet50V2Options, TwoStageOptions
from toolkit.models.options import DetectorOptions
from toolkit.models.timm_features import number_of_groups, timm_features

HEAD_NORMS = {
    "none": None,
    "batch": nn.BatchNorm2d,
    "sync": nn.SyncBatchNorm,
    "group": lambda channels: nn.GroupNorm(number_of_groups(channels), channels),
}
# Settings that all detectors call alike, under torchvision's names.
TORCHVISION_NAMES = {
    "score_threshold": "box_score_thresh",
    "nms_threshold": "box_nms_thresh",
    "detections_per_image": "box_detections_per_img",
}


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


class FasterRCNNOnTimm(FasterRCNN):
    """A Faster R-CNN with a feature pyramid on a timm backbone; by default torchvision's `fasterrcnn_resnet50_fpn`.

    Settings: see `FasterRcnnOptions`; unless `freeze` is none, the batch norms of the backbone become constants.

    Raises:
        BadInput: settings that do not exist or do not fit together; what `timm_features` raises.
    """

    Options = FasterRcnnOptions

    def __init__(self, class_names: Sequence[str], options: FasterRcnnOptions):
        o = options
        _check(o)
        norm = "frozen" if o.freeze != "none" else o.norm
        body, channels = timm_features(
            o.backbone, strides=o.strides, pretrained_backbone=o.pretrained_backbone, norm=norm
        )
        if o.freeze == "paper":
            freeze_backbone(body, o.backbone, o.freeze, o.pretrained_backbone)
        pyramid = FeaturePyramid(body, channels, o.fpn_channels, len(o.anchor_sizes) > len(o.strides), o.head_norm)
        anchors = AnchorGenerator(tuple(map(tuple, o.anchor_sizes)), (tuple(o.aspect_ratios),) * len(o.anchor_sizes))
        levels = [str(i) for i in range(len(o.strides))]
        model = faster_rcnn.FasterRCNN(
            pyramid,
            box_head=_box_head(o),
            rpn_anchor_generator=anchors,
            rpn_head=RPNHead(o.fpn_channels, anchors.num_anchors_per_location()[0], o.rpn_convs),
            box_roi_pool=MultiScaleRoIAlign(levels, output_size=7, sampling_ratio=2),
            box_predictor=FastRCNNPredictor(o.representation_size, 1 + len(class_names)),
            **torchvision_settings(o),
        )
        own_mean, own_std = image_statistics(o.backbone)
        statistics = o.mean or own_mean, o.std or own_std
        super().__init__(model.backbone, model.rpn, model.roi_heads, o.strides, *statistics)

    def resolved_options(self) -> dict:
        return super().resolved_options() | {"mean": list(self.mean), "std": list(self.std)}


class FasterRCNNResNet50V2(FasterRCNN):
    """torchvision's `fasterrcnn_resnet50_fpn_v2` (Li et al. 2021): its state dict is torchvision's, name by name.

    Settings: see `ResNet50V2Options`.

    Raises:
        BadInput: settings that do not exist, weights that cannot be had.
    """

    Options = ResNet50V2Options

    def __init__(self, class_names: Sequence[str], options: ResNet50V2Options):
        weights, freeze = options.pretrained_backbone, options.freeze
        if freeze not in ("paper", "none", None):
            raise BadInput(f"model.freeze: {freeze!r} is not one of paper, none for fasterrcnn_resnet50_fpn_v2.")
        freeze = freeze or ("paper" if weights else "none")
        model = fasterrcnn_resnet50_fpn_v2(
            weights=None, weights_backbone=None, num_classes=1 + len(class_names), **torchvision_settings(options)
        )
        body = model.backbone.body
        if weights:
            body.load_state_dict({k: v for k, v in _resnet50_weights(weights).items() if k[:3] != "fc."})
        if freeze == "paper":
            for module in (body.conv1, body.bn1, body.layer1):
                module.requires_grad_(False)
        statistics = model.transform.image_mean, model.transform.image_std
        super().__init__(model.backbone, model.rpn, model.roi_heads, (4, 8, 16, 32), *statistics)
        self._freeze = freeze

    def resolved_options(self) -> dict:
        return super().resolved_options() | {"freeze": self._freeze}


def torchvision_settings(options: TwoStageOptions) -> dict:
    """The settings of the two stages as keywords of torchvision's `FasterRCNN`."""
    own = {each.name for each in fields(TwoStageOptions)} - {each.name for each in fields(DetectorOptions)}
    return {TORCHVISION_NAMES.get(name, name): getattr(options, name) for name in sorted(own)}


def _box_head(o: FasterRcnnOptions) -> nn.Module:
    if not o.box_convs:
        return TwoMLPHead(o.fpn_channels * 7 * 7, o.representation_size)
    size, convs = (o.fpn_channels, 7, 7), [o.fpn_channels] * o.box_convs
    return FastRCNNConvFCHead(size, convs, [o.representation_size], HEAD_NORMS[o.head_norm])


def _resnet50_weights(source: bool | str) -> dict[str, Tensor]:
    try:
        if isinstance(source, str):
            return torch.load(Path(source), map_location="cpu", weights_only=True)
        return ResNet50_Weights.DEFAULT.get_state_dict(check_hash=True, progress=False)
    except (OSError, RuntimeError) as error:
        message = f"model.pretrained_backbone: no weights of ResNet-50 ({error}); give a file, or false."
        raise BadInput(message) from error


def _check(o: FasterRcnnOptions) -> None:
    strides, sizes, problems = list(o.strides), [list(lengths) for lengths in o.anchor_sizes], []
    if o.freeze not in FREEZE_CHOICES:
        problems.append(f"model.freeze: {o.freeze!r} is not one of {', '.join(FREEZE_CHOICES)}.")
    elif o.freeze != "none" and o.norm not in ("batch", "frozen"):
        problems.append(
            f"model.freeze: {o.freeze} makes the batch norms constants; with norm {o.norm} use freeze none."
        )
    if o.head_norm not in HEAD_NORMS:
        problems.append(f"model.head_norm: {o.head_norm!r} is not one of {', '.join(HEAD_NORMS)}.")
    if not strides or any(fine * 2 != coarse for fine, coarse in zip(strides, strides[1:], strict=False)):
        problems.append(f"model.strides: {strides}; expected strides that double, such as 4, 8, 16, 32.")
    if len(sizes) - len(strides) not in (0, 1) or len({len(lengths) for lengths in sizes}) != 1:
        problems.append(
            f"model.anchor_sizes: {sizes}; expected a list for each of the {len(strides)} strides, or one more, all of "
            "the same length."
        )
    if problems:
        raise BadInput(problems)
