"""A detector from wherever it is kept, and what it finds in images: for scripts/predict.py and notebooks."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn

from toolkit.data.batches import collate
from toolkit.data.pipeline import processor_size
from toolkit.data.table import Category
from toolkit.data.transforms.geometry import resize
from toolkit.errors import BadInput
from toolkit.evaluation.detections import best_first
from toolkit.files import near_names
from toolkit.models.final import load_detector_folder
from toolkit.offline import cached_when_offline
from toolkit.runs.open_run import check_there, chosen_weights, open_run
from toolkit.use.export.files import SUFFIXES, open_file
from toolkit.use.exported import predict_with
from toolkit.use.rebuild import load_detector, with_settings
from toolkit.use.sizes import image_hw, input_hw, of_one_shape

MAX_DETECTIONS = 300  # of one image; the number of queries of the DETR family
DEFAULT_THRESHOLD = 0.3
REPORT = "report.json"  # of a run's report/: {"threshold": 0.42, "thresholds": {"cup": 0.37, ...}, ...}
Found = dict[str, Tensor]


@dataclass
class Predictor:
    """A detector in evaluation mode with all that belongs to it.

    source: where it came from, in words.
    categories: classes in the order of the labels, with the ids that the training data gave them.
    predict: `(images uint8 (3, H, W) RGB of any sizes, score_threshold)` -> one dict per image, on the CPU: `boxes
        (K, 4)` float32 xyxy in pixels of that image, as the detector gives them (transformers clips nothing); `scores
        (K,)` above the threshold, best first; `labels (K,)` int64; of scene graphs also `pairs (P, 2)` of positions in
        `boxes`, `predicates (P,)` and `triplet_scores (P,)`, best first, and `attribute_scores (K, attributes)` if the
        model tells any. What is found in an image does not depend on
        the images beside it: batches are made of images of one size, so none is padded to the size of another.
    predicates, attributes: names, of scene graphs.
    given: None; "boxes" or "boxes and labels" that a scene-graph model describes: `predict` then takes them third, a
        list of `boxes (N, 4)` and `labels (N,)` for each image.
    thresholds: the scores that the run's report recommends, by class name, and for all classes as ""; None: no report.
    """

    source: str
    categories: list[Category]
    predict: Callable[[Sequence[Tensor], float], list[Found]]
    predicates: Sequence[str] = ()
    attributes: Sequence[str] = ()
    given: str | None = None
    thresholds: Mapping[str, float] | None = None

    @property
    def recommended_threshold(self) -> float:
        """The score that the report found best for all classes together; 0.3 where there is no report."""
        return (self.thresholds or {}).get("", DEFAULT_THRESHOLD)

    @property
    def class_names(self) -> list[str]:
        return [category.name for category in self.categories]

    def __call__(self, images, score_threshold: float | None = None):
        """What is found in images of any kind that `as_image` takes: one dict, or a list of them for a list."""
        several = isinstance(images, (list, tuple))
        minimum = self.recommended_threshold if score_threshold is None else score_threshold
        found = self.predict([as_image(each) for each in (images if several else [images])], minimum)
        return found if several else found[0]


def open_predictor(
    source: str | Path,
    weights: str | None = None,
    device: torch.device | str = "cpu",
    settings: Mapping = MappingProxyType({}),
) -> Predictor:
    """The detector of a run, a checkpoint, a `final/` folder, an exported file, or any detector of transformers.

    Args:
        source: run folder (its best checkpoint) or checkpoint; folder saved by `save_final`; `.onnx`, `.pt2` or `.xml`
            of scripts/export.py, which run on the CPU; folder or hub name of a transformers model.
        weights: "model" or "ema", of a run; None: those that the run's metric for best goes by, as in `final/`.
        settings: of the model, in place of its own; see `with_inference_settings`.

    Raises:
        BadInput: nothing of all this is there, or it cannot be loaded.
    """
    check_there(source)
    path = Path(source).expanduser()
    if path.suffix in SUFFIXES:
        if weights is not None:
            raise BadInput(f"--weights {weights}: only a run has several; {source} is an exported file")
        _refuse_settings(source, settings)
        run, about = open_file(path)
        thresholds = {"": about.score_threshold}
        return Predictor(str(path), list(about.categories), predict_with(run, about), thresholds=thresholds)
    own = open_own_detector(source, weights, settings)
    if own is None:
        _refuse_settings(source, settings)
        predictor = _open_transformers(source, device)
    else:
        names = (getattr(own.detector, kind, ()) for kind in ("predicates", "attributes"))
        predict = own_predict(own.detector.to(device), own.size)
        given = {"sgcls": "boxes", "predcls": "boxes and labels"}.get(getattr(own.detector, "mode", ""))
        predictor = Predictor(own.source, own.categories, predict, *names, given)
    return replace(predictor, thresholds=report_thresholds(path))


def _refuse_settings(source: str | Path, settings: Mapping) -> None:
    if settings:
        raise BadInput(f"--model.{next(iter(settings))}: {source} is no run of this project, its settings are fixed")


def report_thresholds(path: Path) -> dict[str, float] | None:
    """What the report of a run recommends, by class name and for all as ""; None: there is no report.

    path: the run folder, or anything in it.

    Raises:
        BadInput: a file that cannot be read.
    """
    for folder in (path, *path.absolute().parents):
        file = folder / "report" / REPORT
        if file.is_file():
            try:
                entries = json.loads(file.read_text())
                return {"": float(entries["threshold"])} | {k: float(v) for k, v in entries["thresholds"].items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise BadInput(f"{file}: no list of thresholds: {error!r}; make the report again") from error
        if (folder / "config.yaml").is_file():  # the run folder: what is above is none of its
            break
    return None


def as_image(image) -> Tensor:
    """uint8 (3, H, W) RGB of a PIL image (turned upright), an array uint8 (H, W, 3) or (H, W), or such a tensor.

    Raises:
        BadInput: anything else.
    """
    if isinstance(image, Image.Image):
        image = np.array(ImageOps.exif_transpose(image).convert("RGB"))
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim in (2, 3):
        image = np.repeat(image[..., None], 3, axis=2) if image.ndim == 2 else image
        if image.shape[2] == 3:
            return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)
    if isinstance(image, Tensor) and image.dtype == torch.uint8 and image.ndim == 3 and image.shape[0] == 3:
        return image
    shape = f" {getattr(image, 'dtype', '')} {tuple(image.shape)}" if hasattr(image, "shape") else ""
    raise BadInput(f"an image is a {type(image).__name__}{shape}; expected a PIL image, an array uint8 (H, W, 3) or "
                   "(H, W), or a tensor uint8 (3, H, W), RGB")  # fmt: skip


class OwnDetector(NamedTuple):
    """detector: in evaluation mode, on the CPU; size: what images are resized to, as in `input_hw`."""

    source: str
    detector: nn.Module
    categories: list[Category]
    size: dict[str, int] | None


def open_own_detector(
    source: str | Path, weights: str | None = None, settings: Mapping = MappingProxyType({})
) -> OwnDetector | None:
    """As `open_predictor`, for detectors built by this project; None: `source` is a model of transformers, if any."""
    path = Path(source).expanduser()
    config = _config_of(path)
    if config is None and path.exists():
        run = with_settings(open_run(path), settings)
        name, data = chosen_weights(run, weights), run.config["data"]
        size = processor_size(data["image_size"], data["scales"], data["max_size"])
        return OwnDetector(f"{run.checkpoint.path} ({name} weights)", load_detector(run, name), run.categories, size)
    if weights is not None:
        raise BadInput(f"--weights {weights}: only a run has several; {source} is no run folder or checkpoint")
    if config is not None and "model_type" not in config:
        return OwnDetector(str(path), *load_detector_folder(path, settings))
    return None


def _config_of(path: Path) -> dict | None:
    """config.json of a folder with a whole model in it; None: there is none."""
    try:
        return json.loads((path / "config.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path / 'config.json'}: cannot be read: {error}") from error


# ---- the two kinds of detectors --------------------------------------------------------------------------------------


def own_predict(detector: nn.Module, size: Mapping[str, int] | None):
    """`Predictor.predict` of a detector of this toolkit; size: what images are resized to, as in `input_hw`."""

    @torch.no_grad()
    def predict(images: Sequence[Tensor], score_threshold: float, given: Sequence[Found] = ()) -> list[Found]:
        device = next(detector.parameters()).device
        targets = [_target(each) for each in given] or [_target({"boxes": torch.zeros(0, 4)})] * len(images)
        resized = [resize(image, target, input_hw(image_hw(image), size))
                   for image, target in zip(images, targets, strict=True)]  # fmt: skip
        found = [{}] * len(images)
        for group in of_one_shape([image for image, _ in resized]):
            batch = collate([resized[i] for i in group], detector.stride).to(device)
            orig_sizes = torch.tensor([image_hw(images[i]) for i in group], device=device)
            outputs = detector(batch.images, batch.sizes, *([batch.targets] if given else []))
            of_group = detector.postprocess(outputs, batch.sizes, orig_sizes, score_threshold, MAX_DETECTIONS)
            for i, each in zip(group, of_group, strict=True):
                found[i] = best_first(each)
        return found

    return predict


def _target(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A target with boxes that are given; without any relations."""
    count = len(given["boxes"])
    nothing = {"area": torch.zeros(count), "iscrowd": torch.zeros(count, dtype=torch.int64)}
    return dict(given) | nothing | {"relations": torch.zeros(0, 3, dtype=torch.int64)}


