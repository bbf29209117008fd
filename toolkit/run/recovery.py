"""The NaN guard of a run, and the recovery after a refused update: report, undo, then stop, skip or roll back.

`t` is a `toolkit.run.training.Training` throughout.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from toolkit import index
from toolkit.base.distributed import agree_max, gather_objects, run_on_main, state_from_main, world
from toolkit.base.errors import StoppedByGuard
from toolkit.run.checkpoint import Checkpoint, newest_valid
from toolkit.run.checkpoint_content import by_storage
from toolkit.run.saving import roll_back, save
from toolkit.run.training_window import TrainingWindow
from toolkit.step.guard import (
    STATE_PARTS,
    Action,
    NanGuard,
    forget_unscaling,
    looks_finite,
    named_state,
    nonfinite,
    unusable_rate,
)
from toolkit.step.optim import drop_gradients, gradient_table
from toolkit.step.schedules import is_time


class RunGuard(NanGuard):
    """The NaN guard of a run, which also checks the state of the run, reports refused updates, and recovers from them.

    Attributes:
        start: the initial state of the run, until the first checkpoint is written; None afterwards.
        gradient_table_every: optimizer steps between two tables of gradients on the console; 0: no tables.
    """

    start: Checkpoint | None = None
    gradient_table_every = 0

    def of_run(self, t) -> None:
        """Set the `toolkit.run.training.Training` to guard; call it before any other method."""
        self._t = t
        self._parts_of_state = state_in_parts(t)
        self._is_first_update = True  # of this start
        self.watch(t.detector)

    def look_at_new_state(self) -> None:
        """Start the check of the state again with the present tensors; call it after tensors were replaced."""
        self._parts_of_state = state_in_parts(self._t)

    def next_part_looks_finite(self) -> Tensor:
        """Return whether the next part of the state after the last update looks finite: 1.0 or 0.0, a 0-dim tensor.

        Each call checks another part in turn. The result is not read from the device.
        """
        return next(self._parts_of_state)

    def accepts(self, window: TrainingWindow, reduced: Mapping[str, float]) -> bool:
        """Return whether to make the update of a window; identical on every rank.

        If the result is False, the window has been reported and undone as `run.on_nonfinite` says: go on with the next
        window.

        reduced: result of `window.reduce()`.

        Raises:
            StoppedByGuard: the update is refused and the policy is to stop; the newest finite state is saved.
        """
        t = self._t
        t.check.done["accepts"] += 1
        action, broken = self._decide_about(window, reduced)
        if action is not Action.STEP:
            recover(t, action, broken)
            return False
        every = self.gradient_table_every
        if every and (self._is_first_update or is_time(t.step + 1, every)):
            t.log.say(gradient_table(t.detector.named_parameters(), t.max_norm, top=20))
        self._is_first_update = False
        return True

    def _decide_about(self, window: TrainingWindow, reduced: Mapping[str, float]) -> tuple[Action, list[str]]:
        """Return the action, and the names of non-finite tensors where anything looked suspicious."""
        t = self._t
        totals = window.totals
        losses = {name: reduced[name] for name in ("loss", *t.loss_weights.names)}
        norm = reduced["grad_norm"]
        scaler = t.accelerator.scaler
        scale = None if scaler is None else scaler.get_scale()
        window.scale = 1.0 if scale is None else scale
        losses_are_finite = all(map(math.isfinite, losses.values()))
        rate = unusable_rate(t.optimizer.param_groups)
        is_suspicious = not (math.isfinite(norm) and losses_are_finite)
        is_suspicious |= totals["buffers_finite"] < 1.0 or totals["state_finite"] < 1.0
        broken = broken_state(t, in_window=True) if is_suspicious else []
        faults = [describe_nonfinite(broken)] if broken else []
        if rate:
            faults.append(rate)
        action = self.decide(
            t.step,
            losses,
            norm,
            scale,
            totals["buffers_finite"],
            boxes_finite=totals["boxes_finite"],
            gradients_finite=not math.isfinite(norm) and losses_are_finite and gradients_finite(t.trained_parameters),
            faults=faults,
        )
        return action, broken


def gradients_finite(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether every entry of the gradients is finite on every rank, even if the norm of the gradients overflows.

    A collective, which also reads from the device.
    """
    finite = [p.grad.isfinite().all() for p in parameters if p.grad is not None]
    return not agree_max(int(bool(finite) and not bool(torch.stack(finite).all())))


