"""The beginning of a run: makes the last checks, restores the checkpoint, then writes settings, environment and rows to
the run folder."""

from dataclasses import asdict
from typing import Any

from toolkit import index
from toolkit.base.distributed import run_on_main
from toolkit.data import pipeline
from toolkit.data.splits import counts_of
from toolkit.data.table import DetectionTable
from toolkit.data.tile_table import tiles_of_loader
from toolkit.models.detector import Detector
from toolkit.run.folder import keep_staged, write_environment
from toolkit.run.launcher import ResolvedExecution
from toolkit.run.metrics_log import repair_rows
from toolkit.run.open_run import script_of
from toolkit.run.saving import restore_checkpoint
from toolkit.run.settings_file import (
    ABOUT_STARTING,
    CONFIG_FILE,
    Change,
    changes,
    in_force,
    next_config,
    save_config,
    schedule_settings,
)
from toolkit.run.training import Training
from toolkit.run.validation import check_metric, evaluate, save_and_evaluate, warn_of_crowds
from toolkit.run.writer import RunDescription, RunWriter, data_facts, tracker_names
from toolkit.step.schedules import is_time


def begin(s: Any, t: Training, execution: ResolvedExecution, table: DetectionTable) -> None:
    """Restore the checkpoint, write settings and environment to the run folder, and evaluate if that is due.

    Args:
        s: the `Session`.
        execution: precision and compilation in use.
        table: training data.
    """
    run = s.config.run
    if not run.eval_only:
        for warning in t.plan.warnings_of_length():
            s.say(warning)
        warn_of_crowds(t)
    settings = _settings_used(s.config, t.detector, execution)
    changed = _changes(s, t, settings)
    settings = in_force(settings, changed)
    t.plan.settings = schedule_settings(settings)
    check_metric(t)
    if run.probe_memory:
        _probe_memory(t, s.config.data.batch_size_per_device)
    notes = [] if s.checkpoint is None else restore_checkpoint(t, s.checkpoint, changed)
    for note in (*changed, *notes):
        s.say(str(note))

    # All checks have passed: from here on the run folder is written to.
    _record(s, t, execution, table, settings, changed)
    _start_rows(s, t, table, settings)
    if run.eval_only:
        evaluate(t)
    elif _evaluation_is_due(t, s.config.eval.before_training):
        save_and_evaluate(t)


def _settings_used(config: Any, detector: Detector, execution: ResolvedExecution) -> dict[str, dict]:
    """Return all groups of settings, with what detector and device really use in place of "auto" and None."""
    settings = asdict(config)
    left = {*ABOUT_STARTING, "pretrained_backbone"}
    used = detector.resolved_options().items()
    settings["model"] |= {key: value for key, value in used if key in settings["model"] and key not in left}
    settings["run"] |= {"precision": execution.precision, "tf32": execution.tf32}
    settings["optim"] |= {"compile": execution.compile}
    return settings


def _changes(s: Any, t: Training, settings: dict[str, dict]) -> list[Change]:
    """Return what `settings` change of those that the checkpoint was trained with; without a checkpoint nothing.

    If schedule and length of the checkpoint are those of this command, set `t.plan.follows_checkpoint`: a command with
    a new schedule that is repeated after a kill goes on with its own.
    """
    if not s.stored:
        return []
    with s.checkpoint.reading("plan") as plan:
        is_measured = plan["budget"] is None or plan["budget"]["settled"]
        of_schedule = plan.get("settings", {})  # an earlier toolkit kept none
    if of_schedule == schedule_settings(settings):
        t.plan.follows_checkpoint = True
    # The newest settings of the run may be those of a start that was killed before it saved.
    stored = {group: entries | of_schedule.get(group, {}) for group, entries in s.stored.items()}
    asked = settings | {"run": settings["run"] | {"seed": s.asked_seed}}
    changed = changes(stored, asked, t.plan.follows_checkpoint, minutes_count=not is_measured)
    if s.config.run.eval_only:  # no update will be made
        changed = [change for change in changed if not change.key.startswith(("optim.", "schedule.", "data.tile"))]
    return changed


