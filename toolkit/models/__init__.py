"""Detectors. `build_detector` is the one place that training, evaluation and prediction make a model in."""

import difflib
import inspect
from collections.abc import Sequence

from torch import nn

from toolkit.errors import BadInput

ARCHITECTURES = ("detr", "rt_detr_v2")


def build_detector(architecture: str, *, class_names: Sequence[str], **options) -> nn.Module:
    """A detector, with the interface described in docs/design.md.

    Args:
        architecture: one of `ARCHITECTURES`.
        class_names: one name per class, in the order of the labels.
        options: keyword arguments of that detector's class, all of them plain numbers, strings and lists, so that a
            run's `config.yaml` builds the same model again.

    Raises:
        BadInput: unknown architecture, no classes, an option that it does not have, or that cannot be met (unknown
            backbone, no weights, ...).
    """
    if not class_names:
        raise BadInput("the data names no classes; a detector needs at least one.")
    # Imported when needed: transformers takes seconds, which other scripts and loader processes need not wait for.
    if architecture == "detr":
        from toolkit.models.detr import Detr as detector
    elif architecture == "rt_detr_v2":
        from toolkit.models.rt_detr import RTDetrV2 as detector
    else:
        similar = difflib.get_close_matches(str(architecture), ARCHITECTURES, n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        raise BadInput(f"model.architecture: {architecture!r} is none of {', '.join(ARCHITECTURES)}{hint}")
    known = list(inspect.signature(detector).parameters)
    if foreign := [name for name in options if name not in known]:
        raise BadInput(f"{architecture} has no setting model.{', model.'.join(foreign)}; it has {', '.join(known)}")
    return detector(class_names=class_names, **options)
