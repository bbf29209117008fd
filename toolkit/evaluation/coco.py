"""COCO detection metrics of predictions kept by image id, equal to pycocotools' to 1e-12.

The definition is that of COCO (Lin et al. 2014, https://cocodataset.org/#detection-eval), crowds and the area ranges of
`area` included. 1, 10 and 100 detections count per image *and class*, highest scores first, as in pycocotools.
Detections with equal scores are ranked by the order of their images in the table, and then by that of the detector.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from toolkit import index
from toolkit.base.boxes import Boxes
from toolkit.base.errors import BadInput
from toolkit.base.text import columns, first_names, metric_text, shown
from toolkit.evaluation.coco_numbers import exact_numbers, pycocotools_numbers
from toolkit.evaluation.mask_matches import TruthMasks, masks_of_truth, match_masks, named_by_mask
from toolkit.evaluation.matches import MAX_DETECTIONS, Matches, class_keys, match_boxes, match_predictions
from toolkit.evaluation.shown_metrics import metrics_of
from toolkit.evaluation.voc import voc_metrics

BACKENDS = ("toolkit", "pycocotools")


class CocoEvaluator:
    """The twelve COCO box metrics and those of each class, for one dataset; of masks too if the table has masks.

    Args:
        table: the `DetectionTable` with the ground truth.
        backend: "toolkit", or "pycocotools", the reference implementation.

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
        self.mask_matches: Matches | None = None  # by mask; None: table or predictions have no masks

    def evaluate(self, predictions: Boxes | Mapping) -> dict[str, float | None]:
        """Compute the metrics of predictions for all images; afterwards the attribute `matches` has the matched boxes,
        and `mask_matches` the matches by mask.

        Args:
            predictions: for every image id of the table `boxes (K, 4)` xyxy in original pixels, `scores (K,)`,
                `labels (K,)` int from 0, for K >= 0 predictions, and `masks`, a list of K `Rle`, if the detector
                predicts masks. Or `Boxes`, with the images in the order of the table.

        Returns:
            `bbox_AP, bbox_AP50, bbox_AP75, bbox_APs, bbox_APm, bbox_APl, bbox_AR1, bbox_AR10, bbox_AR100, bbox_ARs,
            bbox_ARm, bbox_ARl` and `AP/<class>`, `AP50/<class>`, `AR100/<class>`; from 0 to 1. A metric is None if
            nothing is to be found (pycocotools returns -1). Also `voc07_mAP` and `voc12_mAP`, see
            `voc_metrics`, and for a table that joins several sets `bbox_AP/<set>` of the images of each set.

            If table and predictions have masks, also COCO's metrics of masks: `segm_AP, segm_AP50, ... segm_ARl`,
            `segm_AP/<class>`, `segm_AP50/<class>`, `segm_AR100/<class>`, and `segm_AP/set/<set>`.

        Raises:
            BadInput: image ids of predictions and table differ, or a mask does not have the size of its image.
        """
        self.matches = match_predictions(predictions, self.table)
        self.mask_matches = self._matched_by_mask()
        compute = pycocotools_numbers if self.backend == "pycocotools" else coco_row
        row = compute(self.matches)
        voc = voc_metrics(self.matches)
        row["voc07_mAP"] = voc["voc07_mAP"]
        row["voc12_mAP"] = voc["voc12_mAP"]
        for name, part in self._matches_of_sets(self.matches):
            row[f"bbox_AP/{name}"] = coco_row(part)["bbox_AP"]
        if self.mask_matches is not None:
            row |= named_by_mask(compute(self.mask_matches))
            for name, part in self._matches_of_sets(self.mask_matches):
                masks = part.truth.extra["masks"]
                by_mask = match_masks(part, TruthMasks(masks, np.zeros(len(masks), bool)))  # crowds are marked already
                row[f"segm_AP/set/{name}"] = coco_row(by_mask)["bbox_AP"]
        return row

    def _matched_by_mask(self) -> Matches | None:
        """Return the matches by mask of the predictions in `matches`; None if table or predictions have no masks."""
        if "masks" not in self.matches.found.extra or self._truth_masks is None:
            return None
        return match_masks(self.matches, self._truth_masks)

    @cached_property
    def _truth_masks(self) -> TruthMasks | None:
        """The masks of the annotated objects, drawn once for all evaluations; None: the table has none."""
        return masks_of_truth(self.table)

    def _matches_of_sets(self, whole: Matches) -> Iterator[tuple[str, Matches]]:
        """Yield the matches by boxes in the images of each data set, if the table joins several."""
        if len(self.table.sets) <= 1:
            return
        of_image = self.table.set_of_image()
        for number, one in enumerate(self.table.sets):
            kept = of_image == number
            matches = match_boxes(
                whole.truth.of_images(kept),
                whole.found.of_images(kept),
                np.flatnonzero(kept).tolist(),
                whole.class_names,
                whole.sizes_hw[kept],
                whole.max_detections,
            )
            yield one.name, matches

    def describe(self, scores: Mapping, predictions: Boxes | Mapping, step: int | None = None) -> str:
        """Return a text with `per_class_table`, COCO's six AP and six AR (of masks too), and, if AP is 0, the likely
        reasons.

        scores: the result of `evaluate` for these predictions. step: optimizer steps that the detector was trained for;
        None: unknown.
        """
        lines = [per_class_table(scores, self.table), *_lines_of_metrics(scores)]
        if not scores["bbox_AP"]:
            explain_zero_ap = index.tool("explain_zero_ap")
            reasons = explain_zero_ap(predictions, self.table, step)
            lines += [f"AP is 0: {reason}" for reason in reasons]
        return "\n".join(lines)

    def draw(self, predictions: Mapping, count: int, path: Path) -> Path:
        """Write a picture of `count` images to `path`, each with its annotated boxes on the left and its predictions on
        the right."""
        from toolkit.evaluation.draw import draw_predictions  # here, since a run can do without pictures

        return draw_predictions(self.table, predictions, count, path)


