"""Converts an ONNX file to half precision: matrix products and simple operators between them, but not boxes.

Converters that convert a whole file round each box too, to half a pixel beyond 512 pixels. Here, inputs, outputs and
weights of convolutions and matrix products are float16, and so are simple operators that pass values from one of them
to the next. The following stay float32: LayerNormalization, whose sums of squares exceed float16's range of 65504 in
wide transformers; Softmax; the sampling of deformable attention; and everything after the last product: decoding,
sigmoids, suppression.
"""

from pathlib import Path

import numpy as np

from toolkit.base.imports import import_extra
from toolkit.tools.export.exported_files import write_whole

ir = import_extra("onnx_ir", "onnx", "float16 files")
passes = import_extra("onnx_ir.passes.common", "onnx", "float16 files")
PRODUCTS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
BETWEEN = {"Add", "Mul", "Concat", "Relu", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten", "MaxPool",
           "BatchNormalization"}  # fmt: skip
MAX_FLOAT16 = float(np.finfo(np.float16).max)


def write_half(onnx: Path, path: Path) -> None:
    """Convert the float32 file `onnx` and write the result to `path`; inputs, outputs and metadata are not changed."""
    model = passes.ShapeInferencePass()(ir.load(onnx)).model  # the file lacks the type of some values
    graph = model.graph
    casts = {}
    half = _in_half(graph)
    for node in half:
        for i, value in enumerate(node.inputs):
            if _is_float(value) and value.producer() not in half:
                if value.name not in casts:
                    casts[value.name] = _half_weight(graph, value) if value.is_initializer() else _cast(value, True)
                node.replace_input_with(i, casts[value.name])
        for value in node.outputs:
            users = [(user, i) for user, i in value.uses() if user not in half]
            if users:
                back = _cast(value, False)
                for user, i in users:
                    user.replace_input_with(i, back)
            value.dtype = ir.DataType.FLOAT16
    passes.RemoveUnusedNodesPass()(model)  # and the unused weights in float32
    write_whole(path, ir.to_proto(model).SerializeToString())


def _in_half(graph) -> dict:
    """Return the nodes to compute in float16, in their order: all products, and each simple operator whose inputs are
    computed by such nodes or constant, and whose result is used by at least one such node."""
    half = {}  # a dict, which keeps the order
    for node in graph:
        if node.op_type in PRODUCTS | BETWEEN and _is_float(node.outputs[0]):
            half[node] = None

    def stays(node) -> bool:
        if node.op_type in PRODUCTS:
            return True
        before = [value.producer() for value in node.inputs if _is_float(value) and value.const_value is None]
        behind = [user for value in node.outputs for user in value.consumers()]
        return all(producer in half for producer in before) and any(user in half for user in behind)

    while doubtful := [node for node in half if not stays(node)]:
        for node in doubtful:
            del half[node]
    return half


def _is_float(value) -> bool:
    return value is not None and value.dtype == ir.DataType.FLOAT


def _half_weight(graph, value):
    numbers = np.clip(value.const_value.numpy(), -MAX_FLOAT16, MAX_FLOAT16).astype(np.float16)
    name = f"{value.name}_float16"
    weight = ir.Value(name=name, const_value=ir.tensor(numbers, name=name))
    weight.dtype = ir.DataType.FLOAT16
    weight.shape = value.shape
    graph.register_initializer(weight)
    return weight


def _cast(value, to_half: bool):
    """Return a value in the other precision, by a node right after the one that computes it."""
    dtype = ir.DataType.FLOAT16 if to_half else ir.DataType.FLOAT
    node = ir.node("Cast", [value], {"to": dtype.value})
    node.outputs[0].name = f"{value.name}_{dtype.name.lower()}"
    node.outputs[0].dtype = dtype
    value.producer().append(node)
    return node.outputs[0]
