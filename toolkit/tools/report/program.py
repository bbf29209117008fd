"""Judges runs and predictions, and writes their page; `scripts/report.py` parses the flags."""

import argparse
from pathlib import Path

from accelerate import Accelerator

from toolkit.base.errors import BadInput
from toolkit.run.open_run import run_folder_of
from toolkit.tools.predict.predict_split import Predicted, SplitOptions, open_any
from toolkit.tools.report import PREDICTIONS
from toolkit.tools.report.comparison import settings_without_seed
from toolkit.tools.report.facts import RunFacts, read_records, run_facts
from toolkit.tools.report.judgement import Judgement, judge
from toolkit.tools.report.write import write_comparison, write_page


def report(arguments: argparse.Namespace) -> Path:
    """Write the report on the runs and predictions of `arguments`, and return the path of its page. Several of them are
    compared on one page."""
    accelerator = Accelerator()
    options = SplitOptions(arguments.split, arguments.image_dir, arguments.format, arguments.path)
    names = _short_names(arguments.sources)
    for folder in filter(None, map(_run_folder, arguments.sources)):
        read_records(folder)  # reports broken records before anything is predicted
    judged = []
    for source, name in zip(arguments.sources, names, strict=True):
        predicted = open_any(_file_of_run(source, arguments.weights, options), arguments.weights, options, accelerator)
        accelerator.print(f"{name}: judging {len(predicted.table)} images")
        judged.append((predicted, *judged_of(name, predicted)))
    if len(judged) > 1:
        return write_comparison(arguments.out or Path("report_comparison"), [judgement for *_, judgement in judged])
    predicted, run, judgement = judged[0]
    source = Path(arguments.sources[0]).expanduser()
    of_a_run = predicted.run_folder is not None
    beside = predicted.run_folder / "report" if of_a_run else source.with_name(f"{source.stem}_report")
    return write_page(arguments.out or beside, judgement, run, judgement.name)


def judged_of(name: str, predicted: Predicted) -> tuple[RunFacts, Judgement]:
    """Return the facts about the run of some predictions, which are empty if there is none, and their statistics.

    name: name of the detector, for people.
    """
    run = run_facts(predicted.run_folder)
    about = predicted.about | {"settings_without_seed": settings_without_seed(run.config)}
    about["precision"] = run.config.get("run", {}).get("precision")
    return run, judge(name, predicted.predictions, predicted.table, about)


def _file_of_run(source: str, weights: str | None, options: SplitOptions) -> Path | str:
    """Return the predictions file in the folder of a run, unless other predictions are requested."""
    file = Path(source).expanduser() / "report" / PREDICTIONS
    return file if file.is_file() and weights is None and options == SplitOptions() else source


def _run_folder(source: str) -> Path | None:
    try:
        return run_folder_of(Path(source).expanduser())
    except BadInput:
        return None


def _short_names(sources: list[str]) -> list[str]:
    """Return short, unique names of the sources."""
    short = [Path(source).expanduser().resolve().stem or source for source in sources]
    return [name if short.count(name) == 1 else source for name, source in zip(short, sources, strict=True)]
