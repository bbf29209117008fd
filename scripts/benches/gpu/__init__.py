"""The five scripts on a GPU: speed, memory, waits, kernels, other loops, and what must hold there as on a CPU.

    python scripts/benchmark.py --only gpu --out runs/gpu             # 7 minutes at most; runs/gpu/ is what to send in
    python scripts/benchmark.py --only gpu --out runs/gpu --long      # every mode and the largest batch: an hour or so
    python scripts/benchmark.py --only gpu --out runs/gpu --items resumed parity        # what has one of these words

    schedule.py   which items there are, in which order, and the seconds of each
    items.py      what an item measures
    trainings.py  a training as a fork of this process, which has imported everything, and the clock inside it
    loops.py      other loops on the same model

`make gpu` runs it. Models are those of the published recipes, on random weights and the bundled pictures, enlarged to
the recipes' sizes and at most mirrored. Each item is a process of its own, and its rows are kept as they come: one that
fails or is ended keeps what it has measured, and a row says why.
"""

from .schedule import bench_gpu

__all__ = ["bench_gpu"]
