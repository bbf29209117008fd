"""COCO metrics, why AP is 0, and predictions of a data set on one and several ranks."""

import contextlib
import io
from functools import partial
from types import MethodType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_on_ranks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from report_data import ground_truth_as_predictions, random_case, table_of
from test_text import NASTY_NAMES
from torch import nn
from torchvision.ops import box_convert

from toolkit.base.batch import Batch
from toolkit.base.errors import BadInput
from toolkit.base.text import columns
from toolkit.data.sampling import EvalSampler
from toolkit.data.table import Category
from toolkit.detectors.detr.detr_criterion import DetrCriterion
from toolkit.evaluation.coco import CocoEvaluator, check_ground_truth, coco_row, per_class_table
from toolkit.evaluation.matches import class_keys, match_predictions
from toolkit.evaluation.predict_dataset import memory_needed, predict_dataset
from toolkit.evaluation.predictions import write_predictions
from toolkit.step.losses import LossWeights
from toolkit.tools.report.explain import explain_zero_ap
from toolkit.tools.writers import write_coco

NAMES = ["bbox_AP", "bbox_AP50", "bbox_AP75", "bbox_APs", "bbox_APm", "bbox_APl",
         "bbox_AR1", "bbox_AR10", "bbox_AR100", "bbox_ARs", "bbox_ARm", "bbox_ARl"]  # fmt: skip
HEIGHT, WIDTH = 480, 640


def make_table(folder, images, num_classes=3, ids=None):
    """images: per image (boxes xyxy, labels) or (boxes, labels, iscrowd); ids are 7, 10, 13, ... unless given."""
    objects = [list(zip(*columns, strict=True)) for columns in images]
    ids = ids or [7 + 3 * i for i in range(len(images))]
    names, folder = [f"class{k}" for k in range(num_classes)], folder / str(len(list(folder.iterdir())))
    return table_of(folder, objects, names, draw=False, size=(HEIGHT, WIDTH), ids=ids)


def random_boxes(rng, count):
    corners = rng.uniform(0, 300, (count, 2))
    return np.concatenate([corners, corners + rng.uniform(4, 180, (count, 2))], axis=1).astype(np.float32)


def plain_pycocotools(folder, table, predictions):
    """The twelve numbers as anybody would get them, of saved files with loadRes; None for its -1."""
    file = write_predictions(folder / "found.json", predictions, table)
    write_coco(table.labelled(), folder / "truth.json")
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(folder / "truth.json")
        run = COCOeval(truth, truth.loadRes(str(file)), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return {name: None if v == -1 else float(v) for name, v in zip(NAMES, run.stats, strict=True)}


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), num_classes=st.integers(1, 4), scores=st.sampled_from([6, 1000]))
def test_both_backends_and_plain_pycocotools_agree(tmp_path_factory, seed, num_classes, scores):
    """With crowds, ties, images without boxes or predictions, more than 10 predictions of a class."""
    folder = tmp_path_factory.mktemp("random")
    table, predictions = random_case(folder, 12, num_classes, seed, scores=scores, dets=60)
    ours = CocoEvaluator(table).evaluate(predictions)
    assert ours == pytest.approx(CocoEvaluator(table, "pycocotools").evaluate(predictions), abs=1e-12)  # classes too
    assert list(ours)[:12] == NAMES
    plain = plain_pycocotools(folder, table, predictions)
    assert {k: ours[k] for k in NAMES} == pytest.approx(plain, abs=1e-12)


def test_more_than_a_hundred_detections(tmp_path):
    """500 objects of one class, found in the order of their scores: a hundred count, as in pycocotools."""
    rng = np.random.default_rng(0)
    boxes = random_boxes(rng, 500)
    table = make_table(tmp_path, [(boxes, [0] * 500), (boxes[:3], [1, 1, 1])])
    predictions = ground_truth_as_predictions(table)
    predictions[7]["scores"] = torch.linspace(1, 0.1, 500)
    result = CocoEvaluator(table).evaluate(predictions)
    assert result == pytest.approx(CocoEvaluator(table, "pycocotools").evaluate(predictions), abs=1e-12)
    assert {k: result[k] for k in NAMES} == pytest.approx(plain_pycocotools(tmp_path, table, predictions), abs=1e-12)
    assert result["AR100/class0"] == pytest.approx(0.2)  # 100 of 500
    assert coco_row(match_predictions(predictions, table, (1, 10, 500)))["bbox_AR500"] == pytest.approx(1)


