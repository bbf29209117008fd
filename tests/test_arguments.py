"""Files and flags of the programs beside training, in any order."""

import importlib
import itertools
import sys

import pytest

from toolkit.tools.arguments import Program

# By program: the function that gets what was parsed.
FUNCTIONS = {
    "predict": "toolkit.tools.predict.program.predict",
    "evaluate": "toolkit.tools.evaluate.evaluate",
    "report": "toolkit.tools.report.program.report",
    "export": "toolkit.tools.export.program.export",
    "check_data": "toolkit.tools.doctor.program.check_data",
    "sweep": "sweep.run_sweep",
}
# By program: files; flags with their values; where the files are, as what.
PROGRAMS = {
    "predict": (["run", "a.jpg", "b.jpg"], [["--trust"], ["--out", "found"]], "images", ["a.jpg", "b.jpg"]),
    "evaluate": (["run", "fold"], [["--trust"], ["--expect.bbox_AP", "0.5"]], "run", ["run", "fold"]),
    "report": (["run", "other"], [["--trust"], ["--out", "found"]], "sources", ["run", "other"]),
    "export": (["run"], [["--trust"], ["--out", "found"], ["--formats", "onnx", "torch"]], "model", "run"),
    "check_data": (["a", "b"], [["--anchors"], ["--json", "x"]], "source", ["a", "b"]),
    "sweep": (["sweep.yaml"], [["--seed", "1"], ["--out", "found"]], "sweep", "sweep.yaml"),
}


class Parsed(Exception):
    """Carries what a program has parsed out of it."""


def parsed_by(program: str, words: list[str], monkeypatch):
    """Return the arguments that the program has parsed, without running it."""
    monkeypatch.syspath_prepend("scripts")
    script = importlib.import_module(program)

    def stop(arguments, *rest):
        raise Parsed(arguments)

    monkeypatch.setattr(FUNCTIONS[program], stop)
    with pytest.raises(Parsed) as parsed:
        script.main(words)
    return parsed.value.args[0]


def orders(given: list[str], flags: list[list[str]]):
    """All command lines with these words; a flag that takes several stands before another flag or at the end."""
    for places in itertools.product(range(len(given) + 1), repeat=len(flags)):
        for order in itertools.permutations(range(len(flags))):
            words, last = [], len(given)
            for position in range(last + 1):
                words += [word for flag in order if places[flag] == position for word in flags[flag]]
                words += given[position : position + 1]
            yield words


@pytest.mark.parametrize("program", PROGRAMS)
def test_files_and_flags_stand_in_any_order(program, monkeypatch):
    given, flags, name, expected = PROGRAMS[program]
    for words in orders(given, flags):
        if program == "export" and words.index("run") - words.index("--formats") == 3:
            continue  # it takes the run for a format
        found = getattr(parsed_by(program, words, monkeypatch), name)
        assert (list(map(str, found)) if isinstance(expected, list) else str(found)) == expected, words


def test_values_of_settings_are_not_taken_for_images(monkeypatch):
    words = ["run", "--model.nms_threshold", "0.6", "a.jpg", "--head.effect=tde", "b.jpg", "--out", "found"]
    found = parsed_by("predict", words, monkeypatch)
    assert found.images == ["a.jpg", "b.jpg"] and found.settings == {
        "nms_threshold": 0.6, "head_options.effect": "tde",
    }  # fmt: skip


REFUSED = (  # program, words, what is said of them
    ("predict", ["run", "--out", "o", "--format", "coco", "yolo", "a.jpg"],
     ["invalid choice: 'a.jpg'", "--format takes every word up to the next flag; put model and images before it"]),
    ("predict", ["--out", "o", "--classes", "cat", "run"],
     ["required: model", "--classes took cat, run: --classes takes every word up to the next flag"]),
    ("predict", ["run", "--out", "o", "--classes", "cat", "a.jpg"],
     ["no images", "--classes took cat, a.jpg: put the images before it"]),
    ("predict", ["run", "a.jpg", "--out", "o", "--thrust"], ["unrecognized arguments: --thrust"]),
    ("export", ["--out", "o", "--formats", "onnx", "run"],
     ["invalid choice: 'run'", "--formats takes every word up to the next flag; put model before it"]),
    ("check_data", ["--image-size", "640", "folder"],
     ["folder: expected a whole number above 0", "takes every word up to the next flag; put source before it"]),
    ("evaluate", ["run", "--expect.bbox_AP"], ["--expect.bbox_AP is nothing; expected a number"]),
    ("evaluate", ["run", "--expect.bbox_AP", "high"], ["--expect.bbox_AP is high; expected a number"]),
    ("evaluate", ["run", "--expects.bbox_AP", "0.5"], ["unrecognized arguments: --expects.bbox_AP"]),
)  # fmt: skip


@pytest.mark.parametrize(("program", "words", "said"), REFUSED)
def test_words_that_cannot_be_placed_are_one_sentence(program, words, said, monkeypatch, capsys):
    monkeypatch.syspath_prepend("scripts")
    try:
        code = importlib.import_module(program).main(words)
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr().err
    assert code == 2 and printed.count("error: ") == 1 and printed.count("takes every word") <= 1
    assert all(part in printed for part in said), printed


def test_words_after_two_dashes_are_files(monkeypatch):
    parser = Program("x", prog="x.py")
    parser.add_argument("images", nargs="*")
    parser.add_argument("--format", nargs="+", choices=("coco", "yolo"))
    monkeypatch.setattr(sys, "argv", ["x.py", "--format", "coco", "--", "a.jpg", "b.jpg"])
    assert parser.parse_args().images == ["a.jpg", "b.jpg"]
