"""DETR and RT-DETR-v2: criterion, model, post-processing, the folder they are saved to.

    pytest tests/test_detr.py

Numbers of the original DETR: tests/golden/test_detr.py.
"""

import copy
from dataclasses import dataclass
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoImageProcessor, AutoModelForObjectDetection
from transformers.loss.loss_rt_detr import RTDetrForObjectDetectionLoss

from toolkit.data.batches import collate
from toolkit.errors import BadInput
from toolkit.models import build_detector
from toolkit.models.detr.detr_criterion import DetrCriterion, MatchingCosts, PaddedTargets, match
from toolkit.models.detr.rt_detr import _transformers_targets, without_crowd
from toolkit.step.losses import LossWeights

CLASSES = ["circle", "square", "star"]
SMALL = {
    "detr": {"backbone": "test_resnet", "d_model": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 3,
             "ffn_dim": 32, "num_queries": 6, "dropout": 0.0},
    "rt_detr_v2": {"backbone": "test_resnet", "d_model": 32, "heads": 4, "decoder_layers": 2, "ffn_dim": 32,
                   "num_queries": 12, "num_denoising": 8, "hidden_expansion": 0.5},
}  # fmt: skip


@dataclass
class Class:
    id: int
    name: str


def small(architecture: str, **options):
    torch.manual_seed(0)
    return build_detector(architecture, class_names=CLASSES, **{"freeze": "none", **SMALL[architecture], **options})


