"""One image's scene graph in the formats of other programs: Graphviz and NetworkX.

A graph is `{"file_name", "detections": [...], "relations": [...]}` as predictions.json has it: see
`toolkit.evaluation.detections`.
"""

import json
from collections.abc import Mapping

OF_OBJECT = ("category", "bbox", "score")
SUFFIXES = {"dot": ".dot", "networkx": ".json"}


def graph_text(graph: Mapping, format: str) -> str:
    """Return the text of a file in the format dot or networkx."""
    return as_dot(graph) if format == "dot" else json.dumps(as_node_link(graph), indent=1) + "\n"


def as_dot(graph: Mapping) -> str:
    """Return a directed graph of Graphviz; `dot -Tsvg FILE` draws it. Objects without a relation are nodes too."""
    lines = [f"digraph {json.dumps(str(graph['file_name']))} {{", "  node [shape=box];"]
    for number, detection in enumerate(graph["detections"]):
        name = f"{number} {detection['category']}"
        lines.append(f"  n{number} [label={_quoted(name)}];")
    for relation in graph["relations"]:
        label = _quoted(f"{relation['predicate']} {relation['score']:.2f}")
        lines.append(f"  n{relation['subject']} -> n{relation['object']} [label={label}];")
    return "\n".join([*lines, "}", ""])


def as_node_link(graph: Mapping) -> dict:
    """Return NetworkX's node-link form; `networkx.node_link_graph(json.load(file), edges="edges")` reads it."""
    objects = [{key: detection[key] for key in OF_OBJECT} for detection in graph["detections"]]
    nodes = [{"id": number, **entries} for number, entries in enumerate(objects)]
    counts: dict[tuple, int] = {}
    edges = []
    for relation in graph["relations"]:
        ends = relation["subject"], relation["object"]
        key = counts[ends] = counts.get(ends, -1) + 1  # several predicates between the same two
        edge = {"source": ends[0], "target": ends[1], "key": key}
        edges.append(edge | {name: relation[name] for name in ("predicate", "score")})
    about = {"file_name": str(graph["file_name"])}
    return {"directed": True, "multigraph": True, "graph": about, "nodes": nodes, "edges": edges}


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
