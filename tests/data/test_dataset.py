"""Samples of a table: a function of seed, epoch and index, with boxes on their pixels, mixed up to a given epoch."""

import numpy as np
import pytest
import torch
from documents import row_of
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import exif_of
from PIL import Image, ImageOps
from report_data import table_of
from samples import assert_same, noise_table, shapes_table

from toolkit.base.errors import BadInput
from toolkit.data.batches import make_loader
from toolkit.data.dataset import ALL_EPOCHS, DetectionDataset, MixedDataset, mixed_epochs, sample_generator
from toolkit.data.least_size import MARGIN, LeastSize
from toolkit.data.pipeline import train_transform
from toolkit.data.sampling import EpochSampler, SampleKey, VariableSizes
from toolkit.data.table import Category
from toolkit.data.transforms.geometry import Compose, ResizeShorter, detr_train_transform
from toolkit.detectors.yolov3.transforms import yolov3_transform
from toolkit.run.settings import DataConfig

SIDE = 64
UNCHANGED = Compose(())
TRANSFORM = detr_train_transform(
    (30, 40),
    80,
    first_scales=(30, 36),
    crop_sizes=(20, 30),
)


def rows():
    """Two rows: three boxes with a relation, and none."""
    boxes = [
        [1, 2, 12, 15],
        [5, 2, 16, 16],
        [9, 2, 20, 17],
    ]
    return [
        row_of(
            100,
            boxes,
            (50, 40),
            relations=[(0, 1, 2)],
        ),
        row_of(101, [], (33, 47)),
    ]


@pytest.fixture
def table(tmp_path):
    categories = [Category(number, f"class {number}") for number in range(3)]
    return noise_table(tmp_path / "noise", rows(), categories=categories)


def test_the_target_of_a_row(table):
    image, target = DetectionDataset(table, ResizeShorter((30,)))[SampleKey(0, 0)]
    assert image.dtype == torch.uint8
    assert image.shape == (3, 30, 37)
    assert target["image_id"] == 100
    assert target["orig_size"].tolist() == [40, 50]
    assert target["size"].tolist() == [30, 37]
    scale = torch.tensor([37 / 50, 30 / 40]).repeat(2)
    expected = torch.tensor(rows()[0]["objects"]["bbox"]) * scale
    torch.testing.assert_close(target["boxes"], expected)
    assert target["labels"].tolist() == [0, 1, 2]
    assert target["relations"].tolist() == [[0, 1, 2]]
    types = {name: value.dtype for name, value in target.items() if name != "image_id"}
    floats = dict.fromkeys(("boxes", "area"), torch.float32)
    numbers = ("labels", "iscrowd", "relations", "orig_size", "size")
    assert types == floats | dict.fromkeys(numbers, torch.int64)


def test_a_row_without_boxes_has_empty_columns(table):
    _, empty = DetectionDataset(table, ResizeShorter((30,)))[SampleKey(0, 1)]
    assert empty["boxes"].shape == (0, 4)
    assert empty["relations"].shape == (0, 3)
    assert empty["labels"].shape == (0,)


def test_a_sample_is_a_function_of_seed_epoch_and_index(table):
    def drawn(seed, epoch):
        return DetectionDataset(table, TRANSFORM, seed)[SampleKey(epoch, 0)]

    torch.manual_seed(1)
    first = drawn(0, 1)
    torch.manual_seed(2)
    assert_same(first, drawn(0, 1))
    assert len({drawn(0, epoch)[0].shape for epoch in range(9)}) > 3
    assert len({drawn(seed, 0)[0].shape for seed in range(9)}) > 3


def test_neighbouring_samples_draw_other_numbers():
    numbers = set()
    for seed in range(6):
        for epoch in range(6):
            for index in range(6):
                for turn in range(3):
                    generator = sample_generator(seed, epoch, index, turn)
                    numbers.add(torch.rand((), generator=generator).item())
    assert len(numbers) == 6**3 * 3


def test_repeated_images_are_augmented_anew(table):
    transform = train_transform(DataConfig(image_size=48, photometric=True, zoom_out=3.0))
    dataset = DetectionDataset(table, transform, 5)
    first = dataset[SampleKey(0, 0, None, 0)][0]
    assert torch.equal(first, dataset[SampleKey(0, 0, None, 0)][0])
    assert not torch.equal(first, dataset[SampleKey(0, 0, None, 1)][0])


