"""Training and validation data have the same classes, or it is said which one is missing where."""

from dataclasses import replace

import pytest
from samples import shapes_table

from toolkit.base.errors import BadInput
from toolkit.data.splits import check_same_classes


@pytest.fixture
def table(tmp_path):
    return shapes_table(tmp_path, 5, 32)


def test_a_class_that_one_split_lacks_is_named(table):
    names = table.class_names
    fewer = replace(table, name="val", categories=table.categories[:-1])
    advice = f"{table.name} lists '{names[-1]}', which val does not: .*{names[-1]}: null"
    with pytest.raises(BadInput, match=f"{len(names)} classes .*{advice}"):
        check_same_classes(table, fewer)
    with pytest.raises(BadInput, match=f"{table.name} lists '.*', which val does not: list the same classes in both$"):
        check_same_classes(fewer, table)


def test_classes_in_another_order_are_refused(table):
    check_same_classes(table, replace(table, name="val"))
    with pytest.raises(BadInput, match="same categories in the same order"):
        check_same_classes(table, replace(table, categories=table.categories[::-1]))
