"""Finds image files to predict on, and reads their ids and boxes from a COCO file."""

import atexit
import glob
import math
import os
import shutil
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from toolkit.base.errors import BadInput
from toolkit.base.files import folders_below, near_names
from toolkit.data.decoding import IMAGE_SUFFIXES
from toolkit.data.formats.coco import read_annotations
from toolkit.data.formats.json_stream import items_of


def find_images(given: Sequence[str | Path], leave_out: Path | None = None) -> dict[Path, Path]:
    """Return {path of an image file: its path relative to the given folder}, in the given order, without duplicates.

    Args:
        given: files (with any suffix), folders (searched recursively for image suffixes), and patterns such as
            "photos/**/*.jpg". A file that is not from a given folder has its file name as relative path.
        leave_out: a folder whose files are left out, such as the folder of pictures of an earlier prediction.

    Raises:
        BadInput: a given path does not exist or holds no images; the message lists all of these.
    """
    images = {}
    problems = []
    for source in map(str, given):
        path = Path(source).expanduser()
        if path.is_file():
            here = [path]
        else:
            if path.is_dir():
                matches = [entry for folder in folders_below(path) for entry in folder.iterdir()]
            else:
                matches = glob.glob(str(path), recursive=True)
            here = [file for file in map(Path, sorted(matches)) if _is_image_file(file, leave_out)]
        if not here:
            looked_for = f"(looked for {' '.join(sorted(IMAGE_SUFFIXES))})"
            if path.is_dir():
                problems.append(f"{source}: contains no image files {looked_for}")
            else:
                hint = "" if glob.has_magic(source) else near_names(path)
                problems.append(f"{source}: no such file or folder, and no image file matches it {looked_for}{hint}")
        for file in here:
            images.setdefault(file, file.relative_to(path) if path.is_dir() else Path(file.name))
    if problems:
        raise BadInput(problems)
    return images


def find_or_fetch(
    given: Sequence[str], leave_out: Path | None = None
) -> tuple[dict[Path, Path], dict[Path, str], set[Path]]:
    """Find image files as `find_images` does, and download images from URLs.

    given: files, folders, patterns and URLs; "-" means a list of these on the standard input, one per line.

    Returns:
        the files as `find_images` returns them, those of URLs included; {URL: error} of the failed downloads; and the
        set of downloaded files, which are deleted when the process ends.

    Raises:
        BadInput: see `find_images`; or nothing is given.
    """
    stripped = (line.strip() for source in given for line in (sys.stdin if source == "-" else [source]))
    lines = [line for line in stripped if line]
    addresses = [line for line in lines if line.startswith(("http://", "https://"))]
    local = [line for line in lines if line not in addresses]
    if not lines:
        raise BadInput("no images: nothing came on the standard input")
    files = find_images(local, leave_out) if local else {}
    errors = {}
    fetched = set()
    for address in addresses:
        try:
            path = _fetched(address)
            files[path] = Path(path.name)
            fetched.add(path)
        except (OSError, ValueError) as error:
            errors[Path(address)] = f"cannot be fetched: {getattr(error, 'reason', error)}"
    return files, errors, fetched


