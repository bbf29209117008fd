"""Collects pictures with boxes, curves and confusion matrices of an evaluation, which W&B and TensorBoard display."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from toolkit.base.boxes import Boxes
from toolkit.base.masks import bitmap
from toolkit.evaluation.draw import choose_images, fitted, picture_of
from toolkit.evaluation.matches import Matches
from toolkit.tools.report.charts import figure
from toolkit.tools.report.figures import class_ap_chart, confusion_chart, f1_chart
from toolkit.tools.report.thresholds import ThresholdSweep, confusion_matrix, sweep

PICTURE_SIDE_PX = 640  # of a picture, in pixels
MAX_SHOWN_BOXES = 50  # of a picture, those with the best scores
MAX_SHOWN_CLASSES = 20  # with a curve, and in the confusion matrix: those with most boxes
ALL_CLASSES = "all classes"


@dataclass(frozen=True)
class ShownImage:
    """A validation image with its boxes.

    Attributes:
        picture: the image, made smaller if it is large.
        truth_boxes, found_boxes: annotated and predicted boxes (N, 4) xyxy in pixels of `picture`; predicted ones are
            sorted, best first.
        truth_labels, found_labels: (N,) labels of these boxes.
        found_scores: (N,) scores of the predicted boxes.
        truth_map, found_map: (H, W) int64 of the size of `picture`: 1 plus the label of the annotated mask, or of the
            best predicted mask above the threshold, at each pixel; 0: there is none. None: the data have no masks.
    """

    image_id: object
    picture: Image.Image
    truth_boxes: np.ndarray
    truth_labels: np.ndarray
    found_boxes: np.ndarray
    found_labels: np.ndarray
    found_scores: np.ndarray
    truth_map: np.ndarray | None = None
    found_map: np.ndarray | None = None


@dataclass(frozen=True)
class EvaluationDisplay:
    """An evaluation in the form that experiment trackers display.

    Attributes:
        class_names: names of all classes.
        images: some images with their boxes.
        grid: one picture of all images with drawn boxes; None: there is none.
        curves: precision, recall and F1 against the score by the name of the class; `ALL_CLASSES` is the first one.
        ap: AP of each class that has boxes, by name.
        matrix: (N + 1, N + 1), see `confusion_matrix`, for the N classes `matrix_names` at the score `threshold`.
    """

    class_names: list[str]
    images: list[ShownImage]
    grid: Image.Image | None
    curves: dict[str, ThresholdSweep]
    ap: dict[str, float]
    matrix: np.ndarray
    matrix_names: list[str]
    threshold: float

    def figures(self) -> dict:
        """Return charts of F1 against score, of the confusion matrix and of the AP of each class by name, each as
        matplotlib's `Figure`; charts without data are left out."""
        charts = {
            "f1": f1_chart(self.curves, self.curves[ALL_CLASSES].best),
            "confusion_matrix": confusion_chart(self.matrix, self.matrix_names, self.threshold),
            "class_AP": class_ap_chart(self.ap),
        }
        return {name: figure([chart]) for name, chart in charts.items() if not chart.is_empty}


def shown_evaluation(
    table, matches: Matches, scores: Mapping, pictures: int, grid: Image.Image | None
) -> EvaluationDisplay:
    """Collect everything of an evaluation that experiment trackers display.

    Args:
        table: the data table.
        matches: the matches of predictions with the table, by mask if there are masks.
        scores: metrics by name, as `CocoEvaluator.evaluate` returns them.
        pictures: number of images, which are the same at every evaluation.
        grid: see `EvaluationDisplay`.
    """
    names = matches.class_names
    chosen = np.sort(np.argsort(-matches.num_truth, kind="stable")[:MAX_SHOWN_CLASSES])
    overall = sweep(matches)
    curves = {ALL_CLASSES: overall} | {names[k]: sweep(matches, k) for k in chosen if matches.num_truth[k]}
    threshold = 0.5 if overall.best is None else overall.best.threshold
    places = [*chosen, len(names)]
    matrix = confusion_matrix(matches, threshold)[np.ix_(places, places)]
    ap = {name: scores[f"AP/{name}"] for name in names if scores.get(f"AP/{name}") is not None}
    images = _shown_images(table, matches, pictures, threshold)
    return EvaluationDisplay(
        names,
        images,
        grid,
        curves,
        ap,
        matrix,
        [names[k] for k in chosen],
        threshold,
    )


def _shown_images(table, matches: Matches, count: int, threshold: float) -> list[ShownImage]:
    shown = []
    truth = matches.truth
    detections = matches.found
    for position in choose_images(table, count) if count else ():
        row = table.row(position)
        image = table.decode_image(row)
        picture = picture_of(image)
        scale = min(1.0, PICTURE_SIDE_PX / max(picture.size))
        if scale < 1:
            picture = fitted(picture, PICTURE_SIDE_PX)
        annotated_rows = truth.of_image(position)
        best = detections.of_image(position)
        best = slice(best.start, min(best.stop, best.start + MAX_SHOWN_BOXES))
        annotated = truth.xyxy[annotated_rows] * scale, truth.labels[annotated_rows]
        detected = detections.xyxy[best] * scale, detections.labels[best], detections.scores[best]
        maps = {}
        if matches.by_mask:
            maps["truth_map"] = _label_map(truth, annotated_rows, picture.size)
            strong = [at for at in range(best.start, best.stop) if detections.scores[at] > threshold]
            maps["found_map"] = _label_map(detections, strong[::-1], picture.size)
        shown.append(ShownImage(row["image_id"], picture, *annotated, *detected, **maps))
    return shown


def _label_map(boxes: Boxes, rows: Sequence[int] | slice, size_wh: tuple[int, int]) -> np.ndarray:
    """Return the labels of the masks `rows`, plus 1, as pixels (H, W); the last mask is on top."""
    whole = np.zeros(size_wh[::-1], np.int64)
    for mask, label in zip(boxes.extra["masks"][rows], boxes.labels[rows].tolist(), strict=True):
        pixels = Image.fromarray(bitmap(mask, mask.size_hw)).resize(size_wh, Image.Resampling.NEAREST)
        whole[np.asarray(pixels) > 0] = 1 + label
    return whole
