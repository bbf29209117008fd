"""pytest tests/test_loaders.py"""

import copy
import fcntl
import os
import signal

import numpy as np
import pytest
import torch
from documents import row_of
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from samples import assert_same, sample
from torchvision.transforms import functional as F

from toolkit.base.batch import Batch, normalize_images, pixel_mask
from toolkit.base.errors import BadInput
from toolkit.data.batches import collate, make_loader, naming_killed_workers, windows
from toolkit.data.check_files import check_image_files
from toolkit.data.dataset import DetectionDataset, sample_generator
from toolkit.data.sampling import EpochSampler, EvalSampler, SampleKey
from toolkit.data.table import Category
from toolkit.data.table_cache import write_rows
from toolkit.data.transforms.geometry import ResizeShorter, detr_train_transform, exact_transform

resource = pytest.importorskip("resource", reason="limits of the kernel, and forked workers: not on Windows")

COUNT = 13
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TRANSFORM = detr_train_transform((30, 40), 80, first_scales=(30, 36), crop_sizes=(20, 30))


def write_images(folder, count=COUNT, seed=0):
    """JPEG noise of various sizes; image i has i % 4 boxes and, with two or more, a relation between them."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(count):
        height, width = rng.integers(25, 60, 2).tolist()
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{i}.jpg")
        boxes = [[1 + 4 * j, 2, 12 + 4 * j, 15 + j] for j in range(i % 4)]
        row = row_of(100 + i, boxes, (width, height), relations=[(0, 1, 2)] if len(boxes) > 1 else ())
        rows.append(row | {"file_name": f"{i}.jpg"})
    categories = [Category(i, f"class {i}") for i in range(3)]
    return write_rows(rows, cache_file=folder / "table.json", categories=categories, image_root=folder)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"))


def assert_same_batches(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert one.sizes.equal(other.sizes)
        for target, other_target in zip(one.targets, other.targets, strict=True):
            assert_same((one.images, target), (other.images, other_target))


def epochs(loader, sampler, first, last):
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
    with pytest.raises(RuntimeError, match="shapes differ"), naming_killed_workers():  # other errors stay as they are
        raise RuntimeError("shapes differ")


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
    def drawn(seed, epoch):
        return DetectionDataset(table, TRANSFORM, seed)[SampleKey(epoch, 3)]

    torch.manual_seed(1)
    first = drawn(0, 1)
    torch.manual_seed(2)
    assert_same(first, drawn(0, 1))
    assert len({drawn(0, epoch)[0].shape for epoch in range(9)}) > 3 < len({drawn(s, 0)[0].shape for s in range(9)})
    generators = [sample_generator(s, e, i) for s in range(8) for e in range(8) for i in range(8)]
    assert len({torch.rand((), generator=one).item() for one in generators}) == 512


def test_cached_images_are_the_decoded_ones(tmp_path):
    table = write_images(tmp_path, 4)
    plain = [DetectionDataset(table, TRANSFORM)[SampleKey(2, i)] for i in range(4)]
    cached = DetectionDataset(table, TRANSFORM, cache_images=True)
    for file in tmp_path.glob("*.jpg"):
        file.unlink()
    for _ in range(2):  # a transform must not write to the cache
        for i, expected in enumerate(plain):
            assert_same(cached[SampleKey(2, i)], expected)


def some_samples(sizes):
    return [sample([[0, 0, 1, 1]] * i, size_hw) for i, size_hw in enumerate(sizes)]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4), st.integers(1, 33))
def test_collate_pads_with_zeros_to_the_stride(sizes, stride):
    samples = some_samples(sizes)
    batch = collate(samples, stride)
    assert batch.images.dtype == torch.uint8 and batch.images.is_contiguous(memory_format=torch.channels_last)
    for side in (0, 1):
        padded, largest = batch.images.shape[2 + side], max(size[side] for size in sizes)
        assert padded % stride == 0 and largest <= padded < largest + stride
    assert batch.sizes.tolist() == [list(size) for size in sizes]
    mask = pixel_mask(batch.sizes, batch.images.shape[-2:])
    for (image, target), padded, own, inside in zip(samples, batch.images, batch.targets, mask, strict=True):
        assert padded[:, : image.shape[1], : image.shape[2]].equal(image) and own is target
        assert padded.sum() == image.sum()  # so all the rest is zero
        assert inside[: image.shape[1], : image.shape[2]].all() and inside.sum() == image[0].numel()


def test_empty_batch():
    batch = collate([], stride=32)
    assert batch.images.shape == (0, 3, 32, 32) and batch.sizes.shape == (0, 2) and len(batch) == 0
    assert normalize_images(batch.images, batch.sizes, MEAN, STD).shape == (0, 3, 32, 32)
    assert batch.to("cpu").sizes.dtype == torch.int64


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


def test_batches_do_not_depend_on_workers_or_on_resuming(table):
    def start(workers):
        sampler = EpochSampler(COUNT, 3, seed=4)
        return make_loader(DetectionDataset(table, TRANSFORM, seed=4), sampler, workers, stride=8), sampler

    expected = epochs(*start(0), 0, 3)
    assert_same_batches([batch.to("cpu") for batch in expected], copy.deepcopy(expected))  # moving keeps the targets
    assert sum(len(batch) for batch in expected) == 3 * COUNT and list(windows([], 3)) == []
    assert list(windows(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    state = torch.get_rng_state()
    assert_same_batches(epochs(*start(2), 0, 3), expected)  # the workers persist over three epochs
    assert torch.get_rng_state().equal(state), "the global generator is left alone"

    loader, sampler = start(2)
    epochs(loader, sampler, 0, 1)
    sampler.set_epoch(1)
    first = next(windows(loader, 2))  # workers have run ahead of this by now
    sampler.advance_batches(2)
    resumed_loader, resumed = start(1)
    resumed.load_state_dict(sampler.state_dict())
    assert_same_batches(first + epochs(resumed_loader, resumed, 1, 3), expected[5:])


def test_evaluation_with_an_empty_rank(table):
    dataset = DetectionDataset(table, exact_transform(32))
    for count, images in ((3, 1), (2, 0)):
        loader = make_loader(dataset, EvalSampler(count, 2, rank=2, world_size=3), 1, stride=32)
        assert [(len(batch), batch.images.shape) for batch in loader] == [(images, (images, 3, 32, 32))]


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


@pytest.mark.parametrize("format", ["JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_picture_of_another_size_is_not_trained_on(tmp_path, format, turned):
    """It was replaced after the data were read: its boxes would lie in other places. Turned upright it fits again."""
    table = write_images(tmp_path, 2)
    height, width = table.sizes_hw()[1].tolist()
    exif = Image.Exif()
    exif[274] = 6
    has_exif = format in ("JPEG", "PNG", "TIFF", "WEBP")
    size = (height, width) if turned and has_exif else (width + 1, height)
    Image.new("RGB", size).save(tmp_path / "1.jpg", format, **({"exif": exif} if turned and has_exif else {}))
    dataset = DetectionDataset(table, TRANSFORM)
    dataset[SampleKey(0, 0)]
    if turned and has_exif:
        dataset[SampleKey(0, 1)]
        return
    said = rf"^1\.jpg: image id 101 cannot be read: .*1\.jpg: the picture has {width + 1} x {height} pixels "
    with pytest.raises(BadInput, match=said + rf"\(width x height\), but {width} x {height} by the annotations"):
        dataset[SampleKey(0, 1)]
    with pytest.raises(BadInput, match=said):
        DetectionDataset(table, TRANSFORM, cache_images=True)


@pytest.mark.skipif(not hasattr(fcntl, "F_SETLEASE"), reason="Linux lets a process hold up those that open a file")
@pytest.mark.parametrize("reader", ["check", "no worker", "worker"])
def test_a_disk_that_stalls_at_an_image_is_waited_for_and_that_is_said(tmp_path, reader, monkeypatch):
    table, said = write_images(tmp_path, 4), []
    rows = table.image_rows()
    loader = make_loader(DetectionDataset(table, TRANSFORM), EpochSampler(4, 2, shuffle=False), int(reader == "worker"))
    what = "checking images" if reader == "check" else f"the next images, from {tmp_path}"
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # with which the kernel asks for the file
    with open(tmp_path / "0.jpg", "r+b") as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)

        def answer(text):
            if what in text and not said:
                fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
                said.append(text)

        monkeypatch.setattr("toolkit.base.files.STALLED_S", 0.01)
        monkeypatch.setattr("toolkit.base.files._say", answer)
        if reader == "check":
            assert check_image_files(rows, {row.file_name for row in rows}, tmp_path, "full")[0] == []
        else:
            assert [target["image_id"] for batch in loader for target in batch.targets] == [100, 101, 102, 103]
    signal.signal(signal.SIGIO, before)
    (text,) = said
    assert text.startswith(f"still waiting for the disk, for 0.01 s now: {what}; ")


def test_batches_in_flight_need_few_open_files(tmp_path):
    """Sent one by one, the 7 tensors of each target would hold 3360 files open here."""
    table = write_images(tmp_path, 8)
    dataset = DetectionDataset(table, exact_transform(8), cache_images=True)
    loader = make_loader(dataset, [[SampleKey(0, i) for i in range(8)]] * 60, workers=1)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))
    try:
        batches = list(loader)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert len(batches) == 60 and all(isinstance(batch, Batch) for batch in batches)
