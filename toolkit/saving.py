"""What of a run a checkpoint holds: written, and taken up again. `t` is a `toolkit.training.Training` throughout."""

from dataclasses import asdict

from toolkit.distributed import run_on_main
from toolkit.errors import BadInput
from toolkit.runs.checkpoint import Checkpoint, bring_best, save_checkpoint


def save(t, best: bool = False) -> None:
    """Writes `checkpoints/step_000123/` on the main process; every rank raises if that fails."""
    tensors = {"model": t.detector.state_dict()}
    if t.ema is not None:
        tensors["ema"] = t.ema.module.state_dict()
    if any(True for _ in t.weights.parameters()):
        tensors["loss_weights"] = t.weights.state_dict()
    scaler, table = t.accelerator.scaler, t.validation.table
    state = {
        "step": t.step,
        "categories": [asdict(category) for category in table.categories],
        "predicates": list(table.predicates),
        "attributes": list(table.attributes),
        "sampler": t.sampler.state_dict(),
        "schedule": t.schedule.state_dict(),
        "total_steps": t.total_steps,
        "scaler": scaler.state_dict() if scaler is not None else None,
        "ema": t.ema.state_dict() if t.ema is not None else None,
        "guard": t.guard.state_dict(),
        "budget": t.budget.state_dict() if t.budget is not None else None,
        "metric_for_best": t.best.metric,
        **t.best.state_dict(),
        **t.log.state_dict(),
    }
    t.saved_step = t.step
    keep = {"keep": t.pace.keep, "keep_every": t.pace.keep_every}
    run_on_main(
        lambda: save_checkpoint(
            t.folder / "checkpoints", t.step, tensors=tensors, optimizer=t.optimizer.state_dict(), state=state,
            best=best, **keep,
        )
    )  # fmt: skip


def load(t, checkpoint: Checkpoint, keep_schedule: bool = True) -> list[str]:
    """Takes up everything a checkpoint holds; returns in words what will not be identical.

    Args:
        checkpoint: verified by its manifest.
        keep_schedule: False: keep this command's learning-rate schedule and length.

    Where `t.eval_only`, nothing will be trained, so the run folder's checkpoints and links stay as they are.

    Raises:
        BadInput: the checkpoint is of other classes or another model.
    """
    rates = [(group["initial_lr"], group["weight_decay"]) for group in t.optimizer.param_groups]
    state = checkpoint.state
    names = [category["name"] for category in state["categories"]]
    if names != t.validation.table.class_names:
        raise BadInput(f"{checkpoint.path} is of the classes {names}, the data has {t.validation.table.class_names}")
    try:
        load_weights(t, checkpoint)
    except (RuntimeError, ValueError) as error:  # tensors, or groups of the optimizer, that there are not
        raise BadInput(f"{checkpoint.path} is of another model, or of other optimizer groups: resume with the "
                       f"settings of the run that wrote it ({error})") from error  # fmt: skip
    t.step = state["step"]
    notes = t.sampler.load_state_dict(state["sampler"])
    if keep_schedule:
        t.schedule.load_state_dict(state["schedule"])
        t.total_steps = state["total_steps"]
        if state["budget"] is None:
            t.budget = None  # the saved length is no matter of minutes
        elif t.budget is not None:
            t.budget.load_state_dict(state["budget"])
    else:
        for group, (initial_lr, weight_decay) in zip(t.optimizer.param_groups, rates, strict=True):
            group.update(initial_lr=initial_lr, weight_decay=weight_decay)
    t.schedule.set(t.step)
    t.guard.load_state_dict(state["guard"])
    t.log.load_state_dict(state)
    return notes + _load_best(t, checkpoint)


def _load_best(t, checkpoint: Checkpoint) -> list[str]:
    state, folder = checkpoint.state, t.folder / "checkpoints"
    if t.eval_only or run_on_main(lambda: checkpoint.path.resolve().parent == folder.resolve()):
        t.saved_step = t.step
    if state["metric_for_best"] != t.best.metric:
        return [f"best metric starts anew: it was {state['metric_for_best']}, now {t.best.metric}"]
    value, step = state["best"], state["best_step"]
    t.best.load_state_dict(state)
    if value is None or t.eval_only or run_on_main(lambda: bring_best(checkpoint.path, step, folder)):
        return []
    t.best.value, t.best.step = None, -1
    return [f"best metric starts anew: the checkpoint of step {step}, which had it, is not there any more"]


def load_weights(t, checkpoint: Checkpoint) -> None:
    """Weights, their moving average, optimizer and scaler state of a checkpoint; nothing else."""
    t.detector.load_state_dict(checkpoint.tensors["model"])
    if "loss_weights" in checkpoint.tensors:
        t.weights.load_state_dict(checkpoint.tensors["loss_weights"])
    if t.ema is not None and "ema" in checkpoint.tensors:
        t.ema.module.load_state_dict(checkpoint.tensors["ema"])
        t.ema.load_state_dict(checkpoint.state["ema"])
    elif t.ema is not None:
        t.ema.module.load_state_dict(checkpoint.tensors["model"])
    t.optimizer.load_state_dict(checkpoint.optimizer)
    if t.accelerator.scaler is not None and checkpoint.state["scaler"]:
        t.accelerator.scaler.load_state_dict(checkpoint.state["scaler"])
