"""The input and output of a reader: its options; images, boxes and relations as columns, exactly as in the file.

Columns hold numbers only. A field that is not of its type (a string instead of a number, a box of three numbers) is
described at once, in a sentence, and its column gets a placeholder; the other fields of the entry are read.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from toolkit.base.errors import BadInput
from toolkit.base.files import MAX_IMAGE_PIXELS
from toolkit.base.masks import Shape
from toolkit.data.choices import CROWDS, FORMATS
from toolkit.data.image_sources import ImageSources
from toolkit.data.segmentations import shape_of, with_box_of_mask
from toolkit.data.sixteen_bits import FULL_RANGE

NUMBER_TYPES = {int, float}
NO_ID = -(2**63)
MAX_ID = 2**63 - 1
TRIPLET_KEYS = ("subject_id", "object_id", "predicate_id")
ENTRY = "entry"  # stands for all fields of an entry, where it is not an object
# What the columns hold where a field is missing or not of its type.
PLACEHOLDERS = {"id": 0, "image_id": None, "category_id": None, "bbox": (0.0, 0.0, 1.0, 1.0), "iscrowd": 0}
MAX_EXACT = 2**53  # every whole number up to it has a float64 of its own
MAX_AREA = 3e38  # the table's are float32


@dataclass(frozen=True)
class Reading:
    """Options of reading data, whatever their format.

    image_dir: folder of the images, or several, or archives; see `toolkit.data.image_sources`. None: the reader looks
        for the folder.
    on_error: "raise" -> BadInput with every defect; "drop" -> unusable images and annotations are left out.
    cache_dir: of the tables; None: see `toolkit.data.table_cache.cache_root`.
    check_images: "full" (decode each), "header" (read the headers), True ("full" if there are not too many, else
        "header"), or False (the files are not looked at).
    max_image_pixels: an image with more pixels cannot be used, and is refused before it is decoded.
    white: value of 16-bit images that becomes 255, see `toolkit.data.decoding.decode_image`.
    format, name: as of `toolkit.data.formats.open_dataset`.
    streaming: leave the images in the Parquet files of a `datasets` data set; see `open_hub`.
    keep_images_without_relations: whether the training data of Visual Genome keep images without relations, see
        `load_graphs`; other formats always keep them.
    masks: read the masks of objects too, see `toolkit.data.mask_checks`; False: they are not looked at.
    crowds: "ignore" (boxes that the data mark as crowd regions stay such) or "objects" (they are taken as single
        objects).

    Raises BadInput: a format, `crowds` or `white` that does not exist.
    """

    image_dir: str | Path | Sequence[str] | ImageSources | None = None
    on_error: str = "raise"
    cache_dir: str | Path | None = None
    check_images: bool | str = True
    max_image_pixels: int = MAX_IMAGE_PIXELS
    white: int | None = None
    format: str = "auto"
    name: str | None = None
    streaming: bool = False
    keep_images_without_relations: bool = False
    masks: bool = False
    crowds: str = "ignore"

    def __post_init__(self):
        faults = []
        if self.format not in FORMATS:
            faults.append(f"data format {self.format!r} is not known; choose from {', '.join(FORMATS)}")
        if self.crowds not in CROWDS:
            faults.append(f"data.crowds is {self.crowds!r}; expected {' or '.join(CROWDS)}")
        if self.white is not None and not 0 < self.white <= FULL_RANGE:
            faults.append(f"data.white is {self.white}; expected a value of 16-bit pixels, 1 to {FULL_RANGE}")
        if faults:
            raise BadInput(faults)


class ImageRow(NamedTuple):
    """An image as a file lists it, wrong and missing values included."""

    image_id: int | str
    file_name: str
    width: int
    height: int


def slashed(row: ImageRow) -> ImageRow:
    """Return the row with "/" between the folders of its file name, which every system can open.

    Some tools on Windows write backslashes.
    """
    name = row.file_name
    if isinstance(name, str) and "\\" in name:
        return row._replace(file_name=name.replace("\\", "/"))
    return row


class Codes:
    """Mapping of ids to consecutive integers (codes) from 0, in order of first appearance; a call returns the code."""

    def __init__(self):
        self.values: list[int | str] = []
        self._code: dict[int | str, int] = {}

    def __call__(self, value: int | str) -> int:
        code = self._code.setdefault(value, len(self.values))
        if code == len(self.values):
            self.values.append(value)
        return code

    def find(self, wanted: Mapping) -> np.ndarray:
        """Return wanted[id] for the id of each code, as (codes,) int64; -1 for an id that is not in `wanted`."""
        found = [wanted.get(value, -1) for value in self.values]
        return np.array(found, np.int64).reshape(-1)


class Annotations:
    """Annotation columns that grow entry by entry.

    images: an `ImageRow` for each image, in order
    odd_images: entries of images without a usable id, by their number
    id: int64 for each annotation
    image, category: for each annotation, the codes of its ids in `image_ids` and `category_ids`
    xywh: four float64 for each annotation
    whole: four bits for each box, set if the file writes the number without a decimal point
    area: NaN if missing
    crowd: 1 for crowd regions
    attribute_ids: lists of ids by number of the annotation, for those that have any
    faults: sentences on the fields that are not of their type, by field and number of the annotation
    odd: entries that have faults, or numbers that the columns do not hold exactly, as the file has them, by number of
        the annotation
    masks: masks by number of the annotation, for those that have any; None: masks are not read
    mask_faults: phrases on faulty masks, by number of the annotation
    """

    def __init__(self, categories: list | None = None, masks: bool = False):
        self.categories: list = categories or []
        self.predicates: list = []
        self.attributes: list = []
        self.images: list[ImageRow] = []
        self.odd_images: dict[int, object] = {}
        self.image_ids = Codes()
        self.category_ids = Codes()
        self.id, self.image, self.category, self.xywh = map(array, "qiid")
        self.whole, self.area, self.crowd = map(array, "Bdb")
        self.attribute_ids: dict[int, list] = {}
        self.faults: dict[str, dict[int, list[str]]] = {field: {} for field in (ENTRY, *PLACEHOLDERS)}
        self.odd: dict[int, object] = {}
        self.masks: dict[int, Shape] | None = {} if masks else None
        self.mask_faults: dict[int, list[str]] = {}
        self.relations = RelationColumns()

    def __len__(self) -> int:
        return len(self.id)

    def add_image(self, entry: object) -> None:
        """Add an entry of COCO's `images`."""
        get = entry.get if isinstance(entry, dict) else {}.get
        file_name = get("file_name")
        if is_id(get("id")):
            row = ImageRow(get("id"), file_name, get("width"), get("height"))
        else:
            self.odd_images[len(self.images)] = entry
            row = ImageRow(None, file_name, None, None)
        self.images.append(row)

    def add_box(
        self,
        id_: int,
        image_id: int | str,
        category_id: int | str,
        xywh: Sequence[float],
        crowd=False,
        area=np.nan,
    ) -> None:
        """Add a box of four numbers. The ids of its image and its category must be usable."""
        self.id.append(id_)
        self.image.append(self.image_ids(image_id))
        self.category.append(self.category_ids(category_id))
        self.xywh.extend(xywh)
        a, b, c, d = map(type, xywh)
        self.whole.append((a is int) | (b is int) << 1 | (c is int) << 2 | (d is int) << 3)
        self.area.append(area)
        self.crowd.append(crowd)

    def add_all(self, entries: list) -> None:
        """Add entries of COCO's `annotations`: all at once if every one fits, as in most files, else one by one."""
        try:
            columns = _columns(entries)
        except (KeyError, TypeError, AttributeError, OverflowError):
            columns = None
        if columns is None:
            for entry in entries:
                self.add(entry)
            return
        ids, image_ids, category_ids, flat, areas, crowds = columns
        if self.masks is not None:
            for number, entry in enumerate(entries, start=len(self)):
                self.add_segmentation(number, entry.get("segmentation"))
        self.id.extend(ids)
        self.image.extend(map(self.image_ids, image_ids))
        self.category.extend(map(self.category_ids, category_ids))
        self.xywh.extend(flat)
        is_whole = np.array([kind is int for kind in map(type, flat)]).reshape(-1, 4)
        bits = is_whole @ np.array([1, 2, 4, 8], np.uint8)
        self.whole.frombytes(bits.astype(np.uint8).tobytes())
        usable = (areas > 0) & (areas < MAX_AREA)
        self.area.frombytes(np.where(usable, areas, np.nan).tobytes())
        self.crowd.extend(crowds)

    def add(self, entry: object) -> None:
        """Add an entry of COCO's `annotations`. Without `bbox` it gets the box around its mask."""
        if self.masks is not None and isinstance(entry, dict):
            self.add_segmentation(len(self), entry.get("segmentation"))
        entry = with_box_of_mask(entry)
        number = len(self)
        faults = _type_faults(entry, number)
        for field, fault in faults.items():
            self.faults[field][number] = [fault]
        fitting = entry
        if faults:
            given = {} if ENTRY in faults else entry
            fitting = PLACEHOLDERS | {field: value for field, value in given.items() if field not in faults}
        # Whole numbers too large for a float64 are far outside any image, whatever their value is.
        bbox = [value if isinstance(value, float) or abs(value) < MAX_EXACT else math.inf for value in fitting["bbox"]]
        if faults or math.inf in bbox:
            self.odd[number] = entry
        if "attribute_ids" in fitting:
            self.attribute_ids[number] = fitting["attribute_ids"]
        area = fitting.get("area")
        is_usable = _is_real(area) and 0 < area < MAX_AREA
        self.add_box(
            fitting["id"],
            fitting["image_id"],
            fitting["category_id"],
            bbox,
            fitting.get("iscrowd", 0) == 1,
            area if is_usable else np.nan,
        )

    def add_segmentation(self, number: int, segmentation: object) -> None:
        """Keep the mask of the annotation with this number, a value of COCO's key `segmentation`, with its faults."""
        shape, faults = shape_of(segmentation)
        if shape is not None:
            self.masks[number] = shape
        if faults:
            self.mask_faults[number] = faults

    def take_crowds_as_objects(self) -> None:
        """Mark no box as a crowd region any more. A flag `iscrowd` that is not 0 or 1 stays a fault."""
        self.crowd = array("b", bytes(len(self)))

    def entry(self, number: int) -> object:
        """Return an entry as the file has it, without unused keys."""
        if number in self.odd:
            return self.odd[number]
        image_id = self.image_ids.values[self.image[number]]
        category_id = self.category_ids.values[self.category[number]]
        bits = self.whole[number]
        bbox = []
        for position, value in enumerate(self.xywh[4 * number : 4 * number + 4]):
            is_whole = bits >> position & 1
            bbox.append(int(value) if is_whole else value)
        entry = {
            "id": self.id[number],
            "image_id": image_id,
            "category_id": category_id,
            "bbox": bbox,
            "iscrowd": self.crowd[number],
            "area": self.area[number],
        }
        if number in self.attribute_ids:
            entry["attribute_ids"] = self.attribute_ids[number]
        return entry


