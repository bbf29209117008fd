"""Random numbers are functions of the seed, step, process and micro-batch."""

import random

import numpy as np
import pytest
import torch

from toolkit.base.seeding import seed_step


def draws() -> tuple:
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()


def test_random_numbers_are_functions_of_seed_step_rank_and_micro_batch():
    places = [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (0, 1, 0, 0),
        (0, 0, 1, 0),
        (0, 0, 0, 1),
        (2**40, 10**7, 63, 5),
    ]
    seen = []
    for place in places:
        seed_step(*place)
        seen.append(draws())
    for kind in zip(*seen, strict=True):
        assert len(set(map(str, kind))) == len(places)
    for place, numbers in zip(reversed(places), reversed(seen), strict=True):
        seed_step(*place)
        assert draws() == numbers


@pytest.mark.parametrize(
    "kind, seeding", [("cuda", "manual_seed_all"), ("xpu", "manual_seed_all"), ("mps", "manual_seed")]
)
def test_accelerators_get_the_seed_of_the_cpu(kind, seeding, monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
    monkeypatch.setattr(getattr(torch, kind), seeding, seeds.append)
    seed_step(0, 1, 2)
    assert seeds == [torch.initial_seed()]
