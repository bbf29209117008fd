"""Weights of the hub with the default command: a local folder with its config.json; only class rows are new."""

from pathlib import Path

import pytest
import torch
from small_detectors import HYBRIDS, SMALL, batch_of, hub_config, run, small
from transformers import AutoModelForObjectDetection

from scripts import train_detr
from toolkit.command_line import parse_config
from toolkit.errors import BadInput
from toolkit.models.start import start_detector
from toolkit.models.weights.class_names import COCO_80, coco_by_id
from toolkit.models.weights.mapping import map_weights


def save_hub_folder(architecture: str, folder: Path) -> list[str]:
    """A model as the hub has it, with all classes of COCO, which are returned."""
    classes = COCO_80 if architecture in HYBRIDS else coco_by_id(0)
    detector = small(architecture, **({"backbone": "resnet10t"} if "backbone" in SMALL[architecture] else {}))
    entries = hub_config(architecture) if architecture in HYBRIDS else detector.model.config.to_dict()
    entries |= {"id2label": dict(enumerate(classes)), "label2id": {name: i for i, name in enumerate(classes)}}
    if architecture == "yolos":
        entries |= {"image_size": [128, 128], "use_mid_position_embeddings": True}  # as the larger ones have them
    config = type(detector).config_class.from_dict(entries | {"auxiliary_loss": False})
    AutoModelForObjectDetection.from_config(config).save_pretrained(folder)
    return classes


@pytest.mark.parametrize("architecture", [name for name in SMALL if "+" not in name])
def test_a_hub_model_trains_with_the_default_command(architecture, tmp_path):
    save_hub_folder(architecture, tmp_path / "hub")
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
