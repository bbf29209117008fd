"""Detections handed over to supervision and FiftyOne: the examples of docs/export.md, where these are installed."""

import re
from pathlib import Path

import pytest
from exported_detectors import SMALL
from PIL import Image
from places import ROOT

from scripts import predict
from toolkit.data.table import Category
from toolkit.models import build_detector


def example(title: str) -> str:
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    return re.search(rf'```python title="{title}"\n(.*?)```', page, re.DOTALL)[1]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with a detector of random weights that finds something, and a photo."""
    monkeypatch.chdir(tmp_path)
    detector = build_detector("ssd", class_names=["circle"], **SMALL["ssd"])
    detector.eval().save_final(tmp_path / "runs" / "detr", [Category(7, "circle")], {"height": 64, "width": 64})
    Image.new("RGB", (90, 60), "#336699").save("photo.jpg")
    return tmp_path


def test_detections_become_those_of_supervision(here):
    supervision = pytest.importorskip("supervision", reason="supervision is not installed")
    values = {}
    exec(example("supervision"), values)
    detections = values["detections"]
    assert isinstance(detections, supervision.Detections)
    assert len(detections) == len(values["found"]["scores"]) > 0
    assert set(detections.data["class_name"]) == {"circle"}
    assert (detections.confidence > 0.3).all()


def test_predictions_become_a_data_set_of_fiftyone(here):
    fiftyone = pytest.importorskip("fiftyone", reason="fiftyone is not installed")
    assert predict.main(["runs/detr", "photo.jpg", "--out", "found"]) == 0
    samples_alone, _ = example("fiftyone").split("dataset = ")
    values = {}
    exec(samples_alone, values)
    [sample] = values["samples"]
    assert Path(sample.filepath) == here / "photo.jpg"
    assert sample.predictions.detections
    for detection in sample.predictions.detections:
        x, y, width, height = detection.bounding_box
        assert detection.label == "circle"
        assert 0 <= x <= x + width <= 1.0001
        assert 0 <= y <= y + height <= 1.0001
    try:
        exec(example("fiftyone"), values)
    except fiftyone.core.config.FiftyOneConfigError:
        pytest.skip("FiftyOne has no MongoDB on this machine; its samples are right")
    assert values["dataset"].count("predictions.detections") == len(sample.predictions.detections)
    values["dataset"].delete()
