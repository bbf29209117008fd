"""The image files of a data set against its records: there, safe, whole, of the size the annotations were made for."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from toolkit.data.checks import unsafe_file_name
from toolkit.data.decoding import EXTENSIONS, IMAGE_SUFFIXES, ImageError, decode_image, probe_image
from toolkit.data.table import Problem
from toolkit.errors import BadInput
from toolkit.files import MAX_IMAGE_PIXELS, usable_cores
from toolkit.text import shown

FULL_CHECK_LIMIT = 20_000  # images; above it only headers are read unless a full check is asked for
UNLISTED_NAMED = 10
UNLISTED = "not listed in the annotation file; not used"
TAIL = {"JPEG": (b"\xff\xd9", 1024), "PNG": (b"IEND", 64)}  # end marker, and how far from the end to look for it


def check_image_files(
    rows: Sequence[Mapping],
    listed: Set[str],
    image_root: Path,
    check_images: bool | str,
    max_pixels: int = MAX_IMAGE_PIXELS,
) -> tuple[list[Problem], dict[str, str]]:
    """Checks every row's file in a thread pool, and names the image files beside them that are not in `listed`.

    check_images: "full" decodes each, "header" reads size and end marker, True takes full up to FULL_CHECK_LIMIT.
    max_pixels: an image with more of them cannot be used.
    Returns the problems and {folder: folder_digest} of the folders read, by which a cache knows that it still holds.
    Raises BadInput when not one of the files exists: the folder is then the wrong one.
    """
    if not any(os.path.exists(image_root / row["file_name"]) for row in rows):  # Path's raises for too long a name
        named = f"; the first is {shown(rows[0]['file_name'])!r}" if rows else ""
        raise BadInput(f"{image_root}: none of the {len(rows)} listed images is in this folder{named}; set the image "
                       "folder (--data.image_dir)")
    problems: list[Problem] = []
    full = check_images == "full" or (check_images is True and len(rows) <= FULL_CHECK_LIMIT)
    if check_images is True and not full:
        problems.append(Problem("note", str(image_root), None, None,
                                f"{len(rows)} images: headers and end markers checked, pixels not decoded"))
    folders = sorted({os.path.dirname(row["file_name"]) for row in rows})
    real_root = os.path.realpath(image_root)
    escaping = {folder for folder in folders if not inside(image_root / folder, real_root)}

    def check(row: Mapping) -> list[Problem]:
        path = image_root / row["file_name"]
        if os.path.dirname(row["file_name"]) in escaping or (os.path.islink(path) and not inside(path, real_root)):
            message = "unsafe file_name: a symbolic link leaves the image folder; refused before opening"
            return [Problem("error", row["file_name"], row["image_id"], None, message)]
        return check_image(row, path, full, max_pixels)

    problems += parallel(check, rows, "checking images")
    problems += unlisted_files(image_root, folders, listed)
    return problems, {str(image_root / folder): folder_digest(image_root / folder) for folder in folders}


def rows_of_good_files(
    rows: Sequence[Mapping],
    listed: Set[str],
    image_root: Path,
    check_images: bool | str,
    max_pixels: int = MAX_IMAGE_PIXELS,
) -> tuple[Sequence[Mapping], list[Problem], dict[str, str]]:
    """The rows whose image files are without errors; with the two answers of `check_image_files`, whose arguments these
    are. Nothing is checked if `check_images` is False or there are no rows."""
    if not check_images or not rows:
        return rows, [], {}
    problems, checked = check_image_files(rows, listed, image_root, check_images, max_pixels)
    bad = {problem.image_id for problem in problems if problem.severity == "error"}
    return [row for row in rows if row["image_id"] not in bad], problems, checked


def check_image(
    row: Mapping, source: Path | bytes, full: bool, max_pixels: int = MAX_IMAGE_PIXELS
) -> list[Problem]:
    """Problems of one image: readable, whole, upright size as recorded, content as its name says."""

    def problem(severity: str, message: str) -> Problem:
        return Problem(severity, row["file_name"], row["image_id"], None, message)

    try:
        probe = probe_image(source, max_pixels)
        # an end marker shows a whole file; without one, decoding tells a cut file from one with something appended
        if full or (probe.format in TAIL and not _ends(source, *TAIL[probe.format])):
            decode_image(source, max_pixels)
    except ImageError as error:
        return [problem("error", error.reason)]
    problems = [problem("note", note) for note in probe.notes]
    suffix = os.path.splitext(row["file_name"])[1].lower()
    if suffix in IMAGE_SUFFIXES and suffix not in EXTENSIONS.get(probe.format, {suffix}):
        problems.append(problem("warning", f"content is {probe.format}, which does not match the extension {suffix}; "
                                           "read by its content"))
    height, width = probe.size_hw
    if (width, height) != (row["width"], row["height"]):
        message = f"size differs from the JSON: the upright image is {width} x {height} (width x height), "
        problems.append(problem("error", message + f"the JSON says {row['width']} x {row['height']}"))
    return problems


def parallel(check: Callable[[Any], list[Problem]], rows: Sequence, what: str) -> list[Problem]:
    """`check` of every row, in order, by as many threads as there are cores; a progress bar when it takes long."""
    with ThreadPoolExecutor(max_workers=min(32, usable_cores())) as pool:
        found = pool.map(check, rows)
        bar = tqdm(found, what, len(rows), delay=2, unit="image", leave=False, disable=None)
        return [problem for problems in bar for problem in problems]


def folder_digest(folder: str | Path) -> str:
    """Hash of names, sizes and modification times of the files in `folder`, "" when there is none that can be read."""
    try:
        with os.scandir(folder) as entries:
            files = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError:
        return ""
    listing = repr(sorted((name, status.st_size, status.st_mtime_ns) for name, status in files))
    return hashlib.blake2b(listing.encode(errors="replace"), digest_size=16).hexdigest()


def find_image_root(annotation_file: Path, file_names: Iterable[str]) -> Path:
    """The folder near `annotation_file` that holds one of `file_names`. Raises BadInput saying which were tried."""
    here, stem = annotation_file.parent, annotation_file.stem
    split = stem.rsplit("_", 1)[-1]  # instances_val2017 -> val2017
    beside = [here.parent / name for name in (stem, split, "images", "JPEGImages", f"images/{stem}", f"images/{split}")]
    candidates = list(dict.fromkeys([here, here / "images", here.parent, *beside]))
    names = [name for name in file_names if not unsafe_file_name(name)][:20]  # the very first may be the missing one
    for candidate in candidates:
        if any(os.path.isfile(candidate / name) for name in names):
            return candidate
    tried = ", ".join(str(candidate) for candidate in candidates)
    first = repr(shown(names[0])) if names else "(no usable file_name)"
    raise BadInput(f"{annotation_file}: no image folder found for {first}; tried {tried}; set it with "
                   "--data.image_dir")


def inside(path: Path, real_root: str) -> bool:
    """Whether a path, its symbolic links followed, is in a folder."""
    real = os.path.realpath(path)
    return real == real_root or real.startswith(real_root.rstrip(os.sep) + os.sep)


def _ends(source: Path | bytes, marker: bytes, reach: int) -> bool:
    if isinstance(source, bytes):
        return marker in source[-reach:]
    with open(source, "rb") as file:
        file.seek(max(0, os.path.getsize(source) - reach))
        return marker in file.read()


def unlisted_files(image_root: Path, folders: Sequence[str], listed: Set[str]) -> list[Problem]:
    """Image files beside listed ones that no record names: one warning each, or one for all when there are many."""
    listed = {os.path.normpath(name) for name in listed}
    names: list[str] = []
    for folder in folders:
        with suppress(OSError), os.scandir(image_root / folder) as entries:
            found = {os.path.normpath(os.path.join(folder, entry.name)) for entry in entries
                     if os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES}
            names += sorted(found - listed)
    return unlisted_problems(image_root, names)


def unlisted_problems(image_root: Path, names: Sequence[str]) -> list[Problem]:
    """Warnings for image files that no record names."""
    if len(names) <= UNLISTED_NAMED:
        return [Problem("warning", name, None, None, f"file {UNLISTED}") for name in names]
    some = f"{len(names)} image files {UNLISTED}: {', '.join(shown(name) for name in names[:3])}, ..."
    return [Problem("warning", str(image_root), None, None, some)]
