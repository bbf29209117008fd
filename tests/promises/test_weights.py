"""Published weights give what their publishers' own programs predict, and a run starts from weights of any source.

`tests/assets/weights/*.npz` were computed with the publishers' programs, see `published.py`: Scene-Graph-Benchmark on a
CPU with torchvision's operators; Intellindust-AI-Lab/EdgeCrafter (706d037) with three layers of 64 channels in the
ECViT; Atten4Vis/LW-DETR (d5e6e6c), whose deformable attention was its own function in PyTorch.
"""

import json
import math
import re
import shutil
import struct
from argparse import Namespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from launching import checkpoint_tensors, kill
from PIL import Image
from places import TESTS
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
from safetensors.torch import save_file
from torch.testing import assert_close
from torchvision.models import detection

from toolkit.base.errors import BadInput
from toolkit.data.formats import open_dataset
from toolkit.data.table import Category
from toolkit.detectors.detr.sizes import DEIMV2_SIZES, ECDET_SIZES, LW_DETR_SIZES
from toolkit.detectors.detr.weights_deimv2 import DEIMV2
from toolkit.detectors.detr.weights_deimv2 import vit_names as deimv2_names
from toolkit.detectors.detr.weights_detr import CONDITIONAL_DETR, DAB_DETR, DEFORMABLE_DETR, DETR
from toolkit.detectors.detr.weights_ecdet import ECDET
from toolkit.detectors.detr.weights_ecdet import ecvit_names as ecdet_names
from toolkit.detectors.detr.weights_lw_detr import LW_DETR
from toolkit.detectors.detr.weights_rf_detr import RF_DETR
from toolkit.detectors.detr.weights_rt_detr import D_FINE, RT_DETR
from toolkit.detectors.faster_rcnn import weights_torchvision as faster_rcnn
from toolkit.detectors.faster_rcnn.weights_maskrcnn_benchmark import MASKRCNN_BENCHMARK, STEM
from toolkit.detectors.scene_graphs import weights_scene_graph_benchmark as scene_graphs
from toolkit.detectors.scene_graphs.options import SceneGraphOptions
from toolkit.detectors.scene_graphs.start import start_scene_graph
from toolkit.detectors.ssd import weights_torchvision as ssd
from toolkit.detectors.yolov3 import weights_darknet as darknet
from toolkit.detectors.yolov3 import weights_gluoncv as gluoncv
from toolkit.models import build_detector
from toolkit.models.final import load_detector_folder
from toolkit.models.weights.difference import difference
from toolkit.models.weights.mapping import map_weights
from toolkit.models.weights.names import Publisher
from toolkit.models.weights.pretrained import load_pretrained, open_pretrained
from toolkit.models.weights.weight_files import find_description, open_published_weights, publishers, read_state
from toolkit.tools.predict.open import open_own_detector, open_predictor


class File(NamedTuple):
    """Numbers of a publisher's program: who publishes it, the name of such a file, points of its decoder by level."""

    publisher: Publisher
    name: str
    points: tuple[int, ...] = ()
    reg_scale: float = 4.0


FILES = {
    "detr": File(DETR, "detr-r18.pth"),
    "detr_dc5": File(DETR, "detr-r50-dc5-f0fb7ef5.pth"),
    "cond": File(CONDITIONAL_DETR, "ConditionalDETR_r18.pth"),
    "dab": File(DAB_DETR, "checkpoint.pth"),
    "defo": File(DEFORMABLE_DETR, "r50_deformable_detr.pth"),
    "defo_refine": File(DEFORMABLE_DETR, "r50_deformable_detr_plus_iterative_bbox_refinement.pth"),
    "defo_two": File(DEFORMABLE_DETR, "two_stage.pth"),
    "v1_r18": File(RT_DETR, "rtdetr_r18vd.pth"),
    "v1_r50": File(RT_DETR, "rtdetr_r50vd.pth"),
    "v2_r18": File(RT_DETR, "rtdetrv2_r18vd.pth", (4, 4, 4)),
    "v2_r50_wide": File(RT_DETR, "rtdetrv2_r50vd.pth", (4, 4, 4)),
    "v2_r18_dsp": File(RT_DETR, "rtdetrv2_r18vd_dsp.pth", (4, 4, 4)),
    "dfine_n": File(D_FINE, "dfine_n_coco.pth", (6, 6)),
    "dfine_s": File(D_FINE, "dfine_s_coco.pth", (3, 6, 3)),
    "dfine_m": File(D_FINE, "dfine_m_coco.pth", (3, 6, 3)),
    "dfine_l": File(D_FINE, "dfine_l_coco.pth", (3, 6, 3)),
    "dfine_x": File(D_FINE, "dfine_x_coco.pth", (3, 6, 3), 8.0),
    "rtv4_s": File(D_FINE, "RTv4-S-hgnet.pth", (3, 6, 3)),
    "deimv2_atto": File(DEIMV2, "deimv2_hgnetv2_atto_coco.pth", (4, 2)),
    "deimv2_n": File(DEIMV2, "deimv2_hgnetv2_n_coco.pth", (6, 6)),
    "deimv2_s": File(DEIMV2, "deimv2_dinov3_s_coco.pth", (3, 6, 3)),
    "deimv2_x": File(DEIMV2, "deimv2_dinov3_x_coco.pth", (3, 6, 3)),
    "ecdet_s": File(ECDET, "ecdet_s.pth", (3, 6, 3)),
    "ecdet_l": File(ECDET, "ecdet_l.pth", (3, 6, 3)),
    "rfdetr_nano": File(RF_DETR, "rf-detr-nano.pth"),
    "lwdetr_tiny": File(LW_DETR, "LWDETR_tiny_60e_coco.pth"),
    "lwdetr_large": File(LW_DETR, "LWDETR_large_60e_coco.pth"),
}
# Numbers that `decoder.up` has too, what follows from the size of the images; of DINOv3 for pretraining, masks and
# masked biases, constants; a flag of RF-DETR's poses.
LEFT = re.compile(
    r"^decoder\.(decoder\.up|decoder\.reg_scale|anchors|valid_mask)$|mask_token|bias_mask|dinov3\.blocks\.\d+\.attn\.qkv"
    r"\.bias$|periods|^_kp_active|^encoder\.feature_projector"
)
CLASSES = ["cup", "table", "chair", "lamp"]
PREDICATES = ["on", "under", "near"]
BOXES = torch.tensor(
    [
        [10.0, 12, 70, 90],
        [40, 20, 120, 100],
        [5, 60, 60, 120],
        [90, 10, 180, 110],
        [100, 50, 150, 90],
    ]
)


