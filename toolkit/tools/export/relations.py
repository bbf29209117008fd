"""A scene graph model as one function from pixels to boxes and relations, which exporters can trace.

The function keeps a fixed number of objects, and considers all their pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from toolkit.base.public import without_machine
from toolkit.data.table import Category
from toolkit.tools.export.exported_files import ExportMetadata, write_onnx
from toolkit.tools.export.faster_rcnn import pool_where
from toolkit.tools.export.graph import PixelsToBoxes, copy_for_files, detector_meant, trace, trace_hw

MAX_RELATIONS = 100  # per image, as many as recall counts


class PixelsToGraph(PixelsToBoxes):
    """A scene graph model in evaluation mode as one function, with everything before and after its network.

    forward(images uint8 (B, 3, H, W) RGB) -> boxes (B, K, 4), scores and labels (B, K) as in `PixelsToBoxes`, but in
    any order; pairs (B, R, 2) int64, subject and object of R relations as rows of the boxes, best first;
    predicate_scores (B, R, predicates); triplet_scores (B, R), 0 in a row without a relation. R is `top_k`, or the
    number of all pairs if that is smaller.
    """

    def __init__(self, detector: nn.Module, top_k: int = MAX_RELATIONS):
        super().__init__(detector, top_k)
        self.sides = detector_meant(detector).exported_sides

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return self.detector.decode_graph(*self.prepared(images), self.top_k, pool_where)


def export_graph(
    detector: nn.Module,
    folder: Path,
    *,
    categories: Sequence[Category],
    size: Mapping[str, int] | None,
    source: str,
    score_threshold: float,
    grid_sample: bool = True,
    white: int | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Write `graph.onnx` of a scene graph model to a folder, and return the file.

    The model's `graph_obstacle` must return None. For the arguments see `toolkit.tools.export.export_detector`.
    """
    detector = copy_for_files(detector)
    graph = PixelsToGraph(detector).eval()
    architecture = detector.options["architecture"]
    say(f"tracing {architecture} with its relations")
    program = trace(graph, trace_hw(graph.sides, detector.stride, size, architecture), grid_sample)
    about = ExportMetadata(
        architecture,
        categories,
        size,
        graph.sides,
        detector.stride,
        score_threshold,
        MAX_RELATIONS,
        without_machine(source),
        predicates=list(detector.predicates),
        white=white,
    )
    path = Path(folder) / "graph.onnx"
    say(f"writing {path}")
    write_onnx(program, path, about)
    return path
