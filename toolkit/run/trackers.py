"""The facts of a run for experiment trackers, and the class of each tracker.

They get plain values from `toolkit.run.writer`, which also catches their exceptions. A new one is a subclass of
`Tracker` and a line in `toolkit.index.TRACKERS`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from toolkit import index
from toolkit.base.errors import BadInput
from toolkit.data.table import DetectionTable


@dataclass(frozen=True)
class About:
    """The facts about a run before its first step.

    config: the settings, nested. metric: the one for best, below `val/`, such as "bbox_AP".
    project, name, group, job_type, tags, notes: as `run.project` and the settings beside it.
    """

    project: str = "detection-toolkit"
    name: str = "run"
    config: Mapping = field(default_factory=dict)
    metric: str = "bbox_AP"
    group: str | None = None
    job_type: str = "train"
    tags: Sequence[str] = ()
    notes: str = ""


@dataclass(frozen=True)
class DataFacts:
    """A data set as far as a tracker notes it. fingerprint: hash of its rows and classes. uri: where its images are."""

    fingerprint: str
    uri: str
    images: int
    boxes: int
    classes: int


def data_facts(tables: Mapping[str, DetectionTable]) -> dict[str, DataFacts]:
    """By split, as the tables are."""
    found = {}
    for split, table in tables.items():
        uri = str(table.image_root or table.name)
        boxes = table.identity["boxes"]
        found[split] = DataFacts(table.fingerprint, uri, len(table), boxes, len(table.categories))
    return found


class Tracker:
    """One program that shows a run; the main process alone has one. What a method raises costs the tracker only.

    Attributes:
        run_id: that the program knows the run by; None where it knows none.
        floor: it has the steps up to this one and no others, whatever was noted; None: what was noted is true.
        notes: JSON values that it wants back when the run is resumed.
    """

    def __init__(self, name: str):
        self.name = name
        self.run_id: str | None = None
        self.floor: int | None = None
        self.notes: dict = {}

    def start(self, folder: Path, about: About, is_new: bool, was_closed: bool) -> None:
        """Begin, or goes on with `run_id` and `notes`. is_new: it has nothing of this run. was_closed: it got all."""
        raise NotImplementedError  # each tracker has its own

    def log(self, values: Mapping[str, float], step: int) -> None:
        """The numbers of a row."""
        raise NotImplementedError  # each tracker has its own

    def show(self, shown, step: int) -> None:
        """One evaluation, a `toolkit.tools.report.shown.Shown`."""

    def note_data(self, data: Mapping[str, DataFacts]) -> None:
        """The data by split, before the first step."""

    def keep_final(self, final: Path, facts: Mapping) -> None:
        """The finished detector. facts: its step, metric and value."""

    def close(self, state: str) -> None:
        """Everything was sent. state: "done", "preempted" or "failed"."""


def flat(config: Mapping, prefix: str = "") -> dict:
    """Nested settings as {"optim.lr": 1e-4}; what is not a number or text becomes text, which every tracker takes."""
    found = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


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
    tracker = index.load(index.TRACKERS.get(name, index.OTHER_TRACKERS))
    return tracker(name)
