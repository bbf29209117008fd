"""Writes the metrics of a run: always to metrics.jsonl, and then to every requested experiment tracker, such as W&B.

If a tracker fails, or has no network, one warning is given, and training goes on without it. The rows that the tracker
missed are sent from metrics.jsonl when the run is resumed. A new tracker is a subclass of `Tracker` and a line in
`toolkit.index.TRACKERS`; its exceptions are caught here.
"""

import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from toolkit import index
from toolkit.base.errors import BadInput
from toolkit.base.files import read_json_object, write_json_atomic
from toolkit.base.text import did_you_mean
from toolkit.data.table import DetectionTable
from toolkit.run.best import Best
from toolkit.run.folder import ERRORS_FILE, note_traceback
from toolkit.run.metrics_log import MetricsLog, read_metrics

TRACKERS_FILE = "tracker.json"  # of the run folder

@dataclass(frozen=True)
class RunDescription:
    """The facts about a run that experiment trackers are given before its first step.

    Attributes:
        config: the settings as nested dicts.
        metric: `eval.metric_for_best`, such as "bbox_AP".
        project, name, group, job_type, tags, notes: the settings of these names in the group `run`.
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
    """The facts about a data set that experiment trackers are given.

    Attributes:
        fingerprint: hash of the rows and classes.
        uri: location of the images; if there is none, the name of the data.
        images, boxes, classes: their numbers.
    """

    fingerprint: str
    uri: str
    images: int
    boxes: int
    classes: int


def data_facts(tables: Mapping[str, DetectionTable]) -> dict[str, DataFacts]:
    """Return the facts about each data table, by the keys of `tables`, which are names of splits."""
    found = {}
    for split, table in tables.items():
        uri = str(table.image_root or table.name)
        boxes = table.identity["boxes"]
        found[split] = DataFacts(table.fingerprint, uri, len(table), boxes, len(table.categories))
    return found


class Tracker:
    """Base class of experiment trackers, programs that show the metrics of a run; only the main process has trackers.

    An exception in a method switches the tracker off and does not end the run.

    Attributes:
        run_id: identifier of the run in the program; None: it gives none.
        floor: the last step that the program has received, if `start` could find it out; it overrides the steps in
            `tracker.json`. None: the steps in `tracker.json` are correct.
        notes: JSON values of the tracker's own, which are kept in `tracker.json` for a run that resumes.
    """

    def __init__(self, name: str):
        self.name = name
        self.run_id: str | None = None
        self.floor: int | None = None
        self.notes: dict = {}

    def start(self, folder: Path, about: RunDescription, is_new: bool, was_closed: bool) -> None:
        """Start to track a run, or continue to, with `run_id` and `notes` of before.

        Args:
            folder: the run folder.
            about: facts about the run.
            is_new: the program has received nothing of this run yet.
            was_closed: the tracker was closed at the end of the previous start, so the program has received everything.
        """
        raise NotImplementedError  # each tracker has its own

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send the numbers of a row, by name, to the program."""
        raise NotImplementedError  # each tracker has its own

    def show(self, shown, step: int) -> None:
        """Send the pictures and tables of an evaluation to the program; by default nothing is sent.

        shown: a `toolkit.tools.report.evaluation_display.EvaluationDisplay`.
        """

    def note_data(self, data: Mapping[str, DataFacts]) -> None:
        """Send the facts about the data, by split, before the first step; by default nothing is sent."""

    def keep_final(self, final: Path, facts: Mapping) -> None:
        """Send the finished detector in the folder `final`; by default nothing is sent.

        facts: name of the run, best step, and value of the best metric by its name.
        """

    def close(self, state: str) -> None:
        """End the tracking; called when everything was sent. state: "done", "preempted" or "failed"."""


def flat(config: Mapping, prefix: str = "") -> dict:
    """Return nested settings as a flat dict, such as {"optim.lr": 1e-4}.

    Values that are neither numbers nor text are converted to text, which every tracker accepts. prefix: put before each
    key.
    """
    found = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


def tracker_names(asked: str | Sequence[str]) -> list[str]:
    """Return the names of the trackers in `run.tracker`, without duplicates and without "none".

    Raises:
        BadInput: a tracker is unknown or not installed; the message lists the installed ones.
    """
    names = [name for name in dict.fromkeys([asked] if isinstance(asked, str) else asked) if name != "none"]
    available = sorted({str(name) for name in get_available_trackers()})
    problems = []
    for name in [name for name in names if name not in available]:
        fault = "its package is not installed" if name in LOGGER_TYPE_TO_CLASS else "no such tracker"
        hint = did_you_mean(name, available)
        if "," in name:
            parts = [part.strip() for part in name.split(",")]
            hint = f"; several are a list: '[{', '.join(parts)}]'"
        problems.append(f"--run.tracker {name}: {fault}; installed are {', '.join(['none', *available])}{hint}")
    if problems:
        raise BadInput(problems)
    return names


