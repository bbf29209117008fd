"""Write a trained detector for programs without PyTorch, from pixels to boxes, and prove that it finds the same.

    python scripts/export.py runs/detr --out exported                               # ONNX and torch.export
    python scripts/export.py runs/detr --out exported --formats onnx openvino int8
    python scripts/export.py runs/detr/final --out exported --split val.json --image-dir images

`exported/model.onnx` (opset 18), `model.pt2` (torch.export), `model.xml` and `model_int8.xml` (OpenVINO, which
`pip install "detection-toolkit[openvino]"` installs) take images uint8 (B, 3, H, W), RGB, and give boxes (B, K, 4)
xyxy in their pixels, scores (B, K) and labels (B, K), best first; rows without a detection have score 0 and label -1.
Normalisation, padding, decoding and suppression are inside; any batch goes in, and any size where the model allows.
Classes, the size that images are resized to, and the threshold are in the metadata. scripts/predict.py takes these
files like a run, a `.pt2` with `--trust`: it can run any code.

Then each file finds the boxes of the run's validation data (or of `--split`), and its AP is compared with PyTorch's.
All detectors can be exported; of a scene graph its detector alone, without relations. Exit code 0: written and as good;
1: a file does not find the same, by more than `--tolerance`, and is renamed to `*.wrong`; 2: bad input.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from toolkit.data.decoding import decode_image
from toolkit.data.splits import open_split
from toolkit.errors import BadInput, says_bad_input
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.models import options_class
from toolkit.runs.open_run import run_folder_of
from toolkit.runs.settings_file import load_config_dict
from toolkit.signals import interrupt_ends_at_once
from toolkit.text import ShortUsage
from toolkit.trust import trust_files
from toolkit.use.export import check_exportable, export_detector
from toolkit.use.export.check import Difference, batches_agree, speed
from toolkit.use.export.files import open_file, runner_of, write_openvino
from toolkit.use.export.graph import trace_hw
from toolkit.use.open import OwnDetector, add_flags, open_own_detector, report_thresholds
from toolkit.use.predict_split import SplitOptions, data_settings
from toolkit.use.prediction import DEFAULT_THRESHOLD, Predictor, predict_table, predict_with, resized

FORMATS = ("onnx", "torch", "openvino", "int8")
SPEED_BATCH = 5


def export(arguments: argparse.Namespace) -> bool:
    """Writes and checks everything, prints a table, and returns whether all files are as good as PyTorch."""
    own, table = opened(arguments), validation_table(arguments)
    thresholds = report_thresholds(Path(arguments.model).expanduser()) or {}
    lines, problems = write_and_check(own, table, thresholds.get("", DEFAULT_THRESHOLD), arguments)
    for file, problem in problems.items():
        print(f"{arguments.out / file}: {problem}; it is now {file}.wrong", file=sys.stderr)
    content = {"source": own.source, "files": [asdict(each) for each in lines]}
    (arguments.out / "export.json").write_text(json.dumps(content, indent=2) + "\n")
    print(as_table(lines))
    if table is None:
        print("no validation data is known: AP was not compared; give them with --split FILE --image-dir FOLDER")
    return not problems


def opened(arguments: argparse.Namespace) -> OwnDetector:
    """The detector to export. Raises BadInput for one that cannot be."""
    path = Path(arguments.model).expanduser()
    own = open_own_detector(path, arguments.weights)
    if own is None and (path.parent / "config.yaml").is_file():  # the folder for transformers inside a run
        own = open_own_detector(path.parent)
    if own is None:
        raise BadInput(f"{arguments.model}: a model of transformers; give the run that it is of, or a checkpoint")
    check_exportable(own.detector)
    size = arguments.size and dict(zip(("height", "width"), arguments.size, strict=True))
    return own._replace(size=size) if size else own


def write_and_check(
    own: OwnDetector, table, score_threshold: float, arguments: argparse.Namespace
) -> tuple[list["Line"], dict[str, str]]:
    """The table of the files beside PyTorch, and what is wrong with those that are renamed, by name."""
    formats, out = arguments.formats, arguments.out
    what = {"categories": own.categories, "size": own.size, "source": own.source}
    how = {"top_k": arguments.top_k, "score_threshold": score_threshold}
    asked = ["torch", "onnx"] if "torch" in formats else ["onnx"]
    written, graph = export_detector(own.detector, out, asked, **what, **how)
    about = open_file(written["onnx"])[1]
    for name, file in (("openvino", "model.xml"), ("int8", "model_int8.xml")):
        if name in formats:
            written[name] = out / file
            shown = calibration(table, own, arguments.calibration) if name == "int8" else None
            write_openvino(written["onnx"], written[name], about, shown)
    if "onnx" not in formats:
        written.pop("onnx").unlink()
    images, run = example_images(table, own, graph), runner_of(graph)
    expected = Predictor("PyTorch", own.categories, predict_with(run, about))
    lines, problems = [Line("PyTorch", ap_of(expected, table), **speed(run, images))], {}
    for name, path in written.items():
        print(f"comparing {path} with PyTorch")
        row, problem = check(name, path, graph, images, lines[0].AP, table, arguments)
        lines.append(row)
        if problem:
            problems[path.name] = problem
            path.rename(path.with_name(path.name + ".wrong"))
    return lines, problems


@dataclass
class Line:
    """A file beside PyTorch. AP: None where no data are known; differences: by the number of images of a batch."""

    file: str
    AP: float | None
    latency_ms: float
    images_per_s: float
    AP_moved: float | None = None
    differences: dict[int, Difference] = field(default_factory=dict)


def check(name: str, path: Path, graph, images: np.ndarray, expected: float | None, table, arguments):
    """A file's row of the table, and what is wrong with it (None: nothing)."""
    run, about = open_file(path, trusted=True)  # written a moment ago
    ap = ap_of(Predictor(path.name, list(about.categories), predict_with(run, about)), table)
    row, problem = Line(path.name, ap, **speed(run, images)), None
    if name != "int8":  # which is another detector, by design
        try:
            row.differences = batches_agree(graph, path, torch.from_numpy(images))
        except (RuntimeError, BadInput) as error:
            problem = str(error)
    if ap is not None:
        row.AP_moved = ap - expected
        lost, allowed = abs(row.AP_moved), arguments.tolerance
        if name == "int8":
            lost, allowed = -row.AP_moved, arguments.int8_tolerance
        if lost > allowed:
            problem = f"its AP is {ap:.4f}, PyTorch's {expected:.4f}: more than {allowed} apart"
    return row, problem


