"""The table and the COCO reader."""

import json
import multiprocessing
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import pytest
from documents import DIRTY, document, image, row_of, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from toolkit.base.errors import BadInput
from toolkit.data.columns import read_columns
from toolkit.data.formats import open_dataset
from toolkit.data.table import Category
from toolkit.data.table_cache import open_table, write_rows
from toolkit.tools.writers import write_coco


def row(image_id, count, **extra):
    boxes, alternating = [tuple(range(4 * k, 4 * k + 4)) for k in range(count)], [k % 2 for k in range(count)]
    columns = {"iscrowd": alternating, "area": [float(k) for k in range(count)]}
    relations = [(0, 1, 2)] if count > 1 else ()
    return row_of(image_id, boxes, (40, 30 + count), alternating, relations, **columns) | extra


CATEGORIES = (Category(7, "a"), Category("x", "b"))


def test_annotations_that_were_edited_are_told_image_by_image(tmp_path):
    counts = {5: 0, 3: 3, 9: 1, 4: 2}
    before, after = [row(*each) for each in counts.items()], [row(*each) for each in counts.items() if each[0] != 4]
    after[1]["objects"]["bbox"][2] = (1.0, 2.0, 3.0, 5.0)
    written = {"categories": CATEGORIES, "predicates": ("p", "q", "r")}
    old, new, again, moved = (
        write_rows(rows, cache_file=tmp_path / f"{name}.json", **written)
        for name, rows in {"a": before, "b": [*after, row(7, 2)], "c": before, "d": [*before[:3], row(4, 2)]}.items()
    )
    identity = json.loads(json.dumps(old.identity))
    assert again.changed_since(identity) == moved.changed_since(identity) == ""
    counts = "4 images with 4 boxes then, 4 images with 4 boxes now"  # without crowd regions
    gone, added = "1 gone (4.png (id 4))", "1 new (7.png (id 7))"
    edited = "1 with other boxes or labels (3.png (id 3))"
    assert new.changed_since(identity) == f"{counts}; of the images {gone}, {added}, {edited}"
    assert new.head(3).changed_since(identity).endswith(f"of the images {gone}, {edited}")
    assert new.changed_since(identity | {"file": "gone.arrow"}) == counts
    parts = [table.select(np.arange(len(table)) != 1) for table in (old, new)]
    whole = f"of all images, those held out among them, {gone}, {added}, {edited}"
    assert parts[1].changed_since(json.loads(json.dumps(parts[0].identity))).endswith(f"now; {whole}")
    assert "of all" not in parts[1].changed_since(identity)


@pytest.mark.parametrize("ids", [[5, 3, 9], ["a", "b", "ü"]])
def test_rows_come_back_and_may_be_written_to(tmp_path, ids):
    rows = [row(image_id, count) for image_id, count in zip(ids, (0, 3, 1), strict=True)]
    table = write_rows(rows, cache_file=tmp_path / "t.json", categories=CATEGORIES, predicates=("p", "q", "r"))
    for seen in (table, pickle.loads(pickle.dumps(table)), open_table(tmp_path / "t.json")[0]):  # noqa: S301
        assert seen.image_ids().tolist() == ids and seen.num_boxes().tolist() == [0, 3, 1]
        assert seen.sizes_hw().tolist() == [[30, 40], [33, 40], [31, 40]]
        assert seen.categories == CATEGORIES and seen.predicates == ("p", "q", "r")
        for index, expected in enumerate(rows):
            got = seen.row(index)
            assert {key: got[key] for key in ("image_id", "file_name", "width", "height")} == {
                key: expected[key] for key in ("image_id", "file_name", "width", "height")}
            assert got["objects"]["bbox"].shape == (len(expected["objects"]["id"]), 4)
            for group in ("objects", "relations"):
                for key, values in got[group].items():
                    assert np.array_equal(values, np.reshape(expected[group][key], values.shape)), key
                    assert values.dtype == (np.float32 if key in ("bbox", "area") else np.int64)
        got["objects"]["bbox"] += 1
        assert seen.row(2)["objects"]["bbox"][0, 0] == 0
    with pytest.raises(IndexError):
        table.row(3)


