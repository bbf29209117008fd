"""facebookresearch/detr: `detr-r50-*.pth`, `detr-r101-*.pth` and their DC5 variants, as the architecture `detr`.

The number of attention heads cannot be read from the tensors; it is 8, as published.
"""

from collections.abc import Mapping

from torch import Tensor

from toolkit.models.weights.class_names import named
from toolkit.models.weights.names import Description, Pairs, count, renamed, resnet_name, split_attention, without

BACKBONE: Pairs = [("backbone.0.body", "model.model.backbone.model"), ("input_proj", "model.model.input_projection")]
LAYER = [("linear1", "mlp.fc1"), ("linear2", "mlp.fc2"), ("self_attn.out_proj", "self_attn.o_proj"),
         ("multihead_attn.out_proj", "encoder_attn.o_proj"), ("cross_attn.out_proj", "encoder_attn.o_proj"),
         ("multihead_attn", "encoder_attn")]  # fmt: skip
ENCODER_NORMS = [("norm1", "self_attn_layer_norm"), ("norm2", "final_layer_norm")]
DECODER_NORMS = [("norm1", "self_attn_layer_norm"), ("norm2", "encoder_attn_layer_norm"), ("norm3", "final_layer_norm")]


def below(theirs: str, ours: str, pairs: Pairs) -> Pairs:
    """The pairs with a prefix before each side."""
    return [(f"{theirs}.{a}", f"{ours}.{b}") for a, b in pairs]


ENCODER = below("transformer.encoder.layers.*", "model.model.encoder.layers.*", [*LAYER, *ENCODER_NORMS])
NAMES: Pairs = [
    *BACKBONE, *ENCODER,
    *below("transformer.decoder.layers.*", "model.model.decoder.layers.*", [*LAYER, *DECODER_NORMS]),
    ("transformer.decoder.norm", "model.model.decoder.layernorm"),
    ("transformer.decoder", "model.model.decoder"), ("transformer.encoder", "model.model.encoder"),
    ("class_embed", "model.class_labels_classifier"), ("bbox_embed", "model.bbox_predictor"),
    ("query_embed", "model.model.query_position_embeddings"),
]  # fmt: skip


def recognised(state: Mapping[str, Tensor]) -> bool:
    """Whether these are its names."""
    return "query_embed.weight" in state and "transformer.decoder.layers.0.multihead_attn.in_proj_weight" in state


def described(state: Mapping[str, Tensor], file: str) -> Description:
    """The detector that these tensors are of; DC5 has the same tensors and is told by the name of the file."""
    options = sizes(state) | {"dilation": "dc5" in file.lower()}
    options["num_queries"] = len(state["query_embed.weight"])
    if "backbone.1.row_embed.weight" in state:
        options["position_embedding"] = "learned"
    if "transformer.encoder.norm.weight" in state:
        options["pre_norm"] = True
    notes = ["whether it is a DC5 variant was told by the name of the file: --model.dilation says otherwise"]
    return Description("detr", options, named(len(state["class_embed.weight"]) - 1), notes)


def sizes(state: Mapping[str, Tensor]) -> dict:
    """Backbone, widths and depths of a DETR and its successors."""
    return {
        "backbone": resnet_name(state, "backbone.0.body."),
        "d_model": state["transformer.encoder.layers.0.linear1.weight"].shape[1],
        "ffn_dim": len(state["transformer.encoder.layers.0.linear1.weight"]),
        "encoder_layers": count(state, "transformer.encoder.layers"),
        "decoder_layers": count(state, "transformer.decoder.layers"),
    }


def ours_from(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    return renamed(split_attention(without(state, r"num_batches_tracked$")), NAMES)
