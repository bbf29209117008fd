"""What members of the DETR family share: losses, initial weights, sources, the final folder, two ranks."""


import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from processes import run_on_ranks
from safetensors.torch import save_file
from small_detectors import (
    CATEGORIES,
    CLASSES,
    OF_TRANSFORMERS,
    REAL_TIME,
    SMALL,
    batch_of,
    build,
    image_size,
    random_target,
    run,
    small,
    transformers_labels,
    wake,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoImageProcessor, AutoModelForObjectDetection, pipeline
from transformers.loss.loss_lw_detr import LwDetrHungarianMatcher, LwDetrImageLoss

from toolkit.base.batch import normalize_images, pixel_mask
from toolkit.base.errors import BadInput
from toolkit.detectors.detr.focal_criterion import FocalCriterion, quality_terms
from toolkit.step.losses import window_denominators

NEW = [name for name in SMALL if name not in ("detr", *REAL_TIME)]
ON_RANKS = ["conditional_detr", "deformable_detr++", "dab-detr", "rf_detr", "lw_detr", *REAL_TIME]
FIXED = ("rf_detr", "lw_detr", *REAL_TIME)  # they ignore padding

def random_outputs(num_layers, batch_size, queries, seed=5):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_layers + 1, batch_size, queries)
    logits = torch.randn(*shape, len(CLASSES), generator=generator, dtype=torch.float64)
    boxes = torch.rand(*shape, 4, generator=generator, dtype=torch.float64) * 0.4 + 0.2
    return {"logits": logits[:-1], "boxes": boxes[:-1], "encoder_logits": logits[-1], "encoder_boxes": boxes[-1]}


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 8), min_size=1, max_size=3), st.sampled_from([1, 3]))
def test_losses_of_group_detr_are_those_of_transformers(seed, counts, groups):
    targets = [random_target(n, seed=seed % 1000 + n, dtype=torch.float64) for n in counts]
    outputs = random_outputs(3, len(counts), 5 * groups, seed)
    criterion = FocalCriterion(3, encoder="classes", class_terms=quality_terms)
    boxes = max(1.0, float(sum(counts) * groups))
    losses, _ = criterion(outputs, targets, {"boxes": boxes}, groups)

    theirs = LwDetrImageLoss(LwDetrHungarianMatcher(2, 5, 2), len(CLASSES), 0.25, ["labels", "boxes"], groups)
    pairs = [{"logits": c, "pred_boxes": b} for c, b in zip(outputs["logits"], outputs["boxes"], strict=True)]
    encoder = {"logits": outputs["encoder_logits"], "pred_boxes": outputs["encoder_boxes"]}
    wanted = theirs(pairs[-1] | {"auxiliary_outputs": pairs[:-1], "enc_outputs": encoder}, transformers_labels(targets))
    assert set(losses) == set(wanted) == set(criterion.loss_names)
    for name, value in wanted.items():
        torch.testing.assert_close(losses[name], value, rtol=1e-5, atol=1e-5, msg=name)


def test_groups_are_matched_each_by_itself_and_only_the_first_is_measured():
    outputs = random_outputs(2, 2, 8)
    targets = [random_target(3, dtype=torch.float64), random_target(1, seed=1, dtype=torch.float64)]
    criterion = FocalCriterion(2, encoder="classes", class_terms=quality_terms)
    whole, metrics = criterion(outputs, targets, {"boxes": 1.0}, groups=2)
    halves = [
        criterion({k: v[..., part, :] for k, v in outputs.items()}, targets, {"boxes": 1.0})
        for part in (slice(0, 4), slice(4, 8))
    ]
    for name, value in whole.items():
        torch.testing.assert_close(value, sum(losses[name] for losses, _ in halves))
    assert metrics == halves[0][1] and metrics["class_error"][1] == 4


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("counts", [(2, 0, 1), (0, 0, 0)])
def test_forward_and_losses_are_those_of_transformers(name, counts):
    detector = wake(small(name)).train()
    batch = batch_of(counts, image_size(name), smaller=None if detector.fixed_size else (40, 90))
    counted = {key: max(1.0, value) for key, value in detector.denominators(batch.targets).items()}
    outputs = detector(batch.images, batch.sizes, batch.targets)
    losses, metrics = detector.criterion(outputs, batch.targets, counted)
    assert tuple(sorted(losses)) == tuple(sorted(detector.loss_names)) and set(metrics) == set(detector.metric_names)

    model = detector.model
    model.config.auxiliary_loss = auxiliary = name != "conditional_detr"  # wrong there
    costs = map(int, detector.set_loss.matching_costs)  # transformers takes whole numbers only
    model.config.class_cost, model.config.bbox_cost, model.config.giou_cost = costs
    pixels = normalize_images(batch.images, batch.sizes, detector.mean, detector.std)
    mask = {} if detector.fixed_size else {"pixel_mask": pixel_mask(batch.sizes, pixels.shape[-2:])}
    theirs = model(pixels, **mask, labels=transformers_labels(batch.targets))
    torch.testing.assert_close(outputs["logits"][-1], theirs.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs["boxes"][-1], theirs.pred_boxes, rtol=1e-4, atol=1e-5)
    compared = {key: value for key, value in theirs.loss_dict.items() if key.startswith("loss")}
    proposals = {key for key in losses if key.endswith("_enc") and key not in compared}  # transformers has no such loss
    assert bool(proposals) == (name == "deformable_detr++")
    assert set(losses) - proposals == set(compared) or not auxiliary
    for key, value in compared.items():
        torch.testing.assert_close(losses[key], value, rtol=1e-5, atol=1e-5, msg=key)
    assert metrics["class_error"][1] == sum(counts)

    sum(losses.values()).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) > 20 and all(gradient.isfinite().all() for gradient in gradients)


