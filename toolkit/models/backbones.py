"""timm backbones: their names and weights, feature maps at chosen strides, norm layers, and frozen parts.

A plain vision transformer (ViT, DeiT, SigLIP, EVA, DINOv2, DINOv3) gets the simple feature pyramid of Li et al.,
"Exploring plain vision transformer backbones for object detection", ECCV 2022, section 3. Its windowed attention is
left out, and so are the two convolutions at the end of each level, because every detector here has convolutions of its
own behind the maps.
"""

import difflib
from collections.abc import Sequence
from contextlib import nullcontext

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import GroupNormAct, LayerNorm2d, convert_sync_batchnorm
from timm.models import FeatureInfo
from timm.utils.model import unfreeze_batch_norm_2d
from torch import Tensor, nn

from toolkit.base.errors import BadInput
from toolkit.step.freezing import freeze_batch_norms

FREEZE_CHOICES = ("paper", "norms", "none")
NORM_CHOICES = ("batch", "frozen", "group", "sync")
PATCH_PX = 16  # pixels; weights of other patches are resampled, as FlexiViT (Beyer et al., CVPR 2023) does
PYRAMID_STRIDES = (4, 8, 16, 32)
_PLAIN_VIT = {  # keywords of such a model
    "features_only": True,
    "patch_size": PATCH_PX,
    "dynamic_img_size": True,
}


def feature_strides(name: str) -> list[int]:
    """Return the strides in pixels of the feature maps that timm backbone `name` offers, first to last.

    Raises:
        BadInput: timm does not have the model (similar names are listed), or it gives no feature maps.
    """
    if not timm.is_model(name):
        similar = difflib.get_close_matches(name, timm.list_models(), n=5, cutoff=0.5)
        hint = f"similar names: {', '.join(similar)}" if similar else "`timm.list_models()` lists them all"
        raise BadInput(f"model.backbone: timm has no backbone {name!r}; {hint}.")
    try:
        with torch.device("meta"):  # only the shapes are needed
            model = timm.create_model(name, features_only=True)
        return list(model.feature_info.reduction())
    except (RuntimeError, AttributeError, AssertionError) as error:
        raise BadInput(f"model.backbone: {name!r} gives no feature maps ({error}); choose another one.") from error


