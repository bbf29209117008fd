"""Classes of the data renamed, merged or left out, as the setting `data.classes` says."""

import dataclasses
from collections.abc import Mapping, Sequence
from math import inf

import numpy as np
import yaml

from toolkit.base.errors import BadInput
from toolkit.base.text import did_you_mean, shown
from toolkit.data.columns import Columns
from toolkit.data.table import Category, DetectionTable, hash_of

ALL_OTHERS = "*"  # stands for every class that is not named
LEFT_OUT = -1  # new label of a class whose boxes are left out

ClassMap = Mapping[str, str | None]


def check_class_map(class_map: ClassMap, names: Sequence[str], where: str) -> None:
    """Raise BadInput naming every old name of `class_map` that is not a class, each with the most similar class.

    names: the classes of the data. where: name of the data in the message.
    """
    faults = []
    for old in class_map:
        if old != ALL_OTHERS and old not in names:
            listed = f"the classes there are {', '.join(map(shown, names))}"
            hint = did_you_mean(old, names, otherwise=listed, written=shown)
            faults.append(f"data.classes: no class {shown(old)} in {where}{hint}")
    if faults:
        raise BadInput(faults)


def with_classes(table: DetectionTable, class_map: ClassMap) -> DetectionTable:
    """Return a table with renamed, merged and left-out classes, or the table itself if nothing changes.

    Args:
        class_map: new name by old name. None leaves the boxes of a class out. Classes with one new name are merged,
            also with a class that keeps this name. "*" means all classes that are not named; without it they keep their
            names. Old names that the table lacks are ignored: see `check_class_map`.

    The new classes are in the order of the first old class of each in the table, and have its id. Images whose boxes
    are all left out stay, as images without objects. A relation is left out with one of its two boxes.

    Raises BadInput: no class is left.
    """
    if not class_map:
        return table
    new_names = [_new_name(name, class_map) for name in table.class_names]
    kept: dict[str, Category] = {}
    for name, category in zip(new_names, table.categories, strict=True):
        if name is not None and name not in kept:
            kept[name] = Category(category.id, name)
    if not kept:
        listed = ", ".join(map(shown, table.class_names))
        raise BadInput(f"data.classes: {table.name} is left without a class; keep at least one of {listed}")
    if new_names == table.class_names:
        return table
    rows = {name: row for row, name in enumerate(kept)}
    new_labels = tuple(LEFT_OUT if name is None else rows[name] for name in new_names)
    categories = tuple(kept.values())
    return dataclasses.replace(
        table,
        columns=_relabelled(table.columns, new_labels),
        categories=categories,
        fingerprint=hash_of(table.fingerprint, new_labels, categories),
        class_map=dict(class_map),
        before_classes=table,
    )


def _relabelled(columns: Columns, new_labels: Sequence[int]) -> Columns:
    """Return columns with a new label for each old one, without the boxes and the relations of those left out."""
    images, boxes, relations = columns
    labels = np.array(new_labels, np.int64)[boxes.labels]
    is_kept = labels != LEFT_OUT
    new_boxes = dataclasses.replace(boxes, labels=labels)
    return Columns(images, new_boxes[is_kept], relations.of_boxes(boxes, is_kept))


def _new_name(name: str, class_map: ClassMap) -> str | None:
    if name in class_map:
        return class_map[name]
    return class_map.get(ALL_OTHERS, name)


def class_map_of(given: Mapping) -> dict[str, str | None]:
    """Return the setting `data.classes` with names as text: YAML reads 1 as a number.

    Raises BadInput naming every entry that is not a name with a new name or null.
    """
    class_map = {}
    faults = []
    for old, new in given.items():
        entry = f"data.classes: {shown(old)}: {shown(new)}"
        if not _is_name(old) or not (new is None or _is_name(new)):
            faults.append(f"{entry}; expected a name and its new name, or null; words such as yes and no need quotes")
        elif new is not None and not str(new).strip():
            faults.append(f"{entry}; the new name is empty; give a name, or null to leave the class out")
        class_map[str(old)] = None if new is None else str(new)
    if faults:
        raise BadInput(faults)
    return class_map


def _is_name(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool)


def describe_class_map(class_map: ClassMap) -> str:
    """Return a text such as "car, truck -> vehicle; left out: tree"; "" for an empty one."""
    old_names: dict[str | None, list[str]] = {}
    for old, new in class_map.items():
        written = "all other classes" if old == ALL_OTHERS else shown(old)
        old_names.setdefault(new, []).append(written)
    left_out = old_names.pop(None, [])
    parts = []
    for new, olds in old_names.items():
        parts.append(f"{', '.join(olds)} -> {shown(new)}")
    if left_out:
        parts.append(f"left out: {', '.join(left_out)}")
    return "; ".join(parts)


def written_class_map(class_map: ClassMap) -> str:
    """Return a text such as "{car: vehicle, tree: null}", as the value of `--data.classes` in YAML."""
    text = yaml.safe_dump(
        dict(class_map),
        default_flow_style=True,
        sort_keys=False,
        allow_unicode=True,
        width=inf,
    )
    return text.strip()
