"""State of a script's own (`t.extra`) is saved and restored to the bit."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from toolkit.base.errors import BadInput
from toolkit.run.parts import Extra


def filled() -> Extra:
    extra = Extra(Accelerator(cpu=True))
    extra["critic"] = nn.Linear(2, 1)
    extra["optimizer"] = torch.optim.Adam(extra["critic"].parameters(), lr=0.5)
    extra["seen"] = 0
    extra["best"] = {"value": 0.5, "boxes": [torch.ones(2)]}
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
    second["seen"] = 0
    second["best"] = 0
    assert not second.not_taken_up
    assert second["seen"] == 2
    assert second["best"]["value"] == 0.5
    assert second["optimizer"].param_groups[0]["lr"] == 0.5
    tensors = dict(first.tensors())
    torch.testing.assert_close(dict(second.tensors()), tensors, rtol=0, atol=0)
    assert {"critic.weight", "best.boxes.0"} <= {name for _, name in tensors}


def test_what_cannot_be_saved_or_does_not_fit_is_refused():
    extra = filled()
    with pytest.raises(BadInput, match=r't.extra\["names"\]: a set cannot be saved'):
        extra["names"] = {"a"}
    other = Extra(extra._accelerator)
    other.load_state_dict(extra.state_dict())
    with pytest.raises(BadInput, match="does not fit the state in the checkpoint"):
        other["critic"] = nn.Linear(3, 1)
