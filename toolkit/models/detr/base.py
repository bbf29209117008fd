"""What all detectors of the family share: construction from options, and saving for transformers."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn
from transformers import PreTrainedConfig

from toolkit.box_ops import cxcywh_to_xyxy, denormalize_boxes
from toolkit.models.detector import Detector, MapTap
from toolkit.models.detr.configuration import from_entries
from toolkit.models.detr.encoder_layers import clamp_unasked_
from toolkit.models.final import save_transformers_folder

# Each decoder layer asks whether the sizes of the maps, which it is given twice, agree: the host would wait for a GPU.
os.environ.setdefault("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")


class TransformersDetector(Detector):
    """A detector around `self.model` of transformers. Built with `source_config`, `to_dict()` of the config of a model
    of transformers, it is that model with these classes, and options that are given override its entries.

    A subclass says:
        entries: the entries of transformers' config that each option sets.
        published: entries without an option of ours whose published value is not transformers'.
    """

    config_class: type[PreTrainedConfig]
    processor_class: type
    entries: Mapping[str, Sequence[str]] = {}
    published: Mapping[str, object] = {}
    averaged_denominators = ("boxes",)  # by rank, in the originals
    stride, buffers_steer_training = 1, False

    @property
    def exported_sides(self) -> str:
        return "fixed" if self.fixed_size else "any"

    def _take(self, set_loss: nn.Module, statistics: tuple[tuple, tuple], used: Mapping[str, object]) -> None:
        """Takes the criterion, mean and std, and the options that the config does not tell, as they were used."""
        clamp_unasked_(self.model)
        config = self.model.config  # a batch without boxes makes no denoising queries; dropped layers have no part
        self.leaves_unused = any(getattr(config, name, 0) for name in ("num_denoising", "decoder_layerdrop"))
        self.set_loss, self.used, (self.mean, self.std) = set_loss, dict(used), statistics
        self.loss_names, self.metric_names = set_loss.loss_names, set_loss.metric_names
        self.divided_by = set_loss.divided_by

    def decode(
        self, outputs: Mapping[str, Tensor], sizes: Tensor, orig_sizes: Tensor, score_threshold: float, top_k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The `top_k` best pairs of query and class, best first; boxes are not clipped. As `PostProcess` of Deformable
        DETR and its successors; see `Detector.decode`."""
        boxes, scores = self.all_predictions(outputs, orig_sizes)
        classes = scores.shape[2]
        scores, chosen = scores.flatten(1).topk(min(top_k, scores.shape[1] * classes), dim=1)
        return boxes.gather(1, (chosen // classes)[..., None].expand(-1, -1, 4)), scores, chosen % classes

    def all_predictions(self, outputs: Mapping[str, Tensor], sizes: Tensor) -> tuple[Tensor, Tensor]:
        logits, boxes = self.last_layer(outputs)
        return denormalize_boxes(cxcywh_to_xyxy(boxes.float()), sizes), self._class_scores(logits.float())

    def last_layer(self, outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (B, Q, C) and boxes (B, Q, 4) cxcywh as fractions of the image, of the queries that detect."""
        return outputs["logits"][-1], outputs["boxes"][-1]

    def _class_scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def resolved_options(self) -> dict:
        """The settings with the values that were really used, those of the source read back from the built config."""
        statistics = {"mean": list(self.mean), "std": list(self.std)}
        return {**self.options, **from_entries(self.model.config, self.entries), **statistics, **self.used}

    def save_final(self, folder: Path, categories: Sequence, processor_size: Mapping[str, int] | None = None) -> None:
        """Writes a folder that `AutoModelForObjectDetection.from_pretrained(folder)` loads.

        Args:
            categories: the classes in the order of the labels, with original `id` and `name`.
            processor_size: what the image processor resizes to, in pixels, as transformers spells it:
                `{"height": 640, "width": 640}`, `{"shortest_edge": 800, "longest_edge": 1333}`; None: no resizing.
        """
        processor = self.processor_class(
            do_normalize=True, image_mean=list(self.mean), image_std=list(self.std),
            do_resize=processor_size is not None,
        )  # fmt: skip
        save_transformers_folder(self.model, processor, processor_size, folder, categories)


def projection_tap(projection: nn.Module, stride: int, channels: int) -> MapTap:
    """The tap of a convolution that brings a map of the backbone to the width of the transformer."""
    return MapTap(projection, [stride], [channels], lambda _, level: [level])
