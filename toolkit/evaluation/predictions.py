"""Predictions by image id as columns, without unusable ones."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from toolkit.base.boxes import Boxes
from toolkit.base.errors import BadInput

log = logging.getLogger(__name__)


def boxes_of(predictions: Boxes | Mapping, image_ids: Sequence) -> Boxes:
    """Return predictions in the order of `image_ids`; within an image they keep their order.

    Args:
        predictions: columns, which stay as they are; or by image id, `boxes (K, 4)` xyxy in original pixels,
            `scores (K,)`, `labels (K,)` from 0; tensors on any device, or arrays. Boxes of a scene graph that lost
            every class (-1) are left out.
        image_ids: of the table, each exactly once in `predictions`.

    Raises:
        BadInput: an image without prediction, a prediction without image, or parts of different length.
    """
    if isinstance(predictions, Boxes):
        return predictions
    check_image_ids(predictions, image_ids)
    return joined([predictions[image_id] for image_id in image_ids], image_ids)


def joined(predictions: Sequence[Mapping], image_ids: Sequence) -> Boxes:
    """Join the predictions of each image, as above, to columns. Raises BadInput for parts of different length."""
    boxes = [_numpy(of_image["boxes"]).reshape(-1, 4) for of_image in predictions]
    scores, labels = ([_numpy(of_image[key]).reshape(-1) for of_image in predictions] for key in ("scores", "labels"))
    uneven = [
        f"prediction of image {image_id!r}: {len(b)} boxes, {len(s)} scores, {len(c)} labels; expected as many of each"
        for image_id, b, s, c in zip(image_ids, boxes, scores, labels, strict=True)
        if not len(b) == len(s) == len(c)
    ]
    if uneven:
        raise BadInput(uneven[:10])
    columns = Boxes.found(
        list(map(len, boxes)),
        np.concatenate([np.zeros((0, 4)), *boxes]),
        np.concatenate([np.zeros(0), *scores]),
        np.concatenate([np.zeros(0, np.int64), *labels]),
    )
    of_graph = np.array(["pairs" in of_image for of_image in predictions], bool)
    return columns[(columns.labels != -1) | ~of_graph[columns.image_index]] if of_graph.any() else columns


def check_image_ids(predictions: Mapping, image_ids: Sequence) -> None:
    """Check that images of the table and predictions have the same ids, else raise BadInput naming some."""
    expected = set(image_ids)
    missing = [i for i in image_ids if i not in predictions]
    unknown = [i for i in predictions if i not in expected]
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


def usable(predictions: Boxes, num_classes: int, image_ids: Sequence) -> Boxes:
    """Drop predictions that no metric can use: non-finite numbers and invalid labels. A warning reports them."""
    finite = np.isfinite(predictions.xyxy).all(axis=1) & np.isfinite(predictions.scores)
    labelled = (predictions.labels >= 0) & (predictions.labels < num_classes)
    faults = {"a box or score that is not finite": finite, f"a label outside 0..{num_classes - 1}": labelled}
    for what, kept in faults.items():
        if not kept.all():
            images = [image_ids[i] for i in np.unique(predictions.image_index[~kept])]
            log.warning("%d predictions have %s and are left out; images: %s", (~kept).sum(), what, _some(images))
    keep = finite & labelled
    return predictions if keep.all() else predictions[keep]


def _some(values: list) -> str:
    return ", ".join(repr(v) for v in values[:5]) + (", ..." if len(values) > 5 else "")


def _numpy(values) -> np.ndarray:
    return values.detach().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)
