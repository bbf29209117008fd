"""Faster R-CNN as one function from pixels to boxes, which exporters can trace. The first stage, whose number of
proposals varies, returns a fixed number of rows here; rows with a score of 0 are empty. The second stage is the
detector's own."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torchvision.ops import MultiScaleRoIAlign

from toolkit.base.batch import normalize_images
from toolkit.base.box_ops import clip_boxes
from toolkit.detectors.faster_rcnn.regions import apply_deltas
from toolkit.models.nms import nms_keep
from toolkit.tools.export.graph import PixelsToBoxes, best
from toolkit.tools.export.operators import roi_align_where


class FasterRcnnGraph(PixelsToBoxes):
    """Faster R-CNN as one function from pixels to boxes, for images of any size; see `PixelsToBoxes`."""

    def __init__(self, detector: nn.Module, top_k: int):
        super().__init__(detector, top_k)
        self.smallest_side = max(33, 2 * detector.stride + 1)  # one more map is pooled from the coarsest one
        self.masks = "box" if detector.predicts_masks else ""

    def found(self, images: Tensor, sizes: Tensor) -> tuple:
        detector = self.detector
        features = detector.backbone(normalize_images(images, sizes, detector.mean, detector.std))
        proposals, objectness = self._proposals(features, sizes)
        pooled = pool_where(detector.box_pool, features, proposals, objectness > 0)
        logits, deltas = detector.roi_heads.box_predictor(detector.box_head(pooled))
        count = proposals.shape[1]
        weights = detector.roi_heads.box_coder.weights
        deltas = deltas.float().unflatten(1, (-1, 4))[:, 1:]
        boxes = apply_deltas(deltas, proposals.flatten(0, 1)[:, None], weights)
        boxes = boxes.unflatten(0, (-1, count))  # (B, P, C, 4)
        scores = logits.float().softmax(-1)[:, 1:]
        scores = scores.unflatten(0, (-1, count))
        found = detector.best_detections(
            boxes,
            scores.where((objectness > 0)[..., None], 0),
            sizes,
        )
        if not detector.predicts_masks:
            return found
        boxes, _, labels = found
        return *found, {"masks": self._masks(features, boxes, labels)}

    def _masks(self, features, boxes: Tensor, labels: Tensor) -> Tensor:
        """Return the masks (B, K, 28, 28) of detections, computed for empty rows too, whose number is not known."""
        heads = self.detector.roi_heads
        pooled = pool_where(heads.mask_roi_pool, features, boxes, labels >= 0)
        logits = heads.mask_predictor(heads.mask_head(pooled)).float()  # (B * K, 1 + C, 28, 28)
        classes = (1 + labels).flatten()
        index = classes[:, None, None, None].expand(-1, 1, *logits.shape[2:])
        masks = logits.gather(1, index)[:, 0].sigmoid()
        return masks.unflatten(0, (-1, labels.shape[1]))

    def _proposals(self, features, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return P boxes per image (B, P, 4) of the first stage, best first, and their objectness (B, P), 0 in empty
        rows. P is the largest number of proposals, however many there are."""
        anchors, logits, deltas, per_level = self.detector._predict_anchors(features)
        kept = []
        start = 0
        for number in per_level:
            of_level = slice(start, start + number)
            start = start + number
            kept.append(self._proposals_of_level(anchors, logits, deltas, of_level, number, sizes))
        boxes, scores = (torch.cat(parts, dim=1) for parts in zip(*kept, strict=True))
        count = min(self.detector.rpn.post_nms_top_n(), scores.shape[1])
        no_labels = torch.zeros_like(scores, dtype=torch.int64)
        boxes, scores, _ = best(boxes, scores, no_labels, count)
        return boxes, scores

    def _proposals_of_level(
        self, anchors: Tensor, logits: Tensor, deltas: Tensor, of_level: slice, number: int, sizes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return K boxes per image (B, K, 4) of the anchors of one map, and their objectness (B, K), 0 in empty rows
        and for suppressed boxes. K is `pre_nms_top_n`, however small the map is.

        Args:
            anchors, logits, deltas: of all maps, see `_predict_anchors` of `FasterRCNN`.
            of_level, number: which rows are of this map, and how many.
            sizes: (B, 2) height and width of the images.
        """
        rpn = self.detector.rpn
        limit = rpn.pre_nms_top_n()
        # The number of anchors is known at run time only, and topk refuses to take more than there are. So K rows are
        # appended that lose against every anchor. Of 12 anchors and K = 1000, topk takes the rows 0 to 11, and 988 of
        # the rows 12 to 1011. These are then replaced by row 11, which exists; their score is sigmoid(-inf) = 0.
        scores = pad(logits[:, of_level], (0, limit), value=-torch.inf)
        scores, rows = scores.topk(limit, dim=1)
        rows = rows.clamp(max=number - 1)
        moved = deltas[:, of_level].gather(1, rows[..., None].expand(-1, -1, 4))
        boxes = rpn.box_coder.decode_single(
            moved.flatten(0, 1),
            anchors[of_level][rows].flatten(0, 1),
        )
        boxes = clip_boxes(boxes.reshape(-1, limit, 4), sizes)
        scores = scores.sigmoid().where(_large(boxes, rpn.min_size), 0)
        scores = scores.where(scores >= rpn.score_thresh, 0)
        keep = nms_keep(boxes, scores, rpn.nms_thresh)
        return boxes, scores.where(keep, 0)


def pool_where(pool: MultiScaleRoIAlign, features, boxes: Tensor, real: Tensor) -> Tensor:
    """Return pooled features (B * P, C, h, w) of P boxes per image, h and w being the output size of `pool`.

    Args:
        pool: says which feature map is used for the size of a box, and how.
        features: feature maps by name.
        boxes: (B, P, 4) xyxy in pixels.
        real: (B, P) bool; the features of boxes with False are 0.
    """
    maps = [features[name] for name in pool.featmap_names]
    batch, count = real.shape
    image = torch.arange(batch, device=boxes.device)[:, None].expand(-1, count).flatten()
    flat = boxes.flatten(0, 1)
    real = real.flatten()
    level = pool.map_levels([flat]) if len(maps) > 1 else torch.zeros_like(image)
    pooled = [
        roi_align_where(feature, flat, image, real & (level == i), scale, pool.output_size[0], pool.sampling_ratio)
        for i, (feature, scale) in enumerate(zip(maps, pool.scales, strict=True))
    ]
    return sum(pooled[1:], start=pooled[0])


def _large(boxes: Tensor, side: float) -> Tensor:
    left, top, right, bottom = boxes.unbind(-1)
    return (right - left >= side) & (bottom - top >= side)
