"""The five scripts on a GPU: speed, memory, waits, other loops on the same model, and whether resuming is exact there.

    python scripts/benchmark.py --only gpu --out runs/gpu     # `make gpu`; an hour or so, runs/gpu/ is what to send in

Models of the published recipes on random weights and the bundled pictures, enlarged to the recipes' sizes and at most
mirrored. Each training is a process of its own: if one fails, only its rows are lost, and the unit of one row says why.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import yaml

from toolkit.base.errors import BadInput
from toolkit.base.files import usable_cores
from toolkit.run.metrics_log import read_metrics
from toolkit.tools.shapes import ensure_shapes
from toolkit.tools.watch import steps_alone

from .measuring import row

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
WAIT = "called a synchronizing CUDA operation"  # as torch.cuda.set_sync_debug_mode says it
RECIPE_CONFIGS = {  # the recipe of each script's model
    "train_detr": "detr/rtdetr_v2_r18_coco",
    "train_faster_rcnn": "faster_rcnn/faster_rcnn_r50_fpn_coco",
    "train_ssd": "ssd/mobilevit_s_coco",
    "train_yolov3": "yolov3/darknet53_coco",
    "train_sgg": "sgg/vg150",
}
ON_SHAPES = """--data.format shapes --data.train train --data.val val --data.name null --data.image_dir null
--data.augment null --data.multi_scale [] --data.photometric false --data.zoom_out 1 --data.iou_crop false
--data.cache_images true --eval.test_split null""".split()
BF16 = {"run.precision": "bf16", "run.tf32": "true"}
MODES = {
    "float32": {"run.precision": "no", "run.tf32": "false"},
    "TF32": {"run.precision": "no", "run.tf32": "true"},
    "bf16": BF16,
    "fp16": BF16 | {"run.precision": "fp16"},
    "bf16, compiled": BF16 | {"optim.compile": "true"},
    "bf16, largest batch": BF16,
}
EXACT = MODES["float32"] | {"run.deterministic": "true", "schedule.name": "constant", "schedule.warmup_steps": 0}
# One step of plain descent at rate 1, which moves the weights by their gradient, on images of one size
ONE_STEP = """--optim.name sgd --optim.momentum 0 --optim.lr 1 --optim.weight_decay 0 --optim.max_norm 0
--optim.ema_decay 0 --eval.metric_for_best bbox_AP --model.norm group""".split()
TIMEOUT_S = 1200


def bench_gpu(
    scripts: Sequence[str] = tuple(RECIPE_CONFIGS),
    modes: Sequence[str] = tuple(MODES),
    resumed: Sequence[str] = tuple(RECIPE_CONFIGS),
    warm_up: int = 15,
    steps: int = 60,
    waited: int = 5,
    most: int = 256,
    options: Sequence[str] = (),
) -> Iterator[dict]:
    """Measure the scripts on a GPU. Yields rows with `name`, `value`, `unit`, and some with `required`, as they are
    measured.

    scripts, modes: whose steps are measured. resumed: scripts that are killed and resumed. warm_up, steps, waited:
    steps that are not measured, that are timed, and whose waits are counted. most: the first batch size to try for the
    largest one. options: further settings of every training.

    Raises BadInput without a GPU that CUDA supports.
    """
    if not torch.cuda.is_available():
        raise BadInput("no GPU: torch.cuda.is_available() is False. Run it where there is one, with a torch for it.")
    ensure_shapes()
    plan = {"warm_up": warm_up, "steps": steps, "waited": waited}
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch))
        for script in scripts:
            for mode in modes:
                arguments = [*_recipe(script), *options], mode, plan, most
                yield from bench.guarded(f"{script}, {mode}", bench.speed, script, *arguments)
        for script in resumed:
            yield from bench.guarded(f"{script}, resumed", bench.resumes, script, options)
        yield from bench.guarded("CPU and GPU", bench.moves, options)
        if torch.cuda.device_count() > 1:
            yield from bench.guarded("two GPUs", bench.two_processes, options)
        else:
            print("one GPU: two processes, and a rank that is killed, were not tried", file=sys.stderr, flush=True)


def _recipe(script: str) -> list[str]:
    random = [] if script == "train_sgg" else ["--model.pretrained_backbone", "false"]  # train_sgg has no such setting
    workers = ["--data.workers", str(max(1, min(8, usable_cores() - 1)))]
    return ["--config", str(ROOT / "configs" / f"{RECIPE_CONFIGS[script]}.yaml"), *ON_SHAPES, *random, *workers]


class Bench:
    """The trainings in `scratch`: their start, and what they write."""

    def __init__(self, scratch: Path):
        paths = os.pathsep.join([str(SCRIPTS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": paths}
        self.scratch = scratch

    def guarded(self, title: str, measure: Callable[..., Iterator[dict]], *arguments) -> Iterator[dict]:
        """Yield the rows of `measure`, below the title; if it fails, one more whose unit is the end of the error
        message."""
        try:
            for each in measure(*arguments):
                yield each | {"name": f"gpu, {title}, {each['name']}"}
        except (RuntimeError, OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
            print(f"gpu, {title}: {error}", file=sys.stderr, flush=True)
            last = " ".join(str(error).split())[-300:].replace("|", "/")
            yield row(f"gpu, {title}, failed", float("nan"), last)

    def speed(self, script: str, arguments: list[str], mode: str, plan: dict, most: int) -> Iterator[dict]:
        """Measure one mode, and the other loops that train the same model in it."""
        if mode == "bf16, largest batch":
            arguments = [*arguments, *self._largest_batch(script, arguments, MODES[mode], most)]
        ours = self._measured(script, arguments, MODES[mode], plan)
        yield row("batch", ours["batch"], "images")
        yield row("waiting for data", 100 * ours["data_share"], "%")
        yield from _speed_rows("", ours)
        for peer in [peer for peer, (of, _) in PEERS.items() if of == script and mode in ("TF32", "bf16")]:
            other = self._measured(script, arguments, MODES[mode], plan | {"peer": peer})
            yield from _speed_rows(f"{peer}, ", other)
            yield row(f"ours / {peer}", ours["images_per_s"] / other["images_per_s"], "x")

    def _measured(self, script: str, arguments: Sequence[str], settings: Mapping, plan: dict) -> dict:
        total = plan["warm_up"] + plan["steps"] + plan["waited"] + 1
        folder = self.train(script, arguments, {"run.max_steps": total, **settings}, plan)
        return json.loads((folder / "measured.json").read_text())

    def _largest_batch(self, script: str, arguments: Sequence[str], settings: Mapping, most: int) -> list[str]:
        out = self.scratch / f"{script}.yaml"
        command = [sys.executable, SCRIPTS / "find_batch_size.py", SCRIPTS / f"{script}.py", "--out", out]
        self._run([*command, "--most", most, *arguments, *(f"--{key}={value}" for key, value in settings.items())])
        batch = yaml.safe_load(out.read_text())["data"]["batch_size_per_device"]
        return ["--data.batch_size_per_device", str(batch), "--optim.accumulation_steps", "1"]

    def resumes(self, script: str, small: Sequence[str]) -> Iterator[dict]:
        """Run eight steps of the bundled configuration: twice without a break, and once killed in the sixth step and
        resumed."""
        settings = EXACT | {"run.save_every": 4}
        whole, again = (self.train(script, small, settings, {"until": 8}) / "run" for _ in range(2))
        killed = self.train(script, small, settings, {"kill": 6}, ends=-signal.SIGKILL)
        resumed = self.train(script, small, settings | {"run.resume": "latest"}, {"until": 8}, killed) / "run"
        expected = _tensors(whole)
        for name, folder, required in (("the same run twice", again, ""), ("after a kill", resumed, "as many, or 0")):
            found = _tensors(folder)
            count = sum(not torch.equal(value, found[key]) for key, value in expected.items())
            yield row(f"tensors that differ, {name}", count, f"of {len(expected)} tensors") | {"required": required}
            apart = max(_relative_difference(value, found[key]) for key, value in expected.items())
            yield row(f"largest difference of a tensor, {name}", apart, "relative to its norm")

    def moves(self, small: Sequence[str]) -> Iterator[dict]:
        """Train an SSD on the CPU alone, and on the CPU, the GPU and the CPU again."""
        settings = EXACT | {"run.save_every": 2, "run.resume": "latest"}
        on_cpu = {"ACCELERATE_USE_CPU": "true"}
        alone = self.train("train_ssd", small, settings, {"until": 6}, environment=on_cpu)
        folder = None
        for until, where in ((2, on_cpu), (4, {}), (6, on_cpu)):
            folder = self.train("train_ssd", small, settings, {"until": until}, folder, environment=where)
        expected = _losses(alone / "run")
        losses = _losses(folder / "run")
        apart = max(abs(losses[step] / loss - 1) for step, loss in expected.items())
        yield row("CPU, GPU, CPU: largest difference of a loss", apart, "relative") | {"required": "≤ 0.01"}

    def two_processes(self, small: Sequence[str]) -> Iterator[dict]:
        """Train an SSD on two processes and on one with the batch of both; measure how soon one ends when the other
        is killed."""
        arguments = [*small, *ONE_STEP]
        weights = []
        for processes in (1, 2):
            settings = EXACT | {"run.max_steps": 1, "data.batch_size_per_device": 8 // processes}
            folder = self.train("train_ssd", arguments, settings, {}, processes=processes) / "run"
            floats = {key: value for key, value in _tensors(folder).items() if value.is_floating_point()}
            weights.append(torch.cat([floats[key].double().flatten() for key in sorted(floats) if "model/" in key]))
            gradient = read_metrics(folder / "metrics.jsonl")[0]["train/grad_norm"]
        apart = float((weights[0] - weights[1]).norm()) / gradient
        yield row("difference of a gradient from one process", apart, "relative") | {"required": "≤ 1e-5"}
        killed = self.train("train_ssd", small, EXACT, {"kill": 4, "rank": 1}, processes=2, ends=1) / "killed"
        seconds = time.time() - killed.stat().st_mtime
        yield row("from the kill of one to the end of the other", seconds, "s") | {"required": "≤ 30"}

    def train(self, script: str, arguments: Sequence[str], settings: Mapping, plan: dict, folder: Path | None = None,
              ends: int = 0, processes: int = 1, environment: Mapping[str, str] | None = None) -> Path:  # fmt: skip
        """Train under a plan, see `Driven`, and return the folder that contains its `run/`; an existing `folder`
        continues. Raises RuntimeError with the last output if it does not end as expected."""
        folder = folder or Path(tempfile.mkdtemp(dir=self.scratch))
        (folder / "plan.json").write_text(json.dumps(plan))
        words = steps_alone(SCRIPTS / f"{script}.py", arguments, folder / "run", 1000, settings)[2:]
        self._run([sys.executable, "-m", "benches.gpu", folder, script, *words], ends, processes, environment)
        return folder

    def _run(self, command: Sequence, ends: int = 0, processes: int = 1, environment: Mapping | None = None) -> None:
        of_ranks = [{"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}]
        if processes > 1:  # without a launcher, which would stop the others itself
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            shared = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
            }
            of_ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
        words = [str(word) for word in command]
        started = []
        with ExitStack() as held:
            for rank in of_ranks:
                output = held.enter_context(tempfile.NamedTemporaryFile("w", dir=self.scratch))
                env = self.environment | dict(environment or {}) | rank
                started.append((subprocess.Popen(words, env=env, stdout=output, stderr=subprocess.STDOUT), output))
            held.callback(lambda: [process.kill() for process, _ in started])
            codes = [process.wait(TIMEOUT_S) for process, _ in started]
            if codes[0] != ends:
                said = "\n".join(Path(output.name).read_text(errors="replace")[-3000:] for _, output in started)
                raise RuntimeError(f"{' '.join(words)} ended with {codes}:\n{said}")


def _speed_rows(of: str, measured: Mapping) -> list[dict]:
    waits = row(f"{of}waits", measured["waits"], "waits/step") | {"places": measured["places"]}
    speed = row(f"{of}speed", measured["images_per_s"], "images/s")
    return [speed, row(f"{of}memory", measured["peak_gib"], "GiB"), waits]


def _tensors(run: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the run's latest checkpoint, by file and name."""
    from safetensors.torch import load_file

    files = sorted((run / "checkpoints" / "latest").glob("*.safetensors"))
    return {f"{file.stem}/{name}": value for file in files for name, value in load_file(file).items()}


