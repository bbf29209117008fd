"""The tracker interface: what a tracker is told about a run, and when."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.data.table import DetectionTable


@dataclass(frozen=True)
class About:
    """What is known of a run before its first step.

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
    return {
        split: DataFacts(table.fingerprint, str(table.image_root or table.name), len(table),
                         int(table.num_boxes().sum()), len(table.categories))
        for split, table in tables.items()
    }  # fmt: skip


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
        """Begins, or goes on with `run_id` and `notes`. is_new: it has nothing of this run. was_closed: it got all."""
        raise NotImplementedError

    def log(self, values: Mapping[str, float], step: int) -> None:
        """The numbers of a row."""
        raise NotImplementedError

    def show(self, shown, step: int) -> None:
        """One evaluation, a `toolkit.evaluation.shown.Shown`."""

    def note_data(self, data: Mapping[str, DataFacts]) -> None:
        """The data by split, before the first step."""

    def keep_final(self, final: Path, facts: Mapping) -> None:
        """The finished detector. facts: its step, metric and value."""

    def close(self, state: str) -> None:
        """Everything was sent. state: "done", "preempted" or "failed"."""


def flat(config: Mapping, prefix: str = "") -> dict:
    """Nested settings as {"optim.lr": 1e-4}; what is no number or text becomes text, which every tracker takes."""
    found = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return found
