"""Scene graph metrics at their edges."""

import json

import numpy as np
import pytest
import torch
from places import ASSETS, ROOT
from report_data import table_of

from scripts.benches import scene_graph
from toolkit.base.errors import BadInput
from toolkit.detectors.scene_graphs.egtr import largest_first
from toolkit.detectors.scene_graphs.evaluator import grouped_recall, predicate_groups
from toolkit.detectors.scene_graphs.metrics import evaluate_scene_graphs
from toolkit.detectors.scene_graphs.open_images_metrics import open_images_metrics
from toolkit.detectors.scene_graphs.triplet_matches import best_combinations, boxes_of_objects, compact_graph
from toolkit.detectors.scene_graphs.true_graphs import zero_shot_triplets

STATS = ASSETS / "vg150_stats"
BOXES = np.asarray([[0, 0, 20, 20], [50, 50, 80, 80], [0, 60, 30, 90]], np.float32)


def truth(relations, boxes=BOXES, labels=None):
    labels = np.arange(len(boxes)) if labels is None else labels
    return {"boxes": boxes, "labels": labels, "relations": np.asarray(relations, np.int64).reshape(-1, 3)}


def prediction(pairs, predicates, num_predicates=4, boxes=BOXES, labels=None):
    """One confident predicate per pair."""
    scores = np.full((len(pairs), num_predicates), 0.01, np.float32)
    scores[np.arange(len(pairs)), predicates] = np.linspace(0.9, 0.5, len(pairs))
    labels = np.arange(len(boxes)) if labels is None else labels
    pred = {"boxes": boxes, "labels": labels, "scores": np.ones(len(boxes), np.float32)}
    return pred | {"pairs": np.asarray(pairs, np.int64).reshape(-1, 2), "predicate_scores": scores}


def test_equals_the_plain_evaluation():
    for shape in ((1, 2, 2, 1), (70, 9, 60, 7), (5, 20, 380, 50)):
        data = *scene_graph.random_scene_graphs(*shape), shape[-1]
        ours, plain = scene_graph.our_evaluation(*data), scene_graph.plain_evaluation(*data)
        assert plain.keys() == ours.keys() - {"F1"}
        for name in plain:
            np.testing.assert_allclose(ours[name], plain[name], rtol=0, atol=1e-12, err_msg=name)


def test_strict_counts_images_without_pairs_and_leaves_absent_predicates_out():
    truths = [truth([[0, 1, 2]]), truth([[0, 1, 2]]), truth([])]
    predictions = [prediction([[0, 1]], [2]), prediction([], []), prediction([[0, 1]], [0])]
    original = evaluate_scene_graphs(truths, predictions, "sgdet", 4)
    strict = evaluate_scene_graphs(truths, predictions, "sgdet", 4, protocol="strict")
    assert original.evaluated_images.tolist() == [0]
    assert strict.evaluated_images.tolist() == [0, 1]
    assert original.values["R"].tolist() == [1.0] * 3
    assert original.values["mR"].tolist() == [0.25] * 3
    assert strict.values["R"].tolist() == strict.values["mR"].tolist() == [0.5] * 3


def emitted_twice(pred):
    """Every box twice; the pairs between the copies tell the second best predicates."""
    scores, second = pred["predicate_scores"], pred["predicate_scores"].copy()
    second[np.arange(len(second)), second.argmax(1)] = 0
    boxes = {key: np.concatenate([pred[key]] * 2) for key in ("boxes", "labels", "scores")}
    pairs = np.concatenate([pred["pairs"], pred["pairs"] + len(pred["boxes"])])
    return ranked(boxes | {"pairs": pairs, "predicate_scores": np.concatenate([scores, second])})


def ranked(pred):
    best = pred["predicate_scores"].max(1) * pred["scores"][pred["pairs"]].prod(1)
    order = np.argsort(-best, kind="stable")
    return pred | {key: pred[key][order] for key in ("pairs", "predicate_scores")}


