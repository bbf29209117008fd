"""Settings of a run in files: what changes on a resume, and one sentence for every fault of a file edited by hand."""

import json
import random
import sys
from dataclasses import asdict
from typing import get_args, get_type_hints

import pytest
import yaml
from places import ROOT

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
from toolkit.run.settings_file import (
    GROUPS,
    REQUIRED_KEYS,
    changes,
    config_files,
    in_force,
    load_config_dict,
    newest_config,
    next_config,
    read_settings,
    save_config,
)
from toolkit.tools.report.facts import run_facts

# ---- what changes on a resume ----------------------------------------------------------------------------------------

BEFORE = {
    "run": {"seed": 0, "max_steps": None, "max_minutes": 1.0, "name": "a", "keep": 2},
    "model": {"architecture": "ssd", "pretrained": None, "d_model": 96, "strides": [4, 8]},
    "optim": {"name": "adamw", "lr": 1e-3, "max_norm": 0.1},
    "schedule": {"name": "cosine"},
}
# Setting, its new value, and what becomes of it with the schedule of the checkpoint and with a new one.
VERDICTS = (
    ("optim.lr", 1e-2, "ignored", "used"),
    ("schedule.name", "linear", "ignored", "used"),
    ("run.max_steps", 9, "ignored", "used"),
    ("run.seed", 9, "ignored", "ignored"),
    ("run.keep", 9, "used", "used"),
    ("optim.max_norm", 0.0, "used", "used"),
    ("model.d_model", 64, "used", "used"),
    ("optim.name", "sgd", "refused", "refused"),
    ("model.architecture", "ssdlite", "refused", "refused"),
    # What is not a change.
    ("run.name", "b", None, None),
    ("run.new", 1, None, None),
    ("model.strides", (4, 8), None, None),
    ("optim.lr", 0.001, None, None),
)


def with_setting(name: str, value) -> dict:
    group, key = name.split(".")
    return BEFORE | {group: BEFORE[group] | {key: value}}


@pytest.mark.parametrize(("name", "value", "saved", "new"), VERDICTS)
def test_each_setting_is_used_ignored_or_refused(name, value, saved, new):
    after = with_setting(name, value)
    for keeps_schedule, verdict in ((True, saved), (False, new)):
        found = {change.key: change.verdict for change in changes(BEFORE, after, keeps_schedule)}
        assert found == ({name: verdict} if verdict else {})


def test_minutes_that_count_are_used():
    (change,) = changes(BEFORE, with_setting("run.max_minutes", 2.0), True, minutes_count=True)
    assert change.verdict == "used"


def test_a_change_is_one_line_and_what_is_ignored_is_not_in_force():
    after = BEFORE | {"optim": {"name": "adamw", "lr": 0.5, "max_norm": 1}, "run": BEFORE["run"] | {"name": "x\ny"}}
    found = changes(BEFORE, after, True)
    assert [str(change) for change in found] == [
        "optim.lr 0.001 -> 0.5: ignored, the checkpoint's stays in use; --run.resume_schedule new uses it",
        "optim.max_norm 0.1 -> 1: used",
    ]
    assert in_force(after, found)["optim"] == {"name": "adamw", "lr": 1e-3, "max_norm": 1}
    with pytest.raises(BadInput, match="optim.name adamw -> sgd: refused.*--run.name"):
        in_force(BEFORE, changes(BEFORE, with_setting("optim.name", "sgd"), True))


def test_every_start_keeps_its_settings(tmp_path):
    assert next_config(tmp_path) == newest_config(tmp_path) == tmp_path / "config.yaml"
    for number in range(1, 13):
        settings = BEFORE | {"run": {"eval_only": number == 12, "number": number}}
        save_config(settings, next_config(tmp_path), ["two\nlines: {"])
    names = [path.name for path in config_files(tmp_path)]
    assert names == ["config.yaml", *(f"config_{number}.yaml" for number in range(2, 13))]
    assert newest_config(tmp_path).name == "config_11.yaml", "an evaluation alone says nothing about the run"
    assert read_settings(tmp_path / "config_11.yaml")["run"]["number"] == 11
    assert (tmp_path / "config_2.yaml").read_text().startswith("# two lines: {\n")


# ---- files that were edited by hand ----------------------------------------------------------------------------------

