"""The splits of a data set by name, opened on every rank, with the same classes."""

from pathlib import Path

from toolkit.data.formats import open_dataset
from toolkit.data.table import DetectionTable
from toolkit.distributed import run_on_main, world
from toolkit.errors import BadInput
from toolkit.evaluation.coco import check_ground_truth


def open_split(source: str, listing: Path | None = None, **options) -> DetectionTable:
    """`open_dataset` on every rank, the main process first, so that one validates and the others open the cache.

    listing: file that what was left out or repaired is written to, one problem a line.
    """
    run_on_main(lambda: open_dataset(source, **options) and None)
    table = open_dataset(source, **options)
    if world()[0] == 0:
        boxes = table.num_boxes()
        print(f"{source}: {len(table)} images ({(boxes == 0).sum()} without objects), {boxes.sum()} boxes, "
              f"{len(table.categories)} classes", flush=True)  # fmt: skip
    if world()[0] == 0 and table.problems and listing is not None:
        listing.parent.mkdir(parents=True, exist_ok=True)
        listing.write_text("".join(f"{problem}\n" for problem in table.problems), encoding="utf-8")
        errors = sum(problem.severity == "error" for problem in table.problems)
        print(f"{source}: {errors} records left out, {len(table.problems) - errors} repaired or noted; see {listing}")
    return table


def open_splits(
    train: str,
    val: str,
    folder: Path,
    *,
    max_train_images: int | None = None,
    overfit_images: int = 0,
    **options,
) -> tuple[DetectionTable, DetectionTable]:
    """Training and validation data with the same classes; what was wrong with them is listed in `folder`.

    Args:
        max_train_images: use the first so many images of the training data.
        overfit_images: train on the first so many, and evaluate on them; 0: all, and `val`.
        options: those of `open_dataset`.
    """
    table = open_split(train, listing=folder / "data_problems_train.txt", **options)
    val_table = open_split(val, listing=folder / "data_problems_val.txt", **options)
    check_same_classes(table, val_table)
    table = table.head(max_train_images or len(table))
    if overfit_images:
        table = val_table = table.head(overfit_images)
    for note in check_ground_truth(val_table):
        if world()[0] == 0:
            print(note, flush=True)
    return table, val_table


def check_same_classes(train: DetectionTable, val: DetectionTable) -> None:
    """Raises BadInput when training and validation data do not have the same classes in the same order."""
    ours, theirs = [c.name for c in train.categories], [c.name for c in val.categories]
    if ours != theirs:
        raise BadInput(
            f"training data has {len(ours)} classes {ours}, validation data {len(theirs)} {theirs}: give both files "
            "the same categories in the same order"
        )