def test_cached_images_are_the_decoded_ones(table):
    plain = [DetectionDataset(table, TRANSFORM)[SampleKey(2, index)] for index in range(2)]
    cached = DetectionDataset(table, TRANSFORM, cache_images=True)
    for file in table.image_root.glob("*.png"):
        file.unlink()
    for _ in range(2):  # a transform must not write to the cache
        for index, expected in enumerate(plain):
            assert_same(cached[SampleKey(2, index)], expected)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM"])
@pytest.mark.parametrize("least_size", [None, LeastSize((8, 8))])
def test_a_picture_of_another_size_is_not_trained_on(table, format, least_size):
    """It was replaced after the data were read: its boxes would lie in other places."""
    # Half as large: its reduced sides are those that a quarter of the annotated one would have.
    Image.new("RGB", (25, 20)).save(table.image_root / "100.png", format)
    said = r"^100\.png: image id 100 cannot be read: .*100\.png: the picture has 25 x 20 pixels \(width x height\), "
    said += "but 50 x 40 by the annotations"
    with pytest.raises(BadInput, match=said):
        DetectionDataset(table, TRANSFORM, least_size=least_size)[SampleKey(0, 0)]
    with pytest.raises(BadInput, match=said):
        DetectionDataset(table, TRANSFORM, cache_images=True, least_size=least_size)


