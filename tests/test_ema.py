"""The moving average of weights."""

import copy

import pytest
import torch
from torch import nn

from toolkit.step.ema import Ema


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.tied = self.conv
        self.register_buffer("counter", torch.tensor(0))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("grid", torch.arange(3.0), persistent=False)

    def forward(self, x):
        return self.norm(self.conv(x))


@pytest.mark.parametrize("warmup", [False, True])
def test_average_follows_the_formula_for_floats_and_copies_the_rest(warmup):
    model, generator = Net().train(), torch.Generator().manual_seed(0)
    ema, expected = Ema(model, 0.9, warmup), copy.deepcopy(model.state_dict())
    for step in range(12):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape, generator=generator)
        model(torch.randn(2, 3, 5, 5, generator=generator))
        model.counter += 3
        model.flag.fill_(step % 2 == 0)
        model.grid += 1
        decay = min(0.9, (1 + step) / (10 + step)) if warmup else 0.9
        ema.update(model)
        for name, value in model.state_dict().items():
            averaged = value.is_floating_point() and name != "mask"
            expected[name] = decay * expected[name] + (1 - decay) * value if averaged else value.clone()
    torch.testing.assert_close(dict(ema.module.state_dict()), dict(expected), rtol=1e-5, atol=1e-6)
    assert ema.module.counter == 36 and ema.module.norm.num_batches_tracked == 12
    assert torch.equal(ema.module.mask, model.mask) and torch.equal(ema.module.grid, model.grid)
    assert not ema.module.training and model.training and ema.module.tied is ema.module.conv
    assert not any(p.requires_grad for p in ema.module.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_frozen_parts_stay_what_they_are_to_the_bit():
    model = Net()
    ema = Ema(model, 0.7)
    for step in range(50):
        ema.update(model if step % 2 else copy.deepcopy(model))  # another one of the same weights
    assert all(torch.equal(a, b) for a, b in zip(ema.module.parameters(), model.parameters(), strict=True))
