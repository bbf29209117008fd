"""Meaning of a line of YOLO's label files: a box, a polygon, run lengths or key points, and what follows them.

A line itself does not say what its numbers mean; all lines of a split together decide this. Numbers that could mean two
things are a fault, because a wrong guess would give wrong boxes without a warning.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import chain

UNSAID = object()  # `kpt_shape` if data.yaml does not mention it
RUNS = "rle"  # the second word of a line with run lengths
VISIBILITY = (0, 1, 2)  # of key points: not labelled, hidden, visible
MAX_FRACTION = 2.0  # a larger number is not a slip of a box at the border
REMEDY = "say so by `kpt_shape: [points, 2 or 3]` in data.yaml, or by `kpt_shape: null` that these are polygons"
ROTATED = (
    "the fifth number of a line is neither a confidence from 0 to 1 nor a track: boxes may be turned by it; expected a "
    "class and 4 numbers, or the four corners of turned boxes"
)


class Rows:
    """The meaning of the numbers after the class of a line, decided by all lines of a split.

    The meaning depends on how many numbers there are. 4: a box. 5: a box and its confidence or track, as in
    predictions. 6: a box, its confidence and a track; or a triangle, in data that have larger polygons too, or if the
    box would extend beyond the image. 8 and more, even: a polygon, with its confidence and a track if all lines can end
    in these. 7 and more, odd: a polygon and its confidence or track. With `kpt_shape` in data.yaml more than 5 numbers
    are a box and key points.

    Args:
        files: the lines of each label file of the split.
        shape: `kpt_shape` of data.yaml; None: data.yaml says that there are no key points; `UNSAID`: data.yaml does not
            mention key points.
    """

    def __init__(self, files: Iterable[Sequence[str]], shape: object = UNSAID):
        self.shape = shape
        self.is_rotated = False  # some fifth number can only be an angle
        self.has_polygons = False
        all_end_in_track = True
        some_end_in_track = False
        poses = _Poses()
        for line in chain.from_iterable(files):
            if line.count(" ") + line.count("\t") < 5:  # a box, as most are
                continue
            numbers = numbers_of(line)[1:]
            if len(numbers) == 5:
                self.is_rotated |= not _is_share_or_track(numbers[4])
            elif len(numbers) >= 6 and len(numbers) % 2 == 0:
                self.has_polygons |= len(numbers) >= 8
                all_end_in_track &= _may_end_in_track(numbers)
                some_end_in_track |= numbers[-1] > 1
            if len(numbers) >= 7 and shape is UNSAID:
                poses.add(numbers)
        self.is_tracked = all_end_in_track and some_end_in_track
        self.may_be_tracked = all_end_in_track and not some_end_in_track
        self.pose_counts = poses.counts()

    def box_of(self, numbers: Sequence[float]) -> tuple[tuple[float, float, float, float] | None, str]:
        """Return (box, "") or (None, fault) of a line; the box is xyxy in fractions of the image.

        numbers: the numbers of the line without the class.
        """
        count = len(numbers)
        if count == 4:
            return _cxcywh_to_xyxy(numbers), ""
        if count == 5:
            return (None, ROTATED) if self.is_rotated else (_cxcywh_to_xyxy(numbers), "")
        if self.shape not in (UNSAID, None):
            return self._box_with_points(numbers)
        if count in self.pose_counts:
            return None, f"{count} numbers look like a box with key points, and would be read as a polygon; {REMEDY}"
        if self.is_tracked and count % 2 == 0:
            return _box_or_polygon(numbers[:-2]), ""
        if count == 6:
            return self._box_of_six(numbers)
        if count % 2 == 0:
            return self._box_of_polygon(numbers)
        is_point = self.shape is UNSAID and count == 7 and numbers[6] in VISIBILITY
        if is_point or not _is_share_or_track(numbers[-1]):
            return None, (
                f"{count} numbers are not a polygon; expected pairs x y, or pairs and a confidence from 0 to 1 or a "
                "track. Of key points say `kpt_shape: [points, 2 or 3]` in data.yaml"
            )
        return _around(numbers[:-1]), ""

    def polygon_of(self, numbers: Sequence[float]) -> Sequence[float] | None:
        """Return the corners x, y, x, y, ... in fractions of a line that `box_of` accepts; None of any other line."""
        count = len(numbers)
        if count < 6 or self.shape not in (UNSAID, None):
            return None
        if self.is_tracked and count % 2 == 0:
            return numbers[:-2] if count > 6 else None
        if count == 6 and numbers[5] > 1 and _is_track(numbers[5]):
            return None
        corners = numbers[: count - count % 2]
        is_closed = corners[:2] == corners[-2:]
        return corners[:-2] if is_closed else corners

    def _box_with_points(self, numbers: Sequence[float]) -> tuple[tuple[float, float, float, float] | None, str]:
        """Return the box of a line of more than 5 numbers in data with key points."""
        try:
            points, values = map(int, self.shape)
        except (TypeError, ValueError):
            return None, f"`kpt_shape` of data.yaml is {self.shape!r}; expected [points, 2 or 3]"
        expected = 4 + points * values
        behind = (0, 1, 2)  # nothing, a confidence, a track too
        if len(numbers) - expected in behind or len(numbers) - 4 in behind:
            return _cxcywh_to_xyxy(numbers), ""
        return None, (
            f"{len(numbers)} numbers; expected a box and {points * values} numbers of key points, as `kpt_shape: "
            f"[{points}, {values}]` in data.yaml says"
        )

    def _box_of_six(self, numbers: Sequence[float]) -> tuple[tuple[float, float, float, float] | None, str]:
        """Return the box of a line of 6 numbers, where not all lines end in a track."""
        if numbers[5] > 1 and _is_track(numbers[5]):
            return _cxcywh_to_xyxy(numbers), ""
        cannot_be_box = not _is_inside(_cxcywh_to_xyxy(numbers)) and not _is_track(numbers[5])
        if cannot_be_box or self.has_polygons and not self.may_be_tracked:
            return _around(numbers), ""
        return None, (
            "6 numbers can be a triangle, or a box with its confidence and a track; leave out what is behind the "
            "first 4, or write the first corner of the triangle once more at its end"
        )

    def _box_of_polygon(self, numbers: Sequence[float]) -> tuple[tuple[float, float, float, float] | None, str]:
        """Return the box of a line of an even count from 8 on, where not all lines end in a track."""
        box = _around(numbers)
        may_end_in_track = self.may_be_tracked or numbers[-1] > 1 and _may_end_in_track(numbers)
        if may_end_in_track and box != _around(numbers[:-2]):
            return None, (
                f"the last two of {len(numbers)} numbers can be a corner of a polygon, or its confidence and track; "
                "leave out what is behind the polygon, or write its first corner once more at its end"
            )
        return box, ""


class _Poses:
    """Test which lines of 7 and more numbers can be boxes with key points.

    If points have a visibility, which is 0, 1 or 2, all lines with the same count of numbers decide. Else all lines
    must look like this and have the same count, which polygons seldom have: one of them may look like points by chance.
    """

    def __init__(self):
        self._all_may_be = True
        self._are_sure: dict[int, bool] = {}  # by the count of numbers

    def add(self, numbers: Sequence[float]) -> None:
        """Add the numbers of one line."""
        count = len(numbers)
        were_sure = self._are_sure.get(count, True)
        self._are_sure[count] = were_sure and _are_points(numbers[4:], 3, numbers, VISIBILITY)
        self._all_may_be = self._all_may_be and _may_be_pose(numbers)

    def counts(self) -> set[int]:
        """Return how many numbers the lines have that look like key points."""
        if self._all_may_be and len(self._are_sure) == 1:
            return set(self._are_sure)
        return {count for count, is_sure in self._are_sure.items() if is_sure}


def _may_be_pose(numbers: Sequence[float]) -> bool:
    """Return whether numbers can be a box (centre, size) and points in it, perhaps with a confidence and a track."""
    is_turned_box = len(numbers) in (8, 9) and _is_parallelogram(numbers)
    if is_turned_box or not _is_inside(_cxcywh_to_xyxy(numbers)):
        return False
    for behind in (0, 1, 2):
        end = len(numbers) - behind
        if all(map(_is_share_or_track, numbers[end:])):
            points = numbers[4:end]
            if _are_points(points, 2, numbers) or _are_points(points, 3, numbers):
                return True
    return False


def _are_points(numbers: Sequence[float], step: int, box: Sequence[float], visibility: Sequence[float] = ()) -> bool:
    """Return whether numbers can be key points in a box (centre, size).

    step: numbers of each point; the third is a visibility, one of those that are given, else also a confidence.
    """
    if not numbers or len(numbers) % step:
        return False
    third = numbers[2::3] if step == 3 else ()
    if visibility:
        are_flags = all(flag in visibility for flag in third)
    else:
        are_flags = all(0 <= flag <= 1 or flag == 2 for flag in third)
    if not are_flags:
        return False
    left, top, right, bottom = _cxcywh_to_xyxy(box)
    points = zip(numbers[0::step], numbers[1::step], strict=True)
    labelled = [(x, y) for x, y in points if (x, y) != (0, 0)]
    for x, y in labelled:
        in_columns = left - 0.02 <= x <= right + 0.02
        in_rows = top - 0.02 <= y <= bottom + 0.02
        if not (in_columns and in_rows):
            return False
    return bool(labelled)


def fault_of_fractions(numbers: Sequence[float], box: Sequence[float]) -> str:
    """Return why the numbers of a box or a polygon cannot be fractions of the image; "" if they can.

    Numbers slightly beyond the image are possible: such boxes are clipped.

    box: xyxy of the same numbers.
    """
    left, top, right, bottom = box
    is_outside = right <= 0 or bottom <= 0 or left >= 1 or top >= 1
    largest = max(map(abs, numbers))
    if largest <= MAX_FRACTION and not is_outside:
        return ""
    rule = "YOLO rows are fractions of the image (0 to 1)"
    if largest > MAX_FRACTION and all(number == 0 or abs(number) >= 1 for number in numbers):
        return f"{rule}; these look like pixels"
    return f"{rule}; this box lies outside of it" if is_outside else f"{rule}; {largest:g} is far beyond it"


def _may_end_in_track(numbers: Sequence[float]) -> bool:
    """Return whether the last two numbers can be a confidence and the number of a track."""
    return 0 <= numbers[-2] <= 1 and _is_track(numbers[-1])


def _is_track(number: float) -> bool:
    """Return whether a number can be that of a track, which are counted from 0 or 1."""
    return number >= 0 and number % 1 == 0


def _is_share_or_track(number: float) -> bool:
    """Return whether a number behind a box can be its confidence or its track; in 32 bits a 1 may be slightly larger.
    """
    return 0 <= number <= 1.0001 or _is_track(number)


def _is_parallelogram(numbers: Sequence[float]) -> bool:
    """Return whether four corners are those of a rectangle, turned or not."""
    x1, y1, x2, y2, x3, y3, x4, y4 = numbers[:8]
    return abs(x1 + x3 - x2 - x4) < 0.02 and abs(y1 + y3 - y2 - y4) < 0.02


def _box_or_polygon(numbers: Sequence[float]) -> tuple[float, float, float, float]:
    """Return the box of four numbers, or the one around a polygon."""
    return _cxcywh_to_xyxy(numbers) if len(numbers) == 4 else _around(numbers)


def _cxcywh_to_xyxy(numbers: Sequence[float]) -> tuple[float, float, float, float]:
    """Return the corners of a box that is given by centre and size."""
    cx, cy, width, height = numbers[:4]
    left = cx - width / 2
    top = cy - height / 2
    right = cx + width / 2
    bottom = cy + height / 2
    return left, top, right, bottom


def _is_inside(xyxy: Sequence[float]) -> bool:
    """Return whether a box in fractions lies in its image, up to rounding."""
    return all(-0.01 <= value <= 1.01 for value in xyxy)


def _around(numbers: Sequence[float]) -> tuple[float, float, float, float]:
    """Return the box around a polygon."""
    xs = numbers[0::2]
    ys = numbers[1::2]
    return min(xs), min(ys), max(xs), max(ys)


def mask_of(words: Sequence[str]) -> dict | None:
    """Return the run lengths of a line `class rle height width counts`, a value of COCO's key `segmentation` in pixels,
    with COCO's compressed text as counts; None of any other line.
    """
    if len(words) != 5 or words[1] != RUNS:
        return None
    size = [int(word) if word.isdigit() and len(word) < 10 else word for word in words[2:4]]
    return {"size": size, "counts": words[4]}


def is_row(words: Sequence[str]) -> bool:
    """Return whether the words of a line are a class and numbers, or run lengths."""
    if len(words) < 5 or not is_number(words[0]):
        return False
    return mask_of(words) is not None or all(map(is_number, words))


def numbers_of(line: str) -> list[float]:
    """Parse the numbers of a line, the class first; empty if one of its words is not a number."""
    words = line.split()
    if not all(map(is_number, words)):
        return []
    return list(map(float, words))


def is_number(word: str) -> bool:
    """Return whether a word is a finite number."""
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False
