"""YOLOv3 (Redmon & Farhadi, 2018) as GluonCV trains it, on timm's Darknet-53 or any timm backbone.

`python -m toolkit.tools.anchors --annotations FILE` computes anchors for a data set.
Targets and losses are in the module `targets` beside this one; docs/differences.md lists the differences from GluonCV.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn
from torch.nn.functional import interpolate

from toolkit.base.batch import normalize_images
from toolkit.base.box_ops import box_iou, clip_boxes, resize_boxes
from toolkit.base.errors import BadInput
from toolkit.detectors.yolov3.options import Yolov3Options
from toolkit.detectors.yolov3.targets import (
    STRIDES,
    Grid,
    assign_boxes,
    decode_boxes,
    in_padding,
    make_grid,
    objectness_targets,
    yolov3_losses,
)
from toolkit.models.backbones import group_norms, image_statistics, leaves_stages, timm_features
from toolkit.models.detector import Detector, MapTap
from toolkit.models.nms import best_rows, sorted_nms
from toolkit.step.losses import labelled_classes

LEAKY_SLOPE = 0.1
TIMM_LEAKY_SLOPE = 0.01


def conv_bn_leaky(in_channels: int, out_channels: int, kernel_size: int) -> nn.Sequential:
    """Build a convolution without bias, batch norm (eps 1e-5, momentum 0.1), leaky ReLU of slope 0.1; keeps the map's
    size."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.LeakyReLU(LEAKY_SLOPE),
    )


class DetectionBlock(nn.Module):
    """Body of five convolutions, which the next level continues from, and the tip that the prediction is made from."""

    def __init__(self, in_channels: int, channels: int):
        super().__init__()
        widths = (in_channels, channels, channels * 2, channels, channels * 2, channels)
        self.body = nn.Sequential(*(conv_bn_leaky(widths[i], widths[i + 1], 1 if i % 2 == 0 else 3) for i in range(5)))
        self.tip = conv_bn_leaky(channels, channels * 2, 3)


