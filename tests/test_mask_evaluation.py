"""COCO's metrics of masks, and predictions with masks: of a detector, as columns, in a file."""

import contextlib
import io
import json
from dataclasses import dataclass
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from mask_data import coco_document, pixels_of, random_masks, with_masks
from PIL import Image
from places import ROOT
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from report_data import SIZE, table_of
from torch import nn

from scripts import evaluate, predict, report, train_faster_rcnn
from toolkit.base.batch import Batch
from toolkit.base.errors import BadInput
from toolkit.base.masks import Rle, bitmap, rles_of, tight_boxes
from toolkit.data.annotations import ImageRow
from toolkit.data.pipeline import val_transform, validation_loader
from toolkit.data.segmentations import shape_of
from toolkit.data.table import Category, LabelledImages
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.evaluation.draw import Mark, draw_marks, picture_of, picture_with_boxes
from toolkit.evaluation.predict_dataset import memory_needed, predict_dataset
from toolkit.evaluation.predictions import boxes_of, joined, write_predictions
from toolkit.evaluation.shown_metrics import COCO_METRICS
from toolkit.models import DetectorOptions, build_detector
from toolkit.models.detector import Detector
from toolkit.run.best import Best
from toolkit.run.command_line import parse_config
from toolkit.run.validation import check_metric
from toolkit.tools.predict.in_tiles import flipped, tiled
from toolkit.tools.predict.open import open_predictor
from toolkit.tools.predict.outputs import write_outputs
from toolkit.tools.predict.predictor import Predictor, of_classes, own_predict
from toolkit.tools.predictions_file import read_predictions
from toolkit.tools.report.evaluation_display import shown_evaluation
from toolkit.tools.report.facts import RunFacts
from toolkit.tools.report.gallery import PictureMaker, images, mistakes
from toolkit.tools.report.judgement import judge
from toolkit.tools.report.write import write_comparison, write_page
from toolkit.tools.trackers.weights_and_biases import _image

NAMES = [f"segm_{name}" for name in COCO_METRICS]


def plain_pycocotools(folder, table, predictions):
    """The twelve numbers of masks as anybody gets them from files; None for its -1."""
    file = write_predictions(folder / "found.json", predictions, table)
    results = json.loads(file.read_text())
    for entry in results:
        del entry["bbox"]  # else loadRes takes the area of the box for that of the mask
    coco = COCO()
    coco.dataset = coco_document(table)
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
        run = COCOeval(coco, coco.loadRes(results), "segm")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return {name: None if v == -1 else float(v) for name, v in zip(NAMES, run.stats, strict=True)}


@pytest.mark.parametrize("seed", range(24))
def test_masks_are_judged_as_by_pycocotools(tmp_path, seed):
    """With crowds, empty masks, ties, images without objects or predictions, and areas that are not the pixels'."""
    table, predictions = random_masks(tmp_path, 12, 1 + seed % 4, seed, scores=5 if seed % 2 else 1000, dets=40)
    ours = CocoEvaluator(table).evaluate(predictions)
    assert ours == pytest.approx(CocoEvaluator(table, "pycocotools").evaluate(predictions), abs=1e-12)  # classes too
    assert {k: ours[k] for k in NAMES} == pytest.approx(plain_pycocotools(tmp_path, table, predictions), abs=1e-12)
    boxes = table_of(tmp_path / "boxes", [[]] * 12)
    assert "segm_AP" not in CocoEvaluator(boxes).evaluate(predictions)  # a table without masks


def test_more_than_a_hundred_masks_of_a_class(tmp_path):
    table, predictions = random_masks(tmp_path, 2, 1, seed=5, dets=3)
    pixels = torch.from_numpy(bitmap(table.row(0)["masks"][0], SIZE)).bool()
    shifted = torch.stack([pixels.roll(shift % 7, 0) for shift in range(130)])
    many = {"boxes": np.tile([10.0, 10, 50, 50], (130, 1)), "scores": np.linspace(0.1, 0.9, 130),
            "labels": np.zeros(130, int), "masks": rles_of(shifted)}  # fmt: skip
    predictions[table.image_ids()[0]] = many
    ours = CocoEvaluator(table).evaluate(predictions)
    assert ours["segm_AR100"] > 0
    assert {k: ours[k] for k in NAMES} == pytest.approx(plain_pycocotools(tmp_path, table, predictions), abs=1e-12)


