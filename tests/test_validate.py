"""Every defect is listed at once, in words.   Run: pytest tests/test_validate.py"""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from documents import checked

from toolkit.data.check_files import parallel
from toolkit.data.checks import unsafe_file_name
from toolkit.data.formats.coco import read_coco
from toolkit.errors import BadInput

ROOT = Path(__file__).parents[1]
DIRTY = Path(__file__).parent / "data" / "dirty"

# image id -> severity, annotation id, words: the table of tests/data/dirty/README.md
ERRORS = {
    2: (None, "truncated"), 3: (None, "empty image file"), 4: (None, "not found"), 9: (9001, "negative width"),
    10: (10002, "zero area"), 11: (11001, "non-finite coordinate"), 13: (13001, "outside the image"),
    14: (14001, "category 555 is not defined"), 15: (15001, "annotation id 15001 used twice"),
    16: (16001, "image 16 does not exist"), 21: (None, "size differs from the JSON"), 23: (None, "unsafe file_name"),
    24: (None, "unsafe file_name"), 26: (None, "not an image"), 27: (27001, "bbox needs 4 numbers"),
    28: (None, "image id 28 used twice"),
}  # fmt: skip
WARNINGS = {12: (12001, "clipped to [50, 30, 14, 18]"), 25: (None, "does not match the extension")}
WITHOUT_COMPLAINT = (1, 5, 6, 7, 8, 17, 18, 19, 20, 22)


@pytest.fixture(scope="module")
def dirty(tmp_path_factory):
    return read_coco(DIRTY / "annotations" / "instances.json", DIRTY / "images", on_error="drop",
                     cache_dir=tmp_path_factory.mktemp("cache"))


def of(table, severity, image_id):
    return [p for p in table.problems if p.image_id == image_id and p.severity == severity]


def test_dirty_errors_are_those_of_its_readme(dirty):
    assert {p.image_id for p in dirty.problems if p.severity == "error"} == set(ERRORS)
    for image_id, (annotation_id, words) in ERRORS.items():
        found = of(dirty, "error", image_id)
        assert len(found) == (2 if image_id in (15, 28) else 1), found
        for problem in found:
            assert words in problem.message and problem.annotation_id == annotation_id
            named = "instances.json" if image_id == 16 else ".jpg" if image_id < 23 or image_id > 24 else ".."
            assert named in problem.file
    assert {p.file for p in of(dirty, "error", 28)} == {"duplicate_image_id_a.jpg", "duplicate_image_id_b.jpg"}


def test_dirty_warnings_are_those_of_its_readme(dirty):
    for image_id, (annotation_id, words) in WARNINGS.items():
        (problem,) = of(dirty, "warning", image_id)
        assert words in problem.message and problem.annotation_id == annotation_id
    assert [p.file for p in dirty.problems if "not listed" in p.message] == ["not_listed.jpg"]
    emptied = {p.image_id for p in dirty.problems if "becomes a background image" in p.message}
    assert emptied == {9, 11, 13, 14, 15, 27}
    for image_id in WITHOUT_COMPLAINT:
        assert not of(dirty, "error", image_id) and not of(dirty, "warning", image_id)
    assert ["alpha" in p.message for p in of(dirty, "note", 5)] == [True]


def test_dirty_drop_leaves_the_usable_records(dirty):
    rows = {row["image_id"]: row for row in map(dirty.row, range(len(dirty)))}
    assert sorted(rows) == [1, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20, 22, 25, 27]
    assert rows[10]["objects"]["id"].tolist() == [10001]
    assert rows[12]["objects"]["bbox"].tolist() == [[50, 30, 64, 48]]
    assert rows[12]["objects"]["area"].tolist() == [14 * 18]  # 900 was the area of the box that got clipped
    assert rows[18]["objects"]["iscrowd"].tolist() == [0, 1] and rows[18]["objects"]["area"][1] == 580
    assert len(rows[17]["objects"]["id"]) == 0 and len(rows[19]["objects"]["id"]) == 500
    assert rows[20]["objects"]["category"].tolist() == [0, 1, 2]
    assert [category.id for category in dirty.categories] == [7, 90, 1000]
    assert rows[22]["file_name"] == "naïve façade 東京 01.jpg"


