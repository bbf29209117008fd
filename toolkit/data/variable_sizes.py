"""Multi-scale batches: an image size per batch, the same on all ranks, as a function of (seed, epoch, batch index).

Two uses of one mechanism: the batch size stays (YOLO's multi-scale training), or follows the size so that the number of
pixels stays (CVNets' variable batch sampler). The size travels in each sample's key, so workers need no update.
"""

from dataclasses import dataclass

import numpy as np

from toolkit.base.errors import BadInput


@dataclass(frozen=True)
class VariableSizes:
    """Sampler of the image size of an epoch's i-th global micro-batch, drawn uniformly from the sizes.

        sampler = EpochSampler(..., sizes=VariableSizes(((320, 320), (416, 416)), every=10))
        dataset = DetectionDataset(table, ThenResize(transform), seed)   # transform(image, target, generator, size_hw)

    Args:
        sizes_hw: the sizes, (height, width) in pixels; one: every batch has it.
        every: micro-batches between two draws, 10 in YOLO.
        base_hw: the size that the configured batch size is meant for: batches of another size have so many images that
            the number of pixels is not larger, at least one. None: the batch size is that of every size.
    """

    sizes_hw: tuple[tuple[int, int], ...]
    every: int = 1
    base_hw: tuple[int, int] | None = None

    def __post_init__(self):
        sizes = self.sizes_hw if self.base_hw is None else (*self.sizes_hw, self.base_hw)
        if not self.sizes_hw or min(min(size) for size in sizes) < 1 or self.every < 1:
            raise BadInput(
                "images of varying size need sizes (height, width) of at least one pixel, and at least one batch "
                f"between two of them; got {self}"
            )

    def draw(self, seed: int, epoch: int, count: int) -> list[tuple[int, int]]:
        """Draw (h, w) of the first `count` micro-batches of an epoch; a larger count begins with the same sizes."""
        draws = np.random.default_rng((seed, epoch, 1)).random(-(-count // self.every))
        chosen = np.repeat((draws * len(self.sizes_hw)).astype(int), self.every)[:count]
        return [self.sizes_hw[i] for i in chosen]

    def batch_size(self, size_hw: tuple[int, int], batch_size: int) -> int:
        """Return the images of a batch of this size, where `batch_size` is the configured one."""
        if self.base_hw is None:
            return batch_size
        return max(1, batch_size * self.base_hw[0] * self.base_hw[1] // (size_hw[0] * size_hw[1]))

    def largest(self, batch_size: int) -> tuple[tuple[int, int], int]:
        """Return the size with the most pixels in a batch, and its batch size; of several, the larger images."""
        pairs = [(size, self.batch_size(size, batch_size)) for size in self.sizes_hw]
        return max(pairs, key=lambda pair: (pair[0][0] * pair[0][1] * pair[1], pair[0]))
