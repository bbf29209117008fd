"""Checkpoints survive kills, full disks and tampering; what is loaded is what was saved."""

import errno
import hashlib
import io
import itertools
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from audit import at_events
from hypothesis import example, given
from hypothesis import strategies as st

from toolkit.base.errors import BadInput
from toolkit.base.files import decode_json, encode_json
from toolkit.run.checkpoint import (
    CheckpointError,
    changed_files,
    linked,
    load_checkpoint,
    mark_best,
    newest_valid,
    repair_latest,
    replace_state,
    resolve_resume,
    save_checkpoint,
)

resource = pytest.importorskip("resource", reason="mounts, kernel limits and users of POSIX: not on Windows")


def save(folder: Path, step: int, value: float | None = None, **options) -> Path:
    """A small checkpoint whose weights, optimizer and state all say `value`, so that a mixture shows."""
    value = float(step) if value is None else value
    options = {"keep": 10, "optimizer": {"state": {0: {"m": torch.full((64,), value)}}, "param_groups": []}} | options
    tensors = {"model": {"w": torch.full((64,), value)}}
    return save_checkpoint(folder, step, tensors=tensors, state={"v": value}, **options)


def values(checkpoint) -> set[float]:
    optimizer = checkpoint.optimizer["state"][0]["m"].tolist()
    return {*checkpoint.tensors["model"]["w"].tolist(), *optimizer, checkpoint.state["v"]}


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.is_symlink())


def test_every_dtype_and_layout_comes_back_exactly(tmp_path):
    base, tied = torch.arange(24, dtype=torch.float32), torch.randn(3, 4)
    tensors = {
        **{str(dtype): torch.randn(5).to(dtype) for dtype in (torch.bfloat16, torch.half, torch.double)},
        "int64": torch.tensor([2**62 + 1, -(2**53) - 1]), "uint8": torch.arange(256).to(torch.uint8),
        "bool": torch.tensor([True, False]), "scalar": torch.tensor(3), "empty": torch.zeros(0, 4),
        "transposed": torch.randn(3, 5).T,
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "tied_a": tied, "tied_b": tied, "view_a": base[:12], "view_b": base[6:].view(3, 6),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]), "parameter": torch.nn.Parameter(torch.randn(2)),
    }  # fmt: skip
    given = {"tensors": {"t": tensors}, "extra": {"seen": 7, "critic": {"bias": base[:2]}}}
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, **given, optimizer=None, state={}, keep=1))
    assert loaded.optimizer is None and loaded.tensors["t"].keys() == tensors.keys()
    assert loaded.extra["seen"] == 7 and loaded.extra["critic"]["bias"].equal(base[:2])
    for name, tensor in tensors.items():
        back = loaded.tensors["t"][name]
        assert back.dtype == tensor.dtype and back.shape == tensor.shape, name
        contiguous = tensor.detach().contiguous().reshape(-1)
        assert back.reshape(-1).view(torch.uint8).equal(contiguous.view(torch.uint8)), name  # to the bit, NaN too


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@example({"a": [math.nan, -math.inf, -0.0]})
@given(json_values)
def test_state_round_trips_exactly_through_strict_json(value):
    text = json.dumps(encode_json(value), allow_nan=False)
    # repr tells NaN, -0.0 and the type apart, and writes a float exactly
    assert repr(decode_json(json.loads(text))) == repr(value)


def test_state_converts_numpy_and_names_what_it_cannot_keep(tmp_path):
    values = {"ap": np.float32(0.1), "n": np.int64(3), "t": (1, 2)}
    assert encode_json(values) == {"ap": float(np.float32(0.1)), "n": 3, "t": [1, 2]}
    with pytest.raises(TypeError, match=r"state\['meters'\]\[1\] is a Tensor"):
        save_checkpoint(tmp_path, 1, tensors={}, optimizer=None, state={"meters": [0, torch.ones(1)]}, keep=1)
    with pytest.raises(TypeError, match=r"state\['epochs'\] has keys other than strings"):
        save_checkpoint(tmp_path, 1, tensors={}, optimizer=None, state={"epochs": {1: 2}}, keep=1)
    assert steps(tmp_path) == []


