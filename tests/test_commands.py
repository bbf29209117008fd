"""Every command that the README, the docs, the configs and the scripts show."""

import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from launching import REPORT
from places import ROOT

from toolkit.base.errors import BadInput
from toolkit.run.command_line import parse_config
from toolkit.tools import detect
from toolkit.tools.shapes import make_shapes

DOCS = [path for path in sorted(ROOT.glob("docs/**/*.md")) if path.stem != "design"]  # which speaks of scripts/x.py
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, *sorted(ROOT.glob("configs/**/*.md"))]
CODE = [path for pattern in ("configs/**/*.yaml", "scripts/*.py", "toolkit/**/*.py") for path in ROOT.glob(pattern)]
STARTS = "accelerate launch|torchrun|python|make|scripts/runs/|detect|pip"
COMMAND = re.compile(rf"^(?:# |#   )?\s*((?:\w+=\S+ )?(?:{STARTS})\b(?!:| =).*)$")


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


def module_of(script: str):
    """The script, imported; one finds its helpers beside itself."""
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
    try:
        return importlib.import_module(f"scripts.{Path(script).stem}")
    finally:
        del sys.path[:2]


def test_every_command_is_understood(capsys, monkeypatch):
    files = {file for file, _ in COMMANDS}
    assert {"README.md", "docs/data.md", "scripts/train_detr.py", "scripts/evaluate.py"} <= files
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "configs").glob("detr/*.yaml")} <= files
    monkeypatch.setattr(sys, "argv", ["script"])
    faults = {}  # the same words are parsed once, wherever they stand
    words = {(script or command, *arguments): (command, script, arguments)
             for _, command in COMMANDS for script, arguments in [split(command)]}  # fmt: skip
    for command, script, arguments in words.values():
        if script is None:
            understood = is_understood(command, arguments)
        elif Path(script).stem.startswith("train_"):
            understood = parses(script, arguments)
        else:
            flags = {re.sub(r"\.\w+$", ".", word) for word in arguments if word.startswith("--")}  # --expect.METRIC
            understood = all(flag in help_of(script, capsys) for flag in flags)
        if understood is not True:
            faults[command] = [file for file, other in COMMANDS if other == command], understood
    assert not faults


def parses(script: str, arguments: list[str]) -> bool | str:
    """True, or what its parser has against these arguments, of which paths start at the root."""
    module = module_of(script)
    words = [str(ROOT / word) if word.endswith(".yaml") and (ROOT / word).exists() else word for word in arguments]
    try:
        parse_config(module.Config, words, module.DEFAULT_CONFIG)
    except BadInput as error:
        return str(error)
    except SystemExit as stop:
        return bool({"--help", "--print_config"} & set(arguments)) and stop.code in (0, None)
    return True


def is_understood(command: str, words: list[str]) -> bool:
    """Whether what a command that starts no script names is there: targets, extras, modules, files."""
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return {word for word in words[1:] if "=" not in word} <= set(targets)
    if words[:2] == ["detect", "copy"]:
        with TemporaryDirectory() as folder:
            return detect.main([*words[1:-1], f"{folder}/{words[-1]}"]) == 0
    if words[0] == "detect":
        return words[1] in ("where", "--version") and detect.main(words[1:]) == 0
    if words[0] == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = {name for names in re.findall(r"\[([\w,]+)\]", command) for name in names.split(",")}
        return wanted <= set(project["optional-dependencies"])
    if "-m" in words:
        return importlib.util.find_spec(words[words.index("-m") + 1]) is not None
    title = f'```python title="{words[-1]}"'  # a program that stands on the page itself, and has a test of its own
    return (ROOT / words[words[0] == "python"]).exists() or any(title in path.read_text() for path in PROSE)


HELP = {}


def help_of(script: str, capsys) -> str:
    if script not in HELP:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            module_of(script).main(["--help"])
        HELP[script] = capsys.readouterr().out
        assert stop.value.code in (0, None) and HELP[script]
    return HELP[script]


# Settings that are set to something small, or do not change which lines of the program run.
SMALL_OR_ALIKE = {"--run.name", "--run.tracker", "--run.group", "--run.tags", "--run.epochs", "--run.resume",
                  "--data.path", "--data.image_size", "--data.batch_size_per_device", "--eval.batch_size_per_device",
                  "--optim.lr"}  # fmt: skip


def training_runs() -> list[tuple[str, str]]:
    """(script, arguments) of the training commands; of those that differ in a name or a number, one. Not those that
    only evaluate, or whose model is that of a file."""
    runs = set()
    for _, command in COMMANDS:
        script, words = split(command)
        if script and "/train_" in script and not re.search("--help|--print|runs/|eval_only|pretrained ", command):
            given = zip(words[::2], words[1::2], strict=True)
            kept = (word for pair in given if pair[0] not in SMALL_OR_ALIKE for word in pair)
            runs.add((Path(script).stem, shlex.join(kept)))
    return sorted(runs)


def shortened(config, data: Path, folder: Path) -> None:
    """One step on two small images; the model is the command's, with random weights."""
    side = {"rf_detr": 280, "lw_detr": 320}.get(config.model.architecture, 224)  # 300 queries need that many patches
    config.data.format, config.data.path, config.data.name, config.data.image_dir = "coco", None, None, None
    config.data.train, config.data.val = (str(data / f"{split}.json") for split in ("train", "val"))
    config.data.shares, config.eval.test_split = [], None  # of several sets, and of a folder
    config.data.workers, config.data.batch_size_per_device, config.data.max_train_images = 0, 2, None
    config.data.image_size, config.data.max_size = min(config.data.image_size, side), side
    config.data.scales = [side] if config.data.scales else []
    config.data.multi_scale = [side] if config.data.multi_scale else []
    config.optim.accumulation_steps, config.eval.batch_size_per_device = 1, 2
    config.run.output_dir, config.run.max_steps, config.run.epochs = str(folder), 1, 1
    config.run.resume, config.run.tracker, config.run.export = "never", "none", False


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands") / "shapes"
    make_shapes(folder, train_images=2, val_images=2, image_size=128)
    return folder / "annotations"


@pytest.mark.slow
@pytest.mark.parametrize(("script", "arguments"), training_runs())
def test_training_command_runs(script, arguments, shapes, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(REPORT.replace(":", "."), lambda *args, **kwargs: None)
    module = module_of(f"scripts/{script}.py")
    own = ["--model.pretrained", "null", "--model.pretrained_backbone", "false"]
    config = parse_config(module.Config, [*shlex.split(arguments), *own], module.DEFAULT_CONFIG)
    shortened(config, shapes, tmp_path)
    row = module.main(config)
    assert row.get("val/bbox_AP", row.get("val/R@100")) is not None
