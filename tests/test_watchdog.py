"""A process that fails ends the others within a minute, and the main process knows the first cause."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launching import free_port
from processes import FORK_SERVER

from toolkit.base.distributed import all_reduce, world
from toolkit.base.errors import BadInput, FailedElsewhere, Preempted, StoppedByGuard
from toolkit.run import watchdog as watchdog_module
from toolkit.run.processes import start_accelerator, wait_at_most
from toolkit.run.watchdog import PORT_VARIABLE, watchdog

SLOW_S = 600  # what a process does that never notices by itself


class Foreign(Exception):
    pass


def fail(how):
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise {"defect": Foreign("of ours"), "bad input": BadInput("a lie"), "guard": StoppedByGuard("nan"),
           "signal": Preempted("SIGTERM")}[how]  # fmt: skip


def rank_of(rank, size, port, failing, how, others, folder, grace_s, watchdog_port):
    """One process of a run: the failing one fails, the others wait in a collective or are busy elsewhere."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                   "LOCAL_WORLD_SIZE": str(size), "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true",
                   "OMP_NUM_THREADS": "1", PORT_VARIABLE: watchdog_port}  # fmt: skip
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


def ended(folder, failing, how, others, size=2, grace_s=2.0):
    """(exit codes, what each rank recorded)."""
    port = free_port()
    watchdog_port = os.environ.get(PORT_VARIABLE, "")  # the fork server has the variables of its own start
    told = (port, failing, how, others, folder, grace_s, watchdog_port)
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
    assert codes[failing] == -signal.SIGKILL and codes[1 - failing] == 1
    assert f"rank {failing} failed: it ended without a word" in words[1 - failing][1]


@pytest.mark.parametrize(("how", "code", "name", "cause"), [
    ("defect", 1, "failed", "Foreign: of ours"), ("bad input", 2, "bad_input", "a lie"),
    ("guard", 3, "stopped_by_guard", "nan"), ("signal", 85, "preempted", "SIGTERM"),
])  # fmt: skip
def test_the_first_cause_is_what_the_main_process_records(tmp_path, how, code, name, cause):
    codes, words = ended(tmp_path, 1, how, "busy")
    assert codes == [code, code]
    assert words[0][0] == name and words[0][1].startswith("rank 1 failed: ") and cause in words[0][1]


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
    assert all("has waited longer than run.hang_minutes for another process" in word[1] for word in words.values())
    assert "in rank_of" in Path(f"{tmp_path}.stderr{hanging}").read_text(), "the line at which it hangs"


def test_the_port_is_the_one_that_is_given(tmp_path, monkeypatch):
    """Where a firewall lets through what it was told. One that is taken ends all processes with one sentence."""
    port = free_port()
    monkeypatch.setenv(PORT_VARIABLE, str(port))
    server = watchdog_module._server(str(port), 1)
    assert server.getsockname()[1] == port
    codes, words = ended(tmp_path, None, "done", "waiting")
    server.close()
    assert codes == [2, 2] and {word[0] for word in words.values()} == {"BadInput"}
    assert all(f"{PORT_VARIABLE} is {port}" in word[1] and "already in use" in word[1] for word in words.values())
    monkeypatch.delenv(PORT_VARIABLE)
    codes, words = ended(tmp_path, None, "done", "waiting", size=3)
    assert codes == [0, 0, 0] and {word[0] for word in words.values()} == {"done"}, "they leave in peace"
    for wrong in ("http", "65536", "-1"):
        with pytest.raises(BadInput, match=f"{PORT_VARIABLE} is {wrong}.*from 1 to 65535"):
            watchdog_module._server(wrong, 1)


def test_a_process_that_never_comes_is_told_in_a_minute(monkeypatch):
    from toolkit.run import processes

    monkeypatch.setitem(processes.MEET_S, "alone", 2)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                        "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert processes.MEET_S["alone"] <= 60 and not dist.is_initialized()
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    try:
        with pytest.raises(BadInput, match="the 2 processes cannot start together"):
            processes.start_accelerator(None)
    finally:
        AcceleratorState._reset_state(True)
