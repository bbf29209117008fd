"""Every command that is shown runs to its exit code on tiny data, and every fault of an argument ends in a sentence.

A traceback is a failure, whatever the exit code. Commands run one after the other in a forked process that has
everything imported; the folder in which they run has all that they name (`tests/support/example_folder.py`).
"""

import glob
import importlib
import importlib.util
import itertools
import math
import os
import random
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser
from calling import Call, call_all
from example_folder import make_example_folder, prepare_nothing, shorten_trainings
from flags import (
    FAULTS,
    NOT_NUMBERS,
    Case,
    cases_of,
    model_settings,
    open_ended_cases,
    parser_of,
    script_of,
    shared_settings,
    takes_text,
)
from inputs import (
    BASES,
    make_inputs,
    replace_what_takes_long,
    stop_before_the_first_step,
    training_argv,
)
from places import ROOT
from shown_commands import PROSE, Shown, shown_commands
from torch.distributed.run import get_args_parser

from toolkit.base.errors import BadInput, explain_error
from toolkit.index import DETECTORS
from toolkit.run.command_line import parse_config
from toolkit.run.setting_types import describe_type
from toolkit.tools import detect

pytestmark = pytest.mark.skipif(os.name != "posix", reason="its calls are forked")
SEED = 65  # of the pairs of flags and faults that are tried
# Exit codes beside 0 and 2 that the programs document: warnings, images that cannot be read, what is not reproduced.
DOCUMENTED = {"check_data": {1}, "predict": {1}, "evaluate": {1}, "export": {1}, "replay": {1}}


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "support"))
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.chdir(ROOT)


# ---- the commands that are shown -------------------------------------------------------------------------------------

COMMANDS = shown_commands()
# Commands that are parsed to the end and not run, by what they have, and why.
NOT_RUN = {
    r"facebook/|Roboflow/|NAME": "weights or data of the hub, which need the network",
    r"hub\.push": "uploads with somebody's account",
    r"\.pth|yolov3\.weights|runs/published": "published weights, which are downloaded by hand",
    r"--camera": "a camera",
    r"vg150_egtr": "learning rates of the layers of its recipe's detector; test_train_sgg.py runs it on a small one",
    r"effect: TDE": "a run with the detector of the default settings; that of the example folder is smaller",
    r"resnet18\.a1_in1k|dinov3": "weights of a backbone, which need the network",
}
if importlib.util.find_spec("openvino") is None:
    NOT_RUN |= {"openvino|int8": "OpenVINO, which is not installed"}
# Programs that work for long once they have parsed and checked all: they end there.
ENDS_EARLY = {
    "benchmark": "measures for minutes; tests/scripts/test_benchmark.py runs its benches",
    "choose": "starts many trainings",
    "find_batch_size": "looks for the limit of a GPU's memory",
    "find_rate": "trains a hundred steps in a process of its own",
    "sweep": "starts many trainings",
}
# Names in the documentation that stand for something of the user's.
STAND_FOR = {"FILE": "val.json", "DST": "found/dst"}


def reason_not_to_run(command: Shown) -> str:
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, command.text)), "")


def argv_of(command: Shown, folder: Path) -> tuple[str, ...]:
    """The arguments as a shell would hand them over."""
    words = [STAND_FOR.get(word, word) for word in command.arguments]
    if "--val" in words:  # a share of data that have no split of their own
        words = ["ONE_SPLIT" if word == "DIR" else word for word in words]
    if words[:1] == ["results.json"] and "--split" in words:  # of any program, on that file
        words[0] = "results_of_val.json"
    argv = []
    for word in words:
        found = sorted(glob.glob(word, root_dir=folder)) if word.endswith("_*") else []
        argv += found or [word]
    return tuple(argv)


def new_ones(commands: Iterable[Shown]) -> list[Shown]:
    """The first command of each program, and those with a flag that none before has."""
    seen = set()
    chosen = []
    for command in commands:
        flags = {(command.script, word) for word in ("", *command.arguments) if not word or word.startswith("--")}
        if flags - seen:
            chosen.append(command)
        seen |= flags
    return chosen


