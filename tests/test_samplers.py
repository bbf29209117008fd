"""The data order: each sample once in an epoch, on any ranks, resumed to the sample: pytest tests/test_samplers.py"""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.base.errors import BadInput
from toolkit.data.pipeline import aspect_ratio_groups
from toolkit.data.sampling import (
    EpochSampler,
    EvalSampler,
    SampleKey,
    VariableSizes,
    epochs_after,
    steps_ahead,
)

SIZES = ((128, 96), (160, 160), (192, 256))
BASE = (160, 160)


def ranks(num_samples, batch_size, world_size, epoch=0, **options):
    made = [EpochSampler(num_samples, batch_size, rank, world_size, **options) for rank in range(world_size)]
    for sampler in made:
        sampler.set_epoch(epoch)
    return made


def global_batches(samplers):
    """The keys of the remaining global micro-batches of all ranks together, checking that the ranks agree."""
    per_rank = [list(sampler) for sampler in samplers]
    assert len({len(batches) for batches in per_rank}) == 1
    assert all(batch for batches in per_rank for batch in batches), "a rank has an empty micro-batch"
    return [[key for rank_batch in batch for key in rank_batch] for batch in zip(*per_rank, strict=True)]


def flat(batches):
    """(index, turn) of each sample."""
    return [(key.index, key.turn) for batch in batches for key in batch]


@st.composite
def layouts(draw):
    world_size, batch_size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    return draw(st.integers(world_size * batch_size, 70)), batch_size, world_size


@st.composite
def group_ids(draw, count):
    kinds = draw(st.integers(1, 3))
    return np.array(draw(st.lists(st.integers(0, kinds - 1), min_size=count, max_size=count)))


@st.composite
def orders(draw, count):
    """Further arguments of a sampler of `count` images: all that changes the order or the batches."""
    kind = draw(st.sampled_from(("plain", "groups", "repeats", "grouped repeats", "blocks", "sizes", "pixels")))
    options = {"seed": draw(st.integers(0, 2**40))}
    if "group" in kind:
        options["groups"] = draw(group_ids(count))
    if "repeats" in kind:
        options["repeats"] = np.array(draw(st.lists(st.floats(1, 4), min_size=count, max_size=count)))
    if kind == "blocks":
        options["blocks"] = np.sort(draw(st.lists(st.integers(0, 13), min_size=count, max_size=count)))
    if kind in ("sizes", "pixels"):
        base_hw = BASE if kind == "pixels" else None
        options["sizes"] = VariableSizes(SIZES, draw(st.integers(1, 3)), base_hw)
    return options


