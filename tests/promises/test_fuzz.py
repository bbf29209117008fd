"""Each kind of file that the toolkit reads, changed at random: read rightly or refused in sentences.

    python -m pytest -m slow -s tests/promises/test_fuzz.py

Never a traceback, code of the file, a file written outside its folder, or 2 GB of memory. Each change is a function of
its number: `change(path, random.Random(f"{kind} {number}"))`.
"""

import copy
import csv
import json
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from traceback import extract_tb

import datasets
import numpy as np
import pytest
import timm
import torch
import yaml
from audit import written
from dirty_sets import build, sets_in
from documents import row_of
from launching import CPU, ROOT
from PIL import Image
from visual_genome_writer import write_visual_genome

from scripts.train_ssd import Config
from toolkit.base import imports
from toolkit.base.batch import Batch
from toolkit.base.errors import BadInput, explain_error
from toolkit.data.decoding import ImageError, decode_image
from toolkit.data.formats import open_dataset
from toolkit.data.table import Category
from toolkit.data.table_cache import write_rows
from toolkit.evaluation.predictions import write_predictions
from toolkit.models import options_class
from toolkit.models.weights.backbone_file import timm_model_from_file
from toolkit.models.weights.pretrained import open_pretrained
from toolkit.run.command_line import parse_config
from toolkit.run.open_run import open_run
from toolkit.tools.predict.image_files import given_boxes, image_ids_of
from toolkit.tools.predict.open import open_predictor, report_thresholds
from toolkit.tools.predict.video import Video, VideoWriter
from toolkit.tools.predictions_file import read_predictions
from toolkit.tools.replay.diagnosis import diagnose
from toolkit.tools.replay.nan_report import load_named_state, load_report, write_nan_report
from toolkit.tools.report.facts import run_facts
from toolkit.tools.sweeps.sweep_file import read_sweep
from toolkit.tools.writers import write_folder

resource = pytest.importorskip("resource", reason="limits of the kernel: not on Windows")

pytestmark = pytest.mark.slow
CLASSES, PREDICATES = ("cup", "table"), ("on", "near")
ODD = [None, True, -1, 0, 3, 10**9, 2**63, 10**400, 1e308, -0.5, float("nan"), float("inf"), "", "x", "x" * 5000, "3",
       "NaN", "1e400", "../../../outside", "/etc/passwd", "strangers_module:Detector", "=1+1", "\ud800", "\x00", "a\nb",
       [], {}, [[]], [1, 2, 3, 4], {"id": 1}, ["cup"], {"a": {"b": []}}]  # fmt: skip
ODD_TEXTS = ["", "-1", "0", "nan", "inf", "1e400", "9" * 400, "x", "x" * 5000, "../../outside", "/etc/passwd", "=1+1",
             "\x00", "é", '"', "<", "&a;", ","]  # fmt: skip

# Python reads no whole number of more than 4,300 digits, and raises a ValueError that is not one of the parser.
ODD_NUMBERS = ["9" * 5000, "-" + "9" * 5000, "9" * 5000 + ".5", "1e" + "9" * 5000, "0x" + "f" * 5000,
               "0b" + "1" * 20000, "2001-99-99", "2001-01-01T99:99:99", "!!int x", "!!timestamp x", "!!float x",
               "1:99:99", "١٢", "1_000", "[" * 3000, "{" * 3000, '"' + "x" * 200_000 + '"', "x" * 200_000]  # fmt: skip
ODD_ENCODINGS = "klingon utf-16 utf-32 utf-7 idna rot13 hex shift_jis undefined".split() + ["", "x" * 500]


SWEEP = """
program: scripts/train_ssd.py
method: random
metric: {name: val/AP, goal: maximize}
run_cap: 3
parameters:
  optim.lr: {min: 1.0e-4, max: 1.0e-2, distribution: log_uniform_values}
  run.seed: {values: [1, 2]}
early_terminate: {type: hyperband, min_iter: 2}
"""
SETTINGS = """
model: {architecture: ssd, backbone: lcnet_035, strides: [4, -1], channels: [16, 16], score_threshold: 0.1}
optim: {lr: 0.01, name: sgd}
data: {scales: [64, 96], path: d}
run: {epochs: 3, eval_every: 2 epochs}
"""