@pytest.mark.parametrize("backend", ["toolkit", "pycocotools"])
def test_edges(tmp_path, backend, capsys):
    box, other = [10, 10, 60, 60], [100, 100, 220, 260]
    found = {"boxes": torch.tensor([box]), "scores": torch.tensor([0.5]), "labels": torch.tensor([0])}
    nothing = {key: value[:0] for key, value in found.items()}

    no_predictions = CocoEvaluator(make_table(tmp_path, [([box], [0]), ([], [])]), backend)
    result = no_predictions.evaluate({7: nothing, 10: nothing})
    assert result["bbox_AP"] == result["bbox_AR100"] == result["AP/class0"] == 0
    assert result["AP/class1"] is None and result["bbox_APl"] is None

    no_boxes = CocoEvaluator(make_table(tmp_path, [([], [])]), backend)
    assert set(no_boxes.evaluate({7: nothing}).values()) == {None}
    assert set(no_boxes.evaluate({7: found}).values()) == {None}

    only_crowd = CocoEvaluator(make_table(tmp_path, [([box], [0], [1])]), backend)
    assert set(only_crowd.evaluate({7: found}).values()) == {None}

    # class 0 is perfect and alone in the mean: class 2 has no ground truth, and is not 0
    table = make_table(tmp_path, [([box], [0]), ([other], [0], [1])])
    wrong_class = {"boxes": torch.tensor([other]), "scores": torch.tensor([0.9]), "labels": torch.tensor([2])}
    result = CocoEvaluator(table, backend).evaluate({7: found, 10: wrong_class})
    assert result["bbox_AP"] == result["AP/class0"] == 1.0 and result["AP/class2"] is None
    assert capsys.readouterr() == ("", "")  # no progress of the packages

    by_name = CocoEvaluator(make_table(tmp_path, [([box], [0])], num_classes=1, ids=["img7"]), backend)
    assert by_name.evaluate({"img7": found})["bbox_AP"] == 1.0


def test_image_ids_must_match(tmp_path):
    table = make_table(tmp_path, [([], [])] * 8)
    predictions = ground_truth_as_predictions(table)
    del predictions[7]
    predictions["stranger"] = predictions[10]
    with pytest.raises(BadInput) as error:
        CocoEvaluator(table).evaluate(predictions)
    assert "1 of 8 images have no prediction, among them 7" in str(error.value)
    assert "'stranger'" in str(error.value)
    uneven = {"boxes": torch.zeros(2, 4), "scores": torch.zeros(1), "labels": torch.zeros(0)}
    with pytest.raises(BadInput, match="13: 2 boxes, 1 scores, 0 labels"):
        CocoEvaluator(table).evaluate(ground_truth_as_predictions(table) | {13: uneven})
    with pytest.raises(BadInput, match="pycocotools"):
        CocoEvaluator(table, backend="fast")


def test_unusable_predictions_are_left_out_with_a_warning(tmp_path, caplog):
    table = make_table(tmp_path, [([[10, 10, 60, 60]], [0])])
    good = ground_truth_as_predictions(table)
    box = good[7]["boxes"]
    bad = {"boxes": torch.cat([box, box, box * torch.nan]), "scores": torch.tensor([0.5, 0.9, 0.9]),
           "labels": torch.tensor([0, 3, 0])}  # fmt: skip
    assert CocoEvaluator(table).evaluate({7: bad}) == CocoEvaluator(table).evaluate(good)
    assert "1 predictions have a box or score that is not finite" in caplog.text
    assert "1 predictions have a label outside 0..2" in caplog.text


def test_ground_truth_gives_ap_one_or_is_an_error(tmp_path):
    rng = np.random.default_rng(1)
    boxes = random_boxes(rng, 8)
    twins = np.concatenate([boxes, boxes[:2]])  # exact duplicates are found too
    table = make_table(tmp_path, [(twins, [0] * 5 + [1] * 5, [0, 1] * 5), ([], []), (boxes, [1] * 8)])
    assert CocoEvaluator(table).evaluate(ground_truth_as_predictions(table))["bbox_AP"] == 1.0
    notes = check_ground_truth(table)
    assert len(notes) == 1 and "class2" in notes[0]
    crowded = make_table(tmp_path, [(random_boxes(rng, 120), [0] * 120)], num_classes=1)
    assert any("up to 120 boxes" in note for note in check_ground_truth(crowded))
    assert "no boxes to find in 2 images" in check_ground_truth(make_table(tmp_path, [([], [])] * 2))[0]
    flipped = make_table(tmp_path, [([[10, 10, 60, 60], [90, 90, 70, 120]], [0, 1])])
    with pytest.raises(BadInput, match=r"(?s)not all found.*image 7: box \[90.0, 90.0, 70.0, 120.0\]"):
        check_ground_truth(flipped)


