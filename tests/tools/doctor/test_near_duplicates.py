"""Images that are the same or look alike are found, counted once, and kept together where a share is held out."""

import hashlib
import itertools
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
        content = thumbnail.tobytes() + b"%d" % number
        digest = hashlib.blake2b(content, digest_size=16)
        digests.append(digest.hexdigest())
    return ImageSignatures(np.array(digests, "S32"), thumbnails)


def signatures(images: list[np.ndarray]) -> ImageSignatures:
    thumbnails = []
    for image in images:
        pixels = torch.from_numpy(image).permute(2, 0, 1)
        thumbnails.append(near_duplicates.thumbnail_of(pixels))
    return signed(np.stack(thumbnails))


def next_frame(image: np.ndarray, seed: int) -> np.ndarray:
    """As of a video: shifted by a pixel, another brightness, noise."""
    rng = np.random.default_rng(seed)
    shift = rng.integers(-1, 2, 2)
    moved = np.roll(image, shift, (0, 1)).astype(np.float32)
    brightness = rng.uniform(0.9, 1.1)
    noise = rng.normal(0, 3, image.shape)
    changed = moved * brightness + noise
    return changed.clip(0, 255).astype(np.uint8)


SCENES = [draw_scene(0, "train", number, 96)[0] for number in range(40)]
NEXT_FRAMES = [next_frame(image, number) for number, image in enumerate(SCENES)]
FRAMES = signatures(SCENES + NEXT_FRAMES)


def cameras(counts: list[int], seed: int = 0) -> ImageSignatures:
    """As many pictures as are given of each of several standing cameras."""
    scenes = random_thumbnails(len(counts), seed)
    thumbnails = np.repeat(scenes, counts, axis=0)
    return signed(thumbnails)


