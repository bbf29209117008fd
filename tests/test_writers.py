"""What metrics.jsonl, TensorBoard and an offline W&B run really hold, over kills and resumes."""

import inspect
import json
import math
import os
import posixpath
import pty
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from places import TESTS
from tracked import offline_history, offline_records

from toolkit.base.errors import BadInput
from toolkit.run.console import (
    Progress,
    averages_line,
    console_line,
    progress_bar,
    short_number,
    training_time_line,
)
from toolkit.run.metrics_log import MetricsFollower, MetricsLog, read_metrics, repair_rows
from toolkit.run.plan import length_warnings
from toolkit.run.writer import DataFacts, RunDescription, RunWriter, agent_run_id, tracker_names
from toolkit.step.meters import Meters
from toolkit.tools.trackers import weights_and_biases
from toolkit.tools.trackers.of_accelerate import mlflow_names, options


def train_row(step: int, **values) -> dict:
    return {"step": step, "epoch": 0, "time_s": float(step), "train/loss": 1 / step, "train/lr/main": 1e-4} | values


def val_row(step: int) -> dict:
    return {"step": step, "epoch": 0, "time_s": float(step), "val/bbox_AP": step / 100, "val/AP/ring": None}


def write_rows(path: Path, *rows: dict, keep_rows: int = 0) -> MetricsLog:
    log = MetricsLog(path, keep_rows=keep_rows)
    for row in rows:
        log.write(row)
    log.close()
    return log


@settings(max_examples=50)  # each example waits for the disk
@given(st.dictionaries(st.text(min_size=1).filter(lambda k: k != "nonfinite"), st.floats() | st.integers() | st.none()))
def test_rows_are_strict_json_and_come_back(tmp_path_factory, values):
    row = values | {"step": 3}
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    write_rows(path, row)

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    (line,) = path.read_text().splitlines()
    json.loads(line, parse_constant=refuse)
    assert repr(sorted(read_metrics(path)[0].items())) == repr(sorted(row.items()))


