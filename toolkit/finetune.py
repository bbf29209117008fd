"""Fine-tuning: a detector that starts from trained weights, and a table of which of its tensors took what.

    detector = start_detector(vars(config.model), class_names, folder, resumed_from=None, say=print)

is all that a training script does about it. `settings["pretrained"]` is a hub name, a transformers folder (a `final/`
too), a `final/` folder of our own kind, a run folder or one of its checkpoints.

What a detector has to offer:

- Every tensor of its state dict takes the source's tensor of the same name and shape. A detector around a transformers
  model holds it as `self.model`: the source's names are then those of that model below "model.". Another shape is an
  error, except where classes say so:
- `class_tensors: Mapping[str, tuple[int, int, int]]`, an attribute of class or instance: `fnmatch` patterns of names in
  the state dict, each with `(before, each, after)`, what the rows (dimension 0) of these tensors are: one or more
  blocks (one per anchor), each of `before` rows for no class, `each` rows for every class in the order of the labels,
  and `after` rows for no class. The number of blocks follows from the shape. Rows of classes of the same name are
  copied, so are those for no class; the others keep their initial values.

      sigmoid head (C, D)                  (0, 1, 0)
      DETR (C + 1, D), no-object last      (0, 1, 1)   also a denoising embedding whose padding is last
      torchvision cls_score (1 + C, D)     (1, 1, 0)   background first
      torchvision bbox_pred (4 (1 + C), D) (4, 4, 0)
      SSD (anchors (1 + C), D, 3, 3)       (1, 1, 0)
      YOLOv3 (anchors (5 + C), D, 1, 1)    (5, 1, 0)

- Built around a transformers model, the keyword `source_config: dict | None = None`: `config.to_dict()` of the source.
  The detector then has the structure that it describes, with classes `class_names`; keywords that are given change it.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit.config import PRETRAINED_CONFIG, detector_options
from toolkit.data.table import write_json
from toolkit.distributed import world
from toolkit.errors import BadInput
from toolkit.hub import cached_when_offline
from toolkit.models import build_detector
from toolkit.norms import freeze_prefixes
from toolkit.runs import chosen_weights, open_run, run_folder_of

ClassLayout = tuple[int, int, int]  # rows before, for each class, after


@dataclass
class Pretrained:
    """Trained weights. options: keywords of `build_detector` for the detector that they are of."""

    name: str
    architecture: str
    options: dict
    class_names: list[str]
    tensors: dict[str, Tensor]


@dataclass
class WeightTable:
    """Which tensor of a model takes which of a checkpoint.

    state: what to load (`strict=False`). sources: {name in the model: name in the checkpoint}. rows: {name: sentence}
    of those that take only some rows. new: names that keep their initial values. unused: names of the checkpoint that
    nothing takes.
    """

    state: dict[str, Tensor] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def entries(self) -> list[tuple[str, str, str]]:
        """(what became of it, name, note) of every tensor of the model, then of those unused."""
        taken = []
        for name, source in self.sources.items():
            note = self.rows.get(name, "" if name == source else f"<- {source}")
            taken.append(("mapped" if note else "loaded", name, note))
        return [*taken, *(("new", name, "") for name in self.new), *(("unused", name, "") for name in self.unused)]

    def table(self) -> str:
        """One line per tensor: loaded (same name), mapped (from another, or by rows), new; then what is unused."""
        return "\n".join(f"{what:<7s} {name} {note}".rstrip() for what, name, note in self.entries())

    def summary(self) -> str:
        """`table` with one line for all tensors of a part of the model that fared the same."""
        entries = [(what, _part(name), "" if note.startswith("<-") else note) for what, name, note in self.entries()]
        counts = Counter(entries)
        width = max((len(part) for _, part, _ in counts), default=0)
        return "\n".join(
            f"{what:<7s} {part:<{width}s} {number:5d} tensors  {note}".rstrip()
            for (what, part, note), number in counts.items()
        )


def start_detector(
    settings: Mapping, class_names: Sequence[str], folder: Path, *, resumed_from: Path | None, say: Callable
) -> nn.Module:
    """The detector that a run begins with: as the settings say, on the weights of `pretrained`, partly frozen.

    What the source says about the detector is written to `<folder>/pretrained_config.json`, so that the run folder
    alone builds it again, and the table of tensors to `<folder>/pretrained.txt`.

    Args:
        settings: keywords of `build_detector` (None: not given), `pretrained` and `freeze_prefixes`.
        class_names: in the order of the labels.
        folder: the run folder.
        resumed_from: the checkpoint that will be loaded; its weights, not those of `pretrained`, count then.
        say: prints a text on the main process.

    Raises:
        BadInput: a source that cannot be had or does not fit, everything `build_detector` raises, unknown prefixes.
    """
    given, name, is_main = detector_options(settings), settings.get("pretrained"), world()[0] == 0
    source, stored = None, None
    if resumed_from is not None:
        stored = _stored_config(resumed_from)
    elif name:
        source = open_pretrained(name)
        _check_architecture(source, given["architecture"])
        stored = {"source": name, "options": source.options}
    if stored is not None:
        given = {**stored["options"], **given, "pretrained_backbone": False}
        if is_main:
            # in one step: another rank of a resumed run may be reading the file that this replaces
            write_json(folder / PRETRAINED_CONFIG, stored)
    detector = build_detector(**given, class_names=class_names)
    if source is not None:
        table = load_pretrained(detector, source, class_names)
        say(f"weights of {name}:\n{table.summary()}")
        if is_main:
            (folder / "pretrained.txt").write_text(f"weights of {name}\n{table.table()}\n")
    freeze_prefixes(detector, settings.get("freeze_prefixes") or [])
    return detector


def load_pretrained(detector: nn.Module, source: Pretrained, class_names: Sequence[str]) -> WeightTable:
    """Gives the detector the weights of the source, row by row where the classes differ, and says what went where.

    Raises:
        BadInput: shapes that differ, a class name that the source has twice, nothing that fits.
    """
    table = map_weights(
        detector.state_dict(), source.tensors,
        class_tensors=getattr(detector, "class_tensors", {}), classes=class_names, source_classes=source.class_names,
    )  # fmt: skip
    if not table.sources:
        raise BadInput(
            f"model.pretrained {source.name}: none of its {len(source.tensors)} tensors has the name of one of this "
            f"detector; its first is {next(iter(source.tensors), None)}, the detector's {next(iter(table.new), None)}."
        )
    detector.load_state_dict(table.state, strict=False)
    return table


def map_weights(
    model: Mapping[str, Tensor],
    checkpoint: Mapping[str, Tensor],
    prefixes: Mapping[str, str] | None = None,
    *,
    class_tensors: Mapping[str, ClassLayout] | None = None,
    classes: Sequence[str] = (),
    source_classes: Sequence[str] = (),
) -> WeightTable:
    """Every tensor takes the one of the same name, or, below a mapped prefix, of the prefix it is mapped to.

    model, checkpoint: state dicts. prefixes: {prefix in the model: prefix in the checkpoint}, whole parts of names;
    the longest applies. One tensor of the checkpoint may serve several of the model. Nothing is guessed.
    class_tensors: see above; classes, source_classes: names of the model's and the checkpoint's classes.
    Raises BadInput: a prefix that matches nothing on its side, shapes that differ, ambiguous classes; all of them.
    """
    prefixes, table = prefixes or {}, WeightTable()
    problems = _check_prefixes(model, checkpoint, prefixes)
    problems += _check_classes(classes, source_classes) if class_tensors else []
    for name, value in model.items():
        prefix = max((p for p in prefixes if _below(name, p)), key=len, default=None)
        source = name if prefix is None else prefixes[prefix] + name[len(prefix) :]
        if source not in checkpoint:
            table.new.append(name)
            continue
        weights, layout = checkpoint[source], _layout(name, class_tensors or {})
        if layout is not None and list(classes) != list(source_classes):
            found = copy_class_rows(value, weights, layout, classes, source_classes)
            if found is value:
                table.new.append(name)
                continue
            if found is not None:
                table.state[name], table.sources[name] = found, source
                table.rows[name] = _sentence(classes, source_classes)
                continue
        if weights.shape != value.shape:
            shapes = f"{tuple(weights.shape)}; the model's is {tuple(value.shape)}"
            problems.append(f"{name} <- {source}: the checkpoint's shape is {shapes}")
        else:
            table.state[name], table.sources[name] = weights, source
    if problems:
        raise BadInput(problems)
    used = set(table.sources.values())
    table.unused = [name for name in checkpoint if name not in used]
    return table


def copy_class_rows(
    own: Tensor, source: Tensor, layout: ClassLayout, classes: Sequence[str], source_classes: Sequence[str]
) -> Tensor | None:
    """`own` with the rows that `source` has for the same class, and those for no class.

    None where the shapes forbid it; `own` itself where there are no such rows.
    """
    own_rows, own_blocks = _row_meanings(len(own), layout, classes)
    source_rows, source_blocks = _row_meanings(len(source), layout, source_classes)
    if own_blocks != source_blocks or own.shape[1:] != source.shape[1:] or not own_blocks:
        return None
    place = {meaning: row for row, meaning in enumerate(source_rows)}
    pairs = [(row, place[meaning]) for row, meaning in enumerate(own_rows) if meaning in place]
    if not pairs:
        return own
    into, taken = torch.tensor(pairs).unbind(1)
    result = own.clone()
    result[into.to(own.device)] = source[taken].to(own.device, own.dtype)
    return result


def _row_meanings(rows: int, layout: ClassLayout, classes: Sequence[str]) -> tuple[list[tuple], int]:
    """What each row of a class tensor is for, and its number of blocks; 0 where the rows make no whole blocks."""
    before, each, after = layout
    block = [("before", i) for i in range(before)] + [("class", name, i) for name in classes for i in range(each)]
    block += [("after", i) for i in range(after)]
    blocks, rest = divmod(rows, len(block))
    return [(b, *meaning) for b in range(blocks) for meaning in block], 0 if rest else blocks


def _layout(name: str, class_tensors: Mapping[str, ClassLayout]) -> ClassLayout | None:
    found = {layout for pattern, layout in class_tensors.items() if fnmatchcase(name, pattern)}
    if len(found) > 1:
        raise ValueError(f"{name} matches patterns of class_tensors with different layouts")
    return next(iter(found), None)


def _sentence(classes: Sequence[str], source_classes: Sequence[str]) -> str:
    kept = [name for name in classes if name in source_classes]
    return f"rows of {len(kept)} of {len(classes)} classes" + (f": {', '.join(kept)}" if 0 < len(kept) < 6 else "")


def _check_prefixes(model: Mapping, checkpoint: Mapping, prefixes: Mapping[str, str]) -> list[str]:
    return [
        f"weight mapping {ours} <- {theirs}: the {side} has no parameter below {prefix!r}"
        for ours, theirs in prefixes.items()
        for prefix, names, side in ((ours, model, "model"), (theirs, checkpoint, "checkpoint"))
        if not any(_below(name, prefix) for name in names)
    ]


def _check_classes(classes: Sequence[str], source_classes: Sequence[str]) -> list[str]:
    return [
        f"class {name!r} stands {side[name]} times in the {where}: which one is meant cannot be told"
        for side, where in ((Counter(classes), "data"), (Counter(source_classes), "checkpoint"))
        for name in dict.fromkeys(classes)
        if side[name] > 1 and list(classes) != list(source_classes)
    ]


def _check_architecture(source: Pretrained, architecture: str) -> None:
    if source.architecture != architecture:
        raise BadInput(
            f"model.architecture is {architecture}, but model.pretrained {source.name} is {source.architecture}: set "
            f"one as the other is (a --config of another architecture may hold more settings that do not fit)."
        )


def _below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _part(name: str) -> str:
    """The part of the model that a tensor belongs to: at most three parts of its name, neither its own nor numbers."""
    parts = [part for part in name.split(".")[:-1][:4] if not part.isdigit()]
    return ".".join(parts[:3]) or name


# ---------------------------------------------------------------- where weights come from


def open_pretrained(name: str) -> Pretrained:
    """Trained weights by hub name or path; see the top of this file.

    Raises:
        BadInput: nothing of that name here or on the hub, no network for it, or a folder that is none of these.
    """
    path = Path(name).expanduser()
    if not path.exists():
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            raise BadInput(f"model.pretrained: there is no {path}; give a folder, or a hub name such as owner/model.")
        return _from_transformers(name, name)
    if not (path / "config.json").is_file():
        if path.is_file():
            raise BadInput(f"model.pretrained: {path} is a file; give the folder of the run, checkpoint or final/.")
        return _from_run(name, path)
    try:
        document = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"model.pretrained: {path / 'config.json'} cannot be read: {error}") from error
    return _from_transformers(name, str(path)) if "model_type" in document else _from_our_folder(name, path)


def _from_run(name: str, path: Path) -> Pretrained:
    run = open_run(path)
    options = detector_options(run.config["model"])
    architecture = options.pop("architecture")
    tensors = run.checkpoint.tensors[chosen_weights(run)]
    return Pretrained(name, architecture, options, [category.name for category in run.categories], tensors)


def _from_our_folder(name: str, path: Path) -> Pretrained:
    from toolkit.models.final import load_detector_folder  # transformers, which takes seconds to import

    detector, categories, _ = load_detector_folder(path)
    options = detector_options(detector.options)
    architecture = options.pop("architecture")
    return Pretrained(name, architecture, options, [category.name for category in categories], detector.state_dict())


def _from_transformers(name: str, place: str) -> Pretrained:
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForObjectDetection

    try:
        with cached_when_offline():
            config = AutoConfig.from_pretrained(place)
            model = AutoModelForObjectDetection.from_pretrained(place)
    except (OSError, ValueError) as error:
        what = _first_sentence(error)
        if Path(place).is_dir():
            raise BadInput(f"model.pretrained {name}: not a detector of transformers: {what}") from error
        raise BadInput(
            f"model.pretrained {name}: there is no such folder here, and no detector of this name on the hub or in its "
            f"cache ({what}); connect to the network once, set HF_HOME to a cache that holds it, or give a folder."
        ) from error
    # as JSON has it, so that the run and whoever builds its detector again are given the same
    options: dict = {"source_config": json.loads(config.to_json_string(use_diff=False))}
    try:
        with cached_when_offline():
            processor = AutoImageProcessor.from_pretrained(place)
    except (OSError, ValueError):  # weights without a processor say nothing of their images
        processor = None
    if processor is not None:
        plain = not processor.do_normalize
        options["mean"] = [0.0] * 3 if plain else [float(value) for value in processor.image_mean]
        options["std"] = [1.0] * 3 if plain else [float(value) for value in processor.image_std]
    class_names = [config.id2label[i] for i in sorted(config.id2label)]
    tensors = {f"model.{key}": value for key, value in model.state_dict().items()}
    return Pretrained(name, config.model_type, options, class_names, tensors)


def _first_sentence(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0].split(". ")[0][:200] if text else type(error).__name__


def _stored_config(checkpoint: Path) -> dict | None:
    """What the run of a checkpoint noted about the source of its weights; None: it began from random ones."""
    path = run_folder_of(checkpoint) / PRETRAINED_CONFIG
    return json.loads(path.read_text()) if path.is_file() else None
