"""A detector as one function from pixels to boxes, which exporters can trace."""

import contextlib
import copy
import os
import sys
from collections.abc import Iterator, Mapping
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from toolkit.base.errors import BadInput
from toolkit.models.detector import Detector
from toolkit.tools.export.grid_sampling import grid_sample_by_gather

MAX_BATCH = 4096
MAX_SIDE = 16384


class PixelsToBoxes(nn.Module):
    """A detector in evaluation mode as one function, with everything before and after its network.

    forward(images uint8 (B, 3, H, W) RGB) -> boxes (B, K, 4) float32 xyxy in pixels of these images, scores (B, K) and
    labels (B, K) int64, best first; K = top_k. A row without a detection has score 0 and label -1. Of a detector with
    masks also masks (B, K, h, w) float32, probabilities.

    Attributes:
        masks: what h and w divide: "image", or "box" that of the detection; "": there are no masks.
        sides: image sides that the function accepts, see `exported_sides` of `Detector`.
        smallest_side: smallest side in pixels for which the function can be traced for several image sizes.
    """

    def __init__(self, detector: nn.Module, top_k: int):
        super().__init__()
        self.detector = detector
        self.top_k = top_k
        self.sides = detector.exported_sides
        self.masks = "image" if detector.predicts_masks else ""
        # In pixels, for images of several sizes: a map of a single cell would be traced as always having one.
        self.smallest_side = 2 * detector.stride if self.sides == "multiples" else max(33, detector.stride + 1)

    def found(self, images: Tensor, sizes: Tensor) -> tuple:
        """Return the result of the detector's `decode`; sides of images must be multiples of its stride.

        sizes: (B, 2) height and width without padding.
        """
        return self.detector.decode(
            self.detector(images, sizes),
            sizes,
            sizes,
            0.0,
            self.top_k,
        )

    def prepared(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images padded to multiples of the detector's stride, and their sizes (B, 2) before padding."""
        height, width = images.shape[-2:]
        sizes = torch.tensor([height, width], device=images.device).expand(images.shape[0], 2)
        stride = self.detector.stride
        if self.sides == "any" and stride > 1:
            # SymPy does not simplify -height % stride, and ONNX rounds the quotient of a negative number up
            rows = (height + stride - 1) // stride
            columns = (width + stride - 1) // stride
            images = pad(images, (0, columns * stride - width, 0, rows * stride - height))
        return images, sizes

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        boxes, scores, labels, *further = self.found(*self.prepared(images))
        masks = [further[0]["masks"]] if self.masks else []
        boxes, scores, labels, *masks = best(
            boxes,
            scores.where(labels >= 0, 0),
            labels,
            self.top_k,
            *masks,
        )
        return boxes, scores, labels.where(scores > 0, -1), *masks


def best(boxes: Tensor, scores: Tensor, labels: Tensor, count: int, *grids: Tensor) -> tuple[Tensor, ...]:
    """Return the `count` rows of each image with the highest scores, best first; missing rows are filled with zeros.

    boxes are (B, K, 4), scores and labels (B, K), grids (B, K, h, w). Exporters have no stable sort, so the order of
    equal scores depends on the runtime.
    """
    # topk needs at least `count` rows. If K is known at run time only, `count` empty ones are enough in any case.
    more = max(0, count - scores.shape[1]) if isinstance(scores.shape[1], int) else count
    boxes = pad(boxes, (0, 0, 0, more))
    scores = pad(scores, (0, more))
    labels = pad(labels, (0, more))
    scores, order = scores.topk(count, dim=1)
    ordered = []
    for grid in grids:
        index = order[..., None, None].expand(-1, -1, *grid.shape[2:])
        ordered.append(pad(grid, (0, 0, 0, 0, 0, more)).gather(1, index))
    return boxes.gather(1, order[..., None].expand(-1, -1, 4)), scores, labels.gather(1, order), *ordered


def copy_for_files(detector: nn.Module) -> nn.Module:
    """Return a copy of a detector for export: on the CPU, in float32, in evaluation mode, with contiguous weights.

    Training leaves weights in the memory format channels_last, about which torch.export warns in every file.
    """
    detector = copy.deepcopy(detector).float().eval()
    vars(detector).pop("forward", None)  # Accelerate's, under autocast
    return detector.to("cpu", memory_format=torch.contiguous_format)


def detector_meant(detector: nn.Module) -> nn.Module:
    """Return the detector itself, or the one inside a scene graph model."""
    below = getattr(detector, "detector", None)
    below = getattr(below, "inner", below)
    return below if isinstance(below, Detector) else detector


def trace_hw(sides: str, stride: int, size: Mapping[str, int] | None, architecture: str) -> tuple[int, int]:
    """Return the (height, width) in pixels of the images that a detector is traced with.

    If `sides` is "fixed", the traced function accepts no other size.

    Args:
        sides, stride: see `exported_sides` and `stride` of `Detector`.
        size: the size to which images are resized, see `toolkit.data.pipeline.processor_size`.
        architecture: name of the detector, for messages.

    Raises:
        BadInput: `sides` is "fixed", but images keep their aspect ratio by `size`.
    """
    if size is not None and "height" in size:
        return size["height"], size["width"]
    if sides == "fixed":
        raise BadInput(
            f"{architecture} can be exported for images of one size only, but these keep their aspect ratio "
            "(data.scales of the run); leave run.export out, and give the size to export.py: --size HEIGHT WIDTH"
        )
    return -(-96 // stride) * stride, -(-128 // stride) * stride


def trace(graph: PixelsToBoxes, size_hw: tuple[int, int], grid_sample: bool = True) -> torch.export.ExportedProgram:
    """Trace a function with torch.export, for any batch size, and for the image sizes that its `sides` allows.

    Args:
        size_hw: height and width of the images that it is traced with.
        grid_sample: whether the program may contain the operator GridSample; False: it is replaced by
            `grid_sample_by_gather`.
    """
    device = next(graph.parameters()).device
    images = torch.zeros(2, 3, *size_hw, dtype=torch.uint8, device=device)
    dynamic = {0: torch.export.Dim("batch", min=1, max=MAX_BATCH)}
    stride = graph.detector.stride
    if graph.sides == "multiples":
        rows, columns = (torch.export.Dim(name, min=2, max=MAX_SIDE // stride) for name in ("rows", "columns"))
        dynamic |= {2: stride * rows, 3: stride * columns}
    elif graph.sides == "any":
        names = {2: "height", 3: "width"}
        lowest = graph.smallest_side
        dynamic |= {i: torch.export.Dim(name, min=lowest, max=MAX_SIDE) for i, name in names.items()}
    sampling = torch.nn.functional.grid_sample if grid_sample else grid_sample_by_gather
    with torch.no_grad(), traceable(graph.detector), mock.patch("torch.nn.functional.grid_sample", sampling):
        graph(images)  # a detector caches values of an image size here, outside of the trace
        return torch.export.export(
            graph,
            (images,),
            dynamic_shapes=(dynamic,),
            prefer_deferred_runtime_asserts_over_guards=True,
        )


@contextlib.contextmanager
def traceable(detector: nn.Module) -> Iterator[None]:
    """Replace code of detectors that torch.export cannot trace, during a `with` block.

    transformers checks the shapes of every deformable attention in a way that exporters to ONNX cannot translate
    (`aten._is_all_true`; huggingface/transformers issue 44265), and has a switch for this check. `len(tensor)`, which
    must return a plain number in Python, would bind the program to the batch size of the trace. And timm computes
    TensorFlow's "same" padding in floating point, which SymPy cannot simplify: the expressions of one layer are nested
    in those of the next, and tracing such a backbone does not end.
    """
    from timm.layers import padding

    below = detector_meant(detector)
    cores = [
        detector,
        below,
        *(getattr(detector, part, None) for part in ("head", "union")),
    ]
    cores += [getattr(below, "model", None), getattr(getattr(below, "model", None), "model", None)]
    names = {cls.__module__ for core in cores if core is not None for cls in type(core).__mro__}
    modules = [sys.modules[name] for name in names if name.startswith(("toolkit.", "transformers.models"))]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, TRANSFORMERS_DISABLE_TORCH_CHECK="1"))
        stack.enter_context(mock.patch.object(padding, "get_same_padding", same_padding))
        for module in modules:
            stack.enter_context(mock.patch.object(module, "len", _symbolic_len, create=True))
        yield


def _symbolic_len(of):
    return of.shape[0] if isinstance(of, Tensor) else len(of)


def same_padding(side: int, kernel_size: int, stride: int, dilation: int) -> int:
    """Return the padding in pixels of `timm.layers.padding.get_same_padding`, computed in integers for a shorter trace.
    """
    reach = dilation * (kernel_size - 1) + 1
    missing = (side + stride - 1) // stride * stride - side + reach - stride  # from reach - stride to reach - 1
    if reach == 1:
        return 0
    return missing if reach >= stride else max(missing, 0)
