"""EGTR, the relation head on a DETR's decoder: against numbers of its own code, and as a detector of this toolkit.

`relation_heads/egtr.npz`: what naver-ai/egtr (7f87450, Apache-2.0) gives on small random weights and inputs that it
holds too: its Deformable DETR's decoder, its head, its matching, losses and gradients, its ranked pairs.
"""

import pytest
import torch
import yaml
from contract import assert_losses_are_divided_as_announced
from scene_graph_data import (
    SIDE,
    arrays,
    cut_objects,
    loader_of,
    losses_of,
    part,
    renamed,
)
from transformers import DeformableDetrConfig, DeformableDetrModel

from toolkit.base.box_ops import cxcywh_to_xyxy, denormalize_boxes
from toolkit.base.errors import BadInput
from toolkit.detectors.detr.detr_criterion import MatchingCosts, pad_targets
from toolkit.detectors.scene_graphs.egtr import DETECTORS_BELOW, EgtrHead, kept_states, largest_first
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

NAMES = r"""
proj_q query_projections
proj_k key_projections
final_sub_proj subject
final_obj_proj object
rel_predictor_gate gate
rel_predictor\.layers predicate
connectivity_layer\.layers connectivity
(predicate|connectivity)\.2 \1.4
(predicate|connectivity)\.1 \1.2
out_proj o_proj
\.(fc\d) .mlp.\1
"""
COSTS = MatchingCosts(2.0, 5.0, 2.0)
SAMPLING = RelationSampling(3, 4)
TRANSFORMER = yaml.safe_load(
    "{d_model: 32, heads: 2, ffn_dim: 32, encoder_layers: 1, decoder_layers: 2, num_queries: 20}"
)
DEFORMABLE = TRANSFORMER | {"backbone": "test_resnet"}
ECDET = TRANSFORMER | {"hidden_expansion": 0.5, "num_denoising": 4}
HYBRID = ECDET | {"backbone": "test_resnet", "freeze": "none"}
DECODER = yaml.safe_load("""
    d_model: 32
    encoder_layers: 1
    decoder_layers: 2
    encoder_attention_heads: 2
    decoder_attention_heads: 2
    encoder_ffn_dim: 16
    decoder_ffn_dim: 16
    encoder_n_points: 2
    decoder_n_points: 2
    num_queries: 6
    dropout: 0.0
    backbone_config:
        model_type: resnet
        depths: [1, 1, 1, 1]
        embedding_size: 4
        hidden_sizes: [4, 4, 4, 4]
        out_features: [stage2, stage3, stage4]
""")
BELOW = dict.fromkeys(DETECTORS_BELOW, HYBRID) | {"deformable_detr": DEFORMABLE, "ecdet": ECDET}
FAST = "rt_detr_v2"


@pytest.fixture(scope="module")
def data():
    return arrays("egtr")


@pytest.fixture(scope="module")
def head(data):
    state = part(data, "state/")
    state = renamed({name: state[name] for name in state if not name.startswith("model.")}, NAMES)
    head = EgtrHead(32, 2, 4, 5)
    head.start_from(data["fg"][:-1, :-1])  # the original's last row and column are for "no class"
    head.load_state_dict(state | {"log_frequency": head.log_frequency})
    return head


@pytest.fixture(scope="module")
def states(data):
    """Of transformers' decoder with the original's weights: what `kept_states` takes from it."""
    decoder = DeformableDetrModel(DeformableDetrConfig(**DECODER)).decoder.eval()
    decoder.load_state_dict(renamed(part(data, "state/model.decoder."), NAMES))
    given = part(data, "decoder/")
    given["object_queries_position_embeddings"] = given.pop("position_embeddings")
    shapes = [tuple(shape) for shape in given["spatial_shapes"].tolist()]
    with kept_states(decoder.layers) as kept, torch.no_grad():
        decoder(**given, spatial_shapes_list=shapes)
    return kept.of_last(6)


@pytest.fixture(scope="module")
def targets(data):
    targets = []
    size = torch.tensor([SIDE, SIDE])
    for i in range(3):
        target = part(data, f"target{i}/")
        target["boxes"] = denormalize_boxes(cxcywh_to_xyxy(target["boxes"])[None], size[None])[0]
        target["relations"] = target["relations"].long()
        target["iscrowd"] = torch.zeros(len(target["boxes"]), dtype=torch.int64)
        targets.append(target | {"size": size})
    return targets


def matched(logits, boxes, targets):
    return match_with_quality(logits, boxes, pad_targets(targets, logits.device, logits.dtype), COSTS, 1e-14)


