"""Masks from the files of any format through every transform, program and run to the numbers of an evaluation."""

import json
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from documents import row_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import SCRIPTS, small_settings
from mask_data import (
    BLOCK,
    SQUARE,
    brush,
    coco_document,
    compressed,
    entry,
    masked_coco,
    masks_of,
    opened,
    random_masks,
    uncompressed,
)
from PIL import Image
from places import ROOT
from samples import generator, target_of

from scripts import check_data, convert, evaluate, predict, report, train_faster_rcnn
from toolkit.base.errors import BadInput
from toolkit.base.masks import Masks, Rle, bitmap, boxes_around, rectangle, rle, rles_of, to_bytes
from toolkit.data.classes import with_classes
from toolkit.data.dataset import DetectionDataset, row_target
from toolkit.data.formats import open_dataset
from toolkit.data.pipeline import BLENDING, largest_batch, loader_of_settings, train_transform
from toolkit.data.segmentations import box_of_mask, shape_of, to_segmentation
from toolkit.data.splits import check_not_empty, counts_of, many_crowds, open_split
from toolkit.data.table import Category
from toolkit.data.table_cache import write_rows
from toolkit.data.transforms.geometry import crop, draw_masks, exact_transform, flip, recheck_boxes, resize
from toolkit.data.transforms.mixing import mosaic
from toolkit.data.transforms.policy import policy_of
from toolkit.data.transforms.zoom_crop_colour import render_region
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.evaluation.predictions import write_predictions
from toolkit.models import build_detector
from toolkit.run.best import Best
from toolkit.run.command_line import parse_config
from toolkit.run.metrics_log import read_metrics
from toolkit.run.settings import DataConfig
from toolkit.run.validation import check_metric
from toolkit.tools.doctor.near_duplicates import hold_out
from toolkit.tools.predict.open import open_predictor
from toolkit.tools.shapes import make_shapes
from toolkit.tools.writers import unsupported_by, write_folder


class Recipe(NamedTuple):
    """A recipe of augmentation with masks.

    level: of an image, above which a pixel is the object's.
    """

    settings: dict
    level: int = 127


RECIPES = {
    "square": Recipe({"recipe": "detr"}),
    "scales": Recipe({"recipe": "detr", "scales": (40, 56), "max_size": 90, "random_crop": True}),
    "ssd": Recipe({"recipe": "ssd"}),
    # Canvases are filled with 124, which its filters overshoot.
    "yolov3": Recipe({"recipe": "yolov3"}, level=160),
}
# What a conversion loses, in a word.
FORMATS = {"coco": None, "voc": "masks", "yolo": "polygons", "hub": "polygons", "labelme": "boxes"}
POLICY = policy_of(
    [
        {"RandomZoomOut": {"fill": [123, 117, 104], "side_range": [1.0, 2.0]}},
        {"RandomApply": {"p": 0.8, "transforms": ["RandomIoUCrop"]}},
        "SanitizeBoundingBoxes",
        "RandomHorizontalFlip",
        {"RandomRotation": {"degrees": 20, "fill": 114}},
    ]
)
OBJECTS = 3  # of a sample, one for each channel
seeds = st.integers(0, 2**32)
patient = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))


# ---- transforms: the reference paints each object into one channel of the image, which every transform moves ---------


def random_shape(rng, size_hw):
    """A polygon without thin parts, cut off at the borders of the image, or its run lengths."""
    height, width = size_hw
    count = rng.integers(5, 13)
    angles = (np.arange(count) + rng.uniform(-0.3, 0.3, count)) * 2 * np.pi / count
    radii = rng.uniform(0.2, 0.35, count) * min(size_hw)
    centre = rng.uniform(0.2, 0.8, 2) * [width, height]
    corners = centre + radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)
    rings = (np.clip(corners, 0, [width, height]),)
    return rle(rings, size_hw) if rng.random() < 0.3 else rings


def sample_of(shapes, size_hw, crowd=()):
    """An image whose channels are the masks of the objects, with their boxes and masks."""
    masks = Masks.of(shapes).cut(
        0,
        0,
        size_hw[1],
        size_hw[0],
    )
    pixels = masks.drawn(size_hw)
    boxes = boxes_around(pixels)
    boxes[:, 2:] = boxes[:, 2:].maximum(boxes[:, :2] + 1)
    target = target_of(boxes.tolist(), size_hw, crowd=crowd)
    del target["mixup"]
    image = (pixels * 255).permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return image, target | {"masks": masks}


def random_sample(rng, size_hw, crowd=()):
    return sample_of([random_shape(rng, size_hw) for _ in range(OBJECTS)], size_hw, crowd)


