"""Faster R-CNN as a function from pixels to boxes: what torchvision does image by image, here with fixed numbers of
rows, in which a score of 0 means that there is none; see `FasterRCNN.postprocess`."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.use.export.graph import PixelsToBoxes, best, clip
from toolkit.use.export.operators import nms_keep, roi_align_where

SMALLEST_BOX = 1e-2  # side in pixels, torchvision's


class FasterRcnnGraph(PixelsToBoxes):
    """For images of any size."""

    def candidates(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        detector = self.detector
        features = detector.backbone(self.pixels(images, sizes))
        proposals, objectness = self._proposals(features, sizes)
        count = proposals.shape[1]
        pooled = self._pool(features, proposals, objectness > 0)
        logits, deltas = detector.box_predictor(detector.box_head(pooled))
        heads = detector.roi_heads
        boxes = heads.box_coder.decode_single(deltas.float(), proposals.flatten(0, 1))
        classes = logits.shape[1] - 1
        boxes = boxes.reshape(-1, count, classes + 1, 4)[:, :, 1:].transpose(1, 2)  # (B, C, P, 4)
        boxes = clip(boxes.flatten(1, 2), sizes)
        scores = logits.float().softmax(-1).reshape(-1, count, classes + 1)[..., 1:].transpose(1, 2)
        real = (objectness > 0)[:, None] & (scores > heads.score_thresh)
        scores = scores.where(real, 0).flatten(1).where(_large(boxes, SMALLEST_BOX), 0)
        keep = nms_keep(boxes.reshape(-1, count, 4), scores.reshape(-1, count), heads.nms_thresh)
        scores = scores.where(keep.reshape(-1, classes * count), 0)
        labels = torch.arange(classes, device=images.device)[:, None].expand(-1, count).flatten()
        return best(boxes, scores, labels.expand(images.shape[0], -1), min(self.top_k, heads.detections_per_img))

    def _proposals(self, features, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Boxes (B, P, 4) of the first stage, best first, and their objectness (B, P), 0 where there is none."""
        detector, rpn = self.detector, self.detector.rpn
        anchors, logits, deltas, per_level = detector._predict_anchors(features)
        limit, kept, start = rpn.pre_nms_top_n(), [], 0
        for number in per_level:
            of_level = slice(start, start + number)
            start = start + number
            scores = pad(logits[:, of_level], (0, limit), value=-torch.inf)  # a small map has fewer
            scores, rows = scores.topk(limit, dim=1)
            rows = rows.clamp(max=number - 1)
            moved = deltas[:, of_level].gather(1, rows[..., None].expand(-1, -1, 4))
            boxes = rpn.box_coder.decode_single(moved.flatten(0, 1), anchors[of_level][rows].flatten(0, 1))
            boxes = clip(boxes.reshape(-1, limit, 4), sizes)
            scores = scores.sigmoid().where(_large(boxes, rpn.min_size), 0)
            scores = scores.where(scores >= rpn.score_thresh, 0)
            kept.append((boxes, scores.where(nms_keep(boxes, scores, rpn.nms_thresh), 0)))
        boxes, scores = (torch.cat(parts, dim=1) for parts in zip(*kept, strict=True))
        count = min(rpn.post_nms_top_n(), scores.shape[1])
        boxes, scores, _ = best(boxes, scores, torch.zeros_like(scores, dtype=torch.int64), count)
        return boxes, scores

    def _pool(self, features, boxes: Tensor, real: Tensor) -> Tensor:
        """(B * P, C, 7, 7): each box from the map of its size, as torchvision's `MultiScaleRoIAlign`."""
        pool = self.detector.box_pool
        maps = [features[name] for name in pool.featmap_names]
        batch, count = real.shape
        image = torch.arange(batch, device=boxes.device)[:, None].expand(-1, count).flatten()
        flat, real = boxes.flatten(0, 1), real.flatten()
        level = pool.map_levels([flat])
        pooled = [
            roi_align_where(each, flat, image, real & (level == i), scale, pool.output_size[0], pool.sampling_ratio)
            for i, (each, scale) in enumerate(zip(maps, pool.scales, strict=True))
        ]
        return sum(pooled[1:], start=pooled[0])


def _large(boxes: Tensor, side: float) -> Tensor:
    return ((boxes[..., 2] - boxes[..., 0]) >= side) & ((boxes[..., 3] - boxes[..., 1]) >= side)
