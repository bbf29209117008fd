"""Criterion of the family members that classify with sigmoids: Conditional, Deformable, DAB and RF-DETR.

The numbers are those of transformers' `DeformableDetrForObjectDetectionLoss` and `LwDetrForObjectDetectionLoss`, which
go through the layers one by one; here one cost tensor covers them all, as in `detr_criterion.py`.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import sigmoid_focal_loss

from toolkit.box_ops import box_iou, cxcywh_to_xyxy, generalized_box_iou
from toolkit.models.detr.detr_criterion import Matches, MatchingCosts, PaddedTargets, match, pad_targets

ALPHA, GAMMA = 0.25, 2.0  # of the focal loss, in all these papers
LOSSES = ("loss_ce", "loss_bbox", "loss_giou")


def focal_terms(logits: Tensor, positives: tuple[Tensor, ...], ious: Tensor) -> Tensor:
    """Focal loss of every logit (Lin et al. 2017), `(..., C)`; 1 is wanted at the indices `positives`, 0 elsewhere."""
    wanted = torch.zeros_like(logits, requires_grad=False)
    wanted[positives] = 1
    return sigmoid_focal_loss(logits, wanted, ALPHA, GAMMA)


def quality_terms(logits: Tensor, positives: tuple[Tensor, ...], ious: Tensor) -> Tensor:
    """Cross-entropy towards score^0.25 * IoU^0.75 at `positives` (IA-BCE of Align-DETR, in LW-DETR and RF-DETR).

    Negatives weigh by the square of their score, through which the gradient goes, as in RF-DETR.
    """
    scores = logits.sigmoid()
    quality = (scores.detach()[positives].pow(ALPHA) * ious.pow(1 - ALPHA)).clamp(min=0.01)
    positive_weight = torch.zeros_like(logits, requires_grad=False)
    positive_weight[positives] = quality
    negative_weight = scores.pow(GAMMA).index_put(positives, 1 - quality)
    return -positive_weight * F.logsigmoid(logits) - negative_weight * F.logsigmoid(-logits)


class FocalCriterion(nn.Module):
    """Losses `loss_ce`, `loss_bbox` (L1 of cxcywh), `loss_giou`: last decoder layer plain, auxiliary layer i `_i`.

    Args:
        num_classes: object classes C, the columns of the logits.
        num_layers: decoder layers that get a loss (1 without auxiliary losses).
        matching_costs: weights of class, box L1 and GIoU in the matching cost.
        encoder: losses `_enc` on the encoder's proposals too: "classes", or "foreground" as in two-stage Deformable
            DETR, where every object counts as class 0; None: no proposals.
        class_terms: `focal_terms` or `quality_terms`.
    """

    divided_by = "boxes"

    def __init__(
        self,
        num_classes: int,
        num_layers: int,
        matching_costs: Sequence[float] = (2, 5, 2),
        encoder: str | None = None,
        class_terms: Callable[[Tensor, tuple[Tensor, ...], Tensor], Tensor] = focal_terms,
    ):
        super().__init__()
        self.num_classes, self.encoder, self.class_terms = num_classes, encoder, class_terms
        self.matching_costs = MatchingCosts(*matching_costs)
        self.suffixes = (*(f"_{i}" for i in range(num_layers - 1)), "")  # in the order of the decoder
        announced = ("", *self.suffixes[:-1], *(["_enc"] if encoder else []))
        self.loss_names = tuple(f"{name}{suffix}" for suffix in announced for name in LOSSES)
        self.metric_names = ("class_error", *(f"cardinality_error{s}" for s in ("", *self.suffixes[:-1])))

    def forward(
        self,
        outputs: Mapping[str, Tensor],
        targets: Sequence[Mapping[str, Tensor]],
        denominators: Mapping[str, Tensor | float],
        groups: int = 1,
    ) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
        """Losses and metrics of a batch.

        Args:
            outputs: `logits (L, B, Q, C)` and `boxes (L, B, Q, 4)` cxcywh as fractions of the image without padding,
                first decoder layer first; with `encoder` also `encoder_logits (B, P, C)`, `encoder_boxes (B, P, 4)`.
            targets: per image, see `pad_targets`; on any device.
            denominators: `boxes`, what every sum is divided by.
            groups: the queries (and proposals) are so many groups, one after another; every group is matched by itself
                (Group DETR).

        Returns:
            losses: name -> scalar, float32 (float64 for float64 input), whatever autocast says.
            metrics: name -> (sum, count), over the first group, the one that detects: `class_error` in percent over
                matched queries of the last layer, `cardinality_error` (scores above one half) in boxes per image.
        """
        device = outputs["logits"].device
        with torch.autocast(device.type, enabled=False):
            outputs = {name: _full_precision(value) for name, value in outputs.items()}
            logits, boxes = outputs["logits"], outputs["boxes"]
            padded = pad_targets(targets, device, logits.dtype)
            matches = match_focal(logits.detach(), boxes.detach(), padded, self.matching_costs, groups)
            losses = self._losses(logits, boxes, padded, matches, self.suffixes, denominators["boxes"])
            if self.encoder:
                wanted = padded
                if self.encoder == "foreground":
                    wanted = padded._replace(labels=torch.zeros_like(padded.labels))
                logits_enc, boxes_enc = outputs["encoder_logits"][None], outputs["encoder_boxes"][None]
                found = match_focal(logits_enc.detach(), boxes_enc.detach(), wanted, self.matching_costs, groups)
                losses |= self._losses(logits_enc, boxes_enc, wanted, found, ("_enc",), denominators["boxes"])
            return losses, self._metrics(logits.detach(), padded, matches, logits.shape[2] // groups)

    def _losses(self, logits, boxes, targets: PaddedTargets, matches: Matches, suffixes, denominator):
        """Every layer has the same number of matches, in the order of the layers: sums by layer are sums of rows."""
        where = (matches.layer, matches.image, matches.query)
        wanted_cxcywh = targets.boxes_cxcywh[matches.image, matches.target]
        predicted, wanted = cxcywh_to_xyxy(boxes[where]), cxcywh_to_xyxy(wanted_cxcywh)
        positives = (*where, targets.labels[matches.image, matches.target])
        by_class = self.class_terms(logits, positives, box_iou(predicted.detach(), wanted))
        by_layer = (len(logits), len(matches.layer) // len(logits))
        sums = (
            by_class.flatten(1).sum(1),
            (boxes[where] - wanted_cxcywh).abs().sum(-1).view(by_layer).sum(1),
            (1 - generalized_box_iou(predicted, wanted)).view(by_layer).sum(1),
        )
        return {
            f"{name}{suffix}": value
            for name, values in zip(LOSSES, sums, strict=True)
            for suffix, value in zip(suffixes, (values / denominator).unbind(), strict=True)
        }

    @torch.no_grad()
    def _metrics(self, logits, targets: PaddedTargets, matches: Matches, group_size: int):
        num_layers, batch_size = logits.shape[:2]
        main = slice(len(matches.layer) // num_layers * (num_layers - 1), None)
        image, query, target = matches.image[main], matches.query[main], matches.target[main]
        detecting = query < group_size
        wrong = logits[-1, image, query].argmax(-1) != targets.labels[image, target]
        metrics = {"class_error": (100.0 * (wrong & detecting).sum(), detecting.sum())}
        found = (logits[:, :, :group_size].amax(-1) > 0).sum(-1)  # (L, B)
        errors = (found - targets.valid.sum(-1)).abs().sum(-1)
        images = torch.full_like(errors[0], batch_size)
        return metrics | {
            f"cardinality_error{suffix}": (error, images)
            for suffix, error in zip(self.suffixes, errors.unbind(), strict=True)
        }


def match_focal(
    logits: Tensor, boxes_cxcywh: Tensor, targets: PaddedTargets, costs: MatchingCosts, groups: int = 1
) -> Matches:
    """Assignment of every layer `(L, B, Q, C)`, `(L, B, Q, 4)` with the focal class cost of Deformable DETR.

    Each of the `groups` of queries is matched by itself, so a target has that many pairs in every layer.
    """
    size = logits.shape[2] // groups
    logits, boxes_cxcywh = (_groups_as_layers(tensor, groups, size) for tensor in (logits, boxes_cxcywh))
    labels = targets.labels[:, None, :].expand(*logits.shape[:3], -1)
    found = match(focal_costs(logits.gather(-1, labels)), boxes_cxcywh, targets, costs)
    return found._replace(layer=found.layer // groups, query=found.query + found.layer % groups * size)


def focal_costs(logits: Tensor) -> Tensor:
    """The class term of the matching for the logits of the wanted classes, without its weight."""
    p = logits.sigmoid()
    positive = ALPHA * (1 - p).pow(GAMMA) * -(p + 1e-8).log()
    return positive - (1 - ALPHA) * p.pow(GAMMA) * -(1 - p + 1e-8).log()


def _groups_as_layers(tensor: Tensor, groups: int, size: int) -> Tensor:
    return tensor.unflatten(2, (groups, size)).transpose(1, 2).flatten(0, 1)  # (L, B, GQ, ·) -> (LG, B, Q, ·)


def _full_precision(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