def image_statistics(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation of the RGB values in [0, 1] that backbone `name` was trained with."""
    cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if cfg is None:
        return IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    return tuple(cfg.mean), tuple(cfg.std)


def timm_model(name: str, pretrained: bool | str, **options) -> nn.Module:
    """Create a timm model with `timm.create_model`; its errors are raised as BadInput.

    Args:
        pretrained: True: timm's pretrained weights (downloaded once); a path: a local file of such weights; False:
            timm's random ones.
        options: more keywords of `timm.create_model`.

    Raises:
        BadInput: the weights cannot be fetched; those of a file, see `timm_model_from_file`.
    """
    # Both are imported where they are needed: most runs start from random weights, or from those of a whole detector.
    if isinstance(pretrained, str):
        from toolkit.models.weights.backbone_file import timm_model_from_file

        return timm_model_from_file(name, pretrained, **options)
    fetching = nullcontext()
    if pretrained:
        from toolkit.models.weights.pretrained import cached_when_offline

        fetching = cached_when_offline()
    try:
        with fetching:
            return timm.create_model(name, pretrained=pretrained, **options)
    except (OSError, RuntimeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise BadInput(
            f"model.pretrained_backbone: no pretrained weights for {name!r} ({first_line}); connect to the network "
            "once, set it to a file of weights, or to false to start from random ones."
        ) from error


def timm_features(
    backbone: str,
    *,
    strides: Sequence[int],
    pretrained_backbone: bool | str = False,
    norm: str = "batch",
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
        features = replace_batch_norms(features)
    elif norm == "frozen":
        features = freeze_batch_norms(features)
        if not pretrained_backbone:
            wake_frozen_norms(features)
    format_ = str(getattr(features, "output_fmt", "NCHW"))
    if format_.endswith("NHWC"):
        features = _ChannelsFirst(features)
    return features, channels


def offered_strides(backbone: str) -> list[int]:
    """Return the strides in pixels of the maps that `timm_features` can give. Raises BadInput as `feature_strides`."""
    if is_plain_vit(backbone):
        return list(PYRAMID_STRIDES)
    return feature_strides(backbone)


def leaves_stages(features: nn.Module) -> bool:
    """Return whether an extractor of timm may hold stages after its last map, which no loss depends on."""
    return features.feature_info.out_indices[-1] < len(features.feature_info.info) - 1


def replace_batch_norms(module: nn.Module) -> nn.Module:
    """Replace every 2-d batch norm in `module` by a group norm with the same weight and bias.

    timm's BatchNormAct2d keeps its activation. Returns `module`, or its replacement when it is a batch norm itself.
    """
    if isinstance(module, nn.BatchNorm2d):
        return _group_norm(module)
    for name, child in module.named_children():
        replacement = replace_batch_norms(child)
        if replacement is not child:
            setattr(module, name, replacement)
    return module


def number_of_groups(channels: int) -> int:
    """Return the groups of a group norm: 32 (Wu & He, ECCV 2018), or the next smaller divisor with 2 channels each."""
    most = min(32, channels // 2)
    divisors = [groups for groups in range(1, most + 1) if channels % groups == 0]
    return max(divisors, default=1)


def _group_norm(norm: nn.BatchNorm2d) -> nn.GroupNorm:
    groups = number_of_groups(norm.num_features)
    new = GroupNormAct(norm.num_features, groups, norm.eps, affine=norm.affine, apply_act=False)
    new.drop = getattr(norm, "drop", new.drop)
    new.act = getattr(norm, "act", new.act)
    new.load_state_dict(norm.state_dict(), strict=False)  # without the running statistics
    return new.train(norm.training)


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
    deepest = {stride: index for index, stride in enumerate(offered)}  # the last map of each stride
    return tuple(deepest[stride] for stride in strides)


def is_plain_vit(name: str) -> bool:
    """Return whether timm's model `name` is a transformer of patches that accepts images of any size."""
    if not timm.is_model(name):
        return False
    try:
        with torch.device("meta"):  # only the shapes are needed
            model = timm.create_model(name, **_PLAIN_VIT)
        strides = model.feature_info.reduction()
    except (TypeError, RuntimeError, AttributeError, AssertionError):  # a model without these keywords, or without maps
        return False
    return set(strides) == {PATCH_PX}


class VitPyramid(nn.Module):
    """A feature pyramid: normalised images (B, 3, H, W) to maps (B, C_i, H / s_i, W / s_i); 16 divides H and W.

    Args:
        name: a timm model for which `is_plain_vit` holds.
        pretrained_backbone: as in `timm_model`.
        strides: strides in pixels of the maps, among 4, 8, 16 and 32, increasing. Widths are a quarter, half, all and
            all of the transformer's.

    Raises:
        BadInput: as `timm_model`.
    """

    def __init__(self, name: str, pretrained_backbone: bool | str, strides: Sequence[int]):
        super().__init__()
        self.vit = timm_model(name, pretrained_backbone, out_indices=(-1,), **_PLAIN_VIT)
        width = self.vit.feature_info.channels()[-1]
        self.norm = LayerNorm2d(width)
        self.scales = nn.ModuleList(_resampling(width, stride) for stride in strides)
        widths = {4: width // 4, 8: width // 2}
        maps = []
        for i, stride in enumerate(strides):
            of_map = {
                "num_chs": widths.get(stride, width),
                "reduction": stride,
                "module": f"scales.{i}",
            }
            maps.append(of_map)
        self.feature_info = FeatureInfo(maps, tuple(range(len(maps))))

    def forward(self, pixels: Tensor) -> list[Tensor]:
        features = self.norm(self.vit(pixels)[-1])
        return [scale(features) for scale in self.scales]


def _resampling(width: int, stride: int) -> nn.Module:
    def twice(wide: int) -> nn.Module:
        return nn.ConvTranspose2d(wide, wide // 2, kernel_size=2, stride=2)

    if stride == 4:
        return nn.Sequential(twice(width), LayerNorm2d(width // 2), nn.GELU(), twice(width // 2))
    by_stride = {
        8: twice(width),
        16: nn.Identity(),
        32: nn.MaxPool2d(2),
    }
    return by_stride[stride]


def wake_frozen_norms(backbone: nn.Module) -> None:
    """Set frozen norms of weight 0 to 1; timm initialises the last norm of a residual branch with 0."""
    for module in backbone.modules():
        if "weight" in module._buffers and not module.weight.any():
            module.weight.fill_(1)


def freeze_backbone(backbone: nn.Module, name: str, freeze: str, pretrained: bool | str) -> None:
    """Freeze parts of a timm feature extractor, after its weights are loaded.

    Args:
        backbone: its batch norms are frozen buffers already, unless `freeze` is "none".
        freeze: "paper": batch norms, and everything before the first feature map of stride 8 (in a ResNet: stem and
            layer1), as facebookresearch/detr does; "norms": batch norms only; "none": nothing, batch norms learn.
        pretrained: whether the weights are pretrained. Random ones have norms of weight 0 at the end of residual
            branches; where such a norm is frozen it becomes 1, as in torchvision's ResNets.

    Raises:
        BadInput: an unknown choice, or "paper" for a backbone without such a feature map.
    """
    if freeze not in FREEZE_CHOICES:
        raise BadInput(f"model.freeze: {freeze!r} is not one of {', '.join(FREEZE_CHOICES)}.")
    if freeze == "none":
        unfreeze_batch_norm_2d(backbone)
    elif not pretrained:
        wake_frozen_norms(backbone)
    if freeze == "paper":
        for parameter in _parameters_before_stride_8(backbone, name):
            parameter.requires_grad_(False)


def _parameters_before_stride_8(backbone: nn.Module, name: str) -> list[nn.Parameter]:
    with torch.device("meta"):
        model = timm.create_model(name, features_only=True)
    info = model.feature_info.get_dicts(keys=["module", "reduction"])
    deeper = [feature["module"] for feature in info if feature["reduction"] > 4]
    first = 0
    if deeper:
        # timm flattens nested stages: module "stages.1" holds the parameters "stages_1.…".
        prefixes = (f"{deeper[0]}.", f"{deeper[0].replace('.', '_')}.")
        is_deeper = [key.startswith(prefixes) for key, _ in backbone.named_parameters()]
        first = is_deeper.index(True) if any(is_deeper) else 0
    if first == 0:
        raise BadInput(f"model.freeze: 'paper' has no meaning for backbone {name!r}; use 'norms' or 'none'.")
    return list(backbone.parameters())[:first]
