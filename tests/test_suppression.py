"""Geometry of boxes; proposals, detections and samples of a batch at once are those of each image."""

import pytest
import torch
import torchvision.ops
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import MultiScaleRoIAlign, batched_nms, clip_boxes_to_image, nms, remove_small_boxes
from torchvision.ops.poolers import LevelMapper

from toolkit.base.box_ops import (
    box_iou,
    cxcywh_to_xyxy,
    denormalize_boxes,
    generalized_box_iou,
    normalize_boxes,
    pairwise_generalized_iou,
    pairwise_iou,
    xyxy_to_cxcywh,
)
from toolkit.base.boxes import common_and_union
from toolkit.detectors.faster_rcnn.model import of_one_class_each
from toolkit.detectors.faster_rcnn.regions import LevelPool, apply_deltas, best_proposals, limits_whwh
from toolkit.models import build_detector
from toolkit.models.nms import (
    _batch_at_once,
    class_wise_nms,
    nms_by_label,
    nms_keep,
    repeated_until_enough,
    sorted_nms,
    top_k_rows,
)

TWO_STAGE = {"backbone": "lcnet_035", "norm": "batch", "freeze": "none", "strides": [8, 16], "fpn_channels": 16,
             "anchor_sizes": [[16], [32]], "aspect_ratios": [1.0], "representation_size": 32,
             "score_threshold": 0.1}  # fmt: skip
SIZES = [(60, 100), (90, 70), (100, 100)]


def some_boxes(*shape: int) -> torch.Tensor:
    corner = torch.rand(*shape, 2) * 80
    return torch.cat([corner, corner + 1 + torch.rand(*shape, 2) * 30], dim=-1)


class ExportedNms(torch.nn.Module):
    def __init__(self, threshold):
        super().__init__()
        self.threshold = threshold

    def forward(self, boxes, valid, labels):
        return sorted_nms(boxes, valid, self.threshold, labels, classes=3)


@pytest.mark.parametrize("count", [0, 1, 7, 300])
@pytest.mark.parametrize("threshold", [0.3, 0.7])
def test_suppression_by_rounds_is_greedy_nms(count, threshold):
    torch.manual_seed(count)
    boxes, valid = some_boxes(3, count), torch.rand(3, count) > 0.1
    labels = torch.randint(0, 3, (3, count))
    keep = sorted_nms(boxes, valid, threshold, labels)
    scores = torch.arange(count, 0, -1).float()
    for i in range(3):
        expected = torch.zeros(count, dtype=torch.bool)
        for label in range(3):
            rows = (valid[i] & (labels[i] == label)).nonzero()[:, 0]
            expected[rows[nms(boxes[i, rows], scores[rows], threshold)]] = True
        assert torch.equal(keep[i], expected)
    if count == 7:
        exported = torch.export.export(ExportedNms(threshold), (boxes, valid, labels)).module()
        assert torch.equal(exported(boxes, valid, labels), keep)


@pytest.mark.parametrize("length, runs_needed", [(10, 1), (60, 2), (300, 3)])
def test_a_long_chain_takes_more_rounds_than_are_made_at_once(length, runs_needed):
    starts = torch.arange(float(length))[:, None] * 4  # each box overlaps its neighbours alone
    chain = torch.cat([starts, torch.zeros(length, 1), starts + 10, torch.full((length, 1), 10.0)], dim=1)[None]
    runs, expected = [], [i % 2 == 0 for i in range(length)]

    def compute():
        runs.append(sorted_nms(chain, torch.ones(1, length, dtype=torch.bool), 0.3)[0].tolist())
        return [torch.tensor(runs[-1])], None

    assert repeated_until_enough(compute)[0][0].tolist() == expected
    assert len(runs) == runs_needed and runs[-1] == expected and expected not in runs[:-1]


@pytest.mark.parametrize("usual, largest", [(1024, 4096), (200, 79), (5, 79), (5, 5)])  # 4 classes of 40: 80 ** 2
@pytest.mark.parametrize("trusting", [True, False])
def test_classes_are_suppressed_on_a_device_as_on_a_cpu(monkeypatch, usual, largest, trusting):
    monkeypatch.setattr("toolkit.models.nms.USUAL_GROUP", usual)
    monkeypatch.setattr("toolkit.models.nms.MAX_GROUP", largest)
    torch.manual_seed(0)
    boxes, scores = some_boxes(3, 4, 40), torch.rand(3, 4, 40)
    scores = scores.where(scores > 0.6, 0)
    scores[1] = 0

    def at_once():
        return _batch_at_once(boxes, scores, 0.4)

    found = repeated_until_enough(lambda: ([at_once()], None))[0][0] if trusting else at_once()
    expected = class_wise_nms(boxes, scores, 0.4)
    exported = nms_keep(boxes.flatten(0, 1), scores.flatten(0, 1), 0.4)
    assert torch.equal(expected.flatten(0, 1) > 0, exported)
    for own, theirs in zip(found.flatten(1), expected.flatten(1), strict=True):
        assert torch.equal(top_k_rows(own[None], 160)[1][0, : (own > 0).sum()],
                           top_k_rows(theirs[None], 160)[1][0, : (theirs > 0).sum()])  # fmt: skip


