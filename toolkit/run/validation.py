"""Evaluates a run: during training the raw and the averaged weights on the validation data, with metrics, pictures and
the choice of the best; after training the best weights on a test split.

`t` is a `toolkit.run.training.Training` throughout.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from toolkit import index
from toolkit.base.distributed import broadcast_buffers, run_on_main, state_from_main
from toolkit.base.errors import Preempted, StoppedByGuard
from toolkit.data.table import DetectionTable
from toolkit.data.tile_table import tiles_of_loader
from toolkit.evaluation.coco import GRAPH_EVAL_SETTINGS, crowded_notes, make_evaluator, matches_of
from toolkit.evaluation.predict_dataset import Predictions, predict_dataset
from toolkit.evaluation.predictions import PREDICTIONS, write_predictions
from toolkit.run.best import Best, no_such_metric
from toolkit.run.checkpoint import CheckpointError, linked, load_checkpoint, mark_best
from toolkit.run.recovery import state_is_sound
from toolkit.run.saving import save, save_outcome
from toolkit.run.status import describe_ending
from toolkit.step.guard import nonfinite
from toolkit.step.meters import machine_figures

PICTURES_KEPT = 5  # evaluations whose pictures stay in report/pictures, beside those of the best one


@dataclass
class Validation:
    """The validation data and evaluator of a run.

    Attributes:
        evaluator: computes the metrics of predictions on `table`, such as `CocoEvaluator`.
        score_threshold: detections with a lower score are left out.
        max_detections: maximum number of detections of an image, over all classes.
        pictures: number of images that are drawn at each evaluation.
        every: optimizer steps between two evaluations; 0: only at the end.
        best: the best evaluation so far.
        last_row: the metrics of the last evaluation.
    """

    table: DetectionTable
    loader: DataLoader | None
    evaluator: Any
    score_threshold: float = 0.0
    max_detections: int = 100
    pictures: int = 8
    every: int = 0
    best: Best = field(default_factory=Best)
    last_row: dict[str, float | None] = field(default_factory=dict)


def save_and_evaluate(t, is_best: bool = False) -> None:
    """Save the state, evaluate it, and add the outcome to the checkpoint; every rank must call it.

    The state is saved first, so that no progress is lost if the evaluation fails. A run that resumes from a checkpoint
    without the outcome of its evaluation makes that evaluation first.

    is_best: the script has evaluated this state itself and found it the best so far.

    Raises:
        Preempted: see `evaluate`.
    """
    if t.checkpoints.saved_step != t.step:
        save(t, best=is_best)
    better = evaluate(t)
    if t.ended_by:  # early stopping, in the middle of an epoch
        t.log.log_epoch(t.step, t.sampler.epoch)
    save_outcome(t, best=better or is_best)


def evaluate(t) -> bool:
    """Evaluate the detector, and its moving average if there is one, on the validation data; every rank must call it.

    It writes a row of metrics (`val/bbox_AP`, `val/loss`, `val/AP/<class>`; the same names under `val/ema/` for the
    moving average) and of memory and load of all machines, prints a table of the metrics, and draws pictures.

    Returns:
        True if `eval.metric_for_best` is the best so far.

    Raises:
        Preempted: a signal was received; nothing is recorded, and the resumed run evaluates again.
    """
    modules = {"val/": t.detector}
    if t.ema.is_on:
        modules["val/ema/"] = t.ema.module
    row = {}
    metrics = {}
    kept = {}
    for prefix, module in modules.items():
        broadcast_buffers(module)  # batch norms saw other images on other ranks; those of rank 0 count
        what = f"evaluation at step {t.step}"
        predictions = _predict(t, module, t.validation.loader, t.validation.score_threshold, what)
        if predictions.interrupted:
            saved = "saved, " if t.checkpoints.saved_step == t.step else ""
            raise Preempted(f"signal during the evaluation at step {t.step}; {saved}`--run.resume latest` goes on")
        metrics = run_on_main(partial(t.validation.evaluator.evaluate, predictions.by_image))
        if (module is not t.detector) == t.validation.best.of_average or not t.ema.is_on:
            weights = prefix.removeprefix("val/") or "raw"
            kept = {"predictions": predictions.by_image, "scores": metrics, "weights": weights}
        row |= {f"{prefix}{name}": value for name, value in {**metrics, **predictions.losses}.items()}
    better = note_metric(t, row)
    t.log.write(t.step, t.sampler.epoch, row | machine_figures())
    show = partial(_show, t, predictions.by_image, metrics, better)
    keep = partial(_keep_predictions, t, better, **kept)
    run_on_main(lambda: t.log.attempt(f"showing the evaluation of step {t.step}", show))
    run_on_main(lambda: t.log.attempt(f"keeping the predictions of step {t.step}", keep))
    t.log.timer.start()
    return better


def _predict(t, module: nn.Module, loader: DataLoader, score_threshold: float, description: str) -> Predictions:
    return predict_dataset(
        module,
        loader,
        t.accelerator.device,
        loss_weights=t.loss_weights,
        step=t.step,
        stop=lambda: t.signals.received,
        score_threshold=score_threshold,
        top_k=t.validation.max_detections,
        description=description,
        say=t.log.say,
    )


def note_metric(t, row: dict[str, float | None]) -> bool:
    """Record an evaluation row: pass its `eval.metric_for_best` to `t.validation.best` and to the schedule.

    Returns True if the value is the best so far.
    """
    t.validation.last_row = dict(row)
    best = t.validation.best
    better = best.note(t.step, row)
    if t.step > 0 and t.plan.schedule.observe(best.larger_is_better(row)):
        t.set_rates()
        t.log.say(f"learning rates fall to {t.plan.schedule.rates()}: val/{best.metric} has stopped improving")
    return better


def check_metric(t) -> None:
    """Raise BadInput if no evaluation of this run will have the metric `eval.metric_for_best`; a collective."""
    evaluator = t.validation.evaluator
    empty = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}
    if t.detector.predicts_masks:
        empty["masks"] = []
    nothing = dict.fromkeys(evaluator.image_ids, empty)
    metrics = run_on_main(lambda: list(evaluator.evaluate(nothing)))
    metrics = [*metrics, *t.loss_weights.row_names, *t.detector.metric_names]
    if t.ema.is_on:
        metrics += [f"ema/{name}" for name in metrics]
    metric = t.validation.best.metric
    if metric not in metrics:
        raise no_such_metric(metric, metrics, t.ema.is_on)


def warn_of_crowds(t) -> None:
    """Print how many images have more objects than the detector can find, or than `eval.max_detections` keeps."""
    limits = dict(t.detector.object_limits)
    kept = {"eval.max_detections": t.validation.max_detections}
    is_graph = bool(getattr(t.detector, "predicates", ()))  # of which pairs are kept
    for name, wanted in (("training", limits), ("validation", limits if is_graph else limits | kept)):
        table = t.data.tables[name]
        tiles = tiles_of_loader(t.validation.loader) if name == "validation" else None
        for note in crowded_notes(name, table if tiles is None else tiles, wanted):
            t.log.say(note)


def finish(t) -> None:
    """Make the last evaluation and checkpoint, if they are still missing, and load the best weights into the detector.

    The best weights are those of the best checkpoint, the averaged ones if `eval.metric_for_best` begins with "ema/".
    The reason for the end of the training is printed and stored for `status.json`.

    Raises:
        StoppedByGuard: the state or the best weights are not finite; the newest finite state is saved.
    """
    if t.check.weights_were_changed(t.detector):
        t.log.say(
            "warning: the weights were changed after the last update: no evaluation has seen them, and final/ gets "
            "those of the best checkpoint; save your own by t.detector.save_final(folder, categories, size)"
        )
    t.end_window()  # where the script has left its loop
    if t.epoch_is_over:
        t.end_epoch()  # not yet, in a run that was killed after its last step
    else:  # early stopping, `max_decays` or the script's own loop ended inside it
        t.log.log_epoch(t.step, t.sampler.epoch)
    if not state_is_sound(t) and not t.finished:
        raise StoppedByGuard(
            f"{t.guard.reason}, found at the end of training: the run is at step {t.step} again, and "
            "`--run.resume latest` trains on from there"
        )
    best = t.validation.best
    if best.evaluated_step != t.step:
        save_and_evaluate(t)
    elif t.checkpoints.saved_step != t.step:  # a run that goes on from it is not evaluated again
        save(t)
    t.log.status["ended_by"] = t.ended_by
    t.log.say(f"{describe_ending(t.ended_by) or 'training ended by the script'}, at step {t.step}")
    step, weights, fault = state_from_main(lambda: _best(t))  # the main process alone need see the folder
    if weights is not None:
        t.detector.load_state_dict(weights)
        t.log.say(f"best {best.metric}: {best.value:.4f} at step {step}")
    elif best.of_average:
        t.detector.load_state_dict(t.ema.module.state_dict())
    if fault:
        t.log.say(f"warning: the best checkpoint cannot be used, final/ gets the weights of step {t.step}: {fault}")
    named = [*t.detector.named_parameters(), *t.guard.watched()]
    broken = nonfinite((("weight", name), tensor) for name, tensor in named)
    if broken:
        raise StoppedByGuard(f"the best weights are not finite: {', '.join(broken[:3])}; nothing is written to final/")


def _best(t) -> tuple[int, dict | None, str]:
    """Return step and weights of the best checkpoint, and ""; or -1, None, and why the best checkpoint cannot be used.

    If it is damaged, the link `best` is pointed at the last checkpoint.
    """
    best = t.validation.best
    path = linked(t.checkpoints.folder, "best") if best.value is not None else None
    if path is None:
        return -1, None, "there is none in this run folder" if best.value is not None else ""
    try:
        checkpoint = load_checkpoint(path)
    except CheckpointError as error:
        mark_best(t.checkpoints.folder / f"step_{t.step:06d}")
        return -1, None, str(error)
    return checkpoint.step, checkpoint.tensors["ema" if best.of_average else "model"], ""


def _keep_predictions(t, better: bool, predictions: dict, scores: dict, weights: str) -> None:
    """Write `report/predictions.json`, which the report is made from, if the evaluated weights are the best so far."""
    path = t.folder / "report" / PREDICTIONS
    if (better or not path.exists()) and _are_boxes(predictions):
        about = _about(t.validation.evaluator, f"{t.folder.name}, step {t.step} ({weights.strip('/')} weights)", t.step)
        write_predictions(path, predictions, t.validation.table, scores=scores, **about)


def _about(evaluator, detector: str, step: int) -> dict:
    """Return the metadata of a file of predictions."""
    about = {key: getattr(evaluator, key) for key in ("mode", "protocol") if hasattr(evaluator, key)}
    return about | {"detector": detector, "step": step}


def _are_boxes(predictions: dict) -> bool:
    """Return whether the predictions are boxes; a user's own detector may predict something else."""
    return all({"boxes", "scores", "labels"} <= prediction.keys() for prediction in predictions.values())