def test_masks_and_boxes_are_judged_apart(tmp_path):
    """Two objects in one box: the masks tell them apart; an object without a mask is a crowd."""
    box, lone = [10, 10, 50, 50], [100, 20, 140, 60]
    table = table_of(tmp_path, [[(box, 0), (box, 0), (lone, 0, True)], []], draw=False)
    upper, lower, in_crowd = pixels_of([10, 10, 50, 30], [10, 30, 50, 50], [110, 30, 130, 50])
    masks = rles_of(torch.stack([upper, lower, in_crowd]))
    masked = with_masks(table, [[masks[0], masks[1], None], []])
    found = {"boxes": torch.tensor([box, box, [110, 30, 130, 50]]).float(), "scores": torch.tensor([0.9, 0.8, 0.95]),
             "labels": torch.zeros(3, dtype=torch.int64), "masks": masks}  # fmt: skip
    nothing = {"boxes": torch.zeros(0, 4), "scores": torch.zeros(0), "labels": torch.zeros(0, dtype=torch.int64)}
    evaluator = CocoEvaluator(masked)
    result = evaluator.evaluate({10: found, 11: nothing})
    assert result["segm_AP"] == 1 and result["segm_AP/cat"] == 1 and result["segm_AP/dog"] is None
    assert evaluator.mask_matches.right.tolist() == [False, True, True]
    text = evaluator.describe(result, {10: found, 11: nothing})
    assert "mask AP50" in text and "masks:  AP 1.000" in text
    swapped = {**found, "masks": [masks[0], masks[0], masks[2]]}
    result = evaluator.evaluate({10: swapped, 11: nothing})
    assert result["bbox_AP50"] == 1 and result["segm_AP50"] < 0.6
    # Without any prediction the metrics exist, so that `eval.metric_for_best` can be checked before training.
    assert evaluator.evaluate({10: nothing | {"masks": []}, 11: nothing})["segm_AP"] == 0
    assert "segm_AP" not in evaluator.evaluate({10: nothing, 11: nothing}) and evaluator.mask_matches is None

    with pytest.raises(BadInput, match=r"image 10: its mask has 7 x 9 pixels \(height x width\); expected 120 x 160"):
        evaluator.evaluate({10: {**found, "masks": [Rle((7, 9), b"o1"), *masks[1:]]}, 11: nothing})
    with pytest.raises(BadInput, match="image 10: 3 boxes, 2 masks"):
        evaluator.evaluate({10: {**found, "masks": masks[:2]}, 11: nothing})
    with pytest.raises(BadInput, match="image 11: 3 boxes, 0 masks"):
        evaluator.evaluate({10: found, 11: {key: found[key] for key in nothing}})


def test_file_of_predictions_with_masks(tmp_path):
    table, predictions = random_masks(tmp_path, 6, 2, seed=3)
    file = write_predictions(tmp_path / "found.json", predictions, table)
    read = read_predictions(file, table).predictions
    expected = boxes_of(predictions, table.image_ids().tolist())
    assert list(read.extra["masks"]) == list(expected.extra["masks"])
    evaluate = CocoEvaluator(table).evaluate
    assert evaluate(read) == evaluate(predictions)

    entries = json.loads(file.read_text())
    entries[0]["segmentation"] = [[1.0, 1.0, 20.0, 1.0, 20.0, 30.0]]  # another program's polygons
    file.write_text(json.dumps(entries))
    (first,) = [read_predictions(file, table).predictions.extra["masks"][0]]
    assert bitmap(first, SIZE).sum() == pytest.approx(0.5 * 19 * 29, rel=0.1)
    for entry in entries:  # COCO's own form of results of segmentation
        del entry["bbox"]
    file.write_text(json.dumps(entries))
    without = read_predictions(file, table).predictions
    assert without.xyxy[0].tolist() == [1, 1, 20, 30]  # the corners of the polygon
    assert np.array_equal(without.xyxy[1:], tight_boxes(without.extra["masks"][1:], SIZE))

    entries[0]["segmentation"] = {"size": [3, 3], "counts": [4]}
    file.write_text(json.dumps(entries))
    with pytest.raises(BadInput, match="detection 0: .* mask cannot be used: the run lengths cover 4") as said:
        read_predictions(file, table)
    assert len(str(said.value)) < 500
    entries[0]["segmentation"] = [[0, 0, 60, 60] * 10_000]
    file.write_text(json.dumps(entries))
    with pytest.raises(BadInput, match="detection 0: its outline is 1200000 pixels long"):
        read_predictions(file, table)

    entries[1]["bbox"] = [1, 1, 2, 2]
    del entries[1]["segmentation"]
    entries[2]["bbox"] = [1, 1, 2, 2]
    entries[2]["segmentation"]["counts"] = "\x05"
    file.write_text(json.dumps(entries))
    with pytest.raises(BadInput) as caught:
        read_predictions(file, table)
    assert "detection 1: has no segmentation" in str(caught.value) and "detection 2: " in str(caught.value)


