"""The plan of a run: its number of steps, its learning rates, and their adaptation to a changed batch size."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from toolkit.data.sampling import EpochSampler, epochs_after, steps_ahead
from toolkit.models.detector import Detector
from toolkit.step.freezing import bn_momentum, set_bn_momentum
from toolkit.step.schedules import PlateauSchedule, Schedule

_REMEDY = """Set them before
every update (docs/change_the_loop.md, recipe 12), or change group["initial_lr"], which stays"""
OWN_RATES = f"warning: the learning rates that the loop set for an update were gone at the next two. {_REMEDY}"
LATE_RATES = f"warning: the learning rates that the loop set after an update are gone at the next one. {_REMEDY}"

# A plan of the second half of the minutes is corrected at once if it would miss its end by more than this share of the
# time that is left, at the speed of at least so many steps.
MAX_MISSED_SHARE = 0.25
MIN_MEASURED_STEPS = 10
MIN_TOLD_CHANGE = 0.01  # of the length, as a share; the console line has each length with the step anyway


class StepBudget:
    """Plans a number of steps that fits into a number of minutes, and keeps to the minutes if the speed changes.

    The first plan is made from the speed of the first steps. It is corrected each time the number of steps has doubled
    since the last plan, until half of the minutes have passed. The plan made then is the ceiling: no later plan is
    longer, so that what has to be known in advance can rest on it. From there on, the plan is corrected

    - each time half of the time that was left at the last plan has passed, and at the end of a plan;
    - at once if, at the speed since the last plan, its end would be missed by a quarter of the time that is left.

    When the minutes are used up, training ends with that step. So it takes the minutes and one step at most.

    In this way everything that depends on the length of training is a function of the steps and their seconds. Every
    rank must make the same calls, with seconds that are reduced over the ranks:

        budget.add(step_s)                                      # seconds of training only
        if (total_steps := budget.propose()) is not None:
            budget.fix(total_steps)

    Args:
        max_minutes: minutes of training.
        skip_steps: number of first steps whose speed is not measured (compilation, caches); their time is counted.
        measure_steps: number of steps that the first plan measures; fewer if a fifth of the minutes is used before. The
            slowest tenth and the fastest tenth are left out of the mean, so that one slow step does not count. A
            correction uses the mean of all steps since the previous plan except the slowest, and so forgets a slow
            start, and a single stall.

    Attributes:
        total_steps: number of steps of the newest plan; None: there is none yet.
        settled: whether half of the minutes have passed, so that the ceiling is known.
        ceiling_steps: the ceiling; None: it is not known yet.
        settled_steps: the step at which the ceiling became known.
    """

    _STATE = (
        "max_minutes total_steps steps elapsed_s measured_s slowest_s planned_steps planned_s begun_steps begun_s "
        "settled ceiling_steps settled_steps"
    ).split()

    def __init__(self, max_minutes: float, skip_steps: int = 3, measure_steps: int = 20):
        self.max_minutes = max_minutes
        self.skip_steps = skip_steps
        self.measure_steps = measure_steps
        self.total_steps: int | None = None
        self.steps = 0
        self.elapsed_s = 0.0
        self.measured_s: list[float] = []  # before the first plan
        # Steps and seconds at the newest plan, and the seconds of the slowest step since.
        self.planned_steps = 0
        self.planned_s = 0.0
        self.slowest_s = 0.0
        # Steps and seconds of a run that ended before and is now extended.
        self.begun_steps = 0
        self.begun_s = 0.0
        self.settled = False
        self.ceiling_steps: int | None = None
        self.settled_steps = 0

    def add(self, step_s: float) -> None:
        """Count a step that took `step_s` seconds."""
        self.steps += 1
        self.elapsed_s += step_s
        self.slowest_s = max(self.slowest_s, step_s)
        if self.steps - self.begun_steps > self.skip_steps and self.total_steps is None:
            self.measured_s.append(step_s)

    def propose(self) -> int | None:
        """Return the number of steps of the whole run that fit into the minutes; None if no new plan is due."""
        if self.total_steps is None:
            step_s = self._first_speed()
            return None if step_s is None else self._steps_at(step_s)
        if self.steps == self.planned_steps:
            return None
        step_s = self._speed()
        if not self.settled:
            has_doubled = self.steps - self.begun_steps >= 2 * (self.planned_steps - self.begun_steps)
            return self._steps_at(step_s) if has_doubled or self._used >= 0.5 else None
        if self.is_used_up:
            return self.steps
        return min(self._steps_at(step_s), self.ceiling_steps) if self._is_correction_due(step_s) else None

    @property
    def seconds_left(self) -> float:
        """Seconds that are left of the minutes."""
        return max(0.0, 60.0 * self.max_minutes - self.elapsed_s)

    @property
    def is_used_up(self) -> bool:
        """Whether the minutes are used up."""
        return self.seconds_left <= 0

    @property
    def _used(self) -> float:
        """The used share of the minutes; the time of an earlier run that this one extends is left out of both."""
        budget_s = 60.0 * self.max_minutes - self.begun_s
        return (self.elapsed_s - self.begun_s) / budget_s if budget_s > 0 else math.inf

    def _steps_at(self, step_s: float) -> int:
        """Return the number of steps of the whole run if each further one takes `step_s` seconds."""
        return self.steps + int(self.seconds_left / step_s)

    def _first_speed(self) -> float | None:
        """Return the seconds of a typical step; None while there are too few measurements."""
        measured = len(self.measured_s)
        if measured < 1:
            return math.inf if self.is_used_up else None
        if measured < self.measure_steps and self._used < 0.2:
            return None
        outside = -(-measured // 10) if measured > 2 else 0
        typical = sorted(self.measured_s)[outside : measured - outside]
        return sum(typical) / len(typical)

    def _speed(self) -> float:
        """Return the mean seconds of the steps since the newest plan; the slowest is left out if it is not alone."""
        steps = self.steps - self.planned_steps
        since_s = self.elapsed_s - self.planned_s
        return since_s if steps == 1 else (since_s - self.slowest_s) / (steps - 1)

    def _is_correction_due(self, step_s: float) -> bool:
        """Return whether the settled plan is to be corrected. step_s: result of `_speed`."""
        steps = self.steps - self.planned_steps
        since_s = self.elapsed_s - self.planned_s
        if since_s >= self.seconds_left or self.steps >= self.total_steps:
            return True
        surplus_s = self.seconds_left - (self.total_steps - self.steps) * step_s
        can_follow = surplus_s < 0 or self.total_steps < self.ceiling_steps
        return can_follow and steps >= MIN_MEASURED_STEPS and abs(surplus_s) > MAX_MISSED_SHARE * self.seconds_left

    def fix(self, total_steps: int) -> None:
        """Make `total_steps` the plan; the first one made when half of the minutes have passed is the ceiling."""
        self.total_steps = total_steps
        self.measured_s = []
        self._measure_anew()
        if not self.settled and self._used >= 0.5:
            self._settle()

    def settle(self, total_steps: int) -> None:
        """Make `total_steps` plan and ceiling; the speed of the steps before does not count any more."""
        self.total_steps = total_steps
        self._measure_anew()
        self._settle()

    def _settle(self) -> None:
        if not self.settled:
            self.settled_steps = self.steps
        self.settled = True
        self.ceiling_steps = self.total_steps

    def _measure_anew(self) -> None:
        self.planned_steps = self.steps
        self.planned_s = self.elapsed_s
        self.slowest_s = 0.0

    def count_on(self, step: int) -> None:
        """Start a new plan for a run that goes on after `step` steps, which took `elapsed_s` seconds."""
        self.steps = self.begun_steps = self.planned_steps = step
        self.begun_s = self.planned_s = self.elapsed_s

    def state_dict(self) -> dict:
        return {name: copy.copy(getattr(self, name)) for name in self._STATE}

    def load_state_dict(self, state: Mapping) -> None:
        """Restore a saved budget. The minutes are the saved ones only if the ceiling, which rests on them, is known."""
        max_minutes = self.max_minutes
        for name in self._STATE:
            if name in state:
                setattr(self, name, copy.copy(state[name]))
        if not self.settled:
            self.max_minutes = max_minutes
        elif self.ceiling_steps is None:  # of a checkpoint whose plan could not change any more
            self.ceiling_steps = self.total_steps
            self.settled_steps = self.planned_steps


@dataclass
class Plan:
    """Length, accumulation and learning rates of a run, which depend on each other and on the place in the data.

    Methods that change the length return sentences for the console; an empty list if nothing has changed.

    Attributes:
        sampler: the place in the data.
        schedule: the learning rates.
        total_steps: optimizer steps of the whole run.
        limit: key of the setting that `total_steps` comes from, such as "run.epochs".
        budget: plans `total_steps` from `run.max_minutes`; None: the run is not limited to a number of minutes.
        accumulation_steps: micro-batches of an optimizer step.
        accumulate_after_epoch: the first epoch, counted from 0, that accumulates; a step before it has one micro-batch.
        steps_per_epoch: mean number of optimizer steps of an epoch.
        warmup_steps: optimizer steps of the warm-up.
        plain_epochs: number of last epochs without mixup and mosaic, see `MixedDataset.plan`.
        bn_momentum: batch norm momentum at the end of training, and the number of warm-up steps after which the
            momentum starts to change; None: it does not change.
        eval_only: nothing is trained, whatever `total_steps` is.
        recut: see `toolkit.run.console.Progress`.
        follows_checkpoint: whether a run that resumes takes over schedule and length of the checkpoint; otherwise it
            keeps those of this command (`run.resume_schedule`).
        settings: those that length and schedule follow from, see `schedule_settings`.
    """

    sampler: EpochSampler
    schedule: Schedule | PlateauSchedule
    total_steps: int
    limit: str = "run.epochs"
    budget: StepBudget | None = None
    accumulation_steps: int = 1
    accumulate_after_epoch: int = 0
    steps_per_epoch: int = 1
    warmup_steps: int = 0
    plain_epochs: float = 0.0
    bn_momentum: tuple[float, int] | None = None
    recut: int = 0
    eval_only: bool = False
    follows_checkpoint: bool = True
    settings: dict = field(default_factory=dict)

    kept_in_rollback = True  # the data go on after the window that broke

    def __post_init__(self):
        # The length without regard to the minutes, which can only shorten it.
        self._longest = self.total_steps
        self._limit_of_longest = self.limit
        self._reckoned_with = self.accumulation  # the accumulation that the length rests on
        self._told_steps = 0  # the last length that was told
        self._warned: set[str] = set()
        # Updates since the last one whose rates the script had set itself; None: there was none.
        self._steps_without_own_rates: int | None = None
        self._rates_of_update: list = []

    # ---- learning rates ----------------------------------------------------------------------------------------------

    def set_rates(self, step: int, detector: Detector) -> None:
        """Set learning rates, and batch norm momentum of the detector, for the update that follows `step` updates."""
        self.schedule.set(step)
        if self.bn_momentum is not None:
            final, warmup_steps = self.bn_momentum
            at = self.schedule.at(step)
            momentum = bn_momentum(at, self.schedule.at(self.total_steps), 0.1, final, warmup_steps)
            set_bn_momentum(detector, momentum)

    def note_own_rates(self) -> None:
        """Note whether the script has changed the learning rates since the schedule set them, for `check_own_rates`."""
        if self.schedule.is_overwritten:
            self._steps_without_own_rates = 0

    def note_update(self) -> None:
        """Note the learning rates of the update that has just been made, for `check_own_rates`."""
        self._rates_of_update = self._number_rates()

    def _number_rates(self) -> list:
        """Return the learning rates that are numbers; those that are tensors may lie on a device, and are not read."""
        rates = [group["lr"] for group in self.schedule.optimizer.param_groups]
        return [rate for rate in rates if not isinstance(rate, Tensor)]

    def check_own_rates(self) -> str:
        """Return a warning if the schedule has overwritten learning rates that the script set, else "".

        Call it after each update; each kind of warning is returned once.
        """
        if self._number_rates() != self._rates_of_update:
            return self._once("late rates", LATE_RATES)
        if self._steps_without_own_rates is not None:
            self._steps_without_own_rates += 1
        self.note_own_rates()
        # At a single update without them a schedule of the script's own may have met ours.
        return self._once("own rates", OWN_RATES) if self._steps_without_own_rates == 2 else ""

    @property
    def seconds_left(self) -> float:
        """Seconds left of `run.max_minutes`; infinity if the run is not limited to a number of minutes."""
        return math.inf if self.budget is None else self.budget.seconds_left

    @property
    def is_length_known(self) -> bool:
        """Whether `total_steps` is the length; False until the first steps show how many fit into `run.max_minutes`."""
        return self.budget is None or self.budget.total_steps is not None

    # ---- length ------------------------------------------------------------------------------------------------------

    def note_step(self, step: int, time_s: float) -> list[str]:
        """Count a step towards `run.max_minutes`, and set a new length if one is due.

        Args:
            step: optimizer steps made, this one included.
            time_s: seconds that the step took.
        """
        if self.budget is None:
            return []
        self.budget.add(time_s)
        planned = self.budget.propose()
        if planned is None:
            return []
        longest = max(step, self._longest - self.recut)
        if not self.budget.settled:
            planned = min(planned, longest)
        self.budget.fix(planned)
        self.limit = "run.max_minutes" if planned < longest else self._limit_of_longest
        return self.set_length(planned, step)

    def set_length(self, total_steps: int, step: int) -> list[str]:
        """Set the number of steps of the whole run, after `step` updates; the rest of the schedule adapts to it."""
        if total_steps == self.total_steps:
            return []
        self.total_steps = total_steps
        self.schedule.set_total(total_steps, step)
        if self._told_steps and abs(total_steps - self._told_steps) < MIN_TOLD_CHANGE * self._told_steps:
            return self.warnings_of_length()
        self._told_steps = total_steps
        reason = ", as many as fit into run.max_minutes" if self.limit == "run.max_minutes" else ""
        return [f"planned length: {total_steps} steps{reason}", *self.warnings_of_length()]

    def warnings_of_length(self) -> list[str]:
        """Return the warnings of `length_warnings` that were not returned before."""
        warnings = length_warnings(self.total_steps, self.warmup_steps, self.steps_per_epoch)
        return [text for text in (self._once(kind, warning) for kind, warning in warnings.items()) if text]

    def _once(self, kind: str, text: str) -> str:
        if kind in self._warned:
            return ""
        self._warned.add(kind)
        return text

    @property
    def ceiling_steps(self) -> int:
        """The number of steps that the length will not exceed, once it is known; the last epochs are counted by it."""
        is_known = self.budget is not None and self.budget.settled
        return self.budget.ceiling_steps if is_known else self.total_steps

    @property
    def epochs_are_fixed_at(self) -> int | None:
        """The step from which on `ceiling_steps` does not change; 0 if the run is not limited to a number of minutes;
        None while it may still change."""
        if self.budget is None:
            return 0
        return self.budget.settled_steps if self.budget.settled else None

    # ---- accumulation, and batches of another size -------------------------------------------------------------------

    @property
    def accumulation(self) -> tuple[int, int]:
        """Micro-batches of an optimizer step, and the first epoch, counted from 0, that accumulates this many."""
        return self.accumulation_steps, self.accumulate_after_epoch

    def take_up_accumulation(self, step: int) -> list[str]:
        """Adapt length and schedule after `step` updates, if the script has changed the accumulation."""
        if self.accumulation == self._reckoned_with:
            return []
        return self._retime(step, self.sampler.state_dict(), keep_schedule=True)

    def _retime(self, step: int, sampler_before: Mapping, keep_schedule: bool) -> list[str]:
        """Set length and schedule so that the run ends at the same place in the data as planned before.

        This is for a run whose optimizer steps now see another number of images, because of other batches or another
        accumulation.

        Args:
            step: optimizer steps made so far.
            sampler_before: state of the sampler with the previous batches.
            keep_schedule: True: adapt the present length and schedule; False: use those of this command.
        """
        sampler = self.sampler
        before = self._reckoned_with
        now = self.accumulation
        self._reckoned_with = now
        world_size = sampler_before["world_size"]
        batch_size = sampler_before["batch_size"]
        images_before = _images_of_a_step(world_size * batch_size, *before)
        images_now = _images_of_a_step(sampler.world_size * sampler.batch_size, *now)
        if images_before == images_now and (keep_schedule or not self.recut):
            return []
        length = self.total_steps
        cut_before = sampler.cut_as(world_size, batch_size)
        epochs = sampler.epoch + sampler.offset / sampler.num_samples
        epochs_begun = math.ceil(epochs)
        steps_until_here = sampler.steps_in(epochs_begun, *now) - steps_ahead(sampler, epochs_begun, *now)
        self.recut = round(steps_until_here) - step
        if not keep_schedule:  # this command's, as if the whole run had been cut like this
            self.schedule.clock = (step, step + self.recut, 1.0)
            self.total_steps = max(step, length - self.recut)
        elif length > step:
            end = epochs + epochs_after(cut_before, length, *before) - epochs_after(cut_before, step, *before)
            if abs(end - round(end)) * cut_before.steps_of_epoch(int(end), *before) < 0.5:
                end = round(end)
            self.total_steps = step + max(1, math.ceil(steps_ahead(sampler, end, *now) - 1e-6))
            if self.total_steps != length:
                self.schedule.stretch(step, (length - step) / (self.total_steps - step))
        if self.budget is not None and self.budget.total_steps is not None:
            self.budget.settle(self.total_steps)
        if self.total_steps == length:
            return []
        return [
            f"an optimizer step now has another number of images: the run ends after step {self.total_steps} instead "
            f"of {length}, at the same place in the data, and warm-up, milestones and shape of the schedule move with "
            "it. Learning rates stay as they were; other settings in steps (run.log_every, loss.weights, ...) count "
            "the new steps"
        ]

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """Return JSON values; the place in the data is not among them, but in the state of the sampler."""
        self.note_own_rates()
        return {
            "total_steps": self.total_steps,
            "limit": self.limit,
            "accumulation": list(self.accumulation),
            "recut": self.recut,
            "schedule": self.schedule.state_dict(),
            "budget": None if self.budget is None else self.budget.state_dict(),
            "without_own_rates": self._steps_without_own_rates,
            "settings": self.settings,
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Restore the plan of a checkpoint; `go_on` then adapts it to this start."""
        if self.follows_checkpoint:
            self._take_up_schedule(state)
        elif self.budget is not None and state["budget"] is not None:
            self.budget.elapsed_s = state["budget"]["elapsed_s"]
        self.recut = state["recut"]
        self._reckoned_with = tuple(state["accumulation"])
        own_rates = state.get("without_own_rates")
        if own_rates is not None:
            self._steps_without_own_rates = int(own_rates)

    def go_on(self, step: int, sampler_before: Mapping) -> list[str]:
        """Adapt the restored plan to the batches of this start, and return sentences for the console.

        Args:
            step: optimizer steps made at the checkpoint.
            sampler_before: state of the sampler in the checkpoint.
        """
        if self.budget is not None and not self.follows_checkpoint:
            self.budget.count_on(step)
            if self.budget.is_used_up:
                self.total_steps = step
                self.limit = "run.max_minutes"
        return self._retime(step, sampler_before, self.follows_checkpoint)

    def _take_up_schedule(self, state: Mapping) -> None:
        self.schedule.load_state_dict(state["schedule"])
        self.total_steps = state["total_steps"]
        self.limit = state["limit"]
        saved = state["budget"]
        if saved is None:
            self.budget = None  # the saved length does not depend on minutes
            return
        if self.budget is None and saved["settled"] and "max_minutes" in saved:
            self.budget = StepBudget(saved["max_minutes"])  # it is too late for this command to have none
        if self.budget is not None:
            self.budget.load_state_dict(saved)


def length_warnings(total_steps: int, warmup_steps: int, steps_per_epoch: int) -> dict[str, str]:
    """Return warnings about a run of `total_steps` optimizer steps by kind: "warm-up" if the warm-up takes all of it,
    "epoch" if it does not finish one epoch.
    """
    warnings = {}
    if total_steps <= warmup_steps:
        warnings["warm-up"] = (
            f"warning: all {total_steps} steps are warm-up (schedule.warmup_steps is {warmup_steps}): shorten it, or "
            "train longer"
        )
    if total_steps < steps_per_epoch:
        warnings["epoch"] = (
            f"warning: training ends after {total_steps} of the {steps_per_epoch} steps of an epoch, so some images "
            "are never seen: train longer"
        )
    return warnings


def _images_of_a_step(images: int, accumulation_steps: int, after_epoch: int) -> tuple[int, ...]:
    """Return the images of a full step; where accumulation begins later, also those before it, and its first epoch."""
    with_accumulation = images * accumulation_steps
    return (with_accumulation, images, after_epoch) if after_epoch else (with_accumulation,)