def random_thumbnails(count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(9, 240, (count, 16, 16), np.uint8)


def chosen(images: ImageSignatures, numbers) -> ImageSignatures:
    rows = list(numbers)
    digests = images.digests[rows]
    thumbnails = images.thumbnails[rows]
    return ImageSignatures(digests, thumbnails)


def num_groups(images: ImageSignatures) -> int:
    group = groups(len(images), alike_pairs(images))
    return len(set(group.tolist()))


def limit_all_pairs(monkeypatch, images: int) -> None:
    """With more images, parts are compared."""
    monkeypatch.setattr(near_duplicates, "MAX_IMAGES_FOR_ALL_PAIRS", images)


# ---- what looks alike ------------------------------------------------------------------------------------------------


WAYS = [
    (MAX_IMAGES_FOR_ALL_PAIRS, 38),
    (0, 36),
]


@pytest.mark.parametrize(("all_pairs", "least"), WAYS)
def test_frames_of_a_moment_look_alike_and_other_scenes_do_not(monkeypatch, all_pairs, least):
    """Also many images, which are compared by parts; what looks alike is held out together."""
    limit_all_pairs(monkeypatch, all_pairs)
    found = alike_pairs(FRAMES)
    assert len(set(found)) >= least
    held = held_out(FRAMES, 0.3)
    for scene, frame in found:
        assert frame == scene + 40
        assert held[scene] == held[frame]
    assert 0.1 < held.mean() < 0.5


def test_images_of_one_moment_cannot_be_split():
    frames = [next_frame(SCENES[0], number) for number in range(6)]
    images = signatures(frames)
    with pytest.raises(BadInput, match="look alike"):
        held_out(images, 0.2)


def test_a_sign_says_whether_a_cell_is_brighter_than_the_next_in_its_row():
    """The last is compared with the first."""
    cells = np.arange(8, dtype=np.uint8)
    rising = cells.repeat(2)
    to_the_right = np.tile(rising, (16, 1))
    signs = near_duplicates._signs(np.stack([to_the_right, to_the_right.T]))
    bits = np.unpackbits(signs.view(np.uint8))
    right, down = bits.reshape(2, 8, 8)
    assert not right[:, :7].any()
    assert right[:, 7].all()
    assert not down.any()


@pytest.mark.parametrize("all_pairs", [MAX_IMAGES_FOR_ALL_PAIRS, 0])
def test_images_look_alike_when_ten_signs_differ_and_not_when_eleven_do(monkeypatch, all_pairs):
    limit_all_pairs(monkeypatch, all_pairs)
    cells = np.zeros((3, 64), np.uint8)
    cells += np.arange(0, 160, 20, np.uint8).repeat(8)  # each of the 8 rows has one brightness
    cells[1, :20:2] += 1
    cells[2, :22:2] += 1
    rows = cells.reshape(3, 8, 8).repeat(2, axis=1)
    thumbnails = rows.repeat(2, axis=2)
    found = alike_pairs(signed(thumbnails))
    assert found == [(0, 1), (1, 2)]


# ---- pairs and groups ------------------------------------------------------------------------------------------------


def ordered_pairs(below: int):
    """Two different numbers, the smaller one first."""
    larger = st.integers(1, below - 1)
    return larger.flatmap(lambda j: st.tuples(st.integers(0, j - 1), st.just(j)))


@settings(max_examples=30)
@given(st.lists(ordered_pairs(20), max_size=30))
def test_groups_are_the_connected_parts(pairs):
    member = groups(20, pairs)
    for i, j in pairs:
        assert member[i] == member[j]
    assert len(set(member.tolist())) >= 20 - len(pairs)
    assert all(member <= np.arange(20))


PAIRS = st.lists(ordered_pairs(15), min_size=1)


def partners(pairs: list, splits: list[int]) -> set[tuple[int, int]]:
    """Return each image of a pair with the split of its partner."""
    found = set()
    for i, j in pairs:
        found.add((i, splits[j]))
        found.add((j, splits[i]))
    return found


SPLITS = st.lists(st.integers(0, 2), min_size=15, max_size=15)


@settings(max_examples=50)
@given(PAIRS, PAIRS, SPLITS)
def test_fewer_pairs_say_as_much(pairs, more, splits):
    """Of each image one partner in each split, and the same groups; also where others are added afterwards."""
    kept = near_duplicates._Pairs(np.array(splits))
    added = []
    for new in (pairs, more):
        added += new
        kept.add(*np.array(new).T)
        kept._thin()
        fewer = list(map(tuple, kept.pairs().tolist()))
        of_added = partners(added, splits)
        group = groups(15, added)
        assert set(fewer) <= set(added)
        assert len(set(fewer)) == len(fewer)
        assert len(fewer) <= len(of_added) + 14
        assert (groups(15, fewer) == group).all()
        assert partners(fewer, splits) == of_added
        every = list(itertools.combinations(range(15), 2))
        news = []
        for i, j in every:
            joins = group[i] != group[j]
            has_all = partners([(i, j)], splits) <= of_added
            news.append(joins or not has_all)
        assert kept.adds(*np.array(every).T).tolist() == news


@pytest.mark.parametrize("all_pairs", [0, 10_000])
def test_a_standing_camera_is_as_many_pairs_as_pictures(monkeypatch, all_pairs):
    monkeypatch.setattr(near_duplicates, "MAX_PAIRS", 10_000)
    limit_all_pairs(monkeypatch, all_pairs)
    thumbnails = random_thumbnails(1, seed=0).repeat(600, axis=0)
    numbers = np.arange(600)
    thumbnails[numbers, numbers % 16, 3] += 1
    found = alike_pairs(signed(thumbnails), numbers % 2)
    assert len(found) < 3000
    with_partner = set()
    for i, j in found:
        if i % 2 != j % 2:
            with_partner |= {i, j}
    assert with_partner == set(range(600)), "each has one in the other split"
    assert not groups(600, found).any()


def test_thousands_of_copies_are_as_many_pairs():
    digests = np.array([b"one"] * 3000 + [b"two"], "S32")
    thumbnails = np.zeros((3001, 16, 16), np.uint8)
    copies = ImageSignatures(digests, thumbnails)
    pairs = alike_pairs(copies)
    assert pairs == [(0, other) for other in range(1, 3001)]


# ---- what is held out ------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    st.floats(0.05, 0.9),
    st.permutations(range(40)),
    st.integers(5, 39),
)
def test_held_out_images_stay_when_others_are_added(share, order, fewer):
    some = sorted(order[:fewer])
    scenes = chosen(FRAMES, range(40))
    before = held_out(scenes, share)[some]
    part = held_out(chosen(FRAMES, some), share)
    changed_over = before[before != part].tolist()
    assert len(set(changed_over)) <= 1, "from one side alone: the order in which images are taken is the same"
    found = part.sum()
    assert 0 < found < fewer
    wanted = share * fewer
    allowed = max(0.5, 0.1 * wanted, 1 - wanted)
    assert abs(found - wanted) <= allowed


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_folds_are_even_and_keep_what_looks_alike_together(folds):
    fold = folds_of(FRAMES, folds)
    for i, j in alike_pairs(FRAMES):
        assert fold[i] == fold[j]
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
    assert num_groups(frames) == 20
    for share in (0.05, 0.1, 0.2, 0.3):
        held = held_out(frames, share)
        assert held.mean() == pytest.approx(share), "20 scenes can be divided like this"


