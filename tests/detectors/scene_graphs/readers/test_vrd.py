"""VRD's own files."""

import json

from PIL import Image

from toolkit.data.formats import open_dataset
from toolkit.detectors.scene_graphs.readers import vrd  # noqa: F401 (the module that reads them)


def test_names_of_text_files_and_a_box_that_is_related_to_itself(tmp_path):
    Image.new("RGB", (60, 40)).save(tmp_path / "a.png")
    cup = {"category": 1, "bbox": [5, 15, 10, 30]}
    annotations = {"a.png": [{"predicate": 0, "subject": cup, "object": cup}]}
    (tmp_path / "annotations_test.json").write_text(json.dumps(annotations))
    (tmp_path / "obj.txt").write_text("table\ncup\n")
    (tmp_path / "rel.txt").write_text("next to\n")
    table = open_dataset(
        "test",
        format="vrd",
        name=str(tmp_path),
        image_dir=tmp_path,
        cache_dir=tmp_path / "cache",
    )
    assert table.class_names == ["table", "cup"]
    assert table.predicates == ("next to",)
    row = table.row(0)
    assert row["objects"]["bbox"].tolist() == [[10, 5, 30, 15]] * 2
    assert {name: ids.tolist() for name, ids in row["relations"].items()} == {
        "subject": [0],
        "object": [1],
        "predicate": [0],
    }