PROGRAMS = [c for c in COMMANDS if c.script and not c.trains and not reason_not_to_run(c)]
EXPORTING = [c for c in PROGRAMS if c.script == "export" or ".onnx" in c.text]  # a model takes ten seconds
QUICK = new_ones(c for c in PROGRAMS if c not in EXPORTING and c.script not in ENDS_EARLY)
LATER = [c for c in PROGRAMS if c not in QUICK and c not in EXPORTING and c.script not in ENDS_EARLY]
EARLY = [c for c in PROGRAMS if c.script in ENDS_EARLY]


@pytest.fixture(scope="module")
def examples(once, tmp_path_factory):
    """A copy of the folder with all that commands name."""
    made = once("examples", make_example_folder)
    return shutil.copytree(made, tmp_path_factory.mktemp("commands") / "examples", symlinks=True)


def assert_all_run(commands: list[Shown], folder: Path, prepare) -> None:
    """Run the commands; each ends with 0, or with 1 where it expects what random weights do not reach."""
    outcomes = call_all([Call(c.script, argv_of(c, folder)) for c in commands], folder, prepare)
    wrong = {}
    for command, outcome in zip(commands, outcomes, strict=True):
        if outcome.failure or outcome.code != int("--expect." in command.text):
            wrong[command.text] = (command.files, outcome.code, outcome.failure or outcome.said[-500:])
    assert not wrong


def test_a_command_with_each_flag_of_each_program_runs(examples):
    assert len(QUICK) > 40
    assert_all_run(QUICK, examples, prepare_nothing)


def test_commands_that_take_long_check_all_their_arguments(examples):
    assert {command.script for command in EARLY} == set(ENDS_EARLY)
    assert_all_run(EARLY, examples, replace_what_takes_long)


@pytest.mark.slow
def test_every_other_command_runs(examples):
    assert_all_run(LATER, examples, prepare_nothing)


@pytest.mark.slow
def test_every_command_of_exported_models_runs(examples):
    """`--benchmark` measures for half a minute."""
    export = Call("export", ("runs/detr", "--out", "exported", "--formats", "onnx"))
    (outcome,) = call_all([export], examples, prepare_nothing, keep=True)
    assert outcome.code == 0, outcome
    shutil.copy(examples / "exported" / "model.onnx", examples / "runs" / "detr" / "final")
    of_models = [command for command in EXPORTING if ".onnx" in command.text]
    assert_all_run(of_models, examples, prepare_nothing)
    shutil.rmtree(examples / "exported")
    assert_all_run([command for command in EXPORTING if command not in of_models], examples, prepare_nothing)


# Settings that are set to something small, or do not change which lines of the program run.
ALIKE = (
    "--run.name --run.tracker --run.group --run.tags --run.epochs --run.resume --data.path --data.image_size".split()
)
ALIKE += ["--data.batch_size_per_device", "--eval.batch_size_per_device", "--optim.lr", "--run.max_minutes"]
OTHER_ACTIONS = {"--help", "--print_config", "-h"}


def trainings() -> dict[str, list[Shown]]:
    """The training commands of each script; of those that differ in a name or a number, one."""
    found: dict[tuple, Shown] = {}
    for command in COMMANDS:
        if command.trains and not reason_not_to_run(command) and not OTHER_ACTIONS & set(command.arguments):
            pairs = zip(command.arguments[::2], command.arguments[1::2], strict=True)
            kept = tuple(pair for pair in pairs if pair[0] not in ALIKE)
            found.setdefault((command.script, kept), command)
    by_script: dict[str, list[Shown]] = {}
    for (script, _), command in found.items():
        by_script.setdefault(script, []).append(command)
    return by_script


TRAININGS = trainings()


def assert_all_train(commands: list[Shown], folder: Path) -> None:
    """Each in a folder of runs of its own, so that no run is in the way of another."""
    shown = []
    for number, command in enumerate(commands):
        place = ("--run.output_dir", f"trained/{command.script}_{number}")
        shown.append(command._replace(arguments=(*command.arguments, *place)))
    assert_all_run(shown, folder, shorten_trainings)


