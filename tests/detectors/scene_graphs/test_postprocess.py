"""From logits to ranked triplets: labels of overlapping objects, and which triplets are kept."""

import json

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relation_data import CLASSES, PREDICATES, batch_of

from toolkit.data.table import Category
from toolkit.detectors.scene_graphs.box_features import iou_plus_one
from toolkit.detectors.scene_graphs.formats import relations_as_json
from toolkit.detectors.scene_graphs.postprocess import graphs_on_host, late_nms, rank_triplets, shortlist
from toolkit.detectors.scene_graphs.relation_batch import RelationOutput
from toolkit.evaluation.predictions import best_first, detections_as_json


def plain_late_nms(boxes, logits, threshold):
    """The published loop, for one image."""
    scores = logits.softmax(1)
    scores[:, 0] = 0
    ious = iou_plus_one(boxes[:, None], boxes[None])
    labels = torch.zeros(len(boxes), dtype=torch.int64)
    free = torch.ones(len(boxes), dtype=torch.bool)
    for _ in range(len(boxes)):
        n, c = divmod(int(scores.masked_fill(~free[:, None], -1).argmax()), scores.shape[1])
        if scores[n, c] > 0:
            labels[n] = c
            scores[free & (ious[n, :, c] >= threshold), c] = 0
        free[n] = False
    return labels


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.integers(0, 7),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 10**6),
)
def test_late_nms_is_that_of_the_loop(num_objects, seed):
    batch = batch_of(num_objects, seed)
    labels = late_nms(batch.boxes_per_class, batch.logits, num_objects, 0.3)
    images = [column.split(num_objects) for column in (labels, batch.boxes_per_class, batch.logits)]
    for found, boxes, logits in zip(*images, strict=True):
        assert torch.equal(found, plain_late_nms(boxes, logits, 0.3))


def test_a_box_that_lost_every_class_scores_nothing():
    output = RelationOutput(torch.zeros(4, 3), torch.randn(12, PREDICATES), None)
    batch = batch_of([4])
    batch.boxes_per_class = torch.tensor([[0.0, 0, 50, 50]]).expand(
        4,
        3,
        4,
    )
    (graph,) = graphs_on_host(
        *rank_triplets(output, batch, given_boxes=False),
        [4],
        [12],
    )
    assert sorted(graph["labels"].tolist()) == [-1, -1, 0, 1]
    assert (graph["scores"][graph["labels"] < 0] == 0).all()
    assert (graph["triplet_scores"].diff() <= 0).all()
    found = best_first(graph)
    listed = detections_as_json(found, [Category(7, "cat"), Category(9, "dog")])
    assert sorted(entry["category_id"] for entry in listed) == [7, 9]
    relations = json.loads(json.dumps(relations_as_json(found, list("abcd"))))
    assert [sorted((entry["subject"], entry["object"])) for entry in relations] == [[0, 1], [0, 1]]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.integers(0, 10**6),
    st.sampled_from([0, 1, 7, 100]),
)
def test_the_best_triplets_are_those_of_each_image(num_objects, seed, top_k):
    """The best of each image, then what else is annotated, each best first; equal scores in the order of the pairs."""
    batch = batch_of(num_objects, seed)
    batch.relation_labels = batch.relation_labels.clamp(max=2) // 2  # some
    related = (batch.relation_labels > 0).split(batch.num_pairs)
    predicates = torch.randint(0, 2, (sum(batch.num_pairs), PREDICATES)).float()  # equal ones
    output = RelationOutput(
        torch.randint(0, 2, (sum(num_objects), CLASSES)).float(),
        predicates,
        None,
    )
    objects, triplets = rank_triplets(output, batch, given_boxes=True)
    short, counts = shortlist(
        triplets,
        batch.num_pairs,
        top_k,
        [int(own.sum()) + 1 for own in related],
    )
    graphs = graphs_on_host(objects, short, num_objects, counts)
    probability = predicates.softmax(1)[:, 1:]
    of_pairs = probability.amax(1) * objects["scores"][batch.pairs[:, 0]] * objects["scores"][batch.pairs[:, 1]]
    columns = [column.split(batch.num_pairs) for column in (batch.pairs, of_pairs, probability)]
    first = 0
    for graph, count, pairs, scores, own, annotated in zip(
        graphs,
        num_objects,
        *columns,
        related,
        strict=True,
    ):
        order = scores.argsort(descending=True, stable=True)
        kept = annotated[order] | (torch.arange(len(order)) < top_k)
        rows = order[kept]
        assert torch.equal(graph["pairs"], pairs[rows] - first)
        assert torch.equal(graph["triplet_scores"], scores[rows])
        assert torch.equal(graph["predicate_scores"], own[rows])
        assert len(graph["boxes"]) == count
        first += count