def test_a_box_emitted_twice_counts_once():
    """`-s` prints the numbers of docs/detectors/scene_graphs.md."""
    truths, predictions, _ = scene_graph.random_scene_graphs(200, 8, 40, 7)
    once = [ranked(pred) for pred in predictions]
    twice = [emitted_twice(pred) for pred in predictions]
    found = {}
    for protocol in ("original", "strict"):
        for name, emitted in (("once", once), ("twice", twice)):
            found[protocol, name] = evaluate_scene_graphs(truths, emitted, "sgdet", 7, protocol=protocol).values["R"]
            numbers = " | ".join(f"{recall:.3f}" for recall in found[protocol, name])
            row = f"| `{protocol}` | {name} | {numbers} |"
            print(row)
            assert row in (ROOT / "docs" / "detectors" / "scene_graphs.md").read_text()
    np.testing.assert_array_equal(found["original", "once"], found["strict", "once"])
    assert found["original", "twice"][-1] > 1.1 * found["original", "once"][-1]
    assert (found["strict", "twice"] <= found["strict", "once"]).all()


def test_the_surest_box_of_an_object_stands_for_it():
    """The second of three boxes on an object is the surest; the third stands for the neighbour that it overlaps too."""
    boxes = np.asarray([[0, 0, 20, 20], [0, 0, 20, 21], [0, 0, 20, 19], [50, 50, 80, 80]], np.float32)
    pred = {"boxes": boxes, "labels": np.asarray([0, 0, 0, 1]), "scores": np.asarray([0.5, 0.9, 0.4, 0.3])}
    true = truth([], np.asarray([[0, 0, 20, 20], [50, 50, 80, 80], [0, 0, 20, 16]], np.float32), np.asarray([0, 2, 0]))
    assert boxes_of_objects(true, pred).tolist() == [2, 0, -1, -1]


def test_nothing_to_evaluate():
    for truths, predictions in (([], []), ([truth([])], [prediction([[0, 1]], [0])])):
        metrics = evaluate_scene_graphs(truths, predictions, "sgcls", 4)
        assert np.isnan(metrics.values["R"]).all() and (metrics.values["mR"] == 0).all()
        assert np.isnan(metrics.values["zR"]).all() and np.isnan(metrics.values["A"]).all()
        row = metrics.as_row(["a", "b", "c", "d"])
        assert row["R@20"] is None and row["mR@100/c"] == 0.0
        assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_accuracy_ranks_annotated_pairs_only():
    """The annotated pair comes second: missed by R@1, found by A@1."""
    metrics = evaluate_scene_graphs([truth([[1, 0, 3]])], [prediction([[0, 2], [1, 0]], [0, 3])], "sgcls", 4, top=(1,))
    assert metrics.values["R"].tolist() == [0.0]
    assert metrics.values["A"].tolist() == [1.0]


def test_relative_recall_takes_as_many_as_the_image_has():
    """Of two relations the second is found third, of one the first first: 1/2 and 1; by predicate 1 and (0 + 1) / 2."""
    truths = [truth([[0, 1, 2], [1, 2, 3]]), truth([[0, 1, 3]])]
    predictions = [prediction([[0, 1], [0, 2], [1, 2]], [2, 1, 3]), prediction([[0, 1], [1, 0]], [3, 3])]
    row = evaluate_scene_graphs(truths, predictions, "sgdet", 4, protocol="strict").as_row()
    assert (row["R@20"], row["R@relative"], row["mR@relative"]) == (1.0, 0.75, 0.75)


def test_open_images_counted_by_hand():
    """Predicate 1, annotated twice: the surest finds one, the next the same again, the third the other, but
    only by the union of its boxes: AP is 1/2, and (1 + 2/3) / 2 of unions. Predicate 0, annotated once, is missed."""
    boxes = np.asarray([[0, 0, 100, 100], [200, 0, 300, 100], [0, 0, 100, 100], [200, 0, 300, 40]], np.float32)
    true = truth([[0, 1, 1], [1, 0, 1], [0, 1, 0]], boxes[:2], np.asarray([5, 6]))
    scores = np.zeros((3, 2), np.float32)
    scores[:, 1] = 0.9, 0.8, 0.7
    pred = {"boxes": boxes, "labels": np.asarray([5, 6, 5, 6]), "scores": np.ones(4, np.float32)}
    pred |= {"pairs": np.asarray([[0, 1], [2, 1], [3, 0]]), "predicate_scores": scores}
    expected = {"wmAP_rel": 2 / 3 * 1 / 2, "wmAP_phr": 2 / 3 * (1 + 2 / 3) / 2, "micro_R@50": 1 / 3}
    expected["score_wtd"] = 0.4 * expected["wmAP_rel"] + 0.4 * expected["wmAP_phr"] + 0.2 / 3
    assert open_images_metrics([true], [pred], 2) == pytest.approx(expected)
    assert open_images_metrics([true], [compact_graph(pred, 100)], 2) == pytest.approx(expected)
    assert open_images_metrics([true], [prediction([], [], 2)], 2) == dict.fromkeys(expected, 0.0)
    assert set(open_images_metrics([truth([])], [pred], 2).values()) == {None}


