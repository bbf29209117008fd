"""The start of a scene graph: counts of the training data, word vectors, warnings about relations."""

import pytest
import torch
from documents import row_of
from scene_graph_data import graphs_of, model_of

from toolkit.base.errors import BadInput
from toolkit.data.table import Category
from toolkit.data.table_cache import write_rows
from toolkit.detectors.scene_graphs.frequency import log_frequencies
from toolkit.detectors.scene_graphs.options import SceneGraphOptions
from toolkit.detectors.scene_graphs.start import (
    count_table,
    lacking_relations,
    load_word_vectors,
    start_from_words,
    start_scene_graph,
)
from toolkit.detectors.scene_graphs.true_graphs import true_graph
from toolkit.models.final import load_detector_folder
from toolkit.tools.shapes import PREDICATES


def test_counts_start_the_bias_and_travel_with_the_weights(table, tmp_path, batch):
    model = model_of(table, "sgdet", "vctree").eval()
    relations, candidates, seen = count_table(table)
    expected = log_frequencies(relations, candidates)
    assert torch.equal(model.head.frequency.table.weight, expected.flatten(0, 1))
    prior = expected.sum(-1)
    torch.testing.assert_close(model.head.context.scores.prior.weight.view_as(prior), prior + prior.T)
    graph = true_graph(table.row(4))
    subject, object_, predicate = graph["relations"][0]
    assert seen[graph["labels"][subject], graph["labels"][object_], predicate]
    model.save_final(tmp_path, table.categories)
    again = load_detector_folder(tmp_path)[0].eval()
    assert again.predicates == PREDICATES
    assert torch.equal(again.relation_counts, torch.from_numpy(relations))
    torch.testing.assert_close(
        graphs_of(model, batch),
        graphs_of(again, batch),
        rtol=0,
        atol=0,
    )


@pytest.fixture
def glove(tmp_path):
    path = tmp_path / "glove.txt"
    path.write_text("the 9 9 9\ncircle 1 2 3\nstart 4 5 6\nsquare 7 8 9\n")
    return path


def test_vectors_of_words_are_those_of_the_name_or_of_a_word_in_it(glove):
    vectors = load_word_vectors(glove, ["Circle", "old square", "unknown"], 3)
    assert vectors[[0, 2, 3]].tolist() == [
        [4, 5, 6],
        [1, 2, 3],
        [7, 8, 9],
    ]
    assert vectors.shape == (5, 3)
    assert vectors.isfinite().all()
    with pytest.raises(BadInput, match="embed_dim"):
        load_word_vectors(glove, ["circle"], 4)
    with pytest.raises(BadInput, match="none.txt"):
        load_word_vectors(glove.with_name("none.txt"), ["circle"], 4)


def test_class_vectors_start_from_words(table, glove):
    vectors = load_word_vectors(glove, table.class_names, 3)
    head = model_of(table, "sgcls", embed_dim=3).head
    changed = start_from_words(head, vectors)
    assert sorted(changed) == ["context.decoder.embed", "context.embed_in", "context.embed_out"]
    circle = table.class_names.index("circle")
    assert head.context.embed_in.weight[1 + circle].tolist() == [1, 2, 3]
    assert head.context.decoder.embed.weight[2 + circle].tolist() == [1, 2, 3]
    assert start_from_words(model_of(table, "sgcls", "imp").head, vectors) == []


def split_of(folder, name, *predicates):
    row = row_of(
        1,
        [[1, 1, 9, 9], [2, 2, 20, 20]],
        labels=[0, 0],
        relations=[(0, 1, p) for p in predicates],
    )
    return write_rows(
        [row],
        cache_file=folder / f"{name}.json",
        categories=[Category(1, "cup")],
        predicates=["on", "under", "near"],
        image_root=folder,
    )


def test_relations_that_a_split_lacks_are_named(tmp_path):
    train = split_of(tmp_path, "train", 0)
    val = split_of(tmp_path, "val", 0, 1, 1)
    assert lacking_relations(val, train) == []
    assert lacking_relations(train, train) == []
    (told,) = lacking_relations(train, val)
    assert told.endswith("training never has, and that are not learnt: under (2)")
    (told,) = lacking_relations(train, split_of(tmp_path, "none"))
    assert "there is not a single relation between the boxes of its 1 images: R@K is not measured" in told


def test_weights_of_the_backbone_are_not_a_setting_of_the_detector(table, tmp_path):
    options = SceneGraphOptions(detector_options={"pretrained_backbone": True})
    with pytest.raises(BadInput, match="give them as model.pretrained_backbone"):
        start_scene_graph(options, table, tmp_path, checkpoint=None, say=print)