def test_newest_best_latest_and_those_of_every_so_many_steps_are_kept(tmp_path):
    for step in range(0, 26, 2):
        save(tmp_path, step, keep=2, keep_every=10, best=step == 4)
    kept = ["step_000004", "step_000010", "step_000020", "step_000022", "step_000024"]
    assert steps(tmp_path) == kept, "step 0 has learned nothing: it goes like any other"
    assert os.readlink(tmp_path / "best") == "step_000004" and os.readlink(tmp_path / "latest") == "step_000024"
    save(tmp_path, 26, keep=1, keep_every=4)
    assert steps(tmp_path) == ["step_000004", "step_000020", "step_000024", "step_000026"], "by the present setting"
    mark_best(tmp_path / "step_000020")
    save(tmp_path, 1234567, keep=1)
    assert steps(tmp_path) == ["step_000020", "step_1234567"]
    assert linked(tmp_path, "best") == tmp_path / "step_000020" and newest_valid(tmp_path)[0].step == 1234567


def test_a_better_outcome_lets_the_checkpoint_go_that_was_best_before(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=1)
        replace_state(tmp_path, step, {"v": float(step), "metric": 0.5}, keep=1, best=step != 2)
        assert steps(tmp_path) == (["step_000001", "step_000002"] if step == 2 else [f"step_{step:06d}"])
    assert linked(tmp_path, "best") == linked(tmp_path, "latest") == tmp_path / "step_000003"
    assert newest_valid(tmp_path)[0].state["metric"] == 0.5


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EMLINK])
def test_without_hard_links_the_files_are_copied_to_the_disk(tmp_path, monkeypatch, number):
    save(tmp_path, 1)
    synced, fsync = [], os.fsync

    def refuse(source, target):
        raise OSError(number, "no links here")

    def note(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "fsync", note)
    replace_state(tmp_path, 1, {"v": 1.0}, keep=1)
    assert {"model.safetensors", "optimizer.pt", "state.json"} <= {*synced[: synced.index("MANIFEST.json")]}
    assert values(newest_valid(tmp_path)[0]) == {1.0}


def test_a_checkpoint_whose_outcome_is_written_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    """Another program may evaluate the newest checkpoint of a run that is training."""
    path = save(tmp_path, 1)
    reads = []

    def read_meanwhile(*arguments):
        if not reads:
            replace_state(tmp_path, 1, {"v": 1.0, "metric": 0.5}, keep=1)
        reads.append(arguments)
        return changed_files(*arguments)

    monkeypatch.setattr("toolkit.run.checkpoint.changed_files", read_meanwhile)
    assert load_checkpoint(path).state["metric"] == 0.5
    flip(path / "model.safetensors")
    with pytest.raises(CheckpointError, match="sha256 differs"):
        load_checkpoint(path)
    assert len(reads) == 3, "of one that is damaged there is no second version"


def test_newest_is_the_last_one_written_not_the_highest_step(tmp_path):
    """A run that went back to step 2 must not go on from the steps 3 and 4 it left behind."""
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    save(tmp_path, 3, value=30.0, keep=2)
    assert steps(tmp_path) == ["step_000003", "step_000004"]
    assert values(newest_valid(tmp_path)[0]) == {30.0}
    (tmp_path / "step_000004" / "MANIFEST.json").write_text("{")  # takes no place, and is left alone
    save(tmp_path, 5, keep=2)
    assert steps(tmp_path) == ["step_000003", "step_000004", "step_000005"]


def test_a_replacement_cut_short_is_undone_by_the_next_save(tmp_path):
    save(tmp_path, 1).rename(tmp_path / "step_000001.replaced")
    assert values(newest_valid(tmp_path)[0]) == {1.0}
    save(tmp_path, 2)
    assert steps(tmp_path) == ["step_000001", "step_000002"]
    shutil.copytree(tmp_path / "step_000001", tmp_path / "step_000002.replaced")  # killed after the second rename
    save(tmp_path, 3)
    assert steps(tmp_path) == ["step_000001", "step_000002", "step_000003"]
    assert values(load_checkpoint(tmp_path / "step_000002")) == {2.0}


