"""The losses of Deformable DETR, and of queries in groups, which are trained side by side."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_detectors import CLASSES, random_target, transformers_labels
from transformers.loss.loss_lw_detr import LwDetrHungarianMatcher, LwDetrImageLoss

from toolkit.detectors.detr.focal_criterion import FocalCriterion, quality_terms


def random_outputs(num_layers: int, batch_size: int, queries: int, seed: int = 5) -> dict:
    options = {
        "generator": torch.Generator().manual_seed(seed),
        "dtype": torch.float64,
    }
    shape = (num_layers + 1, batch_size, queries)
    *logits, encoder_logits = torch.randn(*shape, len(CLASSES), **options)
    *boxes, encoder_boxes = torch.rand(*shape, 4, **options) * 0.4 + 0.2
    return {
        "logits": torch.stack(logits),
        "boxes": torch.stack(boxes),
        "encoder_logits": encoder_logits,
        "encoder_boxes": encoder_boxes,
    }


def random_targets(*counts: int, seed: int = 0) -> list[dict]:
    return [random_target(n, seed=seed + n, dtype=torch.float64) for n in counts]


SEEDS = st.integers(0, 2**31)
COUNTS = st.lists(st.integers(0, 8), min_size=1, max_size=3)


@settings(max_examples=15, deadline=None)
@given(SEEDS, COUNTS, st.sampled_from([1, 3]))
def test_losses_of_groups_are_those_of_transformers(seed, counts, groups):
    targets = random_targets(*counts, seed=seed % 1000)
    outputs = random_outputs(3, len(counts), 5 * groups, seed)
    criterion = FocalCriterion(3, encoder="classes", class_terms=quality_terms)
    boxes = float(sum(counts) * groups)
    denominators = {"boxes": max(1.0, boxes)}
    losses, _ = criterion(outputs, targets, denominators, groups)

    theirs = LwDetrImageLoss(
        LwDetrHungarianMatcher(2, 5, 2),
        len(CLASSES),
        0.25,
        ["labels", "boxes"],
        groups,
    )
    layers = []
    for logits, boxes in zip(outputs["logits"], outputs["boxes"], strict=True):
        layers.append({"logits": logits, "pred_boxes": boxes})
    *auxiliary, last = layers
    encoder = {
        "logits": outputs["encoder_logits"],
        "pred_boxes": outputs["encoder_boxes"],
    }
    given_outputs = last | {"auxiliary_outputs": auxiliary, "enc_outputs": encoder}
    wanted = theirs(given_outputs, transformers_labels(targets))
    assert set(losses) == set(wanted)
    assert set(losses) == set(criterion.loss_names)
    for name, value in wanted.items():
        torch.testing.assert_close(losses[name], value, rtol=1e-5, atol=1e-5, msg=name)


def test_only_the_first_group_is_measured():
    outputs = random_outputs(2, 2, 8)
    targets = random_targets(3, 1)
    criterion = FocalCriterion(2, encoder="classes", class_terms=quality_terms)
    denominators = {"boxes": 1.0}
    _, metrics = criterion(outputs, targets, denominators, groups=2)
    first = {name: value[..., :4, :] for name, value in outputs.items()}
    _, of_first = criterion(first, targets, denominators)
    assert metrics == of_first
    _, count = metrics["class_error"]
    assert count == 4


def test_proposals_of_two_stages_learn_foreground():
    """Their classes do not matter, and every position counts: the focal loss of class 0 over all of them."""
    outputs = random_outputs(1, 2, 7)
    targets = random_targets(3, 0)
    denominators = {"boxes": 3.0}
    criterion = FocalCriterion(1, encoder="foreground")
    losses, _ = criterion(outputs, targets, denominators)
    for target in targets:
        target["labels"] = torch.zeros_like(target["labels"])
    as_main = {
        "logits": outputs["encoder_logits"][None],
        "boxes": outputs["encoder_boxes"][None],
    }
    wanted, _ = FocalCriterion(1)(as_main, targets, denominators)
    for name, value in wanted.items():
        assert losses[f"{name}_enc"] == value
