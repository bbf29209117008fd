"""Files of a run that were edited by hand: one sentence for every fault, exit code 2, before anything is computed."""

import json
import random
import sys
from collections import Counter
from dataclasses import asdict
from typing import get_args, get_type_hints

import pytest
import yaml
from launching import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import evaluate
import export
import predict
import replay
import report
import train_detr

from toolkit.base.errors import BadInput
from toolkit.models import options_class
from toolkit.run.checkpoint_content import FORMAT_VERSION
from toolkit.run.open_run import script_of, settings_beside
from toolkit.run.settings_file import GROUPS, REQUIRED_KEYS, load_config_dict, save_config
from toolkit.tools.report.facts import run_facts

REMOVED = object()
# (group, key, value) of each edit -> what the sentences say
EDITS = {
    "no group": ([("data", None, REMOVED)], ["it has no group data"]),
    "groups that are none": ([("run", None, None), ("eval", None, [1])], ["run is null", "eval is [1]"]),
    "no key": ([("data", "image_size", REMOVED)], ["there is no data.image_size; expected the value that the run was"]),
    "wrong keys": ([("optim", "lrr", 1), ("optim", "lr", REMOVED), ("data", "colour", "red")],
                   ["setting optim.lrr; did you mean optim.lr?", "no such setting data.colour"]),
    "an unknown detector": ([("model", "architecture", "detrr")], ["'detrr' is none of", "did you mean 'detr'?"]),
    "wrong values": (
        [("optim", "lr", None), ("eval", "score_threshold", float("nan")), ("model", "d_model", {"a": 1}),
         ("data", "path", 5), ("data", "val", [1]), ("data", "format", "kitti"), ("model", "heads", [8]),
         ("data", "scales", "small")],
        ["optim.lr is null; expected a number of at least 0", "score_threshold is NaN; expected a number from 0 to 1",
         'model.d_model is {"a": 1}; expected a whole number from 1 to 100,000 or null',
         "data.path is 5; expected text or a list",
         "val is [1]", "data.format is kitti; expected one of auto, shapes, coco", "model.heads is [8]",
         "data.scales is small; expected a list"]),
}  # fmt: skip
FILES = {b"": "it is empty", b"- 1\n": "expected the settings of a run", b"\xff\xfe": "cannot be read as the",
         b"run: {name: [\n": "cannot be read as the settings of a run",
         b"run: {name: a}\nmodel: {}\nrun: {name: b}\n": "the key run appears twice",
         b"model: &a [*a]\n": "it contains itself, or far too much",
         b"".join(b"a%d: &a%d [%s]\n" % (i, i, b",".join([b"*a%d" % (i - 1) if i else b"x"] * 9)) for i in range(12)):
             "it contains itself, or far too much"}  # fmt: skip
NOT_NEEDED_BY_ALL = ("no group", "no key")  # replay and resume use nothing of it
PROGRAMS = {"evaluate", "export", "predict", "replay", "report", "resume"}
DEFAULTS = asdict(train_detr.Config())
HINTS = {name: get_type_hints(type(getattr(train_detr.Config(), name))) for name in GROUPS}
PLACES = [(name, key) for name, hints in HINTS.items() for key in (*hints, *[None] * 5) if not get_args(hints.get(key))]
CHANGED = {"gone": lambda value: REMOVED, "misspelt": None, "null": lambda value: None, "as text": str,
           "in a list": lambda value: [value], "in a mapping": lambda value: {"a": value},
           "NaN": lambda value: float("nan")}  # fmt: skip


def drawn(number: int) -> tuple[str, list, set[str]]:
    """An edit of a group, or of a setting of one plain type: its name, (group, key, value), who refuses it."""
    change = list(CHANGED)[number % len(CHANGED)]
    group, key = random.Random(number).choice(PLACES)
    value, is_needed = DEFAULTS[group], group in REQUIRED_KEYS and key in (None, *REQUIRED_KEYS[group])
    value = value if key is None else value[key]
    if change == "misspelt":
        wrong = (group + "s", None) if key is None else (group, key + "s")
        edits = [(group, key, REMOVED), (*wrong, value)]
    else:
        edits = [(group, key, CHANGED[change](value))]
    refused = PROGRAMS
    if change == "gone":
        refused = PROGRAMS - {"replay", "resume"} if is_needed else set()
    elif change == "as text" and not isinstance(value, dict):  # as YAML has 1e-3
        refused = set()
    return f"{number}: {group}.{key} {change}", edits, refused


@pytest.fixture
def run(tmp_path):
    """A run folder with the settings that a run writes."""
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    save_config(asdict(train_detr.Config()), tmp_path / "config.yaml")
    (tmp_path / "environment.json").write_text(json.dumps({"script": script_of(train_detr.Config())}))
    return tmp_path


def edit(run, edits):
    settings = yaml.safe_load((run / "config.yaml").read_text())
    for group, key, value in edits:
        place, name = (settings, group) if key is None else (settings[group], key)
        place.pop(name, None)
        place.update({} if value is REMOVED else {name: value})
    (run / "config.yaml").write_text(yaml.safe_dump(settings))


