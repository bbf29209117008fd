"""The function that is exported, traced for several sizes, with operators that ONNX lacks."""

import itertools

import pytest
import torch
from exported_detectors import CATEGORIES, SMALL, exported_detector, images_of, side_of
from timm.layers import Conv2dSame
from timm.layers.padding import get_same_padding
from timm.layers.pool2d_same import MaxPool2dSame
from torch.nn.functional import pad

from toolkit.base.errors import BadInput, as_sentences
from toolkit.tools.export import operators
from toolkit.tools.export.check import compare_outputs
from toolkit.tools.export.exported_files import ExportMetadata, write_onnx, write_program
from toolkit.tools.export.graph import (
    MAX_SIDE,
    PixelsToBoxes,
    same_padding,
    trace,
    trace_hw,
)
from toolkit.tools.export.grid_sampling import grid_sample_by_gather
from toolkit.tools.export.write import check_exportable, make_graph


@pytest.mark.parametrize("name", SMALL)
def test_the_function_gives_what_postprocess_gives(name):
    detector = exported_detector(name)
    graph = make_graph(detector, 100)
    side = side_of(name)
    height = side + {"fixed": max(32, detector.stride), "multiples": 32, "any": 21}[graph.sides]
    images = images_of(3, height, side)
    sizes = torch.tensor([[height, side]] * 3)
    with torch.no_grad():
        boxes, scores, labels = graph(images)
        padded = pad(images, (0, -side % detector.stride, 0, -height % detector.stride))
        expected = detector.postprocess(detector(padded, sizes), sizes, sizes, 0.0, 100)
    assert boxes.shape == (3, 100, 4)
    assert scores.shape == labels.shape == (3, 100)
    for row, found in enumerate(expected):
        count = len(found["scores"])
        assert count
        assert (scores[row, count:] == 0).all()
        assert (labels[row, count:] == -1).all()
        theirs = [found[key][None] for key in ("boxes", "scores", "labels")]
        ours = [part[row : row + 1, :count] for part in (boxes, scores, labels)]
        # Of scores that are equal to rounding, the cut after 100 may take others.
        assert compare_outputs(ours, theirs, 64).matched >= 0.99
        assert compare_outputs(theirs, ours, 64).matched >= 0.99


class Layers(torch.nn.Module):
    """A network with what an export asks of a detector."""

    exported_sides = "any"
    predicts_masks = False

    def __init__(self, stride: int, *layers):
        super().__init__()
        self.stride = stride
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, images):
        return self.layers(images.float() / 255).flatten(2).transpose(1, 2)


class CellsAsBoxes(PixelsToBoxes):
    def found(self, images, sizes):
        cells = self.detector(images)
        return (
            cells[..., :4],
            cells[..., 4].exp(),
            torch.zeros_like(cells[..., 4], dtype=torch.int64),
        )


def same_padded(stride: int) -> CellsAsBoxes:
    """A backbone with TensorFlow's "same" padding, as timm has it."""
    torch.manual_seed(0)
    convs = [Conv2dSame(3 if kernel == 3 else 4, 4, kernel, stride=2) for kernel in (3, 5, 2)]
    last = [MaxPool2dSame(3, 2), Conv2dSame(4, 5, 1, stride=2, bias=False)]
    return CellsAsBoxes(Layers(stride, *convs, *last), 5).eval()


def one_layer() -> CellsAsBoxes:
    return CellsAsBoxes(Layers(32, torch.nn.Conv2d(3, 5, 32, stride=32)), 5).eval()


ABOUT = ExportMetadata("cells", CATEGORIES, None, "any", 32, 0.3, 5, "test")


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 32])
def test_same_padding_leaves_no_maximum_in_the_sizes(stride):
    """Nested ones of a real backbone keep SymPy busy for many minutes."""
    graph = same_padded(stride)
    program = trace(graph, (96, 128))
    sizes = set()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.ndim == 4:
            sizes |= {str(side) for side in value.shape}
    assert any("s" in side for side in sizes)
    assert not any("Max" in side or "Min" in side for side in sizes)
    for hw in [(96, 128), (95, 129), (65, 70)]:
        images = images_of(3, *hw)
        torch.testing.assert_close(graph(images), program.module()(images))


