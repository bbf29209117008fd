"""Images that are not square: positions, anchors, windows and boxes of every detector on them."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import generator
from small_detectors import HYBRIDS, REAL_TIME, SMALL, TINY_RF_DETR, build, built, hub_config
from transformers.models.rf_detr.modeling_rf_detr import RfDetrDinov2Embeddings

from toolkit.base.box_ops import normalize_boxes, xyxy_to_cxcywh
from toolkit.data.batches import collate
from toolkit.data.pipeline import val_transform
from toolkit.detectors.ssd.model import square_in_pixels

HW = (64, 128)
SSD = {
    "backbone": "lcnet_035",
    "strides": [16, 32, 64, -1],
    "channels": [16] * 4,
    "aspect_ratios": [[2]] * 4,
}
PUBLISHED = {"rt_detr_v2 of the hub": ("rt_detr_v2", "rt_detr_v2"), "deimv2 on dinov3": ("deimv2", "dinov3")}


@functools.cache
def detector(name):
    """In evaluation mode; those of the hub have the structure of published weights."""
    if name in PUBLISHED:
        architecture, config = PUBLISHED[name]
        return build(architecture, source_config=hub_config(config)).eval()
    return build("ssd", **SSD).eval() if name == "ssd" else built(name).eval()


# ---- what a detector sees where --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SMALL, *PUBLISHED, "ssd", "yolov3"])
def test_a_change_of_pixels_changes_the_maps_most_where_it_is(name):
    """Windows and tokens in the wrong order would put it elsewhere."""
    model = detector(name)
    images = torch.full((2, 3, *HW), 128, dtype=torch.uint8)
    sizes = torch.tensor([HW] * 2)
    taps = model.map_taps()
    with torch.no_grad():
        model(images, sizes)  # SSD measures its maps by running its backbone once more
    seen = []
    hooks = []
    for tap in taps:
        hook = tap.module.register_forward_hook(lambda _, inputs, out, tap=tap: seen.append(tap.read(inputs, out)))
        hooks.append(hook)
    images[1, :, 34:46, 98:110] = torch.randint(
        0,
        256,
        (3, 12, 12),
        dtype=torch.uint8,
        generator=generator(),
    )
    with torch.no_grad():
        model(images, sizes)
    for hook in hooks:
        hook.remove()
    finest = min(min(tap.strides) for tap in taps)
    for tap, maps in zip(taps, seen, strict=True):
        for stride, level in zip(tap.strides, maps, strict=True):
            assert list(level.shape[-2:]) == [-(-side // stride) for side in HW]
            if stride == finest <= 16:  # coarser ones of random weights are mixed by attention
                most = (level[1] - level[0]).abs().sum(0)
                row, column = divmod(int(most.argmax()), level.shape[-1])
                assert (row + 0.5) * stride == pytest.approx(40, abs=6 + 2 * stride)
                assert (column + 0.5) * stride == pytest.approx(104, abs=6 + 2 * stride)


@pytest.mark.parametrize("name", HYBRIDS)
def test_positions_of_the_hybrids_follow_rows_and_columns(name):
    modules = detector(name).model.named_modules()
    (embedding,) = [module for key, module in modules if key.endswith("position_embedding")]
    positions = embedding(
        width=5,
        height=3,
        device=torch.device("cpu"),
        dtype=torch.float32,
    ).reshape(3, 5, -1)
    rows, columns = positions.chunk(2, dim=-1)
    assert rows.equal(rows[:, :1].expand_as(rows))
    assert columns.equal(columns[:1].expand_as(columns))
    assert len(rows[:, 0].unique(dim=0)) == 3
    assert len(columns[0].unique(dim=0)) == 5


@pytest.mark.parametrize("name", HYBRIDS)
def test_anchors_of_the_hybrids_are_the_centres_of_their_cells(name):
    anchors, valid = detector(name).model.model.generate_anchors(((8, 16), (4, 8)))
    centres = []
    for height, width in ((8, 16), (4, 8)):
        centres += [[(x + 0.5) / width, (y + 0.5) / height] for y in range(height) for x in range(width)]
    assert valid.all()
    torch.testing.assert_close(anchors[0, :, :2].sigmoid(), torch.tensor(centres))


@pytest.mark.parametrize(
    ("height", "width"),
    [
        (64, 64),
        (64, 128),
        (96, 32),
    ],
)
def test_windows_of_rf_detr_are_parts_of_the_image_and_transformers_own_for_squares(height, width):
    embeddings = detector("rf_detr").model.model.backbone.backbone.embeddings
    windows = TINY_RF_DETR["backbone_config"]["num_windows"]
    patch = TINY_RF_DETR["backbone_config"]["patch_size"]
    numbers = torch.arange(height // patch * width // patch).reshape(height // patch, width // patch)
    tokens = torch.cat([torch.tensor([-1]), numbers.flatten()])[None, :, None]
    found = embeddings.window_partition(tokens, height, width)
    assert (found[:, 0] == -1).all()
    parts = [part for rows in numbers.chunk(windows, 0) for part in rows.chunk(windows, 1)]
    assert found[:, 1:, 0].tolist() == [part.flatten().tolist() for part in parts]
    if height == width:
        assert found.equal(RfDetrDinov2Embeddings.window_partition(embeddings, tokens, height, width))


def test_anchors_of_ssd_are_squares_in_pixels_with_the_area_they_had():
    model = detector("ssd")
    wide = model.anchors(HW, "cpu")[0]
    square = model.anchors((64, 64), "cpu")[0]
    squares = wide[: 8 * 4 * 4 : 4]  # the first of each cell
    torch.testing.assert_close(squares[:, 3] * HW[0], squares[:, 2] * HW[1])
    torch.testing.assert_close(wide[:4, 2:].prod(1), square[:4, 2:].prod(1))
    assert (wide[:, 2:] == 1).any()  # clipped
    assert wide.max() == 1
    assert wide.min() >= 0
    assert square_in_pixels(square, (64, 64), True) is square


# ---- boxes -----------------------------------------------------------------------------------------------------------


def of_detr(model, target, hw):
    count = len(target["labels"])
    logits = torch.full((1, 6, 4), -20.0)  # the last class is that of no object, where there is one
    logits[0, range(count), target["labels"]] = 20.0
    places = torch.full((1, 6, 4), 0.5)
    places[0, :count] = xyxy_to_cxcywh(normalize_boxes(target["boxes"], torch.tensor(hw)))
    return {"logits": logits[None], "boxes": places[None]}


def of_hybrid(model, target, hw):
    return {key: value[0] for key, value in of_detr(model, target, hw).items()}


def of_faster_rcnn(model, target, hw):
    count = len(target["labels"])
    logits = torch.full((count, 4), -20.0)
    logits[range(count), 1 + target["labels"]] = 20.0
    return {
        "boxes": [target["boxes"]],
        "logits": logits,
        "deltas": torch.zeros(count, 4, 4),
    }


OUTPUTS = {"faster_rcnn": of_faster_rcnn, **dict.fromkeys(REAL_TIME, of_hybrid)}
sides = st.integers(20, 300)


@pytest.mark.parametrize("name", [*SMALL, "faster_rcnn"])
@settings(max_examples=8, deadline=None)
@given(
    orig_hw=st.tuples(sides, sides),
    hw=st.sampled_from(
        [
            (64, 128),
            (128, 64),
            (64, 64),
        ]
    ),
    seed=st.integers(0, 2**32),
)
def test_boxes_come_back_to_the_pixels_of_the_picture(name, orig_hw, hw, seed):
    """Of a detector that finds exactly the boxes of the target."""
    model = detector(name)
    source = generator(seed)
    low = torch.rand(1, 2, generator=source) * 0.6
    high = low + 0.2 + torch.rand(1, 2, generator=source) * 0.19
    box = torch.cat([low, high], dim=1) * torch.tensor(orig_hw[::-1]).repeat(2)
    target = {
        "image_id": 0,
        "boxes": box,
        "labels": torch.randint(3, (1,), generator=source),
        "area": torch.ones(1),
        "iscrowd": torch.zeros(1, dtype=torch.int64),
        "size": torch.tensor(orig_hw),
        "orig_size": torch.tensor(orig_hw),
    }
    resized = val_transform(list(hw), [], 0)(
        torch.zeros(3, *orig_hw, dtype=torch.uint8),
        target,
        source,
    )
    batch = collate([resized], model.stride)
    assert tuple(batch.images.shape[-2:]) == hw
    outputs = OUTPUTS.get(name, of_detr)(model, resized[1], hw)
    (found,) = model.postprocess(
        outputs,
        batch.sizes,
        target["orig_size"][None],
        0.5,
    )
    assert found["labels"].equal(target["labels"])
    torch.testing.assert_close(
        found["boxes"],
        box,
        atol=0.02 * max(orig_hw) / 64,
        rtol=1e-3,
    )


# ---- numbers of detections -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        *[(name, {}, 100) for name in ("detr", "conditional_detr", "deformable_detr", "yolov3", "faster_rcnn")],
        *[(name, {}, 100) for name in HYBRIDS],
        *[(name, {"num_queries": 300}, 300) for name in HYBRIDS],
        ("faster_rcnn", {"detections_per_image": 250}, 250),
        ("ssd", {}, 200),
    ],
)
def test_evaluations_keep_as_many_detections_as_those_of_the_authors(name, options, count):
    assert built(name, **options).max_detections == count


def test_detectors_name_the_setting_that_limits_their_objects():
    assert detector("faster_rcnn").object_limits == {"model.detections_per_image": 100}
    assert detector("deformable_detr++").object_limits == {"model.num_queries": 6}
