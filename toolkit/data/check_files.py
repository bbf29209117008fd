"""Checks of the image files of a data set against its records: present, safe to open, complete, of the recorded size.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from toolkit.base.errors import BadInput
from toolkit.base.files import MAX_IMAGE_PIXELS, usable_cores, with_stall_warnings
from toolkit.base.text import first_names, shown
from toolkit.data.annotations import ImageRow
from toolkit.data.checks import CheckedAnnotations
from toolkit.data.decoding import (
    EXTENSIONS,
    IMAGE_SUFFIXES,
    ImageError,
    decode_image,
    largest_value,
    probe_image,
    read_image_file,
)
from toolkit.data.image_sources import ImageSources, Stored, digest_of, is_there, parts_of, size_of, watched_of
from toolkit.data.sixteen_bits import FULL_RANGE
from toolkit.data.sixteen_bits import NOTES as NOTES_OF_16_BITS
from toolkit.data.table import Problem

FULL_CHECK_LIMIT = 20_000  # images; above it only headers are read unless a full check is asked for
SAMPLED_FOR_WHITE = 200  # images with 16 bits, spread over the data, whose values are read without a full check
REMOTE_THREADS = 32
ROWS_PER_CHUNK = 4096  # rows submitted to the pool at a time
MAX_UNLISTED_NAMED = 10
UNLISTED = "not listed in the annotation file; not used"
TAIL = {"JPEG": (b"\xff\xd9", 1024), "PNG": (b"IEND", 64)}  # end marker, and how far from the end to look for it


def check_image_files(
    rows: Sequence[ImageRow],
    listed: Set[str],
    image_root: Path | ImageSources,
    check_images: bool | str,
    max_pixels: int = MAX_IMAGE_PIXELS,
    source: str = "JSON",
    white: int | None = None,
) -> tuple[list[Problem], dict[str, str]]:
    """Check the image file of every row in a thread pool, and report other image files in their folders that are not in
    `listed`.

    check_images: "full" decodes each image, "header" reads size and end marker; True means "full" for at most
    FULL_CHECK_LIMIT images, else "header". max_pixels: an image with more pixels cannot be used. source: what the rows
    were read from, for messages. white: as of `white_problems`.
    Returns the problems, and {place: `digest_of` the place} for the places that were read; a cache compares these to
    find out whether the images have changed.
    Raises BadInput if none of the files exists, because the folder is then the wrong one.
    """
    are_there = (is_there(image_root / row.file_name) for row in rows)
    if not any(with_stall_warnings(are_there, "looking for images")):
        named = f"; the first is {shown(rows[0].file_name)!r}" if rows else ""
        raise BadInput(
            f"{image_root}: none of the {len(rows)} listed images is in this folder{named}; set the image folder "
            "(--data.image_dir)"
        )
    full, problems = choose_check_depth(check_images, len(rows), image_root)
    check = image_checker(image_root, full, max_pixels, source, white)
    folders = sorted({os.path.dirname(row.file_name) for row in rows})
    problems += map_in_threads(check, rows, "checking images", reading_threads(image_root))
    deep = with_16_bits(rows, problems)
    files = [image_root / row.file_name for row in deep]
    read = partial(largest_value, max_pixels=max_pixels)
    problems += white_problems(str(image_root), files, read, full, white, reading_threads(image_root))
    problems += _linked_files(rows, image_root)
    problems += unlisted_files(image_root, folders, listed)
    return problems, {path: digest_of(path) for path in watched_of(image_root, folders)}


def choose_check_depth(
    check_images: bool | str, count: int, image_root: Path | ImageSources
) -> tuple[bool, list[Problem]]:
    """Return whether each of `count` images is to be decoded, and a list with a note if there are too many for that.

    check_images: as of `check_image_files`.
    """
    full = check_images == "full" or (check_images is True and count <= FULL_CHECK_LIMIT)
    if full or check_images is not True:
        return full, []
    message = f"{count} images: headers and end markers checked, pixels not decoded"
    return full, [Problem("note", str(image_root), None, None, message)]


def image_checker(
    image_root: Path | ImageSources,
    full: bool,
    max_pixels: int = MAX_IMAGE_PIXELS,
    source: str = "JSON",
    white: int | None = None,
) -> Callable[[ImageRow], list[Problem]]:
    """Return a function that checks the image file of one row and returns its problems.

    The function reports a file that is in several places of the root, and the problems that `check_image` finds.
    """
    parts = parts_of(image_root)

    def check(row: ImageRow) -> list[Problem]:
        name = row.file_name
        problems = []
        holders = parts if len(parts) == 1 else [part for part in parts if part.holds(name)]
        if len(holders) > 1:
            where = " and in ".join(map(str, holders))
            sizes = {size_of(holder.source(name)) for holder in holders}
            if len(sizes) > 1:
                message = f"different files of this name are in {where}; give the place that is meant (data.image_dir)"
                return [_problem(row, "error", message)]
            problems.append(_problem(row, "warning", f"this file is in {where}; the first one is used"))
        return problems + check_image(row, image_root / name, full, max_pixels, source, white)

    return check


def with_16_bits(rows: Sequence[ImageRow], problems: Iterable[Problem]) -> list[ImageRow]:
    """Return the rows of images with 16 bits: those with a note that says so among the problems, and without an
    error."""
    deep = {problem.image_id for problem in problems if problem.message in NOTES_OF_16_BITS}
    faulty = {problem.image_id for problem in problems if problem.severity == "error"}
    return [row for row in rows if row.image_id in deep - faulty]


def white_problems(
    where: str,
    items: Sequence,
    read: Callable[[Any], int],
    full: bool,
    white: int | None,
    threads: int | None = None,
) -> list[Problem]:
    """Return a warning if the white level does not fit the values of the images with 16 bits, or there are none.

    Values of 12 bits in 16-bit files would become nearly black pictures of a few levels.

    Args:
        where: place of the images, for messages.
        items: one for each image with 16 bits.
        read: returns the largest value of an item's image. Raises ImageError.
        full: whether all images are read; otherwise at most `SAMPLED_FOR_WHITE` of them.
        white: `data.white`; None: `FULL_RANGE`.
        threads: as of `map_in_threads`.
    """

    def largest_of(item: Any) -> list[int]:
        with suppress(ImageError):  # reported by the check of the file
            return [read(item)]
        return []

    if not items:
        message = f"data.white {white} changes nothing: no image has 16 bits"
        return [Problem("warning", where, None, None, message)] if white else []
    step = 1 if full else -(-len(items) // SAMPLED_FOR_WHITE)
    some = items[::step]
    largest = max(map_in_threads(largest_of, some, "reading 16-bit values", threads), default=None)
    if largest is None:
        return []
    of_read = f"the largest value in {len(some)} of {len(items)} images with 16 bits is {largest}"
    used = white or FULL_RANGE
    if largest > used:
        message = f"{of_read}; all above data.white {white} becomes white"
    elif largest <= used // 2:
        fitting = 2 ** max(largest.bit_length(), 1) - 1
        levels = largest * 255 // used + 1
        message = f"{of_read}, of {used}: the pictures are dark, of at most {levels} levels; --data.white {fitting} "
        message += f"makes {fitting} white"
    else:
        return []
    return [Problem("warning", where, None, None, message)]


def reading_threads(image_root: Path | ImageSources) -> int | None:
    """Return the number of threads for reading files of a root: many for remote storage, because of its latency.

    None means one thread per core.
    """
    if any(part.remote for part in parts_of(image_root)):
        return REMOTE_THREADS
    return None


def with_good_files(
    checked: CheckedAnnotations,
    image_root: Path | ImageSources,
    check_images: bool | str,
    max_pixels: int = MAX_IMAGE_PIXELS,
    listed: Set[str] = frozenset(),
    source: str = "JSON",
    white: int | None = None,
) -> tuple[CheckedAnnotations, dict[str, str]]:
    """Return the annotations without the images whose files have errors, and with the problems of the files added.

    The second result is that of `check_image_files`: digests of the places that were read. The files are not looked at
    if `check_images` is False or there are no images; the second result is then empty.

    listed: further known file names. source: what the records were read from, for messages. white: as of
    `white_problems`.
    """
    if not check_images or not checked.images:
        return checked, {}
    names = checked.listed | listed
    problems, digests = check_image_files(checked.images, names, image_root, check_images, max_pixels, source, white)
    bad = {problem.image_id for problem in problems if problem.severity == "error"}
    return replace(checked.without(bad), problems=checked.problems + problems), digests


def check_image(
    row: ImageRow,
    file: Path | bytes | Stored,
    full: bool,
    max_pixels: int = MAX_IMAGE_PIXELS,
    source: str = "JSON",
    white: int | None = None,
) -> list[Problem]:
    """Return the problems of one image file.

    It must be readable and complete, and have the size in the row with EXIF orientation applied; its content should be
    of the format that its suffix says.

    full: whether the image is decoded, or only its header and end marker are read. source: what the row was read from,
    for messages. white: as of `decode_image`.
    """
    try:
        if isinstance(file, Stored):
            file = bytes(read_image_file(file, max_pixels)[1])  # once
        probe = probe_image(file, max_pixels)
        height, width = probe.size_hw
        # An end marker shows a whole file; without one, decoding tells a cut file from one with something appended.
        lacks_end = probe.format in TAIL and not _ends(file, *TAIL[probe.format])
        if full or lacks_end:
            height, width = decode_image(file, max_pixels, white, thorough=full).shape[-2:]
    except ImageError as error:
        return [_problem(row, "error", error.reason)]
    problems = [_problem(row, "note", note) for note in probe.notes]
    suffix = os.path.splitext(row.file_name)[1].lower()
    if suffix in IMAGE_SUFFIXES and suffix not in EXTENSIONS.get(probe.format, {suffix}):
        message = f"content is {probe.format}, which does not match the extension {suffix}; read by its content"
        problems.append(_problem(row, "warning", message))
    if (width, height) != (row.width, row.height):
        say = "say" if source.endswith("s") else "says"
        message = (
            f"size differs from the {source}: the upright image is {width} x {height} (width x height), "
            f"the {source} {say} {row.width} x {row.height}"
        )
        problems.append(_problem(row, "error", message))
    return problems


def _problem(row: ImageRow, severity: str, message: str) -> Problem:
    return Problem(severity, row.file_name, row.image_id, None, message)


def map_in_threads(check: Callable[[Any], list], rows: Sequence, what: str, threads: int | None = None) -> list:
    """Call `check` for every row in threads, and return the lists of results joined to one, in the order of the rows.

    A progress bar is shown if this takes long; without a terminal, a line is printed for every `ROWS_PER_CHUNK` rows. A
    stalled disk is reported.

    what: the work in progress, for the bar and messages. threads: number of threads; None: one for each core.
    """

    def results(pool: ThreadPoolExecutor) -> Iterator[list]:
        for start in range(0, len(rows), ROWS_PER_CHUNK):  # the pool keeps an object for each row that it was given
            if start and not sys.stderr.isatty():
                print(f"{what}: {start} of {len(rows)}", file=sys.stderr, flush=True)
            yield from pool.map(check, rows[start : start + ROWS_PER_CHUNK])

    with ThreadPoolExecutor(max_workers=threads or min(32, usable_cores())) as pool:
        read = with_stall_warnings(results(pool), what)
        bar = tqdm(read, what, len(rows), delay=2, unit="image", leave=False, disable=None)
        return list(chain.from_iterable(bar))


def _ends(file: Path | bytes, marker: bytes, reach: int) -> bool:
    if isinstance(file, bytes):
        return marker in file[-reach:]
    with open(file, "rb") as stream:
        stream.seek(max(0, os.path.getsize(file) - reach))
        return marker in stream.read()


def _linked_files(rows: Sequence[ImageRow], image_root: Path | ImageSources) -> list[Problem]:
    """Return one note that says how many images are links to files elsewhere, which are read like all others."""
    parts = parts_of(image_root)

    def linked(row: ImageRow) -> list[str]:
        name = row.file_name
        holders = parts if len(parts) == 1 else (part for part in parts if part.holds(name))
        holder = next(iter(holders), None)
        if holder is not None and holder.leads_out(name):
            return [name]
        return []

    names = map_in_threads(linked, rows, "looking for links", reading_threads(image_root))
    if not names:
        return []
    some = first_names(names, written=shown)
    message = f"{len(names)} of {len(rows)} images are links to files elsewhere, which are read: {some}"
    return [Problem("note", str(image_root), None, None, message)]


def unlisted_files(image_root: Path | ImageSources, folders: Iterable[str], listed: Set[str]) -> list[Problem]:
    """Return a warning for each image file in these folders of the root that is not in `listed`.

    If there are more than `MAX_UNLISTED_NAMED` such files, one warning names the first and gives their number.
    """
    listed = {os.path.normpath(name) for name in listed}
    names = [name for name in _image_names(image_root, folders) if name not in listed]
    if len(names) <= MAX_UNLISTED_NAMED:
        return [Problem("warning", name, None, None, f"file {UNLISTED}") for name in names]
    message = f"{len(names)} image files {UNLISTED}: {first_names(names, written=shown)}"
    return [Problem("warning", str(image_root), None, None, message)]


def _image_names(image_root: Path | ImageSources, folders: Iterable[str]) -> Iterator[str]:
    """Yield the names of the files in these folders of a root that have an image extension."""
    parts = parts_of(image_root)
    for folder in folders:
        for name in chain.from_iterable(part.names(folder) for part in parts):
            if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES:
                yield name