SHARES = [
    ([104, *[1] * 69], 0.2, 0.18, 0.22),
    ([100, 50, 50], 0.2, 0.25, 0.25),
    ([90, 10], 0.3, 0.1, 0.1),
    ([50, 50], 0.2, 0.5, 0.5),
    ([1, 2, 3, 4, 90], 0.05, 0.04, 0.06),
]


@pytest.mark.parametrize(("counts", "share", "least", "most"), SHARES)
def test_a_large_group_does_not_make_a_lottery_of_the_share(counts, share, least, most):
    """A standing camera is one group: where it stands in the order, a tenth of the share could be held out."""
    for seed in range(5):  # the order of the groups follows their bytes
        frames = cameras(counts, seed)
        assert num_groups(frames) == len(counts)
        held = held_out(frames, share)
        assert least <= held.mean() <= most


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """A table of 15 images, and a folder for caches."""
    folder = tmp_path_factory.mktemp("clean") / "d"
    make_shapes(folder, 15, 4, 64)
    cache = folder / "cache"
    table = open_dataset("train", path=folder, cache_dir=cache)
    return table, cache


def test_folds_hold_out_each_image_once(clean):
    whole, cache = clean
    held = []
    for number in (1, 2, 3):
        rest, part = hold_out(whole, Fold(number, 3), cache)
        assert len(rest) + len(part) == len(whole)
        held.extend(part.image_ids())
    assert sorted(held) == sorted(whole.image_ids())


def test_runs_of_earlier_versions_keep_their_fingerprints(clean):
    """Those wrote both parts as tables."""
    whole, cache = clean
    rest, held = hold_out(whole, 0.25, cache)
    again, _ = hold_out(whole, 0.25, cache)
    assert again.fingerprint == rest.fingerprint
    name = f"{whole.fingerprint}-0.25-rest-{near_duplicates.CACHE_VERSION}.json"
    written = write_table(
        rest.image_rows(),
        rest.boxes(),
        cache_file=cache / "tables" / name,
        categories=rest.categories,
    )
    old_rest, same = hold_out(whole, 0.25, cache)
    assert old_rest.fingerprint == written.fingerprint != rest.fingerprint
    assert same.fingerprint == held.fingerprint


def test_signatures_are_cached_and_notice_changed_files(tmp_path):
    folder = tmp_path / "d"
    looks = tmp_path / "looks"
    make_shapes(folder, 3, 1, 32)
    table = open_dataset("train", path=folder, cache_dir=tmp_path)
    first = signatures_of(table, tmp_path)
    again = signatures_of(table, tmp_path)
    assert np.array_equal(first.thumbnails, again.thumbnails)
    assert len(list(looks.iterdir())) == 1
    black = Image.new("RGB", (64, 64))
    black.save(folder / "train" / table.file_name(0))
    changed = signatures_of(table, tmp_path)
    assert not changed.thumbnails[0].any()
    assert len(list(looks.iterdir())) == 2


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
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(ended.stdout) < 30e6
