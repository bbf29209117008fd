"""RT-DETR-v2, D-FINE and DEIMv2: criterion against transformers', configs of the hub, weights to start from."""

from functools import partial

import pytest
import torch
from small_detectors import CLASSES, HYBRIDS, batch_of, build, gradient_of, hub_config, run, small, wake
from transformers import AutoModelForObjectDetection, Deimv2Config
from transformers.loss.loss_deimv2 import Deimv2Loss

from toolkit.errors import BadInput
from toolkit.models.detr.rt_detr import _transformers_targets, without_crowd
from toolkit.step.optim import parameter_groups


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


def test_non_finite_predictions_give_a_non_finite_loss_and_no_exception():
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


@pytest.mark.parametrize(
    ("architecture", "options", "words"),
    [
        ("d_fine", {"backbone": "resnet18d", "freeze": "paper"}, ["model.backbone", "hgnet_v2", "'paper'"]),
        ("rt_detr_v2", {"pretrained_backbone": True}, ["model.pretrained_backbone", "rt_detr_resnet"]),
        ("deimv2", {"freeze": "stem"}, ["model.freeze", "'stem'", "paper, norms, none"]),
        ("d_fine", {"source_config": hub_config("deimv2")}, ["d_fine", "'deimv2'"]),
    ],
)
def test_options_that_a_config_of_the_hub_does_not_allow_are_named(architecture, options, words):
    with pytest.raises(BadInput) as error:
        build(architecture, **{"source_config": hub_config(architecture), **options})
    for word in words:
        assert word in str(error.value)


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
