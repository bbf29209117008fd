"""Faults of masks are told at once, and what has no usable mask keeps its box."""

import numpy as np
import pytest
from documents import box, image
from mask_data import BLOCK, SIZE_HW, SQUARE, brush, compressed, entry, masked_coco, masks_of, opened

from toolkit.base.errors import BadInput
from toolkit.base.masks import areas, bitmap
from toolkit.data.annotations import Annotations
from toolkit.data.checks import check
from toolkit.data.segmentations import outline_lengths
from toolkit.tools.writers import write_folder

THIN = [10, 10, 10.1, 10, 10.1, 20]
OUTSIDE = [50, 5, 60, 5, 60, 25]
LEFT = [number - 10 for number in SQUARE]
FAULTS = [  # values of the annotation, what is said, whether it has no mask
    ({}, "", False),
    ({"segmentation": [[1, 2, 3, 4]]}, "at least three", True),
    ({"segmentation": []}, "there is none", True),
    ({"segmentation": [OUTSIDE]}, "outside the image", True),
    ({"segmentation": [THIN]}, "too thin", True),
    (
        {
            "segmentation": [LEFT],
            "bbox": [0, 0, 10, 15],
            "area": 150,
        },
        "exceeds the image",
        False,
    ),
    ({"area": 200}, "has 320 pixels, the annotated area is 200", False),
    ({"bbox": [0, 0, 30, 20]}, "the one around its mask [4.0, 5.0, 20.0, 25.0]", False),
    ({"segmentation": compressed(BLOCK[:20])}, "are of 40 x 20 pixels, not of the image of 40 x 30", True),
    ({"segmentation": compressed(BLOCK * 0)}, "empty", True),
    ({"iscrowd": 1, "segmentation": None}, "", False),
]


def test_all_faults_of_masks_are_told_at_once(tmp_path):
    annotations = [entry(number, **values) for number, (values, *_) in enumerate(FAULTS)]
    table = opened(masked_coco(tmp_path / "d", annotations))
    told = {problem.annotation_id: problem for problem in table.problems}
    boxes = table.boxes(masks=True)
    masks = dict(zip(boxes.ids.tolist(), boxes.extra["masks"], strict=True))
    crowds = dict(zip(boxes.ids.tolist(), boxes.iscrowd.tolist(), strict=True))
    for number, (values, words, has_none) in enumerate(FAULTS):
        assert crowds[number] == values.get("iscrowd", 0), values
        assert (masks[number] is None) == has_none, values
        assert (number in told) == bool(words), values
        if words:
            assert words in told[number].message
            assert told[number].severity == "warning"
    (pixels, _) = masks_of(table)
    assert np.array_equal(pixels[10], BLOCK)  # the mask of a crowd region without one is its box
    assert pixels[5].sum() == 150
    assert table.masks_of(0)[5][0].min() == -6  # as annotated, drawn inside alone
    assert not opened(tmp_path / "d", masks=False).problems


def test_many_faults_of_a_kind_are_one_line(tmp_path):
    annotations = [entry(number, area=100) for number in range(1, 13)]
    (problem,) = opened(masked_coco(tmp_path / "d", annotations)).problems
    assert problem.message.startswith("12 of 12 masks have an area that differs")
    assert "annotation 1:" in problem.message


def test_data_without_masks_are_refused(tmp_path):
    folder = masked_coco(tmp_path / "d", [entry(1, segmentation=[]), entry(2, segmentation=[[1, 2]])])
    with pytest.raises(BadInput, match=r"none of its 2 objects has a mask(.|\n)*expected at least three"):
        opened(folder)
    write_folder(opened(folder, masks=False), tmp_path / "csv", "train", "csv")
    with pytest.raises(BadInput, match="masks are not read from the format 'csv'; formats with masks are coco"):
        opened(tmp_path / "csv")
    assert opened(masked_coco(tmp_path / "empty", [])).row(0)["masks"] == []


def test_crowds_taken_as_objects_have_their_masks_or_a_box_alone(tmp_path):
    annotations = [
        brush(1),
        brush(2, image=2) | {"segmentation": []},
        brush(3) | {"iscrowd": 2},
    ]
    table = opened(masked_coco(tmp_path / "d", annotations), crowds="objects", on_error="drop")
    assert table.boxes().iscrowd.tolist() == [False, False]
    assert [table.masks_of(index)[0] is None for index in (0, 1)] == [False, True]
    said = " ".join(problem.message for problem in table.problems)
    assert "no usable mask: there is none; its box alone is used" in said
    assert "`iscrowd` is 2; expected 0 or 1" in said


