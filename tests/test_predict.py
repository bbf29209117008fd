"""Files to predict on, sizes, numbers in the JSON, and the pictures; tests/scripts/test_predict.py runs the script."""

import csv
import io
import json
import os
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw
from report_data import found_of, table_of

from scripts import predict
from toolkit.base.boxes import Boxes
from toolkit.base.distributed import usable_device
from toolkit.base.errors import BadInput
from toolkit.base.files import distinct, without_suffix
from toolkit.base.masks import column_of, rles_of
from toolkit.data.annotations import ImageRow
from toolkit.data.formats import open_dataset
from toolkit.data.pipeline import processor_size, val_transform
from toolkit.data.table import Category, LabelledImages
from toolkit.detectors.scene_graphs.graph_pictures import draw_arrow, draw_found, left_out_in_words
from toolkit.evaluation.draw import CLASS_COLOURS, MOST_TAGS, picture_with_boxes
from toolkit.evaluation.predictions import detections_as_json
from toolkit.models import options_class
from toolkit.run.open_run import kind_of, open_run
from toolkit.tools.predict.image_files import find_images, find_or_fetch, image_ids_of
from toolkit.tools.predict.open import open_predictor
from toolkit.tools.predict.outputs import check_output_folder, clear_outputs, names_of_outputs, write_outputs
from toolkit.tools.predict.predict_each import predict_files, predict_table
from toolkit.tools.predict.predict_split import SplitOptions, open_any, split_arguments
from toolkit.tools.predict.predictor import Predictor, as_image, from_report, input_hw, of_classes
from toolkit.tools.predict.program import picture_names
from toolkit.tools.predict.uncertain import most_uncertain, write_uncertain

CATEGORIES = [Category(7, "cup"), Category(90, "plate")]


def image_file(path: Path, size=(8, 6)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, "#336699").save(path)
    return path


@pytest.fixture
def folder(tmp_path):
    for name in ("a.jpg", "b/a.jpg", "b/c/d.PNG", "out/pictures/a.jpg", "odd[1].jpg"):
        image_file(tmp_path / name)
    (tmp_path / "b" / "notes.txt").write_text("")
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_linked_folders_are_searched_once(folder, tmp_path_factory):
    found = find_images([folder], leave_out=folder / "out")
    (folder / "linked").symlink_to(folder / "b")
    (folder / "up").symlink_to(folder)
    assert find_images([folder], leave_out=folder / "out") == found
    other = tmp_path_factory.mktemp("other")
    (other / "linked").symlink_to(folder / "b")
    names = [name.as_posix() for name in find_images([other]).values()]
    assert names == ["linked/a.jpg", "linked/c/d.PNG"]


def test_files_folders_and_patterns_each_file_once(folder):
    everything = ["a.jpg", "b/a.jpg", "b/c/d.PNG", "odd[1].jpg"]
    found = find_images([folder], leave_out=folder / "out")
    assert [path.relative_to(folder).as_posix() for path in found] == everything
    assert [name.as_posix() for name in found.values()] == everything
    again = find_images([folder / "odd[1].jpg", folder / "b", folder / "b" / "a.jpg", f"{folder}/b/**/*"])
    assert [name.as_posix() for name in again.values()] == ["odd[1].jpg", "a.jpg", "c/d.PNG"]
    assert list(find_images([folder / "b" / "notes.txt"])) == [folder / "b" / "notes.txt"]  # asked for by name
    with pytest.raises(BadInput, match="none.jpg: no such file.*looked for"):
        find_images([folder / "a.jpg", folder / "none.jpg"])


def test_pictures_of_one_name_do_not_replace_each_other(tmp_path):
    given = {tmp_path / name: Path(name).relative_to(Path(name).parts[0])
             for name in ("x/a.jpg", "y/a.jpg", "z/a.webp", "z/b/a.jpg", "x/a.png")}  # fmt: skip
    names = [path.as_posix() for path in picture_names(given).values()]
    assert names == ["pictures/a.jpg", "pictures/a_2.jpg", "pictures/a.png", "pictures/b/a.jpg", "pictures/a_2.png"]


