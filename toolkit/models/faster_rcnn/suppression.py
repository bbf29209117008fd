"""Proposals and detections of a whole batch at once, for a GPU: torchvision goes image by image, and waits in each.

Greedy non-maximum suppression is here a fixed point: a box is kept if no better one that is kept overlaps it too much.
Whether a box is right after n rounds depends on n better ones at most, so that the rounds end at the greedy answer;
there are as few as the longest chain of boxes that suppress each other. On a CPU torchvision's loop is faster.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.batch import first_rows, pad_rows, rows_of, send, to_host
from toolkit.box_ops import intersection_and_union

ROUNDS = 16  # before the host asks whether they were enough
USUAL_GROUP, LARGEST_GROUP = 1024, 4096  # boxes, whose pairs fill 4 and 64 MB of float32
PAIRS_AT_ONCE = 2**27  # boxes compared with boxes: 512 MB of float32
LARGEST_DELTA = math.log(1000.0 / 16)  # of width and height, as torchvision's BoxCoder


class Suppression:
    """Greedy NMS in each of G groups of K boxes, best first.

    Args:
        boxes_xyxy: (G, K, 4). valid: (G, K), False for padding. threshold: IoU above which the better box wins.
        labels: (G, K), boxes of different labels leave each other alone; None: all are of one label.
    """

    def __init__(self, boxes_xyxy: Tensor, valid: Tensor, threshold: float, labels: Tensor | None = None):
        groups, count = valid.shape
        self.valid = self.keep = valid
        at_once = max(1, PAIRS_AT_ONCE // max(1, count**2))
        later = torch.ones(count, count, dtype=torch.bool, device=valid.device).triu(1)
        parts = []
        for part in boxes_xyxy.split(at_once):
            common, union = intersection_and_union(part[:, :, None], part[:, None])
            parts.append((common / union > threshold) & later)
        self.over = torch.cat(parts) if groups else later[None][:0]
        if labels is not None:
            self.over &= labels[:, :, None] == labels[:, None]

    def advance(self) -> Tensor:
        """Some rounds; 0-dim bool on the device, whether `keep` is the answer now."""
        for _ in range(ROUNDS):
            worse = (self.over & self.keep[:, :, None]).any(1)
            before, self.keep = self.keep, self.valid > worse  # valid and not worse, in one kernel
        return (before == self.keep).all()

    def best(self, boxes: Tensor, scores: Tensor, most: int) -> tuple[list[Tensor], list[Tensor]]:
        """The best `most` boxes (N, 4) per image that are left, and the same on the CPU; one host read if ROUNDS are
        enough.

        boxes: (B, M, 4), scores: (B, M), not negative, as many groups in a row as an image has.
        """
        done = False
        while not done:
            order, facts = self._ranked(scores, most)
            sorted_boxes = rows_of(boxes, order)
            facts, known = to_host([facts, sorted_boxes])
            *counts, _, done = facts.tolist()
        return tuple([each[i, :count] for i, count in enumerate(counts)] for each in (sorted_boxes, known))

    def best_on_host(self, scores: Tensor, most: int, /, **columns: Tensor) -> tuple[list[dict[str, Tensor]], int]:
        """The same on the CPU, where the read brings them, of each column (B, M, ...), by its name; and the largest
        number of valid boxes in a group."""
        done = False
        while not done:
            order, facts = self._ranked(scores, most)
            facts, *found = to_host([facts, *(rows_of(column, order) for column in columns.values())])
            *counts, fullest, done = facts.tolist()
        return first_rows(counts, dict(zip(columns, found, strict=True))), fullest

    def _ranked(self, scores: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Rows (B, `most`), best first, and (B + 2,) int64: how many of them are left in each image, the largest number
        of valid boxes in a group, and whether this is the answer."""
        settled = self.advance()
        keep = self.keep.reshape(scores.shape)
        order = scores.masked_fill(~keep, -1).sort(dim=1, descending=True, stable=True).indices[:, :most]
        return order, torch.cat([keep.sum(1).clamp(max=most), self.fullest(), settled[None].long()])

    def fullest(self) -> Tensor:
        """(1,) the largest number of valid boxes in a group."""
        return F.pad(self.valid.sum(1), (0, 1)).amax()[None]


