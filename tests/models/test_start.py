"""The detector that a run starts with: from a source, with parts that are frozen or fresh."""

import json
from pathlib import Path

import pytest
import torch
from small_detectors import (
    CATEGORIES,
    CLASSES,
    HYBRIDS,
    OF_TRANSFORMERS,
    SMALL,
    batch_of,
    build,
    hub_config,
    run,
    small,
)
from transformers import AutoModelForObjectDetection

from scripts import train_detr
from toolkit.base.errors import BadInput
from toolkit.models import options_class
from toolkit.models.start import start_detector
from toolkit.models.weights.names import COCO_80, coco_by_id
from toolkit.run.command_line import parse_config
from toolkit.run.settings_file import load_config_dict
from toolkit.tools.predict.open import rebuild_detector

DETR = {"architecture": "detr", **SMALL["detr"]}
RT_DETR = {"architecture": "rt_detr_v2", **SMALL["rt_detr_v2"]}


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def begin(run_folder):
    """`begin(settings, classes)`: the detector as a script starts it, its settings written first, and what was said."""

    def start(options, classes):
        (run_folder / "config.yaml").write_text(json.dumps({"model": options}))  # JSON is YAML
        said = []
        torch.manual_seed(7)
        settings = options_class(options["architecture"])(**options)
        detector = start_detector(
            settings,
            classes,
            run_folder,
            resumed_from=None,
            say=said.append,
        )
        return detector, "\n".join(said)

    return start


def rebuilt(run_folder, classes):
    return rebuild_detector(load_config_dict(run_folder / "config.yaml", options_class), classes)


def test_a_final_folder_is_built_from_its_config_and_by_the_run_folder_alone(tmp_path, run_folder, begin):
    source = small("detr", mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])
    source.save_final(tmp_path / "final", CATEGORIES, {"height": 64, "width": 64})
    classes = ["square", "new"]
    given = {"architecture": "detr", "pretrained": str(tmp_path / "final"), "freeze": "none"}
    detector, said = begin(given, classes)
    assert detector.mean == pytest.approx((0.1, 0.2, 0.3))
    assert detector.std == pytest.approx((0.4, 0.5, 0.6))
    assert detector.model.config.d_model == 32
    assert "rows of 1 of 2 classes: square" in said
    assert len(said.splitlines()) < 15
    written = (run_folder / "pretrained.txt").read_text()
    assert "mapped  model.class_labels_classifier.bias rows of 1 of 2 classes: square" in written

    (tmp_path / "final").rename(tmp_path / "gone")
    again = rebuilt(run_folder, classes)
    again.load_state_dict(detector.state_dict())
    assert str(again) == str(detector)
    assert again.mean == detector.mean


def test_frozen_prefixes_stay_in_evaluation_mode(run_folder, begin):
    detector, _ = begin({**DETR, "freeze_prefixes": ["model.model.backbone"]}, ["a"])
    assert not any(module.training for module in detector.train().model.model.backbone.modules())
    assert not (run_folder / "pretrained_config.json").exists(), "there is no source to be noted"
    trained = [name for name, parameter in detector.named_parameters() if parameter.requires_grad]
    assert trained
    assert not any(".backbone." in name for name in trained)
    again = rebuilt(run_folder, ["a"]).train()
    assert not again.model.model.backbone.training, "a replayed batch must see what the run saw"


def test_fresh_prefixes_keep_their_initial_values(tmp_path, begin):
    source = build("rt_detr_v2", seed=1, **SMALL["rt_detr_v2"])
    source.save_final(tmp_path, CATEGORIES)
    heads = ["model.model.enc_bbox_head", "model.model.decoder.bbox_embed"]
    detector, said = begin({**RT_DETR, "pretrained": str(tmp_path), "fresh_prefixes": heads}, CLASSES)
    mine = detector.state_dict()
    initial = build("rt_detr_v2", seed=7, **SMALL["rt_detr_v2"]).state_dict()
    old = source.state_dict()
    fresh = {name for name in mine if "bbox_head" in name or "bbox_embed" in name}
    assert fresh
    assert all(mine[name].equal(initial[name]) for name in fresh)
    assert all(mine[name].equal(old[name]) for name in mine.keys() - fresh)
    assert "new     model.model.dec" in said


