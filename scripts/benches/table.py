"""A table as large as COCO's training set: the time to open it from the cache, and the memory that it costs a
worker."""

import gc
import statistics
import tempfile
from functools import partial
from pathlib import Path

import psutil
from torch.utils.data import DataLoader, Dataset

from toolkit.data.annotations import Reading
from toolkit.data.dataset import row_target
from toolkit.data.formats.coco import read_coco
from toolkit.data.table import DetectionTable

from .measuring import row, seconds
from .reading import write_large

WORKERS = 2


class Targets(Dataset):
    """A data set of the targets in a table, without images. An item is the number of boxes of an image."""

    def __init__(self, table: DetectionTable):
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> int:
        image = self.table.row(index)
        return len(row_target(image, (image["height"], image["width"]))["labels"])


class Nothing(Dataset):
    """A data set with as many samples as a table, but without the table; it shows the memory of a worker by itself."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return 7


def bench_table(num_images: int = 118_000, num_boxes: int = 860_000, repeats: int = 5, epochs: int = 3) -> list[dict]:
    """Measure the seconds to open an annotation file with a warm cache (median; the file is hashed each time), and the
    memory that a loader worker needs for the table.

    Memory is the proportional set size, in which shared memory counts by its share. Rows give the difference to a
    worker without a table, after the first and after the last of `epochs` shuffled epochs, and the growth between
    these.
    """
    with tempfile.TemporaryDirectory() as folder:
        annotations = write_large(Path(folder) / "annotations.json", num_images, num_boxes)
        opening = partial(read_coco, annotations, Reading(folder, check_images=False, cache_dir=folder))
        first = seconds(opening)
        gc.collect()
        opened = [seconds(opening) for _ in range(repeats)]
        table = opening()
        assert len(table) == num_images and table.num_boxes().sum() == num_boxes
        bare = worker_memory(Nothing(num_images), epochs)
        used = worker_memory(Targets(table), epochs)
    extra = [after - before for after, before in zip(used, bare, strict=True)]
    return [
        row("table, read the first time", first, "s"),
        row("table, opened from cache", statistics.median(opened), "s"),
        row("table, memory per worker, epoch 1", extra[0], "MB"),
        row(f"table, memory per worker, epoch {epochs}", extra[-1], "MB"),
        row("table, growth over the epochs", used[-1] - used[0], "MB"),
        row("no table, growth over the epochs", bare[-1] - bare[0], "MB"),
    ]


def worker_memory(dataset: Dataset, epochs: int) -> list[float]:
    """Return the mean proportional set size of the workers in MB (1e6 bytes), at the end of each epoch."""
    loader = DataLoader(dataset, batch_size=256, shuffle=True, num_workers=WORKERS, persistent_workers=True)
    this = psutil.Process()
    others = {child.pid for child in this.children()}
    sizes = []
    for _ in range(epochs):
        for _ in loader:
            pass
        workers = [child for child in this.children() if child.pid not in others]
        sizes.append(statistics.mean(worker.memory_full_info().pss for worker in workers) / 1e6)
    return sizes
