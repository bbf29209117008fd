"""An exported SSD, for all tests of files."""

import copy

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from exported_detectors import CATEGORIES, exported_detector, images_of

from toolkit.tools.export.write import export_final


def export_ssd(folder) -> None:
    """Write both files as a run in bfloat16 leaves them in its final folder."""
    AcceleratorState._reset_state(True)
    try:
        trained = copy.deepcopy(exported_detector("ssd, few layers")).train()
        detector = Accelerator(cpu=True, mixed_precision="bf16").prepare(trained)
    finally:
        AcceleratorState._reset_state(True)
    said = export_final(detector, folder, images_of(2, 64, 64), CATEGORIES, {"height": 64, "width": 64})
    assert detector.training
    assert "model.pt2: scores" in said
    assert "model.onnx: scores" in said


@pytest.fixture(scope="session")
def ssd(once):
    """The folder with model.onnx and model.pt2 of "ssd, few layers"."""
    return once("exported_ssd", export_ssd)
