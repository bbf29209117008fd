"""Precision and compilation: decided once, by the settings, the launcher or `run.precision: auto`, written down, and
kept by whoever goes on."""

import json

import pytest
import yaml
from launching import SCRIPTS, checkpoint_tensors, training_rows
from places import ROOT, SMALL_CONFIGS

from toolkit.run.launcher import resolve_execution
from toolkit.step.execution import cpu_computes_in_bf16, precision_of_gpu

PUBLISHED = SMALL_CONFIGS / "detr_published.yaml"  # which torch.compile captures in less time
SHOWN = {"no": "float32", "bf16": "bf16"}  # what the console calls a precision


def losses(run) -> list[dict]:
    return [{key: row[key] for key in row if key.startswith("train/loss")} for row in training_rows(run.folder)]


def settings_in(run, name: str = "config.yaml") -> dict:
    return yaml.safe_load((run.folder / name).read_text())


def test_the_choice_is_a_rule_recorded_and_kept(server, script, settings, tmp_path):
    args = settings("--run.output_dir", tmp_path, "--run.max_steps", 2, "--run.resume", "latest", "--run.eval_every", 0)
    first = server.run(
        script,
        [
            *args,
            "--run.precision",
            "auto",
            "--run.name",
            "auto",
        ],
    ).ok()
    is_able = cpu_computes_in_bf16()
    chosen = "bf16" if is_able else "no"
    has = "has" if is_able else "has no"
    assert f"precision: {SHOWN[chosen]} (run.precision auto: this CPU {has} instructions for bfloat16)" in first.text
    config = settings_in(first)
    assert config["run"]["precision"] == chosen
    told = server.run(
        script,
        [
            *args,
            "--run.precision",
            chosen,
            "--run.name",
            "told",
        ],
    ).ok()
    assert losses(told) == losses(first)

    # As if it had begun on a machine that chose otherwise.
    other = "no" if is_able else "bf16"
    config["run"]["precision"] = other
    (first.folder / "config.yaml").write_text(yaml.safe_dump(config))
    more = ["--run.precision", "auto", "--run.name", "auto", "--run.max_steps", "3", "--run.resume_schedule", "new"]
    resumed = server.run(script, [*args, *more]).ok()
    assert f"precision: {SHOWN[other]} (the run so far)" in resumed.text
    assert "run.precision auto" not in resumed.text
    assert settings_in(first, "config_2.yaml")["run"]["precision"] == other


NOBODY = {"precision": None, "tf32": None, "compile": None}
RUN_SO_FAR = {"precision": "bf16", "tf32": True, "compile": "eager"}
LAUNCHER = {"precision": "fp16", "tf32": None, "compile": "inductor"}
AUTO = {"precision": "auto"}
BY_LAUNCHER = ("fp16", "accelerate launch", None, "inductor", "accelerate launch")
BY_RUN = ("bf16", "the run so far", True, "eager", "the run so far")
BY_SETTINGS = (
    "no",
    "run.precision, not accelerate launch, which says fp16",
    None,
    True,
    "optim.compile, not accelerate launch, which says inductor",
)
# What the settings, the launcher and the run so far say -> precision, by whom, TF32, compilation, by whom.
DECISIONS = [
    ({}, NOBODY, NOBODY, ("no", "default", None, False, "default")),
    (AUTO, NOBODY, RUN_SO_FAR, BY_RUN),
    (AUTO, LAUNCHER, RUN_SO_FAR, BY_LAUNCHER),
    ({}, LAUNCHER, RUN_SO_FAR, BY_LAUNCHER),
    ({"precision": "no", "compile": True}, LAUNCHER, RUN_SO_FAR, BY_SETTINGS),
    (
        {"precision": "no"},
        NOBODY,
        RUN_SO_FAR,
        ("no", "run.precision", None, "eager", "the run so far"),
    ),
    (AUTO, NOBODY, NOBODY, ("bf16", "run.precision auto: this GPU", True, False, "default")),
    (
        AUTO | {"tf32": False},
        NOBODY,
        NOBODY,
        ("bf16", "run.precision auto: this GPU", False, False, "default"),
    ),
]


