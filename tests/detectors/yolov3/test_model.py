"""YOLOv3 beyond the numbers of the original (tests/golden/test_yolov3.py): padding, boxes, norms and slopes."""

import pytest
import timm
import torch
from contract import assert_resolved_options_build_it_again
from torch import nn
from yolov3_data import LOSSES, losses_of, random_outputs, target, tiny

from toolkit.base.errors import BadInput
from toolkit.models import build_detector
from toolkit.step.freezing import FrozenBatchNorm2d


def test_an_image_counts_the_same_whatever_its_batch_is_padded_to():
    """Two sizes in one batch: cells that begin in the padding belong to no image, in the losses and in the boxes."""
    detector = tiny()
    targets = [target("0 0 32 64, 5 9 20 30", "0, 2"), target("60 50 120 96", "1")]
    outputs = random_outputs(detector, [(64, 32), (96, 128)], (96, 128))
    small = {name: value[:1] for name, value in outputs.items()}
    for stride in (32, 16, 8):
        small[f"raw_stride{stride}"] = small[f"raw_stride{stride}"][:, :, : 64 // stride, : 32 // stride]
    large = {name: value[1:] for name, value in outputs.items()}
    together = losses_of(detector, outputs, targets)
    of_small = losses_of(detector, small, targets[:1])
    of_large = losses_of(detector, large, targets[1:])
    for name in LOSSES:
        torch.testing.assert_close(together[name], of_small[name] + of_large[name])
    sizes = outputs["sizes"]
    found, _ = detector.postprocess(outputs, sizes, sizes * torch.tensor([2, 3]))
    [unscaled] = detector.postprocess(small, sizes[:1], sizes[:1])
    torch.testing.assert_close(found["boxes"], unscaled["boxes"] * torch.tensor([3.0, 2, 3, 2]))
    torch.testing.assert_close(found["scores"], unscaled["scores"])
    assert (found["boxes"] <= torch.tensor([96, 128, 96, 128])).all()


def test_a_batch_of_no_images_has_no_losses_and_no_detections():
    detector = tiny()
    empty = {name: value[:0] for name, value in random_outputs(detector, [(64, 64)]).items()}
    assert sum(losses_of(detector, empty, []).values()) == 0
    assert detector.postprocess(empty, empty["sizes"], empty["sizes"]) == []


def test_sides_that_32_does_not_divide_are_refused():
    with pytest.raises(ValueError, match="multiples of 32"):
        tiny().raw_maps(torch.zeros(1, 3, 64, 80))


def build(backbone: str = "darknet17", **options):
    torch.manual_seed(0)
    return build_detector(
        "yolov3",
        class_names=["a", "b"],
        backbone=backbone,
        head_channels=[16, 12, 8],
        **options,
    )


NORMS = (nn.BatchNorm2d, nn.SyncBatchNorm, nn.GroupNorm, FrozenBatchNorm2d)


def norms_in(*modules):
    return {type(module) for module in nn.ModuleList(modules).modules() if isinstance(module, NORMS)}


@pytest.fixture(scope="module")
def weights():
    return build(norm="batch").state_dict()


@pytest.mark.parametrize(
    ("norm", "of_backbone", "of_heads"),
    [
        ("frozen", FrozenBatchNorm2d, nn.BatchNorm2d),
        ("group", nn.GroupNorm, nn.GroupNorm),
        ("sync", nn.SyncBatchNorm, nn.SyncBatchNorm),
    ],
)
def test_norms_are_of_one_kind_and_leave_the_random_weights(weights, norm, of_backbone, of_heads):
    detector = build(norm=norm, objectness_prior=0.01)
    [found] = norms_in(detector.backbone)
    assert issubclass(found, of_backbone)
    [found] = norms_in(detector.blocks, detector.transitions)
    assert issubclass(found, of_heads)
    maps = detector.eval()(torch.zeros(1, 3, 64, 96, dtype=torch.uint8), torch.tensor([[64, 96]]))
    assert maps["raw_stride8"].shape == (1, 21, 8, 12)
    for name, value in detector.state_dict().items():
        assert value.ndim < 2 or torch.equal(value, weights[name])
    assert_resolved_options_build_it_again(detector, ["a", "b"])


def test_only_the_objectness_starts_with_a_bias():
    for prediction in build(objectness_prior=0.01).predictions:
        biases = prediction.bias.detach().view(3, 7)
        torch.testing.assert_close(biases[:, 4].sigmoid(), torch.full((3,), 0.01))
        biases[:, 4] = 0
        assert not biases.any()


def slopes_of(detector):
    return {module.negative_slope for module in detector.backbone.modules() if isinstance(module, nn.LeakyReLU)}


def test_pretrained_weights_of_a_darknet_need_their_slope_said(tmp_path):
    source = timm.create_model("darknet17")
    file = str(tmp_path / "weights.pth")
    torch.save(source.state_dict(), file)
    assert slopes_of(build()) == {0.1}
    with pytest.raises(BadInput, match=r"leaky_slope.*0\.01"):
        build(pretrained_backbone=file)
    detector = build(pretrained_backbone=file, leaky_slope=0.01)
    assert slopes_of(detector) == {0.01}
    theirs = list(source.parameters())[:-2]  # the classifier is left out
    torch.testing.assert_close(
        list(detector.backbone.parameters()),
        theirs,
        rtol=0,
        atol=0,
    )
