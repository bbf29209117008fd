"""Data sets of the `datasets` library: read whole, or streamed by row groups of their Parquet files."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image
from samples import shapes_table

from toolkit.base.errors import BadInput
from toolkit.data import image_sources
from toolkit.data.dataset import DetectionDataset
from toolkit.data.decoding import decode_image
from toolkit.data.formats import hub_folder, open_dataset
from toolkit.data.image_sources import open_sources
from toolkit.data.layout import Layout
from toolkit.data.pipeline import blocks_of, loader_of_settings
from toolkit.data.sampling import MIXED_BLOCKS, EpochSampler, SampleKey, block_order, rank_runs
from toolkit.data.table import Category
from toolkit.data.transforms.geometry import exact_transform
from toolkit.run.settings import DataConfig
from toolkit.tools.doctor.near_duplicates import hold_out
from toolkit.tools.writers import write_folder

NAMES = ["cell", "plate"]
VALUE = datasets.Value


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    datasets.disable_progress_bars()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")


# ---- data sets that are read whole -----------------------------------------------------------------------------------


def png(colour=0, width=20, height=10) -> dict:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (colour, 0, 0)).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


ROWS = [(png(1), [[1, 2, 3, 4]], [1]), (png(2), [], []), (png(3), [[0, 0, 20, 10], [5, 5, 2, 2]], [0, 1])]


def objects_of(number: int, boxes: list, categories: list) -> dict:
    return {
        "bbox": boxes,
        "category": categories,
        "area": [box[2] * box[3] for box in boxes],
        "id": [10 * number + index for index in range(len(boxes))],
    }


def make(rows: list, left_out: tuple = (), label=None, as_list=False) -> datasets.Dataset:
    """left_out: columns; label: the feature of the category; as_list: objects are a list of dicts."""
    inner = {
        "bbox": datasets.List(VALUE("float32"), length=4),
        "category": label or datasets.ClassLabel(names=NAMES),
        "area": VALUE("float32"),
        "id": VALUE("int64"),
    }
    inner = {key: feature for key, feature in inner.items() if key not in left_out}
    columns = {key: datasets.List(feature) for key, feature in inner.items()}
    features = {"image": datasets.Image(), "objects": datasets.List(inner) if as_list else columns}
    features |= {key: VALUE("int64") for key in ("image_id", "width", "height") if key not in left_out}
    full = []
    for number, (image, boxes, categories) in enumerate(rows):
        parts = {key: column for key, column in objects_of(number, boxes, categories).items() if key in inner}
        if as_list:
            parts = [dict(zip(parts, one, strict=True)) for one in zip(*parts.values(), strict=True)]
        row = {"image": image, "objects": parts, "image_id": 50 + number, "width": 20, "height": 10}
        full.append({key: row[key] for key in features})
    return datasets.Dataset.from_list(full, features=datasets.Features(features))


def opened(tmp_path, split="train", **options):
    return open_dataset(split, name=str(tmp_path / "set"), cache_dir=tmp_path / "cache", **options)


def check_rows(table, ids):
    assert table.image_ids().tolist() == ids
    assert table.num_boxes().tolist() == [1, 0, 2]
    assert table.categories == (Category(0, "cell"), Category(1, "plate"))
    assert table.image_root is None
    assert table.row(0)["objects"]["bbox"].tolist() == [[1, 2, 4, 6]]
    assert table.row(2)["objects"]["category"].tolist() == [0, 1]
    assert table.sizes_hw().tolist() == [[10, 20]] * 3
    colours = [int(decode_image(table.image_source(table.row(index)))[0, 0, 0]) for index in range(3)]
    assert colours == [1, 2, 3]


def test_a_data_set_saved_to_disk_is_read_and_cached(tmp_path):
    datasets.DatasetDict({"train": make(ROWS)}).save_to_disk(tmp_path / "set")
    for _ in range(2):
        check_rows(opened(tmp_path), [50, 51, 52])
    with pytest.raises(BadInput, match="choose from train"):
        opened(tmp_path, "val")


def test_objects_may_be_a_list_of_dicts(tmp_path):
    make(ROWS[:2], as_list=True).save_to_disk(tmp_path / "set")
    assert opened(tmp_path).num_boxes().tolist() == [1, 0]


def test_sizes_and_ids_may_be_left_out(tmp_path):
    (tmp_path / "set").mkdir()
    left_out = ("image_id", "width", "height", "id")
    make(ROWS, left_out).to_parquet(tmp_path / "set" / "train-0.parquet")
    table = opened(tmp_path)
    check_rows(table, [0, 1, 2])
    assert [table.row(index)["objects"]["id"].tolist() for index in range(3)] == [[1], [], [2, 3]]


def test_labels_without_names_are_their_own_names(tmp_path):
    make(ROWS, label=VALUE("string")).save_to_disk(tmp_path / "set")
    table = opened(tmp_path)
    assert table.categories == (Category("0", "0"), Category("1", "1"))
    assert "not a ClassLabel" in table.problems[0].message


def test_defects_are_listed_and_dropped(tmp_path):
    cut = {"bytes": png()["bytes"][:-20], "path": None}
    nothing = {"bytes": b"", "path": None}
    wrong = (png(width=30), [[1, 1, -2, 2], [1, 1, np.nan, 2]], [0, 1])
    make([*ROWS, (cut, [[1, 1, 2, 2]], [0]), wrong, (nothing, [], [])]).save_to_disk(tmp_path / "set")
    with pytest.raises(BadInput) as caught:
        opened(tmp_path)
    for words in (
        "image 53): image data truncated",
        "image 54): size differs",
        "annotation 40): negative width",
        "annotation 41): non-finite",
        "image 55): empty image file",
    ):
        assert words in str(caught.value)
    check_rows(opened(tmp_path, on_error="drop"), [50, 51, 52])


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"image": [png()]}, "no `objects` column; the columns are image"),
        ({"objects": [{"bbox": [[1, 2, 3, 4]]}]}, "no image column"),
        ({"image": [png()], "objects": [{"bbox": [[1, 2, 3, 4]]}]}, "expected `bbox` and `category`"),
    ],
)
def test_other_columns_are_named(tmp_path, columns, words):
    data = datasets.Dataset.from_dict(columns)
    if "image" in columns:
        data = data.cast_column("image", datasets.Image())
    data.save_to_disk(tmp_path / "set")
    with pytest.raises(BadInput, match=words):
        opened(tmp_path)


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


def sgg_benchmark(folder: Path, relations: list, names: dict | None) -> Path:
    """Write rows whose ids are the data set's; the names stand beside them, unless they are None."""
    shared = {"area": 12.0, "iscrowd": 0, "segmentation": []}
    objects = [
        {"id": 7, "category_id": 3, "bbox": [1.0, 2.0, 3.0, 4.0], **shared},
        {"id": 8, "category_id": 0, "bbox": [5.0, 5.0, 2.0, 2.0], **shared},
    ]
    row = {"image": png(1), "image_id": 50, "width": 20, "height": 10, "file_name": "a.png", "objects": objects}
    rows = [row | {"relations": relations}, row | {"image_id": 51, "objects": [], "relations": []}]
    (folder / "set" / "data").mkdir(parents=True)
    data = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    data.to_parquet(folder / "set" / "data" / "train-00000-of-00001.parquet")
    if names is not None:
        (folder / "set" / "categories.json").write_text(json.dumps(names))
    return folder


