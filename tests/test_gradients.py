"""Clipping and the gradient table at their edges. Run: python -m pytest tests/test_gradients.py"""

import pytest
import torch
from torch import nn

from toolkit.step.gradients import clip_gradients, gradient_table


def model_with_gradients(**values: list[float]) -> nn.ParameterDict:
    parameters = nn.ParameterDict({name: nn.Parameter(torch.zeros(len(v))) for name, v in values.items()})
    for name, value in values.items():
        parameters[name].grad = torch.tensor(value)
    return parameters


def test_clips_to_the_norm_and_reports_the_one_before():
    model = model_with_gradients(a=[3.0, 0.0], b=[0.0, 4.0])
    model["unused"] = nn.Parameter(torch.zeros(5))
    assert float(clip_gradients(model.parameters(), None)) == 5.0
    assert model["b"].grad.tolist() == [0.0, 4.0]
    assert float(clip_gradients(iter(model.parameters()), 1.0)) == 5.0
    assert float(clip_gradients(model.parameters(), None)) == pytest.approx(1.0, abs=1e-5)
    before = [p.grad.clone() for p in (model["a"], model["b"])]
    clip_gradients(model.parameters(), 10.0)
    assert all(torch.equal(old, p.grad) for old, p in zip(before, (model["a"], model["b"]), strict=True))


def test_infinite_and_missing_gradients():
    model = model_with_gradients(a=[float("inf"), 1.0])
    assert clip_gradients(model.parameters(), 1.0).isinf()
    nothing = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2))})
    assert float(clip_gradients(nothing.parameters(), 1.0)) == 0.0
    assert "no parameter has a gradient" in gradient_table(nothing.named_parameters())


def test_table_names_the_largest_first():
    model = model_with_gradients(small=[0.5], large=[2.0, 0.0], nan_free=[1.0])
    lines = gradient_table(model.named_parameters(), max_norm=1.0, top=2).splitlines()
    assert lines[0].startswith("---Total norm 2.29129 clip coef 0.43644")
    assert [line.split()[0] for line in lines[1:-1]] == ["large", "nan_free"]
    assert "2.00000, (torch.Size([2]))" in lines[1]
    assert "clip" not in gradient_table(model.named_parameters())
    assert "clip" not in gradient_table(model.named_parameters(), max_norm=0.0), "optim.max_norm 0: no clipping"
