"""Scene graphs in the formats of other programs, and the combinations that they are made of."""

import json

import networkx
import torch

from toolkit.evaluation.detections import relations_as_json, without_graph_constraint
from toolkit.scene_graphs.formats import SUFFIXES, graph_text

GRAPH = {
    "file_name": 'a "b".jpg',
    "detections": [{"category": 'cup "x" \\', "bbox": [1, 2, 3, 4], "score": 0.9, "category_id": 1},
                   {"category": "table", "bbox": [0, 0, 9, 9], "score": 0.8, "category_id": 2}],
    "relations": [{"subject": 0, "object": 1, "predicate": "on", "score": 0.7},
                  {"subject": 0, "object": 1, "predicate": "near", "score": 0.2}],
}  # fmt: skip


def test_every_format_keeps_objects_and_relations():
    texts = {name: graph_text(GRAPH, name) for name in SUFFIXES}
    assert 'n0 [label="0 cup \\"x\\" \\\\"];' in texts["dot"] and 'n0 -> n1 [label="near 0.20"];' in texts["dot"]
    read = networkx.node_link_graph(json.loads(texts["networkx"]), edges="edges")
    assert isinstance(read, networkx.MultiDiGraph) and read.nodes[1]["category"] == "table"
    assert [edge["predicate"] for edge in read[0][1].values()] == ["on", "near"]
    linked = json.loads(texts["jsonld"])
    ids = {node["@id"] for node in linked["objects"]}
    assert all({each["rdf:subject"]["@id"], each["rdf:object"]["@id"]} <= ids for each in linked["relations"])
    for name in SUFFIXES:
        assert graph_text({"file_name": "a.jpg", "detections": [], "relations": []}, name)


def test_without_constraint_a_pair_comes_with_several_predicates():
    generator = torch.Generator().manual_seed(0)
    found = {"scores": torch.rand(4, generator=generator), "pairs": torch.tensor([[0, 1], [1, 0], [2, 3]]),
             "predicate_scores": torch.rand(3, 5, generator=generator)}  # fmt: skip
    free = without_graph_constraint(found, count=7)
    expected = sorted(
        (float(p * found["scores"][s] * found["scores"][o]) for (s, o), row in
         zip(found["pairs"].tolist(), found["predicate_scores"], strict=True) for p in row), reverse=True)  # fmt: skip
    torch.testing.assert_close(free["triplet_scores"], torch.tensor(expected[:7]))
    written = relations_as_json(free, list("abcde"), all_scores=True)
    assert len({(r["subject"], r["object"], r["predicate"]) for r in written}) == 7 > len(found["pairs"])
    assert all(list(r["predicate_scores"]) == sorted("abcde", key=r["predicate_scores"].get, reverse=True)
               for r in written)  # fmt: skip
    nothing = {"scores": torch.zeros(0), "pairs": torch.zeros(0, 2).long(), "predicate_scores": torch.zeros(0, 5)}
    assert relations_as_json(without_graph_constraint(nothing), list("abcde")) == []