def test_open_images_equals_the_published_program():
    """Figures of its `ap_eval` on these graphs, whose objects have three classes and boxes that are far off."""
    truths, predictions, _ = scene_graph.random_scene_graphs(25, 7, 30, 5, num_classes=3)
    for pred in predictions:
        pred["boxes"] = pred["boxes"] + np.asarray([12, -9, 20, 7], np.float32)
    found = open_images_metrics(truths, predictions, 5)
    assert found["wmAP_rel"] == pytest.approx(0.09850498135689, abs=1e-12)
    assert found["wmAP_phr"] == pytest.approx(0.29249930630124, abs=1e-12)
    assert found["micro_R@50"] == pytest.approx(0.398)


def test_zero_shot_triplets_name_classes_not_boxes():
    labels, unseen = np.asarray([7, 5, 6]), np.asarray([[5, 6, 3], [0, 1, 2]])
    truths = [truth([[0, 1, 2], [1, 2, 3]], labels=labels)]
    metrics = evaluate_scene_graphs(truths, [prediction([[0, 1]], [2], labels=labels)], "sgdet", 4, zero_shot=unseen)
    assert metrics.values["zR"].tolist() == [0.0] * 3 and metrics.values["R"].tolist() == [0.5] * 3


def test_triplets_that_training_did_not_show_are_those_of_the_table(tmp_path):
    objects = [((10 * k, 5, 10 * k + 8, 20), label) for k, label in enumerate((0, 1, 1))]
    relations = [(0, 1, 1), (0, 2, 1), (1, 0, 0), (1, 2, 0)]  # of objects; the second is the first's triplet
    table = table_of(tmp_path, [{"objects": objects, "relations": relations}], predicates=("on", "of"), draw=False)
    seen = np.zeros((2, 2, 2), bool)
    seen[1, 0, 0] = True
    assert zero_shot_triplets(seen, table).tolist() == [[0, 1, 1], [1, 1, 0]]


def test_lost_boxes_match_nothing():
    """Late NMS gives a box that lost every class the label -1."""
    pred = prediction([[0, 1]], [2], labels=np.asarray([-1, 1, 2]))
    assert evaluate_scene_graphs([truth([[0, 1, 2]])], [pred], "sgdet", 4).values["R"].max() == 0


def test_real_examples_have_the_documented_recall():
    examples = json.loads((STATS / "examples.json").read_text())["images"]
    truths, predictions = [], []
    for image in examples:
        corner = np.arange(len(image["objects"]), dtype=np.float32)[:, None] * 30
        boxes = np.concatenate([corner, corner, corner + 20, corner + 20], 1)
        truths.append(truth(np.asarray(image["gt_relations"]) - [0, 0, 1], boxes, np.asarray(image["objects"])))
        rows = np.asarray(image["pred_relations"])
        labels = np.asarray([label or -1 for label in image["pred_objects"]])
        predictions.append(prediction(rows[:, :2], rows[:, 2] - 1, 50, boxes, labels))
    metrics = evaluate_scene_graphs(truths, predictions, "sgcls", 50, top=(1, 5, 10, 20), protocol="strict")
    np.testing.assert_allclose(metrics.values["R"], [0, 0.29, 0.33, 0.37], atol=1e-9)
    np.testing.assert_allclose(metrics.values["mR"], [0, 0.1429, 0.2143, 0.2381], atol=5e-5)
    np.testing.assert_allclose(metrics.per_image["R"][-1], [0.6, 0.25, 0, 0, 1], atol=1e-9)
    unseen = np.loadtxt(STATS / "zeroshot_triplets.csv", delimiter=",", skiprows=1, dtype=np.int64)
    assert unseen.shape == (5971, 3)
    zero = evaluate_scene_graphs(truths, predictions, "sgcls", 50, zero_shot=unseen - [0, 0, 1])
    assert zero.zero_shot_images.tolist() == [1] and zero.values["zR"].tolist() == [0.0] * 3


def test_every_mistake_is_named_at_once():
    bad = prediction([[0, 9]], [1]) | {"predicate_scores": np.zeros((1, 3), np.float32)}
    with pytest.raises(BadInput) as caught:
        evaluate_scene_graphs([truth([])], [bad], "sgdt", 4, protocol="lax")
    for words in ("sgdt", "lax", "image 0", "box 9", "(1, 3)", "(1, 4)"):
        assert words in str(caught.value)
    with pytest.raises(BadInput, match="one per image"):
        evaluate_scene_graphs([truth([])], [], "sgdet", 4)


