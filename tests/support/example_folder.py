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
    "test2017": "images",
    "unlabelled": "images",
    "holiday": "photos",
    "large": "DIR",
    "TXL_PBC": "DIR",
    "nuclei": "DIR",
    "bccd": "DIR",
    "RUN": "runs/detr",
    "boxes.json": "val.json",
}
RUN_LINKS = {
    "detr": ("a", "b", "bccd", "mine", "other", "theirs", "vg150_detr"),
    "faster_rcnn": ("detector", "frcnn", "vg150_detector", "vg_detector"),
    "sgg": ("sgdet", "sgg_vg150"),
}
AT_ONCE = ("--schedule.name", "constant", "--schedule.warmup_steps", "0")
# Trainings whose runs other commands name: script, name of the run, further words.
TRAININGS = (
    ("train_detr", "detr", "--optim.ema_decay", "0.9"),
    ("train_yolov3", "yolov3"),
    ("train_faster_rcnn", "faster_rcnn"),
    ("train_sgg", "sgg"),
    ("train_sgg", "causal", "--model.head", "causal", "--model.mode", "predcls", "--eval.metric_for_best", "R@20"),
    ("train_ssd", "fold_1", "--data.val", "1/3", "--data.path", "ONE_SPLIT"),
    ("train_ssd", "fold_2", "--data.val", "2/3", "--data.path", "ONE_SPLIT"),
    ("train_ssd", "fold_3", "--data.val", "3/3", "--data.path", "ONE_SPLIT"),
    ("train_faster_rcnn", "fcos", "--model.architecture", "fcos_detector:FCOS"),
    ("train_detr", "diverged", "--optim.lr", "1e38", *AT_ONCE),
)
AFTERWARDS = (
    ("evaluate", "runs/detr", "--save", "results.json"),
    ("evaluate", "runs/detr", "--split", "val.json", "--save", "results_of_val.json"),
    ("convert", "DIR", "VOC2007", "--to", "voc"),
)


def make_example_folder(folder: Path) -> None:
    """Fill a folder with data sets, pictures, a video, runs of four scripts and what was computed from them."""
    _make_data(folder)
    for name, target in LINKS.items():
        (folder / name).symlink_to(target)
    runs = folder / "runs"
    (runs / "sweeps" / "folds").mkdir(parents=True)
    for target, names in RUN_LINKS.items():
        for name in names:
            (runs / name).symlink_to(target)
    for number in (1, 2, 3):
        (runs / "sweeps" / "folds" / f"trial_{number}").symlink_to(f"../../fold_{number}")
    trainings = [Call(script, _argv(script, name, words)) for script, name, *words in TRAININGS]
    _succeed(trainings, call_all(trainings, folder, shorten_trainings, keep=True), but="diverged")
    (report,) = runs.glob("diverged/nan/*")
    (runs / "detr" / "nan").mkdir()
    shutil.move(report, runs / "detr" / "nan" / "step_000123")
    calls = [Call(script, tuple(words)) for script, *words in AFTERWARDS]
    _succeed(calls, call_all(calls, folder, prepare_nothing, keep=True))


def _argv(script: str, name: str, words: Sequence[str]) -> tuple[str, ...]:
    data = () if "--data.path" in words else ("--data.path", "DIR")
    config = () if "fcos_detector:FCOS" in words else ("--config", str(SMALL_CONFIGS / f"{script}.yaml"))
    return (*config, *data, "--run.name", name, *words)


def _succeed(calls: Sequence[Call], outcomes: Sequence[Outcome], but: str = "nothing") -> None:
    for call, outcome in zip(calls, outcomes, strict=True):
        assert outcome.code == 0 or but in call.argv, (call, outcome)


def _make_data(folder: Path) -> None:
    from PIL import Image

    from toolkit.tools.shapes import make_shapes

    data = folder / "DIR"
    make_shapes(data, train_images=6, val_images=4, image_size=128)
    make_shapes(folder / "more", train_images=1, val_images=4, image_size=128, seed=1)
    shutil.move(folder / "more" / "val", data / "test")
    shutil.move(folder / "more" / "annotations" / "val.json", data / "annotations" / "test.json")
    shutil.rmtree(folder / "more")
    (data / "JPEGImages").symlink_to("train")
    images = folder / "images"
    images.mkdir()
    for split in ("train", "val", "test"):
        file = data / "annotations" / f"{split}.json"
        document = json.loads(file.read_text())
        for category, name in zip(document["categories"], CLASSES, strict=True):
            category["name"] = name
        file.write_text(json.dumps(document))
        for image in document["images"]:
            name = f"{split}_{image['file_name']}"
            shutil.copy(data / split / image["file_name"], images / name)
            image["file_name"] = name
        (folder / f"{split}.json").write_text(json.dumps(document))
    published = {key: document[key] for key in ("images", "categories")}
    (folder / "test-dev.json").write_text(json.dumps(published))
    only = folder / "ONE_SPLIT"
    shutil.copytree(data / "train", only / "train")
    (only / "annotations").mkdir()
    shutil.copy(data / "annotations" / "train.json", only / "annotations")
    shutil.copy(images / "val_000000.jpg", folder / "photo.jpg")
    (folder / "photos").mkdir()
    for picture in images.glob("val_*"):
        shutil.copy(picture, folder / "photos")
    (folder / "data" / "visual_genome").mkdir(parents=True)
    (folder / "data" / "visual_genome" / "VG_100K").symlink_to(data / "test")
    Image.open(folder / "photo.jpg").resize((700, 700)).save(folder / "map.png")
    _write_video(folder / "film.mp4", images)
    words = " ".join(["0.1"] * 200)
    (folder / "glove.6B.200d.txt").write_text("".join(f"{name} {words}\n" for name in CLASSES))


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
    if data.path not in ("DIR", "ONE_SPLIT"):
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
    config.model.pretrained_backbone = False
    if not Path(config.model.pretrained or "").exists():
        config.model.pretrained = None
    return config
