"""COCO metrics computed by pycocotools: the reference for ours, and `eval.backend pycocotools`."""

import contextlib
import io

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from toolkit.boxes import Boxes
from toolkit.evaluation.matches import Matches
from toolkit.imports import uncollected


def pycocotools_numbers(matches: Matches) -> dict[str, float | None]:
    """As `toolkit.evaluation.coco.coco_row`; 2 kB of memory for each box."""
    m = matches
    with contextlib.redirect_stdout(io.StringIO()), uncollected():  # it prints its progress
        run = COCOeval(_loaded(m.truth, m), _loaded(m.found, m), iouType="bbox")
        run.params.maxDets, run.params.catIds = list(m.max_detections), list(range(m.num_classes))
        run.evaluate()
        run.accumulate()
    return _row(np.array(run.eval["precision"]), np.asarray(run.eval["recall"]), run.params, m)


def _loaded(boxes: Boxes, m: Matches) -> COCO:
    """Image ids are positions in the table, so that strings are fine too. Annotation ids count from 1: the evaluation
    marks "not matched" with 0, so the box with id 0 would never be found."""
    scores = np.ones(len(boxes)) if boxes.scores is None else boxes.scores
    columns = (boxes.image_index, boxes.labels, boxes.xywh, boxes.area, boxes.iscrowd.astype(int), scores)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    coco = COCO()
    coco.dataset = {
        "images": [{"id": i} for i in range(m.num_images)],
        "categories": [{"id": k} for k in range(m.num_classes)],
        "annotations": [
            {"id": n, "image_id": i, "category_id": k, "bbox": b, "area": a, "iscrowd": c, "score": s}
            for n, (i, k, b, a, c, s) in enumerate(rows, start=1)
        ],
    }
    coco.createIndex()
    return coco


def _row(precision: np.ndarray, recall: np.ndarray, params, m: Matches) -> dict[str, float | None]:
    """COCOeval.summarize() without its printing and with the classes; changes `precision` (T, R, K, A, M)."""
    # It adds an epsilon to what it divides by, so that one detection out of one is 1 - 2e-16, not 1.
    precision[precision > 1 - 1e-15] = 1
    half, three_quarters = (int(np.argmin(abs(params.iouThrs - t))) for t in (0.5, 0.75))
    areas = {"s": 1, "m": 2, "l": 3}  # small, medium, large; 0 is all
    row = {
        "bbox_AP": _mean(precision[:, :, :, 0, -1]),
        "bbox_AP50": _mean(precision[half, :, :, 0, -1]),
        "bbox_AP75": _mean(precision[three_quarters, :, :, 0, -1]),
    }
    row |= {f"bbox_AP{a}": _mean(precision[:, :, :, i, -1]) for a, i in areas.items()}
    row |= {f"bbox_AR{n}": _mean(recall[:, :, 0, i]) for i, n in enumerate(m.max_detections)}
    row |= {f"bbox_AR{a}": _mean(recall[:, :, i, -1]) for a, i in areas.items()}
    most = m.max_detections[-1]
    for k, name in enumerate(m.class_names):
        row[f"AP/{name}"] = _mean(precision[:, :, k, 0, -1])
        row[f"AP50/{name}"] = _mean(precision[half, :, k, 0, -1])
        row[f"AR{most}/{name}"] = _mean(recall[:, k, 0, -1])
    return row


def _mean(values: np.ndarray) -> float | None:
    defined = values[values > -1]
    return float(defined.mean()) if defined.size else None
