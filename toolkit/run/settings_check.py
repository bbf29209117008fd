"""Checks the names and values of a layer of settings, and reports all faults at once, with what was probably meant.

It is used for the flags and settings files of a start, and for the files of a run folder or a sweep that are opened.
"""

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toolkit.base.text import did_you_mean
from toolkit.index import DETECTORS
from toolkit.models import DetectorOptions, options_class
from toolkit.run.layers import COMMAND_LINE, OPTIONS, Entries, Layer, nested
from toolkit.run.setting_types import as_type, field_types, format_value
from toolkit.run.synonyms import other_name, stray_word


def check(layer: Layer, kinds: Mapping[str, type], strict: bool = True) -> list[str]:
    """Return a sentence for every unknown name and wrong value of a layer; give it all others as their types have them.

    Null in the group `model` of a file means that a setting was not given, as in the config.yaml of a run.

    Args:
        layer: its values are changed in place.
        kinds: the dataclass of each group.
        strict: True: report every unknown name; False: only those that look like a misspelt name that is missing, for
            the file of a script that may have settings of its own.
    """
    return [*layer.problems, *_unknown_names(layer, kinds, strict), *check_values(layer, kinds)]


def check_values(layer: Layer, kinds: Mapping[str, type]) -> list[str]:
    """Return a sentence for every wrong value of a layer, as `check` does, and none for unknown names."""
    hints = setting_types(kinds)
    problems = []
    for name in [name for name in layer.values if name in hints]:
        value = layer.values[name]
        may_be_null = name.startswith("model.") and name != "model.architecture" and layer.where != COMMAND_LINE
        if value is None and may_be_null:
            continue
        try:
            made = as_type(hints[name], value)
        except ValueError as error:
            problems.append(f"{layer.where}: {name} {error}")
            continue
        if layer.where == COMMAND_LINE and _is_of_unknown_home(made):
            problems.append(f"{layer.where}: {name} is {made}: no such user here; give the whole path")
        layer.values[name] = Entries(made) if isinstance(value, Entries) else made
    return problems


