"""Detects the box format of a whole file: corners, centres or fractions where COCO's [x, y, width, height] is expected.

One box is ambiguous: [10, 10, 40, 50] is valid in every format. Many boxes are not: in the wrong format some leave
their image, in the right one none does. A file whose boxes stay inside their images as COCO boxes is never questioned.
"""

import math
from collections.abc import Mapping

import numpy as np

from toolkit.data.annotations import Annotations, ImageRow

EVIDENCE = 10  # boxes that must leave their image as they are; fewer may be slips
TIMES_BETTER = 10  # boxes that leave their image as they are, for each that does in the other format
OVERSHOOT = 0.1  # of its own side that a box must be outside to count, and
PIXELS = 2.0  # at least so many pixels: rounding and padding are no evidence
LARGEST_FRACTION = 1.01  # of boxes in fractions of the image, rounding included
MOST = 0.99  # of the boxes must be fractions; a few may be slips
SMALLEST_SIDE = 16  # pixels of an image in which boxes of one pixel are no objects
LARGEST = 1e9  # pixels; what is beyond is no number of pixels
NAMES = {
    "xyxy": ("corners [x1, y1, x2, y2]", ("x1", "y1", "x2 - x1", "y2 - y1")),
    "cxcywh": ("centre and size [cx, cy, width, height]", ("cx - width / 2", "cy - height / 2", "width", "height")),
    "xywh": ("[x, y, width, height]", ("x", "y", "width", "height")),
}
_READ_AS = ("xywh", "xyxy", "cxcywh")  # where several fit equally well, the first is named


def format_fault(annotations: Annotations, images: Mapping[int | str, ImageRow]) -> str | None:
    """What is wrong with the format of all boxes, and what mends it, in one sentence; None: nothing, or too few boxes.

    Crowd regions and entries that cannot be read do not count.

    Args:
        images: by image id; boxes of others do not count.
    """
    boxes, sizes = _readable(annotations, images)
    large = boxes[sizes.min(axis=1, initial=math.inf) >= SMALLEST_SIDE]
    small = (np.abs(large) <= LARGEST_FRACTION).all(axis=1).sum()
    whole = (large % 1 == 0).all(axis=1).sum()
    if len(large) >= EVIDENCE and small >= MOST * len(large) and whole < 0.5 * len(large):
        return _fractions(large)  # no number exceeds 1 and most are no whole ones, as no objects in pixels are
    outside = {name: int(_outside(corners, sizes).sum()) for name, corners in _readings(boxes).items()}
    doubtful = outside["xywh"]
    other = min(("xyxy", "cxcywh"), key=outside.get)
    wrong = outside[other]
    if len(boxes) < EVIDENCE or doubtful < EVIDENCE or wrong * TIMES_BETTER > doubtful:
        return None
    called, formula = NAMES[other]
    return (f"the boxes look like {called}, expected [x, y, width, height]: read as such {doubtful} of "
            f"{len(boxes)} leave their image, read as {called} {wrong or 'none'} would; write every bbox as "
            f"[{', '.join(formula)}], or clip the boxes to their images if they are [x, y, width, height] after "
            "all")  # fmt: skip


def _fractions(boxes: np.ndarray) -> str:
    one = np.ones((len(boxes), 2))
    outside = {name: int(_outside(corners, one, 0.01).sum()) for name, corners in _readings(boxes).items()}
    name = min(_READ_AS, key=outside.get)
    called, formula = NAMES[name]
    others = [NAMES[other][0] for other in _READ_AS if other != name and outside[other] == outside[name]]
    called += f" (or {' or '.join(others)}: these boxes cannot tell)" if others else ""
    parts = (f"({part}) * {side}" if " " in part else f"{part} * {side}"
             for part, side in zip(formula, ("W", "H", "W", "H"), strict=True))  # fmt: skip
    return (f"the boxes have numbers from 0 to 1 ({len(boxes)} boxes), which look like fractions of the image, "
            f"{called}; expected pixels [x, y, width, height]: write every bbox as [{', '.join(parts)}] with the "
            "image's width W and height H")  # fmt: skip


def _readable(annotations: Annotations, images: Mapping[int | str, ImageRow]) -> tuple[np.ndarray, np.ndarray]:
    """(N, 4) numbers as the file has them and (N, 2) width and height of their images, of all that can be read."""
    known = {id_: (row.width, row.height) for id_, row in images.items() if _is_size(row)}
    sizes = np.array([known.get(id_, (math.nan, math.nan)) for id_ in annotations.image_ids.values], np.float64)
    sizes = sizes.reshape(-1, 2)[np.array(annotations.image, np.int32)]
    boxes = np.array(annotations.xywh, np.float64).reshape(-1, 4)
    kept = (np.array(annotations.crowd, np.int8) == 0) & ~np.isnan(sizes[:, 0])
    for number, entry in annotations.odd.items():
        bbox, image_id = (entry.get("bbox"), entry.get("image_id")) if isinstance(entry, dict) else (None, None)
        kept[number] = (
            isinstance(bbox, list | tuple) and len(bbox) == 4 and isinstance(image_id, int | str)
            and image_id in known and not entry.get("iscrowd")
        )  # fmt: skip
        if kept[number]:
            boxes[number], sizes[number] = [_number(value) for value in bbox], known[image_id]
    kept &= (np.abs(boxes) < LARGEST).all(axis=1)
    return boxes[kept], sizes[kept]


def _number(value: object) -> float:
    """NaN for what is no number of pixels; validation names it."""
    plain = isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST
    return float(value) if plain else math.nan


def _is_size(row: ImageRow) -> bool:
    return all(isinstance(side, int | float) and 0 < side < LARGEST for side in (row.width, row.height))


def _readings(boxes: np.ndarray) -> dict[str, np.ndarray]:
    """Corners (N, 4) by format that the numbers are taken to be in."""
    first, second = boxes[:, :2], boxes[:, 2:]
    return {
        "xywh": np.concatenate([first, first + second], axis=1),
        "xyxy": boxes,
        "cxcywh": np.concatenate([first - second / 2, first + second / 2], axis=1),
    }


def _outside(corners: np.ndarray, sizes: np.ndarray, rounding: float = PIXELS) -> np.ndarray:
    """(N,) bool: boxes without extent, or outside their image by more than a slip."""
    sides = corners[:, 2:] - corners[:, :2]
    slip = np.maximum(OVERSHOOT * sides, rounding)
    return ((sides <= 0) | (corners[:, :2] < -slip) | (corners[:, 2:] > sizes + slip)).any(axis=1)
