"""Detections handed over to supervision and FiftyOne: the examples of docs/export.md, where these are installed."""

import json
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


@pytest.fixture(params=[False, True], ids=["boxes", "masks"])
def has_masks(request, tmp_path, monkeypatch):
    """Whether the detector in the current folder, of random weights, finds masks; there is a picture for it too."""
    monkeypatch.chdir(tmp_path)
    options = SMALL["faster_rcnn"] | {"masks": True} if request.param else SMALL["ssd"]
    detector = build_detector("faster_rcnn" if request.param else "ssd", class_names=["circle"], **options)
    detector.eval().save_final(tmp_path / "runs" / "detr", [Category(7, "circle")], {"height": 64, "width": 64})
    (tmp_path / "IMAGES").mkdir()
    Image.new("RGB", (90, 60), "#336699").save(tmp_path / "IMAGES" / "photo.jpg")
    return request.param


def test_detections_become_those_of_supervision(has_masks):
    supervision = pytest.importorskip("supervision", reason="supervision is not installed")
    values = {}
    exec(example("supervision").replace("photo.jpg", "IMAGES/photo.jpg"), values)
    detections = values["detections"]
    assert isinstance(detections, supervision.Detections)
    assert len(detections) == len(values["found"]["scores"]) > 0
    assert set(detections.data["class_name"]) == {"circle"}
    assert (detections.confidence > 0.3).all()
    assert (detections.mask is not None) == has_masks
    if has_masks:
        assert detections.mask.shape == (len(detections), 60, 90)


def test_predictions_become_a_data_set_of_fiftyone(has_masks, monkeypatch):
    fiftyone = pytest.importorskip("fiftyone", reason="fiftyone is not installed")

    def from_dir(dataset_type, label_field, **options):
        """Return the samples that FiftyOne would store, without the MongoDB that it stores them in."""
        assert label_field == "predictions"
        with dataset_type().get_dataset_importer_cls()(**options) as samples:
            return list(samples)

    monkeypatch.setattr(fiftyone.Dataset, "from_dir", from_dir)
    assert predict.main("runs/detr IMAGES --out found --format coco".split()) == 0
    expected = json.loads(Path("found/dataset.json").read_text())["annotations"]
    text = example("fiftyone")
    values = {}
    exec(text.replace('"detections"', '"segmentations"') if has_masks else text, values)
    [(path, _, labels)] = values["dataset"]
    assert Path(path).samefile("IMAGES/photo.jpg")
    assert len(labels.detections) == len(expected) > 0
    assert [found.confidence for found in labels.detections] == [entry["score"] for entry in expected]
    assert {found.label for found in labels.detections} == {"circle"}
    assert all((found.mask is not None) == has_masks for found in labels.detections)
    x, y, width, height = labels.detections[0].bounding_box
    assert [90 * x, 60 * y, 90 * width, 60 * height] == pytest.approx(expected[0]["bbox"])