REMOVED = object()
# (setting or group, value) of each edit, and what the sentences say.
EDITS = (
    ([("data", REMOVED)], ["it has no group data"]),
    ([("run", None), ("eval", [1])], ["run is null", "eval is [1]"]),
    ([("data.image_size", REMOVED)], ["there is no data.image_size; expected the value that the run was"]),
    (
        [("optim.lrr", 1), ("optim.lr", REMOVED), ("data.colour", "red")],
        ["setting optim.lrr; did you mean optim.lr?", "no such setting data.colour"],
    ),
    ([("model.architecture", "detrr")], ["'detrr' is none of"]),
    (
        [
            ("optim.lr", None),
            ("eval.score_threshold", float("nan")),
            ("model.d_model", {"a": 1}),
            ("data.path", 5),
            ("data.val", [1]),
            ("data.format", "kitti"),
            ("model.heads", [8]),
            ("data.scales", "small"),
        ],
        [
            "optim.lr is null; expected a number of at least 0",
            "score_threshold is NaN; expected a number from 0 to 1",
            'model.d_model is {"a": 1}; expected a whole number from 1 to 100,000 or null',
            "data.path is 5; expected text or a list",
            "val is [1]",
            "data.format is kitti; expected one of auto, shapes, coco",
            "model.heads is [8]",
            "data.scales is small; expected a list",
        ],
    ),
)


def nested_lists(depth: int) -> bytes:
    """A few lines of YAML that stand for 9 ** depth entries."""
    lines = [b"a0: &a0 [x]\n"]
    for level in range(1, depth):
        names = ",".join([f"*a{level - 1}"] * 9)
        lines.append(f"a{level}: &a{level} [{names}]\n".encode())
    return b"".join(lines)


FILES = {
    b"": "it is empty",
    b"- 1\n": "expected the settings of a run",
    b"\xff\xfe": "cannot be read as the",
    b"run: {name: [\n": "cannot be read as the settings of a run",
    b"run: {name: a}\nmodel: {}\nrun: {name: b}\n": "the key run appears twice",
    b"model: &a [*a]\n": "it contains itself, or far too much",
    nested_lists(12): "it contains itself, or far too much",
}


@pytest.fixture
def run(tmp_path):
    """A run folder with the settings that a run writes."""
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    save_config(asdict(train_detr.Config()), tmp_path / "config.yaml")
    (tmp_path / "environment.json").write_text(json.dumps({"script": script_of(train_detr.Config())}))
    return tmp_path


def edit(run, edits) -> None:
    settings = yaml.safe_load((run / "config.yaml").read_text())
    for name, value in edits:
        group, _, key = name.partition(".")
        place = settings[group] if key else settings
        place.pop(key or group, None)
        place.update({} if value is REMOVED else {key or group: value})
    (run / "config.yaml").write_text(yaml.safe_dump(settings))


def loaded(run) -> dict:
    return load_config_dict(run / "config.yaml", options_class, REQUIRED_KEYS)


def refusal(run) -> BadInput:
    with pytest.raises(BadInput) as error:
        loaded(run)
    return error.value


@pytest.mark.parametrize(("edits", "words"), EDITS)
def test_an_edit_of_the_settings_is_one_sentence_for_each_fault(run, edits, words):
    edit(run, edits)
    told = str(refusal(run))
    assert [word for word in words if word not in told] == []
    assert told.count(f"{run / 'config.yaml'}: ") == len(words), told


@pytest.mark.parametrize("content", FILES)
def test_settings_that_are_none_are_one_sentence(run, content):
    (run / "config.yaml").write_bytes(content)
    assert FILES[content] in str(refusal(run))


def test_a_run_of_another_version_is_said_to_be_that_and_no_setting_is_blamed(run):
    """Its settings have other names; what is wrong is their age."""
    edit(run, [("optim.lrr", 1), ("optim.lr", REMOVED)])
    (run / "checkpoints" / "step_000001" / "MANIFEST.json").write_text('{"format": 2, "files": {}}')
    told = str(refusal(run))
    assert f"was written by another version of this toolkit (format 2; this one reads {FORMAT_VERSION})" in told
    assert "lrr" not in told
    assert "Put back" not in told


def test_a_detector_that_a_file_names_is_not_imported(run):
    edit(run, [("model.architecture", "nowhere_to_be_found:Detector"), ("optim.lrr", 1)])
    error = refusal(run)
    assert "is a class that a file names" in str(error)
    assert "add --trust" in str(error)
    assert len(error.problems) == 1


def test_a_trusted_detector_that_cannot_be_imported_is_one_sentence(run, capsys):
    """Nothing is wrong with the settings, so that nothing has to be put back."""
    edit(run, [("model.architecture", "nowhere_to_be_found:Detector"), ("optim.lrr", 1)])
    assert evaluate.main([str(run), "--trust"]) == 2
    told = capsys.readouterr().err
    assert "nowhere_to_be_found:Detector cannot be imported: No module named" in told
    assert "Put back" not in told
    assert "--trust" not in told
    assert told.count("config.yaml") == 1


