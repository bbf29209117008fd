"""Nothing that is not finite is ever saved: a NaN is reported where it began, and the run does what its policy says."""

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from launching import nonfinite, rows
from places import ROOT
from safetensors.torch import load_file, save_file

REPLAY = ROOT / "scripts" / "replay.py"
KINDS = {"boxes": "batch", "activation": "module", "loss": "loss", "gradient": "gradient"}  # and where it is seen


class Case(NamedTuple):
    """A run of five steps that the last process of it breaks, each kind of NaN in a window of its own, and its end."""

    policy: str
    processes: int
    kinds: tuple[str, ...]
    windows: range
    code: int
    goes_on: int  # how often it goes on after a refused update
    replayed: bool = False


ONCE_EACH = tuple(KINDS)
OFTEN = ("loss",) * 9
APART = range(2, 10, 2)
CASES = {
    "skip, 2 processes": Case("skip", 2, ONCE_EACH, APART, code=0, goes_on=4, replayed=True),
    "rollback": Case("rollback", 1, ONCE_EACH, APART, code=0, goes_on=4),
    "rollback, 2 processes": Case("rollback", 2, ONCE_EACH, APART, code=0, goes_on=4),
    "stop": Case("stop", 1, ("activation",), range(4, 5), code=3, goes_on=0),
    "stop, 2 processes": Case("stop", 2, ("gradient",), range(4, 5), code=3, goes_on=0),
    "skips are used up": Case("skip", 1, OFTEN, range(3, 12), code=3, goes_on=2),
    "rollbacks are used up": Case("rollback", 1, OFTEN, range(3, 12), code=3, goes_on=2),
}
SLOW = {"rollback, 2 processes", "rolled back without averages"}

# Updates that overflow, or what follows them: settings, and how often the run is rolled back.
SGD = "--optim.name sgd --optim.lr 3e38 --run.on_nonfinite rollback --run.max_rollbacks 2"
OVERFLOWS = {
    "rate 1e6": ("--optim.lr 1e6 --run.on_nonfinite stop", 0),
    "rate 3e38": ("--optim.lr 3e38 --run.on_nonfinite stop", 0),
    "rolled back": (SGD, 2),
    "rolled back without averages": (f"{SGD} --optim.ema_decay 0", 2),
}

# What a sealed newest checkpoint holds that it must not: where, the value, and how the run ends that resumes from it.
DOCTORED = [
    ("weight", math.nan, "passed over"),
    ("running variance", 1e38, "goes on or stops"),
    pytest.param("average", -math.inf, "passed over", marks=pytest.mark.slow),
    pytest.param("moment", math.inf, "passed over", marks=pytest.mark.slow),
    pytest.param("moment", 1e38, "goes on or stops", marks=pytest.mark.slow),
]
TENSORS = {"weight": ("model", "weight"), "average": ("ema", "weight"), "running variance": ("model", "running_var")}


@pytest.fixture
def arguments(settings, tmp_path):
    """`arguments(more, processes)`: three windows an epoch of two micro-batches each, everything learns."""

    def build(more: str, processes: int = 1) -> list[str]:
        place = f"--run.output_dir {tmp_path} --run.epochs 20 --run.max_steps 5 --run.save_every 2 --run.eval_every 0"
        cut = f"--optim.accumulation_steps 2 --data.batch_size_per_device {4 // processes}"
        return settings(f"{place} {cut} --run.max_rollbacks 10 {more}")

    return build


def slow_ones(names) -> list:
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


def reports(folder: Path) -> dict[str, dict]:
    """report.json by folder, in the order of writing."""
    paths = sorted(folder.glob("nan/*/*/report.json"), key=lambda path: path.stat().st_mtime_ns)
    return {str(path.parent): json.loads(path.read_text()) for path in paths}


def check_report(report: dict, kind: str, rank: int) -> None:
    assert report["rank"] == rank
    assert report["where"] == KINDS[kind]
    assert report["lr"]
    images = sum(report["image_ids"], [])
    assert len(images) == len(set(images)) > 0
    module = report["first_nonfinite_module"] or ""
    assert ("backbone" in module) == (kind == "activation")
    if kind == "gradient":
        assert report["nonfinite_gradients"]
        assert all(math.isfinite(loss) for losses in report["window_losses"] for loss in losses.values())
    if kind == "boxes":
        assert any("boxes" in name for name in report["batch"])


