"""The metrics that the tables of an evaluation show."""

from toolkit.evaluation.shown_metrics import COCO_METRICS, METRICS, metrics_of


def test_a_kind_is_shown_whole_in_the_order_asked_for():
    boxes = {"bbox_AP": None, "loss": 1.0}
    masks = {"segm_AP50": 0.5, "bbox_AP": 0.1}
    titles = [metric.title for metric in metrics_of([boxes, masks], "masks", "boxes", "voc", "relations")]
    assert titles == [*(f"segm_{name}" for name in COCO_METRICS), *COCO_METRICS]
    assert metrics_of([boxes], "masks", "relations") == []
    assert metrics_of([], *METRICS) == []
