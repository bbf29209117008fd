"""Names of published weights: how a publisher is recognised, and the tables that translate its names into ours."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

Pairs = Sequence[tuple[str, str]]  # (theirs, ours); `*` is any number, the same one on both sides


@dataclass
class Description:
    """The detector that a file of published weights belongs to.

    architecture and options: of `build_detector`. class_names: in the order of the rows. notes: what a user should know
    because the file itself cannot tell it, and the flag that says otherwise. size: what images are resized to, as the
    program does it, see `toolkit.data.pipeline.processor_size`; None: not known.
    """

    architecture: str
    options: dict
    class_names: list[str]
    notes: list[str] = field(default_factory=list)
    size: dict[str, int] | None = None


@dataclass
class Publisher:
    """A program whose weights are translated to ours by their names.

    marks: names that its tensors have, and no other publisher's. names: see `renamed`. left_out: pattern of names
    without a counterpart. copies: see `copied`. described: the detector that tensors are of, from these and the name of
    their file; it raises BadInput for a variant that is not here.
    """

    described: Callable[[Mapping[str, Tensor], str], Description]
    marks: Sequence[str]
    names: Pairs
    left_out: str = r"num_batches_tracked$"
    copies: Mapping[str, str] = field(default_factory=dict)

    def recognised(self, state: Mapping[str, Tensor]) -> bool:
        """Whether these are its names."""
        return all(name in state for name in self.marks)

    def ours_from(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their tensors under our names."""
        weights = {name: tensor for name, tensor in state.items() if not re.search(self.left_out, name)}
        return copied(renamed(split_attention(weights), self.names), self.copies)


def pairs(table: str, below: Pairs = (("", ""),)) -> Pairs:
    """A table of entries `theirs ours`, one a line or separated by commas; repeated below each pair of prefixes in
    `below`."""
    entries = [entry.split() for entry in re.split(r"[,\n]", table) if entry.strip()]
    return [(source + theirs, target + ours) for source, target in below for theirs, ours in entries]


def renamed(state: Mapping[str, Tensor], pairs: Pairs) -> dict[str, Tensor]:
    """Rename tensors to our names; a name that no pair matches is kept.

    Args:
        pairs: prefixes of names, (theirs, ours), in whole parts; the first that fits applies, and what comes after it
            is kept. `*` stands for a number.
    """
    rules = [(_pattern(theirs), ours.replace("*", "{}")) for theirs, ours in pairs]
    return {_renamed(name, rules): tensor for name, tensor in state.items()}


def _pattern(prefix: str) -> re.Pattern:
    return re.compile(re.escape(prefix).replace(r"\*", r"(\d+)") + r"(?=\.|$)")


def _renamed(name: str, rules: Sequence[tuple[re.Pattern, str]]) -> str:
    for pattern, into in rules:
        if match := pattern.match(name):
            return into.format(*match.groups()) + name[match.end() :]
    return name


def split_attention(state: Mapping[str, Tensor], joint: str = ".in_proj_") -> dict[str, Tensor]:
    """`nn.MultiheadAttention` keeps queries, keys and values in one matrix `in_proj_weight`, timm in `qkv.weight`: as
    three, `q_proj.weight`, `k_proj.weight` and `v_proj.weight`; biases likewise."""
    result = {}
    for name, tensor in state.items():
        stem, separator, leaf = name.rpartition(joint)
        if separator:
            parts = tensor.chunk(3)
            result |= {f"{stem}.{which}_proj.{leaf}": part for which, part in zip("qkv", parts, strict=True)}
        else:
            result[name] = tensor
    return result


def copied(state: Mapping[str, Tensor], copies: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors, and those below a prefix under another one too. copies: {prefix of the copy: prefix}."""
    result = dict(state)
    for into, source in copies.items():
        result |= {into + n[len(source) :]: t for n, t in state.items() if n.startswith(f"{source}.")}
    return result


def count(state: Mapping[str, Tensor], prefix: str) -> int:
    """How many numbered parts there are below a prefix: one more than the largest number."""
    numbers = [int(match[1]) for name in state if (match := re.match(re.escape(prefix) + r"\.(\d+)\.", name))]
    return max(numbers, default=-1) + 1


RESNETS = {  # blocks of each stage, and whether they are bottlenecks
    ((2, 2, 2, 2), False): "resnet18",
    ((3, 4, 6, 3), False): "resnet34",
    ((3, 4, 6, 3), True): "resnet50",
    ((3, 4, 23, 3), True): "resnet101",
    ((3, 8, 36, 3), True): "resnet152",
}


def resnet_name(state: Mapping[str, Tensor], prefix: str) -> str | None:
    """timm's name of the ResNet whose `layer1.0.conv1.weight` and so on stand below a prefix; None: none that is known.

    A ResNeXt is recognised by the groups of its 3 x 3 convolutions.
    """
    blocks = tuple(count(state, f"{prefix}layer{stage}") for stage in (1, 2, 3, 4))
    deep = f"{prefix}layer1.0.conv3.weight" in state
    name = RESNETS.get((blocks, deep))
    if not deep or name is None:
        return name
    width, per_group = state[f"{prefix}layer1.0.conv2.weight"].shape[:2]
    if width != per_group:  # 32 groups of 4 or 8
        name = f"{name.replace('resnet', 'resnext')}_{width // per_group}x{per_group}d"
    return name