def said_by_all(run, monkeypatch, capsys, but=()):
    """What every program says of the run, by its name, each with exit code 2 and one message."""

    def rebuilt(*_):
        raise BadInput("the settings are read")

    replayed = "toolkit.tools.replay.program"
    monkeypatch.setattr(f"{replayed}.load_report", lambda folder: ({"categories": []}, [], {}, {}))  # read before
    monkeypatch.setattr(f"{replayed}.rebuild_detector", rebuilt)
    folder, out = str(run), ["--out", str(run / "out")]
    arguments = {evaluate: [folder], predict: [folder, str(ROOT / "tests"), *out], report: [folder, *out],
                 export: [folder, *out], replay: [str(run / "nan" / "step_000001" / "rank0")]}  # fmt: skip
    for program in (program for program in arguments if program.__name__ not in but):
        assert program.main(arguments[program]) == 2, program
        told = capsys.readouterr().err
        assert told.count("error: ") == 1 and "Traceback" not in told, told
        yield program.__name__, told
    if "resume" not in but:
        with pytest.raises(BadInput) as error:
            settings_beside(run / "checkpoints" / "step_000001", train_detr.Config(), options_class)
            rebuilt()
        yield "resume", str(error.value)


@pytest.mark.parametrize("case", EDITS)
def test_an_edit_of_the_settings_is_one_sentence_for_each_fault(run, monkeypatch, capsys, case):
    edits, words = EDITS[case]
    edit(run, edits)
    for _, told in said_by_all(run, monkeypatch, capsys, ("replay", "resume") if case in NOT_NEEDED_BY_ALL else ()):
        assert all(word in told for word in words), told
        assert told.count(f"{run / 'config.yaml'}: ") == len(words) - (case == "an unknown detector"), told


@pytest.mark.parametrize("content", FILES)
def test_settings_that_are_none_are_one_sentence(run, monkeypatch, capsys, content):
    (run / "config.yaml").write_bytes(content)
    assert all(FILES[content] in told for _, told in said_by_all(run, monkeypatch, capsys))


@pytest.mark.slow
def test_54_edits_are_read_or_refused_by_every_program(run, monkeypatch, capsys):
    written, counts = (run / "config.yaml").read_text(), Counter()
    for name, edits, refused in map(drawn, range(54)):
        (run / "config.yaml").write_text(written)
        edit(run, edits)
        said = dict(said_by_all(run, monkeypatch, capsys))
        assert {program for program, told in said.items() if "config.yaml: " in told} == refused, (name, said)
        counts.update("refused" if program in refused else "read" for program in said)
    with capsys.disabled():
        print(f"\n54 edits, {len(PROGRAMS)} programs: {dict(counts)}")
    assert counts["refused"] > 150 and counts["read"] > 50


def test_a_run_of_another_version_is_said_to_be_that_and_no_setting_is_blamed(run, monkeypatch, capsys):
    """Its settings have other names; what is wrong is their age."""
    edit(run, [("optim", "lrr", 1), ("optim", "lr", REMOVED)])
    (run / "checkpoints" / "step_000001" / "MANIFEST.json").write_text('{"format": 2, "files": {}}')
    for program, told in said_by_all(run, monkeypatch, capsys):
        version = f"was written by another version of this toolkit (format 2; this one reads {FORMAT_VERSION})"
        assert version in told, program
        assert "lrr" not in told and "Put back" not in told, told


def test_a_detector_that_cannot_be_imported_is_one_sentence(run, monkeypatch, capsys):
    """Nothing is wrong with the settings, so that nothing has to be put back."""
    edit(run, [("model", "architecture", "nowhere_to_be_found:Detector"), ("optim", "lrr", 1)])
    with pytest.raises(BadInput, match="is a class that a file names.*add --trust") as error:
        load_config_dict(run / "config.yaml", options_class, REQUIRED_KEYS)
    assert len(error.value.problems) == 1
    out = ["--out", str(run / "out")]
    arguments = {evaluate: [], predict: [str(ROOT / "tests"), *out], export: out}
    for program, words in arguments.items():
        assert program.main([str(run), *words, "--trust"]) == 2
        told = capsys.readouterr().err
        assert "nowhere_to_be_found:Detector cannot be imported: No module named" in told, told
        assert "Put back" not in told and "--trust" not in told and told.count("config.yaml") == 1, told


def test_what_a_run_writes_is_read_as_it_is(run):
    written = yaml.safe_load((run / "config.yaml").read_text())
    assert load_config_dict(run / "config.yaml", options_class, REQUIRED_KEYS) == written
    edit(run, [("optim", "lr", "1e-3"), ("hub", None, REMOVED), ("data", "path", REMOVED)])  # as YAML has 1e-3: text
    assert load_config_dict(run / "config.yaml", options_class, REQUIRED_KEYS)["optim"]["lr"] == 1e-3


def test_a_script_of_ones_own_may_have_settings_of_its_own(run):
    (run / "environment.json").write_text(json.dumps({"script": {"path": "mine.py", "sha256": "0"}}))
    edit(run, [("mine", None, {"a": 1}), ("loss", "focus", 2)])
    assert load_config_dict(run / "config.yaml", options_class, REQUIRED_KEYS)["loss"]["focus"] == 2
    edit(run, [("loss", "wieghts", {}), ("loss", "weights", REMOVED)])
    with pytest.raises(BadInput, match="no such setting loss.wieghts; did you mean loss.weights?"):
        load_config_dict(run / "config.yaml", options_class)


def test_records_that_a_report_reads(run):
    (run / "environment.json").write_text('{"command_line": 7}')
    (run / "status.json").write_text('{"ended_by": [3], "reason": "done", "state": {}}')
    with pytest.raises(BadInput) as error:
        run_facts(run)
    told = [problem.partition(": ")[2].partition(" is ")[0] for problem in error.value.problems]
    assert told == ["command_line", "state", "ended_by"]
