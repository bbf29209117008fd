"""Checks of boxes and relations: vectorised masks over all of them, then a message for each suspicious one.

A valid entry costs a few operations on columns. Only entries that a mask catches are looked up in the form that they
have in the file, so that each message can quote them.
"""

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from toolkit.base.boxes import Boxes, Relations, offsets_of
from toolkit.data.annotations import MAX_AREA, Annotations, ImageRow, RelationColumns, is_id
from toolkit.data.mask_checks import with_masks
from toolkit.data.table import Problem

CLIP_TOLERANCE = 0.01  # pixels; COCO rounds coordinates to two places, which alone can put an edge this far outside
MAX_IMAGE_SIDE_PX = 2**31  # pixels
MAX_COORDINATE_PX = 1e15  # pixels; sums and products of such ones stay finite


class AnnotationIndex:
    """Index of annotations by id after the check; only relations need this.

    id, image, row: columns of the kept annotations, by ascending id: the id, the index of the image, and the row of the
    box among those of its image. dropped: the id of the image by id of each dropped annotation.
    """

    def __init__(self, images: list[int | str], boxes: Boxes, dropped: dict[int, object]):
        self.images = images
        self.boxes = boxes
        self.dropped = dropped

    @functools.cached_property
    def _order(self) -> np.ndarray:
        return np.argsort(self.boxes.ids, kind="stable")

    @functools.cached_property
    def id(self) -> np.ndarray:
        return self.boxes.ids[self._order]

    @functools.cached_property
    def image(self) -> np.ndarray:
        return self.boxes.image_index[self._order]

    @functools.cached_property
    def row(self) -> np.ndarray:
        return self._order - self.boxes.offsets[self.image]

    def rows_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the position of each of N ids in the column `id`, (N,); -1 for an id that is not there."""
        if not len(self.id):
            return np.full(len(ids), -1)
        at = np.searchsorted(self.id, ids)
        at = at.clip(max=len(self.id) - 1)
        return np.where(self.id[at] == ids, at, -1)

    def at(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the columns `image` and `row` of the annotations with these ids, which must all be kept."""
        rows = self.rows_of(np.array(ids, np.int64))
        return self.image[rows], self.row[rows]

    def of(self, id_: object) -> tuple[object, int] | None:
        """Return (id of the image, row among the boxes of the image) of an annotation.

        The row is -1 if the annotation was dropped. Returns None if no annotation has this id.
        """
        if not isinstance(id_, int):
            return None
        if id_ in self.dropped:
            return self.dropped[id_], -1
        if not fits_int64(id_):
            return None
        at = self.rows_of(np.array([id_]))[0]
        if at < 0:
            return None
        return self.images[self.image[at]], int(self.row[at])


