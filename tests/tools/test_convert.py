"""convert.py reads every split and writes it in another format, with a remark on what is lost."""

import pytest
from small_data import one_image_folder, picture, write_text, yolo_folder

from scripts.convert import main
from toolkit.data.formats import open_dataset, recognise
from toolkit.tools import convert
from toolkit.tools.shapes import make_shapes


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))


def test_a_share_is_written_as_a_split_and_lost_relations_are_told(tmp_path, capsys):
    make_shapes(tmp_path / "d", 12, 1, 48)
    file = tmp_path / "d" / "annotations" / "train.json"
    assert main([str(file), str(tmp_path / "yolo"), "--to", "yolo", "--val", "0.3"]) == 0
    assert "relations are left out" in capsys.readouterr().out
    assert recognise(tmp_path / "yolo").splits == ("train", "val")


def test_faulty_records_are_left_out_where_that_is_asked_for(tmp_path, capsys):
    folder = yolo_folder(tmp_path / "set", {"a": "0 .5 .5 .2 .2\n5 .5 .5 .2 .2"})
    assert main([str(folder), str(tmp_path / "out"), "--to", "voc"]) == 2
    assert main([str(folder), str(tmp_path / "out"), "--to", "voc", "--on-error", "drop"]) == 0
    assert "1 faulty records were left out" in capsys.readouterr().out


def test_classes_are_renamed(tmp_path):
    folder = one_image_folder(tmp_path / "set", "voc")
    assert main([str(folder), str(tmp_path / "out"), "--to", "coco", "--classes", "{a: disc}"]) == 0
    assert open_dataset("train", path=tmp_path / "out").class_names == ["disc"]


def test_all_images_of_a_devkit_are_written_once(tmp_path):
    """Its split trainval has the images of train and val again."""
    folder = one_image_folder(tmp_path / "set", "voc")
    for split in ("train", "trainval"):
        write_text(folder / "ImageSets" / "Main" / f"{split}.txt", "a\n")
    assert list(convert.open_source_splits(str(folder), "auto", None, "raise", {})) == ["train"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["set", "full", "--to", "voc"], "full: not an empty folder"),
        (["none", "out", "--to", "voc"], "no such file or folder"),
        (["set", "out", "--to", "voc", "--val", "0.2"], "has a split val already"),
        (["a.json", "out", "--to", "voc", "--val", "third"], "expected a fraction between 0 and 1"),
        (["set", "out", "--to", "voc", "--classes", "{b: c}"], "no class b"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    make_shapes(tmp_path / "set", 2, 1, 32)
    (tmp_path / "a.json").write_text((tmp_path / "set" / "annotations" / "train.json").read_text())
    (tmp_path / "images").symlink_to(tmp_path / "set" / "train")
    picture(tmp_path / "full" / "a.png")
    assert main(words) == 2
    assert said in capsys.readouterr().err
