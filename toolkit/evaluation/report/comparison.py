"""Compares several detectors on the same data: what differs, and whether chance explains it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.errors import BadInput
from toolkit.evaluation.report.bootstrap import interval
from toolkit.evaluation.report.judgement import Judgement

_SEED = re.compile(r"[-_.]?(?:seed)?[-_.]?\d+$")


@dataclass(frozen=True)
class Difference:
    """How much better `other` is than `base` in one number: `value` with its 95 % interval over images, paired."""

    metric: str
    base: str
    other: str
    value: float
    low: float
    high: float

    @property
    def chance(self) -> bool:
        """Is 0, no difference, in the interval?"""
        return self.low <= 0 <= self.high

    def in_words(self) -> str:
        """Such as "better by 0.8 AP (95 %: 0.1 to 1.5); not explained by chance", in percent points."""
        if self.value == self.low == self.high == 0:
            return f"the same {self.metric}"
        low, high = sorted((self.low, self.high)) if self.value >= 0 else sorted((-self.low, -self.high))
        which = "better" if self.value >= 0 else "worse"
        ending = "may be chance" if self.chance else "not explained by chance"
        value = abs(self.value) * 100
        return f"{which} by {value:.1f} {self.metric} (95 %: {low * 100:.1f} to {high * 100:.1f}); {ending}"


@dataclass(frozen=True)
class Comparison:
    """differences: of each detector but the first to the first, by metric. images: rows whose F1 at the detectors' own
    thresholds changed most between the first and the last. groups: names of runs that differ in their seed alone,
    with mean and standard deviation of each number (over at least two).
    """

    judged: Sequence[Judgement]
    differences: list[Difference]
    images: list[int]
    groups: dict[str, dict]


def compare(judged: Sequence[Judgement], images: int = 8) -> Comparison:
    """Raises BadInput when they were not made on the same data."""
    first = judged[0]
    for other in judged[1:]:
        if other.table.fingerprint != first.table.fingerprint:
            raise BadInput(
                f"{other.name} was judged on {other.table.name}, {first.name} on {first.table.name}: only "
                "numbers on the same data can be compared; give one data set for all (--split)"
            )
    differences = [
        each for other in judged[1:] for metric in first.numbers
        if (each := difference(first, other, metric)) is not None
    ]  # fmt: skip
    changed = abs(judged[-1].image_f1 - first.image_f1)
    order = np.argsort(-changed, kind="stable")[:images]
    return Comparison(judged, differences, [int(i) for i in order if changed[i] > 0], _seeds(judged))


def settings_without_seed(config: Mapping) -> str:
    """Equal for runs that differ in their seed and name alone; empty without settings."""
    if not config:
        return ""
    run = {key: value for key, value in config["run"].items() if key not in ("seed", "name", "output_dir", "resume")}
    return json.dumps(dict(config) | {"run": run}, sort_keys=True, default=str)


def difference(base: Judgement, other: Judgement, metric: str) -> Difference | None:
    """The paired bootstrap: both were drawn with the same seed, so that draw b holds the same images for both."""
    values = base.numbers[metric], other.numbers[metric]
    if None in values:
        return None
    drawn = interval(other.draws.numbers[metric] - base.draws.numbers[metric], values[1] - values[0])
    return None if drawn is None else Difference(metric, base.name, other.name, values[1] - values[0], *drawn)


def _seeds(judged: Sequence[Judgement]) -> dict[str, dict]:
    """By the settings of the runs where they are known, else by names that differ in their last number alone."""
    groups: dict[str, list[Judgement]] = {}
    for each in judged:
        key = each.about.get("settings_without_seed") or _SEED.sub("", each.name)
        groups.setdefault(str(key), []).append(each)
    result = {}
    for some in groups.values():
        if len(some) > 1:
            columns = {metric: [each.numbers[metric] for each in some] for metric in some[0].numbers}
            numbers = {metric: (float(np.mean(v)), float(np.std(v, ddof=1)))
                       for metric, v in columns.items() if None not in v}  # fmt: skip
            result[", ".join(each.name for each in some)] = numbers
    return result