def _open_transformers(source: str | Path, device: torch.device | str) -> Predictor:
    from transformers import AutoImageProcessor, AutoModelForObjectDetection
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # of reading the weights: a blink
    path = Path(source).expanduser()
    name = str(path) if path.exists() else str(source)
    try:
        with cached_when_offline():
            processor = AutoImageProcessor.from_pretrained(name)
            model = AutoModelForObjectDetection.from_pretrained(name).eval().to(device)
    except (OSError, ValueError) as error:  # not there, offline, or no detector
        reason = str(error).strip().partition("\n")[0]
        raise BadInput(
            f"{source}: neither a run folder, a checkpoint, a final/ folder nor a detection model that transformers "
            f"loads ({reason}); give a folder that exists, or the hub name of a model and a connection to fetch it"
            + ("" if path.exists() else near_names(path))
        ) from error
    names, ids = model.config.id2label, path / "categories.json"
    categories = [Category(label, names.get(label, f"label {label}")) for label in range(max(names) + 1)]
    if ids.is_file():  # a final/ folder of ours
        categories = [Category(entry["id"], entry["name"]) for entry in json.loads(ids.read_text())]

    @torch.no_grad()
    def predict(images: Sequence[Tensor], score_threshold: float) -> list[Found]:
        inputs = [processor(images=[image], return_tensors="pt", input_data_format="channels_first").to(device)
                  for image in images]  # fmt: skip
        found = [{}] * len(images)
        for group in of_one_shape([each["pixel_values"] for each in inputs]):
            joined = {key: torch.cat([inputs[i][key] for i in group]) for key in inputs[group[0]]}
            sizes = torch.tensor([image_hw(images[i]) for i in group], device=device)
            of_group = processor.post_process_object_detection(model(**joined), score_threshold, target_sizes=sizes)
            for i, each in zip(group, of_group, strict=True):
                found[i] = best_first(each)
        return found

    return Predictor(str(source), categories, predict)