def check_boxes(
    annotations: Annotations, file: str, rows: Mapping, labels: Mapping, attributes: Mapping, problems: list[Problem]
) -> tuple[Boxes, AnnotationIndex]:
    """Return the boxes of all images in `rows` (by id), in their order, and the index of the annotations.

    rows: usable and unusable images by id. labels: label of each category id. attributes: row of each attribute id; if
    empty, `attribute_ids` is not read. problems: list to which the problems found are added.
    """
    a = annotations
    images = list(rows)
    position = {image_id: at for at, image_id in enumerate(images)}
    image = a.image_ids.find(position)[np.array(a.image, np.int32)]
    label = a.category_ids.find(labels)[np.array(a.category, np.int32)]
    xywh = np.frombuffer(a.xywh).reshape(-1, 4)  # a view, since it is by far the largest
    ids = np.array(a.id, np.int64)
    xyxy, suspicious = _clip_inside(xywh, image, list(rows.values()))
    times, repeated_or_odd = _repeated_or_odd(a, ids)
    suspicious |= repeated_or_odd | (image < 0) | (label < 0)
    for number, of_box in a.attribute_ids.items():
        if _attribute_faults({"attribute_ids": of_box}, attributes):
            suspicious[number] = True
    area = _areas(a, xyxy)
    crowd = np.array(a.crowd, np.int8) > 0
    kept = np.ones(len(a), bool)
    dropped = {}
    dropped_per_image = Counter()
    for number in np.flatnonzero(suspicious).tolist():
        entry = a.entry(number)
        if not isinstance(entry, dict):
            kept[number] = False
            message = f"annotation entry {number}: {entry!r} is not an object"
            problems.append(Problem("error", file, None, None, message))
            continue
        id_ = entry.get("id")
        image_id = entry.get("image_id")
        row = rows.get(image_id) if is_id(image_id) else None
        box_and_area, faults, repairs = _judge(entry, number, row, times, labels, attributes)
        name = row.file_name if row and isinstance(row.file_name, str) else file
        problems += [Problem("error", name, image_id, id_, fault) for fault in faults]
        problems += [Problem("warning", name, image_id, id_, repair) for repair in repairs]
        if faults:
            kept[number] = False
            if isinstance(id_, int):
                dropped[id_] = image_id
            if row is not None:
                dropped_per_image[image_id] += 1
        else:
            xyxy[number], area[number] = box_and_area
            label[number] = labels[entry["category_id"]]
            ids[number] = id_
            image[number] = position[image_id]
            crowd[number] = entry.get("iscrowd", 0)
    order, offsets = _by_image(image, kept, len(images))
    counts = np.diff(offsets)
    for image_id, count in dropped_per_image.items():
        if not counts[position[image_id]]:
            problems.append(_emptied_image(rows[image_id], image_id, count))
    extra = {"attributes": _attributes(a, order, attributes)} if attributes else {}
    boxes = Boxes(offsets, xyxy[order], label[order], None, area[order], crowd[order], ids[order], extra)
    if a.masks is not None:
        boxes = with_masks(boxes, order, a, file, list(rows.values()), problems)
    return boxes, AnnotationIndex(images, boxes, dropped)


