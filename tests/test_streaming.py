"""Images left in Parquet files: the same data, read by row groups, each rank its own."""

import shutil
from dataclasses import replace

import datasets
import numpy as np
import pytest
from samples import shapes_table

from toolkit.base.errors import BadInput
from toolkit.data import image_sources
from toolkit.data.dataset import DetectionDataset
from toolkit.data.formats import open_dataset
from toolkit.data.image_sources import open_sources
from toolkit.data.pipeline import blocks_of, loader_of_settings
from toolkit.data.sampling import MIXED_BLOCKS, EpochSampler, SampleKey, block_order, rank_runs
from toolkit.data.transforms.geometry import exact_transform
from toolkit.run.settings import DataConfig
from toolkit.tools.doctor.near_duplicates import hold_out
from toolkit.tools.writers import write_folder

GROUP = 4  # images of a row group


def write_shards(table, folder, split, files):
    """The table in so many Parquet files with row groups of `GROUP` images."""
    write_folder(table, folder / "whole", split, "hub")
    rows = datasets.Dataset.from_parquet(str(next((folder / "whole").rglob("*.parquet"))), cache_dir=str(folder / "hf"))
    (folder / "data").mkdir(exist_ok=True)
    for i in range(files):
        part = rows.shard(files, i, contiguous=True)
        part.to_parquet(str(folder / "data" / f"{split}-{i:05d}-of-{files:05d}.parquet"), batch_size=GROUP)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return shapes_table(tmp_path_factory.mktemp("shapes"), 22, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, shapes):
    """The shapes as three files with row groups of 4, 4 (or 3) images."""
    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("shards")
    write_shards(shapes, folder, "train", 3)
    return folder


@pytest.fixture
def table(folder, tmp_path):
    return open_dataset("train", path=folder, streaming=True, cache_dir=tmp_path)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_size_beside_an_embedded_image_that_it_has_not_is_said(folder, tmp_path, streaming):
    """Streamed images are not looked at before training."""
    shutil.copytree(folder / "data", tmp_path / "data")
    file = sorted((tmp_path / "data").iterdir())[0]
    rows = datasets.Dataset.from_parquet(str(file), cache_dir=str(tmp_path / "hf"))
    rows.map(lambda row: {"width": 2 * row["width"]}, new_fingerprint="wider").to_parquet(str(file))
    if not streaming:
        with pytest.raises(BadInput, match="the upright image is 32 x 32 .*says 64 x 32"):
            open_dataset("train", path=tmp_path, cache_dir=tmp_path / "cache")
    table = open_dataset("train", path=tmp_path, cache_dir=tmp_path / "c2", streaming=streaming, check_images=False)
    with pytest.raises(BadInput, match="the picture has 32 x 32 pixels .*but 64 x 32 by the annotations"):
        DetectionDataset(table, exact_transform(32))[SampleKey(0, 0)]


def test_streamed_data_are_those_of_the_cache(folder, table, tmp_path):
    plain = open_dataset("train", path=folder, cache_dir=tmp_path / "plain")
    assert len(table) == 22 and table.categories == plain.categories and not table.problems
    assert "image" not in table.columns.images and "image" in plain.columns.images
    for index in range(22):
        ours, theirs = table.row(index), plain.row(index)
        assert table.image_source(ours).read_bytes() == theirs["image"]
        for key, values in theirs["objects"].items():
            np.testing.assert_array_equal(ours["objects"][key], values)
    again = open_dataset("train", path=folder, streaming=True, cache_dir=tmp_path)
    assert again.fingerprint == table.fingerprint and again.image_root == table.image_root
    rest, held = hold_out(table, 0.3, tmp_path)
    assert len(rest) + len(held) == 22 and blocks_of(rest) is not None
    assert held.image_source(held.row(0)).read_bytes()
    assert open_sources(table.image_root.specs()) == table.image_root


def test_a_file_that_changed_is_read_anew(folder, shapes, tmp_path):
    write_shards(shapes.head(9), tmp_path, "train", 1)
    options = {"path": tmp_path, "streaming": True, "cache_dir": tmp_path / "cache"}
    assert len(open_dataset("train", **options)) == 9
    write_shards(shapes.head(8), tmp_path, "train", 1)
    assert len(open_dataset("train", **options)) == 8


def test_an_epoch_reads_each_row_group_once_and_each_rank_its_own(table, monkeypatch):
    blocks = blocks_of(table)
    assert np.bincount(blocks).max() <= GROUP and len(set(blocks)) == 6
    samplers = [EpochSampler(len(blocks), 2, rank, 2, seed=3, blocks=blocks) for rank in range(2)]
    opened, read = [], image_sources.open_shard
    monkeypatch.setattr(image_sources, "open_shard", lambda url: opened.append(url) or read(url))
    seen = []
    for sampler in samplers:
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
    settings = DataConfig(image_size=32, batch_size_per_device=4)
    sampler, loader = loader_of_settings(table, replace(settings, repeat_factor=1.0), seed=0, stride=1)
    assert sampler.num_samples > 22 and sampler.blocks is not None
    assert sum(len(batch.targets) for batch in loader) == sampler.num_samples
    varied = {"multi_scale": [32, 64], "multi_scale_pixels": True}
    for given_key in ({"group_by_aspect_ratio": True}, {"mosaic": 0.5}, {"mixup": True}, {"tile": 32}, varied):
        with pytest.raises(BadInput, match=f"data.{[*given_key][-1]} takes images .*streaming"):
            loader_of_settings(table, replace(settings, **given_key), seed=0, stride=1)


@pytest.mark.parametrize(("change", "words"), [
    (lambda rows: rows.remove_columns("width"), "column 'width'"),
    (lambda rows: rows.map(lambda row: {"image_id": 1}), "image id 1 used twice"),
    (lambda rows: rows.map(lambda row: {"width": 2}), "outside"),
])  # fmt: skip
def test_what_cannot_be_streamed_is_said(folder, tmp_path, change, words):
    rows = datasets.Dataset.from_parquet(str(next((folder / "data").glob("*.parquet"))), cache_dir=str(tmp_path / "hf"))
    (tmp_path / "data").mkdir()
    change(rows).to_parquet(str(tmp_path / "data" / "train-00000-of-00001.parquet"), batch_size=GROUP)
    with pytest.raises(BadInput, match=words):
        open_dataset("train", path=tmp_path, streaming=True, cache_dir=tmp_path / "cache")


def test_other_formats_are_refused(tmp_path):
    with pytest.raises(BadInput, match=r"data\.streaming reads Parquet"):
        open_dataset("train", format="shapes", streaming=True)
    (tmp_path / "annotations.csv").write_text("image,x1,y1,x2,y2,label\na.jpg,1,1,2,2,x\n")
    with pytest.raises(BadInput, match=r"data\.streaming reads Parquet"):
        open_dataset("train", path=tmp_path, streaming=True)


def test_a_file_that_is_gone_is_named_when_it_is_read(shapes, tmp_path):
    write_shards(shapes.head(9), tmp_path, "train", 1)
    table = open_dataset("train", path=tmp_path, streaming=True, cache_dir=tmp_path / "cache")
    next((tmp_path / "data").iterdir()).unlink()
    settings = DataConfig(image_size=32, batch_size_per_device=4, workers=0)
    with pytest.raises(BadInput, match="cannot be read"):
        list(loader_of_settings(table, settings, seed=0, stride=1)[1])
