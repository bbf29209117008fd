"""Random weights drawn as the programs of the papers draw them.

transformers draws nearly all weights from N(0, 0.02) or N(0, 0.01). These are made for models whose checkpoint is
loaded afterwards: they let little of the signal through, and training from them hardly makes progress at first.
"""

import math

import torch
from torch import nn
from transformers import PreTrainedModel

PRIOR_SCORE = 0.01  # probability that the class heads start from
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def initialise_transformer_(transformer: nn.Module, fused: tuple[str, ...] = ATTENTION_PROJECTIONS) -> None:
    """Draw the matrices of a transformer Xavier uniform, in place. Matrices whose names end in one of `fused` are drawn
    as the one matrix that they form in `nn.MultiheadAttention`.

    Biases are PyTorch's default, but 0 for the `fused` matrices and for every attention's output projection.
    """
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            in_one = name.endswith(fused)
            gain = math.sqrt(0.5) if in_one else 1.0
            module.reset_parameters()
            nn.init.xavier_uniform_(module.weight, gain=gain)
            if in_one or name.endswith(("o_proj", "out_proj", "output_proj")):
                nn.init.zeros_(module.bias)


def initialise_sampling_(model: nn.Module, transformer: nn.Module) -> None:
    """Set the sampling offsets of deformable attention, in place, to a star around the reference point, as in
    transformers.

    model: the model of transformers, whose own initialisation is used. transformer: the part of it to initialise.
    """
    for module in transformer.modules():
        if hasattr(module, "sampling_offsets"):
            model._init_weights(module)


def start_heads_(class_head: nn.Linear, box_head: nn.Module) -> None:
    """Initialise the class head and the box head as PyTorch does, but so that every score is `PRIOR_SCORE` and every
    box is at its reference."""
    class_head.reset_parameters()
    start_at_prior_(class_head)
    for layer in box_head.layers:
        layer.reset_parameters()
    start_at_zero_(box_head)


def start_at_prior_(class_head: nn.Linear) -> None:
    """Set the bias of a class head, in place, so that every score starts near `PRIOR_SCORE`."""
    nn.init.constant_(class_head.bias, -math.log((1 - PRIOR_SCORE) / PRIOR_SCORE))


def start_at_zero_(head: nn.Module) -> None:
    """Set weight and bias of the last layer of a head to 0, in place."""
    nn.init.zeros_(head.layers[-1].weight)
    nn.init.zeros_(head.layers[-1].bias)


@torch.no_grad()
def initialise_rt_detr_(model: PreTrainedModel, backbone: nn.Module) -> None:
    """Draw the weights of RT-DETR-v2, D-FINE or DEIMv2 in place as their programs do, except those of `backbone`.

    transformers draws even the scales of batch norms from N(0, 0.01).
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
        elif name.endswith((*ATTENTION_PROJECTIONS, "o_proj")):
            nn.init.xavier_uniform_(
                module.weight,
                gain=math.sqrt(0.5) if name.endswith(ATTENTION_PROJECTIONS) else 1.0,
            )
            nn.init.zeros_(module.bias)
        elif name.endswith("gateway.gate"):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    for block in (*getattr(core, "encoder_input_proj", ()), *core.decoder_input_proj):
        if isinstance(block, nn.Sequential) and len(block):
            nn.init.xavier_uniform_(block[0].weight)
    for module in (core.enc_output[0], *core.decoder.query_pos_head.layers):
        nn.init.xavier_uniform_(module.weight)
    for head in (core.enc_score_head, *core.decoder.class_embed):
        start_at_prior_(head)
    for head in (core.enc_bbox_head, *core.decoder.bbox_embed):
        start_at_zero_(head)
    if hasattr(core, "denoising_class_embed"):
        nn.init.normal_(core.denoising_class_embed.weight)
    if hasattr(core.decoder, "pre_bbox_head"):
        _initialise_refinement_(core.decoder)


def _initialise_refinement_(decoder: nn.Module) -> None:
    """Draw the parts that only the decoders of D-FINE and DEIMv2 have."""
    start_at_zero_(decoder.pre_bbox_head)
    for quality in decoder.lqe_layers:
        start_at_zero_(quality.reg_conf)
    for layer in decoder.layers:
        for module in layer.mlp.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if hasattr(layer.mlp, "gate_proj"):  # SwiGLU, of DEIMv2
                    nn.init.zeros_(module.bias)
