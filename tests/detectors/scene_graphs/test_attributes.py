"""Attributes of objects, from the files to the loss and the detections."""

import json

import pytest
import report_data
import torch
from documents import box, document, write
from hypothesis import given, settings
from hypothesis import strategies as st
from scene_graph_data import (
    criterion_of,
    cut_objects,
    graphs_of,
    loader_of,
    losses_of,
    model_of,
    predictions_of,
    shapes_table,
)
from visual_genome_writer import write_visual_genome

import toolkit.tools.shapes as shapes
from toolkit.base.errors import BadInput
from toolkit.data.annotations import Reading
from toolkit.data.dataset import row_target
from toolkit.data.formats import open_dataset
from toolkit.detectors.scene_graphs.evaluator import attribute_r_precision
from toolkit.detectors.scene_graphs.readers.visual_genome import read_visual_genome
from toolkit.detectors.scene_graphs.relation_batch import attribute_loss, mean_or_zero
from toolkit.evaluation.coco import make_evaluator
from toolkit.evaluation.predictions import best_first, detections_as_json
from toolkit.models.final import load_detector_folder
from toolkit.tools.shapes import ATTRIBUTES
from toolkit.tools.writers import write_coco

NAMES = ("red", "striped", "wet")
FEW = [
    [],
    [[1], [], [3, 1, 2]],
    [[2]],
]


def table_of(folder, attributes, columns=3):
    """One image of 1024 x 512 for each list of objects' attribute ids, with a relation where it has two objects."""
    images = []
    padded = []
    for of_image in attributes:
        objects = [([8.0 * k, 4.0, 8.0 * k + 60, 100.0], 0) for k in range(len(of_image))]
        images.append(
            {
                "objects": objects,
                "relations": [(0, 1, 0)] * (len(of_image) > 1),
            }
        )
        padded.append([[*ids, *[0] * (columns - len(ids))] for ids in of_image])
    return report_data.table_of(
        folder,
        images,
        ("cat",),
        size=(512, 1024),
        ids=range(1, len(images) + 1),
        draw=False,
        predicates=("on",),
        attributes=NAMES if columns else (),
        attribute_ids=padded if columns else None,
    )


def ids_of(table) -> list[list[list[int]]]:
    of_images = [table.row(k)["objects"]["attributes"].tolist() for k in range(len(table))]
    return [[[i for i in ids if i] for ids in of_image] for of_image in of_images]


def test_a_table_without_them_has_no_column(tmp_path):
    plain = table_of(tmp_path, FEW, columns=0)
    assert plain.attributes == ()
    assert "attributes" not in plain.row(1)["objects"]
    assert "attributes" not in row_target(plain.row(1), (512, 1024))
    assert plain.fingerprint != table_of(tmp_path, FEW).fingerprint


def read_genome(folder, split="train", **options):
    reading = Reading(folder, check_images=False, cache_dir=folder, **options)
    return read_visual_genome(folder, split, reading, 0, keep_images_without_relations=True)


any_attributes = st.lists(
    st.lists(
        st.lists(
            st.integers(1, 3),
            max_size=3,
            unique=True,
        ),
        max_size=4,
    ),
    max_size=4,
)


@settings(max_examples=15, deadline=None)
@given(any_attributes)
def test_files_of_both_layouts_are_read_as_written(tmp_path_factory, attributes):
    folder = tmp_path_factory.mktemp("files")
    table = table_of(folder, [[[1]], *attributes])
    write_coco(table.labelled(), folder / "coco.json")
    again = open_dataset(folder / "coco.json", image_dir=folder, cache_dir=folder, check_images=False)
    assert again.attributes == NAMES
    assert ids_of(again) == ids_of(table)
    write_visual_genome([(table, 2)], folder)
    again = read_genome(folder, "test")
    assert again.attributes == NAMES
    assert ids_of(again) == [ids for ids in ids_of(table) if ids]
    assert ids_of(again.head(1)) == [[[1]]]


def test_visual_genome_with_more_columns_and_undefined_ids(tmp_path):
    write_visual_genome(
        [
            (
                table_of(
                    tmp_path,
                    [[[1, 2, 3]], [[4], [2]]],
                    columns=12,
                ),
                0,
            )
        ],
        tmp_path,
    )
    with pytest.raises(BadInput, match="image 2.*attribute 4 is not defined; ids are 1 .. 3"):
        read_genome(tmp_path)
    table = read_genome(tmp_path, on_error="drop")
    assert ids_of(table) == [[[1, 2, 3]]]
    assert table.row(0)["objects"]["attributes"].shape == (1, 12)
    names = json.loads((tmp_path / "VG-SGG-dicts-with-attri.json").read_text())
    del names["attribute_to_idx"]
    (tmp_path / "VG-SGG-dicts-with-attri.json").write_text(json.dumps(names))
    assert read_genome(tmp_path).attributes == ()


def read_coco(folder, ids, named=True, **options):
    """Of boxes with these `attribute_ids`."""
    content = document(annotations=[box(id=n, attribute_ids=each) for n, each in enumerate(ids, 1)])
    if named:
        content["attribute_categories"] = [{"id": 70, "name": "wet"}, {"id": 7, "name": "red"}]
    return open_dataset(write(folder, content), image_dir=folder, check_images=False, cache_dir=folder, **options)


def test_all_wrong_ids_of_a_coco_file_are_named_at_once(tmp_path):
    ids = ([7, 8, "x"], 7, [70, 7, 70])
    with pytest.raises(BadInput) as caught:
        read_coco(tmp_path, ids)
    for words in ("1): attribute 8 is", "attribute 'x' is", "annotation 2): `attribute_ids` is 7; expected"):
        assert words in str(caught.value)
    kept = read_coco(tmp_path, ids, on_error="drop")
    assert kept.attributes == ("red", "wet")
    assert ids_of(kept) == [[[2, 1]]]


