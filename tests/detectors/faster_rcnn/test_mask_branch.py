"""The mask branch: torchvision's losses, masks and pixels; images without objects; and settings of masks."""

import json

import pytest
import torch
from contract import assert_losses_are_divided_as_announced
from rcnn_data import (
    CLASSES,
    EVERYTHING,
    MASKS,
    SIDE,
    TARGETS,
    assert_losses_are_torchvisions,
    images_of,
    losses_of,
    target,
    tiny,
)
from torchvision.models import detection
from torchvision.models.detection.roi_heads import paste_masks_in_image, project_masks_on_boxes

from toolkit.base.errors import BadInput
from toolkit.data.table import Category
from toolkit.detectors.faster_rcnn import mask_branch
from toolkit.detectors.faster_rcnn.options import FasterRcnnOptions
from toolkit.models import build_detector
from toolkit.models.pasted_masks import masks_in_boxes
from toolkit.models.start import start_detector
from toolkit.models.weights.pretrained import open_pretrained

ONE = {"images": 1.0, "images_with_objects": 1.0}
LOW = 0.251  # a probability, above which some of the detections of random weights are
CATEGORIES = [Category(i, name) for i, name in enumerate(CLASSES)]


def tiny_with_masks(**options):
    return tiny(**MASKS | options)


def test_losses_and_gradients_are_torchvisions_on_one_image():
    detector = tiny_with_masks(**EVERYTHING).train()
    losses, outputs = losses_of(detector, TARGETS[:1])
    assert len(outputs["mask_logits"]) > 2
    assert losses["loss_mask"] > 0
    assert_losses_are_torchvisions(detector)


def test_masks_are_cropped_alike_however_many_are_read_at_once(monkeypatch):
    masks = torch.cat([each["masks"] for each in TARGETS])
    boxes = torch.cat([each["boxes"] for each in TARGETS]) + 1.5
    objects = torch.tensor([0, 4, 1, 1, 2])
    theirs = project_masks_on_boxes(masks, boxes, objects, 28)
    assert torch.equal(mask_branch.cropped_masks(masks, boxes, objects), theirs)
    monkeypatch.setattr(mask_branch, "PIXELS_AT_ONCE", 2 * SIDE**2)
    assert torch.equal(mask_branch.cropped_masks(masks, boxes, objects), theirs)


def test_an_image_counts_once_however_many_samples_it_has():
    """The loss of images is the mean of theirs; one without objects changes nothing."""
    detector = tiny_with_masks().eval()
    together, outputs = losses_of(detector, TARGETS[:3])
    apart = [
        losses_of(
            detector,
            [TARGETS[i]],
            slice(i, i + 1),
            ONE,
        )[0]["loss_mask"]
        for i in range(3)
    ]
    assert apart[1] == 0
    assert apart[0] > 0
    torch.testing.assert_close(together["loss_mask"], (apart[0] + apart[2]) / 2)
    torch.testing.assert_close(outputs["mask_weights"].sum(), torch.tensor(2.0))


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_a_batch_without_objects_trains_masks_with_zeros(norm):
    detector = tiny_with_masks(head_norm=norm).train()
    before = {name: buffer.clone() for name, buffer in detector.roi_heads.mask_head.named_buffers()}
    targets = [TARGETS[1], target("0 0 50 50", crowds="0")]
    assert detector.denominators(targets) == {"images": 2.0, "images_with_objects": 0.0}
    losses, outputs = losses_of(detector, targets, denominators=ONE)  # the window makes a denominator of 0 one of 1
    assert losses["loss_mask"] == 0
    assert outputs["mask_logits"].shape == (0, 28, 28)
    sum(losses.values()).backward()
    for name, parameter in detector.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert "mask" not in name or not parameter.grad.any()
    torch.testing.assert_close(
        dict(detector.roi_heads.mask_head.named_buffers()),
        before,
        rtol=0,
        atol=0,
    )


def test_losses_of_masks_are_divided_as_announced():
    """Also where an image labels one class alone."""
    detector = tiny_with_masks().train()
    labelled = [torch.ones(3, dtype=torch.bool)] * 3 + [torch.tensor([True, False, False])]
    targets = [
        {**each, "labelled": classes}
        for each, classes in zip(
            TARGETS,
            labelled,
            strict=True,
        )
    ]
    _, outputs = losses_of(detector, targets)
    assert_losses_are_divided_as_announced(detector, outputs, targets)


