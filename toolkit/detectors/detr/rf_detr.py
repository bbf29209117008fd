"""RF-DETR (Robinson et al., 2025, arXiv 2511.09554) with its own DINOv2 in windows: transformers' model with the losses
of this toolkit."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    RfDetrConfig,
    RfDetrForInstanceSegmentation,
    RfDetrForObjectDetection,
    RfDetrImageProcessor,
)
from transformers.models.rf_detr.modeling_rf_detr import RfDetrDinov2Embeddings
from transformers.utils import ModelOutput

from toolkit.base.errors import BadInput
from toolkit.detectors.detr.base import precision, projection_tap
from toolkit.detectors.detr.configuration import FOLLOW_FROM_DEPTH, handed_over, without_layers_behind_maps
from toolkit.detectors.detr.detr_criterion import MatchingCosts
from toolkit.detectors.detr.focal_criterion import FocalCriterion, quality_terms
from toolkit.detectors.detr.group_detr import GroupDetr
from toolkit.detectors.detr.mask_terms import MaskTerms, PredictedMasks
from toolkit.detectors.detr.options import RfDetrOptions
from toolkit.detectors.detr.rf_detr_masks import MaskHead
from toolkit.detectors.detr.sizes import RF_DETR_SIZES, quarters
from toolkit.models.backbones import timm_model
from toolkit.models.detector import MapTap
from toolkit.models.pasted_masks import masks_over_image
from toolkit.models.weights.difference import difference
from toolkit.models.weights.names import count_parts, pairs, renamed, split_attention

PUBLISHED_MAPS = [size["backbone_config"]["out_indices"] for size in RF_DETR_SIZES.values()]
TIMM_DINOV2 = {384: "vit_small_patch14_dinov2", 768: "vit_base_patch14_dinov2"}  # by width
TIMM_LAYER = """
    attn.proj attention.o_proj, attn attention
    ls1.gamma layer_scale1.lambda1, ls2.gamma layer_scale2.lambda1
