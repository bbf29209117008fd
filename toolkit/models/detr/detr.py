"""DETR as published (Carion et al., ECCV 2020) on any timm backbone: transformers' model, our losses.

transformers' own auxiliary outputs (`auxiliary_loss=True`) feed the normalised state into the next decoder layer and
normalise the last one twice. Here the model always runs with `auxiliary_loss=False`, and the decoder's final norm is
applied to a copy of every layer's state, as in facebookresearch/detr.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import DetrConfig, DetrForObjectDetection, DetrImageProcessor

from toolkit.batch import normalize_images, pixel_mask
from toolkit.boxes import cxcywh_to_xyxy, denormalize_boxes
from toolkit.models.detr.configuration import (
    backbone_entry,
    build_model,
    detector_config,
    matching_costs,
    pixel_statistics,
    prepare_backbone,
)
from toolkit.models.detr.detr_criterion import DetrCriterion
from toolkit.models.final import save_transformers_folder


class Detr(nn.Module):
    """A detector (see docs/design.md) around `transformers.DetrForObjectDetection`.

    Args:
        class_names: one name per class, in the order of the labels.
        source_config: a transformers config of a DETR as a dict (`config.to_dict()` of a hub model): the model is built
            from exactly that, with our classes and the options that are given; None: the published one.
        backbone: name of a timm model; its last feature map is used. None: the source's, or resnet50.
        pretrained_backbone: True (timm's, downloaded once), False (random), or the path of a file.
        freeze: "paper" (stem, first stage and all batch norms), "norms" or "none"; see `freeze_backbone`. None: "paper"
            where the backbone is timm's or a ResNet.
        dilation: the last backbone stage is dilated instead of strided (DC5).
        d_model, heads, encoder_layers, decoder_layers, ffn_dim, num_queries, dropout: the transformer; None, here and
            below: the source's value, or the paper's.
        aux_loss: losses on every decoder layer, not on the last one alone.
        eos_coef: weight of the no-object class in `loss_ce`.
        class_cost, bbox_cost, giou_cost: weights in the matching cost.
        mean, std: of RGB values in [0, 1]; None: those the backbone was trained with.

    Raises:
        BadInput: unknown backbone or `freeze`, weights that cannot be had, a source of another architecture.
    """

    default_weights = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    denominator_names = DetrCriterion.denominator_names
    averaged_denominators = ("boxes",)  # by rank, in the original
    class_tensors = {"model.class_labels_classifier.*": (0, 1, 1)}  # no-object last
    processor_class = DetrImageProcessor
    fixed_size = False
    stride = 1

    def __init__(
        self,
        *,
        class_names: Sequence[str],
        source_config: Mapping | None = None,
        backbone: str | None = None,
        pretrained_backbone: bool | str = False,
        freeze: str | None = None,
        dilation: bool | None = None,
        d_model: int | None = None,
        heads: int | None = None,
        encoder_layers: int | None = None,
        decoder_layers: int | None = None,
        ffn_dim: int | None = None,
        num_queries: int | None = None,
        dropout: float | None = None,
        aux_loss: bool = True,
        eos_coef: float | None = None,
        class_cost: float | None = None,
        bbox_cost: float | None = None,
        giou_cost: float | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ):
        super().__init__()
        config = detector_config(
            DetrConfig,
            class_names,
            source_config,
            backbone_config=backbone_entry(source_config, backbone, None, dilation),
            dilation=dilation,
            d_model=d_model,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_layers=encoder_layers,
            decoder_layers=decoder_layers,
            encoder_ffn_dim=ffn_dim,
            decoder_ffn_dim=ffn_dim,
            num_queries=num_queries,
            dropout=dropout,
            eos_coefficient=eos_coef,
        )
        self.model = build_model(DetrForObjectDetection, config)
        initialise_as_published_(self.model)
        prepare_backbone(self.model.model.backbone.model, config, pretrained_backbone, freeze, timm_freeze="paper")
        self.aux_loss = aux_loss
        costs = matching_costs(source_config, class_cost, bbox_cost, giou_cost, published_class_cost=1)
        layers = config.decoder_layers if aux_loss else 1
        self.set_loss = DetrCriterion(len(class_names), layers, config.eos_coefficient, costs)
        self.loss_names, self.metric_names = self.set_loss.loss_names, self.set_loss.metric_names
        self.mean, self.std = pixel_statistics(config, mean, std)

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict[str, Tensor]:
        """Class logits and boxes of every decoder layer.

        Args:
            images: `(B, 3, H, W)` uint8, padded on the right and below.
            sizes: `(B, 2)` int64, height and width of each image without padding.
            targets: not needed.

        Returns:
            `logits (L, B, Q, C + 1)` and `boxes (L, B, Q, 4)` cxcywh as fractions of the image without padding; L is
            the number of decoder layers, 1 without auxiliary losses; the last one is the detector's answer.
        """
        pixels = normalize_images(images, sizes, self.mean, self.std, dtype=self.model.dtype)
        mask = pixel_mask(sizes, images.shape[-2:])
        with precision(self.training, images.device):
            outputs = self.model.model(pixels, pixel_mask=mask, output_hidden_states=self.aux_loss)
            states = outputs.last_hidden_state[None]
            if self.aux_loss:
                # decoder_hidden_states: the queries, the raw state after each layer but the last, the normed last one.
                raw = outputs.decoder_hidden_states[1:-1]
                states = torch.cat([*(self.model.model.decoder.layernorm(state)[None] for state in raw), states])
        # The heads are small; in half precision a box would be known to 1/256 of the image only.
        with torch.autocast(images.device.type, enabled=False):
            states = states.to(self.model.dtype)
            logits = self.model.class_labels_classifier(states)
            return {"logits": logits, "boxes": self.model.bbox_predictor(states).sigmoid()}

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """This batch's share of the denominators, from CPU targets; see `DetrCriterion.denominators`."""
        return self.set_loss.denominators(targets, self.model.config.num_queries)

    def criterion(self, outputs: Mapping[str, Tensor], targets: Sequence[Mapping], denominators: Mapping):
        """Losses and metrics `(losses, metrics)` of `forward`'s outputs; see `DetrCriterion.forward`."""
        return self.set_loss(outputs["logits"], outputs["boxes"], targets, denominators)

    def postprocess(
        self,
        outputs: Mapping[str, Tensor],
        sizes: Tensor,
        orig_sizes: Tensor,
        score_threshold: float = 0.0,
        top_k: int = 100,
    ) -> list[dict[str, Tensor]]:
        """Detections of the last decoder layer, in pixels of the original images; see `detr_detections`."""
        logits, boxes = outputs["logits"][-1], outputs["boxes"][-1]
        return detr_detections(logits, boxes, orig_sizes, score_threshold, top_k)

    def save_final(self, folder: Path, categories: Sequence, processor_size: Mapping[str, int] | None = None) -> None:
        """Write a folder that `AutoModelForObjectDetection.from_pretrained(folder)` loads.

        Args:
            categories: the classes in the order of the labels, with original `id` and `name`.
            processor_size: what the image processor resizes to, as transformers spells it, e.g.
                `{"shortest_edge": 800, "longest_edge": 1333}`; None: it does not resize.
        """
        processor = self.processor_class(
            image_mean=list(self.mean), image_std=list(self.std), do_resize=processor_size is not None
        )
        save_transformers_folder(self.model, processor, processor_size, folder, categories)


def precision(training: bool, device: torch.device):
    """Context of a forward: autocast's while training. Evaluation is in float32, like whoever loads `final/`: in half
    precision a reference point, and with it a box, would be known to 1/256 of the image."""
    return nullcontext() if training else torch.autocast(device.type, enabled=False)


def detr_detections(
    logits: Tensor, boxes_cxcywh: Tensor, sizes_hw: Tensor, score_threshold: float = 0.0, top_k: int = 100
) -> list[dict[str, Tensor]]:
    """One detection per query: its most probable class, no-object left out (DETR `PostProcess`).

    Args:
        logits: `(B, Q, C + 1)`, the last column is no-object.
        boxes_cxcywh: `(B, Q, 4)` fractions of the image.
        sizes_hw: `(B, 2)` pixels of the images that the boxes are wanted in.
        score_threshold: keep scores above it; negative: keep all.
        top_k: keep at most so many, the highest scores; the order of the queries is kept when none is dropped.

    Returns:
        per image `boxes (K, 4)` xyxy pixels, not clipped, float32; `scores (K,)` float32; `labels (K,)` int64.
    """
    scores, labels = logits.float().softmax(-1)[..., :-1].max(-1)
    boxes = denormalize_boxes(cxcywh_to_xyxy(boxes_cxcywh.float()), sizes_hw)
    if top_k < scores.shape[1]:
        scores, chosen = scores.topk(top_k, dim=1)
        labels = labels.gather(1, chosen)
        boxes = boxes.gather(1, chosen[..., None].expand(-1, -1, 4))
    keep = scores > score_threshold
    return [
        {"boxes": b[k], "scores": s[k], "labels": c[k]} for b, s, c, k in zip(boxes, scores, labels, keep, strict=True)
    ]


@torch.no_grad()
def initialise_as_published_(model: DetrForObjectDetection) -> None:
    """Random weights as facebookresearch/detr draws them; transformers draws N(0, 0.02), which trains more slowly.

    Heads and input projection are PyTorch's default, queries N(0, 1). The backbone is left alone.
    """
    for module in (model.model.input_projection, model.class_labels_classifier, *model.bbox_predictor.layers):
        module.reset_parameters()
    model.model.query_position_embeddings.reset_parameters()
    initialise_transformer_(model.model.encoder)
    initialise_transformer_(model.model.decoder)


@torch.no_grad()
def initialise_transformer_(transformer: nn.Module, fused: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")) -> None:
    """Matrices Xavier uniform; those whose names end in `fused` as the one matrix they are in `nn.MultiheadAttention`.

    Biases are PyTorch's default, but 0 in that module and in every attention's output projection.
    """
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            in_one = name.endswith(fused)
            module.reset_parameters()
            nn.init.xavier_uniform_(module.weight, gain=math.sqrt(0.5) if in_one else 1.0)
            if in_one or name.endswith(("o_proj", "out_proj", "output_proj")):
                nn.init.zeros_(module.bias)
