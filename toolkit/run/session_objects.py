"""The objects of a training, built from the settings of a run."""

import os
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from toolkit import index
from toolkit.data import pipeline
from toolkit.data.sampling import EpochSampler
from toolkit.data.table import DetectionTable
from toolkit.models import options_class
from toolkit.models.detector import Detector
from toolkit.run.best import Best
from toolkit.run.launcher import asked_settings, settle
from toolkit.run.log import Log
from toolkit.run.open_run import settings_beside
from toolkit.run.plan import Plan
from toolkit.run.processes import prepare, start_accelerator
from toolkit.run.recovery import RunGuard
from toolkit.run.session_start import Session
from toolkit.run.settings_file import CONFIG
from toolkit.run.training import Training
from toolkit.run.validation import Validation
from toolkit.step.ema import Ema
from toolkit.step.execution import (
    checkpoint_in_place,
    compile_in_place,
    cpu_computes_in_bf16,
    describe_float32_layers,
    precision_of_device,
)
from toolkit.step.length import Pace, StepBudget, steps_from
from toolkit.step.losses import LossWeights
from toolkit.step.optim import build_optimizer, parameter_groups
from toolkit.step.schedules import schedule_of_settings


def build_training(
    s: Session, detector: Detector, table: DetectionTable, val_table: DetectionTable, evaluator: Any
) -> Training:
    """Build a training at step 0.

    evaluator: what measures predictions on `val_table`, such as `CocoEvaluator`.
    """
    distillation = _distillation(s, detector, table)
    names = list(detector.loss_names)
    defaults = dict(detector.default_weights)
    if distillation is not None:
        names += distillation.loss_names
        defaults |= distillation.default_weights
    weights = LossWeights(names, s.config.loss.weights, defaults).to(s.accelerator.device)
    sampler, loader, val_loader = _loaders(s, detector, table, val_table)
    _settle(s, detector)
    c = s.config
    run = s.config.run
    optim = s.config.optim
    kept = c.eval.max_detections or detector.max_detections
    ema = Ema(detector, optim.ema_decay, optim.ema_warmup)
    checkpoint_in_place(detector, optim.checkpointing, optim.compile)
    compile_in_place(detector, optim.compile)
    one_size = detector.fixed_size and not c.data.multi_scale and not run.deterministic
    optimizer = _optimizer(s, detector, weights, distillation)
    model, optimizer = prepare(s.accelerator, detector, optimizer, run.tf32, one_size)
    plan = _plan(c, sampler, optimizer)
    return Training(
        accelerator=s.accelerator, model=model, detector=detector, loss_weights=weights, optimizer=optimizer, ema=ema,
        plan=plan, loader=loader, pace=_pace(c, plan.steps_per_epoch),
        validation=Validation(val_table, val_loader, evaluator, c.eval.score_threshold, kept, c.eval.pictures),
        guard=RunGuard(run.on_nonfinite, run.max_skips, run.max_rollbacks, run.rollback_lr_factor),
        best=Best(c.eval.metric_for_best, c.eval.early_stopping_patience),
        log=Log(s.is_main, run.meters, plan.steps_per_epoch, run.log_every), signals=s.signals, folder=s.folder,
        seed=run.seed, max_norm=optim.max_norm, eval_only=run.eval_only,
        data={"training": table, "validation": val_table}, distillation=distillation,
    )  # fmt: skip


def evaluation_loader(s: Session, detector: Detector, table: DetectionTable) -> DataLoader:
    c = s.config.data
    images = s.config.eval.batch_size_per_device
    transform = pipeline.val_transform(c.image_size, c.scales, c.max_size)
    how = {"batch_size": images, "workers": c.workers, "stride": detector.stride, "pin": s.pins}
    return pipeline.validation_loader(table, transform, **how)


def _loaders(
    s: Session, detector: Detector, table: DetectionTable, val_table: DetectionTable
) -> tuple[EpochSampler, DataLoader, DataLoader]:
    c = s.config.data
    how = {"seed": s.config.run.seed, "stride": detector.stride, "pin": s.pins}
    sampler, loader = pipeline.loader_of_settings(table, c, augmented=c.overfit_batches is None, **how)
    return sampler, loader, evaluation_loader(s, detector, val_table)


