"""COCO detection metrics of predictions kept by image id; numbers equal pycocotools', speed is faster-coco-eval's.

The definition is that of COCO (Lin et al. 2014, https://cocodataset.org/#detection-eval), crowds and the area ranges of
`area` included. `max_dets` counts detections per image *and class*, highest scores first, as pycocotools does.
Of equal scores the one that comes first wins: images in the order of the table, detections as the detector gave them.
"""

import contextlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from faster_coco_eval import COCO as FasterCOCO
from faster_coco_eval import COCOeval_faster
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from toolkit.errors import BadInput
from toolkit.evaluation.arrays import (
    BoxArrays,
    class_keys,
    drop_unusable,
    ground_truth_arrays,
    metric_keys,
    prediction_arrays,
)
from toolkit.evaluation.draw import draw_predictions
from toolkit.evaluation.explain import explain_zero_ap
from toolkit.evaluation.voc import voc_metrics_of_arrays
from toolkit.modes import uncollected
from toolkit.text import columns, shown

__all__ = [
    "CocoEvaluator",
    "check_ground_truth",
    "class_keys",
    "explain_zero_ap",
    "ground_truth_as_predictions",
    "metric_keys",
    "per_class_table",
]

# Both packages hold Python objects for each box, 2 kB of them; classes do not know of each other.
DETECTIONS_AT_ONCE = 100_000
BACKENDS = {"faster": (FasterCOCO, COCOeval_faster), "pycocotools": (COCO, COCOeval)}


