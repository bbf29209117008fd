"""The length of training, and the times of evaluations, checkpoints and updates, in optimizer steps."""

import copy
import math
import re
from collections.abc import Mapping

from toolkit.base.errors import BadInput


class StepBudget:
    """A number of steps planned from a number of minutes.

    The plan rests on the speed of the first steps. It is corrected each time the run has made twice as many steps, and
    for the last time when half of the minutes have passed.

    Everything that depends on the length of training is then a function of the step. Every rank makes the same calls
    with seconds that are reduced over the ranks:

        budget.add(step_s)                                      # seconds of training only
        if (total_steps := budget.propose()) is not None:
            budget.fix(total_steps)

    Args:
        max_minutes: of training.
        skip_steps: first steps that do not measure the speed (compilation, caches); their time counts nevertheless.
        measure_steps: steps of the first plan; fewer if they would take over a fifth of the minutes. A fifth of them,
            the slowest and the fastest, are left out of their mean, so that one slow step does not count. A correction
            uses all steps since the plan before it, and so forgets a slow start.
    """

    _STATE = "total_steps steps elapsed_s measured_s planned_steps planned_s begun_steps begun_s settled".split()

    def __init__(self, max_minutes: float, skip_steps: int = 3, measure_steps: int = 20):
        self.max_minutes = max_minutes
        self.skip_steps = skip_steps
        self.measure_steps = measure_steps
        self.total_steps: int | None = None
        self.steps = 0
        self.elapsed_s = 0.0
        self.measured_s: list[float] = []  # before the first plan
        # Steps and seconds at the newest plan.
        self.planned_steps = 0
        self.planned_s = 0.0
        # Steps and seconds of a run that ended before and is now extended.
        self.begun_steps = 0
        self.begun_s = 0.0
        self.settled = False  # whether the plan is final

    def add(self, step_s: float) -> None:
        """Add a step that took `step_s` seconds."""
        self.steps += 1
        self.elapsed_s += step_s
        if self.steps - self.begun_steps > self.skip_steps and self.total_steps is None:
            self.measured_s.append(step_s)

    def propose(self) -> int | None:
        """Return the number of steps that fit into the minutes, those made included; None while no plan is due."""
        if self.settled:
            return None
        if self.total_steps is None:
            step_s = self._first_speed()
        elif self._used >= 0.5 or self.steps - self.begun_steps >= 2 * (self.planned_steps - self.begun_steps):
            step_s = (self.elapsed_s - self.planned_s) / (self.steps - self.planned_steps)
        else:
            return None
        left_s = 60.0 * self.max_minutes - self.elapsed_s
        return None if step_s is None else self.steps + max(0, int(left_s / step_s))

    @property
    def is_used_up(self) -> bool:
        """Whether the minutes are used up."""
        return self.elapsed_s >= 60.0 * self.max_minutes

    @property
    def _used(self) -> float:
        """The used share of the minutes, without those of a run that is extended."""
        budget_s = 60.0 * self.max_minutes - self.begun_s
        return (self.elapsed_s - self.begun_s) / budget_s if budget_s > 0 else math.inf

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

    def fix(self, total_steps: int) -> None:
        """Adopt a plan; the one made in the second half of the minutes is final."""
        self.total_steps = total_steps
        self.measured_s = []
        self.planned_steps = self.steps
        self.planned_s = self.elapsed_s
        self.settled = self._used >= 0.5

    def count_on(self, step: int, earlier: Mapping | None) -> None:
        """Start a new plan after `step` steps; their seconds count if the state `earlier` has them."""
        self.steps = self.begun_steps = self.planned_steps = step
        self.elapsed_s = self.begun_s = self.planned_s = earlier["elapsed_s"] if earlier else 0.0

    def settle(self, total_steps: int) -> None:
        """Fix the length, which no longer depends on the minutes."""
        self.total_steps = total_steps
        self.settled = True

    def state_dict(self) -> dict:
        return {name: copy.copy(getattr(self, name)) for name in self._STATE}

    def load_state_dict(self, state: Mapping) -> None:
        for name in self._STATE:
            setattr(self, name, copy.copy(state[name]))


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
    """Return whether an action of every `every` steps (0: only at the end) is due after `step` updates.

    It is always due at the `last` step.
    """
    return step > 0 and (step == last or every > 0 and step % every == 0)
