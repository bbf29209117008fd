"""Every data format becomes one Arrow table: memory-mapped, cached, shared by all workers without copies."""

import dataclasses
import functools
import hashlib
import json
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from toolkit.data.places import Places, Stored, open_places
from toolkit.errors import BadInput
from toolkit.files import MAX_IMAGE_PIXELS, write_json
from toolkit.text import shown

TABLE_VERSION = 2  # raise it when the columns or what a reader makes of a file change: older caches are then read anew

OBJECT_TYPES = {
    "id": pa.int64(),
    "bbox": pa.list_(pa.float32(), 4),  # xyxy, absolute pixels of the upright image
    "category": pa.int64(),  # 0-based row of `categories`
    "area": pa.float32(),  # square pixels
    "iscrowd": pa.int8(),
}
ATTRIBUTE_ID = pa.int32()  # of `objects` where the data name attributes: a fixed number for each object
RELATION_TYPES = {"subject": pa.int64(), "object": pa.int64(), "predicate": pa.int64()}  # rows of this image's objects
BATCH_ROWS = 16384
BATCH_BYTES = 64 * 2**20  # of embedded images; keeps the 32-bit offsets of a record batch far from their limit


@dataclass(frozen=True)
class Category:
    """A class: `id` as the annotation file has it, so that predictions can be written in the user's own ids."""

    id: int | str
    name: str


@dataclass(frozen=True)
class Problem:
    """One defect of a data set.

    severity: "error" (the record cannot be used), "warning" (repaired as the message says) or "note".
    file: the image file as the annotation file names it, or the annotation file.
    """

    severity: str
    file: str
    image_id: int | str | None
    annotation_id: int | str | None
    message: str

    def __str__(self) -> str:
        """One line, whatever names and values of the data are in it."""
        ids = []
        if self.image_id is not None:
            ids.append(f"image {shown(self.image_id)}")
        if self.annotation_id is not None:
            ids.append(f"annotation {shown(self.annotation_id)}")
        file = shown(self.file, 300)
        where = f"{file} ({', '.join(ids)})" if ids else file
        return f"{self.severity}: {where}: {shown(self.message, 1000)}"


