"""The data order: which samples go to which rank, as a function of (seed, epoch) that can be interrupted and resumed.

The global order of an epoch does not know about ranks. One *global micro-batch* is the next `world_size * batch_size`
samples of it; rank r takes the r-th contiguous slice. So 1 x 16, 2 x 8 and 4 x 4 see the same samples at the same step.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from toolkit.base.errors import BadInput

MIXED_BLOCKS = 4  # blocks whose samples are shuffled together, if samples are read by blocks
MIXED_PICTURES = 16  # pictures whose tiles are shuffled together


class SampleKey(NamedTuple):
    """Key of a sample. It carries the epoch, so that persistent workers need no update.

    size_hw: the size of the batch's images, if it varies; None: the transform decides.
    turn: how often this image came before in this epoch, if images are repeated.
    """

    epoch: int
    index: int
    size_hw: tuple[int, int] | None = None
    turn: int = 0


@dataclass(frozen=True)
class VariableSizes:
    """Sampler of the image size of an epoch's i-th global micro-batch, drawn uniformly from the sizes.

    The size is the same on all ranks, a function of (seed, epoch, i), and travels in the keys of the samples.

    Args:
        sizes_hw: the sizes, (height, width) in pixels; a single size is that of every batch.
        every: micro-batches between two draws, 10 in YOLO.
        base_hw: the image size that the configured batch size is meant for. A batch of another size has as many images
            as possible without having more pixels than a batch of this size, but at least one. None: all batches have
            the configured batch size.
    """

    sizes_hw: tuple[tuple[int, int], ...]
    every: int = 1
    base_hw: tuple[int, int] | None = None

    def __post_init__(self):
        sizes = list(self.sizes_hw)
        if self.base_hw is not None:
            sizes.append(self.base_hw)
        has_empty = any(min(size_hw) < 1 for size_hw in sizes)
        if not self.sizes_hw or has_empty or self.every < 1:
            raise BadInput(
                "images of varying size need sizes (height, width) of at least one pixel, and at least one batch "
                f"between two of them; got {self}"
            )

    def draw(self, seed: int, epoch: int, count: int) -> list[tuple[int, int]]:
        """Draw (h, w) of the first `count` micro-batches of an epoch; a larger count begins with the same sizes."""
        rng = np.random.default_rng((seed, epoch, 1))
        draws = rng.random(-(-count // self.every))
        chosen = (draws * len(self.sizes_hw)).astype(int)
        of_batches = np.repeat(chosen, self.every)[:count]
        return [self.sizes_hw[i] for i in of_batches]

    def batch_size(self, size_hw: tuple[int, int], batch_size: int) -> int:
        """Return the number of images in a batch of images of this size, for the configured `batch_size`."""
        if self.base_hw is None:
            return batch_size
        height, width = size_hw
        base_height, base_width = self.base_hw
        pixels = batch_size * base_height * base_width
        return max(1, pixels // (height * width))

    def largest(self, batch_size: int) -> tuple[tuple[int, int], int]:
        """Return the size (h, w) whose batches have the most pixels, and the number of images in such a batch.

        If several sizes have as many pixels, it is the one with the larger images.
        """

        def pixels_and_size(pair: tuple[tuple[int, int], int]) -> tuple[int, tuple[int, int]]:
            (height, width), images = pair
            return height * width * images, (height, width)

        pairs = [(size_hw, self.batch_size(size_hw, batch_size)) for size_hw in self.sizes_hw]
        return max(pairs, key=pixels_and_size)


def split_evenly(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return [start, stop) of this rank's share of `count` consecutive samples; 5 over 2 ranks are 3 and 2."""
    share, extra = divmod(count, world_size)
    start = rank * share + min(rank, extra)
    if rank < extra:
        share += 1
    return start, start + share


