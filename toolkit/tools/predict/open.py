"""Opens trained detectors: `open_predictor` makes a `Predictor` from any kind of source that
`toolkit.run.open_run.kind_of` knows. Detectors of runs are rebuilt from only the run folder.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from toolkit.base.distributed import usable_device
from toolkit.base.errors import BadInput
from toolkit.base.files import near_names, read_json
from toolkit.data.pipeline import processor_size
from toolkit.data.table import Category
from toolkit.models import build_detector, options_class
from toolkit.models.detector import Detector
from toolkit.models.final import (
    load_detector_folder,
    load_detector_weights,
    read_categories,
    read_white,
    with_inference_settings,
)
from toolkit.models.weights.pretrained import cached_when_offline, load_pretrained, open_pretrained
from toolkit.run.open_run import Run, chosen_weights, kind_of, open_run
from toolkit.step.freezing import freeze_prefixes
from toolkit.tools.export.exported_files import MIN_TOP_K, ExportMetadata, Runner, open_exported
from toolkit.tools.predict.predictor import Predictor, own_predict, predict_with, transformers_predict

PUBLISHED_SUFFIXES = (".pth", ".pt", ".safetensors")  # files of weights that another program trained
MAX_LABELS = 1_000_000  # of a model of transformers, whose file may have any label
REPORT_FILE = "report.json"  # in a run's report/: {"threshold": 0.42, "thresholds": {"cup": 0.37, ...}, ...}


class OwnDetector(NamedTuple):
    """A trained detector of this toolkit.

    Attributes:
        source: its origin, for people.
        detector: in evaluation mode, on the CPU.
        categories: classes in the order of the labels.
        size: the size to which images are resized, see `toolkit.data.pipeline.processor_size`.
        max_detections: number of detections of an image that the evaluations of its run keep.
        white: `data.white` of its run.
    """

    source: str
    detector: nn.Module
    categories: list[Category]
    size: dict[str, int] | None
    max_detections: int = Detector.max_detections
    white: int | None = None


def open_predictor(
    source: str | Path,
    weights: str | None = None,
    device: torch.device | str = "cpu",
    settings: Mapping = MappingProxyType({}),
    max_detections: int | None = None,
) -> Predictor:
    """Open a trained detector and return a predictor, which is called with images.

    Args:
        source: a run folder (its best checkpoint is used) or a checkpoint; a folder saved by `save_final`; a `.onnx`,
            `.pt2` or `.xml` file of scripts/export.py, which runs on the CPU; the folder or hub name of a transformers
            model; or a `.pth` file of a scene graph model of Scene-Graph-Benchmark.
        weights: "model" (raw) or "ema" (averaged), for a run or checkpoint only; None: the weights by which the run
            chose its best checkpoint, which are also those in `final/`.
        device: device of the detector, in this machine.
        settings: settings of prediction by key that replace those of the model, see `with_inference_settings`.
        max_detections: maximum number of detections of an image, over all classes; None: as many as the evaluations of
            the run keep, but at least 300 in predictions that are not evaluated.

    Raises:
        BadInput: the source is none of these, or cannot be loaded; or there is no such device.
    """
    device = usable_device(device)
    path = Path(source).expanduser()
    kind = kind_of(source)
    if kind == "exported" and weights is not None:
        raise BadInput(f"--weights {weights}: only a run has several; {source} is an exported file")
    opened = None if kind == "exported" else open_own_detector(source, weights, settings)
    if opened is not None:
        detector = opened.detector.to(device)
        evaluated = max_detections or opened.max_detections
        top_k = max_detections or max(MIN_TOP_K, evaluated)
        return Predictor(
            opened.source,
            opened.categories,
            own_predict(detector, opened.size, top_k),
            predicates=getattr(detector, "predicates", ()),
            attributes=getattr(detector, "attributes", ()),
            given={"sgcls": "boxes", "predcls": "boxes and labels"}.get(getattr(detector, "mode", "")),
            thresholds=report_thresholds(path),
            max_detections=evaluated,
            size=opened.size,
            masks=detector.predicts_masks,
            white=opened.white,
        )
    if settings:
        raise BadInput(f"--model.{next(iter(settings))}: {source} is not a run of this project, its settings are fixed")
    if kind == "transformers":
        return _open_transformers(source, device, max_detections)
    run, about = open_exported(path)
    if max_detections is not None and max_detections > about.top_k:
        raise BadInput(
            f"--max-detections {max_detections}: {source} gives {about.top_k} rows for an image; export it again with "
            f"--top-k {max_detections}"
        )
    return exported_predictor(str(path), run, about, max_detections)


def exported_predictor(source: str, run: Runner, about: ExportMetadata, max_detections: int | None = None) -> Predictor:
    """Return the predictor of an exported detector.

    Args:
        source: its origin, for people.
        run, about: result of `open_exported`.
        max_detections: maximum number of detections of an image; None: all that the file returns, of which an
            evaluation keeps as many as the file says.
    """
    return Predictor(
        source,
        list(about.categories),
        predict_with(run, about, max_detections),
        predicates=about.predicates,
        thresholds={"": about.score_threshold},
        max_detections=max_detections or about.max_detections,
        size=about.size,
        masks=bool(about.masks),
        white=about.white,
    )


def open_own_detector(
    source: str | Path,
    weights: str | None = None,
    settings: Mapping = MappingProxyType({}),
) -> OwnDetector | None:
    """Open a detector of this toolkit and return it; None if `source` is a model of transformers.

    Arguments and errors are those of `open_predictor`.
    """
    path = Path(source).expanduser()
    kind = kind_of(source)
    if kind == "file" and path.suffix in PUBLISHED_SUFFIXES and weights is None:
        return _open_published(path, settings)
    if kind not in ("final", "transformers"):
        run = with_settings(open_run(path, options_class), settings)
        name = chosen_weights(run, weights)
        data = run.config["data"]
        size = processor_size(data["image_size"], data["scales"], data["max_size"])
        detector = load_detector(run, name)
        source = f"{run.checkpoint.path} ({name} weights)"
        return OwnDetector(
            source,
            detector,
            run.categories,
            size,
            evaluated_detections(run.config, detector),
            data.get("white"),
        )
    if weights is not None:
        raise BadInput(f"--weights {weights}: only a run has several; {source} is not a run folder or checkpoint")
    if kind != "final":
        return None
    detector, categories, size = load_detector_folder(path, settings)
    return OwnDetector(str(path), detector, categories, size, detector.max_detections, read_white(path))


def evaluated_detections(config: Mapping, detector: Detector) -> int:
    """Return the number of detections per image that the evaluations of a run keep: `eval.max_detections` in its
    settings `config`, or the detector's default if that is not set."""
    return config.get("eval", {}).get("max_detections") or detector.max_detections


