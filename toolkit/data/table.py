"""The table that every data format becomes: columns in memory. Functions make other tables of them; none is written."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from toolkit.base.boxes import Boxes, Relations, offsets_of
from toolkit.base.errors import BadInput
from toolkit.base.files import MAX_IMAGE_PIXELS
from toolkit.base.masks import Shape, column_of, from_bytes
from toolkit.base.text import first_names, shown
from toolkit.data.annotations import ImageRow
from toolkit.data.columns import Columns, StoredFile, changed_file, read_columns
from toolkit.data.decoding import ImageError, decode_image, decode_reduced
from toolkit.data.image_sources import ImageSources, Stored


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
    """Images with their boxes, one row per image. Its columns are never written to.

    attributes: names in the order of their ids; empty: the data have no attributes.
    image_root: the root of `file_name` (`toolkit.data.image_sources`); None when the images are embedded.
    problems: the defects that validation found, and repaired or dropped.
    fingerprint: hash of rows and categories, whatever folder they were read from.
    max_image_pixels, white: for `decode_image`.
    sets: the data sets that the table joins (`toolkit.data.joining`). Empty for a table that was read from a single
        data set.
    class_map: the setting `data.classes` that made the classes (`toolkit.data.classes`); empty: they are those of the
        data.
    before_classes: the table with the classes of the data, if `class_map` made another one of it.
    stored_files: the files that the columns `image` and `masks` refer to, by number.
    arrow_files: the files of the cache that the table was read from; empty for tiles.
    is_selection: whether it has some of their images, and not just the first ones.
    """

    columns: Columns
    categories: tuple[Category, ...]
    predicates: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    image_root: Path | ImageSources | None = None
    problems: list[Problem] = field(default_factory=list)
    name: str = ""
    fingerprint: str = ""
    max_image_pixels: int = MAX_IMAGE_PIXELS
    white: int | None = None
    sets: tuple[JoinedSet, ...] = ()
    class_map: Mapping[str, str | None] = field(default_factory=dict)
    before_classes: "DetectionTable | None" = None
    stored_files: tuple[StoredFile, ...] = ()
    arrow_files: tuple[Path, ...] = ()
    is_selection: bool = False

    def __post_init__(self):
        for column in self.columns.arrays():
            column.setflags(write=False)  # other tables and processes share it

    def __len__(self) -> int:
        return len(self.columns.images["image_id"])

    @property
    def has_masks(self) -> bool:
        """Whether the data were read with the masks of objects."""
        return "masks" in self.columns.images

    def row(self, index: int) -> dict:
        """Return one image: its columns, and `image`, its encoded bytes, if images are embedded.

        With masks, `masks` is the list of the `toolkit.base.masks.Shape` of its objects.

        `objects` and `relations` are dicts of own (writable) NumPy arrays. `bbox` is (N, 4) float32, `area` float32,
        everything else int64; `attributes` is (N, A), if the data have attributes. Raises IndexError outside 0 <= index
        < len, and BadInput for an embedded image that the file no longer has.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a table of {len(self)} images")
        images, boxes, relations = self.columns
        row = {name: column[index : index + 1].tolist()[0] for name, column in images.items()}  # as Python's own types
        row["height"], row["width"] = row.pop("size_hw")
        if "image" in images:
            row["image"] = self._read_stored("image", index)
        if "masks" in images:
            row["masks"] = self.masks_of(index)
        own = boxes.of_image(index)
        row["objects"] = {
            "id": boxes.ids[own].copy(),
            "bbox": boxes.xyxy[own].copy(),
            "category": boxes.labels[own].copy(),
            "area": boxes.area[own].copy(),
            "iscrowd": boxes.iscrowd[own].astype(np.int64),
        }
        if "attributes" in boxes.extra:
            row["objects"]["attributes"] = boxes.extra["attributes"][own].copy()
        first, end = relations.offsets[index : index + 2].tolist()
        row["relations"] = {
            "subject": relations.subject[first:end].copy(),
            "object": relations.object[first:end].copy(),
            "predicate": relations.predicate[first:end].copy(),
        }
        return row

    def masks_of(self, index: int) -> list[Shape]:
        """Return the masks of the objects of one image, in the order of the objects.

        Raises BadInput if the file no longer has them.
        """
        shapes = self.stored_masks(index)
        boxes = self.columns.boxes
        return [shapes[position] for position in boxes.extra["stored_mask"][boxes.of_image(index)].tolist()]

    def stored_masks(self, index: int) -> list[Shape]:
        """Return the masks that are stored for one image, to which `stored_mask` of its boxes refers. Raises BadInput
        if the file no longer has them."""
        content = self._read_stored("masks", index)
        try:
            return from_bytes(content)
        except ValueError as error:
            number = self.columns.images["masks"][index, 0]
            what = f"the masks of {self.image_name(index)}"
            raise BadInput(changed_file(self.stored_files[number].path, what)) from error

    def _read_stored(self, column: str, index: int) -> bytes:
        """Return what is stored of one image: `column` is "image" or "masks". Raises BadInput if it is gone."""
        number, start, size = self.columns.images[column][index].tolist()
        file = self.stored_files[number]
        content = file.read(start, size)
        if content is None:
            raise BadInput(changed_file(file.path, f"{column} of {self.image_name(index)}"))
        return content

    def file_name(self, index: int) -> str:
        """Return the file name of one image; for an embedded image a text with its position in the source."""
        return self.columns.images["file_name"][index]

    def file_names(self) -> list[str]:
        """Return `file_name` of every image."""
        return self.columns.images["file_name"].tolist()

    def image_name(self, index: int) -> str:
        """Return one image's name for messages: "street/0001.jpg (id 17)"."""
        return _image_name(self.columns, index)

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
        ids = self.columns.images["image_id"]
        return ids if ids.dtype == np.int64 else ids.astype(object)

    def sizes_hw(self) -> np.ndarray:
        """Return (len, 2) int64: height and width in pixels."""
        return self.columns.images["size_hw"]

    def num_boxes(self) -> np.ndarray:
        """Return (len,) int64: objects per image, crowd regions included."""
        return np.diff(self.columns.boxes.offsets)

    def num_objects(self) -> np.ndarray:
        """Return (len,) int64: objects per image, without crowd regions."""
        boxes = self.columns.boxes
        objects_before = offsets_of(~boxes.iscrowd)  # of each row of the boxes
        return np.diff(objects_before[boxes.offsets])

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
        return self.columns.images["set"]

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
        boxes = self.columns.boxes
        extra = {name: column for name, column in boxes.extra.items() if name != "stored_mask"}
        if masks:
            shapes = []
            for index in range(len(self)):
                shapes += self.masks_of(index)
            extra["masks"] = column_of(shapes)
        xyxy = boxes.xyxy.astype(np.float64)
        area = boxes.area.astype(np.float64)
        return dataclasses.replace(boxes, xyxy=xyxy, area=area, extra=extra)

    def relations(self) -> Relations:
        """Return all annotated relations as columns, in the order of the images."""
        return self.columns.relations

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
        height, width = self.sizes_hw().T.tolist()
        return list(map(ImageRow, self.image_ids().tolist(), self.file_names(), width, height))

    @functools.cached_property
    def identity(self) -> dict[str, str | int | dict]:
        """JSON values that describe this table, for a later `changed_since` of another table."""
        identity = {
            "fingerprint": self.fingerprint,
            "file": " ".join(file.name for file in self.arrow_files),
            "images": len(self),
            "boxes": int(self.num_objects().sum()),
        }
        if self.class_map:
            identity["classes"] = dict(self.class_map)
        if self.is_selection:
            identity["selection"] = True
        return identity

    def changed_since(self, before: Mapping) -> str:
        """Describe how this table differs from an earlier one; return "" if the two do not differ.

        before: the `identity` of the earlier table. If its files are still in the cache, the text has the numbers of
        images of the data that are gone, new or changed, else only the numbers of images and boxes.
        """
        if before["fingerprint"] == self.fingerprint:
            return ""
        counts = "{images:,} images with {boxes:,} boxes"
        counts = f"{counts.format(**before)} then, {counts.format(**self.identity)} now"
        map_before = before.get("classes", {})
        if map_before != self.class_map:
            counts += f"; data.classes was {_in_braces(map_before)}, and is {_in_braces(self.class_map)}"
        names_before = str(before["file"]).split()
        earlier = [file.with_name(name) for file, name in zip(self.arrow_files, names_before, strict=False)]
        is_comparable = len(names_before) == len(self.arrow_files) > 0
        is_comparable &= before.get("selection", False) == self.is_selection
        if not is_comparable or not all(file.is_file() for file in (*earlier, *self.arrow_files)):
            return counts
        old = _images_of_files(earlier, None if self.is_selection else before["images"])
        new = _images_of_files(self.arrow_files, None if self.is_selection else len(self))
        parts = {
            "gone": [image.name for key, image in old.items() if key not in new],
            "new": [image.name for key, image in new.items() if key not in old],
            "with other boxes or labels": [
                image.name for key, image in new.items() if key in old and image.annotations != old[key].annotations
            ],
        }
        changes = [f"{len(names):,} {what} ({first_names(names)})" for what, names in parts.items() if names]
        if not changes and map_before != self.class_map:
            return counts
        images = "all images, those held out among them," if self.is_selection else "the images"
        what = f"of {images} {', '.join(changes)}" if changes else "other names, sizes, masks or relations"
        return f"{counts}; {what}"

    def annotations_by_image(self) -> dict[int | str, bytes]:
        """Return the boxes, labels and crowd flags of every image as bytes, by image id, to be compared."""
        return dict(zip(self.image_ids().tolist(), _annotations(self.columns.boxes), strict=True))

    @property
    def class_names(self) -> list[str]:
        """The names of the classes in the order of the labels."""
        return [category.name for category in self.categories]

    def head(self, count: int) -> "DetectionTable":
        """Return a table of the first `count` images."""
        if count >= len(self):
            return self
        first = self.select(np.arange(count), f"{self.fingerprint}-head{count}")
        return dataclasses.replace(first, is_selection=self.is_selection)

    def select(self, rows: np.ndarray, fingerprint: str = "") -> "DetectionTable":
        """Return a table of some images.

        rows: a bool mask (len,), or positions in any order. fingerprint: of the new table; "": it is made of the
        present one and the rows.
        """
        return dataclasses.replace(
            self,
            columns=self.columns.select(rows),
            fingerprint=fingerprint or hash_of(self.fingerprint, rows.tobytes()),
            before_classes=None,
            is_selection=True,
        )


