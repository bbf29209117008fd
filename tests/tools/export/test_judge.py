"""Every detector as a file, judged by its AP, and every kind of file."""

import importlib.util

import onnx
import pytest
import torch
from exported_detectors import (
    CATEGORIES,
    CLASSES,
    LARGE,
    SMALL,
    exported_detector,
    images_of,
    scattered,
    side_of,
)
from PIL import Image
from report_data import SIZE, table_of

from toolkit.base.masks import areas, rles_of
from toolkit.models import build_detector
from toolkit.tools.export import judge
from toolkit.tools.export.check import batches_agree, check_against_pytorch, compare_outputs
from toolkit.tools.export.exported_files import open_exported
from toolkit.tools.export.request import ExportRequest
from toolkit.tools.export.write import export_detector, make_graph
from toolkit.tools.predict.in_tiles import tiled
from toolkit.tools.predict.open import OwnDetector, open_predictor
from toolkit.tools.predict.predictor import own_predict

pytestmark = pytest.mark.slow


def labelled(predict, folder):
    """A table of four images with boxes near some of those that `predict` finds: AP is neither 0 nor 1."""
    images = images_of(4, *SIZE, seed=5)
    generator = torch.Generator().manual_seed(5)
    height, width = SIZE
    limits = torch.tensor([width, height, width, height])
    folder.mkdir()
    truth = []
    for i, found in enumerate(predict(list(images), 0.0)):
        pixels = images[i].permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / f"{i}.png")
        boxes = found["boxes"].clamp(min=0).minimum(limits)
        sides = (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)
        moves = 0.05 * torch.randn(boxes.shape, generator=generator)
        moved = boxes + sides * moves
        is_seen = (sides > 2).all(1)
        labelled_boxes = moved[is_seen][:20:3].tolist()
        labels = found["labels"][is_seen][:20:3].tolist()
        objects = zip(labelled_boxes, labels, strict=True)
        truth.append(list(objects))
    return table_of(folder, truth, classes=CLASSES, draw=False)


OPENVINO = ["openvino"] if importlib.util.find_spec("openvino") else []
ALL_FILES = ["onnx", "torch", "fp16", *OPENVINO]
# Each detector as one file, and each file of one detector of either kind. OpenVINO's of RF-DETR finds other boxes.
FILES = [(name, ["onnx"]) for name in [*SMALL, *LARGE]]
FILES += [
    ("ssd, few layers", ALL_FILES),
    ("d_fine", ALL_FILES),
    ("rf_detr", OPENVINO),
]


@pytest.mark.parametrize(("name", "formats"), FILES)
def test_every_detector_and_every_file(name, formats, tmp_path):
    """The table of docs/export.md: `-s` prints its rows."""
    detector = exported_detector(name)
    side = side_of(name)
    graph = make_graph(detector, 100)
    size = {"height": side, "width": side + max(32, graph.detector.stride)}
    if graph.sides == "any":
        size = {"shortest_edge": 70, "longest_edge": 200}
    predict = own_predict(graph.detector, size)
    table = labelled(predict, tmp_path / "images")
    own = OwnDetector(name, detector, CATEGORIES, size)
    out = tmp_path / "out"
    request = ExportRequest(formats, top_k=100)
    lines, problems = judge.write_and_check(own, table, out, request)
    is_refused = name == "rf_detr" and formats == ["openvino"]
    refused = {"model.xml"} if is_refused else set()
    # Of random weights many scores are nearly equal.
    assert set(problems) - {"model_fp16.onnx"} == refused, problems
    pytorch, *files = lines
    assert pytorch.AP > 0.05
    for line in files:
        apart = []
        for found in line.differences.values():
            apart.append(f"{found.score:.0e}, {found.box:.0e}")
        cells = [name, line.file, f"{pytorch.AP:.4f}", f"{line.AP:.4f}", *apart]
        print(f"| {' | '.join(cells)} |")
        if line.file == "model_fp16.onnx":
            assert abs(line.AP_moved) <= 0.02
        elif line.file not in refused:
            assert abs(line.AP_moved) <= 1e-3
            assert list(line.differences) == [1, 2, 5]
            if graph.sides != "fixed":
                images = images_of(5, 128, 96)
                batches_agree(graph, out / line.file, images)


