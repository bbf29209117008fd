"""Faster R-CNN against the numbers of seamseg; every case is enumerated from the files.

Boxes of the files are (y0, x0, y1, x1) and deltas (dy, dx, dh, dw); ours have x first. What differs from the original
is asserted as such here and listed in docs/differences.md.
"""

import json
from functools import partial

import numpy as np
import pytest
import torch
from golden_files import arrays, ending, parametrize
from torchvision.models.detection._utils import BoxCoder, encode_boxes
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops.poolers import LevelMapper

from toolkit.base.box_ops import pairwise_iou
from toolkit.detectors.faster_rcnn.criterion import (
    BACKGROUND,
    IGNORED,
    covered_share,
    match_candidates,
    roi_losses,
    rpn_losses,
)
from toolkit.step.meters import SmoothedValue
from toolkit.step.schedules import Schedule, lr_factor

RTOL = 1e-5


files = partial(arrays, program="seamseg")


def pytest_generate_tests(metafunc):
    folder = metafunc.config.getoption("golden")
    parametrize(metafunc, {
        "meter_case": lambda: ending(folder, "meters", "/sequence", "seamseg"),
        "schedule_case": lambda: list(json.loads((folder / "seamseg_schedulers.json").read_text())),
        "image": lambda: range(len(files(folder, "detection_loss")["num_gt"])),
    })  # fmt: skip


@pytest.fixture(scope="session")
def detection(golden) -> dict[str, np.ndarray]:
    return files(golden, "detection_loss")


def xy(array: np.ndarray) -> torch.Tensor:
    """Boxes and deltas with x before y, in pairs."""
    return torch.from_numpy(np.ascontiguousarray(array))[..., [1, 0, 3, 2]]


def close(ours, theirs, rtol: float = RTOL, atol: float = 1e-7, name: str = "") -> None:
    np.testing.assert_allclose(torch.as_tensor(ours).detach().numpy(), theirs, rtol=rtol, atol=atol, err_msg=name)


def test_momentum_meters(golden, meter_case):
    """A vector is a meter for each number. An empty meter has no mean here; the original says 0."""
    data = files(golden, "meters")
    sequence, value, mean, total = (data[f"{meter_case}/{k}"] for k in ("sequence", "value", "mean", "sum"))
    count, momentum = data[f"{meter_case}/count"], float(data[f"{meter_case}/momentum"])
    columns = sequence.reshape(len(sequence), -1)
    meters = [SmoothedValue(momentum=momentum) for _ in range(columns.shape[1])]
    assert data[f"{meter_case}/mean_before_first_update"] == 0 and np.isnan(meters[0].global_avg)
    for i, row in enumerate(columns):
        for meter, number in zip(meters, row, strict=True):
            meter.update(number)
        for key, expected in (("value", value), ("global_avg", mean), ("total", total)):
            ours = np.array([getattr(meter, key) for meter in meters]).reshape(sequence.shape[1:])
            np.testing.assert_allclose(ours, expected[i], rtol=RTOL, err_msg=f"{key} after update {i}")
        assert meters[0].count == pytest.approx(count[i], rel=RTOL)


def test_schedules(golden, schedule_case):
    """Per batch, the original's rate is one step early. A burn-in ends that, and does not move the schedule, which is
    where it would be without."""
    case = json.loads((golden / "seamseg_schedulers.json").read_text())[schedule_case]
    config, per_epoch = case["config"], case["epoch_length"]
    every = per_epoch if config["update_mode"] == "epoch" else 1
    total, burn_in = config["epochs"] * per_epoch, config["burn_in_steps"] * every
    name, first_rate, options = our_schedule(config, every)
    base = np.array(case["base_lrs"]) * first_rate
    warm = {"warmup_steps": burn_in, "warmup_factor": config["burn_in_start"]}
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in base])
    schedule = Schedule(optimizer, name, total, every=every, **options, **warm)

    def check_ours(step: int, expected: list[float]) -> None:
        schedule.set(step)
        ours = [group["lr"] for group in optimizer.param_groups]
        np.testing.assert_allclose(ours, expected, rtol=1e-10, atol=1e-15, err_msg=f"step {step}")

    check_ours(0, case["lr_after_construction"])
    first_milestone = min(options.get("milestones", []), default=total)
    for batch, expected in enumerate(case["lr_used_by_each_batch"]):
        step = batch + (every == 1)
        if burn_in and step <= burn_in:
            if step % every == 0 and step < first_milestone:  # within an epoch our rate rises further
                check_ours(step, expected)
            continue
        step -= every if burn_in else 0
        unmoved = lr_factor(step, name, total_steps=total, every=every, **options)
        np.testing.assert_allclose(base * unmoved, expected, rtol=1e-10, atol=1e-15, err_msg=f"step {step}")
        if not burn_in or name in ("multistep", "step"):
            check_ours(step, expected)


