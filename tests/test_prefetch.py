"""Copies ahead of the computation, in the order that their streams are told."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from toolkit.data import pipeline
from toolkit.data.batches import Prefetcher
from toolkit.data.formats import open_dataset
from toolkit.runs.settings import DataConfig
from toolkit.session import Session


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
    assert Session.pins.fget(SimpleNamespace(accelerator=SimpleNamespace(device=torch.device(device)))) is pins
    monkeypatch.setattr(pipeline, "make_loader", lambda *_: _[-1])
    table = open_dataset("val", format="shapes")
    assert pipeline.loader_of_settings(table, DataConfig(), seed=0, stride=32, pin=pins)[1] is pins