def test_a_file_without_grid_sample_finds_the_same(tmp_path):
    files, graph = export_detector(
        exported_detector("rt_detr_v2"),
        tmp_path,
        ["onnx"],
        categories=CATEGORIES,
        size={"height": 64, "width": 64},
        source="here",
        grid_sample=False,
    )
    file = files["onnx"]
    for node in onnx.load(file).graph.node:
        assert node.op_type != "GridSample"
    compared = batches_agree(graph, file, images_of(5, 64, 64))
    assert list(compared) == [1, 2, 5]


@pytest.fixture(params=["faster_rcnn", "rf_detr"])
def masked(request):
    name = request.param
    options = dict(SMALL[name])
    if name == "faster_rcnn":
        options |= {"mask_convs": 1, "mask_channels": 8}
    torch.manual_seed(0)
    detector = build_detector(name, class_names=CLASSES, masks=True, **options)
    return scattered(detector)


def test_files_give_the_masks_of_postprocess(masked, tmp_path):
    name = masked.options["architecture"]
    side = side_of(name)
    images = images_of(2, side, side)
    sizes = torch.tensor([[side, side]] * 2)
    size = {"height": side, "width": side}
    with torch.no_grad():
        boxes, _, _, masks = make_graph(masked, 100)(images)
        expected = masked.postprocess(masked(images, sizes), sizes, sizes, 0.0, 100)
    for found, row_boxes, row_masks in zip(expected, boxes, masks, strict=True):
        assert len(found["boxes"]) > 3
        differences = found["boxes"][:, None] - row_boxes
        apart = differences.abs().amax(-1)
        same = apart.argmin(1)  # of scores that are equal to rounding, the order may be another one
        near = apart.amin(1) < 1e-3
        assert near.float().mean() >= 0.9
        masks_of_file = row_masks[same[near]]
        torch.testing.assert_close(found["masks"][near], masks_of_file, rtol=1e-3, atol=2e-3)
    written, graph = export_detector(
        masked,
        tmp_path,
        ("onnx", "torch"),
        categories=CATEGORIES,
        size=size,
        source="a",
    )
    for path in written.values():
        apart = check_against_pytorch(graph, path, images)
        assert apart.mask < 1e-3
        assert "masks" in str(apart)
        _, about, *_ = open_exported(path, trusted=True)
        assert about.masks == {"faster_rcnn": "box", "rf_detr": "image"}[name]
        assert about.outputs == ("boxes", "scores", "labels", "masks")
    with torch.no_grad():
        *outputs, masks = graph(images)
    other = compare_outputs((*outputs, masks), (*outputs, 1 - masks), side)
    assert not other.is_rounding, "other masks are another detection"

    predictor = open_predictor(written["onnx"])
    assert predictor.masks
    (found,) = predictor.predict([images[0]], 0.0)
    masks = found["masks"]
    assert len(found["boxes"]) > 3
    assert len(masks) == len(found["boxes"])
    size_hw = (side, side)
    for mask in masks:
        assert mask.size_hw == size_hw
    first = expected[0]
    pixels = masked.paste_masks(first["masks"], first["boxes"], size_hw)
    largest = sorted(areas(masks, size_hw))[-3:]
    wanted = sorted(areas(rles_of(pixels), size_hw))[-3:]
    assert largest == pytest.approx(wanted, abs=3)
    (large,) = images_of(1, side + 20, side + 30)
    (joined,) = tiled(predictor, side).predict([large], 0.0)
    assert len(joined["boxes"]) > 3
    assert len(joined["masks"]) == len(joined["boxes"])
    for mask in joined["masks"]:
        assert mask.size_hw == (side + 20, side + 30)
