"""The report of a run: curves, text, pictures; what ended a training and the flags that go on."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from report_data import found_of, table_of

from toolkit.base.text import in_markdown
from toolkit.evaluation.draw import CLASS_COLOURS, choose_images, draw_grid, draw_predictions, montage
from toolkit.run.settings import EvalConfig, RunConfig, ScheduleConfig
from toolkit.run.status import ENDINGS, in_words
from toolkit.tools.report import plot_curves, series, smoothed, write_report
from toolkit.tools.report.facts import command_that_goes_on, flags_that_go_on


def write_metrics(path, rows, cut_off=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + ('{"step": 9' if cut_off else ""))


def full_run(folder):
    """A run folder as training leaves it: twenty training rows, four evaluations, raw and EMA, two classes."""
    rows = []
    for step in range(1, 21):
        losses = {"loss_ce": 1 / step, "loss_ce_0": 2 / step, "loss_bbox": 3 / step}
        row = {"step": step, "epoch": 0, "time_s": 60.0 * step, "train/loss": sum(losses.values())}
        row |= {f"train/{k}": v for k, v in losses.items()} | {f"train/{k}_unscaled": v / 5 for k, v in losses.items()}
        rows.append(row | {"train/grad_norm": 1.0, "train/lr/backbone": 1e-5, "train/lr/head": 1e-4})
        if ap := {5: 0.1, 10: 0.3, 15: 0.25, 20: 0.2}.get(step):
            row = {"step": step, "epoch": 0, "time_s": 60.0 * step, "val/loss": 1.0, "val/bbox_APl": None}
            for prefix, bonus in (("val/", 0), ("val/ema/", 0.05)):
                row |= {f"{prefix}bbox_AP": ap + bonus, f"{prefix}bbox_AP50": 2 * ap}
                row |= {f"{prefix}AP/cat": ap, f"{prefix}AP/dog|wolf": None}
            rows.append(row)
    write_metrics(folder / "metrics.jsonl", rows, cut_off=True)
    (folder / "config.yaml").write_text("optim:\n  lr: 0.0001\n")
    (folder / "environment.json").write_text(json.dumps({"python": "3.11", "seed": 7}))
    (folder / "status.json").write_text(json.dumps({"state": "done", "exit_code": 0, "reason": ""}))
    return rows


def test_a_series_is_what_is_a_finite_number_and_smoothing_passes_over_others():
    rows = [{"step": 1, "a": 1.0}, {"step": 2, "a": None}, {"step": 3, "a": math.nan}, {"step": 4, "a": 3}]
    steps, values = series(rows, "a")
    assert steps.tolist() == [1, 4] and values.tolist() == [1, 3]
    assert [len(part) for part in series(rows, "missing")] == [0, 0]
    line = np.arange(50.0)
    assert smoothed(line)[5:45] == pytest.approx(line[5:45])  # the mean of a window
    line[20] = np.nan
    assert np.isfinite(smoothed(line)).all()


def test_curves_of_a_full_run_and_of_less(tmp_path):
    rows = full_run(tmp_path / "run")
    cases = {
        "no evaluation": ([row for row in rows if "train/loss" in row], ["curves.png"]),
        "no training": ([row for row in rows if "val/bbox_AP" in row and row.pop("val/loss")], ["ap.png"]),
        "nothing": ([{"step": 1, "epoch": 0, "time_s": 0.0}], []),
    }
    for name, (some, expected) in cases.items():
        written = plot_curves(some, tmp_path / name)
        assert [path.name for path in written] == expected
        assert sorted(path.name for path in (tmp_path / name).glob("*.png")) == expected
        assert all(np.asarray(Image.open(path)).std() > 5 for path in written)  # something is drawn


def test_the_report_of_a_run(tmp_path):
    run = tmp_path / "my_run"
    text = write_report(run).read_text()
    assert "no step yet" in text and "No evaluation" in text and "png" not in text
    full_run(run)
    (run / "report/pictures").mkdir(parents=True)
    for step in (10, 20):
        Image.new("RGB", (4, 4)).save(run / f"report/pictures/step_{step:06d}.png")
    text = write_report(run).read_text()
    assert text.startswith("# my_run\n\nstate done, step 20, epoch 0, 20.0 minutes")
    assert "| metric | raw, last (step 20) | raw, best (step 10) | EMA, last (step 20) | EMA, best (step 10) |" in text
    assert "| bbox_AP | 0.2000 | 0.3000 | 0.2500 | 0.3500 |" in text
    assert "| bbox_APl | - | - | - | - |" in text
    assert "| cat | 0.2000 | 0.3000 | 0.2000 | 0.3000 |" in text and "| dog\\|wolf | - |" in text
    assert "  lr: 0.0001" in text and '"seed": 7' in text
    for link in ("curves.png", "ap.png", "pictures/step_000020.png"):
        assert f"({link})" in text and (run / "report" / link).exists()

    # Written before status.json is, and resumed with other settings: it has those in force, not an evaluation's.
    (run / "status.json").write_text(json.dumps({"state": "running", "exit_code": None, "reason": "none yet"}))
    write_metrics(run / "metrics.jsonl", [])
    (run / "config_2.yaml").write_text("model: {}\nrun: {eval_only: false}\noptim:\n  lr: 0.5\n")
    (run / "config_3.yaml").write_text("model: {}\nrun: {eval_only: true}\noptim:\n  lr: 0.25\n")
    text = write_report(run, state="done").read_text()
    page = (run / "report" / "index.html").read_text()
    for report in (text, page):
        assert "state done" in report and "running" not in report and "none yet" not in report
        assert "Settings (config_2.yaml)" in report and "lr: 0.5" in report and "lr: 0.25" not in report
    assert "state running, reason none yet" in write_report(run).read_text()


def test_a_name_of_a_class_does_nothing_to_the_report(tmp_path):
    """Neither mathematics that matplotlib cannot read nor markup, a link or another row of the table."""
    names = [r"$\frac{1$", "_hidden", "<img src=x>", "[a](http://b.c)", "\ud800", "two\nlines"]
    rows = [{"step": step, "epoch": 0, "val/bbox_AP": 0.1} | {f"val/AP/{name}": 0.1 for name in names}
            for step in (1, 2)]  # fmt: skip
    write_metrics(tmp_path / "run" / "metrics.jsonl", rows)
    text = write_report(tmp_path / "run").read_text()
    for name in names:
        assert f"| {in_markdown(name)} | 0.1000 | 0.1000 |" in text and f"| {name} |" not in text
    assert (tmp_path / "run" / "report" / "ap.png").is_file()


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def has_colour(picture, colour):
    return (abs(picture - [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).sum(-1) == 0).sum() > 50


def test_predictions_stand_beside_the_ground_truth(tmp_path):
    image = torch.full((3, 96, 128), 90, dtype=torch.uint8)
    truth = {"name": "a very long name of an image " * 5, "boxes": torch.tensor([[20.0, 20, 60, 60]]),
             "labels": torch.tensor([0]), "iscrowd": torch.tensor([0])}  # fmt: skip
    found = found_of([[10, 10, 50, 50], [60, 30, 110, 80], [0, 0, 9, 9]], [1, 2, 3], [0.9, 0.31, 0.2])
    picture = pixels(draw_grid([(image, found, truth)], ["zero", "one", "two", "three"], tmp_path / "a/b.png"))
    half = picture.shape[1] // 2
    left, right = picture[:, :half], picture[:, half:]
    assert has_colour(left, CLASS_COLOURS[0]) and not has_colour(left, CLASS_COLOURS[1])
    assert has_colour(right, CLASS_COLOURS[1]) and has_colour(right, CLASS_COLOURS[2])
    assert not has_colour(right, CLASS_COLOURS[3]) and not has_colour(
        right, CLASS_COLOURS[0]
    )  # 0.2 is below the threshold
    assert picture.shape[1] > 2 * 384  # small images are drawn larger


def test_odd_images_and_boxes_are_drawn(tmp_path):
    """No boxes, boxes outside, flipped and not finite, a label without name, a crowd; tall, wide and tiny images."""
    odd = found_of([[-50, -50, 900, 900], [40, 40, 10, 10], [float("nan")] * 4], [0, 25, 1], [0.9, 0.8, 0.7])
    nothing = found_of([], [], [])
    crowd = found_of([[1, 1, 5, 5]], [0], []) | {"name": 1, "iscrowd": torch.tensor([1])}
    del crowd["scores"]
    samples = [
        (torch.zeros(3, 300, 20, dtype=torch.uint8), odd, crowd),
        (torch.zeros(3, 20, 2000, dtype=torch.uint8), nothing, {"name": 2} | nothing),
        (torch.zeros(3, 1, 1, dtype=torch.uint8), odd, crowd),
    ]
    assert pixels(draw_grid(samples, ["only"], tmp_path / "odd.png")).shape[2] == 3
    assert pixels(draw_grid([], ["only"], tmp_path / "none.png")).size
    assert montage([], 2, gap=0).size == (1, 1) and montage([Image.new("RGB", (5, 3))], 2, gap=0).size == (5, 3)


def test_the_same_images_every_time(tmp_path):
    table = table_of(tmp_path, [[([1, 1, 20, 20], 0)] if i % 2 else [] for i in range(10)])
    assert choose_images(table, 3) == [1, 5, 9]  # those with boxes
    assert choose_images(table, 50) == [1, 3, 5, 7, 9]
    nothing = dict.fromkeys(table.image_ids().tolist(), found_of([], [], []))
    first, second = (draw_predictions(table, nothing, 4, tmp_path / "out" / name) for name in ("1.png", "2.png"))
    assert first.read_bytes() == second.read_bytes()


CONFIG = {"run": {"epochs": 100, "max_steps": None, "max_minutes": 4.75}, "eval": {"early_stopping_patience": 3}}
NEW = "--run.resume latest --run.resume_schedule new"


def test_every_ending_is_a_setting():
    groups = {"run": RunConfig, "eval": EvalConfig, "schedule": ScheduleConfig}
    for setting in ENDINGS:
        group, _, key = setting.partition(".")
        assert hasattr(groups[group](), key), setting
    assert in_words([]) == ""
    assert in_words(["run.max_steps", "schedule.max_decays"]) == (
        "training ended by run.max_steps (all steps are made) and schedule.max_decays (the learning rate has fallen so "
        "many times)")  # fmt: skip


@pytest.mark.parametrize(("ended_by", "run", "step", "epochs", "flags"), [
    (["run.max_minutes"], {}, 1279, 20, f"{NEW} --run.max_minutes 9.5"),
    (["run.max_minutes"], {}, 1279, 71, f"{NEW} --run.epochs 142 --run.max_minutes 9.5"),  # its epochs were in the way
    (["run.epochs"], {"max_minutes": None}, 1800, 100, f"{NEW} --run.epochs 200"),
    (["run.max_steps"], {"max_steps": 40, "max_minutes": None}, 40, 2, f"{NEW} --run.max_steps 80"),
    ([], {"max_steps": 90, "max_minutes": None}, 50, 60, f"{NEW} --run.epochs 120 --run.max_steps 100"),  # not known
    (["eval.early_stopping_patience"], {}, 50, 60, "--run.resume latest --eval.early_stopping_patience 6"),
    (["schedule.max_decays"], {"max_minutes": None}, 50, 10, NEW),  # the rates begin anew
])  # fmt: skip
def test_flags_train_for_as_long_again(ended_by, run, step, epochs, flags):
    assert " ".join(flags_that_go_on(ended_by, CONFIG | {"run": CONFIG["run"] | run}, step, epochs)) == flags


def test_a_notebook_is_told_the_flags_alone():
    flags = ["--run.resume", "latest"]
    for began in ([], ["/somewhere/ipykernel_launcher.py", "-f", "x.json"], ["-c"]):
        assert command_that_goes_on(flags, began, Path("runs/a/config.yaml")) == "--run.resume latest"
    command = command_that_goes_on(flags, ["my scripts/train_x.py", "--seed"], Path("runs/a/config_2.yaml"))
    assert command == "accelerate launch 'my scripts/train_x.py' --config runs/a/config_2.yaml --run.resume latest"
