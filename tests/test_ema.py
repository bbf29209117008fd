"""pytest tests/test_ema.py"""

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


def moved(model, steps, visit):
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape, generator=generator)
        model.train()(torch.randn(2, 3, 5, 5, generator=generator))
        model.counter += 3
        model.flag.fill_(step % 2 == 0)
        model.grid += 1
        visit(step)


@pytest.mark.parametrize("warmup", [False, True])
def test_average_follows_the_formula_for_floats_and_copies_the_rest(warmup):
    model = Net()
    ema, expected = Ema(model, 0.9, warmup), copy.deepcopy(model.state_dict())

    def visit(step):
        decay = min(0.9, (1 + step) / (10 + step)) if warmup else 0.9
        ema.update(model)
        for name, value in model.state_dict().items():
            if value.is_floating_point() and name != "mask":
                expected[name] = decay * expected[name] + (1 - decay) * value
            else:
                expected[name] = value.clone()

    moved(model, 12, visit)
    averaged = ema.module.state_dict()
    assert set(averaged) == set(expected)
    for name, value in averaged.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert ema.module.counter == 36 and ema.module.norm.num_batches_tracked == 12
    assert torch.equal(ema.module.mask, model.mask) and torch.equal(ema.module.grid, model.grid)


def test_averaged_model_is_apart_in_eval_mode_and_without_gradients():
    model = Net().train()
    ema = Ema(model, 0.5)
    assert not ema.module.training and model.training
    assert not any(p.requires_grad for p in ema.module.parameters())
    assert all(p.requires_grad for p in model.parameters())
    before = ema.module.conv.weight.clone()
    with torch.no_grad():
        model.conv.weight += 1.0
    assert torch.equal(ema.module.conv.weight, before)
    assert ema.module.tied is ema.module.conv


def test_resumed_average_equals_the_uninterrupted_one_to_the_bit():
    model = Net()
    whole, states = Ema(model, 0.99), {}

    def visit(step):
        whole.update(model)
        if step == 4:
            states.update(weights=copy.deepcopy(whole.module.state_dict()), counter=whole.state_dict())
            states["resumed"] = Ema(Net(), 0.99)
            states["resumed"].module.load_state_dict(states["weights"])
            states["resumed"].load_state_dict(states["counter"])
        elif step > 4:
            states["resumed"].update(model)

    moved(model, 10, visit)
    assert states["resumed"].updates == 10
    for name, value in whole.module.state_dict().items():
        assert torch.equal(value, states["resumed"].module.state_dict()[name]), name


def test_frozen_parts_stay_what_they_are_to_the_bit():
    model = Net()
    ema = Ema(model, 0.7)
    for _ in range(50):
        ema.update(model)
    assert all(torch.equal(a, b) for a, b in zip(ema.module.parameters(), model.parameters(), strict=True))
