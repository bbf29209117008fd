"""Splits of a data set, opened by name on every rank, and checks that their classes agree."""

import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from toolkit import index
from toolkit.base.distributed import first_on_each_machine, run_on_main, world
from toolkit.base.errors import BadInput, all_faults
from toolkit.base.files import near_names
from toolkit.base.text import shown
from toolkit.data.classes import describe_class_map
from toolkit.data.formats import is_several, open_dataset, pair_folders_and_splits, recognise, split_in
from toolkit.data.problem_lines import kind_of
from toolkit.data.table import DetectionTable

Say = Callable[[str], None]
CROWDS_ARE_SKIPPED = (
    "Crowd regions (COCO's iscrowd 1, VOC's difficult) are neither objects nor background in training and evaluation. "
    "CVAT writes every brush mask with iscrowd 1: to take them as single objects, give --data.crowds objects"
)
MOSTLY_EMPTY_SHARE = 0.95  # share of images without an object that is asked about
MANY_CROWDS_SHARE = 0.1  # share of crowd regions among all boxes that is warned of
FEW_IMAGES = 20  # below this, a few images more or less say nothing
MAX_PROBLEM_COLUMNS = 120  # characters of the first problem of a kind
MAX_KINDS = 3  # of problems of one severity, whose first ones are told
# Severities of problems, and their names in singular and plural.
COUNTED = (
    ("error", "record left out", "records left out"),
    ("warning", "warning", "warnings"),
    ("note", "note", "notes"),
)


