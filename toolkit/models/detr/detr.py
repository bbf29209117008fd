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
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DetrConfig, DetrForObjectDetection, DetrImageProcessor

from toolkit.batch import normalize_images, pixel_mask
from toolkit.errors import BadInput
from toolkit.models.detector import Detector, MapTap
from toolkit.models.detr.base import TransformersDetector, projection_tap
from toolkit.models.detr.configuration import (
    backbone_entry,
    build_model,
    detector_config,
    handed_over,
    matching_costs,
    pixel_statistics,
    prepare_backbone,
    to_entries,
)
from toolkit.models.detr.detr_criterion import DetrCriterion
from toolkit.models.detr.options import DetrOptions
from toolkit.models.detr.pre_norm import normalize_before_
from toolkit.models.detr.query_points import begin_at_points_

POSITIONS = 50  # that learned position embeddings reach along a side, in the original and in transformers

# Options of an encoder-decoder and the entries of transformers' config that they set.
ENCODER_DECODER = {
    "d_model": ["d_model"],
    "heads": ["encoder_attention_heads", "decoder_attention_heads"],
    "encoder_layers": ["encoder_layers"],
    "decoder_layers": ["decoder_layers"],
    "ffn_dim": ["encoder_ffn_dim", "decoder_ffn_dim"],
    "num_queries": ["num_queries"],
    "dropout": ["dropout"],
}


