"""The command `detect`: the scripts of this project, from any folder, wherever it is installed.

    detect train detr --run.name mine          # what `python scripts/train_detr.py --run.name mine` does
    detect predict runs/mine photo.jpg --out found
    detect copy train_detr mine.py             # a training script to change, and its configuration, mine.yaml
    detect where configs/detr/bccd.yaml        # the path of a file of this project, for a launcher or --config
    detect --version

`detect` runs the file of the script itself, as `python` would, with the same flags. For several processes, give the
file to a launcher: `torchrun --nproc_per_node 2 $(detect where scripts/train_detr.py)`.

This module imports nothing slow, so that help answers at once.
"""

import ast
import importlib.metadata
import importlib.util
import re
import runpy
import sys
import tomllib
from pathlib import Path

from toolkit.base.errors import exit_on_bad_input
from toolkit.base.files import ROOT
from toolkit.base.text import did_you_mean

# Shorter names, and scripts that only serve developers.
COMMAND_NAMES = {"check_data": "check"}
NOT_COMMANDS = {"__init__", "benchmark"}
HELP_FLAGS = ("-h", "--help")
BUILTIN_HELP = {
    "copy": """usage: detect copy SCRIPT PATH.py

Writes the training script SCRIPT, such as train_detr, to PATH.py for you to change, and its default configuration to
PATH.yaml, which the copy reads.""",
    "where": """usage: detect where [FILE ...]

Prints the path of a script or a configuration, such as configs/detr/bccd.yaml; without FILE, of all of them.""",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command of `detect` and return its exit code; the SystemExit of a script is passed on."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in HELP_FLAGS:
        print(usage())
        return 0
    if words == ["--version"]:
        print(f"detection-toolkit {version()}")
        return 0
    name, *rest = words
    builtins = {"copy": copy, "where": where}
    if name in builtins:
        if rest and rest[0] in HELP_FLAGS:
            print(BUILTIN_HELP[name])
            return 0
        return builtins[name](rest)
    if name == "train" and rest and rest[0] in HELP_FLAGS:
        print(train_help())
        return 0
    if name == "train" and rest and rest[0] in detectors():
        return run_as_main(ROOT / "scripts" / f"train_{rest[0]}.py", rest[1:])
    if name == "train":
        return _refuse("detect train needs one of", rest[0] if rest else "", detectors())
    if name in commands():
        return run_as_main(commands()[name], rest)
    return _refuse("detect needs one of", name, ["train", *commands(), *builtins])


def train_help() -> str:
    """Return the help text of `detect train` without the name of a detector."""
    lines = [f"  {name:16}{first_line(ROOT / 'scripts' / f'train_{name}.py')}" for name in detectors()]
    head = ["usage: detect train DETECTOR [SETTINGS]", "", "DETECTOR is one of", ""]
    return "\n".join([*head, *lines, "", "`detect train DETECTOR --help` lists the settings of one."])


def run_as_main(script: Path, arguments: list[str]) -> int:
    """Run a script as `python SCRIPT ARGUMENTS` does, and return 0, unless the script raises SystemExit."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")  # raises the SystemExit of the script
    return 0


def detectors() -> list[str]:
    """Return the detectors that `detect train` accepts, such as `detr` for scripts/train_detr.py."""
    return sorted(path.stem.removeprefix("train_") for path in (ROOT / "scripts").glob("train_*.py"))


def commands() -> dict[str, Path]:
    """Return the scripts that do not train, by the name of their command in `detect`."""
    scripts = {path.stem: path for path in sorted((ROOT / "scripts").glob("*.py")) if path.stem not in NOT_COMMANDS}
    return {COMMAND_NAMES.get(stem, stem): path for stem, path in scripts.items() if not stem.startswith("train_")}


def usage() -> str:
    """Return the help text of `detect`: its commands, each with the first line of its script."""
    scripts = {f"train {name}": ROOT / "scripts" / f"train_{name}.py" for name in detectors()} | commands()
    width = max(map(len, scripts)) + 2
    lines = [f"  detect {name:{width}}{first_line(path)}" for name, path in scripts.items()]
    lines.append(f"  detect {'copy':{width}}A script to change, and its configuration: detect copy train_detr mine.py")
    lines.append(f"  detect {'where':{width}}The path of a script or a configuration; without a name, of all of them.")
    return "\n".join(["usage: detect COMMAND [ARGUMENTS]   (each explains itself with --help)", "", *lines])


def version() -> str:
    """Return the version of this checkout, or that of the installed package."""
    project = ROOT / "pyproject.toml"
    if project.is_file():
        return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    return importlib.metadata.version("detection-toolkit")


def first_line(script: Path) -> str:
    """Return the first line of a script's docstring; "" if it has none."""
    return (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").partition("\n")[0]


@exit_on_bad_input
def copy(words: list[str]) -> int:
    """Write a copy of a training script, and of its default configuration with the same name and the ending `.yaml`.

    The copy of the script reads the copy of the configuration, and its runs have the name of the copy.

    words: the arguments of `detect copy`: the name of the script, and the path of the copy. Returns the exit code.
    """
    scripts = [f"train_{name}" for name in detectors()]
    name, *rest = words or [""]
    stem = Path(name).stem
    if stem not in scripts or len(rest) != 1 or not rest[0]:
        given = "" if stem in scripts else name
        return _refuse(
            "detect copy needs the path of the copy, such as mine.py, after one of",
            given,
            scripts,
        )
    script = ROOT / "scripts" / f"{stem}.py"
    target = Path(rest[0]).expanduser()
    beside = target.parent / f"{target.stem}.yaml"
    faults = _faults_of_copy(target, beside)
    if faults:
        print("\n".join(f"error: {fault}" for fault in faults), file=sys.stderr)
        return 2
    text = script.read_text(encoding="utf-8")
    default = re.compile(r"^DEFAULT_CONFIG = .*$", re.MULTILINE)
    config = ROOT.joinpath(*re.findall(r'"([^"]+)"', default.search(text)[0]))
    text = default.sub('DEFAULT_CONFIG = Path(__file__).resolve().with_suffix(".yaml")', text)
    text = re.sub(r'(?<=RunConfig\(name=)"[^"]+"', lambda _: repr(target.stem), text)
    settings = re.sub(
        r"^run:\n  name: .*\n",
        "run:\n",
        config.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    for path, content in ((target, text), (beside, settings)):
        path.write_text(content.replace(f"scripts/{script.name}", target.name), encoding="utf-8")
    print(f"{target}: the script, to be changed\n{beside}: its settings, those of {config.relative_to(ROOT)}")
    return 0


def _faults_of_copy(target: Path, beside: Path) -> list[str]:
    faults = [f"{path} exists already; give another name" for path in (target, beside) if path.exists()]
    if target.suffix != ".py":
        faults.append(f"{target} is not a Python file; give a name that ends in .py")
    elif not faults and target.stem.isidentifier() and importlib.util.find_spec(target.stem) is not None:
        faults.append(f"{target.name} would hide the module {target.stem}; give another name")
    if not target.parent.is_dir():
        faults.append(f"{target.parent} is not a folder; create it first")
    return faults


def where(words: list[str]) -> int:
    """Print the paths of files of this project, and return the exit code.

    words: names such as `configs/detr/bccd.yaml`; without any, the names of all scripts and configurations are printed.
    """
    files = [path for folder in ("configs", "scripts") for path in sorted((ROOT / folder).rglob("*"))]
    names = {path.relative_to(ROOT).as_posix(): path for path in files if path.suffix in (".yaml", ".py", ".sh")}
    if not words:
        print("\n".join(names))
        return 0
    unknown = [word for word in words if word not in names]
    if unknown:
        return _refuse(
            "no file of that name; `detect where` lists them",
            unknown[0],
            list(names),
            show=False,
        )
    print("\n".join(str(names[word]) for word in words))
    return 0


def _refuse(sentence: str, word: str, choices: list[str], show: bool = True) -> int:
    hint = did_you_mean(word, choices)
    listed = f" {', '.join(choices)}" if show else ""
    print(f"error: {sentence}{listed}{f', not {word!r}' if word else ''}{hint}", file=sys.stderr)
    return 2


if __name__ == "__main__":  # python -m toolkit.tools.detect
    raise SystemExit(main())
