"""Checks of the masks of objects, which describe all that is wrong with them in plain sentences.

A valid polygon costs a few operations on columns. Only polygons that these find suspicious are drawn, to count pixels.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from toolkit.base.boxes import Boxes, offsets_of
from toolkit.base.errors import BadInput
from toolkit.base.masks import Polygons, Rle, Shape, Size, areas, column_of, rectangle, tight_boxes
from toolkit.data.annotations import Annotations, ImageRow
from toolkit.data.segmentations import (
    MAX_MASK_COORDINATE_PX,
    MAX_OUTLINE_PX,
    clipped,
    near_picture,
    outline_fault,
    outline_lengths,
    polygon_areas,
)
from toolkit.data.table import Problem

ROUNDING_PX = 0.01  # as far as this, rounding alone puts a corner outside
AREA_TOLERANCE = 0.05  # of the annotated area
BOX_TOLERANCE = 0.05  # of a side of the box, and
BOX_TOLERANCE_PX = 2.0  # at least so many pixels: masks and boxes are rounded differently
CHECKED_AT_ONCE = 8192  # masks whose corners are copied for a check
SMALL_PX = 16.0  # square pixels; a polygon of less area may have no pixel at all, so it is drawn
# Objects with the same kind of fault. Of more, one problem says how many: a program may have written each area as
# width x height, and a hundred thousand problems would fill memory and cache.
MAX_NAMED = 10
UNUSABLE = "objects have no mask that can be used; their boxes are trained and judged, and no mask"
AREA_OF_BOX = "annotated areas are width x height of the box; those of the masks are used"
SAME_AREA = 1e-3  # relative difference of two areas that are one, as files round them
REPAIRED = "masks were repaired"
OTHER_AREA = "masks have an area that differs by more than 5 % from the annotated `area`, which is kept"
OTHER_BOX = "boxes are not those around their masks; both are kept"

Found = dict[str, list[tuple[int, str]]]  # (row of the box, message) of each object, by kind of fault


def with_masks(
    boxes: Boxes,
    order: np.ndarray,
    annotations: Annotations,
    file: str,
    images: Sequence[ImageRow],
    problems: list[Problem],
) -> Boxes:
    """Return the boxes with the column `extra["masks"]`: their masks as annotated.

    Of a mask that exceeds its image, the part inside is checked here, and drawn later. What is far outside is cut off.

    An object without a mask that can be used has None, with a warning. A crowd region without a mask gets its box as
    mask. An object without an annotated area gets that of its mask, and so do all if every area is that of the box.

    Args:
        boxes: checked boxes, sorted by image. order: (N,) the number of the annotation of each.
        file: name of the data. images: the images of the boxes, in the order of these.
        problems: list to which the problems found are added.

    Raises BadInput: there are objects, but not one mask that can be used.
    """
    found: Found = {UNUSABLE: [], REPAIRED: [], OTHER_AREA: [], OTHER_BOX: []}
    sizes_hw = _sizes_hw(boxes, images)
    whole = [annotations.masks.get(number) for number in order.tolist()]
    shapes = _usable_shapes(whole, boxes, order, annotations, sizes_hw, found)
    has_mask = np.array([shape is not None for shape in shapes], bool)
    has_size = np.array([size is not None for size in sizes_hw], bool)
    if len(boxes) and not has_mask.any():
        fault = f"{file}: none of its {len(boxes)} objects has a mask that can be used; leave model.masks out"
        first = [message for _, message in found[UNUSABLE][:MAX_NAMED]]
        raise BadInput([fault, *dict.fromkeys(first)])

    given = np.array(annotations.area, np.float64)[order]
    compared = np.flatnonzero(has_mask & has_size & ~boxes.iscrowd)
    of_boxes = _areas_of_boxes(compared, shapes, boxes, given, sizes_hw)
    if len(of_boxes):
        given[of_boxes] = np.nan
        problems.append(Problem("warning", file, None, None, f"all {len(of_boxes)} {AREA_OF_BOX}"))
    lacks_area = has_mask & has_size & np.isnan(given)
    area = boxes.area.copy()
    for row in np.flatnonzero(lacks_area).tolist():
        area[row] = areas([shapes[row]], sizes_hw[row])[0]
    _compare(compared, shapes, boxes, given, sizes_hw, found)

    stored = []  # not cut to the image, which would move corners, and with them pixels at the border
    for row, shape in enumerate(whole):
        of_crowd = rectangle(boxes.xyxy[row]) if boxes.iscrowd[row] else None
        stored.append(shape if has_mask[row] else of_crowd)
    problems += _as_problems(found, boxes, images, file)
    extra = {**boxes.extra, "masks": column_of(stored)}
    return replace(boxes, area=area, extra=extra)


def _sizes_hw(boxes: Boxes, images: Sequence[ImageRow]) -> list[Size | None]:
    """Return height and width of the image of each box; None for an image without a plausible size, which is reported.
    """
    sizes = []
    for image in images:
        sides = (image.height, image.width)
        has_size = all(isinstance(side, int | float) and 0 < side < MAX_MASK_COORDINATE_PX for side in sides)
        sizes.append((int(image.height), int(image.width)) if has_size else None)
    return [sizes[index] for index in boxes.image_index.tolist()]


def _usable_shapes(
    whole: list[Shape],
    boxes: Boxes,
    order: np.ndarray,
    annotations: Annotations,
    sizes_hw: Sequence[Size | None],
    found: Found,
) -> list[Shape]:
    """Return the mask of each box inside its image, None if it has none that can be used.

    whole: the masks as annotated; polygons that go far beyond their image are cut in this list.
    """
    shapes = list(whole)
    height, width = np.array([size or (np.inf, np.inf) for size in sizes_hw]).reshape(-1, 2).T
    area, around, length = _by_corners(shapes)
    is_inside = (around[:, :2] >= 0).all(axis=1) & (around[:, 2] <= width) & (around[:, 3] <= height)
    is_plain = is_inside & (area >= SMALL_PX) & (length <= MAX_OUTLINE_PX)
    has_faults = np.isin(order, list(annotations.mask_faults))
    for row in np.flatnonzero(~is_plain | has_faults).tolist():
        faults = list(annotations.mask_faults.get(int(order[row]), ()))
        if shapes[row] is not None and sizes_hw[row] is not None:
            whole[row] = near_picture(whole[row], sizes_hw[row])
            shapes[row], fault = _inside(whole[row], sizes_hw[row])
            faults += [fault] if fault else []
        if shapes[row] is not None and faults:
            found[REPAIRED].append((row, f"mask: {'; '.join(faults)}"))
        elif shapes[row] is None and not boxes.iscrowd[row]:
            why = "; ".join(faults) or "there is none"
            found[UNUSABLE].append((row, f"no usable mask: {why}; its box alone is used"))
    return shapes


def _inside(shape: Polygons | Rle, size_hw: Size) -> tuple[Shape, str]:
    """Return a mask inside an image of this size, None if no pixel is left of it, and a phrase if it was changed."""
    height, width = size_hw
    image = f"the image of {width} x {height}"
    if isinstance(shape, Rle):
        if shape.size_hw != size_hw:
            return None, f"its run lengths are of {shape.size_hw[1]} x {shape.size_hw[0]} pixels, not of {image}"
        return (shape, "") if areas([shape], size_hw)[0] else (None, "it is empty")
    if not shape:  # all of it was cut off
        return None, f"it lies outside {image}"
    fault = outline_fault(shape)
    if fault:
        return None, fault
    low = min(ring.min() for ring in shape)
    right, bottom = np.max([ring.max(axis=0) for ring in shape], axis=0)
    outside = max(-low, right - width, bottom - height)
    change = ""
    if outside > ROUNDING_PX:
        shape = clipped(shape, size_hw)
        change = f"it exceeds {image}; only the part inside counts"
        if not shape or not areas([shape], size_hw)[0]:
            return None, f"it lies outside {image}"
    if polygon_areas(shape).sum() < SMALL_PX and not areas([shape], size_hw)[0]:
        return None, "it is too thin to have a pixel"
    return shape, change


def mended_areas(boxes: Boxes, images: Sequence[ImageRow]) -> dict[int, float]:
    """Return, by row, the areas of the masks of those objects whose annotated area differs from it by more than 5 %.

    boxes: with masks, as of `with_masks`. images: of the boxes.
    """
    shapes = boxes.extra["masks"].tolist()
    rows = np.flatnonzero(~boxes.iscrowd)
    area, _, _ = _by_corners([shapes[row] for row in rows.tolist()])
    return _other_areas(rows, area, shapes, boxes.area, _sizes_hw(boxes, images))


def _other_areas(
    rows: np.ndarray, by_corners: np.ndarray, shapes: Sequence[Shape], given: np.ndarray, sizes_hw: Sequence[Size]
) -> dict[int, float]:
    """Return, by row, the areas of masks that differ from those given, in these rows.

    by_corners: (R,) areas by the corners. What seems to differ by these may fit the pixels, since polygons may overlap.
    """
    found = {}
    for row in rows[_differs(by_corners, given[rows])].tolist():
        of_pixels = areas([shapes[row]], sizes_hw[row])
        if _differs(of_pixels, given[row : row + 1])[0]:
            found[row] = float(of_pixels[0])
    return found


def _areas_of_boxes(
    rows: np.ndarray, shapes: Sequence[Shape], boxes: Boxes, given: np.ndarray, sizes_hw: Sequence[Size]
) -> np.ndarray:
    """Return those of the rows that have an annotated area, if every one is that of the box and some are not that of
    the mask: a program has then written width x height. Else return none.
    """
    rows = rows[~np.isnan(given[rows])]
    sides = boxes.xyxy[rows, 2:] - boxes.xyxy[rows, :2]
    of_box = sides.prod(axis=1)
    if (np.abs(boxes.area[rows] - of_box) > SAME_AREA * of_box).any():
        return rows[:0]
    area, _, _ = _by_corners([shapes[row] for row in rows.tolist()])
    return rows if _other_areas(rows, area, shapes, given, sizes_hw) else rows[:0]


def _compare(
    rows: np.ndarray, shapes: Sequence[Shape], boxes: Boxes, given: np.ndarray, sizes_hw: Sequence[Size], found: Found
) -> None:
    """Note the rows whose annotated area, or whose box, does not fit the mask.

    given: (N,) annotated areas, NaN if missing.
    """
    area, around, _ = _by_corners([shapes[row] for row in rows.tolist()])
    for row, of_mask in _other_areas(rows, area, shapes, given, sizes_hw).items():
        message = f"the mask has {of_mask:.0f} pixels, the annotated area is {given[row]:g}; kept"
        found[OTHER_AREA].append((row, message))
    for row in rows[_is_other_box(around, boxes.xyxy[rows])].tolist():
        box = tight_boxes([shapes[row]], sizes_hw[row])
        if _is_other_box(box, boxes.xyxy[row : row + 1])[0]:
            message = f"the box is {_written(boxes.xyxy[row])}, the one around its mask {_written(box[0])}; both kept"
            found[OTHER_BOX].append((row, message))


def _by_corners(shapes: Sequence[Shape]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return areas (N,), boxes (N, 4) xyxy and lengths of outline (N,) in pixels of polygons, only by their corners;
    NaN for all other masks.

    Where polygons of a mask overlap, the area is larger than that of its pixels.
    """
    area = np.full(len(shapes), np.nan)
    around = np.full((len(shapes), 4), np.nan)
    length = np.full(len(shapes), np.nan)
    rows = [row for row, shape in enumerate(shapes) if shape is not None and not isinstance(shape, Rle)]
    for start in range(0, len(rows), CHECKED_AT_ONCE):
        some = rows[start : start + CHECKED_AT_ONCE]
        rings = [ring for row in some for ring in shapes[row]]
        first_ring = offsets_of([len(shapes[row]) for row in some])[:-1]
        first_corner = offsets_of([len(ring) for ring in rings])[first_ring]
        corners = np.concatenate(rings)
        area[some] = np.add.reduceat(polygon_areas(rings), first_ring)
        length[some] = np.add.reduceat(outline_lengths(rings), first_ring)
        around[some, :2] = np.minimum.reduceat(corners, first_corner)
        around[some, 2:] = np.maximum.reduceat(corners, first_corner)
    return area, around, length


