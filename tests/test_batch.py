"""What travels to a device together, and ahead of the computation."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from samples import target_of
from torch.distributed.utils import _to_kwargs

from toolkit.base.batch import Batch, dicts_to_host, on_host, pack, send_dicts, sizes_on_host, unpack
from toolkit.data import pipeline
from toolkit.data.batches import Prefetcher
from toolkit.data.formats import open_dataset
from toolkit.detectors.detr.rt_detr import without_crowd
from toolkit.run import session_build
from toolkit.run.settings import DataConfig


def _targets() -> list[dict]:
    full = target_of([[0, 0, 4, 4]] * 3, (30, 40), crowd=[1]) | {"known": torch.tensor([True, False, True])}
    return [full, target_of([], (20, 10)) | {"known": torch.zeros(0, dtype=torch.bool)}]


def test_packed_tensors_of_every_dtype_and_shape_come_back():
    tensors = [torch.rand(3, 2), torch.tensor(5), torch.zeros(0, 4), torch.tensor([True, False, True]),
               torch.rand(2, 3, dtype=torch.float64).T, torch.arange(3, dtype=torch.uint8), torch.rand(1),
               torch.zeros(1, dtype=torch.int64).expand(1)]  # fmt: skip
    for back, each in zip(unpack(pack(tensors), tensors), tensors, strict=True):
        assert back.dtype == each.dtype and torch.equal(back, each)
    assert unpack(pack([torch.zeros(0)]), [torch.zeros(0)])[0].shape == (0,)
    assert pack(tensors).numel() == 24 + 8 + 0 + 8 + 48 + 8 + 8 + 8, "bytes, each filled up to eight"


def test_a_batch_on_another_device_has_the_same_values_and_knows_its_targets_on_the_host():
    targets = _targets()
    batch = Batch(torch.zeros(2, 3, 32, 64, dtype=torch.uint8), torch.tensor([[30, 40], [20, 10]]), targets)
    moved = batch.to("meta")  # a device that this machine has
    assert moved.images.device.type == moved.sizes.device.type == "meta"
    for target, original in zip(moved.targets, targets, strict=True):
        assert all(value is original[name] for name, value in on_host(target).items())
        assert on_host(target).keys() == original.keys() and target["image_id"] == original["image_id"]
        assert {k: v.shape for k, v in target.items() if isinstance(v, torch.Tensor)} == {
            k: v.shape for k, v in original.items() if isinstance(v, torch.Tensor)
        }
    assert sizes_on_host(moved.sizes, moved.targets) == [(30, 40), (20, 10)], "without reading the device"
    cut = without_crowd(moved.targets[0])
    assert cut["boxes"].shape == (2, 4) and on_host(cut)["labels"].tolist() == [0, 2], "known on the host"
    assert batch.to("cpu").targets is targets
    sent = send_dicts(targets, "meta")
    assert sent[0]["boxes"].is_meta and sent[1]["boxes"].shape == (0, 4) and sent[0]["image_id"] == 7
    assert send_dicts([{}], "meta") == [{}]


def test_ddp_leaves_the_targets_on_the_host_where_they_are():
    """With `device_ids` it sends every tensor that it finds in the inputs of `forward` to its device, one by one."""
    boxes = torch.rand(3, 4)
    target = {"boxes": boxes, "labels": torch.tensor([1, 2, 3]), "image_id": 7}
    batch = Batch(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.tensor([[8, 8]]), [target]).to("meta")
    inputs, _ = _to_kwargs((batch.images, batch.sizes, batch.targets), {}, torch.device("meta"), False)
    given = inputs[0][2][0]
    assert given["boxes"].device.type == "meta"
    host = on_host(given)
    assert torch.equal(host["boxes"], boxes)
    assert copy.deepcopy(host).keys() == target.keys()
    assert on_host(host) is host


def test_dicts_that_come_to_the_host_share_no_memory_with_what_they_were_cut_from():
    column = torch.arange(1000.0)[:, None]
    dicts = [{"scores": column[:3], "labels": torch.tensor([1, 2, 3])}, {"scores": column[:0], "labels": column[:0, 0]}]
    found = dicts_to_host(dicts)
    for ours, given in zip(found, dicts, strict=True):
        assert ours.keys() == given.keys() and all(torch.equal(ours[name], given[name]) for name in given)
    assert found[0]["scores"].untyped_storage().nbytes() < 100, "an evaluation keeps what it is given"


def test_a_step_waits_for_its_own_window_and_not_for_the_next(monkeypatch):
    said = []  # what the streams are told, in order

    def stream(name):
        def record_event():
            said.append((name, "record", f"event {sum(entry[1] == 'record' for entry in said)}"))
            return said[-1][2]

        return SimpleNamespace(record_event=record_event, wait_event=lambda event: said.append((name, "wait", event)))

    def sent(name):
        batch = SimpleNamespace(name=name, images=torch.zeros(0), sizes=torch.zeros(0))
        batch.to = lambda device, non_blocking: said.append(("copies", "copy", name)) or batch
        return batch

    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream("computes"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    ahead = Prefetcher("cpu")
    ahead.device, ahead.stream = torch.device("cuda"), stream("copies")
    windows = [[sent(f"{window}{micro}") for micro in "ab"] for window in "012"]
    for window in ahead.through(windows):
        for batch in window:
            assert ahead.arrived(batch).name == batch.name
            said.append(("computes", "step", batch.name))

    for index, window in enumerate(windows):
        for batch in window:
            step = said.index(("computes", "step", batch.name))
            assert said[step - 1] == ("computes", "wait", f"event {index}")
            assert said.index(("copies", "copy", batch.name)) < said.index(("copies", "record", f"event {index}"))
        if index < 2:  # the next window is under way before this one is computed, and nobody waits for it
            begins = said.index(("computes", "wait", f"event {index}"))
            assert said.index(("copies", "record", f"event {index + 1}")) < begins
    assert not ahead._sent


@pytest.mark.parametrize(("device", "pins"), [("cpu", False), ("cuda", True)])
def test_only_what_goes_to_a_gpu_is_pinned(monkeypatch, device, pins):
    """A run on the CPU of a machine with a GPU pins nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert session_build._pins(torch.device(device)) is pins
    monkeypatch.setattr(pipeline, "make_loader", lambda *_: _[-1])
    table = open_dataset("val", format="shapes")
    assert pipeline.loader_of_settings(table, DataConfig(), seed=0, stride=32, pin=pins)[1] is pins


