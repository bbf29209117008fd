"""Finds identical and near-duplicate images, by bytes and by appearance, and splits data so that these stay together.

An image's signature is a digest of its encoded bytes and a thumbnail of 16 x 16 grey values. Two images look alike if
at least 54 of 64 signs (is a cell brighter than its right neighbour, on 8 x 8 cells) agree and the thumbnails have a
correlation of at least 0.97. Frames of a video a moment apart look alike; different views of one object do not. Up to
20,000 images, all pairs are compared. Above that, only pairs whose signs agree in one of seven parts are compared,
which finds all pairs with up to 6 different signs and 94 % of those with 9.

N pictures of one fixed camera are N² / 2 pairs. Above a million pairs, only a subset is kept that gives the same
groups: for each image one partner in each split, and a spanning forest of the groups.
"""

import contextlib
import dataclasses
import hashlib
import logging
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from toolkit.base.errors import BadInput
from toolkit.base.files import fsync_folder
from toolkit.data.check_files import map_in_threads, reading_threads
from toolkit.data.classes import with_classes
from toolkit.data.decoding import ImageError, decode_image
from toolkit.data.image_sources import Stored, digest_of
from toolkit.data.splits import Fold
from toolkit.data.table import DetectionTable
from toolkit.data.table_cache import cache_root, fingerprint_in_cache

logger = logging.getLogger(__name__)

THUMBNAIL_SIDE = 16  # pixels
MAX_DIFFERING_SIGNS = 10  # of 64
MIN_CORRELATION = 0.97
BANDS = 7  # of the signs
MAX_IMAGES_FOR_ALL_PAIRS = 20_000  # images
MAX_PAIRS = 1_000_000
CACHE_VERSION = 4
SHARE_TOLERANCE = 0.1  # tolerated deviation from the share to be held out, relative to it


@dataclass(frozen=True)
class ImageSignatures:
    """Signatures of N images.

    Attributes:
        digests: (N,) hashes of the encoded bytes, as hex digits.
        thumbnails: (N, 16, 16) uint8 grey values, black for an image that cannot be decoded.
    """

    digests: np.ndarray
    thumbnails: np.ndarray

    def __len__(self) -> int:
        return len(self.digests)


def thumbnail_of(image: torch.Tensor) -> np.ndarray:
    """Return the thumbnail of an image uint8 (3, H, W): (16, 16) uint8, the mean grey values of 16 x 16 cells."""
    height, width = image.shape[-2:]
    step = max(1, min(height, width) // 128)  # a sample of the pixels is enough for a mean
    grey = image[:, ::step, ::step].float().mean(0)
    cells = torch.nn.functional.adaptive_avg_pool2d(grey[None, None], THUMBNAIL_SIDE)[0, 0]
    return cells.round().to(torch.uint8).numpy()


def signatures_of(table: DetectionTable, cache_dir: str | Path | None = None) -> ImageSignatures:
    """Return digests and thumbnails of a table's images, which are decoded in parallel.

    They are cached by the content of the table, and by the sizes and modification times of the image files.
    """
    root = table.image_root
    key = hashlib.blake2b(f"looks {CACHE_VERSION} {table.fingerprint}{_white_of(table)}".encode(), digest_size=16)
    for name in table.file_names() if root is not None else ():
        key.update(_stamp(root / name).encode(errors="surrogateescape"))

    def read(index: int) -> list[tuple[str, bytes]]:
        return [_digest_and_thumbnail(table.image_source(table.row(index)), table.white)]

    def make() -> dict[str, np.ndarray]:
        results = map_in_threads(
            read,
            range(len(table)),
            "comparing images",
            None if root is None else reading_threads(root),
        )
        thumbnails = np.frombuffer(b"".join(thumbnail for _, thumbnail in results), np.uint8)
        return {
            "digests": np.array([digest for digest, _ in results], dtype="S32"),
            "thumbnails": thumbnails.reshape(-1, THUMBNAIL_SIDE, THUMBNAIL_SIDE),
        }

    expected = {
        "digests": np.empty(len(table), "S32"),
        "thumbnails": np.empty((len(table), THUMBNAIL_SIDE, THUMBNAIL_SIDE), np.uint8),
    }
    return ImageSignatures(**_cached_arrays(f"looks/{key.hexdigest()}.npz", expected, make, cache_dir))


# What zipfile and NumPy raise while they read an archive of arbitrary bytes.
_OF_DAMAGED_ARCHIVES = (
    *(OSError, EOFError, zipfile.BadZipFile, zlib.error, struct.error),  # cut short, or not an archive
    *(ValueError, KeyError, TypeError, SyntaxError, OverflowError),  # headers that say something else
    *(NotImplementedError, RuntimeError, MemoryError),  # compression, encryption or sizes of its headers
)


def _cached_arrays(
    name: str,
    expected: Mapping[str, np.ndarray],
    make: Callable[[], Mapping[str, np.ndarray]],
    cache_dir: str | Path | None,
) -> Mapping[str, np.ndarray]:
    """Return the arrays of the file `name` of the cache; what `make` returns, and write it there, if there are none.

    expected: arrays with the names, shapes and types that they must have; otherwise they are damaged, which is logged,
        and are made anew.
    """
    file = cache_root(cache_dir) / name
    try:
        return _arrays_in(file, expected)
    except FileNotFoundError:
        pass
    except _OF_DAMAGED_ARCHIVES as error:
        fault = type(error).__name__
        logger.warning("%s: this file of the cache is damaged (%s); it is made anew", file, fault)
    made = make()
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time, nothing else
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}-{id(made)}.tmp.npz")
        np.savez(temporary, **made)
        fsync_folder(temporary)
        temporary.replace(file)
    return made


