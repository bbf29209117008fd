"""Scene graphs on a Faster R-CNN: modes, losses, counts."""

import copy
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from contract import assert_losses_are_divided_as_announced, assert_resolved_options_build_it_again
from documents import row_of
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from scene_graph_data import INNER, as_denominators, cut_objects, loader_of, losses_of, model_of, shapes_table

from toolkit.base.errors import BadInput
from toolkit.base.seeding import seed_images
from toolkit.data.dataset import DetectionDataset
from toolkit.data.sampling import SampleKey
from toolkit.data.table import Category
from toolkit.data.table_cache import write_rows
from toolkit.data.transforms.geometry import RandomFlip
from toolkit.detectors.scene_graphs.evaluator import SceneGraphEvaluator
from toolkit.detectors.scene_graphs.frequency import log_frequencies
from toolkit.detectors.scene_graphs.graph_pictures import correct_triplets
from toolkit.detectors.scene_graphs.heads import RELATION_HEADS
from toolkit.detectors.scene_graphs.options import EgtrOptions, SceneGraphOptions, without_detector
from toolkit.detectors.scene_graphs.pair_sampling import (
    annotated_graph,
    count_sampled_pairs,
    match_labels,
    sampled_pairs,
)
from toolkit.detectors.scene_graphs.start import (
    count_table,
    lacking_relations,
    load_word_vectors,
    start_from_words,
    start_scene_graph,
)
from toolkit.detectors.scene_graphs.true_graphs import true_graph
from toolkit.evaluation.coco import make_evaluator
from toolkit.evaluation.predict_dataset import predict_dataset
from toolkit.models import build_detector
from toolkit.models.final import load_detector_folder
from toolkit.step.losses import LossWeights
from toolkit.tools.shapes import ATTRIBUTES, PREDICATES


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return shapes_table(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def batch(table):
    """Six images as they are; then the first without objects, the second with one, the third with a crowd only."""
    batch = next(iter(loader_of(table)))
    for count, target in zip((0, 1, 1), batch.targets, strict=False):
        cut_objects(target, count, crowd=target is batch.targets[2])
    return batch


@pytest.mark.parametrize("mode", ["predcls", "sgcls", "sgdet"])
def test_losses_are_divided_as_announced_and_reach_all_that_trains(table, batch, mode):
    for head in RELATION_HEADS if mode == "predcls" else ("vctree", "vtranse"):
        model = model_of(table, mode, head, attributes=ATTRIBUTES).train()
        outputs = model(batch.images, batch.sizes, batch.targets)
        assert_losses_are_divided_as_announced(model, outputs, batch.targets)
        losses, metrics = model.criterion(outputs, batch.targets, as_denominators(model.denominators(batch.targets)))
        assert losses.keys() == set(model.loss_names) and metrics.keys() == set(model.metric_names)
        assert all(loss.isfinite() for loss in losses.values())
        assert ("loss_objectness" in losses) == (mode != "predcls"), "the detector's own"
        sum(losses.values()).backward()
        reached = {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None}
        everything = {"detector", "box_features", "head", "attribute_predictor"}
        everything |= {"union"} if model.reads_union else set()
        assert "head" in reached and (head == "frequency" or reached == everything)
        unreached = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert head == "frequency" or mode == "sgdet" or not unreached, "frozen, where labels are given"


@pytest.mark.parametrize("mode", ["predcls", "sgcls", "sgdet"])
def test_micro_batches_make_the_gradient_of_the_big_batch(table, batch, mode):
    """Of drawn pairs and labels, with images of few and of many pairs, where no batch norm learns. In sgdet so many
    detections that the objects are among them."""
    options = {"freeze": "norms", "pairs_per_image": 9, "detections_per_image": 40, "attributes": ATTRIBUTES}
    options["detector_options"] = INNER | {"score_threshold": 0.0}
    for head in RELATION_HEADS:
        of_head = {} if head in ("frequency", "imp", "vtranse") else {"dropout": 0.0}
        model = model_of(table, mode, head, head_options=of_head, **options).train()
        seed_images(batch.targets, 0, 0)
        counts, gradients = model.denominators(batch.targets), []
        for parts in ([slice(0, 6)], [slice(3, 6), slice(0, 3)]):
            model.zero_grad()
            for number, part in enumerate(parts):
                torch.manual_seed(len(parts) + number)
                sum(losses_of(model, batch, part, counts)[0].values()).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert (gradients[1] - gradients[0]).norm() <= 1e-5 * gradients[0].norm(), head


@pytest.mark.parametrize("mode", ["predcls", "sgdet"])
@pytest.mark.parametrize("freeze", ["norms", "detector", "detector_and_norms"])
def test_what_is_frozen_stays_as_it_is_in_training(table, batch, mode, freeze):
    model = model_of(table, mode, freeze=freeze).train()
    kept = model.detector if freeze == "detector" else model
    before = copy.deepcopy(kept.state_dict())
    losses, _ = losses_of(model, batch)
    sum(losses.values()).backward()
    norms = [m for m in kept.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    assert norms and not any(m.training or m.weight.requires_grad for m in norms) and model.head.training
    assert all(torch.equal(before[name], value) for name, value in kept.state_dict().items())
    trained = any(p.grad is not None for p in model.detector.parameters())
    assert trained == (freeze == "norms") and model.joint == (freeze == "norms" and mode == "sgdet")
    assert mode == "predcls" or ("loss_objectness" in losses) == trained


@pytest.mark.parametrize(("mode", "head", "options"), [
    ("predcls", "imp", {"freeze": "detector"}),
    ("sgcls", "motifs", {"norm_momentum": 0.1, "nms_threshold": 0.3, "head_options": {"dropout": 0.1}}),
    ("sgdet", "frequency", {"detector": "runs/detector"}),
])  # fmt: skip
def test_resolved_options_build_the_same_model(table, mode, head, options):
    model = model_of(table, mode, head, attributes=ATTRIBUTES, **options)
    without_value = ("pretrained", "detector", "word_vectors", "norm_momentum")
    assert_resolved_options_build_it_again(model, table.class_names, without_value)
    assert model.resolved_options()["freeze"] == ("none" if head == "motifs" else "detector")
    assert model.resolved_options()["detector_options"]["strides"] == INNER["strides"]
    parameters = [name for name, _ in model.named_parameters()]
    assert all(any(name.startswith(f"{p}.") for name in parameters) for p in model.slow_prefixes)
    assert bool(model.slow_prefixes) == (head == "imp")


@pytest.mark.parametrize("mode", ["predcls", "sgcls", "sgdet"])
def test_a_batch_without_any_object_has_losses_of_zero_with_gradients(table, batch, mode):
    """None at all, or a crowd alone: a rank without objects has gradients as the others."""
    for rows in (slice(0, 1), slice(2, 3)):
        model = model_of(table, mode, "vctree", attributes=ATTRIBUTES).train()
        losses, _ = losses_of(model, batch, rows)
        relation = [losses[name] for name in model.relation_losses if name in losses]
        assert relation and (mode == "sgdet" or all(loss.item() == 0 for loss in relation))
        sum(losses.values()).backward()
        assert any(p.grad is not None for p in model.head.parameters())
        assert losses["loss_refine_att"] == 0 and (model.attribute_predictor.weight.grad == 0).all()


@pytest.mark.parametrize("head", ["motifs", "vctree", "causal", "penet"])  # every head alone: tests/test_relation.py
def test_half_precision_forward_and_losses_in_full(table, batch, head):
    model = model_of(table, "sgcls", head).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(batch.images, batch.sizes, batch.targets)
    losses, _ = model.criterion(outputs, batch.targets, as_denominators(model.denominators(batch.targets)))
    assert all(loss.isfinite() and loss.dtype == torch.float32 for loss in losses.values())
    sum(losses.values()).backward()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model.eval()(batch.images, batch.sizes, batch.targets)
    for graph in model.postprocess(outputs, batch.sizes, batch.sizes):
        assert graph["predicate_scores"].dtype == graph["boxes"].dtype == torch.float32


def test_outputs_hang_on_nothing_that_no_loss_is_made_of(table, batch):
    """DDP waits for the gradient of every parameter that its outputs hang on: other ranks would wait for ever."""
    for targets in (batch.targets, batch.targets[:1]):
        model = model_of(table, "sgcls", "imp").train()
        outputs = model(batch.images[: len(targets)], batch.sizes[: len(targets)], targets)
        values = [*vars(outputs["output"]).values(), *vars(outputs["batch"]).values(), *outputs["detector"].values()]
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
        parameters = [p for p in model.parameters() if p.requires_grad]
        hang = torch.autograd.grad(sum(t.sum() for t in tensors), parameters, retain_graph=True, allow_unused=True)
        losses, _ = model.criterion(outputs, targets, as_denominators(model.denominators(targets)))
        learn = torch.autograd.grad(sum(losses.values()), parameters, allow_unused=True)
        assert [h is None for h in hang] == [g is None for g in learn]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3)), max_size=12),
       st.integers(5, 8), st.integers(1, 30), st.booleans(), st.booleans())  # fmt: skip
