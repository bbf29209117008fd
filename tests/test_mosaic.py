"""Mosaic, and datasets whose samples are made of several images up to a certain epoch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import assert_same, shapes_table

from toolkit.base.errors import BadInput
from toolkit.data.batches import make_loader
from toolkit.data.dataset import ALL_EPOCHS, DetectionDataset, MixedDataset, mixed_epochs
from toolkit.data.sampling import EpochSampler, SampleKey, VariableSizes
from toolkit.data.transforms.geometry import GLUONCV_FILL_RGB
from toolkit.data.transforms.mixing import draw_point, mosaic
from toolkit.detectors.yolov3.transforms import yolov3_transform

SIDE = 64


def sample(place: int, size_hw, boxes: int = 2) -> tuple[torch.Tensor, dict]:
    """A flat image of a grey level of its own, with boxes in its corners and one relation."""
    height, width = size_hw
    corners = [(0, 0, width / 4, height / 4), (width * 3 / 4, height * 3 / 4, width, height)][:boxes]
    return torch.full((3, *size_hw), 40 * (place + 1), dtype=torch.uint8), {
        "image_id": place, "boxes": torch.tensor(corners, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.full((boxes,), place), "area": torch.ones(boxes),
        "iscrowd": torch.zeros(boxes, dtype=torch.int64),
        "relations": torch.tensor([[0, boxes - 1, place]] * min(1, boxes), dtype=torch.int64).reshape(-1, 3),
        "orig_size": torch.tensor(size_hw), "size": torch.tensor(size_hw),
    }  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(4, 90), st.integers(4, 90), st.integers(0, 2)), min_size=4, max_size=4),
    st.integers(16, 48), st.integers(16, 48),
)  # fmt: skip
def test_every_box_shows_its_own_image(sizes, row, column):
    image, target = mosaic([sample(i, (h, w), n) for i, (h, w, n) in enumerate(sizes)], (SIDE, SIDE), (row, column))
    assert image.shape == (3, SIDE, SIDE) and target["size"].tolist() == [SIDE, SIDE] == target["orig_size"].tolist()
    assert {len(target[name]) for name in ("boxes", "labels", "area", "iscrowd")} == {len(target["boxes"])}
    assert (target["boxes"] >= 0).all() and (target["boxes"] <= SIDE).all()
    for (x0, y0, x1, y1), label in zip(target["boxes"].tolist(), target["labels"].tolist(), strict=True):
        y, x = min(SIDE - 1, int((y0 + y1) / 2)), min(SIDE - 1, int((x0 + x1) / 2))
        assert image[0, y, x] == 40 * (label + 1)
        assert (y0 >= row - 1e-3) == (label >= 2) and (x0 >= column - 1e-3) == (label % 2 == 1)
    for subject, object_, predicate in target["relations"].tolist():
        assert target["labels"][subject] == target["labels"][object_] == predicate


def test_four_quadrants_and_what_none_covers():
    """Wide images become 40 x 80 on a canvas of 48 x 80, high ones 48 x 24."""
    sizes = [(32, 64), (32, 64), (64, 32), (64, 32)]
    image, _ = mosaic([sample(i, size, 0) for i, size in enumerate(sizes)], (48, 80), (20, 40))
    corners = {40: ((0, 0), (19, 39)), 80: ((0, 79), (19, 40)), 120: ((20, 39), (47, 16)), 160: ((20, 40), (47, 63))}
    for level, places in corners.items():
        assert all(image[0, y, x] == level for y, x in places), level
    assert image[:, 47, 15].tolist() == image[:, 20, 64].tolist() == list(GLUONCV_FILL_RGB)


def test_points_are_in_the_middle():
    points = torch.tensor([draw_point((100, 200), torch.Generator().manual_seed(i)) for i in range(300)])
    assert points.amin(0).tolist() >= [25, 50] and points.amax(0).tolist() <= [75, 150]
    assert points.float().std(0)[0] > 10


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return shapes_table(tmp_path_factory.mktemp("shapes"), 9, SIDE)


def mixed(table, **options):
    return MixedDataset(table, yolov3_transform(photometric=True, flip=True), 3, **options)


@pytest.mark.parametrize("options", [{"mixup": True}, {"mosaic": 1.0}, {"mixup": True, "mosaic": 0.5}])
def test_a_sample_is_a_function_of_seed_epoch_and_index(table, options):
    dataset, again = mixed(table, **options), mixed(table, **options)
    keys = [SampleKey(epoch, index, (SIDE, SIDE)) for epoch in (0, 1) for index in range(len(table))]
    for key in reversed(keys):
        again[key]
    samples = [dataset[key] for key in keys]
    for sample, key in zip(samples, keys, strict=True):
        assert_same(sample, again[key])
    for (first, _), (second, _) in zip(samples[: len(table)], samples[len(table) :], strict=True):
        assert not torch.equal(first, second), "of another epoch"
    for (image, target), key in zip(samples, keys, strict=True):
        assert image.shape == (3, SIDE, SIDE)
        assert target["image_id"] == table.row(key.index)["image_id"]
        assert ("mixup" in target) == ("mixup" in options)
        if options == {"mixup": True}:  # boxes carry the share of their image
            count, shares = table.num_boxes()[key.index], target["mixup"]
            assert 0 < len(shares[:count].unique()) <= 1
            assert len(shares) > count and torch.allclose(shares[count:], 1 - shares[0], atol=1e-6)


@pytest.mark.parametrize("workers", [0, 2])
def test_plain_epochs_are_those_of_the_plain_dataset_also_for_running_workers(table, workers):
    """What is planned after the workers were started counts for them: they stay alive between epochs."""
    sizes, transform = VariableSizes(((SIDE, SIDE), (32, 32)), 2), yolov3_transform(flip=True)
    sampler = EpochSampler(len(table), 2, seed=3, sizes=sizes)
    dataset, plain = MixedDataset(table, transform, 3, mixup=True), DetectionDataset(table, transform, 3)
    loader = make_loader(dataset, sampler, workers)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        dataset.plan(2, total_steps=20, steps_per_epoch=5)
        for keys, batch in zip(list(sampler), loader, strict=True):
            expected = [plain[key] for key in keys]
            assert all("mixup" in target for target in batch.targets) == (epoch < 2)
            if epoch >= 2:
                images = torch.stack([image for image, _ in expected])
                assert torch.equal(batch.images, images)


def test_one_image_is_mixed_with_itself(table):
    _, target = mixed(table.head(1), mixup=True, mosaic=1.0)[SampleKey(0, 0, (SIDE, SIDE))]
    assert len(target["boxes"]) >= 1


@pytest.mark.parametrize(
    ("plain", "total_steps", "per_epoch", "expected"),
    [(20, 2800, 10, 260), (20, 100, 10, 0), (0, 100, 10, 10), (0.2, 100, 10, 8), (1, 95, 10, 9), (0.5, 7, 3, 1)],
)
def test_how_many_epochs_are_mixed(plain, total_steps, per_epoch, expected):
    assert mixed_epochs(plain, total_steps, per_epoch) == expected
    with pytest.raises(BadInput, match="plain_epochs is -1"):
        mixed_epochs(-1, total_steps, per_epoch)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 300), st.floats(0, 30))
def test_a_length_that_becomes_known_decides_later_epochs_only(known_after, per_epoch, more, plain):
    """Before it is known, and in the epoch in which it becomes so, all is mixed."""
    assert mixed_epochs(plain, 10**6, per_epoch, None) == ALL_EPOCHS
    mixed_now = mixed_epochs(plain, known_after + more, per_epoch, fixed_at_step=known_after)
    epoch_now = (known_after - 1) // per_epoch
    from_the_start = mixed_epochs(plain, known_after + more, per_epoch, fixed_at_step=0)
    assert mixed_now == max(epoch_now + 1, from_the_start)
