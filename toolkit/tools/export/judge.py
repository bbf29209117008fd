"""Exports a trained detector, and compares each file with PyTorch: detections, AP on data, R@K of scene graphs, and
milliseconds per image."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn

from toolkit.base.errors import BadInput
from toolkit.data.table import DetectionTable
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.tools.export.check import OutputDifference, batches_agree, milliseconds
from toolkit.tools.export.exported_files import ExportMetadata, open_exported, runner_of, write_openvino
from toolkit.tools.export.graph import trace_hw
from toolkit.tools.export.half import write_half
from toolkit.tools.export.relations import export_graph
from toolkit.tools.export.request import EXPORTED_FILES, ExportRequest
from toolkit.tools.export.write import export_detector
from toolkit.tools.predict.open import OwnDetector, exported_predictor
from toolkit.tools.predict.predict_each import predict_images, predict_table
from toolkit.tools.predict.predictor import Predictor, own_predict, predict_with, resized

LOSSY = ("fp16", "int8")  # these change the outputs by design, so that only their AP counts
BENCHMARK_CASES = ((1, 1), (8, 1), (1, 2), (8, 2))  # batch, threads
EXAMPLES = 5  # images that a file is compared on
CANDIDATES = 64  # first images of the data, from which those of one size are taken


@dataclass
class ExportResult:
    """The measurements of an exported file, or of PyTorch.

    Attributes:
        file: name of the file, or "PyTorch".
        AP: see `ap_of`.
        milliseconds: per image, by the description of batch size and threads.
        AP_moved: AP of the file minus AP of PyTorch; None without data.
        differences: difference of the detections from PyTorch's, by batch size.
    """

    file: str
    AP: float | None
    milliseconds: dict[str, float]
    AP_moved: float | None = None
    differences: dict[int, OutputDifference] = field(default_factory=dict)


def write_and_check(
    trained: OwnDetector,
    table: DetectionTable | None,
    out: Path,
    request: ExportRequest,
    say: Callable[[str], None] = print,
) -> tuple[list[ExportResult], dict[str, str]]:
    """Write the requested files to the folder `out`, and compare each with PyTorch.

    A file that differs too much is renamed to `<file>.wrong`.

    Args:
        trained: the trained detector.
        table: data to measure AP on; None: AP is not measured.
        say: called with a text at each stage.

    Returns:
        the measurements of PyTorch and of each file, and {name of the file: problem} of the renamed files.

    Raises:
        BadInput: see `export_detector`; or int8 is requested without data, or a package is not installed.
    """
    written, graph, about = _write(trained, table, out, request)
    images = example_images(table, trained, graph)
    cases = BENCHMARK_CASES if request.benchmark else ((1, torch.get_num_threads()),)
    run = runner_of(graph)
    expected = exported_predictor("PyTorch", run, about)
    lines = [ExportResult("PyTorch", ap_of(expected, table), milliseconds(lambda: run, images, cases))]
    problems = {}
    for name, path in written.items():
        say(f"comparing {path} with PyTorch")
        run, about = open_exported(path, trusted=True)  # written a moment ago
        ap = ap_of(exported_predictor(path.name, run, about), table)
        times = milliseconds(lambda path=path: open_exported(path, trusted=True)[0], images, cases)
        line = ExportResult(path.name, ap, times)
        problem = _problem(name, path, graph, images, lines[0].AP, line, request)
        if problem:
            problems[path.name] = problem
            path.rename(path.with_name(path.name + ".wrong"))
        lines.append(line)
    return lines, problems


def _write(
    trained: OwnDetector,
    table: DetectionTable | None,
    out: Path,
    request: ExportRequest,
) -> tuple[dict[str, Path], nn.Module, ExportMetadata]:
    """Write the files; return their paths by format, the exported function in PyTorch, and their metadata."""
    # The others are made from the ONNX file, so it is written in any case.
    of_program = [name for name in ("torch", "onnx") if name in request.formats or name == "onnx"]
    written, graph = export_detector(
        trained.detector,
        out,
        of_program,
        categories=trained.categories,
        size=trained.size,
        source=trained.source,
        top_k=request.top_k,
        score_threshold=request.score_threshold,
        grid_sample=request.grid_sample,
        max_detections=trained.max_detections,
        white=trained.white,
    )
    onnx_file = written["onnx"]
    _, about = open_exported(onnx_file)
    for name, file_name in EXPORTED_FILES.items():
        if name not in request.formats or name in of_program:
            continue
        path = out / file_name
        if name == "fp16":
            write_half(onnx_file, path)
        elif name == "int8":
            write_openvino(onnx_file, path, about, calibration_images(table, trained.size, request.calibration))
        else:
            write_openvino(onnx_file, path, about, None)
        written[name] = path
    if "onnx" not in request.formats:
        del written["onnx"]
        onnx_file.unlink()
    return written, graph, about


def _problem(
    name: str, path: Path, graph, images, expected: float | None, line: ExportResult, request: ExportRequest
) -> str | None:
    """Return the problem of a file, or None, and complete its line of the table."""
    problem = None
    if name not in LOSSY:
        try:
            line.differences = batches_agree(graph, path, torch.from_numpy(images))
        except (RuntimeError, BadInput) as error:
            problem = str(error)
    if line.AP is not None:
        line.AP_moved = line.AP - expected
        lost = abs(line.AP_moved)
        allowed = request.tolerance
        if name == "int8":
            lost = -line.AP_moved
            allowed = request.int8_tolerance
        if lost > allowed:
            problem = f"its AP is {line.AP:.4f}, PyTorch's {expected:.4f}: more than {allowed} apart"
    return problem


def write_relations(
    trained: OwnDetector,
    table: DetectionTable | None,
    out: Path,
    request: ExportRequest,
    problems: dict[str, str],
    say: Callable[[str], None] = print,
) -> list[dict]:
    """Write `graph.onnx` of a scene graph to the folder `out`, and compare it with PyTorch.

    If the file differs too much, the reason is added to `problems`, and the file is renamed to `graph.onnx.wrong`. If
    the relations cannot be exported, the reason is printed by `say`.

    Returns:
        a dict with file, R@K on the data and milliseconds per image for PyTorch and for the file; an empty list if
        nothing was written.
    """
    detector = trained.detector
    if not getattr(detector, "predicates", ()):
        return []
    obstacle = "--formats has no onnx" if "onnx" not in request.formats else detector.graph_obstacle()
    if obstacle:
        say(f"the relations are not exported, only the detector is: {obstacle}")
        return []
    path = export_graph(
        detector,
        out,
        categories=trained.categories,
        size=trained.size,
        source=trained.source,
        score_threshold=request.score_threshold,
        grid_sample=request.grid_sample,
        white=trained.white,
    )
    run, about = open_exported(path)
    predict_of = {"PyTorch": own_predict(detector, trained.size), path.name: predict_with(run, about)}
    graphs = []
    for source, predict in predict_of.items():
        say(f"evaluating the graphs of {source}")
        predictor = Predictor(source, trained.categories, predict, about.predicates)
        recall = recall_of(predictor, detector, table)
        graphs.append({"file": source, **recall, "ms": latency(predictor, table)})
    expected = graphs[0].get("R@100")  # None without data
    found = graphs[1].get("R@100")
    if expected is not None and abs(found - expected) > request.tolerance:
        problems[path.name] = f"its R@100 is {found:.4f}, PyTorch's {expected:.4f}: more than {request.tolerance} apart"
        path.rename(path.with_name(path.name + ".wrong"))
    return graphs


def recall_of(predictor: Predictor, detector, table: DetectionTable | None) -> dict[str, float | None]:
    """Return R@20, R@50, R@100 and mR@100 of a scene graph predictor on a data table by name, each in [0, 1]; {}
    without a table.

    detector: the predictor's detector, which makes the evaluator.

    Raises BadInput if table and predictor have different classes.
    """
    if table is None:
        return {}
    if table.class_names != predictor.class_names:
        raise BadInput(f"{table.name} has the classes {table.class_names}, the graphs {predictor.class_names}")
    graphs = [detector.to_keep(graph) for graph in predict_images(predictor, table)]
    by_image = dict(zip(table.image_ids().tolist(), graphs, strict=True))
    row = detector.make_evaluator(table, "toolkit").evaluate(by_image)
    return {name: row[name] for name in ("R@20", "R@50", "R@100", "mR@100")}


def latency(predictor: Predictor, table: DetectionTable | None) -> float:
    """Return the milliseconds for one image, resizing included: the first image of the table; noise without a table."""
    noise = torch.randint(0, 256, (3, 480, 640), dtype=torch.uint8)
    image = noise if table is None else table.decode_image(table.row(0))

    def run(images: np.ndarray):
        return predictor.predict([*torch.from_numpy(images)], 0.0)

    case = (1, torch.get_num_threads())
    (time,) = milliseconds(lambda: run, image[None].numpy(), (case,)).values()
    return time


def ap_of(predictor: Predictor, table: DetectionTable | None) -> float | None:
    """Return the bbox AP of a predictor on a data table, in [0, 1], or its segm AP if both have masks; None without a
    table, 0 if it is undefined."""
    if table is None:
        return None
    row = CocoEvaluator(table).evaluate(predict_table(predictor, table))
    return float(row.get("segm_AP", row["bbox_AP"]) or 0)


def example_images(table: DetectionTable | None, trained: OwnDetector, graph) -> np.ndarray:
    """Return images uint8 (5, 3, H, W) of the data that have the same size after resizing; noise without data."""
    stride = graph.detector.stride
    if table is None:
        hw = trace_hw(graph.sides, stride, trained.size, trained.detector.options["architecture"])
        rng = np.random.default_rng(0)
        return rng.integers(0, 256, (EXAMPLES, 3, *hw), dtype=np.uint8)
    images = resized_images(table, trained.size, CANDIDATES)
    same = [image for image in images if image.shape == images[0].shape]
    return np.stack([same[i % len(same)] for i in range(EXAMPLES)])


def calibration_images(table: DetectionTable | None, size: Mapping[str, int] | None, count: int) -> list[np.ndarray]:
    """Return the first `count` resized images of a table as batches of one image. Raises BadInput without a table."""
    if table is None:
        raise BadInput("--formats int8: it needs images to calibrate on; give --split FILE --image-dir FOLDER")
    return [image[None] for image in resized_images(table, size, count)]


def resized_images(table: DetectionTable, size: Mapping[str, int] | None, count: int) -> list[np.ndarray]:
    """Return the first `count` images of a table, resized for a detector, uint8 (3, H, W) each; `size` as in
    `toolkit.data.transforms.geometry.input_hw`."""
    images = (table.decode_image(table.row(index)) for index in range(min(count, len(table))))
    return [resized(size, image)[0].contiguous().numpy() for image in images]


def results_as_table(lines: Sequence[ExportResult]) -> str:
    """Return the measurements of `write_and_check` as a Markdown table."""
    cases = [*lines[0].milliseconds]
    head = ["file", "AP", "moved by", *(f"ms an image, {case}" for case in cases), "largest difference"]
    rows = [head, ["---"] * len(head)]
    for line in lines:
        ap = "" if line.AP is None else f"{line.AP:.4f}"
        moved = "" if line.AP_moved is None else f"{line.AP_moved:+.4f}"
        times = [f"{line.milliseconds[case]:.1f}" for case in cases]
        apart = "; ".join(f"batch {size}: {difference}" for size, difference in line.differences.items())
        rows.append([line.file, ap, moved, *times, apart])
    return _markdown(rows)


def graphs_as_table(graphs: Sequence[dict]) -> str:
    """Return the measurements of `write_relations`, at least one, as a Markdown table."""
    head = list(graphs[0])
    rows = [head, ["---"] * len(head)]
    for graph in graphs:
        rows.append([_cell(name, value) for name, value in graph.items()])
    return _markdown(rows)


def _cell(name: str, value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1f}" if name == "ms" else f"{value:.4f}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
