"""Makes the sections of a report about one detector as HTML: summary, metrics, thresholds, confusions, errors."""

import re
from html import escape

import numpy as np

from toolkit.evaluation.shown_metrics import metrics_of
from toolkit.tools.report import figures
from toolkit.tools.report.advice import Advice
from toolkit.tools.report.bootstrap import NUM_DRAWS
from toolkit.tools.report.charts import BarChart, svg
from toolkit.tools.report.detection_errors import ERROR_KINDS, ERROR_MEANINGS, HORIZONTAL, VERTICAL
from toolkit.tools.report.facts import RunFacts
from toolkit.tools.report.judgement import Judgement
from toolkit.tools.report.page import Html, charts, folded, number, paragraph, table, under
from toolkit.tools.report.thresholds import WANTED_PRECISION, OperatingPoint, threshold_text

MAX_MATRIX_CLASSES = 30  # of a confusion matrix
MAX_CURVES = 8
HEADLINES = ("AP", "AP50", "segm_AP", "segm_AP50")  # titles of the metrics in the first lines of a page
RELATION_HEADLINES = {
    "R@20": "recall of the 20 best relations of an image",
    "mR@20": "the same, mean over predicates",
    "ngR@50": "50 best, any number of predicates for a pair",
}


def summary_cards(judged: Judgement) -> str:
    """Return HTML cards with the headline metrics: of relations first, then of boxes and masks, if they were found."""
    cards = _relation_cards(judged)
    if not judged.boxes_given:
        cards += _detection_cards(judged)
    shown = "".join(
        f"<div><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(words)}</span></div>"
        for name, value, words in cards
    )
    return f"<div class=figures>{shown}</div>"


def _relation_cards(judged: Judgement) -> list[tuple[str, str, str]]:
    """Return (name, value, explanation) of the most important metrics of relations; [] without relations."""
    graphs = judged.graphs
    if graphs is None:
        return []
    cards = []
    for name, words in RELATION_HEADLINES.items():
        cards.append((f"{name}, {graphs.mode}", number(graphs.row.get(name)), words))
    if graphs.whole is not None:
        cards.append(("complete images", f"{graphs.whole:.1%}", "with all relations among the 100 best"))
    return cards


def _detection_cards(judged: Judgement) -> list[tuple[str, str, str]]:
    """Return (name, value, explanation) of the most important metrics of boxes and masks, and of the best threshold."""
    cards = []
    for metric in metrics_of([judged.row], "boxes", "masks"):
        if metric.title in HEADLINES:
            value = number(judged.row[metric.key])
            cards.append((_card_title(judged, metric.title), value, _interval_words(judged, metric.title)))
    best = judged.overall.best
    if best is not None:
        reached = f"precision {best.precision:.3f}, recall {best.recall:.3f}"
        cards += [
            ("best-F1 threshold", threshold_text(best.threshold), "deploy with scores above it"),
            ("F1 at this threshold", number(best.f1), reached),
        ]
    return cards


def _card_title(judged: Judgement, title: str) -> str:
    """Return a title such as "masks: AP" for "segm_AP"; without masks and relations, there are only boxes to name."""
    if title.startswith("segm_"):
        return f"masks: {title.removeprefix('segm_')}"
    return f"boxes: {title}" if judged.matches.by_mask or judged.graphs is not None else title


def _interval_words(judged: Judgement, name: str) -> str:
    interval = judged.intervals[name]
    return "undefined: no boxes to find" if interval is None else f"95 %: {interval[0]:.3f} to {interval[1]:.3f}"


def advice(suggestions: list[Advice]) -> str:
    """Return HTML with a card for each suggestion."""
    return "".join(
        f"<div class=advice><p><b>{escape(a.topic)}.</b> {escape(a.evidence)}</p><p>{_flags(a.advice)}</p>"
        f"{f'<pre>{_flags(a.command)}</pre>' if a.command else ''}</div>"
        for a in suggestions
    )


def _flags(text: str) -> str:
    """Return the text as HTML in which flags are code, so that they are not broken over lines."""
    return re.sub(r"--[a-z_]+(\.[a-z_]+)*", r"<code>\g<0></code>", escape(text))


