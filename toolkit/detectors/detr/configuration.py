"""Configuration of the DETR family for transformers: the user's options override the config of a hub model, and that
config overrides the published values."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn
from transformers import PreTrainedConfig, TimmBackboneConfig

from toolkit.base.errors import BadInput
from toolkit.detectors.detr.options import BackboneOptions, HybridOptions, TransformerOptions
from toolkit.models import DetectorOptions
from toolkit.models.backbones import FREEZE_CHOICES, feature_strides, freeze_backbone, image_statistics, timm_model

# Entries of a source's config that this toolkit sets, or that make timm load weights when the model is built.
REPLACED = (
    "id2label label2id num_labels auxiliary_loss backbone use_timm_backbone backbone_kwargs use_pretrained_backbone"
).split()
# The same entries for RT-DETR.
REPLACED_OF_RT_DETR = ("label2id", "num_labels", "dtype", "torch_dtype", "head_dim")
RT_DETR_STRIDES = (8, 16, 32)
# Entries of a vision transformer's config that follow from its depth and `out_indices`.
FOLLOW_FROM_DEPTH = ("out_features", "stage_names", "window_block_indexes")


# Options of an encoder-decoder and the entries of transformers' config that they set.
ENCODER_DECODER = {
    "d_model": ["d_model"],
    "heads": ["encoder_attention_heads", "decoder_attention_heads"],
    "encoder_layers": ["encoder_layers"],
    "decoder_layers": ["decoder_layers"],
    "ffn_dim": ["encoder_ffn_dim", "decoder_ffn_dim"],
    "num_queries": ["num_queries"],
    "dropout": ["dropout"],
}


# ---------------------------------------------------------------- options and entries of transformers' config


def handed_over(options: DetectorOptions, source_config: Mapping | None) -> dict[str, Any]:
    """Return the options to apply, by name, without those that are None. Without a source config these are all options;
    with one, only those that the user has set, because the source config decides the others."""
    values = asdict(options) if source_config is None else options.given
    return {name: value for name, value in values.items() if value is not None}


def to_entries(values: Mapping[str, Any], entries: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Convert options, `values` by name, to entries of a transformers config.

    entries: for each option, the names of the config entries that get its value. Options without a value are left out.
    """
    result = {}
    for option, names in entries.items():
        if option in values:
            result |= dict.fromkeys(names, values[option])
    return result


