"""Every script on a pretended GPU (`pretended_device.py`): no tensor is on the wrong device, and the host waits for the
device as often as is said here, however large the batch.

    python -m pytest tests/scripts/test_pretended.py -m ""
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import CPU, ROOT, Script

# Largest number of waits of a step, those of transformers' own forward apart: one is the read of everything that a step
# must know, one the matcher's; Faster R-CNN does not know beforehand how many proposals it has, and on which levels.
WAITS = {"train_detr": 2, "train_yolov3": 1, "train_faster_rcnn": 3, "train_sgg": 1, "train_ssd": 1}
PREDCLS = ("--model.mode", "predcls", "--eval.metric_for_best", "R@20")  # boxes that are found go image by image


def pretended(tmp_path: Path, cases: list[tuple[str, list]]) -> list[dict]:
    """What `pretended_run.py` finds for each (script, arguments); all of them end well."""
    path = tmp_path / "cases.json"
    path.write_text(json.dumps([[script, list(map(str, args))] for script, args in cases]))
    command = [sys.executable, ROOT / "tests" / "scripts" / "pretended_run.py", path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=tmp_path,
                           env=_environment(tmp_path))  # fmt: skip
    found = [json.loads(line[6:]) for line in ended.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(found) == len(cases), f"{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}"
    assert [each["code"] for each in found] == [0] * len(cases), ended.stderr[-6000:]
    return found


def _environment(tmp_path: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "ACCELERATE_USE_CPU"}
    return kept | {"OMP_NUM_THREADS": CPU["OMP_NUM_THREADS"], "DETECTION_TOOLKIT_CACHE": str(tmp_path / "cache")}


@pytest.mark.slow
@pytest.mark.every_script
def test_waits_do_not_depend_on_the_batch(script: Script, settings, tmp_path):
    own_mode = PREDCLS if script.name == "train_sgg" else ()
    cases = [(script.name, settings("--run.output_dir", tmp_path, "--run.name", f"of_{batch}", "--run.epochs", 3,
                                    "--run.max_steps", 3, "--run.save_every", 0, "--run.eval_every", 0,
                                    "--data.batch_size_per_device", batch, *own_mode))
             for batch in (4, 9)]  # fmt: skip
    small, large = (each["step"] for each in pretended(tmp_path, cases))
    assert small["places"] == large["places"] and not small["unpinned"], "pageable memory is copied twice"
    own = {place: count for place, count in small["places"].items() if "transformers/" not in place}
    assert sum(own.values()) <= WAITS[script.name], own
