"""A small detector of every kind that can be exported, with random weights, and images for them."""

import functools

import torch

from toolkit.data.table import Category
from toolkit.models import build_detector

CLASSES = ["a", "b", "c"]
CATEGORIES = [Category(10 * i, name) for i, name in enumerate(CLASSES, start=1)]
TRANSFORMER = {"d_model": 32, "heads": 2, "decoder_layers": 2, "ffn_dim": 32}
DETR = TRANSFORMER | {"backbone": "test_resnet", "encoder_layers": 1, "num_queries": 20}
ECDET = TRANSFORMER | {"num_queries": 20, "num_denoising": 10, "hidden_expansion": 0.5}
REAL_TIME = ECDET | {"backbone": "test_resnet"}
VIT = TRANSFORMER | {"encoder_layers": 4, "num_queries": 4}
TWO_STAGE = {
    "rpn_pre_nms_top_n_test": 40,
    "rpn_post_nms_top_n_test": 16,
    "score_threshold": 0.01,
}
FASTER_RCNN = TWO_STAGE | {
    "backbone": "lcnet_035",
    "norm": "batch",
    "freeze": "none",
    "strides": [8, 16],
    "fpn_channels": 16,
    "anchor_sizes": [[16], [32]],
    "aspect_ratios": [1.0],
    "representation_size": 32,
}
SMALL = {
    "detr": DETR,
    "conditional_detr": DETR,
    "deformable_detr": DETR | {"d_model": 64},
    "deformable_detr, two stages": DETR | {"d_model": 64, "box_refine": "two_stage"},
    "dab-detr": DETR,
    "rt_detr_v2": REAL_TIME,
    "d_fine": REAL_TIME,
    "deimv2": REAL_TIME,
    "ecdet": ECDET,
    "rf_detr": VIT,
    "lw_detr": VIT | {"size": "large"},
    "faster_rcnn": FASTER_RCNN,
    "ssd": {
        "backbone": "lcnet_035",
        "strides": [4, -1],
        "channels": [16, 16],
        "aspect_ratios": [[2], [2]],
    },
    "ssdlite": {
        "backbone": "lcnet_035",
        "strides": [4, 8, 16, -1],
        "channels": [16] * 4,
        "aspect_ratios": [[2]] * 4,
    },
    "yolov3": {"backbone": "lcnet_035", "head_channels": [8, 8, 8]},
}
# Slow to export, or in need of larger images; the scene graph gives its detector.
LARGE = {
    "fasterrcnn_resnet50_fpn_v2": TWO_STAGE,
    "faster_rcnn, same padding": FASTER_RCNN | {"backbone": "tf_mobilenetv3_small_minimal_100"},
    "ssd300_vgg16": {},
    "ssdlite320_mobilenet_v3_large": {},
    "scene_graph": {
        "predicates": ["on"],
        "mode": "sgdet",
        "head": "motifs",
        "backbone": "test_resnet",
        "hidden_dim": 16,
        "embed_dim": 8,
    },
}
# With few layers, for what is shown with one detector: the time of an export is that of its nodes.
FEW_LAYERS = {
    "ssd, few layers": SMALL["ssd"] | {"backbone": "test_resnet"},
    "yolov3, few layers": SMALL["yolov3"] | {"backbone": "test_resnet"},
}
SEEN_HW = {"yolov3": (96, 128), "ssdlite320_mobilenet_v3_large": (320, 320)}


def scattered(detector):
    """The detector in evaluation, with weights far enough apart that scores are not all nearly equal."""
    with torch.no_grad():
        for parameter in detector.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return detector.eval()


@functools.cache
def exported_detector(name: str):
    """One of the detectors above; tests do not change it."""
    torch.manual_seed(0)
    options = (SMALL | LARGE | FEW_LAYERS)[name]
    detector = build_detector(name.partition(",")[0], class_names=CLASSES, **options)
    if not name.startswith(("fasterrcnn", "ssd300")):  # these are far apart as they are built
        scattered(detector).train()
    if name == "yolov3":
        for prediction in detector.predictions:
            torch.nn.init.normal_(prediction.weight, std=0.1)  # with more, scores tie at 1
    if name in SEEN_HW:
        let_norms_see(detector, SEEN_HW[name])
    return detector.eval().to(memory_format=torch.channels_last)  # as training leaves it


def let_norms_see(detector, size_hw) -> None:
    """Give norms the statistics of two images: otherwise most scores are equal to rounding."""
    for module in detector.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None  # the mean of all batches seen
    with torch.no_grad():
        detector(images_of(2, *size_hw, seed=9), torch.tensor([size_hw] * 2))


def side_of(name: str) -> int:
    return {"rf_detr": 112, "ssd300_vgg16": 300, "ssdlite320_mobilenet_v3_large": 320}.get(name, 64)


def images_of(batch: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    """Smooth noise, uint8 (B, 3, H, W): of pixels that are all alike a network says the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(batch, 3, 6, 6, generator=generator) * 255
    return torch.nn.functional.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 255).to(torch.uint8)
