"""status.json says how a run goes or ended, and the lock of its folder who writes to it."""

import errno
import json
import math
import os
import signal
import socket

import pytest
from processes import FORK_SERVER

from toolkit.base.errors import BadInput
from toolkit.base.files import write_json_atomic
from toolkit.run.folder import prepare_run_folder
from toolkit.run.status import EXIT_CODES, FolderLock, read_status, write_status
from toolkit.tools.report.facts import read_records

fcntl = pytest.importorskip("fcntl", reason="POSIX locks: not on Windows")


def contents(folder) -> dict:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_status_says_state_and_exit_code(tmp_path):
    codes = {"running": None, "done": 0, "failed": 1, "bad_input": 2, "stopped_by_guard": 3, "preempted": 85}
    assert codes == EXIT_CODES
    for state, code in codes.items():
        write_status(tmp_path, state, "why", step=3, best=math.nan)
        status = read_status(tmp_path)
        assert (status["state"], status["exit_code"], status["reason"]) == (state, code, "why")
        assert (status["step"], status["best"]) == (3, None)
    with pytest.raises(ValueError, match="crashed"):
        write_status(tmp_path, "crashed")


@pytest.mark.parametrize("value", [math.nan, object()])
def test_a_file_is_written_whole_or_not_at_all(tmp_path, value):
    write_status(tmp_path, "done")
    before = contents(tmp_path)
    with pytest.raises((TypeError, ValueError)):
        write_json_atomic(tmp_path / "status.json", {"a": value})
    assert contents(tmp_path) == before


def test_a_status_that_cannot_be_read_is_empty(tmp_path):
    (tmp_path / "status.json").write_text("{")
    assert read_status(tmp_path) == {}


def test_a_folder_is_locked_for_everyone_else(tmp_path):
    with FolderLock() as lock:
        folder = prepare_run_folder(tmp_path, "a", "never", lock)
        holder = json.loads((folder / ".lock").read_text())
        assert (holder["host"], holder["pid"]) == (socket.gethostname(), os.getpid())
        assert not lock.note
        before = contents(tmp_path)
        for resume in ("never", "latest"):
            message = f"in use by process {os.getpid()} on .*, since {holder['started'][:4]}"
            with FolderLock() as second, pytest.raises(BadInput, match=message):
                prepare_run_folder(tmp_path, "a", resume, second)
        assert contents(tmp_path) == before
    assert not (folder / ".lock").exists()


def test_the_lock_of_a_process_that_died_is_taken_over(tmp_path):
    (tmp_path / ".lock").write_text('{"pid": 1}')
    before = contents(tmp_path)
    with FolderLock() as lock:
        lock.take(tmp_path)
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert contents(tmp_path) == before, "a start that is refused leaves the folder as it was"
    with FolderLock() as lock:
        lock.take(tmp_path)
        lock.keep = True
    assert contents(tmp_path) == {}


def run_and_die(folder, other) -> None:
    """In a process of its own: run, until the other side says something."""
    lock = FolderLock()
    lock.take(folder)
    write_status(folder, "running", step=3)
    other.send("running")
    other.recv()
    os.kill(os.getpid(), signal.SIGBUS)


def test_a_run_whose_process_was_killed_is_not_running(tmp_path):
    """SIGKILL, SIGBUS or a lack of memory leave `status.json` and `.lock` as they were; the lock itself is gone."""
    ours, theirs = FORK_SERVER.Pipe()
    process = FORK_SERVER.Process(target=run_and_die, args=(tmp_path, theirs))
    process.start()
    ours.recv()
    assert read_status(tmp_path)["state"] == "running"
    ours.send("die")
    process.join()
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"
    status = read_status(tmp_path)
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 1, 3)
    assert "ended without a message" in status["reason"]
    assert read_records(tmp_path)[1] == status
    with FolderLock() as lock:  # whoever goes on holds it
        lock.take(tmp_path)
        assert read_status(tmp_path)["state"] == "running"
        lock.keep = True
    (tmp_path / ".lock").write_text('{"host": "elsewhere"}')
    assert read_status(tmp_path)["state"] == "running", "whether it holds the lock cannot be seen from here"


def test_a_file_removed_by_its_holder_in_the_meantime_is_not_a_lock(tmp_path, monkeypatch):
    """The one who has it removes it at the end; who has opened it before holds nothing."""
    first = FolderLock()
    first.take(tmp_path)
    operations = []
    holding = []
    flock = fcntl.flock

    def late(descriptor, operation):
        if not operations:
            first.__exit__()
        operations.append(operation)
        flock(descriptor, operation)
        holding.append(descriptor)

    monkeypatch.setattr(fcntl, "flock", late)
    with FolderLock() as second:
        second.take(tmp_path)
        assert operations.count(fcntl.LOCK_EX | fcntl.LOCK_NB) == 2
        assert os.path.samestat(os.fstat(holding[-1]), os.stat(tmp_path / ".lock"))


def test_a_disk_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with FolderLock() as lock:
        lock.take(tmp_path)
        assert "cannot be locked here (No locks available)" in lock.note
