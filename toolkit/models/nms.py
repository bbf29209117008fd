"""Greedy non-maximum suppression of a whole batch, class by class, on any device.

On a CPU, torchvision's loop is used. Exported files have one operator for this loop, `nms_keep`, which is translated to
an operator of ONNX (`toolkit.tools.export.operators`). On a GPU, where the loop would wait for each image, suppression
is computed as a fixed point: a box is kept if no better kept box overlaps it too much. After n rounds the result is
correct for at least the n best boxes, so the rounds converge to the greedy result; the number of rounds needed is the
length of the longest chain of boxes that suppress each other. Only the device knows whether the rounds made were
enough, and `repeated_until_enough` reads this in the same copy as the results.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torchvision.ops import nms

from toolkit.base.batch import is_waited_for, rows_of, to_host
from toolkit.base.box_ops import intersection_and_union

ROUNDS_BEFORE_CHECK = 16  # before the first check whether they were enough; proposals of Faster R-CNN take 6 to 19
USUAL_GROUP = 1024  # boxes, whose pairs fill 4 MB of float32
MAX_GROUP = 4096  # boxes, whose pairs fill 64 MB of float32
PAIRS_PER_CHUNK = 2**27  # boxes compared with boxes: 512 MB of float32


class Rounds(NamedTuple):
    """The rounds of one suppression of G groups of K boxes so far.

    over: (G, K, K), 1 where the box of the row could suppress that of the column, else 0. start, keep: (G, 1, K), 1 for
    all boxes, and for the boxes that are kept so far, else 0. changed: 0-dim bool, whether the last round changed that.
    """

    over: Tensor
    start: Tensor
    keep: Tensor
    changed: Tensor | None = None

    def go_on(self, count: int) -> "Rounds":
        """Make `count` more rounds.

        Let box 0 overlap box 1, and box 1 box 2. In the first round all boxes count as kept, so 0 suppresses 1 and 1
        suppresses 2; in the second, 1 is not kept and 2 is; the third changes nothing.
        """
        keep = self.keep
        with torch.autocast(keep.device.type, enabled=False):  # which would copy `over` in each round
            for _ in range(count):
                before = keep
                # By how many kept boxes a box is suppressed: as a matrix product it takes one kernel, where
                # `(over & keep).any()` takes three reads and writes. Then: fewer than 1 for a box, than 0 for padding.
                keep = torch.bmm(before, self.over).lt_(self.start)
                if not is_waited_for(keep.device) and torch.equal(before, keep):
                    break
        return self._replace(keep=keep, changed=(before != keep).any())


class Attempt:
    """What suppressions do inside `repeated_until_enough`, until the host has read whether it was enough.

    Args:
        rounds: number of rounds that each of them makes.
        width: number of boxes of an image that are compared, the best ones.
        begun: the suppressions of the attempt before, from which these go on; empty: they begin.

    Attributes:
        made: the suppressions so far, in their order.
        too_narrow: 0-dim bool tensors on the device, each True if there were more boxes than `width`.
    """

    def __init__(self, rounds: int, width: int, begun: Iterable[Rounds] = ()):
        self.rounds = rounds
        self.width = width
        self.begun = deque(begun)
        self.made: list[Rounds] = []
        self.too_narrow: list[Tensor] = []

    def run(self, compute: Callable[[], tuple[Sequence[Tensor], "Rest"]]) -> tuple[Sequence[Tensor], "Rest"]:
        token = _attempt.set(self)
        try:
            return compute()
        finally:
            _attempt.reset(token)


_attempt: ContextVar[Attempt | None] = ContextVar("attempt", default=None)  # None: the host reads after some rounds
Rest = TypeVar("Rest")


def class_wise_nms(boxes_xyxy: Tensor, scores: Tensor, threshold: float, order: Tensor | None = None) -> Tensor:
    """Apply class-wise NMS to boxes (B, C, N, 4) with scores (B, C, N); rows of score 0 are not boxes.

    Args:
        threshold: IoU above which a box is suppressed by a better box of its class.
        order: (B, C * N) int64, the rows of each image in the order in which equal scores are ranked, used on a CPU
            only; None: of equal scores, the first row comes first.

    Returns:
        (B, C, N) in the dtype of the scores: 0 for suppressed boxes; for kept boxes a positive number that is larger
        the better the box ranks by score in its image.
    """
    if torch.compiler.is_exporting():
        keep = nms_keep(boxes_xyxy.flatten(0, 1), scores.flatten(0, 1), threshold)  # (B * C, N)
        return scores.where(keep.reshape(scores.shape), 0)
    if is_waited_for(scores.device):
        return _batch_at_once(boxes_xyxy, scores, threshold)
    of_image = boxes_xyxy.flatten(1, 2)  # (B, C * N, 4)
    in_class = scores.shape[2]
    turns = _image_by_image(of_image, scores.flatten(1), in_class, threshold, order)
    return turns.view_as(scores)


def _batch_at_once(boxes_xyxy: Tensor, scores: Tensor, threshold: float) -> Tensor:
    _, classes, in_class = scores.shape
    if classes * in_class**2 > MAX_GROUP**2:
        of_image = boxes_xyxy.flatten(1, 2)  # (B, C * N, 4)
        turns = _best_of_image(of_image, scores.flatten(1), in_class, threshold)
        return turns.view_as(scores)
    of_class = boxes_xyxy.flatten(0, 1)  # (B * C, N, 4)
    ranked, order = scores.flatten(0, 1).sort(dim=1, descending=True, stable=True)
    keep = sorted_nms(rows_of(of_class, order), ranked > 0, threshold)
    kept = ranked.where(keep, 0)
    in_rows = torch.zeros_like(ranked).scatter(1, order, kept)  # back in the order of the scores
    return in_rows.view_as(scores)


def _best_of_image(boxes: Tensor, scores: Tensor, in_class: int, threshold: float) -> Tensor:
    """Treat all classes of an image as one group, for a number of boxes that leaves most classes few."""
    ranked, order = scores.sort(dim=1, descending=True, stable=True)
    attempt = _attempt.get()
    if attempt is None:
        counts = (ranked > 0).sum(1)
        width = int(counts.amax()) if len(ranked) else 0
        if width > MAX_GROUP:  # pairs would fill the memory
            return _image_by_image(boxes, scores, in_class, threshold, order)
    else:
        width = attempt.width
        attempt.too_narrow.append((ranked[:, width:] > 0).any())
    rows = order[:, :width]
    best = ranked[:, :width]
    labels = rows // in_class
    keep = sorted_nms(rows_of(boxes, rows), best > 0, threshold, labels)
    turns = _countdown(rows.shape[1], scores).where(keep, 0)
    return torch.zeros_like(scores).scatter(1, rows, turns)


def _image_by_image(
    boxes: Tensor,
    scores: Tensor,
    in_class: int,
    threshold: float,
    order: Tensor | None,
) -> Tensor:
    """Apply torchvision's loop to boxes (B, C * N, 4); return (B, C * N), the more the better, 0 for suppressed ones.

    Kept rows 5, 2 and 9 of an image, best first, become 3, 2 and 1 there.
    """
    turns = torch.zeros_like(scores)
    for i, (image_boxes, image_scores) in enumerate(zip(boxes, scores, strict=True)):
        turn = torch.arange(len(image_scores), device=scores.device) if order is None else order[i]
        rows = turn[image_scores[turn] > 0]
        labels = rows // in_class
        kept = nms_by_label(image_boxes[rows], image_scores[rows], labels, threshold)
        turns[i, rows[kept]] = _countdown(len(kept), turns)
    return turns


def _countdown(count: int, like: Tensor) -> Tensor:
    """Return count, ..., 2, 1 in the dtype and on the device of `like`."""
    return torch.arange(count, 0, -1, device=like.device).to(like)


def nms_by_label(boxes_xyxy: Tensor, scores: Tensor, labels: Tensor, threshold: float) -> Tensor:
    """Apply NMS to the boxes (N, 4) of each label separately, and return the rows of the kept boxes, best first.

    Of equal scores, the first row comes first. torchvision's `batched_nms`, which shifts the boxes of each label by a
    multiple of the largest coordinate, is not used: far from the origin (at 60,000 px), or with negative coordinates,
    boxes of one label would suppress those of another.
    """
    kept = []
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        if len(rows) > 1:
            rows = rows[nms(boxes_xyxy[rows], scores[rows], threshold)]
        kept.append(rows)
    if not kept:
        return labels.new_zeros(0)
    in_order = torch.cat(kept).sort().values
    best_first = scores[in_order].sort(descending=True, stable=True).indices
    return in_order[best_first]


def sorted_nms(
    boxes_xyxy: Tensor,
    valid: Tensor,
    threshold: float,
    labels: Tensor | None = None,
    classes: int = 1,
) -> Tensor:
    """Apply NMS in rounds, on any device, to G groups of K boxes each; return a bool mask (G, K) of the kept boxes.

    Args:
        boxes_xyxy: (G, K, 4), sorted from best to worst score in each group.
        valid: (G, K) bool, False for padding.
        threshold: IoU above which a box is suppressed by a better one.
        labels: (G, K); boxes of different labels do not suppress each other. None: all boxes have the same label.
        classes: the number of labels; needed only in export, where the rounds cannot be traced.
    """
    if torch.compiler.is_exporting():
        of_class = labels[:, None] == torch.arange(classes, device=labels.device)[:, None]  # (G, C, K)
        turns = torch.arange(valid.shape[1], 0, -1, device=valid.device).to(boxes_xyxy)
        turns = turns.where(of_class & valid[:, None], 0)
        of_classes = boxes_xyxy[:, None].expand(-1, classes, -1, -1)  # (G, C, K, 4)
        return class_wise_nms(of_classes, turns, threshold).any(1)
    attempt = _attempt.get()
    if attempt is None:
        rounds = _begin_rounds(boxes_xyxy, valid, threshold, labels).go_on(ROUNDS_BEFORE_CHECK)
        while rounds.changed:  # the host waits for the device
            rounds = rounds.go_on(ROUNDS_BEFORE_CHECK)
    else:
        begun = attempt.begun.popleft() if attempt.begun else _begin_rounds(boxes_xyxy, valid, threshold, labels)
        rounds = begun.go_on(attempt.rounds)
        attempt.made.append(rounds)
    return rounds.keep[:, 0] > 0


def _begin_rounds(boxes_xyxy: Tensor, valid: Tensor, threshold: float, labels: Tensor | None) -> Rounds:
    """Compare the boxes (G, K, 4) of each group, see `sorted_nms`."""
    count = valid.shape[1]
    later = torch.ones(count, count, dtype=torch.bool, device=valid.device).triu(1)
    groups_at_once = max(1, PAIRS_PER_CHUNK // max(1, count**2))
    parts = []
    for part in boxes_xyxy.split(groups_at_once):
        common, union = intersection_and_union(part[:, :, None], part[:, None])
        overlaps = common / union > threshold
        parts.append(overlaps & later)
    over = parts[0] if len(parts) == 1 else torch.cat(parts)  # (G, K, K): the row could suppress the column
    if labels is not None:
        over &= labels[:, :, None] == labels[:, None]
    # float16 is exact enough for their counts: a sum of ones is 0 or at least 1 in it.
    exact = torch.float16 if is_waited_for(valid.device) else torch.float32
    start = valid[:, None].to(exact)  # (G, 1, K)
    return Rounds(over.to(exact), start, start)


def repeated_until_enough(compute: Callable[[], tuple[Sequence[Tensor], Rest]]) -> tuple[list[Tensor], Rest]:
    """Call `compute`, which returns tensors and anything else; return both, with the tensors copied to the CPU.

    The host waits for the device only once, for the copy. NMS inside `compute` first assumes that few boxes and few
    rounds suffice, and the copy shows whether they did. If not, `compute` is called again: NMS goes on from the rounds
    that it has made, with twice as many, or begins with more boxes, and at last with a synchronisation after every few
    rounds.
    """
    return begin_until_enough(compute)()


def begin_until_enough(
    compute: Callable[[], tuple[Sequence[Tensor], Rest]],
) -> Callable[[], tuple[list[Tensor], Rest]]:
    """Call `compute` for the first time; return a function that does the rest of `repeated_until_enough`.

    What is launched before that function is called does not depend on the results, and runs while the host would wait
    for them.
    """
    first = Attempt(ROUNDS_BEFORE_CHECK, USUAL_GROUP)
    of_first = first.run(compute)

    def read() -> tuple[list[Tensor], Rest]:
        attempt = first
        tensors, rest = of_first
        while True:
            changed = [rounds.changed for rounds in attempt.made]
            values = to_host([*tensors, *attempt.too_narrow, *changed])
            results = values[: len(tensors)]
            doubts = values[len(tensors) :]
            if not any(doubts):
                return results, rest
            if not any(doubts[: len(attempt.too_narrow)]):
                attempt = Attempt(2 * attempt.rounds, attempt.width, attempt.made)
            elif attempt.width < MAX_GROUP:
                attempt = Attempt(attempt.rounds, MAX_GROUP)
            else:
                tensors, rest = compute()
                return to_host(tensors), rest
            tensors, rest = attempt.run(compute)

    return read


def top_k_rows(scores: Tensor, count: int, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the `count` highest of scores (B, N) and their rows, both (B, min(count, N)), best first.

    Scores must not be negative. Of equal scores, the one with the smaller position comes first, or the one with the
    smaller value in `order` (N,), unique integers. In exported files the runtime decides about equal scores, and an
    image with fewer than `count` scores is padded to `count` rows of score 0.
    """
    if torch.compiler.is_exporting():
        best, rows = pad(scores, (0, count)).topk(count, dim=1)
        return best, rows.clamp(max=scores.shape[1] - 1)
    if order is None:
        order = torch.arange(scores.shape[1], device=scores.device)
    # Scores are not negative, so their bits sort like them: one top-k of unique integers is also stable.
    bits = scores.float().contiguous().view(torch.int32)
    keys = (bits.long() << 32) - order
    rows = keys.topk(min(count, scores.shape[1]), dim=1).indices
    return scores.gather(1, rows), rows


@torch.library.custom_op("toolkit::nms_keep", mutates_args=())
def nms_keep(boxes: Tensor, scores: Tensor, nms_iou: float) -> Tensor:
    """Apply NMS to each of G independent groups, such as the classes of an image; return a bool mask (G, N) of the kept
    boxes.

    boxes are (G, N, 4) xyxy, scores (G, N); rows of score 0 are not boxes. nms_iou: IoU above which a box is suppressed
    by a better one.
    """
    keep = scores > 0
    groups = (keep.sum(1) > 1).nonzero()[:, 0]
    for group in groups.tolist():
        rows = keep[group].nonzero()[:, 0]
        left = rows[nms(boxes[group, rows], scores[group, rows], nms_iou)]
        keep[group] = torch.zeros_like(keep[group]).index_fill(0, left, True)
    return keep


@nms_keep.register_fake
def _(boxes: Tensor, scores: Tensor, nms_iou: float) -> Tensor:
    return torch.empty_like(scores, dtype=torch.bool)
