"""The files of a report about a number that is not finite."""

import math
import os

import pytest
import torch

from toolkit.base.batch import Batch
from toolkit.base.errors import BadInput
from toolkit.tools.replay import nan_report
from toolkit.tools.replay.diagnosis import nothing_found
from toolkit.tools.replay.nan_report import load_report, write_nan_report

TIED = torch.ones(3)
STATE = {"a": TIED, "b": TIED}


def batch_of(*targets) -> Batch:
    images = torch.zeros(1, 3, 4, 4, dtype=torch.uint8).expand(
        len(targets),
        -1,
        -1,
        -1,
    )
    return Batch(images, torch.ones(len(targets), 2, dtype=torch.int64), list(targets))


BATCHES = [batch_of({"image_id": 1})]


def written(folder, batches=BATCHES, extra=None, **given):
    report = nothing_found() | {
        "step": 3,
        "rank": 0,
        "reason": "loss is nan",
        "policy": "stop",
        "image_ids": [[1, "b.png"]],
        "losses": {"loss": math.nan},
    }
    return write_nan_report(folder, report | given, batches, STATE, extra)


def test_a_window_returns_as_it_was(tmp_path):
    empty = {
        "image_id": 1,
        "boxes": torch.zeros(0, 4),
        "labels": torch.zeros(0, dtype=torch.int64),
    }
    broken = {
        "image_id": "b.png",
        "boxes": torch.tensor([[0.0, math.nan, 1.0, 2.0]]),
        "size": torch.tensor([4, 4]),
    }
    batches = [batch_of(empty, broken), *(batch_of({"image_id": i}) for i in range(11))]
    folder = written(tmp_path, batches, {"critic": {"weight": TIED}})
    report, again, state, extra = load_report(folder)
    assert math.isnan(float(report["losses"]["loss"]))
    assert "NaN" not in (folder / "report.json").read_text()
    assert str(again) == str(batches)
    assert state.keys() == {"a", "b"}
    assert extra["critic"]["weight"].equal(TIED)


def test_only_the_first_and_the_newest_reports_are_kept(tmp_path, monkeypatch):
    """A policy that skips makes one for each window, for as long as the run lasts."""
    for limit in ("FIRST_REPORTS", "NEWEST_REPORTS", "MAX_FULL_REPORTS"):
        monkeypatch.setattr(nan_report, limit, 2)
    lines = []
    for number, step in enumerate((30, 10, 20, 10, 20, 40)):  # a rollback makes steps again
        for rank in (1, 10):
            path = written(tmp_path, step=step, rank=rank)
            os.utime(path / "report.json", ns=(number, number))
        lines.append(nan_report._forget_reports(path.with_name(path.name.replace("rank10", "rank1"))))
    kept = sorted(str(path.relative_to(tmp_path / "nan")) for path in tmp_path.glob("nan/*/rank1*"))
    of_rank_1 = [name for name in kept if "rank10" not in name]
    assert of_rank_1 == ["step_000010/rank1", "step_000020/rank1_2", "step_000030/rank1", "step_000040/rank1"]
    assert len(kept) == 4 + 6  # the other process minds its own
    assert lines[:4] == [""] * 4
    assert "(removed: step_000020/rank1; the first 2 and the newest 2 are kept)" in lines[4]
    assert "step_000010/rank1_2" in lines[5]


def test_later_reports_overwrite_nothing_and_leave_the_weights_out(tmp_path, monkeypatch):
    monkeypatch.setattr(nan_report, "MAX_FULL_REPORTS", 2)
    folders = [written(tmp_path) for _ in range(3)]
    assert [folder.name for folder in folders] == ["rank0", "rank0_2", "rank0_3"]
    assert [(folder / "model.safetensors").exists() for folder in folders] == [True, True, False]
    with pytest.raises(BadInput, match="model.safetensors"):
        load_report(folders[2])


def test_what_is_not_a_report_is_refused(tmp_path):
    with pytest.raises(BadInput, match="report.json, batch_0.safetensors, model.safetensors"):
        load_report(tmp_path)
    folder = written(tmp_path)
    (folder / "report.json").write_text("{")
    with pytest.raises(BadInput, match="the report cannot be read"):
        load_report(folder)


def test_training_goes_on_without_a_report_that_cannot_be_written(tmp_path):
    (tmp_path / "nan").write_text("a file where the folder would be")
    with pytest.warns(UserWarning, match="could not be written"):
        assert written(tmp_path) is None
