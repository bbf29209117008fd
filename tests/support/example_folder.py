"""A folder in which each command of the documentation finds what it names, all of it tiny."""

import json
import os
import shutil
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from calling import Call, Outcome, call_all
from flags import TRAINING
from places import ROOT, SMALL_CONFIGS, SUPPORT

# Names that the classes of the data set have, so that `{car: vehicle, truck: vehicle}` is about some of them.
CLASSES = ("circle", "square", "car", "truck")
# By name in the documentation: what it is here.
LINKS = {
    "configs": ROOT / "configs",
    "scripts": ROOT / "scripts",
    "SRC": "DIR",
    "HUB_NAME_OR_FOLDER": "DIR",
    "FILE": "val.json",
    "test2017": "images",
    "unlabelled": "images",
    "photos": "images",
    "holiday": "images",
    "large": "DIR",
    "TXL_PBC": "DIR",
    "nuclei": "DIR",
    "bccd": "DIR",
    "RUN": "runs/detr",
}
RUN_LINKS = {
    "detr": ("a", "b", "bccd", "fold_1", "fold_2", "fold_3", "mine", "other", "theirs", "vg150_detr"),
    "faster_rcnn": ("detector", "frcnn", "vg150_detector", "vg_detector"),
    "sgg": ("sgdet",),
}
# Trainings whose runs other commands name: script, name of the run, further words.
TRAININGS = (
    ("train_detr", "detr"),
    ("train_yolov3", "yolov3"),
    ("train_faster_rcnn", "faster_rcnn"),
    ("train_sgg", "sgg"),
    ("train_sgg", "causal", "--model.head", "causal"),
    ("train_ssd", "diverged", "--optim.lr", "1e38", "--schedule.name", "constant", "--schedule.warmup_steps", "0"),
)
AFTERWARDS = (
    ("evaluate", "runs/detr", "--save", "results.json"),
    ("convert", "DIR", "VOC2007", "--to", "voc"),
)


def make_example_folder(folder: Path) -> None:
    """Fill a folder with data sets, pictures, a video, runs of four scripts and what was computed from them."""
    _make_data(folder)
    for name, target in LINKS.items():
        (folder / name).symlink_to(target)
    (folder / "runs").mkdir()
    for target, names in RUN_LINKS.items():
        for name in names:
            (folder / "runs" / name).symlink_to(target)
    trainings = [Call(script, _argv(script, name, words)) for script, name, *words in TRAININGS]
    _succeed(trainings, call_all(trainings, folder, shorten_trainings, keep=True), but="diverged")
    (report,) = folder.glob("runs/diverged/nan/*")
    (folder / "runs" / "detr" / "nan").mkdir()
    shutil.move(report, folder / "runs" / "detr" / "nan" / "step_000123")
    calls = [Call(script, tuple(words)) for script, *words in AFTERWARDS]
    _succeed(calls, call_all(calls, folder, prepare_nothing, keep=True))


def _argv(script: str, name: str, words: Sequence[str]) -> tuple[str, ...]:
    return ("--config", str(SMALL_CONFIGS / f"{script}.yaml"), "--data.path", "DIR", "--run.name", name, *words)


def _succeed(calls: Sequence[Call], outcomes: Sequence[Outcome], but: str = "nothing") -> None:
    for call, outcome in zip(calls, outcomes, strict=True):
        assert outcome.code == 0 or but in call.argv, (call, outcome)


def _make_data(folder: Path) -> None:
    from PIL import Image

    from toolkit.tools.shapes import make_shapes

    data = folder / "DIR"
    make_shapes(data, train_images=6, val_images=4, image_size=128)
    shutil.copytree(data / "val", data / "test")
    (data / "JPEGImages").symlink_to("train")
    images = folder / "images"
    images.mkdir()
    for split in ("train", "val"):
        file = data / "annotations" / f"{split}.json"
        document = json.loads(file.read_text())
        for category, name in zip(document["categories"], CLASSES, strict=True):
            category["name"] = name
        file.write_text(json.dumps(document))
        for image in document["images"]:
            shutil.copy(data / split / image["file_name"], images / f"{split}_{image['file_name']}")
            image["file_name"] = f"{split}_{image['file_name']}"
        (folder / f"{split}.json").write_text(json.dumps(document))
    shutil.copy(data / "annotations" / "val.json", data / "annotations" / "test.json")
    shutil.copy(folder / "val.json", folder / "test.json")
    document = json.loads((folder / "val.json").read_text())
    without_boxes = {key: document[key] for key in ("images", "categories")}
    (folder / "test-dev.json").write_text(json.dumps(without_boxes))
    shutil.copy(images / "val_000000.jpg", folder / "photo.jpg")
    Image.open(folder / "photo.jpg").resize((700, 700)).save(folder / "map.png")
    _write_video(folder / "film.mp4", images)
    words = " ".join(["0.1"] * 200)
    (folder / "glove.6B.200d.txt").write_text("".join(f"{name} {words}\n" for name in CLASSES))
    boxes = {path.name: {"boxes": [[8, 8, 60, 60], [50, 40, 120, 100]], "labels": [0, 1]} for path in images.iterdir()}
    (folder / "boxes.json").write_text(json.dumps(boxes))


def _write_video(path: Path, images: Path) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 128
        stream.pix_fmt = "yuv420p"
        for picture in sorted(images.iterdir())[:3]:
            frame = av.VideoFrame.from_image(_open(picture))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def _open(path: Path):
    from PIL import Image

    return Image.open(path)


def prepare_nothing() -> None:
    """Let the calls do what they do."""


def shorten_trainings() -> None:
    """Let trainings make one step on two small images of `DIR`; the model is the command's, with random weights."""
    os.environ["PYTHONPATH"] = str(SUPPORT)
    for script in TRAINING:
        module = import_module(script)
        module.main = partial(_main_shortened, module.main)


def _main_shortened(main, config) -> None:
    row = main(shortened(config))
    assert row.get("val/bbox_AP", row.get("val/R@100")) is not None, row


def shortened(config):
    """Return the settings of a training with what takes time or a data set that is not here replaced."""
    # 300 queries need that many patches
    side = {"rf_detr": 280, "lw_detr": 320}.get(config.model.architecture, 224)
    data = config.data
    data.format = "coco"
    data.path = None
    data.name = None
    data.image_dir = None
    data.classes = {}
    data.train = "DIR/annotations/train.json"
    data.val = "DIR/annotations/val.json"
    data.shares = []
    data.workers = 0
    data.batch_size_per_device = 2
    data.max_train_images = None
    data.image_size = min(data.image_size, side) if isinstance(data.image_size, int) else side
    data.max_size = side
    data.scales = [side] if data.scales else []
    data.multi_scale = [side] if data.multi_scale else []
    config.optim.accumulation_steps = 1
    config.eval.batch_size_per_device = 2
    config.eval.test_split = None
    run = config.run
    run.max_steps = 1
    run.epochs = 1
    run.max_minutes = None
    run.tracker = "none"
    run.export = False
    if hasattr(config.model, "pretrained_backbone"):
        config.model.pretrained_backbone = False
    return config
