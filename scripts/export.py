"""Export a trained detector for programs without PyTorch, from pixels to boxes, and verify its predictions.

    python scripts/export.py runs/detr --out exported                               # ONNX and torch.export
    python scripts/export.py runs/detr --out exported --formats onnx openvino int8
    python scripts/export.py runs/detr/final --out exported --split val.json --image-dir images

`exported/model.onnx` (opset 18), `model.pt2` (torch.export), `model.xml` and `model_int8.xml` (OpenVINO, which
`pip install "detection-toolkit[openvino]"` installs) take images uint8 (B, 3, H, W), RGB, and give boxes (B, K, 4)
xyxy in their pixels, scores (B, K) and labels (B, K), best first; rows without a detection have score 0 and label -1.
Normalisation, padding, decoding and suppression are inside; any batch goes in, and any size where the model allows.
Classes, the size that images are resized to, and the threshold are in the metadata. scripts/predict.py takes these
files like a run, a `.pt2` with `--trust`: it can run any code.

Each file is then evaluated on the run's validation data (or `--split`), and its AP is compared with PyTorch's.
All detectors can be exported. Of a scene graph these files have its detector alone; `exported/graph.onnx` has its
relations too, of EGTR, and in sgdet of PE-Net, REACT and REACT++ on a one-stage detector, and its R@K is compared; of
others the console says why not. Exit code 0: written and as good; 1: the AP or R@100 of a file differs by more than
`--tolerance`, and it is renamed to `*.wrong`; 2: bad input.
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
from toolkit.use.export.relations import export_graph
from toolkit.use.open import OwnDetector, add_flags, open_own_detector, report_thresholds
from toolkit.use.predict_split import SplitOptions, data_settings
from toolkit.use.prediction import (
    DEFAULT_THRESHOLD,
    Predictor,
    own_predict,
    predict_images,
    predict_table,
    predict_with,
    resized,
)

FORMATS = ("onnx", "torch", "openvino", "int8")
SPEED_BATCH = 5


def export(arguments: argparse.Namespace) -> bool:
    """Writes and checks everything, prints a table, and returns whether all files are as good as PyTorch."""
    trained, table = opened(arguments), validation_table(arguments)
    thresholds = report_thresholds(Path(arguments.model).expanduser()) or {}
    score_threshold = thresholds.get("", DEFAULT_THRESHOLD)
    lines, problems = write_and_check(trained, table, score_threshold, arguments)
    graphs = write_relations(trained, table, score_threshold, arguments, problems)
    for file, problem in problems.items():
        print(f"{arguments.out / file}: {problem}; it is now {file}.wrong", file=sys.stderr)
    content = {"source": trained.source, "files": [asdict(line) for line in lines], "graphs": graphs}
    (arguments.out / "export.json").write_text(json.dumps(content, indent=2) + "\n")
    print(as_table(lines))
    if graphs:
        print(f"\n{graphs_as_table(graphs)}")
    if table is None:
        print("no validation data is known: AP was not compared; give them with --split FILE --image-dir FOLDER")
    return not problems


def opened(arguments: argparse.Namespace) -> OwnDetector:
    """The detector to export. Raises BadInput for one that cannot be."""
    path = Path(arguments.model).expanduser()
    trained = open_own_detector(path, arguments.weights)
    if trained is None and (path.parent / "config.yaml").is_file():  # the folder for transformers inside a run
        trained = open_own_detector(path.parent)
    if trained is None:
        raise BadInput(f"{arguments.model}: a model of transformers; give the run that it is of, or a checkpoint")
    check_exportable(trained.detector)
    size = arguments.size and dict(zip(("height", "width"), arguments.size, strict=True))
    return trained._replace(size=size) if size else trained


def write_and_check(
    trained: OwnDetector, table, score_threshold: float, arguments: argparse.Namespace
) -> tuple[list["Line"], dict[str, str]]:
    """The table of the files beside PyTorch, and what is wrong with those that are renamed, by name."""
    formats, out = arguments.formats, arguments.out
    what = {"categories": trained.categories, "size": trained.size, "source": trained.source}
    what["max_detections"] = trained.max_detections
    how = {"top_k": arguments.top_k, "score_threshold": score_threshold}
    asked = ["torch", "onnx"] if "torch" in formats else ["onnx"]
    written, graph = export_detector(trained.detector, out, asked, **what, **how)
    about = open_file(written["onnx"])[1]
    for name, file in (("openvino", "model.xml"), ("int8", "model_int8.xml")):
        if name in formats:
            written[name] = out / file
            samples = calibration(table, trained, arguments.calibration) if name == "int8" else None
            write_openvino(written["onnx"], written[name], about, samples)
    if "onnx" not in formats:
        written.pop("onnx").unlink()
    images, run = example_images(table, trained, graph), runner_of(graph)
    kept = {"max_detections": trained.max_detections}
    expected = Predictor("PyTorch", trained.categories, predict_with(run, about), **kept)
    lines, problems = [Line("PyTorch", ap_of(expected, table), **speed(run, images))], {}
    for name, path in written.items():
        print(f"comparing {path} with PyTorch")
        row, problem = check(name, path, graph, images, lines[0].AP, table, arguments)
        lines.append(row)
        if problem:
            problems[path.name] = problem
            path.rename(path.with_name(path.name + ".wrong"))
    return lines, problems


def write_relations(trained: OwnDetector, table, score_threshold: float, arguments, problems: dict) -> list[dict]:
    """`graph.onnx` of a scene graph beside PyTorch: R@K on the data and milliseconds of an image; what is wrong goes to
    `problems`. Says why not where there are relations that cannot be exported."""
    detector = trained.detector
    if not getattr(detector, "predicates", ()):
        return []
    obstacle = "--formats has no onnx" if "onnx" not in arguments.formats else detector.graph_obstacle()
    if obstacle:
        print(f"the relations are not exported, the files have the detector alone: {obstacle}")
        return []
    what = {"categories": trained.categories, "size": trained.size, "source": trained.source}
    path = export_graph(detector, arguments.out, **what, score_threshold=score_threshold)
    run, about = open_file(path)
    graphs = []
    for source, predict in (("PyTorch", own_predict(detector, trained.size)), (path.name, predict_with(run, about))):
        print(f"evaluating the graphs of {source}")
        predictor = Predictor(source, trained.categories, predict, about.predicates)
        recall = recall_of(predictor, detector, table)
        graphs.append({"file": source, **recall, "latency_ms": latency(predictor, table)})
    expected, found = (line.get("R@100") for line in graphs)
    if expected is not None and abs(found - expected) > arguments.tolerance:
        apart = f"more than {arguments.tolerance} apart"
        problems[path.name] = f"its R@100 is {found:.4f}, PyTorch's {expected:.4f}: {apart}"
        path.rename(path.with_name(path.name + ".wrong"))
    return graphs


def recall_of(predictor: Predictor, detector, table) -> dict[str, float | None]:
    if table is None:
        return {}
    if table.class_names != predictor.class_names:
        raise BadInput(f"{table.name} has the classes {table.class_names}, the graphs {predictor.class_names}")
    found = (detector.to_keep(graph) for graph in predict_images(predictor, table))
    row = detector.make_evaluator(table, "toolkit").evaluate(dict(zip(table.image_ids().tolist(), found, strict=True)))
    return {name: row[name] for name in ("R@20", "R@50", "R@100", "mR@100")}


def latency(predictor: Predictor, table) -> float:
    """Milliseconds of one image of the data, or of noise, resizing included: the median of some."""
    noise = torch.randint(0, 256, (3, 480, 640), dtype=torch.uint8)
    image = noise if table is None else decode_image(table.image_source(table.row(0)))
    return speed(lambda images: predictor.predict([*torch.from_numpy(images)], 0.0), image[None].numpy())["latency_ms"]


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
    """The file's row of the table, and what is wrong with it (None: nothing)."""
    run, about = open_file(path, trusted=True)  # written a moment ago
    kept = {"max_detections": about.max_detections}
    ap = ap_of(Predictor(path.name, list(about.categories), predict_with(run, about), **kept), table)
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
    """The data to evaluate files on; None where none is known."""
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


