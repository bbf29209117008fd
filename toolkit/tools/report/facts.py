"""Facts about a run for its report, read once from its folder, and the command that continues it."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.base.errors import BadInput
from toolkit.base.files import read_json
from toolkit.run.metrics_log import read_metrics
from toolkit.run.settings_file import format_value, newest_config, read_groups
from toolkit.run.status import true_status


@dataclass
class RunFacts:
    """Metrics, settings and environment of a run, as text and parsed; all are empty for a predictions file without a
    run.

    ended: a phrase that says what ended the training, if `status.json` has it.
    go_on: the command that trains for as long again.
    ended_by: names of the settings that ended it, see `toolkit.run.status`.
    epochs_made: epochs of training, with the share of the last one; None: nothing was trained.
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
    """Read the facts of a run from its folder, with the settings in force. Facts without a file are empty.

    state: how the run has ended, if `status.json` does not say it yet.
    """
    if run_folder is None:
        return RunFacts()
    config = newest_config(run_folder)
    settings = read_groups(config) if config.exists() else {}
    environment, status = read_records(run_folder)
    ended_by = status.get("ended_by") or []
    status |= {"state": state, "reason": status.get("reason") if ended_by else ""} if state else {}
    rows = read_metrics(run_folder / "metrics.jsonl")
    run = RunFacts(
        rows,
        settings,
        config.name,
        config.read_text(encoding="utf-8") if settings else "",
        json.dumps(environment, indent=2) if environment else "",
        ", ".join(f"{key} {status[key]}" for key in ("state", "reason") if status.get(key)),
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


def epochs_made(trained: Sequence[Mapping], steps_per_epoch: float) -> float:
    """Return how many epochs the rows of a training reach, with the share of the last one.

    Args:
        trained: rows of training, with `step` and `epoch`; the first step of each epoch has one.
        steps_per_epoch: optimizer steps, 0 where nothing is known; only asked for where the first epoch never ended.
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
    images = train.get("windows", train.get("images")) if isinstance(train, Mapping) else None
    batch_size = config.get("data", {}).get("batch_size_per_device")
    accumulation_steps = config.get("optim", {}).get("accumulation_steps")
    numbers = (images, batch_size, accumulation_steps, environment.get("processes"))
    if not all(isinstance(number, int) and 0 < number < 1e12 for number in numbers):
        return 0.0
    return images / (batch_size * accumulation_steps * environment["processes"])


def read_records(run_folder: Path) -> tuple[dict, dict]:
    """Read `environment.json` and `status.json`; empty if they are missing.

    Raises:
        BadInput: they cannot be read, or an entry that reports use is of another type.
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
    """Return the flags with which a finished run trains for the same length again.

    Args:
        ended_by: names of settings, see `toolkit.run.status`; empty: unknown, and every limit that would end it again
            is raised.
        config: the settings in force. step, epochs: optimizer steps made, and epochs begun.
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
    """Return a shell command that continues a run. command_line: that of the run; if no script started it, as in a
    notebook, the result has only the flags.

    config_file: the settings in force.
    """
    script = Path(command_line[0]) if command_line else Path()
    if script.suffix != ".py" or script.stem == "ipykernel_launcher":
        return shlex.join(flags)
    return shlex.join(
        [
            "accelerate",
            "launch",
            str(script),
            "--config",
            str(config_file),
            *flags,
        ]
    )
