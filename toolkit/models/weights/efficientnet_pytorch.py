"""Names of `efficientnet_pytorch` (lukemelas) and its Lite variant, as the package registries distribute them."""

import re
from collections.abc import Mapping

from torch import Tensor, nn

MARK = "_conv_stem.weight"  # a tensor that only these files have
_OUTSIDE = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
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
_PLAIN = _EXPANDED | {"_project_conv": "conv_pw", "_bn1": "bn1", "_bn2": "bn2"}


def timm_names(offered: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename tensors to those of timm's EfficientNet `model`; unknown names stay.

    The files number all blocks in a row, timm those of each stage.
    """
    blocks = [(stage, block) for stage, blocks in enumerate(model.blocks) for block in range(len(blocks))]

    def renamed(key: str) -> str:
        inner = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", key)
        if inner is None:
            first, _, last = key.rpartition(".")
            return f"{_OUTSIDE.get(first, first)}.{last}"
        number = int(inner[1])
        part, last = inner.group(2, 3)
        if number >= len(blocks):
            return key
        names = _EXPANDED if f"_blocks.{number}._expand_conv.weight" in offered else _PLAIN
        return "blocks.{}.{}.".format(*blocks[number]) + f"{names.get(part, part)}.{last}"

    return {renamed(key): tensor for key, tensor in offered.items()}
