"""Matching costs and losses of masks at sampled points, as a part of a criterion of the DETR family.

The losses are those of transformers' `RfDetrImageLoss`: cross-entropy and Dice at points that are drawn where the
prediction is least certain (PointRend, Kirillov et al. 2020; as in Mask2Former). Unlike there, whole masks are computed
for matched queries only, the points of an image are its own random draw, the same for all layers and groups of queries,
and the number of points of the matching depends on the size of the masks, as in roboflow/rf-detr, not on the size of
the batch.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.base.batch import on_host, pad_rows, send, unpad_rows
from toolkit.base.seeding import image_generator
from toolkit.detectors.detr.detr_criterion import QueryMatches, count_objects, full_precision

OVERSAMPLED = 3  # candidates for each point of the losses
UNCERTAIN_SHARE = 0.75  # of the points are the least certain candidates, the others are drawn evenly


class PredictedMasks(NamedTuple):
    """The masks of Q queries in L layers, as factors: the logits are `queries` times `maps`, plus `bias`.

    maps: (..., D, h, w), in L layers of B images. queries: (..., Q, D). bias: (1,).
    """

    maps: Tensor
    queries: Tensor
    bias: Tensor

    def logits(self) -> Tensor:
        """Return the mask logits (..., Q, h, w) of all queries."""
        products = self.queries @ self.maps.flatten(-2)
        return products.unflatten(-1, self.maps.shape[-2:]) + self.bias


class MaskTerms(nn.Module):
    """The losses and matching costs of masks, a part of the criterion.

    Args:
        costs: weights of cross-entropy and Dice in the matching cost.
        cells_per_point: a mask of h x w cells is compared at h * w / `cells_per_point` points.
    """

    loss_names = ("loss_mask_ce", "loss_mask_dice")

    def __init__(self, costs: tuple[float, float], cells_per_point: int):
        super().__init__()
        self.costs = costs
        self.cells_per_point = cells_per_point

    def of_batch(self, outputs: Mapping[str, Tensor], targets: Sequence[Mapping], groups: int) -> "BatchMasks":
        """Return the predicted and annotated masks of a batch with their points; in evaluation, the points are the same
        every time.

        Args:
            outputs: `mask_maps`, `mask_queries` and `mask_bias`, see `PredictedMasks`.
            targets: of each image `masks` (N, H, W) uint8, of one size for all images, and `has_mask` (N,) bool if some
                objects have a box alone; their masks cost nothing and have no loss.
            groups: number of groups of queries.
        """
        predicted = PredictedMasks(*(full_precision(outputs[f"mask_{name}"]) for name in PredictedMasks._fields))
        device = predicted.maps.device
        height, width = predicted.maps.shape[-2:]
        matched = height * width // self.cells_per_point
        compared = max(height, matched)
        certain = int(UNCERTAIN_SHARE * compared)
        cost_points = []
        candidates = []
        further = []
        for target in targets:
            generator = image_generator(target, "mask points", device)
            if not self.training:
                generator = torch.Generator(device).manual_seed(0)
            count = len(target["masks"])
            drawn = {"dtype": torch.float32, "device": device, "generator": generator}
            cost_points.append(torch.rand(matched, 2, **drawn))
            candidates.append(torch.rand(count, OVERSAMPLED * compared, 2, **drawn))
            further.append(torch.rand(count, compared - certain, 2, **drawn))
        masks = [target["masks"].to(device) for target in targets]
        has_mask = None
        if any("has_mask" in target for target in targets):
            of_images = [target.get("has_mask", torch.ones(len(target["masks"]))) for target in targets]
            has_mask = torch.cat([of_image.to(device, predicted.maps.dtype) for of_image in of_images])
        return BatchMasks(
            predicted,
            torch.cat(masks),
            [len(each) for each in masks],
            count_objects([on_host(target) for target in targets]),
            groups,
            torch.stack(cost_points),
            torch.cat(candidates),
            torch.cat(further),
            self.costs,
            has_mask,
        )


class BatchMasks(NamedTuple):
    """The masks of a batch of B images.

    predicted: of L layers, the encoder's proposals last. masks: (N, H, W) uint8 of all objects, crowd regions among
    them. counts: their number in each image. objects: the number of those that are not crowd regions. groups: number of
    groups of queries. cost_points: (B, P, 2) x and y of points as fractions of the image. candidates: (N, 3 P', 2), and
    further: (N, P' / 4, 2), points for each object. costs: weights of cross-entropy and Dice in the matching cost.
    has_mask: (N,) 1 for the objects that have a mask, else 0; None: all have one.
    """

    predicted: PredictedMasks
    masks: Tensor
    counts: list[int]
    objects: list[int]
    groups: int
    cost_points: Tensor
    candidates: Tensor
    further: Tensor
    costs: tuple[float, float]
    has_mask: Tensor | None = None

    def layers(self, rows: slice) -> "BatchMasks":
        """Return these masks with some of the layers only."""
        predicted = self.predicted
        some = PredictedMasks(predicted.maps[rows], predicted.queries[rows], predicted.bias)
        return self._replace(predicted=some)

    @torch.no_grad()
    def matching_costs(self) -> Tensor:
        """Return the weighted costs (L, B, Q, T) of giving a query the object of a row of the padded targets."""
        maps, queries, bias = self.predicted
        layers = len(maps)
        points = self.cost_points.to(maps.dtype)
        repeated = points.repeat(layers, 1, 1)  # (L * B, P, 2)
        vectors = sampled(maps.flatten(0, 1), repeated).unflatten(0, (layers, -1))  # (L, B, D, P)
        logits = queries @ vectors + bias  # (L, B, Q, P)
        rows = pad_rows(torch.arange(len(self.masks), device=maps.device), self.counts)  # (B, T)
        every_row = rows.flatten()
        image = torch.arange(len(rows), device=rows.device).repeat_interleave(rows.shape[1])
        truths = self._truths(every_row, points[image]).unflatten(0, rows.shape)  # (B, T, P)
        truths = truths.to(logits.dtype)
        count = logits.shape[-1]
        shared = logits @ truths.mT
        cross_entropy = (F.softplus(logits).sum(-1)[..., None] - shared) / count
        scores = logits.sigmoid()
        common = 2 * (scores @ truths.mT)
        total = scores.sum(-1)[..., None] + truths.sum(-1)[:, None]
        dice = 1 - (common + 1) / (total + 1)
        weight_ce, weight_dice = self.costs
        costs = weight_ce * cross_entropy + weight_dice * dice
        return costs if self.has_mask is None else costs * self.has_mask[rows][:, None]

    def losses(self, matches: QueryMatches, suffixes: Sequence[str], denominator: Tensor | float) -> dict[str, Tensor]:
        """Return `loss_mask_ce` and `loss_mask_dice` of each layer by name, sums over the matches / `denominator`."""
        logits = self._matched_logits(matches)[:, None]  # (N, 1, h, w)
        object_row = self._first_rows()[matches.image] + matches.target
        if not len(object_row):
            by_pair = {name: logits.flatten() for name in MaskTerms.loss_names}
        else:
            with torch.no_grad():
                points = self._uncertain_points(logits, object_row)
                truths = self._truths(object_row, points).to(logits.dtype)
            values = sampled(logits, points)[:, 0]  # (N, P)
            by_point = F.binary_cross_entropy_with_logits(values, truths, reduction="none")
            scores = values.sigmoid()
            common = 2 * (scores * truths).sum(1)
            total = scores.sum(1) + truths.sum(1)
            by_pair = {"loss_mask_ce": by_point.mean(1), "loss_mask_dice": 1 - (common + 1) / (total + 1)}
            if self.has_mask is not None:
                by_pair = {name: values * self.has_mask[object_row] for name, values in by_pair.items()}
        losses = {}
        for name, values in by_pair.items():
            by_layer = values.view(len(suffixes), len(values) // len(suffixes)).sum(1) / denominator
            for suffix, value in zip(suffixes, by_layer, strict=True):
                losses[f"{name}{suffix}"] = value
        return losses

    def _matched_logits(self, matches: QueryMatches) -> Tensor:
        """Return the mask logits (N, h, w) of the matched queries; each group of each layer has the same images in a
        row, with as many matches."""
        maps, queries, bias = self.predicted
        layers, images = maps.shape[:2]
        size = queries.shape[2] // self.groups
        counts = [min(count, size) for count in self.objects] * (layers * self.groups)
        chosen = queries[matches.layer, matches.image, matches.query]  # (N, D)
        most = max(counts, default=0)  # M
        by_image = pad_rows(chosen, counts).view(layers, self.groups, images, most, chosen.shape[1])
        joined = by_image.transpose(1, 2).flatten(2, 3)  # (L, B, groups * M, D)
        products = joined @ maps.flatten(3)  # (L, B, groups * M, h * w)
        apart = products.unflatten(2, (self.groups, most)).transpose(1, 2)  # (L, groups, B, M, h * w)
        logits = unpad_rows(apart.flatten(0, 2), counts)
        return logits.unflatten(1, maps.shape[-2:]) + bias

    def _uncertain_points(self, logits: Tensor, object_row: Tensor) -> Tensor:
        """Return the points (N, P', 2) at which the masks are compared: those of the candidates of their objects where
        the logits (N, 1, h, w) are nearest to 0, and further ones."""
        candidates = self.candidates[object_row].to(logits.dtype)
        further = self.further[object_row].to(logits.dtype)
        certain = candidates.shape[1] // OVERSAMPLED - further.shape[1]
        uncertainty = -sampled(logits, candidates)[:, 0].abs()
        index = uncertainty.topk(certain, dim=1).indices
        chosen = candidates.gather(1, index[..., None].expand(-1, -1, 2))
        return torch.cat([chosen, further], dim=1)

    def _truths(self, object_row: Tensor, points: Tensor) -> Tensor:
        """Return the pixels (N, P) uint8 of the masks of N objects that are nearest to P points (N, P, 2)."""
        height, width = self.masks.shape[-2:]
        if not len(self.masks):
            return points.new_zeros(points.shape[:2], dtype=torch.uint8)
        x, y = points.unbind(-1)
        columns = _nearest(x, width)
        rows = _nearest(y, height)
        return self.masks[object_row[:, None], rows, columns]

    def _first_rows(self) -> Tensor:
        """Return the row of the first object of each image, (B,) int64."""
        ends = torch.tensor([0, *self.counts]).cumsum(0)
        return send(ends[:-1], self.masks.device)


def sampled(maps: Tensor, points: Tensor) -> Tensor:
    """Return the values (N, D, P) of maps (N, D, h, w) at points (N, P, 2), x and y as fractions of the image."""
    grid = 2.0 * points[:, :, None] - 1.0
    return F.grid_sample(maps, grid, align_corners=False)[..., 0]


def _nearest(fractions: Tensor, side: int) -> Tensor:
    """Return the number of the pixel, of `side`, that is nearest to each position, as `grid_sample` computes it."""
    grid = 2.0 * fractions - 1.0
    position = ((grid + 1) * side - 1) / 2
    return position.round().long().clamp(0, side - 1)
