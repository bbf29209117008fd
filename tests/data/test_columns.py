"""The Arrow files of tables: batch by batch, and cut or removed while a table is used."""

import multiprocessing
import os
import pickle
from pathlib import Path

import datasets
import numpy as np
import pytest
from documents import row_of

from toolkit.base.errors import BadInput
from toolkit.data.columns import read_columns
from toolkit.data.table import Category
from toolkit.data.table_cache import open_table, write_rows

CHANGED = "was changed, cut or removed by another program"
SMAPS = Path("/proc/self/smaps_rollup")


def table_of(folder, rows):
    return write_rows(
        rows,
        cache_file=folder / "t.json",
        categories=[Category(number, "c") for number in range(7)],
    )


def boxes(count):
    return [tuple(range(4 * number, 4 * number + 4)) for number in range(count)]


@pytest.mark.parametrize("rows_of_batch", [3, 100])
def test_rows_of_several_batches_are_those_that_were_written(tmp_path, monkeypatch, rows_of_batch):
    monkeypatch.setattr("toolkit.data.columns.BATCH_ROWS", rows_of_batch)
    monkeypatch.setattr("toolkit.data.columns.BATCH_BYTES", 3)
    rows = [row_of(number, boxes(number % 4)) | {"image": bytes([number])} for number in range(10)]
    table = table_of(tmp_path, rows)
    for index in range(10):
        assert table.row(index)["image"] == bytes([index])
        assert table.row(index)["objects"]["bbox"].tolist() == [list(box) for box in boxes(index % 4)]
    assert datasets.Dataset.from_file(str(table.arrow_files[0]))[9]["image_id"] == 9


def test_a_table_may_be_empty(tmp_path):
    empty = table_of(tmp_path, [])
    assert len(empty) == 0
    assert empty.image_ids().shape == (0,)
    assert empty.sizes_hw().shape == (0, 2)


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_table_that_is_cut_while_it_is_used_ends_no_process(tmp_path, is_removed):
    """A mapped file would end it by SIGBUS, without a word."""
    table = table_of(tmp_path, [row_of(number, boxes(number % 4)) for number in range(4_000)])
    before = table.boxes().xyxy.copy()
    opened_again, _ = open_table(tmp_path / "t.json")
    (file,) = table.arrow_files
    if is_removed:
        file.unlink()
    else:
        os.truncate(file, 100)
    sent = pickle.loads(pickle.dumps(table))  # noqa: S301 - as for a spawned worker
    for seen in (table, opened_again, sent):
        assert np.array_equal(seen.boxes().xyxy, before)
        assert seen.row(3_999)["image_id"] == 3_999
    assert open_table(tmp_path / "t.json") is None
    with pytest.raises(BadInput, match=f"{CHANGED}.*--run.resume latest"):
        read_columns(file)


def test_embedded_images_that_are_removed_are_still_read_and_cut_ones_a_sentence(tmp_path):
    rows = [row_of(number, boxes(1)) | {"image": bytes([number]) * 5000} for number in range(50)]
    table = table_of(tmp_path, rows)
    other, _ = open_table(tmp_path / "t.json")
    table.arrow_files[0].rename(tmp_path / "moved")
    assert other.row(48)["image"] == bytes([48]) * 5000  # an open file has no need of its name
    os.truncate(tmp_path / "moved", 10_000)
    assert table.row(0)["image"] == bytes(5000)
    assert table.boxes().labels.tolist() == [0] * 50
    with pytest.raises(BadInput, match=CHANGED):
        other.row(49)
    sent = pickle.loads(pickle.dumps(other))  # noqa: S301 - as for a spawned worker
    with pytest.raises(BadInput, match=CHANGED):
        sent.row(0)


def resident_mb():
    for line in SMAPS.read_text().splitlines():
        if line.startswith("Rss"):
            return int(line.split()[1]) / 1e3
    return None


def walk(table, queue):
    before = resident_mb()
    extra = []
    for _ in range(3):
        for index in np.random.default_rng(0).permutation(len(table)):
            table.row(int(index))
        extra.append(resident_mb() - before)
    queue.put(extra)


@pytest.mark.skipif(not SMAPS.exists(), reason="reads resident memory from Linux's /proc")
def test_the_memory_of_a_worker_is_flat(tmp_path):
    table = table_of(tmp_path, [row_of(number, boxes(7)) for number in range(5_000)])
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=walk, args=(table, queue))
    worker.start()
    first, _, last = queue.get(timeout=120)
    worker.join()
    assert first < 15  # the file itself has 2 MB
    assert last - first < 2
