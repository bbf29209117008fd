"""SSD: anchors, matching, mining, losses at the edges, detections, micro-batches and ranks against the big batch."""

import copy

import pytest
import torch
from contract import assert_losses_are_divided_as_announced, assert_resolved_options_build_it_again
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_on_ranks
from torch import nn
from torchvision.ops import box_iou

from toolkit.base.box_ops import cxcywh_to_xyxy
from toolkit.base.distributed import all_reduce, world
from toolkit.detectors.ssd.criterion import (
    IGNORED_LABEL,
    PaddedObjects,
    SsdCriterion,
    decode_offsets,
    encode_boxes,
    level_anchors,
    match_anchors,
    mine_negatives,
    pad_objects,
)
from toolkit.models import build_detector
from toolkit.models.weights.mapping import map_weights
from toolkit.step.losses import window_denominators

TINY = {"backbone": "lcnet_035", "strides": [16, 32, 64, -1], "channels": [16, 16, 16, 8],
        "aspect_ratios": [[2, 3], [2], [2], [2]]}  # fmt: skip
NAMES = ["circle", "square", "star"]


def detector(architecture="ssdlite", class_names=NAMES, **options):
    torch.manual_seed(0)
    return build_detector(architecture, class_names=class_names, **{**TINY, **options})


def target(boxes=(), labels=(), crowd=None, hw=(64, 96)):
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    crowd = torch.tensor(crowd if crowd is not None else [0] * len(boxes), dtype=torch.int64)
    labels = torch.tensor(labels, dtype=torch.int64)
    return {"boxes": boxes, "labels": labels, "iscrowd": crowd, "size": torch.tensor(hw)}


