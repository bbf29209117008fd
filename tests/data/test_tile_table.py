"""The table of the tiles of large pictures, and the order in which training sees them."""

import pickle

import numpy as np
import pytest
import torch
from documents import row_of
from mask_data import star
from samples import noise_table, shapes_table

from toolkit.base.errors import BadInput
from toolkit.base.masks import areas, bitmap, rectangle, rle
from toolkit.data.dataset import row_target
from toolkit.data.pipeline import loader_of_settings
from toolkit.data.sampling import MIXED_PICTURES
from toolkit.data.table import Category
from toolkit.data.tile_table import DecodedPictures, tiles_of_table
from toolkit.data.tiling import Tiling, clip_to_tiles
from toolkit.data.transforms.geometry import crop
from toolkit.run.settings import DataConfig

IN_STRIPS = {"compression": "tiff_lzw", "tiffinfo": {278: 4}}
TILING = Tiling((32, 40), 0.2, visible=0.5)


def noise(folder, sizes=((90, 120), (40, 50)), boxes=6, suffix=".png", saving=None):
    """A table of pictures of noise, each with boxes of 4 to 20 pixels, the first of them a crowd region."""
    rng = np.random.default_rng(0)
    rows = []
    for image_id, (height, width) in enumerate(sizes, start=1):
        corner = rng.uniform(
            0,
            [width - 21, height - 21],
            (boxes, 2),
        )
        xyxy = np.concatenate([corner, corner + rng.uniform(4, 20, (boxes, 2))], axis=1)
        columns = {
            "id": list(range(boxes * image_id, boxes * image_id + boxes)),
            "area": ((xyxy[:, 2:] - xyxy[:, :2]).prod(1) / 2).tolist(),
            "iscrowd": [1, *[0] * (boxes - 1)],
        }
        labels = rng.integers(0, 2, boxes).tolist()
        row = row_of(image_id, xyxy.tolist(), (width, height), labels, **columns)
        rows.append(row | {"file_name": f"{image_id}{suffix}"})
    categories = [Category(3, "a"), Category(5, "b")]
    return noise_table(folder, rows, saving, name="noise", categories=categories)


def loader_of(table, **options):
    given = {
        "tile": [24, 24],
        "image_size": 24,
        "batch_size_per_device": 4,
        "workers": 0,
        "flip": False,
    }
    return loader_of_settings(table, DataConfig(**given | options), seed=1, stride=1)


def indices_of(sampler):
    return [key.index for keys in sampler for key in keys]


def drawn(table, epochs, share):
    """The indices of each epoch, if this share of the tiles without objects is seen."""
    sampler, _ = loader_of(table, tile_empty=share)
    of_epochs = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        of_epochs.append(indices_of(sampler))
    return of_epochs


def test_a_tile_has_the_pixels_of_its_place(tmp_path):
    pictures = noise(tmp_path)
    tiles = tiles_of_table(pictures, TILING)
    assert len(tiles) == 4 * 4 + 2 * 2
    assert tiles.sizes_hw().max(0).tolist() == [32, 40]
    for index in range(len(tiles)):
        row = tiles.row(index)
        whole = pictures.row(row["picture"])
        left, top, right, bottom = row["tile"]
        assert row["image_id"] == f"{whole['image_id']}@{left},{top}"
        expected = pictures.decode_image(whole)[:, top:bottom, left:right]
        assert torch.equal(tiles.decode_image(row), expected)
    assert tiles.decoded.decoded == 2  # each picture once


def test_a_tile_has_the_clipped_boxes_of_its_place(tmp_path):
    pictures = noise(tmp_path)
    tiles = tiles_of_table(pictures, TILING)
    whole = pictures.boxes()
    boxes = tiles.boxes()
    of_id = np.searchsorted(whole.ids, boxes.ids)
    shown, share = clip_to_tiles(whole.xyxy[of_id], tiles.tiles_xyxy[boxes.image_index])
    np.testing.assert_allclose(boxes.xyxy, shown, atol=1e-4)
    np.testing.assert_allclose(boxes.area, whole.area[of_id] * share, rtol=1e-4)
    assert boxes.labels.tolist() == whole.labels[of_id].tolist()
    assert boxes.iscrowd.tolist() == (whole.iscrowd[of_id] | (share < 0.5)).tolist()
    assert set(boxes.ids) == set(whole.ids)  # no box is lost
    assert boxes.iscrowd.sum() > 3
    assert f"{boxes.iscrowd.sum()} of their {len(boxes)} boxes are ignored" in str(tiles)