def _relative_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the norm of the difference in float64, relative to the norm of `expected`."""
    difference = (expected.double() - found.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


def _losses(run: Path) -> dict[int, float]:
    return {each["step"]: each["train/loss"] for each in read_metrics(run / "metrics.jsonl") if "train/loss" in each}


# ---- inside a training ----


class Measured(Exception):
    """Raised when everything was measured in a training."""


class Driven:
    """Clock and counter of a training in this process.

    plan: `kill`: the step (from 1) in which the process of `rank` (default 0) ends as by `kill -9`; `until`: steps
    after which the training is left; or `warm_up`, `steps` and `waited`, see `bench_gpu`.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.plan = json.loads((folder / "plan.json").read_text())
        self.ticks = 0
        self.images = 0
        self.began = 0.0
        self.data_s = 0.0
        self.measured = {}
        self.warned = []

    def tick(self, done: int, images: int, data_s: float = 0.0) -> None:
        """Count a step before it begins. done: steps of the run so far. data_s: seconds spent waiting for its batch."""
        plan = self.plan
        self.ticks += 1
        if done + 1 == plan.get("kill") and int(os.environ.get("RANK", "0")) == plan.get("rank", 0):
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if done >= plan.get("until", done + 1):
            raise Measured
        if "steps" in plan:
            self._measure(self.ticks - plan["warm_up"] - 1, images, data_s)

    def _measure(self, timed: int, images: int, data_s: float) -> None:
        if timed == 0:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.began = time.perf_counter()
        if timed == self.plan["steps"]:
            torch.cuda.synchronize()
            seconds = time.perf_counter() - self.began
            self.measured = {
                "images_per_s": self.images / seconds,
                "data_share": self.data_s / seconds,
                "batch": self.images / self.plan["steps"],
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            }
            warnings.simplefilter("always")
            warnings.showwarning = lambda *warning, **_: self.warned.append(warning)  # message, class, file, line
            torch.cuda.set_sync_debug_mode("warn")
        if timed == self.plan["steps"] + self.plan["waited"]:
            torch.cuda.set_sync_debug_mode("default")
            waits = [f"{file}:{line}" for message, _, file, line, *_ in self.warned if WAIT in str(message)]
            places = Counter(place.removeprefix(f"{ROOT}/").split("site-packages/")[-1] for place in waits)
            self.measured |= {"waits": len(waits) / self.plan["waited"], "places": places}
            (self.folder / "measured.json").write_text(json.dumps(self.measured))
            raise Measured
        if timed >= 0:
            self.images += images
            self.data_s += data_s

    def windows(self, t, plain: Callable[[], Iterator]) -> Iterator:
        """Yield the windows of the training, with a tick before each step."""
        began = time.perf_counter()
        for window in plain():
            self.tick(t.step, sum(map(len, window.batches)), time.perf_counter() - began)
            yield window
            began = time.perf_counter()


