"""The end of a run: the last evaluation, the best weights, the report, and the upload."""

import shlex
from functools import partial
from typing import Any

from toolkit import index
from toolkit.base.distributed import run_on_main
from toolkit.base.errors import as_sentences
from toolkit.base.files import shown_path
from toolkit.data import pipeline
from toolkit.models.final import write_white
from toolkit.run.help import program_command
from toolkit.run.session_build import evaluation_loader
from toolkit.run.training import Training
from toolkit.run.validation import evaluate_test_split, finish


def end(s: Any, t: Training) -> None:
    """End the run of the `Session` `s`, see `Session.end`."""
    trained = not s.config.run.eval_only
    if trained:
        finish(t)
        t.log.say_training_time(t.step)
        s.status.write("running")  # with what ended the training, which the report reads there
        s.stop_if_asked("after the last evaluation")
        run_on_main(lambda: write_final(s, t))
        s.stop_if_asked("after final/ was written")
        if s.test_table is not None:
            loader = evaluation_loader(s.config, t.detector, s.test_table, s.accelerator.device)
            evaluate_test_split(t, s.test_table, loader, s.config.eval)
    t.log.raise_write_error()
    hub = s.config.hub
    run_on_main(lambda: t.log.attempt("the report", partial(_report, s, t, trained)))
    if trained:  # after the report, which completes the model card
        best = t.validation.best
        about = {"run": s.folder.name, "step": best.step, best.metric: best.value}
        t.log.writer.keep_final(s.folder / "final", about)
    s.stop_if_asked("while the report was written")
    if trained and hub.push is not None:
        upload = partial(index.tool("push"), s.folder, hub.push, private=hub.private, say=t.log.say)
        run_on_main(lambda: t.log.attempt("the upload to the hub", upload))
    t.log.close()
    for line in last_lines(t, trained):
        s.say(line)


def last_lines(t: Training, trained: bool) -> list[str]:
    """Return the last lines of a run: where its report and its weights are, and the command that predicts with them.

    trained: False for a run that only evaluates, which has no weights of its own.
    """
    report = t.folder / "report" / "index.html"
    lines = [f"report: {shown_path(report)}"] if report.is_file() else []
    if not trained:
        return lines
    words = [program_command("predict"), shlex.quote(shown_path(t.folder)), "photo.jpg", "--out found"]
    if getattr(t.detector, "mode", "") in ("predcls", "sgcls"):  # a scene graph between given boxes
        words.append("--boxes photo.json")
    if ":" in t.detector.options["architecture"]:  # a class of the user's own, whose code runs
        words.append("--trust")
    return [*lines, f"weights: {shown_path(t.folder / 'final')}", f"predict: {' '.join(words)}"]


def _report(s: Any, t: Training, trained: bool) -> None:
    write_report = index.tool("report")
    write_report(s.folder, t.validation.table, trained)


def write_final(s: Any, t: Training) -> None:
    """Write the detector, which holds the best weights, to `final/`, and export it if `run.export` is set."""
    c = s.config.data
    folder = s.folder / "final"
    v = t.validation
    detector = t.detector
    size = pipeline.processor_size(c.image_size, c.scales, c.max_size)
    with as_sentences():
        detector.save_final(folder, v.table.categories, size)
        write_white(c.white, folder)
        if s.config.run.export:
            images = next(iter(v.loader)).images[:4]
            export = index.tool("export")
            t.log.say(export(detector, folder, images, v.table.categories, size, t.log.say, v.max_detections, c.white))
