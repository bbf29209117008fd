"""Pictures of detections: boxes, names, masks and relations."""

import numpy as np
import torch
from mask_data import pixels_of, random_masks
from PIL import Image, ImageColor
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


def black(height, width):
    return torch.zeros(3, height, width, dtype=torch.uint8)


def colour(label: int) -> list[int]:
    return list(ImageColor.getrgb(CLASS_COLOURS[label]))


def pixels_in(picture, label: int) -> np.ndarray:
    """Which pixels have the colour of this class."""
    rgb = np.asarray(picture)[..., :3]
    is_equal = rgb == colour(label)
    return is_equal.all(-1)


def drawn(image, *found) -> np.ndarray:
    picture = picture_with_boxes(image, found_of(*found), NAMES)
    return np.asarray(picture.convert("RGB"))


def read(path) -> np.ndarray:
    return np.asarray(Image.open(path))


def test_boxes_are_drawn_where_they_are_in_the_colour_of_their_class():
    image = grey(400, 800)
    box = [200.0, 100.0, 600.0, 300.0]
    picture = drawn(image, [box], [2], [0.9])
    assert picture.shape == (400, 800, 3)
    left_side = picture[200, 200]
    assert left_side.tolist() == colour(2)
    lower_side = picture[300, 400]
    assert lower_side.tolist() == colour(2)
    inside = picture[200, 400]  # nothing is covered
    assert inside.tolist() == [128] * 3
    tag = picture[70:99, 200:300]
    assert (tag != 128).any()
    nothing = drawn(image, [], [], [])
    assert (nothing == 128).all()


def test_masks_have_the_colours_of_objects():
    """Neighbours of one class would merge."""
    size_hw = (60, 80)
    boxes = [
        [0, 0, 40, 40],
        [40, 0, 80, 40],
    ]
    found = found_of(boxes, [2, 2], [0.9, 0.8])
    masks = rles_of(pixels_of(*boxes, size=size_hw))
    best, other = reversed(marks_of(found | {"masks": masks}, NAMES, size_hw))
    assert best.colour == CLASS_COLOURS[0]
    assert other.colour == CLASS_COLOURS[1]
    for mark in marks_of(found, NAMES, size_hw):
        assert mark.colour == CLASS_COLOURS[2]


def test_small_images_are_enlarged_and_tags_keep_off_each_other():
    box = [20.0, 12.0, 44.0, 28.0]
    image = grey(32, 64)
    one = drawn(image, [box], [0], [0.9])
    two = drawn(image, [box, box], [0, 0], [0.9, 0.8])
    assert one.shape == (320, 640, 3)
    pixels_of_one = pixels_in(one, 0).sum()
    pixels_of_two = pixels_in(two, 0).sum()
    assert pixels_of_two > 1.2 * pixels_of_one  # both can be seen


