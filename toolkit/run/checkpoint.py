"""Checkpoints: written atomically, verified by hash before use, never unpickled.

    <run>/checkpoints/step_000123/  model.safetensors  ema.safetensors ...  one file per state dict of tensors
                                    optimizer.pt, extra.pt (a script's own)  torch.save, read with weights_only=True
                                    state.json         everything else, floats to the last bit, NaN and infinity too
                                    MANIFEST.json      format, kind, step, sequence, size and sha256 of every file
    <run>/checkpoints/{latest,best} relative links to a step folder (one-line text files where links are not possible)

A checkpoint is written to a temporary folder, with the manifest last, flushed to the disk, and renamed. The newest
checkpoint is the one with the largest `sequence` in its manifest, not the one with the largest step: a run that went
back to an older checkpoint leaves checkpoints of higher steps behind.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from toolkit.base.errors import BadInput
from toolkit.base.files import decode_json, encode_json, fsync_folder
from toolkit.run.checkpoint_content import (
    EXTRA_FILE,
    FORMAT_VERSION,
    MANIFEST_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    changed_files,
    joined_by_part,
    lacking_in_run,
    nonfinite_tensors,
    stale,
    well_formed,
)

# `.replaced` exists only between the two renames that put a new checkpoint in the place of one of the same step.
_STEP_FOLDER = re.compile(r"step_(\d{6,})(\.replaced)?")


class CheckpointError(BadInput):
    """A checkpoint cannot be written or used. The message names the file, the reason, and the remedy."""


@dataclass
class Checkpoint:
    """A checkpoint that was read back: the arguments of `save_checkpoint`, with tensors on the CPU.

    A checkpoint of kind "run" holds the state of every part of the run (`toolkit.run.parts`).
    """

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    optimizer: dict | None
    state: dict = field(default_factory=dict)
    extra: dict = field(default_factory=dict)
    kind: str = "run"

    def by_part(self) -> dict[str, dict]:
        """Return the state of every part of the run by its name."""
        return joined_by_part(self.tensors, self.optimizer, self.state, self.extra)

    def of_part(self, name: str) -> dict:
        """Return the JSON values in the state of the part `name`, without its tensors; empty if it has none."""
        return self.state["parts"].get(name, {})

    @contextmanager
    def reading(self, part: str) -> Iterator[dict]:
        """Yield `of_part(part)`, for a `with` block that reads the state of this part and does nothing else.

        Raises:
            CheckpointError: the block failed, so the state is not what this toolkit writes. The message names the
                checkpoint and the part.
        """
        try:
            yield self.of_part(part)
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {_first_line(error)}"
            raise CheckpointError(
                f"Checkpoint {self.path}: the state of its part {part} cannot be used ({reason}). Use an earlier "
                "checkpoint."
            ) from error

    @property
    def categories(self) -> list[dict]:
        """The classes that the weights were trained for, as JSON values: a dict with `id` and `name` for each."""
        with self.reading("data") as data:
            return [{key: category[key] for key in ("id", "name")} for category in data["categories"]]


# ---------------------------------------------------------------- write


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    tensors: Mapping[str, Mapping[str, Tensor]],
    optimizer: dict | None,
    state: dict,
    keep: int,
    best: bool = False,
    keep_every: int = 0,
    kind: str = "state",
    extra: Mapping | None = None,
) -> Path:
    """Write the checkpoint `folder/step_<step>`, point the link `latest` at it, delete checkpoints no longer kept, and
    return the path of the new one.

    Only one process may call it. A checkpoint of the same step is replaced. Even if the process is killed at any
    moment, the newest checkpoint that has a final name is complete.

    Args:
        folder: the run's `checkpoints` folder, made when missing.
        step: optimizer steps done.
        tensors: file stem ("model", "ema", ...) -> state dict. Any dtype, device and stride; tied tensors are stored
            under each name. Only tied, strided and GPU tensors are copied in memory before they are written.
        optimizer: `optimizer.state_dict()`, or None.
        state: JSON values with string keys. Floats are read back bit-identical, also NaN and infinity; tuples are read
            back as lists.
        keep: number of newest checkpoints to keep (at least 1), in addition to those of `best` and `latest`.
        best: whether this checkpoint is the best so far; the link `best` then points at it.
        keep_every: checkpoints of step keep_every, 2 * keep_every, ... are never deleted; 0: there are none of these.
        extra: further state, which `torch.load(weights_only=True)` must be able to read back.
        kind: "run" for a checkpoint with everything that a run needs to go on, which is checked when it is loaded;
            "state" for any other.

    Raises:
        CheckpointError: space or the permission to write is missing, ...; the earlier checkpoints are untouched.
        TypeError: `state` holds a value that is not JSON; the message says where.
    """
    folder = Path(folder)
    text = json.dumps(encode_json(state, "state"), indent=1, allow_nan=False)  # fails before anything is touched
    needed = _bytes_needed(tensors, optimizer) + len(text)
    temp = folder / f".tmp-step_{step:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clean(folder)
        temp.mkdir()
        _write_tensors(temp, tensors, {OPTIMIZER_FILE: optimizer, EXTRA_FILE: extra or None})
        path = _complete(temp, folder, step, kind, text, best)
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        shutil.rmtree(temp, ignore_errors=True)
        number = _os_errno(error)
        if number is None:
            raise
        raise CheckpointError(_cannot_write(folder, number, needed)) from error
    _prune(folder, max(keep, 1), keep_every)
    return path


def _write_tensors(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], saved: Mapping[str, Any]) -> None:
    """Write the state dicts `tensors` by file stem, and what is not None of `saved` by file name."""
    for stem, named in tensors.items():
        safetensors.torch.save_file(_storable(named), folder / f"{stem}.safetensors")
    for name, content in saved.items():
        if content is not None:
            with open(folder / name, "wb") as file:
                torch.save(content, file)


def replace_state(folder: Path, step: int, state: dict, *, keep: int, best: bool = False, keep_every: int = 0) -> Path:
    """Replace `state.json` of the checkpoint `folder/step_<step>`, keep its other files, and return its path.

    This adds the outcome of an evaluation, which is known only after the checkpoint was written. Even if the process is
    killed at any moment, the checkpoint is complete, with either the earlier or the new state.

    Args:
        state, keep, keep_every: see `save_checkpoint`.
        best: whether the checkpoint is the best so far; the previous best one is deleted if nothing else keeps it.

    Raises:
        CheckpointError: the checkpoint does not exist, or space or the permission to write is missing, ...
        TypeError: `state` holds a value that is not JSON; the message says where.
    """
    folder = Path(folder)
    path = folder / f"step_{step:06d}"
    text = json.dumps(encode_json(state, "state"), indent=1, allow_nan=False)  # fails before anything is touched
    manifest = _read_manifest(path)
    temp = folder / f".tmp-step_{step:06d}"
    try:
        _clean(folder)
        temp.mkdir()
        for name in manifest["files"].keys() - {STATE_FILE}:
            _link(path / name, temp / name)
        unchanged = {name: entry for name, entry in manifest["files"].items() if name != STATE_FILE}
        _complete(temp, folder, step, manifest["kind"], text, best, known=unchanged)
    except OSError as error:
        shutil.rmtree(temp, ignore_errors=True)
        raise CheckpointError(_cannot_write(folder, error.errno or errno.EIO, len(text))) from error
    _prune(folder, max(keep, 1), keep_every)
    return path


def _complete(
    temp: Path,
    folder: Path,
    step: int,
    kind: str,
    state_text: str,
    best: bool,
    known: Mapping[str, dict] = MappingProxyType({}),
) -> Path:
    """Add state and manifest to the checkpoint in the folder `temp`, rename the folder, and point `latest` at it.

    known: see `_seal`. Raises OSError if a file cannot be written.
    """
    (temp / STATE_FILE).write_text(state_text, encoding="utf-8")
    sequence = 1 + max(_by_age(folder)[0].values(), default=0)
    _seal(temp, {"kind": kind, "step": step, "sequence": sequence}, known)
    path = _put_in_place(temp, folder / f"step_{step:06d}")
    _replace_link(folder / "latest", path)
    if best:
        mark_best(path)
    return path


def _link(source: Path, target: Path) -> None:
    """Make `target` another name of the file `source`, or a copy on the disk where there are no hard links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        shutil.copyfile(source, target)
        with open(target, "rb+") as file:
            os.fsync(file.fileno())