def recover(t, action: Action, broken: Sequence[str] = ()) -> None:
    """Undo the current accumulation window, whose update was refused, and do what `action` says, on all ranks alike.

    broken: result of `broken_state`.

    Raises:
        StoppedByGuard: the action is to stop, or no checkpoint to roll back to exists.
    """
    if action is Action.CALIBRATE:  # the fp16 scaler looks for its scale: it skips this update by itself
        t.check.refused()
        t.optimizer.step()
        t.optimizer.zero_grad()
        return
    message = _report_refusal(t, action, broken, in_window=True)
    drop_gradients(t.loss_weights)
    forget_unscaling(t.accelerator.scaler)
    act_on_refusal(t, action, message, broken)


def act_on_refusal(t, action: Action, message: str, broken: Sequence[str]) -> None:
    """Stop, roll back to the newest valid checkpoint, or go on with the next window, as `action` says.

    Args:
        message: says what was refused, and is printed or raised.
        broken: result of `broken_state`.

    Raises:
        StoppedByGuard: the action is to stop, or no checkpoint to roll back to exists.
    """
    t.check.refused()
    if action is Action.STOP:
        if broken:
            raise StoppedByGuard(f"{message}\n{_go_back(t)}")
        save(t)
        raise StoppedByGuard(f"{message}\nThe weights before that step are saved.")
    if action is Action.ROLLBACK:
        # The data goes on after the window that broke: run again from the same weights it would break again.
        checkpoint, passed_over = state_from_main(lambda: newest_valid(t.checkpoints.folder))
        if checkpoint is None:
            raise StoppedByGuard(f"{message}\nNo checkpoint to roll back to exists. {' '.join(passed_over)}")
        roll_back(t, checkpoint)
        t.guard.look_at_new_state()
        t.checkpoints.saved_step = t.log.status["step"] = t.step
        if t.validation.best.step > t.step:  # of weights that are gone, which the loop evaluated by itself
            t.validation.best.load_state_dict(checkpoint.of_part("best"))
        t.plan.schedule.scale = t.guard.lr_scale
        t.set_rates()
    t.log.say(f"guard: {message}\n{action.value}: goes on from step {t.step} with the next data.")


# ---------------------------------------------------------------- the state that updates leave


