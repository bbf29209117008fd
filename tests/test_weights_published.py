"""Published weights under our names: what the publishers' own programs predict, and every tensor taken."""

import json
import math
import re
import struct

import numpy as np
import pytest
import torch
from published import (
    FOLDER,
    as_darknet_writes_it,
    as_detr_saves_it,
    not_taken,
    numbers,
    pixels,
    published,
    published_rcnn,
    with_small_sizes,
)
from torchvision.models import detection

from toolkit import index
from toolkit.base.errors import BadInput
from toolkit.data.formats import open_dataset
from toolkit.data.table import Category
from toolkit.detectors.detr.sizes import DEIMV2_SIZES, ECDET_SIZES, LW_DETR_SIZES
from toolkit.detectors.detr.weights_detr import DETR
from toolkit.detectors.detr.weights_rf_detr import RF_DETR
from toolkit.detectors.detr.weights_rt_detr import D_FINE, RT_DETR
from toolkit.detectors.faster_rcnn import weights_maskrcnn_benchmark as maskrcnn_benchmark
from toolkit.detectors.scene_graphs import weights_scene_graph_benchmark as scene_graphs
from toolkit.detectors.scene_graphs.options import SceneGraphOptions
from toolkit.detectors.scene_graphs.start import start_scene_graph
from toolkit.detectors.yolov3 import weights_darknet as darknet
from toolkit.detectors.yolov3 import weights_gluoncv as gluoncv
from toolkit.models import build_detector
from toolkit.models.final import load_detector_folder
from toolkit.models.weights.difference import difference
from toolkit.models.weights.mapping import map_weights
from toolkit.models.weights.names import COCO_80, VG_150, coco_by_id, resnet_name
from toolkit.models.weights.weight_files import fitting, open_published_weights, publishers, read_state


def constants(points: list, reg_scale: float = 4.0) -> dict:
    """Numbers that the programs keep among their tensors: 1 / points of each level, and those of D-FINE's boxes."""
    return {"num_points_scale": torch.tensor([1 / each for each in points for _ in range(each)]),
            "up": torch.tensor([0.5]), "reg_scale": torch.tensor([reg_scale])}  # fmt: skip


# file of numbers, publisher, name of a file of weights, what its constants are of
TRANSFORMERS = [
    ("detr", "DETR", "detr-r18.pth", []), ("detr_dc5", "DETR", "detr-r50-dc5-f0fb7ef5.pth", []),
    ("cond", "CONDITIONAL_DETR", "ConditionalDETR_r18.pth", []), ("dab", "DAB_DETR", "checkpoint.pth", []),
    ("defo", "DEFORMABLE_DETR", "r50_deformable_detr.pth", []),
    ("defo_refine", "DEFORMABLE_DETR", "r50_deformable_detr_plus_iterative_bbox_refinement.pth", []),
    ("defo_two", "DEFORMABLE_DETR", "two_stage.pth", []),
    ("v1_r18", "RT_DETR", "rtdetr_r18vd.pth", []), ("v1_r50", "RT_DETR", "rtdetr_r50vd.pth", []),
    ("v2_r18", "RT_DETR", "rtdetrv2_r18vd.pth", [4, 4, 4]), ("v2_r50_wide", "RT_DETR", "rtdetrv2_r50vd.pth", [4, 4, 4]),
    ("v2_r18_dsp", "RT_DETR", "rtdetrv2_r18vd_dsp.pth", [4, 4, 4]),
    ("dfine_n", "D_FINE", "dfine_n_coco.pth", [6, 6]), ("dfine_s", "D_FINE", "dfine_s_coco.pth", [3, 6, 3]),
    ("dfine_m", "D_FINE", "dfine_m_coco.pth", [3, 6, 3]), ("dfine_l", "D_FINE", "dfine_l_coco.pth", [3, 6, 3]),
    ("dfine_x", "D_FINE", "dfine_x_coco.pth", [3, 6, 3]), ("rtv4_s", "D_FINE", "RTv4-S-hgnet.pth", [3, 6, 3]),
    ("deimv2_atto", "DEIMV2", "deimv2_hgnetv2_atto_coco.pth", [4, 2]),
    ("deimv2_n", "DEIMV2", "deimv2_hgnetv2_n_coco.pth", [6, 6]),
    ("deimv2_s", "DEIMV2", "deimv2_dinov3_s_coco.pth", [3, 6, 3]),
    ("deimv2_x", "DEIMV2", "deimv2_dinov3_x_coco.pth", [3, 6, 3]),
    ("ecdet_s", "ECDET", "ecdet_s.pth", [3, 6, 3]), ("ecdet_l", "ECDET", "ecdet_l.pth", [3, 6, 3]),
    ("rfdetr_nano", "RF_DETR", "rf-detr-nano.pth", []),
    ("lwdetr_tiny", "LW_DETR", "LWDETR_tiny_60e_coco.pth", []),
    ("lwdetr_large", "LW_DETR", "LWDETR_large_60e_coco.pth", []),
]  # fmt: skip
# Numbers that `decoder.up` has too, what follows from the size of the images; of DINOv3 for pretraining, masks and
# masked biases, constants; a flag of RF-DETR's poses.
LEFT = re.compile(
    r"^decoder\.(decoder\.up|decoder\.reg_scale|anchors|valid_mask)$|mask_token|bias_mask|dinov3\.blocks\.\d+\.attn\.qkv"
    r"\.bias$|periods|^_kp_active|^encoder\.feature_projector"
)


