"""D-FINE and its losses, whose box losses are over the union of what the layers match; DEIMv2 has the same."""

from functools import partial

import pytest
import torch
from small_detectors import CLASSES, batch_of, forward, gradient_of, small, wake
from torch.testing import assert_close
from transformers import Deimv2Config
from transformers.loss.loss_deimv2 import Deimv2Loss

from toolkit.detectors.detr.d_fine_criterion import DFineCriterion
from toolkit.detectors.detr.rt_detr import _transformers_targets, without_crowd
from toolkit.step.freezing import hold_batch_norms

ONES = dict.fromkeys(
    (
        "loss_vfl",
        "loss_mal",
        "loss_bbox",
        "loss_giou",
        "loss_fgl",
        "loss_ddf",
    ),
    1,
)


def their_outputs(layers: dict, noisy: int) -> dict:
    """What the criterion of transformers takes, each output with its own distribution, as in the original."""
    boxes = layers["boxes"].clamp(0, 1)
    last = layers["corners"].shape[1]

    def output(position: int, part: slice) -> dict:
        plain = {"logits": layers["logits"][:, position, part], "pred_boxes": boxes[:, position, part]}
        if position == 0:
            return plain
        return plain | {
            "pred_corners": layers["corners"][:, position - 1, part],
            "ref_points": layers["references"][:, part],
            "teacher_corners": layers["corners"][:, -1, part],
            "teacher_logits": layers["logits"][:, -1, part],
        }

    queries = slice(noisy, None)
    auxiliary = [output(i, queries) for i in [*range(1, last), 0]]
    encoder = {"logits": layers["encoder_logits"], "pred_boxes": layers["encoder_boxes"].clamp(0, 1)}
    main = output(last, queries) | {"auxiliary_outputs": [*auxiliary, encoder]}
    main["dn_auxiliary_outputs"] = [output(i, slice(noisy)) for i in [*range(1, last + 1), 0]]
    main["denoising_meta_values"] = layers["denoising"]
    return main


def by_our_names(theirs: dict, num_layers: int) -> dict:
    """Their last outputs are numbered on from the layers."""
    endings = {f"_aux_{num_layers - 1}": "_pre", f"_aux_{num_layers}": "_enc", f"_dn_{num_layers}": "_dn_pre"}
    for ending, ours in endings.items():
        theirs = {name.replace(ending, ours): value for name, value in theirs.items()}
    return theirs


def their_criterion(architecture: str, union: bool) -> Deimv2Loss:
    gamma = 1.5 if architecture == "deimv2" else 2.0
    criterion = Deimv2Loss(
        Deimv2Config(num_labels=len(CLASSES), use_dense_one_to_one=union, focal_loss_gamma=gamma),
    )
    if architecture == "d_fine":
        criterion.losses = ["vfl", "boxes", "local"]
    criterion.weight_dict = ONES
    return criterion


@pytest.mark.parametrize("union", [True, False])
@pytest.mark.parametrize("architecture", ["d_fine", "deimv2"])
def test_losses_and_gradients_are_those_of_transformers(architecture, union, monkeypatch):
    # Which of two objects wins a tie in the union is undefined there, beyond 16 pairs: here the first one does.
    monkeypatch.setattr(torch, "argsort", partial(torch.argsort, stable=True))
    detector = wake(small(architecture, decoder_layers=3, union_matching=union)).train()
    more_than_queries = 14
    batch = batch_of([2, 0, more_than_queries], crowd=1)
    outputs = forward(detector, batch)
    assert isinstance(detector.set_loss, DFineCriterion)
    ours, _ = detector.criterion(outputs, batch.targets, detector.denominators(batch.targets))
    layers = outputs["layers"]
    labels = _transformers_targets([without_crowd(target) for target in batch.targets])
    given = their_outputs(layers, layers["denoising"]["dn_num_split"][0])
    theirs = by_our_names(their_criterion(architecture, union)(given, labels), 3)
    # The last layer is its own teacher: 0, not announced here.
    assert {name for name in theirs if name not in ours} == {"loss_ddf", "loss_ddf_dn_2"}
    assert set(ours) == set(detector.loss_names) <= set(theirs)
    for name, value in ours.items():
        assert value > 0
        assert_close(value, theirs[name], rtol=1e-5, atol=1e-6, msg=name)
    inputs = [
        layers[key]
        for key in (
            "logits",
            "boxes",
            "corners",
            "encoder_logits",
            "encoder_boxes",
        )
    ]
    wanted = torch.autograd.grad(sum(theirs.values()), inputs, retain_graph=True)
    assert_close(
        torch.autograd.grad(sum(ours.values()), inputs),
        wanted,
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize("key", ["logits", "boxes", "corners"])
def test_non_finite_predictions_give_a_non_finite_loss(key):
    detector = small("d_fine").train()
    batch = batch_of([2, 1], (64, 64))
    layers = forward(detector, batch)["layers"]
    poisoned = layers[key].detach().clone().index_fill_(1, torch.tensor([1]), float("nan"))
    losses = detector.set_loss(layers | {key: poisoned}, batch.targets, detector.denominators(batch.targets))
    assert not sum(losses.values()).isfinite()
    assert losses["loss_giou_enc"].isfinite()


@pytest.mark.parametrize(("union", "bound"), [(False, 0.05), (True, 0.2)])
def test_accumulated_gradients_differ_as_little_as_docs_differences_says(union, bound):
    """How many queries the union has is known after the forward only; see the contract for what is exact."""
    detector = wake(small("d_fine", num_denoising=0, union_matching=union)).double()
    hold_batch_norms(detector)
    batch = batch_of([2, 0, 7, 1], (64, 64))
    whole = gradient_of(detector, batch, 4)
    assert (gradient_of(detector, batch, 2) - whole).norm() / whole.norm() < bound
