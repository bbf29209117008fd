"""Reads the facts about a run for its report from the run folder, and makes the command that continues the run."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.base.errors import BadInput
from toolkit.base.files import read_json, shown_path
from toolkit.run.metrics_log import read_metrics
from toolkit.run.settings_file import format_value, newest_config, read_groups
from toolkit.run.status import true_status

STATES = {  # of `status.json`, in words
    "running": "Still running",
    "done": "Finished",
    "preempted": "Interrupted",
    "stopped_by_guard": "Stopped by the guard",
    "bad_input": "Stopped by wrong data or settings",
    "failed": "Failed",
}
OF_BOXES = re.compile(r"(val|test)/(ema/)?(bbox_|voc|AP/)")  # keys of metrics


@dataclass
class RunFacts:
    """Metrics, settings and environment of a run. All are empty if predictions without a run are reported.

    Attributes:
        rows: rows of metrics.jsonl; of a run that is given boxes and classes (predcls), without the metrics of boxes,
            all of which are 1.
        config, config_text: the newest settings, parsed and as text; `config_name` is the name of their file.
        environment_text: environment.json as text.
        state: a sentence on how the run stands, such as "Finished after 489 steps (run.max_minutes).".
        ended: a phrase that says what ended the training; "": it is not known.
        go_on: the command that continues the run for the same length again.
        ended_by: keys of the settings that ended the training, see `toolkit.run.status.ENDINGS`.
        epochs_made: number of epochs of training, including the fraction of an unfinished one; None: there was no
            training.
    """

    rows: Sequence[Mapping] = ()
    config: dict = field(default_factory=dict)
    config_name: str = "config.yaml"
    config_text: str = ""
    environment_text: str = ""
    state: str = ""
    ended: str = ""
    go_on: str = ""
    ended_by: Sequence[str] = ()
    epochs_made: float | None = None


def run_facts(run_folder: Path | None, state: str = "") -> RunFacts:
    """Read the facts about a run from its folder; facts whose file is missing, or all facts for None, are empty.

    state: how the run has ended, such as "done", if `status.json` does not say so yet.
    """
    if run_folder is None:
        return RunFacts()
    config = newest_config(run_folder)
    settings = read_groups(config) if config.exists() else {}
    environment, status = read_records(run_folder)
    ended_by = status.get("ended_by") or []
    status |= {"state": state, "reason": status.get("reason") if ended_by else ""} if state else {}
    rows = read_metrics(run_folder / "metrics.jsonl")
    if settings.get("model", {}).get("mode") == "predcls":
        rows = [{key: value for key, value in row.items() if not OF_BOXES.match(key)} for row in rows]
    run = RunFacts(
        rows,
        settings,
        config.name,
        config.read_text(encoding="utf-8") if settings else "",
        json.dumps(environment, indent=2) if environment else "",
        _state(status, rows),
        status.get("reason", "") if ended_by else "",
        ended_by=ended_by,
    )
    trained = [row for row in rows if "train/loss" in row]
    if trained:
        run.epochs_made = epochs_made(trained, _steps_per_epoch(environment, settings))
        flags = flags_that_go_on(
            ended_by,
            settings,
            trained[-1]["step"],
            trained[-1]["epoch"] + 1,
        )
        run.go_on = command_that_goes_on(flags, environment.get("command_line") or [], config)
    return run


def _state(status: Mapping, rows: Sequence[Mapping]) -> str:
    """Return a sentence on how a run stands; "" if it is not known."""
    if not status.get("state"):
        return ""
    words = STATES.get(status["state"], status["state"])
    if rows and "step" in rows[-1]:
        words += f" after {rows[-1]['step']} steps"
    if status["state"] == "done" and status.get("ended_by"):
        return f"{words} ({', '.join(status['ended_by'])})."
    reason = (status.get("reason") or "").rstrip(".")
    return f"{words}: {reason}." if reason else f"{words}."


def epochs_made(trained: Sequence[Mapping], steps_per_epoch: float) -> float:
    """Return the number of epochs that a training has made, including the fraction of an unfinished one.

    Args:
        trained: rows of the training with `step` and `epoch` (from 0), among them the first step of each epoch.
        steps_per_epoch: optimizer steps of an epoch; 0: not known. It is used only if the first epoch is unfinished;
            otherwise it follows from the rows.
    """
    last = trained[-1]
    first_step = next(row["step"] for row in trained if row["epoch"] == last["epoch"])
    if last["epoch"]:
        steps_per_epoch = (first_step - 1) / last["epoch"]
    if steps_per_epoch <= 0:
        return last["epoch"] + 1.0
    return last["epoch"] + min(1.0, (last["step"] - first_step + 1) / steps_per_epoch)


def _steps_per_epoch(environment: Mapping, config: Mapping) -> float:
    """Return the optimizer steps of an epoch, or 0 if `environment.json` and the settings do not say it."""
    train = (environment.get("data") or {}).get("train")
    images = train.get("tiles", train.get("windows", train.get("images"))) if isinstance(train, Mapping) else None
    batch_size = config.get("data", {}).get("batch_size_per_device")
    accumulation_steps = config.get("optim", {}).get("accumulation_steps")
    numbers = (images, batch_size, accumulation_steps, environment.get("processes"))
    if not all(isinstance(number, int) and 0 < number < 1e12 for number in numbers):
        return 0.0
    return images / (batch_size * accumulation_steps * environment["processes"])


def read_records(run_folder: Path) -> tuple[dict, dict]:
    """Return the contents of `environment.json` and of `status.json` (corrected by `true_status`) in a run folder.

    A missing file gives an empty dict.

    Raises:
        BadInput: a file cannot be read, or an entry that reports use has the wrong type.
    """
    records = []
    problems = []
    for name, entries in _ENTRIES.items():
        path = run_folder / name
        records.append(read_json(path) if path.exists() else {})
        for key, kind in entries.items():
            value = records[-1].get(key)
            entries_fit = not isinstance(value, list) or all(isinstance(item, str) for item in value)
            if not (isinstance(value, kind | type(None)) and entries_fit):
                problems.append(f"{path}: {key} is {format_value(value)}; expected {_WORDS[kind]}, as the run wrote it")
    if problems:
        raise BadInput(problems)
    return records[0], true_status(run_folder, records[1])


_ENTRIES = {
    "environment.json": {"command_line": list, "processes": int, "data": dict},
    "status.json": {"state": str, "reason": str, "ended_by": list},
}
_WORDS = {str: "text", list: "a list of texts", int: "a whole number", dict: "an object"}


def flags_that_go_on(ended_by: Sequence[str], config: Mapping, step: int, epochs: int) -> list[str]:
    """Return the flags with which a finished run continues for the same length again.

    Args:
        ended_by: keys of the settings that ended the training, see `toolkit.run.status.ENDINGS`; empty: not known.
            Every limit of the length that would end the run again is raised.
        config: the newest settings of the run.
        step, epochs: number of optimizer steps made, and of epochs begun.
    """
    run = config.get("run", {})
    patience = config.get("eval", {}).get("early_stopping_patience")
    flags = ["--run.resume", "latest"]
    if "eval.early_stopping_patience" in ended_by and patience:
        flags += ["--eval.early_stopping_patience", f"{2 * patience}"]
        if len(ended_by) == 1:  # the rest of its length is enough
            return flags
    flags += ["--run.resume_schedule", "new"]
    for key, made in (("epochs", epochs), ("max_steps", step)):
        if run.get(key) and run[key] < 2 * made:
            flags += [f"--run.{key}", f"{2 * made}"]
    if run.get("max_minutes"):
        flags += ["--run.max_minutes", f"{2 * run['max_minutes']:g}"]
    return flags


def command_that_goes_on(flags: Sequence[str], command_line: Sequence[str], config_file: Path) -> str:
    """Return a shell command that continues a run.

    Args:
        flags: result of `flags_that_go_on`.
        command_line: the command line of the run; if it is not that of a script (as in a notebook), only the flags are
            returned.
        config_file: file with the newest settings of the run.
    """
    script = Path(command_line[0]) if command_line else Path()
    if script.suffix != ".py" or script.stem == "ipykernel_launcher":
        return shlex.join(flags)
    return shlex.join(
        [
            "accelerate",
            "launch",
            shown_path(script),
            "--config",
            shown_path(config_file),
            *flags,
        ]
    )