def test_same_padding_is_that_of_timm():
    cases = list(itertools.product(range(1, 40), (1, 2, 3, 5, 7), (1, 2, 3, 4), (1, 2)))
    assert [same_padding(*case) for case in cases] == [get_same_padding(*case) for case in cases]


def test_traced_sides_are_multiples_of_the_stride_up_to_the_largest():
    graph = one_layer()
    graph.sides = "multiples"
    ranges = trace(graph, (96, 128)).range_constraints.values()
    assert (2, MAX_SIDE // 32) in {(int(each.lower), int(each.upper)) for each in ranges}


@pytest.mark.parametrize(("write", "name"), [(write_program, "model.pt2"), (write_onnx, "model.onnx")])
def test_a_full_disk_is_one_sentence_and_leaves_no_half_file(write, name, tmp_path):
    """torch's own writer would end the process, and the tests with it."""
    (tmp_path / name).symlink_to("/dev/full")
    if not (tmp_path / name).exists():
        pytest.skip("a file that is a full disk is Linux's")
    program = trace(one_layer(), (96, 128))
    with (
        pytest.raises(BadInput, match=f"{name}: No space left on device. What to do: make room"),
        as_sentences(),
    ):
        write(program, tmp_path / name, ABOUT)
    assert not (tmp_path / name).is_symlink()


class PooledWhere(torch.nn.Module):
    def forward(self, maps, boxes, image, use):
        return operators.roi_align_where(maps, boxes, image, use, 0.25, 7, 2)


def test_boxes_are_pooled_in_a_file_as_in_pytorch():
    """Five boxes on maps of two images with three channels, so that no two sizes are mistaken for each other."""
    corners = torch.rand(5, 2, generator=torch.Generator().manual_seed(0)) * 30
    maps = torch.randn(2, 3, 16, 12, generator=torch.Generator().manual_seed(1))
    boxes = torch.cat([corners, corners + 9], 1)
    inputs = (
        maps,
        boxes,
        torch.tensor([0, 1, 1, 0, 1]),
        torch.tensor([True, False, True, True, False]),
    )
    torch.library.opcheck(operators.roi_align_where, (*inputs, 0.25, 7, 2), test_utils="test_faketensor")
    table = {
        "dynamo": True,
        "custom_translation_table": operators.TRANSLATIONS,
        "verbose": False,
    }
    (found,) = torch.onnx.export(PooledWhere().eval(), inputs, **table)(*inputs)
    expected = PooledWhere()(*inputs)
    assert expected.shape == (5, 3, 7, 7)
    assert not expected[[1, 4]].any()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hw", [(7, 5), (1, 9)])
def test_sampling_by_gather_is_grid_sample(hw):
    """Beyond the borders too; and other modes are refused."""
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(3, 4, *hw, generator=generator)
    grid = torch.rand(3, 6, 2, 2, generator=generator) * 3 - 1.5
    expected = torch.nn.functional.grid_sample(maps, grid, align_corners=False)
    torch.testing.assert_close(grid_sample_by_gather(maps, grid), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="nearest"):
        grid_sample_by_gather(maps, grid, mode="nearest")


def test_what_needs_one_size_says_so():
    size = {"shortest_edge": 800, "longest_edge": 1333}
    assert trace_hw("any", 32, size, "x") == (96, 128)
    with pytest.raises(BadInput, match="--size"):
        trace_hw("fixed", 32, size, "deformable_detr")


def test_a_scene_graph_gives_its_detector_and_foreign_ones_are_refused():
    check_exportable(exported_detector("scene_graph"))
    foreign = torch.nn.Module()
    foreign.options = {"architecture": "my:Own"}
    with pytest.raises(BadInput, match="my:Own cannot be exported"):
        check_exportable(foreign)
