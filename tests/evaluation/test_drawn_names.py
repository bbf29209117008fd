"""Names of every nasty kind in pictures."""

import numpy as np
import pytest
import torch
from nasty_names import NASTY_NAMES
from PIL import Image

from toolkit.evaluation.draw import MOST_TAGS, draw_detections, draw_grid, drawable

COUNT = len(NASTY_NAMES)
IMAGE = torch.full((3, 200, 200), 90, dtype=torch.uint8)
BOXES = (torch.arange(COUNT * 4).reshape(COUNT, 2, 2).float() % 200).sort(dim=1).values.flatten(1)
FOUND = {
    "boxes": BOXES,
    "scores": torch.full((COUNT,), 0.9),
    "labels": torch.arange(COUNT),
}


def test_names_are_drawn(tmp_path):
    for first in range(0, COUNT, MOST_TAGS):  # more in one picture would have no tags
        some = {key: value[first : first + MOST_TAGS] for key, value in FOUND.items()}
        draw_detections(IMAGE, some, NASTY_NAMES, tmp_path / "a.png")
        assert np.asarray(Image.open(tmp_path / "a.png")).std() > 5
    few = {key: value[:2] for key, value in FOUND.items()}
    draw_grid([(IMAGE, few, {"name": name, **few}) for name in NASTY_NAMES], NASTY_NAMES, tmp_path / "b.png")


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("\u6771\u4eac", "<6771><4EAC>"),
        ("\u5927", "<5927>"),
        ("\U0001f9ff", "<1F9FF>"),
        ("cat", "cat"),
    ],
)
def test_letters_that_cannot_be_drawn_stay_apart(name, drawn):
    assert drawable(name) == drawn
