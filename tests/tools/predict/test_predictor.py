"""A predictor: images of every kind, classes, thresholds, sizes, masks; and its predictions of many files."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pasting_detector import PastingDetector
from PIL import Image
from pytest import approx
from report_data import found_of, table_of

from toolkit.base.errors import BadInput
from toolkit.base.masks import Rle, boxes_around, rles_of
from toolkit.data.pipeline import processor_size, val_transform
from toolkit.data.table import Category
from toolkit.data.transforms.geometry import input_hw
from toolkit.evaluation.draw import picture_with_boxes
from toolkit.evaluation.predictions import detections_as_json
from toolkit.tools.predict.in_tiles import flipped
from toolkit.tools.predict.predict_each import predict_files, predict_table
from toolkit.tools.predict.predictor import (
    Predictor,
    as_image,
    from_report,
    of_classes,
    own_predict,
)

CATEGORIES = [Category(7, "cup"), Category(90, "plate")]
BOX = [0.0, 0.0, 2.0, 2.0]
GREY = np.zeros((4, 4, 3), np.uint8)


def predictor_of(found: dict, **others) -> Predictor:
    """Finds the same in every image, as far as the scores allow."""

    def predict(images, score_threshold):
        keep = found["scores"] > score_threshold
        kept = {key: value[keep] for key, value in found.items()}
        return [kept] * len(images)

    return Predictor("test", CATEGORIES, predict, **others)


def test_images_of_every_kind_are_the_same_image():
    rng = np.random.default_rng(0)
    array = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    expected = torch.from_numpy(array).permute(2, 0, 1)
    for image in (array, Image.fromarray(array), expected):
        assert torch.equal(as_image(image), expected)
    grey = as_image(array[..., 0])
    assert grey.shape == (3, 6, 8)
    for wrong in (
        array.astype(np.float32),
        torch.zeros(6, 8, 3, dtype=torch.uint8),
        "photo.jpg",
    ):
        with pytest.raises(BadInput, match="expected a PIL image"):
            as_image(wrong)


def test_one_image_or_several_can_be_given():
    predictor = predictor_of(found_of([BOX], [0], [0.5]))
    one = predictor(GREY)
    assert one["scores"].tolist() == [0.5]
    several = predictor([GREY, Image.fromarray(GREY)], 0.6)
    assert len(several) == 2
    for found in several:
        assert not len(found["scores"])


def test_classes_and_thresholds_of_the_report():
    found = found_of([BOX] * 4, [0, 0, 1, 1], [0.9, 0.3, 0.5, 0.2])
    plain = predictor_of(found)
    with_report = predictor_of(found, thresholds={"": 0.4, "plate": 0.1})
    plates = of_classes(plain, ["plate"])(GREY, 0)
    assert plates["scores"].tolist() == approx([0.5, 0.2])
    reported = from_report(with_report)(GREY, 0)
    assert reported["scores"].tolist() == approx([0.9, 0.5, 0.2])
    with pytest.raises(BadInput, match="fork.*cup, plate"):
        of_classes(plain, ["fork"])
    with pytest.raises(BadInput, match="no report"):
        from_report(plain)


def test_relations_go_with_their_objects():
    graph = found_of([BOX] * 3, [0, 1, 0], [0.9, 0.8, 0.7])
    graph["pairs"] = torch.tensor([[0, 1], [2, 0]])
    graph["predicates"] = torch.tensor([3, 4])
    graph["triplet_scores"] = torch.tensor([0.5, 0.4])
    predictor = Predictor("test", CATEGORIES, lambda images, _: [graph] * len(images))
    left = of_classes(predictor, ["cup"])(GREY, 0)
    assert left["pairs"].tolist() == [[1, 0]]
    assert left["predicates"].tolist() == [4]


@given(
    height=st.integers(1, 2000),
    width=st.integers(1, 2000),
    image_size=st.integers(1, 900),
    scales=st.lists(st.integers(1, 900), max_size=3),
    max_size=st.integers(900, 1400),
)
def test_images_are_resized_as_in_the_evaluation(height, width, image_size, scales, max_size):
    sizes = {
        "image_size": image_size,
        "scales": scales,
        "max_size": max_size,
    }
    size_hw = (height, width)
    transform = val_transform(**sizes)
    resized = transform.draw(size_hw, torch.Generator()) if scales else transform.size_hw
    size = processor_size(**sizes)
    assert input_hw(size_hw, size) == resized
    assert input_hw(size_hw, None) == size_hw


def test_json_has_the_original_ids_and_xywh():
    found = found_of(
        [[1.0, 2.0, 4.5, 8.0], [-1.0, 0.0, 3.0, 3.0]],
        [1, 0],
        [0.75, 0.5],
    )
    plate = {
        "category_id": 90,
        "category": "plate",
        "bbox": [1.0, 2.0, 3.5, 6.0],
        "score": 0.75,
    }
    cup = {
        "category_id": 7,
        "category": "cup",
        "bbox": [-1.0, 0.0, 4.0, 3.0],
        "score": 0.5,
    }
    assert detections_as_json(found, CATEGORIES) == [plate, cup]
    nothing = found_of([], [], [])
    assert detections_as_json(nothing, CATEGORIES) == []


def test_every_file_gets_its_own_detections_or_its_error(tmp_path):
    batches = []

    def size_as_box(images, score_threshold):
        batches.append(len(images))
        found = []
        for image in images:
            _, height, width = map(float, image.shape)
            found.append(found_of([0.0, 0.0, width, height], [0], [1.0]))
        return found

    sizes = {
        "0.png": (8, 6),
        "1.png": (30, 10),
        "2.png": (8, 6),
        "3.png": (9, 7),
        "4.png": (30, 10),
    }
    for name, size in sizes.items():
        Image.new("RGB", size).save(tmp_path / name)
    whole = (tmp_path / "1.png").read_bytes()
    broken = tmp_path / "broken.png"
    broken.write_bytes(whole[:-20])
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    itself = tmp_path / "itself.png"
    itself.symlink_to(itself)
    predictor = Predictor("test", CATEGORIES, size_as_box)
    results = {}
    for result in predict_files(predictor, sorted(tmp_path.iterdir()), batch_size=2):
        results[result.key.name] = result
    for name, (width, height) in sizes.items():
        result = results.pop(name)
        assert result.error is None
        assert tuple(result.image.shape) == (3, height, width)
        assert result.detections["boxes"].tolist() == [[0, 0, width, height]]
    assert sum(batches) == 5
    assert max(batches) <= 2
    assert results["broken.png"].error.reason == "image data truncated"
    assert "not found" in str(results["gone.png"].error)
    assert "symbolic links" in str(results["itself.png"].error)
    batch_without_images = predict_files(predictor, [broken])
    assert next(batch_without_images).image is None


def test_what_decoding_drops_is_told_of_each_file(tmp_path):
    modes = {"a.png": "RGBA", "b.png": "I;16", "c.tif": "CMYK", "d.png": "RGB"}
    for name, mode in modes.items():
        Image.new(mode, (8, 6)).save(tmp_path / name)
    predictor = Predictor("test", CATEGORIES, lambda images, _: [found_of([], [], [])] * len(images))
    notes = {result.key.name: result.notes for result in predict_files(predictor, sorted(tmp_path.iterdir()))}
    assert notes == {
        "a.png": ("alpha channel dropped, the colours under it kept",),
        "b.png": ("16-bit grey scaled to 8 bits",),
        "c.tif": ("CMYK converted to RGB",),
        "d.png": (),
    }


def test_pictures_of_a_table_are_predicted_in_its_order(tmp_path):
    def green_as_score(images, score_threshold):
        assert score_threshold == 0.0
        greens = [int(image[1, 0, 0]) for image in images]
        return [found_of([BOX], [1], [green / 256]) for green in greens]

    predictor = Predictor("test", CATEGORIES, green_as_score)
    table = table_of(tmp_path, [[]] * 19, classes=("plate", "cup"))
    found = predict_table(predictor, table)
    numbers = list(range(19))
    assert found.scores.tolist() == [20 * (number % 10) / 256 for number in numbers]
    assert found.image_index.tolist() == numbers
    assert set(found.labels.tolist()) == {0}  # of "plate" in the table
    (tmp_path / "11.png").write_bytes(b"")
    with pytest.raises(BadInput, match=r"annotations.json: .*11.png: .*empty"):
        predict_table(predictor, table)


@pytest.fixture
def with_masks():
    predict = own_predict(PastingDetector(), None)
    return Predictor("test", CATEGORIES, predict, masks=True)


PICTURES = [torch.zeros(3, 20, 30, dtype=torch.uint8)] * 3


def test_masks_are_pixels_and_run_lengths_in_json(with_masks):
    nothing, three, six = with_masks(PICTURES, 0.0)
    assert nothing["masks"].shape == (0, 20, 30)
    assert three["masks"].shape == (3, 20, 30)
    pixels = six["masks"]
    assert pixels.shape == (6, 20, 30)
    assert pixels.dtype == torch.bool
    assert not pixels[:, 2:].any()
    detections = with_masks.predict(PICTURES, 0.0)[2]
    first = with_masks.as_json(detections)["detections"][0]
    segmentation = first["segmentation"]
    assert segmentation["size"] == [20, 30]
    counts = segmentation["counts"].encode()
    assert Rle((20, 30), counts) == detections["masks"][0]
    drawn = picture_with_boxes(PICTURES[2], six, ["cup"], smallest_side=30)
    of_run_lengths = picture_with_boxes(PICTURES[2], detections, ["cup"], smallest_side=30)
    assert drawn.size == of_run_lengths.size


def test_masks_go_with_their_boxes(with_masks):
    only = of_classes(with_masks, ["cup"]).predict(PICTURES, 0.0)[2]
    assert len(only["masks"]) == 6
    assert isinstance(only["masks"][0], Rle)


def test_the_mask_of_two_mirrored_detections_is_that_of_the_better_one():
    pixels = torch.zeros(20, 30, dtype=torch.bool)
    pixels[5:15, 2:12] = True

    def predict(images, score_threshold):
        """Is surer of a mirrored picture, and sees a row more of it."""
        found = []
        for image in images:
            is_mirrored = bool(image[0, 0, -1])
            seen = pixels.flip(-1) if is_mirrored else pixels.clone()
            seen[15] = seen[14] & is_mirrored
            columns = {"boxes": boxes_around(seen[None]), "labels": torch.zeros(1).long(), "masks": rles_of(seen[None])}
            found.append(columns | {"scores": torch.tensor([0.5 + 0.1 * is_mirrored])})
        return found

    picture = torch.zeros(3, 20, 30, dtype=torch.uint8)
    picture[:, 0, 0] = 1
    (found,) = flipped(Predictor("test", CATEGORIES, predict, masks=True)).predict([picture], 0.0)
    pixels[15, 2:12] = True
    assert found["scores"].tolist() == pytest.approx([0.6])
    assert found["masks"] == rles_of(pixels[None])
