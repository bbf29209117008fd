"""YOLOv3 beyond the numbers of the original (tests/golden/test_yolov3.py): edges, geometry, interfaces."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from contract import assert_resolved_options_build_it_again
from documents import box, document, image, write
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_training import Taps
from samples import sample
from torch import nn
from torchvision.io import write_png
from torchvision.ops import box_iou

from scripts.benches.yolov3 import looped_losses, our_losses
from toolkit.base.errors import BadInput
from toolkit.data.table import Category
from toolkit.data.transforms.mixing import draw_mixup_lambda, mixup
from toolkit.detectors.yolov3.model import YOLOv3
from toolkit.detectors.yolov3.options import DEFAULT_ANCHORS, Yolov3Options
from toolkit.detectors.yolov3.targets import STRIDES, assign_boxes, decode_boxes, kmeans_anchors, make_grid
from toolkit.models import build_detector
from toolkit.models.final import load_detector_folder
from toolkit.step.freezing import FrozenBatchNorm2d
from toolkit.tools.anchors import main

LOSSES = YOLOv3.loss_names
ANCHORS = torch.tensor(DEFAULT_ANCHORS, dtype=torch.float32)


def tiny(num_classes: int = 3, **options) -> YOLOv3:
    torch.manual_seed(0)
    return YOLOv3(
        [str(c) for c in range(num_classes)],
        Yolov3Options(**options),
        features=Taps([[(3, 8), (8, 8), (8, 8)], [(8, 12)], [(12, 16)]]),
    )


def target(boxes, labels=None, **extra) -> dict:
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    labels = torch.zeros(len(boxes), dtype=torch.int64) if labels is None else torch.tensor(labels)
    return {"boxes": boxes, "labels": labels} | {name: torch.tensor(value) for name, value in extra.items()}


def random_outputs(detector: YOLOv3, sizes, canvas_hw=None, seed: int = 0, dtype=torch.float32) -> dict:
    generator, (height, width) = torch.Generator().manual_seed(seed), canvas_hw or sizes[0]
    channels = detector.predictions[0].out_channels
    maps = {
        f"raw_stride{s}": torch.randn(len(sizes), channels, height // s, width // s, generator=generator).to(dtype)
        for s in STRIDES
    }
    return maps | {"sizes": torch.tensor(sizes)}


def criterion(detector: YOLOv3, outputs: dict, targets: list, images: float = 1.0) -> dict[str, torch.Tensor]:
    return detector.criterion(outputs, targets, {"images": images})[0]


@st.composite
def image_boxes(draw, side: int = 96):
    """Boxes on whole pixels, so on cell borders too, often several in one cell; at least one pixel wide and high."""
    boxes = []
    for _ in range(draw(st.integers(0, 6))):
        x0, y0 = draw(st.integers(0, side - 1)), draw(st.integers(0, side - 1))
        boxes.append((x0, y0, draw(st.integers(x0 + 1, side)), draw(st.integers(y0 + 1, side))))
    labels = [draw(st.integers(0, 2)) for _ in boxes]
    return target(boxes, labels)


@settings(max_examples=40, deadline=None)
@given(st.lists(image_boxes(), min_size=1, max_size=3), st.integers(0, 5))
def test_losses_are_those_of_a_loop_over_boxes(targets, seed):
    predictions = torch.randn(len(targets), 567, 8, generator=torch.Generator().manual_seed(seed))
    for t, row in zip(targets, predictions, strict=True):
        if len(t["boxes"]):  # a prediction that really overlaps: the box itself, at the place it belongs to
            grid = make_grid((96, 96), ANCHORS)
            a = assign_boxes([t], torch.tensor([[96, 96]]), ANCHORS, grid)
            row[a.index[0], 2:4] = a.scale[0]
    ours = our_losses(predictions, targets, ANCHORS, 96)
    loop = looped_losses(predictions, targets, ANCHORS, 96)
    for name in LOSSES:
        torch.testing.assert_close(ours[name], loop[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("box", "cell_xy"), [
    ((0, 0, 0, 0), (0, 0)),  # a point in the corner
    ((96, 64, 96, 64), (2, 1)),  # a point on the last corner: the last cell, not the first of the next row
    ((32, 32, 32, 32), (1, 1)),  # on the corner of four cells: the lower right one
    ((10, 5, 10, 50), (0, 0)),  # a line
    ((-30, -30, 10, 10), None),  # a centre outside
    ((90, 60, 200, 100), None),
])  # fmt: skip
def test_border_and_empty_boxes_have_a_place(box, cell_xy):
    grid, detector = make_grid((64, 96), ANCHORS), tiny()
    a = assign_boxes([target([box])], torch.tensor([[64, 96]]), ANCHORS, grid)
    if cell_xy:  # no IoU with any anchor: the first one, of stride 32
        assert a.index.item() % 3 == 0 and grid.strides[a.index[0]].item() == 32
        assert grid.cells_xy[a.index[0]].tolist() == list(cell_xy)
        assert a.weight.item() == 2 and a.scale[0, 0] == -ANCHORS[0, 0, 0].log()  # as wide as a pixel
    assert a.kept.all() and ((a.center >= 0) & (a.center <= 1)).all()
    losses = criterion(detector, random_outputs(detector, [(64, 96)]), [target([box])])
    assert all(value.isfinite().all() for value in (a.scale, a.weight, *losses.values()))


def test_of_boxes_in_one_cell_and_anchor_the_last_wins():
    t = target([(11, 11, 31, 25), (10, 10, 30, 24), (10, 11, 31, 25)], labels=[1, 0, 2])
    a = assign_boxes([t, t], torch.tensor([[64, 64]] * 2), ANCHORS, make_grid((64, 64), ANCHORS))
    assert len(set(a.index.tolist())) == 1
    assert a.kept.tolist() == [False, False, True] * 2 and a.ratio.tolist() == [0, 0, 1] * 2


@pytest.mark.parametrize("targets", [[], [target([])], [target([]), target([(3, 4, 30, 40)])]])
def test_images_without_boxes(targets):
    detector = tiny()
    outputs = random_outputs(detector, [(64, 64)] * len(targets), (64, 64))
    outputs["sizes"] = torch.full((len(targets), 2), 64)
    maps = [outputs[f"raw_stride{s}"].requires_grad_() for s in STRIDES]
    losses, metrics = detector.criterion(outputs, targets, {"images": 1.0})
    sum(losses.values()).backward()
    assert all(m.grad.isfinite().all() for m in maps)
    boxes = sum(len(t["boxes"]) for t in targets)
    assert (losses["loss_cls"] > 0) == (losses["loss_scale"] > 0) == (losses["loss_center"] > 0) == (boxes > 0)
    assert (losses["loss_obj"] > 0) == (len(targets) > 0)
    assert {name: count.item() for name, (_, count) in metrics.items()} == dict.fromkeys(detector.metric_names, boxes)


def test_crowd_regions_are_ignored_and_never_assigned():
    detector, region = tiny(), (0.0, 0.0, 64.0, 32.0)
    outputs = random_outputs(detector, [(64, 64)])
    with_crowd = target([(40, 40, 60, 60), region], [1, 2], iscrowd=[0, 1])
    without = target([(40, 40, 60, 60)], [1])
    crowd, plain = criterion(detector, outputs, [with_crowd]), criterion(detector, outputs, [without])
    for name in ("loss_center", "loss_scale", "loss_cls"):
        assert crowd[name] == plain[name]
    predictions, grid = detector.flat_predictions([outputs[f"raw_stride{s}"] for s in STRIDES])
    boxes = decode_boxes(predictions, grid)[0]
    shared = (boxes[:, 2:].minimum(torch.tensor(region[2:])) - boxes[:, :2].maximum(torch.zeros(2))).clamp(min=0)
    share = shared.prod(dim=1) / (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)
    a = assign_boxes([without], outputs["sizes"], ANCHORS, grid)
    ignored = (share > 0.7) & (box_iou(boxes, without["boxes"])[:, 0] <= 0.7)
    ignored[a.index] = False
    assert ignored.sum() > 20
    background = nn.functional.softplus(predictions[0, :, 4])[ignored].sum()
    torch.testing.assert_close(plain["loss_obj"] - crowd["loss_obj"], background, rtol=1e-4, atol=1e-4)


def test_the_mixup_share_weighs_a_box_and_0_leaves_it_out():
    detector, box = tiny(), (8, 8, 40, 44)
    assert detector.weighs_boxes
    outputs = random_outputs(detector, [(64, 64)])
    plain, half, none = (
        criterion(detector, outputs, [target([box], **share)]) for share in ({}, {"mixup": [0.5]}, {"mixup": [0.0]})
    )
    for name in ("loss_center", "loss_scale", "loss_cls"):
        torch.testing.assert_close(half[name], plain[name] / 2)
        assert none[name] == 0
    assert half["loss_obj"] < plain["loss_obj"]


def test_an_image_counts_the_same_whatever_its_batch_is_padded_to():
    """Two sizes in one batch: cells that begin in the padding belong to no image, in the losses and in the boxes."""
    detector, small, canvas = tiny(), (64, 32), (96, 128)
    t = [target([(0, 0, 32, 64), (5, 9, 20, 30)], [0, 2]), target([(60, 50, 120, 96)], [1])]
    outputs = random_outputs(detector, [small, canvas], canvas)
    alone = {f"raw_stride{s}": outputs[f"raw_stride{s}"][:1, :, : small[0] // s, : small[1] // s] for s in STRIDES}
    alone["sizes"] = outputs["sizes"][:1]
    other = {k: v[1:] for k, v in outputs.items()}
    together = criterion(detector, outputs, t)
    apart = [criterion(detector, alone, t[:1]), criterion(detector, other, t[1:])]
    for name in LOSSES:
        torch.testing.assert_close(together[name], apart[0][name] + apart[1][name])
    sizes = outputs["sizes"]
    found = detector.postprocess(outputs, sizes, sizes * 2)
    single = detector.postprocess(alone, sizes[:1], sizes[:1] * 2)
    for name in ("boxes", "scores", "labels"):
        torch.testing.assert_close(found[0][name], single[0][name])
    assert (found[0]["boxes"].max(dim=0).values <= torch.tensor([64.0, 128.0, 64.0, 128.0])).all()


def test_bfloat16_maps_give_float32_losses_near_those_of_float32():
    detector = tiny()
    outputs, t = random_outputs(detector, [(64, 64)]), [target([(8, 8, 40, 44)])]
    rounded = {k: v.bfloat16() if v.is_floating_point() else v for k, v in outputs.items()}
    for name, loss in criterion(detector, rounded, t).items():
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, criterion(detector, outputs, t)[name], rtol=2e-2, atol=1e-2)


def test_postprocess_limits_and_scaling():
    detector = tiny()
    outputs = random_outputs(detector, [(64, 96)] * 2, seed=3)
    sizes, originals = outputs["sizes"], torch.tensor([[128, 288], [64, 96]])
    every = detector.postprocess(outputs, sizes, originals, top_k=1000)
    unscaled = detector.postprocess(outputs, sizes, sizes, top_k=1000)
    some = detector.postprocess(outputs, sizes, originals, score_threshold=0.5, top_k=7)
    for found, same, limited, hw in zip(every, unscaled, some, originals.tolist(), strict=True):
        assert (found["scores"].diff() <= 0).all()
        assert found["scores"].min() > detector.score_threshold
        assert found["labels"].dtype == torch.int64
        scale = torch.tensor([hw[1] / 96, hw[0] / 64]).repeat(2)
        torch.testing.assert_close(found["boxes"], same["boxes"] * scale)
        assert (found["boxes"] >= 0).all()
        assert (found["boxes"] <= torch.tensor([hw[1], hw[0]]).repeat(2)).all()
        expected = min(7, int((found["scores"] > 0.5).sum()))
        assert len(limited["scores"]) == expected > 0
        torch.testing.assert_close(limited["boxes"], found["boxes"][:expected])


def test_postprocess_of_nothing():
    detector = tiny()
    outputs = {k: v - 30 if v.is_floating_point() else v for k, v in random_outputs(detector, [(64, 64)]).items()}
    (found,) = detector.postprocess(outputs, outputs["sizes"], outputs["sizes"])
    assert {k: tuple(v.shape) for k, v in found.items()} == {"boxes": (0, 4), "scores": (0,), "labels": (0,)}
    empty = {k: v[:0] for k, v in outputs.items()}
    assert detector.postprocess(empty, empty["sizes"], empty["sizes"]) == []
    with pytest.raises(ValueError, match="multiples of 32"):
        detector.raw_maps(torch.zeros(1, 3, 64, 80))


@pytest.mark.parametrize(("norm", "of_backbone", "of_heads"), [
    ("batch", nn.BatchNorm2d, nn.BatchNorm2d),
    ("frozen", FrozenBatchNorm2d, nn.BatchNorm2d),
    ("group", nn.GroupNorm, nn.GroupNorm),
    ("sync", nn.SyncBatchNorm, nn.SyncBatchNorm),
])  # fmt: skip
def test_norms_of_backbone_and_heads(norm, of_backbone, of_heads):
    """The same random weights whatever the norm, and leaky ReLUs of the backbone keep YOLO's slope."""
    plain, detector = (build(norm=kind, objectness_prior=0.01) for kind in ("batch", norm))
    heads = nn.ModuleList([detector.blocks, detector.transitions])
    norms = (nn.BatchNorm2d, nn.SyncBatchNorm, nn.GroupNorm, FrozenBatchNorm2d)
    for part, kind in ((detector.backbone, of_backbone), (heads, of_heads)):
        found = [module for module in part.modules() if isinstance(module, norms)]
        assert found and all(isinstance(module, kind) for module in found)
    assert {m.negative_slope for m in detector.modules() if isinstance(m, nn.LeakyReLU)} == {0.1}
    theirs = plain.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in detector.state_dict().items()
               if name in theirs and value.ndim > 1)  # fmt: skip
    for prediction in detector.predictions:
        biases = prediction.bias.detach().view(3, 7)
        torch.testing.assert_close(biases[:, 4].sigmoid(), torch.full((3,), 0.01))
        assert biases[:, :4].abs().sum() == biases[:, 5:].abs().sum() == 0
    images, sizes = pixels_of((2, 64, 64)), torch.tensor([[64, 64]] * 2)
    losses = criterion(detector.train(), detector(images, sizes), [target([(8, 8, 40, 44)])] * 2)
    sum(losses.values()).backward()
    assert all(p.grad.isfinite().all() for p in detector.parameters())
    assert_resolved_options_build_it_again(detector, ["a", "b"])


