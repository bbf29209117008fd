"""How the DETR family is configured: options over a hub model's config over the published values, and its backbone.

transformers' config classes hold the published values, so an option that is None is simply not handed over.
"""

from collections.abc import Mapping, Sequence

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from toolkit.errors import BadInput
from toolkit.models.backbones import (
    FREEZE_CHOICES,
    backbone_config,
    feature_strides,
    freeze_backbone,
    image_statistics,
    load_backbone_weights,
)

# Entries of a source's config that are ours to say, or that ask timm for weights when the model is built.
REPLACED = {"id2label", "label2id", "num_labels", "auxiliary_loss", "backbone", "use_timm_backbone", "backbone_kwargs",
            "use_pretrained_backbone"}  # fmt: skip


def matching_costs(
    source_config: Mapping | None,
    class_cost: float | None,
    bbox_cost: float | None,
    giou_cost: float | None,
    published_class_cost: float,
) -> tuple[float, float, float]:
    """Weights of class, L1 and GIoU in the matching: as given, else the source's, else published (DETR's 5 and 2)."""
    given = {"class_cost": class_cost, "bbox_cost": bbox_cost, "giou_cost": giou_cost}
    defaults = {"class_cost": published_class_cost, "bbox_cost": 5, "giou_cost": 2} | {
        key: value for key, value in (source_config or {}).items() if key in given
    }
    return tuple(defaults[key] if value is None else value for key, value in given.items())


def pixel_statistics(config: PreTrainedConfig, mean: Sequence[float] | None, std: Sequence[float] | None):
    """Mean and standard deviation of RGB values: as given, else the timm backbone's, else ImageNet's."""
    backbone = getattr(config, "backbone_config", None)
    of_timm = backbone is not None and backbone.model_type == "timm_backbone"
    own_mean, own_std = (
        image_statistics(backbone.backbone) if of_timm else (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    )
    return tuple(mean or own_mean), tuple(std or own_std)


def detector_config(
    config_class: type[PreTrainedConfig], class_names: Sequence[str], source_config: Mapping | None, **entries
) -> PreTrainedConfig:
    """A transformers config: `config_class`'s values, replaced by the source's, replaced by entries that are not None.

    Raises:
        BadInput: the source is of another architecture, or transformers refuses a value.
    """
    source = source_config or {}
    if source.get("model_type", config_class.model_type) != config_class.model_type:
        raise BadInput(
            f"model.architecture: the pretrained model is a {source['model_type']}, not a {config_class.model_type}; "
            f"set model.architecture to {source['model_type']}."
        )
    kept = {key: value for key, value in source.items() if key not in REPLACED}
    given = {key: value for key, value in entries.items() if value is not None}
    names = dict(enumerate(class_names))
    labels = {"id2label": names, "label2id": {name: label for label, name in names.items()}}
    return config_class(**{**kept, **given, **labels, "auxiliary_loss": False})


def build_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The model with random weights; what transformers does not accept together (width and heads, ...) is BadInput."""
    try:
        return model_class(config)
    except ValueError as error:
        raise BadInput(f"the settings of the model do not fit together: {error}") from error


def backbone_entry(
    source_config: Mapping | None, backbone: str | None, strides: Sequence[int] | None, dilation: bool | None
):
    """The `backbone_config` of a detector: that of the source, unless `backbone` names another one.

    Args:
        backbone: name of a timm model; None: the source's, or resnet50 where there is no source.
        strides: of the feature maps that are used; None: the last map alone.
        dilation: last stage dilated instead of strided; None: as in the source.

    timm backbones get frozen batch norms, made by timm; see backbones.py.

    Raises:
        BadInput: unknown backbone, missing strides, dilation of a backbone that is not timm's.
    """
    own = (source_config or {}).get("backbone_config")
    if backbone is None and own is not None:
        if own["model_type"] != "timm_backbone":
            if dilation is not None:
                raise BadInput(
                    f"model.dilation: the pretrained model has a backbone of transformers ({own['model_type']}), which "
                    "has no such setting; leave it out."
                )
            return dict(own)
        backbone, indices = own["backbone"], list(own["out_indices"])
        dilation = own.get("output_stride") == 16 if dilation is None else dilation
    else:
        backbone = backbone or "resnet50"
        indices = _indices(backbone, strides)
    return backbone_config(backbone, indices, True, output_stride=16 if dilation else None)


def _indices(backbone: str, strides: Sequence[int] | None) -> list[int]:
    available = feature_strides(backbone)
    if strides is None:
        return [len(available) - 1]
    if missing := [stride for stride in strides if stride not in available]:
        raise BadInput(
            f"model.backbone: feature maps of stride {', '.join(map(str, strides))} are needed; {backbone!r} has "
            f"{available}, without {', '.join(map(str, missing))}."
        )
    return [available.index(stride) for stride in strides]


def prepare_backbone(
    module: nn.Module, config: PreTrainedConfig, pretrained: bool | str, freeze: str | None, timm_freeze: str
) -> None:
    """Give a detector's backbone its weights and freeze what is to be frozen.

    Args:
        module: the backbone; of timm: the feature extractor itself.
        config: the detector's.
        pretrained: see `load_backbone_weights`.
        freeze: see `freeze_backbone`; None: `timm_freeze` for timm, else "paper" for a ResNet and "none" otherwise.

    Raises:
        BadInput: what is asked for is impossible with this backbone.
    """
    backbone = config.backbone_config
    if backbone.model_type == "timm_backbone":
        load_backbone_weights(module, backbone, pretrained)
        freeze_backbone(module, backbone.backbone, freeze or timm_freeze, pretrained)
        return
    if pretrained:
        raise BadInput(
            f"model.pretrained_backbone: the backbone ({backbone.model_type}) is none of timm's and gets its weights "
            "with the pretrained detector; set it to false."
        )
    _freeze_transformers_backbone(module, backbone.model_type, freeze)


def _freeze_transformers_backbone(module: nn.Module, model_type: str, freeze: str | None) -> None:
    # transformers makes batch norms frozen buffers, and of its ResNet freezes all by a mistaken name.
    is_resnet = model_type == "resnet"
    freeze = freeze or ("paper" if is_resnet else "none")
    if freeze not in FREEZE_CHOICES:
        raise BadInput(f"model.freeze: {freeze!r} is not one of {', '.join(FREEZE_CHOICES)}.")
    possible = ("paper", "norms") if is_resnet else ("none",)
    if freeze not in possible:
        raise BadInput(
            f"model.freeze: {freeze!r} is not possible with the pretrained model's own backbone ({model_type} of "
            f"transformers); use {' or '.join(possible)}."
        )
    trained = ("encoder.stages.1.", "encoder.stages.2.", "encoder.stages.3.") if freeze == "paper" else ("",)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
