"""Tables of boxes, most of them in `assets/dirty_sets/csv.txt`."""

import pytest
from dirty_sets import check_set, sets_in
from small_data import CSV_HEAD, picture, write_text

from toolkit.base.errors import BadInput
from toolkit.data.formats import csv, open_dataset
from toolkit.data.layout import Layout


@pytest.mark.parametrize("one", sets_in("csv"))
def test_tables(one, tmp_path):
    check_set(one, tmp_path)


def test_a_field_that_is_too_long_is_named(tmp_path):
    picture(tmp_path / "a.png")
    write_text(tmp_path / "a.csv", f"{CSV_HEAD}a.png,4,4,14,14,{'x' * 200_000}\n")
    with pytest.raises(
        BadInput,
        match=r"a.csv, line 2: cannot be read as CSV: field larger than field limit",
    ):
        open_dataset("train", path=tmp_path, cache_dir=tmp_path / "cache")


def test_a_table_without_columns_of_boxes_is_not_a_data_set(tmp_path):
    write_text(tmp_path / "a.csv", "name,price\na,3\n")
    assert csv.find(Layout(tmp_path)) is None
