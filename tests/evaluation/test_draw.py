"""Pictures of detections: boxes, names, masks and relations."""

import numpy as np
import torch
from mask_data import pixels_of, random_masks
from PIL import Image
from report_data import found_of, table_of

from toolkit.base.masks import rles_of
from toolkit.evaluation.coco import CocoEvaluator
from toolkit.evaluation.draw import (
    CLASS_COLOURS,
    MOST_TAGS,
    Mark,
    choose_images,
    draw_grid,
    draw_marks,
    draw_predictions,
    marks_of,
    montage,
    picture_of,
    picture_with_boxes,
)

NAMES = ["zero", "one", "two", "three"]
NOTHING = found_of([], [], [])


def grey(height, width):
    return torch.full((3, height, width), 128, dtype=torch.uint8)


def colour(label: int) -> list[int]:
    return [int(CLASS_COLOURS[label][i : i + 2], 16) for i in (1, 3, 5)]


def pixels_in(picture, label: int) -> np.ndarray:
    """Which pixels have the colour of this class."""
    return (np.asarray(picture)[..., :3] == colour(label)).all(-1)


def drawn(image, *found) -> np.ndarray:
    return np.asarray(picture_with_boxes(image, found_of(*found), NAMES).convert("RGB"))


def test_boxes_are_drawn_where_they_are_in_the_colour_of_their_class():
    picture = drawn(grey(400, 800), [[200.0, 100.0, 600.0, 300.0]], [2], [0.9])
    assert picture.shape == (400, 800, 3)
    assert picture[200, 200].tolist() == picture[300, 400].tolist() == colour(2)
    assert picture[200, 400].tolist() == [128] * 3  # inside nothing is covered
    assert (picture[70:99, 200:300] != 128).any()  # the tag, above the box
    assert (drawn(grey(400, 800), [], [], []) == 128).all()


def test_masks_have_the_colours_of_objects():
    """Neighbours of one class would merge."""
    masks = rles_of(pixels_of([0, 0, 40, 40], [40, 0, 80, 40], size=(60, 80)))
    found = found_of([[0, 0, 40, 40], [40, 0, 80, 40]], [2, 2], [0.9, 0.8])
    colours = [mark.colour for mark in marks_of(found | {"masks": masks}, NAMES, (60, 80))]
    assert colours == [CLASS_COLOURS[1], CLASS_COLOURS[0]]  # the best is last
    assert {mark.colour for mark in marks_of(found, NAMES, (60, 80))} == {CLASS_COLOURS[2]}


def test_small_images_are_enlarged_and_tags_keep_off_each_other():
    box = [20.0, 12.0, 44.0, 28.0]
    one = drawn(grey(32, 64), [box], [0], [0.9])
    two = drawn(grey(32, 64), [box, box], [0, 0], [0.9, 0.8])
    assert one.shape == (320, 640, 3)
    assert pixels_in(two, 0).sum() > 1.2 * pixels_in(one, 0).sum()  # both can be seen