@pytest.mark.parametrize(("name", "publisher", "file", "points"), TRANSFORMERS, ids=[case[0] for case in TRANSFORMERS])
def test_detectors_with_transformers_predict_what_the_publisher_s_program_does(
    name, publisher, file, points, monkeypatch
):
    with_small_sizes(monkeypatch)
    (reference,) = [reference for reference in index.PUBLISHERS if reference.endswith(f":{publisher}")]
    publisher = index.load(reference)
    state, expected = published(name, constants(points, 8.0 if name == "dfine_x" else 4.0))
    assert [each for each in publishers() if each.recognised(state)] == [publisher]
    found, ours = fitting(publisher, state, file)
    queries = {"num_queries": expected["boxes"].shape[1]}
    of_source = found.options.get("source_config")
    config = queries if of_source is None else {"source_config": of_source | queries}
    torch.manual_seed(0)
    detector = build_detector(found.architecture, class_names=found.class_names, **(found.options | config)).eval()
    table = map_weights(detector.state_dict(), ours)
    empty = ("n_points_scale", "register_tokens")  # a constant, not in the first RT-DETR; none of them
    assert not table.unused and all(new.endswith(empty) for new in table.new)
    detector.load_state_dict(ours, strict=False)

    if len(expected["logits"]) == 2:
        images, sizes = pixels(2, 3, 64, 96), torch.tensor([[64, 96], [48, 80]])
    else:
        hw = (64, 128) if name.startswith("lwdetr") else (96, 96)
        images, sizes = pixels(1, 3, *hw), torch.tensor([hw])
    with torch.no_grad():
        outputs = detector(images, sizes)
    last = {key: outputs[key][-1] if outputs[key].ndim == 4 else outputs[key] for key in ("logits", "boxes")}
    for key, value in last.items():
        torch.testing.assert_close(value, torch.from_numpy(expected[key]), rtol=1e-4, atol=2e-5)

    assert [key for key in not_taken(state, ours) if not LEFT.search(key)] == []


def test_the_layer_of_rf_detr_base_behind_its_deepest_map_is_left_out_and_named():
    state, _ = published("rfdetr_nano")
    vit = "backbone.0.encoder.encoder"
    width = len(state[f"{vit}.embeddings.patch_embeddings.projection.weight"])
    state[f"{vit}.embeddings.patch_embeddings.projection.weight"] = torch.zeros(width, 3, 14, 14)  # of base alone
    found, ours = fitting(RF_DETR, state, "rf-detr-base.pth")
    assert "1 of the 12 layers" in found.notes[0]
    detector = build_detector(found.architecture, class_names=found.class_names, **found.options)
    table = map_weights(detector.state_dict(), ours)
    assert not table.new and len(table.unused) == 18 and all(".layer.11." in name for name in table.unused)


