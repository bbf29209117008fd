"""Out of memory before step 0 or never: the largest batch and one evaluation batch are run beforehand."""

import copy
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from toolkit.data.batches import collate
from toolkit.data.sampling import SampleKey
from toolkit.modes import eval_mode
from toolkit.step.gradients import drop_gradients
from toolkit.step.memory import describe_batch, naming_the_batch
from toolkit.step.nan_report import rerun_window
from toolkit.step.timer import peak_memory_mb
from toolkit.training import Training


def largest_samples(sizes_hw: np.ndarray, num_boxes: np.ndarray, count: int) -> list[int]:
    """Indices of the `count` samples that need most memory: half by their boxes, half by their pixels.

    Args:
        sizes_hw: (N, 2) integers, pixels. num_boxes: (N,) integers.
    """
    by_boxes = np.argsort(-num_boxes, kind="stable")[: count // 2].tolist()
    by_pixels = np.argsort(-sizes_hw.astype(np.int64).prod(1), kind="stable")[:count].tolist()
    return list(dict.fromkeys([*by_boxes, *by_pixels]))[:count]


def state_stand_in(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Tensors as large as the state (Adam's moments, momentum) that the optimizer lacks before its first update.

    A copy of it updates one number, which tells how many tensors it keeps per parameter; itself it stays as it is.
    """
    tensors = []
    for group in optimizer.param_groups:
        number = torch.zeros(1, requires_grad=True)
        number.grad = torch.zeros(1)
        other = copy.copy(optimizer)
        other.state, other.param_groups = defaultdict(dict), [{**group, "params": [number]}]
        type(optimizer).step(other)
        kept = sum(isinstance(v, Tensor) and v.shape == number.shape for v in other.state[number].values())
        # written, for a CPU gives memory only then
        lacking = [p for p in group["params"] if p.requires_grad and p not in optimizer.state]
        tensors += [torch.empty_like(p).fill_(0) for p in lacking for _ in range(kept)]
    return tensors


def probe_memory(t: Training, count: int) -> None:
    """Forward and backward of the batch that needs most memory beside the optimizer's state, and one evaluation batch;
    changes nothing.

    The images are the largest and the most crowded of the training data, as the augmentation of epoch 0 makes them.

    Args:
        count: images of a micro-batch on one device.

    Raises:
        BadInput: memory runs out; names the batch.
    """
    dataset, size_hw = t.loader.dataset.dataset, None
    if t.sampler.sizes is not None:
        size_hw, count = t.sampler.sizes.largest(count)
    chosen = largest_samples(dataset.table.sizes_hw(), dataset.table.num_boxes(), count)
    worst = collate([dataset[SampleKey(0, index, size_hw)] for index in chosen], t.detector.stride)
    t.guard.snapshot(t.detector)
    t.detector.train()
    with naming_the_batch([worst]):
        state = state_stand_in(getattr(t.optimizer, "optimizer", t.optimizer))
        ones = [dict.fromkeys(t.detector.denominator_names, 1.0)]
        rerun_window(t.detector, t.weights, [worst], ones, step=t.step, seed=t.seed, rank=0,
                     precision=t.accelerator.mixed_precision)  # fmt: skip
    del state
    drop_gradients(t.detector)
    drop_gradients(t.weights)
    t.guard.restore(t.detector)
    batch = next(iter(t.validation.loader))
    with naming_the_batch([batch]), torch.no_grad(), eval_mode(t.detector), t.accelerator.autocast():
        if len(batch.targets):
            moved = batch.to(t.accelerator.device)
            t.detector(moved.images, moved.sizes, moved.targets)
    t.log.say(f"memory probe: {describe_batch(worst)}; peak {peak_memory_mb():.0f} MiB")