@st.composite
def masked(draw):
    """Three objects with masks of all kinds."""
    size_hw = draw(st.tuples(st.integers(24, 90), st.integers(24, 90)))
    return random_sample(
        np.random.default_rng(draw(seeds)),
        size_hw,
        draw(st.sets(st.integers(0, 2))),
    )


def sample_without_objects():
    return torch.zeros(3, 40, 50, dtype=torch.uint8), sample_of([], (40, 50))[1]


def grown(pixels, by, outside=0.0):
    """Masks (N, H, W) with all pixels at most `by` from them. outside: 1 if what lies outside of the image is one."""
    padded = F.pad(
        pixels[:, None].float(),
        [by] * 4,
        value=outside,
    )
    return F.max_pool2d(padded, 2 * by + 1, 1)[:, 0] > 0


def centre_of(weights):
    """The centre of gravity (row, column) of weights (H, W)."""
    places = torch.stack(torch.meshgrid(*map(torch.arange, weights.shape), indexing="ij")).double()
    return (weights.double() * places).sum((1, 2)) / weights.sum()


def well_inside(visible_xyxy, size_hw, by):
    """The pixels (N, H, W) that are further than `by` from the edges of windows, which leave slivers of objects."""
    rows, columns = np.ogrid[: size_hw[0], : size_hw[1]]
    left, top, right, bottom = visible_xyxy.T[:, :, None, None]
    in_rows = (rows >= top + by) & (rows < bottom - by)
    in_columns = (columns >= left + by) & (columns < right - by)
    return torch.from_numpy(in_rows & in_columns)


def assert_on_pixels(image, target, blur, within=None, level=127):
    """Each mask is its channel of the image, but for pixels within `blur` of the edge; both have one centre.

    within: function from a box to the pixels (H, W) bool that its object may have; None: all.
    """
    size_hw = image.shape[1:]
    target = recheck_boxes(image, target)
    found = draw_masks(target)
    assert found["masks"].dtype == torch.uint8
    assert found["masks"].shape == (len(found["boxes"]), *size_hw)
    reference = image[found["labels"]] > level
    if within is not None:
        for row, box in enumerate(found["boxes"]):
            reference[row] &= within(box)
    drawn = found["masks"] > 0
    is_kept = target["masks"].drawn(size_hw).flatten(1).any(1).bool() | (target["iscrowd"] > 0)
    inside = well_inside(target["masks"][is_kept].visible_xyxy, size_hw, blur)
    assert not (drawn & ~grown(reference, blur) & inside).any()
    assert not (~drawn & ~grown(~reference, blur, outside=1)).any()
    for mask, expected in zip(drawn, reference, strict=True):
        if mask.sum() > 100:
            assert (centre_of(mask) - centre_of(expected)).abs().max() < 0.4 * blur


