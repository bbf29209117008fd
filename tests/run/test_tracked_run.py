"""Rows of a run and its trackers: which are kept and sent, and that a tracker that fails costs one warning."""

import pytest
from metric_rows import evaluation, log_rows, scalars, train_row, val_row

from toolkit.base.errors import BadInput
from toolkit.run.metrics_log import read_metrics
from toolkit.run.writer import RunWriter, agent_run_id, flat, tracker_names


def test_a_process_that_is_not_the_main_one_writes_nothing(tmp_path):
    writer = RunWriter(tmp_path, trackers=["tensorboard"], is_main=False)
    writer.log(train_row(1))
    writer.show(evaluation(), step=1)
    writer.close()
    assert list(tmp_path.iterdir()) == []
    assert writer.state_dict() == {"rows": 0}
    assert not writer.shows


def test_rows_of_an_evaluation_are_added_and_sent_later(tmp_path):
    earlier = log_rows(tmp_path, 5).state_dict()["rows"]
    log_rows(tmp_path, 10, rows_before=earlier)
    writer = RunWriter(tmp_path, rows_before=earlier, eval_only=True)
    writer.log(val_row(5))
    writer.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        train_row(5),
        train_row(10),
        val_row(5),
    ]
    log_rows(tmp_path, 15, trackers=["tensorboard"], rows_before=writer.state_dict()["rows"])
    assert [step for step, _ in scalars(tmp_path)["train/loss"]] == [5, 10, 15]


@pytest.mark.parametrize("asked", [False, True])
def test_losses_before_their_weights_go_to_trackers_only_when_asked_for(tmp_path, asked):
    unscaled = {f"{kind}/loss_ce_unscaled": 0.5 for kind in ("train", "epoch", "val")}
    writer = RunWriter(tmp_path, trackers=["tensorboard"], track_unscaled=asked)
    writer.log(train_row(1) | unscaled | {"train/loss_ce": 1.0})
    writer.close()
    tags = scalars(tmp_path).keys()
    assert "train/loss_ce" in tags
    assert unscaled.keys() & tags == (unscaled.keys() if asked else set())
    row = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert unscaled.items() <= row.items(), "the file has them always"


def test_a_tracker_that_cannot_start_costs_one_warning(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.warns(UserWarning, match="tensorboard failed") as caught:
        log_rows(tmp_path, 1, trackers=["tensorboard"])
    assert len(caught) == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("none", []),
        ([], []),
        (["wandb", "none", "wandb"], ["wandb"]),
        ("wandb", ["wandb"]),
    ],
)
def test_trackers_are_named_once(asked, names):
    assert tracker_names(asked) == names


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            ["wandb", "wnadb", "aim"],
            "(?s)wnadb: no such tracker.*none, .*tensorboard.*wandb.*aim: its package is",
        ),
        ("wandb,tensorboard", r"several are a list: '\[wandb, tensorboard\]'"),
    ],
)
def test_other_names_of_trackers_are_refused(asked, words):
    with pytest.raises(BadInput, match=words):
        tracker_names(asked)


def test_a_run_id_of_the_environment_counts_in_a_sweep_alone(monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "trial")
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    assert agent_run_id() is None
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    assert agent_run_id() == "trial"


def test_settings_are_flat_for_trackers():
    assert flat({"optim": {"lr": 1, "groups": {"a": 2}}, "seed": 3}) == {
        "optim.lr": 1,
        "optim.groups.a": 2,
        "seed": 3,
    }
