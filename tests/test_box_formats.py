"""COCO files: JSON read item by item, and boxes in another format than COCO's."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from documents import BCCD, DIRTY, box, checked, columns_of, document, image, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.base.errors import BadInput
from toolkit.data.checks import MIN_EVIDENCE_BOXES, format_fault
from toolkit.data.formats.json_stream import Whole, stream_lists
from toolkit.tools.shapes import make_shapes

CONVERTED = {
    "xyxy": lambda x, y, w, h, W, H: [x, y, x + w, y + h],
    "cxcywh": lambda x, y, w, h, W, H: [x + w / 2, y + h / 2, w, h],
    "fractions xywh": lambda x, y, w, h, W, H: [x / W, y / H, w / W, h / H],
    "fractions xyxy": lambda x, y, w, h, W, H: [x / W, y / H, (x + w) / W, (y + h) / H],
    "fractions cxcywh": lambda x, y, w, h, W, H: [(x + w / 2) / W, (y + h / 2) / H, w / W, h / H],
}
# what the sentence tells people to write, as they would compute it
MENDED = {
    "[x1, y1, x2 - x1, y2 - y1]": ("xyxy", lambda a, b, c, d, W, H: [a, b, c - a, d - b]),
    "[cx - width / 2, cy - height / 2, width, height]": (
        "cxcywh", lambda a, b, c, d, W, H: [a - c / 2, b - d / 2, c, d]),
    "[x * W, y * H, width * W, height * H]": (
        "fractions xywh", lambda a, b, c, d, W, H: [a * W, b * H, c * W, d * H]),
    "[x1 * W, y1 * H, (x2 - x1) * W, (y2 - y1) * H]": (
        "fractions xyxy", lambda a, b, c, d, W, H: [a * W, b * H, (c - a) * W, (d - b) * H]),
    "[(cx - width / 2) * W, (cy - height / 2) * H, width * W, height * H]": (
        "fractions cxcywh", lambda a, b, c, d, W, H: [(a - c / 2) * W, (b - d / 2) * H, c * W, d * H]),
}  # fmt: skip


def document_of(boxes, sizes):
    """One box an image."""
    images = [image(id=i, width=width, height=height) for i, (width, height) in enumerate(sizes)]
    return document(images=images, annotations=[box(id=i, image_id=i, bbox=bbox) for i, bbox in enumerate(boxes)])


def convert(content, change):
    sizes = {image["id"]: (image["width"], image["height"]) for image in content["images"]}
    changed = [a | {"bbox": change(*a["bbox"], *sizes[a["image_id"]])} for a in content["annotations"]]
    return content | {"annotations": changed}


def verdict(content):
    columns = columns_of(content)
    return format_fault(columns, {image.image_id: image for image in columns.images})


def random_document(seed, count, smallest, largest):
    """Boxes with sides of `smallest` to `largest` shares of the image, anywhere in it."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(64, 1200, (count, 2))
    sides = rng.uniform(smallest, largest, (count, 2)) * sizes
    corners = rng.uniform(0, 1, (count, 2)) * (sizes - sides)
    return document_of(np.round(np.concatenate([corners, sides], 1), 2).tolist(), sizes.tolist())


side = st.integers(1, 3000)
share = st.floats(0, 1)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(side, side, share, share, share, share, st.booleans()), max_size=60))
def test_boxes_inside_their_images_are_never_refused(entries):
    """Whatever boxes: tiny ones, all in one corner, whole images, rounded to whole pixels (or up, half a pixel out)."""
    boxes, sizes = [], []
    for width, height, a, b, c, d, whole in entries:
        box = [a * width, b * height, c * (1 - a) * width, d * (1 - b) * height]
        boxes.append([float(round(value)) for value in box] if whole else box)
        sizes.append((width, height))
    assert verdict(document_of(boxes, sizes)) is None or np.abs(boxes).max() <= 1.01


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(400, 800), smallest=st.floats(0.08, 0.2), spread=st.floats(0, 0.5),
       format=st.sampled_from(sorted(CONVERTED)))  # fmt: skip
def test_every_other_format_is_recognised_and_mended_by_what_the_sentence_says(seed, count, smallest, spread, format):
    right = random_document(seed, count, smallest, smallest + spread)
    assert verdict(right) is None
    wrong = convert(right, CONVERTED[format])
    said = verdict(wrong)
    assert said is not None
    called, formula = MENDED[said.partition("write every bbox as ")[2].partition("]")[0] + "]"]
    assert called == format
    mended = convert(wrong, formula)
    assert verdict(mended) is None
    for before, after in zip(right["annotations"], mended["annotations"], strict=True):
        assert after["bbox"] == pytest.approx(before["bbox"], abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(20, 400), dirt=st.floats(0, 1), reach=st.floats(0, 0.9))
