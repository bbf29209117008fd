"""data.augment: all that belongs to a box follows it through torchvision's transforms, and mistakes are told."""

from dataclasses import replace

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import ROOT
from samples import assert_same, assert_well_formed, generator, painted, sample, samples, tensors_of

from toolkit.base.errors import BadInput
from toolkit.data.pipeline import train_transform
from toolkit.data.transforms.geometry import recheck_boxes
from toolkit.data.transforms.policy import policy_of
from toolkit.run.settings import DataConfig

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
WHOLE_PIXELS = policy_of(
    [
        "RandomHorizontalFlip",
        "RandomVerticalFlip",
        {"Pad": {"padding": 3}},
        {"RandomCrop": {"size": [20, 20], "pad_if_needed": True}},
    ]
)


@patient
@given(samples(), st.integers(0, 2**40))
def test_all_that_belongs_to_a_box_follows_it(sample, seed):
    image, target = sample
    before = tensors_of(target)
    state = torch.random.get_rng_state()
    out, got = POLICY(image, target, generator(seed))
    assert_well_formed(out, got, target)
    assert recheck_boxes(out, got)["boxes"].equal(got["boxes"])
    torch.testing.assert_close(
        got["area"],
        (got["boxes"][:, 2:] - got["boxes"][:, :2]).prod(1),
        rtol=1e-3,
        atol=1e-8,
    )
    assert_same((out, got), POLICY(image, target, generator(seed)))
    assert torch.random.get_rng_state().equal(state)  # the global generator is left alone
    assert_same((image, before), (image, tensors_of(target)))


@patient
@given(
    st.integers(0, 70),
    st.integers(0, 50),
    st.integers(1, 60),
    st.integers(1, 50),
    st.integers(0, 99),
)
def test_a_painted_box_is_where_its_box_is_said_to_be(x, y, width, height, seed):
    image, target = painted(
        [
            [
                x,
                y,
                min(80, x + width),
                min(60, y + height),
            ]
        ]
    )
    out, got = WHOLE_PIXELS(image, target, generator(seed))
    rows = out[0].amax(1).nonzero()[:, 0]
    columns = out[0].amax(0).nonzero()[:, 0]
    shown = [[columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]] if len(rows) else []
    assert got["boxes"].tolist() == shown


@pytest.mark.parametrize(
    ("entries", "words"),
    [
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
    ],
)
def test_mistakes_are_told_before_the_first_step(entries, words):
    with pytest.raises(BadInput, match=words):
        policy_of(entries)


@pytest.mark.parametrize("content", [STRONG, {"augment": STRONG}])
def test_a_file_is_as_good_as_a_list(tmp_path, content):
    file = tmp_path / "policy.yaml"
    file.write_text(yaml.safe_dump(content))
    assert repr(policy_of(str(file))) == repr(POLICY)


@pytest.mark.parametrize("recipe", ["detr", "ssd", "yolov3"])
def test_the_policy_comes_before_each_recipe(recipe):
    image, target = sample([[5, 5, 30, 30]])
    settings = DataConfig(recipe=recipe, image_size=32, flip=False)
    entries = [{"RandomVerticalFlip": {"p": 1.0}}]
    both = train_transform(replace(settings, augment=entries))(
        image,
        target,
        generator(),
        (32, 32),
    )
    flipped = policy_of(entries)(image, target, generator())
    assert_same(both, train_transform(settings)(*flipped, generator(), (32, 32)))


def test_the_policy_of_every_configuration_works():
    found = 0
    for path in (ROOT / "configs").rglob("*.yaml"):
        data = yaml.safe_load(path.read_text()).get("data") or {}
        if data.get("augment"):
            policy_of(data["augment"])
            found += 1
    assert found
