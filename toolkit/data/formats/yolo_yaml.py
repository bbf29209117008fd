"""The YAML file of YOLO data, with the names of classes as they are written."""

from pathlib import Path

import yaml

from toolkit.base.files import YamlLoader, parse_yaml
from toolkit.data.table import Problem


def settings_of(folder: Path) -> tuple[Path | None, dict]:
    """Return the YAML file that names classes and splits, and its content; None and {} if there is none."""
    for path in _yaml_files(folder):
        try:
            content = _load_yaml(path.read_text(encoding="utf-8-sig"))
        except (yaml.YAMLError, UnicodeDecodeError):
            continue  # reported by `unread`
        if isinstance(content, dict) and "names" in content and ("train" in content or "val" in content):
            return path, content
    return None, {}


def _yaml_files(folder: Path) -> list[Path]:
    """Return the YAML files of a folder, data.yaml first."""
    paths = (*folder.glob("*.yaml"), *folder.glob("*.yml")) if folder.is_dir() else ()
    return sorted(paths, key=lambda path: (path.stem != "data", path.name))


def unread(folder: Path) -> list[Problem]:
    """Return an error for a data.yaml that cannot be read: without it classes would be numbered."""
    problems = []
    for path in _yaml_files(folder):
        try:
            _load_yaml(path.read_text(encoding="utf-8-sig"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            if path.stem == "data":
                reason = " ".join(str(error).split())
                problems.append(Problem("error", path.name, None, None, f"cannot be read as YAML in UTF-8: {reason}"))
    return problems


class _NamesAsWritten(YamlLoader):
    """YAML without the types that turn a name into something else: `yes`, `007`, `null`, `1.0` stay what they are."""


# Numbers stay numbers where they are keys or counts: those of `names: {0: cat}`, `nc`, `kpt_shape`.
_NamesAsWritten.yaml_implicit_resolvers = {}


def _load_yaml(text: str) -> object:
    """Parse a YAML file, with class names as they are written.

    Raises yaml.YAMLError.
    """
    content = parse_yaml(text)
    if isinstance(content, dict) and isinstance(content.get("names"), list | dict):
        names = parse_yaml(text, _NamesAsWritten)["names"]
        content["names"] = list(names) if isinstance(names, list) else dict(names)
    return content
