"""Reading and checking of large COCO files: processor time and peak memory."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np

from .measuring import row

# Arguments: annotation file, cache folder, way. Prints seconds, MB and images.
PROGRAM = """
import sys, time
from toolkit.data.annotations import Reading
from toolkit.data.formats import coco
from toolkit.tools.doctor.inspection import inspect_tables
def peak_mb():  # ru_maxrss would be that of the process before exec, too
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1e3
before, began = peak_mb(), time.process_time()
table = coco.read_coco(sys.argv[1], Reading(".", check_images=False, cache_dir=sys.argv[2]))
if sys.argv[3] == "checked":
    inspect_tables({"train": table}, {"height": 640, "width": 640}, compare=False)
print(time.process_time() - began, peak_mb() - before, len(table))
"""


def bench_reading(sizes: Mapping[int, int] = MappingProxyType({118_000: 860_000, 300_000: 2_190_000})) -> list[dict]:
    """Measure the size of COCO files in megabytes, and the processor seconds and megabytes of memory that reading
    takes, and checking too.

    sizes: number of images and of boxes of each file. Memory is the amount by which reading raises the peak of a
    process that has imported everything (Linux). Checking is that of scripts/check_data.py without opening images, on a
    table from the cache.
    """
    rows = []
    for count, boxes in sizes.items():
        with tempfile.TemporaryDirectory() as folder:
            file = write_large(Path(folder) / "annotations.json", count, boxes)
            what = f"COCO file of {count:,} images"
            rows.append(row(f"{what}, on disk", file.stat().st_size / 1e6, "MB"))
            for way in ("read", "checked"):
                command = [sys.executable, "-c", PROGRAM, str(file), f"{folder}/cache", way]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                seconds, memory, images = (float(word) for word in done.stdout.split())
                if images != count:
                    raise RuntimeError(f"{images:.0f} of {count} images were read")
                rows.append(row(f"{what}, {way}", seconds, "s of processor time"))
                rows.append(row(f"{what}, {way}, memory", memory, "MB"))
    return rows


def write_large(path: Path, num_images: int, boxes: int) -> Path:
    """Write a COCO file of 80 classes, piece by piece, whose annotations are of random images; return its path."""
    rng = np.random.default_rng(0)
    step = 50_000
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
            corners = rng.uniform(0, 300, (count, 2)).round(2)
            sides = rng.uniform(5, 200, (count, 2)).round(2)
            images = rng.integers(1, num_images + 1, count)
            classes = rng.integers(1, 81, count)
            rows = zip(images.tolist(), classes.tolist(), corners.tolist(), sides.tolist(), strict=True)
            lines = (
                f'{{"id": {first + n}, "image_id": {i}, "category_id": {k}, "bbox": [{x}, {y}, {w}, {h}], '
                f'"area": {w * h:.2f}, "iscrowd": 0}}'
                for n, (i, k, (x, y), (w, h)) in enumerate(rows)
            )
            file.write((",\n" if first > 1 else "") + ",\n".join(lines))
        file.write("]}")
    return path
