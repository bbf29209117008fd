"""The metrics of a data set that tables show: which of them an evaluation has, in which order, and what they measure.

The log, the pages and the README of a report, comparisons and model cards all take their rows from `metrics_of`, so
that none of them decides again which metrics exist.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

COCO_METRICS = {  # with what each measures
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
RELATION_METRICS = ("R", "ngR", "zR", "mR", "ngmR", "A")  # each at 20, 50 and 100 relations of an image


@dataclass(frozen=True)
class Metric:
    """A metric of a whole data set.

    Attributes:
        key: its name in the rows that evaluators return, such as "bbox_AP50".
        title: its name in a report: "AP50" of boxes, but "segm_AP50" of masks.
        meaning: what it measures, in a few words; "": its name is all that is shown.
    """

    key: str
    title: str
    meaning: str = ""


METRICS = {
    "boxes": [Metric(f"bbox_{name}", name, meaning) for name, meaning in COCO_METRICS.items()],
    "masks": [Metric(f"segm_{name}", f"segm_{name}", f"masks: {text}") for name, text in COCO_METRICS.items()],
    "voc": [
        Metric("voc07_mAP", "VOC07 mAP", "Pascal VOC, 11 recalls"),
        Metric("voc12_mAP", "VOC12 mAP", "Pascal VOC, all recalls"),
    ],
    "relations": [Metric(f"{name}@{k}", f"{name}@{k}") for name in RELATION_METRICS for k in (20, 50, 100)],
    "attributes": [Metric("attribute_R_precision", "attribute_R_precision")],
}


def metrics_of(rows: Iterable[Mapping[str, object]], *kinds: str) -> list[Metric]:
    """Return the metrics that a table of one or several evaluations shows, in the order of `kinds`.

    All metrics of a kind are shown if at least one row has one of them, even if its value is None (undefined).

    Args:
        rows: metrics of each evaluation by key, as `CocoEvaluator.evaluate` returns them; other keys are ignored.
        kinds: keys of `METRICS`.
    """
    measured = {key for row in rows for key in row}
    shown = []
    for kind in kinds:
        of_kind = METRICS[kind]
        if any(metric.key in measured for metric in of_kind):
            shown += of_kind
    return shown
