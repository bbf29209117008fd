"""Prediction beside other programs, with the detectors that `peers_sets` has trained, all at 256 px.

    python scripts/benchmark.py --only peers_predict --out runs/peers/table_predict  # after peers_sets

Each program is a process of its own. In Python, the same RT-DETR-v2 predicts decoded pictures one by one, here and in
transformers' pipeline. As commands, `predict.py` and ultralytics' read the files, and write detections but no pictures.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from toolkit.base.errors import BadInput

from .measuring import row
from .peers import LOGS, SCRIPTS, Watch

SIDE = 256  # pixels; of the images in which all were trained
THRESHOLD = 0.3
WARM_UP = 3  # pictures
RT_DETR = "our_rt_detr_v2_0"
FASTER_RCNN = "our_faster_r_cnn_0"
YOLO = "ultralytics_yolo11n_0"
_FIRST = re.compile("")  # so that the peak memory is measured
IN_PYTHON = ("our open_predictor", "transformers' pipeline")


def bench_peers_predict(data: Sequence[str] | None = None) -> Iterator[dict]:
    """Measure the prediction of the validation pictures of data sets: rows with `name`, `value` and `unit`.

    Those of commands are the seconds of the whole command with all pictures, the images/s without what a command with
    one picture takes, and the peak memory of its process.

    data: names of the sets; None: all that `bench_peers_sets` has trained.

    Raises:
        BadInput: no detector is there.
    """
    trained = sorted(path.parents[1].name for path in LOGS.glob(f"*/{RT_DETR}/run"))
    names = trained if data is None else list(data)
    if not names:
        raise BadInput(f"{LOGS}: no trained detectors; run benchmark.py --only peers_sets first")
    for name in names:
        folder = (LOGS / name).absolute()
        pictures = sorted((LOGS / "sets_as_coco" / name / "val").absolute().iterdir())
        for program in IN_PYTHON:
            watch = Watch(_fresh(folder, program))
            words = [sys.executable, "-m", "benches.peers_predict", program, folder / RT_DETR / "run", *pictures]
            paths = {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent)])}
            said = watch.run(words, _FIRST, paths)
            speed = json.loads(said.splitlines()[-1])
            yield row(f"prediction, {name}, {program}, RT-DETR-v2, speed", speed, "images/s")
            yield row(f"prediction, {name}, {program}, RT-DETR-v2, memory", watch.peak_gib, "GiB")
        for program, command in _commands(folder).items():
            yield from _of_command(f"prediction, {name}, {program}", _fresh(folder, program), command, pictures)


def _fresh(folder: Path, program: str) -> Path:
    made = folder / f"predicted by {program}"
    made.mkdir(exist_ok=True)
    return made


def _commands(folder: Path) -> dict:
    """Return, by name, functions that make the words of a command from pictures and a folder for its output."""

    def ours(detector: str):
        words = [sys.executable, SCRIPTS / "predict.py", folder / detector / "run"]
        how = ["--no-pictures", "--overwrite", "--score-threshold", THRESHOLD, "--device", "cpu", "--out"]
        return lambda pictures, out: [*words, *pictures, *how, out]

    def theirs(pictures: Sequence[Path], out: Path) -> list:
        files = out.with_suffix(".txt")
        files.write_text("\n".join(str(picture) for picture in pictures))
        weights = folder / YOLO / "trained" / "weights" / "last.pt"
        yolo = Path(sys.executable).with_name("yolo")
        how = [f"imgsz={SIDE}", f"conf={THRESHOLD}", "device=cpu", "save=False", "save_txt=True", "verbose=False"]
        return [yolo, "detect", "predict", f"model={weights}", f"source={files}", *how, f"project={out}"]

    return {
        "our predict.py, RT-DETR-v2": ours(RT_DETR),
        "our predict.py, Faster R-CNN": ours(FASTER_RCNN),
        "ultralytics' command, yolo11n": theirs,
    }


def _of_command(title: str, folder: Path, command, pictures: Sequence[Path]) -> Iterator[dict]:
    seconds = []
    for some in (pictures[:1], pictures):
        watch = Watch(folder)
        environment = {"YOLO_CONFIG_DIR": str(folder), "YOLO_OFFLINE": "true"}
        began = time.perf_counter()
        watch.run(command(some, folder / f"of_{len(some)}"), _FIRST, environment)
        seconds.append(time.perf_counter() - began)
    yield row(f"{title}, whole command", seconds[1], "s")
    yield row(f"{title}, speed", (len(pictures) - 1) / (seconds[1] - seconds[0]), "images/s")
    yield row(f"{title}, memory", watch.peak_gib, "GiB")


def _in_python(program: str, run: Path, files: Sequence[str]) -> float:
    """Predict decoded pictures one by one and return images/s; the first ones are not counted."""
    from PIL import Image

    pictures = [Image.open(file).convert("RGB") for file in files]
    if program == IN_PYTHON[0]:
        from toolkit.tools.predict.open import open_predictor

        predictor = open_predictor(run / "final")

        def predict(picture: Image.Image) -> object:
            return predictor(picture, THRESHOLD)
    else:
        from transformers import pipeline

        pipe = pipeline("object-detection", model=str(run / "final"), device="cpu")

        def predict(picture: Image.Image) -> object:
            return pipe(picture, threshold=THRESHOLD)

    for picture in pictures[:WARM_UP]:
        predict(picture)
    began = time.perf_counter()
    for picture in pictures[WARM_UP:]:
        predict(picture)
    return (len(pictures) - WARM_UP) / (time.perf_counter() - began)


if __name__ == "__main__":
    print(_in_python(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
