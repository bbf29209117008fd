"""Loading of batches for DETR at 800 px: this toolkit against Pillow, one core each.

Both read the same JPEG files and do the same geometry (flip; resize, or resize, crop and resize), boxes and padded
batches included. The Pillow side is facebookresearch/detr `datasets/transforms.py` and `util/misc.py` written plainly:
its workers decode, normalise and pad in float32. Our workers return uint8, and the device normalises.
"""

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms import functional as F

from toolkit.base.batch import Batch, normalize_images
from toolkit.data.batches import collate
from toolkit.data.dataset import DetectionDataset
from toolkit.data.sampling import SampleKey
from toolkit.data.table import Category, DetectionTable
from toolkit.data.table_cache import write_rows
from toolkit.data.transforms.geometry import DETR_SCALES, detr_train_transform, shorter_side_size

from .measuring import medians, table_row

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def bench_loading(num_images: int = 64, batch_size: int = 8, repeats: int = 5, seed: int = 0) -> list[dict]:
    """Measure the images per second of one core: medians over `repeats` interleaved rounds of `num_images` images.

    Rows: images/s of ours, of ours with the normalisation on the same core (in training the device does it), and of
    Pillow; the ratios of both to Pillow, and ours against itself (the noise).
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            table = write_photographs(Path(folder), num_images, seed)
            dataset = DetectionDataset(table, detr_train_transform(), seed)

            def ours(epoch: int, indices: Sequence[int]) -> Batch:
                return collate([dataset[SampleKey(epoch, i)] for i in indices])

            def ours_normalized(epoch: int, indices: Sequence[int]) -> Tensor:
                batch = ours(epoch, indices)
                return normalize_images(batch.images, batch.sizes, MEAN, STD)

            def pillow(epoch: int, indices: Sequence[int]) -> tuple:
                random.seed(f"{seed} {epoch} {indices[0]}")
                return pillow_collate([pillow_sample(table, i) for i in indices])

            batches = [range(i, min(i + batch_size, num_images)) for i in range(0, num_images, batch_size)]
            loads = (ours, pillow, ours_normalized, ours)
            seconds = [[_seconds(load, epoch, batches) for load in loads] for epoch in range(repeats + 1)]
            rounds = [[num_images / duration for duration in times] for times in seconds[1:]]
    finally:
        torch.set_num_threads(threads)
    measured = {
        "ours": ("images/s/core", [ours for ours, _, _, _ in rounds]),
        "ours, normalised on the core": ("images/s/core", [normalized for _, _, normalized, _ in rounds]),
        "Pillow": ("images/s/core", [pillow for _, pillow, _, _ in rounds]),
        "ours / Pillow": ("x", [ours / pillow for ours, pillow, _, _ in rounds]),
        "ours, normalised on the core / Pillow": ("x", [normalized / pillow for _, pillow, normalized, _ in rounds]),
        "ours / ours (noise)": ("x", [ours / again for ours, _, _, again in rounds]),
    }
    return medians("loading: ", measured)


def _seconds(load: Callable[[int, Sequence[int]], object], epoch: int, batches: Sequence[Sequence[int]]) -> float:
    """Measure processor seconds, so that other programs on the machine count for little; everything runs on one
    thread."""
    start = time.process_time()
    for indices in batches:
        load(epoch, indices)
    return time.process_time() - start


def write_photographs(folder: Path, count: int, seed: int) -> DetectionTable:
    """Write 640 x 480 JPEGs of quality 90 with the file size of photographs in COCO (about 160 kB), and return a table
    of them with 7 boxes each."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        boxes = _write_photograph(folder / f"{i}.jpg", rng)
        rows.append(table_row(i, (640, 480), boxes, np.zeros(len(boxes), int)))
    return write_rows(rows, cache_file=folder / "table.json", categories=[Category(1, "thing")], image_root=folder)


