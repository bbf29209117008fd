"""Samples of a batch whose images have different numbers of proposals and objects."""

import torch
from rcnn_data import target
from rows import boxes

from toolkit.detectors.faster_rcnn.samples import Sampler, padded_rows, padded_truths, sampled_boxes


def test_rows_are_padded_to_the_longest():
    assert padded_rows([(0, 2), (2, 1), (3, 0)], missing=9).tolist() == [[0, 1], [2, 9], [9, 9]]
    assert padded_rows([(0, 0)], missing=9).tolist() == [[9]]


def test_candidates_of_an_image_are_its_proposals_and_then_its_objects():
    """Three and one proposals, of which the first and the last are exact; one and two objects."""
    proposals = [boxes("0 0 9 9, 50 50 60 60, 30 0 40 9"), boxes("20 20 30 30")]
    truths = padded_truths([target("0 0 9 9"), target("5 5 15 15, 20 20 30 30")])
    everything = Sampler(
        high=0.5,
        low=0.5,
        size=100,
        positive_fraction=1.0,
        crowd_overlap=0.7,
        lowest=0.0,
        delta_weights=(1.0, 1.0, 1.0, 1.0),
    )
    rows, found, counts, parts = sampled_boxes(proposals, truths, everything, lambda lengths: torch.rand(sum(lengths)))
    assert counts == [4, 3]
    every = torch.cat([proposals[0], boxes("0 0 9 9"), proposals[1], boxes("5 5 15 15, 20 20 30 30")])
    assert sorted(rows.tolist()) == list(range(7))
    assert torch.equal(found, every[rows])
    assert parts["classes"][rows.argsort()].tolist() == [1, 0, 0, 1, 2, 1, 2]
    assert not parts["targets"].any()
    torch.testing.assert_close(parts["weights"], torch.tensor([1 / 4] * 4 + [1 / 3] * 3))
