"""run.precision auto: measured once, written down, kept by whoever goes on.

    python -m pytest tests/scripts/test_precision.py
"""

import json
import re

import pytest
import yaml
from launching import training_rows

from toolkit.step.precision import cpu_computes_in_bf16, faster_precision


def test_what_is_not_clearly_faster_stays_in_float32():
    assert faster_precision({"no": 1.0, "bf16": 0.9}) == "bf16"
    assert faster_precision({"no": 1.0, "bf16": 0.98}) == faster_precision({"no": 1.0, "bf16": 3.0}) == "no"


def losses(run) -> list[dict]:
    return [{key: row[key] for key in row if key.startswith("train/loss")} for row in training_rows(run.folder)]


@pytest.mark.skipif(not cpu_computes_in_bf16(), reason="this CPU has no instructions for bfloat16: nothing to choose")
def test_the_choice_is_measured_recorded_and_kept(server, script, settings, tmp_path):
    args = settings("--run.output_dir", tmp_path, "--run.max_steps", 2, "--run.resume", "latest", "--run.eval_every", 0)
    first = server.run(script, [*args, "--run.precision", "auto", "--run.name", "auto"]).ok()
    chosen = re.search(r"run.precision auto: (\w+); forward and backward of a batch take", first.text)[1]
    seconds = json.loads((first.folder / "environment.json").read_text())["precision_seconds"]
    assert chosen == faster_precision(seconds) and min(seconds.values()) > 0
    config = yaml.safe_load((first.folder / "config.yaml").read_text())
    assert config["run"]["precision"] == chosen

    told = server.run(script, [*args, "--run.precision", chosen, "--run.name", "told"]).ok()
    assert losses(told) == losses(first), "measuring changed something"

    # As if it had begun on a machine that chose otherwise.
    config["run"]["precision"] = other = {"no": "bf16", "bf16": "no"}[chosen]
    (first.folder / "config.yaml").write_text(yaml.safe_dump(config))
    more = ["--run.precision", "auto", "--run.name", "auto", "--run.max_steps", 3, "--run.resume_schedule", "new"]
    resumed = server.run(script, [*args, *map(str, more)]).ok()
    assert "run.precision" not in resumed.text
    assert yaml.safe_load((first.folder / "config_2.yaml").read_text())["run"]["precision"] == other
