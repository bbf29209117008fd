"""RF-DETR with masks: forward, matching, losses and detections, held to transformers'; its folder and its settings."""

import json

import pytest
import torch
from contract import assert_losses_are_divided_as_announced, assert_resolved_options_build_it_again
from small_detectors import (
    CATEGORIES,
    CLASSES,
    TINY_RF_DETR,
    batch_of,
    build,
    forward,
    gradient_of,
    predicted,
    run,
    transformers_labels,
    wake,
)
from torch.testing import assert_close
from transformers import RfDetrForInstanceSegmentation, RfDetrImageProcessor

from toolkit.base.batch import normalize_images
from toolkit.base.seeding import seed_images
from toolkit.detectors.detr.mask_terms import MaskTerms
from toolkit.detectors.detr.options import RfDetrOptions
from toolkit.models.start import start_detector
from toolkit.models.weights.pretrained import open_pretrained

# 4 groups of 8 queries and 2 images: as many points as transformers matches at, of masks of 16 x 16 cells
TINY = TINY_RF_DETR | {"num_queries": 8, "group_detr": 4, "intermediate_size": 64}
CELLS = (16, 16)
LOW = 0.002  # a probability, above which some of the detections of random weights are


def detector_of(seed=0, **options):
    detector = wake(build("rf_detr", seed, **{"source_config": TINY, "masks": True, **options}))
    if detector.predicts_masks:
        torch.nn.init.constant_(detector.masks.segmentation_bias, 0.1)
    return detector


def masks_batch(counts, crowd=0):
    """Each object is the ellipse in its box."""
    batch = batch_of(counts, (64, 64), crowd)
    y, x = torch.meshgrid(torch.arange(64) + 0.5, torch.arange(64) + 0.5, indexing="ij")
    for target in batch.targets:
        left, top, right, bottom = target["boxes"].float().T[..., None, None]
        across = (2 * x - left - right) / (right - left)
        down = (2 * y - top - bottom) / (bottom - top)
        target["masks"] = (across**2 + down**2 < 1).to(torch.uint8)
    return batch


def pixels_of(detector, batch):
    return normalize_images(batch.images, batch.sizes, detector.mean, detector.std)


def mask_logits(outputs, layer: int) -> torch.Tensor:
    logits = outputs["mask_queries"][layer] @ outputs["mask_maps"][layer].flatten(2) + outputs["mask_bias"]
    return logits.unflatten(2, CELLS)


def same_points(monkeypatch):
    """Every draw of as many points gives the same ones, here and in transformers."""

    def rand(*shape, dtype=None, device=None, generator=None):
        points = torch.empty(shape[-2:]).uniform_(generator=torch.Generator().manual_seed(shape[-2]))
        return points.expand(shape).clone()

    monkeypatch.setattr(torch, "rand", rand)


