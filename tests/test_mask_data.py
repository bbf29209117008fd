"""Masks in data of every format: read on request, checked in words, kept in the table, written again."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from documents import box, image
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from pycocotools import mask as coco_mask

from scripts import check_data, convert
from toolkit.base.errors import BadInput
from toolkit.base.masks import Rle, areas, bitmap, column_of, from_bytes, rle, rles_of, to_bytes
from toolkit.base.outlines import one_ring, outlines
from toolkit.data.annotations import Annotations
from toolkit.data.checks import check
from toolkit.data.classes import with_classes
from toolkit.data.formats import open_dataset
from toolkit.data.segmentations import (
    clipped,
    decompressed,
    outline_lengths,
    polygon_areas,
    shape_of,
    to_segmentation,
)
from toolkit.data.splits import check_not_empty, counts_of, many_crowds, open_split
from toolkit.tools.doctor.near_duplicates import hold_out
from toolkit.tools.shapes import make_shapes
from toolkit.tools.writers import unsupported_by, write_folder

SIZE_HW = (30, 40)
SQUARE = [4, 5, 20, 5, 20, 25, 4, 25]
BLOCK = np.zeros(SIZE_HW, np.uint8)
BLOCK[5:25, 4:20] = 1


def opened(folder, split="train", masks=True, **options):
    return open_dataset(split, path=folder, cache_dir=Path(folder).parent / "cache", masks=masks, **options)


def pixels_of(table):
    """The pixels of all masks, by image."""
    found = []
    for index, (height, width) in enumerate(table.sizes_hw().tolist()):
        found.append([bitmap(shape, (height, width)) for shape in table.masks_of(index)])
    return found


def entry(number, image=1, **values):
    """An annotation of COCO with the mask `SQUARE`, whatever `values` do not say."""
    whole = {"id": number, "image_id": image, "category_id": 1, "bbox": [4, 5, 16, 20], "iscrowd": 0, "area": 320}
    return whole | {"segmentation": [SQUARE]} | values


def write_coco(folder, annotations, images=2):
    """A folder of COCO data; returns it."""
    (folder / "train").mkdir(parents=True)
    (folder / "annotations").mkdir()
    rows = []
    for number in range(1, images + 1):
        noise = np.random.default_rng(number).integers(0, 256, (*SIZE_HW, 3), np.uint8)
        Image.fromarray(noise).save(folder / "train" / f"{number}.png")
        rows.append({"id": number, "file_name": f"{number}.png", "width": SIZE_HW[1], "height": SIZE_HW[0]})
    categories = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]
    document = {"images": rows, "annotations": annotations, "categories": categories}
    (folder / "annotations" / "train.json").write_text(json.dumps(document))
    return folder


def compressed(pixels):
    """COCO's compressed run lengths of pixels (H, W), as JSON."""
    encoded = coco_mask.encode(np.asfortranarray(pixels))
    return {"size": list(pixels.shape), "counts": encoded["counts"].decode()}


def uncompressed(pixels):
    runs = []
    before = 0
    for value in pixels.T.ravel().tolist():
        if value != before or not runs:
            runs += [0] if not runs and value else []
            runs.append(0)
            before = value
        runs[-1] += 1
    return {"size": list(pixels.shape), "counts": runs}


# ---- shapes and pixels -----------------------------------------------------------------------------------------------

PIXELS = st.tuples(st.integers(1, 14), st.integers(1, 14)).flatmap(
    lambda size: arrays(np.uint8, size, elements=st.integers(0, 1))
)


@settings(deadline=None, max_examples=150)
@given(PIXELS)
def test_outlines_and_run_lengths_are_the_pixels_again(pixels):
    size_hw = pixels.shape
    rings = outlines(pixels)
    assert np.array_equal(bitmap(rings or None, size_hw), pixels)
    if rings:
        assert np.array_equal(bitmap((one_ring(rings, size_hw),), size_hw), pixels)
    for segmentation in (compressed(pixels), uncompressed(pixels)):
        shape, faults = shape_of(segmentation)
        assert not faults and np.array_equal(bitmap(shape, size_hw), pixels)
    assert decompressed(compressed(pixels)["counts"]).tolist() == uncompressed(pixels)["counts"]


