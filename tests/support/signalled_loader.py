"""Reads with two workers, and is signalled as a group in the middle of an epoch, as terminals and torchrun do it."""

import sys

import torch

from toolkit.base.signals import StopSignals, ignore_in_worker, sigterm_held_back


def read_all(loader) -> None:
    read = []
    with StopSignals() as stop:
        with sigterm_held_back():
            batches = iter(loader)
        for number, batch in enumerate(batches):
            read += batch.tolist()
            if number == 3:
                print("signal me", flush=True)
                sys.stdin.readline()
    assert stop.name in ("SIGTERM", "SIGUSR1", "SIGINT")
    assert read == list(range(40))
    print("read all", flush=True)


def end_a_worker(loader) -> None:
    """As DataLoader ends one that hangs: by a SIGTERM of its own trainer."""
    with sigterm_held_back():
        batches = iter(loader)
    next(batches)
    worker = batches._workers[0]
    worker.terminate()
    worker.join()
    print("worker ended with", worker.exitcode, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(2)
    torch.ones(100_000).mul(2)  # starts the threads of OpenMP, which a worker then has too
    loader = torch.utils.data.DataLoader(
        range(40),
        batch_size=2,
        num_workers=2,
        worker_init_fn=ignore_in_worker,
    )
    read_all(loader)
    end_a_worker(loader)
