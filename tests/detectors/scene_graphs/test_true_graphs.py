"""Annotated graphs of a table, and the triplets that training did not have."""

import numpy as np
from report_data import table_of
from rows import integers

from toolkit.data.dataset import DetectionDataset
from toolkit.data.sampling import SampleKey
from toolkit.data.transforms.geometry import RandomFlip
from toolkit.detectors.scene_graphs.true_graphs import true_graph, zero_shot_triplets
from toolkit.tools.shapes import PREDICATES

OBJECTS = [((10 * k, 5, 10 * k + 8, 20), label) for k, label in enumerate((0, 1, 1))]


def graphs_of(folder, objects, relations):
    image = {"objects": objects, "relations": integers(relations, 3).tolist()}
    return table_of(folder, [image], predicates=("on", "of"), draw=False)


def test_crowds_and_their_relations_are_left_out_and_rows_count_the_rest(tmp_path):
    crowd = (*OBJECTS[1], True)
    table = graphs_of(tmp_path, [OBJECTS[0], crowd, OBJECTS[2]], "0 1 0, 2 0 1")
    graph = true_graph(table.row(0))
    assert graph["labels"].tolist() == [0, 1]
    assert graph["relations"].tolist() == [[1, 0, 1]]


def test_triplets_that_training_did_not_show_are_those_of_the_table(tmp_path):
    table = graphs_of(tmp_path, OBJECTS, "0 1 1, 0 2 1, 1 0 0, 1 2 0")  # the second is the first's triplet
    seen = np.zeros((2, 2, 2), bool)
    seen[1, 0, 0] = True
    assert zero_shot_triplets(seen, table).tolist() == [[0, 1, 1], [1, 1, 0]]


def test_relations_are_true_of_mirrored_images_too(table):
    dataset = DetectionDataset(table, RandomFlip(1.0))
    directed = 0
    for index in range(len(table)):
        _, target = dataset[SampleKey(0, index)]
        assert "mirrored_predicates" not in target
        centres = target["boxes"][:, [0, 2]].mean(1)
        for subject, object_, predicate in target["relations"].tolist():
            if PREDICATES[predicate] in ("left of", "right of"):
                is_left = bool(centres[subject] < centres[object_])
                assert is_left == (PREDICATES[predicate] == "left of")
                directed += 1
    assert directed