@dataclass
class PasterOptions(DetectorOptions):
    masks: bool = False
    """Predict masks."""


class Paster(Detector):
    """Finds as many boxes as the image's id says, each with a mask of 2 x 2 probabilities."""

    Options = PasterOptions
    predicts_masks = True
    loss_names = ("loss",)
    divided_by = "images"

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.pasted = []

    def forward(self, images, sizes, targets=None):
        return {}

    def postprocess(self, outputs, sizes, orig_sizes, score_threshold=0.0, top_k=100):
        found = []
        for number, _ in enumerate(orig_sizes):
            masks = torch.rand(3 * number, 2, 2)
            found.append({"boxes": torch.rand(len(masks), 4), "scores": torch.rand(len(masks)),
                          "labels": torch.zeros(len(masks), dtype=torch.int64), "masks": masks})  # fmt: skip
        return found

    def paste_masks(self, masks, boxes_xyxy, size_hw):
        self.pasted.append(len(masks))
        pixels = torch.zeros(len(masks), *size_hw, dtype=torch.bool)
        pixels[:, :2, :2] = masks > 0.5
        return pixels


def test_masks_of_a_detector_become_run_lengths(monkeypatch):
    detector = Paster()
    targets = [{"image_id": number, "orig_size": torch.tensor([40, 30 + number])} for number in range(3)]
    batch = Batch(torch.zeros(3, 3, 8, 8, dtype=torch.uint8), torch.full((3, 2), 8), targets)
    monkeypatch.setattr("toolkit.evaluation.predict_dataset.PASTED_BYTES", 40 * 32 * 4)  # four at a time
    asked = []
    original = detector.postprocess

    def remembered(self, *arguments, **options):
        asked.extend(original(*arguments, **options))
        return asked

    detector.postprocess = MethodType(remembered, detector)
    found = predict_dataset(detector, [batch], "cpu").by_image
    assert [len(each["masks"]) for each in found.values()] == [0, 3, 6] and detector.pasted == [3, 4, 2]
    for number, each in found.items():
        for mask, probabilities in zip(each["masks"], asked[number]["masks"], strict=True):
            assert mask.size_hw == (40, 30 + number)
            assert np.array_equal(bitmap(mask, mask.size_hw)[:2, :2], probabilities > 0.5)
    assert "GB" in memory_needed([(2, found[2])], 10**7)


@pytest.mark.parametrize(
    ("words", "of_file", "expected"),
    [
        ([], {}, "segm_AP"),
        ([], {"eval": {"metric_for_best": "ema/bbox_AP"}}, "ema/segm_AP"),  # a file for boxes
        ([], {"eval": {"metric_for_best": "bbox_AP50"}}, "bbox_AP50"),
        ([], {"eval": {"metric_for_best": "bbox_AP"}, "model": {"masks": True}}, "bbox_AP"),
        (["--eval.metric_for_best", "bbox_AP"], {}, "bbox_AP"),
        (["--model.masks", "false"], {}, "bbox_AP"),
    ],
)
def test_masks_select_the_best_checkpoint(tmp_path, words, of_file, expected):
    file = tmp_path / "settings.yaml"
    file.write_text(json.dumps(of_file))
    words = ["--model.masks", "true", *words, "--config", str(file)]
    config = parse_config(train_faster_rcnn.Config, ["--model.architecture", f"{__name__}:Paster", *words])
    assert config.eval.metric_for_best == expected


def test_metric_of_masks_is_known_before_training(tmp_path):
    table, _ = random_masks(tmp_path, 3, 1)
    detector = Paster()
    t = SimpleNamespace(detector=detector, ema=SimpleNamespace(is_on=False), loss_weights=SimpleNamespace(row_names=()))
    t.validation = SimpleNamespace(evaluator=CocoEvaluator(table), best=Best("segm_AP"))
    check_metric(t)
    detector.predicts_masks = False
    with pytest.raises(BadInput, match="segm_AP: no such metric"):
        check_metric(t)


