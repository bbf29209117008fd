"""Data sets of the `datasets` library: read whole, or streamed by row groups of their Parquet files."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
from samples import shapes_table
from small_data import SIZE, boxes_of, coco_text, picture, write_text

from toolkit.base.errors import BadInput
from toolkit.data import image_sources
from toolkit.data.dataset import DetectionDataset
from toolkit.data.formats import hub_folder, open_dataset
from toolkit.data.image_sources import open_sources
from toolkit.data.layout import Layout
from toolkit.data.pipeline import blocks_of, loader_of_settings
from toolkit.data.sampling import (
    MIXED_BLOCKS,
    EpochSampler,
    SampleKey,
    block_order,
    rank_runs,
)
from toolkit.data.table import Category
from toolkit.data.transforms.geometry import exact_transform
from toolkit.run.settings import DataConfig
from toolkit.tools.doctor.near_duplicates import hold_out
from toolkit.tools.writers import write_folder


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    datasets.disable_progress_bars()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")


def rows_of(file: Path, cache: Path) -> datasets.Dataset:
    rows = datasets.Dataset.from_parquet(str(file), cache_dir=str(cache / "hf"))
    return rows.cast_column("image", datasets.Image(decode=False))


# ---- data sets that are read whole -----------------------------------------------------------------------------------

CATEGORIES = (Category(0, "cell"), Category(1, "plate"))
BOXES = [[[1, 2, 4, 6]], [], [[0, 0, 20, 10], [5, 5, 7, 7]]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> datasets.Dataset:
    """Three images with 1, 0 and 2 boxes, as the toolkit writes them."""
    folder = tmp_path_factory.mktemp("rows")
    names = [f"{number}.png" for number in range(3)]
    annotations = []
    for number, (image, label, xywh) in enumerate(((1, 1, [1, 2, 3, 4]), (3, 0, [0, 0, 20, 10]), (3, 1, [5, 5, 2, 2]))):
        annotations.append({"id": number, "image_id": image, "category_id": label, "bbox": xywh})
    for seed, name in enumerate(names):
        picture(folder / name, seed)
    categories = [{"id": category.id, "name": category.name} for category in CATEGORIES]
    file = write_text(
        folder / "a.json",
        coco_text(names, annotations=annotations, categories=categories),
    )
    write_folder(open_dataset(file, cache_dir=folder / "cache"), folder / "set", "train", "hub")
    return rows_of(next((folder / "set").rglob("*.parquet")), folder)


@pytest.fixture
def opened(tmp_path):
    return partial(open_dataset, "train", name=str(tmp_path / "set"), cache_dir=tmp_path / "cache")


def check_rows(table, rows, ids: list) -> None:
    assert table.image_ids().tolist() == ids
    assert boxes_of(table) == BOXES
    assert table.row(2)["objects"]["category"].tolist() == [0, 1]
    assert table.image_root is None
    assert table.sizes_hw().tolist() == [[*SIZE[::-1]]] * 3
    assert [table.row(index)["image"] for index in range(3)] == [row["image"]["bytes"] for row in rows]


def test_a_data_set_saved_to_disk_is_read_and_cached(rows, opened, tmp_path):
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "set")
    for _ in range(2):
        table = opened()
        check_rows(table, rows, [1, 2, 3])
        assert table.categories == CATEGORIES
    with pytest.raises(BadInput, match="choose from train"):
        open_dataset("val", **opened.keywords)


def test_sizes_ids_and_names_may_be_left_out(rows, opened, tmp_path):
    listed = rows.remove_columns(["image_id", "width", "height"]).to_list()
    for row in listed:
        del row["objects"]["id"]
    data = datasets.Dataset.from_list(listed).cast_column("image", datasets.Image())
    (tmp_path / "set").mkdir()
    data.to_parquet(tmp_path / "set" / "train-0.parquet")
    table = opened()
    check_rows(table, rows, [0, 1, 2])
    assert [table.row(index)["objects"]["id"].tolist() for index in range(3)] == [
        [1],
        [],
        [2, 3],
    ]
    assert table.categories == (Category(0, "0"), Category(1, "1"))
    assert "not a ClassLabel" in table.problems[0].message


def test_objects_may_be_a_list(rows, opened, tmp_path):
    listed = rows.to_list()
    for row in listed:
        columns = row["objects"]
        row["objects"] = [dict(zip(columns, one, strict=True)) for one in zip(*columns.values(), strict=True)]
    data = datasets.Dataset.from_list(listed).cast_column("image", datasets.Image())
    data.save_to_disk(tmp_path / "set")
    check_rows(opened(), rows, [1, 2, 3])


def test_defects_are_listed_and_dropped(rows, opened, tmp_path):
    listed = rows.to_list()
    for number in (4, 5, 6):
        listed.append(
            {
                **listed[0],
                "image_id": number,
                "objects": {key: [] for key in listed[0]["objects"]},
            }
        )
    png = listed[0]["image"]["bytes"]
    listed[3]["image"] = {"bytes": png[:-20]}
    listed[4]["image"] = {"bytes": b""}
    boxes = {
        "bbox": [[1, 1, -2, 2], [1, 1, np.nan, 2]],
        "id": [40, 41],
        "category": [0, 1],
    }
    listed[5] |= {
        "width": 90,
        "objects": boxes | {"area": [4.0, 4.0], "iscrowd": [False, False]},
    }
    datasets.Dataset.from_list(listed, features=rows.features).save_to_disk(tmp_path / "set")
    with pytest.raises(BadInput) as caught:
        opened()
    for words in (
        "image 4): image data truncated",
        "image 5): empty image file",
        "image 6): size differs",
        "annotation 40): negative width",
        "annotation 41): non-finite",
    ):
        assert words in str(caught.value)
    check_rows(opened(on_error="drop"), rows, [1, 2, 3])


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["image"], "no `objects` column; the columns are image"),
        (["objects"], "no image column"),
        (["image", "boxes"], "expected `bbox` and `category`"),
    ],
)
def test_other_columns_are_named(rows, opened, tmp_path, columns, words):
    kept = [name for name in rows.column_names if name in columns]
    data = rows.select_columns(kept)
    if "boxes" in columns:
        data = data.add_column("objects", [{"bbox": [[1, 2, 3, 4]]}] * 3)
    data.save_to_disk(tmp_path / "set")
    with pytest.raises(BadInput, match=words):
        opened()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("someone/something", "hub cannot be reached.*local folder.*HF_HUB_OFFLINE"),
        ("./nowhere", "cannot be loaded"),
    ],
)
def test_without_network_there_is_one_clear_sentence(tmp_path, name, words):
    with pytest.raises(BadInput, match=words) as caught:
        open_dataset("train", name=name, cache_dir=tmp_path)
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)


# ---- relations, as SGG-Benchmark publishes PSG, VG150 and IndoorVG ---------------------------------------------------

RELATION = {"id": 0, "subject_id": 8, "predicate_id": 5, "object_id": 7}
NAMES = {
    "categories": [{"id": 0, "name": "cell"}, {"id": 3, "name": "plate"}],
    "rel_categories": [{"id": 0, "name": "in"}, {"id": 5, "name": "beside"}],
}


def write_graphs(folder: Path, rows, names: dict | None = NAMES, **relation) -> None:
    """Write a row whose ids are the data set's; the names stand beside it, unless they are None."""
    shared = {"area": 12.0, "iscrowd": 0, "segmentation": []}
    objects = [
        {"id": 7, "category_id": 3, "bbox": [1.0, 2.0, 3.0, 4.0], **shared},
        {"id": 8, "category_id": 0, "bbox": [5.0, 5.0, 2.0, 2.0], **shared},
    ]
    row = {
        "image": rows[0]["image"],
        "image_id": 50,
        "width": SIZE[0],
        "height": SIZE[1],
        "objects": objects,
    }
    related = [
        row | {"relations": [RELATION | relation]},
        row | {"image_id": 51, "objects": [], "relations": []},
    ]
    (folder / "set" / "data").mkdir(parents=True)
    data = datasets.Dataset.from_list(related).cast_column("image", datasets.Image())
    data.to_parquet(folder / "set" / "data" / "train-00000-of-00001.parquet")
    if names is not None:
        (folder / "set" / "categories.json").write_text(json.dumps(names))