def test_links_are_text_files_where_links_are_not_possible(tmp_path, monkeypatch):
    def refuse(self, target):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    save(tmp_path, 1, best=True)
    save(tmp_path, 2)
    assert (tmp_path / "latest").read_text() == "step_000002\n" and not (tmp_path / "latest").is_symlink()
    assert linked(tmp_path, "best") == tmp_path / "step_000001"
    assert resolve_resume(str(tmp_path / "best"), tmp_path)[0].step == 1
    for elsewhere in ("../step_000001", "/etc", "step_000009", ""):
        (tmp_path / "best").write_text(elsewhere)
        assert linked(tmp_path, "best") is None


PARTS = {
    "data": {"categories": [{"id": 1, "name": "a"}], "tables": {}},
    "weight_facts": {"infinite": ["mask"], "frozen": []},
    "ema": {"updates made": 1}, "guard": {},
    "sampler": {"seed": 0, "epoch": 0, "offset": 4, "world_size": 1, "batch_size": 4, "num_samples": 8},
    "plan": {"total_steps": 9, "limit": "run.epochs", "accumulation": [1, 0], "recut": 0, "schedule": {},
             "budget": None},
    "log": {"meters": {}, "averages": {}, "elapsed_s": 1.5, "epoch_s": 0.5, "epoch_steps": 1, "logged_epoch": -1,
            "logged_steps": -1, "has_notes": False, "writer": {"rows": 1, "run_ids": {}}},
    "best": {"metric": "bbox_AP", "value": None, "step": -1, "without_better": 0, "evaluated_step": -1},
}  # fmt: skip
RUN_STATE = {"step": 1, "parts": PARTS}


def save_run(folder: Path, step: int, state: dict | None = None, tensors: dict | None = None, optimizer=None) -> Path:
    weights = {"w": torch.ones(3), "mask": torch.tensor([0.0, -math.inf]), "count": torch.tensor(3)}
    tensors = {"model": weights, "ema": weights} if tensors is None else tensors
    if optimizer is None:
        optimizer = {"state": {0: {"m": torch.ones(3), "step": torch.tensor(1.0)}}, "param_groups": []}
    state = RUN_STATE | {"step": step} if state is None else state
    return save_checkpoint(folder, step, tensors=tensors, optimizer=optimizer, state=state, keep=9, kind="run")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit_manifest(folder: Path, **changes) -> None:
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    (folder / "MANIFEST.json").write_text(json.dumps(manifest | changes))


def drop_format(folder: Path) -> None:
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    del manifest["format"]
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))


def plant(folder: Path, name: str, content: bytes | str) -> None:
    """Writes a file with its hash, as somebody would who wants it to be used."""
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    files = {}
    for path in folder.iterdir():
        if path.name != "MANIFEST.json":
            files[path.name] = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    edit_manifest(folder, files=files)


def plant_state(**changes):
    return lambda folder: plant(folder, "state.json", json.dumps(RUN_STATE | {"step": 2} | changes))


