"""RF-DETR with masks: forward, matching and losses, held to transformers'; weights, folders and the contract."""

import json

import pytest
import torch
from contract import assert_losses_are_divided_as_announced, assert_resolved_options_build_it_again
from published import not_taken, numbers, published
from small_detectors import (
    CATEGORIES,
    CLASSES,
    TINY_RF_DETR,
    batch_of,
    build,
    gradient_of,
    run,
    transformers_labels,
    wake,
)
from torch.nn.functional import interpolate
from transformers import RfDetrForInstanceSegmentation, RfDetrImageProcessor
from transformers.models.rf_detr.modeling_rf_detr import RfDetrInstanceSegmentationOutput

from toolkit.base.batch import normalize_images
from toolkit.base.seeding import seed_images
from toolkit.detectors.detr.options import RfDetrOptions
from toolkit.detectors.detr.weights_rf_detr import RF_DETR
from toolkit.models import build_detector, pasted_masks
from toolkit.models.start import start_detector
from toolkit.models.weights.mapping import map_weights
from toolkit.models.weights.pretrained import open_pretrained
from toolkit.models.weights.weight_files import fitting

# 4 groups of 8 queries and 2 images: as many points as transformers matches at, of masks of 16 x 16 cells
TINY = TINY_RF_DETR | {"num_queries": 8, "group_detr": 4, "intermediate_size": 64}

LOW = 0.002  # a probability, above which some of the detections of random weights are


def detector_of(seed=0, **options):
    detector = wake(build("rf_detr", seed, **{"source_config": TINY, "masks": True, **options}))
    if detector.predicts_masks:
        torch.nn.init.constant_(detector.masks.segmentation_bias, 0.1)
    return detector


def with_masks(batch):
    """Each object is the ellipse in its box."""
    height, width = batch.images.shape[-2:]
    y, x = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    for target in batch.targets:
        left, top, right, bottom = target["boxes"].float().T[..., None, None]
        across = (2 * x - left - right) / (right - left)
        down = (2 * y - top - bottom) / (bottom - top)
        target["masks"] = (across**2 + down**2 < 1).to(torch.uint8)
    return batch


def masks_batch(counts, crowd=0):
    return with_masks(batch_of(counts, (64, 64), crowd))


def same_points(monkeypatch):
    """Every draw of as many points gives the same ones, here and in transformers."""

    def rand(*shape, dtype=None, device=None, generator=None):
        points = torch.empty(shape[-2:]).uniform_(generator=torch.Generator().manual_seed(shape[-2]))
        return points.expand(shape).clone()

    monkeypatch.setattr(torch, "rand", rand)


def test_pixels_of_masks_are_those_of_all_of_the_picture_interpolated(monkeypatch):
    """Around the cells that are inside alone, where these are few."""
    sizes_hw = []

    def noted(values, size, **options):
        sizes_hw.append(size)
        return interpolate(values, size=size, **options)

    monkeypatch.setattr(pasted_masks, "interpolate", noted)
    draws = torch.Generator().manual_seed(0)
    for side_hw, size_hw in (((13, 9), (100, 71)), ((27, 31), (20, 40)), ((1, 1), (3, 2)), ((4, 24), (96, 96))):
        masks = torch.rand(12, *side_hw, generator=draws)
        masks[:8] *= 0.6  # few cells are inside
        masks[0] = 0.1
        masks[1:3] = 0.1
        masks[1, 0, 0] = masks[2, -1, -1] = 0.9
        masks[3] = 0.9
        pixels = pasted_masks.masks_over_image(masks, size_hw)
        logits = interpolate(masks.logit()[:, None], size=size_hw, mode="bilinear", align_corners=False)[:, 0]
        assert pixels.shape == logits.shape and not pixels[0].any()
        assert torch.equal(pixels | (logits.abs() < 1e-5), (logits > 0) | (logits.abs() < 1e-5))
    sizes_hw.clear()
    small = torch.zeros(5, 20, 20)
    small[:, 4:9, 7:12] = 0.8
    assert pasted_masks.masks_over_image(small, (500, 400)).any() and (500, 400) not in sizes_hw


