"""COCO detection metrics of predictions kept by image id, equal to pycocotools' to 1e-12.

The definition is that of COCO (Lin et al. 2014, https://cocodataset.org/#detection-eval), crowds and the area ranges of
`area` included. 1, 10 and 100 detections count per image *and class*, highest scores first, as in pycocotools. The
first of equal scores wins: images in the order of the table, detections in the order of the detector.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from toolkit import index
from toolkit.base.boxes import Boxes
from toolkit.base.errors import BadInput
from toolkit.base.text import columns, shown
from toolkit.evaluation.coco_numbers import exact_numbers, pycocotools_numbers
from toolkit.evaluation.matches import MAX_DETECTIONS, Matches, class_keys, match, match_boxes
from toolkit.evaluation.voc import voc_metrics

BACKENDS = ("toolkit", "pycocotools")


class CocoEvaluator:
    """The twelve COCO box metrics and those of each class, for one dataset.

    Args:
        table: the `DetectionTable` with the ground truth.
        backend: "toolkit", or "pycocotools", its reference.

    Raises:
        BadInput: unknown backend.
    """

    def __init__(self, table, backend: str = "toolkit"):
        if backend not in BACKENDS:
            raise BadInput(f"eval.backend {backend!r} is unknown; expected one of {', '.join(BACKENDS)}")
        self.table = table
        self.backend = backend
        self.image_ids = table.image_ids().tolist()
        self.matches: Matches | None = None  # of the last evaluation

    def evaluate(self, predictions: Boxes | Mapping) -> dict[str, float | None]:
        """Compute the metrics of a full set of predictions; afterwards `matches` holds the matched boxes.

        Args:
            predictions: for every image id of the table `boxes (K, 4)` xyxy in original pixels, `scores (K,)`,
                `labels (K,)` int from 0; K = 0 is ordinary. Or columns in the order of the table.

        Returns:
            `bbox_AP, bbox_AP50, bbox_AP75, bbox_APs, bbox_APm, bbox_APl, bbox_AR1, bbox_AR10, bbox_AR100, bbox_ARs,
            bbox_ARm, bbox_ARl` and `AP/<class>`, `AP50/<class>`, `AR100/<class>`; from 0 to 1. None without
            ground truth to find (pycocotools returns -1): undefined is not 0. Also `voc07_mAP` and `voc12_mAP`, see
            `voc_metrics`, and for a table that joins several sets `bbox_AP/<set>` of the images of each.

        Raises:
            BadInput: image ids of predictions and table differ.
        """
        self.matches = match(predictions, self.table)
        row = pycocotools_numbers(self.matches) if self.backend == "pycocotools" else coco_row(self.matches)
        voc = voc_metrics(self.matches)
        row |= {name: voc[name] for name in ("voc07_mAP", "voc12_mAP")}
        return row | {f"bbox_AP/{name}": coco_row(part)["bbox_AP"] for name, part in self._matches_of_sets()}

    def _matches_of_sets(self) -> Iterator[tuple[str, Matches]]:
        """Yield the matches in the images of each data set, if the table joins several."""
        whole = self.matches
        of_image = self.table.set_of_image()
        for number, name in enumerate(one.name for one in self.table.sets if len(self.table.sets) > 1):
            kept = of_image == number
            boxes = (part.of_images(kept) for part in (whole.truth, whole.found))
            ids = np.flatnonzero(kept).tolist()
            yield name, match_boxes(*boxes, ids, whole.class_names, whole.sizes_hw[kept], whole.max_detections)

    def describe(self, scores: Mapping, predictions: Boxes | Mapping, step: int | None = None) -> str:
        """Format `per_class_table` of the result of `evaluate`, COCO's six AP and its six AR, and why an AP is 0.

        step: optimizer steps that the detector was trained for; None: unknown.
        """
        of_boxes = {name.removeprefix("bbox_"): value for name, value in scores.items() if name.startswith("bbox_")}
        lines = [per_class_table(scores, self.table)]
        for kind in ("AP", "AR"):
            lines.append("  ".join(f"{name} {_number(of_boxes[name])}" for name in of_boxes if name.startswith(kind)))
        if not scores["bbox_AP"]:
            explain_zero_ap = index.tool("explain_zero_ap")
            lines += [f"AP is 0: {reason}" for reason in explain_zero_ap(predictions, self.table, step)]
        return "\n".join(lines)

    def draw(self, predictions: Mapping, count: int, path: Path) -> Path:
        """Draw a picture of `count` images, predictions beside the annotated boxes."""
        from toolkit.evaluation.draw import draw_predictions  # here, since a run can do without pictures

        return draw_predictions(self.table, predictions, count, path)


# Settings of the group `eval` for scene graphs only.
GRAPH_EVAL_SETTINGS = ("protocol", "zero_shot", "phrase_detection")


def make_evaluator(detector, table, backend: str, **settings):
    """Make the evaluator of a detector on a table: that of its own `make_evaluator`, else `CocoEvaluator`.

    backend: of COCO's metrics. settings: further settings of the group `eval` for such a detector, such as
    `GRAPH_EVAL_SETTINGS`. Raises BadInput as the detector's own `make_evaluator`.
    """
    evaluator = detector.make_evaluator(table, backend, **settings)
    return CocoEvaluator(table, backend) if evaluator is None else evaluator


def coco_row(matches: Matches) -> dict[str, float | None]:
    """Compute the metrics of `CocoEvaluator.evaluate`."""
    exact = exact_numbers(matches)
    most = matches.max_detections[-1]
    row = {f"bbox_{name}": _defined(values[0]) for name, values in exact.numbers.items()}
    of_classes = (exact.of_class[0], exact.half_of_class[0], exact.recall_of_class[0])
    for name, ap, half, recall in zip(matches.class_names, *of_classes, strict=True):
        row |= {f"AP/{name}": _defined(ap), f"AP50/{name}": _defined(half), f"AR{most}/{name}": _defined(recall)}
    return row


def _defined(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def check_ground_truth(table) -> list[str]:
    """Evaluate the ground truth as predictions: an AP below 1.0 is a fault of data or evaluation.

    Returns:
        Sentences about the limits of the metrics: classes without boxes, images with more boxes than count.

    Raises:
        BadInput: AP is below 1.0, or boxes without width, height, area or class are hidden in it (COCO ignores them);
            the message names the classes and the boxes.
    """
    name = "the validation data"
    truth = table.boxes()
    wanted = truth[~truth.iscrowd]
    if not len(wanted):
        return [f"{name}: no boxes to find in {len(table.rows)} images; every AP will be undefined (null)"]
    most = int(np.unique(truth.image_index * len(table.categories) + truth.labels, return_counts=True)[1].max())
    limits = (*MAX_DETECTIONS[:-1], max(MAX_DETECTIONS[-1], most))
    result = coco_row(match(replace(wanted, scores=np.ones(len(wanted))), table, limits))
    values = {key: result[f"AP/{key}"] for key in class_keys(table)}
    lost = [f"class {shown(k)!r}: AP {ap:.4f}" for k, ap in values.items() if ap is not None and ap < 1 - 1e-6]
    faults = lost + _impossible_boxes(truth, table)
    if faults:
        failure = f"are not all found (AP {result['bbox_AP']}, expected 1.0)"
        raise BadInput([f"{name}: its own boxes, taken as predictions, {failure}", *faults])
    notes = []
    empty = [shown(key, 40) for key, value in values.items() if value is None]
    if empty:
        some = ", ".join(empty[:5]) + (", ..." if len(empty) > 5 else "")
        undefined = "their AP is undefined (null) and left out of the mean"
        notes.append(f"{name}: no boxes of {len(empty)} of {len(values)} classes ({some}); {undefined}")
    if most > 100:
        limit = "COCO counts 100 detections per image and class, so that even a perfect detector stays below AP 1.0"
        notes.append(f"{name}: up to {most} boxes of one class in one image; {limit}")
    return notes


def crowded_notes(name: str, table, limits: Mapping[str, int]) -> list[str]:
    """Return a warning for each limit that images of a table exceed with their objects; crowd regions do not count.

    limits: the largest number of objects of an image that can be found, by its setting. name: of the split.
    """
    if table.num_boxes().max(initial=0) <= min(limits.values(), default=np.inf):
        return []  # without reading every box
    truth = table.boxes()
    counts = np.bincount(truth.image_index[~truth.iscrowd], minlength=len(table))
    return [
        f"warning: {(counts > limit).sum():,} of {len(table):,} {name} images have more objects (up to "
        f"{counts.max():,}) than {setting} {limit:,}: those beyond it cannot be found; raise it"
        for setting, limit in limits.items()
        if (counts > limit).any()
    ]


def _impossible_boxes(truth: Boxes, table) -> list[str]:
    """Describe annotations without width, height, area or class (at most ten)."""
    ids = table.image_ids().tolist()
    classes = len(table.categories)
    sides = truth.xyxy[:, 2:] - truth.xyxy[:, :2]
    bad = ~(sides > 0).all(axis=1) | ~(truth.area >= 0) | (truth.labels < 0) | (truth.labels >= classes)
    return [
        f"image {ids[truth.image_index[i]]!r}: box {truth.xyxy[i].tolist()} (x1, y1, x2, y2) of class "
        f"{truth.labels[i]}, area {truth.area[i]:g}; expected x2 > x1, y2 > y1, a class in 0..{classes - 1}, area >= 0"
        for i in np.flatnonzero(bad)[:10]
    ]


def per_class_table(result: Mapping, table) -> str:
    """Format a text table, one line a class: images and boxes (without crowds), AP, AP50 and AR; `-`: undefined."""
    truth = table.boxes()
    truth = truth[~truth.iscrowd]
    rows = [("class", "images", "boxes", "AP", "AP50", "AR100")]
    for k, name in enumerate(class_keys(table)):
        images = truth.image_index[truth.labels == k]
        numbers = (_number(result.get(f"{metric}/{name}")) for metric in ("AP", "AP50", "AR100"))
        rows.append((shown(name, 40), str(len(np.unique(images))), str(len(images)), *numbers))
    overall = (_number(result.get(m)) for m in ("bbox_AP", "bbox_AP50", "bbox_AR100"))
    rows.append(("all", str(len(np.unique(truth.image_index))), str(len(truth)), *overall))
    return align(rows)


def align(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of text as lines with aligned columns: the first to the left, the others to the right."""
    widths = [max(columns(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = []
    for first, *others in rows:  # not ljust and rjust, which count letters, not columns of a terminal
        cells = [first + " " * (widths[0] - columns(first))]
        cells += [" " * (width - columns(text)) + text for text, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return "\n".join([lines[0], "-" * columns(lines[0]), *lines[1:]])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
