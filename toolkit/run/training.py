"""The objects of one training run. The loop itself is in each script, and the work around a step in `toolkit.run.loop`.

This module reads no settings; `toolkit.run.session` builds the objects from them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from toolkit.base.errors import BadInput
from toolkit.base.signals import StopSignals
from toolkit.data.sampling import EpochSampler
from toolkit.models.detector import Detector
from toolkit.run import loop
from toolkit.run.log import Log
from toolkit.run.parts import Extra, OptimizerPart, Parts, PlaceInData, TrainingData
from toolkit.run.plan import Plan
from toolkit.run.recovery import RunGuard
from toolkit.run.saving import Checkpoints
from toolkit.run.training_window import TrainingWindow
from toolkit.run.validation import Validation
from toolkit.step.ema import Ema
from toolkit.step.loop_check import LoopCheck
from toolkit.step.losses import LossWeights
from toolkit.step.meters import Meters


@dataclass
class Training:
    """The objects of one run, which a script calls `t`.

    Attributes:
        model: the detector as Accelerate wraps it (DDP, autocast), for the forward pass.
        detector: the detector without wrappers, with the same weights.
        plan: length, accumulation and learning rates.
        signals: received signals, which end the run early.
        folder: the run folder.
        max_norm: maximum norm of the gradients, to which they are clipped; 0: they are not clipped.
        step: optimizer steps made so far.
        extra: the script's own modules, optimizers and values, see `toolkit.run.parts.Extra`.
        check: checks that the body of the loop makes all necessary calls.
        window: the current window, until the work after its update is done; None between two windows.
    """

    accelerator: Accelerator
    model: nn.Module
    detector: Detector
    loss_weights: LossWeights
    optimizer: torch.optim.Optimizer
    plan: Plan
    guard: RunGuard
    data: TrainingData
    validation: Validation
    checkpoints: Checkpoints
    signals: StopSignals
    folder: Path
    log: Log
    max_norm: float = 0.0
    ema: Ema | None = None
    step: int = 0
    window: TrainingWindow | None = field(default=None, init=False)

    def __post_init__(self):
        if self.ema is None:
            self.ema = Ema(self.detector, 0.0)
        self.extra = Extra(self.accelerator)
        self.loss_weights.defers_unknown = True
        self.guard.of_run(self)
        self.check = LoopCheck(partial(loop.counted_calls, self))
        self.check.watch(self.optimizer, partial(loop.count_update, self))

    # ---- where the run is --------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        return self.plan.eval_only or bool(self.ended_by)

    @property
    def ended_by(self) -> list[str]:
        """Keys of the settings that end training at this step, see `toolkit.run.status.ENDINGS`; empty: it goes on."""
        limits = {
            self.plan.limit: self.step >= self.plan.total_steps,
            "eval.early_stopping_patience": self.validation.best.patience_is_over,
            "schedule.max_decays": self.plan.schedule.finished,
        }
        return [setting for setting, is_reached in limits.items() if is_reached]

    @property
    def epoch_is_over(self) -> bool:
        """Whether training has consumed the last micro-batch of the epoch."""
        return self.sampler.next_batch >= len(self.sampler)

    @property
    def parts(self) -> Parts:
        """All objects whose state is saved in checkpoints, by their names there, see `toolkit.run.parts`."""
        parts = Parts(model=self.detector, loss_weights=self.loss_weights)
        if self.ema.is_on:
            parts["ema"] = self.ema
        parts["optimizer"] = OptimizerPart(self.optimizer, keeps_rates=not self.plan.follows_checkpoint)
        parts["extra"] = self.extra
        if self.accelerator.scaler is not None:
            parts["scaler"] = self.accelerator.scaler
        parts["data"] = self.data
        parts["sampler"] = PlaceInData(self.sampler, self.data)
        parts["weight_facts"] = self.checkpoints.weight_facts
        parts["plan"] = self.plan
        parts["guard"] = self.guard
        parts["log"] = self.log
        parts["best"] = self.validation.best
        return parts

    @property
    def sampler(self) -> EpochSampler:
        """The sampler of the training data, which keeps the place in the data."""
        return self.plan.sampler

    @property
    def seed(self) -> int:
        """The seed of all random numbers of the run."""
        return self.sampler.seed

    @property
    def meters(self) -> Meters:
        """The meters, whose smoothed values the console shows."""
        return self.log.meters

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        """Every parameter that the optimizer holds."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    # ---- what a script says before the loop --------------------------------------------------------------------------

    def announce(self, name: str, weight: float | Sequence[Sequence[float]], divided_by: str | None) -> None:
        """Announce a loss of the script's own, which the script adds to `losses` of the criterion in its loop.

        Args:
            name: name of the loss.
            weight: a number, or a piecewise linear schedule [[step, value], ...].
            divided_by: "images" or "boxes" if the script computes the loss as a mean over the images or boxes of a
                micro-batch; the loss is then rescaled to a mean over the whole window and all ranks. None: the script
                divides a sum by one of `window.denominators` itself, and nothing is rescaled.

        Raises:
            BadInput: the name is taken already, or the weight or `divided_by` is not valid.
        """
        if divided_by not in ("images", "boxes", None):
            raise BadInput(f't.announce("{name}"): divided_by is {divided_by!r}; expected "images", "boxes" or None')
        self.loss_weights.add(name, weight, divided_by)

    def without(self, *names: str) -> None:
        """Declare that the script leaves out these calls of the loop on purpose, so that `check` does not report them.

        names: keys of `toolkit.step.loop_check.LOOP_LINES`, or "train".

        Raises BadInput if a name is unknown or its call may not be left out.
        """
        self.check.leave_out(names)

    # ---- around the body of the loop ---------------------------------------------------------------------------------

    def windows(self) -> Iterator[TrainingWindow]:
        """Yield the remaining windows of the epoch, up to the end of the run. A window has the micro-batches of a step.

        Before each pass through the loop body, gradients are zeroed, the place in the data moves behind the window,
        buffers are copied for the NaN guard, and random numbers are seeded by (seed, step, rank). After each pass, the
        calls in the body are checked, rows are written, the next learning rates are set, and the state is saved and
        evaluated if that is due.

        Raises:
            BadInput: the body left out a necessary call, or made it twice; or rows cannot be written any more, in which
                case the state is saved.
            Preempted: some rank received a signal; the state is saved.
            StoppedByGuard: the state after the last update is not finite; the newest finite state is saved.
        """
        return loop.windows_of_epoch(self)

    def end_window(self) -> None:
        """Do what `windows` does after a pass through the loop body; for a script that leaves the loop early."""
        loop.end_window(self)

    def end_epoch(self) -> dict[str, float]:
        """Return the averages of the epoch's losses and metrics, and begin the next epoch if this one is over.

        The names are those of a row without `train/`.
        """
        return loop.end_epoch(self)

    def set_rates(self) -> None:
        """Set learning rates and batch norm momentum for the next update, as functions of the step."""
        self.plan.set_rates(self.step, self.detector)
