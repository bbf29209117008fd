"""Draws pictures of a data set: samples of each class, and positions, sizes and aspect ratios of boxes."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from toolkit.base.batch import Batch
from toolkit.base.boxes import Boxes
from toolkit.data.dataset import row_target
from toolkit.data.table import DetectionTable
from toolkit.evaluation.draw import fitted, montage, picture_with_boxes, save_picture
from toolkit.tools.doctor.tile_advice import inputs_hw, words_of

NUM_SAMPLES = 9
TILE_SIDE_PX = 320
MAX_BOXES = 200_000
LABEL_WIDTH = 0.09  # of the label of a tick, as a share of the axis
TICKS = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))  # in each decade; the first fit is used


def draw_data(tables: Mapping[str, DetectionTable], size: Mapping[str, int], folder: Path) -> list[Path]:
    """Write `samples_<label>_<class>.jpg`, `positions.png`, `sizes.png` and `aspect_ratios.png` to a folder, and return
    the files.

    Args:
        tables: the data tables by the name of the split; samples are drawn from the first one.
        size: what images are resized to for the network, as `toolkit.data.pipeline.processor_size`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = next(iter(tables.values()))
    truth = first.boxes()
    files = []
    for label, category in enumerate(first.categories):
        rows = _with_class(truth, label)
        if rows:
            name = re.sub(r"[^\w-]+", "_", category.name)[:60]
            tiles = [_tile(first, index, label) for index in rows]
            files.append(_grid(tiles, folder / f"samples_{label:03d}_{name}.jpg"))
    boxes = {split: _boxes(table) for split, table in tables.items()}
    files.append(_positions(np.concatenate(list(boxes.values())), folder / "positions.png"))
    for name, unit, of in (
        (
            "sizes",
            f"box size (√area) in px when images are resized to {words_of(size)} (--image-size)",
            lambda b: np.sqrt(b[:, 2] * b[:, 3] * inputs_hw(b[:, [5, 4]], size).prod(axis=1)),
        ),
        ("aspect_ratios", "width / height", lambda b: b[:, 2] / b[:, 3] * b[:, 4] / b[:, 5]),
    ):
        values = {split: of(split_boxes) for split, split_boxes in boxes.items()}
        files.append(_histogram(values, unit, folder / f"{name}.png"))
    return files


def draw_batch(batch: Batch, class_names: list[str], file: Path) -> Path:
    """Draw the images (uint8) of a training batch with their boxes in a grid, as the model gets them, to a file, and
    return the file."""
    tiles = []
    for image, (height, width), target in zip(batch.images, batch.sizes.tolist(), batch.targets, strict=True):
        tiles.append(picture_with_boxes(image[:, :height, :width], target, class_names, TILE_SIDE_PX))
    return _grid(tiles, file)


def _with_class(truth: Boxes, label: int) -> list[int]:
    has = np.isin(np.arange(truth.num_images), truth.image_index[truth.labels == label])
    order = np.random.default_rng(0).permutation(truth.num_images)[:20_000]
    return order[has[order]][:NUM_SAMPLES].tolist()


def _tile(table: DetectionTable, index: int, label: int) -> Image.Image:
    row = table.row(index)
    image = table.decode_image(row)
    target = row_target(row, tuple(image.shape[-2:]))
    keep = target["labels"] == label
    objects = {name: target[name][keep] for name in ("boxes", "labels", "iscrowd")}
    if table.has_masks:
        objects["masks"] = [shape for shape, is_kept in zip(row["masks"], keep.tolist(), strict=True) if is_kept]
    return picture_with_boxes(image, objects, table.class_names, TILE_SIDE_PX)


def _grid(tiles: list[Image.Image], file: Path) -> Path:
    small = [fitted(tile, TILE_SIDE_PX - 4) for tile in tiles]
    return save_picture(montage(small, math.ceil(math.sqrt(len(small))), gap=4), file)


def _boxes(table: DetectionTable) -> np.ndarray:
    """Return (N, 6): centre x, y, width and height in fractions of the image, and the image's width and height in
    pixels."""
    truth = table.boxes()
    size = table.sizes_hw()[truth.image_index, ::-1]
    low = truth.xyxy[:, :2]
    high = truth.xyxy[:, 2:]
    return np.concatenate([(low + high) / 2 / size, (high - low) / size, size], axis=1)[:MAX_BOXES]


def _positions(boxes: np.ndarray, file: Path) -> Path:
    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    counts, _, _ = np.histogram2d(
        boxes[:, 1],
        boxes[:, 0],
        bins=32,
        range=[[0, 1], [0, 1]],
    )
    shown = axes.imshow(
        counts,
        extent=(0, 1, 1, 0),
        cmap="viridis",
        aspect="auto",
    )
    figure.colorbar(shown, label="boxes with their centre here", ticks=MaxNLocator(integer=True))
    axes.set(xlabel="x, fraction of the width", ylabel="y, fraction of the height")
    figure.savefig(file, dpi=120)
    return file


def _histogram(values: Mapping[str, np.ndarray], label: str, file: Path) -> Path:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    every = np.concatenate(list(values.values()))
    low, high = (every[every > 0].min(), every.max()) if (every > 0).any() else (0.1, 1)
    for split, split_values in values.items():
        axes.hist(
            split_values,
            bins=np.geomspace(low, high * 1.001, 40),
            histtype="step",
            density=True,
            label=split,
        )
    axes.set(xlabel=label, ylabel="density of boxes", xscale="log")
    ticks = ticks_of(*axes.get_xlim())
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)  # matplotlib would write 2 x 10^2, 3 x 10^2, ... over each other
    axes.legend()
    figure.savefig(file, dpi=120)
    return file


def ticks_of(low: float, high: float) -> list[float]:
    """Return round numbers between `low` and `high`, both above 0, as ticks of a logarithmic axis with room for labels.
    """
    decades = 10.0 ** np.arange(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    apart = (high / low) ** LABEL_WIDTH
    for steps in TICKS:
        numbers = [float(f"{tick:.3g}") for tick in np.outer(decades, steps).ravel()]
        ticks = [number for number in numbers if low <= number <= high]
        ratios = [after / before for before, after in zip(ticks, ticks[1:], strict=False)]
        if len(ticks) >= 3 and min(ratios) >= apart:
            return ticks
    return sorted({float(f"{tick:.3g}") for tick in np.geomspace(low, high, 5)[1:-1]})
