"""A process that fails ends the others within a minute, and the main process knows the first cause."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from launching import free_port
from processes import FORK_SERVER

from toolkit.base.distributed import all_reduce, world
from toolkit.base.errors import BadInput, FailedElsewhere, Preempted, StoppedByGuard
from toolkit.run.processes import start_accelerator, wait_at_most
from toolkit.run.watchdog import PORT_VARIABLE, _server, watchdog

SLOW_S = 600  # what a process does that never notices by itself


class Foreign(Exception):
    pass


FAULTS = {
    "defect": Foreign("of ours"),
    "bad input": BadInput("a lie"),
    "guard": StoppedByGuard("nan"),
    "signal": Preempted("SIGTERM"),
}


def fail(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise FAULTS[how]


def rank_of(rank, size, port, failing, how, others, folder, grace_s, watchdog_port):
    """One process of a run: the failing one fails, the others wait in a collective or are busy elsewhere."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    os.environ[PORT_VARIABLE] = watchdog_port
    torch.set_num_threads(1)
    accelerator = start_accelerator(None)
    if how == "hangs":
        wait_at_most(1 / 60)
        os.dup2(os.open(f"{folder}.stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
    assert accelerator.num_processes == size == world()[1]

    def record(state, reason):
        Path(folder, str(rank)).write_text(json.dumps([state, reason]))

    try:
        with watchdog(record, grace_s):
            all_reduce(torch.ones(1))
            if rank == failing:
                time.sleep(SLOW_S if how == "hangs" else 0.5)
                fail(how)
            if others == "busy":
                time.sleep(SLOW_S)
            if how != "done":
                all_reduce(torch.ones(1))
    except (BadInput, StoppedByGuard, Preempted, FailedElsewhere, Foreign) as error:
        record(type(error).__name__, str(error))
        os._exit(getattr(error, "exit_code", 1))
    record("done", "")


def ended(folder, failing, how, others, size=2):
    """(exit codes, what each rank recorded)."""
    watchdog_port = os.environ.get(PORT_VARIABLE, "")  # the fork server has the variables of its own start
    told = (free_port(), failing, how, others, folder, 2.0, watchdog_port)
    ranks = [FORK_SERVER.Process(target=rank_of, args=(rank, size, *told)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    words = {int(path.name): json.loads(path.read_text()) for path in folder.iterdir()}
    return [process.exitcode for process in ranks], words


@pytest.mark.parametrize(("failing", "others"), [(0, "waiting"), (1, "busy")])
def test_a_killed_process_ends_the_other(tmp_path, failing, others):
    codes, words = ended(tmp_path, failing, "killed", others)
    assert codes[failing] == -signal.SIGKILL
    assert codes[1 - failing] == 1
    assert f"rank {failing} failed: it ended without a message" in words[1 - failing][1]


@pytest.mark.parametrize(
    ("how", "code", "name", "cause"),
    [
        ("defect", 1, "failed", "Foreign: of ours"),
        ("bad input", 2, "bad_input", "a lie"),
        ("guard", 3, "stopped_by_guard", "nan"),
        ("signal", 85, "preempted", "SIGTERM"),
    ],
)
def test_the_first_cause_is_what_the_main_process_records(tmp_path, how, code, name, cause):
    codes, words = ended(tmp_path, 1, how, "busy")
    assert codes == [code, code]
    assert words[0][0] == name
    assert words[0][1].startswith("rank 1 failed: ")
    assert cause in words[0][1]


def test_a_broken_collective_is_told_by_its_cause_and_all_of_three_end(tmp_path):
    codes, words = ended(tmp_path, 1, "defect", "waiting", size=3)
    assert codes == [1, 1, 1]
    assert {rank: word[0] for rank, word in words.items()} == {0: "FailedElsewhere", 1: "Foreign", 2: "FailedElsewhere"}
    assert words[0][1] == words[2][1] == "rank 1 failed: Foreign: of ours"


@pytest.mark.slow
@pytest.mark.parametrize("hanging", [0, 1])
def test_a_process_that_hangs_is_ended_and_shows_where(tmp_path, hanging):
    codes, words = ended(tmp_path, hanging, "hangs", "waiting", size=3)
    assert codes == [1, 1, 1]
    for _, reason in words.values():
        assert "has waited longer than run.hang_minutes for another process" in reason
    assert "in rank_of" in Path(f"{tmp_path}.stderr{hanging}").read_text(), "the line at which it hangs"


def test_processes_that_are_done_leave_in_peace(tmp_path):
    codes, words = ended(tmp_path, None, "done", "waiting", size=3)
    assert codes == [0, 0, 0]
    assert {word[0] for word in words.values()} == {"done"}


def test_a_given_port_that_is_taken_ends_all_with_one_sentence(tmp_path, monkeypatch):
    """It is given where a firewall lets through what it was told."""
    port = free_port()
    monkeypatch.setenv(PORT_VARIABLE, str(port))
    server = _server(str(port), 1)
    assert server.getsockname()[1] == port
    codes, words = ended(tmp_path, None, "done", "waiting")
    server.close()
    assert codes == [2, 2]
    for name, reason in words.values():
        assert name == "BadInput"
        assert f"{PORT_VARIABLE} is {port}" in reason
        assert "already in use" in reason


@pytest.mark.parametrize("wrong", ["http", "65536", "-1"])
def test_a_port_that_cannot_be_one_is_refused(wrong):
    with pytest.raises(BadInput, match=f"{PORT_VARIABLE} is {wrong}.*from 1 to 65535"):
        _server(wrong, 1)
