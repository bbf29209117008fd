"""Published sizes: as many weights as in the publisher's program, trained, and rebuilt from their settings."""

import pytest
import torch
from contract import assert_resolved_options_build_it_again, trained_without_gradient
from small_detectors import CLASSES, batch_of, build, run

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
    "lw_detr": {"tiny": 12052002, "small": 14557378, "medium": 28237378, "large": 46823650, "xlarge": 118033378},
}
CASES = [(name, size) for name, sizes in LEARNING.items() for size in sizes]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_size_has_as_many_weights_as_the_program_s(name, size):
    with torch.device("meta"):
        detector = build(name, size=size, class_names=coco_by_id(0) if name == "lw_detr" else COCO_80)
    assert detector.resolved_options()["size"] == size
    learning = sum(weight.numel() for weight in detector.parameters() if weight.requires_grad)
    assert learning == LEARNING[name][size]


@pytest.mark.parametrize("size", LW_DETR_SIZES)
def test_maps_of_lw_detr_have_the_strides_of_its_size(size):
    with torch.device("meta"):
        detector = build("lw_detr", size=size)
    assert detector.map_taps()[0].strides == {"large": [8, 32], "xlarge": [8, 32]}.get(size, [16])


SETTINGS = [
    ("deimv2", {"size": "atto", "original": True}, {}, (320, 320)),
    ("ecdet", {"size": "m", "d_model": 256}, {"num_queries": 20}, (64, 64)),
    ("lw_detr", {"size": "large", "d_model": 384, "heads": 12}, {"num_queries": 20}, (64, 64)),
]


@pytest.mark.parametrize(("name", "expected", "given", "hw"), SETTINGS)
def test_a_size_trains_and_is_rebuilt_from_its_settings(name, expected, given, hw):
    detector = build(name, size=expected["size"], **given).train()
    losses, _ = run(detector, batch_of([2, 0, 1], hw))
    sum(losses.values()).backward()
    assert trained_without_gradient(detector) == []
    assert_resolved_options_build_it_again(detector, CLASSES, ("pretrained", "backbone", "ffn_dim"))
    assert (expected | given).items() <= detector.resolved_options().items()
