"""YOLOv3's anchors, target assignment and losses, as GluonCV 0.10 defines them, without a Python loop over boxes.

The predictions of all levels lie along one axis of length N: the deepest level (stride 32) first, within a level row by
row, within a cell anchor by anchor. Of A anchors per cell, the index is n = (predictions of the earlier levels) + (row
* width + column) * A + anchor.
Redmon & Farhadi, YOLOv3, 2018; gluoncv.model_zoo.yolo.yolo_target and gluoncv.loss.YOLOV3Loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from toolkit.base.batch import image_of_each, pad_rows
from toolkit.base.box_ops import widest_float
from toolkit.step.losses import times_class_weights

STRIDES = (32, 16, 8)
# Pairs of prediction and box compared at once; on a CPU so few that they stay in its cache. Does not change the result.
PAIRS_PER_CHUNK_BY_DEVICE = {"cpu": 2**18}
PAIRS_PER_CHUNK = 2**26


@dataclass(frozen=True)
class Grid:
    """The positions of the N predictions for an input of `image_hw` pixels.

    cells_xy: (N, 2) column and row of the cell. strides: (N, 1) pixels. anchors_wh: (N, 2) pixels.
    """

    image_hw: tuple[int, int]
    cells_xy: Tensor
    strides: Tensor
    anchors_wh: Tensor


def make_grid(image_hw: tuple[int, int], anchors: Tensor) -> Grid:
    """Return the grid for an input of (h, w) pixels, both multiples of 32, and A anchors per level (3, A, 2), width and
    height in pixels for strides 32, 16 and 8. It is on the device of the anchors."""
    cells_xy = []
    strides = []
    anchors_wh = []
    for stride, level_anchors in zip(STRIDES, anchors, strict=True):
        height = image_hw[0] // stride
        width = image_hw[1] // stride
        per_cell = len(level_anchors)
        shape = (height, width, per_cell)
        rows = torch.arange(height, device=anchors.device, dtype=anchors.dtype)
        columns = torch.arange(width, device=anchors.device, dtype=anchors.dtype)
        y = rows[:, None, None].expand(shape)
        x = columns[:, None].expand(shape)
        cells_xy.append(torch.stack((x, y), dim=-1).reshape(-1, 2))
        strides.append(anchors.new_full((height * width * per_cell, 1), stride))
        anchors_wh.append(level_anchors.repeat(height * width, 1))
    return Grid(
        image_hw,
        torch.cat(cells_xy),
        torch.cat(strides),
        torch.cat(anchors_wh),
    )


def decode_boxes(predictions: Tensor, grid: Grid) -> Tensor:
    """Return boxes (B, N, 4) xyxy in pixels of the network input, not clipped, for raw predictions (B, N, 5 + C)."""
    tx, ty, tw, th = predictions[..., :4].movedim(-1, 0).contiguous()  # planes (B, N): far faster than slices of rows
    column, row = grid.cells_xy.unbind(1)
    anchor_w, anchor_h = grid.anchors_wh.unbind(1)
    stride = grid.strides[:, 0]
    half_w = tw.exp() * anchor_w / 2
    half_h = th.exp() * anchor_h / 2
    x = (tx.sigmoid() + column) * stride
    y = (ty.sigmoid() + row) * stride
    return torch.stack((x - half_w, y - half_h, x + half_w, y + half_h), dim=-1)


@dataclass(frozen=True)
class AnchorAssignment:
    """The predictions that the T boxes of a batch are assigned to, and the targets of these predictions.

    image, index: (T,) int64, image in the batch and prediction of that image.
    kept: (T,) bool, False for crowd regions, and for boxes followed by another one with the same cell and anchor.
    ratio: (T,) weight of all loss terms of a box: its mixup ratio (1 without mixup) if kept, else 0.
    center, scale: (T, 2) targets: position within the cell (0 to 1), log of size / anchor.
    weight: (T,) weight of box losses, 2 minus the area of the box as a share of the image's.
    boxes, labels, crowd: (T, 4) xyxy pixels, (T,), (T,) bool, as given in the targets.
    counts: number of boxes of each image.
    """

    image: Tensor
    index: Tensor
    kept: Tensor
    ratio: Tensor
    center: Tensor
    scale: Tensor
    weight: Tensor
    boxes: Tensor
    labels: Tensor
    crowd: Tensor
    counts: tuple[int, ...]


def assign_boxes(targets: Sequence[dict], sizes_hw: Tensor, anchors: Tensor, grid: Grid) -> AnchorAssignment:
    """Assign each box to the cell of its centre and to the anchor, of all levels, with the most similar width and
    height (largest IoU on a common centre).

    Args:
        targets: one dict per image with boxes (n, 4) xyxy pixels, labels (n,), and optionally iscrowd (n,) and the
            mixup ratios `mixup` (n,).
        sizes_hw: (B, 2) height and width of each image without its padding; box weights are relative to it.
        anchors: (3, A, 2) pixels. Of anchors with equal IoU the first is chosen, and so it is for boxes without area.

    A centre on or beyond the right or lower border belongs to the last cell. Of several boxes with the same cell and
    anchor only the last is kept. Nothing is read from the device.
    """
    device = anchors.device
    dtype = anchors.dtype
    per_cell = anchors.shape[1]
    counts = tuple(len(t["labels"]) for t in targets)
    image = image_of_each(counts, device)
    boxes = _concatenate_field(targets, "boxes", 0, anchors).reshape(-1, 4)
    labels = _concatenate_field(targets, "labels", 0, image)
    crowd = _concatenate_field(targets, "iscrowd", 0, image).bool()

    sizes = boxes[:, 2:] - boxes[:, :2]
    centers = boxes[:, :2] + sizes * 0.5
    anchors_wh = anchors.reshape(-1, 2)  # of all levels
    best = _shape_iou(sizes, anchors_wh).argmax(dim=1)  # with 3 anchors a level, 4 is the second one of level 1
    level = best // per_cell
    stride = 32 >> level
    map_hw = grid.image_hw[0] // stride, grid.image_hw[1] // stride  # (T,) each, in cells
    in_cells, cells = _cells_of_centers(centers, sizes_hw.to(device)[image], stride, map_hw, grid.image_hw)
    index = _index_of_cells(cells, level, map_hw, grid.image_hw) * per_cell + best % per_cell

    count = len(grid.cells_xy)
    kept = _not_overwritten(image * count + index, crowd, len(counts) * count)
    image_areas = sizes_hw.to(device, dtype).prod(dim=1)
    return AnchorAssignment(
        image=image,
        index=index,
        kept=kept,
        ratio=_concatenate_field(targets, "mixup", 1, anchors) * kept,
        center=(in_cells - cells).clamp(0, 1).to(dtype),
        scale=(sizes.clamp(min=1) / anchors_wh[best]).log(),
        weight=2 - sizes.prod(dim=1) / image_areas[image],
        boxes=boxes,
        labels=labels,
        crowd=crowd,
        counts=counts,
    )


def _cells_of_centers(
    centers_xy: Tensor,
    sizes_hw: Tensor,
    stride: Tensor,
    map_hw: tuple[Tensor, Tensor],
    image_hw: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return the centres (T, 2) in units of cells of their level, and column and row (T, 2) int64 of their cells.

    Args:
        centers_xy: (T, 2) pixels.
        sizes_hw: (T, 2) size of each box's image without its padding.
        stride, map_hw: stride (T,) of each box's level, and height and width (T,) of its map in cells.
        image_hw: size of the network's input.
    """
    map_height, map_width = map_hw
    image_height, image_width = image_hw
    # In float64 and in this order, as the original: it decides on which side of a cell border a centre falls.
    x, y = centers_xy.to(widest_float(centers_xy.device)).unbind(1)
    in_cells = torch.stack((x / image_width * map_width, y / image_height * map_height), dim=1)
    last_cell = (sizes_hw.flip(1) - 1) // stride[:, None]  # of a width of 100 pixels at stride 32: column 3
    # A NaN, which the guard reports, is nowhere; the losses of its box are NaN too.
    cells = torch.minimum(in_cells.nan_to_num().clamp(min=0).long(), last_cell)
    return in_cells, cells


