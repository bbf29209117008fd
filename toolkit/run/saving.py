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

EVALUATED_PARTS = ("model", "loss_weights", "ema", "best")  # the parts that an evaluation needs


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


def restore_checkpoint(t, checkpoint: Checkpoint, changed: Sequence[Change] = ()) -> list[str]:
    """Restore everything that a checkpoint holds into `t`, and return sentences on what differs from the run so far.

    If `run.eval_only` is set, only what an evaluation needs is restored, and the run folder is not changed.

    Args:
        checkpoint: result of `load_checkpoint`.
        changed: settings that differ from those of the run so far, to explain why a checkpoint does not fit.

    Raises:
        BadInput: the checkpoint is of other classes or another model, or cannot be restored. The run folder is not
            changed then.
    """
    _check_classes(t, checkpoint, changed)
    _check_fit(t, checkpoint, changed)
    t.step = checkpoint.step
    if t.plan.eval_only:
        t.checkpoints.saved_step = t.step
        return t.parts.named(EVALUATED_PARTS).load_state_dict(checkpoint)
    asked = t.plan.total_steps
    notes = t.parts.load_state_dict(checkpoint)
    with checkpoint.reading("plan"):
        notes += t.plan.go_on(t.step, checkpoint.of_part("sampler"))
        t.set_rates()  # those of the checkpoint's optimizer were of the update before
    total_steps = t.plan.total_steps
    if t.plan.follows_checkpoint and total_steps <= t.step and asked > total_steps:
        notes.append(
            f"the run is finished at step {t.step} of {total_steps}, nothing is left to train: "
            f"--run.resume_schedule new goes on to step {asked}"
        )
    return notes + _take_up_links(t, checkpoint)


def _take_up_links(t, checkpoint: Checkpoint) -> list[str]:
    """Point the links `latest` and `best` of this run folder where the resumed run has them; return a list of one
    sentence if the best checkpoint is gone.
    """
    best = t.validation.best
    folder = t.checkpoints.folder
    if run_on_main(lambda: checkpoint.path.resolve().parent == folder.resolve()):
        t.checkpoints.saved_step = t.step
        run_on_main(lambda: repair_latest(checkpoint.path))
    step = best.step
    if best.value is None or run_on_main(lambda: bring_best(checkpoint.path, step, folder)):
        return []
    best.value = None
    best.step = -1
    return [f"the best metric starts anew: its checkpoint (step {step}) is gone or damaged"]


def _check_classes(t, checkpoint: Checkpoint, changed: Sequence[Change]) -> None:
    """Raise BadInput if the checkpoint is of other classes than the data."""
    before = [category["name"] for category in checkpoint.categories]
    now = t.validation.table.class_names
    if before != now:
        renamed = [f"; {change.values}" for change in changed if change.key == "data.classes"]
        raise BadInput(f"{checkpoint.path} has the classes {before}, and the data {now}{''.join(renamed)}")


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
        f"{checkpoint.path} belongs to another model than that of these settings{f': {values}' if causes else ''}.",
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


def roll_back(t, checkpoint: Checkpoint) -> None:
    """Set `t.step` to the step of a checkpoint, and restore the parts that a rollback restores."""
    t.step = checkpoint.step
    t.parts.undone_in_rollback().load_state_dict(checkpoint)