def hash_of(*values: object) -> str:
    """Return a hash of values that `repr` writes in full, 32 hexadecimal digits."""
    return hashlib.blake2b(repr(values).encode(errors="surrogateescape"), digest_size=16).hexdigest()


class _Image(NamedTuple):
    """An image in a file of the cache: its name for messages, and its annotations, to be compared."""

    name: str
    annotations: bytes


def _images_of_files(files: Sequence[Path], count: int | None) -> dict[tuple[int, int | str], _Image]:
    """Return the first `count` images of these files, or all, by the number of the file and their id."""
    found = {}
    for number, file in enumerate(files):
        columns, _ = read_columns(file)
        image_ids = columns.images["image_id"].tolist()
        for index, (image_id, annotations) in enumerate(zip(image_ids, _annotations(columns.boxes), strict=True)):
            found[number, image_id] = _Image(_image_name(columns, index), annotations)
    return dict(islice(found.items(), count))


def _annotations(boxes: Boxes) -> list[bytes]:
    """Return the boxes, labels and crowd flags of each image as bytes."""
    parts = [boxes.xyxy.astype(np.float64), boxes.labels[:, None], boxes.iscrowd[:, None]]
    of_images = np.split(np.concatenate(parts, axis=1), boxes.offsets[1:-1])
    return [rows.tobytes() for rows in of_images]


def _image_name(columns: Columns, index: int) -> str:
    return f"{columns.images['file_name'][index]} (id {columns.images['image_id'][index]})"


def _in_braces(class_map: Mapping[str, str | None]) -> str:
    """Return a class map as it is written in a settings file, such as {car: vehicle, tree: null}."""
    entries = []
    for old, new in class_map.items():
        entries.append(f"{shown(old)}: {'null' if new is None else shown(new)}")
    return "{" + ", ".join(entries) + "}"
