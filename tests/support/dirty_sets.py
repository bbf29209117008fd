"""Reads the data sets of `assets/dirty_sets`, builds them in a folder, and says what the toolkit makes of them.

Each file there has several sets, which its README describes: their files, then calls with the text that is expected.
"""

import contextlib
import doctest
import io
import os
import shlex
import zipfile
import zlib
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import yaml
from PIL import Image, ImageEnhance
from places import ASSETS, ROOT
from small_data import coco_text, csv_text, picture, voc_text, write_text

from scripts.train_detr import DEFAULT_CONFIG, Config
from toolkit.base.errors import BadInput
from toolkit.data.formats import open_dataset, recognise
from toolkit.data.splits import open_all_splits
from toolkit.run.command_line import parse_config, resolve, sources_of


def sets_in(name: str) -> list:
    """Return the sets of a file, as parameters of a test: (files, calls), each a list of (head, text)."""
    text = (ASSETS / "dirty_sets" / f"{name}.txt").read_text(encoding="utf-8")
    shared, *sets = text.split("\n=== ")
    cases = []
    for one in sets:
        title, _, content = one.partition("\n")
        files, _, calls = f"\n{content}".partition("\n>>> ")
        files = entries_of(shared, "--- ") + entries_of(files, "--- ")
        cases.append(pytest.param((files, entries_of(f">>> {calls}", ">>> ")), id=title))
    return cases


def entries_of(text: str, mark: str) -> list[tuple[str, str]]:
    """Split a text at the lines that begin with `mark`."""
    entries = []
    for part in f"\n{text}".split(f"\n{mark}")[1:]:
        head, _, content = part.partition("\n")
        entries.append((head, f"{content.rstrip()}\n"))
    return entries


def check_set(one, folder: Path) -> None:
    """Build a set and compare the outcome of each of its calls with the text; `...` stands for any text."""
    files, calls = one
    folder = folder / "set"
    build(files, folder)
    for call, expected in calls:
        found = outcome(call, folder)
        is_expected = doctest.OutputChecker().check_output(expected, found, doctest.ELLIPSIS)
        assert is_expected, f">>> {call}\n{found}\nexpected:\n{expected}"


def build(files: list, folder: Path) -> None:
    folder.mkdir()
    for head, text in files:
        kind, *words = head.replace("SET", str(folder)).split()
        path = folder / (words or [kind])[0]
        if kind == "pictures":
            for name in words:
                picture(folder / name, zlib.crc32(name.encode()))
        elif kind == "brighter":
            path.parent.mkdir(parents=True, exist_ok=True)
            ImageEnhance.Brightness(Image.open(folder / words[1])).enhance(1.1).save(path)
        elif kind == "copy":
            path.write_bytes((folder / words[1]).read_bytes())
        elif kind == "zip":
            with zipfile.ZipFile(path, "w") as archive:
                for name in words[1:]:
                    archive.write(folder / name, Path(name).name)
        elif kind == "link":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(words[1])
        elif kind == "coco":
            write_text(path, coco_text(words[1:]))
        elif kind == "csv":
            write_text(path, csv_text(words[1:]))
        elif kind == "voc":
            write_text(path, voc_text(words[1]))
        else:
            write_text(path, text.replace("SET", str(folder)).replace("\\ufeff", "\ufeff"))


def outcome(call: str, folder: Path) -> str:
    """Return what a call says, one fact a line; SET stands for the folder."""
    name, *words = shlex.split(call.replace("SET", str(folder)))
    own = {
        "ACCELERATE_USE_CPU": "true",
        "DETECTION_TOOLKIT_CACHE": str(folder.parent / "cache"),
    }
    with mock.patch.dict(os.environ, own), contextlib.chdir(ROOT):
        try:
            said = CALLS[name](words, folder)
        except BadInput as error:
            said = "\n".join(["refused", *error.problems])
    return said.replace(str(folder), "SET").rstrip() + "\n"


