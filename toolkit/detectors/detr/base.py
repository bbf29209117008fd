"""Shared parts of the detectors of the DETR family: construction from options, decoding, and saving for
transformers."""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import ConditionalDetrImageProcessor, PreTrainedConfig, PreTrainedModel

from toolkit.base.box_ops import cxcywh_to_xyxy, denormalize_boxes
from toolkit.base.errors import BadInput
from toolkit.detectors.detr.configuration import (
    backbone_entry,
    detector_config,
    from_entries,
    handed_over,
    has_stages_behind_maps,
    pixel_statistics,
    prepare_backbone,
    to_entries,
)
from toolkit.detectors.detr.detr_criterion import MatchingCosts, count_objects
from toolkit.detectors.detr.focal_criterion import FocalCriterion
from toolkit.detectors.detr.host_waits import clamp_without_check_
from toolkit.detectors.detr.options import DecoderOptions
from toolkit.models.detector import Detector, MapTap
from toolkit.models.final import save_transformers_folder
from toolkit.step.freezing import replace_frozen_batch_norms

# Each decoder layer checks that the sizes of the maps, which it is given twice, agree: a host synchronisation.
os.environ.setdefault("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")


class TransformersDetector(Detector):
    """A detector around `self.model`, a model of transformers.

    It is built from the options and, if `source_config` is given (the `to_dict()` of a transformers config), from that
    config with other classes; options that the user has set override its entries.

    A subclass defines:
        entries: for each option, the names of the entries of transformers' config that it sets.
        published: config entries that have no option here, and whose published value is not transformers' default.
    """

    config_class: type[PreTrainedConfig]
    processor_class: type
    entries: Mapping[str, Sequence[str]] = {}
    published: Mapping[str, object] = {}
    averaged_denominators = ("boxes",)  # by rank, in the originals
    stride = 1
    buffers_steer_training = False
    masks_unlabelled = True
    weighs_classes = True

    @property
    def object_limits(self) -> dict[str, int]:
        return {"model.num_queries": self.resolved_options()["num_queries"]}

    @property
    def max_detections(self) -> int:
        """Return the largest number of detections per image: the number of queries, and at least 100, as in the
        evaluation of RT-DETR, D-FINE and similar detectors."""
        return max(*self.object_limits.values(), Detector.max_detections)

    @property
    def exported_sides(self) -> str:
        return "fixed" if self.fixed_size else "any"

    def _set_criterion(self, set_loss: nn.Module, statistics: tuple[tuple, tuple], used: Mapping[str, object]) -> None:
        """Set the criterion `set_loss`, mean and deviation of the pixels, and `used`, the resolved options that the
        config lacks."""
        clamp_without_check_(self.model)
        replace_frozen_batch_norms(self.model)
        for name, parameter in self.model.named_parameters():
            if name.endswith("embeddings.mask_token"):  # of a DINO's pretraining: no loss depends on it
                parameter.requires_grad_(False)
        self.leaves_unused = self._may_leave_unused()
        self.set_loss = set_loss
        self.used = dict(used)
        self.mean, self.std = statistics
        self.loss_names = set_loss.loss_names
        self.metric_names = set_loss.metric_names
        self.divided_by = set_loss.divided_by

    def _may_leave_unused(self) -> bool:
        """Return whether a step may leave trained parameters without a gradient, see `Detector.leaves_unused`."""
        config = self.model.config  # a batch without boxes makes no denoising queries; dropped layers have no part
        now_and_then = any(getattr(config, name, 0) for name in ("num_denoising", "decoder_layerdrop"))
        return now_and_then or has_stages_behind_maps(config)

    def decode(
        self,
        outputs: Mapping[str, Tensor],
        sizes: Tensor,
        orig_sizes: Tensor,
        score_threshold: float,
        top_k: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the `top_k` best pairs of query and class, best first; boxes are not clipped. This is `PostProcess` of
        Deformable DETR and its successors; see `Detector.decode`."""
        boxes, scores, labels, _ = self._best_pairs(outputs, orig_sizes, top_k)
        return boxes, scores, labels

    def _best_pairs(
        self, outputs: Mapping[str, Tensor], orig_sizes: Tensor, top_k: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return boxes, scores and labels of `decode`, and the rows (B, K) of their queries."""
        boxes, scores = self.all_predictions(outputs, orig_sizes)  # (B, Q, 4), (B, Q, C)
        classes = scores.shape[2]
        pair_scores = scores.flatten(1)  # of 2 classes: query 0 class 0, query 0 class 1, query 1 class 0, ...
        count = min(top_k, pair_scores.shape[1])
        scores, pairs = pair_scores.topk(count, dim=1)
        queries = pairs // classes
        labels = pairs % classes
        boxes = boxes.gather(1, queries[..., None].expand(-1, -1, 4))
        return boxes, scores, labels, queries

    def all_predictions(self, outputs: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, Tensor]:
        logits, boxes = self.last_layer(outputs)
        boxes_xyxy = cxcywh_to_xyxy(boxes.float())
        return denormalize_boxes(boxes_xyxy, sizes), self.class_scores(logits.float())

    def last_layer(self, outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the class logits (B, Q, C) and boxes (B, Q, 4) of the last decoder layer, for the Q queries that
        detect. Boxes are cxcywh, as fractions of the image."""
        return outputs["logits"][-1], outputs["boxes"][-1]

    def class_scores(self, logits: Tensor) -> Tensor:
        """Return the class scores (..., C) in [0, 1] of class logits (..., C)."""
        return logits.sigmoid()

    def resolved_options(self) -> dict:
        """Return the settings with the values in use. Values that came from a source config are read from the config of
        the model."""
        return {
            **self.options,
            **from_entries(self.model.config, self.entries),
            "mean": list(self.mean),
            "std": list(self.std),
            **self.used,
        }

    def save_final(self, folder: Path, categories: Sequence, processor_size: Mapping[str, int] | None = None) -> None:
        """Write a folder that `AutoModelForObjectDetection.from_pretrained(folder)` loads, or with masks
        `AutoModelForInstanceSegmentation`.

        Args:
            categories: the classes in the order of the labels, with their original `id` and `name`.
            processor_size: the size in pixels that the image processor resizes to, in the form of transformers:
                `{"height": 640, "width": 640}` or `{"shortest_edge": 800, "longest_edge": 1333}`; None: no resizing.
        """
        processor = self.processor_class(
            do_normalize=True,
            do_resize=processor_size is not None,
            image_mean=list(self.mean),
            image_std=list(self.std),
        )
        save_transformers_folder(self._saved_model(), processor, processor_size, folder, categories)

    def _saved_model(self) -> PreTrainedModel:
        """Return the model of transformers that `save_final` saves."""
        return self.model


class MatchedDetector(TransformersDetector):
    """A detector of the family whose matching costs are settings. A subclass defines `model_class` and `_initialise`.
    Classes are scored with sigmoids and trained with a `FocalCriterion`, unless the subclass overrides `_criterion`.

    Raises:
        BadInput: the backbone or `freeze` is unknown, weights cannot be loaded, settings do not fit together, or
            `source_config` is of another architecture.
    """

    model_class: type[PreTrainedModel]
    processor_class = ConditionalDetrImageProcessor
    groups = 1  # of queries that train side by side; one detects
    map_strides: Sequence[int] | None = None  # of the backbone's maps that are used; None: the last one alone

    def __init__(self, class_names: Sequence[str], options: DecoderOptions, *, source_config: Mapping | None = None):
        super().__init__()
        entries = self._entries(options, source_config)
        config = detector_config(
            self.config_class,
            class_names,
            source_config or self.published,
            **entries,
        )
        try:
            self.model = self.model_class(config)
        # Settings that transformers does not accept together, such as width and heads: more heads are a division by 0.
        except (ValueError, ZeroDivisionError) as error:
            raise BadInput(f"the settings of the model do not fit together: {error}") from error
        self.aux_loss = getattr(options, "aux_loss", False)
        with torch.no_grad():
            self._initialise(options, source_config)
        used = self._prepare_backbone(options, source_config)
        # As given, else the source's, else published. They are not in the config, which takes only whole numbers.
        values = {**asdict(options), **(source_config or {}), **options.given}
        costs = MatchingCosts(*(values[name] for name in MatchingCosts._fields))
        num_layers = config.decoder_layers if self.aux_loss else 1
        set_loss = self._criterion(len(class_names), num_layers, costs)
        statistics = pixel_statistics(config, options)
        self._set_criterion(set_loss, statistics, used | costs._asdict())

    def _entries(self, options: DecoderOptions, source_config: Mapping | None) -> dict:
        """Return the config entries that replace those of the source."""
        entries = to_entries(handed_over(options, source_config), self.entries)
        return entries | {"backbone_config": backbone_entry(options, source_config, self.map_strides)}

    def _initialise(self, options: DecoderOptions, source_config: Mapping | None) -> None:
        """Draw the random weights as the paper's program does; the backbone is left unchanged."""
        raise NotImplementedError  # each paper's program has its own

    def _prepare_backbone(self, options: DecoderOptions, source_config: Mapping | None) -> dict:
        """Load the backbone's weights and return its options with the values in use."""
        return prepare_backbone(self._extractor(), self.model.config, options, source_config)

    def _criterion(self, num_classes: int, num_layers: int, costs: MatchingCosts) -> nn.Module:
        return FocalCriterion(num_layers, costs)

    def _extractor(self) -> nn.Module:
        """Return the backbone; for a timm backbone, the feature extractor itself."""
        return self.model.model.backbone.model

    def last_stride(self) -> int:
        """Return the stride in pixels of the backbone's last feature map."""
        of_timm = getattr(self._extractor(), "feature_info", None)
        return of_timm.reduction()[-1] if of_timm else 32

    def map_taps(self) -> list[MapTap]:
        core = self.model.model
        width = self.model.config.hidden_size
        return [projection_tap(core.input_projection, self.last_stride(), width)]

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """Return the number of annotated boxes of this batch, without crowd regions, times the number of query groups.
        It is computed from targets on the CPU."""
        return {"boxes": float(sum(count_objects(targets)) * self.groups)}

    def criterion(self, outputs: Mapping[str, Tensor], targets: Sequence[Mapping], denominators: Mapping):
        """Return `(losses, metrics)` for the outputs of `forward`; see `FocalCriterion.forward`."""
        return self.set_loss(outputs, targets, denominators, self.groups, self.class_weights)


def projection_tap(projection: nn.Module, stride: int, channels: int) -> MapTap:
    """Return a `MapTap` for the output of `projection`, the convolution that projects a backbone map to the width of
    the transformer. stride: in pixels. channels: the width of the transformer."""
    return MapTap(projection, [stride], [channels], lambda _, level: [level])


def check_positions(height: int, width: int, positions: int, num_queries: int) -> None:
    """Raise BadInput if images of this height and width in pixels have fewer positions on their feature maps than there
    are queries to choose from them."""
    if positions < num_queries:
        raise BadInput(
            f"model.num_queries {num_queries}: images of {height}x{width} px have only {positions} positions; use "
            "larger images or fewer queries."
        )


def precision(training: bool, device: torch.device):
    """Return the context manager for a forward pass. In training it leaves autocast on; in evaluation it turns autocast
    off, because users of the saved model compute in float32, and half precision would round a reference point, and with
    it a box, to 1/256 of the image."""
    if not training:
        return torch.autocast(device.type, enabled=False)
    if device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        return sdpa_kernel(SDPBackend.MATH)  # torch's fused attention in bfloat16 takes two to four times as long
    return nullcontext()


def inverse_sigmoid(fractions: Tensor, eps: float = 1e-5) -> Tensor:
    """Return the logits of values in [0, 1], clamped so that both ends are finite (as in transformers and the
    originals)."""
    fractions = fractions.clamp(0, 1)
    inside = fractions.clamp(min=eps)
    rest = (1 - fractions).clamp(min=eps)
    return torch.log(inside / rest)
