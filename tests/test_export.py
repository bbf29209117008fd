"""Exported detectors: the same detections as PyTorch's, from one file for every batch; a wrong file is refused."""

import copy
import functools
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from PIL import Image
from report_data import SIZE, table_of
from scene_graph_data import shapes_table
from timm.layers import Conv2dSame
from timm.layers.padding import get_same_padding
from timm.layers.pool2d_same import MaxPool2dSame
from torch.nn.functional import pad

from scripts import export as script
from toolkit.base import imports
from toolkit.base.errors import BadInput, as_sentences
from toolkit.data.table import Category
from toolkit.models import build_detector
from toolkit.tools.export import judge, operators
from toolkit.tools.export.check import batches_agree, check_against_pytorch, compare_outputs
from toolkit.tools.export.exported_files import METADATA_KEY, ExportMetadata, open_exported, write_onnx, write_program
from toolkit.tools.export.graph import MAX_SIDE, PixelsToBoxes, same_padding, trace, trace_hw
from toolkit.tools.export.grid_sampling import grid_sample_by_gather
from toolkit.tools.export.half import write_half
from toolkit.tools.export.relations import PixelsToGraph, export_graph
from toolkit.tools.export.request import ExportRequest
from toolkit.tools.export.write import check_exportable, export_detector, export_final, make_graph
from toolkit.tools.predict.open import OwnDetector, open_predictor
from toolkit.tools.predict.predict_split import SplitOptions, open_any
from toolkit.tools.predict.predictor import own_predict, predict_with

CLASSES = ["a", "b", "c"]
DETR = {"backbone": "test_resnet", "d_model": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 2, "ffn_dim": 32,
        "num_queries": 20}  # fmt: skip
REAL_TIME = {"backbone": "test_resnet", "d_model": 32, "heads": 2, "ffn_dim": 32, "decoder_layers": 2,
             "num_queries": 20, "num_denoising": 10, "hidden_expansion": 0.5}  # fmt: skip
TWO_STAGE = {"rpn_pre_nms_top_n_test": 40, "rpn_post_nms_top_n_test": 16, "score_threshold": 0.01}
SMALL = {
    "detr": DETR,
    "conditional_detr": DETR,
    "deformable_detr": DETR | {"d_model": 64},
    "deformable_detr, two stages": DETR | {"d_model": 64, "box_refine": "two_stage"},
    "dab-detr": DETR,
    "rt_detr_v2": REAL_TIME,
    "d_fine": REAL_TIME,
    "deimv2": REAL_TIME,
    "ecdet": {name: value for name, value in REAL_TIME.items() if name != "backbone"},
    "rf_detr": {"d_model": 32, "heads": 2, "encoder_layers": 4, "decoder_layers": 2, "ffn_dim": 32, "num_queries": 4},
    "lw_detr": {"size": "large", "d_model": 32, "heads": 2, "encoder_layers": 4, "decoder_layers": 2, "ffn_dim": 32,
                "num_queries": 4},
    "faster_rcnn": TWO_STAGE | {"backbone": "lcnet_035", "norm": "batch", "freeze": "none", "strides": [8, 16],
                                "fpn_channels": 16, "anchor_sizes": [[16], [32]], "aspect_ratios": [1.0],
                                "representation_size": 32},
    "ssd": {"backbone": "lcnet_035", "strides": [4, -1], "channels": [16, 16], "aspect_ratios": [[2], [2]]},
    "ssdlite": {"backbone": "lcnet_035", "strides": [4, 8, 16, -1], "channels": [16] * 4, "aspect_ratios": [[2]] * 4},
    "yolov3": {"backbone": "lcnet_035", "head_channels": [8, 8, 8]},
}  # fmt: skip
# Slow to export, or in need of larger images; the scene graph gives its detector.
LARGE = {
    "fasterrcnn_resnet50_fpn_v2": TWO_STAGE,
    "faster_rcnn, same padding": SMALL["faster_rcnn"] | {"backbone": "tf_mobilenetv3_small_minimal_100"},
    "ssd300_vgg16": {},
    "ssdlite320_mobilenet_v3_large": {},
    "scene_graph": {"predicates": ["on"], "mode": "sgdet", "head": "motifs", "backbone": "test_resnet",
                    "hidden_dim": 16, "embed_dim": 8},
}  # fmt: skip
# With few layers, for what is shown with one detector: the time of an export is that of its nodes.
FEW_LAYERS = {
    "ssd, few layers": {"backbone": "test_resnet", "strides": [4, 8, -1], "channels": [16] * 3,
                        "aspect_ratios": [[2]] * 3},
    "yolov3, few layers": SMALL["yolov3"] | {"backbone": "test_resnet"},
}  # fmt: skip
CATEGORIES = [Category(10 * i, name) for i, name in enumerate(CLASSES, start=1)]