def _write_photograph(path: Path, rng: np.random.Generator) -> np.ndarray:
    """Write noise on every scale from the whole picture to the pixel, under filled ellipses. Returns their boxes (7,
    4) float32 xyxy."""
    pixels = np.zeros((480, 640, 3), dtype=np.float32)
    for octave in range(1, 8):
        shape = (max(480 >> (7 - octave), 2), max(640 >> (7 - octave), 2), 3)
        noise = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))
        noise = noise.resize((640, 480), Image.Resampling.BICUBIC)
        pixels += (np.asarray(noise, dtype=np.float32) - 128) * 0.8**octave
    image = Image.fromarray((pixels * 0.7 + 128).clip(0, 255).astype(np.uint8))
    corners = rng.uniform((0, 0), (540, 380), (7, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(20, 100, (7, 2))], axis=1).astype(np.float32)
    draw = ImageDraw.Draw(image)
    for box in boxes:
        draw.ellipse(box.tolist(), outline=tuple(rng.integers(0, 256, 3).tolist()), width=4)
    image.save(path, quality=90)
    return boxes


# ---- the Pillow pipeline ---------------------------------------------------------------------------------------------


def pillow_sample(table: DetectionTable, index: int) -> tuple[Tensor, dict]:
    """Return one augmented, normalised float32 image (3, H, W) with its target, as DETR's own code does; boxes are
    cxcywh, as fractions of the image."""
    row = table.row(index)
    image = Image.open(table.image_source(row)).convert("RGB")
    objects = row["objects"]
    names = {"boxes": "bbox", "labels": "category", "area": "area", "iscrowd": "iscrowd"}
    target = {name: torch.as_tensor(objects[column]) for name, column in names.items()}
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        boxes = target["boxes"][:, [2, 1, 0, 3]] * torch.tensor([-1, 1, -1, 1])
        target["boxes"] = boxes + torch.tensor([image.width, 0, image.width, 0])
    if random.random() < 0.5:
        image, target = _pillow_resize(image, target, random.choice((400, 500, 600)), None)
        image, target = _pillow_crop(image, target)
    image, target = _pillow_resize(image, target, random.choice(DETR_SCALES), 1333)
    pixels = F.normalize(F.to_tensor(image), MEAN, STD)
    x_min, y_min, x_max, y_max = target["boxes"].unbind(-1)
    boxes = torch.stack([(x_min + x_max) / 2, (y_min + y_max) / 2, x_max - x_min, y_max - y_min], dim=-1)
    size = torch.tensor([image.width, image.height, image.width, image.height], dtype=torch.float32)
    return pixels, {**target, "boxes": boxes / size}


def _pillow_resize(image: Image.Image, target: dict, size: int, max_size: int | None) -> tuple[Image.Image, dict]:
    height, width = shorter_side_size((image.height, image.width), size, max_size)
    x, y = width / image.width, height / image.height
    boxes = target["boxes"] * torch.as_tensor([x, y, x, y])
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return resized, {**target, "boxes": boxes, "area": target["area"] * (x * y)}


def _pillow_crop(image: Image.Image, target: dict) -> tuple[Image.Image, dict]:
    width, height = random.randint(384, min(image.width, 600)), random.randint(384, min(image.height, 600))
    top, left = random.randint(0, image.height - height), random.randint(0, image.width - width)
    boxes = target["boxes"] - torch.as_tensor([left, top, left, top])
    boxes = torch.min(boxes.reshape(-1, 2, 2), torch.as_tensor([width, height], dtype=torch.float32)).clamp(min=0)
    area = (boxes[:, 1] - boxes[:, 0]).prod(dim=1)
    keep = (boxes[:, 1] > boxes[:, 0]).all(dim=1)
    target = {**target, "boxes": boxes.reshape(-1, 4), "area": area}
    return image.crop((left, top, left + width, top + height)), {name: v[keep] for name, v in target.items()}


def pillow_collate(samples: Sequence[tuple[Tensor, dict]]) -> tuple[Tensor, Tensor, list[dict]]:
    """Pad images with zeros, as DETR's `nested_tensor_from_tensor_list`. Return the images (B, 3, H, W), a mask (B, H,
    W) that is True in the padding, and the targets."""
    images = [image for image, _ in samples]
    height, width = max(i.shape[1] for i in images), max(i.shape[2] for i in images)
    padded = torch.zeros(len(images), 3, height, width)
    mask = torch.ones(len(images), height, width, dtype=torch.bool)
    for image, into, padding in zip(images, padded, mask, strict=True):
        into[:, : image.shape[1], : image.shape[2]].copy_(image)
        padding[: image.shape[1], : image.shape[2]] = False
    return padded, mask, [target for _, target in samples]
