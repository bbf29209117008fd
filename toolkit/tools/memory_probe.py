"""Checks before the first step that memory suffices for training and evaluation: `run.probe_memory`."""

import copy
from collections import defaultdict

import torch
from torch import Tensor

from toolkit.base.batch import Batch
from toolkit.base.memory import EVALUATION_NEEDS_LESS, describe_batch, naming_the_batch, peak_memory_mb
from toolkit.step.execution import in_float32
from toolkit.step.freezing import eval_mode
from toolkit.step.optim import drop_gradients
from toolkit.step.window import Window


def probe_memory(t, worst: Batch) -> None:
    """Run forward and backward pass of a training batch and the forward pass of an evaluation batch, and print the peak
    memory; the state of the run is not changed.

    Tensors of the size of the optimizer's state are allocated too.

    Args:
        t: a `toolkit.run.training.Training`.
        worst: the batch that needs most memory, see `toolkit.data.pipeline.largest_batch`.

    Raises:
        BadInput: memory runs out; the message names the batch.
    """
    device = t.accelerator.device
    t.guard.snapshot(t.detector)
    t.detector.train()
    with naming_the_batch(lambda: [worst]):
        state = state_stand_in(getattr(t.optimizer, "optimizer", t.optimizer))
        denominators = dict.fromkeys(t.detector.denominator_names, 1.0)
        window = Window(
            [worst],
            [denominators],
            step=t.step,
            seed=t.seed,
            precision=t.accelerator.mixed_precision,
        )
        # The next window is copied to the device while this one is at work.
        next_window = [worst.to(device) for _ in range(t.plan.accumulation_steps)]
        window.run_again(t.detector, t.loss_weights)
    del state, next_window
    drop_gradients(t.detector)
    drop_gradients(t.loss_weights)
    t.guard.restore(t.detector)
    batch = next(iter(t.validation.loader))
    named = naming_the_batch(lambda: [batch], EVALUATION_NEEDS_LESS)
    with named, torch.no_grad(), eval_mode(t.detector), in_float32(t.detector, device):
        if len(batch.targets):
            moved = batch.to(device)
            t.detector(moved.images, moved.sizes, moved.targets)
    t.log.say(f"memory probe: {describe_batch(worst)}; peak {peak_memory_mb():.0f} MiB")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # later peaks are those of the run


def state_stand_in(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return tensors of the size of the state (Adam's moments, momentum) that an optimizer allocates at its first step.

    How many tensors it keeps per parameter is found by an update of a single number with a copy of the optimizer; the
    optimizer itself is not changed.
    """
    tensors = []
    for group in optimizer.param_groups:
        shape = (1,) * max(1, group["params"][0].ndim)  # Muon accepts matrices only
        number = torch.zeros(shape, requires_grad=True)
        number.grad = torch.zeros(shape)
        other = copy.copy(optimizer)
        other.state = defaultdict(dict)
        other.param_groups = [{**group, "params": [number]}]
        type(optimizer).step(other)
        kept = sum(isinstance(v, Tensor) and v.shape == number.shape for v in other.state[number].values())
        # filled, because a CPU allocates the memory only then
        lacking = [p for p in group["params"] if p.requires_grad and p not in optimizer.state]
        tensors += [torch.empty_like(p).fill_(0) for p in lacking for _ in range(kept)]
    return tensors