@given(height=st.integers(1, 2000), width=st.integers(1, 2000), image_size=st.integers(1, 900),
       scales=st.lists(st.integers(1, 900), max_size=3), max_size=st.integers(900, 1400))  # fmt: skip
def test_images_are_resized_as_in_the_evaluation(height, width, image_size, scales, max_size):
    image = torch.empty(3, 1, 1, dtype=torch.uint8).expand(3, height, width)
    sizes = {"image_size": image_size, "scales": scales, "max_size": max_size}
    transform = val_transform(**sizes)
    resized = transform.draw((height, width), torch.Generator()) if scales else transform.size_hw
    assert input_hw(tuple(image.shape[-2:]), processor_size(**sizes)) == resized
    assert input_hw((height, width), None) == (height, width)


def test_json_has_the_original_ids_and_xywh():
    found = found_of([[1.0, 2.0, 4.5, 8.0], [-1.0, 0.0, 3.0, 3.0]], [1, 0], [0.75, 0.5])
    assert detections_as_json(found, CATEGORIES) == [
        {"category_id": 90, "category": "plate", "bbox": [1.0, 2.0, 3.5, 6.0], "score": 0.75},
        {"category_id": 7, "category": "cup", "bbox": [-1.0, 0.0, 4.0, 3.0], "score": 0.5},
    ]
    assert detections_as_json(found_of([], [], []), CATEGORIES) == []


def test_every_file_gets_its_own_detections_or_its_error(tmp_path):
    batches = []

    def size_as_box(images, score_threshold):
        batches.append(len(images))
        return [found_of([0.0, 0.0, *map(float, image.shape[:0:-1])], [0], [1.0]) for image in images]

    predictor = Predictor("test", CATEGORIES, size_as_box)
    sizes = [(8, 6), (30, 10), (8, 6), (9, 7), (30, 10)]
    paths = [image_file(tmp_path / f"{i}.png", size) for i, size in enumerate(sizes)]
    broken = tmp_path / "broken.png"
    broken.write_bytes(paths[1].read_bytes()[:-20])
    results = {
        result.key: result for result in predict_files(predictor, [*paths[:2], broken, *paths[2:]], batch_size=2)
    }
    assert results.pop(broken).error.reason == "image data truncated" and results.keys() == set(paths)
    for path, (width, height) in zip(paths, sizes, strict=True):
        assert results[path].error is None and tuple(results[path].image.shape) == (3, height, width)
        assert results[path].detections["boxes"].tolist() == [[0, 0, width, height]]
    assert sum(batches) == 5 and max(batches) <= 2
    assert next(predict_files(predictor, [broken])).image is None  # a batch without images


def test_pictures_of_a_table_are_predicted_in_its_order_and_one_that_cannot_be_read_is_named(tmp_path):
    def green_as_score(images, score_threshold):
        assert score_threshold == 0.0
        return [found_of([0.0, 0.0, 4.0, 4.0], [1], [int(image[1, 0, 0]) / 256]) for image in images]

    predictor = Predictor("test", CATEGORIES, green_as_score)
    table = table_of(tmp_path, [[]] * 19, classes=("plate", "cup"))
    found = predict_table(predictor, table)
    assert found.scores.tolist() == [20 * (number % 10) / 256 for number in range(19)]
    assert found.image_index.tolist() == list(range(19))
    assert set(found.labels.tolist()) == {0}  # of "plate" in the table
    (tmp_path / "11.png").write_bytes(b"")
    with pytest.raises(BadInput, match=r"annotations.json: .*11.png: .*empty"):
        predict_table(predictor, table)


def test_links_that_lead_nowhere_are_told_and_the_other_pictures_are_judged(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "itself.jpg").symlink_to(tmp_path / "itself.jpg")
    (tmp_path / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    images = find_images([tmp_path], leave_out=tmp_path / "out")
    assert sorted(path.name for path in images) == ["a.png", "gone.jpg", "itself.jpg"]
    nothing = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}
    predictor = Predictor("", [], lambda images, threshold: [nothing for _ in images])
    results = {each.key.name: each.error for each in predict_files(predictor, list(images), score_threshold=0.5)}
    assert results["a.png"] is None and "not found" in str(results["gone.jpg"])
    assert "symbolic links" in str(results["itself.jpg"])
    check_output_folder(tmp_path / "out", list(images), overwrite=False)


