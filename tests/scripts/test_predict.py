"""scripts/predict.py, evaluate.py and export.py on a run of every training script, and against transformers' pipeline.

On photographs too, with DETECTION_TOOLKIT_BCCD=FOLDER.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from launching import ROOT, rows
from PIL import Image
from transformers import pipeline

from toolkit.data.decoding import decode_image
from toolkit.use.open import open_predictor

PREDICT, EVALUATE, EXPORT, REPORT = (
    ROOT / "scripts" / f"{name}.py" for name in ("predict", "evaluate", "export", "report")
)
BCCD = Path(os.environ.get("DETECTION_TOOLKIT_BCCD") or Path(__file__).parents[3] / "shared" / "data" / "bccd")


@pytest.fixture
def run(whole):
    return whole


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


@pytest.mark.every_script("slow")
def test_json_and_pictures_of_everything_that_can_be_read(server, script, run, photos, data, tmp_path):
    document, text = predict(server, run, photos, "--out", tmp_path, "--score-threshold", 0, "--batch-size", 3, code=1)
    names = [Path(image["file_name"]).relative_to(photos).as_posix() for image in document["images"]]
    assert names == ["0.png", "2.png", "3.png", "below/1.png"]
    sizes = [(image["width"], image["height"]) for image in document["images"]]
    assert sizes == [(64, 64), (96, 64), (80, 120), (64, 64)]
    (error,) = document["errors"]
    assert error == {"file_name": str(photos / "cut.jpg"), "error": "image data truncated"}
    assert "cut.jpg: image data truncated" in text
    assert "1 files could not be read" in text
    truth = json.loads((data / "annotations" / "val.json").read_text())["categories"]
    assert document["categories"] == [{"id": each["id"], "name": each["name"]} for each in truth]
    assert any(image["detections"] for image in document["images"])
    assert all(("relations" in image) == (script.name == "train_sgg") for image in document["images"])
    ids = {each["id"]: each["name"] for each in truth}
    for image in document["images"]:
        scores = [each["score"] for each in image["detections"]]
        assert scores == sorted(scores, reverse=True)
        assert all(ids[each["category_id"]] == each["category"] for each in image["detections"])
        for relation in image.get("relations", ()):
            assert isinstance(relation["predicate"], str)
            assert relation["subject"] != relation["object"]
            assert {relation["subject"], relation["object"]} <= set(range(len(scores)))
        with Image.open(tmp_path / image["picture"]) as picture:
            shown, ratio = picture.width / picture.height, image["width"] / image["height"]
            if script.name == "train_sgg":  # the graph stands beside it
                assert shown > ratio + 0.2
            else:
                assert shown == pytest.approx(ratio, rel=0.01)


@pytest.mark.every_script
def test_final_folder_and_run_find_the_same_one_at_a_time_or_together(run, photos):
    images = [decode_image(path) for path in sorted(photos.rglob("*.png"))]
    of_run, of_final = open_predictor(run), open_predictor(run / "final")
    assert of_final.categories == of_run.categories
    together = of_run.predict(images, 0.0)
    assert any(len(found["scores"]) for found in together)
    for image, expected in zip(images, together, strict=True):
        assert_same(of_run.predict([image], 0.0)[0], expected)
        assert_same(of_final.predict([image], 0.0)[0], expected)


@pytest.fixture(scope="module")
def published(server, script, settings, tmp_path_factory):
    """A published DETR, trained for two steps, that keeps the aspect ratio of its images."""
    args = settings("--config", script.config.with_name("detr_published.yaml"), "--run.max_steps", 2,
                    "--run.output_dir", tmp_path_factory.mktemp("published"), "--data.scales", "[96,128]",
                    "--data.max_size", 200)  # fmt: skip
    return server.run(script, args, whole=True).ok().folder


def test_run_and_final_folder_give_what_the_pipeline_gives(server, run, published, photos, tmp_path):
    """On photographs too, where the data of BCCD are there."""
    drawn, photographs = sorted(photos.rglob("*.png")), sorted((BCCD / "JPEGImages").glob("*.jpg"))[:8]
    for folder, paths in ((run, drawn), (published, [*drawn, *photographs])):
        for model in (folder / "final", folder):
            assert_equal_to_pipeline(server, model, paths, tmp_path)


@pytest.mark.every_script
def test_evaluation_of_the_folder_alone_gives_the_numbers_of_the_run(server, run):
    best = json.loads((run / "checkpoints" / "best" / "state.json").read_text())["step"]
    (trained,) = [row for row in rows(run) if "val/bbox_AP" in row and row["step"] == best]
    for weights, prefix in (("model", "val/"), ("ema", "val/ema/")):
        ended = server.run(EVALUATE, [run, "--weights", weights]).ok()
        again = json.loads(ended.text.splitlines()[-1])
        expected = {k.removeprefix(prefix): v for k, v in trained.items() if k.startswith(f"{prefix}bbox")}
        assert expected == {k: v for k, v in again.items() if k.startswith("bbox")}
    ended = server.run(EVALUATE, [run, "--expect.bbox_AP", "0.99"])
    assert ended.code == 1
    assert "missed: bbox_AP" in ended.text


@pytest.mark.slow  # tracing a transformer takes a minute; tests/test_export.py exports one in every run
@pytest.mark.every_script
def test_exported_files_find_what_the_run_finds(server, script, settings, photos, data, tmp_path):
    """In export.py, predict.py, evaluate.py and report.py; of a scene graph its detector alone.

    After two steps most scores are equal to rounding, and which of two boxes suppresses the other is left to chance.
    """
    args = settings("--run.output_dir", tmp_path, "--run.epochs", 40, "--run.max_steps", 120, "--run.eval_every", 120)
    run, out = server.run(script, args, whole=script.name == "train_detr").ok().folder, tmp_path / "out"
    ended = server.run(EXPORT, [run, "--out", out, "--weights", "ema"])
    assert ended.ok() and "| model.onnx | " in ended.text, ended.text
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
        found = json.loads((tmp_path / f"report_{name}" / "report.json").read_text())
        assert found["numbers"]["AP"] == pytest.approx(lines[name]["AP"], abs=1e-12)
        assert (tmp_path / f"report_{name}" / "index.html").exists()


@pytest.mark.slow
def test_a_file_that_finds_something_else_is_refused(server, script, run, tmp_path):
    """Its AP is held to that of PyTorch on the validation data: with a negative tolerance none is good enough."""
    args = [run, "--out", tmp_path, "--formats", "onnx", "--tolerance", "-1"]
    ended = server.run(EXPORT, args)
    assert ended.code == 1 and "more than -1.0 apart" in ended.text
    assert (tmp_path / "model.onnx.wrong").exists() and not (tmp_path / "model.onnx").exists()


def test_an_old_prediction_is_replaced_only_when_told(server, run, photos, tmp_path):
    predict(server, run, photos / "0.png", "--out", tmp_path)
    ended = server.run(PREDICT, [run, photos / "2.png", "--out", tmp_path])
    assert ended.code == 2 and "--overwrite" in ended.text
    predict(server, run, photos / "2.png", "--out", tmp_path, "--overwrite")
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["2.png"]


BAD = {
    "no model": (["{tmp}/none", "{photos}"], ["{tmp}/none", "there is no such run"]),
    "no run": (["{photos}", "{photos}"], ["no run folder"]),
    "no images": (["{run}", "{tmp}/none.jpg", "{photos}/*.gif", "{empty}"], ["none.jpg", "*.gif", "{empty}: holds no"]),
    "weights of a final folder": (["{run}/final", "{photos}", "--weights", "ema"], ["--weights ema"]),
    "no batch": (["{run}", "{photos}", "--batch-size", "0"], ["--batch-size 0"]),
    "a picture over its image": (["{run}", "{tmp}/o/pictures/a.png", "--out", "{tmp}/o"], ["a.png", "overwrite"]),
    "out is a file": (["{run}", "{photos}", "--out", "{photos}/notes.txt"], ["--out", "notes.txt"]),
}


@pytest.mark.parametrize("case", BAD)
def test_one_message_and_code_2(server, run, photos, tmp_path, case):
    (tmp_path / "empty").mkdir()
    (tmp_path / "o" / "pictures").mkdir(parents=True)
    shutil.copy(photos / "0.png", tmp_path / "o" / "pictures" / "a.png")
    given, wanted = BAD[case]
    places = {"run": run, "photos": photos, "tmp": tmp_path, "empty": tmp_path / "empty"}
    args = [part.format(**places) for part in given]
    ended = server.run(PREDICT, args if "--out" in args else [*args, "--out", tmp_path / "out"])
    assert ended.code == 2, ended.text
    assert "Traceback" not in ended.text and ended.text.count("error: ") == 1
    for word in wanted:
        assert word.format(**places) in ended.text
    assert not (tmp_path / "out").exists()


def assert_equal_to_pipeline(server, model: Path, paths: list[Path], out: Path) -> None:
    """What predict.py writes is what `pipeline("object-detection")` finds: scores to 1e-4, boxes to 1e-3 pixels.

    The pipeline's own boxes are cut to whole pixels; they are taken before that.
    """
    final = model if (model / "config.json").exists() else model / "final"
    pipe = pipeline("object-detection", model=str(final), device="cpu")
    pipe._get_bounding_box = lambda box: box.tolist()
    document, _ = predict(
        server, model, *paths, "--out", out, "--overwrite", "--score-threshold", 0, "--batch-size", 4
    )
    assert len(document["images"]) == len(paths)
    for image in document["images"]:
        theirs = [(each["score"], each["label"], each["box"]) for each in pipe(image["file_name"], threshold=0.0)]
        ours = [(each["score"], each["category"], xyxy(each["bbox"])) for each in image["detections"]]
        assert theirs
        # RT-DETR's processor gives as many pairs of query and class as there are queries, we give up to 300
        assert_matched(theirs, ours)
        assert_matched(ours[: len(theirs)], theirs)


def xyxy(bbox: list[float]) -> list[float]:
    x, y, width, height = bbox
    return [x, y, x + width, y + height]


def assert_same(found, expected) -> None:
    """As many as both have: RT-DETR's processor gives one detection per query, we give up to 300."""
    keys = ("scores", "labels", "boxes")
    found, expected = ([*zip(*(each[k].tolist() for k in keys), strict=True)] for each in (found, expected))
    count = min(len(found), len(expected))
    assert count or not (found or expected)
    assert_matched(found[:count], expected)
    assert_matched(expected[:count], found)


def assert_matched(found: list[tuple], expected: list[tuple]) -> None:
    """Every (score, label, box xyxy) of `found` is an expected one; of nearly equal scores the order is free."""
    for score, label, box in found:
        near = [b for s, other, b in expected if other == label and abs(score - s) <= 1e-4]
        assert any(max(abs(x - y) for x, y in zip(box, b, strict=True)) <= 1e-3 for b in near), (
            f"score {score}, {label}, {box}; of that class and score are {near}"
        )
