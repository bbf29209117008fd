"""Run folders are made or refused in words, and written to safely; environment.json says what happened where."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from places import ROOT

from toolkit.base.errors import BadInput
from toolkit.run.folder import attempt, git_state, keep_staged, prepare_run_folder, staging, write_environment
from toolkit.run.status import run_status, write_status
from toolkit.run.writer import RunWriter

fcntl = pytest.importorskip("fcntl", reason="POSIX locks: not on Windows")


def test_a_run_that_never_began_does_not_stand_in_the_way(tmp_path):
    folder = prepare_run_folder(tmp_path / "deep" / "runs", "a")
    assert folder == tmp_path / "deep" / "runs" / "a"
    assert [path.name for path in folder.iterdir()] == ["checkpoints"]
    (folder / "config.yaml").write_text("run: {}")
    write_status(folder, "bad_input", "data.train does not exist")
    assert prepare_run_folder(tmp_path / "deep" / "runs", "a", "never") == folder


@pytest.mark.parametrize("content", ["metrics.jsonl", "checkpoints/step_000001/state.json", "status.json", "notes.txt"])
def test_never_refuses_an_earlier_run(tmp_path, content):
    path = tmp_path / "a" / content
    path.parent.mkdir(parents=True)
    path.write_text('{"state": "failed"}')
    with pytest.raises(BadInput, match="exists already.*--run.resume latest.*--run.name"):
        prepare_run_folder(tmp_path, "a", "never")
    if content != "status.json":
        with pytest.raises(BadInput), run_status(tmp_path / "a", True):
            raise BadInput("refused")
        assert not (tmp_path / "a" / "status.json").exists(), "a lost status is not made up for"
    assert prepare_run_folder(tmp_path, "a", "latest") == tmp_path / "a"
    assert path.read_text() == '{"state": "failed"}'


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a"])
def test_a_name_that_is_a_path_is_refused(tmp_path, name):
    with pytest.raises(BadInput, match="not a plain folder name"):
        prepare_run_folder(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_output_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "a").write_text("")
    for output in (tmp_path / "a", Path("/proc/nowhere"), tmp_path):
        with pytest.raises(BadInput, match="cannot be written.*--run.output_dir"):
            prepare_run_folder(output, "a")
    with pytest.raises(BadInput, match="Give a shorter --run.name"):
        prepare_run_folder(tmp_path, "a" * 300)


def test_what_was_staged_is_kept_or_gone(tmp_path):
    (tmp_path / "a").write_text("old")
    for is_accepted in (False, True):
        with staging(tmp_path, is_new=False, is_main=True) as place:
            (place / "a").write_text("new")
            (place / "b").write_text("new")
            if is_accepted:
                keep_staged(place, tmp_path)
        content = {path.name: path.read_text() for path in tmp_path.iterdir()}
        assert content == ({"a": "new", "b": "new"} if is_accepted else {"a": "old"})
    with staging(tmp_path, is_new=False, is_main=True) as place:
        place.rmdir()  # no failure of its own, where the run folder is gone
    with staging(tmp_path, is_new=True, is_main=True) as place:
        assert place == tmp_path


def test_the_environment_of_a_run_is_recorded(tmp_path):
    write_environment(tmp_path, seed=7, world_size=2, extra={"precision": "no"})
    read = json.loads((tmp_path / "environment.json").read_text())
    assert (read["seed"], read["processes"], read["precision"]) == (7, 2, "no")
    assert read["git"] == git_state(ROOT)
    assert (tmp_path / "code.diff").exists() == bool(read["git"] and read["git"]["dirty"])
    assert read["packages"]["torch"] == torch.__version__
    assert "accelerate" in read["packages"]
    hardware = read["hardware"]
    assert hardware["cpu"]
    assert hardware["memory_bytes"] > 2**20
    assert hardware["cpu_cores_usable"] >= 1
    assert len(hardware["gpus"]) == torch.cuda.device_count()


def test_git_state_of_a_checkout_and_of_none(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    assert git_state(tmp_path) is None
    git("init")
    assert git_state(tmp_path) is None, "nothing is committed yet"
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == clean | {"dirty": True}
    (tmp_path / "inside").mkdir()
    assert git_state(tmp_path / "inside") is None, "installed inside somebody else's checkout"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None, "there is no git"


def test_what_training_can_do_without_costs_a_line(tmp_path):
    said = []

    def broken():
        raise ZeroDivisionError("no pictures today\nor ever")

    def interrupted():
        raise KeyboardInterrupt

    assert attempt("the report", broken, tmp_path, said.append) is None
    assert attempt("the report", lambda: 3, tmp_path, said.append) == 3
    (line,) = said
    assert "the report failed (ZeroDivisionError: no pictures today); the run goes on without it" in line
    assert "Traceback" in (tmp_path / "errors.log").read_text().partition("or ever")[0]
    attempt("the report", broken, tmp_path / "gone", said.append)
    assert len(said) == 2
    with pytest.raises(KeyboardInterrupt):
        attempt("the report", interrupted, tmp_path, said.append)


def test_a_removed_run_folder_is_noticed_at_the_next_row(tmp_path):
    writer = RunWriter(tmp_path)
    writer.log({"step": 1})
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(BadInput, match="was removed while the run wrote to it"):
        writer.log({"step": 2})
