"""Makes or reads predictions on a split, from a run, a checkpoint, an exported model, or a predictions file."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import torch
from torch.utils.data import DataLoader

from toolkit.base.boxes import Boxes
from toolkit.base.errors import BadInput
from toolkit.base.text import shown
from toolkit.data.pipeline import processor_size, validation_loader_of_settings
from toolkit.data.splits import READING, Say, open_split
from toolkit.data.table import DetectionTable
from toolkit.data.tiling import Tiling
from toolkit.evaluation.coco import GRAPH_EVAL_SETTINGS, make_evaluator
from toolkit.evaluation.predict_dataset import Predictions, predict_dataset
from toolkit.evaluation.predictions import about_file
from toolkit.models import options_class
from toolkit.models.detector import Detector
from toolkit.run.open_run import Run, chosen_weights, kind_of, open_run, run_folder_of
from toolkit.run.settings import DataConfig
from toolkit.run.settings_file import load_config_dict
from toolkit.step.losses import LossWeights
from toolkit.tools.distillation.losses import DISTILLATION_LOSSES
from toolkit.tools.predict.in_tiles import chosen_tiling, data_settings_of, in_tiles, refuse_joining
from toolkit.tools.predict.open import evaluated_detections, load_detector, open_predictor, with_settings
from toolkit.tools.predict.predict_each import labels_in, predict_table, relabelled
from toolkit.tools.predictions_file import read_about, read_predictions


@dataclass
class SplitOptions:
    """Data to use instead of the data of a run or a predictions file; None keeps the value of the run or file.

    Attributes:
        split: annotation file, or name of a split.
        image_dir, format: see `data.image_dir` and `data.format`.
        path: folder or hub name of another data set, see `data.path` and `data.name`; `split` is then one of its
            splits.
        tile, overlap: see `chosen_tiling`. crowds: see `data.crowds`.
    """

    split: str | None = None
    image_dir: str | Sequence[str] | None = None
    format: str | None = None
    path: str | None = None
    tile: int | None = None
    overlap: float | None = None
    crowds: str | None = None


@dataclass
class Predicted:
    """Predictions on a data table, in the form that evaluators take, and their metadata.

    Attributes:
        about: metadata as in a predictions file: `detector`, its description, and `data`, the arguments of
            `open_split` that open the table again.
        evaluator: the evaluator of the run's detector; None if the source is not a run or checkpoint.
        losses: the losses of the run's detector on the data, by name; empty if they were not computed.
        run_folder: the run folder that the source lies in; None: there is none.
        speed: a sentence with the milliseconds per image; "" if the source is not a run or checkpoint.
    """

    table: DetectionTable
    predictions: Boxes | dict
    about: dict
    evaluator: object = None
    losses: dict = field(default_factory=dict)
    run_folder: Path | None = None
    speed: str = ""


def open_any(
    source: str | Path,
    weights: str | None,
    options: SplitOptions,
    accelerator,
    settings: Mapping = MappingProxyType({}),
    backend: str | None = None,
    max_detections: int | None = None,
) -> Predicted:
    """Predict with a detector, or read predictions from a file, depending on the kind of `source`.

    Args:
        source: see `toolkit.run.open_run.kind_of`.
        weights: "model" or "ema" of a run; None: see `open_predictor`.
        options: the data, if not those of the source.
        accelerator: Accelerate's, for the device and for printing.
        settings: settings of the model by key, for runs only.
        backend: see `eval.backend`, for runs only; None: that of the run.
        max_detections: see `open_predictor`; not for a predictions file.

    Raises:
        BadInput: the source or its data cannot be opened, or an argument is not for this kind of source.
    """
    kind = kind_of(source)
    if kind == "run":
        run = with_settings(open_run(source, options_class), settings)
        return predict_run(run, weights, options, accelerator, backend, max_detections)
    if settings:
        raise BadInput(f"--model.{next(iter(settings))}: {source} is not a run; its settings are fixed")
    if kind == "predictions":
        if max_detections is not None:
            raise BadInput(f"--max-detections {max_detections}: {source} holds predictions as they were kept")
        return open_predictions_file(source, options, accelerator.print)
    return predict_model(source, options, accelerator.device, max_detections, accelerator.print)


def predict_model(
    source: str | Path, options: SplitOptions, device: torch.device, max_detections: int | None, say: Say
) -> Predicted:
    """Predict with any model that is not a run, on the data in `options`, or on those of the run that it lies in.

    For arguments and errors see `open_any`.
    """
    folder, data, table = _data_of(source, {}, options, say)
    predictor = open_predictor(source, device=device, max_detections=max_detections)
    if predictor.white is not None:
        data["white"] = table.white = predictor.white
    if predictor.masks and "masks" not in data:
        data, table = _with_masks(source, data, table, say)
    about = {"detector": predictor.source, "data": data}
    tiling = chosen_tiling(options.tile, options.overlap, data_settings_of(source), predictor.size)
    if tiling is not None:
        predictor = in_tiles(predictor, tiling, as_evaluated=True)
    if predictor.predicates:
        say(f"{source}: only its boxes are measured; evaluate.py RUN and export.py measure relations")
    return Predicted(table, predict_table(predictor, table), about, run_folder=folder)


def predict_run(
    run: Run,
    weights: str | None,
    options: SplitOptions,
    accelerator,
    backend: str | None = None,
    max_detections: int | None = None,
) -> Predicted:
    """Predict with the detector of a run on its validation data or on another split, as in the evaluations of the run:
    with its loader, in float32, on several processes if there are, and with the same numbers to the bit.

    If the data have the classes of the run in another order, or only some of them, classes are matched by name, and no
    losses are computed. For the arguments see `open_any`.

    Raises:
        BadInput: the data have classes that the run does not know; or the run predicts relations, and the classes
            differ.
    """
    config = run.config
    chosen = chosen_weights(run, weights)
    data = split_arguments(config, options)
    table = open_split(**data, say=accelerator.print)
    names = [category.name for category in run.categories]
    labels = labels_in(table, names, run.folder.name)
    has_own_classes = labels.tolist() == list(range(len(table.categories)))
    detector = load_detector(run, chosen)
    if not has_own_classes and getattr(detector, "predicates", None):
        raise BadInput(f"the data has classes {table.class_names}, the run {names}")
    tiling = _tiling_of(run, detector, options)
    kept = max_detections or evaluated_detections(config, detector)
    result = _predictions_of_run(run, detector, table, tiling, accelerator, kept, with_losses=has_own_classes)
    predictions = result.by_image
    if not has_own_classes:
        most = kept if tiling is None else None  # of a picture in tiles all are kept
        predictions = {key: relabelled(prediction, labels, most) for key, prediction in predictions.items()}
    evaluation = config["eval"]
    of_graphs = {key: evaluation[key] for key in GRAPH_EVAL_SETTINGS if key in evaluation}
    evaluator = make_evaluator(detector, table, backend or evaluation["backend"], **of_graphs)
    about = {
        "detector": f"{run.folder.name}, step {run.checkpoint.step} ({chosen} weights)",
        "data": data,
        "mode": getattr(evaluator, "mode", None),
        "protocol": evaluation.get("protocol", "original"),
    }
    batch = f"in batches of {evaluation['batch_size_per_device']} on {accelerator.device.type}"
    one = "an image" if tiling is None else f"a tile ({tiling})"
    speed = f"{result.image_ms:.1f} ms {one}, from pixels to detections, {batch}"
    return Predicted(table, predictions, about, evaluator, result.losses, run.folder, speed)


def _tiling_of(run: Run, detector: Detector, options: SplitOptions) -> Tiling | None:
    """Return how pictures are cut for the detector of a run; None: they are not. Raises BadInput if it finds relations.
    """
    data = run.config["data"]
    size = processor_size(data["image_size"], data["scales"], data["max_size"])
    tiling = chosen_tiling(options.tile, options.overlap, data, size)
    if tiling is not None:
        refuse_joining("--tile", bool(getattr(detector, "predicates", ())))
    return tiling


def _predictions_of_run(
    run: Run,
    detector: Detector,
    table: DetectionTable,
    tiling: Tiling | None,
    accelerator,
    top_k: int,
    with_losses: bool,
) -> Predictions:
    """Return the predictions of a run's detector on a table, as its evaluations make them.

    with_losses: compute the losses too, if the table has boxes; a test split without annotations has none.
    """
    device = accelerator.device
    with_losses = with_losses and bool(table.num_boxes().any())
    return predict_dataset(
        detector.to(device, memory_format=torch.channels_last),  # as in training: the same sums
        _loader(table, run.config, detector.stride, device, tiling, masks=with_losses and detector.predicts_masks),
        device,
        step=run.checkpoint.step,
        loss_weights=_loss_weights(run, detector).to(device) if with_losses else None,
        score_threshold=run.config["eval"]["score_threshold"],
        top_k=top_k,
        say=accelerator.print,
    )


def _loader(
    table: DetectionTable,
    config: Mapping,
    stride: int,
    device: torch.device,
    tiling: Tiling | None = None,
    masks: bool = False,
) -> DataLoader:
    """Return a loader of a table with the image and batch sizes of a run's evaluations; config: the run's settings.

    masks: targets have masks, which losses of masks need.
    """
    settings = SimpleNamespace(**{**asdict(DataConfig()), **config["data"]})  # what an older run lacks has its default
    return validation_loader_of_settings(
        table,
        settings,
        batch_size=config["eval"]["batch_size_per_device"],
        stride=stride,
        pin=device.type == "cuda",
        tiling=tiling,
        masks=masks,
    )


def _loss_weights(run: Run, detector: Detector) -> LossWeights:
    """Return the loss weights of a run, without losses of distillation; learned weights are from the checkpoint."""
    weights = {name: value for name, value in run.config["loss"]["weights"].items() if name not in DISTILLATION_LOSSES}
    loss_weights = LossWeights(detector.loss_names, weights, detector.default_weights)
    loss_weights.load_state_dict(run.checkpoint.tensors.get("loss_weights", {}))
    return loss_weights


def open_predictions_file(path: str | Path, options: SplitOptions, say: Say) -> Predicted:
    """Read a predictions file, of this or another program, and open its data.

    These are the data in `options`, else the data that the file's metadata name, else those of the run that the file
    lies in. For errors see `read_predictions`; also raises BadInput if no data are known.
    """
    about = read_about(path)
    folder, data, table = _data_of(path, about, options, say)
    read = read_predictions(path, table)
    if "masks" not in data and isinstance(read.predictions, Boxes) and "masks" in read.predictions.extra:
        data, table = _with_masks(path, data, table, say)
        read = read_predictions(path, table)
    if read.corrected:
        say(f"{path}: the annotations have changed since these predictions were made; the new ones are used")
    for sentence in read.changed_classes:
        say(f"{path}: {sentence}")
    return Predicted(
        table,
        read.predictions,
        {"detector": str(path), "data": data} | about,
        run_folder=folder,
    )


def _with_masks(path: str | Path, data: dict, table: DetectionTable, say: Say) -> tuple[dict, DetectionTable]:
    """Open the data of predictions, or of a model, with masks again with masks, if nothing has said to read these.

    If the data have none that can be read, a message says so, and the result is what was given.
    """
    try:
        return data | {"masks": True}, open_split(**data, masks=True, say=lambda text: None)
    except BadInput as error:
        say(f"{path}: only its boxes are judged, not its masks: {error}")
        return data, table


# ---- which data ------------------------------------------------------------------------------------------------------


def _data_of(
    source: str | Path,
    about: Mapping,
    options: SplitOptions,
    say: Say,
) -> tuple[Path | None, dict, DetectionTable]:
    """Return the run folder that contains a file or model, if any, the settings of the data to evaluate on, and their
    table: the requested data, those that `about` names, or those of the run.

    Raises:
        BadInput: no data are known, or they cannot be read.
    """
    try:
        folder = run_folder_of(Path(source).expanduser())
    except BadInput:
        folder = None
    is_named = options.split is None and options.path is None and bool(about.get("data"))
    config = {}
    if folder is not None:  # when they are judged, a report reads more of it than the data
        needed = () if is_named else ("model", "data")
        config = load_config_dict(folder / "config.yaml", options_class, needed)
    if is_named:
        data = _named_data(source, about["data"]) | _given(options)
    elif folder is not None:
        data = split_arguments(config, options)
    elif options.split is None and options.path is None:
        raise BadInput(f"{source} does not say which data it belongs to; give --split FILE (and --image-dir FOLDER)")
    else:
        data = _other_data(options)
        made_on = about.get("data") or {}
        data["classes"] = made_on.get("classes", {})
        data["crowds"] = options.crowds or made_on.get("crowds", "ignore")
        data["white"] = made_on.get("white")
        data |= {"masks": True} if made_on.get("masks") else {}
    return folder, data, open_split(**data, say=say)


def _named_data(source: str | Path, data: Mapping) -> dict:
    """Return the arguments of `open_split` that a predictions file names; raise BadInput if some are none of these."""
    known = ("source", "part_of", "masks", "classes_must_exist", *READING)
    unknown = [key for key in data if key not in known]
    if unknown:
        raise BadInput(
            f"{about_file(source)}: `data` has {shown(', '.join(unknown))}, which no data set has; name the data with "
            "--split FILE"
        )
    return dict(data)


def split_arguments(config: Mapping, options: SplitOptions) -> dict:
    """Return the keyword arguments of `open_split` for the validation data of a run, or the data in `options` instead.

    They are read with masks if the run's detector predicts masks; the run's own data also if its boxes are those of
    masks. config: the settings of the run.
    """
    data = config["data"]
    masks = {"masks": True} if config.get("model", {}).get("masks") else {}
    split = options.split
    named = data.get("path") is not None or data["name"] is not None or data["format"] == "shapes"
    other_file = split is not None and (not named or Path(split).expanduser().is_file())  # not one of the run's
    if options.path is not None or other_file:
        as_trained = {"on_error": data["on_error"], "classes": data.get("classes", {}), "white": data.get("white")}
        as_trained["crowds"] = data.get("crowds", "ignore")
        return _other_data(options) | as_trained | masks | _given(options)
    reading = {key: data[key] for key in READING if key in data}
    if data.get("boxes_from_masks"):
        masks = {"masks": True}
    return {"source": split or data["val"], "part_of": data["train"]} | reading | masks | _given(options)


def _other_data(options: SplitOptions) -> dict:
    """Return the arguments of `open_split` for data that belong to no run; `val` of a folder if no split is named."""
    key = "name" if options.format in ("hub", "visual_genome", "psg") else "path"
    source = options.split or "val"
    return {
        "source": source,
        key: options.path,
        "image_dir": options.image_dir,
        "format": options.format or "auto",
    }


def _given(options: SplitOptions) -> dict:
    given = {"image_dir": options.image_dir, "format": options.format, "crowds": options.crowds}
    return {key: value for key, value in given.items() if value is not None}