def test_raise_lists_everything_at_once(tmp_path):
    with pytest.raises(BadInput) as caught:
        read_coco(DIRTY / "annotations" / "instances.json", DIRTY / "images", cache_dir=tmp_path)
    for annotation_id, words in ERRORS.values():
        assert words in str(caught.value) and str(annotation_id or "") in str(caught.value)


@pytest.mark.parametrize(("name", "words"), [
    ("truncated", ["invalid JSON", "line 35, column 11"]),
    ("empty", ["empty file"]),
    ("empty_object", ["`images` missing", "`annotations` missing", "`categories` missing"]),
    ("no_images_key", ["key `images` missing"]),
    ("no_categories_key", ["key `categories` missing"]),
    ("list_at_top", ["expected an object", "found a list"]),
    ("not_json", ["invalid JSON", "line 1, column 1"]),
])  # fmt: skip
def test_broken_documents(tmp_path, name, words):
    for on_error in ("raise", "drop"):
        with pytest.raises(BadInput) as caught:
            read_coco(DIRTY / "broken" / f"{name}.json", DIRTY / "images", cache_dir=tmp_path, on_error=on_error)
        assert all(word in str(caught.value) for word in words) and f"{name}.json" in str(caught.value)


def test_byte_order_mark_is_skipped_with_a_warning(tmp_path):
    table = read_coco(DIRTY / "broken" / "utf8_bom.json", DIRTY / "images", cache_dir=tmp_path)
    assert len(table) == 1 and table.num_boxes().tolist() == [2]
    assert "byte order mark" in table.problems[0].message and table.problems[0].severity == "warning"


def document(**changes):
    base = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 20, "height": 10}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 0, "bbox": [1, 1, 5, 5]}],
        "categories": [{"id": 0, "name": "cell"}],
    }
    return base | changes


def annotation(**changes):
    entry = document()["annotations"][0] | changes
    return document(annotations=[{key: value for key, value in entry.items() if value != "absent"}])


def image(**changes):
    entry = document()["images"][0] | changes
    return document(images=[{key: value for key, value in entry.items() if value != "absent"}])


@pytest.mark.parametrize(("content", "words"), [
    (annotation(bbox="absent"), "`bbox` missing"),
    (annotation(bbox=None), "expected 4 numbers"),
    (annotation(bbox=["1", "1", "5", "5"]), "no number"),
    (annotation(bbox=[1, 1, float("inf"), 5]), "non-finite"),
    (annotation(bbox=[1, 1, 5, -5]), "negative height"),
    (annotation(category_id="absent"), "`category_id` missing"),
    (annotation(category_id=None), "expected an integer or a string"),
    (annotation(category_id="0"), "category '0' is not defined"),
    (annotation(image_id="absent"), "`image_id` missing"),
    (annotation(image_id=[1]), "expected an integer or a string"),
    (annotation(id="absent"), "`id` missing"),
    (annotation(id="x"), "expected an integer"),
    (annotation(iscrowd="yes"), "expected 0 or 1"),
    (document(annotations=["what"]), "no object"),
    (image(width="absent"), "`width` missing"),
    (image(height="10"), "expected a positive number of pixels"),
    (image(height=-1), "expected a positive number of pixels"),
    (image(width=True), "expected a positive number of pixels"),
    (image(file_name="absent"), "`file_name` missing"),
    (image(file_name=7), "expected a path"),
    (image(id=None), "expected an integer or a string"),
    (document(images=[None]), "no object"),
    (document(categories=[{"id": 0, "name": "a"}, {"id": 0, "name": "b"}]), "category id 0 used twice"),
    (document(categories=[{"id": 0, "name": "cell"}, {"id": 1}]), "expected a name"),
    (document(categories=[{"id": 0, "name": "cell"}, {"name": "b"}]), "`id` missing"),
])  # fmt: skip
def test_malformed_records_are_errors(content, words):
    problems = checked(content, "f.json").problems
    assert any(words in p.message and p.severity == "error" for p in problems), problems


