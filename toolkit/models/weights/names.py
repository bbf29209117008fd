"""Names in published weights: of tensors, which tell the publisher and are translated into ours, and of classes."""

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
        weights = renamed(split_attention(weights), self.names)
        return copied(weights, self.copies)


def pairs(table: str, below: Pairs = (("", ""),)) -> Pairs:
    """Read a table of entries `theirs ours`, one a line or separated by commas.

    The entries are repeated below each pair of prefixes in `below`.
    """
    entries = [entry.split() for entry in re.split(r"[,\n]", table) if entry.strip()]
    repeated = []
    for source, target in below:
        repeated += [(source + theirs, target + ours) for theirs, ours in entries]
    return repeated


def renamed(state: Mapping[str, Tensor], pairs: Pairs) -> dict[str, Tensor]:
    """Rename tensors to our names; a name that no pair matches is kept.

    Args:
        pairs: prefixes of names, (theirs, ours), in whole parts; the first that fits applies, and the rest of the
            name is kept. `*` stands for a number.
    """
    rules = [(_pattern(theirs), ours.replace("*", "{}")) for theirs, ours in pairs]
    return {_renamed(name, rules): tensor for name, tensor in state.items()}


def _pattern(prefix: str) -> re.Pattern:
    with_numbers = re.escape(prefix).replace(r"\*", r"(\d+)")
    return re.compile(with_numbers + r"(?=\.|$)")


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
            for which, part in zip("qkv", tensor.chunk(3), strict=True):
                result[f"{stem}.{which}_proj.{leaf}"] = part
        else:
            result[name] = tensor
    return result


def copied(state: Mapping[str, Tensor], copies: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors, with those below a prefix under another one too. copies: {prefix of the copy: prefix}."""
    result = dict(state)
    for into, source in copies.items():
        for name, tensor in state.items():
            if name.startswith(f"{source}."):
                result[into + name[len(source) :]] = tensor
    return result


def count(state: Mapping[str, Tensor], prefix: str) -> int:
    """Return the number of numbered parts below a prefix: one more than the largest number."""
    pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    matches = [pattern.match(name) for name in state]
    numbers = [int(match[1]) for match in matches if match]
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


# ---- classes, in the order of their rows -----------------------------------------------------------------------------

COCO_80 = (
    "person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop sign, "
    "parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack, umbrella, "
    "handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, skateboard, "
    "surfboard, tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange, "
    "broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, "
    "laptop, mouse, remote, keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock, vase, "
    "scissors, teddy bear, hair drier, toothbrush"
).split(", ")
NOT_IN_COCO = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)  # of the ids 1 to 90
VOC_20 = (
    "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant "
    "sheep sofa train tvmonitor"
).split()
VG_150 = (
    "airplane animal arm bag banana basket beach bear bed bench bike bird board boat book boot bottle bowl box boy "
    "branch building bus cabinet cap car cat chair child clock coat counter cow cup curtain desk dog door drawer "
    "ear elephant engine eye face fence finger flag flower food fork fruit giraffe girl glass glove guy hair hand "
    "handle hat head helmet hill horse house jacket jean kid kite lady lamp laptop leaf leg letter light logo man "
    "men motorcycle mountain mouth neck nose number orange pant paper paw people person phone pillow pizza plane "
    "plant plate player pole post pot racket railing rock roof room screen seat sheep shelf shirt shoe short "
    "sidewalk sign sink skateboard ski skier sneaker snow sock stand street surfboard table tail tie tile tire "
    "toilet towel tower track train tree truck trunk umbrella vase vegetable vehicle wave wheel window windshield "
    "wing wire woman zebra"
).split()


def coco_by_id(first: int, last: int = 90) -> list[str]:
    """Return COCO's classes for rows that are its ids, from `first`; unused ids are called `no class 12`."""
    names = iter(COCO_80)
    by_id = {i: next(names) for i in range(1, 91) if i not in NOT_IN_COCO}
    return [by_id.get(i, f"no class {i}") for i in range(first, last + 1)]


def named(rows: int) -> list[str]:
    """Return names for a classifier of `rows` classes without background; numbered if the data set is not known."""
    by_rows = {
        80: COCO_80,
        90: coco_by_id(1),
        91: coco_by_id(0),
        20: VOC_20,
        150: VG_150,
    }
    numbered = [f"class {i}" for i in range(rows)]
    return list(by_rows.get(rows, numbered))