def test_pairs_are_as_many_as_counted_beforehand(rows, count, per_image, training, crowd):
    model = sampler_of(training=training, given_boxes=True, pairs_per_image=per_image, require_overlap=True)
    target = {"boxes": torch.rand(count, 2).repeat(1, 2) + torch.tensor([0.0, 0, 1, 1]),
              "labels": torch.zeros(count, dtype=torch.int64), "iscrowd": torch.zeros(count, dtype=torch.int64),
              "relations": torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)}  # fmt: skip
    target["iscrowd"][0] = int(crowd)
    truth = annotated_graph(target)
    assert len(truth["boxes"]) == count - crowd
    found = sampled_pairs(model, [truth["boxes"]], [truth])
    pairs, labels = [tuple(pair) for pair in found["pairs"].tolist()], found["relation_labels"].tolist()
    assert count_sampled_pairs(model, [target])["relation_pairs"] == len(pairs) == len(labels)
    assert len(set(pairs)) == len(pairs), "no pair twice"
    annotated = {tuple(row[:2]) for row in truth["relations"].tolist()}
    assert all((label > 0) == (pair in annotated) for pair, label in zip(pairs, labels, strict=True))


def sampler_of(**options):
    """As much of a model as `sampled_pairs` looks at."""
    common = {"training": True, "given_boxes": False, "require_overlap": False, "pairs_per_image": 64,
              "positive_fraction": 0.5, "pairs_per_relation": 4, "match_iou": 0.5}  # fmt: skip
    return SimpleNamespace(**common | options)