def _fetched(address: str, timeout_s: float = 30, limit: int = 100 * 2**20) -> Path:
    """Download a URL to a temporary file, which is deleted when the process ends, and return the file."""
    with urllib.request.urlopen(address, timeout=timeout_s) as answer:
        content = answer.read(limit)
    folder = Path(tempfile.mkdtemp(prefix="predict-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / (Path(urllib.parse.urlparse(address).path).name or "image")
    path.write_bytes(content)
    return path


def _is_image_file(path: Path, leave_out: Path | None) -> bool:
    # not `resolve`, which raises for a link to itself
    if leave_out is not None:
        real = Path(os.path.realpath(path))
        if Path(os.path.realpath(leave_out)) in real.parents:
            return False
    if path.suffix.lower() not in IMAGE_SUFFIXES:
        return False
    # A broken link is taken too, so that it is reported among the errors.
    return path.is_file() or (path.is_symlink() and not path.is_dir())


# ---- ids and boxes from a COCO file ----------------------------------------------------------------------------------


def image_ids_of(annotations: Path | None, names: Sequence[Path]) -> list:
    """Return the id of each image from a COCO file, or 1, 2, 3, ... if `annotations` is None.

    names: paths of the images; the COCO file's `file_name` of an image must be the end of its path.

    Raises:
        BadInput: the file is not a COCO file; or it has an image not at all, or more than once.
    """
    if annotations is None:
        return list(range(1, len(names) + 1))
    try:
        images = items_of(Path(annotations), ("images",))
        entries = [(Path(image["file_name"]).parts, image["id"]) for _, image in images]
    except (OSError, KeyError, TypeError) as error:
        raise BadInput(f"--image-ids {annotations}: no COCO file with images: {error!r}") from error
    if not entries:
        raise BadInput(f"--image-ids {annotations}: no COCO file with images")
    ids = []
    problems = []
    by_name = {}
    for parts, image_id in entries:
        by_name.setdefault(parts[-1], []).append((parts, image_id))
    for name in names:
        matches = []
        for parts, image_id in by_name.get(name.name, ()):
            if name.parts[-len(parts) :] == parts:
                matches.append(image_id)
        ids.append(matches[0] if matches else None)
        if len(matches) != 1:
            problems.append(f"{name}: {annotations} names {len(matches)} such images; expected 1")
    if problems:
        raise BadInput(problems)
    return ids


def given_boxes(file: Path, names: Mapping[Path, Path], class_names: Sequence[str]) -> dict[Path, dict[str, Tensor]]:
    """Read the boxes of each image from a COCO file, for models that describe given boxes.

    Args:
        file: COCO annotations; crowd regions are left out.
        names: the image files as `find_images` returns them.
        class_names: names of the model's classes in the order of the labels; categories are matched by name.

    Returns:
        {image file: `boxes (N, 4)` float32 xyxy in pixels, and `labels (N,)` int64 counted from 0}; N can be 0.

    Raises:
        BadInput: the file is not a COCO file, lacks images, has boxes without width or height, or categories that the
            model does not know; the message lists all faults.
    """
    image_ids = dict(zip(image_ids_of(file, list(names.values())), names, strict=True))
    annotations = read_annotations(Path(file))
    labels = {name: label for label, name in enumerate(class_names)}
    categories = (entry for entry in annotations.categories if isinstance(entry, dict))
    label_of = {entry.get("id"): labels.get(entry.get("name")) for entry in categories}
    rows: dict[Path, list] = {path: [] for path in names}
    problems = []
    for number, entry in enumerate(map(annotations.entry, range(len(annotations)))):
        if not isinstance(entry, dict):
            problems.append(f"{file}, annotation {number}: {str(entry)[:80]}; expected an object")
            continue
        if entry.get("image_id") not in image_ids or entry.get("iscrowd"):
            continue
        label = label_of.get(entry.get("category_id"))
        box = entry.get("bbox")
        where = f"{file}, annotation {entry.get('id', number)}"
        if label is None:
            category = entry.get("category_id")
            problems.append(f"{where}: category {category} is not one of the model's, {class_names[:10]}")
        if not _is_box(box):
            problems.append(f"{where}: bbox {box}; expected [x, y, width, height] in pixels, both sides above 0")
        else:
            x, y, width, height = box
            rows[image_ids[entry["image_id"]]].append(([x, y, x + width, y + height], label))
    if problems:
        raise BadInput(problems)
    boxes_of = {}
    for path, of_image in rows.items():
        boxes = torch.tensor([box for box, _ in of_image], dtype=torch.float32).reshape(-1, 4)
        boxes_of[path] = {
            "boxes": boxes,
            "labels": torch.tensor([label for _, label in of_image], dtype=torch.int64),
        }
    return boxes_of


def _is_box(box: object) -> bool:
    if not isinstance(box, list) or len(box) != 4:
        return False
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in box):
        return False
    _, _, width, height = box
    return width > 0 and height > 0