def steepness(before_hw, after_hw):
    """By how many pixels the edge of resized pixels is uncertain: one of the old image, and one of the new."""
    ratios = [-(-new // old) for new, old in zip(after_hw, before_hw, strict=True)]
    return 1 + max(1, *ratios)


@patient
@given(masked(), seeds)
def test_whole_pixels_are_moved_exactly(sample, seed):
    """Flips and crops of whole pixels move run lengths to the bit; the edge of a polygon is drawn anew."""
    rng = np.random.default_rng(seed)
    height, width = sample[0].shape[1:]
    top = int(rng.integers(0, height - 7))
    left = int(rng.integers(0, width - 7))
    region = (
        top,
        left,
        int(rng.integers(4, height - top + 1)),
        int(rng.integers(4, width - left + 1)),
    )
    for image, target in (
        crop(*sample, region),
        flip(*sample),
        crop(*flip(*sample), region),
    ):
        assert_on_pixels(image, target, 1)
        drawn = target["masks"].drawn(image.shape[1:])
        for label, pixels, shape in zip(
            target["labels"].tolist(),
            drawn,
            target["masks"].shapes,
            strict=True,
        ):
            if isinstance(shape, Rle):
                assert pixels.bool().equal(image[label] > 0)


sides = st.integers(24, 120)


@patient
@given(masked(), sides, sides)
def test_masks_are_resized_with_their_pixels(sample, height, width):
    image, target = resize(*sample, (height, width))
    assert_on_pixels(
        image,
        target,
        steepness(sample[0].shape[1:], (height, width)),
    )


shifts = st.integers(-30, 20)


@patient
@given(
    masked(),
    shifts,
    shifts,
    st.integers(31, 150),
    st.integers(31, 150),
)
def test_what_a_window_cuts_stays_cut_on_a_larger_canvas(sample, top, left, height, width):
    image, target = render_region(
        *sample,
        (top, left, height, width),
        (64, 80),
    )
    assert_on_pixels(image, target, steepness((height, width), (64, 80)))
    cut = crop(*sample, (5, 5, 10, 12))
    image, target = render_region(
        *cut,
        (-20, -20, 60, 60),
        (60, 60),
    )
    assert_on_pixels(image, target, 1)
    assert not target["masks"].drawn((60, 60))[:, 30:].any()


@pytest.mark.parametrize("name", RECIPES)
@patient
@given(sample=masked(), seed=seeds)
def test_masks_follow_their_pixels_through_every_recipe(name, sample, seed):
    recipe = RECIPES[name]
    c = DataConfig(
        image_size=48,
        flip=True,
        zoom_out=3.0,
        iou_crop=True,
        **recipe.settings,
    )
    size = () if c.scales else ((40, 56),)
    image, target = train_transform(c)(*sample, generator(seed), *size)
    scale = np.abs(target["masks"].scale).max(initial=1)
    if scale < 4:  # the crop of a few pixels may be enlarged tenfold
        assert_on_pixels(
            image,
            target,
            int(np.ceil(scale)) + 1,
            level=recipe.level,
        )
    empty = train_transform(c)(*sample_without_objects(), generator(seed), *size)
    drawn = draw_masks(recheck_boxes(*empty), boxes_from_masks=True)
    assert drawn["masks"].shape == (0, *empty[0].shape[1:])
    assert drawn["boxes"].shape == (0, 4)


@patient
@given(masked(), st.integers(0, 2**40))
def test_masks_follow_their_pixels_through_a_policy(sample, seed):
    """The colour that fills a canvas does not fill masks."""
    assert_on_pixels(*POLICY(*sample, generator(seed)), 2)


@patient
@given(
    st.tuples(masked(), masked(), masked(), masked()),
    st.integers(16, 48),
    st.integers(16, 48),
)
def test_masks_of_a_mosaic_end_with_their_quadrant(samples, row, column):
    def quadrant(box):
        x, y = ((box[:2] + box[2:]) / 2).tolist()
        is_above = torch.arange(64)[:, None] < row
        is_left = torch.arange(64)[None] < column
        return (is_above == (y < row)) & (is_left == (x < column))

    image, target = mosaic(samples, (64, 64), (row, column))
    blur = max(steepness(sample[0].shape[1:], (64, 64)) for sample in samples)
    assert_on_pixels(image, target, blur, quadrant)
    for box, pixels in zip(
        target["boxes"],
        target["masks"].drawn((64, 64)),
        strict=True,
    ):
        assert not pixels[~quadrant(box)].any()


def test_boxes_from_masks_are_tight_and_what_has_no_pixel_is_dropped_unless_it_is_a_crowd_or_a_box_alone():
    triangle = (
        np.array(
            [
                [10.0, 10],
                [30, 10],
                [10, 30],
            ]
        ),
    )
    _, target = sample_of(
        [triangle, triangle, triangle, None, None],
        (40, 60),
        crowd=(2, 3),
    )
    target["boxes"] = torch.tensor([[5.0, 5, 40, 35]] * 5)
    drawn = draw_masks(target)
    assert drawn["labels"].tolist() == [0, 1, 2, 3, 4]
    assert drawn["has_mask"].tolist() == [True, True, True, False, False]
    assert drawn["boxes"].equal(target["boxes"])
    assert not drawn["masks"][3:].any()
    assert drawn["masks"][0].equal(torch.from_numpy(bitmap(triangle, (40, 60))))
    tight = draw_masks(target, boxes_from_masks=True)["boxes"]
    assert tight.equal(torch.cat([boxes_around(drawn["masks"][:3]), target["boxes"][3:]]))
    _, cropped = crop(
        torch.zeros(3, 40, 60, dtype=torch.uint8),
        target,
        (0, 0, 40, 20),
    )
    shown = draw_masks(cropped, boxes_from_masks=True)["boxes"]
    assert shown[0].tolist() == [10, 10, 20, 29]
    assert shown[3].tolist() == [5, 5, 20, 35]


# ---- samples and batches of a table ----------------------------------------------------------------------------------


def table_of(folder, samples, suffix=".png", **saving):
    rows = []
    for number, (image, target) in enumerate(samples):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{number}{suffix}", **saving)
        labels = target["labels"].tolist()
        row = row_of(
            number,
            target["boxes"].tolist(),
            image.shape[:0:-1],
            labels,
        )
        rows.append(row | {"file_name": f"{number}{suffix}", "masks": list(target["masks"].shapes)})
    categories = [Category(number, f"c{number}") for number in range(9)]
    return write_rows(rows, cache_file=folder / "t.json", image_root=folder, categories=categories)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    rng = np.random.default_rng(0)
    sizes = (
        (40, 60),
        (64, 48),
        (50, 50),
        (80, 90),
        (33, 47),
    )
    return table_of(tmp_path_factory.mktemp("masks"), [random_sample(rng, size_hw) for size_hw in sizes])


@pytest.mark.parametrize("augmented", [True, False])
def test_samples_have_masks_and_boxes_around_them_where_asked_for(table, augmented):
    def first(masks=False, boxes_from_masks=False):
        c = DataConfig(image_size=64, batch_size_per_device=5, workers=0, boxes_from_masks=boxes_from_masks)
        _, loader = loader_of_settings(
            table,
            c,
            seed=0,
            stride=1,
            augmented=augmented,
            masks=masks,
        )
        return next(iter(loader))

    plain = first()
    for batch in (
        first(masks=True),
        first(True, True),
        first(boxes_from_masks=True),
    ):
        assert batch.images.equal(plain.images)
    for without, with_masks, tight, both in zip(
        plain.targets,
        first(masks=True).targets,
        first(boxes_from_masks=True).targets,
        first(True, True).targets,
        strict=True,
    ):
        assert "masks" not in without
        assert "masks" not in tight
        assert with_masks["boxes"].equal(without["boxes"])
        assert with_masks["masks"].shape == (OBJECTS, 64, 64)
        assert both["masks"].equal(with_masks["masks"])
        assert both["boxes"].equal(tight["boxes"])
        assert tight["boxes"].equal(boxes_around(with_masks["masks"]))


@pytest.mark.parametrize("augmented", [True, False])
def test_masks_of_tiles_lie_on_their_pixels(table, augmented):
    c = DataConfig(
        image_size=48,
        tile=[32, 40],
        tile_visible=0.0,
        batch_size_per_device=4,
        workers=0,
        zoom_out=1.5,
        iou_crop=True,
        boxes_from_masks=True,
    )
    _, loader = loader_of_settings(table, c, seed=0, stride=1, augmented=augmented, masks=True)
    objects = 0
    for batch in loader:
        for image, target in zip(batch.images, batch.targets, strict=True):
            reference = image[target["labels"]] > 127
            drawn = target["masks"] > 0
            assert not (drawn & ~grown(reference, 3)).any()
            assert not (~drawn & ~grown(~reference, 3, outside=1)).any()
            assert target["boxes"].equal(boxes_around(target["masks"]))
            objects += len(drawn)
    assert objects > 30


@pytest.mark.parametrize(("masks", "fullest"), [(True, 1), (False, 0)])
def test_the_memory_probe_has_the_picture_with_the_most_masks(tmp_path, masks, fullest):
    """Masks take an image of memory each, so the fullest picture counts, also where a batch is one picture."""
    samples = []
    for count, side in ((1, 90), (9, 30)):
        shapes = [rectangle([2, 2, 20, 20])] * count
        samples.append(
            (
                torch.zeros(
                    3,
                    side,
                    side,
                    dtype=torch.uint8,
                ),
                sample_of(shapes, (side, side))[1],
            )
        )
    dataset = DetectionDataset(table_of(tmp_path, samples), exact_transform(64), masks=masks)
    (target,) = largest_batch(dataset, 1, 1).targets
    assert target["image_id"] == fullest


def test_what_lies_outside_the_annotated_picture_does_not_show_on_a_larger_canvas(table):
    row = table.row(0)
    row["masks"] = [(np.array([[-30.0, -30], [30, -30], [30, 30], [-30, 30]]),)] * OBJECTS
    target = row_target(row, (40, 60), masks=True)
    _, target = render_region(
        torch.zeros(3, 40, 60, dtype=torch.uint8),
        target,
        (-40, -60, 120, 180),
        (120, 180),
    )
    drawn = target["masks"].drawn((120, 180))
    assert drawn[:, 40:70, 60:90].all()
    assert drawn.sum() == OBJECTS * 30 * 30


@pytest.mark.parametrize(
    ("masks", "boxes_from_masks", "asked_by"),
    [(True, False, "model.masks"), (False, True, "data.boxes_from_masks")],
)
def test_what_cannot_keep_masks_is_named_all_at_once(table, masks, boxes_from_masks, asked_by):
    blending = {"mixup": True, "batch_mixup": 0.5, "copy_blend": 0.1, "plain_epochs": 0}
    c = DataConfig(image_size=64, boxes_from_masks=boxes_from_masks, **blending)
    with pytest.raises(BadInput) as caught:
        loader_of_settings(table, c, seed=0, stride=1, masks=masks)
    for name, problem in zip(BLENDING, caught.value.problems, strict=True):
        assert problem.startswith(f"data.{name} ")
        assert asked_by in problem


# ---- files -----------------------------------------------------------------------------------------------------------


def test_masks_are_read_on_request_and_boxes_stay_as_they_are(tmp_path):
    square_and_corner = [SQUARE, [0, 0, 3, 0, 3, 3]]
    annotations = [
        entry(1),
        entry(2, segmentation=compressed(BLOCK)),
        entry(3, 2, segmentation=uncompressed(BLOCK), iscrowd=1),
        entry(
            4,
            2,
            segmentation=square_and_corner,
            bbox=[0, 0, 20, 25],
            category_id=2,
        ),
    ]
    folder = masked_coco(tmp_path / "d", annotations)
    plain = opened(folder, masks=False)
    assert "masks" not in plain.row(0)
    for table in (opened(folder), opened(folder)):  # the second is from the cache
        assert table.fingerprint != plain.fingerprint
        assert table.row(0).keys() - {"masks"} == plain.row(0).keys()
        assert table.boxes().iscrowd.tolist() == plain.boxes().iscrowd.tolist() == [False, False, True, False]
        shapes = table.boxes(masks=True).extra["masks"]
        assert [isinstance(shape, Rle) for shape in shapes] == [False, True, True, False]
        for of_image in masks_of(table):
            assert np.array_equal(of_image[0], BLOCK)
    (shape,) = with_classes(table, {"a": None}).masks_of(1)
    assert len(shape) == 2
    assert len(table.head(1).boxes(masks=True).extra["masks"]) == 2


def test_masks_that_change_on_disk_are_a_sentence_that_names_file_and_image(tmp_path):
    table = opened(masked_coco(tmp_path / "data", [entry(1), entry(3, image=2)]))
    stored = to_bytes(table.masks_of(1))
    start = table.arrow_files[0].read_bytes().rindex(stored)
    with open(table.arrow_files[0], "r+b") as file:
        file.seek(start + 40)
        file.write(bytes([stored[40] ^ 1]))
        file.flush()
        with pytest.raises(BadInput, match="changed.* after it was opened .the masks of 2.png .id 2.*start again"):
            table.row(1)
        file.truncate(start + 5)
    with pytest.raises(BadInput, match="after it was opened .masks of 2.png .id 2"):
        table.boxes(masks=True)


@pytest.mark.parametrize(("format", "lost"), FORMATS.items())
def test_masks_are_the_same_in_every_format(tmp_path, format, lost):
    make_shapes(tmp_path / "shapes", 8, 2, 64)
    table = opened(tmp_path / "shapes")
    write_folder(table, tmp_path / "d", "train", format)
    again = opened(tmp_path / "d")
    assert {problem.severity for problem in again.problems} <= {"note"}
    assert again.boxes().area.tolist() == table.boxes().area.tolist()
    assert np.array_equal(sum(masks_of(table), []), sum(masks_of(again), []))
    assert (unsupported_by(table, format) == []) == (lost is None)
    assert (lost or "") in " ".join(unsupported_by(table, format))


def donut_and_parts():
    """Return a donut with an island in its hole, as run lengths, and an object of three parts, as polygons."""
    pixels = np.zeros((90, 120), np.uint8)
    pixels[10:60, 20:90] = 1
    pixels[20:50, 30:70] = 0
    pixels[30:40, 40:55] = 1
    parts = [
        [[3.3, 61.7], [20.1, 64.2], [11, 80.5]],
        [[40, 70], [52.5, 70], [46, 85]],
        [[90.2, 66], [111, 71], [99, 88]],
    ]
    return rles_of(torch.from_numpy(pixels)[None])[0], tuple(np.array(part) for part in parts)


@pytest.mark.parametrize("format", FORMATS)
def test_a_donut_with_an_island_and_three_parts_stay_what_they_are(tmp_path, format):
    donut, parts = donut_and_parts()
    Image.new("RGB", (120, 90)).save(tmp_path / "a.png")
    image = {"id": 1, "file_name": "a.png", "width": 120, "height": 90}
    annotations = []
    for number, shape in enumerate((donut, parts), start=1):
        about = {"id": number, "image_id": 1, "category_id": 1, "segmentation": to_segmentation(shape)}
        annotations.append(about | {"iscrowd": 0, "bbox": box_of_mask(about["segmentation"])})
    document = {"images": [image], "annotations": annotations, "categories": [{"id": 1, "name": "a"}]}
    (tmp_path / "a.json").write_text(json.dumps(document))
    table = open_dataset(str(tmp_path / "a.json"), cache_dir=tmp_path / "cache", masks=True)
    for number in (1, 2):  # there, and from there again
        write_folder(table, tmp_path / f"{number}", "train", format)
        table = opened(tmp_path / f"{number}")
        assert np.array_equal(masks_of(table)[0], [bitmap(shape, (90, 120)) for shape in (donut, parts)])


def test_yolo_lines_of_boxes_and_polygons_with_confidence_are_told_apart(tmp_path):
    folder = tmp_path / "d"
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True)
    Image.new("RGB", (40, 30)).save(folder / "images" / "a.png")
    polygon = "0.1 0.2 0.5 0.2 0.5 0.8 0.1 0.8"
    lines = [f"0 {polygon}", f"0 {polygon} 0.9", f"0 {polygon} 0.1 0.2", "0 0.5 0.5 0.2 0.2"]
    (folder / "labels" / "a.txt").write_text("\n".join(lines))
    (folder / "data.yaml").write_text("train: images\nnames: [a]\nkpt_shape: null\n")
    table = opened(folder)
    *polygons, of_box = table.masks_of(0)
    assert [len(shape[0]) for shape in polygons] == [4, 4, 4]
    assert of_box is None
    assert not table.boxes().iscrowd.any()
    assert "there is none" in table.problems[-1].message


def test_voc_masks_in_colours_and_their_faults(tmp_path):
    folder = tmp_path / "voc"
    write_folder(
        opened(masked_coco(tmp_path / "d", [entry(1), entry(2, 2)])),
        folder,
        "train",
        "voc",
    )
    file = folder / "SegmentationObject" / "2.png"
    picture = Image.open(file).convert("RGB")
    assert picture.getpixel((5, 6)) == (128, 0, 0)
    picture.save(file)
    assert np.array_equal(masks_of(opened(folder))[1][0], BLOCK)
    picture.putpixel((0, 0), (1, 2, 3))
    picture.save(file)
    file.with_name("1.png").write_bytes(b"no picture")
    with pytest.raises(BadInput, match=r"1.png(.|\n)*2.png has colours that are not of VOC's palette"):
        opened(folder)
    file.with_name("1.png").unlink()
    lists = folder / "ImageSets" / "Segmentation"
    lists.mkdir()
    (lists / "train.txt").write_text("1\n")
    with pytest.raises(BadInput, match="there is no SegmentationObject/1.png"):
        opened(folder)
    assert len(opened(folder, masks=False)) == 2


def test_bundled_shapes_have_the_pixels_that_show(tmp_path):
    make_shapes(tmp_path / "d", 12, 2, 64)
    table = opened(tmp_path / "d")
    assert not table.problems
    for index, of_image in enumerate(masks_of(table)):
        objects = table.row(index)["objects"]
        assert [mask.sum() for mask in of_image] == objects["area"].tolist()
        assert sum(of_image).max() == 1  # of several objects, the one on top shows
        assert boxes_around(torch.from_numpy(np.stack(of_image))).tolist() == objects["bbox"].tolist()


def test_joined_data_keep_their_masks(tmp_path):
    one = masked_coco(tmp_path / "one", [entry(1), entry(2, 2, segmentation=compressed(BLOCK))])
    two = masked_coco(tmp_path / "two", [entry(7, 2)])
    found = masks_of(
        open_dataset(
            "train",
            path=[one, two],
            cache_dir=tmp_path / "cache",
            masks=True,
        )
    )
    assert [len(of_image) for of_image in found] == [1, 1, 0, 1]
    for of_image in found:
        for mask in of_image:
            assert np.array_equal(mask, BLOCK)


def test_a_share_that_is_held_out_keeps_masks_beside_embedded_images(tmp_path):
    make_shapes(tmp_path / "shapes", 12, 2, 64)
    write_folder(opened(tmp_path / "shapes"), tmp_path / "d", "train", "hub")
    whole = opened(tmp_path / "d")
    assert whole.image_root is None
    masks = {row["image_id"]: to_bytes(row["masks"]) for row in map(whole.row, range(len(whole)))}
    parts = hold_out(whole, 0.3, tmp_path / "cache")
    assert sum(map(len, parts)) == 12
    for part in parts:
        assert len(part)
        sent = pickle.loads(pickle.dumps(part))  # noqa: S301 - own bytes, as a spawned worker gets them
        for index in range(len(part)):
            row = sent.row(index)
            assert to_bytes(row["masks"]) == masks[row["image_id"]]
            assert sent.decode_image(row).shape == (3, 64, 64)


def test_reading_boxes_does_not_import_the_code_of_masks(tmp_path):
    folder = masked_coco(tmp_path / "d", [entry(1)])
    code = f"""
import sys
from toolkit.data.formats import open_dataset
table = open_dataset("train", path={str(folder)!r}, cache_dir={str(tmp_path / "cache")!r})
table.row(0), table.boxes()
print("pycocotools" in sys.modules, "pycocotools.mask" in sys.modules)
"""
    out = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert out == "False False\n"


@pytest.mark.parametrize(("crowds", "is_warned_of"), [(1, False), (2, True)])
def test_brush_masks_marked_as_crowds_are_told(tmp_path, capsys, crowds, is_warned_of):
    annotations = [brush(number) for number in range(crowds)]
    annotations += [entry(number) for number in range(crowds, 18)]
    folder = masked_coco(tmp_path / "data", annotations)
    said = []
    table = open_split("train", say=said.append, path=folder, cache_dir=tmp_path / "cache")
    assert f"{18 - crowds} boxes, {crowds} crowd regions" in said[0]
    assert said[1:] == [f"warning: train: {many_crowds(table)}"] * is_warned_of
    check_data.main([str(folder), "--masks"])
    printed = capsys.readouterr().out
    assert (f"{crowds} of 18 boxes are crowd regions" in printed) == is_warned_of


def test_brush_masks_are_objects_where_asked_for(tmp_path, capsys):
    folder = masked_coco(tmp_path / "data", [brush(1), brush(2, image=2)])
    objects = opened(folder, crowds="objects")
    assert counts_of(objects) == {"images": 2, "boxes": 2}
    check_not_empty(objects, is_allowed=False)
    ignored = opened(folder)  # the cache keeps the two apart
    assert counts_of(ignored) == {"images": 2, "boxes": 0, "crowd_regions": 2}
    with pytest.raises(BadInput, match="2 of them have only crowd regions. .* --data.crowds objects"):
        check_not_empty(ignored, is_allowed=False)
    assert check_data.main([str(folder), "--masks"]) == 2
    assert "accelerate launch" not in capsys.readouterr().out
    check_data.main([str(folder), "--masks", "--crowds", "objects"])
    assert "--data.crowds objects" in capsys.readouterr().out


# ---- programs and runs -----------------------------------------------------------------------------------------------


def test_masks_are_checked_repaired_and_converted(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))
    annotations = [
        entry(1),
        entry(2, 2, segmentation=[], bbox=[24, 5, 10, 20]),
        entry(4, 2, segmentation=[SQUARE, [1, 1]], area=90),
    ]
    folder = str(masked_coco(tmp_path / "d", annotations))
    fixed = tmp_path / "fixed"
    assert check_data.main([folder, "--masks", "--fix", str(fixed), "--pictures", str(tmp_path / "p")]) == 1
    said = capsys.readouterr().out
    assert "its box alone is used" in said
    assert "polygon 2 of 2 has 1 point" in said
    assert "--model.masks true" in said
    assert "area 90 became 320" in (fixed / "changes.txt").read_text()
    assert list((tmp_path / "p").glob("samples_*.jpg"))
    assert not opened(fixed).boxes().iscrowd.any()
    convert.main([folder, str(tmp_path / "yolo"), "--to", "yolo", "--masks"])
    assert "crowd regions" not in capsys.readouterr().out
    for table, count in ((opened(fixed), 2), (opened(tmp_path / "yolo"), 2)):
        (first,), others = masks_of(table)
        assert np.array_equal(first, BLOCK)
        assert len(others) == count


