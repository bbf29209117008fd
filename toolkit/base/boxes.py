"""Boxes of many images as NumPy columns: the representation of boxes everywhere from annotation file to report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

COLUMNS = ("xyxy", "labels", "scores", "area", "iscrowd", "ids")


@dataclass(frozen=True)
class Boxes:
    """N boxes of I images, flat. Image i has the rows offsets[i]:offsets[i + 1].

    offsets: (I + 1,) int64, from 0 to N.
    xyxy: (N, 4) float64, left, top, right, bottom in pixels of the original image.
    labels: (N,) int64 from 0.
    scores: (N,) float64; None: the boxes are annotated.
    area: (N,) float64, square pixels; the area of the mask if the file has one.
    iscrowd: (N,) bool.
    ids: (N,) int64, as in the file; None: the boxes have no ids.
    extra: further columns (N, ...) by name, such as `attributes`.
    """

    offsets: np.ndarray
    xyxy: np.ndarray
    labels: np.ndarray
    scores: np.ndarray | None
    area: np.ndarray
    iscrowd: np.ndarray
    ids: np.ndarray | None = None
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def found(cls, counts: Sequence[int], xyxy: np.ndarray, scores: np.ndarray, labels: np.ndarray) -> "Boxes":
        """Build detections from `counts` (I,) for each image, and their boxes (N, 4), scores (N,) and labels (N,)."""
        xyxy = np.asarray(xyxy, np.float64).reshape(-1, 4)
        labels = np.asarray(labels, np.int64)
        scores = np.asarray(scores, np.float64)
        sides = xyxy[:, 2:] - xyxy[:, :2]
        area = sides.prod(axis=1)
        iscrowd = np.zeros(len(xyxy), bool)
        return cls(offsets_of(counts), xyxy, labels, scores, area, iscrowd)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_images(self) -> int:
        """The number I of images, those without boxes included."""
        return len(self.offsets) - 1

    @cached_property
    def image_index(self) -> np.ndarray:
        """The position of each box's image, (N,) int64."""
        counts = np.diff(self.offsets)
        return np.repeat(np.arange(self.num_images), counts)

    @property
    def xywh(self) -> np.ndarray:
        """The boxes as left, top, width, height, (N, 4) float64."""
        left_top = self.xyxy[:, :2]
        sides = self.xyxy[:, 2:] - left_top
        return np.concatenate([left_top, sides], axis=1)

    def __getitem__(self, rows: np.ndarray) -> "Boxes":
        """Return the boxes that a bool mask (N,) or row numbers select; the images of the rows must not decrease."""
        return self.take(rows, self.image_index[rows])

    def take(self, rows: np.ndarray, images: np.ndarray) -> "Boxes":
        """Return the boxes of these rows, assigned to other images.

        rows: a bool mask (N,) or row numbers. images: the index of the image of each selected row, not decreasing.
        """
        offsets = np.searchsorted(images, np.arange(self.num_images + 1))
        return self.in_lists(offsets, rows)

    def in_lists(self, offsets: np.ndarray, rows: np.ndarray) -> "Boxes":
        """Return the boxes of these rows as those of J other images.

        offsets: (J + 1,), where the rows of each begin. rows: a bool mask (N,) or row numbers.
        """
        columns = {}
        for name in COLUMNS:
            column = getattr(self, name)
            columns[name] = None if column is None else column[rows]
        extra = {name: column[rows] for name, column in self.extra.items()}
        return Boxes(offsets, **columns, extra=extra)

    def of_images(self, images: np.ndarray) -> "Boxes":
        """Return some images with their boxes.

        images: a bool mask (I,), or positions in any order, which may repeat.
        """
        return self.in_lists(*rows_of_lists(self.offsets, images))

    @classmethod
    def concatenated(cls, parts: Sequence["Boxes"]) -> "Boxes":
        """Return the boxes of the images of all parts, in their order.

        A column that one of the parts lacks is left out.
        """
        columns = {}
        for name in COLUMNS:
            values = [getattr(part, name) for part in parts]
            is_lacking = any(value is None for value in values)
            columns[name] = None if is_lacking else np.concatenate(values)
        extra = {}
        for name in parts[0].extra:
            if all(name in part.extra for part in parts):
                extra[name] = np.concatenate([part.extra[name] for part in parts])
        return cls(_offsets_of_all(parts), **columns, extra=extra)

    def of_image(self, index: int) -> slice:
        """Return the slice of rows that belong to the image at position `index`."""
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))