class RelationColumns:
    """Columns of the relations in a file.

    id: NO_ID if the entry has no id
    subject, object: ids of annotations, NO_ID if missing or not such an id
    predicate, image: codes of the ids in `predicate_ids` and `image_ids`; image is -1 if the entry names no image
    faults, odd: as in `Annotations`
    """

    def __init__(self):
        self.predicate_ids = Codes()
        self.image_ids = Codes()
        self.id, self.subject, self.object, self.predicate, self.image = map(array, "qqqii")
        self.faults: dict[str, dict[int, list[str]]] = {ENTRY: {}}
        self.odd: dict[int, object] = {}

    def __len__(self) -> int:
        return len(self.subject)

    def add(self, entry: object) -> None:
        """Add an entry of `rel_annotations`."""
        given = entry if isinstance(entry, dict) else {}
        id_ = _number_or_none(given.get("id"))
        subject, object_ = (_number_or_none(given.get(key)) for key in TRIPLET_KEYS[:2])
        predicate_id = _id_or_none(given.get("predicate_id"))
        image_id = _id_or_none(given.get("image_id"))
        number = len(self)
        if given is not entry:
            fault = f"{entry!r} is neither an object nor [subject id, object id, predicate id]"
            self.faults[ENTRY][number] = [fault]
        is_whole = NO_ID not in (subject, object_) and predicate_id is not None
        others_fit = (id_ != NO_ID or "id" not in given) and (image_id is not None or "image_id" not in given)
        if not (is_whole and others_fit):
            self.odd[number] = entry
        self.id.append(id_)
        self.subject.append(subject)
        self.object.append(object_)
        self.predicate.append(self.predicate_ids(predicate_id))
        self.image.append(-1 if image_id is None else self.image_ids(image_id))

    def add_triplet(self, entry: object) -> None:
        """Add an entry of `relations`: a row [subject id, object id, predicate id]."""
        if isinstance(entry, list) and len(entry) == 3:
            entry = dict(zip(TRIPLET_KEYS, entry, strict=True))
        self.add(entry)

    def extend(self, other: "RelationColumns") -> None:
        """Append the relations of another instance."""
        for number in range(len(other)):
            self.add(other.entry(number))

    def entry(self, number: int) -> object:
        """Return an entry as the file has it."""
        if number in self.odd:
            return self.odd[number]
        entry = {
            "subject_id": self.subject[number],
            "object_id": self.object[number],
            "predicate_id": self.predicate_ids.values[self.predicate[number]],
        }
        if self.id[number] != NO_ID:
            entry["id"] = self.id[number]
        if self.image[number] >= 0:
            entry["image_id"] = self.image_ids.values[self.image[number]]
        return entry


