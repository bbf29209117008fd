"""Formats of one image's scene graph: JSON with the names of the training data, Graphviz, and NetworkX.

The last two are made from `{"file_name", "detections": [...], "relations": [...]}`, an entry of predictions.json; see
`detections_as_json` and `relations_as_json`.
"""

import json
from collections.abc import Mapping, Sequence

from toolkit.evaluation.predictions import Detections

MAX_RELATIONS = 100  # of one image, as recall counts
OBJECT_KEYS = ("category", "bbox", "score")


def without_graph_constraint(graph: Detections, count: int = MAX_RELATIONS) -> Detections:
    """Return a copy of an image's graph with its `count` best combinations of pair and predicate as relations, instead
    of one predicate for each pair.

    Combinations with equal scores are in the order of pairs, then predicates, as ng-R@K ranks them.
    """
    ends = graph["scores"][graph["pairs"]].prod(1)
    scores = (graph["predicate_scores"] * ends[:, None]).flatten()
    best = scores.sort(descending=True, stable=True).indices[:count]
    num_predicates = graph["predicate_scores"].shape[1]
    rows = best // num_predicates
    predicates = best % num_predicates
    return {
        **graph,
        "pairs": graph["pairs"][rows],
        "predicate_scores": graph["predicate_scores"][rows],
        "predicates": predicates,
        "triplet_scores": scores[best],
    }


def relations_as_json(graph: Detections, predicates: Sequence[str], all_scores: bool = False) -> list[dict]:
    """Convert the best `MAX_RELATIONS` relations of one image to JSON; `subject` and `object` are positions in the
    image's detections.

    all_scores: add `predicate_scores`, the probability of every predicate of the pair by name, best first.
    """
    pairs = graph["pairs"][:MAX_RELATIONS].tolist()
    best = graph["predicates"][:MAX_RELATIONS].tolist()
    triplet_scores = graph["triplet_scores"][:MAX_RELATIONS].tolist()
    relations = []
    for (subject, other), predicate, score in zip(pairs, best, triplet_scores, strict=True):
        relation = {
            "subject": subject,
            "object": other,
            "predicate": predicates[predicate],
            "score": round(score, 6),
        }
        relations.append(relation)
    if all_scores:
        for relation, scores in zip(relations, graph["predicate_scores"].tolist(), strict=False):
            by_name = zip(predicates, scores, strict=True)
            ranked = sorted(by_name, key=lambda pair: -pair[1])
            relation["predicate_scores"] = {name: round(score, 6) for name, score in ranked}
    return relations


def graph_text(graph: Mapping, format: str) -> str:
    """Return the text of a file with this graph in the format "dot" (Graphviz) or "networkx" (JSON)."""
    if format == "dot":
        return as_dot(graph)
    return json.dumps(as_node_link(graph), indent=1) + "\n"


def as_dot(graph: Mapping) -> str:
    """Return the graph in the language of Graphviz; `dot -Tsvg FILE` draws it. Objects without a relation are nodes
    too."""
    lines = [f"digraph {json.dumps(str(graph['file_name']))} {{", "  node [shape=box];"]
    for number, detection in enumerate(graph["detections"]):
        name = f"{number} {detection['category']}"
        lines.append(f"  n{number} [label={_quoted(name)}];")
    for relation in graph["relations"]:
        label = _quoted(f"{relation['predicate']} {relation['score']:.2f}")
        lines.append(f"  n{relation['subject']} -> n{relation['object']} [label={label}];")
    return "\n".join([*lines, "}", ""])


def as_node_link(graph: Mapping) -> dict:
    """Return the graph in NetworkX's node-link form, which `networkx.node_link_graph(json.load(file), edges="edges")`
    reads."""
    nodes = []
    for number, detection in enumerate(graph["detections"]):
        entries = {key: detection[key] for key in OBJECT_KEYS}
        nodes.append({"id": number, **entries})
    counts: dict[tuple, int] = {}
    edges = []
    for relation in graph["relations"]:
        ends = relation["subject"], relation["object"]
        counts[ends] = counts.get(ends, -1) + 1  # several predicates between the same two
        edge = {
            "source": relation["subject"],
            "target": relation["object"],
            "key": counts[ends],
            "predicate": relation["predicate"],
            "score": relation["score"],
        }
        edges.append(edge)
    return {
        "directed": True,
        "multigraph": True,
        "graph": {"file_name": str(graph["file_name"])},
        "nodes": nodes,
        "edges": edges,
    }


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
