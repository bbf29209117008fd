"""Streams images from Parquet files of the `datasets` library; only the other columns are read in advance."""

import os
from collections.abc import Iterator

import datasets
import fsspec
from datasets.exceptions import DatasetsError

from toolkit.data.annotations import Annotations
from toolkit.data.checks import check
from toolkit.data.formats.hub import Columns, add_row, columns_of, numbered, read_hub, unreachable
from toolkit.data.image_sources import ImageSources, Shards, open_shard
from toolkit.data.table import DetectionTable
from toolkit.data.table_cache import cached_table, write_table
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

    Columns `width` and `height` and class names (ClassLabel) are needed, as no image is looked at before.
    check_images: has no effect.

    Raises BadInput: as `read_hub`; no Parquet files; one of those columns is missing.
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
    return cached_table(
        ["shards", source, *map(_state, files)],
        lambda cache_file: _read(files, root, columns, source, max_image_pixels, cache_file),
        name=source, cache_dir=cache_dir, on_error=on_error, max_image_pixels=max_image_pixels,
        empty="the split has no images",
    )  # fmt: skip


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


def _state(file: str) -> str:
    """What changes when a file does."""
    system, path = fsspec.core.url_to_fs(file)
    info = system.info(path)
    return f"{file} {info.get('size')} {info.get('mtime')} {info.get('ETag', info.get('etag'))}"


def _read(
    files: list[str], root: str, columns: Columns, source: str, max_pixels: int, cache_file: os.PathLike
) -> DetectionTable:
    found = Annotations(numbered(columns.class_names))
    for place, rows in _parts(files, root, columns):
        for number, row in enumerate(rows):
            add_row(found, row, f"{place}/{number}", columns)
    good = check(found, source, max_pixels)
    return write_table(
        good.images, good.boxes, cache_file=cache_file, categories=good.categories, problems=good.problems,
        name=source, image_root=ImageSources([Shards(columns.image, root)]),
    )  # fmt: skip


def _parts(files: list[str], root: str, columns: Columns) -> Iterator[tuple[str, list[dict]]]:
    """(`<file>/<row group>`, its rows without images) of each row group."""
    for url in files:
        with open_shard(url) as file:
            kept = [key for key in ("image_id", "width", "height", "objects") if key in file.schema_arrow.names]
            for group in range(file.num_row_groups):
                rows = file.read_row_group(group, columns=kept).to_pylist()
                yield f"{url[len(root) + 1 :]}/{group}", rows
