"""Our relation heads with the weights and inputs of the reference files, for test_sgg.py."""

import re

import numpy as np
import torch
from golden_files import group, tensors

from toolkit.scene_graphs.batch import RelationBatch
from toolkit.scene_graphs.heads import HeadSizes, build_relation_head

DEAD = ["untreated_conv_spt", "avg_post_ctx", "untreated_feat"]  # buffers that nothing reads
DEAD_UNLESS_VTRANSE = "context_layer.untreated_obj_feat"
NAMES = [  # of the original -> ours, applied in order to "<head>:<name>"
    (r"context_layer\.untreated_dcd_feat", "context.mean_decoder_input.value"),
    (r"context_layer\.untreated_obj_feat", "context.mean_object_input.value"),
    (r"context_layer\.untreated_edg_feat", "context.mean_edge_input.value"),
    (r"untreated_spt", "mean_positions.value"),
    (r"context_layer\.(obj_fc)", "object_out"),
    (r"context_layer\.(rel_fc)", "pair_out"),
    (r"context_layer\.obj_unary", "object_in"),
    (r"context_layer\.edge_unary", "pair_in"),
    (r"context_layer\.node_gru", "object_gru"),
    (r"context_layer\.edge_gru", "pair_gru"),
    (r"context_layer\.sub_vert_w_fc\.0", "from_subject"),
    (r"context_layer\.obj_vert_w_fc\.0", "from_object"),
    (r"context_layer\.out_edge_w_fc\.0", "to_subject"),
    (r"context_layer\.in_edge_w_fc\.0", "to_object"),
    (r"transformer:context_layer\.", "transformer:"),
    (r"context_layer\.", "context."),
    (r"context_obj\.layer_stack", "object_encoder"),
    (r"context_edge\.layer_stack", "edge_encoder"),
    (r"slf_attn\.w_qs", "query"),
    (r"slf_attn\.w_ks", "key"),
    (r"slf_attn\.w_vs", "value"),
    (r"slf_attn\.fc", "out"),
    (r"slf_attn\.layer_norm", "attention_norm"),
    (r"pos_ffn\.w_1", "inner_in"),
    (r"pos_ffn\.w_2", "inner_out"),
    (r"pos_ffn\.layer_norm", "inner_norm"),
    (r"obj_embed1", "embed_in"),
    (r"obj_embed2", "embed_out"),
    (r"bbox_embed|pos_embed", "position"),
    (r"lin_obj_h", "object_out"),
    (r"lin_edge_h", "edge_out"),
    (r"lin_obj", "object_in"),
    (r"lin_edge", "edge_in"),
    (r"decoder_rnn\.obj_embed", "decoder.embed"),
    (r"decoder_rnn\.decoderLSTM\.px", "decoder.lstm.direct"),
    (r"decoder_rnn\.decoderLSTM\.iofux", "decoder.lstm.input"),
    (r"decoder_rnn\.decoderLSTM\.iofuh", "decoder.lstm.state"),
    (r"decoder_rnn\.decoderLSTM\..*", "-"),  # the shared embedding and output, listed a second time
    (r"decoder_rnn\.input_linearity", "decoder.input"),
    (r"decoder_rnn\.state_linearity", "decoder.state"),
    (r"decoder_rnn\.out(_obj)?", "decoder.out"),
    (r"out_obj", "object_out"),
    (r"(obj|edge)_ctx_rnn\.multi_layer_lstm\.0\.treeLSTM_foreward\.treeLSTM", r"\1_lstm.up"),
    (r"(obj|edge)_ctx_rnn\.multi_layer_lstm\.0\.treeLSTM_backward\.treeLSTM", r"\1_lstm.down"),
    (r"\.px\.", ".direct."),
    (r"\.(ioffux|iofux)\.", ".input."),
    (r"\.ioffuh_(left|right)\.", r".\1."),
    (r"\.iofuh\.", ".state."),
    (r"obj_lstm|obj_ctx_rnn", "object_lstm"),
    (r"edge_ctx_rnn", "edge_lstm"),
    (r"context\.bi_freq_prior", "context.scores.prior"),
    (r"context\.overlap_embed", "context.scores.overlap"),
    (r"context\.box_embed", "context.scores.box"),
    (r"context\.obj_reduce", "context.scores.roi"),
    (r"context\.emb_reduce", "context.scores.word"),
    (r"context\.score_pre", "context.scores.joined"),
    (r"context\.score_sub", "context.scores.subject"),
    (r"context\.score_obj", "context.scores.object"),
    (r"context\.vision_prior", "context.scores.vision"),
    (r"context\.pred_layer", "context.object_out"),
    (r"context\.fc_layer", "context.edge_out"),
    (r"post_emb", "split"),
    (r"post_cat(\.0)?", "join"),
    (r"spt_emb", "positions"),
    (r"ctx_gate_fc", "gate"),
    (r"vis_compress", "visual_out"),
    (r"(causal\w*|transformer):ctx_compress", r"\1:context_out"),
    (r"transformer:rel_compress", "transformer:visual_out"),
    (r"ctx_compress|rel_compress", "out"),
    (r"freq_bias\.obj_baseline", "frequency.table"),
    (r"up_dim", "union"),
]


