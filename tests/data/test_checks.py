"""The checks of annotations: every defect is listed at once, in words, and what is usable is kept.

tests/assets/dirty is a data set with a defect of each kind, which its README describes; tests/assets/malformed.json has
records that are not of COCO's form, each with what is said about it; tests/assets/documents.json has small documents
with all that is kept of them and said about them.
"""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from documents import DIRTY, box, checked, document, image, write
from places import ASSETS

from toolkit.base.errors import BadInput
from toolkit.data.check_files import map_in_threads
from toolkit.data.checks import unsafe_file_name
from toolkit.data.formats import open_dataset
from toolkit.data.problem_lines import kind_of
from toolkit.data.relation_checks import stands_before

ANNOTATIONS = DIRTY / "annotations" / "instances.json"
EXPECTED = json.loads((DIRTY / "expected.json").read_text())
USED_TWICE = (15, 28)
EMPTIED = {9, 11, 13, 14, 15, 27}
KEPT = [1, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 18, 19, 20, 22, 25, 27]


@pytest.fixture(scope="module")
def dirty(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return open_dataset(ANNOTATIONS, image_dir=DIRTY / "images", on_error="drop", cache_dir=cache)


def problems_of(table, severity, image_id):
    return [each for each in table.problems if each.image_id == image_id and each.severity == severity]


@pytest.mark.parametrize("expected", EXPECTED, ids=lambda each: each["words"])
def test_each_defect_is_told(dirty, expected):
    image_id = expected["image_id"]
    found = problems_of(dirty, expected["severity"], image_id)
    assert len(found) == 1 + (image_id in USED_TWICE)
    for problem in found:
        assert expected["words"] in problem.message
        assert problem.annotation_id == expected["annotation_id"]
        assert {16: "instances.json", 23: "..", 24: ".."}.get(image_id, ".jpg") in problem.file


def test_nothing_else_is_complained_about(dirty):
    told = {(each["severity"], each["image_id"]) for each in EXPECTED}
    for problem in dirty.problems:
        if problem.severity == "error" or problem.image_id not in EMPTIED | {None}:
            assert problem.severity == "note" or (problem.severity, problem.image_id) in told
    assert {each.image_id for each in dirty.problems if "becomes a background image" in each.message} == EMPTIED
    assert [each.file for each in dirty.problems if "not listed" in each.message] == ["not_listed.jpg"]
    assert ["alpha" in each.message for each in problems_of(dirty, "note", 5)] == [True]


def test_usable_records_are_left(dirty):
    rows = {row["image_id"]: row for row in map(dirty.row, range(len(dirty)))}
    assert sorted(rows) == KEPT
    objects = {image_id: row["objects"] for image_id, row in rows.items()}
    assert objects[10]["id"].tolist() == [10001]
    assert objects[12]["bbox"].tolist() == [[50, 30, 64, 48]]
    assert objects[12]["area"].tolist() == [14 * 18]  # 900 was the area of the box that got clipped
    assert objects[18]["iscrowd"].tolist() == [0, 1]
    assert objects[18]["area"][1] == 580
    assert len(objects[17]["id"]) == 0
    assert len(objects[19]["id"]) == 500
    assert objects[20]["category"].tolist() == [0, 1, 2]
    assert [category.id for category in dirty.categories] == [7, 90, 1000]
    assert rows[22]["file_name"] == "naïve façade 東京 01.jpg"


def test_errors_are_listed_at_once_and_headers_tell_of_truncation(tmp_path):
    with pytest.raises(BadInput) as caught:
        open_dataset(ANNOTATIONS, image_dir=DIRTY / "images", cache_dir=tmp_path)
    table = open_dataset(ANNOTATIONS, on_error="drop", cache_dir=tmp_path, check_images="header")
    errors = {each.image_id for each in table.problems if each.severity == "error"}
    for each in EXPECTED:
        if each["severity"] == "error":
            assert each["words"] in str(caught.value)
            errors.remove(each["image_id"])
    assert not errors


def test_many_errors_of_a_kind_are_one_line(tmp_path):
    outside = [box(id=number, bbox=[30, 1, 5, 5]) for number in range(1, 12)]
    others = [box(id=12, category_id=5), box(id=13, bbox=[2, 2, 0, 0])]
    file = write(tmp_path, document(annotations=outside + others))
    with pytest.raises(BadInput) as caught:
        open_dataset(file, image_dir=tmp_path, cache_dir=tmp_path / "cache", check_images=False)
    first, many, *single = caught.value.problems
    assert "13 errors" in first
    assert len(single) == 2
    assert many.startswith("11 of one kind (scripts/check_data.py --json lists all), such as: error: a.jpg (image 1, ")
    assert many.count("lies outside the image") == 3


def test_the_kind_of_an_endless_message_is_found_in_no_time():
    """A damaged file has a megabyte in one word; the square of that would be hours."""
    assert len(kind_of("annotation " + "x" * 10**6)) < 1000


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("truncated", ["invalid JSON", "line 35, column 11"]),
        ("empty", ["empty file"]),
        (
            "empty_object",
            ["`images` missing", "`annotations` missing", "`categories` missing"],
        ),
        ("no_images_key", ["key `images` missing"]),
        ("no_categories_key", ["key `categories` missing"]),
        ("list_at_top", ["expected an object", "found a list"]),
        ("not_json", ["invalid JSON", "line 1, column 1"]),
    ],
)
def test_broken_documents_are_refused(tmp_path, name, words):
    file = DIRTY / "broken" / f"{name}.json"
    with pytest.raises(BadInput, match=f"{name}.json") as caught:
        open_dataset(file, image_dir=DIRTY / "images", cache_dir=tmp_path, on_error="drop")
    for each in words:
        assert each in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (document(images={}), "expected a list"),
        (document(categories=[]), "`categories` is empty"),
        (document(images=[]), "`images` is empty"),
        (document(images=[{"id": 1}, {"id": "a"}]), "expected one kind"),
        (None, "found a null"),
    ],
)
def test_unusable_documents_are_refused(tmp_path, content, words):
    with pytest.raises(BadInput, match=words):
        open_dataset(
            write(tmp_path, content),
            image_dir=tmp_path,
            cache_dir=tmp_path / "cache",
            check_images=False,
        )


