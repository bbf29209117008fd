"""SSD as a function from pixels to boxes; see `SSD.postprocess`."""

import torch
from torch import Tensor

from toolkit.box_ops import denormalize_boxes
from toolkit.models.ssd.criterion import decode_offsets
from toolkit.use.export.graph import PixelsToBoxes, clip
from toolkit.use.export.operators import nms_keep


class SsdGraph(PixelsToBoxes):
    """The anchors are those of one size: SSD asks its backbone for the sizes of the maps."""

    sides = "fixed"

    def candidates(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        detector = self.detector
        outputs = detector(images, sizes)
        boxes = decode_offsets(outputs["offsets"].float(), outputs["anchors"], *detector.multibox.variances)
        boxes = clip(denormalize_boxes(boxes, sizes), sizes)
        scores = outputs["logits"].float().softmax(-1)[..., 1:].transpose(1, 2)  # (B, C, A)
        classes = scores.shape[1]
        scores, anchor = scores.topk(min(detector.candidates_per_class, scores.shape[2]), dim=2)
        boxes = boxes.gather(1, anchor.flatten(1)[..., None].expand(-1, -1, 4))  # (B, C * N, 4)
        count = scores.shape[2]
        scores = scores.where(scores > detector.score_threshold, 0)
        keep = nms_keep(boxes.reshape(-1, count, 4), scores.reshape(-1, count), detector.nms_threshold)
        labels = torch.arange(classes, device=images.device)[:, None].expand_as(scores)
        return boxes, scores.flatten(1).where(keep.reshape(-1, classes * count), 0), labels.flatten(1)
