"""Faster R-CNN: matching, sampling, losses, detections."""

import inspect

import pytest
import torch
from contract import assert_resolved_options_build_it_again
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.models import resnet50
from torchvision.models.detection import faster_rcnn, fasterrcnn_resnet50_fpn
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou

from toolkit.base.seeding import seed_images
from toolkit.data.table import Category
from toolkit.detectors.faster_rcnn.build import torchvision_settings
from toolkit.detectors.faster_rcnn.criterion import BACKGROUND, IGNORED, covered_share, match_candidates, sample, shares
from toolkit.detectors.faster_rcnn.options import FasterRcnnOptions, ResNet50V2Options, TwoStageOptions
from toolkit.models import build_detector
from toolkit.models.final import load_detector_folder
from toolkit.models.start import start_detector
from toolkit.step.freezing import FrozenBatchNorm2d, eval_mode

CLASSES = ("red", "white", "platelet")
TINY = {
    "backbone": "test_resnet", "norm": "group", "freeze": "none", "strides": [8, 16], "fpn_channels": 16,
    "anchor_sizes": [[16], [32], [48]], "aspect_ratios": [1.0], "representation_size": 24,
    "rpn_pre_nms_top_n_train": 40, "rpn_post_nms_top_n_train": 30, "rpn_pre_nms_top_n_test": 40,
    "rpn_post_nms_top_n_test": 20, "rpn_batch_size_per_image": 32, "box_batch_size_per_image": 16,
}  # fmt: skip
EVERYTHING = {"rpn_batch_size_per_image": 10**6, "box_batch_size_per_image": 10**6}


def tiny(seed=0, **options):
    torch.manual_seed(seed)
    return build_detector("faster_rcnn", class_names=CLASSES, **{**TINY, **options})


def target(boxes, labels=None, iscrowd=None):
    count = len(boxes)
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor(labels or [i % len(CLASSES) for i in range(count)], dtype=torch.int64),
        "iscrowd": torch.tensor(iscrowd or [0] * count, dtype=torch.int64),
    }


TARGETS = [
    target([[4, 4, 30, 28], [20, 30, 60, 62]]),
    target([]),
    target([[10, 10, 40, 40]]),
    target([[0, 0, 64, 40], [8, 8, 24, 24]], iscrowd=[1, 0]),
]


def images_of(count, side=64):
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
    return images, torch.tensor([[side, side]] * count)


def losses_of(detector, images, sizes, targets, images_in_all=None, seed=1):
    torch.manual_seed(seed)
    outputs = detector(images, sizes, targets)
    losses, metrics = detector.criterion(outputs, targets, {"images": float(images_in_all or len(targets))})
    assert tuple(losses) == detector.loss_names and tuple(metrics) == detector.metric_names
    return losses, outputs


def gradients(detector):
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in detector.parameters()])


corner_and_size = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 30), st.integers(1, 30))
boxes = st.lists(corner_and_size, min_size=1, max_size=12).map(
    lambda rows: torch.tensor([(x, y, x + w, y + h) for x, y, w, h in rows], dtype=torch.float32)
)


@given(boxes, boxes, st.booleans())
@settings(max_examples=60, deadline=None)
def test_matches_are_torchvisions(candidates, objects, best_of_each_box):
    ours = match_candidates(candidates, objects, torch.zeros(len(objects)), 0.6, 0.3, best_of_each_box=best_of_each_box)
    iou = box_iou(objects, candidates)
    if best_of_each_box:  # torchvision also takes all candidates for an object that none of them touches
        iou = torch.cat([row[None] for row in iou if row.max() > 0] or [iou[:0]])
        assert ours[iou.amax(0) >= 0.6].ge(0).all() if len(iou) else (ours == BACKGROUND).all()
        if len(iou) < len(objects):
            return
    assert torch.equal(ours, Matcher(0.6, 0.3, best_of_each_box)(iou))