@pytest.mark.parametrize("streaming", [False, True])
def test_relations_and_names_are_read(rows, opened, tmp_path, streaming):
    write_graphs(tmp_path, rows)
    table = opened(streaming=streaming)
    assert table.categories == (Category(0, "cell"), Category(3, "plate"))
    assert table.predicates == ("in", "beside")
    row = table.row(0)
    assert row["objects"]["category"].tolist() == [1, 0]
    assert row["objects"]["bbox"].tolist()[0] == [1, 2, 4, 6]
    assert [row["relations"][key].tolist() for key in ("subject", "object", "predicate")] == [[1], [0], [1]]
    assert len(table) == 2
    assert not table.problems


def test_relations_without_names_are_told(rows, opened, tmp_path):
    write_graphs(tmp_path, rows, None)
    table = opened()
    assert table.predicates == ("5",)
    assert table.class_names == ["0", "3"]
    of_classes, of_predicates = (problem.message for problem in table.problems)
    assert "categories.json; classes" in of_classes
    assert "predicates are called by" in of_predicates


@pytest.mark.parametrize(
    ("predicate", "names", "words"),
    [
        (9, NAMES, "predicate 9 is not defined"),
        (5, {"categories": 3}, "categories.json: `categories` is not a list"),
    ],
)
def test_unknown_predicates_and_other_names_are_refused(rows, opened, tmp_path, predicate, names, words):
    write_graphs(tmp_path, rows, names, predicate_id=predicate)
    with pytest.raises(BadInput, match=words):
        opened()