def test_what_a_path_is(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("")
    configs = {"final": "{}", "detr": '{"model_type": "detr"}', "bert": '{"model_type": "bert"}', "broken": "{"}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    for name in ("model.onnx", "results.json", "weights.pth"):
        (tmp_path / name).write_text("")
    kinds = {"run": "run", "run/checkpoints": "run", "final": "final", "detr": "transformers", "model.onnx": "exported"}
    kinds |= {"results.json": "predictions", "weights.pth": "file"}
    assert {name: kind_of(tmp_path / name) for name in kinds} == kinds
    assert kind_of("facebook/detr-resnet-50") == "transformers"
    for name, words in (("broken", "config.json: cannot be read"), ("finel", "did you mean .*final")):
        with pytest.raises(BadInput, match=words):
            kind_of(tmp_path / name)
    for name, words in (("", "no run folder"), ("broken", "cannot be read"), ("bert", "neither a run folder")):
        with pytest.raises(BadInput, match=words):
            open_predictor(tmp_path / name)


@pytest.mark.parametrize("given", [{"path": "d"}, {"name": "someone/set"}, {"format": "shapes"}, {}])
def test_a_split_is_one_of_the_data_of_the_run_where_they_have_splits(given):
    data = {"path": None, "name": None, "format": "auto", "train": "a.json", "val": "b.json", "on_error": "drop"}
    data |= given
    asked = split_arguments({"data": data}, SplitOptions(split="test"))
    assert asked["source"] == "test" and asked.get("part_of") == ("a.json" if given else None)
    assert split_arguments({"data": data}, SplitOptions())["source"] == "b.json"


def test_a_mistyped_path_is_answered_with_the_names_near_it(tmp_path, monkeypatch):
    (tmp_path / "runs" / "detr" / "final").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for typed, near in {
        "runs/dter": "did you mean runs/detr?", "rnus/detr/final": "did you mean runs?",
        "runs/detr/fnal": "did you mean runs/detr/final?",
        "runs/else.onnx": f"runs{os.sep} has detr", str(tmp_path / "run"): f"did you mean {tmp_path / 'runs'}?",
    }.items():  # fmt: skip
        opens = (open_predictor, lambda typed: open_run(typed, options_class), kind_of)
        for opened in (*opens, lambda typed: open_any(typed, None, SplitOptions(), None)):
            with pytest.raises(BadInput, match="no such run") as refused:
                opened(typed)
            assert str(refused.value).startswith(typed) and near in str(refused.value)


def colour(label: int) -> list[int]:
    return [int(CLASS_COLOURS[label][i : i + 2], 16) for i in (1, 3, 5)]


def drawn(image, boxes, *others) -> np.ndarray:
    return np.asarray(picture_with_boxes(image, found_of(boxes, *others), ["a", "b", "c"]).convert("RGB")).astype(int)


def test_boxes_are_drawn_where_they_are_in_the_colour_of_their_class():
    grey = torch.full((3, 400, 800), 128, dtype=torch.uint8)
    picture = drawn(grey, [[200.0, 100.0, 600.0, 300.0]], [2], [0.9])
    assert picture.shape == (400, 800, 3)
    assert picture[200, 200].tolist() == picture[300, 400].tolist() == colour(2)
    assert picture[200, 400].tolist() == [128] * 3  # inside nothing is covered
    assert (picture[70:99, 200:300] != 128).any()  # the tag, above the box
    assert (drawn(grey, [], [], []) == 128).all()


def test_small_images_are_enlarged_and_tags_keep_off_each_other():
    small, box = torch.full((3, 32, 64), 128, dtype=torch.uint8), [20.0, 12.0, 44.0, 28.0]
    one, two = drawn(small, [box], [0], [0.9]), drawn(small, [box, box], [0, 0], [0.9, 0.8])
    assert one.shape == (320, 640, 3)
    tags, both = ((np.abs(picture - colour(0)).sum(-1) == 0).sum() for picture in (one, two))
    assert both > 1.2 * tags  # both can be seen


def test_a_relation_is_an_arrow_from_its_subject_to_its_object(tmp_path):
    image, boxes = torch.zeros(3, 320, 640, dtype=torch.uint8), [[10, 140, 50, 180], [590, 140, 630, 180]]
    graph = found_of(boxes, [0, 1], [0.9, 0.8]) | {"triplet_scores": torch.tensor([0.5])}
    graph |= {"pairs": torch.tensor([[0, 1]]), "predicates": torch.tensor([3])}
    path = draw_found(image, graph, ["cup", "plate"], ["on", "under", "in", "beside"], tmp_path / "graph.png")
    rows, columns = (np.asarray(Image.open(path))[:, :640] == colour(3)).all(-1).nonzero()
    assert 150 < rows.min() and rows.max() < 175 and columns.min() < 35 and 600 < columns.max() < 612

    assert left_out_in_words(1, 1, 20, 0.0) == "" and left_out_in_words(0, 0, 20, 0.0) == "no relations"
    assert left_out_in_words(20, 100, 20, 0.0) == "20 of 100 relations are drawn"
    assert left_out_in_words(0, 9, 20, 0.5) == "0 of 9 relations are drawn: no other has a score of 0.5 or more"
    what = ["cup", "plate"], ["on", "under", "in", "beside"]
    path = draw_found(image, graph, *what, tmp_path / "none.png", relation_score=0.6)
    assert not (np.asarray(Image.open(path))[:, :640] == colour(3)).all(-1).any()

    # Beside it the objects lie on a circle, in the order of their angles around their middle: 0 left, 1, 2 below right.
    boxes = [[x, y, x, y] for x, y in ((100, 100), (200, 100), (150, 300), (600, 20))]
    graph = found_of(boxes, [0, 1, 0, 1], [0.9] * 4) | {"triplet_scores": torch.tensor([0.5, 0.5])}
    graph |= {"pairs": torch.tensor([[0, 2], [0, 1]]), "predicates": torch.tensor([3, 2])}
    draw_found(image, graph, ["cup", "plate"], ["on", "under", "in", "beside"], path)
    rows, columns = (np.asarray(Image.open(path))[:, 640:] == colour(3)).all(-1).nonzero()
    assert columns.min() < 100 and rows.min() > 140 and rows.max() > 200

    picture = Image.new("RGB", (100, 100))
    draw_arrow(ImageDraw.Draw(picture), (50, 10), (50, 90), CLASS_COLOURS[0], 8, gap=20)
    rows = (np.asarray(picture) == colour(0)).all(-1).any(1).nonzero()[0]
    assert rows.min() == 10 and 64 < rows.max() <= 70, "it ends before its object"


def predictor_of(found: dict, **others) -> Predictor:
    """Finds the same in every image, as far as the scores allow."""

    def predict(images, score_threshold):
        keep = found["scores"] > score_threshold
        return [{key: value[keep] for key, value in found.items()} for _ in images]

    return Predictor("test", CATEGORIES, predict, **others)


def test_images_of_every_kind_are_the_same_image():
    array = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    expected = torch.from_numpy(array).permute(2, 0, 1)
    for image in (array, Image.fromarray(array), expected):
        assert torch.equal(as_image(image), expected)
    assert as_image(array[..., 0]).shape == (3, 6, 8)
    for wrong in (array.astype(np.float32), torch.zeros(6, 8, 3, dtype=torch.uint8), "photo.jpg"):
        with pytest.raises(BadInput, match="expected a PIL image"):
            as_image(wrong)
    found = predictor_of(found_of([[0.0, 0.0, 2.0, 2.0]], [0], [0.5]))
    assert found(array)["scores"].tolist() == [0.5]
    assert [len(each["scores"]) for each in found([array, Image.fromarray(array)], 0.6)] == [0, 0]


def test_classes_and_thresholds_of_the_report():
    found = found_of([[0.0, 0.0, 2.0, 2.0]] * 4, [0, 0, 1, 1], [0.9, 0.3, 0.5, 0.2])
    plain, with_report = predictor_of(found), predictor_of(found, thresholds={"": 0.4, "plate": 0.1})
    grey = np.zeros((4, 4, 3), np.uint8)
    assert of_classes(plain, ["plate"])(grey, 0)["scores"].tolist() == pytest.approx([0.5, 0.2])
    assert from_report(with_report)(grey, 0)["scores"].tolist() == pytest.approx([0.9, 0.5, 0.2])
    with pytest.raises(BadInput, match="fork.*cup, plate"):
        of_classes(plain, ["fork"])
    with pytest.raises(BadInput, match="no report"):
        from_report(plain)
    # relations go with their objects
    found = found_of([[0.0, 0.0, 2.0, 2.0]] * 3, [0, 1, 0], [0.9, 0.8, 0.7])
    found |= {"pairs": torch.tensor([[0, 1], [2, 0]]), "predicates": torch.tensor([3, 4]),
              "triplet_scores": torch.tensor([0.5, 0.4])}  # fmt: skip
    graph = Predictor("test", CATEGORIES, lambda images, _: [found] * len(images))
    left = of_classes(graph, ["cup"])(grey, 0)
    assert left["pairs"].tolist() == [[1, 0]] and left["predicates"].tolist() == [4]


DETECTION = {"category_id": 90, "category": "plate", "bbox": [1.0, 2.0, 4.0, 8.0], "score": 0.5}
DOCUMENT = {
    "model": "test",
    "score_threshold": 0.3,
    "categories": [{"id": 7, "name": "cup"}, {"id": 90, "name": "plate"}],
    "images": [
        {"id": 5, "file_name": "x/a.jpg", "width": 10, "height": 20, "detections": [DETECTION]},
        {"id": 6, "file_name": "y/a.jpg", "width": 10, "height": 20, "detections": []},
    ],
    "errors": [],
}
FOUND = LabelledImages(
    [ImageRow(5, "x/a.jpg", 10, 20), ImageRow(6, "y/a.jpg", 10, 20)],
    Boxes.found([1, 0], [[1.0, 2.0, 5.0, 10.0]], [0.5], [1]),
    CATEGORIES,
)


def test_every_format_has_the_same_boxes(tmp_path):
    names = distinct(["a.jpg", "a.jpg"], without_suffix)
    assert names == ["a.jpg", "a_2.jpg"]
    write_outputs(DOCUMENT, FOUND, names, ["json", "jsonl", "coco", "yolo", "voc", "csv"], tmp_path)
    assert json.loads((tmp_path / "predictions.json").read_text()) == DOCUMENT
    lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == DOCUMENT["images"]
    (result,) = json.loads((tmp_path / "results.json").read_text())
    assert result == {"image_id": 5, "category_id": 90, "bbox": [1.0, 2.0, 4.0, 8.0], "score": 0.5}
    assert (tmp_path / "labels" / "a.txt").read_text() == "1 0.3 0.3 0.4 0.4 0.5\n"
    assert (tmp_path / "labels" / "a_2.txt").read_text() == ""
    assert (tmp_path / "labels" / "classes.txt").read_text() == "cup\nplate\n"
    voc = ElementTree.parse(tmp_path / "annotations" / "a.xml")
    assert [float(each.text) for each in voc.find("object/bndbox")] == [1.0, 2.0, 5.0, 10.0]  # as our reader takes them
    assert voc.findtext("filename") == "a.jpg" and voc.findtext("object/score") == "0.5"
    with open(tmp_path / "predictions.csv", newline="") as file:
        first, second = csv.DictReader(file)
    assert first["image"] == os.path.abspath("x/a.jpg")  # the table lies in another folder
    assert [first[key] for key in ("x1", "y1", "x2", "y2")] == ["1", "2", "5", "10"]
    assert [first[key] for key in ("label", "score", "image_id", "category_id")] == ["plate", "0.5", "5", "90"]
    assert second["image"] == os.path.abspath("y/a.jpg") and second["label"] == second["score"] == ""


@pytest.mark.parametrize("format", ["voc", "yolo"])
def test_images_of_several_folders_are_named_so_that_they_are_found_again(tmp_path, format):
    """Labels of x/a.jpg must not become those of y/a.jpg, nor of no image at all."""
    for name in ("x/a.png", "y/a.png", "y/z/b.png"):
        image_file(tmp_path / "pictures" / name, (10, 20))
    files = find_images([tmp_path / "pictures" / "x" / "a.png", tmp_path / "pictures" / "y"])
    named = names_of_outputs(files, set(), [format])
    assert list(named.values()) == ["x/a.png", "y/a.png", "y/z/b.png"]
    rows = [ImageRow(number, str(path), 10, 20) for number, path in enumerate(files)]
    boxes = Boxes.found([1, 1, 1], [[1, 2, 5, 10], [2, 2, 5, 10], [3, 2, 5, 10]], [0.5] * 3, [0, 1, 0])
    write_outputs(DOCUMENT, LabelledImages(rows, boxes, CATEGORIES), list(named.values()), [format], tmp_path / "out")
    source = tmp_path / "out" / ("labels" if format == "yolo" else "")
    options = {"image_dir": str(tmp_path / "pictures"), "cache_dir": tmp_path / "cache"}
    table = open_dataset("train", path=source, **options)
    assert [row.file_name for row in table.image_rows()] == list(named.values())
    assert table.boxes().xyxy == pytest.approx(boxes.xyxy, abs=1e-4)


def test_images_that_would_share_a_file_of_labels_are_named_before_anything_is_done(tmp_path, capsys):
    for name in ("a.jpg", "a.png", "b.png"):
        image_file(tmp_path / "pictures" / name)
    arguments = ["no_run", str(tmp_path / "pictures"), "--out", str(tmp_path / "out"), "--format", "yolo"]
    assert predict.main(arguments) == 2
    said = capsys.readouterr().err
    assert "a.png would share the file labels/a.txt" in said and "or choose --format coco" in said
    assert not (tmp_path / "out").exists()
    named = names_of_outputs(find_images([tmp_path / "pictures"]), set(), ["json", "voc"])
    assert list(named.values()) == ["a.jpg", "a_2.png", "b.png"]


def test_images_that_differ_in_their_endings_are_found_again_in_voc(tmp_path):
    for name in ("a.jpg", "a.png"):
        image_file(tmp_path / "pictures" / name, (10, 20))
    files = find_images([tmp_path / "pictures"])
    rows = [ImageRow(number, str(path), 10, 20) for number, path in enumerate(files)]
    found = LabelledImages(rows, Boxes.found([1, 1], [[1, 2, 5, 10], [2, 2, 5, 10]], [0.5] * 2, [0, 1]), CATEGORIES)
    write_outputs(DOCUMENT, found, list(names_of_outputs(files, set(), ["voc"]).values()), ["voc"], tmp_path / "out")
    options = {"image_dir": str(tmp_path / "pictures"), "cache_dir": tmp_path / "cache"}
    table = open_dataset("train", path=tmp_path / "out", **options)
    assert [row.file_name for row in table.image_rows()] == ["a.jpg", "a.png"]
    assert table.boxes().xyxy == pytest.approx(found.boxes.xyxy, abs=1e-4)


def test_an_earlier_prediction_is_not_mixed_with_a_new_one(tmp_path):
    check_output_folder(tmp_path, [], overwrite=False)
    write_outputs(DOCUMENT, FOUND, ["a.jpg", "b.jpg"], ["json", "yolo"], tmp_path)
    (tmp_path / "mine.txt").write_text("")
    check_output_folder(tmp_path, [], overwrite=True)
    for inputs, overwrite, words in (([], False, "--overwrite"), (["labels/a.txt"], True, "would overwrite it")):
        with pytest.raises(BadInput, match=words):
            check_output_folder(tmp_path, [tmp_path / name for name in inputs], overwrite)
    clear_outputs(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_image_ids_of_an_annotation_file(tmp_path):
    file = tmp_path / "val.json"
    file.write_text(json.dumps({"images": [{"id": 9, "file_name": "a.jpg"}, {"id": 4, "file_name": "sub/b.jpg"}]}))
    assert image_ids_of(file, [Path("here/sub/b.jpg"), Path("here/a.jpg")]) == [4, 9]
    assert image_ids_of(None, [Path("a"), Path("b")]) == [1, 2]
    with pytest.raises(BadInput, match="c.jpg"):
        image_ids_of(file, [Path("c.jpg")])
    file.write_text("\ufeff" + file.read_text(), encoding="utf-8")  # a byte order mark, as where data are read
    assert image_ids_of(file, [Path("a.jpg")]) == [9]
    for text, words in (("{}", "no COCO file with images"), ("[1]", "found a list")):
        file.write_text(text)
        with pytest.raises(BadInput, match=words):
            image_ids_of(file, [Path("a.jpg")])


def test_addresses_and_a_list_on_the_standard_input(tmp_path, monkeypatch):
    file = image_file(tmp_path / "a b.png")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path)))
    Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{file}\n\n{here}/a%20b.png\n"))
    files, errors, fetched = find_or_fetch(["-", f"{here}/none.png"])
    server.shutdown()
    assert [path.read_bytes() for path in files] == [file.read_bytes()] * 2
    assert len(errors) == 1 and "cannot be fetched: File not found" in next(iter(errors.values()))
    assert fetched == set(files) - {file}
    assert list(names_of_outputs(files, fetched, ["voc"]).values()) == ["a b.png", "a%20b.png"]


