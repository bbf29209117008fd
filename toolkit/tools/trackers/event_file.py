"""The tracker for TensorBoard: writes event files with rows, pictures, curves and the table of hyperparameters."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from toolkit.run.writer import RunDescription, Tracker, flat

THRESHOLDS = 127  # of a curve, from 0 to 1; TensorBoard's own default


class TensorBoardTracker(Tracker):
    """A tracker that writes TensorBoard's event files to a folder of the run."""

    def start(self, folder: Path, about: RunDescription, is_new: bool, was_closed: bool) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # Purging hides the rows of an attempt without a checkpoint.
        self._writer = SummaryWriter(
            str(folder / "tensorboard"),
            **({"purge_step": 0} if is_new else {}),
        )
        final = {f"best/{about.metric}": 0.0, "best/step": 0.0}
        experiment, start, self._end = hparams(flat(about.config), final)  # SummaryWriter.add_hparams makes a folder
        if is_new:
            for summary in (experiment, start):
                self._writer.file_writer.add_summary(summary)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()

    def show(self, shown, step: int) -> None:
        if shown.grid is not None:
            self._writer.add_image(
                "val/predictions",
                np.asarray(shown.grid),
                step,
                dataformats="HWC",
            )
        for name, sweep in shown.curves.items():
            curve = (f"val/precision_recall/{name}", *_at_thresholds(sweep))
            self._writer.add_pr_curve_raw(*curve, global_step=step, num_thresholds=THRESHOLDS)
        for name, figure in shown.figures().items():
            self._writer.add_figure(f"val/{name}", figure, step)
        self._writer.flush()

    def close(self, state: str) -> None:
        if state == "done" and not self.notes.get("ended"):
            self._writer.file_writer.add_summary(self._end)
            self.notes["ended"] = True
        self._writer.close()


def _at_thresholds(sweep) -> tuple[np.ndarray, ...]:
    """Return true positives, false positives, true negatives (always 0), false negatives, precision and recall at each
    of `THRESHOLDS` score thresholds from 0 to 1, each an array."""
    thresholds = np.linspace(0, 1, THRESHOLDS)
    row = np.searchsorted(-sweep.score, -thresholds, side="right") - 1  # the last score that is large enough
    precision, recall = (
        np.where(row >= 0, values[row] if len(values) else 0.0, default)
        for values, default in ((sweep.precision, 1.0), (sweep.recall, 0.0))
    )
    found = np.round(recall * sweep.total)
    wrong = np.round(found / np.maximum(precision, 1e-12) - found) * (found > 0)
    return found, wrong, np.zeros_like(found), sweep.total - found, precision, recall