def test_nonfinite_values_are_null_and_named(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.write({"step": 1, "a": math.nan, "b": -math.inf, "c": np.float32(0.5), "d": None})
    row = json.loads((tmp_path / "metrics.jsonl").read_text())  # flushed: read before it is closed
    assert row == {"step": 1, "a": None, "b": None, "c": 0.5, "d": None, "nonfinite": {"a": "nan", "b": "-inf"}}


def test_resume_keeps_as_many_rows_as_the_checkpoint_knew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    known = write_rows(path, train_row(5), train_row(10)).rows  # the checkpoint is written between a step's two rows
    write_rows(path, val_row(10), train_row(15), keep_rows=known)
    with open(path, "a") as file:
        file.write('{"step": 20, "tr')  # torn by a kill
    assert [row["step"] for row in read_metrics(path)] == [5, 10, 10, 15]
    write_rows(path, val_row(10), keep_rows=known)
    assert read_metrics(path) == [train_row(5), train_row(10), val_row(10)]
    write_rows(path)
    assert path.read_text() == ""


def test_a_file_that_grows_is_read_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFollower(path)
    assert file.new_rows() == []
    log = MetricsLog(path)
    log.write(train_row(1))
    assert file.new_rows() == [train_row(1)] and file.new_rows() == []
    with open(path, "r+b") as earlier:
        earlier.write(b"#")  # what was read is not looked at again
    log.write(train_row(2))
    with open(path, "ab") as torn:
        torn.write(b'{"step": 3, "train')
        torn.flush()
        assert file.new_rows() == [train_row(2)]
        torn.write(b'/loss": 1.0}\n')
    assert [row["step"] for row in file.new_rows()] == [3]
    log.close()
    with open(path, "r+b") as earlier:
        earlier.write(b"{")
    for rows in ((), (train_row(4),)):  # put in its place twice: the system may give the first one's number again
        write_rows(path, *rows, keep_rows=2)
    assert [row["step"] for row in file.new_rows()] == [1, 2, 4]
    with open(path, "a") as bad:
        bad.write("nothing\n")
    with pytest.raises(BadInput, match="line 4"):
        file.new_rows()
    file.close()


def test_rows_that_are_not_there_are_said_and_the_file_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, *(train_row(step) | {"loss": math.nan} for step in (1, 2, 3)))
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert repair_rows(path, 3) == repair_rows(path, 2) == [] and path.read_bytes() == whole
    for torn in (whole[:-5], whole + b'{"step": 4, "tr'):  # by a kill; only the first lacks a row that counts
        path.write_bytes(torn)
        assert bool(repair_rows(path, 3)) == (torn == whole[:-5])
        (tmp_path / "metrics.jsonl.damaged").unlink(missing_ok=True)
    damages = {
        "2 readable rows of the 3 that the checkpoint counts (0 unreadable, 1 missing)": lines[:2],
        "2 readable rows of the 3 that the checkpoint counts (1 unreadable, 0 missing)": [*lines[::2], b"\0\0\n"],
        "0 readable rows of the 3": [b"[]\n", b'{"step": "x"}\n', b"[" * 100_000 + b"\n"],
    }
    for number, (said, damaged) in enumerate(damages.items()):
        path.write_bytes(b"".join(damaged))
        (note,) = repair_rows(path, 3)
        assert said in note and path.read_bytes() == b"".join(line for line in damaged if line in lines)
        kept = tmp_path / ("metrics.jsonl" + ".damaged" * (number + 1))
        assert kept.name in note and kept.read_bytes() == b"".join(damaged)
    path.write_bytes(whole + b"x\n")
    assert repair_rows(path, 3) == [] and repair_rows(path, 3, keep_later=True), "rows after it count where they stay"
    path.unlink()
    assert "gone" in repair_rows(path, 3)[0] and path.read_text() == ""
    path.unlink()
    assert repair_rows(path, 0) == [] and not path.exists()


def test_which_rows_are_kept_tracked_and_written(tmp_path):
    writer = RunWriter(tmp_path, trackers=["tensorboard"], is_main=False)
    writer.log(train_row(1))
    writer.show(evaluation(), step=1)
    writer.close()
    assert list(tmp_path.iterdir()) == [] and writer.state_dict() == {"rows": 0} and not writer.shows
    earlier = log_rows(tmp_path, 5).state_dict()["rows"]
    log_rows(tmp_path, 10, rows_before=earlier)
    writer = RunWriter(tmp_path, rows_before=earlier, eval_only=True)
    writer.log(val_row(5))
    writer.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [train_row(5), train_row(10), val_row(5)]
    log_rows(tmp_path, 15, trackers=["tensorboard"], rows_before=writer.state_dict()["rows"])
    assert [step for step, _ in scalars(tmp_path)["train/loss"]] == [5, 10, 15]


def test_bad_metrics_files_and_a_full_disk_are_bad_input(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"epoch": 2}\n')
    with pytest.raises(BadInput, match="line 2"):
        MetricsLog(path, keep_rows=2)
    with pytest.raises(BadInput, match="missing.*cannot be written"):
        MetricsLog(tmp_path / "missing" / "metrics.jsonl")
    if Path("/dev/full").exists():
        log = MetricsLog(path)
        log._file = open("/dev/full", "a")  # noqa: SIM115
        with pytest.raises(BadInput, match="No space left.*--run.resume latest"):
            log.write(train_row(1))


def open_writer(folder: Path, *trackers: str, **options) -> RunWriter:
    config = {"optim": {"lr": 1e-4, "name": None}, "data": {"sizes": [1, 2]}}
    data = {split: DataFacts(f"{split}0123456789abcdef", "images", 9, 20, 2) for split in ("train", "val")}
    about = RunDescription(config=config, name="named", group="ablation", tags=["small"], notes="why", job_type="train")
    return RunWriter(folder, trackers=trackers, about=about, data=data, **options)


