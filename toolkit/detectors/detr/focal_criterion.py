"""Criterion of the family members that classify with sigmoids: Conditional, Deformable, DAB, RF- and LW-DETR.

The losses equal those of transformers' `DeformableDetrForObjectDetectionLoss` and `LwDetrForObjectDetectionLoss`. These
process the layers one by one; here one cost tensor covers all layers, as in `detr_criterion.py`.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import sigmoid_focal_loss

from toolkit.detectors.detr.detr_criterion import (
    BoxTerms,
    MatchingCosts,
    PaddedTargets,
    QueryMatches,
    assign_queries,
    box_terms,
    full_precision,
    matching_metrics,
    pad_targets,
)
from toolkit.detectors.detr.mask_terms import BatchMasks, MaskTerms
from toolkit.step.losses import times_class_weights, without_unlabelled

ALPHA, GAMMA = 0.25, 2.0  # of the focal loss, in all these papers
# Logits `(L, B, Q, C)`, indices of the matched ones, the IoUs of their boxes -> terms of the loss, `(L, B, Q, C)`.
ClassTerms = Callable[[Tensor, tuple[Tensor, ...], Tensor], Tensor]


def focal_terms(logits: Tensor, positives: tuple[Tensor, ...], ious: Tensor) -> Tensor:
    """Return the focal loss of every logit (Lin et al. 2017), `(..., C)`. The target is 1 at `positives` and 0
    elsewhere.

    positives: one index tensor for each dimension of the logits. ious: not used; `quality_terms` has the same
    arguments.
    """
    labels = torch.zeros_like(logits, requires_grad=False)
    labels[positives] = 1
    return sigmoid_focal_loss(logits, labels, ALPHA, GAMMA)


def quality_terms(logits: Tensor, positives: tuple[Tensor, ...], ious: Tensor) -> Tensor:
    """Return a cross-entropy for every logit, whose target at `positives` is score^0.25 * IoU^0.75 (IA-BCE of
    Align-DETR, in LW-DETR and RF-DETR).

    Negatives are weighted by the square of their score, and the gradient also flows through this weight, as in RF-DETR.

    Args:
        positives: one index tensor for each dimension of the logits, in which the matched entries are listed.
        ious: IoU of the box with its object, for each of `positives`.
    """
    scores = logits.sigmoid()
    own_scores = scores.detach()[positives]
    quality = own_scores.pow(ALPHA) * ious.pow(1 - ALPHA)
    quality = quality.clamp(min=0.01)
    positive_weight = torch.zeros_like(logits, requires_grad=False)
    positive_weight[positives] = quality
    negative_weight = scores.pow(GAMMA).index_put(positives, 1 - quality)
    towards_one = -positive_weight * F.logsigmoid(logits)
    towards_zero = negative_weight * F.logsigmoid(-logits)
    return towards_one - towards_zero


class FocalCriterion(nn.Module):
    """Losses `loss_ce`, `loss_bbox` (L1 of cxcywh) and `loss_giou` of the last decoder layer, and the same with the
    suffix `_i` of auxiliary layer i.

    Args:
        num_layers: decoder layers that get a loss (1 without auxiliary losses).
        matching_costs: weights of class, box L1 and GIoU in the matching cost.
        encoder: add losses with the suffix `_enc` for the encoder's proposals: "classes", or "foreground" as in
            two-stage Deformable DETR, where every object counts as class 0; None: there are no proposals.
        class_terms: `focal_terms` or `quality_terms`.
        masks: the terms of masks; None: there are no masks.
    """

    divided_by = "boxes"

    def __init__(
        self,
        num_layers: int,
        matching_costs: Sequence[float] = (2, 5, 2),
        encoder: str | None = None,
        class_terms: ClassTerms = focal_terms,
        masks: MaskTerms | None = None,
    ):
        super().__init__()
        self.encoder = encoder
        self.class_terms = class_terms
        self.masks = masks
        self.matching_costs = MatchingCosts(*matching_costs)
        self.suffixes = (*(f"_{i}" for i in range(num_layers - 1)), "")  # in the order of the decoder
        last_first = ("", *self.suffixes[:-1])
        with_losses = [*last_first, "_enc"] if encoder else last_first
        of_layer = ["loss_ce", "loss_bbox", "loss_giou", *(masks.loss_names if masks else ())]
        self.loss_names = tuple(f"{name}{suffix}" for suffix in with_losses for name in of_layer)
        self.metric_names = ("class_error", *(f"cardinality_error{suffix}" for suffix in last_first))

    def forward(
        self,
        outputs: Mapping[str, Tensor],
        targets: Sequence[Mapping[str, Tensor]],
        denominators: Mapping[str, Tensor | float],
        groups: int = 1,
        class_weights: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
        """Compute losses and metrics of a batch.

        Args:
            outputs: `logits (L, B, Q, C)` and `boxes (L, B, Q, 4)` cxcywh as fractions of the image without padding,
                for L layers, the first decoder layer first, and Q queries; with `encoder` also `encoder_logits (B, P,
                C)` and `encoder_boxes (B, P, 4)` of P proposals; with `masks`, see `MaskTerms.of_batch`.
            targets: per image, see `pad_targets`; on any device.
            denominators: `boxes`, the divisor of every sum.
            groups: number of groups that the queries (and proposals) consist of, one after another; every group is
                matched by itself (Group DETR).
            class_weights: (C,), `Detector.class_weights`; not used for proposals that count as "foreground".

        Returns:
            losses: name -> scalar, float32 (float64 for float64 input), regardless of autocast.
            metrics: name -> (sum, count), over the first group, the one that detects: `class_error` in percent over
            matched queries of the last layer, `cardinality_error` (scores above one half) in boxes per image.
        """
        device = outputs["logits"].device
        with torch.autocast(device.type, enabled=False):
            outputs = {name: full_precision(value) for name, value in outputs.items()}
            logits = outputs["logits"]
            boxes = outputs["boxes"]
            denominator = denominators["boxes"]
            padded = pad_targets(targets, device, logits.dtype)
            masks = self.masks.of_batch(outputs, targets, groups) if self.masks else None
            of_decoder = masks.layers(slice(0, -1)) if masks else None
            mask_costs = of_decoder.matching_costs() if masks else None
            matches = match_focal(logits, boxes, padded, self.matching_costs, groups, mask_costs)
            common = (self.class_terms, "loss_ce", denominator)
            (of_boxes,) = box_terms([(boxes, matches)], padded)
            losses = matched_losses(logits, of_boxes, padded, matches, self.suffixes, *common, class_weights)
            if masks:
                losses |= of_decoder.losses(matches, self.suffixes, denominator)
            if self.encoder:
                of_encoder = masks.layers(slice(-1, None)) if masks else None
                losses |= self._encoder_losses(outputs, padded, denominator, groups, class_weights, of_encoder)
            detecting = logits.shape[2] // groups
            best = logits[:, :, :detecting].amax(-1)  # (L, B, Q)
            cardinality = (best > 0).sum(-1)  # (L, B): scores above one half
            return losses, matching_metrics(logits, cardinality, padded, matches, self.suffixes, detecting)

    def _encoder_losses(
        self,
        outputs: Mapping[str, Tensor],
        targets: PaddedTargets,
        denominator: Tensor | float,
        groups: int,
        class_weights: Tensor | None,
        masks: BatchMasks | None,
    ) -> dict[str, Tensor]:
        """Return the losses of the proposals (B, P) of the encoder, `..._enc`, see `forward`."""
        if self.encoder == "foreground":
            targets = targets._replace(labels=torch.zeros_like(targets.labels), labelled=None)
            class_weights = None
        logits = outputs["encoder_logits"][None]
        boxes = outputs["encoder_boxes"][None]
        mask_costs = masks.matching_costs() if masks else None
        matches = match_focal(logits, boxes, targets, self.matching_costs, groups, mask_costs)
        (of_boxes,) = box_terms([(boxes, matches)], targets)
        common = (self.class_terms, "loss_ce", denominator)
        losses = matched_losses(logits, of_boxes, targets, matches, ("_enc",), *common, class_weights)
        if masks:
            losses |= masks.losses(matches, ("_enc",), denominator)
        return losses


def matched_losses(
    logits: Tensor,
    of_boxes: BoxTerms,
    targets: PaddedTargets,
    matches: QueryMatches,
    suffixes: Sequence[str],
    class_terms: ClassTerms,
    class_loss: str,
    denominator: Tensor | float,
    class_weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the losses of each layer by name: the sum of the class terms, called `class_loss`, `loss_bbox` and
    `loss_giou`, each followed by the suffix of the layer.

    Args:
        logits: `(L, B, Q, C)` for L layers and Q queries.
        of_boxes: `box_terms` of these matches.
        suffixes: one for each layer.
        class_terms: `focal_terms` or another function with its arguments.
        denominator: divisor of every sum.
        class_weights: (C,), by which the class terms of a query are multiplied if it has an object; None: by 1.
    """
    where = (matches.layer, matches.image, matches.query)
    positives = (*where, targets.labels[matches.image, matches.target])
    by_class = class_terms(logits, positives, of_boxes.iou)  # (L, B, Q, C)
    by_class = without_unlabelled(by_class, positives, targets.labelled)
    if class_weights is not None:
        labels = torch.full(by_class.shape[:3], -1, device=by_class.device)  # of each query
        labels[where] = positives[-1]
        by_class = times_class_weights(by_class, labels, class_weights)
    sums = {class_loss: by_class.flatten(1).sum(1)}
    sums |= of_boxes.sums(len(logits))
    losses = {}
    for name, by_layer in sums.items():
        for suffix, value in zip(suffixes, by_layer / denominator, strict=True):
            losses[f"{name}{suffix}"] = value
    return losses


