"""fundamentalvision/Deformable-DETR: plain, with box refinement, and two-stage, as `deformable_detr`."""

from collections.abc import Mapping

from torch import Tensor

from toolkit.errors import BadInput
from toolkit.models.weights import detr
from toolkit.models.weights.class_names import named
from toolkit.models.weights.names import Description, Pairs, renamed, split_attention, without

LAYER: Pairs = [("linear1", "mlp.fc1"), ("linear2", "mlp.fc2"), ("self_attn.out_proj", "self_attn.o_proj"),
                ("cross_attn", "encoder_attn")]  # fmt: skip
# Its decoder layer attends to the image first, but `norm1` is the norm after that, `norm2` the one after the queries.
DECODER_NORMS = [("norm1", "encoder_attn_layer_norm"), ("norm2", "self_attn_layer_norm"), ("norm3", "final_layer_norm")]
NAMES: Pairs = [
    ("backbone.0.body", "model.model.backbone.model"), ("input_proj", "model.model.input_proj"),
    *detr.below("transformer.encoder.layers.*", "model.model.encoder.layers.*", [*LAYER, *detr.ENCODER_NORMS]),
    *detr.below("transformer.decoder.layers.*", "model.model.decoder.layers.*", [*LAYER, *DECODER_NORMS]),
    ("query_embed", "model.model.query_position_embeddings"), ("transformer", "model.model"),
    ("class_embed", "model.class_embed"), ("bbox_embed", "model.bbox_embed"),
]  # fmt: skip


def recognised(state: Mapping[str, Tensor]) -> bool:
    """Whether these are its names."""
    return "transformer.encoder.layers.0.self_attn.sampling_offsets.weight" in state and "class_embed.0.weight" in state


def described(state: Mapping[str, Tensor], file: str) -> Description:
    """The detector that these tensors are of.

    Raises:
        BadInput: one with a single feature level.
    """
    levels = len(state["transformer.level_embed"])
    if levels != 4:
        raise BadInput(f"model.pretrained {file}: a Deformable DETR with {levels} feature level(s); deformable_detr "
                       "here has four: take one without `single_scale` in its name")  # fmt: skip
    options = detr.sizes(state)
    if "transformer.enc_output.weight" in state:
        options["box_refine"] = "two_stage"
    else:
        options["num_queries"] = len(state["query_embed.weight"])
        options["box_refine"] = "iterative" if "transformer.decoder.bbox_embed.0.layers.0.weight" in state else "none"
    return Description("deformable_detr", options, named(len(state["class_embed.0.weight"])))


def ours_from(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    return renamed(split_attention(without(state, r"num_batches_tracked$")), NAMES)
