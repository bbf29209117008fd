"""The agent of torchrun over ranks that are forked: `torchrun_forked.py RANKS,RESTARTS SCRIPT ARGS`.

torchrun itself starts an interpreter for every rank. Rendezvous, signals, and what is done when a rank dies are the
same.
"""

import runpy
import sys

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def rank(script: str, arguments: list[str]) -> None:
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    numbers, script, *arguments = sys.argv[1:]
    ranks, restarts = map(int, numbers.split(","))
    config = LaunchConfig(
        1,
        1,
        ranks,
        run_id="forked",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=restarts,
        logs_specs=DefaultLogsSpecs(),
    )
    elastic_launch(config, rank)(script, arguments)
