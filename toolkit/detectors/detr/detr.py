"""DETR as published (Carion et al., ECCV 2020) on any timm backbone: transformers' model with the losses of this
toolkit.

transformers' own auxiliary outputs (`auxiliary_loss=True`) feed the normalised state into the next decoder layer and
normalise the last one twice. Here the model always runs with `auxiliary_loss=False`, and the decoder's final norm is
applied to a copy of every layer's state, as in facebookresearch/detr.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import DetrConfig, DetrForObjectDetection, DetrImageProcessor

from toolkit.base.batch import normalize_images, pixel_mask
from toolkit.base.errors import BadInput
from toolkit.detectors.detr.base import MatchedDetector, TransformersDetector, precision
from toolkit.detectors.detr.configuration import ENCODER_DECODER
from toolkit.detectors.detr.detr_criterion import DetrCriterion, MatchingCosts
from toolkit.detectors.detr.initialise import initialise_transformer_
from toolkit.detectors.detr.options import DetrOptions
from toolkit.detectors.detr.pre_norm import normalize_before_
from toolkit.detectors.detr.query_points import anchor_queries_
from toolkit.models.detector import Detector

POSITIONS = 50  # that learned position embeddings reach along a side, in the original and in transformers


class Detr(MatchedDetector):
    """`transformers.DetrForObjectDetection`. Settings: see `DetrOptions`."""

    Options = DetrOptions
    config_class = DetrConfig
    model_class = DetrForObjectDetection
    processor_class = DetrImageProcessor
    entries = {
        **ENCODER_DECODER,
        "dilation": ["dilation"],
        "eos_coef": ["eos_coefficient"],
        "position_embedding": ["position_embedding_type"],
    }
    default_weights = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    class_tensors = {"model.class_labels_classifier.*": (0, 1, 1)}  # no-object last
    of_transformers = True  # not a variant that transformers lacks

    def _initialise(self, options: DetrOptions, source_config: Mapping | None) -> None:
        self.of_transformers = not (options.pre_norm or options.query_points)
        if source_config is not None and not self.of_transformers:
            raise BadInput(
                "model.pre_norm, model.query_points: the pretrained model is one of transformers, which has neither; "
                "leave them out, or model.pretrained."
            )
        if options.pre_norm:
            normalize_before_(self.model)
        core = self.model.model
        # heads and input projection are PyTorch's default, queries N(0, 1), as in facebookresearch/detr
        core.input_projection.reset_parameters()
        self.model.class_labels_classifier.reset_parameters()
        for layer in self.model.bbox_predictor.layers:
            layer.reset_parameters()
        core.query_position_embeddings.reset_parameters()
        initialise_transformer_(core.encoder)
        initialise_transformer_(core.decoder)
        self.query_points = nn.Parameter(anchor_queries_(self.model)) if options.query_points else None

    def _criterion(self, num_classes: int, num_layers: int, costs: MatchingCosts) -> nn.Module:
        return DetrCriterion(num_classes, num_layers, self.model.config.eos_coefficient, costs)

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict[str, Tensor]:
        """Return class logits and boxes of every decoder layer, see `Detector.forward`; targets are not needed.

        Returns:
            `logits (L, B, Q, C + 1)`, no-object last, and `boxes (L, B, Q, 4)` cxcywh as fractions of the image without
            padding. L is the number of decoder layers, or 1 without auxiliary losses, and Q the number of queries.
            Detections are decoded from the last layer.

        Raises:
            BadInput: the images are larger than the learned position embeddings cover.
        """
        if self.model.config.position_embedding_type == "learned":
            self._check_sides(*images.shape[-2:])
        states, _ = decoder_states(self, images, sizes)
        # The heads are small; in half precision a box would be known to 1/256 of the image only.
        with torch.autocast(images.device.type, enabled=False):
            logits = self.model.class_labels_classifier(states)
            boxes = self.model.bbox_predictor(states)
            if self.query_points is not None:
                centres = boxes[..., :2] + self.query_points
                boxes = torch.cat([centres, boxes[..., 2:]], dim=-1)
            return {"logits": logits, "boxes": boxes.sigmoid()}

    def class_scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)[..., :-1]

    def _check_sides(self, height: int, width: int) -> None:
        limit = POSITIONS * self.last_stride()
        if max(height, width) > limit:
            raise BadInput(
                f"model.position_embedding learned: images of {height}x{width} px; it reaches {POSITIONS} positions, "
                f"sides of {limit} px. Use smaller images, or sine."
            )

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """Return what this batch adds to the denominators, from targets on the CPU; see
        `DetrCriterion.denominators`."""
        (entry,) = self.entries["num_queries"]
        num_queries = getattr(self.model.config, entry)
        return self.set_loss.denominators(targets, num_queries)

    def criterion(self, outputs: Mapping[str, Tensor], targets: Sequence[Mapping], denominators: Mapping):
        """Return `(losses, metrics)` for the outputs of `forward`; see `DetrCriterion.forward`."""
        return self.set_loss(outputs["logits"], outputs["boxes"], targets, denominators, self.class_weights)

    def decode(
        self,
        outputs: Mapping[str, Tensor],
        sizes: Tensor,
        orig_sizes: Tensor,
        score_threshold: float,
        top_k: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return one detection per query of the last decoder layer, with the most probable class other than no-object
        (DETR's `PostProcess`). Detections are in the order of the queries, or, if there are more than `top_k`, the best
        ones in descending order. Boxes are not clipped."""
        boxes, scores = self.all_predictions(outputs, orig_sizes)
        scores, labels = scores.max(-1)
        if top_k < scores.shape[1]:
            scores, chosen = scores.topk(top_k, dim=1)
            labels = labels.gather(1, chosen)
            boxes = boxes.gather(1, chosen[..., None].expand(-1, -1, 4))
        return boxes, scores, labels

    def save_final(self, folder: Path, categories: Sequence, processor_size: Mapping[str, int] | None = None) -> None:
        """Write a folder for transformers, see `TransformersDetector.save_final`. A model with `pre_norm` or
        `query_points`, which transformers cannot build, is written for `load_detector_folder` instead."""
        kind = TransformersDetector if self.of_transformers else Detector
        kind.save_final(self, folder, categories, processor_size)


def decoder_states(detector: MatchedDetector, images: Tensor, sizes: Tensor) -> tuple[Tensor, object]:
    """Return the normalised states `(L, B, Q, D)` of the Q queries, D channels each, after each of the L decoder layers
    (only the last without auxiliary losses), and the outputs of transformers' model."""
    pixels = normalize_images(
        images,
        sizes,
        detector.mean,
        detector.std,
        dtype=detector.model.dtype,
    )
    mask = pixel_mask(sizes, images.shape[-2:])
    core = detector.model.model
    with precision(detector.training, images.device):
        outputs = core(pixels, pixel_mask=mask, output_hidden_states=detector.aux_loss)
        # decoder_hidden_states are the queries, the raw state after each layer but the last, the normed last one
        raw = (outputs.decoder_hidden_states or ())[1:-1]
        normed = [core.decoder.layernorm(state) for state in raw]
        states = torch.stack([*normed, outputs.last_hidden_state])
    return states.to(detector.model.dtype), outputs