@pytest.mark.parametrize("name", ["deimv2", "ecdet", "lw_detr"])
def test_a_file_fits_one_published_size_alone(name):
    sizes = {"deimv2": DEIMV2_SIZES, "ecdet": ECDET_SIZES, "lw_detr": LW_DETR_SIZES}[name]
    states = {}
    for size in sizes:
        with torch.device("meta"):
            states[size] = build_detector(name, class_names=["a"], size=size).state_dict()
    for size, state in states.items():
        assert [other for other in sizes if not difference(states[other], state)] == [size]


def test_a_file_of_another_than_a_published_size_is_refused_with_all_that_differs(tmp_path):
    state, _ = published("deimv2_s", constants([3, 6, 3]))
    torch.save(state, tmp_path / "narrow.pth")
    what = "narrow.pth: .* but it is none of the published sizes of deimv2; the most similar is size s"
    differs = r"by our names: 88 missing: .*, \.\.\.; 600 of another shape: .*, \.\.\."
    with pytest.raises(BadInput, match=rf"{what} \({differs}\); the file was cut"):
        open_published_weights(tmp_path / "narrow.pth")


def test_a_d_fine_with_silu_stays_so(tmp_path):
    """DEIM's and RT-DETRv4's, in `final/`; the tensors of DEIM's are D-FINE's, so that its name has to tell."""
    state, _ = published("rtv4_s", constants([3, 6, 3]))
    found, _ = fitting(D_FINE, state, "rtv4_s.pth")
    detector = build_detector("d_fine", class_names=found.class_names, **found.options).eval()
    detector.save_final(tmp_path / "final", [Category(i, name) for i, name in enumerate(found.class_names)])
    again, _, _ = load_detector_folder(tmp_path / "final")
    sizes = torch.tensor([[160, 160]])
    with torch.no_grad():
        outputs = [each(pixels(1, 3, 160, 160), sizes) for each in (detector, again)]
    assert outputs[0]["logits"].equal(outputs[1]["logits"]) and outputs[0]["boxes"].equal(outputs[1]["boxes"])

    state, _ = published("dfine_s", constants([3, 6, 3]))
    of_deim, _ = fitting(D_FINE, state, "deim_dfine_hgnetv2_s_coco_120e.pth")
    of_d_fine, _ = fitting(D_FINE, state, "dfine_s_coco.pth")
    assert of_deim.options["source_config"]["head_activation"] == "silu" and "has SiLU" in of_deim.notes[0]
    assert "head_activation" not in of_d_fine.options["source_config"] and not of_d_fine.notes
    state, _ = published("v2_r18", constants([4, 4, 4]))
    with pytest.raises(BadInput, match="rt_detr_v2 has ReLU"):
        fitting(RT_DETR, state, "deim_rtdetrv2_r18vd_coco_120e.pth")


def test_a_file_of_detr_with_norms_before_gives_the_encoder_s_last_norm_too():
    sizes = {"backbone": "resnet18", "d_model": 32, "heads": 8, "ffn_dim": 16, "encoder_layers": 1, "decoder_layers": 1}
    detector = build_detector("detr", class_names=["a"], pre_norm=True, **sizes)
    state = {name: numbers(name, tensor.shape) for name, tensor in detector.state_dict().items()}
    theirs = as_detr_saves_it(state)
    found, ours = fitting(DETR, theirs, "a.pth")
    assert "transformer.encoder.norm.weight" in theirs and found.options["pre_norm"]
    table = map_weights(state, ours)
    assert not table.unused and all(new.endswith("num_batches_tracked") for new in table.new)
    assert all(tensor.equal(state[name]) for name, tensor in table.state.items())


def test_the_class_names_are_those_of_torchvision_and_of_visual_genome():
    names = detection.FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"][1:]
    ours = coco_by_id(1)
    assert [(a, b) for a, b in zip(names, ours, strict=True) if a != b and a != "N/A"] == []
    assert len(COCO_80) == len(set(COCO_80)) == 80 and len(set(ours)) == 90
    document = json.loads((FOLDER.parent / "vg150_stats" / "vocab.json").read_text())
    assert [entry["name"] for entry in document["objects"]] == VG_150


