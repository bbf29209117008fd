"""The sections of a report that come from the run itself: curves of its rows, its settings and surroundings."""

import re
from collections.abc import Mapping, Sequence
from html import escape

from toolkit.evaluation.report import charts as chart
from toolkit.evaluation.report.markdown import LAYER, series, smoothed
from toolkit.evaluation.report.page import charts, folded

# Topics of loss terms, by their names; the first that fits.
TOPICS = (
    ("classes", re.compile(r"(ce|cls|class|vfl|focal|obj|rel|refine|att|binary|mal)")),
    ("boxes", re.compile(r"(bbox|giou|iou|box|center|scale|fgl|ddf|loc)")),
)
SMOOTHED_FROM = 20  # points


def curves(rows: Sequence[Mapping]) -> str:
    """Charts in which training and validation of the same term share their axes, then AP, rates and gradient norm."""
    names = list(dict.fromkeys(key for row in rows for key in row))
    parts = ["<h3>Precision and recall</h3>", charts(_metrics(rows, names))] if _metrics(rows, names) else []
    losses = [_term(rows, "loss", "total loss, weighted")]
    by_topic: dict[str, list[str]] = {}
    for name in names:
        term = name.removeprefix("train/")
        if name.startswith("train/") and f"{name}_unscaled" in names and term != "loss" and not LAYER.search(term):
            by_topic.setdefault(_topic(term), []).append(term)
    parts += ["<h3>Total loss, learning rates, gradient</h3>",
              charts([*losses, _rates(rows, names), _norm(rows)])] if any(rows) else []  # fmt: skip
    for topic, terms in by_topic.items():
        shown = charts([_term(rows, f"{term}_unscaled", f"{term}, unweighted") for term in terms])
        parts += [f"<h3>Losses of {topic}</h3>", shown] if shown else []
    text = "".join(part for part in parts if part)
    return text if "<svg" in text else ""


def _topic(term: str) -> str:
    # Boxes first for names such as loss_box_reg; loss_rpn_box_reg; loss_objectness is about classes.
    plain = term.removeprefix("loss_").replace("objectness", "obj")
    if TOPICS[1][1].search(plain) and not plain.startswith(("cls", "class", "refine")):
        return TOPICS[1][0]
    return TOPICS[0][0] if TOPICS[0][1].search(plain) else "other kinds"


def _term(rows, key: str, title: str) -> str:
    steps, values = series(rows, f"train/{key}")
    lines = []
    if len(steps) >= SMOOTHED_FROM:
        lines.append(chart.Line("training, each row", steps, values, 0, faint=True))
        values = smoothed(values)
    if len(steps):
        lines.append(chart.Line("training", steps, values, 0))
    for prefix, name, colour in (("val/", "validation", 1), ("val/ema/", "validation, EMA", 2)):
        steps, values = series(rows, prefix + key)
        if len(steps):
            lines.append(chart.Line(name, steps, values, colour, dots=True))
    return chart.line_chart(title, lines, x_label="optimizer step")


def _metrics(rows, names) -> list[str]:
    parts = []
    for title, keys in (("AP on the validation data", ("bbox_AP", "bbox_AP50", "bbox_AP75")),
                        ("AP by size of the object", ("bbox_APs", "bbox_APm", "bbox_APl")),
                        ("Recall of relations", ("R@50", "R@100", "mR@50", "mR@100"))):  # fmt: skip
        lines = []
        for i, key in enumerate(keys):
            for prefix, words in (("val/", ""), ("val/ema/", ", EMA")):
                steps, values = series(rows, prefix + key)
                if len(steps):
                    lines.append(
                        chart.Line(key.removeprefix("bbox_") + words, steps, values, i, bool(words), dots=True)
                    )
        parts.append(chart.line_chart(title, lines, x_label="optimizer step"))
    return [part for part in parts if part]


def _rates(rows, names) -> str:
    groups = [name for name in names if name.startswith("train/lr/")]
    lines = [chart.Line(name.removeprefix("train/lr/"), *series(rows, name), i, dashed=bool(i % 2))
             for i, name in enumerate(groups[:8])]  # fmt: skip
    return chart.line_chart("learning rates", lines, x_label="optimizer step")


def _norm(rows) -> str:
    steps, values = series(rows, "train/grad_norm")
    lines = [chart.Line("gradient norm", steps, values, 0, faint=len(steps) >= SMOOTHED_FROM)]
    if len(steps) >= SMOOTHED_FROM:
        lines.append(chart.Line("smoothed", steps, smoothed(values), 0))
    return chart.line_chart("gradient norm before clipping (logarithmic)", lines, x_label="optimizer step", log=True)


def settings(config_name: str, config_text: str, environment_text: str) -> str:
    parts = [folded(f"Settings ({config_name})", f"<pre>{escape(config_text)}</pre>" if config_text else ""),
             folded("Environment", f"<pre>{escape(environment_text)}</pre>" if environment_text else "")]  # fmt: skip
    return "".join(parts)