def _recognise(words, folder):
    return str(recognise(folder))


def _open(words, folder):
    """Open a split of the folder, or a file."""
    (source,), options = _options_in(words)
    if str(folder) not in str(source) and "name" not in options:
        options.setdefault("path", folder)
    return described(open_dataset(source, **options), folder)


def _run(words, folder):
    """Open the splits of a training."""
    splits, options = _options_in(words)
    options.setdefault("path", str(folder))
    said = []
    tables = open_all_splits(
        *splits,
        *[None] * (3 - len(splits)),
        folder.parent / "run",
        say=said.append,
        **options,
    )
    return "\n".join([*said, _opened(tables)])


def _train_on(words, folder):
    """Return what check_data.py prints on unused files and the command that trains, and what this command opens."""
    lines = _check_data(words or [str(folder)], folder).splitlines()
    said = [line for line in lines[:-1] if "not used" in line or "to validate" in line]
    said.append(lines[-1])
    if lines[-1].startswith("accelerate launch"):
        _, _, script, *flags = shlex.split(lines[-1])
        config = parse_config(import_module(f"scripts.{Path(script).stem}").Config, flags)
        reading = {key: getattr(config.data, key) for key in ("path", "format", "image_dir", "on_error")}
        splits = (config.data.train, config.data.val, config.eval.test_split)
        said.append(_opened(open_all_splits(*splits, folder.parent / "run", say=str, **reading)))
    return "\n".join(said)


def _check_data(words, folder):
    return _program("check_data", words)


def _convert(words, folder):
    return _program("convert", words)


def _program(name, words):
    """Return the exit code of a program and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = import_module(f"scripts.{name}").main(words)
    return f"exit code {code}\n{printed.getvalue().strip()}"


def _settings(words, folder):
    """Return where the settings of a training are from, those of its data, and what is said of them."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        config, stack = resolve(Config, words, DEFAULT_CONFIG)
    data = asdict(config.data)
    lines = [*sources_of(stack), f"{config.model.architecture}, {config.run.max_minutes} minutes"]
    keys = ("path", "name", "format", "train", "val", "image_dir", "image_size")
    lines.append(", ".join(f"{key} {data[key]}" for key in keys if data[key] is not None))
    return "\n".join([*lines, said.getvalue().strip()]).replace(f"{ROOT}/", "")


CALLS = {
    "settings": _settings,
    "recognise": _recognise,
    "open": _open,
    "run": _run,
    "train_on": _train_on,
    "check_data": _check_data,
    "convert": _convert,
}


def _options_in(words):
    """Return the words that are no options, lists among them, and the options KEY=VALUE."""
    plain = [yaml.safe_load(word) if word.startswith("[") else word for word in words if "=" not in word]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    return plain, {key: yaml.safe_load(value) for key, value in options.items()}


def _opened(tables) -> str:
    return f"it opens {', '.join(str(len(table)) for table in tables if table is not None)} images"


def described(table, folder: Path) -> str:
    """Return the classes of a table, the boxes and relations of each image by its file, and all problems."""
    lines = [f"classes: {', '.join(table.class_names)}"]
    for index in range(len(table)):
        row = table.row(index)
        objects = row["objects"]
        found = []
        for label, bbox, crowd in zip(objects["category"], objects["bbox"], objects["iscrowd"], strict=True):
            corners = " ".join(f"{value:.4g}" for value in bbox)
            found.append(f"{'crowd ' * crowd}{table.class_names[label]} {corners}")
        relations = row["relations"]
        for subject, other, predicate in zip(*map(relations.get, ("subject", "object", "predicate")), strict=True):
            found.append(f"{subject} {table.predicates[predicate]} {other}")
        file = os.path.relpath(str(table.image_source(row)), folder.resolve())
        lines.append(f"{file}: {'; '.join(found) or 'nothing'}")
    return "\n".join([*lines, *map(str, table.problems)])
