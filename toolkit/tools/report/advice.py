"""Suggests what to try next to improve a detector; each suggestion has its evidence and the flag to change.

Each rule is a function that checks one thing and returns None without evidence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from toolkit.data.pipeline import processor_size, tiling_of_run
from toolkit.tools.report.explain import explain_zero_ap
from toolkit.tools.report.facts import RunFacts
from toolkit.tools.report.figures import series
from toolkit.tools.report.judgement import Judgement
from toolkit.tools.report.thresholds import threshold_text

BARELY_BEGUN = 0.1  # share of the planned epochs before which a detector's mistakes say nothing about data or settings
LEARNED_AP50 = 0.5  # from which they do, however few epochs were made
STILL_RISING = 0.01  # AP gained in the last quarter of the training
ENOUGH_EVALUATIONS = 4  # to decide that AP no longer rises
SMALL_SHARE = 0.1  # share of the boxes
MIN_COST_AP50 = 0.02  # AP50 that a kind of mistake must cost to be named
MIN_AP50 = 0.02  # AP50 below which other numbers say nothing more
FEW_PIXELS = 16  # median side of small objects at the network's input
MORE_BOXES = ("anchors", "anchor_sizes", "detections_per_image", "nms_topk")  # settings for more boxes of an image


@dataclass(frozen=True)
class Advice:
    """A suggestion of what to try next.

    Attributes:
        topic: two or three words.
        evidence: sentences with the numbers on which the suggestion is based.
        advice: what to do, with the flag.
        command: the command that does it; "": there is none.
    """

    topic: str
    evidence: str
    advice: str
    command: str = ""


def advise(judged: Judgement, run: RunFacts | None = None) -> list[Advice]:
    """Return all suggestions for which there is evidence.

    Args:
        judged: the statistics of the detector.
        run: metrics and settings of its run; None: without a run.
    """
    run = run or RunFacts()
    data = run.config.get("data", {})
    model = run.config.get("model", {})
    metric = "R@20" if judged.boxes_given else "bbox_AP"
    ap50 = judged.numbers["AP50"] or 0
    barely_begun = _barely_begun(run, metric)
    has_learned = _has_levelled_off(run, metric) or (ap50 >= LEARNED_AP50 and not judged.boxes_given)
    if ap50 < MIN_AP50:
        suggestions = [barely_begun or _too_short(run, metric), _hardly_anything(judged)]
    elif barely_begun is not None and not has_learned:
        suggestions = [barely_begun]
    elif judged.boxes_given:
        suggestions = [_too_short(run, metric), _over_fitting(run.rows, metric)]
    else:
        suggestions = [_too_short(run, metric), _over_fitting(run.rows, metric), _small_objects(judged, data)]
        suggestions += [
            _duplicates(judged, model),
            _confused_classes(judged),
            _imbalance(judged, data),
        ]
        suggestions += [
            _too_few_slots(judged, model),
            _places(judged),
            _scores(judged),
        ]
    return [advice for advice in suggestions if advice is not None]


def _hardly_anything(judged) -> Advice | None:
    if judged.numbers["AP50"] is None:
        return None
    causes = explain_zero_ap(judged.predictions, judged.table)
    return Advice(
        "Hardly anything is found",
        f"AP50 is {judged.numbers['AP50']:.4f}. {'; '.join(causes)}.",
        "Fix this before anything else; for a detector that has just begun to train, it is normal.",
    )


def _evaluations(rows: Sequence[Mapping], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values of a metric with the averaged weights, or with the raw ones if there are no averaged
    ones."""
    averaged = series(rows, f"val/ema/{metric}")
    return averaged if len(averaged[0]) else series(rows, f"val/{metric}")


def _barely_begun(run: RunFacts, metric: str) -> Advice | None:
    planned = run.config.get("run", {}).get("epochs")
    if not planned or run.epochs_made is None:
        return None
    if run.epochs_made >= BARELY_BEGUN * planned:
        return None
    begun = max(1, ceil(run.epochs_made))
    return _train_longer(
        f"The run ended in epoch {begun} of {planned}: its mistakes are those of a detector that has just begun, and "
        f"say nothing yet about data or settings. {_rise(run, metric)}",
        run,
    )


def _too_short(run: RunFacts, metric: str) -> Advice | None:
    rise = _rise(run, metric)
    return _train_longer(rise, run) if rise else None


def _train_longer(evidence: str, run: RunFacts) -> Advice:
    return Advice(
        "Trained too short",
        evidence.rstrip() + (run.ended and f" The {run.ended}."),
        "Train longer; for as long again with:" if run.go_on else "Train longer.",
        run.go_on,
    )


