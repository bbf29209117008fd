"""Weights of a trained detector for a model with relation heads: which parameter takes which, said explicitly."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from toolkit.errors import BadInput


@dataclass
class MappedWeights:
    """state: what to load (`strict=False`). sources: {name of the model: name in the checkpoint}. new: names that keep
    their initial values. unused: names of the checkpoint that nothing takes."""

    state: dict[str, Tensor]
    sources: dict[str, str]
    new: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def table(self) -> str:
        """One line per parameter of the model: loaded (same name), mapped (from another), new; then what is unused."""
        lines = [
            f"{'loaded' if name == source else 'mapped':<7s} {name}" + ("" if name == source else f" <- {source}")
            for name, source in self.sources.items()
        ]
        lines += [f"{'new':<7s} {name}" for name in self.new]
        return "\n".join(lines + [f"{'unused':<7s} {name}" for name in self.unused])


def map_weights(
    model: Mapping[str, Tensor], checkpoint: Mapping[str, Tensor], prefixes: Mapping[str, str]
) -> MappedWeights:
    """Every parameter takes the one of the same name, or, below a mapped prefix, of the prefix it is mapped to.

    model, checkpoint: state dicts. prefixes: {prefix in the model: prefix in the checkpoint}, whole parts of names;
    the longest applies. One parameter of the checkpoint may serve several of the model. Nothing is guessed.
    Raises BadInput: a prefix that matches nothing on its side, or shapes that differ; all of them.
    """
    problems = []
    for ours, theirs in prefixes.items():
        for prefix, names, side in ((ours, model, "model"), (theirs, checkpoint, "checkpoint")):
            if not any(_below(name, prefix) for name in names):
                problems.append(f"weight mapping {ours} <- {theirs}: the {side} has no parameter below {prefix!r}")
    mapped = MappedWeights({}, {})
    for name, value in model.items():
        prefix = max((p for p in prefixes if _below(name, p)), key=len, default=None)
        source = name if prefix is None else prefixes[prefix] + name[len(prefix) :]
        if source not in checkpoint:
            mapped.new.append(name)
        elif checkpoint[source].shape != value.shape:
            shapes = f"{tuple(checkpoint[source].shape)}; the model's is {tuple(value.shape)}"
            problems.append(f"{name} <- {source}: the checkpoint's shape is {shapes}")
        else:
            mapped.state[name], mapped.sources[name] = checkpoint[source], source
    if problems:
        raise BadInput(problems)
    used = set(mapped.sources.values())
    mapped.unused = [name for name in checkpoint if name not in used]
    return mapped


def _below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")
