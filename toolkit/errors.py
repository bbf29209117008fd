"""The errors that end a run on purpose; each becomes one message, an exit code and an entry in status.json."""

import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from toolkit.text import lasting_console


class BadInput(Exception):
    """Something the user gave cannot be used. Exit code 2.

    Args:
        problems: one sentence or several, each saying what is wrong, where, what was expected and what to do.
    """

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def all_faults(*calls: Callable[[], Any]) -> list:
    """Calls each, also after one has failed, and returns what they return. Raises BadInput with the problems of all."""
    made, problems = [], []
    for call in calls:
        try:
            made.append(call())
        except BadInput as error:
            problems += error.problems
    if problems:
        raise BadInput(dict.fromkeys(problems))
    return made


class StoppedByGuard(Exception):
    """The NaN guard ended the run before a non-finite value reached the weights. Exit code 3."""

    exit_code = 3


class Preempted(Exception):
    """A signal ended the run after its state was saved; `--run.resume latest` goes on. Exit code 85."""

    exit_code = 85


class FailedElsewhere(Exception):
    """Another process of the run failed; the others end with its cause. Exit code 1."""

    exit_code = 1


def says_bad_input(main: Callable[..., int | None]) -> Callable[..., int]:
    """Wraps the `main` of a command: bad input becomes one message and its exit code; nothing returned means 0."""

    @wraps(main)
    def wrapped(*arguments, **named) -> int:
        with lasting_console():
            try:
                return main(*arguments, **named) or 0
            except BadInput as error:
                print(f"error: {error}", file=sys.stderr)
                return error.exit_code

    return wrapped