def test_relations_with_other_keys_are_left_out_and_told(rows, opened, tmp_path):
    data = rows.add_column("relations", [[{"from": 8, "to": 7}]] * 3)
    data.save_to_disk(tmp_path / "set")
    table = opened()
    assert not table.predicates
    assert "`relations` without the keys subject_id" in table.problems[0].message


# ---- images that are left in their Parquet files ---------------------------------------------------------------------

GROUP = 4  # images of a row group
COUNT = 22
SETTINGS = DataConfig(image_size=32, batch_size_per_device=4, workers=0)


def write_shards(table, folder: Path, files: int) -> None:
    """Write the table in so many Parquet files with row groups of `GROUP` images."""
    write_folder(table, folder / "whole", "train", "hub")
    rows = rows_of(next((folder / "whole").rglob("*.parquet")), folder)
    (folder / "data").mkdir(exist_ok=True)
    for number in range(files):
        part = rows.shard(files, number, contiguous=True)
        part.to_parquet(
            str(folder / "data" / f"train-{number:05d}-of-{files:05d}.parquet"),
            batch_size=GROUP,
        )


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return shapes_table(tmp_path_factory.mktemp("shapes"), COUNT, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, shapes):
    """The shapes as three files with row groups of 4, 4 (or 3) images."""
    folder = tmp_path_factory.mktemp("shards")
    write_shards(shapes, folder, 3)
    return folder


@pytest.fixture
def table(folder, tmp_path):
    return open_dataset("train", path=folder, streaming=True, cache_dir=tmp_path)


def test_streamed_data_are_those_of_the_cache(folder, table, tmp_path):
    plain = open_dataset("train", path=folder, cache_dir=tmp_path / "plain")
    assert table.categories == plain.categories
    assert boxes_of(table) == boxes_of(plain)
    assert "image" not in table.columns.images
    assert "image" in plain.columns.images
    for index in range(COUNT):
        assert table.image_source(table.row(index)).read_bytes() == plain.row(index)["image"]
    again = open_dataset("train", path=folder, streaming=True, cache_dir=tmp_path)
    assert again.fingerprint == table.fingerprint
    assert open_sources(table.image_root.specs()) == table.image_root


def test_streamed_data_are_divided(table, tmp_path):
    rest, held = hold_out(table, 0.3, tmp_path)
    assert len(rest) + len(held) == COUNT
    assert blocks_of(rest) is not None
    assert held.image_source(held.row(0)).read_bytes()


def test_a_file_that_changed_is_read_anew(shapes, tmp_path):
    for count in (9, 8):
        write_shards(shapes.head(count), tmp_path, 1)
        table = open_dataset("train", path=tmp_path, streaming=True, cache_dir=tmp_path / "cache")
        assert len(table) == count
    next((tmp_path / "data").iterdir()).unlink()
    with pytest.raises(BadInput, match="cannot be read"):
        list(loader_of_settings(table, SETTINGS, seed=0, stride=1)[1])


