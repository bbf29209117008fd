"""Scene graphs on detectors other than Faster R-CNN."""

import pytest
import torch
from contract import assert_resolved_options_build_it_again
from detectors_below import FAST, SMALL_BELOW
from scene_graph_data import cut_objects, losses_of, shapes_table
from torch.testing import assert_close

from toolkit.base.box_ops import pairwise_iou
from toolkit.data.pipeline import val_transform, validation_loader
from toolkit.detectors.scene_graphs.detector_below import FOUND_IOU, distribution_logits, scores_of
from toolkit.detectors.scene_graphs.start import count_table
from toolkit.models import build_detector
from toolkit.models.final import load_detector_folder

SIZES = {
    "rf_detr": [112, 56],
    "lw_detr": [64, 128],
    "ssd300_vgg16": [300, 336],
    "ssdlite320_mobilenet_v3_large": [256, 320],
}
OPTIONS = {
    "hidden_dim": 8,
    "embed_dim": 4,
    "pairs_per_image": 16,
    "detections_per_image": 5,
    "map_channels": 8,
    "representation_size": 16,
    "score_threshold": 0.0,
}
ARCHITECTURES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SMALL_BELOW]
all_of_them = pytest.mark.parametrize("architecture", ARCHITECTURES)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return shapes_table(tmp_path_factory.mktemp("shapes"), images=4)


def batch_of(table, architecture):
    """Two images; the second without an object."""
    transform = val_transform(SIZES.get(architecture, [64, 96]), [], 0)
    batch = next(
        iter(
            validation_loader(
                table,
                transform,
                batch_size=2,
                workers=0,
                stride=1,
            )
        )
    )
    cut_objects(batch.targets[1], 0)
    return batch


def model_of(table, architecture, **options):
    torch.manual_seed(0)
    model = build_detector(
        "scene_graph",
        class_names=table.class_names,
        predicates=list(table.predicates),
        detector_options={"architecture": architecture, **SMALL_BELOW[architecture]},
        **OPTIONS | options,
    )
    model.learn_counts(*count_table(table))
    return model


@torch.no_grad()
def graphs_of(model, batch, targets=None):
    return model.postprocess(model(batch.images, batch.sizes, targets), batch.sizes, batch.sizes)


MODES = [
    ("predcls", "detector"),
    ("sgcls", "detector"),
    ("sgdet", "detector"),
    ("sgdet", "none"),
]


@all_of_them
def test_graphs_are_trained_on_it_and_found(table, tmp_path, architecture):
    """Every mode, on a frozen detector and on one that is trained too; saved, and loaded again."""
    batch = batch_of(table, architecture)
    for mode, freeze in MODES:
        model = model_of(table, architecture, mode=mode, freeze=freeze).train()
        losses, _ = losses_of(model, batch)
        assert losses.keys() <= set(model.loss_names)
        assert all(loss.isfinite() for loss in losses.values())
        sum(losses.values()).backward()
        trained = {name.split(".")[0] for name, p in model.detector.named_parameters() if p.grad is not None}
        assert trained == {"laterals"} | ({"inner"} if freeze == "none" else set())
        assert all(p.grad is not None for p in model.detector.laterals.parameters()), "every map is looked at"
        for graph, target in zip(graphs_of(model.eval(), batch, batch.targets), batch.targets, strict=True):
            count = len(graph["boxes"])
            assert 0 < count <= 5 if mode == "sgdet" else count == len(target["boxes"])
    without_value = (
        "pretrained",
        "detector",
        "word_vectors",
        "norm_momentum",
        "backbone",
    )
    assert_resolved_options_build_it_again(model, table.class_names, without_value)
    model.save_final(tmp_path, table.categories)
    again = load_detector_folder(tmp_path)[0].eval()
    # without targets, with which more pairs are computed at once, and a product may round otherwise
    for ours, theirs in zip(graphs_of(model, batch), graphs_of(again, batch), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@all_of_them
def test_predictions_are_those_of_the_detector_and_maps_lie_over_the_image(table, architecture):
    """The best of all predictions is the best detection; each map has the stride that is announced for it."""
    model = model_of(table, architecture, mode="sgdet", freeze="detector").eval()
    batch = batch_of(table, architecture)
    inner = model.detector.inner
    with torch.no_grad():
        maps, _ = model.detector.features(batch.images, batch.sizes)
        found = inner.postprocess(
            inner(batch.images, batch.sizes),
            batch.sizes,
            batch.sizes,
            0.0,
            1,
        )
    limits = torch.tensor(batch.images.shape[:1:-1] * 2)
    for boxes, scores, detection in zip(maps.boxes, maps.scores, found, strict=True):
        assert boxes.dtype == scores.dtype == torch.float32
        assert scores.min() >= 0
        assert scores.max() <= 1
        assert_close(scores.max(), detection["scores"][0])
        rows, labels = (scores > scores.max() - 1e-6).nonzero().unbind(1)  # untrained, some have scores that are equal
        best = detection["boxes"][:1].clamp(min=0).minimum(limits)
        same = (boxes[rows].clamp(min=0).minimum(limits) - best).abs().amax(1) < 1e-3
        assert detection["labels"][0] in labels[same]
    for stride, level in maps.items():
        assert list(level.shape[-2:]) == [-(-side // int(stride)) for side in batch.images.shape[-2:]]
        assert level.shape[1] == OPTIONS["map_channels"]


def test_annotated_boxes_that_were_not_found_are_objects_in_training(table):
    below = model_of(
        table,
        "yolov3",
        mode="sgdet",
        freeze="detector",
        score_threshold=0.9,
    ).detector
    batch = batch_of(table, "yolov3")
    boxes = [target["boxes"] for target in batch.targets]
    with torch.no_grad():
        maps, images_hw = below.features(batch.images, batch.sizes)
        assert not any(len(found["boxes"]) for found in below.detect_with_logits(maps, images_hw))
        found = below.detect_with_logits(maps, images_hw, top_k=3, further_boxes=boxes)
        for image, given in zip(found, boxes, strict=True):
            assert sorted(image["boxes"].tolist()) == sorted(given[:3].tolist())
        maps.scores[:] = 0.95  # now everything is found: nothing is added that a detection overlaps
        found = below.detect_with_logits(maps, images_hw, top_k=500, further_boxes=boxes)
        plain = below.detect_with_logits(maps, images_hw, top_k=500)
    for image, alone, given in zip(found, plain, boxes, strict=True):
        missed = ~(pairwise_iou(given, alone["boxes"]) >= FOUND_IOU).any(1)
        assert len(image["boxes"]) == len(alone["boxes"]) + int(missed.sum())


def test_scores_as_a_distribution():
    scores = torch.tensor([[0.5, 0.2], [0.9, 0.6], [0.0, 0.0], [1.0, 0.0]])
    found = distribution_logits(scores).softmax(1)
    expected = torch.tensor(
        [
            [0.3, 0.5, 0.2],
            [0.0, 0.6, 0.4],
            [1.0, 0.0, 0.0],
            [0.0, 1.0, 0.0],
        ]
    )
    assert_close(found, expected, rtol=0, atol=5e-6)


def test_a_given_box_has_the_scores_of_the_prediction_that_overlaps_it():
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [50, 50, 60, 60]])
    scores = torch.tensor([[0.1, 0.0], [0.0, 0.8], [0.7, 0.0]])
    given = torch.tensor([[0.0, 0, 10, 10], [52, 52, 60, 60], [58, 58, 70, 70]])
    assert scores_of(boxes, scores, given).tolist() == scores[[1, 2, 2]].tolist()
    assert scores_of(boxes, scores, given[:0]).shape == (0, 2)