def test_boxes_keep_their_attributes_in_tiles(tmp_path):
    pictures = shapes_table(tmp_path, 2)
    tiles = tiles_of_table(pictures, TILING)
    whole = pictures.boxes()
    boxes = tiles.boxes()
    of_id = np.searchsorted(whole.ids, boxes.ids)
    assert tiles.attributes == pictures.attributes
    assert boxes.extra["attributes"].any()
    np.testing.assert_array_equal(boxes.extra["attributes"], whole.extra["attributes"][of_id])


def masked(folder, boxes, masks, size_wh=(120, 90)):
    """A table of one picture, in which each object has a class of its own."""
    row = row_of(1, boxes, size_wh) | {"masks": masks}
    return noise_table(folder, [row], categories=[Category(number, f"c{number}") for number in range(len(boxes))])


def test_a_tile_has_the_masks_that_a_crop_of_the_picture_has(tmp_path):
    rng = np.random.default_rng(0)
    corners = rng.uniform(0, [80, 50], (12, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(10, 40, (12, 2))], axis=1)
    shapes = [star(rng, box) for box in boxes]
    shapes[::2] = [rle(shape, (90, 120)) for shape in shapes[::2]]
    pictures = masked(tmp_path, boxes.tolist(), shapes)
    tiles = tiles_of_table(pictures, TILING)
    whole = row_target(pictures.row(0), (90, 120), masks=True)
    for index in range(len(tiles)):
        row = tiles.row(index)
        left, top, right, bottom = row["tile"]
        tile_hw = (bottom - top, right - left)
        target = row_target(row, tile_hw, masks=True)
        _, cropped = crop(torch.zeros(3, 90, 120), whole, (top, left, *tile_hw))
        drawn = dict(zip(cropped["labels"].tolist(), cropped["masks"].drawn(tile_hw), strict=True))
        for label, pixels in zip(target["labels"].tolist(), target["masks"].drawn(tile_hw), strict=True):
            assert pixels.equal(drawn.pop(label))
        assert not any(pixels.any() for pixels in drawn.values())


BESIDE = rectangle([50, 0, 70, 10])
CORNER = rectangle([30, 20, 40, 60])  # of its box, to 70
MOSTLY_LEFT = (*rectangle([10, 60, 40, 80]), *rectangle([40, 60, 50, 65]))  # 650 pixels, 50 of them from 40 on


def test_a_cut_object_is_what_a_tile_shows_of_its_mask(tmp_path):
    """Tiles from 0 to 60 and from 40 to 100; the last object has a box alone."""
    boxes = [[50, 0, 70, 10], [30, 20, 70, 60], [10, 60, 50, 80], [50, 85, 70, 95]]
    masks = [rle(BESIDE, (100, 100)), CORNER, MOSTLY_LEFT, None]
    pictures = masked(tmp_path, boxes, masks, (100, 100))
    tiles = tiles_of_table(pictures, Tiling((100, 60), 0.2, visible=0.25))
    assert tiles.tiles_xyxy[:, 0].tolist() == [0, 40]
    left, right = (tiles.row(index)["objects"] for index in range(2))
    assert left["category"].tolist() == [0, 1, 2, 3]
    assert left["area"].tolist() == [100, 400, 100, 50]  # as annotated where the box is not cut
    assert right["category"].tolist() == [0, 2, 3]  # no pixel of the second mask
    assert right["area"].tolist() == [100, 50, 100]
    assert right["iscrowd"].tolist() == [0, 1, 0]  # 8 % of the pixels of the third mask, and 25 % of its box
    assert not left["iscrowd"].any()
    of_columns = tiles.boxes(masks=True)
    assert [shape is None for shape in of_columns.extra["masks"]] == [False, False, False, True, False, False, True]
    assert areas(of_columns.extra["masks"][[0, 4]], (100, 60)).tolist() == [100, 200]
    again = pickle.loads(pickle.dumps(tiles))  # noqa: S301 - as a spawned worker gets it
    assert np.array_equal(bitmap(again.row(1)["masks"][1], (100, 60)), bitmap(tiles.masks_of(1)[1], (100, 60)))


@pytest.mark.parametrize(("room", "decoded"), [(2**20, 1), (2**16, 0)])
def test_tiles_of_a_tiff_that_is_too_large_to_be_kept_are_decoded_alone(tmp_path, room, decoded):
    expected = tiles_of_table(noise(tmp_path / "png", [(90, 120)]), TILING)
    tiles = tiles_of_table(
        noise(
            tmp_path / "tif",
            [(90, 120)],
            suffix=".tif",
            saving=IN_STRIPS,
        ),
        TILING,
    )
    tiles.decoded = DecodedPictures(room)
    for index in range(len(tiles)):
        pixels = tiles.decode_image(tiles.row(index))
        assert torch.equal(pixels, expected.decode_image(expected.row(index)))
    assert tiles.decoded.decoded == decoded


