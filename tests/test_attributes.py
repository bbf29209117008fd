"""Attributes of objects, from the files to the metric."""

import json
import pickle

import numpy as np
import pytest
import report_data
import samples
import torch
from documents import box, document, write
from hypothesis import given, settings
from hypothesis import strategies as st
from scene_graph_data import INNER, as_denominators, cut_objects, loader_of, shapes_table
from scene_graph_data import model_of as graph_model
from visual_genome_writer import write_visual_genome

from toolkit.base.errors import BadInput
from toolkit.data.annotations import Reading
from toolkit.data.batches import collate
from toolkit.data.dataset import row_target
from toolkit.data.formats import open_dataset
from toolkit.data.transforms.geometry import crop, flip, recheck_boxes
from toolkit.data.transforms.mixing import mixup, mosaic
from toolkit.detectors.scene_graphs.evaluator import attribute_r_precision
from toolkit.detectors.scene_graphs.readers.visual_genome import read_visual_genome
from toolkit.detectors.scene_graphs.relation_batch import attribute_loss, mean
from toolkit.evaluation.coco import make_evaluator
from toolkit.evaluation.predict_dataset import predict_dataset
from toolkit.evaluation.predictions import best_first, detections_as_json
from toolkit.models.final import load_detector_folder
from toolkit.step.losses import LossWeights
from toolkit.tools.shapes import ATTRIBUTES
from toolkit.tools.writers import write_coco

NAMES = ("red", "striped", "wet")

def table_of(folder, attributes, columns=3, names=NAMES):
    """One image of 1024 x 512 for each list of objects' attribute ids, with a relation where it has two objects."""
    images = [{"objects": [([8.0 * k, 4.0, 8.0 * k + 60, 100.0], 0) for k in range(len(ids))],
               "relations": [(0, 1, 0)] * (len(ids) > 1)} for ids in attributes]  # fmt: skip
    padded = [[[*ids, *[0] * (columns - len(ids))] for ids in of_image] for of_image in attributes]
    about = {"size": (512, 1024), "ids": range(1, len(images) + 1), "draw": False, "predicates": ("on",)}
    if columns:
        about |= {"attributes": names, "attribute_ids": padded}
    return report_data.table_of(folder, images, ("cat",), **about)


def ids_of(table) -> list[list[list[int]]]:
    of_images = (table.row(k)["objects"]["attributes"].tolist() for k in range(len(table)))
    return [[[i for i in ids if i] for ids in of_image] for of_image in of_images]


FEW = [[], [[1], [], [3, 1, 2]], [[2]]]
any_attributes = st.lists(st.lists(st.lists(st.integers(1, 3), max_size=3, unique=True), max_size=4), max_size=4)


def test_the_table_keeps_them_and_costs_nothing_without(tmp_path):
    table = table_of(tmp_path, FEW)
    for seen in (table, pickle.loads(pickle.dumps(table)), table.head(3)):  # noqa: S301 (pickled here)
        assert ids_of(seen) == FEW and seen.attributes == NAMES
        assert seen.row(0)["objects"]["attributes"].shape == (0, 3)
        assert seen.row(1)["objects"]["attributes"].dtype == np.int64
    assert ids_of(table.head(2)) == FEW[:2]
    plain = table_of(tmp_path, FEW, columns=0)
    assert "attributes" not in plain.row(1)["objects"] and plain.attributes == ()
    assert "attributes" not in row_target(plain.row(1), (512, 1024))
    assert len({t.fingerprint for t in (table, plain, table_of(tmp_path, FEW, names=("a", "b", "c")))}) == 3


@settings(max_examples=15, deadline=None)
@given(any_attributes)
def test_files_of_both_layouts_are_read_as_written(tmp_path_factory, attributes):
    folder = tmp_path_factory.mktemp("files")
    table = table_of(folder, [[[1]], *attributes])
    write_coco(table.labelled(), folder / "coco.json")
    again = open_dataset(folder / "coco.json", image_dir=folder, cache_dir=folder, check_images=False)
    assert again.attributes == NAMES and ids_of(again) == ids_of(table)
    write_visual_genome([(table, 2)], folder)
    again = read_genome(folder, "test")
    assert again.attributes == NAMES and ids_of(again) == [ids for ids in ids_of(table) if ids]


def test_visual_genome_with_other_widths_and_undefined_ids(tmp_path):
    wide = table_of(tmp_path, [[[1, 2, 3]], [[4], [2]]], columns=12)
    write_visual_genome([(wide, 0)], tmp_path)
    with pytest.raises(BadInput, match="image 2.*attribute 4 is not defined; ids are 1 .. 3"):
        read_genome(tmp_path)
    table = read_genome(tmp_path, on_error="drop")
    assert ids_of(table) == [[[1, 2, 3]]] and table.row(0)["objects"]["attributes"].shape == (1, 12)
    names = json.loads((tmp_path / "VG-SGG-dicts-with-attri.json").read_text())
    del names["attribute_to_idx"]
    (tmp_path / "VG-SGG-dicts-with-attri.json").write_text(json.dumps(names))
    plain = read_genome(tmp_path)
    assert plain.attributes == () and "attributes" not in plain.row(0)["objects"]


