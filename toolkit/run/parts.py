"""The parts of a run: whatever has state of its own and lives along it, under one contract.

Every part is saved in each checkpoint and restored from it. When a run goes back to an earlier checkpoint, its weights
and what belongs to them are restored; a part that is `kept_in_rollback` goes on as it is: the place in the data, the
counts of the guard, the rows. A new thing with state is one module and one line in `Training.parts`.
"""

from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from toolkit.data.table import DetectionTable
from toolkit.step.optim import load_state


class Part(Protocol):
    """Something with state that lives along a run, such as an `nn.Module` or an object of the toolkit.

    Tensors at the top level of its state go to a file of tensors, the rest has to be JSON values. Two members are
    optional: `kept_in_rollback = True`, and `tensors()`, which yields ((kind, name), tensor) of what must be finite.
    """

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> Any: ...


class OptimizerPart:
    """An optimizer whose state is restored as it lay in memory, see `toolkit.step.optim.load_state`."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer

    def state_dict(self) -> dict:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict) -> None:
        load_state(self._optimizer, state)


class WeightFacts:
    """Facts about the weights and buffers of a detector beside their values.

    A script may freeze parameters in its loop; they stay frozen in a resumed run.

    Attributes:
        infinite: buffers that hold infinities by design, such as masks.
    """

    kept_in_rollback = True

    def __init__(self, detector: nn.Module):
        self._detector = detector
        self._trained_at_start = {name for name, p in detector.named_parameters() if p.requires_grad}
        buffers = dict(detector.named_buffers())
        floats = [name for name in detector.state_dict() if name in buffers and buffers[name].is_floating_point()]
        self.infinite = [name for name in floats if not bool(buffers[name].isfinite().all())]

    def state_dict(self) -> dict:
        """JSON values: the parameters that were frozen since the start, and the infinite buffers."""
        parameters = self._detector.named_parameters()
        frozen = [name for name, p in parameters if name in self._trained_at_start and not p.requires_grad]
        return {"frozen": frozen, "infinite": self.infinite}

    def load_state_dict(self, state: Mapping) -> list[str]:
        """Freeze the parameters that the script had frozen in its loop; return a sentence if there are any."""
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

    loader: yields the batches of an epoch, from the place where the sampler stands.
    tables: "training" and "validation". A resumed run tells which of them have changed.
    """

    loader: DataLoader | None
    tables: Mapping[str, DetectionTable]

    kept_in_rollback = True

    @property
    def classes(self) -> dict[str, list]:
        """The names that predictions are made of, as JSON values."""
        table = self.tables["validation"]
        return {
            "categories": [asdict(category) for category in table.categories],
            "predicates": list(table.predicates),
            "attributes": list(table.attributes),
        }

    def state_dict(self) -> dict:
        """JSON values."""
        return {**self.classes, "tables": {name: table.identity for name, table in self.tables.items()}}

    def load_state_dict(self, state: Mapping) -> list[str]:
        """Compare the tables with those of a checkpoint, and return a sentence for each one that has changed.

        It may be so on purpose: the run goes on with the data that are there now.
        """
        before = state["tables"]
        notes = []
        for name, table in self.tables.items():
            change = table.changed_since(before[name]) if name in before else ""
            if change:
                notes.append(
                    f"the {name} data are not those of the checkpoint ({change}): the run goes on with what is there "
                    "now, and is not the one that was interrupted"
                )
        return notes


class Parts(UserDict[str, Part]):
    """The parts of a run by their names in a checkpoint, in the order in which they are restored."""

    def undone_in_rollback(self) -> "Parts":
        """The parts that go back with the weights."""
        return Parts({name: part for name, part in self.items() if not getattr(part, "kept_in_rollback", False)})

    def state_dict(self) -> dict[str, Mapping[str, Any]]:
        """The state of every part, by its name."""
        return {name: part.state_dict() for name, part in self.items()}

    def load_state_dict(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore each part whose state is in `saved`; the others stay as they are."""
        for name, part in self.items():
            if name in saved:
                part.load_state_dict(saved[name])

    def tensors(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """((kind, name), tensor) of everything that must be finite, of the parts that say so."""
        for part in self.values():
            own_tensors = getattr(part, "tensors", None)
            if own_tensors is not None:
                yield from own_tensors()