def test_detections_learn_the_label_of_what_they_overlap():
    truth = {"boxes": torch.tensor([[0.0, 0, 50, 50], [60, 60, 90, 90]]), "labels": torch.tensor([3, 0])}
    boxes = torch.tensor([[0.0, 0, 50, 40], [61, 60, 90, 90], [0, 60, 30, 90]])
    rows, labels = match_labels(boxes, truth, 0.5)
    assert rows.tolist() == [0, 1, -1] and labels.tolist() == [4, 1, 0]
    assert match_labels(boxes, truth, 0.9)[0].tolist() == [-1, 1, -1]
    half = torch.tensor([[0.0, 0, 50, 101]])  # 51 x 51 of 51 x 102 pixels
    assert match_labels(half, truth, 0.5)[0].tolist() == [0] and match_labels(half, truth, 0.51)[0].tolist() == [-1]
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    assert match_labels(boxes, nothing, 0.5)[1].tolist() == [0, 0, 0]


def test_annotated_boxes_are_proposals_too_in_training_only(table, batch, monkeypatch):
    """A weak detector proposes few of the objects that the relations are between."""
    nothing = [torch.zeros(0, 4)] * len(batch.targets)
    found = {}
    for training, added in ((True, True), (False, True), (True, False)):
        model = model_of(table, "sgdet", freeze="detector", add_annotated_boxes=added).train(training)
        monkeypatch.setattr(model.detector, "_proposals", lambda *_: (nothing, nothing))
        found[training, added] = model(batch.images, batch.sizes, batch.targets)["batch"].num_objects
    annotated = [int((target["iscrowd"] == 0).sum()) for target in batch.targets]
    assert not any(found[False, True]) and not any(found[True, False])
    assert all(count <= min(5, there) for count, there in zip(found[True, True], annotated, strict=True))
    assert [count > 0 for count in found[True, True]] == [there > 0 for there in annotated]


