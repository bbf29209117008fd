"""pytest tests/test_loaders.py"""

import copy
import os
import resource
import signal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import functional as F

from toolkit.batch import Batch, normalize_images, pixel_mask
from toolkit.data.batches import collate, make_loader, naming_killed_workers, windows
from toolkit.data.dataset import DetectionDataset, sample_generator
from toolkit.data.sampling import EpochSampler, EvalSampler, SampleKey
from toolkit.data.table import Category
from toolkit.data.table_cache import write_rows
from toolkit.data.transforms.geometry import ResizeShorter, detr_train_transform, square_transform
from toolkit.errors import BadInput

# A busy machine is no failure.
settings.register_profile("patient", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

COUNT = 13
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TRANSFORM = detr_train_transform((30, 40), 80, first_scales=(30, 36), crop_sizes=(20, 30))


def write_images(folder, count=COUNT, seed=0):
    """JPEG noise of various sizes; image i has i % 4 boxes and, with two or more, a relation between them."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        height, width = rng.integers(25, 60, 2).tolist()
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{i}.jpg")
        boxes = [[1 + 4 * j, 2, 12 + 4 * j, 15 + j] for j in range(i % 4)]
        objects = {"id": list(range(len(boxes))), "bbox": boxes, "category": list(range(len(boxes))),
                   "area": [100.0] * len(boxes), "iscrowd": [0] * len(boxes)}  # fmt: skip
        related = [0] if len(boxes) > 1 else []
        relations = {"subject": related, "object": [1 for _ in related], "predicate": [2 for _ in related]}
        rows.append({"image_id": 100 + i, "file_name": f"{i}.jpg", "width": width, "height": height,
                     "objects": objects, "relations": relations})  # fmt: skip
    categories = [Category(i, f"class {i}") for i in range(3)]
    return write_rows(rows, cache_file=folder / "table.json", categories=categories, image_root=folder)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"))


def assert_same_target(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[name].dtype and value.equal(other[name]), name
        else:
            assert value == other[name], name


def assert_same_batches(ones, others):
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert one.images.equal(other.images) and one.sizes.equal(other.sizes)
        for target, other_target in zip(one.targets, other.targets, strict=True):
            assert_same_target(target, other_target)


def epochs(loader, sampler, first, last):
    """Batches of the epochs [first, last), consumed as training does."""
    batches = []
    for epoch in range(first, last):
        sampler.set_epoch(epoch)
        for window in windows(loader, 2):
            batches += window
            sampler.advance_batches(len(window))
    return batches


class Killing(DetectionDataset):
    """Whoever makes the sixth image is killed, as the kernel does where memory runs out."""

    def __getitem__(self, key):
        if key.index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(key)


def test_a_worker_that_is_killed_is_named_with_its_batch_and_what_to_lower(table):
    with pytest.raises(BadInput) as caught, naming_killed_workers():
        list(make_loader(Killing(table, ResizeShorter((30,))), EvalSampler(COUNT, 2), workers=2))
    said = str(caught.value)
    assert "killed by signal: Killed; it was worker 0, its last batch began with 4.jpg (id 104), 5.jpg" in said
    assert "data.workers" in said and "--run.resume latest" in said and "\n" not in said


def test_other_errors_of_torch_stay_as_they_are():
    with pytest.raises(RuntimeError, match="shapes differ"), naming_killed_workers():
        raise RuntimeError("shapes differ")


# ---- dataset ---------------------------------------------------------------------------------------------------------


def test_target_of_a_row(table):
    image, target = DetectionDataset(table, ResizeShorter((30,)))[SampleKey(0, 3)]
    height, width = table.sizes_hw()[3].tolist()
    assert image.dtype == torch.uint8 and min(image.shape[1:]) == 30
    assert target["image_id"] == 103 and target["orig_size"].tolist() == [height, width]
    assert target["size"].tolist() == list(image.shape[1:])
    scale = torch.tensor([image.shape[2] / width, image.shape[1] / height]).repeat(2)
    expected = torch.tensor([[1, 2, 12, 15], [5, 2, 16, 16], [9, 2, 20, 17]]) * scale
    torch.testing.assert_close(target["boxes"], expected)
    assert target["labels"].tolist() == [0, 1, 2] and target["relations"].tolist() == [[0, 1, 2]]
    assert {name: value.dtype for name, value in target.items() if name != "image_id"} == {
        "boxes": torch.float32, "labels": torch.int64, "area": torch.float32, "iscrowd": torch.int64,
        "relations": torch.int64, "orig_size": torch.int64, "size": torch.int64}  # fmt: skip
    _, empty = DetectionDataset(table, ResizeShorter((30,)))[SampleKey(0, 0)]
    assert empty["boxes"].shape == (0, 4) and empty["relations"].shape == (0, 3) and empty["labels"].shape == (0,)


def test_sample_is_a_function_of_seed_epoch_and_index(table):
    def sample(seed, epoch, index):
        return DetectionDataset(table, TRANSFORM, seed)[SampleKey(epoch, index)]

    torch.manual_seed(1)
    image, target = sample(0, 1, 3)
    torch.manual_seed(2)
    again_image, again = sample(0, 1, 3)
    assert image.equal(again_image)
    assert_same_target(target, again)
    shapes = [{sample(seed, epoch, 3)[0].shape for seed, epoch in keys}
              for keys in ([(0, e) for e in range(9)], [(s, 0) for s in range(9)])]  # fmt: skip
    assert min(len(distinct) for distinct in shapes) > 3
    first_numbers = {torch.rand((), generator=sample_generator(s, e, i)).item()
                     for s in range(8) for e in range(8) for i in range(8)}  # fmt: skip
    assert len(first_numbers) == 512


def test_cached_images_are_the_decoded_ones(tmp_path):
    table = write_images(tmp_path, 4)
    plain = [DetectionDataset(table, TRANSFORM)[SampleKey(2, i)] for i in range(4)]
    cached = DetectionDataset(table, TRANSFORM, cache_images=True)
    for file in tmp_path.glob("*.jpg"):
        file.unlink()
    for _ in range(2):  # a transform must not write to the cache
        for i, (image, target) in enumerate(plain):
            cached_image, cached_target = cached[SampleKey(2, i)]
            assert cached_image.equal(image)
            assert_same_target(cached_target, target)


# ---- batches ---------------------------------------------------------------------------------------------------------


def some_samples(sizes):
    rng = torch.Generator().manual_seed(0)
    images = [torch.randint(0, 256, (3, *size_hw), generator=rng, dtype=torch.uint8) for size_hw in sizes]
    return [(image, {"image_id": i, "boxes": torch.ones(i, 4)}) for i, image in enumerate(images)]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4), st.integers(1, 33))
def test_collate_pads_with_zeros_to_the_stride(sizes, stride):
    samples = some_samples(sizes)
    batch = collate(samples, stride)
    assert batch.images.dtype == torch.uint8 and batch.images.is_contiguous(memory_format=torch.channels_last)
    for side in (0, 1):
        padded, largest = batch.images.shape[2 + side], max(size[side] for size in sizes)
        assert padded % stride == 0 and largest <= padded < largest + stride
    assert batch.sizes.tolist() == [list(size) for size in sizes]
    for (image, target), padded, own in zip(samples, batch.images, batch.targets, strict=True):
        assert padded[:, : image.shape[1], : image.shape[2]].equal(image) and own is target
        assert padded.sum() == image.sum()  # so all the rest is zero


def test_empty_batch():
    batch = collate([], stride=32)
    assert batch.images.shape == (0, 3, 32, 32) and batch.sizes.shape == (0, 2) and len(batch) == 0
    assert normalize_images(batch.images, batch.sizes, MEAN, STD).shape == (0, 3, 32, 32)
    assert batch.to("cpu").sizes.dtype == torch.int64


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4))
def test_pixel_mask(sizes):
    mask = pixel_mask(torch.tensor(sizes), (9, 9))
    assert mask.dtype == torch.bool and mask.shape == (len(sizes), 9, 9)
    for own, (height, width) in zip(mask, sizes, strict=True):
        assert own[:height, :width].all() and own.sum() == height * width


def test_normalisation_is_detrs():
    """DETR normalises each image, then pads with zeros; here padded bytes are normalised, then zeroed. Bit for bit."""
    samples = some_samples([(20, 37), (33, 10), (40, 40)])
    batch = collate(samples, stride=16)
    normalized = normalize_images(batch.images, batch.sizes, MEAN, STD)
    expected = torch.zeros(3, 3, 48, 48)
    for (image, _), padded in zip(samples, expected, strict=True):
        pixels = F.to_tensor(image.permute(1, 2, 0).numpy())
        padded[:, : image.shape[1], : image.shape[2]] = F.normalize(pixels, MEAN, STD)
    assert normalized.equal(expected) and normalized.is_contiguous()
    half = normalize_images(batch.images, batch.sizes, MEAN, STD, torch.bfloat16)
    assert half.equal(expected.to(torch.bfloat16))  # rounded once, at the end


def test_moving_a_batch_keeps_targets(table):
    dataset = DetectionDataset(table, TRANSFORM)
    batch = collate([dataset[SampleKey(0, i)] for i in range(5)])
    assert_same_batches([batch.to("cpu"), copy.deepcopy(batch)], [batch, batch])
    on_meta = batch.to("meta")  # a device that holds no data shows that every tensor went
    tensors = [value for target in on_meta.targets for value in target.values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 5 * 7 and all(tensor.is_meta for tensor in (*tensors, on_meta.images, on_meta.sizes))
    shapes = [value.shape for target in batch.targets for value in target.values() if isinstance(value, torch.Tensor)]
    assert [tensor.shape for tensor in tensors] == shapes


def test_windows():
    assert list(windows(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(windows([], 3)) == []


# ---- loaders ---------------------------------------------------------------------------------------------------------


def test_batches_do_not_depend_on_workers_or_on_resuming(table):
    def start(workers):
        sampler = EpochSampler(COUNT, 3, seed=4)
        return make_loader(DetectionDataset(table, TRANSFORM, seed=4), sampler, workers, stride=8), sampler

    expected = epochs(*start(0), 0, 3)
    assert sum(len(batch) for batch in expected) == 3 * COUNT
    assert_same_batches(epochs(*start(2), 0, 3), expected)  # the workers persist over three epochs

    loader, sampler = start(2)
    epochs(loader, sampler, 0, 1)
    sampler.set_epoch(1)
    first = next(windows(loader, 2))  # workers have run ahead of this by now
    sampler.advance_batches(2)
    resumed_loader, resumed = start(1)
    resumed.load_state_dict(sampler.state_dict())
    assert_same_batches(first + epochs(resumed_loader, resumed, 1, 3), expected[5:])


def test_ranks_together_see_what_one_process_sees(table):
    def image_ids(batch_size, rank, world_size):
        sampler = EpochSampler(COUNT, batch_size, rank, world_size, seed=4)
        loader = make_loader(DetectionDataset(table, TRANSFORM, seed=4), sampler)
        return [[target["image_id"] for target in batch.targets] for batch in loader]

    two = [a + b for a, b in zip(image_ids(2, 0, 2), image_ids(2, 1, 2), strict=True)]
    assert sum(two, []) == sum(image_ids(4, 0, 1), [])


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_with_an_empty_rank(table, workers):
    sampler = EvalSampler(3, 2, rank=2, world_size=3)
    dataset = DetectionDataset(table, square_transform(32))
    loader = make_loader(dataset, sampler, workers, stride=32)
    assert [batch.images.shape for batch in loader] == [(1, 3, 32, 32)]
    nothing = make_loader(dataset, EvalSampler(2, 2, rank=2, world_size=3), workers, stride=32)
    assert [(len(batch), batch.images.shape) for batch in nothing] == [(0, (0, 3, 32, 32))]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_file_is_one_clear_error(tmp_path, workers):
    table = write_images(tmp_path, 6)
    whole = (tmp_path / "4.jpg").read_bytes()
    (tmp_path / "4.jpg").write_bytes(whole[: len(whole) // 2])
    loader = make_loader(DetectionDataset(table, TRANSFORM), EpochSampler(6, 2, shuffle=False), workers)
    batches = iter(loader)
    assert [target["image_id"] for _ in range(2) for target in next(batches).targets] == [100, 101, 102, 103]
    with pytest.raises(BadInput, match=r"^4\.jpg: image id 104 cannot be read: .*truncated$") as error:
        next(batches)
    assert "Traceback" not in str(error.value)


def test_loading_leaves_the_global_generator_alone(table):
    loader = make_loader(DetectionDataset(table, TRANSFORM), EpochSampler(COUNT, 4), workers=1)
    state = torch.get_rng_state()
    assert sum(len(batch) for batch in loader) == COUNT
    assert torch.get_rng_state().equal(state)


def test_batches_in_flight_need_few_open_files(tmp_path):
    """Sent one by one, the 7 tensors of each target would hold 3360 files open here."""
    table = write_images(tmp_path, 8)
    dataset = DetectionDataset(table, square_transform(8), cache_images=True)
    loader = make_loader(dataset, [[SampleKey(0, i) for i in range(8)]] * 60, workers=1)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))
    try:
        batches = list(loader)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert len(batches) == 60 and all(isinstance(batch, Batch) for batch in batches)
