"""The best evaluation so far, and early stopping."""

import math
import re
from collections.abc import Iterable, Mapping

from toolkit.base.errors import BadInput
from toolkit.base.text import did_you_mean

_STATE = ("value", "step", "without_better", "evaluated_step")


def is_minimised(metric: str) -> bool:
    """Return whether smaller values of an evaluation metric are better, as for losses and errors."""
    name = metric.rpartition("ema/")[2]
    return name.startswith("loss") or "_error" in name


class Best:
    """Keeps the best value of one metric of the evaluation rows.

    Args:
        metric: name of the metric in a row without the prefix `val/`, such as "bbox_AP" or "ema/bbox_AP".
        patience: number of evaluations in a row without a better value after which `patience_is_over` is True; None:
            never.

    Attributes:
        value, step: the best value and its step; None and -1 before the first defined value.
        without_better: number of evaluations since the best one.
        evaluated_step: the step that was evaluated last; -1: none.
    """

    kept_in_rollback = True

    def __init__(self, metric: str = "bbox_AP", patience: int | None = None):
        self.metric = metric
        self.patience = patience
        self.forget()

    def forget(self) -> None:
        """Reset everything, as if nothing had been evaluated."""
        self.value: float | None = None
        self.step = self.evaluated_step = -1
        self.without_better = 0

    @property
    def patience_is_over(self) -> bool:
        """Whether the last `patience` evaluations have not improved the best value; False without a patience."""
        return self.patience is not None and self.without_better >= self.patience

    @property
    def of_average(self) -> bool:
        """Whether the metric is measured with the averaged weights (EMA)."""
        return self.metric.startswith("ema/")

    def note(self, step: int, row: Mapping[str, float | None]) -> bool:
        """Take the metric from the evaluation row of a step, and return True if it is the best value so far.

        None and NaN are never the best.

        Raises:
            BadInput: the row does not have the metric; the message lists the metrics that it has.
        """
        self.evaluated_step = step
        key = f"val/{self.metric}"
        if key not in row:
            raise no_such_metric(self.metric, (k.removeprefix("val/") for k in row if k.startswith("val/")))
        value = row[key]
        defined = value is not None and not math.isnan(value)
        sign = -1 if is_minimised(self.metric) else 1
        better = defined and (self.value is None or sign * value > sign * self.value)
        if better:
            self.value = value
            self.step = step
        self.without_better = 0 if better else self.without_better + 1
        return better

    def larger_is_better(self, row: Mapping[str, float | None]) -> float | None:
        """Return the metric of a row, negated if smaller values of the metric are better; None if it is undefined."""
        value = row[f"val/{self.metric}"]
        return None if value is None else (-value if is_minimised(self.metric) else value)

    def state_dict(self) -> dict:
        """Return the state as JSON values, including the name of the metric."""
        return {"metric": self.metric, **{name: getattr(self, name) for name in _STATE}}

    def load_state_dict(self, state: Mapping) -> list[str]:
        """Restore the state of `state_dict`, and return an empty list.

        If the state is of another metric, reset everything instead, and return a list of one sentence.
        """
        before = state["metric"]
        if before != self.metric:
            self.forget()
            return [f"the best metric starts anew: it was {before}, and is now {self.metric}"]
        for name in _STATE:
            setattr(self, name, state[name])
        return []


# What else there is beside the metrics of all classes, by a part of the names.
FURTHER_METRICS = {"ema/": "ema/NAME of averaged weights", "AP/": "AP/CLASS of a class"}


def no_such_metric(metric: str, metrics: Iterable[str], has_average: bool = True) -> BadInput:
    """Return the error about an unknown metric, which names the nearest of the known `metrics`, or lists them.

    has_average: False adds that metrics of averaged weights need `--optim.ema_decay`.
    """
    hint = "" if has_average else " (ema/ metrics need --optim.ema_decay above 0)"
    ours = sorted(metrics)
    of_all = [name for name in ours if "/" not in name.removeprefix("ema/")]
    word = metric.lower()
    by_word = {name.lower(): name for name in ours}
    if "/" not in word.removeprefix("ema/"):  # other programs say mAP, and mAP50-95 for the same
        word = re.sub("^(ema/)?m?ap(50[-:_]95)?", r"\1bbox_ap", word)
        by_word = {name.lower(): name for name in of_all}
    listed = ", ".join(name for name in of_all if not name.startswith("ema/"))
    further = [text for mark, text in FURTHER_METRICS.items() if any(mark in name for name in ours)]
    several = f"there are {', '.join([listed, *further])}"
    near = did_you_mean(word, by_word, written=by_word.get, otherwise=several)
    return BadInput(f"--eval.metric_for_best {metric}: no such metric{near}{hint}")
