"""Saves and restores the state of a run in checkpoints. `t` is a `toolkit.run.training.Training` throughout."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

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
from toolkit.run.settings_file import Change

WEIGHTS = ("model", "loss_weights", "ema")  # the parts that an evaluation needs


def save(t, best: bool = False) -> None:
    """Write `checkpoints/step_000123/` on the main process; every rank raises if that fails."""
    content = content_of_run(t)
    t.saved_step = t.step
    others = t.check.new_others()
    if others:
        t.log.say(
            f"in no checkpoint, so that a resumed run differs: {', '.join(others)}, and what it trains; "
            't.extra["NAME"] = optimizer in main saves it, and the module likewise'
        )
    with warn_if_stalled(f"the checkpoint of step {t.step} in {t.folder}", t.log.say):
        run_on_main(lambda: _write(t, content, best))


def _write(t, content: dict, best: bool) -> None:
    _sync_rows(t)
    save_checkpoint(t.folder / "checkpoints", t.step, **content, **_keeping(t, best), kind="run")


def _keeping(t, best: bool) -> dict:
    """Return the arguments of `save_checkpoint` that say which checkpoints stay."""
    return {"best": best, "keep": t.pace.keep, "keep_every": t.pace.keep_every}


def save_outcome(t, best: bool = False) -> None:
    """Write the outcome of an evaluation into the checkpoint of this step, which stands already.

    best: it is the best so far. Weights and optimizer are those that were saved; the metric, the rows, the patience
    and the schedule are as the evaluation left them. A checkpoint that somebody has damaged or deleted meanwhile is
    written anew. Every rank raises if that fails.
    """
    content = content_of_run(t)
    with warn_if_stalled(f"the metric in the checkpoint of step {t.step} in {t.folder}", t.log.say):
        run_on_main(lambda: _write_outcome(t, content, best))


def _write_outcome(t, content: dict, best: bool) -> None:
    _sync_rows(t)
    try:
        replace_state(t.folder / "checkpoints", t.step, content["state"], **_keeping(t, best))
    except CheckpointError:
        _write(t, content, best)  # on a disk that takes nothing this fails too, and says why


def _sync_rows(t) -> None:
    """Flush the rows to the disk: a power cut must not take rows that the checkpoint counts."""
    rows = t.folder / "metrics.jsonl"
    if rows.is_file():
        fsync_folder(rows)


def content_of_run(t) -> dict:
    """Return everything of a run that a checkpoint keeps, as arguments of `save_checkpoint`."""
    content = by_storage(t.parts.state_dict())
    table = t.validation.table
    frozen = [n for n, p in t.detector.named_parameters() if n in t.trainable and not p.requires_grad]
    content["state"] = {
        "step": t.step,
        "categories": [asdict(category) for category in table.categories],
        "predicates": list(table.predicates),
        "attributes": list(table.attributes),
        "infinite": t.infinite,
        "frozen": frozen,
        "data": {name: table.identity for name, table in t.data.items()},
        **content["state"],
    }
    return content


def load(t, checkpoint: Checkpoint, keep_schedule: bool = True, changed: Sequence[Change] = ()) -> list[str]:
    """Take up everything a checkpoint holds; return sentences on what will not be identical.

    Args:
        checkpoint: verified by its manifest.
        keep_schedule: False: keep this command's learning-rate schedule and length.
        changed: settings that are not those of the run so far, to say why a checkpoint does not fit.

    Where `t.eval_only`, nothing will be trained: weights are all that is asked for and taken, and the run folder's
    checkpoints and links stay as they are.

    Raises:
        BadInput: the checkpoint is of other classes or another model. The run folder is as it was.
    """
    state = checkpoint.state
    path = checkpoint.path
    names = [category["name"] for category in state["categories"]]
    if names != t.validation.table.class_names:
        raise BadInput(f"{path} is of the classes {names}, the data has {t.validation.table.class_names}")
    _check_fit(t, checkpoint, changed)
    rates_of_groups = [{key: group[key] for key in _OWN_RATES if key in group} for group in t.optimizer.param_groups]
    asked = t.plan.total_steps
    try:
        load_weights(t, checkpoint)
        if t.eval_only:
            return _load_best(t, checkpoint)
        sampler_before = checkpoint.of_part("sampler")
        notes = _other_data(t, state) + t.sampler.load_state_dict(sampler_before)
        if not keep_schedule:
            for group, rates in zip(t.optimizer.param_groups, rates_of_groups, strict=True):
                group.update(rates)
        notes += _freeze(t, state["frozen"])
        notes += t.plan.resume(checkpoint.of_part("plan"), sampler_before, t.step, keep_schedule)
        t.guard.load_state_dict(checkpoint.of_part("guard"))
        t.log.load_state_dict(checkpoint.of_part("log"))
        t.set_rates()  # those of the checkpoint's optimizer were of the update before
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        reason = f"cannot be taken up ({type(error).__name__}: {error})"
        raise BadInput(f"{path} {reason}: give an earlier checkpoint as --run.resume PATH") from error
    total_steps = t.plan.total_steps
    if keep_schedule and total_steps <= t.step and asked > total_steps:
        notes.append(
            f"the run is finished at step {t.step} of {total_steps}, nothing is left to train: "
            f"--run.resume_schedule new goes on to step {asked}"
        )
    return notes + _load_best(t, checkpoint)


def _other_data(t, state: Mapping) -> list[str]:
    """Data whose annotations are not those of the checkpoint, which may be on purpose, and what is other in them."""
    before = state.get("data", {})
    changes = {name: table.changed_since(before[name]) for name, table in t.data.items() if name in before}
    return [
        f"the {name} data are not those of the checkpoint ({change}): the run goes on with what is there now, and is "
        "not the one that was interrupted"
        for name, change in changes.items()
        if change
    ]


# Of a parameter group, what the settings say of its updates.
_OWN_RATES = ("initial_lr", "weight_decay", "momentum", "nesterov", "betas")


def _check_fit(t, checkpoint: Checkpoint, changed: Sequence[Change]) -> None:
    """Raise BadInput, in a few lines and in terms of the settings, where weights or optimizer are of another model."""
    saved = checkpoint.tensors
    faults = _misfits(t.detector.state_dict(), saved["model"])
    if "loss_weights" in saved or any(True for _ in t.loss_weights.parameters()):
        faults += _misfits(t.loss_weights.state_dict(), saved.get("loss_weights", {}))
    if not faults and not t.eval_only:
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


def _freeze(t, names: Sequence[str]) -> list[str]:
    """Freeze the parameters that the script had frozen in its loop; return a note."""
    parameters = dict(t.detector.named_parameters())
    for name in names:
        parameters[name].requires_grad_(False)
    return [f"{len(names)} parameters that the loop had frozen stay frozen, such as {names[0]}"] if names else []


def _load_best(t, checkpoint: Checkpoint) -> list[str]:
    saved = checkpoint.of_part("best")
    folder = t.folder / "checkpoints"
    in_this_folder = run_on_main(lambda: checkpoint.path.resolve().parent == folder.resolve())
    if t.eval_only or in_this_folder:
        t.saved_step = t.step
    if in_this_folder and not t.eval_only:
        run_on_main(lambda: repair_latest(checkpoint.path))
    if not t.best.load_state_dict(saved):
        return [f"best metric starts anew: it was {saved['metric']}, now {t.best.metric}"]
    step = t.best.step
    if t.best.value is None or t.eval_only or run_on_main(lambda: bring_best(checkpoint.path, step, folder)):
        return []
    t.best.value = None
    t.best.step = -1
    return [f"best metric starts anew: the checkpoint of step {step}, which had it, is not there or not valid any more"]


def load_weights(t, checkpoint: Checkpoint) -> None:
    """Take over the step of a checkpoint and everything that goes back with it, see `toolkit.run.parts`.

    Where `t.eval_only`, weights are all that is taken.
    """
    t.step = checkpoint.step
    saved = checkpoint.by_part()
    if "ema" not in saved:  # a run that begins to average here
        saved["ema"] = saved["model"]
    if t.eval_only:
        saved = {name: saved[name] for name in WEIGHTS if name in saved}
    t.parts.undone_in_rollback().load_state_dict(saved)


def infinite_buffers(detector) -> list[str]:
    """Return the names of buffers that hold infinities by design, such as masks: those of a new detector."""
    buffers = dict(detector.named_buffers())
    floats = [name for name in detector.state_dict() if name in buffers and buffers[name].is_floating_point()]
    return [name for name in floats if not bool(buffers[name].isfinite().all())]