def test_per_class_table(tmp_path):
    table = make_table(tmp_path, [([[10, 10, 60, 60]] * 2, [0, 1], [0, 1]), ([[0, 0, 30, 30]], [0])])
    result = CocoEvaluator(table).evaluate(ground_truth_as_predictions(table))
    lines = per_class_table(result, table).splitlines()
    assert lines[0].split() == ["class", "images", "boxes", "AP", "AP50", "AR100"]
    assert lines[2].split() == ["class0", "2", "2", "1.000", "1.000", "1.000"]
    assert lines[3].split() == ["class1", "0", "0", "-", "-", "-"]  # its only box is a crowd
    assert lines[-1].split()[:4] == ["all", "2", "2", "1.000"]
    assert len({len(line) for line in lines}) == 1


@pytest.fixture(scope="module")
def zero_case(tmp_path_factory):
    rng = np.random.default_rng(3)
    images = [(random_boxes(rng, 5), rng.integers(0, 2, 5).tolist()) for _ in range(10)]
    return make_table(tmp_path_factory.mktemp("zero"), images)


SIZE = torch.tensor([WIDTH, HEIGHT, WIDTH, HEIGHT])
to_xywh, to_cxcywh = (partial(box_convert, in_fmt="xyxy", out_fmt=name) for name in ("xywh", "cxcywh"))

ELSEWHERE = random_boxes(np.random.default_rng(5), 5)
CORRUPTIONS = {
    "normalised (0..1, xyxy)": {"boxes": lambda b: b / SIZE},
    "normalised (0..1, cxcywh": {"boxes": lambda b: to_cxcywh(b) / SIZE},
    "look like xywh": {"boxes": to_xywh},
    "look like cxcywh": {"boxes": to_cxcywh},
    "look like yxyx": {"boxes": lambda b: b[:, [1, 0, 3, 2]]},
    "another scale": {"boxes": lambda b: b * 0.37},
    "512 x 512": {"boxes": lambda b: b * 512 / SIZE},
    "have no width or height": {"boxes": lambda b: b[:, [2, 3, 0, 1]]},
    "outside their image": {"boxes": lambda b: b + 5000 * (1 + torch.arange(len(b)))[:, None]},
    "boxes are tiny": {"boxes": lambda b: b[:, [0, 1, 0, 1]] + torch.tensor([0, 0, 2.0, 2.0])},
    "not finite": {"boxes": lambda b: b * float("nan")},
    "no score is above 0": {"scores": torch.zeros_like},
    "scores are equal": {"scores": lambda s: s * 0 + 0.3, "boxes": lambda b: b[:, [1, 0, 3, 2]]},
    "off by one": {"labels": lambda c: c + 1},
    "labels are outside": {"labels": lambda c: c + 3},
    "collapsed to one class": {"labels": torch.zeros_like, "boxes": lambda b: b[:, [1, 0, 3, 2]]},
    "only 0% with their class": {"labels": lambda c: 1 - c},
    "not been trained long enough": {
        "boxes": lambda b: torch.from_numpy(random_boxes(np.random.default_rng(5), len(b)))
    },
}


@pytest.mark.parametrize("words", CORRUPTIONS)
def test_a_corruption_is_named(zero_case, words):
    predictions = ground_truth_as_predictions(zero_case)
    rng = np.random.default_rng(0)
    for found in predictions.values():
        found["scores"] = torch.from_numpy(rng.uniform(0.1, 0.9, len(found["scores"])))
        found["boxes"] = found["boxes"] + torch.from_numpy(rng.normal(0, 1.0, found["boxes"].shape))
        for key, change in CORRUPTIONS[words].items():
            found[key] = change(found[key])
    causes = explain_zero_ap(predictions, zero_case)
    assert any(words in cause for cause in causes), causes
    assert len(causes) <= 3


