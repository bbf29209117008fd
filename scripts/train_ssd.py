"""Train SSD or SSDLite, on MobileViT or any timm backbone.

    accelerate launch scripts/train_ssd.py                                         # bundled data, minutes on a CPU
    accelerate launch scripts/train_ssd.py --config configs/ssd/bccd.yaml          # real photographs
    accelerate launch --mixed_precision fp16 scripts/train_ssd.py --config configs/ssd/mobilevit_s_coco.yaml  # all GPUs

The loop is that of CVNets `training_engine.py` (accumulation that starts after an epoch, momentum of batch norms on a
schedule). `--help` explains every key; `--run.resume latest` goes on where a killed run stopped, to the bit.
"""

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from accelerate import Accelerator

from toolkit import session
from toolkit.data import pipeline as loading
from toolkit.data import splits
from toolkit.data.sampling import accumulation_at
from toolkit.data.transforms.ssd import SsdTransform
from toolkit.data.variable_sizes import square_sizes
from toolkit.distributed import reduce_dict, run_on_main, seed_step
from toolkit.errors import Preempted
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.evaluation.report import write_report
from toolkit.memory_probe import probe_memory
from toolkit.models.start import start_detector
from toolkit.runs import command_line as cli
from toolkit.runs.checkpoint import Checkpoint, resolve_resume
from toolkit.runs.folder import prepare_run_folder
from toolkit.runs.settings import (
    CyclicScheduleConfig,
    DataConfig,
    EvalConfig,
    LossConfig,
    OptimConfig,
    RunConfig,
    SsdConfig,
)
from toolkit.runs.status import run_status
from toolkit.runs.writer import RunWriter, tracker_kwargs
from toolkit.signals import StopSignals
from toolkit.step.compiling import compile_in_place
from toolkit.step.determinism import be_deterministic
from toolkit.step.ema import Ema
from toolkit.step.gradients import gradient_norm
from toolkit.step.guard import Action, NanGuard
from toolkit.step.length import StepBudget, is_time, steps_from
from toolkit.step.losses import LossWeights, window_denominators
from toolkit.step.memory import naming_the_batch
from toolkit.step.norms import bn_momentum, set_bn_momentum
from toolkit.step.optim import build_optimizer, parameter_groups
from toolkit.step.schedules import Schedule
from toolkit.training import Training, add_up
from toolkit.validation import finish, validate

DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "ssd" / "shapes.yaml"


@dataclass
class SsdDataConfig(DataConfig):
    """The data, and how images become batches."""

    sizes: list[int] = field(default_factory=list)
    """Sides in pixels of training images, one drawn for every batch, whose number of images follows so that the number
    of pixels stays that of `batch_size_per_device` images of `image_size`; empty: `image_size`."""
    zoom_out: float = 1.0
    """Half of the training images lie on a canvas of up to so many times their sides; 1: none."""
    iou_crop: bool = False
    """Cut a region that overlaps a box by an IoU of at least 0, 0.1, 0.3, 0.5, 0.7 or 0.9, or do not cut."""


@dataclass
class ModelConfig(SsdConfig):
    """The detector. A key that is not given keeps CVNets' value; lists have an entry for each level, fine to coarse."""

    architecture: Literal["ssd", "ssdlite"] = "ssdlite"
    """ssd: Liu et al. 2016; ssdlite: depthwise separable heads, Sandler et al. 2018, as in CVNets."""
    backbone: str | None = None
    """Name of a timm model."""
    norm: Literal["batch", "frozen", "group", "sync"] | None = None
    """What becomes of the backbone's batch norms."""
    strides: list[int] | None = None
    """Pixels; beyond the backbone's doubling, -1 at the end: the whole image."""
    channels: list[int] | None = None
    """Features that the heads see."""


@dataclass
class SsdOptimConfig(OptimConfig):
    """The optimizer step."""

    accumulate_after_epoch: int = 0
    """First epoch (from 0) with `accumulation_steps` micro-batches in a step; before it every one is a step."""
    bn_momentum_final: float | None = None
    """Momentum of batch norms at the end, a cosine from 0.1 after the warm-up; none given: it stays."""


