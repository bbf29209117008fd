"""Faster R-CNN: losses of torchvision, samples of each image's own, detections for graphs."""

import pytest
import torch
from rcnn_data import EVERYTHING, TARGETS, assert_losses_are_torchvisions, images_of, losses_of, target, tiny

from toolkit.base.seeding import seed_images
from toolkit.detectors.faster_rcnn import model
from toolkit.detectors.faster_rcnn.model import MAX_KEPT_ANCHORS
from toolkit.models import build_detector


def test_losses_and_gradients_are_torchvisions_on_one_image():
    assert_losses_are_torchvisions(tiny(**EVERYTHING).train())


def drawn(detector, seed, step):
    torch.manual_seed(seed)
    targets = [{**each, "image_id": number} for number, each in enumerate(TARGETS)]
    seed_images(targets, 0, step)
    return losses_of(detector, targets)[0]["loss_objectness"]


def test_samples_are_the_images_own_and_others_in_the_next_step():
    detector = tiny().train()
    assert drawn(detector, seed=1, step=0) == drawn(detector, seed=2, step=0)
    assert drawn(detector, seed=1, step=0) != drawn(detector, seed=1, step=1)
    everything = tiny(**EVERYTHING).train()
    assert drawn(everything, seed=1, step=0) == drawn(everything, seed=1, step=1)


@pytest.mark.parametrize("training", [True, False])
def test_an_object_without_area_has_finite_losses(training):
    detector = tiny().train(training)
    losses, _ = losses_of(detector, [target("3 3 3 20"), target("5 5 25 25")])
    sum(losses.values()).backward()
    for parameter in detector.parameters():
        assert parameter.grad.isfinite().all()


def test_anchors_are_kept_for_a_few_sizes_and_can_be_trained_with_behind_inference_mode():
    detector = tiny()
    made = []
    for side in range(1, MAX_KEPT_ANCHORS + 3):
        grids = [torch.Size((side, 4))] * len(detector.rpn.anchor_generator.sizes)
        with torch.inference_mode():
            anchors = detector._anchors(grids, torch.device("cpu"))
        assert detector._anchors(grids, torch.device("cpu")) is anchors
        assert torch.equal(anchors, detector._make_anchors(grids, torch.device("cpu")))
        assert not anchors.is_inference()
        made.append(anchors)
    assert list(map(id, detector._kept_anchors.values())) == list(map(id, made[2:]))


def test_anchors_are_sampled_while_a_gpu_chooses_proposals(monkeypatch):
    order = []
    detector = tiny().train()
    begin = detector._begin_proposals
    sample = model.sampled_anchors
    monkeypatch.setattr(detector, "_begin_proposals", lambda *given: lambda: order.append("read") or begin(*given)())
    monkeypatch.setattr(model, "sampled_anchors", lambda *given: order.append("sample") or sample(*given))
    losses_of(detector, TARGETS)
    assert order == ["sample", "read"]


def test_detections_with_logits_are_one_class_per_proposal():
    detector = tiny(score_threshold=0.0).eval()
    images, sizes = images_of(2)
    with torch.no_grad():
        features, images_hw = detector.features(images, sizes)
        found = detector.detect_with_logits(features, images_hw, top_k=7)
        proposals = detector.proposals(features, images_hw)
        pooled = detector.box_pool(features, proposals, images_hw)
    assert detector.box_head(pooled).shape[1] == detector.representation_size == 24
    for image, own in zip(found, proposals, strict=True):
        count = len(image["labels"])
        rows = torch.arange(count)
        labels = image["labels"] + 1
        assert 0 < count <= min(7, len(own))
        assert image["logits"].shape == (count, 4)
        assert torch.equal(image["boxes"], image["boxes_per_class"][rows, labels])
        torch.testing.assert_close(image["scores"], image["logits"].softmax(1)[rows, labels])
        assert (image["scores"].diff() <= 0).all()
        assert (image["boxes"] >= 0).all()
        assert (image["boxes"] <= 64).all()


@pytest.mark.parametrize(
    "options",
    [
        {"strides": [16], "anchor_sizes": [[16, 32]]},
        {"backbone": "mobilenetv3_small_050", "norm": "batch", "box_convs": 1, "head_norm": "group", "rpn_convs": 2},
        {"backbone": "test_convnext", "head_norm": "batch"},
        {"mean": [0.1, 0.2, 0.3], "norm": "frozen", "head_norm": "sync", "box_convs": 1},
    ],
    ids=["one level", "convolutions in the heads", "convnext", "sync"],
)
def test_levels_heads_and_backbones_train(options):
    detector = tiny(**options).train()
    losses, _ = losses_of(detector, TARGETS[:2])
    sum(losses.values()).backward()
    assert all(p.grad is not None for p in detector.rpn.parameters())
    again = build_detector(class_names=["a"], **detector.resolved_options())
    assert str(again.backbone) == str(detector.backbone)
    assert again.mean == detector.mean


def outputs_of(**options):
    detector = tiny(rpn_batch_size_per_image=4096, box_batch_size_per_image=4096, **options).train()
    torch.manual_seed(1)
    targets = [target("8 8 40 40, 0 0 64 48", crowds="1"), target("20 20 50 60")]
    losses, outputs = losses_of(detector, targets)
    return losses, outputs


def ignored(outputs, stage):
    return int((outputs[f"{stage}_weights"] == 0).sum())


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        (
            {
                "rpn_crowd_overlap": 0.3,
                "box_crowd_overlap": 0.3,
            },
            ("rpn", "roi"),
        ),
        ({"box_bg_iou_from": 0.2}, ("roi",)),
    ],
    ids=["void_threshold", "neg_threshold_lo"],
)
def test_seamless_settings_leave_more_candidates_out(options, stages):
    _, before = outputs_of()
    _, found = outputs_of(**options)
    for stage in stages:
        assert ignored(found, stage) > ignored(before, stage)


def test_seamless_weights_of_deltas_and_least_sides_are_used():
    """bbx_reg_weights and min_size of its configuration."""
    _, before = outputs_of()
    _, found = outputs_of(bbox_reg_weights=[1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(found["roi_targets"] * torch.tensor([10, 5, 5 / 3, 5 / 4]), before["roi_targets"])
    detector = tiny(rpn_min_size=24.0).eval()
    for boxes in detector.proposals(*detector.features(*images_of(2))):
        assert len(boxes)
        assert (boxes[:, 2:] - boxes[:, :2]).min() >= 24


@pytest.mark.parametrize(
    ("setting", "beta", "name"),
    [("rpn_smooth_l1_beta", 1.0, "loss_rpn_box_reg"), ("box_smooth_l1_beta", 0.5, "loss_box_reg")],
)
def test_each_stage_has_a_sigma_of_its_own(setting, beta, name):
    losses, _ = outputs_of()
    changed, _ = outputs_of(**{setting: beta})
    assert [key for key in losses if changed[key] != losses[key]] == [name]
    assert changed[name] < losses[name]
