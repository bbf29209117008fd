"""NaN in input, activation, loss and gradient, under each policy, on one process and on one rank of two."""

import json
import math

import pytest
from launching import ROOT, flat, nonfinite, rows, training_rows

KINDS = {"boxes": "batch", "activation": "module", "loss": "loss", "gradient": "gradient"}  # and where it is seen
REPLAY = ROOT / "scripts" / "replay.py"


@pytest.fixture
def arguments(settings, tmp_path):
    """`arguments(processes, policy, name)`: three windows an epoch of two micro-batches each, everything learns."""

    def build(processes: int, policy: str, name: str = "run") -> list[str]:
        return settings(
            "--run.output_dir", tmp_path, "--run.name", name, "--run.on_nonfinite", policy,
            "--optim.accumulation_steps", 2, "--data.batch_size_per_device", 4 // processes, "--run.save_every", 2,
            "--run.max_rollbacks", 10, "--run.eval_every", 0, "--run.max_steps", 5, "--run.epochs", 20,
        )  # fmt: skip

    return build


def reports(folder) -> dict[str, dict]:
    """report.json by folder, in the order of writing."""
    paths = sorted(folder.glob("nan/*/*/report.json"), key=lambda path: path.stat().st_mtime_ns)
    return {str(path.parent): json.loads(path.read_text()) for path in paths}


def check_report(report: dict, kind: str, rank: int) -> None:
    assert (report["rank"], report["where"]) == (rank, KINDS[kind])
    images = [image for micro_batch in report["image_ids"] for image in micro_batch]
    assert len(images) == len(set(images)) > 0
    module = report["first_nonfinite_module"]
    assert (module is not None and "backbone" in module) == (kind == "activation"), module
    if kind == "gradient":
        assert report["nonfinite_gradients"]
        assert all(math.isfinite(v) for losses in report["window_losses"] for v in losses.values())
    if kind == "boxes":
        assert any("boxes" in name for name in report["batch"])
    assert report["lr"]


def check_finite(folder) -> None:
    """Weights, buffers, moving averages and optimizer state of every checkpoint that is left."""
    paths = sorted(folder.glob("checkpoints/step_*"))
    assert paths
    for path in paths:
        assert [name for name in nonfinite(path) if not name.startswith("group/")] == []  # rates are no state


@pytest.mark.parametrize(
    ("policy", "processes"),
    [("skip", 1), ("skip", 2), ("rollback", 1), pytest.param("rollback", 2, marks=pytest.mark.slow)],
)
def test_run_goes_on_finite(server, script, arguments, processes, policy):
    """The four kinds in one run, each in a window of its own; on two processes only the second rank meets them."""
    rank = processes - 1
    faults = [{"nan": kind, "window": 2 + 2 * i, "rank": rank} for i, kind in enumerate(KINDS)]
    ended = server.run(script, arguments(processes, policy), processes, faults).ok()
    assert ended.text.count("goes on from step") == 4
    check_finite(ended.folder)
    written = reports(ended.folder)
    for (folder, report), kind in zip(written.items(), KINDS, strict=True):
        assert report["policy"] == policy
        check_report(report, kind, rank)
        if policy == "skip" and rank == 1:  # a fault that was planted in the program has to be planted again
            planted = [] if kind == "boxes" else [{"nan": kind, "ids": report["image_ids"][-1]}]
            again = server.run(REPLAY, [folder], faults=planted)
            assert again.code == 0, again.text
    steps = [row["step"] for row in training_rows(ended.folder)]
    assert steps == [1, 2, 3, 4, 5] if policy == "skip" else steps[-1] == 5
    assert all(math.isfinite(v) for row in rows(ended.folder) for v in row.values() if isinstance(v, float))


