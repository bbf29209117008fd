"""A run from its first to its last line, in this process: what it leaves, how it goes on, and what a refusal leaves."""

import importlib
import json
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import yaml
from accelerate.state import AcceleratorState
from flags import model_settings
from launching import SCRIPTS, flat
from places import ROOT

from toolkit.base.errors import BadInput
from toolkit.detectors.ssd.options import SsdOptions
from toolkit.models.final import load_detector_folder
from toolkit.run import session, session_begin, session_end, settings_check
from toolkit.run.command_line import parse_config
from toolkit.run.layers import COMMAND_LINE, Layer
from toolkit.run.settings_file import schedule_settings
from toolkit.run.training import Training
from toolkit.step import execution
from toolkit.tools.shapes import make_shapes

(SSD,) = (script for script in SCRIPTS if script.name == "train_ssd")


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """A function that trains an SSD of two steps with further settings, in a folder that is kept; returns its row."""
    folder = tmp_path_factory.mktemp("session")
    make_shapes(folder / "data", train_images=4, val_images=2, image_size=64)
    annotations = folder / "data" / "annotations"
    small = {
        "--config": SSD.config,
        "--data.train": annotations / "train.json",
        "--data.val": annotations / "val.json",
        "--data.format": "coco",
        "--data.image_size": 64,
        "--data.workers": 0,
        "--data.batch_size_per_device": 2,
        "--eval.pictures": 0,
        "--run.output_dir": folder / "runs",
        "--run.max_steps": 2,
        "--run.log_every": 1,
    }

    def run(**settings):
        given = {f"--{name.replace('__', '.')}": value for name, value in settings.items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(ROOT / "scripts"))
            patch.setattr(session_end, "_report", lambda *_: None)  # which takes seconds
            patch.setenv("ACCELERATE_USE_CPU", "true")
            module = importlib.import_module("train_ssd")
            config = parse_config(module.Config, flat(small | given), module.DEFAULT_CONFIG)
            try:
                return module.main(config)
            finally:
                AcceleratorState._reset_state(True)

    run.folder = folder / "runs"
    return run


@pytest.fixture(scope="module")
def whole(train):
    """The folder of a run of two steps, and the row that it returned."""
    row = train(run__name="whole")
    return train.folder / "whole", row


def rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def status(folder) -> dict:
    return json.loads((folder / "status.json").read_text())


def test_a_run_leaves_rows_a_status_and_final_weights(whole):
    folder, row = whole
    assert [r["step"] for r in rows(folder) if "train/loss" in r] == [1, 2]
    assert row["val/bbox_AP"] is not None
    assert (status(folder)["state"], status(folder)["step"]) == ("done", 2)
    assert status(folder)["ended_by"] == ["run.max_steps"]
    detector, _ = load_detector_folder(folder / "final")[:2]
    assert all(p.isfinite().all() for p in detector.parameters())


def test_the_settings_that_a_run_keeps_are_those_in_use(whole):
    """Without what stands for a choice that the run has made."""
    written = yaml.safe_load((whole[0] / "config.yaml").read_text())
    assert written["run"]["precision"] in ("no", "bf16")
    assert written["optim"]["compile"] is False
    assert written["model"]["backbone"] == "lcnet_035"
    names = {f"model.{key}" for key in written["model"]}
    assert names == {*model_settings("ssd"), "model.architecture"}


def test_a_finished_run_that_is_resumed_trains_nothing(whole, train):
    folder, _ = whole
    before = (folder / "final" / "model.safetensors").read_bytes()
    train(run__name="whole", run__resume="latest")
    assert status(folder)["step"] == 2
    assert len([r for r in rows(folder) if "train/loss" in r]) == 2
    assert (folder / "final" / "model.safetensors").read_bytes() == before


CAPTURED = {"backend": "aot_eager", "dynamic": False}  # as for CUDA graphs, but no kernel is compiled


@pytest.mark.parametrize("graphed", [CAPTURED, pytest.param(execution.GRAPHED, marks=pytest.mark.slow)])
def test_a_run_with_graphs_goes_on_to_the_bit(train, monkeypatch, graphed):
    monkeypatch.setattr(execution, "GRAPHED", graphed)
    name = f"graphed_{graphed['backend']}"
    given = {"optim__compile": "graphs", "run__max_steps": 4, "run__save_every": 1, "run__keep": 4}
    given |= {"data__multi_scale": [], "optim__bn_momentum_final": "null"}
    train(run__name=name, **given)
    folder = train.folder / name
    whole = (folder / "final" / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "final")
    for step in (2, 3, 4):
        shutil.rmtree(folder / "checkpoints" / f"step_{step:06d}")
    train(run__name=name, **given, run__resume="latest")
    assert status(folder)["step"] == 4
    assert (folder / "final" / "model.safetensors").read_bytes() == whole


