"""What the folder of a run tells a report, read once."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from toolkit.runs.metrics_log import read_metrics
from toolkit.runs.settings_file import newest_config


@dataclass
class RunFacts:
    """Rows of the metrics of a run, settings and surroundings, as text and read; all empty for a predictions file that
    belongs to no run."""

    rows: Sequence[Mapping] = ()
    config: dict = field(default_factory=dict)
    config_name: str = "config.yaml"
    config_text: str = ""
    environment_text: str = ""
    state: str = ""


def run_facts(run_folder: Path | None, state: str = "") -> RunFacts:
    """Whatever is missing in the folder is empty; settings are those in force.

    state: how the run has ended, where `status.json` does not say it yet.
    """
    if run_folder is None:
        return RunFacts()
    config = newest_config(run_folder)
    texts = {
        name: (run_folder / name).read_text(encoding="utf-8") if (run_folder / name).exists() else ""
        for name in (config.name, "environment.json", "status.json")
    }
    status = {"state": state} if state else json.loads(texts["status.json"] or "{}")
    words = ", ".join(f"{key} {status[key]}" for key in ("state", "reason") if status.get(key))
    return RunFacts(
        read_metrics(run_folder / "metrics.jsonl"),
        yaml.safe_load(texts[config.name]) or {},
        config.name,
        texts[config.name],
        texts["environment.json"],
        words,
    )
