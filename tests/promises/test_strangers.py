"""Files of strangers: nothing in them runs, and what cannot be read is refused in one sentence."""

import csv
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import onnx
import pytest
import torch
import yaml
from PIL import Image
from places import ROOT, SUPPORT
from small_data import YOLO_ROW, yolo_folder

from scripts import predict, train_sgg
from scripts.train_faster_rcnn import Config
from toolkit.base import imports
from toolkit.base.errors import BadInput
from toolkit.base.files import read_yaml
from toolkit.data.formats import open_dataset
from toolkit.data.table import Category
from toolkit.models import build_detector, options_class
from toolkit.models.final import read_categories
from toolkit.models.weights.pretrained import open_pretrained
from toolkit.run.checkpoint_content import FORMAT_VERSION
from toolkit.run.command_line import parse_config
from toolkit.run.metrics_log import read_metrics
from toolkit.run.open_run import open_run, open_script
from toolkit.run.setting_types import format_value
from toolkit.run.settings_file import load_config_dict
from toolkit.tools.arguments import inference_flags
from toolkit.tools.doctor.program import data_settings
from toolkit.tools.export.exported_files import (
    METADATA_KEY,
    ExportMetadata,
    open_exported,
)
from toolkit.tools.predict.open import open_predictor, rebuild_detector
from toolkit.tools.predict.program import prediction_summary
from toolkit.tools.predict.uncertain import write_uncertain
from toolkit.tools.predictions_file import read_predictions
from toolkit.tools.replay.nan_report import load_report
from toolkit.tools.report.facts import run_facts

CLASS = "strangers_module:Detector"
DEEP = "[" * 100_000 + "]" * 100_000
DEEP_YAML = "data: " + "[" * 1200


# ---- code that a file names ------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nobody_is_trusted(monkeypatch):
    monkeypatch.setattr(imports, "_trusts_all", False)
    monkeypatch.setattr(imports, "_trusted_classes", set())


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """A file that is there once a stranger's code has run; `strangers_module.py` makes it when it is imported."""
    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w').close()\nfrom tests_own import Own as Detector\n"
    (tmp_path / "strangers_module.py").write_text(code)
    own = (SUPPORT / "fcos_detector.py").read_text().replace("class FCOS(", "class Own(")
    (tmp_path / "tests_own.py").write_text(own)
    (tmp_path / "photo.jpg").write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield marker
    for name in ("strangers_module", "tests_own"):
        sys.modules.pop(name, None)


BELOW = {
    "architecture": "scene_graph",
    "predicates": ["on"],
    "mode": "sgdet",
    "head": "motifs",
    "hidden_dim": 16,
    "embed_dim": 8,
    "detector_options": {"architecture": CLASS},
}


@pytest.mark.parametrize("model", [{"architecture": CLASS}, BELOW], ids=["detector", "below a scene graph"])
def test_a_class_that_a_file_names_is_not_imported(model, ran, tmp_path, capsys):
    final = tmp_path / "final"
    final.mkdir()
    (final / "config.json").write_text(json.dumps({"format": FORMAT_VERSION, "model": model, "processor_size": None}))
    (final / "categories.json").write_text(json.dumps([{"label": 0, "id": 1, "name": "a"}]))
    ways = [
        partial(open_predictor, final),
        partial(open_predictor, final, settings={"score_threshold": 0.1}),
        partial(open_pretrained, str(final)),
        partial(rebuild_detector, {"model": model}, ["a"]),
    ]
    for opening in ways:
        with pytest.raises(BadInput, match=f"{CLASS} is a class that a file names.*--trust"):
            opening()
    assert predict.main([str(final), "photo.jpg", "--out", "out"]) == 2
    assert CLASS in capsys.readouterr().err
    assert not ran.exists()


def test_a_class_that_a_file_names_is_imported_once_it_is_trusted(ran):
    imports.trust_files()
    detector = rebuild_detector({"model": {"architecture": CLASS}}, ["a"])
    assert type(detector).__name__ == "Own"
    assert ran.exists()


