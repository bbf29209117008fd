"""Published weights under our names: what the publishers' own programs predict, and every tensor there and back.

    python -m pytest tests/test_weights_published.py
"""

import importlib
import json

import numpy as np
import pytest
import torch
from published import FOLDER, numbers, pixels, published
from torchvision.models import detection

from toolkit.errors import BadInput
from toolkit.models import build_detector
from toolkit.models.weights import darknet, gluoncv
from toolkit.models.weights import torchvision as of_torchvision
from toolkit.models.weights.class_names import COCO_80, VG_150, coco_by_id
from toolkit.models.weights.files import PUBLISHERS, open_file, read
from toolkit.models.weights.mapping import map_weights
from toolkit.models.weights.names import resnet_name


def constants(points: list, reg_scale: float = 4.0) -> dict:
    """Numbers that the programs keep among their tensors: 1 / points of each level, and those of D-FINE's boxes."""
    return {"num_points_scale": torch.tensor([1 / each for each in points for _ in range(each)]),
            "up": torch.tensor([0.5]), "reg_scale": torch.tensor([reg_scale])}  # fmt: skip


# file of numbers, module, name of a file of weights, what its constants are of
TRANSFORMERS = [
    ("detr", "detr", "detr-r18.pth", []), ("detr_dc5", "detr", "detr-r50-dc5-f0fb7ef5.pth", []),
    ("cond", "conditional_detr", "ConditionalDETR_r18.pth", []), ("dab", "dab_detr", "checkpoint.pth", []),
    ("defo", "deformable_detr", "r50_deformable_detr.pth", []),
    ("defo_refine", "deformable_detr", "r50_deformable_detr_plus_iterative_bbox_refinement.pth", []),
    ("defo_two", "deformable_detr", "two_stage.pth", []),
    ("v1_r18", "rt_detr", "rtdetr_r18vd.pth", []), ("v1_r50", "rt_detr", "rtdetr_r50vd.pth", []),
    ("v2_r18", "rt_detr", "rtdetrv2_r18vd.pth", [4, 4, 4]), ("v2_r50_wide", "rt_detr", "rtdetrv2_r50vd.pth", [4, 4, 4]),
    ("v2_r18_dsp", "rt_detr", "rtdetrv2_r18vd_dsp.pth", [4, 4, 4]),
    ("dfine_n", "d_fine", "dfine_n_coco.pth", [6, 6]), ("dfine_s", "d_fine", "dfine_s_coco.pth", [3, 6, 3]),
    ("dfine_m", "d_fine", "dfine_m_coco.pth", [3, 6, 3]), ("dfine_l", "d_fine", "dfine_l_coco.pth", [3, 6, 3]),
    ("dfine_x", "d_fine", "dfine_x_coco.pth", [3, 6, 3]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "module", "file", "points"), TRANSFORMERS, ids=[case[0] for case in TRANSFORMERS])
def test_detectors_with_transformers_predict_what_the_publisher_s_program_does(name, module, file, points):
    publisher = importlib.import_module(f"toolkit.models.weights.{module}")
    state, expected = published(name, constants(points, 8.0 if name == "dfine_x" else 4.0))
    assert [each for each in PUBLISHERS if each.recognised(state)] == [publisher]
    found = publisher.described(state, file)
    queries = {"num_queries": expected["boxes"].shape[1]}
    config = {"source_config": found.options["source_config"] | queries} if "source_config" in found.options else queries
    torch.manual_seed(0)
    detector = build_detector(found.architecture, class_names=found.class_names, **(found.options | config)).eval()
    ours = publisher.ours_from(state)
    table = map_weights(detector.state_dict(), ours)
    assert not table.unused and all(new.endswith("n_points_scale") for new in table.new), "a constant, not in the first"
    detector.load_state_dict(ours, strict=False)

    if len(expected["logits"]) == 2:
        images, sizes = pixels(2, 3, 64, 96), torch.tensor([[64, 96], [48, 80]])
    else:
        images, sizes = pixels(1, 3, 96, 96), torch.tensor([[96, 96]])
    with torch.no_grad():
        outputs = detector(images, sizes)
    last = {key: outputs[key][-1] if outputs[key].ndim == 4 else outputs[key] for key in ("logits", "boxes")}
    for key, value in last.items():
        torch.testing.assert_close(value, torch.from_numpy(expected[key]), rtol=1e-4, atol=2e-5)

    back = publisher.theirs_from(ours)
    of_number = {key: value for key, value in state.items() if not key.startswith(("decoder.decoder.up",
                 "decoder.decoder.reg_scale"))}  # fmt: skip
    if name.startswith("v1"):  # back under the names of the second version
        of_number = {key.replace(".0.", ".conv.") if False else key: value for key, value in of_number.items()
                     if not key.startswith(("encoder.input_proj", "decoder.input_proj", "decoder.enc_output"))}  # fmt: skip
        back = {key: value for key, value in back.items() if key in of_number}
    assert back.keys() == of_number.keys() and all(back[key].equal(value) for key, value in of_number.items())