def program(name: str) -> tuple[dict, dict]:
    """Tensors of a publisher's program, and what it predicts. Among the tensors are constants: 1 / points of each
    level, and those of D-FINE's boxes."""
    points = FILES[name].points
    scales = [1 / count for count in points for _ in range(count)]
    constants = {"num_points_scale": scales, "up": [0.5], "reg_scale": [FILES[name].reg_scale]}
    return published(name, {key: torch.tensor(value) for key, value in constants.items()})


def recognising(state: dict) -> list:
    return [publisher for publisher in publishers() if publisher.recognised(state)]


def detector_of(found, **entries):
    """The detector of a description, with other entries of its config, or settings if it has none."""
    torch.manual_seed(0)
    source = found.options.get("source_config")
    others = entries if source is None else {"source_config": source | entries}
    return build_detector(found.architecture, class_names=found.class_names, **(found.options | others))


def saved(state: dict, path) -> str:
    torch.save(state, path)
    return str(path)


# ---- what the programs predict ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_detectors_with_transformers_predict_what_the_program_does(name, monkeypatch):
    with_small_sizes(monkeypatch)
    publisher = FILES[name].publisher
    state, expected = program(name)
    assert recognising(state) == [publisher]
    found, ours = find_description(publisher, state, FILES[name].name)
    detector = detector_of(found, num_queries=expected["boxes"].shape[1]).eval()
    table = map_weights(detector.state_dict(), ours)
    empty = ("n_points_scale", "register_tokens")  # a constant, not in the first RT-DETR; none of them
    assert not table.unused
    assert all(new.endswith(empty) for new in table.new)
    detector.load_state_dict(ours, strict=False)

    images = pixels(1, 3, 64, 128) if name.startswith("lwdetr") else pixels(1, 3, 96, 96)
    sizes = torch.tensor([images.shape[-2:]])
    if len(expected["logits"]) == 2:
        images = pixels(2, 3, 64, 96)
        sizes = torch.tensor([[64, 96], [48, 80]])
    with torch.no_grad():
        outputs = detector(images, sizes)
    for key in ("logits", "boxes"):
        value = outputs[key][-1] if outputs[key].ndim == 4 else outputs[key]
        assert_close(value, torch.from_numpy(expected[key]), rtol=1e-4, atol=2e-5)
    assert [key for key in not_taken(state, ours) if not LEFT.search(key)] == []


# Objects whose losses the programs computed, in training, unweighted, without those of denoising queries.
TARGETS = [
    (
        [
            [
                0.3,
                0.4,
                0.4,
                0.5,
            ],
            [
                0.6,
                0.6,
                0.2,
                0.3,
            ],
        ],
        [3, 70],
    ),
    (
        [
            [
                0.5,
                0.5,
                0.8,
                0.6,
            ]
        ],
        [0],
    ),
]


def targets_in(hw: tuple[int, int]) -> list[dict]:
    """cxcywh in fractions of the image as xyxy in pixels."""
    height, width = hw
    targets = []
    for boxes, labels in TARGETS:
        centre, size = (torch.tensor(boxes) * torch.tensor([width, height] * 2)).split(2, dim=1)
        corners = torch.cat([centre - size / 2, centre + size / 2], 1)
        targets.append({"boxes": corners, "labels": torch.tensor(labels), "size": torch.tensor(hw)})
    return targets


@pytest.mark.parametrize(
    ("name", "hw", "accuracy"),
    [
        ("ecdet_s", (96, 96), {"rel": 1e-4, "abs": 1e-6}),  # loss_ddf is a small difference
        ("ecdet_l", (96, 96), {"rel": 1e-4, "abs": 1e-6}),
        ("lwdetr_tiny", (64, 128), {"rel": 1e-5}),
        ("lwdetr_large", (64, 128), {"rel": 1e-5}),
    ],
)
def test_losses_are_those_of_the_program(name, hw, accuracy, monkeypatch):
    with_small_sizes(monkeypatch)
    state, expected = program(name)
    for key in state:
        if "bbox_head" in key and ".layers.2." in key:  # ECDet's were computed with a tenth of them
            state[key] = state[key] * 0.1
    found, ours = find_description(FILES[name].publisher, state, FILES[name].name)
    detector = detector_of(found, num_queries=6).train()
    detector.load_state_dict(ours, strict=False)
    targets = targets_in(hw)
    outputs = detector(pixels(2, 3, *hw), torch.tensor([hw] * 2), targets)
    losses, _ = detector.criterion(outputs, targets, detector.denominators(targets))
    theirs = json.loads(expected["losses"].tobytes())
    theirs = {key.replace("enc_0", "enc"): value for key, value in theirs.items()}
    assert theirs.keys() == {key for key in losses if "_dn_" not in key}
    for key, value in theirs.items():
        assert losses[key].item() == pytest.approx(value, **accuracy), key