def batch_ends(count: int, full_sizes: int | np.ndarray, world_size: int) -> np.ndarray:
    """Return (B,) int64: the end of each global micro-batch of `count` samples: full ones, then the remainder.

    full_sizes: the number of samples of every full batch, or an array with the number for each batch in turn. If fewer
    samples than ranks are left over, they are added to the last full batch. If there are fewer samples than ranks in
    all, nothing is yielded.

    On 2 ranks, 10 samples in batches of 4 end at [4, 8, 10], and 9 samples at [4, 9].
    """
    if isinstance(full_sizes, int):
        full_sizes = np.full(count // full_sizes, full_sizes)
    ends = np.cumsum(full_sizes)
    ends = ends[ends <= count]
    if count - ends.max(initial=0) >= world_size:
        return np.append(ends, count)
    ends[-1:] = count
    return ends


def group_order(order: np.ndarray, groups: np.ndarray, global_batch: int) -> np.ndarray:
    """Return `order` rearranged so that each `global_batch` consecutive samples are of one group.

    A batch of a group comes as soon as `order` has enough samples of this group.
    The left-over samples of each group come last, sorted by group, so that only a few batches are mixed.
    """
    waiting: dict[int, list[int]] = {}
    arranged: list[int] = []
    for index, group in zip(order.tolist(), groups[order].tolist(), strict=True):
        samples = waiting.setdefault(group, [])
        samples.append(index)
        if len(samples) == global_batch:
            arranged += samples
            waiting[group] = []
    for group in sorted(waiting):
        arranged += waiting[group]
    return np.array(arranged, dtype=np.int64)


def block_order(blocks: np.ndarray, rng: np.random.Generator, mixed: int = MIXED_BLOCKS) -> np.ndarray:
    """Draw a random order of n samples, in which samples of the same block are close together.

    blocks: (n,) the block of each sample. The blocks are shuffled, and then the samples of each `mixed` successive
    blocks are shuffled together.
    """
    names, block = np.unique(blocks, return_inverse=True)
    place_of_block = rng.permutation(len(names))
    pool = place_of_block[block] // mixed  # (n,) blocks of one pool are mixed
    within_pool = rng.permutation(len(blocks))
    return np.lexsort((within_pool, pool))


def rank_runs(order: np.ndarray, batch_size: int, world_size: int) -> np.ndarray:
    """Return `order` rearranged so that each rank walks through one contiguous part of the original order.

    Global micro-batches are cut out of the result as `batch_ends` says, and each is shared by `split_evenly`.

    Samples 0 to 9 on 2 ranks with batches of 2 become 0 1 5 6, 2 3 7 8, 4 9: rank 0 has 0 to 4, rank 1 has 5 to 9.
    """
    ends = batch_ends(len(order), world_size * batch_size, world_size)
    if world_size == 1 or not len(ends):
        return order
    whole = (len(ends) - 1) * batch_size  # samples of a rank in full batches
    uneven = int(ends[-1]) - whole * world_size  # samples of all ranks in the last batch
    full = []
    remainders = []
    first = 0
    for rank in range(world_size):
        start, stop = split_evenly(uneven, rank, world_size)
        last = first + whole + stop - start
        run = order[first:last]
        full.append(run[:whole].reshape(-1, batch_size))
        remainders.append(run[whole:])
        first = last
    full_batches = np.stack(full, axis=1)  # (batches, ranks, batch_size)
    return np.concatenate([full_batches.reshape(-1), *remainders, order[first:]])


class EpochSampler:
    """Batch sampler of one rank for training: iterates over lists of SampleKey, every sample once per epoch.

    Every rank yields the same number of micro-batches and none is empty. Only the epoch's last one is uneven.

    `offset`, in the state, counts the samples (of all ranks) that training has *consumed*. A loader with workers
    iterates ahead of training, so iterating does not move it: the training loop calls `advance` (or `advance_batches`)
    after each optimizer step. An iteration starts at the offset as it stands when `iter()` is called.

    Args:
        num_samples: samples in the dataset.
        batch_size_per_device: samples per rank in a micro-batch.
        rank, world_size: the rank of this process, and the number of processes.
        seed: the order depends only on it and the epoch.
        groups: (num_samples,) int; global micro-batches are then of one group (aspect ratios), left-overs mixed.
            The order then depends on `world_size * batch_size_per_device` too.
        shuffle: False keeps the dataset's order.
        sizes: the images' size varies from micro-batch to micro-batch, and with it the number of images if `sizes`
            says so; the keys then carry the size.
        repeats: (num_samples,) how often each image is shown in an epoch, on average. An epoch then has round(sum)
            samples, each image so often or once more or less, which is drawn anew in every epoch.
        strata: (num_samples,) int; each of these groups then has its part of the repeats in every epoch, off by at most
            one sample. None: all are one group.
        blocks: (num_samples,) int; samples of one block, such as a row group of a Parquet file, are read together. The
            order is then that of `block_order`, and each rank has blocks of its own (`rank_runs`), so that the order
            depends on `world_size * batch_size_per_device` too.
        pictures: (num_samples,) int, the picture that each sample is a tile of. The tiles of `MIXED_PICTURES`
            pictures are then shuffled together, so that a picture need not be decoded for each of its tiles.

    Raises BadInput when a global micro-batch is larger than the dataset, or for groups with batches of varying length.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size_per_device: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        groups: np.ndarray | None = None,
        shuffle: bool = True,
        sizes: VariableSizes | None = None,
        repeats: np.ndarray | None = None,
        blocks: np.ndarray | None = None,
        strata: np.ndarray | None = None,
        pictures: np.ndarray | None = None,
    ):
        if groups is not None and len(groups) != num_samples:
            raise ValueError(f"groups has {len(groups)} entries for {num_samples} samples")
        if repeats is not None:
            num_samples = int(round(float(np.sum(repeats))))
        self.repeats = repeats
        self.blocks = blocks
        self.strata = strata
        self.pictures = pictures
        _check_sizes(num_samples, batch_size_per_device, world_size)
        self.seed = seed
        self.groups = groups
        self.shuffle = shuffle
        self.sizes = sizes
        if groups is not None and self._count_varies:
            raise BadInput(
                "batches of like aspect ratio cannot have a number of images that follows their size: set "
                "data.group_by_aspect_ratio or data.multi_scale_pixels to false"
            )
        self.num_samples = num_samples
        self.batch_size = batch_size_per_device
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self._start(offset=0, layout=[])

    kept_in_rollback = True  # the data go on behind the window that broke

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; do nothing if it is the current one, so that a resumed run keeps its offset."""
        if epoch != self.epoch:
            self.epoch = epoch
            self._start(offset=0, layout=[])

    def advance(self, n_samples: int) -> None:
        """Record that training has consumed this many more samples, counted over all ranks."""
        if not 0 <= n_samples <= self.num_samples - self.offset:
            raise ValueError(f"advance({n_samples}) at offset {self.offset} of {self.num_samples} samples")
        self.offset += n_samples

    def advance_batches(self, n_batches: int) -> None:
        """Record that training has consumed this many more global micro-batches."""
        first = self.next_batch
        counts = [self.samples_in_batch(i) for i in range(first, first + n_batches)]
        self.advance(sum(counts))

    @property
    def next_batch(self) -> int:
        """Index, in the epoch, of the first global micro-batch that training has not consumed."""
        return int(np.searchsorted(self._ends, self.offset, side="right"))

    def samples_in_batch(self, i: int) -> int:
        """Return the number of samples of all ranks in the epoch's i-th global micro-batch.

        i counts from the epoch's start, also after resuming.
        """
        start = self._ends[i - 1] if i else 0
        return int(self._ends[i] - start)

    def __len__(self) -> int:
        """Return the number of micro-batches in the whole epoch."""
        return len(self._ends)

    def steps_of_epoch(self, epoch: int, accumulation_steps: int = 1, accumulate_after_epoch: int = 0) -> int:
        """Return the number of optimizer steps of a whole epoch; for the last two arguments see `accumulation_at`.

        If the number of images follows their size, the number of micro-batches depends on the sizes drawn in the epoch.
        """
        drawn = self.sizes.draw(self.seed, epoch, self.num_samples + 1) if self._count_varies else None
        ends = self._batch_ends(self.num_samples, drawn, self.world_size, self.batch_size)
        accumulation = accumulation_at(epoch, accumulation_steps, accumulate_after_epoch)
        return -(-len(ends) // accumulation)

    @property
    def _count_varies(self) -> bool:
        return self.sizes is not None and self.sizes.base_hw is not None

    def _batch_ends(self, count: int, drawn: list | None, world_size: int, batch_size: int) -> np.ndarray:
        """Return `batch_ends` of batches whose images have the sizes `drawn`."""
        if not self._count_varies:
            return batch_ends(count, world_size * batch_size, world_size)
        images = [self.sizes.batch_size(size_hw, batch_size) for size_hw in drawn]
        return batch_ends(count, world_size * np.array(images), world_size)

    def steps_in(self, epochs: int, accumulation_steps: int = 1, accumulate_after_epoch: int = 0) -> int:
        """Return the number of optimizer steps of the first `epochs` epochs together; see `steps_of_epoch`."""
        steps = 0
        for epoch in range(epochs):
            steps += self.steps_of_epoch(epoch, accumulation_steps, accumulate_after_epoch)
        return steps

    def cut_as(self, world_size: int, batch_size: int) -> "EpochSampler":
        """Return a copy of this sampler at the start of the first epoch, for other numbers of ranks and batch sizes."""
        other = copy.copy(self)
        other.world_size = world_size
        other.batch_size = batch_size
        other.epoch = 0
        other._start(offset=0, layout=[])
        return other

    def __iter__(self) -> Iterator[list[SampleKey]]:
        now = copy.copy(self)  # an iteration that runs ahead must not notice `advance` or `set_epoch`
        return (now._keys(i) for i in range(now.next_batch, len(now)))

    def state_dict(self) -> dict[str, object]:
        """Return the state, JSON-able.

        It has seed, epoch, offset, world_size, batch_size and num_samples; `layout` and `sizes` describe how the epoch
        is cut into micro-batches.
        """
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "offset": self.offset,
            "world_size": self.world_size,
            "batch_size": self.batch_size,
            "num_samples": self.num_samples,
            "layout": [list(segment) for segment in self._layout],
            "sizes": repr(self.sizes),
        }

    def load_state_dict(self, state: dict[str, object]) -> list[str]:
        """Restore a saved state; return a message for each way in which the run cannot stay identical.

        With the same number of ranks and the same batch size the run goes on exactly. With others it goes on with the
        same remaining samples in the same order (with groups: regrouped), cut into other batches. Raises BadInput if
        the state is that of another dataset.
        """
        saved_samples = state["num_samples"]
        if saved_samples != self.num_samples or not 0 <= state["offset"] <= saved_samples:
            raise BadInput(
                f"the checkpoint stopped at sample {state['offset']} of {saved_samples}, but the training data now has "
                f"{self.num_samples} samples: resume with the same data, or begin a new run with these weights "
                "(--run.name NEW --model.pretrained RUN)"
            )
        notes = []
        if state["seed"] != self.seed:
            notes.append(f"data order continues with the checkpoint's seed {state['seed']}, not {self.seed}")
        if state["sizes"] != repr(self.sizes):
            notes.append(f"image sizes now follow {self.sizes}, in the checkpoint {state['sizes']}")
        self.seed = state["seed"]
        self.epoch = state["epoch"]
        before = (state["world_size"], state["batch_size"])
        now = (self.world_size, self.batch_size)
        layout = [tuple(segment) for segment in state["layout"]]
        self._start(state["offset"], layout)
        if before != now:
            notes.append(self._other_cut_note(before))
        if before != now or self.offset not in (0, *self._ends):  # also when stopped inside a batch: cut anew from here
            earlier = [segment for segment in layout if segment[0] < self.offset]
            self._start(self.offset, [*earlier, (self.offset, *now)])
        left_over = self.num_samples - self.offset
        if left_over and self.next_batch == len(self):
            notes.append(
                f"epoch {self.epoch} had {left_over} samples left, fewer than the {self.world_size} ranks of this run: "
                "they are passed over"
            )
        return notes

    def _other_cut_note(self, before: tuple[int, int]) -> str:
        order = "keep their global order" if self.groups is None else "are grouped anew in their global order"
        return (
            f"the checkpoint was written by {before[0]} rank(s) x {before[1]} images, this run has {self.world_size} x "
            f"{self.batch_size}: the samples left in epoch {self.epoch} {order} but fall into other batches, so losses "
            "and weights will not be identical to the uninterrupted run's"
        )

    def _start(self, offset: int, layout: list[tuple[int, int, int]]) -> None:
        """Lay the current epoch out in segments, each (first sample, world_size, batch_size)."""
        self.offset = offset
        self._layout = layout or [(0, self.world_size, self.batch_size)]
        self._images = np.arange(self.num_samples)
        self._turns = np.zeros(self.num_samples, np.int64)
        if self.repeats is not None:
            self._images, self._turns = _repeated(
                self.repeats,
                self.strata,
                self.num_samples,
                self.seed,
                self.epoch,
            )
        groups = None if self.groups is None else self.groups[self._images]
        order = self._first_order()
        position = None if self.blocks is None else np.argsort(order)
        ends: list[int] = []
        drawn = self.sizes.draw(self.seed, self.epoch, self.num_samples + 1) if self.sizes else None
        for start, world_size, batch_size in self._layout:
            if groups is not None:
                left = group_order(order[start:], groups, world_size * batch_size)
                order = np.concatenate([order[:start], left])
            if position is not None:  # the samples left, in the first order again, are shared among these ranks
                left = order[start:]
                left = left[np.argsort(position[left])]
                left = rank_runs(left, batch_size, world_size)
                order = np.concatenate([order[:start], left])
            ends = [end for end in ends if end < start]
            if start > 0:
                ends.append(start)
            left_sizes = drawn and drawn[len(ends) :]
            ends_of_left = self._batch_ends(self.num_samples - start, left_sizes, world_size, batch_size)
            ends += (start + ends_of_left).tolist()
        self._order = order
        self._ends = np.array(ends, dtype=np.int64)
        self._drawn = drawn

    def _first_order(self) -> np.ndarray:
        """Return the order (num_samples,) of the current epoch, before it is cut for ranks and groups."""
        if not self.shuffle:
            return np.arange(self.num_samples)
        rng = np.random.default_rng((self.seed, self.epoch))
        if self.pictures is not None:
            return block_order(self.pictures[self._images], rng, MIXED_PICTURES)
        if self.blocks is None:
            return rng.permutation(self.num_samples)
        return block_order(self.blocks[self._images], rng)

    def _keys(self, i: int) -> list[SampleKey]:
        """Return this rank's part of the epoch's i-th global micro-batch."""
        count = self.samples_in_batch(i)
        size_hw = self._drawn[i] if self._drawn else None
        first = int(self._ends[i]) - count
        start, stop = split_evenly(count, self.rank, self.world_size)
        mine = self._order[first + start : first + stop]
        images = self._images[mine].tolist()
        turns = self._turns[mine].tolist()
        keys = []
        for image, turn in zip(images, turns, strict=True):
            keys.append(SampleKey(self.epoch, image, size_hw, turn))
        return keys


def _repeated(
    repeats: np.ndarray,
    strata: np.ndarray | None,
    count: int,
    seed: int,
    epoch: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw (image, turn) of each of `count` samples of an epoch.

    Systematic sampling: the count of each image is off by at most one. turn: how often the image is among the samples
    before. Images a, b with repeats 1 and 2, shuffled to b, a, give b, b, a with the turns 0, 1, 0.
    """
    rng = np.random.default_rng((seed, epoch, 2))
    images = rng.permutation(len(repeats))
    if strata is not None:
        images = images[np.argsort(strata[images], kind="stable")]
    numbers = np.arange(count)
    ends = np.cumsum(repeats[images], dtype=np.float64)  # image i covers the points from ends[i - 1] to ends[i]
    points = (numbers + rng.random()) * (ends[-1] / count)  # evenly spaced
    places = np.searchsorted(ends, points, side="right")
    places = np.minimum(places, len(images) - 1)
    turns = numbers - np.searchsorted(places, places)
    return images[places], turns


class EvalSampler:
    """Batch sampler of one rank for evaluation: every sample once over all ranks, in order.

    Every rank yields the same number of batches, so that collectives match; some are empty when samples run out.
    """

    def __init__(self, num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1):
        if num_samples < 1 or batch_size < 1:
            got = f"got {num_samples} images in batches of {batch_size}"
            raise BadInput(f"evaluation needs at least one image and one image per batch, {got}")
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        return -(-self.num_samples // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[SampleKey]]:
        global_batch = self.batch_size * self.world_size
        for first in range(0, self.num_samples, global_batch):
            count = min(global_batch, self.num_samples - first)
            start, stop = split_evenly(count, self.rank, self.world_size)
            yield [SampleKey(0, index) for index in range(first + start, first + stop)]


def _check_sizes(num_samples: int, batch_size: int, world_size: int) -> None:
    if num_samples < 1:
        raise BadInput("the training data has no images")
    if batch_size < 1:
        raise BadInput(f"data.batch_size_per_device is {batch_size}, it must be at least 1")
    if num_samples < world_size * batch_size:
        most = num_samples // world_size
        remedy = f"data.batch_size_per_device of at most {most}" if most else "fewer processes"
        raise BadInput(
            f"one batch is {world_size} process(es) x {batch_size} images = {world_size * batch_size}, but the "
            f"training data has only {num_samples}: use {remedy}"
        )


def accumulation_at(epoch: int, accumulation_steps: int, after_epoch: int) -> int:
    """Return the number of micro-batches of one optimizer step in an epoch.

    This is 1 before the epoch `after_epoch` (counted from 0), and `accumulation_steps` in this epoch and later, as in
    CVNets since its version 0.2.
    """
    return accumulation_steps if epoch >= after_epoch else 1


def epochs_after(sampler: EpochSampler, step: float, *accumulation: int) -> float:
    """Return how many epochs, such as 3.5, a run has seen after `step` optimizer steps.

    The run must have had the ranks and batch size of `sampler` from its start. accumulation: accumulation steps, and
    the first epoch that has them; see `accumulation_at`.
    """
    epoch = 0
    steps = max(1, sampler.steps_of_epoch(epoch, *accumulation))
    while step >= steps:
        step = step - steps
        epoch += 1
        steps = max(1, sampler.steps_of_epoch(epoch, *accumulation))
    return epoch + step / steps


def steps_ahead(sampler: EpochSampler, epochs: float, *accumulation: int) -> float:
    """Return the number of optimizer steps from the sampler's position to the end of `epochs` epochs, such as 3.5.

    The number may be a fraction; it is 0 if the position is already later. accumulation: accumulation steps, and the
    first epoch that has them; see `accumulation_at`.
    """
    here = sampler.epoch + sampler.offset / sampler.num_samples
    end = sampler.epoch + 1
    batches_left = len(sampler) - sampler.next_batch
    steps_left = -(-batches_left // accumulation_at(sampler.epoch, *accumulation))  # of this epoch
    if epochs < end:
        if end <= here:
            return 0.0
        return steps_left * max(0.0, epochs - here) / (end - here)
    last = int(epochs)
    whole = sum(sampler.steps_of_epoch(epoch, *accumulation) for epoch in range(end, last))
    of_last = (epochs - last) * sampler.steps_of_epoch(last, *accumulation)
    return steps_left + whole + of_last
