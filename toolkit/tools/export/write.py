"""Writes a detector as ONNX and torch.export files."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn
from torch.export import ExportedProgram

from toolkit.base.errors import BadInput
from toolkit.base.public import without_machine
from toolkit.data.table import Category
from toolkit.detectors.faster_rcnn.model import FasterRCNN
from toolkit.tools.export.check import check_against_pytorch
from toolkit.tools.export.exported_files import MIN_TOP_K, ExportMetadata, open_exported, write_onnx, write_program
from toolkit.tools.export.faster_rcnn import FasterRcnnGraph
from toolkit.tools.export.graph import PixelsToBoxes, copy_for_files, detector_meant, trace, trace_hw


def check_exportable(detector: nn.Module) -> None:
    """Raise BadInput if a detector cannot be exported, because its class does not set `exported_sides`."""
    if not getattr(detector_meant(detector), "exported_sides", ""):
        raise BadInput(
            f"{detector.options['architecture']} cannot be exported (run.export false): only detectors of this toolkit "
            "have a function that exporters can trace, see toolkit/tools/export/graph.py"
        )


def try_export(
    detector: nn.Module, categories: Sequence[Category], size: Mapping[str, int], max_detections: int | None = None
) -> None:
    """Export a detector to a temporary folder and open the files, so that before a training it is known whether what
    the training makes can be exported. The detector is not changed; arguments are those of `export_detector`.

    Raises BadInput: it cannot be exported; the message says why.
    """
    check_exportable(detector)
    how = {"source": "check", "max_detections": max_detections, "say": lambda text: None}
    try:
        with tempfile.TemporaryDirectory() as folder:
            written, _ = export_detector(
                detector, Path(folder), ("torch", "onnx"), categories=categories, size=size, **how
            )
            for path in written.values():
                open_exported(path, trusted=True)
    except (BadInput, OSError, MemoryError):  # they are sentences, or become some
        raise
    except Exception as error:  # exporters raise what they like
        reason = str(error).strip().partition("\n")[0][:200]
        raise BadInput(
            f"{detector.options['architecture']} cannot be exported with these settings ({type(error).__name__}: "
            f"{reason}). Train it without run.export; or with --run.export_check false, which tries again at the end"
        ) from error


def make_graph(detector: nn.Module, top_k: int = 300) -> PixelsToBoxes:
    """Return a detector, or the detector inside a scene graph model, as one function; it is set to evaluation mode."""
    detector = detector_meant(detector)
    kind = FasterRcnnGraph if isinstance(detector, FasterRCNN) else PixelsToBoxes
    return kind(detector, top_k).eval()


def export_detector(
    detector: nn.Module,
    folder: Path,
    formats: Sequence[str],
    *,
    categories: Sequence[Category],
    size: Mapping[str, int] | None,
    source: str,
    score_threshold: float = 0.3,
    top_k: int | None = None,
    max_detections: int | None = None,
    grid_sample: bool = True,
    white: int | None = None,
    say: Callable[[str], None] = print,
) -> tuple[dict[str, Path], nn.Module]:
    """Write `model.onnx` and `model.pt2` of a detector to a folder; the detector is not changed.

    Args:
        formats: the files to write: "onnx" (model.onnx), "torch" (model.pt2).
        categories: classes in the order of the labels.
        size: the size to which the user of a file must resize images, see `toolkit.data.pipeline.processor_size`.
        source: the origin of the detector, for the metadata.
        score_threshold: score from which detections are meant to be used, for the metadata.
        top_k: number of detections (rows) that a file returns for an image; None: 300, or `max_detections` if larger.
        max_detections: number of detections of an image that an evaluation keeps; None: the detector's own.
        white: value of 16-bit images that is to become 255, for the metadata.
        grid_sample: whether the files may contain the operator GridSample, see `trace`.
        say: called with a text at each stage, which may take a minute.

    Returns:
        the files by format, and the function that was exported, a `PixelsToBoxes` on the CPU.

    Raises:
        BadInput: see `check_exportable` and `trace_hw`.
    """
    check_exportable(detector)
    detector = copy_for_files(detector)
    kept = max_detections or detector.max_detections
    top_k = top_k or max(MIN_TOP_K, kept)
    graph = make_graph(detector, top_k)
    architecture = detector.options["architecture"]
    say(f"tracing {architecture} with torch.export")
    size_hw = _checked_hw(graph, size, architecture, say)
    program = trace(graph, size_hw, grid_sample)
    about = ExportMetadata(
        architecture,
        categories,
        size,
        graph.sides,
        graph.detector.stride,
        score_threshold,
        top_k,
        without_machine(source),
        max_detections=kept,
        masks=graph.masks,
        white=white,
    )
    return _write(program, Path(folder), formats, about, say), graph


def _checked_hw(
    graph: PixelsToBoxes, size: Mapping[str, int] | None, architecture: str, say: Callable[[str], None]
) -> tuple[int, int]:
    """Return the (height, width) to trace with. If it is too small for a function of several sizes, change `sides` of
    the function to "fixed", and say so."""
    height, width = trace_hw(graph.sides, graph.detector.stride, size, architecture)
    if graph.sides != "fixed" and min(height, width) < graph.smallest_side:
        graph.sides = "fixed"
        say(f"files of several sizes begin with {graph.smallest_side} pixels: this one takes only {height} x {width}")
    return height, width


def _write(
    program: ExportedProgram,
    folder: Path,
    formats: Sequence[str],
    about: ExportMetadata,
    say: Callable[[str], None],
) -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    if "torch" in formats:  # first: writing ONNX changes the program
        written["torch"] = folder / "model.pt2"
        say(f"writing {written['torch']}")
        write_program(program, written["torch"], about)
    if "onnx" in formats:
        written["onnx"] = folder / "model.onnx"
        say(f"writing {written['onnx']}")
        write_onnx(program, written["onnx"], about)
    return written


def export_final(
    detector: nn.Module,
    folder: Path,
    images: Tensor,
    categories: Sequence[Category],
    size: Mapping[str, int],
    say: Callable[[str], None] = print,
    max_detections: int | None = None,
    white: int | None = None,
) -> str:
    """Write ONNX and torch.export files to `folder`, which holds the final weights, and return a text with the largest
    differences of each file from PyTorch.

    Args:
        images: uint8 (B, 3, H, W), real images on which the files are compared with PyTorch.
        categories, size, say, max_detections, white: see `export_detector`.

    Raises:
        BadInput: see `export_detector`.
        RuntimeError: the outputs of a file differ from PyTorch's by more than rounding.
    """
    written, graph = export_detector(
        detector,
        folder,
        ("torch", "onnx"),
        categories=categories,
        size=size,
        source=str(folder),
        max_detections=max_detections,
        white=white,
        say=say,
    )
    images = images.cpu().contiguous()
    differences = [f"  {path.name}: {check_against_pytorch(graph, path, images)}" for path in written.values()]
    of_graph = ": only the detector; scripts/export.py writes relations" if getattr(detector, "predicates", ()) else ""
    head = f"exported{of_graph}; largest differences from PyTorch on {len(images)} images:"
    return "\n".join([head, *differences])
