"""Files and flags of the programs beside training, in any order."""

import importlib
import sys

import pytest
from places import ROOT

from toolkit.tools.arguments import Program

# Program, the function that gets what was parsed, files, flags with their values, and where the files are.
PROGRAMS = (
    ("predict", "toolkit.tools.predict.program.predict", "run a.jpg b.jpg", "--trust|--out found", "images"),
    ("evaluate", "toolkit.tools.evaluate.evaluate", "run fold", "--trust|--expect.bbox_AP 0.5", "run"),
    ("report", "toolkit.tools.report.program.report", "run other", "--trust|--out found", "sources"),
    ("export", "toolkit.tools.export.program.export", "run", "--formats onnx torch|--trust|--out found", "model"),
    ("check_data", "toolkit.tools.doctor.program.check_data", "a b", "--anchors|--json x", "source"),
    ("choose", "choose.choose", "a b", "--minutes 5|--offline", "source"),
    ("sweep", "sweep.run_sweep", "sweep.yaml", "--seed 1|--out found", "sweep"),
)


class Parsed(Exception):
    """Carries what a program has parsed out of it."""


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def parsed_by(program: str, function: str, words: list[str], monkeypatch):
    """Return the arguments that the program has parsed, without running it."""
    script = importlib.import_module(program)

    def stop(arguments, *rest):
        raise Parsed(arguments)

    monkeypatch.setattr(function, stop)
    with pytest.raises(Parsed) as parsed:
        script.main(words)
    return parsed.value.args[0]


@pytest.mark.parametrize(("program", "function", "files", "flags", "name"), PROGRAMS)
def test_files_and_flags_stand_in_any_order(program, function, files, flags, name, monkeypatch):
    files = files.split()
    for flags_in_order in (flags.split("|"), flags.split("|")[::-1]):
        words_of_flags = " ".join(flags_in_order).split()
        for place in range(len(files) + 1):
            if "torch" in words_of_flags[-1:] and place < len(files):
                continue  # it takes the run for a format
            words = [*files[:place], *words_of_flags, *files[place:]]
            found = getattr(parsed_by(program, function, words, monkeypatch), name)
            given = [str(file) for file in found] if isinstance(found, list) else [str(found)]
            assert given == (files[1:] if name == "images" else files), words


def test_values_of_settings_are_not_taken_for_images(monkeypatch):
    words = "run --model.nms_threshold 0.6 a.jpg --head.effect=tde b.jpg --out found".split()
    found = parsed_by(*PROGRAMS[0][:2], words, monkeypatch)
    assert found.images == ["a.jpg", "b.jpg"]
    assert found.settings == {"nms_threshold": 0.6, "head_options.effect": "tde"}


BEFORE = "takes every word up to the next flag; put {} before it"
REFUSED = (
    (
        "predict run --out o --format coco yolo a.jpg",
        "invalid choice: 'a.jpg'",
        f"--format {BEFORE.format('model and images')}",
    ),
    (
        "predict --out o --classes cat run",
        "required: model",
        "--classes took cat, run: --classes takes every word up to the next flag",
    ),
    ("predict run --out o --classes cat a.jpg", "no images", "--classes took cat, a.jpg: put the images before it"),
    ("predict run a.jpg --out o --thrust", "--thrust: no such flag; did you mean --trust?", ""),
    ("evaluate run --dataset d", "--dataset: no such flag; did you mean --data.path?", ""),
    ("evaluate run --device cuda", "--device: no such flag; there is nothing to set: a GPU is used", ""),
    ("convert a b c --to voc", "c: not expected here; put quotes around a name with spaces", ""),
    ("export --out o --formats onnx run", "invalid choice: 'run'", f"--formats {BEFORE.format('model')}"),
    ("check_data --image-size 640 folder", "folder: expected a whole number above 0", BEFORE.format("source")),
    ("evaluate run --expect.bbox_AP", "--expect.bbox_AP is nothing; expected a number", ""),
    ("evaluate run --expect.bbox_AP high", "--expect.bbox_AP is high; expected a number", ""),
    ("evaluate run --expects.bbox_AP 0.5", "--expects.bbox_AP: no such flag", ""),
)


@pytest.mark.parametrize(("command", "what", "why"), REFUSED)
def test_words_that_cannot_be_placed_are_one_sentence(command, what, why, capsys):
    program, *words = command.split()
    try:
        code = importlib.import_module(program).main(words)
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr().err
    assert code == 2
    assert printed.count("error: ") == 1
    assert printed.count("takes every word") <= 1
    assert what in printed
    assert why in printed


def test_words_after_two_dashes_are_files(monkeypatch):
    parser = Program("x", prog="x.py")
    parser.add_argument("images", nargs="*")
    parser.add_argument("--format", nargs="+", choices=("coco", "yolo"))
    monkeypatch.setattr(sys, "argv", ["x.py", "--format", "coco", "--", "a.jpg", "b.jpg"])
    assert parser.parse_args().images == ["a.jpg", "b.jpg"]
