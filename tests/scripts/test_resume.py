"""Killed at exact moments and resumed, a run equals the uninterrupted one to the bit.

    python -m pytest tests/scripts/test_resume.py        -m "slow or not slow" for all moments and three processes
"""

import shutil

import pytest
from launching import assert_same_run, checkpoint_state, rows, training_rows

# One run after the other is killed before call `call` of a function, each counted from where the run was resumed.
MICRO_BATCH = "toolkit.training:Training.seed_micro_batch"
MOMENTS = (
    ("toolkit.evaluation.predict_dataset:agree_max", 11),  # within the second evaluation, at step 4
    ("toolkit.runs.checkpoint:_seal", 1),  # the tensors of the next checkpoint are written, its manifest is not
    (MICRO_BATCH, 4),  # step 5, one of its two micro-batches is done
)
MORE_MOMENTS = (
    (MICRO_BATCH, 2),  # within the first step: nothing is saved yet
    ("safetensors.torch:save_file", 2),  # within the first save, the weights written, their average not
    ("toolkit.runs.checkpoint:_put_in_place", 1),  # the first checkpoint complete, not yet under its name
    ("toolkit.runs.checkpoint:_point", 1),  # the first checkpoint under its name, `latest` not yet there
    ("toolkit.training:Training.note_step", 1),  # step 3: weights updated, their average and the schedule not
    ("toolkit.runs.checkpoint:_prune", 1),  # saved, older checkpoints not yet removed
    ("toolkit.validation:note_metric", 1),  # evaluated at step 4, nothing written down
    ("toolkit.validation:_show", 1),  # evaluated and its row written, not saved
    ("toolkit.training:Training.decide", 2),  # step 6: gradients complete, no update
    ("toolkit.evaluation.predict_dataset:gather_by_image", 2),  # the last evaluation
)


def kill_and_resume(server, script, resumable, processes, moments, name):
    args, reference = resumable(processes)
    args = [*args, "--run.name", name]
    for at, call in moments:
        fault = {"signal": "SIGKILL", "at": at, "call": call, "rank": 0}
        killed = server.run(script, args, processes, [fault])
        assert f"fault: SIGKILL before call {call} of {at}" in killed.text, f"ended before {at}\n{killed.text}"
        assert killed.code == -9
        assert killed.status["state"] == "running"
    return server.run(script, args, processes).ok(), reference


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.every_script)])
def test_killed_run_goes_on_to_the_bit(server, script, resumable, processes):
    resumed, reference = kill_and_resume(server, script, resumable, processes, MOMENTS, "killed")
    assert "Resuming from" in resumed.text
    assert_same_run(resumed.folder, reference)
    assert resumed.status["state"] == "done"
    assert not list(resumed.folder.rglob(".tmp-*"))


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_killed_at_ten_more_moments(server, script, resumable, processes):
    resumed, reference = kill_and_resume(server, script, resumable, processes, MORE_MOMENTS, "killed_often")
    assert_same_run(resumed.folder, reference)


@pytest.mark.slow
def test_three_processes_killed(server, script, resumable):
    resumed, reference = kill_and_resume(server, script, resumable, 3, MOMENTS, "killed")
    assert_same_run(resumed.folder, reference)


def test_finished_run_is_not_logged_twice_and_goes_on_with_a_new_schedule(server, script, resumable, tmp_path):
    args, reference = resumable(1)
    folder = tmp_path / "copy"
    shutil.copytree(reference, folder, symlinks=True)
    args = [*args, "--run.output_dir", str(tmp_path), "--run.name", "copy"]
    again = server.run(script, args).ok()
    assert rows(folder) == rows(reference)
    assert again.status["state"] == "done"

    # Given more epochs, the saved length stays, until a new schedule is asked for.
    args += ["--run.epochs", "3", "--optim.lr", "5e-4", "--schedule.name", "linear", "--schedule.warmup_steps", "0",
             "--schedule.final_factor", "0"]  # fmt: skip
    server.run(script, args).ok()
    assert rows(folder) == rows(reference)
    server.run(script, [*args, "--run.resume_schedule", "new"]).ok()
    assert rows(folder)[: len(rows(reference))] == rows(reference)
    more = training_rows(folder)[6:]
    assert [row["step"] for row in more] == [7, 8, 9]
    assert [row["train/lr/main"] for row in more] == pytest.approx([5e-4 * (1 - step / 9) for step in (6, 7, 8)])
    assert checkpoint_state(folder / "checkpoints" / "latest")["total_steps"] == 9


def test_other_number_of_processes_resumes_and_says_what_differs(server, script, resumable, tmp_path):
    args, reference = resumable(1)
    args = [*args, "--run.output_dir", str(tmp_path)]
    fault = {"signal": "SIGKILL", "at": MICRO_BATCH, "call": 9, "rank": 0}
    folder = server.run(script, args, 1, [fault]).folder
    before = rows(folder)
    resumed = server.run(script, [*args, "--data.batch_size_per_device", "2"], 2).ok()
    assert "1 rank(s) x 4 images, this run has 2 x 2" in resumed.text
    assert "will not be identical" in resumed.text
    after = training_rows(folder)
    assert [row["step"] for row in after] == [1, 2, 3, 4, 5, 6]
    assert [row["epoch"] for row in after] == [0, 0, 0, 1, 1, 1]
    assert rows(folder)[:4] == before[:4] == rows(reference)[:4]
