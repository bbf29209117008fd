"""The mapping of a checkpoint's tensors to those of a model, row by row if the classes differ, and its table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from toolkit.base.errors import BadInput
from toolkit.step.optim import is_below

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
        entries = []
        for name, source in self.sources.items():
            note = "" if name == source else f"<- {source}"
            note = self.rows.get(name, note)
            entries.append(("mapped" if note else "loaded", name, note))
        entries += [("new", name, "") for name in self.new]
        entries += [("unused", name, "") for name in self.unused]
        return entries

    def table(self) -> str:
        """Format one line per tensor: loaded (same name), mapped (from another, or by rows), new; then the unused."""
        lines = [f"{what:<7s} {name} {note}" for what, name, note in self.entries()]
        return "\n".join(map(str.rstrip, lines))

    def summary(self) -> str:
        """Format `table` with one line for all tensors of a part of the model that have the same outcome."""
        counts = Counter()
        for what, name, note in self.entries():
            if note.startswith("<-"):
                note = ""
            counts[what, _part(name), note] += 1
        width = max((len(part) for _, part, _ in counts), default=0)
        lines = []
        for (what, part, note), count in counts.items():
            lines.append(f"{what:<7s} {part:<{width}s} {count:5d} tensors  {note}")
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
    if class_tensors:
        problems += _check_classes(classes, source_classes)
    for name, value in model.items():
        fitting = [prefix for prefix in prefixes if is_below(name, prefix)]
        source = name
        if fitting:
            prefix = max(fitting, key=len)
            source = prefixes[prefix] + name[len(prefix) :]
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
    target: Tensor,
    source: Tensor,
    layout: ClassLayout,
    classes: Sequence[str],
    source_classes: Sequence[str],
) -> Tensor | None:
    """Return `target` with the rows that `source` has for the same class, and those for no class.

    Returns None if the shapes do not fit, and `target` itself if no rows match.
    """
    target_rows, target_blocks = _row_meanings(len(target), layout, classes)
    source_rows, source_blocks = _row_meanings(len(source), layout, source_classes)
    have_one_layout = target_blocks == source_blocks and target.shape[1:] == source.shape[1:]
    if not have_one_layout or not target_blocks:
        return None
    source_row_of = {meaning: row for row, meaning in enumerate(source_rows)}
    into = []
    taken = []
    for row, meaning in enumerate(target_rows):
        if meaning in source_row_of:
            into.append(row)
            taken.append(source_row_of[meaning])
    if not into:
        return target
    result = target.clone()
    values = source[torch.tensor(taken)].to(target.device, target.dtype)
    result[torch.tensor(into).to(target.device)] = values
    return result


def _row_meanings(rows: int, layout: ClassLayout, classes: Sequence[str]) -> tuple[list[tuple], int]:
    """Return the meaning of each row of a class tensor, and its number of blocks; 0 for an incomplete block.

    With the layout (1, 2, 0) and the classes a and b, the five rows of a block are: before, a 0, a 1, b 0, b 1.
    """
    before, per_class, after = layout
    block = [("before", i) for i in range(before)]
    for name in classes:
        block += [("class", name, i) for i in range(per_class)]
    block += [("after", i) for i in range(after)]
    blocks, rest = divmod(rows, len(block))
    meanings = []
    for number in range(blocks):
        meanings += [(number, *meaning) for meaning in block]
    return meanings, 0 if rest else blocks


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
    faults = []
    for ours, theirs in prefixes.items():
        sides = ((ours, model, "model"), (theirs, checkpoint, "checkpoint"))
        for prefix, names, side in sides:
            if not any(is_below(name, prefix) for name in names):
                faults.append(f"weight mapping {ours} <- {theirs}: the {side} has no parameter below {prefix!r}")
    return faults


def _check_classes(classes: Sequence[str], source_classes: Sequence[str]) -> list[str]:
    if list(classes) == list(source_classes):
        return []
    faults = []
    for names, where in ((classes, "data"), (source_classes, "checkpoint")):
        counts = Counter(names)
        for name in dict.fromkeys(classes):
            times = counts[name]
            if times > 1:
                faults.append(f"class {name!r} stands {times} times in the {where}: a class needs a name of its own")
    return faults


def _part(name: str) -> str:
    """Return the part of the model that a tensor belongs to: at most three parts of its name, without numbers."""
    parts = [part for part in name.split(".")[:-1][:4] if not part.isdigit()]
    return ".".join(parts[:3]) or name
