"""YOLOv3 against the numbers of GluonCV on MXNet; every case, size and parameter comes from the files."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from golden_files import Arrays, Tensors, ending, parametrize, read_tensors, without_ending
from golden_files import arrays as golden_arrays
from numpy.testing import assert_allclose
from plain_training import Taps, plain_training
from pytest import approx
from torch import Tensor, nn
from torch.testing import assert_close

from scripts import train_yolov3
from toolkit.base.batch import Batch
from toolkit.data.transforms.mixing import mixup
from toolkit.detectors.yolov3.model import YOLOv3, class_nms, class_scores
from toolkit.detectors.yolov3.options import DEFAULT_ANCHORS, Yolov3Options
from toolkit.detectors.yolov3.targets import (
    STRIDES,
    AnchorAssignment,
    assign_boxes,
    class_targets,
    decode_boxes,
    make_grid,
    objectness_targets,
    yolov3_losses,
)
from toolkit.run.metrics_log import read_metrics
from toolkit.step.optim import parameter_groups
from toolkit.step.schedules import Schedule, lr_factor

LOSSES = YOLOv3.loss_names
LEAVES = {"gamma": "weight", "beta": "bias"}
PARTS = ("centers", "scales", "objness", "cls")  # of a prediction, in the order of its channels
IGNORE_IOU = 0.7  # by the README; the files do not carry it

arrays = partial(golden_arrays, program="yolov3")
tensors = partial(read_tensors, program="yolov3")


def pytest_generate_tests(metafunc):
    named = {
        "targets_case": ("targets", "_gt_boxes"),
        "merger_case": ("merger", "_gt_boxes"),
        "loss_case": ("loss", "_num_class"),
        "nms_case": ("decode", "_params"),
        "lr_case": ("lr", "_params"),
        "trajectory": ("trajectory", "_config_json"),
    }
    folder = metafunc.config.getoption("golden")
    cases = {}
    for name, (topic, suffix) in named.items():
        cases[name] = partial(ending, folder, topic, suffix, "yolov3")
    parametrize(metafunc, cases)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def targets_of(boxes: Tensor, ids: Tensor, ratios: Tensor | None) -> list[dict]:
    """Our targets of padded ground truth (B, M, 4): rows up to the first with a negative coordinate."""
    targets = []
    for b, rows in enumerate(boxes):
        valid = (rows >= 0).all(dim=1)
        n = int(valid.long().cumprod(dim=0).sum())
        target = {"boxes": rows[:n], "labels": ids[b, :n, 0].long()}
        if ratios is not None:
            target["mixup"] = ratios[b, :n, 0]
        targets.append(target)
    return targets


def targets_in(g: Tensors) -> list[dict]:
    return targets_of(g["gt_boxes"], g["gt_ids"], g.get("gt_mixratio"))


def sizes_of(image_hw: Tensor, batch: int) -> Tensor:
    return image_hw.long().expand(batch, 2)


def dense(assigned: AnchorAssignment, predictions: int, classes: Tensor) -> Tensors:
    """Our assignment of boxes as GluonCV's arrays over all predictions."""
    kept = assigned.kept
    images = assigned.image[kept]
    indices = assigned.index[kept]
    batch = len(assigned.counts)

    def spread(values: Tensor, empty: float = 0.0) -> Tensor:
        shape = (batch, predictions, values.shape[1])
        result = torch.full(shape, empty)
        result[images, indices] = values[kept]
        return result

    weights = assigned.weight[:, None].expand(-1, 2)
    return {
        "objectness": spread(assigned.ratio[:, None]),
        "center": spread(assigned.center),
        "scale": spread(assigned.scale),
        "weights": spread(weights),
        "class": spread(classes, empty=-1.0),
    }


def close(
    ours: Tensor,
    theirs: Tensor,
    rtol: float = 0.0,
    atol: float = 0.0,
    message: str = "",
) -> None:
    assert_close(
        ours.double(),
        theirs.double(),
        rtol=rtol,
        atol=atol,
        msg=lambda text: f"{message}: {text}",
    )