def test_the_first_training_of_each_script_runs(examples):
    assert_all_train([commands[0] for commands in TRAININGS.values()], examples)


@pytest.mark.slow
@pytest.mark.parametrize("script", TRAININGS)
def test_every_training_runs(script, examples):
    assert_all_train(TRAININGS[script][1:], examples)


# ---- what cannot run is parsed to the end ----------------------------------------------------------------------------

PARSED = [c for c in COMMANDS if c.script and (reason_not_to_run(c) or OTHER_ACTIONS & set(c.arguments))]
OTHERS = [c for c in COMMANDS if not c.script]


@pytest.mark.parametrize("command", PARSED, ids=lambda command: command.text[:60])
def test_a_command_that_cannot_run_is_parsed(command):
    if command.trains:
        module = importlib.import_module(command.script)
        try:
            parse_config(module.Config, list(command.arguments), module.DEFAULT_CONFIG)
        except SystemExit as end:
            assert OTHER_ACTIONS & set(command.arguments)
            assert end.code in (0, None)
    else:
        known = {flag for action in parser_of(command.script)._actions for flag in action.option_strings}
        given = {word for word in command.arguments if word.startswith("--")}
        assert given - known <= {word for word in given if word.startswith(("--head.", "--model.", "--hub."))}


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.launcher], ids=lambda command: command.text[:60])
def test_a_launcher_understands_its_words(command):
    words = [word for word in command.launcher if not re.match(r"\w+=", word)]
    if words[:2] == ["accelerate", "launch"]:
        parsed = launch_command_parser().parse_args([*words[2:], "script.py"])
        assert parsed.config_file is None or (ROOT / parsed.config_file).is_file()
    elif words[0] == "torchrun":
        assert get_args_parser().parse_args([*words[1:], "script.py"]).training_script == "script.py"
    else:
        assert words == ["python"] or command in OTHERS


def is_test(name: str) -> bool:
    """Whether some test has this in its name."""
    return any(re.search(rf"def test_\w*{name}", path.read_text()) for path in (ROOT / "tests").rglob("test_*.py"))


