"""Maps the tensors of a checkpoint to those of a model, row by row if the classes differ, and tabulates the mapping."""

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
    """The mapping from the tensors of a checkpoint to those of a model.

    Attributes:
        state: the tensors to load into the model with `load_state_dict(strict=False)`.
        sources: {name in the model: name in the checkpoint}.
        rows: {name in the model: description} of the tensors of which only the rows of some classes are loaded.
        new: names of the model's tensors that keep their initial values.
        unused: names of the checkpoint's tensors that are not loaded.
    """

    state: dict[str, Tensor] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def entries(self) -> list[tuple[str, str, str]]:
        """Return (outcome, name, note) of every tensor of the model, then of the checkpoint's unused tensors.

        The outcome is "loaded", "mapped" (from another name, or some rows only), "new" or "unused".
        """
        entries = []
        for name, source in self.sources.items():
            note = "" if name == source else f"<- {source}"
            note = self.rows.get(name, note)
            entries.append(("mapped" if note else "loaded", name, note))
        entries += [("new", name, "") for name in self.new]
        entries += [("unused", name, "") for name in self.unused]
        return entries

    def table(self) -> str:
        """Format `entries` as text, one line per tensor."""
        lines = [f"{what:<7s} {name} {note}" for what, name, note in self.entries()]
        return "\n".join(map(str.rstrip, lines))

    def summary(self) -> str:
        """Format `entries` as text, one line for all tensors of a part of the model that have the same outcome."""
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
    """Map each tensor of a model to the checkpoint's tensor of the same name, or of the name with a replaced prefix.

    Args:
        model, checkpoint: state dicts.
        prefixes: {prefix in the model: prefix in the checkpoint}, which match whole parts of a name; the longest one
            that matches applies. One tensor of the checkpoint may be mapped to several of the model.
        class_tensors: patterns of names of tensors with rows per class, see `toolkit.models.weights.pretrained`. If the
            classes differ, the rows of classes of the same name are loaded.
        classes, source_classes: names of the model's and of the checkpoint's classes, in the order of the labels.

    Raises:
        BadInput: a prefix matches nothing, shapes differ, or the name of a class occurs twice; the message lists all.
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
    """Return a copy of `target` in which rows are replaced by the rows of `source` with the same meaning.

    These are the rows of classes that both have, matched by name, and the rows that belong to no class, such as the
    background. All other rows of `target` are kept.

    Args:
        layout: numbers of rows before the classes, for each class, and after them; see
            `toolkit.models.weights.pretrained`.
        classes, source_classes: names of the classes of `target` and of `source`, in the order of their rows.

    Returns:
        the copy; None if the shapes do not fit; `target` itself if no row has the same meaning.
    """
    if source.ndim != target.ndim:
        return None
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
    """Return the meaning of each row of a class tensor, and the number of its blocks, or 0 if a block is incomplete.

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
                faults.append(f"class {name!r} occurs {times} times in the {where}; each class needs its own name")
    return faults


def _part(name: str) -> str:
    """Return the part of the model that a tensor belongs to: at most three parts of its name, without numbers."""
    parts = [part for part in name.split(".")[:-1][:4] if not part.isdigit()]
    return ".".join(parts[:3]) or name
