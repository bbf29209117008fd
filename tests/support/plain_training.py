"""Plain parts: a `Training` for tests that run a script's own loop on batches of their own, a small backbone."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from torch import nn

from scripts import train_detr
from toolkit.base.batch import Batch
from toolkit.base.signals import StopSignals
from toolkit.data.sampling import EpochSampler
from toolkit.models.detector import Detector
from toolkit.run.log import Log
from toolkit.run.parts import TrainingData, WeightFacts
from toolkit.run.plan import Plan
from toolkit.run.recovery import RunGuard
from toolkit.run.saving import Checkpoints
from toolkit.run.training import Training
from toolkit.run.validation import Validation
from toolkit.run.writer import RunWriter
from toolkit.step.losses import LossWeights
from toolkit.step.schedules import Schedule


def plain_training(
    detector,
    batches: list,
    optimizer,
    make_schedule,
    folder: Path,
    *,
    total_steps: int,
    scaler=None,
    accumulation_steps: int = 1,
    eval_every: int = 0,
    save_every: int = 0,
    keep: int = 2,
    **options,
):
    """One process on the CPU, every step logged.

    batches: of an epoch, all of one size but the last. make_schedule: takes the prepared optimizer. scaler: of fp16,
    which Accelerate has on a GPU alone.
    """
    accelerator = Accelerator(cpu=True)
    if scaler is not None:
        accelerator.scaler = scaler
        accelerator.unscale_gradients = lambda: scaler.unscale_(optimizer.optimizer)
    table = SimpleNamespace(
        categories=(),
        class_names=[],
        predicates=(),
        attributes=(),
        identity={},
        changed_since=lambda before: "",
    )
    model, optimizer = accelerator.prepare(detector, optimizer)
    plan = Plan(
        EpochSampler(sum(map(len, batches)), len(batches[0]), shuffle=False),
        make_schedule(optimizer),
        total_steps,
        accumulation_steps=accumulation_steps,
        steps_per_epoch=len(batches),
    )
    t = Training(
        accelerator=accelerator,
        model=model,
        detector=detector,
        optimizer=optimizer,
        plan=plan,
        loss_weights=LossWeights(detector.loss_names, {}, detector.default_weights),
        guard=RunGuard(),
        data=TrainingData(batches, {"validation": table}),
        signals=StopSignals(),
        validation=Validation(table, None, None, every=eval_every),
        checkpoints=Checkpoints(folder / "checkpoints", WeightFacts(detector), save_every, keep),
        folder=folder,
        log=Log(True, "epoch_median", len(batches), log_every=1),
        **options,
    )
    t.log.start(RunWriter(folder), {}, 0, total_steps)
    return t


# ---- a detector of three weights, and changes of the loop ------------------------------------------------------------


class Toy(Detector):
    """Its loss is the mean over images of the sum of its weights times the values of the pixels."""

    loss_names = ("loss_ce",)
    divided_by = "images"
    default_weights = {"loss_ce": 1.0}

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, images, sizes, targets=None):
        return images.float().mean((2, 3)) @ self.weight

    def denominators(self, targets):
        return {"images": float(len(targets))}

    def criterion(self, outputs, targets, denominators):
        return {"loss_ce": outputs.sum() / denominators["images"]}, {}


def toy_training(folder: Path, make_schedule=Schedule, accumulation_steps: int = 1, **pace):
    """A training of an epoch of eight images, one in a batch, whose pixels are 10, 20, ..., 80."""
    folder.mkdir(exist_ok=True)
    batches = []
    for i in range(1, 9):
        target = {"image_id": i, "labels": torch.zeros(2, dtype=torch.int64)}
        pixels = torch.full((1, 3, 4, 4), 10 * i, dtype=torch.uint8)
        batches.append(Batch(pixels, torch.tensor([[4, 4]]), [target]))
    toy = Toy()
    return plain_training(
        toy,
        batches,
        torch.optim.SGD([{"params": [toy.weight], "name": "main"}], lr=1e-3),
        make_schedule,
        folder,
        total_steps=len(batches) // accumulation_steps,
        accumulation_steps=accumulation_steps,
        **pace,
    )


def evaluate_to(t, value: float) -> None:
    """Make every evaluation have this metric, and leave no files."""
    t.validation.loader = [Batch(torch.zeros(0, 3, 2, 2, dtype=torch.uint8), torch.zeros(0, 2, dtype=torch.int64), [])]
    t.validation.pictures = 0
    t.validation.evaluator = SimpleNamespace(evaluate=lambda found: {"bbox_AP": value}, describe=lambda *_: "")
    t.log.attempt = lambda what, function: None


# Lines of the loop of train_detr, which changes replace.
TRAIN = "    t.model.train()\n"
MICRO = "        for batch in window:  # on the device, its random numbers seeded\n"
CRITERION = "losses, metrics = t.detector.criterion(outputs, batch.targets, window.denominators)  # in float32\n"
BACKWARD = "            window.backward(weighted, metrics)\n"
REDUCE = "        reduced = window.reduce()  # `reduce_dict`: one collective and one host read for the whole step\n"
ACCEPTS = """        if not t.guard.accepts(window, reduced):  # the NaN guard, on every rank alike: reported and undone
            continue
"""
CLIP = "        window.clip(t.max_norm)\n"
UPDATE = "        t.optimizer.step()\n"
END = "        t.meters.update(reduced)\n"


def run_changed(t, *hunks: tuple[str, str], epochs: int = 1) -> list:
    """Run epochs of the loop of train_detr with lines of it replaced; return what they append to `drawn`."""
    source = inspect.getsource(train_detr.train_one_epoch)
    for old, new in hunks:
        assert source.count(old) == 1
        source = source.replace(old, new)
    names = {"torch": torch, "drawn": []}
    exec(compile(source, "changed", "exec"), names)
    for _ in range(epochs):
        if not t.finished:
            names["train_one_epoch"](t)
    return names["drawn"]


# ---- a backbone ------------------------------------------------------------------------------------------------------


class Taps(nn.Module):
    """Convolutions of stride 2 as a timm features_only backbone: `stages` of (in, out) channels, a tap after each."""

    def __init__(self, stages: list[list[tuple[int, int]]]):
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(*(conv_bn_leaky(i, o) for i, o in stage)) for stage in stages)
        self.feature_info = SimpleNamespace(channels=lambda: [stage[-1][1] for stage in stages])

    def forward(self, x):
        taps = []
        for stage in self.stages:
            x = stage(x)
            taps.append(x)
        return taps


def conv_bn_leaky(width: int, out_width: int) -> nn.Sequential:
    convolution = nn.Conv2d(width, out_width, 3, 2, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_width), nn.LeakyReLU(0.1))
