"""The detector, evaluator and loss weights of a run, rebuilt from its folder alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.data.table import DetectionTable
from toolkit.evaluation.choose import make_evaluator
from toolkit.models import build_detector
from toolkit.models.detector import Detector
from toolkit.models.inference_settings import with_inference_settings
from toolkit.models.old_names import renamed
from toolkit.runs.open_run import Run
from toolkit.step.freezing import freeze_prefixes
from toolkit.step.losses import LossWeights


def with_settings(run: Run, asked: Mapping[str, Any]) -> Run:
    """The run with other settings of its model; see `with_inference_settings`."""
    return replace(run, config={**run.config, "model": with_inference_settings(run.config["model"], asked)})


def load_detector(run: Run, weights: str) -> Detector:
    """The run's detector in evaluation mode, with the weights of that name; see `chosen_weights`."""
    detector = rebuild_detector(run.config, [category.name for category in run.categories])
    detector.load_state_dict(run.checkpoint.tensors[weights])
    return detector.eval()


def rebuild_detector(config: dict, class_names: list[str]) -> Detector:
    """The detector that `config.yaml` describes, randomly initialised, frozen as told; nothing is downloaded.

    config: of `load_config_dict`, of a run folder of any version.
    """
    settings = {**renamed(config["model"]["architecture"], config["model"]), "pretrained_backbone": False}
    detector = build_detector(**settings, class_names=class_names)
    freeze_prefixes(detector, settings.get("freeze_prefixes", ()))
    return detector


def rebuild_evaluator(run: Run, detector: Detector, table: DetectionTable, backend: str | None = None):
    """What measures the run's detector on a table, as in training. backend: None: the run's."""
    settings = run.config["eval"]
    of_graphs = settings.get("protocol", "original"), settings.get("zero_shot")
    return make_evaluator(detector, table, backend or settings["backend"], *of_graphs)


def rebuild_loss_weights(run: Run, detector: Detector) -> LossWeights:
    """The loss weights as the checkpoint holds them."""
    weights = LossWeights(detector.loss_names, run.config["loss"]["weights"], detector.default_weights)
    weights.load_state_dict(run.checkpoint.tensors.get("loss_weights", {}))
    return weights
