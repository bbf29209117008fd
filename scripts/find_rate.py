"""Find a learning rate: train while it rises, until the loss rises too (Smith 2017, arXiv:1506.01186).

    python scripts/find_rate.py scripts/train_detr.py --out rate.yaml
    python scripts/find_rate.py scripts/train_detr.py --config configs/detr/bccd.yaml --out rate.yaml --steps 200

The file written is for `--config` of the training script, after the configuration for which the rate was found. The
rate rises from --lowest to --highest by the same factor at every step, and the backbone's rate rises with it. Training
stops when the smoothed loss is four times its minimum. The proposed rate is a tenth of the rate at that minimum: beyond
the minimum the loss rises, and close to it training is not stable. rate.png beside the file shows the curve; look at
it. Arguments that are not listed below go to the training script. Nothing of this training is kept.

Exit code 0: done, 2: bad input, or no rate at which the loss falls.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from toolkit.base.errors import BadInput, exit_on_bad_input
from toolkit.run.settings_file import save_config
from toolkit.tools.arguments import Program, finite_number, whole_number
from toolkit.tools.interrupts import stop_signals_raise
from toolkit.tools.watch import WatchedRun, resolved_settings, steps_alone

SMOOTHING = 0.9
DIVERGED = 4.0  # times the smallest smoothed loss
BELOW_THE_SMALLEST = 10.0
LARGEST_RATE = 1e6  # at which any training diverges


def smooth_losses(losses: Iterable[tuple[float, float]]) -> list[tuple[float, float, float]]:
    """Return (rate, loss, smoothed loss) of each step, up to the step where the loss diverges, which is left out.

    losses: (rate, loss) of each step.
    """
    curve = []
    mean = 0.0
    smallest = math.inf
    for number, (rate, loss) in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        smoothed = mean / (1 - SMOOTHING**number)  # the mean began at 0
        if not math.isfinite(smoothed) or smoothed > DIVERGED * smallest:
            break
        curve.append((rate, loss, smoothed))
        smallest = min(smallest, smoothed)
    return curve


def proposal(curve: list[tuple[float, float, float]]) -> float:
    """Return a tenth of the rate at which the smoothed loss is smallest. Raises BadInput if the loss did not fall.

    curve: result of `smooth_losses`.
    """
    smoothed = [row[2] for row in curve]
    if len(curve) < 5 or min(smoothed) > 0.98 * smoothed[0]:
        raise BadInput(f"the loss does not fall at any of {len(curve)} rates: give a smaller --lowest, or more --steps")
    return curve[smoothed.index(min(smoothed))][0] / BELOW_THE_SMALLEST


def draw(curve: list[tuple[float, float, float]], rate: float, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure((7, 4), layout="constrained")
    axes = figure.add_subplot()
    rates, losses, smoothed = zip(*curve, strict=True)
    axes.semilogx(rates, losses, alpha=0.3, label="loss")
    axes.semilogx(rates, smoothed, label="smoothed")
    axes.axvline(rate, linestyle="--", color="black", label=f"proposed: {rate:.2g}")
    axes.set(xlabel="learning rate", ylabel="training loss", ylim=(0.9 * min(smoothed), 1.2 * max(smoothed)))
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def find(arguments: argparse.Namespace, rest: list[str]) -> None:
    low, high, steps = arguments.lowest, arguments.highest, arguments.steps
    if not 0 < low < high:
        raise BadInput(f"--lowest {low:g}, --highest {high:g}: expected 0 < lowest < highest")
    optim = resolved_settings(arguments.script, rest)["optim"]
    ratio = None if optim["backbone_lr"] is None else optim["backbone_lr"] / (optim["lr"] or 1)
    settings = {
        "optim.lr": low,
        "schedule.name": "exponential",
        "schedule.per": "step",
        "schedule.final_factor": high / low,
        "schedule.warmup_steps": 0,
    }
    if ratio is not None:
        settings["optim.backbone_lr"] = low * ratio
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        run = WatchedRun(steps_alone(arguments.script, rest, folder, steps, settings), folder, Path(scratch) / "output")
        try:
            rows = (row for row in run.rows() if "train/loss" in row)
            curve = smooth_losses(_until(rows, low, high, steps))
        finally:
            run.stop(saving=False)  # the training is discarded
        if not curve:
            raise BadInput(f"the training did not make a step:\n{run.last_words(20)}")
    rate = proposal(curve)
    draw(curve, rate, arguments.out.with_suffix(".png"))
    proposed = {"lr": float(f"{rate:.2g}")} | ({} if ratio is None else {"backbone_lr": float(f"{rate * ratio:.2g}")})
    smallest = min(curve, key=lambda row: row[2])
    remarks = [f"Found by scripts/find_rate.py {arguments.script} {' '.join(rest)}"]
    remarks.append(
        f"The smoothed loss was smallest ({smallest[2]:.4g}) at {smallest[0]:.2g}; {len(curve)} of {steps} steps from "
        f"{low:g} to {high:g}."
    )
    save_config({"optim": proposed}, arguments.out, remarks)
    print(f"optim.lr {proposed['lr']:g}; written: {arguments.out}, {arguments.out.with_suffix('.png')}")


def _until(rows: Iterable[dict], low: float, high: float, steps: int) -> Iterable[tuple[float, float]]:
    for row in rows:
        yield low * (high / low) ** ((row["step"] - 1) / steps), row["train/loss"]
        if row["step"] >= steps:
            return


@exit_on_bad_input
def main(argv: list[str] | None = None) -> None:
    parser = Program(__doc__, allow_abbrev=False)
    parser.add_argument("script", type=Path, help="training script, such as scripts/train_detr.py")
    parser.add_argument("--out", type=Path, default=Path("rate.yaml"), help="file to write (default rate.yaml)")
    steps = "optimizer steps from lowest to highest (default 100)"
    parser.add_argument("--steps", type=whole_number(10, 1_000_000), default=100, help=steps)
    rate = finite_number(0, LARGEST_RATE)
    parser.add_argument("--lowest", type=rate, default=1e-6, help="learning rate of the first step (default 1e-6)")
    parser.add_argument("--highest", type=rate, default=1.0, help="learning rate of the last step (default 1)")
    with stop_signals_raise():
        find(*parser.parse_known(argv))


if __name__ == "__main__":
    sys.exit(main())
