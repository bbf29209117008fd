"""The evaluation on a test split when training ends: the best weights, once, on data that decided nothing.

`t` is a `toolkit.training.Training` throughout.
"""

from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from toolkit.data.table import DetectionTable
from toolkit.distributed import run_on_main
from toolkit.errors import Preempted
from toolkit.evaluation.choose import make_evaluator
from toolkit.evaluation.predict_dataset import predict_dataset
from toolkit.evaluation.predictions_file import write_predictions

PREDICTIONS = "test_predictions.json"  # in the run's report/


def evaluate_test_split(t, table: DetectionTable, loader: DataLoader, e: Any) -> dict[str, float | None]:
    """Evaluates the detector, which holds the best weights after `toolkit.validation.finish`; every rank takes part.

    Writes a row `test/...`, prints the table, and keeps the predictions in `report/test_predictions.json`.

    Args:
        table, loader: the test split.
        e: settings with the names of `toolkit.runs.settings.SceneGraphEvalConfig`, or of `EvalConfig`.

    Returns:
        the row.

    Raises:
        Preempted: a signal came; the resumed run evaluates again.
    """
    of_graphs = {key: getattr(e, key) for key in ("protocol", "zero_shot") if hasattr(e, key)}
    evaluator = make_evaluator(t.detector, table, e.backend, **of_graphs)
    found = predict_dataset(
        t.detector,
        loader,
        t.accelerator.device,
        loss_weights=t.weights,
        step=t.step,
        autocast=t.accelerator.autocast,
        stop=lambda: t.signals.received,
        score_threshold=e.score_threshold,
        description="test split",
        say=t.log.say,
    )
    if found.interrupted:
        raise Preempted("signal during the evaluation on the test split; `--run.resume latest` does it again")
    scores = run_on_main(partial(evaluator.evaluate, found.by_image))
    row = {f"test/{name}": value for name, value in {**scores, **found.losses}.items()}
    t.log.write(t.step, t.sampler.epoch, row)
    run_on_main(lambda: t.log.attempt("showing the evaluation on the test split",
                                      lambda: _show(t, table, evaluator, found.by_image, scores)))  # fmt: skip
    return row


def _show(t, table: DetectionTable, evaluator, predictions: dict, scores: dict) -> None:
    """The table on the console, and the predictions with their numbers in a file; on the main process."""
    if not t.accelerator.is_main_process:
        return
    step = t.step if t.best.value is None else t.best.step
    told = evaluator.describe(scores, predictions, step)
    t.log.say(f"test split {table.name}, weights of step {step}\n{told}")
    about = {key: getattr(evaluator, key) for key in ("mode", "protocol") if hasattr(evaluator, key)}
    about |= {"detector": f"{t.folder.name}, step {step}", "step": step}
    write_predictions(t.folder / "report" / PREDICTIONS, predictions, table, scores=scores, **about)
