"""Faster R-CNN against the numbers of seamseg; every case is enumerated from the files.

Boxes of the files are (y0, x0, y1, x1) and deltas (dy, dx, dh, dw); ours have x first. What differs from the original
is asserted as such here and listed in docs/differences.md.
"""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_files import Arrays, arrays, ending, group, parametrize
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor
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


def schedulers(folder: Path) -> dict:
    path = folder / "seamseg_schedulers.json"
    return json.loads(path.read_text())


def pytest_generate_tests(metafunc):
    folder = metafunc.config.getoption("golden")
    cases = {
        "meter_case": lambda: ending(folder, "meters", "/sequence", "seamseg"),
        "schedule_case": lambda: list(schedulers(folder)),
        "image": lambda: range(len(files(folder, "detection_loss")["num_gt"])),
    }
    parametrize(metafunc, cases)


@pytest.fixture(scope="session")
def detection(golden) -> Arrays:
    return files(golden, "detection_loss")


def xy(array: np.ndarray) -> Tensor:
    """Boxes and deltas with x before y, in pairs."""
    values = np.ascontiguousarray(array)
    return torch.from_numpy(values)[..., [1, 0, 3, 2]]


def close(ours, theirs, rtol: float = RTOL, atol: float = 1e-7, name: str = "") -> None:
    ours = torch.as_tensor(ours).detach().numpy()
    assert_allclose(ours, theirs, rtol=rtol, atol=atol, err_msg=name)


STATISTICS = {"value": "value", "global_avg": "mean", "total": "sum"}


def test_momentum_meters(golden, meter_case):
    """A vector is a meter for each number. An empty meter has no mean here; the original says 0."""
    data = group(files(golden, "meters"), meter_case, "/")
    sequence = data["sequence"]
    momentum = float(data["momentum"])
    columns = sequence.reshape(len(sequence), -1)
    meters = [SmoothedValue(momentum=momentum) for _ in columns[0]]
    assert data["mean_before_first_update"] == 0
    assert np.isnan(meters[0].global_avg)
    for i, row in enumerate(columns):
        for meter, number in zip(meters, row, strict=True):
            meter.update(number)
        for name, theirs in STATISTICS.items():
            expected = data[theirs][i]

            ours = [getattr(meter, name) for meter in meters]
            assert_allclose(ours, expected.reshape(-1), rtol=RTOL, err_msg=f"{name} after update {i}")
        assert meters[0].count == pytest.approx(data["count"][i], rel=RTOL)


def test_schedules(golden, schedule_case):
    """Per batch, the original's rate is one step early. A burn-in ends that, and does not move the schedule, which is
    where it would be without."""
    case = schedulers(golden)[schedule_case]
    config = case["config"]
    per_epoch = case["epoch_length"]
    every = per_epoch if config["update_mode"] == "epoch" else 1
    total = config["epochs"] * per_epoch
    burn_in = config["burn_in_steps"] * every
    name = config["type"]
    options = our_options(config, every)
    base = np.array(case["base_lrs"])
    if name == "linear":
        base = base * config["params"]["from"]
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in base]
    optimizer = torch.optim.SGD(groups)
    schedule = Schedule(
        optimizer,
        name,
        total,
        every=every,
        warmup_steps=burn_in,
        warmup_factor=config["burn_in_start"],
        **options,
    )

    def check(rates, expected: list[float], step: int) -> None:
        assert_allclose(rates, expected, rtol=1e-10, atol=1e-15, err_msg=f"step {step}")

    def check_ours(step: int, expected: list[float]) -> None:
        schedule.set(step)
        rates = [options["lr"] for options in optimizer.param_groups]
        check(rates, expected, step)

    check_ours(0, case["lr_after_construction"])
    first_milestone = min(options.get("milestones", []), default=total)
    for batch, expected in enumerate(case["lr_used_by_each_batch"]):
        step = batch + (every == 1)
        if burn_in and step <= burn_in:
            if step % every == 0 and step < first_milestone:  # within an epoch our rate rises further
                check_ours(step, expected)
            continue
        if burn_in:
            step -= every
        unmoved = lr_factor(step, name, total_steps=total, every=every, **options)
        check(base * unmoved, expected, step)
        if not burn_in or name in ("multistep", "step"):
            check_ours(step, expected)


def our_options(config: dict, every: int) -> dict:
    """The same schedule's options here."""
    params = config["params"]
    name = config["type"]
    if name == "linear":
        return {"final_factor": params["to"] / params["from"]}
    gamma = params["gamma"]
    if name == "poly":
        return {"power": gamma}
    if name == "step":
        return {"gamma": gamma, "step_size": params["step_size"] * every}
    milestones = [milestone * every for milestone in params["milestones"]]
    return {"gamma": gamma, "milestones": milestones}


