"""What the numbers of a line of YOLO labels mean: `assets/dirty_sets/yolo_rows.txt`."""

import pytest
from dirty_sets import check_set, sets_in

from toolkit.data.formats.yolo_rows import numbers_of


@pytest.mark.parametrize("one", sets_in("yolo_rows"))
def test_rows(one, tmp_path):
    check_set(one, tmp_path)


@pytest.mark.parametrize("line", ["0 x .5 .5 .5", "0 nan .5 .5 .5", "0 inf .5 .5 .5"])
def test_a_line_with_a_word_has_no_numbers(line):
    assert numbers_of(line) == []
