"""How the processes of a run meet, and what is refused or said before they train."""

import pytest
import torch
from accelerate.state import AcceleratorState

from toolkit.base.errors import BadInput
from toolkit.run import processes


@pytest.fixture
def asked(monkeypatch) -> list[dict]:
    """The arguments of each Accelerator that would be made; those of a launcher are unset."""
    made = []
    monkeypatch.setattr(processes, "Accelerator", lambda **kwargs: made.append(kwargs))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    return made


def set_all(monkeypatch, variables: str) -> None:
    for pair in variables.split():
        monkeypatch.setenv(*pair.split("="))


def test_a_process_that_never_comes_is_told_in_a_minute(monkeypatch):
    assert processes.MEET_S["alone"] <= 60
    monkeypatch.setitem(processes.MEET_S, "alone", 2)
    set_all(monkeypatch, "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=0")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(True)
    try:
        with pytest.raises(BadInput, match="the 2 processes cannot start together"):
            processes.start_accelerator(None)
    finally:
        AcceleratorState._reset_state(True)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_several_gpus_asked_for_where_there_is_none(monkeypatch, asked):
    """`accelerate launch --multi_gpu`, by what it sets; torchrun alone asks for nothing."""
    set_all(monkeypatch, "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2")
    processes.start_accelerator(None)
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    processes.start_accelerator(None)
    assert len(asked) == 2
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(BadInput, match="there is no GPU here.*ACCELERATE_USE_CPU=true torchrun"):
        processes.start_accelerator(None)


def test_fp16_is_not_used_on_a_cpu_and_that_is_said(monkeypatch, capsys, asked):
    # It is said at the first start of a process alone, and an earlier test may have made one here.
    monkeypatch.setattr(processes.PartialState, "_shared_state", {})
    processes.start_accelerator("fp16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    processes.start_accelerator(None)
    assert capsys.readouterr().out.count("fp16 needs a GPU") == 2
    processes.start_accelerator("bf16")
    assert [kwargs["mixed_precision"] for kwargs in asked] == ["no", "no", "bf16"]
    assert "fp16" not in capsys.readouterr().out
