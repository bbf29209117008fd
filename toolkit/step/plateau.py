"""A learning rate that falls when validation stops improving, and training that ends after some such falls.

WarmupReduceLROnPlateau of Scene-Graph-Benchmark without its constructor, which counted a first validation of 0.
"""

import math

import torch

from toolkit.errors import BadInput
from toolkit.step.schedules import GroupRates, warm_up


class PlateauSchedule(GroupRates):
    """Writes lr = initial_lr * warm-up(step) * gamma^decays into an optimizer's groups; the validation decides.

    Args:
        optimizer: see `GroupRates`.
        gamma: factor of one decay. patience: validations in a row without improvement before it. threshold: what a
            result must exceed the best one by (absolute; larger is better) to be an improvement.
        cooldown: validations after a decay, and at the start, that cannot count as bad.
        max_decays: `finished` after that many.
        warmup_steps, warmup_start, warmup_method: see `warm_up`. A decay can happen during warm-up.

    Raises BadInput: patience or max_decays below 1, an unknown warm-up.
    """

    name = "plateau"
    _STATE = ("scale", "decays", "best", "bad", "cooling", "options")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gamma: float = 0.1,
        patience: int = 2,
        threshold: float = 1e-3,
        cooldown: int = 0,
        max_decays: int = 3,
        warmup_steps: int = 500,
        warmup_start: float = 0.1,
        warmup_method: str = "linear",
    ):
        problems = [
            f"schedule.{name} is {value}; expected at least 1"
            for name, value in (("patience", patience), ("max_decays", max_decays))
            if value < 1
        ]
        if warmup_method not in ("linear", "constant"):
            problems.append(f"schedule.warmup_method is {warmup_method!r}; expected linear or constant")
        if problems:
            raise BadInput(problems)
        super().__init__(optimizer)
        self.options = {"gamma": gamma, "patience": patience, "threshold": threshold, "cooldown": cooldown}
        self.options |= {"max_decays": max_decays, "warmup_steps": warmup_steps}
        self.options |= {"warmup_start": warmup_start, "warmup_method": warmup_method}
        self.decays, self.best, self.bad, self.cooling = 0, None, 0, cooldown
        self.set(0)

    @property
    def finished(self) -> bool:
        """Has the rate fallen `max_decays` times?"""
        return self.decays >= self.options["max_decays"]

    def observe(self, metric: float | None) -> bool:
        """A validation result (NaN and None, undefined, are bad ones); True when the rate falls for it.

        The new rate is in force from the next `set` on.
        """
        options = self.options
        defined = metric is not None and not math.isnan(metric)
        if defined and (self.best is None or metric > self.best + options["threshold"]):
            self.best, self.bad = float(metric), 0
        else:
            self.bad += 1
        if self.cooling > 0:
            self.cooling, self.bad = self.cooling - 1, 0
        if self.bad < options["patience"]:
            return False
        self.decays, self.bad, self.cooling = self.decays + 1, 0, options["cooldown"]
        return True

    def factors(self, step: int) -> tuple[float, ...]:
        """Those of the warm-up, the decays so far and the scale."""
        options = self.options
        warm = warm_up(step, options["warmup_steps"], options["warmup_start"], options["warmup_method"])
        return warm, options["gamma"] ** self.decays, self.scale
