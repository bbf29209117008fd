"""The detector that a run begins with: as the settings say, on trained weights where they name some, partly frozen."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import nn

from toolkit.distributed import world
from toolkit.errors import BadInput
from toolkit.files import write_json
from toolkit.models import build_detector
from toolkit.models.weights.mapping import WeightTable, map_weights
from toolkit.models.weights.pretrained import Pretrained, open_pretrained
from toolkit.runs.command_line import PRETRAINED_CONFIG, detector_options
from toolkit.runs.open_run import run_folder_of
from toolkit.step.freezing import freeze_prefixes


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


def _check_architecture(source: Pretrained, architecture: str) -> None:
    if source.architecture != architecture:
        raise BadInput(
            f"model.architecture is {architecture}, but model.pretrained {source.name} is {source.architecture}: set "
            f"one as the other is (a --config of another architecture may hold more settings that do not fit)."
        )


def _stored_config(checkpoint: Path) -> dict | None:
    """What the run of a checkpoint noted about the source of its weights; None: it began from random ones."""
    path = run_folder_of(checkpoint) / PRETRAINED_CONFIG
    return json.loads(path.read_text()) if path.is_file() else None
