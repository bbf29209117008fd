"""Data sets of the `datasets` library, from the hub or a local folder, with the usual `objects` column.

The data are copied into the cached table; or the images stay in their Parquet files and are streamed from there.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import datasets
import fsspec
from datasets.exceptions import DatasetsError
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError

from toolkit.base.errors import BadInput
from toolkit.base.files import read_json
from toolkit.data.annotations import TRIPLET_KEYS, Annotations, Reading
from toolkit.data.check_files import FULL_CHECK_LIMIT, check_image, map_in_threads, white_problems, with_16_bits
from toolkit.data.checks import check
from toolkit.data.decoding import ImageError, largest_value, probe_image, read_image_file
from toolkit.data.formats.annotated import UNKNOWN_SIZE
from toolkit.data.image_sources import ImageSources, Shards, open_shard
from toolkit.data.table import DetectionTable, Problem
from toolkit.data.table_cache import cached_table, write_table

CATEGORY_KEYS = ("category", "categories", "category_id", "label", "labels")
ID_KEYS = ("id", "bbox_id", "ids")
NAMES_FILE = "categories.json"  # beside the rows of SGG-Benchmark's data sets
CONVERT = "scripts/convert.py --to parquet"
Make = Callable[[Path], DetectionTable]  # writes the table to the cache file that it is given


@dataclasses.dataclass(frozen=True)
class Columns:
    """The names of the columns that are read from a data set, and its classes as far as they are known.

    image: name of the column of images. category, id: names of keys in `objects`; id: None if that key is missing.
    categories, predicates: {"id", "name"} of classes and predicates; None: only their ids are known.
    relations: whether the data have relations.
    """

    image: str
    category: str
    id: str | None
    categories: Sequence[dict] | None
    predicates: Sequence[dict] | None
    relations: bool


def open_named(split: str, reading: Reading) -> DetectionTable:
    """Read a split of the data set `reading.name` by `open_hub`. Raises BadInput if no name is given."""
    if reading.name is None:
        raise BadInput(f"format 'hub' with split {split!r}: set the data set's name or folder (--data.name)")
    return open_hub(reading.name, split, reading)


def open_hub(name: str, split: str, reading: Reading) -> DetectionTable:
    """Read a split of a hub data set, of a `save_to_disk` folder, or of a folder of Parquet files.

    Expected are an image column and `objects {bbox (COCO xywh), category, [id], [area], [iscrowd], [segmentation]}`,
    the last as COCO's and read with `reading.masks`; the columns
    `image_id`, `width` and `height` are used if they exist. Class names come from the ClassLabel feature; in
    SGG-Benchmark's layout they are in `categories.json` next to the data, which also has the names of the predicates in
    the column `relations {subject_id, object_id, predicate_id}`. The encoded images are copied into the cached table.
    The data are validated as in `read_coco`.

    With `reading.streaming`, which needs Parquet files, images stay in these files and are read when they are asked
    for. They are not looked at before, so `width`, `height` and class names (ClassLabel) are needed, and `check_images`
    has no effect.

    Raises BadInput: the data or the split do not exist, the hub cannot be reached and a local copy is missing, or the
        data have other columns or defects.
    """
    source = f"{name} ({split})"
    if reading.streaming:
        key, make = _streamed(name, split, source, reading)
    else:
        key, make = _copied(name, split, source, reading)
    return cached_table(key, make, reading, name=source, empty="the split has no images")


def _copied(name: str, split: str, source: str, reading: Reading) -> tuple[list, Make]:
    """Return the key of the cache and the function that makes the table, for data whose images are copied."""
    check_images = reading.check_images
    max_pixels = reading.max_image_pixels
    rows = _load_split(name, split)
    columns = columns_of(rows.features, name, rows.info.description)
    rows = rows.cast_column(columns.image, datasets.Image(decode=False))
    stats = [os.stat(file["filename"]) for file in rows.cache_files]
    states = [(status.st_size, status.st_mtime_ns, status.st_ctime_ns) for status in stats]
    key = ["hub", source, check_images, rows._fingerprint, rows.cache_files, states, columns]

    def make(cache_file: Path) -> DetectionTable:
        annotations, problems = _annotations(rows, columns, source, reading.masks)
        full = None
        if check_images:
            full = check_images == "full" or (check_images is True and len(rows) <= FULL_CHECK_LIMIT)

        def largest_value_of(index: int) -> int:
            return largest_value(_encoded(rows[index][columns.image], max_pixels), max_pixels)

        look = partial(_look, rows, columns.image, annotations, full, reading)
        problems += map_in_threads(look, range(len(rows)), "checking images")
        positions = {image.image_id: index for index, image in enumerate(annotations.images)}
        if full is not None:
            deep = [positions[image.image_id] for image in with_16_bits(annotations.images, problems)]
            problems += white_problems(source, deep, largest_value_of, full, reading.white)
        bad = {problem.image_id for problem in problems if problem.severity == "error"}
        good = check(annotations, source, crowds=reading.crowds).without(bad)
        good.problems[:0] = problems

        def encoded() -> Iterator[bytes]:
            for image in good.images:
                row = rows[positions[image.image_id]]
                yield _encoded(row[columns.image], max_pixels)

        return write_table(**good.columns(), cache_file=cache_file, encoded=encoded(), name=source)

    return key, make


def _look(
    rows: datasets.Dataset,
    image_column: str,
    annotations: Annotations,
    full: bool | None,
    reading: Reading,
    index: int,
) -> list[Problem]:
    """Return the problems of an image, and fill in its size if the row lacks it.

    full: whether it is decoded; None: it is not checked.
    """
    image = annotations.images[index]
    max_pixels = reading.max_image_pixels
    try:
        data = _encoded(rows[index][image_column], max_pixels)
        height, width = probe_image(data, max_pixels).size_hw
        fault = []
    except ImageError as error:
        # Reported once, as the file's fault: neither the missing size nor a box outside it is another.
        height = UNKNOWN_SIZE
        width = UNKNOWN_SIZE
        fault = [Problem("error", image.file_name, image.image_id, None, error.reason)]
    image = image._replace(width=image.width or width, height=image.height or height)
    annotations.images[index] = image
    if fault or full is None:
        return fault
    return check_image(image, data, full, max_pixels, "row", reading.white)


def _streamed(name: str, split: str, source: str, reading: Reading) -> tuple[list, Make]:
    """Return the key of the cache and the function that makes the table, for data whose images stay in Parquet files.
    """
    files = _files(name, split)
    if "://" in files[0]:
        root = _shared(files)
    else:
        folders = [os.path.dirname(file) for file in files]
        root = os.path.commonpath(folders)
    with open_shard(files[0]) as first:
        features = datasets.Features.from_arrow_schema(first.schema_arrow)
    columns = columns_of(features, name)
    missing = [f"column {key!r}" for key in ("width", "height") if key not in features]
    if columns.categories is None:
        missing.append("class names (a ClassLabel)")
    if missing:
        why = "since images are not read before training; leave data.streaming out, or write the data"
        raise BadInput(f"{name}: data.streaming needs {' and '.join(missing)}, {why} by {CONVERT}")

    def make(cache_file: Path) -> DetectionTable:
        annotations = Annotations(columns.categories, reading.masks)
        annotations.predicates = list(columns.predicates or ())
        for group, rows in _parts(files, root, columns):
            for number, row in enumerate(rows):
                add_row(annotations, row, f"{group}/{number}", columns)
        shards = ImageSources([Shards(columns.image, root)])
        good = check(annotations, source, reading.max_image_pixels, reading.crowds)
        return write_table(**good.columns(), cache_file=cache_file, image_root=shards, name=source)

    return ["shards", source, *map(_state, files), columns], make


@contextmanager
def _as_bad_input(name: str, failure: str) -> Iterator[None]:
    """Turn what `datasets` raises into BadInput: the data are neither local nor on the hub, or `failure`."""
    try:
        yield
    except ConnectionError as error:
        remedy = "give a local folder (save_to_disk or Parquet) as --data.name, or load it once with network and set"
        raise BadInput(
            f"{name}: the hub cannot be reached, and this machine has no copy; {remedy} HF_HUB_OFFLINE=1 "
            f"({error})"
        ) from error
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise BadInput(f"{name}: {failure}: {str(error).splitlines()[0]}") from error


def _load_split(name: str, split: str) -> datasets.Dataset:
    folder = Path(name).expanduser()
    with _as_bad_input(name, f"split {split!r} cannot be loaded"):
        is_saved = (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()
        if not is_saved:
            where = str(folder) if folder.is_dir() else name
            return datasets.load_dataset(where, split=split)
        loaded = datasets.load_from_disk(str(folder))
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise BadInput(f"{name}: no split {split!r}; choose from {', '.join(loaded)}")
        return loaded[split]
    if loaded.split is not None and str(loaded.split) != split:
        # one folder given for training and validation would otherwise pass unseen
        raise BadInput(f"{name}: the folder holds split {str(loaded.split)!r}, not {split!r}")
    return loaded


def columns_of(features: datasets.Features, name: str, description: str = "") -> Columns:
    """Return the columns that are read from a data set with these features.

    name: of the data set. description: text of the data set, which may be JSON with the names of classes.

    Raises BadInput for a data set without images or objects, or with names that are not lists.
    """
    available = f"the columns are {', '.join(features)}"
    images = [key for key, feature in features.items() if isinstance(feature, datasets.Image)]
    if not images:
        raise BadInput(f"{name}: no image column; {available}")
    if "objects" not in features:
        raise BadInput(f"{name}: no `objects` column; {available}")
    feature = _items(features["objects"])
    category = next((key for key in CATEGORY_KEYS if key in feature), None)
    if category is None or "bbox" not in feature:
        raise BadInput(f"{name}: `objects` has the keys {', '.join(feature) or 'none'}; expected `bbox` and `category`")
    label = feature[category]
    label = getattr(label, "feature", label)
    known = numbered(label.names) if isinstance(label, datasets.ClassLabel) else None
    triplet = _items(features["relations"]) if "relations" in features else {}
    has_relations = set(TRIPLET_KEYS) <= set(triplet)
    named = _names_beside_rows(name, description) if known is None or has_relations else {}
    return Columns(
        image="image" if "image" in images else images[0],
        category=category,
        id=next((key for key in ID_KEYS if key in feature), None),
        categories=known or named.get("categories"),
        predicates=named.get("rel_categories") if has_relations else (),
        relations=has_relations,
    )


def _items(feature: object) -> Mapping:
    """Return the features of List({...}) or {...: List(...)}; empty for others."""
    feature = getattr(feature, "feature", feature)
    feature = feature[0] if isinstance(feature, list) else feature
    return feature if isinstance(feature, Mapping) else {}


def _names_beside_rows(name: str, description: str) -> dict:
    """Read `categories` and `rel_categories` from the file next to the rows, local or on the hub, or the description.

    Empty if neither names them.
    """
    file = Path(name).expanduser() / NAMES_FILE
    if not file.parent.is_dir():
        try:
            file = Path(hf_hub_download(name, NAMES_FILE, repo_type="dataset"))
        except (OSError, ValueError, EntryNotFoundError):  # it has none, or the hub cannot be reached
            file = None
    if file is not None and file.is_file():
        content = read_json(file)
        wrong = [key for key in ("categories", "rel_categories") if not isinstance(content.get(key, []), list)]
        if wrong:
            raise BadInput(f"{file}: `{wrong[0]}` is not a list; expected [{{id, name}}, ...]")
        return content
    try:
        return json.loads(description)
    except ValueError:  # a description in prose
        return {}


def _annotations(
    rows: datasets.Dataset, columns: Columns, source: str, masks: bool
) -> tuple[Annotations, list[Problem]]:
    """Return the split in columns, with sizes None if it lacks them, and notes."""
    annotations = Annotations(masks=masks)
    for index, row in enumerate(rows.remove_columns(columns.image)):  # no image bytes in this pass
        add_row(annotations, row, f"row {index}", columns)
    notes = []
    relations = annotations.relations
    if "relations" in rows.features and not columns.relations:
        unread = f"column `relations` without the keys {', '.join(TRIPLET_KEYS)}; not read"
        notes.append(Problem("warning", source, None, None, unread))
    for kind, named, codes in (
        ("classes", columns.categories, annotations.category_ids),
        ("predicates", columns.predicates, relations.predicate_ids),
    ):
        names = named or [{"id": value, "name": str(value)} for value in codes.values if value is not None]
        setattr(annotations, "categories" if kind == "classes" else "predicates", list(names))
        if named is None and (kind == "classes" or names):
            why = f"the labels are not a ClassLabel, and the data have no {NAMES_FILE}"
            notes.append(Problem("warning", source, None, None, f"{why}; {kind} are called by their values"))
    return annotations, notes


def numbered(names: Sequence[str]) -> list[dict]:
    """Return names as categories of COCO, {"id", "name"}, with ids from 0."""
    return [{"id": label, "name": name} for label, name in enumerate(names)]


def add_row(annotations: Annotations, row: Mapping, file_name: str, columns: Columns) -> None:
    """Add the image, boxes and relations of a row of the data set to `annotations`.

    The entries `objects` and `relations` of the row are a dict of lists or a list of dicts.
    """
    image_id = len(annotations.images) if row.get("image_id") is None else row["image_id"]
    image = {
        "id": image_id,
        "file_name": file_name,
        "width": row.get("width"),
        "height": row.get("height"),
    }
    annotations.add_image(image)
    keys = {
        "bbox": "bbox",
        "area": "area",
        "iscrowd": "iscrowd",
        columns.id: "id",
        columns.category: "category_id",
    }
    if annotations.masks is not None:
        keys["segmentation"] = "segmentation"
    for item in _rows_of_columns(row["objects"]):
        entry = {"id": len(annotations) + 1, "image_id": image_id}
        for key, value in item.items():
            if key in keys and value is not None:
                entry[keys[key]] = value
        annotations.add(entry)
    if columns.relations:
        for item in _rows_of_columns(row["relations"]):
            relation = {key: item[key] for key in TRIPLET_KEYS}
            relation["image_id"] = image_id
            annotations.relations.add(relation)


def _rows_of_columns(items: Mapping | Sequence[dict] | None) -> Sequence[dict]:
    if not isinstance(items, Mapping):
        return items or []
    rows = zip(*items.values(), strict=True)
    return [dict(zip(items, values, strict=True)) for values in rows]


def _encoded(image: Mapping | None, max_pixels: int) -> bytes:
    """Return the encoded bytes of an undecoded image column. Raises ImageError."""
    if image is None:
        raise ImageError("no image in this row")
    if image.get("bytes") is not None:
        return image["bytes"]
    return bytes(read_image_file(Path(image["path"]), max_pixels)[1])


def _files(name: str, split: str) -> list[str]:
    """Return paths or URLs of the Parquet files of a split."""
    with _as_bad_input(name, "cannot be opened"):
        data_files = datasets.load_dataset_builder(name).config.data_files or {}
    if split not in data_files:
        raise BadInput(f"{name}: no split {split!r}; choose from {', '.join(map(str, data_files)) or 'none'}")
    files = [str(file) for file in data_files[split]]
    others = [file for file in files if not file.endswith(".parquet")]
    if others:
        wrong = f"data.streaming reads Parquet files, and {others[0]} is not one"
        raise BadInput(f"{name}: {wrong}; leave it out, or write the data by {CONVERT}")
    return files


def _shared(urls: list[str]) -> str:
    """Return the URL of the folder that all files are below."""
    folders = [f"{url.rpartition('/')[0]}/" for url in urls]
    return os.path.commonprefix(folders).rpartition("/")[0]


def _state(file: str) -> str:
    """Return a string that changes when a file does."""
    system, path = fsspec.core.url_to_fs(file)
    info = system.info(path)
    return f"{file} {info.get('size')} {info.get('mtime')} {info.get('ETag', info.get('etag'))}"


def _parts(files: list[str], root: str, columns: Columns) -> Iterator[tuple[str, list[dict]]]:
    """Yield (`<file>/<row group>`, its rows without images) of each row group."""
    for url in files:
        with open_shard(url) as file:
            wanted = ("image_id", "width", "height", "objects", "relations")
            kept = [key for key in wanted if key in file.schema_arrow.names]
            for group in range(file.num_row_groups):
                rows = file.read_row_group(group, columns=kept).to_pylist()
                yield f"{url[len(root) + 1 :]}/{group}", rows
