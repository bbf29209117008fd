"""An adapter with which any detector that has feature maps can replace the Faster R-CNN below a relation head."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.ops.poolers import LevelMapper

from toolkit.base.batch import rows_of, send, sizes_on_host, to_host
from toolkit.base.box_ops import pairwise_iou
from toolkit.base.errors import BadInput
from toolkit.detectors.faster_rcnn.model import of_one_class_each, with_boxes_on_host
from toolkit.detectors.faster_rcnn.regions import LevelPool, clip, limits_whwh
from toolkit.models.detector import Detector, kept_maps

MAX_CANDIDATES = 1000  # predictions of an image that enter the suppression, as many as Faster R-CNN has proposals
FOUND_IOU = 0.5  # from which a prediction is one of a given box
MIN_PROBABILITY = 1e-6  # probability: logarithms stay finite


class SeenMaps(dict[str, Tensor]):
    """Feature maps by name, with the detector's outputs for the same images.

    outputs: result of the detector's forward. boxes (B, N, 4), scores (B, N, C): result of its `all_predictions`,
    without gradient.
    """

    outputs: dict
    boxes: Tensor
    scores: Tensor


class DetectorBelow(nn.Module):
    """A detector with those methods of a `FasterRCNN` that a scene graph calls, with the same arguments and results.

    Box features are pooled from the detector's feature maps, at the level that suits the size of the box. `laterals`, 1
    x 1 convolutions, project the maps to one width; they are trained with the relation head, even if the detector is
    frozen. A given box gets the class scores of the prediction that overlaps it, see `scores_of`.

    Args:
        inner: the detector.
        map_channels: width of the projected maps.
        representation_size: width of the output of box heads on these maps.
        score_threshold, nms_threshold: thresholds of `detect_with_logits`.
        passes_targets: give the detector the targets, because it is trained too, and its outputs must include the input
            of its criterion.

    Raises:
        BadInput: the detector has no feature maps, or their strides do not double.
    """

    def __init__(
        self,
        inner: Detector,
        map_channels: int,
        representation_size: int,
        *,
        score_threshold: float,
        nms_threshold: float,
        passes_targets: bool,
    ):
        super().__init__()
        self.inner = inner
        self.map_channels = map_channels
        self.representation_size = representation_size
        self.score_threshold = score_threshold
        self.nms_threshold = nms_threshold
        self.passes_targets = passes_targets
        channels = _channels(inner)
        self.laterals = nn.ModuleDict()
        for stride in sorted(channels):
            self.laterals[str(stride)] = nn.Conv2d(channels[stride], map_channels, 1)
        self.box_pool = level_pool(sorted(channels))
        for name in ("mean", "std", "stride", "fixed_size", "loss_names", "default_weights", "divided_by"):
            setattr(self, name, getattr(inner, name))

    def make_box_head(self) -> nn.Module:
        """Build a box head with random weights that converts the pooled features (R, C, 7, 7) of R boxes to (R,
        `representation_size`); the detector has none."""
        return TwoMLPHead(self.map_channels * 7 * 7, self.representation_size)

    def features(
        self,
        images: Tensor,
        sizes: Tensor,
        targets: Sequence[Mapping] | None = None,
    ) -> tuple[SeenMaps, list[tuple[int, int]]]:
        """Return maps and image sizes as `FasterRCNN.features` does; the maps also hold the detector's outputs, see
        `SeenMaps`."""
        with kept_maps(self.inner.map_taps()) as tapped:
            outputs = self.inner(images, sizes, targets if self.passes_targets else None)
        maps = SeenMaps()
        for name, lateral in self.laterals.items():
            maps[name] = lateral(tapped[int(name)])
        maps.outputs = outputs
        with torch.no_grad():
            maps.boxes, maps.scores = self.inner.all_predictions(outputs, sizes)
        return maps, sizes_on_host(sizes, targets)

    def from_features(self, maps: SeenMaps, images_hw: Sequence, targets: Sequence[Mapping] | None = None) -> dict:
        """Return the detector's outputs, which `criterion` takes. `images_hw` and `targets` are not used: the detector
        had the targets when it computed the maps."""
        return maps.outputs

    @torch.no_grad()
    def class_logits(self, maps: SeenMaps, boxes: Sequence[Tensor], pooled: Tensor) -> Tensor:
        """Return class logits (R, 1 + C), background first, of given boxes (R_i, 4) of each image i, R in total; see
        `scores_of`. `pooled` is not used."""
        scores = []
        for predicted, predicted_scores, given in zip(maps.boxes, maps.scores, boxes, strict=True):
            scores.append(scores_of(predicted, predicted_scores, given))
        return distribution_logits(torch.cat(scores))

    @torch.no_grad()
    def detect_with_logits(
        self,
        maps: SeenMaps,
        images_hw: Sequence[tuple[int, int]],
        *,
        top_k: int = 80,
        further_boxes: Sequence[Tensor] | None = None,
        outputs: Mapping | None = None,
    ) -> list[dict[str, Tensor]]:
        """Return detections in the form of `FasterRCNN.detect_with_logits`. Each has the same box for every class. Of
        `further_boxes`, only those that no detection overlaps are added. `outputs` is not used."""
        boxes = clip(maps.boxes, limits_whwh(images_hw, maps.boxes.device)[:, None])
        count = min(MAX_CANDIDATES, maps.scores.shape[1])
        rows = maps.scores.amax(2).topk(count, dim=1).indices  # (B, count)
        logits = distribution_logits(rows_of(maps.scores, rows).flatten(0, 1))
        candidates = rows_of(boxes, rows).flatten(0, 1)  # (B * count, 4)
        detections = of_one_class_each(
            logits,
            candidates[:, None].expand(-1, logits.shape[1], -1),
            [count] * len(rows),
            images_hw,
            self.score_threshold,
            self.nms_threshold,
            top_k,
        )
        if further_boxes is None:
            return detections
        return _with_missed(detections, further_boxes, boxes, maps.scores, top_k)

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """Return the detector's own denominators, see `Detector.denominators`."""
        return self.inner.denominators(targets)

    def criterion(self, outputs: Mapping, targets: Sequence[Mapping], denominators: Mapping) -> tuple[dict, dict]:
        """Return the detector's own losses and metrics, see `Detector.criterion`."""
        return self.inner.criterion(outputs, targets, denominators)

    def resolved_options(self) -> dict:
        """Return the detector's settings with the values in use."""
        return self.inner.resolved_options()