def test_too_early_to_tell(zero_case, tmp_path):
    """The same boxes in another format are named with evidence: not after few steps, of few objects, of low scores."""

    def in_another_format(predictions, factor=1.0, scores=1.0):
        return {i: p | {"boxes": to_cxcywh(p["boxes"]) * factor,
                        "scores": torch.linspace(0.1, 0.9, len(p["scores"])) * scores}
                for i, p in predictions.items()}  # fmt: skip

    truth = ground_truth_as_predictions(zero_case)
    found = in_another_format(truth)
    for step in (5000, None):
        assert "look like cxcywh" in explain_zero_ap(found, zero_case, step)[0]
    assert explain_zero_ap(found, zero_case, step=30)[0].startswith("too early to tell: 30 optimizer steps")
    unsure, broken = in_another_format(truth, scores=0.01), in_another_format(truth, factor=torch.nan)
    assert "too early to tell: the highest score" in explain_zero_ap(unsure, zero_case)[0]
    assert "not finite" in explain_zero_ap(broken, zero_case, step=30)[0]  # what needs no evidence is said at once
    few = make_table(tmp_path, [(random_boxes(np.random.default_rng(0), 6), [0] * 6) for _ in range(3)])
    wrong = in_another_format(ground_truth_as_predictions(few))
    assert "too early to tell: 18 objects" in explain_zero_ap(wrong, few)[-1]
    assert "too early" in CocoEvaluator(zero_case).describe({"bbox_AP": 0.0}, found, 30).splitlines()[-1]
    empty = {i: {key: value[:0] for key, value in p.items()} for i, p in truth.items()}
    assert "no image has a single prediction" in explain_zero_ap(empty, zero_case)[0]
    assert "no ground-truth boxes" in explain_zero_ap({7: empty[7]}, make_table(tmp_path, [([], [])]))[0]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), queries=st.sampled_from([20, 300]), spread=st.floats(0, 0.1))
def test_a_detector_that_has_learned_nothing_has_no_mistake(zero_case, seed, queries, spread):
    """Hundreds of boxes, nearly the same in every image: some lie on each object in some format."""
    rng = np.random.default_rng(seed)
    boxes, scores = to_cxcywh(torch.from_numpy(random_boxes(rng, queries))).numpy(), rng.uniform(0.1, 0.3, queries)
    same = {i: {"boxes": boxes * (1 + rng.uniform(-spread, spread, boxes.shape)), "scores": scores,
                "labels": rng.integers(0, 3, queries)} for i in zero_case.image_ids().tolist()}  # fmt: skip
    wrong = ("look like", "look normalised", "another scale", "off by one", "another order")
    for cause in explain_zero_ap(same, zero_case):
        assert not any(words in cause for words in wrong), cause


def test_names_of_every_kind_in_tables_and_keys(tmp_path):
    names = NASTY_NAMES
    table = make_table(tmp_path, [([[10, 10, 60, 60]], [k]) for k in range(len(names))], num_classes=len(names))
    table.categories = tuple(Category(k, name) for k, name in enumerate(names))
    keys = class_keys(table)
    assert len(set(keys)) == len(names)
    assert all(columns(key) <= 100 and "\n" not in key and "\x1b" not in key for key in keys)
    result = CocoEvaluator(table).evaluate(ground_truth_as_predictions(table))
    assert {f"AP/{key}" for key in keys} <= result.keys()
    lines = per_class_table(result, table).splitlines()
    assert len(lines) == len(names) + 3 and len({columns(line) for line in lines}) == 1
    assert class_keys(make_table(tmp_path, [([], [])])) == ["class0", "class1", "class2"]