def small_table(folder: Path):
    """Four images: boxes with relations, one box, none, one of the whole image."""
    rows = []
    images = [[[5, 5, 25, 30], [10, 8, 60, 40]], [[0, 0, 12, 9]], [], [[0, 0, 64, 48]]]
    for number, boxes in enumerate(images, start=1):
        Image.new("RGB", (64, 48), (60 * number, 90, 30)).save(folder / f"{number}.jpg")
        area = [(right - x) * (bottom - y) for x, y, right, bottom in boxes]
        related = [(0, 1, 1)] if number == 1 else ()
        counted = range(10 * number, 10 * number + len(boxes))
        row = row_of(number, boxes, (64, 48), [k % 2 for k in counted], related, id=list(counted), area=area)
        rows.append(row | {"file_name": f"{number}.jpg"})
    return write_rows(rows, cache_file=folder / "table.json", image_root=folder, name="small", predicates=PREDICATES,
                      categories=[Category(k + 1, name) for k, name in enumerate(CLASSES)])  # fmt: skip


def make_data(folder: Path) -> None:
    (folder / "source").mkdir()
    table = small_table(folder / "source")
    for format in ("coco", "voc", "yolo", "csv"):
        write_folder(table, folder / format, "train", format)
    for tool in ("labelme", "via", "cvat", "label_studio", "supervisely"):
        files, _ = sets_in(tool)[0].values[0]
        build(files, folder / tool)
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for image in sorted((folder / "source").glob("*.jpg")):
            archive.write(image, image.name)
    hub = datasets.Dataset.from_dict({
        "image_id": [1, 2], "width": [64, 64], "height": [48, 48],
        "image": [{"bytes": (folder / "source" / f"{i}.jpg").read_bytes(), "path": None} for i in (1, 2)],
        "objects": [{"bbox": [[1.0, 2.0, 3.0, 4.0]], "category": [k]} for k in (0, 1)]})  # fmt: skip
    hub = hub.cast_column("image", datasets.Image())
    (folder / "hub" / "data").mkdir(parents=True)
    hub.to_parquet(folder / "hub" / "data" / "train-00000-of-00001.parquet")
    write_visual_genome([(table, 0), (table, 2)], folder / "vg")
    images = folder / "graphs" / "images"
    shutil.copytree(folder / "source", images)
    cup, desk = {"category": 1, "bbox": [5, 15, 10, 30]}, {"category": 0, "bbox": [10, 40, 0, 60]}
    files = {
        "annotations_test.json": {"1.jpg": [{"predicate": 1, "subject": cup, "object": desk}]},
        "objects.json": ["table", "cup"], "predicates.json": ["under", "on"],
        "val_sceneGraphs.json": (gqa := {"1": {"width": 64, "height": 48, "objects": {
            "7": {"name": "cup", "x": 1, "y": 2, "w": 3, "h": 4, "relations": [{"name": "on", "object": "8"}]},
            "8": {"name": "table", "x": 0, "y": 0, "w": 60, "h": 30, "relations": []}}}}),
        "train_sceneGraphs.json": gqa,
        "vrd-test-anno.json": [{"img_fn": "1", "img_size": [64, 48], "bbox": [[1, 2, 11, 12], [20, 20, 50, 40]],
                                "det_labels": [1, 0], "rel": [[0, 1, 1]]}],
        "categories_dict.json": {"obj": ["Chair", "Man"], "rel": ["at", "on"]},
        "psg.json": {"data": [{"image_id": 1, "file_name": "1.jpg", "width": 64, "height": 48,
                               "annotations": [{"bbox": [1, 2, 11, 12], "category_id": 0},
                                               {"bbox": [20, 20, 50, 40], "category_id": 1}],
                               "segments_info": [], "relations": [[0, 1, 0]]}],
                     "thing_classes": ["cup"], "stuff_classes": ["table"], "predicate_classes": ["on", "near"],
                     "test_image_ids": [1]},
    }  # fmt: skip
    for name, content in files.items():
        (folder / "graphs" / name).write_text(json.dumps(content))
    box = {"boxes": torch.tensor([[1.0, 2, 30, 20]]), "scores": torch.tensor([0.5]), "labels": torch.tensor([1])}
    write_predictions(folder / "predictions.json", dict.fromkeys(table.image_ids().tolist(), box), table)


