"""Every flag of every program with every fault that a value can have ends in a sentence, and never in a traceback.

The fast tests leave out what a program can only refuse after it has opened a model; the slow ones leave out nothing.
"""

import importlib
import itertools
import os
import shutil

import pytest
from calling import ROOT, Call, call_all
from flags import (
    FAULTS,
    NOT_NUMBERS,
    Case,
    cases_of,
    model_settings,
    open_ended_cases,
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

from toolkit.base.errors import BadInput
from toolkit.index import DETECTORS
from toolkit.run.command_line import parse_config
from toolkit.run.setting_types import describe_type
from toolkit.tools import detect

pytestmark = pytest.mark.skipif(os.name != "posix", reason="its calls are forked")
# Exit codes beside 0 and 2 that the programs document: warnings, images that cannot be read, what is not reproduced.
DOCUMENTED = {"check_data": {1}, "predict": {1}, "evaluate": {1}, "export": {1}, "replay": {1}}


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


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
    named = any(name in outcome.said for name in names) or case.fault in ("odd letters", "not UTF-8")
    return "" if named and "error: " in outcome.said else f"it does not say which argument: {outcome.said[-300:]}"


def check(cases: list[Case], outcomes) -> None:
    flags = {(case.call.program, case.name) for case in cases}
    tracebacks = sum(bool(outcome.failure) for outcome in outcomes)
    print(f"{len(flags)} flags, {len(cases)} calls, {tracebacks} tracebacks")
    pairs = zip(cases, outcomes, strict=True)
    wrong = {(case.call.program, case.name, case.fault): complaint(case, outcome) for case, outcome in pairs}
    wrong = {key: said for key, said in wrong.items() if said}
    assert not wrong, "\n".join(f"{key}: {said}" for key, said in wrong.items())


def test_values_that_parsers_refuse_are_one_sentence(folder):
    cases = [case for program, base in BASES.items() for case in cases_of(program, base) if case.is_cheap]
    cases = [case for case in cases if case.fault in NOT_NUMBERS or case.fault == "a value"]
    outcomes = call_all([case.call for case in cases], folder, replace_what_takes_long)
    check(cases, outcomes)
    taken = {case.name for case, outcome in zip(cases, outcomes, strict=True) if outcome.code != 2}
    assert len(cases) > 400 and taken == {"--tolerance", "--int8-tolerance"}  # which may be of any size


@pytest.mark.slow
@pytest.mark.parametrize("program", BASES)
def test_no_argument_of_a_program_ends_in_a_traceback(program, folder):
    cases = list(cases_of(program, BASES[program]))
    check(cases, call_all([case.call for case in cases], folder, replace_what_takes_long))


def test_settings_of_prediction_and_expected_metrics_are_checked_by_their_types(folder):
    flags = {"predict": "--model.nms_threshold", "export": "--model.score_threshold", "evaluate": "--expect.bbox_AP"}
    cases = [case for program, flag in flags.items() for case in open_ended_cases(program, BASES[program], flag)]
    cases = [case for case in cases if case.fault in NOT_NUMBERS and case.fault not in ("huge", "beyond float32")]
    outcomes = call_all([case.call for case in cases], folder, replace_what_takes_long)
    check(cases, outcomes)
    assert {outcome.code for outcome in outcomes} == {2}


def commands_of_detect() -> list[Case]:
    """The command `detect` with each fault as its command, and as the first word of its own commands."""
    cases = []
    for before in ((), ("train",), ("copy",), ("copy", "train_ssd"), ("where",)):
        for fault, value in FAULTS.items():
            words = before if value is None else (*before, value)
            cases.append(Case(before[0] if before else "detect", fault, value, Call("toolkit.tools.detect", words)))
    return cases


def test_the_command_detect_refuses_in_a_sentence(folder):
    cases = commands_of_detect()
    check(cases, call_all([case.call for case in cases], folder, replace_what_takes_long))
    assert set(detect.commands()) >= {"check", "predict"}


def refusal(script: str, argv: list[str]) -> str:
    """Return the sentences of a training script about its arguments; "" if it takes them."""
    module = importlib.import_module(script)
    try:
        parse_config(module.Config, argv, module.DEFAULT_CONFIG)
    except BadInput as error:
        return str(error)
    return ""


def assert_named(script: str, first: list[str], settings: dict[str, object], turn: int) -> None:
    """Give each setting another fault, all in one command, and see that the numbers among them are all named.

    turn: number of the command; the commands of all turns together give each setting each fault.
    """
    faults = [fault for fault in FAULTS if fault not in ("missing", "empty", "a list", "not UTF-8")]
    argv = [*first]
    wrong = []
    for place, (name, hint) in enumerate(settings.items()):
        fault = faults[(place + turn) % len(faults)]
        argv += [f"--{name}", FAULTS[fault]]
        if not takes_text(hint) and fault in NOT_NUMBERS and fault != "huge":
            wrong.append(name)
    said = refusal(script, argv)
    assert not [name for name in wrong if f"{name} is " not in said], said


@pytest.mark.parametrize("turn", [0, 5, 10])
def test_faults_of_all_shared_settings_are_named_at_once(turn):
    assert_named("train_sgg", [], shared_settings(), turn)


@pytest.mark.parametrize("architecture", DETECTORS)
def test_faults_of_all_settings_of_a_model_are_named_at_once(architecture):
    first = ["--model.architecture", architecture]
    assert_named(script_of(architecture), first, model_settings(architecture), len(architecture))


@pytest.mark.slow
def test_each_setting_with_each_fault_alone_is_refused_or_taken():
    given = {("train_sgg", "", name): hint for name, hint in shared_settings().items()}
    for architecture in DETECTORS:
        script = script_of(architecture)
        given |= {(script, architecture, name): hint for name, hint in model_settings(architecture).items()}
    unnamed = []
    for (script, architecture, name), fault in itertools.product(given, FAULTS):
        value = FAULTS[fault]
        argv = ["--model.architecture", architecture] if architecture else []
        said = refusal(script, [*argv, f"--{name}", *([] if value is None else [value])])
        is_number = not takes_text(given[script, architecture, name]) and fault in NOT_NUMBERS
        if is_number and fault != "huge" and not said or said and name not in said:
            unnamed.append((architecture, name, fault, said))
    print(f"{len(given)} settings, {len(given) * len(FAULTS)} calls, 0 tracebacks")
    assert not unnamed


# Values of numbers and lists at the edges of their ranges, and beyond what any machine has.
EXTREMES = ("-1", "0", "1", "1e25", "1000000000", "[]", "[0]", "[1, 2, 3]", "{}", "{a: 1}")


OF_SCENE_GRAPHS = {"eval.protocol", "eval.phrase_detection", "eval.zero_shot"}


@pytest.mark.slow
@pytest.mark.parametrize("group", ["run", "data", "optim", "schedule", "loss", "eval", "hub"])
def test_a_training_refuses_each_setting_in_a_sentence_before_its_first_step(group, folder):
    settings = {name: hint for name, hint in shared_settings().items() if name.startswith(f"{group}.")}
    cases = []
    for name in sorted(settings.keys() - OF_SCENE_GRAPHS):
        is_text = describe_type(settings[name]).startswith("text")
        values = dict(FAULTS) if is_text else {**FAULTS, **{value: value for value in EXTREMES}}
        for fault, value in values.items():
            if value is not None and not refusal("train_ssd", [f"--{name}", value]):
                call = Call("train_ssd", training_argv(f"--{name}", value))
                cases.append(Case(f"--{name}", fault, value, call))
    good = Call("train_ssd", training_argv())
    outcomes = call_all([good, *(case.call for case in cases)], folder, stop_before_the_first_step)
    assert outcomes[0].code == 0, outcomes[0]
    check(cases, outcomes[1:])
