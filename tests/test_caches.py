"""Own files are trusted no more than those of strangers: a damaged cache is made anew, and gives the same data."""

import json
import logging
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from toolkit.data import table_cache
from toolkit.data.formats import open_dataset
from toolkit.tools import shapes
from toolkit.tools.doctor.near_duplicates import hold_out, signatures_of

FILE, IMAGES = "boxes.json", 12


@pytest.fixture
def data(tmp_path) -> Path:
    annotations = []
    rows = []
    for number in range(1, IMAGES + 1):
        noise = np.random.default_rng(number).integers(0, 255, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{number}.png")
        rows.append({"id": number, "file_name": f"{number}.png", "width": 30, "height": 20})
        annotations.append({"id": number, "image_id": number, "category_id": 1 + number % 2, "area": 6, "iscrowd": 0,
                            "bbox": [number, 2, 3, 2]})  # fmt: skip
    document = {"images": rows, "annotations": annotations}
    document["categories"] = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    (tmp_path / FILE).write_text(json.dumps(document))
    return tmp_path


def content(folder: Path, cache: Path) -> tuple:
    """Everything that is read of a data set: rows, names, which images look alike, which are held out."""
    table = open_dataset(str(folder / FILE), cache_dir=cache)
    rest, held = hold_out(table, 0.3, cache)
    signatures = signatures_of(table, cache)
    boxes = table.boxes()
    return (
        table.image_rows(), table.class_names, table.fingerprint, boxes.xyxy.tolist(), boxes.labels.tolist(),
        rest.image_ids().tolist(), held.image_ids().tolist(), signatures.digests.tolist(),
        signatures.thumbnails.tolist(),
    )  # fmt: skip


def flip_a_bit(raw: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :]


def cut(raw: bytes, draw: random.Random) -> bytes:
    return raw[: draw.randrange(len(raw))]


def zeros_behind(raw: bytes, draw: random.Random) -> bytes:
    """As after a power cut: the size is right, and the last blocks were never written."""
    kept = draw.randrange(len(raw))
    return raw[:kept] + bytes(len(raw) - kept)


def other_json(raw: bytes, draw: random.Random) -> bytes:
    return draw.choice([b"[]", b"{}", b"null", b"3", b'{"version": 6}', b"\xff", b'{"version": 6, "digest": 1}', b""])


DAMAGES = (flip_a_bit, cut, zeros_behind, other_json)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("suffix", [".arrow", ".json", ".npz"])
def test_a_damaged_cache_is_made_anew(data, damage, suffix, caplog):
    cache = data / "cache"
    expected = content(data, cache)
    files = sorted(path for path in cache.rglob(f"*{suffix}") if path.is_file())
    assert files
    whole = {path: path.read_bytes() for path in files}
    for number in range(12):
        draw = random.Random(f"{damage.__name__} {suffix} {number}")
        path = draw.choice(files)
        raw = damage(whole[path], draw)
        path.write_bytes(raw)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert content(data, cache) == expected, f"{path.name}, change {number}"
        is_noticed = suffix == ".arrow" or suffix == ".npz" and damage is cut  # else no line where it does not matter
        if is_noticed and raw != whole[path]:
            assert "damaged" in caplog.text and "made anew" in caplog.text
        for each, text in whole.items():  # also those that were made anew
            each.write_bytes(text)


def test_a_cache_that_is_whole_is_not_made_again(data, monkeypatch):
    cache = data / "cache"
    expected = content(data, cache)
    monkeypatch.setattr(table_cache, "_publish", None)  # which writes
    assert content(data, cache) == expected


def test_large_tables_are_known_by_their_columns(data, monkeypatch, caplog):
    monkeypatch.setattr(table_cache, "WHOLE_BYTES", 10)
    cache = data / "cache"
    expected = content(data, cache)
    for file in sorted(cache.rglob("*.arrow")):
        whole = file.read_bytes()
        position = whole.find(np.float32(5.0).tobytes())  # a corner of a box
        file.write_bytes(whole[:position] + np.float32(6.0).tobytes() + whole[position + 4 :])
        with caplog.at_level(logging.WARNING):
            assert content(data, cache) == expected
        assert "has other content" in caplog.text or position < 0


def test_labels_that_are_edited_with_the_same_size_and_time_are_read_again(tmp_path):
    """As `rsync -t` or `touch -r` leave them."""
    folder = tmp_path / "data"
    for name in ("images", "labels"):
        (folder / name).mkdir(parents=True)
    Image.new("RGB", (100, 80)).save(folder / "images" / "a.png")
    (folder / "data.yaml").write_text("names: [cat, dog]\ntrain: images\nval: images\n")
    label = folder / "labels" / "a.txt"
    label.write_text("0 .5 .5 .2 .2\n")

    def labels() -> list[int]:
        return open_dataset("train", path=folder, cache_dir=tmp_path / "cache").boxes().labels.tolist()

    assert labels() == [0]
    before = label.stat()
    label.write_text("1 .5 .5 .2 .2\n")
    os.utime(label, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (label.stat().st_size, label.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert labels() == [1]


def test_the_bundled_data_are_made_anew_where_they_are_damaged(tmp_path, caplog):
    made = shapes.ensure_shapes(tmp_path, 3, 2, 32)
    files = {path: path.read_bytes() for path in sorted(made.rglob("*")) if path.is_file()}
    assert shapes.ensure_shapes(tmp_path, 3, 2, 32) == made
    for path, raw in files.items():
        draw = random.Random(path.name)
        for damage in (cut, flip_a_bit) if path.suffix == ".json" else (cut,):
            path.write_bytes(damage(raw, draw))
            assert shapes.ensure_shapes(tmp_path, 3, 2, 32) == made
            same = {each: each.read_bytes() == text for each, text in files.items()}
            assert all(same.values()), [path.name for path, is_same in same.items() if not is_same]
    shutil.rmtree(made / "train")
    assert shapes.ensure_shapes(tmp_path, 3, 2, 32) == made and (made / "train").is_dir()
    assert "the bundled data are damaged" in caplog.text


def test_a_cache_of_a_user_whom_nobody_knows_is_a_sentence(monkeypatch):
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", "~nobody-of-that-name/x")
    with pytest.raises(table_cache.BadInput, match="set DETECTION_TOOLKIT_CACHE to a folder"):
        table_cache.cache_root()
