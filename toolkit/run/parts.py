"""The parts of a run: all objects with state that checkpoints hold, with a common interface.

Every part is saved in each checkpoint and restored when a run resumes. When a run rolls back to an earlier checkpoint,
only weights and optimizer and what belongs to them are restored; a part with `kept_in_rollback = True` keeps its
present state: the place in the data, the counts of the NaN guard, the rows. A new part is a module and a line in
`Training.parts`.
"""

import copy
from collections import UserDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from toolkit.base.distributed import state_from_main, world
from toolkit.base.errors import BadInput
from toolkit.data.sampling import EpochSampler
from toolkit.data.table import DetectionTable
from toolkit.run.checkpoint import Checkpoint
from toolkit.step.optim import average_gradients, load_state

# Of a parameter group, what the settings say of its updates. The learning rates follow from `initial_lr`.
RATES = ("initial_lr", "weight_decay", "momentum", "nesterov", "betas")


class Part(Protocol):
    """An object whose state is kept in the checkpoints of a run, such as an `nn.Module` or an object of the toolkit.

    Tensors at the top level of the state are stored in a file of tensors; all other values must be JSON values.
    `load_state_dict` may return a list of sentences on what differs from the run so far. Two members are optional:
    `kept_in_rollback = True` for a part that a rollback does not restore, and `tensors()`, which yields
    ((kind, name), tensor) for all tensors that must be finite.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state; see the class for the values that it may have."""

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Restore a state that `state_dict` returned."""


class OptimizerPart:
    """The part of a run that holds an optimizer; it is restored by `toolkit.step.optim.load_state`.

    keeps_rates: whether the rates, decays and momentum of the groups stay those of this command.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, keeps_rates: bool = False):
        self._optimizer = optimizer
        self._keeps_rates = keeps_rates

    def state_dict(self) -> dict:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Restore the optimizer, with its present rates if `keeps_rates`."""
        own = [{key: group[key] for key in RATES if key in group} for group in self._optimizer.param_groups]
        load_state(self._optimizer, state)
        if self._keeps_rates:
            for group, rates in zip(self._optimizer.param_groups, own, strict=True):
                group.update(rates)


class WeightFacts:
    """The part of a run that records which parameters a script has frozen in its loop, and which buffers are infinite
    by design.

    Parameters frozen in the loop stay frozen in a resumed run.

    Attributes:
        infinite: names of floating-point buffers that were not finite at the start of the run, such as masks.
    """

    kept_in_rollback = True

    def __init__(self, detector: nn.Module):
        self._detector = detector
        self._trained_at_start = {name for name, p in detector.named_parameters() if p.requires_grad}
        buffers = dict(detector.named_buffers())
        floats = [name for name in detector.state_dict() if name in buffers and buffers[name].is_floating_point()]
        self.infinite = [name for name in floats if not bool(buffers[name].isfinite().all())]

    def state_dict(self) -> dict:
        """Return the names of the parameters frozen since the start, and of the infinite buffers, as JSON values."""
        parameters = self._detector.named_parameters()
        frozen = [name for name, p in parameters if name in self._trained_at_start and not p.requires_grad]
        return {"frozen": frozen, "infinite": self.infinite}

    def load_state_dict(self, state: Mapping) -> list[str]:
        """Freeze the parameters that the script had frozen in its loop; return a list of one sentence if there are any,
        else an empty list.
        """
        names = state["frozen"]
        parameters = dict(self._detector.named_parameters())
        for name in names:
            parameters[name].requires_grad_(False)
        if not names:
            return []
        return [f"{len(names)} parameters that the loop had frozen stay frozen, such as {names[0]}"]


@dataclass
class TrainingData:
    """The data of a run.

    Attributes:
        loader: yields the batches of an epoch, from the sampler's place in the epoch on.
        tables: the data tables "training" and "validation". A resumed run says which of them have changed.
        changes: a sentence for each table that is not the one of the checkpoint that was restored.
    """

    loader: DataLoader | None
    tables: Mapping[str, DetectionTable]
    changes: list[str] = field(default_factory=list, init=False)

    kept_in_rollback = True

    @property
    def class_names(self) -> dict[str, list]:
        """Categories, predicates and attributes of the validation data, which the detector predicts, as JSON values."""
        table = self.tables["validation"]
        return {
            "categories": [asdict(category) for category in table.categories],
            "predicates": list(table.predicates),
            "attributes": list(table.attributes),
        }

    def state_dict(self) -> dict:
        """Return `class_names`, and under `tables` the `identity` of each table, as JSON values."""
        return {**self.class_names, "tables": {name: table.identity for name, table in self.tables.items()}}

    def _changes(self, state: Mapping) -> list[str]:
        """Return a sentence for each table that is not the one of a checkpoint."""
        before = state["tables"]
        changed = {name: table.changed_since(before[name]) for name, table in self.tables.items() if name in before}
        return [f"the {name} data are not those of the checkpoint ({what})" for name, what in changed.items() if what]

    def load_state_dict(self, state: Mapping) -> list[str]:
        """Compare the tables with those of a checkpoint, and return a sentence for each table that has changed.

        Nothing is restored: the run goes on with the present data, which may have been changed on purpose.
        """
        goes_on = "the run goes on with the present data, so it is not the same as the interrupted one"
        self.changes = self._changes(state)
        return [f"{change}: {goes_on}" for change in self.changes]


class PlaceInData:
    """The part of a run that holds the place in the data: the sampler.

    A place in other data is refused. The message then also says what `data`, which is restored before, found changed.
    """

    kept_in_rollback = True

    def __init__(self, sampler: EpochSampler, data: TrainingData):
        self._sampler = sampler
        self._data = data

    def state_dict(self) -> dict:
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict) -> list[str]:
        """Restore the place, and return sentences on what differs. Raises BadInput if it is a place in other data."""
        try:
            return self._sampler.load_state_dict(state)
        except BadInput as error:
            raise BadInput([*error.problems, *self._data.changes]) from error


class Extra(UserDict):
    """A dict of modules, optimizers, other objects with `state_dict` and `load_state_dict`, and plain values, by name.

        critic = t.extra["critic"] = Critic()
        t.extra["critic_optimizer"] = torch.optim.Adam(critic.parameters())

    When an entry is set, its state is restored from the checkpoint that the run resumes from; in a fresh run, a module
    gets the state that it has on the first process. Modules are moved to the device. Optimizers are wrapped by
    Accelerate, so call `t.extra["critic_optimizer"]` instead of the original. `window.reduce()` averages the gradients
    of the modules over the ranks, with those of the detector; call `t.extra.average_gradients()` for gradients that are
    computed later.
    """

    def __init__(self, accelerator: Accelerator):
        super().__init__()
        self._accelerator = accelerator
        self._saved: dict[str, Any] = {}  # states of the checkpoint that are not restored yet

    def __setitem__(self, name: str, value: Any) -> None:
        """Set an entry. Raises BadInput if the state in the checkpoint does not fit, or the value cannot be saved."""
        if name in self.data and not _has_state(value):
            self.data[name] = _plain(name, value)
            return
        if isinstance(value, nn.Module):
            value.to(self._accelerator.device)
        elif isinstance(value, torch.optim.Optimizer):
            value = self._accelerator.prepare_optimizer(value)
        self.data[name] = value if _has_state(value) else _plain(name, value)
        if name in self._saved:
            self._take(name, self._saved.pop(name))
        elif isinstance(value, nn.Module) and world()[1] > 1:
            value.load_state_dict(state_from_main(lambda: dict(value.state_dict())))

    @property
    def modules(self) -> list[nn.Module]:
        """The entries that are modules."""
        return [value for value in self.values() if isinstance(value, nn.Module)]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The entries that are optimizers."""
        return [value for value in self.values() if isinstance(value, torch.optim.Optimizer)]

    @property
    def not_taken_up(self) -> list[str]:
        """Names of entries of the checkpoint that the script has not set."""
        return sorted(self._saved)

    def tensors(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """Yield (("t.extra", name), floating-point tensor) of all states that must be finite."""
        for name, value in self.items():
            if isinstance(value, nn.Module):
                named = ((f"{name}.{key}", tensor) for key, tensor in value.named_parameters())
            else:
                named = _floats(name, value.state_dict() if _has_state(value) else value)
            yield from ((("t.extra", full_name), tensor) for full_name, tensor in named)

    def average_gradients(self) -> None:
        """Average the gradients of the modules over the ranks, in place; a collective. One process: do nothing."""
        average_gradients([p for module in self.modules for p in module.parameters() if p.requires_grad])

    def zero_grad(self) -> None:
        """Clear the gradients of all modules and optimizers."""
        for item in (*self.modules, *self.optimizers):
            item.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each entry by name; of plain values the values themselves."""
        return {name: value.state_dict() if _has_state(value) else value for name, value in self.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the entries that are set, and each of the others when the script sets it.

        Raises BadInput if a state does not fit.
        """
        self._saved = {name: copy.deepcopy(state) for name, state in saved.items()}
        for name in list(self.data):
            if name in self._saved:
                self._take(name, self._saved.pop(name))

    def _take(self, name: str, state: Any) -> None:
        value = self.data[name]
        if not _has_state(value):
            self.data[name] = state
            return
        try:
            value.load_state_dict(state)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            kind = type(value).__name__
            raise BadInput(
                f't.extra["{name}"] ({kind}) does not fit the state in the checkpoint: {error}; resume with the script '
                "that wrote it, or begin a new run"
            ) from error


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, str | int | float | bool | Tensor | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(name, item) for key, item in value.items()}
    raise BadInput(
        f't.extra["{name}"]: a {type(value).__name__} cannot be saved; expected something with state_dict and '
        "load_state_dict, a tensor, a number, a text, or lists and dicts of them"
    )


