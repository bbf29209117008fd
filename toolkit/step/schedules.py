"""Learning rate schedules as functions of the optimizer step.

`step` is the number of updates made so far. Update number `step` (from 0) uses factor(step); `total_steps` updates are
0 .. total_steps - 1. Nothing here counts calls, so 1 and 2 processes, accumulation and resuming give the same rates.
"""

import copy
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from toolkit.base.errors import BadInput

SCHEDULES = ("constant", "step", "multistep", "cosine", "poly", "linear", "exponential", "cyclic")


def warm_up(step: int, warmup_steps: int, warmup_factor: float = 0.1, warmup_method: str = "linear") -> float:
    """Return the warm-up factor of update number `step`.

    With "linear" the factor rises in a straight line from `warmup_factor` at step 0 to 1 at `warmup_steps`; with
    "constant" it is `warmup_factor` before `warmup_steps`, and 1 from there on.
    """
    if step >= warmup_steps:
        return 1.0
    risen = 0.0 if warmup_method == "constant" else step / warmup_steps
    return warmup_factor + (1.0 - warmup_factor) * risen


def lr_factor(
    step: int,
    name: str = "constant",
    *,
    total_steps: int | None = None,
    warmup_steps: int = 0,
    warmup_factor: float = 0.001,
    warmup_method: str = "linear",
    milestones: Sequence[int] = (),
    step_size: int = 0,
    gamma: float = 0.1,
    power: float = 0.9,
    final_factor: float = 0.0,
    stairs: int = 5,
    cycles: int = 10,
    last_cycle: str = "linear",
    every: int = 1,
    decayed: Sequence[float] = (0, 0.0),
) -> float:
    """Return the factor on the initial learning rate at a step.

    Args:
        name: constant: 1. step: gamma^(step // step_size). multistep: gamma^(milestones reached; the update at a
            milestone is the first with the lower rate). With p = (step - warmup_steps) / (total_steps - warmup_steps),
            from 0 to 1, and f = final_factor: cosine: f + (1 - f) (1 + cos(pi p)) / 2. linear: f + (1 - f) (1 - p).
            poly: f + (1 - f) (1 - p)^power. exponential: f^p, with f above 0. These four reach f at `total_steps`,
            after the last update, so the rate of the last update is not 0. Without `total_steps` (not known yet) they
            stay at p = 0. cyclic: see `cyclic_factor`.
        decayed: (a step, p at this step): p then goes to 1 in a straight line from there, and not from the end of the
            warm-up; ignored if the step is within the warm-up.
        warmup_steps, warmup_factor, warmup_method: see `warm_up`, by which the factor is multiplied; a linear one meets
            the schedule at `warmup_steps` without a jump.
        milestones, step_size: in steps, counted from step 0. A milestone may be inside the warm-up; it lowers the rate
            from its step on. A milestone that is given twice counts twice. Milestones after the cycles of "cyclic" do
            not count.
        every: steps from one change of the rate to the next, after the warm-up; for example those of an epoch.
    """
    warm = warm_up(step, warmup_steps, warmup_factor, warmup_method)
    if step >= warmup_steps and every > 1:
        step -= step % every
    if name == "constant":
        return warm
    if name == "step":
        return warm * gamma ** (step // step_size)
    if name == "multistep":
        return warm * gamma ** bisect_right(milestones, step)
    if name == "cyclic":
        decay = gamma ** bisect_right(milestones, min(step, cycles * stairs * step_size))
        if step < warmup_steps:
            return warm * decay / stairs
        return cyclic_factor(step, total_steps, step_size, decay, stairs, cycles, last_cycle, final_factor)
    done = decay_done(step, total_steps, warmup_steps, decayed)
    if name == "exponential":
        return warm * final_factor**done
    if name == "cosine":
        left = (1.0 + math.cos(math.pi * done)) / 2.0
    else:
        left = (1.0 - done) ** (power if name == "poly" else 1.0)
    return warm * (final_factor + (1.0 - final_factor) * left)


def decay_done(step: int, total_steps: int | None, warmup_steps: int, decayed: Sequence[float] = (0, 0.0)) -> float:
    """Return the completed share p of a decay at a step, from 0 to 1; the arguments are those of `lr_factor`."""
    if total_steps is None:
        return 0.0
    since, behind = decayed if decayed[0] > warmup_steps else (warmup_steps, 0.0)
    done = behind + (1.0 - behind) * (step - since) / max(1, total_steps - since)
    return min(max(done, 0.0), 1.0)


def cyclic_factor(
    step: int,
    total_steps: int | None,
    step_size: int,
    decay: float,
    stairs: int,
    cycles: int,
    last_cycle: str,
    final_factor: float,
) -> float:
    """Return the factor of warm restarts in stairs, then one long decay.

    The schedule is that of ESPNetv2 (Mehta et al., CVPR 2019, section 4.1). A cycle has `stairs` stairs of `step_size`
    steps each, with the factors 1 / stairs (the lowest), then 1, then 1 / stairs less at every further stair, all times
    `decay`. After `cycles` cycles the factor goes from the lowest one to `final_factor`, which it reaches at
    `total_steps`, on the curve `last_cycle`: "linear" or "cosine". Without `total_steps` the cycles go on.
    """
    stair = step // step_size
    lowest = decay / stairs
    cyclic_steps = cycles * stairs * step_size
    if step < cyclic_steps or total_steps is None:
        return lowest * ((stairs - stair) % stairs + 1)
    done = (step - cyclic_steps) / max(1, total_steps - cyclic_steps)
    done = min(done, 1.0)
    left = 1.0 - done
    if last_cycle == "cosine":
        left = (1.0 + math.cos(math.pi * done)) / 2.0
    return final_factor + (lowest - final_factor) * left


class GroupRates:
    """The base of `Schedule` and `PlateauSchedule`: rates that are a function of the step, written into the groups.

    A subclass defines the factors on the initial rates in `factors`, and the entries of a checkpoint in `_STATE`.

    Args:
        optimizer: the lr of its groups becomes their `initial_lr`, unless they have one already.

    Attributes:
        clock: (step, step of the schedule, pace): from `step` on, each step counts as `pace` steps of the schedule. A
            run that continues with another batch size needs more or fewer steps for the same data.
    """

    name = ""
    finished = False  # whether training ends here
    clock: tuple[float, float, float] = (0, 0, 1.0)
    _STATE: Sequence[str] = ()

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.scale = 1.0  # a further factor on all rates: that of the guard's rollbacks
        self._written: dict[int, float] = {}  # by the index of the group
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))

    def factors(self, step: int) -> tuple[float, ...]:
        """Return the factors on the initial rates for update number `step`, in their order."""
        raise NotImplementedError

    def at(self, step: int) -> float:
        """Return the step of the schedule after `step` updates: `step` itself, unless `stretch` was called."""
        since, origin, pace = self.clock
        if (since, pace) == (origin, 1.0):
            return step
        if step <= since:  # a rollback may go back before it
            pace = 1.0
        return round(origin + pace * (step - since), 6)

    def stretch(self, step: int, pace: float) -> None:
        """Stretch the schedule: from `step` on, each step counts as `pace` times what it counted before."""
        self.clock = (step, self.at(step), self.clock[2] * pace)

    def set(self, step: int) -> None:
        """Set the rates of update number `step`: call it before the update, or after it with step + 1."""
        factors = self.factors(self.at(step))
        for i, group in enumerate(self.optimizer.param_groups):
            lr = group["initial_lr"]
            for factor in factors:
                lr = lr * factor
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
                self._written[i] = lr

    @property
    def is_overwritten(self) -> bool:
        """Whether other code has changed the rates since they were set; rates that are tensors are not read."""
        groups = self.optimizer.param_groups
        return any(groups[i]["lr"] != lr for i, lr in self._written.items())

    def observe(self, metric: float | None) -> bool:
        """Ignore a validation result and return False: only the rates of a `PlateauSchedule` depend on results."""
        return False

    def set_total(self, total_steps: int, step: int = 0) -> None:
        """Ignore the length of training: only the rates of a `Schedule` depend on it."""

    def rates(self) -> dict[str, float]:
        """Return the current learning rate by group name."""
        rates = {}
        for i, group in enumerate(self.optimizer.param_groups):
            name = group.get("name", str(i))
            rates[name] = float(group["lr"])
        return rates

    def state_dict(self) -> dict:
        """Return a JSON-able state; the initial rates belong to the optimizer's own state (`group["initial_lr"]`)."""
        state = {key: copy.copy(getattr(self, key)) for key in self._STATE}
        state["clock"] = list(self.clock)
        return state

    def load_state_dict(self, state: Mapping) -> None:
        """Restore a saved schedule; its settings replace those that this object was made with, from the next `set` on.

        Raises BadInput: this is a `PlateauSchedule` and the state is that of a `Schedule`, or the other way round.
        """
        if ("name" in state) != ("name" in self._STATE):
            saved_name = state.get("name", "plateau")
            remedy = "resume with that one, or begin the new one with --run.resume_schedule new"
            raise BadInput(f"schedule.name is {self.name}, that of the checkpoint {saved_name}: {remedy}")
        for key in self._STATE:
            setattr(self, key, copy.copy(state[key]))
        self.clock = tuple(state["clock"])


