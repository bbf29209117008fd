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
CLASSES = ("cup", "table")
PREDICATES = ("on", "near")
ODD = [
    None,
    True,
    -1,
    0,
    3,
    10**9,
    2**63,
    10**400,
    1e308,
    -0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "x" * 5000,
    "3",
    "NaN",
    "1e400",
    "../../../outside",
    "/etc/passwd",
    "strangers_module:Detector",
    "=1+1",
    "\ud800",
    "\x00",
    "a\nb",
    [],
    {},
    [[]],
    [1, 2, 3, 4],
    {"id": 1},
    ["cup"],
    {"a": {"b": []}},
]
ODD_TEXTS = [
    "",
    "-1",
    "0",
    "nan",
    "inf",
    "1e400",
    "9" * 400,
    "x",
    "x" * 5000,
    "../../outside",
    "/etc/passwd",
    "=1+1",
    "\x00",
    "é",
    '"',
    "<",
    "&a;",
    ",",
]
# Python reads no whole number of more than 4,300 digits, and raises a ValueError that is not one of the parser.
ODD_NUMBERS = [
    "9" * 5000,
    "-" + "9" * 5000,
    "9" * 5000 + ".5",
    "1e" + "9" * 5000,
    "0x" + "f" * 5000,
    "0b" + "1" * 20000,
    "2001-99-99",
    "2001-01-01T99:99:99",
    "!!int x",
    "!!timestamp x",
    "!!float x",
    "1:99:99",
    "١٢",
    "1_000",
    "[" * 3000,
    "{" * 3000,
    '"' + "x" * 200_000 + '"',
    "x" * 200_000,
]
ODD_ENCODINGS = [
    "klingon",
    "utf-16",
    "utf-32",
    "utf-7",
    "idna",
    "rot13",
    "hex",
    "shift_jis",
    "undefined",
    "",
    "x" * 500,
]


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
GQA = {
    "width": 64,
    "height": 48,
    "objects": {
        "7": {"name": "cup", "x": 1, "y": 2, "w": 3, "h": 4, "relations": [{"name": "on", "object": "8"}]},
        "8": {"name": "table", "x": 0, "y": 0, "w": 60, "h": 30, "relations": []},
    },
}
VRD = {
    "predicate": 1,
    "subject": {"category": 1, "bbox": [5, 15, 10, 30]},
    "object": {"category": 0, "bbox": [10, 40, 0, 60]},
}
OPEN_IMAGES = {
    "img_fn": "1",
    "img_size": [64, 48],
    "bbox": [[1, 2, 11, 12], [20, 20, 50, 40]],
    "det_labels": [1, 0],
    "rel": [[0, 1, 1]],
}
PSG_IMAGE = {
    "image_id": 1,
    "file_name": "1.jpg",
    "width": 64,
    "height": 48,
    "annotations": [
        {"bbox": [1, 2, 11, 12], "category_id": 0},
        {"bbox": [20, 20, 50, 40], "category_id": 1},
    ],
    "segments_info": [],
    "relations": [[0, 1, 0]],
}
GRAPHS = {
    "annotations_test.json": {"1.jpg": [VRD]},
    "objects.json": ["table", "cup"],
    "predicates.json": ["under", "on"],
    "val_sceneGraphs.json": {"1": GQA},
    "train_sceneGraphs.json": {"1": GQA},
    "vrd-test-anno.json": [OPEN_IMAGES],
    "categories_dict.json": {"obj": ["Chair", "Man"], "rel": ["at", "on"]},
    "psg.json": {
        "data": [PSG_IMAGE],
        "thing_classes": ["cup"],
        "stuff_classes": ["table"],
        "predicate_classes": ["on", "near"],
        "test_image_ids": [1],
    },
}
BOXES_OF_IMAGES = [
    [[5, 5, 25, 30], [10, 8, 60, 40]],
    [[0, 0, 12, 9]],
    [],
    [[0, 0, 64, 48]],
]


