"""Programs that Accelerate knows are told name, group and id, and go on with them after a resume."""

import inspect
import posixpath
import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from metric_rows import train_row

from toolkit.run.writer import RunDescription, RunWriter
from toolkit.tools.trackers.of_accelerate import mlflow_names, options

ABOUT = RunDescription(project="p", name="mine", group="g", tags=["t"], notes="why")
OTHERS = sorted({str(name) for name in LOGGER_TYPE_TO_CLASS} - {"wandb", "tensorboard"})


def test_a_program_keeps_name_and_group_over_a_resume(tmp_path, monkeypatch):
    """Trackio in its own words; it, and MLflow, are tried for real where they are installed, see docs/tracking.md."""
    runs = []
    run = SimpleNamespace(log=lambda values, step: None, finish=lambda: None, config={})
    module = ModuleType("trackio")
    module.config = SimpleNamespace(update=lambda values, allow_val_change: None)
    module.init = lambda **options: runs.append(options) or run
    monkeypatch.setitem(sys.modules, "trackio", module)
    PartialState()
    writer = RunWriter(tmp_path, trackers=["trackio"], about=ABOUT)
    writer.log(train_row(1))
    rows_before = writer.state_dict()["rows"]
    writer.close("preempted")
    RunWriter(
        tmp_path,
        trackers=["trackio"],
        about=replace(ABOUT, name="other"),
        rows_before=rows_before,
    ).close()
    begun = {"project": "p", "name": "mine", "group": "g"}
    assert runs == [begun | {"resume": "never"}, begun | {"resume": "allow"}]


@pytest.mark.parametrize("name", OTHERS)
def test_accelerate_s_trackers_are_told_name_and_id(tmp_path, name):
    fresh = options(name, ABOUT, tmp_path, None, False)
    later = options(name, ABOUT, tmp_path, "id7", True)
    kind = LOGGER_TYPE_TO_CLASS[name]
    place = {"logging_dir": "."} if kind.requires_logging_directory else {}
    inspect.signature(kind).bind("p", **place, **later)  # a TypeError if Accelerate takes none of them
    assert fresh != later
    assert "id7" in later.values() or later.get("resume"), "it goes on"
    assert "mine" in fresh.values() or name in ("aim", "comet_ml"), "those are named when they have begun"


def test_names_of_classes_never_switch_mlflow_off():
    classes = [
        "traffic light (3)",
        "a&b",
        "a|b",
        "日本",
        "..",
        "a//b",
        "a/",
        "./x",
        "v1.2",
        "a: b",
    ]
    names = mlflow_names(f"val/AP/{name}" for name in classes)
    assert names[:4] == [
        "val/AP/traffic light _3_",
        "val/AP/a_b",
        "val/AP/a_b_2",
        "val/AP/日本",
    ]
    assert names[-2:] == ["val/AP/v1.2", "val/AP/a: b"]
    assert len(set(names)) == len(names)
    for name in names:  # MLflow's rules
        assert re.fullmatch(r"[/\w.\- :]*", name)
        assert posixpath.normpath(name) == name
        assert not name.startswith("/")
