"""Fine-tuning: which tensors and rows of classes a detector takes over from a folder, a run or the hub."""

import json
import time
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants
from hypothesis import given, settings
from hypothesis import strategies as st
from places import SMALL_CONFIGS
from small_detectors import HYBRIDS, OF_TRANSFORMERS, SMALL, batch_of, hub_config, run, small
from torch import nn
from transformers import AutoModelForObjectDetection

from scripts import train_detr
from toolkit.base.errors import BadInput
from toolkit.data.table import Category
from toolkit.models import build_detector, options_class
from toolkit.models.backbones import timm_model
from toolkit.models.start import start_detector
from toolkit.models.weights.mapping import copy_class_rows, map_weights
from toolkit.models.weights.names import COCO_80, coco_by_id
from toolkit.models.weights.pretrained import Pretrained, load_pretrained, open_pretrained
from toolkit.run.command_line import parse_config
from toolkit.run.settings_file import load_config_dict
from toolkit.tools.predict.open import rebuild_detector

TRANSFORMER = {"backbone": "test_resnet", "freeze": "none", "d_model": 16, "heads": 2, "ffn_dim": 16,
               "encoder_layers": 1, "decoder_layers": 1, "num_queries": 5}  # fmt: skip
DETR = {"architecture": "detr", **TRANSFORMER}
RT_DETR = {"architecture": "rt_detr_v2", **TRANSFORMER, "decoder_layers": 2, "num_denoising": 4}
LAYOUTS = [(0, 1, 0), (0, 1, 1), (1, 1, 0), (4, 4, 0), (5, 1, 0)]


def detector_of(options, classes, seed):
    torch.manual_seed(seed)
    return build_detector(**options, class_names=classes)


def weights_of(detector, classes, name="source"):
    return Pretrained(name, detector.options["architecture"], {}, list(classes), detector.state_dict())


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def begin(options, classes, folder, resumed_from=None, seed=7):
    """`start_detector` as a script calls it: settings written first. Returns the detector and what was said."""
    (folder / "config.yaml").write_text(json.dumps({"model": options}))  # JSON is YAML
    said, settings = [], options_class(options["architecture"])(**options)
    torch.manual_seed(seed)
    return start_detector(settings, classes, folder, resumed_from=resumed_from, say=said.append), "\n".join(said)


class_lists = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=6, unique=True)


@settings(max_examples=60, deadline=None)
@given(layout=st.sampled_from(LAYOUTS), blocks=st.integers(1, 3), ours=class_lists, theirs=class_lists)
def test_rows_go_to_the_same_class_and_block(layout, blocks, ours, theirs):
    before, per_class, after = layout
    fresh, source = (
        torch.arange(start, start + blocks * (before + per_class * len(names) + after) * 2.0).reshape(blocks, -1, 2)
        for start, names in ((0, ours), (1000, theirs))
    )
    copied = copy_class_rows(fresh.flatten(0, 1), source.flatten(0, 1), layout, ours, theirs)
    for block, new, old in zip(copied.reshape(fresh.shape), fresh, source, strict=True):
        assert block[:before].equal(old[:before])
        assert block[len(block) - after :].equal(old[len(old) - after :])
        for i, name in enumerate(ours):
            start = before + i * per_class
            known, place = (old, before + theirs.index(name) * per_class) if name in theirs else (new, start)
            assert block[start : start + per_class].equal(known[place : place + per_class]), name
    assert copy_class_rows(source.flatten(0, 1), copied, layout, theirs, ours).equal(source.flatten(0, 1))


def test_new_classes_of_rt_detr_keep_the_bias_prior_and_their_embedding():
    source, detector = detector_of(RT_DETR, ["a", "b"], 1), detector_of(RT_DETR, ["b", "x", "y"], 2)
    with torch.no_grad():
        source.model.model.enc_score_head.bias.fill_(3.0)
        for head in source.model.model.decoder.class_embed:
            head.bias.fill_(3.0)
    fresh = detector.model.model.denoising_class_embed.weight.clone()
    load_pretrained(detector, weights_of(source, ["a", "b"]), ["b", "x", "y"])
    core = detector.model.model
    for head in (core.enc_score_head, *core.decoder.class_embed):
        assert torch.sigmoid(head.bias).tolist() == pytest.approx([0.952574, 0.01, 0.01])
    embedding = core.denoising_class_embed.weight
    assert embedding[[0, 3]].equal(source.model.model.denoising_class_embed.weight[[1, 2]])
    assert embedding[1:3].equal(fresh[1:3])


