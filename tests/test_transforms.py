"""pytest tests/test_transforms.py"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from toolkit.data.transforms.geometry import (
    Compose,
    RandomChoice,
    RandomFlip,
    RandomSizeCrop,
    ResizeCropResize,
    ResizeShorter,
    crop,
    detr_train_transform,
    flip,
    mirrored_predicates,
    recheck_boxes,
    resize,
    resize_target,
    shorter_side_size,
    square_transform,
)
from toolkit.errors import BadInput

# A busy machine is no failure.
settings.register_profile("patient", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

SMALL_DETR = {"scales": (48, 64, 80), "max_longer": 133, "first_scales": (40, 50, 60), "crop_sizes": (38, 60)}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def make_target(boxes, size_hw, relations=()):
    """Labels number the boxes, so that a test can tell which of them are left."""
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return {
        "image_id": 7,
        "boxes": boxes,
        "labels": torch.arange(len(boxes)),
        "area": (boxes[:, 2:] - boxes[:, :2]).prod(1),
        "iscrowd": torch.arange(len(boxes)) % 2,
        "relations": torch.tensor(relations, dtype=torch.int64).reshape(-1, 3),
        "orig_size": torch.tensor(size_hw),
        "size": torch.tensor(size_hw),
    }


@st.composite
def samples(draw, max_side=90, max_boxes=8):
    """A noise image with boxes of at least a quarter pixel inside it and relations between them."""
    height, width = draw(st.integers(8, max_side)), draw(st.integers(8, max_side))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(0, max_boxes))
    ends = np.sort(rng.integers(0, (4 * width, 4 * height), (count, 2, 2)), axis=1) / 4
    ends[:, 1] += 0.25
    relations = rng.integers(0, max(count, 1), (count, 3)) if count else ()
    image = torch.from_numpy(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).permute(2, 0, 1)
    return image, make_target(ends.reshape(-1, 4).tolist(), (height, width), np.array(relations).tolist())


def assert_well_formed(image, target, before):
    """What must hold for any transform's result."""
    height, width = image.shape[-2:]
    boxes, labels = target["boxes"], target["labels"].tolist()
    assert image.dtype == torch.uint8 and boxes.dtype == target["area"].dtype == torch.float32
    assert target["size"].tolist() == [height, width] and target["orig_size"].equal(before["orig_size"])
    assert target["image_id"] == 7
    assert (boxes[:, 2:] > boxes[:, :2]).all() and (boxes >= 0).all()
    assert (boxes <= torch.tensor([width, height, width, height]) + 1e-3).all()
    assert len(boxes) == len(labels) == len(target["area"]) == len(target["iscrowd"])
    assert target["iscrowd"].tolist() == [label % 2 for label in labels]  # still of the same boxes
    named = [(labels[s], labels[o], p) for s, o, p in target["relations"].tolist()]
    assert named == [(s, o, p) for s, o, p in before["relations"].tolist() if s in labels and o in labels]


def detr_size(image_size, size, max_size=None):
    """get_size_with_aspect_ratio of facebookresearch/detr, `datasets/transforms.py`; (w, h) in, (h, w) out."""
    w, h = image_size
    if max_size is not None:
        min_original_size = float(min((w, h)))
        max_original_size = float(max((w, h)))
        if max_original_size / min_original_size * size > max_size:
            size = int(round(max_size * min_original_size / max_original_size))
    if (w <= h and w == size) or (h <= w and h == size):
        return (h, w)
    if w < h:
        return (int(size * h / w), size)
    return (size, int(size * w / h))


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 1000), st.none() | st.integers(50, 2000))
def test_size_is_detrs(height, width, shorter, max_longer):
    expected = detr_size((width, height), shorter, max_longer)
    if min(expected) > 0:  # DETR asks for an empty image when a very long one is limited
        assert shorter_side_size((height, width), shorter, max_longer) == expected
    assert min(shorter_side_size((height, width), shorter, max_longer)) > 0


def test_sizes_of_the_recipe():
    assert shorter_side_size((480, 640), 800, 1333) == (800, 1066)
    assert shorter_side_size((640, 427), 800, 1333) == (1199, 800)
    assert shorter_side_size((200, 1000), 800, 1333) == (267, 1335)  # DETR's rounding oversteps the limit by 2


