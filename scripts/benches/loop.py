"""The loops of the scripts against a bare PyTorch loop with the same model, criterion, clipping, optimizer and EMA.

Ours is each script's own `train_one_epoch` with the objects that its `main` builds, so everything is included: guard,
one reduction a step, meters, rows of metrics.jsonl, schedule, sampler. Both loops get the same batches in the same
order, and must compute the same losses.
"""

import contextlib
import copy
import io
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch
import train_detr
import train_faster_rcnn
import train_ssd
import train_yolov3
from torch import nn

from toolkit import session
from toolkit.base.batch import Batch
from toolkit.base.seeding import seed_micro_batch
from toolkit.data.batches import make_loader
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.models import options_class
from toolkit.run.settings import OptimConfig
from toolkit.run.training import Training
from toolkit.step.optim import build_optimizer, parameter_groups

from .measuring import medians
from .measuring import seconds as seconds_of

# As many layers, parameters and losses as DETR-R50 (ResNet-50 has 53 convolutions, this backbone 52), hardly any work.
DETR = {"architecture": "detr", "dropout": 0.0}
NARROW = DETR | {"backbone": "mobilenetv2_035", "d_model": 16, "heads": 2, "ffn_dim": 16, "num_queries": 10}
# title, script, model; dropout is off, so that both loops compute the same
WIDE = (
    ("loop, DETR-R50", train_detr, DETR | {"backbone": "resnet50"}),
    ("loop, Faster R-CNN-R50", train_faster_rcnn, {"backbone": "resnet50"}),
    ("loop, SSD-MobileViT-S", train_ssd, {"backbone": "mobilevit_s"}),
    ("loop, YOLOv3-Darknet53", train_yolov3, {"backbone": "darknet53"}),
)


def bench_loop(blocks: int = 5, steps: int = 5, narrow_blocks: int = 15, narrow_steps: int = 10) -> list[dict]:
    """Measure the seconds of a step of both loops in turn, in blocks of `steps` steps, each block with one row of
    metrics.

    Each detector is measured at 256 px with two images and random weights. A DETR that is as deep but very narrow
    follows, which shows the time that our loop adds to a step: that time in ms is what counts where the step itself is
    short, as on a GPU.

    Rows: the medians of both, the median of the blocks' ratios, the bare loop against itself (the noise), and the
    largest relative difference between the losses of both.
    """
    rows = []
    for title, script, model in WIDE:
        rows += measure(title, script, blocks, steps, image_size=256, model=model)
    return rows + measure("loop, narrow DETR", train_detr, narrow_blocks, narrow_steps, image_size=64, model=NARROW)


def measure(title: str, script: ModuleType, blocks: int, steps: int, image_size: int, model: dict) -> list[dict]:
    """Return the rows of one model: blocks of the bare loop, of ours and of the bare loop again, after a warm-up round.

    title: beginning of the rows' names. script: the module of a training script. blocks, steps: number of blocks, and
    of steps in each. image_size: in pixels. model: settings of the detector.
    """
    with full_loop(script, image_size, steps, model) as (config, training):
        bare_losses = []
        bare = bare_loop(copy.deepcopy(training.detector), config, training.data.loader, bare_losses)
        ours = script_loop(script, training)
        runs = (bare, ours, bare)
        times = [[seconds_of(partial(run, steps)) for run in runs] for _ in range(blocks + 1)][1:]
        rows = map(json.loads, (training.folder / "metrics.jsonl").read_text().splitlines())
        # Only the last step of each block, since epochs begin and end with rows too.
        our_losses = [row["train/loss"] for row in rows if "train/loss" in row and row["step"] % steps == 0]
    seconds = [[t[i] / steps for t in times] for i in range(3)]
    added_ms = [1000 * (ours - (bare + again) / 2) for bare, ours, again in zip(*seconds, strict=True)]
    pairs = zip(our_losses, (float(loss) for loss in bare_losses), strict=False)  # the bare loop made twice the steps
    apart = max(abs(a / b - 1) for a, b in pairs)
    measured = {
        "ours": ("s/step", seconds[1]),
        "bare": ("s/step", seconds[0] + seconds[2]),
        "ours / bare": ("x", [2 * t[1] / (t[0] + t[2]) for t in times]),
        "bare / bare": ("x", [t[2] / t[0] for t in times]),
        "added to a step": ("ms", added_ms),
        "largest difference of a loss": ("relative", [apart]),
    }
    return medians(f"{title}, ", measured)