@pytest.mark.parametrize("counts", [(3, 1), (0, 4), (0, 0)])
def test_forward_losses_and_gradients_are_those_of_transformers(counts, monkeypatch):
    same_points(monkeypatch)
    detector = detector_of().train()
    assert isinstance(detector.set_loss.masks, MaskTerms)
    batch = masks_batch(counts)
    counted = {key: max(1.0, value) for key, value in detector.denominators(batch.targets).items()}
    outputs = forward(detector, batch)
    losses, _ = detector.criterion(outputs, batch.targets, counted)

    model = detector._saved_model().train()
    model.config.auxiliary_loss = True
    costs = map(int, detector.set_loss.matching_costs)  # transformers takes whole numbers only
    model.config.class_cost, model.config.bbox_cost, model.config.giou_cost = costs
    labels = transformers_labels(batch.targets)
    for label, target in zip(labels, batch.targets, strict=True):
        label["masks"] = target["masks"].float()
    theirs = model(pixels_of(detector, batch), labels=labels)
    assert_close(mask_logits(outputs, -2), theirs.pred_masks, rtol=1e-4, atol=1e-4)
    assert_close(
        mask_logits(outputs, -1),
        theirs.enc_outputs_mask_logits,
        rtol=1e-4,
        atol=1e-4,
    )
    compared = {key: value for key, value in theirs.loss_dict.items() if key.startswith("loss")}
    assert set(compared) == set(losses) == set(detector.loss_names)
    for key, value in compared.items():
        assert_close(
            losses[key],
            value.sum(),
            rtol=1e-4,
            atol=1e-5,
            msg=key,
        )  # masks: empty without objects
    sum(losses.values()).backward()
    sum(value.sum() for value in compared.values()).backward()
    ours = {f"model.{name}": parameter for name, parameter in detector.model.named_parameters()}
    ours |= dict(detector.masks.named_parameters())
    wanted = dict(model.named_parameters())
    assert ours.keys() == wanted.keys()
    for name, parameter in ours.items():
        if parameter.requires_grad:
            expected = torch.zeros_like(parameter) if wanted[name].grad is None else wanted[name].grad
            assert_close(parameter.grad, expected, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("training", [True, False])
def test_draws_of_points_are_the_image_s_own(training):
    """So four images at once have the gradients of two times two, crowd regions among them; without denoising."""
    detector = detector_of().train(training)
    batch = masks_batch([2, 0, 3, 1], crowd=1)
    seed_images(batch.targets, 0, 7)
    whole = gradient_of(detector, batch, 4)
    assert whole.norm() > 0
    assert (gradient_of(detector, batch, 2) - whole).norm() / whole.norm() < 1e-4
    seed_images(batch.targets, 0, 8)
    other = gradient_of(detector, batch, 4)
    assert ((other - whole).norm() / whole.norm() > 1e-4) == training, "other points in the next step"


def test_crowd_regions_have_no_mask_and_every_loss_its_denominator():
    detector = detector_of().train()
    batch = masks_batch([3, 2], crowd=1)
    seed_images(batch.targets, 0, 0)
    assert_losses_are_divided_as_announced(detector, forward(detector, batch), batch.targets)
    before = run(detector.eval(), batch)[0]
    for target in batch.targets:
        target["masks"][0] = 1 - target["masks"][0]
    assert run(detector, batch)[0] == before
    batch.targets[0]["masks"][1] = 1 - batch.targets[0]["masks"][1]
    assert run(detector, batch)[0]["loss_mask_ce"] != before["loss_mask_ce"]


def test_objects_with_a_box_alone_train_the_boxes_and_no_mask():
    detector = detector_of().eval()
    batch = masks_batch([3, 2])
    before = run(detector, batch)[0]
    for target in batch.targets:
        target["has_mask"] = torch.ones(len(target["labels"]), dtype=torch.bool)
    assert run(detector, batch)[0] == before
    batch.targets[0]["has_mask"][1] = False
    del batch.targets[1]["has_mask"]
    without = run(detector, batch)[0]
    assert without["loss_mask_ce"] < before["loss_mask_ce"]
    batch.targets[0]["masks"][1] = 1 - batch.targets[0]["masks"][1]
    assert run(detector, batch)[0] == without  # neither losses nor matches look at that mask
    for target in batch.targets:
        target["has_mask"] = torch.zeros(len(target["labels"]), dtype=torch.bool)
    none = run(detector, batch)[0]
    assert none["loss_mask_ce"] == none["loss_mask_dice"] == 0
    assert none["loss_bbox"] > 0


def test_detections_have_the_masks_that_transformers_finds():
    detector = detector_of()
    batch = masks_batch([1, 1])
    original = torch.tensor([[50, 70], [128, 100]])
    found = detector.postprocess(
        predicted(detector, batch),
        batch.sizes,
        original,
        LOW,
        20,
    )
    with torch.no_grad():
        theirs = detector._saved_model().eval()(pixels_of(detector, batch))
    expected = RfDetrImageProcessor().post_process_instance_segmentation(
        theirs,
        threshold=LOW,
        target_sizes=original.tolist(),
        return_binary_maps=True,
        top_k=20,
    )
    for image, other, size in zip(found, expected, original.tolist(), strict=True):
        assert len(image["boxes"]) == len(image["masks"]) > 3
        ours = detector.paste_masks(image["masks"], image["boxes"], tuple(size))
        seen = ours.flatten(1).any(1)  # transformers leaves out empty ones
        assert len(other["segments_info"]) == seen.sum() > 3
        assert (ours[seen] != other["segmentation"]).float().mean() < 1e-4
        scores = [segment["score"] for segment in other["segments_info"]]
        assert_close(image["scores"][seen], torch.tensor(scores), rtol=0, atol=2e-6)


def test_a_saved_folder_is_transformers_own_and_opens_again(tmp_path):
    detector = detector_of(aux_loss=False)
    detector.save_final(tmp_path, CATEGORIES, {"height": 64, "width": 64})
    theirs = RfDetrForInstanceSegmentation.from_pretrained(tmp_path).eval()
    batch = masks_batch([1, 1])
    with torch.no_grad():
        masks = theirs(pixels_of(detector, batch)).pred_masks
    assert_close(
        mask_logits(predicted(detector, batch), -2),
        masks,
        rtol=1e-4,
        atol=1e-4,
    )
    source = open_pretrained(str(tmp_path))
    assert source.options["masks"] is True
    assert source.class_names == CLASSES
    assert_close(source.tensors, dict(detector.state_dict()), rtol=0, atol=0)
    assert_resolved_options_build_it_again(detector, CLASSES, ("pretrained", "size"))


@pytest.mark.parametrize("masks", [False, True])
def test_a_training_takes_masks_by_its_own_setting_from_a_folder_with_or_without(masks, tmp_path):
    source = detector_of(seed=1, masks=not masks)
    source.save_final(tmp_path / "final", CATEGORIES, {"height": 64, "width": 64})
    given = {"masks": True} if masks else {}
    options = RfDetrOptions(pretrained=str(tmp_path / "final"), **given)
    started = start_detector(
        options,
        CLASSES,
        tmp_path,
        resumed_from=None,
        say=lambda text: None,
    )
    assert started.predicts_masks == started.resolved_options()["masks"] == masks
    assert json.loads((tmp_path / "pretrained_config.json").read_text())["options"].get("masks", False) == masks
    table = (tmp_path / "pretrained.txt").read_text()
    assert f"{'new' if masks else 'unused':<7s} masks.blocks.0.depthwise_conv.weight" in table
    assert "loaded  model.class_embed.weight" in table
