"""The files that an export can write, and the request for some of them; it imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

EXPORTED_FILES = {
    "onnx": "model.onnx",
    "torch": "model.pt2",
    "fp16": "model_fp16.onnx",
    "openvino": "model.xml",
    "int8": "model_int8.xml",
}


@dataclass
class ExportRequest:
    """The files to write, and how to judge them.

    Attributes:
        formats: keys of `EXPORTED_FILES`.
        top_k, score_threshold, grid_sample: see `toolkit.tools.export.write.export_detector`.
        calibration: number of images by which int8 is calibrated.
        tolerance: largest accepted change of AP, or of R@100 of a scene graph, by the export.
        int8_tolerance: largest accepted drop of AP in int8.
        benchmark: measure the time of all `BENCHMARK_CASES` of the module judge; False: only of one image with the
            threads of this process.
    """

    formats: Sequence[str] = ("onnx", "torch")
    top_k: int | None = None
    score_threshold: float = 0.3
    grid_sample: bool = True
    calibration: int = 100
    tolerance: float = 0.001
    int8_tolerance: float = 0.02
    benchmark: bool = False
