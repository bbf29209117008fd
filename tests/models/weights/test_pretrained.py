"""Sources of weights: what is refused and how, and what is loaded into a detector."""

import time

import pytest
import torch
from huggingface_hub import constants
from small_detectors import SMALL, build
from torch import nn

from toolkit.base.errors import BadInput
from toolkit.models.backbones import timm_model
from toolkit.models.weights.pretrained import Pretrained, load_pretrained, open_pretrained


def weights_of(detector, classes) -> Pretrained:
    return Pretrained(
        "source",
        detector.options["architecture"],
        {},
        list(classes),
        detector.state_dict(),
    )


def test_weights_that_do_not_fit_are_refused():
    small = SMALL["detr"] | {"class_names": ["a"]}
    detector = build("detr", **small | {"num_queries": 7, "ffn_dim": 8})
    with pytest.raises(BadInput) as caught:
        load_pretrained(detector, weights_of(build("detr", **small), ["a"]), ["a"])
    said = str(caught.value)
    assert "query_position_embeddings" in said
    assert "(6, 32)" in said
    assert "fc1.weight" in said, "all of it"
    with pytest.raises(BadInput, match="none of its 2 tensors"):
        load_pretrained(detector, weights_of(Linear(1, 1), ["a"]), ["a"])


class Linear(nn.Linear):
    options = {"architecture": "detr"}


# (name, what is in it, what the error says); None: a folder
NOT_WEIGHTS = [
    ("weights.pth", b"", "cannot be read as weights"),
    ("text.pth", b"hello", "cannot be read as weights of PyTorch; give a file that"),
    ("empty", None, "not a run folder"),
    ("a/b/c", None, "no such file or folder"),
]


@pytest.mark.parametrize(("name", "content", "words"), NOT_WEIGHTS)
def test_what_holds_no_weights_is_refused(name, content, words, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    elif "/" not in name:
        (tmp_path / name).mkdir()
    with pytest.raises(BadInput, match=words):
        open_pretrained(str(tmp_path / name))


def test_a_folder_of_transformers_without_a_detector_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(BadInput, match="not a detector"):
        open_pretrained(str(tmp_path))


@pytest.mark.parametrize(
    ("last", "is_classifier"),
    [
        ("fc.weight", True),
        ("head.fc.weight", True),
        ("classifier.6.weight", True),
        ("classifier.weight", True),
        ("roi_heads.box_head.fc7.weight", False),
    ],
)
def test_a_classifier_is_sent_to_the_setting_for_backbones(last, is_classifier, tmp_path):
    state = {"conv1.weight": torch.ones(4, 3, 3, 3), last: torch.ones(10, 4)}
    torch.save(state, tmp_path / "resnet.pth")
    with pytest.raises(BadInput) as caught:
        open_pretrained(str(tmp_path / "resnet.pth"))
    assert ("give it as --model.pretrained_backbone" in str(caught.value)) is is_classifier


@pytest.mark.parametrize("what", ["detector", "backbone"])
def test_without_a_network_one_sentence_at_once_says_what_to_set(what, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(time, "sleep", asked.append)
    with pytest.raises(BadInput) as caught:
        if what == "detector":
            open_pretrained("no-such-owner/no-such-detector")
        else:
            timm_model("resnet10t", True, features_only=True, out_indices=[4])
    assert not asked, "nothing is asked for a second time"
    assert "connect to the network once" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert constants.HF_HUB_OFFLINE is False, "other downloads of this process are not cut off"