@given(boxes, boxes)
@settings(max_examples=40, deadline=None)
def test_nothing_that_lies_in_a_crowd_region_is_positive_or_negative(candidates, objects):
    crowd = torch.zeros(len(objects)).index_fill(0, torch.tensor(0), 1)
    match = match_candidates(candidates, objects, crowd, 0.5, 0.3, best_of_each_box=True)
    covered = covered_share(candidates, objects[:1])[0] >= 0.7
    assert (match[covered] == IGNORED).all()
    without = match_candidates(candidates, objects[1:], crowd[1:], 0.5, 0.3, best_of_each_box=True)
    expected = torch.where(without >= 0, without + 1, without)
    assert torch.equal(match[~covered], expected[~covered])


def test_crowd_regions_and_objects_that_nothing_touches_are_never_matched():
    def match(candidate, box, iscrowd):
        boxes = torch.tensor([[0.0, 0.0, candidate, candidate]]), torch.tensor([box])
        return match_candidates(*boxes, torch.tensor([iscrowd]), 0.7, 0.3, best_of_each_box=True).tolist()

    assert match(10.0, [0.0, 0.0, 10.0, 10.0], 1) == [IGNORED]  # a crowd region itself
    assert match(100.0, [0.0, 0.0, 10.0, 10.0], 1) == [BACKGROUND]
    assert match(10.0, [50.0, 50.0, 60.0, 60.0], 0) == [BACKGROUND]
    candidates = torch.tensor([[0.0, 0, 4, 4], [8, 8, 12, 12]])  # however low its IoU where there is no object
    boxes = torch.tensor([[[0.0, 0, 4, 3]], [[0.0, 0, 4, 3]]])
    matched = match_candidates(candidates, boxes, None, 0.9, 0.8, lowest=0.1, padding=torch.tensor([[False], [True]]))
    assert matched.tolist() == [[BACKGROUND, IGNORED], [BACKGROUND, BACKGROUND]]


