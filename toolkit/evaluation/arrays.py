"""Ground truth of a table and predictions by image id as flat arrays, one row per box."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from toolkit.errors import BadInput
from toolkit.text import escaped

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BoxArrays:
    """Boxes of many images, flat; G boxes in I images.

    Attributes:
        image_index: (G,) int64, position of the box's image in the table.
        boxes_xyxy: (G, 4) float64, pixels of the original image.
        labels: (G,) int64 from 0.
        scores: (G,) float64; ones for ground truth.
        area: (G,) float64, square pixels.
        iscrowd: (G,) int64.
    """

    image_index: np.ndarray
    boxes_xyxy: np.ndarray
    labels: np.ndarray
    scores: np.ndarray
    area: np.ndarray
    iscrowd: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, keep) -> "BoxArrays":
        return BoxArrays(*(getattr(self, name)[keep] for name in self.__dataclass_fields__))

    def xywh(self) -> np.ndarray:
        """(G, 4) float64: left, top, width, height."""
        return np.concatenate([self.boxes_xyxy[:, :2], self.boxes_xyxy[:, 2:] - self.boxes_xyxy[:, :2]], axis=1)


def ground_truth_arrays(table) -> BoxArrays:
    """All annotations of a `DetectionTable`, straight from Arrow: no Python object per box."""
    objects = table.rows.column("objects").combine_chunks()
    lists = dict(zip((field.name for field in objects.type), objects.flatten(), strict=True))
    counts = np.from_dlpack(pc.list_value_length(lists["category"]))  # `to_numpy` of pyarrow imports pandas

    def flat(name: str, dtype) -> np.ndarray:
        values = lists[name].flatten()
        if name == "bbox":  # a list of four numbers per box
            values = values.flatten()
        return np.from_dlpack(values).astype(dtype)

    labels = flat("category", np.int64)
    return BoxArrays(
        image_index=np.repeat(np.arange(len(counts)), counts),
        boxes_xyxy=flat("bbox", np.float64).reshape(-1, 4),
        labels=labels,
        scores=np.ones(len(labels)),
        area=flat("area", np.float64),
        iscrowd=flat("iscrowd", np.int64),
    )


def prediction_arrays(predictions: Mapping, image_ids: Sequence) -> BoxArrays:
    """Predictions in the order of `image_ids`; within an image they keep the order they came in.

    Args:
        predictions: by image id, `boxes (K, 4)` xyxy in original pixels, `scores (K,)`, `labels (K,)` from 0;
            tensors on any device, or arrays.
        image_ids: of the table, each exactly once in `predictions`.

    Raises:
        BadInput: an image without prediction, a prediction without image, or parts of different length.
    """
    check_image_ids(predictions, image_ids)
    ordered = [predictions[image_id] for image_id in image_ids]
    boxes = [_numpy(p["boxes"]).reshape(-1, 4) for p in ordered]
    scores = [_numpy(p["scores"]).reshape(-1) for p in ordered]
    labels = [_numpy(p["labels"]).reshape(-1) for p in ordered]
    counts = np.array([len(b) for b in boxes], dtype=np.int64)
    uneven = [
        f"prediction of image {image_id!r}: {len(b)} boxes, {len(s)} scores, {len(c)} labels; expected as many of each"
        for image_id, b, s, c in zip(image_ids, boxes, scores, labels, strict=True)
        if not len(b) == len(s) == len(c)
    ]
    if uneven:
        raise BadInput(uneven[:10])
    boxes_xyxy = np.concatenate([np.zeros((0, 4)), *boxes]).astype(np.float64)
    sides = boxes_xyxy[:, 2:] - boxes_xyxy[:, :2]
    return BoxArrays(
        image_index=np.repeat(np.arange(len(ordered)), counts),
        boxes_xyxy=boxes_xyxy,
        labels=np.concatenate([np.zeros(0, np.int64), *labels]).astype(np.int64),
        scores=np.concatenate([np.zeros(0), *scores]).astype(np.float64),
        area=sides[:, 0] * sides[:, 1],
        iscrowd=np.zeros(len(boxes_xyxy), np.int64),
    )


def check_image_ids(predictions: Mapping, image_ids: Sequence) -> None:
    """Every image of the table has one prediction and the other way round, else BadInput naming some."""
    known = set(image_ids)
    missing = [i for i in image_ids if i not in predictions]
    unknown = [i for i in predictions if i not in known]
    problems = []
    if missing:
        problems.append(
            f"{len(missing)} of {len(image_ids)} images have no prediction, among them {_some(missing)}; "
            "an image in which nothing was found still needs its (empty) prediction"
        )
    if unknown:
        problems.append(
            f"{len(unknown)} predictions belong to no image of this dataset, among them {_some(unknown)}; "
            f"its image ids look like {_some(list(image_ids))}"
        )
    if problems:
        raise BadInput(problems)


def drop_unusable(detections: BoxArrays, num_classes: int, image_ids: Sequence) -> BoxArrays:
    """Leave out what no metric can use (non-finite numbers, labels of no class); a warning says how many and where."""
    finite = np.isfinite(detections.boxes_xyxy).all(axis=1) & np.isfinite(detections.scores)
    known = (detections.labels >= 0) & (detections.labels < num_classes)
    for kept, what in ((finite, "a box or score that is not finite"), (known, f"a label outside 0..{num_classes - 1}")):
        if not kept.all():
            images = [image_ids[i] for i in np.unique(detections.image_index[~kept])]
            log.warning("%d predictions have %s and are left out; images: %s", (~kept).sum(), what, _some(images))
    keep = finite & known
    return detections if keep.all() else detections[keep]


def _some(values: list) -> str:
    return ", ".join(repr(v) for v in values[:5]) + (", ..." if len(values) > 5 else "")


def _numpy(values) -> np.ndarray:
    return values.detach().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)


def class_keys(table) -> list[str]:
    """Class names as used in metric names; a name that several classes share gets the original id added."""
    return metric_keys([c.name for c in table.categories], [c.id for c in table.categories])


def metric_keys(names: Sequence[str], ids: Sequence | None = None) -> list[str]:
    """Names for keys of rows and trackers, each another one: on one line, without control characters, of 80 columns at
    most. Names that are then the same get their id added.

    ids: of the names; None: their positions.
    """
    ids = range(len(names)) if ids is None else ids
    short = [escaped(name) for name in names]
    counts, taken, keys = Counter(short), set(), []
    for name, id_ in zip(short, ids, strict=True):
        key = name if counts[name] == 1 else f"{name} ({escaped(id_)})"
        while key in taken:  # a class that is called like another one with its id
            key += "'"
        taken.add(key)
        keys.append(key)
    return keys
