"""Writes a picture of every image with what a detector got right and wrong and what it missed, for `evaluate.py`."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from toolkit.base.boxes import Boxes
from toolkit.base.files import distinct, without_suffix
from toolkit.data.decoding import ImageError
from toolkit.evaluation.draw import picture_of, save_picture
from toolkit.evaluation.mask_matches import matches_by_mask
from toolkit.evaluation.matches import match_predictions
from toolkit.tools.report.gallery import drawn, marks_of_image
from toolkit.tools.report.thresholds import best_threshold, f1_of_counts, image_counts, sweep, threshold_text

LIST_FILE = "images.csv"
MAX_SIDE_PX = 1024  # longer side of a picture; images between the two keep their size
MIN_SIDE_PX = 480


def write_image_files(folder: Path, predictions: Boxes | Mapping, table) -> str:
    """Write a JPEG of every image of a table with its annotated boxes and its predictions above the score threshold of
    the best F1, matched by masks if both have masks; and `images.csv`, a list with numbers of mistakes, worst first.

    Returns a sentence on what was written, and on how many images could not be read.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    of_boxes = match_predictions(predictions, table)
    matches = matches_by_mask(of_boxes, table) or of_boxes
    threshold = best_threshold(sweep(matches))
    counts = image_counts(matches, threshold)
    files = names_of_pictures(table.file_names())
    unreadable = 0
    for image, name in enumerate(files):
        try:
            picture = picture_of(table.decode_image(table.row(image)))
        except (ImageError, OSError):
            unreadable += 1
            files[image] = ""
            continue
        side = min(max(*picture.size, MIN_SIDE_PX), MAX_SIDE_PX)
        save_picture(drawn(picture, marks_of_image(matches, threshold, image), side=side), folder / name)
    _write_list(folder / LIST_FILE, files, table.file_names(), counts)
    left = f"; {unreadable} images cannot be read" if unreadable else ""
    score = threshold_text(threshold)
    return f"pictures: {len(files) - unreadable} in {folder}, of predictions above {score}, the best F1{left}"


def names_of_pictures(file_names: Sequence[str]) -> list[str]:
    """Return the names of the pictures, all different, below one folder: those of the images, ending in .jpg."""
    names = []
    for name in file_names:
        parts = [part for part in PurePosixPath(name.replace("\\", "/")).parts if part not in ("/", "..")]
        names.append(f"{without_suffix('/'.join(parts))}.jpg")
    return distinct(names, str.lower)


def _write_list(path: Path, files: Sequence[str], names: Sequence[str], counts: np.ndarray) -> None:
    """Write the rows of `images.csv`. counts: (I, 3) of `image_counts`."""
    f1 = f1_of_counts(counts)
    mistakes = counts[:, 1] + counts[:, 2]
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["image", "picture", "right", "wrong", "missed", "f1"])
        for image in np.lexsort((-mistakes, f1)).tolist():
            writer.writerow([names[image], files[image], *counts[image].tolist(), f"{f1[image]:.4f}"])
