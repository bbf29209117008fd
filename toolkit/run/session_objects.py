"""Opens the data and builds the objects of a training from the settings of a run. `s` is a `Session` throughout."""

import os
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from toolkit import index
from toolkit.base.errors import BadInput
from toolkit.base.text import shown
from toolkit.data import pipeline
from toolkit.data.formats import is_several
from toolkit.data.same_on_ranks import check_same_on_ranks
from toolkit.data.sampling import EpochSampler
from toolkit.data.splits import READING, check_not_empty, open_all_splits, open_split, share_of
from toolkit.data.table import DetectionTable
from toolkit.data.table_cache import cache_root
from toolkit.data.windows import windows_of_loader
from toolkit.evaluation.coco import check_ground_truth
from toolkit.models import options_class
from toolkit.models.detector import Detector
from toolkit.models.start import check_weights
from toolkit.run.best import Best
from toolkit.run.launcher import launcher_settings, resolve_execution
from toolkit.run.log import Log
from toolkit.run.open_run import settings_beside
from toolkit.run.parts import TrainingData, WeightFacts
from toolkit.run.plan import Plan, StepBudget
from toolkit.run.processes import prepare, start_accelerator
from toolkit.run.recovery import RunGuard
from toolkit.run.saving import Checkpoints
from toolkit.run.settings_file import CONFIG_FILE
from toolkit.run.training import Training
from toolkit.run.validation import Validation
from toolkit.step.class_weights import class_weights
from toolkit.step.ema import Ema
from toolkit.step.execution import (
    checkpoint_in_place,
    compile_in_place,
    cpu_computes_in_bf16,
    describe_float32_layers,
    precision_of_device,
)
from toolkit.step.losses import LossWeights
from toolkit.step.optim import build_optimizer, parameter_groups
from toolkit.step.schedules import schedule_of_settings, steps_from


def open_tables(s: Any) -> tuple[DetectionTable, DetectionTable]:
    """Open training and validation data and return their tables, see `Session.open_data`; set `s.test_table`."""
    c = s.config.data
    reading = {key: getattr(c, key) for key in READING}
    if has_masks(s.config) or c.boxes_from_masks:
        pipeline.check_masks(c, "model.masks" if has_masks(s.config) else "data.boxes_from_masks")
        reading["masks"] = True
    apart = not share_of(c.val) and c.overfit_batches is None and not is_several(c.path, c.train)
    if s.config.run.eval_only and s.checkpoint is not None and apart:
        table = val_table = open_split(c.val, say=s.say, listing=s.staging / "data_problems_val.txt", **reading)
    else:
        test = None if s.config.run.eval_only else s.config.eval.test_split
        checks = [] if s.checkpoint else [partial(check_weights, s.config.model)]  # a checkpoint has the weights
        reading["max_train_images"] = c.max_train_images
        reading["overfit_images"] = (c.overfit_batches or 0) * c.batch_size_per_device * s.accelerator.num_processes
        opened = open_all_splits(c.train, c.val, test, s.staging, *checks, say=s.say, **reading)
        table, val_table, s.test_table = opened
        check_not_empty(table, c.allow_mostly_empty)
    opened = {"training data": table, "validation data": val_table, "the test split": s.test_table}
    check_same_on_ranks({name: one for name, one in opened.items() if one is not None})
    for note in check_ground_truth(val_table):
        s.say(note)
    return table, val_table


def has_masks(config: Any) -> bool:
    """Return whether the detector of a run learns masks: its setting `masks`, which not every detector has."""
    return getattr(config.model, "masks", False)


def build_training(
    s: Any, detector: Detector, table: DetectionTable, val_table: DetectionTable, evaluator: Any
) -> Training:
    """Build the training of a run and return it, at step 0.

    evaluator: computes the metrics of predictions on `val_table`, such as `CocoEvaluator`.
    """
    distillation = _distillation(s, detector, table)
    weights = _loss_weights(s, detector, distillation)
    sampler, loader, val_loader = _loaders(s, detector, table, val_table)
    windows = windows_of_loader(loader)
    _settle(s, detector)
    c = s.config
    ema = Ema(detector, c.optim.ema_decay, c.optim.ema_warmup)
    checkpoint_in_place(detector, c.optim.checkpointing, c.optim.compile)
    compile_in_place(detector, c.optim.compile, cache_root() / "compiled")
    one_size = detector.fixed_size and not c.data.multi_scale and not c.run.deterministic
    optimizer = _optimizer(s, detector, weights, distillation)
    model, optimizer = prepare(s.accelerator, detector, optimizer, c.run.tf32, one_size)
    plan = _plan(c, sampler, optimizer)
    t = Training(
        accelerator=s.accelerator,
        model=model,
        detector=detector,
        loss_weights=weights,
        optimizer=optimizer,
        plan=plan,
        guard=_guard(c),
        data=TrainingData(loader, {"training": table if windows is None else windows, "validation": val_table}),
        validation=_validation(s, detector, val_loader, val_table, evaluator, plan.steps_per_epoch),
        checkpoints=_checkpoints(s, detector, plan.steps_per_epoch),
        signals=s.signals,
        folder=s.folder,
        log=Log(s.is_main, c.run.meters, plan.steps_per_epoch, c.run.log_every),
        max_norm=c.optim.max_norm,
        ema=ema,
    )
    if distillation is not None:
        t.extra["distillation"] = distillation
    return t


