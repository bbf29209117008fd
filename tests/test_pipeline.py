"""One pipeline for all detectors: each recipe draws as its own transform does, boxes and relations survive everything.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from documents import row_of
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from samples import assert_same, assert_well_formed, generator, painted, sample, samples

from toolkit.base.errors import BadInput
from toolkit.data import splits
from toolkit.data.dataset import DetectionDataset, MixedDataset
from toolkit.data.pipeline import RECIPE_NAMES, loader_of_settings, train_transform, training_sizes, val_transform
from toolkit.data.sampling import SampleKey, VariableSizes
from toolkit.data.table import Category
from toolkit.data.table_cache import write_rows
from toolkit.data.transforms import zoom_crop_colour
from toolkit.data.transforms.geometry import (
    Compose,
    RandomFlip,
    ResizeShorter,
    detr_train_transform,
    exact_transform,
    recheck_boxes,
)
from toolkit.data.transforms.zoom_crop_colour import PhotometricDistortion, SeenRegion
from toolkit.detectors.ssd.transforms import SsdTransform
from toolkit.detectors.yolov3.transforms import ColourDistortion, ConstrainedCrop, RandomExpand, Yolov3Transform
from toolkit.run.settings import DataConfig
from toolkit.tools.shapes import make_shapes

SIDE = 48
ALL_ON = {"flip": True, "photometric": True, "zoom_out": 3.0, "iou_crop": True}
# (options of train_transform, options of training_sizes); the size of the square where the keys carry none
EVERYTHING = {
    "detr square": ({"recipe": "detr"}, {}),
    "detr multi_scale": ({"recipe": "detr"}, {"multi_scale": (32, 64)}),
    "detr one scale": ({"recipe": "detr", "scales": (40,), "max_size": 90}, {}),
    "detr scales": ({"recipe": "detr", "scales": (40, 56), "max_size": 90}, {}),
    "detr scales, crop": ({"recipe": "detr", "scales": (40, 56), "max_size": 90, "random_crop": True}, {}),
    "ssd": ({"recipe": "ssd"}, {"multi_scale": (32, 64), "multi_scale_pixels": True}),
    "yolov3": ({"recipe": "yolov3"}, {"multi_scale": (32, 64), "multi_scale_every": 2}),
}


def made(name, **options):
    """The transform of a case, and a size to call it with: none, or one that is not square."""
    own, sizes = EVERYTHING[name]
    transform = train_transform(DataConfig(**{"image_size": SIDE, **ALL_ON, **own, **options}))
    return transform, () if own["recipe"] == "detr" and not sizes else ((40, 56),)


def direct_transforms(flip, photometric):
    """(options of train_transform, the transform that a script built for itself), all with image_size SIDE."""
    p, colours = 0.5 * flip, (PhotometricDistortion(),) * photometric
    square = (RandomFlip(p),) * flip + (exact_transform(SIDE),)
    yield {"recipe": "detr"}, Compose((*square, *colours))
    yield {"recipe": "detr", "scales": [40]}, Compose((RandomFlip(p), ResizeShorter((40,), 90), *colours))
    yield (
        {"recipe": "detr", "scales": [40, 56], "random_crop": True},
        Compose((detr_train_transform([40, 56], 90, flip_probability=p), *colours)),
    )
    for zoom_out in (1.0, 2.5):
        for crop in (False, True):
            regions = {"zoom_out": zoom_out, "iou_crop": crop}
            yield {"recipe": "ssd", **regions}, SsdTransform(zoom_out, crop, flip, photometric)
            steps = (ColourDistortion(),) * photometric + (RandomExpand(zoom_out),) * (zoom_out > 1)
            steps += (ConstrainedCrop(),) * crop
            if steps or flip:
                yield {"recipe": "yolov3", **regions}, Yolov3Transform(steps, p)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("photometric", [False, True])
def test_a_recipe_gives_what_its_own_transform_gives(flip, photometric):
    image, target = sample([[5, 5, 30, 40], [20, 10, 60, 50], [0, 0, 9, 9]], (60, 80), [[0, 1, 4]], crowd=[2])
    for options, direct in direct_transforms(flip, photometric):
        settings = DataConfig(image_size=SIDE, max_size=90, flip=flip, photometric=photometric, **options)
        transform = train_transform(settings)
        size = () if options["recipe"] == "detr" else ((SIDE, 32),)
        for seed in range(6):
            assert_same(transform(image, target, generator(seed), *size), direct(image, target, generator(seed), *size))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_with_everything_off_a_recipe_is_a_resize_and_equals_that_of_validation(recipe):
    image, target = sample([[5, 5, 30, 40]], (60, 80))
    transform = train_transform(DataConfig(recipe=recipe, image_size=SIDE, flip=False))
    out, found = transform(image, target, generator(), (SIDE, SIDE))
    assert_same((out, found), val_transform(SIDE, [], 0)(image, target, generator()))
    # A size that comes with the batch is that of a square of its own, and another one where it differs.
    if recipe == "detr":
        assert_same((out, found), transform(image, target, generator()))
        assert transform(image, target, generator(), (32, 64))[0].shape == (3, 32, 64)


@pytest.mark.parametrize(
    ("options", "sides", "every", "base"),
    [
        ({"recipe": "detr"}, None, 1, None),
        ({"recipe": "detr", "scales": [80]}, None, 1, None),
        ({"recipe": "detr", "mosaic": 0.5}, (64,), 1, None),
        ({"recipe": "detr", "multi_scale": [32, 96], "multi_scale_every": 10}, (32, 96), 10, None),
        ({"recipe": "ssd", "multi_scale_pixels": True}, (64,), 1, None),
        ({"recipe": "ssd", "multi_scale": [32, 96], "multi_scale_pixels": True}, (32, 96), 1, (64, 64)),
        ({"recipe": "yolov3", "multi_scale_every": 10}, (64,), 10, None),
    ],
)
def test_sizes_of_the_recipes(options, sides, every, base):
    expected = sides and VariableSizes(tuple((side, side) for side in sides), every, base)
    assert training_sizes(DataConfig(image_size=64, **options)) == expected


def test_crops_are_detrs_only_where_asked_for():
    (image, target), kept = sample([[0, 0, 40, 30], [1000, 700, 1040, 740]], (800, 1200)), {}
    for scales, crop in (([100], False), ([100, 120], False), ([100, 120], True), ([100], True)):
        transform = train_transform(DataConfig(scales=scales, max_size=400, random_crop=crop))
        outs = [transform(image, target, generator(seed)) for seed in range(20)]
        kept[len(scales), crop] = {len(out["boxes"]) for _, out in outs}
        assert {min(out.shape[-2:]) for out, _ in outs} == set(scales)
    assert kept[1, False] == kept[2, False] == {2} and min(kept[2, True] | kept[1, True]) < 2


@pytest.mark.parametrize("name", EVERYTHING)
@settings(max_examples=40)
@given(samples(), st.integers(0, 2**32))
def test_boxes_and_relations_survive_every_recipe(name, given_sample, seed):
    image, target = given_sample
    before = {key: value.clone() for key, value in target.items() if isinstance(value, torch.Tensor)}
    (transform, size), state = made(name), torch.get_rng_state()
    out, found = transform(image, target, generator(seed), *size)
    assert_well_formed(out, recheck_boxes(out, found), target)
    assert torch.get_rng_state().equal(state)  # randomness comes from the generator alone
    if size or "scales" not in EVERYTHING[name][0]:
        assert tuple(out.shape[-2:]) == (size[0] if size else (SIDE, SIDE))
    assert_same((out, found), transform(image, target, generator(seed), *size))
    assert all(before[key].equal(target[key]) for key in before)  # the given target is left alone


@pytest.mark.parametrize("name", EVERYTHING)
def test_no_boxes_one_box_five_hundred_boxes_and_crowds(name):
    grid = [[x, y, x + 1, y + 1] for x in range(25) for y in range(20)]
    transform, size = made(name)
    one, whole = [[3, 2, 20, 15]], [[0, 0, 25, 20]]
    for boxes, crowd in (([], ()), (one, ()), (one, (0,)), (whole, ()), (grid, ()), (grid, range(0, 500, 3))):
        image, target = sample(boxes, (20, 25), [[len(boxes) - 1, 0, 3]] if boxes else [], crowd)
        for seed in range(8):
            out, found = transform(image, target, generator(seed), *size)
            assert_well_formed(out, recheck_boxes(out, found), target)
            if boxes == one and not crowd and "crop" not in name:
                assert len(found["boxes"]) == 1  # no crop takes the only box


@pytest.mark.parametrize("name", [name for name in EVERYTHING if "multi" not in name])
@pytest.mark.parametrize("regions", [{"iou_crop": False}, {"zoom_out": 1.0}, {}], ids=["zoom", "crop", "both"])
def test_boxes_stay_on_their_pixels(name, regions):
    """A white rectangle on black: white inside the moved box and nowhere else; without zooming out none is filled."""
    image, target = painted([[50, 37, 84, 61]], (90, 120))
    shapes, transforms = set(), made(name, photometric=False, **regions)
    for seed in range(15):
        out, found = transforms[0](image, target, generator(seed), *transforms[1])
        near = torch.zeros(out.shape[1:], dtype=torch.bool)
        for x0, y0, x1, y1 in found["boxes"].tolist():
            inside = out[:, int(y0) + 2 : int(y1) - 1, int(x0) + 2 : int(x1) - 1]
            assert inside.numel() == 0 or inside.float().mean() > 245
            near[max(0, int(y0) - 3) : int(y1) + 4, max(0, int(x0) - 3) : int(x1) + 4] = True
            shapes.add((round(x1 - x0), round(y1 - y0)))
        if len(found["boxes"]):
            assert not (out[:, ~near] > 200).any()
        if regions.get("zoom_out") == 1.0:
            # What fills a canvas is reddish, what an image shows here is grey.
            assert (out[0].int() - out[2].int()).abs().max() == 0
    assert len(shapes) > 3


def test_a_canvas_of_too_many_pixels_is_made_smaller(monkeypatch):
    image, target = sample([[10, 10, 40, 30]], (60, 80))
    wide = [SeenRegion(4.0, False)(image, target, generator(seed)) for seed in range(20)]
    monkeypatch.setattr(zoom_crop_colour, "MAX_CANVAS_PIXELS", 60 * 80)
    small = [SeenRegion(4.0, False)(image, target, generator(seed)) for seed in range(20)]
    assert max(out[0].numel() for out in wide) > 3 * 9 * 60 * 80
    for (large, found), (out, moved) in zip(wide, small, strict=True):
        assert out[0].numel() <= 60 * 80 and moved["size"].tolist() == list(out.shape[-2:])
        shrink = torch.tensor([out.shape[2] / large.shape[2], out.shape[1] / large.shape[1]] * 2)
        torch.testing.assert_close(moved["boxes"], found["boxes"] * shrink, atol=2.0, rtol=0)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Eight images; each box has a class of its own, 10 times its image's number and on, which its attributes repeat;
    the predicate of a relation is 100 times its subject's class plus its object's."""
    folder, rng, rows = tmp_path_factory.mktemp("images"), np.random.default_rng(0), []
    for i in range(8):
        height, width = rng.integers(30, 70, 2).tolist()
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        labels = list(range(10 * i, 10 * i + i % 5))
        boxes = [[3 * j, 2 * j, 3 * j + 12, 2 * j + 15] for j in range(len(labels))]
        pairs = [(s, o) for s in range(len(labels)) for o in range(len(labels)) if s != o]
        relations = [(s, o, 100 * labels[s] + labels[o]) for s, o in pairs]
        columns = {"iscrowd": [j % 3 // 2 for j in range(len(labels))], "attributes": [[k + 1, 0] for k in labels]}
        rows.append(row_of(i, boxes, (width, height), labels, relations, **columns))
    names = [str(i) for i in range(80)]
    options = {"categories": [Category(i, name) for i, name in enumerate(names)], "attributes": names}
    return write_rows(rows, cache_file=folder / "table.json", image_root=folder, **options)


def loader_of(table, name, mixup=True, mosaic=0.5):
    recipe, sizes = EVERYTHING[name]
    settings = DataConfig(**{"image_size": SIDE, **ALL_ON, **recipe, **sizes}, batch_size_per_device=4, workers=0)
    settings = replace(settings, mixup=mixup, mosaic=0.0 if "scales" in recipe else mosaic)
    return loader_of_settings(table, settings, seed=1, stride=1)


@pytest.mark.parametrize("name", EVERYTHING)
def test_relations_and_attributes_go_with_their_boxes_through_mixup_mosaic_and_every_recipe(table, name):
    sampler, loader = loader_of(table, name)
    related = 0
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for target in (target for batch in loader for target in batch.targets):
            labels = target["labels"].tolist()
            assert target["attributes"].tolist() == [[label + 1, 0] for label in labels]
            assert {len(target[key]) for key in ("boxes", "area", "iscrowd", "mixup")} == {len(labels)}
            assert target["iscrowd"].tolist() == [label % 10 % 3 // 2 for label in labels]
            ends = [(labels[s], labels[o]) for s, o, _ in target["relations"].tolist()]
            assert target["relations"][:, 2].tolist() == [100 * subject + object_ for subject, object_ in ends]
            if len(set(labels)) == len(labels):  # no image twice: all pairs of one image are related
                assert sorted(ends) == sorted((s, o) for s in labels for o in labels if s != o and s // 10 == o // 10)
            related += len(ends)
    assert related > 130


def test_without_mixing_only_the_yolov3_recipe_draws_whether_there_is_a_mosaic(table):
    for name, (own, _) in EVERYTHING.items():
        dataset = loader_of(table, name, mixup=False, mosaic=0.0)[1].dataset.dataset
        assert type(dataset) is (MixedDataset if own["recipe"] == "yolov3" else DetectionDataset)
    key = SampleKey(0, 3, (SIDE, SIDE))
    plain = train_transform(DataConfig(recipe="yolov3", image_size=SIDE, flip=False))
    assert_same(MixedDataset(table, plain, 1)[key], DetectionDataset(table, plain, 1)[key])

    def one_draw_first(image, target, generator, size_hw):
        torch.rand((), generator=generator)
        return random(image, target, generator, size_hw)

    random = train_transform(DataConfig(recipe="yolov3", image_size=SIDE, **ALL_ON))
    for index in range(len(table)):
        key = SampleKey(0, index, (SIDE, SIDE))
        assert_same(MixedDataset(table, random, 1)[key], DetectionDataset(table, one_draw_first, 1)[key])


@pytest.mark.parametrize(
    ("make", "options", "named"),
    [
        (train_transform, {"recipe": "coco"}, "data.recipe is 'coco'.*detr, ssd, yolov3"),
        (train_transform, {"recipe": "ssd", "scales": [80]}, "data.recipe ssd.*data.scales.*set data.recipe to detr"),
        (train_transform, {"recipe": "detr", "random_crop": True}, "data.random_crop.*give data.scales"),
        (train_transform, {"recipe": "detr", "zoom_out": float("nan")}, "data.zoom_out is nan"),
        (train_transform, {"recipe": "detr", "scales": [80, 0]}, r"data.scales is \[80, 0\]"),
        (training_sizes, {"recipe": "detr", "scales": [80], "multi_scale": [64]}, "data.multi_scale .*data.scales"),
        (training_sizes, {"recipe": "detr", "scales": [80], "mosaic": 0.5}, "data.mosaic .*data.scales.*mosaic to 0"),
        (training_sizes, {"recipe": "ssd", "multi_scale": [64, -1]}, "-1 is not a size of images .*data.multi_scale"),
        (training_sizes, {"recipe": "ssd", "multi_scale_every": 0}, "data.multi_scale_every 0"),
    ],
)
def test_what_cannot_go_together_is_named(make, options, named):
    with pytest.raises(BadInput, match=named):
        make(DataConfig(image_size=64, **options))


def test_all_faults_are_named_at_once_and_loaders_refuse_what_cannot_be(table):
    with pytest.raises(BadInput) as caught:
        train_transform(DataConfig(recipe="detr", image_size=64, random_crop=True, zoom_out=0.0))
    assert len(caught.value.problems) == 2
    settings = DataConfig(image_size=64, batch_size_per_device=2, workers=0)
    varied = replace(settings, recipe="ssd", multi_scale=[32], multi_scale_pixels=True, group_by_aspect_ratio=True)
    for wrong, words in (
        (replace(settings, mosaic=1.5), "data.mosaic is 1.5"),
        (varied, "data.group_by_aspect_ratio or data.multi_scale_pixels"),
    ):
        with pytest.raises(BadInput, match=words):
            loader_of_settings(table, wrong, seed=0, stride=32)


def test_splits_are_told_of_and_what_was_wrong_is_listed(tmp_path):
    make_shapes(tmp_path / "shapes", train_images=5, val_images=2, image_size=48)
    annotations, said = tmp_path / "shapes" / "annotations", []
    text = (annotations / "train.json").read_text()
    (annotations / "train.json").write_text(text.replace('"bbox": [', '"bbox": [-1000.0, ', 1))  # five numbers
    reading = {"cache_dir": tmp_path / "cache", "on_error": "drop"}
    paths = str(annotations / "train.json"), str(annotations / "val.json")
    train, val = splits.open_splits(*paths, tmp_path / "run", say=said.append, **reading)
    assert (len(train), len(val)) == (5, 2)
    assert len(said) == 3 and said[0].startswith(f"{paths[0]}: 5 images") and "1 record left out (" in said[1]
    assert (tmp_path / "run" / "data_problems_train.txt").read_text().count("\n") == len(train.problems)
    assert not (tmp_path / "run" / "data_problems_val.txt").exists()
    head, _ = splits.open_splits(*paths, tmp_path / "run", say=said.append, max_train_images=3, **reading)
    one, other = splits.open_splits(*paths, tmp_path / "run", say=said.append, overfit_images=2, **reading)
    assert len(head) == 3 and len(one) == 2 and one is other
    other = replace(val, categories=val.categories[:3])
    advice = f"{train.name} lists '{val.class_names[3]}', which {val.name} does not: .*{val.class_names[3]}: null"
    with pytest.raises(BadInput, match=f"4 classes .*{advice}"):
        splits.check_same_classes(train, other)
    with pytest.raises(BadInput, match=f"{train.name} lists '.*', which .* does not: list the same in both$"):
        splits.check_same_classes(other, train)
    with pytest.raises(BadInput, match="4 classes .*same categories in the same order"):
        splits.check_same_classes(train, replace(val, categories=val.categories[::-1]))
