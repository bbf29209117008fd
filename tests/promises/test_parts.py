"""The parts of the loop alone, in somebody's own loop: docs/parts.md."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from places import ROOT
from processes import run_on_ranks
from torch import nn

from toolkit import LossWeights, Meters, NanGuard, reduce_dict
from toolkit.base.distributed import UnannouncedName, world
from toolkit.base.errors import BadInput, StoppedByGuard
from toolkit.step.meters import SmoothedValue

PAGE = (ROOT / "docs" / "parts.md").read_text(encoding="utf-8")
(PROGRAM,) = re.findall(r'```python title="plain.py"\n(.*?)```', PAGE, re.DOTALL)
# A picture of NaN makes every loss NaN, steps come before it and after it; at the end each process shows its weights.
SAMPLES = 12
NAN_AT = 1
CALL = "    losses = model(images, targets)\n"
SPOIL = f"    images = [image * float('nan') for image in images] if seen == {NAN_AT} else images\n    seen += 1\n"
HEAD = """
import sys
from toolkit import LossWeights, Meters, NanGuard, reduce_dict
modules = [name for name in ("accelerate", "transformers", "timm", "datasets", "wandb") if name in sys.modules]
seen = 0
"""
TAIL = """
total = sum(p.double().abs().sum() for p in accelerator.unwrap_model(model).parameters()).item()
print(f"RESULT {accelerator.process_index} {total!r} {guard.skips} {len(meters.loss_objectness.window)} {modules}")
"""
ON_TWO = "-m torch.distributed.run --standalone --nproc_per_node 2"


@pytest.mark.parametrize(("processes", "launcher"), [(1, ""), (2, ON_TWO)])
def test_the_program_of_the_page_trains_on_after_a_nan(tmp_path, processes, launcher):
    program = PROGRAM.replace("range(40)", f"range({SAMPLES})")
    program = program.replace(CALL, SPOIL + CALL)
    (tmp_path / "plain.py").write_text(HEAD + program + TAIL, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, *launcher.split(), "plain.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        check=False,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count(f"skipped: after step {NAN_AT}: ") == processes
    results = re.findall(r"RESULT (\d) (\S+) (\d+) (\d+) (\[.*\])", ended.stdout)
    assert len(results) == processes
    _, total, *_ = results[0]
    assert float(total) > 0
    steps = SAMPLES // 2 // processes
    for _, *result in results:
        assert result == [total, "0", str(steps - 1), "[]"]
    assert re.search(rf"epoch 1 \[{steps}/{steps}\]  eta: 0:00:00  loss_box_reg: ", ended.stdout)


def test_the_program_is_as_short_as_promised():
    lines = [line for line in PROGRAM.splitlines() if line.strip()]
    assert len(lines) <= 36
    assert "nan" not in PROGRAM.replace("NanGuard", "")


def test_a_misspelt_loss_raises_where_it_would_be_left_out():
    loss = torch.tensor(3.0)
    weights = LossWeights({"loss_classifer": 1.0})
    with pytest.raises(ValueError, match="none of the announced losses"):
        weights({"loss_classifier": loss})
    weights = LossWeights({"loss_classifer": 1.0, "loss_box": 2.0})
    with pytest.raises(BadInput, match=r"without a weight: loss_classifier; weights .*: loss_classifer, loss_box"):
        weights({"loss_classifier": loss, "loss_box": loss})
    result = weights({"loss_box": loss})
    assert result.total == 6.0


def test_a_weight_of_the_mapping_may_be_scheduled_or_learned():
    falling = [[0, 1.0], [10, 0.0]]
    weights = LossWeights({"loss_a": falling, "loss_b": "learned"})
    losses = {"loss_a": torch.tensor(4.0), "loss_b": torch.tensor(0.0)}
    result = weights(losses, step=5)
    assert result.total.item() == 2.0
    (group,) = weights.parameter_groups(0.1)
    assert group["name"] == "loss_weights"
    with pytest.raises(BadInput, match="loss_a"):
        LossWeights({"loss_a": "heavy"})


def reduced_on_ranks():
    """The mean of values in another order, and what is said where a rank lacks one."""
    rank = world()[0]
    if rank == 0:
        values = {"a": torch.tensor(1.0), "b": 0.0}
        names = {"a": 1.0, "b": 2.0}
    else:
        values = {"b": 1.0, "a": torch.tensor(1.0)}
        names = {"a": 1.0}
    same = reduce_dict(values)
    try:
        reduce_dict(names)
    except UnannouncedName as error:
        return same, str(error)
    return same, ""


def test_reduce_dict_takes_the_names_of_the_values():
    values = {"b": 2, "a": torch.tensor(1.5)}
    assert reduce_dict(values) == {"a": 1.5, "b": 2.0}
    assert reduce_dict({}) == {}
    for same, error in run_on_ranks(reduced_on_ranks, 2):
        assert same == {"a": 1.0, "b": 0.5}
        assert "rank 1 has the names a, rank 0 has a, b" in error


# ---- the guard -------------------------------------------------------------------------------------------------------

GOOD = torch.linspace(-1, 1, 24).view(8, 3)
BAD = torch.full((8, 3), float("nan"))


def normed() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer


def train(
    model,
    optimizer,
    guard,
    batches,
    accelerator=None,
    factor: float = 1.0,
) -> list[bool]:
    """Train on the batches that the guard takes; return which it took."""
    answers = []
    for batch in batches:
        loss = model(batch).square().mean() * factor
        scaled = loss if accelerator is None else accelerator.scaler.scale(loss)
        scaled.backward()
        reduced = reduce_dict({"loss": loss})
        is_taken = guard.check(reduced, model, optimizer, accelerator)
        answers.append(is_taken)
        if is_taken:
            optimizer.step()
            optimizer.zero_grad()
    return answers


def state_after(batches: list) -> list[torch.Tensor]:
    """Weights, buffers and momenta."""
    model, optimizer = normed()
    guard = NanGuard("skip")
    guard.watch(model)
    taken = train(model, optimizer, guard, batches)
    assert taken == [batch is not BAD for batch in batches]
    state = list(model.state_dict().values())
    for of_parameter in optimizer.state.values():
        state.append(of_parameter["momentum_buffer"])
    return state


def test_a_refused_batch_leaves_no_trace():
    without = state_after([GOOD, -GOOD, GOOD])
    refused = state_after([BAD, GOOD, -GOOD, BAD, BAD, GOOD])
    for tensor, other in zip(without, refused, strict=True):
        assert torch.equal(tensor, other)


@pytest.mark.parametrize("watches", [True, False])
def test_the_guard_stops_before_the_weights_change(watches):
    model, optimizer = normed()
    before = [p.clone() for p in model.parameters()]
    guard = NanGuard("stop")
    assert guard.buffers_finite() == 1.0, "before it has seen a model"
    if watches:
        guard.watch(model)
    with pytest.raises(StoppedByGuard, match="loss is nan"):
        train(model, optimizer, guard, [BAD])
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)


def test_the_guard_stops_after_so_many_skips():
    guard = NanGuard("skip", max_skips=2)
    with pytest.raises(StoppedByGuard):
        train(*normed(), guard, [BAD] * 3)


def test_a_rollback_needs_a_run():
    guard = NanGuard("rollback")
    with pytest.raises(BadInput, match="no checkpoints to roll back to"):
        train(*normed(), guard, [BAD])


class Scaled:
    """What Accelerate adds in fp16: a scaler, and an optimizer that steps through it."""

    def __init__(self, optimizer: torch.optim.Optimizer, scale: float):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        self.optimizer = SimpleNamespace(
            param_groups=optimizer.param_groups,
            zero_grad=optimizer.zero_grad,
            step=self._step,
        )
        self._plain = optimizer

    def unscale_gradients(self, optimizer) -> None:
        self.scaler.unscale_(self._plain)

    def _step(self) -> None:
        self.scaler.step(self._plain)
        self.scaler.update()


def test_in_fp16_a_scale_that_is_too_high_is_lowered_and_a_nan_is_skipped():
    model, plain = normed()
    scaled = Scaled(plain, scale=3e38)  # a scaled loss overflows until it has fallen
    guard = NanGuard("stop", max_calibrations=200)
    optimizer = scaled.optimizer
    first, *_, last = train(model, optimizer, guard, [GOOD] * 40, scaled, factor=8.0)
    assert first is False
    assert last is True, "calibrated, not stopped"
    assert scaled.scaler.get_scale() < 3e38
    taken = train(model, optimizer, NanGuard("skip"), [GOOD, BAD, GOOD], scaled)
    assert taken == [True, False, True]
    for parameter in model.parameters():
        assert parameter.isfinite().all()


def test_meters_are_used_as_those_of_detr(capsys):
    meters = Meters(delimiter="\t")
    meters.add_meter("lr", SmoothedValue(window_size=1, fmt="{value:.6f}"))
    for number in meters.log_every([1.0, 2.0, 6.0], every=2, header="epoch 3"):
        meters.update(loss=number, lr=0.1)
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("epoch 3 [2/3]\teta: ")
    assert last.startswith("epoch 3 [3/3]\teta: 0:00:00\tlr: 0.100000\t")
    assert meters.loss.global_avg == 3.0
    assert meters.loss.median == 2.0
    assert meters.loss is meters["loss"]
    with pytest.raises(AttributeError, match="meter 'los' does not exist; there are lr, loss"):
        _ = meters.los
    without_length = meters.log_every(iter("ab"), every=1)
    assert list(without_length) == ["a", "b"]
    assert "[2]" in capsys.readouterr().out
