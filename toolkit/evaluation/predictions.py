"""Predictions: of one image, of a data set as columns, and in the file that every evaluation reads.

The file `FILE.json` is a COCO results file, a list of `{image_id, category_id, bbox [x, y, width, height], score}` in
pixels and with the ids of the annotation file, which pycocotools and other programs read. A detector of masks adds
`segmentation`, compressed run lengths `{size [height, width], counts}`. Beside this file are

- `FILE.about.json`: the data that the predictions were made on (a fingerprint of the data, and one of only the images
  and classes), the weights, and the printed metrics;
- `FILE.graphs.npz`: for scene graphs, the relations of each image as the detector gave them.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor

from toolkit.base.boxes import Boxes
from toolkit.base.errors import BadInput
from toolkit.base.files import write_json, write_text_atomic
from toolkit.base.masks import Rle, column_of, rle, selected_masks
from toolkit.base.text import first_names
from toolkit.data.table import Category, LabelledImages

logger = logging.getLogger(__name__)

Detections = dict[str, Tensor]
MIN_ATTRIBUTE_SCORE = 0.5
PAIR_FIELDS = ("pairs", "predicates", "triplet_scores", "predicate_scores")
ABOUT_VERSION = 1  # of `FILE.about.json`
# The predictions of a run's best weights on the validation data, in its report folder.
PREDICTIONS = "predictions.json"
_OF_GRAPHS = (
    "boxes labels scores pairs predicate_scores predicates triplet_scores combinations two_predicates two_scores "
    "true_labels true_relations"
).split()

# ---- of one image ----------------------------------------------------------------------------------------------------


def best_first(detections: Mapping[str, Tensor]) -> Detections:
    """Return the detections of one image sorted by descending score, on the CPU.

    Boxes with the label -1, which a scene graph detector gives to boxes without a class, are left out, and so are the
    pairs that contain them and pairs of an object with itself; the others are re-indexed.
    """
    order = detections["scores"].argsort(descending=True, stable=True)
    order = order[detections["labels"][order] >= 0]
    of_objects = ("boxes", "scores", "labels", "attribute_scores")
    result = {key: detections[key][order] for key in of_objects if key in detections}
    if "masks" in detections:
        result["masks"] = selected_masks(detections["masks"], order)
    if "pairs" in detections:
        position = torch.full_like(detections["labels"], -1)  # new row of each box; -1: it is left out
        position[order] = torch.arange(len(order), device=order.device)
        pairs = position[detections["pairs"]]
        has_both = (pairs >= 0).all(1)
        is_placeholder = pairs[:, 0] == pairs[:, 1]  # the pair of a lone object
        kept = has_both & ~is_placeholder
        result["pairs"] = pairs[kept]
        for key in PAIR_FIELDS[1:]:
            if key in detections:
                result[key] = detections[key][kept]
    return {key: value.cpu() if isinstance(value, Tensor) else value for key, value in result.items()}


def detections_as_json(
    detections: Detections, categories: Sequence[Category], attributes: Sequence[str] = ()
) -> list[dict]:
    """Convert the detections of one image to COCO results, best first.

    Each entry has `category_id` and `category` (the name), `bbox` [x, y, width, height] in pixels, and `score`. If the
    detections have scores of attributes, the entry also has `attributes`, the names with scores above 0.5; if they have
    masks, `segmentation`, compressed run lengths.

    Args:
        detections: the result of `best_first`.
        categories: those of the training data, in the order of the labels.
        attributes: names of the attributes, in the order of their scores.
    """
    entries = []
    columns = [detections[key].tolist() for key in ("boxes", "scores", "labels")]
    for (x1, y1, x2, y2), score, label in zip(*columns, strict=True):
        category = categories[label]
        bbox = (x1, y1, x2 - x1, y2 - y1)
        entry = {
            "category_id": category.id,
            "category": category.name,
            "bbox": [round(value, 6) for value in bbox],
            "score": round(score, 6),
        }
        entries.append(entry)
    if attributes and "attribute_scores" in detections:
        for entry, scores in zip(entries, detections["attribute_scores"].tolist(), strict=True):
            named = zip(attributes, scores, strict=True)
            entry["attributes"] = [name for name, score in named if score > MIN_ATTRIBUTE_SCORE]
    if "masks" in detections:
        for entry, mask in zip(entries, detections["masks"], strict=True):
            entry["segmentation"] = mask.as_json()
    return entries


# ---- of a data set, as columns ---------------------------------------------------------------------------------------


def boxes_of(predictions: Boxes | Mapping, image_ids: Sequence) -> Boxes:
    """Return predictions as columns, with the images in the order of `image_ids`.

    The predictions of an image keep their order.

    Args:
        predictions: `Boxes`, which are returned unchanged; or a mapping by image id of `boxes (K, 4)` xyxy in original
            pixels, `scores (K,)` and `labels (K,)` from 0, tensors on any device or arrays, for K predictions; and of
            `masks`, K `Rle`, which become the column `extra["masks"]`. Boxes of scene graphs with the label -1, which
            have no class, are left out.
        image_ids: ids of the images of the table; a mapping must have exactly these keys.

    Raises:
        BadInput: an image without prediction, a prediction without image, or parts of different length.
    """
    if isinstance(predictions, Boxes):
        return predictions
    check_image_ids(predictions, image_ids)
    return joined([predictions[image_id] for image_id in image_ids], image_ids)


def joined(predictions: Sequence[Mapping], image_ids: Sequence) -> Boxes:
    """Join the predictions of each image to columns; arguments and errors are those of `boxes_of`.

    predictions: in the order of `image_ids`; these are used in messages only.
    """
    boxes = [_numpy(of_image["boxes"]).reshape(-1, 4) for of_image in predictions]
    scores = [_numpy(of_image["scores"]).reshape(-1) for of_image in predictions]
    labels = [_numpy(of_image["labels"]).reshape(-1) for of_image in predictions]
    masks = _masks_by_image(predictions)
    uneven = []
    for index, (image_id, *parts) in enumerate(zip(image_ids, boxes, scores, labels, strict=True)):
        num_boxes, num_scores, num_labels = map(len, parts)
        if not num_boxes == num_scores == num_labels:
            uneven.append(
                f"prediction of image {image_id!r}: {num_boxes} boxes, {num_scores} scores, {num_labels} labels; "
                "expected as many of each"
            )
        if masks is not None and len(masks[index]) != num_boxes:
            uneven.append(
                f"prediction of image {image_id!r}: {num_boxes} boxes, {len(masks[index])} masks; expected as many of "
                "each"
            )
    if uneven:
        raise BadInput(uneven[:10])
    columns = Boxes.found(
        list(map(len, boxes)),
        np.concatenate([np.zeros((0, 4)), *boxes]),
        np.concatenate([np.zeros(0), *scores]),
        np.concatenate([np.zeros(0, np.int64), *labels]),
    )
    if masks is not None:
        columns = replace(columns, extra={"masks": column_of(list(chain.from_iterable(masks)))})
    of_graph = np.array(["pairs" in of_image for of_image in predictions], bool)
    if not of_graph.any():
        return columns
    has_class = columns.labels != -1
    return columns[has_class | ~of_graph[columns.image_index]]


def _masks_by_image(predictions: Sequence[Mapping]) -> list[Sequence[Rle]] | None:
    """Return the masks of each image's predictions; None if none of the images has the entry `masks`."""
    if not any("masks" in of_image for of_image in predictions):
        return None
    return [of_image.get("masks", ()) for of_image in predictions]


