"""Boxes in another format than COCO's are noticed by all of them together, and the sentence says how to mend them."""

import json
from typing import NamedTuple

import numpy as np
import pytest
from documents import BCCD, DIRTY, box, checked, columns_of, document, image
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.base.errors import BadInput
from toolkit.data.checks import MIN_EVIDENCE_BOXES, format_fault
from toolkit.tools.shapes import make_shapes


class Format(NamedTuple):
    """A format: whether its numbers are corners, or centre and size, and fractions; and what the sentence advises."""

    is_corners: bool
    is_centre: bool
    is_fractions: bool
    advice: str


FORMATS = {
    "xyxy": Format(True, False, False, "[x1, y1, x2 - x1, y2 - y1]"),
    "cxcywh": Format(False, True, False, "[cx - width / 2, cy - height / 2, width, height]"),
    "fractions xywh": Format(False, False, True, "[x * W, y * H, width * W, height * H]"),
    "fractions xyxy": Format(True, False, True, "[x1 * W, y1 * H, (x2 - x1) * W, (y2 - y1) * H]"),
    "fractions cxcywh": Format(
        False,
        True,
        True,
        "[(cx - width / 2) * W, (cy - height / 2) * H, width * W, height * H]",
    ),
}


def document_of(boxes: np.ndarray, sizes: np.ndarray) -> dict:
    """One box an image."""
    images = []
    annotations = []
    for number, (bbox, (width, height)) in enumerate(zip(boxes.tolist(), sizes.tolist(), strict=True)):
        images.append(image(id=number, width=width, height=height))
        annotations.append(box(id=number, image_id=number, bbox=bbox))
    return document(images=images, annotations=annotations)


