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
from pathlib import Path

import numpy as np
import pytest
import torch
from audit import at_events
from hypothesis import example, given
from hypothesis import strategies as st
from processes import FORK_SERVER

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
from toolkit.run.checkpoint_content import FORMAT_VERSION, NEEDED_PARTS

resource = pytest.importorskip("resource", reason="mounts, kernel limits and users of POSIX: not on Windows")


def save(folder: Path, step: int, value: float | None = None, **options) -> Path:
    """A small checkpoint whose weights, optimizer and state all say `value`, so that a mixture shows."""
    value = float(step) if value is None else value
    optimizer = {"state": {0: {"m": torch.full((64,), value)}}, "param_groups": []}
    tensors = {"model": {"w": torch.full((64,), value)}}
    options = {"keep": 10, "optimizer": optimizer} | options
    return save_checkpoint(folder, step, tensors=tensors, state={"v": value}, **options)


def values(checkpoint) -> set[float]:
    optimizer = checkpoint.optimizer["state"][0]["m"].tolist()
    return {*checkpoint.tensors["model"]["w"].tolist(), *optimizer, checkpoint.state["v"]}


def newest(folder: Path):
    return newest_valid(folder)[0]


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.iterdir() if not path.is_symlink())


# ---- what is saved, and read back ------------------------------------------------------------------------------------


