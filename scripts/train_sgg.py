"""Train scene graphs: relation heads on a Faster R-CNN.

    accelerate launch scripts/train_sgg.py                                         # bundled data, minutes on a CPU
    accelerate launch scripts/train_sgg.py --config configs/sgg/shapes_sgdet.yaml --model.detector runs/faster_rcnn
    accelerate launch scripts/train_sgg.py --config configs/sgg/vg150.yaml --model.detector runs/vg150_detector
    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 scripts/train_sgg.py       # two processes without a GPU

The loop is that of Scene-Graph-Benchmark `relation_train_net.py` (frozen detector, slow heads, gradient table,
validation before training, a rate that falls when validation stops improving and ends training), with the check of the
gradients before the update and on all ranks. `--help` explains every key; the run folder holds settings, rows,
checkpoints and the report. `--run.resume latest` goes on where a killed run stopped, to the bit.
"""

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator

from toolkit import session
from toolkit.data import pipeline as loading
from toolkit.data import splits
from toolkit.distributed import reduce_dict, run_on_main, seed_step
from toolkit.errors import Preempted
from toolkit.evaluation.report import write_report
from toolkit.memory_probe import probe_memory
from toolkit.models.relation.settings import GraphEvalConfig, GraphOptimConfig, GraphScheduleConfig, RelationConfig
from toolkit.models.relation.start import start_scene_graph
from toolkit.runs import command_line as cli
from toolkit.runs.checkpoint import Checkpoint, resolve_resume
from toolkit.runs.folder import prepare_run_folder
from toolkit.runs.settings import DataConfig, LossConfig, RunConfig
from toolkit.runs.status import run_status
from toolkit.runs.writer import RunWriter, tracker_kwargs
from toolkit.signals import StopSignals
from toolkit.step.compiling import compile_in_place
from toolkit.step.determinism import be_deterministic
from toolkit.step.ema import Ema
from toolkit.step.gradients import gradient_norm, gradient_table
from toolkit.step.guard import Action, NanGuard
from toolkit.step.length import StepBudget, is_time, steps_from
from toolkit.step.losses import LossWeights, window_denominators
from toolkit.step.memory import naming_the_batch
from toolkit.step.optim import build_optimizer, parameter_groups
from toolkit.step.plateau import PlateauSchedule
from toolkit.step.schedules import Schedule
from toolkit.training import Training, add_up
from toolkit.validation import finish, validate

DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "sgg" / "shapes.yaml"


@dataclass
class ModelConfig(RelationConfig):
    """The scene graph model. A key that is not given keeps the published value; see
    toolkit/models/relation/scene_graph.py."""

    architecture: Literal["scene_graph"] = "scene_graph"
    """A relation head on a Faster R-CNN."""
    mode: Literal["predcls", "sgcls", "sgdet"] = "predcls"
    """What is given: boxes and labels, boxes, or nothing but the image."""
    head: Literal["frequency", "imp", "motifs", "vctree", "transformer", "vtranse", "causal"] = "motifs"
    """What tells the predicates of pairs; frequency is the baseline that only counts."""
    head_options: dict[str, Any] | None = None
    """Settings of the head, such as {context: vctree, fusion: gate, effect: TDE} of causal."""
    detector: str | None = None
    """Run folder (checkpoint, final/) of train_faster_rcnn.py to start from; frozen unless `freeze` says otherwise."""
    detector_options: dict[str, Any] | None = None
    """Settings of a detector without a run, as train_faster_rcnn.py has them."""
    backbone: str | None = None
    """timm model of a detector without a run."""
    freeze: Literal["detector", "none"] | None = None
    """Whether the detector is trained too (in predcls: its feature maps); none given: not if it comes from a run."""