def test_predictor_gives_pixels_and_writes_run_lengths(tmp_path):
    categories = [Category(3, "cat")]
    predictor = Predictor("test", categories, own_predict(Paster(), None), masks=True)
    pictures = [torch.zeros(3, 20, 30, dtype=torch.uint8)] * 3
    found = predictor(pictures, 0.0)
    assert [each["masks"].shape for each in found] == [(0, 20, 30), (3, 20, 30), (6, 20, 30)]
    assert found[2]["masks"].dtype == torch.bool and not found[2]["masks"][:, 2:].any()
    picture = picture_with_boxes(pictures[2], found[2], ["cat"], smallest_side=30)  # from pixels

    detections = predictor.predict(pictures, 0.0)[2]
    entries = predictor.as_json(detections)["detections"]
    assert entries[0]["segmentation"]["size"] == [20, 30]
    again = rle_of_json(entries[0]["segmentation"])
    assert again == detections["masks"][0]
    assert picture.size == picture_with_boxes(pictures[2], detections, ["cat"], smallest_side=30).size

    only = of_classes(predictor, ["cat"]).predict(pictures, 0.0)[2]
    assert len(only["masks"]) == 6 and isinstance(only["masks"][0], Rle)
    for changed in (lambda: tiled(predictor, 10), lambda: flipped(predictor)):
        with pytest.raises(BadInput, match="masks are not merged"):
            changed()

    rows = [ImageRow(7, str(tmp_path / "a.png"), 30, 20)]
    boxes = joined([detections], [7])
    labelled = LabelledImages(rows, boxes, categories)
    write_outputs({"images": [], "errors": []}, labelled, ["a.png"], ["coco"], tmp_path / "out")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [entry["segmentation"] for entry in results] == [entry["segmentation"] for entry in entries]


def rle_of_json(segmentation):
    return Rle(tuple(segmentation["size"]), segmentation["counts"].encode())


def test_masks_are_drawn():
    image = torch.zeros(3, 60, 80, dtype=torch.uint8)
    (mask,) = rles_of(pixels_of([20, 10, 60, 50], size=(60, 80)))
    marks = [Mark([20, 10, 60, 50], "#FF0000", mask=mask), Mark([2, 2, 8, 8], "#00FF00", dashed=True)]
    picture = picture_of(image)
    draw_marks(picture, marks)
    inside, outside = picture.getpixel((40, 30)), picture.getpixel((70, 30))
    assert inside[0] in range(90, 115) and inside[1:] == (0, 0) and outside == (0, 0, 0)

    outline = picture_of(image)
    draw_marks(outline, [Mark([0, 0, 1, 1], "#FF0000", dashed=True, mask=mask)])
    assert outline.getpixel((40, 30)) == (0, 0, 0) and outline.getpixel((20, 30)) == (255, 0, 0)

    part = picture_of(image[:, :30, :40]).resize((80, 60))  # the upper left quarter, twice as large
    draw_marks(part, [Mark([0, 0, 1, 1], "#FF0000", mask=mask)], scale=2, corner=(20, 10))
    assert part.getpixel((70, 50))[0] in range(90, 115)  # the pixel (55, 35) of the image
    assert part.getpixel((2, 40))[0] > 90 and picture.getpixel((17, 30)) == (0, 0, 0)
    away = picture_of(image)
    draw_marks(away, [Mark([0, 0, 1, 1], "#FF0000", mask=mask)], corner=(60, 50))
    assert away.getpixel((10, 10)) == (0, 0, 0)


def test_pictures_of_an_evaluation_have_masks(tmp_path):
    table, predictions = random_masks(tmp_path, 4, 2, seed=2, draw=True)
    for each in predictions.values():
        each |= {name: torch.from_numpy(each[name]) for name in ("boxes", "scores", "labels")}
    with_them = Image.open(CocoEvaluator(table).draw(predictions, 2, tmp_path / "masks.png"))
    for each in predictions.values():
        del each["masks"]
    without = Image.open(CocoEvaluator(table).draw(predictions, 2, tmp_path / "boxes.png"))
    changed = (np.asarray(with_them) != np.asarray(without)).any(axis=2)
    assert with_them.size == without.size and changed.mean() > 0.005


