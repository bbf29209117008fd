"""The base of RF-DETR and LW-DETR, which have two stages and groups of queries. All groups are trained in parallel
(Group DETR), and one of them detects.

The criterion is LW-DETR's, with a classification loss whose targets combine score and IoU. The losses equal those of
transformers' `LwDetrForObjectDetectionLoss`.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.lw_detr.modeling_lw_detr import refine_bboxes
from transformers.utils import ModelOutput

from toolkit.base.errors import BadInput
from toolkit.detectors.detr.base import MatchedDetector, check_positions, precision
from toolkit.detectors.detr.configuration import to_entries
from toolkit.detectors.detr.detr_criterion import MatchingCosts
from toolkit.detectors.detr.focal_criterion import FocalCriterion, quality_terms
from toolkit.detectors.detr.initialise import initialise_sampling_, initialise_transformer_, start_heads_
from toolkit.detectors.detr.options import DecoderOptions


class GroupDetr(MatchedDetector):
    """A detector whose options have `size`, `heads` and `encoder_layers`, the depth of its vision transformer.

    The backbone does not mask padding, so all images must have one size, whose sides are multiples of `stride`.

    A subclass defines:
        stride: patch size times the number of windows along a side, in pixels.
        feature_strides: strides of the maps that the decoder reads, in pixels.
        _start_backbone: makes the vision transformer ready and loads its weights, `model.pretrained_backbone`.
        _size_of: returns the name of the published size that a config has.
    """

    entries = {
        "d_model": ["d_model"],
        "decoder_layers": ["decoder_layers"],
        "ffn_dim": ["decoder_ffn_dim"],
        "num_queries": ["num_queries"],
        "dropout": ["dropout"],
    }
    default_weights = {"loss_ce": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
    class_tensors = {
        "model.class_embed.*": (0, 1, 0),
        "model.model.enc_out_class_embed.*": (0, 1, 0),
    }
    fixed_size = True

    def _decoder_entries(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config entries that options, `values` by name, set outside the backbone."""
        entries = to_entries(values, self.entries)
        heads = values.get("heads")
        if heads is not None:
            entries |= {
                "decoder_self_attention_heads": heads,
                "decoder_cross_attention_heads": 2 * heads,
            }
        return entries

    def _initialise(self, options: DecoderOptions, source_config: Mapping | None) -> None:
        core = self.model.model
        for module in core.backbone.projector.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
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

    def _prepare_backbone(self, options: DecoderOptions, source_config: Mapping | None) -> dict[str, Any]:
        """Load the backbone's weights; the options also have `heads`, `encoder_layers` and `size` (None: not one of
        ours)."""
        config = self.model.config
        size = options.size
        if source_config is not None:
            size = self._size_of(config)
            if options.given.get("size") not in (None, size):
                raise BadInput(f"model.size {options.size}: the pretrained model has another one; leave it out")
        self._start_backbone(options)
        heads = config.decoder_self_attention_heads
        in_proportion = config.decoder_cross_attention_heads == 2 * heads
        return {
            "heads": heads if in_proportion else None,
            "encoder_layers": config.backbone_config.num_hidden_layers,
            "size": size,
        }

    def _start_backbone(self, options: DecoderOptions) -> None:
        """Make the vision transformer ready, and load the weights that `options.pretrained_backbone` names.

        Raises:
            BadInput: there are no such weights, or they do not fit.
        """
        raise NotImplementedError  # each has its own vision transformer

    def _size_of(self, config: PreTrainedConfig) -> str | None:
        """Return the name of the published size that the config of a detector has; None: another one."""
        raise NotImplementedError  # each has sizes of its own

    def _criterion(self, num_classes: int, num_layers: int, costs: MatchingCosts) -> nn.Module:
        return FocalCriterion(num_layers, costs, "classes", quality_terms)

    @property
    def groups(self) -> int:
        """Return the number of query groups that predict: all groups in training, 1 in evaluation."""
        return self.model.config.group_detr if self.training else 1

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict[str, Tensor]:
        """Return predictions of every decoder layer and of the encoder; in training, of all groups of queries. Images
        `(B, 3, H, W)` must be without padding; targets are not needed.

        Returns:
            `logits (L, B, G * Q, C)` and `boxes (L, B, G * Q, 4)` cxcywh as fractions of the image, for L layers and G
            groups of Q queries; `encoder_logits (B, G * Q, C)`, `encoder_boxes (B, G * Q, 4)`. G is 1 in evaluation.

        Raises:
            BadInput: the sides of the images are not multiples of `stride`, or the images have fewer positions than
                there are queries.
        """
        return self._predictions(self._states(images, sizes))

    def _states(self, images: Tensor, sizes: Tensor) -> ModelOutput:
        """Return the states of the queries and of the chosen positions, from which classes and boxes are predicted."""
        self._check_size(*images.shape[-2:])
        pixels = self.normalized(images, sizes, self.model.dtype)
        with precision(self.training, images.device):
            return self.model.model(pixels)

    def _predictions(self, outputs: ModelOutput) -> dict[str, Tensor]:
        model = self.model
        states = self._layer_states(outputs)
        with torch.autocast(states.device.type, enabled=False):
            dtype = model.dtype
            states = states.to(dtype)
            references = outputs.intermediate_reference_points[-1].to(dtype)  # the same for all layers
            of_groups = outputs.enc_outputs_class.to(dtype).split(model.config.num_queries, dim=1)
            heads = model.model.enc_out_class_embed[: len(of_groups)]
            encoder_logits = [head(group) for head, group in zip(heads, of_groups, strict=True)]
            return {
                "logits": model.class_embed(states),
                "boxes": refine_bboxes(references, model.bbox_embed(states)),
                "encoder_logits": torch.cat(encoder_logits, dim=1),
                "encoder_boxes": outputs.enc_outputs_coord_logits.to(dtype),
            }

    def _layer_states(self, outputs: ModelOutput) -> Tensor:
        """Return the states (L, B, Q, D) of the decoder layers that predict."""
        return outputs.intermediate_hidden_states[0 if self.aux_loss else -1 :]

    def last_layer(self, outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        count = self.model.config.num_queries  # of the first group, the detecting one
        logits = outputs["logits"][-1]
        boxes = outputs["boxes"][-1]
        return logits[:, :count], boxes[:, :count]

    def _check_size(self, height: int, width: int) -> None:
        if height % self.stride or width % self.stride:
            raise BadInput(
                f"images of {height}x{width} px: {self.config_class.model_type} needs sides that are multiples of "
                f"{self.stride} (patch size times windows); set data.image_size."
            )
        positions = sum((height // stride) * (width // stride) for stride in self.feature_strides)
        check_positions(height, width, positions, self.model.config.num_queries)
