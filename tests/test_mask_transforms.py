"""Masks follow the pixels of their objects: shapes that are moved and drawn once, against pixels that are transformed.

The reference paints each of three objects into one channel of the image, which every transform moves as it moves
pictures.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import assert_same, generator, target_of

from toolkit.base.errors import BadInput
from toolkit.base.masks import Masks, Rle, bitmap, boxes_around, rle, rles_of
from toolkit.data.dataset import DetectionDataset, MixedDataset, row_target
from toolkit.data.pipeline import BLENDING, largest_batch, loader_of_settings, train_transform, validation_loader
from toolkit.data.sampling import SampleKey
from toolkit.data.transforms.geometry import crop, draw_masks, exact_transform, flip, recheck_boxes, resize
from toolkit.data.transforms.mixing import mosaic
from toolkit.data.transforms.policy import policy_of
from toolkit.data.transforms.zoom_crop_colour import view
from toolkit.run.settings import DataConfig

patient = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
WHOLE = 3  # objects, one for each channel
ABOVE_CANVAS = 160  # canvases are filled with 124, which the filters of the recipe yolov3 overshoot
RECIPES = {
    "square": {"recipe": "detr"},
    "scales": {"recipe": "detr", "scales": (40, 56), "max_size": 90, "random_crop": True},
    "ssd": {"recipe": "ssd"},
    "yolov3": {"recipe": "yolov3"},
}
POLICY = [
    {"RandomZoomOut": {"fill": [123, 117, 104], "side_range": [1.0, 2.0]}},
    {"RandomApply": {"p": 0.8, "transforms": ["RandomIoUCrop"]}},
    "SanitizeBoundingBoxes",
    "RandomHorizontalFlip",
    {"RandomRotation": {"degrees": 20, "fill": 114}},
]
POLICY_OF = policy_of(POLICY)


def star(rng, size_hw):
    """A polygon of 5 to 12 corners without thin parts, cut off at the borders of the image."""
    height, width = size_hw
    count = rng.integers(5, 13)
    angles = np.arange(count) + rng.uniform(-0.3, 0.3, count)
    angles *= 2 * np.pi / count
    radii = rng.uniform(0.2, 0.35, count) * min(size_hw)
    centre = rng.uniform(0.2, 0.8, 2) * [width, height]
    corners = centre + radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)
    return np.clip(corners, 0, [width, height])


def shape_of(rng, size_hw):
    """A polygon, or run lengths."""
    rings = (star(rng, size_hw),)
    return rle(rings, size_hw) if rng.random() < 0.3 else rings


def sample_of(shapes, size_hw, crowd=()):
    """An image whose channels are the masks of the objects, with their boxes and masks."""
    masks = Masks.of(shapes).cut(0, 0, size_hw[1], size_hw[0])
    pixels = masks.drawn(size_hw)
    image = (pixels * 255).permute(1, 2, 0).contiguous().permute(2, 0, 1)
    boxes = boxes_around(pixels)
    boxes[:, 2:] = boxes[:, 2:].maximum(boxes[:, :2] + 1)
    target = target_of(boxes.tolist(), size_hw, crowd=crowd)
    del target["mixup"]
    return image, {**target, "masks": masks}


@st.composite
def masked(draw):
    """Three objects with masks of all kinds."""
    size_hw = draw(st.tuples(st.integers(24, 90), st.integers(24, 90)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return sample_of([shape_of(rng, size_hw) for _ in range(WHOLE)], size_hw, draw(st.sets(st.integers(0, 2))))


def grown(pixels, by, outside=0.0):
    """Masks (N, H, W) with all pixels at most `by` from them. outside: 1 if what lies outside of the image is one."""
    padded = F.pad(pixels[:, None].float(), [by] * 4, value=outside)
    return F.max_pool2d(padded, 2 * by + 1, 1)[:, 0] > 0


def assert_on_pixels(image, target, blur, within=None, level=127):
    """Each mask is its channel of the image, but for pixels within `blur` of the edge; both have one centre.

    within: function from a box to the pixels (H, W) bool that its object may have; None: all. level: of the image,
    above which a pixel is the object's.
    """
    target = recheck_boxes(image, target)
    found = draw_masks(target)
    assert found["masks"].dtype == torch.uint8 and found["masks"].shape[1:] == image.shape[1:]
    lengths = {len(found[name]) for name in ("boxes", "labels", "area", "iscrowd", "attributes", "masks")}
    assert len(lengths) == 1
    reference = image[found["labels"]] > level
    if within is not None:
        for row, box in enumerate(found["boxes"]):
            reference[row] &= within(box)
    drawn = found["masks"] > 0
    is_kept = target["masks"].drawn(image.shape[1:]).flatten(1).any(1).bool() | (target["iscrowd"] > 0)
    inside = well_inside(target["masks"][is_kept].visible_xyxy, image.shape[1:], blur)
    assert not (drawn & ~grown(reference, blur) & inside).any()
    assert not (~drawn & ~grown(~reference, blur, outside=1)).any()
    for mask, expected in zip(drawn, reference, strict=True):
        if mask.sum() > 100:
            assert (centre_of(mask) - centre_of(expected)).abs().max() < 0.4 * blur


def well_inside(visible_xyxy, size_hw, by):
    """The pixels (N, H, W) that are further than `by` from the edges of windows, which leave slivers of objects."""
    rows = np.arange(size_hw[0])[None, :, None]
    columns = np.arange(size_hw[1])[None, None]
    left, top, right, bottom = visible_xyxy.T[:, :, None, None]
    in_rows = (rows >= top + by) & (rows < bottom - by)
    in_columns = (columns >= left + by) & (columns < right - by)
    return torch.from_numpy(in_rows & in_columns)


def centre_of(weights):
    """The centre of gravity (row, column) of weights (H, W)."""
    weights = weights.double()
    rows = torch.arange(weights.shape[0], dtype=torch.float64)
    columns = torch.arange(weights.shape[1], dtype=torch.float64)
    return torch.stack([(weights.sum(1) * rows).sum(), (weights.sum(0) * columns).sum()]) / weights.sum()


def steepness(before_hw, after_hw):
    """By how many pixels the edge of resized pixels is uncertain: one of the old image, and one of the new."""
    return 1 + max(1, *(-(-new // old) for new, old in zip(after_hw, before_hw, strict=True)))


@patient
@given(masked(), st.data())
def test_whole_pixels_are_moved_exactly(sample, data):
    """Flips and crops of whole pixels move run lengths to the bit; the edge of a polygon is drawn anew."""
    image, target = sample
    height, width = image.shape[1:]
    top = data.draw(st.integers(0, height - 8))
    left = data.draw(st.integers(0, width - 8))
    region = (top, left, data.draw(st.integers(4, height - top)), data.draw(st.integers(4, width - left)))
    for image, target in (crop(*sample, region), flip(*sample), crop(*flip(*sample), region)):  # noqa: B020
        assert_on_pixels(image, target, 1)
        drawn = target["masks"].drawn(image.shape[1:])
        for label, pixels, shape in zip(target["labels"].tolist(), drawn, target["masks"].shapes, strict=True):
            if isinstance(shape, Rle):
                assert pixels.bool().equal(image[label] > 0)


@patient
@given(masked(), st.integers(24, 120), st.integers(24, 120))
def test_resized(sample, height, width):
    image, target = resize(*sample, (height, width))
    assert_on_pixels(image, target, steepness(sample[0].shape[1:], (height, width)))


@patient
@given(masked(), st.integers(-30, 20), st.integers(-30, 20), st.integers(30, 150), st.integers(30, 150))
def test_a_larger_canvas_and_what_a_window_cuts_stays_cut(sample, top, left, height, width):
    image, target = view(*sample, (top, left, height, width), (64, 80))
    assert_on_pixels(image, target, steepness((height, width), (64, 80)))
    cut = crop(*sample, (5, 5, 10, 12))
    image, target = view(*cut, (-20, -20, 60, 60), (60, 60))
    assert_on_pixels(image, target, 1)
    assert not image[target["labels"]][:, 30:].gt(127).any() and not target["masks"].drawn((60, 60))[:, 30:].any()


@pytest.mark.parametrize("name", RECIPES)
@patient
@given(sample=masked(), seed=st.integers(0, 2**32))
def test_every_recipe(name, sample, seed):
    c = DataConfig(image_size=48, flip=True, zoom_out=3.0, iou_crop=True, **RECIPES[name])
    size = () if c.scales else ((40, 56),)
    image, target = train_transform(c)(*sample, generator(seed), *size)
    # the crop of a few pixels may be enlarged tenfold
    sides = target["size"].tolist()
    scale = np.abs(target["masks"].scale).max(initial=1)
    if scale < 4:
        level = ABOVE_CANVAS if name == "yolov3" else 127
        assert_on_pixels(image, target, int(np.ceil(scale)) + 1, level=level)
    assert_same(*(train_transform(c)(*_plain(sample), generator(seed), *size) for _ in range(2)))
    assert image.shape[1:] == tuple(sides)


def _plain(sample):
    image, target = sample
    return image, {name: value for name, value in target.items() if name != "masks"}


@patient
@given(masked(), masked(), masked(), masked(), st.integers(16, 48), st.integers(16, 48))
def test_a_mosaic(a, b, c, d, row, column):
    samples = [a, b, c, d]
    image, target = mosaic(samples, (64, 64), (row, column))
    assert len(target["masks"]) == len(target["boxes"])
    plain, without = mosaic([_plain(sample) for sample in samples], (64, 64), (row, column))
    assert plain.equal(image) and without["boxes"].equal(target["boxes"])
    blur = max(steepness(sample[0].shape[1:], (64, 64)) for sample in samples)

    def quadrant(box):
        x, y = ((box[:2] + box[2:]) / 2).tolist()
        of_rows = torch.arange(64)[:, None] < row
        of_columns = torch.arange(64)[None] < column
        return (of_rows == (y < row)) & (of_columns == (x < column))

    assert_on_pixels(image, target, blur, quadrant)
    for box, pixels in zip(target["boxes"], target["masks"].drawn((64, 64)), strict=True):
        assert not pixels[~quadrant(box)].any()


@patient
@given(masked(), st.integers(0, 2**40))
def test_a_policy(sample, seed):
    """The pixels of masks go through the transforms; the colour that fills a canvas does not fill masks."""
    image, target = POLICY_OF(*sample, generator(seed))
    assert_on_pixels(image, target, 2)
    plain, without = POLICY_OF(*_plain(sample), generator(seed))
    assert plain.equal(image) and without["boxes"].equal(target["boxes"]), "the same numbers are drawn"


@pytest.mark.parametrize("scale", [0.5, 0.25, 0.7, 1.5])
def test_run_lengths_are_not_moved_by_a_change_of_size(scale):
    """Whichever pixel counts of two that are as near to the centre of a new one."""
    numbers = np.random.default_rng(0)
    errors = []
    areas = []
    for _ in range(200):
        low = numbers.integers(20, 60, 2)
        high = low + numbers.integers(20, 90, 2)
        picture = torch.zeros(1, 200, 200)
        picture[0, low[1] : high[1], low[0] : high[0]] = 1
        side = int(200 * scale)
        drawn = Masks.of(rles_of(picture)).resized(scale, scale).drawn((side, side))
        expected = np.concatenate([low, high]) * scale
        errors.append(boxes_around(drawn)[0].numpy() - expected)
        areas.append(float(drawn.sum()) / (scale**2 * np.prod(high - low)))
    assert abs(np.mean(errors, axis=0)).max() < 0.06
    assert np.mean(areas) == pytest.approx(1, abs=0.01)


def test_images_without_objects_go_through_everything():
    empty = sample_of([], (40, 50))
    empty = (torch.zeros(3, 40, 50, dtype=torch.uint8), empty[1])
    for name, recipe in RECIPES.items():
        c = DataConfig(image_size=48, zoom_out=3.0, iou_crop=True, **recipe)
        size = () if c.scales else ((40, 56),)
        transform = train_transform(c)
        for seed in range(6):
            policy_first = POLICY_OF(*empty, generator(seed))
            image, target = transform(*policy_first, generator(seed), *size)
            drawn = draw_masks(recheck_boxes(image, target), boxes_from_masks=True)
            assert drawn["masks"].shape == (0, *image.shape[1:]) and drawn["boxes"].shape == (0, 4), name


def test_boxes_from_masks_are_tight_and_what_has_no_pixel_is_dropped_unless_it_is_a_crowd():
    size_hw = (40, 60)
    triangle = (np.array([[10.0, 10], [30, 10], [10, 30]]),)
    _, target = sample_of([triangle, triangle, triangle, None, None], size_hw, crowd=(2, 3))
    target["boxes"] = torch.tensor([[5.0, 5, 40, 35]] * 5)
    drawn = draw_masks(target)
    assert drawn["labels"].tolist() == [0, 1, 2, 3] and drawn["boxes"].equal(target["boxes"][:4])
    assert drawn["masks"].dtype == torch.uint8 and not drawn["masks"][3].any()
    assert drawn["masks"][0].equal(torch.from_numpy(bitmap(triangle, size_hw)))
    tight = draw_masks(target, boxes_from_masks=True)["boxes"]
    assert tight.equal(torch.cat([boxes_around(drawn["masks"][:3]), target["boxes"][3:4]]))
    # of a crop, only what it shows
    image = torch.zeros(3, *size_hw, dtype=torch.uint8)
    cut = draw_masks(crop(image, target, (0, 0, 40, 20))[1], boxes_from_masks=True)
    assert cut["boxes"][0].tolist() == [10, 10, 20, 29] and cut["boxes"][3].tolist() == [5, 5, 20, 35]


class Table:
    """A table with masks, as far as a data set needs it."""

    predicates = ()
    labelled_classes = None
    image_root = None
    name = "in memory"

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def sizes_hw(self):
        return np.array([image.shape[1:] for image, _ in self.samples])

    def num_boxes(self):
        return np.array([len(target["boxes"]) for _, target in self.samples])

    def row(self, index):
        image, target = self.samples[index]
        columns = {"bbox": "boxes", "category": "labels", "area": "area", "iscrowd": "iscrowd"}
        return {
            "image_id": index,
            "file_name": f"{index}.png",
            "height": image.shape[1],
            "width": image.shape[2],
            "objects": {name: target[key].numpy().copy() for name, key in columns.items()},
            "relations": dict.fromkeys(("subject", "object", "predicate"), np.zeros(0, np.int64)),
            "masks": list(target["masks"].shapes),
        }

    def decode_image(self, row, least_hw=None):
        image = self.samples[row["image_id"]][0]
        if least_hw is None:
            return image
        return F.avg_pool2d(image[None].float(), 2)[0].to(torch.uint8)  # at half its size


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    samples = []
    for size_hw in ((40, 60), (64, 48), (50, 50), (80, 90), (33, 47)):
        samples.append(sample_of([shape_of(rng, size_hw) for _ in range(WHOLE)], size_hw))
    return Table(samples)


def test_samples_have_masks_only_where_asked_for(table):
    transform = train_transform(DataConfig(image_size=48, zoom_out=2.0))
    for key in (SampleKey(0, index) for index in range(len(table))):
        image, plain = DetectionDataset(table, transform, 1)[key]
        with_masks, target = DetectionDataset(table, transform, 1, masks=True)[key]
        assert "masks" not in plain and with_masks.equal(image)
        assert target["masks"].shape == (len(target["boxes"]), *image.shape[1:]) and target["masks"].any()
        assert target["boxes"].equal(plain["boxes"][torch.isin(plain["labels"], target["labels"])])
        tight = DetectionDataset(table, transform, 1, boxes_from_masks=True)[key][1]
        assert "masks" not in tight and tight["boxes"].equal(boxes_around(target["masks"]))
        both = DetectionDataset(table, transform, 1, masks=True, boxes_from_masks=True)[key][1]
        assert both["boxes"].equal(tight["boxes"]) and both["masks"].equal(target["masks"])


def test_mosaics_and_pictures_decoded_at_half_their_size(table):
    transform = train_transform(DataConfig(image_size=64, flip=False))
    options = {"masks": True, "mosaic": 1.0}
    dataset = MixedDataset(table, transform, 1, **options)
    for index in range(len(table)):
        image, target = dataset[SampleKey(0, index, (64, 64))]
        assert len(target["masks"]) == len(target["boxes"]) > 0 and target["masks"].any()
        assert not (target["masks"].bool() & ~grown(image[target["labels"]] > 127, 2)).any()
    halved = DetectionDataset(table, transform, 1, masks=True, least_size=lambda size_hw: (1, 1))
    for index in (0, 1, 2, 3):
        image, target = halved[SampleKey(0, index)]
        whole = DetectionDataset(table, transform, 1, masks=True)[SampleKey(0, index)][1]
        apart = (whole["masks"] != target["masks"]).float().mean()
        assert image.shape[1:] == target["masks"].shape[1:] == (64, 64) and apart < 0.01


def test_what_lies_outside_the_annotated_picture_does_not_show_on_a_larger_canvas(table):
    row = table.row(0)
    row["masks"] = [(np.array([[-30.0, -30], [30, -30], [30, 30], [-30, 30]]),)] * WHOLE
    target = row_target(row, (40, 60), masks=True)
    image, target = view(torch.zeros(3, 40, 60, dtype=torch.uint8), target, (-40, -60, 120, 180), (120, 180))
    drawn = target["masks"].drawn((120, 180))
    assert drawn[:, 40:70, 60:90].all() and drawn.sum() == WHOLE * 30 * 30


def test_the_last_epochs_have_masks_too(table):
    c = DataConfig(image_size=48)
    plain = train_transform(replace(c, flip=False))
    dataset = MixedDataset(table, train_transform(c), 1, masks=True, mosaic=1.0, plain=plain)
    dataset.plan(1, 4, 2)
    key = SampleKey(1, 0, (48, 48))
    assert_same(dataset[key], DetectionDataset(table, plain, 1, masks=True)[key])


def test_what_cannot_keep_masks_is_named_all_at_once(table):
    c = DataConfig(image_size=64, batch_size_per_device=2, workers=0)
    blended = replace(c, tile=32, mixup=True, batch_mixup=0.5, copy_blend=0.1, plain_epochs=0)
    for masks, settings_of, asked_by in (
        (True, blended, "model.masks"),
        (False, replace(blended, boxes_from_masks=True), "data.boxes_from_masks"),
    ):
        with pytest.raises(BadInput) as caught:
            loader_of_settings(table, settings_of, seed=0, stride=1, masks=masks)
        for name, problem in zip(("tile", *BLENDING), caught.value.problems, strict=True):
            assert problem.startswith(f"data.{name} ") and asked_by in problem


@pytest.mark.parametrize("augmented", [True, False])
def test_a_loader_of_the_settings_gives_masks_and_boxes_around_them(table, augmented):
    c = DataConfig(image_size=64, batch_size_per_device=5, workers=0, mosaic=0.5, boxes_from_masks=True)
    for masks in (True, False):
        _, loader = loader_of_settings(table, c, seed=0, stride=1, augmented=augmented, masks=masks)
        batch = next(iter(loader))
        assert all(("masks" in target) == masks for target in batch.targets)
        for target in batch.targets if masks else ():
            assert target["masks"].shape == (len(target["boxes"]), 64, 64)
            assert target["boxes"].equal(boxes_around(target["masks"]))
    val_loader = validation_loader(table, exact_transform(64), batch_size=5, workers=0, stride=1, masks=True)
    assert next(iter(val_loader)).targets[0]["masks"].shape == (WHOLE, 64, 64)


def test_the_memory_probe_has_the_picture_with_the_most_masks():
    """Masks take an image of memory each, so the fullest picture counts, also where a batch is one picture."""
    rng = np.random.default_rng(0)
    counts = [1, 2, 9, 1]
    sides = [90, 40, 30, 50]
    samples = []
    for count, side in zip(counts, sides, strict=True):
        _, target = sample_of([shape_of(rng, (side, side)) for _ in range(count)], (side, side))
        samples.append((torch.zeros(3, side, side, dtype=torch.uint8), target))
    table = Table(samples)
    transform = exact_transform(64)
    most = largest_batch(DetectionDataset(table, transform, masks=True), 1, 1)
    assert [target["image_id"] for target in most.targets] == [2] and most.targets[0]["masks"].shape == (9, 64, 64)
    assert largest_batch(DetectionDataset(table, transform), 1, 1).targets[0]["image_id"] == 0
