"""SSD (Liu et al., ECCV 2016) and SSDLite (Sandler et al., CVPR 2018) on any timm backbone, as CVNets builds them, and
torchvision's own two. All of them use the criterion and the denominators of this toolkit."""

import math
from collections.abc import Mapping, Sequence

import torch
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import ssd300_vgg16, ssdlite320_mobilenet_v3_large
from torchvision.models.detection.image_list import ImageList

from toolkit.base.batch import rows_of, send
from toolkit.base.box_ops import clip_boxes, denormalize_boxes, xyxy_to_cxcywh
from toolkit.base.errors import BadInput
from toolkit.base.imports import disable_compiler
from toolkit.detectors.ssd.criterion import SsdCriterion, anchor_scales, decode_offsets, level_anchors
from toolkit.detectors.ssd.options import Ssd300Options, Ssdlite320Options, SsdliteOptions, SsdOptions
from toolkit.models.backbones import (
    image_statistics,
    leaves_stages,
    offered_strides,
    replace_batch_norms,
    timm_features,
)
from toolkit.models.detector import Detector, MapTap
from toolkit.models.nms import class_wise_nms, top_k_rows

WHOLE_IMAGE = -1  # stride of the level that sees the whole image in one cell


class SSD(Detector):
    """Anchors at several strides, each with class scores and box offsets. The background is a class that the detector
    adds.

    SSD does not mask padding, so all images of a batch must have one size, a multiple of `stride`, and fill it. The
    size need not be square, and may change from batch to batch.

    Settings: see `SsdOptions`; norms "group" and "sync" hold for the heads as well.

    Raises:
        BadInput: the backbone is unknown or does not have such strides, lists have unequal lengths, or the weights
            cannot be loaded.
    """

    Options = SsdOptions
    separable = False  # depthwise separable convolutions in extra levels and heads
    default_weights = {"loss_cls": 1.0, "loss_loc": 1.0}
    loss_names = SsdCriterion.loss_names
    metric_names = SsdCriterion.metric_names
    divided_by = "positives"
    masks_unlabelled = True
    weighs_classes = True
    fixed_size = True
    graph_parts = ("backbone", "extra.?", "heads.?", "head")  # torchvision's has one head
    exported_sides = "fixed"  # the sizes of the maps are measured with a forward
    buffers_steer_training = False  # those of its weight are the same on all processes
    max_detections = 200  # as Liu et al., CVNets and torchvision

    def __init__(self, class_names: Sequence[str], options: SsdOptions):
        super().__init__()
        o = options
        backbone_strides = _backbone_strides(o.backbone, o.strides, o.channels, o.aspect_ratios)
        self.strides = tuple(o.strides)
        self.stride = backbone_strides[-1]
        scales = anchor_scales(len(o.strides), o.min_scale, o.max_scale)
        self.anchor_options = (scales, tuple(o.aspect_ratios))
        self.clips_anchors = o.clip_anchors
        self._anchors: dict[tuple, tuple[Tensor, Tensor]] = {}
        self.backbone, widths = timm_features(
            o.backbone,
            strides=backbone_strides,
            pretrained_backbone=o.pretrained_backbone,
            norm=o.norm,
        )
        self.leaves_unused = leaves_stages(self.backbone)
        self.map_widths = tuple(widths)
        self.num_outputs = 4 + 1 + len(class_names)
        self._build_levels(o, widths, len(backbone_strides))
        self.multibox = SsdCriterion(
            o.iou_threshold,
            o.center_variance,
            o.size_variance,
            o.negatives_per_positive,
            o.label_smoothing,
            o.self_weighting_steps,
            o.self_weighting_every,
        )
        self.score_threshold = o.score_threshold
        self.nms_threshold = o.nms_threshold
        self.candidates_per_class = o.candidates_per_class
        default_mean, default_std = image_statistics(o.backbone)
        self.mean = tuple(o.mean or default_mean)
        self.std = tuple(o.std or default_std)

    def resolved_options(self) -> dict:
        return {
            **super().resolved_options(),
            "mean": list(self.mean),
            "std": list(self.std),
        }

    def _build_levels(self, o: SsdOptions, widths: list[int], of_backbone: int) -> None:
        """Build the `extra` levels after the `of_backbone` first ones, whose channels are `widths`, and the `heads` of
        all."""
        self.extra = nn.ModuleList()
        for stride, width in zip(o.strides[of_backbone:], o.channels[of_backbone:], strict=True):
            level = self._extra_level(widths[-1], width, whole=stride == WHOLE_IMAGE)
            self.extra.append(level)
            widths.append(width)
        self.heads = nn.ModuleList()
        levels = zip(widths, o.channels, o.aspect_ratios, o.strides, strict=True)
        for width, into, ratios, stride in levels:
            anchors = 2 + 2 * len(set(ratios))
            self.heads.append(self._head(width, into, anchors, whole=stride == WHOLE_IMAGE))
        self.class_tensors = {}  # see toolkit/models/weights/pretrained.py
        for i, head in enumerate(self.heads):
            last = f"heads.{i}" if isinstance(head, nn.Conv2d) else f"heads.{i}.{len(head) - 1}"
            self.class_tensors[f"{last}.*"] = (5, 1, 0)
        for module in (*self.extra.modules(), *self.heads.modules()):
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if o.norm in ("group", "sync"):
            convert = replace_batch_norms if o.norm == "group" else convert_sync_batchnorm
            self.extra = convert(self.extra)
            self.heads = convert(self.heads)

    def _extra_level(self, width: int, out_width: int, whole: bool) -> nn.Module:
        """Build a level of half the size, or one that covers the whole image."""
        if whole:
            return nn.Sequential(
                nn.AdaptiveAvgPool2d(1),
                nn.Conv2d(width, out_width, 1),
                nn.ReLU(),
            )
        if self.separable:
            return nn.Sequential(
                conv(width, width, 3, stride=2, groups=width, act=False),
                conv(width, out_width, 1),
            )
        return nn.Sequential(
            conv(width, out_width // 2, 1),
            conv(out_width // 2, out_width, 3, stride=2),
        )

    def _head(self, width: int, into: int, anchors: int, whole: bool) -> nn.Module:
        """Build the head for offsets and class scores of a level's anchors: (B, anchors * num_outputs, H, W)."""
        outputs = anchors * self.num_outputs
        if whole:
            return nn.Conv2d(width, outputs, 1)
        layers = [conv(width, into, 1)] if into != width else []
        if self.separable:
            layers.append(conv(into, into, 3, groups=into, act=False))
            layers.append(nn.Conv2d(into, outputs, 1))
        else:
            layers.append(nn.Conv2d(into, outputs, 3, padding=1))
        return nn.Sequential(*layers)

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict[str, Tensor]:
        """Return class scores and box offsets of each of A anchors.

        Args:
            images: `(B, 3, H, W)` uint8.
            sizes: `(B, 2)` int64, height and width of each image without padding.
            targets: not needed.

        Returns:
            `logits (B, A, C + 1)`, the background first; `offsets (B, A, 4)`; `anchors (A, 4)` cxcywh as fractions of
            the image; `image_hw (2,)`, height and width of the batch's images in pixels.
        """
        dtype = next(self.backbone.parameters()).dtype
        pixels = self.normalized(images, sizes, dtype)
        features = list(self.backbone(pixels))
        for layer in self.extra:
            features.append(self._next_map(layer, features[-1]))
        flat = []
        for head, feature in zip(self.heads, features, strict=True):
            of_cells = head(feature).permute(0, 2, 3, 1)  # (B, H, W, anchors * outputs)
            flat.append(of_cells.reshape(len(images), -1, self.num_outputs))
        outputs = torch.cat(flat, dim=1)  # (B, A, 4 + C + 1)
        anchors, image_hw = self.anchors(images.shape[-2:], images.device)
        return {
            "logits": outputs[..., 4:],
            "offsets": outputs[..., :4],
            "anchors": anchors,
            "image_hw": image_hw,
        }

    def _next_map(self, layer: nn.Module, feature: Tensor) -> Tensor:
        """Return the feature map of an extra level from that of the level before it.

        In training on a CPU, the level after a map of one pixel is computed in float32: the weight gradient of a
        strided 3 x 3 convolution of one pixel in bfloat16 has values from memory that was never written (oneDNN in
        torch 2.14, on CPUs with AVX512-BF16).
        """
        if self.training and feature.device.type == "cpu" and feature.shape[-2:] == (1, 1):
            with torch.autocast("cpu", enabled=False):
                return layer(feature.float())
        return layer(feature)

    @disable_compiler
    @torch.no_grad()
    def anchors(self, image_hw: Sequence[int], device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Return the A anchors (A, 4) cxcywh, as fractions of images of (h, w) pixels, and that size as a tensor (2,),
        on `device`. Both are cached.

        The backbone runs once for each new size to measure its maps: MobileViT-v2, for one, rounds to whole patches.
        """
        key = (*image_hw, str(device))
        if key not in self._anchors:
            parameter = next(self.backbone.parameters())
            training = self.backbone.training
            self.backbone.eval()
            images = parameter.new_zeros(1, 3, *image_hw)
            with torch.autocast(parameter.device.type, enabled=False):
                maps = self.backbone(images)
            self.backbone.train(training)
            anchors = square_in_pixels(self._anchors_of(images, maps), image_hw, self.clips_anchors)
            size = torch.tensor(tuple(image_hw))
            self._anchors[key] = (send(anchors, device), send(size, device))
        return self._anchors[key]

    def _anchors_of(self, images: Tensor, maps: Sequence[Tensor]) -> Tensor:
        """Return the anchors (A, 4) of images from the backbone's maps."""
        sizes = [tuple(level.shape[-2:]) for level in maps]
        for stride in self.strides[len(maps) :]:
            half = tuple(-(-side // 2) for side in sizes[-1])  # rounded up
            sizes.append((1, 1) if stride == WHOLE_IMAGE else half)
        anchors = []
        for hw, scales, ratios in zip(sizes, *self.anchor_options, strict=True):
            anchors.append(level_anchors(hw, scales, ratios, self.clips_anchors))
        return torch.cat(anchors)

    def map_taps(self) -> list[MapTap]:
        """Return the taps of the backbone's maps only; the levels after them are too coarse to localise a box."""
        return [MapTap(self.backbone, self.strides[: len(self.map_widths)], self.map_widths)]

    def all_predictions(self, outputs: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = outputs["logits"].float().softmax(dim=-1)
        sizes_hw = outputs["image_hw"].expand(len(probabilities), 2)
        return self._boxes(outputs, sizes_hw), probabilities[..., 1:]

    def _boxes(self, outputs: Mapping[str, Tensor], sizes_hw: Tensor) -> Tensor:
        """Return boxes (B, A, 4) xyxy of all anchors, not clipped, in images of (B, 2) h, w."""
        boxes = decode_offsets(
            outputs["offsets"].float(),
            outputs["anchors"],
            *self.multibox.variances,
        )
        return denormalize_boxes(boxes, sizes_hw)

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """Return the number of positive anchors of this batch, computed from targets on the CPU; see
        `SsdCriterion.denominators`."""
        largest = torch.stack([target["size"] for target in targets]).amax(dim=0).tolist()
        padded_hw = [-(-side // self.stride) * self.stride for side in largest]  # to multiples of the stride
        anchors, image_hw = self.anchors(padded_hw, "cpu")
        return self.multibox.denominators(anchors, targets, image_hw)

    def criterion(self, outputs: Mapping[str, Tensor], targets: Sequence[Mapping], denominators: Mapping):
        """Return `(losses, metrics)` for the outputs of `forward`; see `SsdCriterion.forward`."""
        parts = (outputs[name] for name in ("logits", "offsets", "anchors", "image_hw"))
        return self.multibox(*parts, targets, denominators, self.class_weights)

    def decode(
        self,
        outputs: Mapping[str, Tensor],
        sizes: Tensor,
        orig_sizes: Tensor,
        score_threshold: float,
        top_k: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return boxes after class-wise suppression, clipped to the original image, best first; scores are above the
        `score_threshold` of the settings. See `Detector.decode`."""
        boxes = self._boxes(outputs, outputs["image_hw"] * orig_sizes / sizes)  # padding may be part of the image
        probabilities = outputs["logits"].float().softmax(dim=-1)
        scores = probabilities[..., 1:].transpose(1, 2)  # (B, C, A)
        count = min(self.candidates_per_class, scores.shape[2])  # of candidates of a class, K
        scores, anchor = scores.topk(count, dim=2)  # (B, C, K)
        rows = anchor.flatten(1)[..., None].expand(-1, -1, 4)
        boxes = clip_boxes(boxes, orig_sizes).gather(1, rows)  # (B, C * K, 4)
        order = scores.flatten(1).sort(dim=1, descending=True).indices
        candidates = scores.where(scores > max(score_threshold, self.score_threshold), 0)
        turns = class_wise_nms(
            boxes.unflatten(1, scores.shape[1:]),
            candidates,
            self.nms_threshold,
            order,
        )
        turns, rows = top_k_rows(turns.flatten(1), top_k)
        labels = rows // scores.shape[2]  # of 3 candidates a class: 0 0 0 1 1 1 2 ...
        return (
            rows_of(boxes, rows),
            scores.flatten(1).gather(1, rows),
            labels.where(turns > 0, -1),
        )


def square_in_pixels(anchors: Tensor, image_hw: Sequence[int], clip: bool) -> Tensor:
    """Convert A anchors (A, 4) cxcywh, whose sides are fractions of a square image, to anchors for an image of (h, w)
    pixels.

    Anchors of aspect ratio 1 become squares in pixels, and all anchors keep their area. They are clipped to [0, 1] if
    `clip` is true. For square images, the anchors are returned unchanged.
    """
    height, width = image_hw
    if height == width:
        return anchors
    side = math.sqrt(height * width)
    factors = anchors.new_tensor([1, 1, side / width, side / height])
    anchors = anchors * factors
    return anchors.clamp(0, 1) if clip else anchors


class SSDLite(SSD):
    """An `SSD` with depthwise separable convolutions in extra levels and heads; CVNets calls it SSD."""

    Options = SsdliteOptions
    separable = True


class SSD300(SSD):
    """torchvision's `ssd300_vgg16`: the state dict has torchvision's names, and equal weights give equal boxes.

    Settings: see `Ssd300Options`. Images must all have one size and fill it: 300 x 300 px in the published weights.

    Raises:
        BadInput: `pretrained_backbone` is given. torchvision publishes weights of whole detectors, which `pretrained`
            takes.
    """

    Options = Ssd300Options
    builder = staticmethod(ssd300_vgg16)
    class_tensors = {"head.classification_head.module_list.*": (1, 1, 0)}  # background first
    stride = 1
    map_strides = (8, 16, 32)

    def __init__(self, class_names: Sequence[str], options: Ssd300Options):
        Detector.__init__(self)
        o = options
        if o.pretrained_backbone:
            remedy = "give torchvision's file of weights as model.pretrained, or set it to false"
            raise BadInput(f"model.pretrained_backbone: {o.architecture} starts from whole detectors: {remedy}")
        model = self.builder(weights=None, weights_backbone=None, num_classes=1 + len(class_names))
        self.backbone = model.backbone
        self.head = model.head
        self.anchor_generator = model.anchor_generator
        self.clips_anchors = self.anchor_generator.clip
        self.multibox = SsdCriterion(
            o.iou_threshold,
            negatives_per_positive=o.negatives_per_positive,
        )
        for name in list(self.multibox.balance._buffers):  # no factor is learned: the names stay torchvision's
            self.multibox.balance._non_persistent_buffers_set.add(name)
        self.score_threshold = o.score_threshold
        self.nms_threshold = o.nms_threshold
        self.candidates_per_class = o.candidates_per_class
        self.mean = tuple(model.transform.image_mean)
        self.std = tuple(model.transform.image_std)
        self._anchors: dict[tuple, tuple[Tensor, Tensor]] = {}

    def resolved_options(self) -> dict:
        return Detector.resolved_options(self)

    def map_taps(self) -> list[MapTap]:
        """Return the taps of the three finest levels; the others are too coarse to localise a box."""
        widths = []
        for head in self.head.classification_head.module_list[:3]:
            convolutions = (module for module in head.modules() if isinstance(module, nn.Conv2d))
            widths.append(next(convolutions).in_channels)
        return [
            MapTap(
                self.backbone,
                self.map_strides,
                widths,
                lambda _, maps: list(maps.values())[:3],
            )
        ]

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict[str, Tensor]:
        """Return scores and offsets of every anchor; see `SSD.forward`."""
        dtype = next(self.backbone.parameters()).dtype
        pixels = self.normalized(images, sizes, dtype)
        maps = self.backbone(pixels)
        predictions = self.head(list(maps.values()))
        anchors, image_hw = self.anchors(images.shape[-2:], images.device)
        return {
            "logits": predictions["cls_logits"],
            "offsets": predictions["bbox_regression"],
            "anchors": anchors,
            "image_hw": image_hw,
        }

    def _anchors_of(self, images: Tensor, maps: Mapping[str, Tensor]) -> Tensor:
        height, width = images.shape[-2:]
        of_images = self.anchor_generator(ImageList(images, [(height, width)]), list(maps.values()))
        xyxy = of_images[0]
        sides = send(torch.tensor([width, height, width, height]), xyxy.device)
        return xyxy_to_cxcywh(xyxy / sides)


class SSDLite320(SSD300):
    """torchvision's `ssdlite320_mobilenet_v3_large`, used as `SSD300`. Settings: see `Ssdlite320Options`."""

    Options = Ssdlite320Options
    builder = staticmethod(ssdlite320_mobilenet_v3_large)
    # The last layer of each head alone, not the depthwise convolution and the norm before it.
    class_tensors = {"head.classification_head.module_list.?.1.*": (1, 1, 0)}
    max_detections = 300
    map_strides = (16, 32, 64)


class BatchNorm(nn.BatchNorm2d):
    """Batch norm that uses its running statistics for a batch with one value per channel, which has no variance."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.numel() == x.shape[1]:
            return F.batch_norm(
                x,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                eps=self.eps,
            )
        return super().forward(x)


def conv(width: int, out_width: int, kernel: int, *, stride: int = 1, groups: int = 1, act: bool = True) -> nn.Module:
    """Build a convolution without bias, a batch norm and, if `act` is true, a ReLU. Height and width are kept, or
    divided by the stride and rounded up."""
    convolution = nn.Conv2d(
        width,
        out_width,
        kernel,
        stride,
        padding=kernel // 2,
        groups=groups,
        bias=False,
    )
    layers = [convolution, BatchNorm(out_width)]
    if act:
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def _backbone_strides(backbone: str, strides: Sequence[int], channels: Sequence, ratios: Sequence) -> list[int]:
    """Return the strides that the backbone has maps of.

    Raises:
        BadInput: the backbone has none of the strides, the others do not double, or channels and ratios differ in
            length.
    """
    problems = []
    if not len(strides) == len(channels) == len(ratios):
        problems.append(
            f"model.strides, model.channels and model.aspect_ratios have one entry for each level, but "
            f"{len(strides)}, {len(channels)} and {len(ratios)} entries"
        )
    offered = set(offered_strides(backbone))
    strides_of_maps = [stride for stride in strides if stride in offered]
    missing = len(strides) - len(strides_of_maps)
    is_buildable = False
    if strides_of_maps and strides_of_maps == sorted(set(strides_of_maps)):
        doubled = [strides_of_maps[-1] * 2 ** (i + 1) for i in range(missing)]
        all_doubled = [*strides_of_maps, *doubled]
        last_is_whole = [*strides_of_maps, *doubled[:-1], WHOLE_IMAGE]
        is_buildable = list(strides) in (all_doubled, last_is_whole)
    if not is_buildable:
        problems.append(
            f"model.strides: {list(strides)} cannot be built on {backbone!r}, which has maps of strides "
            f"{sorted(offered)}: expected some of these, increasing, then each twice the one before, then perhaps "
            f"{WHOLE_IMAGE} for the whole image"
        )
    if any(ratio <= 0 for of_level in ratios for ratio in of_level):
        problems.append(f"model.aspect_ratios: {[list(r) for r in ratios]} must be positive numbers")
    if problems:
        raise BadInput(problems)
    return strides_of_maps
