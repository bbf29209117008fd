"""Reading large COCO files: seconds and peak memory of the process that reads, against the whole file in memory."""

import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

READER = """
import sys, time
from toolkit.data.formats import coco
def peak_mb():  # ru_maxrss would be that of the process before exec, too
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1e3
if sys.argv[3] == "whole":
    coco.STREAMED_BYTES = float("inf")
before = peak_mb()
began = time.perf_counter()
table = coco.read_coco(sys.argv[1], ".", check_images=False, cache_dir=sys.argv[2])
print(time.perf_counter() - began, peak_mb() - before, len(table))
"""
BOXES_PER_IMAGE = 7.3


def bench_reading(sizes: Iterable[int] = (118_000, 1_700_000), whole: Iterable[int] = (118_000,)) -> list[dict]:
    """Rows with `name`, `value` and `unit`.

    sizes: images of the files that are read item by item; whole: of those that are also read in one piece. Memory is
    what reading adds to the peak of a process that has imported everything (Linux).
    """
    rows = []
    for count in sizes:
        with tempfile.TemporaryDirectory() as folder:
            file = write_large(Path(folder) / "annotations.json", count)
            rows.append({"name": f"COCO file, {count:,} images", "value": file.stat().st_size / 1e6, "unit": "MB"})
            for way in ("streamed", "whole") if count in whole else ("streamed",):
                command = [sys.executable, "-c", READER, str(file), f"{folder}/{way}", way]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                seconds, memory, images = map(float, done.stdout.split())
                assert images == count
                rows.append({"name": f"COCO, {count:,} images, {way}", "value": seconds, "unit": "s"})
                rows.append({"name": f"COCO, {count:,} images, {way}, memory", "value": memory, "unit": "MB"})
    return rows


def write_large(path: Path, num_images: int) -> Path:
    """A COCO file of 80 classes, written piece by piece; annotations in no order of the images."""
    rng, step = np.random.default_rng(0), 50_000
    boxes = round(num_images * BOXES_PER_IMAGE)
    with open(path, "w") as file:
        file.write('{"categories": [' + ", ".join(f'{{"id": {k}, "name": "class{k}"}}' for k in range(1, 81)))
        file.write('],\n"images": [')
        for first in range(1, num_images + 1, step):
            lines = (
                f'{{"id": {i}, "file_name": "{i:012d}.jpg", "width": 640, "height": 560}}'
                for i in range(first, min(first + step, num_images + 1))
            )
            file.write((",\n" if first > 1 else "") + ",\n".join(lines))
        file.write('],\n"annotations": [')
        for first in range(1, boxes + 1, step):
            count = min(step, boxes + 1 - first)
            corners, sides = rng.uniform(0, 300, (count, 2)).round(2), rng.uniform(5, 200, (count, 2)).round(2)
            images, classes = rng.integers(1, num_images + 1, count), rng.integers(1, 81, count)
            rows = zip(images.tolist(), classes.tolist(), corners.tolist(), sides.tolist(), strict=True)
            lines = (
                f'{{"id": {first + n}, "image_id": {i}, "category_id": {k}, "bbox": [{x}, {y}, {w}, {h}], '
                f'"area": {w * h:.2f}, "iscrowd": 0}}'
                for n, (i, k, (x, y), (w, h)) in enumerate(rows)
            )
            file.write((",\n" if first > 1 else "") + ",\n".join(lines))
        file.write("]}")
    return path


if __name__ == "__main__":
    for row in bench_reading():
        print(f"{row['name']:<44} {row['value']:>12.4g} {row['unit']}")
