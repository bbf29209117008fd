"""The DETR family as a function from pixels to boxes."""

import torch
from torch import Tensor, nn

from toolkit.box_ops import cxcywh_to_xyxy, denormalize_boxes
from toolkit.models.detr.deformable_detr import DeformableDetr
from toolkit.models.detr.detr import Detr
from toolkit.use.export.graph import PixelsToBoxes, best


class SigmoidGraph(PixelsToBoxes):
    """The best pairs of query and class, as `focal_detections`."""

    def candidates(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, boxes = self.last_layer(images, sizes)
        scores = logits.sigmoid()
        labels = torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
        queries = torch.arange(scores.shape[1], device=scores.device)[:, None].expand_as(scores)
        count = min(self.top_k, scores.shape[1] * scores.shape[2])
        scores, chosen = scores.flatten(1).topk(count, dim=1)
        rows = queries.flatten(1).gather(1, chosen)
        return boxes.gather(1, rows[..., None].expand(-1, -1, 4)), scores, labels.flatten(1).gather(1, chosen)

    def last_layer(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, Q, C) and boxes (B, Q, 4) xyxy pixels."""
        outputs = self.detector(images, sizes)
        logits, boxes = outputs["logits"].float(), outputs["boxes"].float()
        if logits.ndim == 4:  # of every decoder layer
            logits, boxes = logits[-1], boxes[-1]
        return logits, denormalize_boxes(cxcywh_to_xyxy(boxes), sizes)


class FixedSigmoidGraph(SigmoidGraph):
    """Of detectors that keep something of the image size, such as the anchors of RT-DETR."""

    sides = "fixed"


class SoftmaxGraph(SigmoidGraph):
    """One detection per query, as `detr_detections`."""

    def candidates(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, boxes = self.last_layer(images, sizes)
        scores, labels = logits.softmax(-1)[..., :-1].max(-1)
        return best(boxes, scores, labels, min(self.top_k, scores.shape[1]))


class FixedSoftmaxGraph(SoftmaxGraph):
    """Of YOLOS, whose position embeddings are made for one size."""

    sides = "fixed"


def graph_class(detector: nn.Module) -> type[PixelsToBoxes]:
    """By how its classes are scored, and whether it takes images of several sizes at all."""
    if isinstance(detector, Detr):
        return FixedSoftmaxGraph if detector.fixed_size else SoftmaxGraph
    one_size = detector.fixed_size or isinstance(detector, DeformableDetr)  # whose maps are cut by their sizes
    return FixedSigmoidGraph if one_size else SigmoidGraph