def _rise(run: RunFacts, metric: str) -> str:
    """Return a sentence about a metric in the last quarter of the training if it still rose there, else ""."""
    steps, ap = _evaluations(run.rows, metric)
    if len(ap) < 2 or ap.argmax() < len(ap) - 1:
        return ""
    before = _best_before_the_last_quarter(steps, ap)
    if ap[-1] - ap[before] < STILL_RISING:
        return ""
    return (
        f"{_name(metric)} was still rising: {ap[before]:.3f} at step {steps[before]:.0f}, {ap[-1]:.3f} at "
        f"step {steps[-1]:.0f}, the best of {len(ap)} evaluations."
    )


def _name(metric: str) -> str:
    return metric.removeprefix("bbox_")


def _has_levelled_off(run: RunFacts, metric: str) -> bool:
    """Return whether a metric is known to have stopped rising, so that a longer training would not have helped."""
    if "eval.early_stopping_patience" in run.ended_by:
        return True
    steps, ap = _evaluations(run.rows, metric)
    if len(ap) < ENOUGH_EVALUATIONS:
        return False
    return ap.max() - ap[_best_before_the_last_quarter(steps, ap)] < STILL_RISING


def _best_before_the_last_quarter(steps: np.ndarray, ap: np.ndarray) -> int:
    last_quarter_from = steps[0] + 0.75 * (steps[-1] - steps[0])
    early = np.flatnonzero(steps <= last_quarter_from)
    return int(early[ap[early].argmax()])


