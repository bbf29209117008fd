"""This toolkit beside other programs: the same pictures, split, minutes and cores, random weights, float32.

    pip install -e '.[peers]' && git clone https://github.com/facebookresearch/detr runs/peers/detr
    python scripts/benchmark.py --only peers --out runs/peers/shapes           # bundled shapes; 45 minutes
    python scripts/benchmark.py --only peers_masks --out runs/peers/table_masks  # masks of the same; 10 minutes
    python scripts/benchmark.py --only peers_bccd --out runs/peers/table_bccd  # BCCD, from a folder with bccd/
    python scripts/benchmark.py --only peers_sets --out runs/peers/table_sets  # every data set in runs/peers/sets/
    python scripts/benchmark.py --only peers_trained --out runs/peers/table_trained  # the same, a trained backbone

Each program is a process of its own. Its log and its detections are kept in `runs/peers/`, and pycocotools judges the
detections of all programs on the same file. The minutes contain no evaluation, and the last weights of every program
are judged. If a program cannot run, the unit of its row says why.
"""

import csv
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

from toolkit.base.errors import BadInput
from toolkit.base.files import read_json, write_json
from toolkit.data.formats import open_dataset
from toolkit.data.table import DetectionTable
from toolkit.run.metrics_log import read_metrics
from toolkit.tools.shapes import ensure_shapes
from toolkit.tools.writers import write_folder

from .measuring import row
from .peer_programs import PROGRAMS, PeerPlan, lines_of

SCRIPTS = Path(__file__).resolve().parents[1]
CONFIGS = SCRIPTS.parent / "configs"
LOGS = Path("runs") / "peers"
BCCD = ("bccd/annotations/train.json", "bccd/annotations/val.json", "bccd/JPEGImages", "bccd/JPEGImages")
OURS = {  # script and configuration; {} is `PeerPlan.config`
    "our RT-DETR-v2": ("train_detr", "detr/{}"),
    "our Faster R-CNN": ("train_faster_rcnn", "faster_rcnn/{}"),
    "our DETR": ("train_detr", "detr/shapes_detr"),
}
ORDER = ("our RT-DETR-v2", "transformers' Trainer", "transformers' Trainer, our weights and rates", "our Faster R-CNN",
         "torchvision's reference loop", "our DETR", "facebookresearch/detr, our weights and rates",
         "ultralytics yolo11n")  # fmt: skip
ON_SETS = ("our Faster R-CNN", "torchvision's reference loop", "our RT-DETR-v2",
           "transformers' Trainer, our weights and rates", "ultralytics yolo11n")  # fmt: skip
# ultralytics' command takes trained weights of a whole detector alone.
WITH_TRAINED_BACKBONE = tuple(name for name in ON_SETS if not name.startswith("ultralytics"))
PRINTED = "own_data_cpu"  # the configuration that check_data.py prints without a GPU


@dataclass
class Ran:
    """The results of a training, except its detections, which are in `detections.json` of its folder."""

    steps: int
    images: int
    seconds: float
    lines: int  # of code that a user writes
    first: re.Pattern = re.compile(r"first step|step 1/")  # what is printed after the first step


def bench_peers(
    data: str = "shapes",
    minutes: float = 4.75,
    seeds: Sequence[int] = (0,),
    programs: Sequence[str] = ORDER,
) -> Iterator[dict]:
    """Measure this toolkit and other programs. Yield rows with `name`, `value` and `unit` as soon as they are measured:
    AP, AP50, steps a minute, images/s, peak memory of the main process, seconds from the start of the process to the
    end of the first step, and the lines of code that a user writes.

    Args:
        data: shapes, or bccd.
        minutes: length of each training.
        seeds: every program is trained once with each of them.
        programs: names from `ORDER`.

    Raises:
        BadInput: the pictures of bccd are not there.
    """
    plans = {"shapes": _shapes, "bccd": _bccd}[data]()
    yield from _each_program(data, plans, minutes, seeds, programs)