def test_predicates_are_grouped_by_how_often_training_had_them():
    groups = predicate_groups(np.arange(50))
    assert [len(labels) for labels in groups.values()] == [16, 17, 17] and groups["head"][0] == 49
    assert {label for labels in groups.values() for label in labels} == set(range(50))
    metrics = evaluate_scene_graphs(
        [truth([[0, 1, 0], [1, 2, 2]])], [prediction([[0, 1], [1, 2]], [0, 1])], "sgdet", 4, top=(1, 20)
    )
    groups = predicate_groups(np.asarray([9, 1, 5, 1]))
    assert {name: labels.tolist() for name, labels in groups.items()} == {"head": [0], "body": [2], "tail": [1, 3]}
    row = grouped_recall(metrics, groups, "strict")
    assert row == {"mR_head@1": 1.0, "mR_head@20": 1.0, "mR_body@1": 0.0, "mR_body@20": 0.0, "mR_tail@1": None,
                   "mR_tail@20": None}  # fmt: skip
    assert grouped_recall(metrics, groups, "original")["mR_tail@20"] == 0.0


def test_recall_of_head_body_and_tail_counted_by_hand():
    """Of 6 predicates 2 in each; found are 1 and 0 of the head's, 1/2 and 1 of the body's, 0 of one of the tail's."""
    groups = predicate_groups(np.asarray([60, 50, 40, 30, 20, 10]))
    truths = [truth([[0, 1, 0], [1, 2, 1], [0, 2, 2], [2, 0, 2], [2, 1, 3], [1, 0, 4]])]
    found = [prediction([[0, 1], [0, 2], [2, 1], [2, 0]], [0, 2, 3, 3], 6)]
    row = grouped_recall(evaluate_scene_graphs(truths, found, "sgdet", 6, top=(100,)), groups, "strict")
    assert row == {"mR_head@100": 0.5, "mR_body@100": 0.75, "mR_tail@100": 0.0}


def test_a_compact_graph_measures_the_same():
    """With the hundred best combinations of pair and predicate in place of all scores; of no pairs and few, too."""
    truths, predictions, unseen = scene_graph.random_scene_graphs(70, 9, 60, 7)
    truths.append(truth([[0, 1, 2]]))
    predictions.append(prediction([], [], 7))
    compact = [compact_graph(each, 100) for each in predictions]
    assert all("predicate_scores" not in each and len(each["combinations"]) <= 100 for each in compact)
    assert all(each["two_scores"].shape == each["two_predicates"].shape == (len(each["pairs"]), 2) for each in compact)
    for mode in ("sgcls", "sgdet", "phrdet"):
        whole, small = (evaluate_scene_graphs(truths, found, mode, 7, unseen) for found in (predictions, compact))
        assert whole.as_row() == small.as_row()
        np.testing.assert_array_equal(whole.unconstrained_matches, small.unconstrained_matches)
        np.testing.assert_array_equal(whole.matches, small.matches)
    compact[0]["combinations"] = np.asarray([[60, 0]])
    with pytest.raises(BadInput, match="image 0: combinations and predicates do not fit 60 pairs and 7 predicates"):
        evaluate_scene_graphs(truths, compact, "sgdet", 7)


@pytest.mark.parametrize("keep", [1, 7, 100, 5000])
def test_equal_combinations_are_ranked_by_pair_then_predicate_at_the_cut_too(keep):
    rng = np.random.default_rng(keep)
    for pairs in (1, 20, 300):
        scores, of_pairs = (rng.integers(0, 5, shape).astype(np.float32) / 4 for shape in ((pairs, 12), pairs))
        everything = (scores * of_pairs[:, None]).ravel()
        expected = np.argsort(-everything, kind="stable")[:keep]
        np.testing.assert_array_equal(best_combinations(scores, of_pairs, keep), np.stack(np.divmod(expected, 12), 1))
    many = torch.from_numpy(rng.integers(-1, 4, (5, 400)).astype(np.float32))
    values, columns = largest_first(many, keep)
    expected = many.sort(descending=True, stable=True)
    real = values >= 0  # those to be left out are in no order
    assert torch.equal(values, expected.values[:, :keep])
    assert torch.equal(columns[real], expected.indices[:, :keep][real])