class YOLOv3(Detector):
    """The detector YOLOv3: from images to raw predictions, losses and boxes.

    Heads start as in GluonCV: convolutions U(-0.07, 0.07), biases 0, norms 1 and 0. The backbone starts as timm has it.

    Args:
        class_names: C names, in the order of the labels.
        options: settings, see `Yolov3Options`; norms "group" and "sync" hold for the heads as well.
        features: in place of the timm backbone: a module with timm's features_only interface and three maps of strides
            8, 16, 32.

    Raises:
        BadInput: unknown backbone, one without feature maps of strides 8, 16 and 32, unavailable weights, a slope that
            must be given, invalid anchors.
    """

    Options = Yolov3Options
    loss_names = ("loss_obj", "loss_center", "loss_scale", "loss_cls")
    default_weights = dict.fromkeys(loss_names, 1.0)
    metric_names = ("class_error", "box_iou")
    divided_by = "images"
    class_tensors = {"predictions.*.weight": (5, 1, 0), "predictions.*.bias": (5, 1, 0)}  # see weights/pretrained.py
    fixed_size = True  # there is no mask: padding would look like a black image
    weighs_boxes = True
    masks_unlabelled = True
    buffers_steer_training = False
    exported_sides = "multiples"

    def __init__(self, class_names: Sequence[str], options: Yolov3Options, *, features: nn.Module | None = None):
        super().__init__()
        o = options
        self.num_classes = len(class_names)
        self.label_smoothing = o.label_smoothing
        self.ignore_iou = o.ignore_iou
        self.score_threshold = o.score_threshold
        self.nms_threshold = o.nms_threshold
        self.nms_topk = o.nms_topk
        default_mean, default_std = image_statistics(o.backbone)
        self.mean = tuple(o.mean or default_mean)
        self.std = tuple(o.std or default_std)
        self.register_buffer("anchors", _checked_anchors(o.anchors), persistent=False)
        self.backbone = _timm_backbone(o) if features is None else features
        self.leaves_unused = features is not None or leaves_stages(self.backbone)
        taps = list(self.backbone.feature_info.channels())[::-1]  # strides 32, 16, 8
        channels = self._head_channels = list(o.head_channels or (max(1, c // 2) for c in taps))
        outputs = self.anchors.shape[1] * (5 + self.num_classes)
        inputs = [
            taps[0],
            taps[1] + channels[1],
            taps[2] + channels[2],
        ]
        self.blocks = nn.ModuleList(DetectionBlock(i, c) for i, c in zip(inputs, channels, strict=True))
        self.transitions = nn.ModuleList(conv_bn_leaky(channels[i], channels[i + 1], 1) for i in range(2))
        self.predictions = nn.ModuleList(nn.Conv2d(c * 2, outputs, 1) for c in channels)
        self._initialize_heads(o.objectness_prior)
        if o.norm in ("group", "sync"):
            convert = group_norms if o.norm == "group" else convert_sync_batchnorm
            self.blocks = convert(self.blocks)
            self.transitions = convert(self.transitions)

    def resolved_options(self) -> dict:
        options = super().resolved_options()
        slope = LEAKY_SLOPE if options["leaky_slope"] is None else options["leaky_slope"]
        used = {"leaky_slope": slope, "head_channels": self._head_channels}
        return options | used | {"mean": list(self.mean), "std": list(self.std)}

    def _initialize_heads(self, objectness_prior: float) -> None:
        if not 0 < objectness_prior < 1:
            raise BadInput(f"model.objectness_prior: {objectness_prior}; expected a probability above 0 and below 1")
        for module in nn.ModuleList((self.blocks, self.transitions, self.predictions)).modules():
            if isinstance(module, nn.Conv2d):
                nn.init.uniform_(module.weight, -0.07, 0.07)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for prediction in self.predictions:
            biases = prediction.bias.detach().view(-1, 5 + self.num_classes)
            biases[:, 4] = math.log(objectness_prior / (1 - objectness_prior))

    def raw_maps(self, pixels: Tensor) -> list[Tensor]:
        """Return three maps (B, A * (5 + C), H / s, W / s), s = 32, 16, 8, of normalised images (B, 3, H, W).

        Channels: anchor by anchor tx, ty, tw, th, objectness, classes. Raises ValueError unless 32 divides H and W.
        """
        if pixels.shape[-2] % 32 or pixels.shape[-1] % 32:
            raise ValueError(f"YOLOv3 needs images whose sides are multiples of 32, got {tuple(pixels.shape[-2:])}")
        maps = []
        x = None
        for i, tap in enumerate(self.backbone(pixels)[::-1]):
            if x is not None:
                x = torch.cat(
                    (interpolate(self.transitions[i - 1](x), scale_factor=2.0, mode="nearest"), tap),
                    dim=1,
                )
            x = self.blocks[i].body(tap if x is None else x)
            maps.append(self.predictions[i](self.blocks[i].tip(x)))
        return maps

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[dict] | None = None) -> dict[str, Tensor]:
        """Return raw maps of uint8 images (B, 3, H, W) whose pixels beyond `sizes` (B, 2) are padding.

        Returns `raw_stride32`, `raw_stride16`, `raw_stride8`, see `raw_maps`, and `sizes`. Targets are not used.
        """
        maps = self.raw_maps(normalize_images(images, sizes, self.mean, self.std))
        return {f"raw_stride{s}": m for s, m in zip(STRIDES, maps, strict=True)} | {"sizes": sizes}

    def flat_predictions(self, maps: Sequence[Tensor]) -> tuple[Tensor, Grid]:
        """Convert maps of strides 32, 16, 8 to (B, N, 5 + C) in at least float32, and return the grid of the N
        predictions."""
        grid = make_grid((maps[0].shape[-2] * 32, maps[0].shape[-1] * 32), self.anchors)
        per_cell = self.anchors.shape[1]
        flat = [m.unflatten(1, (per_cell, -1)).permute(0, 3, 4, 1, 2).flatten(1, 3) for m in maps]
        return torch.cat([f.to(torch.promote_types(f.dtype, torch.float32)) for f in flat], dim=1), grid

    def map_taps(self) -> list[MapTap]:
        levels = zip(self.blocks, STRIDES, self._head_channels, strict=True)
        return [MapTap(block.body, [stride], [width], lambda _, level: [level]) for block, stride, width in levels]

    def all_predictions(self, outputs: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, Tensor]:
        return self._decoded(outputs, sizes)[:2]

    def _decoded(self, outputs: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, Tensor, Grid]:
        """Return boxes (B, N, 4) in pixels of the network input, scores (B, N, C), 0 in the padding, and the grid."""
        predictions, grid = self.flat_predictions([outputs[f"raw_stride{s}"] for s in STRIDES])
        scores = class_scores(predictions).masked_fill(in_padding(sizes.to(predictions), grid)[..., None], 0)
        return decode_boxes(predictions, grid), scores, grid

    def denominators(self, targets: Sequence[dict]) -> dict[str, float]:
        """Return the number of images: losses are sums over an image, averaged over images."""
        return {"images": float(len(targets))}

    def criterion(
        self,
        outputs: Mapping[str, Tensor],
        targets: Sequence[dict],
        denominators: Mapping[str, Tensor | float],
    ) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
        """Return losses of this micro-batch, sums / denominators["images"], and metrics as (sum, count).

        class_error: per cent of the assigned predictions whose best class is wrong. box_iou: their IoU with the box.
        """
        predictions, grid = self.flat_predictions([outputs[f"raw_stride{s}"] for s in STRIDES])
        sizes = outputs["sizes"].to(predictions.device)
        assigned = assign_boxes(targets, sizes, self.anchors, grid)
        boxes = decode_boxes(predictions.detach(), grid)
        objectness = objectness_targets(boxes, assigned, sizes, grid, self.ignore_iou)
        labelled = labelled_classes(targets, predictions.device)
        if labelled is not None:  # a prediction of an unlabelled class may be right
            is_labelled = labelled.gather(1, predictions[..., 5:].detach().argmax(-1))
            objectness = objectness.masked_fill((objectness == 0) & ~is_labelled, -1)
        losses = yolov3_losses(predictions, objectness, assigned, self.label_smoothing, labelled)
        losses = {name: loss / denominators["images"] for name, loss in losses.items()}
        wrong = predictions[assigned.image, assigned.index, 5:].argmax(dim=1) != assigned.labels
        iou = box_iou(boxes[assigned.image, assigned.index], assigned.boxes)
        sums = {
            "class_error": 100.0 * (wrong & assigned.kept).sum(),
            "box_iou": iou.where(assigned.kept, 0).sum(),
        }
        return losses, {name: (value, assigned.kept.sum()) for name, value in sums.items()}

    def decode(
        self,
        outputs: Mapping[str, Tensor],
        sizes: Tensor,
        orig_sizes: Tensor,
        score_threshold: float,
        top_k: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return boxes after class-wise suppression, best first, clipped to the original image; scores are above the
        `score_threshold` of the settings. See `Detector.decode`."""
        boxes, scores, grid = self._decoded(outputs, sizes)
        minimum = max(score_threshold, self.score_threshold)
        boxes, scores, labels, keep = class_nms(
            boxes,
            scores,
            grid,
            self.nms_threshold,
            self.nms_topk,
            minimum,
        )
        return clip_boxes(resize_boxes(boxes, sizes, orig_sizes), orig_sizes), scores, labels.where(keep, -1)


def _checked_anchors(anchors: Sequence) -> Tensor:
    try:
        tensor = torch.tensor(anchors, dtype=torch.float32)
    except (TypeError, ValueError):
        tensor = torch.zeros(0)
    if tensor.ndim != 3 or tensor.shape[0] != 3 or tensor.shape[2] != 2 or not (tensor > 0).all():
        raise BadInput(
            "model.anchors: expected three lists (strides 32, 16, 8) of equally many [width, height] > 0, got "
            f"{anchors!r}; `python -m toolkit.tools.anchors --annotations FILE` prints such lists"
        )
    return tensor


def class_scores(predictions: Tensor) -> Tensor:
    """Return (B, N, C) = sigmoid(class) * sigmoid(objectness) of raw predictions (B, N, 5 + C)."""
    return predictions[..., 5:].sigmoid() * predictions[..., 4:5].sigmoid()


def class_nms(
    boxes: Tensor,
    scores: Tensor,
    grid: Grid,
    nms_threshold: float,
    topk: int,
    score_threshold: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run GluonCV's box_nms: keep the `topk` best of all classes together, then suppress within each class.

    Args:
        boxes, scores: (B, N, 4) xyxy and (B, N, C) >= 0.

    Returns boxes (B, K, 4), scores, labels (B, K), best first, and keep (B, K), True for those with a score above
    `score_threshold` that no better one of their class overlaps by an IoU above `nms_threshold`. Equal scores come in
    GluonCV's order: level, class, cell, anchor.
    """
    num_classes = scores.shape[2]
    order = None if torch.compiler.is_exporting() else _class_major_order(grid, num_classes).flatten()
    scores, picked = best_rows(scores.flatten(1), topk, order)
    labels = picked % num_classes
    boxes = boxes.gather(1, (picked // num_classes)[..., None].expand(-1, -1, 4))
    return boxes, scores, labels, sorted_nms(boxes, scores > score_threshold, nms_threshold, labels, num_classes)


def _class_major_order(grid: Grid, num_classes: int) -> Tensor:
    """Return (N, C) int64: the position of each score in GluonCV's output, which lists a level class by class."""
    per_level = torch.stack([(grid.strides == s).sum() for s in STRIDES])
    level = torch.stack([grid.strides[:, 0] == s for s in STRIDES]).long().argmax(dim=0)
    start = (per_level.cumsum(0) - per_level)[level]
    within = torch.arange(len(level), device=level.device) - start
    classes = torch.arange(num_classes, device=level.device)
    return (start * num_classes + within)[:, None] + classes * per_level[level][:, None]


def _timm_backbone(o: Yolov3Options) -> nn.Module:
    """Build feature maps of strides 8, 16 and 32 of a timm model, with YOLO's leaky ReLUs if the model has such."""
    features, _ = timm_features(
        o.backbone,
        strides=STRIDES[::-1],
        pretrained_backbone=o.pretrained_backbone,
        norm=o.norm,
    )
    leaky = [module for module in features.modules() if isinstance(module, nn.LeakyReLU)]
    if leaky and o.pretrained_backbone and o.leaky_slope is None:
        raise BadInput(
            f"model.leaky_slope: timm's weights for {o.backbone} were trained with slope {TIMM_LEAKY_SLOPE}, YOLOv3's "
            f"Darknet with {LEAKY_SLOPE}: give the one of your weights"
        )
    for module in leaky:
        module.negative_slope = LEAKY_SLOPE if o.leaky_slope is None else o.leaky_slope
    return features