@given(samples())
def test_flip_is_an_involution(sample):
    image, target = sample
    once_image, once = flip(image, target)
    twice_image, twice = flip(once_image, once)
    assert_well_formed(once_image, once, target)
    assert twice_image.equal(image) and twice["boxes"].equal(target["boxes"])
    assert once["area"].equal(target["area"])


@given(samples(), st.integers(1, 200), st.integers(1, 200))
def test_resize_there_and_back(sample, height, width):
    image, target = sample
    resized_image, resized = resize(image, target, (height, width))
    assert resized_image.shape == (3, height, width)
    sides = resized["boxes"][:, 2:] - resized["boxes"][:, :2]
    torch.testing.assert_close(resized["area"], sides.prod(1), rtol=1e-3, atol=0.05)
    back = resize_target(resized, (height, width), image.shape[-2:])
    for name in ("boxes", "area", "size"):
        torch.testing.assert_close(back[name], target[name], rtol=1e-4, atol=1e-3)


@given(samples(), st.data())
def test_crop(sample, data):
    image, target = sample
    height, width = image.shape[-2:]
    region = RandomSizeCrop(4, 40).draw((height, width), generator(data.draw(st.integers(0, 2**32))))
    top, left, crop_height, crop_width = region
    assert top >= 0 and left >= 0 and top + crop_height <= height and left + crop_width <= width
    assert min(4, height) <= crop_height <= 40 and min(4, width) <= crop_width <= 40
    cropped_image, cropped = crop(image, target, region)
    assert_well_formed(cropped_image, cropped, target)
    assert cropped_image.equal(image[:, top : top + crop_height, left : left + crop_width])
    sides = cropped["boxes"][:, 2:] - cropped["boxes"][:, :2]
    assert cropped["area"].equal(sides.prod(1))
    # Exactly the boxes that share area with the region are left.
    low = target["boxes"][:, :2].maximum(torch.tensor([left, top]))
    high = target["boxes"][:, 2:].minimum(torch.tensor([left + crop_width, top + crop_height]))
    assert cropped["labels"].tolist() == (high > low).all(1).nonzero()[:, 0].tolist()


@given(samples(), st.integers(0, 2**32))
def test_fused_crop_branch_is_the_three_steps(sample, seed):
    image, target = sample
    steps = ResizeShorter((40, 50)), RandomSizeCrop(30, 45), ResizeShorter((48, 64, 80), 133)
    one_image, one = ResizeCropResize(*steps)(image, target, generator(seed))
    three_image, three = Compose(steps)(image, target, generator(seed))
    assert one_image.shape == three_image.shape and one["size"].equal(three["size"])
    assert_well_formed(one_image, one, target)
    # A region's edge moves by half a source pixel at most, and by one where a whole pixel must be left.
    scratch = generator(seed)
    middle = steps[0].draw(image.shape[-2:], scratch)
    _, _, crop_height, crop_width = steps[1].draw(middle, scratch)
    pixel = torch.tensor([one_image.shape[2] / crop_width * middle[1] / image.shape[2],
                          one_image.shape[1] / crop_height * middle[0] / image.shape[1]]).repeat(2)  # fmt: skip
    tall = max(image.shape[1:]) / min(image.shape[1:])  # a pixel of a thin image is a large part of its region
    three_boxes = dict(zip(three["labels"].tolist(), three["boxes"], strict=True))
    one_boxes = dict(zip(one["labels"].tolist(), one["boxes"], strict=True))
    for label in one_boxes.keys() & three_boxes.keys():
        if tall < 2:
            assert ((one_boxes[label] - three_boxes[label]).abs() <= pixel * 1.5 + 1e-3).all()
    for label in one_boxes.keys() ^ three_boxes.keys():  # only slivers at the region's edge
        box = one_boxes.get(label, three_boxes.get(label))
        assert ((box[2:] - box[:2]) <= pixel[:2] + 1e-3).any()


