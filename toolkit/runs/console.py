"""Console output of a run: one line per logged step, and a progress bar on a terminal."""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from tqdm import tqdm

_LAYER = re.compile(r"_(enc|dn|aux|interm)?_?\d+$|_enc$|_unscaled$")


@dataclass
class Place:
    """Where a run is: steps done, of how many, and how long it has been at it.

    steps_per_epoch: of an epoch with batches of now. recut: steps more that the run would have made with these always.
    """

    step: int
    total_steps: int
    epoch: int
    steps_per_epoch: int
    elapsed_s: float
    recut: int = 0

    @property
    def epochs(self) -> int:
        """Of the whole run; a last one that ends early counts."""
        return max(-(-(self.total_steps + self.recut) // self.steps_per_epoch), self.epoch + 1)

    def __str__(self) -> str:
        """epoch k/K  step i/I of the run  elapsed"""
        elapsed = timedelta(seconds=round(self.elapsed_s))
        return f"epoch {self.epoch + 1}/{self.epochs}  step {self.step}/{self.total_steps}  elapsed {elapsed}"


def console_line(row: Mapping, smoothed: Mapping[str, object], place: Place) -> str:
    """A training row as one line for people; losses of auxiliary layers are left to metrics.jsonl.

    Args:
        row: as for `RunWriter.log`; what it lacks is left out.
        smoothed: what to show for each loss or metric, by its name without `train/`: the last value and its mean, say.
    """

    def show(key: str, label: str, form: str, unit: str = "") -> list[str]:
        return [] if row.get(key) is None else [f"{label} {row[key]:{form}}{unit}"]

    eta = row.get("time/eta_s")
    parts = [str(place)]
    parts += [f"eta {timedelta(seconds=round(eta))}"] if eta is not None and math.isfinite(eta) else []
    parts += [f"loss {smoothed['loss']}"] if "loss" in smoothed else []
    names = [key.removeprefix("train/") for key in row if key.startswith("train/loss_")]
    losses = [f"{name.removeprefix('loss_')} {smoothed[name]}" for name in names if not _LAYER.search(name)]
    parts += ["[" + "  ".join(losses) + "]"] if losses else []
    parts += [f"{key.removeprefix('train/')} {smoothed[key.removeprefix('train/')]}" for key in row
              if key.startswith("train/") and key.endswith("_error")]  # fmt: skip
    rates = " ".join(f"{key.removeprefix('train/lr/')} {row[key]:.3g}" for key in row if key.startswith("train/lr/"))
    parts += [f"lr {rates}"] if rates else []
    parts += show("train/grad_norm", "grad_norm", ".3g") + show("time/data_s", "data", ".3f", " s")
    parts += show("time/step_s", "step", ".3f", " s") + show("mem/peak_mb", "mem", ".0f", " MiB")
    return "  ".join(parts)


def length_warnings(total_steps: int, warmup_steps: int, steps_per_epoch: int) -> dict[str, str]:
    """What a run of `total_steps` optimizer steps never gets to, in words: the end of the "warm-up", all of an
    "epoch"."""
    warnings = {}
    if total_steps <= warmup_steps:
        warnings["warm-up"] = (
            f"warning: training ends inside the warm-up, after {total_steps} of its {warmup_steps} steps "
            "(schedule.warmup_steps), and never reaches its learning rate: make it shorter, or the run longer "
            "(run.max_minutes, run.max_steps, run.epochs)"
        )
    if total_steps < steps_per_epoch:
        warnings["epoch"] = (
            f"warning: training ends after {total_steps} of the {steps_per_epoch} steps of an epoch, before it has "
            "seen all images once: make the run longer (run.max_minutes, run.max_steps)"
        )
    return warnings


def averages_line(epoch: int, means: Mapping[str, float], epoch_s: float, steps: int) -> str:
    """The averages of an epoch as one line, as DETR prints them, with its time; auxiliary layers are left out."""
    shown = "  ".join(f"{name}: {mean:.4f}" for name, mean in means.items() if not _LAYER.search(name))
    time = f"{timedelta(seconds=round(epoch_s))} ({epoch_s / max(steps, 1):.3f} s / step)"
    return f"Averaged stats of epoch {epoch + 1}: {shown}  time {time}"


def total_line(elapsed_s: float, steps: int) -> str:
    """The time of a whole run as one line, evaluations and checkpoints included, as DETR and Scene-Graph-Benchmark."""
    return f"Training time {timedelta(seconds=round(elapsed_s))} ({elapsed_s / max(steps, 1):.3f} s / step)"


def progress(total: int, initial: int = 0, enabled: bool = True) -> tqdm:
    """A bar over optimizer steps with the time left, on a terminal; elsewhere it stays silent.

    `bar.update()` at each step; `bar.write(line)` prints a line above the bar, or plainly where there is none.

    `total`: steps of the run; `initial`: steps done before; `enabled`: this is the main process.
    """
    shown = enabled and sys.stderr is not None and sys.stderr.isatty()
    return tqdm(total=total, initial=initial, disable=not shown, unit="step", dynamic_ncols=True, smoothing=0.1)
