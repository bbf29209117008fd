"""The moving average of a model's weights."""

import copy

import torch
from torch import nn

from toolkit.step.ema import Ema


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.tied = self.conv
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("grid", torch.arange(3.0), persistent=False)

    def forward(self, x):
        return self.norm(self.conv(x))


def test_floats_follow_the_formula_and_the_rest_is_copied():
    """The formula without a warm-up is compared with CVNets in tests/golden."""
    generator = torch.Generator().manual_seed(0)
    model = Net()
    ema = Ema(model, 0.25, warmup=True)
    expected = model.conv.weight.detach().clone()
    for decay in (1 / 10, 2 / 11, 0.25, 0.25):
        with torch.no_grad():
            model.conv.weight += torch.randn(model.conv.weight.shape, generator=generator)
        model(torch.randn(2, 3, 5, 5, generator=generator))
        model.grid += 1
        ema.update(model)
        expected = decay * expected + (1 - decay) * model.conv.weight
    averaged = ema.module
    torch.testing.assert_close(averaged.conv.weight, expected)
    assert averaged.norm.num_batches_tracked == 4
    assert averaged.mask.equal(model.mask)
    assert averaged.grid.equal(model.grid)
    assert averaged.tied is averaged.conv
    assert not averaged.training
    assert not averaged.conv.weight.requires_grad
    assert model.conv.weight.requires_grad
    again = Ema(Net(), 0.25)
    again.load_state_dict(ema.state_dict())
    assert again.updates == 4


def test_frozen_parts_stay_what_they_are_to_the_bit():
    model = Net()
    ema = Ema(model, 0.7)
    for step in range(50):
        ema.update(model if step % 2 else copy.deepcopy(model))  # another one of the same weights
    for average, weight in zip(ema.module.parameters(), model.parameters(), strict=True):
        assert average.equal(weight)
