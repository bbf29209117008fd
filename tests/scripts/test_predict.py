"""scripts/predict.py, evaluate.py and export.py on a run of every training script, and against transformers' pipeline.

On photographs too, with DETECTION_TOOLKIT_BCCD=FOLDER.
"""

import json
import shutil
from pathlib import Path

import pytest
from launching import ROOT, SCRIPTS, rows
from PIL import Image
from places import BCCD
from transformers import pipeline

from toolkit.data.decoding import decode_image
from toolkit.tools.predict.open import open_predictor

NAMES = ("predict", "evaluate", "export", "report")
PREDICT, EVALUATE, EXPORT, REPORT = (ROOT / "scripts" / f"{name}.py" for name in NAMES)
OF_ITS_OWN = [script for script in SCRIPTS if script.name in ("train_detr", "train_sgg")]  # boxes, and graphs
SSD = [script for script in SCRIPTS if script.name == "train_ssd"]


@pytest.fixture(scope="module")
def photos(data, tmp_path_factory):
    """Pictures of three sizes, in two folders, one of them cut off; and a text file."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "below").mkdir()
    sources = sorted((data / "val").iterdir())
    for i, size in enumerate([(64, 64), (64, 64), (96, 64), (80, 120)]):
        Image.open(sources[i]).resize(size).save(folder / ("below" if i == 1 else ".") / f"{i}.png")
    shutil.copy(ROOT / "tests" / "data" / "dirty" / "images" / "truncated.jpg", folder / "cut.jpg")
    (folder / "notes.txt").write_text("not an image")
    return folder


def predict(server, *args, code: int = 0) -> tuple[dict, str]:
    """(predictions.json, what was printed)"""
    ended = server.run(PREDICT, args)
    assert ended.code == code, ended.text
    assert "Traceback" not in ended.text
    return json.loads((Path(args[args.index("--out") + 1]) / "predictions.json").read_text()), ended.text


def test_the_images_to_label_next_with_boxes_to_begin_with(server, whole, photos, tmp_path):
    asked = ("--out", tmp_path, "--uncertain", 2, "--format", "json", "coco", "--score-threshold", 0)
    document, text = predict(server, whole, photos, *asked)
    lines = (tmp_path / "uncertain.csv").read_text().splitlines()
    assert lines[0] == "file,uncertainty,entropy,disagreement" and len(lines) == 3
    assert {line.split(",")[0] for line in lines[1:]} == {image["file_name"] for image in document["images"]}
    assert len(list((tmp_path / "pictures").rglob("*.png"))) == 2
    assert f"--data.train {tmp_path}/dataset.json --data.image_dir {photos}" in text
    assert len(json.loads((tmp_path / "dataset.json").read_text())["images"]) == 2


@pytest.mark.parametrize("script", OF_ITS_OWN, indirect=True, ids=lambda script: script.name)
@pytest.mark.every_script("slow")
def test_json_and_pictures_of_everything_that_can_be_read(server, script, whole, photos, data, tmp_path):
    asked = ("--out", tmp_path, "--score-threshold", 0, "--batch-size", 3)
    document, text = predict(server, whole, photos, *asked, code=1)
    images = [(Path(image["file_name"]).relative_to(photos).as_posix(), image["width"], image["height"])
              for image in document["images"]]  # fmt: skip
    assert images == [("0.png", 64, 64), ("2.png", 96, 64), ("3.png", 80, 120), ("below/1.png", 64, 64)]
    assert document["errors"] == [{"file_name": str(photos / "cut.jpg"), "error": "image data truncated"}]
    assert "cut.jpg: image data truncated" in text and "1 files could not be read" in text
    truth = json.loads((data / "annotations" / "val.json").read_text())["categories"]
    names = {category["id"]: category["name"] for category in truth}
    assert {category["id"]: category["name"] for category in document["categories"]} == names
    assert any(image["detections"] for image in document["images"])
    for image in document["images"]:
        scores = [detection["score"] for detection in image["detections"]]
        assert scores == sorted(scores, reverse=True)
        assert all(names[detection["category_id"]] == detection["category"] for detection in image["detections"])
        assert ("relations" in image) == (script.name == "train_sgg")
        for relation in image.get("relations", ()):
            assert isinstance(relation["predicate"], str)
            assert relation["subject"] != relation["object"]
            assert {relation["subject"], relation["object"]} <= set(range(len(scores)))
        with Image.open(tmp_path / image["picture"]) as picture:
            drawn, ratio = picture.width / picture.height, image["width"] / image["height"]
            if script.name == "train_sgg":  # the graph stands beside it
                assert drawn > ratio + 0.2
            else:
                assert drawn == pytest.approx(ratio, rel=0.01)


@pytest.mark.every_script
def test_final_folder_and_run_find_the_same_one_at_a_time_or_together(whole, photos):
    images = [decode_image(path) for path in sorted(photos.rglob("*.png"))]
    of_run, of_final = open_predictor(whole), open_predictor(whole / "final")
    assert of_final.categories == of_run.categories
    together = of_run.predict(images, 0.0)
    assert any(len(detections["scores"]) for detections in together)
    for image, expected in zip(images, together, strict=True):
        for predictor in (of_run, of_final):
            assert_same(rows_of(predictor.predict([image], 0.0)[0]), rows_of(expected))


@pytest.fixture(scope="module")
def published(server, script, settings, tmp_path_factory):
    args = settings("--config", script.config.with_name("detr_published.yaml"), "--run.max_steps", 2,
                    "--run.output_dir", tmp_path_factory.mktemp("published"), "--data.scales", "[96,128]",
                    "--data.max_size", 200)  # fmt: skip
    return server.run(script, args, whole=True).ok().folder


def test_run_and_final_folder_give_what_the_pipeline_gives(server, whole, published, photos, tmp_path):
    drawn, photographs = sorted(photos.rglob("*.png")), sorted((BCCD / "JPEGImages").glob("*.jpg"))[:8]
    for folder, paths in ((whole, drawn), (published, [*drawn, *photographs])):
        for model in (folder / "final", folder):
            assert_equal_to_pipeline(server, model, paths, tmp_path)


@pytest.mark.every_script
def test_evaluation_of_the_folder_alone_gives_the_numbers_of_the_run(server, whole):
    best = json.loads((whole / "checkpoints" / "best" / "state.json").read_text())["step"]
    (trained,) = [row for row in rows(whole) if "val/bbox_AP" in row and row["step"] == best]
    for weights, prefix in (("model", "val/"), ("ema", "val/ema/")):
        ended = server.run(EVALUATE, [whole, "--weights", weights]).ok()
        again = json.loads(ended.text.splitlines()[-1])
        expected = {k.removeprefix(prefix): v for k, v in trained.items() if k.startswith(f"{prefix}bbox")}
        assert expected == {k: v for k, v in again.items() if k.startswith("bbox")}
    ended = server.run(EVALUATE, [whole, "--expect.bbox_AP", "0.99"])
    assert ended.code == 1 and "missed: bbox_AP" in ended.text


@pytest.mark.slow
def test_the_folds_of_a_cross_validation_are_judged_as_one(server, script, settings, tmp_path):
    folds = []
    for fold in ("1/2", "2/2"):
        args = settings("--run.output_dir", tmp_path, "--run.name", f"fold{fold[0]}", "--run.max_steps", 1,
                        "--data.val", fold)  # fmt: skip
        folds.append(server.run(script, args, whole=True).ok().folder)
    ended = server.run(EVALUATE, [*folds, "--save", tmp_path / "all.json"]).ok()
    assert "AP of the folds" in ended.text and "18 images" in ended.text
    *_, numbers, _ = ended.text.splitlines()
    again = server.run(EVALUATE, [tmp_path / "all.json"]).ok()
    again = json.loads(again.text.splitlines()[-1])
    assert json.loads(numbers) == again and again["bbox_AR100"] > 0
    for wrong, words in ((folds[:1] * 2, "fold 1 is given 2 times, fold 2 is given 0 times"),
                         ([folds[0], tmp_path / "all.json"], "not judged on a fold")):  # fmt: skip
        ended = server.run(EVALUATE, wrong)
        assert ended.code == 2 and words in ended.text and "Traceback" not in ended.text


@pytest.mark.slow  # tests/test_export.py exports every detector
@pytest.mark.every_script
@pytest.mark.parametrize("script", OF_ITS_OWN, indirect=True, ids=lambda script: script.name)
def test_exported_files_find_what_the_run_finds(server, script, settings, photos, data, tmp_path):
    """In export.py, predict.py, evaluate.py and report.py; of a scene graph its detector alone.

    After two steps most scores are equal to rounding, and which of two boxes suppresses the other is left to chance.
    """
    args = settings("--run.output_dir", tmp_path, "--run.epochs", 40, "--run.max_steps", 120, "--run.eval_every", 120)
    run, out = server.run(script, args, whole=script.name == "train_detr").ok().folder, tmp_path / "out"
    ended = server.run(EXPORT, [run, "--out", out, "--weights", "ema"])
    assert "| model.onnx | " in ended.ok().text
    assert {path.name for path in out.iterdir()} == {"model.onnx", "model.pt2", "export.json"}
    lines = {line["file"]: line for line in json.loads((out / "export.json").read_text())["files"]}
    for name in ("model.onnx", "model.pt2"):
        assert abs(lines[name]["AP_moved"]) <= 1e-3 and set(lines[name]["differences"]) == {"1", "2", "5"}
        document, _ = predict(server, out / name, photos / "0.png", "--out", tmp_path / name, "--score-threshold", 0,
                              "--format", "json", "coco", "--trust")  # fmt: skip
        assert document["images"][0]["detections"] and (tmp_path / name / "results.json").exists()
        split = ["--split", data / "annotations" / "val.json", "--image-dir", data / "val", "--trust"]
        ended = server.run(EVALUATE, [out / name, *split, "--save", tmp_path / f"{name}.json"]).ok()
        assert json.loads(ended.text.split("wrote")[0].splitlines()[-1])["bbox_AP"] == lines[name]["AP"]
        server.run(REPORT, [out / name, *split, "--out", tmp_path / f"report_{name}"]).ok()
        report = json.loads((tmp_path / f"report_{name}" / "report.json").read_text())
        assert report["numbers"]["AP"] == pytest.approx(lines[name]["AP"], abs=1e-12)
        assert (tmp_path / f"report_{name}" / "index.html").exists()


@pytest.mark.slow
@pytest.mark.every_script
@pytest.mark.parametrize("script", SSD, indirect=True, ids=lambda script: script.name)
def test_a_file_that_finds_something_else_is_refused(server, script, whole, tmp_path):
    """Its AP is held to that of PyTorch on the validation data: with a negative tolerance none is good enough."""
    ended = server.run(EXPORT, [whole, "--out", tmp_path, "--formats", "onnx", "--tolerance", "-1"])
    assert ended.code == 1 and "more than -1.0 apart" in ended.text
    assert (tmp_path / "model.onnx.wrong").exists() and not (tmp_path / "model.onnx").exists()


def test_one_message_and_code_2(server, whole, photos, tmp_path):
    """And nothing is written; tests/test_predict.py has more."""
    image = tmp_path / "earlier" / "pictures" / "a.png"
    image.parent.mkdir(parents=True)
    shutil.copy(photos / "0.png", image)
    for args, wanted in (
        ([tmp_path / "none", photos], [f"{tmp_path}/none", "no such run"]),
        ([whole / "final", photos, "--weights", "ema"], ["--weights ema"]),
        ([whole, photos, "--batch-size", "0"], ["--batch-size: 0: expected a whole number above 0"]),
        ([whole, photos, "--out", photos / "notes.txt"], ["--out", "notes.txt"]),
        ([whole, image, "--out", tmp_path / "earlier"], ["a.png", "overwrite"]),
    ):
        ended = server.run(PREDICT, ["--out", tmp_path / "out", *args])
        assert ended.code == 2 and "Traceback" not in ended.text and ended.text.count("error: ") == 1, ended.text
        assert all(word in ended.text for word in wanted), ended.text
        assert not (tmp_path / "out").exists() and image.exists()


def assert_equal_to_pipeline(server, model: Path, paths: list[Path], out: Path) -> None:
    """What predict.py writes is what `pipeline("object-detection")` finds: scores to 1e-4, boxes to 1e-3 pixels.

    The pipeline's own boxes are cut to whole pixels; they are taken before that.
    """
    final = model if (model / "config.json").exists() else model / "final"
    pipe = pipeline("object-detection", model=str(final), device="cpu")
    pipe._get_bounding_box = lambda box: box.tolist()
    asked = ("--overwrite", "--score-threshold", 0, "--batch-size", 4)
    document, _ = predict(server, model, *paths, "--out", out, *asked)
    assert len(document["images"]) == len(paths)
    for image in document["images"]:
        expected = [(found["score"], found["label"], found["box"]) for found in pipe(image["file_name"], threshold=0.0)]
        detections = []
        for detection in image["detections"]:
            x, y, width, height = detection["bbox"]
            detections.append((detection["score"], detection["category"], [x, y, x + width, y + height]))
        assert 0 < len(expected) <= len(detections)
        assert_same(detections, expected)


def rows_of(detections: dict) -> list[tuple]:
    return [*zip(*(detections[key].tolist() for key in ("scores", "labels", "boxes")), strict=True)]


def assert_same(detections: list[tuple], expected: list[tuple]) -> None:
    """As many (score, label, box xyxy) as both have: RT-DETR's processor gives one for each query, we give up to 300.
    Of nearly equal scores the order is free."""
    count = min(len(detections), len(expected))
    assert count or not (detections or expected)
    for found, others in ((detections[:count], expected), (expected[:count], detections)):
        for score, label, box in found:
            near = [b for s, other, b in others if other == label and abs(score - s) <= 1e-4]
            assert any(max(abs(x - y) for x, y in zip(box, b, strict=True)) <= 1e-3 for b in near), (
                f"score {score}, {label}, {box}; of that class and score are {near}"
            )