def arguments_of(run) -> dict:
    """The arguments with which each program opens a run."""
    out = ["--out", str(run / "out")]
    return {
        evaluate: [str(run)],
        predict: [str(run), str(ROOT / "tests"), *out],
        report: [str(run), *out],
        export: [str(run), *out],
        replay: [str(run / "nan" / "step_000001" / "rank0")],
    }


def said_by_programs(run, monkeypatch, capsys) -> dict[str, str]:
    """What every program says of the run, by its name, each with exit code 2 and one message."""

    def rebuilt(*_):
        raise BadInput("the settings are read")

    replayed = "toolkit.tools.replay.program"
    monkeypatch.setattr(f"{replayed}.load_report", lambda folder: ({"categories": []}, [], {}, {}))  # read before
    monkeypatch.setattr(f"{replayed}.rebuild_detector", rebuilt)
    told = {}
    for program, arguments in arguments_of(run).items():
        assert program.main(arguments) == 2, program
        text = capsys.readouterr().err
        assert text.count("error: ") == 1
        assert "Traceback" not in text
        told[program.__name__] = text
    with pytest.raises(BadInput) as error:
        settings_beside(run / "checkpoints" / "step_000001", train_detr.Config(), options_class)
        rebuilt()
    return told | {"resume": str(error.value)}


PROGRAMS = {"evaluate", "export", "predict", "replay", "report", "resume"}
NEED_ALL = PROGRAMS - {"replay", "resume"}  # which use nothing of what is gone
DEFAULTS = asdict(train_detr.Config())
CHANGES = ("gone", "misspelt", "null", "as text", "in a list", "in a mapping", "NaN")


def places() -> list[tuple[str, str | None]]:
    """Settings of one plain type, and each group several times, as (group, key or None)."""
    found = []
    for group in GROUPS:
        hints = get_type_hints(type(getattr(train_detr.Config(), group)))
        found += [(group, key) for key, hint in hints.items() if not get_args(hint)]
        found += [(group, None)] * 5
    return found


def drawn(number: int) -> tuple[list, set[str]]:
    """An edit of a setting or a group, chosen by a number: the edits, and who refuses it."""
    change = CHANGES[number % len(CHANGES)]
    group, key = random.Random(number).choice(places())
    name = group if key is None else f"{group}.{key}"
    value = DEFAULTS[group] if key is None else DEFAULTS[group][key]
    if change == "gone":
        is_needed = group in REQUIRED_KEYS and key in (None, *REQUIRED_KEYS[group])
        return [(name, REMOVED)], NEED_ALL if is_needed else set()
    if change == "misspelt":
        return [(name, REMOVED), (f"{name}s", value)], PROGRAMS
    if change == "as text":  # as YAML has 1e-3
        return [(name, str(value))], PROGRAMS if key is None else set()
    wrong = {"null": None, "in a list": [value], "in a mapping": {"a": value}, "NaN": float("nan")}
    return [(name, wrong[change])], PROGRAMS


@pytest.mark.parametrize("number", [*range(7), *[pytest.param(n, marks=pytest.mark.slow) for n in range(7, 35)]])
def test_every_program_reads_or_refuses_an_edit(run, monkeypatch, capsys, number):
    edits, refused_by = drawn(number)
    edit(run, edits)
    said = said_by_programs(run, monkeypatch, capsys)
    assert {program for program, text in said.items() if "config.yaml: " in text} == refused_by, (edits, said)


def test_what_a_run_writes_is_read_as_it_is(run):
    assert loaded(run) == yaml.safe_load((run / "config.yaml").read_text())
    edit(run, [("optim.lr", "1e-3"), ("hub", REMOVED), ("data.path", REMOVED)])  # as YAML has 1e-3: text
    assert loaded(run)["optim"]["lr"] == 1e-3


def test_a_script_of_ones_own_may_have_settings_of_its_own(run):
    (run / "environment.json").write_text(json.dumps({"script": {"path": "mine.py", "sha256": "0"}}))
    edit(run, [("mine", {"a": 1}), ("loss.focus", 2)])
    assert loaded(run)["loss"]["focus"] == 2
    edit(run, [("loss.wieghts", {}), ("loss.weights", REMOVED)])
    assert "no such setting loss.wieghts; did you mean loss.weights?" in str(refusal(run))


def test_records_that_a_report_reads_are_checked(run):
    (run / "environment.json").write_text('{"command_line": 7}')
    (run / "status.json").write_text('{"ended_by": [3], "reason": "done", "state": {}}')
    with pytest.raises(BadInput) as error:
        run_facts(run)
    told = [problem.partition(": ")[2].partition(" is ")[0] for problem in error.value.problems]
    assert told == ["command_line", "state", "ended_by"]