def log_rows(folder: Path, *steps: int, trackers: Sequence[str] = (), **options) -> RunWriter:
    writer = open_writer(folder, *trackers, **options)
    for step in steps:
        writer.log(train_row(step))
    writer.close()
    return writer


def evaluation():
    """One image with an annotated and two found boxes, of two classes."""
    from toolkit.tools.report.evaluation_display import EvaluationDisplay, ShownImage
    from toolkit.tools.report.thresholds import ThresholdSweep  # here: what imports this file anew need not wait for it

    image = ShownImage(7, Image.new("RGB", (8, 6), (255, 0, 0)), np.array([[1.0, 1, 5, 5]]), np.array([1]),
                       np.array([[1.0, 1, 5, 4], [0, 0, 2, 2]]), np.array([1, 0]), np.array([0.75, 0.25]))  # fmt: skip
    numbers = np.array([[0.75, 0.25], [1.0, 0.5], [1.0, 1.0], [1.0, 2 / 3]])
    sweep = ThresholdSweep(*numbers, total=1)
    curves = {"all classes": sweep, "star": sweep}
    matrix = np.array([[0, 0, 0], [0, 1, 0], [0, 0, 0]])
    names = ["ring", "star"]
    return EvaluationDisplay(names, [image], image.picture, curves, {"star": 1.0}, matrix, names, 0.5)


def run_and_resume(folder: Path, *trackers: str) -> None:
    """Rows 1 to 7, a checkpoint after 5, then a second writer that takes up that checkpoint and goes on to 9."""
    final, best = folder / "final", {"step": 9, "bbox_AP": 0.09}
    final.mkdir()
    (final / "README.md").write_text("the card")
    writer = open_writer(folder, *trackers)
    for row in (*map(train_row, range(1, 6)), val_row(5)):
        writer.log(row)
    writer.show(evaluation(), step=5)
    rows_before = writer.state_dict()["rows"]
    run_id = json.loads((folder / "tracker.json").read_text())[trackers[0]]["run_id"]
    for step in (6, 7):
        writer.log(train_row(step))
    writer.close("preempted")
    writer = open_writer(folder, *trackers, rows_before=rows_before)
    writer.show(evaluation(), step=5)  # shown already
    rows = [*map(train_row, range(6, 10)), val_row(9)]
    for row in rows:
        writer.log(row)
    writer.keep_final(final, best)
    writer.close()
    writer = open_writer(folder, *trackers, rows_before=writer.state_dict()["rows"])  # again after its end
    writer.keep_final(final, best)
    writer.close()
    assert writer.state_dict() == {"rows": 11}
    assert json.loads((folder / "tracker.json").read_text())[trackers[0]]["run_id"] == run_id
    assert read_metrics(folder / "metrics.jsonl") == [*map(train_row, range(1, 6)), val_row(5), *rows]


def events_of(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=False).Reload()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = events_of(folder)
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_gets_every_row_once(tmp_path):
    run_and_resume(tmp_path, "tensorboard")
    found = scalars(tmp_path)
    assert found["train/loss"] == [(step, pytest.approx(1 / step)) for step in range(1, 10)]
    assert found["val/bbox_AP"] == [(5, pytest.approx(0.05)), (9, pytest.approx(0.09))]
    assert "val/AP/ring" not in found
    from tensorboard.plugins.hparams import plugin_data_pb2

    assert all(path.is_file() for path in (tmp_path / "tensorboard").iterdir()), "one folder of event files"
    events = events_of(tmp_path)
    assert [(i.step, i.width, i.height) for i in events.Images("val/predictions")] == [(5, 8, 6)]
    assert [len(events.Images(f"val/{name}")) for name in ("f1", "confusion_matrix", "class_AP")] == [1, 1, 1]
    (curve,) = events.Tensors("val/precision_recall/star")  # true and false positives, ..., precision, recall
    values = np.array(curve.tensor_proto.float_val).reshape(6, -1)
    assert values[:, [-1, 64, 10]].T.tolist() == [[0, 0, 0, 1, 1, 0], [1, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0.5, 1]]
    assert found["best/bbox_AP"][-1] == (9, pytest.approx(0.09)) and found["best/step"][-1] == (9, 9)
    plugin = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    settings = plugin_data_pb2.HParamsPluginData.FromString(plugin).session_start_info.hparams
    assert settings["optim.lr"].number_value == 1e-4 and settings["data.sizes"].string_value == "[1, 2]"
    assert "_hparams_/session_end_info" in events.summary_metadata


