"""Windows are copied to a device ahead of the computation."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from toolkit.base.batch import Batch
from toolkit.data import pipeline
from toolkit.data.batches import Prefetcher
from toolkit.data.formats import open_dataset
from toolkit.run import session_build
from toolkit.run.settings import DataConfig


def test_a_step_waits_for_its_own_window_and_not_for_the_next(monkeypatch):
    said = []  # what the streams are told, in order

    def sent(name):
        batch = SimpleNamespace(images=torch.zeros(0), sizes=torch.zeros(0))
        batch.to = lambda device, non_blocking: said.append(f"copy {name}") or batch
        return batch

    def record_event():
        said.append("copied")
        return said.count("copied")

    computes = SimpleNamespace(wait_event=lambda number: said.append(f"wait for {number}"))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computes)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    ahead = Prefetcher("cpu")
    ahead.device = torch.device("cuda")
    ahead.stream = SimpleNamespace(record_event=record_event)
    for window in ahead.through([[sent("1a"), sent("1b")], [sent("2a")]]):
        for batch in window:
            ahead.arrived(batch)
    copies = ["copy 1a", "copy 1b", "copied", "copy 2a", "copied"]
    assert said == [*copies, "wait for 1", "wait for 1", "wait for 2"]
    assert not ahead._sent


def test_copies_that_nobody_asks_for_are_let_go(monkeypatch):
    """A script may train on other batches: theirs would fill the memory of the device within an epoch."""
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    ahead = Prefetcher("cpu")
    ahead.stream = SimpleNamespace(record_event=lambda: None)
    windows = [[Batch(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), torch.tensor([[2, 2]]), [])] for _ in range(4)]
    assert [len(ahead._sent) for _ in ahead.through(windows)] == [2, 2, 2, 1]
    assert not ahead._sent


@pytest.mark.parametrize(("device", "pins"), [("cpu", False), ("cuda", True)])
def test_only_what_goes_to_a_gpu_is_pinned(monkeypatch, device, pins):
    """A run on the CPU of a machine with a GPU pins nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert session_build._pins(torch.device(device)) is pins
    monkeypatch.setattr(pipeline, "make_loader", lambda *given: given[-1])
    table = open_dataset("val", format="shapes")
    _, pinned = pipeline.loader_of_settings(
        table,
        DataConfig(),
        seed=0,
        stride=32,
        pin=pins,
    )
    assert pinned is pins