def test_stored_and_written_masks_keep_every_bit():
    ring = np.random.default_rng(0).uniform(0, 30, (5, 2))
    shapes = [(ring, ring + 0.1), None, rles_of(torch.from_numpy(BLOCK)[None])[0], (ring[:3],)]
    written = json.loads(json.dumps([to_segmentation(shape) for shape in shapes]))
    for again in (from_bytes(to_bytes(shapes)), [shape_of(segmentation)[0] for segmentation in written]):
        assert again[1] is None and again[2] == shapes[2]
        for row in (0, 3):
            assert all(np.array_equal(a, b) for a, b in zip(again[row], shapes[row], strict=True))
    assert column_of(shapes)[0] is shapes[0]
    assert areas([shapes[2]] * 300, SIZE_HW).tolist() == [320] * 300  # pycocotools fails with 256


def test_masks_that_change_on_disk_are_a_sentence_that_names_file_and_image(tmp_path):
    """Any bit of them: others would be drawn, or pycocotools would write beyond its memory."""
    block = rle(shape_of([SQUARE])[0], SIZE_HW).as_json()
    annotations = [entry(1), entry(2, segmentation=block), entry(3, image=2), entry(4, image=2, segmentation=block)]
    table = opened(write_coco(tmp_path / "data", annotations))
    before = [to_bytes(table.masks_of(index)) for index in range(2)]
    content = table.arrow_files[0].read_bytes()
    start = content.rindex(before[1])
    with open(table.arrow_files[0], "r+b") as file:
        for bit in range(0, 8 * len(before[1]), 7):
            changed = bytearray(before[1])
            changed[bit // 8] ^= 1 << bit % 8
            file.seek(start)
            file.write(changed)
            file.flush()
            with pytest.raises(BadInput, match="changed.* after it was opened .the masks of 2.png .id 2.*start again"):
                table.row(1)
        assert to_bytes(table.masks_of(0)) == before[0]
        file.truncate(start + 5)
    with pytest.raises(BadInput, match="after it was opened .masks of 2.png .id 2"):
        table.boxes(masks=True)
    for wrong in (before[0][:-1], before[0] + b"\0", before[0][:3], b"\0" * 40):
        with pytest.raises(ValueError, match="checksum"):
            from_bytes(wrong)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.integers(3, 30), st.floats(105, 195))
def test_the_parts_of_a_polygon_on_both_sides_of_a_border_have_its_area(seed, corners, border):
    rng = np.random.default_rng(seed)
    # Less than half a turn apart: else the last edge can cross others, and the area has no one meaning.
    angles = (np.arange(corners) + rng.uniform(0, 0.4, corners)) * 2 * np.pi / corners
    ring = 150 + rng.uniform(5, 50, (corners, 1)) * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    for side in (0, 1):  # the right or the lower border, and the one opposite of it
        turned = ring[:, [side, 1 - side]]
        shift = np.array([border, 0.0])[[side, 1 - side]]
        size_hw = (1000, border) if side == 0 else (border, 1000)
        below = clipped((turned,), size_hw)
        beyond = clipped((turned - shift,), (1000, 1000))
        assert all(part.min() >= -1e-9 for part in (*below, *beyond))
        assert polygon_areas((*below, *beyond)).sum() == pytest.approx(polygon_areas([ring])[0], abs=1e-6)
    assert clipped((ring,), (300, 300))[0] is ring


