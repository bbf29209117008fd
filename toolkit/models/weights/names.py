"""Names in published weights: names of tensors, which identify the publisher and are translated into names of this
toolkit, and names of classes."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from toolkit.base.errors import BadInput

Pairs = Sequence[tuple[str, str]]  # (theirs, ours); `*` is any number, the same one on both sides


@dataclass
class Description:
    """A description of the detector that a file of published weights belongs to.

    Attributes:
        architecture, options: arguments of `build_detector`.
        class_names: names of the classes in the order of their rows in the tensors.
        notes: sentences about facts that the file does not hold and that are assumed, with the flags to change them.
        size: the size to which the publisher's program resizes images, see `toolkit.data.pipeline.processor_size`;
            None: it is not known.
        variant: which of several detectors of this architecture it is, for messages.
        needless: pattern of our names of tensors that the detector does not need, as one of the notes says.
    """

    architecture: str
    options: dict
    class_names: list[str]
    notes: list[str] = field(default_factory=list)
    size: dict[str, int] | None = None
    variant: str = ""
    needless: str = "^$"


class IncompleteWeights(BadInput):
    """Tensors with the names of a publisher, of which some are missing or have another shape; the message says which.

    `open_published_weights` adds the file and the publisher.
    """


def required(state: Mapping[str, Tensor], name: str, rank: int | None = None) -> Tensor:
    """Return the tensor of this name.

    Publishers read numbers of layers and widths from names and shapes. Of a file that was cut or pruned they are wrong,
    so every tensor whose shape is read is asked for here.

    rank: number of its dimensions; None: at least one.

    Raises:
        IncompleteWeights: the tensor is missing, is empty, or has another number of dimensions.
    """
    if name not in state:
        raise IncompleteWeights(f"lacks {name}")
    tensor = state[name]
    fits = tensor.ndim == rank if rank is not None else tensor.ndim > 0
    if not fits or 0 in tensor.shape:
        expected = "one dimension or more" if rank is None else f"{rank} dimension{'s' * (rank > 1)}"
        raise IncompleteWeights(f"has {name} of shape {list(tensor.shape)}; expected {expected}, not empty")
    return tensor


def required_rows(state: Mapping[str, Tensor], name: str, *, multiple_of: int) -> int:
    """Return the number of rows of a tensor. Raises IncompleteWeights if it is not a multiple of `multiple_of`."""
    tensor = required(state, name)
    if len(tensor) % multiple_of:
        raise IncompleteWeights(f"has {name} of shape {list(tensor.shape)}; expected a multiple of {multiple_of} rows")
    return len(tensor)


def positive_number(state: Mapping[str, Tensor], name: str) -> float:
    """Return the one number of a tensor.

    Raises:
        IncompleteWeights: the tensor is missing, or does not hold one finite number above 0.
    """
    if name not in state:
        raise IncompleteWeights(f"lacks {name}")
    values = state[name].flatten().tolist()
    if len(values) != 1 or not 0 < values[0] < math.inf:
        raise IncompleteWeights(f"has {name} = {str(values)[:60]}; expected one finite number above 0")
    return float(values[0])


def as_they_are(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors without a change."""
    return state