def _floats(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.dim():
            yield name, value
        return
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    for key, item in value.items() if isinstance(value, Mapping) else ():
        yield from _floats(f"{name}.{key}", item)


class Parts(UserDict[str, Part]):
    """The parts of a run by their names in a checkpoint, in the order in which they are restored."""

    def undone_in_rollback(self) -> "Parts":
        """Return the parts that a rollback restores together with the weights."""
        return Parts({name: part for name, part in self.items() if not getattr(part, "kept_in_rollback", False)})

    def named(self, names: Collection[str]) -> "Parts":
        """Return the parts of these names."""
        return Parts({name: part for name, part in self.items() if name in names})

    def state_dict(self) -> dict[str, Mapping[str, Any]]:
        """Return the state of every part, by its name."""
        return {name: part.state_dict() for name, part in self.items()}

    def load_state_dict(self, checkpoint: Checkpoint) -> list[str]:
        """Restore every part that the checkpoint has a state of, and return sentences on what differs from before.

        This is the only place where the state of a run is restored: when it resumes, when a checkpoint is evaluated,
        and when it rolls back.

        Raises:
            BadInput: a part refuses its state, such as a place in other data.
            CheckpointError: a state is not what the part writes; the message names checkpoint and part.
        """
        saved = checkpoint.by_part()
        saved.setdefault("ema", saved["model"])  # for a run that begins to average here
        notes = []
        for name, part in self.items():
            if name not in saved:
                continue
            with checkpoint.reading(name):
                found = part.load_state_dict(saved[name])
            if isinstance(found, list):  # modules and optimizers return something else
                notes += found
        return notes

    def tensors(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """Yield ((kind, name), tensor) for all tensors that must be finite, from the parts that have `tensors()`."""
        for part in self.values():
            own_tensors = getattr(part, "tensors", None)
            if own_tensors is not None:
                yield from own_tensors()