@contextlib.contextmanager
def full_loop(script: ModuleType, image_size: int, log_every: int, model: dict) -> Iterator[tuple[object, Training]]:
    """Yield the config of a training script and the `Training` that its `main` would have before the first step.

    log_every: number of steps between two rows of metrics.
    """
    config = script.Config()
    options = options_class(model["architecture"]) if "architecture" in model else type(config.model)
    config.model = options(**model)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as held:
        often = {"epochs": 1000, "log_every": log_every, "eval_every": 0, "save_every": 0}
        config.run = replace(config.run, output_dir=folder, name="bench", **often)
        shapes = {"format": "shapes", "image_size": image_size, "cache_images": True, "max_train_images": 64}
        config.data = replace(config.data, **shapes, batch_size_per_device=2, workers=0)
        # so low that random weights hardly change: with the default rate ResNet-50 was NaN after seven steps
        config.optim = replace(config.optim, lr=1e-6, backbone_lr=1e-6, ema_decay=0.9998)
        with contextlib.redirect_stdout(io.StringIO()):
            s = held.enter_context(session(config))
            table, val_table = s.open_data()
            evaluator = CocoEvaluator(val_table)
            training = s.training(s.make_detector(table), table, val_table, evaluator)
        yield config, training
        training.log.close()


def script_loop(script: ModuleType, t: Training) -> Callable[[int], None]:
    """Return a function that runs the script's loop for a number of steps and discards its output."""
    windows = t.windows

    def run(steps: int) -> None:
        t.windows = lambda: itertools.islice(windows(), steps)  # the end of a run would check its whole state
        end = t.step + steps
        with contextlib.redirect_stdout(io.StringIO()):
            while t.step < end:  # an epoch may end earlier
                steps = end - t.step
                script.train_one_epoch(t)

    return run


def bare_loop(
    detector: nn.Module, config: object, loader: torch.utils.data.DataLoader, losses: list[torch.Tensor]
) -> Callable[[int], None]:
    """Return a function that runs the shortest loop with the same training for a number of steps: without checks and
    log, and without reading from the device. At the end of each call, it appends the loss of the last step to
    `losses`."""
    optim: OptimConfig = config.optim
    plain = optim.no_weight_decay_on_norm_and_bias
    rates = {"lr": optim.lr, "backbone_lr": optim.backbone_lr, "weight_decay": optim.weight_decay}
    groups = parameter_groups(detector, **rates, no_decay_on_norm_and_bias=plain)
    optimizer = build_optimizer(optim.name, groups, momentum=optim.momentum, nesterov=optim.nesterov, betas=optim.betas)
    trained = [parameter for group in groups for parameter in group["params"]]
    average = copy.deepcopy(detector).eval().requires_grad_(False)
    source = list(detector.parameters())
    into = list(average.parameters())
    device = source[0].device
    weights = {name: detector.default_weights[name.rstrip("_0123456789")] for name in detector.loss_names}
    batches = endless_batches(loader)
    updates = 0

    def run(steps: int) -> None:
        nonlocal updates
        detector.train()
        for _ in range(steps):
            batch = next(batches)
            seed_micro_batch(batch.targets, config.run.seed, updates, 0, 0)  # the same anchors and regions are sampled
            optimizer.zero_grad()  # here, as in the scripts: memory freed after the update is allocated again
            counts = detector.denominators(batch.targets)
            batch = batch.to(device, non_blocking=True)
            outputs = detector(batch.images, batch.sizes, batch.targets)
            terms, _ = detector.criterion(outputs, batch.targets, counts)
            loss = sum(weights[name] * value for name, value in terms.items())
            loss.backward()
            if optim.max_norm:
                torch.nn.utils.clip_grad_norm_(trained, optim.max_norm)
            optimizer.step()
            with torch.no_grad():
                decay = min(optim.ema_decay, (1 + updates) / (10 + updates))
                torch._foreach_lerp_(into, source, 1 - decay)
            updates += 1
        losses.append(loss.detach())

    return run


def endless_batches(loader: torch.utils.data.DataLoader) -> Iterator[Batch]:
    """Yield the batches that the script trains on, in its order, epoch after epoch without end."""
    sampler = copy.deepcopy(loader.sampler)
    own = make_loader(loader.dataset.dataset, sampler, 0, loader.dataset.stride)
    while True:
        yield from own
        sampler.set_epoch(sampler.epoch + 1)