def filled(model) -> dict:
    """The state dict of a module with numbers by formula, which keep features and boxes small."""
    state = {name: numbers(name, value.shape) for name, value in model.state_dict().items()}
    for name in state:
        scale = 0.1 if "bbox_pred" in name else 0.2 if name.endswith("bn3.weight") else 1.0
        state[name] = state[name] * scale if scale != 1 else state[name]
    return state


@pytest.mark.parametrize(
    ("name", "publisher", "side"),
    [
        ("fasterrcnn_resnet50_fpn", faster_rcnn.FASTER_RCNN, 128),
        ("fasterrcnn_resnet50_fpn_v2", faster_rcnn.FASTER_RCNN_V2, 64),
        pytest.param("ssd300_vgg16", ssd.SSD300, 300, marks=pytest.mark.slow),
        ("ssdlite320_mobilenet_v3_large", ssd.SSDLITE320, 320),
    ],
)
def test_torchvision_s_detectors_equal_torchvision(name, publisher, side):
    settings = {"min_size": side, "max_size": side} if name.startswith("fasterrcnn") else {}
    classes = 5
    if name == "fasterrcnn_resnet50_fpn":
        backbone = detection.backbone_utils.resnet_fpn_backbone(backbone_name="resnet50", weights=None)
        theirs = detection.FasterRCNN(backbone, classes, **settings)
        detection._utils.overwrite_eps(theirs, 0.0)
    else:
        theirs = getattr(detection, name)(
            weights=None,
            weights_backbone=None,
            num_classes=classes,
            **settings,
        )
    state = filled(theirs)
    theirs.load_state_dict(state)
    assert recognising(state) == [publisher]
    found, ours = find_description(publisher, state, f"{name}_coco-0123abcd.pth")
    assert found.architecture == name
    assert len(found.class_names) == classes - 1
    detector = detector_of(found).eval()
    assert ours.keys() == detector.state_dict().keys()
    assert not not_taken(state, ours)
    detector.load_state_dict(ours)

    images = pixels(2, 3, side, side)
    sizes = torch.tensor([[side, side]] * 2)
    with torch.no_grad():
        expected = theirs.eval()(list(images.float() / 255))
        boxes = detector.postprocess(detector(images, sizes), sizes, sizes)
    assert sum(len(one["boxes"]) for one in expected) > 5
    for one, other in zip(boxes, expected, strict=True):
        count = min(100, len(other["boxes"]))
        assert len(one["boxes"]) == count
        assert_close(one["scores"], other["scores"][:count], rtol=1e-4, atol=1e-5)
        assert_close(one["boxes"], other["boxes"][:count], rtol=1e-4, atol=0.02)
        assert (one["labels"] + 1).equal(other["labels"][:count])


def test_names_of_before_torchvision_0_13_are_read():
    with torch.device("meta"):
        state = detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None).state_dict()
    old = {}
    for name, tensor in state.items():
        name = re.sub(r"mask_head\.(\d)\.0\.", lambda found: f"mask_head.mask_fcn{int(found[1]) + 1}.", name)
        name = re.sub(r"^(rpn\.head\.conv|backbone\.fpn\.\w+_blocks\.\d)(\.0)+(?=\.[^.]+$)", r"\1", name)
        old[name] = tensor
    assert recognising(old) == [faster_rcnn.FASTER_RCNN]
    _, today = find_description(faster_rcnn.FASTER_RCNN, state, "maskrcnn_resnet50_fpn_coco-0123abcd.pth")
    _, ours = find_description(faster_rcnn.FASTER_RCNN, old, "maskrcnn_resnet50_fpn_coco-0123abcd.pth")
    assert ours.keys() == today.keys()
    assert not today.keys() <= old.keys()


@pytest.mark.parametrize("name", ["mb_r50", "mb_x101"])
def test_detectors_of_maskrcnn_benchmark_find_its_boxes(name):
    state, expected = published_rcnn(name)
    assert recognising(state) == [MASKRCNN_BENCHMARK]
    found, ours = find_description(MASKRCNN_BENCHMARK, state, "model_final.pth")
    assert found.options["stride_in_1x1"] == (name == "mb_r50")
    detector = detector_of(found).eval()
    assert ours.keys() == detector.state_dict().keys()
    detector.load_state_dict(ours)
    images = pixels(2, 3, 128, 192)
    sizes = torch.tensor([[128, 192], [100, 150]])
    with torch.no_grad():
        boxes = detector.postprocess(detector(images, sizes), sizes, sizes)
    for i, one in enumerate(boxes):
        assert len(one["boxes"]) == len(expected[f"boxes{i}"]) > 10
        theirs = torch.from_numpy(expected[f"boxes{i}"]) + torch.tensor(
            [
                0,
                0,
                1,
                1,
            ]
        )  # they end at the last pixel
        scores = torch.from_numpy(expected[f"scores{i}"])
        labels = torch.from_numpy(expected[f"labels{i}"])
        far = (one["boxes"][:, None] - theirs).abs().amax(-1) + 1e3 * (one["scores"][:, None] - scores).abs()
        far += 1e6 * (one["labels"][:, None] + 1 != labels)  # scores that are equal but for rounding come in any order
        for side in (0, 1):
            # theirs keeps a pixel of a box that lies outside, which may also suppress another one or end a list of 100
            missed = far.amin(side) > 0.1
            assert missed.sum() <= 2
            assert missed.float().mean() <= 0.02
    left = not_taken(state | {STEM: state[STEM].flip(1)}, ours)
    assert all("cell_anchors" in key for key in left), "anchors are no weights"


def scene_graph_file(name: str, folder) -> tuple[str, dict]:
    """The path of a file of Scene-Graph-Benchmark, and what its program predicts."""
    state, expected = published_rcnn(name)
    for key in state:
        if "decoderLSTM.embed_" in key:  # the last of two names of one tensor
            alone = key.replace("decoderLSTM.embed_out_layer", "out").replace("decoderLSTM.embed_layer", "obj_embed")
            state[alone] = state[key]
    return saved({"model": state, "iteration": 28000}, folder / "model_0028000.pth"), expected


