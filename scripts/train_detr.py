"""Train a DETR: the published one, or RT-DETR-v2 as the fast default, on any timm backbone.

    accelerate launch scripts/train_detr.py                                        # bundled data, minutes on a CPU
    accelerate launch scripts/train_detr.py --config configs/detr/bccd.yaml        # real photographs
    accelerate launch --num_processes 8 --mixed_precision fp16 scripts/train_detr.py --config configs/detr/detr_r50_coco.yaml
    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 scripts/train_detr.py      # two processes without a GPU

The loop is that of facebookresearch/detr `engine.py` (weight dict over main and auxiliary losses, reduced values, finite
check, clipping), with the check before the update and on all ranks. `--help` explains every key; the run folder holds
settings, rows, checkpoints and the report. `--run.resume latest` goes on where a killed run stopped, to the bit.
"""

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed

from toolkit import cli, data, evaluation, training
from toolkit.checkpoint import resolve_resume
from toolkit.config import (
    DataConfig,
    EvalConfig,
    LossConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    save_config,
)
from toolkit.determinism import be_deterministic
from toolkit.distributed import reduce_dict
from toolkit.ema import Ema
from toolkit.errors import Preempted
from toolkit.guards import Action, NanGuard, buffers_finite, gradient_norm
from toolkit.losses import LossWeights, window_denominators
from toolkit.memory import naming_the_batch
from toolkit.models import build_detector
from toolkit.optim import build_optimizer, parameter_groups
from toolkit.schedules import Schedule, is_time, steps_from
from toolkit.signals import StopSignals
from toolkit.training import Training, add_up, training_row

DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "detr" / "shapes.yaml"


@dataclass
class Config:
    """Train a DETR."""

    run: RunConfig = field(default_factory=lambda: RunConfig(name="detr"))
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)


def train_one_epoch(config: Config, t: Training) -> None:
    """One pass over the training data, from where the sampler stands, or up to the last step of the run."""
    t.model.train()
    for window in t.timer.fetch(data.windows(t.loader, config.optim.accumulation_steps)):
        t.guard.snapshot(t.detector)
        denominators = window_denominators(t.detector, window, t.accelerator.device, config.loss.denominators)
        sums, unknown = {}, []
        with naming_the_batch(window):
            for micro, batch in enumerate(window):
                t.seed_micro_batch(micro)
                batch = batch.to(t.accelerator.device, non_blocking=True)
                with t.without_sync(more_to_come=micro < len(window) - 1):
                    with t.accelerator.autocast():
                        outputs = t.model(batch.images, batch.sizes, batch.targets)
                    losses, metrics = t.detector.criterion(outputs, batch.targets, denominators[micro])  # float32
                    weighted = t.weights(losses, t.step)
                    t.accelerator.backward(weighted.total)
                add_up(sums, weighted, metrics)
                unknown += weighted.unknown

        # One collective and one read by the host for everything the step must know; then every rank decides alike.
        t.accelerator.unscale_gradients()
        grad_norm = gradient_norm(t.trained_parameters)
        flags = {"buffers_finite": buffers_finite(t.detector), "signal": t.signals.received, "time_s": t.timer.step_s}
        reduced = reduce_dict({**sums, "grad_norm": grad_norm, **flags}, t.names(), unknown)
        action = t.guard.decide(reduced)
        t.sampler.advance_batches(len(window))
        if action is not Action.STEP:
            t.recover(action, window, denominators, reduced, sums)
            continue

        if config.optim.max_norm:
            torch.nn.utils.clip_grads_with_norm_(t.trained_parameters, config.optim.max_norm, grad_norm)
        row = training_row(t, reduced)
        t.optimizer.step()
        t.optimizer.zero_grad()
        t.step += 1
        t.schedule.set(t.step)
        if t.ema is not None:
            t.ema.update(t.detector)

        t.note_step(row, images=sum(len(batch.targets) for batch in window))
        better = is_time(t.step, t.eval_every) and evaluate(config, t)
        if better or is_time(t.step, t.save_every):
            t.save(best=better)
        if reduced["signal"]:
            t.save()
            raise Preempted(f"signal at step {t.step}, saved; `--run.resume latest` goes on")
        if t.finished:
            return
    t.sampler.set_epoch(t.sampler.epoch + 1)