def middle_and_length(light):
    """Of a light span on a dark line; half light pixels count half, so that both are known to a part of a pixel."""
    light = light / light.max()
    places = np.arange(len(light)) + 0.5
    return (light * places).sum() / light.sum(), light.sum()


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    turn=st.integers(1, 8),
    width=st.integers(90, 200),
    height=st.integers(90, 200),
)
def test_boxes_lie_on_the_pixels_of_reduced_pictures(tmp_path_factory, data, turn, width, height):
    """In every orientation, and with sides that the divisor does not divide: the last row of libjpeg is then cut."""
    left = data.draw(st.integers(0, width - 40))
    top = data.draw(st.integers(0, height - 40))
    right = data.draw(st.integers(left + 30, width))
    bottom = data.draw(st.integers(top + 30, height))
    divisor = data.draw(st.sampled_from([2, 4, 8] if width % 2 == height % 2 == 0 else [4, 8]))
    picture = Image.new("L", (width, height), 0)
    picture.paste(255, (left, top, right, bottom))
    picture.getexif()[274] = turn
    upright = ImageOps.exif_transpose(picture)
    full_hw = upright.size[::-1]
    small_hw = (full_hw[0] // divisor, full_hw[1] // divisor)
    folder = tmp_path_factory.mktemp("t")
    table = table_of(
        folder,
        [[(upright.getbbox(), 0)]],
        draw=False,
        size=full_hw,
    )
    picture.save(
        folder / "0.png",
        "JPEG",
        quality=95,
        subsampling=0,
        exif=exif_of(turn),
    )
    least_size = LeastSize((small_hw[0] / MARGIN, small_hw[1] / MARGIN))
    image, target = DetectionDataset(table, UNCHANGED, least_size=least_size)[SampleKey(0, 0)]
    assert tuple(image.shape[-2:]) == tuple(target["size"].tolist()) == small_hw
    assert tuple(target["orig_size"].tolist()) == full_hw  # of the file, to which predictions are scaled
    x0, y0, x1, y1 = target["boxes"][0].tolist()
    light = image[0].double().numpy()
    for axis, low, high in ((0, x0, x1), (1, y0, y1)):
        middle, length = middle_and_length(light.sum(axis))
        assert length == pytest.approx(high - low, abs=0.35)
        assert middle == pytest.approx((low + high) / 2, abs=0.2)
    share = small_hw[0] * small_hw[1] / (full_hw[0] * full_hw[1])
    assert target["area"].item() == pytest.approx(table.boxes().area[0] * share, rel=1e-5)


# ---- mixed images ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return shapes_table(tmp_path_factory.mktemp("shapes"), 9, SIDE)


def mixed(table, **options):
    return MixedDataset(table, yolov3_transform(photometric=True, flip=True), 3, **options)


@pytest.mark.parametrize("options", [{"mixup": True}, {"mosaic": 1.0}, {"mixup": True, "mosaic": 0.5}])
def test_a_mixed_sample_is_a_function_of_seed_epoch_and_index(shapes, options):
    keys = [SampleKey(epoch, index, (SIDE, SIDE)) for epoch in (0, 1) for index in range(len(shapes))]
    dataset = mixed(shapes, **options)
    samples = [dataset[key] for key in keys]
    again = mixed(shapes, **options)
    for key, sample in reversed(list(zip(keys, samples, strict=True))):
        assert_same(again[key], sample)
        image, target = sample
        assert image.shape == (3, SIDE, SIDE)
        assert target["image_id"] == shapes.row(key.index)["image_id"]
        assert ("mixup" in target) == ("mixup" in options)
    half = len(shapes)
    for (image, _), (of_next_epoch, _) in zip(
        samples[:half],
        samples[half:],
        strict=True,
    ):
        assert not torch.equal(image, of_next_epoch)


def test_boxes_of_mixed_images_carry_the_share_of_their_image(shapes):
    dataset = mixed(shapes, mixup=True)
    for index, count in enumerate(shapes.num_boxes().tolist()):
        shares = dataset[SampleKey(0, index, (SIDE, SIDE))][1]["mixup"]
        assert len(shares) > count
        assert len(shares[:count].unique()) == 1
        assert torch.allclose(shares[count:], 1 - shares[0], atol=1e-6)


def test_one_image_is_mixed_with_itself(shapes):
    _, target = mixed(shapes.head(1), mixup=True, mosaic=1.0)[SampleKey(0, 0, (SIDE, SIDE))]
    assert len(target["boxes"]) >= 1


@pytest.mark.parametrize("workers", [0, 2])
def test_plain_epochs_are_those_of_the_plain_dataset_also_for_running_workers(shapes, workers):
    """What is planned after the workers were started counts for them: they stay alive between epochs."""
    transform = yolov3_transform(flip=True)
    sampler = EpochSampler(
        len(shapes),
        2,
        seed=3,
        sizes=VariableSizes(((SIDE, SIDE), (32, 32)), 2),
    )
    dataset = MixedDataset(shapes, transform, 3, mixup=True)
    plain = DetectionDataset(shapes, transform, 3)
    loader = make_loader(dataset, sampler, workers)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        dataset.plan(2, total_steps=20, steps_per_epoch=5)
        for keys, batch in zip(list(sampler), loader, strict=True):
            is_mixed = ["mixup" in target for target in batch.targets]
            assert is_mixed == [epoch < 2] * len(keys)
            if epoch >= 2:
                assert torch.equal(batch.images, torch.stack([plain[key][0] for key in keys]))


@pytest.mark.parametrize(
    ("plain", "total_steps", "per_epoch", "expected"),
    [
        (20, 2800, 10, 260),
        (20, 100, 10, 0),
        (0, 100, 10, 10),
        (0.2, 100, 10, 8),
        (1, 95, 10, 9),
        (0.5, 7, 3, 1),
    ],
)
def test_the_last_epochs_are_not_mixed(plain, total_steps, per_epoch, expected):
    assert mixed_epochs(plain, total_steps, per_epoch) == expected


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(0, 300),
    st.floats(0, 30),
)
def test_a_length_that_becomes_known_decides_later_epochs_only(known_after, per_epoch, more, plain):
    """Before it is known, and in the epoch in which it becomes so, all is mixed."""
    total = known_after + more
    assert mixed_epochs(plain, 10**6, per_epoch, None) == ALL_EPOCHS
    epoch_now = (known_after - 1) // per_epoch
    from_the_start = mixed_epochs(plain, total, per_epoch)
    assert mixed_epochs(plain, total, per_epoch, known_after) == max(epoch_now + 1, from_the_start)


def test_settings_of_mixing_that_cannot_be_are_refused(shapes):
    with pytest.raises(BadInput, match="plain_epochs is -1"):
        mixed_epochs(-1, 10, 10)
    with pytest.raises(BadInput, match="data.mosaic is 1.5"):
        mixed(shapes, mosaic=1.5)
