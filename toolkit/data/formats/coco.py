"""COCO: annotation files of any size, read item by item into columns.

A folder has a file for each split: `annotations/instances_*.json`, or `_annotations.coco.json` in each split.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from toolkit.base.errors import BadInput
from toolkit.base.imports import gc_disabled
from toolkit.data.annotations import Annotations, Reading, RelationColumns, is_id
from toolkit.data.check_files import with_good_files
from toolkit.data.checks import check, unsafe_file_name
from toolkit.data.find_images import find_missing, find_root
from toolkit.data.formats.json_stream import WholeValue, items_of, stream_lists
from toolkit.data.formats.look_alikes import about_look_alike
from toolkit.data.image_sources import ImageSources, digest_of, open_sources
from toolkit.data.layout import (
    FILE_NAME_WORD,
    UNSPLIT,
    Layout,
    Splits,
    called_first,
    one_per_split,
    split_in_name,
)
from toolkit.data.table import DetectionTable, Problem
from toolkit.data.table_cache import cached_table, file_digest, write_table

TITLE = "COCO"
PROBED_BYTES = 4096  # one of COCO's keys must appear in the first or last so many bytes
OTHER_TASKS = ("captions", "person_keypoints", "stuff", "panoptic", "image_info", "results")
ANNOTATION_WORDS = ("annotations", "annotation", "annos", "anno", "anns", "ann", "labels", "label", "coco", "json")
ANNOTATIONS_PER_CHUNK = 2048  # annotations that wait for their columns
REQUIRED_LISTS = ("images", "annotations", "categories")
OTHER_LISTS = ("rel_categories", "rel_annotations", "relations", "attribute_categories")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def find(layout: Layout) -> Splits | None:
    """Return the splits of a folder of COCO files, or of one file; None if there are none.

    Of several files for one split the first in this order counts: those in `annotations`, those that are called like
    the split, the others, and last those in other folders of annotations.
    """
    folder = layout.folder
    if folder.is_file():
        return Splits(layout, {split_in_name(folder.name) or UNSPLIT: [folder]}) if _is_coco(folder) else None
    candidates = _candidates(layout)
    files = one_per_split((_split_of_candidate(path, folder), path) for path in candidates)
    return Splits(layout, {split: [file] for split, file in files.items()}, candidates) if files else None


def read(found: Splits, split: str, reading: Reading) -> DetectionTable:
    """Read one split by `read_coco`; the folder of the images is looked for near the annotation file."""
    siblings = [file for name, (file,) in found.sources.items() if name != split]
    (file,) = found.sources[split]
    return read_coco(file, reading, siblings, found.layout if found.folder.is_dir() else None)


def read_coco(
    annotation_file: str | Path, reading: Reading, siblings: Sequence[Path] = (), layout: Layout | None = None
) -> DetectionTable:
    """Read a COCO `instances` file into a DetectionTable, with its polygons and run lengths if `reading.masks` is set.

    reading: its `image_dir` is the root of `file_name`, as `open_sources` takes it; None: the images are looked for
        near the annotation file.
    siblings: annotation files of other splits, whose images may lie in the same folder.
    layout: of the data set, in which pictures are looked for that are not in the folder of the others; None: that of
        the folder of the annotation file. `image_dir` comes before both.
    The table and its problems are cached by the content of the JSON file, the options, and the names, sizes and times
    of the images, so that a second start parses no JSON and opens no image. `rel_categories` and `rel_annotations`, or
    triplets `relations` (rows of subject annotation id, object annotation id, predicate id), become `relations`;
    `attribute_ids` of annotations, which are ids of `attribute_categories`, become `attributes`.
    """
    if reading.on_error not in ("raise", "drop"):
        raise BadInput(f"on_error is {reading.on_error!r}; expected 'raise' or 'drop'")
    check_images = reading.check_images
    if check_images not in (True, False, "full", "header"):
        raise BadInput(f"check_images is {check_images!r}; expected True, False, 'full' or 'header'")
    file = Path(annotation_file).expanduser()
    image_dir = open_sources(reading.image_dir)

    make = partial(_write_table, file, image_dir, siblings, layout or Layout(_data_set_of(file)), reading)
    where = f"in {image_dir.resolve()}" if image_dir else f"near {file.resolve()}"
    key = ["coco", check_images, where, file_digest(file)]
    return cached_table(key, make, reading, name=str(file))


def _write_table(
    file: Path,
    image_dir: Path | ImageSources | None,
    siblings: Sequence[Path],
    layout: Layout,
    reading: Reading,
    cache_file: Path,
) -> DetectionTable:
    """Read and check an annotation file and its images, and write their table; arguments: as of `read_coco`."""
    with gc_disabled():
        annotations = read_annotations(file, reading.masks)
        left_out = _without_super_category(annotations, file, siblings)
        checked = check(annotations, str(file), reading.max_image_pixels, reading.crowds)
    base = image_dir or layout.folder
    root = image_dir
    if root is None:
        names = [row.file_name for row in checked.images]
        root = _image_root(file, names, layout, base if reading.check_images else None)
    others = set()
    searched = {}
    if reading.check_images and checked.images:  # the siblings are read only where the images are checked
        found = find_missing(checked.images, root, layout, base, _split_of(file))
        searched = {path: digest_of(path) for path in found.watched}
        root = found.image_root
        others = found.names(chain(*map(listed_names, siblings), checked.listed))
        others.update(row.file_name for row in found.images)
        checked = replace(checked, images=found.images, problems=checked.problems + found.problems)
    max_pixels = reading.max_image_pixels
    good, digests = with_good_files(checked, root, reading.check_images, max_pixels, others, white=reading.white)
    good.problems[:0] = _notes(file) + left_out
    return write_table(
        **good.columns(),
        cache_file=cache_file,
        image_root=root.resolve(),
        name=str(file),
        checked={**searched, **digests},
    )


def read_annotations(file: Path, masks: bool = False) -> Annotations:
    """Read a COCO file into columns, which take 66 bytes for each box, and more with `masks`.

    Raises BadInput if the file is not JSON, or lacks one of the lists of `REQUIRED_LISTS`, except that images and
    categories without annotations are a test split, whose images have no objects.
    """
    lists: dict[str, object] = {}
    annotations = Annotations(masks=masks)
    triplets = RelationColumns()
    add = {
        "images": annotations.add_image,
        "categories": annotations.categories.append,
        "rel_annotations": annotations.relations.add,
        "rel_categories": annotations.predicates.append,
        "relations": triplets.add_triplet,
        "attribute_categories": annotations.attributes.append,
    }
    waiting: list = []  # annotations
    for key, item in stream_lists(file):
        if isinstance(item, WholeValue):
            lists[key] = item.value
        elif key == "annotations":
            waiting.append(item)
            if len(waiting) == ANNOTATIONS_PER_CHUNK:
                annotations.add_all(waiting)
                waiting = []
        elif key in add:
            lists.setdefault(key, [item])  # not empty
            add[key](item)
    if waiting or len(annotations):
        lists["annotations"] = [None]
    annotations.add_all(waiting)
    _check_lists(lists, str(file))
    annotations.relations.extend(triplets)
    return annotations


def listed_names(annotation_file: Path) -> Iterator[str]:
    """Yield the file names of the images of a COCO file; entries without one, and files that are not COCO, are skipped.
    """
    try:
        for _, item in items_of(annotation_file, ("images",)):
            if isinstance(item, dict) and isinstance(item.get("file_name"), str):
                yield item["file_name"]
    except (BadInput, OSError):  # reported when that split is read
        return


def _candidates(layout: Layout) -> list[Path]:
    """List the COCO files of a folder: in `annotations`, the folder itself, the folders of splits, and others named so.
    """
    folder = layout.folder
    of_splits = sorted(chain.from_iterable(layout.folders_of_splits(folder).values()))
    found = []
    for directory in (folder / "annotations", folder, *of_splits, *_other_folders(layout)):
        for path in called_first(layout.files(directory, ".json")):
            if not path.name.startswith(OTHER_TASKS) and _is_coco(path):
                found.append(path)
    return found


def _other_folders(layout: Layout) -> list[Path]:
    """List folders in a folder that are called like one of annotations, such as `labels`, but not those of YOLO labels.
    """
    found = []
    for inner in layout.folders(layout.folder):
        is_named = inner.name != "annotations" and _says_annotations(inner.name)
        if is_named and split_in_name(inner.name) is None and not layout.files(inner, ".txt"):
            found.append(inner)
    return found


def _split_of_candidate(file: Path, folder: Path) -> str | None:
    """Return the split that the name of a file says, or that of its folder if it is one of a split."""
    parent = file.parent
    is_of_split = parent not in (folder, folder / "annotations") and not _says_annotations(parent.name)
    return split_in_name(parent.name if is_of_split else file.name)


def _says_annotations(name: str) -> bool:
    return any(word.lower() in ANNOTATION_WORDS for word in FILE_NAME_WORD.findall(name))


def _split_of(file: Path) -> str | None:
    """Return the split that the name of an annotation file says, or else that of its folder."""
    return split_in_name(file.name) or split_in_name(file.absolute().parent.name)


def _data_set_of(file: Path) -> Path:
    """Return the folder of the data set of an annotation file, which may lie in a folder of annotations."""
    return file.parent.parent if _says_annotations(file.absolute().parent.name) else file.parent


def _image_root(file: Path, file_names: Iterable[str], layout: Layout, base: Path | None) -> Path:
    """Find the folder near an annotation file that has one of the first images, or `base`; see `find_root`."""
    here = file.parent
    stem = file.stem
    word = stem.rsplit("_", 1)[-1]  # instances_val2017 -> val2017
    folders = ("", stem, word, "images", "JPEGImages", f"images/{stem}", f"images/{word}")
    candidates = [here, here / "images", *(here.parent / name for name in folders), *_folders_of_split(file, layout)]
    names = [name for name in file_names if not unsafe_file_name(name)][:20]  # the very first may be the missing one

    def holds(folder: Path) -> bool:
        return any(os.path.isfile(folder / name) for name in names)

    return find_root(candidates, holds, layout, base, where=file, first=names[0] if names else None)


def _folders_of_split(file: Path, layout: Layout) -> list[Path]:
    """Return folders near an annotation file whose names say its split: `train2017` for `annotations/train.json`."""
    split = split_in_name(file.name)
    if split is None:
        return []
    near = []
    for base in (file.parent, file.parent.parent):
        near += [base, base / "images"]
    folders = []
    for folder in layout.folders_of_splits(*near).get(split, []):
        folders += [folder, folder / "images"]
    return folders


def _is_coco(path: Path) -> bool:
    """Return whether a JSON file begins like an object with COCO's lists, without reading the whole of a large file.

    A file that is read whole must have images: Label Studio's `notes.json`, next to YOLO labels, has only categories.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(PROBED_BYTES)
            file.seek(max(0, os.path.getsize(path) - PROBED_BYTES))
            tail = file.read()
    except OSError:
        return False
    text = head.lstrip(b"\xef\xbb\xbf \r\n\t")
    keys = b"images|annotations"
    if len(head) == PROBED_BYTES:  # the middle of a large file is not read
        keys += b"|categories|info|licenses"
    return text.startswith(b"{") and re.search(rb'"(%s)"\s*:' % keys, head + tail) is not None


