"""Names of published weights: how a publisher is recognised, and the tables that translate its names into ours."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

Pairs = Sequence[tuple[str, str]]  # (theirs, ours); `*` is any number, the same one on both sides


@dataclass
class Description:
    """The detector that a file of published weights belongs to.

    architecture and options: of `build_detector`. class_names: in the order of the rows. notes: assumptions about facts
    that the file does not hold, and the flags that change them. size: the size to which the program resizes images, see
    `toolkit.data.pipeline.processor_size`; None: not known.
    """

    architecture: str
    options: dict
    class_names: list[str]
    notes: list[str] = field(default_factory=list)
    size: dict[str, int] | None = None


@dataclass
class Publisher:
    """A program whose weights are translated to ours by their names.

    marks: names that only its tensors have. names: see `renamed`. left_out: pattern of names without a counterpart.
    copies: see `copied`. described: returns the detector of tensors, from these and the name of their file; it raises
    BadInput for a variant that this toolkit does not have.
    """

    described: Callable[[Mapping[str, Tensor], str], Description]
    marks: Sequence[str]
    names: Pairs
    left_out: str = r"num_batches_tracked$"
    copies: Mapping[str, str] = field(default_factory=dict)

    def recognised(self, state: Mapping[str, Tensor]) -> bool:
        """Return whether the names are those of this publisher."""
        return all(name in state for name in self.marks)

    def ours_from(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the publisher's tensors under our names."""
        weights = {name: tensor for name, tensor in state.items() if not re.search(self.left_out, name)}
        return copied(renamed(split_attention(weights), self.names), self.copies)


def pairs(table: str, below: Pairs = (("", ""),)) -> Pairs:
    """Read a table of entries `theirs ours`, one a line or separated by commas.

    The entries are repeated below each pair of prefixes in `below`.
    """
    entries = [entry.split() for entry in re.split(r"[,\n]", table) if entry.strip()]
    return [(source + theirs, target + ours) for source, target in below for theirs, ours in entries]


def renamed(state: Mapping[str, Tensor], pairs: Pairs) -> dict[str, Tensor]:
    """Rename tensors to our names; a name that no pair matches is kept.

    Args:
        pairs: prefixes of names, (theirs, ours), in whole parts; the first that fits applies, and the rest of the
            name is kept. `*` stands for a number.
    """
    rules = [(_pattern(theirs), ours.replace("*", "{}")) for theirs, ours in pairs]
    return {_renamed(name, rules): tensor for name, tensor in state.items()}


def _pattern(prefix: str) -> re.Pattern:
    return re.compile(re.escape(prefix).replace(r"\*", r"(\d+)") + r"(?=\.|$)")


def _renamed(name: str, rules: Sequence[tuple[re.Pattern, str]]) -> str:
    for pattern, into in rules:
        match = pattern.match(name)
        if match:
            return into.format(*match.groups()) + name[match.end() :]
    return name


def split_attention(state: Mapping[str, Tensor], joint: str = ".in_proj_") -> dict[str, Tensor]:
    """Split the joint matrix of queries, keys and values in attention layers into three.

    `nn.MultiheadAttention` calls it `in_proj_weight`, timm `qkv.weight`; the parts are `q_proj.weight`, `k_proj.weight`
    and `v_proj.weight`. Biases likewise.
    """
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
    """Return the tensors, with those below a prefix under another one too. copies: {prefix of the copy: prefix}."""
    result = dict(state)
    for into, source in copies.items():
        result |= {into + n[len(source) :]: t for n, t in state.items() if n.startswith(f"{source}.")}
    return result


def count(state: Mapping[str, Tensor], prefix: str) -> int:
    """Return the number of numbered parts below a prefix: one more than the largest number."""
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
    """Return timm's name of the ResNet whose `layer1.0.conv1.weight` and so on are below a prefix; None: unknown.

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