def _differs(area: np.ndarray, given: np.ndarray) -> np.ndarray:
    """Return (N,) bool, True where `area` is NaN, which is to be measured; False where no area is given."""
    return ~np.isnan(given) & ~(np.abs(area - given) <= AREA_TOLERANCE * given)


def _is_other_box(around_xyxy: np.ndarray, xyxy: np.ndarray) -> np.ndarray:
    """Return (N,) bool, whether an edge of the box is not where that of the mask is; True where that is NaN."""
    sides = np.tile(xyxy[:, 2:] - xyxy[:, :2], 2)
    tolerance = np.maximum(BOX_TOLERANCE_PX, BOX_TOLERANCE * sides)
    return ~(np.abs(around_xyxy - xyxy) <= tolerance).all(axis=1)


def _written(xyxy: np.ndarray) -> str:
    return "[" + ", ".join(f"{value:.1f}" for value in xyxy.tolist()) + "] (xyxy)"


def _as_problems(found: Found, boxes: Boxes, images: Sequence[ImageRow], file: str) -> list[Problem]:
    problems = []
    for kind, of_rows in found.items():
        if len(of_rows) > MAX_NAMED:
            of_objects = int((~boxes.iscrowd).sum())
            examples = "; ".join(f"annotation {boxes.ids[row]}: {message}" for row, message in of_rows[:3])
            message = f"{len(of_rows)} of {of_objects} {kind}; the first are {examples}"
            problems.append(Problem("warning", file, None, None, message))
            continue
        for row, message in of_rows:
            image = images[boxes.image_index[row]]
            name = image.file_name if isinstance(image.file_name, str) else file
            problems.append(Problem("warning", name, image.image_id, int(boxes.ids[row]), message))
    return problems
