"""Classes of the data renamed, merged or left out, as the setting `data.classes` says: a view of a table."""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import pyarrow as pa
import yaml

from toolkit.base.boxes import offsets_of
from toolkit.base.errors import BadInput
from toolkit.base.masks import Shape
from toolkit.base.text import did_you_mean, shown
from toolkit.data.table import Category, DetectionTable

ALL_OTHERS = "*"  # stands for every class that is not named
LEFT_OUT = -1  # new label of a class whose boxes are left out

ClassMap = Mapping[str, str | None]


@dataclass(eq=False)
class RelabelledTable(DetectionTable):
    """A view of a table with other classes. Nothing is written; images and the boxes that stay are those of the table.

    categories: the new classes. The fields below describe the table that is viewed.

    new_labels: for each class of the viewed table its row of `categories`, or -1: its boxes are left out, and with
        them their relations.
    """

    new_labels: tuple[int, ...] = ()
    stored_categories: tuple[Category, ...] = ()
    stored_fingerprint: str = ""

    @functools.cached_property
    def _content(self):
        rows, stored = self.as_stored()._content
        return relabelled_rows(rows, self.new_labels), stored

    @functools.cached_property
    def _kept_objects(self) -> list[np.ndarray]:
        """For each image of the viewed table which of its objects stay, a bool array each."""
        viewed = self.as_stored().boxes()
        is_kept = np.array(self.new_labels, np.int64)[viewed.labels] != LEFT_OUT
        return np.split(is_kept, viewed.offsets[1:-1])

    def masks_of(self, index: int) -> list[Shape]:
        """Return the masks of the objects of one image that stay, see `DetectionTable.masks_of`."""
        shapes = super().masks_of(index)
        return [shape for shape, is_kept in zip(shapes, self._kept_objects[index], strict=True) if is_kept]

    def as_stored(self) -> DetectionTable:
        """Return the table as its Arrow file has it, with the classes of the data."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(DetectionTable)}
        values["categories"] = self.stored_categories
        values["fingerprint"] = self.stored_fingerprint
        values["class_map"] = {}
        return DetectionTable(**values)

    def head(self, count: int) -> DetectionTable:
        """Return a table of the first `count` images."""
        shorter = super().head(count)
        if shorter is self:
            return self
        return dataclasses.replace(shorter, stored_fingerprint=f"{self.stored_fingerprint}-head{count}")


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
    """Return a view of a table with renamed, merged and left-out classes, or the table itself if nothing changes.

    Args:
        class_map: new name by old name. None leaves the boxes of a class out. Classes with one new name are merged,
            also with a class that keeps this name. "*" stands for all classes that are not named; without it they keep
            their names. Old names that the table lacks are ignored: see `check_class_map`.

    The new classes stand in the order in which the table lists the first old class of each, and have its id. Images
    whose boxes are all left out stay, as images without objects. A relation is left out with one of its two boxes.

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
    about = repr((table.fingerprint, new_labels, categories)).encode(errors="surrogateescape")
    values = {field.name: getattr(table, field.name) for field in dataclasses.fields(DetectionTable)}
    values["categories"] = categories
    values["fingerprint"] = hashlib.blake2b(about, digest_size=16).hexdigest()
    values["class_map"] = dict(class_map)
    return RelabelledTable(
        **values,
        new_labels=new_labels,
        stored_categories=table.categories,
        stored_fingerprint=table.fingerprint,
    )


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


def relabelled_rows(rows: pa.Table, new_labels: Sequence[int]) -> pa.Table:
    """Return the rows of a table with new labels, without the boxes whose label becomes -1, and their relations.

    rows: as of `DetectionTable.rows`. new_labels: the new label of each old one.
    """
    label_of = np.array(new_labels, np.int64)
    batches = []
    for batch in rows.to_batches():
        batches.append(_relabelled_batch(batch, label_of))
    return pa.Table.from_batches(batches, rows.schema)


def _relabelled_batch(batch: pa.RecordBatch, label_of: np.ndarray) -> pa.RecordBatch:
    objects = batch.column("objects")
    relations = batch.column("relations")
    old_labels = objects.field("category").flatten()
    labels = label_of[np.from_dlpack(old_labels)]
    is_kept = labels != LEFT_OUT
    offsets = _offsets(objects)
    new_offsets = _offsets_of_kept(offsets, is_kept)
    columns = {"category": pa.array(labels[is_kept])}
    new_objects = _with_kept(objects, is_kept, new_offsets, columns)

    # Relations name their ends by the row of an object in its image.
    ends_offsets = _offsets(relations)
    image_of_relation = np.repeat(np.arange(len(relations)), np.diff(ends_offsets))
    kept_before = offsets_of(is_kept)  # of each object, how many objects of the batch stay before it
    both_kept = np.ones(len(image_of_relation), bool)
    new_ends = {}
    for end in ("subject", "object"):
        old_rows = np.from_dlpack(relations.field(end).flatten())
        old_places = offsets[image_of_relation] + old_rows
        both_kept &= is_kept[old_places]
        new_ends[end] = kept_before[old_places] - new_offsets[image_of_relation]
    columns = {end: pa.array(new_rows[both_kept]) for end, new_rows in new_ends.items()}
    new_relations = _with_kept(relations, both_kept, _offsets_of_kept(ends_offsets, both_kept), columns)

    arrays = []
    for name in batch.schema.names:
        changed = {"objects": new_objects, "relations": new_relations}
        arrays.append(changed.get(name, batch.column(name)))
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def _offsets(lists: pa.StructArray) -> np.ndarray:
    """Return where the lists of each row begin, (rows + 1,) int64, counted from the first row."""
    offsets = np.from_dlpack(lists.field(0).offsets).astype(np.int64)
    return offsets - offsets[0]


def _offsets_of_kept(offsets: np.ndarray, is_kept: np.ndarray) -> np.ndarray:
    """Return where each list begins when only some of its entries stay, (rows + 1,) int64."""
    return offsets_of(is_kept)[offsets]


def _with_kept(
    lists: pa.StructArray, is_kept: np.ndarray, new_offsets: np.ndarray, columns: Mapping[str, pa.Array]
) -> pa.StructArray:
    """Return a struct of lists with some of their entries; `columns` has the entries of fields that change."""
    mask = pa.array(is_kept)
    offsets = pa.array(new_offsets.astype(np.int32))
    arrays = []
    fields = list(lists.type)
    for field in fields:
        values = columns.get(field.name)
        if values is None:
            values = lists.field(field.name).flatten().filter(mask)
        arrays.append(pa.ListArray.from_arrays(offsets, values.cast(field.type.value_type), type=field.type))
    return pa.StructArray.from_arrays(arrays, fields=fields)
