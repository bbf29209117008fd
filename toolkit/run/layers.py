"""Settings as a stack of layers: defaults, settings files, the command line.

A layer is what one place says, `{"group.key": value}`; of two layers the higher one wins. Everything that a program
asks about its settings is a question to the stack: which value applies, whether it was given, and where.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.base.errors import BadInput
from toolkit.base.files import ROOT, near_names, read_yaml
from toolkit.run.setting_types import from_yaml

DEFAULTS = "the defaults"
COMMAND_LINE = "the command line"
OPTIONS = ("config", "help", "print_config")  # flags that are not settings
# `--image-dir` is what the programs beside training call it.
_ALIASES = {"h": "help", "-h": "help", "image-dir": "data.image_dir"}


class Entries(dict):
    """Some entries of a setting that is a mapping (`--loss.weights.loss_ce 2`); lower layers give the others."""


@dataclass
class Layer:
    """The settings that one place gives.

    Attributes:
        where: the place, as messages name it: the path of a file, `COMMAND_LINE` or `DEFAULTS`.
        values: by name, "group.key". What is in no group, such as a flag without a dot, has a name without a dot.
        problems: sentences on what cannot be read.
        stray_words: words of a command line that belong to no flag, each with the flag and value before it.
        note: why it applies, for the console; "" if that is plain.
    """

    where: str
    values: dict[str, Any]
    problems: list[str] = field(default_factory=list)
    stray_words: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""


@dataclass
class Stack:
    """Layers of settings, the lowest first."""

    layers: list[Layer]

    def values(self) -> dict[str, Any]:
        """Return the values that apply, by name."""
        values = {}
        for layer in self.layers:
            for name, value in layer.values.items():
                below = values.get(name)
                is_added = isinstance(value, Entries) and isinstance(below, dict)
                values[name] = {**below, **value} if is_added else value
        return values

    def giver(self, name: str) -> Layer | None:
        """Return the file or command line whose value of a setting applies; None: it was not given."""
        givers = [layer for layer in self.layers if name in layer.values and layer.where != DEFAULTS]
        return givers[-1] if givers else None

    def given(self) -> list[str]:
        """Return the names of the settings that files or flags give."""
        return [name for name in self.values() if self.giver(name)]

    def files(self) -> list[Layer]:
        """Return the layers of the settings files that apply."""
        return [layer for layer in self.layers if layer.where not in (DEFAULTS, COMMAND_LINE)]


def nested(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return values by group and key, of values by name."""
    groups = {}
    for name, value in values.items():
        group, _, key = name.partition(".")
        groups.setdefault(group, {})[key] = value
    return groups


def layer_of(where: str, content: Mapping[str, Any]) -> Layer:
    """Return the layer of groups of settings, `{"group": {"key": value}}`."""
    layer = Layer(where, {})
    for group, entries in content.items():
        if isinstance(entries, Mapping):
            layer.values |= {f"{group}.{key}": value for key, value in entries.items()}
        else:
            layer.values[str(group)] = entries
    return layer


def read_file(path: str | Path) -> Layer:
    """Return what a settings file says. Raises BadInput if it cannot be read, or is not a mapping."""
    of_project = ROOT / path
    is_elsewhere = not Path(path).expanduser().parent.exists() and of_project.parent.is_dir()
    if is_elsewhere:  # typed as from the folder of the project
        hint = f"; did you mean {of_project}?" if of_project.is_file() else near_names(of_project)
        raise BadInput(f"--config {path}: no such file in the current folder{hint}")
    content = read_yaml(Path(path), f"--config {path}")
    if not isinstance(content, dict):
        raise BadInput(f"--config {path}: expected groups of settings, such as `run:` with `name: mine` below it.")
    return layer_of(str(path), content)


def read_command_line(argv: Sequence[str]) -> Layer:
    """Return what the words `--group.key value` and `--group.key=value` say.

    The values are text, which the type of a setting reads later. Of several equal flags the last one wins; `config` is
    the list of all `--config`, and `help` and `print_config` are lists of the words that follow them.
    """
    layer = Layer(COMMAND_LINE, {"config": []})
    for flag, words in _words_by_flag(argv, layer):
        group, *keys = flag.split(".", 2)
        name = ".".join([group, *keys[:1]])
        is_entry = len(keys) == 2
        if name in ("help", "print_config"):
            layer.values[name] = words
            continue
        layer.stray_words += [(word, f"--{flag} {words[0]}") for word in words[1:]]
        if not words:
            layer.problems.append(f"--{flag}: it has no value; expected --{flag} VALUE")
        elif not words[0] and name != "run.notes":
            layer.problems.append(f"--{flag}: the value is empty. Is a variable of the shell not set?")
        elif name == "config":
            layer.values[name].append(words[0])
        elif is_entry:
            before = from_yaml(layer.values.get(name))
            layer.values[name] = before if isinstance(before, dict) else Entries()
            layer.values[name][keys[1]] = from_yaml(words[0])
        else:
            is_null = words[0].strip().lower() == "null"
            layer.values[name] = None if is_null else words[0]
    return layer


def _words_by_flag(argv: Sequence[str], layer: Layer) -> list[tuple[str, list[str]]]:
    """Return each flag without its dashes, with the words up to the next one; note those before the first flag."""
    flags = []
    for word in argv:
        if word.startswith("--") or word == "-h":
            flag, equals, value = word.removeprefix("--").partition("=")
            flags.append((_ALIASES.get(flag, flag), [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
        else:
            layer.stray_words.append((word, ""))
    return flags