@pytest.mark.parametrize("segmentation, said", [
    ([[1, 2, 3, 4]], "2 points; expected at least three"),
    ([[1, 2, 3, 4, 5, 6, 7]], "7 numbers; expected pairs"),
    ([[1, 2, "3", 4, 5, 6]], "not a number"),
    ([[1, 2, float("nan"), 4, 5, 6]], "not finite"),
    ([[float("nan"), 2, 1, 4, 5, 6]], "not finite"),
    ([[1, 2, 3, 4, 10**400, 6]], "far outside any picture"),
    ([SQUARE, [1, 2]], "polygon 2 of 2 has 1 point;"),
    (["x"], "expected a list"),
    ("x", "expected polygons or run lengths"),
    ({"counts": [1]}, "`size` of the run lengths"),
    ({"size": [30, 40], "counts": None}, "`counts` of the run lengths"),
    ({"size": [30, 40], "counts": [5, 6]}, "cover 11 pixels; their size 30 x 40 has 1200"),
    ({"size": [30, 40], "counts": [-5, 1205]}, "cannot be read"),
    ({"size": [30, 40], "counts": "no code!"}, "cannot be read"),
    ({"size": [30, 40], "counts": compressed(BLOCK)["counts"][:-1]}, "cannot be read"),
    ({"size": [10, 10], "counts": compressed(BLOCK)["counts"]}, "cover 1200 pixels"),
])  # fmt: skip
def test_faults_of_masks_are_told(segmentation, said):
    shape, faults = shape_of(segmentation)
    assert said in faults[0] and len(faults) == 1
    assert (shape is None) == (segmentation[0] is not SQUARE if isinstance(segmentation, list) else True)


def test_run_lengths_that_are_written_as_floats_are_whole_numbers():
    runs = uncompressed(BLOCK)
    as_floats = {"size": [30.0, 40.0], "counts": [float(run) for run in runs["counts"]]}
    assert shape_of(as_floats) == shape_of(runs) == (rle(shape_of(runs)[0], SIZE_HW), [])
    for wrong in (0.5, float("nan"), float("inf"), True):
        shape, faults = shape_of({**runs, "counts": [wrong, *runs["counts"][1:]]})
        assert shape is None and faults == ["the run lengths cannot be read"]


def test_a_long_value_is_not_printed_whole():
    for long in ("x" * 5000, {"size": list(range(5000))}, {"size": [30, 40], "counts": {"x": "y" * 5000}}):
        _, (fault,) = shape_of(long)
        assert len(fault) < 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.sampled_from(["size", "counts", "x"]), inner),
)
SIZES = st.lists(st.integers(1, 2**34), min_size=2, max_size=2) | st.just([5, 6])
CODES = st.text(st.characters(codec="ascii"), max_size=12) | st.lists(st.integers(-3, 2**70), max_size=4)


@settings(deadline=None, max_examples=400)
@given(JSON | st.fixed_dictionaries({"size": SIZES, "counts": CODES}))
def test_whatever_is_in_a_file_is_a_mask_that_can_be_drawn_or_a_fault(segmentation):
    shape, faults = shape_of(segmentation)
    assert shape is not None or faults or segmentation in (None, [])
    if isinstance(shape, Rle):
        assert bitmap(shape, shape.size_hw).shape == shape.size_hw
    elif shape is not None:
        bitmap(clipped(shape, SIZE_HW) or None, SIZE_HW)


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_masks_of_coco_are_read_on_request_and_boxes_stay_as_they_are(tmp_path):
    annotations = [
        entry(1),
        entry(2, segmentation=compressed(BLOCK)),
        entry(3, 2, segmentation=uncompressed(BLOCK), iscrowd=1),
        entry(4, 2, segmentation=[SQUARE, [0, 0, 3, 0, 3, 3]], bbox=[0, 0, 20, 25], category_id=2),
    ]
    folder = write_coco(tmp_path / "d", annotations)
    table = opened(folder)
    plain = opened(folder, masks=False)
    bare = [{key: value for key, value in one.items() if key != "segmentation"} for one in annotations]
    never = opened(write_coco(tmp_path / "bare", bare), masks=False)
    assert plain.fingerprint == never.fingerprint != table.fingerprint
    assert table.has_masks and not plain.has_masks and "masks" not in plain.row(0)
    assert table.row(0).keys() - {"masks"} == plain.row(0).keys() and not table.problems
    shapes = table.row(0)["masks"] + table.row(1)["masks"]
    assert [isinstance(shape, Rle) for shape in shapes] == [False, True, True, False]
    for of_image in pixels_of(table):
        assert np.array_equal(of_image[0], BLOCK)
    with_masks, boxes = table.boxes(masks=True), table.boxes()
    assert not boxes.extra and with_masks.extra["masks"].shape == (4,)
    assert with_masks.iscrowd.tolist() == [False, False, True, False] == plain.boxes().iscrowd.tolist()
    again = opened(folder)  # from the cache
    assert again.fingerprint == table.fingerprint and again.has_masks
    assert np.array_equal(again.row(0)["masks"][0][0], table.row(0)["masks"][0][0])
    relabelled = with_classes(table, {"a": None})
    assert [len(relabelled.masks_of(index)) for index in (0, 1)] == [0, 1] and len(relabelled.masks_of(1)[0]) == 2
    assert len(table.head(1).boxes(masks=True).extra["masks"]) == 2