def assert_named_things_exist(words: list[str]) -> None:
    """The extras, modules, files and tests that a command names."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for place, word in enumerate(words):
        if words[0] == "pip":
            assert {name for names in re.findall(r"\[([\w,]+)\]", word) for name in names.split(",")} <= set(extras)
        elif words[place - 1] == "-m" and words[1] == "-m" and place == 2:
            assert importlib.util.find_spec(word) is not None
        elif words[place - 1] == "-k":
            assert is_test(word), word
        elif re.match(r"(tests|scripts)/", word):
            assert (ROOT / word).exists(), word
        elif word.endswith(".py") and place and words[0] != "detect":  # it stands on the page itself
            assert any(f'```python title="{word}"' in path.read_text() for path in PROSE), word


@pytest.mark.parametrize("command", OTHERS, ids=lambda command: command.text[:60])
def test_a_command_that_is_not_a_script_is_there(command, tmp_path):
    words = list(command.launcher)
    if words[0] == "make":
        assert shutil.which("make") is None or subprocess.run(["make", "-n", *words[1:]], cwd=ROOT).returncode == 0
    elif words[0] == "detect":
        target = [str(tmp_path / word) if word == "mine.py" else word for word in words[1:]]
        assert detect.main(target) == 0
    elif words[1:3] == ["-m", "toolkit.tools.shapes"] and "[" not in command.text:
        small = ["--train-images", "1", "--val-images", "1", "--image-size", "64"]
        importlib.import_module(words[2]).main([*shlex.split(f"--out {tmp_path}/shapes"), *words[5:], *small])
    else:
        assert_named_things_exist(words)


def test_what_is_shown_is_found():
    files = {file for command in COMMANDS for file in command.files}
    assert {"README.md", "docs/data.md", "scripts/train_detr.py", "scripts/evaluate.py"} <= files
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "configs").glob("detr/*.yaml")} <= files


# ---- faults of arguments ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(once, tmp_path):
    """A copy of the inputs, which is the working folder of the calls."""
    made = once("promises", make_inputs)
    return shutil.copytree(made, tmp_path / "inputs", symlinks=True)


def complaint(case: Case, outcome) -> str:
    """Say what is wrong with the way in which a call ended; "" if nothing is."""
    if outcome.failure:
        return outcome.failure.strip().splitlines()[-1]
    if outcome.code != 2:
        allowed = {0, *DOCUMENTED.get(case.call.program, ())}
        return "" if outcome.code in allowed else f"exit code {outcome.code}: {outcome.said[-200:]}"
    if outcome.changed_run:
        return "it is refused, and has changed the run"
    names = [case.name, case.name.removeprefix("--").replace("-", "_")]
    names += [case.value.encode("utf-8", "backslashreplace").decode()] if case.value else []
    names += ["`~`"] if case.fault == "no home" else []
    is_named = any(name in outcome.said for name in names) or case.fault in ("odd letters", "not UTF-8")
    return "" if is_named and "error: " in outcome.said else f"it does not say which argument: {outcome.said[-300:]}"


def check(cases: list[Case], folder: Path, prepare=replace_what_takes_long) -> list:
    """Make the calls; assert that each is taken or refused in words, and return how they ended."""
    outcomes = call_all([case.call for case in cases], folder, prepare)
    wrong = {}
    for case, outcome in zip(cases, outcomes, strict=True):
        said = complaint(case, outcome)
        if said:
            wrong[case.call.program, case.name, case.fault] = said
    assert not wrong, "\n".join(f"{key}: {said}" for key, said in wrong.items())
    return outcomes


def drawn(cases: Iterable[Case], least: int) -> list[Case]:
    """Choose `least` cases or more of each flag, so that each fault occurs; by a seed."""
    by_flag: dict[str, list[Case]] = {}
    for case in cases:
        by_flag.setdefault(case.name, []).append(case)
    faults = sorted({case.fault for group in by_flag.values() for case in group})
    random.Random(SEED).shuffle(faults)
    per_flag = max(least, math.ceil(len(faults) / len(by_flag)))
    turns = itertools.cycle(faults)
    chosen = []
    for group in by_flag.values():
        wanted = set(itertools.islice(turns, per_flag))
        chosen += [case for case in group if case.fault in wanted] or group[:1]
    return chosen


def test_values_that_parsers_refuse_are_one_sentence(folder):
    """Where the parser decides alone, no program opens anything."""
    cases = [case for program, base in BASES.items() for case in cases_of(program, base) if case.is_cheap]
    cases = drawn([case for case in cases if case.fault in NOT_NUMBERS or case.fault == "a value"], least=6)
    outcomes = check(cases, folder)
    taken = {case.name for case, outcome in zip(cases, outcomes, strict=True) if outcome.code != 2}
    assert len(cases) > 150
    assert taken <= {"--tolerance", "--int8-tolerance"}, "which may be of any size"


@pytest.mark.slow
@pytest.mark.parametrize("program", BASES)
def test_no_argument_of_a_program_ends_in_a_traceback(program, folder):
    check(drawn(cases_of(program, BASES[program]), least=2), folder)


def test_settings_of_prediction_and_expected_metrics_are_checked_by_their_types(folder):
    flags = {"predict": "--model.nms_threshold", "export": "--model.score_threshold", "evaluate": "--expect.bbox_AP"}
    cases = [case for program, flag in flags.items() for case in open_ended_cases(program, BASES[program], flag)]
    wrong = [case for case in cases if case.fault in NOT_NUMBERS and case.fault not in ("huge", "beyond float32")]
    outcomes = check(drawn(wrong, least=4), folder)
    assert {outcome.code for outcome in outcomes} == {2}


def test_the_command_detect_refuses_in_a_sentence(folder):
    """With each fault as its command, and as the first word of its own commands."""
    cases = []
    for before in ("", "train", "copy", "copy train_ssd", "where"):
        for fault, value in FAULTS.items():
            words = (*before.split(), *([] if value is None else [value]))
            cases.append(
                Case(before.split()[0] if before else "detect", fault, value, Call("toolkit.tools.detect", words))
            )
    check(cases, folder)
    assert set(detect.commands()) >= {"check", "predict"}


def refusal(script: str, argv: list[str]) -> str:
    """Return the sentences of a training script about its arguments; "" if it takes them."""
    module = importlib.import_module(script)
    try:
        parse_config(module.Config, argv, module.DEFAULT_CONFIG)
    except (BadInput, RuntimeError) as error:  # a path that begins with the home of nobody; as `run_script` says it
        return str(error if isinstance(error, BadInput) else explain_error(error))
    return ""


def settings_of(architecture: str) -> tuple[str, list[str], dict[str, object]]:
    """The script of an architecture, the words that choose it, and its settings; "": those that all scripts have."""
    if not architecture:
        return "train_sgg", [], shared_settings()
    return script_of(architecture), ["--model.architecture", architecture], model_settings(architecture)


@pytest.mark.parametrize("architecture", ["", *DETECTORS])
def test_faults_of_all_settings_are_named_at_once(architecture):
    """Each setting with another fault, all in one command."""
    script, argv, settings = settings_of(architecture)
    faults = [fault for fault in FAULTS if fault not in ("missing", "empty", "a list", "not UTF-8")]
    random.Random(f"{SEED} {architecture}").shuffle(faults)
    wrong = []
    for (name, hint), fault in zip(settings.items(), itertools.cycle(faults), strict=False):
        argv += [f"--{name}", FAULTS[fault]]
        if not takes_text(hint) and fault in NOT_NUMBERS and fault != "huge":
            wrong.append(name)
    said = refusal(script, argv)
    assert not [name for name in wrong if f"{name} is " not in said], said


def setting_cases(settings: dict[str, object], values: dict[str, str | None], script: str, first=()) -> list[Case]:
    cases = []
    for name, fault in itertools.product(settings, values):
        words = () if values[fault] is None else (values[fault],)
        cases.append(Case(name, fault, values[fault], Call(script, (*first, f"--{name}", *words))))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["", *DETECTORS])
def test_a_setting_with_a_fault_alone_is_refused_or_taken(architecture):
    script, first, settings = settings_of(architecture)
    unnamed = []
    for case in drawn(setting_cases(settings, FAULTS, script, first), least=3):
        said = refusal(script, list(case.call.argv))
        is_number = not takes_text(settings[case.name]) and case.fault in NOT_NUMBERS and case.fault != "huge"
        if is_number and not said or said and case.name not in said:
            unnamed.append((case.name, case.fault, said))
    assert not unnamed


# Values of numbers and lists at the edges of their ranges, and beyond what any machine has.
EXTREMES = ("-1", "0", "1", "1e25", "1000000000", "[]", "[0]", "[1, 2, 3]", "{}", "{a: 1}")
OF_SCENE_GRAPHS = {"eval.protocol", "eval.phrase_detection", "eval.zero_shot"}


@pytest.mark.slow
@pytest.mark.parametrize("group", ["run", "data", "optim", "schedule", "loss", "eval", "hub"])
def test_a_training_refuses_each_setting_in_a_sentence_before_its_first_step(group, folder):
    settings = {name: hint for name, hint in shared_settings().items() if name.startswith(f"{group}.")}
    taken = []
    for name in sorted(settings.keys() - OF_SCENE_GRAPHS):
        is_text = describe_type(settings[name]).startswith("text")
        values = dict(FAULTS) if is_text else FAULTS | {value: value for value in EXTREMES}
        values = {fault: value for fault, value in values.items() if value is not None}
        for case in setting_cases({name: settings[name]}, values, "train_ssd"):
            if not refusal("train_ssd", list(case.call.argv)):
                call = Call("train_ssd", training_argv(*case.call.argv))
                taken.append(Case(f"--{name}", case.fault, case.value, call))
    good = Case("", "none", None, Call("train_ssd", training_argv()))
    outcomes = check([good, *drawn(taken, least=2)], folder, stop_before_the_first_step)
    assert outcomes[0].code == 0, outcomes[0]
