"""The detector contract, between a model and all code that trains, evaluates, saves or uses it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.base.batch import first_rows, kept_first
from toolkit.base.errors import BadInput
from toolkit.models import DetectorOptions
from toolkit.models.nms import settled


@dataclass
class MapTap:
    """A module from which feature maps (B, C, H / stride, W / stride) of a detector are taken.

    module: the part that returns them, among other outputs. strides, channels: one of each for each map.
    read: arguments and output of that part -> the maps, in the order of `strides`.
    """

    module: nn.Module
    strides: Sequence[int]
    channels: Sequence[int]
    read: Callable[[tuple, Any], Sequence[Tensor]] = lambda arguments, output: list(output)


@contextmanager
def kept_maps(taps: Sequence[MapTap]) -> Iterator[dict[int, Tensor]]:
    """Yield a dict of feature maps by stride, filled while the detector runs inside.

    The maps of a part's first run count: SSD runs its backbone again to find the sizes of its maps.
    """
    maps: dict[int, Tensor] = {}

    def keep(tap: MapTap):
        def hook(_, arguments: tuple, output) -> None:
            if tap.strides[0] not in maps:
                maps.update(zip(tap.strides, tap.read(arguments, output), strict=True))

        return hook

    with ExitStack() as stack:
        for tap in taps:
            stack.enter_context(tap.module.register_forward_hook(keep(tap)))
        yield maps


class Detector(nn.Module):
    """The base of all detectors.

    A subclass is built as `Class(class_names, options, **known)` and sets its announcements.

    Announced, as attributes of the class or set by `__init__`:
        Options: the dataclass of its settings, a subclass of `DetectorOptions`.
        loss_names: every loss that `criterion` may return. default_weights: weight by name, or by the name that others
            are auxiliary layers of.
        divided_by: {loss name: name of the denominator that `criterion` divides it by}; one name: of all losses.
        averaged_denominators: those that the original program shares between its processes.
        metric_names: metrics that `criterion` returns beside losses.
        fixed_size: images must have one size and no padding. stride: sides of batches are multiples of it.
        weighs_boxes: the criterion weighs each box by `target["mixup"]`. masks_unlabelled: no loss makes a class less
            likely in an image whose `target["labelled"]` says that it is not labelled there. weighs_classes: the
            criterion multiplies the classification loss of each object by the entry of its class in `class_weights`.
        buffers_steer_training: buffers that training changes, such as running statistics, are used in its forward pass;
            every forward then copies those of the first process to all. If they are not used, an evaluation does so.
        leaves_unused: trained parameters may be unused in the losses of a step, such as those of denoising on a batch
            without boxes; with several processes each step searches for them (tests/test_contract.py).
        class_tensors: tensors with rows per class, see `toolkit.models.weights.mapping`.
        slow_prefixes: prefixes of the parameters that the original program trains at a tenth of the learning rate.
        mean, std: of RGB values in [0, 1].
        max_detections: detections of an image, over all classes, that an evaluation keeps by default: as many as that
            of the original program. object_limits: {setting: objects that it can find in an image}.
        exported_sides: image sides that an exported file accepts: "any", "multiples" of `stride`, or "fixed", those it
            was exported for; empty: `forward` and `decode` cannot be traced, and export is not possible.
    """

    Options: type[DetectorOptions] = DetectorOptions
    loss_names: Sequence[str] = ()
    default_weights: Mapping[str, float] = {}
    divided_by: str | Mapping[str, str] = ""
    averaged_denominators: Sequence[str] = ()
    metric_names: Sequence[str] = ()
    fixed_size = False
    stride = 32
    weighs_boxes = False
    buffers_steer_training = True
    masks_unlabelled = False
    weighs_classes = False
    leaves_unused = True
    class_tensors: Mapping[str, tuple[int, int, int]] = {}
    slow_prefixes: Sequence[str] = ()
    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)
    exported_sides = ""
    max_detections = 100
    object_limits: Mapping[str, int] = {}

    def weigh_classes(self, weights: Sequence[float]) -> None:
        """Set the weight of each class in the classification losses of training, in the order of the labels.

        The weights are on the device of the detector and in no checkpoint.
        """
        values = torch.tensor(list(weights), dtype=torch.float32)
        parameter = next(self.parameters(), values)
        self.register_buffer("_class_weights", values.to(parameter.device), persistent=False)

    @property
    def class_weights(self) -> Tensor | None:
        """Return the weights of the classes, (C,) float32; None: all are 1, as in evaluation mode always.

        The classification loss of whatever has an object of a class as its target is multiplied by the weight of this
        class, background by 1. Denominators stay as they are without weights.
        """
        return self._buffers.get("_class_weights") if self.training else None

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict:
        """Compute outputs, under autocast, of uint8 images (B, 3, H, W) with sizes (B, 2) h, w without padding."""
        raise NotImplementedError

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """Return this batch's share of every denominator, from CPU targets, before the forward."""
        raise NotImplementedError

    def criterion(self, outputs: Mapping, targets: Sequence[Mapping], denominators: Mapping) -> tuple[dict, dict]:
        """Return unweighted losses in float32, each divided by its denominator, and metrics as (sum, count)."""
        raise NotImplementedError

    def decode(
        self, outputs: Mapping, sizes: Tensor, orig_sizes: Tensor, score_threshold: float, top_k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return detections as boxes, scores and labels, those to be cut off last.

        Boxes (B, K, 4) are float32 xyxy in pixels of the original images, scores (B, K), labels (B, K) int64 from 0,
        and -1 in rows without a detection; on the device, without a host read.

        Args:
            sizes, orig_sizes: (B, 2) h, w of the images as the network saw them, without padding, and originally.
            score_threshold, top_k: scores that are not above the threshold, and more than `top_k` detections of an
                image, are not used; they may be left out or not.
        """
        raise NotImplementedError

    @torch.no_grad()
    def postprocess(
        self,
        outputs: Mapping,
        sizes: Tensor,
        orig_sizes: Tensor,
        score_threshold: float = 0.0,
        top_k: int = 100,
    ) -> list[dict[str, Tensor]]:
        """Return the first `top_k` detections of each image with scores above the threshold, on the CPU.

        They are the `boxes (K, 4)`, `scores (K,)` and `labels (K,)` of `decode`. The host waits for a device once.
        """

        def select() -> tuple[list[Tensor], None]:
            boxes, scores, labels = self.decode(outputs, sizes, orig_sizes, score_threshold, top_k)
            keep = (labels >= 0) & (scores > score_threshold)
            is_in_top = keep.cumsum(1) <= top_k
            return kept_first(keep & is_in_top, boxes, scores, labels), None

        (counts, boxes, scores, labels), _ = settled(select)
        columns = {"boxes": boxes, "scores": scores, "labels": labels}
        return first_rows(counts.tolist(), columns)

    def map_taps(self) -> list[MapTap]:
        """Return the taps of feature maps for models built on this one, such as scene graphs; none: there are none."""
        return []

    def all_predictions(self, outputs: Mapping, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return every prediction before the best are chosen, for models built on this one.

        Returns:
            boxes (B, N, 4) xyxy in pixels of the model's images and scores (B, N, C) of the classes in [0, 1], float32.
        """
        raise NotImplementedError

    def resolved_options(self) -> dict:
        """Return the settings with the values really used; a subclass adds those that it determined itself."""
        return dict(self.options)

    def save_final(self, folder: Path, categories: Sequence, processor_size: Mapping[str, int] | None = None) -> None:
        """Write a folder that `toolkit.models.final.load_detector_folder` loads; see there."""
        from toolkit.models.final import save_detector_folder  # transformers, which takes seconds to import

        save_detector_folder(self, processor_size, folder, categories)

    def make_evaluator(self, table, backend: str):
        """Return the evaluator of this detector on a table; None: COCO's box metrics.

        A subclass may use more `eval` settings, see `toolkit.evaluation.coco.make_evaluator`.
        """
        return

    def to_keep(self, detections: Mapping) -> Mapping:
        """Return the part of an image's detections that an evaluation keeps in memory; by default all."""
        return detections

    @property
    def denominator_names(self) -> tuple[str, ...]:
        """The names of the denominators, each once."""
        if isinstance(self.divided_by, str):
            return (self.divided_by,)
        return tuple(dict.fromkeys(self.divided_by.values()))


def denominator_of(detector: Detector, loss: str) -> str:
    """Return the name of the denominator that a loss is divided by."""
    if isinstance(detector.divided_by, str):
        return detector.divided_by
    return detector.divided_by[loss]


def check_contract(detector: nn.Module) -> None:
    """Check a detector against the contract before the first step.

    Raises:
        BadInput: all faults at once.
    """
    cls = type(detector)
    problems = []
    name = f"{cls.__module__}:{cls.__qualname__}"
    if not isinstance(detector, Detector):
        raise BadInput(f"{name} is not a detector: make it a subclass of toolkit.models.detector.Detector")
    required = ["forward", "denominators", "criterion"]
    if cls.postprocess is Detector.postprocess:
        required.append("decode")
    for method in required:
        default = getattr(Detector, method)
        if getattr(cls, method) is default:
            problems.append(f"{name} has no {method}(); {default.__doc__}")
    if not detector.loss_names:
        problems.append(f"{name} announces no loss_names: every loss that criterion() may return")
    if not detector.divided_by:
        problems.append(f"{name} announces no divided_by: the denominator of its losses, a name of denominators()")
    elif not isinstance(detector.divided_by, str):
        missing = set(detector.loss_names) - set(detector.divided_by)
        if missing:
            problems.append(f"{name}: divided_by names no denominator for {', '.join(sorted(missing))}")
    if any(len(values) != 3 for values in (detector.mean, detector.std)) or 0 in detector.std:
        expected = "3 numbers each, for red, green and blue, those of std above 0"
        problems.append(f"model.mean is {detector.mean} and model.std {detector.std}; expected {expected}")
    if detector.stride < 1:
        problems.append(f"{name}: stride is {detector.stride}; expected 1 or more")
    if problems:
        raise BadInput(problems)
