"""Weights of facebookresearch/detr and its successors Conditional, DAB and Deformable DETR: `detr-r50-*.pth`,
`ConditionalDETR_r50dc5.pth`, the `checkpoint.pth` of DAB-DETR-R50, `r50_deformable_detr*.pth` and so on.

The number of attention heads cannot be read from the tensors; 8 are assumed, as published.
"""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from toolkit.base.errors import BadInput
from toolkit.models.weights.names import (
    Description,
    IncompleteWeights,
    Pairs,
    Publisher,
    class_names_for,
    count_parts,
    pairs,
    required,
    required_count,
    resnet_name,
)

FEED_FORWARD = "linear1 mlp.fc1, linear2 mlp.fc2, self_attn.out_proj self_attn.o_proj"
ENCODER_LAYER = f"{FEED_FORWARD}, norm1 self_attn_layer_norm, norm2 final_layer_norm"
DECODER_NORMS = "norm1 self_attn_layer_norm, norm2 encoder_attn_layer_norm, norm3 final_layer_norm"


def _name_pairs(decoder_layer: str, others: str = "", encoder_layer: str = ENCODER_LAYER) -> Pairs:
    """Return the tables of names of a whole detector: in layers, and others, which go before those shared by all."""
    return [
        *pairs(encoder_layer, below=[("transformer.encoder.layers.*.", "model.model.encoder.layers.*.")]),
        *pairs(decoder_layer, below=[("transformer.decoder.layers.*.", "model.model.decoder.layers.*.")]),
        *pairs(others),
        *pairs("""
            backbone.0.body model.model.backbone.model, input_proj model.model.input_projection
            query_embed model.model.query_position_embeddings
            class_embed model.class_labels_classifier, bbox_embed model.bbox_predictor
            transformer.encoder.norm model.model.encoder.layernorm
            transformer.decoder.norm model.model.decoder.layernorm, transformer model.model
        """),
    ]


def _projections(self_attention: str, cross_attention: str, ours: str) -> str:
    """Return the attention table of the decoders of Conditional and DAB-DETR, which separate content and position."""
    words = list(zip("qcontent qpos kcontent kpos v qpos_sine".split(), ours.split(), strict=True))
    attentions = (("sa", self_attention), ("ca", cross_attention))
    return ", ".join(f"{short}_{a}_proj {prefix}{b}_proj" for short, prefix in attentions for a, b in words)


def _sizes(state: Mapping[str, Tensor]) -> dict:
    """Return backbone, widths and depths."""
    first = required(state, "transformer.encoder.layers.0.linear1.weight", 2)
    backbone = resnet_name(state, "backbone.0.body.")
    if backbone is None:
        raise IncompleteWeights("has no whole ResNet of 18, 34, 50, 101 or 152 layers below backbone.0.body")
    return {
        "backbone": backbone,
        "d_model": first.shape[1],
        "ffn_dim": len(first),
        "encoder_layers": count_parts(state, "transformer.encoder.layers"),
        "decoder_layers": required_count(state, "transformer.decoder.layers"),
    }


def _maybe_dc5(
    architecture: str,
    state: Mapping[str, Tensor],
    file: str,
    *,
    queries: str = "query_embed",
    no_object: int = 0,
) -> list[Description]:
    """Describe a detector; DC5 has the same tensors and is recognised by the name of the file."""
    options = {
        **_sizes(state),
        "dilation": "dc5" in file.lower(),
        "num_queries": len(required(state, f"{queries}.weight", 2)),
    }
    notes = ["the file name decides whether it is a DC5 variant: --model.dilation says otherwise"]
    classes = class_names_for(len(required(state, "class_embed.weight", 2)) - no_object)
    return [Description(architecture, options, classes, notes)]


# ---------------------------------------------------------------- DETR


def _detr(state: Mapping[str, Tensor], file: str) -> list[Description]:
    (description,) = _maybe_dc5("detr", state, file, no_object=1)
    if "backbone.1.row_embed.weight" in state:
        description.options["position_embedding"] = "learned"
    if "transformer.encoder.norm.weight" in state:
        description.options["pre_norm"] = True
    return [description]