def objects_of(detection: Arrays, image: int) -> tuple[Tensor, Tensor]:
    """Objects and crowd regions of an image, xyxy, and which are crowd."""
    count = int(detection["num_gt"][image])
    objects = xy(detection["gt_boxes_yxyx"][image, :count])
    crowds = int(detection["num_crowd"][image])
    regions = xy(detection["crowd_boxes_yxyx"][image, :crowds])
    iscrowd = torch.tensor([0] * count + [1] * crowds)
    return torch.cat([objects, regions]), iscrowd


def crowd_is_certain(candidates: Tensor, boxes: Tensor, iscrowd: Tensor, threshold: float):
    """Not where whole pixels, which the original counts, could be on the other side of the threshold."""
    if not iscrowd.any():
        return torch.ones(len(candidates), dtype=torch.bool)
    sides = candidates[:, 2:] - candidates[:, :2]
    rounding = sides.sum(1) / sides.prod(1)
    crowd = boxes[iscrowd.bool()]
    covered = covered_share(candidates, crowd).amax(0)
    far = (covered - threshold).abs() > rounding
    return far | (covered == 0) | (covered >= 1 - 1e-6)


def test_anchor_matching(detection, image):
    """The original ignores anchors that reach beyond the image; torchvision, and so we, train them."""
    anchors = xy(detection["rpn/anchors_yxyx"])
    expected = torch.from_numpy(detection["rpn/match"][image])
    boxes, iscrowd = objects_of(detection, image)
    height, width = detection["valid_size_hw"][image].tolist()
    left, top, right, bottom = anchors.unbind(1)
    inside = (left >= 0) & (top >= 0) & (right <= width) & (bottom <= height)
    assert (expected[~inside] == IGNORED).all()
    anchors = anchors[inside]
    expected = expected[inside]
    high = float(detection["rpn/pos_threshold"])
    low = float(detection["rpn/neg_threshold"])
    crowd = float(detection["rpn/void_threshold"])
    match_by_iou = partial(
        match_candidates,
        anchors,
        boxes,
        iscrowd,
        high,
        low,
        crowd_overlap=crowd,
    )
    match = match_by_iou(best_of_each_box=True)
    certain = crowd_is_certain(anchors, boxes, iscrowd, crowd)
    forced = (match >= 0) & (match_by_iou() < 0)  # the best anchor of an object that none overlaps enough
    by_iou = certain & ~forced
    assert torch.equal(match[by_iou], expected[by_iou])
    forced &= certain
    for row in match[forced].unique():
        of_object = forced & (match == row)
        assert (expected[of_object] >= 0).any()
    assert (expected[certain] == BACKGROUND).any()


def test_anchor_targets(detection, image):
    match = torch.from_numpy(detection["rpn/match"][image])
    positive = match >= 0
    labels = torch.where(match == BACKGROUND, 0, -1)
    labels[positive] = 1
    expected = torch.from_numpy(detection["rpn/obj_labels"][image])
    assert torch.equal(labels, expected)
    boxes, _ = objects_of(detection, image)
    anchors = xy(detection["rpn/anchors_yxyx"])
    weights = (1.0, 1.0, 1.0, 1.0)
    ours = encode_boxes(boxes[match[positive]], anchors[positive], weights)
    theirs = xy(detection["rpn/box_targets"][image])
    close(ours, theirs[positive], atol=1e-6)


def test_rpn_losses_and_gradients(detection):
    """The original divides by the anchors of the batch; our weights divide by those of each image."""
    match = torch.from_numpy(detection["rpn/match"]).flatten()
    logits = torch.from_numpy(detection["rpn/obj_logits"]).flatten().requires_grad_()
    deltas = xy(detection["rpn/box_logits"]).flatten(0, 1).requires_grad_()
    targets = xy(detection["rpn/box_targets"]).flatten(0, 1)
    counted = (match != IGNORED).float()
    weights = counted / counted.sum().clamp(min=1)
    beta = float(detection["rpn/sigma"]) ** -2
    objectness, box = rpn_losses(
        logits,
        deltas,
        match,
        targets,
        weights,
        beta,
    )
    close(objectness, detection["rpn/obj_loss"])
    close(box, detection["rpn/bbx_loss"])
    (objectness + box).backward()
    close(logits.grad, detection["rpn/grad_obj_logits"].reshape(-1))
    expected = xy(detection["rpn/grad_box_logits"])
    close(deltas.grad, expected.flatten(0, 1))


def test_proposals(detection, image):
    """One level, as the original suppresses; ours goes level by level, as torchvision does."""
    pre, post, min_size = detection["proposals/pre_post_nms_min_size"].tolist()
    threshold = float(detection["proposals/nms_threshold"])
    before_nms = {"training": pre, "testing": pre}
    after_nms = {"training": post, "testing": post}
    rpn = RegionProposalNetwork(
        None,
        None,
        0.5,
        0.3,
        1,
        0.5,
        before_nms,
        after_nms,
        threshold,
    )
    rpn.min_size = float(min_size)
    anchors = xy(detection["rpn/anchors_yxyx"])
    deltas = xy(detection["rpn/box_logits"][image])
    logits = torch.from_numpy(detection["rpn/obj_logits"][[image]])
    boxes = rpn.box_coder.decode(deltas, [anchors])[None, :, 0]
    size_hw = tuple(detection["valid_size_hw"][image].tolist())
    (found,), _ = rpn.filter_proposals(boxes, logits, [size_hw], [len(anchors)])
    count = int(detection["proposals/num"][image])
    assert len(found) == count
    expected = xy(detection["proposals/boxes_yxyx"][image, :count])
    close(found, expected, atol=1e-4)


