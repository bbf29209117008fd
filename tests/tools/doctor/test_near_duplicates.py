"""Images that are the same or look alike are found, counted once, and kept together where a share is held out."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from toolkit.base.errors import BadInput
from toolkit.data.formats import open_dataset
from toolkit.data.splits import Fold
from toolkit.data.table_cache import write_table
from toolkit.tools.doctor import near_duplicates
from toolkit.tools.doctor.near_duplicates import (
    MAX_IMAGES_FOR_ALL_PAIRS,
    ImageSignatures,
    alike_pairs,
    folds_of,
    groups,
    held_out,
    hold_out,
    signatures_of,
)
from toolkit.tools.shapes import draw_scene, make_shapes


def signed(thumbnails: np.ndarray) -> ImageSignatures:
    """Signatures of different files with these thumbnails."""
    digests = []
    for number, thumbnail in enumerate(thumbnails):
        digests.append(hashlib.blake2b(thumbnail.tobytes() + b"%d" % number, digest_size=16).hexdigest())
    return ImageSignatures(np.array(digests, "S32"), thumbnails)


def signatures(images: list[np.ndarray]) -> ImageSignatures:
    pixels = [torch.from_numpy(image).permute(2, 0, 1) for image in images]
    return signed(np.stack(list(map(near_duplicates.thumbnail_of, pixels))))


def next_frame(image: np.ndarray, seed: int) -> np.ndarray:
    """As of a video: shifted by a pixel, another brightness, noise."""
    rng = np.random.default_rng(seed)
    moved = np.roll(image, rng.integers(-1, 2, 2), (0, 1)).astype(np.float32)
    return (moved * rng.uniform(0.9, 1.1) + rng.normal(0, 3, image.shape)).clip(0, 255).astype(np.uint8)


SCENES = [draw_scene(0, "train", number, 96)[0] for number in range(40)]
FRAMES = signatures([*SCENES, *(next_frame(image, number) for number, image in enumerate(SCENES))])


def cameras(counts: list[int], seed: int = 0) -> ImageSignatures:
    """As many pictures as are given of each of several standing cameras."""
    scenes = np.random.default_rng(seed).integers(9, 240, (len(counts), 16, 16), np.uint8)
    return signed(np.repeat(scenes, counts, axis=0))


# ---- what looks alike ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("all_pairs", "least"), [(MAX_IMAGES_FOR_ALL_PAIRS, 38), (0, 36)])
def test_frames_of_a_moment_look_alike_and_other_scenes_do_not(monkeypatch, all_pairs, least):
    """Also many images, which are compared by parts; what looks alike is held out together."""
    monkeypatch.setattr(near_duplicates, "MAX_IMAGES_FOR_ALL_PAIRS", all_pairs)
    found = alike_pairs(FRAMES)
    assert set(found) <= {(number, number + 40) for number in range(40)}
    assert len(found) >= least
    held = held_out(FRAMES, 0.3)
    assert all(held[i] == held[j] for i, j in found)
    assert 0.1 < held.mean() < 0.5


def test_images_of_one_moment_cannot_be_split():
    with pytest.raises(BadInput, match="look alike"):
        held_out(signatures([next_frame(SCENES[0], number) for number in range(6)]), 0.2)


def test_a_sign_says_whether_a_cell_is_brighter_than_the_next_in_its_row():
    """The last is compared with the first."""
    rising = np.repeat(np.arange(8, dtype=np.uint8), 2)
    thumbnails = np.stack([np.tile(rising, (16, 1)), np.tile(rising[:, None], (1, 16))])
    bits = np.unpackbits(near_duplicates._signs(thumbnails).view(np.uint8)).reshape(2, 8, 8)
    assert not bits[0, :, :7].any()
    assert bits[0, :, 7].all()
    assert not bits[1].any()


@pytest.mark.parametrize("all_pairs", [MAX_IMAGES_FOR_ALL_PAIRS, 0])
def test_images_look_alike_when_ten_signs_differ_and_not_when_eleven_do(monkeypatch, all_pairs):
    monkeypatch.setattr(near_duplicates, "MAX_IMAGES_FOR_ALL_PAIRS", all_pairs)
    cells = np.repeat(20 * np.arange(8)[None, :, None], 8, axis=2).repeat(3, axis=0)  # 3 images, the same in each row
    for image, brighter in ((1, 10), (2, 11)):
        cells[image].reshape(-1)[: 2 * brighter : 2] += 1
    images = signed(cells.repeat(2, axis=1).repeat(2, axis=2).astype(np.uint8))
    assert alike_pairs(images) == [(0, 1), (1, 2)]


# ---- pairs and groups ------------------------------------------------------------------------------------------------


def ordered_pairs(below: int):
    """Two different numbers, the smaller one first."""
    return st.integers(1, below - 1).flatmap(lambda j: st.tuples(st.integers(0, j - 1), st.just(j)))


@settings(max_examples=30)
@given(st.lists(ordered_pairs(20), max_size=30))
def test_groups_are_the_connected_parts(pairs):
    member = groups(20, pairs)
    assert all(member[i] == member[j] for i, j in pairs)
    assert len(set(member.tolist())) >= 20 - len(pairs)
    assert all(member <= np.arange(20))


PAIRS = st.lists(ordered_pairs(15), min_size=1)


def partners(pairs: list, splits: list[int]) -> set[tuple[int, int]]:
    """Return each image of a pair with the split of its partner."""
    both_ways = [*pairs, *((j, i) for i, j in pairs)]
    return {(i, splits[j]) for i, j in both_ways}


@settings(max_examples=50)
@given(PAIRS, PAIRS, st.lists(st.integers(0, 2), min_size=15, max_size=15))
def test_fewer_pairs_say_as_much(pairs, more, splits):
    """Of each image one partner in each split, and the same groups; also where others are added afterwards."""
    kept = near_duplicates._Pairs(np.array(splits))
    added = []
    for new in (pairs, more):
        added += new
        kept.add(*np.array(new).T)
        kept._thin()
        fewer = [tuple(pair) for pair in kept.pairs().tolist()]
        of_added = partners(added, splits)
        group = groups(15, added)
        assert set(fewer) <= set(added)
        assert len(set(fewer)) == len(fewer) <= len(of_added) + 14
        assert (groups(15, fewer) == group).all()
        assert partners(fewer, splits) == of_added
        every = [(i, j) for i in range(15) for j in range(i)]
        news = [group[i] != group[j] or not partners([(i, j)], splits) <= of_added for i, j in every]
        assert kept.adds(*np.array(every).T).tolist() == news


@pytest.mark.parametrize("all_pairs", [0, 10_000])
def test_a_standing_camera_is_as_many_pairs_as_pictures(monkeypatch, all_pairs):
    monkeypatch.setattr(near_duplicates, "MAX_PAIRS", 10_000)
    monkeypatch.setattr(near_duplicates, "MAX_IMAGES_FOR_ALL_PAIRS", all_pairs)
    thumbnails = np.repeat(np.random.default_rng(0).integers(9, 240, (1, 16, 16), np.uint8), 600, axis=0)
    thumbnails[np.arange(600), np.arange(600) % 16, 3] += 1
    found = alike_pairs(signed(thumbnails), np.arange(600) % 2)
    assert {image for pair in found for image in pair} == {*range(600)}
    assert len(found) < 3000
    crossing = {image for pair in found for image in pair if sum(pair) % 2}
    assert crossing == {*range(600)}
    assert not groups(600, found).any()


def test_thousands_of_copies_are_as_many_pairs():
    copies = ImageSignatures(np.array([b"one"] * 3000 + [b"two"], "S32"), np.zeros((3001, 16, 16), np.uint8))
    assert alike_pairs(copies) == [(0, other) for other in range(1, 3001)]


# ---- what is held out ------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.floats(0.05, 0.9), st.permutations(range(40)), st.integers(5, 39))
def test_held_out_images_stay_when_others_are_added(share, order, fewer):
    every = ImageSignatures(FRAMES.digests[:40], FRAMES.thumbnails[:40])
    chosen = held_out(every, share)
    some = sorted(order[:fewer])
    part = held_out(ImageSignatures(every.digests[some], every.thumbnails[some]), share)
    changed_over = set(chosen[some][chosen[some] != part].tolist())
    assert len(changed_over) <= 1, "from one side alone: the order in which images are taken is the same"
    assert 0 < part.sum() < len(part)
    wanted = share * len(part)
    assert abs(part.sum() - wanted) <= max(0.5, 0.1 * wanted, 1 - wanted)


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_folds_are_even_and_keep_what_looks_alike_together(folds):
    fold = folds_of(FRAMES, folds)
    assert all(fold[i] == fold[j] for i, j in alike_pairs(FRAMES))
    sizes = np.bincount(fold, minlength=folds)
    assert sizes.sum() == len(FRAMES)
    assert sizes.min() >= len(FRAMES) / folds - 2
    assert sizes.max() - sizes.min() <= 4


def test_more_folds_than_images_are_refused():
    with pytest.raises(BadInput, match="would be empty"):
        folds_of(FRAMES, 81)


def test_large_groups_are_not_held_out_more_often_than_small_ones():
    """20 scenes of 30 frames each: an unlucky scene is 5 % of the images, not all scenes."""
    frames = cameras([30] * 20)
    assert len(set(groups(600, alike_pairs(frames)).tolist())) == 20
    for share in (0.05, 0.1, 0.2, 0.3):
        assert held_out(frames, share).mean() == pytest.approx(share), "20 scenes can be divided like this"


@pytest.mark.parametrize(
    ("counts", "share", "least", "most"),
    [
        ([104, *[1] * 69], 0.2, 0.18, 0.22),
        ([100, 50, 50], 0.2, 0.25, 0.25),
        ([90, 10], 0.3, 0.1, 0.1),
        ([50, 50], 0.2, 0.5, 0.5),
        ([1, 2, 3, 4, 90], 0.05, 0.04, 0.06),
    ],
)
def test_a_large_group_does_not_make_a_lottery_of_the_share(counts, share, least, most):
    """A standing camera is one group: where it stands in the order, a tenth of the share could be held out."""
    for seed in range(5):  # the order of the groups follows their bytes
        frames = cameras(counts, seed)
        assert len(set(groups(len(frames), alike_pairs(frames)).tolist())) == len(counts)
        assert least <= held_out(frames, share).mean() <= most


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A table of 15 images, and a folder for caches."""
    folder = tmp_path_factory.mktemp("clean") / "d"
    make_shapes(folder, 15, 4, 64)
    return open_dataset("train", path=folder, cache_dir=folder / "cache"), folder / "cache"


