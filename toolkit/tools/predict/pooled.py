"""Pools the predictions of a cross-validation: each image is predicted by the run that did not train on it."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from toolkit.base.boxes import Boxes
from toolkit.base.errors import BadInput
from toolkit.data.splits import Fold, open_split, share_of
from toolkit.tools.predict.predict_split import Predicted


def pool_folds(parts: Sequence[Predicted], say: Callable[[str], None]) -> Predicted:
    """Join the predictions of several runs, each on its fold of the training data, into predictions on all of the data.

    Args:
        parts: the predictions on each fold, as `open_any` returns them, in any order.
        say: called with messages of the reader when the whole data are opened.

    Raises:
        BadInput: the parts are not the folds of one data set, a fold is missing or given twice, or the predictions are
            scene graphs.
    """
    names = [str(part.about["detector"]) for part in parts]
    folds = [share_of(part.about["data"]["source"]) for part in parts]
    strangers = [name for name, fold in zip(names, folds, strict=True) if not isinstance(fold, Fold)]
    if strangers:
        raise BadInput(f"{name}: not judged on a fold of its training data (--data.val 1/5)" for name in strangers)
    wholes = [{key: value for key, value in part.about["data"].items() if key != "source"} for part in parts]
    if len({fold.of for fold in folds}) > 1 or any(whole != wholes[0] for whole in wholes):
        raise BadInput(f"{', '.join(names)}: folds of different data; give the runs of one cross-validation")
    counts = Counter(fold.number for fold in folds)
    wrong = [number for number in range(1, folds[0].of + 1) if counts[number] != 1]
    if wrong:
        several = ", ".join(f"fold {number} is given {counts[number]} times" for number in wrong)
        raise BadInput(f"{several}; expected each of the {folds[0].of} folds once")
    if any("pairs" in prediction for part in parts for prediction in _by_image(part).values()):
        raise BadInput("scene graphs are not pooled; evaluate each run by itself")
    data = wholes[0] | {"source": wholes[0]["part_of"]}
    del data["part_of"]
    table = open_split(**data, say=say)
    by_image = {}
    for part in parts:
        by_image |= _by_image(part)
    return Predicted(table, by_image, {"detector": " + ".join(names), "data": data})


def _by_image(part: Predicted) -> dict[int | str, dict[str, np.ndarray | list]]:
    boxes = part.predictions
    if not isinstance(boxes, Boxes):
        return boxes
    columns = []
    for index in range(boxes.num_images):
        row = boxes.of_image(index)
        of_image = {"boxes": boxes.xyxy[row], "scores": boxes.scores[row], "labels": boxes.labels[row]}
        if "masks" in boxes.extra:
            of_image["masks"] = boxes.extra["masks"][row].tolist()
        columns.append(of_image)
    return dict(zip(part.table.image_ids().tolist(), columns, strict=True))