def validation_table(arguments: argparse.Namespace):
    """The data that files are held to; None: none is known."""
    if arguments.split is not None:
        return open_split(arguments.split, say=print, image_dir=arguments.image_dir, format=arguments.format)
    try:
        folder = run_folder_of(Path(arguments.model).expanduser())
    except BadInput:
        return None
    config = load_config_dict(folder / "config.yaml", options_class, needed=("model", "data"))
    return open_split(**data_settings(config, SplitOptions()), say=print)


def ap_of(predictor: Predictor, table) -> float | None:
    """bbox AP on the table, in [0, 1]."""
    if table is None:
        return None
    return float(CocoEvaluator(table).evaluate(predict_table(predictor, table))["bbox_AP"] or 0)


def example_images(table, own: OwnDetector, graph) -> np.ndarray:
    """uint8 (5, 3, H, W): images of the data of one size after resizing, or noise."""
    stride = graph.detector.stride
    if table is None:
        hw = trace_hw(graph.sides, stride, own.size, own.detector.options["architecture"])
        return np.random.default_rng(0).integers(0, 256, (SPEED_BATCH, 3, *hw), dtype=np.uint8)
    shown = resized_images(table, own.size, 64)
    same = [each for each in shown if each.shape == shown[0].shape]
    return np.stack([same[i % len(same)] for i in range(SPEED_BATCH)])


def calibration(table, own: OwnDetector, count: int) -> list[np.ndarray]:
    """Validation images, one at a time."""
    if table is None:
        raise BadInput("--formats int8: it needs images to calibrate on; give --split FILE --image-dir FOLDER")
    return [each[None] for each in resized_images(table, own.size, count)]


def resized_images(table, size: Mapping[str, int] | None, count: int) -> list[np.ndarray]:
    """The first images of a table as a detector takes them, uint8 (3, H, W)."""
    images = (decode_image(table.image_source(table.row(index))) for index in range(min(count, len(table))))
    return [resized(size, image)[0].contiguous().numpy() for image in images]


def as_table(lines: list[Line]) -> str:
    shown = ["| file | AP | moved by | one image, ms | images/s | largest difference |", "|---|---|---|---|---|---|"]
    for each in lines:
        ap = "" if each.AP is None else f"{each.AP:.4f}"
        moved = "" if each.AP_moved is None else f"{each.AP_moved:+.4f}"
        numbers = f"{each.latency_ms:.1f} | {each.images_per_s:.1f}"
        apart = "; ".join(f"batch {size}: {found}" for size, found in each.differences.items())
        shown.append(f"| {each.file} | {ap} | {moved} | {numbers} | {apart} |")
    return "\n".join(shown)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=ShortUsage)
    parser.add_argument("model", help="run folder, checkpoint or final/ folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["onnx", "torch"], help="default: onnx torch")
    add_flags(parser, "--weights", "--trust")
    parser.add_argument("--size", nargs=2, type=int, metavar=("HEIGHT", "WIDTH"), help="resize images to this size")
    parser.add_argument("--top-k", type=int, default=300, help="maximum number of detections per image (default 300)")
    parser.add_argument("--split", help="annotation file to compare AP on, instead of the run's validation data")
    parser.add_argument("--image-dir", action="append", help="folder, archive or URL of its images; may be repeated")
    parser.add_argument("--format", default="coco", help="its format (default coco)")
    parser.add_argument("--tolerance", type=float, default=0.001, help="maximum change of AP (default 0.001)")
    parser.add_argument("--int8-tolerance", type=float, default=0.02, help="maximum drop of AP in int8 (default 0.02)")
    parser.add_argument("--calibration", type=int, default=100, help="calibration images for int8 (default 100)")
    return parser


@says_bad_input
def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    trust_files(arguments.trust)
    with interrupt_ends_at_once():
        return 0 if export(arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