@given(samples(max_boxes=3), st.integers(0, 2**32), st.booleans())
def test_recipes_give_well_formed_targets(sample, seed, square):
    image, target = sample
    given_boxes = target["boxes"].clone()
    transform = Compose((RandomFlip(0.5), square_transform(32))) if square else detr_train_transform(**SMALL_DETR)
    out_image, out = transform(image, target, generator(seed))
    assert_well_formed(out_image, recheck_boxes(out_image, out), target)
    assert target["boxes"].equal(given_boxes)  # the given target is left alone
    again_image, again = transform(image, target, generator(seed))
    assert out_image.equal(again_image) and out["boxes"].equal(again["boxes"])


@pytest.mark.parametrize("seed", range(24))
def test_boxes_stay_on_their_pixels(seed):
    """A white rectangle on black: white inside the transformed box, black outside, but for one blurred border."""
    image = torch.zeros(3, 90, 120, dtype=torch.uint8)
    image[:, 37:61, 50:84] = 255
    target = make_target([[50, 37, 84, 61]], (90, 120))
    image, target = detr_train_transform(**SMALL_DETR)(image, target, generator(seed))
    assert len(target["boxes"]) <= 1
    inside = torch.zeros(image.shape[1:], dtype=torch.bool)
    near = inside.clone()
    for x_min, y_min, x_max, y_max in target["boxes"].tolist():
        inside[int(y_min) + 2 : int(y_max) - 1, int(x_min) + 2 : int(x_max) - 1] = True
        near[max(int(y_min) - 2, 0) : int(y_max) + 3, max(int(x_min) - 2, 0) : int(x_max) + 3] = True
    assert (image[:, inside] > 200).all() and (image[:, ~near] < 50).all()