TOLD = {
    "categories": [{"id": 0, "name": "cell"}, {"id": 3, "name": "plate"}],
    "rel_categories": [{"id": 0, "name": "in"}, {"id": 5, "name": "beside"}],
}


@pytest.mark.parametrize("streaming", [False, True])
def test_relations_and_names_are_read(tmp_path, streaming):
    table = opened(sgg_benchmark(tmp_path, [RELATION], TOLD), streaming=streaming)
    assert table.categories == (Category(0, "cell"), Category(3, "plate"))
    assert table.predicates == ("in", "beside")
    row = table.row(0)
    assert row["objects"]["category"].tolist() == [1, 0]
    assert row["objects"]["bbox"].tolist()[0] == [1, 2, 4, 6]
    assert [row["relations"][key].tolist() for key in ("subject", "object", "predicate")] == [[1], [0], [1]]
    assert len(table) == 2
    assert not table.problems


def test_relations_without_names_are_told(tmp_path):
    table = opened(sgg_benchmark(tmp_path, [RELATION], None))
    assert table.predicates == ("5",)
    assert [category.name for category in table.categories] == ["0", "3"]
    of_classes, of_predicates = (problem.message for problem in table.problems)
    assert "categories.json; classes" in of_classes
    assert "predicates are called by" in of_predicates


