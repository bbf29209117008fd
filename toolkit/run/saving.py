"""Saves and restores the state of a run in checkpoints. `t` is a `toolkit.run.training.Training` throughout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from toolkit.base.distributed import run_on_main
from toolkit.base.errors import BadInput
from toolkit.base.files import fsync_folder, warn_if_stalled
from toolkit.run.checkpoint import (
    Checkpoint,
    CheckpointError,
    bring_best,
    repair_latest,
    replace_state,
    save_checkpoint,
)
from toolkit.run.checkpoint_content import by_storage
from toolkit.run.parts import WeightFacts
from toolkit.run.settings_file import Change

EVALUATED_PARTS = ("model", "loss_weights", "ema")  # the parts that an evaluation needs


@dataclass
class Checkpoints:
    """The checkpoints of a run.

    Attributes:
        folder: the folder `checkpoints` in the run folder.
        weight_facts: facts about the weights in the checkpoints.
        save_every: optimizer steps between two checkpoints; 0: only at evaluations and at the end.
        keep: number of newest checkpoints to keep, in addition to `best`.
        keep_every: checkpoints of steps that are multiples of this number are never deleted; 0: there are none of them.
        saved_step: the step that was last saved or resumed from; -1: none.
    """

    folder: Path
    weight_facts: WeightFacts
    save_every: int = 0
    keep: int = 2
    keep_every: int = 0
    saved_step: int = -1


def save(t, best: bool = False) -> None:
    """Write the state of `t` to `checkpoints/step_000123/`, and delete the checkpoints that are no longer kept.

    Every rank must call it. The main process writes; if that fails, every rank raises `CheckpointError`.

    best: whether the link `best` is pointed at this checkpoint.
    """
    content = content_of_run(t)
    t.checkpoints.saved_step = t.step
    others = t.check.new_others()
    if others:
        t.log.say(
            f"in no checkpoint, so that a resumed run differs: {', '.join(others)}, and what it trains; "
            't.extra["NAME"] = optimizer in train saves it, and the module likewise'
        )
    with warn_if_stalled(f"the checkpoint of step {t.step} in {t.folder}", t.log.say):
        run_on_main(lambda: _write(t, content, best))


def _write(t, content: dict, best: bool) -> None:
    _sync_rows(t)
    save_checkpoint(t.checkpoints.folder, t.step, **content, **_keeping(t, best), kind="run")


def _keeping(t, best: bool) -> dict:
    """Return the arguments of `save_checkpoint` that say which checkpoints stay."""
    return {"best": best, "keep": t.checkpoints.keep, "keep_every": t.checkpoints.keep_every}


def save_outcome(t, best: bool = False) -> None:
    """Add the outcome of an evaluation to the checkpoint of the current step, which was written before the evaluation.

    The files of weights and optimizer are kept; the best metric, the number of rows, the patience and the schedule are
    replaced by those after the evaluation. If the checkpoint was damaged or deleted in the meantime, it is written
    again. Every rank must call it; if writing fails, every rank raises `CheckpointError`.

    best: whether this state is the best so far; the link `best` is then pointed at the checkpoint.
    """
    content = content_of_run(t)
    with warn_if_stalled(f"the metric in the checkpoint of step {t.step} in {t.folder}", t.log.say):
        run_on_main(lambda: _write_outcome(t, content, best))


def _write_outcome(t, content: dict, best: bool) -> None:
    _sync_rows(t)
    try:
        replace_state(t.checkpoints.folder, t.step, content["state"], **_keeping(t, best))
    except CheckpointError:
        _write(t, content, best)  # on a disk that takes nothing this fails too, and says why


def _sync_rows(t) -> None:
    """Flush the rows to the disk: a power cut must not take rows that the checkpoint counts."""
    rows = t.folder / "metrics.jsonl"
    if rows.is_file():
        fsync_folder(rows)


def content_of_run(t) -> dict:
    """Return the state of the run that a checkpoint holds, as keyword arguments of `save_checkpoint`."""
    return by_storage(t.step, t.parts.state_dict())


def restore_checkpoint(
    t, checkpoint: Checkpoint, keep_schedule: bool = True, changed: Sequence[Change] = ()
) -> list[str]:
    """Restore everything that a checkpoint holds into `t`, and return sentences on what differs from the run so far.

    If `run.eval_only` is set, only the weights are restored, and the run folder is not changed.

    Args:
        checkpoint: result of `load_checkpoint`.
        keep_schedule: True: restore the learning-rate schedule and the length of the checkpoint; False: keep those of
            this command.
        changed: settings that differ from those of the run so far, to explain why a checkpoint does not fit.

    Raises:
        BadInput: the checkpoint is of other classes or another model, or cannot be restored. The run folder is not
            changed then.
    """
    path = checkpoint.path
    names = [category["name"] for category in checkpoint.categories]
    if names != t.validation.table.class_names:
        renamed = [f"; {change.values}" for change in changed if change.key == "data.classes"]
        now = t.validation.table.class_names
        raise BadInput(f"{path} is of the classes {names}, the data has {now}{''.join(renamed)}")
    _check_fit(t, checkpoint, changed)
    rates_of_groups = [{key: group[key] for key in _OWN_RATES if key in group} for group in t.optimizer.param_groups]
    asked = t.plan.total_steps
    restore_rolled_back_state(t, checkpoint)
    if t.plan.eval_only:
        return _load_best(t, checkpoint)
    with checkpoint.reading("data") as data:
        notes = t.data.load_state_dict(data)
    with checkpoint.reading("sampler") as sampler:
        notes += _restore_sampler(t, sampler, data)
    if not keep_schedule:
        for group, rates in zip(t.optimizer.param_groups, rates_of_groups, strict=True):
            group.update(rates)
    with checkpoint.reading("weight_facts") as facts:
        notes += t.checkpoints.weight_facts.load_state_dict(facts)
    with checkpoint.reading("plan") as plan:
        notes += t.plan.resume(plan, sampler, t.step, keep_schedule)
        t.set_rates()  # those of the checkpoint's optimizer were of the update before
    with checkpoint.reading("guard") as guard:
        t.guard.load_state_dict(guard)
    with checkpoint.reading("log") as log:
        t.log.load_state_dict(log)
    total_steps = t.plan.total_steps
    if keep_schedule and total_steps <= t.step and asked > total_steps:
        notes.append(
            f"the run is finished at step {t.step} of {total_steps}, nothing is left to train: "
            f"--run.resume_schedule new goes on to step {asked}"
        )
    return notes + _load_best(t, checkpoint)


def _restore_sampler(t, sampler: Mapping, data: Mapping) -> list[str]:
    """Restore the place in the data, and return sentences on what differs.

    Raises BadInput if it is a place in other data. The message says which tables have changed.
    """
    try:
        return t.sampler.load_state_dict(sampler)
    except BadInput as error:
        raise BadInput([*error.problems, *t.data.changes(data)]) from error


# Of a parameter group, what the settings say of its updates.
_OWN_RATES = ("initial_lr", "weight_decay", "momentum", "nesterov", "betas")


def _check_fit(t, checkpoint: Checkpoint, changed: Sequence[Change]) -> None:
    """Raise BadInput if the weights or the optimizer of the checkpoint are of another model; say which settings differ.
    """
    saved = checkpoint.tensors
    faults = _misfits(t.detector.state_dict(), saved["model"])
    if "loss_weights" in saved or any(True for _ in t.loss_weights.parameters()):
        faults += _misfits(t.loss_weights.state_dict(), saved.get("loss_weights", {}))
    if not faults and not t.plan.eval_only:
        with checkpoint.reading("optimizer"):
            saved_sizes = [len(group["params"]) for group in checkpoint.optimizer["param_groups"]]
        sizes = [len(group["params"]) for group in t.optimizer.param_groups]
        if saved_sizes != sizes:
            there = f"there are {len(saved_sizes)} of {sum(saved_sizes)}"
            faults = [f"the optimizer has {len(sizes)} groups of {sum(sizes)} parameters, {there}"]
    if not faults:
        return
    causes = [change for change in changed if change.key.split(".")[0] in ("model", "optim", "loss")]
    causes.sort(key=lambda change: not change.key.startswith("model."))
    values = "; ".join(change.values for change in causes[:4]) + " and more" * (len(causes) > 4)
    problems = [
        f"{checkpoint.path} is of another model than these settings make{f': {values}' if causes else ''}.",
        f"{faults[0]}{f' and {len(faults) - 1} more' if len(faults) > 1 else ''}.",
        "Resume with the settings of the run that wrote it, or begin a new run with another --run.name "
        "(--model.pretrained takes over the weights that fit).",
    ]
    raise BadInput(problems)


def _misfits(current: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[str]:
    shapes = {name: (tuple(saved[name].shape), tuple(current[name].shape)) for name in current if name in saved}
    return [
        *(f"size mismatch of {name}: {a} there, {b} here" for name, (a, b) in shapes.items() if a != b),
        *(f"{name} is not there" for name in current if name not in saved),
        *(f"{name} is there and not here" for name in saved if name not in current),
    ]


def _load_best(t, checkpoint: Checkpoint) -> list[str]:
    best = t.validation.best
    folder = t.checkpoints.folder
    with checkpoint.reading("best") as saved:
        is_same_metric = best.load_state_dict(saved)
    in_this_folder = run_on_main(lambda: checkpoint.path.resolve().parent == folder.resolve())
    if t.plan.eval_only or in_this_folder:
        t.checkpoints.saved_step = t.step
    if in_this_folder and not t.plan.eval_only:
        run_on_main(lambda: repair_latest(checkpoint.path))
    if not is_same_metric:
        return [f"best metric starts anew: it was {saved['metric']}, now {best.metric}"]
    step = best.step
    if best.value is None or t.plan.eval_only or run_on_main(lambda: bring_best(checkpoint.path, step, folder)):
        return []
    best.value = None
    best.step = -1
    return [f"best metric starts anew: the checkpoint of step {step}, which had it, is not there or not valid any more"]


def restore_rolled_back_state(t, checkpoint: Checkpoint) -> None:
    """Set `t.step` to the step of a checkpoint and restore the parts that a rollback restores, see `toolkit.run.parts`.

    If `run.eval_only` is set, only the parts in `EVALUATED_PARTS` are restored.
    """
    t.step = checkpoint.step
    saved = checkpoint.by_part()
    if "ema" not in saved:  # a run that begins to average here
        saved["ema"] = saved["model"]
    if t.plan.eval_only:
        saved = {name: saved[name] for name in EVALUATED_PARTS if name in saved}
    for name, part in t.parts.undone_in_rollback().items():
        if name in saved:
            with checkpoint.reading(name):
                part.load_state_dict(saved[name])