class Schedule(GroupRates):
    """A schedule that writes lr = initial_lr * factor(step) into an optimizer's groups.

    Args:
        optimizer: see `GroupRates`.
        name, total_steps, options: see `lr_factor`. `total_steps` may be set later.

    Raises:
        BadInput: unknown name, invalid values; all of them at once.
    """

    _STATE = ("name", "total_steps", "scale", "options")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        name: str = "constant",
        total_steps: int | None = None,
        **options,
    ):
        _check_schedule(name, options)
        super().__init__(optimizer)
        self.name = name
        self.total_steps = total_steps
        self.options = options
        self.set(0)

    def factors(self, step: int) -> tuple[float, ...]:
        """Return one factor: that of the schedule times the scale."""
        factor = lr_factor(step, self.name, total_steps=self.total_steps, **self.options)
        return (self.scale * factor,)

    def set_total(self, total_steps: int, step: int = 0) -> None:
        """Set the number of training steps, or correct it after `step` updates.

        The rest of a decay that has begun is spread over the remaining steps, so that the rate does not jump. The rates
        change at the next `set`.
        """
        now = self.at(step)
        options = self.options
        warmup_steps = options.get("warmup_steps", 0)
        if self.total_steps is not None and now > warmup_steps:
            done = decay_done(now, self.total_steps, warmup_steps, options.get("decayed", (0, 0.0)))
            options["decayed"] = [now, done]
        self.total_steps = self.at(total_steps)


