"""The NaN guard: no value that is not finite reaches weights, buffers, averages or optimizer state.

`decide` sees reduced values only; these are equal on every rank, and so is the decision. The decision is made before
the update, so a non-finite gradient never reaches weights, optimizer state or averages; only the buffers have to be
restored, because the forward pass alone can damage them (running statistics of a batch norm). A finite gradient can
still make an update that overflows, so the state after an update is checked too: weights, buffers, averages, optimizer
state, learning rates. Each step checks one of `STATE_PARTS` parts of this state, in turn, without a host read; all
parts are checked before an evaluation, a checkpoint or a write to `final/`, and when another check fails.

In a loop of your own the one call `NanGuard.check` is enough; see docs/parts.md.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.base.batch import Batch, HostTarget, Target
from toolkit.base.distributed import reduce_dict
from toolkit.base.errors import BadInput, StoppedByGuard
from toolkit.step.optim import gradient_norm, parameters_of, total_norm

POLICIES = ("stop", "skip", "rollback")
STATE_PARTS = 8  # of the state, of which each step checks one
MAX_FLOAT32 = torch.finfo(torch.float32).max


class Action(Enum):
    """The treatment of the gradients of a window."""

    STEP = "step"
    """Everything is finite: update."""
    CALIBRATE = "calibrate"
    """fp16 only: the loss scale is too high. Let the scaler skip the update and lower it; not a divergence."""
    SKIP = "skip"
    """Restore the buffers, drop the gradients, go on with the next window."""
    ROLLBACK = "rollback"
    """Load weights and optimizer of the last good checkpoint, not the guard's own state, and apply `lr_scale`. Go on
    with the data after this window: from the same weights the same data would break again."""
    STOP = "stop"
    """Restore the buffers, drop the gradients, raise StoppedByGuard."""


def forget_unscaling(scaler: torch.amp.GradScaler | None) -> None:
    """Let a GradScaler unscale gradients again after a window of micro-batches that ended without an update.

    A GradScaler refuses to unscale gradients twice without a call of its `update` in between. This function calls
    `update` with the present scale, which therefore does not change. With None it does nothing.
    """
    if scaler is not None:
        scaler.update(scaler.get_scale())


class NanGuard:
    """The decision whether the gradients of a window are used, and a copy of the buffers from before the window.

    A window is the micro-batches of one optimizer step.

    Args:
        policy: what to do with a window that has a non-finite value: "stop", "skip" or "rollback".
        max_skips: the largest number of windows skipped in succession; the next window that fails stops the run.
        max_rollbacks: the largest number of rollbacks in the whole run; the next failure stops it.
        lr_factor: factor on every learning rate per rollback, see `lr_scale`.
        max_calibrations: a non-finite gradient with finite losses is left to the fp16 scaler while its scale is above
            1, for at most this many windows in succession; then it is divergence.

    Attributes:
        reason: a description of the values that were not finite in the window last refused.
    """

    kept_in_rollback = True  # its counts must survive a rollback

    def __init__(
        self,
        policy: str = "stop",
        max_skips: int = 10,
        max_rollbacks: int = 3,
        lr_factor: float = 1.0,
        max_calibrations: int = 50,
    ):
        if policy not in POLICIES:
            raise BadInput(f"run.on_nonfinite is {policy!r}; expected one of {', '.join(POLICIES)}")
        self.policy = policy
        self.max_skips = max_skips
        self.max_rollbacks = max_rollbacks
        self.lr_factor = lr_factor
        self.max_calibrations = max_calibrations
        self.skips = 0
        self.calibrations = 0
        self.rollbacks = 0
        self.snapshots = 0
        self.reason = ""
        self.checked = 0
        self._model: nn.Module | None = None
        self._slots: list[tuple[dict, str]] = []
        self._names: list[str] = []
        self._copies: list[Tensor] = []
        self._watched: list[int] = []
        self._groups: list[list[int]] = []  # the buffers of a dtype and device each, which one kernel copies

    def check(
        self,
        losses: Mapping[str, float],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        accelerator: Any = None,
    ) -> bool:
        """Decide about one update of a plain loop, after the backward pass and before the step.

            reduced = reduce_dict(losses)
            if guard.check(reduced, model, optimizer, accelerator):
                optimizer.step()

        Losses, gradients and buffers (running statistics) are checked on all ranks, with one collective and one host
        read. A refused update is undone: gradients are dropped, and buffers return to their state after the last
        accepted update; before the first one, to their state when the guard first saw the model.

        Args:
            losses: reduced losses by name, equal on all ranks.
            model: with or without wrappers. Call `watch(model)` before the first forward pass if it has batch norms
                that train; else the statistics of the first batch cannot be undone.
            optimizer: as `accelerator.prepare` returned it, or a plain one.
            accelerator: of Hugging Face Accelerate; its fp16 scaler unscales the gradients, and lowers its scale if
                that is too high, which is not a divergence. None: neither accelerator nor scaler is used.

        Returns:
            True: update. False: go on with the next batch.

        Raises:
            StoppedByGuard: on every rank, under the policy "stop", and when too many updates in succession were
                refused.
            BadInput: the policy is "rollback", which needs the checkpoints of a run.
        """
        if self.policy == "rollback":
            raise BadInput("NanGuard.check: a plain loop has no checkpoints to roll back to; choose stop or skip")
        if self._model is not model:
            self.watch(model)
        scaler = getattr(accelerator, "scaler", None)
        if scaler is not None:
            accelerator.unscale_gradients(optimizer)
        norm = gradient_norm(parameters_of(optimizer.param_groups))
        state = reduce_dict({"norm": norm, "buffers": self.buffers_finite()}, ["norm", "buffers"])
        scale = None if scaler is None else scaler.get_scale()
        action = self.decide(self.checked, losses, state["norm"], scale, state["buffers"])
        self.checked += 1
        if action is Action.STEP:
            self._copy(self._copies, self._live())
            return True
        if action is Action.CALIBRATE:
            optimizer.step()  # the scaler skips it and lowers its scale
            optimizer.zero_grad()
            return False
        self.restore(model)
        optimizer.zero_grad()
        forget_unscaling(scaler)
        if action is Action.STOP:
            raise StoppedByGuard(self.reason)
        return False

    def decide(
        self,
        step: int,
        losses: Mapping[str, float],
        grad_norm: float,
        scale: float | None = None,
        buffers_finite: float = 1.0,
        *,
        boxes_finite: float = 1.0,
        gradients_finite: bool = False,
        faults: Sequence[str] = (),
    ) -> Action:
        """Decide about a window from its reduced values, identically on all ranks; set `reason` if it is refused.

        Args:
            step: updates made so far, for `reason`.
            losses: reduced losses by name.
            grad_norm: total norm of the gradients (without the loss scale).
            scale: loss scale; None without an fp16 scaler.
            buffers_finite: mean over the ranks of `buffers_finite()`.
            boxes_finite: mean over the ranks of `boxes_finite(window)`: the losses need not show it, since a box that
                matches no anchor has no loss.
            gradients_finite: every entry of the gradients is finite, though their norm may not be. The loss scale is
                not the cause then, and the scaler, which checks the entries, would accept them.
            faults: descriptions of faults in the state after the last update, or in the next one, whatever the window
                holds. Another window cannot repair them, so the window is not skipped.
        """
        broken = list(faults)
        if boxes_finite < 1.0:
            broken.append("a box of the batch is not finite")
        broken += [f"{name} is {value}" for name, value in losses.items() if not math.isfinite(value)]
        forward_broken = bool(broken) or buffers_finite < 1.0
        if buffers_finite < 1.0:
            broken.append("a buffer (running statistics of a norm layer) is not finite")
        if not math.isfinite(grad_norm):
            of = " of finite gradients" if gradients_finite else ""
            broken.append(f"the gradient norm{of} is {grad_norm}")
        if not broken:
            self.skips = 0
            self.calibrations = 0
            return Action.STEP
        self.reason = f"after step {step}: {', '.join(broken)}"
        only_gradients = not forward_broken and not gradients_finite
        if only_gradients and scale is not None and scale > 1.0:
            self.calibrations += 1
            if self.calibrations <= self.max_calibrations:
                return Action.CALIBRATE
        self.calibrations = 0
        return self._answer(can_skip=not faults)

    def _answer(self, can_skip: bool) -> Action:
        if self.policy == "stop":
            return Action.STOP
        if self.policy == "skip" and can_skip and self.skips < self.max_skips:
            self.skips += 1
            return Action.SKIP
        if self.policy == "rollback" and self.rollbacks < self.max_rollbacks:
            self.rollbacks += 1
            return Action.ROLLBACK
        return Action.STOP

    @property
    def lr_scale(self) -> float:
        """The factor on all learning rates after the rollbacks so far."""
        return self.lr_factor**self.rollbacks

    def watch(self, model: nn.Module) -> None:
        """Record which float buffers of a model are finite now; only these are checked later.

        A buffer that holds infinities from the start, such as an attention mask, is not an error. Call `watch` before a
        checkpoint is loaded, because a damaged buffer in the checkpoint would be taken for a mask. If `watch` was not
        called, the first `snapshot` does it.
        """
        self._model = model
        self._slots = []
        self._names = []
        for name, module in model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    self._slots.append((module._buffers, key))
                    self._names.append(f"{name}.{key}" if name else key)
        live = self._live()
        self._copies = [buffer.clone() for buffer in live]
        self._watched = []
        groups: dict[tuple, list[int]] = {}
        for i, buffer in enumerate(live):
            groups.setdefault((buffer.dtype, buffer.device), []).append(i)
            has_floats = buffer.is_floating_point() and buffer.numel()
            if has_floats and bool(buffer.isfinite().all()):
                self._watched.append(i)
        self._groups = list(groups.values())

    def watched(self, before_window: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Return (name, buffer) of each buffer that must stay finite, see `watch`.

        before_window: False: the buffers of the model; True: their copies from the last `snapshot`.
        """
        buffers = self._copies if before_window else self._live()
        return ((self._names[i], buffers[i]) for i in self._watched)

    def snapshot(self, model: nn.Module) -> None:
        """Copy all buffers of the unwrapped model, persistent or not, for `restore`; no host read."""
        self.snapshots += 1
        if self._model is not model:
            self.watch(model)
        live = self._live()
        for i, buffer in enumerate(live):
            saved = self._copies[i]
            if saved.shape != buffer.shape or saved.device != buffer.device:
                self._copies[i] = torch.empty_like(buffer)
        self._copy(self._copies, live)

    def restore(self, model: nn.Module) -> None:
        """Restore the buffers in place, as they were at the last `snapshot` of this model."""
        if self._model is not model:
            raise ValueError("restore: no snapshot of this model was made")
        for (owner, key), saved in zip(self._slots, self._copies, strict=True):
            if owner[key] is None or owner[key].shape != saved.shape:
                owner[key] = saved.clone()
        self._copy(self._live(), self._copies)

    def buffers_finite(self) -> Tensor:
        """Return a 0-dim tensor: 1.0 while all buffers that were finite at `watch` are still finite, else 0.0."""
        live = self._live()
        watched = [live[i] for i in self._watched]
        if not watched:
            return torch.ones(())
        # The largest magnitude of all is NaN or infinite when any entry is.
        largest = total_norm(watched, math.inf)
        return largest.isfinite().float()

    def _live(self) -> list[Tensor]:
        return [owner[key] for owner, key in self._slots]

    @torch.no_grad()
    def _copy(self, into: list[Tensor], source: list[Tensor]) -> None:
        """Copy the values of all buffers, those of a dtype and device at once: else a kernel would copy each."""
        for group in self._groups:
            torch._foreach_copy_([into[i] for i in group], [source[i] for i in group])

    def state_dict(self) -> dict:
        """Return the numbers of skips, calibrations and rollbacks as JSON values."""
        return {
            "skips": self.skips,
            "calibrations": self.calibrations,
            "rollbacks": self.rollbacks,
        }

    def load_state_dict(self, state: Mapping) -> None:
        self.skips = state["skips"]
        self.calibrations = state["calibrations"]
        self.rollbacks = state["rollbacks"]


