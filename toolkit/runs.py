"""A finished or unfinished run, taken up again from its folder alone: for evaluation, prediction, export and replay."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from toolkit.checkpoint import Checkpoint, resolve_resume
from toolkit.config import detector_options, load_config_dict
from toolkit.data.table import Category, DetectionTable
from toolkit.errors import BadInput
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.losses import LossWeights
from toolkit.models import build_detector
from toolkit.norms import freeze_prefixes


@dataclass
class Run:
    """A run folder and one of its checkpoints."""

    folder: Path
    config: dict
    checkpoint: Checkpoint
    categories: list[Category]

    @property
    def weights_names(self) -> list[str]:
        """Weights that the checkpoint holds: "model" (raw) and, where the run had one, "ema"."""
        return [name for name in ("model", "ema") if name in self.checkpoint.tensors]


def open_run(path: Path) -> Run:
    """Opens a run folder (its best checkpoint, else its newest valid one) or one of its checkpoints.

    Raises:
        BadInput: neither a run folder nor a checkpoint in one.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise BadInput(f"{path}: there is no such folder. Give a run folder or a checkpoint inside one.")
    folder = run_folder_of(path)
    if path == folder:
        path = folder / "checkpoints" / ("best" if (folder / "checkpoints" / "best").exists() else "")
    checkpoint, _ = resolve_resume(str(path), folder)
    categories = [Category(**category) for category in checkpoint.state["categories"]]
    return Run(folder, load_config_dict(folder / "config.yaml"), checkpoint, categories)


def run_folder_of(path: Path) -> Path:
    """The run folder that `path` is, or lies in.

    Raises:
        BadInput: neither it nor a folder above it holds settings.
    """
    for place in (path, *path.absolute().parents):
        if (place / "config.yaml").is_file():
            return place
    raise BadInput(f"{path}: no run folder: neither it nor a folder above it holds a config.yaml")


def chosen_weights(run: Run, asked: str | None = None) -> str:
    """"model" or "ema": what was asked for, else what the metric for best goes by, as in `final/`.

    Raises:
        BadInput: the checkpoint does not hold what was asked for.
    """
    averaged = run.config["eval"]["metric_for_best"].startswith("ema/")
    chosen = asked or ("ema" if averaged and "ema" in run.weights_names else "model")
    if chosen not in run.weights_names:
        raise BadInput(f"--weights {chosen}: {run.checkpoint.path} holds {', '.join(run.weights_names)}")
    return chosen


def load_detector(run: Run, weights: str) -> nn.Module:
    """The run's detector in evaluation mode, with the weights of that name; see `chosen_weights`."""
    detector = rebuild_detector(run.config, [category.name for category in run.categories])
    detector.load_state_dict(run.checkpoint.tensors[weights])
    return detector.eval()


def rebuild_detector(config: dict, class_names: list[str]) -> nn.Module:
    """The detector that `config.yaml` describes, randomly initialised, frozen as told; nothing is downloaded."""
    options = {**detector_options(config["model"]), "pretrained_backbone": False}
    detector = build_detector(**options, class_names=class_names)
    freeze_prefixes(detector, config["model"].get("freeze_prefixes") or [])
    return detector


def rebuild_evaluator(run: Run, detector: nn.Module, table: DetectionTable, backend: str | None = None):
    """What measures the run's detector on a table, as in training: scene graphs, or boxes. backend: None: the run's."""
    settings = run.config["eval"]
    backend = backend or settings["backend"]
    if hasattr(detector, "make_evaluator"):
        return detector.make_evaluator(table, backend, settings["protocol"], settings["zero_shot"])
    return CocoEvaluator(table, backend)


def rebuild_loss_weights(run: Run, detector: nn.Module) -> LossWeights:
    """The loss weights as the checkpoint holds them."""
    weights = LossWeights(detector.loss_names, run.config["loss"]["weights"], detector.default_weights)
    weights.load_state_dict(run.checkpoint.tensors.get("loss_weights", {}))
    return weights
