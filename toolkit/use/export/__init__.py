"""Detectors outside PyTorch; one file a detector or format."""

from pathlib import Path

from torch import Tensor, nn

from toolkit.errors import BadInput

EXPORTABLE = ("yolov3",)


def check_exportable(detector: nn.Module) -> None:
    """Raises BadInput for a detector that cannot be exported."""
    if detector.options["architecture"] not in EXPORTABLE:
        raise BadInput(f"{detector.options['architecture']} cannot be exported yet (run.export false); those that can "
                       f"are: {', '.join(EXPORTABLE)}")  # fmt: skip


def export_final(detector: nn.Module, folder: Path, images: Tensor) -> str:
    """Writes ONNX and torch.export beside the final weights, and says how far they are from PyTorch.

    images: uint8 (B, 3, H, W), real ones that both are held to. Raises BadInput as `check_exportable`.
    """
    check_exportable(detector)
    from toolkit.use.export.yolov3 import export_final as export_yolov3  # onnx takes seconds to import

    return export_yolov3(detector, folder, images)