def boxes_finite(window: Iterable[Batch]) -> bool:
    """Return whether every box of the micro-batches is finite. The targets must be on the CPU, or the host waits."""
    boxes = []
    for batch in window:
        boxes += [target["boxes"].flatten() for target in batch.targets if "boxes" in target]
    return not boxes or bool(torch.cat(boxes).isfinite().all())


def with_finite_boxes(batch: Batch) -> Batch:
    """Return a copy of the batch in which the box [0, 0, 1, 1] replaces each box with a NaN or an infinity.

    The guard refuses the window of such a batch anyway. But every rank has to complete its forward and backward pass,
    and a detector that computes the grid cell or pyramid level of an infinite box would raise an error.
    """
    targets = [_with_finite_boxes(target) for target in batch.targets]
    return replace(batch, targets=targets)


def _with_finite_boxes(target: Target) -> Target:
    if "boxes" not in target:
        return target
    boxes = target["boxes"]
    is_finite = boxes.isfinite().all(dim=1, keepdim=True)
    pixel = boxes.new_tensor([0.0, 0.0, 1.0, 1.0])
    finite = {**target, "boxes": torch.where(is_finite, boxes, pixel)}
    if "on_host" in target:
        finite["on_host"] = HostTarget(_with_finite_boxes(target["on_host"]))
    return finite


