"""COCO files and their folders, most of them in `assets/dirty_sets/coco.txt`."""

import json

import numpy as np
import pytest
from dirty_sets import check_set, sets_in
from documents import document, image, write
from hypothesis import given, settings
from hypothesis import strategies as st
from small_data import coco_text, picture, write_text

from toolkit.base.errors import BadInput
from toolkit.data.formats import open_dataset
from toolkit.data.formats.coco import listed_names
from toolkit.data.table import Category
from toolkit.tools.writers import write_coco


@pytest.mark.parametrize("one", sets_in("coco"))
def test_folders(one, tmp_path):
    check_set(one, tmp_path)


coordinate = st.tuples(st.integers(0, 1800), st.integers(0, 1800), st.integers(1, 600), st.integers(1, 600))


@settings(max_examples=15)
@given(
    boxes=st.lists(st.lists(coordinate, max_size=5), min_size=1, max_size=4),
    ids=st.lists(st.integers(0, 10**12), min_size=3, max_size=3, unique=True),
)
def test_a_file_survives_reading_and_writing(tmp_path_factory, boxes, ids):
    folder = tmp_path_factory.mktemp("coco")
    images = []
    annotations = []
    for number, of_image in enumerate(boxes):
        images.append(image(id=10 + number, file_name=f"{number}.jpg", width=100, height=100))
        for index, coordinates in enumerate(of_image):
            entry = {
                "id": 100 * number + index,
                "image_id": 10 + number,
                "category_id": ids[index % 3],
            }
            bbox = [value / 25 for value in coordinates]
            annotations.append(entry | {"iscrowd": index % 2, "area": 1.5, "bbox": bbox})
    categories = [{"id": id_, "name": f"class {id_}"} for id_ in ids]
    file = write(folder, document(images=images, annotations=annotations, categories=categories))
    table = open_dataset(file, image_dir=folder, cache_dir=folder, check_images=False)
    write_coco(table.labelled(), folder / "b.json")
    again = json.loads((folder / "b.json").read_text())
    assert again["images"] == images
    assert sorted(again["categories"], key=str) == sorted(categories, key=str)
    for old, new in zip(annotations, again["annotations"], strict=True):
        assert np.allclose(old.pop("bbox"), new.pop("bbox"), atol=1e-4)
        assert new == old


def test_defaults_and_unknown_keys(tmp_path):
    one = {
        "id": 1,
        "image_id": "a",
        "category_id": "c",
        "bbox": [0, 0, 10, 5.5],
        "segmentation": [[1, 2]],
        "score": 1,
    }
    images = [image(id="a", file_name="0.png", width=100.0, height=80, licence=3)]
    picture(tmp_path / "images" / "0.png")
    file = write(
        tmp_path,
        document(images=images, annotations=[one], categories=[{"id": "c", "name": "cell"}]),
    )
    table = open_dataset(str(file), cache_dir=tmp_path / "cache")
    objects = table.row(0)["objects"]
    assert table.row(0)["image_id"] == "a"
    assert table.categories == (Category("c", "cell"),)
    assert objects["area"].tolist() == [55]
    assert objects["iscrowd"].tolist() == [0]
    assert table.problems == []


@pytest.mark.parametrize("place", ["", "a", "images", "JPEGImages", "images/a", "annotations"])
def test_the_folder_of_images_is_found_beside_the_annotations(tmp_path, place):
    picture(tmp_path / place / "x.png")
    file = write_text(tmp_path / "annotations" / "a.json", coco_text(["x.png"]))
    table = open_dataset(file, cache_dir=tmp_path / "cache")
    assert table.image_root == (tmp_path / place).resolve()


@pytest.mark.parametrize("key", ["on_error", "check_images"])
def test_options_of_another_value_are_refused(tmp_path, key):
    file = write(tmp_path, document())
    with pytest.raises(BadInput, match=f"{key} is 'ignore'; expected "):
        open_dataset(file, cache_dir=tmp_path, **{key: "ignore"})


def test_what_is_not_a_file_name_is_passed_over(tmp_path):
    file = write_text(
        tmp_path / "a.json",
        '{"images": [3, {"file_name": 4}, {}, {"file_name": "b.jpg"}]}',
    )
    assert list(listed_names(file)) == ["b.jpg"]
    assert list(listed_names(write_text(tmp_path / "b.json", "{"))) == []
