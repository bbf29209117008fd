"""How the processes of a run are wrapped, and meet again after a restart."""

import warnings

import pytest
import torch
from processes import as_launched, run_on_ranks
from torch import nn

from toolkit.base.distributed import world
from toolkit.run.processes import RESTARTABLE


class Tiny(nn.Module):
    def __init__(self, leaves_unused: bool):
        super().__init__()
        self.leaves_unused = leaves_unused
        self.buffers_steer_training = leaves_unused
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.register_buffer("own", torch.tensor(float(world()[0])))

    def forward(self, x):
        return self.second(self.first(x)).sum() + self.own


def as_prepared() -> list[tuple]:
    """Return of both kinds of detector: whether DDP looks for unused parameters, how many buckets the gradients share,
    and the buffer of this rank behind a step."""
    from toolkit.run.processes import prepare

    accelerator = as_launched()
    warnings.simplefilter("error", FutureWarning)  # every process would print it
    found = []
    for leaves_unused in (True, False):
        detector = Tiny(leaves_unused)
        model, _ = prepare(
            accelerator,
            detector,
            torch.optim.SGD(detector.parameters(), 0.1),
            None,
            True,
        )
        for _ in range(2):
            model(torch.ones(1, 2)).backward()
        buckets = {parameter.grad.untyped_storage().data_ptr() for parameter in detector.parameters()}
        found.append((model.find_unused_parameters, len(buckets), detector.own.item()))
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_look_for_unused_parameters_only_where_there_may_be_some(ranks):
    """Three and more on a CPU do: their sums depend on the order of the buckets, which a search keeps from the first
    step on; without it a resumed run would add up otherwise in its first."""
    for rank, (leaves_unused, uses_all) in enumerate(run_on_ranks(as_prepared, ranks)):
        assert leaves_unused == (True, 1, 0.0)  # the buffer is that of the first process
        assert uses_all == (ranks > 2, 1, float(rank))


def test_a_restart_does_not_see_what_earlier_processes_told_each_other(monkeypatch):
    """The store of torchrun stays; by an address of before, the faster process would look for one that is gone."""
    agent = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": agent.port, "RANK": 0, "WORLD_SIZE": 2}
    for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    for start in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(start))
        store, *place = next(torch.distributed.rendezvous(RESTARTABLE))
        assert place == [0, 2]
        assert not store.check(["address of rank 1"])
        store.set("address of rank 1", "here")