def make_runs(folder: Path) -> None:
    """A run of two steps with its evaluation, its ONNX file, and what a person writes for the programs."""

    def program(name: str, *words) -> None:
        command = [sys.executable, ROOT / "scripts" / name, *words]
        subprocess.run([str(word) for word in command], check=True, capture_output=True, env=os.environ | CPU)

    small = "--run.name run --run.max_steps 2 --data.format shapes --data.image_size 64 --data.workers 0"
    small += " --data.batch_size_per_device 2 --data.max_train_images 8 --eval.pictures 0"
    config = ROOT / "tests/assets/configs/train_ssd.yaml"
    program("train_ssd.py", "--config", config, "--run.output_dir", folder, *small.split())
    program("export.py", folder / "run", "--out", folder / "exported", "--format", "onnx")
    torch.save(timm.create_model("lcnet_035").state_dict(), folder / "weights.pth")
    images = Batch(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.tensor([[8, 8]]), [
        {"image_id": 1, "boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}])  # fmt: skip
    report = {"step": 3, "rank": 0, "reason": "loss is nan", "policy": "stop", "image_ids": [[1]], "batch": [],
              "losses": {"loss": float("nan")}, "lr": {"main": 0.1}}  # fmt: skip
    report |= diagnose(torch.nn.Linear(1, 1), lambda: [report["losses"]])
    write_nan_report(folder, report, [images], {"a": torch.ones(2)})
    (folder / "sweep.yaml").write_text(SWEEP)
    (folder / "settings.yaml").write_text(SETTINGS)
    (folder / "report").mkdir(exist_ok=True)
    thresholds = {"threshold": 0.4, "thresholds": {"cup": 0.3, "table": 0.5}}
    (folder / "report" / "report.json").write_text(json.dumps(thresholds))
    film = VideoWriter(folder / "film.mp4", Fraction(25))
    for value in range(5):
        film.add(np.full((48, 64, 3), 40 * value, np.uint8))
    film.close()


def change_bytes(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 3, 30))):
        at, size = draw.randrange(len(data) + 1), draw.choice((1, 4, 100, len(data) // 2 + 1))
        kind = draw.randrange(6)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            del data[at : at + size]
        elif kind == 2:
            data[at:at] = data[at : at + size]
        elif kind == 3:
            data[at:at] = draw.randbytes(min(size, 1000))
        elif kind == 4:
            data[at : at + 8] = draw.choice((b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7))
        else:
            data[at : at + 1] = draw.randbytes(1)
    path.write_bytes(data)


def change_tree(tree, draw: random.Random):
    """One place of nested lists and dicts replaced, removed, doubled or renamed."""
    tree, places = copy.deepcopy(tree), []

    def walk(node):
        for key in list(node if isinstance(node, dict) else range(len(node))):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    if isinstance(tree, dict | list):
        walk(tree)
    if not places or draw.random() < 0.05:
        return draw.choice(ODD)
    node, key = draw.choice(places)
    kind = draw.randrange(8)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, list):
        node.append(copy.deepcopy(node[key]))
    elif kind == 1:
        node[f"{key}x"] = node.pop(key)
    elif kind == 2:
        other, at = draw.choice(places)
        node[key] = copy.deepcopy(other[at]) if at in other or isinstance(other, list) else None
    elif kind == 3:
        for _ in range(draw.choice((3, 2000))):
            node[key] = [node[key]]
    else:
        node[key] = draw.choice(ODD)
    return tree


def change_text_tree(path: Path, draw: random.Random) -> None:
    text = path.read_text()
    if path.suffix == ".yaml":
        tree = change_tree(yaml.safe_load(text), draw)
        written = text + "\nx: !!python/object/apply:os.system ['touch ran']\n"
        if draw.random() < 0.9:
            written = _json_of(tree) if _is_deep(tree) else yaml.dump(tree)
    elif path.suffix == ".jsonl":
        lines = text.splitlines()
        at = draw.randrange(len(lines))
        lines[at] = _json_of(change_tree(json.loads(lines[at]), draw))
        written = "\n".join(lines) + "\n"
    else:
        written = _json_of(change_tree(json.loads(text), draw))
    path.write_text(written, errors="surrogatepass")


def _is_deep(tree, level: int = 0) -> bool:
    below = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return level > 50 or any(_is_deep(each, level + 1) for each in below)


def _json_of(tree) -> str:
    try:
        return json.dumps(tree)
    except RecursionError:
        return "[" * 5000 + "]" * 5000


def change_words(path: Path, draw: random.Random) -> None:
    """One word of a text, between blanks, commas or tags."""
    text = path.read_text()
    cuts = [i for i, letter in enumerate(text) if letter in " ,\n<>:\t"]
    at = draw.randrange(len(cuts) - 1)
    path.write_text(text[: cuts[at] + 1] + draw.choice(ODD_TEXTS) + text[cuts[at + 1] :])


def change_number(path: Path, draw: random.Random) -> None:
    """One number of a text; or of XML and YAML what else their parsers refuse by errors that are not their own."""
    text = path.read_text(errors="surrogateescape")
    if path.suffix == ".xml" and draw.random() < 0.4:
        text = f"<?xml version='1.0' encoding='{draw.choice(ODD_ENCODINGS)}'?>{text}"
    else:
        number = draw.choice(list(re.finditer(r"-?\d+(\.\d+)?", text)))
        text = text[: number.start()] + draw.choice(ODD_NUMBERS) + text[number.end() :]
    path.write_text(text, errors="surrogateescape")


def change_rows(path: Path, draw: random.Random) -> None:
    rows = list(csv.reader(path.open(newline="")))
    row = draw.choice(rows)
    row[draw.randrange(len(row))] = draw.choice(ODD_TEXTS)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def change_header(path: Path, draw: random.Random) -> None:
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    text = _json_of(change_tree(json.loads(whole[8 : 8 + length]), draw)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])


def change_arrays(path: Path, draw: random.Random) -> None:
    import h5py

    with h5py.File(path, "r+") as file:
        name = draw.choice(sorted(file))
        values = file[name][:]
        del file[name]
        kind = draw.randrange(7)
        if kind == 0:
            return
        flat = values.reshape(-1)
        flat[draw.randrange(len(flat))] = draw.choice((-1, 0, 2**31 - 1, -(2**31), 7))
        text = np.full(values.shape, "x", "S3")
        shapes = (values, values.astype(np.float64) + 0.5, values[:-1], flat, values[None], text)
        file[name] = shapes[kind - 1]


def change_members(path: Path, draw: random.Random) -> None:
    with zipfile.ZipFile(path) as old:
        members = [(info.filename, old.read(info)) for info in old.infolist()]
    at = draw.randrange(len(members))
    names = ["../outside.jpg", "/outside.jpg", members[0][0], "", "a\x00b", "x" * 300, "deep/" * 50 + "a.jpg"]
    members[at] = (draw.choice(names), members[at][1])
    with zipfile.ZipFile(path, "w") as new:
        for name, content in members:
            new.writestr(zipfile.ZipInfo(name), content)


def all_rows(table) -> None:
    for i in range(len(table)):
        row = table.row(i)
        try:
            decode_image(table.image_source(row))
        except ImageError as error:
            raise BadInput(str(error)) from error


def data_reader(*parts: str, **options) -> Callable[[Path], None]:
    """Reads all rows and images of the data set in a subfolder, once complaining, once leaving out."""

    def read(folder: Path) -> None:
        given = {key: folder / value if key in ("path", "image_dir") else value for key, value in options.items()}
        given |= {"name": str(folder / given["name"])} if "name" in given else {}
        source = str(folder / parts[0]) if "/" in parts[0] else parts[0]
        try:
            all_rows(open_dataset(source, cache_dir=folder / "cache", **given))
        except BadInput:
            all_rows(open_dataset(source, cache_dir=folder / "cache", on_error="drop", **given))

    return read


def predicts(source: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        found = open_predictor(folder / source)(Image.new("RGB", (64, 48)))
        assert found["boxes"].shape == (len(found["scores"]), 4)

    return read


def film(folder: Path) -> None:
    with Video(folder / "film.mp4") as video:
        list(video)


def guard_report(folder: Path) -> None:
    report = next(folder.glob("nan/*/rank0"))
    load_report(report)
    load_named_state(report)


def predictions(folder: Path) -> None:
    read_predictions(folder / "predictions.json", small(folder))


def small(folder: Path):
    return open_dataset("train", path=folder / "coco", cache_dir=folder / "cache")


IMAGE, COCO = "1.jpg", "coco/annotations/train.json"
SAFE, BYTES = [change_header, change_bytes], [change_bytes]
TREE = [change_text_tree, change_text_tree, change_number, change_bytes]
WORDS = [change_words, change_number, change_bytes]
GRAPHS = {"name": "graphs", "image_dir": "graphs/images"}
# kind -> (which files, the file that is changed, how, its reader, how often)
KINDS = {
    "COCO": (make_data, "coco/**/*.json", TREE, data_reader("train", path="coco"), 200),
    "VOC": (make_data, "voc/**/1.xml", WORDS, data_reader("train", path="voc"), 100),
    "YOLO labels": (make_data, "yolo/**/1.txt", WORDS, data_reader("train", path="yolo"), 80),
    "YOLO settings": (make_data, "yolo/*.yaml", TREE, data_reader("train", path="yolo"), 80),
    "CSV": (make_data, "csv/*.csv", [change_rows, change_number, change_bytes], data_reader("train", path="csv"), 100),
    "LabelMe": (make_data, "labelme/*.json", TREE, data_reader("train", path="labelme", format="labelme"), 80),
    "VIA": (make_data, "via/train/*.json", TREE, data_reader("train", path="via", format="via", masks=True), 80),
    "CVAT": (make_data, "cvat/*.xml", WORDS, data_reader("train", path="cvat", format="cvat", masks=True), 80),
    "Label Studio": (make_data, "label_studio/*.json", TREE,
                     data_reader("train", path="label_studio", format="label_studio", masks=True), 80),
    "Supervisely": (make_data, "supervisely/train/ann/*.json", TREE,
                    data_reader("train", path="supervisely", format="supervisely", masks=True), 80),
    "image": (make_data, "coco/**/1.jpg", BYTES, data_reader("train", path="coco"), 80),
    "zip of images": (make_data, "images.zip", [change_members, change_bytes],
                      data_reader("train", path="coco", image_dir="images.zip"), 80),
    "Parquet": (make_data, "hub/**/*.parquet", BYTES, data_reader("train", name="hub", format="hub"), 40),
    "Visual Genome": (make_data, "vg/*.h5", [change_arrays, change_bytes],
                      data_reader("test", name="vg", image_dir="source", format="visual_genome"), 100),
    "Visual Genome names": (make_data, "vg/VG-SGG-dicts*.json", TREE,
                            data_reader("test", name="vg", image_dir="source", format="visual_genome"), 60),
    "Visual Genome images": (make_data, "vg/image_data.json", TREE,
                             data_reader("test", name="vg", image_dir="source", format="visual_genome"), 60),
    "VRD": (make_data, "graphs/annotations_test.json", TREE, data_reader("test", format="vrd", **GRAPHS), 60),
    "GQA": (make_data, "graphs/val_sceneGraphs.json", TREE, data_reader("test", format="gqa", **GRAPHS), 60),
    "Open Images": (make_data, "graphs/vrd-test-anno.json", TREE,
                    data_reader("test", format="open_images", **GRAPHS), 60),
    "PSG": (make_data, "graphs/psg.json", TREE,
            data_reader("test", format="psg", name="graphs/psg.json", image_dir="graphs/images"), 60),
    "boxes to describe": (make_data, COCO, TREE, lambda folder: given_boxes(
        folder / COCO, {folder / IMAGE: Path(IMAGE)}, CLASSES), 60),
    "ids of images": (make_data, COCO, TREE, lambda folder: image_ids_of(folder / COCO, [Path(IMAGE)]), 40),
    "predictions": (make_data, "predictions.json", TREE, predictions, 100),
    "config.yaml of a run": (make_runs, "run/config.yaml", TREE, lambda f: open_run(f / "run", options_class), 100),
    "metrics.jsonl": (make_runs, "run/metrics.jsonl", TREE, lambda f: run_facts(f / "run"), 60),
    "status.json": (make_runs, "run/status.json", TREE, lambda f: run_facts(f / "run"), 40),
    "environment.json": (make_runs, "run/environment.json", TREE, lambda f: run_facts(f / "run"), 40),
    "manifest of a checkpoint": (make_runs, "run/checkpoints/step_000002/MANIFEST.json", TREE,
                                 lambda f: open_run(f / "run", options_class), 40),
    "state of a checkpoint": (make_runs, "run/checkpoints/step_000002/*.pt", BYTES,
                              lambda f: open_run(f / "run" / "checkpoints" / "step_000002", options_class), 20),
    "config.json of final/": (make_runs, "run/final/config.json", TREE, predicts("run/final"), 60),
    "categories.json of final/": (make_runs, "run/final/categories.json", TREE, predicts("run/final"), 40),
    "weights of final/": (make_runs, "run/final/model.safetensors", SAFE, predicts("run/final"), 60),
    "final/ as a start": (make_runs, "run/final/config.json", TREE,
                          lambda f: open_pretrained(str(f / "run/final")), 40),
    "ONNX": (make_runs, "exported/*.onnx", BYTES, predicts("exported/model.onnx"), 40),
    "weights.pth": (make_runs, "weights.pth", [change_members, change_bytes, change_bytes],
                    lambda f: timm_model_from_file("lcnet_035", str(f / "weights.pth")), 40),
    "report of the guard": (make_runs, "nan/**/report.json", TREE, guard_report, 40),
    "batch of the guard": (make_runs, "nan/**/batch_0.safetensors", SAFE, guard_report, 40),
    "thresholds of a report": (make_runs, "report/report.json", TREE, lambda f: report_thresholds(f), 40),
    "sweep": (make_runs, "sweep.yaml", TREE, lambda f: read_sweep(f / "sweep.yaml"), 60),
    "settings": (make_runs, "settings.yaml", TREE,
                 lambda f: parse_config(Config, ["--config", str(f / "settings.yaml")]), 80),
    "video": (make_runs, "film.mp4", BYTES, film, 30),
}  # fmt: skip

_watched: dict = {}


def _watch(event: str, arguments: tuple) -> None:
    """Notes programs that are started, and files that are written outside the folder that is read."""
    if not _watched:
        return
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
        _watched["seen"].append(f"{event} {arguments[0]}")
    path = written(event, arguments)
    if path is not None and not os.path.realpath(path).startswith((str(_watched["folder"]), "/dev/", "/proc/")):
        _watched["seen"].append(f"{event} {os.path.realpath(path)}")


@pytest.fixture(scope="session")
def watched():
    sys.addaudithook(_watch)
    yield _watched
    _watched.clear()


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_read_or_refused_in_sentences(kind, once, tmp_path, watched, monkeypatch, capfd):
    monkeypatch.setattr(imports, "_trusts_all", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))
    make, pattern, changes, read, count = KINDS[kind]
    files = once(make.__name__, make)
    folder, counts, worse = tmp_path / "files", {"read": 0, "refused": 0}, []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(-1, count):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(files, folder, symlinks=True)
        monkeypatch.chdir(folder)
        if number >= 0:  # -1: as it is
            draw = random.Random(f"{kind} {number}")
            draw.choice(changes)(next(iter(sorted(folder.glob(pattern)))), draw)
        watched.update(folder=tmp_path, seen=[])
        try:
            read(folder)
            counts["read"] += 1
        except Exception as error:  # noqa: BLE001 - whatever comes is what is looked for
            told = error if isinstance(error, BadInput) else explain_error(error)
            if told is None or number < 0 or any("Traceback" in line for line in str(told).splitlines()):
                frames = [f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"
                          for frame in extract_tb(error.__traceback__)]  # fmt: skip
                worse.append(f"{number}: {type(error).__name__}: {str(error)[:200]} in {', '.join(frames[-4:])}")
            counts["refused"] += 1
        finally:
            worse += [f"{number}: {seen}" for seen in watched["seen"]]
            watched.clear()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    with capfd.disabled():
        told = f"{counts['read'] - 1} read, {counts['refused']} refused, {len(worse)} worse, {grown:.1f} GB more"
        print(f"\n{kind}: {told}")
    assert not worse, "\n".join(worse)
    assert grown < 2 and not (tmp_path / "outside").exists() and not list(tmp_path.rglob("ran"))