# Settings of a head that its file does not tell.
HEADS = {
    "motifs": {},
    "imp": {},
    "vctree": {},
    "transformer": {"heads": 2},
    "causal_motifs": {},
    "causal_vctree": {},
    "causal_vtranse": {"effect": "TDE"},
}


@pytest.mark.parametrize("head", HEADS)
def test_scene_graphs_of_the_benchmark_predict_what_its_program_does(head, tmp_path):
    path, expected = scene_graph_file(f"sgb_{head}", tmp_path)
    source = open_pretrained(path)
    assert source.architecture == "scene_graph"
    assert source.size == {"shortest_edge": 600, "longest_edge": 1000}
    options = source.options | {"detections_per_image": 12}
    if HEADS[head]:
        options["head_options"] = options["head_options"] | HEADS[head]
    target = {
        "boxes": BOXES,
        "labels": torch.tensor(
            [
                0,
                1,
                2,
                3,
                1,
            ]
        ),
        "iscrowd": torch.zeros(5),
    }
    target |= {"relations": torch.zeros(0, 3, dtype=torch.int64), "image_id": 1}
    images = pixels(1, 3, 128, 192)
    sizes = torch.tensor([[128, 192]])
    for mode in ("sgdet", "sgcls", "predcls"):
        model = build_detector("scene_graph", class_names=source.class_names, **options | {"mode": mode}).eval()
        loaded = load_pretrained(model, source, source.class_names)
        assert set(loaded.new) <= {"relation_counts", "candidate_counts", "seen_triplets", "predicate_weights"}
        with torch.no_grad():
            outputs = model(images, sizes, None if mode == "sgdet" else [target])
            found = model.postprocess(outputs, sizes, sizes, top_k=1000)[0]
        columns = ("boxes", "labels", "scores", "pairs", "predicates")
        assert_same_graph(found, {key: torch.from_numpy(expected[f"{mode}_{key}"]) for key in columns})


def assert_same_graph(found: dict, theirs: dict) -> None:
    boxes = theirs["boxes"]
    nearest = (found["boxes"][:, None] - boxes).abs().amax(-1).argmin(1)
    assert sorted(nearest.tolist()) == list(range(len(boxes)))
    assert_close(found["boxes"], boxes[nearest], rtol=0, atol=0.02)
    assert_close(found["scores"], theirs["scores"][nearest], rtol=1e-4, atol=1e-5)
    assert found["labels"].equal(theirs["labels"][nearest] - 1)
    row_of = {tuple(pair): row for row, pair in enumerate(theirs["pairs"].tolist())}
    rows = [row_of[tuple(pair)] for pair in nearest[found["pairs"]].tolist()]
    assert sorted(rows) == list(range(len(row_of)))
    assert_close(
        found["predicate_scores"],
        theirs["predicates"][rows, 1:],
        rtol=1e-4,
        atol=1e-5,
    )


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
        x = torch.nn.functional.conv2d(
            x,
            take(out, x.shape[1], side, side),
            stride=stride,
            padding=side // 2,
        )
        if not norm:
            return x + parts[0][:, None, None]
        bias, weight, mean, variance = (part[:, None, None] for part in parts)
        x = (x - mean) / (variance + 1e-5).sqrt() * weight + bias
        return torch.where(x > 0, x, 0.1 * x)

    x = conv(pixels, 32, 3)
    kept = []
    maps = []
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
            x = conv(x, width, 1) if i % 2 == 0 else conv(x, 2 * width, 3)
        maps.append(conv(conv(x, 2 * width, 3), 3 * (5 + classes), 1, norm=False))
    assert place == len(numbers)
    return maps


@pytest.fixture(scope="module")
def yolo_state():
    detector = build_detector("yolov3", class_names=["a", "b"])
    state = {name: numbers(name, value.shape) for name, value in detector.state_dict().items()}
    return {name: value * 0.3 if name.endswith("conv2.bn.weight") else value for name, value in state.items()}


HEADERS = {
    "yolov3.weights": struct.pack(
        "<iiiq",
        0,
        2,
        0,
        32013312,
    ),
    "old.weights": struct.pack(
        "<iiii",
        0,
        1,
        0,
        7,
    ),
}


def test_darknet_weights_give_the_maps_of_a_plain_reimplementation(yolo_state, tmp_path):
    raw = as_darknet_writes_it(yolo_state)
    for name, header in HEADERS.items():
        (tmp_path / name).write_bytes(header + raw.tobytes())
        found, ours = open_published_weights(tmp_path / name)
        assert found.architecture == "yolov3"
        assert_close(ours, yolo_state, rtol=0, atol=0)
    detector = build_detector("yolov3", class_names=["a", "b"], **found.options).eval()
    detector.load_state_dict(ours)
    image = pixels(1, 3, 64, 64)
    with torch.no_grad():
        outputs = detector(image, torch.tensor([[64, 64]]))
    for stride, value in zip((32, 16, 8), plain_yolov3(raw, image.float() / 255, 2), strict=True):
        scale = float(value.abs().max())
        assert_close(
            outputs[f"raw_stride{stride}"] / scale,
            value / scale,
            rtol=1e-4,
            atol=1e-5,
        )


