"""Opens the splits of a data set by name on every rank, and checks that their classes agree."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from toolkit.data.formats import open_dataset
from toolkit.data.formats.folders import recognise, split_in
from toolkit.data.near_duplicates import VERSION, held_out, looks_of
from toolkit.data.table import DetectionTable
from toolkit.data.table_cache import cache_root, open_table, write_selection
from toolkit.distributed import first_on_each_machine, run_on_main
from toolkit.errors import BadInput, all_faults

Say = Callable[[str], None]
# Settings of the group `data` that are options of `open_dataset` under the same names.
READING = ("path", "image_dir", "format", "name", "on_error", "max_image_pixels", "streaming",
           "keep_images_without_relations")  # fmt: skip


def open_split(
    source: str | float, *, say: Say, listing: Path | None = None, part_of: str = "train", **reading
) -> DetectionTable:
    """`open_dataset` on every rank, one of each machine first, so that one validates and the others open the cache.

    Args:
        source: as `open_dataset`; or a share between 0 and 1 of `part_of`, which `hold_out` holds out of it.
        say: is told of the split in a line or two, on every rank; `accelerator.print` prints them once.
        listing: file that the main process writes what was left out or repaired to, one problem a line.
        reading: options of `open_dataset`.
    """
    if share_of(source):
        return _opened(lambda: hold_out(open_dataset(part_of, **reading), share_of(source), **_cache(reading))[1],
                       f"{share_of(source)} of {part_of}", say, None)  # fmt: skip
    return _opened(lambda: open_dataset(source, **reading), source, say, listing)


def check_splits(
    *sources: str | float | None, path: str | Path | None = None, format: str = "auto", name: str | None = None, **_
) -> None:
    """Whether there are such splits, before any annotation or image is read.

    Args:
        sources: as of `open_split`; None is none. Options are those of `open_dataset`.

    Raises BadInput naming all that are not there.
    """
    named = [str(source) for source in sources if source is not None and not share_of(source)]
    if path is not None:
        found = recognise(path, _folder_format(format))
        all_faults(*(partial(split_in, found, source) for source in named))
    elif name is None:
        files = [Path(source).expanduser() for source in named if source.lower().endswith(".json")]
        if missing := [file for file in files if not file.exists()]:
            raise BadInput(f"{file}: no such annotation file" for file in missing)


def open_splits(
    train: str,
    val: str | float,
    folder: Path,
    *,
    say: Say,
    max_train_images: int | None = None,
    overfit_images: int = 0,
    **reading,
) -> tuple[DetectionTable, DetectionTable]:
    """Training and validation data with the same classes; what was wrong with them is listed in `folder`.

    Args:
        val: as `train`, or a share between 0 and 1 of the training data, which is held out of it (`hold_out`).
        say: as `open_split`.
        max_train_images: use the first so many images of the training data.
        overfit_images: train on the first so many, and evaluate on them; 0: all, and `val`.
        reading: options of `open_dataset`.

    Raises BadInput: the data cannot be read, with the faults of both; or the two do not have the same classes in the
        same order.
    """
    if reading.get("path") is not None:
        say(str(recognise(reading["path"], _folder_format(reading.get("format", "auto")))))
    listings = [folder / f"data_problems_{name}.txt" for name in ("train", "val")]
    opening = partial(open_split, train, say=say, listing=listings[0], **reading)
    if share := share_of(val):
        table = opening()
        first_on_each_machine(lambda: hold_out(table, share, **_cache(reading)))
        pair = hold_out(table, share, **_cache(reading))
        say(share_that_came_out(len(pair[1]), len(table), share))
        table, val_table = pair
    else:
        table, val_table = all_faults(opening, partial(open_split, val, say=say, listing=listings[1], **reading))
    check_same_classes(table, val_table)
    table = table.head(max_train_images or len(table))
    if overfit_images:
        table = val_table = table.head(overfit_images)
    return table, val_table


def share_of(source: str | float) -> float | None:
    """The share that `data.val` says, as a number or in percent; None: it names a split or a file."""
    number = str(source).strip().removesuffix("%")
    try:
        share = float(number) / (100 if number != str(source).strip() else 1)
    except ValueError:
        return None
    if not 0 < share < 1:
        raise BadInput(f"data.val is {source}; expected a split, a file, or a share of the training data between 0 and "
                       "1 (0.2 or 20%)")  # fmt: skip
    return share


def share_that_came_out(held: int, images: int, share: float) -> str:
    """Says how many of the images were held out, with a warning where that is far from the share that was asked for."""
    text = f"validation: {held} of these {images} images ({held / images:.0%}, asked for: {share:.0%}), held out by "
    text += f"their content; training: {images - held}"
    if not 2 / 3 < held / (images * share) < 1.5 and abs(held - images * share) >= 2:
        text += ("\nwarning: this is far from the share that was asked for, because images that look alike are held "
                 "out together, or there are few; try another data.val, or give a split of its own")  # fmt: skip
    return text


def hold_out(
    table: DetectionTable, share: float, cache_dir: str | Path | None = None
) -> tuple[DetectionTable, DetectionTable]:
    """(rest, about `share` of a table), cached. Near duplicates stay together; see `toolkit.data.near_duplicates`."""
    kept = []
    files = [cache_root(cache_dir) / "tables" / f"{table.fingerprint}-{share:g}-{part}-{VERSION}.json"
             for part in ("rest", "held")]  # fmt: skip
    for file in files:
        found = open_table(file)
        if found and found[0].image_root == table.image_root:
            kept.append(dataclasses.replace(found[0], name=table.name))
    if len(kept) == 2:
        return kept[0], kept[1]
    held = held_out(looks_of(table, cache_dir), share)
    rest, part = (write_selection(table, np.flatnonzero(rows), file, table.name)
                  for rows, file in zip((~held, held), files, strict=True))  # fmt: skip
    return rest, part


def _opened(opening: Callable[[], DetectionTable], source: str, say: Say, listing: Path | None) -> DetectionTable:
    first_on_each_machine(opening)
    table = opening()
    run_on_main(lambda: _write_problems(table, listing))
    boxes = table.num_boxes()
    say(f"{source}: {len(table)} images ({(boxes == 0).sum()} without objects), {boxes.sum()} boxes, "
        f"{len(table.categories)} classes")  # fmt: skip
    if table.problems and listing is not None:
        errors = sum(problem.severity == "error" for problem in table.problems)
        say(f"{source}: {errors} records left out, {len(table.problems) - errors} repaired or noted; see "
            f"{listing.name} in the run folder")  # fmt: skip
    return table


def _folder_format(format: str) -> str:
    return "auto" if format == "shapes" else format


def _cache(reading: dict) -> dict:
    return {key: reading[key] for key in ("cache_dir",) if key in reading}


def check_same_classes(train: DetectionTable, other: DetectionTable, name: str = "validation data") -> None:
    """Raises BadInput when training and other data do not have the same classes in the same order."""
    ours, theirs = [c.name for c in train.categories], [c.name for c in other.categories]
    if ours != theirs:
        raise BadInput(
            f"training data has {len(ours)} classes {ours}, {name} {len(theirs)} {theirs}: give both files "
            "the same categories in the same order"
        )


def _write_problems(table: DetectionTable, listing: Path | None) -> None:
    if table.problems and listing is not None:
        listing.parent.mkdir(parents=True, exist_ok=True)
        listing.write_text("".join(f"{problem}\n" for problem in table.problems), encoding="utf-8")


def open_all_splits(
    train: str, val: str | float, test: str | float | None, folder: Path, *checks: Callable, say: Say, **options
) -> tuple[DetectionTable, DetectionTable, DetectionTable | None]:
    """`open_splits`, and the test data (None: there are none) with the same classes.

    Splits are looked for first, and `checks` are called. What fails there is said at once, since reading images may
    take long; they are read all the same.

    Raises BadInput with the faults of all of it.
    """
    reading = {key: value for key, value in options.items() if key not in ("max_train_images", "overfit_images")}

    def look() -> None:
        try:
            all_faults(partial(check_splits, train, val, test, **reading), *checks)
        except BadInput as error:
            say(f"this run cannot start; the data are read all the same, to name all that is wrong:\n{error}")
            raise

    calls = [look, partial(open_splits, train, val, folder, say=say, **options)]
    if test is not None:
        listing = folder / "data_problems_test.txt"
        calls.append(partial(open_split, test, say=say, listing=listing, part_of=train, **reading))
    _, (table, val_table), *tested = all_faults(*calls)
    for other in tested:
        check_same_classes(table, other, "the test split")
    return table, val_table, tested[0] if tested else None
