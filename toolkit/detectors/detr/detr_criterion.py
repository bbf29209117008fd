"""DETR's matcher and criterion (facebookresearch/detr `models/matcher.py`, `models/detr.py`), for all layers at once.

The original matches and computes the losses one decoder layer after another. Here one cost tensor covers all layers and
images, goes to the host in one copy, and one small index tensor comes back; the losses of all layers are then a handful
of batched operations. Pairs across images are never computed. The results equal the original's.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from toolkit.base.batch import on_host, pad_rows, send, send_dicts
from toolkit.base.box_ops import (
    cxcywh_to_xyxy,
    iou_and_giou,
    normalize_boxes,
    pairwise_generalized_iou,
    xyxy_to_cxcywh,
)
from toolkit.step.losses import labelled_classes, partial_log_softmax, times_class_weights, unlabelled_columns

# A cost no real pair reaches (class, L1 and GIoU costs are of the order of 10). Non-finite costs become this, so that
# scipy does not raise on one rank alone: the loss itself is then NaN and the guard stops all ranks together.
UNUSABLE_COST = 1e8


class PaddedTargets(NamedTuple):
    """Targets of B images, padded to the largest number T of boxes in an image. `valid` is False for padding and crowd
    regions; for `labelled`, see `toolkit.step.losses.labelled_classes`."""

    labels: Tensor  # (B, T) int64, 0 where not valid
    boxes_cxcywh: Tensor  # (B, T, 4) fractions of the image without padding
    valid: Tensor  # (B, T) bool
    labelled: Tensor | None = None  # (B, C) bool


class QueryMatches(NamedTuple):
    """The N matched pairs of query and target of all layers and images: indices, each `(N,)` int64, ordered by layer,
    then image, then query."""

    layer: Tensor
    image: Tensor
    query: Tensor
    target: Tensor


def pad_targets(targets: Sequence[Mapping[str, Tensor]], device: torch.device, dtype: torch.dtype) -> PaddedTargets:
    """Stack the targets of a batch without reading anything back from the device.

    Args:
        targets: per image `boxes (N, 4)` xyxy pixels, `labels (N,)`, `size (2,)`, height and width in pixels, and, if
            known, `iscrowd (N,)`.
        device: device of the tensors returned.
        dtype: dtype of the boxes returned, the one that losses are computed in.

    Crowd regions (`iscrowd` 1) are marked as not valid: DETR drops them when it loads the data.
    """
    sizes_hw = torch.stack([t["size"].to(device, non_blocking=True) for t in targets])
    boxes = [t["boxes"].to(device=device, dtype=dtype, non_blocking=True) for t in targets]
    labels = [t["labels"].to(device, non_blocking=True) for t in targets]
    # Padded by index, in as few operations for many images as for one; row 0 stands for padding.
    counts = [len(of_image) for of_image in labels]
    rows = torch.arange(1, 1 + sum(counts))
    is_object = torch.cat([_is_object(on_host(t)) for t in targets])
    padded = {"rows": pad_rows(rows, counts), "valid": pad_rows(is_object, counts)}  # (B, T)
    (padded,) = send_dicts([padded], device)
    boxes_xyxy = torch.cat([boxes[0].new_zeros(1, 4), *boxes])[padded["rows"]]  # (B, T, 4)
    return PaddedTargets(
        labels=torch.cat([labels[0].new_zeros(1), *labels])[padded["rows"]],
        boxes_cxcywh=xyxy_to_cxcywh(normalize_boxes(boxes_xyxy, sizes_hw)),
        valid=padded["valid"],
        labelled=labelled_classes(targets, device),
    )


def _is_object(target: Mapping[str, Tensor]) -> Tensor:
    """Return (N,) bool, false for crowd regions."""
    if "iscrowd" in target:
        return target["iscrowd"] == 0
    return torch.ones_like(target["labels"], dtype=torch.bool)


def count_objects(targets: Sequence[Mapping[str, Tensor]]) -> list[int]:
    """Return the number of annotated objects of each image, without crowd regions. Targets should be on the CPU,
    because on a GPU the call would synchronise."""
    counts = []
    for target in targets:
        crowds = int(target["iscrowd"].sum()) if "iscrowd" in target else 0
        counts.append(len(target["labels"]) - crowds)
    return counts


class MatchingCosts(NamedTuple):
    """Weights of the three terms of the matching cost; the defaults are those of the DETR paper."""

    class_cost: float = 1.0
    bbox_cost: float = 5.0
    giou_cost: float = 2.0


@torch.no_grad()
def assign_queries(
    class_costs: Tensor,
    boxes_cxcywh: Tensor,
    targets: PaddedTargets,
    costs: MatchingCosts,
    further_costs: Tensor | None = None,
) -> QueryMatches:
    """Assign queries to targets one-to-one at the lowest cost, for every layer and image, with one copy to the host.

    Args:
        class_costs: `(L, B, Q, T)` for L layers, Q queries and T targets: the unweighted class term, for example minus
            the probability of the target's class.
        boxes_cxcywh: `(L, B, Q, 4)` predicted boxes, fractions of the image.
        costs: weights of the three terms.
        further_costs: `(L, B, Q, T)`, other terms with their weights, such as those of masks.

    For each layer and image, exactly min(Q, number of valid targets) pairs are returned; padding and crowd regions are
    never matched.
    """
    device = class_costs.device
    if class_costs.shape[-1] == 0:  # no targets
        return QueryMatches(*torch.zeros(4, 0, dtype=torch.int64, device=device))
    target_boxes = targets.boxes_cxcywh.to(boxes_cxcywh.dtype)
    coordinates = zip(boxes_cxcywh.unbind(-1), target_boxes.unbind(-1), strict=True)
    l1 = 0  # (L, B, Q, T); one coordinate after another, so that intermediates are small
    for of_queries, of_targets in coordinates:
        l1 = l1 + (of_queries[..., None] - of_targets[:, None, :]).abs()
    giou = pairwise_generalized_iou(cxcywh_to_xyxy(boxes_cxcywh), cxcywh_to_xyxy(target_boxes))
    total = costs.bbox_cost * l1 + costs.class_cost * class_costs - costs.giou_cost * giou
    if further_costs is not None:
        total = total + further_costs
    total = total.nan_to_num_(nan=UNUSABLE_COST, posinf=UNUSABLE_COST, neginf=-UNUSABLE_COST)
    # Infinity now marks invalid targets only, so the mask travels inside the one copy.
    total.masked_fill_(~targets.valid[:, None, :], torch.inf)
    pairs = _assigned(total.cpu().numpy())
    return QueryMatches(*send(torch.from_numpy(pairs), device))


def _assigned(total_costs: np.ndarray) -> np.ndarray:
    """Return layer, image, query and target of the cheapest assignments, (4, N) int64.

    total_costs: (L, B, Q, T), infinite for invalid targets.
    """
    num_layers, batch_size, _, _ = total_costs.shape
    valid = [np.flatnonzero(total_costs[0, image, 0] != np.inf) for image in range(batch_size)]
    images = []
    queries = []
    targets = []
    for of_layer in total_costs:
        for image, columns in enumerate(valid):
            rows, picked = linear_sum_assignment(of_layer[image][:, columns])
            images.append(np.full(len(rows), image))
            queries.append(rows)
            targets.append(columns[picked])
    images = np.concatenate(images)
    layers = np.repeat(np.arange(num_layers), len(images) // num_layers)  # each layer has the same number of pairs
    return np.stack([layers, images, np.concatenate(queries), np.concatenate(targets)])


def full_precision(tensor: Tensor) -> Tensor:
    """Convert half precision to float32; return other tensors unchanged."""
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if is_half else tensor


class BoxTerms(NamedTuple):
    """Terms of N matched pairs, each `(N,)`: L1 of cxcywh as fractions, 1 - GIoU, and the IoU, without gradient."""

    loss_bbox: Tensor
    loss_giou: Tensor
    iou: Tensor

    def sums(self, num_layers: int) -> dict[str, Tensor]:
        """Return `loss_bbox` and `loss_giou`, each summed over the matches of a layer, `(L,)`.

        Every one of the `num_layers` layers must have the same number of matches.
        """
        by_layer = (num_layers, len(self.iou) // num_layers)
        return {
            "loss_bbox": self.loss_bbox.view(by_layer).sum(1),
            "loss_giou": self.loss_giou.view(by_layer).sum(1),
        }


def box_terms(predictions: Sequence[tuple[Tensor, QueryMatches]], targets: PaddedTargets) -> list[BoxTerms]:
    """Return the terms of each of `predictions`, in as few operations for several as for one.

    predictions: boxes `(L, B, Q, 4)`, cxcywh as fractions, of L layers with Q queries, and their matches.
    """
    predicted = []
    wanted = []
    for boxes_cxcywh, matches in predictions:
        predicted.append(boxes_cxcywh[matches.layer, matches.image, matches.query])
        wanted.append(targets.boxes_cxcywh[matches.image, matches.target])
    counts = [len(boxes) for boxes in wanted]
    predicted = predicted[0] if len(predictions) == 1 else torch.cat(predicted)  # (N, 4)
    wanted = wanted[0] if len(predictions) == 1 else torch.cat(wanted)
    iou, giou = iou_and_giou(cxcywh_to_xyxy(predicted), cxcywh_to_xyxy(wanted))
    l1 = (predicted - wanted).abs().sum(-1)
    columns = zip(l1.split(counts), (1 - giou).split(counts), iou.detach().split(counts), strict=True)
    return [BoxTerms(*column) for column in columns]


@torch.no_grad()
def matching_metrics(
    logits: Tensor,
    cardinality: Tensor,
    targets: PaddedTargets,
    matches: QueryMatches,
    suffixes: Sequence[str],
    detecting: int,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return {metric: (sum, count)}: `class_error` in percent over matched queries of the last layer, and
    `cardinality_error` of every layer in boxes per image.

    Args:
        logits: `(L, B, Q, C)` for L layers and Q queries.
        cardinality: `(L, B)`, the number of queries that predict an object, among the first `detecting` ones.
        suffixes: for each layer, what its name of the metric ends in.
        detecting: number of queries that detect; only these count in `class_error`.
    """
    num_layers, batch_size = logits.shape[:2]
    per_layer = len(matches.layer) // num_layers
    last = slice(per_layer * (num_layers - 1), None)
    image = matches.image[last]
    query = matches.query[last]
    target = matches.target[last]
    counted = query < detecting
    predicted_labels = logits[-1, image, query].argmax(-1)
    wrong = predicted_labels != targets.labels[image, target]
    errors = (cardinality - targets.valid.sum(-1)).abs().sum(-1)  # (L,)
    images = torch.full_like(errors[0], batch_size)
    metrics = {"class_error": (100.0 * (wrong & counted).sum(), counted.sum())}
    for suffix, error in zip(suffixes, errors, strict=True):
        metrics[f"cardinality_error{suffix}"] = (error, images)
    return metrics