def batch_of(count, hw=(64, 96), seed=0):
    images = torch.randint(0, 256, (count, 3, *hw), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return images, torch.tensor(hw).expand(count, 2)


@pytest.fixture(scope="module")
def tiny():
    return detector()


def losses_of(model, targets, denominators=None):
    images, sizes = batch_of(len(targets), tuple(targets[0]["size"].tolist()))
    outputs = model(images, sizes)
    outputs["logits"].retain_grad(), outputs["offsets"].retain_grad()
    losses, metrics = model.criterion(outputs, targets, denominators or {"positives": 1.0})
    return outputs, losses, metrics


@pytest.mark.parametrize("hw", [(64, 96), (100, 150)])
@pytest.mark.parametrize("architecture", ["ssd", "ssdlite"])
def test_every_output_has_its_anchor_whatever_the_size(architecture, hw):
    outputs = detector(architecture).eval()(*batch_of(2, hw))
    count = len(outputs["anchors"])
    assert outputs["logits"].shape == (2, count, 4) and outputs["offsets"].shape == (2, count, 4)
    assert outputs["image_hw"].tolist() == list(hw)
    # The anchors lie where their cell looks: the centre of mass of a level is the image's, and levels grow coarser.
    cells = [(-(-hw[0] // s), -(-hw[1] // s)) for s in (16, 32, 64)] + [(1, 1)]
    per_cell = [2 + 2 * len(ratios) for ratios in TINY["aspect_ratios"]]
    assert count == sum(rows * columns * n for (rows, columns), n in zip(cells, per_cell, strict=True))
    first = outputs["anchors"][: cells[0][0] * cells[0][1] * 6]
    torch.testing.assert_close(first[:, :2].mean(0), torch.tensor([0.5, 0.5]))
    assert outputs["anchors"].min() >= 0 and outputs["anchors"].max() <= 1
    if architecture == "ssd":  # a backbone that works on whole patches of two cells: 3 x 5 become 4 x 6
        outputs = detector(backbone="mobilevitv2_050").eval()(*batch_of(1, (96, 160)))
        assert outputs["logits"].shape[1] == len(outputs["anchors"]) == 6 * 60 + 4 * (24 + 6 + 1)


def test_a_cells_anchors_follow_the_order_of_the_ratios_each_once():
    given = level_anchors((1, 1), (0.2, 0.3), [3, 2, 3])
    sides = torch.tensor([[1, 1], [1.5, 1.5], *([r**p, r**-p] for r in (3, 2) for p in (0.5, -0.5))]) * 0.2
    torch.testing.assert_close(given, torch.cat([torch.full((6, 2), 0.5), sides], dim=1))
    assert given[[0, 1, 4, 5, 2, 3]].equal(level_anchors((1, 1), (0.2, 0.3), [2, 3]))


boxes_in_unit_square = st.lists(
    st.tuples(*[st.floats(0.0, 0.875, width=32)] * 2, *[st.floats(0.0625, 0.125, width=32)] * 2, st.booleans()),
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(images=st.lists(boxes_in_unit_square, min_size=1, max_size=3), threshold=st.sampled_from([0.3, 0.5]))
def test_matching_is_that_of_a_loop_over_boxes(images, threshold):
    generator = torch.Generator().manual_seed(0)
    anchors = torch.rand(40, 4, generator=generator) * torch.tensor([1, 1, 0.3, 0.3]) + torch.tensor([0, 0, 0.02, 0.02])
    width = max(1, *(len(boxes) for boxes in images))
    shape = (len(images), width)
    objects = PaddedObjects(torch.zeros(*shape, 4), torch.full(shape, -1), torch.zeros(shape, dtype=torch.bool))
    for i, boxes in enumerate(images):
        for j, (x, y, w, h, crowd) in enumerate(boxes):
            objects.boxes[i, j] = torch.tensor([x, y, x + w, y + h])
            objects.labels[i, j], objects.crowd[i, j] = j, crowd
    labels, index = match_anchors(anchors, objects, threshold)
    for i, boxes in enumerate(images):
        expected = loop_match(cxcywh_to_xyxy(anchors), objects.boxes[i, : len(boxes)], objects.crowd[i], threshold)
        assert labels[i].tolist() == expected
        found = labels[i] > 0
        assert index[i][found].tolist() == (labels[i][found] - 1).tolist()


def loop_match(anchors, boxes, crowd, threshold):
    """Labels by the rules, one anchor and one box at a time; label j + 1 for box j."""
    labels = []
    real = [j for j in range(len(boxes)) if not crowd[j]]
    for anchor in anchors:
        overlaps = {j: float(iou_plus(anchor, boxes[j])) for j in real}
        best = max(overlaps, key=overlaps.get, default=None)
        label = best + 1 if best is not None and overlaps[best] >= threshold else 0
        least = threshold * float((anchor[2:] - anchor[:2]).prod())
        if not label and any(crowd[j] and float(common_area(anchor, boxes[j])) >= least for j in range(len(boxes))):
            label = IGNORED_LABEL
        labels.append(label)
    for j in real:
        labels[int(torch.stack([iou_plus(anchor, boxes[j]) for anchor in anchors]).argmax())] = j + 1
    return labels


def common_area(a, b):
    return (torch.minimum(a[2:], b[2:]) - torch.maximum(a[:2], b[:2])).clamp(min=0).prod()


def iou_plus(a, b):
    common = common_area(a, b)
    return common / ((a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod() - common + 1e-5)


@settings(max_examples=40, deadline=None)
@given(
    box=st.tuples(*[st.floats(0, 0.5, width=32)] * 2, *[st.floats(0.015625, 0.5, width=32)] * 2),
    anchor=st.tuples(*[st.floats(0, 1, width=32)] * 2, *[st.floats(0.015625, 1, width=32)] * 2),
    variances=st.tuples(st.sampled_from([0.1, 1.0]), st.sampled_from([0.2, 1.0])),
)
def test_decoding_is_the_inverse_of_encoding(box, anchor, variances):
    x, y, width, height = box
    boxes, anchors = torch.tensor([[x, y, x + width, y + height]]), torch.tensor([anchor])
    decoded = decode_offsets(encode_boxes(boxes, anchors, *variances), anchors, *variances)
    torch.testing.assert_close(decoded, boxes, rtol=0, atol=1e-5)


def test_the_hardest_negatives_of_each_image_count():
    labels = torch.zeros(3, 30, dtype=torch.int64)
    labels[0, [3, 4]], labels[1, :12], labels[2, 20:] = 1, 2, IGNORED_LABEL
    loss = torch.rand(3, 30, generator=torch.Generator().manual_seed(0))
    mined = mine_negatives(loss, labels, ratio=3)
    assert mined.sum(1).tolist() == [6, 18, 0]
    assert not bool(mined[labels != 0].any())
    chosen, left = loss[0][mined[0]], loss[0][~mined[0] & (labels[0] == 0)]
    assert chosen.min() > left.max()


def test_without_boxes_the_losses_are_zero_and_keep_the_graph(tiny):
    targets = [target(), target()]
    [denominators] = window_denominators([tiny.denominators(targets)], "cpu")
    tiny.zero_grad()
    _, losses, metrics = losses_of(tiny, targets, denominators)
    assert {name: float(loss.detach()) for name, loss in losses.items()} == {"loss_cls": 0.0, "loss_loc": 0.0}
    assert [float(part) for part in metrics["positives"]] == [0.0, 2.0]
    sum(losses.values()).backward()
    gradients = [p.grad for p in tiny.parameters() if p.requires_grad]
    assert all(g is not None and not g.any() for g in gradients)


def test_labels_are_smoothed_in_training_mode_only():
    anchors, hw = level_anchors((3, 3), (0.3, 0.5), [2]), torch.tensor([64, 96])
    generator = torch.Generator().manual_seed(0)
    logits, offsets = (torch.randn(2, len(anchors), n, generator=generator) for n in (4, 4))
    parts = (logits, offsets, anchors, hw, [target([[20, 10, 60, 50]], [0]), target([[1, 1, 95, 63]], [2])])
    plain, smooth = SsdCriterion(), nn.Sequential(SsdCriterion(label_smoothing=0.2))
    expected = plain(*parts, {"positives": 1.0})[0]
    in_training = smooth.train()[0](*parts, {"positives": 1.0})[0]
    in_evaluation = smooth.eval()[0](*parts, {"positives": 1.0})[0]
    assert in_evaluation["loss_cls"].equal(expected["loss_cls"])
    assert in_evaluation["loss_loc"].equal(in_training["loss_loc"])
    labels, _ = match_anchors(anchors, pad_objects(parts[-1], hw), 0.5)
    used = mine_negatives(-logits.log_softmax(-1)[..., 0], labels, 3) | (labels > 0)
    by_torch = nn.functional.cross_entropy(logits[used], labels[used], reduction="sum", label_smoothing=0.2)
    torch.testing.assert_close(in_training["loss_cls"], by_torch)
    assert float(by_torch) != pytest.approx(float(expected["loss_cls"]), rel=1e-3)


def test_anchors_in_a_crowd_are_neither_positive_nor_negative(tiny):
    """The left half is a crowd; a box in the right half asks for negatives, which come from the right half alone."""
    crowd_only = [target([[0, 0, 48, 64]], [1], crowd=[1])]
    assert tiny.denominators(crowd_only) == {"positives": 0.0}
    _, losses, _ = losses_of(tiny, crowd_only)
    assert not any(bool(loss) for loss in losses.values())
    outputs, losses, _ = losses_of(tiny, [target([[0, 0, 48, 64], [70, 20, 90, 50]], [1, 2], crowd=[1, 0])])
    losses["loss_cls"].backward()
    used = outputs["logits"].grad[0].abs().sum(-1) > 0
    left, _, right, _ = cxcywh_to_xyxy(outputs["anchors"]).unbind(-1)
    in_crowd = (0.5 - left).clamp(min=0) / (right - left) >= tiny.multibox.iou_threshold
    assert used.any() and in_crowd.any() and not (used & in_crowd & (left < 0.4)).any()


def test_self_weighting_scales_the_regression_in_training_and_travels_with_the_weights():
    model = detector(self_weighting_steps=4, self_weighting_every=2)
    reduced = {"loss_cls_unscaled": 6.0, "loss_loc_unscaled": 2.0, "positives/sum": 5.0}
    model.multibox.balance_losses(reduced)
    assert float(model.multibox.balance.weight) == 1.0
    model.multibox.balance_losses(reduced)
    assert float(model.multibox.balance.weight) == pytest.approx(3.0)
    model.multibox.balance_losses({**reduced, "loss_loc_unscaled": 6.0})  # weighted by 3 now, so 2 without it
    again = detector(self_weighting_steps=4, self_weighting_every=2)
    again.load_state_dict(model.state_dict())
    for each in (model, again):
        each.multibox.balance_losses({**reduced, "loss_loc_unscaled": 9.0})
        assert float(each.multibox.balance.weight) == pytest.approx(12 / 5)
    targets = [target([[20, 10, 60, 50]], [0])]
    model.backbone.eval()
    _, training, _ = losses_of(model, targets)
    model.multibox.eval()
    _, evaluation, _ = losses_of(model, targets)
    ratio = float((training["loss_loc"] / evaluation["loss_loc"]).detach())
    assert ratio == pytest.approx(12 / 5, rel=0.05)  # the heads' batch norms saw another batch
    assert detector().multibox.balance_losses(reduced) is None


def test_losses_are_divided_as_announced(tiny):
    targets = [target([[20, 10, 60, 50], [0, 0, 30, 30]], [0, 2]), target(), target([[1, 1, 95, 63]], [1])]
    outputs, _, metrics = losses_of(tiny, targets)
    assert_losses_are_divided_as_announced(tiny, outputs, targets)
    assert tiny.denominators(targets) == {"positives": float(metrics["positives"][0])}  # counted on the CPU, and there


def test_one_image_of_one_class_goes_through_a_map_of_one_cell():
    model = detector(class_names=["cell"]).train()
    _, losses, _ = losses_of(model, [target([[20, 10, 60, 50]], [0], hw=(64, 64))])
    assert all(bool(loss.isfinite()) and loss > 0 for loss in losses.values())


def test_a_level_behind_a_map_of_one_pixel_has_no_gradient_where_the_padding_is():
    """In bfloat16 too: there, CPUs with instructions for it return what was in the memory before."""
    model = detector("ssd", strides=[16, 32, 64, 128], channels=[16, 16, 64, 128]).train()
    convolution = model.extra[-1][1][0]
    assert convolution.kernel_size == (3, 3)
    images, sizes = batch_of(2, (64, 64))
    for _ in range(10):
        spoilt = [torch.full((2**k,), torch.nan) for k in range(8, 18)]  # what is allocated next may be found there
        del spoilt
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(images, sizes)
        (outputs["logits"].float().square().sum() + outputs["offsets"].float().square().sum()).backward()
        gradient = convolution.weight.grad.clone()
        assert gradient[:, :, 1, 1].isfinite().all() and gradient[:, :, 1, 1].any()
        gradient[:, :, 1, 1] = 0
        assert not gradient.any()


def gradients(micro_batches: list[list[int]]) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of the window, this rank taking its share of every micro-batch; averaged over ranks as DDP."""
    rank, world_size = world()
    model = detector(norm="group").double()
    images, sizes = batch_of(4)
    targets = [target([[20, 10, 60, 50], [0, 0, 30, 30]], [0, 2]), target(), target([[1, 1, 95, 63]], [1]),
               target([[40, 30, 52, 45]], [2])]  # fmt: skip
    window = [[i for i in batch if i % world_size == rank] for batch in micro_batches]
    counts = [model.denominators([targets[i] for i in batch]) for batch in window]
    denominators = window_denominators(counts, "cpu", dtype=torch.float64)
    total = 0.0
    for batch, divided_by in zip(window, denominators, strict=True):
        losses, _ = model.criterion(model(images[batch], sizes[batch]), [targets[i] for i in batch], divided_by)
        loss = sum(losses.values())
        loss.backward()
        total += float(loss.detach())
    return total, [all_reduce(p.grad, "mean") for p in model.parameters() if p.grad is not None]


def test_micro_batches_and_ranks_make_the_gradients_of_the_big_batch():
    total, expected = gradients([[0, 1, 2, 3]])
    ranks = run_on_ranks(gradients, 2, [[0, 1], [2, 3]])
    micro = gradients([[0], [1], [2, 3]])
    assert [micro[0], sum(rank[0] for rank in ranks) / 2] == pytest.approx([total] * 2, rel=1e-9)
    for _, found in (micro, *ranks):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def outputs_for(model, boxes, labels, hw=(64, 96), logit=9.0):
    """Outputs of an image in which the anchors nearest to the boxes say so, and all others say background."""
    anchors, image_hw = model.anchors(hw, "cpu")
    logits = torch.zeros(1, len(anchors), len(NAMES) + 1)
    logits[..., 0] = 12.0
    taken = torch.zeros(len(anchors), dtype=torch.bool)
    offsets = torch.zeros(1, len(anchors), 4)
    for i, (box, label) in enumerate(zip(boxes, labels, strict=True)):
        box = torch.tensor(box) / torch.tensor([hw[1], hw[0]] * 2)
        overlaps = box_iou(box[None], cxcywh_to_xyxy(anchors))[0]
        nearest = int(overlaps.masked_fill(taken, -1.0).argmax())
        taken[nearest] = True
        offsets[0, nearest] = encode_boxes(box, anchors[nearest], *model.multibox.variances)
        logits[0, nearest] = 0.0
        logits[0, nearest, label + 1] = logit - i
    return {"logits": logits, "offsets": offsets, "anchors": anchors, "image_hw": image_hw}


def test_detections_are_in_pixels_of_the_original_best_first_one_for_each_object(tiny):
    boxes, labels = [[20.0, 10, 60, 50], [22, 10, 60, 48], [22, 12, 62, 50], [70, 10, 90, 60]], [0, 0, 1, 2]
    outputs = outputs_for(tiny, boxes, labels)
    sizes, orig = torch.tensor([[64, 96]]), torch.tensor([[128, 288]])
    [found] = tiny.postprocess(outputs, sizes, orig, score_threshold=0.5)
    assert found["labels"].dtype == torch.int64 and found["boxes"].dtype == torch.float32
    assert found["scores"].tolist() == sorted(found["scores"].tolist(), reverse=True)
    wanted = torch.tensor([boxes[0], boxes[2], boxes[3]]) * torch.tensor([3.0, 2, 3, 2])
    assert found["labels"].tolist() == [0, 1, 2]  # the second one is the first one again, the third another class
    torch.testing.assert_close(found["boxes"], wanted, rtol=0, atol=1e-2)
    [top] = tiny.postprocess(outputs, sizes, orig, top_k=1)
    assert len(top["scores"]) == 1 and top["scores"][0] == found["scores"].max()
    background = torch.zeros_like(outputs["logits"])
    background[..., 0] = 30.0
    [empty] = tiny.postprocess({**outputs, "logits": background}, sizes, orig)
    assert empty["boxes"].shape == (0, 4)
    outputs["offsets"][..., 2:] += 15.0  # e^3 times as large: clipped to the image, whose padding is taken off
    [large] = tiny.postprocess(outputs, torch.tensor([[48, 96]]), torch.tensor([[96, 192]]), 0.5)
    assert large["boxes"].tolist()[0] == [0.0, 0.0, 192.0, 96.0]


def test_other_classes_start_from_the_rows_of_those_of_the_same_name(tiny):
    """One of (star, moon, circle) that takes over one of (circle, square, star) scores the common classes alike."""
    names = ["star", "moon", "circle"]
    torch.manual_seed(1)
    other = build_detector("ssdlite", class_names=names, **TINY)
    table = map_weights(
        other.state_dict(), tiny.state_dict(), class_tensors=other.class_tensors, classes=names, source_classes=NAMES
    )
    assert not table.new and not table.unused
    other.load_state_dict(table.state)
    images, sizes = batch_of(2)
    source, found = (model.eval()(images, sizes) for model in (copy.deepcopy(tiny), other))
    assert found["offsets"].equal(source["offsets"])
    torch.testing.assert_close(found["logits"][..., [0, 1, 3]], source["logits"][..., [0, 3, 1]])


@pytest.mark.parametrize(("architecture", "norm"), [("ssd", "batch"), ("ssdlite", "frozen"), ("ssd", "group"),
                                                   ("ssdlite", "sync")])  # fmt: skip
def test_resolved_options_build_the_same_detector(architecture, norm):
    options = {"norm": norm, "nms_threshold": 0.3, "score_threshold": 0.2, "self_weighting_steps": 4}
    model = detector(architecture, **options)
    assert_resolved_options_build_it_again(model, NAMES)
    assert (model.nms_threshold, model.score_threshold) == (0.3, 0.2)
