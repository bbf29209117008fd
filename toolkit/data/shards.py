"""Images left in the Parquet files that they came in: a row group is read when one of its images is asked for.

The name of such an image is `<file>/<row group>/<row in it>`. Processes keep the row groups that they read last, so a
sampler should ask for the images of a row group close together (`blocks_of`, `toolkit.data.sampling.EpochSampler`).
"""

import errno
import functools
import os
from collections.abc import Iterable, Iterator

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from toolkit.data.places import Places, Stored
from toolkit.data.sampling import MIXED_BLOCKS
from toolkit.data.table import DetectionTable


class Shards:
    """A place of images (`toolkit.data.places`): one column of the Parquet files below a folder or URL."""

    remote = False  # many threads would read one row group many times
    prefix = "parquet:"

    def __init__(self, column: str, root: str):
        self.column, self.root = column, root

    @classmethod
    def of_spec(cls, spec: str) -> "Shards":
        """What `str` of it was."""
        return cls(*spec.removeprefix(cls.prefix).split(":", 1))

    def __str__(self) -> str:
        return f"{self.prefix}{self.column}:{self.root}"

    def holds(self, name: str) -> bool:
        return True

    def source(self, name: str) -> Stored:
        return Stored(self, name)

    def escapes(self, name: str) -> bool:
        return False

    def names(self, folder: str) -> Iterator[str]:
        return iter(())

    def watched(self, folders: Iterable[str]) -> list[str]:
        return []

    def read(self, name: str) -> bytes:
        """The encoded image. Raises OSError."""
        file, group, row = name.rsplit("/", 2)
        try:
            images = _row_group(os.getpid(), f"{self.root}/{file}", int(group), self.column)
            data = images[int(row)].as_py()
        except OSError:
            raise
        except Exception as error:  # each file system has exceptions of its own
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
        if data is None:
            raise FileNotFoundError(errno.ENOENT, f"image file not found in {self.root}/{file}: the row has no bytes")
        return data


def open_shard(url: str) -> pq.ParquetFile:
    """A Parquet file by its path or URL."""
    system, path = fsspec.core.url_to_fs(url)
    return pq.ParquetFile(system.open(path, "rb"))


def blocks_of(table: DetectionTable) -> np.ndarray | None:
    """(len,) int64: number of the row group of each image; None where images are not read by row groups."""
    root = table.image_root
    if not isinstance(root, Places) or not isinstance(root.parts[0], Shards):
        return None
    groups = pc.replace_substring_regex(table.rows["file_name"], "/[0-9]+$", "").combine_chunks().dictionary_encode()
    return groups.indices.to_numpy(zero_copy_only=False).astype(np.int64)


@functools.lru_cache(maxsize=MIXED_BLOCKS)
def _row_group(process: int, url: str, group: int, column: str) -> pa.Array:
    """The bytes of the images of a row group. process: forked ones share no open file."""
    with open_shard(url) as file:
        images = file.read_row_group(group, columns=[column]).column(column).combine_chunks()
    return images.field("bytes") if pa.types.is_struct(images.type) else images
