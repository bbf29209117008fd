"""The layout of Visual Genome: files made, read, divided into splits, broken."""

import json
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from places import ASSETS
from visual_genome_data import CLASSES, PREDICATES, synthetic_table
from visual_genome_writer import write_visual_genome

from toolkit.base.errors import BadInput
from toolkit.data.annotations import Reading
from toolkit.data.formats import open_dataset
from toolkit.detectors.scene_graphs.frequency import (
    count_predicates,
    log_frequencies,
    table_graphs,
)
from toolkit.detectors.scene_graphs.readers.visual_genome import (
    load_graphs,
    load_image_list,
    load_names,
    read_visual_genome,
)
from toolkit.detectors.scene_graphs.true_graphs import load_triplets

TRIPLETS = ASSETS / "vg150_stats" / "zeroshot_triplets.csv"
NUM_VAL = 20


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Training images and test images, with the real vocabulary."""
    folder = tmp_path_factory.mktemp("vg_tables")
    return synthetic_table(folder, 160, first_id=2_000_000), synthetic_table(folder, 60, 3_000_000, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tables):
    folder = tmp_path_factory.mktemp("vg")
    write_visual_genome([(tables[0], 0), (tables[1], 2)], folder)
    return folder


def read(folder, split, check_images=False, on_error="raise", **options):
    reading = Reading(
        image_dir=folder / "images",
        check_images=check_images,
        cache_dir=folder / "cache",
        on_error=on_error,
    )
    return read_visual_genome(folder, split, reading, **{"num_val_images": NUM_VAL} | options)


def ids_of(table) -> set[int]:
    return set(table.image_ids().tolist())


# ---- what is read ----------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(folder, tables):
    table = read(folder, "test", keep_images_without_relations=True)
    assert table.class_names == CLASSES
    assert list(table.predicates) == PREDICATES
    rows = map(tables[1].row, range(len(tables[1])))
    originals = {row["image_id"]: row for row in rows if len(row["objects"]["id"])}
    assert len(table) == len(originals)
    for index in range(len(table)):
        row = table.row(index)
        original = originals[row["image_id"]]
        for key in ("bbox", "category"):
            np.testing.assert_array_equal(row["objects"][key], original["objects"][key])
        for key in ("subject", "object", "predicate"):
            np.testing.assert_array_equal(row["relations"][key], original["relations"][key])


def test_validation_images_are_the_first_training_images_with_relations(folder, tables):
    ids = {split: ids_of(read(folder, split)) for split in ("train", "val", "test")}
    rows = map(tables[0].row, range(len(tables[0])))
    related = [row["image_id"] for row in rows if len(row["relations"]["subject"])]
    assert ids["val"] == set(related[:NUM_VAL])
    assert ids["train"] == set(related[NUM_VAL:])
    assert read(folder, "train").fingerprint == read(folder, "train").fingerprint


def test_relations_between_boxes_apart_may_be_dropped(folder):
    assert 0 < len(read(folder, "train", drop_non_overlapping=True)) < len(read(folder, "train"))


def test_a_detector_trains_on_images_without_relations_too(folder, tables):
    """Neither it nor graphs see what the other is measured on."""
    options = {
        "format": "visual_genome",
        "name": folder,
        "image_dir": folder / "images",
        "check_images": False,
    }
    options |= {"cache_dir": folder / "cache", "keep_images_without_relations": True}
    splits = (f"train:{NUM_VAL}", f"val:{NUM_VAL}", "test")
    train, val, test = (ids_of(open_dataset(split, **options)) for split in splits)
    assert val == ids_of(read(folder, "val"))
    assert test == ids_of(read(folder, "test"))
    assert ids_of(read(folder, "train")) < train
    assert not train & val
    rows = map(tables[0].row, range(len(tables[0])))
    assert len(train) == sum(len(row["objects"]["id"]) > 0 for row in rows) - NUM_VAL


def test_too_many_validation_images_are_refused(folder):
    with pytest.raises(
        BadInput,
        match=r"all of its \d+ training images .* first 5000.*: train:\d+ and val:\d+",
    ):
        read(folder, "train", num_val_images=5000)


def test_frequencies_are_those_of_the_relations_that_overlap(folder):
    relations, candidates = count_predicates(table_graphs(read(folder, "train")), len(CLASSES) + 1, len(PREDICATES) + 1)
    filtered = read(folder, "train", drop_non_overlapping=True)
    assert relations.sum() == len(filtered.relations())
    assert relations[0].sum() == relations[:, :, 0].sum() == 0
    share = log_frequencies(relations, candidates).double().exp() - 1e-3
    expected = torch.ones(share.shape[:2], dtype=torch.float64)
    torch.testing.assert_close(share.sum(-1), expected, rtol=0, atol=1e-4)


# ---- published triplets ----------------------------------------------------------------------------------------------


def test_published_triplets_are_read():
    triplets = load_triplets(TRIPLETS)
    assert triplets.shape == (5971, 3)
    assert triplets.min() == 0
    assert triplets[:, :2].max() + 1 == len(CLASSES) == 150
    assert triplets[:, 2].max() + 1 == len(PREDICATES) == 50


def test_triplets_of_torch_are_read_without_unpickling_objects(tmp_path):
    rows = torch.tensor([[1, 2, 3], [150, 1, 50]])
    torch.save(rows, tmp_path / "zeroshot_triplet.pytorch")
    np.testing.assert_array_equal(load_triplets(tmp_path / "zeroshot_triplet.pytorch"), rows - 1)
    torch.save({"rows": TRIPLETS}, tmp_path / "evil.pytorch")
    with pytest.raises(BadInput, match="evil.pytorch"):
        load_triplets(tmp_path / "evil.pytorch")
    (tmp_path / "words.csv").write_text("subject,object,predicate\nman,on,horse\n")
    with pytest.raises(BadInput, match="words.csv"):
        load_triplets(tmp_path / "words.csv")


# ---- broken files ----------------------------------------------------------------------------------------------------

H5 = "VG-SGG-with-attri.h5"


@pytest.fixture
def copied(folder, tmp_path) -> Path:
    for name in (H5, "VG-SGG-dicts-with-attri.json", "image_data.json"):
        shutil.copy(folder / name, tmp_path)
    return tmp_path


def break_file(file: h5py.File, fault: str) -> None:
    if fault == "no width":
        file["boxes_1024"][4, 2] = 0
    elif fault == "far box":
        file["relationships"][0] = [10**6, 0]
    else:
        del file["predicates"], file["labels"]


@pytest.mark.parametrize(
    ("fault", "num_val", "words"),
    [
        ("no width", NUM_VAL, "box row 4"),
        ("far box", 0, "a relation names a box outside"),
        ("no keys", 0, r"(?s)(?=.*`predicates` missing).*`labels` missing"),
    ],
)
def test_arrays_that_contradict_each_other_are_explained(copied, fault, num_val, words):
    with h5py.File(copied / H5, "r+") as file:
        break_file(file, fault)
    with pytest.raises(BadInput, match=words):
        load_graphs(copied / H5, "train", num_val)


def test_other_files_are_refused_in_a_sentence(tmp_path):
    (tmp_path / H5).write_bytes(b"no hdf5")
    with pytest.raises(BadInput, match="not a readable HDF5"):
        load_graphs(tmp_path / H5, "train")
    with pytest.raises(BadInput, match="no such file"):
        load_graphs(tmp_path / "nothing.h5", "train")
    with pytest.raises(BadInput, match="expected train, val or test"):
        load_graphs(tmp_path / H5, "mine")
    (tmp_path / "names.json").write_text(json.dumps({"label_to_idx": {"a": 0, "b": 1}}))
    with pytest.raises(
        BadInput,
        match=r"(?s)(?=.*`label_to_idx` are not 1 \.\. 2).*`predicate_to_idx` missing",
    ):
        load_names(tmp_path / "names.json")


def test_unknown_ids_drop_the_image_only_if_asked(copied):
    with h5py.File(copied / H5, "r+") as file:
        file["labels"][int(file["img_to_first_box"][0])] = 151
        file["predicates"][int(file["img_to_first_rel"][0])] = 77
    with pytest.raises(BadInput, match=r"class 151 is not defined[\s\S]*predicate 77"):
        read(copied, "train", num_val_images=0)
    table = read(copied, "train", on_error="drop", num_val_images=0)
    assert 2_000_000 not in table.image_ids()
    assert len(table) > 120


def test_the_image_list_must_fit(folder, tmp_path):
    assert len(load_image_list(folder / "image_data.json", tmp_path, 220)) == 220
    with pytest.raises(BadInput, match="219 images"):
        load_image_list(folder / "image_data.json", tmp_path, 219)
    for content in ({"image_id": 1}, [{"image_id": 1, "width": 8}], [1]):
        (tmp_path / "image_data.json").write_text(json.dumps(content))
        with pytest.raises(BadInput, match="a list"):
            load_image_list(tmp_path / "image_data.json", tmp_path, 1)


def test_images_are_checked(copied):
    (copied / "images").mkdir()
    for image_id in (3_000_000, 3_000_001):
        Image.new("RGB", (1024, 768)).save(copied / "images" / f"{image_id}.jpg")
    table = read(copied, "test", check_images=True, on_error="drop")
    assert table.image_ids().tolist() == [3_000_000, 3_000_001]
    assert any("3000002" in problem.file for problem in table.problems)
