"""No augmentation asks for more pixels of an image than are decoded, and training and evaluations decode alike."""

import numpy as np
import pytest
import torch
from PIL import Image
from report_data import table_of
from samples import generator, noise, target_of

from toolkit.data.least_size import MARGIN, LeastSize, least_size_of
from toolkit.data.pipeline import loader_of_settings, train_transform, training_sizes, val_transform, validation_loader
from toolkit.data.transforms import geometry, zoom_crop_colour
from toolkit.detectors.yolov3 import transforms as yolov3_transforms
from toolkit.run.settings import DataConfig
from toolkit.run.settings_file import changes
from toolkit.tools.predict.predict_split import _loader

CASES = {
    "square": {},
    "pair": {"image_size": [48, 96]},
    "multi_scale": {"multi_scale": [32, 96, 64]},
    "zoom_out": {"zoom_out": 4.0},
    "iou_crop": {"iou_crop": True, "zoom_out": 2.0},
    "scales": {"scales": [40, 56], "max_size": 90},
    "scales, limit of the longer side": {"scales": [40, 56], "max_size": 60},
    "scales, random_crop": {"scales": [40, 56], "max_size": 90, "random_crop": True},
    "scales, all crops": {"scales": [40, 56], "max_size": 200, "random_crop": True, "iou_crop": True},
    "ssd": {"recipe": "ssd", "iou_crop": True, "zoom_out": 3.0, "multi_scale": [32, 64]},
    "yolov3": {"recipe": "yolov3", "iou_crop": True, "zoom_out": 2.0},
}
BOXES = [
    [10, 15, 45, 55],
    [150, 50, 210, 100],
    [250, 80, 300, 115],
]


def config(**options):
    chosen = {"decode": "reduced", "image_size": 32, "workers": 0, "batch_size_per_device": 1, "flip": False}
    return DataConfig(**chosen | options)


@pytest.fixture
def magnified(monkeypatch):
    """How much larger the transforms made what was in the image, along both sides."""
    factors = np.ones(2)

    def recorded(resize):
        def wrapped(image, target, size_hw, *more):
            nonlocal factors
            factors *= np.array(size_hw) / np.array(image.shape[-2:])
            return resize(image, target, size_hw, *more)

        return wrapped

    for module, name in (
        (geometry, "resize"),
        (zoom_crop_colour, "resize"),
        (yolov3_transforms, "resize_by"),
    ):
        monkeypatch.setattr(module, name, recorded(getattr(module, name)))
    return factors


@pytest.mark.parametrize("image_hw", [(240, 320), (120, 450)])
@pytest.mark.parametrize("name", CASES)
def test_no_augmentation_asks_for_more_than_is_foreseen(name, image_hw, magnified):
    """A crop that is made larger needs more pixels of its image than the size of the batch; the bound is also met
    nearly, or it would be useless."""
    c = config(**CASES[name])
    transform = train_transform(c)
    sizes = training_sizes(c)
    asked = np.array(least_size_of(c)(image_hw)) / MARGIN
    image = torch.zeros(3, *image_hw, dtype=torch.uint8)
    target = target_of(BOXES, image_hw)
    most = np.zeros(2)
    for seed in range(120):
        magnified[:] = 1
        size = () if sizes is None else (sizes.sizes_hw[seed % len(sizes.sizes_hw)],)
        transform(image, target, generator(seed), *size)
        most = np.maximum(most, magnified * image_hw)
    assert (most <= asked * 1.02).all()
    assert (most >= asked * 0.3).any()


@pytest.mark.parametrize(
    "options",
    [
        {"decode": "full"},
        {"mixup": True},
        {"tile": 640},
        {"augment": ["RandomHorizontalFlip"]},
    ],
)
def test_what_uses_images_in_their_own_size_gets_them_whole(options):
    assert least_size_of(config(**options)) is None


def test_mosaics_take_reduced_images():
    assert least_size_of(config(mosaic=0.5)) == least_size_of(config()) == LeastSize((32, 32))


@pytest.fixture
def table(tmp_path):
    """A table of one JPEG."""
    table = table_of(
        tmp_path,
        [[([30, 40, 200, 160], 0)]],
        draw=False,
        size=(200, 301),
    )
    smooth = Image.fromarray(noise(10, 15)).resize((301, 200), Image.Resampling.BICUBIC)
    smooth.save(tmp_path / "0.png", "JPEG", quality=95)  # the content counts, not the name
    return table


def batches_of_loaders(table, c):
    """The batch of training, of its evaluations, and of an evaluation of the run afterwards."""
    _, training = loader_of_settings(table, c, seed=0, stride=1)
    transform = val_transform(c.image_size, c.scales, c.max_size)
    least_size = least_size_of(c)
    of_run = validation_loader(
        table,
        transform,
        batch_size=1,
        workers=0,
        stride=1,
        least_size=least_size,
    )
    asked = {"data": vars(c), "eval": {"batch_size_per_device": 1}}
    afterwards = _loader(table, asked, 1, torch.device("cpu"))
    return [next(iter(loader)) for loader in (training, of_run, afterwards)]


def test_training_and_every_evaluation_see_the_same_pixels(table):
    full = batches_of_loaders(table, config(decode="full"))
    reduced = batches_of_loaders(table, config())
    for batch in reduced:
        assert torch.equal(batch.images, reduced[0].images)
        assert batch.targets[0]["orig_size"].tolist() == [200, 301]
        assert torch.allclose(
            full[0].targets[0]["boxes"],
            batch.targets[0]["boxes"],
            atol=1e-3,
        )
    for batch in full:
        assert torch.equal(batch.images, full[0].images)
    apart = (full[0].images.int() - reduced[0].images.int()).abs().float()
    assert 0 < apart.mean() < 3


def test_a_run_from_before_the_setting_is_evaluated_in_full(table):
    old = {name: value for name, value in vars(config()).items() if name != "decode"}
    loader = _loader(
        table,
        {"data": old, "eval": {"batch_size_per_device": 1}},
        1,
        torch.device("cpu"),
    )
    whole = batches_of_loaders(table, config(decode="full"))[0]
    assert torch.equal(next(iter(loader)).images, whole.images)


def test_a_resume_says_that_the_decoding_is_another():
    told = changes(
        {"data": {"decode": "full"}},
        {"data": {"decode": "reduced"}},
        True,
    )
    assert list(map(str, told)) == ["data.decode full -> reduced: used"]
