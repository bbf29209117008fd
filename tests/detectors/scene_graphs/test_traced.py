"""Which graphs can be traced for exporters; that they are the same is tested in tests/tools/export."""

import pytest
import yaml
from scene_graph_data import model_of

from toolkit.detectors.scene_graphs.traced import TRACEABLE_HEADS

YOLOV3 = yaml.safe_load("detector_options: {architecture: yolov3, backbone: lcnet_035, head_channels: [8, 8, 8]}")
ON_YOLOV3 = {"backbone": None, "map_channels": 8, "representation_size": 16} | YOLOV3


@pytest.mark.parametrize("head", TRACEABLE_HEADS)
def test_graphs_on_a_detector_of_one_stage_can_be_traced(table, head):
    assert model_of(table, "sgdet", head, **ON_YOLOV3).graph_obstacle() is None


@pytest.mark.parametrize(
    ("mode", "head", "options", "words"),
    [
        ("predcls", "penet", ON_YOLOV3, "in predcls the boxes are given"),
        ("sgdet", "motifs", ON_YOLOV3, "of the heads only penet, react, react_pp"),
        ("sgdet", "penet", {}, "its detector has two stages"),
        ("sgdet", "penet", ON_YOLOV3 | {"union_levels": "all"}, "union features of all levels"),
    ],
)
def test_what_cannot_be_traced_says_why(table, mode, head, options, words):
    assert words in model_of(table, mode, head, **options).graph_obstacle()