def test_a_crowded_picture_has_thin_lines_and_no_tags():
    """The tags of so many objects would hide the picture."""
    places = torch.arange(MOST_TAGS + 1)
    left = 10 * (places % 20)
    top = 40 * (places // 20)
    boxes = torch.stack([left, top, left + 8, top + 30], dim=1).float()
    covered = []
    for count in (MOST_TAGS, MOST_TAGS + 1):
        picture = drawn(
            black(200, 200),
            boxes[:count].tolist(),
            [0] * count,
            [0.9] * count,
        )
        is_covered = (picture > 0).any(axis=2)
        covered.append(is_covered.mean())
    with_tags, crowded = covered
    assert crowded < with_tags / 2


def test_predictions_stand_beside_the_ground_truth(tmp_path):
    truth = {
        "name": "a very long name of an image " * 5,
        "boxes": torch.tensor([[20.0, 20, 60, 60]]),
        "labels": torch.tensor([0]),
        "iscrowd": torch.tensor([0]),
    }
    found = found_of(
        [
            [10, 10, 50, 50],
            [60, 30, 110, 80],
            [0, 0, 9, 9],
        ],
        [1, 2, 3],
        [0.9, 0.31, 0.2],
    )
    sample = (grey(96, 128), found, truth)
    path = tmp_path / "a" / "b.png"
    picture = read(draw_grid([sample], NAMES, path))
    half = picture.shape[1] // 2
    assert half > 384  # small images are drawn larger
    assert labels_in(picture[:, :half]) == [0]
    assert labels_in(picture[:, half:]) == [1, 2]  # the score of 3, 0.2, is below the threshold


def labels_in(picture: np.ndarray) -> list[int]:
    return [label for label in range(4) if pixels_in(picture, label).sum() > 50]


def test_odd_images_and_boxes_are_drawn(tmp_path):
    """No boxes, boxes outside, flipped and not finite, a label without name, a crowd; tall, wide and tiny images."""
    odd = found_of(
        [
            [-50, -50, 900, 900],
            [40, 40, 10, 10],
            [float("nan")] * 4,
        ],
        [0, 25, 1],
        [0.9, 0.8, 0.7],
    )
    crowd = {
        "name": 1,
        "boxes": torch.tensor([[1.0, 1, 5, 5]]),
        "labels": torch.tensor([0]),
        "iscrowd": torch.tensor([1]),
    }
    samples = [
        (grey(300, 20), odd, crowd),
        (grey(20, 2000), NOTHING, {"name": 2} | NOTHING),
        (grey(1, 1), odd, crowd),
    ]
    for some in (samples, []):
        path = draw_grid(some, ["only"], tmp_path / "odd.png")
        assert Image.open(path).mode == "RGB"
    nothing = montage([], 2, gap=0)
    assert nothing.size == (1, 1)
    one = montage([Image.new("RGB", (5, 3))], 2, gap=0)
    assert one.size == (5, 3)


def test_the_same_images_with_boxes_every_time(tmp_path):
    box = ([1, 1, 20, 20], 0)
    table = table_of(tmp_path, [[], [box]] * 5)
    assert choose_images(table, 3) == [1, 5, 9]
    assert choose_images(table, 50) == [1, 3, 5, 7, 9]
    image_ids = table.image_ids().tolist()
    nothing = dict.fromkeys(image_ids, NOTHING)
    out = tmp_path / "out"
    first = draw_predictions(table, nothing, 4, out / "1.png")
    second = draw_predictions(table, nothing, 4, out / "2.png")
    assert first.read_bytes() == second.read_bytes()


BLACK = (0, 0, 0)
RED = "#FF0000"


def masked_picture(size_hw=(60, 80), dashed=False, box=(0, 0, 1, 1), **where):
    """A black picture with a mask from (20, 10) to (60, 50)."""
    pixels = pixels_of([20, 10, 60, 50], size=(60, 80))
    (mask,) = rles_of(pixels)
    picture = picture_of(black(*size_hw))
    mark = Mark(list(box), RED, dashed=dashed, mask=mask)
    draw_marks(picture, [mark], **where)
    return picture


def is_tinted(pixel) -> bool:
    red, green, blue = pixel
    return 90 <= red < 115 and green == blue == 0


def test_masks_are_tinted_and_those_of_dashed_boxes_outlined():
    picture = masked_picture(box=(20, 10, 60, 50))
    assert is_tinted(picture.getpixel((40, 30)))
    for x in (17, 70):
        assert picture.getpixel((x, 30)) == BLACK
    outline = masked_picture(dashed=True)
    inside = outline.getpixel((40, 30))
    assert inside == BLACK
    edge = outline.getpixel((20, 30))
    assert edge == (255, 0, 0)


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
        columns = {}
        for name in ("boxes", "scores", "labels"):
            columns[name] = torch.from_numpy(found[name])
        boxes[image_id] = columns
        predictions[image_id] = columns | {"masks": found["masks"]}
    evaluator = CocoEvaluator(table)
    masks_file = evaluator.draw(predictions, 2, tmp_path / "masks.png")
    boxes_file = evaluator.draw(boxes, 2, tmp_path / "boxes.png")
    with_them = read(masks_file)
    without = read(boxes_file)
    assert with_them.shape == without.shape
    differs = (with_them != without).any(axis=2)
    assert differs.mean() > 0.005
