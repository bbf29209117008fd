"""Weights and denominators of losses.

Denominators over ranks: tests/golden/test_detr.py, and the equality of runs in tests/scripts.
"""

import math

import pytest
import torch
from pytest import approx
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.base.errors import BadInput
from toolkit.step.losses import LossWeights, window_denominators

DETR = (
    "loss_ce",
    "loss_bbox",
    "loss_ce_0",
    "loss_bbox_0",
    "loss_ce_enc",
    "loss_ce_dn_0",
    "loss_ce_aux_1",
)
DEFAULTS = {"loss_ce": 1.0, "loss_bbox": 5.0}


def total_of(weights: LossWeights, losses: dict[str, float], step: int = 0, **options):
    tensors = {name: torch.tensor(value) for name, value in losses.items()}
    return weights(tensors, step, **options).total


def test_a_weight_covers_its_layers_and_an_exact_name_overrides_it():
    given = {"loss_ce": 3.0, "loss_ce_0": 0.25}
    weights = LossWeights(DETR, given, DEFAULTS)
    values = weights.values(0)
    assert list(values.values()) == [3.0, 5.0, 0.25, 5.0, 3.0, 3.0, 3.0]
    losses = {name: torch.tensor(2.0, requires_grad=True) for name in DETR}
    result = weights.weigh(losses, step=0)
    assert result.total.item() == 2 * (3 * 4 + 5 * 2 + 0.25)
    result.total.backward()
    for name, loss in losses.items():
        assert loss.grad.item() == values[name]
    assert result.weighted["loss_bbox"].item() == 10.0
    assert not result.unweighted["loss_bbox"].requires_grad


def test_missing_losses_count_0_and_unknown_ones_are_reported():
    losses = {name: torch.tensor(2.0) for name in ("loss_ce", "loss_bbox", "loss_new")}
    weights = LossWeights(DETR, {}, DEFAULTS)
    result = weights.weigh(losses, 0)
    assert result.total.item() == 12.0
    assert result.weighted.keys() == {"loss_ce", "loss_bbox"}
    assert result.unknown == ["loss_new"]


def test_all_faults_of_the_weights_at_once_with_both_sides():
    bad = {
        "loss_cls": 1.0,
        "loss_bbox": "learn",
        "loss_ce": [[5, 1.0], [2, 0.0]],
        "loss_ce_0": math.nan,
    }
    with pytest.raises(BadInput) as error:
        LossWeights([*DETR, "loss_mask", "loss_ce_reg"], bad, DEFAULTS)
    expected = [
        "loss.weights.loss_bbox: ",
        "loss.weights.loss_ce: ",
        "loss.weights.loss_ce_0: ",
        "losses without a weight: loss_mask, loss_ce_reg;",  # loss_ce_reg is not a layer of loss_ce
        "loss.weights.loss_cls: this model has no such loss; it has ",
    ]
    for words in expected:
        assert words in str(error.value)
    assert len(error.value.problems) == len(expected)


@pytest.mark.parametrize(
    ("step", "value"),
    [(0, 0.0), (15, 0.5), (20, 1.0), (30, 0.75), (40, 0.5), (999, 0.5)],
)
def test_a_schedule_is_linear_between_its_points_and_constant_beyond(step, value):
    points = [[10, 0.0], [20, 1.0], [40, 0.5]]
    names = ["loss_a", "loss_a_0"]
    weights = LossWeights(names, {"loss_a": points}, {})
    expected = dict.fromkeys(names, value)
    assert weights.values(step) == approx(expected)
    total = total_of(weights, dict.fromkeys(names, 2.0), step)
    assert total.item() == approx(4 * value)


def test_learned_weights_start_at_the_default_and_find_the_size_of_the_loss():
    """Kendall et al. 2018: min over s of exp(-s) L + s is at exp(-s) = 1 / L; the layers of a loss share one s."""
    weights = LossWeights(DETR, {"loss_bbox": "learned"}, DEFAULTS)
    assert list(weights.state_dict()) == ["log_variances.loss_bbox"]
    assert weights.values(0)["loss_bbox"] == approx(5.0)
    [group] = weights.parameter_groups(0.5)
    assert group["weight_decay"] == 0.0  # not decayed towards 1
    optimizer = torch.optim.SGD([group])
    losses = {"loss_bbox": 3.0, "loss_bbox_0": 1.0}
    for _ in range(60):
        optimizer.zero_grad()
        total_of(weights, losses).backward()
        optimizer.step()
    assert weights.values(0)["loss_bbox_0"] == approx(0.25, rel=1e-3)


def test_the_term_of_a_learned_weight_is_counted_once_a_step():
    weights = LossWeights(["loss_a"], {"loss_a": "learned"}, {"loss_a": 2.0})
    parts = 0.0
    for value in (1.0, 2.0, 3.0):
        part = total_of(weights, {"loss_a": value}, micro_batches=3)
        parts += part.item()
    whole = total_of(weights, {"loss_a": 6.0})
    assert parts == approx(whole.item())


WIDTHS = [
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float64),
]


@pytest.mark.parametrize(("dtype", "wide"), WIDTHS)
def test_arithmetic_is_float32_or_wider_also_under_autocast(dtype, wide):
    losses = {
        "loss_a": torch.tensor(1.001, dtype=dtype),
        "loss_b": torch.tensor(1.0),
    }
    weights = LossWeights({"loss_a": 0.123, "loss_b": 1.0})
    with torch.autocast("cpu", torch.bfloat16):
        total = weights(losses, 0).total
    assert total.dtype == wide
    loss = losses["loss_a"].item()
    assert total.item() == approx(0.123 * loss + 1.0, rel=1e-6)


def test_learned_weights_of_a_gpu_weigh_sums_on_the_host():
    """As evaluation does. Fake tensors have devices and shapes only."""
    with FakeTensorMode():
        weights = LossWeights({"loss_a": "learned", "loss_b": 2.0})
        on_a_gpu = torch.zeros((), device="cuda")
        weights.log_variances["loss_a"] = torch.nn.Parameter(on_a_gpu)
        loss = torch.tensor(1.0, dtype=torch.float64)
        losses = dict.fromkeys(weights.names, loss)
        result = weights(losses, step=0)
    assert result.total.device.type == "cpu"
    assert result.weighted["loss_a"].device.type == "cpu"


WINDOW = [
    {"boxes": 6, "class_weight": 0.25},
    {"boxes": 0, "class_weight": 0.0},
]
DENOMINATORS = [
    ("global", WINDOW, [[6.0, 0.25], [6.0, 0.25]]),
    ("original", WINDOW, [[12.0, 0.5], [2.0, 2.0]]),  # times 2: the window is the mean of its micro-batches
    ("global", WINDOW[1:], [[1.0, 1.0]]),
    ("original", WINDOW[1:], [[1.0, 1.0]]),
]


@pytest.mark.parametrize(("mode", "window", "expected"), DENOMINATORS)
def test_denominators_of_one_process(mode, window, expected):
    """No boxes anywhere divide by 1."""
    found = window_denominators(window, "cpu", mode, averaged=("boxes",))
    for given, (boxes, class_weight) in zip(found, expected, strict=True):
        assert given["boxes"].item() == boxes
        assert given["class_weight"].item() == class_weight


def test_an_unknown_mode_of_denominators_is_refused():
    with pytest.raises(BadInput, match="global or original"):
        window_denominators([{"boxes": 1}], "cpu", "local")
