"""EGTR, the relation head on a DETR's decoder: against numbers of its own code, and as a detector of this toolkit.

`data/relation_heads/egtr.npz`: what naver-ai/egtr (7f87450, Apache-2.0) gives on small random weights and inputs that
it holds too: its Deformable DETR's decoder, its head, its matching, losses and gradients, its ranked pairs.
"""

import pytest
import torch
from contract import assert_losses_are_divided_as_announced, assert_resolved_options_build_it_again
from scene_graph_data import SIDE, arrays, cut_objects, loader_of, losses_of, part, renamed, shapes_table
from test_any_detector import FAST, HYBRID, SMALL
from transformers import DeformableDetrConfig, DeformableDetrModel

from toolkit.base.box_ops import cxcywh_to_xyxy, denormalize_boxes
from toolkit.base.errors import BadInput
from toolkit.detectors.detr.detr_criterion import MatchingCosts, pad_targets
from toolkit.detectors.scene_graphs.egtr import DETECTORS_BELOW, EgtrHead, kept_states
from toolkit.detectors.scene_graphs.egtr_criterion import (
    RelationSampling,
    count_entries,
    match_with_quality,
    relation_losses,
)
from toolkit.detectors.scene_graphs.evaluator import SceneGraphEvaluator
from toolkit.detectors.scene_graphs.options import EgtrOptions
from toolkit.detectors.scene_graphs.start import start_scene_graph
from toolkit.evaluation.coco import make_evaluator
from toolkit.models import build_detector
from toolkit.models.final import load_detector_folder

NAMES = [(r"proj_q", "query_projections"), (r"proj_k", "key_projections"), (r"final_sub_proj", "subject"),
         (r"final_obj_proj", "object"), (r"rel_predictor_gate", "gate"), (r"rel_predictor\.layers", "predicate"),
         (r"connectivity_layer\.layers", "connectivity"), (r"(predicate|connectivity)\.2", r"\1.4"),
         (r"(predicate|connectivity)\.1", r"\1.2"), (r"out_proj", "o_proj"), (r"\.(fc\d)", r".mlp.\1")]  # fmt: skip
COSTS, SAMPLING = MatchingCosts(2.0, 5.0, 2.0), RelationSampling(3, 4)


@pytest.fixture(scope="module")
def data():
    return arrays("egtr")


@pytest.fixture(scope="module")
def head(data):
    state = part(data, "state/")
    state = renamed({name: value for name, value in state.items() if not name.startswith("model.")}, NAMES)
    head = EgtrHead(32, 2, 4, 5)
    head.start_from(data["fg"][:-1, :-1])  # the original's last row and column are for "no class"
    assert state.keys() | {"log_frequency"} == head.state_dict().keys()
    head.load_state_dict(state | {"log_frequency": head.log_frequency})
    return head


@pytest.fixture(scope="module")
def states(data):
    """Of transformers' decoder with the original's weights: what `kept_states` takes from it."""
    backbone = {"model_type": "resnet", "depths": [1] * 4, "embedding_size": 4, "hidden_sizes": [4] * 4,
                "out_features": ["stage2", "stage3", "stage4"]}  # fmt: skip
    config = DeformableDetrConfig(
        d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_n_points=2, decoder_n_points=2, num_queries=6, dropout=0.0,
        backbone_config=backbone,
    )  # fmt: skip
    decoder = DeformableDetrModel(config).decoder.eval()
    decoder.load_state_dict(renamed(part(data, "state/model.decoder."), NAMES))
    given = part(data, "decoder/")
    given["object_queries_position_embeddings"] = given.pop("position_embeddings")
    with kept_states(decoder.layers) as kept, torch.no_grad():
        decoder(**given, spatial_shapes_list=[tuple(each) for each in given["spatial_shapes"].tolist()])
    return kept.of_last(6)


def targets_of(data) -> list[dict]:
    size, targets = torch.tensor([SIDE, SIDE]), []
    for target in (part(data, f"target{i}/") for i in range(3)):
        boxes = denormalize_boxes(cxcywh_to_xyxy(target["boxes"])[None], size[None])[0]
        iscrowd = torch.zeros(len(boxes), dtype=torch.int64)
        targets.append(target | {"boxes": boxes, "relations": target["relations"].long(), "iscrowd": iscrowd,
                                 "size": size})  # fmt: skip
    return targets


