"""torchvision's own SSDs: its modules, names, anchors and decoding, with our criterion and its denominators."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchvision.models.detection import ssd300_vgg16, ssdlite320_mobilenet_v3_large
from torchvision.models.detection.image_list import ImageList

from toolkit.batch import normalize_images, send
from toolkit.box_ops import xyxy_to_cxcywh
from toolkit.errors import BadInput
from toolkit.models.detector import Detector, MapTap
from toolkit.models.ssd.criterion import SsdCriterion
from toolkit.models.ssd.model import SSD
from toolkit.models.ssd.options import Ssd300Options, Ssdlite320Options


class SSD300(SSD):
    """torchvision's `ssd300_vgg16`: its state dict is torchvision's, name by name, and so are its boxes.

    Settings: see `Ssd300Options`. Images must all have one size and fill it: 300 x 300 px in the published weights.

    Raises:
        BadInput: `pretrained_backbone`: torchvision's weights are those of whole detectors, given as `pretrained`.
    """

    Options = Ssd300Options
    builder = staticmethod(ssd300_vgg16)
    class_tensors = {"head.classification_head.module_list.*": (1, 1, 0)}  # background first
    stride, map_strides = 1, (8, 16, 32)

    def __init__(self, class_names: Sequence[str], options: Ssd300Options):
        Detector.__init__(self)
        o = options
        if o.pretrained_backbone:
            raise BadInput(f"model.pretrained_backbone: {o.architecture} starts from whole detectors: give "
                           "torchvision's file of weights as model.pretrained, or set it to false")  # fmt: skip
        model = self.builder(weights=None, weights_backbone=None, num_classes=1 + len(class_names))
        self.backbone, self.head, self.anchor_generator = model.backbone, model.head, model.anchor_generator
        self.multibox = SsdCriterion(o.iou_threshold, negatives_per_positive=o.negatives_per_positive)
        for name in list(self.multibox.balance._buffers):  # no factor is learned: the names stay torchvision's
            self.multibox.balance._non_persistent_buffers_set.add(name)
        self.score_threshold, self.nms_threshold = o.score_threshold, o.nms_threshold
        self.candidates_per_class = o.candidates_per_class
        self.mean, self.std = tuple(model.transform.image_mean), tuple(model.transform.image_std)
        self._anchors: dict[tuple, tuple[Tensor, Tensor]] = {}

    def resolved_options(self) -> dict:
        return Detector.resolved_options(self)

    def map_taps(self) -> list[MapTap]:
        """The three finest levels, where the others are too coarse to look at a box."""
        heads = self.head.classification_head.module_list[:3]
        widths = [next(m for m in head.modules() if isinstance(m, nn.Conv2d)).in_channels for head in heads]
        return [MapTap(self.backbone, self.map_strides, widths, lambda _, maps: list(maps.values())[:3])]

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict[str, Tensor]:
        """Scores and offsets of every anchor; see `SSD.forward`."""
        dtype = next(self.backbone.parameters()).dtype
        maps = list(self.backbone(normalize_images(images, sizes, self.mean, self.std, dtype)).values())
        found = self.head(maps)
        anchors, image_hw = self.anchors(images.shape[-2:], images.device)
        return {"logits": found["cls_logits"], "offsets": found["bbox_regression"], "anchors": anchors,
                "image_hw": image_hw}  # fmt: skip

    @torch.compiler.disable
    @torch.no_grad()
    def anchors(self, image_hw: Sequence[int], device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Anchors (A, 4) cxcywh fractions of images of (h, w) pixels, and that size (2,), on `device`; kept there."""
        key = (*image_hw, str(device))
        if key not in self._anchors:
            weight, training = next(self.backbone.parameters()), self.backbone.training
            self.backbone.eval()
            images = weight.new_zeros(1, 3, *image_hw)
            with torch.autocast(weight.device.type, enabled=False):
                maps = list(self.backbone(images).values())
            self.backbone.train(training)
            xyxy = self.anchor_generator(ImageList(images, [tuple(image_hw)]), maps)[0]
            whole = send(torch.tensor([*image_hw][::-1] * 2), xyxy.device)
            self._anchors[key] = xyxy_to_cxcywh(xyxy / whole).to(device), send(torch.tensor(tuple(image_hw)), device)
        return self._anchors[key]


class SSDLite320(SSD300):
    """torchvision's `ssdlite320_mobilenet_v3_large`. Settings: see `Ssdlite320Options`; see `SSD300`."""

    Options = Ssdlite320Options
    builder = staticmethod(ssdlite320_mobilenet_v3_large)
    map_strides = (16, 32, 64)
