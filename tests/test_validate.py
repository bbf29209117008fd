"""Every defect is listed at once, in words."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from documents import DIRTY, box, checked, document, image, write
from PIL import Image

from toolkit.base.errors import BadInput
from toolkit.data.check_files import parallel
from toolkit.data.checks import unsafe_file_name
from toolkit.data.formats import open_dataset
from toolkit.data.problem_lines import kind_of
from toolkit.data.relation_checks import stands_before

# image id -> severity, annotation id, words: the table of tests/assets/dirty/README.md
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
    file = DIRTY / "annotations" / "instances.json"
    cache = tmp_path_factory.mktemp("cache")
    return open_dataset(file, image_dir=DIRTY / "images", on_error="drop", cache_dir=cache)


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


def test_raise_lists_everything_at_once_and_headers_tell_of_truncation(tmp_path):
    file = DIRTY / "annotations" / "instances.json"
    with pytest.raises(BadInput) as caught:
        open_dataset(file, image_dir=DIRTY / "images", cache_dir=tmp_path)
    for annotation_id, words in ERRORS.values():
        assert words in str(caught.value) and str(annotation_id or "") in str(caught.value)
    table = open_dataset(file, on_error="drop", cache_dir=tmp_path, check_images="header")
    assert {p.image_id for p in table.problems if p.severity == "error"} == set(ERRORS)


def test_the_kind_of_an_endless_message_is_found_in_no_time():
    """A damaged file has a megabyte in one word; the square of that would be hours."""
    assert len(kind_of("annotation " + "x" * 10**6)) < 1000


def test_many_errors_of_a_kind_are_one_line(tmp_path):
    outside = [box(id=number, bbox=[30, 1, 5, 5]) for number in range(1, 12)]
    file = write(tmp_path, document(annotations=[*outside, box(id=12, category_id=5), box(id=13, bbox=[2, 2, 0, 0])]))
    with pytest.raises(BadInput) as caught:
        open_dataset(file, image_dir=tmp_path, cache_dir=tmp_path / "cache", check_images=False)
    first, many, *others = caught.value.problems
    assert "13 errors" in first and len(others) == 2
    assert many.startswith("11 of one kind (scripts/check_data.py --json lists all), such as: error: a.jpg (image 1, ")
    assert many.count("lies outside the image") == 3


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
    with pytest.raises(BadInput) as caught:
        open_dataset(DIRTY / "broken" / f"{name}.json", image_dir=DIRTY / "images", cache_dir=tmp_path, on_error="drop")
    assert all(word in str(caught.value) for word in words) and f"{name}.json" in str(caught.value)


def test_byte_order_mark_is_skipped_with_a_warning(tmp_path):
    table = open_dataset(DIRTY / "broken" / "utf8_bom.json", image_dir=DIRTY / "images", cache_dir=tmp_path)
    assert len(table) == 1 and table.num_boxes().tolist() == [2]
    assert "byte order mark" in table.problems[0].message and table.problems[0].severity == "warning"
    assert "image files not listed in the annotation file" in table.problems[1].message, "many are one warning"


@pytest.mark.parametrize(("list_", "entry", "words"), [
    ("annotations", box(bbox="absent"), "`bbox` missing"),
    ("annotations", box(bbox=None), "expected 4 numbers"),
    ("annotations", box(bbox=["1", "1", "5", "5"]), "not a number"),
    ("annotations", box(bbox=[1, 1, float("inf"), 5]), "non-finite"),
    ("annotations", box(bbox=[1, 1, 5, -5]), "negative height"),
    ("annotations", box(category_id="absent"), "`category_id` missing"),
    ("annotations", box(category_id=None), "expected an integer or a string"),
    ("annotations", box(category_id="0"), "category '0' is not defined"),
    ("annotations", box(image_id="absent"), "`image_id` missing"),
    ("annotations", box(image_id=[1]), "expected an integer or a string"),
    ("annotations", box(id="absent"), "`id` missing"),
    ("annotations", box(id="x"), "expected an integer"),
    ("annotations", box(iscrowd="yes"), "expected 0 or 1"),
    ("annotations", "what", "not an object"),
    ("images", image(width="absent"), "`width` missing"),
    ("images", image(height="10"), "expected a positive number of pixels"),
    ("images", image(height=-1), "expected a positive number of pixels"),
    ("images", image(width=True), "expected a positive number of pixels"),
    ("images", image(file_name="absent"), "`file_name` missing"),
    ("images", image(file_name=7), "expected a path"),
    ("images", image(id=None), "expected an integer or a string"),
    ("images", None, "not an object"),
    ("categories", {"id": 0, "name": "b"}, "category id 0 used twice"),
    ("categories", {"id": 1}, "expected a name"),
    ("categories", {"name": "b"}, "`id` missing"),
    ("categories", "cell", "expected an object with"),
])  # fmt: skip
def test_malformed_records_are_errors(list_, entry, words):
    first = document()[list_] if list_ == "categories" else []
    problems = checked(document(**{list_: [*first, entry]})).problems
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
        open_dataset(write(tmp_path, content), image_dir=tmp_path, cache_dir=tmp_path / "cache", check_images=False)


def test_faults_repairs_and_names():
    two = checked(document(annotations=[box(category_id=5, bbox=[1, 1, -2, 5])])).problems
    assert [p.severity for p in two] == ["error", "error", "warning"]
    rounded = checked(document(annotations=[box(bbox=[15, 1, 5.004, 5])]))  # past the edge, and not worth a warning
    assert not rounded.problems and rounded.boxes.xyxy.tolist() == [[15, 1, 20, 6]]
    huge = checked(document(annotations=[box(bbox=[1, 1, 5, 4], area=1e39)]))  # beyond float32
    assert huge.boxes.area.tolist() == [20.0]
    names = checked(document(categories=[{"id": 9, "name": "cell"}, {"id": 0, "name": "cell"}]))
    assert [c.name for c in names.categories] == ["cell", "cell (9)"] and names.problems[0].severity == "warning"
    again = checked(document(categories=[{"id": 0, "name": "cell"}] * 2))
    assert len(again.categories) == 1 and "taken once" in again.problems[0].message


def test_relations_follow_their_annotations():
    """1 and 8 are kept, 9 and 10 dropped; relations of dropped ones go with them and need no words of their own."""
    boxes = [box(), box(id=8, bbox=[9, 1, 5, 5]), box(id=9, bbox=[9, 1, 0, 5]), box(id=10, bbox=[9, 1, 5, 0])]
    ends = [(8, 1, 5), (9, 1, 5), (77, 1, 6), (1, 1, 5), (9, 10, 5)]
    related = [{"id": i, "image_id": 1, "subject_id": subject, "object_id": object_, "predicate_id": predicate}
               for i, (subject, object_, predicate) in enumerate(ends, start=1)]  # fmt: skip
    predicates = [{"id": 5, "name": "on"}]
    valid = checked(document(annotations=boxes, rel_categories=predicates, rel_annotations=related))
    found = valid.relations
    assert (found.subject.tolist(), found.object.tolist(), found.predicate.tolist()) == ([1], [0], [0])
    messages = [p.message for p in valid.problems if "relation" in p.message]
    assert messages == ["relation 3: annotation 77 does not exist", "relation 3: predicate 6 is not defined",
                        "relation 4: subject and object are one annotation"]


def test_relations_as_triplets():
    """The second spelling, with the same checks: unknown predicate, unknown box, self relation, a repeated one."""
    boxes = [box(id=i, bbox=[9, 1, 5, 5]) for i in (1, 2)]
    listed = [[1, 2, 5], [1, 2, 5], [2, 1, 6], [2, 9, 5], [2, 2, 5], [1, 2], "1 on 2"]
    valid = checked(document(annotations=boxes, relations=listed, rel_categories=[{"id": 5, "name": "on"}]))
    found = valid.relations
    assert (found.subject.tolist(), found.object.tolist(), found.predicate.tolist()) == ([0, 0], [1, 1], [0, 0])
    messages = [f"{p.severity} {p.message}" for p in valid.problems]
    assert len(messages) == 6
    wanted = ("warning relation [1, 2, 5]", "predicate 6", "annotation 9", "one annotation", "[1, 2] is nei", "'1 on")
    for words in wanted:
        assert any(words in message for message in messages), words


def test_a_relation_stands_before_another_that_equals_it():
    """Columns a, b, a, c, a, b: the third and the last two are repeated."""
    columns = np.array([[1, 2, 1, 1, 1, 2], [5, 5, 5, 6, 5, 5]])
    assert stands_before(columns).tolist() == [False, False, True, False, True, True]


def test_names_that_leave_the_folder_are_unsafe():
    for name in ("../a", "a/../../b", "/etc/passwd", "C:\\a.jpg", "..\\a.jpg", "\\\\host\\a", "a\0b"):
        assert unsafe_file_name(name), name
    for name in ("a.jpg", "sub/a.jpg", "..a/b..jpg", "./a.jpg", "naïve 東京.jpg"):
        assert not unsafe_file_name(name), name


def test_backslashes_between_folders_are_slashes(tmp_path):
    """As programs on Windows write them; those that leave the folder are refused as ever."""
    (tmp_path / "images" / "sub").mkdir(parents=True)
    shutil.copy(DIRTY / "images" / "control.jpg", tmp_path / "images" / "sub" / "a.jpg")
    entries = [image(id=i, file_name=name, width=64, height=48) for i, name in enumerate(("sub\\a.jpg", "..\\a.jpg"))]
    file = write(tmp_path, document(images=entries, annotations=[]))
    table = open_dataset(file, on_error="drop", cache_dir=tmp_path / "cache")
    assert [table.file_name(i) for i in range(len(table))] == ["sub/a.jpg"]
    assert ["unsafe file_name" in problem.message for problem in table.problems] == [True]


def test_a_symbolic_link_out_of_the_folder_is_read_and_noted(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    (images / "a.jpg").symlink_to(DIRTY / "images" / "control.jpg")
    shutil.copy(DIRTY / "images" / "control.jpg", images / "b.jpg")
    entries = [image(id=i, file_name=f"{name}.jpg", width=64, height=48) for i, name in enumerate("ab")]
    file = write(tmp_path, document(images=entries, annotations=[]))
    table = open_dataset(file, image_dir=images, on_error="drop", cache_dir=tmp_path / "cache")
    assert len(table) == 2
    (note,) = table.problems
    assert note.severity == "note" and note.message.startswith("1 of 2 images are links to files elsewhere")
    (tmp_path / "link").symlink_to(images)  # the folder itself may be one
    assert len(open_dataset(file, image_dir=tmp_path / "link", on_error="drop", cache_dir=tmp_path / "cache")) == 2


def test_a_wrong_image_folder_is_one_error(tmp_path):
    with pytest.raises(BadInput, match="none of the 1 listed images") as caught:
        open_dataset(write(tmp_path, document()), image_dir=tmp_path, cache_dir=tmp_path / "cache")
    assert len(caught.value.problems) == 1
    with pytest.raises(BadInput, match="tried .*--data.image_dir"):
        open_dataset(write(tmp_path, document()), cache_dir=tmp_path / "cache")


def test_ids_beyond_64_bits_are_reported():
    """As hashes are: the table holds signed integers of 64 bits."""
    images, ids = [image(), image(id=2**63, file_name="b.jpg")], (1, 2**64 - 1, 2**63 - 1)
    valid = checked(document(images=images, annotations=[box(id=id_) for id_ in ids]))
    assert [row.image_id for row in valid.images] == [1] and valid.boxes.ids.tolist() == [1, 2**63 - 1]
    messages = [problem.message for problem in valid.problems if problem.severity == "error"]
    assert len(messages) == 2 and all("64 bits" in message for message in messages)


def test_images_are_checked_by_a_few_rows_at_a_time(monkeypatch, capsys):
    """Millions of rows are not handed to threads at once; without a terminal progress is plain lines."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS has none
    given, submit, ahead = [0], ThreadPoolExecutor.submit, []
    monkeypatch.setattr("toolkit.data.check_files.ROWS_PER_CHUNK", 4)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", lambda *a: given.__setitem__(0, given[0] + 1) or submit(*a))
    rows = parallel(lambda row: ahead.append(given[0] - row) or [row], range(10), "checking images")
    assert rows == list(range(10)) and max(ahead) <= 4
    assert capsys.readouterr().err == "checking images: 4 of 10\nchecking images: 8 of 10\n"


def test_numbers_are_rounded_and_what_follows_from_an_undefined_class_is_one_line(tmp_path):
    Image.new("RGB", (100, 80)).save(tmp_path / "a.png")
    images = [{"id": 1, "file_name": "a.png", "width": 100, "height": 80}]
    boxes = [{"id": i, "image_id": 1, "category_id": 2 if i else 1, "bbox": [70.2, 10, 30.2, 40.3]} for i in range(12)]
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": ""}]
    document = {"images": images, "annotations": boxes, "categories": categories}
    (tmp_path / "a.json").write_text(json.dumps(document))
    table = open_dataset(tmp_path / "a.json", cache_dir=tmp_path / "cache", on_error="drop")
    told = [problem.message for problem in table.problems]
    assert told == [
        "category 2: `name` is ''; expected a name",
        "bbox [70.2, 10, 30.2, 40.3] exceeds the image of 100 x 80 by 0.4 px; clipped to [70.2, 10, 29.8, 40.3]",
        "category 2 is not defined; 11 annotations use it, the first in image 1",
        *told[3:],
    ]
    assert len(table.boxes()) == 1