def test_the_masks_of_another_program_are_judged(tmp_path, capsys):
    table, predictions = random_masks(tmp_path, 6, 2, seed=3, draw=True)
    document = coco_document(table)
    for annotation in document["annotations"]:
        if isinstance(annotation["segmentation"], list) and annotation["segmentation"][0][0] == 3.1:
            annotation["segmentation"] = [[0, 0, 9, 0, 9, 9, 0, 9]]  # instead of no pixel, which the data check refuses
    truth = tmp_path / "truth.json"
    truth.write_text(json.dumps(document))
    results = write_predictions(tmp_path / "results.json", predictions, table)
    results.with_suffix(".about.json").unlink()
    words = [str(results), "--split", str(truth), "--image-dir", str(tmp_path)]
    assert evaluate.main([*words, "--expect.segm_AP", "0.01", "--save", str(tmp_path / "again.json")]) == 0
    printed = capsys.readouterr().out
    assert "mask AP50" in printed
    report.main([str(tmp_path / "again.json"), "--out", str(tmp_path / "report")])  # opens the data as they were named
    numbers = json.loads((tmp_path / "report" / "report.json").read_text())["numbers"]
    assert f'"segm_AP": {numbers["segm_AP"]}' in printed
    capsys.readouterr()
    for annotation in document["annotations"]:
        del annotation["segmentation"]
    truth.write_text(json.dumps(document))
    assert evaluate.main(words) == 0
    printed = capsys.readouterr().out
    assert "only its boxes are judged, not its masks: " in printed
    assert "segm_AP" not in printed