def drive(folder: Path, script: str, arguments: list[str]) -> int:
    """Run a script in this process under the plan in `folder`. Returns its exit code, 0 once everything is measured."""
    from toolkit.run.command_line import run_script
    from toolkit.run.session import Session

    sys.path.insert(0, str(SCRIPTS))
    module = importlib.import_module(script)
    driven = Driven(folder)
    make = Session.training

    def training(s, *objects):
        t = make(s, *objects)
        if "peer" in driven.plan:
            PEERS[driven.plan["peer"]][1](t, driven)
        t.windows = partial(driven.windows, t, t.windows)
        return t

    Session.training = training
    try:
        return run_script(module.main, module.Config, module.DEFAULT_CONFIG, arguments)
    except Measured:
        return 0


# ---- other loops, on the same model, batches, precision and rate ----


def torchvision_loop(t, driven: Driven) -> None:
    """Train as torchvision's references do: its model and losses, all of them read for the log in every step. Pixels
    become floats on the GPU; the references do so in the workers, and copy four times the bytes."""
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    from torchvision.ops import FrozenBatchNorm2d

    frozen = {"norm_layer": FrozenBatchNorm2d, "trainable_layers": 3}
    backbone = resnet_fpn_backbone(backbone_name="resnet50", weights=None, **frozen)
    device = t.accelerator.device
    count = len(t.data["training"].class_names) + 1
    done = 0
    model = FasterRCNN(backbone, num_classes=count).to(device).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, weight_decay=1e-4)
    while True:
        for batch in t.data.loader:
            driven.tick(done, len(batch))
            cropped = [image[:, :h, :w] for image, (h, w) in zip(batch.images, batch.sizes.tolist(), strict=True)]
            images = [image.to(device).float() / 255 for image in cropped]
            targets = [{"boxes": each["boxes"].to(device), "labels": each["labels"].to(device) + 1}
                       for each in batch.targets]  # fmt: skip
            with t.accelerator.autocast():
                losses = model(images, targets)
                total = sum(losses.values())
            [loss.item() for loss in (total, *losses.values())]
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            done += 1
        t.sampler.set_epoch(t.sampler.epoch + 1)


