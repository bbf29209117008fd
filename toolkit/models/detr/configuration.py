"""The transformers configuration of the DETR family: options over a hub model's config over the published values."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

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
from toolkit.models.detr.detr_criterion import MatchingCosts
from toolkit.models.detr.options import BackboneOptions, MatchingOptions, TransformerOptions
from toolkit.models.options import DetectorOptions

# Entries of a source's config that are ours to say, or that ask timm for weights when the model is built.
REPLACED = {"id2label", "label2id", "num_labels", "auxiliary_loss", "backbone", "use_timm_backbone", "backbone_kwargs",
            "use_pretrained_backbone"}  # fmt: skip


# ---------------------------------------------------------------- options and entries of transformers' config


def handed_over(options: DetectorOptions, source_config: Mapping | None) -> dict[str, Any]:
    """The settings that decide: all of them; where there is a source, those that are given, as it says the others."""
    values = asdict(options) if source_config is None else options.given
    return {name: value for name, value in values.items() if value is not None}


def to_entries(values: Mapping[str, Any], entries: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Entries of a transformers config from our options. entries: their names by the name of the option."""
    return {name: values[option] for option, names in entries.items() if option in values for name in names}


def from_entries(config: PreTrainedConfig, entries: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Our options from a transformers config; None where one of ours stands for entries that differ."""
    values = {option: [getattr(config, name) for name in names] for option, names in entries.items()}
    return {option: found[0] if found == found[:1] * len(found) else None for option, found in values.items()}


def detector_config(
    config_class: type[PreTrainedConfig], class_names: Sequence[str], source_config: Mapping | None, **entries
) -> PreTrainedConfig:
    """A transformers config: `config_class`'s values, replaced by the source's, replaced by `entries`.

    Raises:
        BadInput: the source is of another architecture.
    """
    source = source_config or {}
    if source.get("model_type", config_class.model_type) != config_class.model_type:
        raise BadInput(
            f"model.architecture: the pretrained model is a {source['model_type']}, not a {config_class.model_type}; "
            f"set model.architecture to {source['model_type']}."
        )
    kept = {key: value for key, value in source.items() if key not in REPLACED}
    names = dict(enumerate(class_names))
    labels = {"id2label": names, "label2id": {name: label for label, name in names.items()}}
    return config_class(**{**kept, **entries, **labels, "auxiliary_loss": False})


def build_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The model with random weights; what transformers does not accept together (width and heads, ...) is BadInput."""
    try:
        return model_class(config)
    except ValueError as error:
        raise BadInput(f"the settings of the model do not fit together: {error}") from error


def matching_costs(options: MatchingOptions, source_config: Mapping | None) -> MatchingCosts:
    """Weights of class, L1 and GIoU in the matching: as given, else the source's, else published.

    They are no entries of the config that is built: transformers takes whole numbers only.
    """
    known = {**asdict(options), **(source_config or {}), **options.given}
    return MatchingCosts(*(known[name] for name in MatchingCosts._fields))


def pixel_statistics(config: PreTrainedConfig, options: TransformerOptions) -> tuple[tuple, tuple]:
    """Mean and standard deviation of RGB values: as given, else the timm backbone's, else ImageNet's."""
    name = timm_name(config)
    own_mean, own_std = image_statistics(name) if name else (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    return tuple(options.mean or own_mean), tuple(options.std or own_std)


# ---------------------------------------------------------------- backbone


def timm_name(config: PreTrainedConfig) -> str | None:
    """Name of the timm backbone in a detector's config; None: it has none, or transformers' own."""
    backbone = getattr(config, "backbone_config", None)
    return backbone.backbone if backbone is not None and backbone.model_type == "timm_backbone" else None


def backbone_entry(options: BackboneOptions, source_config: Mapping | None, strides: Sequence[int] | None = None):
    """The `backbone_config` of a detector: that of the source, unless another backbone is given.

    Args:
        strides: of the feature maps that are used; None: the last map alone.

    timm backbones get frozen batch norms, made by timm; see backbones.py.

    Raises:
        BadInput: unknown backbone, missing strides, dilation of a backbone that is not timm's.
    """
    source, values = source_config or {}, handed_over(options, source_config)
    own, name, dilation = source.get("backbone_config"), values.get("backbone"), values.get("dilation")
    if own is not None and own["model_type"] != "timm_backbone" and name is None:
        if dilation is not None and dilation != bool(source.get("dilation")):
            raise BadInput(
                f"model.dilation: the pretrained model has a backbone of transformers ({own['model_type']}), which "
                "has no such setting; leave it out."
            )
        return dict(own)
    if own is not None and name in (None, own.get("backbone")):
        name, indices = own["backbone"], list(own["out_indices"])
        dilation = own.get("output_stride") == 16 if dilation is None else dilation
    else:
        name = name or options.backbone
        indices = _indices(name, strides)
    return backbone_config(name, indices, True, output_stride=16 if dilation else None)


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
    module: nn.Module, config: PreTrainedConfig, options: BackboneOptions, source_config: Mapping | None
) -> dict[str, Any]:
    """Gives a detector's backbone its weights and freezes what is to be frozen.

    Args:
        module: the backbone; of timm: the feature extractor itself.
        config: the detector's.

    Returns:
        the options `backbone`, `freeze` and, for detectors that have it, `dilation`, as they are now. A backbone of
        transformers has no name; where `freeze` is not given it is "paper" for a ResNet, else "none".

    Raises:
        BadInput: what is asked for is impossible with this backbone.
    """
    backbone, name, pretrained = config.backbone_config, timm_name(config), options.pretrained_backbone
    if name:
        load_backbone_weights(module, backbone, pretrained)
        freeze_backbone(module, name, options.freeze, pretrained)
        freeze, dilation = options.freeze, backbone.output_stride == 16
    elif pretrained:
        raise BadInput(
            f"model.pretrained_backbone: the backbone ({backbone.model_type}) is none of timm's and gets its weights "
            "with the pretrained detector; set it to false."
        )
    else:
        freeze = handed_over(options, source_config).get("freeze")
        freeze = _freeze_transformers_backbone(module, backbone.model_type, freeze)
        dilation = bool(config.dilation)
    used = {"backbone": name, "freeze": freeze}
    return used | {"dilation": dilation} if hasattr(options, "dilation") else used


def _freeze_transformers_backbone(module: nn.Module, model_type: str, freeze: str | None) -> str:
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
    return freeze