class Trained(NamedTuple):
    """A detector of masks with random weights, its final folder, and data to judge it on."""

    detector: torch.nn.Module
    folder: object
    table: object


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    model = yaml.safe_load((ROOT / "configs/faster_rcnn/shapes.yaml").read_text())["model"]
    table, _ = random_masks(
        folder,
        3,
        2,
        draw=True,
        size=(96, 96),
    )
    options = model | {"masks": True, "score_threshold": 0.0}
    detector = build_detector(**options, class_names=table.class_names).eval()
    detector.save_final(folder / "final", table.categories)
    return Trained(detector, folder, table)


def pixels_of(segmentation):
    shape, faults = shape_of(segmentation)
    assert not faults
    return bitmap(shape, (96, 96))


def test_predicted_masks_are_the_same_in_all_files(trained, tmp_path, capsys):
    picture = trained.folder / "0.png"
    words = [trained.folder / "final", picture, "--out", tmp_path / "found", "--polygons", "--score-threshold", 0.05]
    words = [str(word) for word in [*words, "--max-detections", 5, "--device", "cpu"]]
    assert predict.main([*words, "--format", "json", "coco", "csv", "yolo"]) == 0
    assert "csv has only the boxes: it cannot hold the masks" in capsys.readouterr().out
    (image,) = json.loads((tmp_path / "found" / "predictions.json").read_text())["images"]
    results = json.loads((tmp_path / "found" / "results.json").read_text())
    annotated = json.loads((tmp_path / "found" / "dataset.json").read_text())["annotations"]
    expected = open_predictor(trained.folder / "final", max_detections=5)(Image.open(picture), 0.05)["masks"]
    assert len(expected) == 5
    for mask, one, result in zip(
        expected.numpy(),
        image["detections"],
        results,
        strict=True,
    ):
        assert np.array_equal(pixels_of(one["segmentation"]), mask)
        assert np.array_equal(pixels_of(result["segmentation"]), mask)
    for annotation in annotated:
        assert annotation["area"] == pixels_of(annotation["segmentation"]).sum()
    assert predict.main([*words, "--tile", "48", "--flip", "--overwrite"]) == 0
    (image,) = json.loads((tmp_path / "found" / "predictions.json").read_text())["images"]
    assert len(image["detections"]) > 5  # so many in each tile
    for one in image["detections"]:
        assert pixels_of(one["segmentation"]).shape == (96, 96)


