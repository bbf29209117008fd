"""Every option that changes what runs, in as few runs as will hold them, and what they leave in the run folder."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from launching import (
    EVALUATION,
    Result,
    checkpoint_state,
    checkpoint_tensors,
    finish,
    kill,
    nonfinite,
    rows,
    start,
    training_rows,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracked import offline_history, offline_records

from toolkit.tools.report.facts import run_facts

OPTIONS = (
    "--run.precision", "bf16", "--optim.accumulation_steps", 2, "--run.tracker", "tensorboard", "--eval.pictures", 4,
    "--run.probe_memory", "true", "--run.deterministic", "true", "--data.photometric", "true",
    "--data.group_by_aspect_ratio", "true", "--data.cache_images", "true", "--schedule.name", "cosine",
    "--optim.backbone_lr", 1e-4, "--run.max_steps", 4, "--run.eval_every", "1 epoch",
    "--loss.weights", '{"loss_giou": "learned", "loss_bbox": [[0, 1.0], [2, 5.0]]}',
)  # fmt: skip


def events_of(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()


@pytest.fixture(scope="module")
def launched(script, settings, tmp_path_factory):
    """The folder and the output of a run under `accelerate launch`, from a folder that knows nothing of the project."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    args = settings(*OPTIONS, "--run.output_dir", "runs", "--run.name", "launched")
    command = [Path(sys.executable).with_name("accelerate"), "launch", "--num_processes", 1, script.path, *args]
    code, text = finish(start(command, cwd=elsewhere))
    assert code == 0, text
    return elsewhere / "runs" / "launched", text


def test_run_folder_says_what_was_run(launched):
    folder, text = launched
    assert "processes: 1" in text and "Traceback" not in text
    assert text.count("Training time 0:0") == 1 and " s / step)" in text
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, 4)
    assert status["ended_by"] == ["run.max_steps"] and f"{status['reason']}, at step 4" in text
    assert f"state done, reason {status['reason']}" in (folder / "report" / "README.md").read_text()
    assert not [*folder.rglob("*.onnx"), *folder.rglob("*.pt2")], "nobody asked for an export"
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["processes"] == 1 and {"torch", "transformers"} <= environment["packages"].keys()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["run"]["precision"] == "bf16"
    assert config["loss"]["weights"]["loss_bbox"] == [[0, 1.0], [2, 5.0]]
    for name in ("README.md", "curves.png", "ap.png", "pictures/step_000003.png", "pictures/step_000004.png"):
        assert (folder / "report" / name).stat().st_size > 100, name


def test_rows_and_tensorboard_have_losses_rates_and_times(launched):
    logged = [json.loads(line) for line in (launched[0] / "metrics.jsonl").read_text().splitlines()]
    train = [row for row in logged if "train/loss" in row]
    assert [row["step"] for row in train] == [1, 2, 3, 4]
    for row in train:
        assert {"epoch", "time_s", "train/grad_norm", "time/data_s", "time/step_s"} <= row.keys()
        weight = min(1.0 + 2.0 * (row["step"] - 1), 5.0)  # from 1 to 5 over the first two updates
        assert row["train/loss_bbox"] == pytest.approx(weight * row["train/loss_bbox_unscaled"], rel=1e-5)
        assert row["train/lr/backbone"] == pytest.approx(row["train/lr/main"] * 0.1)
    evaluated = [row for row in logged if "val/loss" in row]
    assert [row["step"] for row in evaluated] == [3, 4]
    assert {"val/bbox_AP", "val/bbox_AP50", "val/ema/bbox_AP", "val/AP/circle", "val/ema/AP/star"} <= set(evaluated[0])
    assert nonfinite(launched[0] / "checkpoints" / "latest") == []
    assert any(k.startswith("loss_weights/") for k in checkpoint_tensors(launched[0] / "checkpoints" / "latest"))
    events = events_of(launched[0])
    sent = {event.step: event.value for event in events.Scalars("train/loss")}
    assert sent == pytest.approx({row["step"]: row["train/loss"] for row in train}, rel=1e-6)
    assert [event.step for event in events.Scalars("val/bbox_AP")] == [3, 4] and events.Tags()["images"]


def test_evaluating_only_gives_the_same_numbers(server, script, settings, launched, tmp_path):
    folder = launched[0]
    args = settings(*OPTIONS, "--run.output_dir", tmp_path, "--run.tracker", "none", "--run.eval_only", "true",
                    "--run.resume", folder / "checkpoints" / "latest")  # fmt: skip
    (row,) = rows(server.run(script, args).ok().folder)
    again, trained = ({k: v for k, v in values.items() if "bbox" in k} for values in (row, rows(folder)[-1]))
    assert again == trained and "val/bbox_AP" in again


