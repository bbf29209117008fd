"""Criterion of D-FINE (Peng et al., 2024, arXiv 2410.13842) and DEIMv2 (Huang et al., 2025, arXiv 2509.20787).

The losses equal those of `transformers.loss.loss_d_fine.DFineLoss` and `loss_deimv2.Deimv2Loss` if these are given the
distributions of the right layers, as in Peterande/D-FINE. (transformers itself passes the distributions one layer too
late: docs/differences.md.)

All layers are dense tensors over (output, image, query), and the object of each query is a mask and an index, so that
only the matcher waits for the device.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.loss.loss_d_fine import weighting_function

from toolkit.base.box_ops import box_iou, cxcywh_to_xyxy, generalized_box_iou
from toolkit.detectors.detr.detr_criterion import PaddedTargets, QueryMatches, full_precision, pad_targets
from toolkit.detectors.detr.focal_criterion import match_focal
from toolkit.detectors.detr.rt_detr_criterion import MATCHING_COSTS, VARIFOCAL_ALPHA, denoising_matches
from toolkit.step.losses import times_class_weights

TEMPERATURE = 5.0  # of the self-distillation


class Outputs(NamedTuple):
    """Predictions of one group of N queries: M outputs, of which L, those after the first one, have distributions."""

    logits: Tensor  # (M, B, N, C)
    boxes_cxcywh: Tensor  # (M, B, N, 4) fractions of the image
    corners: Tensor  # (L, B, N, 4, bins + 1) logits of the offset of each side
    references: Tensor  # (B, N, 4) cxcywh, which the offsets are relative to


class QueryAssignment(NamedTuple):
    """The object of each of N queries in M outputs, `(M, B, N)`, or `(1, B, N)` when it is the same in every output."""

    target: Tensor  # int64, index among the targets of the image
    matched: Tensor  # 1 where the query has an object, else 0


class DFineCriterion(nn.Module):
    """Losses of every output. The suffix of a loss names the output: none for the last decoder layer, `_aux_i` for
    decoder layer i, `_pre` for the first layer's boxes before refinement, `_enc` for the encoder's proposals, `_dn_i`
    and `_dn_pre` for the denoising queries.

    All outputs have `loss_vfl` (or `loss_mal`), `loss_bbox` and `loss_giou`. Decoder layers also have `loss_fgl`
    (fine-grained localisation: the distribution of each side), and all of these but the last `loss_ddf` (distillation
    from the last layer's distributions).

    Args:
        num_classes: object classes C, the columns of the logits.
        config: of transformers: number of layers, whether there are denoising queries in training, the exponent of the
            classification loss (published: 2 in D-FINE, 1.5 in DEIM), and bins, `reg_scale` and `up` of the
            distribution, see `transformers.loss.loss_d_fine.weighting_function`.
        is_mal: the classification loss is matchability-aware (DEIM) instead of varifocal (D-FINE).
        union_matching: compute box losses for every query that some output matched, with the object that the query was
            matched to most often, and divide by the number of these queries; otherwise each output has its own matches.
    """

    metric_names = ()

    def __init__(self, num_classes: int, config: PreTrainedConfig, is_mal: bool, union_matching: bool):
        super().__init__()
        self.num_classes = num_classes
        self.num_layers = config.decoder_layers
        self.gamma = config.focal_loss_gamma
        self.is_mal = is_mal
        self.union_matching = union_matching
        self.reg_scale = config.reg_scale
        layers = range(self.num_layers)
        auxiliary = [f"_aux_{i}" for i in layers[:-1]]
        self.query_suffixes = ("_pre", *auxiliary, "", "_enc")
        self.denoising_suffixes = ()
        if config.num_denoising > 0:
            self.denoising_suffixes = ("_dn_pre", *(f"_dn_{i}" for i in layers))
        offsets = weighting_function(
            config.max_num_bins,
            torch.tensor([config.up]),
            config.reg_scale,
        )
        self.register_buffer("bin_offsets", offsets, persistent=False)
        announced = self._names(self.query_suffixes)
        if self.denoising_suffixes:
            announced += self._names(self.denoising_suffixes)
        self.loss_names = tuple(sorted(announced, key=lambda name: name.count("_") > 1))
        self.divided_by = {}
        for name in self.loss_names:
            self.divided_by[name] = "images" if name.startswith("loss_ddf") else "boxes"

    def _names(self, suffixes: Sequence[str]) -> list[str]:
        refined = suffixes[1 : self.num_layers + 1]
        outputs_with = {
            "loss_mal" if self.is_mal else "loss_vfl": suffixes,
            "loss_bbox": suffixes,
            "loss_giou": suffixes,
            "loss_fgl": refined,
            "loss_ddf": refined[:-1],
        }
        result = []
        for name, those in outputs_with.items():
            result += [f"{name}{suffix}" for suffix in those]
        return result

    def forward(
        self,
        layers: Mapping,
        targets: Sequence[Mapping[str, Tensor]],
        denominators: Mapping[str, Tensor | float],
        class_weights: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return losses by name in float32 (float64 for float64 input), regardless of autocast.

        Args:
            layers: outputs for D denoising queries, followed by Q queries: `logits (B, L + 1, D + Q, C)` and `boxes (B,
                L + 1, D + Q, 4)`, before refinement and after each of the L layers; `corners (B, L, D + Q, 4 * (bins +
                1))`; `references (B, D + Q, 4)`; `encoder_logits (B, Q, C)`, `encoder_boxes (B, Q, 4)`; `denoising`:
                transformers' `denoising_meta_values`, or None if there are no denoising queries (no boxes in the batch,
                or evaluation), and then there are no `_dn` losses. Boxes are cxcywh, fractions of the image.
            targets: per image, see `pad_targets`, without crowd regions.
            denominators: `boxes` and `images` of the optimizer step. Where the original divides by the number of
                matches of the batch (the union), the loss is also multiplied by this batch's share of the boxes; the
                distillation, which the original does not divide, by this batch's share of the images.
            class_weights: (C,), `Detector.class_weights`.
        """
        device = layers["logits"].device
        with torch.autocast(device.type, enabled=False):
            every = {key: full_precision(layers[key]) for key in layers if key != "denoising"}
            padded = _at_least_one(pad_targets(targets, device, every["logits"].dtype))
            meta = layers["denoising"]
            counts = [len(target["labels"]) for target in targets]
            noisy = meta["dn_num_split"][0] if meta is not None else 0
            queries = self._outputs(every, slice(noisy, None), with_encoder=True)
            matches = match_focal(queries.logits, queries.boxes_cxcywh, padded, MATCHING_COSTS)
            assigned = _assignment(matches, queries.logits)
            share = len(targets) / denominators["images"]
            by_boxes = denominators["boxes"]
            by_matched = denominators["boxes"]
            shared = assigned
            if self.union_matching:
                shared = _union(matches, queries.logits.shape[1:3], padded)
                num_matched = shared.matched.sum().clamp(min=1)
                by_matched = num_matched * by_boxes / max(sum(counts), 1)
            divisors = (by_boxes, by_matched)
            losses = self._losses(queries, padded, assigned, shared, divisors, share, class_weights)
            named = dict(zip(self._names(self.query_suffixes), losses, strict=True))
            if meta is not None:
                noise = self._outputs(every, slice(noisy), with_encoder=False)
                of_first = denoising_matches(meta, counts, 1, device)  # the same in every layer
                denoised = _assignment(of_first, noise.logits[:1])
                by_copies = by_boxes * meta["dn_num_group"]
                divisors = (by_copies, by_copies)
                losses = self._losses(noise, padded, denoised, denoised, divisors, share, class_weights)
                named |= zip(self._names(self.denoising_suffixes), losses, strict=True)
            return named

    def _outputs(self, layers: Mapping[str, Tensor], queries: slice, with_encoder: bool) -> Outputs:
        logits = layers["logits"][:, :, queries].transpose(0, 1)  # (L + 1, B, N, C)
        boxes = layers["boxes"][:, :, queries].transpose(0, 1)
        corners = layers["corners"][:, :, queries].transpose(0, 1)  # (L, B, N, 4 * (bins + 1))
        if with_encoder:
            logits = torch.cat([logits, layers["encoder_logits"][None]])
            boxes = torch.cat([boxes, layers["encoder_boxes"][None]])
        return Outputs(
            logits=logits,
            boxes_cxcywh=boxes.clamp(0, 1),
            corners=corners.unflatten(-1, (4, len(self.bin_offsets))),
            references=layers["references"][:, queries].detach(),
        )

    def _losses(
        self,
        outputs: Outputs,
        targets: PaddedTargets,
        assigned: QueryAssignment,
        shared: QueryAssignment,
        denominators: tuple,
        share: Tensor | float,
        class_weights: Tensor | None,
    ) -> list[Tensor]:
        """Return the losses in the order of `_names`. Classes are matched by `assigned`, boxes by `shared`;
        `denominators` are the divisors of both, in this order."""
        predicted = cxcywh_to_xyxy(outputs.boxes_cxcywh)
        classes = self._classification(outputs.logits, predicted.detach(), targets, assigned)
        if class_weights is not None:
            labels = _labels_of(targets, assigned).masked_fill(assigned.matched == 0, -1)
            classes = times_class_weights(classes, labels, class_weights)
        target_cxcywh = _of_targets(targets.boxes_cxcywh, shared.target)
        target_boxes = cxcywh_to_xyxy(target_cxcywh)
        # A query without an object is placed on its target: for any box, its gradient is 0, and not 0 times infinity.
        placed = torch.where(shared.matched[..., None] > 0, outputs.boxes_cxcywh, target_cxcywh)
        l1 = (placed - target_cxcywh).abs().sum(-1)
        giou = (1 - generalized_box_iou(cxcywh_to_xyxy(placed), target_boxes)) * shared.matched

        refined = slice(1, self.num_layers + 1)
        objects = target_boxes[refined] if len(target_boxes) > 1 else target_boxes
        iou = box_iou(predicted[refined].detach(), objects)  # (L, B, N)
        matched = shared.matched.expand(len(predicted), -1, -1)[refined]
        log_probabilities = outputs.corners.log_softmax(-1)
        fgl = self._localisation(
            log_probabilities,
            outputs.references,
            target_boxes.expand_as(predicted)[refined],
        )
        teacher_scores = outputs.logits[self.num_layers].detach().sigmoid().amax(-1)
        weights = torch.where(matched > 0, iou, teacher_scores)
        ddf = _self_distillation(outputs.corners, weights[:-1], matched[:-1])

        by_boxes, by_matched = denominators
        by_output = (
            classes.flatten(1).sum(1) / by_boxes,
            l1.flatten(1).sum(1) / by_matched,
            giou.flatten(1).sum(1) / by_matched,
            (fgl * iou * matched).flatten(1).sum(1) / by_matched,
            ddf * share,
        )
        losses = []
        for values in by_output:
            losses += values.unbind()
        return losses

    def _classification(self, logits: Tensor, boxes_xyxy: Tensor, targets: PaddedTargets, assigned: QueryAssignment):
        """Return the loss of every logit, `(M, B, N, C)`. The target score is the IoU (vfl) or the IoU to the power of
        gamma (mal)."""
        labels = _labels_of(targets, assigned)
        objects = _of_targets(targets.boxes_cxcywh, assigned.target)
        iou = box_iou(boxes_xyxy, cxcywh_to_xyxy(objects))  # (M, B, N)
        positive = F.one_hot(labels, self.num_classes) * assigned.matched[..., None]
        quality = iou.pow(self.gamma) if self.is_mal else iou
        score = quality[..., None] * positive
        alpha = 1.0 if self.is_mal else VARIFOCAL_ALPHA
        of_negatives = alpha * logits.detach().sigmoid().pow(self.gamma) * (1 - positive)
        weight = of_negatives + (positive if self.is_mal else score)
        if targets.labelled is not None:
            counts = targets.labelled[:, None] | (positive > 0)
            weight = weight.where(counts, 0)
        return F.binary_cross_entropy_with_logits(logits, score, weight=weight, reduction="none")

    def _localisation(self, log_probabilities: Tensor, references: Tensor, target_xyxy: Tensor) -> Tensor:
        """Return the cross-entropy between the two bins around each side's target, `(L, B, N)`, summed over sides.

        The offset of a side is in units of the reference's width or height, divided by `reg_scale`, from its edge.
        """
        with torch.no_grad():
            centre = references[..., :2]
            size = references[..., 2:].repeat(1, 1, 2)
            to_left_top = centre - target_xyxy[..., :2]
            to_right_bottom = target_xyxy[..., 2:] - centre
            outward = torch.cat([to_left_top, to_right_bottom], dim=-1)  # (L, B, N, 4)
            offsets = outward / (size / self.reg_scale + 1e-16) - 0.5 * self.reg_scale
            edges = self.bin_offsets.to(offsets.dtype)  # (bins + 1,) ascending
            offsets = offsets.clamp(edges[0], edges[-1]).contiguous()
            # The offset 0.7 between the edges 0.5 and 1.0 is 0.4 of the way: the left bin weighs 0.6, the right 0.4.
            behind = torch.searchsorted(edges, offsets, right=True)
            left = (behind - 1).clamp(0, len(edges) - 2)
            to_left = (offsets - edges[left]).abs()
            to_right = (edges[left + 1] - offsets).abs()
            weight = to_left / (to_left + to_right)
        both = torch.stack([left, left + 1], dim=-1)
        entropy = -log_probabilities.gather(-1, both)
        by_side = entropy[..., 0] * (1 - weight) + entropy[..., 1] * weight
        return by_side.sum(-1)


def _self_distillation(corners: Tensor, weights: Tensor, matched: Tensor) -> Tensor:
    """Return the KL divergence of every layer `(L, B, N, 4, bins + 1)` from the last one, `(L - 1,)`: weighted means
    over queries with and without an object, in the proportion of the square roots of their numbers."""
    teacher = (corners[-1].detach() / TEMPERATURE).softmax(-1)
    student = (corners[:-1] / TEMPERATURE).log_softmax(-1)
    divergence = F.kl_div(student, teacher.expand_as(student), reduction="none")
    of_query = divergence.sum((-1, -2))  # over sides and bins: (L - 1, B, N)
    values = (weights * TEMPERATURE**2 * of_query / 4).flatten(1)
    with_object = matched.flatten(1)
    parts = torch.stack([with_object, 1 - with_object])  # (2, L - 1, B * N)
    counts = parts.sum(-1)
    means = (values * parts).sum(-1) / counts.clamp(min=1)
    shares = counts.sqrt()
    return (means * shares).sum(0) / shares.sum(0)


def _assignment(matches: QueryMatches, like: Tensor) -> QueryAssignment:
    """Return the matches of every output separately; `like (M, B, N, ...)` gives the shape."""
    target = torch.zeros(
        like.shape[:3],
        dtype=torch.int64,
        device=like.device,
    )
    matched = like.new_zeros(like.shape[:3])
    where = (matches.layer, matches.image, matches.query)
    target[where] = matches.target
    matched[where] = 1.0
    return QueryAssignment(target, matched)


def _union(matches: QueryMatches, shape: Sequence[int], targets: PaddedTargets) -> QueryAssignment:
    """Return the queries `(B, N)` that any output matched, each with its most frequent object; ties take the first."""
    votes = targets.boxes_cxcywh.new_zeros(*shape, targets.labels.shape[1])
    where = (matches.image, matches.query, matches.target)
    one_each = votes.new_ones(len(matches.image))
    votes.index_put_(where, one_each, accumulate=True)
    count, target = votes.max(-1)
    matched = (count > 0).to(votes.dtype)
    return QueryAssignment(target[None], matched[None])


def _of_targets(values: Tensor, target: Tensor) -> Tensor:
    """Gather `(B, T, K)` at the indices `(M, B, N)` -> `(M, B, N, K)`."""
    chosen = target[..., None].expand(*target.shape, values.shape[-1])
    return values.expand(len(target), *values.shape).gather(2, chosen)


def _labels_of(targets: PaddedTargets, assigned: QueryAssignment) -> Tensor:
    """Return the class of the object of each query, in the shape of the assignment."""
    return _of_targets(targets.labels[..., None], assigned.target).squeeze(-1)


def _at_least_one(targets: PaddedTargets) -> PaddedTargets:
    """Add a column of padding if the batch has no objects, so that there is something to index."""
    if targets.labels.shape[1]:
        return targets
    return PaddedTargets(
        labels=F.pad(targets.labels, (0, 1)),
        boxes_cxcywh=F.pad(targets.boxes_cxcywh, (0, 0, 0, 1)),
        valid=F.pad(targets.valid, (0, 1)),
        labelled=targets.labelled,
    )
