"""Train scene graphs: relation heads on a Faster R-CNN or any other detector, or EGTR in one stage.

    accelerate launch scripts/train_sgg.py                                 # bundled data, minutes on a CPU
    accelerate launch scripts/train_sgg.py --config configs/sgg/shapes_sgdet.yaml --model.detector runs/frcnn
    accelerate launch scripts/train_sgg.py --config configs/sgg/shapes_any.yaml --model.detector runs/yolov3
    accelerate launch scripts/train_sgg.py --config configs/sgg/shapes_egtr.yaml --model.detector runs/detr
    accelerate launch scripts/train_sgg.py --config configs/sgg/vg150.yaml --model.detector runs/vg_detector
    ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 scripts/train_sgg.py        # two processes, no GPU

All five scripts share this loop. What comes from Scene-Graph-Benchmark is in options and defaults (frozen
detector, slow heads, gradient table, validation before training, a learning rate that decays on plateaus of
the validation metric and ends training). `--help` shows what to set first, `--help all` every setting.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.base.imports import importing
from toolkit.detectors.scene_graphs.options import SceneGraphOptions, without_detector
from toolkit.run.command_line import run_script
from toolkit.run.settings import (
    DataConfig,
    HubConfig,
    LossConfig,
    OptimConfig,
    RunConfig,
    SceneGraphEvalConfig,
    ScheduleConfig,
)

if TYPE_CHECKING:
    from toolkit.run.session import Session
    from toolkit.run.training import Training

DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "sgg" / "shapes.yaml"


@dataclass
class Config:
    """Train scene graphs."""

    run: RunConfig = field(default_factory=lambda: RunConfig(name="sgg", meters="run_median"))
    data: DataConfig = field(default_factory=DataConfig)
    model: SceneGraphOptions = field(default_factory=SceneGraphOptions)
    optim: OptimConfig = field(  # Scene-Graph-Benchmark's, of its relation heads
        default_factory=lambda: OptimConfig(
            name="sgd", lr=0.01, scale_lr_by_images=True, bias_weight_decay=0.0, max_norm=5.0
        )
    )
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(name="plateau"))
    loss: LossConfig = field(default_factory=LossConfig)
    eval: SceneGraphEvalConfig = field(default_factory=SceneGraphEvalConfig)
    hub: HubConfig = field(default_factory=HubConfig)


def train_one_epoch(t: "Training") -> dict[str, float]:
    """Train to the end of the epoch, or of the run, and return the epoch's averages. See docs/design.md."""
    t.model.train()
    for window in t.windows():  # the micro-batches of one update; what is due after it is saved and evaluated
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
        t.ema.update()
        t.meters.update(reduced)
    return t.end_epoch()


def train(s: "Session") -> dict[str, float]:
    """Train in a session that has started, and return the last evaluation."""
    from toolkit.detectors.scene_graphs.start import lacking_relations, start_scene_graph
    from toolkit.evaluation.coco import GRAPH_EVAL_SETTINGS, make_evaluator

    table, val_table = s.open_data()
    detector = s.make_detector(table, start_scene_graph)
    note = None if s.checkpoint else without_detector(s.config.model, s.config.data.path)
    if note:
        s.say(note)
    for note in lacking_relations(table, val_table):
        s.say(note)
    of_graphs = {key: getattr(s.config.eval, key) for key in GRAPH_EVAL_SETTINGS}
    evaluator = make_evaluator(detector, val_table, s.config.eval.backend, **of_graphs)
    t = s.training(detector, table, val_table, evaluator)
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
