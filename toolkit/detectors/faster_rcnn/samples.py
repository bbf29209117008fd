"""Training samples of the two stages for a whole batch at once: candidates, their matches, and random sampling.

The number of boxes of each image is known on the host, so padding and cutting need not wait for the device.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.models.detection._utils import encode_boxes

from toolkit.base.batch import is_waited_for, on_host, send_dicts
from toolkit.detectors.faster_rcnn.criterion import IGNORED, match_candidates, sample, shares

Draw = Callable[[Sequence[int]], Tensor]  # lengths -> (their sum,) random numbers in [0, 1), of each image in a row
PAIRS_PER_CHUNK = 2**26  # boxes compared with candidates on a device, 256 MB of float32; on a CPU image by image


class Truths(NamedTuple):
    """Annotated boxes of B images, padded to the largest number T of boxes in an image, at least 1.

    boxes: (B, T, 4) xyxy pixels. labels: (B, T), class + 1. is_padding: (B, T) bool. is_crowd: (B, T) bool, or None if
    the batch has no crowd regions. counts: number of boxes of each image, on the host.
    """

    boxes: Tensor
    labels: Tensor
    is_padding: Tensor
    is_crowd: Tensor | None
    counts: list[int]


class Sampler(NamedTuple):
    """The settings by which a stage matches and samples its candidates.

    high, low, lowest, crowd_overlap: see `match_candidates`. size, positive_fraction: see `sample`. delta_weights:
    factors on the four regression targets.
    """

    high: float
    low: float
    size: int
    positive_fraction: float
    crowd_overlap: float
    lowest: float
    delta_weights: Sequence[float]

    @classmethod
    def of(cls, stage: torch.nn.Module, crowd_overlap: float, lowest: float = 0.0) -> "Sampler":
        """Return the settings of a stage, torchvision's RPN or RoIHeads. The last two arguments are settings that
        torchvision's modules do not have."""
        matcher = stage.proposal_matcher
        sampler = stage.fg_bg_sampler
        return cls(
            high=matcher.high_threshold,
            low=matcher.low_threshold,
            size=sampler.batch_size_per_image,
            positive_fraction=sampler.positive_fraction,
            crowd_overlap=crowd_overlap,
            lowest=lowest,
            delta_weights=stage.box_coder.weights,
        )


def padded_truths(targets: Sequence[Mapping[str, Tensor]]) -> Truths:
    """Convert the targets of a batch, whose tensors are on one device, to padded `Truths`."""
    counts = [len(target["boxes"]) for target in targets]
    total = sum(counts)  # the row of what stands for padding
    index = padded_rows(list(zip(_starts(counts), counts, strict=True)), total)
    columns = {"index": index, "is_padding": index == total}
    crowd = [on_host(target)["iscrowd"].bool().cpu() for target in targets]
    if any(flags.any() for flags in crowd):
        crowd.append(torch.zeros(1, dtype=torch.bool))
        columns["is_crowd"] = torch.cat(crowd)[index]
    (columns,) = send_dicts([columns], targets[0]["boxes"].device)
    boxes = torch.cat([target["boxes"] for target in targets])
    boxes = torch.cat([boxes, boxes.new_zeros(1, 4)])
    labels = torch.cat([target["labels"] for target in targets])
    labels = torch.cat([labels + 1, labels.new_zeros(1)])
    return Truths(
        boxes=boxes[columns["index"]],
        labels=labels[columns["index"]],
        is_padding=columns["is_padding"],
        is_crowd=columns.get("is_crowd"),
        counts=counts,
    )


