"""Random graphs with the vocabulary of VG150, as a table and as files with pictures."""

import json
from pathlib import Path

import numpy as np
from documents import row_of
from PIL import Image
from places import ASSETS
from visual_genome_writer import write_visual_genome

from toolkit.data.table import Category, DetectionTable
from toolkit.data.table_cache import write_rows

VOCABULARY = json.loads((ASSETS / "vg150_stats" / "vocab.json").read_text())
CLASSES = [entry["name"] for entry in VOCABULARY["objects"]]
PREDICATES = [entry["name"] for entry in VOCABULARY["predicates"]]


def synthetic_table(folder: Path, count: int, first_id: int = 1, seed: int = 0) -> DetectionTable:
    """Images of 1024 x 768 with whole-pixel boxes, every tenth without relations, every twentieth without boxes."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        n = 0 if i % 20 == 7 else int(rng.integers(2, 12))
        r = 0 if i % 10 == 3 or not n else int(rng.integers(1, 15))
        corner = rng.integers(0, 500, (n, 2))
        size = 2 * rng.integers(4, 120, (n, 2))
        ends = np.asarray([rng.permutation(n)[:2] for _ in range(r)]).reshape(-1, 2)
        boxes = np.concatenate([corner, corner + size], 1)
        labels = rng.integers(0, len(CLASSES), n)
        relations = np.column_stack(
            [
                ends,
                rng.integers(
                    0,
                    len(PREDICATES),
                    r,
                ),
            ]
        ).astype(int)
        row = row_of(
            first_id + i,
            boxes,
            (1024, 768),
            labels,
            relations,
            area=size.prod(1),
            id=range(1, n + 1),
        )
        rows.append(row | {"file_name": f"{first_id + i}.jpg"})
    return write_rows(
        rows,
        cache_file=folder / f"table_{first_id}.json",
        categories=[Category(i, name) for i, name in enumerate(CLASSES, 1)],
        predicates=PREDICATES,
        image_root=folder,
    )


def visual_genome(folder: Path, train: int, test: int) -> Path:
    """Files in the layout of VG150, with a picture for each image."""
    of_training = synthetic_table(folder, train, first_id=2_000_000)
    of_test = synthetic_table(folder, test, first_id=3_000_000, seed=1)
    write_visual_genome([(of_training, 0), (of_test, 2)], folder)
    (folder / "images").mkdir()
    noise = Image.fromarray(
        np.random.default_rng(0).integers(
            0,
            255,
            (768, 1024, 3),
            np.uint8,
        )
    )
    noise.save(folder / "picture.jpg", quality=5)
    for image_id in [*of_training.image_ids().tolist(), *of_test.image_ids().tolist()]:
        (folder / "images" / f"{image_id}.jpg").hardlink_to(folder / "picture.jpg")
    return folder
