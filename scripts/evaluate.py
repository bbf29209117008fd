"""Evaluate a run again, from its folder alone, and compare it with expected numbers.

    python scripts/evaluate.py runs/detr
    python scripts/evaluate.py runs/detr/checkpoints/latest --weights model --backend pycocotools
    python scripts/evaluate.py runs/detr --expect.bbox_AP 0.55 --tolerance 0.02        # exit code 1 when missed
    python scripts/evaluate.py runs/mine --split test.json --image-dir images          # other data, classes by name
    python scripts/evaluate.py runs/mine --path VOC2007 --split test --format voc      # of another format
    python scripts/evaluate.py runs/mine --split test-dev.json --save results.json     # COCO results, for a server too
    python scripts/evaluate.py results.json                                            # the metrics of such a file
    python scripts/evaluate.py runs/fold_1 runs/fold_2 runs/fold_3                     # --data.val 1/3, 2/3, 3/3 as one
    python scripts/evaluate.py runs/detr/final/model.onnx                              # of an exported model
    python scripts/evaluate.py runs/mine --tile 640                                    # large pictures, in tiles
    python scripts/evaluate.py runs/causal --head.effect tde                           # a choice at inference; so are
    python scripts/evaluate.py runs/sgg --model.prior_adjustment 0.5                   # --model.nms_threshold and more

For a run folder, its best checkpoint is evaluated, with the weights (raw or averaged) that `eval.metric_for_best`
measures. Several processes can share the work: `torchrun --nproc_per_node 2 scripts/evaluate.py runs/detr`. VOC's mean
AP is printed in addition to COCO's metrics, and COCO's metrics of masks (segm_...) for a detector that predicts masks.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from accelerate import Accelerator

from toolkit.base.distributed import run_on_main
from toolkit.base.errors import BadInput, exit_on_bad_input
from toolkit.base.imports import trust_files
from toolkit.base.text import metric_text, shown
from toolkit.data.annotations import CROWDS
from toolkit.data.tiles import MAX_OVERLAP
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.evaluation.matches import match_predictions
from toolkit.evaluation.predictions import write_predictions
from toolkit.evaluation.voc import voc_metrics
from toolkit.tools.arguments import Program, add_data_flag, finite_number, inference_flags, whole_number
from toolkit.tools.predict.open import add_flags
from toolkit.tools.predict.pooled import pool_folds
from toolkit.tools.predict.predict_split import Predicted, SplitOptions, open_any


def expected_numbers(arguments: Sequence[str]) -> tuple[dict[str, float], list[str]]:
    """Return the `--expect.METRIC VALUE` pairs among arguments, by metric, and the other arguments.

    Raises BadInput for a value that is missing or is not a number.
    """
    expected = {}
    rest = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--expect."):
            rest.append(word)
            continue
        value = value if equals else next(words, None)
        try:
            smallest = float("" if value is None else value)
        except ValueError:
            smallest = math.nan
        if not math.isfinite(smallest):
            given = "nothing" if value is None else shown(value)
            raise BadInput(f"{flag} is {given}; expected a number, such as --expect.bbox_AP 0.55")
        expected[flag.removeprefix("--expect.")] = smallest
    return expected, rest


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
    voc = {}
    if "bbox_AP" in scores:  # also of each class
        voc = voc_metrics(match_predictions(predicted.predictions, predicted.table))
        voc07, voc12 = (metric_text(voc[f"voc{year}_mAP"], 4) for year in ("07", "12"))
        table += f"\nVOC07 mAP {voc07}, VOC12 mAP {voc12} (IoU 0.5)"
    return {**scores, **predicted.losses, **voc, "table": table}


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    parser = Program(__doc__)
    run = "run folder, checkpoint, exported model, or predictions file; several: the folds of a cross-validation"
    parser.add_argument("run", type=Path, nargs="+", help=run)
    add_flags(parser, "--weights", "--split", "--image-dir", "--format", "--path", "--max-detections", "--trust")
    tile = "predict pictures in tiles of this side, and join them (default: as the run was trained; 0: whole pictures)"
    parser.add_argument("--tile", type=whole_number(0), metavar="PIXELS", help=tile)
    overlap = "fraction by which tiles overlap (default: as the run was trained, else 0.2)"
    parser.add_argument("--overlap", type=finite_number(0, MAX_OVERLAP), help=overlap)
    crowds = "what boxes marked as crowd regions are (default: as in the training): ignored, or objects like all others"
    add_data_flag(parser, "--crowds", choices=CROWDS, help=crowds)
    parser.add_argument("--save", metavar="FILE", help="write the predictions as COCO results, FILE.json")
    parser.add_argument("--backend", choices=("toolkit", "pycocotools"), help="default: that of the run")
    missed = "how far a metric may be below --expect.METRIC"
    parser.add_argument("--tolerance", type=finite_number(0), default=0.0, help=missed)
    settings, rest = inference_flags(sys.argv[1:] if argv is None else argv)
    expected, rest = expected_numbers(rest)
    arguments = parser.parse_args(rest)
    arguments.settings = settings
    trust_files(arguments.trust)
    return 0 if evaluate(arguments, expected) else 1


if __name__ == "__main__":
    sys.exit(main())