def weigh_classes(s: Any, detector: Detector, table: DetectionTable) -> None:
    """Give a detector the weights of its classes by `loss.class_weights`; without the setting nothing is done.

    table: training data. Where a checkpoint is only evaluated, it may be other data: no weights are used then.
    """
    setting = s.config.loss.class_weights
    if setting is None:
        return
    boxes = table.boxes()
    labels = boxes.labels[~boxes.iscrowd]
    counts = np.bincount(labels, minlength=len(table.categories)).tolist()
    weights = class_weights(setting, table.class_names, counts)
    detector.weigh_classes(weights)
    by_name = dict(zip(table.class_names, weights, strict=True))
    s.measured["class_weights"] = by_name
    listed = ", ".join(f"{shown(name)} {weight:.3g}" for name, weight in by_name.items())
    s.say(f"weights of classes in the losses: {listed}")


def _loss_weights(s: Any, detector: Detector, distillation: nn.Module | None) -> LossWeights:
    names = list(detector.loss_names)
    defaults = dict(detector.default_weights)
    if distillation is not None:
        names += distillation.loss_names
        defaults |= distillation.default_weights
    weights = LossWeights(names, s.config.loss.weights, defaults).to(s.accelerator.device)
    weights.denominators = s.config.loss.denominators
    if distillation is not None:
        weights.sources.append(distillation)
        weights.divided_by.update(distillation.divided_by)
    return weights


def _guard(c: Any) -> RunGuard:
    guard = RunGuard(c.run.on_nonfinite, c.run.max_skips, c.run.max_rollbacks, c.run.rollback_lr_factor)
    guard.gradient_table_every = c.optim.gradient_table_every
    return guard


def _validation(
    s: Any, detector: Detector, loader: DataLoader, table: DetectionTable, evaluator: Any, steps_per_epoch: int
) -> Validation:
    c = s.config.eval
    return Validation(
        table=table,
        loader=loader,
        evaluator=evaluator,
        score_threshold=c.score_threshold,
        max_detections=c.max_detections or detector.max_detections,
        pictures=c.pictures,
        every=steps_from(s.config.run.eval_every, steps_per_epoch),
        best=Best(c.metric_for_best, c.early_stopping_patience),
    )


def _checkpoints(s: Any, detector: Detector, steps_per_epoch: int) -> Checkpoints:
    run = s.config.run
    return Checkpoints(
        folder=s.folder / "checkpoints",
        weight_facts=WeightFacts(detector),
        save_every=steps_from(run.save_every, steps_per_epoch),
        keep=run.keep,
        keep_every=steps_from(run.keep_every, steps_per_epoch),
    )


def evaluation_loader(s: Any, detector: Detector, table: DetectionTable) -> DataLoader:
    c = s.config.data
    return pipeline.validation_loader_of_settings(
        table,
        c,
        batch_size=s.config.eval.batch_size_per_device,
        stride=detector.stride,
        pin=s.pins,
        tiling=pipeline.tiling_of(c),
        masks=has_masks(s.config),
    )


def _loaders(
    s: Any, detector: Detector, table: DetectionTable, val_table: DetectionTable
) -> tuple[EpochSampler, DataLoader, DataLoader]:
    c = s.config.data
    if c.tile is not None and getattr(detector, "predicates", ()):
        raise BadInput(
            f"data.tile {c.tile}: the relations of a scene graph are between objects of a whole picture, which windows "
            "cut apart; leave data.tile out"
        )
    how = {"seed": s.config.run.seed, "stride": detector.stride, "pin": s.pins, "masks": has_masks(s.config)}
    sampler, loader = pipeline.loader_of_settings(table, c, augmented=c.overfit_batches is None, **how)
    windows = windows_of_loader(loader)
    if windows is not None:
        s.say(f"data.tile: {windows}; an epoch has {sampler.num_samples:,} windows")
    return sampler, loader, evaluation_loader(s, detector, val_table)


def _settle(s: Any, detector: Detector) -> None:
    """Set `run.precision`, `run.tf32` and `optim.compile` in `s.config` to the values in use; print their origin."""
    run = s.config.run
    optim = s.config.optim
    device = s.accelerator.device
    was_killed = not s.stored and (s.folder / CONFIG_FILE).is_file()  # before it saved
    stored = settings_beside(s.folder, s.config, options_class) if was_killed else s.stored
    began = {**stored.get("run", {}), **stored.get("optim", {})}
    asked = None if run.eval_only and run.precision == "auto" else run.precision
    given = {"precision": asked, "tf32": run.tf32, "compile": optim.compile}

    auto = partial(precision_of_device, device, detector)
    settled = resolve_execution(given, launcher_settings(os.environ), began, auto)
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


def _distillation(s: Any, detector: Detector, table: DetectionTable) -> nn.Module | None:
    """Return the losses of distillation from `loss.teacher`; None without a teacher."""
    if s.config.loss.teacher is None:
        return None
    open_teacher = index.tool("teacher")
    return open_teacher(s.config.loss.teacher, detector, table.class_names, not s.config.data.scales)


def _optimizer(s: Any, detector: Detector, weights: LossWeights, distillation: nn.Module | None):
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


def _plan(c: Any, sampler: EpochSampler, optimizer: torch.optim.Optimizer) -> Plan:
    """Return the plan of a fresh run with these settings."""
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
        eval_only=run.eval_only,
        follows_checkpoint=run.resume_schedule == "saved",
    )