RESNETS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnext50_32x4d", "resnext101_32x8d"]


@pytest.mark.parametrize("name", RESNETS)
def test_a_resnet_is_known_by_its_tensors(name):
    import torchvision

    with torch.device("meta"):
        state = getattr(torchvision.models, name)().state_dict()
    assert resnet_name(state, "") == name


def filled(model):
    """The state dict of a module with numbers by formula."""
    state = {name: numbers(name, value.shape) for name, value in model.state_dict().items()}
    state |= {name: value * 0.1 for name, value in state.items() if "bbox_pred" in name}
    return state | {name: value * 0.2 for name, value in state.items() if name.endswith("bn3.weight")}


@pytest.mark.parametrize(("name", "side", "eps"), [
    ("fasterrcnn_resnet50_fpn", 128, 0.0),
    ("fasterrcnn_resnet50_fpn_v2", 64, None),
    pytest.param("ssd300_vgg16", 300, None, marks=pytest.mark.slow),
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
    (publisher,) = [each for each in publishers() if each.recognised(state)]
    found, ours = fitting(publisher, state, f"{name}_coco-0123abcd.pth")
    assert publisher.program == "torchvision" and found.architecture == name and len(found.class_names) == classes - 1
    detector = build_detector(name, class_names=found.class_names, **found.options).eval()
    assert ours.keys() == detector.state_dict().keys() and not not_taken(state, ours)
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


@pytest.mark.parametrize("name", ["mb_r50", "mb_x101"])
def test_detectors_of_maskrcnn_benchmark_find_its_boxes(name):
    benchmark = maskrcnn_benchmark.MASKRCNN_BENCHMARK
    state, expected = published_rcnn(name)
    assert [each for each in publishers() if each.recognised(state)] == [benchmark]
    found, ours = fitting(benchmark, state, "model_final.pth")
    assert found.options["stride_in_1x1"] == (name == "mb_r50")
    detector = build_detector("faster_rcnn", class_names=found.class_names, **found.options).eval()
    again = build_detector(**detector.resolved_options(), class_names=found.class_names)
    assert str(again) == str(detector)
    assert ours.keys() == detector.state_dict().keys()
    detector.load_state_dict(ours)
    images, sizes = pixels(2, 3, 128, 192), torch.tensor([[128, 192], [100, 150]])
    with torch.no_grad():
        boxes = detector.postprocess(detector(images, sizes), sizes, sizes)
    for i, one in enumerate(boxes):
        assert len(one["boxes"]) == len(expected[f"boxes{i}"]) > 10
        theirs = torch.from_numpy(expected[f"boxes{i}"]) + torch.tensor([0, 0, 1, 1])  # they end at the last pixel
        scores, labels = (torch.from_numpy(expected[f"{what}{i}"]) for what in ("scores", "labels"))
        far = (one["boxes"][:, None] - theirs).abs().amax(-1) + 1e3 * (one["scores"][:, None] - scores).abs()
        far += 1e6 * (one["labels"][:, None] + 1 != labels)  # scores that are equal but for rounding come in any order
        for missed, those in ((far.amin(1) > 0.1, one["boxes"]), (far.amin(0) > 0.1, theirs)):
            # theirs keeps a pixel of a box that lies outside, which may also suppress another one or end a list of 100
            assert int(missed.sum()) <= 2 and len(those[~missed]) >= 0.98 * len(those)
    left = not_taken(state | {maskrcnn_benchmark.STEM: state[maskrcnn_benchmark.STEM].flip(1)}, ours)
    assert all("cell_anchors" in name for name in left), "anchors are no weights"


@pytest.mark.slow
def test_a_file_of_maskrcnn_benchmark_is_the_detector_of_a_scene_graph(tmp_path):
    """What the file decides cannot be given; what it does not know, and what changes nothing that was learned, can."""
    state, _ = published("mb_r50")
    file = tmp_path / "model_final.pth"
    torch.save({"model": state}, file)
    names = [f"class {i}" for i in range(1, len(state["roi_heads.box.predictor.cls_score.weight"]))]
    file.with_suffix(".names").write_text("\n".join(names))
    document = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 90, "height": 60}],
        "categories": [{"id": i, "name": name} for i, name in enumerate(names)],
        "annotations": [{"id": i, "image_id": 1, "category_id": 0, "bbox": [5, 5, 20 + i, 30]} for i in (1, 2)],
        "rel_categories": [{"id": 1, "name": "on"}],
        "rel_annotations": [{"image_id": 1, "subject_id": 1, "object_id": 2, "predicate_id": 1}],
    }
    (tmp_path / "graphs.json").write_text(json.dumps(document))
    table = open_dataset(tmp_path / "graphs.json", image_dir=tmp_path, check_images=False, cache_dir=tmp_path / "cache")
    own = {"detections_per_image": 7, "box_batch_size_per_image": 33}
    settings = {"detector": str(file), "mode": "sgdet", "hidden_dim": 8, "embed_dim": 4, "union_levels": "all"}
    options = SceneGraphOptions(**settings, detector_options=own)
    model = start_scene_graph(options, table, tmp_path, checkpoint=None, say=print)
    heads = model.detector.roi_heads
    assert heads.detections_per_img == 7 and heads.fg_bg_sampler.batch_size_per_image == 33
    stem = state["backbone.body.stem.conv1.weight"].flip(1)
    assert torch.equal(model.detector.backbone.body.conv1.weight, stem)
    assert torch.equal(model.union.head.fc6.weight, state["roi_heads.box.feature_extractor.fc6.weight"])
    assert model.union.pool.reduce.weight.shape[1] == 4 * model.detector.backbone.out_channels
    wrong = SceneGraphOptions(**settings, detector_options={"norm_eps": 1e-5})
    with pytest.raises(BadInput, match="another norm_eps: leave them out"):
        start_scene_graph(wrong, table, tmp_path, checkpoint=None, say=print)


