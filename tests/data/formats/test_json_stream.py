"""JSON read item by item is what `json.loads` reads, and its faults have a place."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from documents import box, document, image, write
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.base.errors import BadInput
from toolkit.data.formats.json_stream import WholeValue, items_of, stream_lists

value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=40)
@given(
    content=st.dictionaries(st.text(), value, max_size=5),
    window=st.integers(1, 40),
    indent=st.none() | st.integers(0, 2),
)
def test_items_are_those_of_the_whole(tmp_path_factory, content, window, indent):
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_text(
        json.dumps(content, indent=indent, ensure_ascii=False),
        encoding="utf-8",
        errors="surrogatepass",
    )
    found = {}
    for key, item in stream_lists(path, window):
        if isinstance(item, WholeValue):
            found[key] = item.value
        else:
            found.setdefault(key, []).append(item)
    assert repr(found) == repr(content)


@settings(max_examples=40)
@given(cut=st.integers(1, 60), window=st.integers(1, 30))
def test_a_cut_file_is_an_error_with_its_place(tmp_path_factory, cut, window):
    path = tmp_path_factory.mktemp("cut") / "a.json"
    text = '{"images": [{"id": 1},\n {"id": 23}],\n "x": 4, "annotations": []}'
    path.write_text(text[: min(cut, len(text) - 1)])
    with pytest.raises(BadInput, match=r"a\.json: invalid JSON at line \d+, column \d+"):
        list(stream_lists(path, window))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "empty file"),
        ("[1]", r"found a list \(a list is the form of a results file\)"),
        ("3", "found a number"),
        ("{1: 2}", "Expecting property name"),
        (
            '{"a": ' + "9" * 5000 + "}",
            r"invalid JSON at line 1, column \d+: not a number",
        ),
        ('{"a": ' + "[" * 100_000, "invalid JSON"),
        ("\xff", "not UTF-8"),
    ],
    ids=["empty", "list", "number", "no key", "digits", "deep", "encoding"],
)
def test_other_texts_are_refused_in_a_sentence(tmp_path, text, fault):
    file = tmp_path / "a.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadInput, match=fault):
        list(stream_lists(file))


def test_lists_are_chosen_by_their_keys(tmp_path):
    file = tmp_path / "a.json"
    file.write_text('{"a": [1], "b": [2], "c": 3}')
    assert list(items_of(file, ("a", "c"))) == [("a", 1)]


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="reads peak memory from Linux's /proc",
)
def test_memory_is_that_of_columns(tmp_path):
    """Peak memory of reading 160,000 boxes beside that of 16,000: columns, and not Python objects for boxes."""
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
        command = [sys.executable, "-c", script, file, tmp_path / "cache"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) * 1024)
    # As columns the larger file takes 43 to 45 MB, by the machine's allocator, and as Python objects 150 MB.
    assert peaks[1] - peaks[0] < 144_000 * 500, peaks