def _arrays_in(file: Path, expected: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Read an `.npz` file, whose members have checksums, which are compared. Raises ValueError: others are expected."""
    with np.load(file, allow_pickle=False) as saved:
        arrays = {name: saved[name] for name in expected}
    for name, array in arrays.items():
        if array.shape != expected[name].shape or array.dtype != expected[name].dtype:
            raise ValueError(f"{file}: {name} is {array.dtype} {array.shape}")
    return arrays


def same_files(signatures: ImageSignatures) -> list[list[int]]:
    """Return all groups of two or more images with the same bytes, as lists of indices."""
    _, inverse, counts = np.unique(signatures.digests, return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")
    starts = np.cumsum(counts) - counts
    return [order[start : start + count].tolist() for start, count in zip(starts, counts, strict=True) if count > 1]


def alike_pairs(signatures: ImageSignatures, splits: np.ndarray | None = None) -> list[tuple[int, int]]:
    """Return pairs of indices (i < j) of images that look alike.

    Of images with the same bytes, only the first is compared with other images, and each of the rest is paired with the
    first, so that thousands of copies are thousands of pairs and not millions.

    Args:
        splits: (N,) int64, the number of the split of each image; None: all images are in one split.
    """
    firsts = np.sort(np.unique(signatures.digests, return_index=True)[1])
    kept = _Pairs(np.zeros(len(firsts), np.int64) if splits is None else splits[firsts])
    for i, j in _candidate_pairs(signatures.thumbnails[firsts], kept):
        kept.add(i, j)
    copies = [(group[0], other) for group in same_files(signatures) for other in group[1:]]
    return sorted({*map(tuple, firsts[kept.pairs()].tolist()), *copies})


class _Pairs:
    """Collector of pairs of images; above `MAX_PAIRS` it keeps the subset that the module's docstring describes."""

    def __init__(self, splits: np.ndarray):
        self.splits = splits
        self._chunks = [np.empty((0, 2), np.int64)]
        self._new = 0
        self._thinned = False

    def add(self, i: np.ndarray, j: np.ndarray) -> None:
        self._chunks.append(np.stack([np.minimum(i, j), np.maximum(i, j)], axis=1))
        self._new += len(i)
        if self._new > MAX_PAIRS:
            self._thin()

    def adds(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """Return (P,) bool: whether a pair adds anything to those kept so far."""
        if not self._thinned:
            return np.ones(len(i), bool)
        news = self._unpaired[self.splits[j], i] | self._unpaired[self.splits[i], j]
        return news | (self._group[i] != self._group[j])

    def pairs(self) -> np.ndarray:
        """Return (P, 2) int64, the smaller index first."""
        if self._thinned:
            self._thin()
        return np.concatenate(self._chunks)

    def _thin(self) -> None:
        from scipy.sparse.csgraph import minimum_spanning_tree

        pairs = np.concatenate(self._chunks)
        count = len(self.splits)
        first = np.full((self.splits.max() + 1, count), count)  # of each image in each split its first partner
        for image, partner in (pairs.T, pairs.T[::-1]):
            np.minimum.at(first, (self.splits[partner], image), partner)
        self._unpaired = first == count
        partners = np.stack([np.nonzero(~self._unpaired)[1], first[~self._unpaired]], axis=1)
        forest = minimum_spanning_tree(_adjacency(count, pairs))
        self._group = groups(count, pairs)
        kept = np.sort(np.concatenate([partners, np.stack(forest.nonzero(), axis=1)]), axis=1)
        self._chunks = [np.unique(kept, axis=0)]
        self._new = 0
        self._thinned = True


def groups(count: int, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return (count,) int64: for each image, the smallest index in its connected component of the graph of pairs."""
    from scipy.sparse.csgraph import connected_components

    group = connected_components(_adjacency(count, np.array(pairs, np.int64).reshape(-1, 2)), directed=False)[1]
    return np.unique(group, return_index=True)[1][group]


def _adjacency(count: int, pairs: np.ndarray):
    from scipy.sparse import coo_array  # here: few data sets need it, and every start would wait for it

    return coo_array((np.ones(len(pairs)), pairs.T), shape=(count, count))


def hold_out(
    table: DetectionTable,
    share: float | Fold,
    cache_dir: str | Path | None = None,
) -> tuple[DetectionTable, DetectionTable]:
    """Split a table into a rest and a part to hold out, and return the tables (rest, part).

    Images that look alike stay together. Which images are held out is cached, and does not depend on `data.classes`.

    share: the part: a share of the images, from 0 to 1, which is met approximately; or a fold.
    """
    data = table.before_classes or table
    is_fold = isinstance(share, Fold)
    amount = f"{share.number}of{share.of}" if is_fold else f"{share:g}"

    def name_of(part: str) -> str:
        return f"{data.fingerprint}-{amount}-{part}-{CACHE_VERSION}{_white_of(data)}"

    def make() -> dict[str, np.ndarray]:
        signatures = signatures_of(data, cache_dir)
        is_held = folds_of(signatures, share.of) == share.number - 1 if is_fold else held_out(signatures, share)
        return {"is_held": is_held}

    expected = {"is_held": np.empty(len(data), bool)}
    is_held = _cached_arrays(f"looks/{name_of('held')}.npz", expected, make, cache_dir)["is_held"]
    parts = []
    for part_name, rows in (("rest", ~is_held), ("held", is_held)):
        # Earlier versions wrote the parts as tables: their runs go on with the fingerprints of these.
        written = cache_root(cache_dir) / "tables" / f"{name_of(part_name)}.json"
        part = data.select(rows, fingerprint_in_cache(written))
        part = dataclasses.replace(part, problems=[])
        parts.append(part if data is table else with_classes(part, table.class_map))
    rest, part = parts
    return rest, part


def _white_of(table: DetectionTable) -> str:
    """Return a part of the name of a cache: with another white level, other images look alike."""
    return f"-white{table.white}" if table.white else ""


def held_out(signatures: ImageSignatures, share: float) -> np.ndarray:
    """Choose about `share` of the images to hold out, only by the images' bytes; return a bool mask (N,).

    Each group of images that look alike is held out or kept as a whole. The digests of a group give it a number in
    [0, 1), by which groups are ordered. The groups with numbers below `share` are held out. If these miss the share by
    more than a tenth of it, because groups are few or large, each group in turn is held out if this brings the number
    of held-out images closer to the share.

    The order does not change when images are added, so that nearly all images stay on their side. Exceptions are groups
    at the border, a group that an added image joins, and a group that was too large for the share before.

    Raises BadInput if all images look alike.
    """
    member, fractions = _places(signatures, share)
    order = sorted(fractions, key=fractions.get)
    sizes = np.bincount(member)[order]
    wanted = share * len(member)
    below = sum(fraction < share for fraction in fractions.values())
    is_taken = np.arange(len(order)) < min(max(below, 1), len(order) - 1)
    if abs(sizes[is_taken].sum() - wanted) > SHARE_TOLERANCE * wanted:
        is_taken = _closest(sizes, wanted)
    return np.isin(member, np.array(order)[is_taken])


def _closest(sizes: np.ndarray, wanted: float) -> np.ndarray:
    """Take each of G groups in turn if it brings the sum of the sizes taken closer to `wanted`; return a mask (G,).

    sizes: (G,) sizes of the groups. At least one group is taken (the smallest, if no other is), and one is left.
    """
    is_taken = np.zeros(len(sizes), bool)
    held = 0
    for index, size in enumerate(sizes.tolist()):
        is_closer = abs(held + size - wanted) < abs(held - wanted)
        if is_closer and held + size < sizes.sum():
            is_taken[index] = True
            held += size
    if not held:
        is_taken[sizes.argmin()] = True
    return is_taken


def folds_of(signatures: ImageSignatures, folds: int) -> np.ndarray:
    """Return (N,) int64: the fold of each image, counted from 0, chosen only by the images' bytes.

    folds: the number of folds. They have about the same number of images, and images that look alike are in the same
    fold. Raises BadInput if a fold would be empty.
    """
    member, fractions = _places(signatures, f"1/{folds}")
    place = np.array([fractions[group] for group in member.tolist()])
    order = np.lexsort((member, place))
    starts = np.flatnonzero(np.r_[True, np.diff(member[order]) != 0])
    sizes = np.diff(np.r_[starts, len(member)])
    fold = np.empty(len(member), np.int64)
    fold[order] = np.repeat((starts + sizes / 2) * folds // len(member), sizes)
    empty = sorted({*range(folds)} - {*fold.tolist()})
    if empty:
        raise BadInput(
            f"data.val 1/{folds}: fold {empty[0] + 1} would be empty, because {len(signatures)} images make only "
            f"{len(fractions)} groups that do not look alike; ask for fewer folds"
        )
    return fold


def _places(signatures: ImageSignatures, val: object) -> tuple[np.ndarray, dict[int, float]]:
    """Return the group (N,) of each image, and for each group a number in [0, 1)."""
    member = groups(len(signatures), alike_pairs(signatures))
    least: dict[int, bytes] = {}
    for index, group in enumerate(member.tolist()):
        digest = bytes(signatures.digests[index])
        least[group] = min(digest, least.get(group, digest))
    if len(least) < 2:
        raise BadInput(
            f"data.val {val}: all {len(signatures)} images look alike, so no share of them says anything about other "
            "images; give validation data of its own"
        )
    return member, {group: _fraction(digest) for group, digest in least.items()}


def _fraction(digest: bytes) -> float:
    """Map a digest to a number in [0, 1), evenly spread for any digests."""
    return int.from_bytes(hashlib.blake2b(digest, digest_size=6).digest()) / 2**48


def _digest_and_thumbnail(source: Path | Stored | bytes, white: int | None) -> tuple[str, bytes]:
    """Return the digest of an image, and its thumbnail as bytes.

    Not as an array, which would lie among the decoded images and keep the memory of each from being reused.
    """
    try:
        data = source if isinstance(source, bytes) else source.read_bytes()
        pixels = decode_image(bytes(data), white=white)
        return hashlib.blake2b(data, digest_size=16).hexdigest(), thumbnail_of(pixels).tobytes()
    except (OSError, ImageError):
        digest = hashlib.blake2b(str(source).encode(errors="surrogateescape"), digest_size=16).hexdigest()
        return digest, bytes(THUMBNAIL_SIDE * THUMBNAIL_SIDE)


def _stamp(source: Path | Stored) -> str:
    if isinstance(source, Stored):
        return f"{source} {source.size} {source.stamp} "
    return f"{source} {digest_of(source)} "


def _signs(thumbnails: np.ndarray) -> np.ndarray:
    """Return (N,) uint64: whether each of 8 x 8 cells is brighter than the next in its row (the last: than the first).
    """
    cells = thumbnails.reshape(-1, 8, 2, 8, 2).astype(np.int32).sum((2, 4))
    brighter = (cells > np.roll(cells, -1, axis=2)).reshape(-1, 64)
    return np.packbits(brighter, axis=1).view(np.uint64)[:, 0]


def _normed(thumbnails: np.ndarray) -> np.ndarray:
    """Return (N, 256) float32 without mean and of length 1; zeros for uniform pictures."""
    flat = thumbnails.reshape(len(thumbnails), -1).astype(np.float32)
    flat -= flat.mean(1, keepdims=True)
    return flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-6)


def _candidate_pairs(thumbnails: np.ndarray, kept: _Pairs) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield index arrays (i, j) of the pairs that look alike, some of them repeatedly or the other way round."""
    signs = _signs(thumbnails)
    normed = _normed(thumbnails)
    # two even pictures have no correlation: they are alike when they have the same grey
    even = np.abs(normed).sum(1) == 0
    grey = np.where(
        even,
        thumbnails[:, 0, 0].astype(np.int64),
        -1 - np.arange(len(thumbnails)),
    )
    if len(signs) <= MAX_IMAGES_FOR_ALL_PAIRS:
        for start in range(0, len(normed), 512):
            here = slice(start, start + 512)
            close = (normed[here] @ normed.T >= MIN_CORRELATION) | (grey[here, None] == grey)
            close &= np.bitwise_count(signs[here, None] ^ signs) <= MAX_DIFFERING_SIGNS
            i, j = np.nonzero(np.triu(close, start + 1))
            yield i + start, j
        return
    for i, j in _same_parts(signs):
        close = kept.adds(i, j) & (np.bitwise_count(signs[i] ^ signs[j]) <= MAX_DIFFERING_SIGNS)
        i = i[close]
        j = j[close]
        similar = np.einsum("nk,nk->n", normed[i], normed[j]) >= MIN_CORRELATION
        similar |= grey[i] == grey[j]
        yield i[similar], j[similar]


def _same_parts(signs: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield index arrays (i, j) of the pairs whose signs agree in one of the parts."""
    bits = -(-64 // BANDS)
    for band in range(BANDS):
        part = (signs >> np.uint64(band * bits)) & np.uint64((1 << bits) - 1)
        order = np.argsort(part, kind="stable")
        # shifted against itself, the sorted list pairs each image with the next, the one after, ... of its bucket
        for shift in range(1, len(order)):
            same = part[order[:-shift]] == part[order[shift:]]
            if not same.any():
                break
            yield order[:-shift][same], order[shift:][same]
