"""Parameter groups, optimizers and what they keep; norms of gradients; averages of weights."""

import copy

import pytest
import timm
import torch
import torchvision
import transformers
from accelerate import Accelerator
from timm.optim import param_groups_layer_decay
from torch import nn

from toolkit.base.errors import BadInput
from toolkit.step.ema import Ema
from toolkit.step.optim import (
    build_optimizer,
    drop_gradients,
    gradient_norm,
    gradient_table,
    is_norm,
    load_state,
    parameter_groups,
)
from toolkit.tools.memory_probe import state_stand_in


class Detector(nn.Module):
    """A backbone whose names hide its norms ("bn" of D-FINE's pattern), and a transformer head with tied weights."""

    def __init__(self):
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.model = nn.ModuleDict({"backbone": stem, "encoder": nn.TransformerEncoderLayer(8, 2, 16)})
        self.class_embed = nn.Linear(8, 3)
        self.tied = self.class_embed
        self.bias_table = nn.Parameter(torch.zeros(4, 4))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def one_group():
    return parameter_groups(nn.Linear(1, 1), lr=1.0, weight_decay=0.0)


def by_group(groups):
    return {group["name"]: set(group["param_names"]) for group in groups}


def assert_each_once(model, groups):
    held = [id(p) for group in groups for p in group["params"]]
    assert len(held) == len(set(held))
    assert set(held) == {id(p) for p in model.parameters() if p.requires_grad}
    names = dict(model.named_parameters())
    assert all(names[n] is p for g in groups for n, p in zip(g["param_names"], g["params"], strict=True))


def test_no_decay_goes_by_the_type_of_the_module():
    model, rates = Detector(), {"lr": 1e-4, "weight_decay": 1e-2, "backbone_lr": 1e-5}
    main, backbone = parameter_groups(model, **rates)
    assert all(".backbone." in f".{name}" for name in backbone["param_names"]) and len(backbone["params"]) == 4
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in (main, backbone)] == [
        ("main", 1e-4, 1e-2), ("backbone", 1e-5, 1e-2)]  # fmt: skip
    groups = parameter_groups(model, lr=1.0, weight_decay=0.1, no_decay_on_norm_and_bias=True)
    assert_each_once(model, groups)
    encoder = [f"model.encoder.{name}.weight" for name in ("self_attn.out_proj", "linear1", "linear2")]
    others = {"model.backbone.0.weight", "model.encoder.self_attn.in_proj_weight", "class_embed.weight", "bias_table"}
    assert by_group(groups)["main"] == {*encoder, *others}
    assert {g["weight_decay"] for g in groups if "no_decay" in g["name"]} == {0.0}


def test_multipliers_take_the_longest_prefix_and_multiply_the_backbones_rate():
    model, multipliers = Detector(), {"model": 2.0, "model.backbone.0": 10.0, "class_embed.bias": 0.5}
    groups = parameter_groups(model, lr=1.0, weight_decay=0.1, backbone_lr=0.1, multipliers=multipliers)
    assert_each_once(model, groups)
    rates = {name: group["lr"] for group in groups for name in group["param_names"]}
    assert rates["model.backbone.0.weight"] == 1.0 and rates["model.backbone.1.weight"] == 0.2
    assert rates["model.encoder.linear1.bias"] == 2.0
    assert (rates["class_embed.weight"], rates["class_embed.bias"]) == (1.0, 0.5)
    assert len({group["name"] for group in groups}) == len(groups)


def described(groups):
    return {group["name"]: (group["lr"], group["weight_decay"], set(group["param_names"])) for group in groups}


def test_biases_have_a_rate_and_a_decay_of_their_own_those_of_norms_too():
    model = nn.ModuleDict({"conv": nn.Conv2d(1, 2, 3), "norm": nn.BatchNorm2d(2), "freq_bias": nn.Embedding(2, 2)})
    options = {"lr": 0.5, "weight_decay": 0.1}
    weights, biases = {"conv.weight", "norm.weight", "freq_bias.weight"}, {"conv.bias", "norm.bias"}
    groups = parameter_groups(model, **options, bias_lr_factor=2.0, bias_weight_decay=0.0)
    assert_each_once(model, groups)
    assert described(groups) == {"main": (0.5, 0.1, weights), "main/bias": (1.0, 0.0, biases)}
    assert described(parameter_groups(model, **options, bias_lr_factor=2.0))["main/bias"] == (1.0, 0.1, biases)
    assert described(parameter_groups(model, **options, bias_weight_decay=0.3))["main/bias"] == (0.5, 0.3, biases)
    assert described(parameter_groups(model, **options)) == {"main": (0.5, 0.1, weights | biases)}


