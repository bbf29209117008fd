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
from torch.overrides import TorchFunctionMode

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


class _WithoutInitialWeights(TorchFunctionMode):
    """A context that draws no random weights: on the device meta, torch would import its compiler for it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__name__", "").endswith(("normal_", "uniform_")):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def feature_strides(name: str) -> list[int]:
    """Return the strides in pixels of the feature maps that the timm backbone `name` offers, from shallow to deep.

    Raises:
        BadInput: timm does not have the model (the message lists similar names), or the model gives no feature maps.
    """
    if not timm.is_model(name):
        similar = difflib.get_close_matches(name, timm.list_models(), n=5, cutoff=0.5)
        hint = f"similar names: {', '.join(similar)}" if similar else "`timm.list_models()` lists them all"
        raise BadInput(f"model.backbone: timm has no backbone {name!r}; {hint}.")
    try:
        with torch.device("meta"), _WithoutInitialWeights():  # only the shapes are needed
            model = timm.create_model(name, features_only=True)
        return list(model.feature_info.reduction())
    except (RuntimeError, AttributeError, AssertionError) as error:
        raise BadInput(f"model.backbone: {name!r} gives no feature maps ({error}); choose another one.") from error


def image_statistics(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of RGB values in [0, 1] that the timm backbone `name` was trained with.

    ImageNet's are returned if timm does not know them.
    """
    cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if cfg is None:
        return IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    return tuple(cfg.mean), tuple(cfg.std)


def timm_model(name: str, pretrained: bool | str, **options) -> nn.Module:
    """Create the model `name` with `timm.create_model`; errors of timm are raised as BadInput.

    Args:
        pretrained: True: load timm's pretrained weights (downloaded once); a path: load the weights of a local file;
            False: use timm's random initial weights.
        options: further keyword arguments of `timm.create_model`.

    Raises:
        BadInput: the weights cannot be downloaded, or the file cannot be used, see `timm_model_from_file`.
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

    The images must be normalised already. Sides that a stride does not divide are rounded as the backbone does it. If a
    backbone offers several maps of a stride, the deepest one is taken; a plain vision transformer gets a `VitPyramid`.
    The extractor has timm's `feature_info`, and the parameters of the backbone have timm's names.

    Args:
        backbone: name of a timm model.
        strides: strides in pixels of the wanted maps, increasing.
        pretrained_backbone: see `pretrained` of `timm_model`.
        norm: replacement of the backbone's batch norms; norms of other kinds are kept. "batch": batch norms are kept.
            "frozen": constants with the pretrained statistics; the identity without pretrained weights. "group": group
            norms with the same weights and biases (32 groups, fewer if the channels require it), for training with
            small batches from random weights. "sync": batch norms with statistics over all ranks; with several ranks
            this needs GPUs.

    Returns:
        The extractor and the channels C_i of its maps.

    Raises:
        BadInput: timm does not have the backbone, or the backbone does not have these strides; the weights are not
            available; or `norm` is unknown.
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
    """Return the strides in pixels of the maps that `timm_features` can give for a timm backbone.

    Raises BadInput as `feature_strides` does.
    """
    if is_plain_vit(backbone):
        return list(PYRAMID_STRIDES)
    return feature_strides(backbone)


def leaves_stages(features: nn.Module) -> bool:
    """Return whether an extractor of timm may hold stages behind its last feature map; no loss depends on these stages.
    """
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
    """Return the number of groups of a group norm: the largest divisor of `channels` that is at most 32 (Wu & He, ECCV
    2018) and leaves at least 2 channels per group, else 1.
    """
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
    """Return whether timm's model `name` is a plain vision transformer with feature maps of only the stride `PATCH_PX`.

    Such a model accepts images of any size.
    """
    if not timm.is_model(name):
        return False
    try:
        with torch.device("meta"), _WithoutInitialWeights():  # only the shapes are needed
            model = timm.create_model(name, **_PLAIN_VIT)
        strides = model.feature_info.reduction()
    except (TypeError, RuntimeError, AttributeError, AssertionError):  # a model without these keywords, or without maps
        return False
    return set(strides) == {PATCH_PX}


class VitPyramid(nn.Module):
    """A plain vision transformer with a simple feature pyramid.

    It computes maps (B, C_i, H / s_i, W / s_i) of strides s_i from normalised images (B, 3, H, W); H and W must be
    multiples of 16.

    Args:
        name: a timm model for which `is_plain_vit` is True.
        pretrained_backbone: see `pretrained` of `timm_model`.
        strides: increasing strides in pixels of the maps, among 4, 8, 16 and 32. The number of channels C_i is a
            quarter of the transformer's width for stride 4, half of it for stride 8, and the full width for 16 and 32.

    Raises:
        BadInput: see `timm_model`.
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
    """Set the weights of frozen norms that are all 0 to 1, in place.

    timm initialises the last norm of a residual branch with 0, and a frozen norm would keep that weight.
    """
    for module in backbone.modules():
        if "weight" in module._buffers:
            module.weight.masked_fill_(~module.weight.any(), 1)  # no `if`: on the meta device there is no value to ask


def freeze_backbone(backbone: nn.Module, name: str, freeze: str, pretrained: bool | str) -> None:
    """Freeze parts of a timm feature extractor in place, after its weights are loaded.

    Args:
        backbone: the extractor, whose batch norms are frozen already unless `freeze` is "none".
        name: its name in timm.
        freeze: "paper": freeze batch norms and everything before the first feature map of stride 8 (in a ResNet: stem
            and layer1), as facebookresearch/detr does; "norms": freeze batch norms only; "none": freeze nothing, and
            make any frozen batch norms trainable.
        pretrained: whether the weights are pretrained. If not, frozen norms of weight 0, which end residual branches in
            timm, are set to 1, as in torchvision's ResNets.

    Raises:
        BadInput: `freeze` is unknown, or it is "paper" and the backbone has no feature map of stride 8 or more.
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
    with torch.device("meta"), _WithoutInitialWeights():
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