def test_predicates_and_connectivity_are_the_originals(data, states, head):
    torch.testing.assert_close(states[2], data["last"], rtol=1e-4, atol=1e-5)  # the decoder is tapped where it is there
    labels = data["logits"].argmax(-1)
    with torch.no_grad():
        predicates, connectivity = head(*states, labels)
        head.log_frequency, table = None, head.log_frequency
        plain = head(*states, labels)[0]
    head.log_frequency = table
    torch.testing.assert_close(predicates, data["pred_rel"], rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(plain, data["pred_rel_without_bias"], rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(connectivity, data["pred_connectivity"], rtol=1e-4, atol=2e-4)


def test_matching_and_losses_are_the_originals(data, states, head):
    targets = targets_of(data)
    padded = pad_targets(targets, torch.device("cpu"), torch.float32)
    matches, quality = match_with_quality(data["logits"], data["boxes"], padded, COSTS, 1e-14)
    for i in range(3):
        own, expected = matches.image == i, part(data, f"match{i}/")
        assert torch.equal(matches.query[own], expected["query"])
        assert torch.equal(matches.target[own], expected["target"])
        torch.testing.assert_close(quality[own], 1 - expected["cost"].sigmoid(), rtol=1e-3, atol=1e-6)
    head.zero_grad()
    predicates, connectivity = head(*states, data["logits"].argmax(-1))
    sums, error = relation_losses(predicates, connectivity, targets, matches, quality, SAMPLING)
    entries = sum(sum(count_entries(target, 6, 5, SAMPLING)) for target in targets)
    losses = {"loss_rel": sums["loss_rel"] / entries, "loss_connectivity": sums["loss_connectivity"] / 3}
    for name, loss in losses.items():
        torch.testing.assert_close(loss, data[name], rtol=1e-4, atol=1e-5)
    assert 0 <= error[0] <= 100 * error[1] and error[1] == 7
    (15 * losses["loss_rel"] + 30 * losses["loss_connectivity"]).backward()
    norms = renamed(part(data, "grad/"), NAMES)
    assert norms.keys() == dict(head.named_parameters()).keys()
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(parameter.grad.norm(), norms[name], rtol=1e-3, atol=1e-4)


def model_of(table, architecture="rt_detr_v2", below=None, **options):
    torch.manual_seed(0)
    below = below or SMALL[architecture]
    return build_detector("egtr", class_names=table.class_names, predicates=list(table.predicates),
                          detector_options={"architecture": architecture, **below}, **options)  # fmt: skip


def test_graphs_are_ranked_as_in_the_original(data, table):
    """Predicates, connectivity and classes of the original's outputs; prior adjustment as its logit adjustment."""
    names, predicates = [f"class {i}" for i in range(4)], [f"predicate {i}" for i in range(5)]
    model = build_detector("egtr", class_names=names, predicates=predicates, prior_adjustment=0.3,
                           detector_options={"architecture": "rt_detr_v2", **HYBRID})  # fmt: skip
    counts = torch.zeros(5, 5, 6, dtype=torch.int64)
    counts[1:, 1:, 1:] = data["fg"][:-1, :-1]
    model.learn_counts(counts.numpy(), counts[..., 0].numpy(), (counts[1:, 1:, 1:] > 0).numpy())
    outputs = {"logits": data["logits"], "boxes": data["boxes"], "predicates": data["pred_rel"],
               "connectivity": data["pred_connectivity"]}  # fmt: skip
    size = torch.full((3, 2), SIDE)
    for i, graph in enumerate(model.postprocess(outputs, size, size, 0.0, top_k=20)):
        expected = part(data, f"graph{i}/")
        assert torch.equal(graph["pairs"], expected["pred_rel_inds"])
        assert torch.equal(graph["labels"], expected["pred_classes"])
        torch.testing.assert_close(graph["boxes"], expected["pred_boxes"], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(graph["predicate_scores"], expected["rel_scores"], rtol=1e-4, atol=1e-5)
    few = model.postprocess(outputs, size, size, float(data["logits"].sigmoid().amax(-1).median()))
    for graph in few:
        assert len(graph["boxes"]) == len(graph["scores"]) == len(graph["labels"]) <= 6
        assert len(graph["pairs"]) == len(graph["boxes"]) * (len(graph["boxes"]) - 1)
        assert not len(graph["pairs"]) or int(graph["pairs"].max()) < len(graph["boxes"])
    assert sum(len(graph["boxes"]) for graph in few) < 18


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return shapes_table(tmp_path_factory.mktemp("shapes"), images=4)


@pytest.fixture(scope="module")
def batch(table):
    """Four images: the second without an object, the third with a crowd region among its objects."""
    batch = next(iter(loader_of(table)))
    cut_objects(batch.targets[1], 0)
    batch.targets[2]["iscrowd"][0] = 1
    return batch


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in DETECTORS_BELOW]
)
def test_it_is_a_detector_like_the_others(table, batch, tmp_path, architecture):
    for freeze in ("detector", "none"):
        model = model_of(table, architecture, freeze=freeze).train()
        before = {name: value.clone() for name, value in model.detector.state_dict().items()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(batch.images, batch.sizes, batch.targets)
        if freeze == "detector" or architecture in FAST:  # D-FINE's distillation is 0 before the first step
            assert_losses_are_divided_as_announced(model, outputs, batch.targets)
        losses, _ = losses_of(model, batch)
        assert losses.keys() == set(model.loss_names) and all(loss.isfinite() for loss in losses.values())
        sum(losses.values()).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.head.parameters())
        reached = any(p.grad is not None for p in model.detector.parameters())
        assert reached == (freeze == "none") and ("loss_bbox" in losses) == reached
        assert reached or all(torch.equal(value, before[n]) for n, value in model.detector.state_dict().items())
    model.eval()
    with torch.no_grad():
        graphs = model.postprocess(model(batch.images, batch.sizes), batch.sizes, batch.sizes)
        inner = model.detector.postprocess(model.detector(batch.images, batch.sizes), batch.sizes, batch.sizes, 0.0, 1)
    for graph, best in zip(graphs, inner, strict=True):
        assert len(graph["boxes"]) == 20 and len(graph["pairs"]) == 100
        assert (graph["pairs"][:, 0] != graph["pairs"][:, 1]).all()
        assert (graph["triplet_scores"].diff() <= 0).all()
        assert graph["predicate_scores"].shape == (100, len(table.predicates))
        torch.testing.assert_close(graph["scores"].max(), best["scores"][0])
    without = ("pretrained", "detector", "backbone")  # ECDet has its own
    assert_resolved_options_build_it_again(model, table.class_names, without)
    model.save_final(tmp_path, table.categories)
    again = load_detector_folder(tmp_path)[0].eval()
    with torch.no_grad():
        found = again.postprocess(again(batch.images, batch.sizes), batch.sizes, batch.sizes)
    assert all(torch.equal(ours[key], theirs[key]) for ours, theirs in zip(graphs, found, strict=True) for key in ours)


def test_micro_batches_make_the_losses_of_the_big_batch(table, batch):
    model = model_of(table, freeze="detector").eval()
    whole, counts = losses_of(model, batch)[0], model.denominators(batch.targets)
    parts = [losses_of(model, batch, slice(i, i + 1), counts)[0] for i in range(4)]
    for name in whole:
        torch.testing.assert_close(sum(each[name] for each in parts), whole[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("queries", "hardest"), [(2, True), (12, True), (12, False)])
def test_entries_are_as_many_as_counted_beforehand(batch, queries, hardest):
    """Also with more objects than queries, where relations of objects without a query cannot be learnt."""
    sampling, target = RelationSampling(5, 7, hardest, hardest), batch.targets[0]
    assert len(target["labels"]) > 2
    counts = count_entries(target, queries, 8, sampling)
    logits, boxes = torch.randn(1, queries, 4), torch.rand(1, queries, 4)
    matches, quality = match_with_quality(logits, boxes, pad_targets([target], boxes.device, boxes.dtype), COSTS, 1e-14)
    predicates = torch.full((1, queries, queries, 8), 30.0, requires_grad=True)
    sums, _ = relation_losses(predicates, predicates[..., 0], [target], matches, quality, sampling)
    sums["loss_rel"].backward()
    asked = (predicates.grad != 0).sum()  # 30 is wrong of all that have no relation, and of none whose quality is 1
    assert asked == sum(counts) if queries == 12 else asked <= sum(counts)
    assert min(counts) >= 0 and len(matches.query) == min(queries, len(target["labels"]))


def test_it_starts_from_a_trained_detr_and_its_counts_are_those_of_all_relations(table, tmp_path):
    inner = build_detector("rt_detr_v2", class_names=table.class_names, **HYBRID)
    inner.save_final(tmp_path / "detr", table.categories)
    said = []
    options = EgtrOptions(detector=str(tmp_path / "detr"), pretrained_backbone=True)  # not fetched
    model = start_scene_graph(options, table, tmp_path, checkpoint=None, say=said.append)
    assert all(torch.equal(v, model.detector.state_dict()[k]) for k, v in inner.state_dict().items())
    assert "weights of the detector" in said[-1]
    assert model.relation_counts.sum() == sum(len(table.row(i)["relations"]["subject"]) for i in range(len(table)))
    counts = model.relation_counts[1:, 1:, 1:]
    torch.testing.assert_close(model.head.log_frequency[counts > 0], counts[counts > 0].log().float())
    assert (model.head.log_frequency[(counts == 0) & (counts.sum(2, keepdim=True) > 0)] < -25).all()
    evaluator = make_evaluator(model, table, "toolkit")
    assert isinstance(evaluator, SceneGraphEvaluator) and evaluator.mode == "sgdet"


def test_wrong_settings_are_named_at_once(table):
    with pytest.raises(BadInput) as caught:
        build_detector("egtr", class_names=["a"], smoothing=0.0, unmatched_per_relation=-1,
                       detector_options={"architecture": "yolov3"})  # fmt: skip
    said = "\n".join(caught.value.problems)
    for text in ("'yolov3'; the decoder of egtr is that of deformable_detr", "smoothing is 0.0", "no predicates",
                 "unmatched_per_relation is -1"):  # fmt: skip
        assert text in said