def _open_transformers(source: str | Path, device: torch.device | str, max_detections: int | None) -> Predictor:
    from transformers import AutoImageProcessor, AutoModelForObjectDetection
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # reading the weights takes a moment
    path = Path(source).expanduser()
    name = str(path) if path.exists() else str(source)
    try:
        with cached_when_offline():
            # explicit, since transformers would ask on standard input whether to run code beside the weights
            processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
            model = AutoModelForObjectDetection.from_pretrained(name, trust_remote_code=False).eval().to(device)
    except Exception as error:  # noqa: BLE001 - offline, no detector, or anything of a foreign folder
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise BadInput(
            f"{source}: neither a run folder, a checkpoint, a final/ folder nor a detection model that transformers "
            f"loads ({reason}); give a folder that exists, or the hub name of a model and a connection to fetch it"
            + ("" if path.exists() else near_names(path))
        ) from error
    names = model.config.id2label
    ids = path / "categories.json"
    if not names or not 0 <= max(names) < MAX_LABELS:
        words = f"labels up to {max(names)}" if names else "no labels"
        raise BadInput(f"{source}: its config.json names {words} in id2label; expected some, below {MAX_LABELS}")
    categories = [Category(label, names.get(label, f"label {label}")) for label in range(max(names) + 1)]
    if ids.is_file():  # a final/ folder of ours
        categories = read_categories(ids)
        if len(categories) != len(names):
            raise BadInput(
                f"{ids}: it has {len(categories)} classes, and config.json {len(names)}; put back both files of "
                "the run"
            )
    queries = getattr(model.config, "num_queries", None) or getattr(model.config, "num_detection_tokens", 0)
    evaluated = max_detections or max(Detector.max_detections, queries)
    predict = transformers_predict(model, processor, max_detections or max(MIN_TOP_K, evaluated))
    size = dict(processor.size) if getattr(processor, "do_resize", False) else None
    return Predictor(
        str(source),
        categories,
        predict,
        thresholds=report_thresholds(path),
        max_detections=evaluated,
        size=size,
        white=read_white(path),
    )


