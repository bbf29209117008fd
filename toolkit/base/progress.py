"""Shows how far a piece of work is to those who wait for it."""

import sys
import time
from contextlib import AbstractContextManager

from tqdm import tqdm

LINE_EVERY_S = 60.0  # where the output is not a terminal


class ShownProgress(AbstractContextManager):
    """Shows on stderr how far a piece of work is: on a terminal a bar, if it takes longer than two seconds; elsewhere a
    line for each minute that it takes.

    Args:
        what: the work.
        total: number of units of it; None: not known. units: their name, in the plural.
        is_shown: False shows nothing, as on processes other than the main one.
    """

    def __init__(self, what: str, total: int | None, units: str, is_shown: bool = True):
        self.what = what
        self.units = units
        hidden = None if is_shown else True  # None: hidden where there is no terminal
        self._bar = tqdm(total=total, desc=what, unit=f" {units}", delay=2, leave=False, disable=hidden)
        self._has_lines = is_shown and self._bar.disable
        self._total = total
        self._done = 0
        self._line_at = time.monotonic() + LINE_EVERY_S

    def add(self, count: int = 1) -> None:
        """Count units that are done."""
        self._bar.update(count)
        self._done += count
        if self._has_lines and time.monotonic() >= self._line_at:
            of_all = "" if self._total is None else f" of {self._total:,}"
            print(f"{self.what}: {self._done:,}{of_all} {self.units}", file=sys.stderr, flush=True)
            self._line_at = time.monotonic() + LINE_EVERY_S

    def __exit__(self, *_) -> None:
        self._bar.close()
