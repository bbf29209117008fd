"""What a predictor finds in a whole data set, and what that is worth: for detectors of every kind of source."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor
from tqdm import tqdm

from toolkit.data.decoding import ImageError, decode_image
from toolkit.data.table import DetectionTable
from toolkit.errors import BadInput
from toolkit.use.prediction import Found, Predictor

TOP_K = 100  # detections of an image, as in the evaluations of a run


def predict_table(
    predictor: Predictor,
    table: DetectionTable,
    *,
    batch_size: int = 4,
    score_threshold: float = 0.0,
    top_k: int = TOP_K,
) -> dict[int | str, Found]:
    """Predictions by image id, as evaluators take them (`CocoEvaluator.evaluate`).

    Args:
        table: with the predictor's classes in the same order.
        top_k: the best so many of each image.

    Raises:
        BadInput: other classes than the predictor's, or an image that cannot be read.
    """
    if list(table.class_names) != list(predictor.class_names):
        raise BadInput(f"the data has classes {list(table.class_names)}, {predictor.source} {predictor.class_names}")
    by_image = {}
    with tqdm(total=len(table), desc=f"evaluation of {predictor.source}", delay=2, leave=False, disable=None) as bar:
        for ids, images in _batches(table, batch_size):
            for image_id, found in zip(ids, predictor.predict(images, score_threshold), strict=True):
                by_image[image_id] = {key: value[:top_k] for key, value in found.items()}
            bar.update(len(ids))
    return by_image


def _batches(table: DetectionTable, batch_size: int) -> Iterator[tuple[list, list[Tensor]]]:
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(table), batch_size):
            rows = [table.row(i) for i in range(start, min(start + batch_size, len(table)))]
            try:
                images = list(pool.map(decode_image, map(table.image_source, rows)))
            except ImageError as error:
                raise BadInput(f"{table.name}: {error}") from error
            yield [row["image_id"] for row in rows], images
