"""Writes and reads the `final/` folder of a run: a transformers detector, which loads without this project, or a folder
of this toolkit's own format.

It also changes settings of prediction in a trained detector, see `with_inference_settings`.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from toolkit import index
from toolkit.base.errors import BadInput
from toolkit.base.files import read_json
from toolkit.base.public import without_machine
from toolkit.base.text import shown
from toolkit.data.table import Category
from toolkit.models import build_detector, options_class
from toolkit.models.weights.difference import difference
from toolkit.models.weights.weight_files import read_tensors
from toolkit.run.checkpoint_content import FORMAT_VERSION, stale
from toolkit.run.layers import COMMAND_LINE, layer_of, nested
from toolkit.run.settings_check import check_values

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_RESIZED_SIDE_PX = 20_000  # pixels that an image may be resized to
DECODING_FILE = "decoding.json"
KEYS_OF_SIZE = ({"height", "width"}, {"shortest_edge", "longest_edge"}, {"shortest_edge"})


def save_transformers_folder(
    model: "PreTrainedModel", processor, processor_size: Mapping[str, int] | None, folder: Path, categories: Sequence
) -> None:
    """Write weights, config and image processor so that `AutoModelForObjectDetection` and `AutoImageProcessor` load
    them; also `categories.json` and a model card.

    Args:
        processor: transformers' image processor, whose size is set here.
        processor_size: the size to which images are resized, in the form of transformers; None: the processor keeps
            its size.
        categories: classes in the order of the labels; `categories.json` keeps their original ids.

    The model is saved with `auxiliary_loss=False`, because the loaded model needs no losses, and transformers' own
    auxiliary outputs of DETR change the last layer.
    """
    from transformers.utils import logging as transformers_logging  # takes seconds, and not every detector needs it

    transformers_logging.disable_progress_bar()  # one shard, written at once
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if processor_size is not None:
        processor.size = dict(processor_size)
    processor.save_pretrained(folder)
    training_config = model.config
    names = dict(enumerate(category.name for category in categories))
    model.config = copy.deepcopy(training_config)
    model.config._name_or_path = ""  # otherwise the path of the initial weights on this machine
    try:
        model.config.auxiliary_loss = False
        model.config.id2label = names
        model.config.label2id = {name: i for i, name in names.items()}
        # Trained batch norms are loaded from this folder as frozen buffers, which have no such counter.
        weights = {}
        for name, tensor in model.state_dict().items():
            if not _counts_batches_of_frozen_norm(model, name):
                weights[name] = tensor
        model.save_pretrained(folder, state_dict=weights)
    finally:
        model.config = training_config
    _write_about(folder, categories)


def save_detector_folder(
    detector: nn.Module, processor_size: Mapping[str, int] | None, folder: Path, categories: Sequence
) -> None:
    """Write `model.safetensors`, `config.json` (all that `build_detector` needs), `categories.json` and a model card.

    `load_detector_folder` reads the folder. This format is for detectors that transformers does not have.

    Args:
        processor_size: the size to which images are resized, see `toolkit.data.pipeline.processor_size`; None: images
            keep their size.
        categories: classes in the order of the labels.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Clones: a detector of transformers below a scene graph has heads with two names, which safetensors refuses.
    weights = {}
    for name, tensor in detector.state_dict().items():
        weights[name] = tensor.clone(memory_format=torch.contiguous_format)
    save_file(weights, folder / "model.safetensors")
    options = without_machine(detector.resolved_options())  # `pretrained` may be a path of this machine
    config = {"format": FORMAT_VERSION, "model": options, "processor_size": processor_size}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_about(folder, categories)


