"""The metrics that the tables of an evaluation show."""

from toolkit.evaluation.shown_metrics import COCO_METRICS, METRICS, metrics_of
from toolkit.tools.report.facts import RunFacts
from toolkit.tools.report.markdown import write_markdown


def test_a_kind_is_shown_whole_if_one_row_has_it_and_in_the_order_asked_for():
    boxes = {"bbox_AP": None, "loss": 1.0}
    masks = {"segm_AP50": 0.5, "bbox_AP": 0.1}
    titles = [metric.title for metric in metrics_of([boxes, masks], "masks", "boxes", "voc", "relations")]
    assert titles == [*(f"segm_{name}" for name in COCO_METRICS), *COCO_METRICS]
    assert metrics_of([boxes], "masks", "relations") == []
    assert metrics_of([], *METRICS) == []


def test_the_readme_of_a_report_has_the_last_and_the_best_evaluation(tmp_path):
    rows = [
        {"step": 1, "val/bbox_AP": 0.4, "val/AP/cat": 0.4, "val/ema/bbox_AP": 0.1},
        {"step": 2, "val/bbox_AP": 0.3, "val/AP/cat": None, "val/loss": 2.0},
    ]
    text = write_markdown(tmp_path, RunFacts(rows)).read_text()
    assert "| metric | raw, last (step 2) | raw, best (step 1) | EMA, last (step 1) | EMA, best (step 1) |" in text
    assert "| bbox_AP | 0.3000 | 0.4000 | 0.1000 | 0.1000 |" in text
    assert "| loss | 2.0000 | - | - | - |" in text
    assert "| cat | - | 0.4000 | - | - |" in text
    assert "segm_AP" not in text and "R@20" not in text