@pytest.mark.parametrize("asked", [False, True])
def test_losses_before_their_weights_go_to_trackers_only_when_asked_for(tmp_path, asked):
    unscaled = {f"{kind}/loss_ce_unscaled": 0.5 for kind in ("train", "epoch", "val")}
    writer = RunWriter(tmp_path, trackers=["tensorboard"], track_unscaled=asked)
    writer.log(train_row(1) | unscaled | {"train/loss_ce": 1.0})
    writer.close()
    tags = scalars(tmp_path).keys()
    assert "train/loss_ce" in tags and unscaled.keys() & tags == (unscaled.keys() if asked else set())
    assert unscaled.items() <= read_metrics(tmp_path / "metrics.jsonl")[0].items(), "the file has them always"


def test_a_failing_tracker_costs_one_warning(wandb_home, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    writer = open_writer(wandb_home, "tensorboard", "wandb")
    writer.log(train_row(1))

    def fail(*args, **kwargs):
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(writer._feeds[0].tracker, "log", fail)
    with pytest.warns(UserWarning, match="tensorboard failed and is switched off.*server is gone") as caught:
        for step in (2, 3):
            writer.log(train_row(step))
        writer.show(evaluation(), step=3)
        writer.close()
    assert len([w for w in caught if w.category is UserWarning]) == 1
    assert [row["step"] for row in read_metrics(wandb_home / "metrics.jsonl")] == [1, 2, 3]
    assert [step for _, step, _ in history(wandb_home)] == [1, 2, 3], "the other tracker goes on"


def test_a_program_that_accelerate_knows_keeps_name_and_group_over_a_resume(tmp_path, monkeypatch):
    """Trackio in its own words; it, and MLflow, are tried for real where they are installed, see docs/tracking.md."""
    module, runs = ModuleType("trackio"), []
    module.config = SimpleNamespace(update=lambda values, allow_val_change: None)
    run = SimpleNamespace(log=lambda values, step: None, finish=lambda: None, config={})
    module.init = lambda **options: runs.append(options) or run
    monkeypatch.setitem(sys.modules, "trackio", module)
    PartialState()
    about = RunDescription(project="p", name="mine", group="g", tags=["t"])
    writer = RunWriter(tmp_path, trackers=["trackio"], about=about)
    writer.log(train_row(1))
    rows_before = writer.state_dict()["rows"]
    writer.close("preempted")
    RunWriter(tmp_path, trackers=["trackio"], about=replace(about, name="other"), rows_before=rows_before).close()
    begun = {"project": "p", "name": "mine", "group": "g"}
    assert runs == [begun | {"resume": "never"}, begun | {"resume": "allow"}]


@pytest.mark.parametrize("name", sorted({str(name) for name in LOGGER_TYPE_TO_CLASS} - {"wandb", "tensorboard"}))
def test_accelerate_s_trackers_are_told_name_and_id(tmp_path, name):
    about = RunDescription(project="p", name="mine", group="g", tags=["t"], notes="why")
    fresh, later = (options(name, about, tmp_path, *known) for known in ((None, False), ("id7", True)))
    kind = LOGGER_TYPE_TO_CLASS[name]
    place = {"logging_dir": "."} if kind.requires_logging_directory else {}
    inspect.signature(kind).bind("p", **place, **later)  # a TypeError if Accelerate takes none of them
    assert fresh != later and ("id7" in later.values() or later.get("resume")), "it goes on"
    assert "mine" in fresh.values() or name in ("aim", "comet_ml"), "those are named when they have begun"


def test_names_of_classes_never_switch_mlflow_off(tmp_path):
    classes = ["traffic light (3)", "a&b", "a|b", "日本", "..", "a//b", "a/", "./x", "v1.2", "a: b"]
    names = mlflow_names(f"val/AP/{name}" for name in classes)
    assert names[:4] == ["val/AP/traffic light _3_", "val/AP/a_b", "val/AP/a_b_2", "val/AP/日本"]
    assert names[-2:] == ["val/AP/v1.2", "val/AP/a: b"] and len(set(names)) == len(names)
    for name in names:  # MLflow's rules
        assert re.fullmatch(r"[/\w.\- :]*", name) and posixpath.normpath(name) == name and not name.startswith("/")


def test_a_tracker_that_cannot_start_costs_one_warning(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.warns(UserWarning, match="tensorboard failed") as caught:
        log_rows(tmp_path, 1, trackers=["tensorboard"])
    assert len(caught) == 1 and len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    with pytest.raises(BadInput, match="(?s)wnadb: no such tracker.*none, .*tensorboard.*wandb.*aim: its package is"):
        tracker_names(["wandb", "wnadb", "aim"])
    with pytest.raises(BadInput, match=r"several are a list: '\[wandb, tensorboard\]'"):
        tracker_names("wandb,tensorboard")
    assert tracker_names("none") == tracker_names([]) == []
    assert tracker_names(["wandb", "none", "wandb"]) == ["wandb"] == tracker_names("wandb")


@pytest.fixture
def wandb_home(tmp_path, monkeypatch):
    """No account of the machine, no files outside the test; W&B reads its environment once per session."""
    import wandb

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


def history(folder: Path) -> list[tuple[str, int, dict]]:
    """`offline_history`, once everything is in the files."""
    import wandb

    wandb.teardown()
    return offline_history(folder)


def test_a_run_id_of_the_environment_counts_in_a_sweep_alone(monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "trial")
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    assert agent_run_id() is None
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    assert agent_run_id() == "trial"


def test_offline_wandb_gets_every_row_once_under_one_id(wandb_home, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_and_resume(wandb_home, "wandb")
    assert [str(w.message) for w in caught if "tracker" in str(w.message) or "W&B" in str(w.message)] == []
    rows = history(wandb_home)
    assert len({run_id for run_id, _, _ in rows}) == 1
    assert rows[0][0] == json.loads((wandb_home / "tracker.json").read_text())["wandb"]["run_id"]
    assert [step for _, step, _ in rows] == list(range(1, 10))
    assert [values["train/loss"] for _, _, values in rows] == [pytest.approx(1 / step) for step in range(1, 10)]
    assert {step: values["val/bbox_AP"] for _, step, values in rows if "val/bbox_AP" in values} == {5: 0.05, 9: 0.09}
    assert [step for _, step, values in rows if "val/predictions/count" in values] == [5]
    found = offline_records(wandb_home)
    assert (found["group"], found["job_type"], found["tags"], found["notes"]) == ("ablation", "train", ["small"], "why")
    assert found["metrics"]["*"] == "step", "the optimizer step is the axis"
    assert found["summary"]["best/bbox_AP"] == 0.09 and found["summary"]["best/step"] == 9
    assert found["summary"]["val/bbox_AP"] == 0.09
    (image,) = found["boxes"][5]
    assert image["ground_truth"] == [("star", 1, [1, 1, 5, 5], None)]
    assert image["predictions"] == [("star 0.75", 1, [1, 1, 5, 4], 0.75), ("ring 0.25", 0, [0, 0, 2, 2], 0.25)]
    assert found["tables"]["val/class_AP_table"] == [["star", 1.0]]
    assert ["star", "star", 1] in found["tables"]["val/confusion_matrix_table"]
    assert found["tables"]["val/precision_recall_table"][:2] == [["all classes", 1.0, 1.0], ["all classes", 1.0, 0.5]]
    assert [0.75, 1.0, "star"] in found["tables"]["val/f1_table"]
    assert [row[0] for row in found["tables"]["val/images"]] == ["7"]
    (best,) = found["artifacts"]["model"]  # once, though the run was taken up again after its end
    assert set(best["aliases"]) == {"best", "latest", "step-9"} and best["files"] == {"README.md"}
    assert best["digest"] == found["summary"]["best/artifact_digest"]
    (data,) = found["artifacts"]["dataset"]
    assert data["references"] == {f"data://{split}0123456789abcdef/images" for split in ("train", "val")}


def test_another_folder_gets_another_run(wandb_home, monkeypatch):
    """A run that starts from another run's checkpoint is not that run."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    (wandb_home / "tracker.json").write_text(json.dumps({"wandb": {"run_id": "abcd1234"}}))  # but none of its rows
    log_rows(wandb_home, 6, trackers=["wandb"], rows_before=5)
    assert [(run_id == "abcd1234", step) for run_id, step, _ in history(wandb_home)] == [(False, 6)]


@pytest.mark.parametrize("key", [None, "0" * 40])
def test_wandb_without_account_or_network_goes_offline_with_one_warning(wandb_home, monkeypatch, key):
    monkeypatch.setattr(weights_and_biases, "INIT_TIMEOUT_S", 1)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nothing listens there
    with pytest.warns(UserWarning, match="W&B cannot be reached.*wandb sync") as caught:
        log_rows(wandb_home, 1, 2, trackers=["wandb"])
    assert len([w for w in caught if w.category is UserWarning]) == 1
    assert [step for _, step, _ in history(wandb_home)] == [1, 2]


@pytest.mark.slow
def test_wandb_asks_nobody_for_an_account(wandb_home, monkeypatch):
    monkeypatch.delenv("WANDB_SILENT")
    monkeypatch.setenv("TERM", "xterm")
    terminal, other_end = pty.openpty()
    code = "import sys; from test_writers import *; log_rows(Path(sys.argv[1]), 1, trackers=['wandb'])"
    streams = {"stdin": other_end, "stderr": other_end, "stdout": subprocess.DEVNULL}
    command = [sys.executable, "-c", code, str(wandb_home)]
    subprocess.run(command, **streams, timeout=60, check=True, cwd=TESTS)
    os.close(other_end)
    os.close(terminal)
    assert [step for _, step, _ in history(wandb_home)] == [1]


def test_the_lines_of_a_training():
    """Five epochs of 40 steps, then batches twice as large: 20 steps an epoch, for 100 more."""
    assert Progress(201, 300, 5, 20, recut=-100).epochs == 10 and Progress(201, 300, 5, 20).epochs == 15
    assert str(Progress(201, 300, 5, 20, recut=-100)) == "epoch 6  step 201/300"
    means = {"loss": 2.0, "loss_ce": 1.5, "loss_ce_0": 9.0, "loss_ce_unscaled": 9.0, "class_error": 50.0}
    assert averages_line(1, means, 90.0) == "epoch 2 averages  loss 2.00  ce 1.50 class_error 50.0  in 0:01:30"
    assert training_time_line(3725.4, 100) == "Training time 1:02:05 (37.254 s / step)"


ROW = {
    "step": 120, "epoch": 3, "train/loss": 2.34567, "train/loss_ce": 1.2, "train/loss_ce_unscaled": 0.6,
    "train/loss_ce_0": 9.0, "train/loss_ce_dn_0": 9.0, "train/loss_giou_enc": 9.0, "train/loss_bbox": 0.5,
    "train/class_error": 12.0, "train/lr/backbone": 1e-5, "train/lr/main": 1e-4, "train/grad_norm": 0.123,
    "time/data_s": 0.0123, "time/step_s": 0.4567, "time/eta_s": 3725.0, "mem/peak_mb": 1234.5,
}  # fmt: skip


def meters_of(row: dict) -> Meters:
    """Meters that have met this row, and one with twice its values."""
    meters = Meters()
    for factor in (1.0, 2.0):
        meters.update({key.removeprefix("train/"): factor * row[key] for key in row if "/lr/" not in key})
    return meters


def test_console_line():
    progress = Progress(120, 4000, 3, 40)
    assert console_line(ROW, meters_of(ROW), progress) == (
        "epoch 4  step 120/4000  eta 1:02:05  loss 2.35  ce 1.20 bbox 0.500 class_error 24.0  lr 0.0001  "
        "0.457 s/step  1.2 GiB"
    )
    waiting = console_line(ROW | {"time/data_s": 0.2}, meters_of(ROW), progress)
    assert waiting.endswith("  0.457 s/step (data 44%)  1.2 GiB")
    row = {"step": 1, "train/loss": math.nan, "train/loss_rpn_box_reg": 1.0, "time/eta_s": math.nan}
    assert console_line(row, meters_of(row), Progress(1, 1, 0, 1)) == "epoch 1  step 1/1  loss nan  rpn_box_reg 1.00"


def test_a_console_line_never_wraps():
    """Whatever a detector calls its losses and however many it has; the last ones are left out, then the tail."""
    many = ROW | {f"train/loss_{'abcdefghij'[i] * (i + 1)}": 123.456 for i in range(10)}
    meters, progress = meters_of(many), Progress(1234567, 7654321, 299, 25515)
    for width in range(10, 300):
        line = console_line(many, meters, progress, width)
        assert len(line) <= width and ("..." in line) == (width < 231), line
    tail = "  ce 1.20 bbox 0.500 a 123 ...  lr 0.0001  0.457 s/step  1.2 GiB"
    assert console_line(many, meters, progress).endswith(tail)
    assert console_line(many, meters, progress, 60).endswith("eta 1:02:05  loss 2.35  ...")
    assert console_line(many, meters, progress, 20) == "epoch 300  step 1..."


def test_numbers_of_the_console_have_three_digits():
    shown = {0.0: "0", 1e-4: "1.00e-04", 0.001234: "0.00123", 1.0: "1.00", 99.96: "100", 123.4: "123", 9999.0: "9999",
             12345.0: "1.23e+04", -0.5: "-0.500", math.inf: "inf"}  # fmt: skip
    assert {value: short_number(value) for value in shown} == shown


@pytest.mark.parametrize(("terminal", "enabled"), [(False, True), (True, False), (True, True)])
def test_progress_shows_a_bar_with_the_time_left_on_a_terminal_alone(capsys, monkeypatch, terminal, enabled):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    bar = progress_bar(10, initial=3, enabled=enabled)
    bar.update(2)
    bar.refresh()
    bar.write("a line")
    bar.close()
    out, err = capsys.readouterr()
    assert out == "a line\n" and (("5/10" in err and "<" in err) if terminal and enabled else err == "")


def test_a_run_that_ends_too_soon_is_warned_of():
    assert length_warnings(1000, 100, 500) == {} == length_warnings(1, 0, 1)
    assert length_warnings(100, 100, 50)["warm-up"].startswith("warning: training ends inside the warm-up,")
    assert "after 30 of the 50 steps of an epoch" in length_warnings(30, 0, 50)["epoch"]
    assert length_warnings(30, 100, 50).keys() == {"warm-up", "epoch"}