def read_genome(folder, split="train", **options):
    reading = Reading(folder, check_images=False, cache_dir=folder, **options)
    return read_visual_genome(folder, split, reading, 0, keep_images_without_relations=True)


def coco_of(folder, *, named=True, **ids):
    """Three boxes; ids: `attribute_ids` of the first (a), second and third."""
    boxes = [box(id=n, attribute_ids=ids.get(key, "absent")) for n, key in enumerate("abc", 1)]
    names = [{"id": 70, "name": "wet"}, {"id": 7, "name": "red"}]
    file = write(folder, document(annotations=boxes) | ({"attribute_categories": names} if named else {}))
    return lambda **options: open_dataset(file, image_dir=folder, check_images=False, cache_dir=folder, **options)


def test_all_wrong_ids_of_a_coco_file_are_named_at_once(tmp_path):
    reading = coco_of(tmp_path, a=[7, 8, "x"], b=7, c=[70, 7, 70])
    with pytest.raises(BadInput) as caught:
        reading()
    for text in ("annotation 1): attribute 8 is", "attribute 'x' is", "annotation 2): `attribute_ids` is 7; expected"):
        assert text in str(caught.value)
    kept = reading(on_error="drop")
    assert kept.attributes == ("red", "wet") and ids_of(kept) == [[[2, 1]]]
    assert ids_of(coco_of(tmp_path, b=[])()) == [[[], [], []]], "named, but no object has any"
    assert coco_of(tmp_path, named=False, a=[9])().attributes == (), "an unknown key of another tool"


def test_shapes_have_the_texture_that_was_painted(tmp_path, monkeypatch):
    import toolkit.tools.shapes as shapes

    painted, paint = [], shapes._paint
    monkeypatch.setattr(shapes, "_paint", lambda *args: painted.append(paint(*args)) or painted[-1])
    table = shapes_table(tmp_path, images=30)
    found = [table.attributes[ids[0] - 1] for of_image in ids_of(table) for ids in of_image]
    assert table.attributes == ATTRIBUTES and found == painted[: len(found)] and set(found) == set(ATTRIBUTES)


def sample(count: int):
    """Boxes of 10 pixels in a row; box k has the attribute k + 1."""
    return samples.sample([[10 * k, 0, 10 * k + 10, 10] for k in range(count)], (40, 40))