def test_areas_that_are_not_given_are_those_of_the_masks(tmp_path):
    annotations = [entry(1), entry(2, segmentation=[[4, 5, 20, 5, 20, 25]])]
    for one in annotations:
        del one["area"]
    folder = masked_coco(tmp_path / "d", annotations)
    table = opened(folder)
    assert table.boxes().area.tolist() == areas(table.masks_of(0), SIZE_HW).tolist()
    assert opened(folder, masks=False).boxes().area.tolist() == [320, 320]


@pytest.mark.parametrize("masks", [True, False])
def test_an_object_without_a_box_has_the_box_around_its_mask(tmp_path, masks):
    without = [
        entry(1, segmentation=compressed(BLOCK), bbox=None),
        entry(
            2,
            segmentation=[SQUARE, [30, 2, 38, 2, 38.5, 9]],
            bbox=[],
        ),
        entry(3, 2, segmentation=[]),
    ]
    del without[2]["bbox"]
    table = opened(masked_coco(tmp_path / "data", without), masks=masks, on_error="drop")
    assert table.boxes().xyxy.tolist() == [[4, 5, 20, 25], [4, 2, 38.5, 25]]
    errors = [problem for problem in table.problems if problem.severity == "error"]
    assert [(error.annotation_id, error.message) for error in errors] == [(3, "`bbox` missing")]


def zigzag(corners, far):
    """A polygon whose edges go from -far to far in x, and down the picture in y."""
    x = np.where(np.arange(corners) % 2, -far, far)
    return np.stack([x, np.linspace(0, SIZE_HW[0], corners)], axis=1)


def test_polygons_that_go_far_beyond_the_picture_are_cut_and_too_long_outlines_refused(tmp_path):
    """pycocotools draws every pixel of an edge, in 80 bytes: a file of 800 bytes ended the process."""
    rings = [
        zigzag(33, 9e5),
        zigzag(30_000, 30.0),
        zigzag(4, 1000.0),
        zigzag(3, 39.0),
    ]
    annotations = [entry(number, segmentation=[ring.ravel().tolist()]) for number, ring in enumerate(rings)]
    table = opened(masked_coco(tmp_path / "data", annotations))
    shapes = table.masks_of(0)
    assert [shape is None for shape in shapes] == [False, True, False, False]
    assert max(outline_lengths(shape).sum() for shape in shapes if shape is not None) < 33 * 3 * max(SIZE_HW)
    assert np.array_equal(shapes[3][0], rings[3])  # to the last digit, because it is not that far outside
    differs = bitmap((rings[2],), SIZE_HW) != bitmap(shapes[2], SIZE_HW)
    assert differs.mean() < 0.05  # the edges of the cut polygon are rounded anew
    said = {problem.annotation_id: problem.message for problem in table.problems if "no usable" in problem.message}
    assert list(said) == [1]
    assert "its outline is 1800000 pixels long; at most 1000000 are drawn" in said[1]


def test_areas_that_are_those_of_the_boxes_throughout_are_one_line_and_those_of_the_masks_count(tmp_path):
    triangle = [[4, 5, 20, 5, 20, 25]]
    annotations = [entry(number, segmentation=triangle, area=320.0) for number in range(1, 13)]
    annotations.append(entry(13, 2))  # of a mask that is its box
    table = opened(masked_coco(tmp_path / "d", annotations))
    (problem,) = table.problems
    assert problem.message == "all 13 annotated areas are width x height of the box; those of the masks are used"
    assert table.boxes().area.tolist() == [areas(table.masks_of(0)[:1], SIZE_HW)[0]] * 12 + [320]
    annotations[0]["area"] = 200
    table = opened(masked_coco(tmp_path / "other", annotations))
    assert table.boxes().area.tolist() == [200] + [320] * 12
    assert opened(tmp_path / "other", masks=False).boxes().area.tolist() == [200] + [320] * 12


def test_an_entry_with_a_field_of_another_type_is_read_field_by_field():
    """COCO writes `iscrowd` as 0 or 1; some tools write false. Its area is still that of the mask, and compared."""
    square = [[2, 2, 8, 2, 8, 8, 2, 8]]
    columns = Annotations([{"id": 0, "name": "cell"}], masks=True)
    columns.add_image(image())
    for number, values in enumerate([{"iscrowd": False}, {"iscrowd": False, "area": 9}, {"iscrowd": "no"}], start=1):
        columns.add(
            box(
                id=number,
                bbox=[2, 2, 6, 6],
                segmentation=square,
                **values,
            )
        )
    valid = check(columns, "f.json")
    assert valid.boxes.ids.tolist() == [1, 2]
    assert valid.boxes.area.tolist() == [36.0, 9.0]
    assert [problem.message for problem in valid.problems] == [
        "`iscrowd` is 'no'; expected 0 or 1",
        "the mask has 36 pixels, the annotated area is 9; kept",
    ]
