"""scripts/predict.py on a run of the training scripts, and against transformers' pipeline.

On photographs too, with DETECTION_TOOLKIT_BCCD=FOLDER.
"""

import json
import shutil
from pathlib import Path

import pytest
from launching import SCRIPTS
from PIL import Image
from places import ASSETS, BCCD, ROOT, SMALL_CONFIGS
from transformers import pipeline

from toolkit.data.decoding import decode_image
from toolkit.tools.predict.open import open_predictor

PREDICT = ROOT / "scripts" / "predict.py"
OF_ITS_OWN = [script for script in SCRIPTS if script.name in ("train_detr", "train_sgg")]  # boxes, and graphs
SIZES = {"0.png": (64, 64), "2.png": (96, 64), "3.png": (80, 120), "below/1.png": (64, 64)}


@pytest.fixture(scope="module")
def photos(data, tmp_path_factory):
    """Pictures of three sizes, in two folders, one of them cut off; and a text file."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "below").mkdir()
    for source, (name, size) in zip(sorted((data / "val").iterdir()), SIZES.items(), strict=False):
        mode = "RGBA" if name == "0.png" else "RGB"
        Image.open(source).resize(size).convert(mode).save(folder / name)
    shutil.copy(ASSETS / "dirty" / "images" / "truncated.jpg", folder / "cut.jpg")
    (folder / "notes.txt").write_text("not an image")
    return folder


def predict(server, args: str, out: Path, code: int = 0) -> tuple[dict, str]:
    """(predictions.json, what was printed)"""
    ended = server.run(PREDICT, f"{args} --out {out}")
    assert ended.code == code, ended.text
    assert "Traceback" not in ended.text
    return json.loads((out / "predictions.json").read_text()), ended.text


def test_images_to_label_next_have_boxes_to_begin_with(server, whole, photos, tmp_path):
    asked = f"{whole} {photos} --uncertain 2 --format json coco --score-threshold 0"
    document, text = predict(server, asked, tmp_path)
    head, *lines = (tmp_path / "uncertain.csv").read_text().splitlines()
    assert head == "file,uncertainty,entropy,disagreement"
    assert len(lines) == 2
    assert {line.split(",")[0] for line in lines} == {image["file_name"] for image in document["images"]}
    assert len(list((tmp_path / "pictures").rglob("*.png"))) == 2
    assert f"--data.train {tmp_path}/dataset.json --data.image_dir {photos}" in text
    assert len(json.loads((tmp_path / "dataset.json").read_text())["images"]) == 2


@pytest.mark.parametrize("script", OF_ITS_OWN, indirect=True, ids=lambda script: script.name)
@pytest.mark.every_script("slow")
def test_json_and_pictures_of_everything_that_can_be_read(server, script, whole, photos, tmp_path):
    graphs = script.name == "train_sgg"
    document, text = predict(server, f"{whole} {photos} --score-threshold 0", tmp_path, code=1)
    images = document["images"]
    found = {str(Path(each["file_name"]).relative_to(photos)): (each["width"], each["height"]) for each in images}
    assert found == SIZES
    assert document["errors"] == [{"file_name": str(photos / "cut.jpg"), "error": "image data truncated"}]
    assert "cut.jpg: image data truncated" in text
    assert "1 files could not be read" in text
    assert "1 of 4 images: alpha channel dropped" in text
    names = {category["id"]: category["name"] for category in document["categories"]}
    assert [*names.values()] == ["circle", "square", "triangle", "star"]
    assert any(image["detections"] for image in images)
    for image in images:
        detections = image["detections"]
        assert detections == sorted(detections, key=lambda detection: -detection["score"])
        assert all(names[detection["category_id"]] == detection["category"] for detection in detections)
        assert ("relations" in image) == graphs
        for relation in image.get("relations", ()):
            assert isinstance(relation["predicate"], str)
            assert relation["subject"] != relation["object"]
            assert {relation["subject"], relation["object"]} <= set(range(len(detections)))
        with Image.open(tmp_path / image["picture"]) as picture:
            wider = picture.width / picture.height - image["width"] / image["height"]
        assert wider > 0.2 if graphs else abs(wider) < 0.02  # the graph stands beside the picture


@pytest.mark.every_script("slow")
def test_final_folder_and_run_find_the_same_one_at_a_time_or_together(whole, photos):
    images = [decode_image(path) for path in sorted(photos.rglob("*.png"))]
    of_run = open_predictor(whole)
    of_final = open_predictor(whole / "final")
    assert of_final.categories == of_run.categories
    together = of_run.predict(images, 0.0)
    assert any(len(detections["scores"]) for detections in together)
    for image, expected in zip(images, together, strict=True):
        assert_same(listed(of_run.predict([image], 0.0)[0]), listed(expected))
        assert_same(listed(of_final.predict([image], 0.0)[0]), listed(expected))


@pytest.fixture(scope="module")
def published(server, script, settings, tmp_path_factory):
    """The folder of a run of the published DETR, whose images are resized as the pipeline does."""
    place = f"--config {SMALL_CONFIGS}/detr_published.yaml --run.output_dir {tmp_path_factory.mktemp('published')}"
    args = settings(f"{place} --run.max_steps 2 --data.scales [96,128] --data.max_size 200")
    return server.run(script, args, whole=True).ok().folder


def test_run_and_final_folder_give_what_the_pipeline_gives(server, whole, published, photos, tmp_path):
    drawn = sorted(photos.rglob("*.png"))
    photographs = sorted((BCCD / "JPEGImages").glob("*.jpg"))[:8]
    for folder, paths in ((whole, drawn), (published, [*drawn, *photographs])):
        pipe = pipeline("object-detection", model=str(folder / "final"), device="cpu")
        pipe._get_bounding_box = lambda box: box.tolist()  # its own are cut to whole pixels after that
        for model in (folder / "final", folder):
            assert_equal_to_pipeline(server, pipe, model, paths, tmp_path)


def assert_equal_to_pipeline(server, pipe, model: Path, paths: list[Path], out: Path) -> None:
    """What predict.py writes is what `pipeline("object-detection")` finds: scores to 1e-4, boxes to 1e-3 pixels."""
    files = " ".join(str(path) for path in paths)
    document, _ = predict(server, f"{model} {files} --overwrite --score-threshold 0 --batch-size 4", out)
    assert len(document["images"]) == len(paths)
    for image in document["images"]:
        expected = [(found["score"], found["label"], found["box"]) for found in pipe(image["file_name"], threshold=0.0)]
        detections = []
        for detection in image["detections"]:
            x, y, width, height = detection["bbox"]
            detections.append((detection["score"], detection["category"], [x, y, x + width, y + height]))
        assert 0 < len(expected) <= len(detections)
        assert_same(detections, expected)


def listed(detections: dict) -> list[tuple]:
    columns = [detections[key].tolist() for key in ("scores", "labels", "boxes")]
    return list(zip(*columns, strict=True))


def assert_same(detections: list[tuple], expected: list[tuple]) -> None:
    """As many (score, label, box xyxy) as both have: RT-DETR's processor gives one for each query, we give up to 300.
    Of nearly equal scores the order is free."""
    count = min(len(detections), len(expected))
    assert count or not (detections or expected)
    for found, others in ((detections[:count], expected), (expected[:count], detections)):
        for score, label, box in found:
            near = [b for s, other, b in others if other == label and abs(score - s) <= 1e-4]
            apart = [max(abs(x - y) for x, y in zip(box, b, strict=True)) for b in near]
            assert min(apart, default=1.0) <= 1e-3, f"score {score}, {label}, {box}; of that class and score are {near}"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("OUT/none PHOTOS", "OUT/none"),
        ("RUN/final PHOTOS --weights ema", "--weights ema"),
        ("RUN PHOTOS --batch-size 0", "--batch-size: 0: expected a whole number above 0"),
        ("RUN PHOTOS --max-detections 0", "--max-detections: 0: expected a whole number above 0"),
        ("RUN PHOTOS --out PHOTOS/notes.txt", "notes.txt"),
        ("RUN OUT/earlier/pictures/a.png --out OUT/earlier", "a.png"),  # it would be overwritten
    ],
)
def test_one_message_and_code_2(server, whole, photos, tmp_path, asked, words):
    """And nothing is written; tests/tools/predict has more."""
    image = tmp_path / "earlier" / "pictures" / "a.png"
    image.parent.mkdir(parents=True)
    shutil.copy(photos / "0.png", image)
    for name, folder in (("OUT", tmp_path), ("RUN", whole), ("PHOTOS", photos)):
        asked = asked.replace(name, str(folder))
        words = words.replace(name, str(folder))
    ended = server.run(PREDICT, f"--out {tmp_path}/out {asked}").refused(words)
    assert ended.text.count("error: ") == 1, ended.text
    assert not (tmp_path / "out").exists()
    assert image.exists()


def test_as_many_detections_are_kept_as_asked(server, whole, photos, tmp_path):
    asked = f"{whole} {photos}/0.png --score-threshold 0 --no-pictures"
    every, _ = predict(server, asked, tmp_path / "every")
    three, _ = predict(server, f"{asked} --max-detections 3", tmp_path / "three")
    detections = every["images"][0]["detections"]
    assert len(detections) > 3
    assert three["images"][0]["detections"] == detections[:3]