def plain_yolov3(numbers: np.ndarray, pixels: torch.Tensor, classes: int) -> list[torch.Tensor]:
    """The network of yolov3.cfg, walked through as the numbers come: three maps, strides 32, 16 and 8."""
    place = 0

    def take(*shape):
        nonlocal place
        count = int(np.prod(shape))
        place += count
        return torch.from_numpy(numbers[place - count : place].copy()).reshape(shape)

    def conv(x, out, side, stride=1, norm=True):
        parts = [take(out) for _ in range(4 if norm else 1)]
        x = torch.nn.functional.conv2d(x, take(out, x.shape[1], side, side), stride=stride, padding=side // 2)
        if not norm:
            return x + parts[0][:, None, None]
        bias, weight, mean, variance = (part[:, None, None] for part in parts)
        x = (x - mean) / (variance + 1e-5).sqrt() * weight + bias
        return torch.where(x > 0, x, 0.1 * x)

    x, kept, maps = conv(pixels, 32, 3), [], []
    for blocks, width in ((1, 64), (2, 128), (8, 256), (8, 512), (4, 1024)):
        x = conv(x, width, 3, 2)
        for _ in range(blocks):
            x = x + conv(conv(x, width // 2, 1), width, 3)
        kept.append(x)
    for level, width in enumerate((512, 256, 128)):
        if level:
            x = conv(x, width, 1).repeat_interleave(2, 2).repeat_interleave(2, 3)
            x = torch.cat([x, kept[-1 - level]], dim=1)
        for i in range(5):
            x = conv(x, width if i % 2 == 0 else 2 * width, 1 if i % 2 == 0 else 3)
        maps.append(conv(conv(x, 2 * width, 3), 3 * (5 + classes), 1, norm=False))
    assert place == len(numbers)
    return maps


@pytest.fixture(scope="module")
def yolo_state():
    detector = build_detector("yolov3", class_names=["a", "b"])
    state = {name: numbers(name, value.shape) for name, value in detector.state_dict().items()}
    return {n: v * 0.3 if n.endswith("conv2.bn.weight") else v for n, v in state.items()}


def test_darknet_weights_give_the_maps_of_a_plain_reimplementation(yolo_state, tmp_path):
    raw = as_darknet_writes_it(yolo_state)
    for name, header in (("yolov3.weights", struct.pack("<iiiq", 0, 2, 0, 32013312)), ("old.weights",
                         struct.pack("<iiii", 0, 1, 0, 7))):  # fmt: skip
        (tmp_path / name).write_bytes(header + raw.tobytes())
        found, ours = open_published_weights(tmp_path / name)
        assert found.architecture == "yolov3" and len(found.class_names) == 2
        assert ours.keys() == yolo_state.keys() and all(ours[key].equal(yolo_state[key]) for key in ours)
    detector = build_detector("yolov3", class_names=["a", "b"], **found.options).eval()
    detector.load_state_dict(ours)
    image, sizes = pixels(1, 3, 64, 64), torch.tensor([[64, 64]])
    maps = plain_yolov3(raw, image.float() / 255, 2)
    with torch.no_grad():
        outputs = detector(image, sizes)
    for stride, value in zip((32, 16, 8), maps, strict=True):
        scale = float(value.abs().max())
        torch.testing.assert_close(outputs[f"raw_stride{stride}"] / scale, value / scale, rtol=1e-4, atol=1e-5)


def test_the_sizes_of_the_published_darknet_files_are_known():
    assert darknet.classes_of((248007048 - 20) // 4) == 80 and darknet.classes_of((162482580 - 20) // 4) == 0
    assert darknet.classes_of(1000) is None


def params_file(state: dict, version: int) -> bytes:
    """MXNet's list of arrays, written as its source says."""
    parts = [struct.pack("<QQQ", 0x112, 0, len(state))]
    for value in state.values():
        shape = value.shape
        if version == 2:
            parts.append(struct.pack("<IiI", 0xF993FAC9, 0, len(shape)) + struct.pack(f"<{len(shape)}q", *shape))
        elif version == 1:
            parts.append(struct.pack("<II", 0xF993FAC8, len(shape)) + struct.pack(f"<{len(shape)}q", *shape))
        else:
            parts.append(struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}I", *shape))
        parts += [struct.pack("<iii", 1, 0, 0), value.numpy().tobytes()]
    parts.append(struct.pack("<Q", len(state)))
    parts += [struct.pack("<Q", len(name)) + name.encode() for name in state]
    return b"".join(parts)


@pytest.mark.parametrize("version", [0, 1, 2])
def test_gluoncv_s_params_are_read_without_mxnet(yolo_state, tmp_path, version):
    theirs = {theirs: yolo_state[ours] for ours, theirs in gluoncv.tensor_names(2)}
    names = json.loads((FOLDER.parents[1] / "golden" / "data" / "yolov3_network.json").read_text())["parameter_list"]
    assert set(theirs) == {name for _, name, _ in names}
    path = tmp_path / "yolo3_darknet53_custom.params"
    path.write_bytes(params_file(theirs, version))
    found, ours = open_published_weights(path)
    assert found.architecture == "yolov3" and found.options["mean"] == [0.485, 0.456, 0.406]
    assert ours.keys() == yolo_state.keys() and all(ours[key].equal(yolo_state[key]) for key in ours)
    path.write_bytes(params_file(theirs, version)[:1000])
    with pytest.raises(BadInput, match="not a readable list of MXNet arrays"):
        open_published_weights(path)


def test_averaged_weights_are_preferred_and_objects_refused(tmp_path):
    state, _ = published("v2_r18", constants([4, 4, 4]))
    other = {name: value + 1 for name, value in state.items()}
    torch.save({"model": other, "ema": {"module": state, "updates": 3}}, tmp_path / "a.pth")
    torch.save({"model": {f"module.{name}": value for name, value in state.items()}}, tmp_path / "b.pth")
    for name in ("a.pth", "b.pth"):
        found = read_state(tmp_path / name)
        assert found.keys() == state.keys() and all(found[key].equal(value) for key, value in state.items())
    (tmp_path / "b.names").write_text("\n".join(f"kind {i}" for i in range(80)))
    assert open_published_weights(tmp_path / "b.pth")[0].class_names[3] == "kind 3"
    (tmp_path / "b.names").write_text("one")
    with pytest.raises(BadInput, match="1 names, but b.pth has 80 classes"):
        open_published_weights(tmp_path / "b.pth")
    torch.save({"model": state, "args": Category(1, "a")}, tmp_path / "c.pth")
    with pytest.raises(BadInput, match="objects beside tensors"):
        read_state(tmp_path / "c.pth")
    torch.save({"layer.weight": torch.zeros(2)}, tmp_path / "d.pth")
    with pytest.raises(BadInput, match="names of no publisher"):
        open_published_weights(tmp_path / "d.pth")


def names_alone() -> list[tuple]:
    """Each publisher, with the names of tensors by which its files are recognised."""
    relation_head = f"{scene_graphs.PREDICTOR}rel_compress.weight"
    marks = {scene_graphs.SCENE_GRAPH_BENCHMARK: (scene_graphs.STEM, scene_graphs.CLASSIFIER, relation_head)}
    return [(each, marks.get(each, each.marks)) for each in publishers() if each is not darknet.DARKNET]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (1, 1), (1, 1, 1, 1)], ids=str)
def test_a_file_with_only_the_names_of_a_publisher_is_one_sentence(shape, tmp_path):
    cases = names_alone()
    of_names = "(.* the names of .*, but it (lacks|has) |.* relation head|.* not on a ResNet)"
    assert len(cases) == len(index.PUBLISHERS) - 1, "all but Darknet's, which has no names"
    for publisher, names in cases:
        torch.save({"model": {name: torch.zeros(shape) for name in names}}, tmp_path / "cut.pth")
        with pytest.raises(BadInput, match=f"cut.pth: {of_names}") as refused:
            open_published_weights(tmp_path / "cut.pth")
        assert "\n" not in str(refused.value), publisher


@pytest.mark.parametrize(
    ("name", "points", "tensor"),
    [
        ("detr", [], "transformer.encoder.layers.0.linear1.weight"),
        ("detr", [], "transformer.decoder.layers.0.multihead_attn.in_proj_weight"),
        ("defo", [], "transformer.level_embed"),
        ("v2_r18", [4, 4, 4], "encoder.input_proj.1.conv.weight"),
        ("dfine_n", [6, 6], "decoder.reg_scale"),
        ("deimv2_atto", [4, 2], "decoder.decoder.layers.0.cross_attn.num_points_scale"),
        ("rfdetr_nano", [], "transformer.decoder.layers.0.cross_attn.attention_weights.bias"),
    ],
)
def test_a_tensor_of_another_shape_is_named(name, points, tensor, tmp_path):
    state, _ = published(name, constants(points))
    whole = state[tensor]
    changed = [torch.zeros(()), whole[:0], torch.stack([whole, whole]), torch.full((2,), math.nan)]
    for other in changed:
        torch.save(state | {tensor: other}, tmp_path / "changed.pth")
        with pytest.raises(BadInput, match=f"but it has {re.escape(tensor)}"):
            open_published_weights(tmp_path / "changed.pth")


def test_a_number_of_layers_beyond_the_tensors_builds_nothing(tmp_path):
    state, _ = published("detr")
    state["transformer.decoder.layers.1000000000.norm1.weight"] = torch.zeros(1)
    torch.save(state, tmp_path / "deep.pth")
    with pytest.raises(BadInput, match="has tensors below transformer.decoder.layers.1000000000"):
        open_published_weights(tmp_path / "deep.pth")


def test_names_of_classes_in_another_encoding_are_one_sentence(tmp_path):
    state, _ = published("detr")
    torch.save(state, tmp_path / "a.pth")
    (tmp_path / "a.names").write_bytes("caf\xe9\n".encode("latin-1"))
    with pytest.raises(BadInput, match="a.names: not a text in UTF-8"):
        open_published_weights(tmp_path / "a.pth")