@pytest.mark.parametrize("per_relation, match_iou, expected", [(4, 0.5, 4), (1, 0.5, 1), (4, 0.95, 1), (9, 0.5, 6)])
def test_pairs_of_detections_for_a_relation_are_as_many_as_asked(per_relation, match_iou, expected):
    """NUM_SAMPLE_PER_GT_REL and FG_IOU_THRESHOLD of Scene-Graph-Benchmark: three detections on the subject, two on the
    object, one of each exact."""
    true = torch.tensor([[0.0, 0, 99, 99], [200, 0, 299, 99]])
    truth = {"boxes": true, "labels": torch.tensor([0, 1]), "relations": torch.tensor([[0, 1, 2]])}
    boxes = torch.cat([true, true - torch.tensor([0, 0, 0, 20.0]), true[:1] - torch.tensor([0, 0, 0, 30.0])])
    model = sampler_of(pairs_per_relation=per_relation, match_iou=match_iou)
    labels = sampled_pairs(model, [boxes], [truth], torch.tensor([1, 2, 1, 2, 1]))["relation_labels"].tolist()
    assert labels.count(3) == expected


def test_where_overlap_is_required_relations_between_boxes_apart_are_not_trained():
    boxes = torch.tensor([[0.0, 0, 20, 20], [10, 10, 30, 30], [50, 50, 60, 60]])
    truth = {"boxes": boxes, "labels": torch.tensor([0, 1, 2]), "relations": torch.tensor([[0, 1, 3], [0, 2, 2]])}
    labels = {}
    for overlap in (False, True):
        found = sampled_pairs(sampler_of(require_overlap=overlap), [boxes], [truth], truth["labels"] + 1)
        rows = zip(found["pairs"].tolist(), found["relation_labels"].tolist(), strict=True)
        labels[overlap] = {tuple(pair): label for pair, label in rows}
    assert {pair: label for pair, label in labels[False].items() if label} == {(0, 1): 4, (0, 2): 3}
    assert labels[True] == {(0, 1): 4, (1, 0): 0}


@pytest.mark.parametrize("head, options", [("motifs", {}), ("transformer", {}), ("causal", {"nms_threshold": 0.9})])
def test_the_labels_of_a_head_and_of_the_graph_are_of_one_threshold(table, head, options):
    model = model_of(table, "sgdet", head, nms_threshold=0.3, head_options=options)
    used = {module.nms_threshold for module in model.head.modules() if hasattr(module, "nms_threshold")}
    assert used == {options.get("nms_threshold", 0.3)}


def test_weights_of_a_detector_go_where_they_belong(table):
    model = model_of(table, "sgdet", freeze="detector")
    inner = build_detector("faster_rcnn", class_names=table.class_names, backbone="test_resnet", **INNER)
    found = model.load_detector_weights(inner.state_dict())
    weights = inner.roi_heads.box_head.fc6.weight
    for taken in (model.detector.box_head, model.box_features, model.union.head):
        assert torch.equal(taken.fc6.weight, weights)
    lines = found.table().splitlines()
    assert "mapped  union.head.fc6.weight <- detector.roi_heads.box_head.fc6.weight" in lines
    assert any(line.startswith("new     union.rectangles") for line in lines)
    assert any(line.startswith("new     head.") for line in lines) and not found.unused
    wider = build_detector("faster_rcnn", class_names=table.class_names, backbone="test_resnet",
                           **INNER | {"representation_size": 32})  # fmt: skip
    with pytest.raises(BadInput, match="box_features.fc6.weight"):
        model.load_detector_weights(wider.state_dict())


