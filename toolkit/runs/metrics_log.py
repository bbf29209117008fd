"""`metrics.jsonl`: one JSON object for every logged step and evaluation."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from toolkit.errors import BadInput
from toolkit.files import write_text_atomic


class MetricsLog:
    """`metrics.jsonl`: one strict JSON object a line, flushed as it is written; for the main process only.

    A NaN or infinite value is written as null, and named in the row's `"nonfinite": {name: "nan"}`.

    Args:
        path: the file.
        keep_rows: how many of an earlier file's rows stay: on resume, as many as there were when the checkpoint was
            written. A count, because rows of one step may lie on both sides of it.

    Raises:
        BadInput: the file cannot be written, or is no metrics.jsonl.
    """

    def __init__(self, path: Path, keep_rows: int = 0):
        self.path = Path(path)
        kept = read_metrics(self.path)[:keep_rows] if keep_rows else []
        try:
            write_text_atomic(self.path, "".join(_line(row) for row in kept))
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()
        except OSError as error:
            raise self._unwritable(error) from error
        self.rows = len(kept)

    def write(self, row: Mapping) -> None:
        """Append `row`. Raises TypeError for what JSON has no form for, BadInput when the disk does not take it."""
        line = _line(row)
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error
        self.rows += 1

    def _unwritable(self, error: OSError) -> BadInput:
        return BadInput(f"{self.path} cannot be written ({error.strerror}). Make room or make it writable, then go on "
                        "with --run.resume latest.")  # fmt: skip

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl as they were logged, NaN and infinity included; empty when there is no such file.

    A torn last line, which a kill leaves behind, is left out.

    Raises:
        BadInput: another line is no JSON object with a `step`; names it.
    """
    if not Path(path).exists():
        return []
    rows, lines = [], Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line or number == len(lines):  # what follows the last newline is torn or empty
            continue
        try:
            row = json.loads(line)
            row.update({name: float(text) for name, text in row.pop("nonfinite", {}).items()})
            rows.append(row | {"step": int(row["step"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"{path}, line {number}: not a row of metrics ({error}); mend or remove it.") from error
    return rows


def _line(row: Mapping) -> str:
    values = {name: value.item() if isinstance(value, np.generic) else value for name, value in row.items()}
    nonfinite = {k: repr(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    values |= dict.fromkeys(nonfinite)
    return json.dumps(values | ({"nonfinite": nonfinite} if nonfinite else {}), allow_nan=False) + "\n"
