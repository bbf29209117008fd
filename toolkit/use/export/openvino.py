"""OpenVINO from the ONNX file of a detector, as it is or in int8; the extra `openvino`."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from toolkit.imports import import_extra
from toolkit.use.export.about import KEY, About


def write_openvino(onnx: Path, path: Path, about: About, calibration: Iterable[np.ndarray] | None = None) -> None:
    """Writes `path` (.xml) and its weights (.bin).

    calibration: batches of images uint8 (B, 3, H, W); the network is then in int8, with ranges that these show. What
        comes behind the network (decoding, suppression) stays as it is.

    Raises:
        BadInput: a package is not installed.
    """
    openvino = import_extra("openvino", "openvino", "OpenVINO files")
    model = openvino.convert_model(onnx)
    if calibration is not None:
        model = _quantized(model, calibration)
    model.set_rt_info(about.to_text(), [KEY])
    openvino.save_model(model, path, compress_to_fp16=False)


def _quantized(model, calibration: Iterable[np.ndarray]):
    nncf = import_extra("nncf", "openvino", "int8 files")
    nncf.set_log_level(40)  # errors
    batches = list(calibration)
    # Convolutions and matrix products of transformers, not of boxes: those are known to a fraction of a pixel.
    return nncf.quantize(
        model, nncf.Dataset(batches), subset_size=len(batches), preset=nncf.QuantizationPreset.MIXED,
    )  # fmt: skip
