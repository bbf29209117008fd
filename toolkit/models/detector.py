"""The contract of detectors: what all code that trains, evaluates, saves or uses a detector expects of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.base.batch import first_rows, kept_first, normalize_images
from toolkit.base.errors import BadInput
from toolkit.models import DetectorOptions
from toolkit.models.final import save_detector_folder
from toolkit.models.nms import repeated_until_enough


@dataclass
class MapTap:
    """A part of a detector from which feature maps (B, C, H / stride, W / stride) are taken.

    Attributes:
        module: the part, whose output contains the maps.
        strides, channels: stride in pixels and number of channels C of each map.
        read: function that takes the arguments and the output of `module` and returns the maps in the order of
            `strides`.
    """

    module: nn.Module
    strides: Sequence[int]
    channels: Sequence[int]
    read: Callable[[tuple, Any], Sequence[Tensor]] = lambda arguments, output: list(output)


@contextmanager
def kept_maps(taps: Sequence[MapTap]) -> Iterator[dict[int, Tensor]]:
    """Yield a dict that receives the feature maps by stride when the detector is run in the `with` block.

    If a part runs several times, the maps of its first run are kept: SSD runs its backbone again to find the sizes of
    its maps.
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
    """The base class of all detectors.

    A subclass is built as `Class(class_names, options, **known)` and sets the attributes below that differ from their
    defaults.

    Attributes, of the class or set by `__init__`:
        Options: the dataclass of its settings, a subclass of `DetectorOptions`.
        loss_names: names of all losses that `criterion` may return.
        default_weights: {loss name: default weight}; the weight of a loss also applies to the same loss of auxiliary
            layers.
        divided_by: {loss name: name of the denominator that `criterion` divides the loss by}, or one name for all.
        averaged_denominators: names of the denominators that the original program averages over its processes.
        metric_names: names of the metrics that `criterion` returns.
        fixed_size: all images must have one size, without padding.
        stride: heights and widths of batches are multiples of this number of pixels.
        weighs_boxes: the criterion weights each box by `target["mixup"]`.
        masks_unlabelled: if `target["labelled"]` says that a class is not labelled in an image, no loss makes the class
            less likely in this image.
        weighs_classes: the criterion multiplies the classification loss of each object by the entry of its class in
            `class_weights`.
        buffers_steer_training: the forward pass in training uses buffers that training changes, such as running
            statistics; each forward pass then copies the buffers of the first process to all others. False: they are
            copied before an evaluation only.
        leaves_unused: the losses of a step may not depend on all trained parameters, such as those of denoising on a
            batch without boxes; with several processes, each step then searches for unused parameters.
        class_tensors: patterns of names of tensors with rows per class, see `toolkit.models.weights.pretrained`.
        slow_prefixes: prefixes of the parameters that the original program trains at a tenth of the learning rate.
        mean, std: mean and standard deviation of RGB values in [0, 1], by which images are normalised.
        max_detections: default number of detections of an image, over all classes, that an evaluation keeps, as in the
            original program.
        object_limits: {setting: number of objects in an image that the detector can find with it}.
        predicts_masks: `decode` also returns masks, and the targets of training must have `masks`, one uint8 tensor (N,
            h, w) an image, of the size of the image without padding; set by `__init__` of a detector with a setting
            `masks`.
        graph_parts: patterns of names of the outermost parts whose kernels depend on nothing but the shape of a batch's
            images, so that `optim.compile: graphs` can run them as CUDA graphs; each takes part in every forward.
        exported_sides: image sides that an exported file accepts: "any", "multiples" of `stride`, or "fixed" (the size
            that it was exported for); "": the detector cannot be exported.
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
    predicts_masks = False
    graph_parts: Sequence[str] = ()
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
        """Return the outputs for a batch of uint8 images (B, 3, H, W), whose sizes (height, width) without padding are
        sizes (B, 2); called under autocast."""
        raise NotImplementedError

    def normalized(self, images: Tensor, sizes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the images as `normalize_images` does, by the detector's mean and deviation.

        A detector of `fixed_size` is trained without padding, for which a GPU would launch seven kernels.
        """
        may_have_padding = not (self.fixed_size and self.training)
        return normalize_images(images, sizes if may_have_padding else None, self.mean, self.std, dtype)

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """Return what this batch adds to every denominator of the losses, by name; called before the forward pass, with
        targets on the CPU."""
        raise NotImplementedError

    def criterion(self, outputs: Mapping, targets: Sequence[Mapping], denominators: Mapping) -> tuple[dict, dict]:
        """Return unweighted losses in float32, each divided by its denominator, and metrics as (sum, count), both by
        name."""
        raise NotImplementedError

    def decode(
        self, outputs: Mapping, sizes: Tensor, orig_sizes: Tensor, score_threshold: float, top_k: int
    ) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Mapping[str, Tensor]]:
        """Return the detections of a batch as boxes, scores and labels, in the order in which `postprocess` keeps them.

        Boxes (B, K, 4) are float32 xyxy in pixels of the original images, scores (B, K), and labels (B, K) int64 from
        0, with -1 in rows without a detection. They stay on the device, and nothing is read from it.

        A fourth value is optional: a dict of further columns (B, K, ...) by name. A detector that `predicts_masks`
        returns `masks` (B, K, h, w) there, probabilities in float32 that `paste_masks` turns into pixels.

        Args:
            outputs: result of `forward`.
            sizes, orig_sizes: (B, 2) height and width of the images as the network saw them, without padding, and of
                the original images.
            score_threshold, top_k: `postprocess` drops detections with scores that are not above the threshold, and all
                but the first `top_k` of an image. `decode` may drop them before, to save time, but need not.
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
        """Return the detections of each image on the CPU: the first `top_k` of `decode` that score above the threshold.

        Each image has a dict with `boxes (K, 4)`, `scores (K,)`, `labels (K,)` and the further columns of `decode`,
        such as `masks (K, h, w)`; for the arguments see `decode`. The host waits for the device once, and once more
        where `decode` waits for it.
        """

        def select() -> tuple[list[Tensor], list[str]]:
            boxes, scores, labels, *more = self.decode(outputs, sizes, orig_sizes, score_threshold, top_k)
            further = more[0] if more else {}
            keep = (labels >= 0) & (scores > score_threshold)
            is_in_top = keep.cumsum(1) <= top_k
            return kept_first(keep & is_in_top, boxes, scores, labels, *further.values()), list(further)

        (counts, *values), names = repeated_until_enough(select)
        columns = dict(zip(["boxes", "scores", "labels", *names], values, strict=True))
        return first_rows(counts.tolist(), columns)

    def paste_masks(self, masks: Tensor, boxes_xyxy: Tensor, size_hw: tuple[int, int]) -> Tensor:
        """Return the pixels of detected masks in the original picture, (K, H, W) bool on the CPU.

        Args:
            masks: (K, h, w) of one image from `postprocess`, on the CPU.
            boxes_xyxy: (K, 4) boxes of the same detections, in pixels of the original picture.
            size_hw: its height and width.
        """
        raise NotImplementedError

    def map_taps(self) -> list[MapTap]:
        """Return the parts from which models built on this one, such as scene graphs, take feature maps; by default
        there are none.
        """
        return []

    def all_predictions(self, outputs: Mapping, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return all N predictions of each image, before the best are chosen, for models built on this one.

        Args:
            outputs: result of `forward`.
            sizes: (B, 2) height and width of the images as the network saw them, without padding.

        Returns:
            boxes (B, N, 4) xyxy in pixels of the images as the network saw them, and class scores (B, N, C) in [0, 1];
            both float32.
        """
        raise NotImplementedError

    def resolved_options(self) -> dict:
        """Return the settings with the values in use; a subclass adds the values that it has determined itself."""
        return dict(self.options)

    def save_final(self, folder: Path, categories: Sequence, processor_size: Mapping[str, int] | None = None) -> None:
        """Write the detector to a folder that `toolkit.models.final.load_detector_folder` loads.

        Args:
            categories: classes in the order of the labels.
            processor_size: the size to which images are resized, see `toolkit.data.pipeline.processor_size`; None:
                images keep their size.
        """
        save_detector_folder(self, processor_size, folder, categories)

    def make_evaluator(self, table, backend: str):
        """Return the evaluator of this detector on a data table; None, the default, stands for `CocoEvaluator`.

        A subclass may take more settings of the group `eval`, see `toolkit.evaluation.coco.make_evaluator`. backend:
        see `eval.backend`.
        """
        return

    def to_keep(self, detections: Mapping) -> Mapping:
        """Return the part of an image's detections that an evaluation keeps in memory; by default all.

        detections: as of `postprocess`, on the CPU, but with masks as run lengths.
        """
        return detections

    @property
    def denominator_names(self) -> tuple[str, ...]:
        """The names of all denominators in `divided_by`, without duplicates."""
        if isinstance(self.divided_by, str):
            return (self.divided_by,)
        return tuple(dict.fromkeys(self.divided_by.values()))


def denominator_of(detector: Detector, loss: str) -> str:
    """Return the name of the denominator that the loss of the name `loss` is divided by."""
    if isinstance(detector.divided_by, str):
        return detector.divided_by
    return detector.divided_by[loss]


def check_contract(detector: nn.Module) -> None:
    """Check that a detector has all methods and attributes of a `Detector`, before the first step.

    Raises:
        BadInput: methods or attributes are missing or not valid; the message lists all of them.
    """
    cls = type(detector)
    problems = []
    name = f"{cls.__module__}:{cls.__qualname__}"
    if not isinstance(detector, Detector):
        raise BadInput(f"{name} is not a detector: make it a subclass of toolkit.models.detector.Detector")
    required = ["forward", "denominators", "criterion"]
    if cls.postprocess is Detector.postprocess:
        required.append("decode")
    if detector.predicts_masks:
        required.append("paste_masks")
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