ATTENTION = "multihead_attn.out_proj encoder_attn.o_proj, multihead_attn encoder_attn"
DETR = Publisher(
    "facebookresearch/detr",
    _detr,
    ("query_embed.weight", "transformer.decoder.layers.0.multihead_attn.in_proj_weight"),
    _name_pairs(f"{FEED_FORWARD}, {ATTENTION}, {DECODER_NORMS}"),
)

# ---------------------------------------------------------------- Conditional DETR

CONDITIONAL_ATTENTION = _projections("self_attn.", "encoder_attn.", "q_content q_pos k_content k_pos v q_pos_sine")
CONDITIONAL_DETR = Publisher(
    "Conditional DETR",
    partial(_maybe_dc5, "conditional_detr"),
    ("query_embed.weight", "transformer.decoder.layers.0.sa_qcontent_proj.weight"),
    _name_pairs(f"{CONDITIONAL_ATTENTION}, {FEED_FORWARD}, cross_attn.out_proj encoder_attn.o_proj, {DECODER_NORMS}"),
)

# ---------------------------------------------------------------- DAB-DETR


def _dab_detr(state: Mapping[str, Tensor], file: str) -> list[Description]:
    if "transformer.patterns.weight" in state:
        raise BadInput(
            f"model.pretrained {file}: a DAB-DETR with several patterns for each query, which dab-detr does not have; "
            "take the one without"
        )
    return _maybe_dc5("dab-detr", state, file, queries="refpoint_embed")


DAB_ATTENTION = _projections(
    "self_attn.self_attn_", "cross_attn.cross_attn_", "query_content query_pos key_content key_pos value query_pos_sine"
)
DAB_OTHERS = """
    self_attn.out_proj self_attn.self_attn.output_proj, cross_attn.out_proj cross_attn.cross_attn.output_proj
    norm1 self_attn.self_attn_layer_norm, norm2 cross_attn.cross_attn_layer_norm, norm3 mlp.final_layer_norm
    linear1 mlp.fc1, linear2 mlp.fc2, activation mlp.activation_fn
"""
DAB_BESIDE = """
    backbone.0.body model.model.backbone.conv_encoder.model._backbone
    class_embed model.class_embed, refpoint_embed model.model.query_refpoint_embeddings
"""
DAB_ENCODER = "linear1 fc1, linear2 fc2, activation activation_fn, norm1 self_attn_layer_norm, norm2 final_layer_norm"
DAB_DETR = Publisher(
    "DAB-DETR",
    _dab_detr,
    ("refpoint_embed.weight", "transformer.decoder.layers.0.sa_qcontent_proj.weight"),
    _name_pairs(f"{DAB_ATTENTION}, {DAB_OTHERS}", DAB_BESIDE, DAB_ENCODER),
)

# ---------------------------------------------------------------- Deformable DETR


def _deformable_detr(state: Mapping[str, Tensor], file: str) -> list[Description]:
    levels = len(required(state, "transformer.level_embed", 2))
    if levels != 4:
        raise BadInput(
            f"model.pretrained {file}: a Deformable DETR with {levels} feature level(s); deformable_detr here has "
            "four: take one without `single_scale` in its name"
        )
    options = _sizes(state)
    if "transformer.enc_output.weight" in state:
        options["box_refine"] = "two_stage"
    else:
        options["num_queries"] = len(required(state, "query_embed.weight", 2))
        options["box_refine"] = "iterative" if "transformer.decoder.bbox_embed.0.layers.0.weight" in state else "none"
    classes = class_names_for(len(required(state, "class_embed.0.weight", 2)))
    return [Description("deformable_detr", options, classes)]


# Its decoder layer attends to the image first, but `norm1` is the norm after that, `norm2` the one after the queries.
DEFORMABLE_NORMS = "norm1 encoder_attn_layer_norm, norm2 self_attn_layer_norm, norm3 final_layer_norm"
DEFORMABLE_DETR = Publisher(
    "Deformable DETR",
    _deformable_detr,
    ("transformer.encoder.layers.0.self_attn.sampling_offsets.weight", "class_embed.0.weight"),
    _name_pairs(
        f"{FEED_FORWARD}, cross_attn encoder_attn, {DEFORMABLE_NORMS}",
        "input_proj model.model.input_proj, class_embed model.class_embed, bbox_embed model.bbox_embed",
    ),
)
