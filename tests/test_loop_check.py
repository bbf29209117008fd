"""What the loop is asked about its windows, and state of one's own, without a run around them.

python -m pytest tests/test_loop_check.py
"""

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from toolkit.errors import BadInput
from toolkit.step.extra import Extra
from toolkit.step.loop_check import LINES, LoopCheck


class InTurn(torch.optim.SGD):
    """A step that does something and then calls that of its class."""

    def step(self, closure=None):
        return super().step(closure)


def whole_window(check: LoopCheck, counts: dict[str, int], optimizer: torch.optim.Optimizer, updates: int = 1) -> None:
    check.begin(2)
    counts["snapshot"] += 1
    check.done.update({"add": 2, "norm": 1, "accepts": 1})
    for _ in range(updates):
        optimizer.step()
    counts["step"] += 1
    check.done.update({"note_step": 1, "evaluate_and_save": 1})


def checked(kind: type[torch.optim.Optimizer]) -> tuple[LoopCheck, dict[str, int], torch.optim.Optimizer]:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # from here on PyTorch's class calls the hooks itself
    optimizer, counts = kind([nn.Parameter(torch.zeros(1))], lr=0.1), {"snapshot": 0, "step": 0}
    check = LoopCheck(lambda: dict(counts))
    check.watch(optimizer)
    return check, counts, optimizer


@pytest.mark.parametrize("kind", [torch.optim.SGD, InTurn])
def test_an_update_counts_once_whatever_it_calls(kind):
    check, counts, optimizer = checked(kind)
    for _ in range(3):
        whole_window(check, counts, optimizer)
        assert check.end()
    whole_window(check, counts, optimizer, updates=2)
    with pytest.raises(BadInput, match="was done 2 times"):
        check.end()


def test_an_update_that_failed_is_forgotten():
    check, counts, optimizer = checked(torch.optim.SGD)
    check.begin(2)
    for _ in range(2):
        with pytest.raises(BadInput, match="comes too early"):
            optimizer.step()
        check.begin(2)
    check.refused()
    assert check.end()
    whole_window(check, counts, optimizer)
    assert check.end()


def test_whatever_is_left_out_is_named_and_may_be_left_out():
    names = ("norm", "note_step", "evaluate_and_save")
    check, counts, optimizer = checked(torch.optim.SGD)
    check.leave_out(names)
    check.begin(1)
    counts["snapshot"] += 1
    check.done.update(["add", "accepts"])
    optimizer.step()
    with pytest.raises(BadInput) as error:
        check.end()
    assert LINES["step"][0] in str(error.value) and not any(LINES[name][0] in str(error.value) for name in names)
    with pytest.raises(BadInput, match="there is no 'emma'"):
        check.leave_out(["emma"])


def filled() -> Extra:
    extra = Extra(Accelerator(cpu=True))
    extra["critic"] = nn.Linear(2, 1)
    extra["optimizer"] = torch.optim.Adam(extra["critic"].parameters(), lr=0.5)
    extra["seen"], extra["best"] = 0, {"value": 0.5, "boxes": [torch.ones(2)]}
    return extra


def test_state_of_ones_own_is_restored_to_the_bit():
    first = filled()
    for _ in range(2):
        first.zero_grad()
        first["critic"](torch.ones(3, 2)).sum().backward()
        first["optimizer"].step()
    first["seen"] = 2
    second = Extra(first._accelerator)
    second.load_state_dict(first.state_dict())
    assert second.not_taken_up == ["best", "critic", "optimizer", "seen"]
    second["critic"] = nn.Linear(2, 1)
    second["optimizer"] = torch.optim.Adam(second["critic"].parameters())
    second["seen"] = second["best"] = 0
    assert not second.not_taken_up and second["seen"] == 2 and second["best"]["value"] == 0.5
    for (name, one), (other, two) in zip(first.tensors(), second.tensors(), strict=True):
        assert name == other and torch.equal(one, two)
    assert second["optimizer"].param_groups[0]["lr"] == 0.5
    names = [name for name, _ in first.tensors()]
    assert {"critic.weight", "best.boxes.0"} <= set(names) and any("exp_avg" in name for name in names)


def test_what_cannot_be_saved_or_does_not_fit_is_refused():
    extra = filled()
    with pytest.raises(BadInput, match=r't.extra\["names"\]: a set cannot be saved'):
        extra["names"] = {"a"}
    saved = extra.state_dict()
    other = Extra(extra._accelerator)
    other.load_state_dict(saved)
    with pytest.raises(BadInput, match="does not fit what the checkpoint holds"):
        other["critic"] = nn.Linear(3, 1)