@given(st.lists(st.sampled_from([IGNORED, BACKGROUND, 0, 1]), min_size=1, max_size=40), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_samples_are_as_many_as_asked_for_positives_first(rows, size):
    match = torch.tensor(rows)
    index, chosen = sample(match, size, 0.25, torch.rand(len(rows)))
    positives = min(int(size * 0.25), int((match >= 0).sum()))
    negatives = min(size - positives, int((match == BACKGROUND).sum()))
    assert len(set(index.tolist())) == len(index) == min(size, len(rows))
    assert (chosen >= 0).sum() == positives and (chosen == BACKGROUND).sum() == negatives
    kept = chosen != IGNORED
    assert torch.equal(chosen[kept], match[index[kept]])
    assert float(shares(chosen).sum()) == pytest.approx(1.0 if positives + negatives else 0.0)


def test_samples_are_drawn_evenly():
    match = torch.tensor([0] * 6 + [BACKGROUND] * 10)
    drawn = torch.zeros(16)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        drawn[sample(match, 8, 0.25, torch.rand(16, generator=generator))[0]] += 1
    assert drawn[:6] / 2000 == pytest.approx(torch.full((6,), 2 / 6), abs=0.05)
    assert drawn[6:] / 2000 == pytest.approx(torch.full((10,), 6 / 10), abs=0.05)


def test_losses_and_gradients_are_torchvisions_on_one_image():
    """All anchors and proposals sampled, so that nothing is drawn; torchvision labels classes from 1."""
    detector = tiny(**EVERYTHING).train()
    images, sizes = images_of(1)
    losses, _ = losses_of(detector, images, sizes, TARGETS[:1])
    sum(losses.values()).backward()
    ours = gradients(detector)
    detector.zero_grad()
    features, images_hw = detector.features(images, sizes)
    theirs_targets = [{**t, "labels": t["labels"] + 1} for t in TARGETS[:1]]
    proposals, rpn = detector.rpn(ImageList(images, images_hw), features, theirs_targets)
    _, roi = detector.roi_heads(features, proposals, images_hw, theirs_targets)
    theirs = {**rpn, **roi}
    assert theirs.keys() == losses.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(losses[name], value, rtol=1e-5, atol=1e-7, msg=name)
    sum(theirs.values()).backward()
    torch.testing.assert_close(ours, gradients(detector), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [EVERYTHING, {}], ids=["nothing is drawn", "samples are drawn"])
def test_accumulation_is_the_big_batch(options):
    """A draw is the image's own; the next step draws another one."""
    detector = tiny(**options).train()
    images, sizes = images_of(4)

    def gradient(step, *parts):
        detector.zero_grad()
        targets = [{**target, "image_id": number} for number, target in enumerate(TARGETS)]
        seed_images(targets, 0, step)
        for micro, part in enumerate(parts):
            losses, _ = losses_of(detector, images[part], sizes[part], targets[part], 4, seed=micro)
            sum(losses.values()).backward()
        return gradients(detector)

    big = gradient(0, slice(0, 4))
    assert (gradient(0, slice(1, 4), slice(0, 1)) - big).norm() <= 1e-5 * big.norm()
    assert ((gradient(1, slice(0, 4)) - big).norm() > 1e-2 * big.norm()) == (options != EVERYTHING)


@pytest.mark.parametrize("training", [True, False])
def test_losses_with_an_object_without_area_are_finite_and_reach_every_parameter(training):
    detector = tiny().train(training)
    losses, _ = losses_of(detector, *images_of(2), [target([[3, 3, 3, 20]]), target([[5, 5, 25, 25]])])
    assert all(torch.isfinite(value) for value in losses.values())
    sum(losses.values()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in detector.parameters())


def test_evaluation_losses_do_not_depend_on_the_generator_or_the_batch():
    detector = tiny().eval()
    images, sizes = images_of(2)
    together, _ = losses_of(detector, images, sizes, TARGETS[:2], seed=1)
    apart = [losses_of(detector, images[i : i + 1], sizes[i : i + 1], TARGETS[i : i + 1], 2, seed=i)[0] for i in (0, 1)]
    for name in detector.loss_names:
        torch.testing.assert_close(together[name], apart[0][name] + apart[1][name], rtol=1e-5, atol=1e-6)


def test_autocast_keeps_boxes_and_losses_in_float32():
    detector = tiny().train()
    images, sizes = images_of(2)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = detector(images, sizes, TARGETS[:2])
    assert {v.dtype for v in outputs.values()} <= {torch.float32, torch.int64}
    losses, _ = detector.criterion(outputs, TARGETS[:2], {"images": 2.0})
    full, _ = losses_of(detector, images, sizes, TARGETS[:2], seed=0)
    assert losses["loss_objectness"].item() == pytest.approx(full["loss_objectness"].item(), rel=0.05)


def test_padded_images_are_detected_within_their_own_size_with_and_without_targets():
    detector = tiny(score_threshold=0.0).eval()
    images, _ = images_of(2)
    sizes, original = torch.tensor([[64, 64], [40, 33]]), torch.tensor([[128, 64], [80, 66]])
    with torch.no_grad():
        outputs, with_targets = detector(images, sizes), detector(images, sizes, TARGETS[:2])
    first, second = found = detector.postprocess(outputs, sizes, original)
    torch.testing.assert_close(found, detector.postprocess(with_targets, sizes, original), rtol=1e-4, atol=1e-4)
    assert len(second["boxes"]) and (second["boxes"][:, 2] <= 66).all() and (second["boxes"][:, 3] <= 80).all()
    assert first["boxes"][:, 3].max() > 64
    assert (first["scores"].diff() <= 0).all() and set(first["labels"].tolist()) <= {0, 1, 2}
    few = detector.postprocess(outputs, sizes, original, score_threshold=float(first["scores"][5]), top_k=3)
    assert torch.equal(few[0]["boxes"], first["boxes"][:3])
    assert (few[1]["scores"] > first["scores"][5]).all()


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
        rows, labels = torch.arange(len(image["labels"])), image["labels"] + 1
        assert 0 < len(rows) <= min(7, len(own))
        assert image["logits"].shape == (len(rows), 4) and image["boxes_per_class"].shape == (len(rows), 4, 4)
        assert torch.equal(image["boxes"], image["boxes_per_class"][rows, labels])
        torch.testing.assert_close(image["scores"], image["logits"].softmax(1)[rows, labels])
        assert (image["scores"].diff() <= 0).all()
        assert (image["boxes"] >= 0).all() and (image["boxes"] <= 64).all()


@pytest.mark.parametrize(("architecture", "options"), [
    ("faster_rcnn", TINY | {"nms_threshold": 0.3, "score_threshold": 0.2, "detections_per_image": 7}),
    ("faster_rcnn", TINY | {"mean": [0.1, 0.2, 0.3], "box_convs": 1, "rpn_convs": 2, "head_norm": "sync",
                            "norm": "frozen"}),
    ("fasterrcnn_resnet50_fpn_v2", {"pretrained_backbone": "FILE", "rpn_nms_thresh": 0.6}),
])  # fmt: skip
def test_resolved_options_build_the_same_detector(architecture, options, tmp_path):
    if "pretrained_backbone" in options:  # which freezes what the resolved options say
        options = options | {"pretrained_backbone": str(tmp_path / "weights.pth")}
        torch.save(resnet50().state_dict(), options["pretrained_backbone"])
    detector = build_detector(architecture, class_names=CLASSES, **options)
    assert_resolved_options_build_it_again(detector, CLASSES)
    assert detector.resolved_options()["freeze"] == options.get("freeze", "paper")
    assert not detector.resolved_options()["pretrained_backbone"]
    assert detector.roi_heads.nms_thresh == options.get("nms_threshold", 0.5)
    assert detector.roi_heads.score_thresh == options.get("score_threshold", 0.05)
    assert detector.roi_heads.detections_per_img == options.get("detections_per_image", 100)


def test_default_settings_are_torchvisions_resnet50_fpn():
    with torch.device("meta"):
        theirs = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91)
    detector = build_detector("faster_rcnn", class_names=["thing"] * 90)
    assert sum(p.numel() for p in detector.parameters()) + sum(
        m.weight.numel() * 2 for m in detector.modules() if isinstance(m, FrozenBatchNorm2d)
    ) == sum(p.numel() for p in theirs.parameters())
    trained = {name.split(".")[2] for name, p in detector.backbone.named_parameters("backbone") if p.requires_grad}
    assert trained == {"layer2", "layer3", "layer4", "inner_blocks", "layer_blocks"}
    for freeze, more in (("paper", set()), ("norms", {"conv1", "layer1"})):
        of_backbone = build_detector("fasterrcnn_resnet50_fpn", class_names=["a"], freeze=freeze).backbone
        assert {name.split(".")[1] for name, p in of_backbone.named_parameters() if p.requires_grad} == trained | more