def test_masks_of_a_detector_are_left_out_and_not_trained(table):
    model = model_of(table, "sgdet", freeze="detector")
    inner = build_detector("faster_rcnn", class_names=table.class_names, backbone="test_resnet", masks=True, **INNER)
    unused = model.load_detector_weights(inner.state_dict()).unused
    assert unused and all(".mask_" in name for name in unused)
    with pytest.raises(BadInput, match="model.detector_options: masks: a scene graph has no use for masks"):
        model_of(table, "sgdet", detector_options={"architecture": "faster_rcnn", "masks": True, **INNER})


def test_counts_start_the_bias_and_travel_with_the_weights(table, tmp_path, batch):
    model = model_of(table, "sgdet", "vctree").eval()
    relations, candidates, seen = count_table(table)
    expected = log_frequencies(relations, candidates)
    assert torch.equal(model.head.frequency.table.weight, expected.flatten(0, 1))
    prior = expected.sum(-1)
    torch.testing.assert_close(model.head.context.scores.prior.weight.view_as(prior), prior + prior.T)
    graph = true_graph(table.row(4))
    subject, object_, predicate = graph["relations"][0]
    assert seen[graph["labels"][subject], graph["labels"][object_], predicate]
    model.save_final(tmp_path, table.categories)
    again = load_detector_folder(tmp_path)[0].eval()
    assert again.predicates == PREDICATES and torch.equal(again.relation_counts, torch.from_numpy(relations))
    with torch.no_grad():
        graphs = [m.postprocess(m(batch.images, batch.sizes), batch.sizes, batch.sizes) for m in (model, again)]
    for one, other in zip(*graphs, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_the_best_pairs_and_the_annotated_ones_are_all_that_metrics_need(table):
    """`top_k` pairs of each image give the numbers that all pairs give."""
    model = model_of(table, "sgcls", "imp").eval()
    evaluator, rows = make_evaluator(model, table, "toolkit"), {}
    weights = LossWeights(model.loss_names, {}, model.default_weights)
    for top in (1, 20, 999):
        found = predict_dataset(model, loader_of(table), "cpu", loss_weights=weights, top_k=top).by_image
        rows[top] = evaluator.evaluate(found)
    assert max(len(p["pairs"]) for p in found.values()) > 20
    assert all(rows[1][f"A@{k}"] == rows[999][f"A@{k}"] for k in (20, 50, 100))
    assert rows[20]["R@20"] == rows[999]["R@20"] and rows[20]["ngR@20"] == rows[999]["ngR@20"]
    assert rows[999]["bbox_AP"] is not None and rows[999]["zR@20"] is None


def test_two_commands_find_objects_on_own_data():
    """Of modes and EGTR; each names files that there are. None where there is a detector, or the data are bundled."""
    for options in (SceneGraphOptions(), SceneGraphOptions(mode="sgcls"), EgtrOptions()):
        words = without_detector(options, "my/data")
        assert words.count("accelerate launch ") == words.count("--data.path my/data") == 2
        files = re.findall(r"\w+/[\w/]+\.(?:py|yaml)", words)
        assert len(files) == 4 and all((ROOT / file).is_file() for file in files)
        assert "finds none" in words or "random weights" in words
        assert without_detector(replace(options, detector="runs/x"), "my/data") == without_detector(options, None) == ""


def test_relations_that_a_split_lacks_are_named(tmp_path):
    def split(name, *predicates):
        row = row_of(1, [[1, 1, 9, 9], [2, 2, 20, 20]], labels=[0, 0], relations=[(0, 1, p) for p in predicates])
        known = {"categories": [Category(1, "cup")], "predicates": ["on", "under", "near"], "image_root": tmp_path}
        return write_rows([row], cache_file=tmp_path / f"{name}.json", **known)

    train, val, none = split("train", 0), split("val", 0, 1, 1), split("none")
    assert lacking_relations(val, train) == [] == lacking_relations(train, train)
    (told,) = lacking_relations(train, val)
    assert told.endswith("training never has, and that are not learnt: under (2)")
    (told,) = lacking_relations(train, none)
    assert "there is not a single relation between the boxes of its 1 images: R@K is not measured" in told


def test_phrase_detection_compares_unions(table):
    """Every subject box is as large as the union with its object: no box is right, and every union is."""
    predictions = {}
    for row in map(table.row, range(len(table))):
        graph = {key: torch.from_numpy(value) for key, value in true_graph(row).items()}
        ends, count = graph["relations"][:, :2], len(graph["relations"])
        subjects, objects = (graph["boxes"][ends[:, end]] for end in (0, 1))
        unions = torch.cat([torch.minimum(subjects, objects)[:, :2], torch.maximum(subjects, objects)[:, 2:]], 1)
        pairs = torch.arange(2 * count).reshape(2, count).T
        predictions[row["image_id"]] = {
            "boxes": torch.cat([unions, objects]).float(), "labels": graph["labels"][ends.T.flatten()],
            "scores": torch.ones(2 * count), "pairs": pairs,
            "predicate_scores": torch.eye(len(PREDICATES))[graph["relations"][:, 2]],
        }  # fmt: skip
    rows = [SceneGraphEvaluator(table, "sgdet", phrase_detection=on).evaluate(predictions) for on in (False, True)]
    assert rows[0]["R@100"] < 0.5 and rows[1]["R@100"] == 1.0
    assert rows[0]["wmAP_rel"] < 0.5 and rows[0]["wmAP_phr"] > 0.9  # some unions are those of two relations


def test_truth_is_that_of_the_boxes_that_were_asked(table):
    """A box that resizing left without width is in neither graph: recall is that of the others."""
    evaluator = SceneGraphEvaluator(table, "predcls")
    predictions = {}
    for row in map(table.row, range(len(table))):
        graph = {key: torch.from_numpy(value) for key, value in true_graph(row).items()}
        keep = graph["relations"][:, :2].lt(1).any(1).logical_not()  # without box 0 ...
        relations = graph["relations"][keep] - torch.tensor([1, 1, 0])
        scores = torch.zeros(len(relations), len(PREDICATES))
        scores[torch.arange(len(relations)), relations[:, 2]] = 1.0
        predictions[row["image_id"]] = {
            "boxes": graph["boxes"][1:], "labels": graph["labels"][1:], "scores": torch.ones(len(graph["boxes"]) - 1),
            "pairs": relations[:, :2], "predicate_scores": scores,
            "true_labels": graph["labels"][1:], "true_relations": relations,
        }  # fmt: skip
    scores = evaluator.evaluate(predictions)
    assert scores["ngR@100"] == scores["A@100"] == 1.0
    assert "R" in evaluator.describe(scores, predictions) and "left of" in evaluator.describe(scores, predictions)
    empty = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}
    strict = SceneGraphEvaluator(table, "sgdet", protocol="strict").evaluate(dict.fromkeys(evaluator.image_ids, empty))
    assert strict["R@100"] == 0.0 and strict["bbox_AP"] == 0.0