class CocoEvaluator:
    """The twelve COCO box metrics and those of each class, for one dataset.

    Args:
        table: the `DetectionTable` with the ground truth; read once, here.
        backend: "faster" (faster-coco-eval) or "pycocotools"; both give the same numbers.
        max_dets: detections per image and class that count, ascending; AP uses the last one.

    Raises:
        BadInput: unknown backend.
    """

    def __init__(self, table, backend: str = "faster", max_dets: Sequence[int] = (1, 10, 100)):
        if backend not in BACKENDS:
            raise BadInput(f"eval.backend {backend!r} is unknown; expected one of {', '.join(BACKENDS)}")
        self.table, self.image_ids = table, table.image_ids().tolist()
        self.class_keys = class_keys(table)
        self.max_dets = sorted(max_dets)
        self._coco, self._eval = BACKENDS[backend]
        self._ground_truth, self._loaded = ground_truth_arrays(table), None

    def evaluate(self, predictions: Mapping) -> dict[str, float | None]:
        """Metrics of a full set of predictions.

        Args:
            predictions: for every image id of the table `boxes (K, 4)` xyxy in original pixels, `scores (K,)`,
                `labels (K,)` int from 0; K = 0 is ordinary.

        Returns:
            `bbox_AP, bbox_AP50, bbox_AP75, bbox_APs, bbox_APm, bbox_APl, bbox_AR1, bbox_AR10, bbox_AR100, bbox_ARs,
            bbox_ARm, bbox_ARl` (the AR numbers follow `max_dets`) and `AP/<class>`, `AP50/<class>`, `AR100/<class>`;
            from 0 to 1. None where there is no ground truth to find (pycocotools says -1): undefined is not 0. Beside
            them `voc07_mAP` and `voc12_mAP`, see `voc_metrics`: a twentieth of COCO's time.

        Raises:
            BadInput: image ids of predictions and table differ.
        """
        detections = prediction_arrays(predictions, self.image_ids)
        detections = drop_unusable(detections, len(self.class_keys), self.image_ids)
        voc = voc_metrics_of_arrays(detections, self._ground_truth, self.class_keys)
        detections = detections[_among_the_best(detections, self.max_dets[-1])]
        parts = class_groups(np.bincount(detections.labels, minlength=len(self.class_keys)), DETECTIONS_AT_ONCE)
        found = [self._evaluate_classes(detections, part) for part in parts]
        precision, recall = (np.concatenate([each[k] for each in found], axis=2 - k) for k in range(2))
        means = {name: voc[name] for name in ("voc07_mAP", "voc12_mAP")}
        return self._summary(precision, recall, found[0][2]) | means

    def _evaluate_classes(self, detections: BoxArrays, part: np.ndarray) -> tuple:
        """`precision` (T, R, K, A, M) and `recall` (T, K, A, M) of some classes, and the parameters they are for."""
        with contextlib.redirect_stdout(io.StringIO()), uncollected():  # pycocotools prints its progress
            truth = self._truth_of(part)
            found = self._loadable(detections[np.isin(detections.labels, part)])
            run = self._eval(truth, found, iouType="bbox")
            run.params.maxDets, run.params.catIds = list(self.max_dets), part.tolist()
            run.evaluate()
            run.accumulate()
        return np.array(run.eval["precision"]), np.asarray(run.eval["recall"]), run.params

    def _truth_of(self, part: np.ndarray):
        """The ground truth of some classes; that of all of them is kept."""
        if len(part) < len(self.class_keys):
            return self._loadable(self._ground_truth[np.isin(self._ground_truth.labels, part)])
        self._loaded = self._loaded or self._loadable(self._ground_truth)
        return self._loaded

    def _loadable(self, boxes: BoxArrays):
        """A COCO object of either package; image ids are positions in the table, so that strings are fine too.

        Annotation ids count from 1: the evaluation marks "not matched" with 0, so the box with id 0 would never be
        found.
        """
        columns = (boxes.image_index, boxes.labels, boxes.xywh(), boxes.area, boxes.iscrowd, boxes.scores)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        coco = self._coco()
        coco.dataset = {
            "images": [{"id": i} for i in range(len(self.image_ids))],
            "categories": [{"id": k} for k in range(len(self.class_keys))],
            "annotations": [
                {"id": n, "image_id": i, "category_id": k, "bbox": b, "area": a, "iscrowd": c, "score": s}
                for n, (i, k, b, a, c, s) in enumerate(rows, start=1)
            ],
        }
        with contextlib.redirect_stdout(io.StringIO()):
            coco.createIndex()
        return coco

    def describe(self, scores: Mapping, predictions: Mapping, step: int | None = None) -> str:
        """`per_class_table` of what `evaluate` returned, the twelve numbers of COCO, and why an AP is 0; `step` as in
        `explain_zero_ap`."""
        twelve = "  ".join(f"{name.removeprefix('bbox_')} {_number(value)}" for name, value in scores.items()
                           if name.startswith("bbox_"))  # fmt: skip
        reasons = [] if scores["bbox_AP"] else explain_zero_ap(predictions, self.table, step)
        return "\n".join([per_class_table(scores, self.table), twelve, *(f"AP is 0: {reason}" for reason in reasons)])

    def draw(self, predictions: Mapping, count: int, path: Path) -> Path:
        """A picture of `count` images, predictions beside the annotated boxes."""
        return draw_predictions(self.table, predictions, count, path)

    def _summary(self, precision: np.ndarray, recall: np.ndarray, params) -> dict[str, float | None]:
        """COCOeval.summarize() without its printing and with the classes; changes `precision`."""
        # pycocotools adds an epsilon to what it divides by, so that one detection out of one is 1 - 2e-16, not 1;
        # faster-coco-eval does not. Both become 1.
        precision[precision > 1 - 1e-15] = 1
        half, three_quarters = (int(np.argmin(abs(params.iouThrs - t))) for t in (0.5, 0.75))
        areas = {"s": 1, "m": 2, "l": 3}  # small, medium, large; 0 is all
        result = {
            "bbox_AP": _mean(precision[:, :, :, 0, -1]),
            "bbox_AP50": _mean(precision[half, :, :, 0, -1]),
            "bbox_AP75": _mean(precision[three_quarters, :, :, 0, -1]),
        }
        result |= {f"bbox_AP{a}": _mean(precision[:, :, :, i, -1]) for a, i in areas.items()}
        result |= {f"bbox_AR{m}": _mean(recall[:, :, 0, i]) for i, m in enumerate(self.max_dets)}
        result |= {f"bbox_AR{a}": _mean(recall[:, :, i, -1]) for a, i in areas.items()}
        most = self.max_dets[-1]
        for k, name in enumerate(self.class_keys):
            result[f"AP/{name}"] = _mean(precision[:, :, k, 0, -1])
            result[f"AP50/{name}"] = _mean(precision[half, :, k, 0, -1])
            result[f"AR{most}/{name}"] = _mean(recall[:, k, 0, -1])
        return result


def _among_the_best(boxes: BoxArrays, most: int) -> np.ndarray:
    """(G,) bool: is a detection among the `most` best of its image and class, of equal scores the first ones."""
    order = np.lexsort((-boxes.scores, boxes.labels, boxes.image_index))
    change = np.diff(boxes.image_index[order], prepend=-1) | np.diff(boxes.labels[order], prepend=-1)
    places = np.arange(len(order))
    rank = places - np.maximum.accumulate(np.where(change != 0, places, 0))
    keep = np.empty(len(order), bool)
    keep[order] = rank < most
    return keep


def class_groups(counts: np.ndarray, most: int) -> list[np.ndarray]:
    """Classes that are evaluated together, in their order: as many as have `most` detections, at least one.

    counts: (C,) detections of each class.
    """
    groups, held = [[]], 0
    for each, count in enumerate(counts):
        if groups[-1] and held + count > most:
            groups.append([])
            held = 0
        groups[-1].append(each)
        held += count
    return [np.asarray(group, np.int64) for group in groups]


def _mean(values: np.ndarray) -> float | None:
    defined = values[values > -1]
    return float(defined.mean()) if defined.size else None