def test_what_does_not_fit_is_refused():
    detector = detector_of(DETR | {"num_queries": 6, "ffn_dim": 8}, ["a"], 2)
    with pytest.raises(BadInput) as caught:
        load_pretrained(detector, weights_of(detector_of(DETR, ["a"], 1), ["a"]), ["a"])
    assert "query_position_embeddings" in str(caught.value) and "(6, 16)" in str(caught.value)
    assert "fc1.weight" in str(caught.value), "all of it"
    with pytest.raises(BadInput, match="none of its 2 tensors"):
        load_pretrained(detector, Pretrained("x", "detr", {}, ["a"], nn.Linear(1, 1).state_dict()), ["a"])
    with pytest.raises(BadInput, match="class 'a' stands 2 times in the checkpoint"):
        map_weights({}, {}, class_tensors={"x": (0, 1, 0)}, classes=["a", "b"], source_classes=["a", "N/A", "a", "N/A"])


def test_a_final_folder_is_built_from_its_own_config_and_by_the_run_folder_alone(tmp_path, run_folder):
    source = detector_of(DETR | {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}, ["a", "b"], 1)
    source.save_final(tmp_path / "final", [Category(3, "a"), Category(7, "b")], {"height": 64, "width": 64})
    given = {"architecture": "detr", "pretrained": str(tmp_path / "final"), "freeze": "none"}
    detector, said = begin(given, ["b", "new"], run_folder)
    assert (detector.mean, detector.std) == (pytest.approx((0.1, 0.2, 0.3)), pytest.approx((0.4, 0.5, 0.6)))
    assert detector.model.config.d_model == 16 and detector.model.config.num_queries == 5
    assert "mapped" in said and "rows of 1 of 2 classes: b" in said and len(said.splitlines()) < 15
    written = (run_folder / "pretrained.txt").read_text()
    assert "mapped  model.class_labels_classifier.bias rows of 1 of 2 classes: b" in written

    (tmp_path / "final").rename(tmp_path / "gone")
    rebuilt = rebuild_detector(load_config_dict(run_folder / "config.yaml", options_class), ["b", "new"])
    rebuilt.load_state_dict(detector.state_dict())
    image, sizes = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8), torch.tensor([[64, 64]])
    with torch.no_grad():
        expected, found = (d.eval()(image, sizes)["logits"] for d in (detector, rebuilt))
    torch.testing.assert_close(found, expected)


def test_frozen_prefixes_stay_in_evaluation_mode_and_unknown_ones_are_refused(run_folder):
    detector, _ = begin({**DETR, "freeze_prefixes": ["model.model.backbone"]}, ["a"], run_folder)
    detector.train()
    backbone = detector.model.model.backbone
    assert not any(module.training for module in backbone.modules())
    assert not (run_folder / "pretrained_config.json").exists(), "there is no source to be noted"
    trained = [name for name, parameter in detector.named_parameters() if parameter.requires_grad]
    assert trained and not any(".backbone." in name for name in trained)
    rebuilt = rebuild_detector(load_config_dict(run_folder / "config.yaml", options_class), ["a"]).train()
    assert not rebuilt.model.model.backbone.training, "a replayed batch must see what the run saw"
    with pytest.raises(BadInput, match="cannot freeze 'model.backbon'"):
        begin({**DETR, "freeze_prefixes": ["model.backbon"]}, ["a"], run_folder)
    with pytest.raises(BadInput, match=r"cannot freeze 'backbone'.*did you mean model\.model\.backbone\?"):
        begin({**DETR, "freeze_prefixes": ["backbone"]}, ["a"], run_folder)


