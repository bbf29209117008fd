"""The sections of a report about one detector: summary, numbers, thresholds, confusions, mistakes, pictures."""

import re
from html import escape

import numpy as np

from toolkit.evaluation.coco_numbers import TWELVE
from toolkit.evaluation.matches import IOUS
from toolkit.evaluation.report import charts as chart
from toolkit.evaluation.report.advice import Advice
from toolkit.evaluation.report.bootstrap import DRAWS
from toolkit.evaluation.report.errors import KINDS, MEANING
from toolkit.evaluation.report.judgement import Judgement
from toolkit.evaluation.report.page import Html, charts, number, paragraph, table
from toolkit.evaluation.report.thresholds import WANTED_PRECISION

MOST_CLASSES = 30  # of a confusion matrix
MOST_CURVES = 8
WORDS = {
    "AP": "mean over IoU 0.5 to 0.95",
    "AP50": "at IoU 0.5",
    "AP75": "at IoU 0.75",
    "APs": "objects below 32² pixels",
    "APm": "32² to 96² pixels",
    "APl": "above 96² pixels",
    "AR1": "recall with 1 prediction of each class",
    "AR10": "recall with 10",
    "AR100": "recall with 100",
    "ARs": "recall, small objects",
    "ARm": "recall, medium objects",
    "ARl": "recall, large objects",
}


def summary(judged: Judgement) -> str:
    best = judged.overall.best
    cards = [
        ("AP", number(judged.numbers["AP"]), _interval_words(judged, "AP")),
        ("AP50", number(judged.numbers["AP50"]), _interval_words(judged, "AP50")),
    ]
    if best is not None:
        cards += [
            ("threshold of the best F1", f"{best.threshold:g}", "deploy with scores above it"),
            ("F1 there", number(best.f1), f"precision {best.precision:.3f}, recall {best.recall:.3f}"),
        ]
    if judged.graphs is not None:
        cards += [
            (f"{name}, {judged.graphs.mode}", number(judged.graphs.row.get(name)), "relations")
            for name in ("R@100", "mR@100")
        ]
    shown = "".join(
        f"<div><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(words)}</span></div>"
        for name, value, words in cards
    )
    return f"<div class=figures>{shown}</div>"


def _interval_words(judged: Judgement, name: str) -> str:
    interval = judged.intervals[name]
    return "undefined: no boxes to find" if interval is None else f"95 %: {interval[0]:.3f} to {interval[1]:.3f}"


def advice(found: list[Advice]) -> str:
    if not found:
        return ""
    return "".join(
        f"<div class=advice><p><b>{escape(a.topic)}.</b> {escape(a.evidence)}</p><p>{_flags(a.advice)}</p>"
        f"{f'<pre>{escape(a.command)}</pre>' if a.command else ''}</div>"
        for a in found
    )


def _flags(text: str) -> str:
    """As HTML, with flags as code, which is not broken over lines."""
    return re.sub(r"--[a-z_]+(\.[a-z_]+)*", r"<code>\g<0></code>", escape(text))


def numbers(judged: Judgement) -> str:
    rows = [(name, number(judged.numbers[name]), *_low_high(judged.intervals[name]), WORDS[name]) for name in TWELVE]
    rows += [
        (name, number(judged.voc[key]), "", "", words)
        for key, name, words in (
            ("voc07_mAP", "VOC07 mAP", "Pascal VOC, 11 recalls"),
            ("voc12_mAP", "VOC12 mAP", "Pascal VOC, all recalls"),
        )
    ]
    text = (
        f"Intervals: 95 % of {DRAWS:,} bootstrap samples of the {judged.matches.num_images:,} images, moved to have "
        "the number as their mean. They tell how far other images of the same kind may give other numbers."
    )
    by_iou = chart.line_chart(
        "AP against the IoU that counts as found",
        [chart.Line("AP", IOUS, judged.ap_by_iou, dots=True)],
        x_label="IoU",
        y_range=(0, 1),
    )
    return (
        table(["", "value", "95 % from", "to", ""], rows, text=(0, 4))
        + paragraph(text, "dim")
        + charts([by_iou])
        + _classes(judged)
    )