def test_the_sizes_of_the_published_darknet_files_are_known():
    assert darknet.classes_of((248007048 - 20) // 4) == 80
    assert darknet.classes_of((162482580 - 20) // 4) == 0
    assert darknet.classes_of(1000) is None


def params_file(state: dict, version: int) -> bytes:
    """MXNet's list of arrays, written as its source says."""
    parts = [struct.pack("<QQQ", 0x112, 0, len(state))]
    for value in state.values():
        shape = value.shape
        if version == 2:
            parts.append(
                struct.pack(
                    "<IiI",
                    0xF993FAC9,
                    0,
                    len(shape),
                )
                + struct.pack(f"<{len(shape)}q", *shape)
            )
        elif version == 1:
            parts.append(struct.pack("<II", 0xF993FAC8, len(shape)) + struct.pack(f"<{len(shape)}q", *shape))
        else:
            parts.append(struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}I", *shape))
        parts += [struct.pack("<iii", 1, 0, 0), value.numpy().tobytes()]
    parts.append(struct.pack("<Q", len(state)))
    for name in state:
        parts += [struct.pack("<Q", len(name)), name.encode()]
    return b"".join(parts)


@pytest.mark.parametrize("version", [0, 1, 2])
def test_gluoncv_s_params_are_read_without_mxnet(yolo_state, tmp_path, version):
    theirs = {theirs: yolo_state[ours] for ours, theirs in gluoncv.tensor_names(2)}
    network = json.loads((TESTS / "golden" / "data" / "yolov3_network.json").read_text())
    assert set(theirs) == {name for _, name, _ in network["parameter_list"]}
    path = tmp_path / "yolo3_darknet53_custom.params"
    path.write_bytes(params_file(theirs, version))
    found, ours = open_published_weights(path)
    assert found.options["mean"] == [0.485, 0.456, 0.406]
    assert_close(ours, yolo_state, rtol=0, atol=0)
    path.write_bytes(params_file(theirs, version)[:1000])
    with pytest.raises(BadInput, match="not a readable list of MXNet arrays"):
        open_published_weights(path)


# ---- which file it is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "averaged", "side", "size"),
    [
        (
            "deimv2_atto",
            "ema",
            96,
            "atto",
        ),
        (
            "ecdet_s",
            "ema",
            96,
            "s",
        ),
        (
            "lwdetr_tiny",
            "ema_model",
            640,
            "tiny",
        ),
    ],
)
def test_averaged_weights_of_a_trainer_are_those_of_the_hub(name, averaged, side, size, tmp_path, monkeypatch):
    with_small_sizes(monkeypatch)
    state, _ = program(name)
    other = {key: tensor + 1 for key, tensor in state.items()}
    ema = {"module": state, "updates": 7} if averaged == "ema" else state
    trainer = saved(
        {
            "epoch": 3,
            "model": other,
            averaged: ema,
            "args": Namespace(lr=1e-4),
        },
        tmp_path / "a.pth",
    )
    # safetensors has a tensor with two names under one; the publisher of DEIMv2 left both
    once = ("decoder.decoder.up", "decoder.decoder.reg_scale") if name == "ecdet_s" else ()
    save_file({key: tensor for key, tensor in state.items() if key not in once}, tmp_path / "model.safetensors")
    ours = open_pretrained(trainer)
    of_hub = open_pretrained(str(tmp_path / "model.safetensors"))
    assert ours.class_names == of_hub.class_names
    assert ours.size == of_hub.size == {"height": side, "width": side}
    assert_close(of_hub.tensors, ours.tensors, rtol=0, atol=0)
    opened = open_own_detector(tmp_path / "a.pth")
    assert opened.size == ours.size
    assert opened.detector.resolved_options()["size"] == size


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("deimv2", DEIMV2_SIZES), ("ecdet", ECDET_SIZES), ("lw_detr", LW_DETR_SIZES)],
)
def test_a_file_fits_one_published_size_alone(name, sizes):
    states = {}
    for size in sizes:
        with torch.device("meta"):
            states[size] = build_detector(name, class_names=["a"], size=size).state_dict()
    for size, state in states.items():
        assert [other for other in sizes if not difference(states[other], state)] == [size]


def test_the_layer_of_rf_detr_base_behind_its_deepest_map_is_left_out_and_named():
    state, _ = program("rfdetr_nano")
    patches = "backbone.0.encoder.encoder.embeddings.patch_embeddings.projection.weight"
    state[patches] = torch.zeros(len(state[patches]), 3, 14, 14)  # of base alone
    found, ours = find_description(RF_DETR, state, "rf-detr-base.pth")
    assert "1 of the 12 layers" in found.notes[0]
    table = map_weights(detector_of(found).state_dict(), ours)
    assert not table.new
    assert len(table.unused) == 18
    assert all(".layer.11." in name for name in table.unused)


def test_a_file_of_rf_detr_with_masks_is_read():
    state, _ = program("rfdetr_nano")
    head = json.loads((FOLDER / "rfdetr_segmentation_head.json").read_text())  # names and shapes
    state |= {name: numbers(name, shape) for name, shape in head.items()}
    found, ours = find_description(RF_DETR, state, "rf-detr-seg-small.pt")
    assert found.options["masks"] is True
    assert found.options["source_config"]["decoder_layers"] == 2
    assert found.options["source_config"]["backbone_config"]["num_windows"] == 2
    table = map_weights(detector_of(found).state_dict(), ours)
    assert not table.unused
    assert not [name for name in table.new if "register_tokens" not in name]
    assert [name for name in not_taken(state, ours) if "mask_token" not in name and "_kp" not in name] == []


def test_a_d_fine_with_silu_stays_so(tmp_path):
    """DEIM's and RT-DETRv4's, in `final/`; the tensors of DEIM's are D-FINE's, so that its name has to tell."""
    found, _ = find_description(D_FINE, program("rtv4_s")[0], "rtv4_s.pth")
    detector = detector_of(found).eval()
    detector.save_final(tmp_path / "final", [Category(i, name) for i, name in enumerate(found.class_names)])
    again, _, _ = load_detector_folder(tmp_path / "final")
    sizes = torch.tensor([[160, 160]])
    with torch.no_grad():
        before, after = (
            each(
                pixels(
                    1,
                    3,
                    160,
                    160,
                ),
                sizes,
            )
            for each in (detector, again)
        )
    assert_close(after, before, rtol=0, atol=0)

    state, _ = program("dfine_s")
    of_deim, _ = find_description(D_FINE, state, "deim_dfine_hgnetv2_s_coco_120e.pth")
    of_d_fine, _ = find_description(D_FINE, state, "dfine_s_coco.pth")
    assert of_deim.options["source_config"]["head_activation"] == "silu"
    assert "has SiLU" in of_deim.notes[0]
    assert "head_activation" not in of_d_fine.options["source_config"]
    assert not of_d_fine.notes