@pytest.mark.parametrize("counts", [[30, 0, 17], [0, 0, 0]])
def test_detections_are_those_of_torchvision(counts):
    torch.manual_seed(sum(counts))
    logits, deltas = torch.randn(sum(counts), 4), torch.randn(sum(counts), 4, 4)
    detector = build_detector("faster_rcnn", class_names=["a", "b", "c"], **TWO_STAGE).eval()
    outputs = {"boxes": some_boxes(sum(counts)).split(counts), "logits": logits, "deltas": deltas}
    found = detector.postprocess(outputs, torch.tensor(SIZES), torch.tensor(SIZES), 0.0, 20)
    theirs = detector.roi_heads.postprocess_detections(logits, deltas.flatten(1), outputs["boxes"], SIZES)
    for own, boxes, scores, labels in zip(found, *theirs, strict=True):
        assert torch.equal(own["boxes"], boxes[:20]) and torch.equal(own["scores"], scores[:20])
        assert torch.equal(own["labels"], labels[:20] - 1)


@pytest.mark.parametrize(
    ("counts", "most", "sharpness"),
    [([30, 0, 17], 20, 1.0), ([30, 0, 17], 4, 1.0), ([0, 0, 0], 20, 1.0), ([1, 1, 1], 20, 9.0)],  # 9: one class alone
)
def test_the_best_class_of_each_proposal_is_that_of_each_image(counts, most, sharpness):
    torch.manual_seed(sum(counts))
    logits, boxes = sharpness * torch.randn(sum(counts), 4), some_boxes(sum(counts), 4)
    found = of_one_class_each(logits, boxes, counts, SIZES, 0.1, 0.5, most)
    images = zip(found, logits.split(counts), boxes.split(counts), SIZES, strict=True)
    for own, image_logits, image_boxes, size_hw in images:
        clipped = clip_boxes_to_image(image_boxes, size_hw)
        expected = one_class_each(image_logits, clipped, 0.1, 0.5, most)
        assert own.keys() == expected.keys() | {"on_host"} and torch.equal(own["on_host"]["boxes"], own["boxes"])
        assert all(torch.equal(own[name], expected[name]) for name in expected)


def one_class_each(logits, boxes, score_threshold, nms_threshold, top_k):
    """Of one image, whose boxes (P, 1 + C, 4) are clipped: suppression class by class, then a proposal's best class."""
    scores = logits.softmax(dim=1)
    row, label = (scores[:, 1:] > score_threshold).nonzero().unbind(1)
    kept = batched_nms(boxes[row, label + 1], scores[row, label + 1], label, nms_threshold)
    left = torch.zeros_like(scores).index_put((row[kept], label[kept] + 1), scores[row[kept], label[kept] + 1])
    best, label = left[:, 1:].max(dim=1)
    rows = best.sort(descending=True, stable=True).indices[:top_k]
    rows = rows[best[rows] > 0]
    return {"boxes": boxes[rows, label[rows] + 1], "labels": label[rows], "scores": best[rows], "logits": logits[rows],
            "boxes_per_class": boxes[rows]}  # fmt: skip


def test_proposals_are_those_of_each_image():
    torch.manual_seed(0)
    per_level, limits = [200, 50, 12], limits_whwh(SIZES, torch.device("cpu"))
    boxes, logits = some_boxes(3, sum(per_level)) - 5, torch.randn(3, sum(per_level))
    boxes[0, :20, 2:] = boxes[0, :20, :2]  # without area
    options = {"before": 60, "after": 40, "threshold": 0.7, "min_size": 1e-3, "min_score": 0.2}
    found, known = best_proposals(boxes, logits, per_level, limits, **options)
    assert all(map(torch.equal, found, known))
    for own, image_boxes, image_logits, size_hw in zip(found, boxes, logits, SIZES, strict=True):
        kept_boxes, kept_scores = [], []
        for level_boxes, level in zip(image_boxes.split(per_level), image_logits.split(per_level), strict=True):
            best, rows = level.topk(min(60, len(level)))
            clipped, scores = clip_boxes_to_image(level_boxes[rows], size_hw), best.sigmoid()
            good = remove_small_boxes(clipped, 1e-3)
            good = good[scores[good] >= 0.2]
            left = good[nms(clipped[good], scores[good], 0.7)]
            kept_boxes.append(clipped[left])
            kept_scores.append(scores[left])
        order = torch.cat(kept_scores).argsort(descending=True, stable=True)[:40]
        torch.testing.assert_close(own, torch.cat(kept_boxes)[order], rtol=0, atol=0)


