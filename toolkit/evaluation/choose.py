"""Chooses the evaluator of a detector: its own, or COCO's box metrics."""

from toolkit.data.table import DetectionTable
from toolkit.evaluation.coco import CocoEvaluator


def make_evaluator(detector, table: DetectionTable, backend: str, **settings):
    """What measures a detector on a table: what its own `make_evaluator` gives, else COCO's metrics of boxes.

    backend: of COCO's metrics. settings: what else `eval` has for such a detector, such as `protocol` and `zero_shot`
    of scene graphs. Raises BadInput as the detector's own `make_evaluator`.
    """
    own = detector.make_evaluator(table, backend, **settings)
    return CocoEvaluator(table, backend) if own is None else own