def bench_peers_masks(minutes: float = 4.75, seeds: Sequence[int] = (0,)) -> Iterator[dict]:
    """Measure Mask R-CNN on the bundled shapes here and in torchvision's reference loop: rows as of `bench_peers`, and
    AP and AP50 of masks."""
    programs = ("our Faster R-CNN", "torchvision's reference loop")
    yield from _each_program("shapes_masks", _shapes() | {"config": "shapes_masks"}, minutes, seeds, programs)


def bench_peers_sets(
    minutes: float = 5,
    seeds: Sequence[int] = (0,),
    programs: Sequence[str] = ON_SETS,
) -> Iterator[dict]:
    """Measure what a stranger gets: rows as of `bench_peers` for each data set in `runs/peers/sets/`.

    A set is a folder there, in any form that is recognised, with training and validation data. All programs get images
    of 256 px, and ours the configuration `own_data_cpu.yaml` as `check_data.py` prints it; nothing is chosen by set.

    Args:
        minutes, seeds, programs: as of `bench_peers`.

    Raises:
        BadInput: there is no data set.
    """
    for name, plans in _sets():
        yield from _each_program(name, plans, minutes, seeds, programs)


def bench_peers_trained(
    minutes: float = 5,
    seeds: Sequence[int] = (0,),
    programs: Sequence[str] = WITH_TRAINED_BACKBONE,
) -> Iterator[dict]:
    """Measure the same with a trained backbone in all programs, whose weights are the only file in
    `runs/peers/backbone/`; its name is that of the timm model, such as `tf_efficientnet_lite0.pth`.

    Args:
        minutes, seeds, programs: as of `bench_peers`.

    Raises:
        BadInput: there is no data set, or the folder does not hold exactly one file of weights.
    """
    folder = LOGS / "backbone"
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    if len(files) != 1:
        raise BadInput(f"{folder}: put one file of weights there, named as its timm model; it has {len(files)} files")
    trained = {"backbone": files[0].stem, "backbone_file": str(files[0].absolute())}
    for name, plans in _sets():
        yield from _each_program(f"{name}_trained", plans | trained, minutes, seeds, programs)


def _sets() -> Iterator[tuple[str, dict]]:
    """Yield the name and the plan of each data set, which is written as COCO files for all programs."""
    sets = LOGS / "sets"
    folders = sorted(path for path in sets.iterdir() if path.is_dir()) if sets.is_dir() else []
    if not folders:
        raise BadInput(f"{sets}: put data sets there, a folder each, with training and validation data")
    for source in folders:
        coco = (LOGS / "sets_as_coco" / source.name).absolute()
        for split in ("train", "val"):
            table = open_dataset(split, path=source, on_error="drop")
            write_folder(table, coco, split, "coco", link=True)
        annotations = [str(coco / "annotations" / f"{split}.json") for split in ("train", "val")]
        images = [str(coco / split) for split in ("train", "val")]
        yield source.name, _plan(source.name, [*annotations, *images], 256, 4) | {"config": PRINTED}


def _each_program(
    data: str, plans: dict, minutes: float, seeds: Sequence[int], programs: Sequence[str]
) -> Iterator[dict]:
    for seed in seeds:
        for name in programs:
            folder = (LOGS / data / f"{re.sub('[^a-z0-9]+', '_', name.lower())}_{seed}").absolute()
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            plan = PeerPlan(**plans, minutes=minutes, seed=seed, folder=str(folder), program=name)
            title = f"peers, {data}, {name}, seed {seed}"
            try:
                yield from _measured(title, plan)
            except (RuntimeError, OSError, ValueError, KeyError) as error:
                print(f"{title}: {error}", file=sys.stderr, flush=True)
                yield row(f"{title}, failed", float("nan"), " ".join(str(error).split())[-300:].replace("|", "/"))


def _shapes() -> dict:
    root = ensure_shapes()
    paths = [root / "annotations" / "train.json", root / "annotations" / "val.json", root / "train", root / "val"]
    return _plan("shapes", [str(path) for path in paths], 128, 8)


