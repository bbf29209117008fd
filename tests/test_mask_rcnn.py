"""Mask R-CNN: losses, gradients, masks and their pixels, held to torchvision's; and what the contract asks of it."""

import json
import re

import pytest
import torch
from contract import assert_losses_are_divided_as_announced, assert_resolved_options_build_it_again
from torchvision.models import detection
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import paste_masks_in_image

from toolkit.base.errors import BadInput
from toolkit.base.masks import Masks
from toolkit.base.seeding import seed_images
from toolkit.data.table import Category
from toolkit.detectors.faster_rcnn import mask_branch
from toolkit.detectors.faster_rcnn.options import FasterRcnnOptions
from toolkit.models import build_detector
from toolkit.models.final import load_detector_folder
from toolkit.models.pasted_masks import masks_in_boxes
from toolkit.models.start import start_detector
from toolkit.models.weights.pretrained import open_pretrained
from toolkit.step.freezing import eval_mode

CLASSES = ("red", "white", "platelet")
TINY = {
    "backbone": "test_resnet", "norm": "group", "freeze": "none", "strides": [8, 16], "fpn_channels": 16,
    "anchor_sizes": [[16], [32], [48]], "aspect_ratios": [1.0], "representation_size": 24,
    "rpn_pre_nms_top_n_train": 40, "rpn_post_nms_top_n_train": 30, "rpn_pre_nms_top_n_test": 40,
    "rpn_post_nms_top_n_test": 20, "rpn_batch_size_per_image": 32, "box_batch_size_per_image": 16,
    "masks": True, "mask_convs": 2, "mask_channels": 8,
}  # fmt: skip
EVERYTHING = {"rpn_batch_size_per_image": 10**6, "box_batch_size_per_image": 10**6}
ONE = {"images": 1.0, "images_with_objects": 1.0}
SIDE = 64
LOW = 0.251  # a probability, above which some of the detections of random weights are


def tiny(seed=0, **options):
    torch.manual_seed(seed)
    return build_detector("faster_rcnn", class_names=CLASSES, **{**TINY, **options})


def target(boxes, iscrowd=None, size_hw=(SIDE, SIDE), labelled=None):
    """Objects that are diamonds in their boxes."""
    rings = []
    for left, top, right, bottom in boxes:
        x, y = (left + right) / 2, (top + bottom) / 2
        rings.append((torch.tensor([[x, top], [right, y], [x, bottom], [left, y]], dtype=torch.float64).numpy(),))
    of_image = {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.arange(len(boxes)) % len(CLASSES),
        "iscrowd": torch.tensor(iscrowd or [0] * len(boxes), dtype=torch.int64),
        "masks": Masks.of(rings).drawn(size_hw),
        "size": torch.tensor(size_hw),
    }
    return of_image if labelled is None else {**of_image, "labelled": torch.tensor(labelled)}


TARGETS = [
    target([[4, 4, 30, 28], [20, 30, 60, 62]]),
    target([]),
    target([[10, 10, 40, 40]]),
    target([[0, 0, 64, 40], [8, 42, 24, 60]], iscrowd=[1, 0]),
]


def images_of(count, side=SIDE):
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
    return images, torch.tensor([[side, side]] * count)


def losses_of(detector, images, sizes, targets, denominators=None):
    outputs = detector(images, sizes, targets)
    losses, _ = detector.criterion(outputs, targets, denominators or detector.denominators(targets))
    assert tuple(losses) == detector.loss_names
    return losses, outputs


def gradients(detector):
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in detector.parameters()])


def test_losses_and_gradients_are_torchvisions_on_one_image():
    """All anchors and proposals sampled, so that nothing is drawn; torchvision labels classes from 1."""
    detector = tiny(**EVERYTHING).train()
    images, sizes = images_of(1)
    losses, outputs = losses_of(detector, images, sizes, TARGETS[:1])
    assert len(outputs["mask_logits"]) > 2 and set(outputs["roi_classes"].tolist()) == {0, 1, 2}
    sum(losses.values()).backward()
    ours = gradients(detector)
    detector.zero_grad()
    features, images_hw = detector.features(images, sizes)
    theirs_targets = [{**t, "labels": t["labels"] + 1} for t in TARGETS[:1]]
    proposals, rpn = detector.rpn(ImageList(images, images_hw), features, theirs_targets)
    _, roi = detector.roi_heads(features, proposals, images_hw, theirs_targets)
    theirs = {**rpn, **roi}
    assert theirs.keys() == losses.keys() and losses["loss_mask"] > 0
    for name, value in theirs.items():
        torch.testing.assert_close(losses[name], value, rtol=1e-5, atol=1e-7, msg=name)
    sum(theirs.values()).backward()
    torch.testing.assert_close(ours, gradients(detector), rtol=1e-4, atol=1e-6)


