"""Parquet files of the `datasets` library whose images stay where they are: only the other columns are read before."""

import hashlib
import os
from collections.abc import Iterator

import datasets
import fsspec
import numpy as np
from datasets.exceptions import DatasetsError

from toolkit.data.box_formats import BoxFormats
from toolkit.data.checks import settle, validate_document
from toolkit.data.formats.hub import Columns, annotations_of, columns_of, read_hub, unreachable
from toolkit.data.places import Places
from toolkit.data.shards import Shards, open_shard
from toolkit.data.table import TABLE_VERSION, DetectionTable, cache_root, open_table, write_table
from toolkit.errors import BadInput
from toolkit.files import MAX_IMAGE_PIXELS


def open_hub(name: str, split: str, *, streaming: bool = False, **options) -> DetectionTable:
    """A split of a `datasets` data set, copied into the cache, or by `read_shards`."""
    return (read_shards if streaming else read_hub)(name, split, **options)


def read_shards(
    name: str,
    split: str,
    *,
    on_error: str = "raise",
    cache_dir: str | None = None,
    check_images: bool | str = True,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
) -> DetectionTable:
    """As `read_hub`, of a folder or hub data set of Parquet files; the images are read when they are asked for.

    Columns `width` and `height` and class names (ClassLabel) are needed, as no image is looked at before. Memory is
    that for the annotations of a row group, and 8 bytes for each image and box. check_images: has no effect.

    Raises BadInput: as `read_hub`; no Parquet files; one of those columns is missing; an id that is used twice.
    """
    files = _files(name, split)
    root = os.path.commonpath([os.path.dirname(file) for file in files]) if "://" not in files[0] else _shared(files)
    with open_shard(files[0]) as first:
        schema = first.schema_arrow
    features = datasets.Features.from_arrow_schema(schema)
    columns = columns_of(features, name)
    missing = [f"column {key!r}" for key in ("width", "height") if key not in features]
    missing += ["class names (a ClassLabel)"] if columns.class_names is None else []
    if missing:
        raise BadInput(f"{name}: data.streaming needs {' and '.join(missing)}, since images are not read before "
                       "training; leave data.streaming out, or write the data by scripts/convert.py --to "
                       "parquet")  # fmt: skip
    source = f"{name} ({split})"
    cache_file = _cache_file(files, f"{source} {max_image_pixels}", cache_root(cache_dir))
    cached = open_table(cache_file)
    table = cached[0] if cached else _read(files, root, columns, source, max_image_pixels, cache_file)
    table.max_image_pixels = max_image_pixels
    settle(table.problems, on_error if len(table) else "raise", source)
    if not len(table):
        raise BadInput(f"{source}: the split has no images")
    return table


def _files(name: str, split: str) -> list[str]:
    """Paths or URLs of the Parquet files of a split."""
    try:
        found = datasets.load_dataset_builder(name).config.data_files or {}
    except ConnectionError as error:
        raise unreachable(name, error) from error
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise BadInput(f"{name}: cannot be opened: {str(error).splitlines()[0]}") from error
    if split not in found:
        raise BadInput(f"{name}: no split {split!r}; choose from {', '.join(map(str, found)) or 'none'}")
    files = [str(file) for file in found[split]]
    if others := [file for file in files if not file.endswith(".parquet")]:
        raise BadInput(f"{name}: data.streaming reads Parquet files, and {others[0]} is none; leave it out, or write "
                       "the data by scripts/convert.py --to parquet")  # fmt: skip
    return files


def _shared(urls: list[str]) -> str:
    """The URL of the folder that all files are below."""
    return os.path.commonprefix([f"{url.rpartition('/')[0]}/" for url in urls]).rpartition("/")[0]


def _cache_file(files: list[str], what: str, cache) -> os.PathLike:
    digest = hashlib.blake2b(f"shards {TABLE_VERSION} {what}".encode())
    for file in files:
        system, path = fsspec.core.url_to_fs(file)
        info = system.info(path)
        digest.update(f"{file} {info.get('size')} {info.get('mtime')} {info.get('ETag', info.get('etag'))}".encode())
    return cache / "tables" / f"{digest.hexdigest()[:32]}.json"


def _read(
    files: list[str], root: str, columns: Columns, source: str, max_pixels: int, cache_file: os.PathLike
) -> DetectionTable:
    classes = [{"id": label, "name": name} for label, name in enumerate(columns.class_names)]
    one_image = {"images": [{"id": 0, "file_name": "x", "width": 1, "height": 1}], "annotations": []}
    base = validate_document(one_image | {"categories": classes}, source)
    problems, formats, ids = list(base.problems), BoxFormats(), {"image": [], "annotation": []}

    def rows() -> Iterator[dict]:
        for place, entries in _parts(files, root, columns):
            document = _document(place, entries, columns, ids) | {"categories": classes}
            valid = validate_document(document, source, max_pixels, formats)
            problems.extend(problem for problem in valid.problems if problem not in base.problems)
            yield from valid.rows
        if wrong := formats.fault():
            raise BadInput(f"{source}: {wrong}")
        for what, parts in ids.items():
            _check_ids(np.concatenate([part for part in parts if len(part)] or [np.zeros(0)]), what, source)

    return write_table(rows(), cache_file=cache_file, categories=base.categories, problems=problems, name=source,
                       image_root=Places([Shards(columns.image, root)]))  # fmt: skip


def _parts(files: list[str], root: str, columns: Columns) -> Iterator[tuple[str, list[dict]]]:
    """(`<file>/<row group>`, its rows without images) of each row group."""
    for url in files:
        with open_shard(url) as file:
            kept = [key for key in ("image_id", "width", "height", "objects") if key in file.schema_arrow.names]
            for group in range(file.num_row_groups):
                rows = file.read_row_group(group, columns=kept).to_pylist()
                yield f"{url[len(root) + 1 :]}/{group}", rows


def _document(place: str, entries: list[dict], columns: Columns, ids: dict[str, list[np.ndarray]]) -> dict:
    """A row group as a COCO document. ids: all that were used before, to which these are added."""
    before = {what: sum(map(len, parts)) for what, parts in ids.items()}
    images, annotations = [], []
    for row, entry in enumerate(entries):
        image_id = before["image"] + row if entry.get("image_id") is None else entry["image_id"]
        images.append({"id": image_id, "file_name": f"{place}/{row}", "width": entry["width"],
                       "height": entry["height"]})  # fmt: skip
        annotations += annotations_of(entry["objects"], columns, image_id, before["annotation"] + len(annotations) + 1)
    ids["image"].append(np.asarray([image["id"] for image in images]))
    ids["annotation"].append(np.asarray([annotation["id"] for annotation in annotations]))
    return {"images": images, "annotations": annotations}


def _check_ids(ids: np.ndarray, what: str, source: str) -> None:
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        some = ", ".join(map(str, values[counts > 1][:5].tolist()))
        raise BadInput(f"{source}: {int((counts > 1).sum())} {what} ids are used more than once, such as {some}")