def test_relations_are_true_of_mirrored_images_too(table):
    dataset, left = DetectionDataset(table, RandomFlip(1.0)), []
    for index in range(len(table)):
        _, target = dataset[SampleKey(0, index)]
        assert "mirrored_predicates" not in target
        centres = target["boxes"][:, [0, 2]].mean(1)
        for subject, object_, predicate in target["relations"].tolist():
            if PREDICATES[predicate] in ("left of", "right of"):
                left.append(bool(centres[subject] < centres[object_]) == (PREDICATES[predicate] == "left of"))
    assert left and all(left)


def test_pictures_and_json(table, tmp_path):
    model = model_of(table, "sgdet").eval()
    found = predict_dataset(model, loader_of(table), "cpu").by_image
    path = make_evaluator(model, table, "toolkit").draw(found, 2, tmp_path / "graphs.png")
    assert path.stat().st_size > 1000
    graphs = json.loads(path.with_suffix(".json").read_text())
    assert len(graphs) == 2
    for graph in graphs.values():
        for relation in graph["relations"]:
            assert relation["predicate"] in PREDICATES and relation["subject"] < len(graph["detections"])
    truth = {"boxes": np.array([[0.0, 0, 10, 10], [20, 20, 30, 30]]), "labels": np.array([1, 2]),
             "relations": np.array([[0, 1, 3]])}  # fmt: skip
    boxes, labels = np.array([[20.0, 20, 30, 30], [0, 0, 10, 9], [0, 0, 3, 3]]), np.array([2, 1, 1])
    triplets = np.array([[1, 0, 3], [0, 1, 3], [1, 0, 2], [2, 0, 3]])
    assert correct_triplets(triplets, boxes, labels, truth).tolist() == [True, False, False, False]


