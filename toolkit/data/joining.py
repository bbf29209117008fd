"""Several data sets as one table: classes joined by name, unique ids, and for each image the set that it belongs to."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from toolkit.base.boxes import Boxes, Relations
from toolkit.base.errors import BadInput, all_faults
from toolkit.data.classes import ClassMap, check_class_map, with_classes
from toolkit.data.columns import ON_DISK, TEXT, Columns
from toolkit.data.image_sources import ImageSources, Shards, parts_of
from toolkit.data.table import Category, DetectionTable, JoinedSet, hash_of
from toolkit.data.table_cache import fingerprint_in_cache

FoldersAndSplits = Sequence[tuple[str | Path | None, str]]  # (data.path, data.train) of each set


def open_joined(
    sets: FoldersAndSplits,
    open_one: Callable[..., DetectionTable],
    unlisted: str,
    class_map: ClassMap = MappingProxyType({}),
    classes_must_exist: bool = True,
) -> DetectionTable:
    """Open one table of the images of all sets, in their order, without attributes.

    Relations are kept if all sets list the same predicates, in whatever order, and left out otherwise: in data that do
    not list a predicate, its relations may exist, and only their annotation is missing.

    Image ids are kept if they are unique; else all become text, `<name of the set>:<id>`. Box ids are kept if they are
    unique; else they are numbered from 1.

    Args:
        sets: (path, source) of each set, as of `open_dataset`.
        open_one: function that opens a set: `open_one(source, path=path)`.
        unlisted: "unknown" or "background": how a class that a set does not list counts in its images.
        class_map, classes_must_exist: `classes` and `classes_must_exist` of `open_dataset`. The classes of each set get
            their new names before they are joined; a set lists a new class if it lists one of the old ones. An old name
            has to be a class of at least one set.

    Raises BadInput: the faults of all sets, old names that are in no set, classes or image folders that cannot be
        joined.
    """
    calls = [partial(open_one, source, path=path) for path, source in sets]
    tables = all_faults(*calls)
    names = _short_names(sets)
    if class_map:
        if classes_must_exist:
            listed = dict.fromkeys(name for table in tables for name in table.class_names)
            check_class_map(class_map, list(listed), " + ".join(names))
        tables = [with_classes(table, class_map) for table in tables]
    classes = _joined_classes(tables)
    predicates = _joined_predicates(tables, tables[0].predicates)
    return _join_tables(tables, names, classes, predicates, unlisted)


def with_classes_of(table: DetectionTable, train: DetectionTable, unlisted: str) -> DetectionTable:
    """Return validation or test data with the classes and predicates of joined training data, matched by name.

    The table is returned unchanged if it has the same classes and predicates, or if `train` does not join several sets.

    unlisted: as of `open_joined`.

    Raises BadInput: the table has a class that the training data lack.
    """
    has_same_classes = table.class_names == train.class_names
    has_same_predicates = tuple(table.predicates) == tuple(train.predicates)
    if not train.sets or (has_same_classes and has_same_predicates):
        return table
    unknown = [name for name in table.class_names if name not in train.class_names]
    if unknown:
        raise BadInput(f"{table.name}: classes {unknown} are in no training set; those have {train.class_names}")
    # Predicates that differ from training stay as they are: the callers that need them compare and name both.
    predicates = _joined_predicates([table], train.predicates) or tuple(table.predicates)
    return _join_tables([table], [table.name], train.categories, predicates, unlisted)


def _short_names(sets: FoldersAndSplits) -> list[str]:
    """Return names that distinguish the sets: their paths without what these have in common at both ends."""
    parts = []
    for folder, source in sets:
        path = Path(str(source)) if folder is None else Path(folder, str(source))
        if path.suffix == ".json":
            path = path.with_suffix("")
        parts.append(path.parts)
    while len({path[-1] for path in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [path[:-1] for path in parts]
    longest = max(map(len, parts))
    for length in range(1, longest + 1):
        short = ["/".join(path[-length:]) for path in parts]
        if len(set(short)) == len(short):
            break
    return short


def _joined_classes(tables: Sequence[DetectionTable]) -> tuple[Category, ...]:
    """Return the classes of the first table, then those that each further one adds.

    Ids are kept if the sets agree on them, else they are numbered from 1. Raises BadInput with all names that differ
    only in case, spaces, "_" and "-".
    """
    ids: dict[str, list] = {}
    for table in tables:
        for category in table.categories:
            ids.setdefault(category.name, []).append(category.id)
    spellings: dict[str, list[str]] = {}  # names that differ only in how they are written
    for name in ids:
        letters = [letter for letter in name.casefold() if letter not in " _-"]
        spellings.setdefault("".join(letters), []).append(name)
    together = [set(table.class_names) for table in tables]
    faults = []
    for names in spellings.values():
        in_one_set = any(set(names) <= of_set for of_set in together)  # such a set means several classes
        if len(names) > 1 and not in_one_set:
            faults.append(
                f"classes {', '.join(map(repr, names))} of these data sets differ only in how they are written: give "
                "them one name in all sets, since classes are joined by name"
            )
    if faults:
        raise BadInput(faults)
    chosen = [given[0] for given in ids.values()]
    sets_agree = all(len(set(given)) == 1 for given in ids.values())
    are_unique = len(set(chosen)) == len(chosen)
    have_one_type = len({type(id_) for id_ in chosen}) == 1
    if not (sets_agree and are_unique and have_one_type):
        chosen = range(1, len(ids) + 1)
    return tuple(Category(id_, name) for id_, name in zip(chosen, ids, strict=True))


def _joined_predicates(tables: Sequence[DetectionTable], wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the predicates in the wanted order if every table lists the same ones, each once; else ()."""
    names = sorted(set(wanted))
    agree = all(sorted(table.predicates) == names for table in tables)
    return tuple(wanted) if agree else ()


