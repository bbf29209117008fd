"""Heads with prototypes, and features of boxes and union boxes, against numbers of their own code.

`data/relation_heads` holds outputs on small random weights and inputs that it holds too: `prototypes.npz` of
VL-Group/PENET (9c9f507), Maelic/SGG-Benchmark (a664201) and hesedjds/SQUAT (bd2e21c), `union.npz` of the feature
extractors of Scene-Graph-Benchmark (6f75881); all MIT.
"""

import numpy as np
import pytest
import torch
from scene_graph_data import arrays, part, renamed
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import LevelMapper

from toolkit.detectors.faster_rcnn.build import WholePixelPool
from toolkit.detectors.scene_graphs.frequency import class_balanced_weights, log_prior
from toolkit.detectors.scene_graphs.heads import HeadSizes, build_relation_head
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch, mean
from toolkit.detectors.scene_graphs.union import AllLevelsPool, UnionFeatures

NAMES = [  # of PE-Net and REACT -> ours, in order
    (r"post_emb", "split"), (r"obj_embed1", "embed_in"), (r"obj_embed", "embed_out"), (r"rel_embed", "predicate_embed"),
    (r"W_sub", "subject_word"), (r"W_obj", "object_word"), (r"W_pred", "predicate_word"), (r"gate_sub", "subject_gate"),
    (r"gate_obj", "object_gate"), (r"gate_pred", "predicate_gate"), (r"vis2sem", "seen"), (r"project_head", "project"),
    (r"(linear|norm)_sub", r"subject_mix.\1"), (r"(linear|norm)_obj", r"object_mix.\1"),
    (r"(linear|norm)_rel_rep", r"pair_mix.\1"), (r"down_samp", "union"), (r"pos_embed", "position"),
    (r"out_obj", "object_out"), (r"lin_obj_cyx", "object_in"), (r"so_linear_layer", "join"),
    (r"layers\.1", "2"), (r"layers\.0", "0"),
]  # fmt: skip
REACT_PP = [  # of REACT++; its geometry bias changes nothing
    (r"vis_proj", "split"), (r"(obj|rel)_lift", r"\1_word"), (r"rel_(word|embed)", r"predicate_\1"),
    (r"obj_word", "class_word"), (r"obj_embed", "embed_out"), (r"sub_sem_attn", "subject_attention"),
    (r"obj_sem_attn", "object_attention"), (r"vis_sem_norm", "seen_norm"), (r"sub_(ffn|norm)", r"subject_\1"),
    (r"obj_(ffn|norm)", r"object_\1"), (r"compose_", "pair_"), (r"(subject|object|pair)_ffn", r"\1_mix.layers"),
    (r"(subject|object|pair)_norm", r"\1_mix.norm"), (r"union_attn", "union_attention"), (r"union_proj", "union"),
    (r"(attention\.|layers\.|word\.)(\w+)_proj", r"\1\2"), (r"attention\.q\b", "attention.query"),
    (r"attention\.k\b", "attention.key"), (r"attention\.v\b", "attention.value"), (r"proj_head", "project"),
    (r"proto_weight", "prototypes.weight"), (r"proto_ema.protos", "prototypes.means"),
    (r"proto_ema", "prototypes"), (r"\bscale", "weight"),
]  # fmt: skip
SQUAT = [
    (r"(context_layer|pairwise_feature_extractor|m2m_decoder)\.", ""), (r"obj_embed_on_prob_dist", "embed_in"),
    (r"obj_embed_on_pred_label", "embed_out"), (r"pairwise_obj_feat_updim_fc", "split"), (r"pos_embed", "position"),
    (r"spt_emb", "positions"), (r"pairwise_rel_feat_finalize_fc\.0", "join"), (r"obj_hidden_linear", "object_in"),
    (r"obj_feat_aug_finalize_fc\.0", "objects"), (r"self_attn_node", "among_objects"), (r"self_attn", "among_pairs"),
    (r"multihead_attn_e2e", "to_pairs"), (r"multihead_attn_e2n", "to_objects"), (r"linear1", "inner.0"),
    (r"linear2", "inner.3"), (r"norm1_unary", "object_norm"), (r"norm1", "pair_norm"), (r"norm2", "seen_norm"),
    (r"norm3", "out_norm"), (r"rel_classifier", "out"), (r"mask_predictor_", "scores."), (r"layer1", "first"),
    (r"mask_predictor", "scores.query"), (r"layer2", "last"), (r"freq_bias\.obj_baseline", "frequency.table"),
]  # fmt: skip
UNION_NAMES = [("feature_extractor.pooler.reduce_channel.0", "pool.reduce"), ("feature_extractor", "head"),
               ("spatial_fc", "spatial"), ("rect_conv", "rectangles.conv")]  # fmt: skip
CHANNELS, WIDTH = 2, 6