@pytest.mark.parametrize("options", [
    {"strides": [16], "anchor_sizes": [[16, 32]]},
    {"backbone": "mobilenetv3_small_050", "norm": "batch", "box_convs": 1, "head_norm": "group", "rpn_convs": 2},
    {"backbone": "test_convnext", "head_norm": "batch"},
], ids=["one level", "convolutions in the heads", "convnext"])  # fmt: skip
def test_levels_heads_and_backbones(options, tmp_path):
    detector = tiny(**options).train()
    images, sizes = images_of(2)
    losses, _ = losses_of(detector, images, sizes, TARGETS[:2])
    sum(losses.values()).backward()
    detector.save_final(tmp_path, [Category(i, name) for i, name in enumerate(CLASSES)])
    loaded, categories, _ = load_detector_folder(tmp_path)
    assert [c.name for c in categories] == list(CLASSES)
    with torch.no_grad(), eval_mode(detector):
        torch.testing.assert_close(loaded(images, sizes)["logits"], detector(images, sizes)["logits"])


def test_another_set_of_classes_takes_everything_but_the_rows_of_new_ones(tmp_path):
    """Rows of classes of the same name are kept, wherever they stand; background is the first row of both."""
    source, folder = tiny(seed=1), tmp_path / "final"
    source.save_final(folder, [Category(i, name) for i, name in enumerate(CLASSES)])
    options = FasterRcnnOptions(pretrained=str(folder))
    torch.manual_seed(2)
    said = []
    started = start_detector(options, ("platelet", "new"), tmp_path, resumed_from=None, say=said.append)
    assert "roi_heads.box_predictor.cls_score.weight" in (tmp_path / "pretrained.txt").read_text() and said
    theirs, ours = source.state_dict(), started.state_dict()
    for name, tensor in ours.items():
        if "box_predictor" not in name:
            assert torch.equal(tensor, theirs[name]), name
            continue
        each = 4 if "bbox_pred" in name else 1
        of_class = tensor.unflatten(0, (3, each)), theirs[name].unflatten(0, (4, each))
        assert torch.equal(of_class[0][0], of_class[1][0]) and torch.equal(of_class[0][1], of_class[1][3])
        assert not any(torch.equal(of_class[0][2], row) for row in of_class[1]) or "bias" in name


