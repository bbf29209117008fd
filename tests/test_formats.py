"""Folders as annotation tools leave them: recognised, read with the same validation, written without loss."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from documents import BCCD, needs_bccd, row_of
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from scripts import convert
from toolkit.base.errors import BadInput
from toolkit.data.formats import FOLDERS, open_dataset, recognise
from toolkit.data.table import Category
from toolkit.data.table_cache import write_rows
from toolkit.tools.predict.outputs import write_outputs
from toolkit.tools.predictions_file import read_predictions
from toolkit.tools.shapes import make_shapes
from toolkit.tools.writers import unsupported_by, write_folder

patient = settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """(folder, tables) of 20 + 6 shapes as COCO."""
    folder = tmp_path_factory.mktemp("shapes") / "coco"
    make_shapes(folder, 20, 6, 64)
    return folder, {split: opened(folder, split) for split in ("train", "val")}


def opened(folder, split="train", **options):
    return open_dataset(split, path=folder, cache_dir=folder.parent / "cache", **options)


def boxes_of(table, index=0):
    return table.row(index)["objects"]["bbox"].tolist()


def by_name(table):
    """Rows by the stem of their file; the VOC writer puts `val_` before a name that the training images have too."""
    return {Path(row["file_name"]).stem.removeprefix("val_"): row for row in map(table.row, range(len(table)))}


def assert_equal_tables(one, two):
    """Classes; images by name; their boxes, labels and crowd flags in order."""
    assert sorted(one.class_names) == sorted(two.class_names)
    ours, theirs = by_name(one), by_name(two)
    assert ours.keys() == theirs.keys()
    for name, row in ours.items():
        objects, others = row["objects"], theirs[name]["objects"]
        assert (row["width"], row["height"]) == (theirs[name]["width"], theirs[name]["height"])
        assert objects["iscrowd"].tolist() == others["iscrowd"].tolist()
        labels = [one.class_names[label] for label in objects["category"]]
        assert labels == [two.class_names[label] for label in others["category"]]
        assert np.array_equal(objects["bbox"], others["bbox"])


@pytest.mark.parametrize("format", FOLDERS)
def test_shapes_are_the_same_in_every_format(shapes, tmp_path, format):
    for split, table in shapes[1].items():
        write_folder(table, tmp_path / "d", split, format)
    found = recognise(tmp_path / "d")
    assert found.format == format and found.splits == ("train", "val") and not found.others
    for split, table in shapes[1].items():
        again = opened(tmp_path / "d", split)
        if format == "hub":  # which has no names of files
            assert again.num_boxes().tolist() == table.num_boxes().tolist() and again.class_names == table.class_names
            assert all(boxes_of(again, i) == boxes_of(table, i) for i in range(6))
        else:
            assert_equal_tables(again, table)
        assert not [problem for problem in again.problems if problem.severity != "note"]


@st.composite
def boxes(draw):
    """[x, y, w, h] inside 40 x 30, in float32 as tables hold them; larger than what CSV takes for fractions."""
    x, y = draw(st.floats(0, 38, width=32)), draw(st.floats(0, 28, width=32))
    w, h = draw(st.floats(1.5, 40)), draw(st.floats(1.5, 30))
    return [x, y, min(x + w, 40), min(y + h, 30)]


NAME = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=8).filter(lambda t: t != "background")


def table_of(folder: Path, images: list[list], categories: list, crowds=False, below=""):
    """A table with a picture for each list of boxes, each one folder deeper; every other box may be a crowd."""
    rows = []
    for number, of_image in enumerate(images):
        row = row_of(number, of_image, labels=[k % len(categories) for k in range(len(of_image))])
        row["objects"] |= {"id": [10 * number + k for k in range(len(of_image))], "area": [3.5] * len(of_image)}
        row["objects"]["iscrowd"] = [int(k % 2 and crowds) for k in range(len(of_image))]
        rows.append(row | {"file_name": f"{below * number}{number}.png"})
        picture(folder / rows[-1]["file_name"])
    return write_rows(rows, cache_file=folder / "t.json", categories=categories, image_root=folder)


IMAGES = st.lists(st.lists(boxes(), max_size=4), min_size=1, max_size=3)
NAMES = st.lists(NAME, min_size=1, max_size=3, unique=True)


@patient
@example([[[0.0, 0.0, 2.0, 2.0]]], ["#", "0"], "voc")  # no comment, but a name
@given(IMAGES, NAMES, st.sampled_from(sorted(FOLDERS)))
def test_nothing_is_lost_that_the_format_can_hold(tmp_path_factory, images, names, format):
    folder = tmp_path_factory.mktemp("round")
    if not any(images):
        return  # a CSV file without a box names no class
    used = {k % len(names) for of_image in images for k in range(len(of_image))}
    names = sorted(names)[: len(used) if format == "csv" else None]
    categories = [Category(n, name) for n, name in enumerate(names, start=1)]
    table = table_of(folder / "p", images, categories, crowds=format != "yolo", below="below/")
    write_folder(table, folder / "d", "train", format)
    again = opened(folder / "d", format=format)
    assert again.class_names == names
    for index in range(len(table)):
        ours, theirs = table.row(index)["objects"], again.row(index)["objects"]
        assert ours["category"].tolist() == theirs["category"].tolist()
        assert ours["iscrowd"].tolist() == theirs["iscrowd"].tolist()
        assert np.allclose(ours["bbox"], theirs["bbox"], atol=1e-4, rtol=0)
        assert format not in ("coco", "hub") or ours["area"].tolist() == theirs["area"].tolist()


def picture(path, number=0, size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), np.uint8)).save(path)


def write_text(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def xml(name, box=(4, 5, 20, 25), label="cat", extra=""):
    corners = "".join(f"<{t}>{v}</{t}>" for t, v in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
    return (
        f"<annotation><filename>{name}</filename>{extra}<size><width>40</width><height>30</height></size>"
        f"<object><name>{label}</name><difficult>1</difficult><bndbox>{corners}</bndbox></object></annotation>"
    )


@patient
@given(IMAGES, NAMES, st.randoms(use_true_random=False))
def test_predictions_come_back(tmp_path_factory, images, names, random):
    """What predict.py writes beside the images is a data set: to label images with a model."""
    folder, names = tmp_path_factory.mktemp("predictions"), sorted(names)
    table = table_of(folder / "p" / "images", images, [Category(10 * n, name) for n, name in enumerate(names, start=1)])
    truth, files = table.labelled(), [row.file_name for row in table.image_rows()]
    scores = np.array([random.random() for _ in range(len(truth.boxes))])
    found = replace(truth, boxes=replace(truth.boxes, scores=scores, ids=None))
    write_outputs({"images": [], "errors": []}, found, files, ["coco", "yolo", "voc", "csv"], folder / "p")
    read = read_predictions(folder / "p" / "results.json", table).predictions
    assert read.offsets.tolist() == found.boxes.offsets.tolist() and read.labels.tolist() == found.boxes.labels.tolist()
    assert np.array_equal(read.scores, scores) and np.allclose(read.xyxy, found.boxes.xyxy, atol=1e-12, rtol=0)
    if not any(images):
        return  # files without a box tell of no format
    for format in ("yolo", "voc", "csv"):
        place = folder / "p" / "predictions.csv" if format == "csv" else folder / "p"
        again = open_dataset("train", path=place, format=format, cache_dir=folder / "c")
        assert again.class_names == names if format == "yolo" else set(again.class_names) <= set(names)
        rows = {Path(row["file_name"]).name: row["objects"] for row in map(again.row, range(len(again)))}
        for number, file in enumerate(files):
            ours, theirs = table.row(number)["objects"], rows[file]
            assert [names[label] for label in ours["category"]] == [again.class_names[k] for k in theirs["category"]]
            assert np.allclose(ours["bbox"], theirs["bbox"], atol=0 if format != "yolo" else 1e-5, rtol=0)


def test_voc_layouts(tmp_path):
    for folder, images, annotations in (
        ("a", "train", "train"),
        ("b", "images", "annotations"),
        ("c", ".", "."),
        ("d", "train/images", "train/annotations"),
        ("e", "images/train", "annotations/train"),
        ("f", "images", "annots"),
        ("g", "train/images", "train/boxes"),
    ):
        root = tmp_path / folder
        picture(root / images / "1.png")
        write_text(root / annotations / "1.xml", xml("elsewhere/1.jpg"))
        assert recognise(root).format == "voc", folder
        table = opened(root)
        assert boxes_of(table) == [[4, 5, 20, 25]] and table.class_names == ["cat"]
        assert table.row(0)["objects"]["iscrowd"].tolist() == [1]
    write_text(root / annotations / "1.xml", xml("1.png", label="giraffe"))
    assert opened(root).class_names == ["giraffe"], "the cache notices changed annotations"
    with pytest.raises(BadInput, match="no split 'val'; hold a share"):
        opened(root, "val")
    year = tmp_path / "h" / "VOCdevkit" / "VOC2007"  # of the challenges, which count pixels from one
    picture(year / "JPEGImages" / "1.png")
    database = "<source><database>The VOC2007 Database</database></source>"
    write_text(year / "Annotations" / "1.xml", xml("1.png", extra=database))
    assert boxes_of(opened(tmp_path / "h")) == [[3, 4, 20, 25]]


def voc_year(folder, splits, label):
    """A year of a VOCdevkit with one image in each split, whose name is that of year and split."""
    for split in splits:
        name = f"{folder.name}_{split}"
        picture(folder / "JPEGImages" / f"{name}.png")
        write_text(folder / "Annotations" / f"{name}.xml", xml(f"{name}.png", label=label))
        write_text(folder / "ImageSets" / "Main" / f"{split}.txt", f"{name}\n")


def test_years_of_a_devkit_are_one_data_set(tmp_path):
    """As Pascal VOC is trained on: both trainvals, and the one test split."""
    kit = tmp_path / "d" / "VOCdevkit"
    voc_year(kit / "VOC2007", ("trainval", "test"), "cat")
    voc_year(kit / "VOC2012", ("train", "trainval"), "dog")
    for path in (kit.parent, kit):
        found = recognise(path)
        assert found.splits == ("train", "test", "trainval")
        assert "VOC2007, " in str(found) and "VOC2012 together" in str(found)
    both, test, one = opened(kit.parent, "trainval"), opened(kit.parent, "test"), opened(kit / "VOC2012", "trainval")
    assert [row["file_name"] for row in map(both.row, range(2))] == ["VOC2007_trainval.png", "VOC2012_trainval.png"]
    assert all(both.image_source(both.row(i)).read_bytes() for i in range(2)) and not both.problems
    assert len(test) == 1 and test.class_names == both.class_names == ["cat", "dog"]
    assert len(one) == 1 and one.class_names == ["dog"]
    shutil.rmtree(kit / "VOC2012" / "ImageSets")
    with pytest.raises(BadInput, match=r"only some .* are split: .*VOC2012 \(not split\); choose one"):
        recognise(kit.parent)


def test_what_is_no_data_set_and_where_voc_annotations_lie_is_said(tmp_path):
    with pytest.raises(BadInput, match="no such folder"):
        recognise(tmp_path / "none")
    with pytest.raises(BadInput, match="Pascal VOC .* YOLO .* COCO .* CSV"):
        recognise(tmp_path)
    for name in ("one", "two"):
        picture(tmp_path / "sets" / name / "images" / "1.png")
        write_text(tmp_path / "sets" / name / "boxes" / "1.xml", xml("1.png"))
    with pytest.raises(BadInput, match=r"lie in \S+/one/boxes, \S+/two/boxes: give the folder of one data set"):
        recognise(tmp_path)
    assert len(opened(tmp_path / "sets" / "two")) == 1


def test_a_list_of_other_classes_is_said(tmp_path):
    picture(tmp_path / "d" / "images" / "1.png")
    write_text(tmp_path / "d" / "annotations" / "1.xml", xml("1.png"))
    write_text(tmp_path / "d" / "labels.txt", "dog\nhorse\n")
    table = opened(tmp_path / "d")
    (problem,) = table.problems
    assert table.class_names == ["cat"] and problem.severity == "warning" and problem.file == "labels.txt"
    assert "lists 2 classes, but not cat" in problem.message
    cvat = "# label:color_rgb:parts:actions\nbackground:0,0,0::\ndog:1,1,1::\ncat:2,2,2::\n"
    write_text(tmp_path / "d" / "labelmap.txt", cvat)
    (tmp_path / "d" / "labels.txt").unlink()
    assert opened(tmp_path / "d").class_names == ["dog", "cat"]
    write_text(tmp_path / "d" / "labels.txt", "dog\ncat\n")  # the table in the cache is not used
    table = opened(tmp_path / "d")
    assert table.class_names == ["dog", "cat"] and not table.problems


def test_voc_defects_are_named(tmp_path):
    broken = [xml("1.png", (4, 5, 4, 25)), xml("2.png", (4, "x", 9, 9)), "<annotation><object>"]
    for number, text in enumerate([xml("0.png"), *broken, xml("9.png")]):
        picture(tmp_path / "d" / "JPEGImages" / f"{number}.png", number)
        write_text(tmp_path / "d" / "Annotations" / f"{number}.xml", text)
    with pytest.raises(BadInput, match="expected numbers in <bndbox>") as caught:
        opened(tmp_path / "d")
    assert "invalid XML" in str(caught.value)
    table = opened(tmp_path / "d", on_error="drop")
    assert len(table) == 3 and table.num_boxes().tolist() == [1, 0, 1]
    assert any("has no area; left out" in p.message and p.severity == "warning" for p in table.problems)


@pytest.mark.parametrize("side", ["inf", "1e400", "9" * 400, "nan", "wide"])
def test_a_size_in_voc_that_is_no_whole_number_is_named(tmp_path, side):
    picture(tmp_path / "d" / "JPEGImages" / "0.png")
    text = xml("0.png").replace("<width>40<", f"<width>{side}<")
    write_text(tmp_path / "d" / "Annotations" / "0.xml", text)
    with pytest.raises(BadInput, match="0.xml: <size> has the width .*; expected a whole number of pixels"):
        opened(tmp_path / "d")


def yolo_folder(root, settings, layout="{split}/images"):
    for split in ("train", "valid"):
        images = layout.format(split=split)
        picture(root / images / "1.png")
        lines = "1 0.5 0.5 0.25 0.5\n0 0.1 0.1 0.9 0.1 0.5 0.8\n"
        write_text(root / images.replace("images", "labels") / "1.txt", lines)
    if settings is not None:
        (root / "data.yaml").write_text(yaml.safe_dump(settings))


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ({"train": "../train/images", "val": "../valid/images", "nc": 2, "names": ["a", "b"]}, "{split}/images"),
        ({"path": ".", "train": "images/train", "val": "images/valid", "names": {0: "a", 1: "b"}}, "images/{split}"),
        ({"path": "/gone", "train": ["train/images"], "val": "valid", "names": {0: "a", 1: "b"}}, "{split}/images"),
        ({"train": "train.txt", "val": "valid.txt", "names": ["a", "b"]}, "images/{split}"),
        ({"train": "..\\train\\images", "val": "valid\\images", "names": ["a", "b"]}, "{split}/images"),
        (None, "{split}/images"),
        (None, "images/{split}"),
    ],
)
def test_yolo_layouts(tmp_path, settings, layout):
    yolo_folder(tmp_path / "d", settings, layout)
    for split in ("train", "valid"):
        (tmp_path / "d" / f"{split}.txt").write_text(f"./images/{split}/1.png\n")
    assert recognise(tmp_path / "d").splits == ("train", "val")
    for split in ("train", "val"):
        table = opened(tmp_path / "d", split)
        assert table.class_names == (["a", "b"] if settings else ["class 0", "class 1"])
        objects = table.row(0)["objects"]
        assert objects["category"].tolist() == [1, 0]  # the second line is a polygon
        assert np.allclose(objects["bbox"], [[15, 7.5, 25, 22.5], [4, 3, 36, 24]], atol=1e-5)


def test_yolo_defects_are_named(tmp_path):
    yolo_folder(tmp_path / "d", {"train": "train/images", "val": "valid/images", "names": ["a", "b"]})
    lines = "5 0.5 0.5 0.1 0.1\n0 0.5 0.5\n0 nan 1 1 1\n0 0.5 0.5 0 0.1\n"
    write_text(tmp_path / "d" / "train" / "labels" / "1.txt", lines)
    with pytest.raises(BadInput) as caught:
        opened(tmp_path / "d")
    assert len(caught.value.problems) == 4 and "class 5 is not defined" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "filename,width,height,class,xmin,ymin,xmax,ymax\n1.png,40,30,cat,4,5,20,25\n2.png,2147483648,30,cat,1,2,3,4\n",
        "image;x;y;w;h;label\n1.png;4;5;16;20;cat\n2.png;1;2;2;2;cat\n",
        "Image Name,Label,x1,y1,x2,y2\n1,cat,4,5,20,25\n2,cat,1,2,3,4\n",
        "1.png,4,5,20,25,cat\n2.png,1,2,3,4,cat\n",
        "image,x1,y1,x2,y2,label\n1.png,0.1,0.16666666667,0.5,0.83333333333,cat\n2.png,0.025,0.066667,0.075,0.13333,cat\n",
    ],
)
def test_csv_columns_are_told_by_their_names(tmp_path, text):
    for number in (1, 2):
        picture(tmp_path / "images" / f"{number}.png", number)
    (tmp_path / "boxes.csv").write_text(text)
    for source in ({"source": "train", "path": tmp_path}, {"source": tmp_path / "boxes.csv"}):
        table = open_dataset(cache_dir=tmp_path / "c", **source)
        assert np.allclose(boxes_of(table), [[4, 5, 20, 25]], atol=1e-4) and table.class_names == ["cat"]


def test_csv_with_a_column_of_splits_and_empty_images(tmp_path):
    for number in (1, 2, 3):
        picture(tmp_path / "d" / f"{number}.png", number)
    lines = "1.png,4,5,20,25,a,train\n2.png,,,,,,train\n3.png,1,1,9,9,b,valid\n"
    write_text(tmp_path / "d" / "a.csv", f"image,x1,y1,x2,y2,label,split\n{lines}")
    assert recognise(tmp_path / "d").splits == ("train", "val")
    train, val = (opened(tmp_path / "d", split) for split in ("train", "val"))
    assert train.num_boxes().tolist() == [1, 0] and val.num_boxes().tolist() == [1]
    assert train.class_names == val.class_names == ["a", "b"] and not train.problems


def test_coco_layouts(shapes, tmp_path):
    for layout, images in (
        ("train/_annotations.coco.json", "train"),
        ("annotations/instances_train2017.json", "train2017"),
        ("result.json", "images"),
    ):
        root = tmp_path / layout.replace("/", "-")
        shutil.copytree(shapes[0] / "train", root / images)
        (root / layout).parent.mkdir(exist_ok=True)
        shutil.copy(shapes[0] / "annotations" / "train.json", root / layout)
        assert recognise(root).format == "coco"
        assert_equal_tables(opened(root), shapes[1]["train"])


def test_files_of_another_split_in_the_same_folder_are_no_warning(shapes, tmp_path):
    (tmp_path / "d" / "images").mkdir(parents=True)
    for split in ("train", "val"):
        for path in (shapes[0] / split).iterdir():
            shutil.copy(path, tmp_path / "d" / "images" / f"{split}_{path.name}")
        document = json.loads((shapes[0] / "annotations" / f"{split}.json").read_text())
        for image in document["images"]:
            image["file_name"] = f"{split}_{image['file_name']}"
        write_text(tmp_path / "d" / "annotations" / f"{split}.json", json.dumps(document))
    assert not opened(tmp_path / "d").problems
    shutil.copy(tmp_path / "d" / "images" / "train_000000.jpg", tmp_path / "d" / "images" / "other.jpg")
    assert [p.file for p in opened(tmp_path / "d", "val").problems] == ["other.jpg"]


@pytest.mark.parametrize(("format", "check_images"), [("yolo", True), ("yolo", False), ("csv", "header")])
def test_an_image_without_a_readable_size_is_an_error_once(shapes, tmp_path, format, check_images):
    """YOLO and CSV read sizes out of the images; one that cannot be read is named, not left out without a word."""
    write_folder(shapes[1]["train"], tmp_path / "d", "train", format)
    if format == "csv":  # whose sizes are optional
        lines = [line.split(",") for line in (tmp_path / "d" / "train.csv").read_text().splitlines()]
        write_text(tmp_path / "d" / "train.csv", "".join(f"{','.join(line[:6])}\n" for line in lines))
    (tmp_path / "d" / "images" / "train" / "000003.jpg").write_bytes(b"\xff\xd8nothing")
    with pytest.raises(BadInput, match="1 errors .*\n.*000003.jpg .image 4.: not an image"):
        opened(tmp_path / "d", check_images=check_images)
    table = opened(tmp_path / "d", on_error="drop", check_images=check_images)
    assert len(table) == 19 and [problem.image_id for problem in table.problems] == [4]


def test_convert_script(shapes, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DETECTION_TOOLKIT_CACHE", str(tmp_path / "c"))
    (tmp_path / "only").mkdir()
    shutil.copytree(shapes[0] / "train", tmp_path / "only" / "train")
    shutil.copy(shapes[0] / "annotations" / "train.json", tmp_path / "only" / "train" / "_annotations.coco.json")
    assert convert.main([str(tmp_path / "only"), str(tmp_path / "yolo"), "--to", "yolo", "--val", "0.3"]) == 0
    assert "relations are left out" in capsys.readouterr().out
    assert recognise(tmp_path / "yolo").splits == ("train", "val")
    assert convert.main([str(tmp_path / "only"), str(tmp_path / "yolo"), "--to", "voc"]) == 2
    assert convert.main([str(tmp_path / "none"), str(tmp_path / "x"), "--to", "voc"]) == 2
    assert unsupported_by(shapes[1]["train"], "coco") == []


@needs_bccd
def test_bccd_as_downloaded(tmp_path):
    for split, images, count in (("train", 205, 2804), ("val", 87, 1137), ("test", 72, 945)):
        voc, coco = (open_dataset(split, path=BCCD, format=format, cache_dir=tmp_path) for format in ("auto", "coco"))
        assert (len(voc), voc.num_boxes().sum()) == (images, count)
        assert_equal_tables(voc, coco)
