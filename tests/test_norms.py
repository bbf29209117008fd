"""Frozen modules and batch norms."""

import copy
import pickle
import re

import pytest
import timm
import torch
import torchvision
from torch import nn

from toolkit.base.errors import BadInput
from toolkit.step.freezing import (
    FrozenBatchNorm2d,
    bn_momentum,
    freeze,
    freeze_batch_norms,
    freeze_prefixes,
    set_bn_momentum,
)


def net():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    return nn.ModuleDict({"backbone": backbone, "neck": nn.Conv2d(4, 4, 1), "norm": nn.BatchNorm2d(4)})


def forward(model, x):
    return model["norm"](model["neck"](model["backbone"](x)))


def trained(model, steps=3):
    """Statistics and affine parameters away from their initial values."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2.0, generator=generator)
            if module.affine:
                nn.init.normal_(module.weight, generator=generator)
                nn.init.normal_(module.bias, generator=generator)
    return model


def unpickled(model):
    return pickle.loads(pickle.dumps(model))  # noqa: S301 (what was pickled just now)


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy, unpickled])
def test_freezing_survives_train_in_copies_too(copied):
    model = net()
    assert freeze(model["backbone"]) is model["backbone"]
    model = copied(model)
    before = copy.deepcopy(model["backbone"].state_dict())
    assert model.train() is model and model.training and model["norm"].training
    assert not any(module.training for module in model["backbone"].modules())
    forward(model, torch.randn(2, 3, 6, 6)).sum().backward()
    assert all(p.grad is None for p in model["backbone"].parameters())
    assert all(torch.equal(v, before[k]) for k, v in model["backbone"].state_dict().items())
    assert model["norm"].num_batches_tracked == 1 and model["neck"].weight.grad is not None
    assert not model.eval().training and model.train()["backbone"][1].training is False


def test_frozen_parts_compile():
    model = net()
    freeze(model["backbone"])
    model.train()
    compiled = torch.compile(model["backbone"], backend="eager", fullgraph=True)
    compiled.train()
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(compiled(x), model["backbone"](x))
    assert not model["backbone"].training


def test_freezing_by_name():
    model = net()
    frozen = freeze_prefixes(model, ["backbone.1", "neck.bias"])
    assert frozen == ["backbone.1.weight", "backbone.1.bias", "neck.bias"]
    model.train()
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == frozen
    assert not model["backbone"][1].training and model["backbone"][2].training and model["neck"].training
    model = net()
    with pytest.raises(BadInput) as error:
        freeze_prefixes(model, ["backbon", "backbone.9", "neck"])
    first, second = error.value.problems  # they name the neighbours
    assert "did you mean backbone?" in first and "backbone.0, backbone.1, backbone.2" in second
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(("prefix", "hint"), [
    ("backbone", "did you mean model.model.backbone?"), ("bakbone", "did you mean model.model.backbone?"),
    ("backbone.1", "did you mean model.model.backbone.1?"), ("bakbone.1", "did you mean model.model.backbone.1?"),
    ("backbone.9", "did you mean model.model.backbone.2?"),
    ("model.model.backbone.9", "model.model.backbone has: model.model.backbone.0, model.model.backbone.1"),
    ("model.backbone", "did you mean model.model.backbone?"), ("wheels", "the model has: model"),
    ("", "the model has: model"),
])  # fmt: skip
def test_a_prefix_that_begins_deeper_or_is_misspelt_is_answered_with_the_whole_name(prefix, hint):
    model = nn.ModuleDict({"model": nn.ModuleDict({"model": net()})})
    with pytest.raises(BadInput, match=re.escape(hint)):
        freeze_prefixes(model, [prefix])


@pytest.mark.parametrize("affine", [True, False])
def test_frozen_batch_norm_is_eval_mode_batch_norm(affine):
    norm = trained(nn.BatchNorm2d(5, eps=1e-3, affine=affine)).eval()
    frozen = freeze_batch_norms(norm)
    x = torch.randn(2, 5, 4, 3, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    weights = torch.randn(2, 5, 4, 3)
    (norm(x) * weights).sum().backward()
    (frozen.train()(y) * weights).sum().backward()
    torch.testing.assert_close(frozen(y), norm(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-5, atol=1e-6)
    assert not list(frozen.parameters()) and isinstance(frozen, FrozenBatchNorm2d)
    without_statistics = nn.BatchNorm2d(3, track_running_stats=False)
    assert freeze_batch_norms(without_statistics) is without_statistics


def test_frozen_batch_norm_agrees_with_torchvisions_and_keeps_the_dtype():
    ours, theirs = FrozenBatchNorm2d(5), torchvision.ops.FrozenBatchNorm2d(5)
    state = trained(nn.BatchNorm2d(5)).state_dict()
    theirs.load_state_dict({k: v for k, v in state.items() if k != "num_batches_tracked"})
    ours.load_state_dict(state)  # a checkpoint of the norm before it was frozen
    assert set(ours.state_dict()) == set(theirs.state_dict())
    x = torch.randn(2, 5, 4, 4)
    torch.testing.assert_close(ours(x), theirs(x))
    assert ours(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(ours(x.bfloat16()).float(), theirs(x), rtol=0.05, atol=0.05)


def test_whole_backbone_with_activations_inside_its_norms():
    # mobilenetv3 and resnets with BatchNormAct2d keep their activation inside the norm layer
    model = trained(timm.create_model("mobilenetv3_small_050", pretrained=False, features_only=True)).eval()
    x = torch.randn(1, 3, 32, 32)
    before, names = model(x), set(model.state_dict())
    assert freeze_batch_norms(model) is model
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    for new, old in zip(model.train()(x), before, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)
    assert set(model.state_dict()) == {n for n in names if not n.endswith("num_batches_tracked")}
    assert all(parameter.ndim != 1 or name.endswith("bias") for name, parameter in model.named_parameters())


def test_momentum_of_batch_norms():
    assert [bn_momentum(s, 60, 0.1, 0.02, 10) for s in (0, 10, 35, 60, 99)] == pytest.approx(
        [0.1, 0.1, 0.06, 0.02, 0.02]
    )
    model = net()
    freeze(model["backbone"])
    set_bn_momentum(model.train(), 0.03)
    assert (model["norm"].momentum, model["backbone"][1].momentum) == (0.03, 0.1)