def test_auxiliary_layers_of_conditional_detr_continue_the_raw_state():
    """With one layer less, the last predictions are those of the auxiliary layer with one layer more, and that layer
    changes nothing about the last one. transformers' own auxiliary path does."""
    two = wake(small("conditional_detr")).eval()
    one = small("conditional_detr", decoder_layers=1).eval()
    one.model.load_state_dict({k: v for k, v in two.model.state_dict().items() if "decoder.layers.1" not in k})
    batch = batch_of([1, 1])
    with torch.no_grad():
        auxiliary, last = (d(batch.images, batch.sizes) for d in (two, one))
    torch.testing.assert_close(auxiliary["logits"][0], last["logits"][0])
    torch.testing.assert_close(auxiliary["boxes"][0], last["boxes"][0])

    pixels = normalize_images(batch.images, batch.sizes, two.mean, two.std)
    with torch.no_grad():
        right = two.model(pixels)
        two.model.config.auxiliary_loss = True
        wrong = two.model(pixels, labels=transformers_labels(batch.targets))
    torch.testing.assert_close(auxiliary["logits"][-1], right.logits)
    assert (wrong.logits - right.logits).abs().max() > 0.01


def test_proposals_of_two_stage_deformable_detr_learn_foreground():
    """Their classes do not matter, and every position counts: the focal loss of class 0 over all of them."""
    outputs = random_outputs(1, 2, 7)
    criterion = FocalCriterion(1, encoder="foreground")
    targets = [random_target(3, dtype=torch.float64), random_target(0, dtype=torch.float64)]
    losses, _ = criterion(outputs, targets, {"boxes": 3.0})
    relabelled = [{**t, "labels": torch.zeros_like(t["labels"])} for t in targets]
    as_main = {"logits": outputs["encoder_logits"][None], "boxes": outputs["encoder_boxes"][None]}
    wanted, _ = FocalCriterion(1)(as_main, relabelled, {"boxes": 3.0})
    assert {name: losses[f"{name}_enc"] for name in wanted} == wanted


@pytest.mark.parametrize("name", list(SMALL))
def test_costs_and_weights_are_those_of_the_published_configuration(name):
    detector = small(name)
    options, published = detector.Options(), vars(detector.config_class())
    if hasattr(options, "class_cost"):  # not a setting of RT-DETR and its like
        costs = [published[f"{kind}_cost"] for kind in ("class", "bbox", "giou")]
        costs[0] += options.architecture == "deformable_detr"  # the original's is 2
        assert [options.class_cost, options.bbox_cost, options.giou_cost] == costs
    weights = {key.removeprefix("loss_"): value for key, value in detector.default_weights.items()}
    named = {kind: published.get(f"weight_loss_{kind}", published.get(f"{kind}_loss_coefficient")) for kind in weights}
    assert weights == {kind: weights[kind] if value is None else value for kind, value in named.items()}
    assert None not in (named["bbox"], named["giou"])