def match_batch(candidates_xyxy: Tensor, truths: Truths, thresholds: Sampler, best_of_each_box: bool) -> Tensor:
    """Return the matches (B, A) of `match_candidates` for each image of a batch.

    candidates_xyxy: (A, 4) if all images have the same A candidates, else (B, A, 4).
    """
    at_once = 1
    images = len(truths.counts)
    matches = []
    if is_waited_for(candidates_xyxy.device):
        pairs_of_image = candidates_xyxy.shape[-2] * max(truths.counts, default=0)
        at_once = max(1, PAIRS_PER_CHUNK // max(1, pairs_of_image))
    for first in range(0, images, at_once):
        part = slice(first, first + at_once)
        widest = max(truths.counts[part])
        candidates = candidates_xyxy if candidates_xyxy.dim() == 2 else candidates_xyxy[part]
        crowd = None if truths.is_crowd is None else truths.is_crowd[part, :widest]
        match = match_candidates(
            candidates,
            truths.boxes[part, :widest],
            crowd,
            thresholds.high,
            thresholds.low,
            best_of_each_box=best_of_each_box,
            crowd_overlap=thresholds.crowd_overlap,
            lowest=thresholds.lowest,
            padding=truths.is_padding[part, :widest],
        )
        matches.append(match)
    return torch.cat(matches)


def sampled_anchors(
    anchors_xyxy: Tensor,
    truths: Truths,
    settings: Sampler,
    draw: Draw,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sample K of the A anchors (A, 4) for each image; return their rows (B, K), and a dict of their `match`, `weights`
    (B, K) and `targets` (B, K, 4)."""
    images = len(truths.counts)
    match = match_batch(anchors_xyxy, truths, settings, best_of_each_box=True)
    keys = draw([len(anchors_xyxy)] * images).view(match.shape)
    index, match = sample(match, settings.size, settings.positive_fraction, keys)
    deltas = box_targets(anchors_xyxy[index], match, truths, settings.delta_weights)
    return index, {"match": match, "targets": deltas, "weights": shares(match)}


def sampled_boxes(
    proposals: Sequence[Tensor],
    truths: Truths,
    settings: Sampler,
    draw: Draw,
) -> tuple[Tensor, Tensor, list[int], dict[str, Tensor]]:
    """Sample from the candidates of each image, which are its proposals (P_i, 4) followed by its annotated boxes.

    Returns:
        for the R samples of all images, image after image: their rows (R,) among all candidates; their boxes (R, 4);
        the number of samples of each image; a dict of `classes` (R,), where 0 is background, `targets` (R, 4),
        `weights` (R,) and `match` (R,), see `match_candidates`.
    """
    num_proposals = [len(boxes) for boxes in proposals]
    counts = [proposed + objects for proposed, objects in zip(num_proposals, truths.counts, strict=True)]
    sizes = [min(settings.size, count) for count in counts]
    layout = _layout(num_proposals, truths.counts, counts, sizes)
    (layout,) = send_dicts([layout], truths.boxes.device)
    padding = truths.boxes.new_zeros(1, 4)
    every = torch.cat([*proposals, truths.boxes.flatten(0, 1), padding])
    boxes = every[layout["boxes"]]  # (B, M, 4)
    match = match_batch(boxes, truths, settings, best_of_each_box=False)
    match = match.masked_fill(layout["padding"], IGNORED)
    key_of_padding = match.new_full((1,), -1).float()
    keys = torch.cat([draw(counts), key_of_padding])[layout["keys"]]
    index, match = sample(match, settings.size, settings.positive_fraction, keys)  # (B, K) each
    chosen = boxes.gather(1, index[..., None].expand(-1, -1, 4))
    labels = truths.labels.gather(1, match.clamp(min=0))
    padded = {
        "classes": labels.where(match >= 0, 0),
        "targets": box_targets(chosen, match, truths, settings.delta_weights),
        "weights": shares(match),
        "match": match,
    }
    rows = layout["rows"]  # without the padding of images of few candidates
    parts = {name: values.flatten(0, 1)[rows] for name, values in padded.items()}
    candidates = (index + layout["starts"]).flatten()[rows]
    return candidates, chosen.flatten(0, 1)[rows], sizes, parts


def box_targets(candidates_xyxy: Tensor, match: Tensor, truths: Truths, weights: Sequence[float]) -> Tensor:
    """Return the deltas (B, K, 4) from K candidates per image (B, K, 4) to the objects that they match; 0 for
    candidates without a match.

    match: (B, K), see `match_candidates`. weights: factors on the four deltas.
    """
    rows = match.clamp(min=0)[..., None].expand(-1, -1, 4)
    matched = truths.boxes.gather(1, rows)
    matched = torch.where((match >= 0)[..., None], matched, candidates_xyxy)
    deltas = encode_boxes(matched.flatten(0, 1), candidates_xyxy.flatten(0, 1), weights)
    return deltas.view(matched.shape)


def padded_rows(parts: Sequence[tuple[int, int]], missing: int) -> Tensor:
    """Return (B, M) int64 on the host, of which each row is start, start + 1, ... for one (start, count) of `parts`,
    followed by `missing`. M is the largest count, at least 1."""
    widest = max([1, *(count for _, count in parts)])
    rows = torch.full((len(parts), widest), missing)
    for row, (start, count) in zip(rows, parts, strict=True):
        row[:count] = torch.arange(start, start + count)
    return rows


def _layout(num_proposals: Sequence[int], objects: Sequence[int], counts: Sequence[int], sizes: Sequence[int]) -> dict:
    """Return the indices of each image's candidates among all proposals, followed by the padded objects; see
    `sampled_boxes`."""
    # Images of 3 and 1 proposals and of 1 and 2 objects: proposals are 0 1 2 3, objects 4 and 6 7 (5 is padding), and
    # 8 is a box that stands for no candidate. `boxes` is then 0 1 2 4, and 3 6 7 8.
    widest = max([1, *objects])
    total = sum(num_proposals)
    no_candidate = total + len(num_proposals) * widest
    boxes = torch.full((len(num_proposals), max([1, *counts])), no_candidate)
    for i, first_proposal in enumerate(_starts(num_proposals)):
        first_object = total + i * widest
        behind = num_proposals[i]
        boxes[i, :behind] = torch.arange(first_proposal, first_proposal + num_proposals[i])
        boxes[i, behind : counts[i]] = torch.arange(first_object, first_object + objects[i])
    most = min(max([0, *sizes]), boxes.shape[1])
    rows = [torch.arange(i * most, i * most + size) for i, size in enumerate(sizes)]
    starts = _starts(counts)
    return {
        "boxes": boxes,
        "padding": boxes == no_candidate,
        "keys": padded_rows(list(zip(starts, counts, strict=True)), sum(counts)),
        "rows": torch.cat(rows),
        "starts": torch.tensor(starts)[:, None],
    }


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][: len(counts)]
