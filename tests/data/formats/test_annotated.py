"""Boxes that a file describes become pixels, and those without an area are left out."""

from small_data import SIZE, picture

from toolkit.data.annotations import ImageRow
from toolkit.data.formats.annotated import UNKNOWN_SIZE, Listing, ParsedBox, sorted_classes


def listing_of(folder, name):
    return Listing(folder, [ImageRow(1, name, None, None)], sorted_classes(["b", "a"]), [])


def test_classes_are_numbered_in_the_order_of_the_alphabet():
    assert sorted_classes(["b", "a", "b"]) == [(1, "a"), (2, "b")]


def test_sizes_are_read_and_fractions_become_pixels(tmp_path):
    picture(tmp_path / "a.png")
    listing = listing_of(tmp_path, "a.png")
    assert listing.images[0][2:] == SIZE
    listing.add(0, ParsedBox("b", (0.1, 0.25, 0.5, 0.75), "a.txt", shares=True))
    listing.add(0, ParsedBox("a", (1, 2, 1, 9), "a.txt"))
    assert list(listing.annotations.xywh) == [10, 20, 40, 40]
    assert [problem.message for problem in listing.problems] == ["box [1, 2, 1, 9] (a) in a.txt has no area; left out"]


def test_fractions_of_an_unknown_size_are_left_out(tmp_path):
    listing = listing_of(tmp_path, "gone.png")
    listing.add(0, ParsedBox("a", (0.1, 0.25, 0.5, 0.75), "a.txt", shares=True))
    assert listing.images[0].width == UNKNOWN_SIZE
    assert len(listing.annotations) == 0
    assert [problem.severity for problem in listing.problems] == ["error"]
