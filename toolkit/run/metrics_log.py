"""`metrics.jsonl`: one JSON object for every logged step and evaluation."""

import json
import math
import os
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np

from toolkit.base.errors import BadInput
from toolkit.base.files import write_text_atomic

# What reading another line as a row raises.
_ROW_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)


class MetricsLog:
    """`metrics.jsonl`: one strict JSON object a line, flushed as it is written; for the main process only.

    A NaN or infinite value is written as null, and named in the row's `"nonfinite": {name: "nan"}`.

    Args:
        path: the file.
        keep_rows: how many of an earlier file's rows stay: on resume, as many as there were when the checkpoint was
            written. A count, because rows of one step may lie on both sides of it.

    Raises:
        BadInput: the file cannot be written, or is not a metrics.jsonl.
    """

    def __init__(self, path: Path, keep_rows: int = 0):
        self.path = Path(path)
        kept = read_metrics(self.path)[:keep_rows] if keep_rows else []
        try:
            write_text_atomic(self.path, "".join(_as_line(row) for row in kept))
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()
        except OSError as error:
            raise self._unwritable(error) from error
        self.rows = len(kept)

    def write(self, row: Mapping) -> None:
        """Append `row`. Raises TypeError for what JSON has no form for, BadInput when the disk does not take it."""
        line = _as_line(row)
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error
        self.rows += 1

    def _unwritable(self, error: OSError) -> BadInput:
        return BadInput(
            f"{self.path} cannot be written ({error.strerror}). Make room or make it writable, then go on with "
            "--run.resume latest."
        )

    def close(self) -> None:
        self._file.close()


def repair_rows(path: Path, rows: int, keep_later: bool = False) -> list[str]:
    """Make `metrics.jsonl` readable again for a run that goes on from a checkpoint; the main process calls it.

    A damaged file is kept beside it as `metrics.jsonl.damaged`; a torn last line, which a kill leaves, is not damage.

    Args:
        rows: how many the checkpoint counts.
        keep_later: rows after them stay too, so damage there counts.

    Returns:
        What is wrong, in words; nothing if all those rows are there.

    Raises:
        BadInput: it cannot be written.
    """
    path = Path(path)
    if not path.exists():
        if rows:
            write_text_atomic(path, "")
        return [f"{path} is gone: the {rows} rows before this checkpoint are lost"] if rows else []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is torn or empty
    counted = lines if keep_later else lines[:rows]
    good = [row for line in counted if line and (row := _row_or_none(line))]
    damaged = len(counted) - len(good)
    missing = max(0, rows - len(lines))
    if not damaged and not missing:
        return []
    kept = path.with_name(f"{path.name}.damaged")
    while kept.exists():
        kept = kept.with_name(f"{kept.name}.damaged")
    try:
        shutil.copyfile(path, kept)
        write_text_atomic(path, "".join(map(_as_line, good)))
    except OSError as error:
        raise BadInput(
            f"{path} is damaged and cannot be mended ({error.strerror}): make room or make it writable, then go on "
            "with --run.resume latest."
        ) from error
    lost = f"{damaged} unreadable, {missing} missing"
    return [
        f"{path} has {len(good)} readable rows of the {rows} that the checkpoint counts ({lost}); the file as it was "
        f"is kept as {kept.name}"
    ]


def _row_or_none(line: bytes) -> dict | None:
    try:
        return _parse_row(line)
    except _ROW_ERRORS:
        return None


def _parse_row(line: bytes) -> dict:
    row = json.loads(line)
    row.update({name: float(text) for name, text in row.pop("nonfinite", {}).items()})
    return row | {"step": int(row["step"])}


def read_metrics(path: Path) -> list[dict]:
    """Read the rows of a metrics.jsonl as they were logged, NaN and infinity included; none without the file.

    A torn last line, which a kill leaves behind, is left out.

    Raises:
        BadInput: another line is not a JSON object with a `step`; names it.
    """
    with closing(MetricsFollower(path)) as file:
        return file.new_rows()


class MetricsFollower:
    """A metrics.jsonl that another process may be writing: every call reads what has come since the last one.

    A file that was put in its place, as a resumed run does, is read from its start. It is held open until then, so that
    the new one cannot have its number.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._file = None
        self._bytes = 0
        self._lines = 0

    def new_rows(self) -> list[dict]:
        """Yield rows as `read_metrics` gives them; empty if the file does not exist. Raises BadInput as it does."""
        try:
            now = os.stat(self.path)
            same = self._file is not None and os.path.samestat(os.fstat(self._file.fileno()), now)
            if not same or now.st_size < self._bytes:
                self.close()
                self._file, self._bytes, self._lines = open(self.path, "rb"), 0, 0  # noqa: SIM115  held open
        except FileNotFoundError:
            return []
        self._file.seek(self._bytes)
        *lines, torn = self._file.read().split(b"\n")
        first = self._lines + 1
        self._lines = self._lines + len(lines)
        self._bytes = self._file.tell() - len(torn)
        return [self._row_of_line(number, line) for number, line in enumerate(lines, first) if line]

    def _row_of_line(self, number: int, line: bytes) -> dict:
        try:
            return _parse_row(line)
        except _ROW_ERRORS as error:
            raise BadInput(f"{self.path}, line {number}: not a row of metrics ({error}); mend or remove it.") from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _as_line(row: Mapping) -> str:
    values = {name: value.item() if isinstance(value, np.generic) else value for name, value in row.items()}
    nonfinite = {k: repr(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    values |= dict.fromkeys(nonfinite)
    return json.dumps(values | ({"nonfinite": nonfinite} if nonfinite else {}), allow_nan=False) + "\n"