def load_original(module: torch.nn.Module, state: dict, names) -> None:
    """Every weight and buffer of ours has one in the original but the counters of batch norms."""
    ours, own = renamed(state, names), module.state_dict()
    assert ours.keys() <= own.keys()
    module.load_state_dict({key: value if "num_batches" in key else ours[key] for key, value in own.items()})


@pytest.mark.parametrize(("name", "mode"), [("penet", "predcls"), ("penet", "sgcls"), ("penet", "sgdet"),
                                            ("react", "predcls"), ("react_pp", "predcls"), ("squat", "predcls"),
                                            ("squat", "sgcls")])  # fmt: skip
def test_heads_give_the_numbers_of_their_originals(name, mode):
    """REACT and REACT++ take the detector's labels in every mode: the same numbers."""
    data = arrays("prototypes")
    union = data[f"union/{name}"]
    sizes = HeadSizes(5, 13, roi_dim=7, union_dim=union.shape[1], hidden_dim=4, pooling_dim=6, embed_dim=3)
    head = build_relation_head(name, mode, sizes, torch.zeros(5, 5, 13), dim=8, dropout=0.0)
    state = part(data, f"{name}/state/")
    state = {key: value for key, value in state.items() if not key.startswith("linear_pred") and "rope" not in key}
    load_original(head, state, {"react_pp": REACT_PP, "squat": SQUAT}.get(name, NAMES))
    fields = ("boxes", "sizes_hw", "num_objects", "pairs", "num_pairs", "roi_features", "labels", "logits",
              "boxes_per_class", "relation_labels", "related")  # fmt: skip
    given = {key: data[key].tolist() if key.startswith("num") else data[key] for key in fields}
    batch = RelationBatch(boxes_xyxy=given.pop("boxes"), union_features=union, **given)
    for when in ("eval", "train", "after"):
        expected = part(data, f"{name}/{mode}/{when}/")
        if not expected:  # nothing moves in training
            continue
        with torch.no_grad():
            output = head.train(when == "train")(batch)
        found = {"object_logits": output.object_logits, "relation_logits": output.relation_logits}
        found |= {key: mean(sums.sum(), counts.sum()) for key, (sums, counts) in output.extra_losses.items()}
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-4)


def test_effective_numbers_weigh_rare_predicates():
    counts = np.zeros((2, 2, 5), np.int64)
    counts[0, 1] = [900, 1000, 100, 1, 0]
    weights = class_balanced_weights(counts, 0.99).double()
    effective = torch.tensor([(1 - 0.99**n) / (1 - 0.99) for n in (1000, 100, 1)])
    torch.testing.assert_close(weights[1:4] * effective, (weights[1] * effective[0]).expand(3), rtol=1e-4, atol=0)
    assert weights[0] == weights[4] == 1
    assert float((weights[1:4] * torch.tensor([1000, 100, 1])).sum()) == pytest.approx(1101, rel=1e-5)
    prior = log_prior(torch.from_numpy(counts))
    assert prior[0] == 0 and prior[1] > prior[2] > prior[3] == prior[4] and prior.isfinite().all()
    torch.testing.assert_close(prior[1:].exp().sum(), torch.tensor(1.0))


def whole_pixel_pool() -> WholePixelPool:
    pool = MultiScaleRoIAlign(list("0123"), output_size=7, sampling_ratio=2)
    pool.scales, pool.map_levels = [1 / 4, 1 / 8, 1 / 16, 1 / 32], LevelMapper(2, 5)
    return WholePixelPool(pool)


def test_features_of_boxes_and_of_union_boxes():
    data = arrays("union")
    maps = {str(level): data[f"map/{level}"] for level in range(4)}
    boxes = data["boxes_last_pixel"] + torch.tensor([0.0, 0, 1, 1])  # ends behind the last pixel
    head = TwoMLPHead(CHANNELS * 49, WIDTH)
    load_original(head, part(data, "box/state/"), ())
    of_images = list(boxes.split(data["num_objects"].tolist()))
    found = {"box/features": head(whole_pixel_pool()(dict(maps), of_images, data["sizes_hw"].tolist()))}
    for name in ("all", "separate"):
        pool, head = AllLevelsPool(whole_pixel_pool(), CHANNELS), TwoMLPHead(CHANNELS * 49, WIDTH)
        union = UnionFeatures(pool, head, CHANNELS, separate_spatial=WIDTH if name == "separate" else 0).eval()
        load_original(union, part(data, f"{name}/state/"), UNION_NAMES)
        features, spatial = union(maps, boxes, data["pairs"], data["num_pairs"].tolist(), data["sizes_hw"])
        found |= {f"{name}/features": features, f"{name}/spatial": spatial}
    assert found.pop("all/spatial") is None
    for key, value in found.items():
        torch.testing.assert_close(value.detach(), data[key], rtol=1e-4, atol=1e-5, msg=key)
    assert pool(maps, [torch.zeros(0, 4)], [(128, 128)]).shape == (0, CHANNELS, 7, 7), "no pairs"
