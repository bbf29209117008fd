"""Batches: padded, the same with any workers and after a resume, and one sentence where a file or a worker fails."""

import copy
import os
import signal

import numpy as np
import pytest
import torch
from documents import row_of
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import assert_same, noise_table, sample
from torchvision.transforms import functional as F

from toolkit.base.batch import Batch, normalize_images, pixel_mask
from toolkit.base.errors import BadInput
from toolkit.data.batches import collate, make_loader, naming_killed_workers, windows
from toolkit.data.check_files import check_image_files
from toolkit.data.dataset import DetectionDataset
from toolkit.data.sampling import EpochSampler, EvalSampler, SampleKey
from toolkit.data.table import Category
from toolkit.data.transforms.geometry import ResizeShorter, detr_train_transform, exact_transform

fcntl = pytest.importorskip("fcntl", reason="limits of the kernel, and forked workers: not on Windows")
resource = pytest.importorskip("resource", reason="limits of the kernel, and forked workers: not on Windows")

COUNT = 13
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
TRANSFORM = detr_train_transform(
    (30, 40),
    80,
    first_scales=(30, 36),
    crop_sizes=(20, 30),
)


def write_images(folder, count=COUNT):
    """JPEG noise of various sizes; image i has i % 4 boxes and, with two or more, a relation between them."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        boxes = [[1 + 4 * j, 2, 12 + 4 * j, 15 + j] for j in range(number % 4)]
        relations = [(0, 1, 2)] if len(boxes) > 1 else ()
        row = row_of(
            100 + number,
            boxes,
            rng.integers(25, 60, 2).tolist(),
            relations=relations,
        )
        rows.append(row | {"file_name": f"{number}.jpg"})
    return noise_table(
        folder,
        rows,
        categories=[Category(i, f"class {i}") for i in range(3)],
    )


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


# ---- collation -------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 40)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 33),
)
def test_images_are_padded_with_zeros_to_the_stride(sizes, stride):
    samples = [sample([[0, 0, 1, 1]] * number, size_hw) for number, size_hw in enumerate(sizes)]
    batch = collate(samples, stride)
    assert batch.images.dtype == torch.uint8
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.sizes.tolist() == [list(size) for size in sizes]
    for side in (0, 1):
        padded = batch.images.shape[2 + side]
        largest = max(size[side] for size in sizes)
        assert padded % stride == 0
        assert largest <= padded < largest + stride
    masks = pixel_mask(batch.sizes, batch.images.shape[-2:])
    for (image, target), padded, own, mask in zip(
        samples,
        batch.images,
        batch.targets,
        masks,
        strict=True,
    ):
        _, height, width = image.shape
        assert own is target
        assert padded[:, :height, :width].equal(image)
        assert padded.sum() == image.sum()  # so all the rest is zero
        assert mask[:height, :width].all()
        assert mask.sum() == height * width


def test_a_batch_may_be_empty():
    batch = collate([], stride=32)
    assert len(batch) == 0
    assert batch.images.shape == (0, 3, 32, 32)
    assert batch.sizes.shape == (0, 2)
    assert normalize_images(batch.images, batch.sizes, MEAN, STD).shape == (0, 3, 32, 32)
    assert batch.to("cpu").sizes.dtype == torch.int64


def test_normalisation_is_detrs():
    """DETR normalises each image, then pads with zeros; here padded bytes are normalised, then zeroed. Bit for bit."""
    images = [
        sample([], size_hw)
        for size_hw in [
            (20, 37),
            (33, 10),
            (40, 40),
        ]
    ]
    batch = collate(images, stride=16)
    expected = torch.zeros(3, 3, 48, 48)
    for (image, _), padded in zip(images, expected, strict=True):
        pixels = F.to_tensor(image.permute(1, 2, 0).numpy())
        padded[:, : image.shape[1], : image.shape[2]] = F.normalize(pixels, MEAN, STD)
    normalized = normalize_images(batch.images, batch.sizes, MEAN, STD)
    assert normalized.equal(expected)
    assert normalized.is_contiguous()
    half = normalize_images(batch.images, batch.sizes, MEAN, STD, torch.bfloat16)
    assert half.equal(expected.to(torch.bfloat16))  # rounded once, at the end


def test_windows_of_an_epoch_end_with_a_shorter_one():
    assert list(windows([], 3)) == []
    assert list(windows(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]


# ---- loaders ---------------------------------------------------------------------------------------------------------


def start(table, workers):
    sampler = EpochSampler(COUNT, 3, seed=4)
    return make_loader(
        DetectionDataset(table, TRANSFORM, seed=4),
        sampler,
        workers,
        stride=8,
    ), sampler


@pytest.fixture(scope="module")
def expected(table):
    """The batches of three epochs."""
    return epochs(*start(table, 0), 0, 3)


def test_batches_do_not_depend_on_workers(table, expected):
    state = torch.get_rng_state()
    assert_same_batches(epochs(*start(table, 2), 0, 3), expected)  # the workers persist over three epochs
    assert torch.get_rng_state().equal(state)  # the global generator is left alone
    assert sum(map(len, expected)) == 3 * COUNT
    assert_same_batches([batch.to("cpu") for batch in expected], copy.deepcopy(expected))


def test_batches_do_not_depend_on_resuming(table, expected):
    loader, sampler = start(table, 2)
    epochs(loader, sampler, 0, 1)
    sampler.set_epoch(1)
    first = next(windows(loader, 2))  # workers have run ahead of this by now
    sampler.advance_batches(2)
    resumed_loader, resumed = start(table, 1)
    resumed.load_state_dict(sampler.state_dict())
    assert_same_batches(first + epochs(resumed_loader, resumed, 1, 3), expected[5:])


@pytest.mark.parametrize(("count", "images"), [(3, 1), (2, 0)])
def test_a_rank_may_evaluate_nothing(table, count, images):
    sampler = EvalSampler(count, 2, rank=2, world_size=3)
    loader = make_loader(DetectionDataset(table, exact_transform(32)), sampler, 1, stride=32)
    assert [batch.images.shape for batch in loader] == [(images, 3, 32, 32)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_file_is_one_clear_error(tmp_path, workers):
    table = write_images(tmp_path, 6)
    whole = (tmp_path / "4.jpg").read_bytes()
    (tmp_path / "4.jpg").write_bytes(whole[: len(whole) // 2])
    batches = iter(
        make_loader(
            DetectionDataset(table, TRANSFORM),
            EpochSampler(6, 2, shuffle=False),
            workers,
        )
    )
    assert [target["image_id"] for target in next(batches).targets] == [100, 101]
    assert [target["image_id"] for target in next(batches).targets] == [102, 103]
    with pytest.raises(BadInput, match=r"^4\.jpg: image id 104 cannot be read: .*truncated$"):
        next(batches)


class Killing(DetectionDataset):
    """Whoever makes the sixth image is killed, as the kernel does where memory runs out."""

    def __getitem__(self, key):
        if key.index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(key)


def test_a_worker_that_is_killed_is_named_with_its_batch_and_what_to_lower(table):
    with pytest.raises(BadInput) as caught, naming_killed_workers():
        list(
            make_loader(
                Killing(table, ResizeShorter((30,))),
                EvalSampler(COUNT, 2),
                workers=2,
            )
        )
    said = str(caught.value)
    assert "killed by signal: Killed; it was worker 0, its last batch began with 4.jpg (id 104), 5.jpg" in said
    assert "data.workers" in said
    assert "--run.resume latest" in said
    assert "\n" not in said


def test_other_errors_of_workers_stay_as_they_are():
    with pytest.raises(RuntimeError, match="shapes differ"), naming_killed_workers():
        raise RuntimeError("shapes differ")


@pytest.mark.skipif(not hasattr(fcntl, "F_SETLEASE"), reason="Linux lets a process hold up those that open a file")
@pytest.mark.parametrize("reader", ["check", "no worker", "worker"])
def test_a_disk_that_stalls_is_waited_for_and_that_is_said(tmp_path, reader, monkeypatch):
    table = write_images(tmp_path, 4)
    rows = table.image_rows()
    what = "checking images" if reader == "check" else f"the next images, from {tmp_path}"
    said = []
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # with which the kernel asks for the file
    with open(tmp_path / "0.jpg", "r+b") as file:

        def answer(text):
            if what in text and not said:
                fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
                said.append(text)

        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        monkeypatch.setattr("toolkit.base.files.STALLED_S", 0.01)
        monkeypatch.setattr("toolkit.base.files._say", answer)
        if reader == "check":
            assert check_image_files(rows, {row.file_name for row in rows}, tmp_path, "full")[0] == []
        else:
            sampler = EpochSampler(4, 2, shuffle=False)
            loader = make_loader(DetectionDataset(table, TRANSFORM), sampler, int(reader == "worker"))
            assert sum(map(len, loader)) == 4
    signal.signal(signal.SIGIO, before)
    (text,) = said
    assert text.startswith(f"still waiting for the disk, for 0.01 s now: {what}; ")


def test_batches_in_flight_need_few_open_files(tmp_path):
    """Sent one by one, the 7 tensors of each target would hold 3360 files open here."""
    dataset = DetectionDataset(write_images(tmp_path, 8), exact_transform(8), cache_images=True)
    loader = make_loader(
        dataset,
        [[SampleKey(0, index) for index in range(8)]] * 60,
        workers=1,
    )
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))
    try:
        batches = list(loader)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert len(batches) == 60
    assert all(isinstance(batch, Batch) for batch in batches)
