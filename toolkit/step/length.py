"""How long training is, and when something is due, in optimizer steps."""

import copy
import math
import re
from collections.abc import Mapping

from toolkit.errors import BadInput


class StepBudget:
    """A number of steps from a number of minutes, fixed once from the speed of the first steps.

    Everything that depends on the length of training is then a function of the step again. Every rank does

        budget.add(timer.step_done(images))                     # seconds of training only
        if budget.total_steps is None:
            budget.fix(broadcast_object(budget.propose()))      # rank 0's clock counts

    Args:
        max_minutes: of training.
        skip_steps: first steps that are no measure of the speed (compilation, caches); their time counts all the same.
        measure_steps: steps that the speed is measured on; fewer when they would take over a fifth of the minutes. A
            fifth of them, the slowest and the fastest, are left out of their mean: one hiccup is no speed.
    """

    _STATE = ("total_steps", "steps", "elapsed_s", "measured_s")

    def __init__(self, max_minutes: float, skip_steps: int = 3, measure_steps: int = 20):
        self.max_minutes, self.skip_steps, self.measure_steps = max_minutes, skip_steps, measure_steps
        self.total_steps: int | None = None
        self.steps, self.elapsed_s = 0, 0.0
        self.measured_s: list[float] = []

    def add(self, step_s: float) -> None:
        """One more step took `step_s` seconds."""
        self.steps += 1
        self.elapsed_s += step_s
        if self.steps > self.skip_steps:
            self.measured_s.append(step_s)

    def propose(self) -> int | None:
        """The number of steps that fit into the minutes, the ones made included; None while it is too early to say."""
        budget_s, measured = 60.0 * self.max_minutes, len(self.measured_s)
        spent = self.elapsed_s >= budget_s
        if measured < 1:
            return self.steps if spent else None
        if measured < self.measure_steps and self.elapsed_s < budget_s / 5:
            return None
        outside = -(-measured // 10) if measured > 2 else 0
        typical = sorted(self.measured_s)[outside : measured - outside]
        return self.steps + max(0, int((budget_s - self.elapsed_s) * len(typical) / sum(typical)))

    def fix(self, total_steps: int | None) -> None:
        """Takes what the ranks agreed on, once; None: not yet."""
        if self.total_steps is None and total_steps is not None:
            self.total_steps = total_steps

    def state_dict(self) -> dict:
        return {name: copy.copy(getattr(self, name)) for name in self._STATE}

    def load_state_dict(self, state: Mapping) -> None:
        for name in self._STATE:
            setattr(self, name, copy.copy(state[name]))


def steps_from(value: int | str, steps_per_epoch: int) -> int:
    """Optimizer steps of 500, "500", "500 steps", "1 epoch" or "0.5 epochs" (rounded up).

    Raises:
        BadInput: anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(steps?|epochs?)?\s*", str(value))
    if match is None or isinstance(value, bool):
        raise BadInput(f"{value!r} is no time; expected optimizer steps (500) or epochs (\"2 epochs\")")
    number, unit = match.groups()
    if unit and unit.startswith("epoch"):
        return math.ceil(float(number) * steps_per_epoch)
    if "." in number:
        raise BadInput(f"{value!r} is no whole number of optimizer steps")
    return int(number)


def is_time(step: int, every: int, last: int | None = None) -> bool:
    """Whether something done every `every` steps (0: only at the end) is due after `step` updates, or at the `last`."""
    return step > 0 and (step == last or every > 0 and step % every == 0)
