"""Loads files of backbone weights under the names of timm or `efficientnet_pytorch`, and reports what was loaded."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import timm
import torch
from timm.models import _builder
from torch import Tensor, nn

from toolkit.base.distributed import world
from toolkit.base.errors import BadInput
from toolkit.base.text import first_names
from toolkit.models.weights.difference import MAX_NAMED, difference
from toolkit.models.weights.weight_files import read_tensors

SETTING = "model.pretrained_backbone"
COUNTERS = r"num_batches_tracked$"  # which older files lack

# Names of `efficientnet_pytorch` (lukemelas) and its Lite variant, as the package registries distribute them.
EFFICIENTNET_MARK = "_conv_stem.weight"  # a tensor that only these files have
_OUTSIDE = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
_EXPANDED = {
    "_expand_conv": "conv_pw",
    "_depthwise_conv": "conv_dw",
    "_project_conv": "conv_pwl",
    "_bn0": "bn1",
    "_bn1": "bn2",
    "_bn2": "bn3",
    "_se_reduce": "se.conv_reduce",
    "_se_expand": "se.conv_expand",
}
# A block that does not widen has no first convolution, and timm counts its norms from 1 too.
_PLAIN = {
    **_EXPANDED,
    "_project_conv": "conv_pw",
    "_bn1": "bn1",
    "_bn2": "bn2",
}


def read_backbone_file(file: str) -> dict[str, Tensor]:
    """Read the tensors of a file by name. Raises BadInput if the file is missing or has no tensors."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise BadInput(f"{SETTING}: the file {file} does not exist; give a file of weights, true or false.")
    return read_tensors(path, SETTING)


def timm_model_from_file(name: str, file: str, **options) -> nn.Module:
    """Create the model `timm.create_model(name, **options)` with the weights of a file.

    The tensors in the file have the names of timm, present or past, or those of `efficientnet_pytorch`.

    Raises:
        BadInput: see `read_backbone_file` and `load_matching`.
    """
    offered = read_backbone_file(file)
    wanted = {}

    def load(model: nn.Module, *_, filter_fn=None, **__) -> None:  # replaces timm's, which ignores missing tensors
        nonlocal offered
        wanted.update(model.state_dict(keep_vars=True))
        if EFFICIENTNET_MARK in offered and hasattr(model, "blocks"):
            offered = names_of_efficientnet(offered, model)
        elif filter_fn is not None:  # timm's own renaming of published files
            offered = _filtered(filter_fn, offered, model, name, file)

    with mock.patch.object(_builder, "load_pretrained", load):
        model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay={"file": file}, **options)
    used = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    dropped = {key for key, tensor in wanted.items() if id(tensor) not in used}  # the classifier, stages without a map
    wanted = {key: tensor for key, tensor in wanted.items() if key not in dropped}
    offered = {key: tensor for key, tensor in offered.items() if key not in dropped}
    load_matching(wanted, offered, name, file)
    return model


def names_of_efficientnet(offered: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return tensors of `efficientnet_pytorch` under the names of timm's EfficientNet `model`; unknown names are kept.

    `efficientnet_pytorch` numbers all blocks consecutively, timm the blocks of each stage.
    """
    places = []  # (stage, block in it) of each block
    for stage, blocks in enumerate(model.blocks):
        places += [(stage, block) for block in range(len(blocks))]

    def renamed(key: str) -> str:
        inner = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", key)
        if inner is None:
            first, _, last = key.rpartition(".")
            return f"{_OUTSIDE.get(first, first)}.{last}"
        number = int(inner[1])
        part, last = inner.group(2, 3)
        if number >= len(places):
            return key
        stage, block = places[number]
        names = _EXPANDED if f"_blocks.{number}._expand_conv.weight" in offered else _PLAIN
        return f"blocks.{stage}.{block}.{names.get(part, part)}.{last}"

    return {renamed(key): tensor for key, tensor in offered.items()}


def _filtered(filter_fn, offered: dict, model: nn.Module, name: str, file: str) -> dict[str, Tensor]:
    try:
        try:
            return filter_fn(dict(offered), model)
        except TypeError:  # older ones accept only the tensors
            return filter_fn(dict(offered))
    except (LookupError, RuntimeError, ValueError, AttributeError, TypeError) as error:
        has = f"its {len(offered)} tensors ({first_names(list(offered), MAX_NAMED)})"
        raise BadInput(
            f"{SETTING} {file}: {has} are not those of timm's {name!r}; give a file of timm's weights for this "
            "backbone."
        ) from error


def load_publishers_file(
    backbone: nn.Module,
    file: bool | str,
    names: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    model: str,
    published: str,
) -> None:
    """Load a publisher's file into a backbone in place.

    Args:
        backbone: a vision transformer of transformers.
        file: value of `model.pretrained_backbone`.
        names: function that renames the tensors of the file to the names of `backbone`.
        model, published: name of the model and of its publisher's file, for messages.

    Raises:
        BadInput: `file` is True, the file is missing, or its tensors are not those of the backbone.
    """
    if file is True:
        raise BadInput(f"model.pretrained_backbone: give the publisher's file of the backbone of {model}: {published}")
    own = backbone.state_dict()
    wanted = {name: tensor for name, tensor in own.items() if tensor.numel()}  # not all have registers
    load_matching(wanted, names(read_backbone_file(file)), model, file)


@torch.no_grad()
def load_matching(wanted: Mapping[str, Tensor], offered: Mapping[str, Tensor], name: str, file: str) -> None:
    """Copy tensors of a file into the backbone's tensors of the same name and shape, in place, and print which tensors
    did not fit.

    Args:
        wanted: tensors of the backbone by name.
        offered: tensors of the file by name.
        name, file: names of the backbone and of the file, for messages.

    Raises:
        BadInput: the file has no weight of a part of the backbone (`layer1.0`, `blocks.3`, `stem`), or less than half
            of all weights.
    """
    matching = {key for key in wanted if key in offered and offered[key].shape == wanted[key].shape}
    counted = [key for key in wanted if not re.search(COUNTERS, key)]
    summary = f"taken {len(matching.intersection(counted))} of {len(counted)} tensors"
    found = difference(wanted, offered, optional=COUNTERS)
    if found:
        summary += f"; {found}"
    weights = [key for key, tensor in wanted.items() if tensor.ndim > 1]
    loaded = matching.intersection(weights)
    started = {_part(key) for key in loaded}
    fresh = [part for part in dict.fromkeys(map(_part, weights)) if part not in started]
    if fresh or 2 * len(loaded) < len(weights):
        what = f"no weight of {first_names(fresh, MAX_NAMED)}" if fresh else "less than half of the weights"
        raise BadInput(
            f"{SETTING} {file}: it has {what} of {name!r} ({summary}); give a file of weights for this backbone, under "
            "the names of the library that builds it."
        )
    for key in matching:
        wanted[key].copy_(offered[key])
    if world()[0] == 0:
        print(f"{SETTING} {file}: {summary}")


def _part(name: str) -> str:
    return re.match(r"[^.]+(\.\d+)?", name)[0]
