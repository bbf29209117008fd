"""Weights that are cast together give what autocast gives, to the bit."""

import copy

import pytest
import torch
from torch import nn

from toolkit.step.weight_casts import WeightCasts


class EveryKind(nn.Module):
    """Layers that are frozen, used twice, tied, unused, without autocast, and read from outside."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Conv2d(3, 4, 1).requires_grad_(False)
        self.twice = nn.Conv2d(4, 4, 3, padding=1)
        self.unused = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied_too = nn.Linear(4, 4, bias=False)
        self.tied_too.weight = self.tied.weight
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.exact = nn.Linear(4, 2)
        self.fails = False
        self.dtypes = []

    def forward(self, x):
        self.dtypes = [self.twice.weight.dtype, next(self.twice.parameters()).dtype, self.exact.weight.dtype]
        x = self.twice(self.twice(self.frozen(x)).relu())
        x = x.flatten(2).transpose(1, 2)
        x = self.tied_too(self.tied(x)) + self.attention(x, x, x)[0]
        if self.fails:
            raise ValueError("it fails")
        with torch.autocast("cpu", enabled=False):
            return self.exact(x.float())


def trained(model, dtype):
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        found = model(torch.linspace(-1, 1, 96).view(2, 3, 4, 4))
    found.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found, gradients


def test_losses_and_gradients_are_those_of_autocast():
    alone = EveryKind()
    together = copy.deepcopy(alone)
    WeightCasts(together, torch.device("cpu"))
    for dtype in (torch.bfloat16, torch.bfloat16, None, torch.bfloat16):
        expected = trained(alone, dtype)
        torch.testing.assert_close(trained(together, dtype), expected, rtol=0, atol=0)
    assert together.dtypes == [torch.bfloat16, torch.float32, torch.float32]
    assert together.state_dict().keys() == alone.state_dict().keys()
    assert together.frozen.weight.grad is None
    together.eval()
    trained(together, torch.bfloat16)
    assert together.dtypes[0] == torch.float32


def test_a_forward_that_fails_leaves_no_casts():
    model = EveryKind()
    WeightCasts(model, torch.device("cpu"))
    trained(model, torch.bfloat16)
    model.fails = True
    with pytest.raises(ValueError, match="it fails"):
        trained(model, torch.bfloat16)
    assert isinstance(model.twice.weight, nn.Parameter)
    assert "weight" not in vars(model.twice)
