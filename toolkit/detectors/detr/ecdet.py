"""ECDet (Liu et al., 2026, "EdgeCrafter", arXiv 2603.18739): DEIMv2 on a small vision transformer of its own, ECViT.

transformers does not have ECDet. It is built from transformers' DEIMv2, and `as_ecdet_` replaces the parts in which the
publisher's program differs (Intellindust-AI-Lab/EdgeCrafter, ecdetseg/engine/edgecrafter: ecvit.py, decoder.py).
"""

import copy
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Deimv2Config, Deimv2ForObjectDetection
from transformers.models.deimv2.modeling_deimv2 import Deimv2ConvNormLayer, Deimv2MLP

from toolkit.base.errors import BadInput
from toolkit.detectors.detr.d_fine import DFine
from toolkit.detectors.detr.deimv2 import Deimv2, as_its_program_
from toolkit.detectors.detr.options import EcdetOptions
from toolkit.detectors.detr.sizes import ECDET_BACKBONE_FILES, ECDET_SIZES, size_of
from toolkit.detectors.detr.weights_ecdet import ecvit_names
from toolkit.models.weights.backbone_file import load_publishers_file


class EcdetConfig(Deimv2Config):
    """The entries of transformers' DEIMv2, whose `backbone_config` is a DINOv3 with the dimensions of the ECViT."""

    model_type = "ecdet"


class Ecdet(DFine):
    """ECDet. Settings: see `EcdetOptions`. See `RTDetrV2` for the images and the exceptions."""

    Options = EcdetOptions
    config_class = EcdetConfig
    model_class = Deimv2ForObjectDetection
    is_mal = True  # the classification loss: matchability-aware
    default_weights = Deimv2.default_weights

    def __init__(self, class_names: Sequence[str], options: EcdetOptions, *, source_config: Mapping | None = None):
        if source_config is None and options.size not in ECDET_SIZES:
            raise BadInput(f"model.size: {options.size!r} is not one of {', '.join(ECDET_SIZES)}.")
        source = source_config or copy.deepcopy(ECDET_SIZES[options.size])
        size = size_of(source, ECDET_SIZES, ["backbone_config"])
        if options.given.get("size") not in (None, size):
            raise BadInput(f"model.size {options.size}: the pretrained model has another one; leave it out")
        own = copy.copy(options)  # the backbone is not timm's
        own.pretrained_backbone = False
        super().__init__(class_names, own, source_config=source)
        as_ecdet_(self.model)
        self.is_of_transformers = False
        if options.pretrained_backbone:
            published = ECDET_BACKBONE_FILES.get(size, "there is none for this size")
            name = f"ECDet {size or 'of another size'}"
            load_publishers_file(self._backbone(), options.pretrained_backbone, ecvit_names, name, published)
        self.used["size"] = size

    def _backbone(self) -> nn.Module:
        return self.model.model.conv_encoder.backbone


def as_ecdet_(model: Deimv2ForObjectDetection) -> None:
    """Change a DEIMv2 of transformers in place so that it is the ECDet of the same dimensions.

    It chooses queries, embeds their positions and predicts as DEIMv2's own program does, see `as_its_program_`. The
    replaced parts are initialised as PyTorch does, and so are they in the publisher's program.
    """
    as_its_program_(model)
    core = model.model
    config = model.config
    width = config.d_model
    for layer in core.decoder.layers:
        layer.mlp = Deimv2MLP(width, config.decoder_ffn_dim, width, num_layers=2, act="silu")
        layer.self_attn_layer_norm = nn.LayerNorm(width)
        layer.gateway.norm = nn.LayerNorm(width)
        layer.final_layer_norm = nn.LayerNorm(width)
    core.conv_encoder = _Pyramid(config, core.conv_encoder.backbone)


class _Pyramid(nn.Module):
    """ECViT and three maps of strides 8, 16 and 32 made of its last layers (`ViTAdapter` in the publisher's program).

    vit: a DINOv3 of transformers that returns maps of equal size and has no norms of them; its patches are replaced.
    """

    def __init__(self, config: EcdetConfig, vit: nn.Module):
        super().__init__()
        vit.embeddings.patch_embeddings = _Patches(config)
        self.backbone = vit
        width = config.backbone_config.hidden_size
        projected = 1 if width == config.encoder_hidden_dim else 3  # the coarsest map alone, or all
        self.projections = nn.ModuleList()
        for _ in range(projected):
            self.projections.append(Deimv2ConvNormLayer(config, width, config.encoder_hidden_dim, 1, 1))

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """Return the maps (B, D, H / 8, W / 8), (B, D, H / 16, W / 16) and (B, D, H / 32, W / 32) of images
        (B, 3, H, W)."""
        of_layers = self.backbone(pixels).feature_maps
        features = torch.stack(of_layers).mean(0)
        height, width = features.shape[-2:]
        maps = []
        for size_hw in ((2 * height, 2 * width), (height, width), (height // 2, width // 2)):
            maps.append(F.interpolate(features, size=size_hw, mode="bilinear", align_corners=False))
        first = len(maps) - len(self.projections)
        for level, projection in enumerate(self.projections, start=first):
            maps[level] = projection(maps[level])
        return maps


class _Patches(nn.Conv2d):
    """Patches of 16 pixels, embedded by four convolutions of stride 2. This module is the last of them, because
    transformers looks for `weight` at the embedding of patches."""

    def __init__(self, config: EcdetConfig):
        width = config.backbone_config.hidden_size
        super().__init__(width // 2, width, kernel_size=3, stride=2, padding=1)
        self.convs = nn.ModuleList()
        entering = config.backbone_config.num_channels
        for leaving in (width // 8, width // 4, width // 2):
            self.convs.append(Deimv2ConvNormLayer(config, entering, leaving, 3, 2, activation="relu"))
            entering = leaving

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the embedded patches (B, D, H / 16, W / 16) of images (B, 3, H, W)."""
        for conv in self.convs:
            pixels = conv(pixels)
        return super().forward(pixels)
