"""PE-Net, REACT and REACT++ on a one-stage detector, in a form that exporters can trace: every image has the same
number of objects, and all their pairs. If the detector finds fewer objects, the remaining rows have score 0."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from toolkit.base.batch import rows_of
from toolkit.detectors.scene_graphs.box_features import union_boxes
from toolkit.detectors.scene_graphs.detector_below import MAX_CANDIDATES, distribution_logits
from toolkit.detectors.scene_graphs.frequency import log_prior
from toolkit.detectors.scene_graphs.postprocess import late_labels
from toolkit.detectors.scene_graphs.relation_batch import RelationBatch, RelationOutput
from toolkit.models.detector import kept_maps
from toolkit.models.nms import class_wise_nms

TRACEABLE_HEADS = ("penet", "react", "react_pp")  # heads without trees, sequences and messages between objects


@dataclass
class _EqualImages(RelationBatch):
    """A batch whose `num_objects` is one number for all images; the number of images is known only at run time."""

    rows_of_images: Tensor | None = None

    @property
    def image(self) -> Tensor:
        return self.rows_of_images


class TracedObjects(NamedTuple):
    """K objects of each image; rows of score 0 are empty.

    boxes: (B, K, 4) xyxy. labels: (B, K) from 0. scores: (B, K). logits: (B, K, 1 + C), column 0 is the background.
    """

    boxes: Tensor
    labels: Tensor
    scores: Tensor
    logits: Tensor


def decode_graph(model: nn.Module, images: Tensor, sizes: Tensor, top_k: int, pool: Callable) -> tuple[Tensor, ...]:
    """Return the results of `GraphDetector.decode_graph` for `model`, a `SceneGraph` on a `DetectorBelow`.

    This is `SceneGraph.forward` and `postprocess` for a fixed number of objects and pairs. Training and evaluation keep
    lists of what each image has, which is less to compute, but which an exporter cannot trace.
    """
    below = model.detector
    with kept_maps(below.inner.map_taps()) as tapped:
        outputs = below.inner(images, sizes)
    maps = {name: lateral(tapped[int(name)]) for name, lateral in below.laterals.items()}
    objects = _objects(below, outputs, sizes, model.detections_per_image)
    real = objects.scores > 0
    count = objects.boxes.shape[1]
    # Of 3 objects: 0 1, 0 2, 1 0, 1 2, 2 0, 2 1, the same rows in every image.
    pairs = torch.tensor([*permutations(range(count), 2)], device=images.device).reshape(-1, 2)
    batch = _batch(model, maps, objects, real, pairs, sizes, pool)
    output = model.head(batch)
    scores, labels = _classified(model, batch, output, real)
    relation_logits = output.relation_logits
    if model.prior_adjustment:
        relation_logits = relation_logits - model.prior_adjustment * log_prior(model.relation_counts)
    predicate_scores = relation_logits.softmax(1)[:, 1:]
    predicate_scores = predicate_scores.unflatten(0, (-1, pairs.shape[0]))  # (B, R, P)
    triplets = predicate_scores.amax(2) * scores[:, pairs[:, 0]] * scores[:, pairs[:, 1]]
    best, order = triplets.topk(min(top_k, pairs.shape[0]), dim=1)
    return (
        objects.boxes,
        scores,
        labels.where(scores > 0, -1),
        pairs[order],
        rows_of(predicate_scores, order),
        best,
    )


def _batch(
    model: nn.Module,
    maps: dict[str, Tensor],
    objects: TracedObjects,
    real: Tensor,
    pairs: Tensor,
    sizes: Tensor,
    pool: Callable,
) -> RelationBatch:
    """Return the head's input for all `pairs` (R, 2) of the objects of each image.

    maps: feature maps by name. real: (B, K) bool, False for empty rows. pool: pools features of the boxes that are
    real, see `toolkit.tools.export.faster_rcnn.pool_where`.
    """
    boxes = objects.boxes
    count = boxes.shape[1]
    subjects, others = boxes[:, pairs].unbind(2)  # (B, R, 4) each
    both_real = real[:, pairs].all(2)
    sizes_of_pairs = sizes[:, None].expand(-1, pairs.shape[0], -1).flatten(0, 1)
    rectangles = model.union.rectangles(subjects.flatten(0, 1), others.flatten(0, 1), sizes_of_pairs)
    pooled = pool(model.union.pool, maps, union_boxes(subjects, others), both_real)
    apart = boxes.where(real[..., None], -1e6)  # missing objects take no class from found ones in late NMS
    apart = apart.flatten(0, 1)  # (B * K, 4)
    # The head counts the objects of all images: objects 0 and 1 of image 2 are rows 2 * K and 2 * K + 1.
    image = torch.arange(sizes.shape[0], device=boxes.device)
    pairs_of_batch = pairs + count * image[:, None, None]  # (B, R, 2)
    return _EqualImages(
        boxes_xyxy=boxes.flatten(0, 1),
        sizes_hw=sizes,
        num_objects=count,
        pairs=pairs_of_batch.flatten(0, 1),
        num_pairs=[],
        roi_features=model.box_features(pool(model.detector.box_pool, maps, boxes, real)),
        union_features=model.union.head(pooled + rectangles),
        found_labels=objects.labels.flatten() + 1,
        logits=objects.logits.flatten(0, 1),
        boxes_per_class=apart[:, None].expand(-1, objects.logits.shape[2], -1),
        rows_of_images=image[:, None].expand(-1, count).flatten(),
    )


def _classified(model: nn.Module, batch: RelationBatch, output: RelationOutput, real: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores, 0 for empty rows and for the background, and the labels from 0 that the head gives the
    objects, (B, K) each. real: (B, K) bool, False for empty rows."""
    labels = output.object_labels
    if not output.labels_stay:
        labels = late_labels(batch, output.object_logits, model.nms_threshold)
    scores = output.object_logits.softmax(1).gather(1, labels[:, None])
    scores = scores.unflatten(0, (-1, real.shape[1]))[..., 0]
    labels = labels.unflatten(0, (-1, real.shape[1])) - 1
    return scores.where(real & (labels >= 0), 0), labels


def _objects(below: nn.Module, outputs: dict, sizes: Tensor, most: int) -> TracedObjects:
    """Return at most `most` objects of each image, as in `DetectorBelow.detect_with_logits`."""
    boxes, scores = below.inner.all_predictions(outputs, sizes)
    limits_whwh = sizes.flip(1).repeat(1, 2)[:, None].to(boxes)
    boxes = boxes.clamp(min=0).minimum(limits_whwh)
    count = min(MAX_CANDIDATES, scores.shape[1])
    rows = scores.amax(2).topk(count, dim=1).indices
    boxes = rows_of(boxes, rows)
    logits = distribution_logits(rows_of(scores, rows).flatten(0, 1))
    logits = logits.unflatten(0, (-1, count))
    scores = logits.softmax(-1)[..., 1:].transpose(1, 2)  # (B, C, N)
    scores = scores.where(scores > below.score_threshold, 0)
    of_classes = boxes[:, None].expand(-1, scores.shape[1], -1, -1)
    turns = class_wise_nms(of_classes, scores, below.nms_threshold)
    found, labels = scores.where(turns > 0, 0).max(1)
    found, rows = found.topk(min(most, count), dim=1)
    return TracedObjects(rows_of(boxes, rows), labels.gather(1, rows), found, rows_of(logits, rows))
