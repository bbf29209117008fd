"""What follows a window that the guard refused: a report, the forward undone, then as its policy says."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from toolkit.batch import Batch
from toolkit.distributed import run_on_main
from toolkit.errors import StoppedByGuard
from toolkit.runs.checkpoint import newest_valid
from toolkit.saving import load_weights, save
from toolkit.step.gradients import drop_gradients
from toolkit.step.guard import Action
from toolkit.step.nan_report import investigate, rerun_window


def recover(
    t, action: Action, window: Sequence[Batch], denominators: Sequence[Mapping], reduced: Mapping[str, float]
) -> None:
    """Recovers the run `t` (a `toolkit.training.Training`), every rank alike.

    Raises:
        StoppedByGuard: the policy says so; weights and state are those before the window, and saved.
    """
    if action is Action.CALIBRATE:  # the fp16 scaler looks for its scale: it skips this update by itself
        t.optimizer.step()
        t.optimizer.zero_grad()
        return
    message = _report(t, action, window, denominators, reduced)
    drop_gradients(t.weights)
    if (scaler := t.accelerator.scaler) is not None:
        scaler.update(scaler.get_scale())  # as it is: forgets that it has unscaled, which it does once per update
    if action is Action.STOP:
        save(t)
        raise StoppedByGuard(f"{message}\nThe weights before that step are saved.")
    if action is Action.ROLLBACK:
        # The data goes on after the window that broke: run again from the same weights it would break again.
        checkpoint, passed_over = run_on_main(lambda: newest_valid(t.folder / "checkpoints"))
        if checkpoint is None:
            raise StoppedByGuard(f"{message}\nThere is no checkpoint to roll back to. {' '.join(passed_over)}")
        load_weights(t, checkpoint)
        t.step = t.saved_step = checkpoint.step
        t.schedule.scale = t.guard.lr_scale
        t.set_rates()
        t.log.go_back(t.step)
    t.log.say(f"guard: {message}\n{action.value}: goes on from step {t.step} with the next data.")


def _report(t, action: Action, window, denominators, reduced) -> str:
    scaler, rank = t.accelerator.scaler, t.accelerator.process_index
    scale = scaler.get_scale() if scaler is not None else 1.0
    where = {"step": t.step, "seed": t.seed, "rank": rank, "precision": t.accelerator.mixed_precision, "scale": scale}
    facts = {
        "epoch": t.sampler.epoch,
        "losses": {name: reduced[name] for name in ("loss", *t.detector.loss_names)},
        "grad_norm": reduced["grad_norm"],
        "lr": t.schedule.rates(),
        "denominators": denominators,
        "loss_weights": t.weights.values(t.step),
        "action": action.value,
        "categories": [asdict(category) for category in t.validation.table.categories],
    }

    def run_again() -> list[dict]:
        return rerun_window(t.detector, t.weights, window, denominators, **where)

    return investigate(t.guard, t.detector, run_again, t.folder, window, where | facts)
