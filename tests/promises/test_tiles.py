"""Large pictures in tiles: each object once, the same in training, evaluation and prediction, on any number of ranks.

TRAINED_RUN=runs/detr makes the slow test judge a run of train_detr.py that is there; without it, one is trained.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from documents import row_of
from launching import ROOT, SCRIPTS, rows, small_settings
from PIL import Image
from processes import run_on_ranks
from report_data import table_of

from toolkit.base import progress
from toolkit.base.box_ops import pairwise_iou
from toolkit.base.distributed import world
from toolkit.base.errors import BadInput
from toolkit.base.masks import Masks, rectangle, rle, rles_of
from toolkit.data.pipeline import validation_loader
from toolkit.data.table import Category
from toolkit.data.table_cache import write_rows
from toolkit.data.tiling import Tiling
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.evaluation.matches import match_predictions
from toolkit.evaluation.predict_dataset import predict_dataset
from toolkit.evaluation.predictions import best_first
from toolkit.models.detector import Detector
from toolkit.models.joined_tiles import merged
from toolkit.tools.predict.in_tiles import flipped, in_tiles, tiled
from toolkit.tools.predict.open import open_predictor
from toolkit.tools.predict.predict_each import predict_table
from toolkit.tools.predict.predictor import Predictor
from toolkit.tools.report.detection_errors import tide_errors
from toolkit.tools.shapes import CLASSES as SHAPES
from toolkit.tools.shapes import draw_scene

CLASSES = [
    Category(0, "red"),
    Category(1, "green"),
    Category(2, "blue"),
]
TILING = Tiling((64, 80), 0.3)
TILES = ("--data.tile", 40, "--data.tile_visible", 0.4, "--data.tile_empty", 0.5)
PREDICT = ROOT / "scripts" / "predict.py"
EVALUATE = ROOT / "scripts" / "evaluate.py"


class Refused(NamedTuple):
    """Arguments that are refused, and what is said. script: its number."""

    script: int
    arguments: tuple
    said: str


REFUSED = [
    Refused(0, (*TILES, "--data.tile_overlap", 0.95), "data.tile_overlap is 0.95"),
    Refused(3, TILES, "data.tile 40: the relations of a scene graph"),
]


# ---- a detector that knows what is in every picture ------------------------------------------------------------------


def rectangles(picture):
    """Boxes and labels of the one-coloured rectangles of a picture; each has a value of its own."""
    boxes = []
    labels = []
    for label, plane in enumerate(picture):
        for value in plane.unique():
            if value:
                rows, columns = (plane == value).nonzero().unbind(1)
                boxes.append(
                    [
                        columns.min(),
                        rows.min(),
                        columns.max() + 1,
                        rows.max() + 1,
                    ]
                )
                labels.append(label)
    return torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4), torch.tensor(labels, dtype=torch.int64)


def masks_of(image, boxes, labels):
    """The masks of the rectangles of a picture."""
    planes = [image[label] for label in labels]
    corners = boxes.long().tolist()
    pixels = [plane == plane[top, left] for plane, (left, top, *_) in zip(planes, corners, strict=True)]
    return rles_of(torch.stack(pixels)) if pixels else []


def oracle(off=0, masks=False):
    """Finds every rectangle, or what a tile leaves of it, to `off` pixels before the border, and is less sure of small
    ones."""

    def predict(images, score_threshold):
        found = []
        for image in images:
            boxes, labels = rectangles(image)
            shapes = {"masks": masks_of(image, boxes, labels)} if masks else {}
            inwards = ((boxes[:, 2:] - boxes[:, :2]) / 4).clamp(max=off)
            boxes[:, :2] += inwards * (boxes[:, :2] == 0)
            boxes[:, 2:] -= inwards * (boxes[:, 2:] == torch.tensor(image.shape[:0:-1]))
            areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
            found.append(
                {
                    "boxes": boxes,
                    "scores": 0.5 + areas.clamp(max=4000) / 10000,
                    "labels": labels,
                }
                | shapes
            )
        return found

    return Predictor("oracle", CLASSES, predict, masks=masks)


def scene(height, width, count, seed, side):
    """uint8 (3, H, W): rectangles that do not overlap, of at most `side` pixels."""
    rng = np.random.default_rng(seed)
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    for value in range(1, count + 1):
        for _ in range(100):
            h, w = rng.integers(side // 3, side, 2)
            y = rng.integers(0, height - h)
            x = rng.integers(0, width - w)
            if not image[:, max(0, y - 2) : y + h + 2, max(0, x - 2) : x + w + 2].any():
                image[int(rng.integers(3)), y : y + h, x : x + w] = value
                break
    return image


def only(predictor, image):
    """The detections of one image."""
    (found,) = predictor.predict([image], 0)
    return found


@pytest.mark.parametrize("off", [0, 2])
@pytest.mark.parametrize("seed", range(2))
def test_every_object_is_found_once_wherever_tiles_end(seed, off):
    """off: a detector does not see to the pixel that a border cuts an object."""
    image = scene(250, 320, 30, seed, side=24)
    expected = only(oracle(off), image)
    found = only(tiled(oracle(off), 128, overlap=0.25), image)
    overlaps = pairwise_iou(expected["boxes"], found["boxes"]) > 0.99
    assert len(found["labels"]) == len(expected["labels"]) >= 25
    assert (overlaps.sum(1) == 1).all()
    assert torch.equal(found["labels"][overlaps.long().argmax(1)], expected["labels"])


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(("seed", "overlap"), [(0, 0.2), (1, 0.5)])
def test_every_object_has_its_whole_mask_wherever_tiles_end(seed, overlap, flip):
    """Objects are up to twice as long as what tiles have in common."""
    image = scene(250, 320, 20, seed, side=64)
    expected = only(oracle(masks=True), image)
    assert len(expected["labels"]) >= 10
    predictor = flipped(oracle(masks=True)) if flip else oracle(masks=True)
    found = only(tiled(predictor, 100, overlap), image)
    assert sorted(mask.counts for mask in found["masks"]) == sorted(mask.counts for mask in expected["masks"])
    overlaps = pairwise_iou(expected["boxes"], found["boxes"]) > 0.99
    assert (overlaps.sum(1) == 1).all()
    nearest = overlaps.long().argmax(1)
    assert torch.equal(found["labels"][nearest], expected["labels"])
    assert [found["masks"][row] for row in nearest.tolist()] == expected["masks"]
    nothing = only(tiled(predictor, 100, overlap), torch.zeros_like(image))
    assert nothing["masks"] == []


def test_tiles_have_the_aspect_of_the_images_of_the_detector():
    seen = set()

    def note(images, score_threshold):
        seen.update(tuple(image.shape[-2:]) for image in images)
        return oracle().predict(images, score_threshold)

    image = scene(200, 320, 30, 3, side=20)
    predictor = replace(
        oracle(),
        predict=note,
        size={"height": 96, "width": 160},
    )
    found = only(tiled(predictor, 160, overlap=0.25), image)
    assert seen == {(96, 160)}
    assert len(found["labels"]) == len(only(oracle(), image)["labels"])


def test_an_object_larger_than_the_overlap_keeps_its_largest_part_only():
    image = torch.zeros(3, 100, 300, dtype=torch.uint8)
    image[0, 20:60, 30:280] = 1
    found = only(tiled(oracle(), 100, overlap=0.2), image)
    assert 1 <= len(found["labels"]) <= 4
    assert (found["labels"] == 0).all()


def test_images_that_fit_in_a_tile_are_seen_as_they_are():
    image = scene(100, 150, 12, 1, side=30)
    plain = only(oracle(), image)["scores"]
    assert torch.equal(only(tiled(oracle(), 150), image)["scores"], plain.sort(descending=True).values)


def test_flips_give_the_same_boxes_once():
    image = scene(100, 150, 12, 1, side=30)
    plain = only(oracle(), image)["boxes"]
    both = only(flipped(oracle()), image)["boxes"]
    assert len(both) == len(plain)
    torch.testing.assert_close(both, plain[pairwise_iou(both, plain).argmax(1)])


@pytest.mark.parametrize(
    ("tile", "overlap"),
    [
        (0, 0.2),
        (64, 0.95),
        (64, -0.1),
    ],
)
def test_tiles_that_cannot_be_are_refused(tile, overlap):
    with pytest.raises(BadInput, match="--tile"):
        tiled(oracle(), tile, overlap)


def test_relations_are_not_joined():
    with pytest.raises(BadInput, match="relations"):
        tiled(replace(oracle(), predicates=["on"]), 64)


# ---- training, evaluation and prediction -----------------------------------------------------------------------------


class Finder(Detector):
    """Finds every rectangle of an image, as `oracle` does, and adds a weak guess in the middle of it."""

    loss_names = ("loss_ce",)
    divided_by = "images"
    stride = 1

    def __init__(self, masks=False):
        super().__init__()
        self.predicts_masks = masks

    def forward(self, images, sizes, targets=None):
        return {"images": [image[:, :h, :w] for image, (h, w) in zip(images, sizes.tolist(), strict=True)]}

    def postprocess(self, outputs, sizes, orig_sizes, score_threshold=0.0, top_k=100):
        found = [guessing(image, self.predicts_masks) for image in outputs["images"]]
        if self.predicts_masks:
            for each in found:
                each["masks"] = Masks.of(each["masks"]).drawn(TILING.tile_hw)
        return [{key: value[:top_k] for key, value in each.items()} for each in found]

    def paste_masks(self, masks, boxes_xyxy, size_hw):
        height, width = size_hw
        return masks[:, :height, :width]


def guessing(image, masks=False):
    found = best_first(only(oracle(masks=masks), image))
    height, width = image.shape[-2:]
    guess = {
        "boxes": torch.tensor([[width / 3, height / 3, width / 2, height / 2]]),
        "scores": torch.tensor([0.01]),
        "labels": torch.tensor([1]),
    }
    both = {key: torch.cat([found[key], guess[key]]) for key in guess}
    if masks:
        both["masks"] = [*found["masks"], rle(rectangle(guess["boxes"][0].tolist()), (height, width))]
    return both


def scenes_as_table(folder, masks=False):
    folder.mkdir(exist_ok=True)
    table_rows = []
    for seed, (height, width) in enumerate(
        (
            (150, 200),
            (90, 60),
            (128, 300),
        )
    ):
        image = scene(height, width, 15, seed, side=40 if masks else 16)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"scene {seed}.png")
        boxes, labels = rectangles(image)
        areas = (boxes[:, 2:] - boxes[:, :2]).prod(1).tolist()
        ids = list(range(100 * seed + 1, 100 * seed + 1 + len(boxes)))
        row = row_of(
            f"scene {seed}",
            boxes.tolist(),
            (width, height),
            labels.tolist(),
            area=areas,
            id=ids,
        )
        table_rows.append(row | ({"masks": masks_of(image, boxes, labels)} if masks else {}))
    return write_rows(
        table_rows, cache_file=folder / "table.json", image_root=folder, name="scenes", categories=CLASSES
    )


def unchanged(image, target, generator):
    return image, target


def judged_scenes(folder, masks=False):
    """The detections of `Finder` on the scenes in `folder`, predicted by all ranks; main process only."""
    table = scenes_as_table(folder / f"{world()[0]}", masks)
    loader = validation_loader(
        table,
        unchanged,
        batch_size=3,
        workers=0,
        stride=1,
        tiling=TILING,
    )
    return predict_dataset(Finder(masks), loader, "cpu", top_k=50).by_image


def assert_same_detections(ones, others):
    for one, other in zip(ones, others, strict=True):
        for key in ("boxes", "scores", "labels"):
            assert torch.equal(one[key], other[key])
        assert one.get("masks") == other.get("masks")


@pytest.mark.parametrize("masks", [False, True])
def test_an_evaluation_in_tiles_finds_what_a_prediction_finds(tmp_path, masks):
    table = scenes_as_table(tmp_path / "0", masks)
    found = judged_scenes(tmp_path, masks)
    metric = "segm_AP" if masks else "bbox_AP"
    predictor = Predictor("guessing", CLASSES, lambda images, _: [guessing(image, masks) for image in images])
    pictures = [table.decode_image(table.row(index)) for index in range(len(table))]
    assert list(found) == table.image_ids().tolist()
    assert_same_detections(found.values(), in_tiles(predictor, TILING).predict(pictures, 0))
    assert CocoEvaluator(table).evaluate(found)[metric] == 1.0
    judged = in_tiles(replace(predictor, max_detections=50), TILING, as_evaluated=True)
    assert CocoEvaluator(table).evaluate(predict_table(judged, table))[metric] == 1.0


@pytest.mark.parametrize("masks", [False, True])
def test_an_evaluation_in_tiles_is_the_same_on_two_ranks(tmp_path, masks):
    found = judged_scenes(tmp_path, masks)
    on_two, nothing = run_on_ranks(judged_scenes, 2, tmp_path, masks)
    assert not nothing
    assert on_two.keys() == found.keys()
    assert_same_detections(found.values(), on_two.values())


def test_long_work_in_tiles_says_how_far_it_is(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    image = scene(250, 320, 10, 0, side=24)
    tiled(oracle(), 128, overlap=0.25, batch_size=10).predict([image, image[:, :100, :100]], 0)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "2 images in tiles: 9 of 10 tiles"
    assert said[-1] == "2 images in tiles: 10 of 10 tiles"
    judged_scenes(tmp_path)
    assert "evaluation: 2 of 10 batches of tiles" in capsys.readouterr().err


# ---- runs; tests/promises/test_resume.py kills and resumes one -------------------------------------------------------


@pytest.fixture(scope="module")
def run(server, data, once):
    """The folder of a run of two steps on tiles of 40 x 40 px of 64 x 64 px."""

    def make(folder):
        args = (*TILES, "--run.output_dir", folder, "--run.max_steps", 2, "--run.eval_every", 2)
        server.run(
            SCRIPTS[0],
            small_settings(SCRIPTS[0], data, args),
            whole=True,
        ).ok()

    return once("tiles", make) / "run"


def test_a_run_on_tiles_is_judged_again_as_it_was(server, run, tmp_path):
    trained = next(row for row in reversed(rows(run)) if "val/bbox_AP" in row)
    again = server.run(EVALUATE, [run, "--weights", "model"]).ok()
    assert "a tile (tile40x40" in again.text
    assert "10 images" in again.text
    for name in ("bbox_AP", "bbox_AR100", "loss"):
        assert again.numbers[name] == trained[f"val/{name}"]


def test_a_run_of_masks_on_tiles_is_judged_again_and_predicts_whole_pictures(server, data, tmp_path):
    script = SCRIPTS[2]
    masks = ("--model.masks", "true", "--model.mask_convs", 1, "--model.mask_channels", 8)
    args = (*TILES, *masks, "--run.output_dir", tmp_path, "--run.max_steps", 2)
    ended = server.run(script, small_settings(script, data, args)).ok()
    trained = next(row for row in reversed(rows(ended.folder)) if "val/segm_AP" in row)
    saved = tmp_path / "found.json"
    again = server.run(EVALUATE, [ended.folder, "--weights", "model", "--save", saved]).ok()
    for name in ("segm_AP", "bbox_AP", "loss_mask", "loss"):
        assert again.numbers[name] == trained[f"val/{name}"]
    assert {tuple(each["segmentation"]["size"]) for each in json.loads(saved.read_text())} == {(64, 64)}
    picture = sorted((data / "val").iterdir())[0]
    words = [ended.folder, picture, "--out", tmp_path / "found", "--score-threshold", 0, "--flip"]
    server.run(PREDICT, words).ok()
    (image,) = json.loads((tmp_path / "found" / "predictions.json").read_text())["images"]
    assert image["detections"][0]["segmentation"]["size"] == [64, 64]
    assert (tmp_path / "found" / image["picture"]).is_file()


def test_an_evaluation_cuts_as_the_run_unless_told_otherwise(server, run, tmp_path):
    file = tmp_path / "found.json"
    saved = [(run / "report" / "predictions.json").read_bytes()]
    for more in (
        [],
        ["--tile", 0],
        ["--tile", 32, "--overlap", 0.1],
    ):
        server.run(EVALUATE, [run, "--save", file, *more]).ok()
        saved.append(file.read_bytes())
    assert saved[0] == saved[1]
    assert len(set(saved)) == 3
    wrong = server.run(EVALUATE, [run, "--tile", -3])
    assert wrong.code == 2
    assert "argument --tile: -3: expected" in wrong.text


def test_a_prediction_cuts_as_the_run_unless_told_otherwise(server, run, data, tmp_path):
    picture = sorted((data / "val").iterdir())[0]
    found = []
    for number, more in enumerate(([], ["--tile", 40], ["--tile", 0])):
        out = tmp_path / f"found{number}"
        server.run(
            PREDICT,
            [
                run,
                picture,
                "--out",
                out,
                "--no-pictures",
                "--score-threshold",
                0,
                *more,
            ],
        ).ok()
        found.append(json.loads((out / "predictions.json").read_text())["images"][0]["detections"])
    assert found[0] == found[1] != found[2]


def test_whole_pictures_of_several_sets_are_held_out_and_judged(server, data, tmp_path):
    files = ", ".join(str(data / "annotations" / f"{split}.json") for split in ("train", "val"))
    sets = ("--data.train", f"[{files}]", "--data.val", 0.25, "--data.shares", "[1, 1]", "--data.format", "auto")
    args = (*TILES, *sets, "--run.max_steps", 1, "--run.output_dir", tmp_path)
    ended = server.run(SCRIPTS[0], small_settings(SCRIPTS[0], data, args)).ok()
    held = json.loads((ended.folder / "environment.json").read_text())["data"]
    assert held["train"]["images"] + held["val"]["images"] == 28
    assert held["train"]["tiles"] > held["train"]["images"]
    server.run(EVALUATE, [ended.folder, "--save", tmp_path / "found.json"]).ok()
    ids = {str(each["image_id"]) for each in json.loads((tmp_path / "found.json").read_text())}
    assert len(ids) == held["val"]["images"]
    assert "@" not in "".join(ids)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.said)
def test_what_cannot_be_cut_is_refused_by_name(server, data, tmp_path, case):
    script = SCRIPTS[case.script]
    args = small_settings(script, data, (*case.arguments, "--run.output_dir", tmp_path))
    ended = server.run(script, args)
    assert ended.code == 2
    assert case.said in ended.text


def test_a_run_is_not_resumed_on_other_tiles(server, run, data):
    args = (*TILES, "--data.tile", 32, "--run.output_dir", run.parent, "--run.resume", "latest")
    ended = server.run(SCRIPTS[0], small_settings(SCRIPTS[0], data, args))
    assert ended.code == 2
    assert "data.tile 40 -> 32: refused" in ended.text


# ---- a trained detector ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The run of train_detr.py that TRAINED_RUN names, else one that is trained here, in as many steps."""
    if "TRAINED_RUN" in os.environ:
        return Path(os.environ["TRAINED_RUN"])
    out = tmp_path_factory.mktemp("runs")
    words = ["--run.output_dir", out, "--run.max_minutes", "null", "--run.max_steps", 1250]
    command = [sys.executable, ROOT / "scripts" / "train_detr.py", *words]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    return out / "detr"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile", "overlap"),
    [
        (128, 0.2),
        (128, 0.5),
        (160, 0.2),
    ],
)
def test_collages_of_scenes_are_found_as_well_as_the_scenes(trained, tmp_path, tile, overlap):
    """Collages of 5 x 5 held-out pictures in tiles of their size: AP50 0.9 of that alone, 1 % duplicates at most."""
    predictor = open_predictor(trained)
    labels = [predictor.class_names.index(name) for name in SHAPES]
    images = []
    truth = []
    for number in range(200):
        pixels, objects, *_ = draw_scene(0, "val", number)
        images.append(torch.from_numpy(pixels).permute(2, 0, 1))
        boxes = []
        for each in objects:
            x, y, w, h = each["bbox"]
            boxes.append(([x, y, x + w, y + h], labels[each["category"]]))
        truth.append(boxes)
    table = table_of(tmp_path, truth, predictor.class_names, draw=False)
    alone = [merged([each], 0.5) for each in predictor.predict(images, 0.001)]
    in_collages = tiled(predictor, tile, overlap)
    found = []
    for first in range(0, len(images), 25):
        rows = [torch.cat(images[first + 5 * y : first + 5 * y + 5], dim=2) for y in range(5)]
        (collage,) = in_collages.predict([torch.cat(rows, dim=1)], 0.001)
        centres = (collage["boxes"][:, :2] + collage["boxes"][:, 2:]) / 2
        x, y = (centres // 128).clamp(0, 4).long().unbind(1)
        for number in range(25):
            mine = {key: value[5 * y + x == number] for key, value in collage.items()}
            mine["boxes"] -= 128 * torch.tensor([number % 5, number // 5] * 2)
            found.append(mine)
    sure = [{key: value[each["scores"] > 0.3] for key, value in each.items()} for each in found]
    errors = errors_of(sure, table)
    assert errors_of(found, table).ap50 >= 0.9 * errors_of(alone, table).ap50
    assert len(errors.of("duplicate")) <= 0.01 * max(1, len(errors.kind))


def errors_of(found, table):
    predictions = dict(zip(table.image_ids().tolist(), found, strict=True))
    return tide_errors(match_predictions(predictions, table))
