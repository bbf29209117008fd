"""Visual Genome layout and PSG: files made, read, broken."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from documents import row_of
from PIL import Image
from places import ASSETS
from visual_genome_writer import write_visual_genome

from toolkit.base.errors import BadInput
from toolkit.data.annotations import Reading
from toolkit.data.formats import open_dataset
from toolkit.data.table import Category, DetectionTable
from toolkit.data.table_cache import write_rows
from toolkit.detectors.scene_graphs.frequency import count_predicates, log_frequencies, table_graphs
from toolkit.detectors.scene_graphs.readers import open_graphs
from toolkit.detectors.scene_graphs.readers.visual_genome import (
    load_graphs,
    load_image_list,
    load_names,
    read_visual_genome,
)
from toolkit.detectors.scene_graphs.true_graphs import load_triplets

STATS = ASSETS / "vg150_stats"
VOCABULARY = json.loads((STATS / "vocab.json").read_text())
CLASSES = [entry["name"] for entry in VOCABULARY["objects"]]
PREDICATES = [entry["name"] for entry in VOCABULARY["predicates"]]


def synthetic_table(folder: Path, count: int, first_id: int = 1, seed: int = 0) -> DetectionTable:
    """Images of 1024 x 768 with whole-pixel boxes, every tenth without relations, every twentieth without boxes."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(count):
        n = 0 if i % 20 == 7 else int(rng.integers(2, 12))
        r = 0 if i % 10 == 3 or not n else int(rng.integers(1, 15))
        corner, size = rng.integers(0, 500, (n, 2)), 2 * rng.integers(4, 120, (n, 2))
        ends = np.stack([rng.permutation(n)[:2] for _ in range(r)]) if r else np.zeros((0, 2), int)
        boxes, labels = np.concatenate([corner, corner + size], 1), rng.integers(0, len(CLASSES), n)
        relations = np.column_stack([ends, rng.integers(0, len(PREDICATES), r)])
        row = row_of(first_id + i, boxes, (1024, 768), labels, relations, area=size.prod(1), id=range(1, n + 1))
        rows.append(row | {"file_name": f"{first_id + i}.jpg"})
    categories = [Category(i + 1, name) for i, name in enumerate(CLASSES)]
    options = {"categories": categories, "predicates": PREDICATES, "image_root": folder}
    return write_rows(rows, cache_file=folder / f"table_{first_id}.json", **options)


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    """800 training images and 200 test images in the VG150 layout, with the real vocabulary."""
    folder = tmp_path_factory.mktemp("vg")
    tables = synthetic_table(folder, 800, first_id=2_000_000), synthetic_table(folder, 200, 3_000_000, seed=1)
    write_visual_genome([(tables[0], 0), (tables[1], 2)], folder)
    return folder, tables


def read(folder, split, **options):
    options = {"num_val_images": 50} | options
    given = {name: options.pop(name) for name in ("check_images", "cache_dir", "on_error") if name in options}
    reading = Reading(**{"image_dir": folder / "images", "check_images": False, "cache_dir": folder / "cache"} | given)
    return read_visual_genome(folder, split, reading, **options)


def test_what_is_written_is_read(thousand):
    folder, (train, test) = thousand
    table = read(folder, "test", keep_images_without_relations=True)
    assert table.class_names == CLASSES and list(table.predicates) == PREDICATES
    originals = {test.row(i)["image_id"]: test.row(i) for i in range(len(test))}
    assert len(table) == sum(len(row["objects"]["id"]) > 0 for row in originals.values())
    for i in range(len(table)):
        row = table.row(i)
        original = originals[row["image_id"]]
        np.testing.assert_array_equal(row["objects"]["bbox"], original["objects"]["bbox"])
        for part, key in (("objects", "category"), *(("relations", k) for k in ("subject", "object", "predicate"))):
            np.testing.assert_array_equal(row[part][key], original[part][key])


