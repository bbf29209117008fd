"""How a detector is run: its precision, checkpointed and compiled blocks, deterministic algorithms."""

import copy
import os
import warnings
from contextlib import ExitStack
from pathlib import Path

import pytest
import timm
import torch
from small_detectors import MODELS, SMALL, batch_of, built, run, weighted
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from toolkit.base.errors import BadInput
from toolkit.step import execution
from toolkit.step.execution import (
    GraphedParts,
    be_deterministic,
    checkpoint_in_place,
    compile_in_place,
    cpu_computes_in_bf16,
    has_depthwise_convolutions,
    has_mobile_blocks,
    precision_of_device,
    precision_of_gpu,
)

# ---- precision ----


@pytest.mark.parametrize(
    ("backbone", "is_mobile", "is_depthwise"),
    [
        ("mobilenetv4_conv_small_035", True, True),
        ("tf_efficientnet_lite0", True, True),
        ("ghostnet_050", True, True),
        ("resnet10t", False, False),
        ("convnext_atto", False, True),
    ],
)
def test_the_kind_of_backbone_decides_on_a_cpu(backbone, is_mobile, is_depthwise, monkeypatch):
    with torch.device("meta"):
        detector = timm.create_model(backbone)
    assert has_mobile_blocks(detector) == is_mobile
    assert has_depthwise_convolutions(detector) == is_depthwise
    for is_able in (True, False):
        monkeypatch.setattr("toolkit.step.execution.cpu_computes_in_bf16", lambda is_able=is_able: is_able)
        precision, tf32, _ = precision_of_device(torch.device("cpu"), detector)
        assert precision == ("bf16" if is_able and not is_mobile else "no")
        assert tf32 is None


@pytest.mark.parametrize(
    ("instructions", "level", "variable", "value", "computes"),
    [
        ("avx512_bf16", "AVX512", "", "", True),
        ("amx_bf16", "AVX512", "", "", True),
        ("avx512_vnni", "AVX512", "", "", False),
        ("avx512_bf16", "AVX2", "", "", False),  # ATEN_CPU_CAPABILITY, which torch reads when it starts
        ("avx512_bf16", "AVX512", "ONEDNN_MAX_CPU_ISA", "AVX2", False),
        ("amx_bf16", "AVX512", "DNNL_MAX_CPU_ISA", "avx512_core", False),
        ("amx_bf16", "AVX512", "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", True),
        ("avx512_bf16", "AVX512", "ONEDNN_MAX_CPU_ISA", "avx10_1_512", True),
    ],
)
def test_what_the_environment_takes_from_a_cpu_is_not_there(
    instructions, level, variable, value, computes, monkeypatch
):
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: level)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {instructions: True})
    assert cpu_computes_in_bf16() == computes


@pytest.mark.parametrize(
    ("capability", "rocm", "expected"),
    [
        ((8, 0), None, ("bf16", True)),
        ((7, 5), None, ("no", None)),
        ((9, 4), "6.4", ("bf16", None)),
    ],
)
def test_the_capability_of_a_gpu_decides(capability, rocm, expected):
    assert precision_of_gpu(capability, rocm) == expected


# ---- checkpointing ----

DEEP = {"backbone": "resnet18"}  # its stages have several blocks, with live batch norms
FAST = ("detr", "deformable_detr++", "rf_detr", "lw_detr", "rt_detr_v2", "ecdet")
OF_DETR = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]
DEEP_DETECTORS = {
    "ssd": DEEP | {"strides": [4, 8], "channels": [16, 16]},
    "yolov3": DEEP,
    "faster_rcnn": DEEP,
}


def step_of(detector, batch, *kernels: SDPBackend):
    """Return losses, gradients and buffers of a step, and the bytes kept between forward and backward."""
    torch.manual_seed(3)
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with ExitStack() as stack:
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
        if kernels:
            stack.enter_context(sdpa_kernel(list(kernels)))
        losses, _ = run(detector, batch)
    weighted(detector, losses).backward()
    gradients = {name: p.grad for name, p in detector.named_parameters() if p.grad is not None}
    kept_bytes = sum(nbytes for nbytes, _ in storages.values())
    return [losses, gradients, dict(detector.named_buffers())], kept_bytes


