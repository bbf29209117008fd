"""Turns a row of the table into an augmented sample, as a deterministic function of (seed, epoch, index)."""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from toolkit.batch import Target
from toolkit.data.decoding import ImageError, decode_image
from toolkit.data.sampling import SampleKey
from toolkit.data.table import DetectionTable
from toolkit.data.transforms.geometry import Transform, mirrored_predicates, recheck_boxes
from toolkit.errors import BadInput


def sample_generator(seed: int, epoch: int, index: int, turn: int = 0) -> torch.Generator:
    """A generator that depends on these numbers only; 64 bits of a hash, so neighbours have nothing in common.

    turn: 0, or how often the image came before in this epoch.
    """
    text = f"{seed} {epoch} {index} {turn}" if turn else f"{seed} {epoch} {index}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def row_target(row: dict, size_hw: tuple[int, int]) -> Target:
    """The target of a table row, for its image of `size_hw` as decoded.

    image_id; boxes (N, 4) float32 xyxy; labels (N,) int64; area (N,) float32; iscrowd (N,) int64; relations (R, 3)
    int64 subject, object, predicate; orig_size and size (2,) int64 (h, w). Of tables with attributes also attributes
    (N, A) int64, ids from 1, 0 after the last.
    """
    objects, relations = row["objects"], row["relations"]
    ends = [relations[name] for name in ("subject", "object", "predicate")]
    target = {
        "image_id": row["image_id"],
        "boxes": torch.from_numpy(objects["bbox"]),
        "labels": torch.from_numpy(objects["category"]),
        "area": torch.from_numpy(objects["area"]),
        "iscrowd": torch.from_numpy(objects["iscrowd"]),
        "relations": torch.from_numpy(np.stack(ends, axis=1)),
        "orig_size": torch.tensor(size_hw),
        "size": torch.tensor(size_hw),
    }
    if "attributes" in objects:
        target["attributes"] = torch.from_numpy(objects["attributes"])
    return target


class DetectionDataset(torch.utils.data.Dataset):
    """Samples of a table: `dataset[SampleKey(epoch, index)]` is (image uint8 (3, H, W), target).

    Args:
        table: the images and their boxes.
        transform: `(image, target, generator) -> (image, target)`, see `toolkit.data.transforms.geometry`; one more
            argument, the size (h, w) wanted, for keys that carry one (`toolkit.data.variable_sizes`).
        seed: with epoch and index the only thing the augmentation depends on; neither workers nor resuming matter.
        cache_images: decode every image now and keep it as uint8; for sets of a few thousand small images. Workers
            that are forked share the memory.
        mirrored: pairs of predicates that change places in a mirrored picture, see `mirrored_predicates`.

    Raises BadInput naming file and image id when an image cannot be decoded.
    """

    def __init__(
        self,
        table: DetectionTable,
        transform: Transform,
        seed: int = 0,
        cache_images: bool = False,
        mirrored: Mapping[str, str] | None = None,
    ):
        self._mirrored = mirrored_predicates(table.predicates, mirrored) if table.predicates or mirrored else None
        self.table, self.transform, self.seed = table, transform, seed
        self._cache = [self._decode(table.row(i)) for i in range(len(table))] if cache_images else None

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, key: SampleKey) -> tuple[Tensor, Target]:
        return self._augmented(*self._read(key.index), key, sample_generator(self.seed, key.epoch, key.index, key.turn))

    def _read(self, index: int) -> tuple[Tensor, Target]:
        row = self.table.row(index)
        image = self._decode(row) if self._cache is None else self._cache[index]
        return image, row_target(row, tuple(image.shape[-2:]))

    def _augmented(
        self,
        image: Tensor,
        target: Target,
        key: SampleKey,
        generator: torch.Generator,
        transform: Transform | None = None,
    ) -> tuple[Tensor, Target]:
        size = () if key.size_hw is None else (key.size_hw,)
        if self._mirrored is not None:
            target = {**target, "mirrored_predicates": self._mirrored}
        image, target = (transform or self.transform)(image, target, generator, *size)
        target.pop("mirrored_predicates", None)
        return image, recheck_boxes(image, target)

    def _decode(self, row: dict) -> Tensor:
        try:
            return decode_image(self.table.image_source(row), self.table.max_image_pixels)
        except ImageError as error:
            raise BadInput(f"{row['file_name']}: image id {row['image_id']} cannot be read: {error}") from error
