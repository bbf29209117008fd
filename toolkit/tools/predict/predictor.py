"""Predicts on images with any kind of detector: of this toolkit, exported, or of transformers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from toolkit.base.errors import BadInput
from toolkit.base.masks import Rle, bitmap
from toolkit.base.outlines import polygons_of
from toolkit.base.text import shown
from toolkit.data.batches import collate
from toolkit.data.decoding import ImageError, pixels_of
from toolkit.data.segmentations import to_segmentation
from toolkit.data.table import Category
from toolkit.data.transforms.geometry import input_hw, resize
from toolkit.detectors.scene_graphs.formats import relations_as_json, without_graph_constraint
from toolkit.evaluation.predict_dataset import detections_of, run_lengths
from toolkit.evaluation.predictions import Detections, best_first, detections_as_json
from toolkit.tools.export.exported_files import MIN_TOP_K, ExportMetadata, Runner
from toolkit.tools.export.masks import ExportedMasks
from toolkit.tools.predict.choices import DEFAULT_THRESHOLD

NO_BOXES = {"boxes": torch.zeros(0, 4)}


@dataclass
class Predictor:
    """A detector in evaluation mode with its classes and thresholds; call it with images.

    Attributes:
        source: the origin of the detector, for people.
        categories: classes in the order of the labels, with the ids that they have in the training data.
        predict: function `(images uint8 (3, H, W) RGB of any sizes, score_threshold)` -> one dict per image, on the
            CPU: `boxes (K, 4)` float32 xyxy in pixels of that image, clipped only if the detector clips them; `scores
            (K,)` above the threshold, best first; `labels (K,)` int64; `masks`, a list of K run lengths
            (`toolkit.base.masks.Rle`) in the image, if `masks` is true; for scene graphs with P relations also `pairs
            (P, 2)` of rows of `boxes`, `predicates (P,)` and `triplet_scores (P,)`, best first, and `attribute_scores
            (K, attributes)` if the model predicts attributes. Only images of one size are put into a batch, so no
            image is padded to the size of another, and detections do not depend on the other images.
        predicates, attributes: their names, for scene graphs.
        given: "boxes" or "boxes and labels" if a scene graph model describes given boxes: `predict` then takes a third
            argument, `boxes (N, 4)` and `labels (N,)` of each image. None: it finds boxes itself.
        thresholds: the scores that the run's report recommends, by class name, and under "" the one for all classes;
            None: the run has no report.
        max_detections: number of detections of an image, over all classes, that an evaluation keeps; None: all.
        size: the size to which images are resized, see `input_hw`; None: it is not known.
        masks: whether the detector predicts masks.
        white: value of 16-bit images that becomes white, as in training; None: 65535.
    """

    source: str
    categories: list[Category]
    predict: Callable[[Sequence[Tensor], float], list[Detections]]
    predicates: Sequence[str] = ()
    attributes: Sequence[str] = ()
    given: str | None = None
    thresholds: Mapping[str, float] | None = None
    max_detections: int | None = 100
    size: Mapping[str, int] | None = None
    masks: bool = False
    white: int | None = None

    @property
    def recommended_threshold(self) -> float:
        """The score threshold that the run's report recommends for all classes together; 0.3 without a report."""
        return (self.thresholds or {}).get("", DEFAULT_THRESHOLD)

    @property
    def class_names(self) -> list[str]:
        """The names of the classes in the order of the labels."""
        return [category.name for category in self.categories]

    def __call__(self, images, score_threshold: float | None = None):
        """Detect objects in one image or in a list of images; return one dict, or a list of dicts, as `predict` does.

        Masks are pixels here: `masks (K, H, W)` bool, with the height and width of the image.

        Args:
            images: of any kind that `as_image` takes.
            score_threshold: only detections with a higher score are returned; None: `recommended_threshold`.
        """
        several = isinstance(images, (list, tuple))
        minimum = self.recommended_threshold if score_threshold is None else score_threshold
        pictures = [as_image(image, self.white) for image in (images if several else [images])]
        predictions = self.predict(pictures, minimum)
        for detections, picture in zip(predictions, pictures, strict=True):
            if "masks" in detections:
                detections["masks"] = _pixels(detections["masks"], tuple(picture.shape[-2:]))
        return predictions if several else predictions[0]

    def as_json(
        self, detections: Detections, all_scores: bool = False, graph_constraint: bool = True, polygons: bool = False
    ) -> dict:
        """Return the detections of an image in the form of predictions.json: `detections`, and `relations` of a scene
        graph.

        Args:
            all_scores: add the scores of all predicates to each relation.
            graph_constraint: True: one relation for each pair; False: a pair can have several predicates.
            polygons: masks are the outlines of their pixels, not run lengths.
        """
        entry = {"detections": detections_as_json(detections, self.categories, self.attributes)}
        if polygons and "masks" in detections:
            for one, mask in zip(entry["detections"], detections["masks"], strict=True):
                one["segmentation"] = to_segmentation(polygons_of(mask, mask.size_hw))
        if "pairs" in detections:
            graph = detections if graph_constraint else without_graph_constraint(detections)
            entry["relations"] = relations_as_json(graph, self.predicates, all_scores)
        return entry


