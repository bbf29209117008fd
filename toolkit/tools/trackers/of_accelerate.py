"""The tracker for programs that Accelerate supports, which get rows and settings; a resumed run keeps its name and id.
"""

import re
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from toolkit.base.files import distinct
from toolkit.run.writer import RunDescription, Tracker, flat


class AccelerateTracker(Tracker):
    """A tracker of Accelerate, which sends the numbers of rows and evaluations."""

    def start(self, folder: Path, about: RunDescription, is_new: bool, was_closed: bool) -> None:
        kind = LOGGER_TYPE_TO_CLASS[self.name]
        goes_on = self.run_id is not None
        place = {"logging_dir": str(folder)} if kind.requires_logging_directory else {}
        if self.name == "comet_ml" and not goes_on:
            self.run_id = uuid.uuid4().hex
        self._inner = kind(
            about.project,
            **place,
            **options(self.name, about, folder, self.run_id, goes_on),
        )
        self._inner.start()
        self.run_id = self.run_id or run_id(self.name, self._inner.tracker, about)
        _name_afterwards(self.name, self._inner.tracker, about, goes_on)
        if not (goes_on and self.name == "mlflow"):  # MLflow refuses changed values
            self._inner.store_init_configuration(flat(about.config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        names = mlflow_names(values) if self.name == "mlflow" else values
        self._inner.log(dict(zip(names, values.values(), strict=True)), step=step)

    def show(self, shown, step: int) -> None:
        if hasattr(self._inner, "log_images") and shown.grid is not None:
            grid = np.asarray(shown.grid)  # Aim takes one picture, the others a list of them
            self._inner.log_images(
                {"val/predictions": grid if self.name == "aim" else grid[None]},
                step=step,
            )

    def close(self, state: str) -> None:
        self._inner.finish()


def options(name: str, about: RunDescription, folder: Path, run_id: str | None, goes_on: bool) -> dict[str, Any]:
    """Return the keyword arguments by which a tracker gets the name, id, group, tags and notes of a run.

    Args:
        name: name of the tracker, such as "mlflow".
        about: facts about the run.
        folder: the run folder.
        run_id: id of the run in the tracker; None: the tracker chooses one.
        goes_on: whether the run exists in the tracker already.
    """
    tags = list(about.tags)
    notes = about.notes or None
    if name == "mlflow":
        marks = dict.fromkeys(tags, "") | ({"group": about.group} if about.group else {}) | {"job_type": about.job_type}
        return {"run_name": about.name, "run_id": run_id, "tags": marks, "description": notes}
    if name == "trackio":  # it identifies a run only by its name
        return {
            "name": run_id or about.name,
            "group": about.group,
            "resume": "allow" if goes_on else "never",
        }
    if name == "comet_ml":  # older releases make `Experiment`, which has no mode
        return {"experiment_key": run_id, "mode": "get_or_create" if goes_on else "create"}
    if name == "clearml":
        going_on = {"continue_last_task": run_id} if goes_on else {"reuse_last_task_id": False}
        return {
            "project_name": about.project,
            "task_name": about.name,
            "tags": tags or None,
            **going_on,
        }
    if name == "swanlab":
        going_on = {"id": run_id, "resume": "allow"} if goes_on else {}
        named = {"experiment_name": about.name, "group": about.group, "job_type": about.job_type}
        place = {"logdir": str(folder / "swanlog")}  # with the run, and not in the current folder
        return {**named, **place, "tags": tags or None, "description": notes, **going_on}
    if name == "aim":
        return {"run_hash": run_id, "experiment": about.project}
    if name == "dvclive":
        return {
            "dir": str(folder / "dvclive"),
            "exp_name": about.name,
            "exp_message": notes,
            "resume": goes_on,
        }
    return {}


def mlflow_names(names: Iterable[str]) -> list[str]:
    """Return the names of metrics, such as `val/AP/<class>`, with everything that MLflow refuses replaced by "_".

    MLflow accepts letters, digits, "_-. :" and slashes, but no path that is not normalised ("a//b", "a/../b", "a/").
    Names that become equal get a number.
    """
    return distinct(re.sub(r"[^/\w.\- :]|(?<=/)\.+(?=/|$)|(?<=/)/|/$", "_", name) for name in names)


def run_id(name: str, inner: Any, about: RunDescription) -> str | None:
    """Return the id by which a tracker finds the run again when it is resumed.

    Args:
        name: name of the tracker, such as "mlflow".
        inner: the tracker's own object, the attribute `tracker` of Accelerate's class.
        about: facts about the run.
    """
    if name == "mlflow":
        return inner.info.run_id
    if name == "aim":
        return inner.hash
    if name in ("clearml", "swanlab"):
        return inner.id
    return about.name  # Trackio and DVCLive use names and folders


def _name_afterwards(name: str, inner: Any, about: RunDescription, goes_on: bool) -> None:
    """Set the name and tags for trackers that take them from a run that has begun; tags only once."""
    tags = [] if goes_on else about.tags
    if name == "comet_ml":
        inner.set_name(about.name)
        inner.add_tags([*tags, *([about.group] if about.group and not goes_on else [])])
    elif name == "aim":  # Accelerate sets it to the project
        inner.name = about.name
        inner.description = about.notes
        for tag in tags:
            inner.add_tag(tag)
