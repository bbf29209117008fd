"""What a detector is: the contract between a model and everything that trains, evaluates, saves or uses it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from toolkit.errors import BadInput
from toolkit.models.options import DetectorOptions


@dataclass
class MapTap:
    """Where feature maps (B, C, H / stride, W / stride) come out of a detector.

    module: the part that gives them, whatever else it gives. strides, channels: one of each for each map.
    read: arguments and output of that part -> the maps, in the order of `strides`.
    """

    module: nn.Module
    strides: Sequence[int]
    channels: Sequence[int]
    read: Callable[[tuple, Any], Sequence[Tensor]] = lambda arguments, output: list(output)


class Detector(nn.Module):
    """Base of all detectors. A subclass is built as `Class(class_names, options, **known)` and sets what is announced.

    Announced, as attributes of the class or set by `__init__`:
        Options: the dataclass of its settings, a subclass of `DetectorOptions`.
        loss_names: every loss that `criterion` may return. default_weights: weight by name, or by the name that others
            are auxiliary layers of.
        divided_by: {loss name: name of the denominator that `criterion` divides it by}; one name: of all losses.
        averaged_denominators: those that the original program shares between its processes.
        metric_names: what `criterion` returns beside losses.
        fixed_size: images must have one size and no padding. stride: sides of batches are multiples of it.
        weighs_boxes: the criterion weighs each box by `target["mixup"]`.
        buffers_steer_training: buffers that training changes, such as running statistics, have a part in its forward;
            every forward then gives all processes those of the first. Where they have none, an evaluation does so.
        leaves_unused: trained parameters may have no part in the losses of a step, as those of denoising on a batch
            without boxes; several processes then look for them in each (tests/test_unused_parameters.py).
        class_tensors: tensors with rows per class, see `toolkit.models.weights.mapping`.
        slow_prefixes: prefixes of the parameters that the original program trains at a tenth of the learning rate.
        mean, std: of RGB values in [0, 1].
    """

    Options: type[DetectorOptions] = DetectorOptions
    loss_names: Sequence[str] = ()
    default_weights: Mapping[str, float] = {}
    divided_by: str | Mapping[str, str] = ""
    averaged_denominators: Sequence[str] = ()
    metric_names: Sequence[str] = ()
    fixed_size, stride, weighs_boxes, buffers_steer_training = False, 32, False, True
    leaves_unused = True
    class_tensors: Mapping[str, tuple[int, int, int]] = {}
    slow_prefixes: Sequence[str] = ()
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def forward(self, images: Tensor, sizes: Tensor, targets: Sequence[Mapping] | None = None) -> dict:
        """Outputs, under autocast, of uint8 images (B, 3, H, W) with sizes (B, 2) h, w without padding."""
        raise NotImplementedError

    def denominators(self, targets: Sequence[Mapping]) -> dict[str, float]:
        """This batch's share of every denominator, from CPU targets, before the forward."""
        raise NotImplementedError

    def criterion(self, outputs: Mapping, targets: Sequence[Mapping], denominators: Mapping) -> tuple[dict, dict]:
        """Unweighted losses in float32, each divided by its denominator, and metrics as (sum, count)."""
        raise NotImplementedError

    def postprocess(
        self, outputs: Mapping, sizes: Tensor, orig_sizes: Tensor, score_threshold: float = 0.0, top_k: int = 100
    ) -> list[dict[str, Tensor]]:
        """Per image `boxes (K, 4)` xyxy in pixels of the original, `scores (K,)`, `labels (K,)` int64 from 0."""
        raise NotImplementedError

    def map_taps(self) -> list[MapTap]:
        """Where models built on this one, such as scene graphs, find its feature maps; none: nothing is built on it."""
        return []

    def all_predictions(self, outputs: Mapping, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Every prediction before the best are chosen, for models built on this one.

        Returns:
            boxes (B, N, 4) xyxy in pixels of the model's images and scores (B, N, C) of the classes in [0, 1], float32.
        """
        raise NotImplementedError

    def resolved_options(self) -> dict:
        """The settings with the values that were really used; a subclass fills in what it found out itself."""
        return dict(self.options)

    def save_final(self, folder: Path, categories: Sequence, processor_size: Mapping[str, int] | None = None) -> None:
        """Writes a folder that `toolkit.models.final.load_detector_folder` loads; see there."""
        from toolkit.models.final import save_detector_folder  # transformers, which takes seconds to import

        save_detector_folder(self, processor_size, folder, categories)

    def make_evaluator(self, table, backend: str):
        """What measures this detector on a table; None: see `toolkit.evaluation.choose.make_evaluator`."""
        return

    @property
    def denominator_names(self) -> tuple[str, ...]:
        """The names of the denominators, each once."""
        named = (self.divided_by,) if isinstance(self.divided_by, str) else self.divided_by.values()
        return tuple(dict.fromkeys(named))


def denominator_of(detector: Detector, loss: str) -> str:
    """The name of the denominator that a loss is divided by."""
    return detector.divided_by if isinstance(detector.divided_by, str) else detector.divided_by[loss]


def check_contract(detector: nn.Module) -> None:
    """Says everything that a detector lacks, before the first step instead of after the last.

    Raises:
        BadInput: all of it at once.
    """
    cls, problems = type(detector), []
    name = f"{cls.__module__}:{cls.__qualname__}"
    if not isinstance(detector, Detector):
        raise BadInput(f"{name} is no detector: make it a subclass of toolkit.models.detector.Detector")
    for method in ("forward", "denominators", "criterion", "postprocess"):
        if getattr(cls, method) is getattr(Detector, method):
            problems.append(f"{name} has no {method}(); {getattr(Detector, method).__doc__}")
    if not detector.loss_names:
        problems.append(f"{name} announces no loss_names: every loss that criterion() may return")
    if not detector.divided_by:
        problems.append(f"{name} announces no divided_by: the denominator of its losses, a name of denominators()")
    elif not isinstance(detector.divided_by, str) and (missing := set(detector.loss_names) - set(detector.divided_by)):
        problems.append(f"{name}: divided_by names no denominator for {', '.join(sorted(missing))}")
    if detector.stride < 1:
        problems.append(f"{name}: stride is {detector.stride}; expected 1 or more")
    if problems:
        raise BadInput(problems)
