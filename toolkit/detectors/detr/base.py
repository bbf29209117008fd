"""Shared parts of the family's detectors: construction from options, decoding, and saving for transformers."""

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
    pixel_statistics,
    prepare_backbone,
    to_entries,
)
from toolkit.detectors.detr.detr_criterion import MatchingCosts, count_objects
from toolkit.detectors.detr.focal_criterion import FocalCriterion
from toolkit.detectors.detr.host_waits import clamp_without_check_
from toolkit.detectors.detr.options import DecoderOptions
from toolkit.models.detector import Detector, MapTap

# Each decoder layer checks that the sizes of the maps, which it is given twice, agree: a host synchronisation.
os.environ.setdefault("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")


class TransformersDetector(Detector):
    """A detector around `self.model`, a model of transformers. With `source_config`, the `to_dict()` of a transformers
    config, it is that model with these classes; options that are given override its entries.

    A subclass defines:
        entries: the entries of transformers' config that each option sets.
        published: entries without an option of ours whose published value is not transformers'.
    """

    config_class: type[PreTrainedConfig]
    processor_class: type
    entries: Mapping[str, Sequence[str]] = {}
    published: Mapping[str, object] = {}
    averaged_denominators = ("boxes",)  # by rank, in the originals
    stride = 1
    buffers_steer_training = False
    masks_unlabelled = True

    @property
    def object_limits(self) -> dict[str, int]:
        return {"model.num_queries": self.resolved_options()["num_queries"]}

    @property
    def max_detections(self) -> int:
        """Return the limit that RT-DETR, D-FINE and similar detectors evaluate with: one per query, and at least
        100."""
        return max(*self.object_limits.values(), Detector.max_detections)

    @property
    def exported_sides(self) -> str:
        return "fixed" if self.fixed_size else "any"

    def _set_criterion(self, set_loss: nn.Module, statistics: tuple[tuple, tuple], used: Mapping[str, object]) -> None:
        """Set the criterion, mean and std, and the resolved options that the config does not hold."""
        clamp_without_check_(self.model)
        config = self.model.config  # a batch without boxes makes no denoising queries; dropped layers have no part
        self.leaves_unused = any(getattr(config, name, 0) for name in ("num_denoising", "decoder_layerdrop"))
        self.set_loss = set_loss
        self.used = dict(used)
        self.mean, self.std = statistics
        self.loss_names = set_loss.loss_names
        self.metric_names = set_loss.metric_names
        self.divided_by = set_loss.divided_by

    def decode(
        self,
        outputs: Mapping[str, Tensor],
        sizes: Tensor,
        orig_sizes: Tensor,
        score_threshold: float,
        top_k: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the `top_k` best (query, class) pairs, best first; boxes are not clipped. Same as `PostProcess` of
        Deformable DETR and its successors; see `Detector.decode`."""
        boxes, scores = self.all_predictions(outputs, orig_sizes)  # (B, Q, 4), (B, Q, C)
        classes = scores.shape[2]
        pair_scores = scores.flatten(1)  # of 2 classes: query 0 class 0, query 0 class 1, query 1 class 0, ...
        count = min(top_k, pair_scores.shape[1])
        scores, pairs = pair_scores.topk(count, dim=1)
        queries = pairs // classes
        labels = pairs % classes
        boxes = boxes.gather(1, queries[..., None].expand(-1, -1, 4))
        return boxes, scores, labels

    def all_predictions(self, outputs: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, Tensor]:
        logits, boxes = self.last_layer(outputs)
        boxes_xyxy = cxcywh_to_xyxy(boxes.float())
        return denormalize_boxes(boxes_xyxy, sizes), self.class_scores(logits.float())

    def last_layer(self, outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits (B, Q, C) and boxes (B, Q, 4), cxcywh as fractions of the image, of the detecting queries."""
        return outputs["logits"][-1], outputs["boxes"][-1]

    def class_scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def resolved_options(self) -> dict:
        """Return the settings with the values in use; those of the source are read back from the built config."""
        return {
            **self.options,
            **from_entries(self.model.config, self.entries),
            "mean": list(self.mean),
            "std": list(self.std),
            **self.used,
        }

    def save_final(self, folder: Path, categories: Sequence, processor_size: Mapping[str, int] | None = None) -> None:
        """Write a folder that `AutoModelForObjectDetection.from_pretrained(folder)` loads.

        Args:
            categories: the classes in the order of the labels, with original `id` and `name`.
            processor_size: the size that the image processor resizes to, in pixels, as transformers spells it:
                `{"height": 640, "width": 640}`, `{"shortest_edge": 800, "longest_edge": 1333}`; None: no resizing.
        """
        from toolkit.models.final import save_transformers_folder  # no step needs it

        processor = self.processor_class(
            do_normalize=True,
            do_resize=processor_size is not None,
            image_mean=list(self.mean),
            image_std=list(self.std),
        )
        save_transformers_folder(self.model, processor, processor_size, folder, categories)


class MatchedDetector(TransformersDetector):
    """A detector of the family with configurable matching costs. A subclass defines `model_class` and `_initialise`; it
    classifies with sigmoids and a `FocalCriterion` unless it overrides `_criterion`.

    Raises:
        BadInput: unknown backbone or `freeze`, unavailable weights, settings that do not fit together, a source
            of another architecture.
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
        except ValueError as error:  # settings that transformers does not accept together, such as width and heads
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
        """Return this batch's number of boxes (once per group of queries) from CPU targets; crowd regions do not
        count."""
        return {"boxes": float(sum(count_objects(targets)) * self.groups)}

    def criterion(self, outputs: Mapping[str, Tensor], targets: Sequence[Mapping], denominators: Mapping):
        """Return losses and metrics `(losses, metrics)` of `forward`'s outputs; see `FocalCriterion.forward`."""
        return self.set_loss(outputs, targets, denominators, self.groups)


def projection_tap(projection: nn.Module, stride: int, channels: int) -> MapTap:
    """Return the tap of the convolution that projects a backbone map to the width of the transformer."""
    return MapTap(projection, [stride], [channels], lambda _, level: [level])


def check_positions(height: int, width: int, positions: int, num_queries: int) -> None:
    """Raise BadInput for images whose feature maps have fewer positions than there are queries to choose."""
    if positions < num_queries:
        raise BadInput(
            f"model.num_queries {num_queries}: images of {height}x{width} px have only {positions} positions; use "
            "larger images or fewer queries."
        )


def precision(training: bool, device: torch.device):
    """Return the context of a forward pass: autocast in training, float32 in evaluation, as for users of `final/`: half
    precision would round a reference point, and with it a box, to 1/256 of the image."""
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
