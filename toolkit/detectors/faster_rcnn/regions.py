"""Regions of a whole batch at once: decoding of boxes, selection of proposals on a GPU (torchvision processes the
images one by one and waits for each; on a CPU its loop is faster), and RoIAlign on the pyramid level that fits each
box."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import MultiScaleRoIAlign

from toolkit.base.batch import image_of_each, rows_of, send
from toolkit.models.nms import begin_until_enough, sorted_nms
from toolkit.models.roi_align import pooled_regions

MAX_DELTA = math.log(1000.0 / 16)  # of width and height, as torchvision's BoxCoder


def apply_deltas(deltas: Tensor, boxes_xyxy: Tensor, weights: Sequence[float]) -> Tensor:
    """Decode box deltas (dx, dy, dw, dh) to boxes (..., 4) xyxy as torchvision's `BoxCoder.decode`, without its copies
    to the device.

    deltas, boxes_xyxy: (..., 4), broadcast. weights: the four factors that the deltas are divided by.
    """
    dx, dy, dw, dh = (delta / weight for delta, weight in zip(deltas.unbind(-1), weights, strict=True))
    left, top, right, bottom = boxes_xyxy.to(deltas.dtype).unbind(-1)
    width = right - left
    height = bottom - top
    x = dx * width + (left + 0.5 * width)
    y = dy * height + (top + 0.5 * height)
    half_w = 0.5 * (dw.clamp(max=MAX_DELTA).exp() * width)
    half_h = 0.5 * (dh.clamp(max=MAX_DELTA).exp() * height)
    return torch.stack((x - half_w, y - half_h, x + half_w, y + half_h), dim=-1)


def clip(boxes_xyxy: Tensor, limits_whwh: Tensor) -> Tensor:
    """Clip boxes (..., 4) to images whose `limits_whwh` (..., 4) are width, height, width, height."""
    return boxes_xyxy.clamp(min=0).minimum(limits_whwh)


def limits_whwh(sizes_hw: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Return limits (B, 4) float32 for `clip` from image sizes (height, width) in pixels that are known on the host."""
    limits = [(width, height, width, height) for height, width in sizes_hw]
    return send(torch.tensor(limits, dtype=torch.float32), device)


def begin_proposals(
    boxes_xyxy: Tensor,
    logits: Tensor,
    per_level: Sequence[int],
    limits_whwh: Tensor,
    *,
    before: int,
    after: int,
    threshold: float,
    min_size: float,
    min_score: float,
) -> Callable[[], tuple[list[Tensor], list[Tensor]]]:
    """Begin torchvision's `filter_proposals` for the whole batch, without waiting for it.

    Returns a function that waits, with one host read, and returns the proposals (P_i, 4) of each image i, best first,
    and the same on the CPU.

    Args:
        boxes_xyxy, logits: (B, A, 4) and (B, A) of all A anchors.
        per_level: number of anchors of each level, A in total.
        limits_whwh: (B, 4), see `limits_whwh`.
        before: largest number of boxes of a level before suppression.
        after: largest number of boxes of an image after suppression.
        threshold: IoU above which suppression removes the lower-scoring of two boxes.
        min_size: smallest side in pixels.
        min_score: smallest objectness probability.
    """
    boxes, scores = _best_of_levels(boxes_xyxy, logits, per_level, before)
    boxes = clip(boxes, limits_whwh[:, None, None])
    sides = boxes[..., 2:] - boxes[..., :2]
    is_large = (sides >= min_size).all(-1)
    valid = is_large & (scores >= max(min_score, 0.0))
    valid = valid.flatten(0, 1)  # each level of an image by itself
    of_image = boxes.flatten(1, 2)  # (B, L * K, 4)
    scores = scores.flatten(1)

    def select() -> tuple[list[Tensor], Tensor]:
        keep = sorted_nms(boxes.flatten(0, 1), valid, threshold).reshape(scores.shape)
        ranked = scores.masked_fill(~keep, -1).sort(dim=1, descending=True, stable=True)
        best = rows_of(of_image, ranked.indices[:, :after])
        counts = keep.sum(1).clamp(max=after)
        return [counts, best], best

    settle = begin_until_enough(select)

    def read() -> tuple[list[Tensor], list[Tensor]]:
        (counts, best_on_host), best = settle()
        counts = counts.tolist()
        proposals = [rows[:count] for rows, count in zip(best, counts, strict=True)]
        proposals_on_host = [rows[:count] for rows, count in zip(best_on_host, counts, strict=True)]
        return proposals, proposals_on_host

    return read


