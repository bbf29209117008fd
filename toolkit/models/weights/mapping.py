"""The mapping of a checkpoint's tensors to those of a model, row by row if the classes differ, and its table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from toolkit.base.errors import BadInput

ClassLayout = tuple[int, int, int]  # rows before, for each class, after


@dataclass
class WeightTable:
    """The tensors of a model and the tensors of a checkpoint that they take.

    state: the tensors to load (`strict=False`). sources: {name in the model: name in the checkpoint}. rows: {name:
        sentence}
    of those that take only some rows. new: names that keep their initial values. unused: names of the checkpoint that
    are not taken.
    """

    state: dict[str, Tensor] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def entries(self) -> list[tuple[str, str, str]]:
        """Return (outcome, name, note) of every tensor of the model, then of the unused ones."""
        rows = []
        for name, source in self.sources.items():
            note = self.rows.get(name, "" if name == source else f"<- {source}")
            rows.append(("mapped" if note else "loaded", name, note))
        return [*rows, *(("new", name, "") for name in self.new), *(("unused", name, "") for name in self.unused)]

    def table(self) -> str:
        """Format one line per tensor: loaded (same name), mapped (from another, or by rows), new; then the unused."""
        return "\n".join(f"{what:<7s} {name} {note}".rstrip() for what, name, note in self.entries())

    def summary(self) -> str:
        """Format `table` with one line for all tensors of a part of the model that have the same outcome."""
        entries = [(what, _part(name), "" if note.startswith("<-") else note) for what, name, note in self.entries()]
        counts = Counter(entries)
        width = max((len(part) for _, part, _ in counts), default=0)
        lines = (f"{what:<7s} {part:<{width}s} {n:5d} tensors  {note}" for (what, part, note), n in counts.items())
        return "\n".join(map(str.rstrip, lines))


def map_weights(
    model: Mapping[str, Tensor],
    checkpoint: Mapping[str, Tensor],
    prefixes: Mapping[str, str] | None = None,
    *,
    class_tensors: Mapping[str, ClassLayout] | None = None,
    classes: Sequence[str] = (),
    source_classes: Sequence[str] = (),
) -> WeightTable:
    """Map to every tensor the one of the same name, or, below a mapped prefix, of the prefix it is mapped to.

    model, checkpoint: state dicts. prefixes: {prefix in the model: prefix in the checkpoint}, whole parts of names;
    the longest applies. One tensor of the checkpoint may serve several of the model. Nothing is guessed.
    class_tensors: see pretrained.py; classes, source_classes: names of the model's and the checkpoint's classes.
    Raises BadInput: a prefix that matches nothing on its side, shapes that differ, ambiguous classes; all of them.
    """
    prefixes = prefixes or {}
    table = WeightTable()
    problems = _check_prefixes(model, checkpoint, prefixes)
    problems += _check_classes(classes, source_classes) if class_tensors else []
    for name, value in model.items():
        prefix = max((p for p in prefixes if _below(name, p)), key=len, default=None)
        source = name if prefix is None else prefixes[prefix] + name[len(prefix) :]
        if source not in checkpoint:
            table.new.append(name)
            continue
        weights = checkpoint[source]
        layout = _layout(name, class_tensors or {})
        mixed = None
        if layout is not None and list(classes) != list(source_classes):
            mixed = copy_class_rows(value, weights, layout, classes, source_classes)
        if mixed is value:
            table.new.append(name)
        elif mixed is not None:
            table.state[name] = mixed
            table.sources[name] = source
            table.rows[name] = _sentence(classes, source_classes)
        elif weights.shape != value.shape:
            shapes = f"{tuple(weights.shape)}; the model's is {tuple(value.shape)}"
            problems.append(f"{name} <- {source}: the checkpoint's shape is {shapes}")
        else:
            table.state[name] = weights
            table.sources[name] = source
    if problems:
        raise BadInput(problems)
    used = set(table.sources.values())
    table.unused = [name for name in checkpoint if name not in used]
    return table


def copy_class_rows(
    target: Tensor, source: Tensor, layout: ClassLayout, classes: Sequence[str], source_classes: Sequence[str]
) -> Tensor | None:
    """Return `target` with the rows that `source` has for the same class, and those for no class.

    Returns None if the shapes do not fit, and `target` itself if no rows match.
    """
    target_rows, target_blocks = _row_meanings(len(target), layout, classes)
    source_rows, source_blocks = _row_meanings(len(source), layout, source_classes)
    if target_blocks != source_blocks or target.shape[1:] != source.shape[1:] or not target_blocks:
        return None
    source_row_of = {meaning: row for row, meaning in enumerate(source_rows)}
    pairs = [(row, source_row_of[meaning]) for row, meaning in enumerate(target_rows) if meaning in source_row_of]
    if not pairs:
        return target
    rows, source_rows_taken = torch.tensor(pairs).unbind(1)
    result = target.clone()
    result[rows.to(target.device)] = source[source_rows_taken].to(target.device, target.dtype)
    return result


def _row_meanings(rows: int, layout: ClassLayout, classes: Sequence[str]) -> tuple[list[tuple], int]:
    """Return the meaning of each row of a class tensor, and its number of blocks; 0 for an incomplete block."""
    before, per_class, after = layout
    block = [("before", i) for i in range(before)] + [("class", name, i) for name in classes for i in range(per_class)]
    block += [("after", i) for i in range(after)]
    blocks, rest = divmod(rows, len(block))
    return [(b, *meaning) for b in range(blocks) for meaning in block], 0 if rest else blocks


def _layout(name: str, class_tensors: Mapping[str, ClassLayout]) -> ClassLayout | None:
    layouts = {layout for pattern, layout in class_tensors.items() if fnmatchcase(name, pattern)}
    if len(layouts) > 1:
        raise ValueError(f"{name} matches patterns of class_tensors with different layouts")
    return next(iter(layouts), None)


def _sentence(classes: Sequence[str], source_classes: Sequence[str]) -> str:
    shared = [name for name in classes if name in source_classes]
    names = f": {', '.join(shared)}" if 0 < len(shared) < 6 else ""
    return f"rows of {len(shared)} of {len(classes)} classes{names}"


def _check_prefixes(model: Mapping, checkpoint: Mapping, prefixes: Mapping[str, str]) -> list[str]:
    return [
        f"weight mapping {ours} <- {theirs}: the {side} has no parameter below {prefix!r}"
        for ours, theirs in prefixes.items()
        for prefix, names, side in ((ours, model, "model"), (theirs, checkpoint, "checkpoint"))
        if not any(_below(name, prefix) for name in names)
    ]


def _check_classes(classes: Sequence[str], source_classes: Sequence[str]) -> list[str]:
    return [
        f"class {name!r} stands {side[name]} times in the {where}: a class needs a name of its own"
        for side, where in ((Counter(classes), "data"), (Counter(source_classes), "checkpoint"))
        for name in dict.fromkeys(classes)
        if side[name] > 1 and list(classes) != list(source_classes)
    ]


def _below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _part(name: str) -> str:
    """Return the part of the model that a tensor belongs to: at most three parts of its name, without numbers."""
    parts = [part for part in name.split(".")[:-1][:4] if not part.isdigit()]
    return ".".join(parts[:3]) or name
