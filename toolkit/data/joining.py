"""Several data sets as one table: classes joined by name, unique ids, and for each image the set that it belongs to."""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from toolkit.base.boxes import Boxes, Relations, offsets_of
from toolkit.base.errors import BadInput, all_faults
from toolkit.data.annotations import ImageRow
from toolkit.data.classes import ClassMap, check_class_map, with_classes
from toolkit.data.image_sources import ImageSources, Shards, parts_of
from toolkit.data.table import Category, DetectionTable, JoinedSet
from toolkit.data.table_cache import cache_root, open_table, write_table

FoldersAndSplits = Sequence[tuple[str | Path | None, str]]  # (data.path, data.train) of each set


def open_joined(
    sets: FoldersAndSplits,
    open_one: Callable[..., DetectionTable],
    unlisted: str,
    cache_dir,
    class_map: ClassMap = MappingProxyType({}),
    classes_must_exist: bool = True,
) -> DetectionTable:
    """Open one cached table of the images of all sets, in their order, without attributes.

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
    return _join_tables(tables, names, classes, predicates, unlisted, cache_dir)


def with_classes_of(table: DetectionTable, train: DetectionTable, unlisted: str, cache_dir=None) -> DetectionTable:
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
    return _join_tables([table], [table.name], train.categories, predicates, unlisted, cache_dir)


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
    cache_dir,
) -> DetectionTable:
    """Join tables as `open_joined` does; `categories` and `predicates` are matched by name.

    Without `predicates` the relations are left out.
    """
    root, files = _root_of(tables, names)
    class_names = [category.name for category in categories]
    sets = []
    of_images = []
    for table, name in zip(tables, names, strict=True):
        labels = [class_names.index(known) for known in table.class_names]  # of the table's classes
        of_images.append(table.set_of_image() + len(sets))
        whole = JoinedSet(name, tuple(range(len(labels))))
        for one in table.sets or [whole]:
            listed = range(len(categories))
            if unlisted == "unknown":
                listed = sorted(labels[row] for row in one.classes)
            sets.append(JoinedSet(one.name, tuple(listed)))
    fingerprints = [table.fingerprint for table in tables]
    about = (fingerprints, str(root), files, categories, sets, predicates)
    text = repr(about).encode(errors="surrogateescape")
    key = hashlib.blake2b(text, digest_size=16).hexdigest()
    cache_file = cache_root(cache_dir) / "tables" / f"{key}-joined.json"
    found = open_table(cache_file)
    if found:
        joined = found[0]
    else:
        rows, boxes = _joined_rows(tables, names, files, class_names)
        joined = write_table(
            rows,
            boxes,
            _joined_relations(tables, predicates) if predicates else None,
            predicates=predicates,
            cache_file=cache_file,
            categories=categories,
            image_root=root,
            sets=sets,
            set_of_image=np.concatenate(of_images),
            encoded=_encoded_images(tables) if root is None else None,
        )
    problems = []
    for table in tables:
        problems += table.problems
    return dataclasses.replace(
        joined,
        problems=problems,
        name=" + ".join(names),
        max_image_pixels=max(table.max_image_pixels for table in tables),
        white=tables[0].white,
        class_map=next((table.class_map for table in tables if table.class_map), {}),
    )


def _encoded_images(tables: Sequence[DetectionTable]) -> Iterator:
    """Yield the embedded image of each row of all tables."""
    for table in tables:
        for index in range(len(table)):
            yield table.row(index)["image"]


def _joined_relations(tables: Sequence[DetectionTable], predicates: Sequence[str]) -> Relations:
    """Return the relations of all tables; their predicates are matched by name with `predicates`."""
    parts = [table.relations() for table in tables]
    labels = []
    for table, part in zip(tables, parts, strict=True):
        label_of = np.array([predicates.index(name) for name in table.predicates], np.int64)
        labels.append(label_of[part.predicate])
    return Relations(
        _joined_offsets(parts),
        subject=np.concatenate([part.subject for part in parts]),
        object=np.concatenate([part.object for part in parts]),
        predicate=np.concatenate(labels),
    )


def _joined_offsets(parts: Sequence[Boxes | Relations]) -> np.ndarray:
    counts = [np.diff(part.offsets) for part in parts]
    return offsets_of(np.concatenate(counts))


def _joined_rows(
    tables: Sequence[DetectionTable],
    names: Sequence[str],
    files: Sequence[Sequence[str]],
    class_names: Sequence[str],
) -> tuple[list[ImageRow], Boxes]:
    """Return the images of all tables under their new ids and names, and their boxes with the joined labels."""
    labelled = [table.labelled() for table in tables]
    image_ids = []
    for part in labelled:
        image_ids += [row.image_id for row in part.images]
    have_one_type = len(set(map(type, image_ids))) == 1
    keep_ids = have_one_type and len(set(image_ids)) == len(image_ids)
    rows = []
    for part, name, of_table in zip(labelled, names, files, strict=True):
        for row, file in zip(part.images, of_table, strict=True):
            image_id = row.image_id if keep_ids else f"{name}:{row.image_id}"
            rows.append(row._replace(image_id=image_id, file_name=file))
    parts = [part.boxes for part in labelled]
    columns = {}
    for column in ("xyxy", "area", "iscrowd", "ids"):
        columns[column] = np.concatenate([getattr(part, column) for part in parts])
    if len(np.unique(columns["ids"])) < len(columns["ids"]):
        columns["ids"] = np.arange(1, len(columns["ids"]) + 1)
    labels = []
    for table, part in zip(tables, parts, strict=True):
        label_of = np.array([class_names.index(name) for name in table.class_names])
        labels.append(label_of[part.labels])
    extra = {}
    if all("masks" in part.extra for part in parts):
        extra["masks"] = np.concatenate([part.extra["masks"] for part in parts])
    boxes = Boxes(_joined_offsets(parts), labels=np.concatenate(labels), scores=None, extra=extra, **columns)
    return rows, boxes


def _root_of(
    tables: Sequence[DetectionTable], names: Sequence[str]
) -> tuple[Path | ImageSources | None, list[list[str]]]:
    """Return the common root of the images of all tables, and their names below it."""
    roots = [table.image_root for table in tables]
    files = [table.rows["file_name"].to_pylist() for table in tables]
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