@dataclass(eq=False)
class Publisher:
    """A program that publishes weights, whose tensors are renamed to the names of this toolkit.

    Attributes:
        program: name of the program, for messages.
        described: function that takes the tensors by name and the name of their file, and returns a `Description` of
            each detector that they may belong to; it raises BadInput for a variant that this toolkit does not have.
        marks: names of tensors that only this program's files have, all of them. A mark that ends with a dot is the
            beginning of such names.
        names: pairs of prefixes, see `renamed`.
        prepared: function that changes tensors, by the publisher's names, before they are renamed.
        left_out: pattern of names of tensors that have no counterpart here.
        copies: see `copied`.
        optional: pattern of our names of tensors that a file may lack: they are constants, or serve training only.
    """

    program: str
    described: Callable[[Mapping[str, Tensor], str], list[Description]]
    marks: Sequence[str]
    names: Pairs = ()
    prepared: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = as_they_are
    left_out: str = r"num_batches_tracked$"
    copies: Mapping[str, str] = field(default_factory=dict)
    optional: str = r"(num_batches_tracked|n_points_scale|denoising_class_embed\.weight)$"

    def recognised(self, state: Mapping[str, Tensor]) -> bool:
        """Return whether the tensors, by their names, are of this publisher."""
        return all(mark in state or mark.endswith(".") and _any_begins(state, mark) for mark in self.marks)

    def ours_from(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the publisher's tensors under the names of this toolkit."""
        state = self.prepared(state)
        weights = {name: tensor for name, tensor in state.items() if not re.search(self.left_out, name)}
        weights = renamed(split_attention(weights), self.names)
        return copied(weights, self.copies)


def _any_begins(state: Mapping[str, Tensor], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in state)


def pairs(table: str, below: Pairs = (("", ""),)) -> Pairs:
    """Return pairs (publisher's prefix, our prefix) of names from a text of entries `theirs ours`, one per line or
    separated by commas.

    below: pairs (publisher's prefix, our prefix) that are put before the entries; all entries are repeated for each.
    """
    entries = [entry.split() for entry in re.split(r"[,\n]", table) if entry.strip()]
    repeated = []
    for source, target in below:
        repeated += [(source + theirs, target + ours) for theirs, ours in entries]
    return repeated


def renamed(state: Mapping[str, Tensor], pairs: Pairs) -> dict[str, Tensor]:
    """Return the tensors with replaced prefixes of their names; a name that no pair matches is kept.

    Args:
        pairs: pairs of prefixes (publisher's, ours), which match whole parts of a name; the first pair that matches
            applies, and the rest of the name is kept. `*` stands for a number, the same one in both prefixes.
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
    """Return the tensors with the joint matrices and biases of attention layers split into those of queries, keys and
    values.

    joint: the part of a name by which a joint tensor is recognised: ".in_proj_" for `in_proj_weight` of
    `nn.MultiheadAttention`, ".qkv." for `qkv.weight` of timm. The results are called `q_proj.weight`, `k_proj.weight`
    and `v_proj.weight`, and the biases likewise.

    Raises:
        IncompleteWeights: a joint tensor does not have three equal parts.
    """
    result = {}
    for name, tensor in state.items():
        stem, separator, leaf = name.rpartition(joint)
        if separator:
            for which, part in zip("qkv", equal_parts(state, name, 3), strict=True):
                result[f"{stem}.{which}_proj.{leaf}"] = part
        else:
            result[name] = tensor
    return result


def equal_parts(state: Mapping[str, Tensor], name: str, parts: int) -> tuple[Tensor, ...]:
    """Return a tensor in equal parts of its rows. Raises IncompleteWeights if it does not have them."""
    required_rows(state, name, multiple_of=parts)
    return state[name].chunk(parts)


def copied(state: Mapping[str, Tensor], copies: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors, with some also under a second name: copies is {prefix of the second name: prefix}."""
    result = dict(state)
    for into, source in copies.items():
        for name, tensor in state.items():
            if name.startswith(f"{source}."):
                result[into + name[len(source) :]] = tensor
    return result


def count_parts(state: Mapping[str, Tensor], prefix: str) -> int:
    """Return the number of numbered parts below a prefix of names: one more than the largest number, else 0.

    Raises IncompleteWeights if there are fewer tensors than that.
    """
    pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    matches = [pattern.match(name) for name in state]
    numbers = [int(match[1]) for match in matches if match]
    found = max(numbers, default=-1) + 1
    if found > len(state):  # a part has a tensor at least; a wrong number could build a detector without end
        raise IncompleteWeights(f"has tensors below {prefix}.{found - 1}, but not below all the smaller numbers")
    return found


def required_count(state: Mapping[str, Tensor], prefix: str) -> int:
    """Return the number of numbered parts below a prefix. Raises IncompleteWeights if there are none."""
    found = count_parts(state, prefix)
    if not found:
        raise IncompleteWeights(f"lacks the tensors below {prefix}.0")
    return found


RESNETS = {  # blocks of each stage, and whether they are bottlenecks
    ((2, 2, 2, 2), False): "resnet18",
    ((3, 4, 6, 3), False): "resnet34",
    ((3, 4, 6, 3), True): "resnet50",
    ((3, 4, 23, 3), True): "resnet101",
    ((3, 8, 36, 3), True): "resnet152",
}


def resnet_name(state: Mapping[str, Tensor], prefix: str) -> str | None:
    """Return timm's name of the ResNet whose tensors `layer1.0.conv1.weight` and so on are below a prefix, or None if
    timm has no such ResNet.

    A ResNeXt is recognised by the groups of its 3 x 3 convolutions.
    """
    blocks = tuple(count_parts(state, f"{prefix}layer{stage}") for stage in (1, 2, 3, 4))
    deep = f"{prefix}layer1.0.conv3.weight" in state
    name = RESNETS.get((blocks, deep))
    if not deep or name is None:
        return name
    width, per_group = required(state, f"{prefix}layer1.0.conv2.weight", 4).shape[:2]
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
    """Return the names of COCO's classes with the ids `first` to `last`; an unused id, such as 12, is called
    `no class 12`.
    """
    names = iter(COCO_80)
    by_id = {i: next(names) for i in range(1, 91) if i not in NOT_IN_COCO}
    return [by_id.get(i, f"no class {i}") for i in range(first, last + 1)]


def class_names_for(rows: int) -> list[str]:
    """Return names for the `rows` classes of a classifier, background not counted.

    The number tells the data set (COCO, Pascal VOC or VG150); for other numbers the names are `class 0`, `class 1`, ...
    """
    by_rows = {
        80: COCO_80,
        90: coco_by_id(1),
        91: coco_by_id(0),
        20: VOC_20,
        150: VG_150,
    }
    numbered = [f"class {i}" for i in range(rows)]
    return list(by_rows.get(rows, numbered))
