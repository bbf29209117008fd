"""Compares several detectors on the same data: their differences, whether chance explains them, and the HTML page."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.base.errors import BadInput
from toolkit.evaluation.shown_metrics import metrics_of
from toolkit.tools.report import figures
from toolkit.tools.report.bootstrap import NUM_DRAWS, interval
from toolkit.tools.report.detection_errors import ERROR_KINDS
from toolkit.tools.report.gallery import LEGEND_OF_IMAGES, PictureMaker, whole_image
from toolkit.tools.report.judgement import Judgement
from toolkit.tools.report.page import Html, charts, number, paragraph, pictures, table, with_interval
from toolkit.tools.report.sections import HEADLINES
from toolkit.tools.report.thresholds import threshold_text

MAX_TABLE_CLASSES = 100  # in the table
COMPARED_RECALLS = ("R@50", "R@100", "mR@50", "mR@100")  # of relations, in the table
PRECISIONS = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
NOT_CHANCE = Html("<b>not explained by chance</b>")
_SEED = re.compile(r"[-_.]?(?:seed)?[-_.]?\d+$")


@dataclass(frozen=True)
class MetricDifference:
    """The difference between two detectors in one metric.

    Attributes:
        metric: name of the metric.
        base, other: names of the detectors.
        value: metric of `other` minus metric of `base`.
        low, high: ends of the 95 % interval of the difference, by a paired bootstrap over images.
    """

    metric: str
    base: str
    other: str
    value: float
    low: float
    high: float

    @property
    def chance(self) -> bool:
        """Whether chance may explain the difference: the interval contains 0."""
        return self.low <= 0 <= self.high

    def in_words(self) -> str:
        """Return a phrase such as "better by 0.8 AP (95 %: 0.1 to 1.5); not explained by chance", in percent points."""
        if self.value == self.low == self.high == 0:
            return f"the same {self.metric}"
        low, high = self.low, self.high
        if self.value < 0:
            low, high = -self.low, -self.high
        low, high = sorted((low, high))
        which = "better" if self.value >= 0 else "worse"
        ending = "may be chance" if self.chance else "not explained by chance"
        value = abs(self.value) * 100
        return f"{which} by {value:.1f} {self.metric} (95 %: {low * 100:.1f} to {high * 100:.1f}); {ending}"


@dataclass(frozen=True)
class Comparison:
    """A comparison of several detectors on the same data.

    Attributes:
        judged: the statistics of each detector.
        differences: differences between each other detector and the first, for all metrics.
        images: rows of the images whose F1, at each detector's own threshold, differs most between two detectors.
        groups: {names of at least two runs that differ only in their seed: {metric: (mean, standard deviation)}}.
    """

    judged: Sequence[Judgement]
    differences: list[MetricDifference]
    images: list[int]
    groups: dict[str, dict]


def compare(judged: Sequence[Judgement], images: int = 8) -> Comparison:
    """Compare detectors on the same data. images: maximum number of images in the result.

    Raises BadInput if the detectors were judged on different data.
    """
    first = judged[0]
    for other in judged[1:]:
        if other.table.fingerprint != first.table.fingerprint:
            raise BadInput(
                f"{other.name} was judged on {other.table.name}, {first.name} on {first.table.name}: only "
                "numbers on the same data can be compared; give one data set for all (--split)"
            )
    differences = [paired_difference(first, other, metric) for other in judged[1:] for metric in first.numbers]
    changed = np.ptp([judgement.image_f1 for judgement in judged], axis=0)
    order = np.argsort(-changed, kind="stable")[:images]
    images_changed = [int(i) for i in order if changed[i] > 0]
    return Comparison(
        judged,
        [d for d in differences if d is not None],
        images_changed,
        _seeds(judged),
    )


def settings_without_seed(config: Mapping) -> str:
    """Return the settings of a run as text without seed, name, output folder and resume.

    The text is equal for two runs if, and only if, their other settings are equal. It is "" if `config` is empty.
    """
    if not config:
        return ""
    left_out = ("seed", "name", "output_dir", "resume")
    run = {key: value for key, value in config.get("run", {}).items() if key not in left_out}
    return json.dumps(dict(config) | {"run": run}, sort_keys=True, default=str)


def paired_difference(base: Judgement, other: Judgement, metric: str) -> MetricDifference | None:
    """Return the difference of a metric between two detectors, with its interval by a paired bootstrap.

    Bootstrap samples are paired because both detectors' samples were drawn with the same seed and thus have the same
    images. Returns None if the metric is undefined for one of them, or one has no masks to measure.
    """
    values = base.numbers[metric], other.numbers.get(metric)
    if None in values:
        return None
    drawn = interval(
        other.draws.numbers[metric] - base.draws.numbers[metric],
        values[1] - values[0],
    )
    return None if drawn is None else MetricDifference(metric, base.name, other.name, values[1] - values[0], *drawn)


def _seeds(judged: Sequence[Judgement]) -> dict[str, dict]:
    """Group runs by their settings if these are known, else by names that differ only in their last number."""
    groups: dict[str, list[Judgement]] = {}
    for judgement in judged:
        key = judgement.about.get("settings_without_seed") or _SEED.sub("", judgement.name)
        groups.setdefault(str(key), []).append(judgement)
    result = {}
    for some in groups.values():
        if len(some) > 1:
            numbers = {}
            for metric in some[0].numbers:
                values = [judgement.numbers.get(metric) for judgement in some]
                if None not in values:
                    numbers[metric] = (float(np.mean(values)), float(np.std(values, ddof=1)))
            result[", ".join(judgement.name for judgement in some)] = numbers
    return result


def verdict(c: Comparison) -> str:
    """Return an HTML table that says for each headline metric how far each detector differs from the first."""
    rows = [(d.other, d.in_words()) for d in c.differences if d.metric in HEADLINES]
    text = (
        f"Each is compared with {c.judged[0].name}, on the same {NUM_DRAWS:,} bootstrap samples of the images "
        "(paired), in percent points. Such an interval shows what other images may change, not what another seed would."
    )
    return table(["", ""], rows, text=(0, 1)) + paragraph(text, "dim") + _precisions_apart(c)


def _precisions_apart(c: Comparison) -> str:
    """Return a paragraph if the detectors were trained in different precisions, else ""."""
    precisions = {j.name: j.about["precision"] for j in c.judged if j.about.get("precision")}
    if len(set(precisions.values())) < 2:
        return ""
    each = ", ".join(f"{name} in {PRECISIONS.get(kind, kind)}" for name, kind in precisions.items())
    return paragraph(
        f"They were trained in different precisions ({each}), which changes numbers about as much as another seed "
        "does: give --run.precision where only something else is to differ."
    )


def numbers_side_by_side(c: Comparison) -> str:
    """Return an HTML table of all metrics with a column for each detector, and charts of them."""
    rows = _rows_of_metrics(c, "boxes", "masks")
    if any(j.matches.by_mask for j in c.judged):
        rows.append(("the rest by", *("masks" if j.matches.by_mask else "boxes" for j in c.judged)))
    rows += _rows_of_metrics(c, "voc")
    rows.append(("best F1", *(number(j.overall.best and j.overall.best.f1) for j in c.judged)))
    rows.append(("threshold of it", *(threshold_text(j.threshold) for j in c.judged)))
    precisions = [j.about.get("precision") for j in c.judged]
    if any(precisions):
        rows.append(("trained in", *(PRECISIONS.get(kind, kind or "?") for kind in precisions)))
    for kind in ERROR_KINDS:
        rows.append((f"cost of {kind} mistakes (AP50)", *(number(j.errors.cost[kind]) for j in c.judged)))
    rows += [row for row in _rows_of_metrics(c, "relations") if row[0] in COMPARED_RECALLS]
    sweeps = {j.name: j.overall for j in c.judged}
    parts = [
        figures.iou_chart(_curves_by_iou(c)),
        figures.precision_recall_chart(sweeps),
        figures.f1_chart(sweeps),
    ]
    return table(["", *(j.name for j in c.judged)], rows) + charts(parts)


def _rows_of_metrics(c: Comparison, *kinds: str) -> list[tuple[str, ...]]:
    """Return a row for each metric that at least one of the detectors has: its title, and the value of each detector
    with its interval, if it has one."""
    rows = []
    for metric in metrics_of([j.row for j in c.judged], *kinds):
        cells = (with_interval(j.row.get(metric.key), j.intervals.get(metric.title)) for j in c.judged)
        rows.append((metric.title, *cells))
    return rows


def _curves_by_iou(c: Comparison) -> dict[str, np.ndarray]:
    """Return AP against IoU of each detector, by its name; of a detector of masks also that of masks."""
    curves = {}
    for j in c.judged:
        curves[j.name] = j.ap_by_iou["AP"]
        if j.matches.by_mask:
            curves[f"{j.name}, masks"] = j.ap_by_iou["segm_AP"]
    return curves


def differences(c: Comparison) -> str:
    """Return an HTML table of all differences from the first detector, with their 95 % intervals in percent points."""
    rows = []
    for d in c.differences:
        points = (f"{value * 100:+.2f}" for value in (d.value, d.low, d.high))
        rows.append((d.other, d.metric, *points, "may be chance" if d.chance else NOT_CHANCE))
    return table(
        [f"against {c.judged[0].name}", "", "difference", "95 % from", "to", ""],
        rows,
        text=(0, 1, 5),
    )


def seeds(c: Comparison) -> str:
    """Return HTML with mean and standard deviation of the metrics of runs that differ only in their seed; "" if there
    are none."""
    parts = []
    for names, values in c.groups.items():
        rows = [(metric, f"{mean:.4f}", f"{spread:.4f}") for metric, (mean, spread) in values.items()]
        parts += [paragraph(f"{names}: the same but for the seed."), table(["", "mean", "standard deviation"], rows)]
    return "".join(parts)


def classes(c: Comparison) -> str:
    """Return an HTML table of the AP of each class, with the paired difference between the last detector and the first.
    """
    first = c.judged[0]
    last = c.judged[-1]
    rows = []
    for label, name in enumerate(first.matches.class_names):
        value = last.class_ap[label] - first.class_ap[label]
        low_high = interval(last.draws.of_class[:, label] - first.draws.of_class[:, label], value)
        points = [f"{v * 100:+.1f}" for v in (value, *(low_high or ()))]
        shown = ("–", "") if low_high is None else (points[0], f"{points[1]} to {points[2]}")
        aps = [number(j.class_ap[label]) for j in c.judged]
        rows.append((name, first.matches.num_truth[label], *aps, *shown))
    changes = np.nan_to_num(last.class_ap - first.class_ap)
    rows = [rows[label] for label in np.argsort(-abs(changes), kind="stable")[:MAX_TABLE_CLASSES]]
    head = [
        "class",
        "boxes",
        *(j.name for j in c.judged),
        f"{last.name} less {first.name}, points",
        "95 %",
    ]
    return table(head, rows)


def changed(c: Comparison, maker: PictureMaker) -> str:
    """Return HTML with the images that differ most between two detectors, a row for each; "" if none can be shown."""
    shown = ""
    for image in c.images:
        shown += pictures([whole_image(j, maker, image, f"{j.name}, ") for j in c.judged])
    return LEGEND_OF_IMAGES + shown if shown else ""
