"""Which image files are predicted on, and their ids."""

import io
import json
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from PIL import Image

from toolkit.base.errors import BadInput
from toolkit.tools.predict.image_files import find_images, find_or_fetch, image_ids_of
from toolkit.tools.predict.outputs import names_of_outputs

EVERYTHING = ["a.jpg", "b/a.jpg", "b/c/d.PNG", "odd[1].jpg"]


@pytest.fixture
def folder(tmp_path):
    for name in (*EVERYTHING, "out/pictures/a.jpg", "b/notes.txt"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "images"


def names_of(found) -> list[str]:
    return [name.as_posix() for name in found.values()]


def test_each_file_is_found_once(folder):
    found = find_images([folder], leave_out=folder / "out")
    assert list(found) == [folder / name for name in EVERYTHING]
    assert names_of(found) == EVERYTHING
    again = find_images([folder / "odd[1].jpg", folder / "b", folder / "b" / "a.jpg", f"{folder}/b/**/*"])
    assert names_of(again) == ["odd[1].jpg", "a.jpg", "c/d.PNG"]
    assert list(find_images([folder / "b" / "notes.txt"])) == [folder / "b" / "notes.txt"]  # asked for by name
    with pytest.raises(BadInput, match="none.jpg: no such file.*looked for.*; .*images/ contains a.jpg, b, "):
        find_images([folder / "a.jpg", folder / "none.jpg"])


def test_linked_folders_are_searched_once(folder, tmp_path):
    (folder / "linked").symlink_to(folder / "b")
    (folder / "up").symlink_to(folder)
    assert names_of(find_images([folder], leave_out=folder / "out")) == EVERYTHING
    other = tmp_path / "other"
    other.mkdir()
    (other / "linked").symlink_to(folder / "b")
    assert names_of(find_images([other])) == ["linked/a.jpg", "linked/c/d.PNG"]


def test_links_that_lead_nowhere_are_found_to_be_told(folder):
    (folder / "itself.jpg").symlink_to(folder / "itself.jpg")
    (folder / "gone.jpg").symlink_to(folder / "nowhere.jpg")
    found = find_images([folder], leave_out=folder / "out")
    assert sorted(names_of(found)) == sorted([*EVERYTHING, "itself.jpg", "gone.jpg"])


def test_addresses_and_a_list_on_the_standard_input(tmp_path, monkeypatch):
    file = tmp_path / "a b.png"
    Image.new("RGB", (8, 6)).save(file)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path)))
    Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{file}\n\n{here}/a%20b.png\n"))
    files, errors, fetched = find_or_fetch(["-", f"{here}/none.png"])
    server.shutdown()
    assert [path.read_bytes() for path in files] == [file.read_bytes()] * 2
    (error,) = errors.values()
    assert "cannot be fetched: File not found" in error
    assert fetched == set(files) - {file}
    assert list(names_of_outputs(files, fetched, ["voc"]).values()) == [
        "a b.png",
        "a%20b.png",
    ]


def test_image_ids_are_those_of_an_annotation_file(tmp_path):
    file = tmp_path / "val.json"
    content = json.dumps({"images": [{"id": 9, "file_name": "a.jpg"}, {"id": 4, "file_name": "sub/b.jpg"}]})
    file.write_text("\ufeff" + content, encoding="utf-8")  # a byte order mark, as where data are read
    assert image_ids_of(file, [Path("here/sub/b.jpg"), Path("here/a.jpg")]) == [4, 9]
    assert image_ids_of(None, [Path("a"), Path("b")]) == [1, 2]
    for text, words in (
        (content, "c.jpg"),
        ("{}", "no COCO file with images"),
        ("[1]", "found a list"),
    ):
        file.write_text(text)
        with pytest.raises(BadInput, match=words):
            image_ids_of(file, [Path("c.jpg")])