def test_autocast_keeps_masks_in_float32():
    detector = tiny_with_masks().train()
    with torch.autocast("cpu", torch.bfloat16):
        losses, outputs = losses_of(detector, TARGETS[:2])
    assert {value.dtype for value in outputs.values()} <= {torch.float32, torch.int64}
    losses["loss_mask"].backward()


def loss_with_masks(detector, targets, masks):
    """The loss of masks where the last image has these."""
    return losses_of(
        detector,
        [
            *targets[:3],
            {
                **targets[3],
                "masks": masks,
            },
        ],
    )[0]["loss_mask"]


def test_crowds_have_no_mask():
    detector = tiny_with_masks().eval()
    masks = TARGETS[3]["masks"]
    of_crowd = torch.tensor([1, 0], dtype=torch.uint8)[:, None, None]
    expected = loss_with_masks(detector, TARGETS, masks)
    assert loss_with_masks(detector, TARGETS, masks ^ of_crowd) == expected
    assert loss_with_masks(detector, TARGETS, 1 - masks) != expected


def test_objects_with_a_box_alone_train_the_boxes_and_no_mask():
    """The loss of an image is the mean over the samples of the other objects; an image without any does not count."""
    detector = tiny_with_masks().eval()
    last = TARGETS[3]
    whole, _ = losses_of(detector, TARGETS)
    has_mask = torch.ones(len(last["labels"]), dtype=torch.bool)
    as_before, _ = losses_of(detector, [*TARGETS[:3], last | {"has_mask": has_mask}])
    assert as_before["loss_mask"] == whole["loss_mask"]
    none = [{**each, "has_mask": torch.zeros(len(each["labels"]), dtype=torch.bool)} for each in TARGETS]
    counted = detector.denominators([*TARGETS[:3], none[3]])["images_with_objects"]
    assert counted == detector.denominators(TARGETS)["images_with_objects"] - 1
    divisors = {"images": float(len(TARGETS)), "images_with_objects": 1.0}
    losses, outputs = losses_of(detector, none, slice(None), divisors)
    assert losses["loss_mask"] == 0
    assert len(outputs["mask_logits"]) > 0
    assert losses["loss_classifier"] == whole["loss_classifier"]
    assert losses["loss_box_reg"] == whole["loss_box_reg"]
    assert losses["loss_mask"].requires_grad


def test_without_masks_neither_settings_nor_targets_of_masks_are_used():
    detector = tiny(mask_convs=4, mask_channels=32).train()
    assert not detector.predicts_masks
    assert "mask" not in " ".join([*detector.loss_names, *detector.state_dict()])
    _, outputs = losses_of(detector, TARGETS)
    assert "mask" not in " ".join(outputs)
    images, sizes = images_of(1)
    outputs = detector.eval()(images, sizes)
    assert "maps" not in outputs
    assert len(detector.decode(outputs, sizes, sizes, 0.0, 5)) == 3