def our_name(head: str, name: str) -> str | None:
    """None for what we do not have: buffers that nothing reads, and shared parameters listed twice."""
    if name in DEAD or (name == DEAD_UNLESS_VTRANSE and "vtranse" not in head):
        return None
    name = f"{head}:{name}"
    for pattern, ours in NAMES:
        name = re.sub(pattern, ours, name)
    name = name.split(":", 1)[1]
    return None if name.endswith("-") else name


def head_sizes(head: str, data: dict[str, np.ndarray]) -> HeadSizes:
    given, state = group(data, "in"), group(data, "state")
    num_classes, _, num_predicates = given["pred_dist"].shape
    hidden_of = {"imp": ("context_layer.obj_unary.weight", 0)}
    name, axis = hidden_of.get(head, ("post_emb.weight", 1))
    pooling = {"imp": ("context_layer.edge_unary.weight", 1), "transformer": ("rel_compress.weight", 1)}
    pooled, pooled_axis = pooling.get(head, ("rel_compress.weight" if head == "motif" else "ctx_compress.weight", 1))
    sizes = {"roi_dim": given["roi_features"].shape[1], "union_dim": given["union_features"].shape[1]}
    sizes |= {"hidden_dim": state[name].shape[axis], "pooling_dim": state[pooled].shape[pooled_axis]}
    embed_dim = given["word_vectors_start_then_classes"].shape[1]
    return HeadSizes(num_classes, num_predicates, **sizes, embed_dim=embed_dim)


def transformer_options(state: dict[str, np.ndarray]) -> dict:
    layers = [k for k in state if k.endswith("slf_attn.w_qs.weight")]
    first = layers[0].removesuffix("w_qs.weight")
    heads = 2  # the only size that no shape tells
    inner = len(state[f"{layers[0].split('slf_attn')[0]}pos_ffn.w_1.weight"])
    parts = {"object_layers": sum("context_obj" in k for k in layers), "inner_dim": inner, "heads": heads}
    dims = {f"{name}_dim": len(state[f"{first}w_{name[0]}s.weight"]) // heads for name in ("key", "value")}
    return parts | dims | {"edge_layers": sum("context_edge" in k for k in layers)}


def build_head(head: str, mode: str, data: dict[str, np.ndarray]) -> torch.nn.Module:
    given, state = tensors(group(data, "in")), group(data, "state")
    kind, options = {"motif": "motifs"}.get(head, head.split("_")[0]), {}
    if kind == "causal":
        _, context, fusion = head.split("_")
        options = {"context": context, "fusion": fusion, "use_positions": any("spt_emb" in k for k in state)}
    if kind == "transformer":
        options = transformer_options(state)
    if kind != "imp":
        options |= {"dropout": 0.0}
    if kind in ("motifs", "transformer", "causal"):
        options |= {"nms_threshold": 0.5}
    module = build_relation_head(kind, mode, head_sizes(head, data), given["pred_dist"], **options)
    mapped = {our_name(head, name): torch.from_numpy(value) for name, value in state.items()}
    mapped.pop(None, None)
    own = module.state_dict()
    for name, value in mapped.items():
        assert name in own, f"{name} is not a name of ours"
        mapped[name] = value.reshape(own[name].shape)  # Conv1d of width 1 -> Linear
    module.load_state_dict(mapped)
    return module


def head_batch(data: dict[str, np.ndarray], mode: str, image: int | None = None, train: bool = False) -> RelationBatch:
    """All images, or one."""
    given = tensors(group(data, "in"))
    counts, pair_counts = given["num_objs"].tolist(), given["num_rels"].tolist()
    chosen = range(len(counts)) if image is None else [image]

    def rows(key: str, lengths: list[int]) -> torch.Tensor:
        parts = given[key].split(lengths)
        return torch.cat([parts[i] for i in chosen])

    counts_kept = [counts[i] for i in chosen]
    starts = np.cumsum([0, *counts_kept])
    pairs = [given["rel_pair_idxs"].split(pair_counts)[i] + start for i, start in zip(chosen, starts, strict=False)]
    related = [related_objects(given, i, max(counts_kept)) for i in chosen]
    return RelationBatch(
        boxes_xyxy=rows("boxes", counts),
        sizes_hw=given["image_size_wh"].flip(1)[list(chosen)],
        num_objects=counts_kept,
        pairs=torch.cat(pairs).long(),
        num_pairs=[pair_counts[i] for i in chosen],
        roi_features=rows("roi_features", counts),
        union_features=rows("union_features", pair_counts),
        labels=rows("labels", counts) if train or mode == "predcls" else None,
        logits=rows("predict_logits", counts) if mode != "predcls" else None,
        boxes_per_class=rows("boxes_per_cls", counts) if mode == "sgdet" else None,
        relation_labels=rows("rel_labels", pair_counts) if train else None,
        related=torch.cat(related) if train else None,
    )


def related_objects(given: dict[str, torch.Tensor], image: int, width: int) -> torch.Tensor:
    """(n, width) what relation sampling says about the image."""
    counts, pair_counts = given["num_objs"].tolist(), given["num_rels"].tolist()
    pairs = given["rel_pair_idxs"].split(pair_counts)[image]
    labels = given["rel_labels"].split(pair_counts)[image]
    related = torch.zeros(counts[image], width, dtype=torch.bool)
    for subject, obj in pairs[labels > 0].tolist():
        related[subject, obj] = related[obj, subject] = True
    return related
