"""The beginning of a run: restores the checkpoint, and writes settings and environment to the run folder."""

from dataclasses import asdict
from typing import Any

from toolkit import index
from toolkit.base.distributed import run_on_main
from toolkit.data import pipeline
from toolkit.data.splits import counted_boxes, counts_of
from toolkit.data.table import DetectionTable
from toolkit.data.windows import windows_of_loader
from toolkit.run.checkpoint import Checkpoint
from toolkit.run.folder import keep_staged, write_environment
from toolkit.run.metrics_log import repair_rows
from toolkit.run.open_run import script_of
from toolkit.run.saving import restore_checkpoint
from toolkit.run.settings_file import ABOUT_STARTING, CONFIG_FILE, Change, changes, in_force, next_config, save_config
from toolkit.run.training import Training
from toolkit.run.validation import check_metric, evaluate, save_and_evaluate
from toolkit.run.writer import RunDescription, RunWriter, data_facts, tracker_names
from toolkit.step.schedules import is_time


def begin(s: Any, t: Training, table: DetectionTable) -> None:
    """Restore the checkpoint, write settings and environment to the run folder, and evaluate if that is due.

    Nothing is written to the run folder before all checks have passed. `s` is a `Session`, `table` the training data.
    """
    run = s.config.run
    checkpoint = s.checkpoint
    settings, changed = _settings(s, t)
    check_metric(t)
    if run.probe_memory:
        dataset = t.data.loader.dataset.dataset
        count = s.config.data.batch_size_per_device
        probe_memory = index.tool("probe_memory")
        probe_memory(t, pipeline.largest_batch(dataset, count, t.detector.stride, t.sampler.sizes))
    written = _written(checkpoint) if checkpoint is not None else None
    notes = restore_checkpoint(t, checkpoint, changed) if checkpoint is not None else []
    for note in (*changed, *notes):
        s.say(str(note))
    _record(s, t, table, settings, changed)
    for note in run_on_main(lambda: _repair_rows(s, written["rows"])) if checkpoint is not None else []:
        s.say(note)
    job = run.job_type or ("eval" if run.eval_only else "train")
    metric = t.validation.best.metric
    writer = RunWriter(
        s.folder,
        trackers=tracker_names(run.tracker),
        about=RunDescription(run.project, run.name, settings, metric, run.group, job, run.tags, run.notes),
        data=data_facts({"train": table, "val": t.validation.table}),
        is_main=s.is_main,
        resume_state=written,
        eval_only=run.eval_only,
        track_unscaled=run.track_unscaled,
    )
    t.log.start(writer, s.status.details, t.step, t.plan.total_steps, t.plan.recut)
    s.log = t.log
    first = s.config.eval.before_training and t.step == 0
    due = (first or is_time(t.step, t.validation.every)) and t.validation.best.evaluated_step != t.step
    if run.eval_only:
        evaluate(t)
    elif due:  # at first, or the run before ended in this evaluation
        save_and_evaluate(t)


def _settings(s: Any, t: Training) -> tuple[dict, list[Change]]:
    """Return the settings in force, with the values that the model really used, and the changes since the checkpoint.
    """
    settings = asdict(s.config)
    left = {*ABOUT_STARTING, "pretrained_backbone"}
    used = t.detector.resolved_options().items()
    settings["model"] |= {key: value for key, value in used if key in settings["model"] and key not in left}
    if not s.stored:
        return settings, []
    with s.checkpoint.reading("plan") as plan:
        is_measured = plan["budget"] is None or plan["budget"]["settled"]
    asked = settings | {"run": settings["run"] | {"seed": s.asked_seed}}
    changed = changes(s.stored, asked, s.config.run.resume_schedule == "saved", minutes_count=not is_measured)
    if s.config.run.eval_only:  # no update will be made
        changed = [change for change in changed if not change.key.startswith(("optim.", "schedule.", "data.tile"))]
    return in_force(asked, changed), changed


def _written(checkpoint: Checkpoint) -> dict:
    """Return the state of the `RunWriter` in a checkpoint."""
    with checkpoint.reading("log") as log:
        return {key: log["writer"][key] for key in ("rows", "run_ids")}


def _repair_rows(s: Any, rows: int) -> list[str]:
    """Repair the rows of this folder that the checkpoint counts and that are not there.

    Those of another folder are not looked for.
    """
    if s.checkpoint.path.resolve().parent != (s.folder / "checkpoints").resolve():
        return []
    return repair_rows(s.folder / "metrics.jsonl", rows, keep_later=s.config.run.eval_only)


def _record(s: Any, t: Training, table: DetectionTable, settings: dict, changed: list[Change]) -> None:
    """Print the sizes of model and data; write `config.yaml`, `environment.json` and `status.json`.

    A later start writes its settings to `config_2.yaml`, `config_3.yaml` and so on, with the changes as comments.
    """
    sizes = [(p.numel(), p.requires_grad) for p in t.detector.parameters()]
    parameters = {"all": sum(n for n, _ in sizes), "trained": sum(n for n, trained in sizes if trained)}
    alone = s.config.run.eval_only and table is t.validation.table  # `open_data`: there was no need of training data
    tables = {"val": table} if alone else {"train": table, "val": t.validation.table}
    data = {name: counts_of(split) for name, split in tables.items()}
    if windows_of_loader(t.data.loader) is not None and not alone:
        data["train"]["windows"] = t.sampler.num_samples  # of an epoch
    name, words = ("val", "validation data") if alone else ("train", "training data")
    s.say(
        f"parameters: {parameters['all']:,}, trained: {parameters['trained']:,}; {words}: "
        f"{counted_boxes(data[name])}"
    )
    s.lock.keep = True
    if s.is_main:
        keep_staged(s.staging, s.folder)
        path = s.folder / CONFIG_FILE if s.status.begun else next_config(s.folder)
        remarks = []
        if s.checkpoint is not None or path.name != CONFIG_FILE:
            source = "" if s.checkpoint is None else f" of {s.checkpoint.path}"
            remarks = [f"These settings are in force from step {t.step}{source} on. Changed:", *map(str, changed)]
        save_config(settings, path, remarks)
        extra = {"parameters": parameters, "data": data, "script": script_of(s.config), **s.measured}
        write_environment(s.folder, s.config.run.seed, s.accelerator.num_processes, extra)
    s.status.begin(trains=not s.config.run.eval_only)