def _probe_memory(t: Training, batch_size: int) -> None:
    """Measure how much memory the largest batch takes, before training does."""
    dataset = t.data.loader.dataset.dataset
    probe_memory = index.tool("probe_memory")
    probe_memory(t, pipeline.largest_batch(dataset, batch_size, t.detector.stride, t.sampler.sizes))


def _record(
    s: Any,
    t: Training,
    execution: ResolvedExecution,
    table: DetectionTable,
    settings: dict[str, dict],
    changed: list[Change],
) -> None:
    """Print the size of the model; write `config.yaml`, `environment.json` and `status.json`.

    A later start writes its settings to `config_2.yaml`, `config_3.yaml` and so on, with the changes as comments.
    """
    sizes = [(p.numel(), p.requires_grad) for p in t.detector.parameters()]
    parameters = {"all": sum(n for n, _ in sizes), "trained": sum(n for n, trained in sizes if trained)}
    alone = s.config.run.eval_only and table is t.validation.table  # `open_data`: there was no need of training data
    tables = {"val": table} if alone else {"train": table, "val": t.validation.table}
    data = {name: counts_of(split) for name, split in tables.items()}
    if tiles_of_loader(t.data.loader) is not None and not alone:
        data["train"]["tiles"] = t.sampler.num_samples  # of an epoch
    are_all_trained = parameters["trained"] == parameters["all"]
    trained = "all trained" if are_all_trained else f"of which {parameters['trained']:,} are trained"
    s.say(f"parameters: {parameters['all']:,}, {trained}")
    s.lock.keep = True
    if s.is_main:
        keep_staged(s.staging, s.folder)
        path = s.folder / CONFIG_FILE if s.status.begun else next_config(s.folder)
        remarks = []
        if s.checkpoint is not None or path.name != CONFIG_FILE:
            source = "" if s.checkpoint is None else f" of {s.checkpoint.path}"
            remarks = [f"These settings are in force from step {t.step}{source} on. Changed:", *map(str, changed)]
        save_config(settings, path, remarks)
        facts = {
            "parameters": parameters,
            "data": data,
            "script": script_of(s.config),
            **s.facts,
            "settled": asdict(execution),
        }
        write_environment(s.folder, s.config.run.seed, s.accelerator.num_processes, facts)
    s.status.begin(trains=not s.config.run.eval_only)


def _start_rows(s: Any, t: Training, table: DetectionTable, settings: dict[str, dict]) -> None:
    """Open `metrics.jsonl` and the trackers, with the rows that the checkpoint counts, and show the progress bar."""
    run = s.config.run
    rows_before = None
    if s.checkpoint is not None:
        with s.checkpoint.reading("log") as log:
            rows_before = log["writer"]["rows"]
        in_this_folder = s.checkpoint.path.resolve().parent == (s.folder / "checkpoints").resolve()
        rows = s.folder / "metrics.jsonl"
        if in_this_folder:
            for note in run_on_main(lambda: repair_rows(rows, rows_before, keep_later=run.eval_only)):
                s.say(note)
    job = run.job_type or ("eval" if run.eval_only else "train")
    metric = t.validation.best.metric
    writer = RunWriter(
        s.folder,
        trackers=tracker_names(run.tracker),
        about=RunDescription(run.project, run.name, settings, metric, run.group, job, run.tags, run.notes),
        data=data_facts({"train": table, "val": t.validation.table}),
        is_main=s.is_main,
        rows_before=rows_before,
        eval_only=run.eval_only,
        track_unscaled=run.track_unscaled,
    )
    t.log.start(writer, s.status.details, t.step, t.plan.total_steps, t.plan.recut)


def _evaluation_is_due(t: Training, before_training: bool) -> bool:
    """Return whether to evaluate before the first step of this start: where that is asked for at step 0, and where the
    run before was interrupted in this evaluation."""
    if t.validation.best.evaluated_step == t.step:
        return False
    return (before_training and t.step == 0) or is_time(t.step, t.validation.every)
