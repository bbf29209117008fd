"""A finished or unfinished run, taken up again from its folder alone: for evaluation, prediction, export and replay."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from toolkit.checkpoint import Checkpoint, resolve_resume
from toolkit.config import load_config_dict
from toolkit.data.table import Category
from toolkit.errors import BadInput
from toolkit.losses import LossWeights
from toolkit.models import build_detector


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
    folder = next((place for place in (path, *path.absolute().parents) if (place / "config.yaml").is_file()), None)
    if folder is None:
        raise BadInput(f"{path}: no run folder: neither it nor a folder above it holds a config.yaml")
    if path == folder:
        path = folder / "checkpoints" / ("best" if (folder / "checkpoints" / "best").exists() else "")
    checkpoint, _ = resolve_resume(str(path), folder)
    categories = [Category(**category) for category in checkpoint.state["categories"]]
    return Run(folder, load_config_dict(folder / "config.yaml"), checkpoint, categories)


def rebuild_detector(config: dict, class_names: list[str]) -> nn.Module:
    """The detector that `config.yaml` describes, randomly initialised; nothing is downloaded."""
    options = {key: value for key, value in config["model"].items() if value is not None}
    return build_detector(**{**options, "pretrained_backbone": False}, class_names=class_names)


def rebuild_loss_weights(run: Run, detector: nn.Module) -> LossWeights:
    """The loss weights as the checkpoint holds them."""
    weights = LossWeights(detector.loss_names, run.config["loss"]["weights"], detector.default_weights)
    weights.load_state_dict(run.checkpoint.tensors.get("loss_weights", {}))
    return weights
