"""In which format the boxes of a whole file are: corners, centres and fractions given as COCO's are recognised.

One box cannot tell: [10, 10, 40, 50] is a box in every format. Many can: read in the wrong way some leave their image,
read in the right way none does. A file whose boxes stay in their images as [x, y, width, height] is never doubted.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

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


class BoxFormats:
    """What the boxes of a file tell of their format, added up over its parts."""

    def __init__(self):
        self.boxes = 0
        self.outside = Counter()  # boxes that leave their image, by the format they are read in
        # those in images that are large enough: how many, of small numbers, of whole ones, outside as fractions
        self.large, self.small, self.whole, self.outside_one = 0, 0, 0, Counter()

    def add(self, annotations: Iterable, images: Mapping) -> None:
        """Takes in a part of a file.

        Args:
            annotations: records of a COCO document; crowd regions and records that cannot be read do not count.
            images: by image id, mappings with `width` and `height`.
        """
        boxes, sizes = _arrays(annotations, images)
        self.boxes += len(boxes)
        self.outside.update({name: int(_outside(corners, sizes).sum()) for name, corners in _readings(boxes).items()})
        boxes = boxes[sizes.min(axis=1, initial=math.inf) >= SMALLEST_SIDE]
        one = np.ones((len(boxes), 2))
        self.large += len(boxes)
        self.small += int((np.abs(boxes) <= LARGEST_FRACTION).all(axis=1).sum())
        self.whole += int((boxes % 1 == 0).all(axis=1).sum())
        self.outside_one.update({name: int(_outside(corners, one, 0.01).sum())
                                 for name, corners in _readings(boxes).items()})  # fmt: skip

    def fault(self) -> str | None:
        """What is wrong with the format, and what mends it, in one sentence; None: nothing, or too few boxes."""
        if self.large >= EVIDENCE and self.small >= MOST * self.large and self.whole < 0.5 * self.large:
            return self._fractions()  # no number exceeds 1 and most are no whole ones, as no objects in pixels are
        doubtful = self.outside["xywh"]
        other = min(("xyxy", "cxcywh"), key=lambda name: self.outside[name])
        wrong = self.outside[other]
        if self.boxes < EVIDENCE or doubtful < EVIDENCE or wrong * TIMES_BETTER > doubtful:
            return None
        called, formula = NAMES[other]
        return (f"the boxes look like {called}, expected [x, y, width, height]: read as such {doubtful} of "
                f"{self.boxes} leave their image, read as {called} {wrong or 'none'} would; write every bbox as "
                f"[{', '.join(formula)}], or clip the boxes to their images if they are [x, y, width, height] after "
                "all")  # fmt: skip

    def _fractions(self) -> str:
        name = min(_READ_AS, key=lambda name: self.outside_one[name])
        called, formula = NAMES[name]
        others = [NAMES[other][0] for other in _READ_AS
                  if other != name and self.outside_one[other] == self.outside_one[name]]  # fmt: skip
        called += f" (or {' or '.join(others)}: these boxes cannot tell)" if others else ""
        parts = (f"({part}) * {side}" if " " in part else f"{part} * {side}"
                 for part, side in zip(formula, ("W", "H", "W", "H"), strict=True))  # fmt: skip
        return (f"the boxes have numbers from 0 to 1 ({self.large} boxes), which look like fractions of the image, "
                f"{called}; expected pixels [x, y, width, height]: write every bbox as [{', '.join(parts)}] with the "
                "image's width W and height H")  # fmt: skip


def _arrays(annotations: Iterable, images: Mapping) -> tuple[np.ndarray, np.ndarray]:
    """(N, 4) numbers as the file has them and (N, 2) width and height of their images, of all that can be read."""
    boxes, sizes = [], []
    known = {id_: (row["width"], row["height"]) for id_, row in images.items() if _is_size(row)}
    for entry in annotations:
        if not isinstance(entry, dict) or entry.get("iscrowd"):
            continue
        bbox, image_id = entry.get("bbox"), entry.get("image_id")
        if isinstance(bbox, list | tuple) and len(bbox) == 4 and isinstance(image_id, int | str) and image_id in known:
            boxes.append(bbox)
            sizes.append(known[image_id])
    try:
        numbers = np.array(boxes, dtype=np.float64).reshape(-1, 4)
    except (ValueError, TypeError, OverflowError):  # something in them is no number: one by one, which takes seconds
        numbers = np.array([[_number(value) for value in bbox] for bbox in boxes]).reshape(-1, 4)
    finite = (np.abs(numbers) < LARGEST).all(axis=1)
    return numbers[finite], np.array(sizes, dtype=np.float64).reshape(-1, 2)[finite]


def _number(value: object) -> float:
    """NaN for what is no number of pixels; validation names it."""
    plain = isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST
    return float(value) if plain else math.nan


def _is_size(row: Mapping) -> bool:
    return all(isinstance(row[key], int | float) and 0 < row[key] < LARGEST for key in ("width", "height"))


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