NESTED = '{"a":' * 100_000 + "0" + "}" * 100_000
NO_OPTIMIZER = io.BytesIO()
torch.save([], NO_OPTIMIZER)
OUTSIDE = {"../../x.safetensors": {"size": 0, "sha256": ""}}
BREAKAGES = {
    "truncated model": (lambda f: os.truncate(f / "model.safetensors", 40), "model.safetensors has 40 bytes"),
    "flipped bit": (lambda f: flip(f / "optimizer.pt"), "optimizer.pt is not what was written"),
    "missing file": (lambda f: (f / "state.json").unlink(), "state.json is missing"),
    "no manifest": (lambda f: (f / "MANIFEST.json").unlink(), "never finished"),
    "torn manifest": (lambda f: os.truncate(f / "MANIFEST.json", 50), "MANIFEST.json cannot be read"),
    "binary manifest": (lambda f: (f / "MANIFEST.json").write_bytes(b"\xff\xfe\x00"), "MANIFEST.json cannot be read"),
    "nested manifest": (lambda f: (f / "MANIFEST.json").write_text(NESTED), "MANIFEST.json cannot be read"),
    "foreign manifest": (lambda f: (f / "MANIFEST.json").write_text("[]"), "MANIFEST.json is not what this"),
    "no kind": (lambda f: edit_manifest(f, kind=None), "MANIFEST.json is not what this"),
    "older format": (lambda f: edit_manifest(f, format=1), "another version of this toolkit (format 1; this"),
    "no format": (drop_format, "another version of this toolkit (it states no format; this"),
    "planted file": (lambda f: (f / "model.pkl").write_bytes(b"x"), "model.pkl is not in the manifest"),
    "outside path": (lambda f: edit_manifest(f, files=OUTSIDE), "no checkpoint holds"),
    "no state": (lambda f: edit_manifest(f, files={}), "the manifest does not list state.json"),
    "state not JSON": (lambda f: plant(f, "state.json", "{"), "state.json cannot be read"),
    "nested state": (lambda f: plant(f, "state.json", NESTED), "state.json cannot be read"),
    "empty state": (lambda f: plant(f, "state.json", "{}"), "state.json does not have the state of the parts"),
    "state no mapping": (lambda f: plant(f, "state.json", "[]"), "state.json does not have the state of the parts"),
    "part no mapping": (plant_state(parts=PARTS | {"guard": 1}), "state.json does not have the state of the parts"),
    "no part": (plant_state(parts={"data": PARTS["data"]}), "lacks the state of weight_facts, sampler, "),
    "another step": (plant_state(step=7), "state.json is of step 7"),
    "no list of masks": (plant_state(parts=PARTS | {"weight_facts": {}}), "its part weight_facts cannot be used (Key"),
    "unknown kind": (lambda f: edit_manifest(f, kind="walk"), "MANIFEST.json is not what this"),
    "truth for a step": (lambda f: edit_manifest(f, step=True), "MANIFEST.json is not what this"),
    "no hash": (lambda f: edit_manifest(f, files={"state.json": {"size": 2}}), "MANIFEST.json is not what this"),
    "step before the first": (lambda f: edit_manifest(f, step=-2), "MANIFEST.json is not what this"),
    "no tensors": (lambda f: plant(f, "model.safetensors", b"\0" * 99), "model.safetensors "),
    "no archive": (lambda f: plant(f, "optimizer.pt", b"hello"), "optimizer.pt "),
    "optimizer gone": (lambda f: (os.remove(f / "optimizer.pt"), plant_state()(f)), "the optimizer is missing"),
    "no optimizer": (lambda f: plant(f, "optimizer.pt", NO_OPTIMIZER.getvalue()), "its part optimizer cannot be used"),
    "no weights": (lambda f: (os.remove(f / "model.safetensors"), plant_state()(f)), "there are no weights"),
    "no averages": (lambda f: (os.remove(f / "ema.safetensors"), plant_state()(f)), "there are no averaged weights"),
}


