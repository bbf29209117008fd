"""Anchors, matching and multibox loss of SSD (Liu et al., ECCV 2016), as CVNets (apple/ml-cvnets) defines them.

Boxes are fractions of the image, so that a square anchor is a square in pixels only if the image is a square. All
functions process a whole batch at once, without host reads.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from toolkit.base.batch import is_waited_for, send
from toolkit.base.box_ops import cxcywh_to_xyxy, normalize_boxes, widest_float, xyxy_to_cxcywh
from toolkit.step.losses import labelled_classes, partial_log_softmax, times_class_weights, unlabelled_columns

IGNORED_LABEL = -1  # label of an anchor in a crowd region; 0 is the background, class c of the data is c + 1


def anchor_scales(levels: int, min_scale: float, max_scale: float) -> list[tuple[float, float]]:
    """Return the sides of the small and of the large square anchor of each level, as fractions of the image.

    The small sides are evenly spaced: `min_scale` at the first level, `max_scale` at a level that would follow the
    last. The large side is the geometric mean of the small sides of its own and the next level.
    """
    small = torch.linspace(min_scale, max_scale, levels + 1, dtype=torch.float64).tolist()
    scales = []
    for side, next_side in zip(small[:-1], small[1:], strict=True):
        scales.append((side, (side * next_side) ** 0.5))
    return scales


def level_anchors(hw: tuple[int, int], scales: tuple[float, float], aspect_ratios: Sequence[float], clip: bool = True):
    """Return the anchors (H * W * (2 + 2 R), 4) cxcywh of one feature map, cell by cell, row by row; float32.

    A cell has the small square, the large one, and two rectangles for each of the R aspect ratios r: the small square
    stretched by sqrt(r) in width and 1 / sqrt(r) in height, and the other way round. A ratio given twice counts once.

    Args:
        hw: height and width of the feature map; 1, 1 for a map that covers the whole image.
        scales: sides of the small and of the large square, see `anchor_scales`.
        clip: clamp centres and sizes to [0, 1].
    """
    small, large = scales
    shapes_wh = [(small, small), (large, large)]
    for ratio in dict.fromkeys(aspect_ratios):
        root = ratio**0.5
        shapes_wh.append((small * root, small / root))
        shapes_wh.append((small / root, small * root))
    shapes_wh = torch.tensor(shapes_wh, dtype=torch.float64)
    y, x = ((torch.arange(side, dtype=torch.float64) + 0.5) / side for side in hw)
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    centres = torch.stack((columns, rows), dim=-1)  # (H, W, 2) x, y
    centres = centres[:, :, None].expand(-1, -1, len(shapes_wh), -1)
    anchors = torch.cat([centres, shapes_wh.expand(*hw, -1, -1)], dim=-1)  # (H, W, shapes, 4)
    anchors = anchors.reshape(-1, 4).float()
    return anchors.clamp(0, 1) if clip else anchors


def encode_boxes(boxes_xyxy: Tensor, anchors_cxcywh: Tensor, center_variance: float, size_variance: float) -> Tensor:
    """Return the offsets (..., 4) of boxes (..., 4) from anchors (..., 4), which may have fewer leading dimensions.

    The first two are the distances of the centres in units of the anchor's sides, divided by `center_variance`; the
    last two are the logarithms of the ratios of the sides, divided by `size_variance`.
    """
    boxes = xyxy_to_cxcywh(boxes_xyxy)
    moved = boxes[..., :2] - anchors_cxcywh[..., :2]
    ratio = boxes[..., 2:] / anchors_cxcywh[..., 2:]
    of_centres = moved / anchors_cxcywh[..., 2:] / center_variance
    of_sizes = ratio.log() / size_variance
    return torch.cat([of_centres, of_sizes], dim=-1)


def decode_offsets(offsets: Tensor, anchors_cxcywh: Tensor, center_variance: float, size_variance: float) -> Tensor:
    """Return the boxes (..., 4) xyxy, not clipped, from which `encode_boxes` makes these offsets (..., 4)."""
    moved = offsets[..., :2] * center_variance * anchors_cxcywh[..., 2:]
    centres = moved + anchors_cxcywh[..., :2]
    ratio = (offsets[..., 2:] * size_variance).exp()
    sizes = ratio * anchors_cxcywh[..., 2:]
    return cxcywh_to_xyxy(torch.cat([centres, sizes], -1))


class PaddedObjects(NamedTuple):
    """Annotated boxes of a batch, padded to the largest number T of boxes in an image, at least 1.

    boxes: (B, T, 4) xyxy, fractions of the image. labels: (B, T) int64, the class, or -1 for padding. crowd: (B, T)
    bool.
    """

    boxes: Tensor
    labels: Tensor
    crowd: Tensor


def pad_objects(targets: Sequence[Mapping], image_hw: Tensor) -> PaddedObjects:
    """Convert the targets of a batch to `PaddedObjects`.

    image_hw: (2,) height and width of the batch's images in pixels.
    """
    boxes = _pad([target["boxes"] for target in targets], 0.0)
    crowd = _pad([target["iscrowd"] for target in targets], 0)
    return PaddedObjects(
        boxes=normalize_boxes(boxes.float(), image_hw),
        labels=_pad([target["labels"] for target in targets], -1),
        crowd=crowd > 0,
    )


def _pad(column: Sequence[Tensor], value: float) -> Tensor:
    # An image with one row is added, and dropped again: there is always a place.
    filler = column[0].new_full((1, *column[0].shape[1:]), value)
    padded = pad_sequence([*column, filler], batch_first=True, padding_value=value)
    return padded[:-1]


def match_anchors(anchors_cxcywh: Tensor, objects: PaddedObjects, iou_threshold: float) -> tuple[Tensor, Tensor]:
    """Assign annotated boxes to the A anchors of each image.

    An anchor gets the box that it overlaps most, if the IoU is at least `iou_threshold`. In addition, each box is
    assigned to the anchor that overlaps it most, whatever the IoU; if two boxes have the same such anchor, it gets the
    later box. Crowd regions are never assigned: an anchor without a box is ignored if at least `iou_threshold` of its
    area lies in a crowd region, as in COCO's evaluation.

    Args:
        anchors_cxcywh: (A, 4) fractions.

    Returns:
        labels (B, A) int64: 0 for background, class + 1, or `IGNORED_LABEL`; index (B, A) of the assigned box.
    """
    left, top, right, bottom = cxcywh_to_xyxy(anchors_cxcywh).t().contiguous()  # planes: strided ones are slow
    x0, y0, x1, y1 = objects.boxes[..., None].unbind(-2)  # (B, T, 1)
    # (B, T, A); in place where it can be: on a CPU, memory that is new costs more than the arithmetic
    common = torch.minimum(x1, right).sub_(torch.maximum(x0, left)).clamp_(min=0)
    common.mul_(torch.minimum(y1, bottom).sub_(torch.maximum(y0, top)).clamp_(min=0))
    anchor_area = (right - left) * (bottom - top)  # (A,)
    box_area = (x1 - x0) * (y1 - y0)  # (B, T, 1)
    union = (box_area + anchor_area).sub_(common).add_(1e-5)  # the 1e-5 is CVNets'
    real = (objects.labels >= 0) & ~objects.crowd
    iou = torch.div(common, union, out=union).masked_fill_(~real[..., None], -1.0)

    # `forced` is the box that takes an anchor in any case, -1: none. Where boxes 0 and 2 want anchor 7, it is 2.
    best_iou, best_box = iou.max(dim=1)
    numbers = torch.arange(iou.shape[1], device=iou.device)
    order = numbers.expand_as(real).masked_fill(~real, -1)
    forced = torch.full_like(best_box, -1)
    forced.scatter_reduce_(1, iou.argmax(dim=2), order, "amax")
    index = torch.where(forced >= 0, forced, best_box)
    positive = (forced >= 0) | (best_iou >= iou_threshold)
    labels = torch.where(positive, objects.labels.gather(1, index) + 1, 0)
    if is_waited_for(objects.crowd.device) or bool(objects.crowd.any()):
        with_crowd = (common * objects.crowd[..., None]).amax(dim=1)
        in_crowd = with_crowd >= iou_threshold * anchor_area
        labels = labels.masked_fill_(in_crowd & ~positive, IGNORED_LABEL)
    return labels, index


def mine_negatives(background_loss: Tensor, labels: Tensor, ratio: int) -> Tensor:
    """Return a (B, A) bool mask of the background anchors with the largest loss, at most `ratio` for each positive
    anchor of their image.

    background_loss: (B, A) of A anchors per image. labels: (B, A), see `match_anchors`.
    """
    losses = background_loss.masked_fill(labels != 0, -torch.inf)
    order = losses.argsort(dim=1, descending=True)
    # The losses 0.1, 0.9, 0.5 have the order 1, 2, 0, and the ranks 2, 0, 1.
    positions = torch.arange(order.shape[1], device=order.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(1, order, positions)
    positives = (labels > 0).sum(dim=1, keepdim=True)
    return (ranks < ratio * positives) & (labels == 0)


def multibox_loss(
    logits: Tensor,
    offsets: Tensor,
    labels: Tensor,
    target_offsets: Tensor,
    ratio: int,
    label_smoothing: float = 0.0,
    labelled: Tensor | None = None,
    class_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return sums over a batch of cross-entropy (positives and mined negatives) and smooth L1 (positives); 0 without
    boxes.

    Args:
        logits: (B, A, C) of A anchors per image, column 0 is the background.
        offsets, target_offsets: (B, A, 4).
        labels: (B, A), see `match_anchors`.
        ratio: largest number of negatives per positive of an image.
        label_smoothing: share of the class targets that is spread over all classes.
        labelled: (B, C - 1) bool, the classes that each image labels; None: all.
        class_weights: (C - 1,), `Detector.class_weights`; background counts 1.
    """
    positive = labels > 0
    chosen = logits.flatten(0, 1)
    classes = labels.flatten().clamp(min=0)
    unlabelled = unlabelled_columns(labelled, 0)
    if unlabelled is not None:
        unlabelled = unlabelled[:, None].expand_as(logits).flatten(0, 1)
    background = torch.zeros_like(classes)
    of_background = partial_log_softmax(chosen.detach(), background, unlabelled, 0)[:, 0]
    hardest = mine_negatives(-of_background.view_as(labels), labels, ratio)
    counts = (positive | hardest).flatten()
    if not is_waited_for(logits.device):  # a tenth of the rows count; other devices take all
        rows = counts.nonzero()[:, 0]
        chosen = chosen[rows]
        classes = classes[rows]
        counts = counts[rows]
        if unlabelled is not None:
            unlabelled = unlabelled[rows]
    log_probabilities = partial_log_softmax(chosen, classes, unlabelled, 0)
    entropy = F.nll_loss(log_probabilities, classes, reduction="none")
    if label_smoothing:
        entropy = (1 - label_smoothing) * entropy - label_smoothing * log_probabilities.mean(dim=-1)
    if class_weights is not None:
        entropy = times_class_weights(entropy, classes - 1, class_weights)
    distance = F.smooth_l1_loss(offsets, target_offsets, reduction="none").sum(dim=-1)
    classification = torch.where(counts, entropy, 0.0).sum()
    regression = torch.where(positive, distance, 0.0).sum()
    return classification, regression


