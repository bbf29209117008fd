"""Supervisely: `assets/dirty_sets/supervisely.txt`."""

import pytest
from dirty_sets import check_set, sets_in


@pytest.mark.parametrize("one", sets_in("supervisely"))
def test_sets(one, tmp_path):
    check_set(one, tmp_path)