def test_a_checkpoint_that_is_not_of_a_run_is_refused_where_a_run_is_asked_for(tmp_path):
    save(tmp_path / "checkpoints", 1)
    assert resolve_resume("latest", tmp_path)[0].step == 1
    with pytest.raises(CheckpointError, match="of kind state; expected run"):
        resolve_resume("latest", tmp_path, of_run=True)


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_checkpoint_is_refused_named_and_passed_over(tmp_path, name):
    breakage, message = BREAKAGES[name]
    save_run(tmp_path, 1)
    breakage(save_run(tmp_path, 2))
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        load_checkpoint(tmp_path / "step_000002")
    assert isinstance(caught.value, BadInput) and "step_000002" in str(caught.value)
    found, passed_over = newest_valid(tmp_path)
    assert found.step == 1 and len(passed_over) == 1
    assert "step_000002" in passed_over[0] and message in passed_over[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_passed_over(tmp_path, value):
    """Infinities of a tensor that is meant to have them, such as a mask, are none of it."""
    good, bad = ({"w": torch.tensor([1.0, x]), "mask": torch.tensor([0.0, -math.inf])} for x in (1.0, value))
    moments = {"state": {0: {"m": torch.tensor([1.0, value])}}, "param_groups": []}
    save_run(tmp_path, 1)
    save_run(tmp_path, 2, tensors={"model": bad, "ema": good})
    save_run(tmp_path, 3, tensors={"model": good, "ema": bad})
    save_run(tmp_path, 4, optimizer=moments)
    found, passed_over = newest_valid(tmp_path)
    assert found.step == 1 and len(passed_over) == 3
    for step, kind in ((2, "model/w"), (3, "ema/w"), (4, "optimizer/0/m")):
        assert f"step_00000{step}: NaN or infinity in {kind}" in passed_over[4 - step]


class Planted:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return (os.system, (f"touch {self.marker}",))


@pytest.mark.parametrize("how", ["torch", "torch legacy", "bare pickle"])
@pytest.mark.parametrize("hide", [False, True])
def test_a_planted_pickle_is_refused_and_never_run(tmp_path, how, hide, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # not even when somebody asks for it
    path, marker = save(tmp_path / "checkpoints", 1), tmp_path / "ran"
    if how == "bare pickle":
        (path / "optimizer.pt").write_bytes(pickle.dumps(Planted(marker)))
    else:
        torch.save(Planted(marker), path / "optimizer.pt", _use_new_zipfile_serialization=how == "torch")
    if hide:
        plant(path, "optimizer.pt", (path / "optimizer.pt").read_bytes())
    with pytest.raises(CheckpointError, match="never run" if hide else "bytes|sha256"):
        load_checkpoint(path)
    assert newest_valid(tmp_path / "checkpoints")[0] is None
    assert not marker.exists()
    pickle.loads(pickle.dumps(Planted(marker)))  # noqa: S301  the plant is live
    assert marker.exists()


def test_none_valid_is_refused_with_all_that_is_wrong_with_each(tmp_path):
    for step in (1, 2):
        plant(last := save_run(tmp_path / "checkpoints", step), "state.json", "{}")
    with pytest.raises(CheckpointError) as caught:
        resolve_resume("latest", tmp_path)
    assert "None of the checkpoints" in str(caught.value) and str(caught.value).count("does not have the state") == 2
    assert steps(tmp_path / "checkpoints")[-2:] == ["step_000001", "step_000002"]
    flip(last / "model.safetensors")
    (last / "state.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(last)
    assert len(caught.value.problems) == 2


def test_latest_is_mended_where_it_leads_nowhere_or_to_a_broken_one(tmp_path):
    first, second = (save_run(tmp_path, step) for step in (1, 2))
    repair_latest(first)
    assert linked(tmp_path, "latest") == second, "an earlier one was resumed: nothing is broken"
    for damage in (lambda: flip(second / "model.safetensors"), (tmp_path / "latest").unlink):
        damage()
        repair_latest(first)
        assert linked(tmp_path, "latest") == first
    third = save(tmp_path, 3)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to(first.name)  # killed between the checkpoint and its link
    repair_latest(third)
    assert linked(tmp_path, "latest") == third


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A power cut after the rename finds every byte of the files, the manifest, and the names."""
    events, fsync, rename, replace = [], os.fsync, Path.rename, os.replace

    def synced(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", lambda self, target: (events.append(f"to {target.name}"), rename(self, target)))
    monkeypatch.setattr(os, "replace", lambda path, to: (events.append(f"to {Path(to).name}"), replace(path, to)))
    save_run(tmp_path, 1)
    named = events.index("to step_000001")
    files = ["ema.safetensors", "model.safetensors", "optimizer.pt", "state.json", "MANIFEST.json", ".tmp-step_000001"]
    assert events[:named] == files
    assert events[named + 1 :] == [tmp_path.name, "to latest", tmp_path.name]


def test_resume_values(tmp_path):
    run = tmp_path / "run"
    save(run / "checkpoints", 1, best=True)
    save(run / "checkpoints", 2)

    def resumed(value):
        return resolve_resume(str(value), run)

    assert resumed("never") == (None, [])
    (tmp_path / "new" / "checkpoints" / "notes").mkdir(parents=True)
    found, messages = resolve_resume("latest", tmp_path / "new")
    assert found is None and "starting fresh" in messages[-1]
    assert resumed("latest")[0].step == 2 and "step 2" in resumed("latest")[1][-1]
    assert resumed(run)[0].step == 2
    assert resumed(run / "checkpoints")[0].step == 2
    assert resumed(run / "checkpoints" / "step_000001")[0].step == 1
    assert resumed(run / "checkpoints" / "best")[0].step == 1
    assert resumed(run / "best")[0].step == 1
    for value in ("nowhere", tmp_path, run / "checkpoints" / "step_000009", tmp_path / "latest"):
        with pytest.raises(BadInput, match=str(value)):
            resumed(value)
    os.truncate(run / "checkpoints" / "step_000002" / "model.safetensors", 9)
    found, messages = resumed("latest")
    assert found.step == 1 and "Passed over" in messages[0] and "step_000002" in messages[0]
    with pytest.raises(BadInput, match="truncated"):  # named by the user: nothing else is taken instead
        resumed(run / "checkpoints" / "step_000002")


def still_whole(folder: Path, step: int) -> None:
    found, _ = newest_valid(folder)
    assert found.step == step and values(found) == {float(step)}
    assert linked(folder, "latest") == folder / f"step_{step:06d}"
    assert not list(folder.glob(".tmp-*"))


def test_a_full_disk_and_a_read_only_one(mount, tmp_path):
    small_disk = mount(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m", "none")
    save(small_disk, 1)
    for weights, moments in ((900_000, 100_000), (100_000, 900_000)):  # each is written by a library of its own
        parts = {"tensors": {"model": {"w": torch.zeros(weights)}}, "state": {}}
        parts["optimizer"] = {"state": {0: {"m": torch.zeros(moments)}}}
        with pytest.raises(CheckpointError, match=r"No space left on device.*about 4\.0 MB.*make room"):
            save_checkpoint(small_disk, 2, **parts, keep=1)
        still_whole(small_disk, 1)
    save(small_disk, 3)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system.*Make the folder writable"):
        save(small_disk, 4)
    still_whole(small_disk, 3)


def test_file_size_limit(tmp_path):
    """A quota of the kind every user can set on himself; needs no rights."""
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large.*about 0.4 MB"):
            save_checkpoint(tmp_path, 2, tensors={"m": {"w": torch.zeros(100_000)}}, optimizer=None, state={}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    still_whole(tmp_path, 1)


def check_after_kill(folder: Path, possible: set[float]) -> float:
    """The newest checkpoint loads, is one that was being saved, and is of one piece; saving goes on."""
    found, _ = newest_valid(folder)
    assert found is not None and len(values(found)) == 1
    (value,) = values(found)
    assert value in possible
    save(folder, 99, keep=1)
    best = linked(folder, "best")
    assert steps(folder) == [*([best.name] if best else []), "step_000099"]
    assert best is None or load_checkpoint(best).state["metric"] == 0.5, "it contains its own metric"
    assert values(newest_valid(folder)[0]) == {99.0}
    return value


def kill_at_write(folder: Path, number: int) -> bool:
    """In a forked child: save twice, SIGKILL before its `number`-th change of the file system. True if it got there."""
    child = os.fork()
    if child == 0:
        writes = itertools.count(1)
        at_events("write *", lambda path: next(writes) == number and os.kill(os.getpid(), signal.SIGKILL))
        save(folder, 2, keep=1)  # a new step, after which step 1 is deleted
        save(folder, 2, value=20.0, keep=1)  # in the place of that one
        replace_state(folder, 2, {"v": 20.0, "metric": 0.5}, keep=1, best=True)  # and its evaluation
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def every_call(folder: Path) -> None:
    number, seen = 0, set()
    while True:
        number += 1
        shutil.rmtree(folder, ignore_errors=True)
        save(folder, 1)
        killed = kill_at_write(folder, number)
        seen.add(check_after_kill(folder, {1.0, 2.0, 20.0}))
        if not killed:
            break
    print(f"killed before each of {number - 1} writes")
    assert number > 45 and seen == {1.0, 2.0, 20.0}


def test_kill_before_every_change_of_the_file_system(tmp_path):
    """In a process of its own, which may fork: one thread, no test runner."""
    command = [sys.executable, __file__, str(tmp_path / "checkpoints")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # where the tests' own modules are
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "killed before each" in done.stdout


if __name__ == "__main__":
    torch.set_num_threads(1)
    # A killed process loses nothing that it wrote; flushes are for power cuts, and slow.
    os.fsync = lambda descriptor: None
    every_call(Path(sys.argv[1]))
