"""Tiles and flips, with a detector that knows what is in every picture, and with a trained one.

    TRAINED_RUN=runs/detr python -m pytest tests/test_tiles.py -m slow -s    # of train_detr.py; without it, 5 minutes
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from places import ROOT
from processes import run_on_ranks
from report_data import table_of

from toolkit.base import progress
from toolkit.base.box_ops import pairwise_iou
from toolkit.base.distributed import world
from toolkit.base.errors import BadInput
from toolkit.data.pipeline import validation_loader
from toolkit.data.table import Category
from toolkit.data.table_cache import write_rows
from toolkit.data.tiling import Tiling, starts, tile_hw
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.evaluation.matches import match_predictions
from toolkit.evaluation.predict_dataset import predict_dataset
from toolkit.evaluation.predictions import best_first
from toolkit.models.detector import Detector
from toolkit.models.joined_tiles import best_of_classes, merged
from toolkit.tools.predict.in_tiles import flipped, in_tiles, tiled
from toolkit.tools.predict.open import open_predictor
from toolkit.tools.predict.predict_each import predict_table
from toolkit.tools.predict.predictor import Predictor
from toolkit.tools.report.detection_errors import tide_errors
from toolkit.tools.shapes import CLASSES as SHAPES
from toolkit.tools.shapes import draw_scene

CLASSES = [Category(0, "red"), Category(1, "green"), Category(2, "blue")]


def rectangles(found_in: torch.Tensor) -> tuple[list, list]:
    """Boxes and labels of the one-coloured rectangles of a picture; each has a value of its own."""
    boxes, labels = [], []
    for label, plane in enumerate(found_in):
        for value in plane.unique():
            if value:
                rows, columns = (plane == value).nonzero().unbind(1)
                boxes.append([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
                labels.append(label)
    return boxes, labels


def oracle(off: float = 0) -> Predictor:
    """Finds every rectangle, or what a tile leaves of it, to `off` pixels before the border, and is less sure of small
    ones."""

    def predict(images, score_threshold):
        found = []
        for image in images:
            boxes, labels = rectangles(image)
            boxes = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
            inwards = ((boxes[:, 2:] - boxes[:, :2]) / 4).clamp(max=off)
            boxes[:, :2] += inwards * (boxes[:, :2] == 0)
            boxes[:, 2:] -= inwards * (boxes[:, 2:] == torch.tensor(image.shape[:0:-1]))
            scores = 0.5 + (boxes[:, 2:] - boxes[:, :2]).prod(1).clamp(max=4000) / 10000
            found.append({"boxes": boxes, "scores": scores, "labels": torch.tensor(labels, dtype=torch.int64)})
        return found

    return Predictor("oracle", CLASSES, predict)


def scene(height: int, width: int, count: int, seed: int, side: int) -> torch.Tensor:
    """uint8 (3, H, W): rectangles that do not overlap, of at most `side` pixels."""
    rng, image = np.random.default_rng(seed), torch.zeros(3, height, width, dtype=torch.uint8)
    for value in range(1, count + 1):
        for _ in range(100):
            h, w = rng.integers(side // 3, side, 2)
            y, x = rng.integers(0, height - h), rng.integers(0, width - w)
            if not image[:, max(0, y - 2) : y + h + 2, max(0, x - 2) : x + w + 2].any():
                image[int(rng.integers(3)), y : y + h, x : x + w] = value
                break
    return image


@pytest.mark.parametrize(("length", "tile", "overlap"), [(640, 640, 0.2), (641, 640, 0.2), (5000, 640, 0.3), (9, 4, 0)])
def test_tiles_cover_a_side_and_have_enough_in_common(length, tile, overlap):
    first = starts(length, tile, overlap)
    assert first[0] == 0 and first[-1] + tile >= length and first[-1] == max(0, length - tile)
    assert all(b - a <= tile * (1 - overlap) for a, b in zip(first, first[1:], strict=False))


@pytest.mark.parametrize("off", [0, 2])
@pytest.mark.parametrize("seed", range(2))
def test_every_object_is_found_once_wherever_tiles_end(seed, off):
    """off: a detector does not see to the pixel that a border cuts an object."""
    image = scene(500, 640, 60, seed, side=24)
    expected = oracle(off).predict([image], 0)[0]
    found = tiled(oracle(off), 128, overlap=0.25).predict([image], 0)[0]
    overlaps = pairwise_iou(expected["boxes"], found["boxes"]) > 0.99
    assert len(expected["labels"]) >= 50
    assert (overlaps.sum(1) == 1).all()
    assert len(found["labels"]) == len(expected["labels"])
    assert torch.equal(found["labels"][overlaps.long().argmax(1)], expected["labels"])


def test_long_work_in_tiles_says_how_far_it_is(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    image = scene(500, 640, 60, 0, side=24)
    tiled(oracle(), 128, overlap=0.25, batch_size=10).predict([image, image[:, :100, :100]], 0)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "2 images in tiles: 10 of 36 tiles" and said[-1] == "2 images in tiles: 36 of 36 tiles"
    judged_scenes(tmp_path)
    assert "evaluation: 2 of 10 batches of tiles" in capsys.readouterr().err


def test_tiles_have_the_aspect_of_the_images_that_the_detector_was_trained_on():
    assert tile_hw(640, None) == tile_hw(640, {"shortest_edge": 800, "longest_edge": 1333}) == (640, 640)
    assert tile_hw(640, {"height": 384, "width": 640}) == (384, 640)
    assert tile_hw(100, {"height": 64, "width": 32}) == (100, 50)
    seen = []

    def note(images, _):
        seen.extend(tuple(image.shape[-2:]) for image in images)
        return oracle().predict(images, 0)

    image = scene(500, 640, 60, 3, side=20)
    predictor = replace(oracle(), predict=note, size={"height": 96, "width": 160})
    found = tiled(predictor, 160, overlap=0.25).predict([image], 0)[0]
    assert set(seen) == {(96, 160)} and len(found["labels"]) == len(oracle().predict([image], 0)[0]["labels"])


def test_an_object_larger_than_the_overlap_keeps_its_largest_part_only():
    image = torch.zeros(3, 100, 300, dtype=torch.uint8)
    image[0, 20:60, 30:280] = 1
    found = tiled(oracle(), 100, overlap=0.2).predict([image], 0)[0]
    assert 1 <= len(found["labels"]) <= 4 and (found["labels"] == 0).all()


def test_images_that_fit_in_a_tile_are_seen_as_they_are_and_flips_give_the_same_boxes_once():
    image = scene(100, 150, 12, 1, side=30)
    plain, whole, both = (p.predict([image], 0)[0] for p in (oracle(), tiled(oracle(), 150), flipped(oracle())))
    assert torch.equal(whole["scores"], plain["scores"].sort(descending=True, stable=True).values)
    assert len(both["scores"]) == len(plain["scores"])
    torch.testing.assert_close(both["boxes"], plain["boxes"][pairwise_iou(both["boxes"], plain["boxes"]).argmax(1)])


def test_classes_do_not_suppress_each_other_and_no_guess_takes_a_part_away_that_is_nearly_sure():
    def part(side, score, label=0):
        box = torch.tensor([[0.0, 0.0, side, side]])
        return {"boxes": box, "scores": torch.tensor([score]), "labels": torch.tensor([label])}

    assert merged([part(9, 0.9), part(9, 0.8, 1)], 0.5)["labels"].tolist() == [0, 1]
    assert merged([part(9, 0.9), part(9, 0.9)], 0.5)["labels"].tolist() == [0]
    for score, left in ((0.01, [0.9, 0.01]), (0.5, [0.5])):
        kept = merged([part(30, 0.9), part(60, score)], 0.5, torch.tensor([True, False]))
        assert kept["scores"].tolist() == pytest.approx(left)


@pytest.mark.parametrize(("right", "scores", "is_other_cut", "expected"), [
    (30.1, (0.9, 0.3), True, 0),  # the same cut object, seen a little wider by a detector that is not sure
    (30.1, (0.9, 0.8), True, 0),
    (30.1, (0.3, 0.9), True, 1),
    (30.1, (0.9, 0.3), False, 0),  # it ends near a border, and is as whole as the other
    (45.0, (0.9, 0.3), True, 0),
    (45.0, (0.9, 0.6), True, 1),  # it shows more of the object, and is nearly as sure
    (45.0, (0.9, 0.3), False, 1),  # all of the object
    (45.0, (0.9, 0.2), False, 0),  # a guess
])  # fmt: skip
def test_of_two_boxes_of_a_cut_object_the_score_decides_unless_the_larger_one_is_nearly_as_sure(
    right, scores, is_other_cut, expected
):
    boxes = torch.tensor([[0.0, 0.0, 30.0, 40.0], [0.0, 0.0, right, 40.0]])
    labels = torch.zeros(2, dtype=torch.int64)
    for order in ([0, 1], [1, 0]):
        part = {"boxes": boxes[order], "scores": torch.tensor(scores)[order], "labels": labels}
        cut = torch.tensor([True, is_other_cut])[order]
        kept = merged([part], 0.5, cut)
        assert kept["boxes"].tolist() == [boxes[expected].tolist()]


class Finder(Detector):
    """Finds every rectangle of an image, as `oracle` does, and adds a weak guess in the middle of it."""

    loss_names, divided_by, stride = ("loss_ce",), "images", 1

    def forward(self, images, sizes, targets=None):
        return {"images": [image[:, :h, :w] for image, (h, w) in zip(images, sizes.tolist(), strict=True)]}

    def postprocess(self, outputs, sizes, orig_sizes, score_threshold=0.0, top_k=100):
        return [{key: value[:top_k] for key, value in guessing(image).items()} for image in outputs["images"]]


def guessing(image: torch.Tensor) -> dict:
    found = best_first(oracle().predict([image], 0)[0])
    height, width = image.shape[-2:]
    guess = {"boxes": torch.tensor([[width / 3, height / 3, width / 2, height / 2]]), "scores": torch.tensor([0.01]),
             "labels": torch.tensor([1])}  # fmt: skip
    return {key: torch.cat([found[key], guess[key]]) for key in guess}


def scenes_as_table(folder: Path, sizes=((150, 200), (90, 60), (128, 300))):
    rows, number, none = [], 1, {"subject": [], "object": [], "predicate": []}
    folder.mkdir(exist_ok=True)
    for seed, (height, width) in enumerate(sizes):
        image = scene(height, width, 15, seed, side=16)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{seed}.png")
        boxes, labels = rectangles(image)
        boxes = [[float(side) for side in box] for box in boxes]
        columns = {"id": list(range(number, number + len(boxes))), "bbox": boxes, "category": labels,
                   "area": [(x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in boxes],
                   "iscrowd": [0] * len(boxes)}  # fmt: skip
        number += len(boxes)
        rows.append({"image_id": f"scene {seed}", "file_name": f"{seed}.png", "width": width, "height": height,
                     "objects": columns, "relations": none})  # fmt: skip
    return write_rows(rows, cache_file=folder / "table.json", image_root=folder, name="scenes", categories=CLASSES)


def judged_scenes(folder: Path) -> dict:
    """The detections of `Finder` on the scenes in `folder`, predicted by all ranks; main process only."""
    table = scenes_as_table(folder / f"{world()[0]}")
    options = {"batch_size": 3, "workers": 0, "stride": 1, "tiling": Tiling((64, 80), 0.3)}
    loader = validation_loader(table, lambda image, target, _: (image, target), **options)
    return predict_dataset(Finder(), loader, "cpu", top_k=50).by_image


def test_an_evaluation_of_whole_pictures_in_tiles_finds_what_predict_finds_on_any_number_of_ranks(tmp_path):
    table = scenes_as_table(tmp_path / "0")
    found = judged_scenes(tmp_path)
    assert list(found) == table.image_ids().tolist()
    predictor = Predictor("guessing", CLASSES, lambda images, _: list(map(guessing, images)))
    pictures = [table.decode_image(table.row(index)) for index in range(len(table))]
    for one, other in zip(found.values(), in_tiles(predictor, Tiling((64, 80), 0.3)).predict(pictures, 0), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in ("boxes", "scores", "labels"))
    assert CocoEvaluator(table).evaluate(found)["bbox_AP"] == 1.0
    judged = in_tiles(replace(predictor, max_detections=50), Tiling((64, 80), 0.3), as_evaluated=True)
    assert CocoEvaluator(table).evaluate(predict_table(judged, table))["bbox_AP"] == 1.0
    on_two, nothing = run_on_ranks(judged_scenes, 2, tmp_path)
    assert not nothing and on_two.keys() == found.keys()
    for one, other in zip(found.values(), on_two.values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_of_each_class_the_best_are_kept():
    found = {"boxes": torch.arange(20.0).reshape(5, 4), "scores": torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5]),
             "labels": torch.tensor([0, 1, 0, 0, 1])}  # fmt: skip
    assert best_of_classes(found, 2)["scores"].tolist() == pytest.approx([0.9, 0.8, 0.7, 0.5])
    assert len(best_of_classes(found, 5)["labels"]) == 5


def test_what_cannot_be_is_bad_input():
    for tile, overlap in ((0, 0.2), (64, 0.95), (64, -0.1)):
        with pytest.raises(BadInput, match="--tile"):
            tiled(oracle(), tile, overlap)
    graphs = Predictor("graphs", CLASSES, lambda images, _: [], predicates=["on"])
    with pytest.raises(BadInput, match="relations"):
        tiled(graphs, 64)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The run of train_detr.py that TRAINED_RUN names, else one that is trained here, in as many steps."""
    if "TRAINED_RUN" in os.environ:
        return Path(os.environ["TRAINED_RUN"])
    out = tmp_path_factory.mktemp("runs")
    script = ROOT / "scripts" / "train_detr.py"
    subprocess.run([sys.executable, str(script), "--run.output_dir", str(out), "--run.max_minutes", "null",
                    "--run.max_steps", "1250"], check=True, capture_output=True)  # fmt: skip
    return out / "detr"