def test_boxes_are_decoded_as_torchvision_decodes_them():
    torch.manual_seed(0)
    deltas, anchors, weights = torch.randn(3, 50, 4) * 3, some_boxes(50), (10.0, 10.0, 5.0, 5.0)
    theirs = BoxCoder(weights).decode(deltas.flatten(0, 1), [anchors] * 3).view(3, 50, 4)
    torch.testing.assert_close(apply_deltas(deltas, anchors, weights), theirs, rtol=0, atol=0)


@pytest.mark.parametrize("counts", [[40, 0, 21], [0, 0], [1]])
def test_boxes_are_pooled_from_their_levels_as_torchvision_pools_them(counts):
    torch.manual_seed(1)
    maps = {name: torch.randn(len(counts), 3, side, side, dtype=torch.float64, requires_grad=True) for name, side in
            (("0", 32), ("1", 16), ("2", 8))}  # fmt: skip
    boxes = [some_boxes(count).double() * torch.rand(count, 1) * 3 for count in counts]
    theirs = MultiScaleRoIAlign(["0", "1", "2"], 3, 2, canonical_scale=32)
    ours = LevelPool.of(theirs)
    results = []
    for pool, known in ((theirs, ()), (ours, ()), (ours, ([each.clone() for each in boxes],))):
        pool.scales, pool.map_levels = [1 / 4, 1 / 8, 1 / 16], LevelMapper(2, 4, 32, 4)
        pooled = pool(maps, boxes, [(128, 128)] * len(counts), *known)
        gradients = torch.autograd.grad((pooled * torch.arange(pooled.numel()).view(pooled.shape)).sum(),
                                        list(maps.values()), allow_unused=True)  # fmt: skip
        results.append((pooled, *gradients))
    (pooled, *of_maps), *ours_of = results
    for our, *our_of_maps in ours_of:
        torch.testing.assert_close(our, pooled, rtol=0, atol=0)
        for our_gradient, gradient in zip(our_of_maps, of_maps, strict=True):  # summed in another order
            torch.testing.assert_close(our_gradient, gradient, rtol=1e-12, atol=1e-9)


def test_a_box_that_is_no_number_does_not_end_the_step():
    """The guard sees it in the losses of the same step and says where it came from."""
    maps = {name: torch.randn(1, 3, side, side) for name, side in (("0", 32), ("1", 16))}
    boxes = some_boxes(5)
    pool = LevelPool(["0", "1"], 3, 2, canonical_scale=32)
    pool.scales, pool.map_levels = [1 / 4, 1 / 8], LevelMapper(2, 3, 32, 4)
    sound = pool(maps, [boxes], [(128, 128)])
    boxes[2] = torch.nan
    pooled = pool(maps, [boxes], [(128, 128)])
    rows = [0, 1, 3, 4]
    assert torch.equal(pooled[rows], sound[rows]) and pooled.isfinite().all()


@st.composite
def boxes_xyxy(draw, count: int | None = None):
    """Ordered boxes (N, 4) float64, some of them without area, some equal."""
    count = draw(st.integers(0, 6)) if count is None else count
    whole = hnp.arrays("float64", (count, 4), elements=st.floats(0, 64, width=16))
    corner_and_size = torch.from_numpy(draw(whole))
    return torch.cat([corner_and_size[:, :2], corner_and_size[:, :2] + corner_and_size[:, 2:]], dim=1)


@given(boxes_xyxy(), st.tuples(st.integers(1, 2000), st.integers(1, 2000)))
def test_conversions_have_inverses(boxes, hw):
    torch.testing.assert_close(cxcywh_to_xyxy(xyxy_to_cxcywh(boxes)), boxes)
    torch.testing.assert_close(xyxy_to_cxcywh(boxes), torchvision.ops.box_convert(boxes, "xyxy", "cxcywh"))
    size = torch.tensor(hw)
    torch.testing.assert_close(denormalize_boxes(normalize_boxes(boxes, size), size), boxes)


