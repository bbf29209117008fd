"""Images that are not square: sizes as settings, and positions, anchors, windows and boxes of every detector on them.

tests/test_any_detector.py builds scene graphs on such images, tests/test_export.py exports for them, and
tests/scripts/test_image_sizes.py runs the scripts.
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_detectors import HYBRIDS, REAL_TIME, TINY_RF_DETR, build, hub_config, random_target, small
from small_detectors import SMALL as DETRS
from test_export import SMALL as EVERY
from transformers.models.rf_detr.modeling_rf_detr import RfDetrDinov2Embeddings

from toolkit.base.box_ops import normalize_boxes, xyxy_to_cxcywh
from toolkit.base.errors import BadInput
from toolkit.data.batches import collate
from toolkit.data.pipeline import check_one_size, processor_size, train_transform, training_sizes, val_transform
from toolkit.detectors.ssd.criterion import encode_boxes
from toolkit.detectors.ssd.model import square_in_pixels
from toolkit.detectors.yolov3.targets import STRIDES, assign_boxes, make_grid
from toolkit.models import build_detector
from toolkit.run.settings import DataConfig

HW = (64, 128)
SSD = {"backbone": "lcnet_035", "strides": [16, 32, 64, -1], "channels": [16] * 4, "aspect_ratios": [[2]] * 4}
OTHERS = {"faster_rcnn": EVERY["faster_rcnn"], "ssd": SSD, "ssdlite": SSD, "yolov3": EVERY["yolov3"]}
CLASSES = ["circle", "square", "star"]


PUBLISHED = {"hub rt_detr_v2": "rt_detr_v2", "hub dinov3": "deimv2"}


@functools.cache
def detector(name: str):
    """In evaluation mode; `hub` ones have the structure of published weights."""
    if name in PUBLISHED:
        return build(PUBLISHED[name], source_config=hub_config(name.removeprefix("hub "))).eval()
    if name in DETRS:
        return small(name).eval()
    torch.manual_seed(0)
    return build_detector(name, class_names=CLASSES, **OTHERS[name]).eval()


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["detr", "ssd", "yolov3"])
def test_a_pair_is_height_and_width_everywhere(recipe):
    c = DataConfig(recipe=recipe, image_size=[48, 80], multi_scale=[[48, 80], [32, 64]], multi_scale_pixels=True)
    sizes = training_sizes(c)
    assert sizes.sizes_hw == ((48, 80), (32, 64)) and sizes.base_hw == (48, 80)
    assert sizes.batch_size((32, 64), 4) == 7
    image = torch.randint(0, 256, (3, 90, 150), dtype=torch.uint8)
    target = random_target(3, (90, 150)) | {"orig_size": torch.tensor((90, 150)), "relations": torch.zeros(0, 3).long()}
    for transform, size in ((train_transform(c), [(32, 64)]), (val_transform(c.image_size, [], 0), [])):
        out, found = transform(image, target, torch.Generator().manual_seed(0), *size)
        assert tuple(out.shape[-2:]) == (size[0] if size else (48, 80)) == tuple(found["size"].tolist())
    assert processor_size([48, 80], [], 0) == {"height": 48, "width": 80}
    assert processor_size(64, [], 0) == {"height": 64, "width": 64}
    only = DataConfig(recipe=recipe, image_size=[48, 80], mosaic=0.5)
    assert training_sizes(only).sizes_hw == ((48, 80),)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"image_size": [64, 0], "multi_scale": [[64]]}, [r"\[64, 0\] is not a size", r"\[64\] is not a size"]),
        ({"image_size": [384, 640], "multi_scale": [320, 480]}, ["other aspects", r"\[\[248, 413\], \[372, 620\]\]"]),
        ({"image_size": 640, "multi_scale": [[384, 640]]}, ["other aspects", r"\[\[496, 496\]\]"]),
    ],
)
def test_sizes_that_cannot_be_are_named_with_those_that_can(options, named):
    with pytest.raises(BadInput) as caught:
        training_sizes(DataConfig(recipe="ssd", **options))
    for words in named:
        assert caught.match(words)


def test_sizes_that_would_be_padded_are_named_with_the_nearest():
    check_one_size(32, [[64, 96], 64], [])
    with pytest.raises(BadInput) as caught:
        check_one_size(32, [[360, 640], 100], [])
    first, second = caught.value.problems
    assert "360 x 640 px" in first and "multiples of 32, such as [352, 640]" in first
    assert "100 px" in second and "multiples of 32, such as 96" in second


# ---- what a detector sees where --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*DETRS, *PUBLISHED, "ssd", "yolov3"])
def test_a_change_of_pixels_changes_the_maps_most_where_it_is(name):
    """Windows and tokens in the wrong order would put it elsewhere."""
    model = detector(name)
    images, sizes = torch.full((2, 3, *HW), 128, dtype=torch.uint8), torch.tensor([HW] * 2)
    taps, seen = model.map_taps(), []
    finest = min(min(tap.strides) for tap in taps)
    with torch.no_grad():
        model(images, sizes)  # SSD measures its maps by running its backbone once more
    hooks = [tap.module.register_forward_hook(lambda _, a, out, tap=tap: seen.append(tap.read(a, out))) for tap in taps]
    y, x, side = 34, 98, 12
    images[1, :, y : y + side, x : x + side] = torch.randint(0, 256, (3, side, side), dtype=torch.uint8)
    with torch.no_grad():
        model(images, sizes)
    for hook in hooks:
        hook.remove()
    for tap, maps in zip(taps, seen, strict=True):
        for stride, level in zip(tap.strides, maps, strict=True):
            assert list(level.shape[-2:]) == [-(-s // stride) for s in HW]
            if stride == finest <= 16:  # coarser ones of random weights are mixed by attention
                most = (level[1] - level[0]).abs().sum(0)
                row, column = divmod(int(most.argmax()), level.shape[-1])
                near = [abs((cell + 0.5) * stride - centre) for cell, centre in ((row, y + 6), (column, x + 6))]
                assert max(near) <= side / 2 + 2 * stride, (name, stride, row, column)


@pytest.mark.parametrize("name", HYBRIDS)
def test_positions_of_the_hybrids_follow_rows_and_columns(name):
    modules = detector(name).model.named_modules()
    (embedding,) = [module for key, module in modules if key.endswith("position_embedding")]
    positions = embedding(width=5, height=3, device=torch.device("cpu"), dtype=torch.float32).reshape(3, 5, -1)
    rows, columns = positions.chunk(2, dim=-1)
    assert rows.equal(rows[:, :1].expand_as(rows)) and columns.equal(columns[:1].expand_as(columns))
    assert len(rows[:, 0].unique(dim=0)) == 3 and len(columns[0].unique(dim=0)) == 5


@pytest.mark.parametrize("name", HYBRIDS)
def test_anchors_of_the_hybrids_are_the_centres_of_their_cells(name):
    shapes = ((8, 16), (4, 8), (2, 4))
    anchors, valid = detector(name).model.model.generate_anchors(shapes)
    centres = [[(x + 0.5) / w, (y + 0.5) / h] for h, w in shapes for y in range(h) for x in range(w)]
    assert valid.all()
    torch.testing.assert_close(anchors[0, :, :2].sigmoid(), torch.tensor(centres))


def test_windows_of_rf_detr_are_parts_of_the_image_and_transformers_own_for_squares():
    embeddings = detector("rf_detr").model.model.backbone.backbone.embeddings
    windows, patch = TINY_RF_DETR["backbone_config"]["num_windows"], TINY_RF_DETR["backbone_config"]["patch_size"]
    for height, width in ((64, 64), (64, 128), (96, 32)):
        rows, columns = height // patch, width // patch
        where = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1).flatten(0, 1)
        tokens = torch.cat([torch.full((1, 2), -1), where])[None].repeat(2, 1, 1)
        found = embeddings.window_partition(tokens, height, width)
        assert (found[:, 0] == -1).all()
        for number, window in enumerate(found[: windows**2, 1:].tolist()):
            top, left = number // windows * rows // windows, number % windows * columns // windows
            expected = [[top + y, left + x] for y in range(rows // windows) for x in range(columns // windows)]
            assert window == expected
        if height == width:
            assert found.equal(RfDetrDinov2Embeddings.window_partition(embeddings, tokens, height, width))


def test_anchors_of_ssd_are_squares_in_pixels_with_the_area_they_had():
    model = detector("ssd")
    wide, square = (model.anchors(hw, "cpu")[0] for hw in (HW, (64, 64)))
    height, width = wide[:, 3] * HW[0], wide[:, 2] * HW[1]
    first, clipped = slice(0, 8 * 4 * 4, 4), (wide[:, 2:] == 1).any(1)
    torch.testing.assert_close(height[first], width[first])
    areas = lambda anchors: anchors[:, 2:].prod(1)  # noqa: E731
    torch.testing.assert_close(areas(wide)[:4], areas(square)[:4])
    assert clipped.any() and wide.max() == 1 and wide.min() >= 0
    assert square_in_pixels(square, (64, 64), True) is square
    theirs = build_detector("ssd300_vgg16", class_names=CLASSES).anchors((300, 400), "cpu")[0]
    torch.testing.assert_close(theirs[0, 2] * 400, theirs[0, 3] * 300)


# ---- boxes -----------------------------------------------------------------------------------------------------------


def outputs_that_say(model, name: str, target: dict, hw: tuple[int, int]) -> dict:
    """What `model` would give for an image of `hw` if it found exactly the boxes of the target."""
    boxes, labels, count = target["boxes"], target["labels"], len(target["labels"])
    if name in DETRS:
        logits, places = torch.full((1, 6, 4 if name == "detr" else 3), -20.0), torch.full((1, 6, 4), 0.5)
        logits[0, range(count), labels] = 20.0
        places[0, :count] = xyxy_to_cxcywh(normalize_boxes(boxes, torch.tensor(hw)))
        layered = {"logits": logits, "boxes": places}
        return layered if name in REAL_TIME else {key: value[None] for key, value in layered.items()}
    if name == "faster_rcnn":
        logits = torch.full((count, 4), -20.0)
        logits[range(count), 1 + labels] = 20.0
        return {"boxes": [boxes], "logits": logits, "deltas": torch.zeros(count, 4, 4)}
    if name == "yolov3":
        grid = make_grid(hw, model.anchors)
        assigned = assign_boxes([target], torch.tensor([hw]), model.anchors, grid)
        flat = torch.full((len(grid.cells_xy), 8), -20.0)
        logit = assigned.center.clamp(1e-6, 1 - 1e-6).logit()
        flat[assigned.index] = torch.cat([logit, assigned.scale, torch.full((count, 4), -20.0)], dim=1)
        flat[assigned.index, 4] = flat[assigned.index, 5 + labels] = 20.0
        maps, start = {"sizes": torch.tensor([hw])}, 0
        for stride in STRIDES:
            rows, columns = hw[0] // stride, hw[1] // stride
            level = flat[start : start + rows * columns * 3].reshape(rows, columns, 24).permute(2, 0, 1)[None]
            maps[f"raw_stride{stride}"], start = level, start + rows * columns * 3
        return maps
    anchors, image_hw = model.anchors(hw, "cpu")
    fractions = normalize_boxes(boxes, torch.tensor(hw))
    logits = torch.full((1, len(anchors), 4), -20.0)
    logits[..., 0] = 20.0
    logits[0, range(count), 0], logits[0, range(count), 1 + labels] = -20.0, 20.0
    offsets = torch.zeros(1, len(anchors), 4)
    offsets[0, :count] = encode_boxes(fractions, anchors[:count], *model.multibox.variances)
    return {"logits": logits, "offsets": offsets, "anchors": anchors, "image_hw": image_hw}


sides = st.integers(20, 300)


@pytest.mark.parametrize("name", [*DETRS, *OTHERS])
@settings(max_examples=8, deadline=None)
@given(orig_hw=st.tuples(sides, sides), hw=st.sampled_from([(64, 128), (128, 64), (64, 64)]), data=st.data())
def test_targets_and_predictions_come_back_to_the_pixels_of_the_picture(name, orig_hw, hw, data):
    model, (height, width) = detector(name), orig_hw
    x, y = (data.draw(st.floats(0, 0.6)) for _ in range(2))
    w, h = (data.draw(st.floats(0.2, 0.39)) for _ in range(2))
    box = torch.tensor([[x * width, y * height, (x + w) * width, (y + h) * height]])
    empty = {"area": torch.ones(1), "iscrowd": torch.zeros(1, dtype=torch.int64), "image_id": 0}
    target = {"boxes": box, "labels": torch.tensor([data.draw(st.integers(0, 2))]), **empty}
    target |= {"size": torch.tensor(orig_hw), "orig_size": torch.tensor(orig_hw)}
    image = torch.zeros(3, *orig_hw, dtype=torch.uint8)
    batch = collate([val_transform(list(hw), [], 0)(image, target, torch.Generator())], model.stride)
    assert tuple(batch.images.shape[-2:]) == hw and batch.sizes.tolist() == [list(hw)]
    outputs = outputs_that_say(model, name, batch.targets[0], hw)
    (found,) = model.postprocess(outputs, batch.sizes, target["orig_size"][None], 0.5)
    assert found["labels"].tolist() == target["labels"].tolist()
    torch.testing.assert_close(found["boxes"], box, atol=0.02 * max(orig_hw) / 64, rtol=1e-3)


@pytest.mark.parametrize("name", [*DETRS, *OTHERS])
def test_a_step_of_training_on_images_that_are_not_square(name):
    model = (small(name) if name in DETRS else build_detector(name, class_names=CLASSES, **OTHERS[name])).train()
    images = torch.randint(0, 256, (2, 3, *HW), dtype=torch.uint8)
    batch = collate([(image, random_target(2, HW, seed=i)) for i, image in enumerate(images)], model.stride)
    denominators = {key: max(value, 1.0) for key, value in model.denominators(batch.targets).items()}
    losses, _ = model.criterion(model(batch.images, batch.sizes, batch.targets), batch.targets, denominators)
    total = sum(losses.values())
    total.backward()
    assert total.isfinite() and any(p.grad is not None and p.grad.any() for p in model.parameters())


# ---- numbers of detections -------------------------------------------------------------------------------------------


def test_evaluations_keep_as_many_detections_as_those_of_the_authors():
    def kept(name, **options):
        return build_detector(name, class_names=CLASSES, **options).max_detections

    for name in REAL_TIME:
        real = {key: value for key, value in DETRS[name].items() if key != "num_queries"}
        assert kept(name, **real) == 300 and kept(name, **real, num_queries=30) == 100
    for name in ("detr", "conditional_detr", "deformable_detr", "yolov3", "faster_rcnn"):
        assert detector(name).max_detections == 100
    assert detector("faster_rcnn").object_limits == {"model.detections_per_image": 100}
    assert kept("faster_rcnn", **OTHERS["faster_rcnn"], detections_per_image=250) == 250
    assert kept("ssd", **SSD) == 200
    assert small("deformable_detr++").object_limits == {"model.num_queries": 6}
