"""A whole run of each script, nothing left out, and what is made of its folder afterwards.

    python -m pytest tests/scripts/test_whole.py
"""

import json
import math

import pytest
from launching import ROOT, rows

pytestmark = pytest.mark.every_script


@pytest.fixture(scope="module")
def whole(server, script, settings, tmp_path_factory):
    """A run with report, pictures and final folder."""
    args = settings("--run.output_dir", tmp_path_factory.mktemp("whole"), "--run.epochs", 1, "--eval.pictures", 2)
    return server.run(script, args, whole=True).ok()


def test_folder_has_all_that_a_person_looks_at(whole):
    folder = whole.folder
    assert whole.status["state"] == "done"
    for name in ("README.md", "curves.png", "pictures/step_000005.png"):
        assert (folder / "report" / name).stat().st_size > 100, name
    trained = [row for row in rows(folder) if "train/loss" in row]
    names = [name for name in trained[0] if name.startswith("train/loss_") and not name.endswith("_unscaled")]
    assert names
    for row in trained:
        assert row["train/loss"] == pytest.approx(sum(row[name] for name in names), rel=1e-4)
        assert all(math.isfinite(row[f"{name}_unscaled"]) for name in names)
    assert {"val/loss", "val/ema/loss"} <= rows(folder)[-1].keys()


def test_evaluating_the_folder_gives_the_numbers_of_the_run(server, whole):
    again = server.run(ROOT / "scripts" / "evaluate.py", [str(whole.folder), "--weights", "model"])
    assert again.code == 0, again.text
    found = json.loads(next(line for line in again.text.splitlines() if line.startswith("{")))
    best = json.loads((whole.folder / "checkpoints" / "best" / "state.json").read_text())["step"]
    row = next(row for row in rows(whole.folder) if row["step"] == best and "val/loss" in row)
    trained = {name.removeprefix("val/"): value for name, value in row.items() if name.startswith("val/bbox")}
    assert trained
    assert {name: found[name] for name in trained} == trained
