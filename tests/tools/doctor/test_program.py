"""check_data.py on clean and on faulty data: exit codes, the report, the clean copy, and its flags."""

import json
import shutil
from pathlib import Path

import pytest
from documents import BCCD, DIRTY, needs_bccd
from flags import parser_of
from PIL import Image, ImageEnhance
from places import ROOT
from small_data import coco_text, picture, write_text

from scripts import check_data
from toolkit.tools.doctor.program import data_settings
from toolkit.tools.shapes import make_shapes


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(ROOT / "scripts")  # where check_data.py finds the other scripts


def check(*arguments) -> int:
    """Return the exit code of scripts/check_data.py."""
    return check_data.main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean") / "d"
    make_shapes(folder, 12, 6, 64)
    return folder


def edited(folder: Path, split: str) -> dict:
    return json.loads((folder / "annotations" / f"{split}.json").read_text())


def write_edited(folder: Path, split: str, document: dict) -> None:
    (folder / "annotations" / f"{split}.json").write_text(json.dumps(document))


def findings(file: Path, but_notes: bool = False) -> dict:
    """Return the items of a report by the kind of finding."""
    listed = json.loads(file.read_text())["findings"]
    return {each["kind"]: each["items"] for each in listed if not but_notes or each["severity"] != "note"}


# ---- clean and faulty data -------------------------------------------------------------------------------------------


def test_a_clean_set_has_exit_code_0(clean, tmp_path, capsys):
    assert check(clean, "--json", tmp_path / "r.json", "--image-size", 64) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["exit_code"] == 0
    assert report["splits"]["train"]["images"] == 12
    printed = capsys.readouterr().out
    assert "COCO, splits train, val" in printed
    assert "not compared" not in printed
    assert printed.index("usable images") < printed.index("class ")


def test_headers_alone_decode_and_compare_nothing(clean, tmp_path, capsys):
    assert check(clean, "--check-images", "header", "--image-size", 64) == 0
    assert "not compared with each other" in capsys.readouterr().out
    assert not (tmp_path / "cache" / "looks").exists()


def test_splits_of_other_classes_are_an_error(clean, tmp_path):
    shutil.copytree(clean, tmp_path / "d")
    document = edited(clean, "val")
    document["categories"][0]["name"] = "ring"
    write_edited(tmp_path / "d", "val", document)
    assert check(tmp_path / "d") == 2


def plant_faults(folder: Path) -> tuple[list[str], list[str]]:
    """Plant leakage, duplicates, a box given twice, an unused class and a class that validation lacks."""
    train, val = (sorted((folder / split).iterdir()) for split in ("train", "val"))
    shutil.copy(val[2], train[3])
    shutil.copy(train[5], train[6])
    ImageEnhance.Brightness(Image.open(val[4])).enhance(1.1).save(train[8], quality=60)
    document = edited(folder, "train")
    box = next(entry for entry in document["annotations"] if entry["image_id"] == 1)
    x, y, width, height = box["bbox"]
    document["annotations"].append({**box, "id": 10**6, "bbox": [x, y, max(1, width - 0.5), height]})
    document["categories"].append({"id": 99, "name": "never"})
    write_edited(folder, "train", document)
    document = edited(folder, "val")
    document["categories"].append({"id": 99, "name": "never"})
    document["annotations"] = [entry for entry in document["annotations"] if entry["category_id"] != 1]
    document["rel_annotations"] = []
    write_edited(folder, "val", document)
    return [path.name for path in train], [path.name for path in val]


def test_planted_faults_are_all_found_and_mended(clean, tmp_path):
    folder = shutil.copytree(clean, tmp_path / "planted")
    train, val = plant_faults(folder)
    assert check(folder, "--json", tmp_path / "r.json", "--fix", tmp_path / "fixed", "--image-size", 64) == 1
    kinds = findings(tmp_path / "r.json")
    assert kinds["same file in two splits"] == [[f"train/{train[3]}", f"val/{val[2]}"]]
    assert kinds["same file"] == [[f"train/{train[5]}", f"train/{train[6]}"]]
    assert kinds["look alike in two splits"] == [[f"train/{train[8]}", f"val/{val[4]}"]]
    assert [item["image"] for item in kinds["box given twice"]] == [train[0]]
    assert kinds["unused classes"] == ["never"]
    assert kinds["missing classes"] == ["circle"]
    log = (tmp_path / "fixed" / "changes.txt").read_text()
    for words in (train[3], train[6], train[8], "10000", "never"):
        assert words in log
    check(tmp_path / "fixed", "--json", tmp_path / "again.json", "--image-size", 64)
    assert [*findings(tmp_path / "again.json", but_notes=True)] == ["missing classes"]  # which no copy can mend
    assert len(list((tmp_path / "fixed" / "train").iterdir())) == 9