@pytest.mark.slow
def test_trackers_have_every_step_after_a_kill(server, script, settings, tmp_path):
    """Killed, stopped in an evaluation, ended, and started once more; tests/test_writers.py has each tracker alone."""
    args = settings("--run.output_dir", tmp_path, "--run.tracker", "[wandb, tensorboard]", "--run.resume", "latest",
                    "--run.save_every", 2, "--run.eval_every", 2, "--run.epochs", 3, "--data.max_train_images", 8,
                    "--eval.pictures", 8)  # fmt: skip
    assert server.run(script, args, 1, [kill(4)]).code == -9
    stopped = server.run(script, args, 1, [{"signal": "SIGTERM", "at": EVALUATION, "call": 3}])
    assert (stopped.code, stopped.status["state"]) == (85, "preempted"), stopped.text
    ended = server.run(script, args, whole=True).ok()
    assert "switched off" not in ended.text and "failed" not in ended.text
    logged = {row["step"]: row["train/loss"] for row in training_rows(ended.folder)}
    assert list(logged) == [1, 2, 3, 4, 5, 6]
    history, records = offline_history(ended.folder), offline_records(ended.folder)
    server.run(script, args).ok()
    assert offline_history(ended.folder) == history and len({run_id for run_id, _, _ in history}) == 1
    trained = [(step, values["train/loss"]) for _, step, values in history if "train/loss" in values]
    assert [step for step, _ in trained][-6:] == [*logged], "all of them after the kill, without a network"
    assert all(loss == pytest.approx(logged[step]) for step, loss in trained)
    evaluated = {row["step"]: row["val/bbox_AP"] for row in rows(ended.folder) if "val/bbox_AP" in row}
    assert records["boxes"].keys() <= evaluated.keys() == {2, 4, 6} and len(records["boxes"][6]) == 8
    assert all(image["predictions"] for images in records["boxes"].values() for image in images)
    assert records["summary"]["best/bbox_AP"] == pytest.approx(max(evaluated.values()))
    (best,), (_,) = records["artifacts"]["model"], records["artifacts"]["dataset"]
    assert {"README.md", "config.json", "model.safetensors"} <= best["files"]
    assert f"step-{checkpoint_state(ended.folder / 'checkpoints' / 'best')['step']}" in best["aliases"]
    size = sum(path.stat().st_size for path in (ended.folder / "wandb").rglob("*") if not path.is_symlink())
    assert size < 5e6 * len(evaluated)
    events = events_of(ended.folder)
    assert {event.step: event.value for event in events.Scalars("train/loss")} == pytest.approx(logged, rel=1e-6)
    assert events.Scalars("train/grad_norm/main") and events.Images("val/predictions")


@pytest.mark.slow
def test_trials_of_a_wandb_agent_have_its_ids_and_folders_of_their_own(server, script, settings, tmp_path):
    args = settings("--run.output_dir", tmp_path, "--run.tracker", "wandb", "--run.max_steps", 1, "--run.epochs", 1)
    for trial in ("first", "second"):  # by one command, with what the agent sets
        text = server.run(script, args, env={"WANDB_SWEEP_ID": "sweep", "WANDB_RUN_ID": trial}).text
        assert "switched off" not in text and "exists already" not in text, text
        assert {run_id for run_id, _, _ in offline_history(tmp_path / f"run-{trial}")} == {trial}


def test_minutes_become_steps_once_and_early_stopping_ends(server, script, settings, tmp_path):
    def go_on(args, folder) -> Result:
        return server.run(script, [*args, *run_facts(folder).go_on.partition("config.yaml ")[2].split()]).ok()

    args = settings("--run.output_dir", tmp_path, "--run.name", "minutes", "--run.max_minutes", "0.02",
                    "--run.epochs", 1000, "--run.eval_every", 0)  # fmt: skip
    ended = server.run(script, args).ok()
    state = checkpoint_state(ended.folder / "checkpoints" / "latest")
    plan = state["parts"]["plan"]
    assert plan["total_steps"] == state["step"] == plan["budget"]["total_steps"]
    assert f"training takes {state['step']} steps" in ended.text
    assert ended.status["ended_by"] == ["run.max_minutes"]
    assert "--run.max_minutes 0.04" in run_facts(ended.folder).go_on
    extended = go_on(args, ended.folder)
    more = checkpoint_state(ended.folder / "checkpoints" / "latest")
    assert more["step"] > state["step"] + 1 and extended.status["ended_by"] == ["run.max_minutes"], extended.text
    budget = more["parts"]["plan"]["budget"]
    assert budget["begun_steps"] == state["step"]
    assert budget["begun_s"] == plan["budget"]["elapsed_s"] < budget["elapsed_s"]

    args = settings("--run.output_dir", tmp_path, "--run.name", "patience", "--run.eval_every", 1, "--optim.lr", 0,
                    "--model.freeze", "norms", "--run.epochs", 1000, "--eval.metric_for_best", "ema/bbox_AP",
                    "--eval.early_stopping_patience", 2)  # fmt: skip
    ended = server.run(script, args).ok()
    step = ended.status["step"]
    assert step <= 5 and ended.status["ended_by"] == ["eval.early_stopping_patience"]
    assert f"{ended.status['reason']}, at step {step}" in ended.text
    again = server.run(script, [*args, "--run.resume", "latest", "--run.eval_only", "true"]).ok()
    assert again.status["ended_by"] == ["eval.early_stopping_patience"], "an evaluation alone ended nothing"
    assert "--eval.early_stopping_patience 4" in run_facts(ended.folder).go_on
    assert go_on(args, ended.folder).status["step"] == step + 2


@pytest.mark.every_script
def test_help_and_print_config_of_every_key(server, script):
    helped = server.run(script, ["--help", "all"]).ok()
    for key in ("--run.resume", "--data.batch_size_per_device", "--optim.accumulation_steps", "--loss.weights"):
        assert key in helped.text
    printed = server.run(script, ["--print_config"]).ok()
    assert yaml.safe_load(printed.text.partition("\n")[2])["run"]["epochs"] > 0