def _show(t, predictions: dict, scores: dict, better: bool) -> None:
    """Print the table, and why an AP is 0; draw the pictures."""
    table = t.validation.evaluator.describe(scores, predictions, t.step)
    t.log.say(f"evaluation at step {t.step}{' (best so far)' if better else ''}\n{table}")
    if t.validation.pictures:
        path = t.folder / "report" / "pictures" / f"step_{t.step:06d}.png"
        t.validation.evaluator.draw(predictions, t.validation.pictures, path)
        _forget_pictures(path, best=f"step_{t.validation.best.step:06d}.png")
    if t.log.writer.shows and _are_boxes(predictions):
        grid = Image.open(path).convert("RGB") if t.validation.pictures else None
        evaluator = t.validation.evaluator
        by_mask = getattr(evaluator, "mask_matches", None)
        matches = by_mask or matches_of(evaluator, predictions, t.validation.table)
        shown_evaluation = index.tool("shown")
        evaluation = shown_evaluation(t.validation.table, matches, scores, t.validation.pictures, grid)
        t.log.writer.show(evaluation, t.step)


def _forget_pictures(newest: Path, best: str) -> None:
    """Delete the pictures of evaluations before the one at `newest`, all but the last few and the best one."""
    pictures = sorted(newest.parent.glob("step_*.png"), key=lambda path: path.stat().st_mtime_ns)
    earlier = [path for path in pictures if path != newest]  # whatever the clock says
    for path in earlier[: 1 - PICTURES_KEPT]:
        if path.name != best:
            path.unlink(missing_ok=True)