def _settle(s: Session, detector: Detector) -> None:
    """Put what is used in the place of `run.precision`, `run.tf32` and `optim.compile`, and say who decided it."""
    run = s.config.run
    optim = s.config.optim
    device = s.accelerator.device
    was_killed = not s.stored and (s.folder / CONFIG).is_file()  # before it saved
    stored = settings_beside(s.folder, s.config, options_class) if was_killed else s.stored
    began = {**stored.get("run", {}), **stored.get("optim", {})}
    asked = None if run.eval_only and run.precision == "auto" else run.precision
    given = {"precision": asked, "tf32": run.tf32, "compile": optim.compile}

    auto = partial(precision_of_device, device, detector)
    settled = settle(given, asked_settings(os.environ), began, auto)
    if settled.precision != s.accelerator.mixed_precision:
        s.accelerator = start_accelerator(settled.precision)
        settled = replace(settled, precision=s.accelerator.mixed_precision)  # fp16 is not used on a CPU
    slow = settled.precision == "bf16" and device.type == "cpu" and not cpu_computes_in_bf16()
    s.say(f"{settled}{', for which this CPU has no instructions: --run.precision no is faster' if slow else ''}")
    note = describe_float32_layers(detector, device.type, settled.precision)
    if note:
        s.say(note)
    s.measured["settled"] = asdict(settled)
    run = replace(run, precision=settled.precision, tf32=settled.tf32)
    s.config = replace(s.config, run=run, optim=replace(optim, compile=settled.compile))


def _distillation(s: Session, detector: Detector, table: DetectionTable) -> nn.Module | None:
    """The losses beside the teacher of `loss.teacher`; None without a teacher."""
    if s.config.loss.teacher is None:
        return None
    open_teacher = index.tool("teacher")
    return open_teacher(s.config.loss.teacher, detector, table.class_names, not s.config.data.scales)


def _optimizer(s: Session, detector: Detector, weights: LossWeights, distillation: nn.Module | None):
    c = s.config.optim
    images = s.config.data.batch_size_per_device * c.accumulation_steps * s.accelerator.num_processes
    scale = images if c.scale_lr_by_images else 1
    if c.scale_lr_by_images:
        s.say(f"learning rates are multiplied by {scale}: {c.lr * scale:g} with {images} images a step")
    same = ("lr", "backbone_lr", "weight_decay", "layer_decay", "bias_lr_factor", "bias_weight_decay")
    groups = parameter_groups(
        detector,
        no_decay_on_norm_and_bias=c.no_weight_decay_on_norm_and_bias,
        multipliers=c.lr_multipliers,
        slow_prefixes=detector.slow_prefixes,
        **{key: getattr(c, key) for key in same},
    )
    groups += weights.parameter_groups(c.lr)
    groups += [] if distillation is None else distillation.parameter_groups(c.lr, c.weight_decay)
    for group in groups:
        group["lr"] *= scale
    embeddings = [module.weight for module in detector.modules() if isinstance(module, torch.nn.Embedding)]
    same = {key: getattr(c, key) for key in ("momentum", "nesterov", "betas")}
    return build_optimizer(c.name, groups, **same, embeddings=embeddings)


def _pace(c: Any, per_epoch: int) -> Pace:
    every = {key: steps_from(getattr(c.run, key), per_epoch) for key in ("eval_every", "save_every", "keep_every")}
    table_every = c.optim.gradient_table_every
    return Pace(keep=c.run.keep, denominators=c.loss.denominators, gradient_table_every=table_every, **every)


def _plan(c: Any, sampler: EpochSampler, optimizer: torch.optim.Optimizer) -> Plan:
    """The plan of a fresh run with these settings."""
    run = c.run
    optim = c.optim
    all_steps = sampler.steps_in(run.epochs, optim.accumulation_steps, optim.accumulate_after_epoch)
    steps_per_epoch = max(1, round(all_steps / run.epochs))  # on average
    total_steps = all_steps
    limit = "run.epochs"
    if run.max_steps is not None and run.max_steps < all_steps:
        total_steps = run.max_steps
        limit = "run.max_steps"
    warmup_steps = steps_from(c.schedule.warmup_steps, steps_per_epoch)
    final_momentum = optim.bn_momentum_final
    return Plan(
        sampler=sampler,
        schedule=schedule_of_settings(c.schedule, optimizer, total_steps, steps_per_epoch),
        total_steps=total_steps,
        limit=limit,
        budget=None if run.max_minutes is None else StepBudget(run.max_minutes),
        accumulation_steps=optim.accumulation_steps,
        accumulate_after_epoch=optim.accumulate_after_epoch,
        steps_per_epoch=steps_per_epoch,
        warmup_steps=warmup_steps,
        plain_epochs=c.data.plain_epochs,
        bn_momentum=None if final_momentum is None else (final_momentum, warmup_steps),
    )