def _join_tables(
    tables: Sequence[DetectionTable],
    names: Sequence[str],
    categories: tuple[Category, ...],
    predicates: tuple[str, ...],
    unlisted: str,
) -> DetectionTable:
    """Join tables as `open_joined` does; `categories` and `predicates` are matched by name.

    Without `predicates` the relations are left out.
    """
    root, file_names = _root_of(tables, names)
    sets = _joined_sets(tables, names, categories, unlisted)
    fingerprints = [table.fingerprint for table in tables]
    problems = []
    arrow_files = []
    stored_files = []
    for table in tables:
        problems += table.problems
        arrow_files += table.arrow_files
        stored_files += table.stored_files
    fingerprint = hash_of(fingerprints, file_names, categories, sets, predicates)
    if arrow_files:  # earlier versions wrote the joined table: their runs go on with its fingerprint
        key = hash_of(fingerprints, str(root), file_names, categories, sets, predicates)
        written = arrow_files[0].with_name(f"{key}-joined.json")
        fingerprint = fingerprint_in_cache(written) or fingerprint
    return DetectionTable(
        Columns(
            _joined_images(tables, names, file_names),
            _joined_boxes(tables, categories),
            _joined_relations(tables, predicates),
        ),
        categories=categories,
        predicates=predicates,
        image_root=root,
        problems=problems,
        name=" + ".join(names),
        fingerprint=fingerprint,
        max_image_pixels=max(table.max_image_pixels for table in tables),
        white=tables[0].white,
        sets=tuple(sets),
        class_map=next((table.class_map for table in tables if table.class_map), {}),
        stored_files=tuple(stored_files),
        arrow_files=tuple(arrow_files),
    )


def _joined_sets(
    tables: Sequence[DetectionTable], names: Sequence[str], categories: Sequence[Category], unlisted: str
) -> list[JoinedSet]:
    """Return the sets of all tables with the rows of `categories` that each labels."""
    sets = []
    for table, name in zip(tables, names, strict=True):
        labels = _new_labels(table, categories).tolist()
        whole = JoinedSet(name, tuple(range(len(labels))))
        for one in table.sets or [whole]:
            listed = range(len(categories))
            if unlisted == "unknown":
                listed = sorted(labels[row] for row in one.classes)
            sets.append(JoinedSet(one.name, tuple(listed)))
    return sets


def _new_labels(table: DetectionTable, categories: Sequence[Category]) -> np.ndarray:
    """Return the row of `categories` of each class of a table, (classes,) int64."""
    names = [category.name for category in categories]
    return np.array([names.index(name) for name in table.class_names], np.int64)


