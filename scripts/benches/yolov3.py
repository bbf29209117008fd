"""YOLOv3: target assignment and losses against a straightforward loop over boxes; the exported model against
PyTorch."""

import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torchvision.ops import box_iou

from toolkit.data.table import Category
from toolkit.detectors.yolov3.options import DEFAULT_ANCHORS
from toolkit.detectors.yolov3.targets import (
    STRIDES,
    assign_boxes,
    decode_boxes,
    make_grid,
    objectness_targets,
    yolov3_losses,
)
from toolkit.models import build_detector
from toolkit.tools.export.check import compare_outputs
from toolkit.tools.export.exported_files import open_exported
from toolkit.tools.export.write import export_detector

from .measuring import in_turn, losses_against, random_target, row


def bench_yolov3_losses(
    batch: int = 16, side: int = 416, boxes: int = 20, num_classes: int = 80, repeats: int = 7, seed: int = 0
) -> list[dict]:
    """Measure the losses from raw predictions and boxes, as rows of `losses_against`. For both implementations, the
    gradient is one array as large as the predictions, which makes their times more alike."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.tensor(DEFAULT_ANCHORS, dtype=torch.float32)
    count = len(make_grid((side, side), anchors).cells_xy)
    predictions = torch.randn(batch, count, 5 + num_classes, generator=generator)
    targets = [random_target(boxes, side, num_classes, generator, 0.02) for _ in range(batch)]
    both = [partial(f, targets=targets, anchors=anchors, side=side) for f in (our_losses, looped_losses)]
    return losses_against("yolov3", "loop", both, (predictions,), repeats, alone="loop over boxes")


def our_losses(predictions: Tensor, targets: list[dict], anchors: Tensor, side: int) -> dict[str, Tensor]:
    """Compute the losses with the toolkit's functions, as in `YOLOv3.criterion`."""
    grid = make_grid((side, side), anchors)
    sizes = torch.full((len(targets), 2), side)
    assigned = assign_boxes(targets, sizes, anchors, grid)
    objectness = objectness_targets(decode_boxes(predictions.detach(), grid), assigned, sizes, grid, 0.7)
    return yolov3_losses(predictions, objectness, assigned)


def looped_losses(predictions: Tensor, targets: list[dict], anchors: Tensor, side: int) -> dict[str, Tensor]:
    """Compute the losses box by box, with targets for all predictions, as in the original."""
    batch, count, outputs = predictions.shape
    num_classes = outputs - 5
    flat_anchors = anchors.reshape(-1, 2)
    per_cell = anchors.shape[1]
    objectness = torch.zeros(batch, count)
    weights = torch.zeros(batch, count, 1)
    center = torch.zeros(batch, count, 2)
    scale = torch.zeros(batch, count, 2)
    classes = torch.zeros(batch, count, num_classes)
    class_mask = torch.zeros(batch, count, 1)
    pred_boxes = decode_boxes(predictions.detach(), make_grid((side, side), anchors))
    for b, target in enumerate(targets):
        for box in target["boxes"]:
            objectness[b, box_iou(pred_boxes[b], box[None])[:, 0] > 0.7] = -1
        for box, label in zip(target["boxes"].tolist(), target["labels"].tolist(), strict=True):
            w, h = box[2] - box[0], box[3] - box[1]
            inner = torch.minimum(flat_anchors, torch.tensor([w, h])).prod(dim=1)
            best = int((inner / (w * h + flat_anchors.prod(dim=1) - inner)).argmax())
            level = best // per_cell
            cells = side // STRIDES[best // per_cell]
            x, y = (box[0] + w / 2) / side * cells, (box[1] + h / 2) / side * cells
            start = sum((side // s) ** 2 for s in STRIDES[:level]) * per_cell
            n = start + (int(y) * cells + int(x)) * per_cell + best % per_cell
            objectness[b, n] = 1
            weights[b, n] = 2 - w * h / side**2
            class_mask[b, n] = 1
            center[b, n] = torch.tensor([x - int(x), y - int(y)])
            scale[b, n] = torch.log(torch.tensor([max(w, 1), max(h, 1)]) / flat_anchors[best])
            classes[b, n] = 0
            classes[b, n, label] = 1
    seen = (objectness >= 0).float()
    positive = (objectness > 0).float()
    return {
        "loss_obj": (seen * bce(predictions[..., 4], positive, reduction="none")).sum(),
        "loss_center": (weights * bce(predictions[..., :2], center, reduction="none")).sum(),
        "loss_scale": (weights * (predictions[..., 2:4] - scale).abs()).sum(),
        "loss_cls": (class_mask * bce(predictions[..., 5:], classes, reduction="none")).sum(),
    }


def bench_yolov3_export(
    backbone: str = "lcnet_050", batch: int = 4, side: int = 256, repeats: int = 7, seed: int = 0
) -> list[dict]:
    """Measure images/s from uint8 pixels to boxes after suppression, with PyTorch and ONNX Runtime on the same number
    of threads, and the largest differences of a box and of a score."""
    torch.manual_seed(seed)
    names = [str(c) for c in range(20)]
    widths = [128, 64, 32]
    detector = build_detector("yolov3", class_names=names, backbone=backbone, head_channels=widths)
    for prediction in detector.predictions:  # so that scores differ: the order of equal ones would depend on rounding
        torch.nn.init.normal_(prediction.weight, std=0.3)
    coarse = torch.rand(batch, 3, 8, 8) * 255
    images = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic").clamp(0, 255).to(torch.uint8)
    detector(images, torch.tensor([[side, side]] * batch))
    detector.eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        about = {"categories": [Category(name, name) for name in names], "source": "bench", "top_k": 100}
        size = {"height": side, "width": side}
        files, graph = export_detector(detector, Path(folder), ["onnx"], size=size, **about)
        onnx = open_exported(files["onnx"])[0]
        array = images.numpy()
        expected = graph(images)
        actual = [torch.from_numpy(output) for output in onnx(array)]
        rounds = in_turn(lambda: graph(images), lambda: onnx(array), repeats)
    medians = [statistics.median(t[i] for t in rounds) for i in range(2)]
    apart = compare_outputs(expected, actual, side)
    return [
        row("yolov3, PyTorch", batch / medians[0], "images/s"),
        row("yolov3, ONNX Runtime", batch / medians[1], "images/s"),
        row("yolov3, PyTorch / PyTorch", statistics.median(t[2] / t[0] for t in rounds), "x"),
        row("yolov3, largest difference of a box", apart.box * side, "pixels"),
        row("yolov3, largest difference of a score", apart.score, ""),
    ]