def test_masks_are_cropped_alike_however_many_are_read_at_once(monkeypatch):
    masks = torch.cat([each["masks"] for each in TARGETS])
    boxes = torch.cat([each["boxes"] for each in TARGETS]) + 1.5
    objects = torch.tensor([0, 4, 1, 1, 2])
    whole = mask_branch.cropped_masks(masks, boxes, objects)
    theirs = detection.roi_heads.project_masks_on_boxes(masks, boxes, objects, 28)
    torch.testing.assert_close(whole, theirs, rtol=0, atol=0)
    monkeypatch.setattr(mask_branch, "PIXELS_AT_ONCE", 2 * SIDE**2)
    torch.testing.assert_close(mask_branch.cropped_masks(masks, boxes, objects), whole, rtol=0, atol=0)


@pytest.mark.parametrize("options", [EVERYTHING, {}], ids=["nothing is drawn", "samples are drawn"])
def test_accumulation_is_the_big_batch(options):
    """Images without objects, or with crowd regions, in one micro-batch or another."""
    detector = tiny(**options).train()
    images, sizes = images_of(4)
    targets = [{**target, "image_id": number} for number, target in enumerate(TARGETS)]
    whole = detector.denominators(targets)
    assert whole == {"images": 4.0, "images_with_objects": 3.0}

    def gradient(*parts):
        detector.zero_grad()
        seed_images(targets, 0, 0)
        for part in parts:
            losses, _ = losses_of(detector, images[part], sizes[part], targets[part], whole)
            sum(losses.values()).backward()
        return gradients(detector)

    big = gradient(slice(0, 4))
    assert (gradient(slice(1, 4), slice(0, 1)) - big).norm() <= 1e-5 * big.norm()
    assert (gradient(slice(1, 2), slice(0, 1), slice(2, 4)) - big).norm() <= 1e-5 * big.norm()


def test_an_image_counts_once_however_many_samples_it_has():
    """The loss of two images is the mean of theirs; one without objects changes nothing."""
    detector = tiny().eval()
    images, sizes = images_of(3)
    some = [TARGETS[0], TARGETS[1], TARGETS[2]]
    apart = [losses_of(detector, images[[i]], sizes[[i]], [some[i]], ONE)[0]["loss_mask"] for i in range(3)]
    together, outputs = losses_of(detector, images, sizes, some)
    assert apart[1] == 0 and apart[0] > 0 and apart[2] > 0
    torch.testing.assert_close(together["loss_mask"], (apart[0] + apart[2]) / 2)
    torch.testing.assert_close(outputs["mask_weights"].sum(), torch.tensor(2.0))


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_a_batch_without_objects_reaches_every_parameter_with_zeros(norm):
    detector = tiny(head_norm=norm).train()
    images, sizes = images_of(2)
    before = {name: buffer.clone() for name, buffer in detector.roi_heads.mask_head.named_buffers()}
    targets = [TARGETS[1], target([[0, 0, 50, 50]], iscrowd=[1])]
    assert detector.denominators(targets) == {"images": 2.0, "images_with_objects": 0.0}
    losses, outputs = losses_of(detector, images, sizes, targets, ONE)  # the window makes a denominator of 0 one of 1
    assert losses["loss_mask"] == 0 and outputs["mask_logits"].shape == (0, 28, 28)
    sum(losses.values()).backward()
    for name, parameter in detector.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert "mask" not in name or not parameter.grad.any()
    after = dict(detector.roi_heads.mask_head.named_buffers())
    assert all(torch.equal(buffer, after[name]) for name, buffer in before.items())


def test_losses_are_divided_as_announced_and_crowds_and_unlabelled_classes_have_no_mask():
    detector = tiny().train()
    images, sizes = images_of(4)
    every = torch.ones(3, dtype=torch.bool)
    targets = [{**each, "labelled": every} for each in TARGETS[:3]]
    targets.append(target([[0, 0, 64, 40], [8, 42, 24, 60]], [1, 0], labelled=[False, True, False]))
    outputs = detector(images, sizes, targets)
    assert_losses_are_divided_as_announced(detector, outputs, targets)
    other = [*targets[:3], {**targets[3], "masks": targets[3]["masks"].clone()}]
    other[3]["masks"][0] = 1 - other[3]["masks"][0]  # of the crowd region
    with torch.no_grad(), eval_mode(detector):
        same = [losses_of(detector, images, sizes, each)[0]["loss_mask"] for each in (targets, other)]
        changed = [*targets[:3], {**targets[3], "masks": 1 - targets[3]["masks"]}]
        assert same[0] == same[1] != losses_of(detector, images, sizes, changed)[0]["loss_mask"]


