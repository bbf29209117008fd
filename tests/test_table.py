"""The Arrow table and the COCO reader.   Run: pytest tests/test_table.py"""

import json
import math
import multiprocessing
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from toolkit.data.decoding import decode_image
from toolkit.data.formats import open_dataset
from toolkit.data.formats.coco import read_coco, write_coco
from toolkit.data.table import Category
from toolkit.data.table_cache import open_table, write_rows
from toolkit.errors import BadInput

BCCD = Path(os.environ.get("DETECTION_TOOLKIT_BCCD") or Path(__file__).parents[2] / "shared" / "data" / "bccd")
DIRTY = Path(__file__).parent / "data" / "dirty"


def row(image_id, count, **extra):
    box = np.arange(4 * count, dtype=np.float32).reshape(count, 4)
    objects = {"id": list(range(count)), "bbox": box, "category": [k % 2 for k in range(count)],
               "area": [float(k) for k in range(count)], "iscrowd": [k % 2 for k in range(count)]}
    objects["bbox"] = [tuple(map(float, b)) for b in box]
    relations = {"subject": [0] * (count > 1), "object": [1] * (count > 1), "predicate": [2] * (count > 1)}
    return {"image_id": image_id, "file_name": f"{image_id}.jpg", "width": 40, "height": 30 + count,
            "objects": objects, "relations": relations, **extra}


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
    counts = "4 images with 6 boxes then, 4 images with 6 boxes now"
    assert new.changed_since(identity) == f"{counts}; of the images 1 gone, 1 new, 1 with other boxes or labels"
    assert new.head(3).changed_since(identity).endswith("of the images 1 gone, 1 with other boxes or labels")
    assert new.changed_since(identity | {"file": "gone.arrow"}) == counts


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


def test_others_may_read_a_shared_cache(tmp_path):
    write_rows([row(1, 1)], cache_file=tmp_path / "t.json", categories=CATEGORIES)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}


def test_several_batches_selections_and_embedded_images(tmp_path, monkeypatch):
    monkeypatch.setattr("toolkit.data.table_cache.BATCH_ROWS", 3)
    rows = [row(number, number % 4, image=bytes([number])) for number in range(10)]
    table = write_rows(rows, cache_file=tmp_path / "t.json", categories=CATEGORIES)
    assert [table.row(i)["image"] for i in range(10)] == [bytes([i]) for i in range(10)]
    assert table.image_source(table.row(4)) == bytes([4])
    head = table.head(5)
    assert len(head) == 5 and head.image_ids().tolist() == list(range(5)) and head.fingerprint != table.fingerprint
    assert head.row(4)["image_id"] == 4 and head.num_boxes().tolist() == [0, 1, 2, 3, 0]
    assert table.head(99) is table
    copy = pickle.loads(pickle.dumps(head))  # noqa: S301 (pickled here, as for a spawned worker)
    assert len(copy) == 5 and copy.row(4)["image_id"] == 4 and len(pickle.dumps(head)) < 1000
    assert datasets.Dataset.from_file(str(table.arrow_file))[9]["image_id"] == 9


def test_fingerprint_is_of_the_content(tmp_path):
    make = lambda name, rows, categories=CATEGORIES: write_rows(  # noqa: E731
        rows, cache_file=tmp_path / name, categories=categories).fingerprint
    same = make("a.json", [row(1, 2)])
    assert same == make("b.json", [row(1, 2)])
    assert same != make("c.json", [row(1, 1)]) and same != make("d.json", [row(1, 2)], CATEGORIES[:1])


def test_an_empty_table(tmp_path):
    table = write_rows([], cache_file=tmp_path / "t.json", categories=CATEGORIES)
    assert len(table) == 0 and table.image_ids().shape == (0,) and table.sizes_hw().shape == (0, 2)


def test_writers_at_once_leave_one_whole_table(tmp_path):
    def write(_):
        return write_rows([row(n, 2) for n in range(50)], cache_file=tmp_path / "t.json", categories=CATEGORIES)

    with ThreadPoolExecutor(8) as pool:
        assert len({table.fingerprint for table in pool.map(write, range(16))}) == 1
    assert len(list(tmp_path.iterdir())) == 2  # nothing temporary is left


def picture_folder(folder, count):
    folder.mkdir()
    for number in range(count):
        Image.new("RGB", (40, 30), (number, 0, 0)).save(folder / f"{number}.png")


COORDINATE = st.tuples(*(st.integers(0, 1800) for _ in range(2)), *(st.integers(1, 600) for _ in range(2)))


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(boxes=st.lists(st.lists(COORDINATE, max_size=5), min_size=1, max_size=4),
       ids=st.lists(st.integers(0, 10**12), min_size=3, max_size=3, unique=True))  # fmt: skip