@pytest.mark.every_script("slow")
def test_an_infinite_box_is_refused_and_replayed_with_every_detector(server, script, arguments):
    """Nothing of Faster R-CNN overflows: a box that matches no anchor has no loss. YOLOv3 looks for its cell."""
    faults = [{"nan": "infinite boxes", "window": 2, "rank": 0}]
    ended = server.run(script, arguments(1, "skip"), 1, faults).ok()
    assert "a box of the batch is not finite" in ended.text and "Traceback" not in ended.text
    ((folder, report),) = reports(ended.folder).items()
    assert report["where"] == "batch" and any("boxes" in name for name in report["batch"])
    assert [row["step"] for row in training_rows(ended.folder)] == [1, 2, 3, 4, 5]
    again = server.run(REPLAY, [folder])
    assert again.code == 0 and "reproduced" in again.text, again.text


@pytest.mark.parametrize(("processes", "kind"), [(1, "activation"), (2, "gradient")])
def test_run_stops_with_3(server, script, arguments, processes, kind):
    rank = processes - 1
    ended = server.run(script, arguments(processes, "stop"), processes, [{"nan": kind, "window": 4, "rank": rank}])
    assert ended.code == 3 and "Traceback" not in ended.text, ended.text
    assert (ended.status["state"], ended.status["step"]) == ("stopped_by_guard", 3)
    assert f"rank {rank}" in ended.status["reason"]
    ((folder, report),) = reports(ended.folder).items()
    assert folder.endswith(f"step_000003/rank{rank}") and folder in ended.status["reason"]
    check_report(report, kind, rank)
    check_finite(ended.folder)
    assert (ended.folder / "checkpoints" / "latest").resolve().name == "step_000003"


def test_a_run_that_only_breaks_ends(server, script, arguments):
    """Skips in succession and rollbacks are counted; when they are used up the run stops."""
    faults = [{"nan": "loss", "window": window} for window in range(3, 12)]
    for policy, limit in (("skip", "--run.max_skips"), ("rollback", "--run.max_rollbacks")):
        ended = server.run(script, [*arguments(1, policy, policy), limit, "2"], 1, faults)
        assert ended.code == 3, ended.text
        assert len(reports(ended.folder)) == 3
        check_finite(ended.folder)


@pytest.mark.parametrize("rate", ["1e6", "3e38"])
def test_no_learning_rate_leaves_anything_that_is_not_finite(server, script, arguments, rate):
    """The update itself overflows, or what follows it: 3, and the newest finite state is what is saved."""
    fast = {"--optim.lr": rate, "--optim.max_norm": 0, "--schedule.warmup_steps": 0, "--run.save_every": 1,
            "--run.max_steps": 20}  # fmt: skip
    ended = server.run(script, [*arguments(1, "stop"), *flat(fast)])
    assert ended.code == 3 and "Traceback" not in ended.text, ended.text
    check_finite(ended.folder)
    assert not (ended.folder / "final").exists()
    (folder,) = reports(ended.folder)
    assert "finite when run again" not in (ended.folder / "status.json").read_text()
    again = server.run(REPLAY, [folder])
    assert again.code == 0 and again.text.count("reproduced") == 1, again.text
    assert rate != "1e6" or server.run(REPLAY, [ended.folder]).code == 2, "a run is no report"


@pytest.mark.parametrize("more", [{}, {"--optim.ema_decay": 0.0, "--optim.accumulation_steps": 2}], ids=["ema", "raw"])
def test_an_overflow_where_a_save_is_due_is_rolled_back(server, script, arguments, more):
    """However often, until the rollbacks are used up: the guard stops the run, and blames no line of the loop."""
    fast = {"--optim.name": "sgd", "--optim.lr": 3e38, "--optim.max_norm": 0, "--schedule.warmup_steps": 0,
            "--run.save_every": 1, "--run.max_steps": 20, "--run.max_rollbacks": 2} | more  # fmt: skip
    ended = server.run(script, [*arguments(1, "rollback"), *flat(fast)])
    assert ended.code == 3 and "was not done" not in ended.text, ended.text
    assert ended.text.count("rollback: goes on from step") == 2
    check_finite(ended.folder)
