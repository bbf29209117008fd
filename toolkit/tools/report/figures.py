"""Makes the charts of a report: training curves, thresholds, confusion matrices and AP."""

import re
from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np

from toolkit.evaluation.matches import IOU_THRESHOLDS
from toolkit.tools.report.charts import BarChart, ChartLine, LineChart, MatrixChart
from toolkit.tools.report.thresholds import Calibration, OperatingPoint, ThresholdSweep, threshold_text

AUXILIARY_ENDING = re.compile(r"(_(\d+|aux|enc|dn|pre))+$")  # of losses of other layers, as in toolkit.step.losses
SMOOTHED_FROM = 20  # points
PRECISION_HEADING = "Precision and recall"
LOSSES_HEADING = "Losses, learning rates, gradient"
STEP_AXIS = "optimizer step"
# Topics of loss terms, by their names; the first that fits.
TOPICS = (
    ("classes", re.compile(r"(ce|cls|class|vfl|focal|obj|rel|refine|att|binary|mal)")),
    ("boxes", re.compile(r"(bbox|giou|iou|box|center|scale|fgl|ddf|loc)")),
)


def series(rows: Sequence[Mapping], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps of the rows that have a finite number for `key`, and these numbers, as two arrays."""
    pairs = []
    for row in rows:
        value = row.get(key)
        if isinstance(value, int | float) and isfinite(value):
            pairs.append((row["step"], value))
    steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
    return steps, values


def smoothed(values: np.ndarray, share: float = 0.05) -> np.ndarray:
    """Return the moving average of the finite values over a centred window, which is shorter at both ends.

    share: length of the window as a fraction of the number of values; it has at least 5 values.
    """
    half = max(2, int(len(values) * share) // 2)
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def training_charts(rows: Sequence[Mapping]) -> dict[str, list[LineChart]]:
    """Return charts of the rows of metrics.jsonl by heading; `PRECISION_HEADING` and `LOSSES_HEADING` are first.

    The training and validation values of a loss are in one chart. Charts without data are returned too, and are empty.
    """
    names = list(dict.fromkeys(key for row in rows for key in row))
    weighted = [n for n in names if n.startswith("train/") and f"{n}_unscaled" in names and n != "train/loss"]
    main = [name for name in weighted if not AUXILIARY_ENDING.search(name)]
    groups = {
        PRECISION_HEADING: [
            _metrics(rows, "AP on the validation data", ("bbox_AP", "bbox_AP50", "bbox_AP75")),
            _metrics(rows, "AP by size of the object", ("bbox_APs", "bbox_APm", "bbox_APl")),
            _metrics(rows, "AP of masks on the validation data", ("segm_AP", "segm_AP50", "segm_AP75")),
            _class_ap_chart(rows, names),
            _metrics(
                rows,
                "Recall of relations",
                ("R@20", "R@50", "R@100", "mR@20", "mR@50", "mR@100"),
            ),
        ],
        LOSSES_HEADING: [
            _term(rows, "loss", "Total loss, weighted"),
            _terms(
                rows,
                "Weighted loss terms" + (", last layer" if len(main) < len(weighted) else ""),
                main,
            ),
            _terms(
                rows,
                "Weighted loss terms, auxiliary layers",
                [n for n in weighted if n not in main],
            ),
            _rates(rows, [name for name in names if name.startswith("train/lr/")]),
            LineChart(
                "Gradient norm before clipping",
                smooth_lines(rows, "train/grad_norm", "", 0),
                STEP_AXIS,
                log=True,
            ),
        ],
    }
    for name in main:
        term = name.removeprefix("train/")
        chart = _term(rows, f"{term}_unscaled", f"{term}, unweighted")
        groups.setdefault(f"Losses of {_topic(term)}", []).append(chart)
    return groups


def _topic(term: str) -> str:
    # Boxes first for names such as loss_box_reg; loss_rpn_box_reg; loss_objectness is about classes.
    plain = term.removeprefix("loss_").replace("objectness", "obj")
    if TOPICS[1][1].search(plain) and not plain.startswith(("cls", "class", "refine")):
        return TOPICS[1][0]
    return TOPICS[0][0] if TOPICS[0][1].search(plain) else "other kinds"


def smooth_lines(rows: Sequence[Mapping], key: str, name: str, colour: int) -> list[ChartLine]:
    """Return the lines of a metric: a smoothed one and the faint raw values; only the raw values of a short series.

    Args:
        key: key of the metric in the rows.
        name: name in the legend.
        colour: index in `SERIES_COLOURS`.
    """
    steps, values = series(rows, key)
    if len(steps) < SMOOTHED_FROM:
        return [ChartLine(name, steps, values, colour)]
    return [ChartLine(name, steps, smoothed(values), colour), ChartLine("", steps, values, colour, faint=True)]


def _term(rows, key: str, title: str) -> LineChart:
    lines = smooth_lines(rows, f"train/{key}", "training", 0)
    for prefix, name, colour in (("val/", "validation", 1), ("val/ema/", "validation, EMA", 2)):
        lines.append(ChartLine(name, *series(rows, prefix + key), colour, dots=True))
    return LineChart(title, lines, STEP_AXIS)


def _terms(rows, title: str, names: Sequence[str]) -> LineChart:
    """Return a chart of all terms of a kind; auxiliary layers have the colour of their term, which is named once."""
    bases = list(dict.fromkeys(AUXILIARY_ENDING.sub("", name) for name in names))
    lines = []
    seen = set()
    for name in names:
        base = AUXILIARY_ENDING.sub("", name)
        label = "" if base in seen else base.removeprefix("train/") + "_*" * (name != base)
        seen.add(base)
        lines.append(smooth_lines(rows, name, label, bases.index(base))[0])
    return LineChart(title, lines, STEP_AXIS)


def _rates(rows, names: Sequence[str]) -> LineChart:
    curves = {name.removeprefix("train/lr/"): series(rows, name) for name in names}
    # Every other one is dashed: groups often share a curve.
    lines = []
    for i, (name, (steps, rates)) in enumerate(curves.items()):
        lines.append(ChartLine(name, steps, rates, i, dashed=i % 2 == 1))
    return LineChart("Learning rates", lines, STEP_AXIS, y_range=(0, None))


def _metrics(rows, title: str, keys: Sequence[str]) -> LineChart:
    lines = []
    for i, key in enumerate(keys):
        name = key.removeprefix("bbox_")
        lines.append(ChartLine(name, *series(rows, f"val/{key}"), i, dots=True))
        lines.append(
            ChartLine(
                f"{name}, EMA",
                *series(rows, f"val/ema/{key}"),
                i,
                dashed=True,
                dots=True,
            )
        )
    return LineChart(title, lines, STEP_AXIS, y_range=(0, None))


def _class_ap_chart(rows, names: Sequence[str]) -> LineChart:
    """Return a chart of the AP of at most ten classes, the best at the end first."""
    prefix = "val/ema/AP/" if any(name.startswith("val/ema/AP/") for name in names) else "val/AP/"
    curves = {name.removeprefix(prefix): series(rows, name) for name in names if name.startswith(prefix)}
    curves = {name: curve for name, curve in curves.items() if len(curve[0])}
    chosen = sorted(curves, key=lambda name: -curves[name][1][-1])
    if len(chosen) > 10:
        chosen = chosen[:5] + chosen[-5:]
    many = " (five best and five worst)" if len(curves) > 10 else ""
    lines = [ChartLine(name, *curves[name], i, dashed=i > 7, dots=True) for i, name in enumerate(chosen)]
    return LineChart(
        f"AP by class{', EMA' * ('ema' in prefix)}{many}",
        lines,
        STEP_AXIS,
        y_range=(0, None),
    )


def f1_chart(sweeps: Mapping[str, ThresholdSweep], best: OperatingPoint | None = None) -> LineChart:
    """Return a chart of F1 against score for each of the `sweeps`, by name. best: the point to mark; None: no mark."""
    lines = [ChartLine(name, sweep.score, sweep.f1, i) for i, (name, sweep) in enumerate(sweeps.items())]
    marks = [] if best is None else [(best.threshold, f"{threshold_text(best.threshold)}: F1 {best.f1:.3f}")]
    return LineChart(
        "F1 against score, IoU 0.5",
        lines,
        "score threshold",
        (0, 1),
        (0, 1),
        marks=marks,
    )


def precision_recall_chart(sweeps: Mapping[str, ThresholdSweep]) -> LineChart:
    """Return a chart of precision against recall for each of the `sweeps`, by name."""
    lines = [ChartLine(name, sweep.recall, sweep.precision, i) for i, (name, sweep) in enumerate(sweeps.items())]
    return LineChart("Precision against recall, IoU 0.5", lines, "recall", (0, 1), (0, 1))


def iou_chart(ap_by_iou: Mapping[str, Sequence[float]]) -> LineChart:
    """Return a chart of AP against IoU; ap_by_iou has, by name of the detector, AP at the 10 `IOU_THRESHOLDS`."""
    lines = [ChartLine(name, IOU_THRESHOLDS, ap, i, dots=True) for i, (name, ap) in enumerate(ap_by_iou.items())]
    return LineChart("AP by IoU threshold", lines, "IoU", y_range=(0, 1))


def calibration_chart(c: Calibration) -> LineChart:
    """Return a chart of the share of right predictions against their score."""
    lines = [ChartLine("perfect", [0, 1], [0, 1], 1, dashed=True), ChartLine("found", c.score, c.precision, dots=True)]
    title = "Calibration: how often a prediction with this score is right"
    return LineChart(title, lines, "score", (0, 1), (0, 1))


def confusion_chart(matrix: np.ndarray, names: Sequence[str], threshold: float) -> MatrixChart:
    """Return a chart of a confusion matrix (K + 1, K + 1) of the K classes `names`, see `thresholds.confusion_matrix`.

    threshold: score threshold of the matrix, for the title.
    """
    title = f"Boxes by class, predictions above {threshold_text(threshold)}, IoU 0.5"
    return MatrixChart(
        title,
        matrix,
        [*names, "background"],
        [*names, "missed"],
        "annotated",
        "predicted",
    )


def class_ap_chart(ap: Mapping[str, float]) -> BarChart:
    """Return a chart of bars of the AP of each class, from 0 to 1, by name."""
    return BarChart(
        "AP of each class",
        [(name, value, f"{value:.3f}") for name, value in ap.items()],
        most=1,
    )