@pytest.mark.parametrize("version", ["maskrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn_v2"])
def test_torchvisions_weights_give_its_boxes_scores_and_masks(version, tmp_path):
    torch.manual_seed(0)
    settings = {"min_size": 96, "max_size": 128, "num_classes": 1 + len(CLASSES), "box_score_thresh": 0.0}
    settings |= {"box_detections_per_img": 9, "rpn_post_nms_top_n_test": 50}
    theirs = getattr(detection, version)(weights=None, weights_backbone=None, **settings).eval()
    for name, module in theirs.named_modules():
        if name.endswith("bn3"):  # residual branches that start small, so that values stay finite
            module.weight.data.fill_(0.3)
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    source = open_pretrained(str(tmp_path / "weights.pth"))
    assert source.architecture == version.replace("mask", "faster")
    options = source.options | {"score_threshold": 0.0, "detections_per_image": 9, "rpn_post_nms_top_n_test": 50}
    if "norm_eps" in options:
        options["norm_eps"] = 1e-5  # of weights that torchvision has not published
    detector = build_detector(source.architecture, class_names=CLASSES, **options).eval()
    detector.load_state_dict(source.tensors)
    images, sizes = images_of(2, 96)
    with torch.no_grad():
        expected = theirs(list(images / 255))
        found = detector.postprocess(detector(images, sizes), sizes, sizes)
    for ours, own in zip(found, expected, strict=True):
        assert len(own["boxes"]) > 3
        torch.testing.assert_close(ours["boxes"], own["boxes"], rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(ours["scores"], own["scores"], rtol=1e-4, atol=1e-6)
        assert torch.equal(ours["labels"] + 1, own["labels"])
        pasted = paste_masks_in_image(ours["masks"][:, None], own["boxes"], (96, 96))
        torch.testing.assert_close(pasted, own["masks"], rtol=1e-4, atol=1e-5)
        pixels = detector.paste_masks(ours["masks"], ours["boxes"], (96, 96))
        assert pixels.any()
        assert (pixels != (own["masks"][:, 0] > 0.5)).float().mean() < 1e-4


def test_pixels_of_masks_are_torchvisions_for_boxes_beyond_the_picture_too():
    generator = torch.Generator().manual_seed(3)
    corner = torch.rand(40, 2, generator=generator) * 70 - 20
    boxes = torch.cat(
        [
            corner,
            corner
            + torch.rand(
                40,
                2,
                generator=generator,
            )
            * 60,
        ],
        dim=1,
    )
    boxes[0] = torch.tensor([5.0, 5.0, 5.0, 9.0])  # without area
    boxes[1] = torch.tensor([-30.0, -30.0, -20.0, -20.0])  # outside
    masks = torch.rand(40, 28, 28, generator=generator)
    inside = boxes[:, :2].lt(torch.tensor([47.0, 31.0])).all(1) & boxes[:, 2:].gt(0).all(1)  # theirs fails for others
    assert inside.sum() > 20
    pixels = masks_in_boxes(masks, boxes, (32, 48))
    theirs = (
        paste_masks_in_image(
            masks[inside][:, None],
            boxes[inside],
            (32, 48),
        )[:, 0]
        > 0.5
    )
    assert torch.equal(pixels[inside], theirs)
    assert not pixels[1].any()
    assert masks_in_boxes(
        masks[:0],
        boxes[:0],
        (32, 48),
    ).shape == (0, 32, 48)


def test_masks_follow_their_boxes_and_only_kept_detections_have_them():
    detector = tiny_with_masks(score_threshold=0.0).eval()
    images, _ = images_of(2)
    sizes = torch.tensor([[64, 64], [40, 33]])
    with torch.no_grad():
        outputs = detector(images, sizes)
        _, scores, labels, further = detector.decode(outputs, sizes, 2 * sizes, LOW, 4)
        every = detector.postprocess(outputs, sizes, 2 * sizes)
        few = detector.postprocess(outputs, sizes, 2 * sizes, score_threshold=LOW, top_k=4)
    kept = (labels >= 0) & (scores > LOW) & (torch.arange(labels.shape[1]) < 4)
    assert kept.any(1).all()
    assert torch.equal(further["masks"].flatten(2).any(2), kept)
    for all_of_image, best in zip(every, few, strict=True):
        assert best["masks"].shape == (len(best["boxes"]), 28, 28)
        torch.testing.assert_close(
            best["masks"],
            all_of_image["masks"][: len(best["boxes"])],
            rtol=1e-4,
            atol=1e-5,
        )
        assert ((best["masks"] >= 0) & (best["masks"] <= 1)).all()


@pytest.mark.parametrize("masks", [False, True])
def test_a_training_takes_masks_by_its_own_setting_from_weights_with_or_without(masks, tmp_path):
    """Masks need data with masks, so the source does not decide."""
    tiny_with_masks(masks=not masks).save_final(tmp_path / "final", CATEGORIES)
    given = {"masks": True} if masks else {}
    options = FasterRcnnOptions(pretrained=str(tmp_path / "final"), **given)
    started = start_detector(options, CLASSES, tmp_path, resumed_from=None, say=lambda text: None)
    assert started.predicts_masks == started.resolved_options()["masks"] == masks
    table = (tmp_path / "pretrained.txt").read_text()
    assert f"{'new' if masks else 'unused':<7s} roi_heads.mask_head.0.0.weight" in table
    stored = json.loads((tmp_path / "pretrained_config.json").read_text())
    assert stored["options"]["masks"] == masks


def test_masks_with_the_pools_of_another_program_are_refused():
    with pytest.raises(BadInput, match=r"leave out model\.whole_pixels"):
        tiny_with_masks(whole_pixels=True)