def _low_high(interval) -> tuple[str, str]:
    return ("", "") if interval is None else (number(interval[0]), number(interval[1]))


def _classes(judged: Judgement) -> str:
    rows = []
    for label, name in enumerate(judged.matches.class_names):
        best = judged.sweeps[label].best
        point = (
            ["–"] * 4
            if best is None
            else [f"{v:.3f}" for v in (best.f1, best.precision, best.recall)] + [f"{best.threshold:g}"]
        )
        rows.append(
            (
                name,
                judged.matches.num_truth[label],
                number(judged.class_ap[label]),
                number(judged.class_recall[label]),
                *point,
            )
        )
    head = ["class", "boxes", "AP", "AR100", "best F1", "precision", "recall", "threshold"]
    return "<h3>By class</h3>" + table(head, sorted(rows, key=lambda row: row[2] == "–"))


def thresholds(judged: Judgement) -> str:
    overall = judged.overall
    if overall.best is None:
        return paragraph("No prediction finds a box at IoU 0.5: there is no threshold to choose.")
    rows = [
        ("best F1", f"{p.threshold:g}", *(f"{v:.3f}" for v in (p.precision, p.recall, p.f1))) for p in [overall.best]
    ]
    for wanted in WANTED_PRECISION:
        p = overall.at_precision(wanted)
        shown = (
            ["–", "not reached", "", ""]
            if p is None
            else [f"{p.threshold:g}", *(f"{v:.3f}" for v in (p.precision, p.recall, p.f1))]
        )
        rows.append((f"precision of {wanted:g}", *shown))
    shown = _curve_classes(judged)
    f1 = [chart.Line("all classes", overall.score, overall.f1)]
    f1 += [_line(judged, label, i + 1, "score", "f1") for i, label in enumerate(shown)]
    pr = [chart.Line("all classes", overall.recall, overall.precision)]
    pr += [_line(judged, label, i + 1, "recall", "precision") for i, label in enumerate(shown)]
    c = judged.calibration
    reliability = chart.line_chart(
        "Calibration: how often a prediction with this score is right",
        [
            chart.Line("perfect", [0, 1], [0, 1], colour=1, dashed=True),
            chart.Line("found", c.score, c.precision, dots=True),
        ],
        x_label="score",
        x_range=(0, 1),
        y_range=(0, 1),
    )
    best = overall.best
    parts = [
        chart.line_chart(
            "F1 against score",
            f1,
            x_label="a prediction needs this score",
            x_range=(0, 1),
            y_range=(0, 1),
            marks=[(best.threshold, f"{best.threshold:g}: F1 {best.f1:.3f}")],
        ),
        chart.line_chart("Precision against recall, IoU 0.5", pr, x_label="recall", x_range=(0, 1), y_range=(0, 1)),
        reliability,
    ]
    words = (
        "Over all boxes of all classes together, at IoU 0.5. A threshold of its own for each class stands in the "
        "table by class."
        + (
            ""
            if c.error is None
            else f" Scores and precision differ by {c.error:.3f} on average "
            "(expected calibration error): with a large difference a score is no probability."
        )
    )
    return table(["wanted", "threshold", "precision", "recall", "F1"], rows) + paragraph(words, "dim") + charts(parts)


def _curve_classes(judged: Judgement) -> list[int]:
    """At most seven classes: all, or the best and the worst."""
    order = np.argsort(-np.nan_to_num(judged.class_ap), kind="stable")
    order = [int(k) for k in order if np.isfinite(judged.class_ap[k])]
    return order if len(order) < MOST_CURVES else order[:3] + order[-3:]


def _line(judged: Judgement, label: int, colour: int, x: str, y: str) -> chart.Line:
    each = judged.sweeps[label]
    return chart.Line(judged.matches.class_names[label], getattr(each, x), getattr(each, y), colour)


