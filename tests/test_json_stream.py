"""JSON item by item: the same items as of the whole, at any size of the window, with little memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from documents import box, document, image, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.data.formats.json_stream import Whole, stream_lists
from toolkit.errors import BadInput

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
        "from toolkit.data.formats import coco\n"
        "coco.read_coco(sys.argv[1], '.', check_images=False, cache_dir=sys.argv[2])\n"
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
