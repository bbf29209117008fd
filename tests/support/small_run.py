"""A training of one weight, with everything around its loop that a run has, for tests of what a run does."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import nn

from toolkit.base.batch import Batch
from toolkit.data.sampling import EpochSampler
from toolkit.data.table import Category
from toolkit.models import detector as base
from toolkit.run.best import Best
from toolkit.run.checkpoint import newest_valid
from toolkit.run.log import Log
from toolkit.run.parts import TrainingData, WeightFacts
from toolkit.run.plan import Plan
from toolkit.run.recovery import RunGuard
from toolkit.run.saving import Checkpoints, save
from toolkit.run.training import Training
from toolkit.run.training_window import TrainingWindow
from toolkit.run.validation import Validation, note_metric
from toolkit.step.losses import LossWeights
from toolkit.step.schedules import Schedule

NAN = math.nan
INF = math.inf
NOTHING = Batch(torch.zeros(0, 3, 2, 2, dtype=torch.uint8), torch.zeros(0, 2, dtype=torch.int64), [])
ONE_IMAGE = Batch(torch.ones(1, 3, 2, 2, dtype=torch.uint8), torch.tensor([[2, 2]]), [{"image_id": 1}])
STEP = {"loss": 1.0, "loss_ce": 1.0, "loss_ce_unscaled": 1.0, "grad_norm": 1.0}
FLAGS = {"buffers_finite": 1.0, "boxes_finite": 1.0, "state_finite": 1.0, "signal": 0.0, "time_s": 0.0, "notes": 0.0}


class Detector(base.Detector):
    """One weight; its loss is the mean of the images times it."""

    loss_names, divided_by = ("loss_ce",), "images"

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, images, sizes, targets=None):
        return images.float().mean() * self.weight

    def criterion(self, outputs, targets, denominators):
        return {"loss_ce": outputs / denominators["images"]}, {}


class Evaluator:
    """Metrics that are given, in turn, the last one again and again; an exception among them is raised."""

    def __init__(self, outcomes):
        self.outcomes = list(outcomes)

    def evaluate(self, predictions):
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return {"bbox_AP": outcome}

    def describe(self, *_):
        return ""


class Rows(list):
    """Takes rows as the writer of a run does, and keeps them."""

    shows = False

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.log = self.append

    def state_dict(self):
        return {"rows": 0}


def make_training(folder, policy="stop", scaler=None, metric="bbox_AP", outcomes=(0.5,), signal=0, keep=5) -> Training:
    """A training of 10 steps in epochs of 4 images, on one process.

    scaler: as Accelerate makes one, which has none on a CPU. outcomes: of its evaluations. signal: one received before.
    """
    detector = Detector()
    optimizer = torch.optim.SGD([{"params": [*detector.parameters()], "name": "main"}], lr=0.1)
    accelerator = SimpleNamespace(
        scaler=scaler,
        process_index=0,
        mixed_precision="no",
        is_main_process=True,
        device="cpu",
        autocast=nullcontext,
        num_processes=1,
        unscale_gradients=lambda: None,
    )
    table = SimpleNamespace(
        categories=(Category(1, "a"),),
        class_names=["a"],
        predicates=(),
        attributes=(),
        identity={},
        changed_since=lambda before: "",
    )
    log = Log(True)
    log.writer = Rows(folder)
    t = Training(
        accelerator=accelerator,
        model=detector,
        detector=detector,
        optimizer=optimizer,
        loss_weights=LossWeights(Detector.loss_names, {}, {"loss_ce": 1.0}),
        plan=Plan(EpochSampler(4, 1), Schedule(optimizer), total_steps=10),
        guard=RunGuard(policy),
        data=TrainingData(None, {"validation": table}),
        folder=folder,
        log=log,
        validation=Validation(table, [NOTHING], Evaluator(outcomes), pictures=0, best=Best(metric)),
        checkpoints=Checkpoints(folder and folder / "checkpoints", WeightFacts(detector), keep=keep),
        signals=SimpleNamespace(received=signal, name=""),
    )
    t.guard.snapshot(detector)
    return t


def window_with(t, batches, reduced, **flags) -> TrainingWindow:
    """The window under way, whose losses are reduced already."""
    t.window = TrainingWindow(t, batches)
    t.window.all_denominators = [{"images": 1.0} for _ in batches]
    t.window.reduced = dict(reduced)
    t.window.totals = {**reduced, **FLAGS, **flags}
    return t.window


def accepts(t, loss=1.0, norm=1.0, batches=(ONE_IMAGE,), **flags) -> bool:
    """Whether the guard accepts a window with these reduced values."""
    reduced = {"loss": loss, "loss_ce": loss, "grad_norm": norm}
    return t.guard.accepts(window_with(t, batches, reduced, **flags), reduced)


def fill(t, value) -> None:
    with torch.no_grad():
        t.detector.weight.fill_(value)


def newest(t):
    return newest_valid(t.folder / "checkpoints")[0]


def saved(folder, steps=(1,), best=1, **options):
    """Save a run at `steps`, the best at `best`; return the last checkpoint, read back."""
    t = make_training(folder, **options)
    for t.step in steps:
        note_metric(t, {"val/bbox_AP": 0.5 if t.step == best else 0.1})
        save(t, best=t.step == best)
    return newest(t)