def _without_super_category(annotations: Annotations, file: Path, siblings: Sequence[Path]) -> list[Problem]:
    """Leave out the category that Roboflow adds, and return a note on it.

    It is the super-category of all others, has the super-category "none" itself, and no annotation in any split.
    """
    entries = annotations.categories
    if len(entries) < 2 or not all(isinstance(entry, dict) for entry in entries):
        return []
    for number, entry in enumerate(entries):
        id_ = entry.get("id")
        name = entry.get("name")
        if entry.get("supercategory") != "none" or not isinstance(name, str) or not is_id(id_):
            continue
        others = entries[:number] + entries[number + 1 :]
        if not all(other.get("supercategory") == name for other in others):
            continue
        if id_ in annotations.category_ids.values or any(id_ in _categories_in(path) for path in siblings):
            return []
        annotations.categories = others
        message = f"category {id_} ({name!r}) is the super-category of all others and has no annotation: left out"
        return [Problem("note", str(file), None, None, message)]
    return []


def _categories_in(file: Path) -> set:
    """Return the ids of the categories of all annotations of a COCO file; none of a file that cannot be read."""
    used = set()
    try:
        for _, entry in items_of(file, ("annotations",)):
            if isinstance(entry, dict) and is_id(entry.get("category_id")):
                used.add(entry["category_id"])
    except (BadInput, OSError):  # reported when that split is read
        return set()
    return used


def _notes(file: Path) -> list[Problem]:
    with open(file, "rb") as stream:
        marked = stream.read(3) == BYTE_ORDER_MARK
    return [Problem("warning", str(file), None, None, "byte order mark skipped")] if marked else []


def _check_lists(lists: dict[str, object], file: str) -> None:
    missing = [key for key in REQUIRED_LISTS if key not in lists]
    if missing == ["annotations"]:  # of a test split, whose annotations are not published
        missing = []
    faults = [f"{file}: key `{key}` missing" for key in missing]
    others = [key for key in (*REQUIRED_LISTS, *OTHER_LISTS) if key in lists and not isinstance(lists[key], list)]
    faults += [f"{file}: `{key}` is a {type(lists[key]).__name__}; expected a list" for key in others]
    faults += [f"{file}: `{key}` is empty" for key in ("images", "categories") if lists.get(key) == []]
    look_alike = about_look_alike(Layout(Path(file))) if faults else ""
    if look_alike:
        raise BadInput(f"{file}: {look_alike}")
    if faults:
        raise BadInput(faults)
