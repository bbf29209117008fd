"""Predictions on a split, from any source: a run, a checkpoint, an exported model, or a predictions file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from toolkit.boxes import Boxes
from toolkit.data.pipeline import val_transform, validation_loader
from toolkit.data.splits import READING, open_split
from toolkit.data.table import DetectionTable
from toolkit.errors import BadInput
from toolkit.evaluation.predict_dataset import predict_dataset
from toolkit.evaluation.predictions_file import read_about, read_predictions
from toolkit.runs.open_run import Run, chosen_weights, kind_of, open_run, run_folder_of
from toolkit.runs.settings_file import load_config_dict
from toolkit.use.open import load_detector, open_predictor, rebuild_evaluator, rebuild_loss_weights, with_settings
from toolkit.use.prediction import labels_in, predict_table, relabelled


@dataclass
class SplitOptions:
    """Which data, where they are not those that the run or the predictions file was made on; None: those.

    split: annotation file, or name of a split. image_dir, format: as `data.image_dir` and `data.format`. path: folder
    of another data set, as `data.path` or `data.name`, of which `split` is then a split.
    """

    split: str | None = None
    image_dir: str | Sequence[str] | None = None
    format: str | None = None
    path: str | None = None

    def __bool__(self) -> bool:
        """Whether anything is asked for."""
        return any(each is not None for each in (self.split, self.image_dir, self.format, self.path))


@dataclass
class Predicted:
    """Predictions on a table, as evaluators take them, and what is known of them.

    evaluator, losses: of a run or checkpoint; None and {} otherwise. run_folder: None for what belongs to no run.
    about: as a predictions file has it: `detector` in words, `data` to open the table again.
    """

    table: DetectionTable
    predictions: Boxes | dict
    about: dict
    evaluator: object = None
    losses: dict = field(default_factory=dict)
    run_folder: Path | None = None


def data_settings(config: Mapping, options: SplitOptions) -> dict:
    """Arguments of `open_split`, from those of a run and what was asked for instead."""
    data = config["data"]
    if options.path is not None or options.split is not None and _is_place(options.split, data):
        return other_data(options) | {"on_error": data["on_error"]}
    reading = {key: data[key] for key in READING if key in data}
    return {"source": options.split or data["val"], "part_of": data["train"]} | reading | _given(options)


def other_data(options: SplitOptions) -> dict:
    """Arguments of `open_split` for data that belong to no run; of a folder its `val` where no split is named."""
    place = "name" if options.format in ("hub", "visual_genome", "psg") else "path"
    source = options.split or "val"
    return {"source": source, place: options.path, "image_dir": options.image_dir, "format": options.format or "auto"}


def _given(options: SplitOptions) -> dict:
    both = {"image_dir": options.image_dir, "format": options.format}
    return {key: value for key, value in both.items() if value is not None}


def _is_place(split: str, data: Mapping) -> bool:
    """A file or folder of its own, not the name of a split of the run's data."""
    named = data.get("path") is not None or data["name"] is not None or data["format"] == "shapes"
    place = Path(split).expanduser()
    return place.is_file() or not named


def open_data(settings: Mapping, say: Callable[[str], None]) -> DetectionTable:
    return open_split(settings["source"], say=say, **{k: v for k, v in settings.items() if k != "source"})


def predict_run(
    run: Run, weights: str | None, options: SplitOptions, accelerator, backend: str | None = None
) -> Predicted:
    """The run's detector on its validation data or another split, as in training; several processes share the work.

    Classes in another order than the run's, or fewer of them, are found by their names; there is no loss then.

    Raises:
        BadInput: the data has classes that the run does not know; relations, and not the run's classes.
    """
    config, chosen = run.config, chosen_weights(run, weights)
    data, evaluation = config["data"], config["eval"]
    settings = data_settings(config, options)
    table = open_data(settings, accelerator.print)
    labels = labels_in(table, [c.name for c in run.categories], run.folder.name)
    same = labels.tolist() == list(range(len(table.categories)))
    detector = load_detector(run, chosen)
    if not same and getattr(detector, "predicates", None):
        raise BadInput(f"the data has classes {table.class_names}, the run {[c.name for c in run.categories]}")
    loader = validation_loader(
        table,
        val_transform(data["image_size"], data["scales"], data["max_size"]),
        workers=data["workers"],
        batch_size=evaluation["batch_size_per_device"],
        stride=detector.stride,
        pin=accelerator.device.type == "cuda",
    )
    measured = same and bool(table.num_boxes().any())  # a test split without annotations has no loss
    found = predict_dataset(
        detector.to(accelerator.device),
        loader,
        accelerator.device,
        step=run.checkpoint.step,
        loss_weights=rebuild_loss_weights(run, detector).to(accelerator.device) if measured else None,
        score_threshold=evaluation["score_threshold"],
        say=accelerator.print,
    )
    by_image = found.by_image
    predictions = by_image if same else {key: relabelled(each, labels) for key, each in by_image.items()}
    evaluator = rebuild_evaluator(run, detector, table, backend)
    about = {
        "detector": f"{run.folder.name}, step {run.checkpoint.step} ({chosen} weights)",
        "data": settings,
        "mode": getattr(detector, "mode", None),
        "protocol": evaluation.get("protocol", "original"),
    }
    return Predicted(table, predictions, about, evaluator, found.losses, run.folder)


def predict_model(source: str | Path, options: SplitOptions, say: Callable[[str], None]) -> Predicted:
    """An exported model, a `final/` folder or a transformers model on a split; the data of the run that it lies in, if
    it does, where none are given.

    Raises:
        BadInput: no data are known, or the model has other classes.
    """
    folder = _folder_above(Path(source).expanduser())
    settings = _settings_of(folder, {}, options, source)
    table = open_data(settings, say)
    predictor = open_predictor(source)
    about = {"detector": predictor.source, "data": settings}
    return Predicted(table, predict_table(predictor, table), about, run_folder=folder)


def read_file(path: str | Path, options: SplitOptions, say: Callable[[str], None]) -> Predicted:
    """A predictions file, also of another program, with its data: those asked for, those it names, or its run's."""
    about, folder = read_about(path), _folder_above(Path(path).expanduser())
    settings = _settings_of(folder, about, options, path)
    table = open_data(settings, say)
    read = read_predictions(path, table)
    return Predicted(table, read.predictions, {"detector": str(path), "data": settings} | about, run_folder=folder)


def open_any(
    source: str | Path,
    weights: str | None,
    options: SplitOptions,
    accelerator,
    settings: Mapping = MappingProxyType({}),
    backend: str | None = None,
) -> Predicted:
    """By what `source` is; settings of the model and `backend` of the evaluator are of runs. Raises BadInput."""
    kind = kind_of(source)
    if kind == "run":
        return predict_run(with_settings(open_run(source), settings), weights, options, accelerator, backend)
    if settings:
        raise BadInput(f"--model.{next(iter(settings))}: {source} is no run; its settings are fixed")
    if kind == "predictions":
        return read_file(source, options, accelerator.print)
    return predict_model(source, options, accelerator.print)


def _settings_of(folder: Path | None, about: Mapping, options: SplitOptions, source) -> dict:
    if options.split is None and options.path is None and about.get("data"):
        return dict(about["data"]) | _given(options)
    if folder is not None:
        return data_settings(load_config_dict(folder / "config.yaml"), options)
    if options.split is None and options.path is None:
        raise BadInput(f"{source} does not say which data it belongs to; give --split FILE (and --image-dir FOLDER)")
    return other_data(options)


def _folder_above(path: Path) -> Path | None:
    try:
        return run_folder_of(path)
    except BadInput:
        return None
