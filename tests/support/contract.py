"""What every detector promises, checked in the tests of each."""

import json

import torch

from toolkit.models import build_detector
from toolkit.models.detector import denominator_of


def assert_losses_are_divided_as_announced(detector, outputs, targets) -> None:
    """Doubling a denominator halves the losses that are announced to be divided by it, and leaves the others."""
    counts = detector.denominators(targets)
    assert set(counts) == set(detector.denominator_names)
    counts = {name: torch.tensor(max(value, 1.0)) for name, value in counts.items()}
    losses = detector.criterion(outputs, targets, counts)[0]
    assert losses.keys() == set(detector.loss_names) and all(loss.detach() != 0 for loss in losses.values())
    for name in counts:
        doubled = detector.criterion(outputs, targets, {**counts, name: 2 * counts[name]})[0]
        for loss, value in losses.items():
            factor = 0.5 if denominator_of(detector, loss) == name else 1.0
            torch.testing.assert_close(doubled[loss], factor * value, msg=f"{loss} when {name} doubles")


def trained_without_gradient(detector) -> list[str]:
    """Names of the trained parameters that no loss has given a gradient."""
    parameters = detector.named_parameters()
    return [name for name, parameter in parameters if parameter.requires_grad and parameter.grad is None]


def assert_resolved_options_build_it_again(detector, class_names, without_value=("pretrained",)) -> None:
    """The same structure, through JSON as a file has it; every setting has a value but those that can have none."""
    resolved = detector.resolved_options()
    assert {name for name, value in resolved.items() if value is None} <= set(without_value)
    again = build_detector(**json.loads(json.dumps(resolved)), class_names=class_names)
    assert type(again) is type(detector) and str(again) == str(detector)
    shapes = [{name: value.shape for name, value in each.state_dict().items()} for each in (detector, again)]
    assert list(shapes[0].items()) == list(shapes[1].items())
    trained = [[name for name, p in each.named_parameters() if p.requires_grad] for each in (detector, again)]
    assert trained[0] == trained[1]
    assert again.resolved_options() == json.loads(json.dumps(resolved))
    for announced in (
        "loss_names",
        "divided_by",
        "default_weights",
        "mean",
        "std",
        "stride",
        "class_tensors",
    ):
        assert getattr(again, announced) == getattr(detector, announced), announced