def _bccd() -> dict:
    if not Path(BCCD[0]).is_file():
        raise BadInput(f"{BCCD[0]}: not found. Run it from a folder that contains bccd/, see docs/results.md.")
    return _plan("bccd", [str(Path(path).absolute()) for path in BCCD], 256, 4)


def _plan(data: str, paths: Sequence[str], side: int, batch: int) -> dict:
    train, val, train_images, val_images = paths
    return {
        "data": data,
        "config": data,
        "train": train,
        "val": val,
        "train_images": train_images,
        "val_images": val_images,
        "side": side,
        "batch": batch,
    }


def _measured(title: str, plan: PeerPlan) -> Iterator[dict]:
    run = _ours if plan.program in OURS else _ultralytics if plan.program.startswith("ultralytics") else _program
    watch = Watch(Path(plan.folder))
    ran = run(plan, watch)
    for name, value in judged(plan.val, Path(plan.folder) / "detections.json").items():
        yield row(f"{title}, {name}", value, "")
    yield row(f"{title}, steps", 60 * ran.steps / ran.seconds, "steps/min")
    yield row(f"{title}, speed", ran.images / ran.seconds, "images/s")
    yield row(f"{title}, memory", watch.peak_gib, "GiB")
    yield row(f"{title}, to the end of the first step", watch.first_s, "s")
    yield row(f"{title}, code", ran.lines, "lines")


class Watch:
    """A runner of commands, which writes their output to `log.txt` of a folder, and measures a training among them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.peak_gib = float("nan")
        self.first_s = float("nan")

    def run(self, words: Sequence, first: re.Pattern | None = None, environment: dict | None = None) -> str:
        """Run a command and return its output. Raises RuntimeError if the command fails.

        words: the command and its arguments. first: pattern of a line that is printed at the end of the first step of a
        training; the time until then and the peak memory are then measured. environment: variables to add.
        """
        words = [str(word) for word in words]
        said = []
        began = time.perf_counter()
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | (environment or {})
        with (self.folder / "log.txt").open("a") as log:
            print("$", *words, file=log)
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
            process = subprocess.Popen(words, env=environment, cwd=self.folder, **pipes)
            for line in process.stdout:
                if first is not None and self.first_s != self.first_s and first.search(line):
                    self.first_s = time.perf_counter() - began
                log.write(line)
                said.append(line)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}: {''.join(said[-20:])}")
        if first is not None:
            self.peak_gib = usage.ru_maxrss / 2**20
        return "".join(said)


def judged(annotations: str, detections: Path) -> dict[str, float]:
    """Return AP and AP50 of COCO results, computed with pycocotools, and those of their masks, if they have masks.
    annotations, detections: files."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    values = {}
    with redirect_stdout(sys.stderr):
        truth = COCO(annotations)
        found = read_json(detections, list)
        if not found:
            return {"AP": 0.0, "AP50": 0.0}
        titles = {"bbox": "AP"}
        if "segmentation" in found[0]:
            titles["segm"] = "AP of masks"
        for kind, title in titles.items():
            evaluation = COCOeval(truth, truth.loadRes(found), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            values[title] = float(evaluation.stats[0])
            values[title.replace("AP", "AP50")] = float(evaluation.stats[1])
    return values


def _ours(plan: PeerPlan, watch: Watch) -> Ran:
    """Run a script of ours with the configuration as it is, but in float32 and without an evaluation during
    training, which would choose the best weights for the bundled pictures."""
    script, config = OURS[plan.program]
    flags = {"run.name": "run", "run.output_dir": watch.folder, "run.seed": plan.seed, "run.max_minutes": plan.minutes,
             "run.precision": "no", "run.eval_every": 0, "run.save_every": 0, "run.epochs": 10000}  # fmt: skip
    if plan.data != "shapes":
        flags |= {"data.format": "coco", "data.train": plan.train, "data.val": plan.val, "data.image_size": plan.side,
                  "data.batch_size_per_device": plan.batch}  # fmt: skip
        if plan.train_images == plan.val_images:  # else the folders are found by the names of the splits
            flags["data.image_dir"] = plan.train_images
    if plan.backbone:
        flags |= {"model.backbone": plan.backbone, "model.pretrained_backbone": plan.backbone_file}
    words = [f"--{key}={value}" for key, value in flags.items()]
    path = CONFIGS / f"{config.format(plan.config)}.yaml"
    watch.run([sys.executable, SCRIPTS / f"{script}.py", "--config", path, *words], Ran.first)
    saved = watch.folder / "detections.json"
    watch.run([sys.executable, SCRIPTS / "evaluate.py", watch.folder / "run", "--save", saved])
    trained = [each for each in read_metrics(watch.folder / "run" / "metrics.jsonl") if "train/loss" in each]
    steps = trained[-1]["step"]
    return Ran(steps, steps * plan.batch, 60 * plan.minutes, 1)


def _program(plan: PeerPlan, watch: Watch) -> Ran:
    """Run one of `PROGRAMS` in its own process."""
    write_json(watch.folder / "plan.json", asdict(plan))
    paths = os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent)])
    detr = {"DETR_FOLDER": str((LOGS / "detr").absolute())}
    words = [sys.executable, "-m", "benches.peer_programs", watch.folder / "plan.json"]
    watch.run(words, Ran.first, {"PYTHONPATH": paths} | detr)
    return Ran(**read_json(watch.folder / "trained.json"), lines=lines_of(PROGRAMS[plan.program]))


