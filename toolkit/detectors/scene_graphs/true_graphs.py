"""Annotated scene graphs, which predictions are compared with, and the triplets of a data set or a file."""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from toolkit.base.errors import BadInput
from toolkit.data.table import DetectionTable


def true_graph(row: Mapping) -> dict[str, np.ndarray]:
    """Return `boxes (N, 4)`, `labels (N,)` and R `relations (R, 3)` of a table row and, if the table has them,
    `attributes (N, A)`, at most A per object. Crowd regions and their relations are left out; relations refer to the
    boxes that are kept."""
    objects = row["objects"]
    relations = row["relations"]
    keep = objects["iscrowd"] == 0
    triplets = np.stack([relations["subject"], relations["object"], relations["predicate"]], 1)
    triplets = triplets[keep[triplets[:, :2]].all(1)]
    row_of = np.cumsum(keep) - 1  # objects kept: yes, no, yes; rows of these: 0, -, 1
    triplets[:, :2] = row_of[triplets[:, :2]]
    graph = {
        "boxes": objects["bbox"][keep],
        "labels": objects["category"][keep],
    }
    if "attributes" in objects:
        graph["attributes"] = objects["attributes"][keep]
    graph["relations"] = triplets
    return graph


def given_graph(prediction: Mapping) -> dict[str, np.ndarray]:
    """Return the annotated graph of the boxes that a prediction was given; {} if the prediction has detected boxes."""
    if "true_relations" not in prediction:
        return {}
    keys = {
        "labels": "true_labels",
        "relations": "true_relations",
        "attributes": "true_attributes",
        "boxes": "boxes",
    }
    return {name: np.asarray(prediction[key]) for name, key in keys.items() if key in prediction}


def zero_shot_triplets(seen: np.ndarray, table: DetectionTable) -> np.ndarray:
    """Return the Z triplets (Z, 3) of subject class, object class and predicate in `table` that training did not have.

    seen: (C, C, P) bool for C classes and P predicates, the triplets that training had. Classes and predicates are
    counted from 0.
    """
    triplets: set[Sequence[int]] = set()
    for row in map(table.row, range(len(table))):
        graph = true_graph(row)
        relations = graph["relations"]
        ends = graph["labels"][relations[:, :2]]
        names = np.column_stack([ends, relations[:, 2]])
        triplets.update(map(tuple, names.tolist()))
    rows = np.asarray(sorted(triplets), np.int64).reshape(-1, 3)
    return rows[~seen[tuple(rows.T)]]


def load_triplets(file: str | Path) -> np.ndarray:
    """Load Z triplets (Z, 3) int64 of subject class, object class and predicate. They are counted from 1 in the file,
    from 0 in the result.

    The file is CSV with one header line, or the tensor `zeroshot_triplet.pytorch` of Scene-Graph-Benchmark. Raises
    BadInput for a file that holds anything else.
    """
    file = Path(file)
    try:
        if file.suffix == ".csv":
            rows = np.loadtxt(
                file,
                delimiter=",",
                skiprows=1,
                dtype=np.int64,
                ndmin=2,
            )
        else:
            tensor = torch.load(file, weights_only=True, map_location="cpu")
            rows = tensor.long().numpy()
    except (OSError, ValueError, RuntimeError, AttributeError, pickle.UnpicklingError) as error:
        raise BadInput(f"{file}: not a list of triplets: {error}") from error
    if rows.ndim != 2 or rows.shape[1] != 3 or (rows < 1).any():
        raise BadInput(f"{file}: {rows.shape} values; expected rows of 3 ids from 1: subject, object, predicate")
    return rows - 1