@dataclass(frozen=True)
class Relations:
    """R relations of I images, flat. Image i has the rows offsets[i]:offsets[i + 1].

    offsets: (I + 1,) int64. subject, object: (R,) int64, positions among the boxes of their image.
    predicate: (R,) int64 from 0.
    """

    offsets: np.ndarray
    subject: np.ndarray
    object: np.ndarray
    predicate: np.ndarray

    def __len__(self) -> int:
        return len(self.predicate)

    @classmethod
    def none(cls, images: int) -> "Relations":
        """Return an empty set of relations for this many images."""
        empty = np.zeros(0, np.int64)
        return cls(np.zeros(images + 1, np.int64), empty, empty, empty)

    def of_images(self, images: np.ndarray) -> "Relations":
        """Return some images with their relations.

        images: a bool mask (I,), or positions in any order, which may repeat.
        """
        offsets, rows = rows_of_lists(self.offsets, images)
        return Relations(offsets, self.subject[rows], self.object[rows], self.predicate[rows])

    @classmethod
    def concatenated(cls, parts: Sequence["Relations"]) -> "Relations":
        """Return the relations of the images of all parts, in their order."""
        return cls(
            _offsets_of_all(parts),
            np.concatenate([part.subject for part in parts]),
            np.concatenate([part.object for part in parts]),
            np.concatenate([part.predicate for part in parts]),
        )

    def of_boxes(self, boxes: Boxes, kept: np.ndarray) -> "Relations":
        """Return only the relations between boxes that a bool mask (N,) selects, re-indexed; all images stay.

        boxes: all boxes, before the selection.

        If an image keeps the boxes 0 and 2 of three, its relation (2, 0) becomes (1, 0), and (2, 1) is dropped.
        """
        num_images = len(self.offsets) - 1
        image = np.repeat(np.arange(num_images), np.diff(self.offsets))  # (R,)
        first = boxes.offsets[image]  # (R,) row of the first box of the relation's image
        subject_row = first + self.subject
        object_row = first + self.object
        both_kept = kept[subject_row] & kept[object_row]
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])  # kept boxes before each
        new_subject = before[subject_row] - before[first]
        new_object = before[object_row] - before[first]
        counts = np.bincount(image[both_kept], minlength=num_images)
        return Relations(
            offsets_of(counts),
            new_subject[both_kept],
            new_object[both_kept],
            self.predicate[both_kept],
        )


def offsets_of(counts: Sequence[int]) -> np.ndarray:
    """Return the start of the rows of each of I images, and the end, (I + 1,) int64."""
    ends = np.cumsum(counts, dtype=np.int64)
    return np.concatenate([np.zeros(1, np.int64), ends])


def _offsets_of_all(parts: Sequence[Boxes | Relations]) -> np.ndarray:
    counts = [np.diff(part.offsets) for part in parts]
    return offsets_of(np.concatenate(counts))


def rows_of_lists(offsets: np.ndarray, lists: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each of some lists begins among their rows, (J + 1,) int64, and these rows, (M,) int64.

    offsets: (I + 1,) of all lists. lists: a bool mask (I,), or positions in any order, which may repeat.

    >>> rows_of_lists(np.array([0, 2, 2, 5]), np.array([2, 0, 1]))
    (array([0, 3, 5, 5]), array([2, 3, 4, 0, 1]))
    """
    first_rows = offsets[:-1][lists]
    counts = np.diff(offsets)[lists]
    new_offsets = offsets_of(counts)
    shift = first_rows - new_offsets[:-1]  # of each list: from where its rows are put to where they are, [2, -3, -3]
    return new_offsets, np.arange(new_offsets[-1]) + np.repeat(shift, counts)


def intersection_area(a_xyxy: np.ndarray, b_xyxy: np.ndarray, pixel: int = 0) -> np.ndarray:
    """Return the area (...) that boxes (..., 4) xyxy have in common, element by element, with broadcasting.

    pixel: 1 if a box includes its last pixel and is x2 - x1 + 1 wide; 0 if it is x2 - x1 wide.
    """
    left_top = np.maximum(a_xyxy[..., :2], b_xyxy[..., :2])
    right_bottom = np.minimum(a_xyxy[..., 2:], b_xyxy[..., 2:])
    sides = right_bottom - left_top + pixel
    width = sides[..., 0].clip(min=0)
    height = sides[..., 1].clip(min=0)
    return width * height


def common_and_union(a_xyxy: np.ndarray, b_xyxy: np.ndarray, pixel: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the areas of intersection and union, (...) each; arguments as of `intersection_area`.

    The ratio of the two is the IoU.
    """
    common = intersection_area(a_xyxy, b_xyxy, pixel)
    union = _area(a_xyxy, pixel) + _area(b_xyxy, pixel) - common
    return common, union


def _area(xyxy: np.ndarray, pixel: int) -> np.ndarray:
    width = xyxy[..., 2] - xyxy[..., 0] + pixel
    height = xyxy[..., 3] - xyxy[..., 1] + pixel
    return width * height