def build(backbone: str = "darknet17", **options) -> YOLOv3:
    torch.manual_seed(0)
    return build_detector("yolov3", class_names=["a", "b"], backbone=backbone, head_channels=[16, 12, 8], **options)


def test_final_folder_gives_the_same_detector(tmp_path):
    anchors = [[[60, 50], [70, 60]], [[30, 20], [40, 30]], [[5, 8], [9, 4]]]
    detector = build(anchors=anchors, leaky_slope=0.01).eval()
    detector.save_final(tmp_path, [Category(7, "a"), Category(3, "b")], {"height": 64, "width": 64})
    loaded, categories, size = load_detector_folder(tmp_path)
    images, sizes = pixels_of((1, 64, 64)), torch.tensor([[64, 64]])
    ours, theirs = detector(images, sizes), loaded(images, sizes)
    assert all(torch.equal(ours[k], theirs[k]) for k in ours) and torch.equal(detector.anchors, loaded.anchors)
    assert categories == [Category(7, "a"), Category(3, "b")] and size == {"height": 64, "width": 64}


def test_pretrained_weights_of_a_darknet_need_their_slope_said(tmp_path):
    source, file = timm.create_model("darknet17"), tmp_path / "weights.pth"
    torch.save(source.state_dict(), file)
    with pytest.raises(BadInput, match=r"leaky_slope.*0\.01"):
        build(pretrained_backbone=str(file))
    detector = build(pretrained_backbone=str(file), leaky_slope=0.01)
    again = build_detector(class_names=["a", "b"], **detector.options)
    for built in (detector, again):
        assert {m.negative_slope for m in built.backbone.modules() if isinstance(m, nn.LeakyReLU)} == {0.01}
    theirs = list(source.parameters())[:-2]  # the classifier is left out
    assert all(torch.equal(a, b) for a, b in zip(theirs, detector.backbone.parameters(), strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_box_that_is_not_finite_makes_losses_that_are_not(value):
    """So that the guard sees it, on every device, instead of an index out of range."""
    detector = tiny()
    outputs = random_outputs(detector, [(64, 64)])
    losses = criterion(detector, outputs, [target([(value, 5, 20, 30), (5, 5, 20, 30)])])
    assert not all(loss.isfinite() for loss in losses.values())


def pixels_of(shape, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    batch, height, width = shape
    return torch.randint(0, 256, (batch, 3, height, width), dtype=torch.uint8, generator=generator)


def test_kmeans_finds_the_sizes_that_are_there():
    rng = np.random.default_rng(0)
    true = np.array([[10, 14], [30, 20], [25, 60], [90, 80], [150, 60], [200, 220]])
    sizes = true[rng.integers(6, size=600)] * rng.uniform(0.95, 1.05, (600, 2))
    anchors, fit = kmeans_anchors(sizes, 6)
    np.testing.assert_allclose(anchors, true[np.argsort(true.prod(axis=1))], rtol=0.03)
    assert fit > 0.93 and np.array_equal(anchors, kmeans_anchors(sizes, 6)[0])
    equal, fit = kmeans_anchors(np.full((20, 2), 8.0), 9)
    assert np.array_equal(equal, np.full((9, 2), 8.0)) and fit == 1


def coco_file(folder: Path, boxes_xywh: list) -> Path:
    write_png(torch.zeros(3, 100, 200, dtype=torch.uint8), str(folder / "a.png"))
    boxes = [box(id=number, bbox=bbox) for number, bbox in enumerate(boxes_xywh, 1)]
    return write(folder, document(images=[image(file_name="a.png", width=200, height=100)], annotations=boxes))


def test_anchor_command(tmp_path, capsys):
    """20 x 10 of an image of 200 x 100 is 6.4 x 6.4 at 64 px, and 3.2 wide and 6.4 high at 64 x 32 (height, width).
    What it prints is what `--model.anchors` takes."""
    file = coco_file(tmp_path, [[i, i, 20 * k, 10 * k] for k in (1, 2, 4) for i in range(4)] + [[5, 5, 0, 10]])
    command = ["--annotations", str(file), "--image-dir", str(tmp_path), "--per-level", "1", "--image-size", "64"]
    assert main([*command, "32"]) == BadInput.exit_code and "annotation 13" in capsys.readouterr().err
    for side, anchors in (([], [[[25.6, 25.6]], [[12.8, 12.8]], [[6.4, 6.4]]]),
                          (["32"], [[[12.8, 25.6]], [[6.4, 12.8]], [[3.2, 6.4]]])):  # fmt: skip
        assert main([*command, *side, "--on-error", "drop"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["anchors"] == anchors
    assert tiny(anchors=anchors).predictions[0].out_channels == 8
    assert main([*command, "32", "3"]) == BadInput.exit_code
    assert "--image-size 64 32 3: expected" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*command, "0"])
    assert "0: expected a whole number above 0" in capsys.readouterr().err
    assert main([*command, "1", "--on-error", "drop"]) == 0
    assert main(["--annotations", str(coco_file(tmp_path, [[1, 1, 20, 10]]))]) == BadInput.exit_code
    assert "1 boxes" in capsys.readouterr().err


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.floats(-0.5, 1.5),
)
def test_mixup(size1, size2, counts, lam):
    first, second = (sample([[0, 0, k + 1, k + seed] for k in range(n)], size_hw, [[0, n - 1, 5]] if n else ())
                     for seed, (n, size_hw) in enumerate(zip(counts, (size1, size2), strict=True), 1))  # fmt: skip
    second[1]["image_id"] = 2
    image, t = mixup(first, second, lam)
    assert t["image_id"] == 7 and image.dtype == torch.uint8
    if lam >= 1:
        assert torch.equal(image, first[0]) and t["mixup"].tolist() == [1.0] * counts[0]
        return
    lam, total = max(lam, 0.0), sum(counts)
    assert image.shape == (3, max(size1[0], size2[0]), max(size1[1], size2[1]))
    assert t["size"].tolist() == t["orig_size"].tolist() == list(image.shape[1:])
    assert {len(t[name]) for name in ("boxes", "labels", "area", "iscrowd", "mixup")} == {total}
    assert t["mixup"].tolist() == pytest.approx([lam] * counts[0] + [1 - lam] * counts[1])
    sources = [(s["boxes"], offset) for s, offset in ((first[1], 0), (second[1], counts[0])) if len(s["boxes"])]
    for (subject, object_, _), (boxes, offset) in zip(t["relations"].tolist(), sources, strict=True):
        assert torch.equal(t["boxes"][subject], boxes[0])
        assert object_ - offset == len(boxes) - 1
    exact = torch.zeros(image.shape, dtype=torch.float64)
    exact[:, : size1[0], : size1[1]] += lam * first[0].double()
    exact[:, : size2[0], : size2[1]] += (1 - lam) * second[0].double()
    difference = exact - image
    assert difference.min() > -1e-3
    assert difference.max() < 1 + 1e-3


def test_mixup_share_is_a_function_of_the_generator():
    draws, again = ([draw_mixup_lambda(torch.Generator().manual_seed(i)) for i in range(300)] for _ in range(2))
    assert draws == again and 0 <= min(draws) < 0.1 < 0.9 < max(draws) <= 1
    assert np.mean(draws) == pytest.approx(0.5, abs=0.05)  # Beta(1.5, 1.5): mean 1/2, standard deviation 1/4
    assert np.std(draws) == pytest.approx(0.25, abs=0.03)
