"""The last folder of a run: a transformers detector that other programs load without this project."""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging


def save_transformers_folder(
    model: PreTrainedModel, processor, processor_size: Mapping[str, int] | None, folder: Path, categories: Sequence
) -> None:
    """Write weights, config and image processor as `AutoModelForObjectDetection` and `AutoImageProcessor` load them.

    Args:
        processor: transformers image processor without its size.
        processor_size: its size, as transformers spells it; None: images keep their size.
        categories: classes in the order of the labels; `categories.json` keeps their original ids.

    The model is saved with `auxiliary_loss=False`: loading it for use needs no losses, and transformers' own auxiliary
    outputs of DETR change the last layer.
    """
    transformers_logging.disable_progress_bar()  # one shard, written at once
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if processor_size is not None:
        processor.size = dict(processor_size)
    processor.save_pretrained(folder)
    training_config = model.config
    model.config = copy.deepcopy(training_config)
    try:
        model.config.auxiliary_loss = False
        model.config.id2label = {i: category.name for i, category in enumerate(categories)}
        model.config.label2id = {category.name: i for i, category in enumerate(categories)}
        # Batch norms that learned are frozen buffers for whoever loads the folder, which have no such counter.
        weights = {k: v for k, v in model.state_dict().items() if not _counts_batches_of_frozen_norm(model, k)}
        model.save_pretrained(folder, state_dict=weights)
    finally:
        model.config = training_config
    table = [{"label": i, "id": category.id, "name": category.name} for i, category in enumerate(categories)]
    (folder / "categories.json").write_text(json.dumps(table, indent=2) + "\n")


def _counts_batches_of_frozen_norm(model: PreTrainedModel, key: str) -> bool:
    frozen_when_loaded = model.config.backbone_config.freeze_batch_norm_2d
    return frozen_when_loaded and ".backbone." in key and key.endswith("num_batches_tracked")