@dataclass(eq=False)
class DetectionTable:
    """Images with their boxes, one row per image.

    arrow_file: what `datasets.Dataset.from_file` opens too; the table is its first `count` images, or all.
    rows: columns `image_id` (int64 or string), `file_name`, `image` (encoded bytes; only when embedded), `width`,
        `height`, `objects {id, bbox (xyxy float32, absolute), category (0-based), area, iscrowd}` and
        `relations {subject, object, predicate}` (rows of the image's objects and of `predicates`). Where there are
        `attributes`, `objects` has that column too: ids from 1, a fixed number for each object, 0 after the last.
    attributes: names in the order of their ids; none: the data name none, and there is no such column.
    image_root: what `file_name` is relative to (`toolkit.data.places`); None when the images are embedded.
    problems: what validation found and repaired or dropped.
    fingerprint: hash of rows and categories, whatever folder they were read from.
    max_image_pixels: of an image, for `decode_image`.
    """

    arrow_file: Path
    categories: tuple[Category, ...]
    predicates: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    image_root: Path | Places | None = None
    problems: list[Problem] = field(default_factory=list)
    name: str = ""
    fingerprint: str = ""
    max_image_pixels: int = MAX_IMAGE_PIXELS
    count: int | None = None

    @functools.cached_property
    def rows(self) -> pa.Table:
        """Mapped, not read: its memory is the file's, whoever has it open."""
        rows = pa.ipc.open_stream(pa.memory_map(str(self.arrow_file))).read_all()
        return rows.slice(0, self.count)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> dict:
        """One image: the columns of `rows` with `objects` and `relations` as dicts of own (writable) NumPy arrays.

        `bbox` is (N, 4) float32, `area` float32, everything else int64, `attributes` (where there are any) (N, A).
        Raises IndexError outside 0 <= index < len.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a table of {len(self)} images")
        position = bisect_right(self._starts, index) - 1
        return self._batches[position].row(index - self._starts[position])

    def file_name(self, index: int) -> str:
        """Of one image, without reading all of its row. Where images lie in a table, its place there."""
        return self._value("file_name", index)

    def image_name(self, index: int) -> str:
        """One image for people: "street/0001.jpg (id 17)"."""
        return f"{self.file_name(index)} (id {self._value('image_id', index)})"

    def _value(self, column: str, index: int):
        position = bisect_right(self._starts, index) - 1
        return self._batches[position].batch[column][int(index) - self._starts[position]].as_py()

    def image_source(self, row: Mapping) -> Path | Stored | bytes:
        """What `decode_image` takes for a row: the encoded bytes, or where the image file is."""
        return row["image"] if self.image_root is None else self.image_root / row["file_name"]

    def image_ids(self) -> np.ndarray:
        """(len,) int64, or object (str) when the ids are strings."""
        return np.concatenate([batch.image_ids() for batch in self._batches] or [np.zeros(0, np.int64)])

    def sizes_hw(self) -> np.ndarray:
        """(len, 2) int64: height and width in pixels."""
        return np.concatenate([batch.sizes_hw for batch in self._batches] or [np.zeros((0, 2), np.int64)])

    def num_boxes(self) -> np.ndarray:
        """(len,) int64: objects per image, crowd regions included."""
        counts = [np.diff(batch.objects["id"][0]).astype(np.int64) for batch in self._batches]
        return np.concatenate(counts or [np.zeros(0, np.int64)])

    @property
    def class_names(self) -> list[str]:
        return [category.name for category in self.categories]

    def head(self, count: int) -> "DetectionTable":
        """The first `count` images, still memory-mapped."""
        if count >= len(self):
            return self
        return dataclasses.replace(self, count=count, fingerprint=f"{self.fingerprint}-head{count}")

    @functools.cached_property
    def _batches(self) -> list["_Batch"]:
        return [_Batch(batch) for batch in self.rows.to_batches() if batch.num_rows]

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [0, *np.cumsum([batch.num_rows for batch in self._batches]).tolist()[:-1]]

    def __getstate__(self) -> dict:
        """Pickled for a spawned worker without rows and views, which it opens itself."""
        return {key: value for key, value in self.__dict__.items() if key not in ("rows", "_batches", "_starts")}


class _Batch:
    """NumPy views on one Arrow record batch: a row costs a few slices instead of a conversion to Python objects.

    By DLPack: `to_numpy` of pyarrow imports pandas, for which every start would wait.
    """

    def __init__(self, batch: pa.RecordBatch):
        self.num_rows = batch.num_rows
        self.batch = batch
        ids = batch.column("image_id")
        self.int_ids = np.from_dlpack(ids) if pa.types.is_integer(ids.type) else None
        self.sizes_hw = np.stack([np.from_dlpack(batch.column(name)) for name in ("height", "width")], 1)
        self.objects, self.relations = _list_views(batch.column("objects")), _list_views(batch.column("relations"))

    def image_ids(self) -> np.ndarray:
        if self.int_ids is not None:
            return self.int_ids
        return np.array(self.batch.column("image_id").to_pylist(), dtype=object)

    def row(self, index: int) -> dict:
        image_id = int(self.int_ids[index]) if self.int_ids is not None else self.batch["image_id"][index].as_py()
        row = {"image_id": image_id, "file_name": self.batch["file_name"][index].as_py()}
        if "image" in self.batch.schema.names:
            row["image"] = self.batch["image"][index].as_py()
        row["height"], row["width"] = self.sizes_hw[index].tolist()
        row["objects"] = _cut(self.objects, index)
        row["relations"] = _cut(self.relations, index)
        return row


def _list_views(column: pa.StructArray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {column.type.field(i).name: _list_view(column.field(i)) for i in range(column.type.num_fields)}


def _list_view(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """(offsets, values) of a list column as views on the mapped file; lists of A become rows of an (N, A) array."""
    values = column.values
    if isinstance(values, pa.FixedSizeListArray):
        return np.from_dlpack(column.offsets), np.from_dlpack(values.values).reshape(-1, values.type.list_size)
    return np.from_dlpack(column.offsets), np.from_dlpack(values)


def _cut(views: Mapping[str, tuple[np.ndarray, np.ndarray]], index: int) -> dict[str, np.ndarray]:
    cut = {}
    for name, (offsets, values) in views.items():
        part = values[offsets[index] : offsets[index + 1]]
        # astype and copy both give an array of our own: one that a transform may write to, and that maps no file
        cut[name] = part.copy() if part.dtype == np.float32 else part.astype(np.int64)
    return cut


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """`cache_dir`, else $DETECTION_TOOLKIT_CACHE, else ~/.cache/detection-toolkit."""
    chosen = cache_dir or os.environ.get("DETECTION_TOOLKIT_CACHE") or "~/.cache/detection-toolkit"
    return Path(chosen).expanduser()


def write_table(
    rows: Iterable[Mapping],
    *,
    cache_file: Path,
    categories: Sequence[Category],
    predicates: Sequence[str] = (),
    attributes: Sequence[str] = (),
    attribute_columns: int = 0,
    image_root: Path | Places | None = None,
    problems: Sequence[Problem] = (),
    name: str = "",
    checked: Mapping[str, str] | None = None,
) -> DetectionTable:
    """Writes `rows` (dicts with the columns of DetectionTable) and opens them again, memory-mapped.

    Two files: an Arrow stream named after its content, and `cache_file` (JSON: classes, problems, name of the Arrow
    file), which is put in place last and in one step. A reader never meets half a table; of two writers one wins.
    attribute_columns: ids that `objects["attributes"]` has for each object, padding included; needed with `attributes`.
    checked: whatever the caller wants back from `open_table` to decide whether the cache still holds.
    """
    try:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=cache_file.parent, suffix=".tmp")
    except OSError as error:
        raise BadInput(
            f"{cache_file.parent}: cannot be written ({error.strerror}); set DETECTION_TOOLKIT_CACHE to a "
            "folder that can"
        ) from error
    os.close(descriptor)
    try:
        _write_stream(rows, Path(temporary), attribute_columns)
        info = {
            "version": TABLE_VERSION,
            "categories": [[category.id, category.name] for category in categories],
            "predicates": list(predicates),
            "attributes": list(attributes),
            "image_root": _root_as_json(image_root),
            "problems": [dataclasses.astuple(problem) for problem in problems],
            "name": name,
            "checked": dict(checked or {}),
        }
        return _publish(Path(temporary), cache_file, info)
    except OSError as error:
        raise BadInput(
            f"{cache_file.parent}: the table could not be written ({error.strerror or error}); free space "
            "or set DETECTION_TOOLKIT_CACHE to another folder"
        ) from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def write_selection(table: DetectionTable, indices: Sequence[int], cache_file: Path, name: str) -> DetectionTable:
    """Some rows of a table, ascending, as a cached table of their own. Raises BadInput as `write_table`."""
    import datasets  # here: once for a selection, and every start would wait for it

    chosen = np.asarray(indices, dtype=np.int64)
    # with what `datasets` notes about the columns: the fingerprint is of the whole file, and known to earlier runs
    schema = datasets.Dataset.from_file(str(table.arrow_file)).with_format("arrow")[:0].schema
    try:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=cache_file.parent, suffix=".tmp")
        os.close(descriptor)
        with pa.OSFile(temporary, "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            for start, batch in zip(table._starts, table._batches, strict=True):
                inside = chosen[(chosen >= start) & (chosen < start + batch.num_rows)] - start
                if len(inside):
                    writer.write_batch(batch.batch.take(pa.array(inside)).cast(schema))
    except OSError as error:
        raise BadInput(
            f"{cache_file.parent}: cannot be written ({error.strerror}); set DETECTION_TOOLKIT_CACHE to a "
            "folder that can"
        ) from error
    info = {
        "version": TABLE_VERSION, "categories": [[category.id, category.name] for category in table.categories],
        "predicates": list(table.predicates), "attributes": list(table.attributes),
        "image_root": _root_as_json(table.image_root), "problems": [], "name": name,
        "checked": {},
    }  # fmt: skip
    return _publish(Path(temporary), cache_file, info)


def _publish(temporary: Path, cache_file: Path, info: dict) -> DetectionTable:
    names = [info["categories"], info["predicates"], *([info["attributes"]] if info["attributes"] else [])]
    with open(temporary, "rb") as stream:
        digest = hashlib.file_digest(stream, hashlib.blake2b)
    digest.update(json.dumps(names).encode())
    fingerprint = digest.hexdigest()[:32]
    arrow_file = cache_file.with_name(f"{fingerprint}.arrow")
    os.chmod(temporary, 0o644)  # mkstemp makes 0600; a cache may be shared
    os.replace(temporary, arrow_file)
    info |= {"arrow": arrow_file.name, "fingerprint": fingerprint}
    write_json(cache_file, info)
    return _from_info(cache_file, info)


def open_table(cache_file: Path) -> tuple[DetectionTable, dict[str, str]] | None:
    """The cached table and its `checked`, or None when there is none of this version."""
    try:
        info = json.loads(cache_file.read_text())
    except (OSError, ValueError):  # none, or nothing we wrote: the caller reads anew, and says so if it cannot write
        return None
    if info.get("version") != TABLE_VERSION or not cache_file.with_name(info["arrow"]).exists():
        return None
    return _from_info(cache_file, info), info["checked"]


def _from_info(cache_file: Path, info: Mapping) -> DetectionTable:
    return DetectionTable(
        arrow_file=cache_file.with_name(info["arrow"]),
        categories=tuple(Category(*category) for category in info["categories"]),
        predicates=tuple(info["predicates"]),
        attributes=tuple(info["attributes"]),
        image_root=open_places(root) if isinstance(root := info["image_root"], list) else root and Path(root),
        problems=[Problem(*problem) for problem in info["problems"]],
        name=info["name"],
        fingerprint=info["fingerprint"],
    )


def _root_as_json(root: Path | Places | None) -> str | list[str] | None:
    return root.specs() if isinstance(root, Places) else root and str(root)


def _schema(first: Mapping | None, attribute_columns: int) -> pa.Schema:
    string_ids = first is not None and isinstance(first["image_id"], str)
    fields = {"image_id": pa.string() if string_ids else pa.int64(), "file_name": pa.string()}
    if first is not None and "image" in first:
        fields["image"] = pa.binary()
    fields |= {"width": pa.int64(), "height": pa.int64()}
    of_objects = OBJECT_TYPES
    if attribute_columns:
        of_objects = of_objects | {"attributes": pa.list_(ATTRIBUTE_ID, attribute_columns)}
    for name, types in (("objects", of_objects), ("relations", RELATION_TYPES)):
        fields[name] = pa.struct({key: pa.list_(type_) for key, type_ in types.items()})
    return pa.schema(fields)


def _write_stream(rows: Iterable[Mapping], path: Path, attribute_columns: int) -> None:
    rows = iter(rows)
    first = next(rows, None)
    schema = _schema(first, attribute_columns)
    batch, size = [], 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for row in chain([] if first is None else [first], rows):
            batch.append(row)
            size += len(row.get("image") or b"")
            if len(batch) >= BATCH_ROWS or size >= BATCH_BYTES:
                writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
                batch, size = [], 0
        if batch:
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