def test_splits(thousand):
    folder, (train, test) = thousand
    tables = {split: read(folder, split) for split in ("train", "val", "test")}
    ids = {split: set(table.image_ids().tolist()) for split, table in tables.items()}
    assert len(ids["val"]) == 50 and not ids["val"] & ids["train"]
    rows = [train.row(i) for i in range(len(train))]
    assert ids["train"] | ids["val"] == {row["image_id"] for row in rows if len(row["relations"]["subject"])}
    assert read(folder, "train").fingerprint == tables["train"].fingerprint
    assert 0 < len(read(folder, "train", drop_non_overlapping=True)) < len(tables["train"])
    # A detector may keep images without relations; neither it nor graphs see what the other is measured on.
    options = {"format": "visual_genome", "name": folder, "image_dir": folder / "images", "check_images": False}
    options |= {"cache_dir": folder / "cache", "keep_images_without_relations": True}
    kept = {split: {*open_dataset(split, **options).image_ids().tolist()} for split in ("train:50", "val:50", "test")}
    assert kept["val:50"] == ids["val"] and kept["test"] == ids["test"]
    assert ids["train"] < kept["train:50"] and not kept["train:50"] & kept["val:50"]
    assert len(kept["train:50"]) == sum(len(row["objects"]["id"]) > 0 for row in rows) - 50
    with pytest.raises(BadInput, match=r"all of its \d+ training images .* first 5000.*: train:\d+ and val:\d+"):
        read(folder, "train", num_val_images=5000)


def test_frequencies(thousand):
    folder, _ = thousand
    train = read(folder, "train")
    relations, candidates = count_predicates(table_graphs(train), len(CLASSES) + 1, len(PREDICATES) + 1)
    filtered = read(folder, "train", drop_non_overlapping=True)
    total = sum(len(filtered.row(i)["relations"]["subject"]) for i in range(len(filtered)))
    assert relations.sum() == total and relations[0].sum() == relations[:, :, 0].sum() == 0
    share = log_frequencies(relations, candidates).double().exp() - 1e-3
    torch.testing.assert_close(share.sum(-1), torch.ones(share.shape[:2], dtype=torch.float64), rtol=0, atol=1e-4)


def test_published_triplets_are_read_without_unpickling_objects(tmp_path):
    triplets = load_triplets(STATS / "zeroshot_triplets.csv")
    assert triplets.shape == (5971, 3) and triplets.min() == 0
    assert triplets[:, :2].max() + 1 == len(CLASSES) == 150 and triplets[:, 2].max() + 1 == len(PREDICATES) == 50
    rows = torch.tensor([[1, 2, 3], [150, 1, 50]])
    torch.save(rows, tmp_path / "zeroshot_triplet.pytorch")
    np.testing.assert_array_equal(load_triplets(tmp_path / "zeroshot_triplet.pytorch"), rows - 1)
    torch.save({"rows": STATS}, tmp_path / "evil.pytorch")
    with pytest.raises(BadInput, match="evil.pytorch"):
        load_triplets(tmp_path / "evil.pytorch")
    (tmp_path / "words.csv").write_text("subject,object,predicate\nman,on,horse\n")
    with pytest.raises(BadInput, match="words.csv"):
        load_triplets(tmp_path / "words.csv")