@pytest.mark.parametrize("argv", [["--model.architecture", CLASS], ["--config", "mine.yaml"]])
def test_a_class_is_imported_where_a_person_named_it(argv, ran, tmp_path):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"model": {"architecture": CLASS}}))
    assert parse_config(Config, argv).model.architecture == CLASS
    assert ran.exists()
    rebuild_detector({"model": {"architecture": CLASS}}, ["a"])


def test_a_class_below_a_scene_graph_that_a_person_named_needs_no_trust(ran):
    parse_config(train_sgg.Config, ["--model.detector_options", f"{{architecture: '{CLASS}'}}"])
    assert imports.may_import(CLASS)
    assert not ran.exists()


def test_a_class_that_the_program_imported_needs_no_trust(ran):
    importlib.import_module("strangers_module")
    assert type(build_detector(CLASS, class_names=["a"])).__name__ == "Own"


def test_detect_imports_nothing_from_the_current_folder(ran, tmp_path):
    """A package that is not installed must not be found there."""
    (tmp_path / "openvino.py").write_text((tmp_path / "strangers_module.py").read_text())
    (tmp_path / "model.xml").write_text("")
    hide = "import sys; sys.path[:] = [p for p in sys.path if p]; "
    hide += "from toolkit.tools import detect; sys.exit(detect.main())"
    command = [
        sys.executable,
        "-c",
        hide,
        "predict",
        "model.xml",
        "photo.jpg",
        "--out",
        "out",
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 2, done.stderr
    assert not ran.exists()


@pytest.mark.parametrize("opening", [open_predictor, open_pretrained])
def test_a_model_of_transformers_runs_no_module_of_its_own(opening, ran, tmp_path, monkeypatch):
    """Nor does it ask on standard input, where a list of images may be."""
    folder = tmp_path / "model"
    folder.mkdir()
    classes = {
        "AutoConfig": "strangers_module.C",
        "AutoModelForObjectDetection": "strangers_module.Detector",
        "AutoImageProcessor": "strangers_module.P",
    }
    shutil.copy(tmp_path / "strangers_module.py", folder)
    for name in ("config.json", "preprocessor_config.json"):
        (folder / name).write_text(json.dumps({"model_type": "strangers", "auto_map": classes}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(BadInput):
        opening(str(folder))
    assert not ran.exists()


def test_only_scripts_of_this_project_are_run_again_before_the_run_is_trusted(ran, tmp_path):
    script = tmp_path / "strangers_module.py"
    for path in (
        script,
        ROOT / "scripts" / ".." / script,
        ROOT / "scripts" / "predict.py",
    ):
        with pytest.raises(BadInput, match="none of this project's.*--trust"):
            open_script(
                {
                    "path": str(path),
                    "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                }
            )
    assert not ran.exists()
    own = {"path": str(ROOT / "scripts" / "train_detr.py"), "sha256": "another"}
    assert open_script(own)[0].__name__ == "replayed_train_detr"
    for nothing in (None, [], {}, {"path": 3}):
        assert open_script(nothing)[0] is None
    imports.trust_files()
    assert open_script({"path": str(script), "sha256": ""})[0] is not None
    assert ran.exists()


class Twice(torch.nn.Module):
    def forward(self, images):
        return images.float() * 2


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    batch = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    exported = torch.export.export(Twice(), (batch,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(exported, path)
    return path


def test_a_pt2_file_is_not_opened_before_it_is_trusted(program, ran, tmp_path, capsys):
    """The pickles in this one are harmless; torch evaluates the sizes that it names."""
    path = tmp_path / "model.pt2"
    code = f"__import__('pathlib').Path({str(ran)!r}).touch()"
    with zipfile.ZipFile(program) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("models/model.json"):
                content = re.sub(r'"expr_str": ?"[^"]*"', f'"expr_str": "{code}"', content.decode()).encode()
            new.writestr(name, content)
    assert predict.main([str(path), "photo.jpg", "--out", "out"]) == 2
    assert "add --trust" in capsys.readouterr().err
    assert not ran.exists()
    with pytest.raises(BadInput, match="cannot load it"):
        open_exported(path, trusted=True)
    assert ran.exists(), "else this is not the file that it is meant to be"


# ---- names that are shown --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["=1+1.png", "+x.png", "-x.png", "@x.png", "\t=x.png", "\udcff.png"])
def test_names_of_files_in_the_list_to_label_next_are_no_formulas(name, tmp_path):
    write_uncertain({Path(name): (0.5, 0.25)}, tmp_path / "uncertain.csv")
    with open(tmp_path / "uncertain.csv", newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert row["file"] == ("\ufffd.png" if name == "\udcff.png" else f"'{name}")
    assert float(row["uncertainty"]) == 0.75


def test_names_of_classes_act_on_no_console():
    detections = [{"category": "a\x1b[2J\n\u202eb"}]
    document = {
        "model": "m",
        "images": [{"detections": detections}],
        "score_threshold": 0.3,
        "errors": [],
    }
    said = prediction_summary(document, Path("found"))
    assert "\x1b" not in said
    assert "\u202e" not in said
    assert "1 a\\x1b[2J\\n\\u202eb" in said


# ---- files of models -------------------------------------------------------------------------------------------------

SSD = {
    "architecture": "ssd",
    "backbone": "lcnet_035",
    "strides": [4, -1],
    "channels": [16, 16],
    "aspect_ratios": [[2], [2]],
}


@pytest.fixture(scope="module")
def final(once) -> Path:
    def make(folder: Path) -> None:
        categories = [Category(1, "a"), Category(2, "b")]
        detector = build_detector(class_names=["a", "b"], **SSD)
        detector.save_final(folder / "final", categories, {"height": 64, "width": 64})

    return once("foreign_final", make) / "final"


def with_header(whole: bytes, **changes) -> bytes:
    """Return a file of safetensors whose header says something else of one of its weights."""
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    name = next(key for key in header if len(header[key].get("shape", [])) == 4)
    if changes.get("shape") == "turned":
        changes["shape"] = [1, *header[name]["shape"]]
    text = json.dumps(header | {name: header[name] | changes}).encode()
    return len(text).to_bytes(8, "little") + text + whole[8 + length :]


def test_a_header_of_safetensors_that_lies_is_one_sentence(final, tmp_path):
    shutil.copytree(final, tmp_path / "final")
    file = tmp_path / "final" / "model.safetensors"
    whole = file.read_bytes()
    assert open_predictor(tmp_path / "final").class_names == ["a", "b"]
    lies = {
        "longer than the file": (2**62).to_bytes(8, "little") + whole[8:],
        "cut off": whole[: len(whole) // 2],
        "not JSON": whole[:8] + b"x" + whole[9:],
        "shape": with_header(whole, shape=[2**40]),
        "type": with_header(whole, dtype="F4"),
        "turned": with_header(whole, shape="turned"),
    }
    for lie, content in lies.items():
        file.write_bytes(content)
        with pytest.raises(BadInput, match="model.safetensors: (not a safetensors|the weights are not)") as refused:
            open_predictor(tmp_path / "final")
        assert "\n" not in str(refused.value), lie
    file.unlink()
    with pytest.raises(BadInput, match="model.safetensors"):
        open_predictor(tmp_path / "final")


SIZES = (
    {"height": 8},
    {"height": 8, "width": "8"},
    {"shortest_edge": 0, "longest_edge": 9},
    [8, 8],
)
MODELS = ('{"architecture": ["ssd"]}', '{"architecture": "ssd", "strides": "x"}')
CONFIGS = [DEEP, "[]", "{", "\udcff", '{"format": 2}', '{"format": 2, "model": 3}']
CONFIGS += [f'{{"format": 2, "processor_size": null, "model": {model}}}' for model in MODELS]


def test_a_final_folder_with_another_config_is_one_sentence(final, tmp_path, capsys):
    shutil.copytree(final, tmp_path / "final")
    (tmp_path / "photo.jpg").write_bytes(b"")
    own = json.loads((final / "config.json").read_text())
    sized = [json.dumps(own | {"processor_size": size}) for size in SIZES]
    for text in CONFIGS + sized:
        (tmp_path / "final" / "config.json").write_bytes(os.fsencode(text))
        assert predict.main([f"{tmp_path}/final", f"{tmp_path}/photo.jpg", f"--out={tmp_path}/out"]) == 2
        assert capsys.readouterr().err.count("error: ") == 1


@pytest.mark.parametrize(
    "entry",
    [1, {"name": "a"}, {"id": 1}, {"id": 1, "name": 3}, {"id": [], "name": "a"}],
)
def test_categories_of_another_form_are_one_sentence(entry, tmp_path):
    (tmp_path / "categories.json").write_text(json.dumps([entry]))
    with pytest.raises(BadInput, match="categories.json: entry 0 is .*; expected an object with a name") as refused:
        read_categories(tmp_path / "categories.json")
    assert "\n" not in str(refused.value)


def test_a_pt2_file_that_is_cut_off_is_one_sentence(program, tmp_path, capfd):
    whole = program.read_bytes()
    imports.trust_files()
    path = tmp_path / "model.pt2"
    for size in (0, 100, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:size])
        with pytest.raises(BadInput, match="torch.export cannot load it: ."):
            open_exported(path)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("about", ['"max_detections": Infinity', '"score_threshold": 1' + "0" * 400])
def test_numbers_beyond_all_bounds_in_an_exported_file_are_one_sentence(about):
    text = f'{{"categories": [], "size": null, "score_threshold": 0.3, {about}}}'
    with pytest.raises(BadInput, match="model.onnx: it does not hold its classes and image size"):
        ExportMetadata.from_text(text, "model.onnx")


METADATA = {
    "architecture": "ssd",
    "categories": [{"id": 1, "name": "a"}],
    "size": {"height": 8, "width": 8},
    "sides": "fixed",
    "stride": 1,
    "score_threshold": 0.3,
    "top_k": 5,
    "source": "s",
}


def write_onnx(path: Path, of_input: str, outputs: tuple, metadata: str) -> None:
    """Write a model with our metadata that adds something up; outputs: whether each keeps its dimensions."""
    kind = onnx.TensorProto.FLOAT
    nodes = [onnx.helper.make_node("Cast", [of_input], ["x"], to=kind)]
    given = []
    for name, keeps in zip(("boxes", "scores", "labels"), outputs, strict=False):
        nodes.append(onnx.helper.make_node("ReduceMean", ["x"], [name], keepdims=keeps))
        given.append(onnx.helper.make_tensor_value_info(name, kind, None))
    image = onnx.helper.make_tensor_value_info(of_input, onnx.TensorProto.UINT8, ["b", 3, "h", "w"])
    graph = onnx.helper.make_graph(nodes, "g", [image], given)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    model.metadata_props.add(key=METADATA_KEY, value=metadata)
    onnx.save(model, path)


@pytest.mark.parametrize(
    ("of_input", "outputs", "changes", "said"),
    [
        ("pixels", (1, 1, 1), {}, "does not run on images uint8 .1, 3, 8, 8.: "),
        ("images", (1,), {}, "does not run on images"),
        ("images", (1, 0, 0), {}, "gives boxes .1, 1, 1, 1., scores"),
        (
            "images",
            (1, 1, 1),
            {"size": {"height": 10**9, "width": 1}},
            "does not hold its classes and image size",
        ),
        (
            "images",
            (1, 1, 1),
            {"size": {"height": 8}},
            "does not hold its classes and image size",
        ),
        ("images", (1, 1, 1), {"categories": [3]}, "does not hold its classes"),
        ("images", (1, 1, 1), None, "does not hold its classes"),
    ],
)
def test_an_onnx_file_with_our_metadata_and_another_graph_is_one_sentence(
    tmp_path, capsys, of_input, outputs, changes, said
):
    Image.new("RGB", (40, 30)).save(tmp_path / "photo.png")
    metadata = DEEP if changes is None else json.dumps(METADATA | changes)
    write_onnx(tmp_path / "model.onnx", of_input, outputs, metadata)
    assert predict.main([f"{tmp_path}/model.onnx", f"{tmp_path}/photo.png", f"--out={tmp_path}/out"]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error)
    assert "Traceback" not in error


# ---- settings, rows and reports --------------------------------------------------------------------------------------

ODD_YAML = {
    "digits": "9" * 5000,
    "day": "2001-99-99",
    "int": "!!int x",
    "float": "!!float x",
    "bool": "!!bool x",
    "time": "!!timestamp x",
    "key": "{[]: 1}",
}


@pytest.mark.parametrize("value", ODD_YAML.values(), ids=ODD_YAML)
def test_values_that_yaml_lets_through_are_sentences(tmp_path, value):
    file = tmp_path / "other.yaml"
    file.write_text(f"data: {value}\n")
    with pytest.raises(BadInput, match="other.yaml: cannot be read as YAML"):
        read_yaml(file, str(file))
    with pytest.raises(BadInput, match="expected a settings file of training"):
        data_settings(str(file), "train_ssd")
    with pytest.raises(
        BadInput,
        match="--model.nms_threshold .*: cannot be read as a value of a setting",
    ):
        inference_flags(["--model.nms_threshold", value])
    folder = yolo_folder(tmp_path / "data", {"a": YOLO_ROW}, f"names: [a]\ntrain: images\nnc: {value}\n")
    with pytest.raises(BadInput, match="data.yaml: cannot be read as YAML"):
        open_dataset("train", path=folder, cache_dir=tmp_path / "cache")


def test_a_number_of_thousands_of_digits_is_refused_and_shown(tmp_path):
    (tmp_path / "settings.yaml").write_text(f"optim: {{lr: 0x{'f' * 5000}}}")
    with pytest.raises(
        BadInput,
        match=r"optim.lr is a number of thousands of digits.*; expected a number",
    ):
        parse_config(Config, ["--config", str(tmp_path / "settings.yaml")])
    assert format_value([10**5000]).startswith("a number of thousands of digits")


@pytest.mark.parametrize("content", [b"model: {name: \xff}\n", DEEP_YAML.encode()], ids=["encoding", "deep"])
def test_settings_that_cannot_be_read_are_one_sentence(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    ways = [
        partial(open_run, tmp_path, options_class),
        partial(run_facts, tmp_path),
        partial(parse_config, Config, ["--config", str(tmp_path / "config.yaml")]),
    ]
    for reading in ways:
        with pytest.raises(BadInput, match="config.yaml: cannot be read"):
            reading()


def test_json_that_is_nested_too_deeply_is_one_sentence(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + DEEP + "\n")
    with pytest.raises(BadInput, match="line 2: not a row of metrics"):
        read_metrics(tmp_path / "metrics.jsonl")
    (tmp_path / "config.yaml").write_text("model: {architecture: ssd}\n")
    (tmp_path / "pretrained_config.json").write_text(DEEP)
    with pytest.raises(BadInput, match="pretrained_config.json: cannot be read"):
        load_config_dict(tmp_path / "config.yaml", options_class)
    (tmp_path / "results.json").write_text(DEEP)
    with pytest.raises(BadInput, match="not a COCO results file"):
        read_predictions(tmp_path / "results.json", None)


def test_a_report_of_other_files_is_one_sentence(tmp_path):
    for name in ("report.json", "batch_0.safetensors", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(BadInput, match="the report cannot be read"):
        load_report(tmp_path)
