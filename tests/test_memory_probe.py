"""The memory probe counts what the optimizer will keep, and leaves no trace."""

import copy

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from toolkit.step.memory import state_stand_in
from toolkit.step.optim import build_optimizer


@pytest.mark.parametrize(("name", "momentum"), [("adamw", 0.9), ("adam", 0.9), ("sgd", 0.9), ("sgd", 0.0)])
def test_the_stand_in_is_as_large_as_the_state_and_changes_nothing(name, momentum):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1, bias=False))
    model[1].weight.requires_grad_(False)
    groups = [{"params": list(layer.parameters()), "lr": 0.1} for layer in model]
    optimizer = build_optimizer(name, groups, momentum=momentum)
    prepared = Accelerator(cpu=True).prepare(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    random, had = torch.get_rng_state(), copy.deepcopy(optimizer.state_dict())

    found = state_stand_in(prepared.optimizer)
    assert str(optimizer.state_dict()) == str(had) and all(p.grad is None for p in model.parameters())
    found += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.get_rng_state().equal(random)

    model(torch.rand(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor) and v.dim()]
    assert sorted(map(torch.Tensor.numel, found)) == sorted(map(torch.Tensor.numel, kept))
    assert bool(kept) == (name != "sgd" or momentum > 0)