def test_class_vectors_start_from_words(table, tmp_path):
    path = tmp_path / "glove.txt"
    path.write_text("the 9 9 9\ncircle 1 2 3\nstart 4 5 6\nsquare 7 8 9\n")
    vectors = load_word_vectors(path, ["Circle", "old square", "unknown"], 3)
    assert vectors[0].tolist() == [4, 5, 6] and vectors[2].tolist() == [1, 2, 3] and vectors[3].tolist() == [7, 8, 9]
    assert vectors.shape == (5, 3) and vectors[4].isfinite().all()
    model = model_of(table, "sgcls", embed_dim=3)
    vectors = load_word_vectors(path, table.class_names, 3)
    changed = start_from_words(model.head, vectors)
    assert sorted(changed) == ["context.decoder.embed", "context.embed_in", "context.embed_out"]
    circle = table.class_names.index("circle")
    assert model.head.context.embed_in.weight[1 + circle].tolist() == [1, 2, 3]
    assert model.head.context.decoder.embed.weight[2 + circle].tolist() == [1, 2, 3]
    assert start_from_words(model_of(table, "sgcls", "imp").head, vectors) == []
    with pytest.raises(BadInput, match="embed_dim"):
        load_word_vectors(path, ["circle"], 4)
    with pytest.raises(BadInput, match="none.txt"):
        load_word_vectors(tmp_path / "none.txt", ["circle"], 4)


def test_mistakes_are_explained(table, batch, tmp_path):
    with pytest.raises(BadInput) as caught:
        build_detector("scene_graph", class_names=["a"], mode="sgdett", head="motif", freeze="all")
    for word in ("sgdett", "'motif'", "'all'", "predicates"):
        assert word in str(caught.value)
    apart = {"architecture": "ssd", "strides": [8, 32], "channels": [8, 8], "aspect_ratios": [[2.0], [2.0]]}
    for words, options in {
        r"(?s)pairs_per_relation is 0.*match_iou is 50": {"pairs_per_relation": 0, "match_iou": 50.0},
        "model.detector_options: .*did you mean model.strides": {"detector_options": INNER | {"stride": [8]}},
        "model.detector_options: ssd has feature maps of strides .8, 32.": {"detector_options": apart},
        "head_options": {"head_options": {"context": "vctree"}},
        "separate_spatial is for the head causal": {"separate_spatial": True},
        "class_balanced_beta is 1.0": {"class_balanced_beta": 1.0},
        "class_balanced_beta is -0.1": {"class_balanced_beta": -0.1},
        "and 0 where model.rare_predicate_power is set": {"class_balanced_beta": 0.9, "rare_predicate_power": 0.5},
    }.items():
        with pytest.raises(BadInput, match=words):
            model_of(table, **options)
    model = model_of(table, rare_predicate_power=0.5)
    with pytest.raises(BadInput, match="--model.mode sgdet"):
        model(batch.images, batch.sizes)
    model.predicates = ("on",)
    with pytest.raises(BadInput, match="left of"):
        make_evaluator(model, table, "toolkit")
    with pytest.raises(BadInput, match="protocol"):
        SceneGraphEvaluator(table, "predcls", protocol="lenient")
    with pytest.raises(BadInput, match="eval.phrase_detection is for model.mode sgdet"):
        SceneGraphEvaluator(table, "predcls", phrase_detection=True)
    options = SceneGraphOptions(detector_options={"pretrained_backbone": True})
    with pytest.raises(BadInput, match="give them as model.pretrained_backbone"):
        start_scene_graph(options, table, tmp_path, checkpoint=None, say=print)