def _best_of_levels(boxes_xyxy: Tensor, logits: Tensor, per_level: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` best boxes (B, L, K, 4) of each of L levels, best first, and their scores (B, L, K).

    Levels with fewer boxes are padded with scores of -1.
    """
    widest = min(count, max(per_level))
    levels = []
    for level_boxes, level_logits in zip(boxes_xyxy.split(per_level, 1), logits.split(per_level, 1), strict=True):
        best, index = level_logits.topk(min(count, level_logits.shape[1]), dim=1)
        chosen = level_boxes.gather(1, index[..., None].expand(-1, -1, 4))
        scores = best.sigmoid()
        missing = widest - best.shape[1]
        if missing:
            chosen = F.pad(chosen, (0, 0, 0, missing))
            scores = F.pad(scores, (0, missing), value=-1.0)
        levels.append((chosen, scores))
    boxes = torch.stack([chosen for chosen, _ in levels], 1)
    scores = torch.stack([of_level for _, of_level in levels], 1)
    return boxes, scores


class LevelPool(MultiScaleRoIAlign):
    """A `MultiScaleRoIAlign` that computes the same values with at most one host read, where torchvision's has one per
    level.

    Whoever creates it must assign `scales` (1 / stride of each map) and `map_levels` (a `LevelMapper`) before its first
    use; torchvision's class guesses both from the first batch.
    """

    @classmethod
    def of(cls, pool: MultiScaleRoIAlign) -> "LevelPool":
        """Build the pool with the settings of torchvision's `pool`; `scales` and `map_levels` are not set yet."""
        scale = pool.canonical_scale
        level = pool.canonical_level
        return cls(
            pool.featmap_names,
            pool.output_size,
            pool.sampling_ratio,
            canonical_scale=scale,
            canonical_level=level,
        )

    def forward(
        self,
        maps: Mapping[str, Tensor],
        boxes: Sequence[Tensor],
        image_shapes: Sequence[tuple[int, int]],
        boxes_on_host: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Return pooled features (R, C, *output_size) of the R boxes of all images, in the order of the images.

        maps: feature maps by name. boxes: (R_i, 4) xyxy of each image i. image_shapes is not used. boxes_on_host: the
        same boxes on the CPU, if available; they avoid a host synchronisation.
        """
        levels = [maps[name] for name in self.featmap_names if name in maps]
        joined = _without_nan(torch.cat(list(boxes)))
        image = image_of_each([len(image_boxes) for image_boxes in boxes], joined.device)
        rois = torch.cat([image[:, None].to(joined), joined], dim=1)
        if len(levels) == 1:
            return self._pool(levels[0], rois, self.scales[0])
        copy = joined if boxes_on_host is None else _without_nan(torch.cat(list(boxes_on_host)))
        level = self.map_levels([copy])  # (R,)
        # The levels 1, 0, 1 have the order 1, 0, 2 and the counts 1, 2; `back` undoes the order.
        order = level.argsort(stable=True)
        is_level = level[:, None] == torch.arange(len(levels), device=level.device)
        counts = is_level.sum(0).tolist()  # the one wait
        back = send(order.argsort(), joined.device)
        order = send(order, joined.device)
        pooled = []
        for one, level_rois, scale in zip(levels, rois[order].split(counts), self.scales, strict=True):
            pooled.append(self._pool(one, level_rois, scale).to(levels[0].dtype))
        return torch.cat(pooled).index_select(0, back)

    def _pool(self, level: Tensor, rois: Tensor, scale: float) -> Tensor:
        return pooled_regions(level, rois, self.output_size[0], scale, self.sampling_ratio)


def _without_nan(boxes: Tensor) -> Tensor:
    """Replace NaN, which the guard handles elsewhere in the step; here it would belong to no level."""
    return boxes.masked_fill(boxes.isnan(), 0.0)
