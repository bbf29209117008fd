"""Run folders are made or refused in words; status.json and environment.json say what happened where."""

import errno
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import ROOT

from toolkit.base.errors import BadInput
from toolkit.base.files import write_json_atomic
from toolkit.run.folder import git_state, keep_staged, prepare_run_folder, staging, write_environment
from toolkit.run.status import EXIT_CODES, FolderLock, read_status, run_status, write_status
from toolkit.tools.report.facts import read_records

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


def test_output_that_cannot_be_written(tmp_path):
    for name in ("", ".", "..", "a/b", "/a"):
        with pytest.raises(BadInput, match="not a plain folder name"):
            prepare_run_folder(tmp_path, name)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").write_text("")
    for output in (tmp_path / "a", Path("/proc/nowhere"), tmp_path):
        with pytest.raises(BadInput, match="cannot be written.*--run.output_dir"):
            prepare_run_folder(output, "a")
    with pytest.raises(BadInput, match="Give a shorter --run.name"):
        prepare_run_folder(tmp_path, "a" * 300)


def test_status_says_state_and_exit_code(tmp_path):
    codes = {"running": None, "done": 0, "failed": 1, "bad_input": 2, "stopped_by_guard": 3, "preempted": 85}
    assert codes == EXIT_CODES
    for state, code in codes.items():
        write_status(tmp_path, state, "why", step=3, best=math.nan)
        status = read_status(tmp_path)
        assert (status["state"], status["exit_code"], status["reason"]) == (state, code, "why")
        assert status["step"] == 3 and status["best"] is None
    with pytest.raises(ValueError, match="crashed"):
        write_status(tmp_path, "crashed")
    before = (tmp_path / "status.json").read_text()
    for bad in ({"a": math.nan}, {"a": object()}):
        with pytest.raises((TypeError, ValueError)):
            write_json_atomic(tmp_path / "status.json", bad)
    assert (tmp_path / "status.json").read_text() == before, "written whole or not at all"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    (tmp_path / "status.json").write_text("{")
    assert read_status(tmp_path) == {}


def test_environment(tmp_path):
    write_environment(tmp_path, seed=7, world_size=2, extra={"precision": "no"})
    read = json.loads((tmp_path / "environment.json").read_text())
    assert (read["seed"], read["processes"], read["precision"]) == (7, 2, "no")
    assert read["git"] == git_state(ROOT)
    assert (tmp_path / "code.diff").exists() == bool(read["git"] and read["git"]["dirty"])
    assert read["packages"]["torch"] == torch.__version__ and "accelerate" in read["packages"]
    assert read["hardware"]["memory_bytes"] > 2**20 and read["hardware"]["cpu_cores_usable"] >= 1
    assert read["hardware"]["cpu"] and len(read["hardware"]["gpus"]) == torch.cuda.device_count()


def test_git_state_of_a_checkout_and_of_none(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    assert git_state(tmp_path) is None
    git("init")
    assert git_state(tmp_path) is None  # nothing committed yet
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "a")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == clean | {"dirty": True}
    (tmp_path / "inside").mkdir()
    assert git_state(tmp_path / "inside") is None  # installed inside somebody else's checkout
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None  # there is no git


def content(folder: Path) -> dict:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_locked_for_everyone_else(tmp_path):
    with FolderLock() as lock:
        folder = prepare_run_folder(tmp_path, "a", "never", lock)
        holder = json.loads((folder / ".lock").read_text())
        assert (holder["host"], holder["pid"]) == (socket.gethostname(), os.getpid()) and not lock.note
        before = content(tmp_path)
        for resume in ("never", "latest"):
            message = f"in use by process {os.getpid()} on .*, since {holder['started'][:4]}"
            with FolderLock() as second, pytest.raises(BadInput, match=message):
                prepare_run_folder(tmp_path, "a", resume, second)
        assert content(tmp_path) == before
    assert not (folder / ".lock").exists()


def test_the_lock_of_a_process_that_died_is_taken_over(tmp_path):
    """That a worker which outlives it does not hold the folder: tests/scripts/test_signals.py."""
    (tmp_path / ".lock").write_text('{"pid": 1}')
    before = content(tmp_path)
    with FolderLock() as lock:
        lock.take(tmp_path)
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert content(tmp_path) == before, "a start that is refused leaves the folder as it was"
    with FolderLock() as lock:
        lock.take(tmp_path)
        lock.keep = True
    assert content(tmp_path) == {}


def test_a_run_whose_process_was_killed_is_not_running(tmp_path):
    """SIGKILL, SIGBUS or a lack of memory leave `status.json` and `.lock` as they were; the lock itself is gone."""
    code = (
        "import os, sys; from pathlib import Path; from toolkit.run.status import *; folder = Path(sys.argv[1]);"
        "lock = FolderLock(); lock.take(folder); write_status(folder, 'running', step=3); print(flush=True);"
        "sys.stdin.read(); os.kill(os.getpid(), 7)"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert read_status(tmp_path)["state"] == "running"
        process.stdin.close()
        process.wait()
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"
    status = read_status(tmp_path)
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 1, 3)
    assert "ended without a word" in status["reason"] and read_records(tmp_path)[1] == status
    with FolderLock() as lock:  # whoever goes on holds it
        lock.take(tmp_path)
        assert read_status(tmp_path)["state"] == "running"
        lock.keep = True
    (tmp_path / ".lock").write_text('{"host": "elsewhere"}')
    assert read_status(tmp_path)["state"] == "running", "whether it holds the lock cannot be seen from here"


def test_a_file_removed_by_its_holder_in_the_meantime_is_no_lock(tmp_path, monkeypatch):
    """The one who has it removes it at the end; who has opened it before holds nothing."""
    first, taken, holding = FolderLock(), [], []
    first.take(tmp_path)
    flock = fcntl.flock

    def late(descriptor, operation):
        if not taken:
            first.__exit__()
        taken.append(operation)
        flock(descriptor, operation)
        holding.append(descriptor)

    monkeypatch.setattr(fcntl, "flock", late)
    with FolderLock() as second:
        second.take(tmp_path)
        assert taken.count(fcntl.LOCK_EX | fcntl.LOCK_NB) == 2
        assert os.path.samestat(os.fstat(holding[-1]), os.stat(tmp_path / ".lock"))


def test_a_disk_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with FolderLock() as lock:
        lock.take(tmp_path)
        assert "cannot be locked here (No locks available)" in lock.note


def test_what_was_staged_is_kept_or_gone(tmp_path):
    (tmp_path / "a").write_text("old")
    for accepted in (False, True):
        with staging(tmp_path, is_new=False, is_main=True) as place:
            (place / "a").write_text("new")
            (place / "b").write_text("new")
            if accepted:
                keep_staged(place, tmp_path)
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == (
            {"a": "new", "b": "new"} if accepted else {"a": "old"}
        )
    with staging(tmp_path, is_new=False, is_main=True) as place:
        place.rmdir()  # no failure of its own, where the run folder is gone
    with staging(tmp_path, is_new=True, is_main=True) as place:
        assert place == tmp_path