def test_a_byte_order_mark_is_skipped_with_a_warning(tmp_path):
    table = open_dataset(DIRTY / "broken" / "utf8_bom.json", image_dir=DIRTY / "images", cache_dir=tmp_path)
    assert table.num_boxes().tolist() == [2]
    mark, unlisted = table.problems
    assert "byte order mark" in mark.message
    assert mark.severity == "warning"
    assert "image files not listed in the annotation file" in unlisted.message  # many are one warning


MALFORMED = json.loads((ASSETS / "malformed.json").read_text())


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: f"{case['list']}: {case['words']}")
def test_malformed_records_are_errors(case):
    before = document()["categories"] if case["list"] == "categories" else []
    problems = checked(document(**{case["list"]: [*before, case["entry"]]})).problems
    assert any(case["words"] in each.message for each in problems if each.severity == "error"), problems


DOCUMENTS = json.loads((ASSETS / "documents.json").read_text())


@pytest.mark.parametrize("case", DOCUMENTS, ids=lambda case: case["name"])
def test_what_is_kept_of_a_document_and_what_is_said(case):
    found = checked(case["document"])
    boxes = dict(zip(map(str, found.boxes.ids.tolist()), found.boxes.xyxy.tolist(), strict=True))
    ends = found.relations
    assert case["expected"] == {
        "problems": [f"{each.severity}: {each.message}" for each in found.problems],
        "classes": [category.name for category in found.categories],
        "boxes": boxes,
        "area": found.boxes.area.tolist(),
        "relations": np.stack([ends.subject, ends.object, ends.predicate], axis=1).tolist(),
    }