# Settings of the group `eval` for scene graphs only.
GRAPH_EVAL_SETTINGS = ("protocol", "zero_shot", "phrase_detection")


def make_evaluator(detector, table, backend: str, **settings):
    """Make the evaluator of a detector on a table.

    This is the result of the detector's method `make_evaluator`, or a `CocoEvaluator` if that returns None.

    backend: of COCO's metrics, see `CocoEvaluator`. settings: further settings of the group `eval` for the method of
    the detector, such as `GRAPH_EVAL_SETTINGS`. Raises BadInput if the method does.
    """
    evaluator = detector.make_evaluator(table, backend, **settings)
    if evaluator is None:
        return CocoEvaluator(table, backend)
    return evaluator


def matches_of(evaluator, predictions: Boxes | Mapping, table) -> Matches:
    """Return the matches by boxes of the evaluation that an evaluator has just made.

    They are computed here if it keeps none, as an evaluator of another detector may. predictions, table: those that it
    has evaluated.
    """
    return getattr(evaluator, "matches", None) or match_predictions(predictions, table)


def coco_row(matches: Matches) -> dict[str, float | None]:
    """Compute the COCO metrics of `CocoEvaluator.evaluate` (`bbox_...`, `AP/...`, `AP50/...` and `AR.../...`)."""
    exact = exact_numbers(matches)
    most = matches.max_detections[-1]
    row = {f"bbox_{name}": _defined(values[0]) for name, values in exact.numbers.items()}
    for k, name in enumerate(matches.class_names):
        row[f"AP/{name}"] = _defined(exact.of_class[0, k])
        row[f"AP50/{name}"] = _defined(exact.half_of_class[0, k])
        row[f"AR{most}/{name}"] = _defined(exact.recall_of_class[0, k])
    return row