def test_a_file_of_detr_with_norms_before_gives_the_encoder_s_last_norm_too():
    sizes = {
        "backbone": "resnet18",
        "d_model": 32,
        "heads": 8,
        "ffn_dim": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
    }
    detector = build_detector("detr", class_names=["a"], pre_norm=True, **sizes)
    state = filled(detector)
    theirs = as_detr_saves_it(state)
    assert "transformer.encoder.norm.weight" in theirs
    found, ours = find_description(DETR, theirs, "a.pth")
    assert found.options["pre_norm"]
    table = map_weights(state, ours)
    assert not table.unused
    assert all(new.endswith("num_batches_tracked") for new in table.new)
    assert all(tensor.equal(state[name]) for name, tensor in table.state.items())


# (numbers, its names of a backbone, where it lies in their model and in ours)
BACKBONES = [
    (
        "deimv2_s",
        deimv2_names,
        "backbone.dinov3._model.",
        "model.model.conv_encoder.backbone.",
    ),
    ("ecdet_s", ecdet_names, "backbone.backbone.", "model.model.conv_encoder.backbone."),
]


def backbone_in(name: str, below: str) -> dict:
    return {key.removeprefix(below): tensor for key, tensor in program(name)[0].items() if key.startswith(below)}


@pytest.mark.parametrize(("name", "names", "below", "ours"), BACKBONES)
def test_the_file_of_a_backbone_has_the_names_of_the_whole_model_s(name, names, below, ours):
    whole = FILES[name].publisher.ours_from(program(name)[0])
    wanted = {key.removeprefix(ours): tensor for key, tensor in whole.items() if key.startswith(ours)}
    assert_close(names(backbone_in(name, below)), wanted, rtol=0, atol=0)


def test_the_file_of_a_vision_transformer_is_loaded(tmp_path, capsys):
    """As the publisher's `caev2_tiny_300e_objects365.pth`: names of the encoder, more blocks than are used."""
    alone = {f"encoder.{key}": tensor for key, tensor in backbone_in("lwdetr_tiny", "backbone.0.encoder.").items()}
    deeper = {key.replace("blocks.0.", "blocks.6."): tensor for key, tensor in alone.items() if "blocks.0." in key}
    path = saved({"model": alone | deeper}, tmp_path / "caev2.pth")
    detector = build_detector(
        "lw_detr",
        class_names=["a"],
        size="tiny",
        pretrained_backbone=path,
    )
    loaded = detector.model.model.backbone.backbone.state_dict()
    whole = FILES["lwdetr_tiny"].publisher.ours_from(program("lwdetr_tiny")[0])
    assert loaded
    assert all(tensor.equal(whole[f"model.model.backbone.backbone.{key}"]) for key, tensor in loaded.items())
    assert "missing" not in capsys.readouterr().out


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_wrappers_of_tensors_are_taken_off_and_objects_refused(tmp_path):
    state, _ = program("v2_r18")
    path = tmp_path / "a.pth"
    saved({"model": {f"module.{name}": value for name, value in state.items()}}, path)
    assert_close(read_state(path), state, rtol=0, atol=0)
    saved({"model": state, "args": Category(1, "a")}, path)
    with pytest.raises(BadInput, match="other objects than tensors"):
        read_state(path)
    saved({"layer.weight": torch.zeros(2)}, path)
    with pytest.raises(BadInput, match="do not have the names of a known publisher"):
        open_published_weights(path)


def test_names_of_classes_are_read_from_a_file_beside_the_weights(tmp_path):
    saved(program("v2_r18")[0], tmp_path / "a.pth")
    names = tmp_path / "a.names"
    names.write_text("\n".join(f"kind {i}" for i in range(80)))
    assert open_published_weights(tmp_path / "a.pth")[0].class_names[3] == "kind 3"
    names.write_text("one")
    with pytest.raises(BadInput, match="1 names, but a.pth has 80 classes"):
        open_published_weights(tmp_path / "a.pth")
    names.write_bytes("caf\xe9\n".encode("latin-1"))
    with pytest.raises(BadInput, match="a.names: not a text in UTF-8"):
        open_published_weights(tmp_path / "a.pth")


@pytest.mark.parametrize("shape", [(), (0,), (1,), (1, 1), (1, 1, 1, 1)], ids=str)
def test_a_file_with_only_the_names_of_a_publisher_is_one_sentence(shape, tmp_path):
    relation_head = f"{scene_graphs.PREDICTOR}rel_compress.weight"
    of_graphs = (scene_graphs.STEM, scene_graphs.CLASSIFIER, relation_head)
    of_names = "(.* the names of .*, but it (lacks|has) |.* relation head|.* not on a ResNet)"
    for publisher in publishers():
        if publisher is darknet.DARKNET:  # whose files have no names
            continue
        names = of_graphs if publisher is scene_graphs.SCENE_GRAPH_BENCHMARK else publisher.marks
        saved({"model": {name: torch.zeros(shape) for name in names}}, tmp_path / "cut.pth")
        with pytest.raises(BadInput, match=f"cut.pth: {of_names}") as refused:
            open_published_weights(tmp_path / "cut.pth")
        assert "\n" not in str(refused.value), publisher


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("detr", "transformer.encoder.layers.0.linear1.weight"),
        ("detr", "transformer.decoder.layers.0.multihead_attn.in_proj_weight"),
        ("defo", "transformer.level_embed"),
        ("v2_r18", "encoder.input_proj.1.conv.weight"),
        ("dfine_n", "decoder.reg_scale"),
        ("deimv2_atto", "decoder.decoder.layers.0.cross_attn.num_points_scale"),
        ("rfdetr_nano", "transformer.decoder.layers.0.cross_attn.attention_weights.bias"),
    ],
)
def test_a_tensor_of_another_shape_is_named(name, tensor, tmp_path):
    state, _ = program(name)
    whole = state[tensor]
    for other in (
        torch.zeros(()),
        whole[:0],
        torch.stack([whole, whole]),
        torch.full((2,), math.nan),
    ):
        saved(state | {tensor: other}, tmp_path / "changed.pth")
        with pytest.raises(BadInput, match=f"but it has {re.escape(tensor)}"):
            open_published_weights(tmp_path / "changed.pth")


