"""Opens pretrained weights by a hub name or a path, and loads them into a detector.

The path is a transformers folder (also a `final/` in that format), a `final/` folder in this toolkit's own format, a
run folder or one of its checkpoints, or a file of one of the publishers in `toolkit.index.PUBLISHERS` (see
`weight_files.py`).

A detector must provide the following so that `start_detector` can load them:

- Every tensor of its state dict receives the source's tensor of the same name and shape. A detector around a
  transformers model holds that model as `self.model`, and the source's names are then those of the model below
  "model."; one with masks also holds the head of transformers' model `...ForInstanceSegmentation` as `self.masks`. A
  different shape is an error, except for tensors with rows per class:
- `class_tensors: Mapping[str, tuple[int, int, int]]`, an attribute of class or instance: `fnmatch` patterns of names in
  the state dict, each with `(before, each, after)`, the meaning of the rows (dimension 0) of these tensors. The rows
  are one or more blocks (one per anchor); a block has `before` rows that belong to no class (such as the background),
  `each` rows for every class in the order of the labels, and `after` rows that belong to no class. The number of blocks
  follows from the shape. Rows of classes of the same name are copied, and so are rows that belong to no class; all
  other rows keep their initial values.

      sigmoid head (C, D)                  (0, 1, 0)
      DETR (C + 1, D), no-object last      (0, 1, 1)   also a denoising embedding whose padding is last
      torchvision cls_score (1 + C, D)     (1, 1, 0)   background first
      torchvision bbox_pred (4 (1 + C), D) (4, 4, 0)
      SSD (anchors (1 + C), D, 3, 3)       (1, 1, 0)
      YOLOv3 (anchors (5 + C), D, 1, 1)    (5, 1, 0)

- For a detector around a transformers model, the keyword `source_config: dict | None = None`, the source's
  `config.to_dict()`.
  The detector then has the structure in `source_config`, with the classes `class_names`; given settings override it.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import constants
from torch import Tensor, nn

from toolkit.base.errors import BadInput
from toolkit.base.files import near_names
from toolkit.models import options_class
from toolkit.models.final import load_detector_folder
from toolkit.models.weights.mapping import WeightTable, map_weights
from toolkit.models.weights.weight_files import open_published_weights
from toolkit.run.open_run import chosen_weights, kind_of, may_be_of_hub, open_run
from toolkit.run.settings_file import ABOUT_STARTING, detector_options

WITH_MASKS = "ForInstanceSegmentation"  # the end of the name of a class of transformers
PROBE_S = 5.0  # seconds that the hub has to answer


@dataclass
class Pretrained:
    """Trained weights and the detector that they belong to.

    Attributes:
        name: the hub name or path that was given.
        architecture, options: arguments of `build_detector` for the detector.
        class_names: names of the classes in the order of the labels.
        tensors: the weights by name.
        notes, size: see `toolkit.models.weights.names.Description`.
    """

    name: str
    architecture: str
    options: dict
    class_names: list[str]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)
    size: dict[str, int] | None = None


def open_pretrained(name: str) -> Pretrained:
    """Open trained weights by a hub name or a path, of one of the kinds in the docstring of this module.

    Raises:
        BadInput: the name is neither a path nor on the hub, the network cannot be reached, or a folder is of none
            of these kinds.
    """
    path = Path(name).expanduser()
    if not path.exists():
        if not may_be_of_hub(name):
            expected = "give a file, a folder, or a hub name such as owner/model"
            raise BadInput(f"model.pretrained {path}: no such file or folder; {expected}{near_names(path)}")
        return _from_transformers(name, name)
    if path.is_file():
        about, tensors = open_published_weights(path)
        return Pretrained(name, about.architecture, about.options, about.class_names, tensors, about.notes, about.size)
    try:
        kind = kind_of(path)
    except BadInput as error:
        raise BadInput(f"model.pretrained: {error}") from error
    return {"run": _from_run, "final": _from_our_folder, "transformers": _from_transformers}[kind](name, str(path))


def open_for(architecture: str, name: str) -> Pretrained:
    """Open trained weights as `open_pretrained` does; raise BadInput if they are of another architecture."""
    source = open_pretrained(name)
    if source.architecture != architecture:
        problems = [
            f"model.architecture is {architecture}, but model.pretrained {name} is {source.architecture}",
            f"give --model.architecture {source.architecture} to the script that trains it, or other weights",
            "a --config of another architecture may hold more settings that do not fit: leave it out",
        ]
        raise BadInput(problems)
    return source


def _from_run(name: str, path: Path) -> Pretrained:
    run = open_run(path, options_class)
    architecture, options = _architecture_and_settings(run.config["model"])
    tensors = run.checkpoint.tensors[chosen_weights(run)]
    return Pretrained(name, architecture, options, [category.name for category in run.categories], tensors)


def _from_our_folder(name: str, path: Path) -> Pretrained:
    detector, categories, _ = load_detector_folder(path)
    architecture, options = _architecture_and_settings(detector.resolved_options())
    return Pretrained(name, architecture, options, [category.name for category in categories], detector.state_dict())


def _architecture_and_settings(model: Mapping) -> tuple[str, dict]:
    """Return architecture and settings of the detector of a run, without the origin of its own weights."""
    options = detector_options(model)
    options.pop("pretrained_backbone", None)
    return options.pop("architecture"), options


def _from_transformers(name: str, source: str) -> Pretrained:
    from transformers import (
        AutoConfig,
        AutoImageProcessor,
        AutoModelForInstanceSegmentation,
        AutoModelForObjectDetection,
    )

    try:
        with cached_when_offline():
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
            has_masks = any(str(name).endswith(WITH_MASKS) for name in config.architectures or ())
            loader = AutoModelForInstanceSegmentation if has_masks else AutoModelForObjectDetection
            model = loader.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - a foreign folder makes transformers raise anything
        what = _first_sentence(error)
        if Path(source).is_dir():
            raise BadInput(f"model.pretrained {name}: not a detector of transformers: {what}") from error
        raise BadInput(
            f"model.pretrained {name}: no such folder here, and no such detector on the hub or in its cache ({what}); "
            "connect to the network once, set HF_HOME to a cache that holds it, or give a folder"
        ) from error
    # through JSON, so that the run and a later build of its detector get the same values
    options: dict = {"source_config": json.loads(config.to_json_string(use_diff=False))}
    try:
        with cached_when_offline():
            processor = AutoImageProcessor.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError):  # weights without a processor do not describe their images
        processor = None
    if processor is not None:
        plain = not processor.do_normalize
        options["mean"] = [0.0] * 3 if plain else list(map(float, processor.image_mean))
        options["std"] = [1.0] * 3 if plain else list(map(float, processor.image_std))
    class_names = [config.id2label[i] for i in sorted(config.id2label)]
    if has_masks:  # a detector that is called `model`, and a head of masks around it
        options["masks"] = True
        tensors = {}
        for key, value in model.state_dict().items():
            tensors[key if key.startswith("model.") else f"masks.{key}"] = value
    else:
        tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
    return Pretrained(name, config.model_type, options, class_names, tensors)


def _first_sentence(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0].split(". ")[0][:200] if text else type(error).__name__


def load_into(
    detector: nn.Module, source: Pretrained, class_names: Sequence[str], given: Mapping, fresh: Sequence[str]
) -> WeightTable:
    """Call `load_pretrained`; if many shapes differ because of settings that the user gave, the error names these
    settings.

    Args:
        given: the settings that the user gave.
        fresh: see `load_pretrained`.
    """
    try:
        return load_pretrained(detector, source, class_names, fresh)
    except BadInput as error:
        different = []
        for name, value in given.items():
            is_structure = name not in ("architecture", *ABOUT_STARTING)
            if is_structure and source.options.get(name, not value) != value:
                different.append(name)
        if len(error.problems) < 4 or not different:
            raise
        flags = ", ".join(f"--model.{name}" for name in different)
        problems = [
            f"model.pretrained {source.name}: {len(error.problems)} tensors have other shapes than this detector's",
            f"the first: {error.problems[0]}",
            f"given settings of the model change it: leave out {flags}, and the weights' own apply",
        ]
        raise BadInput(problems) from error


def load_pretrained(
    detector: nn.Module, source: Pretrained, class_names: Sequence[str], fresh: Sequence[str] = ()
) -> WeightTable:
    """Load the source's weights into the detector in place, row by row if the classes differ; return the mapping.

    Args:
        class_names: names of the detector's classes in the order of the labels.
        fresh: prefixes of the names of tensors that keep their initial values.

    Raises:
        BadInput: shapes differ, a class name occurs twice, no tensor fits, or a prefix matches no tensor.
    """
    state = detector.state_dict()
    left_out = _tensors_below(state, fresh)
    tensors = {name: tensor for name, tensor in source.tensors.items() if name not in left_out}
    table = map_weights(
        state,
        tensors,
        class_tensors=getattr(detector, "class_tensors", {}),
        classes=class_names,
        source_classes=source.class_names,
    )
    if not table.sources:
        raise BadInput(
            f"model.pretrained {source.name}: none of its {len(source.tensors)} tensors has the name of one of this "
            f"detector; its first is {next(iter(source.tensors), None)}, the detector's {next(iter(table.new), None)}."
        )
    detector.load_state_dict(table.state, strict=False)
    return table


def _tensors_below(state: Mapping[str, Tensor], prefixes: Sequence[str]) -> set[str]:
    """Return the names of the tensors below some prefixes, and of those that share their memory under another name."""
    memory = set()
    faults = []
    for prefix in prefixes:
        below = [tensor for name, tensor in state.items() if f"{name}.".startswith(f"{prefix}.")]
        if not below:
            faults.append(f"model.fresh_prefixes: the detector has no tensor below {prefix!r}")
        memory |= {tensor.data_ptr() for tensor in below}
    if faults:
        raise BadInput(faults)
    return {name for name, tensor in state.items() if tensor.data_ptr() in memory}


@contextmanager
def cached_when_offline() -> Iterator[None]:
    """Let packages that load from the Hugging Face hub use only their cache in a `with` block if the hub does not
    answer; they fail at once if the cache lacks a file.

    By default they try every file six times, half a minute each, with a warning every time.
    """
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not hub_answers()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def hub_answers() -> bool:
    """Return whether the Hugging Face hub answers within `PROBE_S` seconds."""
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        urllib.request.urlopen(request, timeout=PROBE_S).close()
    except urllib.error.HTTPError:  # an answer, if not the wanted one
        return True
    except OSError:
        return False
    return True