def test_what_graphs_cannot_hold_is_refused_at_once(whole, train):
    given = {"data__multi_scale": [64, 96], "optim__accumulation_steps": 2, "optim__bn_momentum_final": 0.01}
    with pytest.raises(BadInput) as refusal:
        train(run__name="refused_graphs", optim__compile="graphs", loss__teacher=whole[0], **given)
    expected = ("bn_momentum_final", "multi_scale", "accumulation_steps", "teacher")
    assert len(refusal.value.problems) == len(expected)
    for problem, name in zip(refusal.value.problems, expected, strict=True):
        assert name in problem


def test_an_evaluation_alone_writes_a_run_without_checkpoints(whole, train):
    folder, row = whole
    again = train(run__name="evaluated", run__resume=folder, run__eval_only="true")
    assert again["val/bbox_AP"] == row["val/bbox_AP"]
    assert not list((train.folder / "evaluated" / "checkpoints").iterdir())


def test_a_refused_start_leaves_its_reason_alone(whole, train):
    with pytest.raises(BadInput, match="no such metric"):
        train(run__name="refused", eval__metric_for_best="bbox_APP")
    assert status(train.folder / "refused")["state"] == "bad_input"
    assert not (train.folder / "refused" / "metrics.jsonl").exists()
    with pytest.raises(BadInput, match="exists already"):
        train(run__name="whole")


def test_what_cannot_be_exported_is_said_before_the_first_step(train, monkeypatch):
    def failing(*_):
        raise ValueError("an operator that is not known")

    monkeypatch.setattr("toolkit.tools.export.write.trace", failing)
    with pytest.raises(BadInput, match="ssdlite cannot be exported .*an operator that is not known"):
        train(run__name="unexportable", run__export="true")
    assert not (train.folder / "unexportable" / "metrics.jsonl").exists()


def test_a_run_of_a_sweep_is_named_after_its_trial(monkeypatch):
    """One command starts all trials."""
    config = parse_config(importlib.import_module("scripts.train_ssd").Config, ["--run.name", "a"], None)
    monkeypatch.setattr(session, "agent_run_id", lambda: "x7")
    assert session._named_after_trial(config).run.name == "a-x7"
    monkeypatch.setattr(session, "agent_run_id", lambda: None)
    assert session._named_after_trial(config).run.name == "a"


def test_nothing_changes_in_a_run_that_is_new():
    class New:
        stored = None

    assert session_begin._changes(New, None, {"run": {"seed": 1}}) == []


@pytest.mark.parametrize(
    ("asked_lr", "follows", "verdicts"),
    [(0.1, False, []), (0.2, False, ["used"]), (0.2, True, ["ignored"])],
)
def test_changes_are_those_of_the_schedule_of_the_checkpoint(asked_lr, follows, verdicts):
    """Whatever a start that was killed before it saved has written to the run folder."""

    def settings(lr):
        return {"run": {"seed": 1, "max_steps": 9}, "optim": {"lr": lr}}

    plan = {"budget": None, "settings": schedule_settings(settings(0.1))}
    checkpoint = SimpleNamespace(reading=lambda part: nullcontext(plan))
    config = SimpleNamespace(run=SimpleNamespace(eval_only=False))
    s = SimpleNamespace(stored=settings(0.2), checkpoint=checkpoint, asked_seed=1, config=config)
    t = SimpleNamespace(plan=SimpleNamespace(follows_checkpoint=follows))
    changed = session_begin._changes(s, t, settings(asked_lr))
    assert [change.verdict for change in changed] == verdicts
    assert t.plan.follows_checkpoint == (follows or asked_lr == 0.1)


@pytest.mark.parametrize("divided_by", ["image", "", 1])
def test_a_loss_of_ones_own_is_divided_by_what_there_is(divided_by):
    with pytest.raises(BadInput, match='expected "images", "boxes" or None'):
        Training.announce(None, "mine", 1.0, divided_by)


def test_null_is_a_setting_not_given_in_a_file_alone():
    """Of the model, as the config.yaml of a run has it."""
    kinds = {"model": SsdOptions}
    for where, problems in (("config.yaml", 0), (COMMAND_LINE, 1)):
        layer = Layer(where, {"model.iou_threshold": None})
        assert len(settings_check.check(layer, kinds)) == problems


def test_a_family_has_the_architectures_of_one_script():
    assert {"ssd", "ssdlite"} <= set(settings_check.family_of(SsdOptions))
    assert "yolov3" not in settings_check.family_of(SsdOptions)