def relative_to_largest(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> float:
    difference = (ours - theirs).abs().max()
    largest = theirs.abs().max().clamp(min=floor)
    return float(difference / largest)


def test_targets(golden, targets_case):
    g = tensors(golden, "targets", f"{targets_case}_")
    image_hw = g["image_hw"]
    anchors = g["anchors"].view(3, -1, 2)
    grid = make_grid(tuple(image_hw.tolist()), anchors)
    per_cell = anchors.shape[1]
    close(grid.cells_xy[::per_cell], g["offsets"])
    level_hw = [(image_hw // stride).tolist() for stride in STRIDES]
    assert g["level_hw"].tolist() == level_hw

    targets = targets_in(g)
    sizes = sizes_of(image_hw, len(targets))
    assigned = assign_boxes(targets, sizes, anchors, grid)
    num_predictions = g["objectness"].shape[1]
    num_classes = g["class"].shape[2]
    classes = class_targets(assigned.labels, num_classes, False)
    for name, ours in dense(assigned, num_predictions, classes).items():
        close(ours, g[name], atol=1e-5, message=name)
    places = torch.stack((assigned.image, assigned.index), dim=1)
    positive = places[assigned.ratio > 0].tolist()
    expected = g["positive_index"].tolist()
    assert sorted(positive) == sorted(expected)


@pytest.mark.parametrize("smoothing", ["hard", "smooth"])
def test_merger(golden, merger_case, smoothing):
    g = tensors(golden, "merger", f"{merger_case}_")
    image_hw = g["image_hw"]
    num_classes = int(g["num_class"])
    anchors = torch.tensor(DEFAULT_ANCHORS, dtype=torch.float32)
    grid = make_grid(tuple(image_hw.tolist()), anchors)
    targets = targets_in(g)
    sizes = sizes_of(image_hw, len(targets))
    assigned = assign_boxes(targets, sizes, anchors, grid)

    objectness = objectness_targets(
        g["box_preds"],
        assigned,
        sizes,
        grid,
        IGNORE_IOU,
    )
    assert torch.equal(objectness[..., None], g[f"{smoothing}_objectness"])
    near = g["iou_max"] > IGNORE_IOU
    unassigned = g["prefetch_objectness"][..., 0] <= 0
    assert torch.equal(objectness < 0, near & unassigned)
    classes = class_targets(assigned.labels, num_classes, smoothing == "smooth")
    ours = dense(assigned, objectness.shape[1], classes)
    for name in ("center", "scale", "weights", "class"):
        close(ours[name], g[f"{smoothing}_{name}"], atol=1e-6, message=name)
    positive = objectness > 0
    mask = positive[..., None].expand(-1, -1, num_classes)
    assert torch.equal(mask.float(), g[f"{smoothing}_class_mask"])


def test_label_smoothing_table(golden):
    label = torch.tensor([0])
    table = arrays(golden, "merger")["smooth_table"]
    for num_classes, positive, other, *_ in table.tolist():
        ours = class_targets(label, int(num_classes), True)[0].tolist()
        assert ours[0] == approx(positive, abs=1e-6)
        others = ours[1:]
        assert len(others) == num_classes - 1
        assert others == approx([other] * len(others), abs=1e-6)


def test_losses_and_gradients(golden, loss_case):
    g = tensors(golden, "loss", f"{loss_case}_")
    num_classes = int(g["num_class"])
    columns = [g[f"pred_{part}"] for part in PARTS]
    predictions = torch.cat(columns, dim=2).requires_grad_()
    objectness = g["target_objectness"][..., 0]
    batch = len(objectness)
    positive = objectness > 0
    assert torch.equal(g["target_class_mask"][..., 0] > 0, positive)
    image, index = positive.nonzero(as_tuple=True)
    classes = g["target_class"][image, index]
    labels = classes.argmax(dim=1)
    smoothing = bool((classes.max(dim=1).values < 1).any())
    ours = class_targets(labels, num_classes, smoothing)
    close(ours, classes, atol=1e-6, message="classes are one-hot")

    def losses_of(first: int, stop: int) -> Tensors:
        inside = (first <= image) & (image < stop)
        images = image[inside]
        indices = index[inside]
        count = len(indices)
        crowd = torch.zeros(count, dtype=torch.bool)
        assigned = AnchorAssignment(
            image=images - first,
            index=indices,
            boxes=torch.zeros(count, 4),
            crowd=crowd,
            kept=~crowd,
            labels=labels[inside],
            counts=(),
            ratio=objectness[images, indices],
            weight=g["target_weights"][images, indices, 0],
            center=g["target_center"][images, indices],
            scale=g["target_scale"][images, indices],
        )
        return yolov3_losses(
            predictions[first:stop],
            objectness[first:stop],
            assigned,
            smoothing,
        )

    for b in range(batch):
        for name, loss in losses_of(b, b + 1).items():
            close(loss, g[name][b], rtol=1e-5, message=f"{name} of image {b}")
    total = losses_of(0, batch)
    for name, loss in total.items():
        expected = g[name].double().sum()
        close(loss, expected, rtol=1e-5, message=name)
    (gradient,) = torch.autograd.grad(sum(total.values()), predictions)
    gradients = gradient.split([2, 2, 1, num_classes], dim=2)
    for part, ours in zip(PARTS, gradients, strict=True):
        close(ours, g[f"grad_{part}"], atol=1e-5, message=part)


def names_of(num_classes: int) -> list[str]:
    return [str(c) for c in range(num_classes)]


def decoded(golden: Path) -> SimpleNamespace:
    """The file, its levels, deep to shallow, and our predictions, grid, boxes and scores of its raw maps."""
    g = tensors(golden, "decode")
    levels = []
    for name in g:
        if name.endswith("_raw"):
            levels.append(tensors(golden, "decode", name.removesuffix("raw")))
    levels.sort(key=lambda level: int(level["stride"]), reverse=True)
    maps = [level["raw"] for level in levels]
    anchors = torch.stack([level["anchors"] for level in levels])
    channels = maps[0].shape[1]
    num_classes = channels // anchors.shape[1] - 5
    features = Taps([[(3, 4), (4, 4), (4, 4)], [(4, 4)], [(4, 4)]])
    options = Yolov3Options(anchors=anchors.tolist())
    detector = YOLOv3(names_of(num_classes), options, features=features)
    predictions, grid = detector.flat_predictions(maps)
    return SimpleNamespace(
        g=g,
        levels=levels,
        predictions=predictions,
        grid=grid,
        boxes=decode_boxes(predictions, grid),
        scores=class_scores(predictions),
    )


def test_decode(golden):
    ours = decoded(golden)
    strides = [int(level["stride"]) for level in ours.levels]
    assert strides == list(STRIDES)
    counts = [level["boxes"].shape[1] for level in ours.levels]
    predictions = ours.predictions.split(counts, dim=1)
    boxes = ours.boxes.split(counts, dim=1)
    scores = ours.scores.split(counts, dim=1)
    cells_xy = ours.grid.cells_xy.split(counts)
    for i, level in enumerate(ours.levels):
        stride = strides[i]
        close(boxes[i], level["boxes"], rtol=1e-5, atol=1e-3, message=f"boxes of stride {stride}")
        close(scores[i].transpose(1, 2), level["scores"], atol=1e-6, message=f"scores of stride {stride}")
        columns = [level[f"raw_{part}"] for part in PARTS]
        assert torch.equal(predictions[i], torch.cat(columns, dim=2))
        per_cell = len(level["anchors"])
        close(cells_xy[i][::per_cell], level["offsets"])


def rows_of(boxes, scores, labels, keep, count: int) -> Tensor:
    """GluonCV's rows (class, score, box), padded with -1 to `count`."""
    batch = []
    for b in range(len(boxes)):
        columns = (labels[b, :, None].float(), scores[b, :, None], boxes[b])
        kept = torch.cat(columns, dim=1)[keep[b]]
        rows = kept.new_full((count, 6), -1.0)
        kept = kept[:count]
        rows[: len(kept)] = kept
        batch.append(rows)
    return torch.stack(batch)


def test_nms(golden, nms_case):
    decoding = decoded(golden)
    params = decoding.g[f"{nms_case}_params"].tolist()
    nms_iou, topk, count, min_score = params
    found = class_nms(
        decoding.boxes,
        decoding.scores,
        decoding.grid,
        nms_iou,
        int(topk),
        min_score,
    )
    ours = rows_of(*found, int(count))
    theirs = decoding.g[nms_case]
    assert torch.equal(ours[..., 0], theirs[..., 0])
    close(ours[..., 1], theirs[..., 1], atol=1e-6)
    close(ours[..., 2:], theirs[..., 2:], rtol=1e-5, atol=1e-3)


def leaf_of(original: str) -> str:
    return original.rsplit(".", 1)[1]


def our_leaf(original: str) -> str:
    leaf = leaf_of(original)
    return LEAVES.get(leaf, leaf)


def without_counters(state: dict) -> dict:
    """A state dict without what GluonCV does not have."""
    return {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}


def head_name(original: str) -> str:
    """Our name of a parameter outside the backbone."""
    stem = original.rsplit(".", 1)[0]
    stem = stem.replace("yolo_blocks", "blocks")
    if stem.startswith("yolo_outputs"):
        level = stem.split(".")[1]
        stem = f"predictions.{level}"
    return f"{stem}.{our_leaf(original)}"


def parameter_names(detector: YOLOv3, originals: list[str]) -> dict[str, str]:
    """Name in GluonCV -> name in our state dict. Backbones have their tensors in the same order, under other names."""
    state = without_counters(detector.backbone.state_dict())
    stages = [name for name in originals if name.startswith("stages.")]
    names = {}
    for original, ours in zip(stages, state, strict=True):
        names[original] = f"backbone.{ours}"
    for original in originals:
        if original not in names:
            names[original] = head_name(original)
    for original, ours in names.items():
        assert ours.endswith(f".{our_leaf(original)}"), (original, ours)
    return names


def shapes_of(state: dict) -> dict:
    return {name: value.shape for name, value in state.items()}


def load_values(detector: YOLOv3, names: dict[str, str], values: dict) -> None:
    state = {}
    for original, value in values.items():
        state[names[original]] = torch.as_tensor(value)
    expected = without_counters(detector.state_dict())
    assert shapes_of(state) == shapes_of(expected)
    detector.load_state_dict(state, strict=False)


def formula_value(name: str, shape: list[int], seed: int) -> np.ndarray:
    random = np.random.RandomState(seed)
    leaf = leaf_of(name)
    if leaf == "weight":
        fan_in = np.prod(shape[1:])
        value = random.standard_normal(shape) / np.sqrt(fan_in)
    elif leaf == "gamma":
        value = random.uniform(0.9, 1.1, shape)
    elif leaf == "running_var":
        value = random.uniform(0.5, 1.5, shape)
    else:
        value = 0.1 * random.standard_normal(shape)
    return value.astype(np.float32)


@pytest.fixture(scope="module")
def network_json(golden) -> dict:
    path = golden / "yolov3_network.json"
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def darknet(golden, network_json) -> tuple[YOLOv3, dict[str, str]]:
    """Our Darknet-53 detector as it starts, and the map of parameter names."""
    torch.manual_seed(0)
    num_classes = network_json["yolo3_darknet53"]["num_class"]
    detector = YOLOv3(names_of(num_classes), Yolov3Options())
    originals = [name for _, name, _ in network_json["parameter_list"]]
    return detector, parameter_names(detector, originals)


def elements(parameters) -> int:
    return sum(parameter.numel() for parameter in parameters)


def modules_of(detector: YOLOv3, kind: type) -> list[nn.Module]:
    return [module for module in detector.modules() if isinstance(module, kind)]


def test_network_structure(darknet, network_json):
    detector, names = darknet
    state = detector.state_dict()
    for _, name, shape in network_json["parameter_list"]:
        assert list(state[names[name]].shape) == shape, name
    for shapes in network_json["heads"].values():
        for name, shape in shapes:
            assert list(state[names[name]].shape) == shape
    counts = network_json["yolo3_darknet53"]
    assert elements(detector.parameters()) == counts["learnable_parameters"]
    assert len(list(detector.parameters())) == counts["learnable_tensors"]
    assert elements(detector.backbone.parameters()) == counts["backbone_learnable"]
    assert len(modules_of(detector, nn.Conv2d)) == counts["n_conv"]
    norms = modules_of(detector, nn.BatchNorm2d)
    assert len(norms) == counts["n_bn"]
    for norm in norms:
        assert norm.eps == 1e-5
        assert norm.momentum == 0.1
    activations = modules_of(detector, nn.LeakyReLU)
    assert {activation.negative_slope for activation in activations} == {0.1}


def test_heads_start_as_in_gluoncv_and_the_backbone_as_in_timm(darknet, network_json):
    detector, names = darknet
    state = detector.state_dict()
    values = network_json["initial_values"]
    low = values["weight"]["min"]
    high = values["weight"]["max"]
    backbone = []
    for original, ours in names.items():
        leaf = leaf_of(original)
        if original.startswith("stages."):
            backbone.append(ours)
        elif leaf == "weight":
            assert low <= state[ours].min() < 0.9 * low
            assert 0.9 * high < state[ours].max() <= high
        else:
            assert (state[ours] == values[leaf]["mean"]).all(), original
    # The difference: timm's kaiming start, the last norm of each residual branch 0, where GluonCV has U(-0.07, 0.07).
    norms = [state[name] for name in backbone if name.endswith("bn.weight")]
    convolutions = [state[name] for name in backbone if name.endswith("conv.weight")]
    assert any((weight == 0).all() for weight in norms)
    assert any(weight.abs().max() > high for weight in convolutions)


@pytest.fixture(scope="module")
def filled(golden, darknet, network_json) -> YOLOv3:
    _, names = darknet
    seed = int(arrays(golden, "network")["fill_seed"])
    num_classes = network_json["yolo3_darknet53"]["num_class"]
    detector = YOLOv3(names_of(num_classes), Yolov3Options())
    values = {}
    for i, name, shape in network_json["parameter_list"]:
        values[name] = formula_value(name, shape, seed + i)
    load_values(detector, names, values)
    return detector.eval()


def by_stride(maps: list[Tensor]) -> Tensors:
    """The raw maps as the detector puts them out."""
    outputs = {}
    for stride, values in zip(STRIDES, maps, strict=True):
        outputs[f"raw_stride{stride}"] = values
    return outputs


def test_network_taps_maps_and_detections(golden, filled):
    g = tensors(golden, "network")
    pixels = g["input"]
    with torch.no_grad():
        taps = filled.backbone(pixels)
        maps = filled.raw_maps(pixels)
    for stride, tap in zip(STRIDES[::-1], taps, strict=True):
        expected = tensors(golden, "network", f"tap_stride{stride}_")
        assert list(tap.shape) == expected["shape"].tolist()
        every = tap.shape[1] // expected["sample"].shape[1]
        assert relative_to_largest(tap[:, ::every], expected["sample"]) < 1e-5
        means = tap.mean(dim=(0, 2, 3))
        assert relative_to_largest(means, expected["mean_per_channel"]) < 1e-5
    outputs = by_stride(maps)
    for name, ours in outputs.items():
        assert relative_to_largest(ours, g[name]) < 2e-5

    # The detector's own interface: the same rows, clipped to the image as the original's evaluation does.
    size_hw = torch.tensor(pixels.shape[2:])
    sizes = sizes_of(size_hw, len(pixels))
    top_k = g["detections"].shape[1]
    found = filled.postprocess(outputs, sizes, sizes, top_k=top_k)
    limits = size_hw.flip(0).repeat(2).float()
    for ours, rows in zip(found, g["detections"], strict=True):
        rows = rows[rows[:, 0] >= 0]
        assert ours["labels"].tolist() == rows[:, 0].tolist()
        close(ours["scores"], rows[:, 1], atol=1e-4)
        clipped = rows[:, 2:].clamp(min=0).minimum(limits)
        largest = float(rows.abs().max())
        close(ours["boxes"], clipped, atol=1e-4 * largest)


def test_weight_decay_exclusion(golden, darknet):
    detector, names = darknet
    path = golden / "yolov3_wd.json"
    g = json.loads(path.read_text())
    groups = parameter_groups(
        detector,
        lr=1.0,
        weight_decay=0.5,
        no_decay_on_norm_and_bias=True,
    )
    decayed = []
    undecayed = []
    for group in groups:
        side = decayed if group["weight_decay"] > 0 else undecayed
        side.extend(group["param_names"])
    excluded = [names[original] for original in g["excluded_structural_names"]]
    assert sorted(undecayed) == sorted(excluded)
    assert len(undecayed) == g["excluded_count"]
    assert len(decayed) == g["decayed_count"]
    parameters = dict(detector.named_parameters())
    assert elements(parameters[name] for name in undecayed) == g["excluded_elements"]
    assert elements(parameters[name] for name in decayed) == g["decayed_elements"]
    # Without the switch everything decays, as there without --no-wd.
    everything = parameter_groups(detector, lr=1.0, weight_decay=0.5)
    decays = {group["weight_decay"] for group in everything}
    assert decays == {0.5 * factor for factor in g["default_wd_mult_of_every_parameter"]}


@pytest.mark.parametrize("mode", ["step", "cosine", "poly"])
def test_learning_rates(golden, lr_case, mode):
    """GluonCV's curve is ours with another origin and end in each part, an offset of one to two updates."""
    g = arrays(golden, "lr")
    params = g[f"{lr_case}_params"].tolist()
    lr, warmup, epochs, iterations, gamma, power = params
    warm = int(warmup * iterations)
    total = int(epochs * iterations)
    shifted = []
    for epoch in g[f"{lr_case}_step_epochs"].tolist():
        shifted.append(int(epoch * iterations) - warm)
    schedule = g[f"{lr_case}_{mode}_schedule"]
    applied = g[f"{lr_case}_{mode}_applied"]
    name = {"step": "multistep"}.get(mode, mode)

    def theirs(t: int) -> float:
        if t < warm:  # reaches the peak at its last iteration, where ours reaches it at the first one after
            return lr * lr_factor(t, "constant", warmup_steps=warm - 1, warmup_factor=0.0)
        factor = lr_factor(
            t - warm,
            name,
            total_steps=total - warm - 1,  # ends one iteration early
            milestones=shifted,
            gamma=gamma,
            power=power,
        )
        return lr * factor

    rates = [theirs(t) for t in range(len(schedule))]
    assert_allclose(rates, schedule, rtol=1e-9, atol=1e-15)
    # The optimizer there counts before it asks: update k has schedule(k + 1), the last two of cosine and poly have 0.
    asked = schedule[1 : len(applied) + 1]
    assert_allclose(applied, asked, rtol=1e-6, atol=1e-12)


def sample_to_mix(g: Arrays, i: int) -> tuple[Tensor, dict]:
    image = torch.from_numpy(g[f"image{i}"])
    label = torch.from_numpy(g[f"label{i}"])
    target = {
        "boxes": label[:, :4].float(),
        "labels": label[:, 4].long(),
        "iscrowd": label[:, 5].long(),
        "image_id": i,
    }
    return image.permute(2, 0, 1), target


def test_mixup(golden):
    g = arrays(golden, "mixup")
    count = sum(key.startswith("image") for key in g)
    samples = [sample_to_mix(g, i) for i in range(count)]
    mixed = [key for key in without_ending(g, "_image") if key.startswith("first")]
    assert mixed
    for key in mixed:
        numbers = re.fullmatch(r"first(\d+)_lambda(\d+)", key)
        first, k = map(int, numbers.groups())
        image, target = mixup(samples[first], samples[1 - first], g["lambdas"][k])
        pixels = image.permute(1, 2, 0).numpy()
        assert np.array_equal(pixels, g[f"{key}_image"]), key
        columns = [target["boxes"]]
        for name in ("labels", "iscrowd", "mixup"):
            columns.append(target[name][:, None].float())
        assert_allclose(
            torch.cat(columns, dim=1),
            g[f"{key}_label"],
            rtol=1e-7,
            atol=1e-12,
            err_msg=key,
        )  # weights are float32


def small_detector(
    values: Tensors,
    num_classes: int,
    smoothing: bool,
) -> tuple[YOLOv3, dict[str, str]]:
    """The trajectory's network from the shapes of its parameters, with their values."""
    stages: dict[str, list] = {}
    heads = []
    for name, value in values.items():
        parts = name.split(".")
        channels_out, *channels_in = value.shape
        if parts[0] == "stages" and parts[-1] == "weight":
            convolutions = stages.setdefault(parts[1], [])
            convolutions.append((channels_in[0], channels_out))
        if parts[0] == "yolo_blocks" and name.endswith(".body.0.0.weight"):
            heads.append(channels_out)
    options = Yolov3Options(
        head_channels=heads,
        label_smoothing=smoothing,
        ignore_iou=IGNORE_IOU,
    )
    features = Taps(list(stages.values()))
    detector = YOLOv3(names_of(num_classes), options, features=features)
    names = parameter_names(detector, list(values))
    load_values(detector, names, values)
    return detector, names


def image_losses(detector: YOLOv3, outputs: dict, targets: list[dict]) -> Tensor:
    """(4, B): the losses of each image, through the detector's criterion."""
    columns = []
    for b, target in enumerate(targets):
        of_image = {name: values[b : b + 1].detach() for name, values in outputs.items()}
        losses, _ = detector.criterion(of_image, [target], {"images": 1.0})
        column = [losses[name] for name in LOSSES]
        columns.append(torch.stack(column))
    return torch.stack(columns, dim=1)


class NotingSgd(torch.optim.SGD):
    """MXNet's v = m v - lr g, w += v: torch.optim.SGD, v = m v + g, w -= lr v, with its momentum rescaled by
    lr_before / lr. It notes the first gradients, and the norms of the whole state after the first update.
    """

    def __init__(self, groups, detector: YOLOv3, momentum: float):
        super().__init__(groups, lr=groups[0]["lr"], momentum=momentum)
        self.detector = detector
        self.last_rate = None
        self.gradients: dict[str, float] = {}
        self.norms: dict[str, float] = {}

    def step(self, closure=None):
        (rate,) = {group["lr"] for group in self.param_groups}
        first = self.last_rate is None
        if first:
            for name, parameter in self.detector.named_parameters():
                self.gradients[name] = parameter.grad.norm().item()
        for state in self.state.values():
            state["momentum_buffer"] *= self.last_rate / rate
        super().step()
        if first:
            self.norms = norms_of(self.detector)
        self.last_rate = rate


def norms_of(detector: YOLOv3) -> dict[str, float]:
    state = detector.state_dict()
    return {name: value.double().norm().item() for name, value in state.items()}


def warm_up_options(updates: int) -> dict:
    """Theirs is lr * t / (n - 1) at t = k + 1 in update k; see test_learning_rates."""
    if not updates:
        return {}
    return {"warmup_steps": updates - 2, "warmup_factor": 1 / (updates - 1)}


def train(detector: YOLOv3, batches: list, config: dict, folder: Path):
    """One epoch of the script's own train_one_epoch over (pixels (B, 3, H, W), targets); pixels are normalised already.

    Returns rows of metrics, losses (steps, 4, B) before each update, and the optimizer.
    """
    detector.mean = (0.0,) * 3
    detector.std = (1 / 255,) * 3
    loader = []
    for pixels, targets in batches:
        size_hw = torch.tensor(pixels.shape[2:])
        batch = Batch(pixels.double(), sizes_of(size_hw, len(pixels)), targets)
        loader.append(batch)
    lr, warm, iterations = config.get("sched") or (config["lr"], 0, 0)
    options = warm_up_options(int(warm * iterations))
    groups = parameter_groups(
        detector,
        lr=lr,
        weight_decay=config["wd"],
        no_decay_on_norm_and_bias=config["no_wd"],
    )
    noting = NotingSgd(groups, detector, config["momentum"])
    t = plain_training(
        detector,
        loader,
        noting,
        lambda optimizer: Schedule(optimizer, "constant", **options),
        folder,
        total_steps=len(loader),
    )
    seen = []
    detector.register_forward_hook(lambda _, args, outputs: seen.append((outputs, args[2])))
    averages = train_yolov3.train_one_epoch(t)
    t.log.close()
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "train/loss" in row]
    for name in LOSSES:  # GluonCV's metrics at the end of an epoch are plain means over its steps
        mean = np.mean([row[f"train/{name}"] for row in rows])
        assert averages[name] == approx(mean, rel=1e-12)
    losses = [image_losses(detector, outputs, targets) for outputs, targets in seen]
    return rows, torch.stack(losses), noting


def running_var_elements(detector: YOLOv3, pixels: Tensor) -> dict[str, int]:
    """How many values each norm's variance is taken over, by the name of its running variance."""
    counts = {}
    handles = []

    def counting(name: str):
        def count(_, inputs, __):
            values = inputs[0]
            counts[name] = values.numel() // values.shape[1]

        return count

    for name, module in detector.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            hook = counting(f"{name}.running_var")
            handles.append(module.register_forward_hook(hook))
    was_training = detector.training
    with torch.no_grad():
        detector.eval().raw_maps(pixels)
    detector.train(was_training)
    for handle in handles:
        handle.remove()
    return counts


def run_trajectory(golden: Path, case: str, folder: Path) -> SimpleNamespace:
    """Trains as the file says, through the loop of scripts/train_yolov3.py."""
    g = tensors(golden, "trajectory", f"{case}_")
    text = arrays(golden, "trajectory")[f"{case}_config_json"]
    config = json.loads(str(text))
    initial = tensors(golden, "trajectory", f"{case}_init/")
    detector, names = small_detector(initial, config["C"], config["smooth"])
    batches = []
    for step in range(len(g["lr"])):
        i = step if config["distinct"] else 0
        ratios = g["gt_mixratio"][i] if config["mixed"] else None
        targets = targets_of(g["gt_boxes"][i], g["gt_ids"][i], ratios)
        batches.append((g["input"][i], targets))
    rows, losses, noting = train(detector, batches, config, folder)
    # theirs is of the sum over the batch
    batch_size = len(targets)
    gradients = {name: norm * batch_size for name, norm in noting.gradients.items()}
    return SimpleNamespace(
        g=g,
        detector=detector,
        names=names,
        rows=rows,
        losses=losses,
        gradients=gradients,
        final=tensors(golden, "trajectory", f"{case}_final/"),
    )


def with_biased_variance(run: SimpleNamespace) -> Tensors:
    """Our state with each running variance as it would be from biased batch variances, as MXNet keeps it.

    PyTorch's holds 0.9^k * start + n / (n - 1) * (the biased part); nothing else of the training depends on it.
    """
    state = {}
    for name, value in run.detector.state_dict().items():
        state[name] = value.clone()
    decay = 0.9 ** len(run.losses)
    originals = {ours: original for original, ours in run.names.items()}
    for name, n in running_var_elements(run.detector, run.g["input"][0]).items():
        start = run.g[f"init/{originals[name]}"]
        kept = decay * start
        state[name] = kept + (state[name] - kept) * (n - 1) / n
    return state


def check_end(run: SimpleNamespace) -> None:
    g = run.g
    state = with_biased_variance(run)
    for original, ours in run.names.items():
        error = relative_to_largest(state[ours], run.final[original], floor=1e-3)
        assert error < 5e-5, original
        norm = g.get(f"grad_norm_step1/{original}")
        if norm is not None and not original.endswith(("running_mean", "running_var")):
            assert run.gradients[ours] == approx(float(norm), rel=1e-4), original
    detector = run.detector
    detector.load_state_dict(state)
    detector.eval()
    with torch.no_grad():
        maps = detector.raw_maps(g["input"][0])
        predictions, grid = detector.flat_predictions(maps)
    scores = class_scores(predictions).transpose(1, 2)
    close(scores, g["final_scores"], atol=1e-5)
    boxes = decode_boxes(predictions, grid)
    close(boxes, g["final_boxes"], atol=1e-2)


SMALL_ROUNDING = 2e-5  # relative, of losses in each of 5 steps; 4e-6 was measured, on kernels for SSE and for AVX2
# Of the whole Darknet before updates 0 to 4, whose norms pass on what those before them have rounded. Measured were
# 1.5e-5, 2.1e-4, 5.4e-4, 1.0e-3, 2.2e-3, the larger of SSE and AVX2.
FULL_ROUNDING = (5e-5, 6e-4, 1.6e-3, 3e-3, 6e-3)


def test_train_one_epoch_follows_the_original_step_by_step(golden, trajectory, tmp_path):
    """The loop of scripts/train_yolov3.py: rates and losses of every step, first gradients, final parameters and
    predictions, with the rate inside the momentum. At a constant rate that is torch.optim.SGD itself.
    """
    run = run_trajectory(golden, trajectory, tmp_path)
    expected = run.g["losses"]
    assert len(run.rows) == len(run.losses) == len(expected)
    rates = []
    for step, row in enumerate(run.rows):
        theirs = expected[step]
        close(run.losses[step], theirs, rtol=SMALL_ROUNDING, message=f"losses before update {step}")
        means = theirs.double().mean(dim=1)
        for name, mean in zip(LOSSES, means.tolist(), strict=True):
            assert row[f"train/{name}"] == approx(mean, rel=SMALL_ROUNDING), (step, name)
        assert row["train/loss"] == approx(means.sum().item(), rel=SMALL_ROUNDING)
        (rate,) = {value for key, value in row.items() if key.startswith("train/lr/")}
        rates.append(rate)
    assert_allclose(rates, run.g["lr"], rtol=1e-6)
    # PyTorch's running variance takes the unbiased batch variance, MXNet's the biased one.
    state = run.detector.state_dict()
    errors = []
    for original, ours in run.names.items():
        if original.endswith("running_var"):
            errors.append(relative_to_largest(state[ours], run.final[original]))
    assert 1e-3 < max(errors) < 2e-2
    check_end(run)


def start_of_darknet(name: str, shape: list[int], seed: int) -> np.ndarray:
    leaf = leaf_of(name)
    if leaf == "weight":
        random = np.random.RandomState(seed)
        return random.uniform(-0.07, 0.07, shape).astype(np.float32)
    start = float(leaf in ("gamma", "running_var"))
    return np.full(shape, start, dtype=np.float32)


def test_trajectory_of_the_full_darknet(golden, network_json, tmp_path):
    g = arrays(golden, "trajectory_full")
    config = json.loads(str(g["config_json"]))
    originals = g["param_names"].tolist()
    shapes = {name: shape for _, name, shape in network_json["parameter_list"]}
    options = Yolov3Options(label_smoothing=config["smooth"])
    detector = YOLOv3(names_of(config["C"]), options)
    names = parameter_names(detector, originals)
    values = {}
    for i, name in enumerate(originals):
        seed = config["fill_seed"] + i
        values[name] = start_of_darknet(name, shapes[name], seed)
    load_values(detector, names, values)
    given = tensors(golden, "trajectory_full")
    ratios = given["gt_mixratio"] if config["mixed"] else None
    targets = targets_of(given["gt_boxes"], given["gt_ids"], ratios)
    batches = [(given["input"], targets)] * len(g["losses"])
    _, losses, noting = train(detector, batches, config, tmp_path)
    steps = zip(losses, given["losses"], FULL_ROUNDING, strict=True)
    for step, (ours, theirs, rtol) in enumerate(steps):
        close(ours, theirs, rtol=rtol, message=f"losses before update {step}")

    for name, norm in zip(originals, g["grad_norm_step1"].tolist(), strict=True):
        if not np.isnan(norm):
            gradient = noting.gradients[names[name]] * len(targets)
            assert gradient == approx(norm, rel=1e-2), name
    norms_after = {
        "param_norm_after_step1": noting.norms,
        "param_norm_after_step5": norms_of(detector),
    }
    for key, norms in norms_after.items():
        for name, norm in zip(originals, g[key].tolist(), strict=True):
            if name.endswith("running_var"):  # biased there, see the test before
                continue
            # What starts at 0 is lr times gradients, and as exact as these; the others are held to the README's 1e-3.
            rtol = 1e-2 if name.endswith(("beta", "bias")) else 1e-3
            assert norms[names[name]] == approx(norm, rel=rtol, abs=1e-9), (key, name)