"""
TIMM_NAMES = [
    *pairs(TIMM_LAYER, below=[("blocks.*.", "encoder.layer.*.")]),
    *pairs("blocks encoder.layer, cls_token embeddings.cls_token, norm layernorm"),
    *pairs("patch_embed.proj embeddings.patch_embeddings.projection"),
]


class RfDetr(GroupDetr):
    """`transformers.RfDetrForObjectDetection`. Settings: see `RfDetrOptions`.

    The sides of images are multiples of patch size times windows (56 px in size base). The pretrained backbone is
    timm's DINOv2 of the same width.
    """

    Options = RfDetrOptions
    config_class = RfDetrConfig
    model_class = RfDetrForObjectDetection
    processor_class = RfDetrImageProcessor
    # transformers: 4 points, which is RF-DETR large of 2025, and 1e-5 for the projector's norms
    published = {"decoder_n_points": 2, "layer_norm_eps": 1e-6}

    @property
    def stride(self) -> int:
        backbone = self.model.config.backbone_config
        return backbone.patch_size * backbone.num_windows

    @property
    def feature_strides(self) -> list[int]:
        return [self.model.config.backbone_config.patch_size]

    def _entries(self, options: RfDetrOptions, source_config: Mapping | None) -> dict[str, Any]:
        values = handed_over(options, source_config)
        size = values.get("size")
        if source_config is None and "decoder_layers" not in options.given:
            values["decoder_layers"] = RF_DETR_SIZES[size or "base"]["decoder_layers"]
        if "encoder_layers" not in options.given:
            values["encoder_layers"] = None
        entries = self._decoder_entries(values)
        entries["backbone_config"] = _backbone_entry(source_config, values["encoder_layers"], size)
        if source_config is None and options.masks:
            entries["intermediate_size"] = 4 * options.d_model  # of the mask head
        return entries

    def _initialise(self, options: RfDetrOptions, source_config: Mapping | None) -> None:
        super()._initialise(options, source_config)
        maps = list(self.model.config.backbone_config.out_indices)
        of_source = ((source_config or {}).get("backbone_config") or {}).get("out_indices")
        if maps not in PUBLISHED_MAPS and maps != of_source:
            # Checkpoints from before these maps were at a quarter each have the same tensors but for this one.
            self.register_buffer("map_layers", torch.tensor(maps))
        self.predicts_masks = options.masks
        if options.masks:
            self.masks = MaskHead(self.model.config)

    def _start_backbone(self, options: RfDetrOptions) -> None:
        vit = self.model.model.backbone.backbone
        vit.embeddings.__class__ = _Embeddings
        backbone = self.model.config.backbone_config
        if options.pretrained_backbone:
            side = backbone.image_size // backbone.patch_size
            load_timm_weights(vit, options.pretrained_backbone, side)

    def _size_of(self, config: RfDetrConfig) -> str | None:
        backbone = config.backbone_config
        for name, entries in RF_DETR_SIZES.items():
            published = entries["backbone_config"]
            if all(getattr(backbone, key) == published[key] for key in ("patch_size", "num_windows", "image_size")):
                return name
        return None

    def _criterion(self, num_classes: int, num_layers: int, costs: MatchingCosts) -> nn.Module:
        if not self.predicts_masks:
            return super()._criterion(num_classes, num_layers, costs)
        config = self.model.config
        ce = config.mask_class_loss_coefficient  # of the loss and the matching, as in the original program
        dice = config.mask_dice_loss_coefficient
        self.default_weights = {**self.default_weights, "loss_mask_ce": ce, "loss_mask_dice": dice}
        masks = MaskTerms((ce, dice), config.mask_point_sample_ratio)
        return FocalCriterion(num_layers, costs, "classes", quality_terms, masks)

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict[str, Tensor]:
        """Return what `GroupDetr.forward` does, and with masks also `mask_maps`, `mask_queries` and `mask_bias` of the
        decoder layers and, last, of the encoder, see `PredictedMasks`."""
        outputs = self._states(images, sizes)
        masks = self._masks(outputs, images) if self.predicts_masks else {}
        return {**self._predictions(outputs), **masks}

    def _masks(self, outputs: ModelOutput, images: Tensor) -> dict[str, Tensor]:
        states = self._layer_states(outputs)
        with precision(self.training, images.device):
            masks = self.masks(outputs.backbone_features, states, outputs.enc_outputs_class, images.shape[-2:])
        return {f"mask_{name}": value for name, value in masks._asdict().items()}

    def decode(
        self,
        outputs: Mapping[str, Tensor],
        sizes: Tensor,
        orig_sizes: Tensor,
        score_threshold: float,
        top_k: int,
    ) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Return what `TransformersDetector.decode` does, and with masks also `masks` (B, K, h, w), over the whole
        image."""
        boxes, scores, labels, queries = self._best_pairs(outputs, orig_sizes, top_k)
        if not self.predicts_masks:
            return boxes, scores, labels
        of_queries = outputs["mask_queries"][-2].float()  # of the last decoder layer
        chosen = of_queries.gather(1, queries[..., None].expand(-1, -1, of_queries.shape[-1]))
        maps = outputs["mask_maps"][-2].float()
        logits = PredictedMasks(maps, chosen, outputs["mask_bias"].float()).logits()
        return boxes, scores, labels, {"masks": logits.sigmoid()}

    def paste_masks(self, masks: Tensor, boxes_xyxy: Tensor, size_hw: tuple[int, int]) -> Tensor:
        return masks_over_image(masks, size_hw)

    def _saved_model(self) -> PreTrainedModel:
        if not self.predicts_masks:
            return self.model
        model = RfDetrForInstanceSegmentation(copy.deepcopy(self.model.config))
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        model.load_state_dict(tensors | self.masks.state_dict())
        return model

    def map_taps(self) -> list[MapTap]:
        config = self.model.config
        projector = self.model.model.backbone.projector
        return [projection_tap(projector, config.backbone_config.patch_size, config.d_model)]


