"""What travels together to a device or another process comes back as it was."""

import copy

import torch
from samples import target_of
from torch.distributed.utils import _to_kwargs

from toolkit.base.batch import Batch, dicts_to_host, normalize_images, on_host, pack, send_dicts, sizes_on_host, unpack
from toolkit.detectors.detr.rt_detr import without_crowd

SIZES = [(30, 40), (20, 10)]


def batch_of_two() -> Batch:
    """Return a batch with masks, whose second image has no boxes."""
    first = target_of([[0, 0, 4, 4]] * 3, SIZES[0], crowd=[1])
    second = target_of([], SIZES[1])
    first["masks"] = torch.randint(0, 2, (3, 30, 40), dtype=torch.uint8)
    second["masks"] = torch.zeros(0, 20, 10, dtype=torch.uint8)
    return Batch(torch.zeros(2, 3, 32, 64, dtype=torch.uint8), torch.tensor(SIZES), [first, second])


def test_packed_tensors_of_every_dtype_and_shape_come_back():
    tensors = [
        torch.rand(3, 2),
        torch.tensor(5),
        torch.zeros(0, 4),
        torch.tensor([True, False, True]),
        torch.rand(2, 3, dtype=torch.float64).T,
        torch.zeros(1, dtype=torch.int64).expand(1),
    ]
    packed = pack(tensors)
    assert len(packed) == 24 + 8 + 0 + 8 + 48 + 8  # bytes, each filled up to eight
    torch.testing.assert_close(unpack(packed, tensors), tensors, rtol=0, atol=0)
    [empty] = unpack(pack(tensors[2:3]), tensors[2:3])
    assert empty.shape == (0, 4)


def test_float_images_are_normalised_as_bytes_are_and_not_changed():
    images = torch.randint(256, (1, 3, 4, 5), dtype=torch.uint8)
    given = images.float()
    options = {
        "sizes": torch.tensor([[3, 4]]),
        "mean": (0.5, 0.4, 0.3),
        "std": (0.1, 0.2, 0.3),
    }
    normalized = normalize_images(given, **options)
    assert normalized.equal(normalize_images(images, **options))
    assert not normalized[..., 3:, :].any()
    assert given.equal(images)


def test_images_that_fill_a_batch_are_normalised_without_their_sizes():
    images = torch.randint(256, (2, 3, 4, 5), dtype=torch.uint8)
    options = {"mean": [0.5, 0.4, 0.3], "std": [0.1, 0.2, 0.3]}
    sizes = torch.tensor([[4, 5], [4, 5]])
    with torch.inference_mode():  # the statistics that it keeps serve training too
        expected = normalize_images(images, sizes, **options).clone()
    pixels = images.float().requires_grad_()
    normalized = normalize_images(pixels, None, **options)
    assert normalized.equal(expected)
    normalized.sum().backward()
    torch.testing.assert_close(pixels.grad[0, :, 0, 0], 1 / (255 * torch.tensor(options["std"])))


def test_targets_on_a_device_are_known_on_the_host():
    """The device meta has shapes alone, and nothing can be read from it."""
    batch = batch_of_two()
    moved = batch.to("meta")
    assert moved.images.is_meta
    assert sizes_on_host(moved.sizes, moved.targets) == SIZES
    for target, original in zip(moved.targets, batch.targets, strict=True):
        host = on_host(target)
        assert on_host(host) is host
        assert host.keys() == original.keys()
        for name, value in original.items():
            assert host[name] is value
            if isinstance(value, torch.Tensor):
                assert target[name].is_meta
                assert target[name].shape == value.shape
    cut = without_crowd(moved.targets[0])
    assert on_host(cut)["labels"].tolist() == [0, 2]
    assert batch.to("cpu").targets is batch.targets


def test_ddp_leaves_the_targets_on_the_host_where_they_are():
    """With `device_ids` it sends every tensor that it finds in the inputs of `forward` to its device, one by one."""
    batch = batch_of_two()
    moved = batch.to("meta")
    inputs, _ = _to_kwargs(
        (moved.images, moved.targets),
        {},
        torch.device("meta"),
        False,
    )
    [_, [target, _]] = inputs[0]
    assert target["boxes"].is_meta
    assert on_host(target)["boxes"].equal(batch.targets[0]["boxes"])


def test_dicts_are_sent_and_come_back_with_memory_of_their_own():
    column = torch.arange(1000.0)[:, None]
    dicts = [{"scores": column[:3], "labels": torch.tensor([1, 2, 3])}, {"scores": column[:0], "labels": column[:0, 0]}]
    on_device = send_dicts(dicts, "meta")
    assert [sent["scores"].shape for sent in on_device] == [(3, 1), (0, 1)]
    found = dicts_to_host(dicts)
    for ours, given in zip(found, dicts, strict=True):
        assert ours["scores"].equal(given["scores"])
    assert found[0]["labels"].tolist() == [1, 2, 3]
    assert found[0]["scores"].untyped_storage().nbytes() < 100  # an evaluation keeps what it is given
    assert send_dicts([{}], "meta") == [{}]


def test_a_batch_travels_between_processes_with_all_masks_as_one_tensor():
    batch = batch_of_two()
    state = batch.__getstate__()
    assert [value.numel() for value in state.values() if isinstance(value, torch.Tensor)] == [2 * 3 * 32 * 64, 3600]
    back = copy.deepcopy(batch)
    assert back.sizes.equal(batch.sizes)
    torch.testing.assert_close(back.targets, batch.targets, rtol=0, atol=0)
