"""Scene graphs on detectors other than Faster R-CNN."""

from contextlib import nullcontext

import pytest
import torch
from contract import assert_resolved_options_build_it_again
from scene_graph_data import cut_objects, losses_of, shapes_table

from toolkit.base.box_ops import pairwise_iou
from toolkit.base.errors import BadInput
from toolkit.data.pipeline import val_transform, validation_loader
from toolkit.detectors.scene_graphs.detector_below import FOUND_IOU, distribution_logits, scores_of
from toolkit.detectors.scene_graphs.start import count_table
from toolkit.models import build_detector
from toolkit.models.detector import Detector, check_contract
from toolkit.models.final import load_detector_folder

TRANSFORMER = {"backbone": "test_resnet", "d_model": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 2,
               "ffn_dim": 32, "num_queries": 20}  # fmt: skip
HYBRID = TRANSFORMER | {"hidden_expansion": 0.5, "num_denoising": 4, "freeze": "none"}
SMALL = {
    "yolov3": {"backbone": "lcnet_035", "head_channels": [8, 8, 8]},
    "rt_detr_v2": HYBRID,
    "ssd": {"backbone": "lcnet_035", "strides": [8, 16, 32], "channels": [16] * 3, "aspect_ratios": [[2.0]] * 3},
    "detr": TRANSFORMER,
    "conditional_detr": TRANSFORMER,
    "deformable_detr": TRANSFORMER,
    "dab-detr": TRANSFORMER,
    "d_fine": HYBRID,
    "deimv2": HYBRID,
    "ecdet": {name: value for name, value in HYBRID.items() if name not in ("backbone", "freeze")},
    "rf_detr": {"d_model": 32, "heads": 2, "encoder_layers": 4, "decoder_layers": 1, "ffn_dim": 32, "num_queries": 12},
    "lw_detr": {"size": "tiny", "d_model": 32, "heads": 2, "encoder_layers": 2, "decoder_layers": 1, "ffn_dim": 32,
                "num_queries": 12},
    "ssdlite": {"backbone": "lcnet_035", "strides": [8, 16, 32], "channels": [16] * 3, "aspect_ratios": [[2.0]] * 3},
    "ssd300_vgg16": {},
    "ssdlite320_mobilenet_v3_large": {},
}
FAST = ("yolov3", "rt_detr_v2")
SIZES = {"rf_detr": [112, 56], "lw_detr": [64, 128], "ssd300_vgg16": [300, 336],
         "ssdlite320_mobilenet_v3_large": [256, 320]}  # fmt: skip
OPTIONS = {"hidden_dim": 8, "embed_dim": 4, "pairs_per_image": 16, "detections_per_image": 5, "map_channels": 8,
           "representation_size": 16, "score_threshold": 0.0}  # fmt: skip

all_of_them = pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SMALL]
)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return shapes_table(tmp_path_factory.mktemp("shapes"), images=4)


def batch_of(table, architecture):
    """Two images; the second without an object."""
    transform = val_transform(SIZES.get(architecture, [64, 96]), [], 0)
    loader = validation_loader(table, transform, batch_size=2, workers=0, stride=1)
    batch = next(iter(loader))
    cut_objects(batch.targets[1], 0)
    return batch


def model_of(table, architecture, **options):
    torch.manual_seed(0)
    model = build_detector("scene_graph", class_names=table.class_names, predicates=list(table.predicates),
                           detector_options={"architecture": architecture, **SMALL[architecture]},
                           **OPTIONS | options)  # fmt: skip
    model.learn_counts(*count_table(table))
    return model


