"""Weights of classes in the classification losses, as the setting `loss.class_weights` says."""

from collections.abc import Mapping, Sequence

from toolkit.base.errors import BadInput
from toolkit.base.text import did_you_mean, shown

BALANCED = "balanced"
MAX_WEIGHT = 1e6  # losses of a larger one overflow in float32 or float16
BETA = 0.999  # of the effective number of objects: beyond about 1 / (1 - BETA) of them, more make little difference


def class_weights(setting: str | Mapping, names: Sequence[str], counts: Sequence[int]) -> list[float]:
    """Return the weight of each class.

    Args:
        setting: "balanced", see `balanced_weights`; or weights by name of class: classes that are not named have 1.
        names: the classes in the order of their labels.
        counts: number of objects of each class in the training data.

    Raises BadInput: every entry that is not a class with a weight from 0 to `MAX_WEIGHT`, or all weights are 0.
    """
    if setting == BALANCED:
        return balanced_weights(counts)
    if not isinstance(setting, Mapping):
        raise BadInput(
            f"loss.class_weights is {shown(setting)}; expected {BALANCED}, or weights by name such as {{car: 2.0}}"
        )
    by_name = {str(name): weight for name, weight in setting.items()}  # YAML reads 1 as a number
    faults = []
    for name, weight in by_name.items():
        if name not in names:
            listed = f"the classes are {', '.join(map(shown, names))}"
            hint = did_you_mean(name, names, otherwise=listed, written=shown)
            faults.append(f"loss.class_weights: {shown(name)} is not a class of the training data{hint}")
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight <= MAX_WEIGHT:
            expected = f"expected a number from 0 to {MAX_WEIGHT:,.0f}"
            faults.append(f"loss.class_weights: {shown(name)} has the weight {shown(weight)}; {expected}")
    if faults:
        raise BadInput(faults)
    weights = [float(by_name.get(name, 1.0)) for name in names]
    if max(weights) < 1 / MAX_WEIGHT:
        raise BadInput("loss.class_weights: all classes have the weight 0, or nearly so; give one of them a larger one")
    return weights


def balanced_weights(counts: Sequence[int]) -> list[float]:
    """Return weights that are larger for classes with fewer objects.

    The weight of a class with n objects is proportional to (1 - b) / (1 - b^n), the inverse of the effective number of
    its objects (Cui et al., Class-balanced loss based on effective number of samples, CVPR 2019, equation 5), with b =
    0.999, which bounds the ratio of two weights by 1000. In the paper the weights have the mean 1 over classes; here
    they have it over objects, so that the size of the loss, and with it its balance with the losses of boxes and
    background, stays about the same. Classes without objects have the weight 1.
    """
    raw = []
    for count in counts:
        effective = (1 - BETA**count) / (1 - BETA)
        raw.append(1 / effective if count else 0.0)
    total = sum(weight * count for weight, count in zip(raw, counts, strict=True))
    weights = []
    for weight, count in zip(raw, counts, strict=True):
        weights.append(weight * sum(counts) / total if count else 1.0)
    return weights