def _by_image(image: np.ndarray, kept: np.ndarray, num_images: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the kept rows sorted by their image, in their order within it, and the offsets of the images."""
    of_kept = image[kept]
    order = np.flatnonzero(kept)[np.argsort(of_kept, kind="stable")]
    counts = np.bincount(of_kept, minlength=num_images)
    return order, offsets_of(counts)


def _repeated_or_odd(annotations: Annotations, ids: np.ndarray) -> tuple[dict[int, int], np.ndarray]:
    """Return the number of uses of the ids that are used more than once, and a mask (N,) of these and of odd entries.
    """
    odd = np.zeros(len(annotations), bool)
    odd[list(annotations.odd)] = True
    times = _times(ids[~odd], annotations.odd)
    repeated = np.array([id_ for id_ in times if fits_int64(id_)], np.int64)
    return times, odd | np.isin(ids, repeated)


def _clip_inside(xywh: np.ndarray, image: np.ndarray, rows: list[ImageRow]) -> tuple[np.ndarray, np.ndarray]:
    """Return the boxes, xyxy, clipped to their images, and a mask of those that `_box` must examine."""
    sizes = []  # width, height of each image
    for row in rows:
        sizes.append([row.width, row.height] if has_size(row) else [math.inf, math.inf])
    size = np.array(sizes or [[0, 0]], float)[image]  # (N, 2)
    inner = xywh.copy()  # changed in place, to save memory with large files
    low = inner[:, :2]
    high = inner[:, 2:]
    with np.errstate(invalid="ignore", over="ignore"):
        high += low
        suspicious = (low < -CLIP_TOLERANCE).any(axis=1)
        suspicious |= (high - size > CLIP_TOLERANCE).any(axis=1)
    np.copyto(low, 0, where=low < 0)
    np.copyto(high, size, where=high > size)
    is_moderate = (np.abs(xywh) < MAX_COORDINATE_PX).all(axis=1)
    suspicious |= ~is_moderate
    suspicious |= (xywh[:, 2:] <= 0).any(axis=1)
    suspicious |= (high <= low).any(axis=1)
    return inner, suspicious


def _areas(annotations: Annotations, xyxy: np.ndarray) -> np.ndarray:
    """Return (N,) float64: the annotated areas; those of the boxes if they are missing."""
    area = np.array(annotations.area, np.float64)
    with np.errstate(invalid="ignore", over="ignore"):  # of suspicious ones
        width = xyxy[:, 2] - xyxy[:, 0]
        height = xyxy[:, 3] - xyxy[:, 1]
        return np.where(np.isnan(area), width * height, area)


def _emptied_image(row: ImageRow, image_id: int | str, count: int) -> Problem:
    """Return a warning for an image that lost all its annotations."""
    message = f"none of its {count} annotations is usable; with on_error drop it becomes a background image"
    return Problem("warning", str(row.file_name), image_id, None, message)


def _times(ids: np.ndarray, odd: Mapping[int, object]) -> dict[int, int]:
    """Count the uses of each id that is used more than once, or by an odd entry."""
    given = (entry.get("id") for entry in odd.values() if isinstance(entry, dict))
    of_odd = Counter(id_ for id_ in given if isinstance(id_, int))
    odd_ids = np.array([id_ for id_ in of_odd if fits_int64(id_)], np.int64)
    unique, times = np.unique(ids, return_counts=True)
    several = (times > 1) | np.isin(unique, odd_ids)
    of_others = zip(unique[several].tolist(), times[several].tolist(), strict=True)
    return of_odd + Counter(dict(of_others))


def _judge(
    entry: Mapping,
    number: int,
    row: ImageRow | None,
    times: Mapping,
    labels: Mapping,
    attributes: Mapping,
) -> tuple[tuple | None, list[str], list[str]]:
    """Return (box xyxy and its area, faults, repairs) of a suspicious entry, which is usable if it has no faults."""
    missing = (None, ["`bbox` missing"], [])
    box, faults, repairs = _box(entry["bbox"], row) if "bbox" in entry else missing
    faults += _annotation_faults(entry, number, times, labels, row is not None)
    faults += _attribute_faults(entry, attributes)
    if faults:
        return None, faults, repairs
    area = _area(entry, box, bool(repairs))
    return (box, area), faults, repairs


def _annotation_faults(entry: Mapping, number: int, times: Mapping, labels: Mapping, has_image: bool) -> list[str]:
    """Describe the faults of an annotation other than those of its box.

    times: number of uses of the ids that are used more than once.
    """
    faults = []
    id_ = entry.get("id")
    image_id = entry.get("image_id")
    category = entry.get("category_id")
    if not isinstance(id_, int) or isinstance(id_, bool):
        faults.append(f"annotation entry {number}: {wrong_id(entry, 'id').replace(' or a string', '')}")
    elif not fits_int64(id_):
        faults.append(f"annotation id {id_} does not fit into 64 bits")
    elif times.get(id_, 1) > 1:
        often = "twice" if times[id_] == 2 else f"{times[id_]} times"
        faults.append(f"annotation id {id_} used {often}; this one has bbox {entry.get('bbox')}")
    if not has_image:
        faults.append(f"image {image_id!r} does not exist" if is_id(image_id) else wrong_id(entry, "image_id"))
    if not is_id(category):
        faults.append(wrong_id(entry, "category_id"))
    elif category not in labels:
        faults.append(f"category {category!r} is not defined")
    if entry.get("iscrowd", 0) not in (0, 1):
        faults.append(f"`iscrowd` is {entry['iscrowd']!r}; expected 0 or 1")
    return faults


def _attribute_faults(entry: Mapping, attributes: Mapping) -> list[str]:
    """Describe the faults of the attributes of an annotation.

    attributes: row of each id; empty if the document has no attributes: `attribute_ids` is then an unknown key.
    """
    ids = entry.get("attribute_ids", [])
    if not attributes:
        return []
    if not isinstance(ids, list):
        return [f"`attribute_ids` is {ids!r}; expected a list of ids of `attribute_categories`"]
    return [f"attribute {id_!r} is not defined" for id_ in ids if not is_id(id_) or id_ not in attributes]


def _attributes(annotations: Annotations, order: np.ndarray, attributes: Mapping) -> np.ndarray:
    """Return (N, A) int64 attribute ids from 1 of the boxes in this order, padded with 0 to one length of at least 1.
    """
    given = dict(annotations.attribute_ids)
    for number, entry in annotations.odd.items():
        if isinstance(entry, dict):
            given[number] = entry.get("attribute_ids", ())
    lists = []
    for number in order.tolist():
        distinct = dict.fromkeys(given.get(number, ()))
        lists.append(list(distinct))
    longest = max(map(len, lists), default=0) or 1
    filled = np.zeros((len(lists), longest), np.int64)
    for row, ids in zip(filled, lists, strict=True):
        row[: len(ids)] = [attributes[id_] + 1 for id_ in ids]
    return filled


def _box(bbox: object, row: ImageRow | None) -> tuple[tuple[float, ...] | None, list[str], list[str]]:
    """Return (xyxy inside the image, faults, repairs) of a COCO box [x, y, width, height]."""
    if not isinstance(bbox, list | tuple):
        return None, [f"bbox is {bbox!r}; expected 4 numbers"], []
    if len(bbox) != 4:
        return None, [f"bbox needs 4 numbers, it has {len(bbox)}"], []
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in bbox):
        return None, [f"bbox {bbox!r} holds something that is not a number"], []
    written = _written(bbox)
    x, y, w, h = bbox
    # compared, not converted: a number of 400 digits has no float
    if not all(-MAX_COORDINATE_PX < value < MAX_COORDINATE_PX for value in bbox):
        return None, [f"non-finite coordinate in bbox {written}"], []
    if w < 0 or h < 0:
        side = "width" if w < 0 else "height"
        return None, [f"negative {side} in bbox {written}"], []
    if w == 0 or h == 0:
        return None, [f"zero area: bbox {written}"], []
    right = x + w
    bottom = y + h
    if row is None or not has_size(row):
        return (x, y, right, bottom), [], []
    width = row.width
    height = row.height
    if x >= 0 and y >= 0 and right <= width and bottom <= height:
        return (x, y, right, bottom), [], []
    x1 = max(x, 0)
    y1 = max(y, 0)
    x2 = min(right, width)
    y2 = min(bottom, height)
    if x2 <= x1 or y2 <= y1:
        return None, [f"bbox {written} lies outside the image of {width} x {height}"], []
    beyond = max(x1 - x, y1 - y, right - x2, bottom - y2)
    if beyond <= CLIP_TOLERANCE:
        return (x1, y1, x2, y2), [], []
    clipped = _written([x1, y1, x2 - x1, y2 - y1])
    repair = f"bbox {written} exceeds the image of {width} x {height} by {beyond:.3g} px; clipped to {clipped}"
    return (x1, y1, x2, y2), [], [repair]


def _written(numbers: Sequence[float]) -> list[float]:
    """Return numbers for a message, without the digits that computing in binary adds."""
    return [float(f"{number:.6g}") if isinstance(number, float) else number for number in numbers]


def has_size(row: ImageRow) -> bool:
    """Return whether an image has a usable width and height."""
    return is_side(row.width) and is_side(row.height)


def is_side(value: object) -> bool:
    """Return whether `value` is a positive whole number of pixels, at most `MAX_IMAGE_SIDE_PX`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= MAX_IMAGE_SIDE_PX and not value % 1


def _area(entry: Mapping, box: tuple[float, ...], clipped: bool) -> float:
    """Return the annotated area, which in COCO is that of the mask.

    The area of the clipped box is returned if the annotated one is missing, or is that of the box before clipping.
    """
    area = entry.get("area")
    x1, y1, x2, y2 = box
    _, _, width, height = entry["bbox"]  # before it was clipped
    is_number = isinstance(area, int | float) and not isinstance(area, bool)
    if is_number and 0 < area < MAX_AREA:
        of_unclipped = clipped and math.isclose(area, width * height, rel_tol=1e-6)
        if not of_unclipped:
            return float(area)
    return float((x2 - x1) * (y2 - y1))


def wrong_id(record: Mapping, key: str) -> str:
    """Describe a missing or wrong id."""
    if key not in record:
        return f"`{key}` missing"
    return f"`{key}` is {record[key]!r}; expected an integer or a string"


def fits_int64(id_: int | str) -> bool:
    return isinstance(id_, str) or -(2**63) <= id_ < 2**63


def check_relations(
    relations: RelationColumns,
    file: str,
    index: AnnotationIndex,
    predicates: Mapping,
    problems: list[Problem],
) -> Relations:
    """Return the relations between kept boxes.

    A relation whose subject or object was dropped is dropped without a further problem.

    predicates: label of each predicate id. problems: list to which the problems found are added.
    """
    r = relations
    count = len(index.images)
    if not len(r):
        return Relations.none(count)
    subject_ids = np.array(r.subject, np.int64)
    object_ids = np.array(r.object, np.int64)
    label = r.predicate_ids.find(predicates)[np.array(r.predicate, np.int32)]
    position = {id_: at for at, id_ in enumerate(index.images)}
    stated = np.append(r.image_ids.find(position), -2)  # -2: the entry names no image
    stated = stated[np.array(r.image, np.int32)]
    ends = np.stack([index.rows_of(subject_ids), index.rows_of(object_ids)])  # (2, R) rows of `index`; -1: none
    image = np.append(index.image, -1)[ends]
    row = np.append(index.row, -1)[ends]
    odd = np.zeros(len(r), bool)
    odd[list(r.odd)] = True
    has_ends = (ends >= 0).all(axis=0)
    has_two_boxes = (image[0] == image[1]) & (row[0] != row[1])
    has_its_image = odd | (stated == -2) | (stated == image[0])
    good = has_ends & (label >= 0) & has_two_boxes & has_its_image
    triplets = np.stack([subject_ids, object_ids, label])[:, good]
    _, first, group = np.unique(triplets, axis=1, return_index=True, return_inverse=True)
    # Of the good triplets a, b, a at the numbers 3, 5, 8, first_of is 3, 5, 3.
    first_of = np.full(len(r), -1)
    first_of[good] = np.flatnonzero(good)[first[group.reshape(-1)]]
    suspicious = odd | ~good | (first_of != np.arange(len(r)))
    kept = ~suspicious
    seen = set()
    for number in np.flatnonzero(suspicious).tolist():
        entry = r.entry(number)
        image_id = _relation_faults(entry, number, file, index, predicates, problems)
        if image_id is None:
            continue
        triplet = (entry["subject_id"], entry["object_id"], entry["predicate_id"])
        earlier = first_of[number]
        is_repeated = 0 <= earlier < number and kept[earlier]
        if triplet in seen or is_repeated:
            message = f"relation {list(triplet)} (subject, object, predicate) is listed again; kept"
            problems.append(Problem("warning", file, image_id, None, message))
        kept[number] = True
        image[:, number], row[:, number] = index.at(triplet[:2])
        label[number] = predicates[triplet[2]]
        seen.add(triplet)
    order, offsets = _by_image(image[0], kept, count)
    subject, object_ = row
    return Relations(offsets, subject[order], object_[order], label[order])


def _relation_faults(
    entry: object,
    number: int,
    file: str,
    index: AnnotationIndex,
    predicates: Mapping,
    problems: list[Problem],
) -> object:
    """Return the image id of a usable relation; None if it has faults, or lost an end with a dropped box."""
    if not isinstance(entry, dict):
        fault = f"{entry!r} is neither an object nor [subject id, object id, predicate id]"
        problems.append(Problem("error", file, None, None, f"relation entry {number}: {fault}"))
        return None
    predicate = entry.get("predicate_id")
    ends = {key: index.of(entry.get(key)) for key in ("subject_id", "object_id")}
    unknown = {}  # the fault of each key
    for key, end in ends.items():
        if end is None:
            unknown[key] = f"annotation {entry.get(key)!r} does not exist"
    if not is_id(predicate) or predicate not in predicates:
        unknown["predicate_id"] = f"predicate {predicate!r} is not defined"
    faults = [fault if key in entry else f"`{key}` missing" for key, fault in unknown.items()]
    if not faults:
        (subject_image, subject), (object_image, object_) = ends.values()
        if subject_image != object_image:
            faults.append(f"subject is in image {subject_image}, object in image {object_image}")
        elif entry.get("image_id", subject_image) != subject_image:
            faults.append(f"`image_id` is {entry['image_id']!r}, subject and object are in image {subject_image}")
        elif subject == object_ != -1:
            faults.append("subject and object are one annotation")
        elif subject >= 0 and object_ >= 0:
            return subject_image
    name = f"relation {entry.get('id', f'entry {number}')}"
    image_id = entry.get("image_id")
    for fault in faults:
        problems.append(Problem("error", file, image_id, None, f"{name}: {fault}"))
    return None
