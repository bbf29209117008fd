"""Encoder layers and forwards without host synchronisation give the numbers of transformers' own, to the bit."""

import sys
import tomllib

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from packaging.version import Version
from places import ROOT
from small_detectors import HYBRIDS, batch_of, forward, small
from torch.testing import assert_close

from toolkit.detectors.detr import host_waits
from toolkit.detectors.detr.host_waits import ENCODER_LAYERS, MAKE_DENOISING, without_host_waits

NEWEST_COMPARED = Version("5.23.0")  # the newest release of transformers that the tests of this file ran on


def test_no_release_of_transformers_is_allowed_that_was_not_compared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    allowed = requirements["transformers"]
    assert NEWEST_COMPARED in allowed
    assert f"{NEWEST_COMPARED.major}.{NEWEST_COMPARED.minor + 1}.0" not in allowed
    here = Version(transformers.__version__)
    assert here.release[:2] <= NEWEST_COMPARED.release[:2], "compare this release, then note it here"


def alone(value):
    """A copy that gradients stop at."""
    return value.detach().clone().requires_grad_(value.is_floating_point()) if torch.is_tensor(value) else value


def passed(forward, layer, args, kwargs, spoiled) -> list[torch.Tensor]:
    """What the layer gives in training, and every gradient; with a weight of its last norm `spoiled`."""
    torch.manual_seed(7)
    args = [alone(value) for value in args]
    kwargs = {name: alone(value) for name, value in kwargs.items()}
    bias = layer.final_layer_norm.bias
    kept = bias[0].item()
    with torch.no_grad():
        bias[0] = kept if spoiled is None else spoiled
    found = forward(*args, **kwargs)
    inputs = [value for value in (*args, *kwargs.values()) if torch.is_tensor(value) and value.requires_grad]
    gradients = torch.autograd.grad(found.square().mean(), [*inputs, *layer.parameters()], allow_unused=True)
    with torch.no_grad():
        bias[0] = kept
    return [found.detach(), *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize(
    "name",
    [
        "detr",
        "conditional_detr",
        "deformable_detr",
        *HYBRIDS,
    ],
)
def test_encoder_layers_are_those_of_transformers_to_the_bit(name):
    detector = small(name, dropout=0.1).train()
    layer = next(module for module in detector.modules() if type(module).__name__ in ENCODER_LAYERS)
    seen = []
    hook = layer.register_forward_pre_hook(lambda module, *given: seen.append(given), with_kwargs=True)
    batch = batch_of((2, 1), hw=(64, 64))
    forward(detector, batch)
    hook.remove()
    theirs = type(layer).forward.__get__(layer)
    assert layer.forward.__func__ is not type(layer).forward, "it was replaced"
    for before in (False, True) if hasattr(layer, "normalize_before") else (False,):
        layer.normalize_before = before
        for spoiled in (None, torch.inf, -torch.inf, torch.nan):
            found = passed(layer.forward, layer, *seen[0], spoiled)
            expected = passed(theirs, layer, *seen[0], spoiled)
            assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", HYBRIDS)
def test_forwards_without_host_waits_give_the_same(name, monkeypatch):
    """Nor does a forward that fails leave anything behind."""
    detector = small(name, dropout=0.1).train()
    calls = []
    plain = host_waits.send_dicts
    monkeypatch.setattr(host_waits, "send_dicts", lambda *args: calls.append(0) or plain(*args))

    def passed(batch) -> dict:
        torch.manual_seed(1)
        return forward(detector, batch)

    core = detector.model.model
    cpu = torch.device("cpu")
    make = getattr(sys.modules[type(core).__module__], MAKE_DENOISING)
    for counts in (2, 1), (0, 3), (0, 0):
        batch = batch_of(counts, hw=(64, 64))
        expected = passed(batch)
        assert not calls
        with without_host_waits(core, cpu):
            assert_close(passed(batch), expected, rtol=0, atol=0)
        assert len(calls) == any(counts)
        calls.clear()
    hook = core.enc_output.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), without_host_waits(core, cpu):
        passed(batch)
    hook.remove()
    assert not torch.overrides._get_current_function_mode()
    assert not core.enc_output._forward_pre_hooks
    assert getattr(sys.modules[type(core).__module__], MAKE_DENOISING) is make