def test_fresh_prefixes_keep_their_initial_values_and_unknown_ones_are_refused(tmp_path, run_folder):
    source = detector_of(RT_DETR, ["a", "b"], 1)
    source.save_final(tmp_path / "final", [Category(1, "a"), Category(2, "b")])
    heads = ["model.model.enc_bbox_head", "model.model.decoder.bbox_embed"]
    given = {**RT_DETR, "pretrained": str(tmp_path / "final"), "fresh_prefixes": heads}
    detector, said = begin(given, ["a", "b"], run_folder)
    torch.manual_seed(7)
    initial, mine, old = build_detector(**RT_DETR, class_names=["a", "b"]).state_dict(), *map(
        nn.Module.state_dict, (detector, source))  # fmt: skip
    fresh = {name for name in mine if "bbox_head" in name or "bbox_embed" in name}
    assert fresh and all(mine[name].equal(initial[name]) for name in fresh)
    assert all(mine[name].equal(old[name]) for name in mine.keys() - fresh) and "new     model.model.dec" in said
    with pytest.raises(BadInput, match="no tensor below 'model.model.bbox'"):
        begin({**given, "fresh_prefixes": ["model.model.bbox"]}, ["a", "b"], run_folder)


def test_a_source_that_is_none_or_of_another_architecture(tmp_path, run_folder):
    detector_of(DETR, ["a"], 1).save_final(tmp_path / "final", [Category(1, "a")])
    with pytest.raises(BadInput, match=r"rt_detr_v2, but model.pretrained .* is detr"):
        begin({"architecture": "rt_detr_v2", "pretrained": str(tmp_path / "final")}, ["a"], run_folder)
    (tmp_path / "weights.pth").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "bert"}')
    reasons = {"weights.pth": "cannot be read as weights", "empty": "no run folder", "broken": "not a detector",
               "a/b/c": "does not exist"}  # fmt: skip
    for name, reason in reasons.items():
        with pytest.raises(BadInput, match=reason):
            open_pretrained(str(tmp_path / name))
    (tmp_path / "text.pth").write_text("hello")
    with pytest.raises(BadInput, match=r"cannot be read as weights of PyTorch; give a file that"):
        open_pretrained(str(tmp_path / "text.pth"))  # without torch's advice on `weights_only`


@pytest.mark.parametrize(("last", "is_classifier"), [
    ("fc.weight", True), ("head.fc.weight", True), ("classifier.6.weight", True), ("classifier.weight", True),
    ("roi_heads.box_head.fc7.weight", False),
])  # fmt: skip
def test_a_classifier_is_sent_to_the_setting_for_backbones(last, is_classifier, tmp_path):
    state = {"conv1.weight": torch.ones(4, 3, 3, 3), last: torch.ones(10, 4)}
    torch.save(state, tmp_path / "resnet.pth")
    with pytest.raises(BadInput) as caught:
        open_pretrained(str(tmp_path / "resnet.pth"))
    assert ("give it as --model.pretrained_backbone" in str(caught.value)) is is_classifier