@all_of_them
def test_graphs_are_trained_on_it_and_found(table, tmp_path, architecture):
    """Every mode, on a frozen detector and on one that is trained too; saved, and loaded again."""
    batch = batch_of(table, architecture)
    for mode, freeze in (("predcls", "detector"), ("sgcls", "detector"), ("sgdet", "detector"), ("sgdet", "none")):
        model = model_of(table, architecture, mode=mode, freeze=freeze).train()
        losses = losses_of(model, batch)[0]
        assert losses.keys() <= set(model.loss_names) and all(loss.isfinite() for loss in losses.values())
        sum(losses.values()).backward()
        trained = {name.split(".")[0] for name, p in model.detector.named_parameters() if p.grad is not None}
        assert trained == {"laterals"} | ({"inner"} if freeze == "none" else set())
        assert all(p.grad is not None for p in model.detector.laterals.parameters()), "every map is looked at"
        model.eval()
        with torch.no_grad():
            graphs = model.postprocess(model(batch.images, batch.sizes, batch.targets), batch.sizes, batch.sizes)
        for graph, target in zip(graphs, batch.targets, strict=True):
            assert 0 < len(graph["boxes"]) <= 5 if mode == "sgdet" else len(graph["boxes"]) == len(target["boxes"])
    assert_resolved_options_build_it_again(
        model, table.class_names, ("pretrained", "detector", "word_vectors", "norm_momentum", "backbone")
    )
    model.save_final(tmp_path, table.categories)
    again = load_detector_folder(tmp_path)[0].eval()
    with torch.no_grad():  # as `again`: with targets more pairs are computed at once, and a product may round otherwise
        graphs, found = (
            m.postprocess(m(batch.images, batch.sizes), batch.sizes, batch.sizes) for m in (model, again)
        )
    for ours, theirs in zip(graphs, found, strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@all_of_them
def test_predictions_are_those_of_the_detector_and_maps_lie_over_the_image(table, architecture):
    """The best of all predictions is the best detection; each map has the stride that is announced for it."""
    model = model_of(table, architecture, mode="sgdet", freeze="detector").eval()
    batch, inner = batch_of(table, architecture), model.detector.inner
    with torch.no_grad():
        maps, _ = model.detector.features(batch.images, batch.sizes)
        found = inner.postprocess(inner(batch.images, batch.sizes), batch.sizes, batch.sizes, 0.0, 1)
    for boxes, scores, detection in zip(maps.boxes, maps.scores, found, strict=True):
        assert boxes.dtype == scores.dtype == torch.float32 and (scores >= 0).all() and (scores <= 1).all()
        torch.testing.assert_close(scores.max(), detection["scores"][0])
        rows, labels = (scores > scores.max() - 1e-6).nonzero().unbind(1)  # untrained, some have scores that are equal
        limits = torch.tensor(batch.images.shape[:1:-1] * 2)
        boxes, best = (each.clamp(min=0).minimum(limits) for each in (boxes[rows], detection["boxes"][:1]))
        same = (boxes - best).abs().amax(1) < 1e-3
        assert detection["labels"][0] in labels[same]
    for stride, level in maps.items():
        expected = [-(-side // int(stride)) for side in batch.images.shape[-2:]]
        assert list(level.shape[-2:]) == expected and level.shape[1] == OPTIONS["map_channels"]


def test_annotated_boxes_that_were_not_found_are_objects_in_training(table):
    model = model_of(table, "yolov3", mode="sgdet", freeze="detector", score_threshold=0.9)
    batch = batch_of(table, "yolov3")
    boxes = [target["boxes"] for target in batch.targets]
    with torch.no_grad():
        maps, images_hw = model.detector.features(batch.images, batch.sizes)
        assert not any(len(found["boxes"]) for found in model.detector.detect_with_logits(maps, images_hw))
        found = model.detector.detect_with_logits(maps, images_hw, top_k=3, further_boxes=boxes)
        for image, given in zip(found, boxes, strict=True):
            assert sorted(image["boxes"].tolist()) == sorted(given[:3].tolist())
        maps.scores[:] = 0.95  # now everything is found: nothing is added that a detection overlaps
        found = model.detector.detect_with_logits(maps, images_hw, top_k=500, further_boxes=boxes)
        plain = model.detector.detect_with_logits(maps, images_hw, top_k=500)
    for image, alone, given in zip(found, plain, boxes, strict=True):
        missed = ~(pairwise_iou(given, alone["boxes"]) >= FOUND_IOU).any(1)
        assert len(image["boxes"]) == len(alone["boxes"]) + int(missed.sum())


def test_scores_as_a_distribution():
    scores = torch.tensor([[0.5, 0.2], [0.9, 0.6], [0.0, 0.0], [1.0, 0.0]])
    found = distribution_logits(scores).softmax(1)
    expected = torch.tensor([[0.3, 0.5, 0.2], [0.0, 0.6, 0.4], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)


def test_a_given_box_has_the_scores_of_the_prediction_that_overlaps_it():
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [50, 50, 60, 60]])
    scores = torch.tensor([[0.1, 0.0], [0.0, 0.8], [0.7, 0.0]])
    given = torch.tensor([[0.0, 0, 10, 10], [52, 52, 60, 60], [58, 58, 70, 70]])
    assert scores_of(boxes, scores, given).tolist() == scores[[1, 2, 2]].tolist()
    assert scores_of(boxes, scores, given[:0]).shape == (0, 2)


class Blind(Detector):
    """Keeps the contract, and shows no maps."""

    loss_names, divided_by = ("loss",), "images"

    def __init__(self, class_names, options):
        super().__init__()

    forward = denominators = criterion = postprocess = lambda self, *_: {}


def test_a_detector_without_maps_is_refused(table):
    with pytest.raises(BadInput, match="test_any_detector:Blind has no feature maps"):
        build_detector("scene_graph", class_names=table.class_names, predicates=["on"],
                       detector_options={"architecture": f"{__name__}:Blind"})  # fmt: skip


@pytest.mark.parametrize(("announced", "problems"), [
    ({}, []),
    ({"forward": Detector.forward, "postprocess": Detector.postprocess}, ["has no forward()", "has no decode()"]),
    ({"loss_names": (), "divided_by": {}, "stride": 0}, ["no loss_names", "no divided_by", "stride is 0"]),
    ({"loss_names": ("loss", "other"), "divided_by": {"loss": "images"}}, ["names no denominator for other"]),
    ({"predicts_masks": True}, ["has no paste_masks()"]),
])  # fmt: skip
def test_everything_that_breaks_the_contract_is_named_at_once(announced, problems):
    detector = type("Broken", (Blind,), announced)(["a"], None)
    with pytest.raises(BadInput) if problems else nullcontext() as error:
        check_contract(detector)
    found = error.value.problems if problems else []
    assert [words in problem for words, problem in zip(problems, found, strict=True)] == [True] * len(problems)
    with pytest.raises(BadInput, match="Linear is not a detector"):
        check_contract(torch.nn.Linear(1, 1))


def test_further_columns_of_decode_are_chosen_along():
    """The third of four rows has no detection, the fourth too low a score; masks follow their boxes."""
    boxes = torch.arange(32.0).view(2, 4, 4)
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.1], [0.5, 0.4, 0.3, 0.2]])
    labels = torch.tensor([[0, 1, -1, 1], [-1, 0, 1, 1]])
    masks = torch.arange(2 * 4 * 6.0).view(2, 4, 2, 3)
    decode = {"decode": lambda self, *_: (boxes, scores, labels, {"masks": masks}), "postprocess": Detector.postprocess}
    detector = type("WithMasks", (Blind,), decode)(["a", "b"], None)
    first, second = detector.postprocess({}, None, None, score_threshold=0.25, top_k=2)
    assert [list(each) for each in (first, second)] == [["boxes", "scores", "labels", "masks"]] * 2
    assert torch.equal(first["masks"], masks[0, :2]) and torch.equal(first["boxes"], boxes[0, :2])
    assert torch.equal(second["masks"], masks[1, 1:3]) and torch.equal(second["scores"], scores[1, 1:3])
