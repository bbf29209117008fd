"""DETR, RT-DETR-v2, D-FINE and DEIMv2: matching, criteria, backbone, configs of the hub.

Numbers of the original: tests/golden/test_detr.py. What all members of the family share: tests/test_detr_family.py.
"""

import copy
from functools import partial
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_detectors import CLASSES, HYBRIDS, batch_of, build, gradient_of, hub_config, random_target, run, small, wake
from transformers import AutoModelForObjectDetection, Deimv2Config
from transformers.loss.loss_deimv2 import Deimv2Loss
from transformers.loss.loss_rt_detr import RTDetrForObjectDetectionLoss

from toolkit.detectors.detr.detr_criterion import DetrCriterion, MatchingCosts, PaddedTargets, assign_queries
from toolkit.detectors.detr.rt_detr import _transformers_targets, without_crowd
from toolkit.step.optim import parameter_groups

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

    matches = assign_queries(class_costs, predicted, targets, MatchingCosts(1.0, 0.0, 0.0))
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


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_predictions_give_a_non_finite_loss_and_no_exception(poison):
    criterion = DetrCriterion(len(CLASSES), num_layers=2)
    for poisoned in range(2):
        tensors = [tensor.detach().clone() for tensor in predictions(2, 2)]
        tensors[poisoned][1, 0] = poison
        losses, _ = criterion(*tensors, [random_target(2), random_target(1)], {"boxes": 3.0, "class_weights": 4.0})
        assert not sum(losses.values()).isfinite() and losses["loss_ce_0"].isfinite()


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


def their_outputs(layers, noisy):
    """What the criterion of transformers takes, each output with its own distribution, as in the original."""
    boxes, references = layers["boxes"].clamp(0, 1), layers["references"]
    last = layers["corners"].shape[1]

    def output(position, part):
        plain = {"logits": layers["logits"][:, position, part], "pred_boxes": boxes[:, position, part]}
        if position == 0:
            return plain
        return plain | {
            "pred_corners": layers["corners"][:, position - 1, part], "ref_points": references[:, part],
            "teacher_corners": layers["corners"][:, -1, part], "teacher_logits": layers["logits"][:, -1, part],
        }  # fmt: skip

    queries, order = slice(noisy, None), [*range(1, last), 0]
    encoder = {"logits": layers["encoder_logits"], "pred_boxes": layers["encoder_boxes"].clamp(0, 1)}
    main = output(last, queries) | {"auxiliary_outputs": [*(output(i, queries) for i in order), encoder]}
    if layers["denoising"] is not None:
        main["dn_auxiliary_outputs"] = [output(i, slice(noisy)) for i in [*range(1, last + 1), 0]]
        main["denoising_meta_values"] = layers["denoising"]
    return main


def renamed(theirs, num_layers):
    """Their names of the last outputs, which are numbered on from the layers, by ours."""
    endings = {f"_aux_{num_layers - 1}": "_pre", f"_aux_{num_layers}": "_enc", f"_dn_{num_layers}": "_dn_pre"}
    for ending, ours in endings.items():
        theirs = {name.replace(ending, ours): value for name, value in theirs.items()}
    return theirs


