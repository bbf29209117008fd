"""Small detectors with random weights, most of the DETR family, and batches for them, for the tests of detectors."""

import torch
import yaml
from places import SMALL_CONFIGS
from published import SMALL_ECDET
from transformers import (
    Deimv2Config,
    DFineConfig,
    DINOv3ViTConfig,
    HGNetV2Config,
    RTDetrResNetConfig,
    RTDetrV2Config,
)

from toolkit.base.box_ops import normalize_boxes, xyxy_to_cxcywh
from toolkit.data.batches import collate
from toolkit.data.table import Category
from toolkit.models import build_detector
from toolkit.step.losses import LossWeights

CLASSES = ["circle", "square", "star"]
CATEGORIES = [Category(7, "circle"), Category(3, "square"), Category(90, "star")]
TRANSFORMER = {"d_model": 32, "heads": 2, "decoder_layers": 2, "ffn_dim": 32, "num_queries": 6}
ON_TIMM = {"backbone": "test_resnet", "freeze": "none", **TRANSFORMER, "encoder_layers": 1, "dropout": 0.0}
TINY_RF_DETR = {
    "backbone_config": {
        "model_type": "rf_detr_dinov2",
        "hidden_size": 32,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 8,
        "num_windows": 2,
        "num_hidden_layers": 2,
        "out_indices": [1, 2],
    },
    "d_model": 32,
    "decoder_self_attention_heads": 2,
    "decoder_cross_attention_heads": 4,
    "decoder_layers": 2,
    "decoder_ffn_dim": 32,
    "num_queries": 6,
    "group_detr": 3,
    "dropout": 0.0,
}
TINY_LW_DETR = {
    "backbone_config": {
        "model_type": "lw_detr_vit",
        "hidden_size": 24,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "window_block_indices": [0],
        "out_indices": [1, 2],
    },
    "projector_scale_factors": [2.0, 0.5],
    "d_model": 32,
    "decoder_self_attention_heads": 2,
    "decoder_cross_attention_heads": 4,
    "decoder_layers": 2,
    "decoder_ffn_dim": 32,
    "decoder_n_points": 2,
    "num_queries": 6,
    "group_detr": 3,
}
FINE = {
    "backbone": "test_resnet",
    "freeze": "none",
    **TRANSFORMER,
    "num_queries": 12,
    "num_denoising": 8,
    "hidden_expansion": 0.5,
}
HYBRIDS = ("rt_detr_v2", "d_fine", "deimv2")  # which transformers has
REAL_TIME = (*HYBRIDS, "ecdet")
SMALL = {  # `+` and `++`: variants of an architecture
    "detr": ON_TIMM,
    "conditional_detr": ON_TIMM,
    "deformable_detr": ON_TIMM,
    "deformable_detr+": {**ON_TIMM, "box_refine": "iterative"},
    "deformable_detr++": {**ON_TIMM, "box_refine": "two_stage"},
    "dab-detr": ON_TIMM,
    "rf_detr": {"source_config": TINY_RF_DETR},
    "lw_detr": {"source_config": TINY_LW_DETR},
    **dict.fromkeys(HYBRIDS, FINE),
    "ecdet": {"source_config": SMALL_ECDET["s"] | {"decoder_layers": 2, "num_queries": 12, "num_denoising": 8}},
}
OF_TRANSFORMERS = [name for name in SMALL if name != "ecdet"]


def settings_in(config: str) -> dict:
    """The settings of the detector in one of the small configurations."""
    return yaml.safe_load((SMALL_CONFIGS / f"{config}.yaml").read_text())["model"]


MODELS = {name: {"architecture": name.rstrip("+"), **options} for name, options in SMALL.items()}
MODELS |= {
    "without denoising": {"architecture": "rt_detr_v2", **FINE, "num_denoising": 0},
    "yolov3": {"architecture": "yolov3", **settings_in("train_yolov3")},
    "ssd": {"architecture": "ssd", **settings_in("train_ssd")},
    "faster_rcnn": {"architecture": "faster_rcnn", **settings_in("train_faster_rcnn")},
}


def built(name: str, **options):
    """One of `MODELS` in training, from random weights."""
    options = MODELS[name] | options
    return build(options.pop("architecture"), **options).train()


def build(name: str, seed: int = 0, **options):
    """A detector with these settings alone."""
    torch.manual_seed(seed)
    return build_detector(name.rstrip("+"), **{"class_names": CLASSES, **options})


def small(name: str, **options):
    return build(name, **{**SMALL[name], **options})


def wake(detector):
    """Heads that start at zero, and norms that start as the identity, would hide what is wrong below or beside them."""
    for name, module in detector.model.named_modules():
        if isinstance(module, torch.nn.LayerNorm):
            torch.nn.init.normal_(module.weight, mean=1.0, std=0.3)
            torch.nn.init.normal_(module.bias, std=0.3)
        if isinstance(module, torch.nn.Linear) and any(part in name for part in ("bbox", "class", "reg_conf")):
            torch.nn.init.normal_(module.weight, std=0.2)
    return detector


