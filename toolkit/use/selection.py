"""Selects detections by class and by the score thresholds that the report recommends."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from toolkit.errors import BadInput
from toolkit.evaluation.detections import OF_PAIRS
from toolkit.use.prediction import Found, Predictor


def of_classes(predictor: Predictor, names: Sequence[str]) -> Predictor:
    """A predictor that tells of these classes only. Raises BadInput for names that it does not have."""
    known = {category.name: label for label, category in enumerate(predictor.categories)}
    if unknown := [name for name in names if name not in known]:
        raise BadInput(f"--classes {', '.join(unknown)}: the detector knows {', '.join(known)}")
    wanted = torch.tensor([known[name] for name in names])
    return _filtered(predictor, lambda found: torch.isin(found["labels"], wanted))


def from_report(predictor: Predictor) -> Predictor:
    """A predictor whose detections have at least the score that the report recommends for their class.

    Call it with the smallest of `thresholds`. Raises BadInput without a report.
    """
    if predictor.thresholds is None:
        raise BadInput(
            "--score-threshold auto: there is no report that recommends one; make it with scripts/report.py RUN, or "
            "give a number"
        )
    overall = predictor.recommended_threshold
    minimum = torch.tensor([predictor.thresholds.get(name, overall) for name in predictor.class_names])
    return _filtered(predictor, lambda found: found["scores"] >= minimum[found["labels"]])


def smallest_threshold(predictor: Predictor) -> float:
    """A score just below all that `from_report` asks for."""
    return max(0.0, min(predictor.thresholds.values()) - 1e-6)


def _filtered(predictor: Predictor, wanted) -> Predictor:
    def predict(images: Sequence[Tensor], score_threshold: float, *given) -> list[Found]:
        return [_rows(found, wanted(found)) for found in predictor.predict(images, score_threshold, *given)]

    return replace(predictor, predict=predict)


def _rows(found: Found, keep: Tensor) -> Found:
    result = {key: found[key][keep] for key in ("boxes", "scores", "labels", "attribute_scores") if key in found}
    if "pairs" in found:  # relations between objects that are both left
        place = torch.where(keep, keep.cumsum(0) - 1, -1)
        pairs = place[found["pairs"]]
        both = (pairs >= 0).all(1)
        result |= {"pairs": pairs[both]} | {key: found[key][both] for key in OF_PAIRS[1:] if key in found}
    return result