def test_report_of_masks(tmp_path):
    """Thresholds, errors and confusions are those of masks; the numbers of boxes stay beside those of masks."""
    table, predictions = random_masks(tmp_path, 20, 2, seed=9, draw=True)
    judged = judge("masks", predictions, table, draws=20)
    row = CocoEvaluator(table).evaluate(predictions)
    for name in COCO_METRICS:
        assert judged.numbers[name] == row[f"bbox_{name}"] and judged.numbers[f"segm_{name}"] == row[f"segm_{name}"]
    low, high = judged.intervals["segm_AP"]
    assert low <= judged.numbers["segm_AP"] <= high
    boxes = {id_: {k: v for k, v in each.items() if k != "masks"} for id_, each in predictions.items()}
    of_boxes = judge("boxes", boxes, table, draws=20)
    assert of_boxes.numbers["AP"] == judged.numbers["AP"] and of_boxes.voc == judged.voc
    assert judged.errors.cost != of_boxes.errors.cost and judged.overall.total == of_boxes.overall.total

    page = write_page(tmp_path / "report", judged, RunFacts(), "masks").read_text()
    assert "segm_AP" in page and "IoU of masks 0.5" in page
    content = json.loads((tmp_path / "report" / "report.json").read_text())
    assert content["classes"]["class 0"]["segm_AP"] == pytest.approx(row["segm_AP/class 0"], nan_ok=True)
    assert content["threshold"] == judged.threshold and len(content["segm_ap_by_iou"]) == 10
    plain = write_page(tmp_path / "boxes", of_boxes, RunFacts(), "boxes").read_text()
    assert "segm_" not in plain and "masks 0.5" not in plain

    write_comparison(tmp_path / "both", [judged, of_boxes])
    compared = json.loads((tmp_path / "both" / "report.json").read_text())
    assert {d["metric"] for d in compared["differences"]} <= set(COCO_METRICS)  # what both have
    write_comparison(tmp_path / "twice", [judged, judged])
    assert "segm_AP" in (tmp_path / "twice" / "index.html").read_text()


def test_pictures_of_a_report_have_masks(tmp_path):
    table, predictions = random_masks(tmp_path, 6, 1, seed=1, draw=True)
    judged = judge("masks", predictions, table, draws=2)
    drawn = []
    maker = PictureMaker(table, tmp_path)
    maker.of = lambda image, marks, *_, **__: drawn.append(marks) or ""
    images(judged, maker)
    mistakes(judged, maker)
    marks = [mark for some in drawn for mark in some]
    assert marks and all(isinstance(mark.mask, Rle) for mark in marks)


def test_trackers_get_masks(tmp_path):
    import wandb

    table, predictions = random_masks(tmp_path, 6, 2, seed=6, draw=True)
    evaluator = CocoEvaluator(table)
    scores = evaluator.evaluate(predictions)
    display = shown_evaluation(table, evaluator.mask_matches, scores, 3, None)
    (first, *_) = [shown for shown in display.images if shown.truth_map.any()]
    position = table.image_ids().tolist().index(first.image_id)
    row = table.row(position)
    for shape, label in zip(row["masks"], row["objects"]["category"], strict=True):
        labels = first.truth_map[bitmap(shape, SIZE) > 0]
        assert not len(labels) or (labels > 0).all() and (1 + label in labels or len(row["masks"]) > 1)
    image = _image(wandb, first, display.class_names)
    layers = image._masks
    assert set(layers) == {"ground_truth", "predictions"}
    assert layers["predictions"]._val["class_labels"] == {0: "background", 1: "class 0", 2: "class 1"}
    assert np.array_equal(layers["predictions"]._val["mask_data"], first.found_map)

    boxes = shown_evaluation(table, evaluator.matches, scores, 1, None).images[0]
    assert boxes.truth_map is None and not _image(wandb, boxes, display.class_names)._masks


def test_scripts_judge_the_masks_of_another_program(tmp_path, capsys):
    table, predictions = random_masks(tmp_path / "data", 6, 2, seed=3, draw=True)
    truth = tmp_path / "data" / "truth.json"
    document = coco_document(table)
    for annotation in document["annotations"]:
        if isinstance(annotation["segmentation"], list) and annotation["segmentation"][0][0] == 3.1:
            annotation["segmentation"] = [[0, 0, 9, 0, 9, 9, 0, 9]]  # instead of no pixel, which the data check refuses
    truth.write_text(json.dumps(document))
    results = write_predictions(tmp_path / "results.json", predictions, table)
    results.with_suffix(".about.json").unlink()
    words = [str(results), "--split", str(truth), "--image-dir", str(tmp_path / "data")]
    assert evaluate.main([*words, "--expect.segm_AP", "0.01", "--save", str(tmp_path / "again.json")]) == 0
    printed = capsys.readouterr().out
    assert "mask AP50" in printed and '"segm_AP50": ' in printed

    report.main([str(tmp_path / "again.json"), "--out", str(tmp_path / "report")])  # opens the data as they were named
    content = json.loads((tmp_path / "report" / "report.json").read_text())
    assert f'"segm_AP": {content["numbers"]["segm_AP"]}' in printed
    capsys.readouterr()

    for annotation in document["annotations"]:
        del annotation["segmentation"]
    truth.write_text(json.dumps(document))
    assert evaluate.main(words) == 0
    printed = capsys.readouterr().out
    assert "only its boxes are judged, not its masks: " in printed and "segm_AP" not in printed