def test_coco_survives_reading_and_writing(tmp_path_factory, boxes, ids):
    """Gapped and unordered category ids come back; boxes to float32's precision."""
    folder = tmp_path_factory.mktemp("coco")
    images = [{"id": 10 + n, "file_name": f"{n}.jpg", "width": 100, "height": 100} for n in range(len(boxes))]
    annotations = [{"id": 100 * n + k, "image_id": 10 + n, "category_id": ids[k % 3], "iscrowd": k % 2, "area": 1.5,
                    "bbox": [v / 25 for v in box]} for n, of_image in enumerate(boxes)
                   for k, box in enumerate(of_image)]
    document = {"images": images, "annotations": annotations,
                "categories": [{"id": id_, "name": f"class {id_}"} for id_ in ids]}
    (folder / "a.json").write_text(json.dumps(document))
    table = read_coco(folder / "a.json", folder, cache_dir=folder, check_images=False)
    write_coco(table.labelled(), folder / "b.json")
    again = json.loads((folder / "b.json").read_text())
    assert [a | {"bbox": 0} for a in again["annotations"]] == [a | {"bbox": 0} for a in annotations]
    for old, new in zip(annotations, again["annotations"], strict=True):
        assert np.allclose(old["bbox"], new["bbox"], atol=1e-4)
    assert sorted(again["categories"], key=str) == sorted(document["categories"], key=str)
    assert again["images"] == images


def test_coco_defaults_and_unknown_keys(tmp_path):
    document = {"images": [{"id": "a", "file_name": "0.png", "width": 40.0, "height": 30, "licence": 3}],
                "annotations": [{"id": 1, "image_id": "a", "category_id": "c", "bbox": [0, 0, 10, 5.5],
                                 "segmentation": [[1, 2, 3]], "score": 1}],
                "categories": [{"id": "c", "name": "cell"}]}
    picture_folder(tmp_path / "images", 1)
    (tmp_path / "a.json").write_text(json.dumps(document))
    table = open_dataset(str(tmp_path / "a.json"), cache_dir=tmp_path / "cache")
    objects = table.row(0)["objects"]
    assert table.row(0)["image_id"] == "a" and table.categories == (Category("c", "cell"),)
    assert objects["area"].tolist() == [55] and objects["iscrowd"].tolist() == [0] and table.problems == []


def test_the_cache_notices_what_changed(tmp_path):
    picture_folder(tmp_path / "images", 2)
    entries = [{"id": n, "file_name": f"{n}.png", "width": 40, "height": 30} for n in range(2)]
    document = {"images": entries, "annotations": [], "categories": [{"id": 1, "name": "a"}]}
    file = tmp_path / "a.json"

    def read(**options):
        file.write_text(json.dumps(document))
        return read_coco(file, tmp_path / "images", cache_dir=tmp_path / "cache", **options)

    first = read()
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "tables").iterdir()}
    assert read().fingerprint == first.fingerprint
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "tables").iterdir()}
    document["categories"][0]["name"] = "b"
    assert read().class_names == ["b"]
    whole = (tmp_path / "images" / "1.png").read_bytes()
    (tmp_path / "images" / "1.png").write_bytes(whole[:-20])
    with pytest.raises(BadInput, match="1.png .image 1.: image data truncated"):
        read()
    assert len(read(on_error="drop")) == 1
    (tmp_path / "images" / "1.png").write_bytes(whole)
    assert len(read()) == 2


@pytest.mark.parametrize(("source", "options", "words"), [
    ("nowhere.json", {}, "no such annotation file"),
    (".", {"format": "coco"}, "cannot be read"),
    ("data.csv", {}, "cannot tell the format"),
    ("train", {}, "the bundled data needs format 'shapes'"),
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


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="DETECTION_TOOLKIT_CACHE"):
        read_coco(DIRTY / "broken" / "utf8_bom.json", DIRTY / "images", cache_dir=tmp_path / "file")


def resident_mb(part):
    """Resident memory that this process alone holds, or all of it, in MB."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(part):
            return int(line.split()[1]) / 1e3
    raise AssertionError(part)


def _walk(table, queue):
    before, extra = resident_mb("Rss"), []
    for _ in range(3):
        for index in np.random.default_rng(0).permutation(len(table)):
            table.row(int(index))
        extra.append(resident_mb("Rss") - before)
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


@pytest.mark.skipif(not BCCD.is_dir(), reason="no BCCD data: set DETECTION_TOOLKIT_BCCD to its folder")
@pytest.mark.parametrize(("split", "images", "boxes"), [("train", 205, 2804), ("val", 87, 1137), ("test", 72, 945)])
def test_bccd(tmp_path, split, images, boxes):
    table = open_dataset(BCCD / "annotations" / f"{split}.json", cache_dir=tmp_path)
    assert len(table) == images and table.num_boxes().sum() == boxes
    assert table.class_names == ["Platelets", "RBC", "WBC"] and [c.id for c in table.categories] == [1, 2, 3]
    assert decode_image(table.image_source(table.row(0))).shape == (3, 480, 640)
    assert math.prod(table.sizes_hw()[0]) == 640 * 480
    assert all(p.severity == "warning" and "not listed" in p.message for p in table.problems)  # the other splits


def test_image_folder_is_found_beside_the_annotations(tmp_path):
    for layout in ("", "a", "images", "JPEGImages", "images/a", "annotations"):
        root = tmp_path / f"layout {layout}".replace("/", "-")
        (root / "annotations").mkdir(parents=True)
        (root / layout).mkdir(parents=True, exist_ok=True)
        shutil.copy(DIRTY / "images" / "control.jpg", root / layout / "x.jpg")
        document = {"images": [{"id": 1, "file_name": "x.jpg", "width": 64, "height": 48}], "annotations": [],
                    "categories": [{"id": 1, "name": "a"}]}
        (root / "annotations" / "a.json").write_text(json.dumps(document))
        table = read_coco(root / "annotations" / "a.json", cache_dir=tmp_path / "cache")
        assert table.image_root == (root / layout).resolve()