@pytest.mark.parametrize("cls", [TwoStageOptions, FasterRcnnOptions, ResNet50V2Options])
def test_the_two_stages_have_all_settings_of_torchvision_with_its_values(cls):
    of_torchvision = {
        name: parameter.default
        for name, parameter in inspect.signature(faster_rcnn.FasterRCNN).parameters.items()
        if name.startswith(("rpn_", "box_")) and parameter.default is not None
    }
    assert torchvision_settings(cls()) == of_torchvision | {"bbox_reg_weights": [10.0, 10.0, 5.0, 5.0]}


def test_seamless_settings_of_the_two_stages_are_used():
    """min_size, void_threshold, neg_threshold_lo, bbx_reg_weights and sigma of its configuration."""
    targets = [target([[8, 8, 40, 40], [0, 0, 64, 48]], iscrowd=[0, 1]), target([[20, 20, 50, 60]])]
    images, sizes = images_of(2)

    def outputs_of(**options):
        detector = tiny(rpn_batch_size_per_image=4096, box_batch_size_per_image=4096, **options).train()
        torch.manual_seed(1)
        return detector, detector(images, sizes, targets)

    plain, before = outputs_of()
    ignored = {name: (before[f"{name}_weights"] == 0).sum() for name in ("rpn", "roi")}
    _, found = outputs_of(rpn_crowd_overlap=0.3, box_crowd_overlap=0.3)
    assert all((found[f"{name}_weights"] == 0).sum() > ignored[name] for name in ignored)
    _, found = outputs_of(box_bg_iou_from=0.2)
    assert (found["roi_weights"] == 0).sum() > ignored["roi"]
    _, found = outputs_of(bbox_reg_weights=[1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(found["roi_targets"] * torch.tensor([10, 5, 5 / 3, 5 / 4]), before["roi_targets"])
    detector, _ = outputs_of(rpn_min_size=24.0)
    sides = [boxes[:, 2:] - boxes[:, :2] for boxes in detector.proposals(*detector.features(images, sizes))]
    assert all(len(image_sides) and image_sides.min() >= 24 for image_sides in sides)
    losses = plain.criterion(before, targets, {"images": 2.0})[0]
    for stage, beta, name in (("rpn", 1.0, "loss_rpn_box_reg"), ("box", 0.5, "loss_box_reg")):
        betas = {"rpn_smooth_l1_beta": 1 / 9, "box_smooth_l1_beta": 1 / 9, f"{stage}_smooth_l1_beta": beta}
        detector, found = outputs_of(**betas)
        changed = detector.criterion(found, targets, {"images": 2.0})[0]
        assert [key for key in losses if changed[key] != losses[key]] == [name] and changed[name] < losses[name]