class Fold(NamedTuple):
    """One of several folds of the training data: number `number`, counted from 1, of `of` folds."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


# Settings of the group `data` that are options of `open_dataset` under the same names.
READING = "path image_dir format name on_error max_image_pixels streaming keep_images_without_relations".split()
READING += ["white", "unlisted_classes", "classes", "crowds"]


def open_split(
    source: str | float, *, say: Say, listing: Path | None = None, part_of: str = "train", **reading
) -> DetectionTable:
    """Open a split by `open_dataset` on every rank.

    One rank of each machine does so first, and validates the data; then the others open the table from the cache.

    Args:
        source: as of `open_dataset`; or a share or fold (see `share_of`) of the split `part_of`: then the held-out
            images are returned.
        say: function that is called on every rank with a line or two about the split; `accelerator.print` prints them
            once.
        listing: file to which the main process writes the problems of the data, one a line; None: no file.
        reading: options of `open_dataset`. With `classes`, old names that this split lacks are ignored by default
            (`classes_must_exist`), since the classes of a run are those of its training data.
    """
    reading.setdefault("classes_must_exist", False)
    share = share_of(source)
    cache_dir = reading.get("cache_dir")
    opening = partial(open_dataset, part_of if share else source, **reading)
    if share:
        hold_out = index.tool("hold_out")
        return _opened(lambda: hold_out(opening(), share, cache_dir)[1], f"{share} of {part_of}", say, None)
    return _opened(opening, source, say, listing)


def check_splits(
    *sources: str | float | None,
    path: str | list | None = None,
    format: str = "auto",
    name: str | None = None,
    **_,
) -> None:
    """Check that these splits exist, before any annotation or image is read.

    Args:
        sources: as of `open_split`; None is ignored.
        path, format, name: options of `open_dataset`; its other options are ignored.

    Raises BadInput naming all splits that do not exist.
    """
    wanted = [source for source in sources if source is not None and not share_of(source)]
    named = [source if is_several(source) else str(source) for source in wanted]
    if is_several(path, *named):
        of_sources = all_faults(*[partial(pair_folders_and_splits, path, source) for source in named])
        checks = []
        for one, source in chain.from_iterable(of_sources):
            checks.append(partial(check_splits, source, path=one, format=format, name=name))
        all_faults(*checks)
    elif path is not None:
        folder = recognise(path, _folder_format(format))
        all_faults(*[partial(split_in, folder, source) for source in named])
    elif name is None:
        files = [Path(source).expanduser() for source in named if source.lower().endswith(".json")]
        missing = [file for file in files if not file.exists()]
        if missing:
            raise BadInput(f"{file}: no such annotation file{near_names(file)}" for file in missing)


def open_splits(
    train: str,
    val: str | float,
    folder: Path,
    *,
    say: Say,
    max_train_images=None,
    overfit_images: int = 0,
    **reading,
) -> tuple[DetectionTable, DetectionTable]:
    """Open training and validation data with the same classes, and report what was recognised and images in both. The
    problems of each split that is read are listed in `folder/data_problems_<split>.txt`.

    Args:
        val: as `train`; or a share or fold (see `share_of`): then this part of the training data is held out.
        say: as of `open_split`.
        max_train_images: the number of first images of the training data that are used; None: all.
        overfit_images: the number of first training images to train on and to evaluate on; 0: train on all, and
            evaluate on `val`.
        reading: options of `open_dataset`.

    Raises BadInput: the data cannot be read, with the faults of both splits; or the two do not have the same classes in
        the same order.
    """
    path = reading.get("path")
    if path:
        for one in path if is_several(path) else [path]:
            say(str(recognise(one, _folder_format(reading.get("format", "auto")))))
    train_listing = folder / "data_problems_train.txt"
    val_listing = folder / "data_problems_val.txt"
    opening = partial(open_split, train, say=say, listing=train_listing, classes_must_exist=True, **reading)
    share = share_of(val)
    if share:
        whole = opening()
        hold_out = index.tool("hold_out")
        first_on_each_machine(lambda: hold_out(whole, share, reading.get("cache_dir")))
        table, val_table = hold_out(whole, share, reading.get("cache_dir"))
        say(describe_held_out_share(len(val_table), len(whole), share))
    else:
        opening_val = partial(open_split, val, say=say, listing=val_listing, **reading)
        table, val_table = all_faults(opening, opening_val)
        val_table = _in_classes_of(table, val_table, reading)
        _warn_of_overlap(table, val_table, ("the training data", "the validation data"), say)
    check_same_classes(table, val_table)
    if max_train_images and max_train_images < len(table):
        say(f"data.max_train_images: the first {max_train_images} of {len(table)} training images are used")
        table = table.head(max_train_images)
    if overfit_images:
        table = table.head(overfit_images)
        val_table = table
        say(f"data.overfit_batches: the first {len(table)} training images are both trained and evaluated on")
    return table, val_table


def share_of(source: str | float) -> float | Fold | None:
    """Parse the setting `data.val` if it is a share or a fold of the training data.

    A share is a number or a percentage (0.2 and "20%" return 0.2), a fold is a text such as "2/5", the second of five.
    Returns None for any other text, which names a split or a file, and for a list.

    Raises BadInput: a share that is not between 0 and 1, or a fold that does not exist.
    """
    text = "" if is_several(source) else str(source).strip()
    expected = "a split, a file, a share of the training data between 0 and 1 (0.2 or 20%), or a fold (1/5 to 5/5)"
    fold = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text)
    if fold:
        share = Fold(int(fold[1]), int(fold[2]))
        if not 1 <= share.number <= share.of or share.of < 2:
            raise BadInput(f"data.val is {source}; expected {expected}")
        return share
    number = text.removesuffix("%")
    try:
        share = float(number) / (100 if number != text else 1)
    except ValueError:
        return None
    if not 0 < share < 1:
        raise BadInput(f"data.val is {source}; expected {expected}")
    return share


def describe_held_out_share(held: int, images: int, share: float | Fold) -> str:
    """Return a sentence that says how many of the images were held out for validation.

    It is followed by a warning if their number is far from the share that was asked for.
    """
    share = 1 / share.of if isinstance(share, Fold) else share
    text = f"validation: {held} of these {images} images ({held / images:.0%}, asked for: {share:.0%}), held out by "
    text += f"their content; training: {images - held}"
    if not 2 / 3 < held / (images * share) < 1.5 and abs(held - images * share) >= 2:
        text += "\nwarning: this is far from the share that was asked for, because images that look alike are held out "
        text += "together, or because there are few images; try another data.val, or give a validation split"
    return text


def _opened(opening: Callable[[], DetectionTable], source: str, say: Say, listing: Path | None) -> DetectionTable:
    first_on_each_machine(opening)
    table = opening()
    run_on_main(lambda: _write_problems(table, listing))
    classes = len(table.categories)
    without = (table.num_objects() == 0).sum()
    source = table.name if is_several(source) or table.sets else source
    say(f"{source}: {len(table)} images ({without} without objects), {table.described_boxes()}, {classes} classes")
    crowds = many_crowds(table)
    if crowds:
        say(f"warning: {source}: {crowds}")
    if table.class_map:
        say(f"data.classes: {describe_class_map(table.class_map)}; classes now: {', '.join(table.class_names)}")
    if table.sets:
        joined = f"classes joined by name: {', '.join(table.class_names)}"
        say("\n".join([f"{len(table.sets)} data sets, {joined}", *notes_of(table)]))
    if table.problems and listing is not None:
        say(f"{source}: {what_was_wrong(table)}; see {listing.name} in the run folder")
    return table


def counts_of(table: DetectionTable) -> dict:
    """Return {"images", "boxes"}, the numbers of both in a table, as JSON values; with "crowd_regions", which are not
    among the boxes, if there are any.

    For a joined table `sets` has the same numbers for each of its sets, by name.
    """
    objects = table.num_objects()
    crowds = table.num_boxes() - objects

    def of_rows(rows: np.ndarray) -> dict:
        numbers = {"images": int(rows.sum()), "boxes": int(objects[rows].sum())}
        if crowds[rows].any():
            numbers["crowd_regions"] = int(crowds[rows].sum())
        return numbers

    counts = of_rows(np.ones(len(table), bool))
    if table.sets:
        of_image = table.set_of_image()
        counts["sets"] = {one.name: of_rows(of_image == number) for number, one in enumerate(table.sets)}
    return counts


def counted_boxes(counts: Mapping[str, int]) -> str:
    """Return the numbers of images and boxes of `counts_of` as text; crowd regions are named apart, if there are any.
    """
    text = f"{counts['images']:,} images, {counts['boxes']:,} boxes"
    crowds = counts.get("crowd_regions", 0)
    return f"{text}, {crowds:,} crowd regions" if crowds else text


def notes_of(table: DetectionTable) -> list[str]:
    """Return a line for each set of a table, which must be joined: images, boxes, and the classes that it does not
    label."""
    lines = []
    for one, counts in zip(table.sets, counts_of(table)["sets"].values(), strict=True):
        unlabelled = [name for row, name in enumerate(table.class_names) if row not in one.classes]
        text = f"  {one.name}: {counted_boxes(counts)}"
        if unlabelled:
            text += f"; does not label {', '.join(unlabelled)} (data.unlisted_classes unknown)"
        lines.append(text)
    return lines


def what_was_wrong(table: DetectionTable) -> str:
    """Return a text with the numbers of errors, warnings and notes of a table, and the first of each kind; "" if none.
    """
    parts = []
    for severity, one, several in COUNTED:
        found = [problem for problem in table.problems if problem.severity == severity]
        if not found:
            continue
        found.sort(key=lambda problem: problem.image_id is not None)  # what concerns the whole of the data comes first
        told: dict[str, str] = {}
        for problem in found:
            text = f"{Path(problem.file).name}: {problem.message}"
            told.setdefault(kind_of(problem.message), shown(text, MAX_PROBLEM_COLUMNS))
        firsts = "; ".join(list(told.values())[:MAX_KINDS])
        parts.append(f"1 {one} ({firsts})" if len(found) == 1 else f"{len(found)} {several} (first {firsts})")
    return "; ".join(parts)


def _folder_format(format: str) -> str:
    return "auto" if format == "shapes" else format


def mostly_empty(table: DetectionTable) -> str:
    """Return a warning if hardly an image has an object, which names the first images without one; else return "".

    Crowd regions are not objects. Data whose label files were not found look like this, and a detector would learn to
    find nothing. In a joined table each data set is checked by itself.
    """
    is_empty = table.num_objects() == 0
    has_crowds = table.num_boxes() > 0
    set_of_image = table.set_of_image()
    faults = []
    for number in np.unique(set_of_image).tolist():
        of_set = np.flatnonzero(set_of_image == number)
        empty = of_set[is_empty[of_set]]
        hardly_any = len(of_set) >= FEW_IMAGES and len(empty) > MOSTLY_EMPTY_SHARE * len(of_set)
        if hardly_any or len(empty) == len(of_set):
            names = ", ".join(table.image_name(index) for index in empty[:3].tolist())
            of = f" of {table.sets[number].name}" if table.sets else ""
            fault = f"{len(empty)} of {len(of_set)} images{of} have no object, such as {names}"
            crowds_alone = int(has_crowds[empty].sum())
            if crowds_alone:
                fault += f"; {crowds_alone} of them have only crowd regions. {CROWDS_ARE_SKIPPED}"
            faults.append(fault)
    return "; ".join(faults)


def many_crowds(table: DetectionTable) -> str:
    """Return a sentence if at least a tenth of the boxes are crowd regions, with the usual reason; else return ""."""
    boxes = int(table.num_boxes().sum())
    crowds = boxes - int(table.num_objects().sum())
    if not crowds or crowds < MANY_CROWDS_SHARE * boxes:
        return ""
    return f"{crowds} of {boxes} boxes are crowd regions. {CROWDS_ARE_SKIPPED}"


def check_not_empty(table: DetectionTable, is_allowed: bool) -> None:
    """Raise BadInput if hardly an image of the training data has an object, unless that is allowed."""
    fault = "" if is_allowed else mostly_empty(table)
    if fault:
        labels = "" if CROWDS_ARE_SKIPPED in fault else " Were the labels found?"
        raise BadInput(
            f"{table.name}: {fault}.{labels} `python scripts/check_data.py` shows what is read; if this is intended, "
            "set --data.allow_mostly_empty true"
        )


def shared_images(first: DetectionTable, second: DetectionTable) -> int:
    """Return how many images of the second split are in the first split too, by the paths of their files.

    Embedded images have no files. If one of the splits has embedded images, the result is all images of the second
    split if the two splits are identical, and 0 if they are not.
    """
    if first.image_root is None or second.image_root is None:
        return len(second) if first.fingerprint == second.fingerprint else 0
    return len(_image_files(first) & _image_files(second))


def _image_files(table: DetectionTable) -> set[str]:
    names = table.file_names()
    return {os.path.normpath(f"{table.image_root}/{name}") for name in names}


def overlap(first: DetectionTable, second: DetectionTable, names: tuple[str, str]) -> str:
    """Return a sentence about the images that two splits share, see `shared_images`; "" if they share none.

    names: of the two splits, for the sentence.
    """
    shared = shared_images(first, second)
    if not shared:
        return ""
    if shared == len(first) == len(second):
        return f"{names[0]} and {names[1]} have the same {shared} images"
    return f"{shared} of the {len(second)} images of {names[1]} are in {names[0]} too"


def check_same_classes(train: DetectionTable, other: DetectionTable, name: str = "validation data") -> None:
    """Raise BadInput if training and other data do not have the same classes in the same order."""
    train_names = train.class_names
    other_names = other.class_names
    if train_names != other_names:
        raise BadInput(
            f"training data has {len(train_names)} classes {train_names}, {name} {len(other_names)} {other_names}: "
            f"{_odd_classes(train, other)}"
        )


def _odd_classes(train: DetectionTable, other: DetectionTable) -> str:
    """Say which classes only one of two tables with different classes has, and what to do."""
    only_train = [each for each in train.class_names if each not in other.class_names]
    only_other = [each for each in other.class_names if each not in train.class_names]
    texts = []
    if only_other:
        advice = "list the same classes in both"
        texts.append(f"{other.name} lists {_quoted(only_other)}, which {train.name} does not: {advice}")
    if only_train:
        dropped = ", ".join(f"{each}: null" for each in only_train)
        advice = f"add it there, or drop it by --data.classes '{{{dropped}}}'"
        texts.append(f"{train.name} lists {_quoted(only_train)}, which {other.name} does not: {advice}")
    return "; ".join(texts) or "give both files the same categories in the same order"


def _quoted(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def _write_problems(table: DetectionTable, listing: Path | None) -> None:
    if table.problems and listing is not None:
        listing.parent.mkdir(parents=True, exist_ok=True)
        listing.write_text("".join(f"{problem}\n" for problem in table.problems), encoding="utf-8")


def open_all_splits(
    train: str,
    val: str | float,
    test: str | float | None,
    folder: Path,
    *checks: Callable,
    say: Say,
    **options,
) -> tuple[DetectionTable, DetectionTable, DetectionTable | None]:
    """Open training and validation data by `open_splits`, and test data with the same classes.

    First `check_splits` and the `checks`, functions without arguments, are called. If they fail, the main process
    prints their errors at once, because reading images may take long; then the data are read all the same, to find all
    faults.

    test: as `val`; None: there are no test data, and the third result is None. options: as of `open_splits`.

    Raises BadInput with the faults of the checks, which it says are `told`, and of all data.
    """
    reading = {key: value for key, value in options.items() if key not in ("max_train_images", "overfit_images")}

    told = []

    def look() -> None:
        try:
            all_faults(partial(check_splits, train, val, test, **reading), *checks)
        except BadInput as error:
            told.extend(error.problems)
            if world()[0] == 0:
                print(f"error: {error}", file=sys.stderr, flush=True)
            say("The data are checked too, so that all problems are listed at once.")
            raise

    calls = [look, partial(open_splits, train, val, folder, say=say, **options)]
    if test is not None:
        listing = folder / "data_problems_test.txt"
        calls.append(partial(open_split, test, say=say, listing=listing, part_of=train, **reading))
    try:
        _, (table, val_table), *tested = all_faults(*calls)
    except BadInput as error:
        error.told = told
        raise
    if not tested:
        return table, val_table, None
    test_table = _in_classes_of(table, tested[0], reading)
    check_same_classes(table, test_table, "the test split")
    _warn_of_overlap(table, test_table, ("the training data", "the test split"), say)
    _warn_of_overlap(val_table, test_table, ("the validation data", "the test split"), say)
    return table, val_table, test_table


def _warn_of_overlap(first: DetectionTable, second: DetectionTable, names: tuple[str, str], say: Say) -> None:
    text = overlap(first, second, names)
    if text:
        say(f"warning: {text}: metrics on these images say nothing about other images")


def _in_classes_of(train: DetectionTable, other: DetectionTable, reading: dict) -> DetectionTable:
    """Call `with_classes_of`; only joined data have other classes."""
    if not train.sets:
        return other
    from toolkit.data.joining import with_classes_of  # here, since few trainings have several data sets

    return with_classes_of(other, train, reading.get("unlisted_classes", "unknown"))