@pytest.mark.parametrize("device", ["gpu", "", "cuda:x", "cuda:99", "meta", "xpu:1", "vulkan"])
def test_a_device_that_is_not_there_is_one_sentence(device, tmp_path):
    with pytest.raises(BadInput, match=f"--device {device}: .*; leave it out, or use cpu"):
        open_predictor(tmp_path, device=device)
    assert usable_device("cpu:0") == usable_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("text", ["50", "-0.1", "1.01", "nan", "inf", "x"])
def test_a_score_threshold_is_a_score(text, capsys):
    with pytest.raises(SystemExit) as ended:
        predict.main(["runs/none", "a.png", "--out", "out", f"--score-threshold={text}"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "expected a number from 0 to 1, or auto" in said
    assert ("did you mean 0.5?" in said) == (text == "50")
    assert predict.score_or_auto("auto") == "auto" and predict.score_or_auto("1") == 1.0


def test_a_mask_without_a_pixel_loses_no_detection(tmp_path):
    pixels = torch.zeros(2, 6, 8, dtype=torch.uint8)
    pixels[1, 1:3, 2:6] = 1
    masks = column_of(rles_of(pixels))
    found = Boxes.found([2], [[1, 1, 3, 3], [2, 1, 6, 3]], [0.9, 0.8], [0, 1])
    labelled = LabelledImages([ImageRow(1, "a.png", 8, 6)], replace(found, extra={"masks": masks}), CATEGORIES)
    formats = ["json", "jsonl", "coco", "yolo", "voc", "csv"]
    changes = write_outputs(DOCUMENT, labelled, ["a.png"], formats, tmp_path)
    assert changes == ["yolo: of detections whose mask has no pixel, the boxes are written: 1"]
    first, second = (tmp_path / "labels" / "a.txt").read_text().splitlines()
    assert list(map(float, first.split())) == pytest.approx([0, 2 / 8, 2 / 6, 2 / 8, 2 / 6, 0.9])
    assert second.startswith("1 ") and second.endswith(" 0.8") and len(second.split()) > 6
    assert len(json.loads((tmp_path / "results.json").read_text())) == 2
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 3
    assert (tmp_path / "annotations" / "a.xml").read_text().count("<object>") == 2


def test_found_boxes_become_a_data_set_to_train_on(tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (10, 20)).save(tmp_path / name / "a.png")
    rows = [ImageRow(number, str(tmp_path / name / "a.png"), 10, 20) for number, name in enumerate("xy", 5)]
    boxes = Boxes.found([2, 1], [[1, 2, 5, 10], [-3, 4, 4, 9], [12, 1, 15, 9]], [0.5, 0.4, 0.3], [1, 0, 0])
    write_outputs(DOCUMENT, LabelledImages(rows, boxes, CATEGORIES), ["a.png", "b.png"], ["coco"], tmp_path / "out")
    entries = json.loads((tmp_path / "out" / "dataset.json").read_text())["annotations"]
    assert [entry["score"] for entry in entries] == [0.5, 0.4]  # the third lies outside of its image
    table = open_dataset(tmp_path / "out" / "dataset.json", image_dir=tmp_path, cache_dir=tmp_path / "cache")
    assert table.categories == tuple(CATEGORIES) and not table.problems
    assert [row.file_name for row in table.image_rows()] == ["x/a.png", "y/a.png"]
    assert table.boxes().xyxy.tolist() == [[1, 2, 5, 10], [0, 4, 4, 9]] and table.boxes().labels.tolist() == [1, 0]


def test_the_most_uncertain_images_are_chosen_and_near_duplicates_last(tmp_path):
    """By what it sees, a detector finds a sure box, an unsure one, or one in the left half alone."""
    rng, kinds = np.random.default_rng(0), {"sure": 0.99, "unsure": 0.5, "copy": 0.5, "sided": 0.9, "other": 0.6}
    for name in kinds:
        pixels = rng.integers(0, 200, (16, 16, 3), dtype=np.uint8)
        if name == "copy":
            pixels = np.array(Image.open(tmp_path / "unsure.png"))
        pixels[0, [0, -1]] = list(kinds).index(name)
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    (tmp_path / "broken.png").write_bytes(b"nothing")

    def predict(images, score_threshold):
        found = []
        for image in images:
            name = list(kinds)[int(image[0, 0, 0])]
            box, empty = torch.tensor([[4.0, 4, 12, 12]]), name == "sided" and int(image[0, 1, 1]) != sided
            columns = {"boxes": box, "scores": torch.tensor([kinds[name]]), "labels": torch.tensor([0])}
            found.append({key: value[:0] if empty else value for key, value in columns.items()})
        return found

    sided = int(np.array(Image.open(tmp_path / "sided.png"))[1, 1, 0])
    predictor, files = Predictor("test", CATEGORIES, predict), sorted(tmp_path.glob("*.png"))
    chosen = most_uncertain(predictor, files, 4, batch_size=2)
    names = [path.stem for path in chosen]
    assert names[0] == "sided" and {*kinds} - {*names} in ({"copy"}, {"unsure"})
    measured = {path.stem: value for path, value in most_uncertain(predictor, files, 9).items()}
    assert measured.keys() == kinds.keys() and list(measured)[-1] in ("copy", "unsure")
    assert measured["sure"] == pytest.approx((0.0808, 0), abs=1e-4) and measured["unsure"][0] == pytest.approx(1)
    assert measured["sided"][1] == pytest.approx(1)
    write_uncertain(chosen, tmp_path / "u.csv")
    with open(tmp_path / "u.csv", newline="") as file:
        first = next(csv.DictReader(file))
    total = sum(chosen[tmp_path / "sided.png"])
    assert first["file"].endswith("sided.png") and float(first["uncertainty"]) == pytest.approx(total)
    with pytest.raises(BadInput, match="--uncertain 0: expected the number"):
        most_uncertain(predictor, files, 0)


def test_a_crowded_picture_has_thin_lines_and_no_tags():
    """The tags of so many objects would hide the picture."""
    image = torch.zeros(3, 200, 200, dtype=torch.uint8)
    corners = torch.tensor([[10.0 * (i % 20), 40.0 * (i // 20)] for i in range(MOST_TAGS + 1)])
    boxes = torch.cat([corners, corners + torch.tensor([8.0, 30.0])], dim=1)

    def covered(count: int) -> float:
        objects = {"boxes": boxes[:count], "labels": torch.zeros(count, dtype=torch.int64)}
        pixels = np.asarray(picture_with_boxes(image, objects, ["nucleus"]))
        return float((pixels > 0).any(axis=2).mean())

    assert covered(MOST_TAGS + 1) < covered(MOST_TAGS) / 2
