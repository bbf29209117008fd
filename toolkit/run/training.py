"""The objects of one training run and the loop calls that all scripts share; the loop itself is in each script.

Nothing here reads settings; `toolkit.run.session` passes in what it built.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from toolkit.base.batch import Batch
from toolkit.base.distributed import OUTSIDE_MICRO_BATCHES, agree_max, seed_step
from toolkit.base.errors import BadInput, Preempted
from toolkit.base.seeding import seed_micro_batch
from toolkit.base.signals import StopSignals
from toolkit.data.batches import Prefetcher, windows
from toolkit.data.dataset import MixedDataset
from toolkit.data.sampling import EpochSampler, accumulation_at
from toolkit.data.table import DetectionTable
from toolkit.models.detector import Detector
from toolkit.run.best import Best
from toolkit.run.checkpoint import Checkpoint
from toolkit.run.log import Log, training_row
from toolkit.run.parts import OptimizerPart, Parts
from toolkit.run.plan import Plan
from toolkit.run.recovery import (
    broken_state,
    in_words,
    keep_start,
    ranks_apart,
    recover,
    state_in_parts,
    state_is_sound,
)
from toolkit.run.saving import infinite_buffers, save
from toolkit.run.validation import Validation, save_and_evaluate
from toolkit.step.ema import Ema
from toolkit.step.extra import Extra
from toolkit.step.gradients import gradient_norm, gradient_table, group_norms
from toolkit.step.guard import Action, NanGuard, boxes_finite, with_finite_boxes
from toolkit.step.length import Pace, is_time
from toolkit.step.loop_check import LoopCheck
from toolkit.step.losses import LossWeights, WeightedLosses, window_denominators
from toolkit.step.state import unusable_rate


@dataclass
class Training:
    """The objects of one run. `model` is what Accelerate prepared, `detector` the same weights without wrappers.

    plan: length, accumulation and learning rates.
    extra: state that the script adds, see `toolkit.step.extra`.
    """

    accelerator: Accelerator
    model: nn.Module
    detector: Detector
    weights: LossWeights
    optimizer: torch.optim.Optimizer
    plan: Plan
    guard: NanGuard
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
    data: Mapping[str, DetectionTable] = field(default_factory=dict)  # tables by what they are for, to know them again
    distillation: nn.Module | None = None  # see `toolkit.tools.distillation`
    start: Checkpoint | None = None  # what the run begins with, until a checkpoint stands

    def __post_init__(self):
        self.infinite = infinite_buffers(self.detector)
        self.guard.watch(self.detector)
        self.extra = Extra(self.accelerator)
        self.trainable = {name for name, p in self.detector.named_parameters() if p.requires_grad}
        self.check = LoopCheck(self._counts)
        self._own_losses: dict[str, str | None] = {}  # not of the criterion -> what they are divided by
        if self.distillation is not None:
            self.extra["distillation"] = self.distillation
            self._own_losses = dict(self.distillation.divided_by)
        self._micro: tuple[dict, Mapping] = {}, {}  # counts and denominators of the micro-batch under way
        self._unscaled = False
        self._best_step = -1  # before the window
        self._versions: int | None = None  # of the parameters, after the last update
        self._layout: list[str] = []
        self.check.watch(self.optimizer)
        self._broken, self._warned = [], set()
        self._ahead = Prefetcher(self.accelerator.device)
        self.state_parts = state_in_parts(self)
        self._sums: dict[str, Tensor] = {}
        self._boxes_finite = self._is_first_update = True  # of this start
        self._unknown: list[str] = []
        self._denominators: list[Mapping[str, Tensor]] = []
        self.under_way: tuple | None = None  # (window, denominators, reduced) until the next one begins, for a report

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
        parts = Parts(model=self.detector, loss_weights=self.weights)
        if self.ema is not None:
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
    def trained_parameters(self) -> list[nn.Parameter]:
        """Every parameter that the optimizer holds."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def loss_names(self) -> list[str]:
        """Names that losses have in a row: the total, and every loss weighted and unscaled."""
        return ["loss", *(f"{name}{suffix}" for name in self.weights.names for suffix in ("", "_unscaled"))]

    # ---- what a script adds to the loop, said once before it ---------------------------------------------------------

    def announce(self, name: str, weight: float | Sequence[Sequence[float]], divided_by: str | None) -> None:
        """A loss of the script's own, which it puts into `losses` beside those of the criterion.

        weight: a number, or [[step, value], ...]. divided_by: what the script's value is the mean over in its
        micro-batch, "images" or "boxes": it then counts as it would in one batch of the whole window and all ranks;
        None: the script has divided by one of `denominators` itself.

        Raises BadInput: the name is taken, or the weight is none.
        """
        if divided_by not in ("images", "boxes", None):
            raise BadInput(f't.announce("{name}"): divided_by is {divided_by!r}; expected "images", "boxes" or None')
        self.weights.add(name, weight)
        self._own_losses[name] = divided_by

    def without(self, *names: str) -> None:
        """These calls are left out of the loop on purpose, by the names of `toolkit.step.loop_check.LINES`."""
        self.check.leave_out(names)

    # ---- one step, in the order of the loop -------------------------------------------------------------------------

    def windows(self) -> Iterator[list[Batch]]:
        """The accumulation windows of what is left of the epoch, or of the run, each with the gradients of the last one
        forgotten and the position in the data behind it; the waiting is timed, evaluating and saving not.

        Raises BadInput: the body left out what belongs to an update, or did it twice.
        """
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
        if missing := self.extra.not_taken_up:
            raise BadInput(f"the checkpoint holds {', '.join(missing)} in t.extra, which this script does not assign")
        if self.guard.policy == "rollback" and self.saved_step < 0:
            save(self)  # something to roll back to
        self.log.timer.start()
        micro_batches = accumulation_at(self.sampler.epoch, *plan.accumulation)
        with self.check.noting_others(lambda: [self.optimizer, *self.extra.optimizers]):
            yield from self._checked(self._ahead.through(windows(self.loader, micro_batches)))

    def _checked(self, windows: Iterator[list[Batch]]) -> Iterator[list[Batch]]:
        """The same windows, each prepared before and looked at after the body of the loop; the last one of the run ends
        them."""
        for window in windows:
            self.log.timer.data_ready()
            self.sampler.advance_batches(len(window))
            self.optimizer.zero_grad()
            self.extra.zero_grad()
            self.check.same_optimizer(self.optimizer)
            self._unscaled = False
            self._best_step = self.best.step
            self.seed_window()
            self.check.begin(len(window))
            yield window
            self._end_window()
            if self.finished:
                return
            self.log.timer.start()

    def _end_window(self) -> None:
        self.under_way = None
        if not self.check.end():
            if self._unscaled and (scaler := self.accelerator.scaler) is not None:
                scaler.update(scaler.get_scale())  # as it is: forgets that it has unscaled, once per update
            self._warn_once("passed over", "the loop passed over a window without an update; the data go on behind it")

    def _warn_once(self, kind: str, words: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self.log.say(f"step {self.step}: {words}")

    def _counts(self) -> dict[str, int]:
        """The calls that the run's objects have counted, for `LoopCheck`."""
        counts = {"snapshot": self.guard.snapshots, "step": self.step}
        return counts if self.ema is None else counts | {"ema": self.ema.updates}

    def micro_batches(self, window: Sequence[Batch]) -> Iterator[tuple[Batch, Mapping[str, Tensor]]]:
        """Each micro-batch on the device, with what its losses are divided by, its random numbers seeded.

        Gradients are averaged over the ranks once per window, in the backward of the last micro-batch.

        Raises BadInput: the detector is in evaluation mode.
        """
        self.check.begin_pass(self.detector.training, len(window))
        device, original = self.accelerator.device, self.detector.averaged_denominators
        counts = [self.detector.denominators(batch.targets) | self._own_counts(batch) for batch in window]
        self._denominators = window_denominators(counts, device, self.pace.denominators, original)
        self._sums, self._unknown = {}, []
        self._boxes_finite = boxes_finite(window)
        for micro, (batch, denominators) in enumerate(zip(window, self._denominators, strict=True)):
            arrived = self._ahead.arrived(batch)
            if not self._boxes_finite:
                arrived = with_finite_boxes(arrived)
            self.seed_micro_batch(micro, arrived)
            self._micro = counts[micro], denominators
            self.check.hand_out(arrived.targets)
            watched = nullcontext() if self.distillation is None else self.distillation.watching(arrived)
            with watched, nullcontext() if micro == len(window) - 1 else self.accelerator.no_sync(self.model):
                yield arrived, denominators

    def seed_window(self) -> None:
        """What the loop draws before its micro-batches becomes a function of (seed, step, rank) too."""
        seed_step(self.seed, self.step, self.accelerator.process_index, OUTSIDE_MICRO_BATCHES)

    def seed_micro_batch(self, micro: int, batch: Batch) -> None:
        """Random numbers become functions of numbers that are known after a resume, so that there is nothing to save:
        dropout and denoising noise of (seed, step, rank, micro-batch), samples of (seed, step, image id)."""
        seed_micro_batch(batch.targets, self.seed, self.step, self.accelerator.process_index, micro)

    def _own_counts(self, batch: Batch) -> dict[str, int]:
        """What the script's own losses are divided by, of one micro-batch."""
        number = {"images": len(batch), "boxes": sum(len(target["labels"]) for target in batch.targets)}
        return {f"own {kind}": number[kind] for kind in {*self._own_losses.values()} - {None}}

    def weigh(self, losses: Mapping[str, Tensor]) -> WeightedLosses:
        """Weighs the losses of one micro-batch; see `LossWeights` and `announce`.

        Raises BadInput: boxes of the micro-batch, or gradients of the one before, are gone.
        """
        self.check.before_backward()
        if self.distillation is not None:
            losses = {**losses, **self.distillation()}
        counts, denominators = self._micro
        divided = {
            name: losses[name] * (counts[f"own {kind}"] / denominators[f"own {kind}"])
            for name, kind in self._own_losses.items()
            if kind is not None and name in losses
        }
        return self.weights.weigh({**losses, **divided}, self.step, self.check.micro_batches)

    def add(self, weighted: WeightedLosses, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Adds one micro-batch to the window's sums."""
        entries = {"loss": weighted.total, **weighted.weighted}
        entries |= {f"{name}_unscaled": value for name, value in weighted.unweighted.items()}
        for name, (total, count) in metrics.items():
            entries |= {f"{name}/sum": total, f"{name}/count": count}
        for name, value in entries.items():
            value = value.detach() if isinstance(value, Tensor) else value
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._unknown += weighted.unknown
        self.check.done["add"] += 1

    def unscaled_gradient_norm(self) -> Tensor:
        """Total norm of the gradients of the whole window, without the loss scale; 0-dim, not read."""
        self.check.done["norm"] += 1
        self.weights.average_gradients()
        self.extra.average_gradients()
        self.accelerator.unscale_gradients()
        self._unscaled = True
        return gradient_norm(self.trained_parameters)

    def sums(self, grad_norm: Tensor) -> tuple[dict[str, Tensor | float], list[str], list[str]]:
        """What `reduce_dict` is to reduce: everything the step must know of every rank, under announced names."""
        values = self._sums | {"grad_norm": grad_norm, "buffers_finite": self.guard.buffers_finite()}
        values["boxes_finite"] = float(self._boxes_finite)
        values["state_finite"] = next(self.state_parts)  # as the last update left it
        values |= {"signal": self.signals.received or int(bool(self.log.trouble)), "time_s": self.log.timer.last_step_s}
        metrics = [f"{name}/{part}" for name in self.detector.metric_names for part in ("sum", "count")]
        if self.log.has_row(self.step + 1, self.plan.total_steps, ends_epoch=self.epoch_is_over):
            values |= group_norms(self.optimizer.param_groups)
        of_groups = [name for name in values if name.startswith("grad_norm")]
        values["notes"] = float(self.log.has_notes)
        flags = ["buffers_finite", "boxes_finite", "state_finite", "signal", "time_s"]
        self._layout = [*self.loss_names, *metrics, *of_groups, *flags]
        return values, [*self._layout, "notes"], self._unknown

    def accepts(self, window: Sequence[Batch], reduced: Mapping[str, float]) -> bool:
        """The guard's answer, the same on every rank; a refused window is reported and undone as its policy says.

        Raises:
            StoppedByGuard: the policy says so; the newest finite state is saved.
        """
        self.under_way = (window, self._denominators, reduced)
        self.check.done["accepts"] += 1
        action = self.decide(reduced)
        if action is not Action.STEP:
            recover(self, action, self._broken)
            return False
        every = self.pace.gradient_table_every
        if every and (self._is_first_update or is_time(self.step + 1, every)):
            self.log.say(gradient_table(self.detector.named_parameters(), self.max_norm, top=20))
        self._is_first_update = False
        return True

    def decide(self, reduced: Mapping[str, float]) -> Action:
        """The guard's answer to a window, from values that are equal on every rank."""
        scaler = self.accelerator.scaler
        losses = {name: reduced[name] for name in ("loss", *self.weights.names)}
        scale, norm = scaler.get_scale() if scaler is not None else None, reduced["grad_norm"]
        rate = unusable_rate(self.optimizer.param_groups)
        suspicious = not all(map(math.isfinite, (norm, *losses.values())))
        suspicious |= reduced["buffers_finite"] < 1.0 or reduced["state_finite"] < 1.0
        self._broken = broken_state(self, in_window=True) if suspicious else []
        faults = ([in_words(self._broken)] if self._broken else []) + ([rate] if rate else [])
        finite = not math.isfinite(norm) and all(map(math.isfinite, losses.values())) and self._gradients_finite()
        return self.guard.decide(
            self.step,
            losses,
            norm,
            scale,
            reduced["buffers_finite"],
            boxes_finite=reduced["boxes_finite"],
            gradients_finite=finite,
            faults=faults,
        )

    def _gradients_finite(self) -> bool:
        """Whether every entry is, on every rank: a norm can overflow all the same. A collective, and a host read."""
        finite = [p.grad.isfinite().all() for p in self.trained_parameters if p.grad is not None]
        return not agree_max(int(bool(finite) and not bool(torch.stack(finite).all())))

    def note_step(self, window: Sequence[Batch], reduced: Mapping[str, float]) -> None:
        """After an update: meters, rows, the bar, the budget of minutes; then the rates of the next update."""
        seen = self.sampler.next_batch  # the window included
        images = sum(self.sampler.samples_in_batch(i) for i in range(seen - len(window), seen))
        self.check.after_step("note_step")
        self.check.done["note_step"] += 1
        row, epoch = training_row(self, reduced) | self._own_values(reduced), self.sampler.epoch
        self.log.note_step(self.step, self.plan.total_steps, epoch, row, images, ends_epoch=self.epoch_is_over)
        notes = self.plan.note_step(self.step, reduced.get("time_s", 0.0))
        self.log.set_length(self.plan.total_steps, notes)
        if self.epoch_is_over or self.step >= self.plan.total_steps:
            self.log.note_epoch(self.step, epoch)
        warning = self.plan.check_own_rates()
        if warning:
            self.log.say(f"step {self.step}: {warning}")
        self.set_rates()

    def _own_values(self, reduced: Mapping[str, float]) -> dict[str, float]:
        """What the script noted (over all ranks) or put into `reduced` (of the main process)."""
        announced = {*self._layout, "notes"}
        values = {name: float(value) for name, value in reduced.items() if name not in announced}
        if reduced.get("notes") or self.log.notes and self.accelerator.num_processes == 1:
            values |= self.log.noted()
        if duplicates := values.keys() & {*self._layout, *self.detector.metric_names}:
            raise BadInput(f"t.log.note: {', '.join(sorted(duplicates))} is in the rows already; give another name")
        return {f"train/{name}": value for name, value in values.items()}

    def set_rates(self) -> None:
        """Learning rates and momentum of batch norms for the next update: functions of the step."""
        self.plan.set_rates(self.step, self.detector)

    def evaluate_and_save(self, signal: float) -> None:
        """Save and evaluate what is due after this step, in this order: no progress is lost in an evaluation.

        Raises:
            Preempted: a signal came on some rank; the state is saved.
            BadInput: rows cannot be written any more; the state is saved.
            StoppedByGuard: the last update left what is not finite; the newest finite state is saved.
        """
        self.check.after_step("evaluate_and_save")
        self.check.done["evaluate_and_save"] += 1
        evaluates, saves = (is_time(self.step, every) for every in (self.pace.eval_every, self.pace.save_every))
        noted = self.best.step == self.step and self.best.step != self._best_step  # the loop has evaluated by itself
        if not (evaluates or saves or signal or noted or self.step >= self.plan.total_steps):
            return
        self.optimizer.zero_grad()  # their memory is the evaluation's
        if state_is_sound(self):
            if words := ranks_apart(self):
                self._warn_once("ranks", words)
            if evaluates:
                save_and_evaluate(self, is_best=noted)
            elif noted or signal or saves:
                save(self, best=noted)
        self.log.raise_trouble()
        if signal:
            name = self.signals.name or "signal"
            raise Preempted(f"{name} at step {self.step}; saved, `--run.resume latest` goes on")

    @property
    def epoch_is_over(self) -> bool:
        """Whether training has consumed the last micro-batch of the epoch."""
        return self.sampler.next_batch >= len(self.sampler)

    def end_epoch(self) -> dict[str, float]:
        """The averages of the epoch, by the names of a row without `train/`; goes on to the next one if it is over."""
        self._end_window()
        self._versions = self._count_versions()
        if not self.epoch_is_over:  # the run is; what it has of the epoch stays in its state
            return self.log.averages.means()
        self.log.note_epoch(self.step, self.sampler.epoch)  # not yet, if the guard refused its last window
        self.sampler.set_epoch(self.sampler.epoch + 1)
        return self.log.end_epoch()

    def _count_versions(self) -> int:
        """Sums the version counters of the weights, which count in-place changes."""
        return sum(parameter._version for parameter in self.detector.parameters())

    @property
    def weights_were_changed(self) -> bool:
        return self._versions not in (None, self._count_versions())