class _Embeddings(RfDetrDinov2Embeddings):
    """transformers' embeddings with a correction: theirs, like the original's, swap rows and columns of the windows of
    an image that is not square."""

    def window_partition(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        """Split tokens (B, 1 + patches, D) into (B * windows^2, 1 + patches per window, D), windows of an image in
        rows."""
        windows = self.config.num_windows
        patch = self.config.patch_size
        rows, columns = (side // patch // windows for side in (height, width))
        grid = embeddings[:, 1:].unflatten(1, (windows, rows, windows, columns))
        by_window = grid.transpose(2, 3)  # (B, windows, windows, rows, columns, D)
        patches = by_window.reshape(-1, rows * columns, embeddings.shape[-1])
        class_tokens = embeddings[:, :1].repeat_interleave(windows**2, dim=0)
        return torch.cat((class_tokens, patches), dim=1)


@torch.no_grad()
def load_timm_weights(vit: nn.Module, pretrained: bool | str, side: int) -> None:
    """Load the weights of timm's DINOv2 of the same width into a DINOv2 of transformers.

    Args:
        vit: DINOv2 of transformers, with `embeddings`, `encoder.layer` and `layernorm`.
        pretrained: True (downloaded once), or a file of these weights.
        side: number of patches along a side of the position embeddings; those of timm are interpolated to it.

    Raises:
        BadInput: timm has no DINOv2 of this width, depth or patch size do not fit, or the weights cannot be loaded.
    """
    width = vit.embeddings.cls_token.shape[-1]
    if width not in TIMM_DINOV2:
        widths = ", ".join(f"{w} ({name})" for w, name in TIMM_DINOV2.items())
        raise BadInput(f"model.pretrained_backbone: timm has weights of width {widths}, not {width}; set it to false.")
    patch = vit.embeddings.patch_embeddings.projection.kernel_size[0]  # to which timm resamples its own
    model = timm_model(TIMM_DINOV2[width], pretrained, num_classes=0, patch_size=patch)
    source = model.state_dict()
    positions = resample_abs_pos_embed(source.pop("pos_embed"), [side, side], num_prefix_tokens=1)
    vit.embeddings.position_embeddings.copy_(positions)
    wanted = vit.state_dict()
    tensors = renamed(split_attention(source, ".qkv."), TIMM_NAMES)
    if vit.config.out_indices in PUBLISHED_MAPS:
        tensors = _without_layers_from(tensors, vit.config.num_hidden_layers)
    found = difference(wanted, tensors, optional=r"^(?!encoder\.layer\.)")
    if found:
        raise BadInput(
            f"model.pretrained_backbone: {TIMM_DINOV2[width]} does not fit the model ({found}); leave depth and patch "
            "size as published, or set it to false."
        )
    vit.load_state_dict(tensors, strict=False)


def _without_layers_from(tensors: Mapping[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Return the tensors of a DINOv2 by our names, without those of its layers from number `depth` on, from 0."""
    behind = tuple(f"encoder.layer.{layer}." for layer in range(depth, count_parts(tensors, "encoder.layer")))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(behind)}


def _backbone_entry(source_config: Mapping | None, encoder_layers: int | None, size: str | None) -> dict:
    """Return the config of DINOv2 small as in this size of RF-DETR, or the source's, without layers behind the deepest
    map; other depths give maps at each quarter."""
    published = RF_DETR_SIZES[size or "base"]["backbone_config"]
    entry = copy.deepcopy(dict((source_config or {}).get("backbone_config") or published))
    used = without_layers_behind_maps(entry)
    if encoder_layers in (None, entry.get("num_hidden_layers"), used.get("num_hidden_layers")):
        return used
    for name in FOLLOW_FROM_DEPTH:
        entry.pop(name, None)
    entry["num_hidden_layers"] = encoder_layers
    entry["out_indices"] = quarters(encoder_layers)
    return entry