def broken(folder: Path, tmp_path: Path, change) -> Path:
    for name in ("VG-SGG-with-attri.h5", "VG-SGG-dicts-with-attri.json", "image_data.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with h5py.File(tmp_path / "VG-SGG-with-attri.h5", "r+") as file:
        change(file)
    return tmp_path


def test_broken_files_are_explained(thousand, tmp_path):
    folder, _ = thousand
    h5_file = tmp_path / "VG-SGG-with-attri.h5"

    def no_width(file):
        file["boxes_1024"][4, 2] = 0

    def far_box(file):
        file["relationships"][0] = [10**6, 0]

    def no_key(file):
        del file["predicates"], file["labels"]

    for change, held, words in (
        (no_width, 50, "box row 4"),
        (far_box, 0, "a relation names a box outside"),
        (no_key, 0, r"(?s)(?=.*`predicates` missing).*`labels` missing"),
    ):
        with pytest.raises(BadInput, match=words):
            load_graphs(broken(folder, tmp_path, change) / h5_file.name, "train", held)
    h5_file.write_bytes(b"no hdf5")
    with pytest.raises(BadInput, match="not a readable HDF5"):
        load_graphs(h5_file, "train")
    with pytest.raises(BadInput, match="no such file"):
        load_graphs(tmp_path / "nothing.h5", "train")
    (tmp_path / "names.json").write_text(json.dumps({"label_to_idx": {"a": 0, "b": 1}}))
    with pytest.raises(BadInput, match=r"(?s)(?=.*`label_to_idx` are not 1 \.\. 2).*`predicate_to_idx` missing"):
        load_names(tmp_path / "names.json")


def test_unknown_ids_drop_the_image_only_if_asked(thousand, tmp_path):
    def unknown(file):
        file["labels"][int(file["img_to_first_box"][0])] = 151
        file["predicates"][int(file["img_to_first_rel"][0])] = 77

    place = broken(thousand[0], tmp_path, unknown)
    with pytest.raises(BadInput, match=r"class 151 is not defined[\s\S]*predicate 77"):
        read(place, "train", num_val_images=0)
    table = read(place, "train", num_val_images=0, on_error="drop")
    assert 2_000_000 not in table.image_ids() and len(table) > 600


def test_image_list_must_fit(thousand, tmp_path):
    folder, _ = thousand
    assert len(load_image_list(folder / "image_data.json", tmp_path, 1000)) == 1000
    with pytest.raises(BadInput, match="999 images"):
        load_image_list(folder / "image_data.json", tmp_path, 999)
    for content in ({"image_id": 1}, [{"image_id": 1, "width": 8}], [1]):
        (tmp_path / "image_data.json").write_text(json.dumps(content))
        with pytest.raises(BadInput, match="a list"):
            load_image_list(tmp_path / "image_data.json", tmp_path, 1)


def test_images_are_checked(thousand, tmp_path):
    folder, _ = thousand
    (folder / "images").mkdir(exist_ok=True)
    for image_id in (3_000_000, 3_000_001):
        Image.new("RGB", (1024, 768)).save(folder / "images" / f"{image_id}.jpg")
    table = read(folder, "test", check_images=True, on_error="drop", cache_dir=tmp_path)
    assert table.image_ids().tolist() == [3_000_000, 3_000_001]
    assert any("3000002" in problem.file for problem in table.problems)


def test_psg(tmp_path):
    def entry(image_id, relations):
        boxes = [{"bbox": [1, 2, 11, 22], "category_id": 0}, {"bbox": [5, 5, 30, 40], "category_id": 1}]
        name = {"image_id": image_id, "file_name": f"val/{image_id}.jpg", "width": 64, "height": 48}
        return name | {"annotations": boxes, "segments_info": [], "relations": relations}

    def opened(split, **images):
        (tmp_path / "psg.json").write_text(json.dumps(document | {"data": [*(data | images).values()]}))
        options = {"check_images": False, "cache_dir": tmp_path / "cache"}
        return open_graphs(f"{split}:1", Reading(tmp_path, format="psg", name=tmp_path / "psg.json", **options))

    data = {f"i{i}": entry(str(i), [[0, 1, 2], [1, 0, 0]]) for i in range(4)}
    document = {"test_image_ids": ["2"], "thing_classes": ["cat"], "stuff_classes": ["sky"]}
    document |= {"predicate_classes": ["over", "in", "on"]}
    tables = {split: opened(split) for split in ("train", "val", "test")}
    assert {s: t.image_ids().tolist() for s, t in tables.items()} == {"train": ["1", "3"], "val": ["0"], "test": ["2"]}
    row = tables["val"].row(0)
    assert tables["val"].class_names == ["cat", "sky"] and tables["val"].predicates == ("over", "in", "on")
    np.testing.assert_array_equal(row["objects"]["bbox"], [[1, 2, 11, 22], [5, 5, 30, 40]])
    assert row["relations"]["predicate"].tolist() == [2, 0] and row["relations"]["subject"].tolist() == [0, 1]
    with pytest.raises(BadInput) as caught:
        opened("train", i1=entry("1", [[0, 7, 1], [0, 1, 9], [0, 0, 1]]))
    for words in ("predicate 9", "position 7 of 2", "one annotation"):  # the last: a relation of an object to itself
        assert words in str(caught.value)
    with pytest.raises(BadInput) as caught:
        opened("train", i1=entry("1", [[0, 1]]), i3={"image_id": "3", "annotations": []})
    assert "(image 1): relation [0, 1]" in str(caught.value) and "(image 3): key `relations`" in str(caught.value)
    del document["thing_classes"], document["stuff_classes"]
    assert opened("train").class_names == ["class 0", "class 1"]
    data["i1"]["annotations"][0]["category_id"] = [0]
    with pytest.raises(BadInput, match="image 1, annotation"):
        opened("train")
