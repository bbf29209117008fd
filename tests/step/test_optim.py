"""Parameter groups, optimizers and what they keep, and norms of gradients."""

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

RATES = {"lr": 1.0, "weight_decay": 0.1}


class Detector(nn.Module):
    """A backbone, and a transformer head with tied weights."""

    def __init__(self):
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.model = nn.ModuleDict({"backbone": stem, "encoder": nn.TransformerEncoderLayer(8, 2, 16)})
        self.class_embed = nn.Linear(8, 3)
        self.tied = self.class_embed
        self.bias_table = nn.Parameter(torch.zeros(4, 4))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


def rules_of(model, **options) -> dict[str, tuple]:
    """Return (group, learning rate, weight decay) of each trained parameter, which is in one group under its name."""
    groups = parameter_groups(model, **RATES | options)
    names = dict(model.named_parameters())
    rules = {}
    for group in groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            assert names[name] is parameter
            assert name not in rules
            rules[name] = (group["name"], group["lr"], group["weight_decay"])
    assert rules.keys() == {name for name, parameter in names.items() if parameter.requires_grad}
    return rules


NO_DECAY = {"no_decay_on_norm_and_bias": True}
RULES = [
    # By the type of the module, not by a pattern of names.
    (
        NO_DECAY,
        {
            "model.backbone.1.weight": ("main/no_decay", 1.0, 0.0),
            "model.encoder.self_attn.in_proj_weight": ("main", 1.0, 0.1),
            "model.encoder.self_attn.in_proj_bias": ("main/no_decay", 1.0, 0.0),
            "bias_table": ("main", 1.0, 0.1),
        },
    ),
    # The longest prefix counts, and multiplies the rate of the backbone.
    (
        {"backbone_lr": 0.1, "multipliers": {"model": 2.0, "model.backbone.0": 10.0}},
        {
            "model.backbone.0.weight": ("backbone/model.backbone.0", 1.0, 0.1),
            "model.backbone.1.weight": ("backbone/model", 0.2, 0.1),
            "model.encoder.linear1.bias": ("main/model", 2.0, 0.1),
        },
    ),
    (
        {"bias_lr_factor": 2.0, "multipliers": {"class_embed": 10.0}, **NO_DECAY},
        {
            "class_embed.weight": ("main/class_embed", 10.0, 0.1),
            "class_embed.bias": ("main/no_decay/bias/class_embed", 20.0, 0.0),
        },
    ),
    ({"bias_weight_decay": 0.5, **NO_DECAY}, {"class_embed.bias": ("main/bias", 1.0, 0.5)}),
    # A multiplier, of a part too, goes before a slow prefix.
    (
        {
            "slow_prefixes": ["model.encoder", "class_embed", "frozen"],
            "slow_factor": 0.3,
            "multipliers": {"model": 3.0},
        },
        {"model.encoder.linear1.bias": ("main/model", 3.0, 0.1), "class_embed.bias": ("main/class_embed", 0.3, 0.1)},
    ),
]


@pytest.mark.parametrize(("options", "expected"), RULES)
def test_rules_of_parameters(options, expected):
    rules = rules_of(Detector(), **options)
    for name, rule in expected.items():
        assert rules[name] == pytest.approx(rule), name


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (Detector(), {"multipliers": {"clas_embed": 2.0}}, "clas_embed: no trained parameter.*bias_table, class_embed"),
        (Detector(), {"multipliers": {"model.back": 1.0}}, "model.back: no trained parameter"),
        (Detector(), {"slow_prefixes": ["class_embd"]}, "slow_prefixes.*class_embd.*class_embed"),
        (Detector(), {"layer_decay": 0.5}, "layer_decay.*timm"),
        (nn.Linear(2, 2), {"backbone_lr": 0.1}, "backbone_lr"),
        (nn.Linear(2, 2).requires_grad_(False), {}, "frozen"),
    ],
)
def test_faults_of_groups_name_what_exists(model, options, words):
    with pytest.raises(BadInput, match=words):
        parameter_groups(model, **RATES | options)


