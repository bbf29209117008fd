"""Scene graphs in the published layouts of VRD, GQA, Open Images and PSG: `assets/dirty_sets/scene_graphs.txt`."""

import json
from dataclasses import replace

import numpy as np
import pytest
from dirty_sets import check_set, sets_in
from documents import row_of

from toolkit.base.errors import BadInput
from toolkit.data.annotations import Reading
from toolkit.data.pipeline import loader_of_settings
from toolkit.data.table import Category
from toolkit.data.table_cache import write_rows
from toolkit.detectors.scene_graphs.readers import (
    gqa,
    open_graphs,
    open_images,
    psg,
    vrd,
)
from toolkit.run.settings import DataConfig


@pytest.mark.parametrize("one", sets_in("scene_graphs"))
def test_layouts(one, tmp_path):
    check_set(one, tmp_path)


@pytest.mark.parametrize("reader", [gqa, open_images, vrd, psg])
def test_files_that_are_not_there_are_named(tmp_path, reader):
    format = reader.__name__.rpartition(".")[2]
    reading = Reading(tmp_path, format=format, name=str(tmp_path), cache_dir=tmp_path / "cache")
    with pytest.raises(BadInput) as caught:
        open_graphs("train", reading)
    assert str(reader.files_of(tmp_path, "train")[0]) in str(caught.value)


def test_gqa_keeps_its_most_frequent_names(tmp_path, monkeypatch):
    monkeypatch.setattr(gqa, "NUM_CLASSES", 1)
    about = {"x": 1, "y": 2, "w": 3, "h": 4}
    objects = {
        "0": {"name": "b", "relations": [{"name": "on", "object": "1"}]},
        "1": {"name": "b", "relations": []},
    }
    objects["2"] = {"name": "a", "relations": [{"name": "on", "object": "1"}]}
    objects = {key: about | entry for key, entry in objects.items()}
    file = tmp_path / "train_sceneGraphs.json"
    file.write_text(json.dumps({"1": {"width": 60, "height": 40, "objects": objects}}))
    annotations = gqa.annotations_of([file], tmp_path, "train", 0)
    assert [category["name"] for category in annotations.categories] == ["b"]
    assert len(annotations) == 2


def test_images_with_rare_predicates_come_more_often(tmp_path):
    boxes = [(1, 1, 9, 9), (2, 2, 8, 8)]
    rows = [row_of(number, boxes, relations=[(0, 1, 1)]) for number in range(8)]
    rows.append(row_of(8, boxes, relations=[(0, 1, 1), (1, 0, 0)]))
    categories = [Category(0, "cup"), Category(1, "table")]
    table = write_rows(
        rows,
        cache_file=tmp_path / "t.json",
        categories=categories,
        predicates=("under", "on"),
    )
    settings = DataConfig(image_size=32, batch_size_per_device=3, workers=0, predicate_repeat_factor=1.0)
    sampler, _ = loader_of_settings(table, settings, seed=0, stride=1)
    np.testing.assert_allclose(sampler.repeats, [1] * 8 + [3])  # sqrt(1 / (1 / 9))
    with pytest.raises(BadInput, match="predicate_repeat_factor: .* has no relations"):
        loader_of_settings(replace(table, predicates=()), settings, seed=0, stride=1)
