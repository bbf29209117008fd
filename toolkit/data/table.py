"""The table that every data format becomes: cached as Arrow, held in memory; embedded images and masks stay on disk.

The table is not memory-mapped: the kernel ends a process that reads a mapped file beyond its end (SIGBUS), without a
message, and another program may cut the file during a run of days. Forked workers share the memory without copies.
"""

import dataclasses
import functools
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from torch import Tensor

from toolkit.base.boxes import Boxes, Relations, offsets_of
from toolkit.base.errors import BadInput
from toolkit.base.files import MAX_IMAGE_PIXELS
from toolkit.base.masks import Shape, column_of, from_bytes
from toolkit.base.text import shown
from toolkit.data.annotations import ImageRow
from toolkit.data.decoding import ImageError, decode_image, decode_reduced
from toolkit.data.image_sources import ImageSources, Stored

OBJECT_TYPES = {
    "id": pa.int64(),
    "bbox": pa.list_(pa.float32(), 4),  # xyxy, absolute pixels of the upright image
    "category": pa.int64(),  # 0-based row of `categories`
    "area": pa.float32(),  # square pixels
    "iscrowd": pa.int8(),
}
ATTRIBUTE_ID = pa.int32()  # of `objects` where the data name attributes: a fixed number for each object
ON_DISK = ("image", "masks")  # columns that are read row by row
RELATION_TYPES = {"subject": pa.int64(), "object": pa.int64(), "predicate": pa.int64()}  # rows of this image's objects


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
        """Return one line, whatever names and values of the data are in it."""
        given = {"image": self.image_id, "annotation": self.annotation_id}
        ids = [f"{name} {shown(id_)}" for name, id_ in given.items() if id_ is not None]
        where = shown(self.file, 300)
        if ids:
            where += f" ({', '.join(ids)})"
        return f"{self.severity}: {where}: {shown(self.message, 1000)}"


@dataclass(frozen=True)
class JoinedSet:
    """One of the data sets that a table joins.

    classes: the rows of `categories` that this set labels; in its images objects of other classes are not annotated.
    """

    name: str
    classes: tuple[int, ...]


@dataclass(frozen=True)
class LabelledImages:
    """Images with their boxes, annotated or found, as columns: the input of the writer of a format.

    boxes, relations: of the images, in their order; labels are rows of `categories`, and the column `predicate` has
    rows of `predicates`. With `attributes`, `boxes.extra["attributes"]` has their ids from 1, padded with 0. If masks
    were read, `boxes.extra["masks"]` has them.
    """

    images: Sequence[ImageRow]
    boxes: Boxes
    categories: Sequence[Category]
    relations: Relations | None = None
    predicates: Sequence[str] = ()
    attributes: Sequence[str] = ()

    def renamed(self, file_names: Sequence[str]) -> "LabelledImages":
        """Return a copy with other names of the image files, one for each image."""
        images = [row._replace(file_name=name) for row, name in zip(self.images, file_names, strict=True)]
        return dataclasses.replace(self, images=images)

    def masks_by_image(self) -> Iterator[list[Shape]]:
        """Yield the masks of the boxes of every image; None for each if masks were not read."""
        shapes = self.boxes.extra.get("masks", np.full(len(self.boxes), None))
        for index in range(len(self.images)):
            yield shapes[self.boxes.of_image(index)].tolist()

    def by_image(self) -> Iterator[tuple[ImageRow, list[tuple[int, list[float], float | None, bool]]]]:
        """Yield every image with the label, xyxy, score (None: annotated) and crowd flag of each of its boxes."""
        boxes = self.boxes
        for index, row in enumerate(self.images):
            part = boxes.of_image(index)
            labels = boxes.labels[part].tolist()
            xyxy = boxes.xyxy[part].tolist()
            scores = [None] * len(labels) if boxes.scores is None else boxes.scores[part].tolist()
            iscrowd = boxes.iscrowd[part].tolist()
            yield row, list(zip(labels, xyxy, scores, iscrowd, strict=True))