def _channels(inner: Detector) -> dict[int, int]:
    """Return the channels of the detector's maps by their stride."""
    name = inner.options["architecture"]
    taps = inner.map_taps()
    channels = {}
    for tap in taps:
        channels |= zip(tap.strides, tap.channels, strict=True)
    if not channels:
        cause = "its class has no map_taps(), see toolkit.models.detector.Detector"
        raise BadInput(f"{name} has no feature maps for a relation head: {cause}")
    strides = sorted(channels)
    if strides[1:] != [stride * 2 for stride in strides[:-1]]:
        needed = "strides that double, such as 8, 16, 32"
        raise BadInput(f"{name} has feature maps of strides {strides}; a relation head needs {needed}")
    return channels


def level_pool(strides: Sequence[int], size: int = 7) -> LevelPool:
    """Build a RoI pooling to (size, size) from feature maps that are named by their stride. Each box is pooled from the
    map that suits its size, as in feature pyramids."""
    pool = LevelPool([str(stride) for stride in strides], size, 2)
    pool.scales = [1 / stride for stride in strides]
    first_level = int(strides[0]).bit_length() - 1  # 3 for a stride of 8
    last_level = int(strides[-1]).bit_length() - 1
    pool.map_levels = LevelMapper(
        first_level,
        last_level,
        pool.canonical_scale,
        pool.canonical_level,
    )
    return pool


def _with_missed(
    detections: Sequence[Mapping],
    given: Sequence[Tensor],
    boxes: Tensor,
    scores: Tensor,
    top_k: int,
) -> list[dict[str, object]]:
    """Replace the last detections of each image by the given boxes that no detection overlaps.

    boxes: (B, N, 4) of all predictions. scores: (B, N, C).
    """
    overlapped = []
    for further, image in zip(given, detections, strict=True):
        iou = pairwise_iou(further, image["boxes"])
        overlapped.append((iou >= FOUND_IOU).any(1))
    missed = [(~mask).nonzero()[:top_k, 0] for mask in to_host(overlapped)]
    together = []
    images = zip(given, missed, detections, boxes, scores, strict=True)
    for further, rows, image, image_boxes, image_scores in images:
        further = further[send(rows, further.device)]
        logits = distribution_logits(scores_of(image_boxes, image_scores, further))
        best, label = logits.softmax(1)[:, 1:].max(1)
        order = best.sort(descending=True, stable=True).indices
        more = {
            "boxes": further,
            "labels": label,
            "scores": best,
            "logits": logits,
            "boxes_per_class": further[:, None].expand(-1, logits.shape[1], -1),
        }
        room = top_k - len(further)
        together.append({name: torch.cat([image[name][:room], more[name][order]]) for name in more})
    return with_boxes_on_host(together)


def distribution_logits(scores: Tensor) -> Tensor:
    """Convert class scores (N, C) to logits (N, 1 + C) whose softmax returns the scores. The background comes first and
    gets the remainder to 1.

    Scores that sum to more than 1, as sigmoids may, are divided by their sum.
    """
    scores = scores.float()
    scores = scores / scores.sum(1, keepdim=True).clamp(min=1)
    left = 1 - scores.sum(1, keepdim=True)
    probabilities = torch.cat([left, scores], 1)
    return probabilities.clamp(min=MIN_PROBABILITY).log()


def scores_of(boxes: Tensor, scores: Tensor, given: Tensor) -> Tensor:
    """Return class scores (R, C) for R boxes, `given` (R, 4), of an image, taken from its predictions, boxes (N, 4) and
    scores (N, C).

    Each given box gets the scores of the prediction with the largest IoU x score among those with an IoU of at least
    0.5, or, if there is none, of the prediction with the largest IoU.
    """
    iou = pairwise_iou(given, boxes)
    quality = torch.where(iou >= FOUND_IOU, 1 + iou * scores.amax(1), iou)
    return scores[quality.argmax(1)]