def random_target(count: int, hw=(64, 96), crowd: int = 0, seed: int = 0, dtype=torch.float32) -> dict:
    """`count` boxes inside the image, the first `crowd` of them crowd regions."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, 2, 2, generator=generator, dtype=dtype).sort(dim=1).values
    boxes = (corners * torch.tensor([hw[1], hw[0]])).flatten(1)
    return {
        "image_id": seed,
        "boxes": boxes,
        "labels": torch.randint(len(CLASSES), (count,), generator=generator),
        "area": (boxes[:, 2:] - boxes[:, :2]).prod(1),
        "iscrowd": torch.arange(count).lt(crowd).long(),
        "size": torch.tensor(hw),
        "orig_size": torch.tensor(hw) * 2,
    }


def batch_of(counts, hw=(64, 96), crowd=0):
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (len(counts), 3, *hw), generator=generator, dtype=torch.uint8)
    return collate([(images[i], random_target(n, hw, crowd, seed=i)) for i, n in enumerate(counts)])


def run(detector, batch, denominators=None):
    outputs = detector(batch.images, batch.sizes, batch.targets)
    return detector.criterion(outputs, batch.targets, denominators or detector.denominators(batch.targets))


# --- matching and criterion -------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 4), st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_matching_is_the_cheapest_assignment_in_every_layer_and_image(seed, num_queries, counts):
    generator = torch.Generator().manual_seed(seed)
    width = max(counts)
    valid = torch.arange(width) < torch.tensor(counts)[:, None]
    valid = valid[:, torch.randperm(width, generator=generator)]  # invalid columns lie anywhere, as crowd regions do
    boxes = torch.rand(len(counts), width, 4, generator=generator)
    targets = PaddedTargets(torch.zeros(valid.shape, dtype=torch.int64), boxes, valid)
    class_costs = torch.rand(2, len(counts), num_queries, width, generator=generator)
    predicted = torch.rand(2, len(counts), num_queries, 4, generator=generator)

    matches = match(class_costs, predicted, targets, MatchingCosts(1.0, 0.0, 0.0))
    order = torch.stack([matches.layer, matches.image, matches.query])
    assert order.T.tolist() == sorted(order.T.tolist())
    for layer in range(2):
        for image, count in enumerate(counts):
            here = (matches.layer == layer) & (matches.image == image)
            queries, chosen = matches.query[here].tolist(), matches.target[here].tolist()
            assert len(queries) == len(set(queries)) == len(set(chosen)) == min(num_queries, count)
            assert valid[image, chosen].all()
            costs = class_costs[layer, image][:, valid[image]]
            costs = costs if num_queries <= count else costs.T
            cheapest = min(
                sum(costs[row, column].item() for row, column in enumerate(columns))
                for columns in permutations(range(costs.shape[1]), costs.shape[0])
            )
            assert class_costs[layer, image, queries, chosen].sum().item() == pytest.approx(cheapest, abs=1e-5)


def predictions(num_layers, batch_size, num_queries=5, dtype=torch.float64, seed=3):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_layers, batch_size, num_queries, len(CLASSES) + 1, generator=generator, dtype=dtype)
    boxes = torch.rand(num_layers, batch_size, num_queries, 4, generator=generator, dtype=dtype) * 0.4 + 0.2
    return logits.requires_grad_(), boxes.requires_grad_()


def test_losses_of_a_batch_are_the_sum_over_its_images_whatever_the_padding():
    targets = [random_target(n, seed=n, dtype=torch.float64) for n in (2, 0, 8, 1)]  # 8: more than queries
    criterion = DetrCriterion(len(CLASSES), num_layers=3)
    logits, boxes = predictions(3, len(targets))
    ones = {"boxes": 1.0, "class_weights": 1.0}
    whole, whole_metrics = criterion(logits, boxes, targets, ones)
    parts = [criterion(logits[:, i : i + 1], boxes[:, i : i + 1], targets[i : i + 1], ones) for i in range(4)]
    assert set(whole) == set(criterion.loss_names) and set(whole_metrics) == set(criterion.metric_names)
    for name, value in whole.items():
        torch.testing.assert_close(value, sum(losses[name] for losses, _ in parts), rtol=1e-12, atol=1e-12)
    for name, (value, count) in whole_metrics.items():
        assert value == sum(metrics[name][0] for _, metrics in parts)
        assert count == sum(metrics[name][1] for _, metrics in parts)
    separate = [criterion.denominators([target], 5) for target in targets]
    assert criterion.denominators(targets, 5) == pytest.approx({k: sum(s[k] for s in separate) for k in ones})
    assert criterion.denominators(targets, 5) == pytest.approx({"boxes": 11, "class_weights": 8 + 0.1 * 12})


def test_class_weight_denominator_makes_the_weighted_mean_of_cross_entropy():
    criterion = DetrCriterion(len(CLASSES), num_layers=1)
    logits, boxes = predictions(1, 1)
    target = random_target(2, dtype=torch.float64)
    losses, _ = criterion(logits, boxes, [target], criterion.denominators([target], 5))
    matches = criterion.match(logits.log_softmax(-1), boxes, _padded([target]))
    classes = torch.full((5,), len(CLASSES))
    classes[matches.query] = target["labels"][matches.target]
    wanted = torch.nn.functional.cross_entropy(logits[0, 0], classes, criterion.class_weights.double())
    torch.testing.assert_close(losses["loss_ce"], wanted, rtol=1e-12, atol=0)
    assert criterion.loss_names == ("loss_ce", "loss_bbox", "loss_giou")


def _padded(targets):
    from toolkit.models.detr.detr_criterion import pad_targets

    return pad_targets(targets, torch.device("cpu"), torch.float64)


def test_crowd_regions_are_neither_matched_nor_counted():
    criterion = DetrCriterion(len(CLASSES), num_layers=2)
    logits, boxes = predictions(2, 2)
    with_crowd = [random_target(4, crowd=2, dtype=torch.float64), random_target(1, crowd=1, dtype=torch.float64)]
    assert criterion.denominators(with_crowd, 5)["boxes"] == 2
    ones = {"boxes": 1.0, "class_weights": 1.0}
    kept, kept_metrics = criterion(logits, boxes, with_crowd, ones)
    dropped, dropped_metrics = criterion(logits, boxes, [without_crowd(target) for target in with_crowd], ones)
    assert kept == dropped and kept_metrics == dropped_metrics


def test_a_batch_without_objects_trains_the_background_and_has_no_class_error():
    criterion = DetrCriterion(len(CLASSES), num_layers=2)
    logits, boxes = predictions(2, 2)
    targets = [random_target(0), random_target(0)]
    denominators = {**criterion.denominators(targets, 5), "boxes": 1.0}
    losses, metrics = criterion(logits, boxes, targets, denominators)
    assert losses["loss_bbox"] == losses["loss_giou_0"] == 0 and losses["loss_ce"] > 0
    assert metrics["class_error"][1] == 0
    sum(losses.values()).backward()
    assert (logits.grad != 0).all() and (boxes.grad == 0).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_predictions_give_a_non_finite_loss_and_no_exception(poison):
    criterion = DetrCriterion(len(CLASSES), num_layers=2)
    targets = [random_target(2), random_target(1)]
    for which in range(2):
        tensors = [tensor.detach().clone() for tensor in predictions(2, 2)]
        tensors[which][1, 0] = poison
        losses, _ = criterion(*tensors, targets, {"boxes": 3.0, "class_weights": 4.0})
        assert not sum(losses.values()).isfinite()
        assert losses["loss_ce_0"].isfinite()


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["detr", "rt_detr_v2"])
def detector(request):
    return small(request.param)


def test_names_are_announced_and_every_trained_parameter_gets_a_gradient(detector):
    detector.train()
    batch = batch_of([2, 0, 3], crowd=1)
    losses, metrics = run(detector, batch)
    assert set(losses) == set(detector.loss_names) and set(metrics) == set(detector.metric_names)
    assert set(detector.denominators(batch.targets)) == set(detector.denominator_names)
    LossWeights(detector.loss_names, {}, detector.default_weights)(losses, 0).total.backward()
    without = [n for n, p in detector.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
    detector.zero_grad()


def test_a_batch_without_boxes_is_ordinary_input(detector):
    detector.train()
    batch = batch_of([0, 0])
    losses, _ = run(detector, batch, dict.fromkeys(detector.denominator_names, 1.0))
    missing = set(detector.loss_names) - set(losses)
    assert all("_dn_" in name for name in missing) and set(losses) <= set(detector.loss_names)
    total = LossWeights(detector.loss_names, {}, detector.default_weights)(losses, 0).total
    total.backward()
    assert total.isfinite() and all(p.grad.isfinite().all() for p in detector.parameters() if p.grad is not None)
    detector.zero_grad()


@pytest.mark.parametrize("architecture", ["detr", "rt_detr_v2"])
def test_bfloat16_losses_are_near_float32_and_arrive_in_float32(architecture):
    # As many queries as positions (8x12 + 4x6 + 2x3): otherwise rounding decides which of them become queries at all.
    detector = small(architecture, num_queries=126, freeze="norms").train()
    batch = batch_of([2, 1, 3])
    torch.manual_seed(0)
    exact, _ = run(detector, batch)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        rough, _ = run(detector, batch)
    assert set(exact) == set(rough)
    for name, value in rough.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, exact[name], rtol=0.05, atol=0.02, msg=lambda m, name=name: f"{name}: {m}")


def test_the_same_seed_gives_the_same_step(detector):
    detector.train()
    batch = batch_of([2, 3])
    results = []
    for seed in (5, 5):
        torch.manual_seed(seed)
        results.append(torch.stack(list(run(detector, batch)[0].values())))
    assert torch.equal(*results)


def test_what_lies_in_the_padding_does_not_matter():
    detector = small("detr").eval()
    batch = collate([(torch.full((3, *hw), 9, dtype=torch.uint8), random_target(1, hw)) for hw in ((64, 64), (40, 90))])
    noisy = batch.images.clone()
    noisy[0, :, :, 64:], noisy[1, :, 40:] = 255, 77
    with torch.no_grad():
        clean, dirty = detector(batch.images, batch.sizes), detector(noisy, batch.sizes)
    assert torch.equal(clean["logits"], dirty["logits"]) and torch.equal(clean["boxes"], dirty["boxes"])


def test_accumulated_gradients_equal_those_of_the_big_batch():
    """1x4 = 2x2 = 4x1, frozen norms, no dropout, denominators of the whole window, float64."""
    detector = small("detr", freeze="norms").double().train()
    batch = batch_of([2, 0, 7, 1])
    shared = detector.denominators(batch.targets)
    weights = LossWeights(detector.loss_names, {}, detector.default_weights)
    gradients = []
    for size in (4, 2, 1):
        detector.zero_grad()
        for i in range(0, 4, size):
            part = slice(i, i + size)
            outputs = detector(batch.images[part], batch.sizes[part])
            losses, _ = detector.criterion(outputs, batch.targets[part], shared)
            weights(losses, 0).total.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in detector.parameters() if p.requires_grad]))
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() / gradients[0].norm() < 1e-6


def test_rt_detr_losses_equal_those_of_transformers():
    detector = small("rt_detr_v2").train()
    batch = batch_of([2, 0, 5], crowd=1)
    outputs = detector(batch.images, batch.sizes, batch.targets)
    ours, _ = detector.criterion(outputs, batch.targets, detector.denominators(batch.targets))
    config = copy.deepcopy(detector.model.config)
    config.weight_loss_bbox = config.weight_loss_giou = 1.0
    layers = outputs["layers"]
    labels = _transformers_targets(list(map(without_crowd, batch.targets)))
    _, theirs, _ = RTDetrForObjectDetectionLoss(
        layers["logits"][:, -1], labels, "cpu", layers["boxes"][:, -1], config, layers["logits"], layers["boxes"],
        enc_topk_logits=layers["encoder_logits"], enc_topk_bboxes=layers["encoder_boxes"],
        denoising_meta_values=layers["denoising"],
    )  # fmt: skip
    theirs = {name.replace("_aux_1", "_enc"): value for name, value in theirs.items()}
    assert set(ours) == set(theirs) == set(detector.loss_names)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    wanted = torch.autograd.grad(sum(theirs.values()), [layers["logits"], layers["boxes"]], retain_graph=True)
    got = torch.autograd.grad(sum(ours.values()), [layers["logits"], layers["boxes"]])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("freeze", ["paper", "norms", "none"])
def test_freezing_survives_train_mode_and_follows_the_paper(freeze):
    detector = small("detr", backbone="mobilenetv3_small_050", freeze=freeze).train()
    backbone = detector.model.model.backbone.model
    before = {name: tensor.clone() for name, tensor in backbone.named_buffers() if "running" in name}
    batch = batch_of([1, 2])
    run(detector, batch)
    moved = [n for n, tensor in backbone.named_buffers() if n in before and not torch.equal(tensor, before[n])]
    trained = {name.split(".")[1] if "blocks" in name else name.split(".")[0]
               for name, parameter in backbone.named_parameters() if parameter.requires_grad}  # fmt: skip
    assert bool(moved) == (freeze == "none")
    assert ("conv_stem" in trained, "0" in trained) == ((freeze != "paper",) * 2)  # blocks.0 ends at stride 4
    assert {"1", "2", "3", "4", "5"} <= trained
    norms = [n for n, _ in backbone.named_parameters() if ".bn" in n]
    assert bool(norms) == (freeze == "none")


def test_random_residual_branches_are_not_frozen_shut():
    """timm starts the last norm of a branch at 0, to be learned; frozen there, the branch would be dead for good."""
    detector = small("detr", freeze="norms")
    norms = [m for n, m in detector.model.model.backbone.model.named_modules() if n.endswith("bn2")]
    assert norms and all(norm.weight.all() for norm in norms)
    learning = small("detr", freeze="none").model.model.backbone.model.layer2[0].bn2
    assert not learning.weight.any() and learning.weight.requires_grad


def test_frozen_norms_keep_the_activation_that_timm_puts_inside_them():
    frozen, live = (small("detr", backbone="mobilenetv3_small_050", freeze=f) for f in ("norms", "none"))
    frozen.model.load_state_dict(live.model.state_dict(), strict=False)
    pixels = torch.randn(1, 3, 64, 64)
    backbones = [d.eval().model.model.backbone.model for d in (frozen, live)]
    torch.testing.assert_close(*(backbone(pixels)[-1] for backbone in backbones), rtol=1e-4, atol=1e-5)


# --- predictions and the final folder ---------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["detr", "rt_detr_v2"])
@pytest.mark.parametrize("freeze", ["norms", "none"])
def test_the_final_folder_loads_in_transformers_and_gives_the_same_boxes(tmp_path, architecture, freeze):
    detector = small(architecture, freeze=freeze)
    run(detector.train(), batch_of([1, 2]))  # live norms move away from where they started
    for head in [detector.model.bbox_predictor] if architecture == "detr" else detector.model.bbox_embed:
        torch.nn.init.normal_(head.layers[-1].weight, std=0.3)  # each decoder layer its own
    categories = [Class(7, CLASSES[0]), Class(3, CLASSES[1]), Class(90, CLASSES[2])]
    size = {"height": 64, "width": 96}
    detector.eval().save_final(tmp_path, categories, None if architecture == "detr" else size)
    assert detector.model.config.auxiliary_loss is (architecture != "detr")  # training goes on unchanged

    hws = [(64, 96), (40, 90)] if architecture == "detr" else [(64, 96), (64, 96)]
    generator = torch.Generator().manual_seed(2)
    images = [torch.randint(256, (3, *hw), generator=generator, dtype=torch.uint8) for hw in hws]
    batch = collate([(image, random_target(0, hw)) for image, hw in zip(images, hws, strict=True)])
    orig_sizes = torch.tensor([[480, 640], [333, 500]])
    with torch.no_grad():
        outputs = detector(batch.images, batch.sizes)
        count = outputs["logits"].shape[-2]
        ours = detector.postprocess(outputs, batch.sizes, orig_sizes, score_threshold=-1.0, top_k=count)

        model = AutoModelForObjectDetection.from_pretrained(tmp_path).eval()
        processor = AutoImageProcessor.from_pretrained(tmp_path)
        inputs = processor(images=images, return_tensors="pt")
        theirs = processor.post_process_object_detection(model(**inputs), -1.0, target_sizes=orig_sizes)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["labels"].tolist() == other["labels"].tolist()
        torch.testing.assert_close(mine["scores"], other["scores"], rtol=0, atol=1e-5)
        torch.testing.assert_close(mine["boxes"], other["boxes"], rtol=1e-5, atol=1e-3)
    assert model.config.id2label == dict(enumerate(CLASSES)) and model.config.auxiliary_loss is False
    assert '"id": 90' in (tmp_path / "categories.json").read_text()


def test_postprocess_keeps_the_best_above_the_threshold(detector):
    batch = batch_of([0, 0])
    detector.eval()
    with torch.no_grad():
        outputs = detector(batch.images, batch.sizes)
    full = detector.postprocess(outputs, batch.sizes, batch.sizes, score_threshold=-1.0, top_k=6)
    some = detector.postprocess(outputs, batch.sizes, batch.sizes, score_threshold=-1.0, top_k=3)
    for everything, best in zip(full, some, strict=True):
        assert len(best["scores"]) == 3
        torch.testing.assert_close(best["scores"], everything["scores"].sort(descending=True).values[:3])
        assert best["boxes"].dtype == torch.float32 and best["labels"].dtype == torch.int64
    middle = some[0]["scores"][1].item()
    kept = detector.postprocess(outputs, batch.sizes, batch.sizes, score_threshold=middle, top_k=3)[0]
    assert kept["scores"].tolist() == [score for score in some[0]["scores"].tolist() if score > middle]


# --- what a user can get wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "dert"}, ["'dert'", "did you mean 'detr'", "rt_detr_v2"]),
        ({"architecture": "detr", "backbone": "resnet51"}, ["model.backbone", "'resnet51'", "resnet50"]),
        ({"architecture": "rt_detr_v2", "backbone": "vit_tiny_patch16_224"}, ["stride", "8, 16", "[16, 16, 16]"]),
        ({"architecture": "detr", "freeze": "stem"}, ["model.freeze", "'stem'", "paper, norms, none"]),
        ({"architecture": "detr", "pretrained_backbone": "no/such.safetensors"}, ["no file no/such.safetensors"]),
        ({"architecture": "detr", "class_names": []}, ["no classes"]),
    ],
)
def test_wrong_options_are_named_with_what_would_have_worked(options, words):
    complete = {"class_names": CLASSES, "backbone": "test_resnet", **options}
    with pytest.raises(BadInput) as error:
        build_detector(**complete)
    for word in words:
        assert word in str(error.value)


def test_unknown_options_are_errors():
    with pytest.raises(BadInput, match="num_querys"):
        small("detr", num_querys=3)


def test_rt_detr_refuses_images_it_cannot_work_with():
    detector = small("rt_detr_v2", num_queries=22).eval()
    with pytest.raises(BadInput, match="multiples of 32"):
        detector(torch.zeros(1, 3, 64, 80, dtype=torch.uint8), torch.tensor([[64, 80]]))
    with pytest.raises(BadInput, match="num_queries 22.*only 21 positions"):
        detector(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.tensor([[32, 32]]))
