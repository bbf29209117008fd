"""The images to label next: uncertain ones that look different."""

import csv

import numpy as np
import pytest
from PIL import Image
from report_data import found_of

from toolkit.base.errors import BadInput
from toolkit.data.table import Category
from toolkit.tools.predict.predictor import Predictor
from toolkit.tools.predict.uncertain import most_uncertain, write_uncertain

SCORES = {"sure": 0.99, "unsure": 0.5, "copy": 0.5, "sided": 0.9, "other": 0.6}


@pytest.fixture
def files(tmp_path):
    """Pictures of noise whose corners say which one it is; one is a copy, one is not a picture."""
    rng = np.random.default_rng(0)
    pictures = {name: rng.integers(0, 200, (16, 16, 3), dtype=np.uint8) for name in SCORES}
    pictures["copy"] = pictures["unsure"].copy()
    for number, (name, pixels) in enumerate(pictures.items()):
        pixels[0, [0, -1]] = number
        pixels[1, [0, -1]] = [[0], [1]]  # left, right
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    (tmp_path / "broken.png").write_bytes(b"nothing")
    return sorted(tmp_path.glob("*.png"))


def predict(images, score_threshold):
    """By what it sees: a sure box, an unsure one, or one that is not found in the mirror."""
    found = []
    for image in images:
        name = list(SCORES)[int(image[0, 0, 0])]
        if name == "sided" and image[0, 1, 0] == 1:
            found.append(found_of([], [], []))
        else:
            found.append(found_of([[4.0, 4, 12, 12]], [0], [SCORES[name]]))
    return found


PREDICTOR = Predictor("test", [Category(7, "cup")], predict)


def test_uncertain_images_come_first_and_near_duplicates_last(files):
    chosen = [path.stem for path in most_uncertain(PREDICTOR, files, 4, batch_size=2)]
    assert chosen[0] == "sided"
    assert {*SCORES} - {*chosen} in ({"copy"}, {"unsure"})
    measured = {path.stem: value for path, value in most_uncertain(PREDICTOR, files, 9).items()}
    assert measured.keys() == SCORES.keys()
    assert list(measured)[-1] in ("copy", "unsure")
    assert measured["sure"] == pytest.approx((0.0808, 0), abs=1e-4)
    assert measured["unsure"][0] == pytest.approx(1)
    assert measured["sided"][1] == pytest.approx(1)


def test_uncertainty_is_written(files, tmp_path):
    chosen = most_uncertain(PREDICTOR, files, 1)
    write_uncertain(chosen, tmp_path / "u.csv")
    (row,) = csv.DictReader((tmp_path / "u.csv").open(newline=""))
    ((path, parts),) = chosen.items()
    assert row["file"] == str(path)
    assert float(row["uncertainty"]) == pytest.approx(sum(parts))


def test_a_number_of_images_is_asked_for(files):
    with pytest.raises(BadInput, match="--uncertain 0: expected the number"):
        most_uncertain(PREDICTOR, files, 0)
