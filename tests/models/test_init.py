"""Detectors by name (`toolkit/models/__init__.py`): classes of one's own and their options."""

import re
from dataclasses import dataclass

import pytest
from fcos_detector import FCOS

from scripts.train_faster_rcnn import Config
from toolkit.base import imports
from toolkit.base.errors import BadInput
from toolkit.models import DetectorOptions, build_detector, options_class
from toolkit.run.command_line import parse_config


class PlainOptions:
    width: int = 32


class NotDecorated(DetectorOptions):
    width: int = 32


WRONG_OPTIONS = {
    "plain class": (PlainOptions, "PlainOptions, is not a subclass of toolkit.models.DetectorOptions"),
    "dataclass": (dataclass(PlainOptions), "PlainOptions, is not a subclass of toolkit.models.DetectorOptions"),
    "without decorator": (NotDecorated, "NotDecorated, is not a dataclass"),
    "dict": ({"width": 32}, "is not a subclass of toolkit.models.DetectorOptions"),
    "none": (None, "None, is not a subclass"),
}


@pytest.mark.parametrize("kind", WRONG_OPTIONS)
def test_options_of_an_own_detector_have_the_base_class(kind, monkeypatch):
    options, words = WRONG_OPTIONS[kind]
    monkeypatch.setattr(FCOS, "Options", options)
    imports.trust_class("fcos_detector:FCOS")
    said = f"the Options of fcos_detector:FCOS, .*{re.escape(words)}.*DetectorOptions"
    with pytest.raises(BadInput, match=said):
        options_class("fcos_detector:FCOS")
    with pytest.raises(BadInput, match=said):
        build_detector("fcos_detector:FCOS", class_names=["a"])


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("fcos_detector:Fcos", "cannot be imported: fcos_detector has no Fcos; the nearest name is FCOS"),
        ("fcos_detector:FCOSOptions", "not a subclass"),
        ("nowhere:FCOS", "cannot be imported"),
        ("faster_rcn", "did you mean faster_rcnn"),
        ("rt_detr_v2", "train_detr.py trains it"),
    ],
)
def test_a_name_that_is_not_a_detector_s_is_refused_before_anything_is_read(architecture, words):
    with pytest.raises(BadInput, match=words):
        parse_config(Config, ["--model.architecture", architecture])
