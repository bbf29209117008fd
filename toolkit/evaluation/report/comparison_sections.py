"""The page that compares several detectors."""

import numpy as np

from toolkit.evaluation.coco_numbers import TWELVE
from toolkit.evaluation.report import figures
from toolkit.evaluation.report.bootstrap import DRAWS, interval
from toolkit.evaluation.report.comparison import Comparison
from toolkit.evaluation.report.errors import KINDS
from toolkit.evaluation.report.gallery import LEGEND, whole_image
from toolkit.evaluation.report.judgement import Judgement
from toolkit.evaluation.report.page import Html, charts, number, paragraph, pictures, table, with_interval
from toolkit.evaluation.report.pictures import Pictures

MOST_CLASSES = 100


def verdict(c: Comparison) -> str:
    rows = [(d.other, d.in_words()) for d in c.differences if d.metric in ("AP", "AP50")]
    text = (
        f"Each is compared with {c.judged[0].name}, on the same {DRAWS:,} bootstrap samples of the images (paired), "
        "in percent points. Such an interval tells what other images may change, not what another seed would."
    )
    return table(["", ""], rows, text=(0, 1)) + paragraph(text, "dim")


def numbers(c: Comparison) -> str:
    rows = [(name, *(with_interval(j.numbers[name], j.intervals[name]) for j in c.judged)) for name in TWELVE]
    rows += [
        (words, *(number(j.voc[key]) for j in c.judged))
        for key, words in (("voc07_mAP", "VOC07 mAP"), ("voc12_mAP", "VOC12 mAP"))
    ]
    rows += [
        ("best F1", *("–" if j.overall.best is None else number(j.overall.best.f1) for j in c.judged)),
        ("threshold of it", *(f"{j.threshold:g}" for j in c.judged)),
    ]
    rows += [(f"cost of {kind} mistakes (AP50)", *(number(j.errors.cost[kind]) for j in c.judged)) for kind in KINDS]
    for name in ("R@50", "R@100", "mR@50", "mR@100"):
        if any(j.graphs for j in c.judged):
            rows.append((name, *(number(j.graphs.row.get(name)) if j.graphs else "–" for j in c.judged)))
    sweeps = {j.name: j.overall for j in c.judged}
    parts = [
        figures.iou_chart({j.name: j.ap_by_iou for j in c.judged}),
        figures.precision_recall_chart(sweeps),
        figures.f1_chart(sweeps),
    ]
    return table(["", *(j.name for j in c.judged)], rows) + charts(parts)


def differences(c: Comparison) -> str:
    rows = [
        (
            d.other,
            d.metric,
            f"{d.value * 100:+.2f}",
            f"{d.low * 100:+.2f}",
            f"{d.high * 100:+.2f}",
            "may be chance" if d.chance else Html("<b>not explained by chance</b>"),
        )
        for d in c.differences
    ]
    return table([f"against {c.judged[0].name}", "", "difference", "95 % from", "to", ""], rows, text=(0, 1, 5))


def seeds(c: Comparison) -> str:
    parts = []
    for names, values in c.groups.items():
        rows = [(metric, f"{mean:.4f}", f"{spread:.4f}") for metric, (mean, spread) in values.items()]
        parts.append(
            paragraph(f"{names}: the same but for the seed.") + table(["", "mean", "standard deviation"], rows)
        )
    return "".join(parts)


def classes(c: Comparison) -> str:
    """AP of each class, and the paired difference of the last detector to the first."""
    first, last = c.judged[0], c.judged[-1]
    rows = []
    for label, name in enumerate(first.matches.class_names):
        value = last.class_ap[label] - first.class_ap[label]
        low_high = interval(last.draws.of_class[:, label] - first.draws.of_class[:, label], value)
        shown = (
            ("–", "")
            if low_high is None
            else (f"{value * 100:+.1f}", f"{low_high[0] * 100:+.1f} to {low_high[1] * 100:+.1f}")
        )
        rows.append(
            (
                abs(np.nan_to_num(value)),
                name,
                first.matches.num_truth[label],
                *(number(j.class_ap[label]) for j in c.judged),
                *shown,
            )
        )
    rows = [row[1:] for row in sorted(rows, key=lambda row: -row[0])[:MOST_CLASSES]]
    head = ["class", "boxes", *(j.name for j in c.judged), f"{last.name} less {first.name}, points", "95 %"]
    return table(head, rows)


def changed(c: Comparison, maker: Pictures) -> str:
    pair: list[Judgement] = [c.judged[0], c.judged[-1]]
    parts = [whole_image(j, maker, image, f"{j.name}, ") for image in c.images for j in pair]
    shown = pictures(parts)
    return LEGEND + shown if shown else ""
