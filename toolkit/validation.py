"""One evaluation during training: raw and averaged weights, numbers, pictures, and whether it is the best so far."""

from functools import partial

from toolkit.distributed import broadcast_buffers, run_on_main
from toolkit.errors import Preempted
from toolkit.evaluation.predict_dataset import predict_dataset
from toolkit.runs.checkpoint import Checkpoint, linked, load_checkpoint
from toolkit.training import Training


def validate(t: Training) -> bool:
    """Evaluates the detector (and its moving average) on the validation data; every rank takes part.

    Writes a row of metrics (`val/bbox_AP`, `val/loss`, `val/AP/<class>`, the same below `val/ema/`), prints the table
    and draws pictures.

    Returns:
        True if the metric for best is the best so far.

    Raises:
        Preempted: a signal came; the state is saved, and the resumed run evaluates again.
    """
    modules = {"val/": t.detector}
    if t.ema is not None:
        modules["val/ema/"] = t.ema.module
    row, shown = {}, {}
    for prefix, module in modules.items():
        broadcast_buffers(module)  # batch norms saw other images on other ranks; those of rank 0 count
        found = predict_dataset(
            module,
            t.val_loader,
            t.accelerator.device,
            loss_weights=t.weights,
            step=t.step,
            autocast=t.accelerator.autocast,
            stop=lambda: t.signals.received,
            score_threshold=t.score_threshold,
            description=f"evaluation at step {t.step}",
        )
        if found.interrupted:
            if t.saved_step != t.step:  # evaluating an earlier checkpoint alone must not make it the newest
                t.save()
            raise Preempted(f"signal during the evaluation at step {t.step}; saved, `--run.resume latest` goes on")
        shown = run_on_main(partial(t.evaluator.evaluate, found.by_image))
        row |= {f"{prefix}{name}": value for name, value in {**shown, **found.losses}.items()}
    better = t.note_metric(row)
    t.log(row)
    run_on_main(lambda: _show(t, found.by_image, shown, better))
    t.timer.start()
    return better


def finish(t: Training) -> None:
    """The last evaluation and checkpoint, if they are not there yet; then the detector holds the best weights.

    Best goes by the metric for best: the averaged weights where that is one of "ema/...".
    """
    better = t.evaluated_step != t.step and validate(t)
    if better or t.saved_step != t.step:
        t.save(best=better)
    checkpoint = run_on_main(lambda: _best(t))  # the main process alone need see the folder
    if checkpoint is not None:
        averaged = t.metric_for_best.startswith("ema/")
        t.detector.load_state_dict(checkpoint.tensors["ema" if averaged else "model"])
        t.say(f"best {t.metric_for_best}: {t.best:.4f} at step {checkpoint.step}")


def _best(t: Training) -> Checkpoint | None:
    path = linked(t.folder / "checkpoints", "best") if t.best is not None else None
    return None if path is None else load_checkpoint(path)


def _show(t: Training, predictions: dict, scores: dict, better: bool) -> None:
    """The table on the console, why an AP is 0, and the pictures, on the main process."""
    if not t.accelerator.is_main_process:
        return
    table = t.evaluator.describe(scores, predictions)
    t.say(f"evaluation at step {t.step}{' (best so far)' if better else ''}\n{table}")
    if t.pictures:
        path = t.folder / "report" / "pictures" / f"step_{t.step:06d}.png"
        try:
            t.evaluator.draw(predictions, t.pictures, path)
        except OSError as error:  # a full disk, say: what must be written says so itself
            t.say(f"the pictures of step {t.step} could not be written: {error}")
        else:
            t.writer.log_images({"val/predictions": path}, t.step)
