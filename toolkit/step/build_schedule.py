"""The schedule of a run, by its settings."""

from typing import Any

from torch.optim import Optimizer

from toolkit.step.length import steps_from
from toolkit.step.plateau import PlateauSchedule
from toolkit.step.schedules import Schedule


def schedule_of_settings(c: Any, optimizer: Optimizer, total_steps: int, per_epoch: int) -> Schedule | PlateauSchedule:
    """The schedule that settings with the names of `toolkit.runs.settings.ScheduleConfig` say.

    total_steps: length of the run. per_epoch: optimizer steps of an epoch, for what is given in epochs.
    """
    warmup_steps = steps_from(c.warmup_steps, per_epoch)
    if c.name == "plateau":
        return PlateauSchedule(
            optimizer, gamma=c.gamma, patience=c.plateau_patience, threshold=c.plateau_threshold,
            cooldown=c.plateau_cooldown, max_decays=c.max_decays, warmup_steps=warmup_steps,
            warmup_start=c.warmup_factor, warmup_method=c.warmup_method,
        )  # fmt: skip
    return Schedule(
        optimizer, c.name, total_steps, warmup_steps=warmup_steps, warmup_factor=c.warmup_factor, gamma=c.gamma,
        power=c.power, milestones=[steps_from(milestone, per_epoch) for milestone in c.milestones],
        step_size=steps_from(c.step_size, per_epoch), final_factor=c.final_factor, stairs=c.stairs, cycles=c.cycles,
        last_cycle=c.last_cycle, warmup_method=c.warmup_method, every=per_epoch if c.per == "epoch" else 1,
    )  # fmt: skip
