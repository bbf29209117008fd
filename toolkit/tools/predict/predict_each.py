"""The loop from images to detections with a `Predictor`, and where the images come from: files and data tables.

`toolkit.tools.predict.video` passes the frames of videos to the same loop. An evaluation of a run has a loop of its own
over batches of its loader, with losses and on several processes: `toolkit.evaluation.predict_dataset`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from toolkit.base.boxes import Boxes
from toolkit.base.errors import BadInput
from toolkit.base.masks import selected_masks
from toolkit.base.progress import ShownProgress
from toolkit.data.decoding import ImageError, ImageProbe, decode_image, probe_image
from toolkit.data.table import DetectionTable
from toolkit.evaluation.predictions import Detections, joined
from toolkit.tools.predict.predictor import Predictor

BATCH_SIZE = 8  # images


class Prediction(NamedTuple):
    """The prediction on an image.

    Attributes:
        key: the image's key, such as the path of its file.
        image: uint8 (3, H, W); None if it cannot be read.
        detections: the detections in the image; None if it cannot be read.
        error: why the image cannot be read; None if it can.
        notes: changes that decoding its file has made, such as dropped bands.
    """

    key: Any
    image: Tensor | None
    detections: Detections | None
    error: ImageError | None = None
    notes: tuple[str, ...] = ()


def predict_each(
    predictor: Predictor,
    keys: Iterable,
    read: Callable[[Any], Tensor],
    *,
    score_threshold: float,
    batch_size: int = BATCH_SIZE,
    given: Mapping[Any, Detections] | None = None,
) -> Iterator[Prediction]:
    """Yield the prediction on every image once, in the order of `keys`.

    `batch_size` images are read at a time, in threads, and passed to the predictor together, so that the memory does
    not depend on the number of images.

    Args:
        keys: a key for each image, such as the path of its file; they are read as they are needed, so they need not
            end.
        read: function from a key to the image, uint8 (3, H, W). An image for which it raises `ImageError` is yielded
            with the error, and the others are still predicted.
        score_threshold: only detections with a higher score are returned.
        given: `boxes` and `labels` by key, for a predictor that describes given boxes.
    """
    remaining = iter(keys)
    with ThreadPoolExecutor() as pool:
        while some := list(islice(remaining, batch_size)):
            samples = list(zip(some, pool.map(partial(_image_or_error, read), some), strict=True))
            readable = [(key, image) for key, image in samples if isinstance(image, Tensor)]
            boxes = [] if given is None else [[given[key] for key, _ in readable]]
            predictions = iter(())
            if readable:
                images = [image for _, image in readable]
                predictions = iter(predictor.predict(images, score_threshold, *boxes))
            for key, image in samples:
                if isinstance(image, Tensor):
                    yield Prediction(key, image, next(predictions))
                else:
                    yield Prediction(key, None, None, error=image)


def _image_or_error(read: Callable[[Any], Tensor], key: Any) -> Tensor | ImageError:
    try:
        return read(key)
    except ImageError as error:
        return error


# ---- image files -----------------------------------------------------------------------------------------------------


def predict_files(
    predictor: Predictor,
    paths: Sequence[Path],
    *,
    batch_size: int = BATCH_SIZE,
    score_threshold: float = 0.3,
    given: Mapping[Path, Detections] | None = None,
) -> Iterator[Prediction]:
    """Yield the prediction on every file once, ordered by image size and not as given; the keys are the paths.

    A file that cannot be read is yielded with an error, and the others are still predicted. For the other arguments see
    `predict_each`.
    """
    with ThreadPoolExecutor() as pool:
        probes = dict(zip(paths, pool.map(_probe, paths), strict=True))
    in_order = sorted(paths, key=lambda path: (probes[path].size_hw, path))
    read = partial(decode_image, white=predictor.white)
    how = {"score_threshold": score_threshold, "batch_size": batch_size, "given": given}
    for prediction in predict_each(predictor, in_order, read, **how):
        yield prediction._replace(notes=probes[prediction.key].notes)


def _probe(path: Path) -> ImageProbe:
    try:
        return probe_image(path)
    except ImageError:
        return ImageProbe((0, 0), (), "")  # decoding reports the reason


# ---- the images of a data table --------------------------------------------------------------------------------------


def predict_table(predictor: Predictor, table: DetectionTable) -> Boxes:
    """Predict on all images of a data table, and return the predictions with the labels of the table.

    The best `predictor.max_detections` of an image are kept.

    Raises:
        BadInput: the table has classes that the predictor does not know, or an image cannot be read.
    """
    labels = labels_in(table, predictor.class_names, predictor.source)
    most = predictor.max_detections
    predictions = [relabelled(detections, labels, most) for detections in predict_images(predictor, table)]
    return joined(predictions, table.image_ids().tolist())


def predict_images(predictor: Predictor, table: DetectionTable) -> Iterator[Detections]:
    """Yield the detections in each image of a data table, with scores above 0 and the predictor's labels; for a scene
    graph model with relations.

    Raises:
        BadInput: an image cannot be read.
    """
    rows = map(table.row, range(len(table)))
    progress = ShownProgress(f"evaluation of {predictor.source}", len(table), "images")
    with progress:
        for prediction in predict_each(predictor, rows, table.decode_image, score_threshold=0.0):
            if prediction.error is not None:
                raise BadInput(f"{table.name}: {prediction.error}") from prediction.error
            yield prediction.detections
            progress.add()


def labels_in(table: DetectionTable, names: Sequence[str], source: str) -> Tensor:
    """Return (classes,) int64: the label in a data table for each class of a model, matched by name; -1 if the table
    does not have the class.

    Args:
        names: names of the model's classes in the order of its labels.
        source: name of the model, for messages.

    Raises:
        BadInput: the table has a class that the model does not know.
    """
    position = {name: label for label, name in enumerate(table.class_names)}
    missing = [name for name in table.class_names if name not in names]
    if missing:
        raise BadInput(f"{source} does not know the classes {missing[:5]} of {table.name}; its own are {names[:5]}")
    return torch.tensor([position.get(name, -1) for name in names], dtype=torch.int64)


def relabelled(detections: Mapping, labels: Tensor, max_detections: int | None) -> Detections:
    """Return the detections of an image with the labels of a data table.

    Detections of classes that the table does not have are left out; of the others the best `max_detections` are kept,
    or all if it is None.

    labels: result of `labels_in`.
    """
    table_labels = labels[torch.as_tensor(detections["labels"]).long()]
    keep = (table_labels >= 0).nonzero().flatten()[:max_detections]
    result = {
        "boxes": torch.as_tensor(detections["boxes"])[keep],
        "scores": torch.as_tensor(detections["scores"])[keep],
        "labels": table_labels[keep],
    }
    if "masks" in detections:
        result["masks"] = selected_masks(detections["masks"], keep)
    return result
