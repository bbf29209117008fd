"""Prediction with a detector over a whole data set on one or more ranks, and the validation loss."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import length_hint
from typing import NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from toolkit.base.batch import Batch, dicts_to_host, on_host
from toolkit.base.distributed import agree_max, gather_by_image, gather_objects, stack_scalars, world
from toolkit.base.masks import Rle, rles_of
from toolkit.base.memory import EVALUATION_NEEDS_LESS, naming_the_batch
from toolkit.base.progress import ShownProgress
from toolkit.data.tile_table import TileTable, tiles_of_loader
from toolkit.models.joined_tiles import join_tiles
from toolkit.step.execution import in_float32
from toolkit.step.freezing import eval_mode

ALWAYS_FITS_BYTES = 10**9  # bytes
TENSOR_BYTES = 500  # of a tensor beside its values
MASK_BYTES = 200  # of a mask beside its run lengths
PASTED_BYTES = 2**26  # of masks as pixels of a picture, at a time


class Predictions(NamedTuple):
    """Results of one pass over a dataset, the same on every rank except `by_image`, which only rank 0 has.

    by_image: image id -> `boxes (K, 4)` float32 xyxy in original pixels, `scores (K,)`, `labels (K,)` int64 of K
        detections, on CPU, and other entries that the detector's `to_keep` keeps; of a detector of masks also `masks`,
        a list of K `Rle` in the original picture. If the table of the loader is a `TileTable`, these are the joined
        detections of whole pictures by their image ids: `top_k` detections of a tile count, and as many of each class
        in a picture; `losses` and `image_ms` are those of tiles.
    losses: `loss`, `<loss name>` (weighted), `<loss name>_unscaled` and the detector's metrics, over the whole dataset;
        empty without loss weights.
    image_ms: milliseconds per image on this rank, from pixels on the device to detections on the host, without the loss
        and the reading of files; the median of the batches; NaN without images.
    interrupted: 0; or, if `stop` ended the evaluation, the largest number that it returned on any rank: then `by_image`
        and `losses` are empty.
    """

    by_image: dict
    losses: dict[str, float]
    interrupted: int
    image_ms: float = math.nan


@torch.no_grad()  # not inference_mode: tensors cached in it (anchors, position codes) cannot be used in training
def predict_dataset(
    detector: nn.Module,
    loader,
    device: torch.device | str,
    *,
    loss_weights: nn.Module | None = None,
    step: int = 0,
    stop: Callable[[], int] = int,
    score_threshold: float = 0.0,
    top_k: int = 100,
    description: str = "evaluation",
    say: Callable[[str], object] | None = None,
) -> Predictions:
    """Run a detector over a dataset, in float32 whatever its training precision is; a collective.

    Args:
        detector: unwrapped, because the forward of DistributedDataParallel is a collective, which ranks with an empty
            batch do not call; for EMA weights the EMA module itself.
        loader: batches of an `EvalSampler`: the same number on every rank, some possibly without images.
        loss_weights: `LossWeights`; None leaves the validation loss out.
        step: optimizer step, for weights on a schedule.
        stop: called after each batch; a number above 0 on any rank ends the evaluation on all ranks.
        score_threshold, top_k: the lowest score, and the largest number of detections of an image, for `postprocess` of
            the detector.
        description: of the progress bar and the warning.
        say: called after the first batch with a warning, if the predictions will need much memory, see `memory_needed`.

    Raises:
        BadInput: memory runs out; the message names the batch.

    Returns:
        `Predictions`. The losses are sums over the dataset divided by denominators of the dataset, so that they depend
        neither on batch size nor on the number of ranks. Terms that exist in training only (denoising) are left out.
    """
    tiles = tiles_of_loader(loader)
    units = "batches" if tiles is None else "batches of tiles"
    rank, ranks = world()
    kept = deque()  # pairs of an image id and what is kept of its detections
    sums = None if loss_weights is None else LossSums(detector)
    times_ms = []
    progress = ShownProgress(description, length_hint(loader) or None, units, is_shown=rank == 0)
    with eval_mode(detector), in_float32(detector, device), progress:
        for batch in loader:
            if len(batch.targets):
                is_first = not kept
                with naming_the_batch(lambda under_way=batch: [under_way], EVALUATION_NEEDS_LESS):
                    of_batch, batch_ms = _predict_batch(detector, batch, device, sums, score_threshold, top_k)
                kept += of_batch
                times_ms.append(batch_ms / len(batch.targets))
                if is_first and say is not None:
                    _warn_of_memory(say, description, kept, len(loader) * len(batch.targets) * ranks)
            progress.add()
            interrupted = agree_max(stop())
            if interrupted:
                return Predictions({}, {}, interrupted)
    losses = {} if sums is None else _weighted(sums.over_all_ranks(), loss_weights, step)
    by_image = gather_by_image(kept.popleft() for _ in range(len(kept)))  # no prediction is held twice
    if tiles is not None and rank == 0:
        by_image = pictures_of_tiles(by_image, tiles, top_k)
    return Predictions(by_image, losses, 0, statistics.median(times_ms) if times_ms else math.nan)


def _predict_batch(
    detector: nn.Module,
    batch: Batch,
    device: torch.device | str,
    sums: "LossSums | None",
    score_threshold: float,
    top_k: int,
) -> tuple[list[tuple[int | str, dict]], float]:
    """Return (image id, what an evaluation keeps of its detections) of each image, and the milliseconds of the batch
    without its losses, which are added to `sums`."""
    moved = batch.to(device, non_blocking=True)
    began = time.perf_counter()
    # Some models return the outputs for their loss only with targets.
    given = None if sums is None else moved.targets
    outputs = detector(moved.images, moved.sizes, given)
    detections = detections_of(detector, outputs, moved, score_threshold, top_k)
    kept = [dict(detector.to_keep(each)) for each in detections]
    batch_ms = 1e3 * (time.perf_counter() - began)
    if sums is not None:
        sums.add(outputs, moved.targets, detector.denominators(batch.targets))
    image_ids = [target["image_id"] for target in batch.targets]
    return list(zip(image_ids, kept, strict=True)), batch_ms


def detections_of(
    detector: nn.Module, outputs: Mapping, batch: Batch, score_threshold: float, top_k: int
) -> list[dict[str, Tensor | list[Rle]]]:
    """Return the detections of `postprocess` in each image of a batch, on the host, with masks as run lengths.

    Args:
        outputs: of the detector for this batch.
        batch: on the device of the detector; its targets have `orig_size`, to which the detections refer.
        score_threshold, top_k: see `toolkit.models.detector.Detector.postprocess`.
    """
    orig_sizes = torch.stack([target["orig_size"] for target in batch.targets])
    detections = dicts_to_host(detector.postprocess(outputs, batch.sizes, orig_sizes, score_threshold, top_k))
    for of_image, target in zip(detections, batch.targets, strict=True):
        if "masks" in of_image:
            size_hw = tuple(on_host(target)["orig_size"].tolist())
            of_image["masks"] = run_lengths(detector, of_image, size_hw)
    return detections


def run_lengths(detector: nn.Module, detections: Mapping[str, Tensor], size_hw: tuple[int, int]) -> list[Rle]:
    """Return the masks of K detections in their picture as run lengths.

    The pixels of some detections at a time are held, since those of all can be gigabytes.

    Args:
        detector: its `paste_masks` is called.
        detections: `masks (K, h, w)` as the detector predicts them, and `boxes (K, 4)` xyxy in pixels of the picture.
        size_hw: height and width of the picture.
    """
    height, width = size_hw
    at_once = max(1, PASTED_BYTES // (height * width))
    found = []
    for first in range(0, len(detections["masks"]), at_once):
        some = slice(first, first + at_once)
        pixels = detector.paste_masks(detections["masks"][some], detections["boxes"][some], size_hw)
        found += rles_of(pixels)
    return found


def pictures_of_tiles(
    by_tile: Mapping[str, Mapping[str, Tensor]], tiles: TileTable, most_of_class: int
) -> dict[int | str, dict[str, Tensor]]:
    """Join detections by the image ids of tiles to detections of pictures by theirs.

    most_of_class: number of detections of each class in a picture, the best ones, that are kept.
    """
    tile_ids = tiles.image_ids().tolist()
    image_ids = tiles.pictures.image_ids().tolist()
    sizes_hw = tiles.pictures.sizes_hw().tolist()
    tile_side = max(tiles.tiling.tile_hw)
    first_tile = np.searchsorted(tiles.picture_of_tile, np.arange(len(image_ids) + 1))
    by_image = {}
    for picture, image_id in enumerate(image_ids):
        own = slice(first_tile[picture], first_tile[picture + 1])
        parts = [by_tile[tile_id] for tile_id in tile_ids[own]]
        by_image[image_id] = join_tiles(
            parts, tiles.tiles_xyxy[own], sizes_hw[picture], tile_side, most_of_class=most_of_class
        )
    return by_image


def _warn_of_memory(say: Callable[[str], object], description: str, items: Sequence, images: int) -> None:
    warning = memory_needed(items, images)
    if warning:
        say(f"{description}: {warning}")


def memory_needed(items: Sequence[tuple[int | str, Mapping]], images: int) -> str:
    """Return a warning about the memory that the predictions for `images` images will need in the main process.

    The memory is estimated from the predictions `items`, (image id, prediction) pairs. The result is "" if the memory
    is below `ALWAYS_FITS_BYTES` and a quarter of the free memory.
    """
    of_items = 0  # bytes
    for _, prediction in items:
        for value in prediction.values():
            if isinstance(value, Tensor):
                of_items += TENSOR_BYTES + value.numel() * value.element_size()
            elif isinstance(value, list):  # of `Rle`
                of_items += sum(MASK_BYTES + len(mask.counts) for mask in value)
    needed = images / len(items) * of_items
    free = psutil.virtual_memory().available
    if needed < min(ALWAYS_FITS_BYTES, free / 4):
        return ""
    memory = f"{needed / 1e9:.1f} GB of the main process, where {free / 1e9:.1f} GB are free"
    if needed > free / 2:
        memory += "; raise eval.score_threshold, or evaluate fewer images"
    return f"the predictions of up to {images:,} images will take about {memory}"


class LossSums:
    """Sums of losses and metrics over batches, divided at the end by the denominators of the whole dataset.

    The criterion of a detector divides each loss by one of the detector's denominators. Here it is called with
    denominators of 1, so that it returns sums.
    """

    def __init__(self, detector: nn.Module):
        self.detector = detector
        self.ones = dict.fromkeys(detector.denominator_names, 1.0)
        self.sums: dict[tuple, Tensor] = {}  # by names of losses and metrics: a value for each
        self.denominators = dict.fromkeys(self.ones, 0.0)

    def add(self, outputs, targets: list[dict], denominators: Mapping[str, float]) -> None:
        """Add one batch: outputs of the detector, its targets on the device, its raw denominators."""
        losses, metrics = self.detector.criterion(outputs, targets, self.ones)
        values = list(losses.values())
        for total, count in metrics.values():
            values += [total, count]
        if values:
            names = tuple(losses), tuple(metrics)
            self.sums[names] = self.sums.get(names, 0.0) + stack_scalars(values)
        for name, value in denominators.items():
            self.denominators[name] += float(value)

    def over_all_ranks(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return (losses, metrics) of the whole dataset by name, from all ranks; a collective."""
        numbers = []
        if self.sums:
            numbers = torch.cat([*self.sums.values()]).tolist()  # one host read for all
        values = iter(numbers)
        sums = {}
        metrics = {}
        counts = {}
        for loss_names, metric_names in self.sums:
            for name in loss_names:
                sums[name] = sums.get(name, 0.0) + next(values)
            for name in metric_names:
                metrics[name] = metrics.get(name, 0.0) + next(values)
                counts[name] = counts.get(name, 0.0) + next(values)
        of_ranks = gather_objects((sums, metrics, counts, self.denominators))
        sums, metrics, counts, denominators = map(_added, zip(*of_ranks, strict=True))
        divided_by = self.detector.divided_by
        losses = {}
        for name, value in sums.items():
            denominator = divided_by if isinstance(divided_by, str) else divided_by[name]
            losses[name] = value / max(denominators[denominator], 1e-12)
        means = {name: metrics[name] / count for name, count in counts.items() if count}
        return losses, means


def _added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _weighted(parts: tuple[dict[str, float], dict[str, float]], loss_weights: nn.Module, step: int) -> dict[str, float]:
    losses, metrics = parts
    if not losses:  # a dataset without images
        return metrics
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in losses.items()}
    weighted = loss_weights(tensors, step, micro_batches=1)  # also in a training that accumulates, as in `evaluate.py`
    numbers = {"loss": float(weighted.total)}
    for name, value in weighted.weighted.items():
        if name in losses:
            numbers[name] = float(value)
    for name, value in losses.items():
        numbers[f"{name}_unscaled"] = value
    return {**numbers, **metrics}