@given(layouts(), st.integers(0, 5), st.data())
def test_every_sample_once_per_epoch(layout, epoch, data):
    num_samples, batch_size, world_size = layout
    order = data.draw(orders(num_samples))
    samplers = ranks(*layout, epoch, **order)
    batches = global_batches(samplers)
    seen = flat(batches)
    assert len(seen) == len(set(seen)) == samplers[0].num_samples
    repeats = order.get("repeats", np.ones(num_samples))
    counts = np.bincount([index for index, _ in seen], minlength=num_samples)
    assert len(seen) == round(repeats.sum()) and (abs(counts - repeats * len(seen) / repeats.sum()) < 1).all()
    assert set(seen) == {(index, turn) for index, count in enumerate(counts) for turn in range(count)}
    assert [len(batch) for batch in batches] == [samplers[0].samples_in_batch(i) for i in range(len(samplers[0]))]
    sizes = order.get("sizes")
    for i, batch in enumerate(batches):
        (size_hw,) = {key.size_hw for key in batch}
        images = batch_size
        if sizes is not None:
            assert size_hw in SIZES and (i % sizes.every == 0 or size_hw == batches[i - 1][0].size_hw)
            if sizes.base_hw:
                images = max(1, batch_size * 160 * 160 // (size_hw[0] * size_hw[1]))
        assert len(batch) == world_size * images or i == len(batches) - 1
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
    made = [flat(global_batches(ranks(50, 5, 1, epoch, seed=seed))) for seed in (0, 1, 2, 0) for epoch in (0, 1, 2)]
    assert made[9:] == made[:3] and len(set(map(tuple, made))) == 9
    assert flat(global_batches(ranks(50, 5, 1, 3, shuffle=False))) == [(i, 0) for i in range(50)]


def test_uneven_last_batch():
    two = ranks(13, 4, 2, shuffle=False)  # 8 + 5: 5 over two ranks are 3 and 2
    assert [[len(batch) for batch in sampler] for sampler in two] == [[4, 3], [4, 2]]
    assert [key.index for key in list(two[1])[1]] == [11, 12] and two[0].steps_of_epoch(0) == two[0].steps_in(1) == 2
    three = ranks(11, 3, 3, shuffle=False)  # 9 + 2: two cannot be shared among three, so the batch before takes them
    assert [[len(batch) for batch in sampler] for sampler in three] == [[4], [4], [3]]
    assert len(three[0]) == 1 and three[0].samples_in_batch(0) == 11


@given(layouts(), st.integers(0, 2), st.data())
def test_resume_at_any_batch(layout, epoch, data):
    order = data.draw(orders(layout[0]))
    whole = ranks(*layout, epoch, **order)
    expected = global_batches(whole)
    consumed = data.draw(st.integers(0, len(expected)))
    whole[0].advance_batches(consumed)
    assert whole[0].offset == len(flat(expected[:consumed])) and whole[0].next_batch == consumed
    resumed = ranks(*layout, **order | {"seed": 0})
    state = json.loads(json.dumps(whole[0].state_dict()))
    for sampler in resumed:
        notes = sampler.load_state_dict(state)
        assert len(notes) == (order["seed"] != 0)  # the order goes on with the seed of the checkpoint
    assert global_batches(resumed) == expected[consumed:]
    for sampler in (*whole, *resumed):
        sampler.set_epoch(epoch + 1)
    assert global_batches(resumed) == global_batches(ranks(*layout, epoch + 1, **order))


@given(layouts(), layouts(), st.data())
def test_resume_with_other_ranks(layout, other, data):
    num_samples = max(layout[0], other[0])
    order = data.draw(orders(num_samples))
    consumed, state = [], None
    for batch_size, world_size in (layout[1:], other[1:], layout[1:]):
        samplers = ranks(num_samples, batch_size, world_size, **order)
        notes = [sampler.load_state_dict(state) for sampler in samplers] if state else [[]]
        changed = bool(state) and (state["world_size"], state["batch_size"]) != (world_size, batch_size)
        assert bool(notes[0]) >= changed and all(note == notes[0] for note in notes)
        batches = global_batches(samplers)
        if not consumed:
            first = flat(batches)
        taken = data.draw(st.integers(0, len(batches)))
        for sampler in samplers:
            sampler.advance_batches(taken)
        consumed += flat(batches[:taken])
        state = samplers[0].state_dict()
    seen = consumed + flat(batches[taken:])
    total = samplers[0].num_samples
    assert 0 <= total - len(seen) < max(layout[2], other[2])  # fewer than the ranks are passed over
    plain = {name: value for name, value in order.items() if name not in ("groups", "blocks", "sizes")}
    everything = flat(global_batches(ranks(num_samples, 1, 1, **plain)))
    assert len(set(seen)) == len(seen) and set(seen) <= set(everything)
    if "groups" not in order and "blocks" not in order:
        assert seen == first[: len(seen)]


def test_resume_notes_in_words():
    saved = EpochSampler(20, 4, 0, 2, seed=1)
    saved.advance(16)
    notes = EpochSampler(20, 3, 0, 5, seed=2).load_state_dict(saved.state_dict())
    assert "seed 1, not 2" in notes[0]
    assert "2 rank(s) x 4 images, this run has 5 x 3" in notes[1]
    assert "4 samples left, fewer than the 5 ranks" in notes[2]
    with pytest.raises(BadInput, match="stopped at sample 16 of 20.* now has 21 samples"):
        EpochSampler(21, 4).load_state_dict(saved.state_dict())


@given(st.integers(2, 40), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.integers(0, 3), st.data())
def test_steps_ahead_are_those_that_are_made(num_samples, batch_size, world_size, window, after, data):
    batch_size = min(batch_size, num_samples // world_size)
    sizes = data.draw(st.sampled_from((None, VariableSizes(SIZES), VariableSizes(SIZES, base_hw=BASE))))
    sampler, future = (EpochSampler(num_samples, batch_size, 0, world_size, sizes=sizes) for _ in range(2))
    sampler.set_epoch(data.draw(st.integers(0, 3)))
    sampler.advance_batches(data.draw(st.integers(0, len(sampler))))
    last, made = data.draw(st.integers(sampler.epoch + 1, 6)), 0
    assert steps_ahead(sampler, sampler.epoch + sampler.offset / num_samples, window, after) == 0
    for epoch in range(sampler.epoch, last):
        future.set_epoch(epoch)
        left = sum(1 for _ in sampler) if epoch == sampler.epoch else len(future)
        made += -(-left // (window if epoch >= after else 1))
        assert steps_ahead(sampler, epoch + 1, window, after) == made
    total = sampler.steps_in(last, window, after)
    assert epochs_after(sampler, total, window, after) == last


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
    assert all(len({groups[key.index] for key in batch[:global_batch]}) == 1 for batch in batches[:full])
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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EpochSampler(10, 8, 0, 2), "2 process.*x 8 images = 16.*only 10.*at most 5"),
        (lambda: EpochSampler(2, 1, 0, 4), "only 2: use fewer processes"),
        (lambda: EpochSampler(0, 1), "no images"),
        (lambda: EpochSampler(5, 0), "batch_size_per_device is 0"),
        (lambda: EvalSampler(0, 1), "got 0 images"),
        (lambda: EpochSampler(50, 4, groups=[0] * 50, sizes=VariableSizes(SIZES, base_hw=BASE)), "aspect ratio"),
        (lambda: VariableSizes(()), "size"),
        (lambda: VariableSizes(((0, 32),)), "size"),
        (lambda: VariableSizes(SIZES, every=0), "size"),
    ],
)
def test_bad_sizes(make, words):
    with pytest.raises(BadInput, match=words):
        make()