def check_image_ids(predictions: Mapping, image_ids: Sequence) -> None:
    """Raise BadInput, with some of the ids, if the keys of `predictions` are not exactly the `image_ids`."""
    expected = set(image_ids)
    missing = [i for i in image_ids if i not in predictions]
    unknown = [i for i in predictions if i not in expected]
    problems = []
    if missing:
        problems.append(
            f"{len(missing)} of {len(image_ids)} images have no prediction, among them "
            f"{first_names(missing, 5, repr)}; "
            "an image in which nothing was found still needs its (empty) prediction"
        )
    if unknown:
        problems.append(
            f"{len(unknown)} predictions belong to no image of this dataset, among them "
            f"{first_names(unknown, 5, repr)}; "
            f"its image ids look like {first_names(list(image_ids), 5, repr)}"
        )
    if problems:
        raise BadInput(problems)


def usable(predictions: Boxes, num_classes: int, image_ids: Sequence) -> Boxes:
    """Return the predictions without those that have non-finite numbers or labels outside of 0 to num_classes - 1.

    A warning that names some of their images is logged.
    """
    finite = np.isfinite(predictions.xyxy).all(axis=1) & np.isfinite(predictions.scores)
    labelled = (predictions.labels >= 0) & (predictions.labels < num_classes)
    faults = {
        "a box or score that is not finite": finite,
        f"a label outside 0..{num_classes - 1}": labelled,
    }
    for what, kept in faults.items():
        if not kept.all():
            positions = np.unique(predictions.image_index[~kept])
            images = [image_ids[i] for i in positions]
            some = first_names(images, 5, repr)
            logger.warning("%d predictions have %s and are left out; images: %s", (~kept).sum(), what, some)
    keep = finite & labelled
    return predictions if keep.all() else predictions[keep]


def _numpy(values) -> np.ndarray:
    if hasattr(values, "detach"):
        return values.detach().cpu().numpy()
    return np.asarray(values)


