"""Two operators of exported detectors that exporters cannot trace, because shapes inside them depend on the data.

Each is one custom operator in PyTorch, and a few standard operators in ONNX. A program of torch.export refers to them
by name, so this module must be imported before such a program is loaded.
"""

import torch
from torch import Tensor
from torchvision.ops import roi_align

from toolkit.base.imports import import_extra
from toolkit.models import nms  # noqa: F401 - the operator is registered there

onnxscript = import_extra("onnxscript", "onnx", "exported files")
op = onnxscript.opset18
INT32 = onnxscript.INT32.dtype
BOOL = onnxscript.BOOL.dtype


def _onnx_nms_keep(boxes, scores, nms_iou: float):
    no_limit = op.Constant(value_ints=[2**31 - 1])
    iou = op.Constant(value_floats=[nms_iou])
    minimum = op.Constant(value_floats=[0.0])
    selected = op.NonMaxSuppression(boxes, op.Unsqueeze(scores, [1]), no_limit, iou, minimum)  # (S, 3): group, 0, row
    places = op.Gather(selected, op.Constant(value_ints=[0, 2]), axis=1)
    nothing = op.Cast(op.Mul(scores, op.Constant(value_float=0.0)), to=INT32)
    one = op.Constant(value=onnxscript.ir.tensor([1], dtype=onnxscript.ir.DataType.INT32))
    ones = op.Expand(one, op.Shape(op.Gather(places, op.Constant(value_int=0), axis=1)))
    return op.Cast(op.ScatterND(nothing, places, ones), to=BOOL)


@torch.library.custom_op("toolkit::roi_align_where", mutates_args=())
def roi_align_where(
    maps: Tensor,
    boxes: Tensor,
    image: Tensor,
    use: Tensor,
    scale: float,
    side: int,
    samples: int,
) -> Tensor:
    """Return RoIAlign features (R, C, side, side) of R boxes from maps (B, C, H, W).

    Args:
        boxes: (R, 4) xyxy in pixels.
        image: (R,) int64, the index of each box's image in the batch.
        use: (R,) bool; the features of boxes with False are 0.
        scale: size of the map divided by that of the image.
        side: height and width of the result.
        samples: sampling points per cell and direction, see `sampling_ratio` of torchvision's `roi_align`.
    """
    pooled = maps.new_zeros(len(boxes), maps.shape[1], side, side)
    rois = torch.cat([image[use, None].to(boxes), boxes[use]], dim=1)
    pooled[use] = roi_align(maps, rois, side, scale, samples)
    return pooled


@roi_align_where.register_fake
def _(maps: Tensor, boxes: Tensor, image: Tensor, use: Tensor, scale: float, side: int, samples: int) -> Tensor:
    return maps.new_empty(boxes.shape[0], maps.shape[1], side, side)


def _onnx_roi_align_where(maps, boxes, image, use, scale: float, side: int, samples: int):
    rows = op.Squeeze(op.NonZero(use), [0])
    sides = {
        "output_height": side,
        "output_width": side,
        "sampling_ratio": samples,
        "spatial_scale": scale,
    }
    how = sides | {"coordinate_transformation_mode": "output_half_pixel", "mode": "avg"}
    pooled = op.RoiAlign(
        maps,
        op.Gather(boxes, rows),
        op.Gather(image, rows),
        **how,
    )
    count = op.Shape(boxes, start=0, end=1)
    channels = op.Shape(maps, start=1, end=2)
    shape = op.Concat(
        count,
        channels,
        op.Constant(value_ints=[side, side]),
        axis=0,
    )
    nothing = op.Expand(op.CastLike(op.Constant(value_float=0.0), maps), shape)
    return op.ScatterND(nothing, op.Unsqueeze(rows, [1]), pooled)


TRANSLATIONS = {
    torch.ops.toolkit.nms_keep.default: _onnx_nms_keep,
    torch.ops.toolkit.roi_align_where.default: _onnx_roi_align_where,
}
