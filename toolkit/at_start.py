"""What a run needs, data and trained weights, looked for before anything slow; all that is wrong with it at once."""

from functools import partial
from pathlib import Path

from toolkit.data.splits import Say, check_same_classes, check_splits, open_split, open_splits
from toolkit.data.table import DetectionTable
from toolkit.errors import BadInput, all_faults
from toolkit.models.options import DetectorOptions
from toolkit.models.start import check_weights


def open_what_it_needs(
    train: str,
    val: str | float,
    test: str | float | None,
    options: DetectorOptions | None,
    folder: Path,
    *,
    say: Say,
    max_train_images: int | None = None,
    overfit_images: int = 0,
    **reading,
) -> tuple[DetectionTable, DetectionTable, DetectionTable | None]:
    """Training, validation and test data with the same classes; what was wrong with them is listed in `folder`.

    Splits and weights are looked for first. What is missing is said at once, since reading images may take long; they
    are read all the same.

    Args:
        test: as `val`; None: there are none.
        options: of the detector whose weights are looked for; None: a checkpoint has them.
        Others are those of `open_splits`.

    Raises BadInput with the faults of all of it.
    """
    problems = folder / "data_problems_test.txt"
    opening = partial(open_splits, train, val, folder, say=say, max_train_images=max_train_images,
                      overfit_images=overfit_images, **reading)  # fmt: skip
    calls = [partial(_look, [train, val, test], options, say, reading), opening]
    if test is not None:
        calls.append(partial(open_split, test, say=say, listing=problems, part_of=train, **reading))
    _, (table, val_table), *tested = all_faults(*calls)
    for other in tested:
        check_same_classes(table, other, "the test split")
    return table, val_table, tested[0] if tested else None


def _look(splits: list, options: DetectorOptions | None, say: Say, reading: dict) -> None:
    weights = [partial(check_weights, options)] if options is not None else []
    try:
        all_faults(partial(check_splits, *splits, **reading), *weights)
    except BadInput as error:
        say(f"this run cannot start; the data are read all the same, to name all that is wrong:\n{error}")
        raise
