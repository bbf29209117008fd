"""The rules of boxes, and the check that applies them: columns of a file become `Boxes`."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from toolkit.base.boxes import Boxes
from toolkit.data.annotations import ENTRY, Annotations, ImageRow, is_id
from toolkit.data.mask_checks import with_masks
from toolkit.data.relation_checks import AnnotationIndex
from toolkit.data.rules import Rule, apply_rules, by_image, noted
from toolkit.data.table import Problem

CLIP_TOLERANCE = 0.01  # pixels; COCO rounds coordinates to two places, which alone can put an edge this far outside
MAX_IMAGE_SIDE_PX = 2**31  # pixels
MAX_COORDINATE_PX = 1e15  # pixels; sums and products of such ones stay finite
SAME_AREA = 1e-6  # relative difference of two areas that are one


class BoxColumns:
    """The columns of N annotations, as rules of boxes look at them.

    image, label: (N,) int64 position of the image in `rows`, and label; -1 if the image or the category does not exist
    ids: (N,) int64
    xywh, xyxy: (N, 4) boxes as in the file, and clipped to their images
    overshoot: (N,) pixels by which the box leaves its image; 0 if the size of the image is not known
    uses: number of uses of each id that is used more than once
    faults: as of `Annotations`, with those of attributes
    usable: (N,) bool, see `apply_rules`
    """

    def __init__(self, annotations: Annotations, file: str, rows: Mapping, labels: Mapping, attributes: Mapping):
        self.annotations = annotations
        self.file = file
        self.rows = list(rows.values())
        position = {image_id: at for at, image_id in enumerate(rows)}
        self.image = annotations.image_ids.find(position)[np.array(annotations.image, np.int32)]
        self.label = annotations.category_ids.find(labels)[np.array(annotations.category, np.int32)]
        self.ids = np.array(annotations.id, np.int64)
        self.xywh = np.frombuffer(annotations.xywh).reshape(-1, 4)  # a view, since it is by far the largest
        self.xyxy, self.overshoot = _clipped(self.xywh, self.image, self.rows)
        of_attributes = _attribute_faults(annotations.attribute_ids, attributes) if attributes else {}
        self.faults = annotations.faults | {"attribute_ids": of_attributes}
        has_id = np.ones(len(annotations), bool)
        has_id[[*self.faults["id"], *self.faults[ENTRY]]] = False
        self.uses = _used_again(self.ids[has_id])
        self.usable = np.ones(len(annotations), bool)

    def __len__(self) -> int:
        return len(self.ids)

    def bbox(self, number: int) -> Sequence[float]:
        """Return a box [x, y, width, height] as the file has it."""
        return self.annotations.entry(number)["bbox"]

    def row_of(self, number: int) -> ImageRow | None:
        """Return the image of a box, None if it does not exist."""
        return self.rows[self.image[number]] if self.image[number] >= 0 else None

    def problem(self, number: int, severity: str, sentence: str) -> Problem:
        """Return the problem of an annotation, with its id and the file and id of its image as far as they are
        known."""
        entry = self.annotations.entry(number)
        if not isinstance(entry, dict):
            return Problem(severity, self.file, None, None, sentence)
        row = self.row_of(number)
        name = row.file_name if row and isinstance(row.file_name, str) else self.file
        return Problem(severity, name, entry.get("image_id"), entry.get("id"), sentence)

    def areas(self) -> np.ndarray:
        """Return (N,) float64: the annotated areas, which in COCO are those of masks.

        The area of the clipped box is returned if the annotated one is missing, or is that of the box before clipping.
        """
        area = np.array(self.annotations.area, np.float64)
        with np.errstate(invalid="ignore", over="ignore"):  # of boxes that are dropped
            clipped = np.flatnonzero(self.overshoot > CLIP_TOLERANCE)
            of_whole = self.xywh[clipped, 2] * self.xywh[clipped, 3]
            tolerance = SAME_AREA * np.maximum(area[clipped], of_whole)
            is_of_whole = np.abs(area[clipped] - of_whole) <= tolerance
            area[clipped[is_of_whole]] = np.nan
            sides = self.xyxy[:, 2:] - self.xyxy[:, :2]
            return np.where(np.isnan(area), sides[:, 0] * sides[:, 1], area)


def _non_finite(c: BoxColumns, number: int) -> list[str]:
    return [f"non-finite coordinate in bbox {_written(c.bbox(number))}"]


def _negative(c: BoxColumns, number: int) -> list[str]:
    side = "width" if c.xywh[number, 2] < 0 else "height"
    return [f"negative {side} in bbox {_written(c.bbox(number))}"]


def _zero(c: BoxColumns, number: int) -> list[str]:
    return [f"zero area: bbox {_written(c.bbox(number))}"]


def _outside(c: BoxColumns, number: int) -> list[str]:
    row = c.row_of(number)
    return [f"bbox {_written(c.bbox(number))} lies outside the image of {row.width} x {row.height}"]


def _exceeding(c: BoxColumns, number: int) -> list[str]:
    """Say how a box was clipped, in numbers with a decimal point only where the file has one."""
    x, y, w, h = c.bbox(number)
    row = c.row_of(number)
    x1 = max(x, 0)
    y1 = max(y, 0)
    x2 = min(x + w, row.width)
    y2 = min(y + h, row.height)
    how = f"by {c.overshoot[number]:.3g} px; clipped to {_written([x1, y1, x2 - x1, y2 - y1])}"
    return [f"bbox {_written([x, y, w, h])} exceeds the image of {row.width} x {row.height} {how}"]


def _repeated_id(c: BoxColumns, number: int) -> list[str]:
    id_ = int(c.ids[number])
    often = "twice" if c.uses[id_] == 2 else f"{c.uses[id_]} times"
    return [f"annotation id {id_} used {often}; this one has bbox {c.annotations.entry(number).get('bbox')}"]


def _unknown_image(c: BoxColumns, number: int) -> list[str]:
    return [f"image {c.annotations.entry(number)['image_id']!r} does not exist"]


def _unknown_category(c: BoxColumns, number: int) -> list[str]:
    return [f"category {c.annotations.entry(number)['category_id']!r} is not defined"]


# All rules of boxes, in the order in which they are reported.
BOX_RULES = (
    noted(ENTRY),
    noted("bbox"),
    Rule("bbox", lambda c: ~(np.abs(c.xywh) < MAX_COORDINATE_PX).all(axis=1), _non_finite),
    Rule("bbox", lambda c: (c.xywh[:, 2:] < 0).any(axis=1), _negative),
    Rule("bbox", lambda c: (c.xywh[:, 2:] == 0).any(axis=1), _zero),
    Rule("bbox", lambda c: (c.overshoot > 0) & (c.xyxy[:, 2:] <= c.xyxy[:, :2]).any(axis=1), _outside),
    noted("id"),
    Rule("id", lambda c: np.isin(c.ids, np.array(list(c.uses), np.int64)), _repeated_id),
    noted("image_id"),
    Rule("image_id", lambda c: c.image < 0, _unknown_image),
    noted("category_id"),
    Rule("category_id", lambda c: c.label < 0, _unknown_category),
    noted("iscrowd"),
    noted("attribute_ids"),
    Rule("bbox", lambda c: c.overshoot > CLIP_TOLERANCE, _exceeding, "warning"),
)


def check_boxes(
    annotations: Annotations, file: str, rows: Mapping, labels: Mapping, attributes: Mapping, problems: list[Problem]
) -> tuple[Boxes, AnnotationIndex]:
    """Return the boxes of all images in `rows`, in their order, and the index of the annotations.

    rows: usable and unusable images by id. labels: label of each category id. attributes: row of each attribute id; if
    empty, `attribute_ids` is not read. problems: list to which the problems found are added.
    """
    columns = BoxColumns(annotations, file, rows, labels, attributes)
    problems += apply_rules(BOX_RULES, columns)
    order, offsets = by_image(columns.image, columns.usable, len(rows))
    problems += _emptied_images(columns, np.diff(offsets))
    area = columns.areas()
    iscrowd = np.array(annotations.crowd, np.int8) > 0
    boxes = Boxes(
        offsets,
        columns.xyxy[order],
        columns.label[order],
        None,
        area[order],
        iscrowd[order],
        columns.ids[order],
        {"attributes": _attributes(annotations, order, attributes)} if attributes else {},
    )
    if annotations.masks is not None:
        boxes = with_masks(boxes, order, annotations, file, columns.rows, problems)
    dropped = {}  # image id of each annotation
    for number in np.flatnonzero(~columns.usable).tolist():
        entry = annotations.entry(number)
        if isinstance(entry, dict) and is_id(entry.get("id")):
            dropped[entry["id"]] = entry.get("image_id")
    return boxes, AnnotationIndex(list(rows), boxes, dropped)


def _emptied_images(columns: BoxColumns, counts: np.ndarray) -> list[Problem]:
    """Return a warning for each image that lost all its annotations, in the order in which these were dropped.

    counts: (I,) number of boxes that each image still has.
    """
    problems = []
    lost = columns.image[~columns.usable & (columns.image >= 0)]
    for image, count in Counter(lost.tolist()).items():
        if not counts[image]:
            row = columns.rows[image]
            message = f"none of its {count} annotations is usable; with on_error drop it becomes a background image"
            problems.append(Problem("warning", str(row.file_name), row.image_id, None, message))
    return problems


def _used_again(ids: np.ndarray) -> dict[int, int]:
    """Return the number of uses of each id that is used more than once."""
    unique, times = np.unique(ids, return_counts=True)
    several = times > 1
    return dict(zip(unique[several].tolist(), times[several].tolist(), strict=True))


def _clipped(xywh: np.ndarray, image: np.ndarray, rows: Sequence[ImageRow]) -> tuple[np.ndarray, np.ndarray]:
    """Return the boxes, xyxy, clipped to their images, and by how many pixels each left its image (N,).

    image: (N,) position in `rows`, -1 for none. A box of an image without a usable size is not clipped.
    """
    sizes = []  # width, height of each image
    for row in rows:
        sizes.append([row.width, row.height] if has_size(row) else [math.inf, math.inf])
    sizes.append([math.inf, math.inf])  # in place of an image that does not exist
    size = np.array(sizes, float)[image]  # (N, 2)
    xyxy = xywh.copy()  # changed in place, to save memory with large files
    low = xyxy[:, :2]
    high = xyxy[:, 2:]
    with np.errstate(invalid="ignore", over="ignore"):  # of boxes that are dropped
        high += low
        beyond = high - size
        np.maximum(beyond, -low, out=beyond)
        overshoot = beyond.max(axis=1).clip(min=0)
        overshoot[np.isinf(size[:, 0])] = 0
        np.copyto(low, 0, where=low < 0)
        np.copyto(high, size, where=high > size)
    return xyxy, overshoot


def _attribute_faults(attribute_ids: Mapping[int, object], attributes: Mapping) -> dict[int, list[str]]:
    """Describe the faults of attributes, by number of the annotation, of those that have any.

    attribute_ids: of each annotation, as in the file. attributes: row of each id.
    """
    faults = {}
    for number, ids in attribute_ids.items():
        if not isinstance(ids, list):
            faults[number] = [f"`attribute_ids` is {ids!r}; expected a list of ids of `attribute_categories`"]
            continue
        undefined = [id_ for id_ in ids if not is_id(id_) or id_ not in attributes]
        if undefined:
            faults[number] = [f"attribute {id_!r} is not defined" for id_ in undefined]
    return faults


def _attributes(annotations: Annotations, order: np.ndarray, attributes: Mapping) -> np.ndarray:
    """Return (N, A) int64 attribute ids from 1 of the boxes in this order, padded with 0 to one length of at least 1.
    """
    lists = []
    for number in order.tolist():
        distinct = dict.fromkeys(annotations.attribute_ids.get(number, ()))
        lists.append(list(distinct))
    longest = max(map(len, lists), default=0) or 1
    filled = np.zeros((len(lists), longest), np.int64)
    for row, ids in zip(filled, lists, strict=True):
        row[: len(ids)] = [attributes[id_] + 1 for id_ in ids]
    return filled


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