# ---- the state that an update leaves ---------------------------------------------------------------------------------


def named_state(
    model: nn.Module,
    buffers: Iterable[tuple[str, Tensor]],
    optimizer: torch.optim.Optimizer,
    weights: nn.Module,
) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield ((kind, name), tensor) of everything that a run trains: weights, buffers and optimizer state.

    buffers: (name, buffer) of the buffers that must be finite. weights: the module with the learned weights of losses.
    """
    names = {}
    for kind, module in (("weight", model), ("loss weight", weights)):
        for name, parameter in module.named_parameters():
            names[parameter] = name
            yield (kind, name), parameter
    for name, buffer in buffers:
        yield ("buffer", name), buffer
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
                name = names.get(parameter, "?")
                yield (f"{key} of", name), value


@torch.no_grad()
def looks_finite(state: Iterable[tuple[object, Tensor]], part: int) -> Tensor:
    """Return 1.0 if the norm of one of `STATE_PARTS` parts of the state is finite, else 0.0; 0-dim, no host read.

    state: see `named_state`. part: number of the part, from 0. 0.0 is only a suspicion, because the norm of finite
    entries can overflow; `nonfinite` then finds out. (The largest magnitude would not overflow, but takes fifteen times
    as long on a CPU.)
    """
    tensors = []
    for i, (_, tensor) in enumerate(state):
        if i % STATE_PARTS == part and tensor.numel():
            tensors.append(tensor)
    if not tensors:
        return torch.ones(())
    norm = total_norm(tensors)
    return norm.isfinite().float()


@torch.no_grad()
def nonfinite(state: Iterable[tuple[tuple[str, str], Tensor]]) -> list[str]:
    """Return the names of the tensors that hold a NaN or an infinity, such as "exp_avg_sq of head.weight".

    state: see `named_state`. The host waits for the result.
    """
    named = [(kind_and_name, tensor) for kind_and_name, tensor in state if tensor.is_floating_point()]
    # All norms with one read per device; a finite norm means finite entries.
    finite = [torch.linalg.vector_norm(tensor).isfinite() for _, tensor in named]
    by_device: dict[torch.device, list[int]] = {}
    for i, flag in enumerate(finite):
        by_device.setdefault(flag.device, []).append(i)
    suspects = []
    for indices in by_device.values():
        flags = torch.stack([finite[i] for i in indices]).tolist()
        suspects += [i for i, fine in zip(indices, flags, strict=True) if not fine]
    names = []
    for i in sorted(suspects):
        kind_and_name, tensor = named[i]
        if not bool(tensor.isfinite().all()):  # the norm of finite entries can overflow
            names.append(" ".join(kind_and_name))
    return names


def unusable_rate(groups: Iterable[dict]) -> str:
    """Describe the first learning rate of these groups that is too large for float32; "" if there is none.

    With such a rate torch raises an error in the middle of the update, when some weights have changed and others have
    not.
    """
    for group in groups:
        beta = group["betas"][0] if "betas" in group else 0.0  # Adam divides the rate by 1 - beta1 in its first step
        first_rate = group["lr"] / (1.0 - beta)
        decay = max(1.0, group.get("weight_decay", 0.0))
        if not first_rate * decay <= MAX_FLOAT32:  # also NaN
            return f"the learning rate of {group.get('name', 'a group')} is {group['lr']:g}, too large for float32"
    return ""
