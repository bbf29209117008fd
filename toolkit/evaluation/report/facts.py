"""Facts about a run for its report, read once from its folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.evaluation.report.going_on import command_that_goes_on, flags_that_go_on
from toolkit.files import read_json
from toolkit.runs.metrics_log import read_metrics
from toolkit.runs.settings_file import newest_config, read_groups


@dataclass
class RunFacts:
    """Rows of the metrics of a run, settings and surroundings, as text and read; all empty for a predictions file that
    belongs to no run.

    ended: what ended the training, in words, where `status.json` knows it.
    go_on: the command that trains for as long again.
    """

    rows: Sequence[Mapping] = ()
    config: dict = field(default_factory=dict)
    config_name: str = "config.yaml"
    config_text: str = ""
    environment_text: str = ""
    state: str = ""
    ended: str = ""
    go_on: str = ""


def run_facts(run_folder: Path | None, state: str = "") -> RunFacts:
    """Whatever is missing in the folder is empty; settings are those in force.

    state: how the run has ended, where `status.json` does not say it yet.
    """
    if run_folder is None:
        return RunFacts()
    config = newest_config(run_folder)
    settings = read_groups(config) if config.exists() else {}
    environment, status = (read_json(path) if path.exists() else {}
                           for path in (run_folder / "environment.json", run_folder / "status.json"))  # fmt: skip
    ended_by = status.get("ended_by", [])
    status |= {"state": state, "reason": status.get("reason") if ended_by else ""} if state else {}
    words = ", ".join(f"{key} {status[key]}" for key in ("state", "reason") if status.get(key))
    rows = read_metrics(run_folder / "metrics.jsonl")
    trained = [row for row in rows if "train/loss" in row]
    flags = flags_that_go_on(ended_by, settings, trained[-1]["step"], trained[-1]["epoch"] + 1) if trained else []
    return RunFacts(
        rows,
        settings,
        config.name,
        config.read_text(encoding="utf-8") if settings else "",
        json.dumps(environment, indent=2) if environment else "",
        words,
        status.get("reason", "") if ended_by else "",
        command_that_goes_on(flags, environment.get("command_line", []), config) if flags else "",
    )
