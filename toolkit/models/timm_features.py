"""Feature maps of timm backbones at chosen strides, with the chosen normalisation layers."""

from collections.abc import Sequence

from timm.layers import GroupNormAct, convert_sync_batchnorm
from torch import Tensor, nn

from toolkit.base.errors import BadInput
from toolkit.models.backbones import feature_strides, timm_model, wake_frozen_norms
from toolkit.models.vit_pyramid import STRIDES as PYRAMID_STRIDES
from toolkit.models.vit_pyramid import VitPyramid, is_plain_vit
from toolkit.step.freezing import freeze_batch_norms

NORM_CHOICES = ("batch", "frozen", "group", "sync")


def timm_features(
    backbone: str, *, strides: Sequence[int], pretrained_backbone: bool | str = False, norm: str = "batch"
) -> tuple[nn.Module, list[int]]:
    """Build an extractor of feature maps: images (B, 3, H, W) to a list of maps (B, C_i, H / s_i, W / s_i).

    The images are normalised. Sides that a stride does not divide are rounded as the backbone does it. If a backbone
    offers several maps of a stride, the deepest one is taken; a plain vision transformer gets a `VitPyramid`. The
    extractor has timm's `feature_info`, and the parameters of the backbone have timm's names.

    Args:
        backbone: name of a timm model.
        strides: strides in pixels of the wanted maps, increasing.
        pretrained_backbone: True: timm's weights (downloaded once); a path: a file of them; False: timm's random ones.
        norm: replacement of the backbone's batch norms (other norms stay): "batch": none; "frozen": constants with the
            pretrained statistics, without pretrained weights the identity; "group": group norms with the same weights
            and biases (32 groups, fewer if the channels require it), for small batches from random weights;
            "sync": batch norms with statistics of all ranks, on GPUs only when there are several ranks.

    Returns:
        The extractor and the channels C_i of its maps.

    Raises:
        BadInput: timm does not have the backbone, or not with these strides; no weights available; unknown `norm`.
    """
    if norm not in NORM_CHOICES:
        raise BadInput(f"model.norm: {norm!r} is not one of {', '.join(NORM_CHOICES)}.")
    indices = _indices(backbone, strides)
    if is_plain_vit(backbone):
        features = VitPyramid(backbone, pretrained_backbone, strides)
    else:
        features = timm_model(backbone, pretrained_backbone, features_only=True, out_indices=indices)
    channels = list(features.feature_info.channels())
    if norm == "sync":
        features = convert_sync_batchnorm(features)
    elif norm == "group":
        features = group_norms(features)
    elif norm == "frozen":
        features = freeze_batch_norms(features)
        if not pretrained_backbone:
            wake_frozen_norms(features)
    channels_last = str(getattr(features, "output_fmt", "NCHW")).endswith("NHWC")
    return (_ChannelsFirst(features) if channels_last else features), channels


def offered_strides(backbone: str) -> list[int]:
    """Return the strides in pixels of the maps that `timm_features` can give. Raises BadInput as `feature_strides`."""
    return list(PYRAMID_STRIDES) if is_plain_vit(backbone) else feature_strides(backbone)


def leaves_stages(features: nn.Module) -> bool:
    """Return whether an extractor of timm may hold stages after its last map, which no loss depends on."""
    return features.feature_info.out_indices[-1] < len(features.feature_info.info) - 1


def group_norms(module: nn.Module) -> nn.Module:
    """Replace every 2-d batch norm in `module` by a group norm with the same weight and bias.

    timm's BatchNormAct2d keeps its activation. Returns `module`, or its replacement when it is a batch norm itself.
    """
    if isinstance(module, nn.BatchNorm2d):
        return _group_norm(module)
    for name, child in module.named_children():
        replacement = group_norms(child)
        if replacement is not child:
            setattr(module, name, replacement)
    return module


def number_of_groups(channels: int) -> int:
    """Return the groups of a group norm: 32 (Wu & He, ECCV 2018), or the next smaller divisor with 2 channels each."""
    return max((groups for groups in range(1, min(32, channels // 2) + 1) if channels % groups == 0), default=1)


class _ChannelsFirst(nn.Module):
    """A wrapper that converts maps (B, H, W, C), such as those of Swin, to (B, C, H, W)."""

    def __init__(self, features: nn.Module):
        super().__init__()
        self.features = features
        self.feature_info = features.feature_info

    def forward(self, pixels: Tensor) -> list[Tensor]:
        return [features.permute(0, 3, 1, 2).contiguous() for features in self.features(pixels)]


def _indices(backbone: str, strides: Sequence[int]) -> tuple[int, ...]:
    offered = offered_strides(backbone)
    missing = [stride for stride in strides if stride not in offered]
    if missing or not strides or list(strides) != sorted(set(strides)):
        raise BadInput(
            f"model.backbone: {backbone!r} has feature maps of strides {sorted(set(offered))}; wanted are increasing "
            f"strides {list(strides)}. Choose another backbone, or strides among those it has."
        )
    return tuple(len(offered) - 1 - offered[::-1].index(stride) for stride in strides)


def _group_norm(norm: nn.BatchNorm2d) -> nn.GroupNorm:
    groups = number_of_groups(norm.num_features)
    new = GroupNormAct(norm.num_features, groups, norm.eps, affine=norm.affine, apply_act=False)
    new.drop = getattr(norm, "drop", new.drop)
    new.act = getattr(norm, "act", new.act)
    new.load_state_dict(norm.state_dict(), strict=False)  # without the running statistics
    return new.train(norm.training)