class Detr(TransformersDetector):
    """`transformers.DetrForObjectDetection`. Settings: see `DetrOptions`.

    Raises:
        BadInput: unknown backbone or `freeze`, weights that cannot be had, a source of another architecture.
    """

    Options = DetrOptions
    config_class, processor_class = DetrConfig, DetrImageProcessor
    entries = {
        **ENCODER_DECODER,
        "dilation": ["dilation"],
        "eos_coef": ["eos_coefficient"],
        "position_embedding": ["position_embedding_type"],
    }
    default_weights = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    class_tensors = {"model.class_labels_classifier.*": (0, 1, 1)}  # no-object last
    of_transformers = True  # not one of its variants that transformers has not

    def __init__(self, class_names: Sequence[str], options: DetrOptions, *, source_config: Mapping | None = None):
        super().__init__()
        backbone = backbone_entry(options, source_config)
        entries = to_entries(handed_over(options, source_config), self.entries)
        config = detector_config(DetrConfig, class_names, source_config, backbone_config=backbone, **entries)
        self.model = build_model(DetrForObjectDetection, config)
        self.of_transformers = not (options.pre_norm or options.query_points)
        if source_config is not None and not self.of_transformers:
            raise BadInput(
                "model.pre_norm, model.query_points: the pretrained model is one of transformers, which has neither; "
                "leave them out, or model.pretrained."
            )
        if options.pre_norm:
            normalize_before_(self.model)
        initialise_as_published_(self.model)
        self.query_points = nn.Parameter(begin_at_points_(self.model)) if options.query_points else None
        used = prepare_backbone(self.model.model.backbone.model, config, options, source_config)
        costs = matching_costs(options, source_config)
        self.aux_loss = options.aux_loss
        layers = config.decoder_layers if self.aux_loss else 1
        set_loss = DetrCriterion(len(class_names), layers, config.eos_coefficient, costs)
        self._take(set_loss, pixel_statistics(config, options), used | costs._asdict())

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict[str, Tensor]:
        """Class logits and boxes of every decoder layer.

        Args:
            images: `(B, 3, H, W)` uint8, padded on the right and below.
            sizes: `(B, 2)` int64, height and width of each image without padding.
            targets: not needed.

        Returns:
            `logits (L, B, Q, C + 1)` and `boxes (L, B, Q, 4)` cxcywh as fractions of the image without padding; L is
            the number of decoder layers, 1 without auxiliary losses; the last one is the detector's answer.

        Raises:
            BadInput: learned position embeddings do not reach over the images.
        """
        if self.model.config.position_embedding_type == "learned":
            self._check_positions(*images.shape[-2:])
        pixels = normalize_images(images, sizes, self.mean, self.std, dtype=self.model.dtype)
        mask = pixel_mask(sizes, images.shape[-2:])
        with precision(self.training, images.device):
            outputs = self.model.model(pixels, pixel_mask=mask, output_hidden_states=self.aux_loss)
            states = normed_states(self.model.model.decoder.layernorm, outputs)
        # The heads are small; in half precision a box would be known to 1/256 of the image only.
        with torch.autocast(images.device.type, enabled=False):
            states = states.to(self.model.dtype)
            logits = self.model.class_labels_classifier(states)
            boxes = self.model.bbox_predictor(states)
            if self.query_points is not None:
                boxes = torch.cat([boxes[..., :2] + self.query_points, boxes[..., 2:]], dim=-1)
            return {"logits": logits, "boxes": boxes.sigmoid()}

    def map_taps(self) -> list[MapTap]:
        return [projection_tap(self.model.model.input_projection, last_stride(self.model), self.model.config.d_model)]

    def _class_scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)[..., :-1]

    def _check_positions(self, height: int, width: int) -> None:
        limit = POSITIONS * last_stride(self.model)
        if max(height, width) > limit:
            raise BadInput(
                f"model.position_embedding learned: images of {height}x{width} px; it reaches {POSITIONS} positions, "
                f"sides of {limit} px. Use smaller images, or sine."
            )

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """This batch's share of the denominators, from CPU targets; see `DetrCriterion.denominators`."""
        return self.set_loss.denominators(targets, self.model.config.num_queries)

    def criterion(self, outputs: Mapping[str, Tensor], targets: Sequence[Mapping], denominators: Mapping):
        """Losses and metrics `(losses, metrics)` of `forward`'s outputs; see `DetrCriterion.forward`."""
        return self.set_loss(outputs["logits"], outputs["boxes"], targets, denominators)

    def decode(
        self, outputs: Mapping[str, Tensor], sizes: Tensor, orig_sizes: Tensor, score_threshold: float, top_k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One detection per query of the last decoder layer, its most probable class, no-object left out (DETR
        `PostProcess`); the order of the queries is kept where there are no more than `top_k`. Boxes are not clipped."""
        boxes, scores = self.all_predictions(outputs, orig_sizes)
        scores, labels = scores.max(-1)
        if top_k < scores.shape[1]:
            scores, chosen = scores.topk(top_k, dim=1)
            labels, boxes = labels.gather(1, chosen), boxes.gather(1, chosen[..., None].expand(-1, -1, 4))
        return boxes, scores, labels

    def save_final(self, folder: Path, categories: Sequence, processor_size: Mapping[str, int] | None = None) -> None:
        """Writes a folder for transformers, see `TransformersDetector.save_final`; with `pre_norm` or `query_points`,
        which transformers has not, one for `load_detector_folder`."""
        kind = TransformersDetector if self.of_transformers else Detector
        kind.save_final(self, folder, categories, processor_size)


def last_stride(model: nn.Module) -> int:
    """Stride of the backbone's last map, in a DETR of transformers."""
    of_timm = getattr(model.model.backbone.model, "feature_info", None)
    return of_timm.reduction()[-1] if of_timm else 32


def normed_states(norm: nn.Module, outputs) -> Tensor:
    """Normed states `(L, B, Q, D)` of every decoder layer, or of the last alone if `outputs` holds no hidden states.

    decoder_hidden_states are the queries, the raw state after each layer but the last, the normed last one.
    """
    raw = (outputs.decoder_hidden_states or ())[1:-1]
    return torch.stack([*map(norm, raw), outputs.last_hidden_state])


def precision(training: bool, device: torch.device):
    """Context of a forward: autocast's while training. Evaluation is in float32, like whoever loads `final/`: in half
    precision a reference point, and with it a box, would be known to 1/256 of the image."""
    if not training:
        return torch.autocast(device.type, enabled=False)
    if device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        return sdpa_kernel(SDPBackend.MATH)  # torch's fused attention in bfloat16 takes two to four times as long
    return nullcontext()


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
