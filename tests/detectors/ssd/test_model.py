"""SSD: an anchor for every output, losses at the edges, detections in pixels of the original."""

import pytest
import torch
import yaml
from rows import boxes, integers
from torch import nn
from torchvision.ops import box_iou

from toolkit.base.box_ops import cxcywh_to_xyxy
from toolkit.detectors.ssd.criterion import encode_boxes
from toolkit.models import build_detector

NAMES = ("circle", "square", "star")
TINY = yaml.safe_load("""
    backbone: lcnet_035
    strides: [16, 32, 64, -1]
    channels: [16, 16, 16, 8]
    aspect_ratios: [[2, 3], [2], [2], [2]]
""")


def tiny(architecture="ssdlite", class_names=NAMES, **options):
    torch.manual_seed(0)
    return build_detector(architecture, class_names=class_names, **TINY | options)


def outputs_of(detector, hw, count=2):
    images = torch.randint(
        0,
        256,
        (count, 3, *hw),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(0),
    )
    return detector(images, torch.tensor([hw] * count))


@pytest.mark.parametrize("hw", [(64, 96), (100, 150)])
@pytest.mark.parametrize(("architecture", "norm"), [("ssd", "group"), ("ssdlite", "sync")])
def test_every_output_has_its_anchor_whatever_the_size(architecture, norm, hw):
    detector = tiny(architecture, norm=norm).eval()
    assert not any(type(module) is nn.BatchNorm2d for module in detector.modules())
    outputs = outputs_of(detector, hw)
    cells = [-(-hw[0] // stride) * -(-hw[1] // stride) for stride in (16, 32, 64)]
    count = 6 * cells[0] + 4 * (cells[1] + cells[2] + 1)
    assert len(outputs["anchors"]) == count
    assert outputs["logits"].shape == outputs["offsets"].shape == (2, count, 4)
    assert outputs["image_hw"].tolist() == list(hw)
    of_first_level = outputs["anchors"][: 6 * cells[0]]
    torch.testing.assert_close(of_first_level[:, :2].mean(0), torch.tensor([0.5, 0.5]))
    assert outputs["anchors"].min() >= 0
    assert outputs["anchors"].max() <= 1


def test_anchors_lie_on_the_maps_that_a_backbone_really_has():
    """This one works on whole patches of two cells: 3 x 5 become 4 x 6."""
    outputs = outputs_of(tiny(backbone="mobilevitv2_050").eval(), (96, 160), count=1)
    assert outputs["logits"].shape[1] == len(outputs["anchors"]) == 6 * 60 + 4 * (24 + 6 + 1)


def test_one_image_of_one_class_goes_through_a_map_of_one_cell():
    detector = tiny(class_names=["cell"]).train()
    about = {
        "labels": integers("0"),
        "iscrowd": integers("0"),
        "size": torch.tensor([64, 64]),
    }
    target = {"boxes": boxes("20 10 60 50"), **about}
    counts = detector.denominators([target])
    losses, metrics = detector.criterion(
        outputs_of(detector, (64, 64), count=1),
        [target],
        counts,
    )
    assert counts["positives"] == metrics["positives"][0], "counted on the CPU, and there"
    for loss in losses.values():
        assert loss.isfinite()
        assert loss > 0


def test_a_level_behind_a_map_of_one_pixel_has_no_gradient_where_the_padding_is():
    """In bfloat16 too: there, CPUs with instructions for it return what was in the memory before."""
    detector = tiny(
        "ssd",
        strides=[16, 32, 64, 128],
        channels=[16, 16, 64, 128],
    ).train()
    convolution = detector.extra[-1][1][0]
    assert convolution.kernel_size == (3, 3)
    for _ in range(10):
        spoilt = [torch.full((2**k,), torch.nan) for k in range(8, 18)]  # what is allocated next may be found there
        del spoilt
        detector.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = outputs_of(detector, (64, 64))
        (outputs["logits"].float().square().sum() + outputs["offsets"].float().square().sum()).backward()
        gradient = convolution.weight.grad.clone()
        assert gradient[:, :, 1, 1].isfinite().all()
        assert gradient[:, :, 1, 1].any()
        gradient[:, :, 1, 1] = 0
        assert not gradient.any()


BOXES = boxes("20 10 60 50, 22 10 60 48, 22 12 62 50, 70 10 90 60")
LABELS = (0, 0, 1, 2)  # the second is the first one again, the third another class


@pytest.fixture(scope="module")
def detector():
    return tiny()


@pytest.fixture
def outputs(detector):
    """Of an image in which the anchors nearest to the boxes say so, and all others say background."""
    anchors, image_hw = detector.anchors((64, 96), "cpu")
    logits = torch.tensor([12.0, 0, 0, 0]).repeat(
        1,
        len(anchors),
        1,
    )
    offsets = torch.zeros(1, len(anchors), 4)
    taken = torch.zeros(len(anchors), dtype=torch.bool)
    for i, (box, label) in enumerate(
        zip(
            BOXES / torch.tensor([96, 64, 96, 64]),
            LABELS,
            strict=True,
        )
    ):
        overlaps = box_iou(box[None], cxcywh_to_xyxy(anchors))[0]
        nearest = int(overlaps.masked_fill(taken, -1.0).argmax())
        taken[nearest] = True
        offsets[0, nearest] = encode_boxes(box, anchors[nearest], *detector.multibox.variances)
        logits[0, nearest] = torch.zeros(4)
        logits[0, nearest, label + 1] = 9.0 - i
    return {"logits": logits, "offsets": offsets, "anchors": anchors, "image_hw": image_hw}


def test_detections_are_in_pixels_of_the_original_one_for_each_object(detector, outputs):
    [found] = detector.postprocess(
        outputs,
        torch.tensor([[64, 96]]),
        torch.tensor([[128, 288]]),
        score_threshold=0.5,
    )
    assert found["labels"].tolist() == [0, 1, 2]
    assert (found["scores"].diff() < 0).all()
    torch.testing.assert_close(
        found["boxes"],
        BOXES[[0, 2, 3]] * torch.tensor([3.0, 2, 3, 2]),
        rtol=0,
        atol=1e-2,
    )


def test_large_boxes_are_clipped_to_the_image_without_its_padding(detector, outputs):
    outputs["offsets"][..., 2:] += 15.0  # e^3 times as large
    [large] = detector.postprocess(
        outputs,
        torch.tensor([[48, 96]]),
        torch.tensor([[96, 192]]),
        0.5,
    )
    assert large["boxes"].tolist()[0] == [0.0, 0.0, 192.0, 96.0]