def test_an_epoch_reads_each_row_group_once_and_each_rank_its_own(table, monkeypatch):
    blocks = blocks_of(table)
    assert np.bincount(blocks).max() <= GROUP
    assert len(set(blocks)) == 6
    opened = []
    read = image_sources.open_shard
    monkeypatch.setattr(image_sources, "open_shard", lambda url: opened.append(url) or read(url))
    seen = []
    for rank in range(2):
        sampler = EpochSampler(len(blocks), 2, rank, 2, seed=3, blocks=blocks)
        image_sources._row_group.cache_clear()
        keys = [key for batch in sampler for key in batch]
        seen.append({blocks[key.index] for key in keys})
        for key in keys:
            table.image_source(table.row(key.index)).read_bytes()
    assert len(seen[0] & seen[1]) <= MIXED_BLOCKS, "those where one rank ends and the next begins"
    assert len(opened) == len(seen[0]) + len(seen[1])


def test_ranks_walk_through_parts_of_their_own():
    blocks = np.repeat(np.arange(12), 5)
    order = block_order(blocks, np.random.default_rng(0))
    assert sorted(order) == list(range(60))
    for first in range(0, 60, 5 * MIXED_BLOCKS):
        assert len(set(blocks[order[first : first + 5 * MIXED_BLOCKS]])) == MIXED_BLOCKS
    batches = rank_runs(order, 5, 3).reshape(4, 3, 5)
    assert batches.transpose(1, 0, 2).reshape(-1).tolist() == list(order)


def test_rare_classes_come_more_often_and_a_loader_gives_the_images(table):
    sampler, loader = loader_of_settings(table, replace(SETTINGS, repeat_factor=1.0), seed=0, stride=1)
    assert sampler.num_samples > COUNT
    assert sampler.blocks is not None
    assert sum(len(batch.targets) for batch in loader) == sampler.num_samples


ANY_ORDER = {
    "group_by_aspect_ratio": {"group_by_aspect_ratio": True},
    "mosaic": {"mosaic": 0.5},
    "mixup": {"mixup": True},
    "tile": {"tile": 32},
    "multi_scale_pixels": {"multi_scale": [32, 64], "multi_scale_pixels": True},
}


@pytest.mark.parametrize("key", ANY_ORDER)
def test_settings_that_take_images_in_any_order_are_refused(table, key):
    with pytest.raises(BadInput, match=f"data.{key} takes images .*streaming"):
        loader_of_settings(table, replace(SETTINGS, **ANY_ORDER[key]), seed=0, stride=1)


def write_changed(folder: Path, tmp_path: Path, **values) -> None:
    """Write the first file anew with other values; None leaves a column out."""
    (tmp_path / "data").mkdir()
    rows = rows_of(sorted((folder / "data").iterdir())[0], tmp_path)
    for key, value in values.items():
        rows = rows.remove_columns(key)
        if value is not None:
            rows = rows.add_column(key, [value] * len(rows))
    rows.to_parquet(str(tmp_path / "data" / "train-00000-of-00001.parquet"), batch_size=GROUP)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("width", None, "column 'width'"),
        ("image_id", 1, "image id 1 used twice"),
        ("width", 2, "outside"),
    ],
)
def test_what_cannot_be_streamed_is_said(folder, tmp_path, key, value, words):
    write_changed(folder, tmp_path, **{key: value})
    with pytest.raises(BadInput, match=words):
        open_dataset("train", path=tmp_path, streaming=True, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_size_that_the_image_does_not_have_is_said_when_it_is_read(folder, tmp_path, streaming):
    """Streamed images are not looked at before training."""
    write_changed(folder, tmp_path, width=64)
    if not streaming:
        with pytest.raises(BadInput, match="the upright image is 32 x 32 .*says 64 x 32"):
            open_dataset("train", path=tmp_path, cache_dir=tmp_path / "cache")
    table = open_dataset(
        "train",
        path=tmp_path,
        cache_dir=tmp_path / "c2",
        streaming=streaming,
        check_images=False,
    )
    with pytest.raises(
        BadInput,
        match="the picture has 32 x 32 pixels .*but 64 x 32 by the annotations",
    ):
        DetectionDataset(table, exact_transform(32))[SampleKey(0, 0)]


def test_the_splits_of_a_folder_are_those_of_its_files(folder):
    assert hub_folder.find(Layout(folder)).names == ("train",)
    assert hub_folder.find(Layout(folder / "none")) is None