# ---- in a file -------------------------------------------------------------------------------------------------------


def about_file(path: str | Path) -> Path:
    """Return the metadata file that belongs to `FILE.json`."""
    return Path(path).with_suffix(".about.json")


def write_predictions(path: str | Path, predictions: Boxes | Mapping, table, **about) -> Path:
    """Write predictions of a whole data set, to the last bit of every number. Returns `path`.

    Args:
        path: `FILE.json`; its folder is made.
        predictions: as for `CocoEvaluator.evaluate` or `SceneGraphEvaluator.evaluate`.
        table: the data that the predictions were made on; its fingerprint is stored in `FILE.about.json`.
        about: further entries of `FILE.about.json`, as JSON values: `scores` (the metrics that were printed),
            `detector`, `data`, `step`.

    Raises:
        BadInput: image ids of predictions and table differ, or `path` does not end in .json.
    """
    path = Path(path).expanduser()
    if path.suffix != ".json":
        raise BadInput(f"{path}: a predictions file is called NAME.json")
    image_ids = table.image_ids().tolist()
    boxes = boxes_of(predictions, image_ids)
    path.parent.mkdir(parents=True, exist_ok=True)
    has_class = (boxes.labels >= 0) & (boxes.labels < len(table.categories))  # -1: a box of a graph without a class
    is_finite = np.isfinite(boxes.xyxy).all(axis=1) & np.isfinite(boxes.scores)
    graphs_file = path.with_suffix(".graphs.npz")
    graphs_file.unlink(missing_ok=True)  # of other predictions
    about_file(path).unlink(missing_ok=True)
    labelled = LabelledImages(table.image_rows(), boxes[has_class & is_finite], table.categories)
    write_text_atomic(path, coco_results(labelled))
    graphs = _graphs(predictions, image_ids)
    if graphs:
        np.savez_compressed(graphs_file, **graphs)
    ids_and_names = [(str(category.id), category.name) for category in table.categories]
    content = {
        "version": ABOUT_VERSION,
        "made_on": {
            "name": table.name,
            "fingerprint": table.fingerprint,
            "images": len(image_ids),
            "images_fingerprint": images_fingerprint(table, ids_and_names),
        },
        "classes": [{"id": category.id, "name": category.name} for category in table.categories],
        **about,
    }
    write_json(about_file(path), content)
    return path


def coco_results(labelled: LabelledImages) -> str:
    """Return COCO's list of results, `{image_id, category_id, bbox, score}`, as text, a line for each image.

    Boxes with masks have a `segmentation` too, as run lengths.
    """
    ids = [category.id for category in labelled.categories]
    masks = labelled.boxes.extra.get("masks")
    lines = []
    for index, (row, boxes) in enumerate(labelled.by_image()):
        entries = []
        for label, (x1, y1, x2, y2), score, _ in boxes:
            entry = {
                "image_id": row.image_id,
                "category_id": ids[label],
                "bbox": [x1, y1, x2 - x1, y2 - y1],
                "score": score,
            }
            entries.append(entry)
        if masks is not None:
            for entry, mask in zip(entries, masks[labelled.boxes.of_image(index)], strict=True):
                entry["segmentation"] = rle(mask, (row.height, row.width)).as_json()
        if entries:
            lines.append(json.dumps(entries)[1:-1])
    return "[" + ",\n".join(lines) + "]\n"


def _graphs(predictions: Boxes | Mapping, image_ids: Sequence) -> dict[str, np.ndarray]:
    """Return the arrays of scene graph metrics, concatenated, and the rows of each image; {} for boxes alone."""
    if isinstance(predictions, Boxes):
        return {}
    in_order = [predictions[image_id] for image_id in image_ids]
    if not any("pairs" in of_image for of_image in in_order):
        return {}
    graphs = {}
    for name in _OF_GRAPHS:
        present = [np.asarray(of_image[name]) for of_image in in_order if name in of_image]
        if not present:
            continue
        empty = present[0][:0]
        parts = [np.asarray(of_image.get(name, empty)) for of_image in in_order]
        graphs[name] = np.concatenate(parts)
        graphs[f"{name}/rows"] = np.array([len(part) for part in parts])
    return graphs


def images_fingerprint(table, classes: Sequence[tuple[str, str]]) -> str:
    """Return a hash of the ids, file names and sizes of a table's images, and of the classes.

    The order of the images and their folders do not change the hash. classes: (id, name) of each class.
    """
    images = []
    for row in table.image_rows():
        id_and_name = (str(row.image_id), PurePosixPath(row.file_name).name)
        images.append((id_and_name, (row.height, row.width)))
    text = json.dumps([sorted(images), classes])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