@dataclass(eq=False)
class DetectionTable:
    """Images with their boxes, one row per image.

    arrow_file: an Arrow stream, which `datasets.Dataset.from_file` opens too; the table is its first `count` images,
        or all.
    rows: columns `image_id` (int64 or string), `file_name`, `width`, `height`,
        `objects {id, bbox (xyxy float32, absolute), category (0-based), area, iscrowd}` and
        `relations {subject, object, predicate}` (rows of the image's objects and of `predicates`). With `attributes`,
        `objects` has the column `attributes` too: ids from 1, a fixed number for each object, padded with 0.
    attributes: names in the order of their ids; empty: the data have no attributes.
    image_root: the root of `file_name` (`toolkit.data.image_sources`); None when the images are embedded.
    problems: the defects that validation found, and repaired or dropped.
    fingerprint: hash of rows and categories, whatever folder they were read from.
    max_image_pixels, white: for `decode_image`.
    sets: the data sets that the table joins (`toolkit.data.joining`); `rows` then has a column `set`. Empty for
        a table that was read from a single data set.
    class_map: the setting `data.classes` that made the classes (`toolkit.data.classes`); empty: they are those of the
        data.
    has_masks: whether the data were read with the masks of objects.
    """

    arrow_file: Path
    categories: tuple[Category, ...]
    predicates: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    image_root: Path | ImageSources | None = None
    problems: list[Problem] = field(default_factory=list)
    name: str = ""
    fingerprint: str = ""
    max_image_pixels: int = MAX_IMAGE_PIXELS
    white: int | None = None
    count: int | None = None
    sets: tuple[JoinedSet, ...] = ()
    class_map: Mapping[str, str | None] = field(default_factory=dict)
    has_masks: bool = False

    @functools.cached_property
    def rows(self) -> pa.Table:
        """All columns but `image` and `masks`, in memory. Raises BadInput if the Arrow file is gone or was changed."""
        everything, _ = self._content
        return everything.slice(0, self.count)

    @functools.cached_property
    def _content(self) -> tuple[pa.Table, dict[str, "_StoredColumn"]]:
        """The columns in memory, and those of `ON_DISK` that the table has, by name."""
        has_stored = self.image_root is None or self.has_masks
        # Mapped only for the moment of copying, so that embedded images and masks need not be read.
        open_file = pa.memory_map if has_stored else pa.OSFile
        try:
            file = open_file(str(self.arrow_file))
        except FileNotFoundError as error:
            raise BadInput(_changed(self.arrow_file)) from error
        with file:
            content = file.read_buffer()
            try:
                if has_stored:
                    return _without_stored(self.arrow_file, content)
                return _read_all(content), {}
            except MemoryError:  # Arrow's is an ArrowException too
                raise
            except (pa.ArrowException, OSError, ValueError) as error:
                raise BadInput(_changed(self.arrow_file)) from error

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> dict:
        """Return one image: the columns of `rows`, and `image`, its encoded bytes, if images are embedded.

        With masks, `masks` is the list of the `toolkit.base.masks.Shape` of its objects.

        `objects` and `relations` are dicts of own (writable) NumPy arrays. `bbox` is (N, 4) float32, `area` float32,
        everything else int64; `attributes` is (N, A), if the data have attributes. Raises IndexError outside 0 <= index
        < len, and BadInput for an embedded image that the file no longer has.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a table of {len(self)} images")
        position = bisect_right(self._starts, index) - 1
        row = self._batches[position].row(index - self._starts[position])
        _, stored = self._content
        if "image" in stored:
            row["image"] = self._read_stored("image", index)
        if self.has_masks:
            row["masks"] = self.masks_of(index)
        return row

    def masks_of(self, index: int) -> list[Shape]:
        """Return the masks of the objects of one image, in the order of the objects.

        Raises BadInput if the file no longer has them.
        """
        content = self._read_stored("masks", index)
        try:
            return from_bytes(content)
        except ValueError as error:
            raise BadInput(_changed(self.arrow_file, f"the masks of {self.image_name(index)}")) from error

    def _read_stored(self, column: str, index: int) -> bytes:
        """Return the value of one image in a column of `ON_DISK`. Raises BadInput if the file ends before."""
        _, stored = self._content
        content = stored[column].read(index)
        if content is None:
            raise BadInput(_changed(self.arrow_file, f"{column} of {self.image_name(index)}"))
        return content

    def file_name(self, index: int) -> str:
        """Return the file name of one image, without reading its whole row.

        For an embedded image this is a text with its position in the source.
        """
        return self.rows["file_name"][int(index)].as_py()

    def image_name(self, index: int) -> str:
        """Return one image's name for messages: "street/0001.jpg (id 17)"."""
        image_id = self.rows["image_id"][int(index)].as_py()
        return f"{self.file_name(index)} (id {image_id})"

    def image_source(self, row: Mapping) -> Path | Stored | bytes:
        """Return the input of `decode_image` for a row: the encoded bytes, or the place of the image file."""
        if self.image_root is None:
            return row["image"]
        return self.image_root / row["file_name"]

    def decode_image(self, row: Mapping, least_hw: tuple[int, int] | None = None) -> Tensor:
        """Decode the image of a row, uint8 (3, H, W).

        least_hw: as for `decode_reduced`, whose result may be smaller than the row says; None: decode the whole image.

        Raises ImageError if the image cannot be decoded, or if it does not have the size in the row: then another
        picture has replaced the annotated one, and the boxes do not fit it.
        """
        source = self.image_source(row)
        if least_hw is None:
            image = decode_image(source, self.max_image_pixels, self.white)
            height, width = image.shape[-2:]
        else:
            image, (height, width) = decode_reduced(source, least_hw, self.max_image_pixels, self.white)
        if (height, width) != (row["height"], row["width"]):
            reason = (
                f"the picture has {width} x {height} pixels (width x height), but {row['width']} x {row['height']} by "
                "the annotations that were read, whose boxes would lie in other places. Put back the picture that was "
                "annotated, or correct the annotations and start again; check_data.py lists all such pictures"
            )
            raise ImageError(reason, None if isinstance(source, bytes) else source)
        return image

    def image_ids(self) -> np.ndarray:
        """Return (len,) int64, or object (str) if the ids are strings."""
        return np.concatenate([batch.image_ids() for batch in self._batches])

    def sizes_hw(self) -> np.ndarray:
        """Return (len, 2) int64: height and width in pixels."""
        return np.concatenate([batch.sizes_hw for batch in self._batches])

    def num_boxes(self) -> np.ndarray:
        """Return (len,) int64: objects per image, crowd regions included."""
        counts = []
        for batch in self._batches:
            offsets, _ = batch.objects["id"]
            counts.append(np.diff(offsets))
        return np.concatenate(counts).astype(np.int64)

    def num_objects(self) -> np.ndarray:
        """Return (len,) int64: objects per image, without crowd regions."""
        counts = []
        for batch in self._batches:
            offsets, is_crowd = batch.objects["iscrowd"]
            objects_before = offsets_of(is_crowd == 0)  # of each row of the batch
            counts.append(np.diff(objects_before[offsets]))
        return np.concatenate(counts).astype(np.int64)

    def described_boxes(self) -> str:
        """Return the number of boxes as text, in which crowd regions are named apart: "90 boxes, 10 crowd regions"."""
        objects = int(self.num_objects().sum())
        crowds = int(self.num_boxes().sum()) - objects
        regions = f", {crowds} crowd regions" if crowds else ""
        return f"{objects} boxes{regions}"

    def set_of_image(self) -> np.ndarray:
        """Return (len,) int64: the row of `sets` that each image belongs to; zeros without sets."""
        if not self.sets:
            return np.zeros(len(self), np.int64)
        return np.concatenate([batch.set_of_image for batch in self._batches])

    @functools.cached_property
    def labelled_classes(self) -> np.ndarray | None:
        """The classes that each set labels, (sets, classes) bool; None if all sets label all."""
        rows = []
        for one in self.sets:
            rows.append([label in one.classes for label in range(len(self.categories))])
        mask = np.array(rows, bool)
        return None if mask.all() else mask

    def boxes(self, masks: bool = False) -> Boxes:
        """Return all annotated boxes as columns, in the order of the images.

        masks: read the masks of all objects too, into the column `masks` of `extra`, an object array (N,) of
            `toolkit.base.masks.Shape`.
        """
        extra = {}
        if masks:
            shapes = []
            for index in range(len(self)):
                shapes += self.masks_of(index)
            extra["masks"] = column_of(shapes)
        offsets, flat = _join_views([batch.objects for batch in self._batches])
        if self.attributes:
            extra["attributes"] = flat["attributes"]
        return Boxes(
            offsets,
            flat["bbox"].astype(np.float64),
            flat["category"],
            scores=None,
            area=flat["area"].astype(np.float64),
            iscrowd=flat["iscrowd"] > 0,
            ids=flat["id"],
            extra=extra,
        )

    def relations(self) -> Relations:
        """Return all annotated relations as columns, in the order of the images."""
        offsets, ends = _join_views([batch.relations for batch in self._batches])
        return Relations(offsets, **ends)

    def labelled(self) -> LabelledImages:
        """Return all that the table holds except the images themselves, as columns."""
        return LabelledImages(
            images=self.image_rows(),
            boxes=self.boxes(masks=self.has_masks),
            categories=self.categories,
            relations=self.relations(),
            predicates=self.predicates,
            attributes=self.attributes,
        )

    def image_rows(self) -> list[ImageRow]:
        """Return id, file name and size of every image."""
        columns = (self.rows.column(name).to_pylist() for name in ImageRow._fields)
        return [ImageRow(*row) for row in zip(*columns, strict=True)]

    @functools.cached_property
    def identity(self) -> dict[str, str | int | dict]:
        """JSON values that describe this table, for a later `changed_since` of another table."""
        identity = {
            "fingerprint": self.fingerprint,
            "file": self.arrow_file.name,
            "images": len(self),
            "boxes": int(self.num_objects().sum()),
        }
        if self.class_map:
            identity["classes"] = dict(self.class_map)
        return identity

    def as_stored(self) -> "DetectionTable":
        """Return the table as its Arrow file has it; of a view, the table that is viewed."""
        return self

    def changed_since(self, before: Mapping) -> str:
        """Describe how this table differs from an earlier one; return "" if the two do not differ.

        before: the `identity` of the earlier table. If the file of the earlier table is still in the cache, the text
        has the numbers of images that are gone, new or changed, else only the numbers of images and boxes.
        """
        if before["fingerprint"] == self.fingerprint:
            return ""
        now = self.identity
        earlier = self.arrow_file.parent / str(before["file"])
        counts = "{images:,} images with {boxes:,} boxes"
        counts = f"{counts.format(**before)} then, {counts.format(**now)} now"
        map_before = before.get("classes", {})
        if map_before != self.class_map:
            counts += f"; data.classes was {_in_braces(map_before)}, and is {_in_braces(self.class_map)}"
        if not earlier.is_file():
            return counts
        old_table = DetectionTable(earlier, (), count=before["images"])
        old = old_table.annotations_by_image()
        new = self.as_stored().annotations_by_image()
        common = old.keys() & new.keys()
        parts = {
            "gone": old_table.names_of(old.keys() - common),
            "new": self.names_of(new.keys() - common),
            "with other boxes or labels": self.names_of(key for key in common if old[key] != new[key]),
        }
        changes = [f"{len(names):,} {what} ({_some(names)})" for what, names in parts.items() if names]
        if not changes and map_before != self.class_map:
            return counts
        what = f"of the images {', '.join(changes)}" if changes else "other names, sizes, masks or relations"
        return f"{counts}; {what}"

    def names_of(self, image_ids: Iterable[int | str]) -> list[str]:
        """Return the names of the images of these ids, in the order of the table."""
        wanted = set(image_ids)
        return [self.image_name(row) for row, key in enumerate(self.image_ids().tolist()) if key in wanted]

    def annotations_by_image(self) -> dict[int | str, bytes]:
        """Return the boxes, labels and crowd flags of every image as bytes, by image id, to be compared."""
        boxes = self.boxes()
        parts = [boxes.xyxy, boxes.labels[:, None], boxes.iscrowd[:, None]]
        columns = np.concatenate(parts, axis=1)
        of_images = np.split(columns, boxes.offsets[1:-1])
        image_ids = self.image_ids().tolist()
        return {image_id: rows.tobytes() for image_id, rows in zip(image_ids, of_images, strict=True)}

    @property
    def class_names(self) -> list[str]:
        return [category.name for category in self.categories]

    def head(self, count: int) -> "DetectionTable":
        """Return a table of the first `count` images."""
        if count >= len(self):
            return self
        return dataclasses.replace(self, count=count, fingerprint=f"{self.fingerprint}-head{count}")

    @functools.cached_property
    def _batches(self) -> list["_Batch"]:
        batches = [batch for batch in self.rows.to_batches() if batch.num_rows]
        if not batches:
            batches = [pa.RecordBatch.from_pylist([], self.rows.schema)]
        return [_Batch(batch) for batch in batches]

    @functools.cached_property
    def _starts(self) -> list[int]:
        ends = np.cumsum([batch.num_rows for batch in self._batches]).tolist()
        return [0, *ends[:-1]]

    def __getstate__(self) -> dict:
        """Return the state without rows and views; a spawned worker opens these itself."""
        opened = ("rows", "_content", "_batches", "_starts")
        return {key: value for key, value in self.__dict__.items() if key not in opened}