def mark_best(path: Path) -> None:
    """Point the link `best` in the folder of the checkpoint `path` at that checkpoint.

    Raises OSError if the link cannot be written.
    """
    _replace_link(Path(path).parent / "best", Path(path))


def repair_latest(resumed: Path) -> None:
    """Point the link `latest` in the folder of the checkpoint `resumed` at that checkpoint, if the link is missing,
    broken, or leads to an older checkpoint.

    That happens if the process is killed after a checkpoint was written and before the link was.

    Raises:
        CheckpointError: the link cannot be written.
    """
    resumed = Path(resumed).resolve()
    target = linked(resumed.parent, "latest")
    sequence_of = _by_age(resumed.parent)[0]
    try:
        is_older = sequence_of.get(target, 0) < sequence_of[resumed]
        if target != resumed and (target is None or is_older or not _is_valid(target)):
            _replace_link(resumed.parent / "latest", resumed)
    except OSError as error:
        raise CheckpointError(_cannot_write(resumed.parent, error.errno or errno.EIO, 0)) from error


def _is_valid(path: Path) -> bool:
    try:
        load_checkpoint(path)
    except CheckpointError:
        return False
    return True


def bring_best(resumed: Path, best_step: int, folder: Path) -> bool:
    """Point the link `best` in `folder` at the best checkpoint of a run that resumes from the checkpoint `resumed`.

    The link may be missing or wrong because the process was killed before the link was written, or because an earlier
    checkpoint was resumed. If `resumed` is of another run, the best checkpoint of that run is copied to `folder`.

    Args:
        best_step: step of the best checkpoint.
        folder: the folder `checkpoints` of this run.

    Returns:
        Whether the best checkpoint exists and is valid.

    Raises:
        CheckpointError: the copy, or the link, cannot be written.
    """
    best = folder / f"step_{best_step:06d}"
    source = resumed.resolve().with_name(f"step_{best_step:06d}")
    temp = folder / f".tmp-{best.name}"
    try:
        if source.parent != folder.resolve():
            if best.exists() or not _is_valid(source):
                return False
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, temp, dirs_exist_ok=True)
            temp.rename(best)
        if best != resumed.resolve() and not _is_valid(best):
            return False
        if linked(folder, "best") != best:
            mark_best(best)
    except OSError as error:
        shutil.rmtree(temp, ignore_errors=True)
        number = error.errno or errno.EIO  # copytree's own error, which holds those of the files, has none
        raise CheckpointError(_cannot_write(folder, number, 0)) from error
    return True


