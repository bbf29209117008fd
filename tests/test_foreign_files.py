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
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import yaml
from PIL import Image
from places import ROOT, SUPPORT

from scripts import predict, train_sgg
from scripts.train_faster_rcnn import Config
from toolkit.base import imports
from toolkit.base.boxes import Boxes
from toolkit.base.errors import BadInput
from toolkit.data.annotations import ImageRow
from toolkit.data.formats import open_dataset
from toolkit.data.table import Category, LabelledImages
from toolkit.models import build_detector, options_class
from toolkit.models.final import read_categories
from toolkit.models.weights.pretrained import open_pretrained
from toolkit.run.checkpoint_content import FORMAT_VERSION
from toolkit.run.command_line import parse_config
from toolkit.run.metrics_log import read_metrics
from toolkit.run.open_run import open_run, open_script
from toolkit.run.settings_file import load_config_dict
from toolkit.tools.export.exported_files import METADATA_KEY, ExportMetadata, open_exported
from toolkit.tools.predict.open import open_predictor, rebuild_detector
from toolkit.tools.predict.program import prediction_summary
from toolkit.tools.predict.uncertain import write_uncertain
from toolkit.tools.predictions_file import read_predictions
from toolkit.tools.replay.nan_report import load_report
from toolkit.tools.report.facts import run_facts
from toolkit.tools.writers import write_csv

CLASS = "strangers_module:Detector"


@pytest.fixture(autouse=True)
def nobody_is_trusted(monkeypatch):
    monkeypatch.setattr(imports, "_trusts_all", False)
    monkeypatch.setattr(imports, "_trusted_classes", set())


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """A file that is there once a stranger's code has run; `strangers_module.py` makes it when it is imported."""
    marker = tmp_path / "ran"
    (tmp_path / "strangers_module.py").write_text(
        f"open({str(marker)!r}, 'w').close()\nfrom tests_own import Own as Detector\n"
    )
    own = (SUPPORT / "fcos_detector.py").read_text().replace("class FCOS(", "class Own(")
    (tmp_path / "tests_own.py").write_text(own)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield marker
    for name in ("strangers_module", "tests_own"):
        sys.modules.pop(name, None)


BELOW = {"architecture": "scene_graph", "predicates": ["on"], "mode": "sgdet", "head": "motifs", "hidden_dim": 16,
         "embed_dim": 8, "detector_options": {"architecture": CLASS}}  # fmt: skip


@pytest.mark.parametrize("model", [{"architecture": CLASS}, BELOW], ids=["detector", "below a scene graph"])
def test_a_class_that_a_file_names_is_not_imported(model, ran, tmp_path, capsys):
    final = tmp_path / "final"
    final.mkdir()
    (final / "config.json").write_text(json.dumps({"format": FORMAT_VERSION, "model": model, "processor_size": None}))
    (final / "categories.json").write_text(json.dumps([{"label": 0, "id": 1, "name": "a"}]))
    for opened in (lambda: open_predictor(final), lambda: open_predictor(final, settings={"score_threshold": 0.1}),
                   lambda: open_pretrained(str(final)), lambda: rebuild_detector({"model": model}, ["a"])):  # fmt: skip
        with pytest.raises(BadInput, match=f"{CLASS} is a class that a file names.*--trust"):
            opened()
    (tmp_path / "photo.jpg").write_bytes(b"")
    assert predict.main([str(final), "photo.jpg", "--out", "out"]) == 2
    assert CLASS in capsys.readouterr().err and not ran.exists()
    imports.trust_files()
    assert type(rebuild_detector({"model": {"architecture": CLASS}}, ["a"])).__name__ == "Own" and ran.exists()


@pytest.mark.parametrize("argv", [["--model.architecture", CLASS], ["--config", "mine.yaml"]])
def test_a_class_is_imported_where_a_person_named_it(argv, ran, tmp_path):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"model": {"architecture": CLASS}}))
    assert parse_config(Config, argv).model.architecture == CLASS and ran.exists()
    rebuild_detector({"model": {"architecture": CLASS}}, ["a"])


def test_a_class_below_a_scene_graph_that_a_person_named_or_that_the_program_imported_needs_no_trust(ran):
    parse_config(train_sgg.Config, ["--model.detector_options", f"{{architecture: '{CLASS}'}}"])
    assert imports.may_import(CLASS) and not ran.exists()
    imports._trusted_classes.clear()
    importlib.import_module("strangers_module")
    assert type(build_detector(CLASS, class_names=["a"])).__name__ == "Own"