def tensors_to_check(t, in_window: bool = False) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield ((kind, name), tensor) for all tensors of a run that must be finite.

    in_window: yield the buffers as they were before the current window, whose forward pass may have spoiled them.
    """
    yield from named_state(t.detector, t.guard.watched(in_window), t.optimizer, t.loss_weights)
    yield from t.parts.tensors()


def state_in_parts(t) -> Iterator[Tensor]:
    """Yield `looks_finite` of one part of the state after another, endlessly.

    The tensors are collected only once for all parts, because that takes longer than the norms of a part.
    """
    while True:
        state = list(tensors_to_check(t, in_window=True))
        for part in range(STATE_PARTS):
            yield looks_finite(state, part)


def broken_state(t, in_window: bool = False) -> list[str]:
    """Return the names of the non-finite tensors of all ranks, the same on every rank; an empty list if there are none.

    A collective, which reads the whole state. in_window: see `tensors_to_check`.
    """
    of_ranks = gather_objects(nonfinite(tensors_to_check(t, in_window)))
    return list(dict.fromkeys(name for names in of_ranks for name in names))


def _named_tensors(t, names: Sequence[str], in_window: bool) -> dict[str, Tensor]:
    """Return the tensors of this rank that `broken_state` names."""
    named = ((" ".join(kind_and_name), tensor) for kind_and_name, tensor in tensors_to_check(t, in_window))
    return {name: tensor for name, tensor in named if name in names}


def describe_nonfinite(broken: Sequence[str]) -> str:
    """Return a sentence that names the first three of the tensors `broken`, and the number of the others."""
    more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
    return f"the last update left tensors that are not finite: {', '.join(broken[:3])}{more}"


def state_is_sound(t) -> bool:
    """Check the whole state before it is evaluated or saved, so that no non-finite state is ever written.

    Returns:
        True if the state is finite; False if it was not, and the run has been rolled back to the last valid checkpoint.

    Raises:
        StoppedByGuard: the state is not finite, and the run cannot be rolled back or `run.on_nonfinite` is not
            rollback.
    """
    broken = broken_state(t)
    if not broken:
        return True
    action = t.guard.decide(t.step, {}, 0.0, faults=[describe_nonfinite(broken)])
    message = _report_refusal(t, action, broken, in_window=False) if t.window is not None else t.guard.reason
    act_on_refusal(t, action, message, broken)
    return False


def ranks_apart(t) -> str:
    """Return a warning if the weights are not bit-identical on all ranks, else "". A collective; reads the device once.
    """
    if world()[1] == 1:
        return ""
    named = dict(t.detector.named_parameters())
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [p.detach().flatten().view(bits[p.element_size()]).sum() for p in named.values()]
    of_ranks = gather_objects(torch.stack(sums).tolist())
    apart = [name for name, *values in zip(named, *of_ranks, strict=True) if len(set(values)) > 1]
    if not apart:
        return ""
    return (
        f"warning: the processes hold different weights ({', '.join(apart[:2])}; {len(apart)} of {len(named)}); what "
        "changes gradients or weights must be the same on all: draw by a generator seeded with t.seed and t.step"
    )


def keep_start(t) -> None:
    """Copy the initial state of the run to the CPU, as `t.guard.start`, and drop the copy after the first checkpoint.

    Before that checkpoint no other state is known to be finite.
    """
    if t.checkpoints.saved_step >= 0:
        t.guard.start = None
    elif t.guard.start is None:
        stored = by_storage(t.step, t.parts.undone_in_rollback().state_dict())
        t.guard.start = Checkpoint(t.folder, t.step, **_copy_to_cpu(stored))


def _copy_to_cpu(value: Any) -> Any:
    """Return a deep copy of `value` whose tensors, in whatever dicts and lists, are on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy_to_cpu(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copy_to_cpu, value))
    return copy.deepcopy(value)


def _go_back(t) -> str:
    """Ensure that the newest state known to be finite is saved; return a sentence that says which one it is."""
    step = run_on_main(lambda: getattr(newest_valid(t.checkpoints.folder)[0], "step", None))
    if step is not None:
        t.log.status["step"] = step
        return f"The newest finite state is the checkpoint of step {step}."
    if t.guard.start is None:
        return "No state is saved, since none was saved before."
    roll_back(t, t.guard.start)
    save(t)
    t.log.status["step"] = t.step
    return f"No later state was saved before it broke: the state of step {t.step}, with which the run began, is saved."


# ---------------------------------------------------------------- the report


def _report_refusal(t, action: Action, broken: Sequence[str], in_window: bool) -> str:
    """Write the report of this rank, if something is broken on it; return the message for the log.

    broken, in_window: what `broken_state` found, and how it looked.
    """
    window = t.window
    class_names = t.data.class_names
    class_weights = t.detector.class_weights
    context = {
        **window.facts(),
        "step": t.step,  # behind the update, where its state was found to be broken
        "epoch": t.sampler.epoch,
        "losses": {name: window.reduced[name] for name in ("loss", *t.loss_weights.names)},
        "grad_norm": window.reduced["grad_norm"],
        "lr": t.plan.schedule.rates(),
        "denominators": window.all_denominators,
        "loss_weights": t.loss_weights.values(t.step),
        "class_weights": None if class_weights is None else class_weights.tolist(),
        "action": action.value,
        "categories": class_names["categories"],
        "predicates": class_names["predicates"],
    }

    def run_again() -> list[dict]:
        return window.run_again(t.detector, t.loss_weights)

    finding = None
    tensors = _named_tensors(t, broken, in_window)
    if broken:
        of_this_rank = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
        finding = {"where": "state" if of_this_rank else "unknown", "nonfinite_state": of_this_rank}
    elif unusable_rate(t.optimizer.param_groups):
        finding = {"where": "rate"}
    extra = t.extra.state_dict()
    investigate = index.tool("investigate")
    return investigate(t.guard, t.detector, run_again, t.folder, window.batches, context, finding, extra, tensors)
