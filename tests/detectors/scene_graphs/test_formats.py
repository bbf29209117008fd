"""Scene graphs as JSON, Graphviz and NetworkX."""

import json

import networkx
import pytest
import torch

from toolkit.detectors.scene_graphs.formats import (
    graph_text,
    relations_as_json,
    without_graph_constraint,
)
from toolkit.tools.predict.choices import GRAPH_SUFFIXES

GRAPH = {
    "file_name": 'a "b".jpg',
    "detections": [
        {
            "category": 'cup "x" \\',
            "bbox": [1, 2, 3, 4],
            "score": 0.9,
            "category_id": 1,
        },
        {"category": "table", "bbox": [0, 0, 9, 9], "score": 0.8, "category_id": 2},
    ],
    "relations": [
        {"subject": 0, "object": 1, "predicate": "on", "score": 0.7},
        {"subject": 0, "object": 1, "predicate": "near", "score": 0.2},
    ],
}
PREDICATES = list("abcde")


def test_graphviz_names_objects_and_relations():
    text = graph_text(GRAPH, "dot")
    assert 'n0 [label="0 cup \\"x\\" \\\\"];' in text
    assert 'n0 -> n1 [label="near 0.20"];' in text


def test_networkx_reads_objects_and_relations():
    read = networkx.node_link_graph(json.loads(graph_text(GRAPH, "networkx")), edges="edges")
    assert isinstance(read, networkx.MultiDiGraph)
    assert read.nodes[1]["category"] == "table"
    assert [edge["predicate"] for edge in read[0][1].values()] == ["on", "near"]


@pytest.mark.parametrize("format", GRAPH_SUFFIXES)
def test_an_image_without_objects_has_a_text(format):
    assert graph_text({"file_name": "a.jpg", "detections": [], "relations": []}, format)


def test_without_constraint_a_pair_comes_with_several_predicates():
    generator = torch.Generator().manual_seed(0)
    found = {
        "scores": torch.rand(4, generator=generator),
        "pairs": torch.tensor([[0, 1], [1, 0], [2, 3]]),
        "predicate_scores": torch.rand(3, 5, generator=generator),
    }
    free = without_graph_constraint(found, count=7)
    every = []
    for (subject, other), row in zip(found["pairs"].tolist(), found["predicate_scores"], strict=True):
        every += (row * (found["scores"][subject] * found["scores"][other])).tolist()
    torch.testing.assert_close(free["triplet_scores"], torch.tensor(sorted(every, reverse=True)[:7]))
    written = relations_as_json(free, PREDICATES, all_scores=True)
    triplets = {(relation["subject"], relation["object"], relation["predicate"]) for relation in written}
    assert len(triplets) == 7
    for relation in written:
        scores = relation["predicate_scores"]
        assert list(scores) == sorted(PREDICATES, key=scores.get, reverse=True)


def test_no_pairs_are_no_relations():
    nothing = {
        "scores": torch.zeros(0),
        "pairs": torch.zeros(0, 2).long(),
        "predicate_scores": torch.zeros(0, 5),
    }
    assert relations_as_json(without_graph_constraint(nothing), PREDICATES) == []
