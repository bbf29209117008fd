"""Chooses the images most worth labelling next: images on which a detector is uncertain, and which look different from
each other."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchvision.ops import box_iou

from toolkit.base.errors import BadInput
from toolkit.base.text import as_cell, in_utf_8
from toolkit.evaluation.predictions import Detections
from toolkit.tools.doctor.near_duplicates import thumbnail_of
from toolkit.tools.predict.predict_each import predict_files
from toolkit.tools.predict.predictor import Predictor

MIN_COUNTED_SCORE = 0.05  # minimum score to count; a detector has hundreds of lower ones in any image
# For each requested image: the most uncertain ones, among which the most different are chosen.
CANDIDATES_PER_IMAGE = 3


def most_uncertain(
    predictor: Predictor,
    paths: Sequence[Path],
    count: int,
    batch_size: int = 8,
) -> dict[Path, tuple[float, float]]:
    """Choose the `count` images most worth labelling; return {image file: result of `uncertainty`} in the order of
    choice. Files that cannot be read are left out.

    Candidates are the images with the largest sums of entropy and disagreement. The most uncertain one is chosen first;
    each next one is the candidate that looks least like all images chosen so far (greedy k-centre of Sener and
    Savarese, ICLR 2018, here on thumbnails), so that near duplicates come last.

    Raises BadInput if `count` is below 1, or the predictor describes given boxes.
    """
    if count < 1 or predictor.given:
        wants = "expected the number of images, 1 or more" if count < 1 else f"{predictor.source} finds no boxes itself"
        raise BadInput(f"--uncertain {count}: {wants}")

    def predict(images: Sequence[Tensor], score_threshold: float) -> list[Detections]:
        plain = predictor.predict(images, score_threshold)
        mirrored = predictor.predict([image.flip(-1) for image in images], score_threshold)
        widths = [image.shape[-1] for image in images]
        return [{"uncertainty": uncertainty(*one)} for one in zip(plain, mirrored, widths, strict=True)]

    found = {}
    looks = {}
    options = {"batch_size": batch_size, "score_threshold": MIN_COUNTED_SCORE}
    for prediction in predict_files(replace(predictor, predict=predict), paths, **options):
        if prediction.error is None:
            found[prediction.key] = prediction.detections["uncertainty"]
            look = thumbnail_of(prediction.image).astype(np.float64).ravel()
            centred = look - look.mean()
            looks[prediction.key] = centred / max(np.linalg.norm(centred), 1e-9)
    ranked = sorted(found, key=lambda path: -sum(found[path]))[: CANDIDATES_PER_IMAGE * count]
    chosen = farthest_first(np.array([looks[path] for path in ranked]), count) if ranked else []
    return {ranked[index]: found[ranked[index]] for index in chosen}


def uncertainty(found: Detections, mirrored: Detections, width: int) -> tuple[float, float]:
    """Return (entropy, disagreement), each from 0 to 1, of the detections in an image and in its mirror image.

    Entropy is the mean binary entropy of the scores in `found`, in bits; 0 without detections. Disagreement is
    1 - 2 M / S. S is the sum of all scores in `found` and `mirrored`. For M, detections of one class are matched one to
    one between `found` and `mirrored`, so that the sum of IoU times the smaller score of each pair is largest; M is
    this sum. Disagreement is 0 if there are no detections.

    width: width of the image in pixels.
    """
    scores = found["scores"].double().clamp(1e-9, 1 - 1e-9)
    entropy = -(scores * scores.log2() + (1 - scores) * (1 - scores).log2())
    left, top, right, bottom = mirrored["boxes"].unbind(1)
    mirrored_back = torch.stack([width - right, top, width - left, bottom], 1)
    iou = box_iou(found["boxes"], mirrored_back).double()
    pairs = iou * torch.minimum(found["scores"][:, None], mirrored["scores"])
    pairs = pairs * (found["labels"][:, None] == mirrored["labels"])
    matched = pairs[linear_sum_assignment(pairs, maximize=True)].sum() if pairs.numel() else 0.0
    total = float(found["scores"].sum() + mirrored["scores"].sum())
    mean_entropy = float(entropy.mean()) if len(scores) else 0.0
    disagreement = 1 - 2 * float(matched) / total if total else 0.0
    return mean_entropy, disagreement


def farthest_first(looks: np.ndarray, count: int) -> list[int]:
    """Choose up to `count` rows of `looks` (N, D), points in D dimensions, and return their indices.

    The first row is chosen first; each next one is the row that is farthest from its nearest chosen row, and the first
    of several that are equally far.
    """
    chosen = [0]
    distance = np.linalg.norm(looks - looks[0], axis=1)
    while len(chosen) < min(count, len(looks)):
        distance[chosen] = -1
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, np.linalg.norm(looks - looks[chosen[-1]], axis=1))
    return chosen


def write_uncertain(chosen: Mapping[Path, tuple[float, float]], path: Path) -> None:
    """Write the result of `most_uncertain` to a CSV file, with a row for each image: file, uncertainty (the sum of the
    next two), entropy, disagreement."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        rows = [(as_cell(in_utf_8(str(image))), sum(both), *both) for image, both in chosen.items()]
        csv.writer(file).writerows([("file", "uncertainty", "entropy", "disagreement"), *rows])
