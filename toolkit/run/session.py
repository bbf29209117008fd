"""One run from start to end, built from settings: the only module of the toolkit that reads them.

    with session.session(config) as s:
        table, val_table = session.open_data(s)
        detector = session.make_detector(s, table)
        t = session.training(s, detector, table, val_table, CocoEvaluator(val_table, config.eval.backend))
        while not t.finished:
            train_one_epoch(t)
        session.end(s, t)    # a script can replace each of these calls by its own
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from toolkit import index
from toolkit.base.distributed import agree_max, leave, run_on_main, seed_step, state_from_main
from toolkit.base.errors import BadInput, Preempted, StoppedByGuard
from toolkit.base.signals import StopSignals, signal_name
from toolkit.data import pipeline
from toolkit.data.batches import naming_killed_workers
from toolkit.data.joining import counts_of, is_several
from toolkit.data.sampling import EpochSampler
from toolkit.data.splits import READING, check_not_empty, open_all_splits, open_split, share_of
from toolkit.data.table import DetectionTable
from toolkit.evaluation.coco import check_ground_truth
from toolkit.models import options_class
from toolkit.models.detector import Detector
from toolkit.models.start import check_losses, check_weights, start_detector
from toolkit.run.best import Best
from toolkit.run.checkpoint import Checkpoint, resolve_resume
from toolkit.run.failures import as_sentences
from toolkit.run.folder import keep_staged, prepare_run_folder, staging, write_environment
from toolkit.run.launcher import asked_settings, settle
from toolkit.run.log import Log
from toolkit.run.metrics_log import repair_rows
from toolkit.run.open_run import script_of, settings_beside
from toolkit.run.plan import Plan
from toolkit.run.processes import announce, prepare, set_threads, start_accelerator, wait_at_most
from toolkit.run.recovery import RunGuard
from toolkit.run.saving import load
from toolkit.run.settings_file import ABOUT_STARTING, CONFIG, Change, changes, in_force, next_config, save_config
from toolkit.run.status import FolderLock, RunStatus, run_status
from toolkit.run.trackers import About, agent_run_id, data_facts, tracker_names
from toolkit.run.training import Training
from toolkit.run.validation import (
    Validation,
    check_metric,
    evaluate,
    evaluate_test_split,
    finish,
    save_and_evaluate,
    warn_of_crowds,
)
from toolkit.run.watchdog import watchdog
from toolkit.run.writer import RunWriter
from toolkit.step.checkpointing import checkpoint_in_place
from toolkit.step.compiling import be_deterministic, compile_in_place
from toolkit.step.ema import Ema
from toolkit.step.length import Pace, StepBudget, is_time, steps_from
from toolkit.step.losses import LossWeights
from toolkit.step.memory import naming_the_batch, probe_memory
from toolkit.step.optim import build_optimizer, parameter_groups
from toolkit.step.precision import cpu_computes_in_bf16, describe_float32_layers, precision_of_device
from toolkit.step.schedules import schedule_of_settings


@dataclass
class Session:
    """What a run has before its data and model.

    config: with the seed of the checkpoint, where the run goes on from one. asked_seed: that of the command.
    staging: folder that a start writes to until nothing was refused; see `toolkit.run.folder.staging`.
    checkpoint: to go on from; None: a fresh start. stored: the settings it was trained with.
    t: the training, once it is built. log: that of the training, once it has begun.
    test_table: data of `eval.test_split`, evaluated when the training has ended.
    """

    config: Any
    accelerator: Accelerator
    folder: Path
    signals: StopSignals
    status: RunStatus
    checkpoint: Checkpoint | None
    stored: dict
    asked_seed: int
    lock: FolderLock
    staging: Path
    measured: dict = field(default_factory=dict)  # at the start; goes into environment.json
    log: Log | None = None
    t: Training | None = None
    test_table: DetectionTable | None = None

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def pins(self) -> bool:
        """Whether batches arrive in page-locked memory."""
        return self.accelerator.device.type == "cuda"

    def say(self, text: str) -> None:
        """Prints on the main process."""
        self.accelerator.print(text, flush=True)


@contextmanager
def session(config: Any) -> Iterator[Session]:
    """Processes, run folder, signals and status of a run while the block runs.

    Raises:
        BadInput: settings that cannot be met, a run folder that cannot be used, a checkpoint that cannot be resumed.
    """
    if trial := agent_run_id():  # all trials of a sweep are started by one command
        config = replace(config, run=replace(config.run, name=f"{config.run.name}-{trial}"))
    run, hub = config.run, config.hub
    tracker_names(run.tracker)
    accelerator, seed = start_accelerator(run.precision), run.seed
    is_main = accelerator.is_main_process
    if hub.push is not None and not run.eval_only:
        run_on_main(lambda: index.tool("check_push")(hub.push))
    with FolderLock() as lock:
        folder = run_on_main(lambda: prepare_run_folder(run.output_dir, run.name, run.resume, lock))
        with (
            StopSignals() as signals,
            run_status(folder, is_main) as status,
            watchdog(status.write),
            as_sentences(),
            naming_killed_workers(),
        ):
            set_threads(run.threads, accelerator.device)
            checkpoint, messages = state_from_main(lambda: resolve_resume(run.resume, folder, of_run=True))
            stored = run_on_main(lambda: checkpoint and settings_beside(checkpoint.path, config, options_class)) or {}
            if checkpoint is not None:  # data, augmentation and dropout go on as they began
                config = replace(config, run=replace(run, seed=checkpoint.of_part("sampler")["seed"]))
            if is_main:
                announce(accelerator.num_processes, folder, [*messages, *([lock.note] if lock.note else [])])
            if run.deterministic:
                be_deterministic()
            with staging(folder, run_on_main(lambda: status.begun), is_main) as staged:
                s = Session(config, accelerator, folder, signals, status, checkpoint, stored, seed, lock, staged)
                try:
                    with naming_the_batch(lambda: () if s.t is None else s.t.batches_under_way):
                        yield s
                except (Preempted, StoppedByGuard, BadInput) as error:
                    if s.log is not None:
                        state = "preempted" if isinstance(error, Preempted) else "failed"
                        s.log.attempt("ending the rows", partial(s.log.close, state))
                    raise
    leave()


def open_data(s: Session) -> tuple[DetectionTable, DetectionTable]:
    """Training and validation data, checked; what was wrong with them is listed in the run folder.

    Where a checkpoint is only evaluated, and the validation data are no part of the training data, which are one set,
    these are not opened: the validation data stand for them.
    """
    c = s.config.data
    reading = {key: getattr(c, key) for key in READING}
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
    for note in check_ground_truth(val_table):
        s.say(note)
    stop_if_asked(s, "while the data was read")
    return table, val_table


def make_detector(s: Session, table: DetectionTable, start: Callable | None = None) -> Detector:
    """The detector with the weights it begins with, on the device; the same ones on every rank.

    start: what builds it out of the training data, as `start_scene_graph`; None: it needs nothing but the classes.
    """
    c, options = s.config.data, s.config.model
    seed_step(s.config.run.seed, 0, 0)
    if start is not None:
        detector = start(options, table, s.staging, checkpoint=s.checkpoint, say=s.say)
    else:
        resumed_from = s.checkpoint and s.checkpoint.path
        detector = start_detector(options, table.class_names, s.staging, resumed_from=resumed_from, say=s.say)
    # As images are, else a GPU turns the weights with each step. On a CPU it is a tenth of a step in bfloat16.
    detector = detector.to(s.accelerator.device, memory_format=torch.channels_last)
    if detector.fixed_size:
        pipeline.check_one_size(detector.stride, [c.image_size, *c.multi_scale], c.scales)
    check_losses(detector, mixup=c.mixup, partly_labelled=table.labelled_classes is not None)
    if s.config.run.export:
        index.tool("check_export")(detector)
    stop_if_asked(s, "while the detector was built")
    return detector


def training(s: Session, detector: Detector, table: DetectionTable, val_table: DetectionTable, evaluator) -> Training:
    """Everything that the loop needs, at the step where the run begins or goes on.

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
    c, run, optim = s.config, s.config.run, s.config.optim
    kept = c.eval.max_detections or detector.max_detections
    ema = Ema(detector, optim.ema_decay, optim.ema_warmup)
    checkpoint_in_place(detector, optim.checkpointing, optim.compile)
    compile_in_place(detector, optim.compile)
    one_size = detector.fixed_size and not c.data.multi_scale and not run.deterministic
    optimizer = _optimizer(s, detector, weights, distillation)
    model, optimizer = prepare(s.accelerator, detector, optimizer, run.tf32, one_size)
    plan = _plan(c, sampler, optimizer)
    t = Training(
        accelerator=s.accelerator, model=model, detector=detector, loss_weights=weights, optimizer=optimizer, ema=ema,
        plan=plan, loader=loader, pace=_pace(c, plan.steps_per_epoch),
        validation=Validation(val_table, val_loader, evaluator, c.eval.score_threshold, kept, c.eval.pictures),
        guard=RunGuard(run.on_nonfinite, run.max_skips, run.max_rollbacks, run.rollback_lr_factor),
        best=Best(c.eval.metric_for_best, c.eval.early_stopping_patience),
        log=Log(s.is_main, run.meters, plan.steps_per_epoch, run.log_every), signals=s.signals, folder=s.folder,
        seed=run.seed, max_norm=optim.max_norm, eval_only=run.eval_only,
        data={"training": table, "validation": val_table}, distillation=distillation,
    )  # fmt: skip
    s.t = t
    if not run.eval_only:
        for warning in plan.warnings_of_length():
            s.say(warning)
        warn_of_crowds(t)
    _begin(s, t, table)
    wait_at_most(run.hang_minutes)
    return t


