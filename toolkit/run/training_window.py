"""The window of a run: the micro-batches of one optimizer step, which several processes go through together.

`t` is a `toolkit.run.training.Training` throughout.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from toolkit.base.batch import Batch
from toolkit.base.distributed import reduce_dict
from toolkit.data.batches import Prefetcher
from toolkit.step.execution import without_search
from toolkit.step.guard import boxes_finite, with_finite_boxes
from toolkit.step.losses import WeightedLosses, window_denominators
from toolkit.step.optim import gradient_norm, gradient_norms_of_groups
from toolkit.step.window import Metrics, Window

STEP_STATE_NAMES = ("buffers_finite", "boxes_finite", "state_finite", "signal", "time_s", "notes")


class TrainingWindow(Window):
    """The micro-batches of one optimizer step of a run.

    A script may change `batches` before it iterates over the window; the denominators are counted when the iteration
    begins. Gradients are averaged over the processes once, in the backward pass of the last micro-batch.

    Attributes:
        scale: the loss scale (1 without fp16), set by the NaN guard.
        totals: all values that `reduce` has reduced over the processes: losses, sums and counts of metrics, gradient
            norms, and `STEP_STATE_NAMES`.
        reduced: result of `reduce`; a script may add values of its own, which go into the rows.
        best_step_before: the step of the best evaluation before the window.
        is_in_body: whether the body of the loop is being executed for this window.
        batches_taken: number of micro-batches that were taken from the data for this window.
        is_unscaled: whether the loss scale has been removed from the gradients.
        clips: number of calls of `clip`.
    """

    def __init__(self, t: Any, batches: Sequence[Batch], prefetcher: Prefetcher | None = None):
        super().__init__(
            batches,
            step=t.step,
            seed=t.seed,
            rank=t.accelerator.process_index,
            precision=t.accelerator.mixed_precision,
            device=t.accelerator.device,
        )
        self._t = t
        self._prefetcher = prefetcher or Prefetcher(t.accelerator.device)
        self.best_step_before = t.validation.best.step
        self.is_in_body = True
        self.batches_taken = len(self.batches)  # from the data, whatever the script trains on in their place
        self._boxes_finite = True
        self._grad_norm: Tensor | None = None
        self.totals: dict[str, float] = {}
        self.reduced: dict[str, float] = {}
        self.is_unscaled = False
        self.clips = 0

    def __iter__(self) -> Iterator[Batch]:
        """Yield each micro-batch on the device, with random numbers seeded for it.

        Raises BadInput if the detector is in evaluation mode.
        """
        t = self._t
        t.check.begin_pass(t.detector.training, len(self))
        counts = [self._counts_of(batch) for batch in self.batches]
        self.all_denominators = self.denominators_for(counts)
        self._boxes_finite = boxes_finite(self.batches)
        self.forget_sums()
        for micro, (batch, denominators) in enumerate(zip(self.batches, self.all_denominators, strict=True)):
            arrived = self._prefetcher.arrived(batch)
            if not self._boxes_finite:
                arrived = with_finite_boxes(arrived)
            self.begin_micro_batch(micro, arrived, denominators)
            t.loss_weights.begin_micro_batch(self.step, len(self), _shares(counts[micro], denominators))
            t.check.hand_out(arrived.targets)
            is_last = micro == len(self) - 1
            with self._watched(arrived), nullcontext() if is_last else t.accelerator.no_sync(t.model):
                yield arrived

    def _counts_of(self, batch: Batch) -> dict[str, float]:
        """Count what the losses of a micro-batch are divided by; "own images", "own boxes": those of the script."""
        numbers = {"images": len(batch), "boxes": sum(len(target["labels"]) for target in batch.targets)}
        own_kinds = {*self._t.loss_weights.divided_by.values()}
        own = {f"own {kind}": numbers[kind] for kind in own_kinds}
        return {**self._t.detector.denominators(batch.targets), **own}

    def denominators_for(self, counts: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float | Tensor]]:
        """Return the denominators of the losses for each micro-batch, by name; a collective.

        counts: for each micro-batch, the numbers of images, boxes, ... by name, in this process.
        """
        averaged = self._t.detector.averaged_denominators
        return window_denominators(counts, self.device, self._t.loss_weights.denominators, averaged)

    def _watched(self, batch: Batch) -> AbstractContextManager:
        stack = ExitStack()
        if len(batch) < self._t.sampler.batch_size:  # the last of an epoch: a search would take seconds for one step
            stack.enter_context(without_search())
        for source in self._t.loss_weights.sources:
            stack.enter_context(source.watching(batch))
        return stack

    def autocast(self) -> AbstractContextManager:
        """Return the context manager of mixed precision (autocast) for the forward pass."""
        return self._t.accelerator.autocast()

    def backward(self, weighted: WeightedLosses, metrics: Metrics) -> None:
        """Call `backward` on the weighted total of a micro-batch, and add its losses and metrics to the window's sums.

        Raises BadInput if the loop body has removed boxes of the micro-batch, or the gradients of earlier ones.
        """
        self._t.check.before_backward()
        super().backward(weighted, metrics)
        self._t.check.done["backward"] += 1

    def backward_of(self, total: Tensor) -> None:
        """Call `backward` on a total loss, multiplied by the loss scale in fp16."""
        self._t.accelerator.backward(total)

    def reduce(self) -> dict[str, float]:
        """Reduce losses, metrics and the state of the step over all processes: one collective, one read of the device.

        It also removes the loss scale from the gradients. They are then those of the whole window, averaged over the
        processes.

        Returns:
            the same values on every process: "loss" (the total), each weighted loss by its name, each unweighted one
            with `_unscaled` behind its name, each metric with a count above 0 by its name, and "grad_norm", the norm
            before clipping.

        Raises:
            UnannouncedName: the loop of some process has a loss without a weight; raised on every process.
        """
        t = self._t
        t.check.done["reduce"] += 1
        t.loss_weights.average_gradients()
        t.extra.average_gradients()
        t.accelerator.unscale_gradients()
        self.is_unscaled = True
        self._grad_norm = gradient_norm(t.trained_parameters)
        values = {
            **self.sums,
            "grad_norm": self._grad_norm,
            "buffers_finite": t.guard.buffers_finite(),
            "boxes_finite": float(self._boxes_finite),
            "state_finite": t.guard.next_part_looks_finite(),  # as the last update left it
            "signal": t.signals.received or int(bool(t.log.write_error)),
            "time_s": t.log.timer.last_step_s,
            "notes": float(t.log.has_notes),
        }
        metrics = [f"{name}/{part}" for name in t.detector.metric_names for part in ("sum", "count")]
        norms = ["grad_norm"]
        if t.log.has_row(self.step + 1, t.plan.total_steps, ends_epoch=t.epoch_is_over):
            of_groups = gradient_norms_of_groups(t.optimizer.param_groups)
            values.update(of_groups)
            norms += of_groups
        names = [*t.loss_weights.row_names, *metrics, *norms, *STEP_STATE_NAMES]
        self.totals = reduce_dict(values, names, self.unknown)
        self.reduced = {name: self.totals[name] for name in t.loss_weights.row_names}
        for name in t.detector.metric_names:
            count = self.totals[f"{name}/count"]
            if count > 0:
                self.reduced[name] = self.totals[f"{name}/sum"] / count
        self.reduced["grad_norm"] = self.totals["grad_norm"]
        return self.reduced

    def clip(self, max_norm: float) -> None:
        """Clip the gradients of all trained parameters together to the norm `max_norm`, in place; 0: do not clip.

        Raises BadInput if `reduce` was not called before.
        """
        self.clips += 1
        if self._grad_norm is None:
            self._t.check.before_update()  # raises, and names the line
        if max_norm:
            clip_grads_with_norm_(self._t.trained_parameters, max_norm, self._grad_norm)


def _shares(
    counts: Mapping[str, float], denominators: Mapping[str, float | Tensor]
) -> dict[str, float | Tensor]:
    """Return the factors by which means over a micro-batch's images or boxes count as in one big batch."""
    kinds = [name.removeprefix("own ") for name in counts if name.startswith("own ")]
    return {kind: counts[f"own {kind}"] / denominators[f"own {kind}"] for kind in kinds}
