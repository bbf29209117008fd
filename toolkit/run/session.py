"""One run from start to end, built from settings. Only this module and the three `session_...` beside it read them.

    with session.session(config) as s:
        table, val_table = session.open_data(s)
        detector = session.make_detector(s, table)
        t = session.training(s, detector, table, val_table, CocoEvaluator(val_table, config.eval.backend))
        while not t.finished:
            train_one_epoch(t)
        session.end(s, t)    # a script can replace each of these calls by its own
"""

from collections.abc import Callable
from functools import partial

import torch

from toolkit import index
from toolkit.base.distributed import agree_max, run_on_main, seed_step
from toolkit.base.errors import Preempted
from toolkit.base.signals import signal_name
from toolkit.data import pipeline
from toolkit.data.joining import is_several
from toolkit.data.splits import READING, check_not_empty, open_all_splits, open_split, share_of
from toolkit.data.table import DetectionTable
from toolkit.evaluation.coco import check_ground_truth
from toolkit.models.detector import Detector
from toolkit.models.start import check_losses, check_weights, start_detector
from toolkit.run.failures import as_sentences
from toolkit.run.processes import wait_at_most
from toolkit.run.session_begin import begin
from toolkit.run.session_objects import build_training, evaluation_loader
from toolkit.run.session_start import Session, session
from toolkit.run.training import Training
from toolkit.run.validation import (
    evaluate_test_split,
    finish,
    warn_of_crowds,
)

__all__ = ["Session", "end", "make_detector", "open_data", "session", "stop_if_asked", "training"]


def open_data(s: Session) -> tuple[DetectionTable, DetectionTable]:
    """Training and validation data, checked; what was wrong with them is listed in the run folder.

    Where a checkpoint is only evaluated, and the validation data are no part of the training data, which are one set,
    these are not opened: the validation data stand for them.
    """
    c = s.config.data
    reading = {key: getattr(c, key) for key in READING}
    apart = not share_of(c.val) and c.overfit_batches is None and not is_several(c.path, c.train)
    if s.config.run.eval_only and s.checkpoint is not None and apart:
        table = val_table = open_split(c.val, say=s.say, listing=s.staging / "data_problems_val.txt", **reading)
    else:
        test = None if s.config.run.eval_only else s.config.eval.test_split
        checks = [] if s.checkpoint else [partial(check_weights, s.config.model)]  # a checkpoint has the weights
        reading["max_train_images"] = c.max_train_images
        reading["overfit_images"] = (c.overfit_batches or 0) * c.batch_size_per_device * s.accelerator.num_processes
        opened = open_all_splits(c.train, c.val, test, s.staging, *checks, say=s.say, **reading)
        table, val_table, s.test_table = opened
        check_not_empty(table, c.allow_mostly_empty)
    for note in check_ground_truth(val_table):
        s.say(note)
    stop_if_asked(s, "while the data was read")
    return table, val_table


def make_detector(s: Session, table: DetectionTable, start: Callable | None = None) -> Detector:
    """The detector with the weights it begins with, on the device; the same ones on every rank.

    start: what builds it out of the training data, as `start_scene_graph`; None: it needs nothing but the classes.
    """
    c = s.config.data
    options = s.config.model
    seed_step(s.config.run.seed, 0, 0)
    if start is not None:
        detector = start(options, table, s.staging, checkpoint=s.checkpoint, say=s.say)
    else:
        resumed_from = s.checkpoint and s.checkpoint.path
        detector = start_detector(options, table.class_names, s.staging, resumed_from=resumed_from, say=s.say)
    # As images are, else a GPU turns the weights with each step. On a CPU it is a tenth of a step in bfloat16.
    detector = detector.to(s.accelerator.device, memory_format=torch.channels_last)
    if detector.fixed_size:
        pipeline.check_one_size(detector.stride, [c.image_size, *c.multi_scale], c.scales)
    check_losses(detector, mixup=c.mixup, partly_labelled=table.labelled_classes is not None)
    if s.config.run.export:
        index.tool("check_export")(detector)
    stop_if_asked(s, "while the detector was built")
    return detector


def training(s: Session, detector: Detector, table: DetectionTable, val_table: DetectionTable, evaluator) -> Training:
    """Build everything that the loop needs, at the step where the run begins or goes on.

    evaluator: what measures predictions on `val_table`, such as `CocoEvaluator`.
    """
    t = build_training(s, detector, table, val_table, evaluator)
    s.t = t
    if not s.config.run.eval_only:
        for warning in t.plan.warnings_of_length():
            s.say(warning)
        warn_of_crowds(t)
    begin(s, t, table)
    wait_at_most(s.config.run.hang_minutes)
    return t


def end(s: Session, t: Training) -> None:
    """The last evaluation, the best weights in `final/`, the report, and all of it on the hub where that is asked for;
    of an evaluation alone the report only.

    Raises:
        Preempted: a signal came; a resumed run does what is left. BadInput: something cannot be written.
    """
    if not s.config.run.eval_only:
        finish(t)
        t.log.say_training_time(t.step)
        s.status.write("running")  # with what ended the training, which the report reads there
        stop_if_asked(s, "after the last evaluation")
        run_on_main(lambda: _write_final(s, t))
        stop_if_asked(s, "after final/ was written")
        if s.test_table is not None:
            evaluate_test_split(t, s.test_table, evaluation_loader(s, t.detector, s.test_table), s.config.eval)
    t.log.raise_write_error()
    trained = not s.config.run.eval_only
    hub = s.config.hub
    run_on_main(lambda: t.log.attempt("the report", partial(_report, s, t, trained)))
    if trained:  # after the report, which completes the model card
        about = {"run": s.folder.name, "step": t.best.step, t.best.metric: t.best.value}
        t.log.writer.keep_final(s.folder / "final", about)
    stop_if_asked(s, "while the report was written")
    if trained and hub.push is not None:
        upload = partial(index.tool("push"), s.folder, hub.push, private=hub.private, say=t.log.say)
        run_on_main(lambda: t.log.attempt("the upload to the hub", upload))
    t.log.close()


def stop_if_asked(s: Session, when: str) -> None:
    """Between two long parts: ends the run if a signal came, on any process; a collective. Raises Preempted."""
    number = agree_max(s.signals.received)
    if number:
        raise Preempted(f"{signal_name(number)} {when}; `--run.resume latest` goes on")


def _report(s: Session, t: Training, trained: bool) -> None:
    write_report = index.tool("report")
    write_report(s.folder, t.validation.table, trained)


def _write_final(s: Session, t: Training) -> None:
    c = s.config.data
    folder = s.folder / "final"
    v = t.validation
    detector = t.detector
    size = pipeline.processor_size(c.image_size, c.scales, c.max_size)
    with as_sentences():
        detector.save_final(folder, v.table.categories, size)
        if s.config.run.export:
            images = next(iter(v.loader)).images[:4]
            export = index.tool("export")
            t.log.say(export(detector, folder, images, v.table.categories, size, t.log.say, v.max_detections))


