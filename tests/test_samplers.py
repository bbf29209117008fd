"""pytest tests/test_samplers.py"""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.data.sampling import (
    EpochSampler,
    EvalSampler,
    SampleKey,
    aspect_ratio_groups,
    epochs_after,
    steps_ahead,
)
from toolkit.errors import BadInput

# A busy machine is no failure.
settings.register_profile("patient", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def ranks(num_samples, batch_size, world_size, **kwargs):
    return [EpochSampler(num_samples, batch_size, rank, world_size, **kwargs) for rank in range(world_size)]


def global_batches(samplers):
    """The remaining global micro-batches of all ranks together, checking that the ranks agree."""
    per_rank = [list(sampler) for sampler in samplers]
    assert len({len(batches) for batches in per_rank}) == 1
    assert all(batch for batches in per_rank for batch in batches), "a rank has an empty micro-batch"
    return [[key.index for rank_batch in batch for key in rank_batch] for batch in zip(*per_rank, strict=True)]


def flat(batches):
    return [index for batch in batches for index in batch]


@st.composite
def layouts(draw):
    """(num_samples, batch_size_per_device, world_size) that fit together."""
    world_size, batch_size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    return draw(st.integers(world_size * batch_size, 70)), batch_size, world_size


@st.composite
def group_ids(draw, count):
    kinds = draw(st.integers(1, 3))
    return np.array(draw(st.lists(st.integers(0, kinds - 1), min_size=count, max_size=count)))


@given(layouts(), st.integers(0, 2**40), st.integers(0, 5), st.data())
def test_every_sample_once_per_epoch(layout, seed, epoch, data):
    num_samples, batch_size, world_size = layout
    groups = data.draw(st.none() | group_ids(num_samples))
    samplers = ranks(*layout, seed=seed, groups=groups)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    batches = global_batches(samplers)
    assert sorted(flat(batches)) == list(range(num_samples))
    assert [len(batch) for batch in batches] == [samplers[0].samples_in_batch(i) for i in range(len(samplers[0]))]
    assert all(len(batch) == world_size * batch_size for batch in batches[:-1])
    for sampler in samplers:  # ranks differ by one sample at most
        for batch, own in zip(batches, sampler, strict=True):
            assert len(own) in (len(batch) // world_size, -(-len(batch) // world_size))
            assert {key.epoch for key in own} == {epoch}


@given(st.integers(8, 60), st.integers(0, 99))
def test_global_order_is_independent_of_ranks(num_samples, seed):
    """1 x 8, 2 x 4, 4 x 2: the same global micro-batches; other batch sizes: the same order."""
    expected = global_batches(ranks(num_samples, 8, 1, seed=seed))
    for world_size in (2, 4):
        batches = global_batches(ranks(num_samples, 8 // world_size, world_size, seed=seed))
        certain = num_samples // 8 - 1  # the last two may be joined: no rank goes empty
        assert batches[:certain] == expected[:certain]
        assert flat(batches) == flat(expected)
    assert flat(global_batches(ranks(num_samples, 3, 2, seed=seed))) == flat(expected)


def test_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        sampler = EpochSampler(50, 5, seed=seed)
        sampler.set_epoch(epoch)
        return flat(global_batches([sampler]))

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    unshuffled = EpochSampler(50, 5, shuffle=False)
    unshuffled.set_epoch(3)
    assert flat(global_batches([unshuffled])) == list(range(50))


def test_uneven_last_batch():
    two = ranks(13, 4, 2, shuffle=False)  # 8 + 5: 5 over two ranks are 3 and 2
    assert [[len(batch) for batch in sampler] for sampler in two] == [[4, 3], [4, 2]]
    assert [key.index for key in list(two[1])[1]] == [11, 12]
    three = ranks(11, 3, 3, shuffle=False)  # 9 + 2: two cannot be shared among three, so the batch before takes them
    assert [[len(batch) for batch in sampler] for sampler in three] == [[4], [4], [3]]
    assert len(three[0]) == 1 and three[0].samples_in_batch(0) == 11


def run(sampler, epochs, steps_per_save=None, stop_after=None):
    """Trains: consumes micro-batches in windows of two, running ahead as a loader does. Returns keys, last state."""
    keys, steps = [], 0
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        ahead = list(sampler)  # a loader may have asked for everything by now
        for first in range(0, len(ahead), 2):
            window = ahead[first : first + 2]
            keys += [key for batch in window for key in batch]
            sampler.advance_batches(len(window))
            steps += 1
            if steps == stop_after:
                return keys, sampler.state_dict()
    return keys, sampler.state_dict()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("stop_after", range(1, 18))
def test_three_epochs_equal_a_resumed_run(grouped, stop_after):
    groups = np.arange(50) % 3 if grouped else None
    for rank in range(2):
        whole, _ = run(EpochSampler(50, 2, rank, 2, seed=3, groups=groups), 3)
        before, state = run(EpochSampler(50, 2, rank, 2, seed=3, groups=groups), 3, stop_after=stop_after)
        resumed = EpochSampler(50, 2, rank, 2, seed=3, groups=groups)
        assert resumed.load_state_dict(json.loads(json.dumps(state))) == []
        after, _ = run(resumed, 3)
        assert before + after == whole


@given(layouts(), st.data())
def test_resume_at_any_batch(layout, data):
    groups = data.draw(st.none() | group_ids(layout[0]))
    whole = ranks(*layout, seed=5, groups=groups)
    expected = global_batches(whole)
    consumed = data.draw(st.integers(0, len(expected)))
    whole[0].advance_batches(consumed)
    assert whole[0].offset == len(flat(expected[:consumed])) and whole[0].next_batch == consumed
    resumed = ranks(*layout, seed=5, groups=groups)
    for sampler in resumed:
        assert sampler.load_state_dict(whole[0].state_dict()) == []
    assert global_batches(resumed) == expected[consumed:]


@given(layouts(), layouts(), st.data())
def test_resume_with_other_ranks(layout, other, data):
    """Stopped, resumed on other ranks, stopped and resumed once more: each sample still comes once per epoch."""
    num_samples = max(layout[0], other[0])
    groups = data.draw(st.none() | group_ids(num_samples))
    consumed, state = [], None
    for batch_size, world_size in (layout[1:], other[1:], layout[1:]):
        samplers = ranks(num_samples, batch_size, world_size, seed=8, groups=groups)
        notes = [sampler.load_state_dict(state) for sampler in samplers] if state else [[]]
        changed = bool(state) and (state["world_size"], state["batch_size"]) != (world_size, batch_size)
        assert bool(notes[0]) >= changed and all(note == notes[0] for note in notes)
        batches = global_batches(samplers)
        if groups is None and not consumed:
            order = flat(batches)
        taken = data.draw(st.integers(0, len(batches)))
        for sampler in samplers:
            sampler.advance_batches(taken)
        consumed += flat(batches[:taken])
        state = samplers[0].state_dict()
    left = batches[taken:]
    passed_over = num_samples - len(consumed) - len(flat(left))
    assert 0 <= passed_over < max(layout[2], other[2])
    assert len(set(consumed + flat(left))) == num_samples - passed_over
    if groups is None:
        assert consumed + flat(left) == order[: num_samples - passed_over]


def test_resume_notes_in_words():
    saved = EpochSampler(20, 4, 0, 2, seed=1)
    saved.advance(16)
    notes = EpochSampler(20, 3, 0, 5, seed=2).load_state_dict(saved.state_dict())
    assert "seed 1, not 2" in notes[0]
    assert "2 rank(s) x 4 images, this run has 5 x 3" in notes[1]
    assert "4 samples left, fewer than the 5 ranks" in notes[2]
    with pytest.raises(BadInput, match="stopped at sample 16 of 20.* now has 21 samples"):
        EpochSampler(21, 4).load_state_dict(saved.state_dict())


def test_the_order_goes_on_with_the_seed_of_the_checkpoint():
    saved = EpochSampler(20, 4, seed=1)
    saved.advance(8)
    other = EpochSampler(20, 4, seed=2)
    other.load_state_dict(saved.state_dict())
    assert global_batches([other]) == global_batches([saved])
    for sampler in (saved, other):
        sampler.set_epoch(1)
    assert global_batches([other]) == global_batches([saved]) and other.state_dict()["seed"] == 1


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.data())
def test_steps_ahead_are_those_that_are_made(num_samples, batch_size, window, after, data):
    """From anywhere, in any cut, to the end of any epoch."""
    batch_size = min(batch_size, num_samples)
    sampler = EpochSampler(num_samples, batch_size)
    sampler.set_epoch(data.draw(st.integers(0, 3)))
    sampler.advance_batches(data.draw(st.integers(0, len(sampler))))
    last, made = data.draw(st.integers(sampler.epoch + 1, 6)), 0
    assert steps_ahead(sampler, sampler.epoch + sampler.offset / num_samples, window, after) == 0
    expected = {}
    for epoch in range(sampler.epoch, last):
        left = sum(1 for _ in sampler) if epoch == sampler.epoch else len(sampler)
        made += -(-left // (window if epoch >= after else 1))
        expected[epoch + 1] = made
    for epochs, steps in expected.items():
        assert steps_ahead(sampler, epochs, window, after) == steps
    total = sampler.steps_in(last, window, after)
    assert epochs_after(sampler, total, window, after) == last


@given(st.integers(0, 30))
def test_resume_inside_a_batch(offset):
    """No run of ours stops there, but a state that says so is honoured."""
    whole = flat(global_batches([EpochSampler(30, 4, seed=2)]))
    resumed = EpochSampler(30, 4, seed=2)
    resumed.load_state_dict({**resumed.state_dict(), "offset": offset})
    assert flat(global_batches([resumed])) == whole[offset:]


def test_running_ahead_does_not_move_the_offset():
    sampler = EpochSampler(12, 3, seed=1)
    keys = iter(sampler)
    first = next(keys)
    sampler.advance(3)
    rest = list(keys)  # an iteration already begun is not disturbed
    assert len(rest) == 3 and sampler.offset == 3 and list(sampler) == rest
    sampler.set_epoch(0)  # the current epoch: goes on
    assert sampler.offset == 3
    sampler.set_epoch(1)
    assert sampler.offset == 0 and list(sampler)[0] != first
    with pytest.raises(ValueError, match=r"advance\(13\) at offset 0 of 12"):
        sampler.advance(13)


@given(layouts(), st.data())
def test_grouped_batches_are_homogeneous(layout, data):
    num_samples, batch_size, world_size = layout
    groups = data.draw(group_ids(num_samples))
    batches = global_batches(ranks(*layout, groups=groups))
    # Of each group all but a left-over smaller than a batch come in batches of their own, and those come first.
    global_batch = batch_size * world_size
    full = sum(np.bincount(groups) // global_batch)
    assert all(len(set(groups[batch[:global_batch]])) == 1 for batch in batches[:full])


def test_aspect_ratio_groups():
    sizes_hw = np.array([[100, 50], [100, 100], [100, 150], [100, 200], [100, 300]])
    assert aspect_ratio_groups(sizes_hw).tolist() == [0, 1, 1, 1, 1]
    assert aspect_ratio_groups(np.zeros((0, 2), np.int64)).shape == (0,)


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4))
def test_evaluation_covers_everything_in_step(num_samples, batch_size, world_size):
    samplers = [EvalSampler(num_samples, batch_size, rank, world_size) for rank in range(world_size)]
    per_rank = [list(sampler) for sampler in samplers]
    assert {len(batches) for batches in per_rank} == {len(samplers[0])}
    assert max(len(batch) for batches in per_rank for batch in batches) <= batch_size
    keys = [key for step in zip(*per_rank, strict=True) for batch in step for key in batch]
    assert keys == [SampleKey(0, i) for i in range(num_samples)]


def test_evaluation_with_fewer_samples_than_ranks():
    assert [list(EvalSampler(1, 4, rank, 3)) for rank in range(3)] == [[[SampleKey(0, 0)]], [[]], [[]]]


def test_bad_sizes():
    with pytest.raises(BadInput, match="2 process.*x 8 images = 16.*only 10.*at most 5"):
        EpochSampler(10, 8, 0, 2)
    with pytest.raises(BadInput, match="only 2: use fewer processes"):
        EpochSampler(2, 1, 0, 4)
    with pytest.raises(BadInput, match="no images"):
        EpochSampler(0, 1)
    with pytest.raises(BadInput, match="batch_size_per_device is 0"):
        EpochSampler(5, 0)
    with pytest.raises(BadInput, match="got 0 images"):
        EvalSampler(0, 1)