def numbers_table(judged: Judgement) -> str:
    """Return HTML with a table of all metrics and their intervals, AP against IoU, and a table of the classes."""
    rows = []
    for metric in metrics_of([judged.row], "boxes", "masks", "voc"):
        low_high = _low_high(judged.intervals.get(metric.title))  # of VOC's there is none
        rows.append((metric.title, number(judged.row[metric.key]), *low_high, metric.meaning))
    text = (
        f"Intervals: 95 % of {NUM_DRAWS:,} bootstrap samples of the {judged.matches.num_images:,} images, centred on "
        "the measured value. They show how much a number would vary with other images of the same kind."
    )
    return (
        table(["", "value", "95 % from", "to", ""], rows, text=(0, 4))
        + paragraph(text, "dim")
        + charts([figures.iou_chart(judged.ap_by_iou)])
        + _class_table(judged)
    )


def _low_high(interval) -> tuple[str, str]:
    return ("", "") if interval is None else (number(interval[0]), number(interval[1]))


def _class_table(judged: Judgement) -> str:
    m = judged.matches
    rows = []
    masks = ["segm_AP"] if m.by_mask else []  # one more column
    for k, name in enumerate(m.class_names):
        threshold, *numbers = _point_cells(judged.sweeps[k].best)
        of_masks = [number(judged.class_mask_ap[k])] if m.by_mask else []
        aps = (number(judged.class_ap[k]), *of_masks, number(judged.class_recall[k]))
        rows.append((name, m.num_truth[k], *aps, *numbers, threshold))
    head = ["class", "boxes", "AP", *masks, "AR100", "best F1", "precision", "recall", "threshold"]
    return "<h3>By class</h3>" + table(head, sorted(rows, key=lambda row: row[2] == "–"))


def _point_cells(point: OperatingPoint | None) -> list[str]:
    """Return the threshold, F1, precision and recall as text."""
    if point is None:
        return ["–"] * 4
    return [threshold_text(point.threshold), *(f"{v:.3f}" for v in (point.f1, point.precision, point.recall))]


def thresholds(judged: Judgement) -> str:
    """Return HTML with a table of recommended score thresholds, and charts of precision, recall, F1 and calibration."""
    overall = judged.overall
    if overall.best is None:
        return paragraph(f"No prediction finds a box at {judged.iou} 0.5, so a threshold cannot be chosen.")
    rows = []
    for wanted, point in {"best F1": overall.best, **_points_by_precision(judged)}.items():
        threshold, f1, *others = _point_cells(point)
        rows.append((wanted, "–", "not reached", "", "") if point is None else (wanted, threshold, *others, f1))
    names = judged.matches.class_names
    sweeps = {"all classes": overall} | {names[label]: judged.sweeps[label] for label in _curve_classes(judged)}
    parts = [
        figures.f1_chart(sweeps, overall.best),
        figures.precision_recall_chart(sweeps),
        figures.calibration_chart(judged.calibration),
    ]
    error = judged.calibration.error
    words = f"Over all objects of all classes together, at {judged.iou} 0.5. "
    words += "The table by class has a threshold for each class."
    if error is not None:
        words += (
            f" Scores and precision differ by {error:.3f} on average (expected calibration error): with a large "
            "difference a score is not a probability."
        )
    return table(["wanted", "threshold", "precision", "recall", "F1"], rows) + paragraph(words, "dim") + charts(parts)


def _points_by_precision(judged: Judgement) -> dict[str, OperatingPoint | None]:
    """Return the points of the wanted precisions by a name; wanted precisions with the same point have one name."""
    names: dict[OperatingPoint | None, list[float]] = {}
    for wanted in WANTED_PRECISION:
        names.setdefault(judged.overall.at_precision(wanted), []).append(wanted)
    points = {}
    for point, precisions in names.items():
        first_to_last = dict.fromkeys((f"{precisions[0]:g}", f"{precisions[-1]:g}"))
        points[f"precision of {' to '.join(first_to_last)}"] = point
    return points


def _curve_classes(judged: Judgement) -> list[int]:
    """Return labels of at most seven classes with an AP, best first: all, or the three best and the three worst."""
    order = np.argsort(-np.nan_to_num(judged.class_ap), kind="stable")
    order = [int(k) for k in order if np.isfinite(judged.class_ap[k])]
    return order if len(order) < MAX_CURVES else order[:3] + order[-3:]


