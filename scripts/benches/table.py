"""A table as large as COCO's training set: how fast it opens from the cache, and what it costs a worker in memory."""

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil
from torch.utils.data import DataLoader, Dataset

from toolkit.data.dataset import row_target
from toolkit.data.formats.coco import read_coco
from toolkit.data.table import DetectionTable

WORKERS = 2


class Targets(Dataset):
    """Each row of a table as a target, without its image; gives the number of boxes."""

    def __init__(self, table: DetectionTable):
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> int:
        row = self.table.row(index)
        return len(row_target(row, (row["height"], row["width"]))["labels"])


class Nothing(Dataset):
    """As many samples as a table has, without a table: what a worker costs by itself."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return 7


def bench_table(num_images: int = 118_000, num_boxes: int = 860_000, repeats: int = 5, epochs: int = 3) -> list[dict]:
    """Rows with `name`, `value` and `unit`.

    Seconds to open the annotation file with a warm cache (median; the file is hashed each time), and the memory
    (proportional set size: what a worker shares counts by its share) that a worker of a shuffled epoch needs above a
    worker without a table, after the first and after the last of `epochs`.
    """
    with tempfile.TemporaryDirectory() as folder:
        annotation_file = write_annotations(Path(folder), num_images, num_boxes)
        began = time.perf_counter()
        read_coco(annotation_file, folder, check_images=False, cache_dir=folder)
        first = time.perf_counter() - began
        gc.collect()
        opened = []
        for _ in range(repeats):
            began = time.perf_counter()
            table = read_coco(annotation_file, folder, check_images=False, cache_dir=folder)
            opened.append(time.perf_counter() - began)
        assert len(table) == num_images and table.num_boxes().sum() == num_boxes
        bare = worker_memory(Nothing(num_images), epochs)
        used = worker_memory(Targets(table), epochs)
    extra = [after - before for after, before in zip(used, bare, strict=True)]
    return [
        {"name": "table, read the first time", "value": first, "unit": "s"},
        {"name": "table, opened from cache", "value": statistics.median(opened), "unit": "s"},
        {"name": "table, memory per worker, epoch 1", "value": extra[0], "unit": "MB"},
        {"name": f"table, memory per worker, epoch {epochs}", "value": extra[-1], "unit": "MB"},
        {"name": "table, growth over the epochs", "value": used[-1] - used[0], "unit": "MB"},
        {"name": "no table, growth over the epochs", "value": bare[-1] - bare[0], "unit": "MB"},
    ]


def worker_memory(dataset: Dataset, epochs: int) -> list[float]:
    """Mean over the workers of their proportional set size in MB (1e6 bytes), at the end of each epoch."""
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


def write_annotations(folder: Path, num_images: int, num_boxes: int) -> Path:
    """A COCO file of 80 classes with as many images and boxes as asked for; the images do not exist."""
    rng = np.random.default_rng(0)
    corners, sides = rng.uniform(0, 300, (num_boxes, 2)).round(2), rng.uniform(5, 200, (num_boxes, 2)).round(2)
    image_ids = np.sort(rng.integers(1, num_images + 1, num_boxes)).tolist()
    classes = rng.integers(1, 81, num_boxes).tolist()
    boxes = np.concatenate([corners, sides], axis=1).tolist()
    document = {
        "images": [
            {"id": i, "file_name": f"{i:012d}.jpg", "width": 640, "height": 560} for i in range(1, num_images + 1)
        ],
        "annotations": [
            {"id": n, "image_id": i, "category_id": k, "bbox": b, "area": round(b[2] * b[3], 2), "iscrowd": 0}
            for n, (i, k, b) in enumerate(zip(image_ids, classes, boxes, strict=True), start=1)
        ],
        "categories": [{"id": k, "name": f"class{k}"} for k in range(1, 81)],
    }
    path = folder / "annotations.json"
    path.write_text(json.dumps(document))
    return path


def print_rows(rows: Sequence[Mapping]) -> None:
    for row in rows:
        print(f"{row['name']:<36} {row['value']:>12.4g} {row['unit']}")


if __name__ == "__main__":
    print_rows(bench_table())