@pytest.mark.parametrize("name", [*OF_DETR, *DEEP_DETECTORS])
def test_a_checkpointed_step_is_the_same_to_the_bit_and_keeps_less(name):
    """With dropout, batch norms that learn, and attention by a kernel that the backward pass does not ask for."""
    has_dropout = "dropout" in MODELS[name]
    options = DEEP_DETECTORS.get(name, {"dropout": 0.2} if has_dropout else {})
    plain = built(name, **options)
    other = copy.deepcopy(plain)
    checkpoint_in_place(other, True)
    assert list(other.state_dict()) == list(plain.state_dict())
    other = copy.deepcopy(other)  # which runs on weights of its own
    batch = batch_of([2, 1], (64, 64))
    kernels = [SDPBackend.MATH] if name == "rt_detr_v2" else []
    expected, expected_bytes = step_of(plain, batch, *kernels)
    found, found_bytes = step_of(other, batch, *kernels)
    assert found[1]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found_bytes < expected_bytes
    in_evaluation = [run(detector.eval(), batch)[0] for detector in (other, plain)]
    torch.testing.assert_close(*in_evaluation, rtol=0, atol=0)


def test_what_cannot_be_checkpointed_or_compiled_is_refused():
    with pytest.raises(BadInput, match="nothing in the detector repeats"):
        checkpoint_in_place(nn.Linear(2, 2), True)
    with pytest.raises(BadInput, match="optim.compile"):
        checkpoint_in_place(nn.Linear(2, 2), True, "inductor")
    with pytest.raises(BadInput, match="no backend 'mine'; give true, graphs, or one of .*inductor"):
        compile_in_place(nn.Linear(2, 2), "mine")
    with pytest.raises(BadInput, match="optim.compile graphs: .* give true instead"):
        GraphedParts(built("faster_rcnn"), 2)


# ---- CUDA graphs ----

GRAPHED_DETECTORS = {
    "ssd": (DEEP_DETECTORS["ssd"], ["backbone", "heads.0", "heads.1"]),
    "yolov3": (DEEP, ["backbone", *(f"blocks.{i}.{part}" for i in range(3) for part in ("body", "tip"))]),
    "rt_detr_v2": ({}, ["model.model.backbone.model", "model.model.encoder"]),
}


@pytest.fixture
def captured(monkeypatch):
    """Parts are captured as for CUDA graphs, but no kernel is compiled; returns the counts of captured graphs."""
    monkeypatch.setattr(execution, "GRAPHED", {"backend": "aot_eager", "dynamic": False})
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters
    counts.clear()
    return counts


@pytest.mark.parametrize("name", GRAPHED_DETECTORS)
def test_graphs_hold_whole_parts_of_whole_batches_in_training(name, captured, monkeypatch):
    begun = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    options, parts = GRAPHED_DETECTORS[name]
    plain = built(name, **options)
    other = copy.deepcopy(plain)
    GraphedParts(other, batch_size=2)
    assert list(other.state_dict()) == list(plain.state_dict())
    batch = batch_of([2, 1], (64, 64))
    for step in (1, 2):
        expected, _ = step_of(plain, batch)
        found, _ = step_of(other, batch)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert len(begun) == step
    assert not captured["graph_break"]
    graphs = captured["stats"]["unique_graphs"]
    assert graphs >= len(parts)
    step_of(other, batch_of([1], (64, 64)))
    step_of(copy.deepcopy(other), batch)
    run(other.eval(), batch)
    assert captured["stats"]["unique_graphs"] == graphs
    assert len(begun) == 3, "the copy has the hooks, and runs as without graphs"


@pytest.mark.parametrize("named", [None, "elsewhere"])
def test_compiled_kernels_are_kept_where_a_later_start_finds_them(monkeypatch, tmp_path, named):
    """A folder that the user names stays."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", named or "")
    if named is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    compile_in_place(nn.Linear(2, 2), "aot_eager", tmp_path / "compiled")
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).name == (named or "compiled")  # torch makes the path a whole one


@pytest.mark.parametrize(("before", "after"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_cublas_gets_what_it_needs_to_be_deterministic(monkeypatch, before, after):
    """Without it a product on a GPU only warns that it is not deterministic. A value of the user's own stays."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if before is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", before)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    try:
        be_deterministic()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == after
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)


def test_operations_without_a_deterministic_algorithm_are_named_once(monkeypatch, capsys):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    try:
        be_deterministic()
        for _ in range(2):
            warnings.showwarning("adaptive_pool does not have a deterministic implementation", UserWarning, "f", 1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert capsys.readouterr().out == "stays non-deterministic: adaptive_pool\n"