TOO_DEEP = "transformer.decoder.layers.1000000000"
# (numbers, name of the file, a tensor beside them, what the error says)
OTHERS = [
    ("detr", "deep.pth", f"{TOO_DEEP}.norm1.weight", f"has tensors below {TOO_DEEP}"),
    ("v2_r18", "deim_rtdetrv2_r18vd_coco_120e.pth", None, "rt_detr_v2 has ReLU"),
    (
        "rfdetr_nano",
        "rf-detr-large.pth",
        "backbone.0.projector.stages.1.0.cv1.conv.weight",
        "the large RF-DETR of 2025",
    ),
    (
        "ecdet_s",
        "ecseg_s.pth",
        "decoder.decoder.segmentation_head.bias",
        "an ECSeg, which has masks",
    ),
    (
        "lwdetr_tiny",
        "b.pth",
        "backbone.0.encoder.blocks.6.gamma_1",
        "most similar is size tiny .* unused: .*layer.6.",
    ),
    (
        "deimv2_s",
        "narrow.pth",
        None,
        r"none of the published sizes of deimv2; the most similar is size s "
        r"\(by our names: 88 missing: .*, \.\.\.; 600 of another shape: .*, \.\.\.\); the file was cut",
    ),
]


@pytest.mark.parametrize(("name", "file", "further", "words"), OTHERS)
def test_a_file_that_is_almost_known_is_refused_with_what_differs(name, file, further, words, tmp_path):
    state, _ = program(name)
    if further is not None:
        state[further] = torch.zeros(1)
    saved(state, tmp_path / file)
    with pytest.raises(BadInput, match=f"{file}: .*{words}"):
        open_published_weights(tmp_path / file)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("predictor.rel_compress", "predictor.other", "unknown relation head.*--model.detector"),
        ("relation.box_feature_extractor.fc6.weight", "relation.att_feature_extractor.fc6.weight", "attributes"),
    ],
)
def test_scene_graphs_that_are_not_known_are_refused(old, new, words):
    state = {key.replace(old, new): value for key, value in published_rcnn("sgb_motifs")[0].items()}
    with pytest.raises(BadInput, match=words):
        scene_graphs.SCENE_GRAPH_BENCHMARK.described(state, "model_0028000.pth")


# ---- what starts from them -------------------------------------------------------------------------------------------


def table_of(folder, classes):
    """One image with two relations, of the classes and predicates of the weights."""
    Image.new("RGB", (192, 128)).save(folder / "a.jpg")
    objects = [
        {
            "id": i,
            "image_id": 1,
            "category_id": i,
            "bbox": [20 * i, 10, 50, 60],
        }
        for i in range(3)
    ]
    relations = [
        {
            "image_id": 1,
            "subject_id": i,
            "object_id": i + 1,
            "predicate_id": i,
        }
        for i in range(2)
    ]
    document = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 192, "height": 128}],
        "categories": [{"id": i, "name": name} for i, name in enumerate(classes)],
        "annotations": objects,
        "attribute_categories": [{"id": 1, "name": "red"}],
        "rel_categories": [{"id": i, "name": name} for i, name in enumerate(PREDICATES)],
        "rel_annotations": relations,
    }
    (folder / "graphs.json").write_text(json.dumps(document))
    return open_dataset(folder / "graphs.json", image_dir=folder, cache_dir=folder / "cache")


def starting(table, folder):
    """`start(settings)`: a scene graph on this table."""

    def start(**settings):
        return start_scene_graph(
            SceneGraphOptions(**settings),
            table,
            folder,
            checkpoint=None,
            say=print,
        )

    return start


def test_training_goes_on_from_a_published_scene_graph(tmp_path, capsys):
    path, _ = scene_graph_file("sgb_motifs", tmp_path)
    start = starting(table_of(tmp_path, CLASSES), tmp_path)
    (tmp_path / "model_0028000.names").write_text("\n".join(CLASSES))
    with pytest.raises(BadInput, match=r"knows the predicates \['predicate 0', .*\], the data \['on'"):
        start(pretrained=path)
    (tmp_path / "model_0028000.predicates").write_text("\n".join(PREDICATES))
    model = start(pretrained=path, mode="predcls", freeze="detector")
    assert model.mode == "predcls"
    assert model.relation_counts.sum() == 2
    assert model.seen_triplets.sum() == 2
    assert model.attributes == ("red",)
    learnt = open_pretrained(path).tensors["head.frequency.table.weight"]
    assert torch.equal(model.head.frequency.table.weight, learnt), "not counted anew: it was trained"
    said = capsys.readouterr().out
    for words in (
        "new     attribute_predictor",
        "mode sgdet, unless --model.mode",
        "unused  roi_heads.relation.predictor",
    ):
        assert words in said
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert "head.frequency.table.weight" in trained
    assert not any(name.startswith("detector.") for name in trained)
    below = start(detector=path, hidden_dim=8, embed_dim=4)
    assert torch.equal(below.detector.rpn.head.cls_logits.weight, model.detector.rpn.head.cls_logits.weight)