def small_table(folder: Path):
    """Four images: boxes with relations, one box, none, one of the whole image."""
    rows = []
    for number, boxes in enumerate(BOXES_OF_IMAGES, start=1):
        image = Image.new("RGB", (64, 48), (60 * number, 90, 30))
        image.save(folder / f"{number}.jpg")
        ids = [10 * number + k for k in range(len(boxes))]
        row = row_of(
            number,
            boxes,
            (64, 48),
            [box_id % 2 for box_id in ids],
            [(0, 1, 1)] if number == 1 else (),
            id=ids,
            area=[(right - left) * (bottom - top) for left, top, right, bottom in boxes],
        )
        row["file_name"] = f"{number}.jpg"
        rows.append(row)
    return write_rows(
        rows,
        cache_file=folder / "table.json",
        image_root=folder,
        name="small",
        predicates=PREDICATES,
        categories=[Category(1, "cup"), Category(2, "table")],
    )


def make_data(folder: Path) -> None:
    source = folder / "source"
    source.mkdir()
    table = small_table(source)
    for format in ("coco", "voc", "yolo", "csv"):
        write_folder(table, folder / format, "train", format)
    for tool in ("labelme", "via", "cvat", "label_studio", "supervisely"):
        files, _ = sets_in(tool)[0].values[0]
        build(files, folder / tool)
    images = sorted(source.glob("*.jpg"))
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for image in images:
            archive.write(image, image.name)
    write_hub(folder / "hub", images[:2])
    write_visual_genome([(table, 0), (table, 2)], folder / "vg")
    graphs = folder / "graphs"
    shutil.copytree(source, graphs / "images")
    for name, content in GRAPHS.items():
        (graphs / name).write_text(json.dumps(content))
    found = {
        "boxes": torch.tensor([[1.0, 2, 30, 20]]),
        "scores": torch.tensor([0.5]),
        "labels": torch.tensor([1]),
    }
    of_images = dict.fromkeys(table.image_ids().tolist(), found)
    write_predictions(folder / "predictions.json", of_images, table)


def write_hub(folder: Path, images: list[Path]) -> None:
    columns = {
        "image_id": [1, 2],
        "width": [64, 64],
        "height": [48, 48],
        "image": [{"bytes": image.read_bytes(), "path": None} for image in images],
        "objects": [{"bbox": [[1.0, 2.0, 3.0, 4.0]], "category": [k]} for k in (0, 1)],
    }
    hub = datasets.Dataset.from_dict(columns)
    hub = hub.cast_column("image", datasets.Image())
    data = folder / "data"
    data.mkdir(parents=True)
    hub.to_parquet(data / "train-00000-of-00001.parquet")


SMALL_RUN = """
--run.name run --run.max_steps 2 --data.format shapes --data.image_size 64 --data.workers 0
--data.batch_size_per_device 2 --data.max_train_images 8 --eval.pictures 0
"""


def program(name: str, *words) -> None:
    command = [sys.executable, ROOT / "scripts" / name, *words]
    subprocess.run(
        list(map(str, command)),
        check=True,
        capture_output=True,
        env=os.environ | CPU,
    )


def make_runs(folder: Path) -> None:
    """A run of two steps with its evaluation, its ONNX file, and what a person writes for the programs."""
    config = ROOT / "tests/assets/configs/train_ssd.yaml"
    program("train_ssd.py", "--config", config, "--run.output_dir", folder, *SMALL_RUN.split())
    program("export.py", folder / "run", "--out", folder / "exported", "--format", "onnx")
    model = timm.create_model("lcnet_035")
    torch.save(model.state_dict(), folder / "weights.pth")
    write_report_of_guard(folder)
    (folder / "sweep.yaml").write_text(SWEEP)
    (folder / "settings.yaml").write_text(SETTINGS)
    report = folder / "report"
    report.mkdir(exist_ok=True)
    thresholds = {"threshold": 0.4, "thresholds": {"cup": 0.3, "table": 0.5}}
    (report / "report.json").write_text(json.dumps(thresholds))
    film = VideoWriter(folder / "film.mp4", Fraction(25))
    for value in range(5):
        frame = np.full((48, 64, 3), 40 * value, np.uint8)
        film.add(frame)
    film.close()