def test_several_batches_selections_and_embedded_images(tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.data.columns.BATCH_ROWS", 3)
    rows = [row(number, number % 4, image=bytes([number])) for number in range(10)]
    table = write_rows(rows, cache_file=tmp_path / "t.json", categories=CATEGORIES)
    assert [table.row(i)["image"] for i in range(10)] == [bytes([i]) for i in range(10)]
    assert table.image_source(table.row(4)) == bytes([4])
    head = table.head(5)
    assert len(head) == 5 and head.image_ids().tolist() == list(range(5)) and head.fingerprint != table.fingerprint
    assert head.row(4)["image_id"] == 4 and head.num_boxes().tolist() == [0, 1, 2, 3, 0]
    assert table.head(99) is table
    copy = pickle.loads(pickle.dumps(head))  # noqa: S301 (pickled here, as for a spawned worker)
    assert len(copy) == 5 and copy.row(4)["image_id"] == 4 and copy.row(4)["image"] == bytes([4])
    assert datasets.Dataset.from_file(str(table.arrow_files[0]))[9]["image_id"] == 9


def test_a_table_that_is_cut_while_it_is_used_ends_no_process(tmp_path):
    """A mapped file would end it by SIGBUS, without a word."""
    rows = [row(number, number % 4) for number in range(20_000)]
    table = write_rows(rows, cache_file=tmp_path / "t.json", categories=CATEGORIES, image_root=tmp_path)
    before = table.boxes().xyxy.copy()
    opened_again = open_table(tmp_path / "t.json")[0]
    (file,) = table.arrow_files
    for damage in (lambda: os.truncate(file, 100), file.unlink):
        damage()
        for seen in (table, opened_again, pickle.loads(pickle.dumps(table))):  # noqa: S301 (as for a spawned worker)
            assert seen.boxes().xyxy.tolist() == before.tolist() and seen.row(19_999)["image_id"] == 19_999
        assert open_table(tmp_path / "t.json") is None
        with pytest.raises(BadInput, match="was changed, cut or removed by another program.*--run.resume latest"):
            read_columns(file)


def test_embedded_images_that_are_cut_off_are_a_sentence_and_removed_ones_are_still_read(tmp_path):
    rows = [row(number, 1, image=bytes([number]) * 5000) for number in range(50)]
    table = write_rows(rows, cache_file=tmp_path / "t.json", categories=CATEGORIES)
    assert table.row(49)["image"] == bytes([49]) * 5000 and table.columns.images["image"].shape == (50, 3)
    other = open_table(tmp_path / "t.json")[0]
    assert len(other) == 50
    table.arrow_files[0].rename(tmp_path / "moved")
    assert other.row(48)["image"] == bytes([48]) * 5000  # an open file has no need of its name
    os.truncate(tmp_path / "moved", 10_000)
    assert table.boxes().labels.tolist() == [0] * 50 and table.row(0)["image"] == bytes(5000)
    with pytest.raises(BadInput, match="was changed, cut or removed by another program"):
        other.row(49)


def test_files_are_named_by_content_shared_and_written_once(tmp_path):
    def make(rows, categories=CATEGORIES):
        return write_rows(rows, cache_file=tmp_path / "t.json", categories=categories).fingerprint

    with ThreadPoolExecutor(8) as pool:  # writers at once leave one whole table, and nothing temporary
        (same,) = {*pool.map(lambda _: make([row(n, 2) for n in range(50)]), range(16))}
    assert len(list(tmp_path.iterdir())) == 2
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}, "others may read a shared cache"
    rows = [row(n, 2) for n in range(50)]
    assert same == make(rows) and len({same, make(rows[:1]), make(rows, CATEGORIES[:1])}) == 3
    empty = write_rows([], cache_file=tmp_path / "t.json", categories=CATEGORIES)
    assert len(empty) == 0 and empty.image_ids().shape == (0,) and empty.sizes_hw().shape == (0, 2)


COORDINATE = st.tuples(*(st.integers(0, 1800) for _ in range(2)), *(st.integers(1, 600) for _ in range(2)))


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(boxes=st.lists(st.lists(COORDINATE, max_size=5), min_size=1, max_size=4),
       ids=st.lists(st.integers(0, 10**12), min_size=3, max_size=3, unique=True))  # fmt: skip
def test_coco_survives_reading_and_writing(tmp_path_factory, boxes, ids):
    folder = tmp_path_factory.mktemp("coco")
    images = [image(id=10 + n, file_name=f"{n}.jpg", width=100, height=100) for n in range(len(boxes))]
    annotations = [{"id": 100 * n + k, "image_id": 10 + n, "category_id": ids[k % 3], "iscrowd": k % 2, "area": 1.5,
                    "bbox": [v / 25 for v in box]} for n, of_image in enumerate(boxes)
                   for k, box in enumerate(of_image)]  # fmt: skip
    categories = [{"id": id_, "name": f"class {id_}"} for id_ in ids]
    file = write(folder, document(images=images, annotations=annotations, categories=categories))
    table = open_dataset(file, image_dir=folder, cache_dir=folder, check_images=False)
    write_coco(table.labelled(), folder / "b.json")
    again = json.loads((folder / "b.json").read_text())
    assert [a | {"bbox": 0} for a in again["annotations"]] == [a | {"bbox": 0} for a in annotations]
    for old, new in zip(annotations, again["annotations"], strict=True):
        assert np.allclose(old["bbox"], new["bbox"], atol=1e-4)
    assert sorted(again["categories"], key=str) == sorted(categories, key=str) and again["images"] == images


