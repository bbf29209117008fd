"""The objects of one training run, and what belongs around each step of it; the loop itself is in each script.

Nothing here reads settings; `toolkit.run.session` passes in what it built.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from toolkit.base.batch import Batch
from toolkit.base.errors import BadInput, Preempted
from toolkit.base.signals import StopSignals
from toolkit.data.batches import Prefetcher, windows
from toolkit.data.dataset import MixedDataset
from toolkit.data.sampling import EpochSampler, accumulation_at
from toolkit.data.table import DetectionTable
from toolkit.models.detector import Detector
from toolkit.run.best import Best
from toolkit.run.log import Log, training_row
from toolkit.run.parts import OptimizerPart, Parts
from toolkit.run.plan import Plan
from toolkit.run.recovery import RunGuard, keep_start, ranks_apart, state_is_sound
from toolkit.run.saving import infinite_buffers, save
from toolkit.run.validation import Validation, save_and_evaluate
from toolkit.run.window import TrainingWindow
from toolkit.step.ema import Ema
from toolkit.step.extra import Extra
from toolkit.step.length import Pace, is_time
from toolkit.step.loop_check import LoopCheck
from toolkit.step.losses import LossWeights
from toolkit.step.meters import Meters


@dataclass
class Training:
    """The objects of one run. `model` is what Accelerate prepared, `detector` the same weights without wrappers.

    plan: length, accumulation and learning rates.
    extra: state that the script adds, see `toolkit.step.extra`.
    data: tables by what they are for, to know them again in a resumed run.
    distillation: see `toolkit.tools.distillation`.
    """

    accelerator: Accelerator
    model: nn.Module
    detector: Detector
    loss_weights: LossWeights
    optimizer: torch.optim.Optimizer
    plan: Plan
    guard: RunGuard
    loader: torch.utils.data.DataLoader
    validation: Validation
    signals: StopSignals
    folder: Path
    seed: int
    log: Log
    max_norm: float = 0.0
    best: Best = field(default_factory=Best)
    pace: Pace = field(default_factory=Pace)
    ema: Ema | None = None
    eval_only: bool = False
    step: int = 0
    saved_step: int = -1
    last_row: dict[str, float | None] = field(default_factory=dict)
    data: Mapping[str, DetectionTable] = field(default_factory=dict)
    distillation: nn.Module | None = None

    def __post_init__(self):
        if self.ema is None:
            self.ema = Ema(self.detector, 0.0)
        self.infinite = infinite_buffers(self.detector)
        self.trainable = {name for name, p in self.detector.named_parameters() if p.requires_grad}
        self.extra = Extra(self.accelerator)
        self.loss_weights.defers_unknown = True
        if self.distillation is not None:
            self.extra["distillation"] = self.distillation
            self.loss_weights.sources.append(self.distillation)
            self.loss_weights.divided_by.update(self.distillation.divided_by)
        self.guard.of_run(self)
        self.check = LoopCheck(self._counts)
        self.check.watch(self.optimizer, self._count_update)
        self.prefetcher = Prefetcher(self.accelerator.device)
        self.window: TrainingWindow | None = None  # the one under way, what follows its update included
        self.batches_under_way: Sequence[Batch] = ()  # while the body of the loop runs
        self._best_step = -1  # before the window
        self._versions: int | None = None  # of the parameters, after the last update
        self._warned: set[str] = set()

    # ---- where the run is --------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train."""
        return self.eval_only or bool(self.ended_by)

    @property
    def ended_by(self) -> list[str]:
        """The settings that end training at this step, see `toolkit.run.status.ENDINGS`; empty while it goes on."""
        limits = {
            self.plan.limit: self.step >= self.plan.total_steps,
            "eval.early_stopping_patience": self.best.patience_is_over,
            "schedule.max_decays": self.plan.schedule.finished,
        }
        return [setting for setting, is_reached in limits.items() if is_reached]

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
        parts["sampler"] = self.sampler
        parts["plan"] = self.plan
        parts["guard"] = self.guard
        parts["log"] = self.log
        parts["best"] = self.best
        return parts

    @property
    def sampler(self) -> EpochSampler:
        """The place in the data."""
        return self.plan.sampler

    @property
    def meters(self) -> Meters:
        """The smoothed values of the console."""
        return self.log.meters

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        """Every parameter that the optimizer holds."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def loss_names(self) -> list[str]:
        """Names that losses have in a row: the total, and every loss weighted and unscaled."""
        return ["loss", *(f"{name}{suffix}" for name in self.loss_weights.names for suffix in ("", "_unscaled"))]

    @property
    def epoch_is_over(self) -> bool:
        """Whether training has consumed the last micro-batch of the epoch."""
        return self.sampler.next_batch >= len(self.sampler)

    @property
    def weights_were_changed(self) -> bool:
        """Whether somebody has changed the weights since the last update."""
        return self._versions not in (None, self._count_versions())

    def _count_versions(self) -> int:
        """Sum the version counters of the weights, which count in-place changes."""
        return sum(parameter._version for parameter in self.detector.parameters())

    # ---- what a script adds to the loop, said once before it ---------------------------------------------------------

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
        """Leave these calls out of the loop on purpose, by the names of `toolkit.step.loop_check.LINES`."""
        self.check.leave_out(names)

    # ---- around each step --------------------------------------------------------------------------------------------

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
        self._prepare_epoch()
        micro_batches = accumulation_at(self.sampler.epoch, *self.plan.accumulation)
        batches_of_windows = self.prefetcher.through(windows(self.loader, micro_batches))
        with self.check.noting_others(lambda: [self.optimizer, *self.extra.optimizers]):
            for batches in batches_of_windows:
                self.log.timer.data_ready()
                yield self._begin_window(batches)
                self.end_window()
                if self.finished:
                    return
                self.log.timer.start()

    def _prepare_epoch(self) -> None:
        """Before the first window of an epoch, or of a resumed run."""
        self.end_window()  # where the script has left the loop over the windows
        plan = self.plan
        dataset = getattr(getattr(self.loader, "dataset", None), "dataset", None)
        if isinstance(dataset, MixedDataset) and dataset.has_plain_epochs:
            # said before the workers are asked for images of this epoch
            per_epoch = -(-len(self.sampler) // plan.accumulation_steps)
            dataset.plan(plan.plain_epochs, plan.total_steps + plan.recut, per_epoch, plan.epochs_are_fixed_at)
        for note in plan.take_up_accumulation(self.step):
            self.log.say(note)
        self.check.same_optimizer(self.optimizer)
        plan.note_own_rates()
        self.set_rates()
        keep_start(self)
        missing = self.extra.not_taken_up
        if missing:
            raise BadInput(f"the checkpoint holds {', '.join(missing)} in t.extra, which this script does not assign")
        if self.guard.policy == "rollback" and self.saved_step < 0:
            save(self)  # something to roll back to
        self.log.timer.start()

    def _begin_window(self, batches: Sequence[Batch]) -> TrainingWindow:
        self.sampler.advance_batches(len(batches))
        self.optimizer.zero_grad()
        self.extra.zero_grad()
        self.check.same_optimizer(self.optimizer)
        self.guard.snapshot(self.detector)
        self._best_step = self.best.step
        self.window = TrainingWindow(self, batches)
        self.window.seed_what_is_outside()
        self.batches_under_way = self.window.batches
        self.check.begin(self.step, len(batches))
        return self.window

    def end_window(self) -> None:
        """Follow up on the body of the loop, see `windows`; nothing is done twice."""
        window = self.window
        self.batches_under_way = ()
        if window is None:
            return
        if not self.check.was_refused:
            self._follow_up(window)
        self.window = None

    def _follow_up(self, window: TrainingWindow) -> None:
        if not self.check.end():
            if window.is_unscaled and self.accelerator.scaler is not None:
                # As it is: forgets that it has unscaled, which it does once per update.
                self.accelerator.scaler.update(self.accelerator.scaler.get_scale())
            self._warn_once("passed over", "the loop passed over a window without an update; the data go on behind it")
            return
        if self.step == window.step:  # the script updates the weights by itself, `t.without("update")`
            self._count_update()
        self._note_step(window)
        self.save_and_evaluate_when_due(window.totals["signal"])

    def _count_update(self) -> None:
        """After each update of the optimizer inside a window."""
        self.step += 1
        self.plan.note_update()

    def _counts(self) -> dict[str, int]:
        """The calls that the run's objects have counted, for `LoopCheck`."""
        counts = {"meters": self.meters.updates}
        if self.ema.is_on:
            counts["ema"] = self.ema.updates
        return counts

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self.log.say(f"step {self.step}: {text}")

    def counts_of(self, batch: Batch) -> dict[str, float]:
        """Count what the losses of a micro-batch are divided by; "own images", "own boxes": those of the script."""
        numbers = {"images": len(batch), "boxes": sum(len(target["labels"]) for target in batch.targets)}
        own = {f"own {kind}": numbers[kind] for kind in {*self.loss_weights.divided_by.values()}}
        return self.detector.denominators(batch.targets) | own

    def set_rates(self) -> None:
        """Set learning rates and momentum of batch norms for the next update: functions of the step."""
        self.plan.set_rates(self.step, self.detector)

    def _note_step(self, window: TrainingWindow) -> None:
        """After an update: rows, the bar, the budget of minutes; then the rates of the next update."""
        seen = self.sampler.next_batch  # the window included
        images = sum(self.sampler.samples_in_batch(i) for i in range(seen - window.batches_taken, seen))
        noted = self._noted(window)
        row = training_row(window.reduced, window.totals, self.optimizer.param_groups, noted)
        epoch = self.sampler.epoch
        total_steps = self.plan.total_steps
        self.log.log_step(self.step, total_steps, epoch, row, images, noted, ends_epoch=self.epoch_is_over)
        notes = self.plan.note_step(self.step, window.totals["time_s"])
        if notes:
            self.log.set_total_steps(self.plan.total_steps, notes)
        if self.epoch_is_over or self.step >= self.plan.total_steps:
            self.log.log_epoch(self.step, epoch)
        warning = self.plan.check_own_rates()
        if warning:
            self.log.say(f"step {self.step}: {warning}")
        self.set_rates()

    def _noted(self, window: TrainingWindow) -> dict[str, float]:
        """Return the means of what the script noted by `t.log.note`, over all ranks."""
        somebody_noted = window.totals["notes"] > 0
        if not somebody_noted and not (self.log.notes and self.accelerator.num_processes == 1):
            return {}
        noted = self.log.reduce_notes()
        duplicates = sorted(noted.keys() & {*window.totals, *self.detector.metric_names})
        if duplicates:
            raise BadInput(f"t.log.note: {', '.join(duplicates)} is in the rows already; give another name")
        return noted

    def save_and_evaluate_when_due(self, signal: float) -> None:
        """Save and evaluate what is due after this step, in this order: no progress is lost in an evaluation."""
        evaluates = is_time(self.step, self.pace.eval_every)
        saves = is_time(self.step, self.pace.save_every)
        noted = self.best.step == self.step and self.best.step != self._best_step  # the loop has evaluated by itself
        if not (evaluates or saves or signal or noted or self.step >= self.plan.total_steps):
            return
        self.optimizer.zero_grad()  # their memory is the evaluation's
        if state_is_sound(self):
            warning = ranks_apart(self)
            if warning:
                self._warn_once("ranks", warning)
            if evaluates:
                save_and_evaluate(self, is_best=noted)
            elif noted or signal or saves:
                save(self, best=noted)
        self.log.raise_write_error()
        if signal:
            name = self.signals.name or "signal"
            raise Preempted(f"{name} at step {self.step}; saved, `--run.resume latest` goes on")

    def end_epoch(self) -> dict[str, float]:
        """Return the averages of the epoch, by the names of a row without `train/`; go on to the next if it is over."""
        self.end_window()  # where the script has left the loop over the windows
        self._versions = self._count_versions()
        if not self.epoch_is_over:  # the run is; what it has of the epoch stays in its state
            return self.log.averages.means()
        self.log.log_epoch(self.step, self.sampler.epoch)  # not yet, if the guard refused its last window
        self.sampler.set_epoch(self.sampler.epoch + 1)
        return self.log.end_epoch()