def _ultralytics(plan: PeerPlan, watch: Watch) -> Ran:
    """Run ultralytics by its command line alone, with its defaults: batches of 16, its own rates and augmentations."""
    yolo = Path(sys.executable).with_name("yolo")
    data = watch.folder / "yolo"
    if not yolo.is_file():
        raise RuntimeError("no command yolo: install the extra 'peers'")
    for split, annotations, images in (("train", plan.train, plan.train_images), ("val", plan.val, plan.val_images)):
        table = open_dataset(annotations, format="coco", image_dir=images)
        write_folder(table, data, split, "yolo", link=True)
    common = [f"imgsz={plan.side}", "device=cpu", f"project={watch.folder}", "exist_ok=True", "plots=False"]
    environment = {"YOLO_CONFIG_DIR": str(watch.folder), "YOLO_OFFLINE": "true"}
    train = ["train", f"data={data / 'data.yaml'}", "model=yolo11n.yaml", "pretrained=False", f"seed={plan.seed}",
             f"time={plan.minutes / 60}", "val=False", "workers=1", "name=trained"]  # fmt: skip
    watch.run([yolo, "detect", *train, *common], re.compile(r"\s1/\d+\s"), environment)
    weights = watch.folder / "trained" / "weights" / "last.pt"
    predict = ["predict", f"model={weights}", f"source={data / 'images' / 'val'}", "conf=0.001", "max_det=100",
               "save_txt=True", "save_conf=True", "save=False", "name=found"]  # fmt: skip
    watch.run([yolo, "detect", *predict, *common], environment=environment)
    write_json(watch.folder / "detections.json", _from_yolo(table, watch.folder / "found" / "labels"))
    with (watch.folder / "trained" / "results.csv").open() as file:
        epochs = list(csv.DictReader(file, skipinitialspace=True))
    images = len(list((data / "images" / "train").iterdir()))
    return Ran(len(epochs) * -(-images // 16), len(epochs) * images, float(epochs[-1]["time"]), 1)


def _from_yolo(table: DetectionTable, folder: Path) -> list[dict]:
    """Read COCO results from text files named as the images: class, centre, size (fractions of the image), score."""
    results = []
    for image in table.image_rows():
        path = folder / f"{Path(image.file_name).stem}.txt"
        for line in path.read_text().splitlines() if path.exists() else ():
            label, x, y, w, h, score = map(float, line.split())
            box = [(x - w / 2) * image.width, (y - h / 2) * image.height, w * image.width, h * image.height]
            category = table.categories[int(label)].id
            results.append({"image_id": image.image_id, "category_id": category, "bbox": box, "score": score})
    return results
