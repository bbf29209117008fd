"""A detector of one's own: torchvision's FCOS (Tian et al., ICCV 2019) on a timm backbone.

accelerate launch scripts/train_faster_rcnn.py --model.architecture fcos_detector:FCOS   # this folder on PYTHONPATH
"""

from dataclasses import dataclass

from torch.nn.utils.rnn import pad_sequence
from torchvision.models.detection import fcos
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList

from toolkit.base.batch import normalize_images
from toolkit.base.box_ops import resize_boxes
from toolkit.detectors.faster_rcnn.build import FeaturePyramid
from toolkit.models import DetectorOptions
from toolkit.models.backbones import image_statistics, timm_features
from toolkit.models.detector import Detector

STRIDES = (8, 16, 32)


@dataclass
class FCOSOptions(DetectorOptions):
    """FCOS."""

    backbone: str = "test_resnet"
    """Name of a timm model with feature maps of strides 8, 16 and 32."""
    channels: int = 32
    """Channels of the feature pyramid and of the heads, a multiple of 32."""
    score_threshold: float = 0.05
    """Score that a detection must have."""
    nms_threshold: float = 0.6
    """Overlap from which a better detection of the same class suppresses another."""


class FCOS(Detector):
    """One box for each point of the maps; the losses of a batch are means over its positive points."""

    Options = FCOSOptions
    loss_names = ("classification", "bbox_regression", "bbox_ctrness")
    default_weights = dict.fromkeys(loss_names, 1.0)
    divided_by = "images"

    def __init__(self, class_names, options: FCOSOptions):
        super().__init__()
        body, widths = timm_features(
            options.backbone, strides=STRIDES, pretrained_backbone=options.pretrained_backbone, norm="batch"
        )
        self.mean, self.std = image_statistics(options.backbone)
        pyramid = FeaturePyramid(body, widths, options.channels, extra_level=False)
        anchors = AnchorGenerator(tuple((stride,) for stride in STRIDES), ((1.0,),) * len(STRIDES))
        self.net = fcos.FCOS(
            pyramid,
            len(class_names),
            anchor_generator=anchors,
            score_thresh=options.score_threshold,
            nms_thresh=options.nms_threshold,
        )

    def forward(self, images, sizes, targets=None):
        maps = list(
            self.net.backbone(
                normalize_images(
                    images,
                    sizes,
                    self.mean,
                    self.std,
                )
            ).values()
        )
        anchors = self.net.anchor_generator(ImageList(images, [tuple(images.shape[-2:])] * len(images)), maps)
        points = [level.shape[-2] * level.shape[-1] for level in maps]
        return self.net.head(maps) | {"anchors": anchors, "points": points}

    def denominators(self, targets):
        return {"images": float(len(targets))}

    def criterion(self, outputs, targets, denominators):
        heads = {name: outputs[name].float() for name in ("cls_logits", "bbox_regression", "bbox_ctrness")}
        losses = self.net.compute_loss(targets, heads, outputs["anchors"], outputs["points"])
        return {name: value * len(targets) / denominators["images"] for name, value in losses.items()}, {}

    def decode(self, outputs, sizes, orig_sizes, score_threshold, top_k):
        names = ("cls_logits", "bbox_regression", "bbox_ctrness")
        heads = {name: list(outputs[name].float().split(outputs["points"], dim=1)) for name in names}
        anchors = [list(each.split(outputs["points"])) for each in outputs["anchors"]]
        found = self.net.postprocess_detections(heads, anchors, [tuple(size) for size in sizes.tolist()])
        boxes, scores, labels = (
            pad_sequence([each[name] for each in found], batch_first=True, padding_value=-1)
            for name in ("boxes", "scores", "labels")
        )
        return resize_boxes(boxes, sizes, orig_sizes), scores, labels
