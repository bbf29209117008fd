"""Our relation heads with the weights and inputs of the reference files, for test_sgg.py."""

import numpy as np
import torch
from golden_files import Arrays, Tensors, group, tensors
from torch import Tensor

from toolkit.detectors.scene_graphs.heads import HeadSizes, build_relation_head
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch
from toolkit.detectors.scene_graphs.weights_scene_graph_benchmark import our_name, transformer_options

# head: a weight, and its axis that has the size
HIDDEN_OF = {"imp": ("context_layer.obj_unary.weight", 0)}
POOLED_OF = {
    "imp": ("context_layer.edge_unary.weight", 1),
    "transformer": ("rel_compress.weight", 1),
    "motif": ("rel_compress.weight", 1),
}


def head_sizes(head: str, data: Arrays) -> HeadSizes:
    given = group(data, "in")
    state = group(data, "state")
    num_classes, _, num_predicates = given["pred_dist"].shape
    hidden, hidden_axis = HIDDEN_OF.get(head, ("post_emb.weight", 1))
    pooled, pooled_axis = POOLED_OF.get(head, ("ctx_compress.weight", 1))
    return HeadSizes(
        num_classes,
        num_predicates,
        roi_dim=given["roi_features"].shape[1],
        union_dim=given["union_features"].shape[1],
        hidden_dim=state[hidden].shape[hidden_axis],
        pooling_dim=state[pooled].shape[pooled_axis],
        embed_dim=given["word_vectors_start_then_classes"].shape[1],
    )


def head_options(head: str, kind: str, state: Arrays) -> dict:
    options = {}
    if kind == "causal":
        _, context, fusion = head.split("_")
        options["context"] = context
        options["fusion"] = fusion
        options["use_positions"] = any("spt_emb" in name for name in state)
    if kind == "transformer":
        queries = [value for name, value in state.items() if name.endswith("w_qs.weight")]
        options = transformer_options(state, len(queries[0]) // 2)
    if kind != "imp":
        options["dropout"] = 0.0
    if kind in ("motifs", "transformer", "causal"):
        options["nms_threshold"] = 0.5
    return options


def build_head(head: str, mode: str, data: Arrays) -> torch.nn.Module:
    state = group(data, "state")
    kind = {"motif": "motifs"}.get(head, head.split("_")[0])
    frequencies = torch.from_numpy(data["in.pred_dist"])
    options = head_options(head, kind, state)
    module = build_relation_head(
        kind,
        mode,
        head_sizes(head, data),
        frequencies,
        **options,
    )
    own = module.state_dict()
    mapped = {}
    for original, value in state.items():
        name = our_name(head, original)
        if name is None:
            continue
        assert name in own, f"{name} is not a name of ours"
        shape = own[name].shape
        mapped[name] = torch.from_numpy(value).reshape(shape)  # Conv1d of width 1 -> Linear
    module.load_state_dict(mapped)
    return module


def head_batch(
    data: Arrays,
    mode: str,
    image: int | None = None,
    train: bool = False,
) -> RelationBatch:
    """All images, or one."""
    given = tensors(group(data, "in"))
    counts = given["num_objs"].tolist()
    pair_counts = given["num_rels"].tolist()
    chosen = list(range(len(counts))) if image is None else [image]

    def rows(key: str, lengths: list[int]) -> Tensor:
        parts = given[key].split(lengths)
        return torch.cat([parts[i] for i in chosen])

    counts_kept = [counts[i] for i in chosen]
    starts = np.cumsum([0, *counts_kept])
    pairs = given["rel_pair_idxs"].split(pair_counts)
    shifted = [pairs[i] + start for i, start in zip(chosen, starts, strict=False)]
    width = max(counts_kept)
    related = [related_objects(given, i, width) for i in chosen]
    given_labels = mode == "predcls"
    return RelationBatch(
        boxes_xyxy=rows("boxes", counts),
        sizes_hw=given["image_size_wh"].flip(1)[chosen],
        num_objects=counts_kept,
        pairs=torch.cat(shifted).long(),
        num_pairs=[pair_counts[i] for i in chosen],
        roi_features=rows("roi_features", counts),
        union_features=rows("union_features", pair_counts),
        labels=rows("labels", counts) if train or given_labels else None,
        logits=None if given_labels else rows("predict_logits", counts),
        boxes_per_class=rows("boxes_per_cls", counts) if mode == "sgdet" else None,
        relation_labels=rows("rel_labels", pair_counts) if train else None,
        related=torch.cat(related) if train else None,
    )


def related_objects(given: Tensors, image: int, width: int) -> Tensor:
    """(n, width) what relation sampling says about the image."""
    counts = given["num_objs"].tolist()
    pair_counts = given["num_rels"].tolist()
    pairs = given["rel_pair_idxs"].split(pair_counts)[image]
    labels = given["rel_labels"].split(pair_counts)[image]
    related = torch.zeros(counts[image], width, dtype=torch.bool)
    for subject, obj in pairs[labels > 0].tolist():
        related[subject, obj] = True
        related[obj, subject] = True
    return related