@dataclass
class Config:
    """Train scene graphs."""

    run: RunConfig = field(default_factory=lambda: RunConfig(name="sgg"))
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: GraphOptimConfig = field(default_factory=GraphOptimConfig)
    schedule: GraphScheduleConfig = field(default_factory=GraphScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    eval: GraphEvalConfig = field(default_factory=GraphEvalConfig)


def train_one_epoch(config: Config, t: Training) -> None:
    """What is left of the epoch, or up to the last step of the run. Order of one step: see docs/design.md."""
    t.model.train()
    for window in t.windows(config.optim.accumulation_steps):
        t.guard.snapshot(t.detector)
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

        if is_time(t.step + 1, config.optim.gradient_table_every):
            t.say(gradient_table(t.detector.named_parameters(), config.optim.max_norm, top=20))
        if config.optim.max_norm:
            torch.nn.utils.clip_grads_with_norm_(t.trained_parameters, config.optim.max_norm, grad_norm)
        t.optimizer.step()
        t.optimizer.zero_grad()
        t.step += 1
        t.note_step(reduced, images=t.images_in(window))
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
    transform = loading.train_transform(**sizes, flip=c.data.flip, photometric=c.data.photometric)
    if overfit:
        transform = loading.val_transform(**sizes)

    seed_step(c.run.seed, 0, 0)  # the same weights on every rank
    detector = start_scene_graph(vars(c.model), table, folder, checkpoint=checkpoint, say=accelerator.print)
    detector = detector.to(accelerator.device)
    weights = LossWeights(detector.loss_names, c.loss.weights, detector.default_weights).to(accelerator.device)

    sampler, loader = loading.training_loader(
        table, transform, batch_size_per_device=c.data.batch_size_per_device, workers=c.data.workers, seed=c.run.seed,
        stride=detector.stride, by_aspect_ratio=c.data.group_by_aspect_ratio, cache_images=c.data.cache_images,
    )  # fmt: skip
    val_loader = loading.validation_loader(
        val_table, loading.val_transform(**sizes), batch_size_per_device=c.eval.batch_size_per_device,
        workers=c.data.workers, stride=detector.stride,
    )  # fmt: skip
    steps_per_epoch = -(-len(sampler) // c.optim.accumulation_steps)
    total_steps = min(c.run.epochs * steps_per_epoch, c.run.max_steps or c.run.epochs * steps_per_epoch)

    ema = Ema(detector, c.optim.ema_decay) if c.optim.ema_decay else None
    compile_in_place(detector, c.optim.compile)
    images = c.data.batch_size_per_device * c.optim.accumulation_steps * accelerator.num_processes
    scale = images if c.optim.scale_lr_by_images else 1
    accelerator.print(f"learning rates are multiplied by {scale}: {c.optim.lr * scale:g} with {images} images a step")
    groups = parameter_groups(
        detector, lr=c.optim.lr, backbone_lr=c.optim.backbone_lr, weight_decay=c.optim.weight_decay,
        no_decay_on_norm_and_bias=c.optim.no_weight_decay_on_norm_and_bias, multipliers=c.optim.lr_multipliers,
        layer_decay=c.optim.layer_decay,
    )  # fmt: skip
    for group in groups:
        group["lr"] *= scale
    groups += weights.parameter_groups(c.optim.lr)
    model, optimizer = accelerator.prepare(detector, build_optimizer(c.optim.name, groups, momentum=c.optim.momentum))
    schedule = PlateauSchedule(
        optimizer, gamma=c.schedule.gamma, patience=c.schedule.plateau_patience,
        threshold=c.schedule.plateau_threshold, cooldown=c.schedule.plateau_cooldown,
        max_decays=c.schedule.max_decays, warmup_steps=c.schedule.warmup_steps,
        warmup_start=c.schedule.warmup_factor,
    ) if c.schedule.name == "plateau" else Schedule(
        optimizer, c.schedule.name, total_steps, warmup_steps=c.schedule.warmup_steps,
        warmup_factor=c.schedule.warmup_factor, gamma=c.schedule.gamma, power=c.schedule.power,
        milestones=[steps_from(milestone, steps_per_epoch) for milestone in c.schedule.milestones],
        step_size=steps_from(c.schedule.step_size, steps_per_epoch), final_factor=c.schedule.final_factor,
    )  # fmt: skip
    return Training(
        accelerator=accelerator, model=model, detector=detector, weights=weights, optimizer=optimizer,
        schedule=schedule, ema=ema, sampler=sampler, loader=loader, val_table=val_table, val_loader=val_loader,
        evaluator=detector.make_evaluator(val_table, c.eval.backend, c.eval.protocol, c.eval.zero_shot),
        signals=signals, folder=folder, seed=c.run.seed,
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
        first = config.eval.before_training and t.step == 0
        if run.eval_only or (first or is_time(t.step, t.eval_every)) and t.evaluated_step != t.step:
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