@pytest.mark.parametrize(("given", "launched", "began", "expected"), DECISIONS)
def test_the_first_that_has_a_word_decides(given, launched, began, expected):
    def an_a100():
        return *precision_of_gpu((8, 0), None), "this GPU"

    choice = resolve_execution(NOBODY | given, launched, began, an_a100)
    assert (
        choice.precision,
        choice.precision_by,
        choice.tf32,
        choice.compile,
        choice.compile_by,
    ) == expected


def test_recipes_of_papers_say_their_precision():
    recipes = sorted((ROOT / "configs").glob("*/*coco*.yaml"))
    runs = [yaml.safe_load(path.read_text())["run"] for path in recipes]
    assert len(runs) > 10
    assert {run.get("precision") for run in runs} == {"no", "bf16", "fp16"}
    assert {run.get("tf32") for run in runs} == {True}


@pytest.mark.slow
def test_what_the_launcher_decided_is_recorded_and_kept(server, script, settings, tmp_path):
    """By the variables that `accelerate launch --mixed_precision bf16 --dynamo_backend eager` sets."""
    asked = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "EAGER"}
    not_asked = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
    given = "--run.resume latest --run.eval_every 0 --run.resume_schedule new --optim.ema_decay 0".split()
    evaluation = ["--eval.batch_size_per_device", 10]
    args = settings("--config", PUBLISHED, "--run.output_dir", tmp_path, *given, *evaluation)

    def start(env, steps, *more) -> tuple[str, tuple]:
        run = server.run(script, [*args, "--run.max_steps", steps, *more], env=env).ok()
        config = settings_in(run, max(path.name for path in run.folder.glob("config*.yaml")))
        settled = json.loads((run.folder / "environment.json").read_text())["settled"]
        return run.text, (
            settled["precision"],
            settled["precision_by"],
            config["optim"]["compile"],
        )

    said, settled = start(asked, 1)
    assert settled == ("bf16", "accelerate launch", "eager")
    assert "precision: bf16 (accelerate launch)" in said

    said, settled = start(not_asked, 2)
    assert settled == ("bf16", "the run so far", "eager")
    assert "torch.compile: eager (the run so far)" in said

    said, (precision, _, compile_) = start(
        asked,
        3,
        "--run.precision",
        "no",
        "--optim.compile",
        "false",
    )
    assert (precision, compile_) == ("no", False)
    assert "precision: float32 (run.precision, not accelerate launch, which says bf16)" in said
    assert "run.precision bf16 -> no: used" in said
    assert "optim.compile eager -> false: used" in said


@pytest.mark.slow
@pytest.mark.every_script
def test_compiled_losses_and_checkpoints_are_those_of_the_eager_model(server, script, settings, tmp_path):
    evaluation = ["--run.eval_every", 0, "--eval.batch_size_per_device", 10]
    same_code = [*script.one_size, "--optim.bn_momentum_final", "null"]
    args = settings("--run.output_dir", tmp_path, "--run.max_steps", 3, *evaluation, *same_code)
    is_detr = script == SCRIPTS[0]
    backend = "true" if is_detr else "aot_eager"
    eager = server.run(script, [*args, "--run.name", "eager"]).ok()
    compiled = server.run(
        script,
        [
            *args,
            "--run.name",
            "compiled",
            "--optim.compile",
            backend,
        ],
        within_s=1200,
    ).ok()
    assert "torch.compile: " not in eager.text
    assert "torch.compile: " in compiled.text
    assert "graph breaks" in compiled.text or not is_detr
    for row, expected in zip(losses(compiled), losses(eager), strict=True):
        assert row == pytest.approx(expected, rel=1e-3)
    names = [checkpoint_tensors(run.folder / "checkpoints" / "latest").keys() for run in (compiled, eager)]
    assert names[0] == names[1]