def decode_boxes(deltas: Tensor, boxes_xyxy: Tensor, weights: Sequence[float]) -> Tensor:
    """torchvision's `BoxCoder.decode` without its copies to the device: deltas and boxes (..., 4), broadcast."""
    dx, dy, dw, dh = (delta / weight for delta, weight in zip(deltas.unbind(-1), weights, strict=True))
    left, top, right, bottom = boxes_xyxy.to(deltas.dtype).unbind(-1)
    width, height = right - left, bottom - top
    centre_x, centre_y = dx * width + (left + 0.5 * width), dy * height + (top + 0.5 * height)
    half_w = 0.5 * (dw.clamp(max=LARGEST_DELTA).exp() * width)
    half_h = 0.5 * (dh.clamp(max=LARGEST_DELTA).exp() * height)
    return torch.stack((centre_x - half_w, centre_y - half_h, centre_x + half_w, centre_y + half_h), dim=-1)


def clip(boxes_xyxy: Tensor, limits_whwh: Tensor) -> Tensor:
    """Boxes (..., 4) inside images whose `limits_whwh` (..., 4) are width, height, width, height."""
    return boxes_xyxy.clamp(min=0).minimum(limits_whwh)


def limits_whwh(sizes_hw: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """(B, 4) float32 for `clip`, of sizes (h, w) in pixels that are known on the host."""
    return send(torch.tensor([(w, h, w, h) for h, w in sizes_hw], dtype=torch.float32), device)


def best_proposals(
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
) -> tuple[list[Tensor], list[Tensor]]:
    """torchvision's `filter_proposals` for the whole batch: (P_i, 4) of each image, best first, and the same on the
    CPU; one host read.

    Args:
        boxes_xyxy: (B, A, 4). logits: (B, A). per_level: how many of the A each level has. limits_whwh: (B, 4).
        before, after: largest number of boxes of a level before suppression, and of an image after it.
        threshold: IoU. min_size: pixels. min_score: a probability.
    """
    widest, levels = min(before, max(per_level)), []
    for level_boxes, level_logits in zip(boxes_xyxy.split(per_level, 1), logits.split(per_level, 1), strict=True):
        best, index = level_logits.topk(min(before, level_logits.shape[1]), dim=1)
        chosen, scores = level_boxes.gather(1, index[..., None].expand(-1, -1, 4)), best.sigmoid()
        if missing := widest - best.shape[1]:
            chosen, scores = F.pad(chosen, (0, 0, 0, missing)), F.pad(scores, (0, missing), value=-1.0)
        levels.append((chosen, scores))
    boxes, scores = (torch.stack(parts, 1) for parts in zip(*levels, strict=True))  # (B, L, K, 4), (B, L, K)
    boxes = clip(boxes, limits_whwh[:, None, None])
    sides = boxes[..., 2:] - boxes[..., :2]
    valid = (sides >= min_size).all(-1) & (scores >= max(min_score, 0.0))
    suppression = Suppression(boxes.flatten(0, 1), valid.flatten(0, 1), threshold)
    return suppression.best(boxes.flatten(1, 2), scores.flatten(1), after)


def best_detections(
    logits: Tensor,
    boxes_xyxy: Tensor,
    counts: Sequence[int],
    limits_whwh: Tensor,
    scales_whwh: Tensor,
    *,
    threshold: float,
    min_score: float,
    most: int,
    largest: int = LARGEST_GROUP,
) -> list[dict[str, Tensor]] | None:
    """torchvision's `postprocess_detections` for the whole batch: per image, on the CPU, `boxes` (N, 4), scaled at the
    end, `scores` (N,), `labels` (N,) from 1, best first; one host read.

    Args:
        logits: (P, 1 + C), background first. boxes_xyxy: (P, 1 + C, 4). counts: proposals of each image.
        limits_whwh, scales_whwh: (B, 4). threshold: IoU. most: detections of an image.
        largest: candidates of an image at most; None is returned for more, which would fill the memory with pairs.
    """
    scores = pad_rows(logits.softmax(-1)[:, 1:], counts)
    boxes = clip(pad_rows(boxes_xyxy[:, 1:], counts), limits_whwh[:, None, None])
    scores = scores.masked_fill(~(boxes[..., 2:] - boxes[..., :2] >= 1e-2).all(-1), -1)
    for widest in _widths(largest):
        ranked, _, own_boxes, labels = _candidates(scores, boxes, min_score, widest)
        suppression = Suppression(own_boxes, ranked > min_score, threshold, labels)
        columns = {"boxes": own_boxes * scales_whwh[:, None], "scores": ranked, "labels": labels}
        found, candidates = suppression.best_on_host(ranked, most, **columns)
        if candidates <= widest:
            return found
    return None


def best_of_each_proposal(
    logits: Tensor,
    boxes_xyxy: Tensor,
    counts: Sequence[int],
    limits_whwh: Tensor,
    *,
    threshold: float,
    min_score: float,
    most: int,
    largest: int = LARGEST_GROUP,
) -> list[dict[str, object]] | None:
    """`one_class_each` for the whole batch; arguments as of `best_detections`, one host read."""
    boxes, logits_of = clip(pad_rows(boxes_xyxy, counts), limits_whwh[:, None, None]), pad_rows(logits, counts)
    scores = pad_rows(logits.softmax(-1)[:, 1:], counts)
    for widest in _widths(largest):
        ranked, rows, own_boxes, labels = _candidates(scores, boxes[:, :, 1:], min_score, widest)
        suppression, done = Suppression(own_boxes, ranked > min_score, threshold, labels), False
        while not done:
            settled = suppression.advance()
            left = torch.zeros_like(scores).flatten(1).scatter(1, rows, ranked * suppression.keep).view_as(scores)
            best, label = left.max(2)
            best, order = (each[:, :most] for each in best.sort(dim=1, descending=True, stable=True))
            label, per_class = label.gather(1, order), rows_of(boxes, order)
            own = per_class.gather(2, (label + 1)[..., None, None].expand(-1, -1, 1, 4))[:, :, 0]
            facts = torch.cat([(best > 0).sum(1), suppression.fullest(), settled[None].long()])
            facts, known = to_host([facts, own])
            *found, candidates, done = facts.tolist()
        if candidates <= widest:
            columns = {"boxes": own, "labels": label, "scores": best, "logits": rows_of(logits_of, order)}
            images = first_rows(found, columns | {"boxes_per_class": per_class})
            return [{**image, "on_host": host} for image, host in
                    zip(images, first_rows(found, {"boxes": known}), strict=True)]  # fmt: skip
    return None


def _widths(largest: int) -> list[int]:
    """Sizes of groups that are tried in turn, so that nobody asks beforehand how many candidates there are."""
    return sorted({min(USUAL_GROUP, largest), largest})


def _candidates(
    scores: Tensor, boxes_xyxy: Tensor, min_score: float, widest: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best of all proposals and classes, (B, K): scores, -1 for those not above `min_score`, rows of (proposals x
    classes), boxes (B, K, 4), labels from 1. K is one more than `widest`, to tell whether there are more.

    scores: (B, M, C). boxes_xyxy: (B, M, C, 4).
    """
    scores, order = scores.masked_fill(~(scores > min_score), -1).flatten(1).sort(dim=1, descending=True, stable=True)
    rows = order[:, : widest + 1]
    return scores[:, : widest + 1], rows, rows_of(boxes_xyxy.flatten(1, 2), rows), rows % boxes_xyxy.shape[2] + 1