def test_a_detector_of_masks_from_its_folder_to_all_files(tmp_path, capsys):
    torch.manual_seed(0)
    settings = yaml.safe_load((ROOT / "configs/faster_rcnn/shapes.yaml").read_text())["model"]
    settings |= {"masks": True, "score_threshold": 0.0}
    table, _ = random_masks(tmp_path / "data", 3, 2, draw=True, size=(96, 96))
    detector = build_detector(**settings, class_names=table.class_names).eval()
    detector.save_final(tmp_path / "final", table.categories)
    flags = ["--score-threshold", "0.05", "--max-detections", "5", "--device", "cpu"]
    found = tmp_path / "found"
    words = [str(tmp_path / "final"), str(tmp_path / "data" / "0.png"), "--out", str(found), "--polygons", *flags]
    assert predict.main([*words, "--format", "json", "coco", "csv", "yolo"]) == 0
    assert "csv has only the boxes: it cannot hold the masks" in capsys.readouterr().out
    (image,) = json.loads((found / "predictions.json").read_text())["images"]
    results = json.loads((found / "results.json").read_text())
    annotated = json.loads((found / "dataset.json").read_text())["annotations"]
    assert len(image["detections"]) == len(results) == 5
    predictor = open_predictor(tmp_path / "final", max_detections=5)
    pixels = predictor(Image.open(tmp_path / "data" / "0.png"), 0.05)
    for row, (one, result) in enumerate(zip(image["detections"], results, strict=True)):
        mask = rle_of_json(result["segmentation"])
        assert np.array_equal(bitmap(mask, (96, 96)), pixels["masks"][row])
        again, faults = shape_of(one["segmentation"])
        assert not faults and np.array_equal(bitmap(again, (96, 96)), pixels["masks"][row])  # to the pixel
    for annotation in annotated:
        assert annotation["area"] == bitmap(rle_of_json(annotation["segmentation"]), (96, 96)).sum()
    assert predict.main([*words, "--tile", "48", "--overwrite"]) == 2
    assert "masks are not merged" in capsys.readouterr().err

    data = tmp_path / "data"
    (data / "truth.json").write_text(json.dumps(coco_document(table)))
    words = [str(tmp_path / "final"), "--split", str(data / "truth.json"), "--image-dir", str(data)]
    assert evaluate.main(words) == 0
    assert '"segm_AP50": ' in capsys.readouterr().out

    loader = validation_loader(table, val_transform(128, None, None), batch_size=2, workers=0, stride=detector.stride)
    by_image = predict_dataset(detector, loader, "cpu", top_k=10).by_image
    row = CocoEvaluator(table).evaluate(by_image)
    assert row["segm_AP"] is not None and all(len(each["masks"]) == len(each["boxes"]) for each in by_image.values())
    assert by_image[10]["masks"][0].size_hw == (96, 96)


def test_run_lengths_are_those_of_pycocotools():
    rng = np.random.default_rng(0)
    for height, width in ((1, 1), (1, 7), (7, 1), (5, 6), (8, 3)):
        for share in (0, 0.1, 0.5, 0.9, 1):
            pixels = rng.random((40, height, width)) < share
            expected = coco_mask.encode(np.asfortranarray(pixels.transpose(1, 2, 0).astype(np.uint8)))
            found = rles_of(torch.from_numpy(pixels))
            assert [mask.as_coco() for mask in found] == expected
    column = torch.zeros(1, 4, 5)
    column[0, :, 2:4] = 7.0  # whole columns, not 0 inside
    assert rles_of(column)[0].as_coco() == coco_mask.encode(np.asfortranarray(column[0].numpy() > 0).astype(np.uint8))
    assert rles_of(torch.zeros(0, 4, 5)) == []
