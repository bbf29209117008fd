"""Feature maps of several strides from a plain vision transformer of timm (ViT, DeiT, SigLIP, EVA, DINOv2, DINOv3).

Li et al., "Exploring plain vision transformer backbones for object detection", ECCV 2022, section 3: the simple feature
pyramid. Its windowed attention is left out, and so are the two convolutions at the end of each level, because every
detector here has convolutions of its own behind the maps.
"""

from collections.abc import Sequence

import timm
import torch
from timm.layers import LayerNorm2d
from timm.models import FeatureInfo
from torch import Tensor, nn

from toolkit.models.backbones import timm_model

PATCH = 16  # pixels; weights of other patches are resampled, as FlexiViT (Beyer et al., CVPR 2023) does
STRIDES = (4, 8, 16, 32)
_KEYWORDS = {"features_only": True, "patch_size": PATCH, "dynamic_img_size": True}


def is_plain_vit(name: str) -> bool:
    """Return whether timm's model `name` is a transformer of patches that accepts images of any size."""
    if not timm.is_model(name):
        return False
    try:
        with torch.device("meta"):  # only the shapes are needed
            strides = timm.create_model(name, **_KEYWORDS).feature_info.reduction()
    except (TypeError, RuntimeError, AttributeError, AssertionError):  # a model without these keywords, or without maps
        return False
    return set(strides) == {PATCH}


class VitPyramid(nn.Module):
    """A feature pyramid: normalised images (B, 3, H, W) to maps (B, C_i, H / s_i, W / s_i); 16 divides H and W.

    Args:
        name: a timm model for which `is_plain_vit` holds.
        pretrained_backbone: as in `timm_model`.
        strides: strides in pixels of the maps, among 4, 8, 16 and 32, increasing. Widths are a quarter, half, all and
            all of the transformer's.

    Raises:
        BadInput: as `timm_model`.
    """

    def __init__(self, name: str, pretrained_backbone: bool | str, strides: Sequence[int]):
        super().__init__()
        self.vit = timm_model(name, pretrained_backbone, out_indices=(-1,), **_KEYWORDS)
        width = self.vit.feature_info.channels()[-1]
        self.norm = LayerNorm2d(width)
        self.scales = nn.ModuleList(_scale(width, stride) for stride in strides)
        widths = {4: width // 4, 8: width // 2}
        maps = [
            {"num_chs": widths.get(stride, width), "reduction": stride, "module": f"scales.{i}"}
            for i, stride in enumerate(strides)
        ]
        self.feature_info = FeatureInfo(maps, tuple(range(len(maps))))

    def forward(self, pixels: Tensor) -> list[Tensor]:
        features = self.norm(self.vit(pixels)[-1])
        return [scale(features) for scale in self.scales]


def _scale(width: int, stride: int) -> nn.Module:
    def twice(wide: int) -> nn.Module:
        return nn.ConvTranspose2d(wide, wide // 2, kernel_size=2, stride=2)

    if stride == 4:
        return nn.Sequential(twice(width), LayerNorm2d(width // 2), nn.GELU(), twice(width // 2))
    return {8: twice(width), 16: nn.Identity(), 32: nn.MaxPool2d(2)}[stride]