@pytest.fixture(scope="module")
def detectors():
    @functools.cache
    def build(name: str):
        """Random, with weights far enough apart that scores are not all nearly equal."""
        torch.manual_seed(0)
        detector = build_detector(name.partition(",")[0], class_names=CLASSES, **(SMALL | LARGE | FEW_LAYERS)[name])
        with torch.no_grad():
            if not name.startswith(("fasterrcnn", "ssd300")):  # these are far apart as they are built
                for parameter in detector.parameters():
                    parameter += 0.02 * torch.randn_like(parameter)
            if name == "yolov3":
                for prediction in detector.predictions:
                    torch.nn.init.normal_(prediction.weight, std=0.1)  # with more, scores tie at 1
            # Norms that know their inputs: otherwise most scores are equal to rounding.
            if size_hw := {"yolov3": (96, 128), "ssdlite320_mobilenet_v3_large": (320, 320)}.get(name):
                for norm in (m for m in detector.modules() if isinstance(m, torch.nn.BatchNorm2d)):
                    norm.momentum = None  # the mean of all batches seen
                detector(images_of(2, *size_hw, seed=9), torch.tensor([size_hw] * 2))
        return detector.eval().to(memory_format=torch.channels_last)  # as training leaves it

    return build


def side_of(name: str) -> int:
    return {"rf_detr": 112, "ssd300_vgg16": 300, "ssdlite320_mobilenet_v3_large": 320}.get(name, 64)


