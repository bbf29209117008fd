"""What an item of the bench measures; each yields rows with `name`, `value`, `unit`, and some with `required`.

The rows of a speed are told by the training that measures them.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import yaml

from toolkit.base.files import usable_cores
from toolkit.run.metrics_log import read_metrics
from toolkit.tools.shapes import ensure_shapes

from ..measuring import row
from .loops import bare_loop, torchvision_loop, transformers_loop
from .trainings import ROOT, SCRIPTS, Plan, Trainings

RECIPES = {  # the configuration of each script's model, and what fits any GPU of 16 GB
    "train_detr": ["detr/rtdetr_v2_r18_coco", "--data.batch_size_per_device", "16"],
    "train_faster_rcnn": ["faster_rcnn/faster_rcnn_r50_fpn_coco"],
    "train_ssd": ["ssd/mobilevit_s_coco"],
    "train_yolov3": ["yolov3/darknet53_coco"],
    "train_sgg": ["sgg/vg150"],
}
# 960 pictures are whole batches of all of these sizes: no timed step has the smaller last one of an epoch
ON_SHAPES = """--data.format shapes --data.train train --data.val val --data.name null --data.image_dir null
--data.max_train_images 960 --data.augment null --data.multi_scale [] --data.photometric false --data.zoom_out 1
--data.iou_crop false --data.cache_images true --eval.test_split null""".split()
# `make gpu` at the sizes of the bundled configurations, on a device that is pretended
QUICK = "--data.image_size 64 --data.batch_size_per_device 2 --data.workers 0 --data.max_train_images 32".split()
BF16 = {"run.precision": "bf16", "run.tf32": "true"}
MODES = {
    "float32": {"run.precision": "no", "run.tf32": "false"},
    "TF32": {"run.precision": "no", "run.tf32": "true"},
    "bf16": BF16,
    "fp16": BF16 | {"run.precision": "fp16"},
    "bf16, two kernels tried": BF16,
    "bf16, two GPUs": BF16,
    "bf16, compiled": BF16 | {"optim.compile": "true"},
    "bf16, graphs": BF16 | {"optim.compile": "graphs"},
    "bf16, largest batch": BF16,
}
PEERS = {  # the other loop on a script's model
    "train_faster_rcnn": ("torchvision's reference loop", torchvision_loop),
    "train_detr": ("transformers' Trainer", transformers_loop),
    "train_ssd": ("bare loop", bare_loop),
}
EXACT = MODES["float32"] | {"run.deterministic": "true", "schedule.name": "constant", "schedule.warmup_steps": 0}
# One step of plain descent at rate 1, which moves the weights by their gradient, on images of one size
ONE_STEP = """--optim.name sgd --optim.momentum 0 --optim.lr 1 --optim.weight_decay 0 --optim.max_norm 0
--optim.ema_decay 0 --eval.metric_for_best bbox_AP --model.norm group""".split()
ON_CPU = {"ACCELERATE_USE_CPU": "true"}
LARGEST = 256  # the first batch size to try for the largest one


class Items:
    """The measurements.

    Args:
        trainings: starts them.
        quick: use tiny sizes and few steps, to see that everything runs.
        tell: is called with the rows that a training measures, inside of it, as soon as it has them.
    """

    def __init__(self, trainings: Trainings, quick: bool = False, tell: Callable[[dict], object] = print):
        self.trainings = trainings
        self.quick = quick
        self.tell = tell
        self.small = QUICK if quick else []
        # The timed steps end before the first epoch of RT-DETR-v2, which has 60 steps; the loop's clock averages 50
        self.timed = Plan(warm_up=8, steps=50, waited=4, profiled=4)
        if quick:
            self.timed = Plan(warm_up=1, steps=2, waited=1, profiled=1)

    def recipe(self, script: str) -> list[str]:
        """Return the arguments that train the model of a published recipe on the bundled pictures."""
        if self.quick:
            return list(QUICK)
        name, *arguments = RECIPES[script]
        config = ["--config", str(ROOT / "configs" / f"{name}.yaml")]
        random = [] if script == "train_sgg" else ["--model.pretrained_backbone", "false"]  # which train_sgg has not
        workers = ["--data.workers", str(max(1, min(8, usable_cores() - 1)))]
        return [*config, *ON_SHAPES, *arguments, *random, *workers]

    # ---- speed -------------------------------------------------------------------------------------------------------

    def speed(self, script: str, mode: str) -> Iterator[dict]:
        """Measure images/s, memory, waits and kernels of one mode, and in bf16 of the other loop on the same model."""
        arguments = self.recipe(script)
        if mode == "bf16, largest batch":
            arguments += self._largest_batch(script, arguments, MODES[mode])
        timed = replace(self.timed, kernels_tried=2 if mode == "bf16, two kernels tried" else 0)
        processes = 2 if mode == "bf16, two GPUs" else 1
        ours = self._images_per_s(script, arguments, MODES[mode], timed, processes=processes)
        if mode == "bf16" and script in PEERS:
            peer, loop = PEERS[script]
            other = self._images_per_s(script, arguments, MODES[mode], replace(timed, loop=loop), of=f"{peer}, ")
            yield row(f"ours / {peer}", ours / other, "x")

    def _images_per_s(
        self, script: str, arguments: Sequence[str], settings: Mapping, plan: Plan, of: str = "", processes: int = 1
    ) -> float:
        """Train under a plan, tell the rows that it measures, and return the speed. of: what their names begin with."""
        total = plan.warm_up + plan.steps + plan.waited + plan.profiled + 1
        settings = {"run.max_steps": total, "run.log_every": 50, **settings}
        plan = replace(plan, tell=lambda each: self.tell(each | {"name": f"{of}{each['name']}"}))
        folder = self.trainings.train(script, arguments, settings, plan, processes=processes)
        return float((folder / "images_per_s.txt").read_text())

    def _largest_batch(self, script: str, arguments: Sequence[str], settings: Mapping) -> list[str]:
        out = self.trainings.scratch / f"{script}.yaml"
        given = [*arguments, *(f"--{key}={value}" for key, value in settings.items())]
        most = "2" if self.quick else str(LARGEST)
        program = [SCRIPTS / "find_batch_size.py", SCRIPTS / f"{script}.py", "--out", out, "--most", most]
        _run([*program, *given])
        batch = yaml.safe_load(out.read_text())["data"]["batch_size_per_device"]
        return ["--data.batch_size_per_device", str(batch), "--optim.accumulation_steps", "1"]

    # ---- what must hold there as on a CPU ----------------------------------------------------------------------------

    def resumed(self, script: str) -> Iterator[dict]:
        """Run eight steps of the bundled configuration: twice without a break, and once killed in the sixth step and
        resumed."""
        settings = EXACT | {"run.save_every": 4}
        eight = Plan(until=8)
        whole = self.trainings.train(script, self.small, settings, eight)
        again = self.trainings.train(script, self.small, settings, eight)
        killed = self.trainings.train(script, self.small, settings, Plan(kill=6), expected=-signal.SIGKILL)
        resumed = self.trainings.train(script, self.small, settings | {"run.resume": "latest"}, eight, killed)
        expected = _tensors(whole)
        for name, folder, required in (("the same run twice", again, ""), ("after a kill", resumed, "as many, or 0")):
            found = _tensors(folder)
            count = sum(not torch.equal(value, found[key]) for key, value in expected.items())
            yield row(f"tensors that differ, {name}", count, f"of {len(expected)} tensors") | {"required": required}
            apart = max(_relative_difference(value, found[key]) for key, value in expected.items())
            yield row(f"largest difference of a tensor, {name}", apart, "relative to its norm")

    def parity(self, script: str) -> Iterator[dict]:
        """Compare the loss of the first step of the bundled configuration on the GPU with that on the CPU, in
        float32."""
        yield self._parity("loss of step 1", script, self.small)
        if script == "train_detr":  # if the devices draw unlike noise, this says whether the rest agrees
            without = [*self.small, "--model.num_denoising", "0"]
            yield self._parity("loss of step 1 without noisy queries", script, without)

    def _parity(self, name: str, script: str, arguments: Sequence[str]) -> dict:
        losses = []
        for environment in (ON_CPU, {}):
            folder = self.trainings.train(script, arguments, EXACT, Plan(until=2), environment=environment)
            losses.append(_losses(folder)[1])
        on_cpu, on_gpu = losses
        unit = "relative; more than 0.001 only where samples are drawn on the device"
        return row(f"{name}, GPU / CPU - 1", on_gpu / on_cpu - 1, unit)

    def moves(self) -> Iterator[dict]:
        """Train an SSD on the CPU alone, and on the CPU, the GPU and the CPU again."""
        settings = EXACT | {"run.save_every": 2, "run.resume": "latest"}
        train = self.trainings.train
        alone = train("train_ssd", self.small, settings, Plan(until=6), environment=ON_CPU)
        folder = None
        for until, environment in ((2, ON_CPU), (4, {}), (6, ON_CPU)):
            folder = train("train_ssd", self.small, settings, Plan(until=until), folder, environment=environment)
        losses = _losses(folder)
        apart = max(abs(losses[step] / loss - 1) for step, loss in _losses(alone).items())
        yield row("CPU, GPU, CPU: largest difference of a loss", apart, "relative") | {"required": "≤ 0.01"}

    def two_processes(self) -> Iterator[dict]:
        """Train an SSD on two processes and on one with the batch of both; measure how soon one ends when the other
        is killed."""
        arguments = [*self.small, *ONE_STEP]
        folders = []
        for processes in (1, 2):
            settings = EXACT | {"run.max_steps": 1, "data.batch_size_per_device": 8 // processes}
            folders.append(self.trainings.train("train_ssd", arguments, settings, Plan(), processes=processes))
        plan = Plan(kill=4, killed_rank=1)
        killed = self.trainings.train("train_ssd", self.small, EXACT, plan, processes=2, expected=1) / "killed"
        seconds = time.time() - killed.stat().st_mtime
        weights = []
        for folder in folders:
            floats = {key: value for key, value in _tensors(folder).items() if value.is_floating_point()}
            weights.append(torch.cat([floats[key].double().flatten() for key in sorted(floats) if "model/" in key]))
        gradient = read_metrics(folders[1] / "run" / "metrics.jsonl")[0]["train/grad_norm"]
        apart = float((weights[0] - weights[1]).norm()) / gradient
        yield row("difference of a gradient from one process", apart, "relative") | {"required": "≤ 1e-5"}
        yield row("from the kill of one to the end of the other", seconds, "s") | {"required": "≤ 30"}

    # ---- whole programs ----------------------------------------------------------------------------------------------

    def whole(self, script: str, precision: str) -> Iterator[dict]:
        """Train from start to end with averaged weights, a NaN in the second step and an evaluation; then evaluate,
        there and on the CPU, predict and export."""
        scratch = self.trainings.scratch
        flags = {
            "run.output_dir": scratch,
            "run.name": "run",
            "run.max_minutes": "null",
            "run.max_steps": 3 if self.quick else 60,
            "run.precision": precision,
            "run.on_nonfinite": "skip",
            "eval.test_split": "null",
        }
        words = [*self.small, *(f"--{key}={value}" for key, value in flags.items())]
        began = time.time()
        said = self.trainings.run(script, words, Plan(nan=2), scratch)
        yield row("training with a NaN", time.time() - began, f"s: {_lines(said, 'finite|skip|^AP ')}")
        run = scratch / "run"
        picture = next(path for path in sorted(ensure_shapes().rglob("*")) if path.suffix in (".png", ".jpg"))
        evaluate = [SCRIPTS / "evaluate.py", run]
        yield _timed("evaluate", evaluate, "^AP ")
        yield _timed("evaluate on the CPU", evaluate, "^AP ", environment=ON_CPU)
        yield _timed("predict", [SCRIPTS / "predict.py", run, picture, "--out", scratch / "found"], "found")
        yield _timed("export", [SCRIPTS / "export.py", run, "--out", scratch / "exported"], "onnx|differ")

    def out_of_memory(self) -> Iterator[dict]:
        """Train with 500 images in a batch, which must end with a sentence."""
        given = """--data.batch_size_per_device 500 --data.workers 0 --optim.accumulation_steps 1 --run.max_steps 2
        --run.name oom --run.precision no --run.output_dir""".split()
        words = [SCRIPTS / "train_detr.py", *self.recipe("train_detr"), *given, self.trainings.scratch]
        yield _timed("a batch of 500", words, "out of memory|Lower", expected=2)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the latest checkpoint of a training's run, by file and name."""
    from safetensors.torch import load_file

    files = sorted((folder / "run" / "checkpoints" / "latest").glob("*.safetensors"))
    return {f"{file.stem}/{name}": value for file in files for name, value in load_file(file).items()}