def test_without_a_network_one_sentence_at_once_says_what_to_set(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(time, "sleep", asked.append)
    with pytest.raises(BadInput) as of_detector:
        open_pretrained("no-such-owner/no-such-detector")
    with pytest.raises(BadInput) as of_backbone:
        timm_model("resnet10t", True, features_only=True, out_indices=[4])
    assert not asked, "nothing is asked for a second time"
    for caught in (of_detector, of_backbone):
        assert "connect to the network once" in str(caught.value) and "\n" not in str(caught.value)
    assert constants.HF_HUB_OFFLINE is False, "other downloads of this process are not cut off"


@pytest.mark.parametrize("name", ["train_detr", "train_faster_rcnn", "train_ssd", "train_yolov3"])
def test_every_tensor_whose_shape_goes_by_the_classes_says_what_its_rows_are(name):
    model = yaml.safe_load((SMALL_CONFIGS / f"{name}.yaml").read_text())["model"]
    options = {"architecture": name.removeprefix("train_"), **model}
    small, large = (build_detector(**options, class_names=names) for names in (["a", "b"], ["x", "b", "y", "z"]))
    mine, old = large.state_dict(), small.state_dict()
    fresh = {name: value.clone() for name, value in mine.items()}
    table = load_pretrained(large, weights_of(small, ["a", "b"]), ["x", "b", "y", "z"])
    others = [name for name in table.sources if name not in table.rows]
    assert others and all(large.state_dict()[name].equal(old[name]) for name in others)
    assert any(not large.state_dict()[name].equal(fresh[name]) for name in table.rows)
    if name == "train_detr":
        assert "rows of 1 of 4 classes: b" in table.rows.values()
    assert set(table.rows) >= {name for name in mine if mine[name].shape != old[name].shape} != set()
    assert not table.new and not table.unused


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
def test_a_hub_model_trains_with_the_default_command(architecture, tmp_path):
    classes, theirs = save_hub_folder(architecture, tmp_path / "hub")
    argv = ["--model.pretrained", str(tmp_path / "hub"), "--model.architecture", architecture]
    if architecture == "rt_detr_v2":
        argv = argv[:2]  # the script's own
    options = parse_config(train_detr.Config, argv, train_detr.DEFAULT_CONFIG).model
    assert set(options.given) <= {"pretrained", "architecture"}
    (tmp_path / "run").mkdir()
    detector = start_detector(options, ["person", "hexagon", "dog"], tmp_path / "run", resumed_from=None, say=print)
    lines = (tmp_path / "run" / "pretrained.txt").read_text().splitlines()[1:]
    unmatched = [line for line in lines if line.startswith(("new", "unused"))]
    assert not unmatched, unmatched
    assert any("rows of 2 of 3 classes: person, dog" in line for line in lines)
    of_classes = 0
    for name, tensor in detector.model.state_dict().items():
        if tensor.shape == theirs[name].shape:
            assert torch.equal(tensor, theirs[name]), name
        else:
            assert torch.equal(tensor[[0, 2]], theirs[name][[classes.index("person"), classes.index("dog")]]), name
            assert name.endswith("bias") or not torch.equal(tensor[1], theirs[name][1]), name  # biases: all the prior
            of_classes += 1
    assert of_classes >= 2

    batch = batch_of([2, 2], (128, 128))
    optimizer = torch.optim.AdamW([p for p in detector.parameters() if p.requires_grad], lr=1e-4)
    detector.train()
    for _ in range(2):
        losses, _ = run(detector, batch)
        total = sum(losses.values())
        assert torch.isfinite(total)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()


def test_what_cannot_be_decided_by_the_source_is_told_in_three_lines(tmp_path):
    save_hub_folder("rt_detr_v2", tmp_path / "hub")
    (tmp_path / "run").mkdir()
    for flag, value, words in [("--model.ffn_dim", "24", "leave out --model.ffn_dim"),
                               ("--model.architecture", "detr", "--model.architecture rt_detr_v2")]:  # fmt: skip
        argv = ["--model.pretrained", str(tmp_path / "hub"), flag, value]
        options = parse_config(train_detr.Config, argv, train_detr.DEFAULT_CONFIG).model
        with pytest.raises(BadInput, match=words) as caught:
            start_detector(options, ["dog"], tmp_path / "run", resumed_from=None, say=print)
        assert len(str(caught.value).splitlines()) == 3
    assert parse_config(train_detr.Config, [], Path(train_detr.DEFAULT_CONFIG)).model.d_model == 96


@pytest.mark.parametrize(("shared", "words"), [(0, ""), (1, ": a"), (5, ": a, b, c, d, e"), (6, "")])
def test_the_table_names_a_few_classes_whose_rows_are_kept(shared, words):
    """Rows of background are kept whatever the classes."""
    classes, source_classes = list("abcdef"), [*"abcdef"[:shared], "x"]
    model, checkpoint = {"head": torch.zeros(7, 2)}, {"head": torch.arange(2.0 + 2 * len(source_classes)).view(-1, 2)}
    table = map_weights(
        model, checkpoint, class_tensors={"head": (1, 1, 0)}, classes=classes, source_classes=source_classes
    )
    assert table.rows == {"head": f"rows of {shared} of 6 classes{words}"}
    assert torch.equal(table.state["head"][: 1 + shared], checkpoint["head"][: 1 + shared])
    assert not table.state["head"][1 + shared :].any()
    with pytest.raises(ValueError, match="different layouts"):
        map_weights(model, checkpoint, class_tensors={"head": (1, 1, 0), "h*": (0, 1, 0)})


def test_the_summary_has_a_line_for_each_part_of_the_model():
    """At most three parts of a name, neither its own nor numbers, of the first four."""
    names = ["a.b.c.d.weight", "a.b.c.d.bias", "a.0.b.1.c.weight", "x.y.weight", "weight"]
    tensors = {name: torch.zeros(1) for name in names}
    lines = map_weights(tensors, tensors).summary().splitlines()
    counted = [(part, int(count)) for _, part, count, _ in map(str.split, lines)]
    assert counted == [("a.b.c", 2), ("a.b", 1), ("x.y", 1), ("weight", 1)]
