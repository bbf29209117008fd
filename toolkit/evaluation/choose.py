"""What measures a detector: its own evaluator, the metrics of scene graphs, or COCO's of boxes."""

import pickle
from pathlib import Path

import numpy as np
import torch

from toolkit.data.table import DetectionTable
from toolkit.errors import BadInput
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.scene_graphs.evaluator import SceneGraphEvaluator, zero_shot_triplets


def make_evaluator(
    detector, table: DetectionTable, backend: str, protocol: str = "original", zero_shot: str | Path | None = None
):
    """What measures a detector on a table: what its own `make_evaluator` gives, else by what it announces.

    Args:
        detector: one that announces `predicates` finds scene graphs (with `mode`, `attributes`, `seen_triplets`
            (C, C, P) bool, the triplets of its training data, and `relation_counts` (1 + C, 1 + C, 1 + P) of these);
            another one finds boxes.
        backend: of COCO's metrics.
        protocol: of scene graphs, see `SceneGraphEvaluator`.
        zero_shot: file of triplets for zR@K, see `load_triplets`; None: those of the table that the training data did
            not have.

    Raises:
        BadInput: the table's predicates or attributes are others than the detector's (a table without attributes will
            do), a file that is no list of triplets.
    """
    own = detector.make_evaluator(table, backend)
    if own is not None:
        return own
    if not getattr(detector, "predicates", ()):
        return CocoEvaluator(table, backend)
    _check_same_names(detector, table)
    seen = detector.seen_triplets.cpu().numpy()
    triplets = load_triplets(zero_shot) if zero_shot else zero_shot_triplets(seen, table)
    counts = detector.relation_counts.sum((0, 1))[1:].cpu().numpy()
    return SceneGraphEvaluator(
        table, detector.mode, zero_shot=triplets, protocol=protocol, backend=backend, trained_relations=counts
    )


def load_triplets(file: str | Path) -> np.ndarray:
    """(Z, 3) int64 subject class, object class, predicate, from 0, of a list that counts from 1.

    Reads CSV with one header line, and the tensor `zeroshot_triplet.pytorch` of Scene-Graph-Benchmark.
    Raises BadInput for a file that holds anything else.
    """
    file = Path(file)
    try:
        if file.suffix == ".csv":
            rows = np.loadtxt(file, delimiter=",", skiprows=1, dtype=np.int64, ndmin=2)
        else:
            rows = torch.load(file, weights_only=True, map_location="cpu").long().numpy()
    except (OSError, ValueError, RuntimeError, AttributeError, pickle.UnpicklingError) as error:
        raise BadInput(f"{file}: no list of triplets: {error}") from error
    if rows.ndim != 2 or rows.shape[1] != 3 or (rows < 1).any():
        raise BadInput(f"{file}: {rows.shape} values; expected rows of 3 ids from 1: subject, object, predicate")
    return rows - 1


def _check_same_names(detector, table: DetectionTable) -> None:
    compared = [("predicates", table.predicates, detector.predicates)]
    if table.attributes and detector.attributes:
        compared.append(("attributes", table.attributes, detector.attributes))
    faults = [
        f"{table.name} has the {what} {list(theirs)}, training data {list(ours)}: give both the same ones in the same "
        "order"
        for what, theirs, ours in compared
        if tuple(theirs) != tuple(ours)
    ]
    if faults:
        raise BadInput(faults)
