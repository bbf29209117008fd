"""Evaluate a run again, from its folder alone, and hold it to expected numbers.

    python scripts/evaluate.py runs/detr
    python scripts/evaluate.py runs/detr/checkpoints/latest --weights model --backend pycocotools
    python scripts/evaluate.py runs/detr --expect.bbox_AP 0.55 --tolerance 0.02        # exit code 1 when missed
    python scripts/evaluate.py runs/mine --split test.json --image-dir images          # other data, same classes

A run folder means its best checkpoint, with the weights that its metric for best goes by. Several processes share the
work: `torchrun --nproc_per_node 2 scripts/evaluate.py runs/detr`.
"""

import argparse
import json
import sys
from pathlib import Path

from accelerate import Accelerator

from toolkit.data.pipeline import val_transform, validation_loader
from toolkit.data.splits import open_split
from toolkit.errors import BadInput
from toolkit.evaluation.predict_dataset import predict_dataset
from toolkit.runs.open_run import chosen_weights, open_run
from toolkit.use.rebuild import load_detector, rebuild_evaluator, rebuild_loss_weights


def expected_numbers(arguments: list[str]) -> dict[str, float]:
    """`--expect.METRIC VALUE` pairs. Raises BadInput for anything else."""
    names, values = arguments[::2], arguments[1::2]
    if len(names) != len(values) or not all(name.startswith("--expect.") for name in names):
        raise BadInput(f"unknown arguments {' '.join(arguments)}; expected --expect.METRIC VALUE, or see --help")
    try:
        return {name.removeprefix("--expect."): float(value) for name, value in zip(names, values, strict=True)}
    except ValueError as error:
        raise BadInput(f"--expect.*: {error}; expected a number, such as --expect.bbox_AP 0.55") from error


def evaluate(arguments: argparse.Namespace, expected: dict[str, float]) -> bool:
    """Prints the table and returns whether every expected number was met."""
    run = open_run(arguments.run)
    config, chosen = run.config, chosen_weights(run, arguments.weights)
    accelerator = Accelerator()
    data, evaluation = config["data"], config["eval"]
    reading = {key: data[key] for key in ("image_dir", "format", "name", "on_error")}
    if arguments.image_dir or arguments.split is not None and data["name"] is None:
        reading["image_dir"] = arguments.image_dir  # another file's images; a split of the same data has the same
    table = open_split(arguments.split or data["val"], say=accelerator.print, **reading)
    if [c.name for c in table.categories] != [c.name for c in run.categories]:
        raise BadInput(f"the data has classes {table.class_names}, the run {[c.name for c in run.categories]}")
    detector = load_detector(run, chosen)
    loader = validation_loader(
        table,
        val_transform(data["image_size"], data["scales"], data["max_size"]),
        batch_size_per_device=evaluation["batch_size_per_device"],
        workers=data["workers"],
        stride=detector.stride,
    )
    found = predict_dataset(
        detector.to(accelerator.device),
        loader,
        accelerator.device,
        loss_weights=rebuild_loss_weights(run, detector).to(accelerator.device),
        step=run.checkpoint.step,
        score_threshold=evaluation["score_threshold"],
    )
    evaluator = rebuild_evaluator(run, detector, table, arguments.backend)
    scores = evaluator.evaluate(found.by_image)
    result = {**scores, **found.losses}
    if accelerator.is_main_process:
        shown = evaluator.describe(scores, found.by_image)
        print(f"{run.checkpoint.path} ({chosen} weights), {len(table)} images\n{shown}")
        print(json.dumps(result))
    unknown = expected.keys() - result.keys()
    if unknown:
        raise BadInput(f"--expect.{min(unknown)}: no such metric; there are {', '.join(sorted(result))}")
    missed = {name: value for name, value in expected.items() if not (result[name] or 0) >= value - arguments.tolerance}
    for name, value in missed.items():
        accelerator.print(f"missed: {name} is {result[name]}, expected {value} - {arguments.tolerance}")
    return not missed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder or checkpoint")
    parser.add_argument("--weights", choices=("model", "ema"), help="raw or averaged weights")
    parser.add_argument("--split", help="annotation file or split instead of the run's validation data")
    parser.add_argument("--image-dir", help="image folder, if not that of the run")
    parser.add_argument("--backend", choices=("faster", "pycocotools"), help="default: that of the run")
    parser.add_argument("--tolerance", type=float, default=0.0, help="how far below --expect.METRIC may be")
    arguments, rest = parser.parse_known_args(argv)
    try:
        return 0 if evaluate(arguments, expected_numbers(rest)) else 1
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
