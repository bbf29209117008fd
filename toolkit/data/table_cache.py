"""The cache of tables: written once from columns, reused while their sources are unchanged."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from toolkit.base.boxes import Boxes, Relations, offsets_of
from toolkit.base.errors import BadInput
from toolkit.base.files import fsync_folder, near_names, write_json
from toolkit.base.masks import column_of
from toolkit.data.annotations import ImageRow, Reading
from toolkit.data.checks import unsafe_file_name
from toolkit.data.columns import read_columns, write_columns
from toolkit.data.image_sources import ImageSources, digest_of, open_sources
from toolkit.data.problem_lines import grouped, kind_of
from toolkit.data.table import Category, DetectionTable, Problem

logger = logging.getLogger(__name__)

LISTED_ERRORS = 200
TABLE_VERSION = 9  # raise it when the columns or the output of a reader change: older caches are then read anew
WHOLE_BYTES = 2**30  # of an Arrow file, up to which all of it is compared with what was written, in a second


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Return `cache_dir`, else $DETECTION_TOOLKIT_CACHE, else ~/.cache/detection-toolkit."""
    chosen = cache_dir or os.environ.get("DETECTION_TOOLKIT_CACHE") or "~/.cache/detection-toolkit"
    try:
        return Path(chosen).expanduser()
    except RuntimeError as error:  # of a user whom this machine does not know
        raise BadInput(f"{chosen}: {error}; set DETECTION_TOOLKIT_CACHE to a folder") from error


def cached_table(
    key: Iterable[object],
    write: Callable[[Path], DetectionTable],
    reading: Reading,
    *,
    name: str,
    empty: str = "not one usable image",
) -> DetectionTable:
    """Return the table that `key` identifies, from the cache while its source files are unchanged; otherwise rebuilt.

    Args:
        key: everything that the table depends on: format, options and places as text, and bytes such as digests of
            files.
        write: function that reads the data, and writes the table by `write_table` to the cache file that it is given.
        reading: its `cache_dir`, `on_error`, `max_image_pixels` and `white` are used here.
        name: of the table, in messages.
        empty: message for a table without images.

    Raises:
        BadInput: errors in the data with `on_error` "raise"; a table without images; any error that `write` raises.
    """
    first = f"{TABLE_VERSION} {reading.max_image_pixels}"
    if reading.masks:
        first += " masks"
    if reading.crowds != "ignore":
        first += f" crowds {reading.crowds}"
    if reading.white:
        first += f" white {reading.white}"  # the problems of the images depend on it
    digest = hashlib.blake2b(first.encode(), digest_size=16)
    for part in key:
        content = part if isinstance(part, bytes) else f" {part}".encode(errors="surrogateescape")
        digest.update(content)
    cache_file = cache_root(reading.cache_dir) / "tables" / f"{digest.hexdigest()}.json"
    table, checked = open_table(cache_file) or (None, {})
    if table is not None and all(digest_of(path) == digest for path, digest in checked.items()):
        table = dataclasses.replace(table, name=name)
    else:
        table = write(cache_file)
    table.max_image_pixels = reading.max_image_pixels
    table.white = reading.white
    problems = [_with_path(problem, table.image_root, name) for problem in table.problems]
    raise_or_log_errors(problems, reading.on_error if len(table) else "raise", name)
    if not len(table):
        raise BadInput(f"{name}: {empty}")
    return table


def _with_path(problem: Problem, root: Path | ImageSources | None, annotation_file: str) -> Problem:
    """Return the problem of an image file with the path of the file in place of its name, which is relative to `root`.
    """
    is_of_file = problem.image_id is not None and problem.annotation_id is None and problem.file != annotation_file
    if not is_of_file or not isinstance(root, Path) or unsafe_file_name(problem.file):
        return problem
    return dataclasses.replace(problem, file=str(root / problem.file))


def file_digest(file: Path) -> bytes:
    """Return a hash of the content of an annotation file.

    Raises BadInput if the file does not exist, cannot be read, or is a pipe or a device.
    """
    try:
        mode = os.stat(file).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a pipe would be waited for, a device read without end
            raise BadInput(f"{file}: not a file but a pipe or a device, which cannot be read twice; give a file")
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, hashlib.blake2b).digest()
    except FileNotFoundError as error:
        raise BadInput(f"{file}: no such annotation file{near_names(file)}") from error
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from error


def raise_or_log_errors(problems: list[Problem], on_error: str, file: str) -> None:
    """Raise BadInput that lists the errors if `on_error` is "raise"; log their number if `on_error` is "drop".

    file: name of the data in messages.
    """
    errors = [problem for problem in problems if problem.severity == "error"]
    warned = sum(problem.severity == "warning" for problem in problems)
    if errors and on_error == "raise":
        kinds = [kind_of(problem.message) for problem in errors]
        listed = grouped(list(map(str, errors)), kinds, "scripts/check_data.py --json lists all")
        if len(listed) > LISTED_ERRORS:
            more = f"... and {len(listed) - LISTED_ERRORS} more lines; scripts/check_data.py --json lists all"
            listed = [*listed[:LISTED_ERRORS], more]
        raise BadInput([f"{file}: {len(errors)} errors (--data.on_error drop leaves these records out):", *listed])
    if errors or warned:
        logger.info("%s: %d unusable records dropped, %d warnings", file, len(errors), warned)


