"""What the members of the DETR family share: held to transformers in forward, losses, detections and saved folders."""

import numpy as np
import pytest
import torch
from contract import trained_without_gradient
from PIL import Image
from small_detectors import (
    CATEGORIES,
    CLASSES,
    OF_TRANSFORMERS,
    REAL_TIME,
    SMALL,
    TINY_RF_DETR,
    batch_of,
    build,
    forward,
    hub_config,
    image_size,
    run,
    small,
    transformers_labels,
    wake,
)
from torch.testing import assert_close
from transformers import AutoImageProcessor, AutoModelForObjectDetection, pipeline

from toolkit.base.batch import normalize_images, pixel_mask
from toolkit.base.errors import BadInput

MATCHED = [name for name in SMALL if name not in ("detr", *REAL_TIME)]
FIXED = ("rf_detr", "lw_detr", *REAL_TIME)  # they ignore padding


@pytest.mark.parametrize("name", MATCHED)
@pytest.mark.parametrize("counts", [(2, 0, 1), (0, 0, 0)])
def test_forward_and_losses_are_those_of_transformers(name, counts):
    detector = wake(small(name)).train()
    batch = batch_of(counts, image_size(name), smaller=None if detector.fixed_size else (40, 90))
    counted = {key: max(1.0, value) for key, value in detector.denominators(batch.targets).items()}
    outputs = forward(detector, batch)
    losses, metrics = detector.criterion(outputs, batch.targets, counted)

    model = detector.model
    model.config.auxiliary_loss = auxiliary = name != "conditional_detr"  # wrong there
    costs = map(int, detector.set_loss.matching_costs)  # transformers takes whole numbers only
    model.config.class_cost, model.config.bbox_cost, model.config.giou_cost = costs
    pixels = normalize_images(batch.images, batch.sizes, detector.mean, detector.std)
    mask = {} if detector.fixed_size else {"pixel_mask": pixel_mask(batch.sizes, pixels.shape[-2:])}
    theirs = model(pixels, **mask, labels=transformers_labels(batch.targets))
    assert_close(outputs["logits"][-1], theirs.logits, rtol=1e-4, atol=1e-5)
    assert_close(outputs["boxes"][-1], theirs.pred_boxes, rtol=1e-4, atol=1e-5)
    compared = {key: value for key, value in theirs.loss_dict.items() if key.startswith("loss")}
    proposals = {key for key in losses if key.endswith("_enc") and key not in compared}  # transformers has no such loss
    assert bool(proposals) == (name == "deformable_detr++")
    assert set(losses) - proposals == set(compared) or not auxiliary
    for key, value in compared.items():
        assert_close(losses[key], value, rtol=1e-5, atol=1e-5, msg=key)
    assert metrics["class_error"][1] == sum(counts)


@pytest.mark.parametrize("name", SMALL)
def test_half_precision_is_for_training_and_never_for_losses(name):
    # As many queries as positions: otherwise rounding decides which of them become queries at all.
    detector = wake(small(name, **({"num_queries": 126} if name in REAL_TIME else {}))).train()
    batch = batch_of([2, 1], image_size(name))
    torch.manual_seed(0)
    full, _ = run(detector, batch)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        losses, _ = run(detector, batch)
    assert {value.dtype for value in losses.values()} == {torch.float32}
    assert sum(losses.values()).item() == pytest.approx(sum(full.values()).item(), rel=0.05)


@pytest.mark.parametrize(
    "name",
    [
        "conditional_detr",
        "deformable_detr",
        "dab-detr",
        "rf_detr",
        "lw_detr",
    ],
)
def test_without_auxiliary_losses_the_last_layer_alone_has_some(name):
    losses, _ = run(small(name, aux_loss=False).eval(), batch_of([1], image_size(name)))
    assert not [key for key in losses if key.endswith("_0")]


# (name, settings, height and width, what the error says)
REFUSED = [
    ("rf_detr", {}, (64, 72), "64x72 px.*multiples of 16"),
    ("rf_detr", {"num_queries": 5}, (16, 16), "num_queries 5.*only 4 positions"),
    ("lw_detr", {}, (64, 96), "64x96 px: lw_detr needs.*multiples of 64"),
    ("lw_detr", {"num_queries": 69}, (64, 64), "num_queries 69.*only 68 positions"),
    (
        "deformable_detr++",
        {"num_queries": 23},
        (32, 32),
        "num_queries 23.*only 22 positions",
    ),
    ("rt_detr_v2", {}, (64, 80), "multiples of 32"),
    ("rt_detr_v2", {"num_queries": 22}, (32, 32), "num_queries 22.*only 21 positions"),
]


