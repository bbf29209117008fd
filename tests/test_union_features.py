"""Features of boxes and of union boxes against Scene-Graph-Benchmark's own code.

    python -m pytest tests/test_union_features.py

`data/relation_heads/union.npz`: what its feature extractors (6f75881, MIT) give for random maps, boxes and weights, all
of which it holds.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import LevelMapper

from toolkit.models.faster_rcnn.build import WholePixelPool
from toolkit.scene_graphs.union import AllLevelsPool, UnionFeatures

FILE = Path(__file__).parent / "data" / "relation_heads" / "union.npz"
CHANNELS, WIDTH = 2, 6


@pytest.fixture(scope="module")
def data():
    with np.load(FILE) as stored:
        return {name: torch.from_numpy(stored[name]) for name in stored.files}


@pytest.fixture(scope="module")
def given(data):
    """Maps by name; boxes that end behind their last pixel; pairs; pairs per image; sizes."""
    maps = {str(level): data[f"map/{level}"] for level in range(4)}
    boxes = data["boxes_last_pixel"] + torch.tensor([0.0, 0, 1, 1])
    return maps, boxes, data["pairs"], data["num_pairs"].tolist(), data["sizes_hw"]


def whole_pixel_pool() -> WholePixelPool:
    pool = MultiScaleRoIAlign(list("0123"), output_size=7, sampling_ratio=2)
    pool.scales, pool.map_levels = [1 / 4, 1 / 8, 1 / 16, 1 / 32], LevelMapper(2, 5)
    return WholePixelPool(pool)


def state_of(data, prefix: str, names: dict[str, str]) -> dict:
    found = {}
    for key, value in data.items():
        if key.startswith(f"{prefix}/state/"):
            name = key.removeprefix(f"{prefix}/state/")
            theirs = next(part for part in names if name.startswith(part))
            found[names[theirs] + name.removeprefix(theirs)] = value
    return found


def test_box_features(data, given):
    maps, boxes, _, _, sizes = given
    head = TwoMLPHead(CHANNELS * 49, WIDTH)
    head.load_state_dict(state_of(data, "box", {"fc6": "fc6", "fc7": "fc7"}))
    with torch.no_grad():
        pooled = whole_pixel_pool()(dict(maps), list(boxes.split(data["num_objects"].tolist())), sizes.tolist())
        torch.testing.assert_close(head(pooled), data["box/features"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["all", "separate"])
def test_union_features_of_all_levels(data, given, name):
    pool, head = AllLevelsPool(whole_pixel_pool(), CHANNELS), TwoMLPHead(CHANNELS * 49, WIDTH)
    union = UnionFeatures(pool, head, CHANNELS, separate_spatial=WIDTH if name == "separate" else 0).eval()
    names = {"feature_extractor.pooler.reduce_channel.0": "pool.reduce", "feature_extractor": "head",
             "spatial_fc": "spatial", "rect_conv": "rectangles.conv"}  # fmt: skip
    own = union.state_dict()
    union.load_state_dict({k: v for k, v in own.items() if "num_batches" in k} | state_of(data, name, names))
    with torch.no_grad():
        features, spatial = union(*given)
    torch.testing.assert_close(features, data[f"{name}/features"], rtol=1e-4, atol=1e-5)
    if name == "separate":
        torch.testing.assert_close(spatial, data["separate/spatial"], rtol=1e-4, atol=1e-5)
    else:
        assert spatial is None


def test_no_pairs():
    pool = AllLevelsPool(whole_pixel_pool(), CHANNELS)
    maps = {str(level): torch.randn(1, CHANNELS, 32 >> level, 32 >> level) for level in range(4)}
    assert pool(maps, [torch.zeros(0, 4)], [(128, 128)]).shape == (0, CHANNELS, 7, 7)