def example_images(table, trained: OwnDetector, graph) -> np.ndarray:
    """uint8 (5, 3, H, W): images of the data of one size after resizing, or noise."""
    stride = graph.detector.stride
    if table is None:
        hw = trace_hw(graph.sides, stride, trained.size, trained.detector.options["architecture"])
        return np.random.default_rng(0).integers(0, 256, (SPEED_BATCH, 3, *hw), dtype=np.uint8)
    images = resized_images(table, trained.size, 64)
    same = [image for image in images if image.shape == images[0].shape]
    return np.stack([same[i % len(same)] for i in range(SPEED_BATCH)])


def calibration(table, trained: OwnDetector, count: int) -> list[np.ndarray]:
    """Validation images, one at a time."""
    if table is None:
        raise BadInput("--formats int8: it needs images to calibrate on; give --split FILE --image-dir FOLDER")
    return [image[None] for image in resized_images(table, trained.size, count)]


def resized_images(table, size: Mapping[str, int] | None, count: int) -> list[np.ndarray]:
    """The first images of a table as a detector takes them, uint8 (3, H, W)."""
    images = (decode_image(table.image_source(table.row(index))) for index in range(min(count, len(table))))
    return [resized(size, image)[0].contiguous().numpy() for image in images]


def as_table(lines: list[Line]) -> str:
    rows = ["| file | AP | moved by | one image, ms | images/s | largest difference |", "|---|---|---|---|---|---|"]
    for line in lines:
        ap = "" if line.AP is None else f"{line.AP:.4f}"
        moved = "" if line.AP_moved is None else f"{line.AP_moved:+.4f}"
        numbers = f"{line.latency_ms:.1f} | {line.images_per_s:.1f}"
        apart = "; ".join(f"batch {size}: {difference}" for size, difference in line.differences.items())
        rows.append(f"| {line.file} | {ap} | {moved} | {numbers} | {apart} |")
    return "\n".join(rows)


def graphs_as_table(graphs: list[dict]) -> str:
    rows = [[*graphs[0]], ["---"] * len(graphs[0])]
    rows += [[f"{value:.4f}" if isinstance(value, float) else str(value) for value in line.values()] for line in graphs]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=ShortUsage)
    parser.add_argument("model", help="run folder, checkpoint or final/ folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["onnx", "torch"], help="default: onnx torch")
    add_flags(parser, "--weights", "--trust")
    parser.add_argument("--size", nargs=2, type=int, metavar=("HEIGHT", "WIDTH"), help="resize images to this size")
    rows = "maximum number of detections per image (default 300, or as many as the run evaluates where that is more)"
    parser.add_argument("--top-k", type=int, help=rows)
    parser.add_argument("--split", help="annotation file to compare AP on, instead of the run's validation data")
    parser.add_argument("--image-dir", action="append", help="folder, archive or URL of its images; may be repeated")
    parser.add_argument("--format", default="coco", help="its format (default coco)")
    parser.add_argument("--tolerance", type=float, default=0.001, help="maximum change of AP, R@100 (default 0.001)")
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
