"""Tiles of large pictures: their geometry, the table of them, and the order in which training sees them."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from toolkit.base.errors import BadInput
from toolkit.data.pipeline import loader_of_settings
from toolkit.data.sampling import MIXED_PICTURES, EpochSampler
from toolkit.data.table import Category
from toolkit.data.table_cache import write_rows
from toolkit.data.tile_table import DecodedPictures, tiles_of_table
from toolkit.data.tiling import (
    MAX_TILES,
    Tiling,
    clip_to_tiles,
    count_tiles,
    tile_hw,
    tiles_of,
    to_picture,
    to_tile,
)
from toolkit.run.settings import DataConfig

sides = st.integers(1, 300)
overlaps = st.floats(0, 0.9)


@st.composite
def cut_pictures(draw):
    """(size_hw, tile_hw, tiles) of a picture."""
    size_hw = (draw(sides), draw(sides))
    tile = (draw(st.integers(8, 200)), draw(st.integers(8, 200)))
    return size_hw, tile, tiles_of(size_hw, tile, draw(overlaps))


@st.composite
def boxes_in(draw, size_hw):
    """(N, 4) float64 of boxes with an area inside a picture."""
    height, width = size_hw
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        x = sorted(draw(st.lists(st.floats(0, width, width=32), min_size=2, max_size=2)))
        y = sorted(draw(st.lists(st.floats(0, height, width=32), min_size=2, max_size=2)))
        if x[1] - x[0] > 1e-3 and y[1] - y[0] > 1e-3:
            rows.append([x[0], y[0], x[1], y[1]])
    return np.array(rows, np.float64).reshape(-1, 4)


@given(cut_pictures())
def test_every_pixel_is_covered_and_no_tile_reaches_beyond_the_picture(cut):
    size_hw, (rows, columns), tiles = cut
    seen = np.zeros(size_hw, bool)
    for left, top, right, bottom in tiles:
        assert 0 <= left < right <= size_hw[1] and 0 <= top < bottom <= size_hw[0]
        assert right - left == min(columns, size_hw[1]) and bottom - top == min(rows, size_hw[0])
        seen[top:bottom, left:right] = True
    assert seen.all() and len(np.unique(tiles, axis=0)) == len(tiles)


@given(st.data(), cut_pictures())
def test_a_box_that_is_whole_in_a_tile_is_unchanged_and_another_keeps_its_share(data, cut):
    size_hw, _, tiles = cut
    boxes = data.draw(boxes_in(size_hw))
    shown, share = clip_to_tiles(boxes[:, None], tiles[None])
    inside = (boxes[:, None, :2] >= tiles[None, :, :2]) & (boxes[:, None, 2:] <= tiles[None, :, 2:])
    whole = inside.all(-1)
    assert (share[whole] == 1).all() and (share[~whole] < 1).all() and (share >= 0).all()
    moved = to_tile(np.broadcast_to(boxes[:, None], shown.shape), tiles[None])
    np.testing.assert_array_equal(shown[whole], moved[whole])
    sides = shown[..., 2:] - shown[..., :2]
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    np.testing.assert_allclose(sides.prod(-1), share * areas[:, None], rtol=1e-6, atol=1e-6)
    some_tile = share.max(axis=1, initial=0)
    assert (some_tile > 0).all(), "no box is lost between tiles"


@given(st.data(), cut_pictures())
def test_from_tile_to_picture_undoes_from_picture_to_tile(data, cut):
    size_hw, _, tiles = cut
    boxes = data.draw(boxes_in(size_hw))[:, None]
    np.testing.assert_allclose(to_picture(to_tile(boxes, tiles), tiles), boxes + 0 * tiles, atol=1e-9)


def test_a_tiling_names_all_that_is_wrong_with_it():
    with pytest.raises(BadInput) as raised:
        Tiling((0, 64), 0.95, 1.5)
    assert [problem.split()[0] for problem in raised.value.problems] == [
        "data.tile", "data.tile_overlap", "data.tile_visible",
    ]  # fmt: skip
    assert tile_hw([30, 40], {"height": 1, "width": 9}) == (30, 40)
    assert len(Tiling((640, 640)).tiles((1500, 2000))) == 3 * 4
    assert (Tiling.overlap, Tiling.visible) == (DataConfig.tile_overlap, DataConfig.tile_visible)


def noise(folder, sizes=((90, 120), (40, 50)), boxes=6, ending=".png"):
    """A table of pictures of noise, each with boxes of 4 to 20 pixels, the first of them a crowd region.

    With the ending .tif the files have strips of 4 rows.
    """
    in_strips = {"compression": "tiff_lzw", "tiffinfo": {278: 4}}
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    number = 1
    for image_id, (height, width) in enumerate(sizes, start=1):
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{image_id}{ending}", **in_strips if ending == ".tif" else {})
        corner = rng.uniform(0, [width - 21, height - 21], (boxes, 2))
        xyxy = np.concatenate([corner, corner + rng.uniform(4, 20, (boxes, 2))], axis=1)
        areas = (xyxy[:, 2:] - xyxy[:, :2]).prod(1) / 2
        columns = {
            "id": list(range(number, number + boxes)),
            "bbox": xyxy.tolist(),
            "category": rng.integers(0, 2, boxes).tolist(),
            "area": areas.tolist(),
            "iscrowd": [1, *[0] * (boxes - 1)],
        }
        number += boxes
        none = {"subject": [], "object": [], "predicate": []}
        row = {"image_id": image_id, "file_name": f"{image_id}{ending}", "width": width, "height": height}
        rows.append(row | {"objects": columns, "relations": none})
    categories = [Category(3, "a"), Category(5, "b")]
    return write_rows(rows, cache_file=folder / "table.json", image_root=folder, name="noise", categories=categories)


def test_a_tile_has_the_pixels_and_the_clipped_boxes_of_its_place(tmp_path):
    pictures = noise(tmp_path)
    tiles = tiles_of_table(pictures, Tiling((32, 40), 0.2, visible=0.5))
    assert len(tiles) == 4 * 4 + 2 * 2 and tiles.sizes_hw().max(0).tolist() == [32, 40]
    ignored = 0
    for index in range(len(tiles)):
        row = tiles.row(index)
        whole = pictures.row(row["picture"])
        left, top, right, bottom = row["tile"]
        assert row["image_id"] == f"{whole['image_id']}@{left},{top}"
        pixels = tiles.decode_image(row)
        assert torch.equal(pixels, pictures.decode_image(whole)[:, top:bottom, left:right])
        of_id = dict(zip(whole["objects"]["id"].tolist(), range(6), strict=True))
        for number, box, area, crowd in zip(*(row["objects"][key] for key in ("id", "bbox", "area", "iscrowd")),
                                            strict=True):  # fmt: skip
            known = of_id[int(number)]
            shown, share = clip_to_tiles(whole["objects"]["bbox"][known].astype(float), np.array(row["tile"]))
            np.testing.assert_allclose(box, shown, atol=1e-4)
            assert area == pytest.approx(whole["objects"]["area"][known] * share, rel=1e-4)
            assert crowd == (whole["objects"]["iscrowd"][known] or share < 0.5)
            ignored += crowd
    boxes = tiles.boxes()
    assert boxes.iscrowd.sum() == ignored > 3 and set(boxes.ids) == set(pictures.boxes().ids), "no box is lost"
    assert tiles.decoded.decoded == 2, "each picture was decoded once"
    assert str(ignored) in str(tiles)


def test_tiles_of_a_tiff_file_that_is_too_large_to_be_kept_are_decoded_alone(tmp_path):
    tiling = Tiling((32, 40), 0.2)
    pictures = noise(tmp_path / "png", sizes=[(90, 120)])
    in_strips = noise(tmp_path / "tif", sizes=[(90, 120)], ending=".tif")
    expected = tiles_of_table(pictures, tiling)
    for room, decoded in ((2**20, 1), (2**16, 0)):
        tiles = tiles_of_table(in_strips, tiling)
        tiles.decoded = DecodedPictures(room)
        for index in range(len(tiles)):
            row = tiles.row(index)
            assert torch.equal(tiles.decode_image(row), expected.decode_image(expected.row(index)))
        assert tiles.decoded.decoded == decoded


def test_what_tiles_are_is_in_their_identity_and_another_process_can_have_them(tmp_path):
    pictures = noise(tmp_path)
    tiles = tiles_of_table(pictures, Tiling((32, 40)))
    tiles.decode_image(tiles.row(0))
    copy = pickle.loads(pickle.dumps(tiles))  # noqa: S301 - as a spawned worker gets it
    assert copy.identity == tiles.identity and copy.row(3)["tile"] == tiles.row(3)["tile"]
    assert copy.decoded.decoded == 0, "pictures are not sent"
    for other in (Tiling((32, 32)), Tiling((32, 40), 0.3), Tiling((32, 40), visible=0.3)):
        assert tiles_of_table(pictures, other).changed_since(tiles.identity)
    assert not tiles.changed_since(copy.identity)
    first = tiles.head(3)
    assert len(first) == len(first.tiles_xyxy) == len(first.has_objects()) == 3


def test_decoded_pictures_are_kept_up_to_a_number_of_bytes_the_newest_in_any_case():
    kept = DecodedPictures(limit=100)
    for index, size in ((0, 40), (1, 40), (0, 40), (2, 40), (0, 40), (1, 40), (3, 500), (3, 500)):
        assert len(kept.get(index, lambda size=size: torch.zeros(size, dtype=torch.uint8))) == size
    assert kept.decoded == 5, "0, 1, 2, then 1 again, and 3"


def tiles_drawn(table, epochs, **options):
    sampler, loader = loader_of_settings(table, settings_of(**options), seed=1, stride=1)
    drawn = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        drawn.append([key.index for keys in sampler for key in keys])
    return drawn, loader.dataset.dataset.table


def settings_of(**options):
    given = {"tile": [24, 24], "image_size": 24, "batch_size_per_device": 4, "workers": 0, "flip": False}
    return DataConfig(**given | options)


def test_a_share_of_the_tiles_without_objects_is_seen_others_in_each_epoch(tmp_path):
    pictures = noise(tmp_path, sizes=[(90, 120)] * 3)
    drawn, tiles = tiles_drawn(pictures, 6, tile_empty=0.5)
    has_objects = tiles.has_objects()
    empty = (~has_objects).sum()
    assert 10 < empty < len(tiles) - 10
    seen = set()
    for indices in drawn:
        assert set(np.flatnonzero(has_objects)) <= set(indices) and len(set(indices)) == len(indices)
        background = {index for index in indices if not has_objects[index]}
        assert abs(len(background) - empty / 2) <= 1
        assert background != seen
        seen |= background
    assert drawn == tiles_drawn(pictures, 6, tile_empty=0.5)[0], "a function of seed and epoch"
    assert sorted(tiles_drawn(pictures, 1, tile_empty=1.0)[0][0]) == list(range(len(tiles)))
    assert sorted(tiles_drawn(pictures, 1, tile_empty=0.0)[0][0]) == np.flatnonzero(has_objects).tolist()


def test_tiles_of_few_pictures_come_together_in_one_order_for_any_number_of_processes(tmp_path):
    pictures = noise(tmp_path, sizes=[(48, 48)] * 40)
    drawn, tiles = tiles_drawn(pictures, 1, tile_empty=1.0)
    order = tiles.picture_of_tile[drawn[0]]
    pool = MIXED_PICTURES * 9
    for first in range(0, len(order), pool):
        assert len(set(order[first : first + pool])) <= MIXED_PICTURES
    assert len(set(order[:16])) > 8, "a batch is of many pictures"
    cut = []
    for rank in range(2):
        sampler = EpochSampler(len(tiles), 2, rank, 2, seed=1, pictures=tiles.picture_of_tile)
        cut.append([[key.index for key in keys] for keys in sampler])
    together = [index for one, two in zip(*cut, strict=True) for index in one + two]
    alone = EpochSampler(len(tiles), 4, seed=1, pictures=tiles.picture_of_tile)
    assert together == [key.index for keys in alone for key in keys]


def test_a_batch_of_tiles_is_a_function_of_its_keys_and_repeats_and_several_settings_fit(tmp_path):
    pictures = noise(tmp_path, sizes=[(60, 80)] * 3)
    options = {"mosaic": 0.5, "mixup": True, "repeat_factor": 0.9, "group_by_aspect_ratio": True}
    options["cache_images"] = True
    for chosen in ({}, {"tile": 24, "image_size": [12, 24]}, options):
        batches = []
        for _ in range(2):
            sampler, loader = loader_of_settings(pictures, settings_of(**chosen), seed=1, stride=1)
            batches.append(list(loader))
            assert len(batches[-1]) == len(sampler)
        for one, two in zip(*batches, strict=True):
            assert torch.equal(one.images, two.images)
            assert all(torch.equal(a["boxes"], b["boxes"]) for a, b in zip(one.targets, two.targets, strict=True))


def test_tiles_that_cannot_be_are_refused_by_name(tmp_path):
    pictures = noise(tmp_path)
    for wrong, word in (({"tile": [1, 2, 3]}, "data.tile is"), ({"tile_overlap": 0.95}, "data.tile_overlap")):
        with pytest.raises(BadInput, match=word):
            loader_of_settings(pictures, settings_of(**wrong), seed=0, stride=1)
    crowds = noise(tmp_path / "crowds", sizes=[(60, 60)], boxes=1)
    with pytest.raises(BadInput, match=r"data\.tile_empty is 0"):
        loader_of_settings(crowds, settings_of(tile_empty=0.0), seed=0, stride=1)


@pytest.mark.parametrize(("size_hw", "tile", "overlap", "count"), [
    ((12_000, 12_000), (1, 1), 0.0, 144_000_000), ((50_000, 3), (1, 3), 0.9, 50_000), ((90, 120), (60, 60), 0.5, 6),
])
def test_tiles_are_counted_without_making_them_and_too_many_are_refused(size_hw, tile, overlap, count):
    assert count_tiles(size_hw, tile, overlap) == count
    if count < MAX_TILES:
        assert len(tiles_of(size_hw, tile, overlap)) == count
        return
    with pytest.raises(BadInput, match="12000 x 12000 px would have 144,000,000 tiles of 1 x 1 px"):
        tiles_of(size_hw, tile, overlap)


def test_a_table_of_too_many_tiles_is_refused(tmp_path, monkeypatch):
    pictures = noise(tmp_path)
    monkeypatch.setattr("toolkit.data.tiling.MAX_TILES", 12_000)
    settings = settings_of(tile=1, tile_overlap=0.0)
    with pytest.raises(BadInput, match="2 pictures would have 12,800 tiles .* a larger data.tile"):
        loader_of_settings(pictures, settings, seed=0, stride=1)


def test_one_default_wherever_tiles_are_cut():
    settings = DataConfig()
    assert (settings.tile_overlap, settings.tile_visible) == (Tiling.overlap, Tiling.visible)