def _over_fitting(rows, metric: str) -> Advice | None:
    _, trained = series(rows, "train/loss")
    _, loss = _evaluations(rows, "loss")
    steps, ap = _evaluations(rows, metric)
    if len(loss) < 4 or len(trained) < 8 or len(ap) < 4:
        return None
    best = int(loss.argmin())
    quarter = max(2, len(trained) // 4)
    last_quarter = np.median(trained[-quarter:])
    quarter_before = np.median(trained[-2 * quarter : -quarter])
    falls = last_quarter < 0.95 * quarter_before
    worse_ap = ap.max() - ap[-1] > 0.005
    is_late = best > 0.7 * len(loss)
    is_flat = loss[-1] < 1.1 * loss[best]
    if is_late or is_flat or not falls or not worse_ap:
        return None
    return Advice(
        "Over-fitting",
        f"The validation loss rose from {loss[best]:.3g} to {loss[-1]:.3g} while the training "
        f"loss still fell, and {_name(metric)} went from {ap.max():.3f} (step {steps[ap.argmax()]:.0f}) to "
        f"{ap[-1]:.3f}.",
        "Augment more (--data.random_crop, --data.photometric, --data.mosaic), raise --optim.weight_decay, or "
        "stop earlier (--eval.early_stopping_patience).",
    )


def _small_objects(judged, data) -> Advice | None:
    m = judged.matches
    numbers = judged.numbers
    rows = np.flatnonzero(~m.crowd)
    small = rows[m.truth.area[rows] < 32**2]
    larger_ap = numbers["APl"] or numbers["APm"]
    if numbers["APs"] is None or larger_ap is None or len(small) < SMALL_SHARE * len(rows):
        return None
    larger = max(numbers["APm"] or 0, numbers["APl"] or 0)
    if numbers["APs"] > 0.6 * larger or larger < 0.05:
        return None
    seen = ""
    flag = "Give larger images to the network: --data.image_size, or --data.scales."
    if data.get("image_size"):
        shown_hw = _shown_sizes(m.sizes_hw[m.truth.image_index[small]], data)
        scale = _resize_factors(shown_hw, data)
        side = float(np.median(np.sqrt(m.truth.area[small]) * scale))
        flag = f"Give larger images to the network: --data.image_size (now {data['image_size']}), or --data.scales; "
        flag += "or smaller parts of large pictures: --data.tile"
        flag += "." if data.get("tile") is None else f" (now {data['tile']})."
        seen = f" At the size the network sees, half of them are smaller than {side:.0f} pixels."
        if side > 2 * FEW_PIXELS:
            return None
    return Advice(
        "Small objects",
        f"{len(small) / len(rows):.0%} of the boxes are small and have AP {numbers['APs']:.3f}, "
        f"larger ones up to {larger:.3f}.{seen}",
        flag,
    )


def _shown_sizes(sizes_hw: np.ndarray, data: Mapping) -> np.ndarray:
    """Return the sizes of what is resized for the network: tiles of the pictures (N, 2), or all of them."""
    size = processor_size(data["image_size"], data.get("scales"), data.get("max_size", 1333))
    tiling = tiling_of_run(data, size)
    return sizes_hw if tiling is None else np.minimum(sizes_hw, tiling.tile_hw)


def _resize_factors(sizes_hw: np.ndarray, data: Mapping) -> np.ndarray:
    if data.get("scales"):
        shorter = sizes_hw.min(axis=1)
        return np.minimum(
            data["scales"][-1] / shorter,
            data.get("max_size", 1333) / sizes_hw.max(axis=1),
        )
    area = np.prod(np.broadcast_to(data["image_size"], 2))  # of the model's input
    return np.sqrt(area / sizes_hw.prod(axis=1))


def _duplicates(judged, model) -> Advice | None:
    cost = judged.errors.cost["duplicate"]
    if cost < MIN_COST_AP50:
        return None
    count = len(judged.errors.of("duplicate"))
    if "nms_threshold" in model:
        ending = f"Suppress more: lower --model.nms_threshold (now {model['nms_threshold']})."
    elif model:
        ending = "This detector has no suppression of its own: it learns late to suppress duplicates, so train longer."
    else:
        ending = "Lower the IoU threshold of the detector's suppression (NMS)."
    return Advice(
        "Duplicates",
        f"{count} predictions find an object again; without them AP50 would be {cost:.3f} higher "
        f"than {judged.errors.ap50:.3f}.",
        ending,
    )


def _confused_classes(judged) -> Advice | None:
    matrix = judged.matrix[:-1, :-1].copy()
    names = judged.matches.class_names
    np.fill_diagonal(matrix, 0)
    if judged.errors.cost["class"] < MIN_COST_AP50 or not matrix.any():
        return None
    a, b = np.unravel_index(matrix.argmax(), matrix.shape)
    boxes = judged.matches.num_truth[a]
    return Advice(
        "Confused classes",
        f"Wrong classes cost {judged.errors.cost['class']:.3f} AP50; most often "
        f"{names[a]} is taken for {names[b]}: {matrix[a, b]} of {boxes} boxes.",
        "Look at these pairs below: where the annotation itself is not clear, fix it or join the classes; "
        "else add images of both.",
    )


def _imbalance(judged, data) -> Advice | None:
    counts = judged.matches.num_truth
    ap = judged.class_ap
    measured = np.flatnonzero(np.isfinite(ap) & (counts > 0))
    if len(measured) < 2:
        return None
    rare = measured[counts[measured] < 0.1 * counts[measured].max()]
    others = np.setdiff1d(measured, rare)
    if not len(rare) or not len(others) or ap[rare].mean() > 0.75 * ap[others].mean():
        return None
    worst = rare[np.argsort(ap[rare])][:3]
    listed = ", ".join(f"{judged.matches.class_names[k]} ({counts[k]} boxes, AP {ap[k]:.3f})" for k in worst)
    flag = " (--data.repeat_factor)" if "repeat_factor" in data else ""
    return Advice(
        "Imbalance",
        f"{len(rare)} of {len(measured)} classes have less than a tenth of the boxes of the most "
        f"frequent one and AP {ap[rare].mean():.3f} on average, the others {ap[others].mean():.3f}: {listed}.",
        f"Collect more images of them, or show their images more often{flag}.",
    )


def _too_few_slots(judged, model) -> Advice | None:
    m = judged.matches
    boxes = np.bincount(m.truth.image_index[~m.crowd], minlength=m.num_images)
    queries = model.get("num_queries")
    crowded = [s for s in judged.strata if s.topic == "boxes in the image" and s.boxes >= 20]
    if queries and boxes.max(initial=0) > 0.8 * queries:
        return Advice(
            "Too few queries",
            f"An image has {boxes.max()} boxes, the detector {queries} queries.",
            f"Raise --model.num_queries above {2 * boxes.max()}.",
        )
    if len(crowded) < 2 or queries:
        return None
    least = crowded[0]
    most = crowded[-1]
    if most.recall_at_any_score > least.recall_at_any_score - 0.2:
        return None
    flags = ", ".join(f"--model.{key}" for key in MORE_BOXES if key in model)
    flags = f" ({flags})" if flags else ""
    return Advice(
        "Crowded images",
        f"At any score {least.recall_at_any_score:.0%} of the boxes are found in images with "
        f"{least.name}, {most.recall_at_any_score:.0%} with {most.name}.",
        f"Let the detector give more boxes of an image, and fit its anchors to the data{flags}.",
    )


def _places(judged) -> Advice | None:
    cost = judged.errors.cost["localisation"]
    numbers = judged.numbers
    if cost < MIN_COST_AP50 or cost < max(v for k, v in judged.errors.cost.items() if " " not in k):
        return None
    return Advice(
        "Places of boxes",
        f"Boxes that overlap their object by less than half cost {cost:.3f} AP50, more than "
        f"any other kind of mistake; AP50 is {numbers['AP50']:.3f}, AP75 {numbers['AP75']:.3f}.",
        "Give larger images to the network (--data.image_size), or weigh the losses of boxes more (--loss.weights).",
    )


def _scores(judged) -> Advice | None:
    best = judged.overall.best
    if best is None or 0.2 <= best.threshold <= 0.8:
        return None
    threshold = threshold_text(best.threshold)
    return Advice(
        "Threshold",
        f"F1 is highest ({best.f1:.3f}) at a score of {threshold}; predictions are often cut at 0.3 or 0.5.",
        f"Use the threshold of this report: --score-threshold {threshold} in predict.py.",
    )
