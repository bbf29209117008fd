"""Weights and denominators of losses."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.base.errors import BadInput
from toolkit.step.losses import LossWeights, window_denominators

DETR = ("loss_ce", "loss_bbox", "loss_ce_0", "loss_bbox_0", "loss_ce_enc", "loss_ce_dn_0", "loss_ce_aux_1")
DEFAULTS = {"loss_ce": 1.0, "loss_bbox": 5.0}


def scalars(names, value=2.0):
    return {name: torch.tensor(value, requires_grad=True) for name in names}


def test_a_weight_covers_its_auxiliary_layers_and_an_exact_name_overrides_it():
    weights = LossWeights(DETR, {"loss_ce": 3.0, "loss_ce_0": 0.25}, DEFAULTS)
    assert weights.values(0) == {
        "loss_ce": 3.0, "loss_bbox": 5.0, "loss_ce_0": 0.25, "loss_bbox_0": 5.0, "loss_ce_enc": 3.0,
        "loss_ce_dn_0": 3.0, "loss_ce_aux_1": 3.0,
    }  # fmt: skip
    losses = scalars(DETR)
    result = weights.weigh(losses, step=0)
    assert result.total.item() == 2 * (3 * 4 + 5 * 2 + 0.25)
    result.total.backward()
    assert {name: loss.grad.item() for name, loss in losses.items()} == weights.values(0)
    assert {k: v.item() for k, v in result.weighted.items()} == {k: 2 * v for k, v in weights.values(0).items()}
    assert all(v.item() == 2.0 and not v.requires_grad for v in result.unweighted.values())
    some = {**scalars(["loss_ce", "loss_bbox"]), "loss_new": torch.tensor(7.0)}
    some = LossWeights(DETR, {}, DEFAULTS).weigh(some, 0)
    assert some.total.item() == 12.0 and some.weighted.keys() == {"loss_ce", "loss_bbox"}, "missing ones count 0"
    assert some.unknown == ["loss_new"], "reported, not raised"


def test_all_faults_of_the_weights_at_once_with_both_sides():
    bad = {"loss_cls": 1.0, "loss_bbox": "learn", "loss_ce": [[5, 1.0], [2, 0.0]], "loss_ce_0": math.nan}
    with pytest.raises(BadInput) as error:
        LossWeights([*DETR, "loss_mask", "loss_ce_reg"], bad, DEFAULTS)
    text = str(error.value)
    assert len(error.value.problems) == 5
    assert all(f"loss.weights.{key}: " in text for key in ("loss_bbox", "loss_ce", "loss_ce_0"))
    # torchvision's loss_box_reg is no layer of a loss_box, either
    assert "losses without a weight: loss_mask, loss_ce_reg;" in text
    assert "loss.weights.loss_cls: no loss is called so" in text


def test_a_schedule_is_linear_between_its_points_and_constant_beyond():
    weights = LossWeights(["loss_a", "loss_a_0"], {"loss_a": [[10, 0.0], [20, 1.0], [40, 0.5]]}, {})
    expected = {0: 0.0, 9: 0.0, 10: 0.0, 15: 0.5, 19: 0.9, 20: 1.0, 30: 0.75, 39: 0.525, 40: 0.5, 999: 0.5}
    for step, value in expected.items():
        assert weights.values(step) == pytest.approx({"loss_a": value, "loss_a_0": value})
        assert weights(scalars(["loss_a", "loss_a_0"]), step).total.item() == pytest.approx(4 * value)


def test_learned_weights_start_at_the_default_and_find_the_size_of_the_loss():
    # Kendall et al. 2018: min over s of exp(-s) L + s is at exp(-s) = 1 / L; the layers of a loss share one s
    weights = LossWeights(DETR, {"loss_bbox": "learned"}, DEFAULTS)
    assert list(weights.state_dict()) == ["log_variances.loss_bbox"]
    assert weights.values(0)["loss_bbox"] == pytest.approx(5.0)
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.5)
    for _ in range(60):
        optimizer.zero_grad()
        weights({"loss_bbox": torch.tensor(3.0), "loss_bbox_0": torch.tensor(1.0)}, 0).total.backward()
        optimizer.step()
    assert weights.values(0)["loss_bbox_0"] == pytest.approx(0.25, rel=1e-3)
    (group,) = weights.parameter_groups(1e-3)
    assert (group["lr"], group["weight_decay"]) == (1e-3, 0.0), "not decayed towards one"
    assert [parameter is weights.log_variances["loss_bbox"] for parameter in group["params"]] == [True]
    weights = LossWeights(["loss_a"], {"loss_a": "learned"}, {"loss_a": 2.0})
    whole = weights({"loss_a": torch.tensor(6.0)}, 0).total
    parts = [weights({"loss_a": torch.tensor(x)}, 0, micro_batches=3).total for x in (1.0, 2.0, 3.0)]
    assert sum(parts).item() == pytest.approx(whole.item())


@pytest.mark.parametrize(("dtype", "total"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_arithmetic_is_float32_or_wider_also_under_autocast(dtype, total):
    losses = {"loss_a": torch.tensor(1.001, dtype=dtype), "loss_b": torch.tensor(1.0)}
    with torch.autocast("cpu", torch.bfloat16):
        result = LossWeights(["loss_a", "loss_b"], {"loss_a": 0.123, "loss_b": 1.0}, {})(losses, 0)
    assert result.total.dtype == total
    exact = 0.123 * losses["loss_a"].double().item() + 1.0
    assert result.total.item() == pytest.approx(exact, rel=1e-6)


def denominators(counts, mode="global"):
    (given,) = window_denominators([counts], "cpu", mode, averaged=("boxes",))
    return {name: value.item() for name, value in given.items()}


def test_no_boxes_anywhere_divide_by_one_and_a_sum_of_weights_by_what_it_is():
    for mode in ("global", "original"):
        assert denominators({"boxes": 0, "class_weight": 0.0}, mode) == {"boxes": 1.0, "class_weight": 1.0}
    assert denominators({"class_weight": 0.25}) == {"class_weight": 0.25}
    with pytest.raises(BadInput, match="global or original"):
        denominators({"boxes": 1}, "local")


def test_learned_weights_of_a_gpu_weigh_sums_on_the_host():
    """As evaluation does. Fake tensors: they have devices and shapes only."""
    with FakeTensorMode():
        weights = LossWeights(["loss_a", "loss_b"], {"loss_a": "learned"}, {"loss_a": 1.0, "loss_b": 2.0})
        weights.log_variances["loss_a"] = torch.nn.Parameter(torch.zeros((), device="cuda"))
        result = weights({name: torch.tensor(1.0, dtype=torch.float64) for name in weights.names}, step=0)
    assert {value.device.type for value in (result.total, *result.weighted.values())} == {"cpu"}