class SelfWeighting(nn.Module):
    """A factor on the regression loss that makes it as large as the classification loss, adjusted over the first steps.

    Every `every` steps, and after step `steps`, the factor becomes the ratio of classification to regression loss, each
    summed since the last adjustment. After that it is constant. It is part of the state dict, so that a resumed run
    continues with it.

    Args:
        steps: number of optimizer steps during which the factor is adjusted; with 0 it is always 1.
        every: number of optimizer steps between two adjustments.
    """

    def __init__(self, steps: int, every: int):
        super().__init__()
        self.steps = steps
        self.every = every
        self.register_buffer("weight", torch.ones(()))
        self.register_buffer("sums", torch.full((2,), 1e-7))  # classification, regression
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def observe(self, of_step: Tensor) -> None:
        """Add the losses of one step to the sums, and adjust the factor if it is due. Nothing is read from the device.

        of_step: (2,) classification and regression loss, summed over positives (not divided by their number), the
        regression loss without the factor.
        """
        if self.steps == 0:
            return
        adjusts = self.seen <= self.steps
        sums = torch.where(adjusts, self.sums + of_step.to(self.sums), self.sums)
        is_last_of_period = (self.seen + 1) % self.every == 0
        due = adjusts & (is_last_of_period | (self.seen == self.steps))
        weight = torch.where(due, sums[0] / sums[1], self.weight)
        self.weight.copy_(weight)
        self.sums.copy_(sums.masked_fill(due, 1e-7))
        self.seen += adjusts