def _storable(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous CPU tensors that share no memory, as safetensors requires."""
    seen = set()
    storable = {}
    for name, tensor in named.items():
        tensor = tensor.detach().to("cpu").contiguous()
        memory = tensor.untyped_storage().data_ptr()
        if tensor.numel() and memory in seen:
            tensor = tensor.clone()
        seen.add(memory)
        storable[name] = tensor
    return storable


def _seal(temp: Path, about: dict, known: Mapping[str, dict] = MappingProxyType({})) -> None:
    """Flush every file to the disk, then write the manifest, flush it and the folder.

    known: entries of the manifest of files that lie on the disk already, of an earlier checkpoint.
    """
    files = dict(known)
    for path in sorted(path for path in temp.iterdir() if path.name not in known):
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
            files[path.name] = {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    manifest = {"format": FORMAT_VERSION, **about, "files": files}
    with open(temp / MANIFEST_FILE, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    fsync_folder(temp)


def _put_in_place(temp: Path, path: Path) -> Path:
    """Rename the folder `temp` to `path`; an earlier checkpoint at `path` is renamed first and deleted at the end."""
    aside = path.with_name(path.name + ".replaced")
    if path.exists():
        path.rename(aside)
    temp.rename(path)
    fsync_folder(path.parent)
    if aside.exists():
        shutil.rmtree(aside)
    return path


def _replace_link(link: Path, target: Path) -> None:
    """Replace `link` atomically by a relative link to its neighbour `target`, or by a text file that names it."""
    temp = link.with_name(f".tmp-{link.name}")
    temp.unlink(missing_ok=True)
    try:
        temp.symlink_to(target.name)
    except (OSError, NotImplementedError) as error:
        if _os_errno(error) in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        temp.write_text(target.name + "\n", encoding="utf-8")
    os.replace(temp, link)
    fsync_folder(link.parent)


def _clean(folder: Path) -> None:
    """Remove what killed processes left behind while saving, and finish or undo an interrupted replacement."""
    for path in folder.glob(".tmp-*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for aside in folder.glob("step_*.replaced"):
        original = aside.with_name(aside.name.removesuffix(".replaced"))
        if original.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(original)


def _prune(folder: Path, keep: int, keep_every: int) -> None:
    """Delete all but the newest `keep`, `best`, `latest` and, beyond step 0, those of every `keep_every` steps.

    What has no readable manifest is left for a person.
    """
    kept = {linked(folder, "best"), linked(folder, "latest")}
    for path in list(_by_age(folder)[0])[keep:]:
        step = int(_STEP_FOLDER.fullmatch(path.name)[1])
        if path not in kept and not (keep_every and step and step % keep_every == 0):
            # Renamed first: a deletion cut short must not leave half a checkpoint under a checkpoint's name.
            doomed = path.with_name(f".tmp-deleted-{path.name}")
            try:
                path.rename(doomed)
            except OSError:
                continue  # the new checkpoint stands; one too many does no harm
            shutil.rmtree(doomed, ignore_errors=True)


# ---------------------------------------------------------------- read


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint after checking every file against its manifest.

    path: a `step_*` folder or a link to one.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete, changed, or of another format; or, of kind "run", it
            lacks state or is not finite; or it holds a pickle or Python objects, which are never unpickled.
    """
    path = Path(path).resolve() if Path(path).is_symlink() else Path(path)
    manifest = _read_manifest(path)
    try:
        return _read_checkpoint(path, manifest)
    except CheckpointError:
        # A run that is training may have written the outcome of an evaluation into it meanwhile.
        now = _read_manifest(path)
        if now == manifest:
            raise
    return _read_checkpoint(path, now)


def _read_checkpoint(path: Path, manifest: dict) -> Checkpoint:
    problems = changed_files(path, manifest)
    if problems:
        raise CheckpointError([f"Checkpoint {path}: {problem}" for problem in problems])
    tensors = {}
    pickled = {}
    state = {}
    name = MANIFEST_FILE
    try:
        for name in manifest["files"]:
            if name.endswith(".safetensors"):
                tensors[name.removesuffix(".safetensors")] = safetensors.torch.load_file(path / name)
            elif name in (OPTIMIZER_FILE, EXTRA_FILE):
                pickled[name] = torch.load(path / name, map_location="cpu", weights_only=True)
            else:
                state = decode_json(json.loads((path / name).read_text(encoding="utf-8")))
    # What a foreign file makes these readers raise is not a closed list: torch alone lets out five kinds.
    except Exception as error:  # noqa: BLE001
        unsafe = "Weights only load failed" in str(error)
        reason = "holds Python objects, which are never run" if unsafe else "cannot be read"
        raise CheckpointError(f"Checkpoint {path}: {name} {reason} ({_first_line(error)}).") from error
    optimizer = pickled.get(OPTIMIZER_FILE)
    extra = pickled.get(EXTRA_FILE, {})
    if not isinstance(extra, dict):
        raise CheckpointError(f"Checkpoint {path}: {EXTRA_FILE} holds a {type(extra).__name__}; expected a mapping.")
    checkpoint = Checkpoint(path, manifest["step"], tensors, optimizer, state, extra, manifest["kind"])
    faults = _faults_of_run(checkpoint) if checkpoint.kind == "run" else []
    if faults:
        raise CheckpointError([f"Checkpoint {path}: {fault}." for fault in faults])
    return checkpoint


def _faults_of_run(checkpoint: Checkpoint) -> list[str]:
    """Return a phrase for everything that prevents a run from resuming from a checkpoint: what it lacks, or else the
    tensors that are not finite. Infinities in tensors that it lists as infinite by design are not reported.

    Raises CheckpointError if the optimizer's state, or the list of these tensors, cannot be read.
    """
    lacking = lacking_in_run(checkpoint.step, checkpoint.tensors, checkpoint.optimizer, checkpoint.state)
    if lacking:
        return lacking
    with checkpoint.reading("weight_facts") as facts:
        infinite = set(facts["infinite"])
    with checkpoint.reading("optimizer"):
        return nonfinite_tensors(checkpoint.tensors, checkpoint.optimizer, infinite)


def newest_valid(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest valid checkpoint of a `checkpoints` folder, or None, and a sentence for each invalid one that
    was skipped.
    """
    paths, passed_over = _by_age(Path(folder))
    for path in paths:
        try:
            return load_checkpoint(path), passed_over
        except CheckpointError as error:
            passed_over.append(str(error))
    return None, passed_over


def linked(folder: Path, name: str) -> Path | None:
    """Return the step folder that the link `name` ("latest" or "best") in `folder` points at.

    Returns None if the link does not exist, or leads to anything but an existing step folder in `folder`.
    """
    link = Path(folder) / name
    try:
        target = os.readlink(link) if link.is_symlink() else link.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    # Only a neighbour: a link that leads elsewhere was not made here.
    return Path(folder) / target if _STEP_FOLDER.fullmatch(target) and (Path(folder) / target).is_dir() else None


def resolve_resume(value: str, run_folder: Path, of_run: bool = False) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint that `--run.resume` refers to, or None for a fresh start, and messages for the user.

    Args:
        value: "never" (a fresh start); "latest" (the newest valid checkpoint of `run_folder`, or a fresh start if
            a checkpoint does not exist); or the path of a checkpoint, of a `latest` or `best` link, or of a run folder,
            whose newest valid checkpoint is meant.
        run_folder: this run's folder.
        of_run: accept only checkpoints of kind "run", see `save_checkpoint`.

    Raises:
        CheckpointError: the path does not exist, is not a checkpoint or not a valid one, or is not of kind "run" with
            `of_run`; or, with "latest", there are checkpoints and none is valid.
    """
    if value == "never":
        return None, []
    if value == "latest":
        checkpoint, passed_over = newest_valid(Path(run_folder) / "checkpoints")
        messages = [f"Passed over {reason}" for reason in passed_over]
        if checkpoint is None and _step_folders(Path(run_folder) / "checkpoints"):
            problem = (
                f"None of the checkpoints in {run_folder} can be used, and a fresh start would not keep them. Mend "
                "one, or move the folder away, or choose another --run.name:"
            )
            raise CheckpointError([problem, *passed_over])
        if checkpoint is None:
            return None, [*messages, f"No checkpoint in {run_folder}: starting fresh."]
    else:
        checkpoint, passed_over = _at_path(Path(value).expanduser())
        messages = [f"Passed over {reason}" for reason in passed_over]
    if of_run and checkpoint.kind != "run":
        raise CheckpointError(
            f"Checkpoint {checkpoint.path}: {MANIFEST_FILE} says that it is of kind {checkpoint.kind}; expected run. "
            "Give a checkpoint that a training wrote."
        )
    return checkpoint, [*messages, f"Resuming from {checkpoint.path} (step {checkpoint.step})."]


def _at_path(path: Path) -> tuple[Checkpoint, list[str]]:
    if path.name in ("latest", "best") and (path.is_symlink() or not path.is_dir()):
        target = linked(path.parent, path.name) or linked(path.parent / "checkpoints", path.name)
        if target is None:
            raise CheckpointError(f"--run.resume {path}: this link to a checkpoint does not exist.")
        return load_checkpoint(target), []
    if not path.exists():
        raise CheckpointError(f"--run.resume {path} does not exist. Give a checkpoint folder, a run folder, or latest.")
    if (path / MANIFEST_FILE).exists() or _STEP_FOLDER.fullmatch(path.name):
        return load_checkpoint(path), []
    checkpoint, passed_over = newest_valid(path if path.name == "checkpoints" else path / "checkpoints")
    if checkpoint is None:
        raise CheckpointError([f"--run.resume {path} holds no usable checkpoint.", *passed_over])
    return checkpoint, passed_over


def _read_manifest(path: Path) -> dict:
    """Read the manifest of the checkpoint at `path` and check its structure.

    Raises CheckpointError if it is missing, cannot be read, or is of another format.
    """
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        reason = (
            f"there is no {MANIFEST_FILE}, so it was never finished" if path.is_dir() else "the folder does not exist"
        )
        raise CheckpointError(f"Checkpoint {path}: {reason}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"Checkpoint {path}: {MANIFEST_FILE} cannot be read ({_first_line(error)}).") from error
    if isinstance(manifest, dict) and (fault := stale(manifest.get("format"))):
        raise CheckpointError(f"Checkpoint {path} {fault}")
    if not well_formed(manifest):
        raise CheckpointError(f"Checkpoint {path}: {MANIFEST_FILE} is not what this toolkit writes.")
    return manifest


def _step_folders(folder: Path) -> list[Path]:
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in entries if _STEP_FOLDER.fullmatch(path.name) and not path.is_symlink()]


def _by_age(folder: Path) -> tuple[dict[Path, int], list[str]]:
    """Return the step folders with their sequence numbers, newest first, and a sentence for each unreadable one."""
    sequences = {}
    reasons = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith(".tmp-step_"):
            reasons.append(f"{path}: left by a save that was cut short")
        elif _STEP_FOLDER.fullmatch(path.name) and not path.is_symlink():
            try:
                sequences[path] = _read_manifest(path)["sequence"]
            except CheckpointError as error:
                reasons.append(str(error))
    return dict(sorted(sequences.items(), key=lambda item: item[1], reverse=True)), reasons


def _bytes_needed(tensors: Mapping[str, Mapping[str, Tensor]], optimizer: dict | None) -> int:
    states = (optimizer or {}).get("state", {}).values()
    of_optimizer = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    every = [tensor for named in tensors.values() for tensor in named.values()] + of_optimizer
    return sum(tensor.numel() * tensor.element_size() for tensor in every)


def _os_errno(error: BaseException | None) -> int | None:
    """Return the operating system's error number behind `error`, which torch and safetensors hide; None: there is none.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error.errno
        if match := re.search(r"os error (\d+)", str(error)):
            return int(match[1])
        error = error.__cause__ or error.__context__
    return None


def _cannot_write(folder: Path, number: int, needed: int) -> str:
    remedy = "Make the folder writable"
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(folder).free
        remedy = f"It needs about {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free: make room or lower --run.keep"
    return (
        f"No checkpoint can be written in {folder} ({os.strerror(number)}). {remedy}, then go on with "
        "--run.resume latest; the earlier checkpoints are untouched."
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