def in_format(format: Format, boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return boxes xywh as a program of another format writes them."""
    corner = boxes[:, :2]
    size = boxes[:, 2:]
    first = corner + size / 2 if format.is_centre else corner
    second = corner + size if format.is_corners else size
    scale = np.tile(sizes, 2) if format.is_fractions else 1
    return np.concatenate([first, second], axis=1) / scale


def mended(advice: str, boxes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return what a user computes who follows the advice of the sentence."""
    names = {"W": sizes[:, 0], "H": sizes[:, 1]}
    for at, spellings in enumerate(("x x1 cx", "y y1 cy", "width x2", "height y2")):
        names |= dict.fromkeys(spellings.split(), boxes[:, at])
    return np.stack(eval(advice, {}, names), axis=1)  # noqa: S307 - one of the formulas above


def verdict(content: dict) -> str | None:
    columns = columns_of(content)
    return format_fault(columns, {row.image_id: row for row in columns.images})


def random_boxes(seed: int, count: int, smallest: float, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """Boxes xywh with sides of `smallest` to `largest` shares of their image, anywhere in it, and sizes of images."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(64, 1200, (count, 2))
    sides = rng.uniform(smallest, largest, (count, 2)) * sizes
    corners = rng.uniform(0, 1, (count, 2)) * (sizes - sides)
    return np.round(np.concatenate([corners, sides], 1), 2), sizes


seeds = st.integers(0, 2**32)
side = st.integers(1, 3000)
share = st.floats(0, 1)


@settings(max_examples=150)
@given(st.lists(st.tuples(side, side, share, share, share, share, st.booleans()), max_size=60))
def test_boxes_inside_their_images_are_never_refused(entries):
    """Whatever boxes: tiny ones, all in one corner, whole images, rounded to whole pixels (or up, half a pixel out)."""
    boxes = []
    for width, height, a, b, c, d, is_whole in entries:
        bbox = [a * width, b * height, c * (1 - a) * width, d * (1 - b) * height]
        boxes.append([float(round(value)) for value in bbox] if is_whole else bbox)
    boxes = np.array(boxes).reshape(-1, 4)
    sizes = np.array([entry[:2] for entry in entries]).reshape(-1, 2)
    assert verdict(document_of(boxes, sizes)) is None or boxes.max() <= 1.01


@settings(max_examples=40)
@given(
    seeds,
    st.integers(400, 800),
    st.floats(0.08, 0.2),
    st.floats(0, 0.5),
    st.sampled_from(sorted(FORMATS)),
)
def test_every_other_format_is_recognised_and_mended_by_the_advice(seed, count, smallest, spread, format):
    boxes, sizes = random_boxes(seed, count, smallest, smallest + spread)
    assert verdict(document_of(boxes, sizes)) is None
    wrong = in_format(FORMATS[format], boxes, sizes)
    said = verdict(document_of(wrong, sizes))
    advice = FORMATS[format].advice
    assert f"write every bbox as {advice}" in said
    right = mended(advice, wrong, sizes)
    assert verdict(document_of(right, sizes)) is None
    assert right == pytest.approx(boxes, abs=1e-6)


@settings(max_examples=40)
@given(
    seed=seeds,
    count=st.integers(20, 400),
    dirt=st.floats(0, 1),
    reach=st.floats(0, 0.9),
)
def test_objects_that_leave_their_image_are_no_evidence(seed, count, dirt, reach):
    """Amodal or careless boxes: a share of them is moved over an edge."""
    boxes, sizes = random_boxes(seed, count, 0.05, 0.6)
    rng = np.random.default_rng(seed)
    for bbox, size in zip(boxes, sizes, strict=True):
        if rng.random() < dirt:
            axis = int(rng.integers(2))
            extent = bbox[2 + axis]
            is_before = rng.integers(2)
            bbox[axis] = -reach * extent if is_before else size[axis] - (1 - reach) * extent
    assert verdict(document_of(boxes, sizes)) is None


@settings(max_examples=30)
@given(seeds, st.integers(1, MIN_EVIDENCE_BOXES - 1), st.sampled_from(sorted(FORMATS)))
def test_a_few_boxes_are_no_evidence(seed, count, format):
    boxes, sizes = random_boxes(seed, count, 0.1, 0.6)
    assert verdict(document_of(in_format(FORMATS[format], boxes, sizes), sizes)) is None


@pytest.mark.parametrize("format", FORMATS)
def test_slips_crowds_and_broken_records_do_not_hide_it(format):
    boxes, sizes = random_boxes(0, 300, 0.05, 0.6)
    content = document_of(in_format(FORMATS[format], boxes, sizes), sizes)
    entries = content["annotations"]
    whole = entries[0] | {"bbox": [0, 0, 64, 64], "iscrowd": 1}
    broken = [
        None,
        "x",
        [1],
        [1, 2, 3, "4"],
        [10**400, 1, 1, 1],
        [float("nan"), 1, 1, 1],
        [[1], 2, 3, 4],
        True,
    ]
    entries += [whole] * 30
    entries += [entries[0] | {"bbox": bbox} for bbox in broken]
    entries += ["nothing", {}, {"image_id": []}]
    assert verdict(content) is not None
    slips = {"xyxy": [1, 1, 1, 1], "cxcywh": [1, 1, 20, 20]}.get(format, [2, 2, 2, 2])
    entries[:2] = [entry | {"bbox": slips} for entry in entries[:2]]
    assert verdict(content) is not None


def real_files(folder):
    make_shapes(folder, train_images=40, val_images=1, image_size=64)
    files = [folder / "annotations" / "train.json"]
    return files + sorted((BCCD / "annotations").glob("*.json")) if BCCD.is_dir() else files


def test_real_files_are_accepted_and_refused_in_other_formats(tmp_path):
    checked(json.loads((DIRTY / "annotations" / "instances.json").read_text()))
    for file in real_files(tmp_path / "d"):
        content = json.loads(file.read_text())
        checked(content, str(file))
        size_of = {entry["id"]: (entry["width"], entry["height"]) for entry in content["images"]}
        entries = content["annotations"]
        sizes = np.array([size_of[entry["image_id"]] for entry in entries])
        boxes = np.array([entry["bbox"] for entry in entries])
        for format in FORMATS.values():
            wrong = in_format(format, boxes, sizes).tolist()
            changed = [entry | {"bbox": bbox} for entry, bbox in zip(entries, wrong, strict=True)]
            with pytest.raises(BadInput, match="write every bbox as") as caught:
                checked(content | {"annotations": changed}, str(file))
            assert len(caught.value.problems) == 1
            assert str(file) in str(caught.value)