@pytest.mark.parametrize("counts", [(3, 1), (0, 4), (0, 0)])
def test_forward_losses_and_gradients_are_those_of_transformers(counts, monkeypatch):
    same_points(monkeypatch)
    detector = detector_of().train()
    batch = masks_batch(counts)
    counted = {key: max(1.0, value) for key, value in detector.denominators(batch.targets).items()}
    outputs = detector(batch.images, batch.sizes, batch.targets)
    losses, _ = detector.criterion(outputs, batch.targets, counted)
    assert set(losses) == set(detector.loss_names) and len(losses) == 5 * 3

    model = detector._saved_model().train()
    model.config.auxiliary_loss = True
    costs = map(int, detector.set_loss.matching_costs)  # transformers takes whole numbers only
    model.config.class_cost, model.config.bbox_cost, model.config.giou_cost = costs
    labels = transformers_labels(batch.targets)
    for label, target in zip(labels, batch.targets, strict=True):
        label["masks"] = target["masks"].float()
    pixels = normalize_images(batch.images, batch.sizes, detector.mean, detector.std)
    theirs = model(pixels, labels=labels)
    ours = outputs["mask_queries"] @ outputs["mask_maps"].flatten(3) + outputs["mask_bias"]
    torch.testing.assert_close(ours[-2].unflatten(2, (16, 16)), theirs.pred_masks, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours[-1].unflatten(2, (16, 16)), theirs.enc_outputs_mask_logits, rtol=1e-4, atol=1e-4)
    compared = {key: value for key, value in theirs.loss_dict.items() if key.startswith("loss")}
    assert set(compared) == set(losses)
    for key, value in compared.items():
        value = value.sum() if "mask" in key else value  # theirs is an empty tensor without objects
        torch.testing.assert_close(losses[key], value, rtol=1e-4, atol=1e-5, msg=key)
    sum(losses.values()).backward()
    sum(value.sum() for value in compared.values()).backward()
    wanted = dict(model.named_parameters())
    ours = {f"model.{name}": parameter for name, parameter in detector.model.named_parameters()}
    ours |= dict(detector.masks.named_parameters())
    assert ours.keys() == wanted.keys()
    for name, parameter in ours.items():
        if parameter.requires_grad:
            other = wanted[name].grad
            other = torch.zeros_like(parameter) if other is None else other
            torch.testing.assert_close(parameter.grad, other, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("training", [True, False])
def test_draws_of_points_are_the_image_s_own(training):
    """So four images at once have the gradients of two times two, crowd regions among them; without denoising."""
    detector = detector_of().train(training)
    batch = masks_batch([2, 0, 3, 1], crowd=1)
    seed_images(batch.targets, 0, 7)
    whole = gradient_of(detector, batch, 4)
    assert whole.norm() > 0 and (gradient_of(detector, batch, 2) - whole).norm() / whole.norm() < 1e-4
    seed_images(batch.targets, 0, 8)
    other = gradient_of(detector, batch, 4)
    assert ((other - whole).norm() / whole.norm() > 1e-4) == training, "other points in the next step"


def test_crowd_regions_have_no_mask_and_every_loss_its_denominator():
    detector = detector_of().train()
    batch = masks_batch([3, 2], crowd=1)
    seed_images(batch.targets, 0, 0)
    outputs = detector(batch.images, batch.sizes, batch.targets)
    assert_losses_are_divided_as_announced(detector, outputs, batch.targets)
    before = run(detector.eval(), batch)[0]
    for target in batch.targets:
        target["masks"][0] = 1 - target["masks"][0]
    assert run(detector, batch)[0] == before
    batch.targets[0]["masks"][1] = 1 - batch.targets[0]["masks"][1]
    assert run(detector, batch)[0]["loss_mask_ce"] != before["loss_mask_ce"]


def test_detections_have_the_masks_that_transformers_finds():
    detector = detector_of().eval()
    batch = masks_batch([1, 1])
    model = detector._saved_model().eval()
    sizes, original = batch.sizes, torch.tensor([[50, 70], [128, 100]])
    with torch.no_grad():
        found = detector.postprocess(detector(batch.images, batch.sizes), sizes, original, LOW, 20)
        pixels = normalize_images(batch.images, batch.sizes, detector.mean, detector.std)
        theirs = model(pixels)
    assert isinstance(theirs, RfDetrInstanceSegmentationOutput)
    processor = RfDetrImageProcessor()
    expected = processor.post_process_instance_segmentation(
        theirs, threshold=LOW, target_sizes=original.tolist(), return_binary_maps=True, top_k=20
    )
    for image, other, size in zip(found, expected, original.tolist(), strict=True):
        assert len(image["boxes"]) == len(image["masks"]) > 3
        ours = detector.paste_masks(image["masks"], image["boxes"], tuple(size))
        seen = ours.flatten(1).any(1)  # transformers leaves out empty ones
        assert len(other["segments_info"]) == seen.sum() > 3
        assert (ours[seen] != other["segmentation"]).float().mean() < 1e-4
        scores = [segment["score"] for segment in other["segments_info"]]
        torch.testing.assert_close(image["scores"][seen], torch.tensor(scores), rtol=0, atol=2e-6)


def test_without_masks_nothing_changes():
    detector = detector_of(masks=False).train()
    assert not detector.predicts_masks and not any("mask" in name for name in detector.loss_names)
    assert not any(name.startswith("masks.") for name in detector.state_dict())
    batch = masks_batch([2, 1])
    outputs = detector(batch.images, batch.sizes, batch.targets)
    assert not any("mask" in name for name in outputs)
    assert len(detector.decode(outputs, batch.sizes, batch.sizes, 0.0, 5)) == 3


def test_a_saved_folder_is_transformers_own_and_opens_again(tmp_path):
    detector = detector_of(aux_loss=False).eval()
    detector.save_final(tmp_path, CATEGORIES, {"height": 64, "width": 64})
    theirs = RfDetrForInstanceSegmentation.from_pretrained(tmp_path).eval()
    batch = masks_batch([1, 1])
    with torch.no_grad():
        outputs = detector(batch.images, batch.sizes)
        pixels = normalize_images(batch.images, batch.sizes, detector.mean, detector.std)
        masks = theirs(pixels).pred_masks
    ours = outputs["mask_queries"][-2] @ outputs["mask_maps"][-2].flatten(2) + outputs["mask_bias"]
    torch.testing.assert_close(ours.unflatten(2, (16, 16)), masks, rtol=1e-4, atol=1e-4)
    source = open_pretrained(str(tmp_path))
    assert source.options["masks"] is True and source.class_names == CLASSES
    assert source.tensors.keys() == detector.state_dict().keys()
    assert all(torch.equal(source.tensors[name], value) for name, value in detector.state_dict().items())
    assert_resolved_options_build_it_again(detector, CLASSES, ("pretrained", "size"))


@pytest.mark.parametrize("masks", [False, True])
def test_a_training_takes_masks_by_its_own_setting_from_a_folder_with_or_without(masks, tmp_path):
    source = detector_of(seed=1, masks=not masks)
    source.save_final(tmp_path / "final", CATEGORIES, {"height": 64, "width": 64})
    given = {"pretrained": str(tmp_path / "final")} | ({"masks": True} if masks else {})
    started = start_detector(RfDetrOptions(**given), CLASSES, tmp_path, resumed_from=None, say=lambda text: None)
    assert started.predicts_masks == started.resolved_options()["masks"] == masks
    assert json.loads((tmp_path / "pretrained_config.json").read_text())["options"].get("masks", False) == masks
    table = (tmp_path / "pretrained.txt").read_text()
    assert f"{'new' if masks else 'unused':<7s} masks.blocks.0.depthwise_conv.weight" in table
    assert "loaded  model.class_embed.weight" in table


def test_the_publisher_s_file_with_masks_is_read():
    """The names of its segmentation head; those of the rest: tests/test_weights_published.py."""
    state, _ = published("rfdetr_nano")
    width, layers = state["query_feat.weight"].shape[1], 2
    head = {"bias": (1,), "spatial_features_proj.weight": (width, width, 1, 1), "spatial_features_proj.bias": (width,)}
    square, vector = (width, width), (width,)
    for number in range(layers):
        block = f"blocks.{number}"
        head |= {f"{block}.dwconv.weight": (width, 1, 3, 3), f"{block}.dwconv.bias": vector}
        head |= {f"{block}.norm.weight": vector, f"{block}.norm.bias": vector}
        head |= {f"{block}.pwconv1.weight": square, f"{block}.pwconv1.bias": vector}
    head |= {"query_features_proj.weight": square, "query_features_proj.bias": vector}
    block = "query_features_block"
    head |= {f"{block}.norm_in.weight": vector, f"{block}.norm_in.bias": vector}
    head |= {f"{block}.layers.0.weight": (4 * width, width), f"{block}.layers.0.bias": (4 * width,)}
    head |= {f"{block}.layers.2.weight": (width, 4 * width), f"{block}.layers.2.bias": vector}
    state |= {f"segmentation_head.{name}": numbers(name, shape) for name, shape in head.items()}
    found, ours = fitting(RF_DETR, state, "rf-detr-seg-small.pt")
    assert found.options["masks"] is True and found.options["source_config"]["decoder_layers"] == layers
    assert found.options["source_config"]["backbone_config"]["num_windows"] == 2
    detector = build_detector(found.architecture, class_names=found.class_names, **found.options)
    table = map_weights(detector.state_dict(), ours)
    assert not table.unused and not [name for name in table.new if "register_tokens" not in name]
    assert [name for name in not_taken(state, ours) if "mask_token" not in name and "_kp" not in name] == []