def test_copies_that_nobody_asks_for_are_let_go(monkeypatch):
    """A script may train on other batches: theirs would fill the memory of the device within an epoch."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    ahead = Prefetcher("cpu")
    ahead.stream = SimpleNamespace(record_event=lambda: None)
    batches = [Batch(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.tensor([[2, 2]]), []) for _ in range(6)]
    held = [len(ahead._sent) for _ in ahead.through([[batch] for batch in batches])]
    assert held == [2, 2, 2, 2, 2, 1] and not ahead._sent


def test_masks_travel_between_processes_as_one_tensor_and_to_a_device_with_the_rest():
    targets = _targets()
    targets[0]["masks"] = torch.randint(0, 2, (3, 30, 40), dtype=torch.uint8)
    targets[1]["masks"] = torch.zeros(0, 20, 10, dtype=torch.uint8)
    batch = Batch(torch.zeros(2, 3, 32, 64, dtype=torch.uint8), torch.tensor([[30, 40], [20, 10]]), targets)
    state = batch.__getstate__()
    assert [value.numel() for value in state.values() if isinstance(value, torch.Tensor)] == [2 * 3 * 32 * 64, 3600]
    for back, target in zip(copy.deepcopy(batch).targets, targets, strict=True):
        assert list(back) == list(target) and back["masks"].equal(target["masks"])
    moved = batch.to("meta")
    assert [tuple(target["masks"].shape) for target in moved.targets] == [(3, 30, 40), (0, 20, 10)]
    assert on_host(moved.targets[0])["masks"] is targets[0]["masks"]
