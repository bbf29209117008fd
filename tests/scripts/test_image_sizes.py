"""Every training script on images that are not square, and the number of detections that are kept."""

import json
from collections import Counter

import pytest
import yaml
from launching import ROOT, rows
from PIL import Image

PREDICT, EVALUATE = (ROOT / "scripts" / f"{name}.py" for name in ("predict", "evaluate"))
SIZES = ("--data.image_size", "[96, 64]", "--data.multi_scale", "[[96, 64], [128, 96]]")


@pytest.fixture(scope="module")
def wide(server, script, settings, tmp_path_factory):
    """The folder of a run of two steps on images of two sizes, neither of them square."""
    more = ("--run.max_steps", 2, "--run.eval_every", 0, "--run.output_dir", tmp_path_factory.mktemp("wide"))
    return server.run(script, settings(*SIZES, *more)).ok().folder


@pytest.fixture(scope="module")
def picture(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("picture") / "one.png"
    Image.open(next((data / "val").iterdir())).resize((120, 200)).save(path)
    return path


@pytest.mark.every_script("slow")
def test_trained_evaluated_and_found_on_images_that_are_not_square(server, wide, picture, tmp_path):
    """Evaluated again from the folder with the numbers of the run; in tiles of the aspect of the images."""
    assert yaml.safe_load((wide / "config.yaml").read_text())["data"]["image_size"] == [96, 64]
    (trained,) = [row for row in rows(wide) if "val/bbox_AP" in row]
    again = json.loads(server.run(EVALUATE, [wide, "--weights", "model"]).ok().text.splitlines()[-1])
    assert again["bbox_AR100"] == trained["val/bbox_AR100"]
    graphs = "R@20" in again
    asked = ["--score-threshold", 0, "--no-pictures", *([] if graphs else ["--tile", 96])]
    server.run(PREDICT, [wide, picture, "--out", tmp_path / "found", *asked]).ok()
    (image,) = json.loads((tmp_path / "found" / "predictions.json").read_text())["images"]
    assert image["detections"]
    for x, y, width, height in (each["bbox"] for each in image["detections"]):
        assert x + width > 0 and y + height > 0 and x < 120 and y < 200


def test_prediction_keeps_as_many_as_asked(server, wide, picture, tmp_path):
    counts = {}
    for number in (None, 3):
        out = tmp_path / f"found{number}"
        asked = ["--out", out, "--score-threshold", 0, *([] if number is None else ["--max-detections", number])]
        server.run(PREDICT, [wide, picture, *asked, "--no-pictures"]).ok()
        counts[number] = json.loads((out / "predictions.json").read_text())["images"][0]["detections"]
    assert len(counts[3]) == 3 < len(counts[None]) and counts[3] == counts[None][:3]
    ended = server.run(PREDICT, [wide, picture, "--out", tmp_path / "none", "--max-detections", 0])
    assert ended.code == 2 and "--max-detections: 0: expected a whole number above 0" in ended.text


def test_evaluation_keeps_as_many_as_asked_and_crowds_are_told_before_training(server, script, settings, tmp_path):
    args = settings("--run.output_dir", tmp_path, "--run.max_steps", 1, "--run.eval_every", 0, "--run.epochs", 1,
                    "--model.num_queries", 2, "--eval.max_detections", 1)  # fmt: skip
    ended = server.run(script, args).ok()
    said, told = ended.text, [line for line in ended.text.splitlines() if line.startswith("warning: ")]
    assert any("training images have more objects" in line and "model.num_queries 2" in line for line in told), said
    assert any("validation images have more objects" in line and "eval.max_detections 1" in line for line in told)
    assert said.index("model.num_queries 2") < said.index("evaluation at step")
    found = ended.folder / "report" / "predictions.json"
    assert _most(found) == 1
    server.run(EVALUATE, [ended.folder, "--max-detections", 4, "--save", tmp_path / "all.json"]).ok()
    assert _most(tmp_path / "all.json") == 4


def _most(file) -> int:
    """Detections of the image that has most of them, in COCO results."""
    return max(Counter(each["image_id"] for each in json.loads(file.read_text())).values())