class DetrCriterion(nn.Module):
    """DETR's set loss for all decoder layers.

    Losses: `loss_ce` (cross-entropy over all queries, with weight `eos_coef` for no-object), `loss_bbox` (L1 of cxcywh
    as fractions of the image), `loss_giou` (1 - GIoU). Those of the last decoder layer have these names; auxiliary
    layer i adds the suffix `_i`.

    Args:
        num_classes: object classes C; the logits have C + 1 columns, the last one means no object.
        num_layers: decoder layers that get a loss (1 without auxiliary losses).
        eos_coef: weight of the no-object class.
        matching_costs: weights of class, box L1 and GIoU in the matching cost.
    """

    def __init__(
        self,
        num_classes: int,
        num_layers: int,
        eos_coef: float = 0.1,
        matching_costs: Sequence[float] = (1, 5, 2),
    ):
        super().__init__()
        self.num_classes = num_classes
        self.num_layers = num_layers
        self.matching_costs = MatchingCosts(*matching_costs)
        # The last layer first, without suffix, then the auxiliary ones in the order of the decoder.
        self.suffixes = ("", *(f"_{i}" for i in range(num_layers - 1)))
        self.divided_by = {}
        for suffix in self.suffixes:
            self.divided_by[f"loss_ce{suffix}"] = "class_weights"
            self.divided_by[f"loss_bbox{suffix}"] = "boxes"
            self.divided_by[f"loss_giou{suffix}"] = "boxes"
        self.loss_names = tuple(self.divided_by)
        self.metric_names = ("class_error", *(f"cardinality_error{suffix}" for suffix in self.suffixes))
        class_weights = torch.ones(num_classes + 1)
        class_weights[-1] = eos_coef
        # The weight as float32 holds it, so that numerator and denominator agree in float64 too.
        self.eos_weight = float(np.float32(eos_coef))
        self.register_buffer("class_weights", class_weights, persistent=False)

    def denominators(self, targets: Sequence[Mapping[str, Tensor]], num_queries: int) -> dict[str, float]:
        """Return what this batch adds to the denominators, computed only from targets on the CPU.

        `boxes`: number of objects, including those beyond the number of queries, as in the original. `class_weights`:
        sum of the class weights over all queries, by which `F.cross_entropy(weight=...)` divides.
        """
        objects = count_objects(targets)
        matched = sum(min(n, num_queries) for n in objects)
        return {
            "boxes": float(sum(objects)),
            "class_weights": matched + self.eos_weight * (num_queries * len(objects) - matched),
        }

    def forward(
        self,
        logits: Tensor,
        boxes_cxcywh: Tensor,
        targets: Sequence[Mapping[str, Tensor]],
        denominators: Mapping[str, Tensor | float],
        object_weights: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
        """Compute losses and metrics of a batch.

        Args:
            logits: `(L, B, Q, C + 1)` of Q queries in L decoder layers; first decoder layer first, the last layer is
                the main output.
            boxes_cxcywh: `(L, B, Q, 4)` fractions of the image without padding.
            targets: per image, see `pad_targets`; on any device.
            denominators: `boxes` and `class_weights`, the divisors of the sums.
            object_weights: (C,) weights of the object classes in `loss_ce`, `Detector.class_weights`.

        Returns:
            losses: name -> scalar, float32 (float64 for float64 input), regardless of autocast.
            metrics: name -> (sum, count): `class_error` in percent over matched queries of the last layer,
            `cardinality_error` (of every layer) in boxes per image.
        """
        with torch.autocast(logits.device.type, enabled=False):
            logits = full_precision(logits)
            boxes_cxcywh = boxes_cxcywh.to(logits.dtype)
            padded = pad_targets(targets, logits.device, logits.dtype)
            log_probabilities = logits.log_softmax(-1)  # for the matching, too
            matches = self.match(log_probabilities, boxes_cxcywh, padded)
            losses = self._losses(log_probabilities, boxes_cxcywh, padded, matches, denominators, object_weights)
            return losses, self._metrics(logits.detach(), padded, matches)

    def match(self, log_probabilities: Tensor, boxes_cxcywh: Tensor, targets: PaddedTargets) -> QueryMatches:
        """Return the assignment of targets to the Q queries of all L layers.

        log_probabilities: `(L, B, Q, C + 1)`. boxes_cxcywh: `(L, B, Q, 4)` fractions of the image.
        """
        labels = targets.labels[:, None, :].expand(*log_probabilities.shape[:3], -1)  # (L, B, Q, T)
        probabilities = log_probabilities.detach().gather(-1, labels).exp()
        return assign_queries(-probabilities, boxes_cxcywh.detach(), targets, self.matching_costs)

    def _losses(
        self, log_probabilities, boxes_cxcywh, targets, matches, denominators, object_weights
    ) -> dict[str, Tensor]:
        num_layers = len(log_probabilities)
        device = log_probabilities.device
        classes = torch.full(
            log_probabilities.shape[:3],
            self.num_classes,
            dtype=torch.int64,
            device=device,
        )
        matched_labels = targets.labels[matches.image, matches.target]
        classes[matches.layer, matches.image, matches.query] = matched_labels
        classes = classes.flatten()
        class_weights = self.class_weights.to(log_probabilities.dtype)
        rows = log_probabilities.flatten(0, 2)  # (L * B * Q, C + 1)
        if targets.labelled is not None:
            by_image = unlabelled_columns(targets.labelled, -1)  # (B, C + 1)
            unlabelled = by_image[:, None].expand_as(log_probabilities)
            rows = partial_log_softmax(rows, classes, unlabelled.flatten(0, 2), -1)
        ce = F.nll_loss(rows, classes, class_weights, reduction="none")
        if object_weights is not None:
            labels = classes.masked_fill(classes == self.num_classes, -1)
            ce = times_class_weights(ce, labels, object_weights)
        by_layer = {"loss_ce": ce.view(num_layers, -1).sum(1) / denominators["class_weights"]}
        (of_boxes,) = box_terms([(boxes_cxcywh, matches)], targets)
        for name, values in of_boxes.sums(num_layers).items():
            by_layer[name] = values / denominators["boxes"]
        losses = {}
        for i, suffix in enumerate(self.suffixes):
            for name, values in by_layer.items():
                losses[f"{name}{suffix}"] = values[i - 1]  # the last layer's come first and have no suffix
        return losses

    def _metrics(self, logits, targets, matches) -> dict[str, tuple[Tensor, Tensor]]:
        cardinality = (logits.amax(-1) != logits[..., -1]).sum(-1)  # (L, B): no-object is not the maximum
        in_order = (*self.suffixes[1:], "")  # of the decoder
        metrics = matching_metrics(logits, cardinality, targets, matches, in_order, logits.shape[2])
        return {name: metrics[name] for name in self.metric_names}
