"""IDEA-Research/DAB-DETR: the `checkpoint.pth` of DAB-DETR-R50 and DC5, as the architecture `dab-detr`."""

from collections.abc import Mapping

from torch import Tensor

from toolkit.errors import BadInput
from toolkit.models.weights import detr
from toolkit.models.weights.class_names import named
from toolkit.models.weights.names import Description, Pairs, renamed, split_attention, without

WORDS = {"qcontent": "query_content", "qpos": "query_pos", "kcontent": "key_content", "kpos": "key_pos", "v": "value",
         "qpos_sine": "query_pos_sine"}  # fmt: skip
DECODER_LAYER: Pairs = [
    *((f"sa_{a}_proj", f"self_attn.self_attn_{b}_proj") for a, b in WORDS.items()),
    *((f"ca_{a}_proj", f"cross_attn.cross_attn_{b}_proj") for a, b in WORDS.items()),
    ("self_attn.out_proj", "self_attn.self_attn.output_proj"),
    ("cross_attn.out_proj", "cross_attn.cross_attn.output_proj"), ("norm1", "self_attn.self_attn_layer_norm"),
    ("norm2", "cross_attn.cross_attn_layer_norm"), ("norm3", "mlp.final_layer_norm"), ("linear1", "mlp.fc1"),
    ("linear2", "mlp.fc2"), ("activation", "mlp.activation_fn"),
]  # fmt: skip
ENCODER_LAYER = [("self_attn", "self_attn"), ("linear1", "fc1"), ("linear2", "fc2"), ("activation", "activation_fn"),
                 *detr.ENCODER_NORMS]  # fmt: skip
NAMES: Pairs = [
    ("backbone.0.body", "model.model.backbone.conv_encoder.model._backbone"), detr.BACKBONE[1],
    *detr.below("transformer.encoder.layers.*", "model.model.encoder.layers.*", ENCODER_LAYER),
    *detr.below("transformer.decoder.layers.*", "model.model.decoder.layers.*", DECODER_LAYER),
    ("transformer.decoder.norm", "model.model.decoder.layernorm"), ("transformer.decoder", "model.model.decoder"),
    ("transformer.encoder", "model.model.encoder"), ("class_embed", "model.class_embed"),
    ("bbox_embed", "model.bbox_predictor"), ("refpoint_embed", "model.model.query_refpoint_embeddings"),
]  # fmt: skip


def recognised(state: Mapping[str, Tensor]) -> bool:
    """Whether these are its names."""
    return "refpoint_embed.weight" in state and "transformer.decoder.layers.0.sa_qcontent_proj.weight" in state


def described(state: Mapping[str, Tensor], file: str) -> Description:
    """The detector that these tensors are of.

    Raises:
        BadInput: one with several patterns for each query.
    """
    if "transformer.patterns.weight" in state:
        raise BadInput(f"model.pretrained {file}: a DAB-DETR with several patterns for each query, which dab-detr here "
                       "has not; take the one without")  # fmt: skip
    queries = len(state["refpoint_embed.weight"])
    options = detr.sizes(state) | {"dilation": "dc5" in file.lower(), "num_queries": queries}
    notes = ["whether it is a DC5 variant was told by the name of the file: --model.dilation says otherwise"]
    return Description("dab-detr", options, named(len(state["class_embed.weight"])), notes)


def ours_from(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    return renamed(split_attention(without(state, r"num_batches_tracked$")), NAMES)