def test_a_folder_with_masks_is_judged_by_them(trained, capsys):
    truth = trained.folder / "truth.json"
    truth.write_text(json.dumps(coco_document(trained.table)))
    words = [trained.folder / "final", "--split", truth, "--image-dir", trained.folder]
    assert evaluate.main(list(map(str, words))) == 0
    assert '"segm_AP50": ' in capsys.readouterr().out


def test_the_metric_of_masks_is_known_before_training(trained):
    loop = SimpleNamespace(
        detector=trained.detector,
        ema=SimpleNamespace(is_on=False),
        loss_weights=SimpleNamespace(row_names=()),
        validation=SimpleNamespace(evaluator=CocoEvaluator(trained.table), best=Best("segm_AP")),
    )
    check_metric(loop)
    loop.detector = build_detector("faster_rcnn", class_names=["a"], backbone="test_resnet")
    with pytest.raises(BadInput, match="segm_AP: no such metric"):
        check_metric(loop)


@pytest.mark.parametrize(
    ("words", "of_file", "expected"),
    [
        ([], {}, "segm_AP"),
        ([], {"eval": {"metric_for_best": "ema/bbox_AP"}}, "ema/segm_AP"),  # a file for boxes
        ([], {"eval": {"metric_for_best": "bbox_AP50"}}, "bbox_AP50"),
        (
            [],
            {"eval": {"metric_for_best": "bbox_AP"}, "model": {"masks": True}},
            "bbox_AP",
        ),
        (["--eval.metric_for_best", "bbox_AP"], {}, "bbox_AP"),
        (["--model.masks", "false"], {}, "bbox_AP"),
    ],
)
def test_masks_select_the_best_checkpoint(tmp_path, words, of_file, expected):
    file = tmp_path / "settings.yaml"
    file.write_text(json.dumps(of_file))
    words = ["--model.masks", "true", *words, "--config", str(file)]
    config = parse_config(train_faster_rcnn.Config, words)
    assert config.eval.metric_for_best == expected


@pytest.mark.parametrize("boxes", [(), ("--data.boxes_from_masks", "true")])
def test_an_evaluation_afterwards_has_the_numbers_of_the_run(server, data, tmp_path, boxes):
    """Metrics of boxes and masks, and the losses, which need the annotated masks."""
    script = next(script for script in SCRIPTS if script.name == "train_faster_rcnn")
    masks = ("--model.masks", "true", "--model.mask_convs", 1, "--model.mask_channels", 8)
    place = ("--run.output_dir", tmp_path, "--run.max_steps", 2)
    run = (
        server.run(
            script,
            small_settings(
                script,
                data,
                (*masks, *boxes, *place),
            ),
        )
        .ok()
        .folder
    )
    row = [each for each in read_metrics(run / "metrics.jsonl") if "val/loss" in each][-1]
    numbers = server.run(ROOT / "scripts" / "evaluate.py", [run, "--weights", "model"]).ok().numbers
    assert numbers["loss_mask"] > 0
    for name in ("loss", "loss_mask", "segm_AP", "bbox_AP"):
        assert numbers[name] == row[f"val/{name}"]
