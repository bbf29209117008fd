"""Images with their targets, what must hold for each transform of them, and small tables, for the tests of data."""

import numpy as np
import torch
from hypothesis import strategies as st
from PIL import Image

from toolkit.data.formats import open_dataset
from toolkit.data.table_cache import write_rows
from toolkit.tools.shapes import make_shapes


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def target_of(boxes, size_hw, relations=(), crowd=()):
    """Labels number the boxes, so that a test can tell which of them are left; the other columns follow the labels."""
    boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    labels = torch.arange(len(boxes))
    return {
        "image_id": 7,
        "boxes": boxes,
        "labels": labels,
        "area": (boxes[:, 2:] - boxes[:, :2]).prod(1),
        "iscrowd": torch.tensor([int(label in crowd) for label in labels.tolist()], dtype=torch.int64),
        "relations": torch.tensor(relations, dtype=torch.int64).reshape(-1, 3),
        "attributes": labels[:, None] + torch.tensor([[1, 0]]),
        "mixup": labels / 10,
        "orig_size": torch.tensor(size_hw),
        "size": torch.tensor(size_hw),
    }


def noise(height, width, seed=0):
    """(H, W, 3) uint8"""
    return np.random.default_rng(seed).integers(
        0,
        256,
        (height, width, 3),
        np.uint8,
    )


def sample(boxes, size_hw=(60, 80), relations=(), crowd=()):
    """Noise with boxes."""
    image = torch.randint(
        0,
        256,
        (*size_hw, 3),
        dtype=torch.uint8,
        generator=generator(len(boxes)),
    ).permute(2, 0, 1)
    return image, target_of(boxes, size_hw, relations, crowd)


def painted(boxes, size_hw=(60, 80), ground=0, **columns):
    """An even image whose boxes are white."""
    image = torch.full(
        (*size_hw, 3),
        ground,
        dtype=torch.uint8,
    ).permute(2, 0, 1)
    for x0, y0, x1, y1 in boxes:
        image[:, int(y0) : int(y1), int(x0) : int(x1)] = 255
    return image, target_of(boxes, size_hw, **columns)


@st.composite
def samples(draw, max_boxes=8):
    """Boxes of at least a quarter pixel inside their image, some of them crowds, and relations between them."""
    height = draw(st.integers(8, 90))
    width = draw(st.integers(8, 90))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(0, max_boxes))
    ends = np.sort(rng.integers(0, (4 * width, 4 * height), (count, 2, 2)), axis=1) / 4
    ends[:, 1] += 0.25
    relations = rng.integers(0, count, (count, 3)).tolist() if count else ()
    crowd = draw(st.sets(st.integers(0, 7)))
    return sample(
        ends.reshape(-1, 4).tolist(),
        (height, width),
        relations,
        crowd,
    )


def tensors_of(target):
    """Copies of the tensors of a target."""
    return {name: value.clone() for name, value in target.items() if isinstance(value, torch.Tensor)}


def assert_well_formed(image, target, before):
    """What must hold for any transform's result: each column went with its box."""
    height, width = image.shape[-2:]
    labels = target["labels"].tolist()
    boxes = target["boxes"]
    assert image.dtype == torch.uint8
    assert boxes.dtype == target["area"].dtype == torch.float32
    assert target["size"].tolist() == [height, width]
    assert target["orig_size"].equal(before["orig_size"])
    assert target["image_id"] == 7
    assert (boxes[:, 2:] > boxes[:, :2]).all()
    assert (boxes >= 0).all()
    assert (boxes <= torch.tensor([width, height] * 2)).all()
    assert labels == sorted(set(labels))
    assert len(boxes) == len(target["area"]) == len(labels)
    for name in ("iscrowd", "attributes", "mixup"):
        assert target[name].equal(before[name][target["labels"]]), name
    named = [
        (
            labels[s],
            labels[o],
            p,
        )
        for s, o, p in target["relations"].tolist()
    ]
    assert named == [(s, o, p) for s, o, p in before["relations"].tolist() if s in labels and o in labels]


def assert_same(one, other):
    """Equal to the bit, images and all of the targets."""
    assert one[0].equal(other[0])
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        expected = other[1][name]
        assert value.equal(expected) if isinstance(value, torch.Tensor) else value == expected, name


def noise_table(folder, rows, saving=None, **options):
    """A table of these rows, with pictures of noise as large as the rows say. saving: options of Pillow."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(rows):
        picture = Image.fromarray(noise(row["height"], row["width"], number))
        picture.save(folder / row["file_name"], **(saving or {}))
    return write_rows(rows, cache_file=folder / "table.json", image_root=folder, **options)


def shapes_table(folder, images, size=64):
    """The training data of so many shapes; `folder / "d"` has them as COCO."""
    make_shapes(folder / "d", images, 1, size)
    return open_dataset("train", path=folder / "d", cache_dir=folder / "cache")