class _StoredColumn:
    """The values of a column of bytes in an Arrow file, read one by one where they stand in it.

    starts, sizes: (N,) int64, in bytes. The file stays open, so that it can be read when its name is gone.
    """

    def __init__(self, path: Path, starts: np.ndarray, sizes: np.ndarray):
        self.starts = starts
        self.sizes = sizes
        self.file = open(path, "rb")  # noqa: SIM115 - as long as the table

    def read(self, index: int) -> bytes | None:
        """Return the value of one row; None if the file ends before."""
        size = int(self.sizes[index])
        # Not `seek` and `read`: threads and forked workers share the position of an open file.
        content = os.pread(self.file.fileno(), size, int(self.starts[index]))
        return content if len(content) == size else None


def _read_all(content: pa.Buffer) -> pa.Table:
    """Read the rows of an Arrow stream, which stay in the memory of the buffer."""
    rows = pa.ipc.open_stream(content).read_all()
    rows.validate(full=True)  # a changed offset would be read outside of the memory
    return rows


def _without_stored(arrow_file: Path, content: pa.Buffer) -> tuple[pa.Table, dict[str, _StoredColumn]]:
    """Copy the rows of a file without the columns `ON_DISK` to memory; return them, and those columns by name.

    content: of the whole file, mapped.

    Raises ValueError: values lie outside the file.
    """
    reader = pa.ipc.open_stream(content)
    others = [name for name in reader.schema.names if name not in ON_DISK]
    places = {name: [np.zeros((2, 0), np.int64)] for name in reader.schema.names if name in ON_DISK}
    schema = pa.schema([reader.schema.field(name) for name in others])
    copy = pa.BufferOutputStream()
    with pa.ipc.new_stream(copy, schema) as writer:
        for batch in reader:
            rows = batch.select(others)
            rows.validate(full=True)  # a changed offset would be read outside of the memory
            writer.write_batch(rows)
            if not batch.num_rows:
                continue
            for name, of_column in places.items():
                _, offsets, values = batch.column(name).buffers()
                offsets = np.frombuffer(offsets, np.int32, batch.num_rows + 1).astype(np.int64)
                place = values.address - content.address  # of the batch's values in the file
                of_column.append(np.stack([offsets[:-1] + place, np.diff(offsets)]))
    stored = {}
    for name, of_column in places.items():
        starts, sizes = np.concatenate(of_column, axis=1)
        if (sizes < 0).any() or (starts < 0).any() or (starts + sizes > content.size).any():
            raise ValueError(f"the values of {name} lie outside the file")
        stored[name] = _StoredColumn(arrow_file, starts, sizes)
    return _read_all(copy.getvalue()), stored