def agent_run_id() -> str | None:
    """Return the run id that `wandb agent` gave to this trial of a sweep; None where no agent started this process."""
    return os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None


def make_tracker(name: str) -> Tracker:
    """Return the tracker of this name, which is not started yet."""
    tracker = index.load(index.TRACKERS.get(name, index.OTHER_TRACKERS))
    return tracker(name)


class RunWriter:
    """Writes the rows of a run to metrics.jsonl and sends rows and evaluations to the trackers; only the main process
    writes and sends.

    Args:
        folder: the run folder.
        trackers: names of the trackers, see `tracker_names`.
        about: facts about the run for the trackers.
        data: facts about the data for the trackers, by split.
        is_main: this is the main process.
        rows_before: number of rows at the checkpoint that the run resumes from; None for a fresh start.
        eval_only: nothing is trained, so the rows of steps after the checkpoint are kept too.
        track_unscaled: whether to send the unweighted losses, `..._unscaled`, to the trackers too.

    All that is known of the trackers is in `tracker.json`: run ids, last steps that were sent, and notes. A step is
    written there before it is sent, so that it is not sent twice if the process is killed between the two. After a
    kill, the server of W&B says which steps it has; offline files, which lack the steps that were in memory, get all
    rows again, each under its step.
    The row of an evaluation is sent together with `best/...`, the numbers of the best evaluation so far.
    """

    def __init__(
        self,
        folder: Path,
        *,
        trackers: Sequence[str] = (),
        about: RunDescription | None = None,
        data: Mapping[str, DataFacts] | None = None,
        is_main: bool = True,
        rows_before: int | None = None,
        eval_only: bool = False,
        track_unscaled: bool = False,
    ):
        self.folder = Path(folder)
        self._is_main = is_main
        self._track_unscaled = track_unscaled
        self._feeds: list[_Feed] = []
        self._best = _BestNumbers((about or RunDescription()).metric)
        if not is_main:
            return
        rows = self.folder / "metrics.jsonl"
        goes_on = rows_before is not None and rows.exists()  # else it is new, or goes on from the run of another folder
        kept = rows_before if goes_on else 0
        self._metrics = MetricsLog(rows, sys.maxsize if eval_only else kept)
        earlier = read_json_object(self.folder / TRACKERS_FILE) if goes_on else {}
        self._feeds = [_Feed(name, self.folder, self._save, earlier.get(name)) for name in trackers]
        for feed in self._feeds:
            feed.start(about or RunDescription(), data or {})
        for row in read_metrics(rows) if trackers else ():
            self._send(row)

    @property
    def shows(self) -> bool:
        """Whether any tracker works, to which evaluations can be sent."""
        return any(feed.works for feed in self._feeds)

    def state_dict(self) -> dict:
        """Return JSON values for the checkpoint: the number of rows. The keys are the same on every process."""
        return {"rows": self._metrics.rows if self._is_main else 0}

    def log(self, row: Mapping[str, float | int | str | None]) -> None:
        """Write a row to metrics.jsonl, then send it to the trackers.

        row: `step`, `epoch`, `time_s` and further values by name.

        Raises BadInput if the file cannot be written, or was removed.
        """
        if self._is_main:
            if not self._metrics.path.exists():  # writing to a file that was removed is not an error for the system
                raise BadInput(
                    f"{self._metrics.path} was removed while the run wrote to it. Later checkpoints can be resumed "
                    "with --run.resume latest; the rows so far are lost."
                )
            self._metrics.write(row)
            self._send(row)

    def show(self, evaluation, step: int) -> None:
        """Send an evaluation, an `EvaluationDisplay`, to the trackers that have not received that of this step."""
        for feed in self._feeds:
            if feed.note("images", step):
                feed.call(lambda tracker: tracker.show(evaluation, step))

    def keep_final(self, final: Path, summary: Mapping) -> None:
        """Send the finished detector in the folder `final` to the trackers.

        summary: name of the run, best step, and value of the best metric by its name.
        """
        for feed in self._feeds:
            feed.call(lambda tracker: tracker.keep_final(final, summary))

    def close(self, state: str = "done") -> None:
        """Close metrics.jsonl and the trackers.

        state: how the run ended: "done", "preempted" or "failed".

        Raises:
            OSError: the last row cannot be written.
            BadInput: the state is "done", and metrics.jsonl was removed.
        """
        removed = self._is_main and not self._metrics.path.exists()
        if self._is_main:
            self._metrics.close()
        for feed in self._feeds:
            feed.close(state)
        if removed and state == "done":
            raise BadInput(
                f"{self.folder} was removed while the run ended. Its checkpoints and rows are lost; what was written "
                "after that is there."
            )

    def _send(self, row: Mapping) -> None:
        step = row["step"]
        values = {k: v for k, v in row.items() if k != "step" and isinstance(v, int | float | np.number)}
        values |= self._best.after(row)
        if not self._track_unscaled:
            values = {k: v for k, v in values.items() if not k.endswith("_unscaled")}
        kinds = [kind for kind in ("train", "epoch", "val") if any(k.startswith(f"{kind}/") for k in values)]
        for feed in self._feeds:
            if feed.note(kinds[0] if kinds else "val", step):
                feed.call(lambda tracker: tracker.log(values, step))

    def _save(self) -> None:
        state = {feed.tracker.name: feed.state_dict() for feed in self._feeds}
        write_json_atomic(self.folder / TRACKERS_FILE, state)


