"""The trees of VCTree, against a plain loop."""

from itertools import accumulate

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.detectors.scene_graphs.heads.trees import grow_trees


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.integers(0, 8),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 10**6),
)
def test_trees_reach_every_object_once(num_objects, seed):
    size = max(num_objects)
    scores = torch.rand(
        len(num_objects),
        size,
        size,
        generator=torch.Generator().manual_seed(seed),
    ).round(decimals=1)
    forest = grow_trees(scores, num_objects)
    assert sorted(forest.order.tolist()) == list(range(sum(num_objects)))
    children = torch.cat([forest.left, forest.right])
    assert sorted(children[children >= 0].tolist()) == torch.where(forest.parent >= 0)[0].tolist()
    starts = accumulate([0, *num_objects[:-1]])
    for of_image, start, parents in zip(
        scores,
        starts,
        forest.parent.split(num_objects),
        strict=True,
    ):
        expected = plain_tree(of_image[: len(parents), : len(parents)])
        assert torch.where(parents >= 0, parents - start, -1).tolist() == expected


def plain_tree(scores: torch.Tensor) -> list[int]:
    """Parents of the greedy tree; equal scores: first the earlier tree node, then the lower object."""
    parents = [-1] * len(scores)
    if not len(scores):
        return parents
    tree = [int(scores.double().mean(1).argmax())]
    free = [n for n in range(len(scores)) if n != tree[0]]
    while free:
        best = scores[tree][:, free]
        parent, child = (best == best.max()).nonzero()[0].tolist()
        parents[free[child]] = tree[parent]
        tree.append(free.pop(child))
    return parents
