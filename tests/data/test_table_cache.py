"""The cache of tables: reused while its sources are the same, and trusted no more than files of strangers."""

import json
import logging
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from documents import row_of
from PIL import Image
from samples import noise

from toolkit.base.errors import BadInput
from toolkit.data import table_cache
from toolkit.data.formats import open_dataset
from toolkit.data.table import Category
from toolkit.data.table_cache import cache_root, file_digest, write_rows
from toolkit.tools import shapes
from toolkit.tools.doctor.near_duplicates import hold_out, signatures_of

IMAGES = 12


@pytest.fixture
def data(tmp_path):
    """A folder of COCO data."""
    images = []
    annotations = []
    for number in range(1, IMAGES + 1):
        Image.fromarray(noise(20, 30, number)).save(tmp_path / f"{number}.png")
        images.append({"id": number, "file_name": f"{number}.png", "width": 30, "height": 20})
        box = {
            "id": number,
            "image_id": number,
            "category_id": 1 + number % 2,
            "bbox": [number, 2, 3, 2],
        }
        annotations.append(box)
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    write(tmp_path, {"images": images, "annotations": annotations, "categories": categories})
    return tmp_path


def write(folder, document):
    (folder / "boxes.json").write_text(json.dumps(document))


def opened(folder, **options):
    return open_dataset(folder / "boxes.json", **{"cache_dir": folder / "cache"} | options)


def content(folder):
    """Everything that is read of a data set: rows, names, which images look alike, which are held out."""
    table = opened(folder)
    rest, held = hold_out(table, 0.3, folder / "cache")
    signatures = signatures_of(table, folder / "cache")
    arrays = [
        table.boxes().xyxy,
        table.boxes().labels,
        rest.image_ids(),
        held.image_ids(),
        signatures.digests,
    ]
    arrays.append(signatures.thumbnails)
    return table.image_rows(), table.class_names, table.fingerprint, [array.tolist() for array in arrays]


def flip_a_bit(raw, draw):
    at = draw.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :]


def cut(raw, draw):
    return raw[: draw.randrange(len(raw))]


def zeros_behind(raw, draw):
    """As after a power cut: the size is right, and the last blocks were never written."""
    kept = draw.randrange(len(raw))
    return raw[:kept] + bytes(len(raw) - kept)


def other_json(raw, draw):
    texts = [b"[]", b"{}", b"null", b"3", b'{"version": 6}', b"\xff", b'{"version": 8, "digest": 1}', b""]
    return draw.choice(texts)


@pytest.mark.parametrize("damage", [flip_a_bit, cut, zeros_behind, other_json])
@pytest.mark.parametrize("suffix", [".arrow", ".json", ".npz"])
def test_a_damaged_cache_is_made_anew(data, damage, suffix, caplog):
    expected = content(data)
    whole = {path: path.read_bytes() for path in sorted((data / "cache").rglob(f"*{suffix}"))}
    for number in range(6):
        draw = random.Random(f"{damage.__name__} {suffix} {number}")
        path = draw.choice(list(whole))
        raw = damage(whole[path], draw)
        path.write_bytes(raw)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert content(data) == expected, f"{path.name}, change {number}"
        is_noticed = suffix == ".arrow" or (suffix == ".npz" and damage is cut)  # else no line where it does not matter
        if is_noticed and raw != whole[path]:
            assert "damaged" in caplog.text
            assert "made anew" in caplog.text
        for each, text in whole.items():  # also those that were made anew
            each.write_bytes(text)


def test_large_tables_are_known_by_their_columns(data, monkeypatch, caplog):
    monkeypatch.setattr(table_cache, "WHOLE_BYTES", 10)
    expected = content(data)
    (file,) = (data / "cache" / "tables").glob("*.arrow")
    whole = file.read_bytes()
    position = whole.index(np.float32(5.0).tobytes())  # a corner of a box
    file.write_bytes(whole[:position] + np.float32(6.0).tobytes() + whole[position + 4 :])
    with caplog.at_level(logging.WARNING):
        assert content(data) == expected
    assert "has other content" in caplog.text


