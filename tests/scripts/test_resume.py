"""Killed at exact moments and resumed, a run equals the uninterrupted one to the bit."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from launching import EVALUATION, SCRIPTS, assert_same_run, checkpoint_state, kill, rows, training_rows

# One run after the other is killed before a call of a function, each counted from where the run was resumed.
MOMENTS = (
    kill(11, EVALUATION),  # within the second evaluation, at step 4
    kill(1, "open */.tmp-step_*/MANIFEST.json"),  # evaluated, and not yet written into the checkpoint
    kill(2),  # step 5, one of its two micro-batches is done
)
MORE_MOMENTS = (  # tests/test_checkpoint.py kills before every write of a checkpoint
    kill(2),  # within the first step: nothing is saved yet
    kill(2, "safetensors.torch:save_file"),  # within the first save, the weights written, their average not
    kill(1, "os.symlink step_*"),  # the first checkpoint under its name, `latest` not yet there
    kill(1, "toolkit.run.loop:note_step"),  # step 3: weights updated, their average and the schedule not
    kill(1, "toolkit.run.validation:note_metric"),  # evaluated at step 4, nothing written down
    kill(1, "toolkit.run.validation:save_outcome"),  # again, its row is written, the checkpoint lacks the metric
    kill(1, "toolkit.run.checkpoint:_put_in_place"),  # and again, the checkpoint with the metric lacks its name
    kill(1, "toolkit.run.checkpoint:_replace_link"),  # it has its name, and no link leads to it
    kill(2, "toolkit.run.recovery:RunGuard.accepts"),  # step 6: gradients complete, no update
    kill(2, "toolkit.evaluation.predict_dataset:gather_by_image"),  # the last evaluation
)


@pytest.mark.parametrize(
    ("processes", "moments"),
    [pytest.param(1, MOMENTS, id="1"),
     pytest.param(2, MOMENTS, id="2", marks=[pytest.mark.slow, pytest.mark.every_script]),
     *(pytest.param(count, MORE_MOMENTS, id=f"{count}, more", marks=pytest.mark.slow) for count in (1, 3))],
)  # fmt: skip
def test_killed_run_goes_on_to_the_bit(server, script, resumable, processes, moments):
    args, reference = resumable(processes)
    args = [*args, "--run.name", f"killed_{len(moments)}"]
    for fault in moments if script == SCRIPTS[0] else moments[:1]:
        killed = server.run(script, args, processes, [fault])
        assert "fault: SIGKILL before" in killed.text, f"ended before {fault['at']}\n{killed.text}"
        assert killed.code == -9
        assert killed.status["state"] == "running"
    resumed = server.run(script, [*args, "--run.seed", "7"], processes).ok()  # that of the checkpoint goes on
    assert_same_run(resumed.folder, reference)
    assert "Resuming from" in resumed.text and resumed.status["state"] == "done"
    assert not list(resumed.folder.rglob(".tmp-*"))


def test_an_evaluation_that_kills_the_run_costs_no_step(server, script, resumable):
    """As one that takes more memory than there is: each resume goes on behind the steps that were made."""
    args, reference = resumable(1)
    args = [*args, "--run.name", "killed_in_evaluation"]
    for said in ("starting fresh", "Resuming from", "Resuming from"):
        killed = server.run(script, args, 1, [kill(1, "toolkit.evaluation.predict_dataset:gather_by_image")])
        assert killed.code == -9 and said in killed.text, killed.text
        assert [row["step"] for row in training_rows(killed.folder)] == [1, 2], "not trained again"
    assert_same_run(server.run(script, args, 1).ok().folder, reference)


def test_an_interrupted_last_evaluation_is_made_once(server, script, resumable):
    args, reference = resumable(1)
    args = [*args, "--run.name", "interrupted_at_the_end"]
    last = {"signal": "SIGTERM", "at": "toolkit.evaluation.predict_dataset:gather_by_image", "call": 5}
    stopped = server.run(script, args, 1, [last])
    assert stopped.code == 85 and stopped.status["step"] == 6, stopped.text
    resumed = server.run(script, args, 1).ok()
    assert "evaluation at step 6" in resumed.text
    assert_same_run(resumed.folder, reference)
    assert "evaluation at step" not in server.run(script, args, 1).ok().text


@pytest.fixture
def finished(resumable, tmp_path):
    """(arguments, folder) of a copy of a finished run."""
    args, reference = resumable(1)
    shutil.copytree(reference, tmp_path / "copy", symlinks=True)
    return [*args, "--run.output_dir", str(tmp_path), "--run.name", "copy"], tmp_path / "copy"


def test_finished_run_is_not_logged_twice_and_goes_on_with_a_new_schedule(server, script, finished):
    args, folder = finished
    before, best = rows(folder), os.readlink(folder / "checkpoints" / "best")
    for path in (folder / "checkpoints").glob("[lb]*t"):
        path.unlink()
    again = server.run(script, args).ok()
    assert rows(folder) == before and again.status["state"] == "done"
    assert os.readlink(folder / "checkpoints" / "latest") == "step_000006", "links are mended"
    assert os.readlink(folder / "checkpoints" / "best") == best

    # Given more epochs, the saved length stays, until a new schedule is asked for.
    args += ["--run.epochs", "3", "--optim.lr", "5e-4", "--schedule.name", "linear", "--schedule.warmup_steps", "0",
             "--schedule.final_factor", "0"]  # fmt: skip
    server.run(script, args).ok()
    assert rows(folder) == before
    server.run(script, [*args, "--run.resume_schedule", "new"]).ok()
    assert rows(folder)[: len(before)] == before
    more = training_rows(folder)[6:]
    assert [row["step"] for row in more] == [7, 8, 9]
    assert [row["train/lr/main"] for row in more] == pytest.approx([5e-4 * (1 - step / 9) for step in (6, 7, 8)])
    assert checkpoint_state(folder / "checkpoints" / "latest")["parts"]["plan"]["total_steps"] == 9


def test_other_number_of_processes_resumes_and_says_what_differs(server, script, resumable, tmp_path):
    args, reference = resumable(1)
    args = [*args, "--run.output_dir", str(tmp_path)]
    folder = server.run(script, args, 1, [kill(9)]).folder
    before = rows(folder)
    resumed = server.run(script, [*args, "--data.batch_size_per_device", "2"], 2).ok()
    assert "1 rank(s) x 4 images, this run has 2 x 2" in resumed.text
    assert "will not be identical" in resumed.text
    after = training_rows(folder)
    assert [row["step"] for row in after] == [1, 2, 3, 4, 5, 6]
    assert [row["epoch"] for row in after] == [0, 0, 0, 1, 1, 1]
    assert rows(folder)[:4] == before[:4] == rows(reference)[:4]


def snapshot(folder: Path) -> dict:
    """Every file and link of a folder, byte for byte."""
    return {path: os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
            for path in folder.rglob("*")}  # fmt: skip


def test_a_refused_resume_changes_nothing(server, script, finished, tmp_path):
    args, folder = finished
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    without, d_model = stored["optim"]["no_weight_decay_on_norm_and_bias"], stored["model"]["d_model"]
    before = snapshot(folder)
    for more, message in (
        (["--optim.name", "sgd"], "optim.name adamw -> sgd: refused"),
        (["--eval.metric_for_best", "nonsense"], "no such metric"),
        (["--data.max_train_images", "9"], "has 9 samples"),
        (["--schedule.name", "plateau"], "schedule.name"),
        (["--run.resume", str(tmp_path / "nowhere")], "does not exist"),
        (["--run.resume", "never"], "--run.resume latest"),
        (["--run.eval_only", "true", "--eval.metric_for_best", "nonsense"], "no such metric"),
        (["--optim.no_weight_decay_on_norm_and_bias", str(not without)], "optim.no_weight_decay_on_norm_and_bias"),
        (["--model.d_model", str(d_model * 2)], f"model.d_model {d_model} -> {d_model * 2}"),
    ):
        refused = server.run(script, [*args, *more])
        assert refused.code == 2 and "Traceback" not in refused.text
        error = refused.text[refused.text.index("error:") :].strip().splitlines()
        assert message in error[0] and len(error) <= 5, refused.text
        assert snapshot(folder) == before, more
    for path in folder.glob("checkpoints/step_*/model.safetensors"):
        os.truncate(path, 100)
    before = snapshot(folder)
    refused = server.run(script, args)
    assert refused.code == 2 and refused.text.count("truncated") == len(list(folder.glob("checkpoints/step_*")))
    assert snapshot(folder) == before, "nothing is deleted"


def test_each_changed_setting_is_said_and_the_one_in_force_is_kept(server, script, finished):
    """tests/test_changes.py has each setting."""
    args, folder = finished
    first = (folder / "config.yaml").read_text()
    args += ["--optim.lr", "0.5", "--run.seed", "7", "--run.max_steps", "9", "--run.keep", "3", "--run.epochs", "4"]
    text = server.run(script, args).ok().text
    for line in ("optim.lr .* -> 0.5: ignored, .*--run.resume_schedule new uses it", "run.keep 1 -> 3: used",
                 "the run is finished at step 6 of 6.*--run.resume_schedule new goes on to step 9"):  # fmt: skip
        assert re.search(line, text), text
    assert (folder / "config.yaml").read_text() == first
    second = (folder / "config_2.yaml").read_text()
    assert "# run.keep 1 -> 3: used" in second and "# optim.lr" in second
    before, now = yaml.safe_load(first), yaml.safe_load(second)
    assert now["optim"] == before["optim"]
    assert (now["run"]["keep"], now["run"]["seed"], now["run"]["max_steps"]) == (3, 0, None)
    server.run(script, [*args, "--run.resume_schedule", "new"]).ok()
    third = yaml.safe_load((folder / "config_3.yaml").read_text())
    assert third["optim"]["lr"] == 0.5 and training_rows(folder)[-1]["step"] == 9


def test_lost_rows_are_said_and_kept(server, script, finished):
    args, folder = finished
    path = folder / "metrics.jsonl"
    text = path.read_text()
    path.write_text(damaged := text[: text.index("\n") + 9])
    said = server.run(script, args).ok().text
    assert "readable rows of the" in said and "metrics.jsonl.damaged" in said
    assert (folder / "metrics.jsonl.damaged").read_text() == damaged and path.read_text() in text
    path.unlink()
    assert "metrics.jsonl is gone" in server.run(script, args).ok().text


def test_annotations_edited_before_a_resume_are_told(server, script, settings, data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    file = tmp_path / "data" / "annotations" / "train.json"
    args = settings("--run.output_dir", tmp_path, "--data.train", file, "--run.resume", "latest", "--run.max_steps", 1)
    first = server.run(script, args).ok()
    again = server.run(script, [*args, "--run.max_steps", "2", "--run.resume_schedule", "new"]).ok()
    document = json.loads(file.read_text())
    for box in document["annotations"][:2]:
        box["bbox"][2] /= 2
    file.write_text(json.dumps(document))
    edited = server.run(script, [*args, "--run.max_steps", "3", "--run.resume_schedule", "new"]).ok()
    changed = "the training data are not those of the checkpoint"
    assert changed in edited.text and "with other boxes or labels (" in edited.text
    assert changed not in first.text + again.text and "validation data are not" not in edited.text
    gone = document["images"].pop()
    for key in ("annotations", "rel_annotations"):
        document[key] = [entry for entry in document[key] if entry["image_id"] != gone["id"]]
    file.write_text(json.dumps(document))
    fewer = server.run(script, args)
    assert fewer.code == 2 and f"of the images 1 gone ({gone['file_name']} " in fewer.text


@pytest.mark.slow
def test_machines_without_a_shared_disk(server, script, resumable, tmp_path):
    """Only the first process sees the run folder."""
    args, reference = resumable(2)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    args = [*args, "--run.output_dir", "runs", "--run.name", "apart"]
    cwd = [{"cwd": str(tmp_path / name), "rank": rank} for rank, name in enumerate(("first", "second"))]
    assert server.run(script, args, 2, [*cwd, kill(9)]).code == -9
    server.run(script, args, 2, cwd).ok()
    assert_same_run(tmp_path / "first" / "runs" / "apart", reference)
    assert not list((tmp_path / "second").rglob("*.*"))


@pytest.mark.slow
def test_more_images_a_step_see_the_data_that_was_to_be_seen(server, script, resumable, tmp_path):
    """1 process -> 2 of the same batch size: half the steps that were left, and the schedule ends with them."""
    args, _ = resumable(1)
    args = [*args, "--run.output_dir", str(tmp_path), "--run.epochs", "4", "--schedule.name", "linear",
            "--schedule.warmup_steps", "0", "--schedule.final_factor", "0", "--optim.lr", "1e-3"]  # fmt: skip
    folder = server.run(script, args, 1, [kill(7)]).folder  # after the 3 steps of the first epoch
    resumed = server.run(script, args, 2).ok()
    assert "the run ends after step 9 instead of 12" in resumed.text, resumed.text
    after = training_rows(folder)
    assert [row["step"] for row in after] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [row["epoch"] for row in after] == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    rates = [row["train/lr/main"] for row in after]
    assert rates == pytest.approx([1e-3 * (1 - at / 12) for at in (0, 1, 2, 3, 4.5, 6, 7.5, 9, 10.5)])
    state = checkpoint_state(folder / "checkpoints" / "latest")
    parts = state["parts"]
    assert parts["plan"]["total_steps"] == 9 and parts["sampler"]["epoch"] in (3, 4)