def transformers_loop(t, driven: Driven) -> None:
    """Run transformers' Trainer on the model inside ours, with its own losses; samples of our data set are
    normalised in the workers."""
    from accelerate.state import AcceleratorState
    from transformers import AutoModelForObjectDetection, Trainer, TrainerCallback, TrainingArguments

    from toolkit.base.box_ops import normalize_boxes, xyxy_to_cxcywh
    from toolkit.data.sampling import SampleKey

    dataset = t.data.loader.dataset.dataset
    batch = len(next(iter(t.data.loader)))

    def collate(keys: list[SampleKey]) -> dict:
        samples = [dataset[key] for key in keys]
        images = torch.stack([image for image, _ in samples]).float() / 255
        size_hw = torch.tensor(images.shape[-2:])
        labels = [
            {"class_labels": target["labels"], "boxes": normalize_boxes(xyxy_to_cxcywh(target["boxes"]), size_hw)}
            for _, target in samples
        ]
        return {"pixel_values": images, "labels": labels}

    class Ticking(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs) -> None:
            driven.tick(state.global_step, args.per_device_train_batch_size)

    bf16 = t.accelerator.mixed_precision == "bf16"
    AcceleratorState._reset_state()  # or it would refuse another precision
    arguments = TrainingArguments(
        str(driven.folder / "trainer"), per_device_train_batch_size=batch, max_steps=10**6, logging_steps=10,
        save_strategy="no", report_to="none", remove_unused_columns=False,
        dataloader_num_workers=t.data.loader.num_workers, max_grad_norm=0.1, learning_rate=1e-4, disable_tqdm=True,
        bf16=bf16,
    )  # fmt: skip
    model = AutoModelForObjectDetection.from_config(t.detector.model.config)
    keys = [SampleKey(0, index) for index in range(len(dataset))]
    Trainer(model, arguments, collate, keys, callbacks=[Ticking()]).train()


# name -> the script whose model it trains, and the loop
PEERS = {
    "torchvision's reference loop": ("train_faster_rcnn", torchvision_loop),
    "transformers' Trainer": ("train_detr", transformers_loop),
}


if __name__ == "__main__":
    sys.exit(drive(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