def our_schedule(config: dict, every: int) -> tuple[str, float, dict]:
    """Name, factor on the base rates and options of the same schedule here."""
    params, name = config["params"], config["type"]
    if name == "linear":
        return name, params["from"], {"final_factor": params["to"] / params["from"]}
    if name == "poly":
        return name, 1.0, {"power": params["gamma"]}
    if name == "step":
        return name, 1.0, {"step_size": params["step_size"] * every, "gamma": params["gamma"]}
    return name, 1.0, {"milestones": [m * every for m in params["milestones"]], "gamma": params["gamma"]}


def objects_of(detection: dict, image: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Objects and crowd regions of an image, xyxy, and which are crowd."""
    count, crowds = int(detection["num_gt"][image]), int(detection["num_crowd"][image])
    boxes = [xy(detection["gt_boxes_yxyx"][image, :count]), xy(detection["crowd_boxes_yxyx"][image, :crowds])]
    return torch.cat(boxes), torch.tensor([0] * count + [1] * crowds)


def crowd_is_certain(candidates: torch.Tensor, boxes: torch.Tensor, iscrowd: torch.Tensor, threshold: float):
    """Not where whole pixels, which the original counts, could be on the other side of the threshold."""
    if not iscrowd.any():
        return torch.ones(len(candidates), dtype=torch.bool)
    sides = candidates[:, 2:] - candidates[:, :2]
    rounding = sides.sum(1) / sides.prod(1)
    covered = covered_share(candidates, boxes[iscrowd.bool()]).amax(0)
    return ((covered - threshold).abs() > rounding) | (covered == 0) | (covered >= 1 - 1e-6)


def test_anchor_matching(detection, image):
    """The original ignores anchors that reach beyond the image; torchvision, and so we, train them."""
    anchors, expected = xy(detection["rpn/anchors_yxyx"]), torch.from_numpy(detection["rpn/match"][image])
    boxes, iscrowd = objects_of(detection, image)
    height, width = detection["valid_size_hw"][image].tolist()
    inside = (anchors[:, :2] >= 0).all(1) & (anchors[:, 2] <= width) & (anchors[:, 3] <= height)
    assert (expected[~inside] == IGNORED).all()
    anchors, expected = anchors[inside], expected[inside]
    high, low, crowd = (float(detection[f"rpn/{key}_threshold"]) for key in ("pos", "neg", "void"))
    match = match_candidates(anchors, boxes, iscrowd, high, low, best_of_each_box=True, crowd_overlap=crowd)
    certain = crowd_is_certain(anchors, boxes, iscrowd, crowd)
    by_iou = match_candidates(anchors, boxes, iscrowd, high, low, crowd_overlap=crowd)
    forced = (match >= 0) & (by_iou < 0)  # the best anchor of an object that none overlaps enough
    assert torch.equal(match[certain & ~forced], expected[certain & ~forced])
    for row in match[forced & certain].unique():
        assert (expected[forced & certain & (match == row)] >= 0).any()
    assert (expected[certain] == BACKGROUND).any()


def test_anchor_targets(detection, image):
    match = torch.from_numpy(detection["rpn/match"][image])
    labels = torch.where(match >= 0, 1, torch.where(match == BACKGROUND, 0, -1))
    assert torch.equal(labels, torch.from_numpy(detection["rpn/obj_labels"][image]))
    positive = match >= 0
    boxes, _ = objects_of(detection, image)
    ours = encode_boxes(boxes[match[positive]], xy(detection["rpn/anchors_yxyx"])[positive], (1.0, 1.0, 1.0, 1.0))
    close(ours, xy(detection["rpn/box_targets"][image])[positive], atol=1e-6)


def test_rpn_losses_and_gradients(detection):
    """The original divides by the anchors of the batch; our weights divide by those of each image."""
    match = torch.from_numpy(detection["rpn/match"]).flatten()
    logits = torch.from_numpy(detection["rpn/obj_logits"]).flatten().requires_grad_()
    deltas = xy(detection["rpn/box_logits"]).flatten(0, 1).requires_grad_()
    targets = xy(detection["rpn/box_targets"]).flatten(0, 1)
    counted = (match != IGNORED).float()
    weights = counted / counted.sum().clamp(min=1)
    objectness, box = rpn_losses(logits, deltas, match, targets, weights, float(detection["rpn/sigma"]) ** -2)
    close(objectness, detection["rpn/obj_loss"])
    close(box, detection["rpn/bbx_loss"])
    (objectness + box).backward()
    close(logits.grad, detection["rpn/grad_obj_logits"].reshape(-1))
    close(deltas.grad, xy(detection["rpn/grad_box_logits"]).flatten(0, 1))


def test_proposals(detection, image):
    """One level, as the original suppresses; ours goes level by level, as torchvision does."""
    pre, post, min_size = detection["proposals/pre_post_nms_min_size"].tolist()
    threshold = float(detection["proposals/nms_threshold"])
    top = ({"training": n, "testing": n} for n in (pre, post))
    rpn = RegionProposalNetwork(None, None, 0.5, 0.3, 1, 0.5, *top, threshold)
    rpn.min_size = float(min_size)
    anchors, deltas = xy(detection["rpn/anchors_yxyx"]), xy(detection["rpn/box_logits"][image])
    logits = torch.from_numpy(detection["rpn/obj_logits"][image : image + 1])
    boxes = rpn.box_coder.decode(deltas, [anchors])[None, :, 0]
    size_hw = tuple(detection["valid_size_hw"][image].tolist())
    (found,), _ = rpn.filter_proposals(boxes, logits, [size_hw], [len(anchors)])
    count = int(detection["proposals/num"][image])
    assert len(found) == count
    close(found, xy(detection["proposals/boxes_yxyx"][image, :count]), atol=1e-4)


def test_box_matching(detection, image):
    count = int(detection["roi/num_sampled"][image])
    _, _, high, low, _, crowd = detection["roi/num_samples_posratio_pos_neghi_neglo_void"].tolist()
    boxes, iscrowd = objects_of(detection, image)
    candidates = xy(detection["roi/sampled_proposals_yxyx"][image, :count])
    expected = torch.from_numpy(detection["roi/match"][image, :count])
    match = match_candidates(candidates, boxes, iscrowd, high, low, crowd_overlap=crowd)
    certain = crowd_is_certain(candidates, boxes, iscrowd, crowd)
    assert torch.equal(match[certain], expected[certain])
    labels = torch.from_numpy(np.append(detection["gt_categories"][image], 0))
    things = torch.where(expected >= 0, labels[expected] - int(detection["num_stuff"]) + 1, 0)
    assert torch.equal(things, torch.from_numpy(detection["roi/class_labels"][image, :count]))


def sampled(detection: dict, key: str) -> np.ndarray:
    """A ragged array of the second stage, images concatenated."""
    return np.concatenate([rows[:n] for rows, n in zip(detection[key], detection["roi/num_sampled"], strict=True)])


def test_box_losses_and_gradients(detection):
    classes = torch.from_numpy(sampled(detection, "roi/class_labels"))
    positive = classes > 0
    objects = []  # of every sample; any box for those that have none
    for i, count in enumerate(detection["roi/num_sampled"]):
        match, (boxes, _) = torch.from_numpy(detection["roi/match"][i, :count]), objects_of(detection, i)
        objects.append(torch.cat((boxes, torch.ones(1, 4)))[match.where(match >= 0, len(boxes))])
    proposals = xy(sampled(detection, "roi/sampled_proposals_yxyx"))
    box_weights = detection["roi/bbx_reg_weights"].tolist()
    targets = encode_boxes(torch.cat(objects), proposals, [box_weights[i] for i in (1, 0, 3, 2)])
    close(targets[positive], xy(detection["roi/box_targets_of_positives"]), atol=1e-6)
    logits = torch.from_numpy(detection["roi/cls_logits"]).requires_grad_()
    deltas = xy(detection["roi/box_logits"]).requires_grad_()
    with_background = torch.cat((torch.zeros(len(deltas), 1, 4), deltas), dim=1)
    weights = torch.full((len(classes),), 1 / len(classes))
    beta = float(detection["roi/sigma"]) ** -2
    classifier, box = roi_losses(logits, with_background, classes, targets, weights, beta)
    close(classifier, detection["roi/cls_loss"])
    close(box, detection["roi/bbx_loss"])
    (classifier + box).backward()
    close(logits.grad, detection["roi/grad_cls_logits"])
    close(deltas.grad, xy(detection["roi/grad_box_logits"]))


def test_level_of_a_box(detection):
    """Canonical scale 224 on level 2 of 0 to 3 is torchvision's 224 on level 4 of 2 to 5."""
    mapper = LevelMapper(2, 5, canonical_scale=224, canonical_level=4)
    proposals, counts = detection["roi/input_proposals_yxyx"], detection["roi/num_input_proposals"]
    boxes = [xy(of_image[:count]) for of_image, count in zip(proposals, counts, strict=True)]
    np.testing.assert_array_equal(mapper(boxes).numpy(), detection["roi/fpn_level_of_input_proposals"])


def test_box_operations(golden):
    data = files(golden, "box_ops")
    a, b = xy(data["a"]), xy(data["b"])
    close(pairwise_iou(a, b), data["ious"])
    close(covered_share(a, b).T, data["overlap"])
    coder = BoxCoder((1.0, 1.0, 1.0, 1.0))
    close(coder.decode_single(xy(data["shift"]), a), xy(data["shift_boxes"]), atol=1e-4)
    close(coder.encode_single(b, a[: len(b)]), xy(data["calculate_shift"]), atol=1e-6)
