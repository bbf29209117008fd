"""Images with their targets, what must hold for each transform of them, and small tables, for the tests of data."""

import numpy as np
import torch
from hypothesis import strategies as st

from toolkit.data.formats import open_dataset
from toolkit.tools.shapes import make_shapes


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def target_of(boxes, size_hw, relations=(), crowd=()):
    """Labels number the boxes, so that a test can tell which of them are left; the other columns follow the labels."""
    boxes, count = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), len(boxes)
    return {
        "image_id": 7,
        "boxes": boxes,
        "labels": torch.arange(count),
        "area": (boxes[:, 2:] - boxes[:, :2]).prod(1),
        "iscrowd": torch.tensor([int(i in crowd) for i in range(count)], dtype=torch.int64),
        "relations": torch.tensor(relations, dtype=torch.int64).reshape(-1, 3),
        "attributes": torch.arange(count)[:, None] + torch.tensor([[1, 0]]),
        "mixup": torch.arange(count) / 10,
        "orig_size": torch.tensor(size_hw),
        "size": torch.tensor(size_hw),
    }


def sample(boxes, size_hw=(60, 80), relations=(), crowd=()):
    """Noise with boxes."""
    image = torch.randint(0, 256, (*size_hw, 3), dtype=torch.uint8, generator=generator(len(boxes))).permute(2, 0, 1)
    return image, target_of(boxes, size_hw, relations, crowd)


def painted(boxes, size_hw=(60, 80), ground=0, **columns):
    """An even image whose boxes are white."""
    image = torch.full((*size_hw, 3), ground, dtype=torch.uint8).permute(2, 0, 1)
    for x0, y0, x1, y1 in boxes:
        image[:, int(y0) : int(y1), int(x0) : int(x1)] = 255
    return image, target_of(boxes, size_hw, **columns)


@st.composite
def samples(draw, max_boxes=8):
    """Boxes of at least a quarter pixel inside their image, some of them crowds, and relations between them."""
    height, width = draw(st.integers(8, 90)), draw(st.integers(8, 90))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(0, max_boxes))
    ends = np.sort(rng.integers(0, (4 * width, 4 * height), (count, 2, 2)), axis=1) / 4
    ends[:, 1] += 0.25
    relations = rng.integers(0, count, (count, 3)).tolist() if count else ()
    return sample(ends.reshape(-1, 4).tolist(), (height, width), relations, draw(st.sets(st.integers(0, 7))))


def assert_well_formed(image, target, before):
    """What must hold for any transform's result: each column went with its box."""
    (height, width), labels = image.shape[-2:], target["labels"].tolist()
    assert image.dtype == torch.uint8 and target["boxes"].dtype == target["area"].dtype == torch.float32
    assert target["size"].tolist() == [height, width] and target["orig_size"].equal(before["orig_size"])
    assert (target["boxes"][:, 2:] > target["boxes"][:, :2]).all() and (target["boxes"] >= 0).all()
    assert (target["boxes"] <= torch.tensor([width, height] * 2)).all() and target["image_id"] == 7
    assert labels == sorted(set(labels)) and {len(target[name]) for name in ("boxes", "area")} == {len(labels)}
    for name in ("iscrowd", "attributes", "mixup"):
        assert target[name].equal(before[name][target["labels"]]), name
    named = [(labels[s], labels[o], p) for s, o, p in target["relations"].tolist()]
    assert named == [(s, o, p) for s, o, p in before["relations"].tolist() if s in labels and o in labels]


def assert_same(one, other):
    """Equal to the bit, images and all of the targets."""
    assert one[0].equal(other[0]) and one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        assert value.equal(other[1][name]) if isinstance(value, torch.Tensor) else value == other[1][name], name


def shapes_table(folder, images, size=64):
    """The training data of so many shapes; `folder / "d"` has them as COCO."""
    make_shapes(folder / "d", images, 1, size)
    return open_dataset("train", path=folder / "d", cache_dir=folder / "cache")
