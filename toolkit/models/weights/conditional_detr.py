"""Atten4Vis/ConditionalDETR: `ConditionalDETR_r50dc5.pth` and so on, as the architecture `conditional_detr`."""

from collections.abc import Mapping

from torch import Tensor

from toolkit.models.weights import detr
from toolkit.models.weights.class_names import named
from toolkit.models.weights.names import Description, Pairs, renamed, split_attention, without

PROJECTIONS: Pairs = [
    *((f"sa_{theirs}_proj", f"self_attn.{ours}_proj") for theirs, ours in
      (("qcontent", "q_content"), ("qpos", "q_pos"), ("kcontent", "k_content"), ("kpos", "k_pos"), ("v", "v"))),
    *((f"ca_{theirs}_proj", f"encoder_attn.{ours}_proj") for theirs, ours in
      (("qcontent", "q_content"), ("qpos", "q_pos"), ("kcontent", "k_content"), ("kpos", "k_pos"), ("v", "v"),
       ("qpos_sine", "q_pos_sine"))),
]  # fmt: skip
DECODER_LAYER = [*PROJECTIONS, ("cross_attn.out_proj", "encoder_attn.o_proj"),
                 ("self_attn.out_proj", "self_attn.o_proj"), ("linear1", "mlp.fc1"), ("linear2", "mlp.fc2"),
                 *detr.DECODER_NORMS]  # fmt: skip
NAMES: Pairs = [
    *detr.BACKBONE, *detr.ENCODER,
    *detr.below("transformer.decoder.layers.*", "model.model.decoder.layers.*", DECODER_LAYER),
    ("transformer.decoder.norm", "model.model.decoder.layernorm"), ("transformer.decoder", "model.model.decoder"),
    ("transformer.encoder", "model.model.encoder"), ("class_embed", "model.class_labels_classifier"),
    ("bbox_embed", "model.bbox_predictor"), ("query_embed", "model.model.query_position_embeddings"),
]  # fmt: skip


def recognised(state: Mapping[str, Tensor]) -> bool:
    """Whether these are its names."""
    return "query_embed.weight" in state and "transformer.decoder.layers.0.sa_qcontent_proj.weight" in state


def described(state: Mapping[str, Tensor], file: str) -> Description:
    """The detector that these tensors are of; DC5 has the same tensors and is told by the name of the file."""
    options = detr.sizes(state) | {"dilation": "dc5" in file.lower(), "num_queries": len(state["query_embed.weight"])}
    notes = ["whether it is a DC5 variant was told by the name of the file: --model.dilation says otherwise"]
    return Description("conditional_detr", options, named(len(state["class_embed.weight"])), notes)


def ours_from(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors under our names."""
    return renamed(split_attention(without(state, r"num_batches_tracked$")), NAMES)