def check_finite(folder: Path) -> None:
    """Weights, buffers, moving averages and optimizer state of every checkpoint that is left, and of final/."""
    paths = list(folder.glob("checkpoints/step_*"))
    assert paths
    for path in paths:
        assert [name for name in nonfinite(path) if not name.startswith("group/")] == []  # rates are no state
    for path in folder.glob("final/*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values())


@pytest.mark.parametrize("name", slow_ones(CASES))
def test_run_ends_as_its_policy_says(server, script, arguments, name):
    case = CASES[name]
    rank = case.processes - 1
    limits = "--run.max_skips 2 --run.max_rollbacks 2" if case.kinds == OFTEN else ""
    planted = zip(case.kinds, case.windows, strict=True)
    faults = [{"nan": kind, "window": window, "rank": rank} for kind, window in planted]
    args = arguments(f"--run.on_nonfinite {case.policy} {limits}", case.processes)
    ended = server.run(script, args, case.processes, faults)
    assert ended.code == case.code, ended.text
    assert "Traceback" not in ended.text, ended.text
    assert ended.text.count("goes on from step") == case.goes_on
    check_finite(ended.folder)
    assert all(math.isfinite(v) for row in rows(ended.folder) for v in row.values() if isinstance(v, float))
    written = reports(ended.folder)
    assert len(written) == case.goes_on + (case.code == 3)
    for (folder, report), kind in zip(written.items(), case.kinds, strict=False):
        assert report["policy"] == case.policy
        check_report(report, kind, rank)
        if case.replayed:  # a fault that was planted in the program has to be planted again
            again = [] if kind == "boxes" else [{"nan": kind, "ids": report["image_ids"][-1]}]
            server.run(REPLAY, [folder], faults=again).ok()
    if case.code == 0:
        assert ended.trained[-1] == 5
        assert case.policy == "rollback" or ended.trained == [1, 2, 3, 4, 5]
    else:
        last = [*written][-1]
        step = f"step_{ended.status['step']:06d}"
        assert f"{step}/rank{rank}" in last
        assert last in ended.status["reason"]
        assert f"rank {rank}" in ended.status["reason"]
        assert ended.status["state"] == "stopped_by_guard"
        assert (ended.folder / "checkpoints" / "latest").resolve().name == step


@pytest.mark.every_script("slow")
def test_an_infinite_box_is_refused_and_replayed(server, script, arguments):
    """Nothing of Faster R-CNN overflows: a box that matches no anchor has no loss. YOLOv3 looks for its cell."""
    faults = [{"nan": "infinite boxes", "window": 2, "rank": 0}]
    ended = server.run(script, arguments("--run.on_nonfinite skip"), 1, faults).ok()
    assert "a box of the batch is not finite" in ended.text
    ((folder, report),) = reports(ended.folder).items()
    check_report(report, "boxes", 0)
    assert ended.trained == [1, 2, 3, 4, 5]
    again = server.run(REPLAY, [folder]).ok()
    assert "reproduced" in again.text, again.text


@pytest.mark.parametrize("name", slow_ones(OVERFLOWS))
def test_no_learning_rate_leaves_anything_that_is_not_finite(server, script, arguments, name):
    more, rollbacks = OVERFLOWS[name]
    fast = "--optim.max_norm 0 --schedule.warmup_steps 0 --run.save_every 1 --run.max_steps 20"
    ended = server.run(script, arguments(f"{fast} {more}"))
    assert ended.code == 3, ended.text
    assert "Traceback" not in ended.text, ended.text
    assert ended.text.count("rollback: goes on from step") == rollbacks
    check_finite(ended.folder)
    assert not (ended.folder / "final").exists()
    if rollbacks == 0:
        (folder,) = reports(ended.folder)
        assert "finite when run again" not in ended.status["reason"]
        again = server.run(REPLAY, [folder]).ok()
        assert again.text.count("reproduced") == 1, again.text
        assert server.run(REPLAY, [ended.folder]).code == 2, "a run is no report"


def seal(path: Path) -> None:
    """The manifest says that the files are what was written."""
    manifest = json.loads((path / "MANIFEST.json").read_text())
    for name, entry in manifest["files"].items():
        content = (path / name).read_bytes()
        entry["size"] = len(content)
        entry["sha256"] = hashlib.sha256(content).hexdigest()
    (path / "MANIFEST.json").write_text(json.dumps(manifest))


def doctor(path: Path, what: str, value: float) -> None:
    """Put a value into a tensor of a checkpoint, and seal it."""
    if what == "moment":
        optimizer = torch.load(path / "optimizer.pt", weights_only=True)
        moments = [m for state in optimizer["state"].values() for m in state.values() if torch.as_tensor(m).dim() > 1]
        moments[0][(0,) * moments[0].dim()] = value
        torch.save(optimizer, path / "optimizer.pt")
    else:
        stem, ending = TENSORS[what]
        tensors = load_file(path / f"{stem}.safetensors")
        name = next(name for name, t in tensors.items() if name.endswith(ending) and t.is_floating_point())
        tensors[name].view(-1)[0] = value
        save_file(tensors, path / f"{stem}.safetensors")
    seal(path)


@pytest.fixture
def two_checkpoints(resumable, tmp_path):
    """(arguments that go on to two more steps, the newest of the two checkpoints of a copy of a finished run)"""
    args, reference = resumable(1)
    folder = shutil.copytree(reference, tmp_path / "copy", symlinks=True)
    newest = (folder / "checkpoints" / "latest").resolve()
    (folder / "checkpoints" / "best").unlink()  # whichever it was, it would be fallen back to
    for path in set(folder.glob("checkpoints/step_*")) - {newest}:
        shutil.rmtree(path)
    earlier = shutil.copytree(newest, newest.with_name("step_000001"))
    for name, changes in (("state.json", {"step": 1}), ("MANIFEST.json", {"step": 1, "sequence": 0})):
        content = json.loads((earlier / name).read_text())
        (earlier / name).write_text(json.dumps(content | changes))
    seal(earlier)
    longer = f"--run.output_dir {tmp_path} --run.name copy --run.resume_schedule new --run.max_steps 8 --run.epochs 9"
    return [*args, *longer.split(), "--run.keep", "9"], newest


@pytest.mark.parametrize(("what", "value", "end"), DOCTORED)
def test_a_checkpoint_that_spoils_everything_is_passed_over_or_guarded(
    server, script, two_checkpoints, what, value, end
):
    args, newest = two_checkpoints
    doctor(newest, what, value)
    ended = server.run(script, args)
    assert "Traceback" not in ended.text, ended.text
    assert (f"Passed over Checkpoint {newest}" in ended.text) == (end == "passed over"), ended.text
    if end == "passed over":
        assert ended.code == 0
        assert "NaN or infinity in " in ended.text
        assert "step_000001 (step 1)" in ended.text
        shutil.rmtree(newest)
    end = (ended.code, ended.status["state"], ended.status["exit_code"])
    assert end in ((0, "done", 0), (3, "stopped_by_guard", 3))
    check_finite(ended.folder)