@pytest.mark.parametrize(("content", "words"), [
    (document(images={}), "expected a list"),
    (document(categories=[]), "`categories` is empty"),
    (document(images=[]), "`images` is empty"),
    (document(images=[{"id": 1}, {"id": "a"}]), "expected one kind"),
    (None, "found a null"),
])  # fmt: skip
def test_unusable_documents_are_refused(tmp_path, content, words):
    with pytest.raises(BadInput, match=words):
        read_coco(write(tmp_path, content), tmp_path, cache_dir=tmp_path / "cache", check_images=False)


def test_two_faults_of_one_annotation_are_both_listed():
    problems = checked(annotation(category_id=5, bbox=[1, 1, -2, 5]), "f.json").problems
    assert [p.severity for p in problems] == ["error", "error", "warning"]


def test_rounding_past_the_edge_is_not_worth_a_warning():
    valid = checked(annotation(bbox=[15, 1, 5.004, 5]), "f.json")
    assert not valid.problems and valid.boxes.xyxy.tolist() == [[15, 1, 20, 6]]


def test_repeated_class_names_stay_apart():
    valid = checked(document(categories=[{"id": 9, "name": "cell"}, {"id": 0, "name": "cell"}]), "f.json")
    assert [c.name for c in valid.categories] == ["cell", "cell (9)"] and valid.problems[0].severity == "warning"


def triplets(valid):
    return np.stack([valid.relations.subject, valid.relations.object, valid.relations.predicate], 1).tolist()


def test_relations_follow_their_annotations():
    two = document()["annotations"] + [{"id": 8, "image_id": 1, "category_id": 0, "bbox": [9, 1, 5, 5]},
                                       {"id": 9, "image_id": 1, "category_id": 0, "bbox": [9, 1, 0, 5]},
                                       {"id": 10, "image_id": 1, "category_id": 0, "bbox": [9, 1, 5, 0]}]
    related = [{"id": 1, "image_id": 1, "subject_id": 8, "object_id": 1, "predicate_id": 5},
               {"id": 2, "image_id": 1, "subject_id": 9, "object_id": 1, "predicate_id": 5},  # its subject is dropped
               {"id": 3, "image_id": 1, "subject_id": 77, "object_id": 1, "predicate_id": 6},
               {"id": 4, "image_id": 1, "subject_id": 1, "object_id": 1, "predicate_id": 5},
               {"id": 5, "image_id": 1, "subject_id": 9, "object_id": 10, "predicate_id": 5}]  # both are dropped
    valid = checked(document(annotations=two, rel_categories=[{"id": 5, "name": "on"}],
                                       rel_annotations=related), "f.json")
    assert triplets(valid) == [[1, 0, 0]]
    messages = [p.message for p in valid.problems if "relation" in p.message]
    assert messages == ["relation 3: annotation 77 does not exist", "relation 3: predicate 6 is not defined",
                        "relation 4: subject and object are one annotation"]


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/passwd", "C:\\a.jpg", "..\\a.jpg", "\\\\host\\a", "a\0b"])
def test_unsafe_names(name):
    assert unsafe_file_name(name)


@pytest.mark.parametrize("name", ["a.jpg", "sub/a.jpg", "..a/b..jpg", "./a.jpg", "naïve 東京.jpg"])
def test_safe_names(name):
    assert not unsafe_file_name(name)


def write(folder, content):
    (folder / "f.json").write_text(json.dumps(content))
    return folder / "f.json"


