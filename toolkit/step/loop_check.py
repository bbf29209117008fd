"""The check of the body of a training loop: no call that an update needs is missing or made twice.

The loop is in the script, where people change it. A missing call is reported in one sentence that shows the missing
line: before the update if the update would be wrong, else before the next window.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from toolkit.base.errors import BadInput
from toolkit.step.optim import parameters_of

# An action on a window -> its line, and the effect of leaving it out.
LINES_BEFORE_UPDATE = {
    "backward": (
        "window.backward(weighted, metrics)",
        "rows, averages and the guard would not know the losses",
    ),
    "reduce": ("reduced = window.reduce()", "a NaN in a gradient would reach the weights"),
    "accepts": ("if not t.guard.accepts(window, reduced): continue", "a NaN would reach the weights"),
    "clip": ("window.clip(t.max_norm)", "gradients may be larger than `optim.max_norm`"),
}
LINES_AFTER_UPDATE = {
    "update": ("t.optimizer.step()", "nothing would be trained"),
    "ema": ("t.ema.update()", "the averaged weights would stay the initial ones"),
    "meters": ("t.meters.update(reduced)", "the console would show no losses"),
}
LOOP_LINES = LINES_BEFORE_UPDATE | LINES_AFTER_UPDATE
MAY_BE_LEFT_OUT = LOOP_LINES.keys() - {"reduce"} | {"train"}  # `t.model.train()`, before the windows


class LoopCheck:
    """A comparison of the calls made in a window with the calls that an update needs. No tensor is read.

    Args:
        counts: function that returns how often some actions were done, by their names in `LOOP_LINES`; the objects of
            these actions count them. A name that is neither in its result nor in `done` is not checked.

    Attributes:
        done: how often all other actions were done, increased by the code that does them.
        micro_batches: the number of micro-batches of the current window, or of the current pass through the window.
        left_out: names of the calls that the loop may leave out.
        warned: kinds of warnings that were already given.
    """

    def __init__(self, counts: Callable[[], Mapping[str, int]]):
        self._counts = counts
        self.done = Counter(dict.fromkeys(LOOP_LINES.keys() - {"meters", "ema", "clip"}, 0))
        self.left_out: set[str] = set()
        self._start: Mapping[str, int] | None = None  # None: outside a window
        self._step = 0
        self.micro_batches = 1
        self._nested = 0  # PyTorch calls the hooks once more if `step` of a subclass calls that of its class
        self._handed_out: list[tuple[Mapping, int]] = []  # targets of the micro-batch, with their numbers of boxes
        self._had_gradients = False  # before the micro-batch
        self._others: dict[int, str] = {}  # optimizers that are not registered: id -> in words
        self._told_others: set[int] = set()
        self._versions: int | None = None  # of the parameters, after the last update
        self.warned: set[str] = set()

    def watch(self, optimizer: torch.optim.Optimizer, on_update: Callable[[], None]) -> None:
        """Count the updates of the optimizer, and check before each of them.

        on_update: called after each update inside a window.
        """
        inner = getattr(optimizer, "optimizer", optimizer)  # inside Accelerate's
        self._optimizer = optimizer
        self._groups = len(inner.param_groups)

        def before(_, args: tuple, kwargs: dict) -> None:
            if self._nested == 0:
                self.before_update()
                self._ask_of_update(kwargs.get("closure", args[1] if len(args) > 1 else None))
            self._nested += 1

        def after(*_) -> None:
            self._nested -= 1
            if self._nested == 0:
                self.done["update"] += 1
                if self._start is not None:
                    on_update()

        inner.register_step_pre_hook(before)
        inner.register_step_post_hook(after)

    def leave_out(self, names: Iterable[str]) -> None:
        """Allow the loop to leave out the calls of these names.

        Raises BadInput for a name that is not in `MAY_BE_LEFT_OUT`.
        """
        unknown = [name for name in names if name not in MAY_BE_LEFT_OUT]
        if unknown:
            choices = ", ".join(name for name in (*LOOP_LINES, "train") if name in MAY_BE_LEFT_OUT)
            raise BadInput(f"t.without: there is no {', '.join(map(repr, unknown))}; there are {choices}")
        self.left_out |= set(names)

    def begin(self, step: int, micro_batches: int) -> None:
        """Begin a window of this many micro-batches after `step` updates."""
        self._start = self._now()
        self._step = step
        self.micro_batches = micro_batches
        self._nested = 0

    def _now(self) -> dict[str, int]:
        return {**self.done, **self._counts()}

    def before_update(self) -> None:
        """Raise BadInput if a call that must come before the update is missing; do nothing outside of a window."""
        if self._start is not None:
            self._compare(LINES_BEFORE_UPDATE, "the update comes too early")

    def _ask_of_update(self, closure: Callable | None) -> None:
        """Raise BadInput if the update uses gradients that were not checked, or has none."""
        if self._start is None or "update" in self.left_out:
            return
        where = f"the loop, step {self._step}: "
        if closure is not None:
            raise BadInput(
                f"{where}`t.optimizer.step(closure)` takes gradients that come after the guard and the clipping; "
                "compute them before `window.reduce()`, and call `t.optimizer.step()`"
            )
        if not self._has_gradients():
            raise BadInput(
                f"{where}the update has no gradients: was `zero_grad()` called before it? `t.windows()` does that"
            )

    def same_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise BadInput if the script has replaced the watched optimizer, or added a group to it."""
        if optimizer is not self._optimizer:
            raise BadInput(
                f"t.optimizer is a {type(optimizer).__name__}, not the optimizer that s.training made, the only "
                "one that rates, checks and checkpoints know. Choose one by optim.name, or keep it and put a rule of "
                "your own behind t.optimizer.step(), with its state in t.extra"
            )
        now = len(optimizer.param_groups)
        if now != self._groups:
            raise BadInput(
                f"t.optimizer has {now} groups, s.training made {self._groups}. New parameters get an optimizer "
                "of their own in t.extra; parameters thawed later are in the optimizer from the start "
                "(docs/change_the_loop.md, recipes 4 and 9)"
            )

    def begin_pass(self, training: bool, micro_batches: int) -> None:
        """Begin a pass through the micro-batches of a window.

        training: whether the detector is in training mode; BadInput is raised if it is not, unless "train" may be left
            out. micro_batches: their present number, which the loop may have changed.
        """
        if not training and "train" not in self.left_out:
            raise BadInput(
                "the loop: the detector is in evaluation mode; call t.model.train() after an evaluation of your own, "
                'or say t.without("train") in train'
            )
        self.micro_batches = micro_batches
        self._handed_out = []

    def hand_out(self, targets: Iterable[Mapping]) -> None:
        """Record that the loop is given the next micro-batch of a pass, with these targets."""
        self._had_gradients = bool(self._handed_out) and self._has_gradients()
        self._handed_out = [(target, len(target["labels"])) for target in targets]

    def before_backward(self) -> None:
        """Raise BadInput if the loop changed the number of boxes of the micro-batch, or cleared earlier gradients."""
        if any(len(target["labels"]) != count for target, count in self._handed_out):
            raise BadInput(
                "the loop: boxes were changed inside of `for batch in window`, whose denominators count those of "
                "before; change window.batches before that line (docs/change_the_loop.md, recipe 8)"
            )
        if self._had_gradients and not self._has_gradients():
            raise BadInput(
                "the loop: the gradients of earlier micro-batches are gone; take zero_grad out of the loop, "
                "t.windows() does it"
            )

    def _has_gradients(self) -> bool:
        parameters = parameters_of(self._optimizer.param_groups)
        return any(parameter.grad is not None for parameter in parameters)

    def refused(self) -> None:
        """End a window that the guard refused; such a window needs none of the calls of an update."""
        self._start = None

    @property
    def was_refused(self) -> bool:
        """Whether the guard has refused the window and thereby ended it."""
        return self._start is None

    def end(self) -> bool:
        """End the window; return whether it was trained on, or False if no part of an update was done.

        Raises BadInput if a part of an update was left out, or done twice.
        """
        now = self._now()
        trained = any(now[name] != self._start[name] for name in LINES_AFTER_UPDATE if name in now)
        if trained:
            self._compare(LOOP_LINES, "the window is over")
        self._start = None
        return trained

    def _compare(self, names: Iterable[str], when: str) -> None:
        start = self._start
        now = self._now()
        faults = []
        for name in names:
            if name in self.left_out or name not in now:
                continue
            made = now[name] - start.get(name, 0)  # the loop may ask for clipping from inside a window on
            right = self.micro_batches if name == "backward" else 1
            line, without = LOOP_LINES[name]
            if made < right:
                times = "" if right == 1 else f" for {right - made} of {right} micro-batches"
                faults.append(
                    f"the loop, step {self._step}: {when}, and `{line}` was not done{times}; without it {without}. "
                    f'Put it back, or say t.without("{name}") in train'
                )
            elif made > right:
                faults.append(
                    f"the loop, step {self._step}: `{line}` was done {made} times in a window, not {right}; one "
                    "window is one update, and a further pass through it belongs before that"
                )
        if faults:
            self._start = None  # reported once
            raise BadInput(faults)

    @contextmanager
    def noting_others(self, registered: Callable[[], Iterable[torch.optim.Optimizer]]) -> Iterator[None]:
        """Record each optimizer that is stepped inside the block and is not registered, for `new_others`.

        registered: function that returns the registered optimizers.
        """

        def note(optimizer: torch.optim.Optimizer, *_) -> None:
            if all(optimizer is not getattr(entry, "optimizer", entry) for entry in registered()):
                count = sum(len(group["params"]) for group in optimizer.param_groups)
                self._others.setdefault(id(optimizer), f"{type(optimizer).__name__} of {count} parameters")

        watching = register_optimizer_step_post_hook(note)
        try:
            yield
        finally:
            watching.remove()

    def remember_weights(self, model: nn.Module) -> None:
        """Record the version counters of the weights after an update, for `weights_were_changed`."""
        self._versions = _count_changes(model)

    def weights_were_changed(self, model: nn.Module) -> bool:
        """Return whether the weights were changed since `remember_weights`."""
        return self._versions not in (None, _count_changes(model))

    def new_others(self) -> list[str]:
        """Return a description of each optimizer that `noting_others` has recorded since the last call."""
        new = self._others.keys() - self._told_others
        self._told_others |= new
        return sorted(self._others[key] for key in new)


def _count_changes(model: nn.Module) -> int:
    """Sum the version counters of the parameters, which count changes in place."""
    return sum(parameter._version for parameter in model.parameters())