def test_all_faults_of_masks_are_told_at_once_and_objects_without_one_become_crowd_regions(tmp_path):
    outside = [50, 5, 60, 5, 60, 25]
    annotations = [
        entry(1),
        entry(2, segmentation=[[1, 2, 3, 4]]),
        entry(3, segmentation=[]),
        entry(4, segmentation=[outside]),
        entry(5, segmentation=[[10, 10, 10.1, 10, 10.1, 20]]),
        entry(6, segmentation=[[x - 10 for x in SQUARE]], bbox=[0, 0, 10, 15], area=150),
        entry(7, area=200),
        entry(8, bbox=[0, 0, 30, 20]),
        entry(9, segmentation=compressed(BLOCK[:20])),
        entry(10, iscrowd=1, segmentation=None),
        entry(11, 2, segmentation=compressed(BLOCK * 0)),
    ]
    del annotations[8]["area"]
    table = opened(write_coco(tmp_path / "d", annotations))
    told = {problem.annotation_id: problem.message for problem in table.problems}
    assert all(problem.severity == "warning" for problem in table.problems)
    for number, words in {
        2: "at least three", 3: "there is none", 4: "outside the image", 5: "too thin", 6: "exceeds the image",
        7: "has 320 pixels, the annotated area is 200", 8: "the one around its mask [4.0, 5.0, 20.0, 25.0]",
        9: "are of 40 x 20 pixels, not of the image of 40 x 30", 11: "empty",
    }.items():  # fmt: skip
        assert words in told[number], number
    assert set(told) == {2, 3, 4, 5, 6, 7, 8, 9, 11}
    boxes = table.boxes(masks=True)
    crowds = dict(zip(boxes.ids.tolist(), boxes.iscrowd.tolist(), strict=True))
    assert {number for number, is_crowd in crowds.items() if is_crowd} == {2, 3, 4, 5, 9, 10, 11}
    pixels = pixels_of(table)
    for row in (1, 9):  # the mask of such a region is its box
        assert np.array_equal(pixels[0][row], BLOCK)
    assert pixels[0][5].sum() == 150 and table.masks_of(0)[5][0].min() == -6, "as annotated, drawn inside alone"
    assert not opened(tmp_path / "d", masks=False).problems


def test_many_faults_of_a_kind_are_one_line(tmp_path):
    annotations = [entry(number, area=100) for number in range(1, 13)]
    (problem,) = opened(write_coco(tmp_path / "d", annotations)).problems
    assert problem.message.startswith("12 of 12 masks have an area that differs") and "annotation 1:" in problem.message


def test_data_without_masks_are_refused(tmp_path):
    folder = write_coco(tmp_path / "d", [entry(1, segmentation=[]), entry(2, segmentation=[[1, 2]])])
    with pytest.raises(BadInput, match=r"none of its 2 objects has a mask(.|\n)*expected at least three"):
        opened(folder)
    write_folder(opened(folder, masks=False), tmp_path / "csv", "train", "csv")
    with pytest.raises(BadInput, match="masks are not read from the format 'csv'; formats with masks are coco"):
        opened(tmp_path / "csv")
    assert opened(write_coco(tmp_path / "empty", [])).row(0)["masks"] == []


