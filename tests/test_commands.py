"""Every command that the README, the docs, the configs and the scripts show.

    python -m pytest tests/test_commands.py              # each is understood
    python -m pytest tests/test_commands.py -m slow      # each training command also runs a step
"""

import functools
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from toolkit import detect
from toolkit.command_line import parse_config

ROOT = Path(__file__).resolve().parent.parent
DOCS = [path for path in sorted(ROOT.glob("docs/**/*.md")) if path.stem != "design"]  # which speaks of scripts/x.py
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, *sorted(ROOT.glob("configs/**/*.md"))]
CODE = [path for pattern in ("configs/**/*.yaml", "scripts/*.py", "toolkit/**/*.py") for path in ROOT.glob(pattern)]
STARTS = "accelerate launch|torchrun|python|make|scripts/runs/|detect|pip"
COMMAND = re.compile(rf"^(?:# |#   )?\s*((?:\w+=\S+ )?(?:{STARTS})\b.*)$")


def commands() -> list[tuple[str, str]]:
    """(file, command) pairs: lines of fenced blocks in prose, indented or commented lines in code."""
    found = []
    for path in PROSE:
        for block in re.findall(r"```bash\n(.*?)```", path.read_text(), re.DOTALL):
            found += [(path, line) for line in block.replace("\\\n", " ").splitlines()]
        inline = re.findall(r"`((?:python|make|accelerate|detect) [^`]+)`", path.read_text())
        found += [(path, command) for command in inline if command != "accelerate launch"]  # its name in a sentence
    for path in sorted(CODE):
        found += [(path, line) for line in path.read_text().splitlines() if re.match(r"#|    \S", line)]
    pairs = [(str(path.relative_to(ROOT)), m[1]) for path, line in found for m in [COMMAND.match(line)] if m]
    return [(file, re.sub(r"\s{2,}#.*", "", command).strip()) for file, command in pairs if "..." not in command]


COMMANDS = commands()


def split(command: str) -> tuple[str | None, list[str]]:
    """(script path, its arguments); None for what starts no script."""
    words = shlex.split(command)
    if words[0] == "detect" and words[1:2] == ["train"]:
        return f"scripts/train_{words[2]}.py", words[3:]
    if words[0] == "detect" and words[1] in detect.commands():
        return f"scripts/{detect.commands()[words[1]].name}", words[2:]
    at = next((i for i, word in enumerate(words) if re.fullmatch(r"scripts/\w+\.py", word)), None)
    return (None, words) if at is None else (words[at], words[at + 1 :])


def training_module(script: str):
    sys.path.insert(0, str(ROOT))
    try:
        return importlib.import_module(f"scripts.{Path(script).stem}")
    finally:
        sys.path.remove(str(ROOT))


def test_there_are_commands_in_every_place():
    files = {file for file, _ in COMMANDS}
    assert {"README.md", "docs/data.md", "scripts/train_detr.py", "scripts/evaluate.py"} <= files
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "configs").glob("detr/*.yaml")} <= files


@pytest.mark.parametrize(("file", "command"), COMMANDS, ids=[f"{file}: {command}" for file, command in COMMANDS])
def test_command_is_understood(file, command, capsys):
    script, arguments = split(command)
    if script is None:
        if arguments[0] == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert {word for word in arguments[1:] if "=" not in word} <= set(targets)
        elif arguments[0] == "detect":
            assert arguments[1] in ("where", "completion", "--version") and detect.main(arguments[1:]) == 0
        elif arguments[0] == "python" and arguments[1] != "-m":
            assert (ROOT / arguments[1]).exists(), f"{arguments[1]} is not there"
        elif arguments[0] == "pip":
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            wanted = {name for names in re.findall(r"\[([\w,]+)\]", command) for name in names.split(",")}
            assert wanted <= set(project["optional-dependencies"])
        elif "-m" in arguments:
            module = arguments[arguments.index("-m") + 1]
            assert importlib.util.find_spec(module) is not None
        else:
            assert (ROOT / arguments[0]).exists(), f"{arguments[0]} is not there"
        return
    assert (ROOT / script).exists()
    if Path(script).stem.startswith("train_"):
        module = training_module(script)
        configs = [ROOT / value for flag, value in zip(arguments, arguments[1:], strict=False) if flag == "--config"]
        assert all(config.exists() for config in configs)
        arguments = [str(ROOT / word) if (ROOT / word).suffix == ".yaml" and (ROOT / word).exists() else word
                     for word in arguments]  # fmt: skip
        if {"--help", "--print_config"} & set(arguments):
            with pytest.raises(SystemExit) as stop:
                parse_config(module.Config, arguments, module.DEFAULT_CONFIG)
            assert stop.value.code in (0, None)
        else:
            parse_config(module.Config, arguments, module.DEFAULT_CONFIG)
    else:
        flags = {word for word in arguments if word.startswith("--")}
        unknown = {flag for flag in flags if re.sub(r"\.\w+$", ".", flag) not in help_of(script)}  # --expect.METRIC
        assert not unknown, f"{script} does not know {unknown}"


@functools.cache
def help_of(script: str) -> str:
    command = [sys.executable, script, "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


SMALL = "--data.format shapes --data.path null --data.name null --data.train train --data.val val"
SMALL += " --data.max_train_images 16"
SMALL += " --run.max_steps 1 --run.epochs 1"
SMALL += " --data.batch_size_per_device 2 --data.workers 0 --optim.accumulation_steps 1 --eval.batch_size_per_device 8"
SMALL += " --model.pretrained null --model.pretrained_backbone false --data.overfit_batches 1"
SMALL += " --run.tracker none --run.resume never"
TRAINING = sorted({(Path(s).stem, shlex.join(a)) for _, c in COMMANDS for s, a in [split(c)]
                   if s and "/train_" in s and "--help" not in c and "--print_config" not in c
                   and "runs/" not in c})  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("script", "arguments"), TRAINING)
def test_training_command_runs(script, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    module = training_module(f"scripts/{script}.py")
    small = [*shlex.split(arguments), *SMALL.split(), "--run.output_dir", str(tmp_path)]
    config = parse_config(module.Config, small, module.DEFAULT_CONFIG)
    row = module.main(config)
    assert row.get("val/bbox_AP", row.get("val/R@100")) is not None
