"""Files of other tools, and folders without a data set: `assets/dirty_sets/other_tools.txt`."""

import pytest
from dirty_sets import check_set, sets_in

from toolkit.data.formats.look_alikes import tool_of


@pytest.mark.parametrize("one", sets_in("other_tools"))
def test_sets(one, tmp_path):
    check_set(one, tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", "[" * 100_000, '{"classes": []}'])
def test_other_json_is_of_none_of_them(text, tmp_path):
    file = tmp_path / "a.json"
    file.write_text(text)
    assert tool_of(file) is None