def _check_schedule(name: str, options: Mapping) -> None:
    problems = []
    if name not in SCHEDULES:
        problems.append(f"schedule.name is {name!r}; expected one of {', '.join(SCHEDULES)}")
    milestones = list(options.get("milestones", ()))
    if milestones != sorted(milestones):
        problems.append(f"schedule.milestones are {milestones}; expected increasing steps")
    if name == "multistep" and not milestones:
        problems.append("schedule.milestones is empty; multistep needs the steps at which the rate drops")
    if name in ("step", "cyclic") and options.get("step_size", 0) <= 0:
        problems.append(f"schedule.step_size is {options.get('step_size', 0)}; expected a positive number of steps")
    if name == "exponential" and options.get("final_factor", 0.0) <= 0:
        problems.append("schedule.final_factor is 0; exponential needs a number above 0 to end at")
    if options.get("warmup_steps", 0) < 0:
        problems.append(f"schedule.warmup_steps is {options['warmup_steps']}; expected 0 or more")
    if problems:
        raise BadInput(problems)


class PlateauSchedule(GroupRates):
    """A schedule of lr = initial_lr * warm-up(step) * gamma^decays, whose decays depend on the validation results.

    It is WarmupReduceLROnPlateau of Scene-Graph-Benchmark, except that the original's constructor counts a first
    validation result of 0, and this one counts none.

    Args:
        optimizer: see `GroupRates`.
        gamma: factor on the rate at each decay. patience: validations in a row without improvement before a decay.
            threshold: the amount by which an improvement must exceed the best result (absolute; larger is better).
        cooldown: validations after a decay, and at the start, that cannot count as bad.
        max_decays: number of decays after which training ends (`finished`).
        warmup_steps, warmup_start, warmup_method: see `warm_up`. A decay can happen during warm-up.

    Raises BadInput: patience or max_decays below 1, an unknown warm-up.
    """

    name = "plateau"
    _STATE = ("scale", "decays", "best", "bad", "cooling", "options")
    _DEFAULTS = {
        "gamma": 0.1,
        "patience": 2,
        "threshold": 1e-3,
        "cooldown": 0,
        "max_decays": 3,
        "warmup_steps": 500,
        "warmup_start": 0.1,
        "warmup_method": "linear",
    }

    def __init__(self, optimizer: torch.optim.Optimizer, **options):
        unknown = options.keys() - self._DEFAULTS
        if unknown:
            raise TypeError(f"PlateauSchedule has no {', '.join(unknown)}")
        options = {**self._DEFAULTS, **options}
        problems = []
        for name in ("patience", "max_decays"):
            if options[name] < 1:
                problems.append(f"schedule.{name} is {options[name]}; expected at least 1")
        method = options["warmup_method"]
        if method not in ("linear", "constant"):
            problems.append(f"schedule.warmup_method is {method!r}; expected linear or constant")
        if problems:
            raise BadInput(problems)
        super().__init__(optimizer)
        self.options = options
        self.decays = 0
        self.best = None
        self.bad = 0
        self.cooling = options["cooldown"]
        self.set(0)

    @property
    def finished(self) -> bool:
        """Whether the rate has been reduced `max_decays` times."""
        return self.decays >= self.options["max_decays"]

    def observe(self, metric: float | None) -> bool:
        """Record a validation result; return True if the rate is reduced because of it, from the next `set` on.

        None and NaN, which are undefined results, count as no improvement.
        """
        options = self.options
        defined = metric is not None and not math.isnan(metric)
        if defined and (self.best is None or metric > self.best + options["threshold"]):
            self.best = float(metric)
            self.bad = 0
        else:
            self.bad += 1
        if self.cooling > 0:
            self.cooling -= 1
            self.bad = 0
        if self.bad < options["patience"]:
            return False
        self.decays += 1
        self.bad = 0
        self.cooling = options["cooldown"]
        return True

    def factors(self, step: int) -> tuple[float, ...]:
        """Return the factors of the warm-up, of the decays so far, and the scale."""
        options = self.options
        warm = warm_up(
            step,
            options["warmup_steps"],
            options["warmup_start"],
            options["warmup_method"],
        )
        decayed = options["gamma"] ** self.decays
        return warm, decayed, self.scale