@pytest.mark.slow
def test_collages_of_scenes_are_found_as_well_as_the_scenes(trained, tmp_path):
    """Collages of 5 x 5 held-out pictures in tiles of their size: AP50 0.9 of that alone, 1 % duplicates at most."""
    predictor, side, scenes = open_predictor(trained), 128, [draw_scene(0, "val", i) for i in range(200)]
    images = [torch.from_numpy(pixels).permute(2, 0, 1) for pixels, *_ in scenes]
    labels = [predictor.class_names.index(name) for name in SHAPES]
    boxes = [[([x, y, x + w, y + h], labels[o["category"]]) for o in objects for x, y, w, h in [o["bbox"]]]
             for _, objects, _ in scenes]  # fmt: skip
    table = table_of(tmp_path, boxes, predictor.class_names, draw=False)
    ids = table.image_ids().tolist()

    def judged(found: list) -> tuple[float, float]:
        """AP50, and above a score of 0.3 the share of duplicates."""
        sure = [{key: value[each["scores"] > 0.3] for key, value in each.items()} for each in found]
        predictions = (dict(zip(ids, each, strict=True)) for each in (found, sure))
        ap50, errors = (tide_errors(match_predictions(each, table)) for each in predictions)
        return ap50.ap50, len(errors.of("duplicate")) / max(1, len(errors.kind))

    alone, _ = judged([merged([each], 0.5) for each in predictor.predict(images, 0.001)])
    for tile, overlap in ((side, 0.2), (side, 0.5), (160, 0.2)):
        found = []
        for first in range(0, len(scenes), 25):
            rows = [torch.cat(images[first + 5 * y : first + 5 * y + 5], dim=2) for y in range(5)]
            collage = tiled(predictor, tile, overlap).predict([torch.cat(rows, dim=1)], 0.001)[0]
            x, y = ((collage["boxes"][:, :2] + collage["boxes"][:, 2:]) / 2 // side).clamp(0, 4).long().unbind(1)
            for scene in range(25):
                mine = {key: value[5 * y + x == scene] for key, value in collage.items()}
                mine["boxes"] -= side * torch.tensor([scene % 5, scene // 5] * 2)
                found.append(mine)
        ap50, duplicates = judged(found)
        assert ap50 >= 0.9 * alone and duplicates <= 0.01, (tile, overlap, alone)
