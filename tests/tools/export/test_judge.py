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
    limits = torch.tensor([*SIZE[::-1]] * 2)
    folder.mkdir()
    truth = []
    for i, (image, found) in enumerate(zip(images, predict(list(images), 0.0), strict=True)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{i}.png")
        boxes = found["boxes"].clamp(min=0).minimum(limits)
        sides = (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)
        seen = (sides > 2).all(1).nonzero()[:, 0][:20:3]
        boxes = boxes + 0.05 * sides * torch.randn(boxes.shape, generator=generator)
        truth.append([(boxes[k].tolist(), int(found["labels"][k])) for k in seen])
    return table_of(folder, truth, classes=CLASSES, draw=False)


ALL_FILES = ["onnx", "torch", "fp16"]
OPENVINO = ["openvino"] if importlib.util.find_spec("openvino") else []
# Each detector as one file, and each file of one detector of either kind. OpenVINO's of RF-DETR finds other boxes.
FILES = [(name, ["onnx"]) for name in [*SMALL, *LARGE]]
FILES += [
    ("ssd, few layers", ALL_FILES + OPENVINO),
    ("d_fine", ALL_FILES + OPENVINO),
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
    table = labelled(own_predict(graph.detector, size), tmp_path / "images")
    own = OwnDetector(name, detector, CATEGORIES, size)
    lines, problems = judge.write_and_check(own, table, tmp_path / "out", ExportRequest(formats, top_k=100))
    refused = {"model.xml"} if name == "rf_detr" and formats == OPENVINO != [] else set()
    # Of random weights many scores are nearly equal.
    assert set(problems) - {"model_fp16.onnx"} == refused, problems
    assert lines[0].AP > 0.05
    for line in lines[1:]:
        apart = " | ".join(f"{found.score:.0e}, {found.box:.0e}" for found in line.differences.values())
        print(f"| {name} | {line.file} | {lines[0].AP:.4f} | {line.AP:.4f} | {apart} |")
        if line.file == "model_fp16.onnx":
            assert abs(line.AP_moved) <= 0.02
        elif line.file not in refused:
            assert abs(line.AP_moved) <= 1e-3
            assert list(line.differences) == [1, 2, 5]
            if graph.sides != "fixed":
                batches_agree(graph, tmp_path / "out" / line.file, images_of(5, 128, 96))


def test_a_file_without_grid_sample_finds_the_same(tmp_path):
    asked = {
        "categories": CATEGORIES,
        "size": {"height": 64, "width": 64},
        "source": "here",
        "grid_sample": False,
    }
    files, graph = export_detector(exported_detector("rt_detr_v2"), tmp_path, ["onnx"], **asked)
    assert "GridSample" not in {node.op_type for node in onnx.load(files["onnx"]).graph.node}
    assert list(batches_agree(graph, files["onnx"], images_of(5, 64, 64))) == [1, 2, 5]


@pytest.fixture(params=["faster_rcnn", "rf_detr"])
def masked(request):
    more = {"mask_convs": 1, "mask_channels": 8} if request.param == "faster_rcnn" else {}
    torch.manual_seed(0)
    return scattered(build_detector(request.param, class_names=CLASSES, masks=True, **SMALL[request.param], **more))


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
        apart = (found["boxes"][:, None] - row_boxes).abs().amax(-1)
        same = apart.argmin(1)  # of scores that are equal to rounding, the order may be another one
        near = apart.amin(1) < 1e-3
        assert near.float().mean() >= 0.9
        torch.testing.assert_close(found["masks"][near], row_masks[same[near]], rtol=1e-3, atol=2e-3)
    asked = {"categories": CATEGORIES, "size": size, "source": "a"}
    written, graph = export_detector(masked, tmp_path, ("onnx", "torch"), **asked)
    for path in written.values():
        apart = check_against_pytorch(graph, path, images)
        assert apart.mask < 1e-3
        assert "masks" in str(apart)
        about = open_exported(path, trusted=True)[1]
        assert about.masks == {"faster_rcnn": "box", "rf_detr": "image"}[name]
        assert about.outputs == ("boxes", "scores", "labels", "masks")
    with torch.no_grad():
        boxes, scores, labels, masks = graph(images)
    other = compare_outputs((boxes, scores, labels, masks), (boxes, scores, labels, 1 - masks), side)
    assert not other.is_rounding, "other masks are another detection"

    predictor = open_predictor(written["onnx"])
    assert predictor.masks
    (found,) = predictor.predict([images[0]], 0.0)
    assert len(found["masks"]) == len(found["boxes"]) > 3
    assert {mask.size_hw for mask in found["masks"]} == {(side, side)}
    pixels = masked.paste_masks(expected[0]["masks"], expected[0]["boxes"], (side, side))
    wanted = sorted(areas(rles_of(pixels), (side, side)))
    assert sorted(areas(found["masks"], (side, side)))[-3:] == pytest.approx(wanted[-3:], abs=3)
    (large,) = images_of(1, side + 20, side + 30)
    (joined,) = tiled(predictor, side).predict([large], 0.0)
    assert len(joined["masks"]) == len(joined["boxes"]) > 3
    assert {mask.size_hw for mask in joined["masks"]} == {(side + 20, side + 30)}