@pytest.mark.parametrize("masks", [True, False])
def test_an_object_without_a_box_has_the_box_around_its_mask(tmp_path, masks):
    triangle = [30, 2, 38, 2, 38.5, 9]
    without = [
        entry(1, segmentation=compressed(BLOCK)),
        entry(2, segmentation=[SQUARE, triangle], bbox=None),
        entry(3, 2, segmentation=uncompressed(BLOCK), bbox=[]),
        entry(4, 2, segmentation=[]),
    ]
    del without[0]["bbox"], without[3]["bbox"]
    table = opened(write_coco(tmp_path / "data", without), masks=masks, on_error="drop")
    assert table.boxes().xyxy.tolist() == [[4, 5, 20, 25], [4, 2, 38.5, 25], [4, 5, 20, 25]]
    (error,) = [problem for problem in table.problems if problem.severity == "error"]
    assert (error.annotation_id, error.message) == (4, "`bbox` missing")


def brush(number, image=1, **values):
    """An annotation as CVAT writes a brush mask: run lengths with `iscrowd` 1."""
    runs = rle(shape_of([SQUARE])[0], SIZE_HW).as_json()
    return entry(number, image, iscrowd=1, segmentation=runs, **values)


def test_brush_masks_marked_as_crowds_are_refused_or_taken_as_objects(tmp_path, capsys):
    folder = write_coco(tmp_path / "data", [brush(1), brush(2, image=2)])
    ignored = opened(folder)
    assert ignored.num_boxes().tolist() == [1, 1] and ignored.num_objects().tolist() == [0, 0]
    assert counts_of(ignored) == {"images": 2, "boxes": 0, "crowd_regions": 2}
    with pytest.raises(BadInput, match="2 of them have crowd regions alone. .* --data.crowds objects"):
        check_not_empty(ignored, is_allowed=False)
    assert check_data.main([str(folder), "--masks"]) == 2
    printed = capsys.readouterr().out
    assert "0 boxes, 2 crowd regions" in printed and "accelerate launch" not in printed

    objects = opened(folder, crowds="objects")
    assert objects.num_objects().tolist() == [1, 1] and objects.fingerprint != ignored.fingerprint
    assert counts_of(objects) == {"images": 2, "boxes": 2}
    check_not_empty(objects, is_allowed=False)
    assert opened(folder).num_objects().tolist() == [0, 0]  # the cache keeps the two apart
    assert check_data.main([str(folder), "--masks", "--crowds", "objects"]) == 1  # one class has no box
    assert "--data.crowds objects" in capsys.readouterr().out
    with pytest.raises(BadInput, match="data.crowds is 'object'; expected ignore or objects"):
        opened(folder, crowds="object")


@pytest.mark.parametrize(("crowds", "is_warned_of"), [(0, False), (1, False), (2, True), (10, True)])
def test_from_a_tenth_of_crowd_regions_on_there_is_a_warning(tmp_path, capsys, crowds, is_warned_of):
    plain = [entry(number, image=2) for number in range(crowds + 1, 19)]
    annotations = [brush(number) for number in range(1, crowds + 1)] + plain
    folder = write_coco(tmp_path / "data", annotations)
    said = []
    table = open_split("train", say=said.append, path=folder, cache_dir=tmp_path / "cache")
    regions = f", {crowds} crowd regions" if crowds else ""
    assert said[0] == f"train: 2 images (1 without objects), {18 - crowds} boxes{regions}, 2 classes"
    expected = [f"warning: train: {many_crowds(table)}"] if is_warned_of else []
    assert said[1:] == expected
    check_data.main([str(folder)])
    printed = capsys.readouterr().out
    assert (f"{crowds} of 18 boxes are crowd regions" in printed) == is_warned_of


