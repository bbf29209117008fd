"""Reads the data sets of `assets/dirty_sets`, builds them in a folder, and says what the toolkit makes of them.

Each file there has several sets, which its README describes: their files, then calls with the text that is expected.
"""

import contextlib
import doctest
import io
import os
import shlex
import zlib
from importlib import import_module
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from places import ASSETS, ROOT
from small_data import coco_text, csv_text, picture, voc_text, write_text

from toolkit.base.errors import BadInput
from toolkit.data.formats import open_dataset, recognise
from toolkit.data.splits import open_all_splits
from toolkit.data.table import DetectionTable
from toolkit.run.command_line import parse_config


class DirtySet(NamedTuple):
    """A sentence, the files as (head, text), and the calls as (command, expected text)."""

    title: str
    files: list[tuple[str, str]]
    calls: list[tuple[str, str]]


def sets_in(name: str) -> list:
    """Return the sets of a file, as parameters of a test."""
    text = (ASSETS / "dirty_sets" / f"{name}.txt").read_text(encoding="utf-8")
    shared, *sets = text.split("\n=== ")
    files_of_all = _entries(shared, "--- ")
    cases = []
    for one in sets:
        title, _, content = one.partition("\n")
        files, _, calls = content.partition("\n>>> ")
        found = DirtySet(title, files_of_all + _entries(files, "--- "), _entries(f">>> {calls}", ">>> "))
        assert found.calls, f"{name}: {title}: nothing is expected"
        cases.append(pytest.param(found, id=title))
    return cases


def check_set(one: DirtySet, folder: Path) -> None:
    """Build a set and compare the outcome of each of its calls with the text; `...` stands for any text."""
    folder = folder / "set"
    build(one, folder)
    compare = doctest.OutputChecker().check_output
    for command, expected in one.calls:
        found = outcome(command, folder)
        assert compare(expected, found, doctest.ELLIPSIS), f"{one.title}\n>>> {command}\n{found}\nexpected:\n{expected}"


def _entries(text: str, mark: str) -> list[tuple[str, str]]:
    """Split a text at the lines that begin with `mark`."""
    parts = f"\n{text}".split(f"\n{mark}")[1:]
    entries = []
    for part in parts:
        head, _, content = part.partition("\n")
        entries.append((head, f"{content.rstrip()}\n"))
    return entries


def build(one: DirtySet, folder: Path) -> None:
    folder.mkdir()
    for head, text in one.files:
        kind, *words = head.replace("SET", str(folder)).split()
        text = text.replace("SET", str(folder)).replace("\\ufeff", "\ufeff")
        if kind == "pictures":
            for name in words:
                picture(folder / name, zlib.crc32(name.encode()))
        elif kind == "link":
            (folder / words[0]).parent.mkdir(parents=True, exist_ok=True)
            (folder / words[0]).symlink_to(words[1])
        elif kind == "coco":
            write_text(folder / words[0], coco_text(words[1:]))
        elif kind == "csv":
            write_text(folder / words[0], csv_text(words[1:]))
        elif kind == "voc":
            write_text(folder / words[0], voc_text(words[1]))
        else:
            write_text(folder / kind, text)


def outcome(command: str, folder: Path) -> str:
    """Return what a call says, one fact a line; SET stands for the folder."""
    name, *words = [word.replace("SET", str(folder)) for word in command.split()]
    try:
        if name == "recognise":
            said = str(recognise(folder))
        elif name == "open":
            said = _opened(words, folder)
        else:
            said = _trained_on(words or [str(folder)], folder)
    except BadInput as error:
        said = "\n".join(["refused", *error.problems])
    return said.replace(str(folder), "SET") + "\n"


def _opened(words: list[str], folder: Path) -> str:
    """Open a split of the folder, or a file; further words are options."""
    source, *rest = words
    options = dict(word.split("=") for word in rest)
    if not source.startswith(str(folder)):
        options.setdefault("path", folder)
    return described(open_dataset(source, cache_dir=folder.parent / "cache", **options), folder)


def described(table: DetectionTable, folder: Path) -> str:
    """Return the classes of a table, the boxes of each image by its file, and all problems."""
    lines = [f"classes: {', '.join(table.class_names)}"]
    boxes = table.boxes()
    for index in range(len(table)):
        found = []
        part = boxes.of_image(index)
        for row in range(part.start, part.stop):
            corners = " ".join(f"{value:.4g}" for value in boxes.xyxy[row].tolist())
            crowd = "crowd " if boxes.iscrowd[row] else ""
            found.append(f"{crowd}{table.class_names[boxes.labels[row]]} {corners}")
        file = os.path.relpath(table.image_source(table.row(index)), folder.resolve())
        lines.append(f"{file}: {'; '.join(found) or 'nothing'}")
    return "\n".join([*lines, *map(str, table.problems)])


def _trained_on(words: list[str], folder: Path) -> str:
    """Return what check_data.py prints on unused files and the command that trains, and what this command opens."""
    printed = io.StringIO()
    own = {"ACCELERATE_USE_CPU": "true", "DETECTION_TOOLKIT_CACHE": str(folder.parent / "cache")}
    with mock.patch.dict(os.environ, own), contextlib.chdir(ROOT), contextlib.redirect_stdout(printed):
        import_module("scripts.check_data").main(words)
    lines = printed.getvalue().strip().splitlines()
    said = [line for line in lines[:-1] if "not used" in line or "to validate" in line]
    said.append(lines[-1])
    if lines[-1].startswith("accelerate launch"):
        _, _, script, *flags = shlex.split(lines[-1])
        with contextlib.chdir(ROOT):
            config = parse_config(import_module(f"scripts.{Path(script).stem}").Config, flags)
        reading = {key: getattr(config.data, key) for key in ("path", "format", "image_dir", "on_error")}
        splits = (config.data.train, config.data.val, config.eval.test_split)
        tables = open_all_splits(*splits, folder.parent / "run", say=str, cache_dir=folder.parent / "cache", **reading)
        said.append(f"it opens {', '.join(str(len(table)) for table in tables if table is not None)} images")
    return "\n".join(said)
