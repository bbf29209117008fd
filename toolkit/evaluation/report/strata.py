"""Recall by properties of an object: size, neighbours, position in the image, truncation at the border."""

from dataclasses import dataclass

import numpy as np

from toolkit.boxes import common_and_union
from toolkit.evaluation.matches import AREAS, Matches, paired

EDGE = 1.0  # a box closer than this to the edge of the image, in pixels, is cut off by it
TOUCHING = 0.05  # IoU from which two annotated boxes count as neighbours


@dataclass(frozen=True)
class Stratum:
    """Objects of one kind: how many, the share found at IoU 0.5 above the threshold, and at any score."""

    topic: str
    name: str
    boxes: int
    recall: float
    recall_at_any_score: float


def strata(matches: Matches, threshold: float) -> list[Stratum]:
    m = matches
    rows = np.flatnonzero(~m.crowd)
    at_any, found = np.zeros(len(m.truth), bool), np.zeros(len(m.truth), bool)
    at_any[m.at_half[m.right]] = True
    found[m.at_half[m.right & (m.found.scores > threshold)]] = True
    result = []
    for topic, groups in _groups(m, rows).items():
        for name, inside in groups.items():
            some = rows[inside]
            if len(some):
                result.append(Stratum(topic, name, len(some), float(found[some].mean()), float(at_any[some].mean())))
    return result


def _groups(m: Matches, rows: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    boxes, area = m.truth.xyxy[rows], m.truth.area[rows]
    height, width = m.sizes_hw[m.truth.image_index[rows]].T
    cut = (boxes[:, :2] <= EDGE).any(axis=1) | (boxes[:, 2] >= width - EDGE) | (boxes[:, 3] >= height - EDGE)
    near = neighbours(m)[rows]
    in_image = np.bincount(m.truth.image_index[rows], minlength=m.num_images)[m.truth.image_index[rows]]
    x, y = (boxes[:, 0] + boxes[:, 2]) / 2 / width, (boxes[:, 1] + boxes[:, 3]) / 2 / height
    sizes = {"small (below 32²)": "s", "medium (32² to 96²)": "m", "large (above 96²)": "l"}
    return {
        "size in pixels": {n: (area >= AREAS[a][0]) & (area < AREAS[a][1]) for n, a in sizes.items()},
        "boxes that overlap it": {"none": near == 0, "1": near == 1, "2 or 3": (near > 1) & (near < 4),
                                  "4 or more": near > 3},
        "boxes in the image": {"1": in_image == 1, "2 to 5": (in_image > 1) & (in_image < 6),
                               "6 to 20": (in_image > 5) & (in_image < 21), "more than 20": in_image > 20},
        "edge of the image": {"cut off": cut, "not cut off": ~cut},
        "place in the image": {f"{v} {h}": (np.clip((y * 3).astype(int), 0, 2) == j)
                               & (np.clip((x * 3).astype(int), 0, 2) == i)
                               for j, v in enumerate(("top", "middle", "bottom"))
                               for i, h in enumerate(("left", "centre", "right"))},
    }  # fmt: skip


def neighbours(m: Matches) -> np.ndarray:
    """(G,) how many other boxes of its image overlap each box."""
    counts = np.full(len(m.truth), -1)  # a box touches itself
    for ours, theirs in paired(m.truth.image_index, m.truth.image_index):
        common, union = common_and_union(m.truth.xyxy[ours], m.truth.xyxy[theirs])
        counts += np.bincount(ours[common > TOUCHING * union], minlength=len(counts))
    return counts.clip(min=0)
