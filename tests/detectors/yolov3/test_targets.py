"""YOLOv3's assignment of boxes, its losses and anchors: against loops, at borders, in crowds and padding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import rows
from torch import nn
from torchvision.ops import box_iou
from yolov3_data import ANCHORS, LOSSES, losses_of, random_outputs, target, tiny

from scripts.benches.yolov3 import looped_losses, our_losses
from toolkit.detectors.yolov3.targets import STRIDES, assign_boxes, decode_boxes, kmeans_anchors, make_grid

OF_BOXES = ("loss_center", "loss_scale", "loss_cls")


@st.composite
def image_boxes(draw, side: int = 96):
    """Boxes on whole pixels, so on cell borders too, often several in one cell; at least one pixel wide and high."""
    objects = []
    labels = []
    for _ in range(draw(st.integers(0, 6))):
        x0 = draw(st.integers(0, side - 1))
        y0 = draw(st.integers(0, side - 1))
        x1 = draw(st.integers(x0 + 1, side))
        y1 = draw(st.integers(y0 + 1, side))
        objects.append(f"{x0} {y0} {x1} {y1}")
        labels.append(str(draw(st.integers(0, 2))))
    return target(", ".join(objects), ", ".join(labels))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        image_boxes(),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 5),
)
def test_losses_are_those_of_a_loop_over_boxes(targets, seed):
    predictions = torch.randn(
        len(targets),
        567,
        8,
        generator=torch.Generator().manual_seed(seed),
    )
    assigned = assigned_to(targets, (96, 96))
    predictions[assigned.image, assigned.index, 2:4] = assigned.scale  # predictions that really overlap
    ours = our_losses(predictions, targets, ANCHORS, 96)
    loop = looped_losses(predictions, targets, ANCHORS, 96)
    for name in LOSSES:
        torch.testing.assert_close(ours[name], loop[name], rtol=1e-4, atol=1e-4)


def assigned_to(targets, hw):
    return assign_boxes(
        targets,
        torch.tensor([hw] * len(targets)),
        ANCHORS,
        make_grid(hw, ANCHORS),
    )


@pytest.mark.parametrize(
    ("box", "cell_xy"),
    [
        pytest.param("0 0 0 0", [0, 0], id="a point in the corner"),
        pytest.param("96 64 96 64", [2, 1], id="on the last corner: the last cell"),
        pytest.param("32 32 32 32", [1, 1], id="on the corner of four cells: the lower right one"),
        pytest.param("10 5 10 50", [0, 0], id="a line"),
    ],
)
def test_boxes_without_area_have_a_cell_and_the_first_anchor(box, cell_xy):
    assigned = assigned_to([target(box)], (64, 96))
    grid = make_grid((64, 96), ANCHORS)
    assert assigned.kept.all()
    assert assigned.index.item() % 3 == 0
    assert grid.strides[assigned.index].item() == 32
    assert grid.cells_xy[assigned.index[0]].tolist() == cell_xy
    assert assigned.weight.item() == 2
    assert assigned.scale[0, 0] == -ANCHORS[0, 0, 0].log(), "as wide as a pixel"


@pytest.mark.parametrize("box", ["0 0 0 0", "-30 -30 10 10", "90 60 200 100"])
def test_losses_of_a_centre_on_or_beyond_the_border_are_finite(box):
    detector = tiny()
    center = assigned_to([target(box)], (64, 96)).center
    assert ((center >= 0) & (center <= 1)).all()
    losses = losses_of(detector, random_outputs(detector, [(64, 96)]), [target(box)])
    assert sum(losses.values()).isfinite()


def test_of_boxes_in_one_cell_and_anchor_the_last_wins():
    each = target("11 11 31 25, 10 10 30 24, 10 11 31 25")
    assigned = assigned_to([each, each], (64, 64))
    assert len(set(assigned.index.tolist())) == 1
    assert assigned.kept.tolist() == [False, False, True] * 2
    assert assigned.ratio.tolist() == [0, 0, 1] * 2


def test_crowd_regions_are_ignored_and_never_assigned():
    detector = tiny()
    outputs = random_outputs(detector, [(64, 64)])
    alone = target("40 40 60 60", "1")
    crowd = losses_of(
        detector,
        outputs,
        [target("40 40 60 60, 0 0 64 32", "1, 2", iscrowd=torch.tensor([0, 1]))],
    )
    plain = losses_of(detector, outputs, [alone])
    for name in OF_BOXES:
        assert crowd[name] == plain[name]
    predictions, grid = detector.flat_predictions([outputs[f"raw_stride{s}"] for s in STRIDES])
    left, top, right, bottom = decode_boxes(predictions, grid)[0].T
    width = right.clamp(max=64) - left.clamp(min=0)
    height = bottom.clamp(max=32) - top.clamp(min=0)
    in_crowd = width.clamp(min=0) * height.clamp(min=0) > 0.7 * (right - left) * (bottom - top)
    overlap = box_iou(
        torch.stack(
            [
                left,
                top,
                right,
                bottom,
            ],
            1,
        ),
        alone["boxes"],
    )[:, 0]
    ignored = in_crowd & (overlap <= 0.7)
    ignored[assigned_to([alone], (64, 64)).index] = False
    assert ignored.sum() > 20
    background = nn.functional.softplus(predictions[0, ignored, 4]).sum()
    torch.testing.assert_close(plain["loss_obj"] - crowd["loss_obj"], background, rtol=1e-4, atol=1e-4)


def test_the_mixup_share_weighs_a_box_and_0_leaves_it_out():
    detector = tiny()
    outputs = random_outputs(detector, [(64, 64)])
    losses = {}
    for share in (1.0, 0.5, 0.0):
        losses[share] = losses_of(
            detector,
            outputs,
            [target("8 8 40 44", mixup=torch.tensor([share]))],
        )
    assert losses[1.0] == losses_of(detector, outputs, [target("8 8 40 44")])
    for name in OF_BOXES:
        torch.testing.assert_close(losses[0.5][name], losses[1.0][name] / 2)
        assert losses[0.0][name] == 0
    assert losses[0.5]["loss_obj"] < losses[1.0]["loss_obj"]


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_box_that_is_not_finite_makes_losses_that_are_not(value):
    """So that the guard sees it, on every device, instead of an index out of range."""
    detector = tiny()
    losses = losses_of(detector, random_outputs(detector, [(64, 64)]), [target(f"{value} 5 20 30, 5 5 20 30")])
    assert not sum(losses.values()).isfinite()


def test_kmeans_finds_the_sizes_that_are_there():
    rng = np.random.default_rng(0)
    true = np.array(rows("10 14, 30 20, 25 60, 90 80, 150 60, 200 220"))
    sizes = true[rng.integers(6, size=600)] * rng.uniform(
        0.95,
        1.05,
        (600, 2),
    )
    anchors, fit = kmeans_anchors(sizes, 6)
    np.testing.assert_allclose(
        anchors,
        true[np.argsort(true.prod(axis=1))],
        rtol=0.03,
    )
    assert fit > 0.93
    assert np.array_equal(anchors, kmeans_anchors(sizes, 6)[0])


def test_kmeans_of_boxes_of_one_size():
    anchors, fit = kmeans_anchors(np.full((20, 2), 8.0), 9)
    assert np.array_equal(anchors, np.full((9, 2), 8.0))
    assert fit == 1