class SsdCriterion(nn.Module):
    """Matching and multibox loss of a batch; see `match_anchors` and `multibox_loss`.

    Args:
        iou_threshold: IoU from which an anchor is positive.
        center_variance, size_variance: see `encode_boxes`.
        negatives_per_positive: largest number of hardest negatives in the loss for each positive of their image.
        label_smoothing: share of the class targets that is spread over all classes. It applies in training mode only,
            as in CVNets, so evaluation losses are without smoothing.
        self_weighting_steps, self_weighting_every: see `SelfWeighting`; in training mode only.
    """

    loss_names = ("loss_cls", "loss_loc")
    metric_names = ("positives",)

    def __init__(
        self,
        iou_threshold: float = 0.5,
        center_variance: float = 0.1,
        size_variance: float = 0.2,
        negatives_per_positive: int = 3,
        label_smoothing: float = 0.0,
        self_weighting_steps: int = 0,
        self_weighting_every: int = 200,
    ):
        super().__init__()
        self.iou_threshold = iou_threshold
        self.variances = (center_variance, size_variance)
        self.negatives_per_positive = negatives_per_positive
        self.label_smoothing = label_smoothing
        self.balance = SelfWeighting(self_weighting_steps, self_weighting_every)

    def denominators(self, anchors_cxcywh: Tensor, targets: Sequence[Mapping], image_hw: Tensor) -> dict[str, float]:
        """Return the number of positive anchors of the batch. The arguments are those of `forward`, on the CPU."""
        objects = pad_objects(targets, image_hw)
        labels, _ = match_anchors(anchors_cxcywh, objects, self.iou_threshold)
        return {"positives": float((labels > 0).sum())}

    def forward(
        self,
        logits: Tensor,
        offsets: Tensor,
        anchors_cxcywh: Tensor,
        image_hw: Tensor,
        targets: Sequence[Mapping],
        denominators: Mapping[str, float | Tensor],
        class_weights: Tensor | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
        """Return losses by name, divided by `denominators["positives"]`, and the metric `positives`, positive anchors
        per image, as (sum, count).

        Args:
            logits: (B, A, C + 1) of A anchors per image, column 0 is the background.
            offsets: (B, A, 4).
            anchors_cxcywh: (A, 4) fractions.
            image_hw: (2,) height and width in pixels of the batch's images, to which the boxes of the targets belong.
            class_weights: (C,), `Detector.class_weights`.
        """
        objects = pad_objects(targets, image_hw)
        labels, index = match_anchors(anchors_cxcywh, objects, self.iou_threshold)
        boxes = objects.boxes.gather(1, index[..., None].expand(-1, -1, 4))
        # The others' offsets do not count, but an infinite one would make NaN in the backward pass.
        boxes = torch.where((labels > 0)[..., None], boxes, cxcywh_to_xyxy(anchors_cxcywh))
        exact = torch.promote_types(logits.dtype, torch.float32)
        target_offsets = encode_boxes(boxes, anchors_cxcywh, *self.variances).to(exact)
        smoothing = self.label_smoothing if self.training else 0.0
        loss_cls, loss_loc = multibox_loss(
            logits.to(exact),
            offsets.to(exact),
            labels,
            target_offsets,
            self.negatives_per_positive,
            smoothing,
            labelled_classes(targets, logits.device),
            class_weights,
        )
        if self.training:
            loss_loc = loss_loc * self.balance.weight
        positives = denominators["positives"]
        losses = {"loss_cls": loss_cls / positives, "loss_loc": loss_loc / positives}
        num_positive = (labels > 0).sum().float()
        num_images = torch.full_like(loss_cls, len(labels)).detach()
        return losses, {"positives": (num_positive, num_images)}

    def balance_losses(self, reduced: Mapping[str, float]) -> None:
        """Adjust the weight of the regression loss after a step.

        reduced: the losses of the step, reduced over its micro-batches and over all processes.
        """
        if self.balance.steps:
            sums = [reduced[f"{name}_unscaled"] * reduced["positives/sum"] for name in self.loss_names]
            weight = self.balance.weight
            of_step = send(torch.tensor(sums, dtype=widest_float(weight.device)), weight.device)
            weights = torch.stack([torch.ones_like(weight), weight])  # of classification and regression
            self.balance.observe(of_step / weights)
