"""Checkpoints survive kills, full disks and tampering; what is loaded is what was saved.

    python -m pytest tests/test_checkpoint.py
"""

import errno
import hashlib
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import BadInput
from toolkit.files import decode_json, encode_json
from toolkit.runs.checkpoint import (
    CheckpointError,
    linked,
    load_checkpoint,
    mark_best,
    newest_valid,
    repair_latest,
    resolve_resume,
    save_checkpoint,
)


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


# ---------------------------------------------------------------- what goes in comes out


def test_every_dtype_and_layout_comes_back_exactly(tmp_path):
    base = torch.arange(24, dtype=torch.float32)
    tied = torch.randn(3, 4)
    tensors = {
        "bf16": torch.randn(5).bfloat16(),
        "fp16": torch.randn(5).half(),
        "fp64": torch.randn(5, dtype=torch.float64),
        "int64": torch.tensor([2**62 + 1, -(2**53) - 1]),
        "uint8": torch.arange(256, dtype=torch.int32).to(torch.uint8),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "transposed": torch.randn(3, 5).T,
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "tied_a": tied,
        "tied_b": tied,
        "view_a": base[:12],
        "view_b": base[6:].view(3, 6),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    loaded = load_checkpoint(save_checkpoint(tmp_path, 1, tensors={"t": tensors}, optimizer=None, state={}, keep=1))
    assert loaded.optimizer is None and loaded.tensors["t"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        back = loaded.tensors["t"][name]
        assert back.dtype == tensor.dtype and back.shape == tensor.shape, name
        contiguous = tensor.detach().contiguous().reshape(-1)
        assert back.reshape(-1).view(torch.uint8).equal(contiguous.view(torch.uint8)), name  # to the bit, NaN too


def test_saving_changes_nothing_in_the_model(tmp_path):
    model = torch.nn.Linear(3, 3)
    model.tied = model.weight
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    save_checkpoint(tmp_path, 1, tensors={"model": model.state_dict()}, optimizer=None, state={}, keep=1)
    for name, value in model.state_dict().items():
        assert value.data_ptr() == before[name][0] and value.equal(before[name][1])
    loaded = load_checkpoint(tmp_path / "step_000001")
    model.load_state_dict(loaded.tensors["model"])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def same(a, b) -> bool:
    """Equal to the bit: repr tells NaN, -0.0 and the type apart, and writes a float exactly."""
    return repr(a) == repr(b)


@given(json_values)
def test_state_round_trips_exactly_through_strict_json(value):
    text = json.dumps(encode_json(value), allow_nan=False)
    assert same(decode_json(json.loads(text)), value)


def test_state_converts_numpy_and_names_what_it_cannot_keep(tmp_path):
    assert encode_json({"ap": np.float32(0.1), "n": np.int64(3), "t": (1, 2)}) == {
        "ap": float(np.float32(0.1)),
        "n": 3,
        "t": [1, 2],
    }
    with pytest.raises(TypeError, match=r"state\['meters'\]\[1\] is a Tensor"):
        save_checkpoint(tmp_path, 1, tensors={}, optimizer=None, state={"meters": [0, torch.ones(1)]}, keep=1)
    with pytest.raises(TypeError, match=r"state\['epochs'\] has keys other than strings"):
        save_checkpoint(tmp_path, 1, tensors={}, optimizer=None, state={"epochs": {1: 2}}, keep=1)
    assert steps(tmp_path) == []


@pytest.mark.parametrize("make", [lambda p: torch.optim.AdamW(p, amsgrad=True), lambda p: torch.optim.SGD(p, 0.1, 0.9)])
def test_training_goes_on_to_the_bit(tmp_path, make):
    def train(model, optimizer, first, last):
        for step in range(first, last):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        return model, make(model.parameters())

    model, optimizer = build()
    train(model, optimizer, 0, 3)
    tensors = {"model": model.state_dict()}
    path = save_checkpoint(tmp_path, 3, tensors=tensors, optimizer=optimizer.state_dict(), state={}, keep=1)
    train(model, optimizer, 3, 6)
    resumed, resumed_optimizer = build()
    loaded = load_checkpoint(path)
    resumed.load_state_dict(loaded.tensors["model"])
    resumed_optimizer.load_state_dict(loaded.optimizer)
    train(resumed, resumed_optimizer, 3, 6)
    for name, value in model.state_dict().items():
        assert resumed.state_dict()[name].equal(value), name


# ---------------------------------------------------------------- what is kept


def test_newest_best_and_latest_are_kept(tmp_path):
    save(tmp_path, 1, keep=2, best=True)
    for step in (2, 3, 4):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == ["step_000001", "step_000003", "step_000004"]
    assert os.readlink(tmp_path / "latest") == "step_000004" and os.readlink(tmp_path / "best") == "step_000001"
    mark_best(tmp_path / "step_000003")
    save(tmp_path, 1234567, keep=1)
    assert steps(tmp_path) == ["step_000003", "step_1234567"]
    assert linked(tmp_path, "best") == tmp_path / "step_000003"
    assert newest_valid(tmp_path)[0].step == 1234567


def test_checkpoints_of_every_so_many_steps_stay_beside_newest_best_and_latest(tmp_path):
    for step in range(0, 26, 2):
        save(tmp_path, step, keep=2, keep_every=10, best=step == 4)
    kept = ["step_000004", "step_000010", "step_000020", "step_000022", "step_000024"]
    assert steps(tmp_path) == kept, "step 0 has learned nothing: it goes like any other"
    assert linked(tmp_path, "best") == tmp_path / "step_000004" and linked(tmp_path, "latest").name == "step_000024"
    save(tmp_path, 26, keep=1, keep_every=4)
    assert steps(tmp_path) == ["step_000004", "step_000020", "step_000024", "step_000026"], "by the present setting"
    save(tmp_path, 28, keep=1)
    assert steps(tmp_path) == ["step_000004", "step_000028"]
    assert newest_valid(tmp_path)[0].step == 28


def test_newest_is_the_last_one_written_not_the_highest_step(tmp_path):
    """A run that went back to step 2 must not go on from the steps 3 and 4 it left behind."""
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    save(tmp_path, 3, value=30.0, keep=2)
    assert steps(tmp_path) == ["step_000003", "step_000004"]
    assert values(newest_valid(tmp_path)[0]) == {30.0}


def test_a_checkpoint_with_a_broken_manifest_takes_no_place_and_is_left_alone(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step_000003" / "MANIFEST.json").write_text("{")
    save(tmp_path, 4, keep=2)
    assert steps(tmp_path) == ["step_000002", "step_000003", "step_000004"]


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


@pytest.mark.parametrize("target", ["../step_000001", "/etc", "step_000009", ""])
def test_a_link_that_leads_elsewhere_is_none(tmp_path, target):
    save(tmp_path / "checkpoints", 1)
    (tmp_path / "checkpoints" / "best").write_text(target)
    assert linked(tmp_path / "checkpoints", "best") is None


# ---------------------------------------------------------------- broken ones


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit_manifest(folder: Path, edit) -> None:
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    edit(manifest)
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))


def rehash(folder: Path) -> None:
    """What somebody who plants a file would do."""

    def edit(manifest):
        for name in manifest["files"]:
            data = (folder / name).read_bytes()
            manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    edit_manifest(folder, edit)


BREAKAGES = {
    "truncated model": (lambda f: os.truncate(f / "model.safetensors", 40), "model.safetensors has 40 bytes"),
    "flipped bit": (lambda f: flip(f / "optimizer.pt"), "optimizer.pt is not what was written"),
    "missing file": (lambda f: (f / "state.json").unlink(), "state.json is missing"),
    "no manifest": (lambda f: (f / "MANIFEST.json").unlink(), "never finished"),
    "torn manifest": (lambda f: os.truncate(f / "MANIFEST.json", 50), "MANIFEST.json cannot be read"),
    "binary manifest": (lambda f: (f / "MANIFEST.json").write_bytes(b"\xff\xfe\x00"), "MANIFEST.json cannot be read"),
    "foreign manifest": (lambda f: (f / "MANIFEST.json").write_text("[]"), "not what this toolkit writes"),
    "newer format": (lambda f: edit_manifest(f, lambda m: m.update(format=99)), "(format 99; this one"),
    "planted file": (lambda f: (f / "model.pkl").write_bytes(b"x"), "model.pkl is not in the manifest"),
    "outside path": (
        lambda f: edit_manifest(f, lambda m: m["files"].update({"../../x.safetensors": {"size": 0, "sha256": ""}})),
        "no checkpoint holds",
    ),
    "state not JSON": (lambda f: ((f / "state.json").write_text("{"), rehash(f)), "state.json cannot be read"),
    "no tensors": (lambda f: ((f / "model.safetensors").write_bytes(b"\0" * 99), rehash(f)), "model.safetensors "),
    "no archive": (lambda f: ((f / "optimizer.pt").write_bytes(b"hello"), rehash(f)), "optimizer.pt "),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_checkpoint_is_refused_named_and_passed_over(tmp_path, name):
    breakage, message = BREAKAGES[name]
    save(tmp_path, 1)
    breakage(save(tmp_path, 2))
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        load_checkpoint(tmp_path / "step_000002")
    assert isinstance(caught.value, BadInput) and "step_000002" in str(caught.value)
    found, passed_over = newest_valid(tmp_path)
    assert found.step == 1 and values(found) == {1.0}
    assert len(passed_over) == 1 and "step_000002" in passed_over[0] and message in passed_over[0]


def test_all_faults_of_a_checkpoint_are_said_at_once(tmp_path):
    path = save(tmp_path, 1)
    flip(path / "model.safetensors")
    (path / "state.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert len(caught.value.problems) == 2


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
        rehash(path)
    with pytest.raises(CheckpointError, match="never run" if hide else "bytes|sha256"):
        load_checkpoint(path)
    assert newest_valid(tmp_path / "checkpoints")[0] is None
    assert not marker.exists()
    pickle.loads(pickle.dumps(Planted(marker)))  # noqa: S301  the plant is live
    assert marker.exists()


# ---------------------------------------------------------------- the state of a run


RUN_STATE = {
    "limit": "run.epochs",
    "step": 1, "categories": [{"id": 1, "name": "a"}], "total_steps": 9, "scaler": None, "guard": {}, "budget": None,
    "sampler": {"seed": 0, "epoch": 0, "offset": 4, "world_size": 1, "batch_size": 4, "num_samples": 8},
    "schedule": {}, "metric_for_best": "bbox_AP", "best": None, "best_step": -1, "evaluations_without_better": 0,
    "evaluated_step": -1, "meters": {}, "elapsed_s": 1.5, "writer": {"rows": 1}, "ema": {"updates": 1},
    "infinite": ["mask"], "accumulation": [1, 0], "recut": 0, "averages": {}, "epoch_s": 0.5, "epoch_steps": 1,
    "logged_epoch": -1,
    "frozen": [],
    "has_notes": False,
}  # fmt: skip


def save_run(folder: Path, step: int, state: dict | None = None, tensors: dict | None = None, optimizer=None) -> Path:
    weights = {"w": torch.ones(3), "mask": torch.tensor([0.0, -math.inf]), "count": torch.tensor(3)}
    tensors = {"model": weights, "ema": weights} if tensors is None else tensors
    if optimizer is None:
        optimizer = {"state": {0: {"m": torch.ones(3), "step": torch.tensor(1.0)}}, "param_groups": []}
    state = RUN_STATE | {"step": step} if state is None else state
    return save_checkpoint(folder, step, tensors=tensors, optimizer=optimizer, state=state, keep=9, kind="run")


def spoilt(kind: str, value: float) -> dict:
    """What `save_run` is given for a run with one number that is not finite."""
    weights = {"w": torch.ones(3), "mask": torch.tensor([0.0, -math.inf])}
    bad = {"w": torch.tensor([1.0, value, 1.0]), "mask": weights["mask"]}
    moments = {"state": {0: {"m": torch.tensor([1.0, value])}}, "param_groups": []}
    return {"model": {"tensors": {"model": bad, "ema": weights}}, "ema": {"tensors": {"model": weights, "ema": bad}},
            "optimizer": {"optimizer": moments}}[kind]  # fmt: skip


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["model", "ema", "optimizer"])
def test_what_is_not_finite_is_passed_over(tmp_path, kind, value):
    save_run(tmp_path, 1)
    save_run(tmp_path, 2, **spoilt(kind, value))
    found, passed_over = newest_valid(tmp_path)
    assert found.step == 1 and "step_000002: NaN or infinity in " + kind in passed_over[0]


def test_what_another_version_wrote_is_said_to_be_that(tmp_path):
    path = save_run(tmp_path, 1)
    edit_manifest(path, lambda manifest: manifest.update(format=1))
    with pytest.raises(CheckpointError, match=r"1 was written by another version .* \(format 1; this one reads 2"):
        load_checkpoint(path)
    assert newest_valid(tmp_path)[0] is None and "another version" in newest_valid(tmp_path)[1][0]
    edit_manifest(path, lambda manifest: (manifest.update(format=2), manifest.pop("kind")))
    with pytest.raises(CheckpointError, match="MANIFEST.json is not what this toolkit writes"):
        load_checkpoint(path)


NESTED = '{"a":' * 100_000 + "0" + "}" * 100_000
SENSELESS = {
    "state {}": lambda f: ((f / "state.json").write_text("{}"), rehash(f)),
    "state []": lambda f: ((f / "state.json").write_text("[]"), rehash(f)),
    "state nested": lambda f: ((f / "state.json").write_text(NESTED), rehash(f)),
    "manifest nested": lambda f: (f / "MANIFEST.json").write_text(NESTED),
    "state of another step": lambda f: ((f / "state.json").write_text(json.dumps(RUN_STATE | {"step": 7})), rehash(f)),
    "sampler": lambda f: ((f / "state.json").write_text(json.dumps(RUN_STATE | {"step": 2, "sampler": {}})), rehash(f)),
    "no optimizer": lambda f: (torch.save([], f / "optimizer.pt"), rehash(f)),
    "no weights": lambda f: (edit_manifest(f, lambda m: m["files"].pop("model.safetensors"))),
}


@pytest.mark.parametrize("name", SENSELESS)
def test_a_sealed_file_without_sense_is_passed_over(tmp_path, name):
    save_run(tmp_path / "checkpoints", 1)
    SENSELESS[name](save_run(tmp_path / "checkpoints", 2))
    found, messages = resolve_resume("latest", tmp_path)
    assert found.step == 1 and "Passed over" in messages[0] and "step_000002" in messages[0]


def test_none_valid_is_refused_with_what_is_wrong_with_each(tmp_path):
    for step in (1, 2):
        SENSELESS["state {}"](save_run(tmp_path / "checkpoints", step))
    with pytest.raises(CheckpointError) as caught:
        resolve_resume("latest", tmp_path)
    assert "None of the checkpoints" in str(caught.value) and str(caught.value).count("has no categories") == 2
    assert steps(tmp_path / "checkpoints")[-2:] == ["step_000001", "step_000002"]


def test_latest_is_mended_where_it_leads_nowhere_or_to_a_broken_one(tmp_path):
    for step in (1, 2):
        save_run(tmp_path, step)
    first = tmp_path / "step_000001"
    repair_latest(first)
    assert linked(tmp_path, "latest").name == "step_000002", "an earlier one was resumed: nothing is broken"
    flip(tmp_path / "step_000002" / "model.safetensors")
    repair_latest(first)
    assert linked(tmp_path, "latest") == first
    (tmp_path / "latest").unlink()
    repair_latest(first)
    assert linked(tmp_path, "latest") == first


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


# ---------------------------------------------------------------- --run.resume


def test_resume_values(tmp_path):
    run = tmp_path / "run"
    save(run / "checkpoints", 1, best=True)
    save(run / "checkpoints", 2)

    def resumed(value):
        return resolve_resume(str(value), run)

    assert resumed("never") == (None, [])
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


def test_resume_latest_without_checkpoint_starts_fresh_and_says_so(tmp_path):
    found, messages = resolve_resume("latest", tmp_path / "new")
    assert found is None and "starting fresh" in messages[-1]


# ---------------------------------------------------------------- disks that do not take it

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def still_whole(folder: Path, step: int) -> None:
    found, _ = newest_valid(folder)
    assert found.step == step and values(found) == {float(step)}
    assert linked(folder, "latest") == folder / f"step_{step:06d}"
    assert not list(folder.glob(".tmp-*"))


@needs_root
@pytest.mark.parametrize("large", ["tensors", "optimizer", "state"])
def test_full_disk(small_disk, large):
    save(small_disk, 1)
    big = torch.zeros(1_000_000)
    parts = {"tensors": {}, "optimizer": None, "state": {}} | {
        "tensors": {"tensors": {"model": {"w": big}}},
        "optimizer": {"optimizer": {"state": {0: {"m": big}}}},
        "state": {"state": {"text": "x" * 4_000_000}},
    }[large]
    with pytest.raises(CheckpointError, match=r"No space left on device.*about 4\.0 MB.*make room") as caught:
        save_checkpoint(small_disk, 2, **parts, keep=1)
    assert isinstance(caught.value, BadInput)
    still_whole(small_disk, 1)
    save(small_disk, 3)
    still_whole(small_disk, 3)


@needs_root
def test_read_only_folder(small_disk):
    save(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system.*Make the folder writable"):
        save(small_disk, 2)
    still_whole(small_disk, 1)


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


# ---------------------------------------------------------------- kill -9


def check_after_kill(folder: Path, possible: set[float]) -> float:
    """The newest checkpoint loads, is one that was being saved, and is of one piece; saving goes on."""
    found, _ = newest_valid(folder)
    assert found is not None and len(values(found)) == 1
    (value,) = values(found)
    assert value in possible
    save(folder, 99, keep=1)
    assert steps(folder) == ["step_000099"] and values(newest_valid(folder)[0]) == {99.0}
    return value


CALLS = {"open", "os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir", "shutil.rmtree"}


def kill_at_call(folder: Path, number: int) -> bool:
    """In a forked child: save twice, SIGKILL before its `number`-th change of the file system. True if it got there."""
    child = os.fork()
    if child == 0:
        count = 0

        def kill(event, arguments):
            nonlocal count
            if event in CALLS and (event in ("os.remove", "os.rmdir") or str(folder) in str(arguments[0])):
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        save(folder, 2, keep=1)  # a new step, after which step 1 is deleted
        save(folder, 2, value=20.0, keep=1)  # in the place of that one
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def every_call(folder: Path) -> None:
    number, seen = 0, set()
    while True:
        number += 1
        shutil.rmtree(folder, ignore_errors=True)
        save(folder, 1)
        killed = kill_at_call(folder, number)
        seen.add(check_after_kill(folder, {1.0, 2.0, 20.0}))
        if not killed:
            break
    print(f"killed before each of {number - 1} calls")
    assert number > 30 and seen == {1.0, 2.0, 20.0}


def any_moment(folder: Path, rounds: int) -> None:
    for moment in range(rounds):
        shutil.rmtree(folder, ignore_errors=True)
        save(folder, 0)
        child = os.fork()
        if child == 0:
            for step in range(1, 10_000):
                save(folder, step, keep=2)
            os._exit(0)
        deadline = time.perf_counter() + random.Random(moment).uniform(0.001, 0.05)
        while time.perf_counter() < deadline:
            pass
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        check_after_kill(folder, {float(step) for step in range(10_000)})


def test_kill_before_every_change_of_the_file_system_and_at_any_moment(tmp_path):
    """In a process of its own, which may fork: one thread, no test runner."""
    command = [sys.executable, __file__, str(tmp_path / "checkpoints")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "killed before each" in done.stdout


if __name__ == "__main__":
    torch.set_num_threads(1)
    # A killed process loses nothing that it wrote; flushes are for power cuts, and slow.
    os.fsync = lambda descriptor: None
    every_call(Path(sys.argv[1]))
    any_moment(Path(sys.argv[1]), rounds=10)
