"""What people see while a run goes on: one line a logged step, and a progress bar on a terminal."""

import math
import re
import sys
from collections.abc import Mapping
from datetime import timedelta

from tqdm import tqdm

_LAYER = re.compile(r"_(enc|dn|aux|interm)?_?\d+$|_enc$|_unscaled$")


def console_line(row: Mapping, total_steps: int | None = None) -> str:
    """A training row as one line for people, a loss with its running mean in brackets; losses of auxiliary layers are
    left to metrics.jsonl.

    Args:
        row: as for `RunWriter.log`; what it lacks is left out.
        total_steps: of the run.
    """

    def show(key: str, label: str, form: str) -> list[str]:
        value = row.get(key)
        return [] if value is None else [f"{label} {value:{form}}".strip()]

    names = [k.removeprefix("train/") for k in row if k.startswith("train/loss_")]
    names = [n for n in names if not _LAYER.search(n)]
    means = [f" [{row[f'train/mean/{n}']:.4g}]" if f"train/mean/{n}" in row else "" for n in names]
    losses = " ".join(
        f"{n.removeprefix('loss_')} {row[f'train/{n}']:.4g}{mean}" for n, mean in zip(names, means, strict=True)
    )
    rates = " ".join(f"{k.removeprefix('train/lr/')} {row[k]:.3g}" for k in row if k.startswith("train/lr/"))
    eta = row.get("time/eta_s")
    parts = [f"step {row['step']}" + (f"/{total_steps}" if total_steps else ""), *show("epoch", "epoch", ".4g")]
    parts += [f"eta {timedelta(seconds=round(eta))}"] if eta is not None and math.isfinite(eta) else []
    parts += show("train/loss", "loss", ".4f")
    parts += [f"({losses})"] if losses else []
    parts += [f"lr {rates}"] if rates else []
    parts += show("train/grad_norm", "grad_norm", ".3g")
    parts += show("time/data_s", "data", ".3f") + show("time/step_s", "step", ".3f") + show("mem/peak_mb", "mem", ".0f")
    units = {"data": " s", "step": " s", "mem": " MiB"}
    return "  ".join(part + units.get(part.split()[0], "") if i else part for i, part in enumerate(parts))


def progress(total: int, initial: int = 0, enabled: bool = True) -> tqdm:
    """A bar over optimizer steps with the time left, on a terminal; elsewhere it stays silent.

    `bar.update()` at each step; `bar.write(line)` prints a line above the bar, or plainly where there is none.

    `total`: steps of the run; `initial`: steps done before; `enabled`: this is the main process.
    """
    shown = enabled and sys.stderr is not None and sys.stderr.isatty()
    return tqdm(total=total, initial=initial, disable=not shown, unit="step", dynamic_ncols=True, smoothing=0.1)
