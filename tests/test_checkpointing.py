"""Gradient checkpointing: the same numbers to the bit, from fewer activations that are kept."""

import copy
import os
import warnings
from pathlib import Path

import pytest
import torch
from small_detectors import SMALL as DETRS
from small_detectors import batch_of, run, small, weighted
from test_export import SMALL as EVERY
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from toolkit.base.errors import BadInput
from toolkit.models import build_detector
from toolkit.step.execution import be_deterministic, checkpoint_in_place, compile_in_place, repeated_blocks

DEEP = {  # backbones whose stages have several blocks, with live batch norms
    "ssd": EVERY["ssd"] | {"backbone": "resnet18", "strides": [4, 8]},
    "yolov3": EVERY["yolov3"] | {"backbone": "resnet18"},
    "faster_rcnn": EVERY["faster_rcnn"] | {"backbone": "resnet18"},
}


def stepped(detector, batch, sdpa=None):
    """Losses, gradients and buffers of a step, and the bytes kept between forward and backward."""
    torch.manual_seed(3)
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    kernels = sdpa_kernel(sdpa or [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), kernels:
        losses, _ = run(detector, batch)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    weighted(detector, losses).backward()
    gradients = {name: p.grad for name, p in detector.named_parameters() if p.grad is not None}
    return losses, gradients, dict(detector.named_buffers()), sum(storages.values())


def built(name):
    if name in DETRS:
        return small(name, **({} if name == "rf_detr" else {"dropout": 0.2}))
    torch.manual_seed(0)
    return build_detector(name, class_names=["circle", "square", "star"], **DEEP[name])


@pytest.mark.parametrize("name", [*DETRS, *DEEP])
def test_a_step_is_the_same_to_the_bit_and_keeps_less(name):
    """With dropout, batch norms that learn, and attention by a kernel that the backward pass does not ask for."""
    plain = built(name).train()
    other = copy.deepcopy(plain)
    checkpoint_in_place(other, True)
    assert list(other.state_dict()) == list(plain.state_dict())
    other = copy.deepcopy(other)  # which runs on weights of its own
    batch = batch_of([2, 1], (128, 128))
    math = SDPBackend.MATH if name == "rt_detr_v2" else None
    expected, found = stepped(plain, batch, math), stepped(other, batch, math)
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        assert ours.keys() == theirs.keys()
        assert [key for key in theirs if not torch.equal(ours[key], theirs[key])] == []
    assert found[1] and found[3] < expected[3]
    with torch.no_grad():
        images, sizes = batch.images[:1], batch.sizes[:1]
        ours, theirs = (each.eval()(images, sizes) for each in (other, plain))
    key = next(key for key, value in theirs.items() if isinstance(value, torch.Tensor) and value.is_floating_point())
    assert ours[key].equal(theirs[key])


def test_what_has_nothing_to_checkpoint_is_refused():
    assert not list(repeated_blocks(nn.Linear(2, 2)))
    with pytest.raises(BadInput, match="nothing in the detector repeats"):
        checkpoint_in_place(nn.Linear(2, 2), True)
    with pytest.raises(BadInput, match="optim.compile"):
        checkpoint_in_place(small("detr"), True, "inductor")
    with pytest.raises(BadInput, match="no backend 'mine'; give true, or one of .*inductor"):
        compile_in_place(nn.Linear(2, 2), "mine")


@pytest.mark.parametrize("own", [None, "elsewhere"])
def test_compiled_kernels_are_kept_where_a_later_start_finds_them(monkeypatch, tmp_path, own):
    """A folder that the user names stays."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if own is not None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", own)
    compile_in_place(nn.Linear(2, 2), "aot_eager", tmp_path / "compiled")
    folder = Path(os.environ.pop("TORCHINDUCTOR_CACHE_DIR"))
    assert folder.name == (own or "compiled")  # torch makes the path a whole one


@pytest.mark.parametrize(("before", "after"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_cublas_gets_what_it_needs_to_be_deterministic(monkeypatch, before, after):
    """Without it a product on a GPU only warns that it is not deterministic. A value of the user's own stays."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if before is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", before)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # which is put back
    was_set = torch.backends.cudnn.benchmark
    try:
        be_deterministic()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == after
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = was_set
