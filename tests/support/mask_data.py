"""Small data sets with masks, and predictions with masks, for the tests of what judges and draws them."""

import numpy as np
import torch
from report_data import SIZE, table_of

from toolkit.base.masks import bitmap, rle, rles_of
from toolkit.data.segmentations import to_segmentation
from toolkit.data.table_cache import write_rows


def with_masks(table, shapes):
    """The table with masks, a list of shapes for each image."""
    rows = [table.row(index) | {"masks": of_image} for index, of_image in enumerate(shapes)]
    folder = table.image_root
    about = {"categories": table.categories, "image_root": folder, "name": table.name}
    return write_rows(rows, cache_file=folder / "masks.json", **about)


def pixels_of(*boxes, size=SIZE):
    """(N, H, W) bool, true inside each box."""
    pixels = torch.zeros(len(boxes), *size, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(pixels, boxes, strict=True):
        mask[top:bottom, left:right] = True
    return pixels


def star(rng, box):
    """A polygon of random radii inside a box, as one or two rings."""
    left, top, right, bottom = np.asarray(box, float)
    angles = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(3, 14)))
    radii = rng.uniform(0.2, 1, len(angles))
    x = (left + right) / 2 + radii * np.cos(angles) * (right - left) / 2
    y = (top + bottom) / 2 + radii * np.sin(angles) * (bottom - top) / 2
    ring = np.stack([x, y], axis=1)
    if rng.random() < 0.2:
        return ring, ring[:3] + rng.uniform(-20, 20, 2)
    return (ring,)


def random_masks(folder, images=20, classes=3, seed=0, crowd=0.15, scores=1000, dets=25, size=SIZE, objects=6,
                 draw=False):  # fmt: skip
    """A table and predictions: duplicates, confusions, inventions, crowds, empty masks, empty images and, with few
    `scores`, many ties. The area that the data name is not that of the pixels."""
    rng = np.random.default_rng(seed)
    height, width = size
    truth = []
    shapes = []
    predictions = []
    for _ in range(images):
        boxes = []
        for _ in range(rng.integers(0, objects)):
            corner = rng.uniform(0, 0.7, 2) * [width, height]
            boxes.append(np.concatenate([corner, corner + rng.uniform(6, 0.5 * height, 2)]))
        labels = rng.integers(0, classes, len(boxes))
        is_crowd = rng.random(len(boxes)) < crowd
        of_image = []
        for box, in_crowd in zip(boxes, is_crowd, strict=True):
            shape = star(rng, box)
            if rng.random() < 0.1:
                shape = (np.array([[3.1, 3.1], [3.2, 3.1], [3.15, 3.2]]),)  # of no pixel
            of_image.append(rle(shape, size) if in_crowd or rng.random() < 0.3 else shape)
        truth.append(list(zip(boxes, labels.tolist(), is_crowd.tolist(), strict=True)))
        shapes.append(of_image)
        count = int(rng.integers(0, dets))
        found = np.zeros((count, *size), bool)
        found_labels = rng.integers(0, classes, count)
        found_boxes = rng.uniform(0, 60, (count, 4))
        found_boxes[:, 2:] += found_boxes[:, :2] + 4
        for row in range(count):
            if len(boxes) and rng.random() < 0.8:
                at = int(rng.integers(len(boxes)))
                pixels = bitmap(of_image[at], size).astype(bool)
                furthest = int(rng.choice([0, 1, 3]))
                found[row] = np.roll(pixels, rng.integers(-furthest, furthest + 1, 2), (0, 1))
                found_boxes[row] = boxes[at] + rng.normal(0, 2, 4)
                if rng.random() < 0.8:
                    found_labels[row] = labels[at]
            elif rng.random() < 0.7:
                found[row] = bitmap(star(rng, found_boxes[row]), size)
        found_boxes[:, 2:] = np.maximum(found_boxes[:, 2:], found_boxes[:, :2] + 1)
        predictions.append({
            "boxes": found_boxes,
            "scores": (rng.integers(scores, size=count) + 1) / (scores + 1),
            "labels": found_labels,
            "masks": rles_of(torch.from_numpy(found)) if count else [],
        })  # fmt: skip
    names = [f"class {k}" for k in range(classes)]
    table = with_masks(table_of(folder, truth, names, draw=draw, size=size), shapes)
    return table, dict(zip(table.image_ids().tolist(), predictions, strict=True))


def coco_document(table):
    """The annotations of a table as a COCO file has them."""
    truth = table.boxes(masks=True)
    ids = table.image_ids().tolist()
    annotations = []
    for row, shape in enumerate(truth.extra["masks"]):
        annotations.append({
            "id": row + 1,
            "image_id": ids[truth.image_index[row]],
            "category_id": table.categories[truth.labels[row]].id,
            "bbox": truth.xywh[row].tolist(),
            "area": float(truth.area[row]),
            "iscrowd": int(truth.iscrowd[row]),
            "segmentation": to_segmentation(shape),
        })  # fmt: skip
    images = []
    for index, (id_, (height, width)) in enumerate(zip(ids, table.sizes_hw().tolist(), strict=True)):
        images.append({"id": id_, "file_name": table.file_name(index), "height": height, "width": width})
    categories = [{"id": category.id, "name": category.name} for category in table.categories]
    return {"images": images, "annotations": annotations, "categories": categories, "info": {}}