def test_a_cache_that_is_whole_is_not_made_again(data, monkeypatch):
    expected = content(data)
    monkeypatch.setattr(table_cache, "_publish", None)  # which writes
    assert content(data) == expected


def test_an_edited_file_is_read_again(data):
    assert opened(data).class_names == ["cat", "dog"]
    document = json.loads((data / "boxes.json").read_text())
    document["categories"][0]["name"] = "cow"
    write(data, document)
    assert opened(data).class_names == ["cow", "dog"]


def test_a_picture_that_is_damaged_later_is_noticed(data):
    opened(data)
    picture = data / "3.png"
    whole = picture.read_bytes()
    picture.write_bytes(whole[:-20])
    with pytest.raises(BadInput, match="3.png .image 3.: image data truncated"):
        opened(data)
    assert len(opened(data, on_error="drop")) == IMAGES - 1
    picture.write_bytes(whole)
    assert len(opened(data)) == IMAGES


def test_labels_that_are_edited_with_the_same_size_and_time_are_read_again(tmp_path):
    """As `rsync -t` or `touch -r` leave them."""
    for name in ("images", "labels"):
        (tmp_path / name).mkdir()
    Image.new("RGB", (100, 80)).save(tmp_path / "images" / "a.png")
    (tmp_path / "data.yaml").write_text("names: [cat, dog]\ntrain: images\nval: images\n")
    label = tmp_path / "labels" / "a.txt"
    for number in (0, 1):
        label.write_text(f"{number} .5 .5 .2 .2\n")
        os.utime(label, ns=(10**18, 10**18))
        table = open_dataset("train", path=tmp_path, cache_dir=tmp_path / "cache")
        assert table.boxes().labels.tolist() == [number]


def test_annotation_files_that_cannot_be_read_twice_are_refused(tmp_path):
    """A pipe would be waited for."""
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("pipe", "a pipe or a device"), ("none", "no such annotation file"), (".", "cannot be read")):
        with pytest.raises(BadInput, match=words):
            file_digest(tmp_path / name)


def test_files_are_named_by_content_shared_and_written_once(tmp_path):
    categories = [Category(0, "a"), Category(1, "b")]

    def made(count=50, categories=categories):
        rows = [row_of(number, [[0, 0, 5, 5]] * 2) for number in range(count)]
        return write_rows(rows, cache_file=tmp_path / "t.json", categories=categories).fingerprint

    with ThreadPoolExecutor(8) as pool:  # writers at once leave one whole table, and nothing temporary
        names = set(pool.map(lambda _: made(), range(16)))
    assert len(names) == 1
    assert len(list(tmp_path.iterdir())) == 2
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {0o644}  # others may read a shared cache
    assert names == {made()}
    assert len({made(), made(1), made(categories=categories[::-1])}) == 3


def test_a_cache_that_cannot_be_is_a_sentence(data, monkeypatch):
    with pytest.raises(BadInput, match="DETECTION_TOOLKIT_CACHE"):
        opened(data, cache_dir=data / "1.png")
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", "~nobody-of-that-name/x")
    with pytest.raises(BadInput, match="set DETECTION_TOOLKIT_CACHE to a folder"):
        cache_root()


def test_the_bundled_data_are_made_anew_where_they_are_damaged(tmp_path, caplog):
    made = shapes.ensure_shapes(tmp_path, 3, 2, 32)
    files = {path: path.read_bytes() for path in sorted(made.rglob("*")) if path.is_file()}
    for path, raw in files.items():
        draw = random.Random(path.name)
        for damage in (cut, flip_a_bit) if path.suffix == ".json" else (cut,):
            path.write_bytes(damage(raw, draw))
            assert shapes.ensure_shapes(tmp_path, 3, 2, 32) == made
            assert {each: each.read_bytes() for each in files} == files
    shutil.rmtree(made / "train")
    assert shapes.ensure_shapes(tmp_path, 3, 2, 32) == made
    assert (made / "train").is_dir()
    assert "the bundled data are damaged" in caplog.text
