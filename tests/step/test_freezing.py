"""Frozen modules and batch norms; the momentum of batch norms is compared with CVNets in tests/golden."""

import copy
import pickle
import re

import pytest
import timm
import torch
from timm.layers import FrozenBatchNormAct2d
from torch import nn
from transformers.models.detr.modeling_detr import DetrFrozenBatchNorm2d

from toolkit.base.errors import BadInput
from toolkit.step.freezing import (
    BatchCounts,
    FrozenBatchNorm2d,
    freeze,
    freeze_batch_norms,
    freeze_prefixes,
    replace_frozen_batch_norms,
)


def net():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    return nn.ModuleDict(
        {
            "backbone": backbone,
            "neck": nn.Conv2d(4, 4, 1),
            "norm": nn.BatchNorm2d(4),
        }
    )


def woken(model):
    """Move statistics and weights of batch norms away from their initial values."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return model


def unpickled(model):
    return pickle.loads(pickle.dumps(model))  # noqa: S301 (what was pickled just now)


@pytest.mark.parametrize("copied", [nn.Module.train, copy.deepcopy, unpickled])
def test_freezing_survives_train_in_copies_too(copied):
    model = net()
    assert freeze(model["backbone"]) is model["backbone"]
    model = copied(model).train()
    backbone = model["backbone"]
    before = copy.deepcopy(backbone.state_dict())
    assert model["norm"].training
    assert not any(module.training for module in backbone.modules())
    features = backbone(torch.randn(2, 3, 6, 6))
    model["norm"](model["neck"](features)).sum().backward()
    assert all(parameter.grad is None for parameter in backbone.parameters())
    torch.testing.assert_close(backbone.state_dict(), before, rtol=0, atol=0)
    assert model["neck"].weight.grad is not None


def test_frozen_parts_compile():
    backbone = freeze(net()["backbone"])
    compiled = torch.compile(backbone, backend="eager", fullgraph=True).train()
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(compiled(x), backbone(x))
    assert not backbone.training


def test_freezing_by_name():
    model = net()
    frozen = freeze_prefixes(model, ["backbone.1", "neck.bias"])
    assert frozen == ["backbone.1.weight", "backbone.1.bias", "neck.bias"]
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == frozen
    model.train()
    trains = [name for name, module in model.named_modules() if module.training]
    assert trains == ["", "backbone", "backbone.0", "backbone.2", "neck", "norm"]


BACKBONE = "did you mean model.model.backbone?"
HINTS = [
    ("bakbone", BACKBONE),
    ("model.backbone", BACKBONE),
    ("bakbone.1", "did you mean model.model.backbone.1?"),
    ("backbone.9", "did you mean model.model.backbone.2?"),
    ("model.model.backbone.9", "model.model.backbone has: model.model.backbone.0, model.model.backbone.1"),
    ("wheels", "the model has: model"),
    ("", "the model has: model"),
]


@pytest.mark.parametrize(("prefix", "hint"), HINTS)
def test_a_prefix_that_does_not_exist_is_answered_with_a_whole_name(prefix, hint):
    model = nn.ModuleDict({"model": nn.ModuleDict({"model": net()})})
    with pytest.raises(BadInput, match=re.escape(hint)):
        freeze_prefixes(model, ["model.model.neck", prefix])
    assert all(parameter.requires_grad for parameter in model.parameters())


class UsesANormTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.twice = nn.BatchNorm2d(3)
        self.once = nn.BatchNorm2d(3)
        self.unused = nn.BatchNorm2d(3)
        self.frozen = freeze(nn.BatchNorm2d(3))

    def forward(self, x):
        return self.frozen(self.once(self.twice(self.twice(x))))


def test_batch_norms_that_count_at_once_count_what_they_count_alone():
    alone = UsesANormTwice()
    together = copy.deepcopy(alone)
    BatchCounts(together)
    buffers = dict(together.named_buffers())
    for training in (True, False, True):
        for model in (alone, together):
            model.train(training)(torch.ones(2, 3, 4, 4))
        torch.testing.assert_close(together.state_dict(), alone.state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="4D"):
        together(torch.ones(2))
    copied = copy.deepcopy(together).train()
    copied(torch.ones(2, 3, 4, 4))
    assert copied.twice.num_batches_tracked == 6
    assert alone.twice.num_batches_tracked == together.twice.num_batches_tracked == 4
    for name, buffer in together.named_buffers():
        assert buffer is buffers[name]


@pytest.mark.parametrize("affine", [True, False])
def test_a_frozen_batch_norm_is_one_in_evaluation_mode(affine):
    norm = woken(nn.BatchNorm2d(5, eps=1e-3, affine=affine)).eval()
    frozen = freeze_batch_norms(norm).train()
    assert not list(frozen.parameters())
    x = torch.randn(2, 5, 4, 3, requires_grad=True)
    weights = torch.randn(2, 5, 4, 3)
    values = []
    for module in (norm, frozen):
        y = module(x)
        values.append((y, *torch.autograd.grad((y * weights).sum(), x)))
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-6)


def test_a_norm_without_statistics_is_left_alone():
    norm = nn.BatchNorm2d(3, track_running_stats=False)
    assert freeze_batch_norms(norm) is norm


def test_a_frozen_batch_norm_takes_the_state_of_one_and_keeps_the_dtype():
    norm = woken(nn.BatchNorm2d(5)).eval()
    frozen = FrozenBatchNorm2d(5)
    frozen.load_state_dict(norm.state_dict())  # of a checkpoint from before it was frozen
    assert list(frozen.state_dict()) == ["weight", "bias", "running_mean", "running_var"]
    x = torch.randn(2, 5, 4, 4)
    narrow = frozen(x.bfloat16())
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), norm(x), rtol=0.05, atol=0.05)


def with_other_bias(norm):
    norm.bias.add_(1)
    return norm


def with_other_variance(norm):
    torch._foreach_lerp_([norm.running_var], [torch.full((5,), 9.0)], 0.5)
    return norm


def with_loaded_state(norm):
    norm.load_state_dict(woken(nn.BatchNorm2d(5)).state_dict())
    return norm


def with_other_tensor(norm):
    norm.weight = norm.weight * 2
    return norm


def with_other_eps(norm):
    norm.eps = 0.5
    return norm


def copied_and_changed(norm):
    return with_other_bias(copy.deepcopy(with_other_bias(norm)))


@pytest.mark.parametrize(
    "changed",
    [
        nn.Module.double,
        with_other_bias,
        with_other_variance,
        with_loaded_state,
        with_other_tensor,
        with_other_eps,
        copied_and_changed,
        unpickled,
    ],
)
def test_what_a_frozen_batch_norm_keeps_follows_its_buffers(changed):
    frozen = freeze_batch_norms(woken(nn.BatchNorm2d(5)).eval())
    x = torch.randn(2, 5, 4, 4)
    frozen(x)
    frozen = changed(frozen)
    fresh = FrozenBatchNorm2d(5, frozen.eps).to(frozen.weight.dtype)
    fresh.load_state_dict(frozen.state_dict())
    assert torch.equal(frozen(x), fresh(x))
    assert frozen(x.bfloat16()).dtype == torch.bfloat16


def test_a_frozen_batch_norm_computes_its_factors_once():
    frozen = freeze_batch_norms(woken(nn.BatchNorm2d(5)).eval())
    x = torch.randn(2, 5, 4, 4, requires_grad=True)
    with torch.inference_mode():
        frozen(x)
    kept = frozen._kept
    frozen(x).sum().backward()
    assert frozen._kept is kept
    assert x.grad is not None


@pytest.mark.parametrize("kind", [FrozenBatchNormAct2d, DetrFrozenBatchNorm2d])
def test_frozen_norms_of_other_libraries_keep_their_values(kind):
    theirs = kind(5)
    theirs.load_state_dict(woken(nn.BatchNorm2d(5)).state_dict())
    model = nn.Sequential(nn.Sequential(copy.deepcopy(theirs)))
    replace_frozen_batch_norms(model)
    assert isinstance(model[0][0], FrozenBatchNorm2d)
    assert model[0].state_dict().keys() == nn.Sequential(theirs).state_dict().keys()
    x = torch.randn(2, 5, 4, 4)
    assert torch.equal(model(x), theirs(x))
    narrow = model(x.bfloat16())
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), theirs(x), rtol=0.05, atol=0.05)


def test_norms_with_an_activation_inside():
    """Those of mobilenetv3 and many ResNets of timm have one."""
    model = woken(timm.create_model("mobilenetv3_small_050", features_only=True)).eval()
    x = torch.randn(1, 3, 32, 32)
    before = model(x)
    names = set(model.state_dict())
    assert freeze_batch_norms(model) is model
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    for new, old in zip(model.train()(x), before, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)
    assert names - set(model.state_dict()) == {name for name in names if name.endswith("num_batches_tracked")}