def from_entries(config: PreTrainedConfig, entries: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Read our options from a transformers config. An option whose config entries have different values becomes None.

    entries: for each option, the names of its config entries.
    """
    result = {}
    for option, names in entries.items():
        values = [getattr(config, name) for name in names]
        is_one = all(value == values[0] for value in values)
        result[option] = values[0] if is_one else None
    return result


def detector_config(
    config_class: type[PreTrainedConfig], class_names: Sequence[str], source_config: Mapping | None, **entries
) -> PreTrainedConfig:
    """Build a transformers config from the defaults of `config_class`, the source config and `entries`; the later wins.
    The classes are `class_names`, and transformers' own auxiliary losses are turned off.

    Raises:
        BadInput: the source config is of another architecture.
    """
    source = source_config or {}
    if source.get("model_type", config_class.model_type) != config_class.model_type:
        raise BadInput(
            f"model.architecture: the pretrained model is a {source['model_type']}, not a {config_class.model_type}; "
            f"set model.architecture to {source['model_type']}."
        )
    inherited = {key: value for key, value in source.items() if key not in REPLACED}
    names = dict(enumerate(class_names))
    values = {
        **inherited,
        **entries,
        "id2label": names,
        "label2id": {name: label for label, name in names.items()},
        "auxiliary_loss": False,
    }
    return config_class(**values)


def pixel_statistics(
    config: PreTrainedConfig,
    options: TransformerOptions,
    published=(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
) -> tuple[tuple, tuple]:
    """Return mean and standard deviation of RGB values in [0, 1]: those of the options if given, else those of the timm
    backbone, else `published`."""
    name = timm_name(config)
    default_mean, default_std = image_statistics(name) if name else published
    return tuple(options.mean or default_mean), tuple(options.std or default_std)


# ---------------------------------------------------------------- backbone


def timm_name(config: PreTrainedConfig) -> str | None:
    """Return the name of the timm backbone in the config of a detector; None if it has no backbone, or one of
    transformers."""
    backbone = getattr(config, "backbone_config", None)
    if backbone is None or backbone.model_type != "timm_backbone":
        return None
    return backbone.backbone


def backbone_entry(options: BackboneOptions, source_config: Mapping | None, strides: Sequence[int] | None = None):
    """Return the `backbone_config` of a detector: that of the source config, unless the user has set another backbone.

    timm backbones get frozen batch norms, made by timm; see `toolkit.models.backbones`.

    Args:
        strides: strides in pixels of the feature maps that the detector uses; None: only the last map.

    Raises:
        BadInput: the backbone is unknown or does not have the strides, or `dilation` is set for a backbone of
            transformers.
    """
    source = source_config or {}
    values = handed_over(options, source_config)
    entry = source.get("backbone_config")
    name = values.get("backbone")
    dilation = values.get("dilation")
    if entry is not None and entry["model_type"] != "timm_backbone" and name is None:
        if dilation is not None and dilation != bool(source.get("dilation")):
            raise BadInput(
                f"model.dilation: the pretrained model has a backbone of transformers ({entry['model_type']}), which "
                "has no such setting; leave it out."
            )
        return dict(entry)
    if entry is not None and name in (None, entry.get("backbone")):
        name = entry["backbone"]
        indices = list(entry["out_indices"])
        dilation = entry.get("output_stride") == 16 if dilation is None else dilation
    else:
        name = name or options.backbone
        needed = f"feature maps of stride {', '.join(map(str, strides or ()))} are needed"
        indices = _indices(name, strides, needed) if strides else [len(feature_strides(name)) - 1]
    stride = 16 if dilation else None
    return TimmBackboneConfig(
        backbone=name,
        out_indices=indices,
        freeze_batch_norm_2d=True,
        output_stride=stride,
    )


def _indices(backbone: str, strides: Sequence[int], needed: str) -> list[int]:
    available = feature_strides(backbone)
    missing = [stride for stride in strides if stride not in available]
    if missing:
        raise BadInput(
            f"model.backbone: {needed}; {backbone!r} has {available}, without {', '.join(map(str, missing))}."
        )
    return [available.index(stride) for stride in strides]


def prepare_backbone(
    module: nn.Module,
    config: PreTrainedConfig,
    options: BackboneOptions,
    source_config: Mapping | None,
) -> dict[str, Any]:
    """Load the weights of a detector's backbone and freeze parts of it.

    Args:
        module: the backbone; for a timm backbone, the feature extractor itself.
        config: the config of the detector.

    Returns:
        the options `backbone`, `freeze` and, for detectors that have it, `dilation`, with the values in use. For a
        backbone of transformers, `backbone` is None, and `freeze`, if it is not set, is "paper" for a ResNet and "none"
        for others.

    Raises:
        BadInput: settings that this backbone does not support.
    """
    backbone = config.backbone_config
    name = timm_name(config)
    pretrained = options.pretrained_backbone
    if name:
        start_backbone(module, backbone, options.freeze, pretrained)
        freeze = options.freeze
        dilation = backbone.output_stride == 16
    elif pretrained:
        raise BadInput(
            f"model.pretrained_backbone: the backbone ({backbone.model_type}) is not timm's and gets its weights "
            "with the pretrained detector; set it to false."
        )
    else:
        freeze = handed_over(options, source_config).get("freeze")
        freeze = _freeze_transformers_backbone(module, backbone.model_type, freeze)
        dilation = bool(config.dilation)
    used = {"backbone": name, "freeze": freeze, "dilation": dilation}
    return {option: value for option, value in used.items() if hasattr(options, option)}


def start_backbone(backbone: nn.Module, config: TimmBackboneConfig, freeze: str, pretrained: bool | str) -> None:
    """Load timm's weights into `backbone`, the feature extractor that transformers made from `config`, and freeze parts
    of it.

    transformers would initialise the convolutions as N(0, 0.02), with which the signal of a deep network without norms
    vanishes. It would also replace every `nn.BatchNorm2d`, even timm's `BatchNormAct2d`, which includes the activation:
    a MobileNet would lose its non-linearities. With `config.freeze_batch_norm_2d`, timm replaces the norms and keeps
    the activations. That entry is written to `config.json`, so that the saved model is rebuilt in the same way.

    Args:
        pretrained: see `timm_model`.
        freeze: see `freeze_backbone`.

    Raises:
        BadInput: `timm_model` or `freeze_backbone` raises it.
    """
    options = {
        "features_only": True,
        "out_indices": tuple(config.out_indices),
        "output_stride": config.output_stride,
    }
    source = timm_model(config.backbone, pretrained, **options)
    backbone.load_state_dict(source.state_dict())
    freeze_backbone(backbone, config.backbone, freeze, pretrained)


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


def without_layers_behind_maps(backbone: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a vision transformer of transformers whose last layer is that of its deepest feature map.

    No loss depends on a layer behind that map: its weights would never get a gradient, and DDP would wait for one.

    backbone: a config with `num_hidden_layers` and `out_indices`, which count the layers from 1. It is returned
        unchanged without either, or with indices from the last layer, whose meaning depends on the depth.
    """
    depth = backbone.get("num_hidden_layers")
    indices = backbone.get("out_indices")
    if depth is None or not indices or min(indices) < 0 or max(indices) == depth:
        return dict(backbone)
    kept = {name: value for name, value in backbone.items() if name not in FOLLOW_FROM_DEPTH}
    return kept | {"num_hidden_layers": max(indices)}


def has_stages_behind_maps(config: PreTrainedConfig) -> bool:
    """Return whether the backbone in the config of a detector has stages behind its deepest feature map."""
    backbone = getattr(config, "backbone_config", None)
    stages = getattr(backbone, "stage_names", None)
    if not stages:
        return False
    last = len(stages) - 1
    return not {last, -1} & {*backbone.out_indices}


# ---------------------------------------------------------------- RT-DETR and its successors


def rt_detr_config(
    detector: type,
    class_names: Sequence[str],
    options: HybridOptions,
    source: Mapping[str, Any] | None,
) -> tuple[PreTrainedConfig, str]:
    """Return the config of RT-DETR-v2, D-FINE, DEIMv2 or ECDet, and the parts of the backbone to freeze: "paper",
    "norms" or "none".

    Args:
        detector: the class of the detector, see `TransformersDetector`.
        source: `to_dict()` of the transformers config to build the model from; None: the published values.

    Raises:
        BadInput: `source` is of another model; the backbone does not have the strides; `backbone`,
            `pretrained_backbone` or `freeze` "paper" is set for a backbone that is not timm's.
    """
    config_class = detector.config_class
    kind = detector.config_class.model_type
    if source is not None and source.get("model_type") != kind:
        raise BadInput(f"model.architecture {kind}: the weights are of a {source.get('model_type')!r} model")
    base = source or {"freeze_backbone_batch_norms": False, **detector.published}
    entries = {key: value for key, value in base.items() if key not in REPLACED_OF_RT_DETR}
    given = handed_over(options, source)
    entries |= to_entries(given, detector.entries)
    if "d_model" in given:
        levels = len(entries.get("decoder_in_channels", RT_DETR_STRIDES))
        entries["decoder_in_channels"] = [given["d_model"]] * levels
    # Fixed anchors are those of one size; generated ones are the same there, and right elsewhere.
    entries |= {
        "id2label": dict(enumerate(class_names)),
        "auxiliary_loss": True,
        "anchor_image_size": None,
    }

    name = given.get("backbone")
    freeze = given.get("freeze")
    backbone = entries.get("backbone_config") or {}
    if backbone and backbone["model_type"] != "timm_backbone":
        _check_own_backbone(backbone["model_type"], name, options.pretrained_backbone, freeze)
        if freeze is not None:
            entries["freeze_backbone_batch_norms"] = freeze == "norms"
        frozen = entries.get("freeze_backbone_batch_norms", True)
        return config_class.from_dict(entries), "norms" if frozen else "none"
    freeze = freeze or ("norms" if backbone.get("freeze_batch_norm_2d") else "none")
    strides = entries.get("feat_strides", RT_DETR_STRIDES)
    # timm freezes the norms, with their activations; see backbones.py
    entries |= {
        "backbone_config": _timm_backbone(name or backbone["backbone"], backbone, strides, freeze != "none", kind),
        "freeze_backbone_batch_norms": False,
    }
    return config_class.from_dict(entries), freeze


def _timm_backbone(
    name: str, source: Mapping[str, Any], strides: Sequence[int], frozen_norms: bool, kind: str
) -> TimmBackboneConfig:
    """Return the config of a timm backbone that gives maps of these strides.

    source: config of the backbone in the source; if it is this backbone, its choice of maps is kept. kind: name of the
    detector, for the message of the BadInput that is raised if the backbone does not have the strides.
    """
    if name == source.get("backbone") and source.get("out_indices"):
        out_indices = source["out_indices"]
    else:
        needed = f"{kind} needs feature maps of stride {', '.join(map(str, strides[:-1]))} and {strides[-1]}"
        out_indices = _indices(name, strides, needed)
    return TimmBackboneConfig(
        backbone=name,
        out_indices=out_indices,
        freeze_batch_norm_2d=frozen_norms,
        output_stride=None,
    )


def _check_own_backbone(kind: str, backbone: str | None, pretrained: bool | str | None, freeze: str | None) -> None:
    problems = []
    if backbone or pretrained:
        problems.append(
            f"model.backbone, model.pretrained_backbone: the model comes with a backbone of its own ({kind}); "
            "leave both out, or start without its weights"
        )
    if freeze == "paper":
        problems.append(f"model.freeze: 'paper' has no meaning for a {kind} backbone; use 'norms' or 'none'.")
    elif freeze not in (None, *FREEZE_CHOICES):
        problems.append(f"model.freeze: {freeze!r} is not one of {', '.join(FREEZE_CHOICES)}.")
    if problems:
        raise BadInput(problems)