def test_relations_with_other_keys_are_left_out_and_told(tmp_path):
    table = opened(sgg_benchmark(tmp_path, [{"from": 8, "to": 7}], TOLD))
    assert not table.predicates
    assert "`relations` without the keys subject_id" in table.problems[0].message


@pytest.mark.parametrize(
    ("predicate", "names", "words"),
    [
        (9, TOLD, "predicate 9 is not defined"),
        (5, {"categories": 3}, "categories.json: `categories` is not a list"),
    ],
)
def test_unknown_predicates_and_other_names_are_refused(tmp_path, predicate, names, words):
    folder = sgg_benchmark(tmp_path, [RELATION | {"predicate_id": predicate}], names)
    with pytest.raises(BadInput, match=words):
        opened(folder)


# ---- images that are left in their Parquet files ---------------------------------------------------------------------

GROUP = 4  # images of a row group
COUNT = 22
SETTINGS = DataConfig(image_size=32, batch_size_per_device=4, workers=0)


def rows_of(file: Path, tmp_path: Path) -> datasets.Dataset:
    return datasets.Dataset.from_parquet(str(file), cache_dir=str(tmp_path / "hf"))


def write_shards(table, folder: Path, files: int) -> None:
    """Write the table in so many Parquet files with row groups of `GROUP` images."""
    write_folder(table, folder / "whole", "train", "hub")
    rows = rows_of(next((folder / "whole").rglob("*.parquet")), folder)
    (folder / "data").mkdir(exist_ok=True)
    for number in range(files):
        part = rows.shard(files, number, contiguous=True)
        part.to_parquet(str(folder / "data" / f"train-{number:05d}-of-{files:05d}.parquet"), batch_size=GROUP)


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
    assert len(table) == COUNT
    assert table.categories == plain.categories
    assert not table.problems
    assert "image" not in table.columns.images
    assert "image" in plain.columns.images
    for index in range(COUNT):
        ours = table.row(index)
        theirs = plain.row(index)
        assert table.image_source(ours).read_bytes() == theirs["image"]
        for key, values in theirs["objects"].items():
            np.testing.assert_array_equal(ours["objects"][key], values)


def test_streamed_data_are_cached_divided_and_opened_elsewhere(folder, table, tmp_path):
    again = open_dataset("train", path=folder, streaming=True, cache_dir=tmp_path)
    assert again.fingerprint == table.fingerprint
    assert again.image_root == table.image_root
    assert open_sources(table.image_root.specs()) == table.image_root
    rest, held = hold_out(table, 0.3, tmp_path)
    assert len(rest) + len(held) == COUNT
    assert blocks_of(rest) is not None
    assert held.image_source(held.row(0)).read_bytes()


def test_a_file_that_changed_is_read_anew(shapes, tmp_path):
    options = {"path": tmp_path, "streaming": True, "cache_dir": tmp_path / "cache"}
    for count in (9, 8):
        write_shards(shapes.head(count), tmp_path, 1)
        assert len(open_dataset("train", **options)) == count


