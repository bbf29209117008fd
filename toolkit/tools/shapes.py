"""The bundled data set: synthetic scenes of textured shapes with boxes, relations and attributes.

    python -m toolkit.tools.shapes --out DIR [--train-images 1000 --val-images 200 --image-size 128 --seed 0]

writes a COCO data set: DIR/train/*.jpg, DIR/val/*.jpg and DIR/annotations/{train,val}.json. Beside the usual keys, the
JSON files have `rel_categories`, `rel_annotations`, `attribute_categories` and, for each annotation, `attribute_ids`
(its texture). `segmentation` has polygons around the visible pixels of an object, to the pixel. With `--large` the
pictures are 2,000 x 1,500 px with many shapes of 8 to 20 px, without relations, to try tiles on (docs/tiles.md).
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from colorsys import hsv_to_rgb
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from toolkit.base.errors import BadInput, exit_on_bad_input
from toolkit.base.files import write_json
from toolkit.base.outlines import outlines
from toolkit.data.annotations import Reading
from toolkit.data.choices import FORMATS
from toolkit.data.formats.coco import read_coco
from toolkit.data.segmentations import to_segmentation
from toolkit.data.table import DetectionTable
from toolkit.data.table_cache import cache_root

logger = logging.getLogger(__name__)

DIGESTS_FILE = "files.json"  # in the cache: sizes and digests of the files of the data set
SHAPES_VERSION = 5  # part of the cache folder's name: raise it when pictures or annotations change
CLASSES = ("circle", "square", "triangle", "star")
PREDICATES = ("left of", "right of", "above", "below", "inside", "contains", "overlaps", "larger than")
SPLITS = ("train", "val")
MAX_OBJECTS = 6
MIN_VISIBLE = 0.5  # of an object's pixels; a placement that would hide more of an earlier one is drawn again
PLACEMENTS = 12
TEXTURES = {"circle": "rings", "square": "checks", "triangle": "stripes", "star": "shading"}  # most often
ATTRIBUTES = (*TEXTURES.values(), "blotches")
TYPICAL = 0.75  # how often a shape has the texture of its class; else it has any
RADIUS = (0.12, 0.28)  # of the image side
STRETCH = {"triangle": 1.3, "star": 1.15}  # their corners reach further out, so that all shapes cover like areas
LARGE_HW = (1500, 2000)  # of large pictures
SMALL_SIDE = (8, 20)  # pixels of the shapes in large pictures
LARGE_OBJECTS = (40, 80)  # of a large picture
PATCH = 32  # pixels that a shape in a large picture has for itself, both sides
NESTED = 0.15  # how often a shape is put on the middle of an earlier, larger one


def draw_scene(seed: int, split: str, index: int, image_size: int = 128) -> tuple[np.ndarray, list[dict], list[tuple]]:
    """Draw one picture of the bundled data; the result depends on the arguments only.

    Args:
        seed: seed of the whole data set.
        split: "train" or "val".
        index: number of the picture in its split, from 0.
        image_size: side in pixels.

    Returns:
        the picture, uint8 (image_size, image_size, 3) RGB; its objects as dicts with `category` (index in `CLASSES`),
        `texture` (index in `ATTRIBUTES`), and of the visible pixels `bbox` (xywh), `area` (their number) and `polygons`
        (as `toolkit.base.masks.Polygons`);
        its relations as (subject, object, predicate), indices of objects and in `PREDICATES`.
    """
    rng = np.random.default_rng([seed, SPLITS.index(split), index])
    canvas = _background(rng, image_size)
    owner = np.full((image_size, image_size), -1, np.int8)  # which object shows at each pixel
    full_areas = []
    kinds = []
    circles = []  # centre x and y, and the radius, of the circle of each shape
    for _ in range(int(rng.integers(1, MAX_OBJECTS + 1))):
        for _ in range(PLACEMENTS):
            category = int(rng.integers(len(CLASSES)))
            circle = _place(rng, image_size, circles)
            coverage, local = _cover(rng, CLASSES[category], image_size, *circle)
            mask = coverage > 0.5
            if mask.any() and _all_visible(owner, mask, full_areas):
                texture = _paint(rng, canvas, coverage, local, TEXTURES[CLASSES[category]])
                owner[mask] = len(kinds)
                full_areas.append(int(mask.sum()))
                kinds.append({"category": category, "texture": ATTRIBUTES.index(texture)})
                circles.append(circle)
                break
    canvas += rng.normal(0, rng.uniform(2, 9), canvas.shape).astype(np.float32)
    objects = [kind | _visible(owner == row) for row, kind in enumerate(kinds)]
    return canvas.clip(0, 255).astype(np.uint8), objects, _relations(objects)


def draw_large_scene(seed: int, split: str, index: int) -> tuple[np.ndarray, list[dict], list[tuple]]:
    """Draw one large picture of small shapes that do not overlap, a function of only its arguments.

    Returns uint8 (1500, 2000, 3); objects as of `draw_scene`; no relations.
    """
    rng = np.random.default_rng([seed, SPLITS.index(split), index, 1])
    height, width = LARGE_HW
    canvas = _background(rng, max(LARGE_HW))[:height, :width].copy()
    cells = [(row, column) for row in range(height // PATCH) for column in range(width // PATCH)]
    chosen = rng.choice(len(cells), int(rng.integers(*LARGE_OBJECTS, endpoint=True)), replace=False)
    objects = []
    for row, column in (cells[number] for number in chosen):
        top = row * PATCH
        left = column * PATCH
        patch = canvas[top : top + PATCH, left : left + PATCH]
        category = int(rng.integers(len(CLASSES)))
        radius = rng.uniform(*SMALL_SIDE) / 2
        x, y = rng.uniform(radius + 2, PATCH - radius - 2, 2)
        coverage, local = _cover(rng, CLASSES[category], PATCH, x, y, radius)
        texture = _paint(rng, patch, coverage, local, TEXTURES[CLASSES[category]])
        seen = _visible(coverage > 0.5, left, top)
        objects.append({"category": category, "texture": ATTRIBUTES.index(texture)} | seen)
    canvas += rng.normal(0, rng.uniform(2, 9), canvas.shape).astype(np.float32)
    return canvas.clip(0, 255).astype(np.uint8), objects, []


def make_shapes(
    out: Path | str,
    train_images: int = 1000,
    val_images: int = 200,
    image_size: int = 128,
    seed: int = 0,
    large: bool = False,
) -> None:
    """Write the data set to the folder `out`.

    large: draw pictures by `draw_large_scene`, whatever `image_size` is.

    Raises BadInput if the folder is not empty or a number is too small.
    """
    out = Path(out).expanduser()
    if train_images < 1 or val_images < 1 or image_size < 32 or seed < 0:
        raise BadInput(
            f"{train_images} + {val_images} images of {image_size} px, seed {seed}: expected at least one image of "
            "each split, 32 px, and a seed from 0"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"{out}: not an empty folder; give a new one")
    (out / "annotations").mkdir(parents=True)
    for split, count in zip(SPLITS, (train_images, val_images), strict=True):
        draw = draw_large_scene if large else partial(draw_scene, image_size=image_size)
        _write_split(out, split, count, draw, seed)


def ensure_shapes(
    cache_dir: Path | str | None = None,
    train_images: int = 1000,
    val_images: int = 200,
    image_size: int = 128,
    seed: int = 0,
) -> Path:
    """Return the folder of the data set in the cache; the data set is written there first if it is missing or damaged.

    That takes seconds. Several processes may call this at the same time. Raises BadInput if the cache cannot be
    written. cache_dir: root of the cache; None: the default.
    """
    root = cache_root(cache_dir)
    folder = root / f"shapes-v{SHAPES_VERSION}-{train_images}-{val_images}-{image_size}px-seed{seed}"
    if folder.exists() and _is_whole(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=root, prefix="shapes-"))
    except OSError as error:
        fault = f"{root}: cannot be written ({error.strerror}); set DETECTION_TOOLKIT_CACHE to a folder that can"
        raise BadInput(fault) from error
    try:
        made = temporary / "made"
        make_shapes(made, train_images, val_images, image_size, seed)
        write_json(made / DIGESTS_FILE, _state_of(made))
        if folder.exists() and not _is_whole(folder):
            logger.warning("%s: the bundled data are damaged; they are made anew", folder)
            with contextlib.suppress(OSError):  # another process does the same
                os.rename(folder, temporary / "damaged")
        os.rename(made, folder)
    except OSError:
        if not folder.exists():  # not merely another process that was first
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _state_of(folder: Path) -> dict[str, str | int]:
    """Return the size of each picture, and a digest of each annotation file, by their paths in the folder."""
    state: dict[str, str | int] = {}
    for directory, _, names in os.walk(folder):
        for name in names:
            path = Path(directory, name)
            if path.suffix == ".json" and name != DIGESTS_FILE:
                state[path.relative_to(folder).as_posix()] = hashlib.blake2b(path.read_bytes()).hexdigest()
            elif name != DIGESTS_FILE:
                state[path.relative_to(folder).as_posix()] = path.stat().st_size
    return state


def _is_whole(folder: Path) -> bool:
    """Return whether the files of the data set are those that were written."""
    try:
        return json.loads((folder / DIGESTS_FILE).read_text(encoding="utf-8")) == _state_of(folder)
    except (OSError, ValueError, RecursionError):
        return False


def _write_split(out: Path, split: str, count: int, draw: Callable, seed: int) -> None:
    images = []
    annotations = []
    relations = []
    (out / split).mkdir()
    for index in tqdm(range(count), f"drawing {split}", delay=2, leave=False, disable=None):
        pixels, objects, triples = draw(seed, split, index)
        name = f"{index:06d}.jpg"
        image_id = index + 1
        first = len(annotations) + 1
        Image.fromarray(pixels).save(out / split / name, quality=92)
        images.append(
            {
                "id": image_id,
                "file_name": name,
                "width": pixels.shape[1],
                "height": pixels.shape[0],
            }
        )
        for row, item in enumerate(objects):
            entry = {
                "id": first + row,
                "image_id": image_id,
                "category_id": item["category"] + 1,
                "bbox": item["bbox"],
                "area": item["area"],
                "iscrowd": 0,
                "attribute_ids": [item["texture"] + 1],
                "segmentation": to_segmentation(item["polygons"]),
            }
            annotations.append(entry)
        for subject, object_, predicate in triples:
            entry = {
                "id": len(relations) + 1,
                "image_id": image_id,
                "subject_id": first + subject,
                "object_id": first + object_,
                "predicate_id": predicate + 1,
            }
            relations.append(entry)
    document = {
        "info": {"description": f"textured shapes v{SHAPES_VERSION}, {split}, seed {seed}"},
        "images": images,
        "annotations": annotations,
        "categories": _numbered(CLASSES),
        "rel_categories": _numbered(PREDICATES),
        "rel_annotations": relations,
        "attribute_categories": _numbered(ATTRIBUTES),
    }
    (out / "annotations" / f"{split}.json").write_text(json.dumps(document), encoding="utf-8")


def _numbered(names: Sequence[str]) -> list[dict]:
    return [{"id": row + 1, "name": name} for row, name in enumerate(names)]


def _background(rng: np.random.Generator, size: int) -> np.ndarray:
    """Draw (size, size, 3) float32: a gradient between two muted colours under smooth blotches."""
    value = rng.uniform(0.25, 0.8)
    first, second = (_colour(rng, (0.05, 0.45), (value - 0.12, value + 0.12)) for _ in range(2))
    angle = rng.uniform(0, 2 * np.pi)
    y, x = np.mgrid[0:size, 0:size].astype(np.float32) / size - 0.5
    ramp = (np.cos(angle) * x + np.sin(angle) * y + 0.5).clip(0, 1)[..., None]
    canvas = first * (1 - ramp) + second * ramp
    for cells, strength in ((int(rng.integers(3, 7)), 22), (int(rng.integers(10, 24)), 12)):
        canvas = canvas + strength * _smooth_noise(rng, size, cells)[..., None]
    return canvas.astype(np.float32)


def _smooth_noise(rng: np.random.Generator, size: int, cells: int) -> np.ndarray:
    """Draw (size, size): normal noise on a cells x cells grid, interpolated."""
    position = np.linspace(0, cells - 1, size)
    low = np.minimum(position.astype(int), cells - 2)
    part = position - low
    part = part * part * (3 - 2 * part)
    weights = np.zeros((size, cells))
    weights[np.arange(size), low] = 1 - part
    weights[np.arange(size), low + 1] = part
    return weights @ rng.normal(size=(cells, cells)) @ weights.T


def _colour(rng: np.random.Generator, saturation: tuple, value: tuple) -> np.ndarray:
    return 255 * np.array(hsv_to_rgb(rng.uniform(), rng.uniform(*saturation), rng.uniform(*value)), np.float32)


def _place(rng: np.random.Generator, size: int, circles: list) -> tuple[float, float, float]:
    """Draw (centre x, centre y, radius in pixels), sometimes within an earlier shape that has the room."""
    smallest = RADIUS[0] * size
    hosts = [circle for circle in circles if circle[2] > 2 * smallest]
    if hosts and rng.uniform() < NESTED:
        x, y, radius = hosts[int(rng.integers(len(hosts)))]
        shift_x, shift_y = rng.uniform(-0.1, 0.1, 2) * radius
        return x + shift_x, y + shift_y, rng.uniform(smallest, 0.5 * radius)
    radius = size * np.exp(rng.uniform(*np.log(RADIUS)))
    margin = 0.6 * radius  # so that some shapes are cut by the border
    x, y = rng.uniform(margin, size - margin, 2)
    return x, y, radius


def _cover(
    rng: np.random.Generator,
    name: str,
    size: int,
    centre_x: float,
    centre_y: float,
    radius: float,
) -> tuple[np.ndarray, tuple]:
    """Draw the shape at a random angle: (coverage of each pixel 0..1, (u, v, distance inside, radius))."""
    angle = rng.uniform(0, 2 * np.pi)
    radius = radius * STRETCH.get(name, 1.0)
    y, x = np.mgrid[0:size, 0:size].astype(np.float32) + 0.5
    x, y = x - np.float32(centre_x), y - np.float32(centre_y)
    u = (np.cos(angle) * x + np.sin(angle) * y).astype(np.float32)
    v = (np.cos(angle) * y - np.sin(angle) * x).astype(np.float32)
    inside = _distance_inside(name, u, v, radius)
    return (inside + 0.5).clip(0, 1), (u, v, inside, radius)


def _distance_inside(name: str, u: np.ndarray, v: np.ndarray, radius: float) -> np.ndarray:
    """Return pixels from the outline, positive inside (exact on the straight edges, where it is needed)."""
    if name == "circle":
        return 0.9 * radius - np.hypot(u, v)
    if name == "square":
        return 0.8 * radius - np.maximum(abs(u), abs(v))
    corners = 3 if name == "triangle" else 5
    sector = 2 * np.pi / corners
    # fold the plane into one half sector, where the outline is one straight edge from a corner to a notch
    theta = abs(np.mod(np.arctan2(v, u) + sector / 2, sector) - sector / 2)
    distance = np.hypot(u, v)
    notch = 0.5 * radius * (1.0 if name == "triangle" else 0.86)
    dent_x = notch * np.cos(sector / 2)
    dent_y = notch * np.sin(sector / 2)
    length = np.hypot(dent_x - radius, dent_y)
    edge_x = (dent_x - radius) / length
    edge_y = dent_y / length
    return edge_x * distance * np.sin(theta) - edge_y * (distance * np.cos(theta) - radius)


def _all_visible(owner: np.ndarray, mask: np.ndarray, full_areas: list[int]) -> bool:
    visible = np.bincount(owner[(owner >= 0) & ~mask], minlength=len(full_areas))
    return bool((visible >= MIN_VISIBLE * np.array(full_areas)).all()) if full_areas else True


def _paint(rng: np.random.Generator, canvas: np.ndarray, coverage: np.ndarray, local: tuple, typical: str) -> str:
    """Blend a shape with a dark rim and a texture, mostly that of its class, into `canvas`; return the texture."""
    u, v, inside, radius = local
    under = canvas[coverage > 0.5].mean(axis=0)
    colours = [_colour(rng, (0.35, 1.0), (0.35, 1.0)) for _ in range(8)]
    colour = max(colours[: int(rng.integers(2, 9))], key=lambda c: float(abs(c - under).sum()))
    period = rng.uniform(4, 8)
    texture = typical if rng.uniform() < TYPICAL else ATTRIBUTES[int(rng.integers(5))]
    if texture == "stripes":
        pattern = np.sin(2 * np.pi * u / period)
    elif texture == "checks":
        pattern = np.sign(np.sin(2 * np.pi * u / period) * np.sin(2 * np.pi * v / period))
    elif texture == "rings":
        pattern = np.cos(2 * np.pi * inside / period)
    elif texture == "shading":
        pattern = 1 - 2 * np.hypot(u, v) / radius
    else:
        pattern = _smooth_noise(
            rng,
            len(u),
            max(4, int(len(u) / period)),
        )
    paint = colour + (rng.uniform(12, 36) * pattern)[..., None]
    rim = ((1.5 - inside).clip(0, 1) * rng.uniform(0.2, 0.55))[..., None]
    paint = paint * (1 - rim)
    canvas += coverage[..., None] * (paint - canvas)
    return texture


def _visible(mask: np.ndarray, left: int = 0, top: int = 0) -> dict:
    """Return `bbox`, `area` and `polygons` of an object whose mask begins at (left, top) of the picture."""
    columns = np.flatnonzero(mask.any(axis=0))
    rows = np.flatnonzero(mask.any(axis=1))
    x, y = int(columns[0]), int(rows[0])
    return {
        "bbox": [left + x, top + y, int(columns[-1]) + 1 - x, int(rows[-1]) + 1 - y],
        "area": int(mask.sum()),
        "polygons": tuple(ring + [left, top] for ring in outlines(mask)),
    }


def _relations(objects: list[dict]) -> list[tuple[int, int, int]]:
    """Return one spatial predicate for each ordered pair that touches or lies in one line, and "larger than"."""
    boxes = np.array([item["bbox"] for item in objects], float)
    low = boxes[:, :2]
    high = boxes[:, :2] + boxes[:, 2:]
    centre = (low + high) / 2
    triples = []
    for s, o in itertools.permutations(range(len(objects)), 2):
        dx, dy = centre[s] - centre[o]
        predicate = None
        if (low[s] >= low[o]).all() and (high[s] <= high[o]).all():
            predicate = "inside"
        elif (low[o] >= low[s]).all() and (high[o] <= high[s]).all():
            predicate = "contains"
        elif (np.minimum(high[s], high[o]) > np.maximum(low[s], low[o])).all():
            predicate = "overlaps"
        elif abs(dx) > 2 * abs(dy):
            predicate = "left of" if dx < 0 else "right of"
        elif abs(dy) > 2 * abs(dx):
            predicate = "above" if dy < 0 else "below"
        if predicate:
            triples.append((s, o, PREDICATES.index(predicate)))
        if objects[s]["area"] > 3 * objects[o]["area"]:
            triples.append((s, o, PREDICATES.index("larger than")))
    return triples


def open_shapes(split: str, reading: Reading) -> DetectionTable:
    """Open a split of the bundled shapes, which are written to the cache on the first call.

    Of `reading`, only `cache_dir` and `masks` are used.

    Raises BadInput if the split is unknown, or `reading` has a `name`.
    """
    if split not in SPLITS or reading.name is not None:
        asked = repr(split) if reading.name is None else f"data set {reading.name!r}"
        others = f"--data.format {', '.join(other for other in FORMATS if other != 'shapes')}"
        remedy = f"choose from {', '.join(SPLITS)}, or set the format of your data ({others})"
        raise BadInput(f"the bundled shapes have no {asked}; {remedy}")
    folder = ensure_shapes(reading.cache_dir)
    as_they_are = Reading(image_dir=folder / split, cache_dir=reading.cache_dir, masks=reading.masks)
    return read_coco(folder / "annotations" / f"{split}.json", as_they_are)


@exit_on_bad_input
def main(arguments: list[str] | None = None) -> None:
    """Write the bundled shapes as a COCO data set to a folder."""
    parser = argparse.ArgumentParser(description="Writes the bundled shapes as a COCO data set.")
    parser.add_argument("--out", type=Path, required=True, help="new or empty folder")
    parser.add_argument("--train-images", type=int, default=1000)
    parser.add_argument("--val-images", type=int, default=200)
    parser.add_argument("--image-size", type=int, default=128, help="pixels, both sides")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--large", action="store_true", help="pictures of 2,000 x 1,500 px with shapes of 8 to 20 px")
    options = parser.parse_args(arguments)
    make_shapes(**vars(options))
    print(f"{options.out}: {options.train_images} training and {options.val_images} validation images")


if __name__ == "__main__":
    raise SystemExit(main())