def test_every_dtype_and_layout_comes_back_exactly(tmp_path):
    base = torch.arange(24, dtype=torch.float32)
    tied = torch.randn(3, 4)
    tensors = {
        "int64": torch.tensor([2**62 + 1, -(2**53) - 1]),
        "uint8": torch.arange(256).to(torch.uint8),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "transposed": torch.randn(3, 5).T,
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "tied_a": tied,
        "tied_b": tied,
        "view_a": base[:12],
        "view_b": base[6:].view(3, 6),
        "nan": torch.tensor([math.nan, -0.0, math.inf]),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    tensors |= {str(dtype): torch.randn(5).to(dtype) for dtype in (torch.bfloat16, torch.half, torch.double)}
    extra = {"seen": 7, "critic": {"bias": base[:2]}}
    path = save_checkpoint(tmp_path, 1, tensors={"t": tensors}, extra=extra, optimizer=None, state={}, keep=1)
    loaded = load_checkpoint(path)
    assert loaded.optimizer is None
    assert loaded.extra["seen"] == 7
    assert loaded.extra["critic"]["bias"].equal(base[:2])
    assert loaded.tensors["t"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        back = loaded.tensors["t"][name]
        assert back.dtype == tensor.dtype, name
        assert back.shape == tensor.shape, name
        bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        assert back.reshape(-1).view(torch.uint8).equal(bits), name  # NaN too


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
    refused = {
        r"state\['meters'\]\[1\] is a Tensor": {"meters": [0, torch.ones(1)]},
        r"state\['epochs'\] has keys other than strings": {"epochs": {1: 2}},
    }
    for message, state in refused.items():
        with pytest.raises(TypeError, match=message):
            save_checkpoint(tmp_path, 1, tensors={}, optimizer=None, state=state, keep=1)
    assert steps(tmp_path) == []


# ---- which checkpoints stay, and which is the newest -----------------------------------------------------------------


def test_newest_best_and_those_of_every_so_many_steps_are_kept(tmp_path):
    for step in range(0, 26, 2):
        save(tmp_path, step, keep=2, keep_every=10, best=step == 4)
    assert steps(tmp_path) == [4, 10, 20, 22, 24], "step 0 has learned nothing: it goes like any other"
    assert os.readlink(tmp_path / "best") == "step_000004"
    assert os.readlink(tmp_path / "latest") == "step_000024"
    save(tmp_path, 26, keep=1, keep_every=4)
    assert steps(tmp_path) == [4, 20, 24, 26], "by the present setting"
    mark_best(tmp_path / "step_000020")
    save(tmp_path, 1234567, keep=1)
    assert steps(tmp_path) == [20, 1234567]
    assert linked(tmp_path, "best") == tmp_path / "step_000020"
    assert newest(tmp_path).step == 1234567


def test_a_better_outcome_lets_the_earlier_best_go(tmp_path):
    kept = {1: [1], 2: [1, 2], 3: [3]}
    for step, expected in kept.items():
        save(tmp_path, step, keep=1)
        replace_state(tmp_path, step, {"v": float(step), "metric": 0.5}, keep=1, best=step != 2)
        assert steps(tmp_path) == expected
    assert linked(tmp_path, "best") == linked(tmp_path, "latest") == tmp_path / "step_000003"
    assert newest(tmp_path).state["metric"] == 0.5


def test_newest_is_the_last_one_written_not_the_highest_step(tmp_path):
    """A run that went back to step 2 must not go on from the steps 3 and 4 it left behind."""
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    save(tmp_path, 3, value=30.0, keep=2)
    assert steps(tmp_path) == [3, 4]
    assert values(newest(tmp_path)) == {30.0}
    (tmp_path / "step_000004" / "MANIFEST.json").write_text("{")  # takes no place, and is left alone
    save(tmp_path, 5, keep=2)
    assert steps(tmp_path) == [3, 4, 5]


def test_a_replacement_cut_short_is_undone_by_the_next_save(tmp_path):
    save(tmp_path, 1).rename(tmp_path / "step_000001.replaced")
    assert values(newest(tmp_path)) == {1.0}
    save(tmp_path, 2)
    assert steps(tmp_path) == [1, 2]
    shutil.copytree(tmp_path / "step_000001", tmp_path / "step_000002.replaced")  # killed after the second rename
    save(tmp_path, 3)
    assert steps(tmp_path) == [1, 2, 3]
    assert values(load_checkpoint(tmp_path / "step_000002")) == {2.0}


def test_links_are_text_files_where_links_are_not_possible(tmp_path, monkeypatch):
    def refuse(self, target):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    save(tmp_path, 1, best=True)
    save(tmp_path, 2)
    assert not (tmp_path / "latest").is_symlink()
    assert (tmp_path / "latest").read_text() == "step_000002\n"
    assert linked(tmp_path, "best") == tmp_path / "step_000001"
    assert resolve_resume(str(tmp_path / "best"), tmp_path)[0].step == 1
    for elsewhere in ("../step_000001", "/etc", "step_000009", ""):
        (tmp_path / "best").write_text(elsewhere)
        assert linked(tmp_path, "best") is None


def test_latest_is_mended_where_it_leads_nowhere_or_to_a_broken_one(tmp_path):
    first = save_run(tmp_path, 1)
    second = save_run(tmp_path, 2)
    repair_latest(first)
    assert linked(tmp_path, "latest") == second, "an earlier one was resumed: nothing is broken"
    flip(second, "model.safetensors")
    repair_latest(first)
    assert linked(tmp_path, "latest") == first
    (tmp_path / "latest").unlink()
    repair_latest(first)
    assert linked(tmp_path, "latest") == first
    third = save(tmp_path, 3)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to(first.name)  # killed between the checkpoint and its link
    repair_latest(third)
    assert linked(tmp_path, "latest") == third


# ---- files that are broken or planted --------------------------------------------------------------------------------

PARTS = {name: {} for name in NEEDED_PARTS} | {"weight_facts": {"infinite": ["mask"]}, "ema": {"updates made": 1}}
RUN_STATE = {"step": 1, "parts": PARTS}


def save_run(folder: Path, step: int, **replaced) -> Path:
    weights = {"w": torch.ones(3), "mask": torch.tensor([0.0, -math.inf]), "count": torch.tensor(3)}
    content = {
        "tensors": {"model": weights, "ema": weights},
        "optimizer": {"state": {0: {"m": torch.ones(3), "step": torch.tensor(1.0)}}, "param_groups": []},
        "state": RUN_STATE | {"step": step},
    }
    return save_checkpoint(folder, step, **content | replaced, keep=9, kind="run")


def truncate(folder: Path, name: str, size: int) -> None:
    os.truncate(folder / name, size)


def flip(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)


def remove(folder: Path, name: str) -> None:
    (folder / name).unlink()


def write(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)


def plant(folder: Path, name: str, content: bytes) -> None:
    """Write a file with its hash, as somebody would who wants it to be used."""
    write(folder, name, content)
    seal(folder)


def seal(folder: Path) -> None:
    files = {}
    for path in folder.iterdir():
        if path.name != "MANIFEST.json":
            files[path.name] = {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    edit_manifest(folder, "files", files)


def take_out(folder: Path, name: str) -> None:
    remove(folder, name)
    seal(folder)


def plant_state(folder: Path, key: str, value) -> None:
    plant(folder, "state.json", json.dumps(RUN_STATE | {"step": 2, key: value}).encode())


def edit_manifest(folder: Path, *key_and_value) -> None:
    """Set a key of the manifest, or remove it if no value is given."""
    key, *value = key_and_value
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    manifest.pop(key)
    manifest.update({key: value[0]} if value else {})
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))


def pickled_list() -> bytes:
    file = io.BytesIO()
    torch.save([], file)
    return file.getvalue()


NESTED = b'{"a":' * 100_000 + b"0" + b"}" * 100_000
OUTSIDE = {"../../x.safetensors": {"size": 0, "sha256": ""}}
UNREAD_MANIFEST = "MANIFEST.json cannot be read"
ODD_MANIFEST = "MANIFEST.json is not what this"
NO_PARTS = "state.json does not have the state of the parts"
# What is done to a checkpoint, with which arguments, and what is said of it.
BREAKAGES = (
    (truncate, ("model.safetensors", 40), "model.safetensors has 40 bytes"),
    (flip, ("optimizer.pt",), "optimizer.pt is not what was written"),
    (remove, ("state.json",), "state.json is missing"),
    (remove, ("MANIFEST.json",), "never finished"),
    (truncate, ("MANIFEST.json", 50), UNREAD_MANIFEST),
    (write, ("MANIFEST.json", b"\xff\xfe\x00"), UNREAD_MANIFEST),
    (write, ("MANIFEST.json", NESTED), UNREAD_MANIFEST),
    (write, ("MANIFEST.json", b"[]"), ODD_MANIFEST),
    (write, ("model.pkl", b"x"), "model.pkl is not in the manifest"),
    (edit_manifest, ("kind", None), ODD_MANIFEST),
    (edit_manifest, ("kind", "walk"), ODD_MANIFEST),
    (edit_manifest, ("step", True), ODD_MANIFEST),
    (edit_manifest, ("step", -2), ODD_MANIFEST),
    (edit_manifest, ("files", {"state.json": {"size": 2}}), ODD_MANIFEST),
    (edit_manifest, ("files", OUTSIDE), "no checkpoint holds"),
    (edit_manifest, ("files", {}), "the manifest does not list state.json"),
    (edit_manifest, ("format", 1), f"another version of this toolkit (format 1; this one reads {FORMAT_VERSION})"),
    (edit_manifest, ("format",), "another version of this toolkit (it states no format; this"),
    (plant, ("state.json", b"{"), "state.json cannot be read"),
    (plant, ("state.json", NESTED), "state.json cannot be read"),
    (plant, ("state.json", b"{}"), NO_PARTS),
    (plant, ("state.json", b"[]"), NO_PARTS),
    (plant, ("model.safetensors", b"\0" * 99), "model.safetensors "),
    (plant, ("optimizer.pt", b"hello"), "optimizer.pt "),
    (plant, ("optimizer.pt", pickled_list()), "its part optimizer cannot be used"),
    (plant_state, ("parts", PARTS | {"guard": 1}), NO_PARTS),
    (plant_state, ("parts", {"data": {}}), "lacks the state of weight_facts, sampler, "),
    (plant_state, ("parts", PARTS | {"weight_facts": {}}), "its part weight_facts cannot be used (Key"),
    (plant_state, ("step", 7), "state.json is of step 7"),
    (take_out, ("optimizer.pt",), "the state of the optimizer is missing"),
    (take_out, ("model.safetensors",), "there are no weights"),
    (take_out, ("ema.safetensors",), "there are no averaged weights"),
)


@pytest.mark.parametrize(("damage", "arguments", "message"), BREAKAGES)
def test_a_broken_checkpoint_is_refused_named_and_passed_over(tmp_path, damage, arguments, message):
    save_run(tmp_path, 1)
    damage(save_run(tmp_path, 2), *arguments)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        load_checkpoint(tmp_path / "step_000002")
    assert isinstance(caught.value, BadInput)
    assert "step_000002" in str(caught.value)
    found, (passed_over,) = newest_valid(tmp_path)
    assert found.step == 1
    assert "step_000002" in passed_over
    assert message in passed_over


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_passed_over(tmp_path, value):
    """Infinities of a tensor that is meant to have them, such as a mask, are not among it."""
    mask = torch.tensor([0.0, -math.inf])
    good = {"w": torch.tensor([1.0, 1.0]), "mask": mask}
    bad = {"w": torch.tensor([1.0, value]), "mask": mask}
    moments = {"state": {0: {"m": torch.tensor([1.0, value])}}, "param_groups": []}
    save_run(tmp_path, 1)
    save_run(tmp_path, 2, tensors={"model": bad, "ema": good})
    save_run(tmp_path, 3, tensors={"model": good, "ema": bad})
    save_run(tmp_path, 4, optimizer=moments)
    found, passed_over = newest_valid(tmp_path)
    assert found.step == 1
    for reason, step, name in zip(passed_over, (4, 3, 2), ("optimizer/0/m", "ema/w", "model/w"), strict=True):
        assert f"step_00000{step}: NaN or infinity in {name}" in reason


class Planted:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return (os.system, (f"touch {self.marker}",))


@pytest.mark.parametrize("kind", ["torch", "torch legacy", "bare pickle"])
@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_planted_pickle_is_refused_and_never_run(tmp_path, kind, is_sealed, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # not even when somebody asks for it
    path = save(tmp_path / "checkpoints", 1)
    marker = tmp_path / "ran"
    if kind == "bare pickle":
        write(path, "optimizer.pt", pickle.dumps(Planted(marker)))
    else:
        torch.save(Planted(marker), path / "optimizer.pt", _use_new_zipfile_serialization=kind == "torch")
    if is_sealed:
        seal(path)
    with pytest.raises(CheckpointError, match="never run" if is_sealed else "bytes|sha256"):
        load_checkpoint(path)
    assert newest(tmp_path / "checkpoints") is None
    assert not marker.exists()
    pickle.loads(pickle.dumps(Planted(marker)))  # noqa: S301  the plant is live
    assert marker.exists()


def test_a_checkpoint_rewritten_while_it_is_read_is_read_again(tmp_path, monkeypatch):
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
    flip(path, "model.safetensors")
    with pytest.raises(CheckpointError, match="sha256 differs"):
        load_checkpoint(path)
    assert len(reads) == 3, "of one that is damaged there is no second version"


# ---- what is resumed -------------------------------------------------------------------------------------------------


def test_resume_takes_a_word_a_run_or_a_checkpoint(tmp_path):
    run = tmp_path / "run"
    save(run / "checkpoints", 1, best=True)
    save(run / "checkpoints", 2)
    assert resolve_resume("never", run) == (None, [])
    expected = {
        "latest": 2,
        run: 2,
        run / "checkpoints": 2,
        run / "checkpoints" / "step_000001": 1,
        run / "checkpoints" / "best": 1,
        run / "best": 1,
    }
    for value, step in expected.items():
        found, messages = resolve_resume(str(value), run)
        assert found.step == step
        assert f"step {step}" in messages[-1]
    for value in ("nowhere", tmp_path, run / "checkpoints" / "step_000009", tmp_path / "latest"):
        with pytest.raises(BadInput, match=str(value)):
            resolve_resume(str(value), run)
    truncate(run / "checkpoints" / "step_000002", "model.safetensors", 9)
    found, messages = resolve_resume("latest", run)
    assert found.step == 1
    assert "Passed over" in messages[0]
    assert "step_000002" in messages[0]
    with pytest.raises(BadInput, match="truncated"):  # named by the user: nothing else is taken instead
        resolve_resume(str(run / "checkpoints" / "step_000002"), run)


def test_latest_of_a_run_without_checkpoints_starts_fresh(tmp_path):
    (tmp_path / "checkpoints" / "notes").mkdir(parents=True)
    found, messages = resolve_resume("latest", tmp_path)
    assert found is None
    assert "starting fresh" in messages[-1]


def test_a_checkpoint_that_is_not_of_a_run_cannot_be_resumed(tmp_path):
    save(tmp_path / "checkpoints", 1)
    assert resolve_resume("latest", tmp_path)[0].step == 1
    with pytest.raises(CheckpointError, match="of kind state; expected run"):
        resolve_resume("latest", tmp_path, of_run=True)


def test_none_valid_is_refused_with_all_that_is_wrong_with_each(tmp_path):
    for step in (1, 2):
        plant(save_run(tmp_path / "checkpoints", step), "state.json", b"{}")
    with pytest.raises(CheckpointError) as caught:
        resolve_resume("latest", tmp_path)
    assert "None of the checkpoints" in str(caught.value)
    assert str(caught.value).count("does not have the state") == 2
    last = tmp_path / "checkpoints" / "step_000002"
    flip(last, "model.safetensors")
    remove(last, "state.json")
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(last)
    assert len(caught.value.problems) == 2


# ---- disks and kills -------------------------------------------------------------------------------------------------


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """The names of what was flushed to the disk, and "to NAME" of what was renamed, in order."""
    noted = []
    fsync = os.fsync
    rename = Path.rename
    replace = os.replace

    def note_fsync(descriptor):
        noted.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def note_rename(path, target):
        noted.append(f"to {target.name}")
        rename(path, target)

    def note_replace(path, target):
        noted.append(f"to {Path(target).name}")
        replace(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    monkeypatch.setattr(os, "replace", note_replace)
    return noted


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, events):
    """A power cut after the rename finds every byte of the files, the manifest, and the names."""
    save_run(tmp_path, 1)
    files = ["ema.safetensors", "model.safetensors", "optimizer.pt", "state.json", "MANIFEST.json", ".tmp-step_000001"]
    assert events == [*files, "to step_000001", tmp_path.name, "to latest", tmp_path.name]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EMLINK])