def test_without_masks_nothing_changes():
    """The settings of masks are not used, and neither are masks in the targets."""
    detector = tiny(masks=False).train()
    plain = tiny(masks=False, mask_convs=4, mask_channels=32).train()
    assert not detector.predicts_masks and detector.loss_names == plain.loss_names and "loss_mask" not in str(plain)
    assert detector.divided_by == "images" and not any("mask" in name for name in detector.state_dict())
    images, sizes = images_of(2)
    without = [{name: value for name, value in t.items() if name != "masks"} for t in TARGETS[:2]]
    torch.manual_seed(1)
    first, outputs = losses_of(detector, images, sizes, TARGETS[:2])
    torch.manual_seed(1)
    second, _ = losses_of(plain, images, sizes, without)
    assert first == second and not any("mask" in name or name == "roi_match" for name in outputs)
    with torch.no_grad(), eval_mode(detector):
        outputs = detector(images, sizes)
    assert "maps" not in outputs and len(detector.decode(outputs, sizes, sizes, 0.0, 5)) == 3


def test_autocast_keeps_masks_and_their_targets_in_float32():
    detector = tiny().train()
    images, sizes = images_of(2)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = detector(images, sizes, TARGETS[:2])
    assert {value.dtype for value in outputs.values()} <= {torch.float32, torch.int64}
    losses, _ = detector.criterion(outputs, TARGETS[:2], detector.denominators(TARGETS[:2]))
    losses["loss_mask"].backward()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Files of torchvision's detectors with random weights, and the detectors."""
    made = {}
    for version in ("maskrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn_v2"):
        torch.manual_seed(0)
        settings = {"min_size": 96, "max_size": 128, "num_classes": 1 + len(CLASSES)}
        settings |= {"box_score_thresh": 0.0, "box_detections_per_img": 9, "rpn_post_nms_top_n_test": 50}
        theirs = getattr(detection, version)(weights=None, weights_backbone=None, **settings)
        for name, module in theirs.named_modules():
            if name.endswith("bn3"):  # residual branches that start small, so that values stay finite
                module.weight.data.fill_(0.3)
        path = tmp_path_factory.mktemp("weights") / f"{version}.pth"
        torch.save(theirs.state_dict(), path)
        made[version] = theirs.eval(), path
    return made


