"""One pipeline for all detectors: each recipe is its own transform, and boxes and relations survive everything."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from documents import row_of
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import (
    assert_same,
    assert_well_formed,
    generator,
    noise_table,
    painted,
    sample,
    samples,
    shapes_table,
    tensors_of,
)

from toolkit.base.errors import BadInput
from toolkit.data.dataset import DetectionDataset, MixedDataset
from toolkit.data.pipeline import (
    RECIPE_NAMES,
    aspect_ratio_groups,
    check_one_size,
    loader_of_settings,
    processor_size,
    repeat_factors,
    train_transform,
    training_sizes,
    val_transform,
)
from toolkit.data.sampling import SampleKey, VariableSizes
from toolkit.data.table import Category
from toolkit.data.transforms.geometry import (
    Compose,
    RandomFlip,
    ResizeShorter,
    ThenResize,
    detr_train_transform,
    recheck_boxes,
)
from toolkit.data.transforms.zoom_crop_colour import PhotometricDistortion, SeenRegion
from toolkit.detectors.ssd.transforms import SsdTransform
from toolkit.detectors.yolov3.transforms import ColourDistortion, ConstrainedCrop, RandomExpand, Yolov3Transform
from toolkit.run.settings import DataConfig

SIDE = 48
SCALES = {"scales": [40, 56], "max_size": 90}
ALL_ON = {"flip": True, "photometric": True, "zoom_out": 3.0, "iou_crop": True}
# Options of each; the size of the square where the keys carry none
KINDS = {
    "detr square": {"recipe": "detr"},
    "detr multi_scale": {"recipe": "detr", "multi_scale": [32, 64]},
    "detr one scale": {"recipe": "detr", "scales": [40], "max_size": 90},
    "detr scales": {"recipe": "detr", **SCALES},
    "detr scales, crop": {"recipe": "detr", **SCALES, "random_crop": True},
    "ssd": {"recipe": "ssd", "multi_scale": [32, 64], "multi_scale_pixels": True},
    "yolov3": {"recipe": "yolov3", "multi_scale": [32, 64], "multi_scale_every": 2},
}


def config(kind="detr square", **options):
    return DataConfig(
        **{
            "image_size": SIDE,
            "batch_size_per_device": 4,
            "workers": 0,
            **KINDS[kind],
            **options,
        }
    )


def made(kind, **options):
    """The transform of a kind, and a size to call it with: none, or one that is not square."""
    c = config(kind, **ALL_ON | options)
    return train_transform(c), ((40, 56),) if training_sizes(c) else ()


# ---- recipes ---------------------------------------------------------------------------------------------------------


COLOURS = {"photometric": True}
REGIONS = {"zoom_out": 2.5, "iou_crop": True}
FLIP = RandomFlip(0.5)


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("ssd", {}, SsdTransform(1.0, False, True, False)),
        (
            "ssd",
            {**REGIONS, **COLOURS, "flip": False},
            SsdTransform(2.5, True, False, True),
        ),
        ("yolov3", {}, Yolov3Transform((), 0.5)),
        (
            "yolov3",
            {**REGIONS, **COLOURS, "flip": False},
            Yolov3Transform((ColourDistortion(), RandomExpand(2.5), ConstrainedCrop()), 0.0),
        ),
        (
            "detr square",
            {"flip": False},
            ThenResize(Compose(()), Compose(()), (SIDE, SIDE)),
        ),
        (
            "detr square",
            {**REGIONS, **COLOURS},
            ThenResize(
                Compose((SeenRegion(2.5, True), FLIP)),
                Compose((PhotometricDistortion(),)),
                (SIDE, SIDE),
            ),
        ),
        (
            "detr one scale",
            {},
            Compose((Compose((FLIP, ResizeShorter((40,), 90))),)),
        ),
        (
            "detr scales, crop",
            {**COLOURS, "zoom_out": 2.5, "flip": False},
            Compose(
                (
                    SeenRegion(2.5, False),
                    detr_train_transform([40, 56], 90, flip_probability=0.0),
                    PhotometricDistortion(),
                )
            ),
        ),
    ],
)
def test_a_recipe_is_its_transforms_in_order(kind, options, expected):
    assert train_transform(config(kind, **options)) == expected


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_with_everything_off_a_recipe_is_the_resize_of_validation(recipe):
    given_sample = sample([[5, 5, 30, 40]])
    transform = train_transform(DataConfig(recipe=recipe, image_size=SIDE, flip=False))
    found = transform(*given_sample, generator(), (SIDE, SIDE))
    assert_same(found, val_transform(SIDE, [], 0)(*given_sample, generator()))
    # The size of the batch counts, if it has one.
    assert transform(*given_sample, generator(), (32, 64))[0].shape == (3, 32, 64)
    if recipe == "detr":
        assert_same(found, transform(*given_sample, generator()))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(samples(), st.integers(0, 2**32))
def test_boxes_and_relations_survive_every_recipe(kind, given_sample, seed):
    image, target = given_sample
    before = tensors_of(target)
    transform, size = made(kind)
    state = torch.get_rng_state()
    out, found = transform(image, target, generator(seed), *size)
    assert torch.get_rng_state().equal(state)  # randomness comes from the generator alone
    assert_well_formed(out, recheck_boxes(out, found), target)
    if "scale" not in kind or size:
        assert tuple(out.shape[-2:]) == (size[0] if size else (SIDE, SIDE))
    assert_same((out, found), transform(image, target, generator(seed), *size))
    assert_same((image, before), (image, tensors_of(target)))  # the given target is left alone


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_boxes_goes_through_every_recipe(kind):
    grid = [[x, y, x + 1, y + 1] for x in range(25) for y in range(20)]
    one = [[3, 2, 20, 15]]
    transform, size = made(kind)
    cases = (
        ([], ()),
        (one, ()),
        (one, (0,)),
        ([[0, 0, 25, 20]], ()),
        (grid, ()),
        (grid, range(0, 500, 3)),
    )
    for boxes, crowd in cases:
        relations = [[len(boxes) - 1, 0, 3]] if boxes else []
        image, target = sample(boxes, (20, 25), relations, crowd)
        for seed in range(8):
            out, found = transform(image, target, generator(seed), *size)
            assert_well_formed(out, recheck_boxes(out, found), target)
            if boxes == one and not crowd and "crop" not in kind:
                assert len(found["boxes"]) == 1  # no crop takes the only box


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "multi" not in kind])
@pytest.mark.parametrize(
    "regions",
    [{"iou_crop": False}, {"zoom_out": 1.0}, {}],
    ids=["zoom", "crop", "both"],
)
def test_boxes_stay_on_their_pixels(kind, regions):
    """A white rectangle on black: white inside the moved box and nowhere else; without zooming out none is filled."""
    image, target = painted([[50, 37, 84, 61]], (90, 120))
    transform, size = made(kind, photometric=False, **regions)
    shapes = set()
    for seed in range(15):
        out, found = transform(image, target, generator(seed), *size)
        is_near = torch.zeros(out.shape[1:], dtype=torch.bool)
        for x0, y0, x1, y1 in found["boxes"].tolist():
            inside = out[:, int(y0) + 2 : int(y1) - 1, int(x0) + 2 : int(x1) - 1]
            assert inside.numel() == 0 or inside.float().mean() > 245
            is_near[max(0, int(y0) - 3) : int(y1) + 4, max(0, int(x0) - 3) : int(x1) + 4] = True
            shapes.add((round(x1 - x0), round(y1 - y0)))
        if len(found["boxes"]):
            assert not (out[:, ~is_near] > 200).any()
        if "zoom_out" in regions:  # what fills a canvas is reddish, what an image shows here is grey
            assert out[0].equal(out[2])
    assert len(shapes) > 3


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"recipe": "detr"}, None),
        ({"recipe": "detr", "scales": [80]}, None),
        ({"recipe": "detr", "mosaic": 0.5}, VariableSizes(((64, 64),))),
        (
            {"recipe": "detr", "multi_scale": [32, 96], "multi_scale_every": 10},
            VariableSizes(((32, 32), (96, 96)), 10),
        ),
        ({"recipe": "ssd", "multi_scale_pixels": True}, VariableSizes(((64, 64),))),
        (
            {"recipe": "ssd", "multi_scale": [32, 96], "multi_scale_pixels": True},
            VariableSizes(
                ((32, 32), (96, 96)),
                1,
                (64, 64),
            ),
        ),
        ({"recipe": "yolov3", "multi_scale_every": 10}, VariableSizes(((64, 64),), 10)),
        ({"recipe": "ssd", "image_size": [48, 80], "mosaic": 0.5}, VariableSizes(((48, 80),))),
    ],
)
def test_sizes_of_the_recipes(options, expected):
    assert training_sizes(DataConfig(**{"image_size": 64} | options)) == expected


def test_the_size_of_a_processor():
    assert processor_size([48, 80], [], 0) == {"height": 48, "width": 80}
    assert processor_size(64, [], 0) == {"height": 64, "width": 64}
    assert processor_size(64, [40, 56], 90) == {"shortest_edge": 56, "longest_edge": 90}


def test_sizes_that_would_be_padded_are_named_with_the_nearest():
    check_one_size(32, [[64, 96], 64], [])
    with pytest.raises(BadInput) as caught:
        check_one_size(32, [[360, 640], 100], [80])
    scales, first, second = caught.value.problems
    assert "leave data.scales empty" in scales
    assert "360 x 640 px" in first
    assert "multiples of 32, such as [352, 640]" in first
    assert "multiples of 32, such as 96" in second


def test_portrait_images_are_a_group():
    sizes_hw = np.array(
        [
            [100, 50],
            [100, 100],
            [100, 150],
        ]
    )
    assert aspect_ratio_groups(sizes_hw).tolist() == [0, 1, 1]
    assert aspect_ratio_groups(sizes_hw[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (train_transform, {"recipe": "coco"}, ["data.recipe is 'coco'.*detr, ssd, yolov3"]),
        (train_transform, {"recipe": "ssd", "scales": [80]}, ["ssd.*data.scales.*set data.recipe to detr"]),
        (train_transform, {"random_crop": True, "zoom_out": 0.0}, ["random_crop.*give data.scales", "zoom_out is 0.0"]),
        (train_transform, {"scales": [80, 0]}, [r"data.scales is \[80, 0\]"]),
        (training_sizes, {"scales": [80], "multi_scale": [64]}, ["data.multi_scale .*data.scales"]),
        (training_sizes, {"scales": [80], "mosaic": 0.5}, ["data.mosaic .*data.scales.*mosaic to 0"]),
        (training_sizes, {"scales": [80], "copy_blend": 0.5}, ["copy_blend makes all images of a batch one size"]),
        (training_sizes, {"multi_scale": [64, -1]}, ["-1 is not a size of images .*data.multi_scale"]),
        (training_sizes, {"multi_scale_every": 0}, ["data.multi_scale_every 0"]),
        (
            training_sizes,
            {"image_size": [64, 0], "multi_scale": [[64]]},
            [r"\[64, 0\] is not", r"\[64\] is not"],
        ),
        (
            training_sizes,
            {"image_size": [384, 640], "multi_scale": [320, 480]},
            [r"other aspects.*\[\[248, 413\], \[372, 620\]\]"],
        ),
    ],
)
def test_all_that_cannot_go_together_is_named_at_once(make, options, words):
    with pytest.raises(BadInput) as caught:
        make(DataConfig(**{"image_size": 64} | options))
    assert len(caught.value.problems) == len(words)
    for each in words:
        assert caught.match(each)


# ---- loaders ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Eight images; each box has a class of its own, 10 times its image's number and on, which its attributes repeat;
    the predicate of a relation is 100 times its subject's class plus its object's."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(8):
        count = number % 5
        labels = [10 * number + position for position in range(count)]
        boxes = [[3 * j, 2 * j, 3 * j + 12, 2 * j + 15] for j in range(count)]
        pairs = [(s, o) for s in range(count) for o in range(count) if s != o]
        relations = [
            (
                s,
                o,
                100 * labels[s] + labels[o],
            )
            for s, o in pairs
        ]
        columns = {
            "iscrowd": [j % 3 // 2 for j in range(count)],
            "attributes": [[label + 1, 0] for label in labels],
        }
        rows.append(
            row_of(
                number,
                boxes,
                rng.integers(30, 70, 2).tolist(),
                labels,
                relations,
                **columns,
            )
        )
    names = [str(number) for number in range(80)]
    categories = [Category(number, name) for number, name in enumerate(names)]
    return noise_table(tmp_path_factory.mktemp("images"), rows, categories=categories, attributes=names)


def load(table, c):
    return loader_of_settings(table, c, seed=1, stride=1)


@pytest.mark.parametrize("kind", KINDS)
def test_all_columns_go_with_their_boxes_through_mixing_and_every_recipe(table, kind):
    mosaic = 0.0 if "scales" in KINDS[kind] else 0.5
    sampler, loader = load(table, config(kind, **ALL_ON, mixup=True, mosaic=mosaic))
    related = 0
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for target in (target for batch in loader for target in batch.targets):
            labels = target["labels"].tolist()
            assert target["attributes"].tolist() == [[label + 1, 0] for label in labels]
            assert target["iscrowd"].tolist() == [label % 10 % 3 // 2 for label in labels]
            assert len(target["boxes"]) == len(target["area"]) == len(target["mixup"]) == len(labels)
            ends = [(labels[s], labels[o]) for s, o, _ in target["relations"].tolist()]
            assert target["relations"][:, 2].tolist() == [100 * one + other for one, other in ends]
            if len(set(labels)) == len(labels):  # no image twice: all pairs of one image are related
                pairs = product(labels, labels)
                assert set(ends) == {(s, o) for s, o in pairs if s != o and s // 10 == o // 10}
            related += len(ends)
    assert related > 130


def test_samples_of_the_yolov3_recipe_draw_whether_they_are_mosaics(table):
    dataset = load(table, config("yolov3", **ALL_ON))[1].dataset.dataset

    def one_draw_first(image, target, generator, size_hw):
        torch.rand((), generator=generator)
        return dataset.transform(image, target, generator, size_hw)

    for index in range(len(table)):
        key = SampleKey(0, index, (SIDE, SIDE))
        assert_same(dataset[key], DetectionDataset(table, one_draw_first, 1)[key])
    for kind in KINDS:
        dataset = load(table, config(kind, **ALL_ON))[1].dataset.dataset
        assert isinstance(dataset, MixedDataset) == (kind == "yolov3")


def test_the_last_epochs_are_without_what_is_named(tmp_path):
    table = shapes_table(tmp_path, 4)
    options = {
        "zoom_out": 4.0,
        "iou_crop": True,
        "augment": ["RandomVerticalFlip"],
        "multi_scale": [32, 64],
    }
    c = config(flip=False, **options, plain_without=list(options))
    dataset = loader_of_settings(table, c, seed=0, stride=1)[1].dataset.dataset
    assert dataset.has_plain_epochs
    dataset.plan(2, 40, 4)
    plain = DetectionDataset(table, train_transform(config(flip=False)), 0)
    assert_same(dataset[SampleKey(9, 1, (32, 32))], plain[SampleKey(9, 1)])
    assert dataset[SampleKey(7, 1, (32, 32))][0].shape == (3, 32, 32)


def test_repeats_of_rare_classes_are_those_of_the_paper():
    both, frequent, none = np.array([0, 1]), np.array([0]), np.array([], np.int64)
    labels = [frequent, both, frequent, none, frequent] * 20  # class 1 is in 0.2 of the images, class 0 in 0.8
    assert np.allclose(repeat_factors(labels, 2, 0.45)[:5], [1, 1.5, 1, 1, 1])
    assert (repeat_factors(labels, 2, 0.0) == 1).all()
    with pytest.raises(BadInput, match="repeat_factor is 1.5"):
        repeat_factors(labels, 2, 1.5)
    with pytest.raises(BadInput, match="predicate_repeat_factor is -1"):
        repeat_factors(labels, 2, -1, "predicate_repeat_factor")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mosaic": 1.5}, "data.mosaic is 1.5"),
        (
            {"recipe": "ssd", "multi_scale": [32], "multi_scale_pixels": True, "group_by_aspect_ratio": True},
            "data.group_by_aspect_ratio or data.multi_scale_pixels",
        ),
        ({"mosaic": 0.5, "plain_without": ["zoom_out"]}, "mosaic cannot go on"),
        ({"batch_mixup": 0.5, "plain_without": ["mosaic"]}, "batch_mixup cannot go on"),
        (
            {"multi_scale": [32], "multi_scale_pixels": True, "plain_without": ["multi_scale"]},
            "multi_scale_pixels to false",
        ),
    ],
)
def test_loaders_refuse_what_cannot_be(table, options, words):
    c = replace(config(), **options)
    with pytest.raises(BadInput, match=words):
        load(table, c)