def test_a_coco_file_need_not_have_them(tmp_path):
    assert ids_of(read_coco(tmp_path, ([], "absent"))) == [[[], []]], "named, but no object has any"
    assert read_coco(tmp_path, ([9],), named=False).attributes == (), "an unknown key of another tool"


def test_shapes_have_the_texture_that_was_painted(tmp_path, monkeypatch):
    painted = []
    paint = shapes._paint

    def paint_and_note(*args):
        painted.append(paint(*args))
        return painted[-1]

    monkeypatch.setattr(shapes, "_paint", paint_and_note)
    table = shapes_table(tmp_path, images=30)
    found = [ATTRIBUTES[ids[0] - 1] for of_image in ids_of(table) for ids in of_image]
    assert table.attributes == ATTRIBUTES
    assert found == painted[: len(found)]
    assert set(found) == set(ATTRIBUTES)


@pytest.fixture(scope="module")
def batch(table):
    """Six images; of the first the only object is a crowd, and the second object of the last has no attribute."""
    batch = next(iter(loader_of(table)))
    cut_objects(batch.targets[0], 1, crowd=True)
    batch.targets[5]["attributes"] = batch.targets[5]["attributes"].clone()
    batch.targets[5]["attributes"][1] = 0
    return batch


@pytest.mark.parametrize(("head", "attributes"), [("imp", ()), ("frequency", ATTRIBUTES)])
def test_without_names_or_features_there_is_no_classifier(table, batch, head, attributes):
    model = model_of(table, head=head, attributes=attributes).eval()
    assert "attribute_predictor.weight" not in model.state_dict()
    assert "loss_refine_att" not in model.loss_names
    assert "attribute_entries" not in model.denominator_names
    assert "attribute_scores" not in graphs_of(model, batch, batch.targets)[0]


def test_the_loss_is_the_published_one_over_annotated_objects(table, batch):
    model = model_of(table, head="imp", attributes=ATTRIBUTES).train()
    outputs = model(batch.images, batch.sizes, batch.targets)
    losses, _ = criterion_of(model, outputs, batch.targets)
    ids = torch.cat([target["attributes"][target["iscrowd"] == 0] for target in batch.targets])
    expected = mean_or_zero(*attribute_loss(outputs["attribute_logits"], ids, [len(ids)]))[0]
    torch.testing.assert_close(losses["loss_refine_att"], expected)
    assert model.denominators(batch.targets)["attribute_entries"] == 6 * (len(ids) - 1), "5 names and background"
    losses["loss_refine_att"].backward()
    assert model.attribute_predictor.weight.grad.any()
    assert next(model.box_features.parameters()).grad.any()


@pytest.mark.parametrize("mode", ["predcls", "sgdet"])
def test_a_batch_without_objects_has_a_loss_of_zero_with_a_gradient(table, batch, mode):
    """A rank without objects has gradients as the others."""
    model = model_of(table, mode, "vctree", attributes=ATTRIBUTES).train()
    losses, _ = losses_of(model, batch, slice(0, 1))
    sum(losses.values()).backward()
    assert losses["loss_refine_att"] == 0
    assert not model.attribute_predictor.weight.grad.any()


def test_detections_learn_the_attributes_of_what_they_overlap(table, batch, monkeypatch):
    model = model_of(table, "sgdet", "imp", attributes=ATTRIBUTES).train()
    found = []
    for i, target in enumerate(batch.targets):
        boxes = target["boxes"] + (501.0 if i == 1 else 1.0)  # those of the second image overlap nothing
        count = len(boxes)
        about = {
            "logits": torch.zeros(count, 5),
            "boxes_per_class": boxes[:, None].expand(-1, 5, 4),
        }
        found.append({"boxes": boxes, "labels": target["labels"], **about})
    monkeypatch.setattr(model.detector, "detect_with_logits", lambda *_, **__: found)
    learned = model(batch.images, batch.sizes, batch.targets)["batch"].attributes
    expected = [target["attributes"] for target in batch.targets]
    without = len(expected[0]) + len(expected[1])
    assert not learned[:without].any(), "crowd, and nothing"
    assert torch.equal(learned[without:], torch.cat(expected[2:]))


def test_they_are_measured_saved_and_written(table, tmp_path):
    model = model_of(table, head="imp", attributes=ATTRIBUTES).eval()
    predictions = predictions_of(model, table)
    evaluator = make_evaluator(model, table, "toolkit")
    scores = evaluator.evaluate(predictions)
    ids = [table.row(i)["objects"]["attributes"] for i in range(len(table))]
    found = [predictions[image_id]["attribute_scores"] for image_id in evaluator.image_ids]
    assert scores["attribute_R_precision"] == attribute_r_precision(ids, found)
    assert f"R-precision {scores['attribute_R_precision']:.3f}" in evaluator.describe(scores, predictions)
    model.save_final(tmp_path, table.categories)
    again = load_detector_folder(tmp_path)[0]
    assert again.attributes == ATTRIBUTES
    assert torch.equal(again.attribute_predictor.weight, model.attribute_predictor.weight)
    best = best_first(predictions[evaluator.image_ids[0]])
    named = [len(entry["attributes"]) for entry in detections_as_json(best, table.categories, ATTRIBUTES)]
    assert named == (best["attribute_scores"] > 0.5).sum(1).tolist()