def image_size(name: str) -> tuple[int, int]:
    return (64, 64) if name in ("rf_detr", "lw_detr") else (64, 96)


def random_target(count: int, hw=(64, 96), crowd: int = 0, seed: int = 0, dtype=torch.float32) -> dict:
    """`count` boxes inside the image, the first `crowd` of them crowd regions."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, 2, 2, generator=generator, dtype=dtype).sort(dim=1).values
    boxes = (corners * torch.tensor([hw[1], hw[0]])).flatten(1)
    return {
        "image_id": seed,
        "boxes": boxes,
        "labels": torch.randint(len(CLASSES), (count,), generator=generator),
        "area": (boxes[:, 2:] - boxes[:, :2]).prod(1),
        "iscrowd": torch.arange(count).lt(crowd).long(),
        "size": torch.tensor(hw),
        "orig_size": torch.tensor(hw) * 2,
    }


def random_images(hws, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(256, (3, *hw), generator=generator, dtype=torch.uint8) for hw in hws]


def batch_of(counts, hw=(64, 96), crowd: int = 0, smaller=None):
    """Images with `counts` boxes each; `smaller`: the size of the first one."""
    hws = [smaller or hw, *[hw] * (len(counts) - 1)]
    images = random_images(hws)
    targets = [random_target(n, hw, crowd, seed=i) for i, (n, hw) in enumerate(zip(counts, hws, strict=True))]
    return collate(list(zip(images, targets, strict=True)))


def forward(detector, batch):
    """The outputs of a batch in training."""
    return detector(batch.images, batch.sizes, batch.targets)


@torch.no_grad()
def predicted(detector, batch):
    """The outputs of a batch without targets."""
    return detector.eval()(batch.images, batch.sizes)


def run(detector, batch, denominators=None):
    """Losses and metrics of a batch."""
    outputs = forward(detector, batch)
    return detector.criterion(outputs, batch.targets, denominators or detector.denominators(batch.targets))


def weighted(detector, losses) -> torch.Tensor:
    return LossWeights(detector.loss_names, {}, detector.default_weights)(losses, 0).total


def gradient_of(detector, batch, size: int) -> torch.Tensor:
    """Of the losses of a batch, accumulated over micro-batches of `size` images, with the denominators of the batch."""
    detector.zero_grad()
    shared = detector.denominators(batch.targets)
    for start in range(0, len(batch.targets), size):
        part = slice(start, start + size)
        outputs = detector(batch.images[part], batch.sizes[part], batch.targets[part])
        weighted(detector, detector.criterion(outputs, batch.targets[part], shared)[0]).backward()
    return torch.cat([p.grad.flatten() for p in detector.parameters() if p.grad is not None])


def transformers_labels(targets) -> list[dict]:
    return [
        {"class_labels": t["labels"], "boxes": xyxy_to_cxcywh(normalize_boxes(t["boxes"], t["size"]))} for t in targets
    ]


HGNET = {
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 8, 8, 16],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [8, 8, 16, 16],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [1, 1, 1, 1],
    "hidden_sizes": [8, 8, 16, 16],
    "embedding_size": 8,
    "depths": [1, 1, 1, 1],
    "stage_light_block": [False] * 4,
}
TINY = {
    "d_model": 16,
    "encoder_hidden_dim": 16,
    "decoder_in_channels": [16] * 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "num_queries": 10,
    "decoder_layers": 2,
    "num_denoising": 6,
    "num_labels": 7,
    "hidden_expansion": 0.5,
}


def hub_config(name: str) -> dict:
    """As a folder of the hub has it: another number of classes, a backbone of transformers' own. dinov3: DEIMv2-S."""
    if name == "rt_detr_v2":
        resnet = RTDetrResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 8, 16, 16],
            depths=[1, 1, 1, 1],
            layer_type="basic",
            out_indices=[2, 3, 4],
        )
        return RTDetrV2Config(backbone_config=resnet, **TINY).to_dict()
    if name == "dinov3":
        vit = DINOv3ViTConfig(
            hidden_size=24,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            patch_size=16,
            out_indices=[1, 2, 3],
            reshape_hidden_states=True,
        )
        return Deimv2Config(backbone_config=vit, spatial_tuning_adapter_inplanes=4, depth_mult=0.34, **TINY).to_dict()
    config = {"d_fine": DFineConfig, "deimv2": Deimv2Config}[name]
    backbone = HGNetV2Config(out_indices=[2, 3, 4], **HGNET)
    return config(backbone_config=backbone, depth_mult=0.34, max_num_bins=16, reg_scale=8.0, **TINY).to_dict()