def test_a_relation_stands_before_another_that_equals_it():
    """Columns a, b, a, c, a, b: the third and the last two are repeated."""
    columns = np.array([[1, 2, 1, 1, 1, 2], [5, 5, 5, 6, 5, 5]])
    assert stands_before(columns).tolist() == [False, False, True, False, True, True]


@pytest.mark.parametrize(
    "name",
    ["../a", "a/../../b", "/etc/passwd", "C:\\a.jpg", "..\\a.jpg", "\\\\host\\a", "a\0b"],
    ids=ascii,
)
def test_names_that_leave_the_folder_are_unsafe(name):
    assert unsafe_file_name(name)


@pytest.mark.parametrize("name", ["a.jpg", "sub/a.jpg", "..a/b..jpg", "./a.jpg", "naïve 東京.jpg"])
def test_other_names_are_safe(name):
    assert not unsafe_file_name(name)


def listed(folder, *names):
    """A file of images of the size of control.jpg, without boxes."""
    entries = [image(id=i, file_name=name, width=64, height=48) for i, name in enumerate(names)]
    return write(folder, document(images=entries, annotations=[]))


def test_backslashes_between_folders_are_slashes(tmp_path):
    """As programs on Windows write them; those that leave the folder are refused as ever."""
    (tmp_path / "images" / "sub").mkdir(parents=True)
    shutil.copy(DIRTY / "images" / "control.jpg", tmp_path / "images" / "sub" / "a.jpg")
    file = listed(tmp_path, "sub\\a.jpg", "..\\a.jpg")
    table = open_dataset(file, on_error="drop", cache_dir=tmp_path / "cache")
    assert [table.file_name(i) for i in range(len(table))] == ["sub/a.jpg"]
    (problem,) = table.problems
    assert "unsafe file_name" in problem.message


def test_a_symbolic_link_out_of_the_folder_is_read_and_noted(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    (images / "a.jpg").symlink_to(DIRTY / "images" / "control.jpg")
    shutil.copy(DIRTY / "images" / "control.jpg", images / "b.jpg")
    file = listed(tmp_path, "a.jpg", "b.jpg")
    table = open_dataset(file, image_dir=images, on_error="drop", cache_dir=tmp_path / "cache")
    assert len(table) == 2
    (note,) = table.problems
    assert note.severity == "note"
    assert note.message.startswith("1 of 2 images are links to files elsewhere")
    (tmp_path / "link").symlink_to(images)  # the folder itself may be one
    linked = open_dataset(file, image_dir=tmp_path / "link", on_error="drop", cache_dir=tmp_path / "cache")
    assert len(linked) == 2


def test_a_wrong_image_folder_is_one_error(tmp_path):
    file = write(tmp_path, document())
    with pytest.raises(BadInput, match="none of the 1 listed images") as caught:
        open_dataset(file, image_dir=tmp_path, cache_dir=tmp_path / "cache")
    assert len(caught.value.problems) == 1
    with pytest.raises(BadInput, match="tried .*--data.image_dir"):
        open_dataset(file, cache_dir=tmp_path / "cache")


def test_images_are_checked_by_a_few_rows_at_a_time(monkeypatch, capsys):
    """Millions of rows are not handed to threads at once; without a terminal progress is plain lines."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS has none
    monkeypatch.setattr("toolkit.data.check_files.ROWS_PER_CHUNK", 4)
    submit = ThreadPoolExecutor.submit
    given = []
    ahead = []

    def counted(*arguments):
        given.append(arguments)
        return submit(*arguments)

    def check(row):
        ahead.append(len(given) - row)
        return [row]

    monkeypatch.setattr(ThreadPoolExecutor, "submit", counted)
    assert map_in_threads(check, range(10), "checking images") == list(range(10))
    assert max(ahead) <= 4
    assert capsys.readouterr().err == "checking images: 4 of 10\nchecking images: 8 of 10\n"
