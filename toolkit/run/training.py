"""The objects of one training run; the loop itself is in each script, and what surrounds a step in `toolkit.run.loop`.

Nothing here reads settings; `toolkit.run.session` passes in what it built.
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
from toolkit.run.parts import Extra, OptimizerPart, Parts, TrainingData
from toolkit.run.plan import Plan
from toolkit.run.recovery import RunGuard
from toolkit.run.saving import Checkpoints
from toolkit.run.validation import Validation
from toolkit.run.window import TrainingWindow
from toolkit.step.ema import Ema
from toolkit.step.loop_check import LoopCheck
from toolkit.step.losses import LossWeights
from toolkit.step.meters import Meters


@dataclass
class Training:
    """The objects of one run.

    Attributes:
        model, detector: what Accelerate prepared, and the same weights without wrappers.
        plan: length, accumulation and learning rates.
        signals: signals that end the run early.
        max_norm: norm that gradients are clipped to; 0: they stay.
        step: optimizer steps made so far.
        extra: state that the script adds, see `toolkit.run.parts`.
        check: tells what the body of the loop has left out.
        window: the window under way, what follows its update included; None: between two.
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
        """The settings that end training at this step, see `toolkit.run.status.ENDINGS`; empty while it goes on."""
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
        """Everything that has state of its own and lives along the run, by its name in a checkpoint."""
        parts = Parts(model=self.detector, loss_weights=self.loss_weights)
        if self.ema.is_on:
            parts["ema"] = self.ema
        parts["optimizer"] = OptimizerPart(self.optimizer)
        parts["extra"] = self.extra
        if self.accelerator.scaler is not None:
            parts["scaler"] = self.accelerator.scaler
        parts["data"] = self.data
        parts["sampler"] = self.sampler
        parts["weight_facts"] = self.checkpoints.weight_facts
        parts["plan"] = self.plan
        parts["guard"] = self.guard
        parts["log"] = self.log
        parts["best"] = self.validation.best
        return parts

    @property
    def sampler(self) -> EpochSampler:
        """The place in the data."""
        return self.plan.sampler

    @property
    def seed(self) -> int:
        """The seed of everything that is drawn."""
        return self.sampler.seed

    @property
    def meters(self) -> Meters:
        """The smoothed values of the console."""
        return self.log.meters

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        """Every parameter that the optimizer holds."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    # ---- what a script says before the loop --------------------------------------------------------------------------

    def announce(self, name: str, weight: float | Sequence[Sequence[float]], divided_by: str | None) -> None:
        """Announce a loss of the script's own, which it puts into `losses` beside those of the criterion.

        weight: a number, or [[step, value], ...]. divided_by: what the script's value is the mean over in its
        micro-batch, "images" or "boxes": it then counts as it would in one batch of the whole window and all ranks;
        None: the script has divided by one of `window.denominators` itself.

        Raises BadInput: the name is taken, or the weight is not one.
        """
        if divided_by not in ("images", "boxes", None):
            raise BadInput(f't.announce("{name}"): divided_by is {divided_by!r}; expected "images", "boxes" or None')
        self.loss_weights.add(name, weight, divided_by)

    def without(self, *names: str) -> None:
        """Leave these calls out of the loop on purpose, by the names of `toolkit.step.loop_check.LOOP_LINES`."""
        self.check.leave_out(names)

    # ---- around the body of the loop ---------------------------------------------------------------------------------

    def windows(self) -> Iterator[TrainingWindow]:
        """Yield the windows of what is left of the epoch, or of the run; the last one of the run ends them.

        Before the body of the loop: gradients are zeroed, the place in the data moves behind the window, buffers are
        copied for the guard, and whatever is drawn becomes a function of (seed, step, rank). After it: the loop is
        checked; the rows are written, the next learning rates set, and what is due is saved and evaluated.

        Raises:
            BadInput: the body left out what belongs to an update, or did it twice; rows cannot be written any more,
                and the state is saved.
            Preempted: a signal came on some rank; the state is saved.
            StoppedByGuard: the last update left what is not finite; the newest finite state is saved.
        """
        return loop.windows_of_epoch(self)

    def end_window(self) -> None:
        """Follow up on the body of the loop, as `windows` does when it is asked for the next one."""
        loop.end_window(self)

    def end_epoch(self) -> dict[str, float]:
        """Return the averages of the epoch, by the names of a row without `train/`; go on to the next if it is over."""
        return loop.end_epoch(self)

    def set_rates(self) -> None:
        """Set learning rates and momentum of batch norms for the next update: functions of the step."""
        self.plan.set_rates(self.step, self.detector)
