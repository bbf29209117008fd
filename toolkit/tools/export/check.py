"""Verifies that exported files compute the same outputs as PyTorch, and measures their speed."""

import statistics
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from toolkit.tools.export.exported_files import open_exported

# Largest differences due to rounding: of a score, and of a corner in units of the image's longer side.
SCORE_TOLERANCE, BOX_TOLERANCE = 1e-4, 1e-4
MASK_TOLERANCE = 1e-3  # of the probability of a cell
MIN_MATCHED_SHARE = 0.98  # share of the detections that must be found again; among equal scores, others may be kept
BATCH_SIZES = (1, 2, 5)


@dataclass
class OutputDifference:
    """The difference between two sets of detections on the same images.

    Attributes:
        matched: share of the detections in the first set that the second set has too.
        score, box: largest differences of a score and of a box coordinate among these detections; the coordinate in
            units of the image's longer side.
        mask: largest difference of a mask's probability among these detections; None: there are no masks.
    """

    matched: float
    score: float
    box: float
    mask: float | None = None

    def __str__(self) -> str:
        masks = "" if self.mask is None else f"masks {self.mask:.1e}, "
        boxes = f"boxes {self.box:.1e} of the image's side"
        return f"scores {self.score:.1e}, {boxes}, {masks}{self.matched:.1%} found again"

    @property
    def is_rounding(self) -> bool:
        """Whether at least `MIN_MATCHED_SHARE` of the detections match, so that the rest may be rounding."""
        return self.matched >= MIN_MATCHED_SHARE


def check_against_pytorch(graph: nn.Module, path: Path, images: Tensor) -> OutputDifference:
    """Compare an exported file with PyTorch on some images, and return the difference of the detections.

    Args:
        graph: the exported function in PyTorch, see `toolkit.tools.export.graph.PixelsToBoxes`.
        path: the exported file.
        images: uint8 (B, 3, H, W).

    Raises RuntimeError if less than `MIN_MATCHED_SHARE` of the detections agree up to rounding.
    """
    with torch.no_grad():
        expected = graph(images)
    outputs = open_exported(path, trusted=True)[0](images.numpy())
    apart = compare_outputs(
        expected,
        [torch.from_numpy(output) for output in outputs],
        max(images.shape[-2:]),
    )
    if not apart.is_rounding:
        raise RuntimeError(f"{path} does not compute what PyTorch does; {apart}")
    return apart


def compare_outputs(expected, outputs, side: int) -> OutputDifference:
    """Compare two sets of detections on the same images.

    Detections are matched, because equal scores come in any order: two match if their labels are equal, their scores
    differ by at most `SCORE_TOLERANCE`, their boxes by at most `BOX_TOLERANCE`, and their masks by at most
    `MASK_TOLERANCE`.

    Args:
        expected, outputs: boxes (B, K, 4), scores (B, K), labels (B, K) and perhaps masks (B, K, h, w) of each set, for
            K rows per image.
        side: longer side of the images in pixels.
    """
    boxes, scores, labels, *masks = expected
    unit = boxes.abs().amax(-1).clamp(min=side)  # a box far outside is compared in its own size
    other_boxes, other_scores, other_labels, *other_masks = outputs
    apart = (boxes[:, :, None] - other_boxes[:, None]).abs().amax(-1) / unit[..., None]  # (B, K, K)
    of_score = (scores[:, :, None] - other_scores[:, None]).abs()
    same_label = labels[:, :, None] == other_labels[:, None]
    near = same_label & (of_score <= SCORE_TOLERANCE) & (apart <= BOX_TOLERANCE)
    nearest = (apart + of_score).masked_fill(~near, torch.inf).min(dim=2)
    real = scores > 0
    matched = real & nearest.values.isfinite()
    of_mask = None
    if masks:
        index = nearest.indices[..., None, None].expand(-1, -1, *masks[0].shape[2:])
        by_mask = (masks[0] - other_masks[0].gather(1, index)).abs().amax((2, 3))  # (B, K)
        matched &= by_mask <= MASK_TOLERANCE
        of_mask = by_mask[matched].max().item() if matched.any() else 0.0
    if not matched.any():
        return OutputDifference(float(not real.any()), 0.0, 0.0)
    partner = nearest.indices[..., None]
    apart = apart.gather(2, partner)[..., 0][matched]
    of_score = of_score.gather(2, partner)[..., 0][matched]
    return OutputDifference(
        (matched.sum() / real.sum()).item(),
        of_score.max().item(),
        apart.max().item(),
        of_mask,
    )


def batches_agree(graph: nn.Module, path: Path, images: Tensor) -> dict[int, OutputDifference]:
    """Call `check_against_pytorch` for batches of each size in `BATCH_SIZES`, made of the given images, which are
    repeated if necessary; return the difference by batch size."""
    rows = {size: torch.arange(size) % len(images) for size in BATCH_SIZES}
    return {size: check_against_pytorch(graph, path, images[index].contiguous()) for size, index in rows.items()}


def milliseconds(open_runner: Callable, images: np.ndarray, cases: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Return the milliseconds per image, the median of seven runs, by the description of the case.

    Args:
        open_runner: function that makes the runner of the model, see `toolkit.tools.export.exported_files`; the runner
            uses as many threads as PyTorch has at that time.
        images: uint8 (N, 3, H, W).
        cases: pairs of batch size and number of threads.
    """
    threads = torch.get_num_threads()
    found = {}
    try:
        for batch, count in cases:
            torch.set_num_threads(count)
            run = open_runner()
            some = images[np.arange(batch) % len(images)]
            run(some)
            seconds = statistics.median(
                timeit.repeat(
                    lambda run=run, some=some: run(some),
                    number=1,
                    repeat=7,
                )
            )
            found[f"batch {batch}, {count} thread{'s' * (count > 1)}"] = 1e3 * seconds / batch
    finally:
        torch.set_num_threads(threads)
    return found