def end(s: Session, t: Training) -> None:
    """The last evaluation, the best weights in `final/`, the report, and all of it on the hub where that is asked for;
    of an evaluation alone the report only.

    Raises:
        Preempted: a signal came; a resumed run does what is left. BadInput: something cannot be written.
    """
    if not s.config.run.eval_only:
        finish(t)
        t.log.say_total(t.step)
        s.status.write("running")  # with what ended the training, which the report reads there
        stop_if_asked(s, "after the last evaluation")
        run_on_main(lambda: _write_final(s, t))
        stop_if_asked(s, "after final/ was written")
        if s.test_table is not None:
            evaluate_test_split(t, s.test_table, _evaluation_loader(s, t.detector, s.test_table), s.config.eval)
    t.log.raise_trouble()
    trained, hub = not s.config.run.eval_only, s.config.hub
    run_on_main(lambda: t.log.attempt("the report", partial(_report, s, t, trained)))
    if trained:  # after the report, which completes the model card
        about = {"run": s.folder.name, "step": t.best.step, t.best.metric: t.best.value}
        t.log.writer.keep_final(s.folder / "final", about)
    stop_if_asked(s, "while the report was written")
    if trained and hub.push is not None:
        upload = partial(index.tool("push"), s.folder, hub.push, private=hub.private, say=t.log.say)
        run_on_main(lambda: t.log.attempt("the upload to the hub", upload))
    t.log.close()