def load_detector_folder(
    folder: Path, settings: Mapping = MappingProxyType({})
) -> tuple[nn.Module, list[Category], dict[str, int] | None]:
    """Load a detector that `save_detector_folder` wrote; return the detector in evaluation mode, its categories, and
    the size to which its images are resized.

    settings: settings by key that replace those of the detector, see `with_inference_settings`.

    Raises:
        BadInput: the folder is missing or was not written by this toolkit, or settings cannot be changed.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    categories = read_categories(folder / "categories.json")
    fault = stale(config.get("format", 1))
    if fault:
        raise BadInput(f"{folder} {fault}")
    try:
        options = with_inference_settings(config["model"], settings)
        size = checked_size(config["processor_size"])
        kinds = {"model": options_class(options["architecture"])}
        faults = check_values(layer_of(str(folder / "config.json"), {"model": config["model"]}), kinds)
        if faults:
            raise BadInput(faults)
        detector = build_detector(**options, class_names=[category.name for category in categories])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise BadInput(f"{folder}: not the final/ folder of a run of this toolkit: {error!r}") from error
    weights = folder / "model.safetensors"
    load_detector_weights(detector, read_tensors(weights, "model"), weights)
    return detector.eval(), categories, size


def read_categories(file: Path) -> list[Category]:
    """Read the classes in a `categories.json`, in the order of the labels. Raises BadInput if it has no such list."""
    entries = read_json(file, list)
    for number, entry in enumerate(entries):
        get = entry.get if isinstance(entry, dict) else {}.get
        fits = isinstance(get("name"), str) and isinstance(get("id"), int | str)
        if not fits:
            raise BadInput(
                f"{file}: entry {number} is {shown(entry)}; expected an object with a name (text) and an id (a whole "
                "number or a text). Put back the file that the run wrote"
            )
    return [Category(entry["id"], entry["name"]) for entry in entries]


def write_white(white: int | None, folder: Path) -> None:
    """Write how 16-bit images are decoded, `data.white`, to a `final/` folder; nothing for the full range (None)."""
    if white is not None:
        text = json.dumps({"white": white}, indent=2) + "\n"
        (Path(folder) / DECODING_FILE).write_text(text, encoding="utf-8")


def read_white(folder: Path) -> int | None:
    """Return what `write_white` wrote. Raises BadInput for a file with something else."""
    file = Path(folder) / DECODING_FILE
    if not file.is_file():
        return None
    white = read_json(file).get("white")
    if type(white) is not int or white < 1:
        expected = "expected a whole number above 0. Put back the file that the run wrote"
        raise BadInput(f"{file}: `white` is {shown(white)}; {expected}")
    return white


def load_detector_weights(detector: nn.Module, tensors: Mapping[str, torch.Tensor], source: Path) -> None:
    """Load tensors into a detector in place. Raises BadInput if they are not exactly the detector's tensors.

    source: the file that the tensors come from, for the message.
    """
    found = difference(detector.state_dict(), tensors)
    if found:
        raise BadInput(f"{source}: the weights are not those of the detector in the same folder: {found}")
    detector.load_state_dict(tensors)


def checked_size(size: Any) -> Mapping[str, int] | None:
    """Return `size`, the size in pixels to which images are resized, if it is valid; None: images keep their size.

    Raises ValueError if it has none of the forms of `toolkit.data.pipeline.processor_size`.
    """
    if size is None:
        return size
    is_known = isinstance(size, dict) and size.keys() in KEYS_OF_SIZE
    if is_known and all(type(side) is int and 0 < side <= MAX_RESIZED_SIDE_PX for side in size.values()):
        return size
    raise ValueError(
        f"size {size!r}: expected null, height and width, or shortest_edge with or without longest_edge, in whole "
        f"pixels up to {MAX_RESIZED_SIDE_PX:,}"
    )


def with_inference_settings(model: Mapping, asked: Mapping[str, Any]) -> dict:
    """Return a copy of a model's settings with other values of settings that do not affect training.

    Args:
        model: the group `model` of a run's settings.
        asked: the new values by key; the key `head_options.effect` means an entry of the setting `head_options`.

    Raises:
        BadInput: a setting is unknown, or training depends on it, or its value is of another type.
    """
    kind = options_class(model["architecture"])
    allowed = kind.inference_only
    wrong = [key for key in asked if key not in allowed]
    if wrong:
        known = f"there are {', '.join(allowed)}" if allowed else "it has none"
        raise BadInput(
            f"{', '.join(wrong)}: no setting of {model['architecture']} that a trained model can change; {known}"
        )
    changed = dict(model)
    for key, value in asked.items():
        name, _, entry = key.partition(".")
        if entry:
            former = changed.get(name) or {}
            changed[name] = {**former, entry: value}
        else:
            changed[name] = value
    names = {key.partition(".")[0] for key in asked}
    layer = layer_of(COMMAND_LINE, {"model": {name: changed[name] for name in names}})
    faults = check_values(layer, {"model": kind})
    if faults:
        raise BadInput(faults)
    return changed | nested(layer.values).get("model", {})


def _write_about(folder: Path, categories: Sequence) -> None:
    """Write the classes and the model card."""
    table = []
    for label, category in enumerate(categories):
        table.append({"label": label, "id": category.id, "name": category.name})
    text = json.dumps(table, indent=2) + "\n"
    (folder / "categories.json").write_text(text, encoding="utf-8")
    write_card = index.tool("model_card")
    write_card(folder, [category.name for category in categories])


def _counts_batches_of_frozen_norm(model: "PreTrainedModel", key: str) -> bool:
    backbone = getattr(model.config, "backbone_config", None)
    frozen_when_loaded = getattr(backbone, "freeze_batch_norm_2d", False)  # of timm backbones
    return frozen_when_loaded and ".backbone." in key and key.endswith("num_batches_tracked")
