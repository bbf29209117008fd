"""The work around the body of a training loop: at the start of an epoch, and before and after each window.

A window is the list of micro-batches of one optimizer step. `t` is a `toolkit.run.training.Training` throughout; its
methods `windows`, `end_window` and `end_epoch` call these functions.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from toolkit.base.batch import Batch
from toolkit.base.errors import BadInput, Preempted
from toolkit.data.batches import Prefetcher, windows
from toolkit.data.dataset import MixedDataset
from toolkit.data.sampling import accumulation_at
from toolkit.run.log import training_row
from toolkit.run.recovery import keep_start, ranks_apart, state_is_sound
from toolkit.run.saving import save
from toolkit.run.training_window import TrainingWindow
from toolkit.run.validation import save_and_evaluate
from toolkit.step.guard import forget_unscaling
from toolkit.step.schedules import is_time

# ---- before the body -------------------------------------------------------------------------------------------------


def windows_of_epoch(t: Any) -> Iterator[TrainingWindow]:
    """Yield the remaining windows of the epoch, up to the end of the run, see `Training.windows`."""
    _prepare_epoch(t)
    prefetcher = Prefetcher(t.accelerator.device)
    micro_batches = accumulation_at(t.sampler.epoch, *t.plan.accumulation)
    batches_of_windows = prefetcher.through(windows(t.data.loader, micro_batches))
    with t.check.noting_others(lambda: [t.optimizer, *t.extra.optimizers]):
        for batches in batches_of_windows:
            t.log.timer.data_ready()
            yield _begin_window(t, batches, prefetcher)
            end_window(t)
            if t.finished:
                return
            t.log.timer.start()


def _prepare_epoch(t: Any) -> None:
    """Prepare the first window of an epoch, or of a run that is resumed inside one."""
    end_window(t)  # where the script has left the loop over the windows
    plan = t.plan
    dataset = getattr(getattr(t.data.loader, "dataset", None), "dataset", None)
    if isinstance(dataset, MixedDataset) and dataset.has_plain_epochs:
        # said before the workers are asked for images of this epoch
        per_epoch = -(-len(t.sampler) // plan.accumulation_steps)
        dataset.plan(plan.plain_epochs, plan.ceiling_steps + plan.recut, per_epoch, plan.epochs_are_fixed_at)
    for note in plan.take_up_accumulation(t.step):
        t.log.say(note)
    t.check.same_optimizer(t.optimizer)
    plan.note_own_rates()
    t.set_rates()
    keep_start(t)
    missing = t.extra.not_taken_up
    if missing:
        raise BadInput(f"the checkpoint holds {', '.join(missing)} in t.extra, which this script does not assign")
    if t.guard.policy == "rollback" and t.checkpoints.saved_step < 0:
        save(t)  # something to roll back to
    t.log.timer.start()


def _begin_window(t: Any, batches: Sequence[Batch], prefetcher: Prefetcher) -> TrainingWindow:
    t.sampler.advance_batches(len(batches))
    t.optimizer.zero_grad()
    t.extra.zero_grad()
    t.check.same_optimizer(t.optimizer)
    t.guard.snapshot(t.detector)
    t.window = TrainingWindow(t, batches, prefetcher)
    t.window.seed_what_is_outside()
    t.check.begin(t.step, len(batches))
    return t.window


def batches_under_way(t: Any) -> Sequence[Batch]:
    """Return the micro-batches of the current window while the body of the loop runs; an empty tuple outside of it."""
    return t.window.batches if t.window is not None and t.window.is_in_body else ()


# ---- after the body --------------------------------------------------------------------------------------------------


def end_window(t: Any) -> None:
    """Do what follows the body of the loop, see `Training.windows`; a second call for the same window does nothing."""
    window = t.window
    if window is None:
        return
    window.is_in_body = False
    if not t.check.was_refused:
        _follow_up(t, window)
    t.window = None


def _follow_up(t: Any, window: TrainingWindow) -> None:
    if not t.check.end():
        if window.is_unscaled:
            forget_unscaling(t.accelerator.scaler)
        _warn_once(t, "passed over", "the loop made no update in a window; the run goes on with the data after it")
        return
    if t.step == window.step:  # the script updates the weights by itself, `t.without("update")`
        count_update(t)
    note_step(t, window)
    save_and_evaluate_when_due(t, window)


def count_update(t: Any) -> None:
    """Count an update of the optimizer that has just been made: `t.step` rises by 1."""
    t.step += 1
    t.plan.note_update()


def counted_calls(t: Any) -> dict[str, int]:
    """Return how often calls of the loop were made, for `LoopCheck`; those that the settings turn off are left out."""
    counts = {"meters": t.meters.updates}
    if t.ema.is_on:
        counts["ema"] = t.ema.updates
    if t.max_norm and t.window is not None:
        counts["clip"] = t.window.clips
    return counts


def note_step(t: Any, window: TrainingWindow) -> None:
    """Log an update, count its time towards `run.max_minutes`, and set the learning rates of the next update."""
    seen = t.sampler.next_batch  # the window included
    images = sum(t.sampler.samples_in_batch(i) for i in range(seen - window.batches_taken, seen))
    noted = _noted(t, window)
    row = training_row(window.reduced, window.totals, t.optimizer.param_groups, noted)
    epoch = t.sampler.epoch
    notes = t.plan.note_step(t.step, window.totals["time_s"])  # before the row, which names the length
    t.log.set_total_steps(t.plan.total_steps, notes)
    t.log.log_step(
        t.step,
        t.plan.total_steps,
        epoch,
        row,
        images,
        noted,
        ends_epoch=t.epoch_is_over,
        seconds_left=t.plan.seconds_left,
        is_length_known=t.plan.is_length_known,
    )
    if t.epoch_is_over or t.step >= t.plan.total_steps:
        t.log.log_epoch(t.step, epoch)
    warning = t.plan.check_own_rates()
    if warning:
        t.log.say(f"step {t.step}: {warning}")
    t.set_rates()


def _noted(t: Any, window: TrainingWindow) -> dict[str, float]:
    """Return the means of what the script noted by `t.log.note`, over all ranks."""
    somebody_noted = window.totals["notes"] > 0
    if not somebody_noted and not (t.log.notes and t.accelerator.num_processes == 1):
        return {}
    noted = t.log.reduce_notes()
    duplicates = sorted(noted.keys() & {*window.totals, *t.detector.metric_names})
    if duplicates:
        raise BadInput(f"t.log.note: {', '.join(duplicates)} is in the rows already; give another name")
    return noted


def save_and_evaluate_when_due(t: Any, window: TrainingWindow) -> None:
    """Save the state and evaluate it, if either is due after this step.

    The state is saved before an evaluation, so that no progress is lost in it. A non-finite state is not saved, see
    `state_is_sound`.

    Raises:
        Preempted: some rank received a signal; the state is saved.
        BadInput: rows cannot be written any more; the state is saved.
    """
    signal = window.totals["signal"]
    evaluates = is_time(t.step, t.validation.every)
    saves = is_time(t.step, t.checkpoints.save_every)
    best_step = t.validation.best.step
    noted = best_step == t.step and best_step != window.best_step_before  # the loop has evaluated by itself
    if not (evaluates or saves or signal or noted or t.step >= t.plan.total_steps):
        return
    t.optimizer.zero_grad()  # their memory is the evaluation's
    if state_is_sound(t):
        warning = ranks_apart(t)
        if warning:
            _warn_once(t, "ranks", warning)
        if evaluates:
            save_and_evaluate(t, is_best=noted)
        elif noted or signal or saves:
            save(t, best=noted)
    t.log.raise_write_error()
    if signal:
        name = t.signals.name or "signal"
        raise Preempted(f"{name} at step {t.step}; saved, `--run.resume latest` goes on")


def _warn_once(t: Any, kind: str, text: str) -> None:
    if kind not in t.check.warned:
        t.check.warned.add(kind)
        t.log.say(f"step {t.step}: {text}")


def end_epoch(t: Any) -> dict[str, float]:
    """Log and return the averages of an epoch, and move on to the next epoch, see `Training.end_epoch`."""
    end_window(t)  # where the script has left the loop over the windows
    t.check.remember_weights(t.detector)
    if not t.epoch_is_over:  # the run is; what it has of the epoch stays in its state
        return t.log.averages.means()
    t.log.log_epoch(t.step, t.sampler.epoch)  # not yet, if the guard refused its last window
    t.sampler.set_epoch(t.sampler.epoch + 1)
    return t.log.end_epoch()
