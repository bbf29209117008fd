"""The data sets of a run, opened as its settings say."""

from functools import partial
from typing import Any

from toolkit.data.formats import is_several
from toolkit.data.splits import READING, check_not_empty, open_all_splits, open_split, share_of
from toolkit.data.table import DetectionTable
from toolkit.evaluation.coco import check_ground_truth
from toolkit.models.start import check_weights


def open_tables(s: Any) -> tuple[DetectionTable, DetectionTable]:
    """Open training and validation data for a `Session`, and its test split; see `Session.open_data`."""
    c = s.config.data
    reading = {key: getattr(c, key) for key in READING}
    apart = not share_of(c.val) and c.overfit_batches is None and not is_several(c.path, c.train)
    if s.config.run.eval_only and s.checkpoint is not None and apart:
        table = val_table = open_split(c.val, say=s.say, listing=s.staging / "data_problems_val.txt", **reading)
    else:
        test = None if s.config.run.eval_only else s.config.eval.test_split
        checks = [] if s.checkpoint else [partial(check_weights, s.config.model)]  # a checkpoint has the weights
        reading["max_train_images"] = c.max_train_images
        reading["overfit_images"] = (c.overfit_batches or 0) * c.batch_size_per_device * s.accelerator.num_processes
        opened = open_all_splits(c.train, c.val, test, s.staging, *checks, say=s.say, **reading)
        table, val_table, s.test_table = opened
        check_not_empty(table, c.allow_mostly_empty)
    for note in check_ground_truth(val_table):
        s.say(note)
    return table, val_table
