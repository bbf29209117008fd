"""The losses of RT-DETR-v2, held to those of transformers."""

import copy

import torch
from small_detectors import batch_of, forward, small
from torch.testing import assert_close
from transformers.loss.loss_rt_detr import RTDetrForObjectDetectionLoss

from toolkit.detectors.detr.rt_detr import _transformers_targets, without_crowd


def test_losses_and_gradients_are_those_of_transformers():
    detector = small("rt_detr_v2").train()
    batch = batch_of([2, 0, 5], crowd=1)
    outputs = forward(detector, batch)
    ours, _ = detector.criterion(outputs, batch.targets, detector.denominators(batch.targets))
    config = copy.deepcopy(detector.model.config)
    config.weight_loss_bbox = 1.0
    config.weight_loss_giou = 1.0
    layers = outputs["layers"]
    _, theirs, _ = RTDetrForObjectDetectionLoss(
        layers["logits"][:, -1],
        _transformers_targets([without_crowd(target) for target in batch.targets]),
        "cpu",
        layers["boxes"][:, -1],
        config,
        layers["logits"],
        layers["boxes"],
        enc_topk_logits=layers["encoder_logits"],
        enc_topk_bboxes=layers["encoder_boxes"],
        denoising_meta_values=layers["denoising"],
    )
    theirs = {name.replace("_aux_1", "_enc"): value for name, value in theirs.items()}
    assert set(ours) == set(theirs) == set(detector.loss_names)
    for name, value in theirs.items():
        assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)
    inputs = [layers["logits"], layers["boxes"]]
    wanted = torch.autograd.grad(sum(theirs.values()), inputs, retain_graph=True)
    found = torch.autograd.grad(sum(ours.values()), inputs)
    assert_close(found, wanted, rtol=1e-4, atol=1e-6)