def test_coco_defaults_and_unknown_keys(tmp_path):
    one = {"id": 1, "image_id": "a", "category_id": "c", "bbox": [0, 0, 10, 5.5], "segmentation": [[1, 2]], "score": 1}
    images = [image(id="a", file_name="0.png", width=40.0, height=30, licence=3)]
    (tmp_path / "images").mkdir()
    Image.new("RGB", (40, 30)).save(tmp_path / "images" / "0.png")
    file = write(tmp_path, document(images=images, annotations=[one], categories=[{"id": "c", "name": "cell"}]))
    table = open_dataset(str(file), cache_dir=tmp_path / "cache")
    objects = table.row(0)["objects"]
    assert table.row(0)["image_id"] == "a" and table.categories == (Category("c", "cell"),)
    assert objects["area"].tolist() == [55] and objects["iscrowd"].tolist() == [0] and table.problems == []


def test_the_cache_notices_what_changed(tmp_path):
    picture = tmp_path / "images" / "1.png"
    picture.parent.mkdir()
    for number in range(2):
        Image.new("RGB", (40, 30), (number, 0, 0)).save(picture.with_stem(str(number)))
    entries = [image(id=n, file_name=f"{n}.png", width=40, height=30) for n in range(2)]
    content = document(images=entries, annotations=[])

    def read(**options):
        return open_dataset(write(tmp_path, content), image_dir=picture.parent, cache_dir=tmp_path / "cache", **options)

    def stamps():
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "tables").iterdir()}

    first, before = read(), stamps()
    assert read().fingerprint == first.fingerprint and stamps() == before
    content["categories"][0]["name"] = "b"
    assert read().class_names == ["b"]
    whole = picture.read_bytes()
    picture.write_bytes(whole[:-20])
    with pytest.raises(BadInput, match="1.png .image 1.: image data truncated"):
        read()
    assert len(read(on_error="drop")) == 1
    picture.write_bytes(whole)
    assert len(read()) == 2
    with pytest.raises(BadInput, match="DETECTION_TOOLKIT_CACHE"):  # a cache that cannot be written
        open_dataset(tmp_path / "f.json", image_dir=picture.parent, cache_dir=picture)


@pytest.mark.parametrize(("source", "options", "words"), [
    ("nowhere.json", {}, "no such annotation file"),
    ("nowhere", {}, "nowhere: no such file or folder"),
    ("data.csv", {}, "no such file or folder"),
    (".", {"format": "coco"}, "cannot be read"),
    (DIRTY / "README.md", {}, "cannot tell the format"),
    ("train", {}, "the name of a split, and no data set .* the bundled data need data.format shapes"),
    ("test", {"format": "shapes"}, "choose from train, val"),
    ("train", {"format": "shapes", "name": "someone/photographs"}, "--data.format"),
    ("a.json", {"format": "voc2"}, "choose from auto, coco"),
    ("train", {"format": "hub"}, "--data.name"),
    (DIRTY / "annotations" / "instances.json", {"image_dir": "no/such"}, "no such image folder"),
    (DIRTY / "annotations" / "instances.json", {"on_error": "ignore"}, "expected 'raise' or 'drop'"),
])  # fmt: skip
def test_one_sentence_for_what_cannot_be_opened(tmp_path, source, options, words):
    with pytest.raises(BadInput, match=words) as caught:
        open_dataset(source, cache_dir=tmp_path, **options)
    assert len(caught.value.problems) == 1


def _walk(table, queue):
    def resident_mb():
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith("Rss"))

    before, extra = resident_mb(), []
    for _ in range(3):
        for index in np.random.default_rng(0).permutation(len(table)):
            table.row(int(index))
        extra.append(resident_mb() - before)
    queue.put(extra)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads resident memory from Linux's /proc")
def test_worker_memory_is_flat(tmp_path):
    rows = [row(number, 7) for number in range(5_000)]
    table = write_rows(rows, cache_file=tmp_path / "t.json", categories=CATEGORIES)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=_walk, args=(table, queue))
    worker.start()
    extra = queue.get(timeout=120)
    worker.join()
    assert extra[0] < 15 and extra[2] - extra[0] < 2, extra  # the file itself has 2 MB


def test_image_folder_is_found_beside_the_annotations(tmp_path):
    content = document(images=[image(file_name="x.jpg", width=64, height=48)], annotations=[])
    for layout in ("", "a", "images", "JPEGImages", "images/a", "annotations"):
        root = tmp_path / f"layout {layout}".replace("/", "-")
        (root / "annotations").mkdir(parents=True)
        (root / layout).mkdir(parents=True, exist_ok=True)
        shutil.copy(DIRTY / "images" / "control.jpg", root / layout / "x.jpg")
        (root / "annotations" / "a.json").write_text(json.dumps(content))
        table = open_dataset(root / "annotations" / "a.json", cache_dir=tmp_path / "cache")
        assert table.image_root == (root / layout).resolve()
