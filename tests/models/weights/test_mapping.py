"""Which tensors, and which rows of classes, a model takes over from a checkpoint."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.base.errors import BadInput
from toolkit.models.weights.mapping import copy_class_rows, map_weights

LAYOUTS = [(0, 1, 0), (0, 1, 1), (1, 1, 0), (4, 4, 0), (5, 1, 0)]
class_lists = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=6, unique=True)


def numbered(start: int, blocks: int, layout: tuple, names: list) -> torch.Tensor:
    """Rows of two numbers that occur nowhere else, (blocks, rows, 2)."""
    before, per_class, after = layout
    rows = before + per_class * len(names) + after
    return torch.arange(start, start + blocks * rows * 2.0).reshape(blocks, rows, 2)


@settings(max_examples=60, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    blocks=st.integers(1, 3),
    ours=class_lists,
    theirs=class_lists,
)
def test_rows_go_to_the_same_class_and_block(layout, blocks, ours, theirs):
    before, per_class, after = layout
    fresh = numbered(0, blocks, layout, ours)
    source = numbered(1000, blocks, layout, theirs)
    copied = copy_class_rows(
        fresh.flatten(0, 1),
        source.flatten(0, 1),
        layout,
        ours,
        theirs,
    )
    for block, new, old in zip(copied.reshape(fresh.shape), fresh, source, strict=True):
        assert block[:before].equal(old[:before])
        assert block[len(block) - after :].equal(old[len(old) - after :])
        rows = block[before : len(block) - after].split(per_class)
        of_new = new[before:].split(per_class)
        of_old = old[before:].split(per_class)
        for i, name in enumerate(ours):
            expected = of_old[theirs.index(name)] if name in theirs else of_new[i]
            assert rows[i].equal(expected), name
    assert copy_class_rows(
        source.flatten(0, 1),
        copied,
        layout,
        theirs,
        ours,
    ).equal(source.flatten(0, 1))


def test_names_are_mapped_by_prefixes_alone():
    model = {"head.fc.weight": torch.zeros(2), "body.fc.weight": torch.zeros(2)}
    checkpoint = {"old.fc.weight": torch.ones(2), "body.fc.weight": torch.ones(2), "fc.weight": torch.ones(2)}
    table = map_weights(model, checkpoint)
    assert table.new == ["head.fc.weight"]
    assert table.unused == ["old.fc.weight", "fc.weight"]
    table = map_weights(model, checkpoint, {"head": "old"})
    assert table.sources == {"head.fc.weight": "old.fc.weight", "body.fc.weight": "body.fc.weight"}
    assert table.table().splitlines()[0] == "mapped  head.fc.weight <- old.fc.weight"


def test_all_that_does_not_fit_is_named_at_once():
    with pytest.raises(BadInput) as caught:
        map_weights({"a.w": torch.zeros(2), "b.w": torch.zeros(1)}, {"a.w": torch.zeros(3)}, {"b": "c", "d": "a"})
    said = str(caught.value)
    assert "b <- c: the checkpoint has no parameter below 'c'" in said
    assert "d <- a: the model has no parameter below 'd'" in said
    assert "a.w <- a.w: the checkpoint's shape is (3,); the model's is (2,)" in said
    with pytest.raises(BadInput, match="class 'a' occurs 2 times in the checkpoint"):
        map_weights(
            {},
            {},
            class_tensors={"x": (0, 1, 0)},
            classes=["a", "b"],
            source_classes=["a", "N/A", "a", "N/A"],
        )


@pytest.mark.parametrize(
    ("shared", "words"),
    [
        (0, ""),
        (1, ": a"),
        (5, ": a, b, c, d, e"),
        (6, ""),
    ],
)
def test_the_table_names_a_few_classes_whose_rows_are_kept(shared, words):
    """Rows of background are kept whatever the classes."""
    source_classes = [*"abcdef"[:shared], "x"]
    model = {"head": torch.zeros(7, 2)}
    checkpoint = {"head": torch.ones(1 + len(source_classes), 2)}
    of_classes = {"classes": list("abcdef"), "source_classes": source_classes}
    table = map_weights(
        model,
        checkpoint,
        class_tensors={"head": (1, 1, 0)},
        **of_classes,
    )
    assert table.rows == {"head": f"rows of {shared} of 6 classes{words}"}
    assert table.state["head"][:, 0].tolist() == [1] * (1 + shared) + [0] * (6 - shared)
    with pytest.raises(ValueError, match="different layouts"):
        map_weights(model, checkpoint, class_tensors={"head": (1, 1, 0), "h*": (0, 1, 0)})


def test_the_summary_has_a_line_for_each_part_of_the_model():
    """At most three parts of a name, neither its own nor numbers, of the first four."""
    names = [
        "a.b.c.d.weight",
        "a.b.c.d.bias",
        "a.0.b.1.c.weight",
        "x.y.weight",
        "weight",
    ]
    tensors = {name: torch.zeros(1) for name in names}
    lines = [line.split() for line in map_weights(tensors, tensors).summary().splitlines()]
    counted = [(part, int(count)) for _, part, count, _ in lines]
    assert counted == [("a.b.c", 2), ("a.b", 1), ("x.y", 1), ("weight", 1)]