@pytest.mark.parametrize("name", ["resnet10t", "convnext_atto", "vit_tiny_patch16_224"])
def test_layer_decay_is_timms(name):
    with torch.device("meta"):
        whole = timm.create_model(name)
        features = timm.create_model(name, features_only=True)
        model = nn.ModuleDict({"backbone": features, "head": nn.Linear(2, 2)})
    spelt = {id(parameter): name.replace(".", "_") for name, parameter in whole.named_parameters()}
    expected = {}
    for group in param_groups_layer_decay(whole, weight_decay=0, layer_decay=0.5):
        for parameter in group["params"]:
            expected[spelt[id(parameter)]] = 0.1 * group["lr_scale"]
    rules = rules_of(model, backbone_lr=0.1, layer_decay=0.5)
    assert rules.pop("head.weight")[1] == rules.pop("head.bias")[1] == 1.0
    for parameter, (_, lr, _) in rules.items():
        in_timm = parameter.removeprefix("backbone.").removeprefix("model.").replace(".", "_")
        assert lr == pytest.approx(expected[in_timm]), parameter
    assert len({group for group, _, _ in rules.values()}) > 4


NORMS = [
    nn.BatchNorm2d(2),
    nn.SyncBatchNorm(2),
    nn.GroupNorm(1, 2),
    nn.LayerNorm(2),
    nn.InstanceNorm2d(2),
    nn.RMSNorm(2),
    torchvision.ops.FrozenBatchNorm2d(2),
    timm.layers.BatchNormAct2d(2),
    timm.layers.LayerNorm2d(2),
    timm.layers.norm_act.FrozenBatchNormAct2d(2),
    transformers.models.rt_detr.modeling_rt_detr.RTDetrFrozenBatchNorm2d(2),
    transformers.models.t5.modeling_t5.T5LayerNorm(2),
]


def test_norms_of_every_library_are_known():
    assert [norm for norm in NORMS if not is_norm(norm)] == []


# ---- optimizers ----


def one_group(parameter=None):
    parameter = nn.Parameter(torch.ones(2)) if parameter is None else parameter
    return [{"params": [parameter], "lr": 0.1, "weight_decay": 0.0}]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("lion", {}, "adamw, adam, sgd or muon"),
        ("sgd", {"momentum": 0.0, "nesterov": True}, "optim.nesterov is true.*expected"),
        ("adamw", {"betas": [0.9]}, "optim.betas is .*two numbers"),
        ("adam", {"betas": [0.9, 1.0]}, "optim.betas is .*two numbers"),
    ],
)
def test_faults_of_optimizers(name, options, words):
    with pytest.raises(BadInput, match=words):
        build_optimizer(name, one_group(), **options)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (
            "sgd",
            {"momentum": 0.8, "nesterov": True},
            {"momentum": 0.8, "nesterov": True},
        ),
        # The default of Faster R-CNN, which is of SGD alone.
        (
            "adamw",
            {"betas": [0.8, 0.95], "momentum": 0.0, "nesterov": True},
            {"betas": (0.8, 0.95)},
        ),
    ],
)
def test_options_of_optimizers(name, options, expected):
    [group] = build_optimizer(name, one_group(), **options).param_groups
    assert expected.items() <= group.items()


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_a_state_of_another_memory_layout_goes_on_alike(name):
    gradients = [
        torch.randn(
            4,
            3,
            3,
            3,
            generator=torch.Generator().manual_seed(i),
        )
        for i in range(2)
    ]

    def end_of(*layouts) -> torch.Tensor:
        """The second update is that of a resumed run."""
        weight = torch.linspace(-1, 1, 108).view(4, 3, 3, 3)
        state = None
        for gradient, layout in zip(gradients, layouts, strict=True):
            weight = nn.Parameter(weight.detach().clone().contiguous(memory_format=layout))
            optimizer = build_optimizer(name, one_group(weight))
            if state is not None:
                load_state(optimizer, state)
            weight.grad = gradient.contiguous(memory_format=layout)
            optimizer.step()
            state = optimizer.state_dict()
        return weight.detach()

    channels_last = end_of(torch.channels_last, torch.channels_last)
    assert end_of(torch.contiguous_format, torch.channels_last).equal(channels_last)


