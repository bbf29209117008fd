"""Small data sets with predictions for the tests of the report."""

import numpy as np
import torch
from PIL import Image

from toolkit.data.table import Category
from toolkit.data.table_cache import write_rows
from toolkit.evaluation.matches import match_predictions

SIZE = (120, 160)  # height, width


def table_of(
    folder,
    images,
    classes=("cat", "dog"),
    draw=True,
    predicates=(),
    size=SIZE,
    ids=None,
    attributes=(),
    attribute_ids=None,
    category_ids=None,
):
    """images: per image a list of (box xyxy, label, crowd), or a dict with `objects` like that and `relations`; their
    ids are 10, 11, ... unless given.
    attribute_ids: of each object of each image, where `attributes` are named. category_ids: 1, 4, ... unless given."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    number = 1  # of an annotation; pycocotools never finds the one with id 0
    for i, image in enumerate(images):
        if not isinstance(image, dict):
            image = {"objects": image, "relations": []}
        if draw:
            Image.new("RGB", size[::-1], (90, 20 * (i % 10), 60)).save(folder / f"{i}.png")
        columns = _columns(image["objects"], number)
        if attribute_ids is not None:
            columns["attributes"] = attribute_ids[i]
        number += len(image["objects"])
        ends = np.array(image["relations"], int).reshape(-1, 3).T.tolist()
        row = {
            "image_id": ids[i] if ids else 10 + i,
            "file_name": f"{i}.png",
            "width": size[1],
            "height": size[0],
            "objects": columns,
            "relations": dict(zip(("subject", "object", "predicate"), ends, strict=True)),
        }
        rows.append(row)
    category_ids = category_ids or range(1, 3 * len(classes) + 1, 3)
    return write_rows(
        rows,
        cache_file=folder / "table.json",
        image_root=folder,
        name=str(folder / "annotations.json"),
        categories=[Category(id_, name) for id_, name in zip(category_ids, classes, strict=True)],
        predicates=predicates,
        attributes=attributes,
    )


def _columns(objects, first_id: int) -> dict:
    boxes = [list(map(float, box)) for box, *_ in objects]
    return {
        "id": list(range(first_id, first_id + len(boxes))),
        "bbox": boxes,
        "category": [label for _, label, *_ in objects],
        "area": [(right - left) * (bottom - top) for left, top, right, bottom in boxes],
        "iscrowd": [int(any(crowd)) for _, _, *crowd in objects],
    }


def three_corners(count=12):
    """Images with one box of each of three classes, in three corners."""
    places = ([5, 5, 45, 45], [60, 5, 110, 50], [10, 60, 70, 110])
    images = []
    for i in range(count):
        images.append([(np.add(box, i % 5), label) for label, box in enumerate(places)])
    return images


def found_of(boxes, labels, scores) -> dict:
    """Detections of one image, as tensors."""
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "scores": torch.tensor(scores),
        "labels": torch.tensor(labels, dtype=torch.int64),
    }


def predictions_of(table, images):
    """images: per image a list of (box xyxy, label, score)."""
    predictions = {}
    for image_id, found in zip(table.image_ids().tolist(), images, strict=True):
        predictions[image_id] = {
            "boxes": np.array([box for box, _, _ in found], np.float64).reshape(-1, 4),
            "scores": np.array([score for _, _, score in found], np.float64),
            "labels": np.array([label for _, label, _ in found], np.int64),
        }
    return predictions


def matched_of(table, images):
    """Matches of predictions as `predictions_of` takes them."""
    return match_predictions(predictions_of(table, images), table)


def random_case(folder, images=30, classes=4, seed=0, crowd=0.1, scores=1000, dets=25):
    """Noisy predictions with duplicates, confusions, inventions and, with few `scores`, many ties."""
    rng = np.random.default_rng(seed)
    truth = []
    found = []
    for _ in range(images):
        count = rng.integers(0, 6)
        low = rng.uniform(0, 90, (count, 2))
        boxes = np.concatenate([low, low + rng.uniform(6, 60, (count, 2))], axis=1).astype(np.float32)
        labels = rng.integers(0, classes, count)
        truth.append([(box, int(k), rng.random() < crowd) for box, k in zip(boxes, labels, strict=True)])
        detections = []
        for _ in range(rng.integers(0, dets)):
            if count and rng.random() < 0.7:
                at = rng.integers(count)
                box = boxes[at] + rng.normal(0, rng.choice([1, 4, 9]), 4)
                label = int(labels[at]) if rng.random() < 0.8 else int(rng.integers(classes))
            else:
                corner = rng.uniform(0, 100, 2)
                box = np.concatenate([corner, corner + rng.uniform(5, 50, 2)])
                label = int(rng.integers(classes))
            box = np.concatenate([np.minimum(box[:2], box[2:]), np.maximum(box[:2], box[2:]) + 1])
            detections.append((box, label, (rng.integers(scores) + 1) / (scores + 1)))
        found.append(detections)
    table = table_of(folder, truth, [f"class {k}" for k in range(classes)], draw=False)
    return table, predictions_of(table, found)


def ground_truth_as_predictions(table):
    """The table's boxes, crowds left out, as predictions with score 1: what a perfect detector would say."""
    truth = table.boxes()
    truth = truth[~truth.iscrowd]
    predictions = {}
    for image, image_id in enumerate(table.image_ids().tolist()):
        rows = truth.of_image(image)
        predictions[image_id] = {
            "boxes": torch.from_numpy(truth.xyxy[rows]),
            "scores": torch.ones(rows.stop - rows.start),
            "labels": torch.from_numpy(truth.labels[rows]),
        }
    return predictions