def test_objects_without_a_usable_mask_stay_crowd_regions_where_crowds_are_objects(tmp_path):
    annotations = [brush(1), brush(2, image=2) | {"segmentation": []}, brush(3) | {"iscrowd": 2}]
    folder = write_coco(tmp_path / "data", annotations)
    table = opened(folder, crowds="objects", on_error="drop")
    assert table.boxes().iscrowd.tolist() == [False, True]
    messages = [problem.message for problem in table.problems]
    assert any("no usable mask: there is none; the object becomes a crowd region" in message for message in messages)
    assert any("`iscrowd` is 2; expected 0 or 1" in message for message in messages)


def test_areas_that_are_not_given_are_those_of_the_masks(tmp_path):
    annotations = [entry(1), entry(2, segmentation=[[4, 5, 20, 5, 20, 25]])]
    for one in annotations:
        del one["area"]
    folder = write_coco(tmp_path / "d", annotations)
    table = opened(folder)
    assert table.boxes().area.tolist() == areas(table.masks_of(0), SIZE_HW).tolist()
    assert opened(folder, masks=False).boxes().area.tolist() == [320, 320]


def zigzag(corners, far):
    """A polygon whose edges go from -far to far in x, and down the picture in y."""
    x = np.where(np.arange(corners) % 2, -far, far)
    y = np.linspace(0, SIZE_HW[0], corners)
    return np.stack([x, y], axis=1)


def test_polygons_that_go_far_beyond_the_picture_are_cut_and_too_long_outlines_refused(tmp_path):
    """pycocotools draws every pixel of an edge, in 80 bytes: a file of 800 bytes ended the process."""
    rings = [zigzag(33, 9e5), zigzag(30_000, 30.0), zigzag(4, 1000.0), zigzag(3, 39.0)]
    segmentations = [[ring.ravel().tolist()] for ring in rings]
    annotations = [entry(k, segmentation=each) for k, each in enumerate(segmentations, start=1)]
    table = opened(write_coco(tmp_path / "data", annotations))
    shapes = table.masks_of(0)
    lengths = [outline_lengths(shape).sum() for shape in shapes]
    assert max(lengths) < 33 * 3 * max(SIZE_HW)
    assert np.array_equal(shapes[3][0], rings[3])  # to the last digit, because it is not that far outside
    said = {problem.annotation_id: problem.message for problem in table.problems if "no usable" in problem.message}
    assert list(said) == [2] and "its outline is 1800000 pixels long; at most 1000000 are drawn" in said[2]
    assert table.boxes().iscrowd.tolist() == [False, True, False, False]
    differing = bitmap((rings[2],), SIZE_HW) != bitmap(shapes[2], SIZE_HW)
    assert differing.mean() < 0.05  # the edges of the cut polygon are rounded anew


def test_joined_data_keep_their_masks(tmp_path):
    one = write_coco(tmp_path / "one", [entry(1), entry(2, 2, segmentation=compressed(BLOCK))])
    two = write_coco(tmp_path / "two", [entry(7, 2)])
    table = open_dataset("train", path=[one, two], cache_dir=tmp_path / "cache", masks=True)
    assert table.has_masks and [len(of_image) for of_image in pixels_of(table)] == [1, 1, 0, 1]
    assert all(np.array_equal(mask, BLOCK) for of_image in pixels_of(table) for mask in of_image)


def test_bundled_shapes_have_the_pixels_that_show(tmp_path):
    make_shapes(tmp_path / "d", 12, 2, 64)
    table = opened(tmp_path / "d")
    assert table.has_masks and not table.problems
    for row, of_image in zip(map(table.row, range(12)), pixels_of(table), strict=True):
        assert [mask.sum() for mask in of_image] == row["objects"]["area"].tolist()
        assert sum(of_image).max() == 1  # of several objects, the one on top shows
        for mask, xyxy in zip(of_image, row["objects"]["bbox"].tolist(), strict=True):
            rows, columns = np.nonzero(mask)
            assert xyxy == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