def write_table(
    images: Sequence[ImageRow],
    boxes: Boxes,
    relations: Relations | None = None,
    *,
    cache_file: Path,
    categories: Sequence[Category],
    predicates: Sequence[str] = (),
    attributes: Sequence[str] = (),
    encoded: Iterable[bytes] | None = None,
    image_root: Path | ImageSources | None = None,
    problems: Sequence[Problem] = (),
    name: str = "",
    checked: Mapping[str, str] | None = None,
) -> DetectionTable:
    """Write columns as an Arrow stream, which `datasets.Dataset.from_file` opens too, and open it again.

    Two files are written: an Arrow stream named after a hash of its content, and `cache_file` (JSON: classes, problems,
    name of the Arrow file). `cache_file` is put in place last and in one step, so a reader never finds half a table; if
    two processes write the same table, the later one replaces the files of the first.

    Args:
        boxes, relations: of the images, in their order; `boxes.extra["attributes"]` (N, A) with `attributes`, and
            `boxes.extra["masks"]`, an object array (N,) of `toolkit.base.masks.Shape`, if the table is to hold masks.
        encoded: the encoded images, if the table is to hold them.
        checked: digests of places (`toolkit.data.image_sources.digest_of`) that tell whether the cache is valid.
    """
    if attributes and "attributes" not in boxes.extra:
        none = np.zeros((len(boxes), 1), np.int64)
        boxes = dataclasses.replace(boxes, extra={**boxes.extra, "attributes": none})
    relations = relations or Relations.none(len(images))
    info = {
        "categories": [[category.id, category.name] for category in categories],
        "predicates": list(predicates),
        "attributes": list(attributes),
        "image_root": image_root.specs() if isinstance(image_root, ImageSources) else image_root and str(image_root),
        "problems": [dataclasses.astuple(problem) for problem in problems],
        "name": name,
        "checked": dict(checked or {}),
    }
    if "masks" in boxes.extra:
        info["masks"] = True
    with _temporary(cache_file) as temporary:
        write_columns(images, boxes, relations, encoded, temporary)
        return _publish(temporary, cache_file, info)


@contextlib.contextmanager
def _temporary(cache_file: Path) -> Iterator[Path]:
    """Yield a file in the folder of `cache_file` that is removed afterwards; raise BadInput for a disk that cannot be
    written."""
    temporary = None
    try:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=cache_file.parent, suffix=".tmp")
        os.close(descriptor)
        yield Path(temporary)
    except OSError as error:
        raise BadInput(
            f"{cache_file.parent}: the table could not be written ({error.strerror or error}); free space "
            "or set DETECTION_TOOLKIT_CACHE to another folder"
        ) from error
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def _publish(temporary: Path, cache_file: Path, info: dict) -> DetectionTable:
    """Put the Arrow file `temporary` in its place, then `cache_file` with `info`; open the table."""
    fsync_folder(temporary)  # a name that survives a power cut must not lead to zeros
    fingerprint = _fingerprint_of(temporary, info)
    arrow_file = cache_file.with_name(f"{fingerprint}.arrow")
    info["version"] = TABLE_VERSION
    info["arrow"] = arrow_file.name
    info["fingerprint"] = fingerprint
    info["size"] = temporary.stat().st_size
    info["columns"] = _digest_of_columns(temporary) if info["size"] > WHOLE_BYTES else ""
    info["digest"] = _digest_of_info(info)
    os.chmod(temporary, 0o644)  # mkstemp makes 0600; a cache may be shared
    os.replace(temporary, arrow_file)
    fsync_folder(arrow_file.parent)
    write_json(cache_file, info)
    return _from_info(cache_file, info)


def _fingerprint_of(arrow_file: Path, info: Mapping) -> str:
    """Return a digest of the rows and of the names of classes, predicates and attributes."""
    names = [info["categories"], info["predicates"]]
    if info["attributes"]:
        names.append(info["attributes"])
    with open(arrow_file, "rb") as stream:
        digest = hashlib.file_digest(stream, hashlib.blake2b)
    digest.update(json.dumps(names).encode())
    return digest.hexdigest()[:32]


def _digest_of_columns(arrow_file: Path) -> str:
    """Return a digest of every column except the images themselves.

    For tables with embedded images: these are gigabytes, and a damaged one is found when it is decoded.
    """
    digest = hashlib.blake2b(digest_size=16)
    with pa.memory_map(str(arrow_file)) as file, pa.ipc.open_stream(file) as reader:
        digest.update(str(reader.schema).encode())
        for batch in reader:
            digest.update(str(batch.num_rows).encode())
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                buffers = column.buffers()
                if name == "image":
                    buffers = buffers[:2]
                for buffer in buffers:
                    if buffer is not None:
                        digest.update(buffer)
    return digest.hexdigest()


