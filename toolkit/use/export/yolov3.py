"""YOLOv3 as a function from pixels to boxes; see `YOLOv3.postprocess`."""

import torch
from torch import Tensor

from toolkit.models.yolov3.model import class_scores
from toolkit.models.yolov3.targets import decode_boxes
from toolkit.use.export.graph import PixelsToBoxes, best, clip
from toolkit.use.export.operators import nms_keep


class Yolov3Graph(PixelsToBoxes):
    """For images of any size whose sides are multiples of 32, from 64 on."""

    sides = "multiples"

    def candidates(self, images: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        detector, classes = self.detector, self.detector.num_classes
        predictions, grid = detector.flat_predictions(detector.raw_maps(self.pixels(images, sizes)))
        boxes, scores = decode_boxes(predictions, grid), class_scores(predictions)
        count = detector.nms_topk
        scores = scores.flatten(1)
        scores, picked = torch.nn.functional.pad(scores, (0, count)).topk(count, dim=1)  # small images have fewer
        labels = picked % classes
        rows = (picked // classes).clamp(max=boxes.shape[1] - 1)
        boxes = boxes.gather(1, rows[..., None].expand(-1, -1, 4))
        scores = scores.where(scores > detector.score_threshold, 0)
        of_class = labels[:, None] == torch.arange(classes, device=images.device)[:, None]  # (B, C, K)
        by_class = scores[:, None].where(of_class, 0)
        each = boxes[:, None].expand(-1, classes, -1, -1)
        keep = nms_keep(each.reshape(-1, count, 4), by_class.reshape(-1, count), detector.nms_threshold)
        keep = keep.reshape(-1, classes, count).any(1)
        return best(clip(boxes, sizes), scores.where(keep, 0), labels, min(self.top_k, count))