def test_folds_hold_out_each_image_once(clean):
    whole, cache = clean
    parts = [hold_out(whole, Fold(number, 3), cache) for number in (1, 2, 3)]
    assert sorted(key for _, part in parts for key in part.image_ids()) == sorted(whole.image_ids())
    assert all(len(rest) + len(part) == len(whole) for rest, part in parts)


def test_runs_of_earlier_versions_keep_their_fingerprints(clean):
    """Those wrote both parts as tables."""
    whole, cache = clean
    rest, held = hold_out(whole, 0.25, cache)
    assert hold_out(whole, 0.25, cache)[0].fingerprint == rest.fingerprint
    file = cache / "tables" / f"{whole.fingerprint}-0.25-rest-{near_duplicates.CACHE_VERSION}.json"
    written = write_table(rest.image_rows(), rest.boxes(), cache_file=file, categories=rest.categories)
    old_rest, same = hold_out(whole, 0.25, cache)
    assert old_rest.fingerprint == written.fingerprint != rest.fingerprint
    assert same.fingerprint == held.fingerprint


def test_signatures_are_cached_and_notice_changed_files(tmp_path):
    make_shapes(tmp_path / "d", 3, 1, 32)
    table = open_dataset("train", path=tmp_path / "d", cache_dir=tmp_path)
    first = signatures_of(table, tmp_path)
    assert np.array_equal(first.thumbnails, signatures_of(table, tmp_path).thumbnails)
    assert len(list((tmp_path / "looks").iterdir())) == 1
    Image.new("RGB", (64, 64)).save(tmp_path / "d" / "train" / table.file_name(0))
    assert not signatures_of(table, tmp_path).thumbnails[0].any()
    assert len(list((tmp_path / "looks").iterdir())) == 2


@pytest.mark.slow
def test_comparing_images_keeps_none_of_them():
    """4,000 images take 110 MB decoded; what is kept of one lay among them once, so that none was given back."""
    code = """
import io
import numpy as np
from PIL import Image
from toolkit.tools.doctor.near_duplicates import _digest_and_thumbnail
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
def image(i):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(i).integers(0, 255, (96, 96, 3), np.uint8)).save(file, "JPEG", quality=10)
    return file.getvalue()
kept = [_digest_and_thumbnail(image(i), None) for i in range(200)]
before = resident()
kept += [_digest_and_thumbnail(image(i), None) for i in range(200, 4200)]
print(resident() - before)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(ended.stdout) < 30e6