def is_id(value: object) -> bool:
    """Return whether a value can be the id of an image or a class: a whole number, or text that a file can hold."""
    if type(value) is str:
        return value != "" and is_unicode(value)
    return type(value) is int


def is_unicode(text: str) -> bool:
    """Return False for text with halves of surrogate pairs, which neither files nor tables can hold."""
    return text.encode(errors="ignore").decode() == text


def fits_int64(id_: int | str) -> bool:
    """Return whether an id is text, or a whole number of 64 bits."""
    return isinstance(id_, str) or NO_ID <= id_ <= MAX_ID


def wrong_id(record: Mapping, key: str, expected: str = "an integer or a string") -> str:
    """Describe a missing or wrong id."""
    if key not in record:
        return f"`{key}` missing"
    return f"`{key}` is {record[key]!r}; expected {expected}"


def _id_or_none(value: object) -> int | str | None:
    return value if is_id(value) else None


def _number_or_none(value: object) -> int:
    """Return a value that is a whole number of 64 bits, else NO_ID, which is the smallest one and stands for "none"."""
    return value if type(value) is int and NO_ID < value <= MAX_ID else NO_ID


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _type_faults(entry: object, number: int) -> dict[str, str]:
    """Describe the fields of an annotation that are missing or not of their type, by field.

    number: of the annotation, for messages.
    """
    if not isinstance(entry, dict):
        return {ENTRY: f"annotation entry {number}: {entry!r} is not an object"}
    faults = {}
    id_ = entry.get("id")
    if not isinstance(id_, int) or isinstance(id_, bool):
        faults["id"] = f"annotation entry {number}: {wrong_id(entry, 'id', 'an integer')}"
    elif not fits_int64(id_):
        faults["id"] = f"annotation id {id_} does not fit into 64 bits"
    for key in ("image_id", "category_id"):
        if not is_id(entry.get(key)):
            faults[key] = wrong_id(entry, key)
    of_box = _bbox_fault(entry)
    if of_box:
        faults["bbox"] = of_box
    if entry.get("iscrowd", 0) not in (0, 1):
        faults["iscrowd"] = f"`iscrowd` is {entry['iscrowd']!r}; expected 0 or 1"
    return faults