def test_the_class_names_are_those_of_torchvision_and_of_visual_genome():
    names = detection.FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"][1:]
    ours = coco_by_id(1)
    assert [(a, b) for a, b in zip(names, ours, strict=True) if a != b and a != "N/A"] == []
    assert len(COCO_80) == len(set(COCO_80)) == 80 and len(set(ours)) == 90
    document = json.loads((FOLDER.parent / "vg150_stats" / "vocab.json").read_text())
    assert [entry["name"] for entry in document["objects"]] == VG_150


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d"])
def test_a_resnet_is_known_by_its_tensors(name):
    import torchvision

    with torch.device("meta"):
        state = getattr(torchvision.models, name)().state_dict()
    assert resnet_name(state, "") == name


# ---- torchvision -----------------------------------------------------------------------------------------------------


def filled(model):
    """The state dict of a module with numbers by formula."""
    state = {name: numbers(name, value.shape) for name, value in model.state_dict().items()}
    state |= {name: value * 0.1 for name, value in state.items() if "bbox_pred" in name}
    return state | {name: value * 0.2 for name, value in state.items() if name.endswith("bn3.weight")}


@pytest.mark.parametrize(("name", "side", "eps"), [
    ("fasterrcnn_resnet50_fpn", 128, 0.0), ("fasterrcnn_resnet50_fpn_v2", 128, None), ("ssd300_vgg16", 300, None),
    ("ssdlite320_mobilenet_v3_large", 320, None),
])  # fmt: skip
def test_torchvision_s_detectors_equal_torchvision(name, side, eps):
    settings = {"min_size": side, "max_size": side} if name.startswith("fasterrcnn") else {}
    classes = 5
    if name == "fasterrcnn_resnet50_fpn":
        backbone = detection.backbone_utils.resnet_fpn_backbone(backbone_name="resnet50", weights=None)
        theirs = detection.FasterRCNN(backbone, classes, **settings)
        detection._utils.overwrite_eps(theirs, eps)
    else:
        theirs = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=classes, **settings)
    state = filled(theirs)
    theirs.load_state_dict(state)
    assert [each for each in PUBLISHERS if each.recognised(state)] == [of_torchvision]
    found = of_torchvision.described(state, f"{name}_coco-0123abcd.pth")
    assert found.architecture == name and len(found.class_names) == classes - 1
    detector = build_detector(name, class_names=found.class_names, **found.options).eval()
    ours = of_torchvision.ours_from(state)
    assert ours.keys() == detector.state_dict().keys() and of_torchvision.theirs_from(ours).keys() == state.keys()
    detector.load_state_dict(ours)

    images, sizes = pixels(2, 3, side, side), torch.tensor([[side, side]] * 2)
    with torch.no_grad():
        expected = theirs.eval()(list(images.float() / 255))
        boxes = detector.postprocess(detector(images, sizes), sizes, sizes)
    assert sum(len(one["boxes"]) for one in expected) > 5
    for one, other in zip(boxes, expected, strict=True):
        count = min(100, len(other["boxes"]))
        assert len(one["boxes"]) == count
        torch.testing.assert_close(one["scores"], other["scores"][:count], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one["boxes"], other["boxes"][:count], rtol=1e-4, atol=0.02)
        assert (one["labels"] + 1).equal(other["labels"][:count])


# ---- maskrcnn-benchmark ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mb_r50", "mb_x101"])
def test_detectors_of_maskrcnn_benchmark_find_its_boxes(name):
    from toolkit.models.weights import maskrcnn_benchmark

    state, expected = published(name)
    for key in state:
        if "cell_anchors" in key:
            state[key] = torch.from_numpy(expected[f"cell{key[-1]}"])
        elif "bbox_pred" in key:
            state[key] = state[key] * 0.1
        elif key.endswith("bn3.weight"):
            state[key] = state[key] * 0.2
        elif "stem.conv1" in key:
            state[key] = state[key] * 0.02
    assert [each for each in PUBLISHERS if each.recognised(state)] == [maskrcnn_benchmark]
    found = maskrcnn_benchmark.described(state, "model_final.pth")
    assert found.options["stride_in_1x1"] == (name == "mb_r50")
    detector = build_detector("faster_rcnn", class_names=found.class_names, **found.options).eval()
    again = build_detector(**detector.resolved_options(), class_names=found.class_names)
    assert str(again) == str(detector)
    ours = maskrcnn_benchmark.ours_from(state)
    assert ours.keys() == detector.state_dict().keys()
    detector.load_state_dict(ours)
    images, sizes = pixels(2, 3, 128, 192), torch.tensor([[128, 192], [100, 150]])
    with torch.no_grad():
        boxes = detector.postprocess(detector(images, sizes), sizes, sizes)
    for i, one in enumerate(boxes):
        assert len(one["boxes"]) == len(expected[f"boxes{i}"]) > 10
        theirs = torch.from_numpy(expected[f"boxes{i}"]) + torch.tensor([0, 0, 1, 1])  # they end at the last pixel
        order = torch.from_numpy(expected[f"scores{i}"]).sort(descending=True, stable=True).indices
        torch.testing.assert_close(one["scores"], torch.from_numpy(expected[f"scores{i}"])[order], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one["boxes"], theirs[order], rtol=1e-3, atol=0.02)
        assert (one["labels"] + 1).equal(torch.from_numpy(expected[f"labels{i}"])[order])
    back = maskrcnn_benchmark.theirs_from(ours)
    weights = {key: value for key, value in state.items() if "cell_anchors" not in key}
    assert back.keys() == weights.keys() and all(back[key].equal(value) for key, value in weights.items())