def _pixels(masks: Sequence[Rle], size_hw: tuple[int, int]) -> Tensor:
    """Return masks as pixels, (K, H, W) bool."""
    pixels = torch.zeros(len(masks), *size_hw, dtype=torch.bool)
    for row, mask in enumerate(masks):
        pixels[row] = torch.from_numpy(bitmap(mask, size_hw)).bool()
    return pixels


def as_image(image, white: int | None = None) -> Tensor:
    """Convert a PIL image, an array uint8 (H, W, 3) or (H, W), or a tensor uint8 (3, H, W) to a tensor uint8 (3, H, W),
    RGB.

    A PIL image is decoded as in training: turned upright, 16 bits scaled to 8, without alpha. white: as of
    `toolkit.data.decoding.pixels_of`, for a PIL image.

    Raises:
        BadInput: `image` is none of these; or it is a PIL image that training would refuse too: truncated, damaged,
            with pixels that are not colours, or with more pixels than the default of `data.max_image_pixels`.
    """
    if isinstance(image, Image.Image):
        try:
            return pixels_of(image, white=white)
        except ImageError as error:
            file = getattr(image, "filename", "")
            name = f", of {shown(file, 300)}" if file else ""
            raise BadInput(f"an image of Pillow, mode {image.mode}{name}: {error.reason}") from error
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim in (2, 3):
        image = np.repeat(image[..., None], 3, axis=2) if image.ndim == 2 else image
        if image.shape[2] == 3:
            return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)
    if isinstance(image, Tensor) and image.dtype == torch.uint8 and image.ndim == 3 and image.shape[0] == 3:
        return image
    shape = f" {getattr(image, 'dtype', '')} {tuple(image.shape)}" if hasattr(image, "shape") else ""
    expected = "a PIL image, an array uint8 (H, W, 3) or (H, W), or a tensor uint8 (3, H, W), RGB"
    raise BadInput(f"an image is a {type(image).__name__}{shape}; expected {expected}")


# ---- filtered detections ---------------------------------------------------------------------------------------------


def of_classes(predictor: Predictor, names: Sequence[str]) -> Predictor:
    """Return a copy of a predictor that keeps only detections of the classes `names`. Raises BadInput for unknown ones.
    """
    label_of = {name: label for label, name in enumerate(predictor.class_names)}
    unknown = [name for name in names if name not in label_of]
    if unknown:
        raise BadInput(f"--classes {', '.join(unknown)}: the detector knows {', '.join(label_of)}")
    wanted = torch.tensor([label_of[name] for name in names])
    return _filtered(predictor, lambda detections: torch.isin(detections["labels"], wanted))


def from_report(predictor: Predictor) -> Predictor:
    """Return a copy of a predictor that keeps only detections with at least the score that the run's report recommends
    for their class.

    Call its `predict` with the score threshold `smallest_threshold(predictor)`. Raises BadInput without a report.
    """
    if predictor.thresholds is None:
        raise BadInput(
            "--score-threshold auto: no report recommends a threshold; make one with scripts/report.py RUN, or give a "
            "number"
        )
    overall = predictor.recommended_threshold
    minimum = torch.tensor([predictor.thresholds.get(name, overall) for name in predictor.class_names])
    return _filtered(
        predictor,
        lambda detections: detections["scores"] >= minimum[detections["labels"]],
    )


def smallest_threshold(predictor: Predictor) -> float:
    """Return a score just below every threshold that `from_report` applies."""
    return max(0.0, min(predictor.thresholds.values()) - 1e-6)


def _filtered(predictor: Predictor, wanted: Callable[[Detections], Tensor]) -> Predictor:
    def predict(images: Sequence[Tensor], score_threshold: float, *given) -> list[Detections]:
        predictions = predictor.predict(images, score_threshold, *given)
        result = []
        for detections in predictions:
            labels = detections["labels"].where(wanted(detections), -1)
            result.append(best_first(detections | {"labels": labels}))
        return result

    return replace(predictor, predict=predict)


# ---- images -> detections --------------------------------------------------------------------------------------------


def _one_size_at_a_time(prepare: Callable, detect: Callable):
    """Return the `Predictor.predict` of a detector.

    Args:
        prepare: function (image, its given boxes) -> (pixels for the detector, its target, a dict with at least
            `orig_size`, the height and width of the image).
        detect: function (results of `prepare` whose pixels have one shape, score_threshold) -> `Detections` of each
            image, in pixels of the image, with masks as run lengths.
    """

    @torch.no_grad()
    def predict(images: Sequence[Tensor], score_threshold: float, given: Sequence[Detections] = ()) -> list[Detections]:
        pairs = zip(images, given or [NO_BOXES] * len(images), strict=True)
        samples = [prepare(image, boxes) for image, boxes in pairs]
        groups: dict[torch.Size, list[int]] = {}
        for i, (pixels, _) in enumerate(samples):
            groups.setdefault(pixels.shape, []).append(i)
        predictions: list[Detections] = [{}] * len(images)
        for group in groups.values():
            of_group = detect([samples[i] for i in group], score_threshold)
            for i, detections in zip(group, of_group, strict=True):
                predictions[i] = best_first(detections)
        return predictions

    return predict