def _defined(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def check_ground_truth(table) -> list[str]:
    """Evaluate the annotated boxes as if they were predictions: an AP below 1.0 is a fault of the data or evaluation.

    Returns:
        Sentences about the limits of the metrics: classes without boxes, images with more boxes than are counted.

    Raises:
        BadInput: AP is below 1.0, or the data have boxes without width, height, area or class, which COCO's AP would
            not show; the message names the classes and the boxes.
    """
    name = "the validation data"
    truth = table.boxes()
    wanted = truth[~truth.iscrowd]
    if not len(wanted):
        return [f"{name}: no boxes to find in {len(table)} images; every AP will be undefined (null)"]
    image_and_class = truth.image_index * len(table.categories) + truth.labels
    _, counts = np.unique(image_and_class, return_counts=True)
    most = int(counts.max())
    limits = (*MAX_DETECTIONS[:-1], max(MAX_DETECTIONS[-1], most))
    as_predictions = replace(wanted, scores=np.ones(len(wanted)))
    result = coco_row(match_predictions(as_predictions, table, limits))
    values = {key: result[f"AP/{key}"] for key in class_keys(table)}
    faults = []
    for key, ap in values.items():
        if ap is not None and ap < 1 - 1e-6:
            faults.append(f"class {shown(key)!r}: AP {ap:.4f}")
    faults += _impossible_boxes(truth, table)
    if faults:
        failure = f"are not all found (AP {result['bbox_AP']}, expected 1.0)"
        raise BadInput([f"{name}: its own boxes, taken as predictions, {failure}", *faults])
    notes = []
    empty = [shown(key, 40) for key, value in values.items() if value is None]
    if empty:
        some = first_names(empty, 5)
        undefined = "their AP is undefined (null) and left out of the mean"
        notes.append(f"{name}: no boxes of {len(empty)} of {len(values)} classes ({some}); {undefined}")
    if most > 100:
        limit = "COCO counts 100 detections per image and class, so that even a perfect detector stays below AP 1.0"
        notes.append(f"{name}: up to {most} boxes of one class in one image; {limit}")
    return notes


def crowded_notes(name: str, table, limits: Mapping[str, int]) -> list[str]:
    """Return a warning for each setting that lets fewer objects be found than there are in some images.

    name: of the split, for the warning. limits: by setting, the largest number of objects that can be found in an
    image. Crowd regions do not count as objects.
    """
    if table.num_boxes().max(initial=0) <= min(limits.values(), default=np.inf):
        return []  # without reading every box
    truth = table.boxes()
    counts = np.bincount(truth.image_index[~truth.iscrowd], minlength=len(table))
    notes = []
    for setting, limit in limits.items():
        crowded = (counts > limit).sum()
        if crowded:
            notes.append(
                f"warning: {crowded:,} of {len(table):,} {name} images have more objects (up to {counts.max():,}) "
                f"than {setting} {limit:,}: those beyond it cannot be found; raise it"
            )
    return notes


def _impossible_boxes(truth: Boxes, table) -> list[str]:
    """Describe annotations without width, height, area or class (at most ten)."""
    ids = table.image_ids().tolist()
    classes = len(table.categories)
    sides = truth.xyxy[:, 2:] - truth.xyxy[:, :2]
    has_sides = (sides > 0).all(axis=1)
    has_area = truth.area >= 0
    has_class = (truth.labels >= 0) & (truth.labels < classes)
    possible = has_sides & has_area & has_class
    sentences = []
    for i in np.flatnonzero(~possible)[:10]:
        image_id = ids[truth.image_index[i]]
        sentences.append(
            f"image {image_id!r}: box {truth.xyxy[i].tolist()} (x1, y1, x2, y2) of class {truth.labels[i]}, "
            f"area {truth.area[i]:g}; expected x2 > x1, y2 > y1, a class in 0..{classes - 1}, area >= 0"
        )
    return sentences


def _lines_of_metrics(scores: Mapping) -> list[str]:
    """Return lines with the AP and with the AR of boxes, then of masks, if any.

    The line with the AP of boxes also has that of the images of each data set that the table joins.
    """
    keys = [metric.key for metric in metrics_of([scores], "boxes", "masks") if metric.key in scores]
    keys += [key for key in scores if key.startswith("bbox_AP/")]
    lines: dict[str, list[str]] = {}
    for key in keys:
        start = key[: len("bbox_AP")]  # "segm_AP" of "segm_AP50": the line that it stands in
        texts = lines.setdefault(start, ["masks:"] if start.startswith("segm_") else [])
        texts.append(f"{key[len('bbox_') :]} {metric_text(scores[key])}")
    return ["  ".join(texts) for texts in lines.values()]


def per_class_table(result: Mapping, table) -> str:
    """Format a table of text with a line for each class, and one for all.

    The columns are the numbers of images and boxes (without crowds), AP, AP50 and AR100, and with masks their AP and
    AP50; `-` is an undefined metric.

    result: of `CocoEvaluator.evaluate`.
    """
    truth = table.boxes()
    truth = truth[~truth.iscrowd]
    metrics = {"AP": "AP", "AP50": "AP50", "AR100": "AR100"}  # names in `result` by the heads of their columns
    totals = [f"bbox_{metric}" for metric in metrics]
    if "segm_AP" in result:
        of_masks = {"mask AP": "segm_AP", "mask AP50": "segm_AP50"}
        metrics |= of_masks
        totals += of_masks.values()
    rows = [("class", "images", "boxes", *metrics)]
    for k, name in enumerate(class_keys(table)):
        images = truth.image_index[truth.labels == k]  # of each box
        numbers = [metric_text(result.get(f"{metric}/{name}")) for metric in metrics.values()]
        counts = (str(len(np.unique(images))), str(len(images)))
        rows.append((shown(name, 40), *counts, *numbers))
    numbers = [metric_text(result.get(metric)) for metric in totals]
    counts = (str(len(np.unique(truth.image_index))), str(len(truth)))
    rows.append(("all", *counts, *numbers))
    return align(rows)


def align(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as lines of text, with a rule below the first row.

    The first column is aligned to the left, the others to the right.
    """
    widths = []
    for column in zip(*rows, strict=True):
        widths.append(max(columns(text) for text in column))
    lines = []
    for first, *others in rows:  # not ljust and rjust, which count letters, not columns of a terminal
        cells = [first + " " * (widths[0] - columns(first))]
        for text, width in zip(others, widths[1:], strict=True):
            cells.append(" " * (width - columns(text)) + text)
        lines.append("  ".join(cells))
    return "\n".join([lines[0], "-" * columns(lines[0]), *lines[1:]])
