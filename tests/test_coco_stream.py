"""Large COCO files item by item: the same tables and the same problems as in one piece.

Run with `pytest tests/test_coco_stream.py -n 0`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_box_formats import CONVERTED, convert

from toolkit.data.formats import coco, coco_stream
from toolkit.data.formats.coco import read_coco
from toolkit.data.formats.json_stream import Whole, stream_lists
from toolkit.data.shapes import make_shapes
from toolkit.errors import BadInput

DIRTY = Path(__file__).parent / "data" / "dirty"
patient = settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))


def both(monkeypatch, tmp_path, file, images, chunk, **options):
    """The table read in one piece, and by chunks of so many images."""
    options = {"on_error": "drop", "check_images": False, **options}
    whole = read_coco(file, images, cache_dir=tmp_path / "whole", **options)
    monkeypatch.setattr(coco, "STREAMED_BYTES", 0)
    monkeypatch.setattr(coco_stream, "CHUNK", chunk)
    streamed = read_coco(file, images, cache_dir=tmp_path / f"streamed{chunk}", **options)
    monkeypatch.undo()
    return whole, streamed


def assert_same(whole, streamed):
    assert streamed.fingerprint == whole.fingerprint and streamed.categories == whole.categories
    assert sorted(map(str, streamed.problems)) == sorted(map(str, whole.problems))
    assert streamed.image_root == whole.image_root and streamed.predicates == whole.predicates


@pytest.mark.parametrize("chunk", [1, 2, 7, 4096])
@pytest.mark.parametrize("check", [True, "header", False])
def test_every_defect_is_found_and_the_rows_stay(tmp_path, monkeypatch, chunk, check):
    file = DIRTY / "annotations" / "instances.json"
    assert_same(*both(monkeypatch, tmp_path, file, DIRTY / "images", chunk, check_images=check))


@pytest.mark.parametrize("change", CONVERTED)
def test_boxes_are_judged_over_the_whole_file(tmp_path, monkeypatch, change):
    """Of 40 images of four boxes each: a chunk of two has too few to tell, and one of eight may mislead.

    The boxes of the first eight images lie where another format shows; the others could be in no other one.
    """
    document = {"images": [{"id": i, "file_name": f"{i}.jpg", "width": 200, "height": 200} for i in range(40)],
                "categories": [{"id": 1, "name": "a"}],
                "annotations": [{"id": i, "image_id": i // 4, "category_id": 1,
                                 "bbox": [110 + i % 7, 120, 60, 61] if i < 32 else [130 + i % 7, 2, 20, 61]}
                                for i in range(160)]}  # fmt: skip
    wrong = convert(document, CONVERTED[change])
    mixed = {**document, "annotations": wrong["annotations"][:32] + document["annotations"][32:]}
    for name, content in (("wrong", wrong), ("mixed", mixed)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    with pytest.raises(BadInput) as whole:
        read_coco(tmp_path / "wrong.json", tmp_path, cache_dir=tmp_path, check_images=False)
    for chunk in (2, 8):
        monkeypatch.setattr(coco, "STREAMED_BYTES", 0)
        monkeypatch.setattr(coco_stream, "CHUNK", chunk)
        with pytest.raises(BadInput, match="write every bbox as") as streamed:
            read_coco(tmp_path / "wrong.json", tmp_path, cache_dir=tmp_path, check_images=False)
        assert str(streamed.value) == str(whole.value)
        monkeypatch.undo()
        assert_same(*both(monkeypatch, tmp_path, tmp_path / "mixed.json", tmp_path, chunk))


def test_the_limit_of_image_sizes_holds_for_large_files_too(tmp_path, monkeypatch):
    make_shapes(tmp_path / "shapes", 5, 2, 64)
    file = tmp_path / "shapes" / "annotations" / "train.json"
    monkeypatch.setattr(coco, "STREAMED_BYTES", 0)
    with pytest.raises(BadInput, match="5 errors") as caught:
        read_coco(file, cache_dir=tmp_path, max_image_pixels=1000)
    assert "data.max_image_pixels 1000" in str(caught.value)
    document = json.loads(file.read_text())
    document["images"][0] |= {"width": 20_000, "height": 20_000}  # said, and not looked at
    file.write_text(json.dumps(document))
    with pytest.raises(BadInput, match="1 errors.*\n.*20000 x 20000 pixels are more than data.max_image_pixels"):
        read_coco(file, cache_dir=tmp_path, check_images=False)


@pytest.mark.parametrize("chunk", [1, 5])
def test_relations_and_attributes(tmp_path, monkeypatch, chunk):
    make_shapes(tmp_path / "shapes", 17, 2, 64)
    file = tmp_path / "shapes" / "annotations" / "train.json"
    whole, streamed = both(monkeypatch, tmp_path, file, tmp_path / "shapes" / "train", chunk)
    assert_same(whole, streamed)
    document = json.loads(file.read_text())
    one, two = document["rel_annotations"][0], document["rel_annotations"][-1]
    one["subject_id"], two["object_id"] = two["subject_id"], 10**9  # across images; to nowhere
    document["rel_annotations"] += [3, {"id": 7}, {**two, "subject_id": "x"}]
    document["relations"] = [[1, 2, 1], [10**8, 1, 1], 5]
    file.write_text(json.dumps(document))
    whole, streamed = both(monkeypatch, tmp_path / "again", file, tmp_path / "shapes" / "train", chunk)
    assert_same(whole, streamed)
    assert any("in image" in str(problem) for problem in whole.problems)


ID = st.one_of(st.integers(1, 6), st.just("a"), st.none(), st.just(2**70), st.just(True))
NUMBER = st.one_of(st.integers(-3, 40), st.just(float("nan")), st.none())
IMAGE = st.fixed_dictionaries(
    {"id": st.integers(1, 6), "file_name": st.sampled_from(["a.jpg", "b.jpg", "b/../c.jpg", "", 7])},
    optional={"width": st.just(30), "height": st.just(30)},
)
ANNOTATION = st.fixed_dictionaries(
    {"id": ID, "image_id": ID, "category_id": st.integers(1, 3), "bbox": st.lists(NUMBER, min_size=3, max_size=5)}
)


@patient
@given(
    images=st.lists(IMAGE | st.just(3), min_size=1, max_size=7),
    chunk=st.integers(1, 4),
    annotations=st.lists(ANNOTATION | st.just([]), max_size=12),
)
def test_any_defects(tmp_path_factory, images, annotations, chunk):
    folder = tmp_path_factory.mktemp("any")
    document = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": 1, "name": "x"}, {"id": 2, "name": "x"}],
    }
    (folder / "a.json").write_text(json.dumps(document))
    with pytest.MonkeyPatch.context() as patch:
        try:
            whole = read_coco(folder / "a.json", folder, cache_dir=folder / "w", check_images=False, on_error="drop")
        except BadInput as error:
            whole = error
        patch.setattr(coco, "STREAMED_BYTES", 0)
        patch.setattr(coco_stream, "CHUNK", chunk)
        try:
            streamed = read_coco(folder / "a.json", folder, cache_dir=folder / "s", check_images=False, on_error="drop")
        except BadInput as error:
            streamed = error
    if isinstance(whole, BadInput):
        assert isinstance(streamed, BadInput) and sorted(streamed.problems) == sorted(whole.problems)
    else:
        assert_same(whole, streamed)


@pytest.mark.parametrize("name", sorted(path.name for path in (DIRTY / "broken").glob("*.json")))
def test_broken_files_end_in_one_sentence(tmp_path, monkeypatch, name):
    monkeypatch.setattr(coco, "STREAMED_BYTES", 0)
    if name == "utf8_bom.json":
        assert len(read_coco(DIRTY / "broken" / name, DIRTY / "images", cache_dir=tmp_path)) == 1
        return
    with pytest.raises(BadInput, match=name):
        read_coco(DIRTY / "broken" / name, DIRTY / "images", cache_dir=tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@patient
@given(
    document=st.dictionaries(st.text(), JSON, max_size=5),
    window=st.integers(1, 40),
    indent=st.none() | st.integers(0, 2),
)
def test_items_are_those_of_the_whole(tmp_path_factory, document, window, indent):
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_text(json.dumps(document, indent=indent, ensure_ascii=False), encoding="utf-8", errors="surrogatepass")
    found = {}
    for key, item in stream_lists(path, window):
        if isinstance(item, Whole):
            found[key] = item.value
        else:
            found.setdefault(key, []).append(item)
    assert repr(found) == repr(document)


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
def test_memory_does_not_grow_with_the_file(tmp_path):
    """Peak memory of reading 2,000 and 20,000 images is nearly the same, though one file has 2 and the other 20 MB."""
    script = (
        "import sys\n"
        "from toolkit.data.formats import coco, coco_stream\n"
        "coco.STREAMED_BYTES, coco_stream.CHUNK, coco_stream.CACHE_KIB = 0, 500, 2000\n"
        "import toolkit.data.table as table; table.BATCH_ROWS = 500\n"
        "coco.read_coco(sys.argv[1], '.', check_images=False, cache_dir=sys.argv[2])\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    peaks = []
    for count in (2000, 20_000):
        file = tmp_path / f"{count}.json"
        images = [{"id": n, "file_name": f"{n:012d}.jpg", "width": 640, "height": 480} for n in range(count)]
        boxes = [
            {"id": n, "image_id": n % count, "category_id": 1, "bbox": [n % 300, 3, 40, 50]} for n in range(8 * count)
        ]
        file.write_text(json.dumps({"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "a"}]}))
        done = subprocess.run([sys.executable, "-c", script, file, tmp_path / "cache"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout) * 1024)
    assert peaks[1] - peaks[0] < 15e6, peaks  # as Python objects the larger file takes 150 MB
