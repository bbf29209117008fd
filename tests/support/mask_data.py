"""Small data sets with masks, and predictions with masks, for the tests of what reads, judges and draws them."""

import json

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as coco_mask
from report_data import SIZE, table_of
from samples import noise

from toolkit.base.masks import bitmap, rle, rles_of
from toolkit.data.formats import open_dataset
from toolkit.data.segmentations import to_segmentation
from toolkit.data.table_cache import write_rows

SIZE_HW = (30, 40)  # of the pictures of `masked_coco`
SQUARE = [4, 5, 20, 5, 20, 25, 4, 25]
BLOCK = np.zeros(SIZE_HW, np.uint8)  # its pixels
BLOCK[5:25, 4:20] = 1


def entry(number, image=1, **values):
    """An annotation of COCO with the mask `SQUARE`, whatever `values` do not say."""
    whole = {
        "id": number,
        "image_id": image,
        "category_id": 1,
        "bbox": [4, 5, 16, 20],
        "iscrowd": 0,
        "area": 320,
    }
    return whole | {"segmentation": [SQUARE]} | values


def brush(number, image=1, **values):
    """An annotation as CVAT writes a brush mask: run lengths with `iscrowd` 1."""
    return entry(number, image, iscrowd=1, segmentation=compressed(BLOCK), **values)


def masked_coco(folder, annotations):
    """A folder of COCO data with two pictures; returns it."""
    (folder / "train").mkdir(parents=True)
    (folder / "annotations").mkdir()
    images = []
    for number in (1, 2):
        Image.fromarray(noise(*SIZE_HW, number)).save(folder / "train" / f"{number}.png")
        images.append(
            {
                "id": number,
                "file_name": f"{number}.png",
                "width": SIZE_HW[1],
                "height": SIZE_HW[0],
            }
        )
    categories = [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations" / "train.json").write_text(json.dumps(document))
    return folder


def opened(folder, masks=True, **options):
    return open_dataset(
        "train",
        path=folder,
        cache_dir=folder.parent / "cache",
        masks=masks,
        **options,
    )


def masks_of(table):
    """The pixels of all masks, by image."""
    found = []
    for index, size_hw in enumerate(table.sizes_hw().tolist()):
        found.append([bitmap(shape, tuple(size_hw)) for shape in table.masks_of(index)])
    return found


def compressed(pixels):
    """COCO's compressed run lengths of pixels (H, W), as JSON."""
    encoded = coco_mask.encode(np.asfortranarray(pixels))
    return {"size": list(pixels.shape), "counts": encoded["counts"].decode()}


def uncompressed(pixels):
    """COCO's run lengths as numbers; the first is of pixels outside."""
    values = pixels.T.ravel()
    changes = np.flatnonzero(np.diff(values, prepend=0))
    runs = np.diff(changes, prepend=0, append=len(values)).tolist()
    return {"size": list(pixels.shape), "counts": runs}


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
    angles = np.sort(
        rng.uniform(
            0,
            2 * np.pi,
            rng.integers(3, 14),
        )
    )
    radii = rng.uniform(0.2, 1, len(angles))
    x = (left + right) / 2 + radii * np.cos(angles) * (right - left) / 2
    y = (top + bottom) / 2 + radii * np.sin(angles) * (bottom - top) / 2
    ring = np.stack([x, y], axis=1)
    if rng.random() < 0.2:
        return ring, ring[:3] + rng.uniform(-20, 20, 2)
    return (ring,)


def random_truth(rng, size, classes, crowd, objects):
    """Objects (box, label, crowd) and shapes of an image, some of no pixel."""
    height, width = size
    boxes = []
    for _ in range(rng.integers(0, objects)):
        corner = rng.uniform(0, 0.7, 2) * [width, height]
        boxes.append(np.concatenate([corner, corner + rng.uniform(6, 0.5 * height, 2)]))
    labels = rng.integers(0, classes, len(boxes))
    is_crowd = rng.random(len(boxes)) < crowd
    shapes = []
    for box, in_crowd in zip(boxes, is_crowd, strict=True):
        shape = star(rng, box)
        if rng.random() < 0.1:
            shape = (
                np.array(
                    [
                        [3.1, 3.1],
                        [3.2, 3.1],
                        [3.15, 3.2],
                    ]
                ),
            )  # of no pixel
        shapes.append(rle(shape, size) if in_crowd or rng.random() < 0.3 else shape)
    return list(
        zip(
            boxes,
            labels.tolist(),
            is_crowd.tolist(),
            strict=True,
        )
    ), shapes


def random_found(rng, size, classes, objects, shapes, scores, dets):
    """Predictions of an image, most of them near an object."""
    count = int(rng.integers(0, dets))
    found = np.zeros((count, *size), bool)
    labels = rng.integers(0, classes, count)
    boxes = rng.uniform(0, 60, (count, 4))
    boxes[:, 2:] += boxes[:, :2] + 4
    for row in range(count):
        if objects and rng.random() < 0.8:
            at = int(rng.integers(len(objects)))
            box, label, _ = objects[at]
            furthest = int(rng.choice([0, 1, 3]))
            shift = rng.integers(-furthest, furthest + 1, 2)
            found[row] = np.roll(
                bitmap(shapes[at], size).astype(bool),
                shift,
                (0, 1),
            )
            boxes[row] = box + rng.normal(0, 2, 4)
            if rng.random() < 0.8:
                labels[row] = label
        elif rng.random() < 0.7:
            found[row] = bitmap(star(rng, boxes[row]), size)
    boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)
    return {
        "boxes": boxes,
        "scores": (rng.integers(scores, size=count) + 1) / (scores + 1),
        "labels": labels,
        "masks": rles_of(torch.from_numpy(found)) if count else [],
    }


def random_masks(
    folder,
    images=20,
    classes=3,
    seed=0,
    crowd=0.15,
    scores=1000,
    dets=25,
    size=SIZE,
    objects=6,
    draw=False,
):
    """A table and predictions: duplicates, confusions, inventions, crowds, empty masks, empty images and, with few
    `scores`, many ties. The area that the data name is not that of the pixels."""
    rng = np.random.default_rng(seed)
    truth = []
    shapes = []
    predictions = []
    for _ in range(images):
        of_image, own_shapes = random_truth(rng, size, classes, crowd, objects)
        truth.append(of_image)
        shapes.append(own_shapes)
        predictions.append(random_found(rng, size, classes, of_image, own_shapes, scores, dets))
    names = [f"class {number}" for number in range(classes)]
    table = with_masks(table_of(folder, truth, names, draw=draw, size=size), shapes)
    return table, dict(
        zip(
            table.image_ids().tolist(),
            predictions,
            strict=True,
        )
    )


def coco_document(table):
    """The annotations of a table as a COCO file has them."""
    truth = table.boxes(masks=True)
    ids = table.image_ids().tolist()
    annotations = []
    for row, shape in enumerate(truth.extra["masks"]):
        about = {
            "id": row + 1,
            "image_id": ids[truth.image_index[row]],
            "category_id": table.categories[truth.labels[row]].id,
            "bbox": truth.xywh[row].tolist(),
            "area": float(truth.area[row]),
            "iscrowd": int(truth.iscrowd[row]),
        }
        annotations.append(about | {"segmentation": to_segmentation(shape)})
    images = []
    for row in table.image_rows():
        images.append(
            {
                "id": row.image_id,
                "file_name": row.file_name,
                "height": row.height,
                "width": row.width,
            }
        )
    categories = [{"id": category.id, "name": category.name} for category in table.categories]
    return {"images": images, "annotations": annotations, "categories": categories, "info": {}}
