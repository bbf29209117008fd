"""What the folder of a run tells a report, read once."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from toolkit.runs.metrics_log import read_metrics


@dataclass
class RunFacts:
    """Rows of the metrics of a run, settings and surroundings, as text and read; all empty for a predictions file that
    belongs to no run."""

    rows: Sequence[Mapping] = ()
    config: dict = field(default_factory=dict)
    config_text: str = ""
    environment_text: str = ""
    state: str = ""


def run_facts(run_folder: Path | None) -> RunFacts:
    """Whatever is missing in the folder is empty."""
    if run_folder is None:
        return RunFacts()
    texts = {
        name: (run_folder / name).read_text(encoding="utf-8") if (run_folder / name).exists() else ""
        for name in ("config.yaml", "environment.json", "status.json")
    }
    status = json.loads(texts["status.json"]) if texts["status.json"] else {}
    state = ", ".join(f"{key} {status[key]}" for key in ("state", "reason") if status.get(key))
    return RunFacts(
        read_metrics(run_folder / "metrics.jsonl"),
        yaml.safe_load(texts["config.yaml"]) or {},
        texts["config.yaml"],
        texts["environment.json"],
        state,
    )