class TinyDetector(nn.Module):
    """A detector in small: four queries from the mean colour of the image, with DETR's real criterion."""

    denominator_names, metric_names = ("boxes", "class_weights"), ("class_error",)
    divided_by = {"loss_ce": "class_weights", "loss_bbox": "boxes", "loss_giou": "boxes"}
    to_keep = staticmethod(dict)

    def __init__(self, num_classes=3, num_queries=4):
        super().__init__()
        self.num_queries = num_queries
        self.head = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Tanh())
        self.frozen = nn.BatchNorm1d(16).eval()
        self.classes = nn.Linear(16, num_queries * (num_classes + 1))
        self.places = nn.Linear(16, num_queries * 4)
        self.loss = DetrCriterion(num_classes, num_layers=1)
        self.loss_names = self.loss.loss_names

    def forward(self, images, sizes, targets=None):
        assert not self.training
        assert len(images)  # an empty batch never gets here
        hidden = self.frozen(self.head(images.float().mean((2, 3)) / 255))
        logits = self.classes(hidden).unflatten(1, (self.num_queries, -1))
        return {"logits": logits, "boxes": self.places(hidden).unflatten(1, (self.num_queries, 4)).sigmoid()}

    def criterion(self, outputs, targets, denominators):
        return self.loss(outputs["logits"][None], outputs["boxes"][None], targets, denominators)

    def denominators(self, targets):
        return self.loss.denominators(targets, self.num_queries)

    def postprocess(self, outputs, sizes, orig_sizes, score_threshold=0.0, top_k=100):
        scores, labels = outputs["logits"].softmax(-1)[..., :-1].max(-1)
        boxes, keep = outputs["boxes"] * orig_sizes[:, [1, 0, 1, 0]][:, None], scores > score_threshold
        columns = zip(boxes, scores, labels, keep, strict=True)
        return [{"boxes": b[k], "scores": s[k], "labels": c[k]} for b, s, c, k in columns]