def confusion(judged: Judgement) -> str:
    """Return HTML with the confusion matrix, of at most `MAX_MATRIX_CLASSES` classes, and the pairs most often
    confused."""
    matrix = judged.matrix
    names = list(judged.matches.class_names)
    k = len(names)
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    chosen = list(range(k))
    note = ""
    if k > MAX_MATRIX_CLASSES:
        mistakes = wrong[:k].sum(axis=1) + wrong[:, :k].sum(axis=0)
        chosen = sorted(np.argsort(-mistakes, kind="stable")[:MAX_MATRIX_CLASSES])
        most = f"the {MAX_MATRIX_CLASSES} of {k} classes with the most mistakes"
        note = f" Shown are {most}; report.json has all of them."
    text = (
        f"Predictions above {threshold_text(judged.threshold)} at {judged.iou} 0.5. A row shows how the boxes of a "
        f"class were predicted and sums to their number; the last row is predictions where no box is.{note}"
    )
    part = matrix[np.ix_([*chosen, k], [*chosen, k])]
    shown = svg(
        figures.confusion_chart(
            part,
            [names[i] for i in chosen],
            judged.threshold,
        )
    )
    pairs = [
        (names[i], names[j], int(wrong[i, j]), f"{wrong[i, j] / max(matrix[i].sum(), 1):.1%}")
        for i, j in zip(*np.unravel_index(np.argsort(-wrong[:k, :k], axis=None)[:10], (k, k)), strict=True)
        if wrong[i, j]
    ]
    listed = table(["annotated", "predicted", "boxes", "of its boxes"], pairs, text=(0, 1))
    return paragraph(text, "dim") + f"<div class=scroll>{shown}</div>" + under("Most confused", listed)


def errors(judged: Judgement) -> str:
    """Return HTML with the AP50 that each kind of mistake costs, and the recall by group of objects."""
    e = judged.errors
    counts = {kind: len(e.of(kind)) for kind in ERROR_KINDS} | {"missed": int(e.missed.sum())}
    bars = [(kind, cost, f"{cost:.3f}") for kind, cost in e.cost.items()]  # those of KINDS, then the special ones
    rows = [(kind, counts[kind], f"{e.cost[kind]:.3f}", ERROR_MEANINGS[kind]) for kind in ERROR_KINDS]
    text = (
        f"AP50 is {e.ap50:.3f}; a bar shows by how much it would rise without mistakes of that kind. The kinds do not "
        f"add up. Method: TIDE (Bolya et al. 2020), by {judged.iou}."
    )
    if judged.any_class_ap is not None and judged.matches.num_classes > 1:
        text += f" If the class of a prediction did not matter, AP would be {judged.any_class_ap:.3f} instead of "
        text += f"{number(judged.numbers['AP'])}; it is much higher where objects are found but named wrongly."
    parts = [
        BarChart("AP50 that each kind of mistake costs", bars[: len(ERROR_KINDS)]),
        BarChart("AP50 that all false positives, or all false negatives, cost", bars[len(ERROR_KINDS) :]),
    ]
    return (
        paragraph(text, "dim")
        + charts(parts)
        + table(["kind", "mistakes at any score", "cost in AP50", "what it is"], rows, text=(0, 3))
        + _strata(judged)
    )


def _strata(judged: Judgement) -> str:
    topics = list(dict.fromkeys(s.topic for s in judged.strata if s.topic != "place in the image"))
    rows = [
        (topic if i == 0 else "", s.name, s.boxes, f"{s.recall:.3f}", f"{s.recall_at_any_score:.3f}")
        for topic in topics
        for i, s in enumerate(s for s in judged.strata if s.topic == topic)
    ]
    head = ["objects by", "", "boxes", f"found above {threshold_text(judged.threshold)}", "found at any score"]
    places = {s.name: s for s in judged.strata if s.topic == "place in the image"}
    lines = []
    for v in VERTICAL:
        cells = [places.get(f"{v} {h}") for h in HORIZONTAL]
        shown = (Html(f"{s.recall:.3f} <span class=dim>of {s.boxes}</span>") if s else "–" for s in cells)
        lines.append((v, *shown))
    grid = table(["centre of the box", *HORIZONTAL], lines)
    return "<h3>Recall by object property</h3>" + table(head, rows, text=(0, 1)) + grid


def training(run: RunFacts) -> str:
    """Return HTML with the charts of the training; "" without any."""
    groups = figures.training_charts(run.rows)
    return "".join(under(heading, charts(group)) for heading, group in groups.items())


def settings_and_environment(run: RunFacts) -> str:
    """Return HTML with the settings and the environment of a run, folded; "" without both."""
    texts = {f"Settings ({run.config_name})": run.config_text, "Environment": run.environment_text}
    return "".join(folded(heading, f"<pre>{escape(text)}</pre>") for heading, text in texts.items() if text)
