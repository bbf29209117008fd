"""Plain parts: a `Training` for tests that run a script's own loop on batches of their own, a small backbone."""

from pathlib import Path
from types import SimpleNamespace

from accelerate import Accelerator
from torch import nn

from toolkit.base.signals import StopSignals
from toolkit.data.sampling import EpochSampler
from toolkit.run.log import Log
from toolkit.run.parts import TrainingData, WeightFacts
from toolkit.run.plan import Plan
from toolkit.run.recovery import RunGuard
from toolkit.run.saving import Checkpoints
from toolkit.run.training import Training
from toolkit.run.validation import Validation
from toolkit.run.writer import RunWriter
from toolkit.step.losses import LossWeights


def plain_training(
    detector, batches: list, optimizer, make_schedule, folder: Path, *, total_steps: int, scaler=None,
    accumulation_steps: int = 1, eval_every: int = 0, save_every: int = 0, keep: int = 2, **options,
):  # fmt: skip
    """One process on the CPU, every step logged.

    batches: of an epoch, all of one size but the last. make_schedule: takes the prepared optimizer. scaler: of fp16,
    which Accelerate has on a GPU alone.
    """
    accelerator = Accelerator(cpu=True)
    if scaler is not None:
        accelerator.scaler = scaler
        accelerator.unscale_gradients = lambda: scaler.unscale_(optimizer.optimizer)
    table = SimpleNamespace(categories=(), class_names=[], predicates=(), attributes=(), identity={},
                            changed_since=lambda before: "")  # fmt: skip
    model, optimizer = accelerator.prepare(detector, optimizer)
    sampler = EpochSampler(sum(map(len, batches)), len(batches[0]), shuffle=False)
    plan = Plan(sampler, make_schedule(optimizer), total_steps, accumulation_steps=accumulation_steps,
                steps_per_epoch=len(batches))  # fmt: skip
    t = Training(
        accelerator=accelerator, model=model, detector=detector, optimizer=optimizer, plan=plan,
        loss_weights=LossWeights(detector.loss_names, {}, detector.default_weights), guard=RunGuard(),
        data=TrainingData(batches, {"validation": table}), signals=StopSignals(),
        validation=Validation(table, None, None, every=eval_every),
        checkpoints=Checkpoints(folder / "checkpoints", WeightFacts(detector), save_every, keep), folder=folder,
        log=Log(True, "epoch_median", len(batches), log_every=1), **options,
    )  # fmt: skip
    t.log.start(RunWriter(folder), {}, 0, total_steps)
    return t


class Taps(nn.Module):
    """Convolutions of stride 2 as a timm features_only backbone: `stages` of (in, out) channels, a tap after each."""

    def __init__(self, stages: list[list[tuple[int, int]]]):
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(*(conv_bn_leaky(i, o) for i, o in stage)) for stage in stages)
        self.feature_info = SimpleNamespace(channels=lambda: [stage[-1][1] for stage in stages])

    def forward(self, x):
        taps = []
        for stage in self.stages:
            taps.append(x := stage(x))
        return taps


def conv_bn_leaky(width: int, out_width: int) -> nn.Sequential:
    convolution = nn.Conv2d(width, out_width, 3, 2, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_width), nn.LeakyReLU(0.1))