def tiny_batches(batch_size, rank=0, world_size=1, num_images=7, num_classes=3, most_boxes=5):
    """The batches of one rank of a dataset of 8 x 8 images: `most_boxes` in the first, then fewer and fewer."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (num_images, 3, 8, 8), dtype=torch.uint8, generator=generator)
    corners = torch.rand(num_images, 5, 2, generator=generator) * 4
    targets = []
    for i in range(num_images):
        count = max(0, most_boxes - i)
        boxes = torch.cat([corners[i, :count], corners[i, :count] + 2], 1)
        targets.append({"image_id": 7 + 3 * i, "boxes": boxes, "labels": torch.arange(count) % num_classes,
                        "iscrowd": torch.zeros(count, dtype=torch.int64), "size": torch.tensor([8, 8]),
                        "orig_size": torch.tensor([HEIGHT, WIDTH])})  # fmt: skip
    batches = []
    for keys in EvalSampler(num_images, batch_size, rank, world_size):
        chosen = [key.index for key in keys]
        batches.append(Batch(images[chosen], torch.tensor([[8, 8]] * len(chosen)), [targets[i] for i in chosen]))
    return batches


WEIGHTS = {"loss_ce": 1, "loss_bbox": 5, "loss_giou": 2}


def tiny_detector(num_classes=3):
    torch.manual_seed(0)
    detector = TinyDetector(num_classes)
    detector.train()
    detector.frozen.eval()
    return detector, LossWeights(detector.loss_names, {}, WEIGHTS)


def test_memory_that_runs_out_in_an_evaluation_names_the_batch_and_the_setting(monkeypatch):
    detector, _ = tiny_detector()

    def forward(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(TinyDetector, "forward", forward)
    with pytest.raises(BadInput) as raised:
        predict_dataset(detector, tiny_batches(3), "cpu")
    said = str(raised.value)
    assert said.startswith("out of memory: CUDA out of memory") and "image ids [7, 10, 13]" in said
    assert "Lower --eval.batch_size_per_device" in said and "--data.batch" not in said


def test_validation_loss_is_that_of_the_dataset_as_one_batch():
    detector, weights = tiny_detector()
    whole, single = (predict_dataset(detector, tiny_batches(b), "cpu", loss_weights=weights) for b in (7, 1))
    assert detector.training and detector.head.training and not detector.frozen.training
    assert whole.interrupted == single.interrupted == 0
    assert list(whole.by_image) == list(single.by_image) == [7 + 3 * i for i in range(7)]
    assert all(p["boxes"].shape == (4, 4) and not p["boxes"].requires_grad for p in single.by_image.values())
    assert single.losses == pytest.approx(whole.losses, rel=1e-6)

    (batch,) = tiny_batches(7)
    counts = detector.denominators(batch.targets)
    with torch.no_grad():
        outputs = detector.eval()(batch.images, batch.sizes)
        losses, metrics = detector.criterion(outputs, batch.targets, counts)
    weighted = {name: factor * float(losses[name]) for name, factor in WEIGHTS.items()}
    expected = weighted | {f"{name}_unscaled": float(loss) for name, loss in losses.items()}
    expected |= {name: float(torch.divide(*pair)) for name, pair in metrics.items()} | {"loss": sum(weighted.values())}
    assert single.losses == pytest.approx(expected, rel=1e-6)

    # eleven batches without a single box: losses that stay 0 have no denominator to be found
    background = [b for b in tiny_batches(1) if not len(b.targets[0]["labels"])]
    losses = predict_dataset(detector, background, "cpu", loss_weights=weights).losses
    assert losses["loss_bbox"] == losses["loss_giou"] == 0 and losses["loss_ce"] > 0 and "class_error" not in losses


def test_a_signal_ends_the_evaluation():
    detector, polled = tiny_detector()[0], iter([0, 0, 15])
    assert predict_dataset(detector, tiny_batches(1), "cpu", stop=lambda: next(polled))[:3] == ({}, {}, 15)
    assert next(polled, None) is None and detector.training


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_evaluation_is_in_float32_whatever_the_training_is_in(precision):
    """Accelerate puts autocast around the `forward` of a prepared module; it is there again afterwards."""
    seen = []

    class Watched(TinyDetector):
        def forward(self, *inputs):
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(*inputs)

    detector = Watched(3)
    detector.forward = MethodType(torch.autocast("cpu", precision)(type(detector).forward), detector)
    patched = detector.forward
    with torch.autocast("cpu", precision):
        predict_dataset(detector, tiny_batches(3), "cpu")
    assert seen and not any(seen)
    assert detector.forward is patched
    detector.eval()(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.tensor([[8, 8]]))
    assert seen[-1], "training goes on in half precision"


def test_memory_is_told_before_it_is_needed():
    class Long(list):
        def __len__(self):
            return 10**6

    detector, _ = tiny_detector()
    said = []
    predict_dataset(detector, tiny_batches(3), "cpu", say=said.append)
    assert said == []
    predict_dataset(detector, Long(tiny_batches(3)), "cpu", description="evaluation at step 9", say=said.append)
    (text,) = said
    bytes_of_image = 4 * (4 * 4 + 4 + 8) + 3 * 500  # of four boxes
    assert f"3,000,000 images will take about {bytes_of_image * 3 / 1000:.1f} GB" in text and "at step 9" in text
    items = [(i, {"boxes": torch.zeros(100, 4), "scores": torch.zeros(100)}) for i in range(3)]
    assert memory_needed(items, 1000) == "" and "raise eval.score_threshold" in memory_needed(items, 10**10)


# (images, classes, boxes of the first image, score threshold)
ON_RANKS = {
    "uneven, one batch empty on one rank": (7, 3, 5, 0.0),
    "one image, nothing on the other rank": (1, 3, 5, 0.0),
    "one class": (5, 1, 5, 0.0),
    "no ground truth": (3, 3, 0, 0.0),
    "no predictions": (5, 3, 5, 1.0),
}


def predict_case(case, rank=0, world_size=1):
    images, classes, boxes, threshold = ON_RANKS[case]
    detector, weights = tiny_detector(classes)
    batches = tiny_batches(2, rank, world_size, images, classes, boxes)
    return predict_dataset(detector, batches, "cpu", loss_weights=weights, score_threshold=threshold)


def cases_of_rank():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = {case: predict_case(case, rank, world_size)[:3] for case in ON_RANKS}
    detector, batches = tiny_detector()[0], tiny_batches(2, rank, world_size)
    return results | {"stopped": predict_dataset(detector, batches, "cpu", stop=lambda: 12 * rank)[:3]}


def test_two_ranks_give_what_one_gives():
    ranks = run_on_ranks(cases_of_rank, 2)
    assert [results.pop("stopped") for results in ranks] == [({}, {}, 12)] * 2, "a signal on one ends it on both"
    for case, (images, _, boxes, threshold) in ON_RANKS.items():
        alone = predict_case(case)
        (first, first_losses, _), (second, second_losses, _) = (results[case] for results in ranks)
        assert second == {}, "the main process alone looks at them"
        assert first.keys() == alone.by_image.keys() and len(first) == images
        for image_id, expected in alone.by_image.items():
            torch.testing.assert_close(first[image_id], expected, msg=case)
        assert first_losses == second_losses, case  # to the last bit
        assert first_losses == pytest.approx(alone.losses, rel=1e-6), case
        assert (threshold < 1) == any(len(found["scores"]) for found in first.values())
        assert boxes or first_losses["loss_bbox"] == 0
