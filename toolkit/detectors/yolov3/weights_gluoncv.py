"""GluonCV's `yolo3_darknet53_*.params`, which become a `yolov3`. They are read without MXNet.

The file is MXNet's list of arrays (`NDArray::Save`), little endian: magic number 0x112 and a reserved number (8 bytes
each), the number of arrays (8), the arrays, the number of names (8), the names, each after its length (8). An array:
its own magic number (4), which gives the version, the kind of storage, shape, device (8) and type of number (4), and
the numbers. Only GluonCV's YOLOv3 on Darknet-53 is supported; its other networks, sparse arrays, and files of 2017 and
before, which number the layers consecutively, are not.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from toolkit.base.errors import BadInput
from toolkit.detectors.yolov3 import weights_darknet as darknet
from toolkit.models.weights.names import Description, Publisher, class_names_for, required

LIST_MAGIC = 0x112
V1, V2, V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
DTYPES = {0: "<f4", 1: "<f8", 2: "<f2", 3: "<u1", 4: "<i4", 5: "<i1", 6: "<i8"}
NORM = {"bias": "beta", "weight": "gamma", "running_mean": "running_mean", "running_var": "running_var"}


def read(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file by name.

    Raises:
        BadInput: the file is not a list of MXNet arrays, or has sparse arrays or an unknown type of number.
    """
    raw = path.read_bytes()
    try:
        return _parse_params(raw)
    except (struct.error, ValueError, UnicodeDecodeError) as error:
        raise BadInput(f"model.pretrained {path}: not a readable list of MXNet arrays: {error}") from error


def _parse_params(raw: bytes) -> dict[str, Tensor]:
    offset = 0

    def take(kind: str):
        nonlocal offset
        values = struct.unpack_from("<" + kind, raw, offset)
        offset += struct.calcsize("<" + kind)
        return values[0] if len(values) == 1 else values

    magic, _, number = take("QQQ")
    if magic != LIST_MAGIC:
        raise ValueError(f"it begins with {magic:#x} instead of {LIST_MAGIC:#x}")
    arrays = []
    for _ in range(number):
        version = take("I")
        storage = take("i") if version in (V2, V3) else 0
        if storage != 0:
            raise ValueError(f"sparse arrays (storage {storage})")
        if version in (V1, V2, V3):
            dimensions = take("I")
            shape = [take("q") for _ in range(dimensions)]
        else:  # before there were versions this was the number of dimensions
            shape = [take("I") for _ in range(version)]
        _, _, kind = take("iii")
        if kind not in DTYPES or any(side < 0 for side in shape):
            raise ValueError(f"numbers of type {kind}, shape {shape}")
        count = int(np.prod(shape))
        array = np.frombuffer(raw, DTYPES[kind], count, offset).reshape(shape)
        offset += array.nbytes
        arrays.append(torch.from_numpy(array.copy()))
    names = []
    for _ in range(take("Q")):
        length = take("Q")
        name = take(f"{length}s").decode()
        names.append(name.removeprefix("arg:").removeprefix("aux:"))
    return dict(zip(names, arrays, strict=True))


def _described(state: Mapping[str, Tensor], file: str) -> list[Description]:
    options = {
        "backbone": "darknet53",
        "leaky_slope": 0.1,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
    }
    return [Description("yolov3", options, class_names_for(_classes(state)))]


def _classes(state: Mapping[str, Tensor]) -> int:
    return len(required(state, "yolo_outputs.0.prediction.bias", 1)) // 3 - 5


def tensor_names(classes: int) -> Iterator[tuple[str, str]]:
    """Yield our name and GluonCV's name of every tensor of a YOLOv3 on Darknet-53."""
    for conv, norm, _ in [*darknet.backbone_layers(), *darknet.head_layers(classes)]:
        yield f"{conv}.weight", f"{_theirs(conv)}.weight"
        if norm is None:
            yield f"{conv}.bias", f"{_theirs(conv)}.bias"
        else:
            for ours, leaf in NORM.items():
                yield f"{norm}.{ours}", f"{_theirs(norm)}.{leaf}"


def _theirs(name: str) -> str:
    """Return GluonCV's name of one of our convolutions or norms, which are numbered 0 and 1 in the backbone."""
    if not name.startswith("backbone."):
        return re.sub(r"^predictions\.(\d)$", r"yolo_outputs.\1.prediction", name).replace("blocks.", "yolo_blocks.")
    number = 0 if name.endswith(".conv") else 1
    if "stem" in name:
        return f"stages.0.0.{number}"
    stage, *inside = map(int, re.findall(r"\d+", name))
    part, first = [(0, 1), (0, 3), (0, 6), (1, 0), (2, 0)][stage]  # where a stage begins in GluonCV's three parts
    if not inside:
        return f"stages.{part}.{first}.{number}"
    block, which = inside
    return f"stages.{part}.{first + 1 + block}.body.{which - 1}.{number}"


def by_our_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the publisher's tensors under our names, without anchors and grid offsets, which are not weights."""
    tensors = {}
    for our_name, their_name in tensor_names(_classes(state)):
        tensors[our_name] = required(state, their_name).float()
    for name in list(tensors):
        if name.endswith("running_var"):
            counter = name.replace("running_var", "num_batches_tracked")
            tensors[counter] = torch.zeros((), dtype=torch.int64)
    return tensors


GLUONCV = Publisher(
    "GluonCV",
    _described,
    ("stages.0.0.0.weight", "yolo_outputs.0.prediction.weight"),
    prepared=by_our_names,
    left_out="^$",
)