def test_the_factor_of_biases_goes_with_every_other_rule():
    model = Detector()
    options = {"lr": 1.0, "weight_decay": 0.1, "backbone_lr": 0.1, "no_decay_on_norm_and_bias": True}
    groups = parameter_groups(model, **options, bias_lr_factor=2.0, multipliers={"class_embed": 10.0})
    assert_each_once(model, groups)
    rules = {name: (g["name"], g["lr"], g["weight_decay"]) for g in groups for name in g["param_names"]}
    expected = {
        "model.backbone.1.weight": ("backbone/no_decay", 0.1, 0.0),
        "model.backbone.1.bias": ("backbone/no_decay/bias", 0.2, 0.0),
        "model.encoder.self_attn.in_proj_bias": ("main/no_decay/bias", 2.0, 0.0),
        "class_embed.weight": ("main/class_embed", 10.0, 0.1),
        "class_embed.bias": ("main/no_decay/bias/class_embed", 20.0, 0.0),
        "bias_table": ("main", 1.0, 0.1),
    }
    assert {name: rules[name] for name in expected} == expected
    decayed = described(parameter_groups(model, **options, bias_weight_decay=0.5))
    assert decayed["main/bias"][:2] == (1.0, 0.5) and decayed["main/no_decay"][:2] == (1.0, 0.0), "norms keep it"


def test_slow_parameters_have_the_factor_unless_a_multiplier_covers_them():
    model, slow = Detector(), ["model.encoder", "class_embed", "frozen"]
    groups = parameter_groups(model, lr=1.0, weight_decay=0.1, slow_prefixes=slow, multipliers={"class_embed": 0.5})
    assert_each_once(model, groups)
    rates = {group["name"]: group["lr"] for group in groups}
    assert rates == {"main": 1.0, "main/model.encoder": 0.1, "main/class_embed": 0.5}
    wide = parameter_groups(model, lr=1.0, weight_decay=0.1, slow_prefixes=slow, multipliers={"model": 3.0})
    assert {g["name"]: g["lr"] for g in wide} == {"main": 1.0, "main/model": 3.0, "main/class_embed": 0.1}
    as_multiplier = parameter_groups(model, lr=1.0, weight_decay=0.1, multipliers={"class_embed": 0.3})
    slowed = parameter_groups(model, lr=1.0, weight_decay=0.1, slow_prefixes=["class_embed"], slow_factor=0.3)
    assert described(slowed) == described(as_multiplier)
    with pytest.raises(BadInput, match="slow_prefixes.*class_embd.*class_embed"):
        parameter_groups(model, lr=1.0, weight_decay=0.1, slow_prefixes=["class_embd"])


def test_faults_name_what_exists():
    with pytest.raises(BadInput) as error:
        parameter_groups(Detector(), lr=1.0, weight_decay=0.0, multipliers={"clas_embed": 2.0, "model.back": 1.0})
    assert len(error.value.problems) == 2
    assert "clas_embed: no trained parameter" in str(error.value)
    assert "some that exist: bias_table, class_embed, class_embed.bias, " in error.value.problems[0]
    with pytest.raises(BadInput, match="backbone_lr"):
        parameter_groups(nn.Linear(2, 2), lr=1.0, weight_decay=0.0, backbone_lr=0.1)
    with pytest.raises(BadInput, match="frozen"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False), lr=1.0, weight_decay=0.0)
    with pytest.raises(BadInput, match="layer_decay"):  # needs a backbone of timm
        parameter_groups(Detector(), lr=1.0, weight_decay=0.0, layer_decay=0.5)
    with pytest.raises(BadInput, match="adamw, adam, sgd or muon"):
        build_optimizer("lion", one_group())
    with pytest.raises(BadInput, match="optim.nesterov is true.*expected"):
        build_optimizer("sgd", one_group(), momentum=0.0, nesterov=True)
    build_optimizer("adamw", one_group(), momentum=0.0, nesterov=True)  # Faster R-CNN's default; it is of SGD alone


