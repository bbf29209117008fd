"""Recall of relations: against a plain evaluation, published examples, and counted by hand."""

import json

import numpy as np
import pytest
from places import ASSETS, ROOT
from scene_graph_data import prediction, truth

from scripts.benches import scene_graph
from toolkit.base.errors import BadInput
from toolkit.detectors.scene_graphs.metrics import evaluate_scene_graphs

STATS = ASSETS / "vg150_stats"


@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 2, 1),
        (70, 9, 60, 7),
        (5, 20, 380, 50),
    ],
)
def test_metrics_are_those_of_the_plain_evaluation(shape):
    data = *scene_graph.random_scene_graphs(*shape), shape[-1]
    ours = scene_graph.our_evaluation(*data)
    plain = scene_graph.plain_evaluation(*data)
    assert plain.keys() == ours.keys() - {"F1"}
    for name in plain:
        np.testing.assert_allclose(
            ours[name],
            plain[name],
            rtol=0,
            atol=1e-12,
            err_msg=name,
        )


def test_strict_counts_images_without_pairs_and_leaves_absent_predicates_out():
    truths = [truth("0 1 2"), truth("0 1 2"), truth("")]
    predictions = [prediction("0 1 2"), prediction(""), prediction("0 1 0")]
    original = evaluate_scene_graphs(truths, predictions, "sgdet", 4)
    assert original.evaluated_images.tolist() == [0]
    assert original.values["R"].tolist() == [1.0] * 3
    assert original.values["mR"].tolist() == [0.25] * 3
    strict = evaluate_scene_graphs(truths, predictions, "sgdet", 4, protocol="strict")
    assert strict.evaluated_images.tolist() == [0, 1]
    assert strict.values["R"].tolist() == strict.values["mR"].tolist() == [0.5] * 3


def ranked(graph):
    best = graph["predicate_scores"].max(1) * graph["scores"][graph["pairs"]].prod(1)
    order = np.argsort(-best, kind="stable")
    return graph | {key: graph[key][order] for key in ("pairs", "predicate_scores")}


def emitted_twice(graph):
    """Every box twice; the pairs between the copies tell the second best predicates."""
    second = graph["predicate_scores"].copy()
    second[np.arange(len(second)), second.argmax(1)] = 0
    twice = {key: np.concatenate([graph[key]] * 2) for key in ("boxes", "labels", "scores")}
    twice["pairs"] = np.concatenate([graph["pairs"], graph["pairs"] + len(graph["boxes"])])
    twice["predicate_scores"] = np.concatenate([graph["predicate_scores"], second])
    return ranked(twice)


def test_a_box_emitted_twice_counts_once_in_the_strict_protocol():
    """The last numbers, R@100, are those of docs/detectors/scene_graphs.md."""
    truths, predictions, _ = scene_graph.random_scene_graphs(200, 8, 40, 7)
    graphs = {
        "once": [ranked(graph) for graph in predictions],
        "twice": [emitted_twice(graph) for graph in predictions],
    }
    found = {}
    for protocol in ("original", "strict"):
        for name, emitted in graphs.items():
            found[protocol, name] = evaluate_scene_graphs(truths, emitted, "sgdet", 7, protocol=protocol).values["R"]
    once = found["original", "once"][-1]
    twice = found["original", "twice"][-1]
    documented = " ".join((ROOT / "docs" / "detectors" / "scene_graphs.md").read_text(encoding="utf-8").split())
    assert f"R@100 in sgdet rises from {once:.3f} to {twice:.3f}." in documented
    assert f"R@100 stays at {once:.3f}." in documented
    np.testing.assert_array_equal(found["original", "once"], found["strict", "once"])
    assert found["original", "twice"][-1] > 1.1 * found["original", "once"][-1]
    assert (found["strict", "twice"] <= found["strict", "once"]).all()


@pytest.mark.parametrize("images", [0, 1])
def test_without_relations_there_is_no_recall(images):
    metrics = evaluate_scene_graphs([truth("")] * images, [prediction("0 1 0")] * images, "sgcls", 4)
    row = metrics.as_row(["a", "b", "c", "d"])
    assert {row[name] for name in ("R@20", "ngR@50", "zR@100", "A@20")} == {None}
    assert row["mR@100/c"] == 0.0
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_relative_recall_takes_as_many_as_the_image_has():
    """Of two relations the second is found third, of one the first first: 1/2 and 1; by predicate 1 and (0 + 1) / 2."""
    truths = [truth("0 1 2, 1 2 3"), truth("0 1 3")]
    predictions = [prediction("0 1 2, 0 2 1, 1 2 3"), prediction("0 1 3, 1 0 3")]
    row = evaluate_scene_graphs(truths, predictions, "sgdet", 4, protocol="strict").as_row()
    assert row["R@20"] == 1.0
    assert row["R@relative"] == row["mR@relative"] == 0.75


def examples():
    """Published ones: objects in a row, apart from each other; class 0 is none."""
    for image in json.loads((STATS / "examples.json").read_text())["images"]:
        corner = np.arange(len(image["objects"]), dtype=np.float32)[:, None] * 30
        boxes = np.concatenate([corner, corner, corner + 20, corner + 20], 1)
        true = truth("") | {"boxes": boxes, "labels": np.asarray(image["objects"])}
        true["relations"] = np.asarray(image["gt_relations"]) - [0, 0, 1]
        rows = np.asarray(image["pred_relations"])
        scores = np.zeros((len(rows), 50), np.float32)
        scores[np.arange(len(rows)), rows[:, 2] - 1] = np.linspace(
            0.9,
            0.5,
            len(rows),
        )
        found = {
            "boxes": boxes,
            "labels": np.asarray([label or -1 for label in image["pred_objects"]]),
        }
        found |= {
            "scores": np.ones(len(boxes)),
            "pairs": rows[:, :2],
            "predicate_scores": scores,
        }
        yield true, found


def test_real_examples_have_the_documented_recall():
    truths, predictions = zip(*examples(), strict=True)
    unseen = np.loadtxt(
        STATS / "zeroshot_triplets.csv",
        delimiter=",",
        skiprows=1,
        dtype=np.int64,
    ) - [0, 0, 1]
    options = {"top": (1, 5, 10, 20), "protocol": "strict"}
    metrics = evaluate_scene_graphs(truths, predictions, "sgcls", 50, unseen, **options)
    np.testing.assert_allclose(
        metrics.values["R"],
        [0, 0.29, 0.33, 0.37],
        atol=1e-9,
    )
    np.testing.assert_allclose(
        metrics.values["mR"],
        [0, 0.1429, 0.2143, 0.2381],
        atol=5e-5,
    )
    np.testing.assert_allclose(
        metrics.per_image["R"][-1],
        [0.6, 0.25, 0, 0, 1],
        atol=1e-9,
    )
    assert metrics.zero_shot_images.tolist() == [1]
    assert not metrics.values["zR"].any()


def test_every_mistake_is_named_at_once():
    bad = prediction("0 9 1", num_predicates=3)
    with pytest.raises(BadInput) as caught:
        evaluate_scene_graphs([truth("")], [bad], "sgdt", 4, protocol="lax")
    for words in ("sgdt", "lax", "image 0", "box 9", "(1, 3)", "(1, 4)"):
        assert words in str(caught.value)
    with pytest.raises(BadInput, match="one per image"):
        evaluate_scene_graphs([truth("")], [], "sgdet", 4)