@pytest.mark.slow
def test_a_file_of_maskrcnn_benchmark_is_the_detector_of_a_scene_graph(tmp_path):
    """What the file decides cannot be given; what it does not know, and what changes nothing that was learned, can."""
    state, _ = published("mb_r50")
    path = saved({"model": state}, tmp_path / "model_final.pth")
    names = [f"class {i}" for i in range(1, len(state["roi_heads.box.predictor.cls_score.weight"]))]
    (tmp_path / "model_final.names").write_text("\n".join(names))
    start = starting(table_of(tmp_path, names), tmp_path)
    settings = {
        "detector": path,
        "mode": "sgdet",
        "hidden_dim": 8,
        "embed_dim": 4,
        "union_levels": "all",
    }
    model = start(**settings, detector_options={"detections_per_image": 7})
    assert model.detector.roi_heads.detections_per_img == 7
    assert torch.equal(model.detector.backbone.body.conv1.weight, state["backbone.body.stem.conv1.weight"].flip(1))
    assert torch.equal(model.union.head.fc6.weight, state["roi_heads.box.feature_extractor.fc6.weight"])
    assert model.union.pool.reduce.weight.shape[1] == 4 * model.detector.backbone.out_channels
    with pytest.raises(BadInput, match="another norm_eps: leave them out"):
        start(**settings, detector_options={"norm_eps": 1e-5})


def test_a_published_scene_graph_is_opened_as_it_is(tmp_path):
    path, _ = scene_graph_file("sgb_causal_motifs", tmp_path)
    predictor = open_predictor(path, settings={"head_options.effect": "TDE"})
    found = predictor(torch.zeros(3, 64, 64, dtype=torch.uint8), score_threshold=0.0)
    assert len(predictor.class_names) == 4
    assert found["pairs"].shape[1] == 2
    assert len(found["predicates"]) > 0
    assert predictor.given is None
    assert open_predictor(path, settings={"mode": "sgcls"}).given == "boxes", "the file does not say its mode"
    with pytest.raises(BadInput, match="model.mode is 'sgd'"):
        open_predictor(path, settings={"mode": "sgd"})


@pytest.fixture(scope="module")
def source(server, script, settings, tmp_path_factory):
    """The folder of a run of two steps on the four classes of the shapes."""
    args = settings(
        "--run.output_dir",
        tmp_path_factory.mktemp("source"),
        "--run.max_steps",
        2,
        "--run.eval_every",
        0,
    )
    return server.run(script, args).ok().folder


@pytest.fixture(scope="module")
def other_classes(data, tmp_path_factory):
    """The same pictures; the first class is called something else."""
    folder = shutil.copytree(data, tmp_path_factory.mktemp("other") / "shapes")
    arguments = []
    for split in ("train", "val"):
        path = folder / "annotations" / f"{split}.json"
        document = json.loads(path.read_text())
        document["categories"][0]["name"] = "hexagon"
        path.write_text(json.dumps(document))
        arguments += [f"--data.{split}", path]
    return arguments


def weights_in(folder) -> dict:
    return checkpoint_tensors(folder / "checkpoints" / "latest")


@pytest.mark.every_script("slow")
def test_a_run_starts_from_another_and_its_folder_is_enough_from_then_on(
    server, script, settings, source, other_classes, tmp_path
):
    copy = shutil.copytree(source, tmp_path / "source", symlinks=True)
    before = weights_in(source)
    first = next(name for name in before if "backbone" in name).removeprefix("model/")
    prefix = first[: first.index("backbone") + len("backbone")]
    given = [
        *(
            "--run.output_dir",
            tmp_path,
            "--run.name",
            "tuned",
            "--run.resume",
            "latest",
            "--run.save_every",
            2,
        ),
        *(
            "--model.pretrained",
            copy,
            "--model.freeze_prefixes",
            f"[{prefix}]",
            "--optim.lr",
            "1e-5",
        ),
    ]
    common = settings(*other_classes, *given)
    taken = "rows of 3 of 4 classes: square, triangle, star"
    if script.name == "train_sgg":  # the head of a graph mixes all classes
        refused = server.run(script, [*common, "--run.name", "refused"])
        assert refused.code == 2
        assert "hexagon" in refused.text
        assert "model.detector" in refused.text
        common = settings(*given)
        taken = "head.frequency.table.weight"
    killed = server.run(script, common, 1, [kill(4)])
    assert killed.code == -9
    assert taken in (killed.folder / "pretrained.txt").read_text()
    assert "loaded" in killed.text

    shutil.rmtree(copy)
    ended = server.run(script, common).ok()
    assert "Resuming from" in ended.text
    assert "loaded" not in ended.text
    after = weights_in(ended.folder)
    frozen = [name for name in after if name.startswith(f"model/{prefix}")]
    assert frozen
    assert all(after[name].equal(before[name]) for name in frozen), "batch statistics included"
    assert not all(after[name].equal(before[name]) for name in before if after[name].shape == before[name].shape)


def test_every_rank_starts_from_the_same_weights(server, script, settings, source, tmp_path):
    args = settings(
        *(
            "--run.output_dir",
            tmp_path,
            "--run.name",
            "ranks",
            "--model.pretrained",
            source,
        ),
        *("--run.max_steps", 1, "--run.eval_every", 0, "--optim.lr", 0),
    )
    ended = server.run(script, args, 2).ok()
    before = weights_in(source)
    after = weights_in(ended.folder)
    counted = ("running_mean", "running_var", "num_batches_tracked")  # by steps, whatever the rate
    learned = [name for name in before if name.startswith("model/") and not name.endswith(counted)]
    assert learned
    assert all(after[name].equal(before[name]) for name in learned)
    assert ended.text.count("weights of") == 1, "said once"
