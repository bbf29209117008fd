"""Measures the predictions of runs, models and files; `scripts/evaluate.py` parses the flags."""

import argparse
import json
from statistics import mean, stdev

from accelerate import Accelerator

from toolkit.base.distributed import run_on_main
from toolkit.base.errors import BadInput
from toolkit.base.text import metric_text
from toolkit.evaluation.coco import CocoEvaluator, matches_of
from toolkit.evaluation.coco_numbers import any_class_ap
from toolkit.evaluation.predictions import write_predictions
from toolkit.evaluation.voc import voc_metrics
from toolkit.tools.predict.pooled import pool_folds
from toolkit.tools.predict.predict_split import Predicted, SplitOptions, open_any
from toolkit.tools.report.image_files import write_image_files


def evaluate(arguments: argparse.Namespace, expected: dict[str, float]) -> bool:
    """Evaluate the runs of `arguments`, print their metrics, and return whether every expected number was met.

    expected: smallest values by metric, which may be missed by `arguments.tolerance`. Raises BadInput for a metric that
    does not exist.
    """
    accelerator = Accelerator()
    data = (arguments.split, arguments.image_dir, arguments.format, arguments.path)
    options = SplitOptions(*data, arguments.tile, arguments.overlap, arguments.crowds)
    how = {key: getattr(arguments, key) for key in ("settings", "backend", "max_detections")}
    parts = [open_any(run, arguments.weights, options, accelerator, **how) for run in arguments.run]
    predicted = parts[0] if len(parts) == 1 else pool_folds(parts, accelerator.print)
    result = run_on_main(lambda: _measured(predicted, arguments.backend))  # the only process with the predictions
    if len(parts) > 1:
        accelerator.print(run_on_main(lambda: _each_fold(parts)))
    if accelerator.is_main_process:
        print(f"{predicted.about['detector']}, {len(predicted.table)} images\n{result.pop('table')}")
        if predicted.speed:
            recalls = [key for key in ("R@20", "R@50", "R@100") if key in result]
            recall = ", ".join(f"{key} {metric_text(result[key], 4)}" for key in recalls)
            print(predicted.speed + (f"; {recall}" if recall else ""))
        print(json.dumps(result))
        if arguments.save:
            write_predictions(arguments.save, predicted.predictions, predicted.table, scores=result, **predicted.about)
            print(f"wrote {arguments.save}")
        if arguments.pictures:
            print(write_image_files(arguments.pictures, predicted.predictions, predicted.table))
    unknown = expected.keys() - result.keys()
    if unknown:
        raise BadInput(f"--expect.{min(unknown)}: no such metric; there are {', '.join(sorted(result))}")
    missed = {name: value for name, value in expected.items() if not (result[name] or 0) >= value - arguments.tolerance}
    for name, value in missed.items():
        accelerator.print(f"missed: {name} is {result[name]}, expected {value} - {arguments.tolerance}")
    return not missed


def _each_fold(folds: list[Predicted]) -> str:
    scores = [CocoEvaluator(fold.table, "toolkit").evaluate(fold.predictions)["bbox_AP"] or 0.0 for fold in folds]
    each = ", ".join(f"{score:.4f}" for score in scores)
    return f"AP of the folds {each}; mean {mean(scores):.4f}, standard deviation {stdev(scores):.4f}; all as one:"


def _measured(predicted: Predicted, backend: str | None) -> dict:
    """Return all numbers, and a readable `table`."""
    evaluator = predicted.evaluator or CocoEvaluator(predicted.table, backend or "toolkit")
    scores = evaluator.evaluate(predicted.predictions)
    if not predicted.table.num_objects().any():
        return scores | {"table": "no annotated boxes: nothing can be measured; the predictions can be saved (--save)"}
    table = evaluator.describe(scores, predicted.predictions)
    further = {}
    if "bbox_AP" in scores:  # also of each class
        matches = matches_of(evaluator, predicted.predictions, predicted.table)
        further = voc_metrics(matches)
        voc07, voc12 = (metric_text(further[f"voc{year}_mAP"], 4) for year in ("07", "12"))
        table += f"\nVOC07 mAP {voc07}, VOC12 mAP {voc12} (IoU 0.5)"
        if matches.num_classes > 1:
            further["bbox_AP_any_class"] = any_class_ap(matches)
            found = metric_text(further["bbox_AP_any_class"], 4)
            table += f"\nAP {found} if the class of a detection did not matter"
    return {**scores, **predicted.losses, **further, "table": table}