@pytest.mark.parametrize("version", ["maskrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn_v2"])
def test_torchvisions_weights_give_its_boxes_scores_and_masks(published, version):
    theirs, path = published[version]
    source = open_pretrained(str(path))
    assert (source.architecture, source.options["masks"]) == (version.replace("mask", "faster"), True)
    options = source.options | {"norm_eps": 1e-5} if "norm_eps" in source.options else source.options
    options |= {"score_threshold": 0.0, "detections_per_image": 9, "rpn_post_nms_top_n_test": 50}
    detector = build_detector(source.architecture, class_names=CLASSES, **options).eval()
    assert detector.load_state_dict(source.tensors) and detector.predicts_masks
    assert_resolved_options_build_it_again(detector, CLASSES)
    images, sizes = images_of(2, 96)
    with torch.no_grad():
        expected = theirs(list(images / 255))
        outputs = detector(images, sizes)
    found = detector.postprocess(outputs, sizes, sizes)
    for ours, own in zip(found, expected, strict=True):
        assert len(own["boxes"]) > 3
        torch.testing.assert_close(ours["boxes"], own["boxes"], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(ours["scores"], own["scores"], rtol=1e-4, atol=1e-6)
        assert torch.equal(ours["labels"] + 1, own["labels"])
        pasted = paste_masks_in_image(ours["masks"][:, None], own["boxes"], (96, 96))
        torch.testing.assert_close(pasted, own["masks"], rtol=1e-4, atol=1e-5)
        pixels = detector.paste_masks(ours["masks"], ours["boxes"], (96, 96))
        assert (pixels != (own["masks"][:, 0] > 0.5)).float().mean() < 1e-4 and pixels.any()


def test_pixels_of_masks_are_torchvisions_for_boxes_beyond_the_picture_too():
    generator = torch.Generator().manual_seed(3)
    corner = torch.rand(40, 2, generator=generator) * 70 - 20
    boxes = torch.cat([corner, corner + torch.rand(40, 2, generator=generator) * 60], dim=1)
    boxes[0] = torch.tensor([5.0, 5.0, 5.0, 9.0])  # without area
    boxes[1] = torch.tensor([-30.0, -30.0, -20.0, -20.0])  # outside
    masks = torch.rand(40, 28, 28, generator=generator)
    inside = boxes[:, :2].lt(torch.tensor([47.0, 31.0])).all(1) & boxes[:, 2:].gt(0).all(1)  # theirs fails for others
    pixels = masks_in_boxes(masks, boxes, (32, 48))
    theirs = paste_masks_in_image(masks[inside][:, None], boxes[inside], (32, 48))[:, 0] > 0.5
    assert inside.sum() > 20 and torch.equal(pixels[inside], theirs) and not pixels[1].any()
    assert masks_in_boxes(masks[:0], boxes[:0], (32, 48)).shape == (0, 32, 48)


def test_masks_follow_their_boxes_and_only_kept_detections_have_them():
    detector = tiny(score_threshold=0.0).eval()
    images, _ = images_of(2)
    sizes, original = torch.tensor([[64, 64], [40, 33]]), torch.tensor([[128, 64], [80, 66]])
    padded = [TARGETS[0], target([[2, 2, 20, 20]], size_hw=(40, 33))]
    with torch.no_grad():
        outputs, with_targets = detector(images, sizes), detector(images, sizes, padded)
        boxes, scores, labels, further = detector.decode(outputs, sizes, original, LOW, 4)
    assert further["masks"].shape == (*labels.shape, 28, 28)
    kept = (labels >= 0) & (scores > LOW) & (torch.arange(labels.shape[1]) < 4)
    assert torch.equal(further["masks"].flatten(2).any(2), kept) and kept.any(1).all()
    found = detector.postprocess(outputs, sizes, original)
    torch.testing.assert_close(found, detector.postprocess(with_targets, sizes, original), rtol=1e-4, atol=1e-4)
    few = detector.postprocess(outputs, sizes, original, score_threshold=LOW, top_k=4)
    for all_of_image, best in zip(found, few, strict=True):
        torch.testing.assert_close(best["masks"], all_of_image["masks"][: len(best["boxes"])], rtol=1e-4, atol=1e-5)
        assert best["masks"].ge(0).all() and best["masks"].le(1).all()


def test_a_folder_with_masks_loads_again(tmp_path):
    detector = tiny().eval()
    detector.save_final(tmp_path, [Category(i, name) for i, name in enumerate(CLASSES)])
    loaded, _, _ = load_detector_folder(tmp_path)
    images, sizes = images_of(1)
    with torch.no_grad():
        first, second = (each.postprocess(each(images, sizes), sizes, sizes)[0] for each in (loaded, detector))
    torch.testing.assert_close(first, second)
    assert_resolved_options_build_it_again(detector, CLASSES)


def test_masks_with_the_pools_of_another_program_are_refused():
    with pytest.raises(BadInput, match=r"leave out model\.whole_pixels"):
        tiny(whole_pixels=True)


def test_names_of_before_torchvision_0_13_are_read(published):
    theirs, path = published["maskrcnn_resnet50_fpn"]
    old = {}
    for name, tensor in theirs.state_dict().items():
        found = re.fullmatch(r"roi_heads\.mask_head\.(\d)\.0(\..*)", name)
        name = f"roi_heads.mask_head.mask_fcn{int(found[1]) + 1}{found[2]}" if found else name
        name = re.sub(r"^(rpn\.head\.conv|backbone\.fpn\.\w+_blocks\.\d)(\.0)+(?=\.[^.]+$)", r"\1", name)
        old[name] = tensor
    torch.save(old, path.with_name("old.pth"))
    today = open_pretrained(str(path)).tensors.keys()
    assert open_pretrained(str(path.with_name("old.pth"))).tensors.keys() == today and not today <= old.keys()


@pytest.mark.parametrize("masks", [False, True])
def test_a_training_takes_masks_by_its_own_setting_from_weights_with_or_without(masks, tmp_path):
    """Masks need data with masks, so the source does not decide."""
    source = tiny(seed=1, masks=not masks)
    source.save_final(tmp_path / "final", [Category(i, name) for i, name in enumerate(CLASSES)])
    options = FasterRcnnOptions(pretrained=str(tmp_path / "final"))
    options = FasterRcnnOptions(pretrained=str(tmp_path / "final"), masks=True) if masks else options
    started = start_detector(options, CLASSES, tmp_path, resumed_from=None, say=lambda text: None)
    assert started.predicts_masks == started.resolved_options()["masks"] == masks
    table = (tmp_path / "pretrained.txt").read_text()
    assert f"{'new' if masks else 'unused':<7s} roi_heads.mask_head.0.0.weight" in table
    stored = json.loads((tmp_path / "pretrained_config.json").read_text())
    assert stored["options"]["masks"] == masks
