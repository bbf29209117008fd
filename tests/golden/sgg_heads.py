"""Our relation heads with the weights and inputs of the reference files, for test_sgg.py."""

import numpy as np
import torch
from golden_files import group, tensors

from toolkit.detectors.scene_graphs.heads import HeadSizes, build_relation_head
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch
from toolkit.detectors.scene_graphs.weights_scene_graph_benchmark import our_name, transformer_options


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


def build_head(head: str, mode: str, data: dict[str, np.ndarray]) -> torch.nn.Module:
    given, state = tensors(group(data, "in")), group(data, "state")
    kind, options = {"motif": "motifs"}.get(head, head.split("_")[0]), {}
    if kind == "causal":
        _, context, fusion = head.split("_")
        options = {"context": context, "fusion": fusion, "use_positions": any("spt_emb" in k for k in state)}
    if kind == "transformer":
        options = transformer_options(state, len(next(v for k, v in state.items() if k.endswith("w_qs.weight"))) // 2)
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
