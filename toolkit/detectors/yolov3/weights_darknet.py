"""Darknet's `yolov3.weights` and `darknet53.conv.74`, which become a `yolov3` on timm's Darknet-53. These files have a
header and the numbers of every convolution, in the order of the network.

Each convolution has its bias, or bias, weight, running mean and variance of its batch norm, followed by its kernel
(out, in, h, w).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from toolkit.base.errors import BadInput
from toolkit.models.weights.names import Description, Publisher, class_names_for

BLOCKS = (1, 2, 8, 8, 4)  # residual blocks of each stage
NORM = ("bias", "weight", "running_mean", "running_var")  # in the order of the file


def backbone_layers() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield the layers of Darknet-53 in the file's order: our name of the convolution, our name of its batch norm, and
    the shape of its kernel."""
    yield "backbone.stem_conv1.conv", "backbone.stem_conv1.bn", (32, 3, 3, 3)
    for stage, blocks in enumerate(BLOCKS):
        width = 64 * 2**stage
        prefix = f"backbone.stages_{stage}"
        yield f"{prefix}.conv_down.conv", f"{prefix}.conv_down.bn", (width, width // 2, 3, 3)
        for block in range(blocks):
            name = f"{prefix}.blocks.{block}.conv"
            yield f"{name}1.conv", f"{name}1.bn", (width // 2, width, 1, 1)
            yield f"{name}2.conv", f"{name}2.bn", (width, width // 2, 3, 3)


def head_layers(classes: int, anchors: int = 3) -> Iterator[tuple[str, str | None, tuple[int, ...]]]:
    """Yield the layers of the heads at strides 32, 16 and 8, in the form of `backbone_layers`; the norm of a prediction
    is None."""
    for level, width in enumerate((512, 256, 128)):
        if level:
            yield f"transitions.{level - 1}.0", f"transitions.{level - 1}.1", (width, 2 * width, 1, 1)
        narrow = (width, 2 * width, 1, 1)
        wide = (2 * width, width, 3, 3)
        first = (width, 3 * width, 1, 1) if level else narrow
        for i, shape in enumerate((first, wide, narrow, wide, narrow)):
            yield f"blocks.{level}.body.{i}.0", f"blocks.{level}.body.{i}.1", shape
        yield f"blocks.{level}.tip.0", f"blocks.{level}.tip.1", wide
        yield f"predictions.{level}", None, (anchors * (5 + classes), 2 * width, 1, 1)


def _size(layers) -> int:
    numbers = 0
    for _, norm, shape in layers:
        vectors = len(NORM) if norm else 1  # of one number a channel
        numbers += int(np.prod(shape)) + vectors * shape[0]
    return numbers


def read(path: Path) -> dict[str, Tensor]:
    """Read the numbers of a file as one tensor, `{"darknet": (N,) float32}`.

    Raises:
        BadInput: the file is too short for Darknet weights, or ends in the middle of a number.
    """
    raw = path.read_bytes()
    if len(raw) < 20:
        raise BadInput(f"model.pretrained {path}: {len(raw)} bytes are not Darknet weights")
    major, minor, _ = np.frombuffer(raw, "<i4", 3)
    # images seen: 8 bytes from version 0.2 on, 4 before
    start = 20 if major * 10 + minor >= 2 and major < 1000 and minor < 1000 else 16
    if (len(raw) - start) % 4:
        raise BadInput(f"model.pretrained {path}: the file ends in the middle of a number; download it again")
    numbers = np.frombuffer(raw, "<f4", offset=start)
    return {"darknet": torch.from_numpy(numbers.copy())}


def classes_of(numbers: int) -> int | None:
    """Return the number of classes of a YOLOv3 on Darknet-53 with this many weights; 0 if it is the number of only
    Darknet-53, None if it is neither."""
    backbone = _size(backbone_layers())
    heads = _size(head_layers(0))
    if numbers == backbone:
        return 0
    per_class = _size(head_layers(1)) - heads
    classes, rest = divmod(numbers - backbone - heads, per_class)
    return classes if rest == 0 and classes > 0 else None


def _described(state: Mapping[str, Tensor], file: str) -> list[Description]:
    """Return the architecture, settings and class names of the detector that these weights belong to. `file` is for the
    error.

    Raises:
        BadInput: the number of weights is neither that of a YOLOv3 nor that of Darknet-53. The file does not name its
            network.
    """
    classes = classes_of(len(state["darknet"]))
    if classes is None:
        raise BadInput(
            f"model.pretrained {file}: {len(state['darknet'])} numbers do not make a YOLOv3 on Darknet-53; "
            "yolov3.weights, others of the same .cfg with their own classes, and darknet53.conv.74 are supported"
        )
    options = {
        "backbone": "darknet53",
        "leaky_slope": 0.1,
        "mean": [0.0] * 3,
        "std": [1.0] * 3,
    }
    return [Description("yolov3", options, class_names_for(classes) if classes else ["none"])]


def by_name(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the numbers of the file, a result of `read`, as tensors under our names."""
    numbers = state["darknet"]
    classes = classes_of(len(state["darknet"]))
    layers = list(backbone_layers())
    if classes:
        layers += head_layers(classes)
    position = 0
    tensors = {}
    for conv, norm, shape in layers:
        vectors = [f"{norm}.{leaf}" for leaf in NORM] if norm else [f"{conv}.bias"]
        for name in vectors:
            tensors[name] = numbers[position : position + shape[0]].clone()
            position += shape[0]
        count = int(np.prod(shape))
        kernel = numbers[position : position + count].reshape(shape)
        tensors[f"{conv}.weight"] = kernel.clone()
        position += count
        if norm:
            tensors[f"{norm}.num_batches_tracked"] = torch.zeros((), dtype=torch.int64)
    return tensors


DARKNET = Publisher(
    "Darknet",
    _described,
    ("darknet",),
    prepared=by_name,
    left_out="^$",
    optional="^(?!backbone)",  # darknet53.conv.74 is the backbone alone
)