def own_predict(detector: nn.Module, size: Mapping[str, int] | None, top_k: int = MIN_TOP_K):
    """Return the function `Predictor.predict` of a detector of this toolkit.

    Args:
        size: the size to which images are resized, see `input_hw`.
        top_k: maximum number of detections per image.
    """

    def detect(samples: list, score_threshold: float) -> list[Detections]:
        device = next(detector.parameters()).device
        batch = collate(samples, detector.stride).to(device)
        given = [batch.targets] if "labels" in batch.targets[0] else []
        outputs = detector(batch.images, batch.sizes, *given)
        return detections_of(detector, outputs, batch, score_threshold, top_k)

    return _one_size_at_a_time(partial(resized, size), detect)


def predict_with(run: Runner, about: ExportMetadata, top_k: int | None = None):
    """Return the function `Predictor.predict` of an exported detector.

    Args:
        run, about: result of `open_exported`.
        top_k: maximum number of detections per image; None: all that the file returns.
    """

    def detect(samples: list, score_threshold: float) -> Iterator[Detections]:
        batch = np.stack([pixels.contiguous().numpy() for pixels, _ in samples])
        outputs = (torch.from_numpy(np.array(output)) for output in run(batch))
        for boxes, scores, labels, *further, (_, target) in zip(*outputs, samples, strict=True):
            size_hw = tuple(target["orig_size"].tolist())
            height, width = (new / old for new, old in zip(size_hw, batch.shape[-2:], strict=True))
            keep = ((labels >= 0) & (scores > score_threshold)).nonzero()[:top_k, 0]  # they are best first
            boxes = boxes[keep] * torch.tensor([width, height, width, height])
            detections = {"boxes": boxes, "scores": scores[keep], "labels": labels[keep].long()}
            if about.masks:
                detections["masks"] = further[0][keep]
                detections["masks"] = run_lengths(ExportedMasks(about), detections, size_hw)
            elif further:
                detections |= _relations_among(keep, len(scores), *further)
            yield detections

    return _one_size_at_a_time(partial(resized, about.size), detect)


def _relations_among(
    keep: Tensor,
    count: int,
    pairs: Tensor,
    predicate_scores: Tensor,
    triplet_scores: Tensor,
) -> Detections:
    """Return the relations of an exported scene graph between two objects in `keep`, rows of its `count` objects."""
    place = torch.full((count,), -1)
    place[keep] = torch.arange(len(keep))
    rows = (place[pairs] >= 0).all(1) & (triplet_scores > 0)
    columns = {"pairs": place[pairs[rows]], "predicate_scores": predicate_scores[rows]}
    return columns | {"predicates": predicate_scores[rows].argmax(1), "triplet_scores": triplet_scores[rows]}


def transformers_predict(model: nn.Module, processor, top_k: int = MIN_TOP_K):
    """Return the function `Predictor.predict` of a detector of transformers.

    Args:
        processor: its image processor, which prepares images one by one.
        top_k: maximum number of detections per image.
    """
    device = next(model.parameters()).device

    def prepare(image: Tensor, _) -> tuple[Tensor, Mapping]:
        inputs = processor(images=[image], return_tensors="pt", input_data_format="channels_first").to(device)
        return inputs["pixel_values"], {"inputs": inputs, "orig_size": torch.tensor(image.shape[-2:])}

    def detect(samples: list, score_threshold: float) -> list[Detections]:
        inputs = [target["inputs"] for _, target in samples]
        batch = {key: torch.cat([of_image[key] for of_image in inputs]) for key in inputs[0]}
        orig_sizes = torch.stack([target["orig_size"] for _, target in samples]).to(device)
        result = []
        for detections in processor.post_process_object_detection(model(**batch), score_threshold, orig_sizes):
            order = detections["scores"].argsort(descending=True, stable=True)[:top_k]
            result.append({key: column[order] for key, column in detections.items()})
        return result

    return _one_size_at_a_time(prepare, detect)


def resized(size: Mapping[str, int] | None, image: Tensor, boxes: Detections = NO_BOXES) -> tuple[Tensor, Detections]:
    """Resize an image and its given boxes for a detector; return the image and a target with the boxes and with the
    size of the image before.

    size: see `input_hw`.
    """
    size_hw = tuple(image.shape[-2:])
    count = len(boxes["boxes"])
    nothing = {
        "area": torch.zeros(count),
        "iscrowd": torch.zeros(count, dtype=torch.int64),
        "relations": torch.zeros(0, 3, dtype=torch.int64),
    }
    target = boxes | nothing | {"orig_size": torch.tensor(size_hw)}
    return resize(image, target, input_hw(size_hw, size))
