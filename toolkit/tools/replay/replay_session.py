"""Runs a reported window again with the script of the run.

`loop_of_script` calls the function `train` of the script with a `ReplaySession`, so that the script's own additions
(losses, state, the loop) take effect as in the run. Nothing is trained, written or downloaded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.base.batch import Batch
from toolkit.base.errors import BadInput
from toolkit.base.signals import StopSignals
from toolkit.data.sampling import EpochSampler
from toolkit.data.table import Category, DetectionTable
from toolkit.data.table_cache import write_rows
from toolkit.models.detector import Detector
from toolkit.run.best import Best
from toolkit.run.command_line import parse_config
from toolkit.run.log import Log
from toolkit.run.parts import TrainingData, WeightFacts
from toolkit.run.plan import Plan
from toolkit.run.processes import start_accelerator
from toolkit.run.recovery import RunGuard
from toolkit.run.saving import Checkpoints
from toolkit.run.training import Training
from toolkit.run.training_window import TrainingWindow
from toolkit.run.validation import Validation
from toolkit.step.ema import Ema
from toolkit.step.losses import LossWeights
from toolkit.step.schedules import Schedule
from toolkit.step.window import Window, autocast


class ReportedWindow(TrainingWindow):
    """The reported window on the CPU, with the denominators, precision and loss scale of the run.

    Its batches are the reported ones, in which the script's changes of batches are contained already; new changes by
    the script are ignored.
    """

    def __init__(self, t: Training, batches: Sequence[Batch], report: Mapping):
        super().__init__(t, batches)
        self.rank = report["rank"]
        self.precision = report.get("precision", "no")
        self.scale = float(report.get("scale") or 1.0)
        self._denominators_then = report["denominators"]

    @property
    def batches(self) -> list[Batch]:
        return list(self._batches)

    @batches.setter
    def batches(self, batches: Sequence[Batch]) -> None:
        if not hasattr(self, "_batches"):
            self._batches = list(batches)

    def denominators_for(self, counts: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
        return self._denominators_then

    def autocast(self) -> AbstractContextManager:
        return autocast("cpu", self.precision)

    def backward_of(self, total: Tensor) -> None:
        (total * self.scale).backward()


class OneWindow(Training):
    """The training that a script gets in a replay: it has one window, the reported one, and no update is made."""

    reported: ReportedWindow

    @property
    def finished(self) -> bool:
        return True  # so that `main` returns as soon as everything is built

    def windows(self) -> Iterator[TrainingWindow]:
        self.extra.zero_grad()
        self.reported.seed_what_is_outside()
        yield self.reported

    def end_epoch(self) -> dict[str, float]:
        return {}


class RefusingGuard(RunGuard):
    """A NaN guard that refuses every update, so that nothing is trained."""

    def accepts(self, window: TrainingWindow, reduced: Mapping[str, float]) -> bool:
        return False


def weights_as_they_were(detector: Detector, report: Mapping) -> LossWeights:
    """Return the weights of the detector's own losses at the reported step, as constants even if they were learned."""
    return LossWeights(
        detector.loss_names,
        {name: report["loss_weights"][name] for name in detector.loss_names},
        {},
    )


def window_of_report(
    detector: nn.Module,
    weights: LossWeights,
    report: Mapping,
    batches: Sequence[Batch],
) -> Callable[[], list[dict[str, Tensor]]]:
    """Return a function that runs the reported window through the detector and its criterion, without the script, and
    returns the losses of each micro-batch; see `Window.run_again`."""
    window = Window(
        batches,
        report["denominators"],
        step=report["step"],
        seed=report["seed"],
        rank=report["rank"],
        precision=report.get("precision", "no"),
        scale=float(report.get("scale") or 1.0),
    )
    return lambda: window.run_again(detector, weights)


