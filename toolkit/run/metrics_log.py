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
    """Writes `metrics.jsonl`: one strict JSON object per line, flushed at once; for the main process only.

    A NaN or infinite value is written as null, and the row gets an entry `"nonfinite": {name: "nan"}`.

    Args:
        path: the file.
        keep_rows: number of rows of an existing file to keep; the rest is removed. On resume it is the number of rows
            at the time of the checkpoint. A step would not do, because some rows of one step may have been written
            before the checkpoint and some after it.

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
        """Append a row. Raises TypeError if a value is not JSON, BadInput if the file cannot be written."""
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
        """Close the file."""
        self._file.close()


def repair_rows(path: Path, rows: int, keep_later: bool = False) -> list[str]:
    """Remove unreadable rows from `metrics.jsonl` for a run that resumes; only the main process may call it.

    A copy of the damaged file is kept as `metrics.jsonl.damaged`. An incomplete last line, which a killed process
    leaves behind, is not counted as damage.

    Args:
        path: the file.
        rows: number of rows at the time of the checkpoint that the run resumes from.
        keep_later: check and keep the rows after these too.

    Returns:
        A list with one sentence on the rows that are missing or unreadable; an empty list if none is.

    Raises:
        BadInput: a damaged file cannot be copied or written.
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
            f"{path} is damaged and cannot be repaired ({error.strerror}): make room or make it writable, then go on "
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
    """Read the rows of a metrics.jsonl as they were logged, including NaN and infinity; an empty list without the file.

    An incomplete last line, which a killed process leaves behind, is left out.

    Raises:
        BadInput: another line is not a JSON object with a `step`; the message has the number of the line.
    """
    with closing(MetricsFollower(path)) as file:
        return file.new_rows()


class MetricsFollower:
    """Reads the new rows of a metrics.jsonl that another process may be writing.

    If the file was replaced by another, as a resumed run does, the new file is read from its start. The old file is
    held open until then, so that the new one cannot get the same inode number.
    """

    def __init__(self, path: Path):
        self.path = Path(path)
        self._file = None
        self._bytes = 0
        self._lines = 0

    def new_rows(self) -> list[dict]:
        """Return the complete rows written since the last call; an empty list if the file does not exist.

        Rows and errors are those of `read_metrics`.
        """
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
        """Close the file if it is open; the next `new_rows` reads it from the start."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _as_line(row: Mapping) -> str:
    values = {name: value.item() if isinstance(value, np.generic) else value for name, value in row.items()}
    nonfinite = {k: repr(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    values |= dict.fromkeys(nonfinite)
    return json.dumps(values | ({"nonfinite": nonfinite} if nonfinite else {}), allow_nan=False) + "\n"