def _index_of_cells(
    cells_xy: Tensor, level: Tensor, map_hw: tuple[Tensor, Tensor], image_hw: tuple[int, int]
) -> Tensor:
    """Return the index (T,) of cells, given by column and row (T, 2) and their level (T,), among those of all levels.

    An input of 64 x 96 pixels has 2 rows of 3 cells at stride 32 and 4 rows of 6 at stride 16. Level 1 therefore
    begins at index 6, level 2 at 6 + 24, and column 5 of row 1 at level 1 has index 6 + 1 * 6 + 5.
    """
    column, row = cells_xy.unbind(1)
    cells_of_first_level = (image_hw[0] // 32) * (image_hw[1] // 32)
    # Each level has 4 times the cells of the one before: 0, 1 and 1 + 4 times those of the first level come earlier.
    times = ((1 << 2 * level) - 1) // 3
    return cells_of_first_level * times + row * map_hw[1] + column


def _not_overwritten(places: Tensor, crowd: Tensor, num_places: int) -> Tensor:
    """Return (T,) bool, False for crowd regions and for boxes whose place (T,) a later box takes."""
    order = torch.arange(len(places), device=places.device).masked_fill(crowd, -1)
    winner = places.new_full((num_places,), -1)
    winner.scatter_reduce_(0, places, order, "amax")
    return (winner[places] == order) & ~crowd


def _concatenate_field(targets: Sequence[dict], key: str, default: float, like: Tensor) -> Tensor:
    """Join `target[key]` of all images, with the dtype and device of `like`; `default` for images without the key."""
    values = []
    for target in targets:
        if key in target:
            values.append(target[key].to(like))
        else:
            values.append(like.new_full((len(target["labels"]),), default))
    return torch.cat(values) if values else like.new_zeros(0)


def _shape_iou(sizes1_wh: Tensor, sizes2_wh: Tensor) -> Tensor:
    """Return the IoU (T, K) of boxes (T, 2) and (K, 2) put on a common centre; 0 for boxes without area."""
    inner = torch.minimum(sizes1_wh[:, None], sizes2_wh[None]).prod(dim=-1)
    area1 = sizes1_wh.prod(dim=-1)[:, None]
    area2 = sizes2_wh.prod(dim=-1)[None]
    return inner / (area1 + area2 - inner + 1e-15)


@torch.no_grad()
def objectness_targets(
    pred_boxes: Tensor,
    assigned: AnchorAssignment,
    sizes_hw: Tensor,
    grid: Grid,
    ignore_iou: float,
) -> Tensor:
    """Return the target (B, N) of each prediction: the mixup ratio (1 without mixup) if a box is assigned to it, else
    0, or -1 if it is ignored.

    Ignored are predictions whose box has an IoU above `ignore_iou` with any box of the image, or lies with more than
    this share of its area in a crowd region, and predictions of cells that begin in the padding of an image smaller
    than the batch.

    Args:
        pred_boxes: (B, N, 4) xyxy pixels.
        sizes_hw: (B, 2) height and width of each image without its padding.
    """
    ignored = _covered(pred_boxes, assigned, ignore_iou) | in_padding(sizes_hw, grid)
    flat = assigned.image * pred_boxes.shape[1] + assigned.index
    # amax: an overwritten box (ratio 0) shares its place with the kept one, and the order of writes is undefined.
    ratio = pred_boxes.new_zeros(ignored.numel())
    ratio.scatter_reduce_(0, flat, assigned.ratio.to(pred_boxes.dtype), "amax")
    ratio = ratio.view_as(ignored)
    return torch.where(ratio > 0, ratio, -ignored.to(ratio.dtype))


def in_padding(sizes_hw: Tensor, grid: Grid) -> Tensor:
    """Return a (B, N) bool mask, True for predictions of cells that begin in the padding of their image.

    sizes_hw: (B, 2) height and width of each image without its padding.
    """
    begin_xy = grid.cells_xy * grid.strides  # (N, 2) pixels
    sizes_wh = sizes_hw.flip(1)[:, None].to(begin_xy)  # (B, 1, 2)
    return (begin_xy >= sizes_wh).any(dim=-1)


def _covered(pred_boxes: Tensor, assigned: AnchorAssignment, threshold: float) -> Tensor:
    """Return (B, N) bool: IoU with a box > threshold, or that share of the prediction's area is inside a crowd region.

    inter / (area_p + area_g - inter) > t is inter > t / (1 + t) * (area_p + area_g): no division, and a crowd region is
    the same comparison with other constants, inter > t * area_p.
    """
    left, top, right, bottom = assigned.boxes.unbind(1)
    areas = (right - left) * (bottom - top)
    factor = torch.where(assigned.crowd, threshold, threshold / (1 + threshold))
    of_truth = torch.where(assigned.crowd, 0, areas)
    columns = torch.stack((left, top, right, bottom, factor, of_truth), dim=-1)  # (T, 6)
    padded = pad_rows(columns.to(pred_boxes.dtype), assigned.counts)  # (B, M, 6)
    truth_planes = padded.movedim(-1, 0).contiguous()[..., None]  # (6, B, M, 1)
    planes = pred_boxes.movedim(-1, 0).contiguous()[:, :, None]  # (4, B, 1, N)
    pairs_of_image = max(1, padded.shape[1] * pred_boxes.shape[1])
    at_once = PAIRS_PER_CHUNK_BY_DEVICE.get(pred_boxes.device.type, PAIRS_PER_CHUNK)
    images = max(1, at_once // pairs_of_image)
    covered = []
    for pred, truth in zip(planes.split(images, dim=1), truth_planes.split(images, dim=1), strict=True):
        covered.append(_over_threshold(*pred, *truth))
    return torch.cat(covered)


def _over_threshold(left, top, right, bottom, x0, y0, x1, y1, factor, gt_area) -> Tensor:
    """Return (b, N) bool, of planes (b, 1, N) of predictions and (b, M, 1) of boxes; see `_covered`."""
    inter = torch.minimum(right, x1).sub_(torch.maximum(left, x0)).clamp_(min=0)
    inter *= torch.minimum(bottom, y1).sub_(torch.maximum(top, y0))  # a negative height fails the comparison as well
    area = (right - left) * (bottom - top)  # (b, 1, N)
    least = torch.addcmul(gt_area * factor, area, factor)  # (area + gt_area) * factor
    return (inter > least).any(dim=1)


def class_targets(labels: Tensor, num_classes: int, label_smoothing: bool) -> Tensor:
    """Return the class targets (T, C) for the labels (T,) of T boxes: 1 for the class and 0 for the others, or, with
    label smoothing, 1 - s and s, where s = min(1 / C, 1 / 40)."""
    smooth = min(1 / num_classes, 1 / 40) if label_smoothing else 0.0
    one_hot = labels[:, None] == torch.arange(num_classes, device=labels.device)
    return torch.where(one_hot, 1 - smooth, smooth)


def yolov3_losses(
    predictions: Tensor,
    objectness: Tensor,
    assigned: AnchorAssignment,
    label_smoothing: bool = False,
    labelled: Tensor | None = None,
    class_weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the four losses, each summed over the batch, in the dtype of the predictions.

    Args:
        predictions: (B, N, 5 + C) raw tx, ty, tw, th, objectness, classes.
        objectness: (B, N), see `objectness_targets`; a mixup ratio is the weight of its term, not its label.
        labelled: (B, C) bool, the classes that each image labels; None: all.
        class_weights: (C,), `Detector.class_weights`.

    loss_obj: binary cross-entropy of every prediction that is not ignored.
    loss_center: binary cross-entropy of sigmoid(tx, ty). loss_scale: L1 distance of tw, th from their targets. Both are
    weighted by 2 - w * h, the area of the box as a share of the image's. loss_cls: binary cross-entropy of all classes.
    These three losses are computed for predictions with an assigned box only.
    """
    is_negative = (objectness == 0).to(objectness.dtype)
    weight = torch.where(objectness > 0, objectness, is_negative)
    positive = (objectness > 0).to(predictions.dtype)
    logits, at_boxes = _objectness_and_rows(predictions, assigned)
    ratio = assigned.ratio.to(predictions.dtype)[:, None]
    ratio_weight = ratio * assigned.weight[:, None].to(predictions.dtype)
    num_classes = predictions.shape[2] - 5
    classes = class_targets(assigned.labels, num_classes, label_smoothing).to(predictions.dtype)
    center = assigned.center.to(predictions.dtype)
    center_weight = ratio_weight.expand_as(center)
    class_weight = ratio.expand_as(classes)
    if labelled is not None:
        is_class = assigned.labels[:, None] == torch.arange(num_classes, device=classes.device)
        class_weight = class_weight.where(labelled[assigned.image] | is_class, 0)
    if class_weights is not None:
        class_weight = times_class_weights(class_weight, assigned.labels, class_weights)
    loss_obj = bce(logits, positive, weight, reduction="sum")
    loss_center = bce(at_boxes[:, :2], center, center_weight, reduction="sum")
    distance = (at_boxes[:, 2:4] - assigned.scale).abs()
    loss_scale = (ratio_weight * distance).sum()
    loss_cls = bce(at_boxes[:, 5:], classes, class_weight, reduction="sum")
    return {
        "loss_obj": loss_obj,
        "loss_center": loss_center,
        "loss_scale": loss_scale,
        "loss_cls": loss_cls,
    }


def _objectness_and_rows(predictions: Tensor, assigned: AnchorAssignment) -> tuple[Tensor, Tensor]:
    """Return objectness logits (B, N) and the predictions (T, 5 + C) at the boxes.

    Picked by one index: the gradient of each slice of its own would fill an array as large as the predictions.
    """
    # With 7 outputs the objectness of prediction 3 is number 3 * 7 + 4 = 25 of all numbers; its whole row is 21 to 27.
    batch, count, outputs = predictions.shape
    total = batch * count
    objectness_at = torch.arange(total, device=predictions.device) * outputs + 4
    row_starts = (assigned.image * count + assigned.index) * outputs
    rows_at = row_starts[:, None] + torch.arange(outputs, device=predictions.device)  # (T, 5 + C)
    picked = predictions.flatten().index_select(0, torch.cat((objectness_at, rows_at.flatten())))
    objectness = picked[:total].view(batch, count)
    rows = picked[total:].view(-1, outputs)
    return objectness, rows


def kmeans_anchors(
    sizes_wh: np.ndarray,
    clusters: int = 9,
    seed: int = 0,
    rounds: int = 300,
) -> tuple[np.ndarray, float]:
    """Compute anchors by k-means with 1 - IoU of centred boxes as distance (Redmon & Farhadi, YOLO9000, section 2).

    Args:
        sizes_wh: (n, 2) widths and heights of boxes in pixels of the network input, all positive, n >= clusters.
        clusters: number of anchors.
        seed: of the k-means++ start; equal seeds give equal anchors.
        rounds: largest number of iterations.

    Returns (clusters, 2) float64 widths and heights, from small to large area, and the mean over boxes of the IoU with
    the nearest anchor. Cluster centres are medians, which outliers move less than means.
    """
    sizes = np.asarray(sizes_wh, dtype=np.float64)
    generator = np.random.default_rng(seed)
    anchors = sizes[generator.integers(len(sizes))][None]
    while len(anchors) < clusters:
        distance = (1 - shape_iou(sizes, anchors).max(axis=1)) ** 2
        probabilities = distance / distance.sum() if distance.sum() > 0 else None
        chosen = generator.choice(len(sizes), p=probabilities)
        anchors = np.vstack((anchors, sizes[chosen]))
    nearest = None
    for _ in range(rounds):
        previous = nearest
        nearest = shape_iou(sizes, anchors).argmax(axis=1)
        if previous is not None and (nearest == previous).all():
            break
        for k in np.unique(nearest):
            anchors[k] = np.median(sizes[nearest == k], axis=0)
    by_area = np.argsort(anchors.prod(axis=1), kind="stable")
    anchors = anchors[by_area]
    best_iou = shape_iou(sizes, anchors).max(axis=1)
    return anchors, float(best_iou.mean())


def shape_iou(sizes1_wh: np.ndarray, sizes2_wh: np.ndarray) -> np.ndarray:
    """Return the IoU (n, k) of boxes with sizes (n, 2) and (k, 2), width and height, put on a common centre. Sizes must
    be positive."""
    inner = np.minimum(sizes1_wh[:, None], sizes2_wh[None]).prod(axis=2)
    area1 = sizes1_wh.prod(axis=1)[:, None]
    area2 = sizes2_wh.prod(axis=1)[None]
    return inner / (area1 + area2 - inner)
