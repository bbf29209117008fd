"""The losses of Deformable DETR, and of queries in groups, which are trained side by side."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_detectors import CLASSES, random_target, transformers_labels
from transformers.loss.loss_lw_detr import LwDetrHungarianMatcher, LwDetrImageLoss

from toolkit.detectors.detr.focal_criterion import FocalCriterion, quality_terms


def random_outputs(num_layers: int, batch_size: int, queries: int, seed: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_layers + 1, batch_size, queries)
    logits = torch.randn(*shape, len(CLASSES), generator=generator, dtype=torch.float64)
    boxes = torch.rand(*shape, 4, generator=generator, dtype=torch.float64) * 0.4 + 0.2
    return {
        "logits": logits[:-1],
        "boxes": boxes[:-1],
        "encoder_logits": logits[-1],
        "encoder_boxes": boxes[-1],
    }


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 8), min_size=1, max_size=3), st.sampled_from([1, 3]))
def test_losses_of_groups_are_those_of_transformers(seed, counts, groups):
    targets = [random_target(n, seed=seed % 1000 + n, dtype=torch.float64) for n in counts]
    outputs = random_outputs(3, len(counts), 5 * groups, seed)
    criterion = FocalCriterion(3, encoder="classes", class_terms=quality_terms)
    boxes = max(1.0, float(sum(counts) * groups))
    losses, _ = criterion(outputs, targets, {"boxes": boxes}, groups)

    theirs = LwDetrImageLoss(
        LwDetrHungarianMatcher(2, 5, 2),
        len(CLASSES),
        0.25,
        ["labels", "boxes"],
        groups,
    )
    layers = zip(outputs["logits"], outputs["boxes"], strict=True)
    *auxiliary, last = [{"logits": logits, "pred_boxes": boxes} for logits, boxes in layers]
    encoder = {"logits": outputs["encoder_logits"], "pred_boxes": outputs["encoder_boxes"]}
    given_outputs = last | {"auxiliary_outputs": auxiliary, "enc_outputs": encoder}
    wanted = theirs(given_outputs, transformers_labels(targets))
    assert set(losses) == set(wanted) == set(criterion.loss_names)
    for name, value in wanted.items():
        torch.testing.assert_close(losses[name], value, rtol=1e-5, atol=1e-5, msg=name)


def test_only_the_first_group_is_measured():
    outputs = random_outputs(2, 2, 8)
    targets = [random_target(3, dtype=torch.float64), random_target(1, seed=1, dtype=torch.float64)]
    criterion = FocalCriterion(2, encoder="classes", class_terms=quality_terms)
    _, metrics = criterion(outputs, targets, {"boxes": 1.0}, groups=2)
    first = {name: value[..., :4, :] for name, value in outputs.items()}
    assert metrics == criterion(first, targets, {"boxes": 1.0})[1]
    assert metrics["class_error"][1] == 4


def test_proposals_of_two_stages_learn_foreground():
    """Their classes do not matter, and every position counts: the focal loss of class 0 over all of them."""
    outputs = random_outputs(1, 2, 7)
    targets = [random_target(3, dtype=torch.float64), random_target(0, dtype=torch.float64)]
    losses, _ = FocalCriterion(1, encoder="foreground")(outputs, targets, {"boxes": 3.0})
    relabelled = [{**target, "labels": torch.zeros_like(target["labels"])} for target in targets]
    as_main = {"logits": outputs["encoder_logits"][None], "boxes": outputs["encoder_boxes"][None]}
    wanted, _ = FocalCriterion(1)(as_main, relabelled, {"boxes": 3.0})
    assert {name: losses[f"{name}_enc"] for name in wanted} == wanted