def test_a_crowded_picture_has_thin_lines_and_no_tags():
    """The tags of so many objects would hide the picture."""
    places = torch.arange(MOST_TAGS + 1)
    corners = torch.stack([10 * (places % 20), 40 * (places // 20)], dim=1)
    boxes = torch.cat([corners, corners + torch.tensor([8, 30])], dim=1).float()
    covered = {}
    for count in (MOST_TAGS, MOST_TAGS + 1):
        picture = drawn(
            torch.zeros(3, 200, 200, dtype=torch.uint8),
            boxes[:count].tolist(),
            [0] * count,
            [0.9] * count,
        )
        covered[count] = (picture > 0).any(axis=2).mean()
    assert covered[MOST_TAGS + 1] < covered[MOST_TAGS] / 2


def test_predictions_stand_beside_the_ground_truth(tmp_path):
    truth = {
        "name": "a very long name of an image " * 5,
        "boxes": torch.tensor([[20.0, 20, 60, 60]]),
        "labels": torch.tensor([0]),
        "iscrowd": torch.tensor([0]),
    }
    found = found_of([[10, 10, 50, 50], [60, 30, 110, 80], [0, 0, 9, 9]], [1, 2, 3], [0.9, 0.31, 0.2])
    picture = np.asarray(Image.open(draw_grid([(grey(96, 128), found, truth)], NAMES, tmp_path / "a" / "b.png")))
    half = picture.shape[1] // 2
    assert half > 384  # small images are drawn larger
    of_truth = [pixels_in(picture[:, :half], label).sum() > 50 for label in range(4)]
    of_found = [pixels_in(picture[:, half:], label).sum() > 50 for label in range(4)]
    assert of_truth == [True, False, False, False]
    assert of_found == [False, True, True, False]  # 0.2 is below the threshold


def test_odd_images_and_boxes_are_drawn(tmp_path):
    """No boxes, boxes outside, flipped and not finite, a label without name, a crowd; tall, wide and tiny images."""
    odd = found_of(
        [[-50, -50, 900, 900], [40, 40, 10, 10], [float("nan")] * 4],
        [0, 25, 1],
        [0.9, 0.8, 0.7],
    )
    crowd = {
        "name": 1,
        "boxes": torch.tensor([[1.0, 1, 5, 5]]),
        "labels": torch.tensor([0]),
    }
    crowd["iscrowd"] = torch.tensor([1])
    samples = [
        (grey(300, 20), odd, crowd),
        (grey(20, 2000), NOTHING, {"name": 2} | NOTHING),
        (grey(1, 1), odd, crowd),
    ]
    for some in (samples, []):
        assert Image.open(draw_grid(some, ["only"], tmp_path / "odd.png")).mode == "RGB"
    assert montage([], 2, gap=0).size == (1, 1)
    assert montage([Image.new("RGB", (5, 3))], 2, gap=0).size == (5, 3)


def test_the_same_images_with_boxes_every_time(tmp_path):
    table = table_of(tmp_path, [[([1, 1, 20, 20], 0)] if i % 2 else [] for i in range(10)])
    assert choose_images(table, 3) == [1, 5, 9]
    assert choose_images(table, 50) == [1, 3, 5, 7, 9]
    nothing = dict.fromkeys(table.image_ids().tolist(), NOTHING)
    first = draw_predictions(table, nothing, 4, tmp_path / "out" / "1.png")
    second = draw_predictions(table, nothing, 4, tmp_path / "out" / "2.png")
    assert first.read_bytes() == second.read_bytes()


BLACK = (0, 0, 0)
RED = "#FF0000"


def masked_picture(size_hw=(60, 80), dashed=False, box=(0, 0, 1, 1), **where):
    """A black picture with a mask from (20, 10) to (60, 50)."""
    (mask,) = rles_of(pixels_of([20, 10, 60, 50], size=(60, 80)))
    picture = picture_of(torch.zeros(3, *size_hw, dtype=torch.uint8))
    draw_marks(picture, [Mark(list(box), RED, dashed=dashed, mask=mask)], **where)
    return picture


def is_tinted(pixel) -> bool:
    return pixel[0] in range(90, 115) and pixel[1:] == (0, 0)


def test_masks_are_tinted_and_those_of_dashed_boxes_outlined():
    picture = masked_picture(box=(20, 10, 60, 50))
    assert is_tinted(picture.getpixel((40, 30)))
    assert picture.getpixel((70, 30)) == picture.getpixel((17, 30)) == BLACK
    outline = masked_picture(dashed=True)
    assert outline.getpixel((40, 30)) == BLACK
    assert outline.getpixel((20, 30)) == (255, 0, 0)


def test_masks_are_drawn_in_a_part_of_the_picture():
    part = masked_picture(scale=2, corner=(20, 10))  # the upper left quarter, twice as large
    assert is_tinted(part.getpixel((70, 50)))  # the pixel (55, 35) of the image
    assert part.getpixel((2, 40))[0] > 90
    away = masked_picture(corner=(60, 50))
    assert away.getpixel((10, 10)) == BLACK


def test_pictures_of_an_evaluation_have_masks(tmp_path):
    table, predictions = random_masks(tmp_path, 4, 2, seed=2, draw=True)
    boxes = {}
    for image_id, found in predictions.items():
        columns = {name: torch.from_numpy(found[name]) for name in ("boxes", "scores", "labels")}
        boxes[image_id] = columns
        predictions[image_id] = columns | {"masks": found["masks"]}
    evaluator = CocoEvaluator(table)
    with_them = np.asarray(Image.open(evaluator.draw(predictions, 2, tmp_path / "masks.png")))
    without = np.asarray(Image.open(evaluator.draw(boxes, 2, tmp_path / "boxes.png")))
    assert with_them.shape == without.shape
    assert (with_them != without).any(axis=2).mean() > 0.005
