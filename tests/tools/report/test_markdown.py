"""The README of a report, with its curves."""

import json

import numpy as np
import pytest
from PIL import Image

from toolkit.base.text import in_markdown
from toolkit.tools.report import plot_curves, write_report

AP = {5: 0.1, 10: 0.3, 15: 0.25, 20: 0.2}


def training_row(step: int) -> dict:
    row = {"step": step, "epoch": 0, "time_s": 60.0 * step, "train/loss": 6 / step}
    for name, factor in (("loss_ce", 1), ("loss_ce_0", 2), ("loss_bbox", 3)):
        row[f"train/{name}"] = factor / step
        row[f"train/{name}_unscaled"] = factor / step / 5
    return row | {"train/grad_norm": 1.0, "train/lr/backbone": 1e-5, "train/lr/head": 1e-4}


def evaluation_row(step: int) -> dict:
    row = {
        "step": step,
        "epoch": 0,
        "time_s": 60.0 * step,
        "val/loss": 1.0,
        "val/bbox_APl": None,
    }
    for prefix, bonus in (("val/", 0), ("val/ema/", 0.05)):
        row |= {
            f"{prefix}bbox_AP": AP[step] + bonus,
            f"{prefix}AP/cat": AP[step],
            f"{prefix}AP/dog|wolf": None,
        }
    return row


TRAINED = [training_row(step) for step in range(1, 21)]
EVALUATED = [evaluation_row(step) for step in AP]


def write_metrics(run, rows) -> None:
    run.mkdir(parents=True, exist_ok=True)
    cut_off = '{"step": 9'
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + cut_off)


@pytest.fixture
def run(tmp_path):
    """A run folder as training leaves it."""
    folder = tmp_path / "my_run"
    write_metrics(folder, sorted([*TRAINED, *EVALUATED], key=lambda row: row["step"]))
    (folder / "config.yaml").write_text("optim:\n  lr: 0.0001\n")
    (folder / "environment.json").write_text(json.dumps({"python": "3.11", "seed": 7}))
    (folder / "status.json").write_text(json.dumps({"state": "done", "exit_code": 0, "reason": ""}))
    return folder


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (TRAINED, ["curves.png"]),
        ([row | {"val/loss": None} for row in EVALUATED], ["ap.png"]),
        ([{"step": 1, "epoch": 0, "time_s": 0.0}], []),
    ],
    ids=["no evaluation", "no training", "nothing"],
)
def test_curves_without_values_are_not_written(tmp_path, rows, expected):
    written = plot_curves(rows, tmp_path)
    assert written == [tmp_path / name for name in expected]
    assert sorted(tmp_path.iterdir()) == written
    for path in written:
        assert np.asarray(Image.open(path)).std() > 5  # something is drawn


def test_a_run_without_a_step_has_a_report(tmp_path):
    text = write_report(tmp_path / "run").read_text()
    assert "No step yet." in text
    assert "No evaluation" in text
    assert "png" not in text


def test_the_readme_has_the_last_and_the_best_numbers(run):
    pictures = run / "report" / "pictures"
    pictures.mkdir(parents=True)
    for step in (10, 20):
        Image.new("RGB", (4, 4)).save(pictures / f"step_{step:06d}.png")
    text = write_report(run).read_text()
    assert text.startswith("# my_run\n\nFinished after 20 steps. Epoch 0, 20.0 minutes.")
    for line in (
        "| metric | raw, last (step 20) | raw, best (step 10) | EMA, last (step 20) | EMA, best (step 10) |",
        "| bbox_AP | 0.2000 | 0.3000 | 0.2500 | 0.3500 |",
        "| bbox_APl | - | - | - | - |",
        "| loss | 1.0000 | 1.0000 | - | - |",
        "| cat | 0.2000 | 0.3000 | 0.2000 | 0.3000 |",
        "| dog\\|wolf | - |",
        "  lr: 0.0001",
        '"seed": 7',
    ):
        assert line in text, line
    assert "segm_AP" not in text
    assert "R@20" not in text
    for link in ("curves.png", "ap.png", "pictures/step_000020.png"):
        assert f"({link})" in text
        assert (run / "report" / link).exists()


def test_settings_are_those_in_force_and_the_state_that_is_told(run):
    """The report is written before status.json is, and not with the settings of an evaluation."""
    (run / "status.json").write_text(json.dumps({"state": "running", "exit_code": None, "reason": "none yet"}))
    (run / "config_2.yaml").write_text("model: {}\nrun: {eval_only: false}\noptim:\n  lr: 0.5\n")
    (run / "config_3.yaml").write_text("model: {}\nrun: {eval_only: true}\noptim:\n  lr: 0.25\n")
    readme = write_report(run, state="done")
    for file in (readme, run / "report" / "index.html"):
        text = file.read_text()
        for words in ("Finished after 20 steps.", "Settings (config_2.yaml)", "lr: 0.5"):
            assert words in text
        for words in ("Still running", "none yet", "lr: 0.25"):
            assert words not in text
    assert "Still running after 20 steps: none yet." in write_report(run).read_text()


@pytest.mark.parametrize(
    "name",
    [r"$\frac{1$", "_hidden", "<img src=x>", "[a](http://b.c)", "\ud800", "two\nlines"],
    ids=ascii,
)
def test_a_name_of_a_class_does_nothing_to_the_report(tmp_path, name):
    """Neither mathematics that matplotlib cannot read nor markup, a link or another row of the table."""
    write_metrics(
        tmp_path,
        [{"step": step, "epoch": 0, "val/bbox_AP": 0.1, f"val/AP/{name}": 0.1} for step in (1, 2)],
    )
    text = write_report(tmp_path).read_text()
    assert f"| {in_markdown(name)} | 0.1000 | 0.1000 |" in text
    assert f"| {name} |" not in text
    assert (tmp_path / "report" / "ap.png").is_file()