def _digest_of_info(info: Mapping) -> str:
    """Return a digest of everything in the JSON file of a table."""
    content = {key: value for key, value in info.items() if key != "digest"}
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def open_table(cache_file: Path) -> tuple[DetectionTable, dict[str, str]] | None:
    """Open a cached table; return the table and its `checked` (see `write_table`).

    Returns None if the cache has no table of this version, or if the table is damaged. The cache is not trusted more
    than other files: a disk, a power cut or another program may have changed it, and one wrong bit can move a box.
    Damage is logged in one line, and the caller makes the table anew.
    """
    try:
        text = cache_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    try:
        info = json.loads(text)
        if info.get("version") != TABLE_VERSION:
            return None
        fault = _fault_of(cache_file, info)
        table = None if fault else _from_info(cache_file, info)
        checked = dict(info["checked"])
    # Not a complete list: exceptions of JSON, Arrow and the constructors for arbitrary content.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, BadInput) as error:
        fault = type(error).__name__
    except (pa.ArrowException, NotImplementedError, MemoryError) as error:
        fault = type(error).__name__
    if fault:
        logger.warning("%s: the cached table is damaged (%s); it is made anew", cache_file, fault)
        return None
    return table, checked


def _fault_of(cache_file: Path, info: Mapping) -> str:
    """Describe what differs from what was written; "" if nothing does."""
    if info["digest"] != _digest_of_info(info):
        return "its description was changed"
    arrow_file = cache_file.with_name(info["arrow"])
    if not arrow_file.exists():
        return f"{arrow_file.name} is missing"
    size = arrow_file.stat().st_size
    if size != info["size"]:
        return f"{arrow_file.name} has {size} bytes, written were {info['size']}"
    if info["size"] > WHOLE_BYTES:
        is_whole = _digest_of_columns(arrow_file) == info["columns"]
    else:
        is_whole = _fingerprint_of(arrow_file, info) == info["fingerprint"]
    return "" if is_whole else f"{arrow_file.name} has other content"


def _from_info(cache_file: Path, info: Mapping) -> DetectionTable:
    arrow_file = cache_file.with_name(info["arrow"])
    columns, stored_files = read_columns(arrow_file)
    root = info["image_root"]
    return DetectionTable(
        columns,
        categories=tuple(Category(*category) for category in info["categories"]),
        predicates=tuple(info["predicates"]),
        attributes=tuple(info["attributes"]),
        image_root=open_sources(root) if isinstance(root, list) else root and Path(root),
        problems=[Problem(*problem) for problem in info["problems"]],
        name=info["name"],
        fingerprint=info["fingerprint"],
        stored_files=stored_files,
        arrow_files=(arrow_file,),
    )


def fingerprint_in_cache(cache_file: Path) -> str:
    """Return the fingerprint of a joined or held-out table that an earlier version of the toolkit wrote; "" without
    such a file, or if it is damaged."""
    try:
        info = json.loads(cache_file.read_text(encoding="utf-8"))
        is_whole = info["version"] == TABLE_VERSION and info["digest"] == _digest_of_info(info)
        return info["fingerprint"] if is_whole else ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def columns_of_rows(rows: Sequence[Mapping]) -> tuple[list[ImageRow], Boxes, Relations]:
    """Convert rows, in the form of `DetectionTable.row`, to the first three arguments of `write_table`."""

    def joined(group: str, name: str, dtype: type, *shape: int) -> np.ndarray:
        parts = [np.asarray(row[group][name], dtype).reshape(-1, *shape) for row in rows]
        return np.concatenate([np.zeros((0, *shape), dtype), *parts])

    images = []
    attributed = []
    for row in rows:
        images.append(ImageRow(row["image_id"], row["file_name"], row["width"], row["height"]))
        attributes = row["objects"].get("attributes", ())
        if len(attributes):
            attributed.append(np.asarray(attributes))
    extra = {}
    if attributed:
        extra["attributes"] = joined("objects", "attributes", np.int64, attributed[0].shape[1])
    if rows and "masks" in rows[0]:
        extra["masks"] = column_of([shape for row in rows for shape in row["masks"]])
    boxes = Boxes(
        offsets_of([len(row["objects"]["id"]) for row in rows]),
        joined("objects", "bbox", np.float64, 4),
        joined("objects", "category", np.int64),
        scores=None,
        area=joined("objects", "area", np.float64),
        iscrowd=joined("objects", "iscrowd", bool),
        ids=joined("objects", "id", np.int64),
        extra=extra,
    )
    relations = Relations(
        offsets_of([len(row["relations"]["subject"]) for row in rows]),
        subject=joined("relations", "subject", np.int64),
        object=joined("relations", "object", np.int64),
        predicate=joined("relations", "predicate", np.int64),
    )
    return images, boxes, relations


def write_rows(rows: Sequence[Mapping], **options) -> DetectionTable:
    """Write rows, in the form of `DetectionTable.row`, by `write_table`.

    If rows have the entry `image`, the encoded bytes of the image, the images are embedded in the table.
    """
    encoded = [row["image"] for row in rows] if rows and "image" in rows[0] else None
    images, boxes, relations = columns_of_rows(rows)
    return write_table(images, boxes, relations, encoded=encoded, **options)