def _relative_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the norm of the difference in float64, relative to the norm of `expected`."""
    difference = (expected.double() - found.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


def _losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step of a training's run."""
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    return {each["step"]: each["train/loss"] for each in rows if "train/loss" in each}


def _run(words: Sequence, expected: int = 0, environment: Mapping[str, str] | None = None) -> str:
    """Run a program of ours and return what it prints. Raises RuntimeError with the end of that if it does not end
    with the code `expected`."""
    command = [sys.executable, *map(str, words)]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": paths} | dict(environment or {})
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", env=env, check=False)
    said = ended.stdout + ended.stderr
    print(f"---- {' '.join(command)}\n{said[-8000:]}", flush=True)
    if ended.returncode != expected:
        raise RuntimeError(f"{Path(command[1]).name} ended with {ended.returncode}, not {expected}: {said[-2000:]}")
    return said


def _timed(
    name: str, words: Sequence, shown: str, expected: int = 0, environment: Mapping[str, str] | None = None
) -> dict:
    """Run a program; return a row of its seconds, with the lines of what it prints that match `shown`."""
    began = time.time()
    said = _run(words, expected, environment)
    return row(name, time.time() - began, f"s: {_lines(said, shown)}")


def _lines(said: str, shown: str) -> str:
    found = [line.strip() for line in said.splitlines() if re.search(shown, line)]
    return " / ".join(found[-3:])[-300:].replace("|", "/")
