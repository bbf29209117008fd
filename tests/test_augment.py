"""data.augment and data.repeat_factor: boxes stay right, draws are functions of (seed, epoch, index)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import ROOT
from samples import assert_same, assert_well_formed, generator, painted, sample, samples, shapes_table

from toolkit.base.errors import BadInput
from toolkit.data.dataset import DetectionDataset, MixedDataset
from toolkit.data.pipeline import loader_of_settings, repeat_factors, train_transform
from toolkit.data.sampling import EpochSampler, SampleKey
from toolkit.data.transforms.geometry import recheck_boxes
from toolkit.data.transforms.policy import policy_of
from toolkit.run.settings import DataConfig

CONFIGS = ROOT / "configs"
patient = settings(deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
STRONG = [
    {"RandomPhotometricDistort": {"p": 0.5}},
    {"RandomZoomOut": {"fill": 0, "side_range": [1.0, 2.0]}},
    {"RandomApply": {"p": 0.8, "transforms": ["RandomIoUCrop"]}},
    "SanitizeBoundingBoxes",
    "RandomHorizontalFlip",
    {"RandomVerticalFlip": {"p": 0.5}},
    {"RandomRotation": {"degrees": 20}},
    {"GaussianBlur": {"kernel_size": 3}},
]


POLICY = policy_of(STRONG)
EXACT = policy_of(["RandomHorizontalFlip", "RandomVerticalFlip", {"Pad": {"padding": 3}},
                   {"RandomCrop": {"size": [20, 20], "pad_if_needed": True}}])  # fmt: skip


@patient
@given(samples(), st.integers(0, 2**40))
def test_all_that_belongs_to_a_box_follows_it(sample, seed):
    image, target = sample
    before = {key: value.clone() for key, value in target.items() if isinstance(value, torch.Tensor)}
    state = torch.random.get_rng_state()
    out, got = POLICY(image, target, generator(seed))
    assert all(torch.equal(target[key], value) for key, value in before.items()), "the given target stays as it is"
    checked = recheck_boxes(out, got)
    assert_well_formed(out, checked, target)
    assert torch.equal(checked["boxes"], got["boxes"])
    assert torch.allclose(got["area"], (got["boxes"][:, 2:] - got["boxes"][:, :2]).prod(1), rtol=1e-3)
    assert_same((out, got), POLICY(image, target, generator(seed)))
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator is left alone"


@patient
@given(st.integers(0, 70), st.integers(0, 50), st.integers(1, 60), st.integers(1, 50), st.integers(0, 99))
def test_exact_geometry(x, y, width, height, seed):
    """A painted box is where its box is said to be."""
    image, target = painted([[x, y, min(80, x + width), min(60, y + height)]])
    out, got = EXACT(image, target, generator(seed))
    rows, columns = out[0].amax(1).nonzero()[:, 0], out[0].amax(0).nonzero()[:, 0]
    shown = [[columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]] if len(rows) else []
    assert got["boxes"].tolist() == shown


@pytest.mark.parametrize(("entries", "words"), [
    (["RandomHorizontalFlp"], "did you mean RandomHorizontalFlip"),
    ([{"RandomZoomOut": {"fil": 0}}], "fil"),
    ([{"RandomRotation": {"degrees": "far"}}], "entry 1"),
    (["Normalize"], "is not a transform"),
    ([{"RandomHorizontalFlip": {}, "Pad": {}}], "one name"),
    ([{"RandomHorizontalFlip": [0.5]}], "by name"),
    ([{"RandomApply": {"transforms": ["Nothing"]}}], "Nothing"),
    (["Grayscale"], "shape"),
    ("none.yaml", "none.yaml"),
    ({"Pad": {}}, "expected a list"),
])  # fmt: skip
def test_mistakes_are_told_before_the_first_step(entries, words):
    with pytest.raises(BadInput, match=words):
        policy_of(entries)


def test_a_file_is_as_good_as_a_list(tmp_path):
    for name, content in (("list.yaml", STRONG), ("settings.yaml", {"augment": STRONG})):
        (tmp_path / name).write_text(yaml.safe_dump(content))
        assert repr(policy_of(str(tmp_path / name))) == repr(POLICY)


@pytest.mark.parametrize("recipe", ["detr", "ssd", "yolov3"])
def test_the_policy_comes_before_each_recipe(recipe):
    image, target = sample([[5, 5, 30, 30]])
    settings = DataConfig(recipe=recipe, image_size=32, flip=False)
    entries = [{"RandomVerticalFlip": {"p": 1.0}}]
    both = train_transform(replace(settings, augment=entries))(image, target, generator(), (32, 32))
    upside, flipped = policy_of(entries)(image, target, generator())
    assert_same(both, train_transform(settings)(upside, flipped, generator(), (32, 32)))


def test_factors_are_those_of_the_paper():
    labels = [np.array([0]), np.array([0, 1]), np.array([0]), np.array([], np.int64), np.array([0])] * 20
    factors = repeat_factors(labels, 2, 0.45)  # class 1 is in 0.2 of the images, class 0 in 0.8
    assert np.allclose(factors[:5], [1, 1.5, 1, 1, 1])
    assert (repeat_factors(labels, 2, 0.0) == 1).all()
    with pytest.raises(BadInput, match="repeat_factor"):
        repeat_factors(labels, 2, 1.5)
    with pytest.raises(BadInput, match="predicate_repeat_factor is -1"):
        repeat_factors(labels, 2, -1, "predicate_repeat_factor")


def test_another_cut_of_repeated_and_grouped_images_has_the_same_samples():
    """As a resumed run with other batches asks for."""
    sampler = EpochSampler(10, 2, groups=np.arange(10) % 2, repeats=np.full(10, 1.5))
    assert sampler.cut_as(1, 3).num_samples == sampler.num_samples == 15


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return shapes_table(tmp_path_factory.mktemp("shapes"), 4)


def test_repeated_images_are_augmented_anew(table):
    dataset = DetectionDataset(table, train_transform(DataConfig(image_size=48, photometric=True, zoom_out=3.0)), 5)
    zero, again, one = (dataset[SampleKey(0, 1, None, turn)][0] for turn in (0, 0, 1))
    assert torch.equal(zero, again) and not torch.equal(zero, one)


def test_the_last_epochs_are_without_what_is_named(table):
    c = DataConfig(image_size=48, zoom_out=4.0, iou_crop=True, augment=STRONG, multi_scale=[32, 64], flip=False)
    without = ["zoom_out", "iou_crop", "augment", "multi_scale"]
    c = replace(c, workers=0, batch_size_per_device=2, plain_without=without)
    _, loader = loader_of_settings(table, c, seed=0, stride=1)
    dataset = loader.dataset.dataset
    assert isinstance(dataset, MixedDataset) and dataset.has_plain_epochs
    dataset.plan(2, 40, 4)
    plain = DetectionDataset(table, train_transform(DataConfig(image_size=48, flip=False)), 0)
    assert_same(dataset[SampleKey(9, 1, (32, 32))], plain[SampleKey(9, 1)])
    assert dataset[SampleKey(7, 1, (32, 32))][0].shape[-2:] == (32, 32)
    with pytest.raises(BadInput, match="mosaic cannot go on"):
        loader_of_settings(table, replace(c, mosaic=0.5, multi_scale=[]), seed=0, stride=1)
    with pytest.raises(BadInput, match="multi_scale_pixels"):
        loader_of_settings(table, replace(c, multi_scale_pixels=True), seed=0, stride=1)


def test_the_policy_of_every_configuration_works():
    policies = [(yaml.safe_load(path.read_text()).get("data") or {}).get("augment") for path in CONFIGS.rglob("*.yaml")]
    used = [entries for entries in policies if entries]
    assert used
    for entries in used:
        policy_of(entries)
