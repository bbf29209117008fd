"""Exported files: the same detections as PyTorch's, from one file for every batch; a wrong file is refused."""

import json
import subprocess
import sys

import onnx
import pytest
import torch
from exported_detectors import CATEGORIES, CLASSES, exported_detector, images_of
from PIL import Image
from places import ROOT

from scripts import export
from toolkit.base import imports
from toolkit.base.errors import BadInput
from toolkit.tools.export import judge
from toolkit.tools.export.check import batches_agree, check_against_pytorch, compare_outputs
from toolkit.tools.export.exported_files import METADATA_KEY, open_exported, write_openvino
from toolkit.tools.export.half import write_half
from toolkit.tools.export.write import export_detector, make_graph, try_export
from toolkit.tools.predict.open import open_predictor

SIZE = {"height": 64, "width": 64}
FILES = ["model.onnx", "model.pt2"]
COLUMNS = ("boxes", "scores", "labels")


@pytest.fixture(scope="module")
def graph():
    return make_graph(exported_detector("ssd, few layers"))


@pytest.mark.parametrize("name", FILES)
def test_one_file_serves_every_batch_and_says_what_it_is(ssd, graph, name):
    assert list(batches_agree(graph, ssd / name, images_of(5, 64, 64))) == [1, 2, 5]
    about = open_exported(ssd / name, trusted=True)[1]
    assert list(about.categories) == CATEGORIES
    assert about.size == SIZE
    assert about.architecture == "ssd"
    assert about.score_threshold == 0.3
    assert about.sides == "fixed"
    assert about.top_k == 300


def test_an_export_is_tried_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    detector = exported_detector("ssd, few layers")
    try_export(detector, CATEGORIES, SIZE)

    def failing(*_):
        raise ValueError("an operator\nthat is not known")

    monkeypatch.setattr("toolkit.tools.export.write.write_onnx", failing)
    with pytest.raises(
        BadInput, match=r"ssd cannot be exported .*ValueError: an operator\)\. .*run.export_check false"
    ):
        try_export(detector, CATEGORIES, SIZE)
    assert not list(tmp_path.glob("tmp*"))


def test_onnx_has_operators_of_onnx_alone(ssd):
    nodes = onnx.load(ssd / "model.onnx").graph.node
    assert {node.domain for node in nodes} <= {"", "pkg.onnxscript.torch_lib"}


@pytest.mark.parametrize("name", FILES)
def test_files_predict_on_images_of_any_size_as_the_detector(ssd, tmp_path, monkeypatch, name):
    monkeypatch.setattr(imports, "_trusts_all", True)
    exported_detector("ssd, few layers").save_final(tmp_path, CATEGORIES, SIZE)
    images = [images_of(1, *hw, seed=i)[0] for i, hw in enumerate([(64, 64), (90, 120), (33, 20), (90, 120)])]
    predictor = open_predictor(ssd / name)
    assert predictor.recommended_threshold == 0.3
    assert predictor.categories == CATEGORIES
    expected = open_predictor(tmp_path).predict(images, 0.0)
    for one, other, image in zip(expected, predictor.predict(images, 0.0), images, strict=True):
        count = min(len(one["scores"]), len(other["scores"]))
        assert count
        parts = [[each[key][None, :count] for key in COLUMNS] for each in (one, other)]
        assert compare_outputs(*parts, max(image.shape)).is_rounding
    with pytest.raises(BadInput, match="--weights ema"):
        open_predictor(ssd / name, "ema")


@pytest.mark.parametrize("size", [SIZE, {"shortest_edge": 64, "longest_edge": 100}, None])
def test_the_lines_of_the_documentation_give_what_the_toolkit_gives(ssd, tmp_path, monkeypatch, size):
    """In a program that can import neither PyTorch nor the toolkit."""
    model = onnx.load(ssd / "model.onnx")
    entry = next(each for each in model.metadata_props if each.key == METADATA_KEY)
    entry.value = json.dumps(json.loads(entry.value) | {"size": size, "score_threshold": 0.1})
    (tmp_path / "exported").mkdir()
    onnx.save(model, tmp_path / "exported" / "model.onnx")
    side = 64 if size is None else 128
    Image.fromarray(images_of(1, side, side)[0].permute(1, 2, 0).numpy()).save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "export.md").read_text()
    alone = "import sys; sys.modules['torch'] = sys.modules['toolkit'] = None\n"
    code = alone + page.split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = [line.split(" ", 2) for line in done.stdout.splitlines()]
    expected = open_predictor("exported/model.onnx")(Image.open("photo.jpg"))
    assert len(printed) > 3
    assert [name for name, _, _ in printed] == [CLASSES[label] for label in expected["labels"]]
    scores = torch.tensor([float(score) for _, score, _ in printed])
    torch.testing.assert_close(scores, expected["scores"], rtol=0, atol=2e-3)
    boxes = torch.tensor([json.loads(box) for _, _, box in printed])
    torch.testing.assert_close(boxes, expected["boxes"], rtol=0, atol=0.2)