@pytest.mark.parametrize(("name", "options", "hw", "words"), REFUSED)
def test_images_that_a_detector_cannot_work_with_are_refused(name, options, hw, words):
    detector = small(name, **options).eval()
    with pytest.raises(BadInput, match=words):
        detector(torch.zeros(1, 3, *hw, dtype=torch.uint8), torch.tensor([hw]))


def test_ddp_is_told_of_heads_and_stages_without_a_loss():
    dinov3 = hub_config("dinov3")
    del dinov3["backbone_config"]["stage_names"]
    dinov3["backbone_config"]["num_hidden_layers"] = 4
    from_the_end = TINY_RF_DETR["backbone_config"] | {"num_hidden_layers": 4, "out_indices": [-4, -3]}
    cases = {
        "deimv2": {"source_config": dinov3, "num_denoising": 0},
        "deformable_detr": SMALL["deformable_detr"] | {"box_refine": "iterative", "aux_loss": False},
        "rf_detr": {"source_config": TINY_RF_DETR | {"backbone_config": from_the_end}},
    }
    for name, options in cases.items():
        detector = build(name, **options).train()
        losses, _ = run(detector, batch_of([2, 1], (64, 64)))
        sum(losses.values()).backward()
        assert trained_without_gradient(detector), name
        assert detector.leaves_unused, name


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_the_final_folder_gives_the_same_boxes_in_transformers_and_its_pipeline(tmp_path, name):
    detector = small(name)
    run(detector.train(), batch_of([1, 2], image_size(name)))  # live norms move away from where they started
    wake(detector).eval()
    auxiliary = detector.model.config.auxiliary_loss
    detector.save_final(tmp_path, CATEGORIES, {"height": 64, "width": 64} if name in FIXED else None)
    assert detector.model.config.auxiliary_loss is auxiliary  # training goes on unchanged

    batch = batch_of([0, 0], (64, 64)) if name in FIXED else batch_of([0, 0], smaller=(40, 90))
    images = [image[:, :h, :w] for image, (h, w) in zip(batch.images, batch.sizes.tolist(), strict=True)]
    orig_sizes = torch.tensor([[480, 640], [333, 500]])
    model = AutoModelForObjectDetection.from_pretrained(tmp_path).eval()
    assert model.config.id2label == dict(enumerate(CLASSES))
    assert model.config.auxiliary_loss is False
    assert '"id": 90' in (tmp_path / "categories.json").read_text()
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    size = batch.sizes[1:]
    with torch.no_grad():
        outputs = detector(batch.images, batch.sizes)
        ours = detector.postprocess(
            outputs,
            batch.sizes,
            orig_sizes,
            score_threshold=-1.0,
            top_k=6,
        )
        (alone,) = detector.postprocess(
            detector(batch.images[1:], size),
            size,
            size,
            0.0,
            top_k=6,
        )
        answer = model(**processor(images=images, return_tensors="pt"))
        theirs = processor.post_process_object_detection(answer, -1.0, target_sizes=orig_sizes)
    for mine, other in zip(ours, theirs, strict=True):
        count = len(mine["scores"])  # transformers' top_k is 100
        assert_close(mine["scores"], other["scores"][:count], rtol=0, atol=1e-4)
        assert_close(mine["boxes"], other["boxes"][:count], rtol=1e-5, atol=1e-3)
        assert mine["labels"].tolist() == other["labels"][:count].tolist()

    detect = pipeline("object-detection", model=model, image_processor=processor)
    found = detect(Image.fromarray(images[1].permute(1, 2, 0).numpy()), threshold=0.0)[:6]
    np.testing.assert_allclose([each["score"] for each in found], alone["scores"], atol=1e-4)
    assert [each["label"] for each in found] == [CLASSES[label] for label in alone["labels"]]
    lefts = [each["box"]["xmin"] for each in found]
    np.testing.assert_allclose(lefts, alone["boxes"][:, 0].trunc(), atol=1)  # cut to whole pixels
