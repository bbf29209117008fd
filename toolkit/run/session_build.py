"""Builds the objects of a training from the settings of a run: losses, loaders, optimizer, plan, guard and others."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from toolkit import index
from toolkit.base.batch import is_waited_for
from toolkit.base.errors import BadInput
from toolkit.base.text import shown
from toolkit.data import pipeline
from toolkit.data.sampling import EpochSampler
from toolkit.data.table import DetectionTable
from toolkit.data.table_cache import cache_root
from toolkit.data.tile_table import tiles_of_loader
from toolkit.models.detector import Detector
from toolkit.run.best import Best
from toolkit.run.launcher import ResolvedExecution, launcher_settings, resolve_execution
from toolkit.run.log import Log
from toolkit.run.parts import TrainingData, WeightFacts
from toolkit.run.plan import Plan, StepBudget
from toolkit.run.processes import prepare
from toolkit.run.recovery import RunGuard
from toolkit.run.saving import Checkpoints
from toolkit.run.training import Training
from toolkit.run.validation import Validation
from toolkit.step.class_weights import class_weights
from toolkit.step.ema import Ema
from toolkit.step.execution import (
    GRAPHS,
    GraphedParts,
    checkpoint_in_place,
    compile_in_place,
    has_depthwise_convolutions,
    precision_of_device,
)
from toolkit.step.freezing import BatchCounts
from toolkit.step.losses import LossWeights
from toolkit.step.optim import build_optimizer, parameter_groups
from toolkit.step.schedules import schedule_of_settings, steps_from
from toolkit.step.weight_casts import WeightCasts


def build_training(
    s: Any,
    execution: ResolvedExecution,
    detector: Detector,
    table: DetectionTable,
    val_table: DetectionTable,
    evaluator: Any,
) -> Training:
    """Build the training of the `Session` `s` and return it, at step 0.

    Args:
        execution: result of `settle_execution`.
        table, val_table: training and validation data.
        evaluator: computes the metrics of predictions on `val_table`, such as `CocoEvaluator`.
    """
    c = s.config
    accelerator = s.accelerator
    distillation = _distillation(c.loss.teacher, detector, table, one_size=not c.data.scales)
    weights = _loss_weights(c.loss, detector, distillation).to(accelerator.device)
    sampler, loader = _training_loader(c, detector, table, accelerator.device, s.say)
    val_loader = evaluation_loader(c, detector, val_table, accelerator.device)
    tiles = tiles_of_loader(loader)

    # The averages copy the plain model, DDP wraps the compiled one, and the optimizer needs both finished.
    ema = Ema(detector, c.optim.ema_decay, c.optim.ema_warmup)
    checkpoint_in_place(detector, c.optim.checkpointing, execution.compile)
    one_size = detector.fixed_size and not c.data.multi_scale
    _compile(c, detector, execution.compile, one_size)
    if is_waited_for(accelerator.device) and not execution.compile:
        BatchCounts(detector)
        if accelerator.num_processes == 1 and not c.optim.checkpointing:
            WeightCasts(detector, accelerator.device)
    images_of_a_step = c.data.batch_size_per_device * c.optim.accumulation_steps * accelerator.num_processes
    optimizer = _optimizer(c.optim, detector, weights, distillation, images_of_a_step, s.say)
    searches = one_size and not c.run.deterministic and not has_depthwise_convolutions(detector)
    model, optimizer = prepare(accelerator, detector, optimizer, execution.tf32, searches)

    plan = _plan(c, sampler, optimizer)
    t = Training(
        accelerator=accelerator,
        model=model,
        detector=detector,
        loss_weights=weights,
        optimizer=optimizer,
        plan=plan,
        guard=_guard(c.run, c.optim.gradient_table_every),
        data=TrainingData(loader, {"training": table if tiles is None else tiles, "validation": val_table}),
        validation=_validation(c, detector, val_loader, val_table, evaluator, plan.steps_per_epoch),
        checkpoints=_checkpoints(c.run, s.folder, detector, plan.steps_per_epoch),
        signals=s.signals,
        folder=s.folder,
        log=Log(s.is_main, c.run.meters, plan.steps_per_epoch, c.run.log_every),
        max_norm=c.optim.max_norm,
        ema=ema,
    )
    if distillation is not None:
        t.extra["distillation"] = distillation
    return t


def _compile(c: Any, detector: Detector, compile: bool | str, one_size: bool) -> None:
    """Compile a detector as `optim.compile` says. Raises BadInput for all settings that do not go with it."""
    faults = []
    if compile and c.optim.bn_momentum_final is not None:
        faults.append("optim.compile: optim.bn_momentum_final would be compiled anew in each step; leave one out")
    if compile == GRAPHS and not one_size:
        faults.append("optim.compile graphs: needs images of one size: a detector without padding, data.multi_scale []")
    if compile == GRAPHS and c.optim.accumulation_steps > 1:
        faults.append("optim.compile graphs: a graph overwrites its last gradients; set optim.accumulation_steps to 1")
    if compile == GRAPHS and c.loss.teacher is not None:
        faults.append("optim.compile graphs: loss.teacher looks at maps inside the graphs; leave one out")
    if faults:
        raise BadInput(faults)
    folder = cache_root() / "compiled"
    if compile == GRAPHS:
        GraphedParts(detector, c.data.batch_size_per_device, folder)
    else:
        compile_in_place(detector, compile, folder)


def settle_execution(
    config: Any, began: Mapping[str, Mapping], detector: Detector, device: torch.device
) -> ResolvedExecution:
    """Choose precision, TF32 and compilation of a run, see `resolve_execution`; a collective.

    began: groups of settings that the run began with; empty for a new run.
    """
    run = config.run
    asked = None if run.eval_only and run.precision == "auto" else run.precision
    given = {"precision": asked, "tf32": run.tf32, "compile": config.optim.compile}
    before = {**began.get("run", {}), **began.get("optim", {})}
    auto = partial(precision_of_device, device, detector)
    return resolve_execution(given, launcher_settings(os.environ), before, auto)


def learns_masks(options: Any) -> bool:
    """Return whether a detector of these settings learns masks: the setting `masks`, which not every detector has."""
    return getattr(options, "masks", False)


def weigh_classes(
    detector: Detector, table: DetectionTable, setting: Any, say: Callable[[str], None]
) -> dict[str, float]:
    """Give a detector the weights of its classes by `loss.class_weights`, print them, and return them by class name.

    table: training data. Where a checkpoint is only evaluated, it may be other data: no weights are used then.
    """
    boxes = table.boxes()
    labels = boxes.labels[~boxes.iscrowd]
    counts = np.bincount(labels, minlength=len(table.categories)).tolist()
    weights = class_weights(setting, table.class_names, counts)
    detector.weigh_classes(weights)
    by_name = dict(zip(table.class_names, weights, strict=True))
    listed = ", ".join(f"{shown(name)} {weight:.3g}" for name, weight in by_name.items())
    say(f"weights of classes in the losses: {listed}")
    return by_name


def evaluation_loader(c: Any, detector: Detector, table: DetectionTable, device: torch.device) -> DataLoader:
    """Return the loader of validation or test data. c: all settings."""
    return pipeline.validation_loader_of_settings(
        table,
        c.data,
        batch_size=c.eval.batch_size_per_device,
        stride=detector.stride,
        pin=_pins(device),
        tiling=pipeline.tiling_of(c.data),
        masks=learns_masks(c.model),
    )


def _pins(device: torch.device) -> bool:
    """Return whether batches are loaded into page-locked (pinned) memory."""
    return device.type == "cuda"


def _training_loader(
    c: Any, detector: Detector, table: DetectionTable, device: torch.device, say: Callable[[str], None]
) -> tuple[EpochSampler, DataLoader]:
    if c.data.tile is not None and getattr(detector, "predicates", ()):
        raise BadInput(
            f"data.tile {c.data.tile}: the relations of a scene graph are between objects of a whole picture, which "
            "tiles cut apart; leave data.tile out"
        )
    sampler, loader = pipeline.loader_of_settings(
        table,
        c.data,
        seed=c.run.seed,
        stride=detector.stride,
        augmented=c.data.overfit_batches is None,
        pin=_pins(device),
        masks=learns_masks(c.model),
    )
    tiles = tiles_of_loader(loader)
    if tiles is not None:
        say(f"data.tile: {tiles}; an epoch has {sampler.num_samples:,} tiles")
    return sampler, loader


def _distillation(
    teacher: Path | str | None, detector: Detector, table: DetectionTable, one_size: bool
) -> nn.Module | None:
    """Return the losses of distillation from `loss.teacher`; None without a teacher."""
    if teacher is None:
        return None
    open_teacher = index.tool("teacher")
    return open_teacher(teacher, detector, table.class_names, one_size)


def _loss_weights(loss: Any, detector: Detector, distillation: nn.Module | None) -> LossWeights:
    names = list(detector.loss_names)
    defaults = dict(detector.default_weights)
    if distillation is not None:
        names += distillation.loss_names
        defaults |= distillation.default_weights
    weights = LossWeights(names, loss.weights, defaults)
    weights.denominators = loss.denominators
    if distillation is not None:
        weights.sources.append(distillation)
        weights.divided_by.update(distillation.divided_by)
    return weights


def _optimizer(
    optim: Any,
    detector: Detector,
    weights: LossWeights,
    distillation: nn.Module | None,
    images_of_a_step: int,
    say: Callable[[str], None],
) -> torch.optim.Optimizer:
    scale = images_of_a_step if optim.scale_lr_by_images else 1
    if optim.scale_lr_by_images:
        say(f"learning rates are multiplied by {scale}: {optim.lr * scale:g} with {scale} images a step")
    groups = parameter_groups(
        detector,
        no_decay_on_norm_and_bias=optim.no_weight_decay_on_norm_and_bias,
        multipliers=optim.lr_multipliers,
        slow_prefixes=detector.slow_prefixes,
        lr=optim.lr,
        backbone_lr=optim.backbone_lr,
        weight_decay=optim.weight_decay,
        layer_decay=optim.layer_decay,
        bias_lr_factor=optim.bias_lr_factor,
        bias_weight_decay=optim.bias_weight_decay,
    )
    groups += weights.parameter_groups(optim.lr)
    groups += [] if distillation is None else distillation.parameter_groups(optim.lr, optim.weight_decay)
    for group in groups:
        group["lr"] *= scale
    embeddings = [module.weight for module in detector.modules() if isinstance(module, torch.nn.Embedding)]
    return build_optimizer(
        optim.name,
        groups,
        momentum=optim.momentum,
        nesterov=optim.nesterov,
        betas=optim.betas,
        embeddings=embeddings,
    )


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


def _guard(run: Any, gradient_table_every: int) -> RunGuard:
    guard = RunGuard(run.on_nonfinite, run.max_skips, run.max_rollbacks, run.rollback_lr_factor)
    guard.gradient_table_every = gradient_table_every
    return guard


def _validation(
    c: Any, detector: Detector, loader: DataLoader, table: DetectionTable, evaluator: Any, steps_per_epoch: int
) -> Validation:
    return Validation(
        table=table,
        loader=loader,
        evaluator=evaluator,
        score_threshold=c.eval.score_threshold,
        max_detections=c.eval.max_detections or detector.max_detections,
        pictures=c.eval.pictures,
        every=steps_from(c.run.eval_every, steps_per_epoch),
        best=Best(c.eval.metric_for_best, c.eval.early_stopping_patience),
    )


def _checkpoints(run: Any, folder: Path, detector: Detector, steps_per_epoch: int) -> Checkpoints:
    return Checkpoints(
        folder=folder / "checkpoints",
        weight_facts=WeightFacts(detector),
        save_every=steps_from(run.save_every, steps_per_epoch),
        keep=run.keep,
        keep_every=steps_from(run.keep_every, steps_per_epoch),
    )