@pytest.mark.parametrize("union", [True, False])
@pytest.mark.parametrize("architecture", ["d_fine", "deimv2"])
def test_losses_equal_those_of_transformers(architecture, union, monkeypatch):
    # Which of two objects wins a tie in the union is undefined there, beyond 16 pairs: here the first one does.
    monkeypatch.setattr(torch, "argsort", partial(torch.argsort, stable=True))
    detector = wake(small(architecture, decoder_layers=3, union_matching=union)).train()
    batch = batch_of([2, 0, 14], crowd=1)  # 14: more than queries, and than denoising queries
    outputs = detector(batch.images, batch.sizes, batch.targets)
    ours, _ = detector.criterion(outputs, batch.targets, detector.denominators(batch.targets))
    layers = outputs["layers"]
    criterion = Deimv2Loss(Deimv2Config(
        num_labels=len(CLASSES), use_dense_one_to_one=union, focal_loss_gamma=1.5 if architecture == "deimv2" else 2.0
    ))  # fmt: skip
    if architecture == "d_fine":
        criterion.losses = ["vfl", "boxes", "local"]
    criterion.weight_dict = dict.fromkeys(("loss_vfl", "loss_mal", "loss_bbox", "loss_giou", "loss_fgl", "loss_ddf"), 1)
    labels = _transformers_targets(list(map(without_crowd, batch.targets)))
    theirs = renamed(criterion(their_outputs(layers, layers["denoising"]["dn_num_split"][0]), labels), 3)
    # The last layer is its own teacher: 0, not announced here.
    assert {name for name in theirs if name not in ours} == {"loss_ddf", "loss_ddf_dn_2"}
    assert set(ours) == set(detector.loss_names) <= set(theirs)
    for name, value in ours.items():
        assert value > 0
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    inputs = [layers[key] for key in ("logits", "boxes", "corners", "encoder_logits", "encoder_boxes")]
    wanted = torch.autograd.grad(sum(theirs.values()), inputs, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(sum(ours.values()), inputs), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("architecture", ["d_fine", "deimv2"])
def test_evaluation_has_the_losses_of_every_layer_and_the_same_predictions(architecture):
    detector, batch = wake(small(architecture)).eval(), batch_of([2, 3], (64, 64))
    with torch.no_grad():
        losses, _ = run(detector, batch)
        alone = detector(batch.images, batch.sizes)
        beside = detector(batch.images, batch.sizes, batch.targets)
    assert set(losses) == {name for name in detector.loss_names if "_dn_" not in name}
    assert torch.equal(alone["logits"], beside["logits"]) and torch.equal(alone["boxes"], beside["boxes"])


def test_non_finite_predictions_of_d_fine_give_a_non_finite_loss_and_no_exception():
    detector, batch = small("d_fine").train(), batch_of([2, 1], (64, 64))
    layers = detector(batch.images, batch.sizes, batch.targets)["layers"]
    for key in ("logits", "boxes", "corners"):
        poisoned = layers | {key: layers[key].detach().clone().index_fill_(1, torch.tensor([1]), float("nan"))}
        losses = detector.set_loss(poisoned, batch.targets, detector.denominators(batch.targets))
        assert not sum(losses.values()).isfinite() and losses["loss_giou_enc"].isfinite()


def accumulation_error(architecture, **options):
    detector = wake(small(architecture, num_denoising=0, **options)).double()
    for module in detector.modules():  # batch statistics are those of a micro-batch, of course
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    batch = batch_of([2, 0, 7, 1], (64, 64))
    whole = gradient_of(detector, batch, 4)
    return ((gradient_of(detector, batch, 2) - whole).norm() / whole.norm()).item()


def test_accumulated_gradients_equal_those_of_the_big_batch_as_far_as_docs_differences_says():
    """Exact for what is divided by boxes; how many queries the union has is known after the forward only."""
    assert accumulation_error("rt_detr_v2") < 1e-6
    assert accumulation_error("d_fine", union_matching=False) < 0.05
    assert accumulation_error("d_fine") < 0.2


@pytest.mark.parametrize("name", [*HYBRIDS, "dinov3"])
def test_a_config_of_the_hub_builds_its_model_with_our_classes(name):
    source = hub_config(name)
    detector = build("deimv2" if name == "dinov3" else name, source_config=source).train()
    original = AutoModelForObjectDetection.from_config(
        type(detector).config_class.from_dict(source | {"id2label": dict(enumerate(CLASSES))})
    )
    losses, _ = run(detector, batch_of([2, 0, 1], (64, 64)))
    assert set(losses) == set(detector.loss_names) and sum(losses.values()).isfinite()
    detector.model.load_state_dict(original.state_dict())
    detector.eval(), original.eval()
    batch = batch_of([0, 0], (64, 64))
    with torch.no_grad():
        ours = detector(batch.images, batch.sizes)
        mean, std = (torch.tensor(values)[:, None, None] for values in (detector.mean, detector.std))
        theirs = original(pixel_values=(batch.images / 255 - mean) / std)
    assert ours["logits"].shape == (2, 10, len(CLASSES))
    torch.testing.assert_close(ours["logits"], theirs.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours["boxes"], theirs.pred_boxes, rtol=1e-4, atol=1e-5)
    assert source == hub_config(name)  # not touched


@pytest.mark.parametrize("architecture", ["rt_detr_v2", "deimv2"])
def test_given_options_override_a_config_of_the_hub(architecture):
    source = hub_config(architecture)
    options = {"num_queries": 7, "num_denoising": 0, "decoder_layers": 3, "d_model": 32, "freeze": "none"}
    detector = build(architecture, class_names=["one"], source_config=source, **options)
    config = detector.model.config
    assert (config.num_queries, config.decoder_layers, config.d_model, config.encoder_hidden_dim) == (7, 3, 32, 32)
    assert config.encoder_ffn_dim == 16 and config.id2label == {0: "one"}
    assert detector.mean == (0, 0, 0) and not any("_dn_" in name for name in detector.loss_names)
    frozen = build(architecture, class_names=["one"], source_config=source, freeze="norms")
    learning = [[n for n, _ in d._backbone().named_parameters() if "norm" in n] for d in (detector, frozen)]
    assert learning[0] and not learning[1]


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_random_weights_let_the_image_through_and_start_from_the_prior(architecture):
    detector, batch = small(architecture).train(), batch_of([1, 1, 2], (64, 64))
    logits = detector(batch.images, batch.sizes, batch.targets)["layers"]["encoder_logits"]
    assert logits.sigmoid().mean() < 0.05  # nearly everything is background
    assert logits.std(dim=(0, 1)).mean() > 0.05  # and it depends on where one looks
    for module in detector.model.model.decoder.layers[0].modules():
        if isinstance(module, torch.nn.Linear) and module.weight.any():  # gates and offsets start at 0
            assert module.weight.std() > 0.05  # transformers: 0.01
    groups = parameter_groups(detector, lr=1.0, weight_decay=0.0, backbone_lr=0.1)
    in_backbone = sum(len(group["params"]) for group in groups if group["name"] == "backbone")
    assert in_backbone == len(list(detector._backbone().parameters()))