def write_report_of_guard(folder: Path) -> None:
    target = {
        "image_id": 1,
        "boxes": torch.zeros(0, 4),
        "labels": torch.zeros(0, dtype=torch.int64),
    }
    images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    batch = Batch(images, torch.tensor([[8, 8]]), [target])
    losses = {"loss": float("nan")}
    report = {
        "step": 3,
        "rank": 0,
        "reason": "loss is nan",
        "policy": "stop",
        "image_ids": [[1]],
        "batch": [],
        "losses": losses,
        "lr": {"main": 0.1},
    }
    model = torch.nn.Linear(1, 1)
    report |= diagnose(model, lambda: [losses])
    write_nan_report(folder, report, [batch], {"a": torch.ones(2)})


def change_bytes(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 3, 30))):
        at = draw.randrange(len(data) + 1)
        size = draw.choice((1, 4, 100, len(data) // 2 + 1))
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
            largest = b"\x7f" + b"\xff" * 7
            data[at : at + 8] = draw.choice((b"\xff" * 8, bytes(8), largest))
        else:
            data[at : at + 1] = draw.randbytes(1)
    path.write_bytes(data)


def places_in(node) -> list[tuple]:
    """Each list or dict with each of its keys, those above first."""
    if not isinstance(node, dict | list):
        return []
    places = []
    keys = node if isinstance(node, dict) else range(len(node))
    for key in keys:
        places.append((node, key))
        places += places_in(node[key])
    return places


def change_tree(tree, draw: random.Random):
    """One place of nested lists and dicts replaced, removed, doubled or renamed."""
    tree = copy.deepcopy(tree)
    places = places_in(tree)
    if not places or draw.random() < 0.05:
        return draw.choice(ODD)
    node, key = draw.choice(places)
    kind = draw.randrange(8)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, list):
        doubled = copy.deepcopy(node[key])
        node.append(doubled)
    elif kind == 1:
        node[f"{key}x"] = node.pop(key)
    elif kind == 2:
        other, at = draw.choice(places)
        node[key] = copy.deepcopy(other[at])
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
        if draw.random() >= 0.9:
            written = text + "\nx: !!python/object/apply:os.system ['touch ran']\n"
        elif is_deep(tree):
            written = json_of(tree)
        else:
            written = yaml.dump(tree)
    elif path.suffix == ".jsonl":
        lines = text.splitlines()
        at = draw.randrange(len(lines))
        tree = change_tree(json.loads(lines[at]), draw)
        lines[at] = json_of(tree)
        written = "\n".join(lines) + "\n"
    else:
        tree = change_tree(json.loads(text), draw)
        written = json_of(tree)
    path.write_text(written, errors="surrogatepass")


def is_deep(tree, level: int = 0) -> bool:
    if level > 50:
        return True
    if isinstance(tree, dict):
        tree = list(tree.values())
    if not isinstance(tree, list):
        return False
    return any(is_deep(each, level + 1) for each in tree)


def json_of(tree) -> str:
    try:
        return json.dumps(tree)
    except RecursionError:
        return "[" * 5000 + "]" * 5000


def change_words(path: Path, draw: random.Random) -> None:
    """One word of a text, between blanks, commas or tags."""
    text = path.read_text()
    cuts = [i for i, letter in enumerate(text) if letter in " ,\n<>:\t"]
    at = draw.randrange(len(cuts) - 1)
    before = text[: cuts[at] + 1]
    after = text[cuts[at + 1] :]
    path.write_text(before + draw.choice(ODD_TEXTS) + after)


def change_number(path: Path, draw: random.Random) -> None:
    """One number of a text; or of XML and YAML what else their parsers refuse by errors that are not their own."""
    text = path.read_text(errors="surrogateescape")
    if path.suffix == ".xml" and draw.random() < 0.4:
        encoding = draw.choice(ODD_ENCODINGS)
        text = f"<?xml version='1.0' encoding='{encoding}'?>{text}"
    else:
        numbers = list(re.finditer(r"-?\d+(\.\d+)?", text))
        number = draw.choice(numbers)
        before = text[: number.start()]
        after = text[number.end() :]
        text = before + draw.choice(ODD_NUMBERS) + after
    path.write_text(text, errors="surrogateescape")


def change_rows(path: Path, draw: random.Random) -> None:
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    row = draw.choice(rows)
    at = draw.randrange(len(row))
    row[at] = draw.choice(ODD_TEXTS)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def change_header(path: Path, draw: random.Random) -> None:
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    text = json_of(change_tree(header, draw)).encode()
    length = len(text).to_bytes(8, "little")
    path.write_bytes(length + text + whole[end:])


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
        at = draw.randrange(len(flat))
        flat[at] = draw.choice((-1, 0, 2**31 - 1, -(2**31), 7))
        changed = (
            values,
            values.astype(np.float64) + 0.5,
            values[:-1],
            flat,
            values[None],
            np.full(values.shape, "x", "S3"),
        )
        file[name] = changed[kind - 1]


def change_members(path: Path, draw: random.Random) -> None:
    members = []
    with zipfile.ZipFile(path) as old:
        for info in old.infolist():
            members.append((info.filename, old.read(info)))
    at = draw.randrange(len(members))
    names = [
        "../outside.jpg",
        "/outside.jpg",
        members[0][0],
        "",
        "a\x00b",
        "x" * 300,
        "deep/" * 50 + "a.jpg",
    ]
    _, content = members[at]
    members[at] = (draw.choice(names), content)
    with zipfile.ZipFile(path, "w") as new:
        for name, content in members:
            new.writestr(zipfile.ZipInfo(name), content)


def all_rows(table) -> None:
    for i in range(len(table)):
        source = table.image_source(table.row(i))
        try:
            decode_image(source)
        except ImageError as error:
            raise BadInput(str(error)) from error


def data_reader(split: str, **options) -> Callable[[Path], None]:
    """Reads all rows and images of the data set in a subfolder, once complaining, once leaving out."""

    def read(folder: Path) -> None:
        given = dict(options)
        for key in ("path", "image_dir"):
            if key in given:
                given[key] = folder / given[key]
        if "name" in given:
            given["name"] = str(folder / given["name"])
        cache_dir = folder / "cache"
        try:
            table = open_dataset(split, cache_dir=cache_dir, **given)
            all_rows(table)
        except BadInput:
            table = open_dataset(split, cache_dir=cache_dir, on_error="drop", **given)
            all_rows(table)

    return read


def train(path: str, **options) -> Callable[[Path], None]:
    return data_reader("train", path=path, **options)


def graphs(format: str, name: str = "graphs") -> Callable[[Path], None]:
    return data_reader("test", format=format, name=name, image_dir="graphs/images")


visual_genome = data_reader("test", name="vg", image_dir="source", format="visual_genome")


def predicts(source: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        predictor = open_predictor(folder / source)
        found = predictor(Image.new("RGB", (64, 48)))
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
    table = open_dataset("train", path=folder / "coco", cache_dir=folder / "cache")
    read_predictions(folder / "predictions.json", table)


def boxes_to_describe(folder: Path) -> None:
    images = {folder / "1.jpg": Path("1.jpg")}
    given_boxes(folder / COCO, images, CLASSES)


def ids_of_images(folder: Path) -> None:
    image_ids_of(folder / COCO, [Path("1.jpg")])


def run_files(folder: Path) -> None:
    run_facts(folder / "run")


def run(folder: Path) -> None:
    open_run(folder / "run", options_class)


def checkpoint(folder: Path) -> None:
    open_run(folder / CHECKPOINT, options_class)


def final_as_a_start(folder: Path) -> None:
    open_pretrained(str(folder / "run/final"))


def backbone_file(folder: Path) -> None:
    timm_model_from_file("lcnet_035", str(folder / "weights.pth"))


def sweep(folder: Path) -> None:
    read_sweep(folder / "sweep.yaml")


def settings(folder: Path) -> None:
    parse_config(Config, ["--config", str(folder / "settings.yaml")])


COCO = "coco/annotations/train.json"
CHECKPOINT = "run/checkpoints/step_000002"
SAFE = [change_header, change_bytes]
BYTES = [change_bytes]
TREE = [change_text_tree, change_text_tree, change_number, change_bytes]
WORDS = [change_words, change_number, change_bytes]
ROWS = [change_rows, change_number, change_bytes]
ARRAYS = [change_arrays, change_bytes]
ARCHIVE = [change_members, change_bytes]
PICKLE = [change_members, change_bytes, change_bytes]
# kind -> (the file that is changed, how, its reader, how often)
OF_DATA = {
    "COCO": ("coco/**/*.json", TREE, train("coco"), 200),
    "VOC": ("voc/**/1.xml", WORDS, train("voc"), 100),
    "YOLO labels": ("yolo/**/1.txt", WORDS, train("yolo"), 80),
    "YOLO settings": ("yolo/*.yaml", TREE, train("yolo"), 80),
    "CSV": ("csv/*.csv", ROWS, train("csv"), 100),
    "LabelMe": ("labelme/*.json", TREE, train("labelme", format="labelme"), 80),
    "VIA": ("via/train/*.json", TREE, train("via", format="via", masks=True), 80),
    "CVAT": ("cvat/*.xml", WORDS, train("cvat", format="cvat", masks=True), 80),
    "Label Studio": ("label_studio/*.json", TREE, train("label_studio", format="label_studio", masks=True), 80),
    "Supervisely": ("supervisely/train/ann/*.json", TREE, train("supervisely", format="supervisely", masks=True), 80),
    "image": ("coco/**/1.jpg", BYTES, train("coco"), 80),
    "zip of images": ("images.zip", ARCHIVE, train("coco", image_dir="images.zip"), 80),
    "Parquet": ("hub/**/*.parquet", BYTES, data_reader("train", name="hub", format="hub"), 40),
    "Visual Genome": ("vg/*.h5", ARRAYS, visual_genome, 100),
    "Visual Genome names": ("vg/VG-SGG-dicts*.json", TREE, visual_genome, 60),
    "Visual Genome images": ("vg/image_data.json", TREE, visual_genome, 60),
    "VRD": ("graphs/annotations_test.json", TREE, graphs("vrd"), 60),
    "GQA": ("graphs/val_sceneGraphs.json", TREE, graphs("gqa"), 60),
    "Open Images": ("graphs/vrd-test-anno.json", TREE, graphs("open_images"), 60),
    "PSG": ("graphs/psg.json", TREE, graphs("psg", name="graphs/psg.json"), 60),
    "boxes to describe": (COCO, TREE, boxes_to_describe, 60),
    "ids of images": (COCO, TREE, ids_of_images, 40),
    "predictions": ("predictions.json", TREE, predictions, 100),
}
OF_RUNS = {
    "config.yaml of a run": ("run/config.yaml", TREE, run, 100),
    "metrics.jsonl": ("run/metrics.jsonl", TREE, run_files, 60),
    "status.json": ("run/status.json", TREE, run_files, 40),
    "environment.json": ("run/environment.json", TREE, run_files, 40),
    "manifest of a checkpoint": (f"{CHECKPOINT}/MANIFEST.json", TREE, run, 40),
    "state of a checkpoint": (f"{CHECKPOINT}/*.pt", BYTES, checkpoint, 20),
    "config.json of final/": ("run/final/config.json", TREE, predicts("run/final"), 60),
    "categories.json of final/": ("run/final/categories.json", TREE, predicts("run/final"), 40),
    "weights of final/": ("run/final/model.safetensors", SAFE, predicts("run/final"), 60),
    "final/ as a start": ("run/final/config.json", TREE, final_as_a_start, 40),
    "ONNX": ("exported/*.onnx", BYTES, predicts("exported/model.onnx"), 40),
    "weights.pth": ("weights.pth", PICKLE, backbone_file, 40),
    "report of the guard": ("nan/**/report.json", TREE, guard_report, 40),
    "batch of the guard": ("nan/**/batch_0.safetensors", SAFE, guard_report, 40),
    "thresholds of a report": ("report/report.json", TREE, report_thresholds, 40),
    "sweep": ("sweep.yaml", TREE, sweep, 60),
    "settings": ("settings.yaml", TREE, settings, 80),
    "video": ("film.mp4", BYTES, film, 30),
}

_watched: dict = {}
STARTING = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")


def _watch(event: str, arguments: tuple) -> None:
    """Notes programs that are started, and files that are written outside the folder that is read."""
    if not _watched:
        return
    if event in STARTING:
        _watched["seen"].append(f"{event} {arguments[0]}")
    path = written(event, arguments)
    if path is None:
        return
    path = os.path.realpath(path)
    allowed = (str(_watched["folder"]), "/dev/", "/proc/")
    if not path.startswith(allowed):
        _watched["seen"].append(f"{event} {path}")


@pytest.fixture(scope="session")
def watched():
    sys.addaudithook(_watch)
    yield _watched
    _watched.clear()


def described(error: Exception) -> str:
    frames = []
    for frame in extract_tb(error.__traceback__)[-4:]:
        file = Path(frame.filename).name
        frames.append(f"{frame.name} ({file}:{frame.lineno})")
    return f"{type(error).__name__}: {str(error)[:200]} in {', '.join(frames)}"


def is_in_sentences(error: Exception) -> bool:
    told = error if isinstance(error, BadInput) else explain_error(error)
    return told is not None and "Traceback" not in str(told)


def peak_memory_gb() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_maxrss / 2**20


@pytest.mark.parametrize("kind", [*OF_DATA, *OF_RUNS])
def test_a_changed_file_is_read_or_refused_in_sentences(kind, once, tmp_path, watched, monkeypatch, capfd):
    monkeypatch.setattr(imports, "_trusts_all", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))
    make = make_data if kind in OF_DATA else make_runs
    pattern, changes, read, count = (OF_DATA | OF_RUNS)[kind]
    files = once(make.__name__, make)
    folder = tmp_path / "files"
    num_read = 0
    num_refused = 0
    worse = []
    before = peak_memory_gb()
    for number in range(-1, count):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(files, folder, symlinks=True)
        monkeypatch.chdir(folder)
        if number >= 0:  # -1: as it is
            draw = random.Random(f"{kind} {number}")
            change = draw.choice(changes)
            change(min(folder.glob(pattern)), draw)
        watched.update(folder=tmp_path, seen=[])
        try:
            read(folder)
            num_read += 1
        except Exception as error:  # noqa: BLE001 - whatever comes is what is looked for
            if number < 0 or not is_in_sentences(error):
                worse.append(f"{number}: {described(error)}")
            num_refused += 1
        finally:
            worse += [f"{number}: {seen}" for seen in watched["seen"]]
            watched.clear()
    grown = peak_memory_gb() - before
    with capfd.disabled():
        counts = f"{num_read - 1} read, {num_refused} refused, {len(worse)} worse"
        print(f"\n{kind}: {counts}, {grown:.1f} GB more")
    assert not worse, "\n".join(worse)
    assert grown < 2
    assert not (tmp_path / "outside").exists()
    assert not list(tmp_path.rglob("ran"))