def test_predicates_and_connectivity_are_the_originals(data, states, head, monkeypatch):
    torch.testing.assert_close(states[2], data["last"], rtol=1e-4, atol=1e-5)  # the decoder is tapped where it is there
    labels = data["logits"].argmax(-1)
    with torch.no_grad():
        predicates, connectivity = head(*states, labels)
        monkeypatch.setitem(head._buffers, "log_frequency", None)
        plain, _ = head(*states, labels)
    torch.testing.assert_close(predicates, data["pred_rel"], rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(plain, data["pred_rel_without_bias"], rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(connectivity, data["pred_connectivity"], rtol=1e-4, atol=2e-4)


def test_matching_is_the_originals(data, targets):
    matches, quality = matched(data["logits"], data["boxes"], targets)
    for i in range(3):
        own = matches.image == i
        expected = part(data, f"match{i}/")
        assert torch.equal(matches.query[own], expected["query"])
        assert torch.equal(matches.target[own], expected["target"])
        torch.testing.assert_close(
            quality[own],
            1 - expected["cost"].sigmoid(),
            rtol=1e-3,
            atol=1e-6,
        )


def test_losses_and_gradients_are_the_originals(data, states, head, targets):
    matches, quality = matched(data["logits"], data["boxes"], targets)
    head.zero_grad()
    predicates, connectivity = head(*states, data["logits"].argmax(-1))
    sums, error = relation_losses(predicates, connectivity, targets, matches, quality, SAMPLING)
    entries = sum(sum(count_entries(target, 6, 5, SAMPLING)) for target in targets)
    loss_rel = sums["loss_rel"] / entries
    loss_connectivity = sums["loss_connectivity"] / 3
    torch.testing.assert_close(loss_rel, data["loss_rel"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss_connectivity, data["loss_connectivity"], rtol=1e-4, atol=1e-5)
    assert error[1] == 7
    assert 0 <= error[0] <= 100 * error[1]
    (15 * loss_rel + 30 * loss_connectivity).backward()
    norms = {name: parameter.grad.norm() for name, parameter in head.named_parameters()}
    torch.testing.assert_close(
        norms,
        renamed(part(data, "grad/"), NAMES),
        rtol=1e-3,
        atol=1e-4,
    )


def model_of(table, architecture=FAST, **options):
    torch.manual_seed(0)
    return build_detector(
        "egtr",
        class_names=table.class_names,
        predicates=list(table.predicates),
        detector_options={"architecture": architecture, **BELOW[architecture]},
        **options,
    )


@pytest.fixture(scope="module")
def ranked(data):
    """Outputs of the original, and a model with its counts; prior adjustment as its logit adjustment."""
    model = build_detector(
        "egtr",
        class_names=[f"class {i}" for i in range(4)],
        predicates=[f"predicate {i}" for i in range(5)],
        prior_adjustment=0.3,
        detector_options={"architecture": FAST, **HYBRID},
    )
    counts = torch.zeros(5, 5, 6, dtype=torch.int64)
    counts[1:, 1:, 1:] = data["fg"][:-1, :-1]
    model.learn_counts(
        counts.numpy(),
        counts[..., 0].numpy(),
        (counts[1:, 1:, 1:] > 0).numpy(),
    )
    outputs = {
        "logits": data["logits"],
        "boxes": data["boxes"],
        "predicates": data["pred_rel"],
        "connectivity": data["pred_connectivity"],
    }
    return model, outputs


def test_graphs_are_ranked_as_in_the_original(data, ranked):
    model, outputs = ranked
    size = torch.full((3, 2), SIDE)
    for i, graph in enumerate(model.postprocess(outputs, size, size, 0.0, top_k=20)):
        expected = part(data, f"graph{i}/")
        assert torch.equal(graph["pairs"], expected["pred_rel_inds"])
        assert torch.equal(graph["labels"], expected["pred_classes"])
        torch.testing.assert_close(graph["boxes"], expected["pred_boxes"], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(graph["predicate_scores"], expected["rel_scores"], rtol=1e-4, atol=1e-5)


def test_a_threshold_leaves_weak_objects_and_their_pairs_out(data, ranked):
    model, outputs = ranked
    size = torch.full((3, 2), SIDE)
    graphs = model.postprocess(
        outputs,
        size,
        size,
        float(data["logits"].sigmoid().amax(-1).median()),
    )
    counts = [len(graph["boxes"]) for graph in graphs]
    assert 0 < sum(counts) < 18
    for graph, count in zip(graphs, counts, strict=True):
        assert len(graph["scores"]) == len(graph["labels"]) == count
        assert len(graph["pairs"]) == count * (count - 1)
        assert (graph["pairs"] < count).all()


@pytest.mark.parametrize("keep", [1, 7, 100, 5000])
def test_equal_scores_are_in_the_order_of_their_columns(keep):
    many = torch.randint(
        -1,
        4,
        (5, 400),
        generator=torch.Generator().manual_seed(keep),
    ).float()
    values, columns = largest_first(many, keep)
    expected = many.sort(descending=True, stable=True)
    real = values >= 0  # those to be left out are in no order
    assert torch.equal(values, expected.values[:, :keep])
    assert torch.equal(columns[real], expected.indices[:, :keep][real])


@pytest.fixture(scope="module")
def batch(table):
    """Four images: the second without an object, the third with a crowd region among its objects."""
    batch = next(iter(loader_of(table.head(4))))
    cut_objects(batch.targets[1], 0)
    batch.targets[2]["iscrowd"][0] = 1
    return batch


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name == FAST else pytest.mark.slow) for name in DETECTORS_BELOW]
)
@pytest.mark.parametrize("freeze", ["detector", "none"])
def test_it_trains_on_every_detr(table, batch, architecture, freeze):
    model = model_of(table, architecture, freeze=freeze).train()
    before = {name: value.clone() for name, value in model.detector.state_dict().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(batch.images, batch.sizes, batch.targets)
    if freeze == "detector" or architecture == FAST:  # D-FINE's distillation is 0 before the first step
        assert_losses_are_divided_as_announced(model, outputs, batch.targets)
    losses, _ = losses_of(model, batch)
    assert losses.keys() == set(model.loss_names)
    sum(losses.values()).backward()
    for parameter in model.head.parameters():
        assert parameter.grad.isfinite().all()
    reached = any(p.grad is not None for p in model.detector.parameters())
    assert reached == ("loss_bbox" in losses) == (freeze == "none")
    if freeze == "detector":
        torch.testing.assert_close(
            dict(model.detector.state_dict()),
            before,
            rtol=0,
            atol=0,
        )


@pytest.mark.parametrize(
    ("queries", "hardest"),
    [
        (2, True),
        (12, True),
        (12, False),
    ],
)
def test_entries_are_as_many_as_counted_beforehand(table, queries, hardest):
    """Also with more objects than queries, where relations of objects without a query cannot be learnt."""
    sampling = RelationSampling(5, 7, hardest, hardest)
    target = next(iter(loader_of(table))).targets[0]
    assert len(target["labels"]) > 2
    counts = count_entries(target, queries, 8, sampling)
    matches, quality = matched(
        torch.randn(1, queries, 4),
        torch.rand(1, queries, 4),
        [target],
    )
    predicates = torch.full((1, queries, queries, 8), 30.0, requires_grad=True)
    sums, _ = relation_losses(predicates, predicates[..., 0], [target], matches, quality, sampling)
    sums["loss_rel"].backward()
    asked = (predicates.grad != 0).sum()  # 30 is wrong of all that have no relation, and of none whose quality is 1
    assert asked == sum(counts) if queries == 12 else asked <= sum(counts)
    assert min(counts) >= 0
    assert len(matches.query) == min(queries, len(target["labels"]))


def test_it_starts_from_a_trained_detr(table, tmp_path):
    """Its counts are those of all relations, between boxes apart too."""
    inner = build_detector(FAST, class_names=table.class_names, **HYBRID)
    inner.save_final(tmp_path / "detr", table.categories)
    said = []
    options = EgtrOptions(detector=str(tmp_path / "detr"), pretrained_backbone=True)  # not fetched
    model = start_scene_graph(options, table, tmp_path, checkpoint=None, say=said.append)
    torch.testing.assert_close(
        model.detector.state_dict(),
        inner.state_dict(),
        rtol=0,
        atol=0,
    )
    assert "weights of the detector" in said[-1]
    assert model.relation_counts.sum() == len(table.relations())
    counts = model.relation_counts[1:, 1:, 1:]
    torch.testing.assert_close(model.head.log_frequency[counts > 0], counts[counts > 0].log().float())
    never = (counts == 0) & (counts.sum(2, keepdim=True) > 0)
    assert (model.head.log_frequency[never] < -25).all()
    evaluator = make_evaluator(model, table, "toolkit")
    assert isinstance(evaluator, SceneGraphEvaluator)
    assert evaluator.mode == "sgdet"


def test_wrong_settings_are_named_at_once():
    wrong = {"smoothing": 0.0, "unmatched_per_relation": -1, "detector_options": {"architecture": "yolov3"}}
    with pytest.raises(BadInput) as caught:
        build_detector("egtr", class_names=["a"], **wrong)
    said = "\n".join(caught.value.problems)
    assert "'yolov3'; the decoder of egtr is that of deformable_detr" in said
    assert "smoothing is 0.0" in said
    assert "no predicates" in said
    assert "unmatched_per_relation is -1" in said