def test_norms_of_every_library_are_known():
    norms = [
        *(nn.BatchNorm2d(2), nn.SyncBatchNorm(2), nn.GroupNorm(1, 2), nn.LayerNorm(2), nn.InstanceNorm2d(2)),
        *(nn.RMSNorm(2), torchvision.ops.FrozenBatchNorm2d(2), timm.layers.BatchNormAct2d(2)),
        *(timm.layers.LayerNorm2d(2), timm.layers.norm_act.FrozenBatchNormAct2d(2)),
        transformers.models.rt_detr.modeling_rt_detr.RTDetrFrozenBatchNorm2d(2),
        transformers.models.t5.modeling_t5.T5LayerNorm(2),
    ]
    assert [type(norm).__name__ for norm in norms if not is_norm(norm)] == []


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_state_of_weights_that_lay_otherwise_in_memory_goes_on_alike(name):
    gradients = [torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    ends = []
    for formats in ((torch.channels_last,) * 2, (torch.contiguous_format, torch.channels_last)):
        weight, state = torch.linspace(-1, 1, 108).view(4, 3, 3, 3), None
        for gradient, memory_format in zip(gradients, formats, strict=True):  # the second update is of a resumed run
            weight = nn.Parameter(weight.detach().clone().contiguous(memory_format=memory_format))
            optimizer = build_optimizer(name, [{"params": [weight], "lr": 0.1, "weight_decay": 0.0}])
            if state is not None:
                load_state(optimizer, state)
            weight.grad = gradient.contiguous(memory_format=memory_format)
            optimizer.step()
            state = optimizer.state_dict()
        ends.append(weight.detach())
    assert torch.equal(*ends)


def test_a_first_step_that_the_scaler_passes_over_leaves_no_momentum():
    """torch's fused update would make the buffers in it, with what happened to be in memory."""
    torch.manual_seed(0)
    weights = [torch.randn(4, 6, 3, 3).contiguous(memory_format=torch.channels_last), torch.randn(500)]
    gradients = [torch.randn_like(weight) for weight in weights]
    ends = []
    for fused, passed_over in ((True, True), (False, False)):
        parameters = [nn.Parameter(weight.clone()) for weight in weights]
        optimizer = build_optimizer("sgd", [{"params": parameters, "lr": 0.1}], momentum=0.9, fused=fused)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert optimizer.state[parameter]["momentum_buffer"].stride() == parameter.stride()
            parameter.grad = gradient.clone()
        if passed_over:  # as the scaler tells it
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(1.0)
            optimizer.step()
            assert all(not optimizer.state[p]["momentum_buffer"].any() for p in parameters)
            optimizer.found_inf = torch.tensor(0.0)
        optimizer.step()
        optimizer.step()
        ends.append([parameter.detach() for parameter in parameters])
    torch.testing.assert_close(*ends)


def test_nesterov():
    for nesterov in (False, True):
        (group,) = build_optimizer("sgd", one_group(), momentum=0.8, nesterov=nesterov).param_groups
        assert (group["momentum"], group["nesterov"]) == (0.8, nesterov)


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_betas(name):
    assert build_optimizer(name, one_group(), betas=[0.8, 0.95]).param_groups[0]["betas"] == (0.8, 0.95)
    for wrong in ([0.9], [0.9, 1.0], [-0.1, 0.9]):
        with pytest.raises(BadInput, match="optim.betas is .*two numbers"):
            build_optimizer(name, one_group(), betas=wrong)


@pytest.mark.parametrize("name", ["resnet10t", "convnext_atto", "vit_tiny_patch16_224"])
def test_layer_decay_gives_each_backbone_layer_the_factor_that_timm_gives_it(name):
    with torch.device("meta"):
        whole, features = timm.create_model(name), timm.create_model(name, features_only=True)
        model = nn.ModuleDict({"backbone": features, "head": nn.Linear(2, 2)})
    timm_groups = param_groups_layer_decay(whole, weight_decay=0, layer_decay=0.5)
    name_of = {id(p): name for name, p in whole.named_parameters()}
    scales = {name_of[id(p)]: group["lr_scale"] for group in timm_groups for p in group["params"]}
    groups = parameter_groups(model, lr=1.0, backbone_lr=0.1, weight_decay=0.0, layer_decay=0.5)
    assert_each_once(model, groups)
    spelt = {name.replace(".", "_"): scale for name, scale in scales.items()}
    for group in groups:
        for parameter in group["param_names"]:
            scale = spelt.get(parameter.removeprefix("backbone.").removeprefix("model.").replace(".", "_"))
            assert group["lr"] == (1.0 if parameter.startswith("head") else pytest.approx(0.1 * scale)), parameter
    assert len({group["lr"] for group in groups}) > 4
    assert "backbone/layer-1" in by_group(groups)


@pytest.mark.parametrize(("name", "momentum"), [("adamw", 0.9), ("adam", 0.9), ("sgd", 0.9), ("sgd", 0.0)])
def test_the_stand_in_is_as_large_as_the_state_and_changes_nothing(name, momentum):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1, bias=False))
    model[1].weight.requires_grad_(False)
    groups = [{"params": list(layer.parameters()), "lr": 0.1} for layer in model]
    optimizer = build_optimizer(name, groups, momentum=momentum)
    prepared = Accelerator(cpu=True).prepare(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    random, had = torch.get_rng_state(), copy.deepcopy(optimizer.state_dict())

    found = state_stand_in(prepared.optimizer)
    assert str(optimizer.state_dict()) == str(had) and all(p.grad is None for p in model.parameters())
    found += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.get_rng_state().equal(random)

    model(torch.rand(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor) and v.dim()]
    assert sorted(map(torch.Tensor.numel, found)) == sorted(map(torch.Tensor.numel, kept))
    assert bool(kept) == (name != "sgd" or momentum > 0)


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


@pytest.mark.parametrize("warmup", [False, True])
def test_average_follows_the_formula_for_floats_and_copies_the_rest(warmup):
    model, generator = Net().train(), torch.Generator().manual_seed(0)
    ema, expected = Ema(model, 0.9, warmup), copy.deepcopy(model.state_dict())
    for step in range(12):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape, generator=generator)
        model(torch.randn(2, 3, 5, 5, generator=generator))
        model.counter += 3
        model.flag.fill_(step % 2 == 0)
        model.grid += 1
        decay = min(0.9, (1 + step) / (10 + step)) if warmup else 0.9
        ema.update(model)
        for name, value in model.state_dict().items():
            averaged = value.is_floating_point() and name != "mask"
            expected[name] = decay * expected[name] + (1 - decay) * value if averaged else value.clone()
    torch.testing.assert_close(dict(ema.module.state_dict()), dict(expected), rtol=1e-5, atol=1e-6)
    assert ema.module.counter == 36 and ema.module.norm.num_batches_tracked == 12
    assert torch.equal(ema.module.mask, model.mask) and torch.equal(ema.module.grid, model.grid)
    assert not ema.module.training and model.training and ema.module.tied is ema.module.conv
    assert not any(p.requires_grad for p in ema.module.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_frozen_parts_stay_what_they_are_to_the_bit():
    model = Net()
    ema = Ema(model, 0.7)
    for step in range(50):
        ema.update(model if step % 2 else copy.deepcopy(model))  # another one of the same weights
    assert all(torch.equal(a, b) for a, b in zip(ema.module.parameters(), model.parameters(), strict=True))


def test_muon_takes_the_matrices_and_adamw_the_rest_and_both_go_on_exactly():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    start, inputs = copy.deepcopy(model.state_dict()), torch.tensor([0, 1, 4])

    def made(model):
        groups = parameter_groups(model, lr=0.02, weight_decay=0.1)
        return build_optimizer("muon", groups, betas=(0.8, 0.9), embeddings=[model[0].weight])

    def steps(model, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()

    optimizer = made(model)
    assert by_group(optimizer.param_groups) == {
        "main/muon": {"1.weight", "3.weight"}, "main": {"0.weight", "1.bias", "3.bias"},
    }  # fmt: skip
    lacking = state_stand_in(optimizer)
    assert len(lacking) == 2 + 2 * 3 and not optimizer.state
    steps(model, optimizer, 2)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(model, optimizer, 2)
    resumed = copy.deepcopy(model)
    resumed.load_state_dict(kept[0])
    again = made(resumed)
    load_state(again, kept[1])
    steps(resumed, again, 2)
    assert all(one.equal(other) for one, other in zip(model.parameters(), resumed.parameters(), strict=True))
    alone = copy.deepcopy(model)  # torch's own two, side by side
    alone.load_state_dict(start)
    muon = torch.optim.Muon([alone[1].weight, alone[3].weight], 0.02, 0.1, adjust_lr_fn="match_rms_adamw")
    others = [alone[0].weight, alone[1].bias, alone[3].bias]
    adamw = torch.optim.AdamW(others, 0.02, betas=(0.8, 0.9), weight_decay=0.1, fused=True)
    for _ in range(4):
        alone.zero_grad()
        alone(inputs).square().sum().backward()
        muon.step(), adamw.step()
    assert all(one.equal(other) for one, other in zip(model.parameters(), alone.parameters(), strict=True))
    optimizer.param_groups[0]["lr"] = 0.0  # of a schedule
    before = model[1].weight.detach().clone()
    steps(model, optimizer, 1)
    assert model[1].weight.equal(before)
    with pytest.raises(BadInput, match="trains no matrices"):
        build_optimizer("muon", parameter_groups(nn.Conv2d(3, 4, 1), lr=1.0, weight_decay=0.0))
