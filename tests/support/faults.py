"""What goes wrong in a run, at an exact moment: a signal before the n-th call of a function, or a NaN in one window.

{"signal": "SIGKILL", "at": "toolkit.run.recovery:RunGuard.accepts", "call": 2, "rank": 0}
    SIGKILL goes to all processes of the run at once, as a machine that goes down does; others to this rank only
{..., "at": "os.symlink step_*"}    before the n-th audit event of Python whose path matches
{..., "at": "write *"}    before the n-th file or folder that is written, renamed or removed
{"list": FILE, "at": "write *"}    the paths of all these, a line each, into a file
{"nan": "boxes" | "infinite boxes" | "activation" | "loss" | "gradient", "window": 3, "rank": 1}
    3: the third that training fetches
{"nan": ..., "ids": [...]}    the micro-batch of these image ids, for a replay
{"skip": "toolkit.run.session_end:_report"}    leave a slow function out
{"set": "huggingface_hub.constants:ENDPOINT", "to": VALUE}    another value of a constant
{"disk": "full" | "inodes" | "removed" | "read-only", "folder": FOLDER, "at": ..., "call": ...}
    what becomes of a disk then
{"cwd": FOLDER, "rank": 1}    start in another folder, as on a machine with a disk of its own
{"float64": True}    the detector in double precision
"""

import atexit
import importlib
import itertools
import math
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path

import torch
from audit import at_events


def install(faults: list[dict], rank: int) -> None:
    """Puts in those of this rank, before the script is loaded."""
    nans = []
    for fault in (fault for fault in faults if fault.get("rank", rank) == rank):
        if "signal" in fault:
            _before(fault["at"], fault["call"], partial(_send, **fault))
        if "disk" in fault:
            _before(fault["at"], fault["call"], partial(_spoil_disk, fault["disk"], Path(fault["folder"])))
        if "list" in fault:
            _list(fault["at"], Path(fault["list"]))
        if "cwd" in fault:
            os.chdir(fault["cwd"])
        if "skip" in fault:
            setattr(*_find(fault["skip"]), lambda *args, **kwargs: None)
        if "set" in fault:
            setattr(*_find(fault["set"]), fault["to"])
        if "float64" in fault:
            _wrap_build(_double)
        nans += [fault] * ("nan" in fault)
    if nans:
        _poison(nans)


def _wrap_build(change) -> None:
    """Changes what `build_detector` returns, wherever the script, or scripts/replay.py, looks it up."""
    for module in map(importlib.import_module, ("toolkit.models.start", "toolkit.tools.predict.open")):
        build = module.build_detector
        module.build_detector = lambda *args, build=build, **kwargs: change(build(*args, **kwargs))


def _double(detector: torch.nn.Module) -> torch.nn.Module:
    first = next(m for m in detector.modules() if isinstance(m, torch.nn.Conv2d))
    first.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    return detector.double()


def _find(name: str) -> tuple[object, str]:
    """The owner of "package.module:Class.method", and the name below it."""
    module, _, path = name.partition(":")
    owner = importlib.import_module(module)
    *outer, name = path.split(".")
    for attribute in outer:
        owner = getattr(owner, attribute)
    return owner, name


def _before(at: str, call: int, act) -> None:
    """Calls `act` before call number `call` of a function, or before that audit event."""
    calls = itertools.count(1)

    def count() -> None:
        if next(calls) == call:
            act()

    if " " in at:
        at_events(at, lambda path: count())
        return
    owner, name = _find(at)
    original = getattr(owner, name)

    @wraps(original)
    def counted(*args, **kwargs):
        count()
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def _send(at: str, call: int, wait_s: float = 0.0, **fault) -> None:
    print(f"fault: {fault['signal']} before call {call} of {at}", flush=True)
    time.sleep(wait_s)  # two interrupts in one moment count as one
    number = getattr(signal, fault["signal"])
    if number == signal.SIGKILL:
        os.killpg(0, number)
    os.kill(os.getpid(), number)


def _list(at: str, into: Path) -> None:
    paths: list[str] = []
    at_events(at, paths.append)
    atexit.register(lambda: into.write_text("".join(f"{path}\n" for path in paths)))


def _spoil_disk(how: str, folder: Path) -> None:
    """To the last byte or inode; `removed`: the folder is gone. What fills it is named .filler*."""
    if how == "removed":
        shutil.rmtree(folder)
    if how == "read-only":  # possible while no file of it is open for writing
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    with suppress(OSError):
        if how == "full":
            with open(folder / ".filler", "wb", buffering=0) as file:
                while file.write(bytes(1 << 20)):  # fewer of them when there is no more room, and then an error
                    pass
        for number in range(100_000 if how == "inodes" else 0):
            (folder / f".filler{number}").touch()


class _NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


def _poison(faults: list[dict]) -> None:
    from toolkit.run.training import Training

    by_ids = {tuple(fault["ids"]): fault["nan"] for fault in faults if "ids" in fault}
    by_window = {fault["window"]: fault["nan"] for fault in faults if "window" in fault}
    fetch, fetched, now = Training.windows, 0, None  # windows so far; what is broken in the micro-batch under way

    def windows(self):
        nonlocal fetched
        for window in fetch(self):
            fetched += 1
            kind, batch = by_window.get(fetched), window.batches[-1]
            if kind in ("boxes", "infinite boxes"):
                boxes = next(t["boxes"] for t in batch.targets if len(t["boxes"]))
                boxes[0, 2] = math.inf if kind == "infinite boxes" else math.nan
            elif kind is not None:
                by_ids[_ids(batch.targets)] = kind
            yield window

    def note(module, args):
        nonlocal now
        now = by_ids.get(_ids(args[2])) if module.training and len(args) > 2 and args[2] else None

    def breaking(detector):
        detector.register_forward_pre_hook(note)
        convolution = next(m for m in detector.modules() if isinstance(m, torch.nn.Conv2d))
        convolution.register_forward_hook(lambda _, args, output: output * math.nan if now == "activation" else None)
        _break_criterion(type(detector), lambda: now)
        return detector

    Training.windows = windows
    _wrap_build(breaking)


def _break_criterion(cls: type, kind) -> None:
    criterion = cls.criterion

    def broken(self, *args, **kwargs):
        losses, metrics = criterion(self, *args, **kwargs)
        name = next(iter(losses))
        if kind() == "loss":
            losses = losses | {name: losses[name] * math.nan}
        if kind() == "gradient":
            losses = losses | {name: _NanBackward.apply(losses[name])}
        return losses, metrics

    cls.criterion = broken


def _ids(targets) -> tuple:
    return tuple(target["image_id"] for target in targets)
