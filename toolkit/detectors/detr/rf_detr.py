"""RF-DETR (Robinson et al., 2025, arXiv 2511.09554) with its own DINOv2 in windows: transformers' model with the losses
of this toolkit.

The criterion is LW-DETR's: groups of queries that are trained in parallel (Group DETR), one of which is used for
detection, and a classification loss whose targets combine score and IoU. The losses equal those of transformers'
`LwDetrForObjectDetectionLoss`.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    RfDetrConfig,
    RfDetrForInstanceSegmentation,
    RfDetrForObjectDetection,
    RfDetrImageProcessor,
)
from transformers.models.rf_detr.modeling_rf_detr import RfDetrDinov2Embeddings
from transformers.utils import ModelOutput

from toolkit.base.batch import normalize_images
from toolkit.base.errors import BadInput
from toolkit.detectors.detr.base import MatchedDetector, check_positions, precision, projection_tap
from toolkit.detectors.detr.configuration import handed_over, to_entries
from toolkit.detectors.detr.detr_criterion import MatchingCosts
from toolkit.detectors.detr.focal_criterion import FocalCriterion, quality_terms
from toolkit.detectors.detr.initialise import initialise_sampling_, initialise_transformer_, start_heads_
from toolkit.detectors.detr.mask_terms import MaskTerms, PredictedMasks
from toolkit.detectors.detr.options import RfDetrOptions
from toolkit.detectors.detr.rf_detr_masks import MaskHead
from toolkit.models.backbones import timm_model
from toolkit.models.detector import MapTap
from toolkit.models.pasted_masks import masks_over_image
from toolkit.models.weights.names import pairs, renamed, split_attention

# (patch size in pixels, windows a side, depths of the maps, side of the positions in pixels), and decoder layers: those
# of roboflow/rf-detr, rfdetr/config.py. Its larger sizes have another licence, its large of 2025 another pyramid.
RF_DETR_SIZES = {
    "nano": ((16, 2, [3, 6, 9, 12], 384), 2),
    "small": ((16, 2, [3, 6, 9, 12], 512), 3),
    "medium": ((16, 2, [3, 6, 9, 12], 576), 4),
    "large": ((16, 2, [3, 6, 9, 12], 704), 4),
    "base": ((14, 4, [2, 5, 8, 11], 518), 3),
}
BACKBONE_KEYS = ("patch_size", "num_windows", "out_indices", "image_size")
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


class RfDetr(MatchedDetector):
    """`transformers.RfDetrForObjectDetection`. Settings: see `RfDetrOptions`.

    The backbone does not mask padding, so all images must have one size, whose sides are multiples of patch size times
    windows (56 px in size base). The pretrained backbone is timm's DINOv2 of the same width.
    """

    Options = RfDetrOptions
    config_class = RfDetrConfig
    model_class = RfDetrForObjectDetection
    processor_class = RfDetrImageProcessor
    entries = {
        "d_model": ["d_model"],
        "decoder_layers": ["decoder_layers"],
        "ffn_dim": ["decoder_ffn_dim"],
        "num_queries": ["num_queries"],
        "dropout": ["dropout"],
    }
    # transformers: 4 points, which is RF-DETR large of 2025, and 1e-5 for the projector's norms
    published = {"decoder_n_points": 2, "layer_norm_eps": 1e-6}
    default_weights = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    class_tensors = {
        "model.class_embed.*": (0, 1, 0),
        "model.model.enc_out_class_embed.*": (0, 1, 0),
    }
    fixed_size = True

    def _entries(self, options: RfDetrOptions, source_config: Mapping | None) -> dict[str, Any]:
        values = handed_over(options, source_config)
        size = values.get("size")
        if source_config is None and "decoder_layers" not in options.given:
            values["decoder_layers"] = RF_DETR_SIZES[size or "base"][1]
        entries = to_entries(values, self.entries)
        heads = values.get("heads")
        if heads is not None:
            entries |= {
                "decoder_self_attention_heads": heads,
                "decoder_cross_attention_heads": 2 * heads,
            }
        entries["backbone_config"] = _backbone_entry(source_config, values.get("encoder_layers"), size)
        if source_config is None and options.masks:
            entries["intermediate_size"] = 4 * options.d_model  # of the mask head
        return entries

    def _initialise(self, options: RfDetrOptions, source_config: Mapping | None) -> None:
        core = self.model.model
        for module in core.backbone.projector.modules():
            if isinstance(module, nn.Conv2d):
                module.reset_parameters()
        initialise_transformer_(core.decoder)
        initialise_transformer_(core.enc_output)
        initialise_sampling_(self.model, core.decoder)
        nn.init.zeros_(core.reference_point_embed.weight)  # of the queries' boxes
        core.query_feat.reset_parameters()
        start_heads_(self.model.class_embed, self.model.bbox_embed)
        for group in range(len(core.enc_output)):
            core.enc_out_class_embed[group] = copy.deepcopy(self.model.class_embed)
            core.enc_out_bbox_embed[group] = copy.deepcopy(self.model.bbox_embed)
        self.predicts_masks = options.masks
        if options.masks:
            self.masks = MaskHead(self.model.config)

    def _prepare_backbone(self, options: RfDetrOptions, source_config: Mapping | None) -> dict[str, Any]:
        """Prepare the backbone; the options also have `heads`, `encoder_layers` and `size` (None: not one of ours)."""
        config = self.model.config
        vit = self.model.model.backbone.backbone
        vit.embeddings.mask_token.requires_grad_(False)  # of pretraining: never used
        vit.embeddings.__class__ = _Embeddings
        backbone = config.backbone_config
        if options.pretrained_backbone:
            side = backbone.image_size // backbone.patch_size
            load_timm_weights(vit, options.pretrained_backbone, side)
        self.stride = backbone.patch_size * backbone.num_windows
        heads = config.decoder_self_attention_heads
        in_proportion = config.decoder_cross_attention_heads == 2 * heads
        size = _size_of(backbone)
        if options.given.get("size") not in (None, size):
            raise BadInput(f"model.size {options.size}: the pretrained model has another one; leave it out")
        return {
            "heads": heads if in_proportion else None,
            "encoder_layers": backbone.num_hidden_layers,
            "size": size,
        }

    def _criterion(self, num_classes: int, num_layers: int, costs: MatchingCosts) -> nn.Module:
        masks = None
        if self.predicts_masks:
            config = self.model.config
            ce = config.mask_class_loss_coefficient  # of the loss and the matching, as in the original program
            dice = config.mask_dice_loss_coefficient
            masks = MaskTerms((ce, dice), config.mask_point_sample_ratio)
            self.default_weights = {**self.default_weights, "loss_mask_ce": ce, "loss_mask_dice": dice}
        return FocalCriterion(num_layers, costs, "classes", quality_terms, masks)

    @property
    def groups(self) -> int:
        """Return the number of query groups that predict: all groups in training, 1 in evaluation."""
        return self.model.config.group_detr if self.training else 1

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict[str, Tensor]:
        """Return predictions of every decoder layer and of the encoder; in training, of all groups of queries. Images
        `(B, 3, H, W)` must be without padding; targets are not needed.

        Returns:
            `logits (L, B, G * Q, C)` and `boxes (L, B, G * Q, 4)` cxcywh as fractions of the image, for L layers and G
            groups of Q queries; `encoder_logits (B, G * Q, C)`, `encoder_boxes (B, G * Q, 4)`; with masks also
            `mask_maps`, `mask_queries` and `mask_bias` of the L layers and, last, of the encoder, see
            `PredictedMasks`. G is 1 in evaluation.

        Raises:
            BadInput: the sides of the images are not multiples of patch size times windows, or the images have fewer
                positions than there are queries.
        """
        self._check_size(*images.shape[-2:])
        pixels = normalize_images(images, sizes, self.mean, self.std, dtype=self.model.dtype)
        with precision(self.training, images.device):
            outputs = self.model.model(pixels)
            masks = self._masks(outputs, images) if self.predicts_masks else {}
        with torch.autocast(images.device.type, enabled=False):
            dtype = self.model.dtype
            states = outputs.intermediate_hidden_states[0 if self.aux_loss else -1 :].to(dtype)
            references = outputs.intermediate_reference_points[-1].to(dtype)  # the same for all layers
            logits, boxes = self.model.predict_class_and_boxes(states, references)
            return {
                "logits": logits,
                "boxes": boxes,
                "encoder_logits": self.model.predict_encoder_class_logits(outputs.enc_outputs_class.to(dtype)),
                "encoder_boxes": outputs.enc_outputs_coord_logits.to(dtype),
                **masks,
            }

    def _masks(self, outputs: ModelOutput, images: Tensor) -> dict[str, Tensor]:
        states = outputs.intermediate_hidden_states[0 if self.aux_loss else -1 :]
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

    def last_layer(self, outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        count = self.model.config.num_queries  # of the first group, the detecting one
        logits = outputs["logits"][-1]
        boxes = outputs["boxes"][-1]
        return logits[:, :count], boxes[:, :count]

    def _check_size(self, height: int, width: int) -> None:
        config = self.model.config
        if height % self.stride or width % self.stride:
            raise BadInput(
                f"images of {height}x{width} px: rf_detr needs sides that are multiples of {self.stride} (patch size "
                "times windows); set data.image_size."
            )
        patch = config.backbone_config.patch_size
        positions = (height // patch) * (width // patch)
        check_positions(height, width, positions, config.num_queries)


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
    unfit = []
    for key, tensor in tensors.items():
        if key not in wanted or wanted[key].shape != tensor.shape:
            unfit.append(key)
    missing = {key for key in wanted if key.startswith("encoder.layer.")} - set(tensors)
    if unfit or missing:
        first = sorted([*unfit, *missing])[0]
        raise BadInput(
            f"model.pretrained_backbone: {TIMM_DINOV2[width]} does not fit the model ({first} first of all); leave "
            "depth and patch size as published, or set it to false."
        )
    vit.load_state_dict(tensors, strict=False)


def _size_of(backbone: PreTrainedConfig) -> str | None:
    """Return the name of the published size that has this backbone; None: another one."""
    built = (backbone.patch_size, backbone.num_windows, backbone.image_size)
    for name, ((patch_size, windows, _, side), _) in RF_DETR_SIZES.items():
        if built == (patch_size, windows, side):
            return name
    return None


def _backbone_entry(source_config: Mapping | None, encoder_layers: int | None, size: str | None) -> dict:
    """Return the config of DINOv2 small as in this size of RF-DETR, or the source's; other depths give maps at each
    quarter."""
    published, _ = RF_DETR_SIZES[size or "base"]
    base = {
        "model_type": "rf_detr_dinov2",
        "hidden_size": 384,
        "num_attention_heads": 6,
        "num_hidden_layers": 12,
        **dict(zip(BACKBONE_KEYS, published, strict=True)),
    }
    entry = dict((source_config or {}).get("backbone_config") or base)
    if encoder_layers in (None, entry.get("num_hidden_layers")):
        return entry
    for name in ("out_features", "stage_names", "window_block_indexes"):  # these follow from the depth
        entry.pop(name, None)
    quarters = {max(1, round(encoder_layers * part / 4) - 1) for part in (1, 2, 3, 4)}
    entry["num_hidden_layers"] = encoder_layers
    entry["out_indices"] = sorted(quarters)
    return entry