def test_tiles_are_sent_to_another_process_without_their_pictures(tmp_path):
    tiles = tiles_of_table(noise(tmp_path), TILING)
    tiles.decode_image(tiles.row(0))
    copy = pickle.loads(pickle.dumps(tiles))  # noqa: S301 - as a spawned worker gets it
    assert copy.row(3)["tile"] == tiles.row(3)["tile"]
    assert not tiles.changed_since(copy.identity)
    assert copy.decoded.decoded == 0


def test_what_tiles_are_is_in_their_identity(tmp_path):
    pictures = noise(tmp_path)
    tiles = tiles_of_table(pictures, Tiling((32, 40)))
    for other in (
        Tiling((32, 32)),
        Tiling((32, 40), 0.3),
        Tiling((32, 40), visible=0.3),
    ):
        assert tiles_of_table(pictures, other).changed_since(tiles.identity)
    assert len(tiles.head(3)) == len(tiles.head(3).has_objects()) == 3


def test_pictures_are_kept_up_to_a_number_of_bytes_the_newest_in_any_case():
    kept = DecodedPictures(limit=100)
    decoded = []
    for index, size in (
        (0, 40),
        (1, 40),
        (0, 40),
        (2, 40),
        (0, 40),
        (1, 40),
        (3, 500),
        (3, 500),
    ):
        picture = torch.zeros(size, dtype=torch.uint8)
        assert len(kept.get(index, picture.clone)) == size
        decoded.append(kept.decoded)
    assert decoded == [1, 2, 2, 3, 3, 4, 5, 5]


def test_a_share_of_the_tiles_without_objects_is_seen_others_in_each_epoch(tmp_path):
    pictures = noise(tmp_path, [(90, 120)] * 3)
    has_objects = tiles_of_table(pictures, Tiling((24, 24))).has_objects()
    with_objects = set(np.flatnonzero(has_objects).tolist())
    empty = len(has_objects) - len(with_objects)
    assert 10 < empty < len(has_objects) - 10
    seen = set()
    for indices in drawn(pictures, 6, 0.5):
        background = set(indices) - with_objects
        assert set(indices) >= with_objects
        assert len(set(indices)) == len(indices)
        assert abs(len(background) - empty / 2) <= 1
        assert background != seen
        seen = background
    assert drawn(pictures, 6, 0.5) == drawn(pictures, 6, 0.5)
    assert sorted(drawn(pictures, 1, 1.0)[0]) == list(range(len(has_objects)))
    assert sorted(drawn(pictures, 1, 0.0)[0]) == sorted(with_objects)


def test_tiles_of_few_pictures_come_together(tmp_path):
    pictures = noise(tmp_path, [(48, 48)] * 40)
    tiles = tiles_of_table(pictures, Tiling((24, 24)))
    order = tiles.picture_of_tile[drawn(pictures, 1, 1.0)[0]]
    pool = MIXED_PICTURES * 9
    for first in range(0, len(order), pool):
        assert len(set(order[first : first + pool])) <= MIXED_PICTURES
    assert len(set(order[:16])) > 8  # a batch is of many pictures


MIXED = {
    "mosaic": 0.5,
    "mixup": True,
    "repeat_factor": 0.9,
    "group_by_aspect_ratio": True,
    "cache_images": True,
}


@pytest.mark.parametrize("options", [{}, {"tile": 24, "image_size": [12, 24]}, MIXED])
def test_batches_of_tiles_are_a_function_of_their_keys(tmp_path, options):
    pictures = noise(tmp_path, [(60, 80)] * 3)
    sampler, loader = loader_of(pictures, **options)
    again = list(loader_of(pictures, **options)[1])
    assert len(again) == len(sampler)
    for one, two in zip(loader, again, strict=True):
        assert torch.equal(one.images, two.images)
        for target, other in zip(one.targets, two.targets, strict=True):
            assert torch.equal(target["boxes"], other["boxes"])


def test_tiles_that_cannot_be_are_refused_by_name(tmp_path, monkeypatch):
    pictures = noise(tmp_path)
    with pytest.raises(BadInput, match="data.tile_overlap"):
        loader_of(pictures, tile_overlap=0.95)
    crowds = noise(tmp_path / "crowds", [(60, 60)], boxes=1)
    with pytest.raises(BadInput, match=r"data\.tile_empty is 0"):
        loader_of(crowds, tile_empty=0.0)
    monkeypatch.setattr("toolkit.data.tiling.MAX_TILES", 12_000)
    with pytest.raises(BadInput, match="2 pictures would have 12,800 tiles .* a larger data.tile"):
        loader_of(pictures, tile=1, tile_overlap=0.0)