def test_without_hard_links_the_files_are_copied_to_the_disk(tmp_path, monkeypatch, events, number):
    def refuse(source, target):
        raise OSError(number, "no links here")

    save(tmp_path, 1)
    events.clear()
    monkeypatch.setattr(os, "link", refuse)
    replace_state(tmp_path, 1, {"v": 1.0}, keep=1)
    before = events[: events.index("MANIFEST.json")]
    assert {"model.safetensors", "optimizer.pt", "state.json"} <= set(before)
    assert values(newest(tmp_path)) == {1.0}


def assert_whole(folder: Path, step: int) -> None:
    found = newest(folder)
    assert found.step == step
    assert values(found) == {float(step)}
    assert linked(folder, "latest") == folder / f"step_{step:06d}"
    assert not list(folder.glob(".tmp-*"))


def test_a_full_disk_and_a_read_only_one(mount, tmp_path):
    small_disk = mount(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m", "none")
    save(small_disk, 1)
    for weights, moments in ((900_000, 100_000), (100_000, 900_000)):  # each is written by a library of its own
        tensors = {"model": {"w": torch.zeros(weights)}}
        optimizer = {"state": {0: {"m": torch.zeros(moments)}}}
        with pytest.raises(CheckpointError, match=r"No space left on device.*about 4\.0 MB.*make room"):
            save_checkpoint(small_disk, 2, tensors=tensors, optimizer=optimizer, state={}, keep=1)
        assert_whole(small_disk, 1)
    save(small_disk, 3)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system.*Make the folder writable"):
        save(small_disk, 4)
    assert_whole(small_disk, 3)


def test_a_limit_on_the_size_of_files(tmp_path):
    """A quota of the kind every user can set on himself; needs no rights."""
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large.*about 0.4 MB"):
            save_checkpoint(tmp_path, 2, tensors={"m": {"w": torch.zeros(100_000)}}, optimizer=None, state={}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_whole(tmp_path, 1)


def save_until_killed(folder: Path, number: int) -> bool:
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


def value_after_kill(folder: Path) -> float:
    """The newest checkpoint loads and is of one piece; saving goes on."""
    (value,) = values(newest(folder))
    save(folder, 99, keep=1)
    best = linked(folder, "best")
    kept = [99] if best is None else [2, 99]
    assert steps(folder) == kept
    assert best is None or load_checkpoint(best).state["metric"] == 0.5, "it contains its own metric"
    assert values(newest(folder)) == {99.0}
    return value


def kill_at_every_write(folder: Path, answers) -> None:
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # a killed process loses nothing that it wrote; flushes are for power cuts
    seen = set()
    for number in itertools.count(1):
        shutil.rmtree(folder, ignore_errors=True)
        save(folder, 1)
        is_killed = save_until_killed(folder, number)
        seen.add(value_after_kill(folder))
        if not is_killed:
            answers.send((number - 1, seen))
            return


def test_kill_before_every_change_of_the_file_system(tmp_path):
    """In a process of its own, which may fork: one thread, no test runner."""
    ours, theirs = FORK_SERVER.Pipe(duplex=False)
    process = FORK_SERVER.Process(target=kill_at_every_write, args=(tmp_path / "checkpoints", theirs))
    process.start()
    theirs.close()
    kills, seen = ours.recv()
    process.join()
    assert kills > 44
    assert seen == {1.0, 2.0, 20.0}