def confusion(judged: Judgement) -> str:
    matrix, names = judged.matrix, list(judged.matches.class_names)
    k = len(names)
    if not matrix.any():
        return ""
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    chosen = list(range(k))
    note = ""
    if k > MOST_CLASSES:
        chosen = sorted(np.argsort(-(wrong[:k].sum(axis=1) + wrong[:, :k].sum(axis=0)), kind="stable")[:MOST_CLASSES])
        note = f" Shown are the {MOST_CLASSES} of {k} classes with the most mistakes; all stand in report.json."
    text = (
        f"Predictions above {judged.threshold:g} at IoU 0.5. A row tells what became of the boxes of a class and sums "
        f"to their number; the last row is predictions where no box is.{note}"
    )
    places = [*chosen, k]
    head = "".join(f"<th>{escape(name)}</th>" for name in [*(names[i] for i in chosen), "missed"])
    rows = "".join(
        f"<tr><th>{escape(names[i] if i < k else 'background')}</th>"
        + "".join(_heat(matrix[i, j], matrix[i].sum(), i == j) if i < k or j < k else "<td></td>" for j in places)
        + "</tr>"
        for i in places
    )
    pairs = [
        (names[i], names[j], int(wrong[i, j]), f"{wrong[i, j] / max(matrix[i].sum(), 1):.1%}")
        for i, j in zip(*np.unravel_index(np.argsort(-wrong[:k, :k], axis=None)[:10], (k, k)), strict=True)
        if wrong[i, j]
    ]
    listed = table(["annotated", "predicted", "boxes", "of its boxes"], pairs, text=(0, 1))
    return (
        paragraph(text, "dim") + f"<div class=scroll><table class=matrix><thead><tr><th>annotated ↓ predicted →</th>"
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        + (f"<h3>Most confused</h3>{listed}" if listed else "")
    )


def _heat(count: int, total: int, own: bool) -> str:
    share = count / total if total else 0
    return (
        f'<td{" class=own" if own else ""} style="background:rgba(var(--heat),{0.75 * share:.2f})" '
        f'title="{share:.1%}">{count or ""}</td>'
    )


def errors(judged: Judgement) -> str:
    e = judged.errors
    if not len(judged.matches.truth):
        return ""
    counts = {kind: len(e.of(kind)) for kind in KINDS} | {"missed": int(e.missed.sum())}
    bars = [(kind, e.cost[kind], f"{e.cost[kind]:.3f}") for kind in KINDS]
    special = [(kind, e.cost[kind], f"{e.cost[kind]:.3f}") for kind in ("false positives", "false negatives")]
    rows = [(kind, counts[kind], f"{e.cost[kind]:.3f}", MEANING[kind]) for kind in KINDS]
    text = (
        f"AP50 is {e.ap50:.3f}; a bar tells by how much it would rise without mistakes of that kind. The kinds do not "
        "add up. Method: TIDE (Bolya et al. 2020)."
    )
    parts = [
        chart.bar_chart("AP50 that each kind of mistake costs", bars),
        chart.bar_chart("… and all wrong predictions, all unfound boxes", special),
    ]
    return (
        paragraph(text, "dim")
        + charts(parts)
        + table(["kind", "mistakes", "cost in AP50", "what it is"], rows, text=(0, 3))
        + _strata(judged)
    )


def _strata(judged: Judgement) -> str:
    topics = list(dict.fromkeys(s.topic for s in judged.strata if s.topic != "place in the image"))
    rows = [
        (topic if i == 0 else "", s.name, s.boxes, f"{s.recall:.3f}", f"{s.recall_at_any_score:.3f}")
        for topic in topics
        for i, s in enumerate(s for s in judged.strata if s.topic == topic)
    ]
    head = ["objects by", "", "boxes", f"found above {judged.threshold:g}", "found at any score"]
    places = {s.name: s for s in judged.strata if s.topic == "place in the image"}
    lines = []
    for v in ("top", "middle", "bottom"):
        cells = [places.get(f"{v} {h}") for h in ("left", "centre", "right")]
        lines.append(
            (v, *("–" if s is None else Html(f"{s.recall:.3f} <span class=dim>of {s.boxes}</span>") for s in cells))
        )
    grid = table(["centre of the box", "left", "centre", "right"], lines)
    return "<h3>What is found, by what the object is like</h3>" + table(head, rows, text=(0, 1)) + grid
