"""Evaluator of scene graph metrics, which takes the place of `CocoEvaluator`. Predictions are given by image id."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from toolkit.base.errors import BadInput
from toolkit.base.text import metric_text, shown
from toolkit.data.table import DetectionTable
from toolkit.detectors.scene_graphs.metrics import PROTOCOLS, SceneGraphMetrics, evaluate_scene_graphs
from toolkit.detectors.scene_graphs.open_images_metrics import open_images_metrics
from toolkit.detectors.scene_graphs.relation_batch import attribute_targets
from toolkit.detectors.scene_graphs.triplet_matches import COMPACT_FIELDS
from toolkit.detectors.scene_graphs.true_graphs import given_graph, true_graph
from toolkit.evaluation.coco import CocoEvaluator, align
from toolkit.evaluation.matches import Matches, metric_keys
from toolkit.evaluation.predictions import check_image_ids

RECALL_AT = (20, 50, 100)
FURTHER_METRICS = ("R@relative", "mR@relative", "wmAP_rel", "wmAP_phr", "micro_R@50", "score_wtd")
LEGEND = (
    "@K: of the K best of an image; R recall, mR its mean over predicates, F1 both; ng: several predicates a pair;\n"
    "z: triplets not in the training data; A: annotated pairs only (docs/detectors/scene_graphs.md)"
)


class SceneGraphEvaluator:
    """Evaluates R@K and related metrics on one data set; if labels are predicted (sgcls, sgdet), also COCO's metrics of
    boxes.

    Args:
        table: the `DetectionTable` with boxes and relations; crowd regions and their relations do not count.
        mode: predcls, sgcls or sgdet.
        zero_shot: (Z, 3) triplets of subject class, object class and predicate that training never had; None: no zR@K.
        protocol: "original" (as published) or "strict"; see `evaluate_scene_graphs`.
        backend: program that computes COCO's metrics.
        phrase_detection: for a sgdet model, compare the union box of a pair instead of both boxes (phrdet).
        trained_relations: (P,) number of training relations of each of the P predicates, for the recall of
            `predicate_groups`; None: no such recall.

    Raises:
        BadInput: the protocol is unknown, the table has no predicates, or `phrase_detection` is set in another mode
            than sgdet.
    """

    def __init__(
        self,
        table: DetectionTable,
        mode: str,
        *,
        zero_shot: np.ndarray | None = None,
        protocol: str = "original",
        backend: str = "toolkit",
        phrase_detection: bool = False,
        trained_relations: np.ndarray | None = None,
    ):
        if protocol not in PROTOCOLS:
            raise BadInput(f"eval.protocol is {protocol!r}; expected {' or '.join(PROTOCOLS)}")
        if not table.predicates:
            raise BadInput(f"{table.name}: no predicates; scene graphs need data with relations")
        if phrase_detection and mode != "sgdet":
            raise BadInput(f"eval.phrase_detection is for model.mode sgdet, which finds its boxes; this is {mode}")
        self.predicate_keys = metric_keys(table.predicates)
        self.table = table
        self.mode = "phrdet" if phrase_detection else mode
        self.protocol = protocol
        self.zero_shot = zero_shot
        self.groups = {} if trained_relations is None else predicate_groups(trained_relations)
        self.image_ids = table.image_ids().tolist()
        self._truths = {}
        for row in map(table.row, range(len(table))):
            self._truths[row["image_id"]] = true_graph(row)
        self._boxes = None if mode == "predcls" else CocoEvaluator(table, backend)

    def evaluate(self, predictions: Mapping) -> dict[str, float | None]:
        """Return the metrics of predictions for all images.

        Args:
            predictions: for every image id the M objects, `boxes (M, 4)` xyxy in original pixels, `scores (M,)`,
                `labels (M,)` from 0 (-1: no class), and P pairs of them, `pairs (P, 2)`, best first, and
                `predicate_scores (P, predicates)` or instead the result of `compact_graph`. If boxes are given
                (predcls, sgcls), also the annotated graph of these boxes: `true_labels (N,)`, `true_relations (R, 3)`
                and `true_attributes (N, A)`, if any. Boxes and graph are then both without a box that resizing has left
                without width. A prediction without `pairs` has no relations. `attribute_scores (M, attributes)` is
                optional.

        Returns:
            `R@20`, ..., `mR@100`, ..., `R@relative`, `mR_head@100`, ..., `mR@100/<predicate>`; if labels are predicted,
            COCO's metrics; if boxes are detected, also those of `open_images_metrics`; if boxes are given and
            attributes scored, `attribute_R_precision`, see `attribute_r_precision`. A metric that is undefined is None.
            For a table that joins several data sets, also `R@20/<set>`, ... over the images of each.

        Raises:
            BadInput: image ids of predictions and table differ.
        """
        check_image_ids(predictions, self.image_ids)
        num_predicates = len(self.table.predicates)
        graphs = [_completed(predictions[image_id], num_predicates) for image_id in self.image_ids]
        truths = [self.truth(image_id, predictions[image_id]) for image_id in self.image_ids]
        metrics = evaluate_scene_graphs(
            truths,
            graphs,
            self.mode,
            num_predicates,
            self.zero_shot,
            top=RECALL_AT,
            protocol=self.protocol,
        )
        row = metrics.as_row(self.predicate_keys)
        row |= grouped_recall(metrics, self.groups, self.protocol)
        scores = [predictions[image_id].get("attribute_scores") for image_id in self.image_ids]
        if self.mode in ("sgdet", "phrdet"):
            row |= open_images_metrics(truths, graphs, num_predicates)
        elif self.table.attributes and all(image_scores is not None for image_scores in scores):
            annotated = [truth["attributes"] for truth in truths]
            row["attribute_R_precision"] = attribute_r_precision(annotated, scores)
        row |= self._recall_of_sets(metrics)
        if self._boxes is not None:
            row |= self._boxes.evaluate(predictions)
        return row

    def _recall_of_sets(self, metrics: SceneGraphMetrics) -> dict[str, float | None]:
        """Return R@K in the images of each data set if the table joins several; None for a set without relations."""
        if len(self.table.sets) < 2:
            return {}
        set_of_image = self.table.set_of_image()[metrics.evaluated_images]
        row = {}
        for number, one in enumerate(self.table.sets):
            recalls = metrics.per_image["R"][:, set_of_image == number]
            for k, of_images in zip(metrics.top, recalls, strict=True):
                row[f"R@{k}/{one.name}"] = float(of_images.mean()) if len(of_images) else None
        return row

    @property
    def matches(self) -> Matches | None:
        """Return the matches of boxes in the last evaluation; None in predcls, where boxes and classes are given."""
        return self._boxes and self._boxes.matches

    def truth(self, image_id: int | str, prediction: Mapping) -> dict[str, np.ndarray]:
        """Return the graph that a prediction is compared with: `boxes`, `labels`, `relations` and, if annotated,
        `attributes`."""
        return given_graph(prediction) or self._truths[image_id]

    def describe(self, scores: Mapping, predictions: Mapping, step: int | None = None) -> str:
        """Return a text for the log: a table of the metrics by K, and a table of the predicates with their frequency
        and recall.

        scores: result of `evaluate`. predictions and step are not used.
        """
        rows = [("metric", *(f"@{k}" for k in RECALL_AT))]
        for key in scores:
            name, _, k = key.partition("@")
            if k == str(RECALL_AT[0]):
                rows.append((name, *(metric_text(scores[f"{name}@{k}"]) for k in RECALL_AT)))
        counts = np.zeros(len(self.table.predicates), np.int64)
        for truth in self._truths.values():
            np.add.at(counts, truth["relations"][:, 2], 1)
        recalls = [("predicate", "relations", f"mR@{RECALL_AT[-1]}")]
        for name, count in zip(self.predicate_keys, counts, strict=True):
            recall = scores.get(f"mR@{RECALL_AT[-1]}/{name}")
            recalls.append((shown(name, 40), str(count), metric_text(recall)))
        lines = [align(rows), LEGEND, "", align(recalls)]
        lines.append(", ".join(f"{name} {metric_text(scores[name])}" for name in FURTHER_METRICS if name in scores))
        if "attribute_R_precision" in scores:
            lines.append(f"attributes: R-precision {metric_text(scores['attribute_R_precision'])}")
        if self._boxes is not None:
            lines.append(f"boxes: AP {metric_text(scores['bbox_AP'])}, AP50 {metric_text(scores['bbox_AP50'])}")
        return "\n".join(lines)

    def draw(self, predictions: Mapping, count: int, path: Path) -> Path:
        """Write a picture of `count` images with the annotated and the predicted graphs to `path`, and the same
        predicted graphs as JSON under that name with the suffix .json. Return the path of the picture."""
        # here, since a run can do without pictures
        from toolkit.detectors.scene_graphs.graph_pictures import draw_graphs, write_graphs

        write_graphs(self.table, predictions, Path(path).with_suffix(".json"), count)
        return draw_graphs(self.table, predictions, count, path)


def predicate_groups(trained_relations: np.ndarray) -> dict[str, np.ndarray]:
    """Divide P predicates by their frequency in training, `trained_relations` (P,): return the labels of the most
    frequent third (head), of the next (body) and of the last (tail), without empty groups.

    VG150's 50 predicates give 16, 17 and 17, as in Li et al., CVPR 2021. Of equally frequent predicates the lower label
    comes first.
    """
    order = np.argsort(-np.asarray(trained_relations), kind="stable")
    head = len(order) // 3
    body = head + (len(order) - head) // 2
    groups = {
        "head": order[:head],
        "body": order[head:body],
        "tail": order[body:],
    }
    return {name: labels for name, labels in groups.items() if len(labels)}


def grouped_recall(metrics: SceneGraphMetrics, groups: Mapping, protocol: str) -> dict[str, float | None]:
    """Return `mR_head@20`, ...: mR@K over only the predicates of each group of `predicate_groups`. In the strict
    protocol, a group of which no predicate is annotated gets None."""
    row = {}
    for name, labels in groups.items():
        kept = labels if protocol == "original" else labels[metrics.images_per_predicate[labels] > 0]
        for k, recalls in zip(metrics.top, metrics.per_predicate["mR"], strict=True):
            row[f"mR_{name}@{k}"] = float(recalls[kept].mean()) if len(kept) else None
    return row


def attribute_r_precision(attributes: Sequence, scores: Sequence) -> float | None:
    """Return the R-precision of attributes: of each object with k annotated attributes, the k best predictions count,
    and the result is the share of all annotated attributes that are among them. None if no object has attributes.

    attributes: per image (N, A) ids from 1, at most A per object, 0 after the last. scores: per image (N, attributes),
    of the same objects. Of attributes with equal scores, the lower id ranks first.
    """
    hits = annotated = 0
    for ids, of_objects in zip(attributes, scores, strict=True):
        of_objects = torch.as_tensor(of_objects)
        targets, _ = attribute_targets(torch.as_tensor(ids), of_objects.shape[1] + 1)
        right = targets[:, 1:]  # (N, attributes) 0 or 1
        best_first = of_objects.argsort(dim=1, descending=True, stable=True)
        ranked = right.gather(1, best_first)
        count = right.sum(1, keepdim=True)
        counted = torch.arange(ranked.shape[1]) < count
        hits += int((ranked * counted).sum())
        annotated += int(count.sum())
    return hits / annotated if annotated else None


def _completed(prediction: Mapping, num_predicates: int) -> dict[str, np.ndarray]:
    """Return a prediction as arrays; without pairs it gets empty ones."""
    names = ["boxes", "labels", "scores"]
    if "combinations" in prediction:
        names += COMPACT_FIELDS
    graph = {name: np.asarray(prediction[name]) for name in names}
    graph["pairs"] = np.asarray(prediction.get("pairs", np.zeros((0, 2), np.int64)))
    if "combinations" not in prediction:
        no_scores = np.zeros((0, num_predicates), np.float32)
        graph["predicate_scores"] = np.asarray(prediction.get("predicate_scores", no_scores))
    return graph