def _is_of_unknown_home(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("~") and os.path.expanduser(value) == value


def setting_types(kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the type of each setting by name. kinds: the dataclass of each group."""
    return {f"{group}.{key}": hint for group, kind in kinds.items() for key, hint in field_types(kind).items()}


def family_of(options: type[DetectorOptions]) -> list[str]:
    """Return the architectures whose options are defined in the same module, which the index names."""
    return [name for name, (_, reference) in DETECTORS.items() if reference.startswith(f"{options.__module__}:")]


def nearest_architecture(word: str, family: Sequence[str]) -> str:
    """Return the end of the sentence on an architecture that a script does not train: which one was probably meant, and
    the script that trains it. family: the architectures that the script trains."""
    squashed = {_squashed(name): name for name in DETECTORS}
    near = difflib.get_close_matches(_squashed(word), squashed, n=1)
    if not near:
        return ""
    name = squashed[near[0]]
    script = DETECTORS[name][1].split(".")[2].replace("scene_graphs", "sgg")
    if name == word:
        return f"; train_{script}.py trains it"
    whose = "" if name in family else f", which train_{script}.py trains"
    return f"; did you mean {name}{whose}?"


def _squashed(name: str) -> str:
    return re.sub("[-_ ]", "", name).lower()


# ---- unknown names ---------------------------------------------------------------------------------------------------


def _unknown_names(layer: Layer, kinds: Mapping[str, type], strict: bool) -> list[str]:
    """Return a sentence for every flag, group and setting of a layer that there is not."""
    if layer.where == COMMAND_LINE:
        hints = setting_types(kinds)
        unknown = [name for name in layer.values if name not in hints and name not in OPTIONS]
        strays = [stray_word(word, before, list(hints)) for word, before in layer.stray_words]
        return [*strays, *[f"--{name}: no such flag{_hint(name, layer, kinds)}" for name in unknown]]
    problems = []
    for group, entries in nested(layer.values).items():
        if group not in kinds:
            problems += _unknown_group(group, entries, layer, kinds, strict)
        elif group in layer.values:  # a value where its settings should be
            found = format_value(layer.values[group])
            problems.append(f"{layer.where}: {group} is {found}; expected a group of settings, `key: value`")
        else:
            problems += _unknown_keys(group, entries, layer, kinds, strict)
    return problems


def _unknown_group(
    group: str, entries: Mapping[str, Any], layer: Layer, kinds: Mapping[str, type], strict: bool
) -> list[str]:
    left = [name for name in kinds if name not in nested(layer.values)]
    hint = did_you_mean(group, left, cutoff=0.8)
    if not strict and not hint:
        return []
    if group in layer.values:
        found = format_value(layer.values[group])
        expected = f"expected groups of settings, such as `run:` with `name: mine` below it{_hint(group, layer, kinds)}"
        return [f"{layer.where}: {group} is {found}; {expected}"]
    return [f"{layer.where}: no such group {group}{hint or did_you_mean(group, kinds, otherwise=_listed(kinds))}"]


def _unknown_keys(
    group: str, entries: Mapping[str, Any], layer: Layer, kinds: Mapping[str, type], strict: bool
) -> list[str]:
    known = field_types(kinds[group])
    unknown = [key for key in entries if key not in known]
    problems = []
    foreign = _keys_of_named_detector(unknown, layer) if group == "model" else []
    if foreign:
        problems.append(
            f"{layer.where}: it is for model.architecture {layer.values['model.architecture']}, and sets "
            f"{', '.join(foreign)}, which {kinds[group]().architecture} does not have. Take a copy of the file without "
            "these lines"
        )
    left = [key for key in known if key not in entries]
    for key in [key for key in unknown if key not in foreign]:
        misspelt = did_you_mean(key, left, cutoff=0.8, written=f"{group}.{{}}".format)
        if strict or misspelt:
            hint = misspelt or _hint(f"{group}.{key}", layer, kinds)
            problems.append(f"{layer.where}: no such setting {group}.{key}{hint}")
    return problems


def _keys_of_named_detector(keys: Iterable[str], layer: Layer) -> list[str]:
    """Return those of the keys of the group `model` that the architecture has which the layer itself names.

    A key that neither that one nor the chosen one has is not among them: it may be misspelt.
    """
    named = str(layer.values.get("model.architecture"))
    if named not in DETECTORS:
        return []
    return [key for key in keys if key in field_types(options_class(named))]


# ---- what was meant --------------------------------------------------------------------------------------------------


def _hint(name: str, layer: Layer, kinds: Mapping[str, type]) -> str:
    """Return the end of the sentence on an unknown name: what other programs call so, the setting of another detector,
    or the nearest one."""
    prefix = "--" if layer.where == COMMAND_LINE else ""
    written = f"{prefix}{{}}".format
    names = list(setting_types(kinds))
    group, _, key = name.partition(".")
    owners = _owners(key.partition(".")[0], kinds["model"]) if group == "model" and key else ""
    if owners:
        return f" of {kinds['model']().architecture}; it is one of {owners}"
    known = other_name(name, names, prefix)
    if known:
        return known
    if not key and group in kinds:
        return f"; it is a group of settings, see --help {group}"
    if not key:
        by_key = {setting.partition(".")[2]: setting for setting in names}
        near = did_you_mean(name, by_key, written=lambda near: written(by_key[near]))
        return near or did_you_mean(name, names, written=written)
    if group not in kinds:
        return did_you_mean(name, names, written=written, otherwise=_listed(kinds))
    keys = list(field_types(kinds[group]))
    return did_you_mean(key, keys, written=lambda near: written(f"{group}.{near}"), otherwise=_listed(keys))


def _listed(choices: Iterable[str]) -> str:
    """Return "there are a, b, c" if the choices are fewer than 20, else ""."""
    choices = list(choices)
    return f"there are {', '.join(choices)}" if len(choices) < 20 else ""


def _owners(key: str, model: type[DetectorOptions]) -> str:
    """Return which other detectors have a setting of the group `model`: those of the script, else those of others."""
    owners = [name for name in DETECTORS if key in field_types(options_class(name))]
    here = [name for name in owners if name in family_of(model)]
    if here:
        return ", ".join(here)
    return f"{', '.join(owners)}, which other scripts train" if owners else ""