def test_objects_that_leave_their_image_on_any_side_are_no_evidence(seed, count, dirt, reach):
    """Amodal or careless boxes: a share of them is moved over an edge."""
    content = random_document(seed, count, 0.05, 0.6)
    rng = np.random.default_rng(seed)
    for entry, picture in zip(content["annotations"], content["images"], strict=True):
        if rng.random() < dirt:
            axis = int(rng.integers(2))
            extent = entry["bbox"][2 + axis]
            places = [-reach * extent, picture[("width", "height")[axis]] - (1 - reach) * extent]
            entry["bbox"][axis] = places[int(rng.integers(2))]
    assert verdict(content) is None


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32), count=st.integers(1, MIN_EVIDENCE_BOXES - 1), format=st.sampled_from(sorted(CONVERTED))
)
def test_a_few_boxes_are_no_evidence(seed, count, format):
    assert verdict(convert(random_document(seed, count, 0.1, 0.6), CONVERTED[format])) is None


@pytest.mark.parametrize("format", CONVERTED)
def test_slips_crowds_and_broken_records_do_not_hide_it(format):
    content = convert(random_document(0, 300, 0.05, 0.6), CONVERTED[format])
    entries = content["annotations"]
    whole = entries[0] | {"bbox": [0, 0, 64, 64], "iscrowd": 1}
    broken = [None, "x", [1], [1, 2, 3, "4"], [10**400, 1, 1, 1], [float("nan"), 1, 1, 1], [[1], 2, 3, 4], True]
    entries += [whole] * 30 + [entries[0] | {"bbox": bbox} for bbox in broken] + ["nothing", {}, {"image_id": []}]
    assert verdict(content) is not None
    slips = {"xyxy": [1, 1, 1, 1], "cxcywh": [1, 1, 20, 20]}.get(format, [2, 2, 2, 2])
    entries[:2] = [entry | {"bbox": slips} for entry in entries[:2]]
    assert verdict(content) is not None


def test_real_files_and_the_same_in_other_formats(tmp_path):
    make_shapes(tmp_path / "d", train_images=40, val_images=1, image_size=64)
    checked(json.loads((DIRTY / "annotations" / "instances.json").read_text()))
    bccd = sorted((BCCD / "annotations").glob("*.json")) if BCCD.is_dir() else []
    for file in (tmp_path / "d" / "annotations" / "train.json", *bccd):
        content = json.loads(file.read_text())
        checked(content, str(file))
        for change in CONVERTED.values():
            with pytest.raises(BadInput, match="write every bbox as") as caught:
                checked(convert(content, change), str(file))
            assert len(caught.value.problems) == 1 and str(file) in str(caught.value)


patient = settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@patient
@given(
    content=st.dictionaries(st.text(), JSON, max_size=5),
    window=st.integers(1, 40),
    indent=st.none() | st.integers(0, 2),
)
def test_items_are_those_of_the_whole(tmp_path_factory, content, window, indent):
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=False), encoding="utf-8", errors="surrogatepass")
    found = {}
    for key, item in stream_lists(path, window):
        if isinstance(item, Whole):
            found[key] = item.value
        else:
            found.setdefault(key, []).append(item)
    assert repr(found) == repr(content)


@patient
@given(cut=st.integers(1, 60), window=st.integers(1, 30))
def test_a_cut_file_is_an_error_with_its_place(tmp_path_factory, cut, window):
    path = tmp_path_factory.mktemp("cut") / "a.json"
    text = '{"images": [{"id": 1},\n {"id": 23}],\n "x": 4, "annotations": []}'
    path.write_text(text[: min(cut, len(text) - 1)])
    with pytest.raises(BadInput, match=r"a\.json: invalid JSON at line \d+, column \d+"):
        list(stream_lists(path, window))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads peak memory from Linux's /proc")
def test_memory_is_that_of_columns(tmp_path):
    """Peak memory of reading 160,000 boxes beside that of 16,000: columns, and no Python object for a box."""
    script = (
        "import sys\n"
        "from toolkit.data.formats import open_dataset\n"
        "open_dataset(sys.argv[1], image_dir='.', check_images=False, cache_dir=sys.argv[2])\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    peaks = []
    for count in (2000, 20_000):
        images = [image(id=n, file_name=f"{n:012d}.jpg", width=640, height=480) for n in range(count)]
        boxes = [box(id=n, image_id=n % count, bbox=[n % 300, 3, 40, 50]) for n in range(8 * count)]
        file = write(tmp_path, document(images=images, annotations=boxes))
        done = subprocess.run([sys.executable, "-c", script, file, tmp_path / "cache"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout) * 1024)
    assert peaks[1] - peaks[0] < 144_000 * 300, peaks  # as Python objects the larger file takes 150 MB