def test_transforms_keep_them_with_their_boxes():
    image, target = sample(4)
    for changed in (
        flip(image, target),
        crop(image, target, (0, 15, 40, 20)),
        crop(image, target, (20, 0, 10, 10)),
        mixup(sample(3), sample(0), 0.4),
        mosaic([sample(n) for n in (2, 0, 3, 1)], (60, 60), (30, 30)),
    ):
        found = recheck_boxes(*changed)
        assert torch.equal(found["attributes"][:, 0], found["labels"] + 1) and found["attributes"].shape[1] == 2
    assert len(recheck_boxes(*crop(image, target, (20, 0, 10, 10)))["attributes"]) == 0, "every box cropped away"
    with pytest.raises(ValueError, match="attributes"):
        recheck_boxes(image, target | {"attributes": target["attributes"][1:]})
    batch = pickle.loads(pickle.dumps(collate([sample(4), sample(0)]))).to("cpu")  # noqa: S301 (pickled here)
    assert [t["attributes"].shape for t in batch.targets] == [(4, 2), (0, 2)]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return shapes_table(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def batch(table):
    """Six images; of the first the only object is a crowd, and the second object of the last has no attribute."""
    batch = next(iter(loader_of(table)))
    cut_objects(batch.targets[0], 1, crowd=True)
    last = batch.targets[5]
    assert len(last["labels"]) > 1
    last["attributes"] = last["attributes"].clone()
    last["attributes"][1] = 0
    return batch


def model_of(table, mode="predcls", head="imp", attributes=ATTRIBUTES, **options):
    return graph_model(table, mode, head, attributes=attributes, **options)


def predictions_of(model, table, **options):
    weights = LossWeights(model.loss_names, {}, model.default_weights)
    return predict_dataset(model, loader_of(table), "cpu", loss_weights=weights, **options).by_image


def test_without_names_the_model_is_what_it_was(table, batch):
    plain, frequency = model_of(table, attributes=()), model_of(table, head="frequency")
    new = {"attribute_predictor.weight", "attribute_predictor.bias"}
    assert model_of(table).state_dict().keys() - plain.state_dict().keys() == new
    for model in (plain.eval(), frequency.eval()):
        assert "loss_refine_att" not in model.loss_names and "attribute_entries" not in model.denominator_names
        outputs = model(batch.images, batch.sizes, batch.targets)
        assert "attribute_scores" not in model.postprocess(outputs, batch.sizes, batch.sizes)[0]


def test_the_loss_is_the_published_one_over_annotated_objects(table, batch):
    model = model_of(table).train()
    outputs = model(batch.images, batch.sizes, batch.targets)
    losses, _ = model.criterion(outputs, batch.targets, as_denominators(model.denominators(batch.targets)))
    ids = torch.cat([t["attributes"][t["iscrowd"] == 0] for t in batch.targets])
    expected = mean(*attribute_loss(outputs["attribute_logits"], ids, [len(ids)]))[0]
    torch.testing.assert_close(losses["loss_refine_att"], expected)
    assert model.denominators(batch.targets)["attribute_entries"] == 6 * (len(ids) - 1), "5 names and background"
    losses["loss_refine_att"].backward()
    for name in ("attribute_predictor", "box_features"):
        assert next(model.get_submodule(name).parameters()).grad.abs().sum() > 0


def test_detections_learn_the_attributes_of_what_they_overlap(table, batch, monkeypatch):
    model = model_of(table, "sgdet").train()
    found = [{"boxes": t["boxes"] + 1.0, "labels": t["labels"], "logits": torch.zeros(len(t["labels"]), 5),
              "boxes_per_class": t["boxes"][:, None].expand(-1, 5, 4)} for t in batch.targets]  # fmt: skip
    found[1]["boxes"] = found[1]["boxes"] + 500.0  # overlap nothing
    monkeypatch.setattr(model.detector, "detect_with_logits", lambda *_, **__: found)
    learned = model(batch.images, batch.sizes, batch.targets)["batch"].attributes
    expected = [t["attributes"] for t in batch.targets]
    assert torch.equal(torch.cat(expected[2:]), learned[-sum(map(len, expected[2:])) :])
    assert not learned[: len(expected[0]) + len(expected[1])].any(), "crowd, and nothing"


def test_it_learns_and_the_metric_says_so(table, tmp_path):
    """Six images by heart, from the features of a random backbone."""
    model = model_of(table, detector_options=INNER | {"representation_size": 64})
    batch, evaluator = next(iter(loader_of(table))), make_evaluator(model, table, "toolkit")
    before = evaluator.evaluate(predictions_of(model.eval(), table))
    learning = [*model.attribute_predictor.parameters(), *model.box_features.parameters()]
    optimizer = torch.optim.Adam(learning, 3e-3)
    with torch.no_grad():
        maps, sizes_hw = model.detector.features(batch.images, batch.sizes)
        pooled = model.detector.box_pool(dict(maps), [t["boxes"] for t in batch.targets], list(sizes_hw))
    ids = torch.cat([t["attributes"] for t in batch.targets])
    for _ in range(300):
        loss = mean(*attribute_loss(model.attribute_predictor(model.box_features(pooled)), ids, [len(ids)]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    predictions = predictions_of(model, table)
    after = evaluator.evaluate(predictions)
    assert before["attribute_R_precision"] < 0.7 < 0.95 < after["attribute_R_precision"] <= 1
    assert f"R-precision {after['attribute_R_precision']:.3f}" in evaluator.describe(after, predictions)
    model.save_final(tmp_path, table.categories)
    again = load_detector_folder(tmp_path)[0]
    assert again.attributes == ATTRIBUTES
    assert torch.equal(again.attribute_predictor.weight, model.attribute_predictor.weight)
    found = best_first(predictions[1])
    named = [len(entry["attributes"]) for entry in detections_as_json(found, table.categories, ATTRIBUTES)]
    assert named == (found["attribute_scores"] > 0.5).sum(1).tolist() and any(named)


def test_evaluation_without_boxes_or_with_other_attributes(table):
    model = model_of(table, "sgdet").eval()
    assert not any("attribute_scores" in p for p in predictions_of(model, table).values()), "1.6 GB of VG150, unused"
    predictions = predict_dataset(model, loader_of(table), "cpu", score_threshold=0.2).by_image
    assert all(len(p["attribute_scores"]) == len(p["boxes"]) for p in predictions.values()), "as predict.py asks"
    assert "attribute_R_precision" not in make_evaluator(model, table, "toolkit").evaluate(predictions)
    with pytest.raises(BadInput, match="attributes.*'rings'.*training data.*'red'"):
        make_evaluator(model_of(table, attributes=NAMES), table, "toolkit")
    make_evaluator(model_of(table, attributes=()), table, "toolkit")


def test_r_precision_counts_the_k_best_of_each_object():
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.2, 0.1, 0.9], [0.5, 0.5, 0.5]])
    ids = np.array([[1, 3, 0], [3, 0, 0], [0, 0, 0]])
    nothing = np.zeros((0, 3), np.int64), torch.zeros(0, 3)
    assert attribute_r_precision([ids, nothing[0]], [scores, nothing[1]]) == 2 / 3
    assert attribute_r_precision([ids[2:]], [scores[2:]]) is None
    assert attribute_r_precision([np.array([[2, 0, 1]])], [scores[2:]]) == 0, "the list ends at 0; ties: lower id"
