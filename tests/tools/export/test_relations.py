"""Scene graphs as files: the same objects and relations."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from exported_detectors import CATEGORIES, CLASSES, REAL_TIME, images_of, scattered
from scene_graph_data import shapes_table

from toolkit.models import build_detector
from toolkit.tools.export import judge
from toolkit.tools.export.exported_files import ExportMetadata
from toolkit.tools.export.relations import PixelsToGraph, export_graph
from toolkit.tools.export.request import ExportRequest
from toolkit.tools.predict.open import OwnDetector, open_predictor
from toolkit.tools.predict.predict_split import SplitOptions, open_any
from toolkit.tools.predict.predictor import own_predict, predict_with

SIZE = {"height": 64, "width": 64}
RELATIONS = {
    "predicates": ["on", "under", "in"],
    "detector_options": {"architecture": "rt_detr_v2"} | REAL_TIME,
}
TWO_STAGES = RELATIONS | {
    "mode": "sgdet",
    "head_options": {"dim": 16},
    "map_channels": 8,
    "hidden_dim": 8,
    "representation_size": 16,
    "embed_dim": 4,
    "detections_per_image": 7,
    "score_threshold": 0.001,
    "nms_threshold": 0.3,
    "prior_adjustment": 0.5,
}
NAMES = ["egtr", "react", "penet", "react_pp"]


def graph_detector(name: str):
    torch.manual_seed(0)
    if name == "egtr":
        detector = build_detector("egtr", class_names=CLASSES, **RELATIONS)
    else:
        detector = build_detector("scene_graph", class_names=CLASSES, **TWO_STAGES, head=name)
    with torch.no_grad():
        scattered(detector).relation_counts += torch.randint(1, 9, detector.relation_counts.shape)
    return detector


def assert_same_graphs(found, expected):
    """The same objects, and the same scores of the same pairs; pairs whose scores are equal to rounding may change
    places, also at the cut."""
    for one, other in zip(found, expected, strict=True):
        count = min(len(one["pairs"]), 100)
        assert count > 5
        assert len(other["pairs"]) == len(other["triplet_scores"]) >= count
        for key in ("boxes", "scores", "labels"):
            torch.testing.assert_close(one[key], other[key], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(
            one["triplet_scores"][:count],
            other["triplet_scores"][:count],
            rtol=1e-4,
            atol=1e-5,
        )
        here = {tuple(pair): row for row, pair in enumerate(one["pairs"].tolist())}
        there = {tuple(pair): row for row, pair in enumerate(other["pairs"].tolist())}
        both = [pair for pair in list(here)[:count] if pair in there]
        assert len(both) >= 0.98 * count
        rows = [here[pair] for pair in both]
        others = [there[pair] for pair in both]
        for key in ("predicate_scores", "triplet_scores"):
            torch.testing.assert_close(one[key][rows], other[key][others], rtol=1e-4, atol=1e-5)


def graphs_of_the_function(detector) -> list:
    """Graphs of the function that is exported, which are those of the detector."""
    images = images_of(3, 64, 64)
    assert detector.graph_obstacle() is None
    with torch.no_grad():
        outputs = [output.numpy() for output in PixelsToGraph(detector)(images)]
    about = ExportMetadata(
        "x",
        CATEGORIES,
        None,
        "fixed",
        32,
        0.3,
        100,
        "here",
        predicates=RELATIONS["predicates"],
    )
    found = predict_with(lambda _: outputs, about)(list(images), 0.0)
    assert_same_graphs(found, own_predict(detector, None)(list(images), 0.0))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_function_of_a_graph_gives_what_postprocess_gives(name):
    graphs_of_the_function(graph_detector(name))


def test_what_was_not_found_takes_no_class_from_what_was():
    """Objects that suppression left out fill the rows of an image; late NMS is between the others."""
    detector = graph_detector("penet")
    detector.detections_per_image = 20
    detector.nms_threshold = detector.detector.nms_threshold = 0.01
    for graph in graphs_of_the_function(detector):
        assert len(graph["scores"]) < 20


@pytest.mark.slow  # a minute each
@pytest.mark.parametrize("name", ["egtr", "penet"])
def test_an_exported_graph_is_used_like_a_run(name, tmp_path):
    detector = graph_detector(name)
    images = images_of(3, 64, 64)
    what = {
        "categories": CATEGORIES,
        "size": SIZE,
        "source": "here",
        "score_threshold": 0.3,
    }
    predictor = open_predictor(export_graph(detector, tmp_path, **what))
    assert list(predictor.predicates) == RELATIONS["predicates"]
    assert_same_graphs(predictor.predict(list(images), 0.0), own_predict(detector, None)(list(images), 0.0))
    graph = predictor(images[0], 0.3)
    assert (graph["scores"] > 0.3).all()
    assert (graph["pairs"] < len(graph["boxes"])).all()
    for entry in predictor.as_json(graph)["relations"]:
        assert set(entry) == {"subject", "object", "predicate", "score"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "sgdet", "head": "motifs"}, "of the heads only penet, react, react_pp"),
        ({"mode": "sgdet", "head": "react", "head_options": {"dim": 8}}, "two stages"),
        ({"mode": "predcls", "head": "imp"}, "the boxes are given"),
    ],
)
def test_a_graph_that_cannot_be_exported_says_why(options, words, capsys):
    options = options | {
        "predicates": ["on"],
        "backbone": "test_resnet",
        "hidden_dim": 16,
        "embed_dim": 8,
    }
    detector = build_detector("scene_graph", class_names=CLASSES, **options)
    assert words in detector.graph_obstacle()
    trained = OwnDetector("here", detector, CATEGORIES, None)
    assert judge.write_relations(trained, None, Path("there"), ExportRequest(), {}) == []
    said = capsys.readouterr().out
    assert "the relations are not exported, only the detector is: " in said
    assert words in said


@pytest.mark.slow  # a minute
def test_an_exported_graph_is_judged_by_its_recall(tmp_path):
    table = shapes_table(tmp_path, images=4)
    options = RELATIONS | {"predicates": list(table.predicates)}
    detector = build_detector("egtr", class_names=table.class_names, **options).eval()
    problems = {}
    trained = OwnDetector("here", detector, table.categories, SIZE)
    torch_line, file_line = judge.write_relations(trained, table, tmp_path, ExportRequest(), problems)
    assert not problems
    assert torch_line["R@100"] is not None
    for name in ("R@20", "R@50", "R@100", "mR@100"):
        assert file_line[name] == pytest.approx(torch_line[name], abs=0.02)
    last = judge.graphs_as_table([torch_line, file_line]).splitlines()[-1]
    assert last.startswith("| graph.onnx | ")
    assert last.endswith(f" | {file_line['ms']:.1f} |")
    assert file_line["ms"] > 0
    split = SplitOptions(split=str(tmp_path / "data" / "annotations" / "train.json"))
    said = []
    open_any(
        tmp_path / "graph.onnx",
        None,
        split,
        SimpleNamespace(device="cpu", print=said.append),
    )
    assert said[-1].endswith("graph.onnx: only its boxes are measured; evaluate.py RUN and export.py measure relations")
