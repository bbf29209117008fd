"""What a run without a trained detector says."""

import re
from dataclasses import replace

import pytest
from places import ROOT

from toolkit.detectors.scene_graphs.options import EgtrOptions, SceneGraphOptions, without_detector


@pytest.mark.parametrize("options", [SceneGraphOptions(), SceneGraphOptions(mode="sgcls"), EgtrOptions()])
def test_two_commands_find_objects_on_own_data(options):
    words = without_detector(options, "my/data")
    assert words.count("accelerate launch ") == 2
    assert words.count("--data.path my/data") == 2
    files = re.findall(r"\w+/[\w/]+\.(?:py|yaml)", words)
    assert len(files) == 4
    for file in files:
        assert (ROOT / file).is_file()
    assert "detects no objects" in words or "random weights" in words
    assert without_detector(replace(options, detector="runs/x"), "my/data") == ""
    assert without_detector(options, None) == ""
