"""Replay of a reported window by the script that reported it, in place of `toolkit.run.session`.

`loop_of_script` runs the script's own `main` with these functions instead of the session's, so that changes of the
script (losses, state, the loop) take effect as in the run; nothing is trained, written or downloaded.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import toolkit.run
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
from toolkit.run.parts import WeightFacts
from toolkit.run.plan import Plan
from toolkit.run.recovery import RunGuard
from toolkit.run.saving import Checkpoints
from toolkit.run.training import Training
from toolkit.run.training_data import TrainingData
from toolkit.run.validation import Validation
from toolkit.run.window import TrainingWindow
from toolkit.step.ema import Ema
from toolkit.step.losses import LossWeights
from toolkit.step.schedules import Schedule
from toolkit.step.window import Window, autocast


class ReportedWindow(TrainingWindow):
    """The reported window, with the denominators that it had on all processes.

    Its batches are those that were trained on. Changes of the batches by the script are ignored, as they contain them.

    given: the denominators of each micro-batch.
    """

    def __init__(self, t: Training, batches: Sequence[Batch], given: Sequence[Mapping[str, float]]):
        super().__init__(t, batches)
        self._given = given

    @property
    def batches(self) -> list[Batch]:
        return list(self._batches)

    @batches.setter
    def batches(self, batches: Sequence[Batch]) -> None:
        if not hasattr(self, "_batches"):
            self._batches = list(batches)

    def denominators_for(self, counts: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
        return self._given


class OneWindow(Training):
    """The training of a script, of which only the forward and backward of the reported window are run."""

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
    """A guard that refuses the window, so that nothing is trained on it."""

    def accepts(self, window: TrainingWindow, reduced: Mapping[str, float]) -> bool:
        return False


def weights_as_they_were(detector: Detector, report: Mapping) -> LossWeights:
    """Return the loss weights of a reported step as constants, including learned ones, for the detector's own
    losses."""
    return LossWeights(detector.loss_names, {name: report["loss_weights"][name] for name in detector.loss_names}, {})


def window_of_report(
    detector: nn.Module, weights: LossWeights, report: Mapping, batches: Sequence[Batch]
) -> Callable[[], list[dict[str, Tensor]]]:
    """Return a function that runs the reported window through the detector and its criterion; see
    `Window.run_again`."""
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


def loop_of_script(
    module: ModuleType, config_file: Path, report: Mapping, batches: Sequence[Batch], detector: Detector, extra: Mapping
) -> Callable[[], list[dict[str, Tensor]]]:
    """Return a function that runs the reported window through the script's `train_one_epoch` and returns the losses of
    each micro-batch.

    extra: state that the script added to the run, as it was before the window.
    """
    config = parse_config(module.Config, ["--config", str(config_file)])
    made: list[OneWindow] = []
    with TemporaryDirectory() as folder:
        stand_in = _session(Path(folder), report, batches, detector, extra, made)
        with (
            mock.patch.dict(sys.modules, {"toolkit.run.session": stand_in}),
            mock.patch.object(toolkit.run, "session", stand_in, create=True),
        ):
            module.main(config)
    if not made:
        raise BadInput(f"{module.__file__}: its main calls no session.training, so that its loop cannot be run again")

    def run() -> list[dict[str, Tensor]]:
        module.train_one_epoch(made[0])
        return made[0].reported.losses

    return run


def _session(
    folder: Path, report: Mapping, batches: Sequence[Batch], detector: Detector, extra: Mapping, made: list
) -> ModuleType:
    """Return a module with the functions of `toolkit.run.session`."""
    accelerator = _accelerator(report)
    table = _table(folder, report, batches)

    @contextmanager
    def session(config: Any) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(config=config, accelerator=accelerator, folder=folder, checkpoint=None, say=print)

    def training(s: Any, detector: Detector, *_) -> OneWindow:
        weights = weights_as_they_were(detector, report)
        optimizer = torch.optim.SGD([{"params": list(detector.parameters()), "name": "main"}], lr=0.0)
        sampler = EpochSampler(len(table), len(table), seed=report["seed"])
        log = Log(True)
        sampler.set_epoch(report["epoch"])
        log.writer = SimpleNamespace(folder=folder, log=lambda row: None)
        t = OneWindow(
            accelerator=accelerator, model=detector, detector=detector, loss_weights=weights, optimizer=optimizer,
            plan=Plan(sampler, Schedule(optimizer), report["step"] + 1), guard=RefusingGuard(),
            data=TrainingData(None, {"validation": table}), validation=Validation(table, None, None, best=Best("loss")),
            checkpoints=Checkpoints(folder / "checkpoints", WeightFacts(detector)), signals=StopSignals(),
            folder=folder, log=log, ema=Ema(detector, 0.9), step=report["step"],
        )  # fmt: skip
        t.reported = ReportedWindow(t, batches, report["denominators"])
        t.extra.load_state_dict(extra)
        made.append(t)
        return t

    stand_in = ModuleType("toolkit.run.session")
    stand_in.session = session
    stand_in.training = training
    stand_in.open_data = lambda s: (table, table)
    stand_in.make_detector = lambda *_: detector
    stand_in.end = lambda *_: None
    return stand_in


def _accelerator(report: Mapping) -> SimpleNamespace:
    """Return the part of Accelerate's interface that a loop uses, on the CPU, with the report's loss scale and
    precision."""
    scale = float(report.get("scale") or 1.0)
    precision = report.get("precision", "no")
    return SimpleNamespace(
        device=torch.device("cpu"), process_index=report["rank"], num_processes=1, is_main_process=True, scaler=None,
        mixed_precision=precision, no_sync=nullcontext, unscale_gradients=lambda: None,
        autocast=lambda: autocast("cpu", precision), prepare=lambda *objects: objects,
        backward=lambda loss: (loss * scale).backward(), prepare_optimizer=lambda optimizer: optimizer, print=print,
    )  # fmt: skip


def _table(folder: Path, report: Mapping, batches: Sequence[Batch]) -> DetectionTable:
    """Return the images of the window as a data set, for the evaluator."""
    rows = []
    for target in (target for batch in batches for target in batch.targets):
        height, width = (int(side) for side in target["orig_size"])
        objects = {"id": [], "bbox": [], "category": [], "area": [], "iscrowd": []}
        relations = {"subject": [], "object": [], "predicate": []}
        row = {"image_id": target["image_id"], "file_name": f"{len(rows)}.jpg", "width": width, "height": height}
        rows.append(row | {"objects": objects, "relations": relations})
    classes = {"categories": [Category(**category) for category in report["categories"]], "attributes": ()}
    classes["predicates"] = report.get("predicates", ())
    return write_rows(rows, cache_file=folder / "table.arrow", image_root=folder, name="the window", **classes)