def _some(names: Sequence[str]) -> str:
    """Return the first names, and "..." for further ones."""
    return ", ".join([*names[:3], *["..."] * (len(names) > 3)])


def _in_braces(class_map: Mapping[str, str | None]) -> str:
    """Return a class map as it is written in a settings file, such as {car: vehicle, tree: null}."""
    entries = []
    for old, new in class_map.items():
        entries.append(f"{shown(old)}: {'null' if new is None else shown(new)}")
    return "{" + ", ".join(entries) + "}"


def _changed(arrow_file: Path, what: str = "") -> str:
    """Return a sentence on a table that is no longer what was written; what: the part that was read."""
    part = f" ({what})" if what else ""
    return (
        f"{arrow_file}: the cached table was changed, cut or removed by another program after it was opened{part}; "
        "start again (--run.resume latest), and it is made anew from the data"
    )


Views = Mapping[str, tuple[np.ndarray, np.ndarray]]


class _Batch:
    """NumPy views on one Arrow record batch: a row costs a few slices instead of a conversion to Python objects.

    By DLPack: `to_numpy` of pyarrow imports pandas, for which every start would wait.
    """

    def __init__(self, batch: pa.RecordBatch):
        self.num_rows = batch.num_rows
        self.batch = batch
        ids = batch.column("image_id")
        self.int_ids = np.from_dlpack(ids) if pa.types.is_integer(ids.type) else None
        self.set_of_image = np.from_dlpack(batch.column("set")) if "set" in batch.schema.names else None
        height = np.from_dlpack(batch.column("height"))
        width = np.from_dlpack(batch.column("width"))
        self.sizes_hw = np.stack([height, width], 1)
        self.objects = _list_views(batch.column("objects"))
        self.relations = _list_views(batch.column("relations"))

    def image_ids(self) -> np.ndarray:
        if self.int_ids is not None:
            return self.int_ids
        return np.array(self.batch.column("image_id").to_pylist(), dtype=object)

    def _image_id(self, index: int) -> int | str:
        if self.int_ids is not None:
            return int(self.int_ids[index])
        return self.batch["image_id"][index].as_py()

    def row(self, index: int) -> dict:
        row = {
            "image_id": self._image_id(index),
            "file_name": self.batch["file_name"][index].as_py(),
        }
        if self.set_of_image is not None:
            row["set"] = int(self.set_of_image[index])
        row["height"], row["width"] = self.sizes_hw[index].tolist()
        row["objects"] = _cut(self.objects, index, index + 1)
        row["relations"] = _cut(self.relations, index, index + 1)
        return row