def evaluate_test_split(t, table: DetectionTable, loader: DataLoader, e: Any) -> dict[str, float | None]:
    """Evaluate the detector on the test split and return the row of metrics, `test/...`; every rank must call it.

    Call it after `finish`, which loads the best weights. The row is written, a table is printed, and the predictions
    are written to `report/test_predictions.json`.

    Args:
        table, loader: the test split.
        e: settings of the evaluation, a `toolkit.run.settings.EvalConfig` or `SceneGraphEvalConfig`.

    Raises:
        Preempted: a signal was received; the resumed run evaluates again.
    """
    of_graphs = {key: getattr(e, key) for key in GRAPH_EVAL_SETTINGS if hasattr(e, key)}
    evaluator = make_evaluator(t.detector, table, e.backend, **of_graphs)
    predictions = _predict(t, t.detector, loader, e.score_threshold, "test split")
    if predictions.interrupted:
        raise Preempted("signal during the evaluation on the test split; `--run.resume latest` does it again")
    scores = run_on_main(partial(evaluator.evaluate, predictions.by_image))
    row = {f"test/{name}": value for name, value in {**scores, **predictions.losses}.items()}
    t.log.write(t.step, t.sampler.epoch, row)
    show = partial(_show_test_split, t, table, evaluator, predictions.by_image, scores)
    run_on_main(lambda: t.log.attempt("showing the evaluation on the test split", show))
    return row


def _show_test_split(t, table: DetectionTable, evaluator, predictions: dict, scores: dict) -> None:
    """Print the table; write the predictions with their numbers to a file."""
    step = t.step if t.validation.best.value is None else t.validation.best.step
    summary = evaluator.describe(scores, predictions, step)
    t.log.say(f"test split {table.name}, weights of step {step}\n{summary}")
    about = _about(evaluator, f"{t.folder.name}, step {step}", step)
    write_predictions(t.folder / "report" / "test_predictions.json", predictions, table, scores=scores, **about)
