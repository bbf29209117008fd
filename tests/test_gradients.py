"""The norm of gradients, clipping and the gradient table at their edges."""

import pytest
import torch
from torch import nn

from toolkit.step.gradients import drop_gradients, gradient_norm, gradient_table


def model_with_gradients(**values: list[float]) -> nn.ParameterDict:
    parameters = nn.ParameterDict({name: nn.Parameter(torch.zeros(len(v))) for name, v in values.items()})
    for name, value in values.items():
        parameters[name].grad = torch.tensor(value)
    return parameters


def test_clips_to_the_norm_before_it():
    model = model_with_gradients(a=[3.0, 0.0], b=[0.0, 4.0])
    model["unused"] = nn.Parameter(torch.zeros(5))
    parameters = list(model.parameters())
    norm = gradient_norm(parameters)
    assert float(norm) == 5.0 and float(gradient_norm(iter(parameters))) == 5.0
    torch.nn.utils.clip_grads_with_norm_(parameters, 10.0, norm)
    assert model["b"].grad.tolist() == [0.0, 4.0]
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
    assert float(gradient_norm(parameters)) == pytest.approx(1.0, abs=1e-5)


def test_infinite_and_missing_gradients():
    model = model_with_gradients(a=[float("inf"), 1.0])
    assert gradient_norm(model.parameters()).isinf()
    drop_gradients(model)
    assert float(gradient_norm(model.parameters())) == 0.0
    assert "no parameter has a gradient" in gradient_table(model.named_parameters())


def test_table_names_the_largest_first():
    model = model_with_gradients(small=[0.5], large=[2.0, 0.0], nan_free=[1.0])
    lines = gradient_table(model.named_parameters(), max_norm=1.0, top=2).splitlines()
    assert lines[0].startswith("---Total norm 2.29129 clip coef 0.43644")
    assert [line.split()[0] for line in lines[1:-1]] == ["large", "nan_free"]
    assert "2.00000, (torch.Size([2]))" in lines[1]
    assert "clip" not in gradient_table(model.named_parameters())
    assert "clip" not in gradient_table(model.named_parameters(), max_norm=0.0), "optim.max_norm 0: no clipping"
