"""Weights and priors of predicates from the counts of the training data."""

import numpy as np
import pytest
import torch

from toolkit.detectors.scene_graphs.frequency import class_balanced_weights, log_prior, predicate_weights
from toolkit.detectors.scene_graphs.relation_batch import predicate_loss


@pytest.fixture
def counts():
    """900 + 100, 100, 1 and no relations of the predicates 1 to 4; column 0 does not count."""
    counts = np.zeros((2, 2, 5), np.int64)
    counts[0, 1] = [900, 1000, 100, 1, 0]
    return counts


def test_rare_predicates_weigh_more(counts):
    weights = predicate_weights(counts)
    assert weights[2] / weights[1] == pytest.approx(10**0.5)
    assert weights[0] == weights[4] == 1
    assert float(weights[1:4] @ torch.tensor([1000.0, 100, 1])) == pytest.approx(1101, rel=1e-5)
    logits = torch.zeros(3, 5)
    total, count = predicate_loss(
        logits,
        torch.tensor([0, 1, 2]),
        [3],
        weights=weights,
    )
    assert float(total / count) == pytest.approx(np.log(5))


def test_effective_numbers_weigh_rare_predicates(counts):
    weights = class_balanced_weights(counts, 0.99).double()
    effective = torch.tensor([(1 - 0.99**n) / (1 - 0.99) for n in (1000, 100, 1)])
    torch.testing.assert_close(
        weights[1:4] * effective,
        (weights[1] * effective[0]).expand(3),
        rtol=1e-4,
        atol=0,
    )
    assert weights[0] == weights[4] == 1
    assert float(weights[1:4] @ torch.tensor([1000.0, 100, 1]).double()) == pytest.approx(1101, rel=1e-5)


def test_the_prior_is_the_share_of_a_predicate(counts):
    prior = log_prior(torch.from_numpy(counts))
    assert prior[0] == 0
    assert prior[1] > prior[2] > prior[3] == prior[4], "never seen counts as seen once"
    torch.testing.assert_close(prior[1:].exp().sum(), torch.tensor(1.0))
