"""The window: the micro-batches of one optimizer step, and everything that their gradients depend on.

A training loop goes through each window once. The report of a NaN stores the window; replaying a report or probing the
memory runs the window again, on a detector without wrappers and without other processes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from toolkit.base.batch import Batch
from toolkit.base.seeding import OUTSIDE_MICRO_BATCHES, seed_micro_batch, seed_step
from toolkit.step.losses import LossWeights, WeightedLosses

Metrics = Mapping[str, tuple[Tensor, Tensor]]


def autocast(device_type: str, precision: str) -> torch.autocast:
    """Return the autocast of a precision: "no", "fp16" or "bf16"."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    return torch.autocast(device_type, dtype, enabled=dtype is not None)


class Window:
    """The micro-batches of one optimizer step of one process.

        for batch in window:    # on the device, its random numbers seeded
            with window.autocast():
                outputs = model(batch.images, batch.sizes, batch.targets)
            losses, metrics = detector.criterion(outputs, batch.targets, window.denominators)
            window.backward(loss_weights(losses), metrics)

    A second loop over the window is a second pass over the same batches, with the same random numbers.

    Args:
        batches: micro-batches.
        all_denominators: by name, the denominators of the losses of each micro-batch, see `window_denominators`.
        step: optimizer steps made before this one.
        seed: of the run.
        rank: of the process.
        precision: "no", "fp16" or "bf16".
        scale: loss scale.
        device: where the batches go.

    Attributes:
        denominators: those of the current micro-batch.
        sums: sums over the micro-batches so far: of each loss, weighted and without its weight ("<name>_unscaled"), and
            of the sums and counts of metrics.
        losses: the losses of each micro-batch so far, without their weights.
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        all_denominators: Sequence[Mapping[str, float | Tensor]] = (),
        *,
        step: int = 0,
        seed: int = 0,
        rank: int = 0,
        precision: str = "no",
        scale: float = 1.0,
        device: torch.device | str = "cpu",
    ):
        self.batches = list(batches)
        self.all_denominators = list(all_denominators)
        self.step = step
        self.seed = seed
        self.rank = rank
        self.precision = precision
        self.scale = scale
        self.device = torch.device(device)
        self.denominators: Mapping[str, float | Tensor] = {}
        self.sums: dict[str, Tensor | float] = {}
        self.losses: list[dict[str, Tensor]] = []
        self.unknown: list[str] = []  # losses without a weight

    def __len__(self) -> int:
        """Return the number of micro-batches."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        """Yield each micro-batch on the device, seeded by (seed, step, rank, micro-batch)."""
        self.forget_sums()
        for micro, (batch, denominators) in enumerate(zip(self.batches, self.all_denominators, strict=True)):
            on_device = batch.to(self.device)
            self.begin_micro_batch(micro, on_device, denominators)
            yield on_device

    def forget_sums(self) -> None:
        """Clear the sums and losses of the last pass over the micro-batches; each pass begins with this."""
        self.sums = {}
        self.losses = []
        self.unknown = []

    def seed_what_is_outside(self) -> None:
        """Seed, by (seed, step, rank), the random numbers that a loop draws outside of the micro-batches."""
        seed_step(self.seed, self.step, self.rank, OUTSIDE_MICRO_BATCHES)

    def begin_micro_batch(self, micro: int, batch: Batch, denominators: Mapping[str, float | Tensor]) -> None:
        """Seed the random draws of a micro-batch, and set the denominators of its losses.

        Random numbers become functions of numbers that are known after a resume, so no generator state has to be saved:
        dropout and denoising noise of (seed, step, rank, micro-batch), random samples of boxes of (seed, step, image
        id).

        micro: number of the micro-batch in the window, from 0. batch: its targets are changed, see `seed_images`.
        """
        seed_micro_batch(batch.targets, self.seed, self.step, self.rank, micro)
        self.denominators = denominators

    def autocast(self) -> AbstractContextManager:
        """Return the autocast for the forward pass."""
        return autocast(self.device.type, self.precision)

    def backward(self, weighted: WeightedLosses, metrics: Metrics) -> None:
        """Call `backward` on the weighted total of a micro-batch, and add its losses and metrics to the sums.

        metrics: (sum, count) by name, as a criterion returns them.
        """
        self.backward_of(weighted.total)
        self.add(weighted, metrics)

    def backward_of(self, total: Tensor) -> None:
        """Call `backward` on a total, times the loss scale."""
        (total * self.scale).backward()

    def add(self, weighted: WeightedLosses, metrics: Metrics) -> None:
        """Add the losses and metrics of a micro-batch to the sums."""
        entries: dict[str, Tensor | float] = {"loss": weighted.total, **weighted.weighted}
        for name, value in weighted.unweighted.items():
            entries[f"{name}_unscaled"] = value
        for name, (total, count) in metrics.items():
            entries[f"{name}/sum"] = total
            entries[f"{name}/count"] = count
        for name, value in entries.items():
            value = value.detach() if isinstance(value, Tensor) else value
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.losses.append(weighted.unweighted)
        self.unknown += weighted.unknown

    def run_again(self, detector: nn.Module, loss_weights: LossWeights) -> list[dict[str, Tensor]]:
        """Run forward, criterion and backward of all micro-batches on a detector without wrappers.

        No collective is made. Returns the losses of each micro-batch without their weights; the gradients stay in the
        parameters.
        """
        device = next(detector.parameters()).device
        again = Window(self.batches, self.all_denominators, **self.facts(), device=device)
        for batch in again:
            with again.autocast():
                outputs = detector(batch.images, batch.sizes, batch.targets)
            losses, metrics = detector.criterion(outputs, batch.targets, again.denominators)
            again.backward(loss_weights.weigh(losses, self.step, len(self)), metrics)
        return again.losses

    def facts(self) -> dict:
        """Return step, seed, rank, precision and loss scale as JSON values.

        A report stores them with the batches and denominators, so that the window can be built again.
        """
        return {
            "step": self.step,
            "seed": self.seed,
            "rank": self.rank,
            "precision": self.precision,
            "scale": self.scale,
        }
