"""The splits of a data set by name, opened on every rank, with the same classes."""

from collections.abc import Callable
from pathlib import Path

from toolkit.data.formats import open_dataset
from toolkit.data.table import DetectionTable
from toolkit.distributed import first_on_each_machine, run_on_main
from toolkit.errors import BadInput

Say = Callable[[str], None]


def open_split(source: str, *, say: Say, listing: Path | None = None, **reading) -> DetectionTable:
    """`open_dataset` on every rank, one of each machine first, so that one validates and the others open the cache.

    Args:
        say: is told of the split in a line or two, on every rank; `accelerator.print` prints them once.
        listing: file that the main process writes what was left out or repaired to, one problem a line.
        reading: options of `open_dataset`.
    """
    first_on_each_machine(lambda: open_dataset(source, **reading))
    table = open_dataset(source, **reading)
    run_on_main(lambda: _write_problems(table, listing))
    boxes = table.num_boxes()
    say(f"{source}: {len(table)} images ({(boxes == 0).sum()} without objects), {boxes.sum()} boxes, "
        f"{len(table.categories)} classes")  # fmt: skip
    if table.problems and listing is not None:
        errors = sum(problem.severity == "error" for problem in table.problems)
        say(f"{source}: {errors} records left out, {len(table.problems) - errors} repaired or noted; see "
            f"{listing.name} in the run folder")  # fmt: skip
    return table


def open_splits(
    train: str,
    val: str,
    folder: Path,
    *,
    say: Say,
    max_train_images: int | None = None,
    overfit_images: int = 0,
    **reading,
) -> tuple[DetectionTable, DetectionTable]:
    """Training and validation data with the same classes; what was wrong with them is listed in `folder`.

    Args:
        say: as `open_split`.
        max_train_images: use the first so many images of the training data.
        overfit_images: train on the first so many, and evaluate on them; 0: all, and `val`.
        reading: options of `open_dataset`.

    Raises BadInput: the data cannot be read, or the two do not have the same classes in the same order.
    """
    table = open_split(train, say=say, listing=folder / "data_problems_train.txt", **reading)
    val_table = open_split(val, say=say, listing=folder / "data_problems_val.txt", **reading)
    check_same_classes(table, val_table)
    table = table.head(max_train_images or len(table))
    if overfit_images:
        table = val_table = table.head(overfit_images)
    return table, val_table


def check_same_classes(train: DetectionTable, val: DetectionTable) -> None:
    """Raises BadInput when training and validation data do not have the same classes in the same order."""
    ours, theirs = [c.name for c in train.categories], [c.name for c in val.categories]
    if ours != theirs:
        raise BadInput(
            f"training data has {len(ours)} classes {ours}, validation data {len(theirs)} {theirs}: give both files "
            "the same categories in the same order"
        )


def _write_problems(table: DetectionTable, listing: Path | None) -> None:
    if table.problems and listing is not None:
        listing.parent.mkdir(parents=True, exist_ok=True)
        listing.write_text("".join(f"{problem}\n" for problem in table.problems), encoding="utf-8")
