"""Scene graphs against the numbers of Scene-Graph-Benchmark; every group and case is enumerated from the files.

Run: python -m pytest tests/golden/test_sgg.py [--golden DIR]
"""

import contextlib
import io
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from toolkit.evaluation.scene_graph import evaluate_scene_graphs


@cache
def arrays(folder: Path, topic: str) -> dict[str, np.ndarray]:
    with np.load(folder / f"sgg_{topic}.npz", allow_pickle=False) as file:
        return dict(file)


def group(data: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {key[len(prefix) + 1 :]: value for key, value in data.items() if key.startswith(f"{prefix}.")}


def prefixes(folder: Path, topic: str, depth: int = 1) -> list[str]:
    names = (key.split(".")[:depth] for key in arrays(folder, topic) if key.count(".") >= depth)
    return list(dict.fromkeys(".".join(name) for name in names))


def rows_of(values: np.ndarray, ptr: np.ndarray, i: int) -> np.ndarray:
    return values[ptr[i] : ptr[i + 1]]


def pytest_generate_tests(metafunc):
    folder = metafunc.config.getoption("golden")
    if "evaluator_group" in metafunc.fixturenames:
        metafunc.parametrize("evaluator_group", prefixes(folder, "evaluator"))


@pytest.fixture(scope="session")
def golden(pytestconfig) -> Path:
    return pytestconfig.getoption("golden")


# Evaluator


def scene_graphs(case: dict[str, np.ndarray]) -> tuple[list[dict], list[dict]]:
    truths, predictions = [], []
    for i in range(len(case["image_size_wh"])):
        relations = rows_of(case["gt_rels"], case["gt_rel_ptr"], i) - [0, 0, 1]
        boxes, labels = (rows_of(case[key], case["gt_ptr"], i) for key in ("gt_boxes", "gt_classes"))
        truths.append({"boxes": boxes, "labels": labels - 1, "relations": relations})
        pred = {key: rows_of(case[f"pred_{key}"], case["pred_ptr"], i) for key in ("boxes", "labels", "scores")}
        pred["labels"] = pred["labels"] - 1
        pred["pairs"] = rows_of(case["rel_pair_idxs"], case["rel_ptr"], i)
        pred["predicate_scores"] = rows_of(case["rel_scores"], case["rel_ptr"], i)[:, 1:]
        predictions.append(pred)
    return truths, predictions


def evaluator_case(golden: Path, name: str) -> tuple[dict[str, np.ndarray], str, dict]:
    data = arrays(golden, "evaluator")
    case = group(data, name)
    options = {
        "num_predicates": int(data["num_rel_classes_with_bg"]) - 1,
        "iou_threshold": float(data["iou_threshold"]),
        "top": tuple(data["K"].tolist()),
        "zero_shot": case["zeroshot_triplets_sub_obj_pred"] - 1,
    }
    return case, str(case.get("mode", name)), options


def test_evaluator(golden, evaluator_group):
    case, mode, options = evaluator_case(golden, evaluator_group)
    metrics = evaluate_scene_graphs(*scene_graphs(case), mode=mode, **options)
    checked = set()
    for name, value in metrics.values.items():
        if (key := "fork_F1" if name == "F1" else name) in case:
            np.testing.assert_allclose(value, case[key], rtol=0, atol=1e-9, equal_nan=True, err_msg=name)
            checked.add(name)
    for name in ("R", "ngR", "zR", "ngzR"):
        np.testing.assert_allclose(metrics.per_image[name], case[f"{name}_per_image"], rtol=0, atol=1e-9, err_msg=name)
    for name in ("mR", "ngmR"):
        np.testing.assert_allclose(metrics.per_predicate[name], case[f"{name}_per_predicate"], rtol=0, atol=1e-9)
        np.testing.assert_array_equal(metrics.images_per_predicate, case[f"{name}_num_images"][1:])
        assert len(metrics.evaluated_images) == case[f"{name}_num_images"][0]
    assert {"R", "ngR", "zR", "ngzR", "mR", "ngmR"} <= checked
    assert ("A" in case) == ("A" in checked)
    if "A" in case:
        np.testing.assert_array_equal(metrics.accuracy_hits, case["A_hit"])
        np.testing.assert_array_equal(metrics.accuracy_counts, case["A_count"])
    np.testing.assert_array_equal(metrics.evaluated_images, case["evaluated_images"])
    np.testing.assert_array_equal(metrics.zero_shot_images, case["zeroshot_images"])
    np.testing.assert_array_equal(metrics.matches, sorted_rows(case["pred_to_gt"]))
    np.testing.assert_array_equal(metrics.unconstrained_matches, sorted_rows(case["nogc_pred_to_gt"]))
    np.testing.assert_allclose(metrics.values["R"][-1], case["return_value"], rtol=0, atol=1e-9)


def sorted_rows(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T[::-1])]


def test_phrase_detection(golden, evaluator_group):
    case, _, options = evaluator_case(golden, evaluator_group)
    if "phrdet_R" not in case:
        pytest.skip("no union box numbers in this group")
    metrics = evaluate_scene_graphs(*scene_graphs(case), mode="phrdet", **options)
    np.testing.assert_allclose(metrics.values["R"], case["phrdet_R"], rtol=0, atol=1e-9)
    np.testing.assert_allclose(metrics.per_image["R"], case["phrdet_R_per_image"], rtol=0, atol=1e-9)


def coco_stats(truths, predictions, num_classes: int, first_id: int) -> np.ndarray:
    def xywh(boxes):
        return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2] + 1], 1).astype(float)

    annotations, results = [], []
    for image, (truth, prediction) in enumerate(zip(truths, predictions, strict=True)):
        for box, label in zip(xywh(truth["boxes"]), truth["labels"], strict=True):
            entry = {"id": len(annotations) + first_id, "image_id": image, "category_id": int(label), "iscrowd": 0}
            annotations.append(entry | {"bbox": box.tolist(), "area": box[2] * box[3]})
        columns = np.full(len(prediction["boxes"]), image), xywh(prediction["boxes"])
        results.append(np.column_stack([*columns, prediction["scores"], prediction["labels"]]))
    coco = COCO()
    coco.dataset = {"info": {}, "images": [{"id": i} for i in range(len(truths))], "annotations": annotations}
    coco.dataset["categories"] = [{"id": i, "name": str(i)} for i in range(num_classes)]
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
        run = COCOeval(coco, coco.loadRes(np.concatenate(results)), "bbox")
        run.evaluate(), run.accumulate(), run.summarize()
    return run.stats


def test_box_ap_counts_the_first_box(golden, evaluator_group):
    """The original numbers annotations from 0 and COCOeval takes id 0 for "no match"; ours start at 1."""
    case, mode, _ = evaluator_case(golden, evaluator_group)
    if "coco_stats" not in case:
        pytest.skip("no box numbers in this group")
    truths, predictions = scene_graphs(case)
    if mode == "predcls":  # the labels are given
        predictions = [
            p | {"labels": t["labels"], "scores": np.ones(len(t["labels"]))}
            for t, p in zip(truths, predictions, strict=True)
        ]
    num_classes = int(arrays(golden, "evaluator")["num_obj_classes_with_bg"]) - 1
    ours = coco_stats(truths, predictions, num_classes, first_id=1)
    np.testing.assert_allclose(ours, case["coco_stats_ids_from_1"], rtol=0, atol=1e-9)
    original = coco_stats(truths, predictions, num_classes, first_id=0)
    np.testing.assert_allclose(original, case["coco_stats"], rtol=0, atol=1e-9)