def test_detect_imports_nothing_from_the_current_folder(ran, tmp_path):
    """A package that is not installed must not be found there."""
    (tmp_path / "openvino.py").write_text((tmp_path / "strangers_module.py").read_text())
    (tmp_path / "model.xml").write_text("")
    (tmp_path / "photo.jpg").write_bytes(b"")
    hide = "import sys; sys.path[:] = [p for p in sys.path if p]; "
    hide += "from toolkit.tools import detect; sys.exit(detect.main())"
    command = [sys.executable, "-c", hide, "predict", "model.xml", "photo.jpg", "--out", "out"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 2 and not ran.exists(), done.stderr


def test_a_model_of_transformers_runs_no_module_of_its_own(ran, tmp_path, monkeypatch):
    """Nor does it ask on standard input, where a list of images may be."""
    folder = tmp_path / "model"
    folder.mkdir()
    classes = {"AutoConfig": "strangers_module.C", "AutoModelForObjectDetection": "strangers_module.Detector",
               "AutoImageProcessor": "strangers_module.P"}  # fmt: skip
    (folder / "strangers_module.py").write_text((tmp_path / "strangers_module.py").read_text())
    for name in ("config.json", "preprocessor_config.json"):
        (folder / name).write_text(json.dumps({"model_type": "strangers", "auto_map": classes}))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(BadInput):
        open_predictor(folder)
    with pytest.raises(BadInput):
        open_pretrained(str(folder))
    assert not ran.exists()


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
    with zipfile.ZipFile(program) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            text = old.read(name)
            if name.endswith("models/model.json"):
                code = f"__import__('pathlib').Path({str(ran)!r}).touch()"
                text = re.sub(r'"expr_str": ?"[^"]*"', f'"expr_str": "{code}"', text.decode()).encode()
            new.writestr(name, text)
    (tmp_path / "photo.jpg").write_bytes(b"")
    assert predict.main([str(path), "photo.jpg", "--out", "out"]) == 2
    assert "add --trust" in capsys.readouterr().err and not ran.exists()
    with pytest.raises(BadInput, match="cannot load it"):
        open_exported(path, trusted=True)
    assert ran.exists(), "else this is not the file that it is meant to be"


def test_a_pt2_file_that_is_cut_off_is_one_sentence(program, tmp_path, capfd):
    whole = program.read_bytes()
    imports.trust_files()
    for size in (0, 100, len(whole) // 2, len(whole) - 10):
        path = tmp_path / "model.pt2"
        path.write_bytes(whole[:size])
        with pytest.raises(BadInput, match="torch.export cannot load it: ."):
            open_exported(path)
    assert "Traceback" not in capfd.readouterr().err


def test_only_scripts_of_this_project_are_run_again_before_the_run_is_trusted(ran, tmp_path):
    script = tmp_path / "strangers_module.py"
    own = ROOT / "scripts" / "train_detr.py"
    for path in (script, ROOT / "scripts" / ".." / script, ROOT / "scripts" / "predict.py"):
        with pytest.raises(BadInput, match="none of this project's.*--trust"):
            open_script({"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    assert not ran.exists()
    assert open_script({"path": str(own), "sha256": "another"})[0].__name__ == "replayed_train_detr"
    for nothing in (None, [], {}, {"path": 3}):
        assert open_script(nothing)[0] is None
    imports.trust_files()
    assert open_script({"path": str(script), "sha256": ""})[0] is not None and ran.exists()

NAMES = ["=1+1", "'=1+1", "+x", "-x", "@SUM(A1)", "'it'", "it's", "''", "plain", "a,b", 'say "=x"', "＝1", "=it'"]


@pytest.mark.parametrize("names", [NAMES, ["'-'"]], ids=len)
def test_names_in_a_csv_file_are_no_formulas_and_come_back(names, tmp_path):
    names = sorted(names)
    count = len(names)
    boxes = Boxes.found([count], np.array([[1, 2, 30, 20]] * count), np.full(count, 0.5), np.arange(count))
    categories = [Category(number, name) for number, name in enumerate(names, start=1)]
    write_csv(LabelledImages([ImageRow(1, "=photo.png", 40, 30)], boxes, categories), tmp_path / "predictions.csv")
    with open(tmp_path / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert not [row for row in rows for key in ("image", "label") if row[key][0] in "=+-@＝"]
    Image.new("RGB", (40, 30)).save(tmp_path / "=photo.png")
    table = open_dataset("train", path=tmp_path / "predictions.csv", format="csv", cache_dir=tmp_path / "cache")
    assert table.class_names == names and table.row(0)["file_name"] == "=photo.png"
    assert table.row(0)["objects"]["category"].tolist() == list(range(count))


@pytest.mark.parametrize("name", ["=1+1.png", "+x.png", "-x.png", "@x.png", "\t=x.png", "\udcff.png"])
def test_names_of_files_in_the_list_to_label_next_are_no_formulas(name, tmp_path):
    write_uncertain({Path(name): (0.5, 0.25)}, tmp_path / "uncertain.csv")
    with open(tmp_path / "uncertain.csv", newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert row["file"] == ("\ufffd.png" if name == "\udcff.png" else f"'{name}")
    assert float(row["uncertainty"]) == 0.75


def test_names_of_classes_act_on_no_console():
    document = {"model": "m", "images": [{"detections": [{"category": "a\x1b[2J\n\u202eb"}]}], "score_threshold": 0.3,
                "errors": []}  # fmt: skip
    said = prediction_summary(document, Path("found"))
    assert "\x1b" not in said and "\u202e" not in said and "1 a\\x1b[2J\\n\\u202eb" in said

DEEP = "[" * 100_000 + "]" * 100_000
SSD = {"architecture": "ssd", "backbone": "lcnet_035", "strides": [4, -1], "channels": [16, 16],
       "aspect_ratios": [[2], [2]]}  # fmt: skip


@pytest.fixture(scope="module")
def final(once) -> Path:
    def make(folder: Path) -> None:
        build_detector(class_names=["a", "b"], **SSD).save_final(
            folder / "final", [Category(1, "a"), Category(2, "b")], {"height": 64, "width": 64}
        )

    return once("foreign_final", make) / "final"


def with_header(file: Path, changes) -> bytes:
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    name = next(key for key in header if len(header[key].get("shape", [])) == 4)
    text = json.dumps(header | {name: header[name] | changes(header[name])}).encode()
    return len(text).to_bytes(8, "little") + text + whole[8 + length :]


def test_a_header_of_safetensors_that_lies_is_one_sentence(final, tmp_path):
    shutil.copytree(final, tmp_path / "final")
    file = tmp_path / "final" / "model.safetensors"
    whole = file.read_bytes()
    assert open_predictor(tmp_path / "final").class_names == ["a", "b"]
    lies = {
        "longer than the file": (2**62).to_bytes(8, "little") + whole[8:], "cut off": whole[: len(whole) // 2],
        "no JSON": whole[:8] + b"x" + whole[9:],
        "shape": with_header(final / file.name, lambda entry: {"shape": [2**40]}),
        "type": with_header(final / file.name, lambda entry: {"dtype": "F4"}),
        "turned": with_header(final / file.name, lambda entry: {"shape": [1, *entry["shape"]]}),
    }  # fmt: skip
    for lie, content in lies.items():
        file.write_bytes(content)
        with pytest.raises(BadInput, match="model.safetensors: (not a safetensors|the weights are not)") as refused:
            open_predictor(tmp_path / "final")
        assert "\n" not in str(refused.value), lie
    file.unlink()
    with pytest.raises(BadInput, match="model.safetensors"):
        open_predictor(tmp_path / "final")


CONFIGS = (DEEP, "[]", "{", b"\xff\xfe", '{"format": 2}', '{"format": 2, "model": 3}',
           *(f'{{"format": 2, "processor_size": null, "model": {model}}}' for model in (
               '{"architecture": ["ssd"]}', '{"architecture": "ssd", "strides": "x"}')))  # fmt: skip


def test_a_final_folder_with_another_config_is_one_sentence(final, tmp_path, capsys):
    shutil.copytree(final, tmp_path / "final")
    (tmp_path / "photo.jpg").write_bytes(b"")
    own = json.loads((final / "config.json").read_text())
    sizes = ({"height": 8}, {"height": 8, "width": "8"}, {"shortest_edge": 0, "longest_edge": 9}, [8, 8])
    for text in (*CONFIGS, *(json.dumps(own | {"processor_size": size}) for size in sizes)):
        (tmp_path / "final" / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        assert predict.main([f"{tmp_path}/final", f"{tmp_path}/photo.jpg", f"--out={tmp_path}/out"]) == 2
        assert capsys.readouterr().err.count("error: ") == 1


@pytest.mark.parametrize("entry", [1, {"name": "a"}, {"id": 1}, {"id": 1, "name": 3}, {"id": [], "name": "a"}])
def test_categories_of_another_form_are_one_sentence(entry, tmp_path):
    (tmp_path / "categories.json").write_text(json.dumps([entry]))
    with pytest.raises(BadInput, match="categories.json: entry 0 is .*; expected an object with a name") as refused:
        read_categories(tmp_path / "categories.json")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("about", ['"max_detections": Infinity', '"score_threshold": 1' + "0" * 400])
def test_numbers_beyond_all_bounds_in_an_exported_file_are_one_sentence(about):
    text = f'{{"categories": [], "size": null, "score_threshold": 0.3, {about}}}'
    with pytest.raises(BadInput, match="model.onnx: it does not say what its classes and sizes are"):
        ExportMetadata.from_text(text, "model.onnx")


def onnx_file(path: Path, of_input: str = "images", outputs=(4,), about: dict | None = None) -> Path:
    """A model with our metadata that adds something up."""
    float_, image = onnx.TensorProto.FLOAT, onnx.TensorProto.UINT8
    nodes, given = [onnx.helper.make_node("Cast", [of_input], ["x"], to=float_)], []
    for name, size in zip(("boxes", "scores", "labels"), outputs, strict=False):
        nodes.append(onnx.helper.make_node("ReduceMean", ["x"], [name], keepdims=size))
        given.append(onnx.helper.make_tensor_value_info(name, float_, None))
    graph = onnx.helper.make_graph(
        nodes, "g", [onnx.helper.make_tensor_value_info(of_input, image, ["b", 3, "h", "w"])], given
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    entries = {"architecture": "ssd", "categories": [{"id": 1, "name": "a"}], "size": {"height": 8, "width": 8},
               "sides": "fixed", "stride": 1, "score_threshold": 0.3, "top_k": 5, "source": "s"}  # fmt: skip
    text = DEEP if about is None else json.dumps(entries | about)
    model.metadata_props.add(key=METADATA_KEY, value=text)
    onnx.save(model, path)
    return path


def test_an_onnx_file_with_our_metadata_and_another_graph_is_one_sentence(tmp_path, capsys):
    Image.new("RGB", (40, 30)).save(tmp_path / "photo.png")
    path = tmp_path / "model.onnx"
    for of_input, outputs, about, said in (
        ("pixels", (1, 1, 1), {}, "does not run on images uint8 .1, 3, 8, 8.: "),
        ("images", (1,), {}, "does not run on images"), ("images", (1, 0, 0), {}, "gives boxes .1, 1, 1, 1., scores"),
        ("images", (1, 1, 1), {"size": {"height": 10**9, "width": 1}}, "does not say what its classes and sizes are"),
        ("images", (1, 1, 1), {"size": {"height": 8}}, "does not say what its classes and sizes are"),
        ("images", (1, 1, 1), {"categories": [3]}, "does not say what"), ("images", (1, 1, 1), None, "does not say"),
    ):  # fmt: skip
        onnx_file(path, of_input, outputs, about)
        assert predict.main([str(path), str(tmp_path / "photo.png"), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert re.search(said, error) and "Traceback" not in error, error
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_rows_settings_predictions_and_reports_nested_too_deeply_or_no_utf8_are_one_sentence(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + DEEP + "\n")
    with pytest.raises(BadInput, match="line 2: not a row of metrics"):
        read_metrics(tmp_path / "metrics.jsonl")
    for content in (b"model: {name: \xff}\n", DEEP.encode()):
        (tmp_path / "config.yaml").write_bytes(content)
        with pytest.raises(BadInput, match="config.yaml: cannot be read"):
            open_run(tmp_path, options_class)
        with pytest.raises(BadInput, match="config.yaml: cannot be read"):
            run_facts(tmp_path)
        with pytest.raises(BadInput, match="config.yaml: cannot be read as YAML"):
            parse_config(Config, ["--config", str(tmp_path / "config.yaml")])
    (tmp_path / "config.yaml").write_text("model: {architecture: ssd}\n")
    (tmp_path / "pretrained_config.json").write_text(DEEP)
    with pytest.raises(BadInput, match="pretrained_config.json: cannot be read"):
        load_config_dict(tmp_path / "config.yaml", options_class)
    (tmp_path / "results.json").write_text(DEEP)
    with pytest.raises(BadInput, match="not a COCO results file"):
        read_predictions(tmp_path / "results.json", None)
    for name in ("report.json", "batch_0.safetensors", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(BadInput, match="the report cannot be read"):
        load_report(tmp_path)