def _bbox_fault(entry: Mapping) -> str:
    """Describe a box that is not four numbers; "" if it is."""
    if "bbox" not in entry:
        return "`bbox` missing"
    bbox = entry["bbox"]
    if not isinstance(bbox, list | tuple):
        return f"bbox is {bbox!r}; expected 4 numbers"
    if len(bbox) != 4:
        return f"bbox needs 4 numbers, it has {len(bbox)}"
    if not all(map(_is_real, bbox)):
        return f"bbox {bbox!r} holds something that is not a number"
    return ""


def _columns(entries: list[dict]) -> tuple | None:
    """Return the columns of entries that all fit, or None if some may not fit.

    The columns are ids, image ids, category ids, numbers of the boxes, areas and crowd flags. Raises KeyError,
    TypeError, AttributeError or OverflowError for some entries that do not fit.
    """
    ids = [entry["id"] for entry in entries]
    image_ids = [entry["image_id"] for entry in entries]
    category_ids = [entry["category_id"] for entry in entries]
    boxes = [entry["bbox"] for entry in entries]
    crowds = [entry.get("iscrowd", 0) for entry in entries]
    areas = [entry.get("area", math.nan) for entry in entries]
    whole_columns = (ids, image_ids, category_ids, crowds)
    if any(set(map(type, column)) != {int} for column in whole_columns):
        return None
    if min(ids) <= NO_ID or max(ids) > MAX_ID or min(crowds) < 0 or max(crowds) > 1:
        return None
    if set(map(type, boxes)) != {list} or set(map(len, boxes)) != {4}:
        return None
    numbers = list(chain.from_iterable(boxes))
    if not NUMBER_TYPES.issuperset(map(type, chain(numbers, areas))):
        return None
    if any("attribute_ids" in entry for entry in entries):
        return None
    if not all(-MAX_EXACT < value < MAX_EXACT for value in numbers if type(value) is int):
        return None
    return ids, image_ids, category_ids, numbers, np.array(areas, np.float64), crowds