def test_the_copy_of_the_dirty_set_is_clean(tmp_path, capsys):
    dirty = DIRTY / "annotations" / "instances.json"
    assert check(dirty, "--fix", tmp_path / "fixed") == 2
    printed = capsys.readouterr().out
    assert "ERRORS (records that cannot be used): 18" in printed
    assert "19 usable images" in printed
    assert check(dirty, "--on-error", "drop") == 1
    assert check(tmp_path / "fixed") == 0
    assert check(dirty, "--fix", tmp_path / "fixed") == 2  # not empty any more
    assert (tmp_path / "fixed" / "instances" / "png_bytes.png").is_file()  # the ending of its content


def test_a_class_of_crowds_alone_stays_in_the_copy(clean, tmp_path):
    folder = shutil.copytree(clean, tmp_path / "d")
    for split in ("train", "val"):
        document = edited(folder, split)
        document["categories"].append({"id": 99, "name": "crowd"})
        document["annotations"][0] |= {"category_id": 99, "iscrowd": 1}
        write_edited(folder, split, document)
    assert check(folder, "--fix", tmp_path / "fixed", "--image-size", 64) == 1
    fixed = edited(tmp_path / "fixed", "train")
    assert fixed["categories"][-1]["name"] == "crowd"
    assert fixed["annotations"][0]["category_id"] == 99


def test_the_copy_takes_images_out_of_several_places(clean, tmp_path, capsys):
    """Of a folder and another; the file is copied as it is."""
    images = sorted((clean / "train").iterdir())
    for number, image in enumerate(images):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        shutil.copy(image, tmp_path / "ab"[number % 2])
    Image.new("RGB", (9, 9)).save(tmp_path / "b" / images[1].name)
    options = ["--image-dir", tmp_path / "a", "--image-dir", tmp_path / "b", "--fix", tmp_path / "fixed"]
    assert check(clean / "annotations" / "train.json", *options) == 2
    assert "size differs from the JSON: the upright image is 9 x 9" in capsys.readouterr().out
    assert check(tmp_path / "fixed") == 0
    copied = list((tmp_path / "fixed" / "train").iterdir())
    assert len(copied) == 11
    assert all(path.read_bytes() == (clean / "train" / path.name).read_bytes() for path in copied)


@needs_bccd
def test_bccd(tmp_path):
    assert check(BCCD, "--json", tmp_path / "r.json", "--fix", tmp_path / "fixed") == 1
    listed = json.loads((tmp_path / "r.json").read_text())["findings"]
    twice = [item["image"][-7:-4] for each in listed if each["kind"] == "box given twice" for item in each["items"]]
    assert sorted(twice) == "020 100 104 251 284 331 403".split()
    alike = findings(tmp_path / "r.json")["look alike in two splits"]
    assert alike == [["train/BloodImage_00038.jpg", "val/BloodImage_00037.jpg"]]
    assert check(tmp_path / "fixed") == 0


# ---- what is printed -------------------------------------------------------------------------------------------------


def write_boxes(folder: Path, boxes: list, masks: list | None = None, size_wh: tuple = (100, 80)) -> Path:
    """Write a training split of COCO with an image for each list of boxes xywh; masks: a polygon for all of them."""
    images = []
    annotations = []
    for number, of_image in enumerate(boxes):
        picture(folder / "train" / f"{number}.png", number, size_wh)
        images.append({"id": number, "file_name": f"{number}.png", "width": size_wh[0], "height": size_wh[1]})
        for x, y, width, height in of_image:
            one = {"id": len(annotations) + 1, "image_id": number, "category_id": 1, "bbox": [x, y, width, height]}
            if masks is not None:
                polygon = [value + (x, y)[at % 2] for at, value in enumerate(masks)]
                one |= {"segmentation": [polygon], "area": width * height / 2}
            annotations.append(one)
    text = coco_text([], images=images, annotations=annotations)
    write_text(folder / "train" / "_annotations.coco.json", text)
    return folder


SMALL = [[[100.0 * column, 130.0 * row, 12, 12] for column in range(4)] for row in range(4)]


@pytest.mark.parametrize("masks", [None, [0, 0, 12, 0, 0, 12]])
def test_the_printed_command_has_tiles_or_masks_that_pay(tmp_path, capsys, masks):
    """At the size of the recipe, 256 px; masks are not trained on tiles."""
    folder = write_boxes(tmp_path / "d", SMALL, masks, (1000, 1000))
    assert check(folder, "--check-images", "header") == 0
    said = capsys.readouterr().out
    assert "16 of 16 boxes are less than 4 px wide or high at an input size of 256 px" in said
    command = said.strip().splitlines()[-1]
    assert ("--model.masks true" in command) == (masks is not None)
    assert ("--data.tile 256" in command) == (masks is None)
    advice = "masks are not trained on tiles: leave model.masks out for data.tile 256"
    assert (advice in said) == (masks is not None)


