"""YOLOv3 outside PyTorch: one ONNX file or torch.export program from pixels to boxes, for any batch and image size."""

import copy
from pathlib import Path

import numpy as np
import onnxruntime
import onnxscript
import torch
from onnxscript import opset18 as op
from torch import Tensor, nn
from torch.nn.functional import pad

from toolkit.models.yolov3.model import YOLOv3, class_scores, not_suppressed
from toolkit.models.yolov3.targets import decode_boxes

FILES = ("model.onnx", "model.pt2")
# Largest differences from PyTorch that rounding explains: of a side in units of the image, of a score.
BOX_TOLERANCE, SCORE_TOLERANCE = 1e-3, 1e-4
EXAMPLE_HW = (96, 128)  # any will do: batch and size are dynamic
MAX_SIDE = 32 * 256


@torch.library.custom_op("toolkit::class_nms_keep", mutates_args=())
def class_nms_keep(boxes: Tensor, scores: Tensor, labels: Tensor, classes: Tensor, nms_iou: float) -> Tensor:
    """`not_suppressed` as one operator: its number of rounds depends on the data, which no exporter can trace."""
    return not_suppressed(boxes, labels, nms_iou)


@class_nms_keep.register_fake
def _(boxes: Tensor, scores: Tensor, labels: Tensor, classes: Tensor, nms_iou: float) -> Tensor:
    return torch.empty_like(labels, dtype=torch.bool)


def _onnx_class_nms_keep(boxes, scores, labels, classes, nms_iou: float):
    """The same through ONNX's NonMaxSuppression, which takes the scores class by class: (B, C, K)."""
    of_class = op.Equal(op.Unsqueeze(labels, [1]), op.Unsqueeze(classes, [0, 2]))  # (B, C, K)
    by_class = op.Where(of_class, op.Unsqueeze(scores, [1]), op.CastLike(op.Constant(value_float=0.0), scores))
    no_limit = op.Constant(value_ints=[2**31 - 1])
    iou, minimum = op.Constant(value_floats=[nms_iou]), op.Constant(value_floats=[0.0])
    selected = op.NonMaxSuppression(boxes, by_class, no_limit, iou, minimum)  # (S, 3): image, class, candidate
    places = op.Gather(selected, op.Constant(value_ints=[0, 2]), axis=1)
    nothing = op.Cast(op.Mul(labels, op.Constant(value_int=0)), to=onnxscript.INT32.dtype)
    ones = op.Expand(
        op.Constant(value=onnxscript.ir.tensor([1], dtype=onnxscript.ir.DataType.INT32)),
        op.Shape(op.Gather(places, op.Constant(value_int=0), axis=1)),
    )
    return op.Cast(op.ScatterND(nothing, places, ones), to=onnxscript.BOOL.dtype)


