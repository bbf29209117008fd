"""The contract of detectors: what is checked of a class of one's own, and the detections that are kept."""

import pytest
import torch

from toolkit.base.errors import BadInput
from toolkit.models import build_detector
from toolkit.models.detector import Detector, check_contract


class Blind(Detector):
    """Keeps the contract, and shows no maps."""

    loss_names = ("loss",)
    divided_by = "images"

    def __init__(self, class_names, options):
        super().__init__()

    forward = denominators = criterion = postprocess = lambda self, *_: {}


def variant(**announced) -> Blind:
    return type("Variant", (Blind,), announced)(["a", "b"], None)


# (what a class announces, all that is wrong with it)
BROKEN = [
    ({"forward": Detector.forward, "postprocess": Detector.postprocess}, ["has no forward()", "has no decode()"]),
    (
        {"loss_names": (), "divided_by": {}, "stride": 0, "std": (1, 0, 1)},
        ["no loss_names", "no divided_by", "those of std above 0", "stride is 0"],
    ),
    ({"loss_names": ("loss", "other"), "divided_by": {"loss": "images"}}, ["names no denominator for other"]),
    ({"predicts_masks": True}, ["has no paste_masks()"]),
]


@pytest.mark.parametrize(("announced", "problems"), BROKEN)
def test_everything_that_breaks_the_contract_is_named_at_once(announced, problems):
    with pytest.raises(BadInput) as error:
        check_contract(variant(**announced))
    assert len(error.value.problems) == len(problems)
    for words, problem in zip(problems, error.value.problems, strict=True):
        assert words in problem


def test_a_class_that_keeps_the_contract_passes_and_a_module_does_not():
    check_contract(variant())
    with pytest.raises(BadInput, match="Linear is not a detector"):
        check_contract(torch.nn.Linear(1, 1))


def test_a_scene_graph_needs_a_detector_with_maps():
    below = {"architecture": f"{__name__}:Blind"}
    with pytest.raises(BadInput, match="Blind has no feature maps"):
        build_detector(
            "scene_graph",
            class_names=["a"],
            predicates=["on"],
            detector_options=below,
        )


def test_further_columns_of_decode_are_chosen_along():
    """The third of four rows has no detection, the fourth too low a score; masks follow their boxes."""
    boxes = torch.arange(32.0).view(2, 4, 4)
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.1], [0.5, 0.4, 0.3, 0.2]])
    labels = torch.tensor([[0, 1, -1, 1], [-1, 0, 1, 1]])
    masks = torch.arange(2 * 4 * 6.0).view(2, 4, 2, 3)
    detector = variant(
        decode=lambda self, *_: (boxes, scores, labels, {"masks": masks}),
        postprocess=Detector.postprocess,
    )
    first, second = detector.postprocess({}, None, None, score_threshold=0.25, top_k=2)
    assert list(first) == list(second) == ["boxes", "scores", "labels", "masks"]
    assert torch.equal(first["masks"], masks[0, :2])
    assert torch.equal(first["boxes"], boxes[0, :2])
    assert torch.equal(second["masks"], masks[1, 1:3])
    assert torch.equal(second["scores"], scores[1, 1:3])
