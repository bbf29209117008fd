"""The data order: each sample once in an epoch, on any ranks, resumed to the sample."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.base.errors import BadInput
from toolkit.data.sampling import EpochSampler, EvalSampler, SampleKey, VariableSizes, epochs_after, steps_ahead

SIZES = ((128, 96), (160, 160), (192, 256))
BASE = (160, 160)
KINDS = ("plain", "groups", "repeats", "grouped repeats", "blocks", "pictures", "sizes", "pixels")


def ranks(num_samples, batch_size, world_size, epoch=0, **options):
    made = [
        EpochSampler(
            num_samples,
            batch_size,
            rank,
            world_size,
            **options,
        )
        for rank in range(world_size)
    ]
    for sampler in made:
        sampler.set_epoch(epoch)
    return made


def global_batches(samplers):
    """The keys of the remaining global micro-batches of all ranks together; the ranks agree, and none goes empty."""
    batches = []
    for of_ranks in zip(*samplers, strict=True):
        assert all(of_ranks)
        batches.append([key for own in of_ranks for key in own])
    return batches


def flat(batches):
    """(index, turn) of each sample."""
    return [(key.index, key.turn) for batch in batches for key in batch]


@st.composite
def layouts(draw):
    world_size = draw(st.integers(1, 4))
    batch_size = draw(st.integers(1, 5))
    return draw(st.integers(world_size * batch_size, 70)), batch_size, world_size


@st.composite
def orders(draw, count):
    """Further arguments of a sampler of `count` images: all that changes the order or the batches."""
    kind = draw(st.sampled_from(KINDS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    options = {"seed": draw(st.integers(0, 2**40))}
    if "group" in kind:
        options["groups"] = rng.integers(
            0,
            draw(st.integers(1, 3)),
            count,
        )
    if "repeats" in kind:
        options["repeats"] = rng.uniform(1, 4, count)
    if kind in ("blocks", "pictures"):
        options[kind] = np.sort(rng.integers(0, 14, count))
    if kind in ("sizes", "pixels"):
        options["sizes"] = VariableSizes(
            SIZES,
            draw(st.integers(1, 3)),
            BASE if kind == "pixels" else None,
        )
    return options


@given(layouts(), st.integers(0, 5), st.data())
def test_every_sample_comes_once_in_an_epoch(layout, epoch, data):
    num_samples, batch_size, world_size = layout
    order = data.draw(orders(num_samples))
    samplers = ranks(*layout, epoch, **order)
    seen = flat(global_batches(samplers))
    counts = np.bincount([index for index, _ in seen], minlength=num_samples)
    assert len(seen) == samplers[0].num_samples
    assert set(seen) == {(index, turn) for index, count in enumerate(counts) for turn in range(count)}
    repeats = order.get("repeats", np.ones(num_samples))
    assert len(seen) == round(repeats.sum())
    assert (abs(counts - repeats * len(seen) / repeats.sum()) < 1).all()


@given(layouts(), st.integers(0, 5), st.data())
def test_batches_are_full_but_for_the_last_and_shared_evenly(layout, epoch, data):
    num_samples, batch_size, world_size = layout
    order = data.draw(orders(num_samples))
    samplers = ranks(*layout, epoch, **order)
    batches = global_batches(samplers)
    sizes = order.get("sizes")
    assert len(samplers[0]) == len(batches)
    for number, batch in enumerate(batches):
        images = batch_size
        (size_hw,) = {key.size_hw for key in batch}
        if sizes is not None:
            assert size_hw in SIZES
            assert number % sizes.every == 0 or size_hw == batches[number - 1][0].size_hw
        if sizes is not None and sizes.base_hw:
            images = max(1, batch_size * 160 * 160 // (size_hw[0] * size_hw[1]))
        assert len(batch) == samplers[0].samples_in_batch(number)
        assert len(batch) == world_size * images or number == len(batches) - 1
        assert {key.epoch for key in batch} == {epoch}
    for sampler in samplers:
        for batch, own in zip(batches, sampler, strict=True):
            assert len(own) in (len(batch) // world_size, -(-len(batch) // world_size))


@given(
    st.integers(8, 60),
    st.integers(0, 99),
    st.sampled_from([None, "pictures"]),
)
def test_the_global_order_does_not_depend_on_ranks(num_samples, seed, kind):
    """1 x 8, 2 x 4, 4 x 2: the same global micro-batches; other batch sizes: the same order."""
    options = {"seed": seed}
    if kind:
        options[kind] = np.arange(num_samples) // 9
    expected = global_batches(ranks(num_samples, 8, 1, **options))
    for world_size in (2, 4):
        batches = global_batches(ranks(num_samples, 8 // world_size, world_size, **options))
        certain = num_samples // 8 - 1  # the last two may be joined: no rank goes empty
        assert batches[:certain] == expected[:certain]
        assert flat(batches) == flat(expected)
    assert flat(global_batches(ranks(num_samples, 3, 2, **options))) == flat(expected)


def test_the_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        return tuple(flat(global_batches(ranks(50, 5, 1, epoch, seed=seed))))

    drawn = {order(seed, epoch) for seed in (0, 1, 2) for epoch in (0, 1, 2)}
    assert len(drawn) == 9
    assert order(0, 1) in drawn
    in_order = flat(global_batches(ranks(50, 5, 1, 3, shuffle=False)))
    assert in_order == [(index, 0) for index in range(50)]


def test_an_uneven_last_batch_is_shared_or_joined_with_the_one_before():
    two = ranks(13, 4, 2, shuffle=False)  # 8 + 5: 5 over two ranks are 3 and 2
    assert [[len(batch) for batch in sampler] for sampler in two] == [[4, 3], [4, 2]]
    assert [key.index for key in list(two[1])[1]] == [11, 12]
    assert two[0].steps_of_epoch(0) == two[0].steps_in(1) == 2
    three = ranks(11, 3, 3, shuffle=False)  # 9 + 2: two cannot be shared among three, so the batch before takes them
    assert [[len(batch) for batch in sampler] for sampler in three] == [[4], [4], [3]]
    assert three[0].samples_in_batch(0) == 11


@given(layouts(), st.integers(0, 2), st.data())
def test_a_resume_goes_on_at_any_batch(layout, epoch, data):
    order = data.draw(orders(layout[0]))
    whole = ranks(*layout, epoch, **order)
    expected = global_batches(whole)
    consumed = data.draw(st.integers(0, len(expected)))
    whole[0].advance_batches(consumed)
    assert whole[0].offset == len(flat(expected[:consumed]))
    assert whole[0].next_batch == consumed
    resumed = ranks(*layout, **order | {"seed": 0})
    state = json.loads(json.dumps(whole[0].state_dict()))
    for sampler in resumed:
        notes = sampler.load_state_dict(state)
        assert len(notes) == (order["seed"] != 0)  # the order goes on with the seed of the checkpoint
    assert global_batches(resumed) == expected[consumed:]
    for sampler in resumed:
        sampler.set_epoch(epoch + 1)
    assert global_batches(resumed) == global_batches(ranks(*layout, epoch + 1, **order))


@given(layouts(), layouts(), st.data())
def test_a_resume_on_other_ranks_has_the_samples_that_are_left(layout, other, data):
    num_samples = max(layout[0], other[0])
    order = data.draw(orders(num_samples))
    consumed = []
    state = None
    for batch_size, world_size in (
        layout[1:],
        other[1:],
        layout[1:],
    ):
        samplers = ranks(num_samples, batch_size, world_size, **order)
        if state:
            notes = [sampler.load_state_dict(state) for sampler in samplers]
            assert notes[0] or (state["world_size"], state["batch_size"]) == (world_size, batch_size)
            assert all(note == notes[0] for note in notes)
        batches = global_batches(samplers)
        if not state:
            first = flat(batches)
        taken = data.draw(st.integers(0, len(batches)))
        for sampler in samplers:
            sampler.advance_batches(taken)
        consumed += flat(batches[:taken])
        state = samplers[0].state_dict()
    seen = consumed + flat(batches[taken:])
    assert 0 <= len(first) - len(seen) < max(layout[2], other[2])  # fewer than the ranks are passed over
    assert len(set(seen)) == len(seen)
    assert set(seen) <= set(first)
    if "groups" not in order and "blocks" not in order:
        assert seen == first[: len(seen)]


def test_what_a_resume_cannot_keep_is_told():
    saved = EpochSampler(20, 4, 0, 2, seed=1)
    saved.advance(16)
    notes = EpochSampler(20, 3, 0, 5, seed=2).load_state_dict(saved.state_dict())
    assert "seed 1, not 2" in notes[0]
    assert "2 rank(s) x 4 images, this run has 5 x 3" in notes[1]
    assert "4 samples left, fewer than the 5 ranks" in notes[2]
    with pytest.raises(BadInput, match="stopped at sample 16 of 20.* now has 21 samples"):
        EpochSampler(21, 4).load_state_dict(saved.state_dict())


@given(
    layouts(),
    st.integers(1, 4),
    st.integers(0, 3),
    st.data(),
)
def test_steps_ahead_are_those_that_are_made(layout, window, after, data):
    sizes = data.draw(
        st.sampled_from(
            (
                None,
                VariableSizes(SIZES),
                VariableSizes(SIZES, base_hw=BASE),
            )
        )
    )
    sampler = ranks(*layout, data.draw(st.integers(0, 3)), sizes=sizes)[0]
    future = ranks(*layout, sizes=sizes)[0]
    sampler.advance_batches(data.draw(st.integers(0, len(sampler))))
    assert steps_ahead(sampler, sampler.epoch + sampler.offset / layout[0], window, after) == 0
    last = sampler.epoch + 2
    made = 0
    for epoch in range(sampler.epoch, last):
        future.set_epoch(epoch)
        left = len(list(sampler if epoch == sampler.epoch else future))
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
    assert len(rest) == 3
    assert list(sampler) == rest
    sampler.set_epoch(0)  # the current epoch: goes on
    assert sampler.offset == 3
    with pytest.raises(ValueError, match=r"advance\(10\) at offset 3 of 12"):
        sampler.advance(10)
    sampler.set_epoch(1)
    assert sampler.offset == 0
    assert next(iter(sampler)) != first


def test_a_sampler_is_cut_for_other_ranks():
    """As a resumed run with other batches asks for."""
    sampler = EpochSampler(
        10,
        2,
        groups=np.arange(10) % 2,
        repeats=np.full(10, 1.5),
    )
    other = sampler.cut_as(2, 3)
    assert other.num_samples == sampler.num_samples == 15
    assert len(other) == 3


@given(
    layouts(),
    st.integers(1, 3),
    st.integers(0, 2**32),
)
def test_grouped_batches_are_of_one_group(layout, kinds, seed):
    num_samples, batch_size, world_size = layout
    groups = np.random.default_rng(seed).integers(0, kinds, num_samples)
    batches = global_batches(ranks(*layout, groups=groups))
    # Of each group all but a left-over smaller than a batch come in batches of their own, and those come first.
    global_batch = batch_size * world_size
    full = sum(np.bincount(groups) // global_batch)
    for batch in batches[:full]:
        assert len({groups[key.index] for key in batch[:global_batch]}) == 1


@given(
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_an_evaluation_covers_everything_in_step(num_samples, batch_size, world_size):
    samplers = [EvalSampler(num_samples, batch_size, rank, world_size) for rank in range(world_size)]
    keys = []
    for step in zip(*samplers, strict=True):
        for batch in step:
            assert len(batch) <= batch_size
            keys += batch
    assert keys == [SampleKey(0, index) for index in range(num_samples)]
    assert len(list(samplers[0])) == len(samplers[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((10, 8, 0, 2), "2 process.*x 8 images = 16.*only 10.*at most 5"),
        ((2, 1, 0, 4), "only 2: use fewer processes"),
        ((0, 1), "no images"),
        ((5, 0), "batch_size_per_device is 0"),
    ],
)
def test_batches_that_cannot_be_are_refused(arguments, words):
    with pytest.raises(BadInput, match=words):
        EpochSampler(*arguments)


def test_groups_with_batches_of_varying_length_are_refused():
    with pytest.raises(BadInput, match="aspect ratio"):
        EpochSampler(
            50,
            4,
            groups=[0] * 50,
            sizes=VariableSizes(SIZES, base_hw=BASE),
        )
    with pytest.raises(BadInput, match="got 0 images"):
        EvalSampler(0, 1)


@pytest.mark.parametrize(
    ("sizes", "every"),
    [
        ((), 1),
        (((0, 32),), 1),
        (SIZES, 0),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, every):
    with pytest.raises(BadInput, match="images of varying size need sizes"):
        VariableSizes(sizes, every)