def test_a_share_that_is_held_out_keeps_masks_beside_embedded_images(tmp_path):
    make_shapes(tmp_path / "shapes", 12, 2, 64)
    write_folder(opened(tmp_path / "shapes"), tmp_path / "d", "train", "hub")
    whole = opened(tmp_path / "d")
    assert whole.image_root is None
    parts = hold_out(whole, 0.3, tmp_path / "cache")
    masks_of = {row["image_id"]: row["masks"] for row in map(whole.row, range(len(whole)))}
    assert sum(map(len, parts)) == 12 and all(map(len, parts))
    for part in parts:
        assert part.has_masks
        for index in range(len(part)):
            row = part.row(index)
            assert to_bytes(row["masks"]) == to_bytes(masks_of[row["image_id"]])
            assert part.decode_image(row).shape == (3, 64, 64)
    copy = pickle.loads(pickle.dumps(parts[0]))  # noqa: S301 - own bytes, as a spawned worker gets them
    assert to_bytes(copy.masks_of(1)) == to_bytes(parts[0].masks_of(1))


def test_reading_boxes_does_not_import_the_code_of_masks(tmp_path):
    folder = write_coco(tmp_path / "d", [entry(1)])
    code = f"""
import sys
from toolkit.data.formats import open_dataset
table = open_dataset("train", path={str(folder)!r}, cache_dir={str(tmp_path / "cache")!r})
table.row(0), table.boxes()
print("pycocotools" in sys.modules, "pycocotools.mask" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out == "False False\n"


# ---- other formats ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["coco", "voc", "yolo", "hub"])
def test_masks_are_the_same_in_every_format(tmp_path, format):
    make_shapes(tmp_path / "shapes", 8, 2, 64)
    table = opened(tmp_path / "shapes")
    write_folder(table, tmp_path / "d", "train", format)
    again = opened(tmp_path / "d")
    assert not [problem for problem in again.problems if problem.severity != "note"]
    assert not again.boxes().iscrowd.any()
    for ours, theirs in zip(pixels_of(table), pixels_of(again), strict=True):
        assert np.array_equal(ours, theirs)
    assert again.boxes().area.tolist() == table.boxes().area.tolist()
    assert not opened(tmp_path / "d", masks=False).has_masks
    lost = unsupported_by(table, format)
    assert any("masks" in phrase or "polygons" in phrase for phrase in lost) == (format != "coco")
    assert any("masks are left out" in phrase for phrase in unsupported_by(table, "csv"))


def test_yolo_lines_of_boxes_and_polygons_with_confidence_are_told_apart(tmp_path):
    (tmp_path / "d" / "images").mkdir(parents=True)
    (tmp_path / "d" / "labels").mkdir()
    Image.new("RGB", (40, 30)).save(tmp_path / "d" / "images" / "a.png")
    polygon = "0.1 0.2 0.5 0.2 0.5 0.8 0.1 0.8"
    lines = [f"0 {polygon}", f"0 {polygon} 0.9", f"0 {polygon} 0.1 0.2", "0 0.5 0.5 0.2 0.2"]
    (tmp_path / "d" / "labels" / "a.txt").write_text("\n".join(lines))
    (tmp_path / "d" / "data.yaml").write_text("train: images\nnames: [a]\nkpt_shape: null\n")
    table = opened(tmp_path / "d")
    assert [len(shape[0]) for shape in table.masks_of(0)] == [4, 4, 4, 4]
    assert table.boxes().iscrowd.tolist() == [False, False, False, True]
    assert "there is none" in table.problems[-1].message


def test_voc_masks_in_colours_and_their_faults(tmp_path):
    other = [30, 10, 38, 10, 38, 18, 30, 18]
    beside = entry(3, 2, bbox=[30, 10, 8, 8], area=64, segmentation=[other])
    folder = write_coco(tmp_path / "d", [entry(1), entry(2, 2), beside])
    write_folder(opened(folder), tmp_path / "voc", "train", "voc")
    pictures = tmp_path / "voc" / "SegmentationObject"
    picture = Image.open(pictures / "2.png")
    assert picture.mode == "P" and picture.convert("RGB").getpixel((5, 6)) == (128, 0, 0)
    coloured = picture.convert("RGB")
    coloured.save(pictures / "2.png")
    before = opened(tmp_path / "voc")
    assert [mask.sum() for mask in pixels_of(before)[1]] == [320, 64]
    coloured.putpixel((0, 0), (1, 2, 3))
    coloured.save(pictures / "2.png")
    (pictures / "1.png").write_bytes(b"no picture")
    with pytest.raises(BadInput, match=r"1.png(.|\n)*2.png has colours that are not of VOC's palette"):
        opened(tmp_path / "voc")
    (pictures / "1.png").unlink()
    picture.save(pictures / "2.png")
    lists = tmp_path / "voc" / "ImageSets"
    assert "there is no SegmentationObject/1.png" in opened(tmp_path / "voc").problems[0].message
    (lists / "Segmentation").mkdir()
    (lists / "Segmentation" / "train.txt").write_text("2\n")
    assert len(opened(tmp_path / "voc")) == 1 and len(opened(tmp_path / "voc", masks=False)) == 2


# ---- programs --------------------------------------------------------------------------------------------------------


def test_masks_are_checked_drawn_repaired_and_converted(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))
    other = [20, 5, 36, 5, 36, 25, 20, 25]
    faulty = [entry(2, 2, segmentation=[], bbox=[20, 5, 16, 20]), entry(4, 2, segmentation=[SQUARE, [1, 1]], area=90)]
    beside = entry(5, 2, segmentation=[other], bbox=[20, 5, 16, 20], category_id=2)
    folder = write_coco(tmp_path / "d", [entry(1), *faulty, beside])
    target, pictures = tmp_path / "fixed", tmp_path / "p"
    code = check_data.main([str(folder), "--masks", "--fix", str(target), "--pictures", str(pictures)])
    said = capsys.readouterr().out
    assert code == 1 and "the object becomes a crowd region" in said and "polygon 2 of 2 has 1 point" in said
    assert "area 90 became 320" in (target / "changes.txt").read_text()
    assert "train_faster_rcnn.py" in said and "--model.masks true" in said
    fixed = opened(target)
    assert fixed.boxes().iscrowd.tolist() == [False, True, False, False]
    assert not [problem for problem in fixed.problems if problem.severity != "note"]
    (first,), (_, second, third) = pixels_of(fixed)
    assert np.array_equal(first, BLOCK) and np.array_equal(second, BLOCK) and third.sum() == 320
    assert list(pictures.glob("samples_*.jpg"))
    convert.main([str(folder), str(tmp_path / "yolo"), "--to", "yolo", "--masks"])
    assert "1 crowd regions are left out" in capsys.readouterr().out
    assert [len(of_image) for of_image in pixels_of(opened(tmp_path / "yolo"))] == [1, 2]
    assert rle(opened(tmp_path / "yolo").masks_of(0)[0], SIZE_HW) == rle(fixed.masks_of(0)[0], SIZE_HW)


def test_an_entry_with_a_field_of_another_type_is_read_field_by_field():
    """COCO writes `iscrowd` as 0 or 1; some tools write false. Its area is still that of the mask, and compared."""
    square = [[2, 2, 8, 2, 8, 8, 2, 8]]
    columns = Annotations([{"id": 0, "name": "cell"}], masks=True)
    columns.add_image(image())
    columns.add(box(id=1, iscrowd=False, bbox=[2, 2, 6, 6], segmentation=square))
    columns.add(box(id=2, iscrowd=False, bbox=[2, 2, 6, 6], segmentation=square, area=9))
    columns.add(box(id=3, iscrowd="no", bbox=[2, 2, 6, 6], segmentation=square))
    valid = check(columns, "f.json")
    assert valid.boxes.ids.tolist() == [1, 2] and valid.boxes.area.tolist() == [36.0, 9.0]
    assert [problem.message for problem in valid.problems] == [
        "`iscrowd` is 'no'; expected 0 or 1",
        "the mask has 36 pixels, the annotated area is 9; kept",
    ]
