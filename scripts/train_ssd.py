"""Train SSD or SSDLite, on MobileViT or any timm backbone.

    accelerate launch scripts/train_ssd.py                                 # bundled data, minutes on a CPU
    accelerate launch scripts/train_ssd.py --config configs/ssd/bccd.yaml  # real photographs
    accelerate launch scripts/train_ssd.py --config configs/ssd/mobilevit_s_coco.yaml         # all GPUs
    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 scripts/train_ssd.py        # two processes, no GPU

All five scripts share this loop; this one has one more line, for CVNets' losses that balance each other. The
rest of CVNets' `training_engine.py` is in options (accumulation that starts after an epoch, a schedule for
the momentum of batch norms). `--help` shows what to set first, `--help all` every setting.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.base.imports import importing
from toolkit.detectors.ssd.options import SsdliteOptions
from toolkit.run.command_line import run_script
from toolkit.run.settings import (
    DataConfig,
    EvalConfig,
    HubConfig,
    LossConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
)

if TYPE_CHECKING:
    from toolkit.run.session import Session
    from toolkit.run.training import Training

DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "ssd" / "shapes.yaml"


@dataclass
class Config:
    """Train SSD."""

    run: RunConfig = field(default_factory=lambda: RunConfig(name="ssd", meters="epoch_mean"))
    data: DataConfig = field(default_factory=lambda: DataConfig(recipe="ssd", multi_scale_pixels=True))
    model: SsdliteOptions = field(default_factory=SsdliteOptions)
    optim: OptimConfig = field(  # CVNets', of its SSD on MobileViT
        default_factory=lambda: OptimConfig(lr=9e-4, weight_decay=0.01, max_norm=0.0)
    )
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    hub: HubConfig = field(default_factory=HubConfig)


def train_one_epoch(t: "Training") -> dict[str, float]:
    """Train to the end of the epoch, or of the run, and return the epoch's averages. See docs/design.md."""
    t.model.train()
    for window in t.windows():  # the micro-batches of one update; then saves and evaluates, if that is due
        for batch in window:  # on the device, its random numbers seeded
            with window.autocast():
                outputs = t.model(batch.images, batch.sizes, batch.targets)
            losses, metrics = t.detector.criterion(outputs, batch.targets, window.denominators)  # in float32
            weighted = t.loss_weights(losses)
            window.backward(weighted, metrics)

        reduced = window.reduce()  # `reduce_dict`: one collective and one host read for the whole step
        if not t.guard.accepts(window, reduced):  # the NaN guard, on every rank alike: reported and undone
            continue

        window.clip(t.max_norm)
        t.optimizer.step()
        t.detector.multibox.balance_losses(window.totals)
        t.ema.update()
        t.meters.update(reduced)
    return t.end_epoch()


def train(s: "Session") -> dict[str, float]:
    """Train in a session that has started, and return the last evaluation."""
    from toolkit.evaluation.coco import CocoEvaluator

    table, val_table = s.open_data()
    detector = s.make_detector(table)
    t = s.training(detector, table, val_table, CocoEvaluator(val_table, s.config.eval.backend))
    while not t.finished:
        train_one_epoch(t)
    s.end(t)
    return t.validation.last_row


def main(config: Config) -> dict[str, float]:
    """Train as `config` says and return the last evaluation; notebooks call it with their own Config."""
    with importing():  # seconds of imports, so here: a mistyped flag is answered before them
        from toolkit import session

    with session(config) as s:
        return train(s)


if __name__ == "__main__":
    sys.exit(run_script(main, Config, DEFAULT_CONFIG))