def test_symbolic_link_out_of_the_folder_is_refused(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    (images / "a.jpg").symlink_to(DIRTY / "images" / "control.jpg")
    shutil.copy(DIRTY / "images" / "control.jpg", images / "b.jpg")
    entries = [{"id": i, "file_name": f"{name}.jpg", "width": 64, "height": 48} for i, name in enumerate("ab")]
    file = write(tmp_path, document(images=entries, annotations=[]))
    table = read_coco(file, images, on_error="drop", cache_dir=tmp_path / "cache")
    assert table.image_ids().tolist() == [1] and "symbolic link" in table.problems[0].message
    (tmp_path / "link").symlink_to(images)  # the folder itself may be one
    assert len(read_coco(file, tmp_path / "link", on_error="drop", cache_dir=tmp_path / "cache")) == 1


def test_a_wrong_image_folder_is_one_error(tmp_path):
    with pytest.raises(BadInput, match="none of the 1 listed images") as caught:
        read_coco(write(tmp_path, document()), tmp_path, cache_dir=tmp_path / "cache")
    assert len(caught.value.problems) == 1
    with pytest.raises(BadInput, match="tried .*--data.image_dir"):
        read_coco(write(tmp_path, document()), cache_dir=tmp_path / "cache")


def test_header_check_finds_truncation(tmp_path):
    table = read_coco(DIRTY / "annotations" / "instances.json", on_error="drop", cache_dir=tmp_path,
                      check_images="header")
    assert {p.image_id for p in table.problems if p.severity == "error"} == set(ERRORS)


@pytest.mark.parametrize(("extra", "code"), [([], 2), pytest.param(["--on-error", "drop"], 1, marks=pytest.mark.slow)])
def test_check_data_script(tmp_path, extra, code):
    command = [sys.executable, ROOT / "scripts" / "check_data.py", DIRTY / "annotations" / "instances.json", *extra]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True,
                          env={"DETECTION_TOOLKIT_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert done.returncode == code, done.stderr
    assert "ERRORS (records that cannot be used): 18" in done.stdout and "19 usable images" in done.stdout


def test_relations_as_triplets():
    """The second spelling, with the same checks: unknown predicate, unknown box, self relation, a repeated one."""
    boxes = [{"id": i, "image_id": 1, "category_id": 0, "bbox": [9, 1, 5, 5]} for i in (1, 2)]
    listed = [[1, 2, 5], [1, 2, 5], [2, 1, 6], [2, 9, 5], [2, 2, 5], [1, 2], "1 on 2"]
    given = document(annotations=boxes, relations=listed, rel_categories=[{"id": 5, "name": "on"}])
    valid = checked(given, "f.json")
    assert triplets(valid) == [[0, 1, 0], [0, 1, 0]]
    messages = [f"{p.severity} {p.message}" for p in valid.problems]
    assert len(messages) == 6
    wanted = ("warning relation [1, 2, 5]", "predicate 6", "annotation 9", "one annotation", "[1, 2] is nei", "'1 on")
    for words in wanted:
        assert any(words in message for message in messages), words


def test_ids_beyond_64_bits_are_reported(tmp_path):
    """As hashes are: the table holds signed integers of 64 bits."""
    image = {"id": 1, "file_name": "a.jpg", "width": 9, "height": 9}
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 5, 5]}
    document = {"images": [image, image | {"id": 2**63, "file_name": "b.jpg"}], "categories": [{"id": 1, "name": "a"}],
                "annotations": [box, box | {"id": 2**64 - 1}, box | {"id": 2**63 - 1}]}  # fmt: skip
    valid = checked(document, "x.json")
    assert [row.image_id for row in valid.images] == [1]
    assert valid.boxes.ids.tolist() == [1, 2**63 - 1]
    messages = [problem.message for problem in valid.problems if problem.severity == "error"]
    assert len(messages) == 2 and all("64 bits" in message for message in messages)


def test_an_area_beyond_float32_is_replaced_by_that_of_the_box():
    document = {"images": [{"id": 1, "file_name": "a.jpg", "width": 9, "height": 9}],
                "categories": [{"id": 1, "name": "a"}],
                "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 5, 4], "area": 1e39}]}
    assert checked(document, "x.json").boxes.area.tolist() == [20.0]


def test_images_are_checked_where_the_system_names_no_cores_of_a_process(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS has none
    assert parallel(lambda row: [row], [1, 2], "checking") == [1, 2]


def test_progress_without_a_terminal_is_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr("toolkit.data.check_files.AT_ONCE", 4)
    assert parallel(lambda row: [row], range(10), "checking images") == list(range(10))
    assert capsys.readouterr().err == "checking images: 4 of 10\nchecking images: 8 of 10\n"


def test_millions_of_rows_are_not_handed_to_threads_at_once(monkeypatch):
    given, submit = [0], ThreadPoolExecutor.submit
    monkeypatch.setattr("toolkit.data.check_files.AT_ONCE", 8)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda *a: given.__setitem__(0, given[0] + 1) or submit(*a))
    ahead = []
    assert parallel(lambda row: ahead.append(given[0] - row) or [row], range(100), "checking", 2) == list(range(100))
    assert max(ahead) <= 8
