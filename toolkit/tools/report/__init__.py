"""Writes the report of a run: `README.md` as a summary, `index.html` with everything, `report.json` for programs."""

from pathlib import Path

from toolkit.evaluation.predictions import PREDICTIONS
from toolkit.tools.predictions_file import read_predictions
from toolkit.tools.report.facts import run_facts
from toolkit.tools.report.figures import series, smoothed
from toolkit.tools.report.markdown import plot_curves, write_markdown

__all__ = ["PREDICTIONS", "plot_curves", "series", "smoothed", "write_report"]


def write_report(run_folder: Path, table=None, state: str = "") -> Path:
    """Write the report of a run from the files in its folder, and return `report/README.md`.

    The other files are `report/index.html` and, if predictions are judged, `report/report.json`.

    Args:
        table: the data that `report/predictions.json` was made on, on which these predictions are judged. If it is
            None, or there are no predictions, the report has only curves and settings.
        state: how the run has ended, such as "done", if `status.json`, which is written after the report, does not say
            so yet.

    Raises:
        BadInput: the predictions were made on other data than `table`.
    """
    from toolkit.tools.report.judgement import judge
    from toolkit.tools.report.write import write_page

    run_folder = Path(run_folder)
    predictions = run_folder / "report" / PREDICTIONS
    judged = None
    if table is not None and predictions.exists() and len(table.categories):
        read = read_predictions(predictions, table)
        judged = judge(run_folder.name, read.predictions, table, read.about)
    run = run_facts(run_folder, state)
    write_page(run_folder / "report", judged, run, run_folder.name)
    return write_markdown(run_folder, run)
