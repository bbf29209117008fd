"""Checks that all processes of a run have read the same data: on several machines each reads its own copy."""

import hashlib
import socket
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path, PurePath
from typing import NamedTuple

from toolkit.base.distributed import broadcast_object, gather_objects
from toolkit.base.errors import BadInput
from toolkit.base.masks import to_bytes
from toolkit.base.text import shown
from toolkit.data.table import DetectionTable


class _Image(NamedTuple):
    """Digests of an image that are compared: of boxes with labels and crowd flags, and of all else but pixels."""

    boxes: bytes
    rest: bytes


class _Content(NamedTuple):
    """The facts that are compared of a table.

    names: of classes, predicates and attributes. images: by id, in the order of the table.
    """

    names: Mapping[str, Sequence[str]]
    boxes: int
    images: Mapping[int | str, _Image]


def check_same_on_ranks(tables: Mapping[str, DetectionTable]) -> None:
    """Raise BadInput on every rank if a rank has other classes, images or annotations than rank 0; a collective.

    The folders that the data lie in may differ, and pixels are not compared.

    tables: the same tables on every rank, by their names in the message.
    """
    fingerprints = gather_objects({name: table.fingerprint for name, table in tables.items()})
    problems = []
    for name, table in tables.items():
        if any(of_rank.get(name) != fingerprints[0].get(name) for of_rank in fingerprints):
            problems += _differences(name, table)  # equal data under other paths may have other fingerprints
    if problems:
        raise BadInput(problems)


def _differences(name: str, table: DetectionTable) -> list[str]:
    """Return a sentence for each group of ranks whose table differs in the same way; a collective."""
    own = _content(table)
    of_main = broadcast_object(own)
    of_ranks = gather_objects((socket.gethostname(), _difference(own, of_main, table)))
    machine_of_main, _ = of_ranks[0]
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, found in enumerate(of_ranks):
        ranks_of.setdefault(found, []).append(rank)
    return [
        f"{name}: rank {', '.join(map(str, ranks))} on the machine {machine} has other data than rank 0 on "
        f"{machine_of_main}: {difference}. Give every machine the same annotations; their folders may differ"
        for (machine, difference), ranks in ranks_of.items()
        if difference
    ]


def _content(table: DetectionTable) -> _Content:
    boxes = table.annotations_by_image()
    rest = _rest_of_images(table)
    images = {}
    for (image_id, of_boxes), of_rest in zip(boxes.items(), rest, strict=True):
        images[image_id] = _Image(_digest([of_boxes]), _digest(of_rest))
    names = {
        "class": table.class_names,
        "predicate": list(table.predicates),
        "attribute": list(table.attributes),
    }
    return _Content(names, int(table.num_boxes().sum()), images)


def _rest_of_images(table: DetectionTable) -> Iterable[list[bytes]]:
    """Yield, for each image, all but the boxes and the pixels that a training depends on, without paths."""
    boxes = table.boxes()
    relations = table.relations()
    sizes_hw = table.sizes_hw()
    for index in range(len(table)):
        rows = boxes.of_image(index)
        of_image = slice(*relations.offsets[index : index + 2])
        columns = [sizes_hw[index], boxes.area[rows]]
        columns += [relations.subject[of_image], relations.object[of_image], relations.predicate[of_image]]
        if table.attributes:
            columns.append(boxes.extra["attributes"][rows])
        parts = [column.tobytes() for column in columns]
        if table.has_masks:
            parts.append(to_bytes(table.masks_of(index)))
        if isinstance(table.image_root, Path):  # others name a place in a file instead of a picture
            name = PurePath(table.file_name(index)).name
            parts.append(name.encode(errors="surrogateescape"))
        yield parts


def _digest(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _difference(own: _Content, of_main: _Content, table: DetectionTable) -> str:
    """Describe how the content of a table, `own`, differs from that of rank 0; return "" if it does not."""
    parts = []
    for kind, names in own.names.items():
        parts += _other_names(kind, names, of_main.names[kind])
    counts = {
        "images": (len(own.images), len(of_main.images)),
        "boxes": (own.boxes, of_main.boxes),
    }
    parts += [f"{count:,} {what}, not {right:,}" for what, (count, right) in counts.items() if count != right]
    if not parts and list(own.images) != list(of_main.images):
        parts.append("images with other ids or in another order")
    common = [(index, image_id) for index, image_id in enumerate(own.images) if image_id in of_main.images]
    kinds = {"boxes": "boxes or labels", "rest": "file names, sizes, areas, masks, attributes or relations"}
    for field, what in kinds.items():
        changed = [
            index
            for index, image_id in common
            if getattr(own.images[image_id], field) != getattr(of_main.images[image_id], field)
        ]
        if changed:
            first = shown(table.image_name(changed[0]))
            parts.append(f"other {what} in {len(changed):,} of the images, such as {first}")
    return "; ".join(parts)


def _other_names(kind: str, names: Sequence[str], of_main: Sequence[str]) -> list[str]:
    """Describe the first name in which two lists of names differ."""
    for number, (name, right) in enumerate(zip_longest(names, of_main)):
        if name is None:
            return [f"{kind} {number}, {shown(right)}, is missing"]
        if right is None:
            return [f"{kind} {number}, {shown(name)}, is one more"]
        if name != right:
            return [f"{kind} {number} is {shown(name)}, not {shown(right)}"]
    return []