def test_normalising_divides_x_by_the_width_and_keeps_images_apart():
    boxes = torch.tensor([[[10.0, 20, 30, 40]], [[10.0, 20, 30, 40]]])
    normalized = normalize_boxes(boxes, torch.tensor([[100, 200], [50, 10]]))
    torch.testing.assert_close(normalized, torch.tensor([[[0.05, 0.2, 0.15, 0.4]], [[1.0, 0.4, 3.0, 0.8]]]))


@given(boxes_xyxy(), boxes_xyxy())
def test_overlaps_of_all_pairs_equal_torchvision_where_it_is_defined(first, second):
    for ours, theirs in (
        (pairwise_iou, torchvision.ops.box_iou),
        (pairwise_generalized_iou, torchvision.ops.generalized_box_iou),
    ):
        value, wanted = ours(first, second), theirs(first, second)
        assert value.shape == (len(first), len(second)) and value.isfinite().all()
        torch.testing.assert_close(value[wanted.isfinite()], wanted[wanted.isfinite()])
    common, union = common_and_union(first.numpy()[:, None], second.numpy()[None])
    torch.testing.assert_close(torch.from_numpy(common), pairwise_iou(first, second) * torch.from_numpy(union))
    grown = [boxes.numpy() + [0, 0, 1, 1] for boxes in (first, second)]
    for found, wanted in zip(common_and_union(first.numpy()[:, None], second.numpy()[None], pixel=1),
                             common_and_union(grown[0][:, None], grown[1][None]), strict=True):  # fmt: skip
        torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(wanted))


@given(boxes_xyxy(count=3), boxes_xyxy(count=3))
def test_one_by_one_is_the_diagonal_a_leading_index_keeps_images_apart_and_gradients_are_finite(first, second):
    torch.testing.assert_close(generalized_box_iou(first, second), pairwise_generalized_iou(first, second).diagonal())
    stacked = pairwise_iou(torch.stack([first, second]), torch.stack([second, second]))
    torch.testing.assert_close(stacked, torch.stack([pairwise_iou(first, second), pairwise_iou(second, second)]))
    torch.testing.assert_close(box_iou(first, first), ((first[:, 2:] - first[:, :2]).prod(1) > 0).double())
    first.requires_grad_()  # also of boxes without area
    pairwise_generalized_iou(first, second).sum().backward()
    assert first.grad.isfinite().all()


@pytest.mark.parametrize("overlap", [box_iou, generalized_box_iou])
def test_nan_boxes_give_nan_and_not_a_silent_zero(overlap):
    assert overlap(torch.full((1, 4), float("nan")), torch.tensor([[0.0, 0, 1, 1]])).isnan().all()


@given(st.integers(0, 10**6), st.sampled_from([1.0, 600.0, 60_000.0, 1e7]), st.integers(1, 300), st.floats(0.2, 0.8))
def test_labels_never_suppress_each_other_wherever_their_boxes_lie(seed, extent, labels, threshold):
    """Far from the corner, outside of the image, left of it: as NMS of each label alone."""
    generator = torch.Generator().manual_seed(seed)
    centres = (torch.rand(120, 2, generator=generator) - 0.3) * extent
    sides = torch.rand(120, 2, generator=generator) * extent / 20
    boxes = torch.cat([centres - sides / 2, centres + sides / 2], dim=1)
    boxes = torch.cat([boxes, boxes + sides.repeat(1, 2) * 0.2])
    label = torch.randint(labels, (120,), generator=generator).repeat(2)
    scores = (torch.rand(240, generator=generator) * 50).round() / 50  # ties
    kept = nms_by_label(boxes, scores, label, threshold)
    alone = []
    for each in label.unique():
        rows = (label == each).nonzero()[:, 0]
        alone.append(rows[nms(boxes[rows], scores[rows], threshold)])
    expected = torch.cat(alone).sort().values
    assert torch.equal(kept.sort().values, expected)
    assert torch.equal(scores[kept], scores[kept].sort(descending=True).values)
    grouped = torch.zeros(1, labels, 240).scatter(1, label[None, None], scores[None, None].clamp(min=0.01))
    turns = class_wise_nms(boxes.expand(1, labels, -1, -1), grouped, threshold)
    assert torch.equal((turns > 0).any(1)[0].nonzero()[:, 0], expected)


def test_no_boxes_and_boxes_without_end_are_kept_apart():
    nothing = nms_by_label(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0.5)
    assert nothing.shape == (0,)
    endless = torch.tensor([[0.0, 0.0, torch.inf, torch.inf], [0.0, 0.0, 10.0, 10.0], [1.0, 1.0, 10.0, 10.0]])
    kept = nms_by_label(endless, torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0, 1, 1]), 0.5)
    assert kept.tolist() == [0, 1]