def test_box_matching(detection, image):
    count = int(detection["roi/num_sampled"][image])
    limits = detection["roi/num_samples_posratio_pos_neghi_neglo_void"]
    _, _, high, low, _, crowd = limits.tolist()
    boxes, iscrowd = objects_of(detection, image)
    candidates = xy(detection["roi/sampled_proposals_yxyx"][image, :count])
    expected = torch.from_numpy(detection["roi/match"][image, :count])
    match = match_candidates(
        candidates,
        boxes,
        iscrowd,
        high,
        low,
        crowd_overlap=crowd,
    )
    certain = crowd_is_certain(candidates, boxes, iscrowd, crowd)
    assert torch.equal(match[certain], expected[certain])
    with_any = np.append(detection["gt_categories"][image], 0)
    categories = torch.from_numpy(with_any)
    first_thing = int(detection["num_stuff"])
    labels = categories[expected] - first_thing + 1
    things = torch.where(expected >= 0, labels, 0)
    expected = torch.from_numpy(detection["roi/class_labels"][image, :count])
    assert torch.equal(things, expected)


def sampled(detection: Arrays, key: str) -> np.ndarray:
    """A ragged array of the second stage, images concatenated."""
    counts = detection["roi/num_sampled"]
    of_images = zip(detection[key], counts, strict=True)
    return np.concatenate([rows[:count] for rows, count in of_images])


def test_box_losses_and_gradients(detection):
    classes = torch.from_numpy(sampled(detection, "roi/class_labels"))
    positive = classes > 0
    objects = []  # of every sample; any box for those that have none
    for i, count in enumerate(detection["roi/num_sampled"]):
        match = torch.from_numpy(detection["roi/match"][i, :count])
        boxes, _ = objects_of(detection, i)
        with_any = torch.cat((boxes, torch.ones(1, 4)))
        rows = match.where(match >= 0, len(boxes))
        objects.append(with_any[rows])
    proposals = xy(sampled(detection, "roi/sampled_proposals_yxyx"))
    y, x, height, width = detection["roi/bbx_reg_weights"].tolist()
    targets = encode_boxes(torch.cat(objects), proposals, [x, y, width, height])
    expected = xy(detection["roi/box_targets_of_positives"])
    close(targets[positive], expected, atol=1e-6)
    logits = torch.from_numpy(detection["roi/cls_logits"]).requires_grad_()
    deltas = xy(detection["roi/box_logits"]).requires_grad_()
    background = torch.zeros(len(deltas), 1, 4)
    with_background = torch.cat((background, deltas), dim=1)
    num_samples = len(classes)
    weights = torch.full((num_samples,), 1 / num_samples)
    beta = float(detection["roi/sigma"]) ** -2
    classifier, box = roi_losses(
        logits,
        with_background,
        classes,
        targets,
        weights,
        beta,
    )
    close(classifier, detection["roi/cls_loss"])
    close(box, detection["roi/bbx_loss"])
    (classifier + box).backward()
    close(logits.grad, detection["roi/grad_cls_logits"])
    close(deltas.grad, xy(detection["roi/grad_box_logits"]))


def test_level_of_a_box(detection):
    """Canonical scale 224 on level 2 of 0 to 3 is torchvision's 224 on level 4 of 2 to 5."""
    mapper = LevelMapper(2, 5, canonical_scale=224, canonical_level=4)
    proposals = detection["roi/input_proposals_yxyx"]
    counts = detection["roi/num_input_proposals"]
    boxes = []
    for of_image, count in zip(proposals, counts, strict=True):
        boxes.append(xy(of_image[:count]))
    levels = mapper(boxes).numpy()
    assert_array_equal(levels, detection["roi/fpn_level_of_input_proposals"])


def test_box_operations(golden):
    data = files(golden, "box_ops")
    a = xy(data["a"])
    b = xy(data["b"])
    close(pairwise_iou(a, b), data["ious"])
    close(covered_share(a, b).T, data["overlap"])
    coder = BoxCoder((1.0, 1.0, 1.0, 1.0))
    decoded = coder.decode_single(xy(data["shift"]), a)
    close(decoded, xy(data["shift_boxes"]), atol=1e-4)
    encoded = coder.encode_single(b, a[: len(b)])
    close(encoded, xy(data["calculate_shift"]), atol=1e-6)
