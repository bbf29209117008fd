"""RT-DETR-v2 (Lv et al., 2024, arXiv 2407.17140) on any timm backbone: transformers' model, our criterion.

transformers computes the loss inside the model's forward, in whatever precision that runs in, already weighted, and
divided by the boxes of that batch. Here the forward only collects what the loss needs; `criterion` comes after it, in
float32, unweighted, divided by the denominators it is given. Its numbers are those of transformers' `RTDetrLoss`.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForObjectDetection, RTDetrImageProcessor, RTDetrV2Config
from transformers.models.rt_detr_v2.modeling_rt_detr_v2 import RTDetrV2MultiscaleDeformableAttention

from toolkit.boxes import cxcywh_to_xyxy, denormalize_boxes, normalize_boxes, xyxy_to_cxcywh
from toolkit.data.loaders import normalize_images
from toolkit.errors import BadInput
from toolkit.models.backbones import (
    backbone_config,
    feature_strides,
    freeze_backbone,
    image_statistics,
    load_backbone_weights,
)
from toolkit.models.detr_criterion import count_objects
from toolkit.models.final import save_transformers_folder
from toolkit.models.rt_detr_criterion import RTDetrCriterion

STRIDES = (8, 16, 32)
PRIOR = 0.01  # probability that the class heads start from


class RTDetrV2(nn.Module):
    """A detector (see docs/design.md) around `transformers.RTDetrV2ForObjectDetection`.

    It ignores padding, so images must all have one size, a multiple of 32, and fill it.

    Args:
        class_names: one name per class, in the order of the labels.
        backbone: name of a timm model with feature maps of stride 8, 16 and 32.
        pretrained_backbone: True (timm's, downloaded once), False (random), or the path of a file.
        freeze: "none" (batch norms learn), "norms", or "paper" (also stem and first stage); see `freeze_backbone`.
        d_model: width of encoder and decoder.
        num_queries: detections per image; at most the number of positions in the three feature maps.
        num_denoising: denoising queries in training; 0: none.
        hidden_expansion: width of the encoder's convolution blocks as a fraction of d_model.
        varifocal_gamma: see `RTDetrCriterion`; 1 tells classes apart sooner when training from random weights.
        encoder_layers, decoder_layers, heads, ffn_dim, dropout: the transformer.
        mean, std: of RGB values in [0, 1]; None: those the backbone was trained with.

    Raises:
        BadInput: unknown backbone or `freeze`, missing strides, weights that cannot be had.
    """

    default_weights = {"loss_vfl": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    denominator_names = ("boxes",)
    averaged_denominators = ("boxes",)  # by rank, in the original
    metric_names = ()
    fixed_size = True
    stride = 32

    def __init__(
        self,
        *,
        class_names: Sequence[str],
        backbone: str = "resnet18d",
        pretrained_backbone: bool | str = False,
        freeze: str = "norms",
        d_model: int = 256,
        heads: int = 8,
        encoder_layers: int = 1,
        decoder_layers: int = 6,
        ffn_dim: int = 1024,
        num_queries: int = 300,
        num_denoising: int = 100,
        hidden_expansion: float = 1.0,
        varifocal_gamma: float = 2.0,
        dropout: float = 0.0,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ):
        super().__init__()
        out_indices = _indices_of_strides(backbone)
        config = RTDetrV2Config(
            backbone_config=backbone_config(backbone, out_indices, frozen_norms=freeze != "none"),
            freeze_backbone_batch_norms=False,  # timm has frozen them, with their activations; see backbones.py
            d_model=d_model,
            encoder_hidden_dim=d_model,
            decoder_in_channels=[d_model] * len(STRIDES),
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_layers=encoder_layers,
            decoder_layers=decoder_layers,
            encoder_ffn_dim=ffn_dim,
            decoder_ffn_dim=ffn_dim,
            num_queries=num_queries,
            num_denoising=num_denoising,
            hidden_expansion=hidden_expansion,
            dropout=dropout,
            id2label=dict(enumerate(class_names)),
        )
        self.model = AutoModelForObjectDetection.from_config(config)
        initialise_as_published_(self.model)
        timm_backbone = self.model.model.backbone.model._backbone
        load_backbone_weights(timm_backbone, config.backbone_config, pretrained_backbone)
        freeze_backbone(timm_backbone, backbone, freeze, pretrained_backbone)
        self.model.loss_function = _no_loss_in_forward
        self.set_loss = RTDetrCriterion(len(class_names), decoder_layers, num_denoising > 0, varifocal_gamma)
        self.loss_names = self.set_loss.loss_names
        own_mean, own_std = image_statistics(backbone)
        self.mean, self.std = tuple(mean or own_mean), tuple(std or own_std)

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict:
        """Predictions, and with targets what the loss needs beside them.

        Args:
            images: `(B, 3, H, W)` uint8, H and W multiples of 32, without padding.
            sizes: `(B, 2)` int64, height and width of each image.
            targets: per image, on the device of the images; in training they also make the denoising queries.

        Returns:
            `logits (B, Q, C)` and `boxes (B, Q, 4)` cxcywh as fractions of the image; with targets also `layers`, what
            `RTDetrCriterion.forward` takes.

        Raises:
            BadInput: images of another size, or smaller than the number of queries allows.
        """
        self._check_size(*images.shape[-2:])
        pixels = normalize_images(images, sizes, self.mean, self.std, dtype=self.model.dtype)
        pixels = pixels.contiguous(memory_format=torch.channels_last)  # convolutions are a tenth faster
        labels = None if targets is None else [_transformers_target(target) for target in map(without_crowd, targets)]
        # Without denoising queries transformers keeps boxes in autocast's precision, in bfloat16 1/256 of the image:
        # evaluation is therefore in float32.
        precision = nullcontext() if self.training else torch.autocast(images.device.type, enabled=False)
        with precision:
            outputs = self.model(pixels, labels=labels)
        predictions = {"logits": outputs.logits, "boxes": outputs.pred_boxes}
        if targets is None:
            return predictions
        denoising = outputs.denoising_meta_values
        if denoising is not None:
            predictions = {k: v[:, denoising["dn_num_split"][0] :] for k, v in predictions.items()}
        return predictions | {
            "layers": {
                "logits": outputs.intermediate_logits,
                "boxes": outputs.intermediate_reference_points,
                "encoder_logits": outputs.enc_topk_logits,
                "encoder_boxes": outputs.enc_topk_bboxes,
                "denoising": denoising,
            }
        }

    def _check_size(self, height: int, width: int) -> None:
        if height % self.stride or width % self.stride:
            raise BadInput(f"images of {height}x{width} px: rt_detr_v2 needs both sides to be multiples of 32.")
        positions = sum((height // stride) * (width // stride) for stride in STRIDES)
        if positions < self.model.config.num_queries:
            raise BadInput(
                f"model.num_queries {self.model.config.num_queries}: images of {height}x{width} px have only "
                f"{positions} positions; use larger images or fewer queries."
            )

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """This batch's number of boxes, from CPU targets; crowd regions are not counted."""
        return {"boxes": float(sum(count_objects(targets)))}

    def criterion(self, outputs: Mapping, targets: Sequence[Mapping], denominators: Mapping):
        """Losses of `forward`'s outputs, `(losses, {})`: there are no metrics; see `RTDetrCriterion.forward`."""
        return self.set_loss(outputs["layers"], list(map(without_crowd, targets)), denominators["boxes"]), {}

    def postprocess(
        self,
        outputs: Mapping[str, Tensor],
        sizes: Tensor,
        orig_sizes: Tensor,
        score_threshold: float = 0.0,
        top_k: int = 100,
    ) -> list[dict[str, Tensor]]:
        """The `top_k` best pairs of query and class, best first, as transformers' RT-DETR image processor chooses them.

        Returns, per image, on the device: `boxes (K, 4)` xyxy in pixels of the original image, float32, not clipped;
        `scores (K,)`; `labels (K,)` int64. Only scores above `score_threshold`.
        """
        probabilities = outputs["logits"].float().sigmoid()
        num_classes = probabilities.shape[-1]
        scores, chosen = probabilities.flatten(1).topk(min(top_k, probabilities[0].numel()), dim=1)
        queries = (chosen // num_classes)[..., None].expand(-1, -1, 4)
        boxes = denormalize_boxes(cxcywh_to_xyxy(outputs["boxes"].float()), orig_sizes).gather(1, queries)
        keep = scores > score_threshold
        return [
            {"boxes": b[k], "scores": s[k], "labels": c[k] % num_classes}
            for b, s, c, k in zip(boxes, scores, chosen, keep, strict=True)
        ]

    def save_final(self, folder: Path, categories: Sequence, processor_size: Mapping[str, int] | None = None) -> None:
        """Write a folder that `AutoModelForObjectDetection.from_pretrained(folder)` loads; see `Detr.save_final`.

        `processor_size` is `{"height": ..., "width": ...}` in pixels, that of the evaluation.
        """
        processor = RTDetrImageProcessor(
            do_normalize=True,
            image_mean=list(self.mean),
            image_std=list(self.std),
            do_resize=processor_size is not None,
        )
        save_transformers_folder(self.model, processor, processor_size, folder, categories)


@torch.no_grad()
def initialise_as_published_(model: nn.Module) -> None:
    """Random weights as lyuwenyu/RT-DETR draws them; the backbone is left alone.

    transformers draws all of them, the scales of batch norms too, from N(0, 0.01): made for loading a checkpoint, they
    let almost nothing through at first, and training from random weights hardly gets going.
    """
    core = model.model
    for name, module in core.named_modules():
        if not name.startswith("backbone") and isinstance(module, nn.Linear | nn.Conv2d | nn.BatchNorm2d):
            module.reset_parameters()
    for name, module in core.named_modules():
        if isinstance(module, RTDetrV2MultiscaleDeformableAttention):
            model._init_weights(module)
        elif name.endswith(("q_proj", "k_proj", "v_proj", "o_proj")):
            nn.init.xavier_uniform_(module.weight, gain=1.0 if name.endswith("o_proj") else math.sqrt(0.5))
            nn.init.zeros_(module.bias)
    projections = [block[0] for block in (*core.encoder_input_proj, *core.decoder_input_proj) if len(block)]
    for module in (*projections, core.enc_output[0], *core.decoder.query_pos_head.layers):
        nn.init.xavier_uniform_(module.weight)
    for head in (core.enc_score_head, *core.decoder.class_embed):
        nn.init.constant_(head.bias, -math.log((1 - PRIOR) / PRIOR))
    for head in (core.enc_bbox_head, *core.decoder.bbox_embed):
        nn.init.zeros_(head.layers[-1].weight)
        nn.init.zeros_(head.layers[-1].bias)
    if hasattr(core, "denoising_class_embed"):
        nn.init.normal_(core.denoising_class_embed.weight)


def _no_loss_in_forward(*args, **kwargs):
    return None, None, None


def _indices_of_strides(backbone: str) -> list[int]:
    strides = feature_strides(backbone)
    if missing := [stride for stride in STRIDES if stride not in strides]:
        raise BadInput(
            f"model.backbone: rt_detr_v2 needs feature maps of stride 8, 16 and 32; {backbone!r} has {strides}, "
            f"without {', '.join(map(str, missing))}."
        )
    return [strides.index(stride) for stride in STRIDES]


def without_crowd(target: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The target without its crowd regions, which are not objects to be found one by one."""
    if "iscrowd" not in target or len(target["labels"]) == 0:
        return target
    single = target["iscrowd"] == 0
    return {**target, **{key: target[key][single] for key in ("boxes", "labels", "iscrowd")}}


def _transformers_target(target: Mapping[str, Tensor]) -> dict[str, Tensor]:
    boxes = xyxy_to_cxcywh(normalize_boxes(target["boxes"], target["size"]))
    return {"class_labels": target["labels"], "boxes": boxes}
