"""metrics.jsonl: strict JSON, cut back to what a checkpoint knew, repaired, and followed while it grows."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metric_rows import train_row, val_row, write_metrics

from toolkit.base.errors import BadInput
from toolkit.run.metrics_log import (
    MetricsFollower,
    MetricsLog,
    read_metrics,
    repair_rows,
)

keys = st.text(min_size=1).filter(lambda key: key != "nonfinite")


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "metrics.jsonl"


@settings(max_examples=50)  # each example waits for the disk
@given(st.dictionaries(keys, st.floats() | st.integers() | st.none()))
def test_rows_are_strict_json_and_come_back(tmp_path_factory, values):
    row = values | {"step": 3}
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    write_metrics(path, row)

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    (line,) = path.read_text().splitlines()
    json.loads(line, parse_constant=refuse)
    assert repr(sorted(read_metrics(path)[0].items())) == repr(sorted(row.items()))


def test_nonfinite_values_are_null_and_named(path):
    log = MetricsLog(path)
    log.write({"step": 1, "a": math.nan, "b": -math.inf, "c": np.float32(0.5), "d": None})
    row = json.loads(path.read_text())  # flushed: read before it is closed
    assert row == {
        "step": 1,
        "a": None,
        "b": None,
        "c": 0.5,
        "d": None,
        "nonfinite": {"a": "nan", "b": "-inf"},
    }


def test_a_resume_keeps_as_many_rows_as_the_checkpoint_knew(path):
    known = write_metrics(path, train_row(5), train_row(10)).rows  # the checkpoint is between a step's two rows
    write_metrics(path, val_row(10), train_row(15), keep_rows=known)
    with open(path, "a") as file:
        file.write('{"step": 20, "tr')  # torn by a kill
    assert [row["step"] for row in read_metrics(path)] == [5, 10, 10, 15]
    write_metrics(path, val_row(10), keep_rows=known)
    assert read_metrics(path) == [train_row(5), train_row(10), val_row(10)]
    write_metrics(path)
    assert path.read_text() == ""


# ---- repairs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def whole(path) -> bytes:
    write_metrics(path, *(train_row(step) | {"loss": math.nan} for step in (1, 2, 3)))
    return path.read_bytes()


def test_a_whole_file_is_left_alone(path, whole):
    assert repair_rows(path, 3) == []
    assert repair_rows(path, 2) == []
    assert path.read_bytes() == whole
    path.write_bytes(whole + b"x\n")  # rows after it count where they stay
    assert repair_rows(path, 3) == []
    assert repair_rows(path, 3, keep_later=True)


def test_a_row_torn_by_a_kill_counts_where_the_checkpoint_counts_it(path, whole):
    path.write_bytes(whole + b'{"step": 4, "tr')
    assert repair_rows(path, 3) == []
    path.write_bytes(whole[:-5])
    assert repair_rows(path, 3)


def test_rows_that_are_not_there_are_said_and_the_file_is_kept(path, whole):
    lines = whole.splitlines(keepends=True)
    damages = {
        "2 readable rows of the 3 that the checkpoint counts (0 unreadable, 1 missing)": lines[:2],
        "2 readable rows of the 3 that the checkpoint counts (1 unreadable, 0 missing)": [
            *lines[::2],
            b"\0\0\n",
        ],
        "0 readable rows of the 3": [
            b"[]\n",
            b'{"step": "x"}\n',
            b"[" * 100_000 + b"\n",
        ],
    }
    for number, (said, damaged) in enumerate(damages.items(), start=1):
        path.write_bytes(b"".join(damaged))
        (note,) = repair_rows(path, 3)
        assert said in note
        assert path.read_bytes() == b"".join(line for line in damaged if line in lines)
        kept = path.with_name("metrics.jsonl" + ".damaged" * number)
        assert kept.name in note
        assert kept.read_bytes() == b"".join(damaged)


def test_a_file_that_is_gone_is_begun_anew(path, whole):
    path.unlink()
    assert "gone" in repair_rows(path, 3)[0]
    assert path.read_text() == ""
    path.unlink()
    assert repair_rows(path, 0) == []
    assert not path.exists()


# ---- files that grow, and bad ones -----------------------------------------------------------------------------------


def overwrite_first_byte(path: Path, byte: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(byte)


def test_a_file_that_grows_is_read_once(path):
    follower = MetricsFollower(path)
    assert follower.new_rows() == []
    log = MetricsLog(path)
    log.write(train_row(1))
    assert follower.new_rows() == [train_row(1)]
    assert follower.new_rows() == []
    overwrite_first_byte(path, b"#")  # what was read is not looked at again
    log.write(train_row(2))
    with open(path, "ab") as torn:
        torn.write(b'{"step": 3, "train')
        torn.flush()
        assert follower.new_rows() == [train_row(2)]
        torn.write(b'/loss": 1.0}\n')
    assert [row["step"] for row in follower.new_rows()] == [3]
    log.close()
    overwrite_first_byte(path, b"{")
    for rows in (
        (),
        (train_row(4),),
    ):  # put in its place twice: the system may give the first one's number again
        write_metrics(path, *rows, keep_rows=2)
    assert [row["step"] for row in follower.new_rows()] == [1, 2, 4]
    with open(path, "a") as bad:
        bad.write("nothing\n")
    with pytest.raises(BadInput, match="line 4"):
        follower.new_rows()
    follower.close()


@pytest.mark.parametrize("step", ["1e999", "9" * 5000, "Infinity", "NaN", '"x"'])
def test_a_step_that_is_not_a_number_of_steps_is_one_sentence(path, step):
    path.write_text(f'{{"step": {step}}}\n')
    with pytest.raises(BadInput, match="metrics.jsonl, line 1: not a row of metrics"):
        read_metrics(path)


def test_a_row_without_a_step_and_a_folder_that_is_missing_are_told(path):
    path.write_text('{"step": 1}\n{"epoch": 2}\n')
    with pytest.raises(BadInput, match="line 2"):
        MetricsLog(path, keep_rows=2)
    with pytest.raises(BadInput, match="missing.*cannot be written"):
        MetricsLog(path.parent / "missing" / "metrics.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_told_with_what_to_do(path):
    log = MetricsLog(path)
    log._file = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(BadInput, match="No space left.*--run.resume latest"):
        log.write(train_row(1))