class _Feed:
    """One tracker with what it was sent. What it raises costs one warning and the tracker, never the training.

    state: what `tracker.json` has of it; None: it has nothing of this run.
    """

    def __init__(self, name: str, folder: Path, save: Callable[[], None], state: Mapping | None):
        self.tracker = make_tracker(name)
        self.folder = folder
        self.works = True
        self._save = save
        self._is_new = state is None
        state = state or {}
        self._sent = {kind: int(step) for kind, step in state.get("sent", {}).items()}  # kind of row -> last step
        self._was_closed = state.get("finished", False)
        self._closed = False
        self.tracker.run_id = state.get("run_id")
        self.tracker.notes = dict(state.get("notes", {}))

    def start(self, about: RunDescription, data: Mapping[str, DataFacts]) -> None:
        self.call(lambda tracker: tracker.start(self.folder, about, self._is_new, self._was_closed))
        if self.tracker.floor is not None:
            self._sent = dict.fromkeys(("train", "epoch", "val", "images"), self.tracker.floor)
        if data:
            self.call(lambda tracker: tracker.note_data(data))
        self.call(lambda tracker: self._save())

    def note(self, kind: str, step: int) -> bool:
        """Record that the tracker gets the row of this kind and step, and return True; return False if the tracker has
        the row already, or does not work."""
        if not self.works or step <= self._sent.get(kind, -1):
            return False
        self._sent[kind] = step
        self.call(lambda tracker: self._save())
        return self.works

    def close(self, state: str) -> None:
        self.call(lambda tracker: tracker.close(state))
        self._closed = self._closed or self.works
        self.call(lambda tracker: self._save())
        self.works = False

    def state_dict(self) -> dict:
        about = {"run_id": self.tracker.run_id, "sent": self._sent, "finished": self._closed}
        return about | {"notes": self.tracker.notes}

    def call(self, function: Callable) -> None:
        if not self.works:
            return
        try:
            function(self.tracker)
        except Exception as error:  # noqa: BLE001  trackers raise what they like: their own, requests', protobuf's
            self.works = False
            note_traceback(self.folder, f"tracker {self.tracker.name}")
            reason = f"{type(error).__name__}: {textwrap.shorten(str(error), 200, placeholder=' ...')}"
            warnings.warn(
                f"The tracker {self.tracker.name} failed and is switched off ({reason}). Training goes on; "
                f"{self.folder}/metrics.jsonl has every row, and {ERRORS_FILE} the traceback.",
                stacklevel=4,
            )


class _BestNumbers:
    """The numbers of the best evaluation so far, those of single classes left out, as `best/...`."""

    def __init__(self, metric: str):
        self._best = Best(metric)
        self._numbers = {}

    def after(self, row: Mapping) -> dict[str, float]:
        """Return the best values with this row taken into account; nothing for a row of training."""
        metric = self._best.metric
        if f"val/{metric}" not in row:
            return {}
        if self._best.note(row["step"], row):
            prefix = "val/ema/" if self._best.of_average else "val/"
            named = {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}
            numbers = {name: value for name, value in named.items() if "/" not in name and value is not None}
            self._numbers = {f"best/{name}": value for name, value in numbers.items()}
            self._numbers |= {f"best/{metric}": row[f"val/{metric}"], "best/step": row["step"]}
        return self._numbers