def stop_if_asked(s: Session, when: str) -> None:
    """Between two long parts: ends the run if a signal came, on any process; a collective. Raises Preempted."""
    if number := agree_max(s.signals.received):
        raise Preempted(f"{signal_name(number)} {when}; `--run.resume latest` goes on")


def _report(s: Session, t: Training, trained: bool) -> None:
    write_report = index.tool("report")
    write_report(s.folder, t.validation.table, trained)


def _write_final(s: Session, t: Training) -> None:
    c, folder, v, detector = s.config.data, s.folder / "final", t.validation, t.detector
    size = pipeline.processor_size(c.image_size, c.scales, c.max_size)
    with as_sentences():
        detector.save_final(folder, v.table.categories, size)
        if s.config.run.export:
            images = next(iter(v.loader)).images[:4]
            export = index.tool("export")
            t.log.say(export(detector, folder, images, v.table.categories, size, t.log.say, v.max_detections))


def _evaluation_loader(s: Session, detector: Detector, table: DetectionTable) -> DataLoader:
    c, images = s.config.data, s.config.eval.batch_size_per_device
    transform = pipeline.val_transform(c.image_size, c.scales, c.max_size)
    how = {"batch_size": images, "workers": c.workers, "stride": detector.stride, "pin": s.pins}
    return pipeline.validation_loader(table, transform, **how)


def _loaders(
    s: Session, detector: Detector, table: DetectionTable, val_table: DetectionTable
) -> tuple[EpochSampler, DataLoader, DataLoader]:
    c, how = s.config.data, {"seed": s.config.run.seed, "stride": detector.stride, "pin": s.pins}
    sampler, loader = pipeline.loader_of_settings(table, c, augmented=c.overfit_batches is None, **how)
    return sampler, loader, _evaluation_loader(s, detector, val_table)


def _settle(s: Session, detector: Detector) -> None:
    """Puts what is used in the place of `run.precision`, `run.tf32` and `optim.compile`, and says who decided it."""
    run, optim, device = s.config.run, s.config.optim, s.accelerator.device
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
    if note := describe_float32_layers(detector, device.type, settled.precision):
        s.say(note)
    s.measured["settled"] = asdict(settled)
    run = replace(run, precision=settled.precision, tf32=settled.tf32)
    s.config = replace(s.config, run=run, optim=replace(optim, compile=settled.compile))


def _distillation(s: Session, detector: Detector, table: DetectionTable) -> nn.Module | None:
    """The losses beside the teacher of `loss.teacher`; None where there is no teacher."""
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
    run, optim = c.run, c.optim
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


