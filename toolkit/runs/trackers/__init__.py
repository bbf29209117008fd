"""Experiment trackers: W&B, TensorBoard, and others that Accelerate supports, one file each.

They get plain values from `toolkit.runs.writer`, which also catches their exceptions. A new one is a subclass of
`Tracker` and a line in `OWN`.
"""

import os
from collections.abc import Sequence
from importlib import import_module

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from toolkit.errors import BadInput
from toolkit.runs.trackers.tracker import Tracker

OWN = {"wandb": "weights_and_biases:WandbTracker", "tensorboard": "event_file:TensorBoardTracker"}


def tracker_names(asked: str | Sequence[str]) -> list[str]:
    """The names in `--run.tracker`, each once, "none" left out.

    Raises:
        BadInput: one that is not known, or not installed; lists those that are.
    """
    names = [name for name in dict.fromkeys([asked] if isinstance(asked, str) else asked) if name != "none"]
    available = sorted({str(name) for name in get_available_trackers()})
    problems = [
        f"--run.tracker {name}: {'its package is not installed' if name in LOGGER_TYPE_TO_CLASS else 'no such tracker'}"
        f". Installed are: {', '.join(['none', *available])}."
        for name in names
        if name not in available
    ]
    if problems:
        raise BadInput(problems)
    return names


def agent_run_id() -> str | None:
    """The run id that `wandb agent` gave to this trial of a sweep; None where no agent started this process."""
    return os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None


def make_tracker(name: str) -> Tracker:
    """The tracker of that name, not started yet."""
    file, _, kind = OWN.get(name, "of_accelerate:AccelerateTracker").partition(":")
    return getattr(import_module(f"{__name__}.{file}"), kind)(name)
