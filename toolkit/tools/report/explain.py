"""Diagnoses a very low AP: looks for common mistakes by comparing predictions with the ground truth.

Most causes correspond to a change of the predictions (another box format, another scale, labels shifted by one). A
cause is reported if the changed predictions find the objects, the unchanged ones do not, and the evidence suffices:
there are enough objects and optimizer steps and a score that is high enough, only the best detections of each image are
used, and they find more objects than the same boxes find in other images. The latter is needed because an untrained
detector gives every image the same boxes, and among hundreds of boxes some lie on every object in some format.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torchvision.ops import box_iou

from toolkit.base.boxes import Boxes
from toolkit.evaluation.predictions import boxes_of

logger = logging.getLogger(__name__)

MIN_RECALL = 0.3  # share of objects that a changed reading must find before it is named
MAX_IMAGES = 64  # enough to see a systematic mistake
MIN_OBJECTS = 20  # fewer are found by chance
MIN_STEPS = 100  # optimizer steps; before them every detector finds nothing
MIN_BEST_SCORE = 0.05  # of the best detection; below it the detector itself has found nothing yet
MIN_RATIO_TO_CHANCE = 1.5  # required ratio to the objects that the boxes find in other images
DETECTIONS_PER_OBJECT = 2  # best detections used for each object of an image
MISTAKEN_SIZE = " (size given to the model mistaken for the original size?)"


def explain_zero_ap(predictions: Boxes | Mapping, table, step: int | None = None) -> list[str]:
    """Return likely causes of an AP of (nearly) 0.

    Args:
        predictions: see `CocoEvaluator.evaluate`.
        table: the `DetectionTable` of the evaluation.
        step: number of optimizer steps that the detector was trained for; None: it is unknown and not checked.

    Returns:
        one sentence for each cause with its evidence; or, if there is none, a sentence that says so, or that it is too
        early to tell. The list is never empty.
    """
    truth = table.boxes()
    truth = truth[~truth.iscrowd]
    if not len(truth):
        return ["the data have no ground-truth boxes (crowds do not count), so AP is undefined"]
    detections = boxes_of(predictions, table.image_ids().tolist())
    if not len(detections):
        return ["no image has a single prediction: score threshold too high, or post-processing keeps nothing"]
    causes = _about_numbers(detections, len(table.categories))
    is_finite = np.isfinite(detections.xyxy).all(axis=1) & np.isfinite(detections.scores)
    usable = detections[is_finite]
    too_early = _too_early(usable, truth, step)
    if too_early:
        return [*causes, f"too early to tell: {too_early}"]
    best = _best(usable, truth)
    chosen = _with_both(best, truth)
    if len(chosen):
        causes += _about_boxes(best, truth, table.sizes_hw(), chosen) or _about_labels(best, truth, chosen)
    causes += _about_all(usable, truth)
    return causes or [_nothing_wrong(usable, truth, _with_both(usable, truth))]


def _too_early(detections: Boxes, truth: Boxes, step: int | None) -> str:
    """Return why the evidence does not suffice yet; "" if it does."""
    if step is not None and step < MIN_STEPS:
        return f"{step} optimizer steps are not enough to learn from (at least {MIN_STEPS})"
    if len(truth) < MIN_OBJECTS:
        return f"{len(truth)} objects are not enough to see a mistake of all boxes (at least {MIN_OBJECTS})"
    if len(detections) and 0 < detections.scores.max() < MIN_BEST_SCORE:
        return f"the highest score is {detections.scores.max():.3g}: the detector has not found anything yet"
    return ""


def _best(detections: Boxes, truth: Boxes) -> Boxes:
    """Return the best detections of each image, twice as many as it has objects, in the order of the images."""
    order = np.lexsort((-detections.scores, detections.image_index))
    detections = detections[order]
    rank = np.arange(len(detections)) - detections.offsets[detections.image_index]
    return detections[rank < DETECTIONS_PER_OBJECT * np.diff(truth.offsets)[detections.image_index]]


def _about_numbers(detections: Boxes, num_classes: int) -> list[str]:
    """Return mistakes that the numbers show by themselves, however few."""
    causes = []
    is_finite = np.isfinite(detections.xyxy).all(axis=1) & np.isfinite(detections.scores)
    unfinite = ~is_finite
    if unfinite.any():
        causes.append(f"{unfinite.sum()} of {len(detections)} predictions have a box or score that is not finite")
    detections = detections[~unfinite]
    if not len(detections):
        return causes
    if detections.scores.max() <= 0:
        causes.append("no score is above 0: the scores carry no ranking (sigmoid or softmax missing or saturated?)")
    elif len(detections) > 1 and np.ptp(detections.scores) == 0:
        causes.append(f"all {len(detections)} scores are equal ({detections.scores[0]:.4g}): they carry no ranking")
    outside = ~((detections.labels >= 0) & (detections.labels < num_classes))
    if outside.any():
        ends = f"they go from {detections.labels.min()} to {detections.labels.max()} (labels counted from 1?)"
        causes.append(f"{outside.mean():.0%} of the labels are outside 0..{num_classes - 1}, {ends}")
    return causes


def _about_all(detections: Boxes, truth: Boxes) -> list[str]:
    """Return causes that all predictions have in common."""
    if not len(detections):
        return []
    causes = []
    sides = detections.xyxy[:, 2:] - detections.xyxy[:, :2]
    degenerate = (~(sides > 0).all(axis=1)).mean()
    if degenerate > 0.5:
        causes.append(f"{degenerate:.0%} of the boxes have no width or height (x2 <= x1 or y2 <= y1)")
    classes = len(np.unique(truth.labels))
    if len(np.unique(detections.labels)) == 1 and classes > 1:
        one = f"all predictions have label {detections.labels[0]}, the ground truth has {classes} classes"
        causes.append(f"{one}: the classifier has collapsed to one class")
    return causes


def _about_boxes(detections: Boxes, truth: Boxes, sizes_hw: np.ndarray, chosen: np.ndarray) -> list[str]:
    """Return other readings of the boxes that find the objects: formats, units and scales. Labels are ignored here."""
    as_is = _recall(detections, truth, chosen)
    if as_is >= MIN_RECALL:
        return []
    for changes, images, after in ((_readings, chosen, ""), (_scales, chosen[:16], MISTAKEN_SIZE)):
        tried = [(replace(detections, xyxy=boxes), words) for boxes, words in changes(detections, sizes_hw)]
        recalls = [_recall(changed, truth, images) for changed, _ in tried]
        recall = max(recalls)
        changed, words = tried[int(np.argmax(recalls))]
        if _is_evidence(recall, as_is, changed, truth, images):
            return [f"{words} they find {recall:.0%} of the objects at IoU 0.5, as they are {as_is:.0%}{after}"]
    causes = []
    outside = (_clipped_area(detections, sizes_hw) <= 0).mean()
    if outside > 0.5 and detections.area.max() > 0:
        causes.append(f"{outside:.0%} of the boxes lie outside their image or are empty")
    ratio = np.median(np.maximum(detections.area, 0)) / np.median(truth.area)
    if abs(detections.xyxy).max() <= 2:
        causes.append("no coordinate is above 2: normalised boxes (0..1) where pixels are expected?")
    elif ratio < 0.01:
        causes.append(f"boxes are tiny: their median area is {ratio:.2g} of that of the objects")
    elif ratio > 100:
        causes.append(f"boxes are huge: their median area is {ratio:.2g} times that of the objects")
    return causes


def _is_evidence(recall: float, as_is: float, changed: Boxes, truth: Boxes, chosen: np.ndarray) -> bool:
    """Return whether a change finds enough objects: more than the boxes as they are, and more than by chance.

    Chance is the number of objects that the boxes of each image find in the next one, as boxes do that are equal in all
    images.
    """
    if recall < max(MIN_RECALL, 2 * as_is):
        return False
    return recall >= MIN_RATIO_TO_CHANCE * _recall(_moved_on(changed, chosen), truth, chosen)


def _moved_on(detections: Boxes, chosen: np.ndarray) -> Boxes:
    """Return the detections of each chosen image as if they were those of the next one."""
    detections = detections[np.isin(detections.image_index, chosen)]
    following = np.roll(chosen, -1)[np.searchsorted(chosen, detections.image_index)]
    order = np.argsort(following, kind="stable")
    return detections.take(order, following[order])


def _readings(detections: Boxes, sizes_hw: np.ndarray):
    """Yield (boxes as xyxy pixels, description) for each format that the numbers could be in."""
    a, b, c, d = detections.xyxy.T
    size = sizes_hw[detections.image_index][:, [1, 0, 1, 0]]  # width, height, width, height
    formats = {
        "xyxy": detections.xyxy,
        "xywh (left, top, width, height)": np.stack([a, b, a + c, b + d], axis=1),
        "cxcywh (centre, width, height)": np.stack(
            [
                a - c / 2,
                b - d / 2,
                a + c / 2,
                b + d / 2,
            ],
            axis=1,
        ),
        "yxyx (y before x)": np.stack([b, a, d, c], axis=1),
    }
    for name, boxes in formats.items():
        if name != "xyxy":
            yield boxes, f"boxes look like {name}, expected xyxy: read that way"
        expected = "expected pixels of the original image, xyxy: read that way"
        yield boxes * size, f"boxes look normalised (0..1, {name}), {expected}"


def _scales(detections: Boxes, sizes_hw: np.ndarray):
    """Yield (rescaled boxes, description) for constant factors and for boxes left in the size given to the model."""
    height_width = sizes_hw[detections.image_index].astype(float)
    whole = height_width[:, [1, 0, 1, 0]]
    shorter = height_width.min(axis=1, keepdims=True)
    another = "boxes are in another scale than the original image:"
    for factor in 2.0 ** (np.arange(-48, 49) / 16):
        yield detections.xyxy * factor, f"{another} multiplied by {factor:.2f}"
    for side in range(64, 1345, 32):
        yield detections.xyxy * (whole / side), f"{another} taken as pixels of a {side} x {side} image"
        yield detections.xyxy * (shorter / side), f"{another} taken as pixels of an image with shorter side {side}"


def _about_labels(detections: Boxes, truth: Boxes, chosen: np.ndarray) -> list[str]:
    """Return causes in the labels of boxes that find the objects: labels moved by one, or mixed up."""
    any_class = _recall(detections, truth, chosen)
    same_class = _recall(detections, truth, chosen, labels=True)
    if same_class > any_class / 2 or not _is_evidence(any_class, 0, detections, truth, chosen):
        return []
    for shift in (-1, 1):
        moved = _recall(
            replace(detections, labels=detections.labels + shift),
            truth,
            chosen,
            labels=True,
        )
        if moved >= 0.8 * any_class:
            with_class = f"{moved:.0%} of the objects are found with their class, as they are {same_class:.0%}"
            return [f"labels are off by one: with {shift:+d} added {with_class}"]
    why = "classes are in another order than in the ground truth, or the classifier has not learned"
    return [f"{any_class:.0%} of the objects are found at IoU 0.5, but only {same_class:.0%} with their class: {why}"]


def _nothing_wrong(detections: Boxes, truth: Boxes, chosen: np.ndarray) -> str:
    recall = _recall(detections, truth, chosen) if len(chosen) else 0.0
    return (
        f"no known mistake: boxes find {recall:.0%} of the objects at IoU 0.5 whatever their class; "
        f"{len(detections)} predictions, highest score {detections.scores.max() if len(detections) else 0:.3g}; "
        "most likely the detector has not been trained long enough"
    )


def _with_both(detections: Boxes, truth: Boxes) -> np.ndarray:
    """Return positions of at most MAX_IMAGES images, evenly spread, that have objects and predictions."""
    both = np.intersect1d(detections.image_index, truth.image_index)
    if not len(both):
        return both
    evenly = np.linspace(0, len(both) - 1, min(len(both), MAX_IMAGES))
    return both[evenly.astype(int)]


def _recall(detections: Boxes, truth: Boxes, images: np.ndarray, labels: bool = False) -> float:
    """Return the share of the objects in `images` that a prediction overlaps with IoU >= 0.5 (and has the label of)."""
    hits = total = 0
    for image in images.tolist():
        f = detections.of_image(image)
        t = truth.of_image(image)
        annotated = torch.from_numpy(truth.xyxy[t])
        predicted = torch.from_numpy(detections.xyxy[f])
        iou = box_iou(annotated, predicted).nan_to_num(0)
        if labels:
            same_label = truth.labels[t, None] == detections.labels[None, f]
            iou = iou * torch.from_numpy(same_label)
        hits += int((iou.amax(dim=1) >= 0.5).sum())
        total += len(iou)
    return hits / total


def _clipped_area(detections: Boxes, sizes_hw: np.ndarray) -> np.ndarray:
    size = sizes_hw[detections.image_index][:, [1, 0]]  # width, height
    low = np.clip(detections.xyxy[:, :2], 0, size)
    high = np.clip(detections.xyxy[:, 2:], 0, size)
    return np.prod(np.maximum(high - low, 0), axis=1)