def _joined_images(
    tables: Sequence[DetectionTable], names: Sequence[str], file_names: Sequence[Sequence[str]]
) -> dict[str, np.ndarray]:
    """Return the images of all tables, under their new ids and names."""
    parts = []
    sets = 0
    stored_files = 0
    for table, of_table in zip(tables, file_names, strict=True):
        part = dict(table.columns.images)
        part["file_name"] = np.array(of_table, TEXT)
        part["set"] = table.set_of_image() + sets
        for column in ON_DISK:
            if column in part:
                part[column] = part[column] + [stored_files, 0, 0]  # number of the file, first byte, count of bytes
        parts.append(part)
        sets += max(1, len(table.sets))
        stored_files += len(table.stored_files)
    if not _are_unique([part["image_id"] for part in parts]):
        for part, name in zip(parts, names, strict=True):
            part["image_id"] = np.array([f"{name}:{image_id}" for image_id in part["image_id"].tolist()], TEXT)
    columns = {}
    for column in parts[0]:
        if all(column in part for part in parts):
            columns[column] = np.concatenate([part[column] for part in parts])
    return columns


def _are_unique(parts: Sequence[np.ndarray]) -> bool:
    """Return whether all values of these arrays differ; numbers and texts are not compared, but count as equal."""
    if len({part.dtype for part in parts}) > 1:
        return False
    values = np.sort(np.concatenate(parts))  # `np.unique` needs a second for a million whole numbers, this 0.02 s
    return not (values[1:] == values[:-1]).any()


def _joined_boxes(tables: Sequence[DetectionTable], categories: Sequence[Category]) -> Boxes:
    """Return the boxes of all tables with the labels of `categories`, without attributes."""
    parts = []
    for table in tables:
        boxes = table.columns.boxes
        extra = {name: column for name, column in boxes.extra.items() if name != "attributes"}
        parts.append(replace(boxes, labels=_new_labels(table, categories)[boxes.labels], extra=extra))
    joined = Boxes.concatenated(parts)
    if _are_unique([joined.ids]):
        return joined
    return replace(joined, ids=np.arange(1, len(joined) + 1))


def _joined_relations(tables: Sequence[DetectionTable], predicates: Sequence[str]) -> Relations:
    """Return the relations of all tables, whose predicates are matched by name; none without `predicates`."""
    if not predicates:
        return Relations.none(sum(map(len, tables)))
    parts = []
    for table in tables:
        relations = table.relations()
        labels = np.array([predicates.index(name) for name in table.predicates], np.int64)
        parts.append(replace(relations, predicate=labels[relations.predicate]))
    return Relations.concatenated(parts)


def _root_of(
    tables: Sequence[DetectionTable], names: Sequence[str]
) -> tuple[Path | ImageSources | None, list[list[str]]]:
    """Return the common root of the images of all tables, and their names below it."""
    roots = [table.image_root for table in tables]
    files = [table.file_names() for table in tables]
    if all(root is None for root in roots):
        return None, files
    if any(root is None or isinstance(parts_of(root)[0], Shards) for root in roots):
        raise BadInput(
            f"{' and '.join(names)}: images embedded in Parquet files cannot be joined with others, nor streamed; "
            "write these data as files with scripts/convert.py"
        )
    if all(root == roots[0] for root in roots):
        return roots[0], files
    if not any(isinstance(root, ImageSources) for root in roots):
        roots = [Path(os.path.abspath(root)) for root in roots]
        if len({root.drive for root in roots}) == 1:
            common = Path(os.path.commonpath(roots))
            names_below = []
            for root, of_table in zip(roots, files, strict=True):
                below = root.relative_to(common)
                names_below.append([(below / name).as_posix() for name in of_table])
            return common, names_below
    parts = {}  # each once, in order
    for root in roots:
        parts |= dict.fromkeys(parts_of(root))
    joined = ImageSources(list(parts))
    for root, of_table, name in zip(roots, files, names, strict=True):
        for file in of_table:
            if str(joined / file) != str(root / file):
                raise BadInput(f"{name}: {file} is the name of an image of another set too; rename it in one of them")
    return joined, files
