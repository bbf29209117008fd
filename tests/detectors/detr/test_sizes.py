"""Published sizes: as many weights as in the publisher's program, and rebuilt from their settings."""

import pytest
import torch
from contract import assert_resolved_options_build_it_again
from small_detectors import build

from toolkit.detectors.detr.sizes import LW_DETR_SIZES
from toolkit.models.weights.names import COCO_80, coco_by_id

# Numbers that learn in the programs' models for COCO; of DEIMv2's L and X less the masked biases of keys.
LEARNING = {
    "deimv2": {
        "atto": 508983,
        "femto": 983943,
        "pico": 1539537,
        "n": 3600419,
        "s": 9779836,
        "m": 18357748,
        "l": 32546220,
        "x": 51206742,
    },
    "ecdet": {"s": 9884100, "m": 19431500, "l": 32966108, "x": 49941980},
    "lw_detr": {
        "tiny": 12052002,
        "small": 14557378,
        "medium": 28237378,
        "large": 46823650,
        "xlarge": 118033378,
    },
}
CASES = [(name, size) for name, sizes in LEARNING.items() for size in sizes]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_size_has_as_many_weights_as_the_program_s(name, size):
    with torch.device("meta"):
        classes = coco_by_id(0) if name == "lw_detr" else COCO_80
        detector = build(name, size=size, class_names=classes)
        assert_resolved_options_build_it_again(detector, classes, ("pretrained", "backbone", "ffn_dim"))
    assert detector.resolved_options()["size"] == size
    learning = sum(weight.numel() for weight in detector.parameters() if weight.requires_grad)
    assert learning == LEARNING[name][size]


@pytest.mark.parametrize("size", LW_DETR_SIZES)
def test_maps_of_lw_detr_have_the_strides_of_its_size(size):
    with torch.device("meta"):
        detector = build("lw_detr", size=size)
    assert detector.map_taps()[0].strides == {"large": [8, 32], "xlarge": [8, 32]}.get(size, [16])
