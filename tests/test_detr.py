"""DETR and RT-DETR-v2: matching, criteria, backbone, what a user can get wrong.

Numbers of the original: tests/golden/test_detr.py. What all members of the family share: tests/test_detr_family.py.
"""

import copy
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_detectors import CLASSES, batch_of, gradient_of, random_target, run, small
from transformers.loss.loss_rt_detr import RTDetrForObjectDetectionLoss

from toolkit.errors import BadInput
from toolkit.models import build_detector
from toolkit.models.detr.detr_criterion import DetrCriterion, MatchingCosts, PaddedTargets, match
from toolkit.models.detr.rt_detr import _transformers_targets, without_crowd

ONES = {"boxes": 1.0, "class_weights": 1.0}


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


def predictions(num_layers, batch_size, num_queries=5):
    generator = torch.Generator().manual_seed(3)
    shape, double = (num_layers, batch_size, num_queries), {"generator": generator, "dtype": torch.float64}
    logits, boxes = torch.randn(*shape, len(CLASSES) + 1, **double), torch.rand(*shape, 4, **double) * 0.4 + 0.2
    return logits.requires_grad_(), boxes.requires_grad_()


def test_losses_of_a_batch_are_the_sum_over_its_images_whatever_the_padding():
    targets = [random_target(n, seed=n, dtype=torch.float64) for n in (2, 0, 8, 1)]  # 8: more than queries
    criterion = DetrCriterion(len(CLASSES), num_layers=3)
    logits, boxes = predictions(3, len(targets))
    whole, whole_metrics = criterion(logits, boxes, targets, ONES)
    parts = [criterion(logits[:, i : i + 1], boxes[:, i : i + 1], targets[i : i + 1], ONES) for i in range(4)]
    assert set(whole) == set(criterion.loss_names) and set(whole_metrics) == set(criterion.metric_names)
    for name, value in whole.items():
        torch.testing.assert_close(value, sum(losses[name] for losses, _ in parts), rtol=1e-12, atol=1e-12)
    for name, (value, count) in whole_metrics.items():
        assert value == sum(metrics[name][0] for _, metrics in parts)
        assert count == sum(metrics[name][1] for _, metrics in parts)
    assert criterion.denominators(targets, 5) == pytest.approx({"boxes": 11, "class_weights": 8 + 0.1 * 12})


def test_a_batch_without_objects_trains_the_background_and_has_no_class_error():
    criterion = DetrCriterion(len(CLASSES), num_layers=2)
    logits, boxes = predictions(2, 2)
    targets = [random_target(0), random_target(0)]
    losses, metrics = criterion(logits, boxes, targets, {**criterion.denominators(targets, 5), "boxes": 1.0})
    assert losses["loss_bbox"] == losses["loss_giou_0"] == 0 and losses["loss_ce"] > 0
    assert metrics["class_error"][1] == 0
    sum(losses.values()).backward()
    assert (logits.grad != 0).all() and (boxes.grad == 0).all()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_predictions_give_a_non_finite_loss_and_no_exception(poison):
    criterion = DetrCriterion(len(CLASSES), num_layers=2)
    for poisoned in range(2):
        tensors = [tensor.detach().clone() for tensor in predictions(2, 2)]
        tensors[poisoned][1, 0] = poison
        losses, _ = criterion(*tensors, [random_target(2), random_target(1)], {"boxes": 3.0, "class_weights": 4.0})
        assert not sum(losses.values()).isfinite() and losses["loss_ce_0"].isfinite()


def test_accumulated_gradients_equal_those_of_the_big_batch():
    """1x4 = 2x2 = 4x1, frozen norms, no dropout, denominators of the whole window, float64."""
    detector, batch = small("detr", freeze="norms").double().train(), batch_of([2, 0, 7, 1])
    whole = gradient_of(detector, batch, 4)
    for size in (2, 1):
        assert (gradient_of(detector, batch, size) - whole).norm() / whole.norm() < 1e-6


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
    run(detector, batch_of([1, 2]))
    moved = [n for n, tensor in backbone.named_buffers() if n in before and not torch.equal(tensor, before[n])]
    trained = {name.split(".")[1] if "blocks" in name else name.split(".")[0]
               for name, parameter in backbone.named_parameters() if parameter.requires_grad}  # fmt: skip
    assert ("conv_stem" in trained, "0" in trained) == ((freeze != "paper",) * 2)  # blocks.0 ends at stride 4
    assert {"1", "2", "3", "4", "5"} <= trained
    norms = [n for n, _ in backbone.named_parameters() if ".bn" in n]
    assert bool(norms) == bool(moved) == (freeze == "none")


def test_random_residual_branches_are_not_frozen_shut():
    """timm starts the last norm of a branch at 0, to be learned; frozen there, the branch would be dead for good."""
    frozen = small("detr", freeze="norms").model.model.backbone.model
    norms = [m for n, m in frozen.named_modules() if n.endswith("bn2")]
    assert norms and all(norm.weight.all() for norm in norms)
    learning = small("detr").model.model.backbone.model.layer2[0].bn2
    assert not learning.weight.any() and learning.weight.requires_grad


def test_frozen_norms_keep_the_activation_that_timm_puts_inside_them():
    frozen, live = (small("detr", backbone="mobilenetv3_small_050", freeze=f) for f in ("norms", "none"))
    frozen.model.load_state_dict(live.model.state_dict(), strict=False)
    pixels = torch.randn(1, 3, 64, 64)
    backbones = [d.eval().model.model.backbone.model for d in (frozen, live)]
    torch.testing.assert_close(*(backbone(pixels)[-1] for backbone in backbones), rtol=1e-4, atol=1e-5)


def test_postprocess_keeps_the_best_above_the_threshold():
    batch, detector = batch_of([0, 0]), small("detr").eval()
    with torch.no_grad():
        outputs = detector(batch.images, batch.sizes)
    full, some = (detector.postprocess(outputs, batch.sizes, batch.sizes, -1.0, top_k=k) for k in (6, 3))
    for everything, best in zip(full, some, strict=True):
        assert best["scores"].tolist() == everything["scores"].sort(descending=True).values[:3].tolist()
        assert best["boxes"].dtype == torch.float32 and best["labels"].dtype == torch.int64
    scores = some[0]["scores"].tolist()
    kept = detector.postprocess(outputs, batch.sizes, batch.sizes, score_threshold=scores[1], top_k=3)[0]
    assert kept["scores"].tolist() == [score for score in scores if score > scores[1]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "dert"}, ["'dert'", "did you mean 'detr'", "rt_detr_v2"]),
        ({"architecture": "detr", "backbone": "resnet51"}, ["model.backbone", "'resnet51'", "resnet50"]),
        ({"architecture": "rt_detr_v2", "backbone": "vit_tiny_patch16_224"}, ["stride", "8, 16", "[16, 16, 16]"]),
        ({"architecture": "detr", "freeze": "stem"}, ["model.freeze", "'stem'", "paper, norms, none"]),
        ({"architecture": "detr", "class_names": []}, ["no classes"]),
        ({"architecture": "detr", "num_querys": 3}, ["num_querys", "did you mean model.num_queries"]),
        ({"architecture": "rt_detr_v2", "decoder_layers": 1}, ["model.decoder_layers: 1 is too few", "use 2"]),
    ],
)
def test_wrong_options_are_named_with_what_would_have_worked(options, words):
    with pytest.raises(BadInput) as error:
        build_detector(**{"class_names": CLASSES, "backbone": "test_resnet", **options})
    for word in words:
        assert word in str(error.value)
