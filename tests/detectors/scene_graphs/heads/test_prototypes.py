"""Heads with prototypes, against numbers of their own code.

`relation_heads/prototypes.npz` holds what VL-Group/PENET (9c9f507), Maelic/SGG-Benchmark (a664201) and hesedjds/SQUAT
(bd2e21c), all MIT, give on small random weights and inputs that it holds too.
"""

import pytest
import torch
from scene_graph_data import arrays, load_original, part

from toolkit.detectors.scene_graphs.heads import HeadSizes, build_relation_head
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch, mean_or_zero

# Their names and ours, used one after the other.
PENET_AND_REACT = r"""
post_emb split
obj_embed1 embed_in
obj_embed embed_out
rel_embed predicate_embed
W_sub subject_word
W_obj object_word
W_pred predicate_word
gate_sub subject_gate
gate_obj object_gate
gate_pred predicate_gate
vis2sem seen
project_head project
(linear|norm)_sub subject_mix.\1
(linear|norm)_obj object_mix.\1
(linear|norm)_rel_rep pair_mix.\1
down_samp union
pos_embed position
out_obj object_out
lin_obj_cyx object_in
so_linear_layer join
layers\.1 2
layers\.0 0
"""
# The geometry bias of REACT++ changes nothing.
REACT_PP = r"""
vis_proj split
(obj|rel)_lift \1_word
rel_(word|embed) predicate_\1
obj_word class_word
obj_embed embed_out
sub_sem_attn subject_attention
obj_sem_attn object_attention
vis_sem_norm seen_norm
sub_(ffn|norm) subject_\1
obj_(ffn|norm) object_\1
compose_ pair_
(subject|object|pair)_ffn \1_mix.layers
(subject|object|pair)_norm \1_mix.norm
union_attn union_attention
union_proj union
(attention\.|layers\.|word\.)(\w+)_proj \1\2
attention\.q\b attention.query
attention\.k\b attention.key
attention\.v\b attention.value
proj_head project
proto_weight prototypes.weight
proto_ema.protos prototypes.means
proto_ema prototypes
\bscale weight
"""
SQUAT = r"""
(context_layer|pairwise_feature_extractor|m2m_decoder)\.
obj_embed_on_prob_dist embed_in
obj_embed_on_pred_label embed_out
pairwise_obj_feat_updim_fc split
pos_embed position
spt_emb positions
pairwise_rel_feat_finalize_fc\.0 join
obj_hidden_linear object_in
obj_feat_aug_finalize_fc\.0 objects
self_attn_node among_objects
self_attn among_pairs
multihead_attn_e2e to_pairs
multihead_attn_e2n to_objects
linear1 inner.0
linear2 inner.3
norm1_unary object_norm
norm1 pair_norm
norm2 seen_norm
norm3 out_norm
rel_classifier out
mask_predictor_ scores.
layer1 first
mask_predictor scores.query
layer2 last
freq_bias\.obj_baseline frequency.table
"""
NAMES = {"penet": PENET_AND_REACT, "react": PENET_AND_REACT, "react_pp": REACT_PP, "squat": SQUAT}
FIELDS = ("sizes_hw", "pairs", "roi_features", "labels", "logits", "boxes_per_class", "relation_labels", "related")
CASES = (
    "penet predcls",
    "penet sgcls",
    "penet sgdet",
    "react predcls",
    "react_pp predcls",
    "squat predcls",
    "squat sgcls",
)


def given_batch(data, name):
    columns = {field: data[field] for field in FIELDS}
    return RelationBatch(
        boxes_xyxy=data["boxes"],
        num_objects=data["num_objects"].tolist(),
        num_pairs=data["num_pairs"].tolist(),
        union_features=data[f"union/{name}"],
        **columns,
    )


@pytest.mark.parametrize("case", CASES)
def test_heads_give_the_numbers_of_their_originals(case):
    """REACT and REACT++ take the detector's labels in every mode: the same numbers."""
    name, mode = case.split()
    data = arrays("prototypes")
    batch = given_batch(data, name)
    width = batch.union_features.shape[1]
    sizes = HeadSizes(
        5,
        13,
        roi_dim=7,
        union_dim=width,
        hidden_dim=4,
        pooling_dim=6,
        embed_dim=3,
    )
    head = build_relation_head(
        name,
        mode,
        sizes,
        torch.zeros(5, 5, 13),
        dim=8,
        dropout=0.0,
    )
    state = part(data, f"{name}/state/")
    used = [key for key in state if not key.startswith("linear_pred") and "rope" not in key]
    load_original(head, {key: state[key] for key in used}, NAMES[name])
    for when in ("eval", "train", "after"):
        expected = part(data, f"{name}/{mode}/{when}/")
        if not expected:  # nothing moves in training
            continue
        with torch.no_grad():
            output = head.train(when == "train")(batch)
        found = {"object_logits": output.object_logits, "relation_logits": output.relation_logits}
        for key, (sums, counts) in output.extra_losses.items():
            found[key] = mean_or_zero(sums.sum(), counts.sum())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