class ReplaySession:
    """A replacement of `Session` for a replay, which is given to the function `train` of a script.

    Args:
        config: settings of the run.
        folder: an empty folder, for files that the script writes.
        report, batches: from `load_report`.
        detector: the detector with the weights of the report.
        extra: the script's own state in the run, before the window.

    Attributes:
        t: the training, once the script has called `training`.
    """

    checkpoint = None
    is_main = True

    def __init__(
        self,
        config: Any,
        folder: Path,
        report: Mapping,
        batches: Sequence[Batch],
        detector: Detector,
        extra: Mapping,
    ):
        self.config = config
        self.folder = folder
        self.accelerator = start_accelerator("no", cpu=True)
        self.t: OneWindow | None = None
        self._report = report
        self._batches = batches
        self._detector = detector
        self._extra = extra
        self._table = _table(folder, report, batches)

    def say(self, text: str) -> None:
        """Print a text."""
        print(text)

    def open_data(self) -> tuple[DetectionTable, DetectionTable]:
        """Return the images of the window as training and validation data."""
        return self._table, self._table

    def make_detector(self, table: DetectionTable, start: Callable | None = None) -> Detector:
        """Return the detector with the weights of the report; the arguments have no effect."""
        return self._detector

    def training(
        self,
        detector: Detector,
        table: DetectionTable,
        val_table: DetectionTable,
        evaluator: Any,
    ) -> "OneWindow":
        """Return a training whose only window is the reported one; `evaluator` has no effect."""
        report = self._report
        optimizer = torch.optim.SGD(
            [{"params": list(detector.parameters()), "name": "main"}],
            lr=0.0,
        )
        sampler = EpochSampler(len(table), len(table), seed=report["seed"])
        sampler.set_epoch(report["epoch"])
        log = Log(True)
        log.writer = SimpleNamespace(folder=self.folder, log=lambda row: None)
        t = OneWindow(
            accelerator=self.accelerator,
            model=detector,
            detector=detector,
            loss_weights=weights_as_they_were(detector, report),
            optimizer=optimizer,
            plan=Plan(sampler, Schedule(optimizer), report["step"] + 1),
            guard=RefusingGuard(),
            data=TrainingData(None, {"training": table, "validation": val_table}),
            validation=Validation(val_table, None, None, best=Best("loss")),
            checkpoints=Checkpoints(self.folder / "checkpoints", WeightFacts(detector)),
            signals=StopSignals(),
            folder=self.folder,
            log=log,
            ema=Ema(detector, 0.9),
            step=report["step"],
        )
        t.reported = ReportedWindow(t, self._batches, report)
        t.extra.load_state_dict(self._extra)
        self.t = t
        return t

    def end(self, t: Training) -> None:
        """Do nothing: nothing was trained."""


def loop_of_script(
    module: ModuleType,
    config_file: Path,
    report: Mapping,
    batches: Sequence[Batch],
    detector: Detector,
    extra: Mapping,
) -> Callable[[], list[dict[str, Tensor]]]:
    """Return a function that runs the reported window through the script's `train_one_epoch` and returns the losses of
    each micro-batch.

    Args:
        module: the script.
        config_file: settings of the run.
        report, batches, detector, extra: see `ReplaySession`.

    Raises:
        BadInput: the script has no function `train(s)`, or that function does not call `s.training`.
    """
    train = getattr(module, "train", None)
    if train is None:
        raise BadInput(f"{module.__file__}: it has no function train(s), so that its loop cannot be run again")
    config = parse_config(module.Config, ["--config", str(config_file)])
    with TemporaryDirectory() as folder:
        s = ReplaySession(config, Path(folder), report, batches, detector, extra)
        train(s)
    t = s.t
    if t is None:
        raise BadInput(f"{module.__file__}: its train calls no s.training, so that its loop cannot be run again")

    def run() -> list[dict[str, Tensor]]:
        module.train_one_epoch(t)
        return t.reported.losses

    return run


def _table(folder: Path, report: Mapping, batches: Sequence[Batch]) -> DetectionTable:
    """Return the images of the window as a data set, for the evaluator."""
    rows = []
    for target in (target for batch in batches for target in batch.targets):
        height, width = (int(side) for side in target["orig_size"])
        objects = {
            "id": [],
            "bbox": [],
            "category": [],
            "area": [],
            "iscrowd": [],
        }
        relations = {"subject": [], "object": [], "predicate": []}
        row = {
            "image_id": target["image_id"],
            "file_name": f"{len(rows)}.jpg",
            "width": width,
            "height": height,
        }
        rows.append(row | {"objects": objects, "relations": relations})
    classes = {
        "categories": [Category(**category) for category in report["categories"]],
        "attributes": (),
    }
    classes["predicates"] = report.get("predicates", ())
    return write_rows(
        rows,
        cache_file=folder / "table.arrow",
        image_root=folder,
        name="the window",
        **classes,
    )
