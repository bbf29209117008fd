"""The columns of a table, and the Arrow files of the cache that they are written to once and read from.

Files are not memory-mapped while a table is used: the kernel ends a process that reads a mapped file beyond its end
(SIGBUS), without a message, and another program may cut the file during a run of days. Embedded images and masks stay
in the file: columns hold where.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from toolkit.base.boxes import Boxes, Relations, offsets_of
from toolkit.base.errors import BadInput
from toolkit.base.masks import to_bytes
from toolkit.data.annotations import ImageRow

TEXT = np.dtypes.StringDType()  # in one piece of memory: of Python's texts, forked workers would copy what they read
OBJECT_TYPES = {
    "id": pa.int64(),
    "bbox": pa.list_(pa.float32(), 4),  # xyxy, absolute pixels of the upright image
    "category": pa.int64(),  # 0-based row of `categories`
    "area": pa.float32(),  # square pixels
    "iscrowd": pa.int8(),
}
ATTRIBUTE_ID = pa.int32()  # of `objects` where the data name attributes: a fixed number for each object
RELATION_TYPES = {"subject": pa.int64(), "object": pa.int64(), "predicate": pa.int64()}  # rows of this image's objects
ON_DISK = ("image", "masks")  # columns of bytes that are read image by image
BATCH_ROWS = 16384
BATCH_BYTES = 64 * 2**20  # of embedded images; keeps the 32-bit offsets of a record batch far from their limit


class Columns(NamedTuple):
    """I images, their boxes and their relations.

    images: arrays (I, ...) by name: `image_id` (int64, or `TEXT`), `file_name` (`TEXT`) and `size_hw` (I, 2) int64. If
        images are embedded, `image` (I, 3) int64 says where the bytes of each are: number of the file, first byte,
        count of bytes. With masks, `masks` (I, 3) does so for those of all objects of an image. Joined tables have
        `set`, tables of tiles `tile` and `picture` (`toolkit.data.joining`, `toolkit.data.tile_table`).
    boxes: `xyxy` and `area` are float32, as they are stored. With masks `extra["stored_mask"]` is the position of each
        object's mask among those that are stored for its image.
    """

    images: Mapping[str, np.ndarray]
    boxes: Boxes
    relations: Relations

    def arrays(self) -> Iterator[np.ndarray]:
        """Yield every column."""
        for group in (self.images, vars(self.boxes), self.boxes.extra, vars(self.relations)):
            for column in group.values():
                if isinstance(column, np.ndarray):
                    yield column

    def select(self, rows: np.ndarray) -> "Columns":
        """Return the images of a bool mask (I,) or of positions in any order, with their boxes and relations."""
        images = {name: column[rows] for name, column in self.images.items()}
        return Columns(images, self.boxes.of_images(rows), self.relations.of_images(rows))


class StoredFile:
    """A file of which some bytes are read. It stays open, so that they can be read when its name is gone."""

    def __init__(self, path: Path, file: BinaryIO | None = None):
        self.path = path
        self._file = file

    def read(self, start: int, size: int) -> bytes | None:
        """Return `size` bytes from the byte `start` on; None if the file is gone, or ends before."""
        if self._file is None:
            try:
                self._file = open(self.path, "rb")  # noqa: SIM115 - as long as the table
            except FileNotFoundError:
                return None
        # Not `seek` and `read`: threads and forked workers share the position of an open file.
        content = os.pread(self._file.fileno(), size, start)
        return content if len(content) == size else None

    def __reduce__(self):
        return StoredFile, (self.path,)


def changed_file(arrow_file: Path, what: str = "") -> str:
    """Return the message that another program changed the file of a cached table. what: the part that was read."""
    part = f" ({what})" if what else ""
    return (
        f"{arrow_file}: the cached table was changed, cut or removed by another program after it was opened{part}; "
        "start again (--run.resume latest), and it is made anew from the data"
    )


def read_columns(arrow_file: Path) -> tuple[Columns, tuple[StoredFile, ...]]:
    """Read an Arrow file of the cache; return its columns, and the file itself if it holds images or masks.

    Raises BadInput: the file is gone, or was changed.
    """
    try:
        with open(arrow_file, "rb") as file:
            names = pa.ipc.open_stream(file).schema.names
        has_stored = bool(set(names) & set(ON_DISK))
        # Mapped only for the moment of copying, so that embedded images and masks need not be read.
        content = pa.memory_map(str(arrow_file)).read_buffer() if has_stored else pa.py_buffer(arrow_file.read_bytes())
        reader = pa.ipc.open_stream(content)
        batches = list(reader) or [_empty_batch(reader.schema)]
        parts = [_arrays_of(batch, content) for batch in batches]
        stored = (StoredFile(arrow_file, open(arrow_file, "rb")),) if has_stored else ()  # noqa: SIM115 - as long as the table
    except MemoryError:  # Arrow's is an ArrowException too
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadInput(changed_file(arrow_file)) from error
    arrays = {}
    for name in parts[0]:
        arrays[name] = np.concatenate([part[name] for part in parts])
    return _columns_of(arrays), stored


def _empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    columns = [pa.nulls(0, field.type) for field in schema]  # `pa.array` and `empty_table` import pandas, which is slow
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _columns_of(arrays: Mapping[str, np.ndarray]) -> Columns:
    """Return arrays with the names of `_arrays_of` as columns."""
    images = {name: arrays[name] for name in ("image_id", "file_name", *ON_DISK) if name in arrays}
    images["size_hw"] = np.stack([arrays["height"], arrays["width"]], 1)
    offsets = offsets_of(arrays["objects"])
    extra = {}
    if "objects.attributes" in arrays:
        extra["attributes"] = arrays["objects.attributes"].astype(np.int64)
    if "masks" in images:
        first_of_image = np.repeat(offsets[:-1], np.diff(offsets))
        extra["stored_mask"] = np.arange(offsets[-1]) - first_of_image
    boxes = Boxes(
        offsets,
        arrays["objects.bbox"],
        arrays["objects.category"],
        scores=None,
        area=arrays["objects.area"],
        iscrowd=arrays["objects.iscrowd"] > 0,
        ids=arrays["objects.id"],
        extra=extra,
    )
    ends = {name: arrays[f"relations.{name}"] for name in RELATION_TYPES}
    return Columns(images, boxes, Relations(offsets_of(arrays["relations"]), **ends))


def _arrays_of(batch: pa.RecordBatch, content: pa.Buffer) -> dict[str, np.ndarray]:
    """Return the columns of a record batch of a file, by name.

    Of a group of lists, "objects" has the length of the list of each image; "objects.bbox" and so on have the values of
    all lists. Columns of bytes become their places in the file, as of `Columns`.

    content: of the whole file.

    Raises ValueError or a pa.ArrowException: the batch is damaged.
    """
    rows = batch.select([name for name in batch.schema.names if name not in ON_DISK])
    rows.validate(full=True)  # a changed offset would be read outside of the memory
    arrays = {}
    # By DLPack: `to_numpy` of pyarrow imports pandas, for which every start would wait.
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name in ON_DISK:
            arrays[name] = _places_of(column, content)
        elif pa.types.is_struct(column.type):
            for field in column.type:
                lists = column.field(field.name)
                arrays[f"{name}.{field.name}"] = _values_of(lists)
            arrays[name] = np.diff(np.from_dlpack(lists.offsets))  # the same for all fields
        elif pa.types.is_string(column.type):
            arrays[name] = np.array(column.to_pylist(), TEXT)
        else:
            arrays[name] = np.from_dlpack(column)
    return arrays


def _values_of(lists: pa.ListArray) -> np.ndarray:
    """Return the values of all lists, one after the other; values of A numbers as (N, A)."""
    values = lists.values
    if isinstance(values, pa.FixedSizeListArray):
        return np.from_dlpack(values.values).reshape(-1, values.type.list_size)
    return np.from_dlpack(values)


def _places_of(column: pa.BinaryArray, content: pa.Buffer) -> np.ndarray:
    """Return where the values of a column of bytes are in a file with this content, (rows, 3) as in `Columns`.

    Raises ValueError: they lie outside the file.
    """
    if not len(column):
        return np.zeros((0, 3), np.int64)
    _, offsets, values = column.buffers()
    offsets = np.frombuffer(offsets, np.int32, len(column) + 1).astype(np.int64)
    starts = offsets[:-1] + values.address - content.address
    sizes = np.diff(offsets)
    if (sizes < 0).any() or (starts < 0).any() or (starts + sizes > content.size).any():
        raise ValueError("the values of a column of bytes lie outside the file")
    return np.stack([np.zeros_like(starts), starts, sizes], axis=1)


def write_columns(
    images: Sequence[ImageRow], boxes: Boxes, relations: Relations, encoded: Iterable[bytes] | None, path: Path
) -> None:
    """Write an Arrow file; the arguments are those of `toolkit.data.table_cache.write_table`."""
    schema = _schema_of(images, boxes, embedded=encoded is not None)
    encoded = iter(encoded) if encoded is not None else None
    batches = _record_batches(schema, images, boxes, relations, encoded)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _schema_of(images: Sequence[ImageRow], boxes: Boxes, *, embedded: bool) -> pa.Schema:
    has_text_ids = bool(images) and isinstance(images[0].image_id, str)
    fields = {"image_id": pa.string() if has_text_ids else pa.int64()}
    fields["file_name"] = pa.string()
    if embedded:
        fields["image"] = pa.binary()
    fields["width"] = pa.int64()
    fields["height"] = pa.int64()
    of_objects = dict(OBJECT_TYPES)
    if "attributes" in boxes.extra:
        of_objects["attributes"] = pa.list_(ATTRIBUTE_ID, boxes.extra["attributes"].shape[1])
    groups = {"objects": of_objects, "relations": RELATION_TYPES}
    for name, types in groups.items():
        lists = {key: pa.list_(type_) for key, type_ in types.items()}
        fields[name] = pa.struct(lists)
    if "masks" in boxes.extra:
        fields["masks"] = pa.binary()
    return pa.schema(fields)


def _record_batches(
    schema: pa.Schema,
    images: Sequence[ImageRow],
    boxes: Boxes,
    relations: Relations,
    encoded: Iterator[bytes] | None,
) -> Iterator[pa.RecordBatch]:
    objects = {
        "id": boxes.ids,
        "bbox": boxes.xyxy,
        "category": boxes.labels,
        "area": boxes.area,
        "iscrowd": boxes.iscrowd,
        "attributes": boxes.extra.get("attributes"),
    }
    ends = {name: getattr(relations, name) for name in RELATION_TYPES}
    stored = {}  # columns of bytes, row by row
    if encoded is not None:
        stored["image"] = encoded
    if "masks" in boxes.extra:
        stored["masks"] = _masks_of_images(boxes)
    of_rows = zip(*stored.values(), strict=True)
    start = 0
    while start < len(images):
        held = _some(of_rows) if stored else []
        count = len(held) if stored else BATCH_ROWS
        stop = min(start + count, len(images))
        rows = images[start:stop]
        batch = {}
        for name in ImageRow._fields:
            batch[name] = [getattr(row, name) for row in rows]
        for position, name in enumerate(stored):
            batch[name] = [values[position] for values in held]
        of_boxes = boxes.offsets[start : stop + 1]
        of_relations = relations.offsets[start : stop + 1]
        batch["objects"] = _lists(schema.field("objects").type, of_boxes, objects)
        batch["relations"] = _lists(schema.field("relations").type, of_relations, ends)
        arrays = [pa.array(batch[column.name], column.type) for column in schema]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        start = stop


def _masks_of_images(boxes: Boxes) -> Iterator[bytes]:
    """Yield the stored form of the masks of each image."""
    shapes = boxes.extra["masks"]
    for index in range(boxes.num_images):
        yield to_bytes(shapes[boxes.of_image(index)].tolist())


def _some(of_rows: Iterator[tuple[bytes, ...]]) -> list[tuple[bytes, ...]]:
    """Return the next images and masks of one record batch."""
    held = []
    size = 0
    for values in of_rows:
        held.append(values)
        size += sum(map(len, values))
        if len(held) >= BATCH_ROWS or size >= BATCH_BYTES:
            break
    return held


def _lists(struct: pa.StructType, offsets: np.ndarray, columns: Mapping[str, np.ndarray]) -> pa.StructArray:
    """Return rows offsets[0]:offsets[-1] of the columns, as lists of each image."""
    rows = slice(int(offsets[0]), int(offsets[-1]))
    within = pa.array(offsets - offsets[0], pa.int32())
    lists = []
    for struct_field in struct:
        values = columns[struct_field.name][rows]
        kind = struct_field.type.value_type
        if pa.types.is_fixed_size_list(kind):
            flat = values.astype(kind.value_type.to_pandas_dtype()).reshape(-1)
            inner = pa.FixedSizeListArray.from_arrays(pa.array(flat, kind.value_type), type=kind)
        else:
            inner = pa.array(values.astype(kind.to_pandas_dtype()), kind)
        lists.append(pa.ListArray.from_arrays(within, inner, type=struct_field.type))
    return pa.StructArray.from_arrays(lists, fields=list(struct))