def report_thresholds(path: Path) -> dict[str, float] | None:
    """Return the score thresholds that a run's report recommends, by class name, and under "" the one for all classes;
    None if the run has no report.

    path: the run folder, or a path in it.

    Raises:
        BadInput: `report.json` cannot be read.
    """
    for folder in (path, *path.absolute().parents):
        file = folder / "report" / REPORT_FILE
        if file.is_file():
            try:
                entries = read_json(file)
                return {"": float(entries["threshold"])} | {k: float(v) for k, v in entries["thresholds"].items()}
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                raise BadInput(f"{file}: no list of thresholds: {error!r}; make the report again") from error
        if (folder / "config.yaml").is_file():  # the run folder: files above do not belong to it
            break
    return None


def _open_published(path: Path, settings: Mapping) -> OwnDetector:
    """Open a file of published weights as a detector.

    Raises BadInput if the size to which its program resizes images is not known.
    """
    source = open_pretrained(str(path))
    if source.size is None:
        remedy = "give them to a training script as --model.pretrained, with run.max_steps 1"
        raise BadInput(f"{path}: these weights do not say what images are resized to; {remedy}, and open that run")
    options = {"architecture": source.architecture, "pretrained_backbone": False, **source.options}
    asked = dict(settings)
    if "mode" in options:  # a scene graph's file does not have it
        options["mode"] = asked.pop("mode", options["mode"])
    detector = build_detector(
        **with_inference_settings(options, asked),
        class_names=source.class_names,
    )
    load_pretrained(detector, source, source.class_names)
    categories = [Category(number + 1, name) for number, name in enumerate(source.class_names)]
    return OwnDetector(str(path), detector.eval(), categories, source.size)


# ---- a run, rebuilt from its folder ----------------------------------------------------------------------------------


def with_settings(run: Run, asked: Mapping[str, Any]) -> Run:
    """Return a copy of a run in which settings of the model are replaced by `asked`; see `with_inference_settings`."""
    return replace(
        run,
        config={**run.config, "model": with_inference_settings(run.config["model"], asked)},
    )


def load_detector(run: Run, weights: str) -> Detector:
    """Return a run's detector in evaluation mode on the CPU, with the weights "model" or "ema" of its checkpoint."""
    names = [category.name for category in run.categories]
    detector = rebuild_detector({"model": run.config["model"]}, names)
    load_detector_weights(detector, run.checkpoint.tensors[weights], run.checkpoint.path)
    return detector.eval()


def rebuild_detector(config: dict, class_names: list[str]) -> Detector:
    """Build the detector of a run's settings with random weights, and freeze the parts that the settings name.

    Nothing is downloaded. config: result of `load_config_dict`. Raises BadInput if settings are not valid, such as
    `d_model: -8`.
    """
    settings = {**config["model"], "pretrained_backbone": False}
    try:
        detector = build_detector(**settings, class_names=class_names)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, AssertionError) as error:
        raise BadInput(
            f"config.yaml of the run: its group model builds no detector: {error!r}; put back what the run wrote"
        ) from error
    freeze_prefixes(detector, settings.get("freeze_prefixes", ()))
    return detector