@pytest.mark.parametrize("streaming", [False, True])
def test_a_size_that_the_image_does_not_have_is_said_when_it_is_read(folder, tmp_path, streaming):
    """Streamed images are not looked at before training."""
    shutil.copytree(folder / "data", tmp_path / "data")
    file = sorted((tmp_path / "data").iterdir())[0]
    rows = rows_of(file, tmp_path)
    rows.map(lambda row: {"width": 2 * row["width"]}, new_fingerprint="wider").to_parquet(str(file))
    if not streaming:
        with pytest.raises(BadInput, match="the upright image is 32 x 32 .*says 64 x 32"):
            open_dataset("train", path=tmp_path, cache_dir=tmp_path / "cache")
    table = open_dataset("train", path=tmp_path, cache_dir=tmp_path / "c2", streaming=streaming, check_images=False)
    with pytest.raises(BadInput, match="the picture has 32 x 32 pixels .*but 64 x 32 by the annotations"):
        DetectionDataset(table, exact_transform(32))[SampleKey(0, 0)]


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
    for rank in range(3):
        np.testing.assert_array_equal(batches[:, rank].reshape(-1), order[20 * rank : 20 * rank + 20])


def test_rare_classes_come_more_often_and_a_loader_gives_the_images(table):
    sampler, loader = loader_of_settings(table, replace(SETTINGS, repeat_factor=1.0), seed=0, stride=1)
    assert sampler.num_samples > COUNT
    assert sampler.blocks is not None
    assert sum(len(batch.targets) for batch in loader) == sampler.num_samples


@pytest.mark.parametrize(
    ("key", "value"), [("group_by_aspect_ratio", True), ("mosaic", 0.5), ("mixup", True), ("tile", 32)]
)
def test_settings_that_take_images_in_any_order_are_refused(table, key, value):
    with pytest.raises(BadInput, match=f"data.{key} takes images .*streaming"):
        loader_of_settings(table, replace(SETTINGS, **{key: value}), seed=0, stride=1)


def test_batches_of_pixels_are_refused(table):
    settings = replace(SETTINGS, multi_scale=[32, 64], multi_scale_pixels=True)
    with pytest.raises(BadInput, match="data.multi_scale_pixels takes images .*streaming"):
        loader_of_settings(table, settings, seed=0, stride=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [("no width", "column 'width'"), ("one id", "image id 1 used twice"), ("narrow", "outside")],
)
def test_what_cannot_be_streamed_is_said(folder, tmp_path, change, words):
    rows = rows_of(next((folder / "data").glob("*.parquet")), tmp_path)
    if change == "no width":
        rows = rows.remove_columns("width")
    else:
        value = {"image_id": 1} if change == "one id" else {"width": 2}
        rows = rows.map(lambda row: value)
    (tmp_path / "data").mkdir()
    rows.to_parquet(str(tmp_path / "data" / "train-00000-of-00001.parquet"), batch_size=GROUP)
    with pytest.raises(BadInput, match=words):
        open_dataset("train", path=tmp_path, streaming=True, cache_dir=tmp_path / "cache")


def test_a_file_that_is_gone_is_named_when_it_is_read(shapes, tmp_path):
    write_shards(shapes.head(9), tmp_path, 1)
    table = open_dataset("train", path=tmp_path, streaming=True, cache_dir=tmp_path / "cache")
    next((tmp_path / "data").iterdir()).unlink()
    with pytest.raises(BadInput, match="cannot be read"):
        list(loader_of_settings(table, SETTINGS, seed=0, stride=1)[1])


def test_the_splits_of_a_folder_are_those_of_its_files(folder):
    assert hub_folder.find(Layout(folder)).names == ("train",)
    assert hub_folder.find(Layout(folder / "whole")).names == ("train",)
    assert hub_folder.find(Layout(folder / "none")) is None