def _list_views(column: pa.StructArray) -> Views:
    """Return (offsets, values) of each list column as views on the batch; lists of A become rows of an (N, A) array."""
    views = {}
    for struct_field in column.type:
        lists = column.field(struct_field.name)
        values = lists.values
        shape = (-1,)
        if isinstance(values, pa.FixedSizeListArray):
            shape = (-1, values.type.list_size)
            values = values.values
        flat = np.from_dlpack(values)
        views[struct_field.name] = (np.from_dlpack(lists.offsets), flat.reshape(shape))
    return views


def _cut(views: Views, start: int, stop: int) -> dict[str, np.ndarray]:
    """Copy the lists of images start to stop into arrays that a transform may write to.

    Floats become float32, whole numbers int64.
    """
    cut = {}
    for name, (offsets, values) in views.items():
        part = values[offsets[start] : offsets[stop]]
        cut[name] = part.copy() if part.dtype == np.float32 else part.astype(np.int64)
    return cut


def _join_views(batches: Sequence[Views]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return (offsets (I + 1,), values by name) of all images of these batches."""
    names = list(batches[0])
    counts = []
    for views in batches:
        offsets, _ = views[names[0]]  # the same for all names
        counts.append(np.diff(offsets))
    parts = [_cut(views, 0, -1) for views in batches]
    flat = {}
    for name in names:
        flat[name] = np.concatenate([part[name] for part in parts])
    return offsets_of(np.concatenate(counts)), flat
