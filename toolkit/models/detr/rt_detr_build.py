"""Building blocks of RT-DETR-v2, D-FINE and DEIMv2: the transformers config, and the published initialisation."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from toolkit.errors import BadInput
from toolkit.models.backbones import FREEZE_CHOICES, backbone_config, feature_strides
from toolkit.models.detr.configuration import handed_over, to_entries
from toolkit.models.detr.options import RTDetrV2Options

STRIDES = (8, 16, 32)
PRIOR = 0.01  # probability that the class heads start from


def family_config(
    detector: type, class_names: Sequence[str], options: RTDetrV2Options, source: Mapping[str, Any] | None
) -> tuple[PreTrainedConfig, str]:
    """The config of one of these detectors, and what is frozen of its backbone.

    Args:
        detector: its class, see `TransformersDetector`.
        source: `to_dict()` of a transformers config, which the model is to be built from.

    Raises:
        BadInput: `source` is of another model; a backbone without the strides; `backbone`, `pretrained_backbone` or
            freeze "paper" for a backbone that is not timm's.
    """
    config_class = detector.config_class
    if source is None:
        entries = {"freeze_backbone_batch_norms": False, **detector.published}
    else:
        if source.get("model_type") != config_class.model_type:
            raise BadInput(
                f"model.architecture {config_class.model_type}: the weights are of a {source.get('model_type')!r} model"
            )
        left_out = ("label2id", "num_labels", "dtype", "torch_dtype", "head_dim")
        entries = {key: value for key, value in source.items() if key not in left_out}
    given = handed_over(options, source)
    entries |= to_entries(given, detector.entries)
    if "d_model" in given:
        entries["decoder_in_channels"] = [given["d_model"]] * len(entries.get("decoder_in_channels", STRIDES))
    # Fixed anchors are those of one size; generated ones are the same there, and right elsewhere.
    entries |= {"id2label": dict(enumerate(class_names)), "auxiliary_loss": True, "anchor_image_size": None}

    name, freeze = given.get("backbone"), given.get("freeze")
    own = entries.get("backbone_config") or {}
    if own and own["model_type"] != "timm_backbone":
        _check_own_backbone(own["model_type"], name, options.pretrained_backbone, freeze)
        if freeze is not None:
            entries["freeze_backbone_batch_norms"] = freeze == "norms"
        frozen = entries.get("freeze_backbone_batch_norms", True)
        return config_class.from_dict(entries), "norms" if frozen else "none"
    name = name or own["backbone"]
    freeze = freeze or ("norms" if own.get("freeze_batch_norm_2d") else "none")
    if name == own.get("backbone") and own.get("out_indices"):
        out_indices = own["out_indices"]
    else:
        out_indices = _indices_of_strides(config_class.model_type, name, entries.get("feat_strides", STRIDES))
    # timm freezes the norms, with their activations; see backbones.py
    entries |= {"backbone_config": backbone_config(name, out_indices, frozen_norms=freeze != "none")}
    return config_class.from_dict(entries | {"freeze_backbone_batch_norms": False}), freeze


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


def _indices_of_strides(architecture: str, backbone: str, wanted: Sequence[int]) -> list[int]:
    strides = feature_strides(backbone)
    if missing := [stride for stride in wanted if stride not in strides]:
        raise BadInput(
            f"model.backbone: {architecture} needs feature maps of stride {', '.join(map(str, wanted[:-1]))} and "
            f"{wanted[-1]}; {backbone!r} has {strides}, without {', '.join(map(str, missing))}."
        )
    return [strides.index(stride) for stride in wanted]


@torch.no_grad()
def initialise_as_published_(model: PreTrainedModel, backbone: nn.Module) -> None:
    """Random weights as lyuwenyu/RT-DETR, Peterande/D-FINE and DEIMv2 draw them; the backbone is left alone.

    transformers draws all of them from N(0, 0.01), RT-DETR's scales of batch norms too: made for loading a checkpoint,
    they let almost nothing through at first, and training from random weights hardly gets going.
    """
    core = model.model
    inside = set(backbone.modules())
    modules = {name: module for name, module in core.named_modules() if module not in inside}
    for module in modules.values():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.BatchNorm2d):
            module.reset_parameters()
    for name, module in modules.items():
        if hasattr(module, "sampling_offsets"):  # deformable attention
            model._init_weights(module)
        elif name.endswith(("q_proj", "k_proj", "v_proj", "o_proj")):
            nn.init.xavier_uniform_(module.weight, gain=1.0 if name.endswith("o_proj") else math.sqrt(0.5))
            nn.init.zeros_(module.bias)
        elif name.endswith("gateway.gate"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    projections = [
        block[0]
        for blocks in (getattr(core, "encoder_input_proj", ()), core.decoder_input_proj)
        for block in blocks
        if isinstance(block, nn.Sequential) and len(block)
    ]
    for module in (*projections, core.enc_output[0], *core.decoder.query_pos_head.layers):
        nn.init.xavier_uniform_(module.weight)
    for head in (core.enc_score_head, *core.decoder.class_embed):
        nn.init.constant_(head.bias, -math.log((1 - PRIOR) / PRIOR))
    for head in (core.enc_bbox_head, *core.decoder.bbox_embed):
        _start_at_zero_(head)
    if hasattr(core, "denoising_class_embed"):
        nn.init.normal_(core.denoising_class_embed.weight)
    if hasattr(core.decoder, "pre_bbox_head"):
        _initialise_refinement_(core.decoder)


def _initialise_refinement_(decoder: nn.Module) -> None:
    """What only the decoders of D-FINE and DEIMv2 have."""
    _start_at_zero_(decoder.pre_bbox_head)
    for quality in decoder.lqe_layers:
        _start_at_zero_(quality.reg_conf)
    for layer in decoder.layers:
        for module in layer.mlp.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if hasattr(layer.mlp, "gate_proj"):  # SwiGLU, of DEIMv2
                    nn.init.zeros_(module.bias)


def _start_at_zero_(head: nn.Module) -> None:
    nn.init.zeros_(head.layers[-1].weight)
    nn.init.zeros_(head.layers[-1].bias)