class PixelsToBoxes(nn.Module):
    """A detector as one function of images, everything inside: normalisation, network, decoding and, if wanted, NMS.

    forward(images uint8 (B, 3, H, W) RGB, sides multiples of 32 from 64 on) returns

    - without NMS: boxes (B, N, 4) xyxy pixels of the images, not clipped; scores (B, N, C);
    - with NMS: boxes (B, K, 4), scores (B, K), labels (B, K) int64, best first; unused rows have score 0 and label -1.
      K = `top_k`; the suppression and its limits are the detector's.
    """

    def __init__(self, detector: YOLOv3, nms: bool, top_k: int = 100):
        super().__init__()
        self.detector, self.nms, self.top_k = detector, nms, top_k
        self.register_buffer("mean", torch.tensor(detector.mean).view(3, 1, 1) * 255)
        self.register_buffer("std", torch.tensor(detector.std).view(3, 1, 1) * 255)
        self.register_buffer("classes", torch.arange(detector.num_classes))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        detector = self.detector
        predictions, grid = detector.flat_predictions(detector.raw_maps((images.float() - self.mean) / self.std))
        boxes, scores = decode_boxes(predictions, grid), class_scores(predictions)
        if not self.nms:
            return boxes, scores
        # Zeros at the end, so that K does not depend on the size of the image. Exporters know no stable top-k: the
        # order of exactly equal scores is the runtime's.
        scores, picked = pad(scores.flatten(1), (0, detector.nms_topk)).topk(detector.nms_topk, dim=1)
        labels = picked % detector.num_classes
        places = (picked // detector.num_classes).clamp(max=boxes.shape[1] - 1)
        boxes = boxes.gather(1, places[..., None].expand(-1, -1, 4))
        keep = class_nms_keep(boxes, scores, labels, self.classes, detector.nms_threshold)
        keep = keep & (scores > detector.score_threshold)
        scores, order = scores.where(keep, 0).topk(min(self.top_k, detector.nms_topk), dim=1)
        labels = labels.gather(1, order).where(scores > 0, -1)
        return boxes.gather(1, order[..., None].expand(-1, -1, 4)), scores, labels


def export_program(detector: YOLOv3, nms: bool = False, top_k: int = 100) -> torch.export.ExportedProgram:
    """`PixelsToBoxes` through torch.export, for any batch, height and width: multiples of 32 from 64 on.

    A program with NMS holds the operator `toolkit::class_nms_keep`: import this module before loading it.
    """
    model = PixelsToBoxes(detector, nms, top_k).eval()
    device = detector.anchors.device
    images = torch.zeros(2, 3, *EXAMPLE_HW, dtype=torch.uint8, device=device)
    batch = torch.export.Dim("batch", min=1, max=4096)
    rows, columns = (torch.export.Dim(name, min=2, max=MAX_SIDE // 32) for name in ("rows", "columns"))
    return torch.export.export(model, (images,), dynamic_shapes=({0: batch, 2: 32 * rows, 3: 32 * columns},))


def export_onnx(detector: YOLOv3, path: Path | str, *, nms: bool = False, top_k: int = 100) -> None:
    """Writes `PixelsToBoxes` as one ONNX file of opset 18, input `images`, outputs `boxes`, `scores` [, `labels`].

    The detector keeps its mode. Batch, height and width are dynamic; ONNX Runtime gives PyTorch's boxes.
    """
    was_training = detector.training
    program = export_program(detector.eval(), nms, top_k)
    detector.train(was_training)
    _write_onnx(program, Path(path), nms)


def _write_onnx(program: torch.export.ExportedProgram, path: Path, nms: bool) -> None:
    torch.onnx.export(
        program,
        f=str(path),
        dynamo=True,
        opset_version=18,
        input_names=["images"],
        output_names=["boxes", "scores", "labels"][: 3 if nms else 2],
        custom_translation_table={torch.ops.toolkit.class_nms_keep.default: _onnx_class_nms_keep},
        external_data=False,
        verbose=False,
    )


def export_final(detector: YOLOv3, folder: Path, images: Tensor) -> str:
    """Writes `model.onnx` and `model.pt2` (torch.export), decoded, no NMS, and holds both to PyTorch on `images`.

    Args:
        images: uint8 (B, 3, H, W), sides multiples of 32; real ones, B >= 1.

    Returns a sentence with the largest differences. Raises RuntimeError when they are more than rounding.
    """
    detector = copy.deepcopy(detector).cpu().float().eval()
    images = images.cpu().contiguous()
    folder = Path(folder)
    program = export_program(detector)
    _write_onnx(program, folder / FILES[0], nms=False)
    torch.export.save(program, folder / FILES[1])
    with torch.no_grad():
        ours = [output.numpy() for output in PixelsToBoxes(detector, nms=False)(images)]
        loaded = [output.numpy() for output in torch.export.load(folder / FILES[1]).module()(images)]
    session = onnxruntime.InferenceSession(folder / FILES[0])
    onnx = session.run(None, {"images": images.numpy()})
    # A box that a wild raw value makes larger than the image is compared in its own size.
    unit = np.maximum(np.abs(ours[0]), max(images.shape[-2:]))
    found = []
    for name, (boxes, scores) in zip(FILES, (onnx, loaded), strict=True):
        apart = float((np.abs(boxes - ours[0]) / unit).max()), float(np.abs(scores - ours[1]).max())
        found.append(f"{name} {apart[0]:.1e} of the image's side, scores {apart[1]:.1e}")
        if not (apart[0] <= BOX_TOLERANCE and apart[1] <= SCORE_TOLERANCE):
            raise RuntimeError(f"{folder / name} does not compute what PyTorch does; largest differences: {found[-1]}")
    return f"exported; largest differences from PyTorch on {len(images)} images: boxes of {'; '.join(found)}"