def test_masks_that_are_the_boxes_are_not_trained(tmp_path, capsys):
    folder = write_boxes(tmp_path / "d", [[[10, 10, 40, 40]]] * 4, masks=[0, 0, 40, 0, 40, 40, 0, 40])
    check(folder, "--check-images", "header")
    assert "--model.masks" not in capsys.readouterr().out


def test_many_problems_of_a_kind_are_one_line_that_begins_with_the_largest(tmp_path, capsys):
    boxes = [[[70, 10, 30.4, 40]] for _ in range(20)]
    boxes[7][0][2] += 9
    folder = write_boxes(tmp_path / "d", boxes)
    for number in range(1, 20):
        shutil.copy(folder / "train" / "0.png", folder / "train" / f"{number}.png")
    assert check(folder, "--json", tmp_path / "r.json") == 1
    said = capsys.readouterr().out
    (line,) = (line for line in said.splitlines() if "exceeds the image" in line)
    assert line.startswith("  20 of one kind (--json lists all), the largest: 7.png (image 7, annotation 8): bbox ")
    assert line.count("exceeds the image") == 3
    assert said.count(" = train/") == 3
    assert "and 16 more; --json lists all" in said
    assert len(findings(tmp_path / "r.json")["record"]) == 20


def test_pictures_and_anchors_are_drawn(clean, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("data: {image_size: 64, mosaic: 0.5, photometric: true, augment: [RandomVerticalFlip]}\n")
    options = ("--image-size", 64, "--anchors", "--script", "train_yolov3", "--check-images", "header")
    assert check(clean, "--pictures", tmp_path / "p", "--augment", config, *options) == 0
    names = {path.name for path in (tmp_path / "p").iterdir()}
    assert {"positions.png", "sizes.png", "aspect_ratios.png", "augmented.jpg"} < names
    assert sum(name.startswith("samples_") for name in names) == 4


@pytest.mark.parametrize(("file", "said"), [("c.yaml", "--script train_detr"), ("none.yaml", "none.yaml: expected a")])
def test_settings_that_cannot_be_drawn_with_are_refused(clean, tmp_path, capsys, file, said):
    (tmp_path / "c.yaml").write_text("data: {image_size: 64}\n")  # which script's defaults hold is not known
    assert check(clean, "--augment", tmp_path / file, "--check-images", "none") == 2
    assert said in capsys.readouterr().err


# ---- settings and flags ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "counts_pixels"), [("yolov3", False), ("ssd", True)])
def test_a_settings_file_is_completed_by_its_own_script(name, counts_pixels):
    settings = data_settings(ROOT / "configs" / name / "own_data.yaml")
    assert settings.recipe == name
    assert settings.multi_scale_pixels == counts_pixels


def test_the_settings_of_a_run_need_no_script(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {recipe: ssd, image_size: 32}")
    assert data_settings(tmp_path / "config.yaml").recipe == "ssd"


def test_flags_of_training_are_taken():
    parse = parser_of("check_data").parse_args
    options = parse(["DIR", "--data.image_dir", "x", "--data.on_error", "drop", "--data.format", "yolo"])
    assert options == parse(["DIR", "--image-dir", "x", "--on-error", "drop", "--format", "yolo"])
    assert options.image_dir == ["x"]


@pytest.mark.parametrize("words", ["--image-dir a --data.image_dir b", "--data.image_dir [a,b]", "--image-dir a b"])
def test_folders_of_images_are_given_one_by_one_or_as_settings_have_them(words):
    assert parser_of("check_data").parse_args(["DIR", *words.split()]).image_dir == ["a", "b"]


def test_half_a_list_of_folders_is_refused(capsys):
    with pytest.raises(SystemExit):
        parser_of("check_data").parse_args(["DIR", "--image-dir", "[a, {]"])
    assert "expected a folder, or a list of folders such as [images, more.zip]" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["check_data", "convert", "evaluate", "export", "report", "toolkit.tools.anchors"])
def test_every_flag_about_data_has_its_name_of_training_too(program):
    given = parser_of(program)._option_string_actions
    flags = [flag for flag in ("image-dir", "name", "path", "on-error", "image-size") if f"--{flag}" in given]
    assert "image-dir" in flags
    for flag in flags:
        assert f"--data.{flag.replace('-', '_')}" in given
