"""Checks before anything slow: data and trained weights that a run needs, all faults reported at once, and whether its
largest batch fits into memory."""

from functools import partial
from pathlib import Path

import torch

from toolkit.data.batches import collate
from toolkit.data.sampling import SampleKey
from toolkit.data.splits import Say, check_same_classes, check_splits, open_split, open_splits
from toolkit.data.table import DetectionTable
from toolkit.errors import BadInput, all_faults
from toolkit.models.options import DetectorOptions
from toolkit.models.start import check_weights
from toolkit.step.freezing import eval_mode
from toolkit.step.gradients import drop_gradients
from toolkit.step.memory import describe_batch, largest_samples, naming_the_batch, state_stand_in
from toolkit.step.meters import peak_memory_mb
from toolkit.step.nan_report import rerun_window


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


def probe_memory(t, count: int) -> None:
    """Forward and backward of the batch that needs most memory beside the optimizer's state, and one evaluation batch;
    changes nothing. `t` is a `toolkit.training.Training`.

    The images are the largest and the most crowded of the training data, as the augmentation of epoch 0 makes them.

    Args:
        count: images of a micro-batch on one device.

    Raises:
        BadInput: memory runs out; names the batch.
    """
    dataset, size_hw = t.loader.dataset.dataset, None
    if t.sampler.sizes is not None:
        size_hw, count = t.sampler.sizes.largest(count)
    chosen = largest_samples(dataset.table.sizes_hw(), dataset.table.num_boxes(), count)
    worst = collate([dataset[SampleKey(0, index, size_hw)] for index in chosen], t.detector.stride)
    t.guard.snapshot(t.detector)
    t.detector.train()
    with naming_the_batch([worst]):
        state = state_stand_in(getattr(t.optimizer, "optimizer", t.optimizer))
        ones = [dict.fromkeys(t.detector.denominator_names, 1.0)]
        rerun_window(t.detector, t.weights, [worst], ones, step=t.step, seed=t.seed, rank=0,
                     precision=t.accelerator.mixed_precision)  # fmt: skip
    del state
    drop_gradients(t.detector)
    drop_gradients(t.weights)
    t.guard.restore(t.detector)
    batch = next(iter(t.validation.loader))
    with naming_the_batch([batch]), torch.no_grad(), eval_mode(t.detector), t.accelerator.autocast():
        if len(batch.targets):
            moved = batch.to(t.accelerator.device)
            t.detector(moved.images, moved.sizes, moved.targets)
    t.log.say(f"memory probe: {describe_batch(worst)}; peak {peak_memory_mb():.0f} MiB")
