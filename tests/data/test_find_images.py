"""Pictures of a split that do not lie in the folder of the others are looked for in all of its places."""

from pathlib import Path

import pytest
from small_data import BOX, boxes_of, coco_text, csv_text, picture, voc_text, write_text

from toolkit.base.errors import BadInput
from toolkit.data.find_images import find_missing
from toolkit.data.formats import open_dataset

NAMES = ["0.png", "1.png"]


def write_annotations(folder: Path, format: str) -> None:
    if format == "coco":
        write_text(folder / "train" / "_annotations.coco.json", coco_text(NAMES))
        picture(folder / "thumbs" / "1.png", size_wh=(10, 8))  # of another size than the annotations say
    elif format == "csv":
        write_text(folder / "train.csv", csv_text(NAMES))
    else:
        for name in NAMES:
            write_text(folder / "train" / f"{name[0]}.xml", voc_text(name))


@pytest.mark.parametrize(
    "places",
    [["train", "train/images"], ["train/images", "train"], ["train/a", "train/b"]],
)
@pytest.mark.parametrize("format", ["coco", "voc", "csv"])
def test_pictures_are_found_in_all_places_of_a_split(tmp_path, format, places):
    folder = tmp_path / "set"
    files = [folder / place / name for place, name in zip(places, NAMES, strict=True)]
    for number, file in enumerate(files):
        picture(file, number)
    picture(folder / "valid" / "1.png", 7)  # another split has a file of this name
    write_annotations(folder, format)
    table = open_dataset("train", path=folder, cache_dir=tmp_path / "cache")
    assert boxes_of(table) == [[BOX], [BOX]]
    for index, file in enumerate(files):
        assert Path(table.image_source(table.row(index))).samefile(file)
    assert any("were found here" in problem.message for problem in table.problems)
    assert not any(problem.severity == "error" for problem in table.problems)


def test_a_picture_that_is_added_is_found(tmp_path):
    picture(tmp_path / "valid" / "0.png", 5)
    write_text(tmp_path / "annotations" / "val.json", coco_text(NAMES))
    reading = {"path": tmp_path, "cache_dir": tmp_path / "cache"}
    with pytest.raises(BadInput, match=r"1.png \(image 2\): image file not found"):
        open_dataset("val", **reading)
    picture(tmp_path / "valid" / "more" / "1.png", 6)
    assert open_dataset("val", **reading).file_names() == ["0.png", "more/1.png"]


@pytest.mark.parametrize("format", ["voc", "csv"])
def test_another_folder_of_images_is_not_taken_from_the_cache(tmp_path, format):
    folder = tmp_path / "set"
    write_annotations(folder, format)
    for number, name in enumerate(("first", "second")):
        for file in NAMES:
            picture(tmp_path / name / file, number)
        options = {
            "path": folder,
            "image_dir": str(tmp_path / name),
            "cache_dir": tmp_path / "cache",
        }
        assert open_dataset("train", **options).image_root == tmp_path / name


def test_nothing_is_looked_for_where_all_is_there():
    found = find_missing([], Path("images"), None, Path("."), "train")
    assert found.images == []
    assert found.problems == []
