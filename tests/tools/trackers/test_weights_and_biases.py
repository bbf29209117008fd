"""An offline W&B run gets every row once under one id, over a kill and a resume, and asks nobody."""

import json
import os
import pty
import subprocess
import sys
import warnings

import pytest
import wandb
from metric_rows import evaluation, log_rows, open_writer, run_and_resume, train_row
from places import SUPPORT
from tracked import offline_history, offline_records

from toolkit.run.metrics_log import read_metrics
from toolkit.tools.trackers import weights_and_biases


@pytest.fixture
def wandb_home(tmp_path, monkeypatch):
    """No account of the machine, no files outside the test; W&B reads its environment once per session."""
    wandb.teardown()
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    (tmp_path / "home").mkdir()
    (tmp_path / "run").mkdir()
    yield tmp_path / "run"
    wandb.teardown()


def history(folder) -> list[tuple[str, int, dict]]:
    """`offline_history`, once everything is in the files."""
    wandb.teardown()
    return offline_history(folder)


@pytest.fixture
def resumed(wandb_home, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_and_resume(wandb_home, "wandb")
    messages = [str(warning.message) for warning in caught]
    assert [message for message in messages if "tracker" in message or "W&B" in message] == []
    return wandb_home


def check_rows(folder) -> None:
    rows = history(folder)
    run_id = json.loads((folder / "tracker.json").read_text())["wandb"]["run_id"]
    assert {of_row for of_row, _, _ in rows} == {run_id}
    assert [step for _, step, _ in rows] == list(range(1, 10))
    assert [values["train/loss"] for _, _, values in rows] == [pytest.approx(1 / step) for step in range(1, 10)]
    validated = {step: values["val/bbox_AP"] for _, step, values in rows if "val/bbox_AP" in values}
    assert validated == {5: 0.05, 9: 0.09}
    assert [step for _, step, values in rows if "val/predictions/count" in values] == [5]


def check_description(found: dict) -> None:
    told = [found[key] for key in ("group", "job_type", "tags", "notes")]
    assert told == ["ablation", "train", ["small"], "why"]
    assert found["metrics"]["*"] == "step", "the optimizer step is the axis"
    assert found["summary"]["best/bbox_AP"] == 0.09
    assert found["summary"]["best/step"] == 9
    assert found["summary"]["val/bbox_AP"] == 0.09


def check_pictures(found: dict) -> None:
    (image,) = found["boxes"][5]
    assert image["ground_truth"] == [("star", 1, [1, 1, 5, 5], None)]
    assert image["predictions"] == [
        ("star 0.75", 1, [1, 1, 5, 4], 0.75),
        ("ring 0.25", 0, [0, 0, 2, 2], 0.25),
    ]
    tables = found["tables"]
    assert tables["val/class_AP_table"] == [["star", 1.0]]
    assert ["star", "star", 1] in tables["val/confusion_matrix_table"]
    assert tables["val/precision_recall_table"][:2] == [
        ["all classes", 1.0, 1.0],
        ["all classes", 1.0, 0.5],
    ]
    assert [0.75, 1.0, "star"] in tables["val/f1_table"]
    assert [row[0] for row in tables["val/images"]] == ["7"]


def check_artifacts(found: dict) -> None:
    (best,) = found["artifacts"]["model"]  # once, though the run was taken up again after its end
    assert set(best["aliases"]) == {"best", "latest", "step-9"}
    assert best["files"] == {"README.md"}
    assert best["digest"] == found["summary"]["best/artifact_digest"]
    (data,) = found["artifacts"]["dataset"]
    assert data["references"] == {f"data://{split}0123456789abcdef/images" for split in ("train", "val")}


def test_an_offline_run_gets_every_row_once_under_one_id(resumed):
    check_rows(resumed)
    found = offline_records(resumed)
    check_description(found)
    check_pictures(found)
    check_artifacts(found)


def test_another_folder_gets_another_run(wandb_home, monkeypatch):
    """A run that starts from another run's checkpoint is not that run."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    (wandb_home / "tracker.json").write_text(json.dumps({"wandb": {"run_id": "abcd1234"}}))  # but none of its rows
    log_rows(wandb_home, 6, trackers=["wandb"], rows_before=5)
    ((run_id, step, _),) = history(wandb_home)
    assert run_id != "abcd1234"
    assert step == 6


@pytest.mark.parametrize("key", [None, "0" * 40])
def test_without_account_or_network_it_goes_offline_with_one_warning(wandb_home, monkeypatch, key):
    monkeypatch.setattr(weights_and_biases, "INIT_TIMEOUT_S", 1)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nothing listens there
    with pytest.warns(UserWarning, match="W&B cannot be reached.*wandb sync") as caught:
        log_rows(wandb_home, 1, 2, trackers=["wandb"])
    assert len([warning for warning in caught if warning.category is UserWarning]) == 1
    assert [step for _, step, _ in history(wandb_home)] == [1, 2]


def test_a_failing_tracker_costs_one_warning_and_the_other_goes_on(wandb_home, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    writer = open_writer(wandb_home, "tensorboard", "wandb")
    writer.log(train_row(1))

    def fail(*args, **kwargs):
        raise ConnectionError("no answer\n  the server is gone")

    monkeypatch.setattr(writer._feeds[0].tracker, "log", fail)
    with pytest.warns(UserWarning, match="tensorboard failed and is .*no answer the server is gone") as caught:
        for step in (2, 3):
            writer.log(train_row(step))
        writer.show(evaluation(), step=3)
        writer.close()
    assert len([warning for warning in caught if warning.category is UserWarning]) == 1
    assert [row["step"] for row in read_metrics(wandb_home / "metrics.jsonl")] == [
        1,
        2,
        3,
    ]
    assert [step for _, step, _ in history(wandb_home)] == [1, 2, 3]


@pytest.mark.slow
def test_it_asks_nobody_for_an_account(wandb_home, monkeypatch):
    monkeypatch.delenv("WANDB_SILENT")
    monkeypatch.setenv("TERM", "xterm")
    terminal, other_end = pty.openpty()
    code = "import sys; from pathlib import Path; from metric_rows import log_rows; "
    code += "log_rows(Path(sys.argv[1]), 1, trackers=['wandb'])"
    streams = {"stdin": other_end, "stderr": other_end, "stdout": subprocess.DEVNULL}
    command = [sys.executable, "-c", code, str(wandb_home)]
    subprocess.run(command, **streams, timeout=60, check=True, cwd=SUPPORT)
    os.close(other_end)
    os.close(terminal)
    assert [step for _, step, _ in history(wandb_home)] == [1]