def images_of(batch: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    """Smooth noise, uint8 (B, 3, H, W): of pixels that are all alike a network says the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(batch, 3, 6, 6, generator=generator) * 255
    return torch.nn.functional.interpolate(coarse, size=(height, width), mode="bicubic").clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize("name", SMALL)
def test_the_function_gives_what_postprocess_gives(detectors, name):
    detector = detectors(name)
    graph, side = make_graph(detector, 100), side_of(name)
    height = side + {"fixed": max(32, detector.stride), "multiples": 32, "any": 21}[graph.sides]
    images, sizes = images_of(3, height, side), torch.tensor([[height, side]] * 3)
    with torch.no_grad():
        boxes, scores, labels = graph(images)
        padded = pad(images, (0, -side % detector.stride, 0, -height % detector.stride))
        expected = detector.postprocess(detector(padded, sizes), sizes, sizes, 0.0, 100)
    assert boxes.shape == (3, 100, 4) and scores.shape == labels.shape == (3, 100)
    for b, found in enumerate(expected):
        count = len(found["scores"])
        assert count and (scores[b, count:] == 0).all() and (labels[b, count:] == -1).all()
        theirs = [found[key][None] for key in ("boxes", "scores", "labels")]
        ours = [part[b : b + 1, :count] for part in (boxes, scores, labels)]
        # Of scores that are equal to rounding, the cut after 100 may take others.
        assert min(compare_outputs(*pair, 64).matched for pair in ((ours, theirs), (theirs, ours))) >= 0.99


@pytest.fixture(scope="module")
def ssd(detectors, tmp_path_factory):
    """Both files as a run in bfloat16 leaves them in its final folder, and the function that is in them."""
    AcceleratorState._reset_state(True)
    try:
        trained = copy.deepcopy(detectors("ssd, few layers")).train()
        detector = Accelerator(cpu=True, mixed_precision="bf16").prepare(trained)
    finally:
        AcceleratorState._reset_state(True)
    folder = tmp_path_factory.mktemp("ssd")
    said = export_final(detector, folder, images_of(2, 64, 64), CATEGORIES, {"height": 64, "width": 64})
    assert detector.training and "model.pt2: scores" in said and "model.onnx: scores" in said
    return {"torch": folder / "model.pt2", "onnx": folder / "model.onnx"}, make_graph(detectors("ssd, few layers"))


def test_one_file_serves_every_batch_and_says_what_it_is(ssd):
    files, graph = ssd
    for path in files.values():
        assert list(batches_agree(graph, path, images_of(5, 64, 64))) == [1, 2, 5]
        about = open_exported(path, trusted=True)[1]
        assert list(about.categories) == CATEGORIES and about.size == {"height": 64, "width": 64}
        assert (about.score_threshold, about.sides, about.top_k) == (0.3, "fixed", 300)
    session = onnx.load(files["onnx"])
    assert [node.domain for node in session.graph.node if node.domain not in ("", "pkg.onnxscript.torch_lib")] == []
    assert json.loads({each.key: each.value for each in session.metadata_props}[METADATA_KEY])["architecture"] == "ssd"


def test_files_predict_on_images_of_any_size_as_the_detector(ssd, detectors, tmp_path, monkeypatch):
    files, _ = ssd
    monkeypatch.setattr(imports, "_trusts_all", True)
    detectors("ssd, few layers").save_final(tmp_path, CATEGORIES, {"height": 64, "width": 64})
    images = [images_of(1, *hw, seed=i)[0] for i, hw in enumerate([(64, 64), (90, 120), (33, 20), (90, 120)])]
    expected = open_predictor(tmp_path).predict(images, 0.0)
    for path in files.values():
        predictor = open_predictor(path)
        assert predictor.recommended_threshold == 0.3 and predictor.categories == CATEGORIES
        for one, other, image in zip(expected, predictor.predict(images, 0.0), images, strict=True):
            count = min(len(one["scores"]), len(other["scores"]))
            parts = [[each[key][None, :count] for key in ("boxes", "scores", "labels")] for each in (one, other)]
            assert count and compare_outputs(*parts, max(image.shape)).is_rounding
    with pytest.raises(BadInput, match="--weights ema"):
        open_predictor(files["onnx"], "ema")


class SamePadded(torch.nn.Module):
    """A backbone with TensorFlow's "same" padding, as timm has it."""

    exported_sides = "any"
    predicts_masks = False

    def __init__(self, stride: int):
        super().__init__()
        torch.manual_seed(0)
        self.stride = stride
        convs = [Conv2dSame(3 if i == 0 else 4, 4, kernel, stride=2) for i, kernel in enumerate((3, 5, 2))]
        self.layers = torch.nn.Sequential(*convs, MaxPool2dSame(3, 2), Conv2dSame(4, 5, 1, stride=2, bias=False))

    def forward(self, images):
        return self.layers(images.float() / 255).flatten(2).transpose(1, 2)


class CellsAsBoxes(PixelsToBoxes):
    def found(self, images, sizes):
        cells = self.detector(images)
        return cells[..., :4], cells[..., 4].exp(), torch.zeros_like(cells[..., 4], dtype=torch.int64)


@pytest.mark.parametrize("stride", [1, 32])
def test_same_padding_leaves_no_maximum_in_the_sizes(stride, tmp_path):
    """Nested ones of a real backbone keep SymPy busy for many minutes."""
    graph = CellsAsBoxes(SamePadded(stride), 5).eval()
    program = trace(graph, (96, 128))
    found = [each for node in program.graph.nodes if isinstance(each := node.meta.get("val"), torch.Tensor)]
    sizes = {str(side) for each in found if each.ndim == 4 for side in each.shape}
    assert any("s" in side for side in sizes) and not [side for side in sizes if "Max" in side or "Min" in side]
    for hw in [(96, 128), (95, 129), (65, 70)]:
        images = images_of(3, *hw)
        for one, other in zip(graph(images), program.module()(images), strict=True):
            torch.testing.assert_close(one, other)
    about = ExportMetadata("cells", CATEGORIES, None, "any", stride, 0.3, 5, "test")
    write_onnx(program, tmp_path / "model.onnx", about)
    run = open_exported(tmp_path / "model.onnx")[0]
    for hw in [(96, 128), (95, 129)]:  # sides that are multiples of the stride, and others: padded in the file
        images = images_of(3, *hw)
        for one, other in zip(graph(images), run(images.numpy()), strict=True):
            torch.testing.assert_close(one, torch.from_numpy(other), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is a full disk is Linux's")
@pytest.mark.parametrize(("write", "name"), [(write_program, "model.pt2"), (write_onnx, "model.onnx")])
def test_a_full_disk_is_one_sentence_and_leaves_no_half_file(write, name, tmp_path):
    """torch's own writer would end the process, and the tests with it."""
    (tmp_path / name).symlink_to("/dev/full")
    program = trace(CellsAsBoxes(SamePadded(32), 5).eval(), (96, 128))
    about = ExportMetadata("cells", CATEGORIES, None, "any", 32, 0.3, 5, "test")
    with pytest.raises(BadInput, match=f"{name}: No space left on device. What to do: make room"), as_sentences():
        write(program, tmp_path / name, about)
    assert not (tmp_path / name).is_symlink()


def test_traced_sides_are_multiples_of_the_stride_up_to_the_largest():
    graph = CellsAsBoxes(SamePadded(32), 5).eval()
    graph.sides = "multiples"
    ranges = trace(graph, (96, 128)).range_constraints.values()
    assert {(int(each.lower), int(each.upper)) for each in ranges} >= {(2, MAX_SIDE // 32)}, ranges


class PooledWhere(torch.nn.Module):
    def forward(self, maps, boxes, image, use):
        return operators.roi_align_where(maps, boxes, image, use, 0.25, 7, 2)


def test_boxes_are_pooled_in_a_file_as_in_pytorch():
    """Five boxes on maps of two images with three channels, so that no two sizes are mistaken for each other."""
    corners = torch.rand(5, 2, generator=torch.Generator().manual_seed(0)) * 30
    maps = torch.randn(2, 3, 16, 12, generator=torch.Generator().manual_seed(1))
    inputs = (maps, torch.cat([corners, corners + 9], 1),
              torch.tensor([0, 1, 1, 0, 1]), torch.tensor([True, False, True, True, False]))  # fmt: skip
    torch.library.opcheck(operators.roi_align_where, (*inputs, 0.25, 7, 2), test_utils="test_faketensor")
    table = {"dynamo": True, "custom_translation_table": operators.TRANSLATIONS, "verbose": False}
    (found,) = torch.onnx.export(PooledWhere().eval(), inputs, **table)(*inputs)
    expected = PooledWhere()(*inputs)
    assert expected.shape == (5, 3, 7, 7) and not expected[[1, 4]].any()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_same_padding_is_that_of_timm():
    cases = list(itertools.product(range(1, 40), (1, 2, 3, 5, 7), (1, 2, 3, 4), (1, 2)))
    assert [same_padding(*case) for case in cases] == [get_same_padding(*case) for case in cases]


@pytest.mark.parametrize("size", [{"height": 64, "width": 64}, {"shortest_edge": 64, "longest_edge": 100}, None])
def test_the_lines_of_the_documentation_give_what_the_toolkit_gives(ssd, tmp_path, monkeypatch, size):
    """In a program that can import neither PyTorch nor the toolkit."""
    model, side = onnx.load(ssd[0]["onnx"]), 64 if size is None else 128
    entry = next(each for each in model.metadata_props if each.key == METADATA_KEY)
    entry.value = json.dumps(json.loads(entry.value) | {"size": size, "score_threshold": 0.1})
    (tmp_path / "exported").mkdir()
    onnx.save(model, tmp_path / "exported" / "model.onnx")
    picture = Image.fromarray(images_of(1, side, side)[0].permute(1, 2, 0).numpy())
    picture.save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    page = Path(script.__file__).parent.parent / "docs" / "export.md"
    alone = "import sys; sys.modules['torch'] = sys.modules['toolkit'] = None\n"
    command = [sys.executable, "-c", alone + page.read_text().split("```python\n")[1].split("```")[0]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = [line.split(" ", 2) for line in done.stdout.splitlines()]
    expected = open_predictor("exported/model.onnx")(Image.open("photo.jpg"))
    assert len(printed) == len(expected["scores"]) > 3
    for (name, score, box), at, label, boxes in zip(printed, *(expected[key] for key in ("scores", "labels", "boxes")),
                                                    strict=True):  # fmt: skip
        assert name == CLASSES[label] and abs(float(score) - at) < 2e-3
        torch.testing.assert_close(torch.tensor(json.loads(box)), boxes, rtol=0, atol=0.2)


def test_a_wrong_file_is_refused(ssd):
    """As `torch.onnx.export(dynamo=False)` writes RT-DETR-v2 without an error: it runs, and its boxes are elsewhere."""
    files, graph = ssd
    images = images_of(2, 64, 64)
    check_against_pytorch(graph, files["onnx"], images)
    boxes, scores, labels = graph(images)
    for wrong in (
        (boxes * 1.05, scores, labels),
        (boxes, scores * 0.9, labels),
        (boxes, scores, (labels + 1) % 3),
        (boxes.flip(0), scores.flip(0), labels.flip(0)),  # the order of the images
    ):
        with pytest.raises(RuntimeError, match="does not compute what PyTorch does"):
            check_against_pytorch(lambda _, wrong=wrong: wrong, files["onnx"], images)


@pytest.mark.filterwarnings("error:No complete tensor found")
def test_images_below_the_smallest_side_get_a_file_of_their_size(detectors, tmp_path):
    told, size = [], {"height": 32, "width": 32}
    asked = {"categories": CATEGORIES, "size": size, "source": "", "score_threshold": 0.42, "top_k": 100}
    files, graph = export_detector(detectors("yolov3, few layers"), tmp_path, ("torch",), **asked, say=told.append)
    about = open_exported(files["torch"], trusted=True)[1]
    assert (about.score_threshold, about.sides, graph.sides, about.top_k) == (0.42, "fixed", "fixed", 100)
    assert "files of several sizes begin with 64 pixels: this one takes 32 x 32 alone" in told
    assert check_against_pytorch(graph, files["torch"], images_of(2, 32, 32))


def test_other_files_are_bad_input(ssd, tmp_path):
    with pytest.raises(BadInput, match="no such file"):
        open_exported(tmp_path / "model.onnx")
    for name in ("model.onnx", "model.pt2"):
        (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(BadInput, match="cannot load it"):
            open_exported(tmp_path / name, trusted=True)
    model = onnx.load(ssd[0]["onnx"])
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(BadInput, match="scripts/export.py"):
        open_exported(tmp_path / "other.onnx")


def test_what_needs_one_size_says_so_and_a_scene_graph_gives_its_detector(detectors):
    size = {"shortest_edge": 800, "longest_edge": 1333}
    assert trace_hw("any", 32, size, "x") == (96, 128)
    with pytest.raises(BadInput, match="--size"):
        trace_hw("fixed", 32, size, "deformable_detr")
    foreign = torch.nn.Module()
    foreign.options = {"architecture": "my:Own"}
    with pytest.raises(BadInput, match="my:Own cannot be exported"):
        check_exportable(foreign)
    check_exportable(detectors("scene_graph"))


RELATIONS = {"predicates": ["on", "under", "in"], "detector_options": {"architecture": "rt_detr_v2"} | REAL_TIME}
GRAPHS = {
    "egtr": RELATIONS,
    **{name: RELATIONS | {"mode": "sgdet", "head": name, "head_options": {"dim": 16}, "map_channels": 8,
                          "hidden_dim": 8, "representation_size": 16, "embed_dim": 4,
                          "detections_per_image": 7, "score_threshold": 0.001, "nms_threshold": 0.3,
                          "prior_adjustment": 0.5} for name in ("react", "penet", "react_pp")},
}  # fmt: skip


def graph_detector(name: str):
    """Random, with weights far enough apart that scores differ."""
    torch.manual_seed(0)
    detector = build_detector("egtr" if name == "egtr" else "scene_graph", class_names=CLASSES, **GRAPHS[name])
    with torch.no_grad():
        for parameter in detector.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
        detector.relation_counts += torch.randint(1, 9, detector.relation_counts.shape)
    return detector.eval()


def assert_same_graphs(found, expected):
    """The same objects, and the same scores of the same pairs; pairs whose scores are equal to rounding may change
    places, also at the cut."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        count = min(len(one["pairs"]), 100)
        assert count > 5 and len(other["pairs"]) == len(other["triplet_scores"]) >= count
        for key in ("boxes", "scores", "labels"):
            torch.testing.assert_close(one[key], other[key], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(one["triplet_scores"][:count], other["triplet_scores"][:count], rtol=1e-4, atol=1e-5)
        rows, others = ({tuple(pair): i for i, pair in enumerate(g["pairs"].tolist())} for g in (one, other))
        both = [*dict(list(rows.items())[:count]).keys() & others.keys()]
        assert len(both) >= 0.98 * count
        for key in ("predicate_scores", "triplet_scores"):
            here, there = one[key][[rows[pair] for pair in both]], other[key][[others[pair] for pair in both]]
            torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", GRAPHS)
def test_the_function_of_a_graph_gives_what_postprocess_gives(name):
    assert_function_gives_graphs(graph_detector(name))


def assert_function_gives_graphs(detector):
    images = images_of(3, 64, 64)
    assert detector.graph_obstacle() is None
    with torch.no_grad():
        outputs = [output.numpy() for output in PixelsToGraph(detector)(images)]
    about = ExportMetadata("x", CATEGORIES, None, "fixed", 32, 0.3, 100, "here", predicates=RELATIONS["predicates"])
    found = predict_with(lambda _: outputs, about)(list(images), 0.0)
    assert_same_graphs(found, own_predict(detector, None)(list(images), 0.0))
    return found


def test_what_was_not_found_takes_no_class_from_what_was():
    """Objects that suppression left out fill the rows of an image; late NMS is between the others."""
    detector = graph_detector("penet")
    detector.detections_per_image, detector.nms_threshold = 20, 0.01
    detector.detector.nms_threshold = 0.01
    assert all(len(graph["scores"]) < 20 for graph in assert_function_gives_graphs(detector))


@pytest.mark.slow  # a minute each
@pytest.mark.parametrize("name", GRAPHS)
def test_an_exported_graph_is_used_like_a_run(name, tmp_path):
    detector, images = graph_detector(name), images_of(3, 64, 64)
    what = {"categories": CATEGORIES, "size": {"height": 64, "width": 64}, "source": "here", "score_threshold": 0.3}
    predictor = open_predictor(export_graph(detector, tmp_path, **what))
    assert list(predictor.predicates) == RELATIONS["predicates"]
    assert_same_graphs(predictor.predict(list(images), 0.0), own_predict(detector, None)(list(images), 0.0))
    graph = predictor(images[0], 0.3)
    assert (graph["scores"] > 0.3).all() and (graph["pairs"] < len(graph["boxes"])).all()
    for entry in predictor.as_json(graph)["relations"]:
        assert set(entry) == {"subject", "object", "predicate", "score"}


def test_a_graph_that_cannot_be_exported_says_why(capsys):
    options = {"predicates": ["on"], "backbone": "test_resnet", "hidden_dim": 16, "embed_dim": 8}
    for words, more in (("of the heads only penet, react, react_pp", {"mode": "sgdet", "head": "motifs"}),
                        ("two stages", {"mode": "sgdet", "head": "react", "head_options": {"dim": 8}}),
                        ("the boxes are given", {"mode": "predcls", "head": "imp"})):  # fmt: skip
        detector = build_detector("scene_graph", class_names=CLASSES, **options | more)
        assert words in detector.graph_obstacle()
    trained = OwnDetector("here", detector, CATEGORIES, None)
    assert judge.write_relations(trained, None, Path("there"), ExportRequest(), {}) == []
    assert "the relations are not exported, the files have the detector alone: in predcls" in capsys.readouterr().out


@pytest.mark.slow  # a minute
def test_an_exported_graph_is_judged_by_its_recall(tmp_path):
    table = shapes_table(tmp_path, images=4)
    options = RELATIONS | {"predicates": list(table.predicates)}
    detector = build_detector("egtr", class_names=table.class_names, **options).eval()
    trained = OwnDetector("here", detector, table.categories, {"height": 64, "width": 64})
    problems = {}
    torch_line, file_line = judge.write_relations(trained, table, tmp_path, ExportRequest(), problems)
    assert not problems and (tmp_path / "graph.onnx").is_file() and torch_line["R@100"] is not None
    for name in ("R@20", "R@50", "R@100", "mR@100"):
        assert file_line[name] == pytest.approx(torch_line[name], abs=0.02)
    last = judge.graphs_as_table([torch_line, file_line]).splitlines()[-1]
    assert last.startswith("| graph.onnx | ") and last.endswith(f" | {file_line['ms']:.1f} |") and file_line["ms"] > 0
    split, said = SplitOptions(split=str(tmp_path / "data" / "annotations" / "train.json")), []
    open_any(tmp_path / "graph.onnx", None, split, SimpleNamespace(device="cpu", print=said.append))
    assert said[-1].endswith("graph.onnx: only its boxes are measured; evaluate.py RUN and export.py measure relations")


def labelled(predict, folder):
    """A table of four images with boxes near some of those that `predict` finds: AP is neither 0 nor 1."""
    images, generator = images_of(4, *SIZE, seed=5), torch.Generator().manual_seed(5)
    folder.mkdir()
    truth = []
    for i, (image, found) in enumerate(zip(images, predict(list(images), 0.0), strict=True)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{i}.png")
        boxes = found["boxes"].clone()
        boxes[:, 0::2], boxes[:, 1::2] = boxes[:, 0::2].clamp(0, SIZE[1]), boxes[:, 1::2].clamp(0, SIZE[0])
        seen = ((boxes[:, 2:] - boxes[:, :2]) > 2).all(1).nonzero()[:, 0][:20:3]
        sides = (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)
        boxes += 0.05 * sides * torch.randn(boxes.shape, generator=generator)
        truth.append([(boxes[k].tolist(), int(found["labels"][k])) for k in seen])
    return table_of(folder, truth, classes=CLASSES, draw=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_every_detector_as_every_file(detectors, tmp_path, name):
    """The table of docs/export.md: `-s` prints its rows."""
    detector, side = detectors(name), side_of(name)
    graph = make_graph(detector, 100)
    wide = {"height": side, "width": side + max(32, graph.detector.stride)}
    size = {"shortest_edge": 70, "longest_edge": 200} if graph.sides == "any" else wide
    table = labelled(own_predict(graph.detector, size), tmp_path / "images")
    more = ["openvino"] if importlib.util.find_spec("openvino") else []
    asked = ExportRequest(["onnx", "torch", "fp16", *more], top_k=100)
    own = OwnDetector(name, detector, CATEGORIES, size)
    lines, problems = judge.write_and_check(own, table, tmp_path / "out", asked)
    refused = {"model.xml"} if name == "rf_detr" and more else set()  # OpenVINO's finds other boxes
    assert set(problems) - {"model_fp16.onnx"} == refused, problems  # of random weights many scores are nearly equal
    half = next(line for line in lines if line.file == "model_fp16.onnx")
    assert abs(half.AP_moved) <= 0.02
    for each in (line for line in lines[1:] if line is not half and line.file not in refused):
        assert lines[0].AP > 0.05 and abs(each.AP_moved) <= 1e-3 and list(each.differences) == [1, 2, 5]
        if graph.sides != "fixed":
            batches_agree(graph, tmp_path / "out" / each.file, images_of(5, 128, 96))
        apart = " | ".join(f"{found.score:.0e}, {found.box:.0e}" for found in each.differences.values())
        ms = " | ".join(f"{sum(line.milliseconds.values()):.0f}" for line in (lines[0], each))
        print(f"| {name} | {each.file} | {lines[0].AP:.4f} | {each.AP:.4f} | {apart} | {ms} |")
    print(f"| {name} | {half.file} | {lines[0].AP:.4f} | {half.AP:.4f} |")


def test_half_precision_is_in_the_products_and_not_in_the_boxes(ssd, tmp_path):
    path, images = tmp_path / "model_fp16.onnx", images_of(3, 64, 64).numpy()
    write_half(ssd[0]["onnx"], path)
    onnx.checker.check_model(path, full_check=True)
    weights = [tensor.data_type for tensor in onnx.load(path).graph.initializer if len(tensor.dims) == 4]
    assert len(weights) > 10 and set(weights) == {onnx.TensorProto.FLOAT16}
    (exact, expected), (half, about) = open_exported(ssd[0]["onnx"]), open_exported(path)
    (boxes, scores, _), (half_boxes, half_scores, _) = exact(images), half(images)
    assert about == expected and 0 < abs(half_scores - scores)[:, :5].max() < 1e-3
    nearest = abs(half_boxes[:, None, :5] - boxes[:, :5, None]).max(-1).min(-1)
    assert (nearest < 0.01).mean() > 0.8, "pixels"
    assert (half_boxes != half_boxes.astype("float16")).mean() > 0.5


@pytest.mark.parametrize("hw", [(7, 5), (1, 9)])
def test_sampling_by_gather_is_grid_sample(hw):
    """Beyond the borders too; and other modes are refused."""
    generator = torch.Generator().manual_seed(0)
    maps, grid = torch.randn(3, 4, *hw, generator=generator), torch.rand(3, 6, 2, 2, generator=generator) * 3 - 1.5
    expected = torch.nn.functional.grid_sample(maps, grid, align_corners=False)
    torch.testing.assert_close(grid_sample_by_gather(maps, grid), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="nearest"):
        grid_sample_by_gather(maps, grid, mode="nearest")


@pytest.mark.slow  # a minute
def test_a_file_without_grid_sample_finds_the_same(detectors, tmp_path):
    asked = {"categories": CATEGORIES, "size": {"height": 64, "width": 64}, "source": "here", "grid_sample": False}
    files, graph = export_detector(detectors("rt_detr_v2"), tmp_path, ["onnx"], **asked)
    assert "GridSample" not in {node.op_type for node in onnx.load(files["onnx"]).graph.node}
    assert list(batches_agree(graph, files["onnx"], images_of(5, 64, 64))) == [1, 2, 5]


def test_settings_of_prediction_are_in_the_file_and_its_times_beside_its_ap(detectors, tmp_path, capsys, monkeypatch):
    """The script from its command line on, without data: a stricter suppression leaves worse boxes."""
    size = {"height": 64, "width": 64}
    detectors("ssd, few layers").save_final(tmp_path / "final", CATEGORIES, size)
    words = [str(tmp_path / "final"), "--formats", "onnx", "fp16", "--top-k", "50", "--score-threshold", "0.25"]
    words += ["--model.nms_threshold", "0.01", "--benchmark", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(judge, "BENCHMARK_CASES", ((1, 1), (8, 2)))
    assert script.main(words) == 0
    assert "ms an image, batch 1, 1 thread | ms an image, batch 8, 2 threads" in capsys.readouterr().out
    run, about = open_exported(tmp_path / "out" / "model.onnx")
    assert (about.top_k, about.score_threshold) == (50, 0.25)
    images = images_of(1, 64, 64)
    with torch.no_grad():
        found = make_graph(detectors("ssd, few layers"), 50)(images)[1]
    assert run(images.numpy())[1][0, -1] < found[0, -1] - 1e-4
    written = json.loads((tmp_path / "out" / "export.json").read_text())["files"]
    assert all(len(line["milliseconds"]) == 2 and min(line["milliseconds"].values()) > 0 for line in written)
    assert script.main([*words, "--model.backbone", "x"]) == 2


@pytest.mark.slow
def test_openvino_takes_eight_bits(ssd):
    """In float32 it is among the files of every detector."""
    pytest.importorskip("openvino", reason="OpenVINO is not installed: pip install openvino nncf")
    pytest.importorskip("nncf", reason="nncf is not installed")
    from toolkit.tools.export.exported_files import write_openvino

    path, about = ssd[0]["onnx"], open_exported(ssd[0]["onnx"])[1]
    write_openvino(path, path.with_suffix(".xml"), about, [images_of(1, 64, 64, seed=i).numpy() for i in range(4)])
    run, read = open_exported(path.with_suffix(".xml"))
    assert run(images_of(2, 64, 64).numpy())[0].shape == (2, 300, 4) and read == about