WRONG_PREFIXES = [
    ({"freeze_prefixes": ["model.backbon"]}, "cannot freeze 'model.backbon'"),
    ({"freeze_prefixes": ["backbone"]}, r"cannot freeze 'backbone'.*did you mean model\.model\.backbone\?"),
    ({"fresh_prefixes": ["model.model.bbox"], "pretrained": "final"}, "no tensor below 'model.model.bbox'"),
    ({"architecture": "rt_detr_v2", "pretrained": "final"}, r"rt_detr_v2, but model.pretrained .* is detr"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG_PREFIXES)
def test_prefixes_and_sources_that_do_not_fit_are_refused(wrong, words, tmp_path, begin):
    if "pretrained" in wrong:
        small("detr").save_final(tmp_path / "final", CATEGORIES)
        wrong = wrong | {"pretrained": str(tmp_path / "final")}
    with pytest.raises(BadInput, match=words):
        begin(wrong if "architecture" in wrong else DETR | wrong, CLASSES)


def save_hub_folder(architecture: str, folder: Path) -> tuple[list[str], dict]:
    """A model as the hub has it, with all classes of COCO: these and its weights."""
    classes = COCO_80 if architecture in HYBRIDS else coco_by_id(0)
    detector = small(architecture, **({"backbone": "resnet10t"} if "backbone" in SMALL[architecture] else {}))
    entries = hub_config(architecture) if architecture in HYBRIDS else detector.model.config.to_dict()
    entries |= {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    config = type(detector).config_class.from_dict(entries | {"auxiliary_loss": False})
    model = AutoModelForObjectDetection.from_config(config)
    model.save_pretrained(folder)
    return classes, model.state_dict()


@pytest.mark.parametrize("architecture", [name for name in OF_TRANSFORMERS if "+" not in name])
def test_a_hub_model_trains_with_the_default_command(architecture, tmp_path, run_folder):
    classes, theirs = save_hub_folder(architecture, tmp_path / "hub")
    argv = ["--model.pretrained", str(tmp_path / "hub")]
    if architecture != "rt_detr_v2":  # the script's own
        argv += ["--model.architecture", architecture]
    options = parse_config(train_detr.Config, argv, train_detr.DEFAULT_CONFIG).model
    assert set(options.given) <= {"pretrained", "architecture"}
    detector = start_detector(
        options,
        ["person", "hexagon", "dog"],
        run_folder,
        resumed_from=None,
        say=print,
    )
    lines = (run_folder / "pretrained.txt").read_text().splitlines()[1:]
    assert not [line for line in lines if line.startswith(("new", "unused"))]
    assert any("rows of 2 of 3 classes: person, dog" in line for line in lines)
    rows = [classes.index("person"), classes.index("dog")]
    of_classes = []
    for name, tensor in detector.model.state_dict().items():
        if tensor.shape == theirs[name].shape:
            assert torch.equal(tensor, theirs[name]), name
        else:
            assert torch.equal(tensor[[0, 2]], theirs[name][rows]), name
            assert name.endswith("bias") or not torch.equal(tensor[1], theirs[name][1]), name  # biases: all the prior
            of_classes.append(name)
    assert len(of_classes) >= 2
    losses, _ = run(detector.train(), batch_of([2, 2], (128, 128)))
    assert sum(losses.values()).isfinite()


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--model.ffn_dim", "24", "leave out --model.ffn_dim"),
        ("--model.architecture", "detr", "--model.architecture rt_detr_v2"),
    ],
)
def test_what_the_source_decides_is_told_in_three_lines(flag, value, words, tmp_path, run_folder):
    save_hub_folder("rt_detr_v2", tmp_path / "hub")
    argv = ["--model.pretrained", str(tmp_path / "hub"), flag, value]
    options = parse_config(train_detr.Config, argv, train_detr.DEFAULT_CONFIG).model
    with pytest.raises(BadInput, match=words) as caught:
        start_detector(options, ["dog"], run_folder, resumed_from=None, say=print)
    assert len(str(caught.value).splitlines()) == 3
