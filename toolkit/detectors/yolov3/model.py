"""YOLOv3 (Redmon & Farhadi, 2018) as GluonCV trains it, on timm's Darknet-53 or any timm backbone.

`python -m toolkit.tools.anchors --annotations FILE` computes anchors for a data set.
Targets and losses are in the module `targets`; docs/differences.md lists the differences from GluonCV.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn
from torch.nn.functional import interpolate

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
from toolkit.models.backbones import image_statistics, leaves_stages, replace_batch_norms, timm_features
from toolkit.models.detector import Detector, MapTap
from toolkit.models.nms import sorted_nms, top_k_rows
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
    """The head of one level: `body`, five convolutions, whose output the next level continues from, and `tip`, one more
    convolution, from whose output the prediction is made.

    in_channels: of the input. channels: of the output of `body`; the output of `tip` has twice as many.
    """

    def __init__(self, in_channels: int, channels: int):
        super().__init__()
        self.body = nn.Sequential(
            conv_bn_leaky(in_channels, channels, 1),
            conv_bn_leaky(channels, channels * 2, 3),
            conv_bn_leaky(channels * 2, channels, 1),
            conv_bn_leaky(channels, channels * 2, 3),
            conv_bn_leaky(channels * 2, channels, 1),
        )
        self.tip = conv_bn_leaky(channels, channels * 2, 3)


class YOLOv3(Detector):
    """The detector YOLOv3: from images to raw predictions, losses and boxes.

    Heads start as in GluonCV: convolutions from U(-0.07, 0.07), biases 0, batch norms with weight 1 and bias 0. The
    backbone starts as timm initialises it.

    Args:
        class_names: C names, in the order of the labels.
        options: settings, see `Yolov3Options`; norms "group" and "sync" hold for the heads as well.
        features: a module to use instead of the timm backbone, with timm's features_only interface and three maps of
            strides 8, 16, 32.

    Raises:
        BadInput: the backbone is unknown or does not have feature maps of strides 8, 16 and 32, weights cannot be
            loaded, `leaky_slope` is not set though the backbone's weights need it, or the anchors are invalid.
    """

    Options = Yolov3Options
    loss_names = ("loss_obj", "loss_center", "loss_scale", "loss_cls")
    default_weights = dict.fromkeys(loss_names, 1.0)
    metric_names = ("class_error", "box_iou")
    divided_by = "images"
    class_tensors = {"predictions.*.weight": (5, 1, 0), "predictions.*.bias": (5, 1, 0)}  # see weights/pretrained.py
    graph_parts = ("backbone", "blocks.?.body", "blocks.?.tip", "transitions.?")
    fixed_size = True  # there is no mask: padding would look like a black image
    weighs_boxes = True
    masks_unlabelled = True
    weighs_classes = True
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
        channels = list(o.head_channels or (max(1, width // 2) for width in taps))
        if len(channels) != 3:
            raise BadInput(f"model.head_channels is {channels}; expected three numbers, for strides 32, 16 and 8")
        self._head_channels = channels
        outputs = self.anchors.shape[1] * (5 + self.num_classes)
        inputs = [taps[0], taps[1] + channels[1], taps[2] + channels[2]]
        blocks = [DetectionBlock(*widths) for widths in zip(inputs, channels, strict=True)]
        self.blocks = nn.ModuleList(blocks)
        self.transitions = nn.ModuleList(
            [
                conv_bn_leaky(channels[0], channels[1], 1),
                conv_bn_leaky(channels[1], channels[2], 1),
            ]
        )
        self.predictions = nn.ModuleList(nn.Conv2d(width * 2, outputs, 1) for width in channels)
        self._initialize_heads(o.objectness_prior)
        if o.norm in ("group", "sync"):
            convert = replace_batch_norms if o.norm == "group" else convert_sync_batchnorm
            self.blocks = convert(self.blocks)
            self.transitions = convert(self.transitions)

    def resolved_options(self) -> dict:
        options = super().resolved_options()
        slope = LEAKY_SLOPE if options["leaky_slope"] is None else options["leaky_slope"]
        return {
            **options,
            "leaky_slope": slope,
            "head_channels": self._head_channels,
            "mean": list(self.mean),
            "std": list(self.std),
        }

    def _initialize_heads(self, objectness_prior: float) -> None:
        if not 0 < objectness_prior < 1:
            raise BadInput(f"model.objectness_prior: {objectness_prior}; expected a probability above 0 and below 1")
        heads = nn.ModuleList((self.blocks, self.transitions, self.predictions))
        for module in heads.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.uniform_(module.weight, -0.07, 0.07)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for prediction in self.predictions:
            biases = prediction.bias.detach().view(-1, 5 + self.num_classes)
            biases[:, 4] = math.log(objectness_prior / (1 - objectness_prior))

    def raw_maps(self, pixels: Tensor) -> list[Tensor]:
        """Return three maps (B, A * (5 + C), H / stride, W / stride) of strides 32, 16, 8 for normalised images (B, 3,
        H, W).

        The channels are tx, ty, tw, th, objectness and classes of each of the A anchors, anchor by anchor. Raises
        ValueError unless 32 divides H and W.
        """
        if pixels.shape[-2] % 32 or pixels.shape[-1] % 32:
            raise ValueError(f"YOLOv3 needs images whose sides are multiples of 32, got {tuple(pixels.shape[-2:])}")
        maps = []
        x = None
        for i, tap in enumerate(self.backbone(pixels)[::-1]):
            block = self.blocks[i]
            if x is None:
                x = tap
            else:  # the coarser level, enlarged, beside this one
                enlarged = interpolate(self.transitions[i - 1](x), scale_factor=2.0, mode="nearest")
                x = torch.cat((enlarged, tap), dim=1)
            x = block.body(x)
            maps.append(self.predictions[i](block.tip(x)))
        return maps

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[dict] | None = None) -> dict[str, Tensor]:
        """Return raw maps of uint8 images (B, 3, H, W) whose pixels beyond `sizes` (B, 2), height and width, are
        padding.

        The dict has `raw_stride32`, `raw_stride16`, `raw_stride8`, see `raw_maps`, and `sizes`. Targets are not used.
        """
        maps = self.raw_maps(self.normalized(images, sizes))
        outputs = {f"raw_stride{stride}": level for stride, level in zip(STRIDES, maps, strict=True)}
        outputs["sizes"] = sizes
        return outputs

    def flat_predictions(self, maps: Sequence[Tensor]) -> tuple[Tensor, Grid]:
        """Convert the raw maps of strides 32, 16, 8 to N predictions per image, (B, N, 5 + C) in at least float32, and
        return them with their `Grid`."""
        height, width = maps[0].shape[-2:]  # of stride 32
        grid = make_grid((height * 32, width * 32), self.anchors)
        per_cell = self.anchors.shape[1]
        flat = []
        for level in maps:
            by_anchor = level.unflatten(1, (per_cell, -1))  # (B, A, 5 + C, h, w)
            rows = by_anchor.permute(0, 3, 4, 1, 2).flatten(1, 3)  # (B, h * w * A, 5 + C)
            flat.append(rows.to(torch.promote_types(rows.dtype, torch.float32)))
        return torch.cat(flat, dim=1), grid

    def map_taps(self) -> list[MapTap]:
        taps = []
        for block, stride, width in zip(self.blocks, STRIDES, self._head_channels, strict=True):
            taps.append(MapTap(block.body, [stride], [width], lambda _, level: [level]))
        return taps

    def all_predictions(self, outputs: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, Tensor]:
        return self._decoded(outputs, sizes)[:2]

    def _decoded(self, outputs: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, Tensor, Grid]:
        """Return boxes (B, N, 4) in pixels of the network input, scores (B, N, C), 0 in the padding, and the grid."""
        maps = [outputs[f"raw_stride{stride}"] for stride in STRIDES]
        predictions, grid = self.flat_predictions(maps)
        is_padding = in_padding(sizes.to(predictions), grid)  # (B, N)
        scores = class_scores(predictions).masked_fill(is_padding[..., None], 0)
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
        """Return losses of this micro-batch, sums divided by denominators["images"], and metrics as (sum, count).

        class_error: per cent of the assigned predictions whose best class is wrong. box_iou: IoU of the assigned
        predictions with their annotated boxes.
        """
        maps = [outputs[f"raw_stride{stride}"] for stride in STRIDES]
        predictions, grid = self.flat_predictions(maps)
        sizes = outputs["sizes"].to(predictions.device)
        assigned = assign_boxes(targets, sizes, self.anchors, grid)
        boxes = decode_boxes(predictions.detach(), grid)
        objectness = objectness_targets(boxes, assigned, sizes, grid, self.ignore_iou)
        labelled = labelled_classes(targets, predictions.device)
        if labelled is not None:  # a prediction of an unlabelled class may be right
            best_class = predictions[..., 5:].detach().argmax(-1)  # (B, N)
            is_labelled = labelled.gather(1, best_class)
            objectness = objectness.masked_fill((objectness == 0) & ~is_labelled, -1)
        losses = yolov3_losses(predictions, objectness, assigned, self.label_smoothing, labelled, self.class_weights)
        losses = {name: loss / denominators["images"] for name, loss in losses.items()}
        best_class = predictions[assigned.image, assigned.index, 5:].argmax(dim=1)  # (T,)
        wrong = best_class != assigned.labels
        iou = box_iou(boxes[assigned.image, assigned.index], assigned.boxes)
        count = assigned.kept.sum()
        metrics = {
            "class_error": (100.0 * (wrong & assigned.kept).sum(), count),
            "box_iou": (iou.where(assigned.kept, 0).sum(), count),
        }
        return losses, metrics

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
        boxes = clip_boxes(resize_boxes(boxes, sizes, orig_sizes), orig_sizes)
        return boxes, scores, labels.where(keep, -1)


def _checked_anchors(anchors: Sequence) -> Tensor:
    try:
        tensor = torch.tensor(anchors, dtype=torch.float32, device="cpu")  # checked, so not on the meta device
    except (TypeError, ValueError):
        tensor = torch.zeros(0)
    is_valid = tensor.ndim == 3 and tensor.shape[0] == 3 and tensor.shape[2] == 2 and (tensor > 0).all()
    if not is_valid:
        raise BadInput(
            "model.anchors: expected three lists (strides 32, 16, 8) of equally many [width, height] > 0, got "
            f"{anchors!r}; `python -m toolkit.tools.anchors --annotations FILE` prints such lists"
        )
    return tensor


def class_scores(predictions: Tensor) -> Tensor:
    """Return the scores (B, N, C), sigmoid(class) * sigmoid(objectness), of N raw predictions (B, N, 5 + C)."""
    of_classes = predictions[..., 5:].sigmoid()
    objectness = predictions[..., 4:5].sigmoid()
    return of_classes * objectness


def class_nms(
    boxes: Tensor,
    scores: Tensor,
    grid: Grid,
    nms_threshold: float,
    topk: int,
    score_threshold: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run GluonCV's box_nms: keep the `topk` best scores of all classes together, then suppress within each class.

    Args:
        boxes: (B, N, 4) xyxy.
        scores: (B, N, C), at least 0.
        grid: the grid of the N predictions.
        nms_threshold: IoU above which the lower-scoring of two boxes of a class is suppressed.
        topk: K, the number of scores to keep.
        score_threshold: scores up to this value are suppressed.

    Returns boxes (B, K, 4), scores and labels (B, K), best first, and keep (B, K), False for suppressed rows. Equal
    scores are in GluonCV's order: level, class, cell, anchor.
    """
    num_classes = scores.shape[2]
    order = None if torch.compiler.is_exporting() else _class_major_order(grid, num_classes).flatten()
    scores, picked = top_k_rows(scores.flatten(1), topk, order)
    labels = picked % num_classes
    predictions = picked // num_classes
    boxes = boxes.gather(1, predictions[..., None].expand(-1, -1, 4))
    keep = sorted_nms(boxes, scores > score_threshold, nms_threshold, labels, num_classes)
    return boxes, scores, labels, keep


def _class_major_order(grid: Grid, num_classes: int) -> Tensor:
    """Return (N, C) int64: the position of each score in GluonCV's output, which lists a level class by class."""
    # With levels of 3 and 12 predictions and 2 classes, prediction 5 is number 2 of the second level, whose scores
    # begin at 3 * 2 = 6: those of its classes are at 6 + 2 and 6 + 12 + 2.
    per_level = torch.stack([(grid.strides == stride).sum() for stride in STRIDES])
    is_level = torch.stack([grid.strides[:, 0] == stride for stride in STRIDES])
    level = is_level.long().argmax(dim=0)  # (N,)
    count = per_level[level]
    start = (per_level.cumsum(0) - per_level)[level]
    within = torch.arange(len(level), device=level.device) - start
    classes = torch.arange(num_classes, device=level.device)
    first = start * num_classes + within
    return first[:, None] + classes * count[:, None]


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