def _begin(s: Session, t: Training, table: DetectionTable) -> None:
    """Takes up the checkpoint, writes down what is run, and evaluates where that is due. Refuses before it writes."""
    run, checkpoint = s.config.run, s.checkpoint
    settings, changed = _settings(s, t)
    check_metric(t)
    if run.probe_memory:
        dataset, count = t.loader.dataset.dataset, s.config.data.batch_size_per_device
        probe_memory(t, pipeline.largest_batch(dataset, count, t.detector.stride, t.sampler.sizes))
    notes = load(t, checkpoint, run.resume_schedule == "saved", changed) if checkpoint is not None else []
    for note in (*changed, *notes):
        s.say(str(note))
    _record(s, t, table, settings, changed)
    for note in run_on_main(lambda: _repair_rows(s)) if checkpoint is not None else []:
        s.say(note)
    job = run.job_type or ("eval" if run.eval_only else "train")
    writer = RunWriter(
        s.folder,
        trackers=tracker_names(run.tracker),
        about=About(run.project, run.name, settings, t.best.metric, run.group, job, run.tags, run.notes),
        data=data_facts({"train": table, "val": t.validation.table}),
        is_main=s.is_main,
        resume_state=checkpoint and checkpoint.of_part("log")["writer"],
        eval_only=run.eval_only,
        track_unscaled=run.track_unscaled,
    )
    t.log.start(writer, s.status.details, t.step, t.plan.total_steps, t.plan.recut)
    s.log = t.log
    first = s.config.eval.before_training and t.step == 0
    due = (first or is_time(t.step, t.pace.eval_every)) and t.best.evaluated_step != t.step
    if run.eval_only:
        evaluate(t)
    elif due:  # at first, or the run before ended in this evaluation
        save_and_evaluate(t)


def _settings(s: Session, t: Training) -> tuple[dict, list[Change]]:
    """The settings in force, with the values that the model really used, and those that a resumed run has otherwise
    than before."""
    settings, left = asdict(s.config), {*ABOUT_STARTING, "pretrained_backbone"}
    used = t.detector.resolved_options().items()
    settings["model"] |= {key: value for key, value in used if key in settings["model"] and key not in left}
    if not s.stored:
        return settings, []
    budget = s.checkpoint.of_part("plan")["budget"]
    asked = settings | {"run": settings["run"] | {"seed": s.asked_seed}}
    is_measured = budget is None or budget["settled"]
    changed = changes(s.stored, asked, s.config.run.resume_schedule == "saved", minutes_count=not is_measured)
    if s.config.run.eval_only:  # no update will be made
        changed = [change for change in changed if change.key.partition(".")[0] not in ("optim", "schedule")]
    return in_force(asked, changed), changed


def _repair_rows(s: Session) -> list[str]:
    """Rows of this folder that the checkpoint counts and that are not there; another folder's are not looked for."""
    if s.checkpoint.path.resolve().parent != (s.folder / "checkpoints").resolve():
        return []
    rows = s.checkpoint.of_part("log")["writer"]["rows"]
    return repair_rows(s.folder / "metrics.jsonl", rows, more=s.config.run.eval_only)


def _record(s: Session, t: Training, table: DetectionTable, settings: dict, changed: list[Change]) -> None:
    """Says how large model and data are; writes `config.yaml`, `environment.json` and `status.json`.

    A later start keeps its settings in `config_2.yaml`, `config_3.yaml` and so on, with what is new in them.
    """
    sizes = [(p.numel(), p.requires_grad) for p in t.detector.parameters()]
    parameters = {"all": sum(n for n, _ in sizes), "trained": sum(n for n, trained in sizes if trained)}
    alone = s.config.run.eval_only and table is t.validation.table  # `open_data`: there was no need of training data
    tables = {"val": table} if alone else {"train": table, "val": t.validation.table}
    data = {name: counts_of(split) for name, split in tables.items()}
    name, words = ("val", "validation data") if alone else ("train", "training data")
    s.say(
        f"parameters: {parameters['all']:,}, trained: {parameters['trained']:,}; {words}: "
        f"{data[name]['images']:,} images, {data[name]['boxes']:,} boxes"
    )
    s.lock.keep = True
    if s.is_main:
        keep_staged(s.staging, s.folder)
        path = s.folder / CONFIG if s.status.begun else next_config(s.folder)
        remarks = []
        if s.checkpoint is not None or path.name != CONFIG:
            source = "" if s.checkpoint is None else f" of {s.checkpoint.path}"
            remarks = [f"These settings are in force from step {t.step}{source} on. Changed:", *map(str, changed)]
        save_config(settings, path, remarks)
        extra = {"parameters": parameters, "data": data, "script": script_of(s.config), **s.measured}
        write_environment(s.folder, s.config.run.seed, s.accelerator.num_processes, extra)
    s.status.begin(trains=not s.config.run.eval_only)
