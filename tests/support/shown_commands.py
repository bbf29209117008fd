"""The commands that README, docs, configurations and scripts show, and which of them cannot run on any machine."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

from places import ROOT

from toolkit.tools import detect

DOCS = [path for path in sorted(ROOT.glob("docs/**/*.md")) if path.stem != "design"]  # which speaks of scripts/x.py
PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, *sorted(ROOT.glob("configs/**/*.md"))]
CODE = [path for pattern in ("configs/**/*.yaml", "scripts/*.py", "toolkit/**/*.py") for path in ROOT.glob(pattern)]
STARTS = "accelerate launch|torchrun|python|make|scripts/runs/|detect|pip"
COMMAND = re.compile(rf"^(?:# |#   )?\s*((?:\w+=\S+ )?(?:{STARTS})\b(?!:| =).*)$")
INLINE = re.compile(r"`((?:python|make|accelerate|detect) [^`]+)`")


class Shown(NamedTuple):
    """A command, and the parts of it.

    launcher: words before the script; those of a command that starts none are all there.
    script: name of the script without `.py`, or None.
    """

    text: str
    files: tuple[str, ...]
    launcher: tuple[str, ...]
    script: str | None
    arguments: tuple[str, ...]

    @property
    def trains(self) -> bool:
        return self.script is not None and self.script.startswith("train_")


def _lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        return [line for line in text.splitlines() if re.match(r"#|    \S", line)]
    lines = []
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        lines += block.replace("\\\n", " ").splitlines()
    return lines + [command for command in INLINE.findall(text) if command != "accelerate launch"]  # its name alone


def _parts(text: str) -> tuple[list[str], str | None, list[str]]:
    words = shlex.split(text)
    if words[0] == "detect" and words[1] == "train":
        return [], f"train_{words[2]}", words[3:]
    if words[0] == "detect" and words[1] in detect.commands():
        return [], detect.commands()[words[1]].stem, words[2:]
    for place, word in enumerate(words):
        if re.fullmatch(r"scripts/\w+\.py", word) and words[0] not in ("detect", "scripts/runs/until_done.sh"):
            return words[:place], Path(word).stem, words[place + 1 :]
    return words, None, []


def shown_commands() -> list[Shown]:
    """Return every command once, with the files that show it; not those in which `...` stands for something."""
    files: dict[str, list[str]] = {}
    for path in [*PROSE, *sorted(CODE)]:
        for line in _lines(path):
            match = COMMAND.match(line)
            if match and "..." not in match[1]:
                text = " ".join(re.sub(r"\s{2,}#.*", "", match[1]).split())
                files.setdefault(text, []).append(str(path.relative_to(ROOT)))
    commands = []
    for text, places in files.items():
        launcher, script, arguments = _parts(text)
        commands.append(Shown(text, tuple(places), tuple(launcher), script, tuple(arguments)))
    return commands