def test_a_first_step_that_the_scaler_skips_leaves_no_momentum():
    """torch's fused update would make the buffers in it, with what happened to be in memory."""
    torch.manual_seed(0)
    weight = torch.randn(4, 6, 3, 3).contiguous(memory_format=torch.channels_last)
    gradient = torch.randn_like(weight)

    def end_of(fused: bool, is_skipped: bool) -> torch.Tensor:
        parameter = nn.Parameter(weight.clone())
        optimizer = build_optimizer("sgd", one_group(parameter), momentum=0.9, fused=fused)
        momentum = optimizer.state[parameter]["momentum_buffer"]
        assert momentum.stride() == parameter.stride()
        parameter.grad = gradient.clone()
        if is_skipped:
            optimizer.grad_scale = torch.tensor(1.0)
            optimizer.found_inf = torch.tensor(1.0)
            optimizer.step()
            assert not momentum.any()
            optimizer.found_inf = torch.tensor(0.0)
        optimizer.step()
        optimizer.step()
        return parameter.detach()

    torch.testing.assert_close(end_of(True, True), end_of(False, False))


def sizes_of_state(optimizer) -> list[int]:
    values = [value for kept in optimizer.state.values() for value in kept.values()]
    return [value.numel() for value in values if isinstance(value, torch.Tensor) and value.dim()]


@pytest.mark.parametrize(
    ("name", "momentum"),
    [
        ("adamw", 0.9),
        ("adam", 0.9),
        ("sgd", 0.9),
        ("sgd", 0.0),
    ],
)
def test_the_stand_in_for_a_state_has_its_size_and_changes_nothing(name, momentum):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1, bias=False))
    model[1].weight.requires_grad_(False)
    optimizer = build_optimizer(name, [{"params": list(model.parameters()), "lr": 0.1}], momentum=momentum)
    made_at_once = sizes_of_state(optimizer)  # the momentum of sgd
    before = copy.deepcopy(
        [
            model.state_dict(),
            optimizer.state_dict(),
            torch.get_rng_state(),
        ]
    )
    stand_in = state_stand_in(Accelerator(cpu=True).prepare(optimizer).optimizer)
    after = [model.state_dict(), optimizer.state_dict(), torch.get_rng_state()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    model(torch.rand(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    assert sorted([tensor.numel() for tensor in stand_in] + made_at_once) == sorted(sizes_of_state(optimizer))


def test_muon_takes_the_matrices_and_adamw_the_rest():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(5, 4),
        nn.Linear(4, 6),
        nn.Tanh(),
        nn.Linear(6, 3),
    )
    alone = copy.deepcopy(model)
    groups = parameter_groups(model, lr=0.02, weight_decay=0.1)
    optimizer = build_optimizer(
        "muon",
        groups,
        betas=(0.8, 0.9),
        embeddings=[model[0].weight],
    )
    names = {group["name"]: group["param_names"] for group in optimizer.param_groups}
    assert names == {"main/muon": ["1.weight", "3.weight"], "main": ["0.weight", "1.bias", "3.bias"]}
    assert len(state_stand_in(optimizer)) == 2 + 2 * 3  # it updates a copy
    # torch's own two, side by side
    muon = torch.optim.Muon(
        [alone[1].weight, alone[3].weight],
        0.02,
        0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    others = [alone[0].weight, alone[1].bias, alone[3].bias]
    adamw = torch.optim.AdamW(
        others,
        0.02,
        betas=(0.8, 0.9),
        weight_decay=0.1,
        fused=True,
    )

    def train(network, *optimizers):
        network.zero_grad()
        network(torch.tensor([0, 1, 4])).square().sum().backward()
        for each in optimizers:
            each.step()

    for step in range(4):
        if step == 2:  # a resumed run
            load_state(optimizer, copy.deepcopy(optimizer.state_dict()))
        if step == 3:  # a rate of a schedule
            optimizer.param_groups[0]["lr"] = 0.01
            muon.param_groups[0]["lr"] = 0.01
        train(model, optimizer)
        train(alone, muon, adamw)
    torch.testing.assert_close(
        model.state_dict(),
        alone.state_dict(),
        rtol=0,
        atol=0,
    )
    with pytest.raises(BadInput, match="trains no matrices"):
        build_optimizer("muon", parameter_groups(nn.Conv2d(3, 4, 1), **RATES))


# ---- gradients ----


def test_gradients_that_are_infinite_or_missing():
    """Norms and tables are compared with Scene-Graph-Benchmark in tests/golden."""
    model = nn.Linear(1, 2)
    model.weight.grad = torch.tensor([[1.0], [torch.inf]])
    assert gradient_norm(model.parameters()).isinf()
    assert "clip" not in gradient_table(model.named_parameters(), max_norm=0.0)
    drop_gradients(model)
    assert gradient_norm(model.parameters()) == 0.0
    assert "no parameter has a gradient" in gradient_table(model.named_parameters())
