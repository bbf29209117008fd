"""The candidates of a choice: the command that trains each detector which fits the data and the machine."""

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from toolkit.base.errors import BadInput, all_faults
from toolkit.base.files import ROOT, distinct
from toolkit.run.settings_file import read_groups
from toolkit.tools.doctor.inspection import inspect_tables
from toolkit.tools.doctor.program import (
    open_all,
    script_named_in,
    settle_flags,
    size_in_training,
    training_command,
)
from toolkit.tools.doctor.training_command import WITH_MASKS, recipe_for
from toolkit.tools.watch import resolved_settings

# Those with a settings file for own data, best first on five public data sets. Equal numbers are decided by this order.
SCRIPTS = (WITH_MASKS, "train_detr", "train_ssd", "train_yolov3")
PRIOR = "docs/results.md, Against other programs"
OF_MASKS = ROOT / "configs" / "detr" / "own_data_masks.yaml"


def find_candidates(options: argparse.Namespace, more: Sequence[str]) -> dict[str, list[str]]:
    """Return the words of the command that trains each candidate, from the path of its script on, by its name.

    Args:
        options: the data and how they are read, see `add_reading_flags`, and `candidates`, settings files; None: those
            for own data of all families, which suit this machine.
        more: further flags of all trainings.

    Raises:
        BadInput: the data or a settings file cannot be used, or there are no two candidates.
    """
    settle_flags(options)
    files = _settings_files(options)
    tables, sources = open_all(options, say=lambda text: None)
    commands = []
    reasons = []
    inspections = {}  # by size in training
    for script, config in files:
        size = size_in_training(options, config)
        key = tuple(size.items())
        if key not in inspections:
            inspections[key] = inspect_tables(tables, size, compare=False)
        masks = options.masks and script == WITH_MASKS  # others have them in their settings file
        asked = argparse.Namespace(**vars(options) | {"script": script, "masks": masks})
        command = training_command(asked, sources, tables, inspections[key], size, config)
        if isinstance(command, str):
            reasons.append(command)
        else:
            commands.append([*command.words[2:], *more])  # without `accelerate launch`, which takes all devices
    if len(commands) < 2:
        raise BadInput(_too_few(commands, reasons, options))
    settings = all_faults(*[partial(resolved_settings, Path(words[0]), words[1:]) for words in commands])
    found = {}
    for name, words, each in zip(_names(commands, settings), commands, settings, strict=True):
        best = _metric_for_best(each["eval"]["metric_for_best"], options.metric)
        found[name] = [*words, "--eval.metric_for_best", best]
    return found


def _names(commands: Sequence[Sequence[str]], settings: Sequence[Mapping]) -> list[str]:
    """Return the architecture of each candidate; with the name of its settings file where several have it."""
    architectures = [each["model"]["architecture"] for each in settings]
    names = []
    for architecture, words in zip(architectures, commands, strict=True):
        is_alone = architectures.count(architecture) == 1
        name = architecture if is_alone else f"{architecture}_{Path(words[2]).stem}"
        names.append(re.sub(r"[^\w.-]+", "_", name))
    return distinct(names)


def _settings_files(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Return (name of the training script, settings file) of each candidate."""
    if options.candidates:
        files = [(_script_of(path), str(path)) for path in options.candidates]
    else:
        files = [(script, recipe_for(script)[1]) for script in SCRIPTS]
        weights = read_groups(OF_MASKS)["model"]["pretrained"]
        if options.masks and Path(weights).exists():
            files.append((_script_of(OF_MASKS), str(OF_MASKS)))
    if options.masks:
        files = [(script, path) for script, path in files if script == WITH_MASKS or _has_masks(Path(path))]
    return files


def _has_masks(path: Path) -> bool:
    model = read_groups(path).get("model")
    return isinstance(model, dict) and bool(model.get("masks"))


def _script_of(path: Path) -> str:
    read_groups(path)  # raises BadInput where it cannot be read
    script = script_named_in(path.read_text(encoding="utf-8"))
    if script is None:
        raise BadInput(f"--candidates {path}: its comments name no training script; expected one such as train_ssd.py")
    return script


def _too_few(commands: Sequence[Sequence[str]], reasons: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Return the sentences on why there is nothing to choose from."""
    lines = list(dict.fromkeys(reasons))
    if commands:
        masks = " that learns masks" if options.masks else ""
        only = f"python {shlex.join(commands[0])}"
        return [*lines, f"there is one candidate{masks}, so there is nothing to choose; train it: {only}"]
    given = " ".join(options.source)
    return [*lines, f"no candidate is left for {given}; python scripts/check_data.py {given} says more about the data"]


def _metric_for_best(of_settings: str, metric: str | None) -> str:
    """Return the metric by which a training keeps its best weights: that of its settings, or the one asked for, of the
    same weights (raw or averaged)."""
    if metric is None:
        return of_settings
    averaged = "ema/" if of_settings.startswith("ema/") else ""
    return averaged + (metric if metric.startswith("segm_") else f"bbox_{metric}")