def ground_truth_as_predictions(table) -> dict:
    """The table's boxes, crowds left out, as predictions with score 1: what a perfect detector would say."""
    truth = ground_truth_arrays(table)
    truth = truth[truth.iscrowd == 0]
    ends = np.searchsorted(truth.image_index, np.arange(len(table.rows)), side="right")
    starts = np.concatenate([[0], ends[:-1]])
    return {
        image_id: {
            "boxes": torch.from_numpy(truth.boxes_xyxy[a:b]),
            "scores": torch.ones(b - a),
            "labels": torch.from_numpy(truth.labels[a:b]),
        }
        for image_id, a, b in zip(table.image_ids().tolist(), starts.tolist(), ends.tolist(), strict=True)
    }


def check_ground_truth(table, name: str = "the validation data") -> list[str]:
    """Evaluate the ground truth as if it were predictions: anything below AP 1.0 is a fault of data or evaluation.

    Returns:
        Notes, in words, on what the metrics can then not say: classes without boxes, images with more boxes than count.

    Raises:
        BadInput: AP is below 1.0, or boxes without width, height, area or class hide in it (COCO passes over them);
            names the classes and the boxes.
    """
    truth = ground_truth_arrays(table)
    if not (truth.iscrowd == 0).any():
        return [f"{name}: no boxes to find in {len(table.rows)} images; every AP will be undefined (null)"]
    most = _most_per_image_and_class(truth, len(table.categories))
    result = CocoEvaluator(table, max_dets=(1, 10, max(100, most))).evaluate(ground_truth_as_predictions(table))
    values = {key: result[f"AP/{key}"] for key in class_keys(table)}
    impossible = _impossible_boxes(truth, table)
    lost = {key: value for key, value in values.items() if value is not None and value < 1 - 1e-6}
    if lost or impossible:
        raise BadInput([
            f"{name}: its own boxes, taken as predictions, are not all found (AP {result['bbox_AP']}, expected 1.0)",
            *(f"class {shown(key)!r}: AP {value:.4f}" for key, value in lost.items()),
            *impossible,
        ])
    notes = []
    empty = [shown(key, 40) for key, value in values.items() if value is None]
    if empty:
        notes.append(f"{name}: no boxes of {len(empty)} of {len(values)} classes ({', '.join(empty[:5])}"
                     f"{', ...' if len(empty) > 5 else ''}); their AP is undefined (null) and left out of the mean")
    if most > 100:
        notes.append(f"{name}: up to {most} boxes of one class in one image; COCO counts 100 detections per image and "
                     "class, so that even a perfect detector stays below AP 1.0")
    return notes


def _most_per_image_and_class(truth: BoxArrays, num_classes: int) -> int:
    return int(np.unique(truth.image_index * num_classes + truth.labels, return_counts=True)[1].max())


def _impossible_boxes(truth: BoxArrays, table) -> list[str]:
    """Annotations without width, height, area or class, in words (at most ten)."""
    ids, classes = table.image_ids().tolist(), len(table.categories)
    sides = truth.boxes_xyxy[:, 2:] - truth.boxes_xyxy[:, :2]
    bad = ~(sides > 0).all(axis=1) | ~(truth.area >= 0) | (truth.labels < 0) | (truth.labels >= classes)
    return [
        f"image {ids[truth.image_index[i]]!r}: box {truth.boxes_xyxy[i].tolist()} (x1, y1, x2, y2) of class "
        f"{truth.labels[i]}, area {truth.area[i]:g}; expected x2 > x1, y2 > y1, a class in 0..{classes - 1}, area >= 0"
        for i in np.flatnonzero(bad)[:10]
    ]


def per_class_table(result: Mapping, table) -> str:
    """Text table, one line a class: images and boxes (crowds left out) it has, AP, AP50 and AR; `-` is undefined."""
    truth = ground_truth_arrays(table)
    truth = truth[truth.iscrowd == 0]
    recall = next((k.split("/")[0] for k in result if k.startswith("AR") and "/" in k), "AR100")
    rows = [("class", "images", "boxes", "AP", "AP50", recall)]
    for k, name in enumerate(class_keys(table)):
        images = truth.image_index[truth.labels == k]
        numbers = (_number(result.get(f"{metric}/{name}")) for metric in ("AP", "AP50", recall))
        rows.append((shown(name, 40), str(len(np.unique(images))), str(len(images)), *numbers))
    overall = (_number(result.get(m)) for m in ("bbox_AP", "bbox_AP50", f"bbox_{recall}"))
    rows.append(("all", str(len(np.unique(truth.image_index))), str(len(truth)), *overall))
    return align(rows)


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as lines with aligned columns: the first to the left, the others to the right."""
    widths = [max(columns(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = []
    for first, *others in rows:  # not ljust and rjust, which count letters where a terminal has columns
        cells = [first + " " * (widths[0] - columns(first))]
        cells += [" " * (width - columns(text)) + text for text, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return "\n".join([lines[0], "-" * columns(lines[0]), *lines[1:]])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