def test_a_wrong_file_is_refused(ssd, graph):
    """As `torch.onnx.export(dynamo=False)` writes RT-DETR-v2 without an error: it runs, and its boxes are elsewhere."""
    images = images_of(2, 64, 64)
    check_against_pytorch(graph, ssd / "model.onnx", images)
    boxes, scores, labels = graph(images)
    for wrong in (
        (boxes * 1.05, scores, labels),
        (boxes, scores * 0.9, labels),
        (boxes, scores, (labels + 1) % 3),
        (boxes.flip(0), scores.flip(0), labels.flip(0)),  # the order of the images
    ):
        with pytest.raises(RuntimeError, match="does not compute what PyTorch does"):
            check_against_pytorch(lambda _, wrong=wrong: wrong, ssd / "model.onnx", images)


def test_other_files_are_refused(ssd, tmp_path):
    with pytest.raises(BadInput, match="no such file"):
        open_exported(tmp_path / "model.onnx")
    for name in FILES:
        (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(BadInput, match="cannot load it"):
            open_exported(tmp_path / name, trusted=True)
    model = onnx.load(ssd / "model.onnx")
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(BadInput, match="scripts/export.py"):
        open_exported(tmp_path / "other.onnx")


def test_half_precision_is_in_the_products_and_not_in_the_boxes(ssd, tmp_path):
    path = tmp_path / "model_fp16.onnx"
    images = images_of(3, 64, 64).numpy()
    write_half(ssd / "model.onnx", path)
    onnx.checker.check_model(path, full_check=True)
    weights = [tensor.data_type for tensor in onnx.load(path).graph.initializer if len(tensor.dims) == 4]
    assert len(weights) > 8
    assert set(weights) == {onnx.TensorProto.FLOAT16}
    exact, expected = open_exported(ssd / "model.onnx")
    half, about = open_exported(path)
    assert about == expected
    boxes, scores, _ = exact(images)
    half_boxes, half_scores, _ = half(images)
    assert 0 < abs(half_scores - scores)[:, :5].max() < 1e-3
    nearest = abs(half_boxes[:, None, :5] - boxes[:, :5, None]).max(-1).min(-1)
    assert (nearest < 0.01).mean() > 0.8  # pixels
    assert (half_boxes != half_boxes.astype("float16")).mean() > 0.5


@pytest.mark.slow  # half a minute
@pytest.mark.filterwarnings("error:No complete tensor found")
def test_images_below_the_smallest_side_get_a_file_of_their_size(tmp_path):
    told = []
    asked = {
        "size": {"height": 32, "width": 32},
        "source": "",
        "score_threshold": 0.42,
        "top_k": 100,
    }
    detector = exported_detector("yolov3, few layers")
    files, graph = export_detector(detector, tmp_path, ("torch",), categories=CATEGORIES, **asked, say=told.append)
    about = open_exported(files["torch"], trusted=True)[1]
    assert about.score_threshold == 0.42
    assert about.sides == graph.sides == "fixed"
    assert about.top_k == 100
    assert "files of several sizes begin with 64 pixels: this one takes only 32 x 32" in told
    assert check_against_pytorch(graph, files["torch"], images_of(2, 32, 32))


def test_the_script_takes_settings_of_prediction_and_times(tmp_path, capsys, monkeypatch):
    """From its command line on, without data: a stricter suppression leaves worse boxes."""
    detector = exported_detector("ssd, few layers")
    detector.save_final(tmp_path / "final", CATEGORIES, SIZE)
    words = [
        str(tmp_path / "final"),
        "--formats",
        "onnx",
        "fp16",
        "--top-k",
        "50",
        "--score-threshold",
        "0.25",
    ]
    words += [
        "--model.nms_threshold",
        "0.01",
        "--benchmark",
        "--out",
        str(tmp_path / "out"),
    ]
    monkeypatch.setattr(judge, "BENCHMARK_CASES", ((1, 1), (8, 2)))
    assert export.main(words) == 0
    assert "ms an image, batch 1, 1 thread | ms an image, batch 8, 2 threads" in capsys.readouterr().out
    run, about = open_exported(tmp_path / "out" / "model.onnx")
    assert (about.top_k, about.score_threshold) == (50, 0.25)
    images = images_of(1, 64, 64)
    with torch.no_grad():
        scores = make_graph(detector, 50)(images)[1]
    assert run(images.numpy())[1][0, -1] < scores[0, -1] - 1e-4
    for line in json.loads((tmp_path / "out" / "export.json").read_text())["files"]:
        assert len(line["milliseconds"]) == 2
        assert min(line["milliseconds"].values()) > 0
    assert export.main([*words, "--model.backbone", "x"]) == 2


@pytest.mark.slow
def test_openvino_takes_eight_bits(ssd, tmp_path):
    pytest.importorskip("openvino", reason="OpenVINO is not installed: pip install openvino nncf")
    pytest.importorskip("nncf", reason="nncf is not installed")
    about = open_exported(ssd / "model.onnx")[1]
    calibration = [images_of(1, 64, 64, seed=i).numpy() for i in range(4)]
    write_openvino(ssd / "model.onnx", tmp_path / "model.xml", about, calibration)
    run, read = open_exported(tmp_path / "model.xml")
    assert run(images_of(2, 64, 64).numpy())[0].shape == (2, 300, 4)
    assert read == about
