"""data.augment and data.repeat_factor: boxes stay right, draws are functions of (seed, epoch, index), resume is exact.

Run with `pytest tests/test_augment.py -n 0`.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.data.dataset import DetectionDataset, MixedDataset
from toolkit.data.formats import open_dataset
from toolkit.data.pipeline import loader_of_settings, train_transform
from toolkit.data.sampling import EpochSampler, SampleKey, repeat_factors
from toolkit.data.shapes import make_shapes
from toolkit.data.transforms.geometry import recheck_boxes
from toolkit.data.transforms.policy import policy_of
from toolkit.errors import BadInput
from toolkit.runs.settings import DataConfig

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
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


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@st.composite
def samples(draw):
    height, width, count = draw(st.integers(24, 80)), draw(st.integers(24, 80)), draw(st.integers(0, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ends = np.sort(rng.integers(0, (width, height), (count, 2, 2)), axis=1)
    ends[:, 1] += 1
    boxes = torch.from_numpy(ends.reshape(-1, 4)).float()
    relations = torch.from_numpy(rng.integers(0, max(1, count), (count, 3)))
    image = torch.from_numpy(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).permute(2, 0, 1)
    return image, {
        "image_id": 1,
        "boxes": boxes,
        "labels": torch.arange(count),
        "area": (boxes[:, 2:] - boxes[:, :2]).prod(1),
        "iscrowd": torch.arange(count) % 2,
        "relations": relations,
        "attributes": torch.arange(count)[:, None] + 1,
        "orig_size": torch.tensor((height, width)),
        "size": torch.tensor((height, width)),
    }


POLICY = policy_of(STRONG)


@patient
@given(samples(), st.integers(0, 2**40))
def test_all_that_belongs_to_a_box_follows_it(sample, seed):
    image, target = sample
    before = {key: value.clone() for key, value in target.items() if isinstance(value, torch.Tensor)}
    out, got = POLICY(image, target, generator(seed))
    assert all(torch.equal(target[key], value) for key, value in before.items()), "the given target stays as it is"
    checked = recheck_boxes(out, got)
    assert torch.equal(checked["boxes"], got["boxes"]) and out.dtype == torch.uint8
    left = got["labels"]
    assert torch.equal(got["iscrowd"], left % 2) and torch.equal(got["attributes"][:, 0], left + 1)
    ends = {tuple(map(int, (left[s], left[o], p))) for s, o, p in got["relations"].tolist()}
    assert ends == {(s, o, p) for s, o, p in target["relations"].tolist() if s in left and o in left}
    assert torch.allclose(got["area"], (got["boxes"][:, 2:] - got["boxes"][:, :2]).prod(1), rtol=1e-3)
    state = torch.random.get_rng_state()
    again, same = POLICY(image, target, generator(seed))
    assert torch.equal(out, again) and torch.equal(got["boxes"], same["boxes"])
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator is left alone"


@patient
@given(samples(), st.integers(0, 99))
def test_exact_geometry(sample, seed):
    """A painted box is where its box is said to be."""
    image, target = sample
    image = torch.zeros_like(image)
    if not len(target["boxes"]):
        return
    x1, y1, x2, y2 = target["boxes"][0].int().tolist()
    image[:, y1:y2, x1:x2] = 255
    policy = policy_of(
        [
            {"RandomHorizontalFlip": {"p": 0.5}},
            {"RandomVerticalFlip": {"p": 0.5}},
            {"Pad": {"padding": 3}},
            {"RandomCrop": {"size": [20, 20], "pad_if_needed": True}},
        ]
    )
    out, got = policy(image, target, generator(seed))
    rows, columns = out[0].amax(1).nonzero()[:, 0], out[0].amax(0).nonzero()[:, 0]
    found = got["boxes"][got["labels"] == 0]
    if len(rows) == 0:
        assert len(found) == 0
    else:
        assert found.tolist() == [[columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["RandomHorizontalFlp"], "did you mean RandomHorizontalFlip"),
        ([{"RandomZoomOut": {"fil": 0}}], "fil"),
        ([{"RandomRotation": {"degrees": "far"}}], "entry 1"),
        ([{"RandomRotation": {}}], "degrees"),
        (["Normalize"], "no transform"),
        (["MixUp"], "no transform"),
        ([{"RandomHorizontalFlip": {}, "Pad": {}}], "one name"),
        ([{"RandomHorizontalFlip": [0.5]}], "by name"),
        ([{"RandomApply": {"transforms": ["Nothing"]}}], "Nothing"),
        (["Grayscale"], "shape"),
        ("none.yaml", "none.yaml"),
        ({"Pad": {}}, "expected a list"),
    ],
)
def test_mistakes_are_told_before_the_first_step(entries, words):
    with pytest.raises(BadInput, match=words):
        policy_of(entries)


def test_a_file_is_as_good_as_a_list(tmp_path):
    for name, content in (("list.yaml", STRONG), ("settings.yaml", {"augment": STRONG})):
        (tmp_path / name).write_text(yaml.safe_dump(content))
        assert repr(policy_of(str(tmp_path / name))) == repr(POLICY)


@pytest.mark.parametrize("recipe", ["detr", "ssd", "yolov3"])
def test_the_policy_comes_before_each_recipe(recipe):
    image = torch.randint(0, 256, (3, 40, 60), dtype=torch.uint8, generator=generator())
    target = {
        "image_id": 1,
        "boxes": torch.tensor([[5.0, 5, 30, 30]]),
        "labels": torch.tensor([0]),
        "iscrowd": torch.tensor([0]),
        "area": torch.tensor([625.0]),
        "size": torch.tensor((40, 60)),
        "orig_size": torch.tensor((40, 60)),
    }
    settings = DataConfig(recipe=recipe, image_size=32, flip=False)
    plain = train_transform(settings)
    both = train_transform(replace(settings, augment=[{"RandomVerticalFlip": {"p": 1.0}}]))
    size = ((32, 32),)
    out, got = both(image, target, generator(), *size)
    upside, flipped = policy_of([{"RandomVerticalFlip": {"p": 1.0}}])(image, target, generator())
    expected, boxes = plain(upside, flipped, generator(), *size)
    assert torch.equal(out, expected) and torch.equal(got["boxes"], boxes["boxes"])


# ---- repeat factors


def test_factors_are_those_of_the_paper():
    labels = [np.array([0]), np.array([0, 1]), np.array([0]), np.array([], np.int64), np.array([0])] * 20
    factors = repeat_factors(labels, 2, 0.45)  # class 1 is in 0.2 of the images, class 0 in 0.8
    assert np.allclose(factors[:5], [1, 1.5, 1, 1, 1])
    assert (repeat_factors(labels, 2, 0.0) == 1).all()
    with pytest.raises(BadInput, match="repeat_factor"):
        repeat_factors(labels, 2, 1.5)
    with pytest.raises(BadInput, match="predicate_repeat_factor is -1"):
        repeat_factors(labels, 2, -1, "predicate_repeat_factor")


@patient
@given(st.lists(st.floats(1, 4), min_size=4, max_size=30), st.integers(1, 3), st.integers(0, 9), st.data())
def test_each_image_as_often_as_its_factor_says(factors, world_size, seed, data):
    repeats = np.array(factors)
    groups = data.draw(st.none() | st.just(np.arange(len(factors)) % 2))
    samplers = [
        EpochSampler(len(factors), 1, rank, world_size, seed, groups, repeats=repeats) for rank in range(world_size)
    ]
    total = round(sum(factors))
    for epoch in (0, 1):
        keys = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            keys += [key for batch in sampler for key in batch]
        assert len(keys) == total and len(set(keys)) == total  # no sample twice: turns tell them apart
        counts = np.bincount([key.index for key in keys], minlength=len(factors))
        assert (abs(counts - repeats * total / repeats.sum()) < 1).all()
        for index in range(len(factors)):
            assert sorted(key.turn for key in keys if key.index == index) == list(range(counts[index]))


@given(st.integers(0, 12))
def test_resume_continues_the_same_order(done):
    repeats = np.array([1, 2.5, 1, 3, 1.2, 1])
    whole = EpochSampler(6, 1, seed=3, repeats=repeats)
    whole.set_epoch(2)
    keys = list(whole)
    done = min(done, len(keys))
    first = EpochSampler(6, 1, seed=3, repeats=repeats)
    first.set_epoch(2)
    first.advance_batches(done)
    second = EpochSampler(6, 1, seed=3, repeats=repeats)
    assert second.load_state_dict(first.state_dict()) == []
    assert list(second) == keys[done:]


def test_another_cut_of_repeated_and_grouped_images_has_the_same_samples():
    """As a resumed run with other batches asks for."""
    sampler = EpochSampler(10, 2, groups=np.arange(10) % 2, repeats=np.full(10, 1.5))
    assert sampler.cut_as(1, 3).num_samples == sampler.num_samples == 15


def test_repeated_images_are_augmented_anew(tmp_path):
    make_shapes(tmp_path / "d", 4, 1, 64)
    table = open_dataset("train", path=tmp_path / "d", cache_dir=tmp_path / "c")
    dataset = DetectionDataset(table, train_transform(DataConfig(image_size=48, photometric=True, zoom_out=3.0)), 5)
    zero, again, one = (dataset[SampleKey(0, 1, None, turn)][0] for turn in (0, 0, 1))
    assert torch.equal(zero, again) and not torch.equal(zero, one)


# ---- the last epochs


def test_the_last_epochs_are_without_what_is_named(tmp_path):
    make_shapes(tmp_path / "d", 4, 1, 64)
    table = open_dataset("train", path=tmp_path / "d", cache_dir=tmp_path / "c")
    c = DataConfig(
        image_size=48,
        zoom_out=4.0,
        iou_crop=True,
        augment=STRONG,
        multi_scale=[32, 64],
        workers=0,
        flip=False,
        batch_size_per_device=2,
        plain_without=["zoom_out", "iou_crop", "augment", "multi_scale"],
    )
    _, loader = loader_of_settings(table, c, seed=0, stride=1)
    dataset = loader.dataset.dataset
    assert isinstance(dataset, MixedDataset) and dataset.has_plain_epochs
    dataset.plan(2, 40, 4)
    plain = DetectionDataset(table, train_transform(DataConfig(image_size=48, flip=False)), 0)
    last, sample = dataset[SampleKey(9, 1, (32, 32))], plain[SampleKey(9, 1)]
    assert torch.equal(last[0], sample[0]) and torch.equal(last[1]["boxes"], sample[1]["boxes"])
    assert dataset[SampleKey(7, 1, (32, 32))][0].shape[-2:] == (32, 32)
    with pytest.raises(BadInput, match="mosaic cannot go on"):
        loader_of_settings(table, replace(c, mosaic=0.5, multi_scale=[]), seed=0, stride=1)
    with pytest.raises(BadInput, match="multi_scale_pixels"):
        loader_of_settings(table, replace(c, multi_scale_pixels=True), seed=0, stride=1)


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_policy_of_every_configuration_works(path):
    entries = (yaml.safe_load(path.read_text()).get("data") or {}).get("augment")
    if entries:
        policy_of(entries)