def schedule_of_settings(c: Any, optimizer: torch.optim.Optimizer, total_steps: int, per_epoch: int) -> GroupRates:
    """Build the schedule from settings with the names of `toolkit.run.settings.ScheduleConfig`.

    total_steps: length of the run. per_epoch: optimizer steps of an epoch, for values given in epochs.
    """
    warmup_steps = steps_from(c.warmup_steps, per_epoch)
    if c.name == "plateau":
        return PlateauSchedule(
            optimizer,
            gamma=c.gamma,
            warmup_steps=warmup_steps,
            warmup_method=c.warmup_method,
            warmup_start=c.warmup_factor,
            patience=c.plateau_patience,
            threshold=c.plateau_threshold,
            cooldown=c.plateau_cooldown,
            max_decays=c.max_decays,
        )
    return Schedule(
        optimizer,
        c.name,
        total_steps,
        every=per_epoch if c.per == "epoch" else 1,
        gamma=c.gamma,
        warmup_steps=warmup_steps,
        warmup_method=c.warmup_method,
        warmup_factor=c.warmup_factor,
        power=c.power,
        final_factor=c.final_factor,
        stairs=c.stairs,
        cycles=c.cycles,
        last_cycle=c.last_cycle,
        milestones=[steps_from(milestone, per_epoch) for milestone in c.milestones],
        step_size=steps_from(c.step_size, per_epoch),
    )


def steps_from(value: int | str, steps_per_epoch: int) -> int:
    """Convert 500, "500", "500 steps", "1 epoch" or "0.5 epochs" to optimizer steps (rounded up).

    Raises:
        BadInput: anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(steps?|epochs?)?\s*", str(value))
    if match is None or isinstance(value, bool):
        raise BadInput(f"{value!r} is not a time; expected optimizer steps (500) or epochs (\"2 epochs\")")
    number, unit = match.groups()
    if unit and unit.startswith("epoch"):
        return math.ceil(float(number) * steps_per_epoch)
    if "." in number:
        raise BadInput(f"{value!r} is not a whole number of optimizer steps")
    return int(number)


def is_time(step: int, every: int, last: int | None = None) -> bool:
    """Return whether an action that is taken once in `every` steps is due after `step` updates.

    It is also due at the step `last`; with `every` 0 it is due only then. It is never due at step 0.
    """
    return step > 0 and (step == last or every > 0 and step % every == 0)