@pytest.mark.parametrize("name", list(SMALL))
def test_half_precision_is_for_training_and_never_for_losses(name):
    # As many queries as positions: otherwise rounding decides which of them become queries at all.
    options = {"num_queries": 126} if name in REAL_TIME else {}
    detector, batch = wake(small(name, **options)).train(), batch_of([2, 1], image_size(name))
    torch.manual_seed(0)
    full, _ = run(detector, batch)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        losses, _ = run(detector, batch)
    assert {value.dtype for value in losses.values()} == {torch.float32}
    assert sum(losses.values()).item() == pytest.approx(sum(full.values()).item(), rel=0.05)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        half = detector.eval()(batch.images, batch.sizes)
    torch.testing.assert_close(half["boxes"], detector(batch.images, batch.sizes)["boxes"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["conditional_detr", "rf_detr", "lw_detr"])
def test_crowd_regions_are_neither_matched_nor_counted(name):
    detector = wake(small(name)).eval()
    batch = batch_of([3, 1], image_size(name), crowd=1)
    without = [{**t, **{k: t[k][t["iscrowd"] == 0] for k in ("boxes", "labels", "iscrowd")}} for t in batch.targets]
    assert detector.denominators(batch.targets) == detector.denominators(without)
    outputs = detector(batch.images, batch.sizes, batch.targets)
    counted = detector.denominators(batch.targets)
    assert detector.criterion(outputs, batch.targets, counted) == detector.criterion(outputs, without, counted)


def test_one_layer_has_losses_without_auxiliary_ones():
    for name in ("conditional_detr", "deformable_detr", "dab-detr", "rf_detr", "lw_detr"):
        detector = small(name, aux_loss=False).eval()
        losses, _ = run(detector, batch_of([1], image_size(name)))
        assert not [key for key in losses if key.endswith("_0")]


@pytest.mark.parametrize("name", NEW)
def test_scores_start_at_the_prior_and_every_query_looks_elsewhere(name):
    detector = small(name).eval()
    batch = batch_of([1, 1], image_size(name))
    with torch.no_grad():
        outputs = detector(batch.images, batch.sizes)
    scores = outputs["logits"].sigmoid()
    assert 0.0005 < scores.min() and scores.max() < 0.2 and 0.005 < scores.median() < 0.02
    if name != "deformable_detr++":  # whose proposals may lie at the border, beside each other
        centres = outputs["boxes"][-1, 0, :, :2]
        assert torch.cdist(centres, centres).fill_diagonal_(1).min() > 1e-4


def test_deformable_attention_starts_as_a_star_and_boxes_at_an_eighth():
    detector = small("deformable_detr")
    attention = detector.model.model.encoder.layers[0].self_attn
    assert (attention.sampling_offsets.weight == 0).all() and (attention.attention_weights.weight == 0).all()
    offsets = attention.sampling_offsets.bias.view(2, 4, 4, 2)  # heads, levels, points
    torch.testing.assert_close(offsets.abs().amax(-1), torch.arange(1.0, 5).expand(2, 4, 4))
    batch = batch_of([1])
    boxes = detector.eval()(batch.images, batch.sizes)["boxes"]
    torch.testing.assert_close(boxes[..., 2:], torch.full_like(boxes[..., 2:], torch.tensor(-2.0).sigmoid().item()))


@pytest.mark.parametrize(("name", "options", "hw", "words"), [
    ("rf_detr", {}, (64, 72), "64x72 px.*multiples of 16"),
    ("rf_detr", {"num_queries": 5}, (16, 16), "num_queries 5.*only 4 positions"),
    ("lw_detr", {}, (64, 96), "64x96 px: lw_detr needs.*multiples of 64"),
    ("lw_detr", {"num_queries": 69}, (64, 64), "num_queries 69.*only 68 positions"),
    ("deformable_detr++", {"num_queries": 23}, (32, 32), "num_queries 23.*only 22 positions"),
    ("rt_detr_v2", {}, (64, 80), "multiples of 32"),
    ("rt_detr_v2", {"num_queries": 22}, (32, 32), "num_queries 22.*only 21 positions"),
])  # fmt: skip
def test_images_that_a_detector_cannot_work_with_are_refused(name, options, hw, words):
    detector = small(name, **options).eval()
    with pytest.raises(BadInput, match=words):
        detector(torch.zeros(1, 3, *hw, dtype=torch.uint8), torch.tensor([hw]))


def test_the_vit_of_rf_detr_takes_the_weights_of_timm(tmp_path):
    theirs = timm.create_model("vit_small_patch14_dinov2").eval()
    for tensor in theirs.parameters():  # norms, biases and layer scales too
        torch.nn.init.normal_(tensor, std=0.2)
    save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
    options = {"num_queries": 4, "pretrained_backbone": str(tmp_path / "vit.safetensors")}
    vit = build("rf_detr", **options).eval().model.model.backbone.backbone

    tokens, pixels = torch.randn(1, 7, theirs.embed_dim), torch.randn(1, 3, 28, 42)
    with torch.no_grad():
        patches = theirs.patch_embed.proj(pixels).flatten(2).transpose(1, 2)
        torch.testing.assert_close(vit.embeddings.patch_embeddings(pixels), patches, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(vit.layernorm(tokens), theirs.norm(tokens))
        assert len(vit.encoder.layer) == 11 and len(theirs.blocks) == 12
        for layer, block in zip(vit.encoder.layer, theirs.blocks, strict=False):
            if not layer.global_attention:  # which puts windows together before it
                torch.testing.assert_close(layer(tokens), block(tokens), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(vit.embeddings.cls_token, theirs.cls_token)
    torch.testing.assert_close(vit.embeddings.position_embeddings, theirs.pos_embed)
    with pytest.raises(BadInput, match="does not fit the model.*depth"):
        build("rf_detr", **options, encoder_layers=4)


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
    assert model.config.id2label == dict(enumerate(CLASSES)) and model.config.auxiliary_loss is False
    assert '"id": 90' in (tmp_path / "categories.json").read_text()
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    with torch.no_grad():
        outputs = detector(batch.images, batch.sizes)
        ours = detector.postprocess(outputs, batch.sizes, orig_sizes, score_threshold=-1.0, top_k=6)
        answer = model(**processor(images=images, return_tensors="pt"))
        theirs = processor.post_process_object_detection(answer, -1.0, target_sizes=orig_sizes)
    for mine, other in zip(ours, theirs, strict=True):
        count = len(mine["scores"])  # transformers' top_k is 100
        torch.testing.assert_close(mine["scores"], other["scores"][:count], rtol=0, atol=1e-4)
        torch.testing.assert_close(mine["boxes"], other["boxes"][:count], rtol=1e-5, atol=1e-3)
        assert mine["labels"].tolist() == other["labels"][:count].tolist()

    detect = pipeline("object-detection", model=model, image_processor=processor)
    found = detect(Image.fromarray(images[1].permute(1, 2, 0).numpy()), threshold=0.0)[:6]
    size = batch.sizes[1:]
    with torch.no_grad():
        (alone,) = detector.postprocess(detector(batch.images[1:], size), size, size, 0.0, top_k=6)
    np.testing.assert_allclose([d["score"] for d in found], alone["scores"], atol=1e-4)
    assert [d["label"] for d in found] == [CLASSES[label] for label in alone["labels"]]
    pixels = [[d["box"][side] for side in ("xmin", "ymin", "xmax", "ymax")] for d in found]  # cut to whole ones
    np.testing.assert_allclose(pixels, alone["boxes"].trunc(), atol=1)


def train_two_steps_each() -> dict:
    """Each member by name: names of its losses, whether all were finite, a number for its weights after two steps."""
    rank = torch.distributed.get_rank()
    report = {}
    for name in ON_RANKS:
        detector = small(name).train()
        model = DistributedDataParallel(detector, find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        finite, names = [], set()
        for step in range(2):
            batch = batch_of([0, 0] if rank == step else [2, 1], image_size(name))
            [counted] = window_denominators([detector.denominators(batch.targets)], "cpu")
            outputs = model(batch.images, batch.sizes, batch.targets)
            losses, _ = detector.criterion(outputs, batch.targets, counted)
            total = sum(losses.values())
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            names |= losses.keys()
            finite.append(bool(total.isfinite()))
        weights = torch.cat([p.detach().flatten() for p in detector.parameters()])
        report[name] = (sorted(names), all(finite), weights.double().sum().item(), weights.norm().item())
    return report


def test_every_member_trains_on_two_ranks_one_of_them_without_boxes():
    first, second = run_on_ranks(train_two_steps_each, 2)
    assert first == second and set(first) == set(ON_RANKS)
    for name, (names, finite, *_) in first.items():
        assert finite and tuple(names) == tuple(sorted(small(name).loss_names)), name