def test_resize_is_pillows():
    """Antialiased bilinear, up and down; both round in fixed point, so a level of difference is allowed."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (60, 80, 3), dtype=np.uint8)
    for size_hw in ((100, 133), (23, 31), (60, 31)):
        expected = np.asarray(Image.fromarray(pixels).resize(size_hw[::-1], Image.Resampling.BILINEAR)).astype(int)
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        for layout in (image, image.contiguous(), image.flip(0).flip(0)):
            resized, _ = resize(layout, make_target([], (60, 80)), size_hw)
            assert resized.permute(1, 2, 0).is_contiguous()
            assert np.abs(resized.permute(1, 2, 0).numpy().astype(int) - expected).max() <= 1


def test_randomness_comes_from_the_generator_alone():
    image, target = torch.zeros(3, 50, 60, dtype=torch.uint8), make_target([[5, 5, 30, 40]], (50, 60))
    state = torch.get_rng_state()
    shapes = {detr_train_transform(**SMALL_DETR)(image, target, generator(seed))[0].shape for seed in range(30)}
    assert torch.get_rng_state().equal(state)
    assert len(shapes) > 10


def test_choice_and_flip_frequencies():
    image, target = torch.zeros(3, 8, 8, dtype=torch.uint8), make_target([[0, 0, 2, 2]], (8, 8))
    source = generator()
    choice = RandomChoice((RandomFlip(0.0), RandomFlip(1.0), square_transform(4)))
    outcomes = [(out[0].shape[-1], out[1]["boxes"][0, 0].item()) for out in (choice(image, target, source)
                for _ in range(600))]  # fmt: skip
    for outcome in ((8, 0.0), (8, 6.0), (4, 0.0)):
        assert 150 < outcomes.count(outcome) < 250
    for probability in (0.0, 1.0):
        recipe = detr_train_transform((8,), first_scales=(8,), crop_sizes=(8, 8), flip_probability=probability)
        assert recipe(image, target, source)[1]["boxes"][0, 0].item() == 6.0 * probability
    flips = sum(RandomFlip(0.25)(image, target, source)[1]["boxes"][0, 0].item() == 6.0 for _ in range(800))
    assert 150 < flips < 250


def test_one_scale_is_not_random():
    image, target = torch.zeros(3, 48, 64, dtype=torch.uint8), make_target([[0, 0, 64, 48]], (48, 64))
    image, target = ResizeShorter((80,), 133)(image, target, generator())
    assert image.shape == (3, 80, 106) and target["boxes"].tolist() == [[0, 0, 106, 80]]
    assert target["orig_size"].tolist() == [48, 64] and target["size"].tolist() == [80, 106]


def edge_cases():
    grid = [[x, y, x + 1, y + 1] for x in range(25) for y in range(20)]
    return {"none": [], "five hundred of one pixel": grid, "whole image": [[0, 0, 25, 20]]}


@pytest.mark.parametrize("name", edge_cases())
@pytest.mark.parametrize("seed", range(8))
def test_no_boxes_many_boxes_pixel_boxes_whole_images(name, seed):
    boxes = edge_cases()[name]
    target = make_target(boxes, (20, 25), [[len(boxes) - 1, 0, 3]] if boxes else [])
    image, out = detr_train_transform(**SMALL_DETR)(torch.zeros(3, 20, 25, dtype=torch.uint8), target, generator(seed))
    assert_well_formed(image, recheck_boxes(image, out), target)
    if name == "whole image":  # still the whole image, whatever was cropped
        assert out["boxes"].tolist() == [[0, 0, image.shape[2], image.shape[1]]]


def test_recheck_drops_what_has_no_extent_and_clips():
    image = torch.zeros(3, 10, 20, dtype=torch.uint8)
    boxes = [[-1, 2, 5, 12], [4, 4, 4, 8], [20.5, 1, 30, 3], [1, 1, 2, 2]]
    target = make_target(boxes, (10, 20), [[0, 3, 1], [1, 3, 2]])
    checked = recheck_boxes(image, target)
    assert checked["boxes"].tolist() == [[0, 2, 5, 10], [1, 1, 2, 2]] and checked["labels"].tolist() == [0, 3]
    assert checked["relations"].tolist() == [[0, 1, 1]]


def test_recheck_names_the_image_of_a_defective_transform():
    image = torch.zeros(3, 10, 20, dtype=torch.uint8)
    with pytest.raises(ValueError, match="image id 7.*non-finite"):
        recheck_boxes(image, make_target([[0, 0, float("nan"), 3]], (10, 20)))
    with pytest.raises(ValueError, match=r"image id 7.*\(10, 20\).*\(20, 10\)"):
        recheck_boxes(image, make_target([], (20, 10)))
    with pytest.raises(ValueError, match="image id 7.*'labels': 2"):
        recheck_boxes(image, {**make_target([[0, 0, 1, 1]], (10, 20)), "labels": torch.zeros(2, dtype=torch.int64)})


SIDED = ("left of", "right of", "above", "to the left of", "west of", "east of", "bright")


def test_a_name_that_says_a_side_says_the_other_one_in_a_mirrored_picture():
    assert mirrored_predicates(SIDED).tolist() == [1, 0, 2, -1, 4, 5, 6]
    found = mirrored_predicates(SIDED, {"west of": "east of"})
    assert found.tolist() == [1, 0, 2, -1, 5, 4, 6]
    known = (found >= 0).nonzero()[:, 0]
    assert torch.equal(found[found[known]], known), "mirrored twice is as before"
    with pytest.raises(BadInput, match="north of.*no predicates of the data"):
        mirrored_predicates(SIDED, {"north of": "south of"})


def test_relations_are_mirrored_with_the_image_or_it_stays_as_it_is():
    image = torch.randint(0, 255, (3, 20, 40), dtype=torch.uint8)
    boxes = [[0, 0, 10, 10], [20, 0, 30, 10]]
    target = make_target(boxes, (20, 40), [[0, 1, 0], [1, 0, 1], [0, 1, 2]])
    target["mirrored_predicates"] = mirrored_predicates(SIDED)
    mirrored, found = flip(image, target)
    assert torch.equal(mirrored, image.flip(2)) and found["boxes"].tolist() == [[30, 0, 40, 10], [10, 0, 20, 10]]
    assert found["relations"].tolist() == [[0, 1, 1], [1, 0, 0], [0, 1, 2]]
    target["relations"][0, 2] = 3  # "to the left of", and there is no "to the right of"
    same, found = flip(image, target)
    assert same is image and found is target
    assert flip(image, make_target(boxes, (20, 40)))[1]["boxes"].tolist() == [[30, 0, 40, 10], [10, 0, 20, 10]]
