"""Prediction on pictures of a data set, whole or in windows whose detections are joined, as an evaluation does it."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from toolkit.base.distributed import world
from toolkit.data.windows import WindowTable, windows_of_loader
from toolkit.evaluation.predict_dataset import Predictions, predict_dataset
from toolkit.models.joined_windows import best_of_classes, join_windows


def predict_pictures(
    detector: nn.Module, loader: DataLoader, device: torch.device | str, *, top_k: int = 100, **options
) -> Predictions:
    """Predict by `predict_dataset`, which has the same arguments; a collective.

    If the loader yields windows (its table is a `WindowTable`), `by_image` of the result has the joined detections of
    whole pictures by their image ids: `top_k` detections of a window count, and as many of each class in a picture.
    Losses and `image_ms` are those of windows.
    """
    windows = windows_of_loader(loader)
    units = "batches" if windows is None else "batches of windows"
    predictions = predict_dataset(detector, loader, device, top_k=top_k, units=units, **options)
    is_main = world()[0] == 0
    if windows is None or predictions.interrupted or not is_main:
        return predictions
    return predictions._replace(by_image=pictures_of_windows(predictions.by_image, windows, top_k))


def pictures_of_windows(
    by_window: Mapping[str, Mapping[str, Tensor]], windows: WindowTable, most_of_class: int
) -> dict[int | str, dict[str, Tensor]]:
    """Join detections by the image ids of windows to detections of pictures by theirs.

    most_of_class: number of detections of each class in a picture, the best ones, that are kept.
    """
    window_ids = windows.image_ids().tolist()
    image_ids = windows.pictures.image_ids().tolist()
    sizes_hw = windows.pictures.sizes_hw().tolist()
    tile_side = max(windows.tiling.tile_hw)
    first_window = np.searchsorted(windows.picture_of_window, np.arange(len(image_ids) + 1))
    by_image = {}
    for picture, image_id in enumerate(image_ids):
        own = slice(first_window[picture], first_window[picture + 1])
        parts = [by_window[window_id] for window_id in window_ids[own]]
        joined = join_windows(parts, windows.windows_xyxy[own], sizes_hw[picture], tile_side)
        by_image[image_id] = best_of_classes(joined, most_of_class)
    return by_image
