"""Decoding of JPEGs at a reduced scale: the same picture in fewer pixels, its boxes on their pixels, and never fewer
pixels than the augmentation can use."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from report_data import table_of
from samples import generator
from test_images import IMAGES, TURNED, encode, exif_of, xmp_before_exif, xmp_of
from torchvision.transforms.v2 import functional as F

from toolkit.base.errors import BadInput
from toolkit.data.dataset import DetectionDataset, row_target
from toolkit.data.decoding import ImageError, decode_image, decode_reduced, reduction
from toolkit.data.least_size import MARGIN, LeastSize, least_size_of
from toolkit.data.pipeline import loader_of_settings, train_transform, training_sizes, val_transform, validation_loader
from toolkit.data.sampling import SampleKey
from toolkit.data.transforms import geometry, zoom_crop_colour
from toolkit.detectors.yolov3 import transforms as yolov3_transforms
from toolkit.run.settings import DataConfig
from toolkit.run.settings_file import changes
from toolkit.tools.predict.predict_split import _loader

sides = st.integers(1, 150)


def unchanged(image, target, generator):
    return image, target


def waves(width, height):
    """A picture of smooth colours that differ along both sides."""
    y, x = np.mgrid[:height, :width]
    shades = [np.sin(x / 9), np.cos(y / 11), np.sin((x + 2 * y) / 23)]
    return Image.fromarray((np.stack(shades, axis=2) * 100 + 128).astype(np.uint8))


# ---- pixels and sizes ------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(sides, sides, st.sampled_from([1, 2, 4, 8]), st.integers(1, 8), st.booleans(), st.sampled_from(["RGB", "L"]))
def test_size_and_pixels_are_those_of_the_whole_picture_made_smaller(width, height, divisor, turn, progressive, mode):
    data = encode(waves(width, height).convert(mode), "JPEG", quality=95, exif=exif_of(turn), progressive=progressive)
    whole = decode_image(data)
    full_h, full_w = whole.shape[-2:]
    least_hw = (max(1, full_h // divisor), max(1, full_w // divisor))
    found, file_hw = decode_reduced(data, least_hw)
    assert file_hw == (full_h, full_w)
    by = reduction(file_hw, least_hw)
    assert tuple(found.shape) == (3, full_h // by, full_w // by) and found.dtype == torch.uint8
    assert found.shape[1] >= least_hw[0] and found.shape[2] >= least_hw[1]
    if by == 1:
        assert torch.equal(found, whole)
        return
    wanted = F.resize(whole, list(found.shape[-2:]), antialias=True)
    apart = (found.int() - wanted.int()).abs().float()
    assert apart.mean() < 6 and (min(found.shape[-2:]) < 8 or apart.mean() < 3)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 3000), st.integers(1, 3000))
def test_the_largest_divisor_that_leaves_enough_is_taken(height, width, least_h, least_w):
    by = reduction((height, width), (least_h, least_w))
    assert by in (1, 2, 4, 8)
    assert by == 1 or (height // by >= least_h and width // by >= least_w)
    larger = 2 * by
    pays = larger > 2 or (height % 2 == 0 and width % 2 == 0)
    assert by == 8 or not pays or height // larger < least_h or width // larger < least_w


@pytest.mark.parametrize("kind", TURNED)
def test_orientations_are_those_of_the_whole_picture(kind):
    """Whatever says the orientation; two of the four corners are red, so that no two orientations look the same."""
    picture = Image.new("RGB", (160, 96), (40, 60, 200))
    picture.paste((250, 20, 20), (0, 0, 80, 24))
    format = kind.split(",")[0]
    for turn in range(1, 9):
        options = {"xmp": xmp_of(turn)} if "XMP" in kind and "behind" not in kind else {"exif": exif_of(turn)}
        if "both" in kind:
            options = {"exif": exif_of(turn), "xmp": xmp_of(9 - turn)}
        data = encode(picture, format, **options)
        data = xmp_before_exif(data) if "behind" in kind else data
        whole = decode_image(data)
        upright_hw = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size[::-1]
        found, file_hw = decode_reduced(data, (8, 8))
        assert file_hw == upright_hw == tuple(whole.shape[-2:]), turn
        if format != "JPEG":
            assert torch.equal(found, whole)  # untouched
            continue
        assert tuple(found.shape[-2:]) == (upright_hw[0] // 8, upright_hw[1] // 8)
        wanted = F.resize(whole, list(found.shape[-2:]), antialias=True)
        assert (found.int() - wanted.int()).abs().float().mean() < 5, turn


def test_an_mpo_and_cmyk_are_reduced_too():
    first = waves(200, 120)
    buffer = io.BytesIO()
    first.save(buffer, "MPO", save_all=True, append_images=[waves(200, 120)])
    for data in (buffer.getvalue(), encode(first.convert("CMYK"), "JPEG", quality=95)):
        found, file_hw = decode_reduced(data, (30, 50))
        assert file_hw == (120, 200) and tuple(found.shape) == (3, 30, 50)
        wanted = F.resize(decode_image(data), [30, 50], antialias=True)
        assert (found.int() - wanted.int()).abs().float().mean() < 3


# ---- damaged files ---------------------------------------------------------------------------------------------------


def outcomes(data):
    """What decoding the whole and decoding a quarter say: the shape, or the error."""
    said = []
    for decode in (decode_image, lambda data: decode_reduced(data, (15, 20))[0]):
        try:
            said.append(tuple(decode(data).shape))
        except ImageError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 4}])
def test_a_truncated_file_is_the_same_error_wherever_it_ends(options):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8))
    data = encode(noise, "JPEG", **options)
    assert decode_reduced(data, (15, 20))[0].shape == (3, 15, 20)
    ends = [*range(3, len(data), len(data) // 40), *range(len(data) - 9, len(data))]
    for end in ends:
        whole, reduced = outcomes(data[:end])
        assert isinstance(whole, str) and reduced == whole, end


def test_a_damaged_file_is_the_same_error_or_is_decoded_as_before():
    rng = np.random.default_rng(1)
    data = encode(waves(80, 60), "JPEG")
    errors = set()
    for _ in range(300):
        damaged = bytearray(data)
        for at in rng.integers(2, len(data), 2):
            damaged[at] = rng.integers(256)
        whole, reduced = outcomes(bytes(damaged))
        assert isinstance(whole, str) == isinstance(reduced, str), (whole, reduced)
        if isinstance(whole, str):
            assert reduced == whole
            errors.add(whole)
    assert errors


def test_a_damaged_last_marker_is_an_error():
    """Pillow alone decodes such a file."""
    data = bytearray(encode(Image.new("RGB", (64, 48), (9, 99, 200)), "JPEG", quality=90, restart_marker_blocks=4))
    assert decode_reduced(bytes(data), (12, 16))[0].shape == (3, 12, 16)
    data[-68] = 0x55
    data[-1] = 0
    with pytest.raises(ImageError, match="image data truncated"):
        decode_reduced(bytes(data), (12, 16))


@pytest.mark.parametrize("name", ["truncated.jpg", "zero_byte.jpg", "html_error_page.jpg", "missing.jpg"])
def test_errors_name_the_file_and_the_reason(name):
    with pytest.raises(ImageError) as whole:
        decode_image(IMAGES / name)
    with pytest.raises(ImageError) as reduced:
        decode_reduced(IMAGES / name, (4, 4))
    assert str(reduced.value) == str(whole.value) and reduced.value.path == IMAGES / name


def test_too_many_pixels_are_refused_before_anything_is_decoded():
    data = encode(waves(80, 60), "JPEG")
    decode_reduced(data, (15, 20), 4800)
    with pytest.raises(ImageError, match="80 x 60 pixels are more than data.max_image_pixels 4799"):
        decode_reduced(data, (15, 20), 4799)


# ---- boxes, and what a data set gives --------------------------------------------------------------------------------


def one_picture(folder, picture, boxes, file_hw, **options):
    """A table of one JPEG."""
    table = table_of(folder, [[(box, 0) for box in boxes]], draw=False, size=file_hw)
    picture.save(folder / "0.png", "JPEG", quality=95, subsampling=0, **options)  # the content counts, not the name
    return table


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_boxes_lie_on_their_pixels(tmp_path_factory, data):
    """In every orientation, and with sides that the divisor does not divide: the last row of libjpeg is then cut."""
    width = data.draw(st.integers(90, 200))
    height = data.draw(st.integers(90, 200))
    turn = data.draw(st.integers(1, 8))
    left = data.draw(st.integers(0, width - 40))
    top = data.draw(st.integers(0, height - 40))
    right = data.draw(st.integers(left + 30, width))
    bottom = data.draw(st.integers(top + 30, height))
    picture = Image.new("L", (width, height), 0)
    picture.paste(255, (left, top, right, bottom))
    turned = Image.new("L", (width, height), 0)
    turned.paste(255, (left, top, right, bottom))
    turned.getexif()[274] = turn
    upright = np.array(ImageOps.exif_transpose(turned)) > 127
    rows = np.flatnonzero(upright.any(1))
    columns = np.flatnonzero(upright.any(0))
    box = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
    table = one_picture(tmp_path_factory.mktemp("t"), picture, [box], upright.shape, exif=exif_of(turn))
    divisor = data.draw(st.sampled_from([2, 4, 8] if width % 2 == height % 2 == 0 else [4, 8]))
    least_size = LeastSize((upright.shape[0] // divisor / MARGIN, upright.shape[1] // divisor / MARGIN))
    image, target = DetectionDataset(table, unchanged, least_size=least_size)[SampleKey(0, 0)]
    small_hw = (upright.shape[0] // divisor, upright.shape[1] // divisor)
    assert tuple(image.shape[-2:]) == small_hw == tuple(target["size"].tolist())
    assert tuple(target["orig_size"].tolist()) == upright.shape  # of the file, to which predictions are scaled
    found = target["boxes"][0].double().numpy()
    light = image[0].double().numpy() / 255
    sums_x = light.sum(0) / light.sum(0).max()
    sums_y = light.sum(1) / light.sum(1).max()
    # Half light pixels count half, so that the place of an edge is known to a part of a pixel.
    assert sums_x.sum() == pytest.approx(found[2] - found[0], abs=0.35)
    assert sums_y.sum() == pytest.approx(found[3] - found[1], abs=0.35)
    centre_x = (sums_x * (np.arange(len(sums_x)) + 0.5)).sum() / sums_x.sum()
    centre_y = (sums_y * (np.arange(len(sums_y)) + 0.5)).sum() / sums_y.sum()
    assert centre_x == pytest.approx((found[0] + found[2]) / 2, abs=0.2)
    assert centre_y == pytest.approx((found[1] + found[3]) / 2, abs=0.2)
    share = (small_hw[0] * small_hw[1]) / (upright.shape[0] * upright.shape[1])
    whole = row_target(table.row(0), upright.shape)
    assert target["area"].item() == pytest.approx(whole["area"].item() * share, rel=1e-5)


def config(**options):
    return DataConfig(**{"decode": "reduced", "image_size": 32, "workers": 0, "batch_size_per_device": 1, **options})


@pytest.fixture()
def table(tmp_path):
    return one_picture(tmp_path, waves(301, 200), [[30, 40, 200, 160]], (200, 301))


def pixels_of_loaders(table, c):
    """(decoded size, samples) of training, of its evaluations, and of an evaluation of the run afterwards."""
    _, training = loader_of_settings(table, replace(c, flip=False), seed=0, stride=1)
    transform = val_transform(c.image_size, c.scales, c.max_size)
    of_run = validation_loader(table, transform, batch_size=1, workers=0, stride=1, least_size=least_size_of(c))
    asked = {"data": vars(c), "eval": {"batch_size_per_device": 1}}
    afterwards = _loader(table, asked, 1, torch.device("cpu"))
    return [next(iter(loader)) for loader in (training, of_run, afterwards)]


def test_training_and_every_evaluation_see_the_same_pixels(table):
    c = config()
    full = pixels_of_loaders(table, replace(c, decode="full"))
    reduced = pixels_of_loaders(table, c)
    for batch in reduced:
        assert torch.equal(batch.images, reduced[0].images)
        assert torch.equal(batch.targets[0]["orig_size"], torch.tensor([200, 301]))
    for batch in full:
        assert torch.equal(batch.images, full[0].images)
    apart = (full[0].images.int() - reduced[0].images.int()).abs().float()
    assert 0 < apart.mean() < 3
    assert torch.allclose(full[0].targets[0]["boxes"], reduced[0].targets[0]["boxes"], atol=1e-3)


def test_a_run_from_before_the_setting_is_evaluated_in_full(table):
    old = {name: value for name, value in vars(config()).items() if name != "decode"}
    loader = _loader(table, {"data": old, "eval": {"batch_size_per_device": 1}}, 1, torch.device("cpu"))
    whole = pixels_of_loaders(table, config(decode="full"))[0]
    assert torch.equal(next(iter(loader)).images, whole.images)


def test_cached_images_are_the_reduced_ones(table):
    least_size = least_size_of(config())
    cached = DetectionDataset(table, unchanged, cache_images=True, least_size=least_size)[SampleKey(0, 0)]
    fresh = DetectionDataset(table, unchanged, least_size=least_size)[SampleKey(0, 0)]
    whole = DetectionDataset(table, unchanged, cache_images=True)[SampleKey(0, 0)]
    assert torch.equal(cached[0], fresh[0]) and torch.equal(cached[1]["boxes"], fresh[1]["boxes"])
    assert tuple(cached[0].shape) == (3, 50, 75) and tuple(whole[0].shape) == (3, 200, 301)


def test_another_picture_in_the_place_of_the_annotated_one_is_told(table, tmp_path):
    """Half as large: its reduced sides are those that a quarter of the annotated one would have."""
    waves(150, 100).save(tmp_path / "0.png", "JPEG")
    dataset = DetectionDataset(table, unchanged, least_size=least_size_of(config()))
    with pytest.raises(BadInput, match="the picture has 150 x 100 pixels .* but 301 x 200 by the annotations"):
        dataset[SampleKey(0, 0)]


def test_a_resume_says_that_the_decoding_is_another():
    before = {"data": {"decode": "full", "image_size": 640}}
    after = {"data": {"decode": "reduced", "image_size": 640}}
    assert [str(change) for change in changes(before, after, True)] == ["data.decode full -> reduced: used"]


# ---- never less than what is asked for -------------------------------------------------------------------------------

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


class Magnified:
    """How much larger the last transform made what was in the image, along both sides."""

    def __init__(self, monkeypatch):
        self.factors = np.ones(2)
        for module, name in (
            (geometry, "resize"),
            (zoom_crop_colour, "resize"),
            (yolov3_transforms, "resize_by"),
        ):
            monkeypatch.setattr(module, name, self.recorded(getattr(module, name)))

    def recorded(self, resize):
        def wrapped(image, target, size_hw, *more):
            self.factors *= np.array(size_hw) / np.array(image.shape[-2:])
            return resize(image, target, size_hw, *more)

        return wrapped


@pytest.mark.parametrize("image_hw", [(480, 640), (240, 900)])
@pytest.mark.parametrize("name", CASES)
def test_no_augmentation_asks_for_more_than_is_foreseen(name, image_hw, monkeypatch):
    """A crop that is made larger needs more pixels of its image than the size of the batch; the bound is also met
    nearly, or it would be useless."""
    c = config(**CASES[name])
    transform = train_transform(c)
    magnified = Magnified(monkeypatch)
    sizes = training_sizes(c)
    image = torch.zeros(3, *image_hw, dtype=torch.uint8)
    asked = np.array(least_size_of(c)(image_hw)) / MARGIN
    boxes = torch.tensor([[20.0, 30, 90, 110], [300, 100, 420, 200], [500, 160, 600, 230]])
    target = {
        "image_id": 0, "boxes": boxes, "labels": torch.zeros(3, dtype=torch.int64), "area": torch.ones(3),
        "iscrowd": torch.zeros(3, dtype=torch.int64), "relations": torch.zeros((0, 3), dtype=torch.int64),
        "orig_size": torch.tensor(image_hw), "size": torch.tensor(image_hw),
    }  # fmt: skip
    most = np.zeros(2)
    for seed in range(120):
        magnified.factors = np.ones(2)
        size = () if sizes is None else (sizes.sizes_hw[seed % len(sizes.sizes_hw)],)
        transform(image, target, generator(seed), *size)
        most = np.maximum(most, magnified.factors * image_hw)
    assert (most <= asked * 1.02).all(), (most, asked)
    assert (most >= asked * 0.3).any(), (most, asked)


def test_what_uses_images_in_their_own_size_gets_them_whole():
    assert least_size_of(config(decode="full")) is None
    assert least_size_of(config(mixup=True)) is None
    assert least_size_of(config(tile=640)) is None, "windows lie in pixels of the whole picture"
    assert least_size_of(config(augment=["RandomHorizontalFlip"])) is None
    assert least_size_of(config(mosaic=0.5)) == least_size_of(config()) == LeastSize((32, 32))
