"""timm backbones inside transformers detectors: checked names, timm's weights, explicit freezing.

transformers replaces every `nn.BatchNorm2d` of a DETR backbone, also timm's `BatchNormAct2d`, which holds the
activation as well: a MobileNet loses its non-linearities. Its config's `freeze_batch_norm_2d` lets timm do the
replacement, which keeps them, and travels in `config.json`, so the saved model is rebuilt the same way.
"""

import difflib
from contextlib import nullcontext
from typing import TYPE_CHECKING

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.utils.model import unfreeze_batch_norm_2d
from torch import nn

from toolkit.base.errors import BadInput
from toolkit.models.weights.backbone_file import timm_model_from_file
from toolkit.models.weights.pretrained import cached_when_offline

if TYPE_CHECKING:
    from transformers import TimmBackboneConfig

FREEZE_CHOICES = ("paper", "norms", "none")


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
            return list(timm.create_model(name, features_only=True).feature_info.reduction())
    except (RuntimeError, AttributeError, AssertionError) as error:
        raise BadInput(f"model.backbone: {name!r} gives no feature maps ({error}); choose another one.") from error


def image_statistics(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation of the RGB values in [0, 1] that backbone `name` was trained with."""
    cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
    if cfg is None:
        return IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    return tuple(cfg.mean), tuple(cfg.std)


def start_backbone(backbone: nn.Module, config: "TimmBackboneConfig", freeze: str, pretrained: bool | str) -> None:
    """Load timm's weights into `backbone` (a timm feature extractor made from `config`), and freeze it.

    transformers would initialise the convolutions as N(0, 0.02), with which the signal of a deep network without norms
    vanishes. `pretrained`: see `timm_model`; `freeze`: see `freeze_backbone`; it raises the errors of both.
    """
    options = {"features_only": True, "out_indices": tuple(config.out_indices), "output_stride": config.output_stride}
    source = timm_model(config.backbone, pretrained, **options)
    backbone.load_state_dict(source.state_dict())
    freeze_backbone(backbone, config.backbone, freeze, pretrained)


def timm_model(name: str, pretrained: bool | str, **options) -> nn.Module:
    """Create a timm model with `timm.create_model`; its errors are raised as BadInput.

    Args:
        pretrained: True: timm's pretrained weights (downloaded once); a path: a local file of such weights; False:
            timm's random ones.
        options: more keywords of `timm.create_model`.

    Raises:
        BadInput: the weights cannot be fetched; those of a file, see `timm_model_from_file`.
    """
    if isinstance(pretrained, str):
        return timm_model_from_file(name, pretrained, **options)
    try:
        with cached_when_offline() if pretrained else nullcontext():
            return timm.create_model(name, pretrained=pretrained, **options)
    except (OSError, RuntimeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise BadInput(
            f"model.pretrained_backbone: no pretrained weights for {name!r} ({first_line}); connect to the network "
            "once, set it to a file of weights, or to false to start from random ones."
        ) from error


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
        info = timm.create_model(name, features_only=True).feature_info.get_dicts(keys=["module", "reduction"])
    deeper = [feature["module"] for feature in info if feature["reduction"] > 4]
    # timm flattens nested stages: module "stages.1" holds the parameters "stages_1.…".
    prefixes = (f"{deeper[0]}.", f"{deeper[0].replace('.', '_')}.") if deeper else ()
    names = [key for key, _ in backbone.named_parameters()]
    first = next((i for i, key in enumerate(names) if key.startswith(prefixes)), 0) if prefixes else 0
    if first == 0:
        raise BadInput(f"model.freeze: 'paper' has no meaning for backbone {name!r}; use 'norms' or 'none'.")
    return list(backbone.parameters())[:first]