@torch.no_grad()
def match_focal(
    logits: Tensor,
    boxes_cxcywh: Tensor,
    targets: PaddedTargets,
    costs: MatchingCosts,
    groups: int = 1,
    further_costs: Tensor | None = None,
) -> QueryMatches:
    """Assign queries to targets in every layer, with the focal class cost of Deformable DETR.

    logits: `(L, B, Q, C)` of L layers and Q queries. boxes_cxcywh: `(L, B, Q, 4)`. Each of the `groups` of queries is
    matched by itself, so that in every layer a target is matched once for each group. further_costs: `(L, B, Q, T)`,
    see `assign_queries`.
    """
    size = logits.shape[2] // groups
    logits = _groups_as_layers(logits, groups)
    boxes_cxcywh = _groups_as_layers(boxes_cxcywh, groups)
    labels = targets.labels[:, None, :].expand(*logits.shape[:3], -1)
    class_costs = focal_costs(logits.gather(-1, labels))  # (L * groups, B, size, T)
    if further_costs is not None:
        further_costs = _groups_as_layers(further_costs, groups)
    matches = assign_queries(class_costs, boxes_cxcywh, targets, costs, further_costs)
    # With 2 groups of 10 queries, query 3 of row 5 is query 13 of layer 2.
    group = matches.layer % groups
    return matches._replace(
        layer=matches.layer // groups,
        query=matches.query + group * size,
    )


def _groups_as_layers(values: Tensor, groups: int) -> Tensor:
    """Reshape (L, B, groups * size, K) to (L * groups, B, size, K)."""
    size = values.shape[2] // groups
    by_group = values.unflatten(2, (groups, size)).transpose(1, 2)  # (L, groups, B, size, K)
    return by_group.flatten(0, 1)


def focal_costs(logits: Tensor) -> Tensor:
    """Return the unweighted class term of the matching cost, in the shape of `logits`, which are those of the targets'
    classes."""
    p = logits.sigmoid()
    positive = ALPHA * (1 - p).pow(GAMMA) * -(p + 1e-8).log()
    negative = (1 - ALPHA) * p.pow(GAMMA) * -(1 - p + 1e-8).log()
    return positive - negative
