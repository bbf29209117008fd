"""Settings of a trained detector that change its predictions but not its weights, and its image size."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from toolkit.base.errors import BadInput
from toolkit.base.files import parse_yaml
from toolkit.base.text import shown
from toolkit.models import options_class

LARGEST_SIDE = 20_000  # pixels that an image may be resized to
KEYS_OF_SIZE = ({"height", "width"}, {"shortest_edge", "longest_edge"}, {"shortest_edge"})


def checked_size(size: Any) -> Mapping[str, int] | None:
    """Return the size, in pixels, to which images are resized, after a check; None: images keep their size.

    Its forms are those of `toolkit.data.pipeline.processor_size`. Raises ValueError for anything else.
    """
    known = isinstance(size, dict) and size.keys() in KEYS_OF_SIZE
    if size is None or known and all(type(side) is int and 0 < side <= LARGEST_SIDE for side in size.values()):
        return size
    raise ValueError(
        f"size {size!r}: expected null, height and width, or shortest_edge with or without longest_edge, in whole "
        f"pixels up to {LARGEST_SIDE:,}"
    )


def inference_flags(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the `--model.KEY VALUE` and `--head.KEY VALUE` pairs among arguments, by key, and the other arguments.

    `--head.KEY` is short for `--model.head_options.KEY`. Values are read as YAML, as in a settings file.

    Raises:
        BadInput: a flag without a value, or with one that cannot be read.
    """
    settings = {}
    rest = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if not flag.startswith(("--model.", "--head.")):
            rest.append(word)
            continue
        value = value if equals else next(words, None)
        if value is None:
            raise BadInput(f"{flag}: expected a value")
        key = flag.removeprefix("--").replace("head.", "head_options.", 1).removeprefix("model.")
        try:
            settings[key] = parse_yaml(value)
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise BadInput(f"{flag} {shown(value)}: cannot be read as a value of a setting: {reason}") from error
    return settings, rest


def with_inference_settings(model: Mapping, asked: Mapping[str, Any]) -> dict:
    """Return the settings of a model, changed by those that were asked for.

    Args:
        model: the group `model` of a run's settings.
        asked: by key; `head_options.effect` is an entry of the setting `head_options`.

    Raises:
        BadInput: unknown settings, or settings that training depends on.
    """
    allowed = options_class(model["architecture"]).inference_only
    wrong = [key for key in asked if key not in allowed]
    if wrong:
        raise BadInput(
            f"{', '.join(wrong)}: no setting of {model['architecture']} that a trained model can change; "
            + (f"there are {', '.join(allowed)}" if allowed else "it has none")
        )
    changed = dict(model)
    for key, value in asked.items():
        name, _, entry = key.partition(".")
        changed[name] = {**(changed.get(name) or {}), entry: value} if entry else value
    return changed
