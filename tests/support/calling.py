"""Calls programs in a forked process that has everything imported: hundreds in seconds, each with what it printed."""

import contextlib
import importlib
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from places import ROOT, SUPPORT
from processes import FORK_SERVER

LONGEST_CALL_S = 240  # on a machine that is busy with other things too


class Call(NamedTuple):
    """The module of a program, such as "predict" for scripts/predict.py, and its arguments."""

    program: str
    argv: tuple[str, ...]


class Outcome(NamedTuple):
    """How a call ended: exit code, what it printed, its traceback or "", and whether it changed the finished run."""

    code: int | None
    said: str
    failure: str
    changed_run: bool = False


Prepare = Callable[[], None]


def call_all(calls: Sequence[Call], folder: Path, prepare: Prepare, keep: bool = False) -> list[Outcome]:
    """Return the outcome of each call, made one after the other in `folder`, from which what it wrote is removed.

    prepare: function of a module's top level, which is called in the process of the calls before them. A call that ends
    the process or hangs is a failure, and those after it are made in a new process. keep: nothing is removed.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < len(calls):
        outcomes += _calls_until_death(calls[len(outcomes) :], folder, prepare, keep)
    return outcomes


def _calls_until_death(calls: Sequence[Call], folder: Path, prepare: Prepare, keep: bool) -> list[Outcome]:
    ours, theirs = FORK_SERVER.Pipe()
    process = FORK_SERVER.Process(target=_serve, args=(calls, str(folder), prepare, keep, theirs))
    process.start()
    theirs.close()
    outcomes = []
    with contextlib.suppress(EOFError):
        while len(outcomes) < len(calls) and ours.poll(LONGEST_CALL_S):
            outcomes.append(ours.recv())
    if len(outcomes) < len(calls):
        hangs = process.is_alive()
        process.kill()
        process.join()
        outcomes.append(Outcome(None, "", "it hangs" if hangs else f"the process ended with {process.exitcode}"))
    process.join()
    return outcomes


def _serve(calls: Sequence[Call], folder: str, prepare: Prepare, keep: bool, answers: Connection) -> None:
    os.chdir(folder)
    sys.path[:0] = [str(ROOT / "scripts"), str(SUPPORT)]
    os.environ |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    os.environ["DETECTION_TOOLKIT_CACHE"] = str(Path(folder, "cache"))
    prepare()
    names = set(os.listdir())
    for call in calls:
        before = _state_of_run()
        outcome = _outcome(call)
        answers.send(outcome._replace(changed_run=_state_of_run() != before))
        for name in set() if keep else set(os.listdir()) - names - {"cache"}:
            path = Path(name)
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _state_of_run() -> dict[str, tuple[int, int]]:
    """Return size and time of the last change of every file of the finished run."""
    files = [path for path in Path("runs/run").rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def _outcome(call: Call) -> Outcome:
    code, failure = None, ""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as console, _printed_to(console):
        try:
            code = main_of(call.program)(list(call.argv))
        except SystemExit as end:
            code = end.code
        except BaseException:  # noqa: BLE001 - as the interpreter, which prints it
            failure = traceback.format_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        console.seek(0)
        said = console.read()
    if "Traceback (most recent call last)" in said and not failure:
        failure = said
    return Outcome(0 if code is None and not failure else code, said, failure)


@contextlib.contextmanager
def _printed_to(file) -> Iterator[None]:
    """Redirect stdout and stderr to a file, also those of libraries and other processes; stdin is empty."""
    before = sys.stdin, sys.stdout, sys.stderr
    kept = os.dup(1), os.dup(2)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    with (
        open(os.devnull, encoding="utf-8") as sys.stdin,
        open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as sys.stdout,
    ):
        sys.stderr = sys.stdout
        try:
            yield
        finally:
            sys.stdout.flush()
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
    sys.stdin, sys.stdout, sys.stderr = before


def main_of(program: str) -> Callable[[list[str]], int | None]:
    """Return the function that takes the arguments of a program and returns its exit code."""
    module = importlib.import_module(program)
    if hasattr(module, "DEFAULT_CONFIG"):
        from toolkit.run.command_line import run_script

        return lambda argv: run_script(module.main, module.Config, module.DEFAULT_CONFIG, argv)
    if program == "benchmark":  # whose main returns rows
        from toolkit.base.errors import exit_on_bad_input

        return exit_on_bad_input(lambda argv: module.main(argv) and 0)
    return module.main
