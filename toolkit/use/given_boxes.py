"""Boxes given to a scene-graph model from a COCO file, for the modes predcls and sgcls."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from toolkit.data.formats.coco import read_annotations
from toolkit.errors import BadInput
from toolkit.use.outputs import image_ids_of


def given_boxes(file: Path, names: Mapping[Path, Path], class_names: Sequence[str]) -> dict[Path, dict[str, Tensor]]:
    """`boxes (N, 4)` float32 xyxy in pixels and `labels (N,)` int64 from 0 of each image; N = 0 is ordinary.

    Args:
        file: COCO annotations, whose images are found by the end of their paths; crowd regions are left out.
        names: the image files, each with its name below the folder that was given.
        class_names: of the model, in the order of the labels; categories are theirs by name.

    Raises:
        BadInput: no COCO file, images that it does not have, boxes without width or height, categories that the model
            does not know; all of them.
    """
    image_ids = dict(zip(image_ids_of(file, list(names.values())), names, strict=True))
    annotations = read_annotations(Path(file))
    labels = {name: label for label, name in enumerate(class_names)}
    known = {each.get("id"): labels.get(each.get("name")) for each in annotations.categories if isinstance(each, dict)}
    rows: dict[Path, list] = {path: [] for path in names}
    problems = []
    for number, each in enumerate(map(annotations.entry, range(len(annotations)))):
        if each.get("image_id") not in image_ids or each.get("iscrowd"):
            continue
        label, box = known.get(each.get("category_id")), each.get("bbox")
        where = f"{file}, annotation {each.get('id', number)}"
        if label is None:
            problems.append(f"{where}: category {each.get('category_id')} is none of the model's, {class_names[:10]}")
        if not _is_box(box):
            problems.append(f"{where}: bbox {box}; expected [x, y, width, height] in pixels, both sides above 0")
        else:
            x, y, width, height = box
            rows[image_ids[each["image_id"]]].append(([x, y, x + width, y + height], label))
    if problems:
        raise BadInput(problems)
    return {path: _tensors(found) for path, found in rows.items()}


def _is_box(box: object) -> bool:
    numbers = isinstance(box, list) and len(box) == 4 and all(isinstance(value, int | float) for value in box)
    return numbers and all(map(math.isfinite, box)) and box[2] > 0 and box[3] > 0


def _tensors(rows: list) -> dict[str, Tensor]:
    boxes = torch.tensor([box for box, _ in rows], dtype=torch.float32).reshape(-1, 4)
    return {"boxes": boxes, "labels": torch.tensor([label for _, label in rows], dtype=torch.int64)}
