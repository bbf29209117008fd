"""What experiment trackers show of an evaluation."""

import numpy as np
from mask_data import random_masks
from report_data import SIZE

from toolkit.base.masks import bitmap
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.tools.report.evaluation_display import shown_evaluation
from toolkit.tools.trackers.weights_and_biases import _image


def test_trackers_get_masks(tmp_path):
    import wandb

    table, predictions = random_masks(tmp_path, 6, 2, seed=6, draw=True)
    evaluator = CocoEvaluator(table)
    scores = evaluator.evaluate(predictions)
    display = shown_evaluation(table, evaluator.mask_matches, scores, 3, None)
    first = next(shown for shown in display.images if shown.truth_map.any())
    row = table.row(table.image_ids().tolist().index(first.image_id))
    for shape, label in zip(row["masks"], row["objects"]["category"], strict=True):
        labels = first.truth_map[bitmap(shape, SIZE) > 0]
        assert (labels > 0).all()
        assert not len(labels) or 1 + label in labels or len(row["masks"]) > 1
    layers = _image(wandb, first, display.class_names)._masks
    assert set(layers) == {"ground_truth", "predictions"}
    assert layers["predictions"]._val["class_labels"] == {
        0: "background",
        1: "class 0",
        2: "class 1",
    }
    assert np.array_equal(layers["predictions"]._val["mask_data"], first.found_map)

    boxes = shown_evaluation(table, evaluator.matches, scores, 1, None).images[0]
    assert boxes.truth_map is None
    assert not _image(wandb, boxes, display.class_names)._masks
