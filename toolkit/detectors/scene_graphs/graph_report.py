"""The scene graph section of a report: recall by K and by predicate, and confusions of predicates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import ModuleType
from typing import Any

import numpy as np

from toolkit.base.boxes import Boxes
from toolkit.data.decoding import ImageError
from toolkit.detectors.scene_graphs.evaluator import RECALL_AT
from toolkit.detectors.scene_graphs.graph_pictures import graph_panels
from toolkit.detectors.scene_graphs.metrics import evaluate_scene_graphs
from toolkit.detectors.scene_graphs.triplet_matches import array_iou_plus_one, best_predicates, boxes_of_objects
from toolkit.detectors.scene_graphs.true_graphs import given_graph, true_graph

MEANINGS = {  # of metrics, at K relations of an image
    "R": "recall of relations, one predicate for each pair",
    "ngR": "R with any number of predicates for a pair (no graph constraint)",
    "zR": "R of triplets that the training data do not have (zero shot)",
    "ngzR": "zR with any number of predicates for a pair",
    "mR": "mean of the recalls of the predicates",
    "ngmR": "mR with any number of predicates for a pair",
    "F1": "harmonic mean of R and mR",
    "A": "R if only annotated pairs are ranked",
}


@dataclass(frozen=True)
class GraphReport:
    """The scene graph section of a report, for P predicates and I images.

    mode: predcls, sgcls or sgdet.
    row: the metrics `R@20`, ..., `A@100`.
    frequency, recall: (P,) number of annotated relations of each predicate, and the share of them found among the 100
    best (as in mR@100).
    confusions: (P, P + 1) number of annotated relations by their predicate and by the best predicate predicted for the
    pair; the last column counts relations whose pair was not found.
    images: (I,) share of each image's relations among its 100 best, NaN for images without relations.
    whole: share of the images with relations in which all relations were found ("graph accuracy" over images; the A@K
    of the field is over relations).
    most_pairs: the largest number of pairs that was predicted in an image.
    """

    mode: str
    row: dict[str, float | None]
    frequency: np.ndarray
    recall: np.ndarray
    confusions: np.ndarray
    images: np.ndarray
    whole: float | None
    most_pairs: int

    @property
    def boxes_given(self) -> bool:
        return self.mode in ("predcls", "sgcls")

    @property
    def classes_given(self) -> bool:
        return self.mode == "predcls"

    def as_json(self, predicates) -> dict:
        """Return the section as JSON values, for report.json. predicates: names of the P predicates."""
        of_predicates = {}
        for name, count, recall in zip(predicates, self.frequency.tolist(), self.recall, strict=True):
            of_predicates[name] = {
                "relations": count,
                "recall@100": None if np.isnan(recall) else float(recall),
            }
        return {
            "mode": self.mode,
            "row": self.row,
            "predicates": of_predicates,
            "confusions": self.confusions.tolist(),
            "graph_accuracy_of_images": self.whole,
        }

    def section(self, judged: Any, pictures: Any, page: ModuleType) -> str:
        """Return the section as HTML: recall, predicates that are confused with others, and the images with the lowest
        recall.

        Args:
            judged: the `Judgement` that this section is part of.
            pictures: object that makes the pictures of the page.
            page: the module with the parts of a page, `toolkit.tools.report.page`, which a detector does not import.
        """
        return _numbers(self, judged.table.predicates, page) + _pictures(judged, pictures)


def judge_graphs(predictions: Boxes | Mapping, table, about: Mapping) -> GraphReport | None:
    """Return a `GraphReport` on the scene graphs of predictions; None if an image has no graph.

    Args:
        predictions: as `SceneGraphEvaluator.evaluate` takes them; `Boxes` have no graphs.
        table: the `DetectionTable` with the annotations.
        about: `mode` and `protocol` of the run, if known, and `scores`, its metrics, from which zR@K is taken because
            the triplets seen in training are not known here.
    """
    ids = table.image_ids().tolist()
    if isinstance(predictions, Boxes) or not all("pairs" in predictions[i] for i in ids):
        return None
    graphs = []
    for image_id in ids:
        graphs.append({key: np.asarray(value) for key, value in predictions[image_id].items()})
    truths = [given_graph(graph) or true_graph(table.row(i)) for i, graph in enumerate(graphs)]
    mode = about.get("mode") or _mode(graphs)
    protocol = about.get("protocol", "original")
    metrics = evaluate_scene_graphs(
        truths,
        graphs,
        mode,
        len(table.predicates),
        top=RECALL_AT,
        protocol=protocol,
    )
    row = {name: value for name, value in metrics.as_row().items() if value is not None}
    for name, value in about.get("scores", {}).items():
        if name.startswith(("zR@", "ngzR@")) and isinstance(value, int | float):
            row[name] = value
    confusions, images = _confusions(truths, graphs, mode, len(table.predicates), protocol)
    frequency = confusions.sum(axis=1)
    recall = np.where(frequency > 0, metrics.per_predicate["mR"][-1], np.nan)
    with_any = images[np.isfinite(images)]
    whole = float((with_any == 1).mean()) if len(with_any) else None
    most_pairs = max((len(graph["pairs"]) for graph in graphs), default=0)
    return GraphReport(mode, row, frequency, recall, confusions, images, whole, most_pairs)


def _mode(graphs: list[dict]) -> str:
    """Return the mode that the predictions show: those on given boxes carry the annotation."""
    if not all("true_relations" in graph for graph in graphs):
        return "sgdet"
    labels_given = all((graph["labels"] == graph["true_labels"]).all() for graph in graphs)
    return "predcls" if labels_given else "sgcls"


def _confusions(truths, graphs, mode: str, predicates: int, protocol: str) -> tuple[np.ndarray, np.ndarray]:
    matrix = np.zeros((predicates, predicates + 1), np.int64)
    images = np.full(len(truths), np.nan)
    for i, (truth, graph) in enumerate(zip(truths, graphs, strict=True)):
        relations = truth["relations"]
        if not len(relations):
            continue
        annotated = relations[:, 2]
        if not len(graph["pairs"]):
            np.add.at(matrix, (annotated, predicates), 1)  # in the last column: not found
            images[i] = 0.0
            continue
        best = best_predicates(graph, slice(RECALL_AT[-1]))
        same = _same(truth, graph, mode, protocol)
        pairs = graph["pairs"][: RECALL_AT[-1]]
        subjects_fit = same[pairs[:, 0]][:, relations[:, 0]]  # (pairs, relations)
        objects_fit = same[pairs[:, 1]][:, relations[:, 1]]
        on_it = subjects_fit & objects_fit
        right = on_it & (best[:, None] == annotated[None])
        is_found = right.any(axis=0)
        of_first = best[on_it.argmax(axis=0)]  # the best predicate of the first pair on it
        predicted = np.where(on_it.any(axis=0), of_first, predicates)
        predicted = np.where(is_found, annotated, predicted)
        np.add.at(matrix, (annotated, predicted), 1)
        images[i] = is_found.mean()
    return matrix, images


def _same(truth: Mapping, graph: Mapping, mode: str, protocol: str) -> np.ndarray:
    """Return (M, N) bool: may a predicted box be an annotated one?"""
    if mode == "predcls":
        return np.eye(len(truth["boxes"]), dtype=bool)
    if protocol == "strict":
        return boxes_of_objects(truth, graph)[:, None] == np.arange(len(truth["boxes"]))
    predicted = np.asarray(graph["boxes"], np.float32)
    annotated = np.asarray(truth["boxes"], np.float32)
    overlap = array_iou_plus_one(predicted[:, None], annotated[None]) >= 0.5
    return overlap & (graph["labels"][:, None] == truth["labels"][None])


def _numbers(g: GraphReport, predicates: Sequence[str], page: ModuleType) -> str:
    names = dict.fromkeys(key.partition("@")[0] for key in g.row if "/" not in key and "@" in key)
    rows = []
    for name in names:
        values = [g.row.get(f"{name}@{k}") for k in (20, 50, 100, "relative")]
        rows.append((name, *map(page.number, values), MEANINGS.get(name, "")))
    words = "@K: the K best relations of an image count; @relative: as many as it has."
    if g.most_pairs <= 50:
        words += f" No image has more than {g.most_pairs} pairs, so that R is the same at 50 and at 100."
    if g.whole is not None:
        words += f" All relations were found in {g.whole:.1%} of the images that have any."
    recalls = []
    for p in np.argsort(-g.frequency, kind="stable"):
        if g.frequency[p]:
            recalls.append((predicates[p], int(g.frequency[p]), page.number(g.recall[p])))
    bars = []
    for name, count, value in recalls[:25]:
        if value != "–":
            bars.append((name, float(value), f"{value} of {count}"))
    chart = page.BarChart("Recall among the 100 best, most frequent predicates first", bars, most=1)
    confused = _confused(g, predicates)
    return (
        page.table(["metric", "@20", "@50", "@100", "@relative", ""], rows, text=(0, 5))
        + page.paragraph(words, "dim")
        + page.charts([chart])
        + page.folded("Every predicate", page.table(["predicate", "relations", "recall@100"], recalls))
        + "<h3>Predicates that are taken for others</h3>"
        + page.table(["annotated", "predicted", "relations", "of all"], confused, text=(0, 1))
    )


def _confused(g: GraphReport, predicates: Sequence[str], most: int = 15) -> list[tuple]:
    """Return annotated and predicted predicate, number and share of the most frequent confusions."""
    wrong = g.confusions.copy()
    diagonal = np.arange(len(wrong))
    wrong[diagonal, diagonal] = 0
    columns = [*predicates, "(pair not found)"]
    worst = np.argsort(-wrong, axis=None, kind="stable")[:most]
    result = []
    for a, b in zip(*np.unravel_index(worst, wrong.shape), strict=True):
        if wrong[a, b]:
            share = wrong[a, b] / g.frequency[a]
            result.append((predicates[a], columns[b], int(wrong[a, b]), f"{share:.1%}"))
    return result


def _pictures(judged: Any, maker: Any, count: int = 4) -> str:
    """Draw the images with the least recall of relations, each with its annotated and its predicted graph."""
    if not all("predicates" in graph for graph in judged.predictions.values()):
        return ""
    recall = judged.graphs.images
    rows = np.flatnonzero(np.isfinite(recall))
    worst_first = rows[np.argsort(recall[rows], kind="stable")]
    parts = []
    for i in worst_first[:count].tolist():
        row = judged.table.row(i)
        try:
            panels = graph_panels(judged.table, row, judged.predictions[row["image_id"]])
        except (ImageError, OSError):
            maker.unreadable += 1
            continue
        name = judged.table.image_name(i)
        parts.append(f"<h4>{escape(name)}: {recall[i]:.0%} of the relations are found</h4>")
        figures = [maker.figure(panel, what, maker.link(row)) for what, panel in panels.items()]
        parts.append(f"<div class=graphs>{''.join(figures)}</div>")
    head = "<h3>Worst images</h3><p class=dim>In a predicted graph, arrows of right relations are green.</p>"
    return head + "".join(parts) if parts else ""
