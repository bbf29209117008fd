"""The detector, evaluator and loss weights of a run, rebuilt from its folder alone."""

from torch import nn

from toolkit.data.table import DetectionTable
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.models import build_detector
from toolkit.runs.command_line import detector_options
from toolkit.runs.open_run import Run
from toolkit.step.freezing import freeze_prefixes
from toolkit.step.losses import LossWeights


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