@dataclass
class Config:
    """Train SSD."""

    run: RunConfig = field(default_factory=lambda: RunConfig(name="ssd"))
    data: SsdDataConfig = field(default_factory=SsdDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: SsdOptimConfig = field(default_factory=SsdOptimConfig)
    schedule: CyclicScheduleConfig = field(default_factory=CyclicScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)


def train_one_epoch(config: Config, t: Training) -> None:
    """What is left of the epoch, or up to the last step of the run. Order of one step: see docs/design.md."""
    t.model.train()
    optim = config.optim
    for window in t.windows(accumulation_at(t.sampler.epoch, optim.accumulation_steps, optim.accumulate_after_epoch)):
        t.guard.snapshot(t.detector)
        if optim.bn_momentum_final is not None:
            momentum = bn_momentum(t.step, t.total_steps, 0.1, optim.bn_momentum_final, config.schedule.warmup_steps)
            set_bn_momentum(t.detector, momentum)
        counts = [t.detector.denominators(batch.targets) for batch in window]
        denominators = window_denominators(
            counts, t.accelerator.device, config.loss.denominators, t.detector.averaged_denominators
        )
        sums, unknown = {}, []
        with naming_the_batch(window):
            for micro, batch in enumerate(window):
                t.seed_micro_batch(micro)
                batch = batch.to(t.accelerator.device, non_blocking=True)
                with t.without_sync(more_to_come=micro < len(window) - 1):
                    with t.accelerator.autocast():
                        outputs = t.model(batch.images, batch.sizes, batch.targets)
                    losses, metrics = t.detector.criterion(outputs, batch.targets, denominators[micro])  # in float32
                    weighted = t.weights(losses, t.step, len(window))
                    t.accelerator.backward(weighted.total)
                add_up(sums, weighted, metrics)
                unknown += weighted.unknown
        t.weights.average_gradients()

        # One collective and one host read for all that the step must know; then every rank decides alike.
        t.accelerator.unscale_gradients()
        grad_norm = gradient_norm(t.trained_parameters)
        sums |= {"grad_norm": grad_norm, "buffers_finite": t.guard.buffers_finite()}
        sums |= {"signal": t.signals.received, "time_s": t.timer.last_step_s}
        reduced = reduce_dict(sums, t.names(), unknown)
        action = t.decide(reduced)
        t.sampler.advance_batches(len(window))
        if action is not Action.STEP:
            t.recover(action, window, denominators, reduced)
            continue

        if config.optim.max_norm:
            torch.nn.utils.clip_grads_with_norm_(t.trained_parameters, config.optim.max_norm, grad_norm)
        t.optimizer.step()
        t.optimizer.zero_grad()
        t.step += 1
        t.note_step(reduced, images=t.images_in(window))
        t.detector.multibox.balance_losses(reduced)
        t.schedule.set(t.step)
        if t.ema is not None:
            t.ema.update(t.detector)

        better = is_time(t.step, t.eval_every) and validate(t)
        if better or reduced["signal"] or is_time(t.step, t.save_every):
            t.save(best=better)
        if reduced["signal"]:
            raise Preempted(f"{t.signals.name or 'signal'} at step {t.step}; saved, `--run.resume latest` goes on")
        if t.finished:
            return
    t.sampler.set_epoch(t.sampler.epoch + 1)


def build(
    config: Config, accelerator: Accelerator, folder: Path, signals: StopSignals, checkpoint: Checkpoint | None
) -> Training:
    """Data, model, optimizer and the rest of a run, in this order."""
    c, options = config, vars(config.data)
    reading = {key: options[key] for key in ("image_dir", "format", "name", "on_error")}
    sizes = {key: options[key] for key in ("image_size", "scales", "max_size")}
    overfit = (c.data.overfit_batches or 0) * c.data.batch_size_per_device * accelerator.num_processes
    table, val_table = splits.open_splits(
        c.data.train, c.data.val, folder, max_train_images=c.data.max_train_images, overfit_images=overfit, **reading
    )
    d = c.data if not overfit else SsdDataConfig(image_size=c.data.image_size, flip=False)
    transform = SsdTransform(zoom_out=d.zoom_out, iou_crop=d.iou_crop, flip=d.flip, photometric=d.photometric)

    seed_step(c.run.seed, 0, 0)  # the same weights on every rank
    detector = start_detector(
        vars(c.model), table.class_names, folder, resumed_from=checkpoint and checkpoint.path, say=accelerator.print
    ).to(accelerator.device)
    if detector.fixed_size:
        loading.check_one_size(detector.stride, [c.data.image_size, *d.sizes], c.data.scales)
    weights = LossWeights(detector.loss_names, c.loss.weights, detector.default_weights).to(accelerator.device)

    sampler, loader = loading.training_loader(
        table, transform, batch_size_per_device=c.data.batch_size_per_device, workers=c.data.workers, seed=c.run.seed,
        stride=detector.stride, by_aspect_ratio=c.data.group_by_aspect_ratio, cache_images=c.data.cache_images,
        sizes=square_sizes(d.sizes, d.image_size),
    )  # fmt: skip
    val_loader = loading.validation_loader(
        val_table, loading.val_transform(**sizes), batch_size_per_device=c.eval.batch_size_per_device,
        workers=c.data.workers, stride=detector.stride,
    )  # fmt: skip
    all_steps = sampler.steps_in(c.run.epochs, c.optim.accumulation_steps, c.optim.accumulate_after_epoch)
    steps_per_epoch = max(1, round(all_steps / c.run.epochs))  # on average
    total_steps = min(all_steps, c.run.max_steps or all_steps)

    ema = Ema(detector, c.optim.ema_decay) if c.optim.ema_decay else None
    compile_in_place(detector, c.optim.compile)
    groups = parameter_groups(
        detector, lr=c.optim.lr, backbone_lr=c.optim.backbone_lr, weight_decay=c.optim.weight_decay,
        no_decay_on_norm_and_bias=c.optim.no_weight_decay_on_norm_and_bias, multipliers=c.optim.lr_multipliers,
        layer_decay=c.optim.layer_decay,
    )  # fmt: skip
    groups += weights.parameter_groups(c.optim.lr)
    model, optimizer = accelerator.prepare(detector, build_optimizer(c.optim.name, groups, momentum=c.optim.momentum))
    schedule = Schedule(
        optimizer, c.schedule.name, total_steps, warmup_steps=c.schedule.warmup_steps,
        warmup_factor=c.schedule.warmup_factor, gamma=c.schedule.gamma, power=c.schedule.power,
        milestones=[steps_from(milestone, steps_per_epoch) for milestone in c.schedule.milestones],
        step_size=steps_from(c.schedule.step_size, steps_per_epoch), final_factor=c.schedule.final_factor,
        stairs=c.schedule.stairs, cycles=c.schedule.cycles, last_cycle=c.schedule.last_cycle,
    )  # fmt: skip
    return Training(
        accelerator=accelerator, model=model, detector=detector, weights=weights, optimizer=optimizer,
        schedule=schedule, ema=ema, sampler=sampler, loader=loader, val_table=val_table, val_loader=val_loader,
        evaluator=CocoEvaluator(val_table, c.eval.backend), signals=signals, folder=folder, seed=c.run.seed,
        guard=NanGuard(c.run.on_nonfinite, c.run.max_skips, c.run.max_rollbacks, c.run.rollback_lr_factor),
        budget=StepBudget(c.run.max_minutes) if c.run.max_minutes else None, total_steps=total_steps,
        log_every=c.run.log_every, eval_every=steps_from(c.run.eval_every, steps_per_epoch),
        save_every=steps_from(c.run.save_every, steps_per_epoch), keep=c.run.keep,
        metric_for_best=c.eval.metric_for_best, patience=c.eval.early_stopping_patience,
        score_threshold=c.eval.score_threshold, pictures=c.eval.pictures,
    )  # fmt: skip


def main(config: Config) -> dict[str, float]:
    """Trains as `config` says and returns the last evaluation. Notebooks call this with a Config of their own."""
    run = config.run
    accelerator = Accelerator(
        mixed_precision=run.precision,
        kwargs_handlers=session.distributed_kwargs(),
        **tracker_kwargs(run.tracker, Path(run.output_dir).expanduser().absolute() / run.name),
    )
    is_main = accelerator.is_main_process
    folder = run_on_main(lambda: prepare_run_folder(run.output_dir, run.name, run.resume))
    with StopSignals() as signals, run_status(folder, is_main) as status:
        session.set_threads(run.threads, accelerator.device)
        checkpoint, messages = run_on_main(lambda: resolve_resume(run.resume, folder))
        session.announce(accelerator.num_processes, is_main, folder, messages)
        if run.deterministic:
            be_deterministic()
        session.record_run(config, folder, run.seed, accelerator.num_processes, is_main)
        t = build(config, accelerator, folder, signals, checkpoint)
        for note in t.load(checkpoint, run.resume_schedule == "saved", run.eval_only) if checkpoint is not None else []:
            t.say(note)
        writer = RunWriter(
            folder, accelerator=accelerator, tracker=run.tracker, project=run.project, config=asdict(config),
            is_main=is_main, resume_state=checkpoint and checkpoint.state["writer"], eval_only=run.eval_only,
        )  # fmt: skip
        t.start(writer, status)
        if run.probe_memory:
            probe_memory(t, config.data.batch_size_per_device)
        if run.eval_only or is_time(t.step, t.eval_every) and t.evaluated_step != t.step:
            better = validate(t)  # asked for, or interrupted by the signal that ended the run before
            if better and not run.eval_only:
                t.save(best=True)
        while not (t.finished or run.eval_only):
            train_one_epoch(config, t)
        if not run.eval_only:
            finish(t)
        if is_main and not run.eval_only:
            size = loading.processor_size(config.data.image_size, config.data.scales, config.data.max_size)
            t.detector.save_final(folder / "final", t.val_table.categories, size)
        t.close()
    run_on_main(lambda: write_report(folder))
    return t.last_row


if __name__ == "__main__":
    sys.exit(cli.run_script(main, Config, DEFAULT_CONFIG))
